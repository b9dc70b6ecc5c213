/* Differentiation; see grad.h.
 *
 * Each value of the forward has a record of its gradient: the tensor that holds it so far, or where the caller
 * wants it. A tensor of the forward is a view of a value; its gradient is the same view of the value's gradient. */
#include "kernels/graph/grad.h"
#include "base/check.h"
#include "kernels/graph/graph_private.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECES_MAX = 1024 };

/* Of one value of the forward. */
struct record {
    bool wanted;  /* something that is trained leads to it */
    bool bound;   /* `is` is the caller's: nothing is moved or replaced */
    bool whole;   /* all of it has been written */
    lg_tensor is; /* contiguous, of the value's shape; rank 0: nothing yet */
    int64_t written;
    lg_tensor *
        piece; /* the views of the value whose gradients have been written, while it is not whole */
    int n_pieces;
};

struct grad {
    lg_graph *g;
    lg_stream *s;
    const struct lg_gradients *x;
    struct record *record; /* of the forward's values */
    int n_values;
    int *holders; /* by value: how many records have their gradient there and are not done */
    int n_holders;
};

static struct record *record_of(const struct grad *c, const lg_tensor *t)
{
    int value = lg_graph_value_of(t);
    LG_ASSERT(value < c->n_values);
    return &c->record[value];
}

static bool wants(const struct grad *c, const lg_tensor *t)
{
    return t->rank && t->data && record_of(c, t)->wanted;
}

/* ---- whose memory a gradient is ---- */

static void hold(struct grad *c, const lg_tensor *t, int by)
{
    int value = lg_graph_value_of(t);
    if (value >= c->n_holders) {
        int n = c->g->n_values;
        c->holders = realloc(c->holders, (size_t)n * sizeof *c->holders);
        LG_ASSERT(c->holders);
        memset(c->holders + c->n_holders, 0, (size_t)(n - c->n_holders) * sizeof *c->holders);
        c->n_holders = n;
    }
    c->holders[value] += by;
    LG_ASSERT(c->holders[value] >= 0);
}

static void set(struct grad *c, struct record *r, lg_tensor is)
{
    if (r->is.rank) hold(c, &r->is, -1);
    r->is = is;
    hold(c, &is, 1);
}

static lg_tensor shape_of(const struct grad *c, const struct record *r)
{
    const struct lg_value *v = &c->g->value[r - c->record];
    return lg_tensor_of(NULL, v->dtype, v->rank, v->dim);
}

static lg_tensor new_value(struct grad *c, const struct record *r)
{
    char name[LG_VALUE_NAME_BYTES];
    snprintf(name, sizeof name, "d %.40s", c->g->value[r - c->record].name);
    return lg_graph_value(c->g, name, shape_of(c, r));
}

/* Like t, with gaps where it has some, in memory of its own: an operation may want rows as far apart as others'. */
static lg_tensor like(struct grad *c, const char *name, const lg_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->rank; i++) last += (t->dim[i] - 1) * t->stride[i];
    lg_tensor all = lg_is_contiguous(t) ? *t : lg_t1(NULL, t->dtype, last + 1);
    return lg_at(lg_graph_value(c->g, name, all), 0, *t);
}

/* Before it is added to: nobody else may need what is there. */
static void make_own(struct grad *c, struct record *r)
{
    const struct lg_value *v = &c->g->value[lg_graph_value_of(&r->is)];
    if (v->bound < 0 && c->holders[lg_graph_value_of(&r->is)] == 1) return;
    lg_tensor copy = new_value(c, r);
    lg_combine(c->s, &(struct lg_combine_args){.x = {r->is}, .c = {1}, .count = 1, .y = copy});
    set(c, r, copy);
}

/* ---- parts ---- */

/* The view of the record's gradient that t is of the value. */
static lg_tensor part(const struct record *r, const lg_tensor *t)
{
    lg_tensor p = *t;
    size_t elements = lg_graph_offset_of(t) / lg_dtype_bytes(t->dtype);
    p.dtype = r->is.dtype;
    p.data = (char *)r->is.data + elements * lg_dtype_bytes(p.dtype);
    return p;
}

