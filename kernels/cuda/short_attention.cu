/* Backward of attention on the tensor cores (wgmma) for heads that fit into shared memory whole:
 * TOKENS = 256 queries and keys, d = 64 or 72, bf16 or fp16, no key lengths.
 *
 *     r = rows' sums of dout o,  P = exp(scale Q K^T - lse),  dS = P (dO V^T - r)
 *     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * A block goes through every gridDim-th head with three warpgroups.
 *
 * The first one (short_attention_load.cuh) brings K, V, and Q and dO in blocks of 64 queries, computes r,
 * and takes the results away. What the others are done with of a head, it fills with the next head's; K
 * has two places.
 *
 * The two others compute, each for 128 keys, as two tiles of 64, whose dK and dV stay in registers (144
 * floats a thread at d = 72). Per tile and block of queries: S^T (64 keys x 64 queries) and dO V^T
 * transposed (32 queries at a time: there are no registers for 64), P^T and dS^T rounded in registers,
 * where they are the left operands of dV and dK; dS^T also goes to shared memory, and when all keys are
 * there both warpgroups multiply it by K: dQ of the block, half of the columns each, which they leave in
 * dO's place. At a head's end they leave dK in K's place and dV in that of dS^T. A product is waited for
 * where its result is used, but none is under way around a loop: ptxas then serialises all of them
 * (C75xx). Nothing is added across blocks: no atomics, always the same bits.
 *
 * dbias: sums over the rows of dQ and dV before they are rounded. A warp adds up its 16 rows of a product
 * by shuffles that halve what a lane has left, over all blocks of queries in a slot of its own; when the
 * head is done, a thread a column adds the warps' slots in order. The sums of the heads (B, 3, H, d) go to
 * scratch memory and are added over the batch (column_sums.cu).
 *
 * At B = 256, 16 heads: 1.21 GB must move (0.29 ms at 4.2 TB/s), 194 GFLOP. */
#include "kernels/cuda/short_attention.h"
#include "kernels/cuda/short_attention_load.cuh"

enum { LOADER_REGISTERS = 24, REGISTERS = 240 }; /* of the 168 that each warpgroup begins with */

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[16], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("32", type, N16, F16(d, 0), "%16", "%17", "%18", "0, 0");               \
        }                                                                                          \
        static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "0, 0");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[20], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("40", type, N20, F16(d, 0) COMMA F4(d, 16), "%20", "%21", "%22",        \
                           "1, 1");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[16], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("32", type, N16, F16(d, 0), "%16", "%17", "%18", "1, 1");               \
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

/* ---- the warpgroups that compute ---- */

