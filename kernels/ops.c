/* The operations: checks, scratch accounting, dispatch.
 *
 * Design: one function per operation, in the order of ops.def. Each checks shapes and types, then
 * which tensors may share memory (in the words of ops_check.h), then RUNs: on a dry stream that only
 * raises the scratch need, else it asserts that the stream has enough scratch and calls the backend.
 * Kernels trust what is checked here. Contents (ids in range, lengths of at least 1) lie on the device
 * and are the kernel's to check. Elementwise operations take any shape: there only the numbers of
 * elements must agree.
 *
 * An operation is a bounded piece of work: a heartbeat follows it (base/heartbeat.h), on a dry stream too,
 * since a backend may choose its algorithm there. */
#include "base/heartbeat.h"
#include "kernels/ops_check.h"

/* True when the operation is to run now. */
static bool scratch_ready(lg_stream *s, lg_op_id op, const void *args)
{
    size_t need = s->device->scratch_bytes(s->device, op, args);
    if (s->dry) {
        if (need > s->scratch_need) s->scratch_need = need;
        return false;
    }
    LG_ASSERT(need <= s->scratch_bytes);
    return true;
}

#define RUN(name)                                                                                  \
    do {                                                                                           \
        if (scratch_ready(s, LG_OP_##name, a)) s->device->ops->name(s, a);                         \
        lg_heartbeat();                                                                            \
    } while (0)

void lg_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    int64_t M = a->x.dim[0], K = a->x.dim[1], N = a->w.dim[0];
    SHAPE(a->x, FLOAT(s), M, K);
    SHAPE(a->w, FLOAT(s), N, K);
    MAYBE(a->bias, FLOAT(s), N);
    SHAPE(a->y, FLOAT(s), M, N);
    MAYBE(a->pre, FLOAT(s), M, N);
    LG_ASSERT(absent(s, &a->pre) || a->act != LG_ACT_NONE);
    APART(whole(a->y), whole(a->x), whole(a->w), whole(a->bias), whole(a->pre));
    APART(whole(a->pre), whole(a->x), whole(a->w), whole(a->bias));
    RUN(linear_forward);
}

void lg_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    int64_t M = a->dy.dim[0], N = a->dy.dim[1], K = a->w.dim[1];
    SHAPE(a->dy, FLOAT(s), M, N);
    SHAPE(a->w, FLOAT(s), N, K);
    SHAPE(a->dx, FLOAT(s), M, K);
    MAYBE(a->pre, FLOAT(s), M, K);
    WIDE_MAYBE(a->dbias, K);
    LG_ASSERT(absent(s, &a->pre) == (a->act == LG_ACT_NONE));
    LG_ASSERT(a->act == LG_ACT_NONE ? absent(s, &a->dbias) : !a->accumulate);
    APART(whole(a->dx), whole(a->dy), whole(a->w), whole(a->pre), whole(a->dbias));
    APART(whole(a->dbias), whole(a->dy), whole(a->w), whole(a->pre));
    RUN(linear_backward_data);
}

void lg_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    int64_t M = a->dy.dim[0], N = a->dy.dim[1], K = a->x.dim[1];
    SHAPE(a->dy, FLOAT(s), M, N);
    SHAPE(a->x, FLOAT(s), M, K);
    WIDE_SHAPE(a->dw, N, K);
    WIDE_MAYBE(a->dbias, N);
    APART(whole(a->dw), whole(a->dy), whole(a->x), whole(a->dbias));
    APART(whole(a->dbias), whole(a->dy), whole(a->x));
    RUN(linear_backward_weight);
}

void lg_act_forward(lg_stream *s, const struct lg_act_forward_args *a)
{
    COUNT(a->x, FLOAT(s), lg_numel(&a->x));
    COUNT(a->y, FLOAT(s), lg_numel(&a->x));
    SAME_OR_APART(a->y, a->x);
    RUN(act_forward);
}

