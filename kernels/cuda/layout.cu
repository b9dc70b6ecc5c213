/* Operations that move elements: patches, pictures, layouts, tables, positions, time. One thread writes
 * one element (upsampling: one pack; pixels_to_nhwc: one pixel); contiguous threads write contiguous
 * memory. */
#include "kernels/cuda/common.cuh"
#include <math.h>

enum { THREADS = 256 };
#define GRID(count) (unsigned)ceil_div(count, THREADS), THREADS, 0, lg_cuda_stream_of(s)
#define THIS_ELEMENT                                                                               \
    int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x;                                       \
    if (e >= count) return

/* ---- patches ---- */

struct image {
    int64_t B, C, H, W, p;
};
static image image_of(const lg_tensor *t, int patch)
{
    return {t->dim[0], t->dim[1], t->dim[2], t->dim[3], patch};
}
/* Where pixel e of a (B, C, H, W) image lies in its tokens (B, T, C p p): channels outermost within a
 * token (as the convolution's weights have them) or innermost (diffusers' output order). */
template <bool CHANNELS_FIRST> __device__ int64_t token_place(image z, int64_t e)
{
    int64_t w = e % z.W, h = e / z.W % z.H, c = e / (z.W * z.H) % z.C, b = e / (z.W * z.H * z.C);
    int64_t token = (b * (z.H / z.p) + h / z.p) * (z.W / z.p) + w / z.p, i = h % z.p, j = w % z.p;
    return token * z.C * z.p * z.p +
           (CHANNELS_FIRST ? (c * z.p + i) * z.p + j : (i * z.p + j) * z.C + c);
}
template <typename T> __global__ void patchify_kernel(const T *x, T *y, image z, int64_t count)
{
    THIS_ELEMENT;
    y[token_place<true>(z, e)] = x[e];
}
template <typename T, bool CHANNELS_FIRST>
__global__ void unpatchify_kernel(const T *x, T *y, image z, int64_t count)
{
    THIS_ELEMENT;
    y[e] = x[token_place<CHANNELS_FIRST>(z, e)];
}
template <typename T, bool CHANNELS_FIRST>
__global__ void unpatchify_back_kernel(const T *dy, T *dx, image z, int64_t count)
{
    THIS_ELEMENT;
    dx[token_place<CHANNELS_FIRST>(z, e)] = dy[e];
}
void cuda_patchify_forward(lg_stream *s, const struct lg_patchify_forward_args *a)
{
    int64_t count = lg_numel(&a->x);
    image z = image_of(&a->x, a->patch);
    WITH_TYPE(a->x.dtype, T,
              (patchify_kernel<<<GRID(count)>>>((const T *)a->x.data, (T *)a->y.data, z, count)))
    LG_CUDA_LAUNCHED();
}
void cuda_unpatchify_forward(lg_stream *s, const struct lg_unpatchify_forward_args *a)
{
    int64_t count = lg_numel(&a->y);
    image z = image_of(&a->y, a->patch);
    WITH_TYPE(a->x.dtype, T, {
        const T *x = (const T *)a->x.data;
        if (a->channels_first)
            unpatchify_kernel<T, true><<<GRID(count)>>>(x, (T *)a->y.data, z, count);
        else
            unpatchify_kernel<T, false><<<GRID(count)>>>(x, (T *)a->y.data, z, count);
    })
    LG_CUDA_LAUNCHED();
}
void cuda_unpatchify_backward(lg_stream *s, const struct lg_unpatchify_backward_args *a)
{
    int64_t count = lg_numel(&a->dy);
    image z = image_of(&a->dy, a->patch);
    WITH_TYPE(a->dy.dtype, T, {
        const T *dy = (const T *)a->dy.data;
        if (a->channels_first)
            unpatchify_back_kernel<T, true><<<GRID(count)>>>(dy, (T *)a->dx.data, z, count);
        else
            unpatchify_back_kernel<T, false><<<GRID(count)>>>(dy, (T *)a->dx.data, z, count);
    })
    LG_CUDA_LAUNCHED();
}

/* ---- layouts ---- */

