/* Backward of attention over many tokens on the tensor cores (wgmma): any numbers of queries and keys, d = 64, 72 or
 * 128, bf16 or fp16, no key lengths. Always the same bits.
 *
 *     r = rows' sums of dout o,  P = exp(scale Q K^T - lse),  dS = P (dO V^T - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * Three kernels. The first computes r and -lse log2 e, the third rounds dQ. In the second, after FlashAttention-3 (Shah
 * and others, 2024), an item is 128 keys of a head, whose dK and dV stay in registers, 64 keys a warpgroup, while
 * blocks of queries pass by. The products' results are transposed: S^T and dP^T, from which P^T and dS^T come as left
 * operands of dV and dK; dS^T also goes to shared memory, and both warpgroups multiply it by K: each 64 rows (d > 64,
 * where a block has 64 queries and not 128: half of the columns) of a part of dQ. The next block's S^T is begun before that part is taken.
 *
 * Parts of dQ are added up in global memory, in fp32, in the order of the keys: a warp of its own waits until a
 * counter, of the head and the block of queries, says how many parts are in the sum; TMA adds this one; when that is
 * done, the counter goes on. All items go through the blocks of queries in the same order, so an item of a head
 * follows that before it at a distance and seldom waits. Items are numbered: 0 to `together` - 1 are the first keys of
 * as many heads, then their second ones, and so on, then those of the next heads. A block takes the next number when
 * it is done with its item (a counter, too): an item waits for items of smaller numbers alone, and these have been
 * taken by blocks that run. So the smallest of the unfinished ones never waits, and all end, however many blocks
 * the GPU runs at a time.
 *
 * dS is computed with P as it was rounded for dV: then P need not be kept twice. Its error is as large as that of
 * rounding dS itself.
 *
 * Queries beyond the last come as zeros, with -lse = -inf: their P and dS are 0. Scores of keys beyond the last are
 * set to -inf.
 *
 * Shared memory: K and V (d = 128: once, else twice), Q and dO twice, dS twice, a part of dQ. Bytes at d = 64: 231,856.
 *
 * Scratch: dQ in fp32, two floats a query and head, counters. */
#include "kernels/cuda/long_attention.h"
#include "kernels/cuda/long_attention_tiles.cuh"
#include <cstdlib>

enum {
    KEYS = 128,
    GROUPS = 2,
    THREADS = (GROUPS + 1) * GROUP,
    ROWS = 64 /* keys of a warpgroup */
};
enum { LOADER_REGISTERS = 24, REGISTERS = 240, SMALL_THREADS = 256, DS_PANEL = KEYS * 128 };
enum { LOAD_WARP = 0, ADD_WARP = 1, ADDERS = 2, WARPS = GROUPS * GROUP / WARP };
enum { DS_FULL = 1 }; /* hardware barrier */

