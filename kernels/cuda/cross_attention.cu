/* Backward of attention of many queries to few keys on the tensor cores (wgmma): at most 128 keys, from 256 queries on, d = 64 or 72,
 * bf16 or fp16, with or without key lengths. Always the same bits.
 *
 *     P = exp(scale Q K^T - lse),  dP = dO V^T,  r = rows' sums of P dP / of P,  dS = P (dP - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * All keys of a head are one tile, which stays in shared memory while tiles of 64 queries pass by. So a tile's dQ is whole when it is
 * made, and r, which otherwise is taken from what the forward has left (long_attention.cu), comes of P and dP themselves, as rounded,
 * so that dS adds up to zero over the keys (attention.cu): neither o nor any sum goes through global memory.
 *
 * An item is a head, or where there are many queries a part of them. Of four warpgroups the first has a thread that fetches. Two are of
 * queries, and take every second tile: S and dP with a row in four threads, then dQ. They leave P and dS in shared memory, also for the
 * fourth, which has dK and dV in its registers for all of an item: products with P and dS transposed, tile after tile. So tiles are
 * added in their order.
 *
 * Parts of dK and dV lie in scratch memory in fp32, and are added in order by a kernel of their own. Their number follows from that of
 * the queries alone, so that a sample's bits do not depend on others.
 *
 * P is kept in fp16 for dS, to whose rounding to 8 bits its 11 add nothing; so that small weights are not subnormal there, P, dS, dQ, dK
 * and dV are 2^15 times themselves until they are stored (in bf16).
 *
 * Queries beyond the last come as zeros, and their P is 0, as is that of keys beyond the last or the sample's length.
 *
 * Shared memory: K and V; of each warpgroup of queries Q and dO (three places each, two of d = 72), P and dS (one), and what dQ leaves
 * by.
 *
 * LTX-Video's 4 x 2496 queries of 32 heads to 128 keys take 66 us, cuDNN's 166; Q, dO and dQ are 29 us at 4.3 TB/s, products 33 us at
 * 790 TFLOP/s. The rest is the chain of a tile: product, exponentials, product, a row's sum, product. Tried: dP's product beside the
 * exponentials, for which S and dP in fp32 are more than registers can hold (C7512); dQ with dS from registers (the same). */
#include "kernels/cuda/cross_attention.h"
#include "kernels/cuda/long_attention_products.cuh"

enum { KEYS = 128, ROWS = 64, SIDES = 2, WARPS = GROUP / WARP, THREADS = (SIDES + 2) * GROUP };
enum { LOADER_REGISTERS = 32, QUERY_REGISTERS = 152, KEY_REGISTERS = 176 };
static_assert((LOADER_REGISTERS + SIDES * QUERY_REGISTERS + KEY_REGISTERS) * GROUP <= 65536, "");
enum { PANEL = ROWS * ROW }; /* of P and dS: 64 queries by 64 keys */
enum { LEAST_QUERIES = 256, PART_QUERIES = 2560, SUM_THREADS = 256 };

