/* Convolutions 3x3 of stride 1 or 2 on the tensor cores (wgmma), NHWC, bf16 or fp16, and with stride 1
 * the GroupNorm and SiLU before them:
 *
 *     y = x * w + bias (+ residual), or silu(x factor + offset) * w + ..., with a factor and an offset
 *     for each sample and channel of x; and sums over y for the GroupNorm behind it, or, of 128 channels of a
 *     clip, silu of y's RMSNorm over channels, beside y or instead of it
 *
 * A block computes tiles of 16 x 16 pixels x 128 channels, or the 64 that may be left over. The inner dimension comes 32 channels at a
 * time: a patch of 18 x 18 pixels serves all nine taps, since an operand of wgmma may begin at any of
 * its pixels: 64 rows of a product are 8 x 8 pixels, and rows of pixels lie 18 apart. TMA fills with
 * zeros what lies outside of the picture, which is the padding. With stride 2 the patches are four, of
 * 17 x 17 pixels: TMA takes every second pixel of every second row, from the first or the second on.
 *
 * Warps: warp 0 loads patches, warp 1 weights, two warpgroups multiply, each 8 rows of the tile, and
 * warps 2 and 3 store what these have finished. Where x is normalised a fourth warpgroup does that in
 * place as soon as a patch has arrived, rounds as a GroupNorm of its own would, and leaves the padding.
 * Patches and weights (of one tap) go through a ring each; a slot has a barrier for "full" and one for
 * "empty", a patch one for "normalised". Of a barrier every use is waited for. The two blocks of a
 * cluster have neighbouring tiles and the same channels: each loads half of the weights for both.
 * Blocks stay and take every n-th tile; while a tile is finished, the next one's operands come.
 *
 * A tile is finished in slots of the patches' ring, 32 channels at a time: the residual arrives there
 * as a patch does, is added in place, and the result leaves from there by TMA. What is normed follows in four slots more, from
 * y as rounded, which stayed in registers: the four lanes that hold a pixel have all of its channels.
 *
 * Shared memory, of 227 KiB: 6 patches of 20.5 KiB, 12 weights of 8 KiB, 6 KiB of sums. Its rows are 32
 * channels (64 bytes) whose pieces of 16 bytes are permuted by half the row's number modulo 4 (the
 * 64-byte swizzle of TMA and wgmma): every access below is free of conflicts. What it moves, of 128
 * bytes a cycle at the tensor cores' full speed: products 96, weights 16, patches 4.5, norm 9.
 *
 * Sums: for each half tile (128 pixels) and pair of neighbouring channels the mean and the sum of
 * squared distances from it, of y as rounded. Each warp sums differences from its first pixel, so
 * that a mean far from 0 costs no digits; the rest is in double.
 *
 * The order of every sum is fixed and does not depend on the tile's place: the same bits for a
 * sample whatever its slot. */
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/tile_conv.h"
#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { SIDE = 16, PIXELS = SIDE * SIDE, CHANNELS = 128, DEPTH = 32, ROW = DEPTH * 2, TAPS = 3 };
enum { GROUPS = 2, GROUP_THREADS = 128, GROUP_WARPS = GROUP_THREADS / WARP };
enum { GROUP_PIXELS = PIXELS / GROUPS, GROUP_BYTES = GROUP_PIXELS * ROW };
enum { CLUSTER = 2, PATCHES = 6, WEIGHTS = 12, CHUNKS = CHANNELS / DEPTH, PAIRS = CHANNELS / 2 };
enum { PATCH_SLOT = 20992, WEIGHT_SLOT = CHANNELS * ROW };
/* Pixels of a patch's side; the tap (i, j) reads patch (i % stride, j % stride) from its pixel
 * (i / stride, j / stride) on. */
static constexpr __host__ __device__ int patch_side(int stride)
{
    return SIDE + (TAPS - 1) / stride;
}
static_assert(patch_side(1) * patch_side(1) * ROW <= PATCH_SLOT && PATCH_SLOT % 512 == 0, "");

struct pair_sum {
    float first, sum, squares; /* sum, squares: of y - first */
};
struct shared {
    alignas(1024) char patch[PATCHES][PATCH_SLOT];
    alignas(1024) char weight[WEIGHTS][WEIGHT_SLOT];
    pair_sum sums[GROUPS][GROUP_WARPS][PAIRS];
    uint64_t patch_full[PATCHES], patch_ready[PATCHES], patch_empty[PATCHES];
    uint64_t weight_full[WEIGHTS], weight_empty[WEIGHTS];
    uint64_t finished[GROUPS]
                     [2 * CHUNKS]; /* the tile's chunk, or that chunk normed, lies in its slot */
};
enum { SHARED_BYTES = sizeof(shared) };