/* Element e of (N, H, W, C) in (N, C, H, W). */
__device__ __forceinline__ int64_t planar(int64_t e, int64_t C, int64_t HW)
{
    int64_t c = e % C, p = e / C % HW, n = e / (C * HW);
    return (n * C + c) * HW + p;
}
/* A thread has a pixel; grid (pixels / THREADS, N). */
template <typename T> __global__ void pixels_kernel(const uint8_t *x, T *y, int64_t C, int64_t HW)
{
    int64_t p = (int64_t)blockIdx.x * THREADS + threadIdx.x, n = blockIdx.y;
    if (p >= HW) return;
    for (int64_t c = 0; c < C; c++)
        y[(n * HW + p) * C + c] = from_float<T>((float)x[(n * C + c) * HW + p] / 127.5f - 1);
}
template <typename T>
__global__ void to_pixels_kernel(const T *x, uint8_t *y, int64_t C, int64_t HW, int64_t count)
{
    THIS_ELEMENT; /* in double, so that ties fall as on the other backends */
    double level = ((double)to_float(x[e]) + 1) * 127.5;
    y[planar(e, C, HW)] = (uint8_t)rint(fmin(fmax(level, 0.0), 255.0));
}
template <typename T>
__global__ void to_nhwc_kernel(const T *x, T *y, int64_t C, int64_t HW, int64_t count)
{
    THIS_ELEMENT;
    y[e] = x[planar(e, C, HW)];
}
template <typename T>
__global__ void to_nchw_kernel(const T *x, T *y, int64_t C, int64_t HW, int64_t count)
{
    THIS_ELEMENT;
    y[planar(e, C, HW)] = x[e];
}
/* C, HW of an (N, C, H, W) tensor. */
#define PLANES(t) (t).dim[1], (t).dim[2] * (t).dim[3]
void cuda_pixels_to_nhwc(lg_stream *s, const struct lg_pixels_to_nhwc_args *a)
{
    int64_t HW = a->x.dim[2] * a->x.dim[3];
    dim3 grid((unsigned)ceil_div(HW, THREADS), (unsigned)a->x.dim[0]);
    WITH_TYPE(a->y.dtype, T,
              (pixels_kernel<<<grid, THREADS, 0, lg_cuda_stream_of(s)>>>(
                  (const uint8_t *)a->x.data, (T *)a->y.data, a->x.dim[1], HW)))
    LG_CUDA_LAUNCHED();
}
void cuda_nhwc_to_pixels(lg_stream *s, const struct lg_nhwc_to_pixels_args *a)
{
    int64_t count = lg_numel(&a->x);
    WITH_TYPE(a->x.dtype, T,
              (to_pixels_kernel<<<GRID(count)>>>((const T *)a->x.data, (uint8_t *)a->y.data,
                                                 PLANES(a->y), count)))
    LG_CUDA_LAUNCHED();
}
void cuda_nchw_to_nhwc(lg_stream *s, const struct lg_nchw_to_nhwc_args *a)
{
    int64_t count = lg_numel(&a->x);
    WITH_TYPE(a->x.dtype, T,
              (to_nhwc_kernel<<<GRID(count)>>>((const T *)a->x.data, (T *)a->y.data, PLANES(a->x),
                                               count)))
    LG_CUDA_LAUNCHED();
}
void cuda_nhwc_to_nchw(lg_stream *s, const struct lg_nhwc_to_nchw_args *a)
{
    int64_t count = lg_numel(&a->x);
    WITH_TYPE(a->x.dtype, T,
              (to_nchw_kernel<<<GRID(count)>>>((const T *)a->x.data, (T *)a->y.data, PLANES(a->y),
                                               count)))
    LG_CUDA_LAUNCHED();
}

template <typename T>
__global__ void posterior_split_kernel(const T *x, T *mean, T *logvar, int64_t C, int64_t HW,
                                       int64_t count)
{
    THIS_ELEMENT;
    int64_t p = e % HW, c = e / HW % C, n = e / (HW * C);
    const T *cell = x + (n * HW + p) * 2 * C;
    float v = to_float(cell[C + c]);
    mean[e] = cell[c];
    logvar[e] = from_float<T>(v < -30 ? -30 : v > 20 ? 20 : v); /* NaN stays */
}
void cuda_posterior_split(lg_stream *s, const struct lg_posterior_split_args *a)
{
    int64_t count = lg_numel(&a->mean);
    WITH_TYPE(
        a->x.dtype, T,
        (posterior_split_kernel<<<GRID(count)>>>((const T *)a->x.data, (T *)a->mean.data,
                                                 (T *)a->logvar.data, PLANES(a->mean), count)))
    LG_CUDA_LAUNCHED();
}