template <int D> struct layout {
    static constexpr int STAGES = D > 64 ? 2 : 3;
    static constexpr int KV_TILE = panels<D>::bytes(KEYS), Q_TILE = panels<D>::bytes(ROWS);
    static constexpr int P_TILE = ROWS * KEYS * 2;
    static constexpr int K = 0, V = K + KV_TILE, Q = V + KV_TILE;
    static constexpr int DOUT = Q + SIDES * STAGES * Q_TILE, P = DOUT + SIDES * STAGES * Q_TILE;
    static constexpr int DS = P + SIDES * P_TILE, DQ = DS + SIDES * P_TILE;
    static constexpr int NOTHING = DQ + SIDES * Q_TILE,
                         BARRIERS = NOTHING + panels<D>::REST * ZEROS;
    /* Pairs of barriers, those of a side behind those of the other. KV_READ: products of queries have read K and V. */
    static constexpr int KV_CAME = BARRIERS, KV_READ = KV_CAME + 16, Q_CAME = KV_READ + 16;
    static constexpr int P_CAME = Q_CAME + 16 * SIDES * STAGES, DS_CAME = P_CAME + 16 * SIDES;
    static constexpr int BYTES = DS_CAME + 16 * SIDES;
    static_assert(BYTES <= LG_CUDA_SHARED_HOPPER, "of a block");
    static_assert(KV_TILE % 1024 == 0 && Q_TILE % 1024 == 0, "tiles are swizzled from there");
};
struct cross_args {
    tensor_maps q, dout, k, v; /* tiles */
    streams dq, dk, dv;        /* 16 rows */
    const float *lse;          // (samples, H, Tq)
    const int32_t *lengths;    // (samples) of keys, or NULL
    float *sums;               // (dK and dV, parts, heads, KEYS, D), or NULL: one part
    float scale;
    int Tq, Tk, H, heads, tiles; /* tiles of a head's queries */
    int parts, of_part;          /* of a head, and how many tiles one has */
};
/* A head's tiles [first, last). */
struct item_of {
    int head, part, first, last;
    place at;
    __device__ __forceinline__ item_of(const cross_args &a, int number)
    {
        head = number / a.parts;
        part = number % a.parts;
        first = part * a.of_part;
        last = min(first + a.of_part, a.tiles);
        at = {0, head % a.H, head / a.H};
    }
};
#define FOR_EACH_ITEM(a, number)                                                                   \
    for (int number = blockIdx.x; number < (a).heads * (a).parts; number += gridDim.x)

/* ---- the thread that fetches ---- */

template <int D>
static __device__ __forceinline__ void fetch_all(const cross_args &a, uint32_t shared)
{
    using L = layout<D>;
    int uses[SIDES] = {}, n = 0;
    FOR_EACH_ITEM(a, number)
    {
        item_of z(a, number);
        uint32_t barrier = came<1>(shared + L::KV_CAME, n);
        wait_free<1>(shared + L::KV_CAME, n);
        mbarrier_expect(barrier, 2 * L::KV_TILE);
        fetch_rows<D, KEYS>(shared + L::K, 0, a.k, z.at, barrier);
        fetch_rows<D, KEYS>(shared + L::V, 0, a.v, z.at, barrier);
        n++;
#pragma unroll 1
        for (int tile = z.first; tile < z.last; tile += SIDES)
#pragma unroll
            for (int side = 0; side < SIDES; side++) {
                if (tile + side >= z.last) break;
                const int m = uses[side]++, at = side * L::STAGES + m % L::STAGES;
                const uint32_t pairs = shared + L::Q_CAME + side * L::STAGES * 16;
                place rows = {(tile + side) * ROWS, z.at.head, z.at.sample};
                barrier = came<L::STAGES>(pairs, m);
                wait_free<L::STAGES>(pairs, m);
                mbarrier_expect(barrier, 2 * L::Q_TILE);
                fetch_rows<D, ROWS>(shared + L::Q + at * L::Q_TILE, 0, a.q, rows, barrier);
                fetch_rows<D, ROWS>(shared + L::DOUT + at * L::Q_TILE, 0, a.dout, rows, barrier);
            }
    }
}

/* ---- a warpgroup of queries ---- */

