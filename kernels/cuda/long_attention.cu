/* Backward of attention over many tokens on the tensor cores (wgmma): any numbers of queries and keys, d = 64, 72 or
 * 128, bf16 or fp16, with d = 64 and 72 key lengths. Always the same bits.
 *
 *     r = rows' sums of dout o,  P = exp(scale Q K^T - lse),  dS = P (dO V^T - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * Three kernels. The first computes r and -lse log2 e, the third rounds dQ (of few keys, dK and dV, too). In the second, after FlashAttention-3 (Shah
 * and others, 2024), an item is 128 keys of a head, whose dK and dV stay in registers, 64 keys a warpgroup, while
 * blocks of queries pass by. The products' results are transposed: S^T and dP^T, from which P^T and dS^T come as left
 * operands of dV and dK; dS^T also goes to shared memory. A third warpgroup multiplies it by K, for a part of dQ: in two
 * halves, 64 rows each, or (d > 64, where a block has 64 queries and not 128) half of the columns. So the warpgroups of
 * the keys do not wait for each other, and one's products run while the other is at its exponentials.
 *
 * Parts of dQ are added up in global memory, in fp32, in the order of the keys (long_attention_load.cuh).
 *
 * With d > 64, P is kept twice, in as many registers as it came in: rounded to bf16 for dV, and to fp16 for dS, to whose
 * rounding to 8 bits its 11 add nothing. So that small weights are not subnormal there, P, dS, dQ, dK and dV are 2^15 times
 * themselves until they are stored. With d = 64 there are no registers left (C7512, or with P in fp16 64 bytes spilled and
 * the backward 3 % slower), and dS is computed with P as it was rounded for dV: the error of rounding dS, twice.
 *
 * Queries beyond the last come as zeros, with -lse = -inf: their P and dS are 0. Scores of keys beyond the last, or the
 * sample's length, are set to -inf.
 *
 * Shared memory: K and V (d = 128: once, else twice), Q and dO twice, dS twice, a part of dQ (d > 64: two). Bytes at
 * d = 64: 231,888.
 *
 * At T = 4096, d = 64, B H = 64 there are 687 GFLOP (0.87 ms at 790 TFLOP/s). An H200 is at its limit of power here
 * (690 W, 1.75 GHz of 1.98): what saved cycles but no energy gained little (docs/gpu-results.md). Without the sum in
 * global memory it would be 5 % faster, without its order 1 %, without exponentials 6 %. Tried, at d = 64: blocks of 64
 * queries, which read more of shared memory for each product, and a polynomial for some of the exponentials (10 % slower
 * and no faster, when the warpgroups of keys took dQ); exponentials and dS of the two strictly in turns (6 to 11 %
 * slower: products wait for those of the other warpgroups), exponentials alone in turns (no faster); dP^T, or its first half, before the
 * exponentials, dQ^T = K^T dS^T in one product, or with K^T in registers, two places for parts and one for K and V (no faster); parts
 * added out of registers (2 % slower); dQ ended by the last keys' warpgroup, without a third kernel (1 to 3 %); two blocks of a
 * cluster that each fetch half of Q and dO for both (14 %; with sums and without order 5 %). What each part costs of a step's 4,240 clocks
 * stands in docs/gpu-results.md. */
#include "kernels/cuda/long_attention.h"
#include "kernels/cuda/long_attention_load.cuh"
#include "kernels/cuda/long_attention_products.cuh"

/* Of a thread of each warpgroup. There are 512 for the four, two of which are of keys. */
enum { LOADER_REGISTERS = 32, KEY_REGISTERS = 208, QUERY_REGISTERS = 64 };
enum { DS_PANEL = KEYS * ROW };
enum { LOAD_WARP = 0, ADD_WARP = 1 };
enum { FEW_LEAST = 128, FEW_QUERIES = 4096 }; /* keys and queries, where there are few keys */

/* ---- a warpgroup of keys ---- */