void lg_act_backward(lg_stream *s, const struct lg_act_backward_args *a)
{
    COUNT(a->x, FLOAT(s), lg_numel(&a->x));
    COUNT(a->dy, FLOAT(s), lg_numel(&a->x));
    COUNT(a->dx, FLOAT(s), lg_numel(&a->x));
    APART(whole(a->dx), whole(a->x));
    if (a->accumulate)
        APART(whole(a->dx), whole(a->dy));
    else
        SAME_OR_APART(a->dx, a->dy);
    RUN(act_backward);
}

void lg_mul_forward(lg_stream *s, const struct lg_mul_forward_args *a)
{
    COUNT(a->a, FLOAT(s), lg_numel(&a->a));
    COUNT(a->b, FLOAT(s), lg_numel(&a->a));
    COUNT(a->y, FLOAT(s), lg_numel(&a->a));
    SAME_OR_APART(a->y, a->a);
    SAME_OR_APART(a->y, a->b);
    RUN(mul_forward);
}

void lg_add_forward(lg_stream *s, const struct lg_add_forward_args *a)
{
    COUNT(a->a, FLOAT(s), lg_numel(&a->a));
    COUNT(a->b, FLOAT(s), lg_numel(&a->b));
    LG_ASSERT(lg_numel(&a->a) % lg_numel(&a->b) == 0);
    COUNT(a->y, FLOAT(s), lg_numel(&a->a));
    SAME_OR_APART(a->y, a->a);
    APART(whole(a->y), whole(a->b));
    RUN(add_forward);
}

void lg_sum_rows(lg_stream *s, const struct lg_sum_rows_args *a)
{
    int64_t M = a->x.dim[0], N = a->x.dim[1];
    SHAPE(a->x, FLOAT(s), M, N);
    WIDE_SHAPE(a->y, N);
    APART(whole(a->y), whole(a->x));
    RUN(sum_rows);
}

void lg_combine(lg_stream *s, const struct lg_combine_args *a)
{
    LG_ASSERT(a->count >= 1 && a->count <= LG_COMBINE_MAX);
    for (int i = 0; i < a->count; i++) {
        COUNT(a->x[i], FLOAT(s), lg_numel(&a->y));
        SAME_OR_APART(a->y, a->x[i]);
    }
    COUNT(a->y, FLOAT(s), lg_numel(&a->y));
    RUN(combine);
}

void lg_cast(lg_stream *s, const struct lg_cast_args *a)
{
    LG_ASSERT(a->x.dtype <= LG_BF16 && a->y.dtype <= LG_BF16);
    COUNT(a->x, a->x.dtype, lg_numel(&a->x));
    COUNT(a->y, a->y.dtype, lg_numel(&a->x));
    APART(whole(a->y), whole(a->x));
    RUN(cast);
}

static void check_norm_modulate_forward(lg_stream *s, const struct lg_norm_modulate_forward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    SHAPE(a->x, FLOAT(s), B, T, D);
    MAYBE(a->shift, FLOAT(s), B, D);
    MAYBE(a->scale, FLOAT(s), B, D);
    BOTH_OR_NEITHER(a->shift, a->scale);
    LG_ASSERT(absent(s, &a->scale) || a->mod_stride >= D);
    SHAPE(a->y, FLOAT(s), B, T, D);
    SHAPE(a->mean, STATS(s), B, T);
    SHAPE(a->rstd, STATS(s), B, T);
    struct span shift = rows_of(a->shift, B, D, a->mod_stride);
    struct span scale = rows_of(a->scale, B, D, a->mod_stride);
    APART(whole(a->y), whole(a->x), shift, scale, whole(a->mean), whole(a->rstd));
    APART(whole(a->mean), whole(a->x), shift, scale, whole(a->rstd));
    APART(whole(a->rstd), whole(a->x), shift, scale);
}

void lg_norm_modulate_forward(lg_stream *s, const struct lg_norm_modulate_forward_args *a)
{
    check_norm_modulate_forward(s, a);
    RUN(norm_modulate_forward);
}