template <int D> struct backward_layout {
    static constexpr int QUERIES = D > 64 ? 64 : 128, KV_STAGES = D > 96 ? 1 : 2;
    /* Columns of a warpgroup's product for dQ; the second one's first. Of d = 72 both have 8. */
    static constexpr int N = QUERIES == 128 ? D : D == 72 ? 40 : D / GROUPS, SECOND = D - N;
    static constexpr int KV_TILE = panels<D>::bytes(KEYS), Q_TILE = panels<D>::bytes(QUERIES);
    static constexpr int DS_TILE = QUERIES * KEYS * 2, DQ_HALF = ROWS * N * 4;
    static constexpr int DQ_FLOATS = GROUPS * ROWS * N;
    static constexpr int K = 0, V = K + KV_STAGES * KV_TILE, Q = V + KV_STAGES * KV_TILE;
    static constexpr int DOUT = Q + 2 * Q_TILE, DS = DOUT + 2 * Q_TILE, DQ = DS + 2 * DS_TILE;
    static constexpr int LSE = DQ + GROUPS * DQ_HALF, SUMS = LSE + 2 * QUERIES * 4;
    static constexpr int ITEM = SUMS + 2 * QUERIES * 4, BARRIERS = ITEM + 16;
    /* Pairs of barriers. */
    static constexpr int K_CAME = BARRIERS, V_CAME = K_CAME + 16 * KV_STAGES;
    static constexpr int Q_CAME = V_CAME + 16 * KV_STAGES, DOUT_CAME = Q_CAME + 32;
    static constexpr int DQ_CAME = DOUT_CAME + 32, ITEM_CAME = DQ_CAME + 32;
    static constexpr int BYTES = ITEM_CAME + 32;
    static_assert(BYTES <= LG_CUDA_SHARED_HOPPER, "of a block");
};
struct backward_args {
    CUtensorMap q, k, v, dout, dk, dv;
    const float *minus_lse, *sums; // (heads, blocks QUERIES)
    float *dq;                     // (heads, blocks, halves ...)
    uint32_t *added;               // (heads, blocks): parts that are in dq; then the next item
    float scale;
    int Tk, H, heads, blocks, tiles; /* blocks of queries and tiles of keys of a head */
    int together;
};
/* What an item is. */
struct item_of {
    int head, tile;
    place at;
    __device__ __forceinline__ item_of(const backward_args &a, int number)
    {
        int first = number / (a.together * a.tiles) * a.together;
        int heads = min(a.together, a.heads - first), rest = number - first * a.tiles;
        tile = rest / heads;
        head = first + rest % heads;
        at = {tile * KEYS, head % a.H, head / a.H};
    }
};

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "0, 0");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void scores(float (&d)[64], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("128", type, N64, F64(d, 0), "%64", "%65", "%66", "0, 0");              \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[32], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "1, 1");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[20], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("40", type, N20, F16(d, 0) COMMA F4(d, 16), "%20", "%21", "%22",        \
                           "1, 1");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[32], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32, %33, %34, %35",   \
                              "%36");                                                              \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[36], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("72", type, N36, F16(d, 0) COMMA F16(d, 16) COMMA F4(d, 32),         \
                              "%36, %37, %38, %39", "%40");                                        \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[64], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("128", type, N64, F64(d, 0), "%64, %65, %66, %67", "%68");           \
        }                                                                                          \
    };
TENSOR_CORE(bf16, "bf16")
TENSOR_CORE(fp16, "f16")

/* The n-th use of one of N places, whose pairs of barriers begin at `pairs`: until it has come, or is free. */
template <int N> static __device__ __forceinline__ uint32_t came(uint32_t pairs, int n)
{
    return pairs + n % N * 16;
}
template <int N> static __device__ __forceinline__ void wait_came(uint32_t pairs, int n)
{
    mbarrier_wait(came<N>(pairs, n), n / N % 2);
}
template <int N> static __device__ __forceinline__ void wait_free(uint32_t pairs, int n)
{
    mbarrier_wait(came<N>(pairs, n) + 8, n / N % 2 ^ 1);
}
/* The block's n-th item, or -1; by one lane or all of a warp. */
template <int D> static __device__ __forceinline__ int number_of(uint32_t shared, int n, bool all)
{
    using L = backward_layout<D>;
    int number;
    uint32_t pairs = shared + L::ITEM_CAME;
    wait_came<2>(pairs, n);
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(number)
                 : "r"(shared + L::ITEM + n % 2 * 4)
                 : "memory");
    all ? warp_arrive(came<2>(pairs, n) + 8) : mbarrier_arrive(came<2>(pairs, n) + 8);
    return number;
}

/* ---- the thread that fetches ---- */

