/* Reduction over ranks, AdamW, EMA. */
#include "base/check.h"
#include "kernels/ref64/ref64.h"
#include <math.h>

void ref64_reduce_ranks(lg_stream *s, const struct lg_reduce_ranks_args *a)
{
    int64_t n = a->y.dim[0];
    double *y = ref64_data(a->y);
    for (int64_t first = 0; first < n; first += LG_SQUARES_PIECE) {
        double squares = 0;
        for (int64_t i = first; i < LG_MIN(n, first + LG_SQUARES_PIECE); i++) {
            double sum = ref64_data(a->x[0])[i];
            for (int r = 1; r < a->count; r++) sum += ref64_data(a->x[r])[i];
            y[i] = sum;
            squares += sum * sum;
        }
        ref64_data(a->squares)[first / LG_SQUARES_PIECE] = squares;
    }
}

void ref64_adamw(lg_stream *s, const struct lg_adamw_args *a)
{
    double correct1 = 1 - pow(a->beta1, (double)a->t), correct2 = 1 - pow(a->beta2, (double)a->t);
    for (int64_t i = 0; i < a->w.dim[0]; i++) {
        double g = a->grad_scale * ref64_data(a->grad)[i];
        double w = ref64_data(a->w)[i] * (1 - a->lr * a->weight_decay);
        double m = a->beta1 * ref64_data(a->m)[i] + (1 - a->beta1) * g;
        double v = a->beta2 * ref64_data(a->v)[i] + (1 - a->beta2) * g * g;
        ref64_data(a->w_out)[i] = w - a->lr * (m / correct1) / (sqrt(v / correct2) + a->eps);
        for (int c = 0; c < a->copies; c++) ref64_data(a->working[c])[i] = ref64_data(a->w_out)[i];
        ref64_data(a->m_out)[i] = m;
        ref64_data(a->v_out)[i] = v;
    }
}

void ref64_ema(lg_stream *s, const struct lg_ema_args *a)
{
    for (int64_t i = 0; i < a->ema.dim[0]; i++)
        ref64_data(a->out)[i] =
            a->decay * ref64_data(a->ema)[i] + (1 - a->decay) * ref64_data(a->w)[i];
}