/* All counted in packs: groups of M rows of N, so far apart. */
struct distances {
    int64_t row, group;
};
template <typename P>
__global__ void copy_rows_kernel(const P *x, P *y, int64_t M, int64_t N, distances from,
                                 distances to, int64_t count)
{
    THIS_ELEMENT;
    const int64_t row = e / N, n = e - row * N, group = row / M, m = row - group * M;
    y[group * to.group + m * to.row + n] = x[group * from.group + m * from.row + n];
}
void cuda_copy_rows(lg_stream *s, const struct lg_copy_rows_args *a)
{
    const int64_t groups = a->groups > 1 ? a->groups : 1;
    const int64_t M = a->x.dim[0], row = a->x.dim[1], all = groups * M * row;
    const distances from = {lg_row_stride(&a->x, 1), groups > 1 ? a->x_apart : 0};
    const distances to = {lg_row_stride(&a->y, 1), groups > 1 ? a->y_apart : 0};
    bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data);
    WITH_TYPE(a->x.dtype, T, {
        bool fits = row % PACK<T> == 0 && from.row % PACK<T> == 0 && to.row % PACK<T> == 0 &&
                    from.group % PACK<T> == 0 && to.group % PACK<T> == 0;
        WITH_PACK(aligned && fits, T, N, {
            typedef pack<T, N> P;
            int64_t count = all / N;
            copy_rows_kernel<<<GRID(count)>>>((const P *)a->x.data, (P *)a->y.data, M, row / N,
                                              distances{from.row / N, from.group / N},
                                              distances{to.row / N, to.group / N}, count);
        })
    })
    LG_CUDA_LAUNCHED();
}

/* E features from p on, a pack or, where packs do not fit, one by one. */
template <typename T, int N, int E>
__device__ __forceinline__ void load_some(const T *p, float (&ret)[E])
{
#pragma unroll
    for (int e = 0; e < E; e += N) load<T, N>(p + e, *(float(*)[N]) & ret[e]);
}

/* A block has a token: its first n features are turned, a thread E of a vector at a time, the others copied, none where all is in
 * place. Vectors and samples read the same piece of the tables, which is then in the cache: x and y alone cost
 * bandwidth. */
template <typename T, int N>
__global__ void rope_kernel(const T *x, T *y, const float *cosine, const float *sine, int tokens,
                            int n, int all, int d, int64_t from, int64_t to, float sign)
{
    constexpr int E = N < 2 ? 2 : N, PAIRS = E / 2, TABLE = N < 2 ? 1 : PAIRS;
    const int token = blockIdx.x % tokens;
    x += blockIdx.x * from;
    y += blockIdx.x * to;
    cosine += (int64_t)token * (d / 2);
    sine += (int64_t)token * (d / 2);
    for (int i = threadIdx.x * E; i < (x == y ? n : all); i += THREADS * E) {
        float v[E], c[PAIRS], z[PAIRS], out[E];
        load_some<T, N, E>(x + i, v);
        if (i < n) {
            load_some<float, TABLE, PAIRS>(cosine + i % d / 2, c);
            load_some<float, TABLE, PAIRS>(sine + i % d / 2, z);
#pragma unroll
            for (int e = 0; e < E; e++) out[e] = v[e];
            turn_pack<E>(out, c, z, sign);
        }
#pragma unroll
        for (int e = 0; e < E; e += N)
            store<T, N>(y + i + e, *(float(*)[N])(i < n ? &out[e] : &v[e]));
    }
}
void cuda_rope(lg_stream *s, const struct lg_rope_args *a)
{
    const int64_t from = lg_row_stride(&a->x, 2), to = lg_row_stride(&a->y, 2), d = a->x.dim[3];
    const unsigned tokens = (unsigned)(a->x.dim[0] * a->x.dim[1]);
    const bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data) &&
                         lg_cuda_aligned_16(a->cos.data) && lg_cuda_aligned_16(a->sin.data);
    WITH_TYPE(a->x.dtype, T, {
        bool fits = d % PACK<T> == 0 && from % PACK<T> == 0 && to % PACK<T> == 0;
        WITH_PACK(aligned && fits, T, N, {
            rope_kernel<T, N><<<tokens, THREADS, 0, lg_cuda_stream_of(s)>>>(
                (const T *)a->x.data, (T *)a->y.data, (const float *)a->cos.data,
                (const float *)a->sin.data, (int)a->x.dim[1], (int)(a->turned * d),
                (int)(a->x.dim[2] * d), (int)d, from, to, a->inverse ? -1.0f : 1.0f);
        })
    })
    LG_CUDA_LAUNCHED();
}