template <typename T, int D> struct query_side {
    using L = layout<D>;
    static constexpr int S = KEYS / 2; /* values of a tile of scores in a thread */
    const cross_args &a;
    uint32_t shared;
    int side, m = 0;                                                      /* m: tiles that were */
    int lane = threadIdx.x % WARP, row = threadIdx.x % GROUP / WARP * 16; /* the warp's first */
    __device__ __forceinline__ query_side(const cross_args &args, uint32_t memory, int number)
        : a(args), shared(memory), side(number)
    {
    }
    __device__ __forceinline__ uint32_t tile_at(int kind) const
    {
        return again(shared + kind + (side * L::STAGES + m % L::STAGES) * L::Q_TILE);
    }
    /* x = the tile's 64 rows times all keys' rows, transposed; begun. */
    __device__ __forceinline__ void begin_rows(float (&x)[S], uint32_t tile, uint32_t keys) const
    {
        uint32_t l = tile_start<ROWS>(tile, 0), r = tile_start<KEYS>(keys, 0);
        products_begin();
#pragma unroll
        for (int s = 0; s < panels<D>::STEPS; s++)
            tensor_core<T>::scores(x, columns_at<ROWS>(l, s), columns_at<KEYS>(r, s), s > 0);
        if (panels<D>::REST)
            tensor_core<T>::scores(x, left_rest(rest_of<D, ROWS>(tile, 0), shared + L::NOTHING),
                                   right_rest(rest_of<D, KEYS>(keys, 0)), 1);
        products_end();
    }
    /* x (64 queries, D) = dS times K; begun. */
    __device__ __forceinline__ void begin_dq(float (&x)[D / 2]) const
    {
        constexpr int MAIN = panels<D>::COUNT * COLUMNS / 2;
        uint32_t l = tile_start<ROWS>(shared + L::DS + side * L::P_TILE, 0);
        uint32_t r = tile_start<KEYS>(shared + L::K, 0);
        uint32_t rest = again(rest_of<D, KEYS>(shared + L::K, 0));
        products_begin();
#pragma unroll
        for (int s = 0; s < KEYS / 16; s++) {
            tensor_core<T>::rows(*reinterpret_cast<float(*)[MAIN]>(&x), columns_at<ROWS>(l, s),
                                 rows_at(r, s), s > 0);
            if (panels<D>::REST)
                tensor_core<T>::rest_of_rows(&x[D / 2 - 4], columns_at<ROWS>(l, s),
                                             rest_rows_at(rest, s), s > 0);
        }
        products_end();
    }
    /* g, P or dS in T, to its place, once that is free. What is computed before it is packed before: ptxas else keeps it in fp32
     * meanwhile. */
    __device__ __forceinline__ void leave(const uint32_t (&g)[S / 2], int kind, int barriers) const
    {
        const uint32_t pairs = shared + barriers + side * 16;
        wait_free<1>(pairs, m);
        const uint32_t to = again(shared + kind + side * L::P_TILE + (row + lane % 16) * ROW +
                                  (lane / 16 ^ lane % 8) * 16);
#pragma unroll
        for (int c = 0; c < KEYS / 16; c++)
            store_matrices((to ^ 2 * c % 8 * 16) + c / 4 * PANEL, g + 4 * c);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(came<1>(pairs, m));
    }
    /* P of S, in T and in fp16. minus: log2 of the factor - lse log2 e of the thread's two rows. */
    __device__ __forceinline__ void weights(uint32_t (&g)[S / 2], uint32_t (&w)[S / 2],
                                            const float (&s)[S], const float (&minus)[2],
                                            int keys) const
    {
        const float factor = a.scale * LOG2_E;
        const int columns =
            (int)again((uint32_t)(keys - lane % 4 * 2)); /* or all are compared before */
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] = exp2_of(fmaf(s[4 * j + e], factor, minus[e / 2]));
            if (keys < 8 * j + 8) /* of few columns, or none */
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (8 * j + e % 2 >= columns) x[e] = 0;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                g[2 * j + k] = packed(x[2 * k], x[2 * k + 1], T());
                w[2 * j + k] = packed(x[2 * k], x[2 * k + 1], fp16());
            }
        }
    }
    static __device__ __forceinline__ float of_four(float x)
    {
        x += __shfl_xor_sync(0xffffffff, x, 1);
        return x + __shfl_xor_sync(0xffffffff, x, 2);
    }
    /* dS of P and dP, in T. */
    static __device__ __forceinline__ void score_gradients(uint32_t (&g)[S / 2],
                                                           const uint32_t (&w)[S / 2],
                                                           const float (&dp)[S])
    {
        float r[2] = {}, total[2] = {};
#pragma unroll
        for (int i = 0; i < S / 2; i++) {
            const float2 p = two<fp16>(w[i]);
            r[i % 2] = fmaf(p.x, dp[2 * i], r[i % 2]);
            r[i % 2] = fmaf(p.y, dp[2 * i + 1], r[i % 2]);
            total[i % 2] += p.x + p.y;
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            r[k] = of_four(r[k]), total[k] = of_four(total[k]);
            r[k] = total[k] > 0 ? r[k] / total[k] : 0;
        }
#pragma unroll
        for (int i = 0; i < S / 2; i++) {
            const float2 p = two<fp16>(w[i]);
            g[i] = packed(p.x * (dp[2 * i] - r[i % 2]), p.y * (dp[2 * i + 1] - r[i % 2]), T());
        }
    }
    __device__ __forceinline__ void store(const float (&x)[D / 2], place at) const
    {
        const uint32_t tile = shared + L::DQ + side * L::Q_TILE;
        if (lane == 0) puts_wait<0>();
        __syncwarp();
        stage_rows<T, D, ROWS>(tile, row, x, a.scale / weight_factor<T>);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        at.token += row;
        if (lane == 0 && at.token < a.Tq) put_rows<D, ROWS, false>(a.dq, at, tile, row);
        if (lane == 0) puts_end();
    }
    /* lse of the thread's two rows of a tile; beyond the last query infinity, so that P is 0. */
    __device__ __forceinline__ void fetch_lse(float (&x)[2], place at) const
    {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int token = at.token + row + lane / 4 + k * 8;
            const int64_t head = (int64_t)at.sample * a.H + at.head;
            x[k] = token < a.Tq ? a.lse[head * a.Tq + token] : INFINITY;
        }
    }
    /* lse: of this tile, then of the next. */
    __device__ __forceinline__ void step(float (&lse)[2], place at, int keys)
    {
        float minus[2], x[S];
        uint32_t g[S / 2], w[S / 2];
#pragma unroll
        for (int k = 0; k < 2; k++) minus[k] = WEIGHT_EXPONENT<T> - LOG2_E * lse[k];
        fetch_lse(lse, {at.token + SIDES * ROWS, at.head, at.sample});
        wait_came<L::STAGES>(shared + L::Q_CAME + side * L::STAGES * 16, m);
        begin_rows(x, tile_at(L::Q), shared + L::K);
        products_wait<0>();
        settled(x);
        weights(g, w, x, minus, keys);
        leave(g, L::P, L::P_CAME);
        begin_rows(x, tile_at(L::DOUT), shared + L::V);
        products_wait<0>();
        settled(x);
        score_gradients(g, w, x);
        leave(g, L::DS, L::DS_CAME);
        barrier_sync(1 + side, GROUP); /* all rows of dS are there */
        float dq[D / 2];
        begin_dq(dq);
        products_wait<0>();
        settled(dq);
        store(dq, at);
        m++;
    }
    __device__ __forceinline__ void items()
    {
        int n = 0;
        FOR_EACH_ITEM(a, number)
        {
            item_of z(a, number);
            const int keys = keys_of(a.lengths, z.at.sample, a.Tk);
            float lse[2];
            fetch_lse(lse, {(z.first + side) * ROWS, z.at.head, z.at.sample});
            wait_came<1>(shared + L::KV_CAME, n);
#pragma unroll 1
            for (int tile = z.first + side; tile < z.last; tile += SIDES)
                step(lse, {tile * ROWS, z.at.head, z.at.sample}, keys);
            warp_arrive(came<1>(shared + L::KV_READ, n));
            n++;
        }
        if (lane == 0) puts_done();
    }
};

