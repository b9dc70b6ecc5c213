/* Forward of attention on the tensor cores (mma) for any lengths: bf16 or fp16, heads d <= 128 in multiples
 * of 8, key lengths, a bias on the scores. attention.cu gives it what cuDNN does not take: calls with a
 * bias, which are T5's, and all where cuDNN is missing.
 *
 *     X = log2 e (scale Q K^T + bias),  P = 2^(X - max),  o = P V / sum of P,
 *     lse = ln 2 (max + log2(sum of P))
 *
 * A block of 4 warps owns 64 queries of a head, 16 a warp, and walks the keys in tiles of 64: maximum, sum
 * and o are brought to the maximum so far (Dao, "FlashAttention-2", 2023, algorithm 1). Weights go on from
 * scores in registers. K and V of the next tile are on their way meanwhile. What lies beyond Tq, the
 * sample's keys or d is filled with zeros and its scores are -inf: whatever is there never enters. The
 * maximum starts at -1e30: a tile whose scores are all -inf counts as nothing, not as NaN.
 *
 * A product's rows of keys may come in any order, the same for K and V. They come so that a thread's 16
 * scores of a query are those of 16 keys in a row: column 2 t + e of tile-of-8 j is key 16 t + 2 j + e. So
 * the bias is read in 16 bytes, right from global memory (Tk in multiples of 8; else one by one).
 *
 * Shared memory: 64 rows each of Q, then K and V in two stages; a row takes 128 bytes up to d = 64, else
 * 256, and 16 bytes number c of row r lie at c ^ r % 8 (Q) or c ^ (r / 16 * 2 + r % 2) (K, V): eight rows
 * that are read at once touch all banks once. 40,960 bytes, so four blocks share a multiprocessor, or
 * 81,920. Results leave by way of their queries' place.
 *
 * A head's bits depend on nothing but its rows, its keys and the bias. At B = 64, 120 tokens, 64 heads of
 * 64 there are 252 MB to move (0.06 ms at 4.2 TB/s) and 15 GFLOP. */
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tiled_attention.h"

enum { WARPS = 4, THREADS = WARPS * WARP, QUERIES = 16 * WARPS, KEYS = 64, HEAD_MAX = 128 };
enum { EIGHTS = KEYS / 8 };
#define LEAST_SCORE (-1e30f)
#define LN_2        0.693147181f

template <int D> struct layout {
    static constexpr int ROW = D > 64 ? 256 : 128, CHUNKS = D / 8;
    static constexpr int MATRIX = KEYS * ROW, STAGE = 2 * MATRIX; /* K, V; Q lies at 0 */
    static constexpr int STAGES = QUERIES * ROW, BYTES = STAGES + 2 * STAGE;
    static constexpr int BLOCKS = D > 64 ? 2 : 4; /* of a multiprocessor */
};
template <typename T> struct tiled_args {
    const T *q, *k, *v, *bias;
    const int32_t *k_length;
    int64_t q_stride, k_stride, v_stride;
    T *o;
    float *lse;
    float factor; /* scale log2 e */
    int Tq, Tk, H, d;
};

/* ---- shared memory ---- */

static __device__ __forceinline__ int turn_of_query(int row)
{
    return row % 8;
}
static __device__ __forceinline__ int turn_of_key(int row)
{
    return row / 16 * 2 + row % 2;
}
/* Key `n` of the product with tile-of-8 j; its turn is n. */
static __device__ __forceinline__ int key_of(int n, int j)
{
    return n / 2 * 16 + 2 * j + n % 2;
}
template <int D> static __device__ __forceinline__ uint32_t place(int row, int chunk, int turn)
{
    return (uint32_t)(row * layout<D>::ROW + (chunk ^ turn) * 16);
}
/* Rows [first, first + 64) of a head, those of `end` and later as zeros. */
template <int D, typename T>
static __device__ __forceinline__ void fetch(uint32_t to, const T *head, int64_t stride, int first,
                                             int end, int d, int (*turn_of)(int))
{
    constexpr int CHUNKS = layout<D>::CHUNKS;
#pragma unroll
    for (int i = 0; i < QUERIES * CHUNKS / THREADS; i++) {
        int at = i * THREADS + (int)threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        bool there = first + row < end && chunk * 8 < d;
        const T *from = head + (there ? (first + row) * stride + chunk * 8 : 0);
        copy_16_or_0(to + place<D>(row, chunk, turn_of(row)), from, there);
    }
}

/* ---- a warp's tile ---- */

