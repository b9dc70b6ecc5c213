/* Forward of attention over many tokens on the tensor cores (wgmma): any numbers of queries and keys, d = 64, 72 or
 * 128, bf16 or fp16, no bias; with d = 64 and 72 key lengths.
 *
 *     S = Q K^T,  P = exp(scale (S - top)),  o = P V / sum of P,  lse = scale top + log(sum of P)
 *
 * After FlashAttention-3 (Shah and others, 2024): a block goes through every gridDim-th item, 64 queries a warpgroup
 * of a head. A thread of its first warpgroup fetches queries, and keys and values in tiles of 128, by TMA. Each of
 * the others has its queries' scores, weights and sums in registers, and begins the scores of the next tile, and the
 * product of this one's weights and values, before it computes the next weights; warpgroups begin in turns, so that
 * one's products run while others compute weights.
 *
 * top, of a row, is the maximum of the first tile's scores, and changes only when it must: to look for the maximum of
 * every tile took a fifth of the instructions for a tile and 8 to 9 % of the time. Any weights will do whose sums and
 * products are finite and that fp16 can hold. So weights are computed with the top that is there. When a thread's 32
 * weights of a row come to more than 2^15, perhaps to infinity, its warp computes the tile's scores again, by itself
 * (the warpgroup's are overwritten), and top becomes the row's maximum if that has a weight of more than 2^10 (32 of
 * these come to 2^15), and sums and o are brought to it.
 * The tiles come from the last to the first: the one with missing keys is the first, and their scores are -inf. top
 * starts at -1e30: were all scores -inf, they would count as nothing, not as NaN.
 *
 * A head's bits depend on nothing but its rows. Of 16 B H T^2 bits at T = 4096, d = 64, B H = 64 there are 275
 * GFLOP (0.35 ms at 790 TFLOP/s) and 1.07 G exponentials (0.30 ms at 16 a clock and multiprocessor, 1.7 GHz).
 * Tried: a polynomial for an eighth of the exponentials (9 % slower), sums of weights by the tensor cores (12 to 23 %),
 * no turns (2 to 5 % slower), turns given only when scores have come (d = 72: 6 % slower). */
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/long_attention.h"
#include "kernels/cuda/long_attention_tiles.cuh"

enum { ROWS = 64, KEYS = 128, EIGHTS = KEYS / 8 }; /* of a warpgroup; of a tile */
enum { FEW_LEAST = 16 };                           /* keys of a text, with heads of 64 and 72 */
#define LEAST_SCORE (-1e30f)
#define MOST_ABOVE  10.0f    /* log2 of the largest weight, where top has been looked at */
#define MOST_IN_SUM 32768.0f /* of a thread's weights of a row of a tile */

template <int D> struct forward_layout {
    static constexpr int GROUPS = D > 96 ? 2 : 3, THREADS = (GROUPS + 1) * GROUP;
    static constexpr int REGISTERS = D > 96 ? 240 : 160, LOADER_REGISTERS = D > 96 ? 24 : 32;
    static constexpr int STAGES = D > 96 ? 2 : 3, Q_STAGES = 2, QUERIES = GROUPS * ROWS;
    static constexpr int Q_TILE = panels<D>::bytes(QUERIES), TILE = panels<D>::bytes(KEYS);
    static constexpr int K = Q_STAGES * Q_TILE, V = K + STAGES * TILE;
    static constexpr int NOTHING = V + STAGES * TILE, BARRIERS = NOTHING + panels<D>::REST * ZEROS;
    static constexpr int BYTES = BARRIERS + 16 * (Q_STAGES + 2 * STAGES);
    static_assert(BYTES <= LG_CUDA_SHARED_HOPPER, "of a block");
};
struct forward_args {
    tile_maps q, k, v;
    streams o, o_low;
    bool has_low, whole_keys; /* no tile of keys has those of both streams */
    float *lse;               // (B, H, Tq) or NULL
    const int32_t *lengths;   // (B) or NULL
    float scale;
    int Tq, Tk, H;
    int tiles, items; /* of queries of a head, of all heads */
};

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[64], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("128", type, N64, F64(d, 0), "%64", "%65", "%66", "0, 0");              \
        }                                                                                          \
        static __device__ __forceinline__ void values(float (&d)[32], const uint32_t *a,           \
                                                      uint64_t b, int add)                         \
        {                                                                                          \
            PRODUCT_REGISTERS_OR_SET("64", type, N32, F16(d, 0) COMMA F16(d, 16),                  \
                                     "%32, %33, %34, %35", "%36", "%37", "1");                     \
        }                                                                                          \
        static __device__ __forceinline__ void rest_of_values(float *d, const uint32_t *a,         \
                                                              uint64_t b, int add)                 \
        {                                                                                          \
            PRODUCT_REGISTERS_OR_SET("8", type, N4, F4(d, 0), "%4, %5, %6, %7", "%8", "%9", "1");  \
        }                                                                                          \
        static __device__ __forceinline__ void values(float (&d)[64], const uint32_t *a,           \
                                                      uint64_t b, int add)                         \
        {                                                                                          \
            PRODUCT_REGISTERS_OR_SET("128", type, N64, F64(d, 0), "%64, %65, %66, %67", "%68",     \
                                     "%69", "1");                                                  \
        }                                                                                          \
    };