static void check_norm_modulate_backward(lg_stream *s,
                                         const struct lg_norm_modulate_backward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    SHAPE(a->x, FLOAT(s), B, T, D);
    SHAPE(a->dy, FLOAT(s), B, T, D);
    SHAPE(a->dx, FLOAT(s), B, T, D);
    SHAPE(a->mean, STATS(s), B, T);
    SHAPE(a->rstd, STATS(s), B, T);
    MAYBE(a->scale, FLOAT(s), B, D);
    MAYBE(a->dshift, FLOAT(s), B, D);
    MAYBE(a->dscale, FLOAT(s), B, D);
    BOTH_OR_NEITHER(a->dshift, a->scale);
    BOTH_OR_NEITHER(a->dscale, a->scale);
    LG_ASSERT(absent(s, &a->scale) || a->mod_stride >= D);
    struct span scale = rows_of(a->scale, B, D, a->mod_stride);
    struct span dshift = rows_of(a->dshift, B, D, a->mod_stride);
    struct span dscale = rows_of(a->dscale, B, D, a->mod_stride);
    struct span x = whole(a->x), dy = whole(a->dy), mean = whole(a->mean), rstd = whole(a->rstd);
    APART(whole(a->dx), x, dy, mean, rstd, scale, dshift, dscale);
    APART(dshift, x, dy, mean, rstd, scale, dscale);
    APART(dscale, x, dy, mean, rstd, scale);
}

void lg_norm_modulate_backward(lg_stream *s, const struct lg_norm_modulate_backward_args *a)
{
    check_norm_modulate_backward(s, a);
    RUN(norm_modulate_backward);
}

static void check_gate_residual_forward(lg_stream *s, const struct lg_gate_residual_forward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    SHAPE(a->x, FLOAT(s), B, T, D);
    SHAPE(a->y, FLOAT(s), B, T, D);
    SHAPE(a->out, FLOAT(s), B, T, D);
    MAYBE(a->gate, FLOAT(s), B, D);
    LG_ASSERT(absent(s, &a->gate) || a->mod_stride >= D);
    SAME_OR_APART(a->out, a->x);
    APART(whole(a->out), whole(a->y), rows_of(a->gate, B, D, a->mod_stride));
}

void lg_gate_residual_forward(lg_stream *s, const struct lg_gate_residual_forward_args *a)
{
    check_gate_residual_forward(s, a);
    RUN(gate_residual_forward);
}

static void check_gate_residual_backward(lg_stream *s,
                                         const struct lg_gate_residual_backward_args *a)
{
    int64_t B = a->y.dim[0], T = a->y.dim[1], D = a->y.dim[2];
    SHAPE(a->y, FLOAT(s), B, T, D);
    SHAPE(a->dout, FLOAT(s), B, T, D);
    SHAPE(a->dy, FLOAT(s), B, T, D);
    SHAPE(a->gate, FLOAT(s), B, D);
    SHAPE(a->dgate, FLOAT(s), B, D);
    LG_ASSERT(a->mod_stride >= D);
    struct span gate = rows_of(a->gate, B, D, a->mod_stride);
    struct span dgate = rows_of(a->dgate, B, D, a->mod_stride);
    SAME_OR_APART(a->dy, a->dout);
    APART(whole(a->dy), whole(a->y), gate, dgate);
    APART(dgate, whole(a->dout), whole(a->y), gate);
    WIDE_MAYBE(a->dbias, D);
    APART(whole(a->dbias), whole(a->dout), whole(a->y), whole(a->dy), gate, dgate);
}

void lg_gate_residual_backward(lg_stream *s, const struct lg_gate_residual_backward_args *a)
{
    check_gate_residual_backward(s, a);
    RUN(gate_residual_backward);
}

