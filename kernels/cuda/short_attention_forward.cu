/* Forward of attention on the tensor cores (wgmma) for heads that fit into shared memory whole:
 * TOKENS = 256 queries and keys, d = 64 or 72, bf16 or fp16, no key lengths, no bias.
 *
 *     S = Q K^T,  P = exp(scale (S - max)),  o = P V / sum of P,  lse = scale max + log(sum of P)
 *
 * A block goes through every gridDim-th head. A thread of its third warpgroup fetches heads by
 * TMA into two stages of shared memory, one ahead of the two warpgroups that compute. Each of
 * these takes two of the head's four tiles of 64 queries; scores, weights and sums stay in
 * registers. Keys come in two halves of 128: a half's maximum is that of all keys so far, and the
 * first half's sums are scaled down to the second's maximum. Weights are the left operand of P V
 * as they lie; their products begin while the next weights are computed; the two warpgroups'
 * scores come in turns. The maximum starts at -1e30: a half whose scores are all -inf counts as
 * nothing, not as NaN.
 *
 * A stage: Q, K, V, each as columns [0, 64) in rows of 128 bytes with wgmma's 128-byte swizzle
 * (16 bytes number c of row r lie at number c ^ r % 8), and at d = 72 the rest, 16 bytes a row,
 * without swizzle. The inner dimension of Q K^T comes in steps of 16, so the last 8 columns are
 * multiplied with 8 others: ZEROS from the side of Q, the same 8 again from that of K. The
 * results leave by TMA, too, from where their queries were. Bytes at d = 72: 2 x 3 x 36864 + 1024
 * (ZEROS) + 48 (barriers) = 222,256.
 *
 * Three barriers a stage: Q and K have come, V has come, the warps are done with all of it.
 *
 * A head's bits depend on nothing but its rows. At B = 256, 16 heads, d = 72 there are 604 MB to
 * move (0.14 ms at 4.2 TB/s), 77 GFLOP, 82 with the zeros, and 268 million exponentials (0.07
 * ms). */
#include "kernels/cuda/head_boxes.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/short_attention.h"

enum { TOKENS = 256, QUERIES = 64, TILES = TOKENS / QUERIES, KEYS = 128, STAGES = 2 };
enum { GROUPS = 2, GROUP = 128, THREADS = (GROUPS + 1) * GROUP };
enum { MAIN = SWIZZLED_COLUMNS, MAIN_ROW = 128, REST_ROW = 16 }; /* columns; bytes */
enum { CHUNK = 2 }; /* steps of 16 keys whose products begin together */
enum { QK_CAME = 0, V_CAME = 8, DONE = 16, BARRIERS_BYTES = 24 }; /* of a stage */
#define LEAST_SCORE (-1e30f)

template <int D> struct forward_layout {
    static constexpr bool REST = D > MAIN;
    static constexpr int MATRIX = TOKENS * D * 2, STAGE = 3 * MATRIX;
    static constexpr int K = TOKENS * MAIN_ROW, V = 2 * K; /* Q lies at 0 */
    static constexpr int Q_REST = 3 * K, K_REST = Q_REST + TOKENS * REST_ROW;
    static constexpr int V_REST = K_REST + TOKENS * REST_ROW;
    static constexpr int ZEROS = STAGES * STAGE, BARRIERS = ZEROS + QUERIES * REST_ROW;
    static constexpr int BYTES = BARRIERS + STAGES * BARRIERS_BYTES;
};

/* ---- products ---- */

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[64], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("128", type, N64, F64(d, 0), "%64", "%65", "%66", "0, 0");              \
        }                                                                                          \
        static __device__ __forceinline__ void values(float *d, const uint32_t *a, uint64_t b,     \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_REGISTERS_OR_SET("64", type, N32, F16(d, 0) COMMA F16(d, 16),                  \
                                     "%32, %33, %34, %35", "%36", "%37", "1");                     \
        }                                                                                          \
        static __device__ __forceinline__ void rest_of_values(float *d, const uint32_t *a,         \
                                                              uint64_t b, int add)                 \
        {                                                                                          \
            PRODUCT_REGISTERS_OR_SET("8", type, N4, F4(d, 0), "%4, %5, %6, %7", "%8", "%9", "1");  \
        }                                                                                          \
    };
TENSOR_CORE(bf16, "bf16")
TENSOR_CORE(fp16, "f16")

/* ---- turns and stores ---- */