TENSOR_CORE(bf16, "bf16")
TENSOR_CORE(fp16, "f16")

/* A ring of N places with two barriers each, `came` and `free`; this one is the caller's next. */
template <int N> struct ring {
    uint32_t barriers;
    int at = 0, turn = 0;
    __device__ __forceinline__ explicit ring(uint32_t where) : barriers(where) {}
    __device__ __forceinline__ uint32_t came() const { return barriers + 16 * at; }
    __device__ __forceinline__ uint32_t free() const { return barriers + 16 * at + 8; }
    __device__ __forceinline__ void wait_came() const { mbarrier_wait(came(), turn); }
    __device__ __forceinline__ void wait_free() const { mbarrier_wait(free(), turn ^ 1); }
    __device__ __forceinline__ void next()
    {
        if (++at == N) at = 0, turn ^= 1;
    }
};
template <int D> struct rings {
    using L = forward_layout<D>;
    ring<L::Q_STAGES> q;
    ring<L::STAGES> k, v;
    __device__ __forceinline__ explicit rings(uint32_t shared)
        : q(shared + L::BARRIERS), k(q.barriers + 16 * L::Q_STAGES), v(k.barriers + 16 * L::STAGES)
    {
    }
};

/* ---- the thread that fetches ---- */

/* How many keys the item's sample has. It is read again where it is wanted: there is no register for it. */
template <bool LENGTHS>
static __device__ __forceinline__ int keys_of(const forward_args &a, int item)
{
    int n;
    if (!LENGTHS) return a.Tk;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(n) : "l"(a.lengths + item / a.tiles / a.H));
    return n;
}
/* A tile of keys, and of values. */
template <int D, typename F>
static __device__ __forceinline__ void fetch_pair(const forward_args &a, rings<D> &r,
                                                  uint32_t shared, F fetch)
{
    using L = forward_layout<D>;
    r.k.wait_free();
    mbarrier_expect(r.k.came(), L::TILE);
    fetch(shared + L::K + r.k.at * L::TILE, a.k, r.k.came());
    r.k.next();
    r.v.wait_free();
    mbarrier_expect(r.v.came(), L::TILE);
    fetch(shared + L::V + r.v.at * L::TILE, a.v, r.v.came());
    r.v.next();
}
/* Of one stream, or of two whose keys' tiles are WHOLE, each stream's keys have a loop, with descriptions whose addresses are
 * known: to choose between them for every tile cost 3 to 4 %. */
