/* From a graph to a program: which values share memory, and where each lies.
 *
 * 1. What adds to a value lies where that value does.
 * 2. An output takes over the storage of an input where ops.def lets it lie there, both are whole values of one
 *    type and size, and no other node needs the input later: in place.
 * 3. Storages are placed largest first, each at the lowest offset where it meets none that is in use at the same
 *    time. Greedy, and the same for the same graph. What arrives in exchanges has memory apart, in which all
 *    ranks place alike: nothing else takes it over, and nothing of it depends on one rank's part.
 * 4. Memory that is lent (lg_graph_lend) is free until what will lie there is first used. Storages go there first, and into
 *    the arena where they find no place.
 */
#include "base/check.h"
#include "base/lifetimes.h"
#include "kernels/graph/program_private.h"
#include <stdlib.h>
#include <string.h>

/* ---- what shares memory ---- */

static bool is_whole(const lg_graph *g, const struct lg_use *u)
{
    const struct lg_value *v = &g->value[u->value];
    return v->bound < 0 && !v->room && u->offset == 0 && lg_is_contiguous(u->t) &&
           lg_tensor_bytes(u->t) == v->bytes;
}

/* The input that this output may replace; NULL: none. */
static const struct lg_use *find_replaced(const lg_graph *g, int node, const struct lg_use *use,
                                          int n, const struct lg_use *out)
{
    for (const struct lg_use *in = use; in < use + n; in++) {
        bool may = (out->operand->may_be & (uint32_t)1 << in->number) ||
                   ((out->operand->may_be_first & (uint32_t)1 << in->number) && in->element == 0);
        if (!may || in->operand->out || !is_whole(g, in) || in->t->dtype != out->t->dtype ||
            lg_tensor_bytes(in->t) != lg_tensor_bytes(out->t) || g->value[in->value].last != node)
            continue;
        int readers = 0;
        for (const struct lg_use *u = use; u < use + n; u++) readers += u->value == in->value;
        if (readers == 1) return in;
    }
    return NULL;
}

static void share_in_place(const lg_graph *g, lg_program *p)
{
    for (int n = 0; n < g->n_nodes; n++) {
        struct lg_use use[LG_USES_MAX];
        int count = lg_graph_uses(g, n, use);
        bool taken[LG_USES_MAX] = {false};
        for (int i = 0; i < count; i++) {
            if (!use[i].operand->out || g->value[use[i].value].first != n) continue;
            int again = g->value[use[i].value].again;
            if (again >= 0) p->value[use[i].value].storage = p->value[again].storage;
            if (again >= 0 || !is_whole(g, &use[i])) continue;
            const struct lg_use *in = find_replaced(g, n, use, count, &use[i]);
            if (!in || taken[in - use]) continue;
            taken[in - use] = true;
            p->value[use[i].value].storage = p->value[in->value].storage;
        }
    }
}

/* ---- where it lies ---- */

/* Whether value i lies in the arena, or in the memory for what arrives. */
static bool lies_in(const lg_graph *g, const lg_program *p, int i, int place)
{
    const struct lg_value *v = &g->value[i];
    return v->bound < 0 && v->first >= 0 &&
           (g->value[p->value[i].storage].room > 0) == (place == LG_PLACE_EXCHANGED);
}

/* What arrives may do so as soon as the exchange before is over: exchange.h. */
static int exchange_before(const lg_graph *g, int node)
{
    do node--;
    while (node > 0 && g->node[node].kind != LG_NODE_EXCHANGE);
    return LG_MAX(node, 0);
}

/* The storages' lifetimes, in the order of the values that they began with; number[value]: its storage's. */
static int find_storages(const lg_graph *g, const lg_program *p, int where, struct lg_lifetime *ret,
                         int *ret_number)
{
    int n = 0;
    for (int i = 0; i < g->n_values; i++) {
        const struct lg_value *v = &g->value[i];
        if (!lies_in(g, p, i, where) || p->value[i].storage != i) continue;
        ret_number[i] = n;
        ret[n++] = (struct lg_lifetime){.first = v->room ? exchange_before(g, v->first) : v->first,
                                        .bytes = LG_MAX(v->bytes, v->room)};
    }
    for (int i = 0; i < g->n_values; i++) {
        const struct lg_value *v = &g->value[i];
        if (!lies_in(g, p, i, where)) continue;
        ret_number[i] = ret_number[p->value[i].storage];
        ret[ret_number[i]].last = LG_MAX(ret[ret_number[i]].last, v->last);
    }
    return n;
}