/* The warpgroups begin scores in turns: one's products run while the other computes weights.
 * Hardware barrier 0 is __syncthreads(), 1 + group a warpgroup's own, 3 + group its turn. */
static __device__ __forceinline__ void take_turn(int group)
{
    barrier_sync(1 + GROUPS + group, GROUPS * GROUP);
}
static __device__ __forceinline__ void give_turn(int group)
{
    barrier_arrive(1 + GROUPS + group, GROUPS * GROUP);
}
static __device__ __forceinline__ void store_shared(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* ---- a tile ---- */

struct tensor_maps {
    CUtensorMap main, rest; /* rest: at d = 72 */
};
struct forward_args {
    tensor_maps q, k, v, o;
    float *lse; // (B, H, T) or NULL
    float scale;
    int H, heads; /* of a sample, of all samples */
};

/* x = q k^T of a tile of queries and a half of the keys, begun. */
template <typename T, int D>
static __device__ __forceinline__ void begin_scores(float (&x)[64], uint32_t shared, uint32_t stage,
                                                    int tile, int half)
{
    using L = forward_layout<D>;
    uint32_t q = operand_start(stage + tile * QUERIES * MAIN_ROW, 16);
    uint32_t k = operand_start(stage, 16) + (L::K + half * KEYS * MAIN_ROW) / 16;
    products_begin();
#pragma unroll
    for (int s = 0; s < MAIN / 16; s++)
        tensor_core<T>::scores(x, operand_at(q + 2 * s, 1024, 1), operand_at(k + 2 * s, 1024, 1),
                               s > 0);
    if (L::REST) {
        uint32_t q_rest = stage + L::Q_REST + tile * QUERIES * REST_ROW;
        uint32_t k_rest = operand_start(stage, 0) + (L::K_REST + half * KEYS * REST_ROW) / 16;
        tensor_core<T>::scores(x, operand(q_rest, shared + L::ZEROS - q_rest, 128, 0),
                               operand_at(k_rest, 128, 0), 1);
    }
    products_end();
}
/* top: the largest score of each of the thread's two rows, and at least what it was. */
static __device__ __forceinline__ void raise_to_maxima(float (&top)[2], const float (&x)[64])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = top[r], odd = x[2 * r + 1];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            even = fmaxf(even, x[4 * j + 2 * r]);
            if (j > 0) odd = fmaxf(odd, x[4 * j + 2 * r + 1]);
        }
        top[r] = quad_max(fmaxf(even, odd));
    }
}
/* o (64 queries, D) = or += weights v, of a half of the keys, begun; sums += the thread's
 * weights. */
template <typename T, int D>
static __device__ __forceinline__ void weigh(float (&o)[D / 2], float (&sums)[2],
                                             const float (&x)[64], const float (&top)[2],
                                             float factor, uint32_t stage, int half)
{
    using L = forward_layout<D>;
    uint32_t v = operand_start(stage, 16) + (L::V + half * KEYS * MAIN_ROW) / 16;
    uint32_t v_rest = operand_start(stage, 128) + (L::V_REST + half * KEYS * REST_ROW) / 16;
    float minus[2] = {-top[0] * factor, -top[1] * factor};
    uint32_t p[KEYS / 4];
#pragma unroll
    for (int s = 0; s < KEYS / 16; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float w0 = exp2_of(fmaf(x[8 * s + 2 * i], factor, minus[i % 2]));
            float w1 = exp2_of(fmaf(x[8 * s + 2 * i + 1], factor, minus[i % 2]));
            sums[i % 2] += w0;
            sums[i % 2] += w1;
            p[4 * s + i] = packed(w0, w1, T());
        }
        if (s % CHUNK != CHUNK - 1) continue;
        products_begin();
#pragma unroll
        for (int c = s - CHUNK + 1; c <= s; c++) { /* 16 keys' bytes / 16 are a row's bytes */
            int add = half + c > 0;
            tensor_core<T>::values(o, p + 4 * c, operand_at(v + c * MAIN_ROW, 1024, 1), add);
            if (L::REST)
                tensor_core<T>::rest_of_values(o + MAIN / 2, p + 4 * c,
                                               operand_at(v_rest + c * REST_ROW, 0, 0), add);
        }
        products_end();
    }
}
template <int N>
static __device__ __forceinline__ void scale_rows(float (&x)[N], const float (&factors)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= factors[i / 2 % 2];
}
/* A tile's results. */
template <typename T, int D>
static __device__ __forceinline__ void attend(float (&o)[D / 2], float (&top)[2], float (&sums)[2],
                                              float factor, uint32_t shared, uint32_t stage,
                                              int tile, uint32_t v_came, int parity)
{
    top[0] = top[1] = LEAST_SCORE;
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[64], fade[2] = {top[0], top[1]};
        take_turn(tile % GROUPS);
        begin_scores<T, D>(x, shared, stage, tile, half);
        products_wait<0>();
        settled(x);
        give_turn(1 - tile % GROUPS);
        raise_to_maxima(top, x);
        if (half == 0) {
            mbarrier_wait(v_came, parity);
        } else {
            settled(o);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                fade[r] = exp2_of((fade[r] - top[r]) * factor);
                sums[r] *= fade[r];
            }
            scale_rows(o, fade);
        }
        weigh<T, D>(o, sums, x, top, factor, stage, half);
    }
    for (int r = 0; r < 2; r++) sums[r] = quad_sum(sums[r]);
    products_wait<0>();
    settled(o);
    const float shares[2] = {__fdividef(1, sums[0]), __fdividef(1, sums[1])};
    scale_rows(o, shares);
}
/* The warp's 16 rows to those from to_row, to_column, by way of shared memory where their queries
 * were. */
