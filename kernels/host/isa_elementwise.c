/* Elementwise operations and sums over rows: one pass over memory each.
 *
 * Flat arrays are cut into pieces of LG_PIECE elements that threads share; an element's value does
 * not depend on the cut (see isa.h). sum_rows adds rows in order, whatever the number of threads:
 * threads share columns. */
#include "kernels/host/vmath.h"

/* Runs the block for i over [0, n) in pieces, r valid lanes each time; p_ is the piece's start. */
#define FLAT(threads, i, r, n, ...)                                                                \
    do {                                                                                           \
        const int64_t total_ = (n);                                                                \
        LG_PARALLEL(threads)                                                                       \
        for (int64_t at = 0; at < total_; at += LG_PIECE)                                          \
            LG_VLOOP(i, r, LG_MIN((int64_t)LG_PIECE, total_ - at), __VA_ARGS__);                   \
    } while (0)

/* An activation that is a constant in the loop. */
#define FOR_ACT(act, A, ...)                                                                       \
    switch (act) {                                                                                 \
    case LG_ACT_SILU: {                                                                            \
        enum { A = LG_ACT_SILU };                                                                  \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case LG_ACT_GELU_TANH: {                                                                       \
        enum { A = LG_ACT_GELU_TANH };                                                             \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case LG_ACT_RELU: {                                                                            \
        enum { A = LG_ACT_RELU };                                                                  \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case LG_ACT_GELU_ERF: {                                                                        \
        enum { A = LG_ACT_GELU_ERF };                                                              \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case LG_ACT_QUICK_GELU: {                                                                      \
        enum { A = LG_ACT_QUICK_GELU };                                                            \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    case LG_ACT_COUNT:                                                                             \
    case LG_ACT_NONE: {                                                                            \
        enum { A = LG_ACT_NONE };                                                                  \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }                                                                                              \
    }

void LG_K(act_forward)(lg_stream *s, const struct lg_act_forward_args *a)
{
    const float *x = a->x.data;
    float *y = a->y.data;
    const int threads = lg_host_threads(s);
    const int64_t n = lg_host_numel(&a->x);
    FOR_ACT(a->act, A, FLAT(threads, i, r, n, {
                const int64_t k = at + i;
                vf_store_n(y + k, vf_act(vf_load_n(x + k, r), (lg_act)A), r);
            }));
}

void LG_K(act_backward)(lg_stream *s, const struct lg_act_backward_args *a)
{
    const float *x = a->x.data, *dy = a->dy.data;
    float *dx = a->dx.data;
    const int threads = lg_host_threads(s);
    const int64_t n = lg_host_numel(&a->x);
    if (a->accumulate) {
        FOR_ACT(a->act, A, FLAT(threads, i, r, n, {
                    const int64_t k = at + i;
                    vf g = vf_act_slope(vf_load_n(x + k, r), (lg_act)A) * vf_load_n(dy + k, r);
                    vf_store_n(dx + k, vf_load_n(dx + k, r) + g, r);
                }));
    } else {
        FOR_ACT(a->act, A, FLAT(threads, i, r, n, {
                    const int64_t k = at + i;
                    vf g = vf_act_slope(vf_load_n(x + k, r), (lg_act)A) * vf_load_n(dy + k, r);
                    vf_store_n(dx + k, g, r);
                }));
    }
}

void LG_K(glu_forward)(lg_stream *s, const struct lg_glu_forward_args *a)
{
    const int64_t M = a->y.dim[0], D = a->y.dim[1];
    FOR_ACT(a->act, A, {
        LG_PARALLEL(lg_host_threads(s))
        for (int64_t m = 0; m < M; m++) {
            const float *x = (const float *)a->x.data + m * 2 * D;
            float *y = (float *)a->y.data + m * D;
            LG_VLOOP(i, r, D, {
                vf gate = vf_act(vf_load_n(x + D + i, r), (lg_act)A);
                vf_store_n(y + i, vf_load_n(x + i, r) * gate, r);
            });
        }
    })
}

void LG_K(glu_backward)(lg_stream *s, const struct lg_glu_backward_args *a)
{
    const int64_t M = a->dy.dim[0], D = a->dy.dim[1];
    FOR_ACT(a->act, A, {
        LG_PARALLEL(lg_host_threads(s))
        for (int64_t m = 0; m < M; m++) {
            const float *x = (const float *)a->x.data + m * 2 * D;
            const float *dy = (const float *)a->dy.data + m * D;
            float *dx = (float *)a->dx.data + m * 2 * D;
            LG_VLOOP(i, r, D, {
                vf value = vf_load_n(x + i, r), gate = vf_load_n(x + D + i, r);
                vf d = vf_load_n(dy + i, r);
                vf_store_n(dx + i, d * vf_act(gate, (lg_act)A), r);
                vf_store_n(dx + D + i, d * value * vf_act_slope(gate, (lg_act)A), r);
            });
        }
    })
}

void LG_K(mul_forward)(lg_stream *s, const struct lg_mul_forward_args *args)
{
    const float *a = args->a.data, *b = args->b.data;
    float *y = args->y.data;
    FLAT(lg_host_threads(s), i, r, lg_host_numel(&args->a), {
        const int64_t k = at + i;
        vf_store_n(y + k, vf_load_n(a + k, r) * vf_load_n(b + k, r), r);
    });
}

void LG_K(add_forward)(lg_stream *s, const struct lg_add_forward_args *args)
{
    const float *a = args->a.data, *b = args->b.data;
    float *y = args->y.data;
    const int64_t n = lg_host_numel(&args->b), rows = lg_host_numel(&args->a) / n;
    if (rows == 1) {
        FLAT(lg_host_threads(s), i, r, n, {
            const int64_t k = at + i;
            vf_store_n(y + k, vf_load_n(a + k, r) + vf_load_n(b + k, r), r);
        });
        return;
    }
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++)
        LG_VLOOP(i, r, n, {
            const int64_t k = row * n + i;
            vf_store_n(y + k, vf_load_n(a + k, r) + vf_load_n(b + i, r), r);
        });
}

/* y[0..n) += rows of x, in order; x has row stride N. Four rows share each pass over y. */
static void add_rows(float *y, const float *x, int64_t rows, int64_t N, int64_t n)
{
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4)
        LG_VLOOP(i, r, n, {
            const float *p = x + m * N + i;
            vf sum = vf_load_n(y + i, r);
            sum += vf_load_n(p, r);
            sum += vf_load_n(p + N, r);
            sum += vf_load_n(p + 2 * N, r);
            sum += vf_load_n(p + 3 * N, r);
            vf_store_n(y + i, sum, r);
        });
    for (; m < rows; m++)
        LG_VLOOP(i, r, n,
                 { vf_store_n(y + i, vf_load_n(y + i, r) + vf_load_n(x + m * N + i, r), r); });
}

void LG_K(column_sums)(lg_stream *s, const struct lg_host_rows *x, float *y, bool accumulate)
{
    const int64_t N = x->columns, wide = 1024; /* columns of y that stay in the first cache */
    if (!accumulate) memset(y, 0, (size_t)N * sizeof *y);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t c = 0; c < N; c += wide)
        add_rows(y + c, x->data + c, x->rows, x->stride, LG_MIN(wide, N - c));
}

void LG_K(sum_rows)(lg_stream *s, const struct lg_sum_rows_args *a)
{
    const int64_t N = a->y.dim[0];
    struct lg_host_rows x = {a->x.data, lg_host_numel(&a->x) / N, N, N};
    LG_K(column_sums)(s, &x, a->y.data, a->accumulate);
}

void LG_K(combine)(lg_stream *s, const struct lg_combine_args *a)
{
    float *y = a->y.data;
    const float *x[LG_COMBINE_MAX];
    float c[LG_COMBINE_MAX];
    const int count = a->count;
    for (int j = 0; j < count; j++) x[j] = a->x[j].data, c[j] = (float)a->c[j];
    FLAT(lg_host_threads(s), i, r, lg_host_numel(&a->y), {
        const int64_t k = at + i;
        vf sum = c[0] * vf_load_n(x[0] + k, r);
        for (int j = 1; j < count; j++) sum += c[j] * vf_load_n(x[j] + k, r);
        vf_store_n(y + k, sum, r);
    });
}

void LG_K(ema)(lg_stream *s, const struct lg_ema_args *a)
{
    const float *ema = a->ema.data, *w = a->w.data;
    float *out = a->out.data;
    const float keep = (float)a->decay, take = (float)(1.0 - a->decay);
    FLAT(lg_host_threads(s), i, r, lg_host_numel(&a->ema), {
        const int64_t k = at + i;
        vf_store_n(out + k, keep * vf_load_n(ema + k, r) + take * vf_load_n(w + k, r), r);
    });
}
