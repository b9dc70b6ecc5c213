/* Normalisations and the steps around them.
 *
 * LayerNorm and RMSNorm take a row through the first cache three times (mean, variance, result):
 * the two-pass variance costs nothing there and has no cancellation. GroupNorm reads its input
 * twice and writes once: the first pass sums each channel's distance to the channel's first pixel,
 * so that a large mean does not eat the variance either.
 */
#include "kernels/host/vmath.h"
#include <math.h>
#include <omp.h>

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
        const float mean = row_sum(x, D) / (float)D;
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
    float mean, rstd;
    int64_t D;
    bool accumulate;
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
        if (modulated) g *= 1.0f + vf_load_n(scale + i, r);
        sum_g += g;
        sum_gh = vf_fma(g, h, sum_gh);
    });
    const float mg = vf_sum(sum_g) / (float)p->D, mgh = vf_sum(sum_gh) / (float)p->D;
    LG_VLOOP(i, r, p->D, {
        vf h = (vf_load_n(x + i, r) - mean) * rstd;
        vf g = vf_load_n(dy + i, r);
        vf away = modulated ? vf_fma(g, 1.0f + vf_load_n(scale + i, r), vf_set(-mg)) : g - mg;
        vf d = vf_fma(h, vf_set(-mgh), away) * rstd;
        if (p->accumulate) d += vf_load_n(dx + i, r);
        vf_store_n(dx + i, d, r);
    });
}

void LG_K(norm_modulate_backward)(lg_stream *s, const struct lg_norm_modulate_backward_args *a)
{
    const int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    const bool modulated = present(&a->scale), sums = present(&a->dscale);
    const int64_t stride = lg_row_stride(&a->scale, 1);
    const float *mean = a->mean.data, *rstd = a->rstd.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++) {
        struct norm_row p = {.D = D, .accumulate = a->accumulate};
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
    if (a->dbias.data) LG_K(sum_rows)
    (s, &(struct lg_sum_rows_args){.x = lg_t2(a->dy.data, LG_F32, B * T, a->dy.dim[2]),
                                   .y = a->dbias,
                                   .accumulate = a->accumulate_dbias});
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
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * D;
        float *y = (float *)a->y.data + row * D;
        const float mean = row_sum(x, D) / (float)D;
        const float rstd = (float)(1.0 / sqrt((double)row_spread(x, mean, D) / (double)D + a->eps));
        LG_VLOOP(i, r, D, {
            vf h = (vf_load_n(x + i, r) - mean) * rstd;
            vf_store_n(y + i, vf_fma(h, vf_load_n(w + i, r), vf_load_n(b + i, r)), r);
        });
    }
}

/* Vector v of all, counted through samples, tokens and a token's h. */
struct rms_place {
    int64_t sample, within, head;
};
static struct rms_place rms_place(const lg_tensor *x, int64_t v)
{
    const int64_t T = x->dim[1], h = x->dim[2];
    return (struct rms_place){v / (T * h), v % (T * h), v % h};
}
static float *rms_vector(const lg_tensor *t, struct rms_place p)
{
    return (float *)t->data + p.sample * lg_row_stride(t, 1) + p.within * t->dim[3];
}

void LG_K(rms_norm_forward)(lg_stream *s, const struct lg_rms_norm_forward_args *a)
{
    const int64_t h = a->x.dim[2], D = a->x.dim[3], normed = a->w.dim[0] * a->each;
    const int64_t vectors = lg_host_numel(&a->x) / D;
    float *rstd = a->rstd.data, *kept = a->kept.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t v = 0; v < vectors; v++) {
        const struct rms_place p = rms_place(&a->x, v);
        const int64_t at = v / h * normed + p.head;
        const float *x = rms_vector(&a->x, p);
        float *y = rms_vector(&a->y, p);
        if (p.head >= normed) {
            if (x != y) memcpy(y, x, (size_t)D * sizeof *y);
            continue;
        }
        if (kept) memcpy(kept + at * D, x, (size_t)D * sizeof *x);
        const float *w = (const float *)a->w.data + p.head / a->each * D;
        const float rms = (float)(1.0 / sqrt((double)row_spread(x, 0.0f, D) / (double)D + a->eps));
        if (rstd) rstd[at] = rms;
        LG_VLOOP(i, r, D,
                 { vf_store_n(y + i, vf_load_n(x + i, r) * rms * vf_load_n(w + i, r), r); });
    }
    if (present(&a->cos)) LG_K(rope)
    (s, &(struct lg_rope_args){
            .x = a->y, .cos = a->cos, .sin = a->sin, .y = a->y, .turned = (int)normed});
}

