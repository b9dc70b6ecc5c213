/* Attention's backward for 256 tokens (short_attention.cu): what lies where in shared memory, and the
 * warpgroup that fills it with operands and empties it of results, both by TMA.
 *
 * All operands lie in columns of 8 elements, 16 bytes a row, which serve a matrix and its transpose
 * alike: K (two places) and V in COLUMNs of 256 rows, Q and dO block by block in QUERY_COLUMNs of 64. The
 * inner dimension of the products of rows comes in steps of 16: at d = 72 the last step's second column
 * is one of zeros for Q and dO, and for K and V the last one again. Results lie in rows: dQ of a block
 * where its dO was, dK where the head's K was, dV in dS^T's place, for which it is 4096 bytes longer.
 *
 * Bytes at d = 72: 2 x 36,864 (Q, dO), 3 x 36,864 (V, K, K), 36,864 (dS^T of a block, dV), 1024 (zeros),
 * 2048 (lse, r), 3456 (sums for dbias), 192 (barriers), 16: 227,920.
 *
 * The warpgroup goes in steps of a block of queries. Step i of a head, whose places have held the head
 * before:
 *
 *     V is asked for, when i = 3 and the head before is done with it
 *     dQ i of the head before leaves; o i is asked for, to Q's place, dO i, and K when i = 1
 *     r of block i - 1 = rows' sums of dO o, when these have come; then Q of block i - 1 is asked for
 *     dV and dK of the head before leave, when i = 3
 *
 * A thread asks; all make r. */
#pragma once
#include "kernels/cuda/head_boxes.cuh"

enum { TOKENS = 256, GROUP = 128, THREADS = 3 * GROUP, KEYS = 64, QUERIES = 64, PART = 32 };
enum { BLOCKS = TOKENS / QUERIES, COLUMN = TOKENS * 16, DS_COLUMN = TOKENS * 16 };
enum { QUERY_COLUMN = QUERIES * 16, BOX_ALIGNMENT = 128 };
enum { DQ_SLOTS = 4, DV_SLOTS = 8 }; /* a warp each */
/* The hardware's barriers; 0 is __syncthreads(). */
enum { DS_FULL = 1, DS_FREE, LOADERS = DS_FREE + 2 };
/* What comes at once, for those who compute: Q, dO, lse and r of a block of queries (items 0 to 3), V, K
 * in its two places; what leaves at once: dK and dV; and SUMS + i, what r of block i is made of. */
enum { V_ITEM = BLOCKS, K_ITEM, RESULTS = K_ITEM + 2, SUMS, ITEMS = SUMS + BLOCKS };

template <int D> struct layout {
    static constexpr int aligned(int bytes)
    {
        return (bytes + BOX_ALIGNMENT - 1) / BOX_ALIGNMENT * BOX_ALIGNMENT;
    }
    static constexpr int COLUMNS = D / 8, STEPS = (D + 15) / 16, ROW = D * 2;
    static constexpr int BLOCK = aligned(COLUMNS * QUERY_COLUMN);
    static constexpr int MATRIX = aligned(COLUMNS * COLUMN);
    static constexpr int DS_BYTES = QUERIES / 8 * DS_COLUMN, DV_BYTES = TOKENS * ROW;
    static constexpr int Q = 0, DOUT = BLOCKS * BLOCK, V = 2 * DOUT, K = V + MATRIX;
    static constexpr int DS = K + 2 * MATRIX;
    static constexpr int ZEROS = DS + (DS_BYTES > DV_BYTES ? DS_BYTES : DV_BYTES);
    static constexpr int LSE = ZEROS + COLUMNS % 2 * QUERIES * 16;
    static constexpr int ROWS = LSE + TOKENS * (int)sizeof(float);
    static constexpr int SLOTS = ROWS + TOKENS * (int)sizeof(float);
    static constexpr int BARRIERS = SLOTS + (DQ_SLOTS + DV_SLOTS) * D * (int)sizeof(float);
    static constexpr int ZERO = BARRIERS + 2 * ITEMS * (int)sizeof(uint64_t), BYTES = ZERO + 16;
    static_assert(BYTES <= 227 * 1024, "what a block may have");
};

template <typename T> struct short_args {
    CUtensorMap q, k, v, dout, o; /* boxes by 8 columns: QUERIES or TOKENS rows */
    const float *lse;
    CUtensorMap dq, dk, dv; /* boxes of QUERIES, TOKENS, TOKENS rows of a head */
    float *sums;            // (B, 3, H, d), or NULL: column sums of dq, dk (0), dv
    float scale;
    int H, heads; /* of a sample, of all samples */
};
/* Head `at` of all B x H: where its rows begin. */
template <int D> struct head {
    int row, column, H;
    __device__ __forceinline__ head(int at, int heads_a_sample)
        : row(at / heads_a_sample * TOKENS), column(at % heads_a_sample * D), H(heads_a_sample)
    {
    }
    template <typename P> __device__ __forceinline__ P *in(P *p, int64_t stride) const
    {
        return p + row * stride + column;
    }
};
/* An item's two barriers: it is there; it is not needed any more. Results: they are, they have left. */
struct item {
    uint32_t full, free;
    __device__ __forceinline__ item(uint32_t barriers, int i)
        : full(barriers + 16 * i), free(barriers + 16 * i + 8)
    {
    }
};
/* Until the barrier was completed `use` + 1 times (-1: at once). Who waits is less than two uses behind. */
static __device__ __forceinline__ void wait_for(uint32_t barrier, int use)
{
    mbarrier_wait(barrier, (uint32_t)use & 1);
}

