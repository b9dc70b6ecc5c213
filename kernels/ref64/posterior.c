/* The two halves of an autoencoder's output. */
#include "kernels/ref64/ref64.h"

void ref64_posterior_split(lg_stream *s, const struct lg_posterior_split_args *a)
{
    int64_t N = a->mean.dim[0], C = a->mean.dim[1], HW = a->mean.dim[2] * a->mean.dim[3];
    const double *x = ref64_data(a->x);
    double *mean = ref64_data(a->mean), *logvar = ref64_data(a->logvar);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t p = 0; p < HW; p++) {
                const double *cell = &x[(n * HW + p) * 2 * C];
                double v = cell[C + c];
                mean[(n * C + c) * HW + p] = cell[c];
                logvar[(n * C + c) * HW + p] = v < -30 ? -30 : v > 20 ? 20 : v; /* NaN stays */
            }
}