struct rms_row {
    const float *x, *dy, *w; /* w NULL: the forward copied */
    float *dx, rstd;
    int64_t D;
    bool accumulate;
};
static void rms_row_backward(const struct rms_row *p)
{
    const float *x = p->x, *dy = p->dy, *w = p->w, rstd = p->rstd;
    vf sum = {0};
    if (w)
        LG_VLOOP(i, r, p->D, {
            vf a = vf_load_n(dy + i, r) * vf_load_n(w + i, r);
            sum = vf_fma(a, vf_load_n(x + i, r) * rstd, sum);
        });
    const float mean = w ? vf_sum(sum) / (float)p->D : 0;
    LG_VLOOP(i, r, p->D, {
        vf d = vf_load_n(dy + i, r);
        if (w) {
            vf n = vf_load_n(x + i, r) * rstd;
            d = vf_fma(n, vf_set(-mean), d * vf_load_n(w + i, r)) * rstd;
        }
        if (p->accumulate) d += vf_load_n(p->dx + i, r);
        vf_store_n(p->dx + i, d, r);
    });
}

/* Columns [first, first + count) of row g of dw: over its vectors in order. */
enum { RMS_STRIP = 32 };
static void rms_weight_backward(const struct lg_rms_norm_backward_args *a, int64_t g, int64_t first,
                                int64_t count)
{
    const int64_t h = a->dy.dim[2], each = a->each, normed = a->w.dim[0] * each;
    const int64_t tokens = a->dy.dim[0] * a->dy.dim[1], D = a->dy.dim[3];
    const float *rstd = a->rstd.data;
    float *dw = (float *)a->dw.data + g * D + first, sum[RMS_STRIP] = {0};
    for (int64_t k = 0; k < tokens * each; k++) {
        const int64_t token = k / each, head = g * each + k % each;
        const int64_t at = token * normed + head;
        const float *dy = rms_vector(&a->dy, rms_place(&a->dy, token * h + head)) + first;
        const float *x = (const float *)a->kept.data + at * D + first, by = rstd[at];
        LG_VLOOP(i, r, count, {
            vf n = vf_load_n(x + i, r) * by;
            vf_store_n(sum + i, vf_fma(vf_load_n(dy + i, r), n, vf_load_n(sum + i, r)), r);
        });
    }
    for (int64_t i = 0; i < count; i++) dw[i] = a->accumulate_dw ? dw[i] + sum[i] : sum[i];
}