static size_t end_of(const lg_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->rank; i++) last += (t->dim[i] - 1) * t->stride[i];
    return (size_t)(last + 1) * lg_dtype_bytes(t->dtype);
}

/* What of a sum a node uses is not free from then on. part: those of the sum, up to `end`. */
static void take_parts(const struct lg_lent *part, const struct lg_lent *end,
                       const struct lg_use *u, int node, int *first)
{
    for (int i = 0; &part[i] < end && part[i].bound == part->bound; i++)
        if (first[i] < 0 && part[i].offset < u->offset + end_of(u->t) &&
            u->offset < part[i].offset + part[i].bytes)
            first[i] = node;
}

/* The nodes that first use what is lent; -1: none does. */
static int *find_first_uses(const lg_graph *g)
{
    const struct lg_lent *end = g->lent + g->n_lent;
    int *first = malloc((size_t)g->n_lent * sizeof *first);
    int *of = malloc((size_t)g->n_bound * sizeof *of); /* bound: its first part */
    LG_ASSERT(first && of);
    for (int i = 0; i < g->n_bound; i++) of[i] = -1;
    for (int k = g->n_lent - 1; k >= 0; k--) {
        first[k] = -1;
        of[g->lent[k].bound] = k;
    }
    for (int n = 0; n < g->n_nodes; n++) {
        struct lg_use use[LG_USES_MAX];
        const int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++) {
            const int bound = g->value[use[i].value].bound, k = bound < 0 ? -1 : of[bound];
            if (k >= 0) take_parts(&g->lent[k], end, &use[i], n, &first[k]);
        }
    }
    free(of);
    return first;
}

/* Of what is lent: from when on it is not free; what nobody uses is never, nor what lies between. Returns how many. */
static int find_taken(const lg_graph *g, struct lg_lifetime *ret)
{
    int n = 0, *first = find_first_uses(g);
    size_t end = 0;
    for (int k = 0; k < g->n_lent; k++) {
        const struct lg_lent *part = &g->lent[k];
        if (end < part->at)
            ret[n++] = (struct lg_lifetime){
                .at = end, .bytes = part->at - end, .first = 0, .last = g->n_nodes};
        ret[n++] = (struct lg_lifetime){
            .at = part->at, .bytes = part->bytes, .first = LG_MAX(first[k], 0), .last = g->n_nodes};
        end = part->at + part->bytes;
    }
    free(first);
    return n;
}

/* The most bytes that are in use at once. */
static size_t find_most(const struct lg_lifetime *l, int n, int nodes)
{
    size_t most = 0, now = 0;
    size_t *begins = calloc((size_t)nodes + 2, sizeof *begins);
    size_t *ends = calloc((size_t)nodes + 2, sizeof *ends);
    LG_ASSERT(begins && ends);
    for (int i = 0; i < n; i++) {
        begins[l[i].first] += l[i].bytes;
        ends[l[i].last + 1] += l[i].bytes;
    }
    for (int k = 0; k <= nodes; k++) {
        now += begins[k] - ends[k];
        most = LG_MAX(most, now);
    }
    free(begins);
    free(ends);
    return most;
}

/* Of an input that is lent to, in one part of the program. */
struct input_use {
    int bound;
    bool backward;
    int node; /* the first that uses it */
    struct lg_lifetime l;
};

/* The node of the last one that is used before node k; 0: there is none. */
static int node_before(const struct input_use *use, int n, int k)
{
    while (n > 0 && use[n - 1].node == k) n--;
    return n > 0 ? use[n - 1].node : 0;
}

/* In the order of the nodes that they are first used by. */
static int find_input_uses(const lg_graph *g, struct input_use *ret)
{
    int n = 0;
    int *at = malloc((size_t)g->n_bound * sizeof *at); /* its use in this part; -1: none yet */
    LG_ASSERT(at);
    for (int k = 0; k < g->n_nodes; k++) {
        struct lg_use use[LG_USES_MAX];
        const int count = lg_graph_uses(g, k, use);
        if (k == 0 || g->node[k].backward != g->node[k - 1].backward)
            for (int i = 0; i < g->n_bound; i++) at[i] = -1;
        for (int i = 0; i < count; i++) {
            const struct lg_value *v = &g->value[use[i].value];
            if (v->bound < 0 || !g->is_placed[v->bound]) continue;
            if (at[v->bound] < 0) {
                const int first = g->ahead ? node_before(ret, n, k) : k;
                at[v->bound] = n;
                ret[n++] = (struct input_use){
                    v->bound, g->node[k].backward, k, {.bytes = v->bytes, .first = first}};
            }
            ret[at[v->bound]].l.last = k;
        }
    }
    free(at);
    return n;
}

