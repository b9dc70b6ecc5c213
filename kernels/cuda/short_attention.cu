/* Backward of attention on the tensor cores (wgmma) for heads that fit into shared memory whole:
 * TOKENS = 256 queries and keys, d = 64 or 72, bf16 or fp16, no key lengths.
 *
 *     r = rows' sums of dout o,  P = exp(scale Q K^T - lse),  dS = P (dO V^T - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * A block goes through every gridDim-th head with three warpgroups.
 *
 * The first one loads: K, V, and Q and dO in blocks of 64 queries; r it computes, with o in Q's place. What
 * the others are done with of a head, it fills with the next head's; K has two places.
 *
 * The two others compute, each for 128 keys, as two tiles of 64, whose dK and dV stay in registers (144
 * floats a thread at d = 72). Per tile and block of queries: S^T (64 keys x 64 queries) and dO V^T
 * transposed (32 queries at a time: there are no registers for 64), P^T and dS^T rounded in registers,
 * where they are the left operands of dV and dK; dS^T also goes to shared memory, and when all keys are
 * there both warpgroups multiply it by K: dQ of the block, half of the columns each. A product is waited
 * for where its result is used, but none is under way around a loop: ptxas then serialises all of them
 * (C75xx). Nothing is added across blocks: no atomics, always the same bits.
 *
 * Shared memory: all operands lie in columns of 8 elements, 16 bytes a row, which serve a matrix and its
 * transpose alike; the COLUMN bytes of a column put those of a row into different banks. The inner
 * dimension of the first two products comes in steps of 16: at d = 72 the last step's second column is
 * one of zeros for Q and dO, and for K and V the last one again. Bytes at d = 72: 5 x 37,008 (Q, dO, V,
 * K, K), 4112 (zeros), 32,768 (dS^T of a block of queries), 2048 (lse, r), 3456 (below), 128 (barriers):
 * 227,552.
 *
 * dbias: sums over the rows of dQ and dV before they are rounded. A warp adds up its 16 rows of a product
 * by shuffles, over all blocks of queries in a slot of its own; when the head is done, a thread a column
 * adds the warps' slots in order. The sums of the heads (B, 3, H, d) go to scratch memory and are added
 * over the batch (column_sums.cu).
 *
 * At B = 256, 16 heads: 1.21 GB must move (0.29 ms at 4.2 TB/s), 194 GFLOP. */
#include "kernels/cuda/short_attention.h"
#include "kernels/cuda/wgmma.cuh"

enum { TOKENS = 256, GROUP = 128, THREADS = 3 * GROUP, KEYS = 64, QUERIES = 64, PART = 32 };
enum { BLOCKS = TOKENS / QUERIES, COLUMN = TOKENS * 16 + 16, DS_COLUMN = TOKENS * 16 };
enum { DQ_SLOTS = 4, DV_SLOTS = 8 };             /* a warp each */
enum { LOADER_REGISTERS = 24, REGISTERS = 240 }; /* of the 168 that each warpgroup begins with */
enum { DS_FULL = 1, DS_FREE, LOADERS = DS_FREE + 2 }; /* barriers; 0 is __syncthreads() */
/* What is loaded at once: Q, dO, lse and r of a block of queries (items 0 to 3), V, K in its two places. */
enum { V_ITEM = BLOCKS, K_ITEM, ITEMS = K_ITEM + 2 };

template <int D> struct layout {
    static constexpr int COLUMNS = D / 8, STEPS = (D + 15) / 16, MATRIX = COLUMNS * COLUMN;
    static constexpr int Q = 0, DOUT = MATRIX, V = 2 * MATRIX, K = 3 * MATRIX, ZEROS = 5 * MATRIX;
    static constexpr int DS = ZEROS + COLUMNS % 2 * COLUMN, LSE = DS + QUERIES / 8 * DS_COLUMN;
    static constexpr int ROWS = LSE + TOKENS * (int)sizeof(float);
    static constexpr int SLOTS = ROWS + TOKENS * (int)sizeof(float);
    static constexpr int BARRIERS = SLOTS + (DQ_SLOTS + DV_SLOTS) * D * (int)sizeof(float);
    static constexpr int ZERO = BARRIERS + 2 * ITEMS * (int)sizeof(uint64_t), BYTES = ZERO + 16;
};

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[16], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("32", type, N16, F16(d, 0), "%16", "%17", "%18", "0");                  \
        }                                                                                          \
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

