/* LayerNorm with affine. (norm.cu: with modulation.)
 *
 * Forward: a warp per row; mean, then the squares of distances from it, then the result. The row stays in registers, or
 * where it does not fit comes from L1 after the first time; the order of sums is the same.
 *
 * Backward: a warp per row for dx, as forward. For dw and db, where they are wanted, a block owns a chunk of rows and 32 packs
 * of columns, a warp every eighth row; the warps' sums are added in order, and the chunks' by cuda_add_sums. Chunks
 * depend on the number of rows alone. (Both in one pass over x and dy takes 214 registers at 1280 columns, hence 8 warps a
 * multiprocessor, which wait for memory: 88 us of 8192 such rows on an H200.) */
#include "kernels/cuda/forget.cuh"
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, CHUNKS_MAX = 256, CHUNK_MIN = 64 };

template <typename T, int N>
static __global__ void forward_kernel(const T *x, const T *w, const T *b, T *y, float *ret_mean,
                                      float *ret_rstd, float eps, int64_t rows, int64_t D)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    int first = threadIdx.x % WARP * N;
    float v[N], u[N], c[N], sum = 0, squares = 0;
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(x + row * D + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) sum += v[e];
    }
    float mean = warp_sum(sum) / (float)D;
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(x + row * D + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) squares += (v[e] - mean) * (v[e] - mean);
    }
    float rstd = 1 / sqrtf(warp_sum(squares) / (float)D + eps);
    for (int64_t i = first; i < D; i += WARP * N) {
        load<T, N>(x + row * D + i, v);
        load<T, N>(w + i, u);
        load<T, N>(b + i, c);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = (v[e] - mean) * rstd * u[e] + c[e];
        store<T, N>(y + row * D + i, v);
    }
    if (first > 0 || !ret_rstd) return;
    ret_mean[row] = mean;
    ret_rstd[row] = rstd;
}
/* The same of a row in registers. */
template <typename T, int PACKS>
static __global__ void forward_rows_kernel(const T *x, const T *w, const T *b, T *y,
                                           float *ret_mean, float *ret_rstd, float eps,
                                           int64_t rows, int64_t D)
{
    constexpr int N = ROW_PACK;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    const int first = threadIdx.x % WARP * N;
    pack<T, N> in[PACKS];
    float v[N], u[N], c[N], sum = 0, squares = 0;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        if (first + j * ROW_STEP < D)
            in[j] = *reinterpret_cast<const pack<T, N> *>(x + row * D + first + j * ROW_STEP);
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        if (first + j * ROW_STEP < D)
#pragma unroll
            for (int e = 0; e < N; e++) sum += to_float(in[j].v[e]);
    const float mean = warp_sum(sum) / (float)D;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        if (first + j * ROW_STEP < D)
#pragma unroll
            for (int e = 0; e < N; e++)
                squares += (to_float(in[j].v[e]) - mean) * (to_float(in[j].v[e]) - mean);
    const float rstd = 1 / sqrtf(warp_sum(squares) / (float)D + eps);
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int i = first + j * ROW_STEP;
        if (i >= D) break;
        load<T, N>(w + i, u);
        load<T, N>(b + i, c);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = (to_float(in[j].v[e]) - mean) * rstd * u[e] + c[e];
        store<T, N>(y + row * D + i, v);
    }
    if (first > 0 || !ret_rstd) return;
    ret_mean[row] = mean;
    ret_rstd[row] = rstd;
}
template <typename T>
static void forward_in_registers(cudaStream_t stream, const struct lg_layer_norm_forward_args *a)
{
    const int64_t rows = a->x.dim[0], D = a->x.dim[1];
    if constexpr (sizeof(T) == 2)
        WITH_PACKS(
            D, PACKS,
            (forward_rows_kernel<T, PACKS><<<(unsigned)ceil_div(rows, WARPS), THREADS, 0, stream>>>(
                (const T *)a->x.data, (const T *)a->w.data, (const T *)a->b.data, (T *)a->y.data,
                (float *)a->mean.data, (float *)a->rstd.data, (float)a->eps, rows, D)))
}
void cuda_layer_norm_forward(lg_stream *s, const struct lg_layer_norm_forward_args *a)
{
    int64_t rows = a->x.dim[0], D = a->x.dim[1];
    const void *p[] = {a->x.data, a->w.data, a->b.data, a->y.data};
    bool fits = rows_fit(a->x.dtype, D, 0, p, 4);
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(
        a->x.dtype, T,
        {WITH_PACK(
            fits, T, N,
            (forward_kernel<T, N><<<(unsigned)ceil_div(rows, WARPS), THREADS, 0, stream>>>(
                (const T *)a->x.data, (const T *)a->w.data, (const T *)a->b.data, (T *)a->y.data,
                (float *)a->mean.data, (float *)a->rstd.data, (float)a->eps, rows, D)))})
    LG_CUDA_LAUNCHED();
}