/* Pairs of a thread's bias: rows lane / 4 and 8 later, keys from k0 + 16 (lane % 4). */
struct bias_pairs {
    uint32_t v[2][EIGHTS];
};
template <typename T>
static __device__ __forceinline__ void load_bias(bias_pairs &b, const tiled_args<T> &a, int query,
                                                 int key)
{
    const T *head = a.bias + (int64_t)blockIdx.y * a.Tq * a.Tk;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const T *row = head + (int64_t)min(query + 8 * r, a.Tq - 1) * a.Tk + key;
        const uint16_t *bits = reinterpret_cast<const uint16_t *>(row);
        if (a.Tk % 8 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                quad x = {};
                if (key + 8 * h < a.Tk) x = *reinterpret_cast<const quad *>(bits + 8 * h);
#pragma unroll
                for (int i = 0; i < 4; i++) b.v[r][4 * h + i] = x.v[i];
            }
        } else {
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
                uint32_t low = key + 2 * j < a.Tk ? bits[2 * j] : 0;
                uint32_t high = key + 2 * j + 1 < a.Tk ? bits[2 * j + 1] : 0;
                b.v[r][j] = high << 16 | low;
            }
        }
    }
}
/* x = q k^T: the warp's 16 queries and the tile's keys. */
template <typename T, int D>
static __device__ __forceinline__ void scores(float (&x)[EIGHTS][4], uint32_t q, uint32_t k)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16, n = lane % 8;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0;
#pragma unroll
    for (int c = 0; c < D / 8; c += 4) {
        uint32_t a[2][4], b[4];
        load_matrices(a[0], q + place<D>(row, c + lane / 16, turn_of_query(row)));
        load_matrices(a[1], q + place<D>(row, c + 2 + lane / 16, turn_of_query(row)));
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            load_matrices(b, k + place<D>(key_of(n, j), c + lane / 8, n));
            product<T>(x[j], a[0], b);
            product<T>(x[j], a[1], b + 2);
        }
    }
}
/* o += p v; p: 16 queries, 64 keys, as `scores` left them. */
template <typename T, int D>
static __device__ __forceinline__ void weigh(float (&o)[D / 8][4], const float (&p)[EIGHTS][4],
                                             uint32_t v)
{
    int lane = threadIdx.x % WARP, n = lane % 8, half = lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < EIGHTS; j += 2) {
        uint32_t b[4];
        const uint32_t a[4] = {packed(p[j][0], p[j][1], T()), packed(p[j][2], p[j][3], T()),
                               packed(p[j + 1][0], p[j + 1][1], T()),
                               packed(p[j + 1][2], p[j + 1][3], T())};
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            load_transposed_matrices(b, v + place<D>(key_of(n, j + half), c + lane / 16, n));
            product<T>(o[c], a, b);
            product<T>(o[c + 1], a, b + 2);
        }
    }
}
/* Scores to weights of the new maximum, to which sums (the thread's share) and o come down, too. keys: how
 * many of those from the thread's first on count. */
template <int D>
static __device__ __forceinline__ void soften(float (&x)[EIGHTS][4], float (&o)[D / 8][4],
                                              float (&top)[2], float (&sums)[2], int keys)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high = top[r];
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (2 * j + e >= keys) x[j][2 * r + e] = -INFINITY;
                high = fmaxf(high, x[j][2 * r + e]);
            }
        high = quad_max(high);
        float fade = exp2_of(top[r] - high), sum = 0;
        top[r] = high;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                x[j][2 * r + e] = exp2_of(x[j][2 * r + e] - high);
                sum += x[j][2 * r + e];
            }
        sums[r] = sums[r] * fade + sum;
#pragma unroll
        for (int c = 0; c < D / 8; c++) o[c][2 * r] *= fade, o[c][2 * r + 1] *= fade;
    }
}
/* The warp's rows of o, by way of its queries' place. */
template <typename T, int D>
static __device__ __forceinline__ void store_rows(const tiled_args<T> &a, char *memory, uint32_t q,
                                                  const float (&o)[D / 8][4], int first)
{
    constexpr int CHUNKS = layout<D>::CHUNKS;
    int lane = threadIdx.x % WARP, own = threadIdx.x / WARP * 16, row = own + lane % 16;
    __syncwarp();
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t x[4] = {packed(o[c][0], o[c][1], T()), packed(o[c][2], o[c][3], T()),
                               packed(o[c + 1][0], o[c + 1][1], T()),
                               packed(o[c + 1][2], o[c + 1][3], T())};
        store_matrices(q + place<D>(row, c + lane / 16, turn_of_query(row)), x);
    }
    __syncwarp();
    T *to = a.o + (((int64_t)blockIdx.z * a.Tq + first) * a.H + blockIdx.y) * a.d;
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS / WARP; i++) {
        int at = i * WARP + lane, r = own + at / CHUNKS, chunk = at % CHUNKS;
        if (first + r >= a.Tq || chunk * 8 >= a.d) continue;
        *reinterpret_cast<quad *>(to + (int64_t)r * a.H * a.d + chunk * 8) =
            *reinterpret_cast<const quad *>(memory + place<D>(r, chunk, turn_of_query(r)));
    }
}