template <typename T> struct short_args {
    const T *q, *k, *v, *dout, *o;
    const float *lse;
    int64_t q_stride, kv_stride, dq_stride, dkv_stride;
    T *dq, *dk, *dv;
    float *sums; // (B, 3, H, d), or NULL: column sums of dq, dk (0), dv
    float scale;
    int H, heads; /* of a sample, of all samples */
};
/* Head `at` of all B x H: where its rows begin. */
template <int D> struct head {
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

/* ---- the warpgroup that loads ---- */

/* An item's two barriers: it is there; it is not needed any more. */
struct item {
    uint32_t full, free;
    __device__ __forceinline__ item(uint32_t barriers, int i)
        : full(barriers + 16 * i), free(barriers + 16 * i + 8)
    {
    }
};

/* A thread takes column threadIdx.x % COLUMNS of every PASS-th row. */
template <int D> struct loader {
    static constexpr int COLUMNS = D / 8, PASS = GROUP / COLUMNS;
    int row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    /* COUNT rows, `stride` elements apart, into a matrix of shared memory; not waited for. */
    template <int COUNT, typename T>
    __device__ __forceinline__ void rows(uint32_t to, const T *from, int64_t stride) const
    {
        if (row >= PASS) return;
        to += column * COLUMN + row * 16;
        const char *at = (const char *)(from + row * stride + column * 8);
        uint32_t pass = (uint32_t)stride * PASS * (uint32_t)sizeof(T);
#pragma unroll
        for (int r = 0; r < COUNT; r += PASS, at += pass) {
            asm volatile("" : "+l"(at)); /* one address, not one for every row */
            if (r + PASS <= COUNT || row < COUNT - r) copy_16(to + r * 16, at);
        }
    }
};
/* lse, and the rows' sums of dout o of the QUERIES rows from q0, where dO has come, and o in Q's place. */
template <typename T, int D> static __device__ __forceinline__ void row_sums(char *shared, int q0)
{
    using L = layout<D>;
    int q = q0 + threadIdx.x / 2;
    float sum = 0, *lse = (float *)(shared + L::LSE);
    const char *x = shared + threadIdx.x % 2 * COLUMN + q * 16;
#pragma unroll
    for (int c = 0; c < L::COLUMNS; c += 2, x += 2 * COLUMN) {
        if (c + 1 == L::COLUMNS && threadIdx.x % 2) break;
        pack<T, 8> o = *(const pack<T, 8> *)(x + L::Q), g = *(const pack<T, 8> *)(x + L::DOUT);
#pragma unroll
        for (int e = 0; e < 8; e++) sum += to_float(o.v[e]) * to_float(g.v[e]);
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    if (threadIdx.x % 2) return;
    ((float *)(shared + L::ROWS))[q] = sum;
    lse[q] *= LOG2_E;
}
/* Every item is waited for when the copies of the next one are under way. */
template <typename T, int D>
static __device__ __forceinline__ void load_heads(const short_args<T> &a, char *shared)
{
    using L = layout<D>;
    uint32_t base = shared_address(shared), barriers = base + L::BARRIERS;
    loader<D> l;
    int64_t stride = (int64_t)a.H * D;
#pragma unroll 1
    for (int at = blockIdx.x, n = 0; at < a.heads; at += gridDim.x, n++) {
        head<D> h(at, a.H);
        item k(barriers, K_ITEM + n % 2), v(barriers, V_ITEM);
        uint32_t last = item(barriers, BLOCKS - 1).full;
        if (n >= 2) mbarrier_wait(k.free, n / 2 + 1);
        l.template rows<TOKENS>(base + L::K + n % 2 * L::MATRIX, h.in(a.k, a.kv_stride),
                                a.kv_stride);
        copies_end();
        if (n) {
            copies_wait<1>();
            mbarrier_arrive(last);
        }
        last = k.full;
#pragma unroll 1
        for (int i = 0; i < BLOCKS; i++) {
            item q(barriers, i);
            int q0 = i * QUERIES;
            if (i == BLOCKS - 1) {
                if (n) mbarrier_wait(v.free, n + 1);
                l.template rows<TOKENS>(base + L::V, h.in(a.v, a.kv_stride), a.kv_stride);
                copies_end();
                copies_wait<0>();
                mbarrier_arrive(last);
                mbarrier_arrive(v.full);
            }
            if (n) mbarrier_wait(q.free, n + 1);
            l.template rows<QUERIES>(base + L::Q + q0 * 16, h.in(a.o, stride) + q0 * stride,
                                     stride);
            l.template rows<QUERIES>(base + L::DOUT + q0 * 16, h.in(a.dout, stride) + q0 * stride,
                                     stride);
            if (threadIdx.x < QUERIES / 4)
                copy_16(base + L::LSE + (q0 + threadIdx.x * 4) * (int)sizeof(float),
                        a.lse + (int64_t)at * TOKENS + q0 + threadIdx.x * 4);
            copies_end();
            if (i < BLOCKS - 1) {
                copies_wait<1>();
                mbarrier_arrive(last);
            }
            copies_wait<0>();
            barrier_sync(LOADERS, GROUP);
            row_sums<T, D>(shared, q0);
            barrier_sync(LOADERS, GROUP);
            l.template rows<QUERIES>(base + L::Q + q0 * 16, h.in(a.q, a.q_stride) + q0 * a.q_stride,
                                     a.q_stride);
            copies_end();
            last = q.full;
        }
    }
    copies_wait<0>();
    mbarrier_arrive(item(barriers, BLOCKS - 1).full);
}

/* ---- the warpgroups that compute ---- */

/* 64 rows of N / 2 columns from the result of a product. */
template <typename T, int N>
static __device__ __forceinline__ void store_result(T *to, int64_t stride, const float (&x)[N],
                                                    float factor)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x % GROUP / WARP * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        T *p = to + (row + 8 * half) * stride + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            int e = 4 * j + 2 * half;
            *(uint32_t *)(p + 8 * j) = packed(x[e] * factor, x[e + 1] * factor, T());
        }
    }
}
/* The columns' sums of the warp's 16 rows of the results of TILES products, to or onto slot. */
template <int TILES, int N>
static __device__ __forceinline__ void add_to_slot(float *slot, const float (&x)[TILES][N],
                                                   bool first)
{
    int lane = threadIdx.x % WARP;
    float2 *to = (float2 *)slot + lane, sum[N / 4];
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        sum[j] = {};
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            sum[j].x += x[t][4 * j] + x[t][4 * j + 2];
            sum[j].y += x[t][4 * j + 1] + x[t][4 * j + 3];
        }
    }