/* A box of 8 columns after 8 columns to shared memory; the barrier is told. */
static __device__ __forceinline__ void fetch_columns(uint32_t to, const CUtensorMap *from, int row,
                                                     int column, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(from), "r"(0), "r"(row), "r"(column / 8), "r"(barrier)
                 : "memory");
}
/* lse, and the rows' sums of dout o of block i, where dO has come, and o in Q's place. */
template <typename T, int D>
static __device__ __forceinline__ void row_sums(char *shared, int i, float log_sum)
{
    using L = layout<D>;
    int row = threadIdx.x / 2, q = i * QUERIES + row;
    float sum = 0, *lse = (float *)(shared + L::LSE);
    const char *x = shared + i * L::BLOCK + threadIdx.x % 2 * QUERY_COLUMN + row * 16;
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
    lse[q] = log_sum * LOG2_E;
}

template <typename T, int D> struct loading {
    using L = layout<D>;
    static constexpr int BLOCK_BYTES = QUERIES * D * 2, MATRIX_BYTES = TOKENS * D * 2;
    const short_args<T> &a;
    char *shared;
    uint32_t base, barriers;
    __device__ __forceinline__ loading(const short_args<T> &args, char *memory)
        : a(args), shared(memory), base(shared_address(memory)), barriers(base + L::BARRIERS)
    {
    }
    /* Step i of the block's n-th head, `at`; past the last head only its results are left. */
    __device__ __forceinline__ void step(int at, int n, int i) const
    {
        const bool more = at<a.heads, some_before = n> 0;
        const int before = at - gridDim.x, i_before = (i + BLOCKS - 1) % BLOCKS;
        item queries(barriers, i), v(barriers, V_ITEM);
        if (threadIdx.x == 0) {
            head<D> h(at, a.H);
            if (more && i == BLOCKS - 1) {
                if (some_before) wait_for(v.free, n + 1);
                mbarrier_expect(v.full, MATRIX_BYTES);
                fetch_columns(base + L::V, &a.v, h.row, h.column, v.full);
            }
            if (some_before) {
                wait_for(queries.free, n + 1);
                head<D> b(before, a.H);
                put(&a.dq, b.column, b.row + i * QUERIES, base + L::DOUT + i * L::BLOCK);
                puts_end();
            }
            uint32_t came = item(barriers, SUMS + i).full;
            if (more) {
                mbarrier_expect(came, 2 * BLOCK_BYTES);
                fetch_columns(base + L::Q + i * L::BLOCK, &a.o, h.row + i * QUERIES, h.column,
                              came);
            }
            puts_wait<0>();
            if (more) {
                fetch_columns(base + L::DOUT + i * L::BLOCK, &a.dout, h.row + i * QUERIES, h.column,
                              came);
                if (i == 1) {
                    item k(barriers, K_ITEM + n % 2);
                    mbarrier_expect(k.full, MATRIX_BYTES);
                    fetch_columns(base + L::K + n % 2 * L::MATRIX, &a.k, h.row, h.column, k.full);
                }
            }
        }
        __syncwarp();
        if (i ? more : some_before) rest(i ? at : before, i ? n : n - 1, i_before);
        if (some_before && i == BLOCKS - 1) put_keys(before, n - 1);
    }
    /* What o was needed for, and Q in its place. */
    __device__ __forceinline__ void rest(int at, int n, int i) const
    {
        uint32_t full = item(barriers, i).full;
        float log_sum =
            threadIdx.x % 2 ? 0 : a.lse[(int64_t)at * TOKENS + i * QUERIES + threadIdx.x / 2];
        wait_for(item(barriers, SUMS + i).full, n);
        row_sums<T, D>(shared, i, log_sum);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_sync(LOADERS, GROUP);
        if (threadIdx.x) return mbarrier_arrive(full);
        head<D> h(at, a.H);
        mbarrier_expect(full, BLOCK_BYTES);
        fetch_columns(base + L::Q + i * L::BLOCK, &a.q, h.row + i * QUERIES, h.column, full);
    }
    /* dV and dK of the block's n-th head. */
    __device__ __forceinline__ void put_keys(int at, int n) const
    {
        if (threadIdx.x) return;
        item results(barriers, RESULTS);
        wait_for(results.full, n);
        head<D> h(at, a.H);
        put(&a.dv, h.column, h.row, base + L::DS);
        puts_end();
        put(&a.dk, h.column, h.row, base + L::K + n % 2 * L::MATRIX);
        puts_end();
        puts_wait<1>(); /* dS^T's place is what the others wait for */
        mbarrier_arrive(results.free);
    }
    __device__ __forceinline__ void heads() const
    {
#pragma unroll 1
        for (int at = blockIdx.x, n = 0; at < a.heads + (int)gridDim.x; at += gridDim.x, n++)
#pragma unroll 1
            for (int i = 0; i < BLOCKS; i++) step(at, n, i);
        if (threadIdx.x == 0) puts_done();
    }
};
