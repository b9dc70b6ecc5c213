/* Matrix products with GELU at their end, on the tensor cores (wgmma), bf16 or fp16:
 *
 *     forward     pre = x w^T + bias, y = gelu(pre)                x (M, K), w (N, K), y (M, N)
 *     backward    dpre = (dy w) gelu'(pre), sums over its rows     dy (M, K), w (K, N), pre (M, N)
 *
 * A block computes tiles of 128 rows x 256 columns; K comes in steps of 64. The product alone keeps
 * the tensor cores as busy as the GPU's power allows, GELU keeps memory and the ordinary units
 * busy: so one tile's GELU runs beside the next tile's product.
 *
 * Warps: 0 loads (one thread, TMA), 1 to 3 do GELU, two warpgroups multiply, each 64 rows of the
 * tile. Who multiplies rounds a finished half tile to shared memory, some 3 % of the tile's time,
 * and goes on with the next; the others read it, a warp a row, 8 columns a lane, and write rows of
 * 512 bytes. pre comes from global memory in turns of four rows, a turn ahead, without regard to halves
 * and tiles: a load takes longer than two rows. A row takes one of three warps some 130 instructions in
 * the backward, and 43 rows must take no longer than the tile's 18432 cycles of products. More warps
 * there cannot be: a product of 64 x 256 wants a kernel of 154 registers a thread, 512 threads have 128.
 *
 * The two blocks of a cluster have neighbouring tiles of rows and the same columns: each loads half
 * of the weights for both. Blocks stay and take every n-th tile, columns fastest: what the blocks
 * do at a time has few rows, read once from memory, and all of the weights, which stay in the L2
 * cache.
 *
 * Shared memory, 211 KiB of 227: three steps of 16 + 32 KiB, rows of 64 numbers (128 bytes) in the
 * 128-byte swizzle of TMA and wgmma; the rounded tile, 64 KiB, rows of 512 bytes whose pieces of 16
 * are permuted by the row's number modulo 8: free of conflicts; sums of three warps. 16 of K take the
 * tensor cores 256 cycles, in which shared memory moves 20 KiB to them and 12 KiB from TMA.
 *
 * Registers: 104 + 2 x 200 a thread of the three warpgroups, of the 504 that the launch brings.
 *
 * Numbers: sums over K in fp32 in order; bias is added before the one rounding. GELU and its slope
 * are of the rounded sum, in fp32, with the hardware's tanh, whose relative error is 2^-11; as in a
 * pass of its own. Sums over rows: of the fp32 results, in a fixed order, a part for each tile of
 * rows; then the parts in order. Nothing depends on a row's place. */
#include "kernels/cuda/gelu_product.h"
#include "kernels/cuda/tma.cuh"

enum { ROWS = 128, COLUMNS = 256, DEPTH = 64, STEP = 16, ROW = DEPTH * 2, STAGES = 3, CLUSTER = 2 };
enum {
    GROUPS = 2,
    GROUP_ROWS = ROWS / GROUPS,
    GROUP_THREADS = 128,
    THREADS = (GROUPS + 1) * GROUP_THREADS
};
enum { A_BYTES = ROWS * ROW, B_BYTES = COLUMNS * ROW, OUT_ROW = COLUMNS * 2 };
enum { LAST_WARPS = GROUP_THREADS / WARP - 1, LAST_THREADS = LAST_WARPS * WARP };
/* Columns of a lane; rows of pre that a warp has under way, and turns of so many in a tile. */
enum { EACH = COLUMNS / WARP, AHEAD = 4, TURNS = ROWS / LAST_WARPS / AHEAD + 1 };

struct shared {
    alignas(1024) char a[STAGES][A_BYTES];
    alignas(1024) char b[STAGES][B_BYTES];
    alignas(1024) char out[ROWS * OUT_ROW];
    float sums[LAST_WARPS][COLUMNS];
    uint64_t full[STAGES], empty[STAGES];
};
enum { SHARED_BYTES = sizeof(shared) };

struct problem {
    CUtensorMap a, b;
    const void *bias;  /* forward: (N) */
    void *pre;         /* (M, N): forward: written, or NULL; backward: read */
    void *y;           /* (M, N) */
    float *sums;       /* backward: (ceil(M / 128), N), or NULL */
    int m, n, steps;   /* steps of DEPTH */
    int slices, tiles; /* of columns; of a cluster, all */
};

/* ---- who waits for whom ---- */

/* Hardware barriers: a half tile's place in shared memory is free, is full; the last warps' sums. Who
 * does GELU says "free" before the first tile, and after each but the last: nothing is left over. */
