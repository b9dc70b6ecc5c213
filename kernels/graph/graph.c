/* Recording: see graph.h. */
#include "base/check.h"
#include "kernels/graph/graph_private.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Room for one more in an array that doubles. */
static void *grown(void *array, int n, size_t each)
{
    if (n & (n - 1)) return array; /* capacity: the powers of two */
    array = realloc(array, (size_t)(n ? 2 * n : 1) * each);
    LG_ASSERT(array);
    return array;
}

/* ---- values ---- */

static lg_tensor add_value(lg_graph *g, const char *name, lg_tensor shape, bool bound)
{
    g->value = grown(g->value, g->n_values, sizeof *g->value);
    struct lg_value *v = &g->value[g->n_values++];
    *v = (struct lg_value){
        .dtype = shape.dtype, .rank = shape.rank, .again = -1, .next = -1, .first = -1, .last = -1};
    snprintf(v->name, sizeof v->name, "%s", name);
    memcpy(v->dim, shape.dim, sizeof v->dim);
    v->bytes = lg_tensor_bytes(&shape);
    v->bound = bound ? g->n_bound++ : -1;
    LG_ASSERT(v->bytes > 0 && v->bytes < (size_t)1 << LG_VALUE_SHIFT);
    void *at = (void *)((uintptr_t)g->n_values << LG_VALUE_SHIFT); // NOLINT: no memory yet
    return lg_tensor_of(at, shape.dtype, shape.rank, shape.dim);
}

lg_tensor lg_graph_value(lg_graph *g, const char *name, lg_tensor shape)
{
    return add_value(g, name, shape, false);
}

lg_tensor lg_graph_bind(lg_graph *g, const char *name, lg_tensor shape)
{
    return add_value(g, name, shape, true);
}

lg_tensor lg_graph_bind_sum(lg_graph *g, const char *name, lg_tensor shape)
{
    lg_tensor t = add_value(g, name, shape, true);
    g->value[g->n_values - 1].sum = true;
    return t;
}

void lg_graph_lend(lg_graph *g, struct lg_lent part)
{
    if (!(g->n_lent & (g->n_lent - 1))) {
        g->lent = realloc(g->lent, (size_t)LG_MAX(2 * g->n_lent, 1) * sizeof *g->lent);
        LG_ASSERT(g->lent);
    }
    LG_ASSERT(!g->n_lent ||
              g->lent[g->n_lent - 1].at + g->lent[g->n_lent - 1].bytes <= part.at); /* in order */
    g->lent[g->n_lent++] = part;
}

void lg_graph_place_input(lg_graph *g, int bound, bool ahead)
{
    if (!g->is_placed) g->is_placed = calloc((size_t)g->n_bound, sizeof *g->is_placed);
    LG_ASSERT(g->is_placed && bound >= 0 && bound < g->n_bound);
    g->is_placed[bound] = true;
    g->ahead = ahead;
}

lg_tensor lg_graph_twin(lg_graph *g, int value)
{
    const struct lg_value v = g->value[value];
    lg_tensor t = lg_graph_value(g, v.name, lg_tensor_of(NULL, v.dtype, v.rank, v.dim));
    g->value[g->n_values - 1].room = v.room;
    return t;
}

lg_tensor lg_graph_again(lg_graph *g, lg_tensor t)
{
    int old = lg_graph_value_of(&t);
    struct lg_value v = g->value[old];
    LG_ASSERT(v.bound < 0 && v.next < 0);
    lg_tensor whole = lg_graph_value(g, v.name, lg_tensor_of(NULL, v.dtype, v.rank, v.dim));
    g->value[old].next = g->n_values - 1;
    g->value[g->n_values - 1].again = old;
    t.data = (char *)whole.data + lg_graph_offset_of(&t);
    return t;
}

/* ---- nodes ---- */

/* Bytes from the first to behind the last element of the dimensions from `first` on. */
static size_t extent(const lg_tensor *t, int first)
{
    int64_t last = 0;
    for (int i = first; i < t->rank; i++) last += (t->dim[i] - 1) * t->stride[i];
    return (size_t)(last + 1) * lg_dtype_bytes(t->dtype);
}

static struct lg_use plain_use(const lg_tensor *t, bool out)
{
    static const struct lg_operand from = {.name = "from", .same = -1};
    static const struct lg_operand to = {.name = "to", .same = -1, .out = true};
    return (struct lg_use){.operand = out ? &to : &from,
                           .t = t,
                           .value = lg_graph_value_of(t),
                           .offset = lg_graph_offset_of(t)};
}

