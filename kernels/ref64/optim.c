/* Reduction over ranks, AdamW, EMA. */
#include "base/check.h"
#include "kernels/adamw8.h"
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

/* The nearest of the map's values; what is below 0 stays there. */
static uint8_t code_of(const double map[LG_ADAMW8_CODES], double x)
{
    int best = 0;
    for (int c = 1; c < LG_ADAMW8_CODES; c++)
        if (fabs(map[c] - x) < fabs(map[best] - x)) best = c;
    return (uint8_t)(best - (x < 0 && map[best] >= 0));
}

static double absmax_of(const double *x, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(x[i]));
    return most;
}

/* Elements [at, at + n), of block at / 256. */
static void adamw8_block(const struct lg_adamw8_args *a, int64_t at, int64_t n)
{
    const int64_t block = at / LG_ADAMW8_BLOCK;
    const double c1 = 1 - pow(a->beta1, (double)a->t), c2 = sqrt(1 - pow(a->beta2, (double)a->t));
    double m_map[LG_ADAMW8_CODES], v_map[LG_ADAMW8_CODES];
    double m[LG_ADAMW8_BLOCK], v[LG_ADAMW8_BLOCK];
    lg_adamw8_map(true, m_map);
    lg_adamw8_map(false, v_map);
    for (int64_t i = 0; i < n; i++) {
        const double g = a->grad_scale * ref64_data(a->grad)[at + i];
        double w = ref64_data(a->w)[at + i];
        m[i] = m_map[((uint8_t *)a->m.data)[at + i]] * ref64_data(a->m_max)[block];
        v[i] = v_map[((uint8_t *)a->v.data)[at + i]] * ref64_data(a->v_max)[block];
        m[i] = isfinite(g) ? a->beta1 * m[i] + (1 - a->beta1) * g : 0;
        v[i] = isfinite(g) ? a->beta2 * v[i] + (1 - a->beta2) * g * g : 0;
        if (isfinite(g))
            w = (w - a->lr * c2 / c1 * m[i] / (sqrt(v[i]) + c2 * a->eps)) *
                (1 - a->lr * a->weight_decay);
        ref64_data(a->w_out)[at + i] = w;
        for (int c = 0; c < a->copies; c++) ref64_data(a->working[c])[at + i] = w;
    }
    const double m_max = absmax_of(m, n), v_max = absmax_of(v, n);
    ref64_data(a->m_max_out)[block] = m_max;
    ref64_data(a->v_max_out)[block] = v_max;
    for (int64_t i = 0; i < n; i++) {
        ((uint8_t *)a->m_out.data)[at + i] = code_of(m_map, m_max > 0 ? m[i] / m_max : 0);
        ((uint8_t *)a->v_out.data)[at + i] = code_of(v_map, v_max > 0 ? v[i] / v_max : 0);
    }
}

void ref64_adamw8(lg_stream *s, const struct lg_adamw8_args *a)
{
    for (int64_t at = 0; at < a->w.dim[0]; at += LG_ADAMW8_BLOCK)
        adamw8_block(a, at, LG_MIN((int64_t)LG_ADAMW8_BLOCK, a->w.dim[0] - at));
}

void ref64_ema(lg_stream *s, const struct lg_ema_args *a)
{
    for (int64_t i = 0; i < a->ema.dim[0]; i++)
        ref64_data(a->out)[i] =
            a->decay * ref64_data(a->ema)[i] + (1 - a->decay) * ref64_data(a->w)[i];
}
