/* Softmax attention, forward and backward; the scores of a row are recomputed where needed. */
#include "base/check.h"
#include "kernels/ref64/ref64.h"
#include "kernels/streams.h"
#include <math.h>

struct heads {
    int64_t B, Tq, Tk, H, d;
};

static struct heads heads_of(const lg_tensor *q, const lg_tensor *k)
{
    return (struct heads){q->dim[0], q->dim[1], k->dim[1], q->dim[2], q->dim[3]};
}

/* Token t of sample b, head h; first: of the first of two streams, or 0. */
static double *at(const lg_tensor *x, int64_t first, int64_t b, int64_t t, int64_t h)
{
    const int64_t row = lg_stream_row(x->dim[0], x->dim[1], first, b, t);
    return ref64_data(*x) + row * lg_row_stride(x, 2) + h * x->stride[2];
}

/* The heads in row bt. */
static double *row(const lg_tensor *x, int64_t bt)
{
    return ref64_data(*x) + bt * lg_row_stride(x, 2);
}

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Keys of sample b that count. */
static int64_t keys(const lg_tensor *k_length, int64_t b, int64_t Tk)
{
    if (!k_length->data) return Tk;
    int32_t n = ((const int32_t *)k_length->data)[b];
    LG_ASSERT(n >= 1 && n <= Tk);
    return n;
}

void ref64_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    struct heads z = heads_of(&a->q, &a->k);
    const double *bias = ref64_data(a->bias);
    for (int64_t bht = 0; bht < z.B * z.H * z.Tq; bht++) {
        int64_t b = bht / (z.H * z.Tq), h = bht / z.Tq % z.H, t = bht % z.Tq;
        int64_t n = keys(&a->k_length, b, z.Tk);
        if (a->causal) n = LG_MIN(n, t + 1);
        const double *q = at(&a->q, a->first_queries, b, t, h);
        double *o = at(&a->o, a->first_queries, b, t, h);
#define SCORE(j)                                                                                   \
    (a->scale * dot(q, at(&a->k, a->first_keys, b, (j), h), z.d) +                                 \
     (bias ? bias[(h * z.Tq + t) * z.Tk + (j)] : 0))
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < n; j++) max = fmax(max, SCORE(j));
        for (int64_t j = 0; j < n; j++) sum += exp(SCORE(j) - max);
        double lse = max + log(sum);
        for (int64_t i = 0; i < z.d; i++) o[i] = 0;
        for (int64_t j = 0; j < n; j++) {
            double p = exp(SCORE(j) - lse);
            const double *v = at(&a->v, a->first_keys, b, j, h);
            for (int64_t i = 0; i < z.d; i++) o[i] += p * v[i];
        }
#undef SCORE
        if (a->lse.data) ref64_data(a->lse)[bht] = lse;
    }
}

/* dbias: sums over samples and tokens of dq, of dk (0: see ops.h), of dv. */
static void bias_gradient(const struct lg_attention_backward_args *a)
{
    struct heads z = heads_of(&a->q, &a->k);
    int64_t width = z.H * z.d;
    for (int64_t i = 0; i < width; i++) {
        double q = 0, v = 0;
        for (int64_t bt = 0; bt < z.B * z.Tq; bt++) q += row(&a->dq, bt)[i];
        for (int64_t bt = 0; bt < z.B * z.Tk; bt++) v += row(&a->dv, bt)[i];
        ref64_put(&ref64_data(a->dbias)[i], q, a->accumulate_dbias);
        ref64_put(&ref64_data(a->dbias)[width + i], 0, a->accumulate_dbias);
        ref64_put(&ref64_data(a->dbias)[2 * width + i], v, a->accumulate_dbias);
    }
}

/* With p = exp(scale q k - lse): dv = p^T dout; ds = p (dout v^T - dout o); dq = scale ds k;
 * dk = scale ds^T q. */
void ref64_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    struct heads z = heads_of(&a->q, &a->k);
    for (int64_t bt = 0; bt < z.B * z.Tq; bt++)
        for (int64_t i = 0; i < z.H * z.d; i++) row(&a->dq, bt)[i] = 0;
    for (int64_t bt = 0; bt < z.B * z.Tk; bt++)
        for (int64_t i = 0; i < z.H * z.d; i++) row(&a->dk, bt)[i] = row(&a->dv, bt)[i] = 0;
    for (int64_t bht = 0; bht < z.B * z.H * z.Tq; bht++) {
        int64_t b = bht / (z.H * z.Tq), h = bht / z.Tq % z.H, t = bht % z.Tq;
        const double *q = at(&a->q, a->first_queries, b, t, h);
        const double *dout = at(&a->dout, a->first_queries, b, t, h);
        const double *o = at(&a->o, a->first_queries, b, t, h);
        double *dq = at(&a->dq, a->first_queries, b, t, h);
        double lse = ref64_data(a->lse)[bht], dout_o = dot(dout, o, z.d);
        for (int64_t j = 0; j < keys(&a->k_length, b, z.Tk); j++) {
            const double *k = at(&a->k, a->first_keys, b, j, h);
            const double *v = at(&a->v, a->first_keys, b, j, h);
            double *dk = at(&a->dk, a->first_keys, b, j, h);
            double *dv = at(&a->dv, a->first_keys, b, j, h);
            double p = exp(a->scale * dot(q, k, z.d) - lse);
            double ds = p * (dot(dout, v, z.d) - dout_o);
            for (int64_t i = 0; i < z.d; i++) {
                dv[i] += p * dout[i];
                dq[i] += a->scale * ds * k[i];
                dk[i] += a->scale * ds * q[i];
            }
        }
    }
    if (a->dbias.data) bias_gradient(a);
}