static __device__ __forceinline__ void fetch_floats(uint32_t to, const float *from, int count,
                                                    uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(count * 4), "r"(barrier)
                 : "memory");
}
template <int D>
static __device__ __forceinline__ void produce(const backward_args &a, uint32_t shared)
{
    using L = backward_layout<D>;
    constexpr int KV = L::KV_STAGES;
    for (int n = 0, m = 0;; n++) { /* items, steps */
        int number = (int)atomicAdd(a.added + a.heads * a.blocks, 1);
        if (number >= a.heads * a.tiles) number = -1;
        wait_free<2>(shared + L::ITEM_CAME, n);
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(shared + L::ITEM + n % 2 * 4), "r"(number)
                     : "memory");
        mbarrier_arrive(came<2>(shared + L::ITEM_CAME, n));
        if (number < 0) break;
        item_of z(a, number);
        uint32_t barrier = came<KV>(shared + L::K_CAME, n);
        wait_free<KV>(shared + L::K_CAME, n);
        mbarrier_expect(barrier, L::KV_TILE);
        fetch_tile<D, KEYS>(shared + L::K + n % KV * L::KV_TILE, &a.k, z.at, barrier);
#pragma unroll 1
        for (int i = 0; i < a.blocks; i++, m++) {
            place at = {i * L::QUERIES, z.at.head, z.at.sample};
            int rows = (z.head * a.blocks + i) * L::QUERIES, stage = m % 2;
            barrier = came<2>(shared + L::Q_CAME, m);
            wait_free<2>(shared + L::Q_CAME, m);
            mbarrier_expect(barrier, L::Q_TILE + L::QUERIES * 4);
            fetch_tile<D, L::QUERIES>(shared + L::Q + stage * L::Q_TILE, &a.q, at, barrier);
            fetch_floats(shared + L::LSE + stage * L::QUERIES * 4, a.minus_lse + rows, L::QUERIES,
                         barrier);
            if (i == 0) {
                barrier = came<KV>(shared + L::V_CAME, n);
                wait_free<KV>(shared + L::V_CAME, n);
                mbarrier_expect(barrier, L::KV_TILE);
                fetch_tile<D, KEYS>(shared + L::V + n % KV * L::KV_TILE, &a.v, z.at, barrier);
            }
            barrier = came<2>(shared + L::DOUT_CAME, m);
            wait_free<2>(shared + L::DOUT_CAME, m);
            mbarrier_expect(barrier, L::Q_TILE + L::QUERIES * 4);
            fetch_tile<D, L::QUERIES>(shared + L::DOUT + stage * L::Q_TILE, &a.dout, at, barrier);
            fetch_floats(shared + L::SUMS + stage * L::QUERIES * 4, a.sums + rows, L::QUERIES,
                         barrier);
        }
    }
}

/* ---- the threads that add up dQ ---- */

/* Every second part. */
template <int D>
static __device__ __forceinline__ void add_up(const backward_args &a, uint32_t shared, int turn)
{
    using L = backward_layout<D>;
    for (int n = 0, m = 0, number; (number = number_of<D>(shared, n, false)) >= 0; n++) {
        item_of z(a, number);
        uint32_t *added = a.added + z.head * a.blocks, parts;
        float *to = a.dq + (int64_t)z.head * a.blocks * L::DQ_FLOATS;
        for (int i = 0; i < a.blocks; i++, m++, added++, to += L::DQ_FLOATS) {
            if (m % ADDERS != turn) continue;
#ifndef LG_NO_WAIT
            do
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                             : "=r"(parts)
                             : "l"(added)
                             : "memory");
            while (parts != (uint32_t)z.tile);
#endif
            wait_came<ADDERS>(shared + L::DQ_CAME, m);
            asm volatile("fence.proxy.async;" ::: "memory");
#ifndef LG_NO_ADD
            if (z.tile == 0)
                asm volatile(
                    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                    "r"(shared + L::DQ), "r"(L::DQ_FLOATS * 4)
                    : "memory");
            else
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                             "[%0], [%1], %2;" ::"l"(to),
                             "r"(shared + L::DQ), "r"(L::DQ_FLOATS * 4)
                             : "memory");
#endif
            puts_end();
            puts_wait<0>();
            mbarrier_arrive(came<ADDERS>(shared + L::DQ_CAME, m) + 8);
            puts_done();
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], %1;" ::"l"(added),
                         "r"(z.tile + 1)
                         : "memory");
        }
    }
}