/* What leaves: y, its norm, or both. */
enum normed { NOT_NORMED, ONLY_NORMED, BOTH };
static constexpr __host__ __device__ int chunks_of(normed norm)
{
    return norm == BOTH ? 2 * CHUNKS : CHUNKS;
}

struct problem {
    CUtensorMap x, w, residual, y, after; /* after: where y goes normed, with BOTH */
    float eps;
    const void *bias;
    const float *factors;  /* (N, 2, Ci): factors and offsets of x, or NULL */
    float2 *sums;          /* (N, half tiles, Co / 2), or NULL */
    int pictures, in, out; /* channels */
    int steps;             /* of DEPTH channels each, of all frames that a picture of y sees */
    int stride_time;       /* picture n of y sees frames of x from n stride_time on */
    int H, W;              /* of x */
    int wide, high;        /* tiles of a picture */
    int slices;            /* of 128 of its channels */
    int whole,
        tiles; /* of all pictures and slices, two tiles of pixels counted as one; with those of 64 channels, which come last */
    int top, left;
};

/* ---- copies ---- */

static __device__ __forceinline__ void store_patch(const CUtensorMap *to, const void *from, int c,
                                                   int w, int h, int n)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(c), "r"(w), "r"(h), "r"(n)
                 : "memory");
}
/* Until no store reads shared memory. */
static __device__ __forceinline__ void stores_wait()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* Hardware barriers: the sums of a group's tile before have been read. */
enum { SUMS_READ = 1, SUMS_THREADS = GROUP_THREADS + WARP };

/* ---- wgmma ---- */

#define PRODUCT(type)                                                                              \
    PRODUCT_SHARED("128", type, N64, F16(d, 0) COMMA F16(d, 16) COMMA F16(d, 32) COMMA F16(d, 48), \
                   "%64", "%65", "%66", "0, 0")
/* d (64 x 128) = or += a b. */
template <typename T>
static __device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    if constexpr (sizeof(T) == sizeof(bf16) && __is_same(T, bf16))
        PRODUCT("bf16");
    else
        PRODUCT("f16");
}

#define PRODUCT_OF_REST(type)                                                                      \
    PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34", "0, 0")
/* The same of 64 columns. */
template <typename T>
static __device__ __forceinline__ void product_of_rest(float (&d)[64], uint64_t a, uint64_t b,
                                                       int add)
{
    if constexpr (__is_same(T, bf16))
        PRODUCT_OF_REST("bf16");
    else
        PRODUCT_OF_REST("f16");
}

/* ---- who loads ---- */

struct spot {
    int n, w, h, c; /* picture, first pixel, first channel */
    int number;     /* of the tile in its picture */
};
static __device__ __forceinline__ spot spot_of(const problem &z, int tile)
{
    bool rest = tile >= z.whole;
    int pair = rest ? tile - z.whole : tile / z.slices, slice = rest ? z.slices : tile % z.slices;
    int m = pair * CLUSTER + (int)cluster_rank(), number = m % (z.wide * z.high);
    return {m / (z.wide * z.high), number % z.wide * SIDE, number / z.wide * SIDE, slice * CHANNELS,
            number};
}
#define FOR_EACH_TILE(z, tile)                                                                     \
    for (int tile = blockIdx.x / CLUSTER; tile < (z).tiles; tile += gridDim.x / CLUSTER)

/* DEPTH channels from c on of a frame: first all channels of one, then those of the next. What lies behind the last channel
 * comes as zeros of x, which what there is of w cannot change. */
struct step {
    int c, frame;
    __device__ __forceinline__ void next(const problem &z)
    {
        c += DEPTH;
        if (c < z.in) return;
        c = 0;
        frame++;
    }
};

template <bool ADD, int STRIDE, normed AFTER>
static __device__ void load_patches(const problem &z, shared &s)
{
    enum { PATCH = patch_side(STRIDE) };
    ring<PATCHES> at;
    FOR_EACH_TILE(z, tile)
    {
        spot p = spot_of(z, tile);
        step k = {0, p.n * z.stride_time};
        for (int left = z.steps; left > 0; left--, k.next(z))
            for (int i = 0; i < STRIDE; i++)
                for (int j = 0; j < STRIDE; j++, at.next()) {
                    barrier_wait(&s.patch_empty[at.slot], at.phase ^ 1);
                    barrier_expect(&s.patch_full[at.slot], PATCH * PATCH * ROW);
                    load_map(s.patch[at.slot], &z.x, &s.patch_full[at.slot], k.c,
                             p.w * STRIDE + j - z.left, p.h * STRIDE + i - z.top, k.frame);
                }
        for (int c = 0; c < chunks_of(AFTER) * DEPTH; c += DEPTH, at.next()) {
            uint64_t *full = &s.patch_full[at.slot];
            barrier_wait(&s.patch_empty[at.slot], at.phase ^ 1);
            if (!ADD || c >= CHANNELS) {
                barrier_arrive(full);
                continue;
            }
            barrier_expect(full, GROUPS * GROUP_BYTES);
            for (int g = 0; g < GROUPS; g++)
                load_map(s.patch[at.slot] + g * GROUP_BYTES, &z.residual, full, p.c + c, p.w,
                         p.h + g * SIDE / GROUPS, p.n);
        }
    }
}

