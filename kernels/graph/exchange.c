/* See exchange.h. */
#include "kernels/graph/exchange.h"
#include "base/check.h"
#include "kernels/graph/program_private.h"

/* ---- recording ---- */

struct lg_cut lg_cut_evenly(int dim, int64_t n, int64_t each, int degree)
{
    struct lg_cut c = {.dim = dim};
    LG_ASSERT(degree >= 1 && degree <= LG_RANKS_MAX && n >= degree && each >= 1);
    for (int p = 0; p <= degree; p++) c.at[p] = n * p / degree * each;
    return c;
}

static int64_t length(const struct lg_cut *c, int rank)
{
    return c->at[rank + 1] - c->at[rank];
}

/* What rank `rank` has afterwards, `whole` being what nobody cut. */
static lg_tensor arrived(const struct lg_cuts *c, lg_tensor whole, int rank)
{
    int64_t dim[LG_RANK_MAX + 1] = {c->degree};
    for (int i = 0; i < whole.rank; i++)
        dim[i + 1] = i == c->after.dim ? length(&c->after, rank) : whole.dim[i];
    if (c->before.dim >= 0) return lg_tensor_of(NULL, whole.dtype, whole.rank, dim + 1);
    return lg_tensor_of(NULL, whole.dtype, whole.rank + 1, dim);
}

/* The dimensions of what the ranks have together, of what one of them has before. */
static lg_tensor whole_of(const struct lg_cuts *c, const lg_tensor *from)
{
    lg_tensor t = *from;
    if (c->before.dim >= 0) t.dim[c->before.dim] = c->before.at[c->degree];
    return t;
}

static void check(const struct lg_cuts *c, const lg_tensor *from)
{
    const struct lg_cut *b = &c->before, *a = &c->after;
    LG_ASSERT(c->degree >= 2 && c->degree <= LG_RANKS_MAX);
    LG_ASSERT(c->rank >= 0 && c->rank < c->degree && a->dim != b->dim);
    LG_ASSERT(a->dim < from->rank && b->dim < from->rank && lg_is_contiguous(from));
    LG_ASSERT(b->dim < 0 || from->dim[b->dim] == length(b, c->rank));
    LG_ASSERT(a->dim < 0 || from->dim[a->dim] == a->at[c->degree]);
    for (int p = 0; p < c->degree; p++) {
        LG_ASSERT(b->dim < 0 || length(b, p) > 0);
        LG_ASSERT(a->dim < 0 || length(a, p) > 0);
    }
}

lg_tensor lg_graph_exchange(lg_graph *g, const char *name, const struct lg_cuts *c, lg_tensor from)
{
    check(c, &from);
    const lg_tensor whole = whole_of(c, &from);
    struct lg_exchange_args x = {.from = from, .cuts = *c};
    x.to = lg_graph_value(g, name, arrived(c, whole, c->rank));
    for (int p = 0; p < c->degree; p++) {
        lg_tensor theirs = arrived(c, whole, p);
        struct lg_value *v = &g->value[g->n_values - 1];
        v->room = LG_MAX(v->room, lg_tensor_bytes(&theirs));
    }
    lg_graph_record(g, LG_NODE_EXCHANGE, &x, sizeof x);
    return x.to;
}

/* ---- of a program ---- */

bool lg_program_is_exchange(const lg_program *p, int node)
{
    return p->node[node].kind == LG_NODE_EXCHANGE;
}

int lg_program_exchanges(const lg_program *p)
{
    int n = 0;
    for (int i = 0; i < p->n_nodes; i++) n += lg_program_is_exchange(p, i);
    return n;
}

static int node_of(const lg_program *p, int exchange)
{
    int n = -1;
    for (int i = 0; i <= exchange; i++) {
        do LG_ASSERT(++n < p->n_nodes);
        while (!lg_program_is_exchange(p, n));
    }
    return n;
}

size_t lg_program_exchanged_bytes(const lg_program *p)
{
    return p->exchanged_bytes;
}