/* ---- a warpgroup that computes ---- */

template <typename T, int D> struct computing {
    using L = backward_layout<D>;
    static constexpr int QUERIES = L::QUERIES, S = QUERIES / 2, P = QUERIES / 4;
    const backward_args &a;
    uint32_t shared, ds; /* ds: where the thread's warp writes dS^T */
    int n = 0, m = 0;    /* items and steps that were */
    int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % WARP;
    int row = group * ROWS + threadIdx.x % GROUP / WARP * 16; /* the warp's first key of the tile */
    __device__ __forceinline__ computing(const backward_args &args, uint32_t memory)
        : a(args), shared(memory)
    {
        ds = shared + L::DS + (row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    }
    __device__ __forceinline__ uint32_t k_tile() const
    {
        return shared + L::K + n % L::KV_STAGES * L::KV_TILE;
    }
    /* Of this step, what lies twice. */
    __device__ __forceinline__ uint32_t block(int at, int bytes) const
    {
        return shared + at + m % 2 * bytes;
    }
    /* x = the group's 64 rows of a tile of keys times a block's rows, transposed; begun. */
    __device__ __forceinline__ void begin_rows(float (&x)[S], uint32_t keys, uint32_t block) const
    {
        uint32_t k = tile_start<D, KEYS>(keys + group * ROWS * panels<D>::ROW);
        uint32_t b = tile_start<D, QUERIES>(block);
        products_begin();
#pragma unroll
        for (int s = 0; s < panels<D>::STEPS; s++)
            tensor_core<T>::scores(x, columns_at<D, KEYS>(k, s), columns_at<D, QUERIES>(b, s),
                                   s > 0);
        products_end();
    }
    /* x (64 keys, D) += p (64 keys, a block's queries) times the block; begun. */
    __device__ __forceinline__ void begin_adding(float (&x)[D / 2], const uint32_t (&p)[P],
                                                 uint32_t block) const
    {
        uint32_t b = tile_start<D, QUERIES>(block);
        products_begin();
#pragma unroll
        for (int s = 0; s < QUERIES / 16; s++) tensor_core<T>::keys(x, p + 4 * s, rows_at<D>(b, s));
        products_end();
    }
    /* x = the group's half of dS K; begun. */
    __device__ __forceinline__ void begin_dq(float (&x)[L::N / 2], uint32_t ds_tile,
                                             uint32_t k) const
    {
        constexpr int RIGHT = L::SECOND / panels<D>::COLUMNS * KEYS * panels<D>::ROW;
        uint32_t left = again(operand_start(ds_tile + (RIGHT ? 0 : group * DS_PANEL), DS_PANEL));
        uint32_t right = tile_start<D, KEYS>(k + group * RIGHT);
        products_begin();
#pragma unroll
        for (int s = 0; s < KEYS / 16; s++)
            tensor_core<T>::queries(x, operand_at(left + s * 128, 1024, 1), rows_at<D>(right, s),
                                    s > 0);
        products_end();
    }
    __device__ __forceinline__ void begin_scores(float (&s)[S]) const
    {
        wait_came<2>(shared + L::Q_CAME, m);
        begin_rows(s, k_tile(), block(L::Q, L::Q_TILE));
    }
    /* p = P^T of S^T, rounded. */
    __device__ __forceinline__ void weights(uint32_t (&p)[P], float (&s)[S], uint32_t minus_lse,
                                            int keys) const
    {
        float factor = a.scale * LOG2_E;
        if (keys < ROWS) {
#pragma unroll
            for (int i = 0; i < S; i++)
                if (row % ROWS + lane / 4 + i / 2 % 2 * 8 >= keys) s[i] = -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++) {
            float2 l = two_floats(minus_lse + j * 32);
#pragma unroll
            for (int e = 0; e < 2; e++)
                p[2 * j + e] = packed(exp2_of(fmaf(s[4 * j + 2 * e], factor, l.x)),
                                      exp2_of(fmaf(s[4 * j + 2 * e + 1], factor, l.y)), T());
        }
    }
    /* g = dS^T of P^T and dP^T, rounded; also to shared memory. */
    __device__ __forceinline__ void score_gradients(uint32_t (&g)[P], const uint32_t (&p)[P],
                                                    const float (&dp)[S], uint32_t sums,
                                                    uint32_t to) const
    {
#pragma unroll
        for (int j = 0; j < QUERIES / 8; j++) {
            float2 l = two_floats(sums + j * 32);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float2 w = two<T>(p[2 * j + e]);
                g[2 * j + e] = packed(w.x * (dp[4 * j + 2 * e] - l.x),
                                      w.y * (dp[4 * j + 2 * e + 1] - l.y), T());
            }
            if (j % 2) /* columns 8 (j - 1) and on */
                store_matrices((to ^ (j - 1) % 8 * 16) + j / 8 * DS_PANEL, g + 2 * j - 2);
        }
    }
    static __device__ __forceinline__ float2 two_floats(uint32_t at)
    {
        float2 x;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
        return x;
    }
    /* Of a block of queries, whose S^T is under way: dV, and dS^T to g and to shared memory. No product is under way
     * at the end: around a loop ptxas would serialise all of them (C7514). */
    __device__ __forceinline__ void key_side(float (&s)[S], uint32_t (&g)[P], float (&dv)[D / 2],
                                             int i, int keys)
    {
        float dp[S];
        uint32_t p[P], dout = block(L::DOUT, L::Q_TILE);
        if (i == 0) wait_came<L::KV_STAGES>(shared + L::V_CAME, n);
        wait_came<2>(shared + L::DOUT_CAME, m);
        begin_rows(dp, k_tile() + L::V - L::K, dout);
        products_wait<1>();
        settled(s);
        weights(p, s, block(L::LSE, QUERIES * 4) + lane % 4 * 8, keys);
        begin_adding(dv, p, dout);
        products_wait<1>();
        settled(dp);
        score_gradients(g, p, dp, block(L::SUMS, QUERIES * 4) + lane % 4 * 8,
                        ds + m % 2 * L::DS_TILE);
        products_wait<0>();
        settled(dv);
        warp_arrive(came<2>(shared + L::DOUT_CAME, m) + 8);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_sync(DS_FULL, GROUPS * GROUP);
    }
    /* Of the same block, dK and a part of dQ; begins S^T of the next one, unless it is the LAST. */
    template <bool LAST>
    __device__ __forceinline__ void query_side(float (&s)[S], const uint32_t (&g)[P],
                                               float (&dk)[D / 2])
    {
        float dq[L::N / 2];
        begin_dq(dq, block(L::DS, L::DS_TILE), k_tile());
        begin_adding(dk, g, block(L::Q, L::Q_TILE));
        m++;
        if constexpr (!LAST) {
            begin_scores(s);
            products_wait<2>();
        } else {
            products_wait<1>();
        }
        settled(dq);
        /* The part before this one, which has one place with it, has been read. */
        if (m > 1) mbarrier_wait(came<2>(shared + L::DQ_CAME, m - 2) + 8, (m - 2) / 2 % 2);
        uint32_t to = shared + L::DQ + group * L::DQ_HALF + threadIdx.x % GROUP * 16;
#pragma unroll
        for (int j = 0; j < L::N / 8; j++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * GROUP * 16),
                         "f"(dq[4 * j]), "f"(dq[4 * j + 1]), "f"(dq[4 * j + 2]), "f"(dq[4 * j + 3])
                         : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(came<2>(shared + L::DQ_CAME, m - 1));
        products_wait<LAST ? 0 : 1>(); /* g is free: there are no registers for it, S and dP */
        settled(dk);
        warp_arrive(came<2>(shared + L::Q_CAME, m - 1) + 8);
    }
    /* dK and dV, where K and V were. */
    __device__ __forceinline__ void store(const float (&dk)[D / 2], const float (&dv)[D / 2],
                                          place at)
    {
        uint32_t k = k_tile() + row * panels<D>::ROW, v = k + L::V - L::K;
        barrier_sync(DS_FULL, GROUPS * GROUP); /* both groups' products have read K */
        stage_rows<T, D, KEYS>(k, dk, a.scale);
        stage_rows<T, D, KEYS>(v, dv, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            at.token += row;
            put_rows<D, KEYS>(&a.dk, at, k);
            put_rows<D, KEYS>(&a.dv, at, v);
            puts_end();
            puts_wait<0>();
            mbarrier_arrive(came<L::KV_STAGES>(shared + L::K_CAME, n) + 8);
            mbarrier_arrive(came<L::KV_STAGES>(shared + L::V_CAME, n) + 8);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void items()
    {
#pragma unroll 1
        for (int number; (number = number_of<D>(shared, n, true)) >= 0; n++) {
            item_of z(a, number);
            float s[S], dk[D / 2] = {}, dv[D / 2] = {};
            int keys = a.Tk - z.at.token - group * ROWS; /* that the group has */
            wait_came<L::KV_STAGES>(shared + L::K_CAME, n);
            uint32_t g[P];
            begin_scores(s);
            key_side(s, g, dv, 0, keys);
#pragma unroll 1
            for (int i = 1; i < a.blocks; i++) {
                query_side<false>(s, g, dk);
                key_side(s, g, dv, i, keys);
            }
            query_side<true>(s, g, dk);
            store(dk, dv, z.at);
        }
        if (lane == 0) puts_done();
    }
};

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 1)
    long_backward_kernel(const __grid_constant__ backward_args a)
{
    using L = backward_layout<D>;
    extern __shared__ __align__(1024) char memory[];
    uint32_t shared = shared_address(memory);
    if (threadIdx.x == 0)
        for (int at = L::BARRIERS; at < L::BYTES; at += 16) {
            bool dq = at >= L::DQ_CAME && at < L::ITEM_CAME;
            int readers = at >= L::ITEM_CAME ? WARPS + ADDERS : WARPS;
            mbarrier_begin(shared + at, dq ? WARPS : 1);
            mbarrier_begin(shared + at + 8, dq ? 1 : readers);
        }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<LOADER_REGISTERS>();
        if (threadIdx.x == LOAD_WARP * WARP) produce<D>(a, shared);
        int adder = threadIdx.x / WARP - ADD_WARP;
        if (threadIdx.x % WARP == 0 && adder >= 0 && adder < ADDERS) add_up<D>(a, shared, adder);
    } else {
        registers_take<REGISTERS>();
        computing<T, D>(a, shared).items();
    }
}

