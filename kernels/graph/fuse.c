/* See fuse.h. Each rule looks at one node and the one that made what it reads; the fused node stands where the one
 * of the two stood whose place all operands allow. */
#include "kernels/graph/fuse.h"
#include "base/check.h"
#include "kernels/graph/graph_private.h"
#include <string.h>

/* t, which has as many elements, with the dimensions of `shape`. */
static lg_tensor shaped(const lg_tensor *t, const lg_tensor *shape)
{
    LG_ASSERT(lg_is_contiguous(t) && lg_numel(t) == lg_numel(shape));
    return lg_tensor_of(t->data, t->dtype, shape->rank, shape->dim);
}

static bool have_one_shape(const lg_tensor *a, const lg_tensor *b)
{
    return a->rank == b->rank && !memcmp(a->dim, b->dim, sizeof a->dim);
}

/* The node that made t, all of it; -1: none, or several. */
static int maker(const lg_graph *g, const lg_tensor *t)
{
    struct lg_use use[LG_USES_MAX];
    const struct lg_value *v = &g->value[lg_graph_value_of(t)];
    if (v->first < 0 || v->again >= 0) return -1;
    int count = lg_graph_uses(g, v->first, use);
    for (int i = 0; i < count; i++)
        if (use[i].operand->out && use[i].t->data == t->data && lg_numel(use[i].t) == lg_numel(t))
            return v->first;
    return -1;
}

/* Does a node behind `from` and before `to` read or write this value? */
static bool is_used_between(const lg_graph *g, int from, int to, int value)
{
    struct lg_use use[LG_USES_MAX];
    for (int n = from + 1; n < to; n++) {
        int count = lg_graph_uses(g, n, use);
        for (int i = 0; i < count; i++)
            if (use[i].value == value) return true;
    }
    return false;
}

static bool is_op(const lg_graph *g, int node, lg_op_id op)
{
    return node >= 0 && g->node[node].op == op;
}

/* The residual waits for the norm, whose modulation may be made in between. */
static void fuse_residual_norm(lg_graph *g, int n)
{
    const struct lg_norm_modulate_forward_args *norm = lg_graph_args(g, n);
    int m = maker(g, &norm->x);
    if (!is_op(g, m, LG_OP_gate_residual_forward)) return;
    const struct lg_gate_residual_forward_args *residual = lg_graph_args(g, m);
    if (!have_one_shape(&norm->x, &residual->out) ||
        is_used_between(g, m, n, lg_graph_value_of(&residual->out)))
        return;
    struct lg_residual_norm_forward_args a = {.residual = *residual, .norm = *norm};
    lg_graph_replace(g, n, LG_OP_residual_norm_forward, &a);
    lg_graph_remove(g, m);
}

/* The residual comes forward to the norm: of what it reads only the norm's dx is made in the backward. */
static void fuse_norm_residual(lg_graph *g, int n)
{
    const struct lg_gate_residual_backward_args *residual = lg_graph_args(g, n);
    const lg_tensor *dx = &residual->dout;
    int m = g->value[lg_graph_value_of(dx)].first;
    if (!is_op(g, m, LG_OP_norm_modulate_backward)) return;
    const struct lg_norm_modulate_backward_args *norm = lg_graph_args(g, m);
    if (norm->dx.data != dx->data || !have_one_shape(&norm->dx, dx)) return;
    struct lg_norm_residual_backward_args a = {.norm = *norm, .residual = *residual};
    lg_graph_replace(g, m, LG_OP_norm_residual_backward, &a);
    lg_graph_remove(g, n);
}

/* The norm comes forward to the convolution, whose result nobody else may want. */
static void fuse_conv_norm(lg_graph *g, int n)
{
    const struct lg_rms_act_forward_args *norm = lg_graph_args(g, n);
    const int value = lg_graph_value_of(&norm->x), to = lg_graph_value_of(&norm->y);
    const int m = maker(g, &norm->x);
    if (norm->scale.rank || !is_op(g, m, LG_OP_conv3d_forward)) return;
    struct lg_conv3d_forward_args a = *(struct lg_conv3d_forward_args *)lg_graph_args(g, m);
    if (a.normed.rank || a.y.dim[3] != norm->x.dim[1] || is_used_between(g, m, n, to)) return;
    a.normed = shaped(&norm->y, &a.y);
    a.eps = norm->eps;
    a.act = norm->act;
    const struct lg_value *y = &g->value[value];
    if (y->bound < 0 && y->last == n && !is_used_between(g, m, n, value)) a.y = LG_NONE;
    lg_graph_replace(g, m, LG_OP_conv3d_forward, &a);
    lg_graph_remove(g, n);
}