void LG_K(rms_norm_backward)(lg_stream *s, const struct lg_rms_norm_backward_args *args)
{
    struct lg_rms_norm_backward_args turned = *args;
    const struct lg_rms_norm_backward_args *a = &turned;
    const int64_t h = a->dy.dim[2], D = a->dy.dim[3], normed = a->w.dim[0] * a->each;
    const int64_t vectors = lg_host_numel(&a->dy) / D, strips = (D + RMS_STRIP - 1) / RMS_STRIP;
    if (present(&a->cos)) { /* turned back dy lies where dx will */
        LG_K(rope)
        (s, &(struct lg_rope_args){.x = a->dy,
                                   .cos = a->cos,
                                   .sin = a->sin,
                                   .y = a->dx,
                                   .turned = (int)normed,
                                   .inverse = true});
        turned.dy = a->dx;
    }
    if (present(&a->dw)) {
        LG_PARALLEL(lg_host_threads(s))
        for (int64_t k = 0; k < a->w.dim[0] * strips; k++) {
            const int64_t first = k % strips * RMS_STRIP;
            rms_weight_backward(a, k / strips, first, LG_MIN((int64_t)RMS_STRIP, D - first));
        }
    }
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t v = 0; v < vectors; v++) {
        const struct rms_place p = rms_place(&a->dy, v);
        const int64_t at = v / h * normed + p.head;
        struct rms_row row = {.dy = rms_vector(&a->dy, p),
                              .dx = rms_vector(&a->dx, p),
                              .D = D,
                              .accumulate = a->accumulate};
        if (p.head < normed) {
            row.x = (const float *)a->kept.data + at * D;
            row.w = (const float *)a->w.data + p.head / a->each * D;
            row.rstd = ((const float *)a->rstd.data)[at];
        }
        rms_row_backward(&row);
    }
}

/* GroupNorm's scratch, per thread: means and variances of a sample; sums, sums of squares, factors and offsets
 * of the channels. */
static size_t group_norm_bytes(int64_t C, int64_t groups)
{
    return (size_t)(2 * groups) * sizeof(double) +
           (size_t)((4 * C + 15) & ~(int64_t)15) * sizeof(float);
}

size_t LG_K(group_norm_scratch)(int64_t C, int64_t groups, int threads)
{
    return (size_t)threads * group_norm_bytes(C, groups);
}

/* sum[c], square[c]: of x[p][c] - x[0][c] over the pixels. */
static void channel_sums(const float *x, int64_t pixels, int64_t C, float *sum, float *square)
{
    memset(sum, 0, (size_t)C * sizeof *sum);
    memset(square, 0, (size_t)C * sizeof *square);
    int64_t p = 1;
    for (; p + 4 <= pixels; p += 4)
        LG_VLOOP(i, r, C, {
            vf first = vf_load_n(x + i, r), d[4], v = vf_load_n(sum + i, r);
            vf q = vf_load_n(square + i, r);
            for (int j = 0; j < 4; j++) d[j] = vf_load_n(x + (p + j) * C + i, r) - first;
            v += (d[0] + d[1]) + (d[2] + d[3]);
            q += vf_fma(d[0], d[0], d[1] * d[1]) + vf_fma(d[2], d[2], d[3] * d[3]);
            vf_store_n(sum + i, v, r);
            vf_store_n(square + i, q, r);
        });
    for (; p < pixels; p++)
        LG_VLOOP(i, r, C, {
            vf d = vf_load_n(x + p * C + i, r) - vf_load_n(x + i, r);
            vf_store_n(sum + i, vf_load_n(sum + i, r) + d, r);
            vf_store_n(square + i, vf_fma(d, d, vf_load_n(square + i, r)), r);
        });
}

/* mean_var[2 g], [2 g + 1]: mean and variance of group g of `size` channels. */
static void group_mean_var(const float *x, int64_t pixels, int64_t C, int64_t size,
                           const float *sum, const float *square, double *mean_var)
{
    for (int64_t first = 0; first < C; first += size, mean_var += 2) {
        double mean = 0, spread = 0;
        for (int64_t c = first; c < first + size; c++)
            mean += (double)x[c] + (double)sum[c] / (double)pixels;
        mean /= (double)size;
        for (int64_t c = first; c < first + size; c++) {
            double own = (double)sum[c] / (double)pixels, away = (double)x[c] + own - mean;
            spread += (double)square[c] / (double)pixels - own * own + away * away;
        }
        mean_var[0] = mean;
        mean_var[1] = fmax(spread / (double)size, 0.0);
    }
}