/* ---- before and after ---- */

template <typename T> struct before_args {
    const T *dout, *o;       // (B, Tq, H, D)
    const float *lse;        // (B, H, Tq)
    float *minus_lse, *sums; // (B, H, rows)
    uint32_t *counters;
    int64_t counts; /* of those */
    int Tq, H, rows;
    int64_t all; /* B rows H */
};
template <int D> constexpr int LANES = D > 96 ? 16 : 8; /* of a row */

template <typename T, int D>
static __global__ void __launch_bounds__(SMALL_THREADS) before_kernel(const before_args<T> a)
{
    int64_t thread = (int64_t)blockIdx.x * SMALL_THREADS + threadIdx.x, n = thread / LANES<D>;
    int64_t step = (int64_t)gridDim.x * SMALL_THREADS;
    for (int64_t i = thread; i < a.counts; i += step) a.counters[i] = 0;
    int h = (int)(n % a.H), t = (int)(n / a.H % a.rows);
    int64_t b = n / a.H / a.rows;
    bool there = n < a.all && t < a.Tq;
    float sum = 0;
    if (there)
        for (int c = threadIdx.x % LANES<D> * 8; c < D; c += LANES<D> * 8) {
            int64_t from = ((b * a.Tq + t) * a.H + h) * D + c;
            float x[8], y[8];
            load<T, 8>(a.dout + from, x);
            load<T, 8>(a.o + from, y);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += x[e] * y[e];
        }
#pragma unroll
    for (int o = LANES<D> / 2; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);
    if (n >= a.all || threadIdx.x % LANES<D>) return;
    int64_t to = (b * a.H + h) * a.rows + t;
    a.sums[to] = sum;
    a.minus_lse[to] = there ? -LOG2_E * a.lse[(b * a.H + h) * a.Tq + t] : -INFINITY;
}

