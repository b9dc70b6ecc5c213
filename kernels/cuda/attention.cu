/* Softmax attention without the tensor cores: heads up to HEAD_MAX, any lengths, key lengths, bias; fp32
 * arithmetic. For 16-bit types on 9.0 short_attention.cu and short_attention_forward.cu take 256 tokens, long_attention.cu and
 * long_attention_forward.cu 512 and more, cross_attention.cu the backward to at most 128 keys, and cudnn_attention.c what else it can,
 * on other GPUs mma_attention.cu heads up to 128 without a bias; tiled_attention.cu the rest of the forward on 16 bytes,
 * wide_attention.c wider heads; what is left, causal attention, and fp32, comes here. Two streams are taken as they lie by
 * long_attention.cu and long_attention_forward.cu, where they end on 16 rows; for all others their tokens are brought together.
 *
 * Forward (Dao, "FlashAttention-2", 2023, algorithm 1): a block of 256 threads owns 32 queries of one
 * head and walks the keys in tiles of 32: S = scale Q K^T (2x2 values a thread), running row maximum
 * and sum, O = diag(e^(m - m')) O + P V (8 threads a row, each 4 columns in 32).
 * Backward: P = e^(S - lse) again, dS = P (dout V - delta); one kernel owns 32 queries and walks the keys, first for delta, then
 * for dQ, the other owns 32 keys and walks the queries (dK, dV): nothing is added across blocks, so there are no atomics and
 * the bits are always the same. delta = sum of P dout V / sum of P, of the very values that it is taken from, so that dS adds
 * up to zero over the keys: an error of delta = dout o would be one of all keys of a query, which adds up in dQ with what the keys
 * have in common.
 *
 * Shared memory: tiles of 32 rows, in floats; a row takes `row` floats, an odd number of 4s, so that
 * 16-byte reads of 8 neighbouring rows touch all banks once. Forward 3 tiles: 51 KB at d = 128;
 * backward 4 tiles: 133 KB at d = 256, where a block may not have so much 2 that are loaded in turns.
 * Scratch: backward, (B, H, Tq) floats: delta. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cross_attention.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/long_attention.h"
#include "kernels/cuda/mma_attention.h"
#include "kernels/cuda/short_attention.h"
#include "kernels/cuda/tiled_attention.h"
#include "kernels/cuda/wide_attention.h"
#include "kernels/streams.h"

enum { THREADS = 256, TILE = 32, GROUP = THREADS / TILE, HEAD_MAX = 128, HEAD_MAX_BACKWARD = 256 };
enum { SCORES = TILE * (TILE + 1) };

/* One head of one sample of q, k, v ...: rows `stride` elements apart. */
template <typename T> struct head {
    T *p;
    int64_t stride;
};
struct shape {
    int B, Tq, Tk, H, d;
    int row; /* floats of a tile's row */
    float scale;
};
static shape shape_of(const lg_tensor *q, const lg_tensor *k, double scale)
{
    int d = (int)q->dim[3], row = (d + 3) / 4 * 4;
    if (row / 4 % 2 == 0) row += 4;
    return {(int)q->dim[0], (int)q->dim[1], (int)k->dim[1], (int)q->dim[2], d, row, (float)scale};
}
template <typename T>
static __device__ head<T> head_of(T *base, int64_t stride, int64_t tokens, const shape &z)
{
    return {base + blockIdx.z * tokens * stride + (int64_t)blockIdx.y * z.d, stride};
}
static __device__ int keys_of(const int32_t *k_length, const shape &z)
{
    int n = k_length ? k_length[blockIdx.z] : z.Tk;
    if (n < 1 || n > z.Tk) __trap();
    return n;
}

/* Rows [first, first + TILE) of a head, as floats; 0 beyond `end` and beyond d. */
template <typename T>
static __device__ void load_tile(float *tile, head<const T> h, int first, int end, const shape &z)
{
    constexpr int N = PACK<T>;
    bool fits = z.d % N == 0 && h.stride % N == 0 && (uintptr_t)h.p % 16 == 0;
    if (fits) {
        int packs = z.d / N;
        for (int i = threadIdx.x; i < TILE * packs; i += THREADS) {
            int r = i / packs, c = i % packs * N;
            float v[N] = {};
            if (first + r < end) load<T, N>(h.p + (first + r) * h.stride + c, v);
#pragma unroll
            for (int e = 0; e < N; e++) tile[r * z.row + c + e] = v[e];
        }
    } else {
        int width = (z.d + 3) / 4 * 4;
        for (int i = threadIdx.x; i < TILE * width; i += THREADS) {
            int r = i / width, c = i % width;
            bool there = first + r < end && c < z.d;
            tile[r * z.row + c] = there ? to_float(h.p[(first + r) * h.stride + c]) : 0;
        }
    }
}

