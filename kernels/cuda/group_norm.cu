/* GroupNorm with affine and activation over (N, H, W, C), in three launches.
 *
 * 1. sums: a block takes PIXELS pixels of one sample with all their channels; a thread keeps one pack of
 *    channels and walks the pixels. It sums d = x - k and d^2 with k the group's first element: the
 *    variance does not suffer from a mean far from 0.
 * 2. statistics: one warp per (sample, group) adds the blocks' and channels' sums in double.
 * 3. result: one thread per pack.
 *
 * Scratch: per sample, block and channel two floats; then mean and rstd per sample and group. The
 * blocks of a sample depend on H W alone, so its bits do not depend on the batch. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, PIXELS = 256, WARPS = THREADS / WARP };

struct dims {
    int64_t N, HW, C, groups, blocks;
};
static dims dims_of(const struct lg_group_norm_forward_args *a)
{
    int64_t HW = a->x.dim[1] * a->x.dim[2];
    return {a->x.dim[0], HW, a->x.dim[3], a->groups, ceil_div(HW, PIXELS)};
}

/* grid (blocks, N, ceil(C / (32 packs))), 8 warps take every eighth pixel. */
template <typename T, int P> __global__ void sums_kernel(const T *x, float *sums, dims z)
{
    __shared__ float partial[WARPS][2][WARP * P];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t n = blockIdx.y, c = ((int64_t)blockIdx.z * WARP + lane) * P;
    const T *sample = x + n * z.HW * z.C;
    float k[P], v[P], sum[P] = {}, squares[P] = {};
    int64_t last = ((int64_t)blockIdx.x + 1) * PIXELS;
    if (last > z.HW) last = z.HW;
    if (c < z.C) {
#pragma unroll
        for (int e = 0; e < P; e++) {
            int64_t wide = z.C / z.groups;
            k[e] = to_float(sample[(c + e) / wide * wide]);
        }
        for (int64_t p = (int64_t)blockIdx.x * PIXELS + warp; p < last; p += WARPS) {
            load<T, P>(sample + p * z.C + c, v);
#pragma unroll
            for (int e = 0; e < P; e++) {
                float d = v[e] - k[e];
                sum[e] += d;
                squares[e] += d * d;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < P; e++) {
        partial[warp][0][lane * P + e] = sum[e];
        partial[warp][1][lane * P + e] = squares[e];
    }
    __syncthreads();
    if (warp > 0 || c >= z.C) return;
    float *out = sums + ((n * z.blocks + blockIdx.x) * z.C + c) * 2;
#pragma unroll
    for (int e = 0; e < P; e++) {
        for (int w = 1; w < WARPS; w++) {
            sum[e] += partial[w][0][lane * P + e];
            squares[e] += partial[w][1][lane * P + e];
        }
        out[2 * e] = sum[e];
        out[2 * e + 1] = squares[e];
    }
}

template <typename T>
__global__ void statistics_kernel(const T *x, const float *sums, float *statistics, dims z,
                                  float eps)
{
    int64_t n = blockIdx.y, g = blockIdx.x, wide = z.C / z.groups, items = z.blocks * wide;
    double sum = 0, squares = 0;
    for (int64_t i = threadIdx.x; i < items; i += WARP) {
        const float *at = sums + ((n * z.blocks + i / wide) * z.C + g * wide + i % wide) * 2;
        sum += at[0];
        squares += at[1];
    }
    double count = (double)(z.HW * wide);
    double mean = warp_sum(sum) / count, variance = warp_sum(squares) / count - mean * mean;
    if (threadIdx.x > 0) return;
    float *out = statistics + (n * z.groups + g) * 2;
    out[0] = (float)(mean + (double)to_float(x[n * z.HW * z.C + g * wide]));
    out[1] = (float)(1 / sqrt((variance > 0 ? variance : 0) + (double)eps));
}

template <typename T, int P>
__global__ void result_kernel(const T *x, const T *w, const T *b, const float *statistics, T *y,
                              dims z, lg_act act)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * P;
    if (i >= z.N * z.HW * z.C) return;
    int64_t c = i % z.C, n = i / (z.HW * z.C), wide = z.C / z.groups;
    float v[P], scale[P], shift[P];
    load<T, P>(x + i, v);
    load<T, P>(w + c, scale);
    load<T, P>(b + c, shift);
#pragma unroll
    for (int e = 0; e < P; e++) {
        const float *at = statistics + (n * z.groups + (c + e) / wide) * 2;
        v[e] = act_of(act, (v[e] - at[0]) * at[1] * scale[e] + shift[e]);
    }
    store<T, P>(y + i, v);
}

size_t cuda_group_norm_scratch(const struct lg_group_norm_forward_args *a)
{
    dims z = dims_of(a);
    return (size_t)(z.N * z.blocks * z.C + z.N * z.groups) * 2 * sizeof(float);
}
void cuda_group_norm_forward(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    dims z = dims_of(a);
    float *sums = (float *)s->scratch, *statistics = sums + z.N * z.blocks * z.C * 2;
    bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data) &&
                   lg_cuda_aligned_16(a->w.data) && lg_cuda_aligned_16(a->b.data);
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(a->x.dtype, T, {
        const T *x = (const T *)a->x.data;
        WITH_PACK(aligned && z.C % PACK<T> == 0, T, P, {
            dim3 grid((unsigned)z.blocks, (unsigned)z.N, (unsigned)ceil_div(z.C, WARP * P));
            sums_kernel<T, P><<<grid, THREADS, 0, stream>>>(x, sums, z);
            LG_CUDA_LAUNCHED();
            statistics_kernel<<<dim3((unsigned)z.groups, (unsigned)z.N), WARP, 0, stream>>>(
                x, sums, statistics, z, (float)a->eps);
            LG_CUDA_LAUNCHED();
            unsigned blocks = (unsigned)ceil_div(lg_numel(&a->x) / P, THREADS);
            result_kernel<T, P><<<blocks, THREADS, 0, stream>>>(x, (const T *)a->w.data,
                                                                (const T *)a->b.data, statistics,
                                                                (T *)a->y.data, z, a->act);
        })
    })
    LG_CUDA_LAUNCHED();
}