/* A picture x (N, H, W, C), C counted in packs, and one of twice its sides, or a row or column less. */
struct doubled {
    int64_t H, W, C, high, wide;
};
static doubled doubled_of(const lg_tensor &x, const lg_tensor &y, int64_t pack)
{
    return {x.dim[1], x.dim[2], x.dim[3] / pack, y.dim[1], y.dim[2]};
}
template <typename P> __global__ void upsample_kernel(const P *x, P *y, doubled z, int64_t count)
{
    THIS_ELEMENT;
    int64_t c = e % z.C, w = e / z.C % z.wide, h = e / (z.C * z.wide) % z.high;
    int64_t n = e / (z.C * z.wide * z.high);
    y[e] = x[((n * z.H + h / 2) * z.W + w / 2) * z.C + c];
}
void cuda_upsample2x_forward(lg_stream *s, const struct lg_upsample2x_forward_args *a)
{
    int64_t C = a->x.dim[3], all = lg_numel(&a->y);
    bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data);
    WITH_TYPE(a->x.dtype, T, {WITH_PACK(aligned && C % PACK<T> == 0, T, N, {
                  typedef pack<T, N> P;
                  int64_t count = all / N;
                  upsample_kernel<<<GRID(count)>>>((const P *)a->x.data, (P *)a->y.data,
                                                   doubled_of(a->x, a->y, N), count);
              })})
    LG_CUDA_LAUNCHED();
}
template <typename T, int N>
__global__ void upsample_back_kernel(const T *dy, T *dx, doubled z, int64_t count, bool accumulate)
{
    THIS_ELEMENT;
    int64_t c = e % z.C, w = e / z.C % z.W, h = e / (z.C * z.W) % z.H, n = e / (z.C * z.W * z.H);
    float sum[N] = {}, v[N];
    if (accumulate) load<T, N>(dx + e * N, sum);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64_t row = 2 * h + i / 2, column = 2 * w + i % 2;
        if (row >= z.high || column >= z.wide) continue;
        load<T, N>(dy + (((n * z.high + row) * z.wide + column) * z.C + c) * N, v);
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] += v[k];
    }
    store<T, N>(dx + e * N, sum);
}
void cuda_upsample2x_backward(lg_stream *s, const struct lg_upsample2x_backward_args *a)
{
    int64_t C = a->dx.dim[3];
    bool aligned = lg_cuda_aligned_16(a->dx.data) && lg_cuda_aligned_16(a->dy.data);
    WITH_TYPE(a->dx.dtype, T, {WITH_PACK(aligned && C % PACK<T> == 0, T, N, {
                  int64_t count = lg_numel(&a->dx) / N;
                  upsample_back_kernel<T, N>
                      <<<GRID(count)>>>((const T *)a->dy.data, (T *)a->dx.data,
                                        doubled_of(a->dx, a->dy, N), count, a->accumulate);
              })})
    LG_CUDA_LAUNCHED();
}

/* ---- tables ---- */

template <typename T>
__global__ void lookup_kernel(const int32_t *ids, const T *table, T *y, int64_t V, int64_t D,
                              int64_t count)
{
    THIS_ELEMENT;
    int32_t id = ids[e / D];
    if (id < 0 || id >= V) __trap();
    y[e] = table[id * D + e % D];
}
void cuda_embedding_forward(lg_stream *s, const struct lg_embedding_forward_args *a)
{
    int64_t count = lg_numel(&a->y);
    WITH_TYPE(
        a->y.dtype, T,
        (lookup_kernel<<<GRID(count)>>>((const int32_t *)a->ids.data, (const T *)a->table.data,
                                        (T *)a->y.data, a->table.dim[0], a->table.dim[1], count)))
    LG_CUDA_LAUNCHED();
}

/* One block per row of the table and THREADS of its columns: it reads all ids, THREADS at a time, and adds
 * the rows that are its own in their order. */
