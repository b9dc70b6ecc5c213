/* Backward of attention on the tensor cores (wgmma) for heads that fit into shared memory whole:
 * TOKENS = 256 queries and keys, d = 64 or 72, bf16 or fp16, no key lengths.
 *
 *     r = rows' sums of dout o,  P = exp(scale Q K^T - lse),  dS = P (dO V^T - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * A block of two warpgroups owns one head; each warpgroup owns 128 keys as two tiles of 64, whose dK and
 * dV stay in registers (144 floats a thread at d = 72). Queries come in blocks of 64. Per tile and block:
 * S^T and dO V^T transposed (64 keys x 64 queries), P^T and dS^T rounded in registers, where they are the
 * left operands of dV and dK; dS^T also goes to shared memory, and when all keys are there both
 * warpgroups multiply it by K: dQ of the block, half of the columns each. Nothing is added across
 * blocks: no atomics, always the same bits.
 *
 * A block goes through every gridDim-th head. While it works, the next head's rows of Q and dO come in
 * where a block of queries is done with, K and V while dK and dV are stored.
 *
 * Shared memory: Q, K, V, dO as bands of 16 columns; in a band, rows of 32 bytes, whose halves are
 * swapped in every second group of 4 rows. That is wgmma's 32-byte swizzle, which serves a matrix and its
 * transpose alike, without bank conflicts. The inner dimension of the first two products comes in
 * steps of 16: at d = 72 the last band's second half is zeros. dS^T lies in columns of 8 queries, 16
 * bytes a key, without swizzle. At d = 72: 4 x 40960 + 32768 (dS of one block of queries) + 2048 (lse, r)
 * + 27648 (below) = 226,304 bytes.
 *
 * dbias: sums over the rows of dQ and dV before they are rounded. A thread adds up the rows that it holds
 * of a column, over all blocks of queries, in a slot of its own: (32, 72) floats for dQ, (64, 72) for dV.
 * When the head is done, a thread a column adds the slots in order; the sums of the heads (B, 3, H, d) go
 * to scratch memory and are added over the batch (column_sums.cu). Rows of 72 floats keep the slots of a
 * warp in different banks at either d.
 *
 * At B = 256, 16 heads: 1.21 GB must move (0.29 ms at 4.2 TB/s), 194 GFLOP. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/short_attention.h"
#include "kernels/cuda/wgmma.cuh"

enum { TOKENS = 256, THREADS = 256, KEYS = 64, QUERIES = 64, BAND = TOKENS * 32 };
enum { DS_COLUMN = TOKENS * 16, DS_BYTES = QUERIES / 8 * DS_COLUMN };
enum { SLOT_ROW = 72, DQ_SLOTS = 32, DV_SLOTS = 64 }; /* floats; rows */

template <int D> struct layout {
    static constexpr int COLUMNS = D / 8, BANDS = (D + 15) / 16, MATRIX = BANDS * BAND;
    static constexpr int DS = 4 * MATRIX, ROWS = DS + DS_BYTES;
    static constexpr int SLOTS = ROWS + 2 * TOKENS * (int)sizeof(float);
    static constexpr int BYTES = SLOTS + (DQ_SLOTS + DV_SLOTS) * SLOT_ROW * (int)sizeof(float);
};

/* ---- products ---- */

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34", "0"); \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[20], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("40", type, N20, F16(d, 0) COMMA F4(d, 16), "%20", "%21", "%22", "1");  \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[16], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("32", type, N16, F16(d, 0), "%16", "%17", "%18", "1");                  \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[36], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("72", type, N36, F16(d, 0) COMMA F16(d, 16) COMMA F4(d, 32),         \
                              "%36, %37, %38, %39", "%40");                                        \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[32], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32, %33, %34, %35",   \
                              "%36");                                                              \
        }                                                                                          \
    };
TENSOR_CORE(bf16, "bf16")
TENSOR_CORE(fp16, "f16")

/* ---- small steps ---- */

/* Where the 8 elements from column 8 c of row r lie. */
static __device__ __forceinline__ int place(int r, int c)
{
    return c / 2 * BAND + r * 32 + ((c ^ r >> 2) & 1) * 16;
}
/* Rows [first, first + count) of one head, `stride` elements apart, into a matrix of shared memory; not
 * waited for. */
