/* What only the trainer runs: the diffusion process, the losses, the reduction over ranks, AdamW.
 *
 * AdamW and the reduction move as many bytes as they must and are bound by memory; their factors
 * are made in double and rounded once. */
#include "kernels/host/isa.h"
#include <math.h>

enum { NORMALS = 256 };

/* One stretch of a sample: elements first .. first + count, count <= NORMALS. */
static void diffuse(const struct lg_diffuse_forward_args *a, int64_t b, int64_t first,
                    int64_t count)
{
    const int64_t n = ((const int64_t *)a->n.data)[b];
    const int64_t at = b * (lg_host_numel(&a->mean) / a->mean.dim[0]) + first;
    const float *mean = (const float *)a->mean.data + at;
    const float *logvar = (const float *)a->logvar.data + at;
    const float *coef = (const float *)a->coef.data + 4 * b;
    float *x_t = (float *)a->x_t.data + at, *target = (float *)a->target.data + at;
    double z[NORMALS], e[NORMALS];
    lg_philox_normal_f64(z, (size_t)count, a->seed, LG_PURPOSE_LATENT, (uint64_t)n,
                         (uint64_t)first);
    lg_philox_normal_f64(e, (size_t)count, a->seed, LG_PURPOSE_NOISE, (uint64_t)n, (uint64_t)first);
    for (int64_t i = 0; i < count; i++) {
        double deviation = exp(0.5 * fmin(fmax((double)logvar[i], -30.0), 20.0));
        double x0 = ((double)mean[i] + deviation * z[i] - a->shift_factor) * a->scaling_factor;
        x_t[i] = (float)((double)coef[0] * x0 + (double)coef[1] * e[i]);
        target[i] = (float)((double)coef[2] * x0 + (double)coef[3] * e[i]);
    }
}

void LG_K(diffuse_forward)(lg_stream *s, const struct lg_diffuse_forward_args *a)
{
    const int64_t B = a->mean.dim[0], size = lg_host_numel(&a->mean) / B;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++)
        for (int64_t first = 0; first < size; first += NORMALS)
            diffuse(a, b, first, LG_MIN((int64_t)NORMALS, size - first));
}

void LG_K(mse_loss)(lg_stream *s, const struct lg_mse_loss_args *a)
{
    const int64_t B = a->pred.dim[0], size = lg_host_numel(&a->pred) / B;
    const bool backward = a->dpred.rank && a->dpred.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++) {
        const float *pred = (const float *)a->pred.data + b * size;
        const float *target = (const float *)a->target.data + b * size;
        float *dpred = backward ? (float *)a->dpred.data + b * size : NULL;
        const float weight = ((const float *)a->weight.data)[b];
        const float factor = (float)((double)weight * 2.0 / (double)size);
        if (weight == 0.0f) {
            ((float *)a->loss.data)[b] = 0.0f;
            if (backward) memset(dpred, 0, (size_t)size * sizeof(float));
            continue;
        }
        double sum = 0;
        for (int64_t first = 0; first < size; first += LG_PIECE) {
            vf part = {0};
            LG_VLOOP(j, r, LG_MIN((int64_t)LG_PIECE, size - first), {
                const int64_t i = first + j;
                vf d = vf_load_n(pred + i, r) - vf_load_n(target + i, r);
                part += d * d;
                if (backward) vf_store_n(dpred + i, d * factor, r);
            });
            sum += (double)vf_sum(part);
        }
        ((float *)a->loss.data)[b] = (float)(sum / (double)size);
    }
}

/* Of a learned variance: what an element adds to the loss, in nats, and its slope in L. In double, one exp an element;
 * the first timestep, one sample in a thousand, takes two tanh. */
struct vb {
    double loss, slope;
};

/* terms as in ops.def; deviation: d (e' - e). */
static struct vb vb_between(const float *terms, double L, double deviation)
{
    const double l = (double)terms[0], ratio = exp(l - L);
    const double square = deviation * deviation * ratio * exp(-l);
    return (struct vb){0.5 * (L - l - 1.0 + ratio + square), 0.5 * (1.0 - ratio - square)};
}

static double normal_cdf(double x, double *ret_slope)
{
    const double root = 0.79788456080286535588, t = tanh(root * (x + 0.044715 * x * x * x));
    *ret_slope = 0.5 * (1.0 - t * t) * root * (1.0 + 3 * 0.044715 * x * x);
    return 0.5 * (1.0 + t);
}

static struct vb vb_first(double x0, double L, double deviation)
{
    const double half = 1.0 / 255, open = 0.999, least = 1e-12, scale = exp(-0.5 * L);
    const double from = scale * (deviation - half), to = scale * (deviation + half);
    double slope_from, slope_to, below = normal_cdf(from, &slope_from);
    double above = normal_cdf(to, &slope_to);
    if (x0 < -open) below = slope_from = 0;
    if (x0 > open) above = 1, slope_to = 0;
    const double p = above - below;
    if (p <= least) return (struct vb){-log(least), 0}; /* NaN stays */
    return (struct vb){-log(p), (slope_to * to - slope_from * from) / (2 * p)};
}

static void noise_loss(const struct lg_learned_range_loss_args *a, int64_t b, int64_t size,
                       float *dpred)
{
    const float *pred = (const float *)a->pred.data + 2 * b * size;
    const float *target = (const float *)a->target.data + b * size;
    const double weight = (double)((const float *)a->weight.data)[2 * b];
    double sum = 0;
    for (int64_t i = 0; i < size && weight != 0; i++) {
        const double error = (double)pred[i] - (double)target[i];
        sum += error * error;
        if (dpred) dpred[i] = (float)(weight * 2 * error / (double)size);
    }
    if (dpred && weight == 0) memset(dpred, 0, (size_t)size * sizeof *dpred);
    ((float *)a->loss.data)[2 * b] = (float)(sum / (double)size);
}