void lg_residual_norm_forward(lg_stream *s, const struct lg_residual_norm_forward_args *a)
{
    const struct lg_gate_residual_forward_args *r = &a->residual;
    const struct lg_norm_modulate_forward_args *n = &a->norm;
    int64_t B = n->x.dim[0], D = n->x.dim[2];
    check_gate_residual_forward(s, r);
    check_norm_modulate_forward(s, n);
    SAME(n->x, r->out);
    struct span x = whole(r->x), y = whole(r->y), gate = rows_of(r->gate, B, D, r->mod_stride);
    APART(whole(n->y), x, y, gate);
    APART(whole(n->mean), x, y, gate);
    APART(whole(n->rstd), x, y, gate);
    APART(whole(r->out), rows_of(n->shift, B, D, n->mod_stride),
          rows_of(n->scale, B, D, n->mod_stride));
    RUN(residual_norm_forward);
}

void lg_norm_residual_backward(lg_stream *s, const struct lg_norm_residual_backward_args *a)
{
    const struct lg_norm_modulate_backward_args *n = &a->norm;
    const struct lg_gate_residual_backward_args *r = &a->residual;
    int64_t B = n->x.dim[0], D = n->x.dim[2];
    check_norm_modulate_backward(s, n);
    check_gate_residual_backward(s, r);
    SAME(n->dx, r->dout);
    struct span x = whole(n->x), dy = whole(n->dy), scale = rows_of(n->scale, B, D, n->mod_stride);
    struct span mean = whole(n->mean), rstd = whole(n->rstd);
    struct span dshift = rows_of(n->dshift, B, D, n->mod_stride);
    struct span dscale = rows_of(n->dscale, B, D, n->mod_stride);
    struct span y = whole(r->y), gate = rows_of(r->gate, B, D, r->mod_stride);
    APART(whole(r->dy), whole(n->dx), x, dy, scale, mean, rstd, dshift, dscale);
    APART(rows_of(r->dgate, B, D, r->mod_stride), x, dy, scale, mean, rstd, dshift, dscale);
    APART(whole(r->dbias), x, dy, scale, mean, rstd, dshift, dscale);
    APART(whole(n->dx), y, gate);
    APART(dshift, y, gate);
    APART(dscale, y, gate);
    RUN(norm_residual_backward);
}

void lg_rms_norm_forward(lg_stream *s, const struct lg_rms_norm_forward_args *a)
{
    int64_t M = a->x.dim[0], D = a->x.dim[1];
    SHAPE(a->x, FLOAT(s), M, D);
    SHAPE(a->w, FLOAT(s), D);
    SHAPE(a->y, FLOAT(s), M, D);
    APART(whole(a->y), whole(a->x), whole(a->w));
    RUN(rms_norm_forward);
}

static void check_group_norm_forward(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    int64_t N = a->x.dim[0], H = a->x.dim[1], W = a->x.dim[2], C = a->x.dim[3];
    SHAPE(a->x, FLOAT(s), N, H, W, C);
    SHAPE(a->w, FLOAT(s), C);
    SHAPE(a->b, FLOAT(s), C);
    SHAPE(a->y, FLOAT(s), N, H, W, C);
    LG_ASSERT(a->groups >= 1 && C % a->groups == 0);
    MAYBE(a->mean_var, LG_F64, N, a->groups, 2);
    SAME_OR_APART(a->y, a->x);
    APART(whole(a->y), whole(a->w), whole(a->b), whole(a->mean_var));
}

void lg_group_norm_forward(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    check_group_norm_forward(s, a);
    RUN(group_norm_forward);
}

void lg_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    int64_t B = a->q.dim[0], Tq = a->q.dim[1], H = a->q.dim[2], d = a->q.dim[3];
    int64_t Tk = a->k.dim[1];
    SHAPE(a->q, FLOAT(s), B, Tq, H, d);
    SHAPE(a->k, FLOAT(s), B, Tk, H, d);
    SHAPE(a->v, FLOAT(s), B, Tk, H, d);
    LG_ASSERT(a->q_stride >= H * d && a->kv_stride >= H * d);
    MAYBE(a->k_length, LG_I32, B);
    MAYBE(a->bias, FLOAT(s), H, Tq, Tk);
    SHAPE(a->o, FLOAT(s), B, Tq, H, d);
    MAYBE(a->lse, STATS(s), B, H, Tq);
    struct span q = rows_of(a->q, B * Tq, H * d, a->q_stride);
    struct span k = rows_of(a->k, B * Tk, H * d, a->kv_stride);
    struct span v = rows_of(a->v, B * Tk, H * d, a->kv_stride);
    APART(whole(a->o), q, k, v, whole(a->k_length), whole(a->bias), whole(a->lse));
    APART(whole(a->lse), q, k, v, whole(a->k_length), whole(a->bias));
    RUN(attention_forward);
}