template <int STRIDE> static __device__ void load_all_weights(const problem &z, shared &s)
{
    enum { SHARE = CHANNELS / CLUSTER };
    ring<WEIGHTS> at;
    int rank = (int)cluster_rank();
    FOR_EACH_TILE(z, tile)
    {
        int first = spot_of(z, tile).c + rank * SHARE;
        step of = {0, 0};
        for (int left = z.steps; left > 0; left--, of.next(z))
            for (int k = 0; k < TAPS * TAPS; k++, at.next()) {
                /* Of stride 2 patch by patch: taps (0, 0) (0, 2) (2, 0) (2, 2), (0, 1) ... */
                int tap = STRIDE == 1 ? k : (int)(0x453718620 >> 4 * k & 15);
                tap += of.frame * TAPS * TAPS;
                barrier_wait(&s.weight_empty[at.slot], at.phase ^ 1);
                barrier_expect(&s.weight_full[at.slot], WEIGHT_SLOT);
                load_for_all(s.weight[at.slot] + rank * SHARE * ROW, &z.w, &s.weight_full[at.slot],
                             CLUSTER, tap * z.in + of.c, first);
            }
    }
}

/* ---- who multiplies ---- */

struct consumer {
    int group, warp, lane;
    ring<PATCHES> patch;
    ring<WEIGHTS> weight;
    /* What the slot is to hold is there, normalised if it is a patch. For a chunk, too, this waits
     * for those who normalise: of two uses of a slot that they had missed they would see none. */
    template <bool NORM> __device__ __forceinline__ uint64_t *arrived(shared &s) const
    {
        return NORM ? &s.patch_ready[patch.slot] : &s.patch_full[patch.slot];
    }
};

static __device__ __forceinline__ void free_patch(shared &s, int slot)
{
    if (threadIdx.x % GROUP_THREADS == 0) barrier_arrive(&s.patch_empty[slot]);
}
static __device__ __forceinline__ void free_weight(shared &s, int slot)
{
    if (threadIdx.x % GROUP_THREADS < CLUSTER)
        barrier_arrive_at(&s.weight_empty[slot], threadIdx.x % GROUP_THREADS);
}

/* An operand from row p on, any row: pieces are permuted by bits of their own address. From 8 rows
 * to the next 8 it is `step` rows. */
static __device__ __forceinline__ uint64_t operand_of(const void *p, int step)
{
    return operand(shared_address(p), 0, step * ROW, 2);
}

template <typename T, bool NORM, bool REST, int STRIDE>
static __device__ __forceinline__ void multiply(const problem &z, shared &s, consumer &me,
                                                float (&d)[2][64])
{
    enum { PATCH = patch_side(STRIDE), GROUP_ROWS = SIDE / GROUPS, PATCH_KINDS = STRIDE * STRIDE };
    int add = 0, patch_before = 0, weight_before = 0;
    for (int step = 0; step < z.steps; step++) {
#pragma unroll
        for (int kind = 0; kind < PATCH_KINDS; kind++) {
            int slot = me.patch.slot;
            barrier_wait(me.arrived<NORM>(s), me.patch.phase);
            uint64_t a = operand_of(s.patch[slot] + me.group * GROUP_ROWS * PATCH * ROW, PATCH);
#pragma unroll
            for (int tap = 0; tap < TAPS * TAPS; tap++) {
                const int i = tap / TAPS, j = tap % TAPS;
                if (i % STRIDE != kind / STRIDE || j % STRIDE != kind % STRIDE) continue;
                const bool first = i == kind / STRIDE && j == kind % STRIDE;
                const int at = i / STRIDE * PATCH + j / STRIDE;
                barrier_wait(&s.weight_full[me.weight.slot], me.weight.phase);
                uint64_t b = operand_of(s.weight[me.weight.slot], 8);
                products_begin();
#pragma unroll
                for (int k = 0; k < DEPTH / 16; k++) {
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        if constexpr (REST)
                            product_of_rest<T>(d[m], a + (at + m * 8) * ROW / 16 + k * 2, b + k * 2,
                                               add);
                        else
                            product<T>(d[m], a + (at + m * 8) * ROW / 16 + k * 2, b + k * 2, add);
                    add = 1;
                }
                products_end();
                products_wait<1>();
                if (step > 0 || kind > 0 || !first) { /* the step before this one is done */
                    free_weight(s, weight_before);
                    if (first) free_patch(s, patch_before);
                }
                weight_before = me.weight.slot;
                me.weight.next();
            }
            patch_before = slot;
            me.patch.next();
        }
    }
    products_wait<0>();
    settled(d[0]);
    settled(d[1]);
    free_weight(s, weight_before);
    free_patch(s, patch_before);
}

