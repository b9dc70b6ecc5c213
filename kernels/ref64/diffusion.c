/* The noised sample, its target, and the loss. */
#include "kernels/ref64/ref64.h"
#include <math.h>

#define LOGVAR_MIN -30.0
#define LOGVAR_MAX 20.0

void ref64_diffuse_forward(lg_stream *s, const struct lg_diffuse_forward_args *a)
{
    int64_t B = a->mean.dim[0], per_sample = lg_numel(&a->mean) / B;
    for (int64_t b = 0; b < B; b++) {
        uint64_t n = (uint64_t)((const int64_t *)a->n.data)[b];
        const double *coef = ref64_data(a->coef) + b * 4;
        for (int64_t i = 0; i < per_sample; i++) {
            int64_t e = b * per_sample + i;
            double z, noise;
            lg_philox_normal_f64(&z, 1, a->seed, LG_PURPOSE_LATENT, n, (uint64_t)i);
            lg_philox_normal_f64(&noise, 1, a->seed, LG_PURPOSE_NOISE, n, (uint64_t)i);
            double v = ref64_data(a->logvar)[e];
            double logvar = v < LOGVAR_MIN ? LOGVAR_MIN : v > LOGVAR_MAX ? LOGVAR_MAX : v;
            double latent = ref64_data(a->mean)[e] + exp(logvar / 2) * z;
            double x0 = (latent - a->shift_factor) * a->scaling_factor;
            ref64_data(a->x_t)[e] = coef[0] * x0 + coef[1] * noise;
            ref64_data(a->target)[e] = coef[2] * x0 + coef[3] * noise;
        }
    }
}

void ref64_mse_loss(lg_stream *s, const struct lg_mse_loss_args *a)
{
    int64_t B = a->pred.dim[0], per_sample = lg_numel(&a->pred) / B;
    const double *pred = ref64_data(a->pred), *target = ref64_data(a->target);
    double *dpred = ref64_data(a->dpred);
    for (int64_t b = 0; b < B; b++) {
        double weight = ref64_data(a->weight)[b], sum = 0;
        for (int64_t i = b * per_sample; i < (b + 1) * per_sample; i++) {
            double error = weight == 0 ? 0 : pred[i] - target[i];
            sum += error * error;
            if (dpred) dpred[i] = weight * 2 * error / (double)per_sample;
        }
        ref64_data(a->loss)[b] = sum / (double)per_sample;
    }
}

/* ---- a learned variance ---- */

#define BIN_HALF (1.0 / 255) /* of the first timestep's bins */
#define BIN_OPEN 0.999
#define LEAST    1e-12

/* gelu_tanh's approximation of the normal distribution function; *ret_slope: its derivative. */
static double normal_cdf(double x, double *ret_slope)
{
    const double root = sqrt(2 / acos(-1)), t = tanh(root * (x + 0.044715 * x * x * x));
    *ret_slope = 0.5 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
    return 0.5 * (1 + t);
}

struct vb {
    double loss, slope; /* in nats; with respect to L */
};

static struct vb divergence(double l, double L, double difference)
{
    const double square = difference * difference * exp(-L);
    return (struct vb){0.5 * (L - l - 1 + exp(l - L) + square), 0.5 * (1 - exp(l - L) - square)};
}

/* -log of the bin's probability. */
static struct vb first_step(double x0, double L, double difference)
{
    const double scale = exp(-L / 2), high = scale * (difference + BIN_HALF),
                 low = scale * (difference - BIN_HALF);
    double high_slope, low_slope, above = normal_cdf(high, &high_slope);
    double below = normal_cdf(low, &low_slope);
    if (x0 < -BIN_OPEN) below = low_slope = 0;
    if (x0 > BIN_OPEN) above = 1, high_slope = 0;
    const double p = above - below;
    if (p <= LEAST) return (struct vb){-log(LEAST), 0}; /* NaN stays */
    return (struct vb){-log(p), (high_slope * high - low_slope * low) / (2 * p)};
}

void ref64_learned_range_loss(lg_stream *s, const struct lg_learned_range_loss_args *a)
{
    const int64_t B = a->target.dim[0], size = lg_numel(&a->target) / B;
    for (int64_t b = 0; b < B; b++) {
        const double *pred = ref64_data(a->pred) + 2 * b * size, *v = pred + size;
        const double *e = ref64_data(a->target) + b * size, *x_t = ref64_data(a->x_t) + b * size;
        const double *terms = ref64_data(a->terms) + 6 * b, *weight = ref64_data(a->weight) + 2 * b;
        double *dpred = ref64_data(a->dpred), sum[2] = {0};
        if (dpred) dpred += 2 * b * size;
        for (int64_t i = 0; i < size; i++) {
            const double error = pred[i] - e[i], l = terms[0], half = (terms[1] - l) / 2;
            const double L = l + half * (v[i] + 1), x0 = terms[3] * x_t[i] + terms[4] * e[i];
            const struct vb vb = terms[5] > 0 ? first_step(x0, L, terms[2] * error)
                                              : divergence(l, L, terms[2] * error);
            if (weight[0] != 0) sum[0] += error * error;
            if (weight[1] != 0) sum[1] += vb.loss / log(2);
            if (!dpred) continue;
            dpred[i] = weight[0] == 0 ? 0 : weight[0] * 2 * error / (double)size;
            dpred[size + i] =
                weight[1] == 0 ? 0 : weight[1] * half * vb.slope / (log(2) * (double)size);
        }
        for (int k = 0; k < 2; k++) ref64_data(a->loss)[2 * b + k] = sum[k] / (double)size;
    }
}
