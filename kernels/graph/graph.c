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
    *v = (struct lg_value){.dtype = shape.dtype, .rank = shape.rank, .first = -1, .last = -1};
    snprintf(v->name, sizeof v->name, "%s", name);
    memcpy(v->dim, shape.dim, sizeof v->dim);
    v->bytes = lg_tensor_bytes(&shape);
    v->bound = bound ? g->n_bound++ : -1;
    LG_ASSERT(v->bytes > 0 && v->bytes < (size_t)1 << LG_VALUE_SHIFT);
    shape.data = (void *)((uintptr_t)g->n_values << LG_VALUE_SHIFT); // NOLINT: no memory yet
    return shape;
}

lg_tensor lg_graph_value(lg_graph *g, const char *name, lg_tensor shape)
{
    return add_value(g, name, shape, false);
}

lg_tensor lg_graph_bind(lg_graph *g, const char *name, lg_tensor shape)
{
    return add_value(g, name, shape, true);
}

/* ---- nodes ---- */

/* Bytes of a row and between the beginnings of two; a contiguous tensor is one row. */
static size_t row_bytes(const struct lg_use *u, int64_t *ret_rows)
{
    *ret_rows = 1;
    if (u->operand->stride_at)
        for (int i = 0; i < u->operand->row; i++) *ret_rows *= u->t->dim[i];
    return lg_tensor_bytes(u->t) / (size_t)*ret_rows;
}

static size_t stride_bytes(const struct lg_use *u, const char *args)
{
    if (!u->operand->stride_at) return 0;
    return (size_t) * (const int64_t *)(args + u->operand->stride_at) * lg_dtype_bytes(u->t->dtype);
}

/* Bytes from the tensor's first to behind its last element. */
static size_t extent(const struct lg_use *u, const char *args)
{
    int64_t rows;
    size_t row = row_bytes(u, &rows);
    return (size_t)(rows - 1) * stride_bytes(u, args) + row;
}

int lg_graph_uses(const lg_graph *g, int n, struct lg_use ret[LG_USES_MAX])
{
    const struct lg_op_info *op = lg_op_info(g->node[n].op);
    const char *args = g->args + g->node[n].args;
    int count = 0;
    for (int i = 0; i < op->n_operands; i++) {
        const struct lg_operand *o = &op->operand[i];
        for (int e = 0; e < lg_operand_count(o, args); e++) {
            const lg_tensor *t = lg_operand_at(o, args, e);
            if (t->rank == 0 || !t->data) continue;
            uintptr_t at = (uintptr_t)t->data;
            ret[count] = (struct lg_use){.operand = o,
                                         .number = i,
                                         .element = e,
                                         .t = t,
                                         .value = (int)(at >> LG_VALUE_SHIFT) - 1,
                                         .offset = at & (((uintptr_t)1 << LG_VALUE_SHIFT) - 1)};
            const struct lg_use *u = &ret[count++];
            LG_ASSERT(u->value >= 0 && u->value < g->n_values);
            LG_ASSERT(u->offset + extent(u, args) <= g->value[u->value].bytes);
        }
    }
    return count;
}

/* Two tensors of one value; rows of a packed buffer lie among each other, so only those of one stride and others
 * can be told apart here. */
static bool share_bytes(const struct lg_use *a, const char *a_args, const struct lg_use *b,
                        const char *b_args)
{
    if (a->offset + extent(a, a_args) <= b->offset || b->offset + extent(b, b_args) <= a->offset)
        return false;
    int64_t rows;
    size_t step = stride_bytes(a, a_args);
    if (!step || step != stride_bytes(b, b_args)) return true;
    size_t ahead = (b->offset + step - a->offset % step) % step;
    return ahead < row_bytes(a, &rows) || ahead + row_bytes(b, &rows) > step;
}

/* Nobody else has written these bytes. */
static void check_single(const lg_graph *g, int node, const struct lg_use *out)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = g->value[out->value].first; n >= 0 && n < node; n++) {
        int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++)
            LG_ASSERT(use[i].value != out->value || !use[i].operand->out ||
                      !share_bytes(&use[i], g->args + g->node[n].args, out,
                                   g->args + g->node[node].args));
    }
}

static void note(lg_graph *g, int node, const struct lg_use *u)
{
    struct lg_value *v = &g->value[u->value];
    v->last = node;
    if (!u->operand->out) {
        LG_ASSERT(v->bound >= 0 || (v->first >= 0 && v->first < node));
        return;
    }
    if (v->first >= 0) check_single(g, node, u);
    if (v->first < 0) v->first = node;
}

/* What is added to is read and written by one node, which single assignment does not have (yet: a gradient's
 * sum over micro-batches will ask for it). */
static bool accumulates(const struct lg_op_info *op, const char *args)
{
    for (const struct lg_scalar *x = op->scalar; x < op->scalar + op->n_scalars; x++)
        if (x->kind == LG_SCALAR_bool && strstr(x->name, "accumulate") &&
            *(const bool *)(args + x->at))
            return true;
    return false;
}

static void record(lg_stream *s, lg_op_id op, const void *args)
{
    lg_graph *g = (lg_graph *)s;
    LG_ASSERT(!accumulates(lg_op_info(op), args));
    struct lg_use use[LG_USES_MAX];
    size_t bytes = lg_op_info(op)->args_bytes, room = (bytes + 15) / 16 * 16;
    g->node = grown(g->node, g->n_nodes, sizeof *g->node);
    g->node[g->n_nodes] = (struct lg_node){.op = op, .args = g->args_bytes};
    g->args = realloc(g->args, g->args_bytes + room);
    LG_ASSERT(g->args);
    memcpy(g->args + g->args_bytes, args, bytes);
    g->args_bytes += room;
    int n = g->n_nodes++, count = lg_graph_uses(g, n, use);
    for (int i = 0; i < count; i++) /* what a part makes another part of the node reads */
        if (!use[i].operand->out && use[i].operand->same < 0) note(g, n, &use[i]);
    for (int i = 0; i < count; i++)
        if (use[i].operand->out) note(g, n, &use[i]);
}

/* ---- the graph ---- */

lg_graph *lg_graph_new(lg_device *d)
{
    lg_graph *g = calloc(1, sizeof *g);
    LG_ASSERT(g);
    g->stream = (lg_stream){.device = d, .record = record};
    return g;
}

void lg_graph_free(lg_graph **graph)
{
    lg_graph *g = *graph;
    if (!g) return;
    free(g->value);
    free(g->node);
    free(g->args);
    free(g);
    *graph = NULL;
}

lg_stream *lg_graph_stream(lg_graph *g)
{
    return &g->stream;
}
