/* Normalisations of rows and the steps around them.
 *
 * LayerNorm and RMSNorm take a row through the first cache three times (mean, variance, result):
 * the two-pass variance costs nothing there and has no cancellation.
 */
#include "kernels/host/vmath.h"
#include <math.h>

static float row_sum(const float *x, int64_t n)
{
    vf sum = {0};
    LG_VLOOP(i, r, n, { sum += vf_load_n(x + i, r); });
    return vf_sum(sum);
}

/* Sum of (x - mean)^2. */
static float row_spread(const float *x, float mean, int64_t n)
{
    vf sum = {0};
    int64_t i = 0;
    for (; i + LG_VW <= n; i += LG_VW) {
        vf c = vf_load(x + i) - mean;
        sum = vf_fma(c, c, sum);
    }
    if (i < n) {
        float rest[LG_VW];
        for (int l = 0; l < LG_VW; l++) rest[l] = i + l < n ? x[i + l] : mean;
        vf c = vf_load(rest) - mean;
        sum = vf_fma(c, c, sum);
    }
    return vf_sum(sum);
}

static bool present(const lg_tensor *t)
{
    return t->rank > 0 && t->data;
}

void LG_K(norm_modulate_forward)(lg_stream *s, const struct lg_norm_modulate_forward_args *a)
{
    const int64_t T = a->x.dim[1], D = a->x.dim[2], rows = a->x.dim[0] * T;
    const bool modulated = present(&a->scale);
    const int64_t stride = lg_row_stride(&a->scale, 1);
    float *mean_out = a->mean.data, *rstd_out = a->rstd.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * D;
        float *y = (float *)a->y.data + row * D;
        const float mean = a->rms ? 0 : row_sum(x, D) / (float)D;
        const float rstd = (float)(1.0 / sqrt((double)row_spread(x, mean, D) / (double)D + a->eps));
        if (mean_out) mean_out[row] = mean;
        if (rstd_out) rstd_out[row] = rstd;
        if (modulated) {
            const float *scale = (const float *)a->scale.data + row / T * stride;
            const float *shift = (const float *)a->shift.data + row / T * stride;
            LG_VLOOP(i, r, D, {
                vf h = (vf_load_n(x + i, r) - mean) * rstd;
                vf factor = 1.0f + vf_load_n(scale + i, r);
                vf_store_n(y + i, vf_fma(h, factor, vf_load_n(shift + i, r)), r);
            });
        } else {
            LG_VLOOP(i, r, D, { vf_store_n(y + i, (vf_load_n(x + i, r) - mean) * rstd, r); });
        }
    }
}

/* One row of the backward; scale is NULL without modulation, dshift and dscale where they are not wanted. */
struct norm_row {
    const float *x, *dy, *scale;
    float *dx, *dshift, *dscale;
    float one; /* what the scale is added to: 1, of an affine norm's weight 0 */
    float mean, rstd;
    int64_t D;
    bool accumulate, rms;
};

LG_INLINE void norm_row_backward(const struct norm_row *p, const bool modulated, const bool sums)
{
    const float *x = p->x, *dy = p->dy, *scale = p->scale;
    float *dx = p->dx, *dshift = p->dshift, *dscale = p->dscale;
    const float mean = p->mean, rstd = p->rstd;
    vf sum_g = {0}, sum_gh = {0};
    /* Lanes beyond the row have dy = 0, hence add nothing. */
    LG_VLOOP(i, r, p->D, {
        vf h = (vf_load_n(x + i, r) - mean) * rstd;
        vf g = vf_load_n(dy + i, r);
        if (sums) {
            vf_store_n(dshift + i, vf_load_n(dshift + i, r) + g, r);
            vf_store_n(dscale + i, vf_fma(g, h, vf_load_n(dscale + i, r)), r);
        }
        if (modulated) g *= p->one + vf_load_n(scale + i, r);
        sum_g += g;
        sum_gh = vf_fma(g, h, sum_gh);
    });
    const float mg = p->rms ? 0 : vf_sum(sum_g) / (float)p->D, mgh = vf_sum(sum_gh) / (float)p->D;
    LG_VLOOP(i, r, p->D, {
        vf h = (vf_load_n(x + i, r) - mean) * rstd;
        vf g = vf_load_n(dy + i, r);
        vf away = modulated ? vf_fma(g, p->one + vf_load_n(scale + i, r), vf_set(-mg)) : g - mg;
        vf d = vf_fma(h, vf_set(-mgh), away) * rstd;
        if (p->accumulate) d += vf_load_n(dx + i, r);
        vf_store_n(dx + i, d, r);
    });
}