template <typename T, int D, bool TWO> struct key_side {
    using L = backward_layout<D>;
    using DQ = dq_parts<D>;
    static constexpr int QUERIES = L::QUERIES, S = QUERIES / 2, P = QUERIES / 4;
    static constexpr bool TWICE = D > 64;    /* P in T and in fp16 */
    static constexpr bool FROM_SUMS = TWICE; /* dP^T - r begins at -r (d = 64: 1 % slower) */
    const backward_args &a;
    uint32_t shared, ds; /* ds: where the thread's warp writes dS^T */
    int n = 0, m = 0;    /* items and steps that were */
    int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % WARP;
    int row = group * ROWS + threadIdx.x % GROUP / WARP * 16; /* the warp's first key of the tile */
    __device__ __forceinline__ key_side(const backward_args &args, uint32_t memory)
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
    /* x (+)= the group's 64 rows of a tile of keys times a block's rows, transposed; begun. */
    __device__ __forceinline__ void begin_rows(float (&x)[S], uint32_t keys, uint32_t block,
                                               bool add) const
    {
        uint32_t k = tile_start<KEYS>(keys, group * ROWS), b = tile_start<QUERIES>(block, 0);
        products_begin();
#pragma unroll
        for (int s = 0; s < panels<D>::STEPS; s++)
            tensor_core<T>::scores(x, columns_at<KEYS>(k, s), columns_at<QUERIES>(b, s),
                                   add || s > 0);
        if (panels<D>::REST)
            tensor_core<T>::scores(
                x, left_rest(rest_of<D, KEYS>(keys, group * ROWS), shared + L::NOTHING),
                right_rest(rest_of<D, QUERIES>(block, 0)), 1);
        products_end();
    }
    /* x (64 keys, D) += p (64 keys, a block's queries) times the block; begun. */
    __device__ __forceinline__ void begin_adding(float (&x)[D / 2], const uint32_t (&p)[P],
                                                 uint32_t block) const
    {
        constexpr int MAIN = panels<D>::COUNT * COLUMNS / 2;
        uint32_t b = tile_start<QUERIES>(block, 0);
        products_begin();
#pragma unroll
        for (int s = 0; s < QUERIES / 16; s++) {
            tensor_core<T>::keys(*reinterpret_cast<float(*)[MAIN]>(&x), p + 4 * s, rows_at(b, s));
            if (panels<D>::REST)
                tensor_core<T>::rest_of_keys(&x[D / 2 - 4], p + 4 * s,
                                             rest_rows_at(rest_of<D, QUERIES>(block, 0), s));
        }
        products_end();
    }
    /* Values of 16 queries, of which a thread has four: those of its columns of one 8, and of the other. */
    struct of_columns {
        float2 of[2];
    };
    static __device__ __forceinline__ of_columns values_at(uint32_t at)
    {
        of_columns x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.of[0].x), "=f"(x.of[0].y), "=f"(x.of[1].x), "=f"(x.of[1].y)
                     : "r"(at));
        return x;
    }
    /* P^T of S^T: p rounded to T, with d > 64 w to fp16. */
    __device__ __forceinline__ void weights(uint32_t (&p)[P], uint32_t (&w)[P], float (&s)[S],
                                            uint32_t minus_lse, int keys) const
    {
        float factor = a.scale * LOG2_E;
        if (keys < ROWS) {
#pragma unroll
            for (int i = 0; i < S; i++)
                if (row % ROWS + lane / 4 + i / 2 % 2 * 8 >= keys) s[i] = -INFINITY;
        }
#pragma unroll
        for (int c = 0; c < QUERIES / 16; c++) {
            const of_columns l = values_at(minus_lse + c * 64);
#pragma unroll
            for (int i = 4 * c; i < 4 * c + 4; i++) {
                float x = exp2_of(fmaf(s[2 * i], factor, l.of[i / 2 % 2].x));
                float y = exp2_of(fmaf(s[2 * i + 1], factor, l.of[i / 2 % 2].y));
                p[i] = packed(x, y, T());
                if (TWICE) w[i] = packed(x, y, fp16());
            }
        }
    }
    /* x = the block's values at `at`, of which the thread's columns have one each. */
    static __device__ __forceinline__ void spread(float (&x)[S], uint32_t at)
    {
#pragma unroll
        for (int c = 0; c < S / 8; c++) {
            const of_columns r = values_at(at + c * 64);
#pragma unroll
            for (int i = 4 * c; i < 4 * c + 4; i++)
                x[2 * i] = r.of[i / 2 % 2].x, x[2 * i + 1] = r.of[i / 2 % 2].y;
        }
    }
    /* g = dS^T of P^T and dP^T (FROM_SUMS: less r), rounded; also to shared memory. */
    __device__ __forceinline__ void score_gradients(uint32_t (&g)[P], const uint32_t (&weights)[P],
                                                    const float (&dp)[S], uint32_t minus_sums,
                                                    uint32_t to) const
    {
        constexpr int STEPS = QUERIES / 16;
        of_columns next = {};
        if (!FROM_SUMS) next = values_at(minus_sums);
#pragma unroll
        for (int c = 0; c < STEPS; c++) { /* 16 queries */
            const of_columns l = next;
            if (!FROM_SUMS && c + 1 < STEPS) /* which does not pass the store below */
                next = values_at(minus_sums + (c + 1) * 64);
#pragma unroll
            for (int i = 4 * c; i < 4 * c + 4; i++) {
                float2 w = two<std::conditional_t<TWICE, fp16, T>>(weights[i]), r = l.of[i / 2 % 2];
                float x = dp[2 * i], y = dp[2 * i + 1];
                if (!FROM_SUMS) x += r.x, y += r.y;
                g[i] = packed(w.x * x, w.y * y, T());
            }
            store_matrices((to ^ 2 * c % 8 * 16) + c / 4 * DS_PANEL, g + 4 * c);
        }
    }
    /* Of a block of queries: P^T, dV, dS^T to shared memory, dK. No product is under way at the end: around a loop ptxas
     * would serialise all of them (C7514), and there are no registers for more than S or dP beside dK and dV (C7512). */
    __device__ __forceinline__ void step(float (&dk)[D / 2], float (&dv)[D / 2], int keys)
    {
        float s[S], dp[S];
        uint32_t p[P], w[P], g[P], dout = block(L::DOUT, L::Q_TILE);
        uint32_t minus_sums = block(L::SUMS, QUERIES * 4) + lane % 4 * 16;
        wait_came<2>(shared + L::Q_CAME, m);
        begin_rows(s, k_tile(), block(L::Q, L::Q_TILE), false);
        products_wait<0>();
        settled(s);
        weights(p, w, s, block(L::LSE, QUERIES * 4) + lane % 4 * 16, keys);
        wait_came<2>(shared + L::DOUT_CAME, m);
        if (FROM_SUMS) spread(dp, minus_sums);
        begin_rows(dp, k_tile() + L::V - L::K, dout, FROM_SUMS);
        begin_adding(dv, p, dout);
        products_wait<1>();
        settled(dp);
        wait_free<2>(shared + L::DS_CAME, m);
        score_gradients(g, TWICE ? w : p, dp, minus_sums, ds + m % 2 * L::DS_TILE);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(came<2>(shared + L::DS_CAME, m));
        begin_adding(dk, g, block(L::Q, L::Q_TILE));
        products_wait<1>();
        settled(dv);
        warp_arrive(came<2>(shared + L::DOUT_CAME, m) + 8);
        products_wait<0>();
        settled(dk);
        warp_arrive(came<2>(shared + L::Q_CAME, m) + 8);
        m++;
    }
    /* dK and dV, where K and V were. */
    __device__ __forceinline__ void store(const float (&dk)[D / 2], const float (&dv)[D / 2],
                                          place at)
    {
        uint32_t k = k_tile(), v = k + L::V - L::K;
        barrier_sync(1 + group, GROUP); /* the warpgroup's products have read K and V */
        stage_rows<T, D, KEYS>(v, row, dv, 1 / weight_factor<T>);
        /* Products of queries have read K. */
        mbarrier_wait(came<2>(shared + L::DS_CAME, m - 1) + 8, (m - 1) / 2 % 2);
        stage_rows<T, D, KEYS>(k, row, dk, a.scale / weight_factor<T>);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            at.token += row;
            put_rows<D, KEYS, TWO>(a.dk, at, k, row);
            put_rows<D, KEYS, TWO>(a.dv, at, v, row);
            puts_end();
            puts_wait<0>();
            mbarrier_arrive(came<L::KV_STAGES>(shared + L::K_CAME, n) + 8);
            mbarrier_arrive(came<L::KV_STAGES>(shared + L::V_CAME, n) + 8);
        }
        __syncwarp();
    }
    /* One of them, x (64 keys, D), to its part's place in the scratch memory: kind 0 is dK. */
    __device__ __forceinline__ void store_part(const float (&x)[D / 2], const item_of &z,
                                               int kind) const
    {
        int64_t to = (int64_t)(kind * a.parts + z.part) * a.heads + z.head;
        to = ((to * a.tiles + z.tile) * GROUPS + group) * ROWS * D + threadIdx.x % GROUP * 4;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *(float4 *)(a.scratch.dkv + to + j * GROUP * 4) =
                make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
    __device__ __forceinline__ void store_parts(const float (&dk)[D / 2], const float (&dv)[D / 2],
                                                const item_of &z) const
    {
        store_part(dk, z, 0);
        store_part(dv, z, 1);
        warp_arrive(came<L::KV_STAGES>(shared + L::K_CAME, n) + 8);
        warp_arrive(came<L::KV_STAGES>(shared + L::V_CAME, n) + 8);
    }
    __device__ __forceinline__ void items()
    {
#pragma unroll 1
        for (int number; (number = number_of<D>(shared, n, true)) >= 0; n++) {
            float dk[D / 2] = {}, dv[D / 2] = {};
            settled(dk); /* the zeros, too, before products begin */
            settled(dv);
            int keys, blocks; /* of the group; of the item */
            {
                item_of z(a, number);
                keys = keys_of(a.lengths, z.at.sample, a.Tk) - z.at.token - group * ROWS;
                blocks = z.last - z.first;
            }
            wait_came<L::KV_STAGES>(shared + L::K_CAME, n);
            wait_came<L::KV_STAGES>(shared + L::V_CAME, n);
#pragma unroll 1
            for (; blocks > 0; blocks--) step(dk, dv, keys);
            item_of z(a, (int)again((uint32_t)number)); /* not in registers meanwhile */
            if (D == 64 && a.parts > 1)
                store_parts(dk, dv, z);
            else
                store(dk, dv, z.at);
        }
        if (lane == 0) puts_done();
    }
};