static __device__ __forceinline__ float2 unpacked(uint32_t x, bf16)
{
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
}
static __device__ __forceinline__ float2 unpacked(uint32_t x, fp16)
{
    return __half22float2(*reinterpret_cast<__half2 *>(&x));
}

/* A warp's sums of 32 pairs of channels: of the pair of lane % 4 and product j in sum[j]. */
struct warp_sums {
    float first, sum[8], squares[8];
};

/* Rounds 32 channels of the group's pixels to a slot. Of a product's 8 x 8 pixels a thread holds
 * pixel lane / 4 of rows 2 warp and 2 warp + 1, of each 8 channels the two neighbours from 2 (lane
 * % 4) on; the second product is 8 pixels further. */
template <typename T, int CHUNK, bool ADD, bool SUMS, bool KEEP>
static __device__ __forceinline__ void finish(float (&d)[2][64], char *slot,
                                              const uint32_t (&bias)[16], warp_sums &of,
                                              const consumer &me)
{
    char *line = slot + (me.warp * 2 * SIDE + me.lane / 4) * ROW + me.lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int all = CHUNK * 4 + j, i = all % 8;
        float2 b = unpacked(bias[all], T());
        char *at = line + ((j ^ me.lane / 8) << 4);
        uint32_t y[4], more[4];
        if (ADD) {
#pragma unroll
            for (int r = 0; r < 4; r++)
                more[r] = *reinterpret_cast<uint32_t *>(at + (r / 2 * 8 + r % 2 * SIDE) * ROW);
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float *v = &d[r / 2][all * 4 + r % 2 * 2];
            float2 x = ADD ? unpacked(more[r], T()) : float2{0, 0};
            y[r] = ADD ? packed(v[0] + b.x + x.x, v[1] + b.y + x.y, T())
                       : packed(v[0] + b.x, v[1] + b.y, T());
            *reinterpret_cast<uint32_t *>(at + (r / 2 * 8 + r % 2 * SIDE) * ROW) = y[r];
            if (!KEEP) continue;
            x = unpacked(y[r], T());
            v[0] = x.x, v[1] = x.y;
        }
        if (!SUMS) continue;
        float k = __shfl_sync(0xffffffff, unpacked(y[0], T()).x, me.lane % 4);
        if (i == me.lane / 4) of.first = k;
        of.sum[i] = of.squares[i] = 0;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float2 u = unpacked(y[r], T());
            u.x -= k, u.y -= k;
            of.sum[i] += u.x + u.y;
            of.squares[i] = fmaf(u.x, u.x, fmaf(u.y, u.y, of.squares[i]));
        }
    }
}

template <typename T, int CHUNK, bool NORM, bool ADD, bool SUMS, bool KEEP>
static __device__ __forceinline__ void finish_all(float (&d)[2][64], shared &s,
                                                  const uint32_t (&bias)[16], warp_sums &of,
                                                  consumer &me)
{
    barrier_wait(me.arrived<NORM>(s), me.patch.phase);
    finish<T, CHUNK, ADD, SUMS, KEEP>(d, s.patch[me.patch.slot] + me.group * GROUP_BYTES, bias, of,
                                      me);
    if (SUMS && CHUNK == 1) barrier_sync(SUMS_READ + me.group, SUMS_THREADS);
    if (SUMS && CHUNK % 2)
        s.sums[me.group][me.warp][CHUNK / 2 * WARP + me.lane] = {
            of.first, sum_of_eight(of.sum, me.lane), sum_of_eight(of.squares, me.lane)};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(&s.finished[me.group][CHUNK]);
    me.patch.next();
    if constexpr (CHUNK + 1 < CHUNKS)
        finish_all<T, CHUNK + 1, NORM, ADD, SUMS, KEEP>(d, s, bias, of, me);
}

/* silu(2 x), by the hardware's tanh: half as many of the slow instructions as with 2^x and 1/x. */
template <typename T> static __device__ __forceinline__ float silu_of_twice(float x)
{
    return fmaf(x, tanh_for<T>(x), x);
}