/* dbias (+)= column sums of dx, rows of `width` and so far apart, where wanted. */
static void bias_gradient(lg_stream *s, const lg_tensor *dx, int64_t width, int64_t stride,
                          lg_tensor dbias, bool accumulate)
{
    const struct lg_host_rows rows = {dx->data, lg_host_numel(dx) / width, width, stride};
    if (present(&dbias)) LG_K(column_sums)(s, &rows, dbias.data, accumulate);
}

void LG_K(norm_modulate_backward)(lg_stream *s, const struct lg_norm_modulate_backward_args *a)
{
    const int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    const bool modulated = present(&a->scale), sums = present(&a->dscale);
    const int64_t stride = lg_row_stride(&a->scale, 1);
    const float *mean = a->mean.data, *rstd = a->rstd.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++) {
        struct norm_row p = {.D = D, .one = 1, .accumulate = a->accumulate, .rms = a->rms};
        if (modulated) p.scale = (const float *)a->scale.data + b * stride;
        if (sums) {
            p.dshift = (float *)a->dshift.data + b * stride;
            p.dscale = (float *)a->dscale.data + b * stride;
            memset(p.dshift, 0, (size_t)D * sizeof(float));
            memset(p.dscale, 0, (size_t)D * sizeof(float));
        }
        for (int64_t row = b * T; row < (b + 1) * T; row++) {
            p.x = (const float *)a->x.data + row * D;
            p.dy = (const float *)a->dy.data + row * D;
            p.dx = (float *)a->dx.data + row * D;
            p.mean = mean[row], p.rstd = rstd[row];
            if (sums)
                norm_row_backward(&p, true, true);
            else if (modulated)
                norm_row_backward(&p, true, false);
            else
                norm_row_backward(&p, false, false);
        }
    }
    bias_gradient(s, &a->dx, D, D, a->dbias, a->accumulate_dbias);
}

void LG_K(gate_residual_forward)(lg_stream *s, const struct lg_gate_residual_forward_args *a)
{
    const int64_t T = a->x.dim[1], D = a->x.dim[2], rows = a->x.dim[0] * T;
    const bool gated = present(&a->gate);
    const int64_t stride = lg_row_stride(&a->gate, 1);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * D,
                    *y = (const float *)a->y.data + row * D;
        float *out = (float *)a->out.data + row * D;
        if (gated) {
            const float *gate = (const float *)a->gate.data + row / T * stride;
            LG_VLOOP(i, r, D, {
                vf v = vf_fma(vf_load_n(gate + i, r), vf_load_n(y + i, r), vf_load_n(x + i, r));
                vf_store_n(out + i, v, r);
            });
        } else {
            LG_VLOOP(i, r, D,
                     { vf_store_n(out + i, vf_load_n(x + i, r) + vf_load_n(y + i, r), r); });
        }
    }
}

void LG_K(gate_residual_backward)(lg_stream *s, const struct lg_gate_residual_backward_args *a)
{
    const int64_t B = a->dout.dim[0], T = a->dout.dim[1], D = a->dout.dim[2];
    const int64_t stride = lg_row_stride(&a->gate, 1);
    const bool sums = present(&a->dgate);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++) {
        const float *gate = (const float *)a->gate.data + b * stride;
        float *dgate = sums ? (float *)a->dgate.data + b * stride : NULL;
        if (sums) memset(dgate, 0, (size_t)D * sizeof(float));
        for (int64_t row = b * T; row < (b + 1) * T; row++) {
            const float *dout = (const float *)a->dout.data + row * D;
            float *dy = (float *)a->dy.data + row * D;
            if (!sums) {
                LG_VLOOP(i, r, D, {
                    vf_store_n(dy + i, vf_load_n(dout + i, r) * vf_load_n(gate + i, r), r);
                });
                continue;
            }
            const float *y = (const float *)a->y.data + row * D;
            LG_VLOOP(i, r, D, {
                vf g = vf_load_n(dout + i, r);
                vf_store_n(dgate + i, vf_fma(g, vf_load_n(y + i, r), vf_load_n(dgate + i, r)), r);
                vf_store_n(dy + i, g * vf_load_n(gate + i, r), r);
            });
        }
    }
    bias_gradient(s, &a->dy, D, D, a->dbias, a->accumulate_dbias);
}

void LG_K(residual_norm_forward)(lg_stream *s, const struct lg_residual_norm_forward_args *a)
{
    LG_K(gate_residual_forward)(s, &a->residual);
    LG_K(norm_modulate_forward)(s, &a->norm);
}

void LG_K(norm_residual_backward)(lg_stream *s, const struct lg_norm_residual_backward_args *a)
{
    LG_K(norm_modulate_backward)(s, &a->norm);
    LG_K(gate_residual_backward)(s, &a->residual);
}

