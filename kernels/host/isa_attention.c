/* Attention, forward and backward, one head of one sample at a time.
 *
 * Design: a head's k and v are packed once (transposed where a product wants it, rows padded to
 * whole vectors), then blocks of ROWS queries go through it: scores, softmax, product with v, all
 * in the second cache. The backward makes the probabilities again from the log-sum-exp. Keys beyond
 * k_length are never read: their number enters the products as a size, so what lies there, even
 * NaN, is without effect.
 *
 * Invariants: the padding of packed rows is 0; the padding of a row of scores is far below any
 * score. Threads share heads, each with its own part of the scratch memory.
 */
#include "kernels/host/smallgemm.h"
#include "kernels/host/vmath.h"
#include "kernels/streams.h"
#include <omp.h>

enum { ROWS = 64 };
#define FAR_BELOW (-1e30f)
/* Floats between the buffers of a head, whose sizes are often multiples of 4096 bytes: without it
 * they would all compete for the same sets of the first cache, and loads wait for stores to "the
 * same" low address bits (1.6x slower at 64 tokens, d = 32). */
enum { APART = 5 * 16 };

static int64_t padded(int64_t n)
{
    return (n + LG_VW - 1) / LG_VW * LG_VW;
}

/* Cuts the thread's scratch. With base NULL it only counts. */
struct cutter {
    float *base;
    int64_t used;
};

static float *cut(struct cutter *c, int64_t floats)
{
    float *p = c->base ? c->base + c->used : NULL;
    c->used += ((floats + 15) & ~(int64_t)15) + APART;
    return p;
}

/* rows (n, d) at token stride -> (n, padded d) */
static void pack_rows(float *out, const float *in, int64_t stride, int64_t n, int64_t d)
{
    const int64_t w = padded(d);
    for (int64_t t = 0; t < n; t++)
        LG_VLOOP(i, r, d, { vf_store(out + t * w + i, vf_load_n(in + t * stride + i, r)); });
}

/* A 4 x 4 piece of the transposition below. */
LG_INLINE void transpose4(float *out, int64_t w, const float *in, int64_t stride)
{
    __m128 a = _mm_loadu_ps(in), b = _mm_loadu_ps(in + stride);
    __m128 c = _mm_loadu_ps(in + 2 * stride), d = _mm_loadu_ps(in + 3 * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + w, b);
    _mm_storeu_ps(out + 2 * w, c);
    _mm_storeu_ps(out + 3 * w, d);
}

/* rows (n, d) at token stride -> (d, padded n) */
static void pack_columns(float *out, const float *in, int64_t stride, int64_t n, int64_t d)
{
    const int64_t w = padded(n), n4 = n / 4 * 4, d4 = d / 4 * 4;
    for (int64_t t = 0; t < n4; t += 4)
        for (int64_t i = 0; i < d4; i += 4)
            transpose4(out + i * w + t, w, in + t * stride + i, stride);
    for (int64_t i = 0; i < d; i++)
        for (int64_t t = i < d4 ? n4 : 0; t < w; t++)
            out[i * w + t] = t < n ? in[t * stride + i] : 0.0f;
}

static void unpack_rows(float *out, int64_t stride, const float *in, int64_t n, int64_t d)
{
    const int64_t w = padded(d);
    for (int64_t t = 0; t < n; t++)
        LG_VLOOP(i, r, d, { vf_store_n(out + t * stride + i, vf_load(in + t * w + i), r); });
}

static int64_t keys_of(const lg_tensor *k_length, int64_t b, int64_t Tk)
{
    if (k_length->rank == 0 || !k_length->data) return Tk;
    int64_t n = ((const int32_t *)k_length->data)[b];
    LG_ASSERT(n >= 1 && n <= Tk);
    return n;
}

struct forward_scratch {
    float *k, *v, *scores, *out; // (d, Tk), (Tk, d), (ROWS, Tk), (ROWS, d), padded
};