static bool is_same_view(const lg_tensor *a, const lg_tensor *b)
{
    if (a->data != b->data || lg_numel(a) != lg_numel(b)) return false;
    if (lg_is_contiguous(a) && lg_is_contiguous(b)) return true;
    return a->rank == b->rank && !memcmp(a->dim, b->dim, sizeof a->dim) &&
           !memcmp(a->stride, b->stride, sizeof a->stride);
}

static bool is_written(const struct record *r, const lg_tensor *t)
{
    if (r->whole) return true;
    for (int i = 0; i < r->n_pieces; i++)
        if (is_same_view(&r->piece[i], t)) return true;
    return false;
}

/* That two parts are apart is what recording their writers asserts. */
static void note_written(const struct grad *c, struct record *r, const lg_tensor *t)
{
    LG_ASSERT(r->n_pieces < PIECES_MAX);
    if ((r->n_pieces & (r->n_pieces - 1)) == 0) { /* capacity: the powers of two */
        r->piece =
            realloc(r->piece, (size_t)(r->n_pieces ? 2 * r->n_pieces : 1) * sizeof *r->piece);
        LG_ASSERT(r->piece);
    }
    r->piece[r->n_pieces++] = *t;
    r->written += lg_numel(t);
    lg_tensor all = shape_of(c, r);
    r->whole = !r->bound && r->written == lg_numel(&all);
}

/* How many elements of t, which lies together, a piece of the same value has: rows, all as far apart. */
static int64_t common_elements(const lg_tensor *t, const lg_tensor *piece)
{
    const int64_t e = (int64_t)lg_dtype_bytes(t->dtype);
    const int64_t begin = (int64_t)lg_graph_offset_of(t) / e, end = begin + lg_numel(t);
    int64_t at = (int64_t)lg_graph_offset_of(piece) / e, row = 1, rows = 1, count = 0;
    int k = piece->rank;
    for (; k > 0 && (piece->dim[k - 1] == 1 || piece->stride[k - 1] == row); k--)
        row *= piece->dim[k - 1];
    for (int i = 0; i < k; i++) rows *= piece->dim[i];
    LG_ASSERT(k == 0 || lg_dims_merge(piece, 0, k, piece->stride[k - 1]));
    for (int64_t i = 0; i < rows; i++, at += k ? piece->stride[k - 1] : 0)
        count += LG_MAX(LG_MIN(at + row, end) - LG_MAX(at, begin), (int64_t)0);
    return count;
}

/* Is the gradient of all of t there? Pieces do not meet. */
static bool is_done(const struct record *r, const lg_tensor *t)
{
    int64_t count = 0;
    if (r->whole) return true;
    for (int i = 0; lg_is_contiguous(t) && i < r->n_pieces; i++)
        count += common_elements(t, &r->piece[i]);
    return count == lg_numel(t);
}

/* The gradient of t, which is done. */
static lg_tensor gradient(const struct grad *c, const lg_tensor *t)
{
    const struct record *r = record_of(c, t);
    LG_ASSERT(is_done(r, t)); /* else a part of it is used by nobody: write zeros there */
    return part(r, t);
}

/* Of a part of a value, rows that may lie apart. */
static void write_zeros(struct grad *c, lg_tensor to)
{
    lg_tensor rows = lg_t2(to.data, to.dtype, to.dim[0], lg_numel(&to) / to.dim[0]);
    lg_tensor zeros = lg_graph_value(c->g, "zeros", rows);
    rows.stride[0] = lg_row_stride(&to, 1);
    lg_graph_zero(c->g, zeros);
    lg_copy_rows(c->s, &(struct lg_copy_rows_args){.x = zeros, .y = rows});
}