/* The activation comes forward to the linear: of what it reads only the linear's dx is made in the backward, and what
 * the linear reads may be added to in between. */
static void fuse_activation(lg_graph *g, int n)
{
    const struct lg_act_backward_args *act = lg_graph_args(g, n);
    int value = lg_graph_value_of(&act->dy), m = maker(g, &act->dy);
    bool adds = act->accumulate || g->value[lg_graph_value_of(&act->dx)].sum; /* or may add */
    if (adds || act->act == LG_ACT_NONE || !is_op(g, m, LG_OP_linear_backward_data) ||
        g->value[value].bound >= 0 || g->value[value].last != n || is_used_between(g, m, n, value))
        return;
    struct lg_linear_backward_data_args a =
        *(struct lg_linear_backward_data_args *)lg_graph_args(g, m);
    if (a.act != LG_ACT_NONE || a.dx.dim[1] != a.w.dim[1]) return;
    a.act = act->act;
    a.pre = shaped(&act->x, &a.dx);
    a.dx = shaped(&act->dx, &a.dx);
    lg_graph_replace(g, m, LG_OP_linear_backward_data, &a);
    lg_graph_remove(g, n);
}

/* Does the attention write exactly dy, a packed (.., 3 D) of dq, dk and dv? */
static bool fills(const struct lg_attention_backward_args *a, const lg_tensor *dy)
{
    int64_t D = a->dq.dim[2] * a->dq.dim[3], rows = a->dq.dim[0] * a->dq.dim[1];
    size_t step = (size_t)D * lg_dtype_bytes(dy->dtype);
    const char *at = dy->data;
    return dy->rank == 2 && dy->dim[0] == rows && dy->dim[1] == 3 * D && lg_is_contiguous(dy) &&
           a->dq.data == at && a->dk.data == at + step && a->dv.data == at + 2 * step &&
           lg_row_stride(&a->dq, 2) == 3 * D && lg_row_stride(&a->dk, 2) == 3 * D;
}

/* Is dy, which has rows, all of this output, row by row? */
static bool is_all_of(const lg_tensor *out, const lg_tensor *dy)
{
    return out->data == dy->data && lg_numel(out) == lg_numel(dy) &&
           out->dim[out->rank - 1] == dy->dim[1];
}

/* Is dy, which has rows, this output's vectors, a token a row? */
static bool has_tokens_of(const lg_tensor *out, const lg_tensor *dy)
{
    return out->data == dy->data && lg_is_contiguous(out) && lg_numel(out) == lg_numel(dy) &&
           out->dim[2] * out->dim[3] == dy->dim[1];
}

/* Where the node that made dy can sum its columns, the place of that sum; else NULL. The norms sum what they have added to, too. */
static lg_tensor *find_dbias(lg_graph *g, const lg_tensor *dy)
{
    const struct lg_value *v = &g->value[lg_graph_value_of(dy)];
    if (v->first < 0) return NULL;
    const lg_op_id op = g->node[v->first].op;
    if (v->again >= 0 && op != LG_OP_norm_modulate_backward && op != LG_OP_rms_norm_backward)
        return NULL;
    void *args = lg_graph_args(g, v->first);
    switch (op) {
    case LG_OP_norm_modulate_backward: {
        struct lg_norm_modulate_backward_args *a = args;
        return is_all_of(&a->dx, dy) ? &a->dbias : NULL;
    }
    case LG_OP_rms_norm_backward: {
        struct lg_rms_norm_backward_args *a = args;
        return has_tokens_of(&a->dx, dy) ? &a->dbias : NULL;
    }
    case LG_OP_gate_residual_backward: {
        struct lg_gate_residual_backward_args *a = args;
        return is_all_of(&a->dy, dy) ? &a->dbias : NULL;
    }
    case LG_OP_norm_residual_backward: {
        struct lg_gate_residual_backward_args *a =
            &((struct lg_norm_residual_backward_args *)args)->residual;
        return is_all_of(&a->dy, dy) ? &a->dbias : NULL;
    }
    case LG_OP_linear_backward_data: {
        struct lg_linear_backward_data_args *a = args;
        return a->act != LG_ACT_NONE && is_all_of(&a->dx, dy) ? &a->dbias : NULL;
    }
    case LG_OP_attention_backward: {
        struct lg_attention_backward_args *a = args;
        return fills(a, dy) ? &a->dbias : NULL;
    }
    default:
        return NULL;
    }
}

