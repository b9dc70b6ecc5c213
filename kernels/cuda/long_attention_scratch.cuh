/* Scratch memory of the backward of attention over many tokens (long_attention.cu), all of it linear in the number of
 * tokens: what lies where, the kernel that fills it before the products, and the one that takes dQ (of few keys, dK and dV, too)
 * out of it.
 *
 * dQ is summed up in fp32 in blocks of QUERIES queries. A block comes in two halves, one made after the other: each
 * has 64 queries, or (d > 64) half of the columns, the last 8 of d = 72 in both. A half lies as the threads hold a
 * product's result: the four values of 8 columns, then those of the next thread, then the next 8 columns. */
#pragma once
#include "kernels/cuda/long_attention_tiles.cuh"

enum { KEYS = 128, GROUPS = 2, ROWS = 64 }; /* keys of a tile; warpgroups of keys, rows of each */
enum { SMALL_THREADS = 256 };

template <int D> struct dq_parts {
    static constexpr int QUERIES = D > 64 ? 64 : 128;
    /* Columns of a half without the last 8 of d = 72, with them, the second half's first. */
    static constexpr int MAIN = panels<D>::COUNT * COLUMNS / (QUERIES == 128 ? 1 : GROUPS);
    static constexpr int N = MAIN + D % COLUMNS, SECOND = QUERIES == 128 ? 0 : MAIN;
    static constexpr int HALF = ROWS * N, FLOATS = GROUPS * HALF;
};

struct scratch_memory {
    float *dq; // (heads, blocks, halves, N / 8, threads, 4)
    /* (heads, blocks QUERIES), where place_of_row says: -lse log2 e, and log2 of the factor; -(rows' sums of dout o). -inf and 0
     * beyond Tq. */
    float *minus_lse, *minus_sums;
    uint32_t *added; // (heads, blocks): how many parts are in dq; then the number of the next item
    float *dkv; // (dK and dV, parts, heads, halves of tiles of keys, D / 8, threads, 4), or nothing
    size_t bytes;
};
/* Few keys make few items; then a head's queries come in parts of at most PART_BLOCKS blocks, which have items of their own,
 * whose dK and dV are added in order. By the numbers of queries and keys alone: a sample's bits depend on no other. */
enum { PART_BLOCKS = 8 };
template <int D> static int parts_of(const struct lg_attention_backward_args *a)
{
    const int64_t blocks = ceil_div(a->q.dim[1], dq_parts<D>::QUERIES);
    return D == 64 && a->k.dim[1] < LONG_LEAST ? (int)ceil_div(blocks, PART_BLOCKS) : 1;
}
template <int D>
static scratch_memory scratch_of(const struct lg_attention_backward_args *a, void *base)
{
    using L = dq_parts<D>;
    size_t blocks = (size_t)(a->q.dim[0] * a->q.dim[2] * ceil_div(a->q.dim[1], L::QUERIES));
    size_t sums = lg_cuda_round_up(blocks * L::FLOATS * sizeof(float));
    size_t rows = lg_cuda_round_up(blocks * L::QUERIES * sizeof(float));
    size_t counters = lg_cuda_round_up((blocks + 1) * sizeof(uint32_t));
    size_t tiles = (size_t)(a->q.dim[0] * a->q.dim[2] * ceil_div(a->k.dim[1], KEYS));
    int parts = parts_of<D>(a);
    char *p = (char *)base, *behind = p + sums + 2 * rows + counters;
    return {(float *)p,
            (float *)(p + sums),
            (float *)(p + sums + rows),
            (uint32_t *)(p + sums + 2 * rows),
            (float *)behind,
            (size_t)(behind - p) +
                (parts > 1 ? 2 * (size_t)parts * tiles * KEYS * D * sizeof(float) : 0)};
}

/* The row of a sample's token; first: tokens of the first stream, all where there is one. */
static __device__ __forceinline__ int64_t row_of(int samples, int tokens, int first, int sample,
                                                 int token)
{
    if (token < first) return (int64_t)sample * first + token;
    return (int64_t)samples * first + (int64_t)sample * (tokens - first) + token - first;
}

/* ---- before ---- */

template <typename T> struct before_args {
    const T *dout, *o, *o_low;     // (B, Tq, H, D), o_low or NULL
    const float *lse;              // (B, H, Tq)
    float *minus_lse, *minus_sums; // (B, H, rows)
    uint32_t *counters;
    int64_t counts; /* of those */
    int B, Tq, first, H, rows;
    int64_t all; /* B rows H */
};
template <int D> constexpr int LANES = D > 96 ? 16 : 8; /* of a row */
/* Of 16 rows' values those four lie together that a thread has, whose columns of a product's result are 2 c, 2 c + 1, and 8 more. */
static __device__ __forceinline__ int place_of_row(int row)
{
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

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
            int64_t from = (row_of(a.B, a.Tq, a.first, (int)b, t) * a.H + h) * D + c;
            float x[8], y[8];
            load<T, 8>(a.dout + from, x);
            load<T, 8>(a.o + from, y);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += x[e] * y[e];
            if (!a.o_low) continue;
            load<T, 8>(a.o_low + from, y);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += x[e] * y[e];
        }