/* With the first contribution to a value that is wanted. */
static void zero_unread(struct grad *c, struct record *r)
{
    for (int i = 0; i < c->x->n_unread; i++) {
        const lg_tensor *t = &c->x->unread[i];
        if (record_of(c, t) != r) continue;
        if (r->bound) {
            struct lg_copy_args zero = {.t = part(r, t)};
            lg_graph_record(c->g, LG_NODE_ZERO, &zero, sizeof zero);
        } else {
            write_zeros(c, part(r, t));
            note_written(c, r, t);
        }
    }
}

/* The view of t in the value that began what the record's gradient continues: what is added to one part does not keep
 * others from being written for the first time. */
static lg_tensor first_part(const struct grad *c, const struct record *r, const lg_tensor *t)
{
    struct record begun = *r;
    const struct lg_value *value = c->g->value;
    int v = lg_graph_value_of(&r->is);
    while (value[v].again >= 0) v = value[v].again;
    begun.is.data = (void *)((uintptr_t)(v + 1) << LG_VALUE_SHIFT); // NOLINT: no memory yet
    return part(&begun, t);
}

/* Where an operation that can add puts its contribution to t. */
static lg_tensor into(struct grad *c, const lg_tensor *t, bool *ret_add)
{
    struct record *r = record_of(c, t);
    LG_ASSERT(r->wanted);
    *ret_add = is_written(r, t);
    if (!*ret_add) {
        if (!r->is.rank) set(c, r, new_value(c, r));
        if (!r->n_pieces) zero_unread(c, r);
        note_written(c, r, t);
        return first_part(c, r, t);
    } else if (!r->bound) {
        make_own(c, r);
        set(c, r, lg_graph_again(c->g, r->is));
    }
    return part(r, t);
}

/* dt is a contribution to t, as it is. */
static void give(struct grad *c, const lg_tensor *t, lg_tensor dt)
{
    struct record *r = record_of(c, t);
    lg_tensor all = shape_of(c, r);
    LG_ASSERT(r->wanted && lg_is_contiguous(&dt) && lg_is_contiguous(t));
    bool whole = lg_numel(t) == lg_numel(&all), add;
    all.data = dt.data;
    if (r->bound) { /* a parameter that is added as it is: of another type, perhaps */
        lg_tensor to = into(c, t, &add);
        int64_t n = lg_numel(t);
        lg_sum_rows(c->s, &(struct lg_sum_rows_args){.x = lg_t2(dt.data, dt.dtype, 1, n),
                                                     .y = lg_t1(to.data, to.dtype, n),
                                                     .accumulate = add});
    } else if (!is_written(r, t) && whole) {
        set(c, r, all);
        note_written(c, r, t);
    } else if (!is_written(r, t)) {
        lg_tensor to = into(c, t, &add);
        lg_combine(c->s, &(struct lg_combine_args){.x = {dt}, .c = {1}, .count = 1, .y = to});
    } else {
        LG_ASSERT(whole);
        lg_tensor sum = new_value(c, r);
        lg_add_forward(c->s, &(struct lg_add_forward_args){.a = r->is, .b = all, .y = sum});
        set(c, r, sum);
    }
}

/* For an operation that cannot add: where its contribution to t goes, and then that it is there. A t that is not
 * wanted, but that the operation writes all the same, gets memory of its own. */
static lg_tensor fresh(struct grad *c, const lg_tensor *t)
{
    bool add;
    if (!t->rank) return LG_NONE;
    if (wants(c, t) && !record_of(c, t)->bound && !is_written(record_of(c, t), t))
        return into(c, t, &add);
    return like(c, "unwanted or added", t);
}
static void settle(struct grad *c, const lg_tensor *t, lg_tensor dt)
{
    if (!wants(c, t)) return;
    struct record *r = record_of(c, t);
    if (!r->is.rank || part(r, t).data != dt.data) give(c, t, dt);
}

/* Where the gradients of an affine part go, which one operation makes. */
static void affine(struct grad *c, const lg_tensor *w, const lg_tensor *b, lg_tensor *ret_dw,
                   lg_tensor *ret_db, bool *ret_add)
{
    bool add_b;
    *ret_dw = into(c, w, ret_add);
    *ret_db = into(c, b, &add_b);
    LG_ASSERT(*ret_add == add_b);
}