template <typename T, int D>
static __device__ __forceinline__ void copy_rows(char *to, const T *from, int64_t stride, int first,
                                                 int count)
{
    constexpr int COLUMNS = D / 8;
    for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
        int r = first + i / COLUMNS, c = i % COLUMNS;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + place(r, c))),
            "l"(from + r * stride + c * 8)
            : "memory");
    }
}
/* Columns [8 first, 8 first + 2 N) of 64 rows from the result of a product. */
template <typename T, int N>
static __device__ __forceinline__ void store_result(T *to, int64_t stride, const float (&x)[N],
                                                    float factor)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x % 128 / WARP * 16 + lane / 4;
    T *p = to + row * stride + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        *(uint32_t *)(p + 8 * j) = packed(x[4 * j] * factor, x[4 * j + 1] * factor, T());
        *(uint32_t *)(p + 8 * stride + 8 * j) =
            packed(x[4 * j + 2] * factor, x[4 * j + 3] * factor, T());
    }
}

/* The rows that a thread holds of the result of a product, added up in its slot: 2 N columns of `slots`
 * from row `row`. */
template <int N>
static __device__ __forceinline__ void add_to_slot(float *slots, int row, const float (&x)[N],
                                                   bool first)
{
    float2 *slot = (float2 *)(slots + row * SLOT_ROW + threadIdx.x % 4 * 2);
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 sum = {x[4 * j] + x[4 * j + 2], x[4 * j + 1] + x[4 * j + 3]};
        if (!first) sum.x += slot[4 * j].x, sum.y += slot[4 * j].y;
        slot[4 * j] = sum;
    }
}

template <typename T> struct short_args {
    const T *q, *k, *v, *dout, *o;
    const float *lse;
    int64_t q_stride, kv_stride, dq_stride, dkv_stride;
    T *dq, *dk, *dv;
    float *sums; // (B, 3, H, d), or NULL: column sums of dq, dk (0), dv
    float scale;
    int H, heads; /* of a sample, of all samples */
};

/* x = 64 rows of a, from row ra, times 64 rows of b, from rb, transposed. */
template <typename T, int D>
static __device__ __forceinline__ void row_products(float (&x)[32], uint32_t a, int ra, uint32_t b,
                                                    int rb)
{
#pragma unroll
    for (int s = 0; s < layout<D>::BANDS; s++)
        tensor_core<T>::scores(x, operand(a + ra * 32 + s * BAND, 16, 256, 3),
                               operand(b + rb * 32 + s * BAND, 16, 256, 3), s > 0);
}
/* x (64 keys, D) += p (64 keys, 64 queries, in registers) times 64 rows of b from row rb. */
template <typename T, int D>
static __device__ __forceinline__ void add_to_keys(float (&x)[D / 2], const uint32_t (&p)[16],
                                                   uint32_t b, int rb)
{
#pragma unroll
    for (int s = 0; s < QUERIES / 16; s++)
        tensor_core<T>::keys(x, p + 4 * s, operand(b + (rb + 16 * s) * 32, BAND, 256, 3));
}
/* Columns [first, first + 2 N) of dQ of the block of queries from q0; first is a multiple of 16. */
template <typename T, int D, int N>
static __device__ __forceinline__ void query_gradients(const short_args<T> &a, T *dq, uint32_t ds,
                                                       uint32_t k, int first, float *slots, int q0)
{
    float x[N];
    products_begin();
#pragma unroll
    for (int s = 0; s < TOKENS / 16; s++)
        tensor_core<T>::queries(x, operand(ds + s * 256, 128, DS_COLUMN, 0),
                                operand(k + first / 16 * BAND + s * 512, BAND, 256, 3), s > 0);
    products_end();
    products_wait<0>();
    settled(x);
    store_result(dq + q0 * a.dq_stride + first, a.dq_stride, x, a.scale);
    if (a.sums) add_to_slot(slots + first, threadIdx.x % 128 / 4, x, q0 == 0);
}