/* Row r of a tile times row c of another. */
static __device__ __forceinline__ float4 row4(const float *tile, int r, int c, const shape &z)
{
    return *reinterpret_cast<const float4 *>(tile + r * z.row + c);
}
static __device__ __forceinline__ float dot4(float4 a, float4 b, float sum)
{
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
/* ret[i][j] = row (i0 + 16 i) of a times row (j0 + 16 j) of b. */
static __device__ __forceinline__ void dot2x2(const float *a, const float *b, int i0, int j0,
                                              const shape &z, float (&ret)[2][2])
{
    ret[0][0] = ret[0][1] = ret[1][0] = ret[1][1] = 0;
    for (int c = 0; c < z.d; c += 4) {
        float4 a0 = row4(a, i0, c, z), a1 = row4(a, i0 + 16, c, z);
        float4 b0 = row4(b, j0, c, z), b1 = row4(b, j0 + 16, c, z);
        ret[0][0] = dot4(a0, b0, ret[0][0]);
        ret[0][1] = dot4(a0, b1, ret[0][1]);
        ret[1][0] = dot4(a1, b0, ret[1][0]);
        ret[1][1] = dot4(a1, b1, ret[1][1]);
    }
}
/* Columns 4 lane + 32 i of a row: sum = fade sum + the tile's rows, row i weighted by weights[i step]. Rows of the tile are
 * added up apart first: a sum over thousands of tokens, one by one, loses what it is made of. */
template <int D>
static __device__ __forceinline__ void add_rows(float4 (&sum)[D / 32], float fade,
                                                const float *weights, int step, const float *tile,
                                                int lane, const shape &z)
{
    float4 part[D / 32] = {};
    for (int r = 0; r < TILE; r++) {
        float weight = weights[r * step];
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            int c = 4 * lane + 32 * i;
            if (c >= z.d) break;
            float4 v = row4(tile, r, c, z);
            part[i].x = fmaf(weight, v.x, part[i].x);
            part[i].y = fmaf(weight, v.y, part[i].y);
            part[i].z = fmaf(weight, v.z, part[i].z);
            part[i].w = fmaf(weight, v.w, part[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        sum[i].x = fmaf(sum[i].x, fade, part[i].x);
        sum[i].y = fmaf(sum[i].y, fade, part[i].y);
        sum[i].z = fmaf(sum[i].z, fade, part[i].z);
        sum[i].w = fmaf(sum[i].w, fade, part[i].w);
    }
}
template <typename T, int D>
static __device__ void store_row(T *row, const float4 (&sum)[D / 32], float factor, int lane,
                                 const shape &z)
{
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        int c = 4 * lane + 32 * i;
        const float v[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (c + e < z.d) row[c + e] = from_float<T>(v[e] * factor);
    }
}
/* Maximum and sum over the GROUP threads of a row. */
static __device__ __forceinline__ float group_max(float x)
{
    for (int o = GROUP / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, o));
    return x;
}
static __device__ __forceinline__ float group_sum(float x)
{
    for (int o = GROUP / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}

/* ---- forward ---- */

template <typename T> struct forward_args {
    const T *q, *k, *v, *bias;
    const int32_t *k_length;
    int64_t q_stride, k_stride, v_stride;
    T *o;
    float *lse;
    shape z;
    bool causal; /* query t sees keys 0 .. t */
};
template <typename T, int D>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const forward_args<T> a)
{
    extern __shared__ float4 shared4[];
    const shape z = a.z;
    float *q = (float *)shared4, *k = q + TILE * z.row, *v = k + TILE * z.row,
          *s = v + TILE * z.row;
    int q0 = blockIdx.x * TILE, keys = keys_of(a.k_length, z);
    int i0 = threadIdx.x / 16, j0 = threadIdx.x % 16;
    int r = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    if (a.causal) keys = min(keys, q0 + TILE); /* the first tile has a key for every query */
    load_tile<T>(q, head_of(a.q, a.q_stride, z.Tq, z), q0, z.Tq, z);
    float4 o[D / 32] = {};
    float top = -INFINITY, total = 0;
    for (int k0 = 0; k0 < keys; k0 += TILE) {
        __syncthreads();
        load_tile<T>(k, head_of(a.k, a.k_stride, z.Tk, z), k0, keys, z);
        load_tile<T>(v, head_of(a.v, a.v_stride, z.Tk, z), k0, keys, z);
        __syncthreads();
        float score[2][2];
        dot2x2(q, k, i0, j0, z, score);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int qi = i0 + 16 * (i / 2), kj = j0 + 16 * (i % 2);
            float x = score[i / 2][i % 2] * z.scale;
            if (a.bias && q0 + qi < z.Tq && k0 + kj < keys)
                x += to_float(a.bias[((int64_t)blockIdx.y * z.Tq + q0 + qi) * z.Tk + k0 + kj]);
            bool seen = k0 + kj < keys && !(a.causal && k0 + kj > q0 + qi);
            s[qi * (TILE + 1) + kj] = seen ? x : -INFINITY;
        }
        __syncthreads();
        float *row = s + r * (TILE + 1), high = -INFINITY, sum = 0;
        for (int j = lane; j < TILE; j += GROUP) high = fmaxf(high, row[j]);
        float new_top = fmaxf(top, group_max(high)), fade = expf(top - new_top);
        for (int j = lane; j < TILE; j += GROUP) {
            row[j] = expf(row[j] - new_top);
            sum += row[j];
        }
        total = total * fade + group_sum(sum);
        top = new_top;
        __syncwarp(); /* the row's threads lie in one warp */
        add_rows<D>(o, fade, row, 1, v, lane, z);
    }
    if (q0 + r >= z.Tq) return;
    int64_t out = ((int64_t)blockIdx.z * z.Tq + q0 + r) * z.H + blockIdx.y;
    store_row<T, D>(a.o + out * z.d, o, 1 / total, lane, z);
    if (a.lse && lane == 0)
        a.lse[((int64_t)blockIdx.z * z.H + blockIdx.y) * z.Tq + q0 + r] = top + logf(total);
}

static size_t shared_bytes(const shape &z, int tiles, int score_tiles)
{
    return ((size_t)tiles * TILE * z.row + (size_t)score_tiles * SCORES) * sizeof(float);
}
/* Lets the kernel have that much shared memory. */
template <typename K> static void allow_shared(K *kernel, size_t bytes)
{
    LG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
static dim3 grid_of(int tokens, const shape &z)
{
    return dim3((unsigned)ceil_div(tokens, TILE), (unsigned)z.H, (unsigned)z.B);
}

template <typename T, int D>
static void launch_forward(cudaStream_t stream, const forward_args<T> &f)
{
    size_t bytes = shared_bytes(f.z, 3, 1);
    allow_shared(forward_kernel<T, D>, bytes);
    forward_kernel<T, D><<<grid_of(f.z.Tq, f.z), THREADS, bytes, stream>>>(f);
    LG_CUDA_LAUNCHED();
}
template <typename T> static void forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    forward_args<T> f = {(const T *)a->q.data,
                         (const T *)a->k.data,
                         (const T *)a->v.data,
                         (const T *)a->bias.data,
                         (const int32_t *)a->k_length.data,
                         lg_row_stride(&a->q, 2),
                         lg_row_stride(&a->k, 2),
                         lg_row_stride(&a->v, 2),
                         (T *)a->o.data,
                         (float *)a->lse.data,
                         shape_of(&a->q, &a->k, a->scale),
                         a->causal};
    cudaStream_t stream = lg_cuda_stream_of(s);
    LG_ASSERT(f.z.d <= HEAD_MAX);
    if (f.z.d <= 32) return launch_forward<T, 32>(stream, f);
    if (f.z.d <= 64) return launch_forward<T, 64>(stream, f);
    launch_forward<T, HEAD_MAX>(stream, f);
}
/* Of two streams, and only long attention takes those; else they are joined. */
static bool joins(const lg_cuda_device *d, const struct lg_attention_forward_args *a)
{
    return (a->first_queries || a->first_keys) && !cuda_long_attention_forward_takes(d, a);
}
size_t cuda_attention_forward_scratch(lg_cuda_device *d, const struct lg_attention_forward_args *a)
{
    if (joins(d, a)) {
        struct lg_attention_forward_args one;
        const size_t bytes = lg_streams_join_forward(a, nullptr, &one);
        return bytes + cuda_attention_forward_scratch(d, &one);
    }
    if (cuda_short_attention_forward_takes(d, a) || cuda_long_attention_forward_takes(d, a) ||
        cuda_mma_attention_forward_takes(d, a))
        return 0;
    if (a->q.dim[3] > HEAD_MAX) return cuda_wide_attention_scratch(d, a);
    return lg_cudnn_attention_forward_scratch(d, a);
}
void cuda_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    const lg_cuda_device *d = lg_cuda_device_of(s);
    if (joins(d, a)) return lg_streams_forward(s, a, cuda_copy_rows, cuda_attention_forward);
    const bool is_short = cuda_short_attention_forward_takes(d, a);
    if (!is_short && cuda_long_attention_forward_takes(d, a))
        return cuda_long_attention_forward(s, a);
    if (!is_short && cuda_mma_attention_forward_takes(d, a))
        return cuda_mma_attention_forward(s, a);
    if (a->o_low.data) /* which the others do not know */
        LG_CUDA(
            cudaMemsetAsync(a->o_low.data, 0, lg_tensor_bytes(&a->o_low), lg_cuda_stream_of(s)));
    if (is_short) return cuda_short_attention_forward(s, a);
    if (a->q.dim[3] > HEAD_MAX) return cuda_wide_attention(s, a);
    if (lg_cudnn_attention_forward(s, a)) return;
    if (cuda_tiled_attention_takes(a)) return cuda_tiled_attention(s, a);
    WITH_TYPE(a->q.dtype, T, forward<T>(s, a))
}