template <int D, bool LENGTHS, tiles_kind KIND>
static __device__ __forceinline__ void produce(const forward_args &a, uint32_t shared)
{
    using L = forward_layout<D>;
    constexpr tiles_kind QUERIES_KIND = KIND == OF_ONE ? OF_ONE : ANY;
    rings<D> r(shared);
    for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
        int head = item / a.tiles;
        place at = {item % a.tiles * L::QUERIES, head % a.H, head / a.H};
        r.q.wait_free();
        mbarrier_expect(r.q.came(), L::Q_TILE);
        fetch_tile<D, L::QUERIES, QUERIES_KIND>(shared + r.q.at * L::Q_TILE, a.q, at, r.q.came());
        r.q.next();
        int keys = LENGTHS ? keys_of(a.lengths, at.sample, a.Tk) : a.Tk;
        at.token = (keys - 1) / KEYS * KEYS;
        if (KIND == WHOLE) {
            const int first = a.k.whole.first;
            for (; at.token >= first; at.token -= KEYS) {
                const place within = {at.token - first, at.head, at.sample};
                fetch_pair<D>(a, r, shared, [&](uint32_t to, const tile_maps &from, uint32_t came) {
                    fetch_rows<D, KEYS>(to, 0, from.whole.of[1], within, came);
                });
            }
        }
        /* The other way of counting spills registers here, and this one there. */
        if (KIND == OF_ONE)
            for (int i = (keys - 1) / KEYS; i >= 0; i--) {
                const place within = {i * KEYS, at.head, at.sample};
                fetch_pair<D>(a, r, shared, [&](uint32_t to, const tile_maps &from, uint32_t came) {
                    fetch_tile<D, KEYS, OF_ONE>(to, from, within, came);
                });
            }
        else
            for (; at.token >= 0; at.token -= KEYS)
                fetch_pair<D>(a, r, shared, [&](uint32_t to, const tile_maps &from, uint32_t came) {
                    fetch_tile<D, KEYS, KIND == ANY ? ANY : OF_ONE>(to, from, at, came);
                });
    }
}

/* ---- a warpgroup that computes ---- */

