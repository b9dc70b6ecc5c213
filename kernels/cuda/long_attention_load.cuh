/* The backward of attention over many tokens (long_attention.cu): what lies where in shared memory, which item a block
 * works at, and the warps that do not compute: a thread that fetches operands by TMA, and two, in turns, that add
 * parts of dQ to their sum in global memory.
 *
 * Items are numbered: 0 to `together` - 1 are the first keys of as many heads (where a head's queries come in parts: of as many
 * parts of heads), then their second ones, and so on, then those of the next heads. A block takes the next number when it has fetched all of its item (a counter in global
 * memory).
 *
 * Parts are added in the order of the keys. A thread waits until the counter of the head and the block of queries says
 * that all parts before are in the sum; TMA adds this one; when that is done, the counter goes on. All items go
 * through the blocks of queries in the same order, so an item of a head follows that before it at a distance, and
 * seldom waits. It waits for items of smaller numbers alone. Those have been taken, by blocks that run, and a block
 * goes through what it takes in order: so the smallest number that is not done never waits, and all end, however
 * many blocks the GPU runs at a time. A part is read behind the counter (acquire), and the counter is written behind
 * a fence that follows the end of the sum (release). */
#pragma once
#include "kernels/cuda/long_attention_scratch.cuh"

/* Warpgroups: one of which three warps fetch and add, those of the keys, that of the queries. */
enum { THREADS = (GROUPS + 2) * GROUP, ADDERS = 2, WARPS = GROUPS * GROUP / WARP };
enum { QUERY_WARPS = GROUP / WARP };

