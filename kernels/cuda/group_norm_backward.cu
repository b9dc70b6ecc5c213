/* The backward of GroupNorm with affine and activation over (N, H, W, C), in three launches and one for dw and db. With
 * n = (x - mean) rstd and d = dy act'(n w + b):
 *
 * 1. sums: a block takes 64 or 256 pixels of one sample. A thread keeps one pack of channels and walks the pixels; it sums d
 *    n and d.
 * 2. means: one block per (sample, group) adds the blocks' sums, then w times these in double, and divides.
 * 3. result: a thread keeps one pack of channels and works d out again: dx (+)= rstd (d w - mean(d w) - n mean(d w n)).
 *
 * dw and db are what 2 has added, of all samples in order. The blocks of a sample depend on H W alone, so its
 * bits do not depend on the batch.
 *
 * Bytes: x and dy twice, dx once; a sample's two maps of SD 2's first level are 5 MB, so that nothing stays in a
 * multiprocessor between 1 and 3. Together they are 3 % of a step of SDXL with adapters (docs/gpu-results.md). */
#include "kernels/cuda/forget.cuh"
#include "kernels/cuda/group_norm.cuh"

/* More would cost registers, and so warps: with 8 of them a multiprocessor waited for memory most of the time. */
enum { BLOCKS_AT_ONCE = 3, LOADS = 2 };

template <typename T> struct backward_args {
    const T *dy, *x, *w, *b;
    const double *mean_var;
    T *dx;
    float *sums;    /* (2, N blocks, C): of d n, of d */
    float *samples; /* (2, N, C): the same of whole samples */
    float *means;   /* (N, groups, 2): of d w, of d w n */
    double eps;
    lg_act act;
    bool accumulate;
    dims z;
    lay l;
};

/* act'(x); for 16-bit types SiLU's by the hardware's 2^x and 1/x, good to 2^-20. */
template <typename T, bool SILU> static __device__ __forceinline__ float slope(lg_act act, float x)
{
    if constexpr (!SILU) return act_slope<T>(act, x);
    const float sigmoid = sizeof(T) == 2 ? __fdividef(1, 1 + __expf(-x)) : 1 / (1 + expf(-x));
    return sigmoid * (1 + x * (1 - sigmoid));
}

/* What a thread knows of its channels, of which two neighbours are of one group where they come in packs. */
template <typename T, int P> struct channels {
    enum { PAIR = P > 1 ? 2 : 1, PAIRS = P / PAIR };
    float mean[PAIRS], rstd[PAIRS];
    pack<T, P> w, b;
    __device__ __forceinline__ channels(const backward_args<T> &a, int64_t n, int64_t c)
    {
        w = *reinterpret_cast<const pack<T, P> *>(a.w + c);
        b = *reinterpret_cast<const pack<T, P> *>(a.b + c);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const double *at = a.mean_var + group(a, n, c, i) * 2;
            mean[i] = (float)at[0];
            rstd[i] = 1 / sqrtf((float)(at[1] + a.eps));
        }
    }
    static __device__ __forceinline__ int64_t group(const backward_args<T> &a, int64_t n, int64_t c,
                                                    int pair)
    {
        return n * a.z.groups + ((int)c + pair * PAIR) / a.z.wide;
    }
    __device__ __forceinline__ float normed(float x, int e) const
    {
        return (x - mean[e / PAIR]) * rstd[e / PAIR];
    }
    /* Of what the activation takes. */
    __device__ __forceinline__ float affine(float normed, int e) const
    {
        return normed * to_float(w.v[e]) + to_float(b.v[e]);
    }
};