#pragma unroll
    for (int o = 4; o < WARP; o *= 2)
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            sum[j].x += __shfl_xor_sync(0xffffffff, sum[j].x, o);
            sum[j].y += __shfl_xor_sync(0xffffffff, sum[j].y, o);
        }
    if (lane >= 4) return;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 old = first ? float2{} : to[4 * j];
        to[4 * j] = {old.x + sum[j].x, old.y + sum[j].y};
    }
}
/* The slots of dQ and dV, all filled, to a.sums: a thread adds a column. */
template <typename T, int D>
static __device__ __forceinline__ void store_sums(const short_args<T> &a, const head<D> &h,
                                                  const float *slots)
{
    int i = threadIdx.x - GROUP, c = i % D;
    bool of_v = i >= D;
    if (i >= 2 * D) return;
    const float *slot = slots + (of_v ? DQ_SLOTS * D : 0) + c;
    float *to = a.sums + h.row / TOKENS * 3 * h.H * D + h.column + c, sum = 0;
    for (int w = 0; w < (of_v ? DV_SLOTS : DQ_SLOTS); w++) sum += slot[w * D];
    to[of_v ? 2 * h.H * D : 0] = of_v ? sum : sum * a.scale;
    if (!of_v) to[h.H * D] = 0;
}

/* Descriptors of operands in columns: the low word is passed on, the high one is known. Row r of a matrix
 * is low word + r, column c is + c COLUMN / 16. */