void LG_K(layer_norm_forward)(lg_stream *s, const struct lg_layer_norm_forward_args *a)
{
    const int64_t D = a->w.dim[0], rows = lg_host_numel(&a->x) / D;
    const float *w = a->w.data, *b = a->b.data;
    float *mean_out = a->mean.data, *rstd_out = a->rstd.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * D;
        float *y = (float *)a->y.data + row * D;
        const float mean = row_sum(x, D) / (float)D;
        const float rstd = (float)(1.0 / sqrt((double)row_spread(x, mean, D) / (double)D + a->eps));
        if (rstd_out) mean_out[row] = mean, rstd_out[row] = rstd;
        LG_VLOOP(i, r, D, {
            vf h = (vf_load_n(x + i, r) - mean) * rstd;
            vf_store_n(y + i, vf_fma(h, vf_load_n(w + i, r), vf_load_n(b + i, r)), r);
        });
    }
}

/* Columns [first, first + count) of dw and db: over the rows in order. */
enum { STRIP = 32 };
static void layer_norm_sums(const struct lg_layer_norm_backward_args *a, int64_t first,
                            int64_t count)
{
    const int64_t M = a->x.dim[0], D = a->x.dim[1];
    const float *mean = a->mean.data, *rstd = a->rstd.data;
    float *dw = (float *)a->dw.data + first, *db = (float *)a->db.data + first;
    float w[STRIP] = {0}, b[STRIP] = {0};
    for (int64_t m = 0; m < M; m++) {
        const float *x = (const float *)a->x.data + m * D + first;
        const float *dy = (const float *)a->dy.data + m * D + first;
        LG_VLOOP(i, r, count, {
            vf h = (vf_load_n(x + i, r) - mean[m]) * rstd[m], g = vf_load_n(dy + i, r);
            vf_store_n(w + i, vf_fma(g, h, vf_load_n(w + i, r)), r);
            vf_store_n(b + i, vf_load_n(b + i, r) + g, r);
        });
    }
    for (int64_t i = 0; i < count; i++) {
        dw[i] = a->accumulate_dw ? dw[i] + w[i] : w[i];
        db[i] = a->accumulate_dw ? db[i] + b[i] : b[i];
    }
}

void LG_K(layer_norm_backward)(lg_stream *s, const struct lg_layer_norm_backward_args *a)
{
    const int64_t M = a->x.dim[0], D = a->x.dim[1], strips = (D + STRIP - 1) / STRIP;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t m = 0; m < M; m++) {
        const struct norm_row p = {.x = (const float *)a->x.data + m * D,
                                   .dy = (const float *)a->dy.data + m * D,
                                   .dx = (float *)a->dx.data + m * D,
                                   .scale = a->w.data,
                                   .mean = ((const float *)a->mean.data)[m],
                                   .rstd = ((const float *)a->rstd.data)[m],
                                   .D = D,
                                   .accumulate = a->accumulate};
        norm_row_backward(&p, true, false);
    }
    if (!present(&a->dw)) return;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t k = 0; k < strips; k++)
        layer_norm_sums(a, k * STRIP, LG_MIN((int64_t)STRIP, D - k * STRIP));
}

void LG_K(shift_forward)(lg_stream *s, const struct lg_shift_forward_args *a)
{
    const int64_t T = a->x.dim[1], D = a->x.dim[2], rows = a->x.dim[0] * T;
    const int64_t stride = lg_row_stride(&a->shift, 1);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * D;
        const float *shift = (const float *)a->shift.data + row / T * stride;
        float *y = (float *)a->y.data + row * D;
        LG_VLOOP(i, r, D, { vf_store_n(y + i, vf_load_n(x + i, r) + vf_load_n(shift + i, r), r); });
    }
}

void LG_K(shift_backward)(lg_stream *s, const struct lg_shift_backward_args *a)
{
    const int64_t B = a->dy.dim[0], T = a->dy.dim[1], D = a->dy.dim[2];
    for (int64_t b = 0; b < B; b++) LG_K(column_sums)
    (s, &(struct lg_host_rows){(const float *)a->dy.data + b * T * D, T, D, D},
     (float *)a->dshift.data + b * lg_row_stride(&a->dshift, 1), false);
}

/* Vector v of all, counted through samples, tokens and a token's h. */
/* Vector v of a tensor (B, T, n, D), whose tokens may lie apart. */
static float *rms_vector(const lg_tensor *t, int64_t v)
{
    const int64_t n = t->dim[2];
    return (float *)t->data + v / n * lg_row_stride(t, 2) + v % n * t->dim[3];
}