static int64_t cut_forward(struct forward_scratch *f, float *base, int64_t Tk, int64_t d)
{
    struct cutter c = {.base = base};
    f->k = cut(&c, d * padded(Tk));
    f->v = cut(&c, Tk * padded(d));
    f->scores = cut(&c, ROWS * padded(Tk));
    f->out = cut(&c, ROWS * padded(d));
    return c.used;
}

size_t LG_K(attention_forward_scratch)(const struct lg_attention_forward_args *a, int threads)
{
    struct forward_scratch f;
    struct lg_attention_forward_args one;
    return lg_streams_join_forward(a, NULL, &one) +
           (size_t)threads * (size_t)cut_forward(&f, NULL, a->k.dim[1], a->q.dim[3]) *
               sizeof(float);
}

/* 0 in the lanes that the last vector of n scores fills, far below any score in the others. */
static vf padding_of(int64_t n)
{
    float lane[LG_VW];
    for (int i = 0; i < LG_VW; i++) lane[i] = padded(n) - LG_VW + i < n ? 0.0f : FAR_BELOW;
    return vf_load(lane);
}

/* scale score + bias of r keys; bias may be NULL. */
LG_INLINE vf scaled(const float *score, const float *bias, vf scale, int r)
{
    if (!bias) return vf_load(score) * scale;
    return vf_fma(vf_load(score), scale, vf_load_n(bias, r));
}

/* A row of w scores -> exp(scale score + bias - max), in place; the padding is -> 0. */
static float softmax_row(float *row, const float *bias, float scale, int64_t n, vf padding,
                         float *ret_max)
{
    const int64_t last = padded(n) - LG_VW;
    vf high = vf_set(2 * FAR_BELOW), sum = {0};
    for (int64_t i = 0; i < last; i += LG_VW) {
        vf x = scaled(row + i, bias ? bias + i : NULL, vf_set(scale), LG_VW);
        vf_store(row + i, x);
        high = LG_VMAX(high, x);
    }
    vf x = scaled(row + last, bias ? bias + last : NULL, vf_set(scale), (int)(n - last)) + padding;
    vf_store(row + last, x);
    const float max = vf_max_lane(LG_VMAX(high, x));
    for (int64_t i = 0; i <= last; i += LG_VW) {
        vf p = vf_exp(vf_load(row + i) - max);
        vf_store(row + i, p);
        sum += p;
    }
    *ret_max = max;
    return vf_sum(sum);
}

/* Scores of `rows` queries among n keys; bias may be NULL. seen: of how many keys the first query sees the scores, each
 * further one those of one key more (causal attention); n: all see all. */
struct scores {
    float *at;
    const float *bias;
    int64_t bias_row, n, rows, seen;
    float scale;
};

/* As below, of the first `seen` keys; the others get 0. */
static float softmax_seen(const struct scores *s, int64_t i, float *ret_max)
{
    const int64_t seen = LG_MIN(s->n, s->seen + i);
    float *row = s->at + i * padded(s->n);
    const float sum = softmax_row(row, s->bias ? s->bias + i * s->bias_row : NULL, s->scale, seen,
                                  padding_of(seen), ret_max);
    memset(row + padded(seen), 0, (size_t)(padded(s->n) - padded(seen)) * sizeof *row);
    return sum;
}

/* softmax without the division; sum[i] what to divide by, lse (rows) or NULL. */
static void softmax(const struct scores *s, float sum[ROWS], float *lse)
{
    const int64_t n = s->n, rows = s->rows;
    const vf padding = padding_of(n);
    float max[ROWS];
    for (int64_t i = 0; i < rows; i++) {
        if (s->seen < n)
            sum[i] = softmax_seen(s, i, &max[i]);
        else
            sum[i] = softmax_row(s->at + i * padded(n), s->bias ? s->bias + i * s->bias_row : NULL,
                                 s->scale, n, padding, &max[i]);
    }
    if (!lse) return;
    LG_VLOOP(i, r, rows,
             { vf_store_n(lse + i, vf_load_n(max + i, r) + vf_log(vf_load_n(sum + i, r)), r); });
}