/* The warp's 16 rows of N / 2 columns of a product's result, times factor, to rows of shared memory. */
template <typename T, int D, int N>
static __device__ __forceinline__ void stage(uint32_t to, const float (&x)[N], float factor)
{
    int lane = threadIdx.x % WARP;
    to += lane % 16 * layout<D>::ROW + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) {
        uint32_t p[4], at = to + j * 16;
        if (D == 64) at ^= at >> 3 & 0x70; /* the swizzle of 128 bytes */
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * j + 2 * e < N)
                p[e] = packed(x[4 * j + 2 * e] * factor, x[4 * j + 2 * e + 1] * factor, T());
        if (j + 1 < N / 4)
            store_matrices(at, p);
        else
            store_two_matrices(at, p);
    }
}
/* Half of the sums of two lanes each: the upper lane gets those from HALF on. */
template <int N, int HALF>
static __device__ __forceinline__ void exchanged(const float *x, float *half, bool upper, int lanes)
{
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float low = x[i], high = HALF + i < N ? x[HALF + i] : 0;
        half[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, lanes);
    }
}
/* The columns' sums of the warp's 16 rows of the results of TILES products, to or onto slot. */
template <int TILES, int N>
static __device__ __forceinline__ void add_to_slot(float *slot, const float (&x)[TILES][N],
                                                   bool first)
{
    constexpr int ALL = N / 2, A = (ALL + 1) / 2, B = (A + 1) / 2, C = (B + 1) / 2;
    int lane = threadIdx.x % WARP;
    bool a = lane & 16, b = lane & 8, c = lane & 4;
    float sum[ALL + 1], half[A + 1], quarter[B + 1], eighth[C];
    sum[ALL] = 0;
#pragma unroll
    for (int i = 0; i < ALL; i++) {
        int e = i / 2 * 4 + i % 2;
        sum[i] = 0;
#pragma unroll
        for (int t = 0; t < TILES; t++) sum[i] += x[t][e] + x[t][e + 2];
    }
    exchanged<ALL, A>(sum, half, a, 16);
    exchanged<A, B>(half, quarter, b, 8);
    exchanged<B, C>(quarter, eighth, c, 4);
#pragma unroll
    for (int i = 0; i < C; i++) {
        int in_b = i + c * C, in_a = in_b + b * B, at = in_a + a * A;
        if (in_b >= B || in_a >= A || at >= ALL) continue;
        float *to = slot + at / 2 * 8 + lane % 4 * 2 + at % 2;
        *to = (first ? 0 : *to) + eighth[i];
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
/* x = 64 rows of a times 2 N rows of a block b, transposed; from the block's last column to that of zeros. */
template <typename T, int D, int N>
static __device__ __forceinline__ void row_products(float (&x)[N], uint32_t a, uint32_t b,
                                                    uint32_t b_to_zeros)
{
    constexpr uint32_t NEXT = COLUMN / 16, LEADING = NEXT << 16;
    constexpr uint32_t B_NEXT = QUERY_COLUMN / 16, B_LEADING = B_NEXT << 16;
    a |= LEADING, b |= B_LEADING;
    products_begin();
#pragma unroll
    for (int s = 0; s < layout<D>::STEPS; s++) {
        bool lone = 2 * s + 1 == layout<D>::COLUMNS;
        tensor_core<T>::scores(x, descriptor(a + 2 * s * NEXT - (lone ? LEADING : 0), 128),
                               descriptor(b + 2 * s * B_NEXT + (lone ? b_to_zeros << 16 : 0), 128),
                               s > 0);
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
        tensor_core<T>::keys(x, p + 4 * s, descriptor(b + 16 * s, QUERY_COLUMN));
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
    /* Until dS^T of the block before, or the results of the head before, are out of their place. */
    __device__ __forceinline__ void ds_free(int n, int i) const
    {
        if (i) return barrier_sync(DS_FREE + SIDE, 2 * GROUP);
        wait_for(item(barriers, RESULTS).free, n - 1);
    }
    /* Block i of the block's n-th head: dK, dV, and dS^T into shared memory. */
    __device__ __forceinline__ void tiles(float (&dk)[2][D / 2], float (&dv)[2][D / 2], int n,
                                          int i) const
    {
        int q0 = i * QUERIES;
        uint32_t q = low(L::Q + i * L::BLOCK), dout = low(L::DOUT + i * L::BLOCK),
                 v = low(L::V) + KEY;
        uint32_t q_zeros = low(L::ZEROS) - q - L::COLUMNS * QUERY_COLUMN / 16;
        uint32_t dout_zeros = q_zeros - L::DOUT / 16;
        uint32_t k = low(L::K + n % 2 * L::MATRIX) + KEY, p[PART / 4], h[PART / 4], g[PART / 4];
        float s[32], dp[16];
        wait_for(item(barriers, i).full, n);
        row_products<T, D>(s, k, q, q_zeros);
        if (i == 0) wait_for(item(barriers, V_ITEM).full, n);
        row_products<T, D>(dp, v, dout, dout_zeros);
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
            if (t == 0 && n + i) ds_free(n, i);
            score_gradients<T, 0>(s, dp, g, sums + q0, ds + t * KEYS * 16);
            row_products<T, D>(dp, z + v + t * KEYS, z + dout + PART, dout_zeros);
            add_to_keys<T, D>(dk[t], g, z + q);
            rounded<T, 1>(s, h);
            add_to_keys<T, D>(dv[t], h, z + dout + PART);
            products_wait<1>();
            settled(dp);
            score_gradients<T, 1>(s, dp, g, sums + q0, ds + t * KEYS * 16);
            add_to_keys<T, D>(dk[t], g, z + q + PART);
            if (t == 1) continue;
            row_products<T, D>(s, z + k + KEYS, z + q, q_zeros);
            row_products<T, D>(dp, z + v + KEYS, z + dout, dout_zeros);
        }
        products_wait<1>(); /* dO of the block is not read any more */
        if (i == BLOCKS - 1) warp_arrive(item(barriers, V_ITEM).free);
    }
    /* dQ of block i of the block's n-th head, `at`, when all keys' dS^T are there. */
    __device__ __forceinline__ void store_dq(int n, int i) const
    {
        float x[1][N];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_sync(DS_FULL, 2 * GROUP);
        query_gradients<T>(x[0], low(L::DS), low(L::K + n % 2 * L::MATRIX + FIRST * COLUMN));
        products_wait<0>();
        settled(x[0]);
        if (i < BLOCKS - 1) barrier_arrive(DS_FREE + 1 - SIDE, 2 * GROUP);
        stage<T, D>(base + L::DOUT + i * L::BLOCK + warp * 16 * L::ROW + FIRST * 16, x[0], a.scale);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(item(barriers, i).free);
        if (a.sums) add_to_slot(slots + warp * D + FIRST * 8, x, i == 0);
    }
    __device__ __forceinline__ void store_dk_dv(float (&dk)[2][D / 2], float (&dv)[2][D / 2],
                                                int at, int n) const
    {
        head<D> h(at, a.H);
        barrier_sync(DS_FULL, 2 * GROUP);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            int row = KEY + t * KEYS + warp * 16;
            uint32_t k = base + L::K + n % 2 * L::MATRIX + row * L::ROW,
                     v = base + L::DS + row * L::ROW;
            settled(dk[t]);
            settled(dv[t]);
            stage<T, D>(k, dk[t], a.scale);
            stage<T, D>(v, dv[t], 1);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warp_arrive(item(barriers, RESULTS).full);
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
            wait_for(k.full, n / 2);
#pragma unroll 1
            for (int i = 0; i < BLOCKS; i++) {
                tiles(dk, dv, n, i);
                store_dq(n, i);
            }
            store_dk_dv(dk, dv, again(at), n);
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
static __global__ void __launch_bounds__(THREADS, 1)
    short_backward_kernel(const __grid_constant__ short_args<T> a)
{
    using L = layout<D>;
    extern __shared__ __align__(128) char shared[];
    if (threadIdx.x < ITEMS) {
        item i(shared_address(shared + L::BARRIERS), threadIdx.x);
        bool results = threadIdx.x == RESULTS;
        mbarrier_begin(i.full, results ? 2 * GROUP / WARP : threadIdx.x < BLOCKS ? GROUP : 1);
        mbarrier_begin(i.free, results ? 1 : 2 * GROUP / WARP);
    }
    if (threadIdx.x == 0) *(uint32_t *)(shared + L::ZERO) = 0;
    if (L::COLUMNS % 2 && threadIdx.x < QUERIES)
        *(float4 *)(shared + L::ZEROS + threadIdx.x * 16) = {};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < GROUP) {
        registers_give<LOADER_REGISTERS>();
        loading<T, D>(a, shared).heads();
    } else {
        registers_take<REGISTERS>();
        if (threadIdx.x < 2 * GROUP)
            side<T, D, 0>(a, shared).heads();
        else
            side<T, D, 1>(a, shared).heads();
    }
}

/* Boxes of `rows` tokens of a head, 8 columns after 8 columns: 16 bytes a row, row after row. */
static CUtensorMap columns_of(const lg_tensor *t, int rows)
{
    cuuint64_t size[] = {8, (cuuint64_t)(t->dim[0] * t->dim[1]),
                         (cuuint64_t)(t->dim[2] * t->dim[3] / 8)};
    cuuint64_t pitch[] = {(cuuint64_t)lg_row_stride(t, 2) * 2, 16};
    cuuint32_t box[] = {8, (cuuint32_t)rows, (cuuint32_t)t->dim[3] / 8};
    return described(t, 3, size, pitch, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <typename T, int D>
static void launch(lg_stream *stream, const struct lg_attention_backward_args *a)
{
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    short_args<T> s = {columns_of(&a->q, QUERIES),
                       columns_of(&a->k, TOKENS),
                       columns_of(&a->v, TOKENS),
                       columns_of(&a->dout, QUERIES),
                       columns_of(&a->o, QUERIES),
                       (const float *)a->lse.data,
                       boxes_of(&a->dq, QUERIES, D),
                       boxes_of(&a->dk, TOKENS, D),
                       boxes_of(&a->dv, TOKENS, D),
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

bool cuda_short_attention_takes(const lg_cuda_device *gpu,
                                const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,  a->k.data,  a->v.data,  a->o.data,  a->dout.data,
                       a->dq.data, a->dk.data, a->dv.data, a->lse.data};
    const lg_tensor *rows[] = {&a->q, &a->k, &a->v, &a->dq, &a->dk, &a->dv};
    int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72)) return false;
    if (a->q.dim[1] != TOKENS || a->k.dim[1] != TOKENS || a->k_length.rank) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (lg_row_stride(rows[i], 2) % 8) return false;
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
