/* See offload.h. Positions are those of the nodes before anything is inserted. */
#include "kernels/graph/offload.h"
#include "base/check.h"
#include "kernels/graph/graph_private.h"
#include <stdlib.h>
#include <string.h>

enum { HOST_ALIGN = 4096, NODES_PER_COPY = 4, KEEP_MIN = 2 };

struct offload {
    lg_graph *g;
    int *forward_end;    /* by block: behind the last node of its forward; 0: it has none */
    int *backward_begin; /* by block: the first node of its backward; -1: it has none */
    int *last_forward, *first_backward; /* by value: readers; -1: none */
    struct lg_insertion *insertion;
    int n;
};

static void find_blocks(struct offload *o)
{
    for (int n = 0; n < o->g->n_nodes; n++) {
        const struct lg_node *node = &o->g->node[n];
        if (node->block < 0) continue;
        if (!node->backward)
            o->forward_end[node->block] = n + 1;
        else if (o->backward_begin[node->block] < 0)
            o->backward_begin[node->block] = n;
    }
}

static void find_readers(struct offload *o)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = 0; n < o->g->n_nodes; n++) {
        int count = lg_graph_uses(o->g, n, use);
        for (int i = 0; i < count; i++) {
            if (!o->g->node[n].backward)
                o->last_forward[use[i].value] = n;
            else if (o->first_backward[use[i].value] < 0)
                o->first_backward[use[i].value] = n;
        }
    }
}

static struct lg_node node_of(enum lg_node_kind kind, size_t args, bool backward)
{
    return (struct lg_node){
        .kind = kind, .op = LG_OP_COUNT, .args = args, .block = -1, .backward = backward};
}

static void insert(struct offload *o, int before, struct lg_node node)
{
    o->insertion[o->n++] = (struct lg_insertion){.before = before, .node = node};
}

static bool is_before(const struct offload *o, int b, int block)
{
    return o->backward_begin[b] >= 0 && o->backward_begin[b] < o->backward_begin[block];
}

/* How many blocks have their backward before that of `block`. */
static int blocks_before(const struct offload *o, int block)
{
    int n = 0;
    for (int b = 0; b < o->g->n_blocks; b++) n += is_before(o, b, block);
    return n;
}

/* The block whose backward comes right before that of `block`; -1: none does. (A group of blocks that is recomputed begins with
 * its first one.) */
static int block_before(const struct offload *o, int block)
{
    int ret = -1;
    for (int b = 0; b < o->g->n_blocks; b++)
        if (is_before(o, b, block) && (ret < 0 || o->backward_begin[b] > o->backward_begin[ret]))
            ret = b;
    return ret;
}

/* The readers in the backward get the new value. */
static void read_new(lg_graph *g, int value, lg_tensor to)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = 0; n < g->n_nodes; n++) {
        int count = g->node[n].backward ? lg_graph_uses(g, n, use) : 0;
        for (int i = 0; i < count; i++)
            if (use[i].value == value)
                ((lg_tensor *)use[i].t)->data = (char *)to.data + use[i].offset;
    }
}

static void offload(struct offload *o, int value, int keep)
{
    lg_graph *g = o->g;
    const struct lg_value v = g->value[value];
    int out = o->last_forward[value] + 1, reader = o->first_backward[value];
    int made_in = g->node[out - 1].block, read_in = g->node[reader].block;
    if (made_in < 0 || made_in + 1 >= g->n_blocks || read_in < 0 ||
        blocks_before(o, read_in) < LG_MAX(keep, KEEP_MIN))
        return;
    int out_done = o->forward_end[made_in + 1], in = o->backward_begin[block_before(o, read_in)];
    if (out_done < out || in <= out_done || in > reader) return;
    lg_tensor shape = lg_tensor_of(NULL, v.dtype, v.rank, v.dim), from = shape;
    from.data = (void *)((uintptr_t)(value + 1) << LG_VALUE_SHIFT); // NOLINT: no memory yet
    lg_tensor to = lg_graph_value(g, v.name, shape);
    struct lg_copy_args a = {.t = from, .copy = g->n_copies++, .host_at = g->host_bytes};
    g->host_bytes += (v.bytes + HOST_ALIGN - 1) / HOST_ALIGN * HOST_ALIGN;
    insert(o, out, node_of(LG_NODE_OUT, lg_graph_add_copy(g, &a), false));
    insert(o, out_done, node_of(LG_NODE_OUT_DONE, lg_graph_add_copy(g, &a), false));
    read_new(g, value, to);
    a.t = to;
    insert(o, in, node_of(LG_NODE_IN, lg_graph_add_copy(g, &a), true));
    insert(o, reader, node_of(LG_NODE_IN_DONE, lg_graph_add_copy(g, &a), true));
}

static int by_place(const void *a, const void *b)
{
    const struct lg_insertion *x = a, *y = b;
    if (x->before != y->before) return x->before - y->before;
    return (x->node.args > y->node.args) - (x->node.args < y->node.args);
}

static int *filled(int n, int with)
{
    int *a = malloc((size_t)LG_MAX(n, 1) * sizeof *a);
    LG_ASSERT(a);
    for (int i = 0; i < n; i++) a[i] = with;
    return a;
}

size_t lg_graph_offload(lg_graph *g, size_t bytes_min, int keep)
{
    const int values = g->n_values;
    struct offload o = {.g = g,
                        .forward_end = filled(g->n_blocks, 0),
                        .backward_begin = filled(g->n_blocks, -1),
                        .last_forward = filled(values, -1),
                        .first_backward = filled(values, -1)};
    o.insertion = calloc((size_t)LG_MAX(values, 1) * NODES_PER_COPY, sizeof *o.insertion);
    LG_ASSERT(o.insertion);
    find_blocks(&o);
    find_readers(&o);
    for (int i = 0; i < values; i++) {
        const struct lg_value *v = &g->value[i];
        if (v->bound < 0 && v->again < 0 && v->next < 0 && LG_MAX(v->bytes, v->room) >= bytes_min &&
            o.last_forward[i] >= 0 && o.first_backward[i] >= 0)
            offload(&o, i, keep);
    }
    qsort(o.insertion, (size_t)o.n, sizeof *o.insertion, by_place);
    lg_graph_insert(g, o.insertion, o.n);
    lg_graph_index(g);
    free(o.forward_end);
    free(o.backward_begin);
    free(o.last_forward);
    free(o.first_backward);
    free(o.insertion);
    return g->host_bytes;
}