/* One block per row, grid (Tq, samples): maximum, sum, weights; keys beyond the length get 0. lse has a
 * sample's rows every lse_stride. */
template <typename T>
static __global__ void softmax_kernel(const float *scores, const T *bias, const int32_t *k_length,
                                      T *weights, float *lse, int64_t lse_stride, int Tk,
                                      float scale, bool causal)
{
    int64_t first = (int64_t)blockIdx.y * gridDim.x * Tk, row = blockIdx.x;
    int keys = k_length ? k_length[blockIdx.y] : Tk;
    scores += first;
    weights += first;
    if (keys < 1 || keys > Tk) __trap();
    if (causal) keys = min(keys, (int)row + 1);
    __shared__ float partial[THREADS / WARP];
    float top = -INFINITY, sum = 0;
#define SCORE(j) (scores[row * Tk + (j)] * scale + (bias ? to_float(bias[row * Tk + (j)]) : 0))
    for (int j = threadIdx.x; j < keys; j += THREADS) top = fmaxf(top, SCORE(j));
    for (int o = WARP / 2; o > 0; o /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, o));
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / WARP; w++) top = fmaxf(top, partial[w]);
    for (int j = threadIdx.x; j < keys; j += THREADS) sum += expf(SCORE(j) - top);
    sum = block_sum<THREADS>(sum);
    for (int j = threadIdx.x; j < Tk; j += THREADS)
        weights[row * Tk + j] = from_float<T>(j < keys ? expf(SCORE(j) - top) / sum : 0);