void lg_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    int64_t B = a->q.dim[0], Tq = a->q.dim[1], H = a->q.dim[2], d = a->q.dim[3];
    int64_t Tk = a->k.dim[1];
    SHAPE(a->dout, FLOAT(s), B, Tq, H, d);
    SHAPE(a->o, FLOAT(s), B, Tq, H, d);
    SHAPE(a->q, FLOAT(s), B, Tq, H, d);
    SHAPE(a->k, FLOAT(s), B, Tk, H, d);
    SHAPE(a->v, FLOAT(s), B, Tk, H, d);
    SHAPE(a->dq, FLOAT(s), B, Tq, H, d);
    SHAPE(a->dk, FLOAT(s), B, Tk, H, d);
    SHAPE(a->dv, FLOAT(s), B, Tk, H, d);
    LG_ASSERT(a->q_stride >= H * d && a->kv_stride >= H * d);
    LG_ASSERT(a->dq_stride >= H * d && a->dkv_stride >= H * d);
    MAYBE(a->k_length, LG_I32, B);
    SHAPE(a->lse, STATS(s), B, H, Tq);
    struct span q = rows_of(a->q, B * Tq, H * d, a->q_stride);
    struct span k = rows_of(a->k, B * Tk, H * d, a->kv_stride);
    struct span v = rows_of(a->v, B * Tk, H * d, a->kv_stride);
    struct span dq = rows_of(a->dq, B * Tq, H * d, a->dq_stride);
    struct span dk = rows_of(a->dk, B * Tk, H * d, a->dkv_stride);
    struct span dv = rows_of(a->dv, B * Tk, H * d, a->dkv_stride);
    struct span o = whole(a->o), dout = whole(a->dout), lse = whole(a->lse);
    struct span len = whole(a->k_length);
    APART(dq, q, k, v, o, dout, lse, len, dk, dv);
    APART(dk, q, k, v, o, dout, lse, len, dv);
    APART(dv, q, k, v, o, dout, lse, len);
    WIDE_MAYBE(a->dbias, 3 * H * d);
    APART(whole(a->dbias), q, k, v, o, dout, lse, len, dq, dk, dv);
    RUN(attention_backward);
}

static void check_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    int64_t N = a->x.dim[0], H = a->x.dim[1], W = a->x.dim[2], Ci = a->x.dim[3];
    int64_t Co = a->w.dim[0], kh = a->w.dim[1], kw = a->w.dim[2];
    LG_ASSERT(a->stride >= 1);
    LG_ASSERT(a->top >= 0 && a->left >= 0 && a->bottom >= 0 && a->right >= 0);
    LG_ASSERT(H + a->top + a->bottom >= kh && W + a->left + a->right >= kw);
    int64_t Ho = (H + a->top + a->bottom - kh) / a->stride + 1;
    int64_t Wo = (W + a->left + a->right - kw) / a->stride + 1;
    SHAPE(a->x, FLOAT(s), N, H, W, Ci);
    SHAPE(a->w, FLOAT(s), Co, kh, kw, Ci);
    SHAPE(a->bias, FLOAT(s), Co);
    MAYBE(a->residual, FLOAT(s), N, Ho, Wo, Co);
    SHAPE(a->y, FLOAT(s), N, Ho, Wo, Co);
    MAYBE(a->mean_var, LG_F64, N, a->mean_var.dim[1], 2);
    LG_ASSERT(absent(s, &a->mean_var) || Co % a->mean_var.dim[1] == 0);
    ALIGNED_16(a->x);
    ALIGNED_16(a->w);
    ALIGNED_16(a->bias);
    ALIGNED_16(a->residual);
    ALIGNED_16(a->y);
    SAME_OR_APART(a->y, a->residual);
    APART(whole(a->y), whole(a->x), whole(a->w), whole(a->bias), whole(a->mean_var));
    APART(whole(a->mean_var), whole(a->x), whole(a->w), whole(a->bias), whole(a->residual));
}