template <typename T, int D>
static __device__ __forceinline__ void store_rows(const forward_args &a, const float (&o)[D / 2],
                                                  uint32_t main, uint32_t rest, int to_row,
                                                  int to_column)
{
    using L = forward_layout<D>;
    int lane = threadIdx.x % WARP, row = lane / 4, pair = lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        bool in_main = j < MAIN / 8;
        uint32_t to = in_main ? main + row * MAIN_ROW + (row ^ j) * 16 : rest + row * REST_ROW;
        store_shared(to + pair, packed(o[4 * j], o[4 * j + 1], T()));
        store_shared(to + pair + 8 * (in_main ? MAIN_ROW : REST_ROW),
                     packed(o[4 * j + 2], o[4 * j + 3], T()));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane > 0) return;
    put(&a.o.main, to_column, to_row, main);
    if (L::REST) put(&a.o.rest, to_column + MAIN, to_row, rest);
    puts_end();
}

/* ---- the block ---- */

template <int D>
static __device__ __forceinline__ void produce(const forward_args &a, uint32_t shared)
{
    using L = forward_layout<D>;
    for (int at = blockIdx.x, n = 0; at < a.heads; at += gridDim.x, n++) {
        uint32_t stage = shared + n % STAGES * L::STAGE;
        uint32_t barriers = shared + L::BARRIERS + n % STAGES * BARRIERS_BYTES;
        uint32_t qk_came = barriers + QK_CAME, v_came = barriers + V_CAME;
        int row = at / a.H * TOKENS, column = at % a.H * D;
        if (n >= STAGES) mbarrier_wait(barriers + DONE, n / STAGES % 2 ^ 1);
        mbarrier_expect(qk_came, 2 * L::MATRIX);
        fetch(stage, &a.q.main, column, row, qk_came);
        fetch(stage + L::K, &a.k.main, column, row, qk_came);
        if (L::REST) {
            fetch(stage + L::Q_REST, &a.q.rest, column + MAIN, row, qk_came);
            fetch(stage + L::K_REST, &a.k.rest, column + MAIN, row, qk_came);
        }
        mbarrier_expect(v_came, L::MATRIX);
        fetch(stage + L::V, &a.v.main, column, row, v_came);
        if (L::REST) fetch(stage + L::V_REST, &a.v.rest, column + MAIN, row, v_came);
    }
}
template <typename T, int D>
static __device__ __forceinline__ void consume(const forward_args &a, uint32_t shared)
{
    using L = forward_layout<D>;
    int group = threadIdx.x / GROUP, warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    float factor = a.scale * LOG2_E;
    if (group == 1) give_turn(0);
#pragma unroll 1
    for (int at = blockIdx.x, n = 0; at < a.heads; at += gridDim.x, n++) {
        uint32_t stage = shared + n % STAGES * L::STAGE;
        uint32_t barriers = shared + L::BARRIERS + n % STAGES * BARRIERS_BYTES;
        int parity = n / STAGES % 2, row = at / a.H * TOKENS, column = at % a.H * D;
        mbarrier_wait(barriers + QK_CAME, parity);
#pragma unroll 1
        for (int tile = group; tile < TILES; tile += GROUPS) {
            float o[D / 2], top[2], sums[2];
            int r0 = tile * QUERIES + warp * 16;
            attend<T, D>(o, top, sums, factor, shared, stage, tile, barriers + V_CAME, parity);
            /* The group's products have read the queries. */
            barrier_sync(1 + group, GROUP);
            store_rows<T, D>(a, o, stage + r0 * MAIN_ROW, stage + L::Q_REST + r0 * REST_ROW,
                             row + r0, column);
            if (a.lse && lane % 4 == 0) {
                float *lse = a.lse + (int64_t)at * TOKENS + r0 + lane / 4;
                lse[0] = top[0] * a.scale + logf(sums[0]);
                lse[8] = top[1] * a.scale + logf(sums[1]);
            }
        }
        if (lane == 0) {
            puts_wait<0>();
            mbarrier_arrive(barriers + DONE);
        }
        __syncwarp();
    }
    if (group == 0) take_turn(0); /* what group 1 gave last */
    if (lane == 0) puts_done();
}

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 1)
    short_forward_kernel(const __grid_constant__ forward_args a)
{
    using L = forward_layout<D>;
    extern __shared__ __align__(1024) char memory[];
    uint32_t shared = shared_address(memory);
    if (threadIdx.x < QUERIES) *(float4 *)(memory + L::ZEROS + threadIdx.x * REST_ROW) = float4{};
    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES; s++) {
            uint32_t barriers = shared + L::BARRIERS + s * BARRIERS_BYTES;
            mbarrier_begin(barriers + QK_CAME, 1);
            mbarrier_begin(barriers + V_CAME, 1);
            mbarrier_begin(barriers + DONE, GROUPS * GROUP / WARP);
        }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x >= GROUPS * GROUP) { /* 168 registers a thread are to be had: 2 x 232 + 40 */
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * GROUP) produce<D>(a, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<T, D>(a, shared);
    }
}