static __device__ __forceinline__ uint64_t descriptor(uint32_t low, int stride)
{
    return (uint64_t)(stride >> 4) << 32 | low;
}
/* x = 64 rows of a times 2 N rows of b, transposed; bytes from b's last column to that of zeros. */
template <typename T, int D, int N>
static __device__ __forceinline__ void row_products(float (&x)[N], uint32_t a, uint32_t b,
                                                    int b_to_zeros)
{
    constexpr uint32_t NEXT = COLUMN / 16, LEADING = NEXT << 16;
    a |= LEADING, b |= LEADING;
    products_begin();
#pragma unroll
    for (int s = 0; s < layout<D>::STEPS; s++) {
        bool lone = 2 * s + 1 == layout<D>::COLUMNS;
        tensor_core<T>::scores(
            x, descriptor(a + 2 * s * NEXT - (lone ? LEADING : 0), 128),
            descriptor(b + 2 * s * NEXT + (lone ? (b_to_zeros / 16 - NEXT) << 16 : 0), 128), s > 0);
    }
    products_end();
}
/* x (64 keys, D) += p (64 keys, PART queries, in registers) times rows of b. */
template <typename T, int D>
static __device__ __forceinline__ void add_to_keys(float (&x)[D / 2], const uint32_t (&p)[PART / 4],
                                                   uint32_t b)
{
    b |= 128 / 16 << 16;
    products_begin();
#pragma unroll
    for (int s = 0; s < PART / 16; s++)
        tensor_core<T>::keys(x, p + 4 * s, descriptor(b + 16 * s, COLUMN));
    products_end();
}
/* x = dS of a block of queries times 2 N columns of K, from the one that k begins with. */
template <typename T, int N>
static __device__ __forceinline__ void query_gradients(float (&x)[N], uint32_t ds, uint32_t k)
{
    ds |= 128 / 16 << 16, k |= 128 / 16 << 16;
    products_begin();
#pragma unroll
    for (int s = 0; s < TOKENS / 16; s++)
        tensor_core<T>::queries(x, descriptor(ds + 16 * s, DS_COLUMN),
                                descriptor(k + 16 * s, COLUMN), s > 0);
    products_end();
}

/* The HALF of s, 64 keys x 64 queries: S^T to P^T. */
template <int HALF>
static __device__ __forceinline__ void exponentials(float (&s)[32], const float *lse, float factor)
{
#pragma unroll
    for (int j = 4 * HALF; j < 4 * HALF + 4; j++) {
        float2 l = *(const float2 *)(lse + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[4 * j + e] = exp2_of(fmaf(s[4 * j + e], factor, e % 2 ? -l.y : -l.x));
    }
}
template <typename T, int HALF>
static __device__ __forceinline__ void rounded(const float (&s)[32], uint32_t (&p)[PART / 4])
{
#pragma unroll
    for (int j = 0; j < PART / 4; j++)
        p[j] = packed(s[16 * HALF + 2 * j], s[16 * HALF + 2 * j + 1], T());
}
/* p = the half's dS^T, from P^T and dP^T, rounded; also to `to`, where the tile's first column is. */
template <typename T, int HALF>
static __device__ __forceinline__ void score_gradients(const float (&s)[32], const float (&dp)[16],
                                                       uint32_t (&p)[PART / 4], const float *sums,
                                                       uint32_t to)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int j = 4 * HALF + i;
        float2 r = *(const float2 *)(sums + 8 * j);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = s[4 * j + e] * (dp[4 * i + e] - (e % 2 ? r.y : r.x));
        p[2 * i] = packed(x[0], x[1], T());
        p[2 * i + 1] = packed(x[2], x[3], T());
        if (i % 2) store_matrices(to + (j - 1) * DS_COLUMN, p + 2 * i - 2);
    }
}