static void forward_head(const struct lg_attention_forward_args *a, int64_t b, int64_t h,
                         float *scratch)
{
    const int64_t Tq = a->q.dim[1], H = a->q.dim[2], d = a->q.dim[3], Tk = a->k.dim[1];
    const int64_t n = keys_of(&a->k_length, b, Tk), wn = padded(n), wd = padded(d);
    struct forward_scratch f;
    cut_forward(&f, scratch, Tk, d);
    const int64_t q_stride = lg_row_stride(&a->q, 2), k_stride = lg_row_stride(&a->k, 2);
    const int64_t v_stride = lg_row_stride(&a->v, 2);
    const float *q = (const float *)a->q.data + b * Tq * q_stride + h * d;
    const float *k = (const float *)a->k.data + b * Tk * k_stride + h * d;
    const float *v = (const float *)a->v.data + b * Tk * v_stride + h * d;
    float *o = (float *)a->o.data + (b * Tq * H + h) * d;
    float *lse = a->lse.rank && a->lse.data ? (float *)a->lse.data + (b * H + h) * Tq : NULL;
    const float *bias =
        a->bias.rank && a->bias.data ? (const float *)a->bias.data + h * Tq * Tk : NULL;
    pack_columns(f.k, k, k_stride, n, d);
    pack_rows(f.v, v, v_stride, n, d);
    for (int64_t t = 0; t < Tq; t += ROWS) {
        const int64_t rows = LG_MIN((int64_t)ROWS, Tq - t);
        float sum[ROWS];
        small_gemm(&(struct small_gemm){rows, wn, d, q + t * q_stride, q_stride, 1, f.k, wn,
                                        f.scores, wn, false});
        softmax(&(struct scores){.at = f.scores,
                                 .bias = bias ? bias + t * Tk : NULL,
                                 .bias_row = Tk,
                                 .n = n,
                                 .rows = rows,
                                 .seen = a->causal ? t + 1 : n,
                                 .scale = (float)a->scale},
                sum, lse ? lse + t : NULL);
        small_gemm(&(struct small_gemm){rows, wd, n, f.scores, wn, 1, f.v, wd, f.out, wd, false});
        for (int64_t i = 0; i < rows; i++) {
            const float inverse = 1.0f / sum[i];
            LG_VLOOP(c, r, d, {
                vf_store_n(o + (t + i) * H * d + c, vf_load(f.out + i * wd + c) * inverse, r);
            });
        }
    }
}

void LG_K(attention_forward)(lg_stream *s, const struct lg_attention_forward_args *a)
{
    if (a->first_queries || a->first_keys)
        return lg_streams_forward(s, a, LG_K(copy_rows), LG_K(attention_forward));
    const int64_t H = a->q.dim[2], heads = a->q.dim[0] * H;
    struct forward_scratch f;
    const int64_t floats = cut_forward(&f, NULL, a->k.dim[1], a->q.dim[3]);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t i = 0; i < heads; i++)
        forward_head(a, i / H, i % H, (float *)s->scratch + omp_get_thread_num() * floats);
}

struct backward_scratch {
    float *k_columns, *v_columns;        // (d, Tk)
    float *k_rows, *dk, *dv;             // (Tk, d)
    float *q_rows, *dout_rows, *dq;      // (ROWS, d)
    float *probability, *dscore, *delta; // (ROWS, Tk), (ROWS, Tk), (ROWS)
};