/* d plus bias, as T keeps it. */
template <typename T>
static __device__ __forceinline__ void round_all(float (&d)[2][64], const uint32_t (&bias)[16])
{
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 b = unpacked(bias[j], T());
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float *v = &d[r / 2][j * 4 + r % 2 * 2];
            const float2 y = unpacked(packed(v[0] + b.x, v[1] + b.y, T()), T());
            v[0] = y.x, v[1] = y.y;
        }
    }
}
/* The other four chunks, or the only ones: what is in d, rounded, normed over its 128 channels. */
template <typename T, normed AFTER>
static __device__ __forceinline__ void finish_normed(const problem &z, const float (&d)[2][64],
                                                     shared &s, consumer &me)
{
    constexpr int FIRST = AFTER == BOTH ? CHUNKS : 0;
    float half[4]; /* of 1 / rms, of the thread's pixels */
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float *v = &d[r / 2][j * 4 + r % 2 * 2];
            squares = fmaf(v[0], v[0], fmaf(v[1], v[1], squares));
        }
        half[r] = 0.5f / sqrtf(quad_sum(squares) / CHANNELS + z.eps);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        barrier_wait(&s.patch_full[me.patch.slot], me.patch.phase);
        char *line = s.patch[me.patch.slot] + me.group * GROUP_BYTES +
                     (me.warp * 2 * SIDE + me.lane / 4) * ROW + me.lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float *v = &d[r / 2][(chunk * 4 + j) * 4 + r % 2 * 2];
                *reinterpret_cast<uint32_t *>(line + ((j ^ me.lane / 8) << 4) +
                                              (r / 2 * 8 + r % 2 * SIDE) * ROW) =
                    packed(silu_of_twice<T>(v[0] * half[r]), silu_of_twice<T>(v[1] * half[r]), T());
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(&s.finished[me.group][FIRST + chunk]);
        me.patch.next();
    }
}

template <typename T, bool NORM, bool ADD, bool SUMS, bool REST, int STRIDE, normed AFTER>
static __device__ __forceinline__ void multiply_all(const problem &z, shared &s)
{
    consumer me{(int)threadIdx.x / GROUP_THREADS - 1, (int)threadIdx.x % GROUP_THREADS / WARP,
                (int)threadIdx.x % WARP};
    float d[2][64];
    uint32_t bias[16];
    FOR_EACH_TILE(z, tile)
    {
        const bool rest = REST && tile >= z.whole;
        const uint32_t *from = (const uint32_t *)z.bias + spot_of(z, tile).c / 2 + me.lane % 4;
#pragma unroll
        for (int j = 0; j < 16; j++) bias[j] = rest && j >= 8 ? 0 : from[j * 4];
        if (rest)
            multiply<T, NORM, REST, STRIDE>(z, s, me, d);
        else
            multiply<T, NORM, false, STRIDE>(z, s, me, d);
        warp_sums of;
        if constexpr (AFTER == ONLY_NORMED)
            round_all<T>(d, bias);
        else
            finish_all<T, 0, NORM, ADD, SUMS, AFTER == BOTH>(d, s, bias, of, me);
        if constexpr (AFTER != NOT_NORMED) finish_normed<T, AFTER>(z, d, s, me);
    }
}

/* ---- who normalises ---- */

/* Four warps; a thread has 8 channels of every 32nd pixel. What lies outside of the picture stays
 * zero. */
template <typename T> static __device__ __forceinline__ void normalise(const problem &z, shared &s)
{
    enum { PATCH = patch_side(1), PIECES = ROW / 16, STEP = GROUP_THREADS / PIECES };
    int piece = (int)threadIdx.x % PIECES, first = (int)threadIdx.x % GROUP_THREADS / PIECES;
    int place = first * ROW + ((piece ^ (first / 2 % PIECES)) << 4);
    ring<PATCHES> at;
    FOR_EACH_TILE(z, tile)
    {
        spot p = spot_of(z, tile);
        int h = p.h - z.top, w = p.w - z.left, n = p.n < z.pictures ? p.n : z.pictures - 1;
        bool whole = h >= 0 && w >= 0 && h + PATCH <= z.H && w + PATCH <= z.W;
        const float *factors = z.factors + (int64_t)n * 2 * z.in + piece * 8;
        for (int c = 0; c < z.in; c += DEPTH, at.next()) {
            float factor[8], offset[8];
#pragma unroll
            for (int e = 0; e < 8; e++)
                factor[e] = factors[c + e] / 2, offset[e] = factors[z.in + c + e] / 2;
            barrier_wait(&s.patch_full[at.slot], at.phase);
            char *data = s.patch[at.slot] + place;
#pragma unroll 2
            for (int i = first; i < PATCH * PATCH; i += STEP, data += STEP * ROW) {
                if (!whole && ((unsigned)(h + i / PATCH) >= (unsigned)z.H ||
                               (unsigned)(w + i % PATCH) >= (unsigned)z.W))
                    continue;
                quad v = *reinterpret_cast<quad *>(data);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 x = two<T>(v.v[e]);
                    x.x = fmaf(x.x, factor[e * 2], offset[e * 2]);
                    x.y = fmaf(x.y, factor[e * 2 + 1], offset[e * 2 + 1]);
                    v.v[e] = packed(silu_of_twice<T>(x.x), silu_of_twice<T>(x.y), T());
                }
                *reinterpret_cast<quad *>(data) = v;
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(&s.patch_ready[at.slot]);
        }
        for (int i = 0; i < CHUNKS; i++, at.next()) { /* nothing to do, but phases go on */
            barrier_wait(&s.patch_full[at.slot], at.phase);
            barrier_arrive(&s.patch_ready[at.slot]);
        }
    }
}