/* SIDE: keys [128 SIDE, 128 SIDE + 128), and the columns of dQ from 32 SIDE. */
template <typename T, int D, int SIDE> struct side {
    using L = layout<D>;
    static constexpr int KEY = SIDE * 2 * KEYS, FIRST = SIDE * 4, N = SIDE ? (D - 32) / 2 : 16;
    const short_args<T> &a;
    char *shared;
    uint32_t base, barriers, ds; /* ds: where the thread writes dS^T of the first tile */
    const float *lse, *sums;
    float *slots;
    int warp = threadIdx.x % GROUP / WARP;
    __device__ __forceinline__ side(const short_args<T> &args, char *shared_memory)
        : a(args), shared(shared_memory), base(shared_address(shared)),
          barriers(base + L::BARRIERS), slots((float *)(shared + L::SLOTS))
    {
        int lane = threadIdx.x % WARP;
        ds = base + L::DS + (KEY + warp * 16 + lane % 16) * 16 + lane / 16 * DS_COLUMN;
        lse = (const float *)(shared + L::LSE) + lane % 4 * 2;
        sums = (const float *)(shared + L::ROWS) + lane % 4 * 2;
    }
    __device__ __forceinline__ uint32_t low(int matrix) const { return (base + matrix) / 16; }
    /* Zero, which the compiler does not know: or it holds the descriptors of all tiles in registers. */
    __device__ __forceinline__ uint32_t zero() const
    {
        uint32_t z;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(z) : "r"(base + L::ZERO));
        return z;
    }
    /* Block i of the block's n-th head: dK, dV, and dS^T into shared memory. */
    __device__ __forceinline__ void tiles(float (&dk)[2][D / 2], float (&dv)[2][D / 2], int n,
                                          int i) const
    {
        constexpr int LAST = (L::COLUMNS - 1) * COLUMN;
        constexpr int Q_ZEROS = L::ZEROS - L::Q - LAST, DOUT_ZEROS = L::ZEROS - L::DOUT - LAST;
        int q0 = i * QUERIES;
        uint32_t q = low(L::Q) + q0, dout = low(L::DOUT) + q0, v = low(L::V) + KEY;
        uint32_t k = low(L::K + n % 2 * L::MATRIX) + KEY, p[PART / 4], h[PART / 4], g[PART / 4];
        float s[32], dp[16];
        mbarrier_wait(item(barriers, i).full, n);
        row_products<T, D>(s, k, q, Q_ZEROS);
        if (i == 0) mbarrier_wait(item(barriers, V_ITEM).full, n);
        row_products<T, D>(dp, v, dout, DOUT_ZEROS);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            uint32_t z = zero();
            products_wait<1>();
            settled(s);
            exponentials<0>(s, lse + q0, a.scale * LOG2_E);
            rounded<T, 0>(s, p);
            add_to_keys<T, D>(dv[t], p, z + dout);
            exponentials<1>(s, lse + q0, a.scale * LOG2_E);
            products_wait<1>();
            settled(dp);
            if (t == 0 && n + i) barrier_sync(DS_FREE + SIDE, 2 * GROUP);
            score_gradients<T, 0>(s, dp, g, sums + q0, ds + t * KEYS * 16);
            row_products<T, D>(dp, z + v + t * KEYS, z + dout + PART, DOUT_ZEROS);
            add_to_keys<T, D>(dk[t], g, z + q);
            rounded<T, 1>(s, h);
            add_to_keys<T, D>(dv[t], h, z + dout + PART);
            products_wait<1>();
            settled(dp);
            score_gradients<T, 1>(s, dp, g, sums + q0, ds + t * KEYS * 16);
            add_to_keys<T, D>(dk[t], g, z + q + PART);
            if (t == 1) continue;
            row_products<T, D>(s, z + k + KEYS, z + q, Q_ZEROS);
            row_products<T, D>(dp, z + v + KEYS, z + dout, DOUT_ZEROS);
        }
        if (i == BLOCKS - 1) warp_arrive(item(barriers, V_ITEM).free);
    }
    /* dQ of block i of the block's n-th head, `at`, when all keys' dS^T are there. */
    __device__ __forceinline__ void store_dq(int at, int n, int i) const
    {
        float x[1][N];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_sync(DS_FULL, 2 * GROUP);
        query_gradients<T>(x[0], low(L::DS), low(L::K + n % 2 * L::MATRIX + FIRST * COLUMN));
        products_wait<0>();
        settled(x[0]);
        warp_arrive(item(barriers, i).free);
        if (i < BLOCKS - 1 || at + gridDim.x < a.heads)
            barrier_arrive(DS_FREE + 1 - SIDE, 2 * GROUP);
        head<D> h(at, a.H);
        store_result(h.in(a.dq, a.dq_stride) + i * QUERIES * a.dq_stride + FIRST * 8, a.dq_stride,
                     x[0], a.scale);
        if (a.sums) add_to_slot(slots + warp * D + FIRST * 8, x, i == 0);
    }
    __device__ __forceinline__ void store_dk_dv(float (&dk)[2][D / 2], float (&dv)[2][D / 2],
                                                int at) const
    {
        head<D> h(at, a.H);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            int64_t row = (KEY + t * KEYS) * a.dkv_stride;
            settled(dk[t]);
            settled(dv[t]);
            store_result(h.in(a.dk, a.dkv_stride) + row, a.dkv_stride, dk[t], a.scale);
            store_result(h.in(a.dv, a.dkv_stride) + row, a.dkv_stride, dv[t], 1);
        }
        if (!a.sums) return;
        add_to_slot(slots + (DQ_SLOTS + SIDE * 4 + warp) * D, dv, true);
        barrier_sync(DS_FULL, 2 * GROUP);
        store_sums<T, D>(a, h, slots);
    }
    __device__ __forceinline__ void heads() const
    {
#pragma unroll 1
        for (int at = blockIdx.x, n = 0; at < a.heads; at += gridDim.x, n++) {
            float dk[2][D / 2] = {}, dv[2][D / 2] = {};
            item k(barriers, K_ITEM + n % 2);
            mbarrier_wait(k.full, n / 2);
#pragma unroll 1
            for (int i = 0; i < BLOCKS; i++) {
                tiles(dk, dv, n, i);
                store_dq(again(at), n, i);
            }
            warp_arrive(k.free);
            store_dk_dv(dk, dv, again(at));
        }
    }
    /* x, not known to be the same: what depends on it is computed where it is used. */
    static __device__ __forceinline__ int again(int x)
    {
        asm volatile("" : "+r"(x));
        return x;
    }
};

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 1) short_backward_kernel(const short_args<T> a)
{
    using L = layout<D>;
    extern __shared__ __align__(128) char shared[];
    if (threadIdx.x < ITEMS) {
        item i(shared_address(shared + L::BARRIERS), threadIdx.x);
        mbarrier_begin(i.full, GROUP);
        mbarrier_begin(i.free, 2 * GROUP / WARP);
    }
    if (threadIdx.x == 0) *(uint32_t *)(shared + L::ZERO) = 0;
    if (L::COLUMNS % 2 && threadIdx.x < TOKENS)
        *(float4 *)(shared + L::ZEROS + threadIdx.x * 16) = {};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<LOADER_REGISTERS>();
        load_heads<T, D>(a, shared);
    } else {
        registers_take<REGISTERS>();
        if (threadIdx.x < 2 * GROUP)
            side<T, D, 0>(a, shared).heads();
        else
            side<T, D, 1>(a, shared).heads();
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
    const void *p[] = {a->q.data,  a->k.data,  a->v.data,  a->o.data,  a->dout.data,
                       a->dq.data, a->dk.data, a->dv.data, a->lse.data};
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