#pragma unroll
    for (int o = LANES<D> / 2; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);
    if (n >= a.all || threadIdx.x % LANES<D>) return;
    int64_t to = (b * a.H + h) * a.rows + place_of_row(t);
    a.minus_sums[to] = -sum;
    a.minus_lse[to] =
        there ? WEIGHT_EXPONENT<T> - LOG2_E * a.lse[(b * a.H + h) * a.Tq + t] : -INFINITY;
}

template <typename T, int D>
static void prepare(cudaStream_t stream, const struct lg_attention_backward_args *a,
                    const scratch_memory &m)
{
    int H = (int)a->q.dim[2], Tq = (int)a->q.dim[1];
    int64_t blocks = ceil_div(Tq, dq_parts<D>::QUERIES), heads = a->q.dim[0] * H;
    int64_t rows = blocks * dq_parts<D>::QUERIES, all = heads * rows;
    before_args<T> z = {(const T *)a->dout.data,
                        (const T *)a->o.data,
                        (const T *)a->o_low.data,
                        (const float *)a->lse.data,
                        m.minus_lse,
                        m.minus_sums,
                        m.added,
                        heads * blocks + 1,
                        (int)a->q.dim[0],
                        Tq,
                        a->first_queries ? a->first_queries : Tq,
                        H,
                        (int)rows,
                        all};
    before_kernel<T, D>
        <<<(unsigned)ceil_div(all * LANES<D>, SMALL_THREADS), SMALL_THREADS, 0, stream>>>(z);
    LG_CUDA_LAUNCHED();
}

/* ---- after ---- */

/* Rows x = scale times the sum of `parts` of them, in order. */
template <typename T> struct after_args {
    const float *from;
    T *x;
    int64_t stride;
    float scale;
    int rows, first, H, parts; /* first: rows of the first stream */
    int64_t part;              /* floats from one to the next */
};
/* A block per half of a block of queries, or of keys: (halves, heads, samples). */
template <typename T, int D>
static __global__ void __launch_bounds__(GROUP) after_kernel(const after_args<T> a)
{
    using L = dq_parts<D>;
    constexpr int N = L::N, PITCH = N * 2 + 16;
    __shared__ __align__(16) char memory[ROWS * PITCH];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half = blockIdx.x % GROUPS;
    int64_t head = (int64_t)blockIdx.z * a.H + blockIdx.y;
    const float *from = a.from + (head * gridDim.x + blockIdx.x) * (ROWS * N);
    uint32_t to = shared_address(memory) + (warp * 16 + lane % 16) * PITCH + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t p[4] = {};
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (j + e < N / 8) {
                float x[4];
                load<float, 4>(from + ((j + e) * GROUP + threadIdx.x) * 4, x);
                for (int i = 1; i < a.parts; i++) {
                    float more[4];
                    load<float, 4>(from + i * a.part + ((j + e) * GROUP + threadIdx.x) * 4, more);
#pragma unroll
                    for (int k = 0; k < 4; k++) x[k] += more[k];
                }
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
#pragma unroll
    for (int i = lane; i < 16 * N / 8; i += WARP) {
        int row = warp * 16 + i / (N / 8), c = i % (N / 8) * 8;
        bool rest = c >= L::MAIN; /* which both halves have */
        int column = rest ? c - L::N + D : c + half * L::SECOND;
        if (token + row >= a.rows || (rest && half)) continue;
        T *out = a.x +
                 row_of((int)gridDim.z, a.rows, a.first, (int)blockIdx.z, token + row) * a.stride +
                 (int64_t)blockIdx.y * D + column;
        *reinterpret_cast<quad *>(out) =
            *reinterpret_cast<const quad *>(memory + row * PITCH + c * 2);
    }
}

template <typename T, int D>
static void take(cudaStream_t stream, const lg_tensor &x, int first, const after_args<T> &from)
{
    after_args<T> z = from;
    z.x = (T *)x.data;
    z.stride = lg_row_stride(&x, 2);
    z.rows = (int)x.dim[1], z.H = (int)x.dim[2];
    z.first = first ? first : z.rows;
    const unsigned halves = (unsigned)(GROUPS * ceil_div(z.rows, dq_parts<D>::QUERIES));
    after_kernel<T, D><<<dim3(halves, (unsigned)z.H, (unsigned)x.dim[0]), GROUP, 0, stream>>>(z);
    LG_CUDA_LAUNCHED();
}
/* dQ, and dK and dV where they are in parts. */
template <typename T, int D>
static void take_sums(cudaStream_t stream, const struct lg_attention_backward_args *a,
                      const scratch_memory &m)
{
    after_args<T> z = {};
    z.scale = (float)a->scale / weight_factor<T>;
    z.parts = 1;
    z.from = m.dq;
    take<T, D>(stream, a->dq, a->first_queries, z);
    if constexpr (D == 64) {
        static_assert(dq_parts<D>::QUERIES == KEYS, "halves of keys are as those of queries");
        z.parts = parts_of<D>(a);
        z.part = a->q.dim[0] * a->q.dim[2] * ceil_div(a->k.dim[1], KEYS) * KEYS * D;
        if (z.parts == 1) return;
        z.from = m.dkv;
        take<T, D>(stream, a->dk, a->first_keys, z);
        z.from = m.dkv + z.parts * z.part;
        z.scale = 1 / weight_factor<T>;
        take<T, D>(stream, a->dv, a->first_keys, z);
    }
}