enum { FREE = 1, FULL = FREE + GROUPS, SUMS = FULL + GROUPS };
enum { BOTH = GROUP_THREADS + LAST_THREADS };

struct place {
    int row, column;
};
static __device__ __forceinline__ place place_of(const problem &z, int tile)
{
    return {(tile / z.slices * CLUSTER + (int)cluster_rank()) * ROWS, tile % z.slices * COLUMNS};
}
#define FOR_EACH_TILE(z, tile)                                                                     \
    for (int tile = blockIdx.x / CLUSTER; tile < (z).tiles; tile += gridDim.x / CLUSTER)

/* ---- who loads ---- */

/* TRANSPOSED: w is (K, N): boxes of 64 columns x 64 of K, else of 64 of K x 128 columns. */
template <bool TRANSPOSED> static __device__ void load_all(const problem &z, shared &s)
{
    enum { SHARE = COLUMNS / CLUSTER };
    ring<STAGES> at;
    int first = (int)cluster_rank() * SHARE;
    FOR_EACH_TILE(z, tile)
    {
        place p = place_of(z, tile);
        for (int k = 0; k < z.steps * DEPTH; k += DEPTH, at.next()) {
            uint64_t *full = &s.full[at.slot];
            char *b = s.b[at.slot] + first * ROW;
            barrier_wait(&s.empty[at.slot], at.phase ^ 1);
            barrier_expect(full, A_BYTES + B_BYTES);
            load_matrix(s.a[at.slot], &z.a, full, k, p.row);
            if (!TRANSPOSED) load_for_all(b, &z.b, full, CLUSTER, k, p.column + first);
            for (int c = 0; TRANSPOSED && c < SHARE; c += DEPTH)
                load_for_all(b + c * ROW, &z.b, full, CLUSTER, p.column + first + c, k);
        }
    }
}

/* ---- who multiplies ---- */

#define PRODUCT(type, transposed)                                                                  \
    PRODUCT_SHARED("256", type, N128, F64(d, 0) COMMA F64(d, 64), "%128", "%129", "%130",          \
                   transposed)
/* d (64 x 256) = or += a b. */
template <typename T, bool TRANSPOSED>
static __device__ __forceinline__ void product(float (&d)[128], uint64_t a, uint64_t b, int add)
{
    if constexpr (__is_same(T, bf16) && TRANSPOSED)
        PRODUCT("bf16", "0, 1");
    else if constexpr (__is_same(T, bf16))
        PRODUCT("bf16", "0, 0");
    else if constexpr (TRANSPOSED)
        PRODUCT("f16", "0, 1");
    else
        PRODUCT("f16", "0, 0");
}

/* 16 columns of K further, in a descriptor. */
template <bool TRANSPOSED> constexpr int B_STEP = (TRANSPOSED ? STEP * ROW : STEP * 2) / 16;
template <bool TRANSPOSED> static __device__ __forceinline__ uint64_t b_operand(const char *b)
{
    return TRANSPOSED ? operand(shared_address(b), DEPTH * ROW, 8 * ROW, 1) : rows_of(b);
}

/* Both blocks load into a stage of both. */
static __device__ __forceinline__ void free_stage(shared &s, int slot)
{
    if (threadIdx.x % GROUP_THREADS < CLUSTER)
        barrier_arrive_at(&s.empty[slot], threadIdx.x % GROUP_THREADS);
}

template <typename T, bool TRANSPOSED>
static __device__ __forceinline__ void multiply(const problem &z, shared &s, int group,
                                                ring<STAGES> &at, float (&d)[128])
{
    int before = 0;
    for (int i = 0; i < z.steps; i++) {
        barrier_wait(&s.full[at.slot], at.phase);
        uint64_t a = rows_of(s.a[at.slot] + group * GROUP_ROWS * ROW);
        uint64_t b = b_operand<TRANSPOSED>(s.b[at.slot]);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / STEP; k++)
            product<T, TRANSPOSED>(d, a + k * STEP * 2 / 16, b + k * B_STEP<TRANSPOSED>, i + k > 0);
        products_end();
        products_wait<1>();
        if (i > 0) free_stage(s, before); /* the step before this one is done */
        before = at.slot;
        at.next();
    }
    products_wait<0>();
    settled(d);
    free_stage(s, before);
}

/* Rounds 64 x 256 sums to shared memory. Of 8 columns a thread holds two neighbours of row lane / 4
 * (+ 8). */