template <typename T> struct after_args {
    const float *from;
    T *dq;
    int64_t stride;
    float scale;
    int Tq, H;
};
/* A block per half of a block of queries: (halves, heads, samples). */
template <typename T, int D>
static __global__ void __launch_bounds__(GROUP) after_kernel(const after_args<T> a)
{
    using L = backward_layout<D>;
    constexpr int N = L::N, ROW = N * 2 + 16;
    __shared__ __align__(16) char memory[ROWS * ROW];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half = blockIdx.x % GROUPS;
    int64_t head = (int64_t)blockIdx.z * a.H + blockIdx.y;
    const float *from = a.from + (head * gridDim.x + blockIdx.x) * (ROWS * N);
    uint32_t to = shared_address(memory) + (warp * 16 + lane % 16) * ROW + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t p[4] = {};
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (j + e < N / 8) {
                float x[4];
                load<float, 4>(from + ((j + e) * GROUP + threadIdx.x) * 4, x);
                p[2 * e] = packed(x[0] * a.scale, x[1] * a.scale, T());
                p[2 * e + 1] = packed(x[2] * a.scale, x[3] * a.scale, T());
            }
        if (j + 1 < N / 8)
            store_matrices(to + j * 16, p);
        else
            store_two_matrices(to + j * 16, p);
    }
    __syncwarp();
    int token = (L::QUERIES == 128 ? (int)blockIdx.x : (int)blockIdx.x / GROUPS) * ROWS;
    int column = half * L::SECOND, known = half && L::SECOND ? 2 * N - D : 0;
