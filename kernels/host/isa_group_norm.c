/* GroupNorm, (N, H, W, C).
 *
 * The forward reads its input twice and writes once: the first pass sums each channel's distance to the channel's
 * first pixel, so that a large mean does not eat the variance. The backward does the same: sums of the channels,
 * which a group's two means are made of, then dx. A thread has whole samples.
 */
#include "kernels/host/vmath.h"
#include <math.h>
#include <omp.h>

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

void LG_K(group_mean_var_forward)(lg_stream *s, const struct lg_group_mean_var_forward_args *a)
{
    LG_K(group_mean_var)(s, a->x, a->mean_var);
}

/* Of each channel in a sample, while a thread has it. */
struct channels {
    float *mean, *rstd, *away, *slope; /* dx = rstd (d w - away - n slope) */
};

/* In front sums (N, 2, C) of d and d n of each sample, then what each thread has of its own. */
size_t LG_K(group_norm_backward_scratch)(int64_t N, int64_t C, int threads)
{
    return (size_t)((2 * N + 4 * threads) * C) * sizeof(float);
}

static void fill_channels(const struct lg_group_norm_backward_args *a, int64_t n,
                          struct channels *ret)
{
    const int64_t C = a->x.dim[3], size = C / a->groups;
    const double *mean_var = (const double *)a->mean_var.data + n * a->groups * 2;
    for (int64_t c = 0; c < C; c++) {
        ret->mean[c] = (float)mean_var[c / size * 2];
        ret->rstd[c] = (float)(1.0 / sqrt(mean_var[c / size * 2 + 1] + a->eps));
    }
}

/* The means of a group, of d w and of d w n, from the sums of its channels. */
static void fill_means(const struct lg_group_norm_backward_args *a, const float *sum,
                       struct channels *ret)
{
    const int64_t C = a->x.dim[3], size = C / a->groups;
    const double count = (double)(a->x.dim[1] * a->x.dim[2] * size);
    const float *w = a->w.data;
    for (int64_t first = 0; first < C; first += size) {
        double away = 0, slope = 0;
        for (int64_t c = first; c < first + size; c++) {
            away += (double)sum[c] * (double)w[c];
            slope += (double)sum[C + c] * (double)w[c];
        }
        for (int64_t c = first; c < first + size; c++) {
            ret->away[c] = (float)(away / count);
            ret->slope[c] = (float)(slope / count);
        }
    }
}

/* sum: of d, then of d n, over a sample's pixels in their order. */
LG_INLINE void sum_pixels(const struct lg_group_norm_backward_args *a, int64_t n,
                          const struct channels *k, float *sum, const lg_act act)
{
    const int64_t C = a->x.dim[3], pixels = a->x.dim[1] * a->x.dim[2];
    const float *w = a->w.data, *b = a->b.data;
    memset(sum, 0, (size_t)(2 * C) * sizeof *sum);
    for (int64_t p = n * pixels; p < (n + 1) * pixels; p++) {
        const float *x = (const float *)a->x.data + p * C, *dy = (const float *)a->dy.data + p * C;
        LG_VLOOP(i, r, C, {
            vf h = (vf_load_n(x + i, r) - vf_load_n(k->mean + i, r)) * vf_load_n(k->rstd + i, r);
            vf z = vf_fma(h, vf_load_n(w + i, r), vf_load_n(b + i, r));
            vf d = vf_load_n(dy + i, r) * vf_act_slope(z, act);
            vf_store_n(sum + i, vf_load_n(sum + i, r) + d, r);
            vf_store_n(sum + C + i, vf_fma(d, h, vf_load_n(sum + C + i, r)), r);
        });
    }
}

LG_INLINE void slope_pixels(const struct lg_group_norm_backward_args *a, int64_t n,
                            const struct channels *k, const lg_act act)
{
    const int64_t C = a->x.dim[3], pixels = a->x.dim[1] * a->x.dim[2];
    const float *w = a->w.data, *b = a->b.data;
    for (int64_t p = n * pixels; p < (n + 1) * pixels; p++) {
        const float *x = (const float *)a->x.data + p * C, *dy = (const float *)a->dy.data + p * C;
        float *dx = (float *)a->dx.data + p * C;
        LG_VLOOP(i, r, C, {
            vf rstd = vf_load_n(k->rstd + i, r), weight = vf_load_n(w + i, r);
            vf h = (vf_load_n(x + i, r) - vf_load_n(k->mean + i, r)) * rstd;
            vf d = vf_load_n(dy + i, r) * vf_act_slope(vf_fma(h, weight, vf_load_n(b + i, r)), act);
            vf away = vf_fma(d, weight, -vf_load_n(k->away + i, r));
            vf g = vf_fma(h, -vf_load_n(k->slope + i, r), away) * rstd;
            if (a->accumulate) g += vf_load_n(dx + i, r);
            vf_store_n(dx + i, g, r);
        });
    }
}

static void sum_sample(const struct lg_group_norm_backward_args *a, int64_t n,
                       const struct channels *k, float *sum)
{
    if (a->act == LG_ACT_SILU)
        sum_pixels(a, n, k, sum, LG_ACT_SILU);
    else if (a->act == LG_ACT_NONE)
        sum_pixels(a, n, k, sum, LG_ACT_NONE);
    else
        sum_pixels(a, n, k, sum, a->act); /* no net has another one: not worth a copy for each */
}

static void slope_sample(const struct lg_group_norm_backward_args *a, int64_t n,
                         const struct channels *k)
{
    if (a->act == LG_ACT_SILU)
        slope_pixels(a, n, k, LG_ACT_SILU);
    else if (a->act == LG_ACT_NONE)
        slope_pixels(a, n, k, LG_ACT_NONE);
    else
        slope_pixels(a, n, k, a->act);
}

void LG_K(group_norm_backward)(lg_stream *s, const struct lg_group_norm_backward_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[3];
    float *sums = s->scratch, *own = sums + 2 * N * C;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t n = 0; n < N; n++) {
        float *at = own + (int64_t)omp_get_thread_num() * 4 * C;
        struct channels k = {at, at + C, at + 2 * C, at + 3 * C};
        fill_channels(a, n, &k);
        sum_sample(a, n, &k, sums + 2 * n * C);
        fill_means(a, sums + 2 * n * C, &k);
        slope_sample(a, n, &k);
    }
    if (!a->dw.data) return;
    const struct lg_host_rows db = {sums, N, C, 2 * C}, dw = {sums + C, N, C, 2 * C};
    LG_K(column_sums)(s, &db, a->db.data, a->accumulate_dw);
    LG_K(column_sums)(s, &dw, a->dw.data, a->accumulate_dw);
}