template <typename T, bool BIAS>
static __device__ __forceinline__ void round_out(const float (&d)[128], const uint32_t (&bias)[32],
                                                 uint32_t out, int group)
{
    int warp = threadIdx.x % GROUP_THREADS / WARP, lane = threadIdx.x % WARP;
    int row = group * GROUP_ROWS + warp * 16 + lane / 8 % 2 * 8 + lane % 8;
    uint32_t line = out + row * OUT_ROW;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = &d[j * 4 + i * 2];
            float2 b = BIAS ? two<T>(bias[j + i / 2]) : float2{0, 0};
            v[i] = BIAS ? from_two<T>(x[0] + b.x, x[1] + b.y) : from_two<T>(x[0], x[1]);
        }
        store_matrices(line + (((j % 8 + lane / 16) ^ lane % 8) << 4) + j / 8 * 128, v);
    }
}

template <typename T, bool FORWARD>
static __device__ __forceinline__ void multiply_all(const problem &z, shared &s, int group)
{
    ring<STAGES> at;
    float d[128];
    uint32_t bias[32];
    FOR_EACH_TILE(z, tile)
    {
        if (FORWARD) {
            const T *from = (const T *)z.bias + place_of(z, tile).column + threadIdx.x % 4 * 2;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) bias[j] = *(const uint32_t *)(from + j * 8);
        }
        multiply<T, !FORWARD>(z, s, group, at, d);
        barrier_sync(FREE + group, BOTH);
        round_out<T, FORWARD>(d, bias, shared_address(s.out), group);
        barrier_arrive(FULL + group, BOTH);
    }
}

/* ---- who does GELU ---- */

/* tanh(sqrt(2/pi) (x + 0.044715 x^3)) */
static __device__ __forceinline__ float gelu_tanh(float x, float x2)
{
    return tanh_for<bf16>(x * fmaf(x2, SQRT_2_OVER_PI * GELU_CUBIC, SQRT_2_OVER_PI));
}
static __device__ __forceinline__ float gelu(float x)
{
    float half = 0.5f * x;
    return fmaf(half, gelu_tanh(x, x * x), half);
}
static __device__ __forceinline__ float gelu_slope(float x)
{
    float x2 = x * x, t = gelu_tanh(x, x2);
    float inner = x * fmaf(x2, 1.5f * SQRT_2_OVER_PI * GELU_CUBIC, 0.5f * SQRT_2_OVER_PI);
    return fmaf(inner, fmaf(-t, t, 1), fmaf(0.5f, t, 0.5f));
}

/* A lane's 8 columns of one row: y from the rounded sum x; sum grows by the results before rounding. */
template <typename T, bool FORWARD>
static __device__ __forceinline__ quad finish(quad x, quad pre, float (&sum)[EACH])
{
    quad y;
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) {
        float2 v = two<T>(x.v[i]);
        if (FORWARD) {
            v = {gelu(v.x), gelu(v.y)};
        } else {
            float2 p = two<T>(pre.v[i]);
            v = {v.x * gelu_slope(p.x), v.y * gelu_slope(p.y)};
            sum[i * 2] += v.x, sum[i * 2 + 1] += v.y;
        }
        y.v[i] = from_two<T>(v.x, v.y);
    }
    return y;
}

/* A warp's rows of a tile, every LAST_WARPS-th from its own. */
struct band {
    int64_t at; /* a lane's first column in the first of them */
    int rows;   /* that exist */
};
static __device__ __forceinline__ band band_of(const problem &z, int tile)
{
    int warp = threadIdx.x / WARP - 1, lane = threadIdx.x % WARP;
    place p = place_of(z, tile);
    int rows = tile < z.tiles ? min(z.m - p.row, (int)ROWS) - warp : 0;
    return {(int64_t)(p.row + warp) * z.n + p.column + lane * EACH,
            (rows + LAST_WARPS - 1) / LAST_WARPS};
}

/* As one access: the compiler makes four of some. */
static __device__ __forceinline__ void put(void *to, const quad &x)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.v[0]), "r"(x.v[1]),
                 "r"(x.v[2]), "r"(x.v[3]));
}
/* A turn's rows of pre. All at once: loads that trickle in wait for one another. */
template <typename T>
static __device__ __forceinline__ void load_pre(const problem &z, band b, quad (&ret)[AHEAD])
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i < b.rows)
            ret[i] = *(const quad *)((const T *)z.pre + b.at + (int64_t)i * LAST_WARPS * z.n);
}