#undef SCORE
    if (lse && threadIdx.x == 0) lse[blockIdx.y * lse_stride + row] = top + logf(sum);
}
void cuda_softmax_rows(cudaStream_t stream, const struct lg_attention_forward_args *a, int64_t b,
                       int64_t samples, int64_t h, const float *scores, void *weights)
{
    int64_t Tq = a->q.dim[1], Tk = a->k.dim[1], H = a->q.dim[2];
    const int32_t *length = a->k_length.data ? (const int32_t *)a->k_length.data + b : nullptr;
    float *lse = a->lse.data ? (float *)a->lse.data + (b * H + h) * Tq : nullptr;
    WITH_TYPE(a->q.dtype, T, {
        const T *bias = a->bias.data ? (const T *)a->bias.data + h * Tq * Tk : nullptr;
        softmax_kernel<T><<<dim3((unsigned)Tq, (unsigned)samples), THREADS, 0, stream>>>(
            scores, bias, length, (T *)weights, lse, H * Tq, (int)Tk, (float)a->scale, a->causal);
    })
    LG_CUDA_LAUNCHED();
}

/* ---- backward ---- */

/* delta (B, H, Tq) = sum over d of dout (o + o_low): a warp per (b, t, h). o_low: or NULL. */
template <typename T>
static __global__ void delta_kernel(const T *dout, const T *o, const T *o_low, float *delta,
                                    int64_t rows, shape z)
{
    int64_t row = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    float sum = 0;
    for (int i = threadIdx.x % WARP; i < z.d; i += WARP) {
        int64_t at = row * z.d + i;
        sum += to_float(dout[at]) * (to_float(o[at]) + (o_low ? to_float(o_low[at]) : 0));
    }
    sum = warp_sum(sum);
    int64_t h = row % z.H, t = row / z.H % z.Tq, b = row / z.H / z.Tq;
    if (threadIdx.x % WARP == 0) delta[(b * z.H + h) * z.Tq + t] = sum;
}

template <typename T> struct backward_args {
    const T *q, *k, *v, *dout;
    const int32_t *k_length;
    const float *lse;
    float *delta; // (B, H, Tq), as lse
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    T *dq, *dk, *dv;
    shape z;
};
template <typename T>
static __device__ __forceinline__ int64_t rows_before(const backward_args<T> &a)
{
    return ((int64_t)blockIdx.z * a.z.H + blockIdx.y) * a.z.Tq;
}
/* Products of the tile of queries q0 and keys k0, four values a thread: rows threadIdx.x / 16 and 16 later, columns threadIdx.x % 16
 * and 16 later. score: q k, dp: dout v. */