/* Before noise_loss: dpred may lie on pred. */
static void variance_loss(const struct lg_learned_range_loss_args *a, int64_t b, int64_t size,
                          float *dv)
{
    const float *pred = (const float *)a->pred.data + 2 * b * size, *v = pred + size;
    const float *target = (const float *)a->target.data + b * size;
    const float *x_t = (const float *)a->x_t.data + b * size;
    const float *terms = (const float *)a->terms.data + 6 * b;
    const double weight = (double)((const float *)a->weight.data)[2 * b + 1],
                 ln2 = 0.6931471805599453;
    const double half = 0.5 * ((double)terms[1] - (double)terms[0]);
    double sum = 0;
    for (int64_t i = 0; i < size && weight != 0; i++) {
        const double deviation = (double)terms[2] * ((double)pred[i] - (double)target[i]);
        const double L = (double)terms[0] + half * ((double)v[i] + 1.0);
        const double x0 = (double)terms[3] * (double)x_t[i] + (double)terms[4] * (double)target[i];
        const struct vb vb =
            terms[5] > 0 ? vb_first(x0, L, deviation) : vb_between(terms, L, deviation);
        sum += vb.loss;
        if (dv) dv[i] = (float)(weight * half * vb.slope / (ln2 * (double)size));
    }
    if (dv && weight == 0) memset(dv, 0, (size_t)size * sizeof *dv);
    ((float *)a->loss.data)[2 * b + 1] = (float)(sum / (ln2 * (double)size));
}

void LG_K(learned_range_loss)(lg_stream *s, const struct lg_learned_range_loss_args *a)
{
    const int64_t B = a->target.dim[0], size = lg_host_numel(&a->target) / B;
    const bool backward = a->dpred.rank && a->dpred.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t b = 0; b < B; b++) {
        float *dpred = backward ? (float *)a->dpred.data + 2 * b * size : NULL;
        variance_loss(a, b, size, dpred ? dpred + size : NULL);
        noise_loss(a, b, size, dpred);
    }
}

/* Adds the ranks' gradients of one piece; returns its sum of squares. */
static double reduce_piece(const struct lg_reduce_ranks_args *a, int64_t first, int64_t count)
{
    enum { HALF = LG_VW / 2 };
    float *y = (float *)a->y.data + first;
    vd sum[2] = {{0}};
    LG_VLOOP(i, r, count, {
        vf v = vf_load_n((const float *)a->x[0].data + first + i, r);
        for (int k = 1; k < a->count; k++)
            v += vf_load_n((const float *)a->x[k].data + first + i, r);
        vf_store_n(y + i, v, r);
        vh half[2];
        memcpy(half, &v, sizeof half);
        vd low = __builtin_convertvector(half[0], vd);
        vd high = __builtin_convertvector(half[1], vd);
        sum[0] += low * low;
        sum[1] += high * high;
    });
    return vd_sum(sum[0] + sum[1]);
}

void LG_K(reduce_ranks)(lg_stream *s, const struct lg_reduce_ranks_args *a)
{
    const int64_t n = lg_host_numel(&a->y);
    /* One thread: memory is the limit. */
    for (int64_t first = 0; first < n; first += LG_SQUARES_PIECE)
        ((double *)a->squares.data)[first / LG_SQUARES_PIECE] =
            reduce_piece(a, first, LG_MIN((int64_t)LG_SQUARES_PIECE, n - first));
}

struct adamw {
    float keep, decay_1, take_1, decay_2, take_2, step, root, eps, scale;
};

LG_INLINE void adamw_piece(const struct lg_adamw_args *a, const struct adamw c, int64_t at,
                           int64_t count)
{
    const float *w = (const float *)a->w.data + at, *m = (const float *)a->m.data + at;
    const float *v = (const float *)a->v.data + at, *grad = (const float *)a->grad.data + at;
    float *w_out = (float *)a->w_out.data + at, *m_out = (float *)a->m_out.data + at;
    float *v_out = (float *)a->v_out.data + at;
    LG_VLOOP(i, r, count, {
        vf g = vf_load_n(grad + i, r) * c.scale;
        vf m1 = vf_load_n(m + i, r) * c.decay_1 + g * c.take_1;
        vf v1 = vf_load_n(v + i, r) * c.decay_2 + (g * g) * c.take_2;
        vf w1 = vf_load_n(w + i, r) * c.keep;
        vf_store_n(m_out + i, m1, r);
        vf_store_n(v_out + i, v1, r);
        w1 -= c.step * m1 / (LG_VSQRT(v1) * c.root + c.eps);
        vf_store_n(w_out + i, w1, r);
        for (int k = 0; k < a->copies; k++) vf_store_n((float *)a->working[k].data + at + i, w1, r);
    });
}

void LG_K(adamw)(lg_stream *s, const struct lg_adamw_args *a)
{
    const int64_t n = lg_host_numel(&a->w);
    const struct adamw c = {
        .keep = (float)(1.0 - a->lr * a->weight_decay),
        .decay_1 = (float)a->beta1,
        .take_1 = (float)(1.0 - a->beta1),
        .decay_2 = (float)a->beta2,
        .take_2 = (float)(1.0 - a->beta2),
        .step = (float)(a->lr / (1.0 - pow(a->beta1, (double)a->t))),
        .root = (float)(1.0 / sqrt(1.0 - pow(a->beta2, (double)a->t))),
        .eps = (float)a->eps,
        .scale = (float)a->grad_scale,
    };
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t at = 0; at < n; at += LG_PIECE)
        adamw_piece(a, c, at, LG_MIN((int64_t)LG_PIECE, n - at));
}