/* Hardware barrier 1 + group: its turn. */
static __device__ __forceinline__ void take_turn(int group)
{
    barrier_sync(1 + group, 2 * GROUP);
}
template <int GROUPS> static __device__ __forceinline__ void give_turn(int group)
{
    barrier_arrive(1 + (group + 1 == GROUPS ? 0 : group + 1), 2 * GROUP);
}
/* What a thread knows of its two rows. */
struct row_state {
    float top[2], sums[2], fade[2]; /* sums: of the thread's own weights */
};
/* x = q k^T of the group's rows of a tile of queries, begun. */
template <typename T, int D>
static __device__ __forceinline__ void begin_scores(float (&x)[64], uint32_t shared, uint32_t q,
                                                    int row, uint32_t k)
{
    using L = forward_layout<D>;
    uint32_t left = tile_start<L::QUERIES>(q, row), right = tile_start<KEYS>(k, 0);
    products_begin();
#pragma unroll
    for (int s = 0; s < panels<D>::STEPS; s++)
        tensor_core<T>::scores(x, columns_at<L::QUERIES>(left, s), columns_at<KEYS>(right, s),
                               s > 0);
    if (panels<D>::REST)
        tensor_core<T>::scores(x, left_rest(rest_of<D, L::QUERIES>(q, row), shared + L::NOTHING),
                               right_rest(rest_of<D, KEYS>(k, 0)), 1);
    products_end();
}
/* o (+)= p v, begun. */
template <typename T, int D>
static __device__ __forceinline__ void begin_values(float (&o)[D / 2],
                                                    const uint32_t (&p)[KEYS / 4], uint32_t v,
                                                    int add)
{
    constexpr int MAIN = panels<D>::COUNT * COLUMNS / 2;
    uint32_t right = tile_start<KEYS>(v, 0);
    products_begin();
#pragma unroll
    for (int s = 0; s < KEYS / 16; s++) {
        tensor_core<T>::values(*reinterpret_cast<float(*)[MAIN]>(&o), p + 4 * s, rows_at(right, s),
                               add || s > 0);
        if (panels<D>::REST)
            tensor_core<T>::rest_of_values(&o[D / 2 - 4], p + 4 * s,
                                           rest_rows_at(rest_of<D, KEYS>(v, 0), s), add || s > 0);
    }
    products_end();
}
/* Where 8 columns lie that ldmatrix takes, 16 bytes number `chunk` of a row of a tile of ROWS. */
template <int ROWS>
static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk)
{
    return tile + chunk / 8 * ROWS * ROW + row * ROW + (chunk % 8 ^ row % 8) * 16;
}
/* x = q k^T of the warp's rows, as begin_scores leaves it, by the warp alone. */
template <typename T, int D>
static __device__ __forceinline__ void scores_again(float (&x)[64], uint32_t q, uint32_t k)
{
    using L = forward_layout<D>;
    const int thread = (int)again(threadIdx.x) - GROUP; /* nothing of this in registers before */
    const int lane = thread % WARP, row = thread / WARP * 16;
    float(&sums)[EIGHTS][4] = *reinterpret_cast<float(*)[EIGHTS][4]>(&x);
    uint32_t left[4], right[4];
#pragma unroll
    for (int i = 0; i < 64; i++) x[i] = 0;
#pragma unroll 1
    for (int s = 0; s < panels<D>::STEPS; s++) {
        load_matrices(left, chunk_at<L::QUERIES>(q, row + lane % 16, 2 * s + lane / 16));
#pragma unroll
        for (int j = 0; j < EIGHTS; j += 2) {
            int key = 8 * j + (int)again(lane / 16 * 8 + lane % 8);
            load_matrices(right, chunk_at<KEYS>(k, key, 2 * s + lane / 8 % 2));
            product<T>(sums[j], left, right);
            product<T>(sums[j + 1], left, right + 2);
        }
    }
    if (!panels<D>::REST) return;
    load_matrices(left, rest_of<D, L::QUERIES>(q, row + lane % 16));
    left[2] = left[3] = 0;
#pragma unroll
    for (int j = 0; j < EIGHTS; j += 4) {
        load_matrices(right, rest_of<D, KEYS>(k, 8 * j + lane));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const uint32_t eight[2] = {right[e], 0};
            product<T>(sums[j + e], left, eight);
        }
    }
}
/* top follows the scores; fade: by what that changes earlier weights. */
static __device__ __forceinline__ void follow(const float (&x)[64], row_state &w, float factor)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = x[2 * r], odd = x[2 * r + 1];
#pragma unroll
        for (int j = 1; j < EIGHTS; j++) {
            even = fmaxf(even, x[4 * j + 2 * r]);
            odd = fmaxf(odd, x[4 * j + 2 * r + 1]);
        }
        float high = quad_max(fmaxf(even, odd)), top = w.top[r];
        if ((high - top) * factor > MOST_ABOVE) top = high;
        w.fade[r] = exp2_of((w.top[r] - top) * factor);
        w.top[r] = top;
        w.sums[r] *= w.fade[r];
    }
}
/* Scores to weights, in x; the thread's sums of them. */
static __device__ __forceinline__ void weigh(float (&x)[64], const row_state &w, float factor,
                                             float (&sums)[2])
{
    const float minus[2] = {-w.top[0] * factor, -w.top[1] * factor};
    float parts[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        x[i] = exp2_of(fmaf(x[i], factor, minus[i / 2 % 2]));
        parts[i % 4] += x[i];
    }
    sums[0] = parts[0] + parts[1], sums[1] = parts[2] + parts[3];
}
template <typename T>
static __device__ __forceinline__ void round_weights(uint32_t (&p)[KEYS / 4], const float (&x)[64])
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = packed(x[2 * i], x[2 * i + 1], T());
}
template <int N>
static __device__ __forceinline__ void scale_rows(float (&x)[N], const float (&factors)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= factors[i / 2 % 2];
}
/* Scores of keys from `keys` on to -inf. */
static __device__ __forceinline__ void mask(float (&x)[64], int keys)
{
    int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (i / 4 * 8 + first + i % 2 >= keys) x[i] = -INFINITY;
}