template <int D> struct backward_layout {
    static constexpr int QUERIES = dq_parts<D>::QUERIES, KV_STAGES = D > 96 ? 1 : 2;
    static constexpr int KV_TILE = panels<D>::bytes(KEYS), Q_TILE = panels<D>::bytes(QUERIES);
    static constexpr int DS_TILE = QUERIES * KEYS * 2, DQ_TILE = dq_parts<D>::FLOATS * 4;
    static constexpr int K = 0, V = K + KV_STAGES * KV_TILE, Q = V + KV_STAGES * KV_TILE;
    static constexpr int DQ_PLACES = D > 64 ? 2 : 1; /* for which there is room */
    static constexpr int DOUT = Q + 2 * Q_TILE, DS = DOUT + 2 * Q_TILE, DQ = DS + 2 * DS_TILE;
    static constexpr int NOTHING = DQ + DQ_PLACES * DQ_TILE,
                         LSE = NOTHING + panels<D>::REST * ZEROS, SUMS = LSE + 2 * QUERIES * 4;
    static constexpr int ITEM = SUMS + 2 * QUERIES * 4, BARRIERS = ITEM + 16;
    /* Pairs of barriers. */
    static constexpr int K_CAME = BARRIERS, V_CAME = K_CAME + 16 * KV_STAGES;
    static constexpr int Q_CAME = V_CAME + 16 * KV_STAGES, DOUT_CAME = Q_CAME + 32;
    static constexpr int DS_CAME = DOUT_CAME + 32, DQ_CAME = DS_CAME + 32;
    static constexpr int ITEM_CAME = DQ_CAME + 32;
    static constexpr int BYTES = ITEM_CAME + 32;
    static_assert(BYTES <= LG_CUDA_SHARED_HOPPER, "of a block");
};
struct backward_args {
    tile_maps q, k, v, dout;
    streams dk, dv;
    scratch_memory scratch;
    const int32_t *lengths; // (samples) of keys, or NULL
    float scale;
    int Tk, H, heads, blocks, tiles; /* blocks of queries and tiles of keys of a head */
    int parts, of_part;              /* of a head's blocks, and how many one has */
    int together;
    bool whole; /* no tile has rows of both streams */
};
/* What an item is: keys of a head, and blocks [first, last) of its queries. */
struct item_of {
    int head, tile, part, first, last;
    place at;
    __device__ __forceinline__ item_of(const backward_args &a, int number)
    {
        int begin = number / (a.together * a.tiles) * a.together;
        int some = min(a.together, a.heads * a.parts - begin), rest = number - begin * a.tiles;
        tile = rest / some;
        head = (begin + rest % some) / a.parts;
        part = (begin + rest % some) % a.parts;
        first = part * a.of_part;
        last = min(first + a.of_part, a.blocks);
        at = {tile * KEYS, head % a.H, head / a.H};
    }
};

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
template <int D, tiles_kind KIND>
static __device__ __forceinline__ void produce(const backward_args &a, uint32_t shared)
{
    using L = backward_layout<D>;
    constexpr int KV = L::KV_STAGES;
    for (int n = 0, m = 0;; n++) { /* items, steps */
        int number = (int)atomicAdd(a.scratch.added + a.heads * a.blocks, 1);
        if (number >= a.heads * a.parts * a.tiles) number = -1;
        wait_free<2>(shared + L::ITEM_CAME, n);
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(shared + L::ITEM + n % 2 * 4), "r"(number)
                     : "memory");
        mbarrier_arrive(came<2>(shared + L::ITEM_CAME, n));
        if (number < 0) break;
        item_of z(a, number);
        uint32_t barrier = came<KV>(shared + L::K_CAME, n);
        wait_free<KV>(shared + L::K_CAME, n);
        mbarrier_expect(barrier, L::KV_TILE);
        fetch_tile<D, KEYS, KIND>(shared + L::K + n % KV * L::KV_TILE, a.k, z.at, barrier);
#pragma unroll 1
        for (int i = z.first; i < z.last; i++, m++) {
            place at = {i * L::QUERIES, z.at.head, z.at.sample};
            int rows = (z.head * a.blocks + i) * L::QUERIES, stage = m % 2;
            barrier = came<2>(shared + L::Q_CAME, m);
            wait_free<2>(shared + L::Q_CAME, m);
            mbarrier_expect(barrier, L::Q_TILE + L::QUERIES * 4);
            fetch_tile<D, L::QUERIES, KIND>(shared + L::Q + stage * L::Q_TILE, a.q, at, barrier);
            fetch_floats(shared + L::LSE + stage * L::QUERIES * 4, a.scratch.minus_lse + rows,
                         L::QUERIES, barrier);
            if (i == z.first) {
                barrier = came<KV>(shared + L::V_CAME, n);
                wait_free<KV>(shared + L::V_CAME, n);
                mbarrier_expect(barrier, L::KV_TILE);
                fetch_tile<D, KEYS, KIND>(shared + L::V + n % KV * L::KV_TILE, a.v, z.at, barrier);
            }
            barrier = came<2>(shared + L::DOUT_CAME, m);
            wait_free<2>(shared + L::DOUT_CAME, m);
            mbarrier_expect(barrier, L::Q_TILE + L::QUERIES * 4);
            fetch_tile<D, L::QUERIES, KIND>(shared + L::DOUT + stage * L::Q_TILE, a.dout, at,
                                            barrier);
            fetch_floats(shared + L::SUMS + stage * L::QUERIES * 4, a.scratch.minus_sums + rows,
                         L::QUERIES, barrier);
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
        const int64_t block = (int64_t)z.head * a.blocks + z.first;
        uint32_t *added = a.scratch.added + block, parts;
        float *to = a.scratch.dq + block * dq_parts<D>::FLOATS;
        for (int i = z.first; i < z.last; i++, m++, added++, to += dq_parts<D>::FLOATS) {
            if (m % ADDERS != turn) continue;
            uint32_t from = shared + L::DQ + m % L::DQ_PLACES * L::DQ_TILE;
            do
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                             : "=r"(parts)
                             : "l"(added)
                             : "memory");
            while (parts != (uint32_t)z.tile);
            wait_came<ADDERS>(shared + L::DQ_CAME, m);
            asm volatile("fence.proxy.async;" ::: "memory");
            if (z.tile == 0)
                asm volatile(
                    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                    "r"(from), "r"(L::DQ_TILE)
                    : "memory");
            else
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                             "[%0], [%1], %2;" ::"l"(to),
                             "r"(from), "r"(L::DQ_TILE)
                             : "memory");
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