/* What finds a place in what is lent; the rest gets LG_NO_PLACE. l: n_inputs inputs, which go first since they are the
 * largest, then the storages. */
static void place_in_lent(const lg_graph *g, lg_program *p, struct lg_lifetime *l, int n_inputs,
                          int n)
{
    const struct lg_lent *end = &g->lent[g->n_lent - 1];
    struct lg_lifetime *taken = calloc((size_t)(2 * g->n_lent + n), sizeof *taken);
    LG_ASSERT(taken);
    struct lg_lifetimes_room room = {
        .bytes = end->at + end->bytes, .taken = taken, .n_taken = find_taken(g, taken)};
    const int before = room.n_taken, cut[] = {0, n_inputs, n};
    for (int part = 0; part < 2; part++) {
        lg_lifetimes_place_in(&room, l + cut[part], cut[part + 1] - cut[part]);
        for (int i = cut[part]; i < cut[part + 1]; i++)
            if (l[i].at != LG_NO_PLACE) taken[room.n_taken++] = l[i];
    }
    p->lent_bytes = find_most(taken + before, room.n_taken - before, g->n_nodes);
    free(taken);
}

/* The arena, for those that have no place yet. */
static size_t place_others(struct lg_lifetime *l, int n)
{
    struct lg_lifetime *other = calloc((size_t)LG_MAX(n, 1), sizeof *other);
    int n_others = 0;
    LG_ASSERT(other);
    for (int i = 0; i < n; i++)
        if (l[i].at == LG_NO_PLACE) other[n_others++] = l[i];
    const size_t bytes = lg_lifetimes_place(other, n_others);
    for (int i = 0, k = 0; i < n; i++)
        if (l[i].at == LG_NO_PLACE) l[i].at = other[k++].at;
    free(other);
    return bytes;
}

static void note_inputs(const lg_graph *g, lg_program *p, const struct input_use *use,
                        const struct lg_lifetime *l, const int *where, int n)
{
    p->input = malloc((size_t)g->n_bound * sizeof *p->input);
    LG_ASSERT(p->input);
    for (int i = 0; i < g->n_bound; i++) p->input[i][0].at = p->input[i][1].at = LG_NO_PLACE;
    for (int i = 0; i < n; i++)
        p->input[use[i].bound][use[i].backward] =
            (struct lg_input_place){.where = where[i], .at = l[i].at};
}

static size_t place(const lg_graph *g, lg_program *p, int where)
{
    const size_t inputs = g->is_placed && where == LG_PLACE_ARENA ? (size_t)(2 * g->n_bound) : 0;
    const size_t room = (size_t)g->n_values + inputs + 1;
    struct lg_lifetime *l = calloc(room, sizeof *l);
    struct input_use *use = calloc(inputs + 1, sizeof *use);
    int *number = calloc(room, sizeof *number), *at = calloc(room, sizeof *at);
    LG_ASSERT(l && use && number && at);
    const int n_inputs = inputs ? find_input_uses(g, use) : 0;
    for (int i = 0; i < n_inputs; i++) l[i] = use[i].l;
    const int n = n_inputs + find_storages(g, p, where, l + n_inputs, number);
    for (int i = 0; i < n; i++) l[i].at = LG_NO_PLACE;
    if (where == LG_PLACE_ARENA && g->n_lent) place_in_lent(g, p, l, n_inputs, n);
    for (int i = 0; i < n; i++) at[i] = l[i].at == LG_NO_PLACE ? where : LG_PLACE_LENT;
    const size_t bytes = place_others(l, n);
    for (int i = 0; i < g->n_values; i++) {
        if (!lies_in(g, p, i, where)) continue;
        p->value[i].at = l[n_inputs + number[i]].at;
        p->value[i].where = at[n_inputs + number[i]];
    }
    if (n_inputs) note_inputs(g, p, use, l, at, n_inputs);
    free(l);
    free(use);
    free(number);
    free(at);
    return bytes;
}