/* Head `at` of all B x H: where its rows begin. */
template <typename T, int D> struct head {
    int64_t row, column, H;
    __device__ __forceinline__ head(int at, int heads_a_sample)
        : row((int64_t)(at / heads_a_sample) * TOKENS), column(at % heads_a_sample * D),
          H(heads_a_sample)
    {
    }
    template <typename P> __device__ __forceinline__ P *in(P *p, int64_t stride) const
    {
        return p + row * stride + column;
    }
};
/* The slots of dQ and dV, all filled, to a.sums: a thread adds a column. */
template <typename T, int D>
static __device__ __forceinline__ void store_sums(const short_args<T> &a, const head<T, D> &h,
                                                  const float *slots)
{
    if (threadIdx.x >= 2 * D) return;
    bool of_v = threadIdx.x >= D;
    int c = threadIdx.x % D;
    const float *slot = slots + (of_v ? DQ_SLOTS * SLOT_ROW : 0) + c;
    float *to = a.sums + h.row / TOKENS * 3 * h.H * D + h.column + c, sum = 0;
#pragma unroll 8
    for (int r = 0; r < (of_v ? DV_SLOTS : DQ_SLOTS); r++) sum += slot[r * SLOT_ROW];
    to[of_v ? 2 * h.H * D : 0] = of_v ? sum : sum * a.scale;
    if (!of_v) to[h.H * D] = 0;
}
template <typename T, int D>
static __device__ __forceinline__ void copy_queries(const short_args<T> &a, char *shared,
                                                    const head<T, D> &h, int first, int count)
{
    using L = layout<D>;
    copy_rows<T, D>(shared, h.in(a.q, a.q_stride), a.q_stride, first, count);
    copy_rows<T, D>(shared + 3 * L::MATRIX, h.in(a.dout, h.H * D), h.H * D, first, count);
}
/* When all copies have arrived: lse and the rows' sums of dout o. Ends with a barrier. */
template <typename T, int D>
static __device__ __forceinline__ void settle_head(const short_args<T> &a, char *shared,
                                                   const head<T, D> &h, float *lse, float *sums)
{
    using L = layout<D>;
    pack<T, 8> o[L::COLUMNS];
    float sum = 0, x[8];
    const T *row = h.in(a.o, h.H * D) + threadIdx.x * h.H * D;
#pragma unroll
    for (int c = 0; c < L::COLUMNS; c++) o[c] = *(const pack<T, 8> *)(row + 8 * c);
    float l = a.lse[(h.row / TOKENS * h.H + h.column / D) * TOKENS + threadIdx.x];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int c = 0; c < L::COLUMNS; c++) {
        load<T, 8>((const T *)(shared + 3 * L::MATRIX + place(threadIdx.x, c)), x);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += x[e] * to_float(o[c].v[e]);
    }
    lse[threadIdx.x] = l * LOG2_E;
    sums[threadIdx.x] = sum;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 1) short_backward_kernel(const short_args<T> a)
{
    using L = layout<D>;
    extern __shared__ __align__(1024) char shared[];
    float *lse = (float *)(shared + L::ROWS), *sums = lse + TOKENS;
    float *slots = (float *)(shared + L::SLOTS);
    char *ds = shared + L::DS;
    int group = threadIdx.x / 128, lane = threadIdx.x % WARP, warp = threadIdx.x % 128 / WARP;
    uint32_t q = shared_address(shared), k = q + L::MATRIX, v = k + L::MATRIX, dout = v + L::MATRIX;
    float factor = a.scale * LOG2_E;
    int at = blockIdx.x;
    if (L::COLUMNS % 2)
        for (int m = 0; m < 4; m++)
            *(float4 *)(shared + m * L::MATRIX + place(threadIdx.x, L::COLUMNS)) = {};
    {
        head<T, D> h(at, a.H);
        copy_queries<T, D>(a, shared, h, 0, TOKENS);
        copy_rows<T, D>(shared + L::MATRIX, h.in(a.k, a.kv_stride), a.kv_stride, 0, TOKENS);
        copy_rows<T, D>(shared + 2 * L::MATRIX, h.in(a.v, a.kv_stride), a.kv_stride, 0, TOKENS);
    }
#pragma unroll 1
    for (; at < a.heads; at += gridDim.x) {
        head<T, D> h(at, a.H), next(at + gridDim.x, a.H);
        bool more = at + gridDim.x < a.heads;
        settle_head<T, D>(a, shared, h, lse, sums);
        float dk[2][D / 2] = {}, dv[2][D / 2] = {};
#pragma unroll 1
        for (int q0 = 0; q0 < TOKENS; q0 += QUERIES) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int k0 = group * 128 + i * KEYS;
                float s[32], dp[32];
                uint32_t p[16];
                products_begin();
                row_products<T, D>(s, k, k0, q, q0);
                products_end();
                row_products<T, D>(dp, v, k0, dout, q0);
                products_end();
                products_wait<1>();
                settled(s);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float2 l = *(const float2 *)(lse + q0 + 8 * j + lane % 4 * 2);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[4 * j + e] = exp2_of(fmaf(s[4 * j + e], factor, e % 2 ? -l.y : -l.x));
                    p[2 * j] = packed(s[4 * j], s[4 * j + 1], T());
                    p[2 * j + 1] = packed(s[4 * j + 2], s[4 * j + 3], T());
                }
                products_begin();
                add_to_keys<T, D>(dv[i], p, dout, q0);
                products_end();
                products_wait<0>();
                settled(dp);
                char *row = ds + (k0 + warp * 16 + lane / 4) * 16 + lane % 4 * 4;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    float2 r = *(const float2 *)(sums + q0 + 8 * j + lane % 4 * 2);
#pragma unroll
                    for (int e = 0; e < 4; e++) s[4 * j + e] *= dp[4 * j + e] - (e % 2 ? r.y : r.x);
                    p[2 * j] = packed(s[4 * j], s[4 * j + 1], T());
                    p[2 * j + 1] = packed(s[4 * j + 2], s[4 * j + 3], T());
                    *(uint32_t *)(row + j * DS_COLUMN) = p[2 * j];
                    *(uint32_t *)(row + j * DS_COLUMN + 128) = p[2 * j + 1];
                }
                products_begin();
                add_to_keys<T, D>(dk[i], p, q, q0);
                products_end();
                products_wait<0>();
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            if (more) copy_queries<T, D>(a, shared, next, q0, QUERIES);
            T *to = h.in(a.dq, a.dq_stride);
            if (group == 0)
                query_gradients<T, D, 16>(a, to, shared_address(ds), k, 0, slots, q0);
            else
                query_gradients<T, D, (D - 32) / 2>(a, to, shared_address(ds), k, 32, slots, q0);
            __syncthreads();
        }
        if (more) {
            copy_rows<T, D>(shared + L::MATRIX, next.in(a.k, a.kv_stride), a.kv_stride, 0, TOKENS);
            copy_rows<T, D>(shared + 2 * L::MATRIX, next.in(a.v, a.kv_stride), a.kv_stride, 0,
                            TOKENS);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int64_t row = (group * 128 + i * KEYS) * a.dkv_stride;
            settled(dk[i]);
            settled(dv[i]);
            store_result(h.in(a.dk, a.dkv_stride) + row, a.dkv_stride, dk[i], a.scale);
            store_result(h.in(a.dv, a.dkv_stride) + row, a.dkv_stride, dv[i], 1);
            if (a.sums) add_to_slot(slots + DQ_SLOTS * SLOT_ROW, threadIdx.x / 4, dv[i], i == 0);
        }
        if (a.sums) {
            __syncthreads();
            store_sums<T, D>(a, h, slots);
        }
    }
}