/* The warpgroup's o, weighed sums not yet divided, of a tile of queries at q. */
template <typename T, int D, bool LENGTHS>
static __device__ __forceinline__ void attend(const forward_args &a, float (&o)[D / 2],
                                              row_state &w, rings<D> &r, uint32_t shared,
                                              uint32_t q, int group, int item)
{
    using L = forward_layout<D>;
    constexpr int GROUPS = L::GROUPS;
    float x[64], sums[2], factor = a.scale * LOG2_E;
    uint32_t p[KEYS / 4];
    uint32_t k0 = shared + L::K, v0 = shared + L::V;
    w = {{LEAST_SCORE, LEAST_SCORE}, {0, 0}, {1, 1}};
    r.k.wait_came();
    take_turn(group);
    begin_scores<T, D>(x, shared, q, group * ROWS, k0 + r.k.at * L::TILE);
    give_turn<GROUPS>(group);
    products_wait<0>();
    settled(x);
    warp_arrive(r.k.free());
    r.k.next();
    int rest = keys_of<LENGTHS>(a, item) % KEYS;
    if (rest) mask(x, rest);
    follow(x, w, factor);
    weigh(x, w, factor, w.sums);
    round_weights<T>(p, x);
#pragma unroll 1
    for (int i = 1; i * KEYS < keys_of<LENGTHS>(a, item); i++) {
        r.k.wait_came();
        take_turn(group);
        begin_scores<T, D>(x, shared, q, group * ROWS, k0 + r.k.at * L::TILE);
        r.v.wait_came();
        begin_values<T, D>(o, p, v0 + r.v.at * L::TILE, i > 1);
        give_turn<GROUPS>(group);
        products_wait<1>();
        settled(x);
        weigh(x, w, factor, sums);
        const bool far = __any_sync(0xffffffff, fmaxf(sums[0], sums[1]) > MOST_IN_SUM);
        if (far) {
            scores_again<T, D>(x, q, k0 + r.k.at * L::TILE);
            follow(x, w, factor);
            weigh(x, w, factor, sums);
        }
        warp_arrive(r.k.free());
        r.k.next();
        w.sums[0] += sums[0], w.sums[1] += sums[1];
        products_wait<0>();
        settled(o);
        warp_arrive(r.v.free());
        r.v.next();
        if (far) scale_rows(o, w.fade);
        round_weights<T>(p, x);
    }
    r.v.wait_came();
    begin_values<T, D>(o, p, v0 + r.v.at * L::TILE, keys_of<LENGTHS>(a, item) > KEYS);
    products_wait<0>();
    settled(o);
    warp_arrive(r.v.free());
    r.v.next();
}
template <typename T, int D, bool LENGTHS, bool TWO>
static __device__ __forceinline__ void consume(const forward_args &a, uint32_t shared, int group)
{
    using L = forward_layout<D>;
    int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    int row = group * ROWS + warp * 16; /* the warp's first */
    rings<D> r(shared);
    if (group == L::GROUPS - 1) give_turn<L::GROUPS>(group);
#pragma unroll 1
    for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
        int head = item / a.tiles;
        place at = {item % a.tiles * L::QUERIES + row, head % a.H, head / a.H};
        uint32_t tile = shared + r.q.at * L::Q_TILE;
        float o[D / 2];
        row_state w;
        r.q.wait_came();
        attend<T, D, LENGTHS>(a, o, w, r, shared, tile, group, item);
        w.sums[0] = quad_sum(w.sums[0]), w.sums[1] = quad_sum(w.sums[1]);
        const float shares[2] = {__fdividef(1, w.sums[0]), __fdividef(1, w.sums[1])};
        scale_rows(o, shares);
        /* Where its queries were: the group's products have read them. */
        barrier_sync(1 + L::GROUPS + group, GROUP);
        stage_rows<T, D, L::QUERIES>(tile, row, o, 1);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            put_rows<D, L::QUERIES, TWO>(a.o, at, tile, row);
            puts_end();
        }
        if (a.has_low) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] -= to_float(from_float<T>(o[i]));
            if (lane == 0) puts_wait<0>(); /* o has been read */
            __syncwarp();
            stage_rows<T, D, L::QUERIES>(tile, row, o, 1);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) {
                put_rows<D, L::QUERIES, TWO>(a.o_low, at, tile, row);
                puts_end();
            }
        }
        if (a.lse && lane % 4 == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int token = at.token + lane / 4 + 8 * i;
                if (token < a.Tq)
                    a.lse[(int64_t)head * a.Tq + token] = w.top[i] * a.scale + logf(w.sums[i]);
            }
        if (lane == 0) {
            puts_wait<0>();
            mbarrier_arrive(r.q.free());
        }
        __syncwarp();
        r.q.next();
    }
    if (group == 0) take_turn(0); /* what the last group gave last */
    if (lane == 0) puts_done();
}