/* ---- backward ---- */

template <typename T> struct backward_args {
    const T *dy, *x, *w;
    const float *mean, *rstd;
    T *dx;
    float *partial; /* (2, chunks, D): for dw and db; or NULL */
    int64_t rows, D;
    bool accumulate;
};
struct range {
    int64_t first, last;
};
static __device__ __forceinline__ range chunk_rows(int64_t rows)
{
    const int64_t step = (rows + gridDim.x - 1) / gridDim.x, first = blockIdx.x * step;
    return {min(first, rows), min(first + step, rows)};
}

/* The warps' sums of N columns a lane, in order, to (D); column: the block's first. Call with all threads. */
template <int N>
static __device__ __forceinline__ void put_sums(const float (&sum)[N], float *to, int64_t column,
                                                int64_t D)
{
    __shared__ float shared[WARPS][WARP * N];
    __syncthreads(); /* those before have been read */
#pragma unroll
    for (int e = 0; e < N; e++) shared[threadIdx.x / WARP][threadIdx.x % WARP * N + e] = sum[e];
    __syncthreads();
    for (int c = threadIdx.x; c < WARP * N && column + c < D; c += THREADS) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += shared[w][c];
        to[column + c] = all;
    }
}

/* dx alone: a warp per row, in registers. */
template <typename T, int PACKS>
static __global__ void __launch_bounds__(THREADS, PACKS > 3 ? 3 : 4)
    dx_rows_kernel(const backward_args<T> a)
{
    constexpr int N = ROW_PACK;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP * N;
    if (row >= a.rows) return;
    const float mean = a.mean[row], r = a.rstd[row];
    pack<T, N> x[PACKS], dy[PACKS];
    float w[N], v[N], old[N], sum = 0, sum_n = 0;
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int i = j * ROW_STEP + lane;
        if (i >= a.D) continue;
        x[j] = *(const pack<T, N> *)(a.x + row * a.D + i);
        dy[j] = *(const pack<T, N> *)(a.dy + row * a.D + i);
    }
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int i = j * ROW_STEP + lane;
        if (i >= a.D) continue;
        load<T, N>(a.w + i, w);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float d = to_float(dy[j].v[e]) * w[e];
            sum += d;
            sum_n += d * ((to_float(x[j].v[e]) - mean) * r);
        }
        forget(x[j]), forget(dy[j]);
    }
    sum = warp_sum(sum) / (float)a.D;
    sum_n = warp_sum(sum_n) / (float)a.D;
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int i = j * ROW_STEP + lane;
        if (i >= a.D) continue;
        load<T, N>(a.w + i, w);
        if (a.accumulate) load<T, N>(a.dx + row * a.D + i, old);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float n = (to_float(x[j].v[e]) - mean) * r;
            v[e] = r * (to_float(dy[j].v[e]) * w[e] - sum - n * sum_n);
            if (a.accumulate) v[e] += old[e];
        }
        store<T, N>(a.dx + row * a.D + i, v);
    }
}