/* Does this node make all features from `from` on of all of dy's rows, as attention does of values, or a copy of them? */
static bool makes_rest(const lg_graph *g, int node, const lg_tensor *dy, int64_t from)
{
    const void *args = lg_graph_args(g, node);
    lg_tensor made;
    if (is_op(g, node, LG_OP_attention_backward)) {
        const lg_tensor dv = ((const struct lg_attention_backward_args *)args)->dv;
        made = lg_at(dv, 0, lg_t2(NULL, dv.dtype, dv.dim[0] * dv.dim[1], dv.dim[2] * dv.dim[3]));
        made.stride[0] = lg_row_stride(&dv, 2);
    } else if (is_op(g, node, LG_OP_copy_rows)) {
        made = ((const struct lg_copy_rows_args *)args)->y;
    } else {
        return false;
    }
    const int64_t step = dy->dim[1], e = (int64_t)lg_dtype_bytes(dy->dtype);
    const int64_t ahead =
        ((int64_t)lg_graph_offset_of(dy) - (int64_t)lg_graph_offset_of(&made)) / e + from;
    const int64_t first = ahead / step; /* of what is made, which may be two streams' */
    return lg_graph_value_of(dy) == lg_graph_value_of(&made) && lg_row_stride(&made, 1) == step &&
           made.dim[1] == step - from && ahead % step == 0 && first >= 0 &&
           first + dy->dim[0] <= made.dim[0];
}

/* Where an RMSNorm makes the first features of each of dy's rows, and the others were made before: of packed q, k and v. That
 * norm sums both, which takes much less time than a product that sums for a bias. */
static void fuse_packed_bias(lg_graph *g, int n)
{
    struct lg_linear_backward_weight_args *a = lg_graph_args(g, n);
    const lg_tensor *dy = &a->dy;
    const int made = g->value[lg_graph_value_of(dy)].first;
    for (int m = made + 1; made >= 0 && m < n; m++) {
        struct lg_rms_norm_backward_args *norm = lg_graph_args(g, m);
        if (!is_op(g, m, LG_OP_rms_norm_backward) || norm->dx.data != dy->data) continue;
        const int64_t *dim = norm->dx.dim, normed = dim[2] * dim[3], rest = dy->dim[1] - normed;
        if (dim[0] * dim[1] != dy->dim[0] || lg_row_stride(&norm->dx, 2) != dy->dim[1] ||
            rest <= 0 || norm->dbias.rank || !makes_rest(g, made, dy, normed))
            continue;
        const lg_tensor all = lg_at(*dy, 0, lg_t3(NULL, dy->dtype, dim[0], dim[1], dy->dim[1]));
        norm->rest = lg_slice(all, 2, normed, rest);
        norm->dbias = lg_slice(a->dbias, 0, 0, normed);
        norm->dbias_of_rest = lg_slice(a->dbias, 0, normed, rest);
        a->dbias = LG_NONE;
        return;
    }
}

/* What is added to a sum comes in its turn. */
static void fuse_bias(lg_graph *g, int n)
{
    struct lg_linear_backward_weight_args *a = lg_graph_args(g, n);
    if (!a->dbias.rank || a->accumulate) return;
    lg_tensor *dbias = find_dbias(g, &a->dy);
    if (!dbias) {
        fuse_packed_bias(g, n);
    } else if (!dbias->rank) {
        *dbias = a->dbias;
        a->dbias = LG_NONE;
    }
}

static const struct {
    lg_op_id op;
    void (*fuse)(lg_graph *g, int node);
} rule[] = {
    {LG_OP_norm_modulate_forward, fuse_residual_norm},
    {LG_OP_gate_residual_backward, fuse_norm_residual},
    {LG_OP_act_backward, fuse_activation},
    {LG_OP_rms_act_forward, fuse_conv_norm},
    {LG_OP_linear_backward_weight, fuse_bias}, /* last: what made dy may be a fused node */
};

void lg_graph_fuse(lg_graph *g)
{
    LG_ASSERT(!g->repeated);
    for (size_t r = 0; r < LG_ARRAY_LEN(rule); r++) {
        for (int n = 0; n < g->n_nodes; n++)
            if (g->node[n].op == rule[r].op) rule[r].fuse(g, n);
        lg_graph_index(g);
    }
}