/* ---- the program ---- */

/* Where a run says whether results are added: what first writes a bound sum. */
static void find_toggle(lg_program *p, int node, const struct lg_value *v, const struct lg_use *u)
{
    const char *args = p->args + p->node[node].args;
    size_t at = p->node[node].args + u->operand->adds_at;
    if (!v->sum || !u->operand->out || p->node[node].kind == LG_NODE_ZERO) return;
    LG_ASSERT(u->operand->adds_at);
    if (!lg_operand_adds(u->operand, args)) p->toggle[p->n_toggles++] = at;
}

/* Every tensor of the calls is a place in the arena or in what is bound. */
static void make_places(const lg_graph *g, lg_program *p)
{
    int room = 0;
    for (int n = 0; n < g->n_nodes; n++) {
        struct lg_use use[LG_USES_MAX];
        room += lg_graph_uses(g, n, use);
    }
    p->place = calloc((size_t)LG_MAX(room, 1), sizeof *p->place);
    p->toggle = calloc((size_t)LG_MAX(room, 1), sizeof *p->toggle);
    p->first_place = calloc((size_t)g->n_nodes + 1, sizeof *p->first_place);
    LG_ASSERT(p->place && p->toggle && p->first_place);
    for (int n = 0; n < g->n_nodes; n++) {
        struct lg_use use[LG_USES_MAX];
        int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++) {
            const struct lg_value *v = &g->value[use[i].value];
            size_t at = v->bound < 0 ? p->value[use[i].value].at : 0;
            const int where = p->value[use[i].value].where;
            find_toggle(p, n, v, &use[i]);
            p->place[p->n_places++] =
                (struct lg_place){.tensor = (size_t)((const char *)use[i].t - g->args),
                                  .bound = v->bound < 0 ? where : v->bound,
                                  .offset = at + use[i].offset,
                                  .node = n,
                                  .value = use[i].value,
                                  .element = use[i].element,
                                  .operand = use[i].operand,
                                  .in_value = use[i].offset};
        }
        p->first_place[n + 1] = p->n_places;
    }
}

/* With no addresses at all, as on every dry stream. */
static int size_scratch(lg_program *p, lg_device *d)
{
    lg_stream *dry = NULL;
    LG_TRY(lg_stream_open_dry(d, &dry));
    for (int i = 0; i < p->n_places; i++) lg_place_pointer(p, i, NULL);
    for (int add = 1; add >= 0;
         add--) { /* adding may want more; it stays off, as the graph has it */
        lg_program_toggle(p, add);
        for (int n = 0; n < p->n_nodes && (!add || p->n_toggles); n++)
            if (p->node[n].kind == LG_NODE_CALL)
                lg_op_call(dry, p->node[n].op, p->args + p->node[n].args);
    }
    p->scratch_bytes = lg_stream_scratch_need(dry);
    lg_stream_close(&dry);
    return 0;
}

static void *copied(const void *from, size_t n, size_t each)
{
    void *to = malloc(LG_MAX(n, (size_t)1) * each);
    LG_ASSERT(to);
    if (n) memcpy(to, from, n * each);
    return to;
}

int lg_graph_compile(const lg_graph *g, lg_program **ret)
{
    lg_program *p = calloc(1, sizeof *p);
    LG_ASSERT(p);
    p->n_values = g->n_values;
    p->value = calloc((size_t)LG_MAX(g->n_values, 1), sizeof *p->value);
    LG_ASSERT(p->value);
    for (int i = 0; i < g->n_values; i++) {
        p->value[i].of = g->value[i];
        p->value[i].storage = i;
    }
    p->n_nodes = g->n_nodes;
    for (int n = 1; n < g->n_nodes; n++) LG_ASSERT(g->node[n].backward >= g->node[n - 1].backward);
    p->n_bound = g->n_bound;
    p->n_copies = g->n_copies;
    p->host_bytes = g->host_bytes;
    p->node = copied(g->node, (size_t)g->n_nodes, sizeof *g->node);
    p->args = copied(g->args, g->args_bytes, 1);
    share_in_place(g, p);
    p->arena_bytes = place(g, p, LG_PLACE_ARENA);
    p->exchanged_bytes = place(g, p, LG_PLACE_EXCHANGED);
    make_places(g, p);
    int rc = size_scratch(p, g->stream.device);
    if (rc < 0) {
        lg_program_free(&p);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = p;
    return 0;
}