template <typename T, typename W>
__global__ void lookup_back_kernel(const int32_t *ids, const T *dy, W *dtable, int64_t M, int64_t V,
                                   int64_t D, bool accumulate)
{
    __shared__ uint32_t own[THREADS / WARP]; /* a bit for each id */
    int64_t v = blockIdx.x, i = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    float sum = accumulate && i < D ? to_float(dtable[v * D + i]) : 0;
    for (int64_t m0 = 0; m0 < M; m0 += THREADS) {
        int64_t m = m0 + threadIdx.x, id = m < M ? ids[m] : 0;
        if (id < 0 || id >= V) __trap();
        uint32_t mine = __ballot_sync(0xffffffff, m < M && id == v);
        __syncthreads(); /* those before have been read */
        if (threadIdx.x % WARP == 0) own[threadIdx.x / WARP] = mine;
        if (!__syncthreads_or(mine != 0) || i >= D) continue;
        for (int w = 0; w < THREADS / WARP; w++)
            for (uint32_t left = own[w]; left; left &= left - 1)
                sum += to_float(dy[(m0 + w * WARP + __ffs((int)left) - 1) * D + i]);
    }
    if (i < D) dtable[v * D + i] = from_float<W>(sum);
}
void cuda_embedding_backward(lg_stream *s, const struct lg_embedding_backward_args *a)
{
    int64_t M = a->dy.dim[0], D = a->dy.dim[1], V = a->dtable.dim[0];
    cudaStream_t stream = lg_cuda_stream_of(s);
    dim3 blocks((unsigned)V, (unsigned)ceil_div(D, THREADS));
    WITH_TYPES(a->dy.dtype, a->dtable.dtype, T, W,
               (lookup_back_kernel<<<blocks, THREADS, 0, stream>>>(
                   (const int32_t *)a->ids.data, (const T *)a->dy.data, (W *)a->dtable.data, M, V,
                   D, a->accumulate)))
    LG_CUDA_LAUNCHED();
}

/* Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
 * section 2.1. The host computes from which distance on each bucket of a direction counts, with the
 * same libm as the other backends; the kernel compares whole numbers. */
enum { HALF_BUCKETS_MAX = 256 };
struct t5_buckets {
    int half;                       /* buckets of a direction */
    int32_t from[HALF_BUCKETS_MAX]; /* smallest distance in bucket i */
};
static t5_buckets t5_thresholds(int64_t buckets, int64_t max_distance, int64_t T)
{
    t5_buckets b;
    b.half = (int)(buckets / 2);
    int exact = b.half / 2, next = exact + 1;
    LG_ASSERT(b.half <= HALF_BUCKETS_MAX);
    for (int i = 0; i <= exact; i++) b.from[i] = i;
    for (int64_t distance = exact; distance < T && next < b.half; distance++) {
        double steps = log((double)distance / (double)exact) /
                       log((double)max_distance / (double)exact) * (double)(b.half - exact);
        int bucket = exact + (int)steps;
        if (bucket > b.half - 1) bucket = b.half - 1;
        while (next <= bucket) b.from[next++] = (int32_t)distance;
    }
    while (next < b.half) b.from[next++] = INT32_MAX; /* no distance of this T */
    return b;
}
template <typename T>
__global__ void t5_bias_kernel(const T *table, T *out, t5_buckets b, int64_t H, int64_t length,
                               int64_t count)
{
    THIS_ELEMENT;
    int64_t j = e % length, i = e / length % length, h = e / (length * length);
    int32_t distance = (int32_t)(j > i ? j - i : i - j);
    int bucket = 0;
    while (bucket + 1 < b.half && distance >= b.from[bucket + 1]) bucket++;
    out[e] = table[(bucket + (j > i ? b.half : 0)) * H + h];
}
void cuda_t5_bias_forward(lg_stream *s, const struct lg_t5_bias_forward_args *a)
{
    int64_t T_ = a->out.dim[1], count = lg_numel(&a->out);
    t5_buckets b = t5_thresholds(a->table.dim[0], a->max_distance, T_);
    WITH_TYPE(a->out.dtype, T,
              (t5_bias_kernel<<<GRID(count)>>>((const T *)a->table.data, (T *)a->out.data, b,
                                               a->table.dim[1], T_, count)))
    LG_CUDA_LAUNCHED();
}

/* In double: 1000 rad and more are beyond what fp32 can reduce to 1e-5. */
template <typename T, typename W>
__global__ void waves_kernel(const W *t, T *out, int64_t half, double freq_shift, int64_t count)
{
    THIS_ELEMENT;
    int64_t b = e / half, i = e % half;
    double f = exp(-9.210340371976182736 * (double)i / ((double)half - freq_shift)), sine, cosine;
    sincos((double)to_float(t[b]) * f, &sine, &cosine);
    out[b * 2 * half + i] = from_float<T>((float)cosine);
    out[b * 2 * half + half + i] = from_float<T>((float)sine);
}
void cuda_timestep_embedding_forward(lg_stream *s,
                                     const struct lg_timestep_embedding_forward_args *a)
{
    int64_t half = a->out.dim[1] / 2, count = a->out.dim[0] * half;
    WITH_TYPES(a->out.dtype, a->t.dtype, T, W,
               (waves_kernel<<<GRID(count)>>>((const W *)a->t.data, (T *)a->out.data, half,
                                              a->freq_shift, count)))
    LG_CUDA_LAUNCHED();
}