static int64_t cut_backward(struct backward_scratch *f, float *base, int64_t Tk, int64_t d)
{
    struct cutter c = {.base = base};
    f->k_columns = cut(&c, d * padded(Tk));
    f->v_columns = cut(&c, d * padded(Tk));
    f->k_rows = cut(&c, Tk * padded(d));
    f->dk = cut(&c, Tk * padded(d));
    f->dv = cut(&c, Tk * padded(d));
    f->q_rows = cut(&c, ROWS * padded(d));
    f->dout_rows = cut(&c, ROWS * padded(d));
    f->dq = cut(&c, ROWS * padded(d));
    f->probability = cut(&c, ROWS * padded(Tk));
    f->dscore = cut(&c, ROWS * padded(Tk));
    f->delta = cut(&c, ROWS);
    return c.used;
}

size_t LG_K(attention_backward_scratch)(const struct lg_attention_backward_args *a, int threads)
{
    struct backward_scratch f;
    struct lg_attention_backward_args one;
    return lg_streams_join_backward(a, NULL, &one) +
           (size_t)threads * (size_t)cut_backward(&f, NULL, a->k.dim[1], a->q.dim[3]) *
               sizeof(float);
}

/* delta[i] = dout[i] . o[i], which is sum_j P[i][j] dP[i][j]. */
static void row_deltas(float *delta, const float *dout_rows, const float *o, int64_t o_stride,
                       int64_t rows, int64_t d)
{
    for (int64_t i = 0; i < rows; i++) {
        vf sum = {0};
        LG_VLOOP(c, r, d, {
            sum = vf_fma(vf_load(dout_rows + i * padded(d) + c), vf_load_n(o + i * o_stride + c, r),
                         sum);
        });
        delta[i] = vf_sum(sum);
    }
}

/* In: scores and dP. Out: P, and dS = scale P (dP - delta). */
static void score_gradients(const struct backward_scratch *f, const float *lse, float scale,
                            int64_t rows, int64_t wn)
{
    for (int64_t i = 0; i < rows; i++) {
        float *p = f->probability + i * wn, *ds = f->dscore + i * wn;
        const float low = lse[i], delta = f->delta[i];
        for (int64_t j = 0; j < wn; j += LG_VW) {
            vf x = vf_exp(vf_fma(vf_load(p + j), vf_set(scale), vf_set(-low)));
            vf_store(p + j, x);
            vf_store(ds + j, x * (vf_load(ds + j) - delta) * scale);
        }
    }
}

/* The five products of `rows` queries starting at q, dout; dk and dv are added to. */
static void backward_rows(const struct backward_scratch *f, const float *lse, float scale,
                          int64_t rows, int64_t n, int64_t d)
{
    const int64_t wn = padded(n), wd = padded(d);
    small_gemm(&(struct small_gemm){rows, wn, d, f->q_rows, wd, 1, f->k_columns, wn, f->probability,
                                    wn, false});
    small_gemm(&(struct small_gemm){rows, wn, d, f->dout_rows, wd, 1, f->v_columns, wn, f->dscore,
                                    wn, false});
    score_gradients(f, lse, scale, rows, wn);
    small_gemm(&(struct small_gemm){n, wd, rows, f->probability, 1, wn, f->dout_rows, wd, f->dv, wd,
                                    true});
    small_gemm(&(struct small_gemm){n, wd, rows, f->dscore, 1, wn, f->q_rows, wd, f->dk, wd, true});
    small_gemm(
        &(struct small_gemm){rows, wd, n, f->dscore, wn, 1, f->k_rows, wd, f->dq, wd, false});
}

