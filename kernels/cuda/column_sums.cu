/* Column sums of matrices (M, N): gradients of biases, also on the way through an activation.
 *
 * A block takes 32 packs of columns (16 bytes a pack) of a chunk of rows: 8 warps take every eighth row,
 * two rows at a time so that enough loads are under way, and their sums are added in order. The chunks'
 * sums (chunks, N) in fp32 are then added by blocks of 32 columns: 8 warps take every eighth chunk, or of many chunks 32 every
 * 32nd, and again in order. Chunks depend on M alone.
 *
 * Rows of x may lie in a wider buffer; those on the way through an activation do not.
 *
 * Bytes: M N of x; through an activation 3 M N (dx twice, pre). */
#include "kernels/cuda/common.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, AT_ONCE = 2 };

/* x *= act'(pre), where there is pre; partial (chunks, N) = sums over `rows` rows of x, which lie
 * `stride` elements apart, those of pre too. */
template <typename T> struct sums_args {
    T *x;
    const T *pre;
    float *partial;
    int64_t M, N, stride, rows;
};
template <typename T, int P, lg_act ACT>
static __global__ void __launch_bounds__(THREADS, ACT != LG_ACT_NONE ? 4 : 6)
    partial_sums_kernel(const sums_args<T> a)
{
    constexpr bool CHANGES = ACT != LG_ACT_NONE;
    __shared__ float sums[WARPS][WARP * P];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t c = ((int64_t)blockIdx.x * WARP + lane) * P, begin = blockIdx.y * a.rows;
    const int rows = (int)min(a.rows, a.M - begin); /* of the chunk */
    T *of_chunk = a.x + begin * a.stride + c;
    const T *pre_of_chunk = CHANGES ? a.pre + begin * a.stride + c : nullptr;
    float sum[P] = {};
    for (int first = warp; c < a.N && first < rows; first += WARPS * AT_ONCE) {
        pack<T, P> x[AT_ONCE], pre[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int m = first + i * WARPS;
            if (m < rows) x[i] = *(const pack<T, P> *)(of_chunk + m * a.stride);
            if (CHANGES && m < rows) pre[i] = *(const pack<T, P> *)(pre_of_chunk + m * a.stride);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int m = first + i * WARPS;
            if (m >= rows) break;
            float v[P];
#pragma unroll
            for (int e = 0; e < P; e++) {
                v[e] = to_float(x[i].v[e]);
                if (CHANGES) v[e] *= act_slope<T>(ACT, to_float(pre[i].v[e]));
                sum[e] += v[e];
            }
            if (CHANGES) store<T, P>(of_chunk + m * a.stride, v);
        }
    }
#pragma unroll
    for (int e = 0; e < P; e++) sums[warp][lane * P + e] = sum[e];
    __syncthreads();
    if (warp > 0 || c >= a.N) return;
#pragma unroll
    for (int e = 0; e < P; e++) {
        for (int w = 1; w < WARPS; w++) sum[e] += sums[w][lane * P + e];
        a.partial[blockIdx.y * a.N + c + e] = sum[e];
    }
}

/* Of many chunks by more warps, so that each still has all of its chunks' sums on the way at once. */
enum { ADDERS = 8, MANY_ADDERS = 32, CHUNKS_AT_ONCE = 16 };
template <typename W> struct added_columns {
    const float *partial;
    W *y;
    int64_t chunks, N, stride;
    int first_block;
    bool accumulate;
};
template <typename W> struct all_columns {
    added_columns<W> of[CUDA_SUMS_MAX];
    int count;
};
template <typename W, int WARPS>
static __global__ void __launch_bounds__(WARP *WARPS) add_sums_kernel(const all_columns<W> all)
{
    __shared__ float sums[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    added_columns<W> a = all.of[0];
#pragma unroll
    for (int k = 1; k < CUDA_SUMS_MAX; k++)
        if (k < all.count && (int)blockIdx.x >= all.of[k].first_block) a = all.of[k];
    const int64_t i = (int64_t)((int)blockIdx.x - a.first_block) * WARP + lane;
    float sum = 0;
#pragma unroll CHUNKS_AT_ONCE
    for (int64_t c = warp; i < a.N && c < a.chunks; c += WARPS) sum += a.partial[c * a.stride + i];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= a.N) return;
    for (int w = 1; w < WARPS; w++) sum += sums[w][lane];
    a.y[i] = from_float<W>(a.accumulate ? to_float(a.y[i]) + sum : sum);
}
void cuda_add_sums(cudaStream_t stream, const struct cuda_sums *sums, int count)
{
    int64_t most = 0;
    unsigned blocks = 0;
    LG_ASSERT(count > 0 && count <= CUDA_SUMS_MAX);
    for (int k = 1; k < count; k++)
        if (sums[k].y.dtype != sums[0].y.dtype) { /* each by itself */
            for (int i = 0; i < count; i++) cuda_add_sums(stream, &sums[i], 1);
            return;
        }
    WITH_TYPE(sums[0].y.dtype, W, {
        all_columns<W> all = {};
        all.count = count;
        for (int k = 0; k < count; k++) {
            const struct cuda_sums *s = &sums[k];
            const int64_t N = lg_numel(&s->y);
            all.of[k] = {s->partial, (W *)s->y.data, s->chunks,    N,
                         s->stride,  (int)blocks,    s->accumulate};
            blocks += (unsigned)ceil_div(N, WARP);
            most = LG_MAX(most, s->chunks);
        }
        if (most <= ADDERS * CHUNKS_AT_ONCE)
            add_sums_kernel<W, ADDERS><<<blocks, WARP * ADDERS, 0, stream>>>(all);
        else
            add_sums_kernel<W, MANY_ADDERS><<<blocks, WARP * MANY_ADDERS, 0, stream>>>(all);
    })
    LG_CUDA_LAUNCHED();
}
void cuda_add_partial_sums(cudaStream_t stream, const float *partial, int64_t chunks, lg_tensor y,
                           bool accumulate)
{
    const struct cuda_sums sums = {partial, chunks, lg_numel(&y), y, accumulate};
    cuda_add_sums(stream, &sums, 1);
}