/* ---- the warpgroup of queries ---- */

template <typename T, int D> struct query_side {
    using L = backward_layout<D>;
    using DQ = dq_parts<D>;
    const backward_args &a;
    uint32_t shared;
    __device__ __forceinline__ query_side(const backward_args &args, uint32_t memory)
        : a(args), shared(memory)
    {
    }
    /* x = a half of dS K; begun. */
    __device__ __forceinline__ void begin_half(float (&x)[DQ::N / 2], uint32_t ds_tile, uint32_t k,
                                               int half) const
    {
        constexpr int SECOND =
            DQ::SECOND / COLUMNS * KEYS * ROW + DQ::SECOND % COLUMNS * 2; /* bytes */
        uint32_t left = again(operand_start(ds_tile + (SECOND ? 0 : half * DS_PANEL), 0));
        uint32_t right = tile_start<KEYS>(k + half * SECOND, 0);
        products_begin();
#pragma unroll
        for (int s = 0; s < KEYS / 16; s++) {
            tensor_core<T>::queries(*reinterpret_cast<float(*)[DQ::MAIN / 2]>(&x),
                                    operand_at(left + s * ROW, 8 * ROW, 1), rows_at(right, s),
                                    s > 0);
            if (panels<D>::REST)
                tensor_core<T>::rest_of_queries(&x[DQ::N / 2 - 4],
                                                operand_at(left + s * ROW, 8 * ROW, 1),
                                                rest_rows_at(rest_of<D, KEYS>(k, 0), s), s > 0);
        }
        products_end();
    }
    /* The m-th part, to its place. */
    __device__ __forceinline__ void step(int m, uint32_t k) const
    {
        uint32_t ds = shared + L::DS + m % 2 * L::DS_TILE;
        uint32_t to = shared + L::DQ + m % L::DQ_PLACES * L::DQ_TILE + threadIdx.x % GROUP * 16;
        int before = m - L::DQ_PLACES; /* the part that was there */
        wait_came<2>(shared + L::DS_CAME, m);
#pragma unroll 1 /* there are no registers for both */
        for (int half = 0; half < GROUPS; half++, to += DQ::HALF * 4) {
            float x[DQ::N / 2];
            begin_half(x, ds, k, half);
            products_wait<0>();
            settled(x);
            if (half) warp_arrive(came<2>(shared + L::DS_CAME, m) + 8);
            if (!half && before >= 0)
                mbarrier_wait(came<2>(shared + L::DQ_CAME, before) + 8, before / 2 % 2);
#pragma unroll
            for (int j = 0; j < DQ::N / 8; j++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * GROUP * 16),
                             "f"(x[4 * j]), "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3])
                             : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(came<2>(shared + L::DQ_CAME, m));
    }
    __device__ __forceinline__ void items() const
    {
#pragma unroll 1
        for (int n = 0, m = 0, number; (number = number_of<D>(shared, n, true)) >= 0; n++) {
            item_of z(a, number);
            wait_came<L::KV_STAGES>(shared + L::K_CAME, n);
#pragma unroll 1
            for (int i = z.first; i < z.last; i++, m++)
                step(m, shared + L::K + n % L::KV_STAGES * L::KV_TILE);
            warp_arrive(came<L::KV_STAGES>(shared + L::K_CAME, n) + 8);
        }
    }
};

template <typename T, int D, bool TWO>
static __global__ void __launch_bounds__(THREADS, 1)
    long_backward_kernel(const __grid_constant__ backward_args a)
{
    using L = backward_layout<D>;
    extern __shared__ __align__(1024) char memory[];
    uint32_t shared = shared_address(memory);
    if (panels<D>::REST && threadIdx.x < ZEROS / 16)
        *(float4 *)(memory + L::NOTHING + threadIdx.x * 16) = float4{};
    if (threadIdx.x == 0)
        for (int at = L::BARRIERS; at < L::BYTES; at += 16) {
            int writers = 1, readers = WARPS;
            if (at < L::V_CAME) readers = WARPS + QUERY_WARPS;
            if (at >= L::DS_CAME) writers = WARPS, readers = QUERY_WARPS;
            if (at >= L::DQ_CAME) writers = QUERY_WARPS, readers = 1;
            if (at >= L::ITEM_CAME) writers = 1, readers = WARPS + QUERY_WARPS + ADDERS;
            mbarrier_begin(shared + at, writers);
            mbarrier_begin(shared + at + 8, readers);
        }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<LOADER_REGISTERS>();
        if (threadIdx.x == LOAD_WARP * WARP)
            !TWO      ? produce<D, OF_ONE>(a, shared)
            : a.whole ? produce<D, WHOLE>(a, shared)
                      : produce<D, ANY>(a, shared);
        int adder = threadIdx.x / WARP - ADD_WARP;
        if (threadIdx.x % WARP == 0 && adder >= 0 && adder < ADDERS) add_up<D>(a, shared, adder);
    } else if (threadIdx.x >= (GROUPS + 1) * GROUP) {
        registers_give<QUERY_REGISTERS>();
        query_side<T, D>(a, shared).items();
    } else {
        registers_take<KEY_REGISTERS>();
        key_side<T, D, TWO>(a, shared).items();
    }
}