/* factor and offset of each channel, so that the normalised value is x factor + offset. */
static void group_factors(const struct lg_group_norm_forward_args *a, const double *mean_var,
                          float *factor, float *offset)
{
    const int64_t C = a->x.dim[3], size = C / a->groups;
    const float *w = a->w.data, *b = a->b.data;
    for (int64_t c = 0; c < C; c++) {
        double mean = mean_var[c / size * 2],
               rstd = 1.0 / sqrt(mean_var[c / size * 2 + 1] + a->eps);
        factor[c] = (float)(rstd * (double)w[c]);
        offset[c] = (float)((double)b[c] - mean * rstd * (double)w[c]);
    }
}

LG_INLINE void scale_pixels(const struct lg_group_norm_forward_args *a, int64_t n,
                            const float *factor, const float *offset, const lg_act act)
{
    const int64_t C = a->x.dim[3], pixels = a->x.dim[1] * a->x.dim[2];
    const float *x = (const float *)a->x.data + n * pixels * C;
    float *y = (float *)a->y.data + n * pixels * C;
    for (int64_t p = 0; p < pixels; p++)
        LG_VLOOP(i, r, C, {
            vf v = vf_fma(vf_load_n(x + p * C + i, r), vf_load_n(factor + i, r),
                          vf_load_n(offset + i, r));
            vf_store_n(y + p * C + i, vf_act(v, act), r);
        });
}

/* The calling thread's scratch. */
struct room {
    double *mean_var;
    float *sum, *square; /* and room for as many factors and offsets */
};
static struct room room_of(const lg_stream *s, int64_t C, int64_t groups)
{
    char *own = (char *)s->scratch + (size_t)omp_get_thread_num() * group_norm_bytes(C, groups);
    float *floats = (float *)(void *)(own + (size_t)(2 * groups) * sizeof(double));
    return (struct room){(double *)(void *)own, floats, floats + C};
}

static void sample_mean_var(lg_tensor t, int64_t n, int64_t groups, struct room r, double *ret)
{
    const int64_t C = t.dim[3], pixels = t.dim[1] * t.dim[2];
    const float *x = (const float *)t.data + n * pixels * C;
    channel_sums(x, pixels, C, r.sum, r.square);
    group_mean_var(x, pixels, C, C / groups, r.sum, r.square, ret);
}

void LG_K(group_mean_var)(lg_stream *s, lg_tensor x, lg_tensor mean_var)
{
    const int64_t N = x.dim[0], C = x.dim[3], groups = mean_var.dim[1];
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t n = 0; n < N; n++)
        sample_mean_var(x, n, groups, room_of(s, C, groups),
                        (double *)mean_var.data + n * groups * 2);
}

void LG_K(group_norm_forward)(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[3];
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t n = 0; n < N; n++) {
        struct room r = room_of(s, C, a->groups);
        float *factor = r.square + C, *offset = factor + C;
        const double *mean_var = r.mean_var;
        if (a->mean_var.data)
            mean_var = (const double *)a->mean_var.data + n * a->groups * 2;
        else
            sample_mean_var(a->x, n, a->groups, r, r.mean_var);
        group_factors(a, mean_var, factor, offset);
        switch (a->act) {
        case LG_ACT_NONE:
            scale_pixels(a, n, factor, offset, LG_ACT_NONE);
            break;
        case LG_ACT_SILU:
            scale_pixels(a, n, factor, offset, LG_ACT_SILU);
            break;
        case LG_ACT_GELU_TANH:
            scale_pixels(a, n, factor, offset, LG_ACT_GELU_TANH);
            break;
        case LG_ACT_RELU:
            scale_pixels(a, n, factor, offset, LG_ACT_RELU);
            break;
        case LG_ACT_GELU_ERF:
            scale_pixels(a, n, factor, offset, LG_ACT_GELU_ERF);
            break;
        case LG_ACT_QUICK_GELU:
            scale_pixels(a, n, factor, offset, LG_ACT_QUICK_GELU);
            break;
        case LG_ACT_COUNT:
            break;
        }
    }
}