/* ---- the warpgroup of keys ---- */

template <typename T, int D> struct key_side {
    using L = layout<D>;
    static constexpr int HALVES = KEYS / ROWS, X = D / 2;
    const cross_args &a;
    uint32_t shared;
    int lane = threadIdx.x % WARP, row = threadIdx.x % GROUP / WARP * 16;
    __device__ __forceinline__ key_side(const cross_args &args, uint32_t memory)
        : a(args), shared(memory)
    {
    }
    /* x (keys, D) += P^T or dS^T, which lies at `left`, times a tile of queries; begun. */
    __device__ __forceinline__ void begin_adding(float (&x)[HALVES][X], uint32_t left,
                                                 uint32_t tile) const
    {
        constexpr int MAIN = panels<D>::COUNT * COLUMNS / 2;
        uint32_t right = tile_start<ROWS>(tile, 0);
        products_begin();
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            uint32_t l = again(operand_start(left + half * PANEL, 0));
#pragma unroll
            for (int s = 0; s < ROWS / 16; s++) {
                const uint64_t p = operand_at(l + s * ROW, 8 * ROW, 1);
                tensor_core<T>::queries(*reinterpret_cast<float(*)[MAIN]>(&x[half]), p,
                                        rows_at(right, s), 1);
                if (panels<D>::REST)
                    tensor_core<T>::rest_of_queries(&x[half][X - 4], p,
                                                    rest_rows_at(rest_of<D, ROWS>(tile, 0), s), 1);
            }
        }
        products_end();
    }
    static __device__ __forceinline__ void settled_all(float (&x)[HALVES][X])
    {
#pragma unroll
        for (int half = 0; half < HALVES; half++) settled(x[half]);
    }
    /* A side's m-th tile. */
    __device__ __forceinline__ void step(float (&dk)[HALVES][X], float (&dv)[HALVES][X], int side,
                                         int m) const
    {
        const uint32_t tiles = shared + L::Q_CAME + side * L::STAGES * 16;
        const uint32_t p = shared + L::P_CAME + side * 16, ds = shared + L::DS_CAME + side * 16;
        const int at = (side * L::STAGES + m % L::STAGES) * L::Q_TILE;
        wait_came<L::STAGES>(tiles, m);
        wait_came<1>(p, m);
        begin_adding(dv, shared + L::P + side * L::P_TILE, shared + L::DOUT + at);
        wait_came<1>(ds, m);
        begin_adding(dk, shared + L::DS + side * L::P_TILE, shared + L::Q + at);
        products_wait<1>();
        settled_all(dv);
        warp_arrive(came<1>(p, m) + 8);
        products_wait<0>();
        settled_all(dk);
        warp_arrive(came<1>(ds, m) + 8);
        warp_arrive(came<L::STAGES>(tiles, m) + 8);
    }
    /* dK and dV, by where K and V were. */
    __device__ __forceinline__ void store(const float (&dk)[HALVES][X],
                                          const float (&dv)[HALVES][X], place at) const
    {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            stage_rows<T, D, KEYS>(shared + L::K, half * ROWS + row, dk[half],
                                   a.scale / weight_factor<T>);
            stage_rows<T, D, KEYS>(shared + L::V, half * ROWS + row, dv[half],
                                   1 / weight_factor<T>);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane > 0) return;
        for (int half = 0; half < HALVES; half++) {
            const int first = half * ROWS + row;
            if (first >= a.Tk) continue;
            const place rows = {first, at.head, at.sample};
            put_rows<D, KEYS, false>(a.dk, rows, shared + L::K, first);
            put_rows<D, KEYS, false>(a.dv, rows, shared + L::V, first);
        }
        puts_end();
        puts_wait<0>();
    }
    /* One of them to its part's place; kind 0 is dK. */
    __device__ __forceinline__ void store_part(const float (&x)[HALVES][X], const item_of &z,
                                               int kind) const
    {
        const int64_t part = (int64_t)(kind * a.parts + z.part) * a.heads + z.head;
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = half * ROWS + row + lane / 4 + i * 8;
                float *to = a.sums + (part * KEYS + key) * D + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < D / 8; j++)
                    *(float2 *)(to + 8 * j) =
                        make_float2(x[half][4 * j + 2 * i], x[half][4 * j + 2 * i + 1]);
            }
    }
    __device__ __forceinline__ void items() const
    {
        int uses[SIDES] = {}, n = 0;
        FOR_EACH_ITEM(a, number)
        {
            float dk[HALVES][X] = {}, dv[HALVES][X] = {};
            settled_all(dk); /* the zeros, too, before products begin */
            settled_all(dv);
            item_of z(a, number);
#pragma unroll 1
            for (int tile = z.first; tile < z.last; tile++) {
                const int side = (tile - z.first) % SIDES;
                step(dk, dv, side, side ? uses[1] : uses[0]);
                side ? uses[1]++ : uses[0]++;
            }
            wait_came<1>(shared + L::KV_READ, n);
            if (a.sums)
                store_part(dk, z, 0), store_part(dv, z, 1);
            else
                store(dk, dv, z.at);
            warp_arrive(came<1>(shared + L::KV_CAME, n) + 8);
            n++;
        }
        if (lane == 0) puts_done();
    }
};

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 1)
    cross_backward_kernel(const __grid_constant__ cross_args a)
{
    using L = layout<D>;
    extern __shared__ __align__(1024) char memory[];
    uint32_t shared = shared_address(memory);
    if (panels<D>::REST && threadIdx.x < ZEROS / 16)
        *(float4 *)(memory + L::NOTHING + threadIdx.x * 16) = float4{};
    if (threadIdx.x == 0)
        for (int at = L::BARRIERS; at < L::BYTES; at += 16) {
            const bool by_warps = at >= L::P_CAME; /* P and dS */
            mbarrier_begin(shared + at, at == L::KV_READ ? SIDES * WARPS : by_warps ? WARPS : 1);
            mbarrier_begin(shared + at + 8, WARPS);
        }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const int group = threadIdx.x / GROUP;
    if (group == 0) {
        registers_give<LOADER_REGISTERS>();
        if (threadIdx.x == 0) fetch_all<D>(a, shared);
    } else if (group <= SIDES) {
        registers_take<QUERY_REGISTERS>();
        query_side<T, D>(a, shared, group - 1).items();
    } else {
        registers_take<KEY_REGISTERS>();
        key_side<T, D>(a, shared).items();
    }
}