/* ---- on the host ---- */

/* How many heads' items are taken in turns: so few that what they go through, Q and dO in 16 bits and dQ in 32, stays in
 * the L2, of 50 MB in two halves; and no fewer, so that few items of a head run at a time and wait for one another. At
 * 4096 tokens, d = 64, 4, 8 and 16 heads: 429, 440, 438 TFLOP/s. */
static int together_of(const struct lg_attention_backward_args *a)
{
    int64_t bytes = a->q.dim[1] * a->q.dim[3] * 8, n = (16 << 20) / bytes;
    return (int)LG_MAX(1, LG_MIN(n, a->q.dim[0] * a->q.dim[2]));
}
template <typename T, int D, bool TWO>
static void launch(lg_stream *stream, const struct lg_attention_backward_args *a)
{
    using L = backward_layout<D>;
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    int B = (int)a->q.dim[0], H = (int)a->q.dim[2], Tq = (int)a->q.dim[1], Tk = (int)a->k.dim[1];
    int blocks = (int)ceil_div(Tq, L::QUERIES), tiles = (int)ceil_div(Tk, KEYS);
    int parts = parts_of<D>(a), of_part = (int)ceil_div(blocks, parts);
    LG_ASSERT((parts - 1) * of_part < blocks);
    scratch_memory scratch = scratch_of<D>(a, stream->scratch);
    backward_args z = {tiles_of<D>(&a->q, a->first_queries, L::QUERIES),
                       tiles_of<D>(&a->k, a->first_keys, KEYS),
                       tiles_of<D>(&a->v, a->first_keys, KEYS),
                       tiles_of<D>(&a->dout, a->first_queries, L::QUERIES),
                       streams_of<D>(&a->dk, a->first_keys, 16),
                       streams_of<D>(&a->dv, a->first_keys, 16),
                       scratch,
                       (const int32_t *)a->k_length.data,
                       (float)a->scale,
                       Tk,
                       H,
                       B * H,
                       blocks,
                       tiles,
                       parts,
                       of_part,
                       parts * together_of(a),
                       false};
    z.whole = all_whole(z.q, L::QUERIES) && all_whole(z.k, KEYS);
    prepare<T, D>(cuda, a, scratch);
    unsigned grid = (unsigned)LG_MIN(multiprocessors, B * H * parts * tiles);
    LG_CUDA(cudaFuncSetAttribute(long_backward_kernel<T, D, TWO>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    long_backward_kernel<T, D, TWO><<<grid, THREADS, L::BYTES, cuda>>>(z);
    LG_CUDA_LAUNCHED();
    take_sums<T, D>(cuda, a, scratch);
}
template <typename T>
static void launch_for(lg_stream *s, const struct lg_attention_backward_args *a)
{
    const int64_t d = a->q.dim[3];
    const bool two = lie_apart(a->q, a->first_queries, a->first_keys);
    if (d == 64) return two ? launch<T, 64, true>(s, a) : launch<T, 64, false>(s, a);
    if (d == 72) return two ? launch<T, 72, true>(s, a) : launch<T, 72, false>(s, a);
    two ? launch<T, 128, true>(s, a) : launch<T, 128, false>(s, a);
}

/* With heads of 64 also the few keys of a text, where they are more than cross_attention.cu takes, from so many queries on. (Within
 * PixArt's step, 12 x 4096 queries of 16 heads of 72 to 300 keys took 0.88 ms and cuDNN's 0.78.) */
static bool has_few_keys(const struct lg_attention_backward_args *a)
{
    return a->q.dim[3] == 64 && a->k.dim[1] >= FEW_LEAST && a->q.dim[1] >= FEW_QUERIES;
}
bool cuda_long_attention_takes(const lg_cuda_device *gpu,
                               const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,    a->k.data,  a->v.data,  a->o.data, a->o_low.data,
                       a->dout.data, a->dq.data, a->dk.data, a->dv.data};
    const lg_tensor *rows[] = {&a->q, &a->k, &a->v, &a->dq, &a->dk, &a->dv};
    int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72 && d != 128))
        return false;
    if (!long_enough(a->q.dim[1], a->k.dim[1]) && !has_few_keys(a)) return false;
    if (!(a->scale > 0) || (a->k_length.rank && d == 128)) return false;
    if (!ends_on_rows(a->first_queries) || !ends_on_rows(a->first_keys)) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (lg_row_stride(rows[i], 2) % 8) return false;
    return true;
}
size_t cuda_long_attention_scratch(const struct lg_attention_backward_args *a)
{
    int64_t d = a->q.dim[3];
    return d == 64   ? scratch_of<64>(a, nullptr).bytes
           : d == 72 ? scratch_of<72>(a, nullptr).bytes
                     : scratch_of<128>(a, nullptr).bytes;
}
void cuda_long_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    a->q.dtype == LG_F16 ? launch_for<fp16>(s, a) : launch_for<bf16>(s, a);
}