static void backward_head(const struct lg_attention_backward_args *a, int64_t b, int64_t h,
                          float *scratch)
{
    const int64_t Tq = a->q.dim[1], H = a->q.dim[2], d = a->q.dim[3], Tk = a->k.dim[1];
    const int64_t n = keys_of(&a->k_length, b, Tk), wd = padded(d);
    struct backward_scratch f;
    cut_backward(&f, scratch, Tk, d);
    const int64_t q_stride = lg_row_stride(&a->q, 2), dq_stride = lg_row_stride(&a->dq, 2);
    const int64_t k_stride = lg_row_stride(&a->k, 2), dk_stride = lg_row_stride(&a->dk, 2);
    const int64_t v_stride = lg_row_stride(&a->v, 2), dv_stride = lg_row_stride(&a->dv, 2);
    const int64_t o_at = (b * Tq * H + h) * d;
    const float *q = (const float *)a->q.data + b * Tq * q_stride + h * d;
    const float *k = (const float *)a->k.data + b * Tk * k_stride + h * d;
    const float *v = (const float *)a->v.data + b * Tk * v_stride + h * d;
    const float *o = (const float *)a->o.data + o_at;
    const float *dout = (const float *)a->dout.data + o_at;
    const float *lse = (const float *)a->lse.data + (b * H + h) * Tq;
    float *dq = (float *)a->dq.data + b * Tq * dq_stride + h * d;
    float *dk = (float *)a->dk.data + b * Tk * dk_stride + h * d;
    float *dv = (float *)a->dv.data + b * Tk * dv_stride + h * d;
    pack_columns(f.k_columns, k, k_stride, n, d);
    pack_columns(f.v_columns, v, v_stride, n, d);
    pack_rows(f.k_rows, k, k_stride, n, d);
    memset(f.dk, 0, (size_t)(n * wd) * sizeof(float));
    memset(f.dv, 0, (size_t)(n * wd) * sizeof(float));
    for (int64_t t = 0; t < Tq; t += ROWS) {
        const int64_t rows = LG_MIN((int64_t)ROWS, Tq - t);
        pack_rows(f.q_rows, q + t * q_stride, q_stride, rows, d);
        pack_rows(f.dout_rows, dout + t * H * d, H * d, rows, d);
        row_deltas(f.delta, f.dout_rows, o + t * H * d, H * d, rows, d);
        backward_rows(&f, lse + t, (float)a->scale, rows, n, d);
        unpack_rows(dq + t * dq_stride, dq_stride, f.dq, rows, d);
    }
    unpack_rows(dk, dk_stride, f.dk, n, d);
    unpack_rows(dv, dv_stride, f.dv, n, d);
    for (int64_t t = n; t < Tk; t++) {
        memset(dk + t * dk_stride, 0, (size_t)d * sizeof(float));
        memset(dv + t * dv_stride, 0, (size_t)d * sizeof(float));
    }
}

/* dbias (+)= column sums of dq, 0, column sums of dv. */
static void bias_gradient(lg_stream *s, const struct lg_attention_backward_args *a)
{
    const int64_t B = a->q.dim[0], width = a->q.dim[2] * a->q.dim[3];
    struct lg_host_rows q = {a->dq.data, B * a->q.dim[1], width, lg_row_stride(&a->dq, 2)};
    struct lg_host_rows v = {a->dv.data, B * a->k.dim[1], width, lg_row_stride(&a->dv, 2)};
    float *dbias = a->dbias.data;
    LG_K(column_sums)(s, &q, dbias, a->accumulate_dbias);
    if (!a->accumulate_dbias) memset(dbias + width, 0, (size_t)width * sizeof *dbias);
    LG_K(column_sums)(s, &v, dbias + 2 * width, a->accumulate_dbias);
}

void LG_K(attention_backward)(lg_stream *s, const struct lg_attention_backward_args *a)
{
    if (a->first_queries || a->first_keys)
        return lg_streams_backward(s, a, LG_K(copy_rows), LG_K(attention_backward));
    const int64_t H = a->q.dim[2], heads = a->q.dim[0] * H;
    struct backward_scratch f;
    const int64_t floats = cut_backward(&f, NULL, a->k.dim[1], a->q.dim[3]);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t i = 0; i < heads; i++)
        backward_head(a, i / H, i % H, (float *)s->scratch + omp_get_thread_num() * floats);
    if (a->dbias.rank && a->dbias.data) bias_gradient(s, a);
}