/* ---- parts ---- */

template <typename T> struct sum_args {
    const float *sums;
    T *dk, *dv;
    int64_t dk_row, dv_row;
    float scale; /* of dK */
    int parts, heads, H, Tk;
};
/* Four values a thread: (values, heads, dK and dV). */
template <typename T, int D>
static __global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const sum_args<T> a)
{
    const int at = (blockIdx.x * SUM_THREADS + threadIdx.x) * 4, key = at / D, kind = blockIdx.z;
    const int head = blockIdx.y;
    if (key >= a.Tk) return;
    const int64_t part = (int64_t)a.heads * KEYS * D;
    const float *from = a.sums + kind * a.parts * part + (int64_t)head * KEYS * D + at;
    float x[4], more[4];
    load<float, 4>(from, x);
    for (int i = 1; i < a.parts; i++) {
        load<float, 4>(from + i * part, more);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] += more[e];
    }
    const float scale = (kind ? 1 : a.scale) / weight_factor<T>;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] *= scale;
    const int64_t row = (int64_t)(head / a.H) * a.Tk + key;
    T *to = kind ? a.dv + row * a.dv_row : a.dk + row * a.dk_row;
    store<T, 4>(to + head % a.H * D + at % D, x);
}

/* ---- on the host ---- */

static int tiles_of_queries(const struct lg_attention_backward_args *a)
{
    return (int)ceil_div(a->q.dim[1], ROWS);
}
/* Tiles of a part: all, or by the number of queries alone. */
static int of_part(const struct lg_attention_backward_args *a)
{
    return (int)ceil_div(tiles_of_queries(a), ceil_div(a->q.dim[1], PART_QUERIES));
}
static int parts_of(const struct lg_attention_backward_args *a)
{
    return (int)ceil_div(tiles_of_queries(a), of_part(a));
}

