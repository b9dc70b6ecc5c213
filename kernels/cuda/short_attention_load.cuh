/* Attention's backward for 256 tokens (short_attention.cu): what lies where in shared memory, and the
 * warpgroup that loads.
 *
 * All operands lie in columns of 8 elements, 16 bytes a row, which serve a matrix and its transpose
 * alike: K (two places) and V in COLUMNs of 256 rows, Q and dO block by block in QUERY_COLUMNs of 64; 16
 * bytes behind a column put a row's columns into different banks. The inner dimension of the products of
 * rows comes in steps of 16: at d = 72 the last step's second column is one of zeros for Q and dO, and
 * for K and V the last one again.
 *
 * Results lie in rows, where their operands were: dQ of a block in dO's place, dK in K's, and dV in that
 * of dS^T, for which it is 4096 bytes longer. They leave by TMA, dQ from here: a thread's stores of 4 or
 * 16 bytes took a third of the kernel's time.
 *
 * Bytes at d = 72: 2 x 37,888 (Q, dO), 3 x 37,120 (V, K, K), 36,864 (dS^T of a block, dV), 1024 (zeros),
 * 2048 (lse, r), 3456 (sums for dbias), 128 (barriers): 230,656. */
#pragma once
#include "kernels/cuda/head_boxes.cuh"

enum { TOKENS = 256, GROUP = 128, THREADS = 3 * GROUP, KEYS = 64, QUERIES = 64, PART = 32 };
enum { BLOCKS = TOKENS / QUERIES, COLUMN = TOKENS * 16 + 16, DS_COLUMN = TOKENS * 16 };
enum { QUERY_COLUMN = QUERIES * 16 + 16, ALIGN = 128, WARP_ROWS = 16 };
enum { DQ_SLOTS = 4, DV_SLOTS = 8 };                  /* a warp each */
enum { DS_FULL = 1, DS_FREE, LOADERS = DS_FREE + 2 }; /* barriers; 0 is __syncthreads() */
/* What is loaded at once: Q, dO, lse and r of a block of queries (items 0 to 3), V, K in its two places. */
enum { V_ITEM = BLOCKS, K_ITEM, ITEMS = K_ITEM + 2 };

template <int D> struct layout {
    static constexpr int aligned(int bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
    static constexpr int COLUMNS = D / 8, STEPS = (D + 15) / 16, MATRIX = aligned(COLUMNS * COLUMN);
    static constexpr int BLOCK = aligned(COLUMNS * QUERY_COLUMN), ROW = D * 2;
    static constexpr int Q = 0, DOUT = BLOCKS * BLOCK, V = 2 * DOUT, K = V + MATRIX;
    static constexpr int DS = K + 2 * MATRIX, DS_BYTES = QUERIES / 8 * DS_COLUMN;
    static constexpr int ZEROS = DS + (DS_BYTES > TOKENS * ROW ? DS_BYTES : TOKENS * ROW);
    static constexpr int LSE = ZEROS + COLUMNS % 2 * QUERIES * 16;
    static constexpr int ROWS = LSE + TOKENS * (int)sizeof(float);
    static constexpr int SLOTS = ROWS + TOKENS * (int)sizeof(float);
    static constexpr int BARRIERS = SLOTS + (DQ_SLOTS + DV_SLOTS) * D * (int)sizeof(float);
    static constexpr int ZERO = BARRIERS + 2 * ITEMS * (int)sizeof(uint64_t), BYTES = ZERO + 16;
};

template <typename T> struct short_args {
    const T *q, *k, *v, *dout, *o;
    const float *lse;
    int64_t q_stride, kv_stride;
    CUtensorMap dq, dk, dv; /* boxes of QUERIES, WARP_ROWS, WARP_ROWS rows */
    float *sums;            // (B, 3, H, d), or NULL: column sums of dq, dk (0), dv
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
    template <int COUNT, int PITCH, typename T>
    __device__ __forceinline__ void rows(uint32_t to, const T *from, int64_t stride) const
    {
        if (row >= PASS) return;
        to += column * PITCH + row * 16;
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
    const char *x =
        shared + q0 / QUERIES * L::BLOCK + threadIdx.x % 2 * QUERY_COLUMN + threadIdx.x / 2 * 16;
#pragma unroll
    for (int c = 0; c < L::COLUMNS; c += 2, x += 2 * QUERY_COLUMN) {
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
/* dQ of block i lies where its dO was, in rows: out with it. */
template <typename T, int D>
static __device__ __forceinline__ void retire(const short_args<T> &a, const head<D> &h,
                                              uint32_t base, int i)
{
    using L = layout<D>;
    if (threadIdx.x == 0) {
        put(&a.dq, h.column, h.row + i * QUERIES, base + L::DOUT + i * L::BLOCK);
        puts_end();
        puts_wait<0>();
    }
    barrier_sync(LOADERS, GROUP);
}
/* Every item is waited for when the copies of the next one are under way. */
template <typename T, int D>
static __device__ __forceinline__ void load_heads(const short_args<T> &a, char *shared)
{
    using L = layout<D>;
    uint32_t base = shared_address(shared), barriers = base + L::BARRIERS;
    loader<D> l;
    int64_t stride = (int64_t)a.H * D;
    int at = blockIdx.x, n = 0;
#pragma unroll 1
    for (; at < a.heads; at += gridDim.x, n++) {
        head<D> h(at, a.H);
        item k(barriers, K_ITEM + n % 2), v(barriers, V_ITEM);
        uint32_t last = item(barriers, BLOCKS - 1).full;
        if (n >= 2) mbarrier_wait(k.free, n / 2 + 1);
        l.template rows<TOKENS, COLUMN>(base + L::K + n % 2 * L::MATRIX, h.in(a.k, a.kv_stride),
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
                l.template rows<TOKENS, COLUMN>(base + L::V, h.in(a.v, a.kv_stride), a.kv_stride);
                copies_end();
                copies_wait<0>();
                mbarrier_arrive(last);
                mbarrier_arrive(v.full);
            }
            if (n) mbarrier_wait(q.free, n + 1);
            l.template rows<QUERIES, QUERY_COLUMN>(base + L::Q + i * L::BLOCK,
                                                   h.in(a.o, stride) + q0 * stride, stride);
            if (n) retire<T, D>(a, head<D>(at - gridDim.x, a.H), base, i);
            l.template rows<QUERIES, QUERY_COLUMN>(base + L::DOUT + i * L::BLOCK,
                                                   h.in(a.dout, stride) + q0 * stride, stride);
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
            l.template rows<QUERIES, QUERY_COLUMN>(
                base + L::Q + i * L::BLOCK, h.in(a.q, a.q_stride) + q0 * a.q_stride, a.q_stride);
            copies_end();
            last = q.full;
        }
    }
    copies_wait<0>();
    mbarrier_arrive(item(barriers, BLOCKS - 1).full);
#pragma unroll 1
    for (int i = 0; i < BLOCKS; i++) {
        mbarrier_wait(item(barriers, i).free, n + 1);
        retire<T, D>(a, head<D>(at - gridDim.x, a.H), base, i);
    }
}