struct products {
    float score[2][2], dp[2][2];
};
static __device__ __forceinline__ products products_of(const float *q, const float *k,
                                                       const float *v, const float *dout,
                                                       const shape &z)
{
    products x;
    dot2x2(q, k, threadIdx.x / 16, threadIdx.x % 16, z, x.score);
    dot2x2(dout, v, threadIdx.x / 16, threadIdx.x % 16, z, x.dp);
    return x;
}
/* The same where shared memory has room for two tiles, which the four take in turns; dout and v are what is
 * there at the end. */
template <typename T>
static __device__ products products_in_turns(const backward_args<T> &a, float *of_query,
                                             float *of_key, int q0, int k0, int keys)
{
    const shape &z = a.z;
    products x;
    __syncthreads();
    load_tile<T>(of_query, head_of(a.q, a.q_stride, z.Tq, z), q0, z.Tq, z);
    load_tile<T>(of_key, head_of(a.k, a.k_stride, z.Tk, z), k0, keys, z);
    __syncthreads();
    dot2x2(of_query, of_key, threadIdx.x / 16, threadIdx.x % 16, z, x.score);
    __syncthreads();
    load_tile<T>(of_query, head_of(a.dout, (int64_t)z.H * z.d, z.Tq, z), q0, z.Tq, z);
    load_tile<T>(of_key, head_of(a.v, a.v_stride, z.Tk, z), k0, keys, z);
    __syncthreads();
    dot2x2(of_query, of_key, threadIdx.x / 16, threadIdx.x % 16, z, x.dp);
    return x;
}
/* p of query `query` and key `key`, 0 where there is none. */
template <typename T>
static __device__ __forceinline__ float weight_of(const backward_args<T> &a, float score, int query,
                                                  int key, int keys)
{
    bool there = query < a.z.Tq && key < keys;
    return there ? expf(score * a.z.scale - a.lse[rows_before(a) + query]) : 0;
}
/* p (or NULL) and ds = scale p (dp - delta) of the tile. */
template <typename T>
static __device__ __forceinline__ void gradients(const backward_args<T> &a, const products &x,
                                                 int q0, int k0, int keys, float *p, float *ds)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int qi = (int)threadIdx.x / 16 + 16 * (i / 2), kj = (int)threadIdx.x % 16 + 16 * (i % 2);
        float w = weight_of(a, x.score[i / 2][i % 2], q0 + qi, k0 + kj, keys);
        float delta = q0 + qi < a.z.Tq ? a.delta[rows_before(a) + q0 + qi] : 0;
        if (p) p[qi * (TILE + 1) + kj] = w;
        ds[qi * (TILE + 1) + kj] = w * (x.dp[i / 2][i % 2] - delta) * a.z.scale;
    }
}