/* ---- the rules ---- */

#define RULE(name)                                                                                 \
    static void rule_##name(struct grad *, struct lg_##name##_args *);                             \
    static void grad_##name(struct grad *c, void *args)                                            \
    {                                                                                              \
        rule_##name(c, args);                                                                      \
    }                                                                                              \
    static void rule_##name(struct grad *c, struct lg_##name##_args *a)

RULE(linear_forward)
{
    lg_tensor dy = gradient(c, &a->y);
    bool add, add_bias;
    if (a->act != LG_ACT_NONE) {
        lg_tensor dpre = like(c, "d pre", &a->pre);
        lg_act_backward(
            c->s, &(struct lg_act_backward_args){.x = a->pre, .dy = dy, .dx = dpre, .act = a->act});
        dy = dpre;
    }
    if (wants(c, &a->residual)) give(c, &a->residual, dy);
    if (wants(c, &a->w)) {
        struct lg_linear_backward_weight_args w = {.dy = dy, .x = a->x};
        w.dw = into(c, &a->w, &add);
        if (wants(c, &a->bias)) {
            w.dbias = into(c, &a->bias, &add_bias);
            LG_ASSERT(add == add_bias);
        }
        w.accumulate = add;
        lg_linear_backward_weight(c->s, &w);
    } else if (wants(c, &a->bias)) {
        lg_tensor dbias = into(c, &a->bias, &add_bias);
        lg_sum_rows(c->s, &(struct lg_sum_rows_args){.x = dy, .y = dbias, .accumulate = add_bias});
    }
    if (!wants(c, &a->x)) return;
    lg_tensor dx = into(c, &a->x, &add);
    lg_linear_backward_data(c->s, &(struct lg_linear_backward_data_args){
                                      .dy = dy, .w = a->w, .dx = dx, .accumulate = add});
}

RULE(act_forward)
{
    bool add;
    lg_tensor dy = gradient(c, &a->y), dx = into(c, &a->x, &add);
    lg_act_backward(c->s, &(struct lg_act_backward_args){
                              .x = a->x, .dy = dy, .dx = dx, .act = a->act, .accumulate = add});
}

RULE(glu_forward)
{
    lg_tensor dx = fresh(c, &a->x);
    lg_glu_backward(c->s, &(struct lg_glu_backward_args){
                              .dy = gradient(c, &a->y), .x = a->x, .dx = dx, .act = a->act});
    settle(c, &a->x, dx);
}

RULE(mul_forward)
{
    lg_tensor dy = gradient(c, &a->y);
    const lg_tensor *factor[] = {&a->a, &a->b};
    for (int i = 0; i < 2; i++) {
        if (!wants(c, factor[i])) continue;
        lg_tensor d = fresh(c, factor[i]);
        lg_mul_forward(c->s, &(struct lg_mul_forward_args){.a = dy, .b = *factor[1 - i], .y = d});
        settle(c, factor[i], d);
    }
}

/* b was repeated along the slow dimensions: its gradient is a sum of rows. */
RULE(add_forward)
{
    lg_tensor dy = gradient(c, &a->y);
    int64_t m = lg_numel(&a->b), rows = lg_numel(&a->a) / m;
    bool add;
    if (wants(c, &a->b) && rows > 1) {
        lg_tensor db = into(c, &a->b, &add);
        lg_sum_rows(c->s, &(struct lg_sum_rows_args){.x = lg_t2(dy.data, dy.dtype, rows, m),
                                                     .y = lg_t1(db.data, db.dtype, m),
                                                     .accumulate = add});
    } else if (wants(c, &a->b)) {
        give(c, &a->b, dy);
    }
    if (wants(c, &a->a)) give(c, &a->a, dy);
}

RULE(combine)
{
    lg_tensor dy = gradient(c, &a->y);
    for (int i = 0; i < a->count; i++) {
        if (!wants(c, &a->x[i])) continue;
        lg_tensor d = fresh(c, &a->x[i]);
        lg_combine(c->s, &(struct lg_combine_args){.x = {dy}, .c = {a->c[i]}, .count = 1, .y = d});
        settle(c, &a->x[i], d);
    }
}