/* Of a node that is no call: a copy reads its value, or makes the new one. */
static int plain_uses(const lg_graph *g, const struct lg_node *node, struct lg_use ret[LG_USES_MAX])
{
    const void *args = g->args + node->args;
    if (node->kind == LG_NODE_EXCHANGE) {
        const struct lg_exchange_args *x = args;
        ret[0] = plain_use(&x->from, false);
        ret[1] = plain_use(&x->to, true);
        return 2;
    }
    bool out = node->kind == LG_NODE_IN || node->kind == LG_NODE_ZERO;
    ret[0] = plain_use(&((const struct lg_copy_args *)args)->t, out);
    return 1;
}

int lg_graph_uses(const lg_graph *g, int n, struct lg_use ret[LG_USES_MAX])
{
    const struct lg_node *node = &g->node[n];
    if (node->kind == LG_NODE_REMOVED) return 0;
    if (node->kind != LG_NODE_CALL) return plain_uses(g, node, ret);
    const struct lg_op_info *op = lg_op_info(g->node[n].op);
    const char *args = g->args + g->node[n].args;
    int count = 0;
    for (int i = 0; i < op->n_operands; i++) {
        const struct lg_operand *o = &op->operand[i];
        for (int e = 0; e < lg_operand_count(o, args); e++) {
            const lg_tensor *t = lg_operand_at(o, args, e);
            if (t->rank == 0 || !t->data) continue;
            ret[count] = (struct lg_use){.operand = o,
                                         .number = i,
                                         .element = e,
                                         .t = t,
                                         .value = lg_graph_value_of(t),
                                         .offset = lg_graph_offset_of(t)};
            const struct lg_use *u = &ret[count++];
            LG_ASSERT(u->value >= 0 && u->value < g->n_values);
            LG_ASSERT(u->offset + extent(u->t, 0) <= g->value[u->value].bytes);
        }
    }
    return count;
}

/* From one row to the next, in bytes; 0: it has no rows. */
static size_t row_step(const struct lg_use *u)
{
    if (!lg_operand_has_rows(u->operand)) return 0;
    return (size_t)lg_row_stride(u->t, u->operand->row) * lg_dtype_bytes(u->t->dtype);
}

bool lg_graph_share_bytes(const struct lg_use *a, const struct lg_use *b)
{
    if (a->offset + extent(a->t, 0) <= b->offset || b->offset + extent(b->t, 0) <= a->offset)
        return false;
    size_t step = row_step(a);
    if (!step || step != row_step(b)) return true;
    size_t ahead = (b->offset + step - a->offset % step) % step;
    return ahead < extent(a->t, a->operand->row) || ahead + extent(b->t, b->operand->row) > step;
}

/* Nobody else has written these bytes. */
static void check_single(const lg_graph *g, int node, const struct lg_use *out)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = g->value[out->value].first; n >= 0 && n < node; n++) {
        int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++)
            LG_ASSERT(use[i].value != out->value || !use[i].operand->out ||
                      !lg_graph_share_bytes(&use[i], out));
    }
}

/* A node reads what an earlier one has written, and nobody has added to since. */
static void note_read(lg_graph *g, int node, int value)
{
    struct lg_value *v = &g->value[value];
    LG_ASSERT(v->bound >= 0 || (v->first >= 0 && v->first < node));
    LG_ASSERT(v->next < 0 || g->value[v->next].first < 0);
    v->last = node;
}

static void note_written(lg_graph *g, int node, const struct lg_use *u, bool check)
{
    struct lg_value *v = &g->value[u->value];
    bool adds = lg_operand_adds(u->operand, lg_graph_args(g, node));
    if (v->again >= 0) {
        LG_ASSERT(adds && v->first < 0);
        note_read(g, node, v->again);
    } else if (adds) { /* to what another node of this run has written there */
        LG_ASSERT(v->sum && v->first >= 0);
    } else if (v->first >= 0 && check) {
        check_single(g, node, u);
    }
    if (v->first < 0) v->first = node;
    v->last = node;
}

static void note(lg_graph *g, int node, bool check)
{
    struct lg_use use[LG_USES_MAX];
    int count = lg_graph_uses(g, node, use);
    for (int i = 0; i < count; i++) /* what a part makes another part of the node reads */
        if (!use[i].operand->out && use[i].operand->same < 0) note_read(g, node, use[i].value);
    for (int i = 0; i < count; i++)
        if (use[i].operand->out) note_written(g, node, &use[i], check);
}

static size_t add_bytes(lg_graph *g, const void *args, size_t bytes)
{
    size_t room = (bytes + 15) / 16 * 16, at = g->args_bytes;
    g->args = realloc(g->args, at + room);
    LG_ASSERT(g->args);
    memcpy(g->args + at, args, bytes);
    g->args_bytes += room;
    return at;
}

static size_t add_args(lg_graph *g, lg_op_id op, const void *args)
{
    return add_bytes(g, args, lg_op_info(op)->args_bytes);
}