template <typename T, int D, bool LENGTHS, bool TWO>
static __global__ void __launch_bounds__(forward_layout<D>::THREADS, 1)
    long_forward_kernel(const __grid_constant__ forward_args a)
{
    using L = forward_layout<D>;
    extern __shared__ __align__(1024) char memory[];
    uint32_t shared = shared_address(memory);
    if (panels<D>::REST && threadIdx.x < ZEROS / 16)
        *(float4 *)(memory + L::NOTHING + threadIdx.x * 16) = float4{};
    if (threadIdx.x < L::Q_STAGES + 2 * L::STAGES) {
        uint32_t came = shared + L::BARRIERS + threadIdx.x * 16;
        mbarrier_begin(came, 1);
        mbarrier_begin(came + 8, L::GROUPS * GROUP / WARP);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<L::LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            !TWO           ? produce<D, LENGTHS, OF_ONE>(a, shared)
            : a.whole_keys ? produce<D, LENGTHS, WHOLE>(a, shared)
                           : produce<D, LENGTHS, ANY>(a, shared);
    } else {
        registers_take<L::REGISTERS>();
        consume<T, D, LENGTHS, TWO>(a, shared, threadIdx.x / GROUP - 1);
    }
}

/* ---- on the host ---- */

template <typename T, int D, bool LENGTHS, bool TWO>
static void launch(lg_stream *stream, const struct lg_attention_forward_args *a)
{
    using L = forward_layout<D>;
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    int tiles = (int)ceil_div(a->q.dim[1], L::QUERIES);
    forward_args f = {tiles_of<D>(&a->q, a->first_queries, L::QUERIES),
                      tiles_of<D>(&a->k, a->first_keys, KEYS),
                      tiles_of<D>(&a->v, a->first_keys, KEYS),
                      streams_of<D>(&a->o, a->first_queries, 16),
                      streams_of<D>(a->o_low.data ? &a->o_low : &a->o, a->first_queries, 16),
                      a->o_low.data != nullptr,
                      false,
                      (float *)a->lse.data,
                      (const int32_t *)a->k_length.data,
                      (float)a->scale,
                      (int)a->q.dim[1],
                      (int)a->k.dim[1],
                      (int)a->q.dim[2],
                      tiles,
                      (int)(a->q.dim[0] * a->q.dim[2]) * tiles};
    f.whole_keys = all_whole(f.k, KEYS);
    unsigned blocks = (unsigned)(f.items < multiprocessors ? f.items : multiprocessors);
    LG_CUDA(cudaFuncSetAttribute(long_forward_kernel<T, D, LENGTHS, TWO>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    long_forward_kernel<T, D, LENGTHS, TWO><<<blocks, L::THREADS, L::BYTES, cuda>>>(f);
    LG_CUDA_LAUNCHED();
}
template <typename T>
static void launch_for(lg_stream *s, const struct lg_attention_forward_args *a)
{
    const int64_t d = a->q.dim[3];
    const bool two = lie_apart(a->q, a->first_queries, a->first_keys);
    if (a->k_length.data)
        return d == 64 ? launch<T, 64, true, false>(s, a) : launch<T, 72, true, false>(s, a);
    if (d == 64) return two ? launch<T, 64, false, true>(s, a) : launch<T, 64, false, false>(s, a);
    if (d == 72) return two ? launch<T, 72, false, true>(s, a) : launch<T, 72, false, false>(s, a);
    two ? launch<T, 128, false, true>(s, a) : launch<T, 128, false, false>(s, a);
}

bool cuda_long_attention_forward_takes(const lg_cuda_device *gpu,
                                       const struct lg_attention_forward_args *a)
{
    const void *p[] = {a->q.data, a->k.data, a->v.data, a->o.data, a->o_low.data};
    int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72 && d != 128))
        return false;
    const bool few = d <= 72 && a->q.dim[1] >= LONG_LEAST && a->k.dim[1] >= FEW_LEAST;
    if (!few && !long_enough(a->q.dim[1], a->k.dim[1])) return false;
    if (a->bias.rank || a->causal || !(a->scale > 0)) return false;
    if (a->k_length.rank && d == 128) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    if (!ends_on_rows(a->first_queries) || !ends_on_rows(a->first_keys)) return false;
    return lg_row_stride(&a->q, 2) % 8 == 0 && lg_row_stride(&a->k, 2) % 8 == 0 &&
           lg_row_stride(&a->v, 2) % 8 == 0;
}
void cuda_long_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    a->q.dtype == LG_F16 ? launch_for<fp16>(s, a) : launch_for<bf16>(s, a);
}