/* The sums of the warps, in order, to their place. */
static __device__ __forceinline__ void add_warps(const problem &z, shared &s, place p,
                                                 const float (&sum)[EACH])
{
    int thread = threadIdx.x - WARP, warp = thread / WARP, lane = thread % WARP;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.sums[warp][lane * EACH + i] = sum[i];
    barrier_sync(SUMS, LAST_THREADS);
    float *to = z.sums + (int64_t)(p.row / ROWS) * z.n + p.column;
#pragma unroll
    for (int c = thread; c < COLUMNS; c += LAST_THREADS) {
        float all = 0;
        for (int w = 0; w < LAST_WARPS; w++) all += s.sums[w][c];
        if (p.row < z.m) to[c] = all;
    }
    barrier_sync(SUMS, LAST_THREADS);
}

/* Both halves of a tile. `next`: the first turn's rows of pre, at the end those of the next tile. */
template <typename T, bool FORWARD>
static __device__ __forceinline__ void finish_tile(const problem &z, const shared &s, band b,
                                                   band after, bool more, quad (&next)[AHEAD],
                                                   float (&sum)[EACH])
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP - 1, half = 0;
    int64_t stride = (int64_t)LAST_WARPS * z.n;
    barrier_sync(FULL, BOTH);
#pragma unroll 1
    for (int turn = 1; turn <= TURNS; turn++, b.at += AHEAD * stride, b.rows -= AHEAD) {
        band ahead = turn < TURNS ? band{b.at + AHEAD * stride, b.rows - AHEAD} : after;
        quad pre[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) pre[i] = next[i];
        if (!FORWARD) load_pre<T>(z, ahead, next);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int row = ((turn - 1) * AHEAD + i) * LAST_WARPS + warp;
            if (row >= GROUP_ROWS && half == 0) {
                if (more) barrier_arrive(FREE, BOTH);
                barrier_sync(FULL + 1, BOTH);
                half = 1;
            }
            if (i < b.rows) {
                int64_t at = b.at + i * stride;
                quad x = *(const quad *)(s.out + row * OUT_ROW + ((lane ^ row % 8) << 4));
                if (FORWARD && z.pre) put((T *)z.pre + at, x);
                put((T *)z.y + at, finish<T, FORWARD>(x, pre[i], sum));
            }
        }
    }
    if (more) barrier_arrive(FREE + 1, BOTH);
}

template <typename T, bool FORWARD> static __device__ void finish_all(const problem &z, shared &s)
{
    quad pre[AHEAD];
    band b = band_of(z, blockIdx.x / CLUSTER);
    if (!FORWARD) load_pre<T>(z, b, pre);
    for (int g = 0; g < GROUPS; g++) barrier_arrive(FREE + g, BOTH);
    FOR_EACH_TILE(z, tile)
    {
        int next = tile + gridDim.x / CLUSTER;
        band after = band_of(z, next);
        float sum[EACH] = {};
        finish_tile<T, FORWARD>(z, s, b, after, next < z.tiles, pre, sum);
        if (!FORWARD && z.sums) add_warps(z, s, place_of(z, tile), sum);
        b = after;
    }
}

/* ---- launching ---- */

/* grid: a multiple of CLUSTER. */
template <typename T, bool FORWARD>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gelu_kernel(const __grid_constant__ problem z)
{
    extern __shared__ __align__(1024) char memory[];
    shared &s = *reinterpret_cast<shared *>(memory);
    if (shared_address(memory) % 1024) __trap(); /* the swizzle counts from there */
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], GROUPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    int group = (int)threadIdx.x / GROUP_THREADS;
    if (group == 0) {
        registers_give<104>();
        if (threadIdx.x == 0) load_all<!FORWARD>(z, s);
        if (threadIdx.x >= WARP) finish_all<T, FORWARD>(z, s);
        __syncwarp();
    } else {
        registers_take<200>();
        multiply_all<T, FORWARD>(z, s, group - 1);
    }
    cluster_sync(); /* the other block may still write here */
}

/* rows x columns, row by row, in boxes of high x wide. */
static CUtensorMap describe_matrix(const lg_tensor &t, uint32_t high, uint32_t wide)
{
    const uint64_t dim[] = {(uint64_t)t.dim[1], (uint64_t)t.dim[0]};
    const uint32_t box[] = {wide, high};
    const uint32_t each[] = {1, 1};
    return describe(t, 2, dim, box, each, CU_TENSOR_MAP_SWIZZLE_128B,
                    (uint64_t)lg_row_stride(&t, 1));
}