static int add_node(lg_graph *g, struct lg_node node)
{
    g->node = grown(g->node, g->n_nodes, sizeof *g->node);
    g->node[g->n_nodes] = node;
    return g->n_nodes++;
}

static void record(lg_stream *s, lg_op_id op, const void *args)
{
    lg_graph *g = (lg_graph *)s;
    size_t at = add_args(g, op, args);
    note(g, add_node(g, (struct lg_node){LG_NODE_CALL, op, at, g->block, g->backward}), true);
}

void lg_graph_record(lg_graph *g, enum lg_node_kind kind, const void *args, size_t bytes)
{
    size_t at = add_bytes(g, args, bytes);
    note(g, add_node(g, (struct lg_node){kind, LG_OP_COUNT, at, g->block, g->backward}), true);
}

void lg_graph_zero(lg_graph *g, lg_tensor t)
{
    const struct lg_copy_args zero = {.t = t, .is_value = true};
    LG_ASSERT(lg_is_contiguous(&t));
    lg_graph_record(g, LG_NODE_ZERO, &zero, sizeof zero);
}

/* ---- for passes ---- */

void lg_graph_replace(lg_graph *g, int node, lg_op_id op, const void *args)
{
    g->node[node].args = add_args(g, op, args);
    g->node[node].op = op;
}

void lg_graph_remove(lg_graph *g, int node)
{
    g->node[node].kind = LG_NODE_REMOVED;
    g->node[node].op = LG_OP_COUNT;
}

int lg_graph_copy(lg_graph *g, int node)
{
    struct lg_node copy = g->node[node];
    const bool exchange = copy.kind == LG_NODE_EXCHANGE;
    const size_t bytes =
        exchange ? sizeof(struct lg_exchange_args) : lg_op_info(copy.op)->args_bytes;
    char *args = malloc(bytes);
    LG_ASSERT(args);
    memcpy(args, lg_graph_args(g, node), bytes);
    copy.args = add_bytes(g, args, bytes);
    free(args);
    return add_node(g, copy);
}

void lg_graph_move(lg_graph *g, int from, int to)
{
    size_t n = (size_t)(g->n_nodes - from), each = sizeof *g->node;
    struct lg_node *moved = malloc(LG_MAX(n, (size_t)1) * each);
    LG_ASSERT(moved && to <= from);
    memcpy(moved, g->node + from, n * each);
    memmove(g->node + to + n, g->node + to, (size_t)(from - to) * each);
    memcpy(g->node + to, moved, n * each);
    free(moved);
}

size_t lg_graph_add_copy(lg_graph *g, const struct lg_copy_args *args)
{
    return add_bytes(g, args, sizeof *args);
}

void lg_graph_insert(lg_graph *g, const struct lg_insertion *in, int n)
{
    struct lg_node *all = malloc((size_t)LG_MAX(g->n_nodes + n, 1) * sizeof *all);
    LG_ASSERT(all);
    int at = 0, next = 0;
    for (int i = 0; i <= g->n_nodes; i++) {
        for (; next < n && in[next].before == i; next++) all[at++] = in[next].node;
        if (i < g->n_nodes) all[at++] = g->node[i];
    }
    LG_ASSERT(next == n);
    free(g->node);
    g->node = NULL;
    g->n_nodes = 0;
    for (int i = 0; i < at; i++) add_node(g, all[i]);
    free(all);
}

static void find_uses(lg_graph *g, bool check)
{
    int n = 0;
    for (int i = 0; i < g->n_nodes; i++)
        if (g->node[i].kind != LG_NODE_REMOVED) g->node[n++] = g->node[i];
    g->n_nodes = n;
    for (int i = 0; i < g->n_values; i++) g->value[i].first = g->value[i].last = -1;
    for (int i = 0; i < n; i++) note(g, i, check);
}

void lg_graph_index(lg_graph *g)
{
    find_uses(g, true);
}

void lg_graph_index_again(lg_graph *g)
{
    find_uses(g, false);
}

/* ---- the graph ---- */

lg_graph *lg_graph_new(lg_device *d)
{
    lg_graph *g = calloc(1, sizeof *g);
    LG_ASSERT(g);
    g->stream = (lg_stream){.device = d, .record = record};
    g->block = -1;
    return g;
}

void lg_graph_free(lg_graph **graph)
{
    lg_graph *g = *graph;
    if (!g) return;
    free(g->value);
    free(g->node);
    free(g->args);
    free(g->lent);
    free(g->is_placed);
    free(g);
    *graph = NULL;
}

void lg_graph_begin_block(lg_graph *g)
{
    g->block = g->n_blocks++;
}

void lg_graph_end_block(lg_graph *g)
{
    g->block = -1;
}

lg_stream *lg_graph_stream(lg_graph *g)
{
    return &g->stream;
}