#pragma unroll
    for (int i = lane; i < 16 * N / 8; i += WARP) {
        int row = warp * 16 + i / (N / 8), c = i % (N / 8) * 8;
        if (token + row >= a.Tq || c < known) continue;
        T *out = a.dq + ((int64_t)blockIdx.z * a.Tq + token + row) * a.stride +
                 (int64_t)blockIdx.y * D + column + c;
        *reinterpret_cast<quad *>(out) =
            *reinterpret_cast<const quad *>(memory + row * ROW + c * 2);
    }
}

/* ---- on the host ---- */

struct pieces { /* of the scratch memory */
    size_t dq, floats, counters;
};
template <int D> static pieces pieces_for(const struct lg_attention_backward_args *a)
{
    using L = backward_layout<D>;
    size_t blocks =
        (size_t)(a->q.dim[0] * a->q.dim[2] * ceil_div(a->q.dim[1], L::QUERIES)); /* of all heads */
    return {lg_cuda_round_up(blocks * L::DQ_FLOATS * sizeof(float)),
            lg_cuda_round_up(blocks * L::QUERIES * sizeof(float)),
            lg_cuda_round_up((blocks + 1) * sizeof(uint32_t))};
}
/* How many heads' items are taken in turns: few enough that what they read and add to fits into the L2 (of half of
 * whose 50 MB they take: Q and dO in 16 bits, dQ in 32), and many, so that an item starts blocks of queries after that
 * before it. */