/* ---- on the host ---- */

static tensor_maps maps_of(const lg_tensor *t, int rows)
{
    tensor_maps m = {};
    m.main = boxes_of(t, rows, MAIN);
    if (t->dim[3] > MAIN) m.rest = boxes_of(t, rows, (int)t->dim[3] - MAIN);
    return m;
}

template <typename T, int D>
static void launch(lg_stream *stream, const struct lg_attention_forward_args *a)
{
    cudaStream_t cuda = lg_cuda_stream_of(stream);
    int multiprocessors = lg_cuda_device_of(stream)->multiprocessors;
    forward_args f = {maps_of(&a->q, TOKENS), maps_of(&a->k, TOKENS),
                      maps_of(&a->v, TOKENS), maps_of(&a->o, 16),
                      (float *)a->lse.data,   (float)a->scale,
                      (int)a->q.dim[2],       (int)(a->q.dim[0] * a->q.dim[2])};
    unsigned blocks = (unsigned)(f.heads < multiprocessors ? f.heads : multiprocessors);
    LG_CUDA(cudaFuncSetAttribute(short_forward_kernel<T, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 forward_layout<D>::BYTES));
    short_forward_kernel<T, D><<<blocks, THREADS, forward_layout<D>::BYTES, cuda>>>(f);
    LG_CUDA_LAUNCHED();
}

bool cuda_short_attention_forward_takes(const lg_cuda_device *gpu,
                                        const struct lg_attention_forward_args *a)
{
    const void *p[] = {a->q.data, a->k.data, a->v.data, a->o.data};
    int64_t d = a->q.dim[3];
    if (!lg_cuda_is_hopper(gpu) || a->q.dtype == LG_F32 || (d != 64 && d != 72)) return false;
    if (a->q.dim[1] != TOKENS || a->k.dim[1] != TOKENS) return false;
    if (a->k_length.rank || a->bias.rank || a->causal || !(a->scale > 0)) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    return lg_row_stride(&a->q, 2) % 8 == 0 && lg_row_stride(&a->k, 2) % 8 == 0 &&
           lg_row_stride(&a->v, 2) % 8 == 0;
}
void cuda_short_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    bool wide = a->q.dim[3] == 72, half = a->q.dtype == LG_F16;
    if (half)
        wide ? launch<fp16, 72>(s, a) : launch<fp16, 64>(s, a);
    else
        wide ? launch<bf16, 72>(s, a) : launch<bf16, 64>(s, a);
}
