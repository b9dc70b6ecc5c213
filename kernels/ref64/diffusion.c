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