void LG_K(rms_norm_forward)(lg_stream *s, const struct lg_rms_norm_forward_args *a)
{
    const int64_t n = a->x.dim[2], D = a->x.dim[3], vectors = lg_host_numel(&a->x) / D;
    float *rstd = a->rstd.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t v = 0; v < vectors; v++) {
        const float *x = rms_vector(&a->x, v), *w = (const float *)a->w.data + v % n / a->each * D;
        float *y = rms_vector(&a->y, v);
        const float rms = (float)(1.0 / sqrt((double)row_spread(x, 0.0f, D) / (double)D + a->eps));
        if (rstd) rstd[v] = rms;
        LG_VLOOP(i, r, D,
                 { vf_store_n(y + i, vf_load_n(x + i, r) * rms * vf_load_n(w + i, r), r); });
    }
    if (present(&a->cos)) LG_K(rope)
    (s,
     &(struct lg_rope_args){.x = a->y, .cos = a->cos, .sin = a->sin, .y = a->y, .turned = (int)n});
}

struct rms_row {
    const float *x, *dy, *w;
    float *dx, rstd;
    int64_t D;
    bool accumulate;
};
static void rms_row_backward(const struct rms_row *p)
{
    const float *x = p->x, *dy = p->dy, *w = p->w, rstd = p->rstd;
    vf sum = {0};
    LG_VLOOP(i, r, p->D, {
        vf a = vf_load_n(dy + i, r) * vf_load_n(w + i, r);
        sum = vf_fma(a, vf_load_n(x + i, r) * rstd, sum);
    });
    const float mean = vf_sum(sum) / (float)p->D;
    LG_VLOOP(i, r, p->D, {
        vf n = vf_load_n(x + i, r) * rstd;
        vf d = vf_fma(n, vf_set(-mean), vf_load_n(dy + i, r) * vf_load_n(w + i, r)) * rstd;
        if (p->accumulate) d += vf_load_n(p->dx + i, r);
        vf_store_n(p->dx + i, d, r);
    });
}

/* Columns [first, first + count) of row g of dw: over its vectors in order. */
static void rms_weight_backward(const struct lg_rms_norm_backward_args *a, int64_t g, int64_t first,
                                int64_t count)
{
    const int64_t n = a->dy.dim[2], each = a->each;
    const int64_t tokens = a->dy.dim[0] * a->dy.dim[1], D = a->dy.dim[3];
    const float *rstd = a->rstd.data;
    float *dw = (float *)a->dw.data + g * D + first, sum[STRIP] = {0};
    for (int64_t k = 0; k < tokens * each; k++) {
        const int64_t v = k / each * n + g * each + k % each;
        const float *dy = rms_vector(&a->dy, v) + first, *x = rms_vector(&a->x, v) + first;
        const float by = rstd[v];
        LG_VLOOP(i, r, count, {
            vf normed = vf_load_n(x + i, r) * by;
            vf_store_n(sum + i, vf_fma(vf_load_n(dy + i, r), normed, vf_load_n(sum + i, r)), r);
        });
    }
    for (int64_t i = 0; i < count; i++) dw[i] = a->accumulate_dw ? dw[i] + sum[i] : sum[i];
}

void LG_K(rms_norm_backward)(lg_stream *s, const struct lg_rms_norm_backward_args *args)
{
    struct lg_rms_norm_backward_args turned = *args;
    const struct lg_rms_norm_backward_args *a = &turned;
    const int64_t n = a->dy.dim[2], D = a->dy.dim[3];
    const int64_t vectors = lg_host_numel(&a->dy) / D, strips = (D + STRIP - 1) / STRIP;
    if (present(&a->cos)) { /* turned back dy lies where dx will */
        LG_K(rope)
        (s, &(struct lg_rope_args){.x = a->dy,
                                   .cos = a->cos,
                                   .sin = a->sin,
                                   .y = a->dx,
                                   .turned = (int)n,
                                   .inverse = true});
        turned.dy = a->dx;
    }
    if (present(&a->dw)) {
        LG_PARALLEL(lg_host_threads(s))
        for (int64_t k = 0; k < a->w.dim[0] * strips; k++) {
            const int64_t first = k % strips * STRIP;
            rms_weight_backward(a, k / strips, first, LG_MIN((int64_t)STRIP, D - first));
        }
    }
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t v = 0; v < vectors; v++) {
        const struct rms_row row = {.x = rms_vector(&a->x, v),
                                    .dy = rms_vector(&a->dy, v),
                                    .w = (const float *)a->w.data + v % n / a->each * D,
                                    .dx = rms_vector(&a->dx, v),
                                    .rstd = ((const float *)a->rstd.data)[v],
                                    .D = D,
                                    .accumulate = a->accumulate};
        rms_row_backward(&row);
    }
    bias_gradient(s, &a->dx, n * D, lg_row_stride(&a->dx, 2), a->dbias, a->accumulate_dbias);
    if (present(&a->rest))
        bias_gradient(s, &a->rest, a->rest.dim[2], lg_row_stride(&a->rest, 2), a->dbias_of_rest,
                      a->accumulate_dbias);
}