/* A sum and what its roundings have lost (Kahan). */
struct long_sum {
    float sum, lost;
    __device__ __forceinline__ void add(float x)
    {
        float more = x - lost, was = sum;
        sum = was + more;
        lost = (sum - was) - more;
    }
};
/* A thread's share of the sums over keys of p and p dp, for its two queries. */
struct mean_sums {
    long_sum p[2], p_dp[2];
};
template <typename T>
static __device__ __forceinline__ void add_to_means(mean_sums &m, const backward_args<T> &a,
                                                    const products &x, int q0, int k0, int keys)
{
    int i0 = q0 + (int)threadIdx.x / 16, j0 = k0 + (int)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float w0 = weight_of(a, x.score[i][0], i0 + 16 * i, j0, keys);
        float w1 = weight_of(a, x.score[i][1], i0 + 16 * i, j0 + 16, keys);
        m.p[i].add(w0 + w1);
        m.p_dp[i].add(fmaf(w0, x.dp[i][0], w1 * x.dp[i][1]));
    }
}
/* delta of the tile's queries; the block's threads see it after __syncthreads. */
template <typename T>
static __device__ __forceinline__ void store_means(const backward_args<T> &a, const mean_sums &m,
                                                   int q0)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float p = m.p[i].sum, p_dp = m.p_dp[i].sum;
        for (int o = 8; o > 0; o /= 2) { /* the 16 threads of a query */
            p += __shfl_xor_sync(0xffffffff, p, o);
            p_dp += __shfl_xor_sync(0xffffffff, p_dp, o);
        }
        int query = q0 + (int)threadIdx.x / 16 + 16 * i;
        if (threadIdx.x % 16 == 0 && query < a.z.Tq) a.delta[rows_before(a) + query] = p_dp / p;
    }
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS) keys_kernel(const backward_args<T> a)
{
    extern __shared__ float4 shared4[];
    const shape z = a.z;
    float *k = (float *)shared4, *v = k + TILE * z.row, *q = v + TILE * z.row;
    float *dout = q + TILE * z.row, *p = dout + TILE * z.row, *ds = p + SCORES;
    int k0 = blockIdx.x * TILE, keys = keys_of(a.k_length, z);
    int r = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    load_tile<T>(k, head_of(a.k, a.k_stride, z.Tk, z), k0, keys, z);
    load_tile<T>(v, head_of(a.v, a.v_stride, z.Tk, z), k0, keys, z);
    float4 dk[D / 32] = {}, dv[D / 32] = {};
    for (int q0 = 0; k0 < keys && q0 < z.Tq; q0 += TILE) {
        __syncthreads();
        load_tile<T>(q, head_of(a.q, a.q_stride, z.Tq, z), q0, z.Tq, z);
        load_tile<T>(dout, head_of(a.dout, (int64_t)z.H * z.d, z.Tq, z), q0, z.Tq, z);
        __syncthreads();
        gradients(a, products_of(q, k, v, dout, z), q0, k0, keys, p, ds);
        __syncthreads();
        add_rows<D>(dv, 1, p + r, TILE + 1, dout, lane, z);
        add_rows<D>(dk, 1, ds + r, TILE + 1, q, lane, z);
    }
    if (k0 + r >= z.Tk) return;
    int64_t row = (int64_t)blockIdx.z * z.Tk + k0 + r, column = (int64_t)blockIdx.y * z.d;
    store_row<T, D>(a.dk + row * a.dk_stride + column, dk, 1, lane, z);
    store_row<T, D>(a.dv + row * a.dv_stride + column, dv, 1, lane, z);
}

/* keys_kernel and queries_kernel with two tiles of shared memory, the same sums in the same order. */
template <typename T, int D>
static __global__ void __launch_bounds__(THREADS) keys_in_turns_kernel(const backward_args<T> a)
{
    extern __shared__ float4 shared4[];
    const shape z = a.z;
    float *of_query = (float *)shared4, *of_key = of_query + TILE * z.row;
    float *p = of_key + TILE * z.row, *ds = p + SCORES;
    int k0 = blockIdx.x * TILE, keys = keys_of(a.k_length, z);
    int r = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    float4 dk[D / 32] = {}, dv[D / 32] = {};
    for (int q0 = 0; k0 < keys && q0 < z.Tq; q0 += TILE) {
        gradients(a, products_in_turns(a, of_query, of_key, q0, k0, keys), q0, k0, keys, p, ds);
        __syncthreads();
        add_rows<D>(dv, 1, p + r, TILE + 1, of_query, lane, z);
        __syncthreads();
        load_tile<T>(of_query, head_of(a.q, a.q_stride, z.Tq, z), q0, z.Tq, z);
        __syncthreads();
        add_rows<D>(dk, 1, ds + r, TILE + 1, of_query, lane, z);
    }
    if (k0 + r >= z.Tk) return;
    int64_t row = (int64_t)blockIdx.z * z.Tk + k0 + r, column = (int64_t)blockIdx.y * z.d;
    store_row<T, D>(a.dk + row * a.dk_stride + column, dk, 1, lane, z);
    store_row<T, D>(a.dv + row * a.dv_stride + column, dv, 1, lane, z);
}
template <typename T, int D>
static __global__ void __launch_bounds__(THREADS) queries_in_turns_kernel(const backward_args<T> a)
{
    extern __shared__ float4 shared4[];
    const shape z = a.z;
    float *of_query = (float *)shared4, *of_key = of_query + TILE * z.row;
    float *ds = of_key + TILE * z.row;
    int q0 = blockIdx.x * TILE, keys = keys_of(a.k_length, z);
    int r = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    float4 dq[D / 32] = {};
    mean_sums means = {};
    for (int k0 = 0; k0 < keys; k0 += TILE)
        add_to_means(means, a, products_in_turns(a, of_query, of_key, q0, k0, keys), q0, k0, keys);
    store_means(a, means, q0);
    for (int k0 = 0; k0 < keys; k0 += TILE) {
        const products x = products_in_turns(a, of_query, of_key, q0, k0, keys);
        gradients(a, x, q0, k0, keys, (float *)nullptr, ds);
        __syncthreads();
        load_tile<T>(of_key, head_of(a.k, a.k_stride, z.Tk, z), k0, keys, z);
        __syncthreads();
        add_rows<D>(dq, 1, ds + r * (TILE + 1), 1, of_key, lane, z);
    }
    if (q0 + r >= z.Tq) return;
    int64_t row = ((int64_t)blockIdx.z * z.Tq + q0 + r) * a.dq_stride + (int64_t)blockIdx.y * z.d;
    store_row<T, D>(a.dq + row, dq, 1, lane, z);
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS) queries_kernel(const backward_args<T> a)
{
    extern __shared__ float4 shared4[];
    const shape z = a.z;
    float *k = (float *)shared4, *v = k + TILE * z.row, *q = v + TILE * z.row;
    float *dout = q + TILE * z.row, *ds = dout + TILE * z.row;
    int q0 = blockIdx.x * TILE, keys = keys_of(a.k_length, z);
    int r = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    load_tile<T>(q, head_of(a.q, a.q_stride, z.Tq, z), q0, z.Tq, z);
    load_tile<T>(dout, head_of(a.dout, (int64_t)z.H * z.d, z.Tq, z), q0, z.Tq, z);
    float4 dq[D / 32] = {};
    mean_sums means = {};
#pragma unroll 1
    for (int walk = 0; walk < 2; walk++) {
#pragma unroll 1
        for (int k0 = 0; k0 < keys; k0 += TILE) {
            __syncthreads();
            load_tile<T>(k, head_of(a.k, a.k_stride, z.Tk, z), k0, keys, z);
            load_tile<T>(v, head_of(a.v, a.v_stride, z.Tk, z), k0, keys, z);
            __syncthreads();
            const products x = products_of(q, k, v, dout, z);
            if (walk == 0) {
                add_to_means(means, a, x, q0, k0, keys);
                continue;
            }
            gradients(a, x, q0, k0, keys, (float *)nullptr, ds);
            __syncthreads();
            add_rows<D>(dq, 1, ds + r * (TILE + 1), 1, k, lane, z);
        }
        if (walk == 0) store_means(a, means, q0);
    }
    if (q0 + r >= z.Tq) return;
    int64_t row = ((int64_t)blockIdx.z * z.Tq + q0 + r) * a.dq_stride + (int64_t)blockIdx.y * z.d;
    store_row<T, D>(a.dq + row, dq, 1, lane, z);
}