/* grid (blocks, N, ceil(C / (columns packs))) */
template <typename T, int P, bool SILU>
static __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    sums_kernel(const backward_args<T> a)
{
    __shared__ float partial[2 * P][THREADS + 1];
    const dims &z = a.z;
    const int row = threadIdx.x / a.l.columns, column = threadIdx.x % a.l.columns;
    const int64_t n = blockIdx.y, c = ((int64_t)blockIdx.z * a.l.columns + column) * P;
    const int64_t first = (int64_t)blockIdx.x * z.pixels, last = min(first + z.pixels, z.HW);
    float dn[P] = {}, d[P] = {};
    if (row < a.l.rows && c < z.C) {
        channels<T, P> k(a, n, c);
#pragma unroll 4
        for (int64_t p = first + row; p < last; p += a.l.rows) {
            float x[P], dy[P];
            load<T, P>(a.x + (n * z.HW + p) * z.C + c, x);
            load<T, P>(a.dy + (n * z.HW + p) * z.C + c, dy);
#pragma unroll
            for (int e = 0; e < P; e++) {
                const float normed = k.normed(x[e], e);
                const float g = dy[e] * slope<T, SILU>(a.act, k.affine(normed, e));
                dn[e] += g * normed;
                d[e] += g;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < P; e++) {
        partial[2 * e][threadIdx.x] = dn[e];
        partial[2 * e + 1][threadIdx.x] = d[e];
    }
    __syncthreads();
    const int64_t begin = (int64_t)blockIdx.z * a.l.columns * P, plane = z.N * z.blocks * z.C;
    float *out = a.sums + (n * z.blocks + blockIdx.x) * z.C + begin;
    const int here = (int)min((int64_t)a.l.columns * P, z.C - begin);
    for (int i = threadIdx.x; i < 2 * here; i += THREADS) {
        const int which = i / here, at = i % here;
        float total = 0;
        for (int r = 0; r < a.l.rows; r++)
            total += partial[at % P * 2 + which][r * a.l.columns + at / P];
        out[which * plane + at] = total;
    }
}

/* A warp adds a channel's blocks. grid (groups, N) */
template <typename T> static __global__ void means_kernel(const backward_args<T> a)
{
    enum { WARPS = ADDERS / WARP };
    __shared__ double partial[2][WARPS];
    const dims &z = a.z;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t n = blockIdx.y, plane = z.N * z.blocks * z.C;
    double dwn = 0, dw = 0;
    for (int i = warp; i < z.wide; i += WARPS) {
        const int64_t c = (int64_t)blockIdx.x * z.wide + i;
        float dn = 0, d = 0;
        for (int k = lane; k < z.blocks; k += WARP) {
            const float *at = a.sums + (n * z.blocks + k) * z.C + c;
            dn += at[0];
            d += at[plane];
        }
        dn = warp_sum(dn), d = warp_sum(d);
        dwn += to_float(a.w[c]) * (double)dn;
        dw += to_float(a.w[c]) * (double)d;
        if (lane > 0) continue;
        a.samples[n * z.C + c] = dn;
        a.samples[(z.N + n) * z.C + c] = d;
    }
    if (lane == 0) partial[0][warp] = dw, partial[1][warp] = dwn;
    __syncthreads();
    if (threadIdx.x > 1) return;
    double sum = 0;
    for (int w = 0; w < WARPS; w++) sum += partial[threadIdx.x][w];
    a.means[(n * z.groups + blockIdx.x) * 2 + threadIdx.x] = (float)(sum / (double)(z.HW * z.wide));
}

/* grid (pixels / (rows WALK), N, ceil(C / (columns packs))) */
template <typename T, int P, bool SILU>
static __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    result_kernel(const backward_args<T> a)
{
    const dims &z = a.z;
    const int row = threadIdx.x / a.l.columns, column = threadIdx.x % a.l.columns;
    const int64_t n = blockIdx.y, c = ((int64_t)blockIdx.z * a.l.columns + column) * P;
    if (row >= a.l.rows || c >= z.C) return;
    channels<T, P> k(a, n, c);
    float offset[k.PAIRS], of_n[k.PAIRS]; /* dx = d rstd w - n of_n - offset */
#pragma unroll
    for (int i = 0; i < k.PAIRS; i++) {
        const float *at = a.means + k.group(a, n, c, i) * 2;
        offset[i] = k.rstd[i] * at[0];
        of_n[i] = k.rstd[i] * at[1];
    }
    const int64_t first = (int64_t)blockIdx.x * a.l.rows * WALK + row, step = a.l.rows * z.C;
    const int64_t last = min(first + (int64_t)a.l.rows * WALK, z.HW);
    int64_t at = (n * z.HW + first) * z.C + c;
    for (int64_t p = first; p < last; p += a.l.rows * LOADS, at += LOADS * step) {
        pack<T, P> x[LOADS], dy[LOADS], old[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (p + i * a.l.rows >= last) break;
            x[i] = *reinterpret_cast<const pack<T, P> *>(a.x + at + i * step);
            dy[i] = *reinterpret_cast<const pack<T, P> *>(a.dy + at + i * step);
            if (a.accumulate) old[i] = *reinterpret_cast<const pack<T, P> *>(a.dx + at + i * step);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (p + i * a.l.rows >= last) break;
            float v[P];
            forget(k.w), forget(k.b), forget(x[i]), forget(dy[i]);
#pragma unroll
            for (int e = 0; e < P; e++) {
                const int pair = e / k.PAIR;
                const float normed = k.normed(to_float(x[i].v[e]), e);
                const float d = to_float(dy[i].v[e]) * slope<T, SILU>(a.act, k.affine(normed, e));
                v[e] = d * (k.rstd[pair] * to_float(k.w.v[e])) - normed * of_n[pair] - offset[pair];
                if (a.accumulate) v[e] += to_float(old[i].v[e]);
            }
            store<T, P>(a.dx + at + i * step, v);
        }
    }
}

size_t cuda_group_norm_backward_scratch(const struct lg_group_norm_backward_args *a)
{
    const dims z = dims_of(a->x, a->groups);
    return (size_t)(z.N * (z.groups + z.C + z.blocks * z.C)) * 2 * sizeof(float);
}

template <typename T, int P, bool SILU>
static void run(cudaStream_t stream, const backward_args<T> &a)
{
    const unsigned N = (unsigned)a.z.N;
    const unsigned across = (unsigned)ceil_div(a.z.C, (int64_t)a.l.columns * P);
    const dim3 blocks((unsigned)a.z.blocks, N, across);
    const dim3 steps((unsigned)ceil_div(a.z.HW, (int64_t)a.l.rows * WALK), N, across);
    sums_kernel<T, P, SILU><<<blocks, THREADS, 0, stream>>>(a);
    LG_CUDA_LAUNCHED();
    means_kernel<T><<<dim3((unsigned)a.z.groups, N), ADDERS, 0, stream>>>(a);
    LG_CUDA_LAUNCHED();
    result_kernel<T, P, SILU><<<steps, THREADS, 0, stream>>>(a);
    LG_CUDA_LAUNCHED();
}

void cuda_group_norm_backward(lg_stream *s, const struct lg_group_norm_backward_args *a)
{
    const dims z = dims_of(a->x, a->groups);
    cudaStream_t stream = lg_cuda_stream_of(s);
    float *means = (float *)s->scratch, *samples = means + z.N * z.groups * 2;
    bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->dy.data) &&
                   lg_cuda_aligned_16(a->dx.data) && lg_cuda_aligned_16(a->w.data) &&
                   lg_cuda_aligned_16(a->b.data);
    WITH_TYPE(a->x.dtype, T, {WITH_PACK(aligned && z.C % PACK<T> == 0 && z.wide % 2 == 0, T, P, {
                  backward_args<T> b = {};
                  b.dy = (const T *)a->dy.data;
                  b.x = (const T *)a->x.data;
                  b.w = (const T *)a->w.data;
                  b.b = (const T *)a->b.data;
                  b.mean_var = (const double *)a->mean_var.data;
                  b.dx = (T *)a->dx.data;
                  b.samples = samples;
                  b.sums = samples + z.N * z.C * 2;
                  b.means = means;
                  b.eps = a->eps;
                  b.act = a->act;
                  b.accumulate = a->accumulate;
                  b.z = z;
                  b.l = lay_of(z, P);
                  if (a->act == LG_ACT_SILU)
                      run<T, P, true>(stream, b);
                  else
                      run<T, P, false>(stream, b);
              })})
    if (!a->dw.data) return;
    const struct cuda_sums sums[] = {
        {samples, z.N, z.C, a->dw, a->accumulate_dw},
        {samples + z.N * z.C, z.N, z.C, a->db, a->accumulate_dw},
    };
    cuda_add_sums(stream, sums, 2);
}