void lg_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    check_conv2d_forward(s, a);
    RUN(conv2d_forward);
}

void lg_norm_conv2d_forward(lg_stream *s, const struct lg_norm_conv2d_forward_args *a)
{
    const struct lg_group_norm_forward_args *n = &a->norm;
    const struct lg_conv2d_forward_args *c = &a->conv;
    check_group_norm_forward(s, n);
    check_conv2d_forward(s, c);
    SAME(c->x, n->y);
    ALIGNED_16(n->x);
    APART(whole(c->y), whole(n->x), whole(n->w), whole(n->b), whole(n->mean_var));
    APART(whole(n->y), whole(c->w), whole(c->bias), whole(c->residual));
    APART(whole(c->mean_var), whole(n->x), whole(n->w), whole(n->b));
    SAME_OR_APART(c->mean_var, n->mean_var);
    RUN(norm_conv2d_forward);
}

void lg_upsample2x_forward(lg_stream *s, const struct lg_upsample2x_forward_args *a)
{
    int64_t N = a->x.dim[0], H = a->x.dim[1], W = a->x.dim[2], C = a->x.dim[3];
    SHAPE(a->x, FLOAT(s), N, H, W, C);
    SHAPE(a->y, FLOAT(s), N, 2 * H, 2 * W, C);
    APART(whole(a->y), whole(a->x));
    RUN(upsample2x_forward);
}

void lg_embedding_forward(lg_stream *s, const struct lg_embedding_forward_args *a)
{
    int64_t M = a->ids.dim[0], V = a->table.dim[0], D = a->table.dim[1];
    SHAPE(a->ids, LG_I32, M);
    SHAPE(a->table, FLOAT(s), V, D);
    SHAPE(a->y, FLOAT(s), M, D);
    APART(whole(a->y), whole(a->ids), whole(a->table));
    RUN(embedding_forward);
}

void lg_embedding_backward(lg_stream *s, const struct lg_embedding_backward_args *a)
{
    int64_t M = a->ids.dim[0], V = a->dtable.dim[0], D = a->dtable.dim[1];
    SHAPE(a->ids, LG_I32, M);
    SHAPE(a->dy, FLOAT(s), M, D);
    WIDE_SHAPE(a->dtable, V, D);
    APART(whole(a->dtable), whole(a->ids), whole(a->dy));
    RUN(embedding_backward);
}

void lg_t5_bias_forward(lg_stream *s, const struct lg_t5_bias_forward_args *a)
{
    int64_t buckets = a->table.dim[0], H = a->table.dim[1], T = a->out.dim[1];
    SHAPE(a->table, FLOAT(s), buckets, H);
    SHAPE(a->out, FLOAT(s), H, T, T);
    LG_ASSERT(buckets >= 4 && buckets % 2 == 0);
    LG_ASSERT(a->max_distance > buckets / 4);
    APART(whole(a->out), whole(a->table));
    RUN(t5_bias_forward);
}

void lg_timestep_embedding_forward(lg_stream *s, const struct lg_timestep_embedding_forward_args *a)
{
    int64_t B = a->t.dim[0], D = a->out.dim[1];
    WIDE_SHAPE(a->t, B);
    SHAPE(a->out, FLOAT(s), B, D);
    LG_ASSERT(D % 2 == 0 && (double)D / 2 > a->freq_shift);
    APART(whole(a->out), whole(a->t));
    RUN(timestep_embedding_forward);
}