template <typename T, int D>
static void launch(lg_stream *stream, const struct lg_attention_backward_args *a)
{
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    short_args<T> s = {(const T *)a->q.data,
                       (const T *)a->k.data,
                       (const T *)a->v.data,
                       (const T *)a->dout.data,
                       (const T *)a->o.data,
                       (const float *)a->lse.data,
                       a->q_stride,
                       a->kv_stride,
                       a->dq_stride,
                       a->dkv_stride,
                       (T *)a->dq.data,
                       (T *)a->dk.data,
                       (T *)a->dv.data,
                       a->dbias.data ? (float *)stream->scratch : nullptr,
                       (float)a->scale,
                       (int)a->q.dim[2],
                       (int)(a->q.dim[0] * a->q.dim[2])};
    unsigned blocks = (unsigned)(s.heads < multiprocessors ? s.heads : multiprocessors);
    LG_CUDA(cudaFuncSetAttribute(short_backward_kernel<T, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, layout<D>::BYTES));
    short_backward_kernel<T, D><<<blocks, THREADS, layout<D>::BYTES, cuda>>>(s);
    LG_CUDA_LAUNCHED();
    if (s.sums) cuda_add_partial_sums(cuda, s.sums, a->q.dim[0], a->dbias, a->accumulate_dbias);
}

bool cuda_short_attention_takes(const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,    a->k.data,  a->v.data,  a->o.data,
                       a->dout.data, a->dq.data, a->dk.data, a->dv.data};
    int64_t d = a->q.dim[3], strides[] = {a->q_stride, a->kv_stride, a->dq_stride, a->dkv_stride};
    if (a->q.dtype == LG_F32 || (d != 64 && d != 72)) return false;
    if (a->q.dim[1] != TOKENS || a->k.dim[1] != TOKENS || a->k_length.rank) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (strides[i] % 8) return false;
    return true;
}
size_t cuda_short_attention_scratch(const struct lg_attention_backward_args *a)
{
    int64_t width = a->q.dim[2] * a->q.dim[3];
    return a->dbias.rank ? (size_t)(a->q.dim[0] * 3 * width) * sizeof(float) : 0;
}
void cuda_short_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    bool wide = a->q.dim[3] == 72, half = a->q.dtype == LG_F16;
    if (half)
        wide ? launch<fp16, 72>(s, a) : launch<fp16, 64>(s, a);
    else
        wide ? launch<bf16, 72>(s, a) : launch<bf16, 64>(s, a);
}