struct lg_sent lg_program_sends(const lg_program *p, const struct lg_program_memory *m,
                                int exchange, int to, void *theirs)
{
    const int node = node_of(p, exchange);
    struct lg_exchange_args x =
        *(const struct lg_exchange_args *)(const void *)(p->args + p->node[node].args);
    const struct lg_cuts *c = &x.cuts;
    const struct lg_place *place = &p->place[p->first_place[node]];
    LG_ASSERT(to >= 0 && to < c->degree && theirs);
    LG_ASSERT(place[0].operand->out == false && place[1].bound == LG_PLACE_EXCHANGED);
    struct lg_sent sent = {.from = x.from, .to = arrived(c, whole_of(c, &x.from), to)};
    sent.from.data = (char *)lg_program_base(m, place[0].bound) + place[0].offset;
    sent.to.data = (char *)theirs + place[1].offset;
    if (c->after.dim >= 0)
        sent.from = lg_slice(sent.from, c->after.dim, c->after.at[to], length(&c->after, to));
    if (c->before.dim >= 0)
        sent.to =
            lg_slice(sent.to, c->before.dim, c->before.at[c->rank], length(&c->before, c->rank));
    else
        sent.to = lg_at(sent.to, c->rank * lg_numel(&sent.from),
                        lg_tensor_of(NULL, sent.from.dtype, sent.from.rank, sent.from.dim));
    return sent;
}

struct lg_arrival lg_program_arrival(const lg_program *p, int exchange)
{
    const int node = node_of(p, exchange);
    const struct lg_exchange_args *x = (const void *)(p->args + p->node[node].args);
    const struct lg_place *to = &p->place[p->first_place[node] + 1];
    LG_ASSERT(to->bound == LG_PLACE_EXCHANGED);
    return (struct lg_arrival){.at = to->offset, .bytes = lg_tensor_bytes(&x->to)};
}

size_t lg_program_traffic(const lg_program *p)
{
    static char nowhere[64]; /* only addresses are made of it */
    const struct lg_program_memory m = {.arena = nowhere, .exchanged = nowhere, .lent = nowhere};
    size_t bytes = 0;
    for (int i = 0; i < lg_program_exchanges(p); i++) {
        const struct lg_exchange_args *x = (const void *)(p->args + p->node[node_of(p, i)].args);
        for (int to = 0; to < x->cuts.degree; to++) {
            if (to == x->cuts.rank) continue;
            const struct lg_sent sent = lg_program_sends(p, &m, i, to, nowhere);
            bytes += (size_t)lg_numel(&sent.from) * lg_dtype_bytes(sent.from.dtype);
        }
    }
    return bytes;
}

/* ---- copying ---- */

/* The dimensions of both tensors, as few as they can be. */
struct walk {
    int n;
    int64_t dim[LG_RANK_MAX], from[LG_RANK_MAX], to[LG_RANK_MAX]; /* and the strides */
};

static struct walk walk_of(const struct lg_sent *x)
{
    struct walk w = {0};
    for (int i = 0; i < x->from.rank; i++) {
        const int64_t dim = x->from.dim[i], from = x->from.stride[i], to = x->to.stride[i];
        LG_ASSERT(dim == x->to.dim[i]);
        if (dim == 1) continue;
        const int before = w.n - 1;
        if (w.n && w.from[before] == dim * from && w.to[before] == dim * to)
            w.dim[before] *= dim;
        else
            w.dim[w.n++] = dim;
        w.from[w.n - 1] = from;
        w.to[w.n - 1] = to;
    }
    return w;
}

void lg_send(lg_stream *s, struct lg_sent x)
{
    LG_ASSERT(x.from.rank == x.to.rank && x.from.dtype == x.to.dtype);
    const struct walk w = walk_of(&x);
    int outer = w.n; /* dimensions of which each step is a copy of its own */
    int64_t M = 1, N = 1, from = 0, to = 0, copies = 1;
    struct lg_copy_rows_args a = {0};
    if (outer && w.from[outer - 1] == 1 && w.to[outer - 1] == 1) N = w.dim[--outer];
    if (outer) outer--, M = w.dim[outer], from = w.from[outer], to = w.to[outer];
    if (outer) {
        a.groups = (int)w.dim[--outer];
        a.x_apart = w.from[outer];
        a.y_apart = w.to[outer];
    }
    for (int i = 0; i < outer; i++) copies *= w.dim[i];
    for (int64_t n = 0; n < copies; n++) {
        int64_t rest = n, at[2] = {0, 0};
        for (int i = outer - 1; i >= 0; i--) {
            at[0] += rest % w.dim[i] * w.from[i];
            at[1] += rest % w.dim[i] * w.to[i];
            rest /= w.dim[i];
        }
        a.x = lg_at(x.from, at[0], lg_t2(NULL, x.from.dtype, M, N));
        a.y = lg_at(x.to, at[1], lg_t2(NULL, x.to.dtype, M, N));
        if (M > 1) a.x.stride[0] = from, a.y.stride[0] = to;
        lg_copy_rows(s, &a);
    }
}
