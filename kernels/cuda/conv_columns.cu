/* What makes products of a convolution's backward: windows copied to rows, filters flipped (a product's
 * operand, or the filters of the forward that the backward by data is at stride 1), and sums in another type.
 *
 * Bytes: windows u v times those of the map; flipped filters and additions read and write each once. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/conv_columns.h"

enum { THREADS = 256, TILE = 32 };

/* A thread has a pack of channels at one position of one window; those behind the last position write zeros. */
template <typename T, int N>
static __global__ void windows_kernel(const cuda_windows z, int64_t first, int64_t count,
                                      int64_t stride, T *to)
{
    const int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x, packs = stride / N;
    if (e >= count * packs) return;
    const int64_t p = first + e / packs;
    const int k = (int)(e % packs) * N, c = k % (int)z.C, tap = k / (int)z.C;
    const int h = (int)(p / z.wide % z.high) * z.up + tap / z.v - z.top;
    const int w = (int)(p % z.wide) * z.up + tap % z.v - z.left;
    const int64_t n = p / ((int64_t)z.wide * z.high);
    const bool there = tap < z.u * z.v && h >= 0 && w >= 0 && h % z.down == 0 && w % z.down == 0 &&
                       h / z.down < z.rows && w / z.down < z.columns;
    pack<T, N> v = {};
    if (there)
        v = *reinterpret_cast<const pack<T, N> *>(
            (const T *)z.map + ((n * z.rows + h / z.down) * z.columns + w / z.down) * z.C + c);
    *reinterpret_cast<pack<T, N> *>(to + (p - first) * stride + k) = v;
}
void cuda_take_windows(cudaStream_t stream, const struct cuda_windows *z, int64_t first,
                       int64_t count, void *to)
{
    const int64_t stride = cuda_window_stride(z->type, z->C * z->u * z->v);
    WITH_TYPE(z->type, T, {WITH_PACK(lg_cuda_aligned_16(z->map) && z->C % PACK<T> == 0, T, N, {
                  const unsigned blocks = (unsigned)ceil_div(count * (stride / N), THREADS);
                  windows_kernel<T, N>
                      <<<blocks, THREADS, 0, stream>>>(*z, first, count, stride, (T *)to);
              })})
    LG_CUDA_LAUNCHED();
}

/* A block turns TILE x TILE elements (o, i) of one position through shared memory. grid: (tiles of O, of I, u v) */
template <typename T>
static __global__ void turn_kernel(const T *w, T *to, int O, int I, int64_t stride)
{
    __shared__ T tile[TILE][TILE + 2 / sizeof(T) + 1];
    const int taps = (int)gridDim.z, tap = (int)blockIdx.z;
    const int o0 = (int)blockIdx.x * TILE, i0 = (int)blockIdx.y * TILE, lane = threadIdx.x % TILE;
    for (int r = threadIdx.x / TILE; r < TILE; r += THREADS / TILE)
        if (o0 + r < O && i0 + lane < I)
            tile[r][lane] = w[((int64_t)(o0 + r) * taps + tap) * I + i0 + lane];
    __syncthreads();
    for (int r = threadIdx.x / TILE; r < TILE; r += THREADS / TILE)
        if (i0 + r < I && o0 + lane < O)
            to[(i0 + r) * stride + (int64_t)(taps - 1 - tap) * O + o0 + lane] = tile[lane][r];
}
/* What follows a row's elements. */
template <typename T> static __global__ void end_rows_kernel(T *to, int64_t used, int64_t stride)
{
    for (int64_t k = used + threadIdx.x; k < stride; k += WARP)
        to[blockIdx.x * stride + k] = from_float<T>(0);
}
void cuda_flip_filters(cudaStream_t stream, lg_tensor w, void *to)
{
    const int O = (int)w.dim[0], taps = (int)(w.dim[1] * w.dim[2]), I = (int)w.dim[3];
    const int64_t used = (int64_t)taps * O, stride = cuda_window_stride(w.dtype, used);
    const dim3 grid((unsigned)ceil_div(O, TILE), (unsigned)ceil_div(I, TILE), (unsigned)taps);
    WITH_TYPE(w.dtype, T, {
        turn_kernel<T><<<grid, THREADS, 0, stream>>>((const T *)w.data, (T *)to, O, I, stride);
        if (stride > used)
            end_rows_kernel<T><<<(unsigned)I, WARP, 0, stream>>>((T *)to, used, stride);
    })
    LG_CUDA_LAUNCHED();
}

/* N elements a thread: PACK of the narrower of both types. */
template <typename X, typename Y, int N>
static __global__ void add_kernel(const X *x, Y *y, int64_t packs, bool accumulate)
{
    constexpr int E = N < PACK<X> ? N : PACK<X>, F = N < PACK<Y> ? N : PACK<Y>;
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= packs * N) return;
    float v[N], old[N];
#pragma unroll
    for (int e = 0; e < N; e += E) load<X, E>(x + i + e, *(float(*)[E]) & v[e]);
    if (accumulate) {
#pragma unroll
        for (int e = 0; e < N; e += F) load<Y, F>(y + i + e, *(float(*)[F]) & old[e]);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] += old[e];
    }
#pragma unroll
    for (int e = 0; e < N; e += F) store<Y, F>(y + i + e, *(float(*)[F]) & v[e]);
}
void cuda_add_converted(cudaStream_t stream, lg_tensor x, lg_tensor y, bool accumulate)
{
    const int64_t count = lg_numel(&y);
    const bool fits = lg_cuda_aligned_16(x.data) && lg_cuda_aligned_16(y.data) && count % 8 == 0;
    WITH_TYPE(
        x.dtype, X, {WITH_TYPE(y.dtype, Y, {
            if (fits)
                add_kernel<X, Y, 8><<<(unsigned)ceil_div(count / 8, THREADS), THREADS, 0, stream>>>(
                    (const X *)x.data, (Y *)y.data, count / 8, accumulate);
            else
                add_kernel<X, Y, 1><<<(unsigned)ceil_div(count, THREADS), THREADS, 0, stream>>>(
                    (const X *)x.data, (Y *)y.data, count, accumulate);
        })})
    LG_CUDA_LAUNCHED();
}
