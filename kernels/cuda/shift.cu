/* A shift per sample, y = x + shift, and the sum over a sample's tokens that is its gradient.
 *
 * The sum: a block takes 32 packs of columns of a piece of one sample's tokens, its 8 warps every eighth of them, and
 * their sums are added in order; those of a sample's pieces, in fp32, by a second kernel, in the same way. So a sample's bits depend on its
 * tokens alone. Bytes: forward two maps, backward one. */
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS };

/* packs: of a sample. grid: (packs / THREADS, B) */
template <typename T, int N>
static __global__ void shift_kernel(const T *x, const T *shift, T *y, int64_t packs, int64_t D,
                                    int64_t stride)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    const int64_t at = (blockIdx.y * packs + i) * N;
    float u[N], v[N];
    load<T, N>(x + at, u);
    load<T, N>(shift + blockIdx.y * stride + i * N % D, v);
#pragma unroll
    for (int e = 0; e < N; e++) u[e] += v[e];
    store<T, N>(y + at, u);
}
void cuda_shift_forward(lg_stream *s, const struct lg_shift_forward_args *a)
{
    const int64_t B = a->x.dim[0], T_ = a->x.dim[1], D = a->x.dim[2];
    const int64_t stride = lg_row_stride(&a->shift, 1);
    const void *p[] = {a->x.data, a->shift.data, a->y.data};
    WITH_TYPE(a->x.dtype, T, {WITH_PACK(rows_fit(a->x.dtype, D, stride, p, 3), T, N, {
                  const int64_t packs = T_ * D / N;
                  const dim3 grid((unsigned)ceil_div(packs, THREADS), (unsigned)B);
                  shift_kernel<T, N><<<grid, THREADS, 0, lg_cuda_stream_of(s)>>>(
                      (const T *)a->x.data, (const T *)a->shift.data, (T *)a->y.data, packs, D,
                      stride);
              })})
    LG_CUDA_LAUNCHED();
}

/* sums (B, pieces, D). grid: (columns, pieces, B) */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    sums_kernel(const T *dy, float *sums, int64_t tokens, int64_t D)
{
    __shared__ float shared[WARPS][WARP * N];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = (int64_t)blockIdx.x * WARP * N, i = first + lane * N;
    const piece_tokens piece = tokens_of(tokens, blockIdx.y, gridDim.y);
    const T *sample = dy + blockIdx.z * tokens * D;
    float sum[N] = {}, v[N];
#pragma unroll 4
    for (int64_t t = piece.begin + warp; i < D && t < piece.end; t += WARPS) {
        load<T, N>(sample + t * D + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) sum[e] += v[e];
    }
#pragma unroll
    for (int e = 0; e < N; e++) shared[warp][lane * N + e] = sum[e];
    __syncthreads();
    float *to = sums + (blockIdx.z * (int64_t)gridDim.y + blockIdx.y) * D + first;
    for (int c = threadIdx.x; c < WARP * N && first + c < D; c += THREADS) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += shared[w][c];
        to[c] = all;
    }
}
/* grid: (columns, B) */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    pieces_kernel(const float *sums, T *to, int64_t pieces, int64_t D, int64_t stride)
{
    __shared__ float shared[WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t i = (int64_t)blockIdx.x * WARP + lane;
    float sum = 0;
#pragma unroll 8
    for (int64_t k = warp; i < D && k < pieces; k += WARPS)
        sum += sums[(blockIdx.y * pieces + k) * D + i];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= D) return;
    for (int w = 1; w < WARPS; w++) sum += shared[w][lane];
    to[blockIdx.y * stride + i] = from_float<T>(sum);
}
size_t cuda_shift_backward_scratch(const struct lg_shift_backward_args *a)
{
    return (size_t)(a->dy.dim[0] * sum_pieces(a->dy.dim[1]) * a->dy.dim[2]) * sizeof(float);
}
void cuda_shift_backward(lg_stream *s, const struct lg_shift_backward_args *a)
{
    const int64_t B = a->dy.dim[0], tokens = a->dy.dim[1], D = a->dy.dim[2];
    const int64_t pieces = sum_pieces(tokens);
    const void *p[] = {a->dy.data};
    cudaStream_t stream = lg_cuda_stream_of(s);
    float *sums = (float *)s->scratch;
    WITH_TYPE(a->dy.dtype, T, {
        WITH_PACK(rows_fit(a->dy.dtype, D, 0, p, 1), T, N, {
            const dim3 grid((unsigned)ceil_div(D, (int64_t)WARP * N), (unsigned)pieces,
                            (unsigned)B);
            sums_kernel<T, N><<<grid, THREADS, 0, stream>>>((const T *)a->dy.data, sums, tokens, D);
        })
        LG_CUDA_LAUNCHED();
        pieces_kernel<T><<<dim3((unsigned)ceil_div(D, WARP), (unsigned)B), THREADS, 0, stream>>>(
            sums, (T *)a->dshift.data, pieces, D, lg_row_stride(&a->dshift, 1));
    })
    LG_CUDA_LAUNCHED();
}