/* ---- the block ---- */

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, layout<D>::BLOCKS)
    tiled_kernel(const __grid_constant__ tiled_args<T> a)
{
    using L = layout<D>;
    extern __shared__ __align__(256) char memory[];
    uint32_t q = shared_address(memory), stage = q + L::STAGES, other = stage + L::STAGE;
    int first = blockIdx.x * QUERIES, lane = threadIdx.x % WARP;
    int query = first + threadIdx.x / WARP * 16 + lane / 4;
    int keys = a.k_length ? a.k_length[blockIdx.z] : a.Tk;
    if (keys < 1 || keys > a.Tk) __trap();
    const T *qs = a.q + (int64_t)blockIdx.z * a.Tq * a.q_stride + (int64_t)blockIdx.y * a.d;
    const T *ks = a.k + (int64_t)blockIdx.z * a.Tk * a.k_stride + (int64_t)blockIdx.y * a.d;
    const T *vs = a.v + (int64_t)blockIdx.z * a.Tk * a.v_stride + (int64_t)blockIdx.y * a.d;
    fetch<D>(q, qs, a.q_stride, first, a.Tq, a.d, turn_of_query);
    fetch<D>(stage, ks, a.k_stride, 0, keys, a.d, turn_of_key);
    fetch<D>(stage + L::MATRIX, vs, a.v_stride, 0, keys, a.d, turn_of_key);
    copies_end();
    float o[D / 8][4] = {}, top[2] = {LEAST_SCORE, LEAST_SCORE}, sums[2] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < keys; k0 += KEYS) {
        int key = k0 + lane % 4 * 16;
        float x[EIGHTS][4];
        bias_pairs bias = {};
        if (a.bias) load_bias(bias, a, query, key);
        if (k0 + KEYS < keys) {
            fetch<D>(other, ks, a.k_stride, k0 + KEYS, keys, a.d, turn_of_key);
            fetch<D>(other + L::MATRIX, vs, a.v_stride, k0 + KEYS, keys, a.d, turn_of_key);
        }
        copies_end();
        copies_land<1>(); /* all but the next tile's */
        __syncthreads();
        scores<T, D>(x, q, stage);
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            float2 b = two<T>(bias.v[i % 2][i / 2]);
            float(&pair)[2] = *reinterpret_cast<float(*)[2]>(&x[i / 2][i % 2 * 2]);
            pair[0] = fmaf(pair[0], a.factor, b.x * LOG2_E);
            pair[1] = fmaf(pair[1], a.factor, b.y * LOG2_E);
        }
        soften<D>(x, o, top, sums, keys - key);
        weigh<T, D>(o, x, stage + L::MATRIX);
        __syncthreads(); /* the stage is free */
        uint32_t was = stage;
        stage = other, other = was;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sums[r] = quad_sum(sums[r]);
        float share = 1 / sums[r];
#pragma unroll
        for (int c = 0; c < D / 8; c++) o[c][2 * r] *= share, o[c][2 * r + 1] *= share;
        if (a.lse && lane % 4 == 0 && query + 8 * r < a.Tq)
            a.lse[((int64_t)blockIdx.z * a.H + blockIdx.y) * a.Tq + query + 8 * r] =
                (top[r] + log2f(sums[r])) * LN_2;
    }
    store_rows<T, D>(a, memory, q, o, first);
}

/* ---- on the host ---- */

template <typename T, int D>
static void launch(lg_stream *s, const struct lg_attention_forward_args *a)
{
    tiled_args<T> t = {(const T *)a->q.data,
                       (const T *)a->k.data,
                       (const T *)a->v.data,
                       (const T *)a->bias.data,
                       (const int32_t *)a->k_length.data,
                       lg_row_stride(&a->q, 2),
                       lg_row_stride(&a->k, 2),
                       lg_row_stride(&a->v, 2),
                       (T *)a->o.data,
                       (float *)a->lse.data,
                       (float)(a->scale * LOG2_E),
                       (int)a->q.dim[1],
                       (int)a->k.dim[1],
                       (int)a->q.dim[2],
                       (int)a->q.dim[3]};
    static_assert(layout<D>::BYTES <= LG_CUDA_SHARED_LEAST, "of a block on any GPU");
    dim3 grid((unsigned)ceil_div(t.Tq, QUERIES), (unsigned)t.H, (unsigned)a->q.dim[0]);
    LG_CUDA(cudaFuncSetAttribute(tiled_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 layout<D>::BYTES));
    tiled_kernel<T, D><<<grid, THREADS, layout<D>::BYTES, lg_cuda_stream_of(s)>>>(t);
    LG_CUDA_LAUNCHED();
}
template <typename T>
static void launch_for(lg_stream *s, const struct lg_attention_forward_args *a)
{
    int64_t d = a->q.dim[3];
    if (d <= 32) return launch<T, 32>(s, a);
    if (d <= 64) return launch<T, 64>(s, a);
    launch<T, HEAD_MAX>(s, a);
}

bool cuda_tiled_attention_takes(const struct lg_attention_forward_args *a)
{
    const void *p[] = {a->q.data, a->k.data, a->v.data, a->o.data, a->bias.data};
    if (a->q.dtype == LG_F32 || a->q.dim[3] % 8 || a->q.dim[3] > HEAD_MAX || a->causal)
        return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    return lg_row_stride(&a->q, 2) % 8 == 0 && lg_row_stride(&a->k, 2) % 8 == 0 &&
           lg_row_stride(&a->v, 2) % 8 == 0;
}
void cuda_tiled_attention(lg_stream *s, const struct lg_attention_forward_args *a)
{
    a->q.dtype == LG_F16 ? launch_for<fp16>(s, a) : launch_for<bf16>(s, a);
}