/* a (M, K), weights, y and pre (M, N): K long enough to cover GELU, rows enough for the last tiles not
 * to count, and what TMA and loads of 16 bytes want. cuBLASLt does GELU too, so the forward has less
 * to win: with N = 4608 it loses a twelfth at 4196 rows and wins 2 to 7 % at 65536. */
enum { FORWARD_ROWS = 32768, BACKWARD_ROWS = 4096, K_MIN = 1024, MOST = 1 << 30 };
static bool fits(const lg_tensor &a, const lg_tensor &w, const lg_tensor &y, const lg_tensor &pre)
{
    int64_t M = a.dim[0], K = a.dim[1], N = y.dim[1];
    return (a.dtype == LG_BF16 || a.dtype == LG_F16) && N % COLUMNS == 0 && K % DEPTH == 0 &&
           K >= K_MIN && M < MOST && N < MOST && K < MOST &&
           ceil_div(M, ROWS) * (N / COLUMNS) < MOST &&
           lg_row_stride(&w, 1) * (int64_t)lg_dtype_bytes(w.dtype) % 16 == 0 &&
           lg_cuda_aligned_16(a.data) && lg_cuda_aligned_16(w.data) && lg_cuda_aligned_16(y.data) &&
           lg_cuda_aligned_16(pre.data);
}

template <typename T, bool FORWARD> static void launch(lg_stream *s, const problem &z)
{
    static bool asked;
    int clusters = lg_cuda_device_of(s)->multiprocessors / CLUSTER;
    if (clusters > z.tiles) clusters = z.tiles;
    cudaStream_t stream = lg_cuda_stream_of(s);
    if (!asked)
        LG_CUDA(cudaFuncSetAttribute(gelu_kernel<T, FORWARD>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    asked = true;
    gelu_kernel<T, FORWARD><<<(unsigned)(clusters * CLUSTER), THREADS, SHARED_BYTES, stream>>>(z);
    LG_CUDA_LAUNCHED();
}

/* What both directions have: a (M, K), y (M, N). */
static problem problem_of(const lg_tensor &a, const lg_tensor &y, const lg_tensor &pre)
{
    int64_t M = y.dim[0], N = y.dim[1];
    return {.a = describe_matrix(a, ROWS, DEPTH),
            .pre = pre.data,
            .y = y.data,
            .m = (int)M,
            .n = (int)N,
            .steps = (int)(a.dim[1] / DEPTH),
            .slices = (int)(N / COLUMNS),
            .tiles = (int)(ceil_div(M, ROWS * CLUSTER) * (N / COLUMNS))};
}

bool cuda_gelu_forward_fits(const lg_cuda_device *d, const struct lg_linear_forward_args *a)
{
    return lg_cuda_is_hopper(d) && a->act == LG_ACT_GELU_TANH && a->x.dim[0] >= FORWARD_ROWS &&
           a->bias.rank && !a->residual.rank && (a->bias.data || !a->x.data) &&
           lg_cuda_aligned_16(a->bias.data) && fits(a->x, a->w, a->y, a->pre);
}
void cuda_gelu_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    problem z = problem_of(a->x, a->y, a->pre);
    z.b = describe_matrix(a->w, COLUMNS / CLUSTER, DEPTH);
    z.bias = a->bias.data;
    a->x.dtype == LG_BF16 ? launch<bf16, true>(s, z) : launch<fp16, true>(s, z);
}

bool cuda_gelu_backward_fits(const lg_cuda_device *d, const struct lg_linear_backward_data_args *a)
{
    return lg_cuda_is_hopper(d) && a->act == LG_ACT_GELU_TANH && a->dy.dim[0] >= BACKWARD_ROWS &&
           fits(a->dy, a->w, a->dx, a->pre);
}
size_t cuda_gelu_backward_scratch(const struct lg_linear_backward_data_args *a)
{
    return a->dbias.rank ? (size_t)(ceil_div(a->dx.dim[0], ROWS) * a->dx.dim[1]) * sizeof(float)
                         : 0;
}
void cuda_gelu_backward(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    problem z = problem_of(a->dy, a->dx, a->pre);
    z.b = describe_matrix(a->w, DEPTH, DEPTH);
    z.sums = a->dbias.data ? (float *)s->scratch : NULL;
    a->dy.dtype == LG_BF16 ? launch<bf16, false>(s, z) : launch<fp16, false>(s, z);
    if (z.sums)
        cuda_add_partial_sums(lg_cuda_stream_of(s), z.sums, ceil_div(z.m, ROWS), a->dbias,
                              a->accumulate_dbias);
}