/* x is contiguous, y a part of a wider tensor. */
RULE(copy_rows)
{
    if (!wants(c, &a->x)) return;
    LG_ASSERT(a->groups <= 1);
    lg_tensor d = fresh(c, &a->x);
    lg_copy_rows(c->s, &(struct lg_copy_rows_args){.x = gradient(c, &a->y), .y = d});
    settle(c, &a->x, d);
}

RULE(rope)
{
    lg_tensor d = fresh(c, &a->x);
    lg_rope(c->s, &(struct lg_rope_args){.x = gradient(c, &a->y),
                                         .cos = a->cos,
                                         .sin = a->sin,
                                         .y = d,
                                         .turned = a->turned,
                                         .inverse = !a->inverse});
    settle(c, &a->x, d);
}

RULE(norm_modulate_forward)
{
    struct lg_norm_modulate_backward_args b = {.dy = gradient(c, &a->y),
                                               .x = a->x,
                                               .mean = a->mean,
                                               .rstd = a->rstd,
                                               .scale = a->scale,
                                               .rms = a->rms};
    if (wants(c, &a->shift) || wants(c, &a->scale)) {
        b.dshift = fresh(c, &a->shift);
        b.dscale = fresh(c, &a->scale);
    }
    b.dx = wants(c, &a->x) ? into(c, &a->x, &b.accumulate) : fresh(c, &a->x);
    lg_norm_modulate_backward(c->s, &b);
    if (!b.dshift.rank) return;
    settle(c, &a->shift, b.dshift);
    settle(c, &a->scale, b.dscale);
}

RULE(gate_residual_forward)
{
    lg_tensor dout = gradient(c, &a->out);
    if (a->gate.rank && (wants(c, &a->y) || wants(c, &a->gate))) {
        struct lg_gate_residual_backward_args b = {.dout = dout, .gate = a->gate};
        b.dy = fresh(c, &a->y);
        if (wants(c, &a->gate)) b.y = a->y, b.dgate = fresh(c, &a->gate);
        lg_gate_residual_backward(c->s, &b);
        settle(c, &a->y, b.dy);
        if (b.dgate.rank) settle(c, &a->gate, b.dgate);
    } else if (wants(c, &a->y)) {
        give(c, &a->y, dout);
    }
    if (wants(c, &a->x)) give(c, &a->x, dout);
}

RULE(rms_norm_forward)
{
    struct lg_rms_norm_backward_args b = {.dy = gradient(c, &a->y),
                                          .x = a->x,
                                          .w = a->w,
                                          .cos = a->cos,
                                          .sin = a->sin,
                                          .rstd = a->rstd,
                                          .each = a->each};
    const bool adds = wants(c, &a->x) && !a->cos.rank; /* it can, where nothing is turned */
    b.dx = adds ? into(c, &a->x, &b.accumulate) : fresh(c, &a->x);
    if (wants(c, &a->w)) b.dw = into(c, &a->w, &b.accumulate_dw);
    lg_rms_norm_backward(c->s, &b);
    if (!adds) settle(c, &a->x, b.dx);
}

RULE(layer_norm_forward)
{
    struct lg_layer_norm_backward_args b = {
        .dy = gradient(c, &a->y), .x = a->x, .w = a->w, .mean = a->mean, .rstd = a->rstd};
    b.dx = wants(c, &a->x) ? into(c, &a->x, &b.accumulate) : fresh(c, &a->x);
    if (wants(c, &a->w)) affine(c, &a->w, &a->b, &b.dw, &b.db, &b.accumulate_dw);
    lg_layer_norm_backward(c->s, &b);
}