template <typename T, int D>
static void launch_backward(cudaStream_t stream, const backward_args<T> &b)
{
    size_t keys_bytes = shared_bytes(b.z, 4, 2), queries_bytes = shared_bytes(b.z, 4, 1);
    allow_shared(keys_kernel<T, D>, keys_bytes);
    allow_shared(queries_kernel<T, D>, queries_bytes);
    queries_kernel<T, D>
        <<<grid_of(b.z.Tq, b.z), THREADS, queries_bytes, stream>>>(b); /* makes delta */
    LG_CUDA_LAUNCHED();
    keys_kernel<T, D><<<grid_of(b.z.Tk, b.z), THREADS, keys_bytes, stream>>>(b);
    LG_CUDA_LAUNCHED();
}
template <typename T, int D>
static void launch_backward_in_turns(cudaStream_t stream, const backward_args<T> &b)
{
    size_t keys_bytes = shared_bytes(b.z, 2, 2), queries_bytes = shared_bytes(b.z, 2, 1);
    allow_shared(keys_in_turns_kernel<T, D>, keys_bytes);
    allow_shared(queries_in_turns_kernel<T, D>, queries_bytes);
    queries_in_turns_kernel<T, D>
        <<<grid_of(b.z.Tq, b.z), THREADS, queries_bytes, stream>>>(b); /* makes delta */
    LG_CUDA_LAUNCHED();
    keys_in_turns_kernel<T, D><<<grid_of(b.z.Tk, b.z), THREADS, keys_bytes, stream>>>(b);
    LG_CUDA_LAUNCHED();
}
template <typename T> static void backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    float *delta = (float *)s->scratch;
    backward_args<T> b = {(const T *)a->q.data,
                          (const T *)a->k.data,
                          (const T *)a->v.data,
                          (const T *)a->dout.data,
                          (const int32_t *)a->k_length.data,
                          (const float *)a->lse.data,
                          delta,
                          lg_row_stride(&a->q, 2),
                          lg_row_stride(&a->k, 2),
                          lg_row_stride(&a->v, 2),
                          lg_row_stride(&a->dq, 2),
                          lg_row_stride(&a->dk, 2),
                          lg_row_stride(&a->dv, 2),
                          (T *)a->dq.data,
                          (T *)a->dk.data,
                          (T *)a->dv.data,
                          shape_of(&a->q, &a->k, a->scale)};
    cudaStream_t stream = lg_cuda_stream_of(s);
    LG_ASSERT(b.z.d <= HEAD_MAX_BACKWARD);
    if (cuda_mma_attention_backward_takes(lg_cuda_device_of(s), a)) {
        int64_t rows = (int64_t)b.z.B * b.z.Tq * b.z.H;
        delta_kernel<<<(unsigned)ceil_div(rows, THREADS / WARP), THREADS, 0, stream>>>(
            b.dout, (const T *)a->o.data, (const T *)a->o_low.data, delta, rows, b.z);
        LG_CUDA_LAUNCHED();
        return cuda_mma_attention_backward(s, a, delta);
    }
    if (b.z.d <= 32) return launch_backward<T, 32>(stream, b);
    if (b.z.d <= 64) return launch_backward<T, 64>(stream, b);
    if (b.z.d <= 128) return launch_backward<T, 128>(stream, b);
    if (shared_bytes(b.z, 4, 2) > lg_cuda_device_of(s)->shared_max)
        return launch_backward_in_turns<T, HEAD_MAX_BACKWARD>(stream, b);
    launch_backward<T, HEAD_MAX_BACKWARD>(stream, b);
}
/* dbias (3 H d): column sums of dq, 0, column sums of dv, once these are there. */
static void bias_gradient(lg_stream *s, const struct lg_attention_backward_args *a)
{
    cudaStream_t stream = lg_cuda_stream_of(s);
    int64_t B = a->q.dim[0], width = a->q.dim[2] * a->q.dim[3];
    size_t bytes = (size_t)width * lg_dtype_bytes(a->dbias.dtype);
    lg_tensor q = lg_t2(a->dq.data, a->dq.dtype, B * a->q.dim[1], width);
    lg_tensor v = lg_t2(a->dv.data, a->dv.dtype, B * a->k.dim[1], width), third[3];
    for (int i = 0; i < 3; i++)
        third[i] = lg_t1((char *)a->dbias.data + i * bytes, a->dbias.dtype, width);
    cuda_column_sums(stream, q, lg_row_stride(&a->dq, 2), third[0], a->accumulate_dbias,
                     s->scratch);
    if (!a->accumulate_dbias) LG_CUDA(cudaMemsetAsync(third[1].data, 0, bytes, stream));
    cuda_column_sums(stream, v, lg_row_stride(&a->dv, 2), third[2], a->accumulate_dbias,
                     s->scratch);
}
static bool joins(const lg_cuda_device *d, const struct lg_attention_backward_args *a)
{
    return (a->first_queries || a->first_keys) && !cuda_long_attention_takes(d, a);
}
size_t cuda_attention_backward_scratch(lg_cuda_device *d,
                                       const struct lg_attention_backward_args *a)
{
    if (joins(d, a)) {
        struct lg_attention_backward_args one;
        const size_t bytes = lg_streams_join_backward(a, nullptr, &one);
        return bytes + cuda_attention_backward_scratch(d, &one);
    }
    if (cuda_short_attention_takes(d, a)) return cuda_short_attention_scratch(a);
    int64_t B = a->q.dim[0], Tq = a->q.dim[1], H = a->q.dim[2], width = H * a->q.dim[3];
    const bool few = cuda_cross_attention_takes(d, a), tiled = cuda_long_attention_takes(d, a);
    const bool own = few || tiled || cuda_mma_attention_backward_takes(d, a);
    size_t cudnn = own ? 0 : lg_cudnn_attention_backward_scratch(d, a), sums = 0;
    size_t delta = few     ? cuda_cross_attention_scratch(a)
                   : tiled ? cuda_long_attention_scratch(a)
                           : (size_t)(B * Tq * H) * sizeof(float);
    if (a->dbias.rank)
        sums = LG_MAX(cuda_column_sums_scratch(B * Tq, width),
                      cuda_column_sums_scratch(B * a->k.dim[1], width));
    return LG_MAX(sums, cudnn ? cudnn : delta);
}
void cuda_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    const lg_cuda_device *d = lg_cuda_device_of(s);
    if (joins(d, a)) return lg_streams_backward(s, a, cuda_copy_rows, cuda_attention_backward);
    if (cuda_short_attention_takes(d, a)) return cuda_short_attention_backward(s, a);
    if (cuda_cross_attention_takes(d, a))
        cuda_cross_attention_backward(s, a);
    else if (cuda_long_attention_takes(d, a))
        cuda_long_attention_backward(s, a);
    else if (cuda_mma_attention_backward_takes(d, a) || !lg_cudnn_attention_backward(s, a))
        WITH_TYPE(a->q.dtype, T, backward<T>(s, a))
    if (a->dbias.data) bias_gradient(s, a);
}