/* (B, C, H, W) and (B, T, C p p) belong together. */
#define CHECK_PATCHES(image, tokens, patch)                                                        \
    do {                                                                                           \
        int64_t B = (image).dim[0], C = (image).dim[1], H = (image).dim[2], W = (image).dim[3];    \
        int64_t p = (patch);                                                                       \
        LG_ASSERT(p >= 1 && H % p == 0 && W % p == 0);                                             \
        SHAPE(image, FLOAT(s), B, C, H, W);                                                        \
        SHAPE(tokens, FLOAT(s), B, (H / p) * (W / p), C * p * p);                                  \
        APART(whole(image), whole(tokens));                                                        \
    } while (0)

void lg_patchify_forward(lg_stream *s, const struct lg_patchify_forward_args *a)
{
    CHECK_PATCHES(a->x, a->y, a->patch);
    RUN(patchify_forward);
}

void lg_unpatchify_forward(lg_stream *s, const struct lg_unpatchify_forward_args *a)
{
    CHECK_PATCHES(a->y, a->x, a->patch);
    RUN(unpatchify_forward);
}

void lg_unpatchify_backward(lg_stream *s, const struct lg_unpatchify_backward_args *a)
{
    CHECK_PATCHES(a->dy, a->dx, a->patch);
    RUN(unpatchify_backward);
}

/* (N, C, H, W) and (N, H, W, C) belong together. */
#define CHECK_LAYOUTS(nchw, nchw_type, nhwc, nhwc_type)                                            \
    do {                                                                                           \
        int64_t N = (nchw).dim[0], C = (nchw).dim[1], H = (nchw).dim[2], W = (nchw).dim[3];        \
        SHAPE(nchw, nchw_type, N, C, H, W);                                                        \
        SHAPE(nhwc, nhwc_type, N, H, W, C);                                                        \
        APART(whole(nchw), whole(nhwc));                                                           \
    } while (0)

void lg_pixels_to_nhwc(lg_stream *s, const struct lg_pixels_to_nhwc_args *a)
{
    CHECK_LAYOUTS(a->x, LG_U8, a->y, FLOAT(s));
    RUN(pixels_to_nhwc);
}

void lg_nhwc_to_pixels(lg_stream *s, const struct lg_nhwc_to_pixels_args *a)
{
    CHECK_LAYOUTS(a->y, LG_U8, a->x, FLOAT(s));
    RUN(nhwc_to_pixels);
}

void lg_nchw_to_nhwc(lg_stream *s, const struct lg_nchw_to_nhwc_args *a)
{
    CHECK_LAYOUTS(a->x, FLOAT(s), a->y, FLOAT(s));
    RUN(nchw_to_nhwc);
}

void lg_nhwc_to_nchw(lg_stream *s, const struct lg_nhwc_to_nchw_args *a)
{
    CHECK_LAYOUTS(a->y, FLOAT(s), a->x, FLOAT(s));
    RUN(nhwc_to_nchw);
}

void lg_posterior_split(lg_stream *s, const struct lg_posterior_split_args *a)
{
    int64_t N = a->mean.dim[0], C = a->mean.dim[1], H = a->mean.dim[2], W = a->mean.dim[3];
    SHAPE(a->x, FLOAT(s), N, H, W, 2 * C);
    SHAPE(a->mean, FLOAT(s), N, C, H, W);
    SHAPE(a->logvar, FLOAT(s), N, C, H, W);
    APART(whole(a->mean), whole(a->x), whole(a->logvar));
    APART(whole(a->logvar), whole(a->x));
    RUN(posterior_split);
}

void lg_diffuse_forward(lg_stream *s, const struct lg_diffuse_forward_args *a)
{
    int64_t B = a->mean.dim[0], C = a->mean.dim[1], H = a->mean.dim[2], W = a->mean.dim[3];
    SHAPE(a->mean, FLOAT(s), B, C, H, W);
    SHAPE(a->logvar, FLOAT(s), B, C, H, W);
    SHAPE(a->n, LG_I64, B);
    WIDE_SHAPE(a->coef, B, 4);
    SHAPE(a->x_t, FLOAT(s), B, C, H, W);
    SHAPE(a->target, FLOAT(s), B, C, H, W);
    struct span mean = whole(a->mean), logvar = whole(a->logvar), n = whole(a->n);
    APART(whole(a->x_t), mean, logvar, n, whole(a->coef), whole(a->target));
    APART(whole(a->target), mean, logvar, n, whole(a->coef));
    RUN(diffuse_forward);
}