/* Mean and variance are functions of x, whose part in the gradient the backward knows. */
RULE(group_norm_forward)
{
    struct lg_group_norm_backward_args b = {.dy = gradient(c, &a->y),
                                            .x = a->x,
                                            .mean_var = a->mean_var,
                                            .w = a->w,
                                            .b = a->b,
                                            .groups = a->groups,
                                            .eps = a->eps,
                                            .act = a->act};
    LG_ASSERT(a->mean_var.rank); /* else nobody has kept them */
    b.dx = wants(c, &a->x) ? into(c, &a->x, &b.accumulate) : fresh(c, &a->x);
    if (wants(c, &a->w)) affine(c, &a->w, &a->b, &b.dw, &b.db, &b.accumulate_dw);
    lg_group_norm_backward(c->s, &b);
}

RULE(shift_forward)
{
    lg_tensor dy = gradient(c, &a->y);
    if (wants(c, &a->shift)) {
        lg_tensor d = fresh(c, &a->shift);
        lg_shift_backward(c->s, &(struct lg_shift_backward_args){.dy = dy, .dshift = d});
        settle(c, &a->shift, d);
    }
    if (wants(c, &a->x)) give(c, &a->x, dy);
}

RULE(conv2d_forward)
{
    lg_tensor dy = gradient(c, &a->y);
    bool add, add_bias;
    if (wants(c, &a->residual)) give(c, &a->residual, dy);
    if (wants(c, &a->w)) {
        struct lg_conv2d_backward_weight_args w = {.dy = dy,
                                                   .x = a->x,
                                                   .stride = a->stride,
                                                   .top = a->top,
                                                   .left = a->left,
                                                   .bottom = a->bottom,
                                                   .right = a->right};
        w.dw = into(c, &a->w, &add);
        if (wants(c, &a->bias)) {
            w.dbias = into(c, &a->bias, &add_bias);
            LG_ASSERT(add == add_bias);
        }
        w.accumulate = add;
        lg_conv2d_backward_weight(c->s, &w);
    } else if (wants(c, &a->bias)) {
        lg_tensor dbias = into(c, &a->bias, &add_bias);
        const int64_t O = dbias.dim[0], rows = lg_numel(&dy) / O;
        lg_sum_rows(c->s, &(struct lg_sum_rows_args){.x = lg_t2(dy.data, dy.dtype, rows, O),
                                                     .y = dbias,
                                                     .accumulate = add_bias});
    }
    if (!wants(c, &a->x)) return;
    lg_tensor dx = into(c, &a->x, &add);
    lg_conv2d_backward_data(c->s, &(struct lg_conv2d_backward_data_args){.dy = dy,
                                                                         .w = a->w,
                                                                         .dx = dx,
                                                                         .stride = a->stride,
                                                                         .top = a->top,
                                                                         .left = a->left,
                                                                         .bottom = a->bottom,
                                                                         .right = a->right,
                                                                         .accumulate = add});
}

RULE(upsample2x_forward)
{
    bool add;
    lg_tensor dy = gradient(c, &a->y), dx = into(c, &a->x, &add);
    lg_upsample2x_backward(
        c->s, &(struct lg_upsample2x_backward_args){.dy = dy, .dx = dx, .accumulate = add});
}

RULE(attention_forward)
{
    LG_ASSERT(!a->bias.rank && !a->causal); /* its backward knows neither */
    struct lg_attention_backward_args b = {.dout = gradient(c, &a->o),
                                           .o = a->o,
                                           .q = a->q,
                                           .k = a->k,
                                           .v = a->v,
                                           .k_length = a->k_length,
                                           .lse = a->lse,
                                           .o_low = a->o_low,
                                           .scale = a->scale,
                                           .first_queries = a->first_queries,
                                           .first_keys = a->first_keys};
    b.dq = fresh(c, &a->q);
    b.dk = fresh(c, &a->k);
    b.dv = fresh(c, &a->v);
    lg_attention_backward(c->s, &b);
    settle(c, &a->q, b.dq);
    settle(c, &a->k, b.dk);
    settle(c, &a->v, b.dv);
}