static int together_of(const struct lg_attention_backward_args *a)
{
    int64_t bytes = a->q.dim[1] * a->q.dim[3] * 8, n = (16 << 20) / bytes;
    if (getenv("LG_TOGETHER")) n = atoi(getenv("LG_TOGETHER"));
    return (int)LG_MAX(1, LG_MIN(n, a->q.dim[0] * a->q.dim[2]));
}
template <typename T, int D>
static void launch(lg_stream *stream, const struct lg_attention_backward_args *a)
{
    using L = backward_layout<D>;
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    int B = (int)a->q.dim[0], H = (int)a->q.dim[2], Tq = (int)a->q.dim[1], Tk = (int)a->k.dim[1];
    int blocks = (int)ceil_div(Tq, L::QUERIES), tiles = (int)ceil_div(Tk, KEYS);
    pieces bytes = pieces_for<D>(a);
    char *scratch = (char *)stream->scratch;
    float *dq = (float *)scratch, *minus_lse = (float *)(scratch + bytes.dq);
    float *sums = (float *)(scratch + bytes.dq + bytes.floats);
    uint32_t *added = (uint32_t *)(scratch + bytes.dq + 2 * bytes.floats);
    int64_t rows = (int64_t)blocks * L::QUERIES, all = B * rows * H;

    before_args<T> before = {(const T *)a->dout.data,
                             (const T *)a->o.data,
                             (const float *)a->lse.data,
                             minus_lse,
                             sums,
                             added,
                             (int64_t)B * H * blocks + 1,
                             Tq,
                             H,
                             (int)rows,
                             all};
    before_kernel<T, D>
        <<<(unsigned)ceil_div(all * LANES<D>, SMALL_THREADS), SMALL_THREADS, 0, cuda>>>(before);
    LG_CUDA_LAUNCHED();

    backward_args z = {panels_of<D>(&a->q, L::QUERIES),
                       panels_of<D>(&a->k, KEYS),
                       panels_of<D>(&a->v, KEYS),
                       panels_of<D>(&a->dout, L::QUERIES),
                       panels_of<D>(&a->dk, 16),
                       panels_of<D>(&a->dv, 16),
                       minus_lse,
                       sums,
                       dq,
                       added,
                       (float)a->scale,
                       Tk,
                       H,
                       B * H,
                       blocks,
                       tiles,
                       together_of(a)};
    unsigned grid = (unsigned)LG_MIN(multiprocessors, B * H * tiles);
    LG_CUDA(cudaFuncSetAttribute(long_backward_kernel<T, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    long_backward_kernel<T, D><<<grid, THREADS, L::BYTES, cuda>>>(z);
    LG_CUDA_LAUNCHED();

    after_args<T> after = {dq, (T *)a->dq.data, lg_row_stride(&a->dq, 2), (float)a->scale, Tq, H};
    after_kernel<T, D>
        <<<dim3((unsigned)(GROUPS * blocks), (unsigned)H, (unsigned)B), GROUP, 0, cuda>>>(after);
    LG_CUDA_LAUNCHED();
}
template <typename T>
static void launch_for(lg_stream *s, const struct lg_attention_backward_args *a)
{
    int64_t d = a->q.dim[3];
#ifdef LG_ONLY
    (void)d;
    launch<T, LG_ONLY>(s, a);
#else
    d == 64 ? launch<T, 64>(s, a) : d == 72 ? launch<T, 72>(s, a) : launch<T, 128>(s, a);
#endif
}

bool cuda_long_attention_takes(const lg_cuda_device *gpu,
                               const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,    a->k.data,  a->v.data,  a->o.data,
                       a->dout.data, a->dq.data, a->dk.data, a->dv.data};
    const lg_tensor *rows[] = {&a->q, &a->k, &a->dq, &a->dk};
    int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72 && d != 128))
        return false;
    if (a->q.dim[1] < LONG_LEAST || a->k.dim[1] < LONG_LEAST) return false;
    if (a->k_length.rank || !(a->scale > 0)) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (lg_row_stride(rows[i], 2) % 8) return false;
    return true;
}
size_t cuda_long_attention_scratch(const struct lg_attention_backward_args *a)
{
    int64_t d = a->q.dim[3];
    pieces bytes = d == 64 ? pieces_for<64>(a) : d == 72 ? pieces_for<72>(a) : pieces_for<128>(a);
    return bytes.dq + 2 * bytes.floats + bytes.counters;
}
void cuda_long_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    a->q.dtype == LG_F16 ? launch_for<fp16>(s, a) : launch_for<bf16>(s, a);
}