/* The same of any row, which it reads twice. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) dx_kernel(const backward_args<T> a)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    const int first = threadIdx.x % WARP * N;
    if (row >= a.rows) return;
    const float mean = a.mean[row], r = a.rstd[row];
    float x[N], d[N], w[N], old[N], sum = 0, sum_n = 0;
    for (int64_t i = first; i < a.D; i += WARP * N) {
        load<T, N>(a.x + row * a.D + i, x);
        load<T, N>(a.dy + row * a.D + i, d);
        load<T, N>(a.w + i, w);
#pragma unroll
        for (int e = 0; e < N; e++) {
            sum += d[e] * w[e];
            sum_n += d[e] * w[e] * ((x[e] - mean) * r);
        }
    }
    sum = warp_sum(sum) / (float)a.D;
    sum_n = warp_sum(sum_n) / (float)a.D;
    for (int64_t i = first; i < a.D; i += WARP * N) {
        load<T, N>(a.x + row * a.D + i, x);
        load<T, N>(a.dy + row * a.D + i, d);
        load<T, N>(a.w + i, w);
        if (a.accumulate) load<T, N>(a.dx + row * a.D + i, old);
#pragma unroll
        for (int e = 0; e < N; e++) {
            x[e] = r * (d[e] * w[e] - sum - (x[e] - mean) * r * sum_n);
            if (a.accumulate) x[e] += old[e];
        }
        store<T, N>(a.dx + row * a.D + i, x);
    }
}
/* A chunk's sums. grid (chunks, columns) */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) columns_kernel(const backward_args<T> a)
{
    const range chunk = chunk_rows(a.rows);
    const int64_t first = (int64_t)blockIdx.y * WARP * N, i = first + threadIdx.x % WARP * N;
    float dw[N] = {}, db[N] = {}, x[N], d[N];
#pragma unroll 4
    for (int64_t row = chunk.first + threadIdx.x / WARP; i < a.D && row < chunk.last;
         row += WARPS) {
        const float mean = a.mean[row], r = a.rstd[row];
        load<T, N>(a.x + row * a.D + i, x);
        load<T, N>(a.dy + row * a.D + i, d);
#pragma unroll
        for (int e = 0; e < N; e++) {
            dw[e] += d[e] * ((x[e] - mean) * r);
            db[e] += d[e];
        }
    }
    put_sums<N>(dw, a.partial + blockIdx.x * a.D, first, a.D);
    put_sums<N>(db, a.partial + ((int64_t)gridDim.x + blockIdx.x) * a.D, first, a.D);
}

static int64_t chunks_of(int64_t rows)
{
    return LG_MIN(ceil_div(rows, CHUNK_MIN), (int64_t)CHUNKS_MAX);
}
size_t cuda_layer_norm_backward_scratch(const struct lg_layer_norm_backward_args *a)
{
    return a->dw.rank ? (size_t)(2 * chunks_of(a->x.dim[0]) * a->x.dim[1]) * sizeof(float) : 0;
}

template <typename T> static void dx_in_registers(cudaStream_t stream, const backward_args<T> &a)
{
    const unsigned blocks = (unsigned)ceil_div(a.rows, WARPS);
    if constexpr (sizeof(T) == 2)
        WITH_PACKS(a.D, PACKS, (dx_rows_kernel<T, PACKS><<<blocks, THREADS, 0, stream>>>(a)))
}
void cuda_layer_norm_backward(lg_stream *s, const struct lg_layer_norm_backward_args *a)
{
    const int64_t rows = a->x.dim[0], D = a->x.dim[1], chunks = chunks_of(rows);
    const void *p[] = {a->x.data, a->dy.data, a->dx.data, a->w.data};
    const bool fits = rows_fit(a->x.dtype, D, 0, p, 4);
    cudaStream_t stream = lg_cuda_stream_of(s);
    float *partial = a->dw.data ? (float *)s->scratch : NULL;
    WITH_TYPE(a->x.dtype, T, {
        backward_args<T> b = {};
        b.dy = (const T *)a->dy.data;
        b.x = (const T *)a->x.data;
        b.w = (const T *)a->w.data;
        b.mean = (const float *)a->mean.data;
        b.rstd = (const float *)a->rstd.data;
        b.dx = (T *)a->dx.data;
        b.partial = partial;
        b.rows = rows;
        b.D = D;
        b.accumulate = a->accumulate;
        const bool in_registers = fits && a->x.dtype != LG_F32 && D <= ROW_MAX;
        WITH_PACK(fits, T, N, {
            const dim3 columns((unsigned)chunks, (unsigned)ceil_div(D, (int64_t)WARP * N));
            if (partial) columns_kernel<T, N><<<columns, THREADS, 0, stream>>>(b);
            if (!in_registers)
                dx_kernel<T, N><<<(unsigned)ceil_div(rows, WARPS), THREADS, 0, stream>>>(b);
        })
        if (in_registers) dx_in_registers<T>(stream, b);
    })
    LG_CUDA_LAUNCHED();
    if (!partial) return;
    const struct cuda_sums sums[] = {
        {partial, chunks, D, a->dw, a->accumulate_dw},
        {partial + chunks * D, chunks, D, a->db, a->accumulate_dw},
    };
    cuda_add_sums(stream, sums, 2);
}