void lg_mse_loss(lg_stream *s, const struct lg_mse_loss_args *a)
{
    int64_t B = a->pred.dim[0], C = a->pred.dim[1], H = a->pred.dim[2], W = a->pred.dim[3];
    SHAPE(a->pred, FLOAT(s), B, C, H, W);
    SHAPE(a->target, FLOAT(s), B, C, H, W);
    WIDE_SHAPE(a->weight, B);
    WIDE_SHAPE(a->loss, B);
    MAYBE(a->dpred, FLOAT(s), B, C, H, W);
    SAME_OR_APART(a->dpred, a->pred);
    APART(whole(a->dpred), whole(a->target), whole(a->weight), whole(a->loss));
    APART(whole(a->loss), whole(a->pred), whole(a->target), whole(a->weight));
    RUN(mse_loss);
}

void lg_reduce_ranks(lg_stream *s, const struct lg_reduce_ranks_args *a)
{
    int64_t n = a->y.dim[0];
    LG_ASSERT(a->count >= 1 && a->count <= LG_RANKS_MAX);
    WIDE_SHAPE(a->y, n);
    SHAPE(a->sum_squares, LG_F64, 1);
    for (int i = 0; i < a->count; i++) {
        SHAPE(a->x[i], EITHER(a->x[0]), n);
        APART(whole(a->sum_squares), whole(a->x[i]), whole(a->y));
        if (i == 0 && a->x[0].dtype == a->y.dtype)
            SAME_OR_APART(a->y, a->x[i]);
        else
            APART(whole(a->y), whole(a->x[i]));
    }
    RUN(reduce_ranks);
}

void lg_adamw(lg_stream *s, const struct lg_adamw_args *a)
{
    const lg_tensor *in[] = {&a->w, &a->m, &a->v, &a->grad};
    const lg_tensor *out[] = {&a->w_out, &a->m_out, &a->v_out};
    int64_t n = a->w.dim[0];
    for (size_t i = 0; i < LG_ARRAY_LEN(in); i++) SHAPE(*in[i], STATS(s), n);
    for (size_t o = 0; o < LG_ARRAY_LEN(out); o++) {
        SHAPE(*out[o], STATS(s), n);
        for (size_t i = 0; i < LG_ARRAY_LEN(in); i++) {
            if (i == o)
                SAME_OR_APART(*out[o], *in[i]);
            else
                APART(whole(*out[o]), whole(*in[i]));
        }
        for (size_t i = 0; i < o; i++) APART(whole(*out[o]), whole(*out[i]));
    }
    LG_ASSERT(a->copies >= 0 && a->copies <= LG_RANKS_MAX);
    for (int c = 0; c < a->copies; c++) {
        const struct span copy = whole(a->working[c]);
        SHAPE(a->working[c], FLOAT(s), n);
        for (size_t i = 0; i < LG_ARRAY_LEN(in); i++) APART(copy, whole(*in[i]));
        for (size_t o = 0; o < LG_ARRAY_LEN(out); o++) APART(copy, whole(*out[o]));
        for (int i = 0; i < c; i++) APART(copy, whole(a->working[i]));
    }
    LG_ASSERT(a->t >= 1);
    RUN(adamw);
}

void lg_ema(lg_stream *s, const struct lg_ema_args *a)
{
    int64_t n = a->ema.dim[0];
    SHAPE(a->ema, STATS(s), n);
    SHAPE(a->w, STATS(s), n);
    SHAPE(a->out, STATS(s), n);
    SAME_OR_APART(a->out, a->ema);
    APART(whole(a->out), whole(a->w));
    RUN(ema);
}