/* Chunks of at least 64 rows, at most 128 chunks: by M alone. */
static int64_t chunk_rows(int64_t M)
{
    int64_t rows = ceil_div(M, 128);
    return rows < 64 ? 64 : rows;
}
size_t cuda_column_sums_scratch(int64_t M, int64_t N)
{
    return (size_t)(ceil_div(M, chunk_rows(M)) * N) * sizeof(float);
}
template <typename T, lg_act ACT>
static void partial_sums(cudaStream_t stream, const sums_args<T> &a)
{
    bool fits = a.N % PACK<T> == 0 && a.stride % PACK<T> == 0 && lg_cuda_aligned_16(a.x) &&
                lg_cuda_aligned_16(a.pre);
    WITH_PACK(fits, T, P, {
        dim3 grid((unsigned)ceil_div(a.N, WARP * P), (unsigned)ceil_div(a.M, a.rows));
        partial_sums_kernel<T, P, ACT><<<grid, THREADS, 0, stream>>>(a);
    })
    LG_CUDA_LAUNCHED();
}
void cuda_column_sums(cudaStream_t stream, lg_tensor x, int64_t stride, lg_tensor y,
                      bool accumulate, void *scratch)
{
    int64_t M = x.dim[0], N = x.dim[1], rows = chunk_rows(M);
    WITH_TYPE(x.dtype, T, {
        sums_args<T> s = {(T *)x.data, nullptr, (float *)scratch, M, N, stride, rows};
        partial_sums<T, LG_ACT_NONE>(stream, s);
    })
    cuda_add_partial_sums(stream, (const float *)scratch, ceil_div(M, rows), y, accumulate);
}
void cuda_act_backward_sums(cudaStream_t stream, const struct lg_linear_backward_data_args *a,
                            void *scratch)
{
    int64_t M = a->dx.dim[0], N = a->dx.dim[1], rows = chunk_rows(M);
    WITH_TYPE(a->dx.dtype, T, {
        sums_args<T> s = {(T *)a->dx.data, (const T *)a->pre.data, (float *)scratch, M, N, N, rows};
        if (a->act == LG_ACT_GELU_TANH)
            partial_sums<T, LG_ACT_GELU_TANH>(stream, s);
        else if (a->act == LG_ACT_SILU)
            partial_sums<T, LG_ACT_SILU>(stream, s);
        else if (a->act == LG_ACT_GELU_ERF)
            partial_sums<T, LG_ACT_GELU_ERF>(stream, s);
        else if (a->act == LG_ACT_QUICK_GELU)
            partial_sums<T, LG_ACT_QUICK_GELU>(stream, s);
        else
            partial_sums<T, LG_ACT_RELU>(stream, s);
    })
    cuda_add_partial_sums(stream, (const float *)scratch, ceil_div(M, rows), a->dbias,
                          a->accumulate_dbias);
}
size_t cuda_sum_rows_scratch(const struct lg_sum_rows_args *a)
{
    return cuda_column_sums_scratch(a->x.dim[0], a->x.dim[1]);
}
void cuda_sum_rows(lg_stream *s, const struct lg_sum_rows_args *a)
{
    cuda_column_sums(lg_cuda_stream_of(s), a->x, a->x.dim[1], a->y, a->accumulate, s->scratch);
}