/* ---- who stores ---- */

/* The sums of the group's warps to the half tile's; one lane a pair of channels. */
static __device__ __forceinline__ float2 add_warps(const pair_sum (&of)[GROUP_WARPS][PAIRS], int p)
{
    const double each = GROUP_PIXELS / GROUP_WARPS * 2, count = GROUP_PIXELS * 2;
    double base = of[0][p].first, sum = 0, squares = 0;
    for (int w = 0; w < GROUP_WARPS; w++) {
        double k = of[w][p].first - base, own = of[w][p].sum;
        sum += own + each * k;
        squares += of[w][p].squares + 2 * k * own + each * k * k;
    }
    return {(float)(base + sum / count), (float)(squares - sum * sum / count)};
}

/* One warp for each group. */
template <bool SUMS, int STRIDE, normed AFTER>
static __device__ void store_all(const problem &z, shared &s, int group)
{
    ring<PATCHES> at;
    int lane = threadIdx.x % WARP;
    uint32_t phase = 0; /* of the tile's barriers */
    FOR_EACH_TILE(z, tile)
    {
        spot p = spot_of(z, tile);
        int64_t sums = ((int64_t)p.n * z.wide * z.high + p.number) * GROUPS + group;
        at.skip(z.steps * STRIDE * STRIDE);
        __syncwarp();
        if (SUMS) barrier_arrive(SUMS_READ + group, SUMS_THREADS);
        for (int i = 0; i < chunks_of(AFTER); i++, at.skip(1)) {
            __syncwarp();
            barrier_wait(&s.finished[group][i], phase);
            if (lane == 0)
                store_patch(i < CHUNKS ? &z.y : &z.after, s.patch[at.slot] + group * GROUP_BYTES,
                            p.c + i % CHUNKS * DEPTH, p.w, p.h + group * SIDE / GROUPS, p.n);
            int pair = i / 2 * WARP + lane;
            if (SUMS && i % 2 && p.n < z.pictures && p.c / 2 + pair < z.out / 2)
                z.sums[sums * (z.out / 2) + p.c / 2 + pair] = add_warps(s.sums[group], pair);
            __syncwarp();
            if (lane > 0) continue;
            stores_wait();
            barrier_arrive(&s.patch_empty[at.slot]);
        }
        phase ^= 1;
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

static constexpr int threads(bool norm)
{
    return GROUP_THREADS * (1 + GROUPS + norm);
}
/* grid: a multiple of CLUSTER. Registers: 40 + 2 x 232 or 40 + 2 x 208 + 56 of the warpgroups'. */
template <typename T, bool NORM, bool ADD, bool SUMS, bool REST, int STRIDE, normed AFTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(threads(NORM), 1)
    conv_kernel(const __grid_constant__ problem z)
{
    extern __shared__ __align__(1024) char memory[];
    shared &s = *reinterpret_cast<shared *>(memory);
    if (shared_address(memory) % 1024) __trap(); /* the swizzle counts from there */
    if (threadIdx.x == 0) {
        for (int i = 0; i < PATCHES; i++) {
            barrier_init(&s.patch_full[i], 1);
            barrier_init(&s.patch_ready[i], GROUP_THREADS);
            barrier_init(&s.patch_empty[i], GROUPS);
        }
        for (int i = 0; i < WEIGHTS; i++) {
            barrier_init(&s.weight_full[i], 1);
            barrier_init(&s.weight_empty[i], GROUPS * CLUSTER);
        }
        for (int i = 0; i < GROUPS * 2 * CHUNKS; i++)
            barrier_init(&s.finished[0][0] + i, GROUP_THREADS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<40>();
        if (threadIdx.x == 0) load_patches<ADD, STRIDE, AFTER>(z, s);
        if (threadIdx.x == WARP) load_all_weights<STRIDE>(z, s);
        if (threadIdx.x >= 2 * WARP)
            store_all<SUMS, STRIDE, AFTER>(z, s, (int)threadIdx.x / WARP - 2);
        __syncwarp();
    } else if (!NORM || threadIdx.x < GROUP_THREADS * (1 + GROUPS)) {
        registers_take<NORM ? 208 : 232>();
        multiply_all<T, NORM, ADD, SUMS, REST, STRIDE, AFTER>(z, s);
    } else if constexpr (NORM) {
        registers_give<56>();
        normalise<T>(z, s);
    }
    cluster_sync(); /* the other block may still write here */
}

/* ---- launching ---- */

/* With 128 channels cuDNN is 5 % faster: a column of taps has more to load than to multiply. */
static bool halves(const struct lg_conv2d_forward_args *a)
{
    return a->stride == 2 && !a->residual.rank && a->x.dim[3] >= 256;
}
/* A tile goes at least once through the patches' ring: that its slots are free again says that who
 * stores has been at the last tile's barriers. */
enum { IN_MULTIPLE = (PATCHES - CHUNKS) * DEPTH };
bool cuda_tile_conv_fits(const lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    int64_t H = a->y.dim[1], W = a->y.dim[2];
    return lg_cuda_is_hopper(d) && (a->x.dtype == LG_BF16 || a->x.dtype == LG_F16) &&
           a->w.dim[1] == TAPS && a->w.dim[2] == TAPS && (a->stride == 1 || halves(a)) &&
           H % SIDE == 0 && W % SIDE == 0 && a->x.dim[3] % IN_MULTIPLE == 0 &&
           a->y.dim[3] % (CHANNELS / 2) == 0 && lg_numel(&a->y) / (CHANNELS / 2) < INT32_MAX;
}
int64_t cuda_conv_tiles(const struct lg_conv2d_forward_args *a)
{
    return a->y.dim[1] * a->y.dim[2] / GROUP_PIXELS;
}

/* Boxes of every n-th pixel of every n-th row. */
static CUtensorMap describe_map(const lg_tensor &t, int wide, int high, int n)
{
    const uint64_t dim[] = {(uint64_t)t.dim[3], (uint64_t)t.dim[2], (uint64_t)t.dim[1],
                            (uint64_t)t.dim[0]};
    const uint32_t box[] = {DEPTH, (uint32_t)(wide * n), (uint32_t)(high * n), 1};
    const uint32_t each[] = {1, (uint32_t)n, (uint32_t)n, 1};
    return describe(t, 4, dim, box, each, CU_TENSOR_MAP_SWIZZLE_64B);
}
static CUtensorMap describe_weights(const lg_tensor &t)
{
    const uint64_t dim[] = {(uint64_t)(t.dim[1] * t.dim[2] * t.dim[3]), (uint64_t)t.dim[0]};
    const uint32_t box[] = {DEPTH, CHANNELS / CLUSTER}, each[] = {1, 1};
    return describe(t, 2, dim, box, each, CU_TENSOR_MAP_SWIZZLE_64B);
}

template <typename T, bool NORM, bool ADD, bool SUMS, bool REST, int STRIDE,
          normed AFTER = NOT_NORMED>
static void launch(lg_stream *s, const problem &z)
{
    static bool asked;
    int blocks = lg_cuda_device_of(s)->multiprocessors / CLUSTER;
    if (blocks > z.tiles) blocks = z.tiles;
    cudaStream_t stream = lg_cuda_stream_of(s);
    auto *kernel = conv_kernel<T, NORM, ADD, SUMS, REST, STRIDE, AFTER>;
    if (!asked)
        LG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     SHARED_BYTES));
    asked = true;
    kernel<<<(unsigned)(blocks * CLUSTER), threads(NORM), SHARED_BYTES, stream>>>(z);
    LG_CUDA_LAUNCHED();
}
template <typename T, bool NORM, bool ADD, bool SUMS, int STRIDE>
static void launch_for(lg_stream *s, const problem &z)
{
    if constexpr (!NORM)
        if (z.tiles > z.whole) return launch<T, NORM, ADD, SUMS, true, STRIDE>(s, z);
    launch<T, NORM, ADD, SUMS, false, STRIDE>(s, z);
}
template <typename T, bool NORM, bool ADD, int STRIDE>
static void launch_for(lg_stream *s, const problem &z)
{
    z.sums ? launch_for<T, NORM, ADD, true, STRIDE>(s, z)
           : launch_for<T, NORM, ADD, false, STRIDE>(s, z);
}
template <typename T, bool NORM> static void launch_for(lg_stream *s, const problem &z, bool add)
{
    add ? launch_for<T, NORM, true, 1>(s, z) : launch_for<T, NORM, false, 1>(s, z);
}
template <typename T> static void launch_for(lg_stream *s, const problem &z, bool add, int stride)
{
    if (stride == 2)
        launch_for<T, false, false, 2>(s, z);
    else
        z.factors ? launch_for<T, true>(s, z, add) : launch_for<T, false>(s, z, add);
}

/* What both have: pictures of y, in tiles. */
struct shapes {
    const lg_tensor &x, &w, &bias, &residual, &y; /* w (Co, taps, Ci) */
    int stride, stride_time, frames, top, left;
};
static problem problem_of(const shapes &a)
{
    int wide = (int)ceil_div(a.y.dim[2], SIDE), high = (int)ceil_div(a.y.dim[1], SIDE);
    int64_t pairs = ceil_div(a.y.dim[0] * wide * high, CLUSTER), slices = a.y.dim[3] / CHANNELS;
    int64_t rest = a.y.dim[3] % CHANNELS ? pairs : 0;
    int patch = patch_side(a.stride);
    const lg_tensor &residual = a.residual.data ? a.residual : a.y;
    return {.x = describe_map(a.x, patch, patch, a.stride),
            .w = describe_weights(a.w),
            .residual = describe_map(residual, SIDE, SIDE / GROUPS, 1),
            .y = describe_map(a.y, SIDE, SIDE / GROUPS, 1),
            .after = {},
            .eps = 0,
            .bias = a.bias.data,
            .factors = nullptr,
            .sums = nullptr,
            .pictures = (int)a.y.dim[0],
            .in = (int)a.x.dim[3],
            .out = (int)a.y.dim[3],
            .steps = a.frames * (int)ceil_div(a.x.dim[3], DEPTH),
            .stride_time = a.stride_time,
            .H = (int)a.x.dim[1],
            .W = (int)a.x.dim[2],
            .wide = wide,
            .high = high,
            .slices = (int)slices,
            .whole = (int)(pairs * slices),
            .tiles = (int)(pairs * slices + rest),
            .top = a.top,
            .left = a.left};
}

void cuda_tile_conv(lg_stream *s, const struct lg_conv2d_forward_args *a, const float *factors,
                    float *sums)
{
    problem z =
        problem_of({a->x, a->w, a->bias, a->residual, a->y, a->stride, 1, 1, a->top, a->left});
    LG_ASSERT(!factors || z.tiles == z.whole);
    z.factors = factors;
    z.sums = (float2 *)sums;
    bool add = a->residual.data != NULL;
    a->x.dtype == LG_BF16 ? launch_for<bf16>(s, z, add, a->stride)
                          : launch_for<fp16>(s, z, add, a->stride);
}

/* What both kinds of a clip's convolution have. */
static bool clip_fits(const lg_cuda_device *d, const struct lg_conv3d_forward_args *a,
                      const lg_tensor &y)
{
    const int64_t steps = a->w.dim[1] * ceil_div(a->x.dim[3], DEPTH), C = y.dim[3];
    const int64_t tiles = y.dim[0] * ceil_div(y.dim[1], SIDE) * ceil_div(y.dim[2], SIDE);
    return lg_cuda_is_hopper(d) && (a->x.dtype == LG_BF16 || a->x.dtype == LG_F16) &&
           a->w.dim[2] == TAPS && a->w.dim[3] == TAPS &&
           (a->stride == 1 || (a->stride == 2 && !a->residual.rank)) && a->x.dim[3] % 8 == 0 &&
           steps >= PATCHES - CHUNKS && C % (CHANNELS / 2) == 0 &&
           (tiles + 1) * C / (CHANNELS / 2) < INT32_MAX;
}
bool cuda_tile_conv3d_fits(const lg_cuda_device *d, const struct lg_conv3d_forward_args *a)
{
    return !a->normed.rank && clip_fits(d, a, a->y);
}
bool cuda_tile_conv3d_norms(const lg_cuda_device *d, const struct lg_conv3d_forward_args *a)
{
    return a->normed.rank && a->act == LG_ACT_SILU && a->stride == 1 &&
           a->normed.dim[3] == CHANNELS && (a->y.rank || !a->residual.rank) &&
           clip_fits(d, a, a->normed);
}
template <typename T> static void launch_plain(lg_stream *s, const problem &z, bool add, int stride)
{
    if (stride == 2)
        launch_for<T, false, false, false, 2>(s, z);
    else
        add ? launch_for<T, false, true, false, 1>(s, z)
            : launch_for<T, false, false, false, 1>(s, z);
}
template <typename T>
static void launch_normed(lg_stream *s, const problem &z, bool add, bool has_y)
{
    if (!has_y)
        launch<T, false, false, false, false, 1, ONLY_NORMED>(s, z);
    else
        add ? launch<T, false, true, false, false, 1, BOTH>(s, z)
            : launch<T, false, false, false, false, 1, BOTH>(s, z);
}
void cuda_tile_conv3d(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    const int frames = (int)a->w.dim[1];
    lg_tensor w = a->w; /* as a filter of so many rows */
    w.rank = 4;
    w.dim[1] *= w.dim[2], w.dim[2] = w.dim[3], w.dim[3] = w.dim[4];
    const bool add = a->residual.data != NULL, has_y = a->y.data != NULL;
    problem z = problem_of({a->x, w, a->bias, a->residual, has_y ? a->y : a->normed, a->stride,
                            a->stride_time, frames, a->pad, a->pad});
    if (!a->normed.data) {
        a->x.dtype == LG_BF16 ? launch_plain<bf16>(s, z, add, a->stride)
                              : launch_plain<fp16>(s, z, add, a->stride);
        return;
    }
    z.after = describe_map(a->normed, SIDE, SIDE / GROUPS, 1);
    z.eps = (float)a->eps;
    a->x.dtype == LG_BF16 ? launch_normed<bf16>(s, z, add, has_y)
                          : launch_normed<fp16>(s, z, add, has_y);
}