RULE(embedding_forward)
{
    bool add;
    if (!wants(c, &a->table)) return;
    lg_tensor dtable = into(c, &a->table, &add);
    lg_embedding_backward(
        c->s, &(struct lg_embedding_backward_args){
                  .ids = a->ids, .dy = gradient(c, &a->y), .dtable = dtable, .accumulate = add});
}

RULE(unpatchify_forward)
{
    lg_tensor dx = fresh(c, &a->x);
    lg_unpatchify_backward(
        c->s, &(struct lg_unpatchify_backward_args){.dy = gradient(c, &a->y),
                                                    .dx = dx,
                                                    .patch = a->patch,
                                                    .channels_first = a->channels_first});
    settle(c, &a->x, dx);
}

RULE(nhwc_to_nchw)
{
    lg_tensor dx = fresh(c, &a->x);
    lg_nchw_to_nhwc(c->s, &(struct lg_nchw_to_nhwc_args){.x = gradient(c, &a->y), .y = dx});
    settle(c, &a->x, dx);
}

/* Not an operation's: the exchange the other way round. What was gathered is a sum of what all ranks made of it. */
static void grad_exchange(struct grad *c, struct lg_exchange_args *a)
{
    const bool gathered = a->cuts.after.dim < 0;
    const struct lg_cuts back = {.rank = a->cuts.rank,
                                 .degree = a->cuts.degree,
                                 .before = a->cuts.after,
                                 .after = a->cuts.before};
    LG_ASSERT(a->cuts.before.dim >= 0); /* a scatter has no gradient */
    lg_tensor d =
        lg_graph_exchange(c->g, gathered ? "d parts" : "d exchange", &back, gradient(c, &a->to));
    if (!gathered) {
        give(c, &a->from, d);
        return;
    }
    const int64_t n = lg_numel(&a->from);
    bool add;
    lg_tensor to = into(c, &a->from, &add);
    lg_sum_rows(c->s, &(struct lg_sum_rows_args){.x = lg_t2(d.data, d.dtype, back.degree, n),
                                                 .y = lg_t1(to.data, to.dtype, n),
                                                 .accumulate = add});
}

#define GRAD(name) [LG_OP_##name] = grad_##name,
static void (*const rule[LG_OP_COUNT])(struct grad *, void *args) = {
#include "kernels/graph/grad.def"
};
#undef GRAD

/* ---- the walk ---- */

/* What a rule needs of the forward and the forward left out. */
static void switch_on(lg_graph *g, int node)
{
    const bool f64 = lg_device_dtype(g->stream.device) == LG_F64;
    if (g->node[node].op == LG_OP_linear_forward) {
        struct lg_linear_forward_args *a = lg_graph_args(g, node);
        if (a->act != LG_ACT_NONE && !a->pre.rank) a->pre = lg_graph_value(g, "pre", a->y);
    }
    if (g->node[node].op == LG_OP_rms_norm_forward) {
        struct lg_rms_norm_forward_args *a = lg_graph_args(g, node);
        const lg_dtype type = f64 ? LG_F64 : LG_F32;
        const int64_t B = a->x.dim[0], T = a->x.dim[1], vectors = a->x.dim[2];
        if (!a->rstd.rank) a->rstd = lg_graph_value(g, "rstd", lg_t3(NULL, type, B, T, vectors));
    }
    if (g->node[node].op == LG_OP_layer_norm_forward) {
        struct lg_layer_norm_forward_args *a = lg_graph_args(g, node);
        const lg_tensor stat = lg_t1(NULL, f64 ? LG_F64 : LG_F32, a->x.dim[0]);
        if (!a->rstd.rank) {
            a->mean = lg_graph_value(g, "mean", stat);
            a->rstd = lg_graph_value(g, "rstd", stat);
        }
    }
    if (g->node[node].op == LG_OP_attention_forward) {
        struct lg_attention_forward_args *a = lg_graph_args(g, node);
        const lg_dtype type = f64 ? LG_F64 : LG_F32;
        if (!a->lse.rank)
            a->lse =
                lg_graph_value(g, "lse", lg_t3(NULL, type, a->q.dim[0], a->q.dim[2], a->q.dim[1]));
        const bool many = LG_MIN(a->q.dim[1], a->k.dim[1]) >= LG_GRAD_MANY_TOKENS;
        if (!a->o_low.rank && many && lg_dtype_bytes(a->o.dtype) == 2)
            a->o_low = lg_graph_value(g, "o_low", a->o);
    }
}