template <typename T, int D>
static void add_parts(cudaStream_t stream, const struct lg_attention_backward_args *a,
                      const cross_args &z)
{
    const sum_args<T> s = {z.sums,
                           (T *)a->dk.data,
                           (T *)a->dv.data,
                           lg_row_stride(&a->dk, 2),
                           lg_row_stride(&a->dv, 2),
                           z.scale,
                           z.parts,
                           z.heads,
                           z.H,
                           z.Tk};
    const dim3 grid((unsigned)ceil_div(z.Tk * D, 4 * SUM_THREADS), (unsigned)z.heads, 2);
    sum_kernel<T, D><<<grid, SUM_THREADS, 0, stream>>>(s);
    LG_CUDA_LAUNCHED();
}

template <typename T, int D>
static void launch(lg_stream *stream, const struct lg_attention_backward_args *a)
{
    using L = layout<D>;
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    const int heads = (int)(a->q.dim[0] * a->q.dim[2]), parts = parts_of(a);
    const cross_args z = {maps_of<D>(&a->q, ROWS),
                          maps_of<D>(&a->dout, ROWS),
                          maps_of<D>(&a->k, KEYS),
                          maps_of<D>(&a->v, KEYS),
                          streams_of<D>(&a->dq, 0, 16),
                          streams_of<D>(&a->dk, 0, 16),
                          streams_of<D>(&a->dv, 0, 16),
                          (const float *)a->lse.data,
                          (const int32_t *)a->k_length.data,
                          parts > 1 ? (float *)stream->scratch : nullptr,
                          (float)a->scale,
                          (int)a->q.dim[1],
                          (int)a->k.dim[1],
                          (int)a->q.dim[2],
                          heads,
                          tiles_of_queries(a),
                          parts,
                          of_part(a)};
    const unsigned grid =
        (unsigned)LG_MIN(lg_cuda_device_of(stream)->multiprocessors, heads * parts);
    LG_CUDA(cudaFuncSetAttribute(cross_backward_kernel<T, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    cross_backward_kernel<T, D><<<grid, THREADS, L::BYTES, cuda>>>(z);
    LG_CUDA_LAUNCHED();
    if (parts > 1) add_parts<T, D>(cuda, a, z);
}

bool cuda_cross_attention_takes(const lg_cuda_device *gpu,
                                const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,  a->k.data,  a->v.data, a->dout.data,
                       a->dq.data, a->dk.data, a->dv.data};
    const lg_tensor *rows[] = {&a->q, &a->k, &a->v, &a->dout, &a->dq, &a->dk, &a->dv};
    const int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72)) return false;
    if (a->k.dim[1] > KEYS || a->q.dim[1] < LEAST_QUERIES || !(a->scale > 0)) return false;
    if (a->first_queries || a->first_keys) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (lg_row_stride(rows[i], 2) % 8) return false;
    return true;
}
size_t cuda_cross_attention_scratch(const struct lg_attention_backward_args *a)
{
    const size_t part = (size_t)(a->q.dim[0] * a->q.dim[2] * KEYS * a->q.dim[3]) * sizeof(float);
    return parts_of(a) > 1 ? 2 * (size_t)parts_of(a) * part : 0;
}
void cuda_cross_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    if (a->q.dim[3] == 64)
        a->q.dtype == LG_F16 ? launch<fp16, 64>(s, a) : launch<bf16, 64>(s, a);
    else
        a->q.dtype == LG_F16 ? launch<fp16, 72>(s, a) : launch<bf16, 72>(s, a);
}