static void find_wanted(struct grad *c, const struct lg_gradient *wanted, int n)
{
    for (int i = 0; i < n; i++) {
        struct record *r = record_of(c, &wanted[i].of);
        LG_ASSERT(c->g->value[lg_graph_value_of(&wanted[i].is)].sum);
        r->wanted = r->bound = true;
        set(c, r, wanted[i].is);
    }
    for (int k = 0; k < c->g->n_nodes; k++) {
        struct lg_use use[LG_USES_MAX];
        int count = lg_graph_uses(c->g, k, use);
        bool any = false;
        for (int i = 0; i < count; i++) any |= !use[i].operand->out && wants(c, use[i].t);
        for (int i = 0; any && i < count; i++)
            if (use[i].operand->out) c->record[use[i].value].wanted = true;
    }
}

/* A gradient has come to what this node made: to one result, the one that its rule knows. */
static bool is_reached(const struct grad *c, int node)
{
    struct lg_use use[LG_USES_MAX];
    int count = lg_graph_uses(c->g, node, use), reached = 0;
    for (int i = 0; i < count; i++) {
        const struct record *r = &c->record[use[i].value];
        reached += use[i].operand->out && r->wanted && r->is.rank;
    }
    LG_ASSERT(reached <= 1);
    return reached;
}

/* The gradients of what this node was the first to write have been used. */
static void finish(struct grad *c, int node)
{
    struct lg_use use[LG_USES_MAX];
    int count = lg_graph_uses(c->g, node, use);
    for (int i = 0; i < count; i++) {
        struct record *r = &c->record[use[i].value];
        if (!use[i].operand->out || c->g->value[use[i].value].first != node || !r->is.rank)
            continue;
        hold(c, &r->is, -1);
        r->is = LG_NONE;
    }
}

static void visit(struct grad *c, int node)
{
    union {
        struct lg_exchange_args exchange;
#define LG_OP(name, ...) struct lg_##name##_args name;
#include "kernels/ops.def"
#undef LG_OP
    } args; /* a copy: recording moves the nodes' arguments */
    const lg_op_id op = c->g->node[node].op;
    const bool exchange = c->g->node[node].kind == LG_NODE_EXCHANGE;
    memcpy(&args, lg_graph_args(c->g, node),
           exchange ? sizeof args.exchange : lg_op_info(op)->args_bytes);
    LG_ASSERT(exchange || rule[op]); /* has no gradient: grad.def */
    c->g->block = c->g->node[node].block;
    if (exchange)
        grad_exchange(c, &args.exchange);
    else
        rule[op](c, &args);
    finish(c, node);
}

void lg_graph_grad(lg_graph *g, const struct lg_gradients *x)
{
    const int nodes = g->n_nodes;
    LG_ASSERT(!g->backward); /* once */
    for (int n = 0; n < nodes; n++) switch_on(g, n);
    lg_graph_index(g);
    struct grad c = {.g = g, .s = &g->stream, .x = x, .n_values = g->n_values};
    c.record = calloc((size_t)LG_MAX(g->n_values, 1), sizeof *c.record);
    LG_ASSERT(c.record);
    find_wanted(&c, x->wanted, x->n_wanted);
    for (int i = 0; i < x->n_given; i++) {
        struct record *r = record_of(&c, &x->given[i].of);
        LG_ASSERT(!r->is.rank); /* once each */
        set(&c, r, x->given[i].is);
        r->whole = true;
    }
    g->backward = true;
    for (int n = nodes - 1; n >= 0; n--)
        if (is_reached(&c, n)) visit(&c, n);
    g->block = -1;
    for (int i = 0; i < c.n_values; i++) free(c.record[i].piece);
    free(c.record);
    free(c.holders);
}
