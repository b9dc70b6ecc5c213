/* Attention on the tensor cores, forward and backward, with what every GPU from 8.0 on has: products of a warp
 * (mma), ldmatrix, copies that are not waited for. bf16 or fp16, heads d <= 128 in multiples of 8, any lengths, key
 * lengths. All GPUs but those of 9.0 run it, whose own kernels and cuDNN's are faster.
 *
 *     X = scale Q K^T,  P = e^(X - lse),  o = P V
 *     dP = dout V^T,  dS = P (dP - delta),  delta = sums over d of dout o
 *     dV = P^T dout,  dK = scale dS^T Q,  dQ = scale dS K
 *
 * Forward and backward walk (Dao, "FlashAttention-2", 2023, algorithms 1 and 2), but the backward in two kernels,
 * one for dK and dV and one for dQ, 7 products instead of 5: nothing is added across blocks, so the bits are always
 * the same. A block of 4 warps owns rows of a head, 16 or 32 a warp (queries; in the kernel for dK and dV keys),
 * and walks the others in tiles. A warp's results stay in its registers; P and dS go from the results of one
 * product to the operand of the next there, too, rounded to the type. So every kernel is made of two products:
 * own rows by walked rows (multiply), and that by walked rows (add_weighted).
 *
 * Shared memory: the own rows, then the walked ones in two stages, the next on its way while one is used. A row
 * takes its D values, d rounded up to 32, 64, 80 or 128, and 16 bytes more: an odd number of 16s, so that eight
 * rows that are read at once touch all banks once. What lies beyond d, the tokens or the sample's keys is filled
 * with zeros, and P is 0 there. Of D the products take C, in eights: heads of 72 are spared a tenth. At most 88 KB (attention_room below), so that it fits GPUs with 99 KiB.
 * Results leave by way of their own rows' place.
 *
 * A head's bits depend on nothing but its rows and its keys. */
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/mma_attention.h"

enum {
    WARPS = 4,
    THREADS = WARPS * WARP,
    HEAD_MAX = 128,
    BLOCKS = 2
}; /* BLOCKS: of a multiprocessor */
#define LEAST_SCORE (-1e30f)
#define LN_2        0.693147181f

/* R: sixteens of own rows a warp; N: rows of a walked tile; OWN: matrices of own rows. */
template <int D, int R, int N, int OWN> struct attention_room {
    static constexpr int ROW = 2 * D + 16, ROWS = WARPS * 16 * R;
    static constexpr int OWN_MATRIX = ROWS * ROW, MATRIX = N * ROW, STAGE = 2 * MATRIX;
    static constexpr int STAGES = OWN * OWN_MATRIX, TOKENS = STAGES + 2 * STAGE;
    static constexpr int TOKEN_STAGE = 2 * N * (int)sizeof(float); /* lse and delta of a tile */
    static constexpr int BYTES = TOKENS + (OWN == 2 ? 2 * TOKEN_STAGE : 0);
};
template <int D> using forward_room = attention_room<D, D <= 80 ? 2 : 1, 64, 1>;
template <int D> using keys_room = attention_room<D, 1, D <= 80 ? 64 : 32, 2>;
template <int D> using queries_room = attention_room<D, D <= 80 ? 2 : 1, 32, 2>;

template <typename T> struct attention_args {
    const T *q, *k, *v, *dout;
    const int32_t *k_length;
    const float *delta;
    int64_t q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride;
    T *o, *o_low, *dq, *dk, *dv; // o_low: or NULL
    float *lse;
    float scale, factor; /* factor: scale log2 e */
    int Tq, Tk, H, d;

    __device__ __forceinline__ int keys() const
    {
        int n = k_length ? k_length[blockIdx.z] : Tk;
        if (n < 1 || n > Tk) __trap();
        return n;
    }
    /* The block's head of a tensor whose rows lie `stride` apart. */
    template <typename P>
    __device__ __forceinline__ P *head(P *base, int64_t stride, int tokens) const
    {
        return base + (int64_t)blockIdx.z * tokens * stride + (int64_t)blockIdx.y * d;
    }
    template <typename P> __device__ __forceinline__ P *row_values(P *base) const /* lse, delta */
    {
        return base + ((int64_t)blockIdx.z * H + blockIdx.y) * Tq;
    }
};

/* ---- shared memory ---- */

/* Rows [first, first + ROWS) of a head, those of `end` and later as zeros, as are columns beyond d. */
template <int D, int ROWS, typename T>
static __device__ __forceinline__ void fetch(uint32_t to, const T *head, int64_t stride, int first,
                                             int end, int d)
{
    constexpr int CHUNKS = D / 8, ALL = ROWS * CHUNKS;
#pragma unroll
    for (int i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
        int at = i * THREADS + (int)threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        if (ALL % THREADS && at >= ALL) break;
        bool there = first + row < end && chunk * 8 < d;
        const T *from = head + (there ? (first + row) * stride + chunk * 8 : 0);
        copy_16_or_0(to + row * (2 * D + 16) + chunk * 16, from, there);
    }
}
/* lse in powers of 2, and delta, of a tile's queries; beyond the last P is to be 0. */
template <int N, typename T>
static __device__ __forceinline__ void fetch_tokens(float *to, const attention_args<T> &a,
                                                    int first)
{
    static_assert(2 * N <= THREADS, "one value a thread");
    int i = threadIdx.x % N, query = first + i;
    if (threadIdx.x >= 2 * N) return;
    if (threadIdx.x < N)
        to[i] = query < a.Tq ? a.row_values(a.lse)[query] * LOG2_E : INFINITY;
    else
        to[N + i] = query < a.Tq ? a.row_values(a.delta)[query] : 0;
}
/* The warp's rows (C eights) of a result by way of its rows in shared memory, which no other warp reads; `rows`: how many of
 * the block's there are in the tensor. */
template <typename T, int D, int C, int R>
static __device__ __forceinline__ void store_rows(char *own, const float (&x)[R][C][4], T *to,
                                                  int64_t stride, int rows, int d)
{
    constexpr int ROW = 2 * D + 16, CHUNKS = C;
    int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * 16 * R;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first + r * 16 + half * 8 + lane / 4;
                *reinterpret_cast<uint32_t *>(own + row * ROW + c * 16 + lane % 4 * 4) =
                    packed(x[r][c][2 * half], x[r][c][2 * half + 1], T());
            }
    __syncwarp();
    for (int i = lane; i < 16 * R * CHUNKS; i += WARP) {
        int row = first + i / CHUNKS, chunk = i % CHUNKS;
        if (row >= rows || chunk * 8 >= d) continue;
        *reinterpret_cast<quad *>(to + (int64_t)row * stride + chunk * 8) =
            *reinterpret_cast<const quad *>(own + row * ROW + chunk * 16);
    }
}

/* ---- a warp's products ---- */

/* product() over the first 8 of its 16 k. */
template <typename T>
static __device__ __forceinline__ void product_of_8(float (&d)[4], const uint32_t *a, uint32_t b)
{
#define PRODUCT(type)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(b))
    if constexpr (__is_same(T, bf16))
        PRODUCT("bf16");
    else
        PRODUCT("f16");
#undef PRODUCT
}

/* x = own rows by the tile's: sums over d, C eights. */
template <typename T, int D, int C, int R, int N>
static __device__ __forceinline__ void multiply(float (&x)[R][N / 8][4], uint32_t own,
                                                uint32_t tile)
{
    constexpr int ROW = 2 * D + 16;
    int lane = threadIdx.x % WARP;
    own += (threadIdx.x / WARP * 16 * R + lane % 16) * ROW + lane / 16 * 16;
    tile += (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int j = 0; j < N / 8; j++) x[r][j][0] = x[r][j][1] = x[r][j][2] = x[r][j][3] = 0;
#pragma unroll
    for (int k = 0; k < (C + 1) / 2; k++) {
        uint32_t a[R][4], b[4];
#pragma unroll
        for (int r = 0; r < R; r++) load_matrices(a[r], own + r * 16 * ROW + k * 32);
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            load_matrices(b, tile + j * 8 * ROW + k * 32);
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (2 * k + 1 < C) {
                    product<T>(x[r][j], a[r], b);
                    product<T>(x[r][j + 1], a[r], b + 2);
                } else {
                    product_of_8<T>(x[r][j], a[r], b[0]);
                    product_of_8<T>(x[r][j + 1], a[r], b[2]);
                }
            }
        }
    }
}
/* y += x by the tile's rows: sums over these. */
template <typename T, int D, int C, int R, int N>
static __device__ __forceinline__ void add_weighted(float (&y)[R][C][4],
                                                    const float (&x)[R][N / 8][4], uint32_t tile)
{
    constexpr int ROW = 2 * D + 16;
    int lane = threadIdx.x % WARP;
    tile += lane % 16 * ROW + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t a[R][4], b[4];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[r][i] = packed(x[r][j + i / 2][i % 2 * 2], x[r][j + i / 2][i % 2 * 2 + 1], T());
#pragma unroll
        for (int c = 0; c < C; c += 2) {
            load_transposed_matrices(b, tile + j * 8 * ROW + c * 16);
#pragma unroll
            for (int r = 0; r < R; r++) {
                product<T>(y[r][c], a[r], b);
                if (c + 1 < C) product<T>(y[r][c + 1], a[r], b + 2);
            }
        }
    }
}

/* ---- forward ---- */

/* Scores to weights of the new maximum, to which sums (the thread's share) and o come down, too. left: how many
 * of the tile's keys from the thread's first on count; top: of the scores before `factor`. */
template <int C, int R, int N>
static __device__ __forceinline__ void soften(float (&x)[R][N / 8][4], float (&o)[R][C][4],
                                              float (&top)[R][2], float (&sums)[R][2], int left,
                                              float factor)
{
    if (left < N) {
#pragma unroll
        for (int i = 0; i < R * N / 2; i++) {
            int j = i / 4 % (N / 8), e = i % 4;
            if (j * 8 + e % 2 >= left) x[i / (N / 2)][j][e] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int r = i / 2, h = i % 2 * 2;
        float high = top[r][i % 2];
#pragma unroll
        for (int j = 0; j < N / 8; j++) high = fmaxf(high, fmaxf(x[r][j][h], x[r][j][h + 1]));
        high = quad_max(high);
        float least = -high * factor, fade = exp2_of(fmaf(top[r][i % 2], factor, least)), sum = 0;
        top[r][i % 2] = high;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = h; e < h + 2; e++) {
                x[r][j][e] = exp2_of(fmaf(x[r][j][e], factor, least));
                sum += x[r][j][e];
            }
        sums[r][i % 2] = sums[r][i % 2] * fade + sum;
#pragma unroll
        for (int c = 0; c < C; c++) o[r][c][h] *= fade, o[r][c][h + 1] *= fade;
    }
}

template <typename T, int D, int C, int R, int N>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    mma_forward_kernel(const __grid_constant__ attention_args<T> a)
{
    using L = attention_room<D, R, N, 1>;
    extern __shared__ __align__(16) char memory[];
    uint32_t own = shared_address(memory), stage = own + L::STAGES, other = stage + L::STAGE;
    int first = blockIdx.x * L::ROWS, lane = threadIdx.x % WARP, keys = a.keys();
    const T *ks = a.head(a.k, a.k_stride, a.Tk), *vs = a.head(a.v, a.v_stride, a.Tk);
    fetch<D, L::ROWS>(own, a.head(a.q, a.q_stride, a.Tq), a.q_stride, first, a.Tq, a.d);
    fetch<D, N>(stage, ks, a.k_stride, 0, keys, a.d);
    fetch<D, N>(stage + L::MATRIX, vs, a.v_stride, 0, keys, a.d);
    copies_end();
    float o[R][C][4] = {}, top[R][2], sums[R][2] = {};
#pragma unroll
    for (int r = 0; r < R; r++) top[r][0] = top[r][1] = LEAST_SCORE;
#pragma unroll 1
    for (int k0 = 0; k0 < keys; k0 += N) {
        float x[R][N / 8][4];
        if (k0 + N < keys) {
            fetch<D, N>(other, ks, a.k_stride, k0 + N, keys, a.d);
            fetch<D, N>(other + L::MATRIX, vs, a.v_stride, k0 + N, keys, a.d);
        }
        copies_end();
        copies_land<1>(); /* all but the next tile's */
        __syncthreads();
        multiply<T, D, C, R, N>(x, own, stage);
        soften<C, R, N>(x, o, top, sums, keys - k0 - lane % 4 * 2, a.factor);
        add_weighted<T, D, C, R, N>(o, x, stage + L::MATRIX);
        __syncthreads(); /* the stage is free */
        uint32_t was = stage;
        stage = other, other = was;
    }
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int r = i / 2, h = i % 2,
            query = first + (threadIdx.x / WARP * R + r) * 16 + h * 8 + lane / 4;
        float sum = quad_sum(sums[r][h]), share = 1 / sum;
#pragma unroll
        for (int c = 0; c < C; c++) o[r][c][2 * h] *= share, o[r][c][2 * h + 1] *= share;
        if (a.lse && lane % 4 == 0 && query < a.Tq)
            a.row_values(a.lse)[query] = (top[r][h] * a.factor + log2f(sum)) * LN_2;
    }
    int64_t stride = (int64_t)a.H * a.d;
    T *to = a.head(a.o, stride, a.Tq) + first * stride;
    store_rows<T, D, C, R>(memory, o, to, stride, a.Tq - first, a.d);
    if (!a.o_low) return;
#pragma unroll
    for (int i = 0; i < R * C * 4; i++) {
        float *x = &o[i / (4 * C)][i / 4 % C][i % 4];
        *x -= to_float(from_float<T>(*x));
    }
    to = a.head(a.o_low, stride, a.Tq) + first * stride;
    store_rows<T, D, C, R>(memory, o, to, stride, a.Tq - first, a.d);
}

/* ---- backward ---- */

/* dK and dV: owns keys (of K, then V), walks queries (Q, then dout). */
template <typename T, int D, int C, int N>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    mma_keys_kernel(const __grid_constant__ attention_args<T> a)
{
    using L = attention_room<D, 1, N, 2>;
    extern __shared__ __align__(16) char memory[];
    uint32_t own = shared_address(memory), stage = own + L::STAGES, other = stage + L::STAGE;
    float *tokens = (float *)(memory + L::TOKENS), *next_tokens = tokens + 2 * N;
    int first = blockIdx.x * L::ROWS, lane = threadIdx.x % WARP, keys = a.keys();
    int64_t width = (int64_t)a.H * a.d;
    const T *qs = a.head(a.q, a.q_stride, a.Tq), *douts = a.head(a.dout, width, a.Tq);
    float dk[1][C][4] = {}, dv[1][C][4] = {};
    int end = first < keys ? a.Tq : 0; /* without a key there is nothing to walk */
    if (end) {
        fetch<D, L::ROWS>(own, a.head(a.k, a.k_stride, a.Tk), a.k_stride, first, keys, a.d);
        fetch<D, L::ROWS>(own + L::OWN_MATRIX, a.head(a.v, a.v_stride, a.Tk), a.v_stride, first,
                          keys, a.d);
        fetch<D, N>(stage, qs, a.q_stride, 0, end, a.d);
        fetch<D, N>(stage + L::MATRIX, douts, width, 0, end, a.d);
        fetch_tokens<N>(tokens, a, 0);
    }
    copies_end();
#pragma unroll 1
    for (int q0 = 0; q0 < end; q0 += N) {
        float p[1][N / 8][4], ds[1][N / 8][4];
        if (q0 + N < end) {
            fetch<D, N>(other, qs, a.q_stride, q0 + N, end, a.d);
            fetch<D, N>(other + L::MATRIX, douts, width, q0 + N, end, a.d);
            fetch_tokens<N>(next_tokens, a, q0 + N);
        }
        copies_end();
        copies_land<1>(); /* all but the next tile's */
        __syncthreads();
        multiply<T, D, C, 1, N>(p, own, stage);
        multiply<T, D, C, 1, N>(ds, own + L::OWN_MATRIX, stage + L::MATRIX);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            int at = j * 8 + lane % 4 * 2;
            float2 lse = *reinterpret_cast<float2 *>(tokens + at);
            float2 delta = *reinterpret_cast<float2 *>(tokens + N + at);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &w = p[0][j][e], &g = ds[0][j][e];
                w = exp2_of(fmaf(w, a.factor, -(e % 2 ? lse.y : lse.x)));
                g = w * (g - (e % 2 ? delta.y : delta.x));
            }
        }
        add_weighted<T, D, C, 1, N>(dv, p, stage + L::MATRIX);
        add_weighted<T, D, C, 1, N>(dk, ds, stage);
        __syncthreads(); /* the stage is free */
        uint32_t was = stage;
        stage = other, other = was;
        float *were = tokens;
        tokens = next_tokens, next_tokens = were;
    }
#pragma unroll
    for (int i = 0; i < 4 * C; i++) {
        int key = first + threadIdx.x / WARP * 16 + i % 4 / 2 * 8 + lane / 4;
        float &k = dk[0][i / 4][i % 4], &v = dv[0][i / 4][i % 4];
        k = key < keys ? k * a.scale : 0;
        v = key < keys ? v : 0;
    }
    int rows = a.Tk - first;
    store_rows<T, D, C, 1>(memory, dk, a.head(a.dk, a.dk_stride, a.Tk) + first * a.dk_stride,
                           a.dk_stride, rows, a.d);
    store_rows<T, D, C, 1>(memory + L::OWN_MATRIX, dv,
                           a.head(a.dv, a.dv_stride, a.Tk) + first * a.dv_stride, a.dv_stride, rows,
                           a.d);
}

/* dQ: owns queries (of Q, then dout), walks keys (K, then V). */
template <typename T, int D, int C, int R, int N>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    mma_queries_kernel(const __grid_constant__ attention_args<T> a)
{
    using L = attention_room<D, R, N, 2>;
    extern __shared__ __align__(16) char memory[];
    uint32_t own = shared_address(memory), stage = own + L::STAGES, other = stage + L::STAGE;
    int first = blockIdx.x * L::ROWS, lane = threadIdx.x % WARP, keys = a.keys();
    int64_t width = (int64_t)a.H * a.d;
    const T *ks = a.head(a.k, a.k_stride, a.Tk), *vs = a.head(a.v, a.v_stride, a.Tk);
    fetch<D, L::ROWS>(own, a.head(a.q, a.q_stride, a.Tq), a.q_stride, first, a.Tq, a.d);
    fetch<D, L::ROWS>(own + L::OWN_MATRIX, a.head(a.dout, width, a.Tq), width, first, a.Tq, a.d);
    fetch<D, N>(stage, ks, a.k_stride, 0, keys, a.d);
    fetch<D, N>(stage + L::MATRIX, vs, a.v_stride, 0, keys, a.d);
    copies_end();
    float dq[R][C][4] = {}, lse[R][2], delta[R][2];
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int query = first + (threadIdx.x / WARP * R + i / 2) * 16 + i % 2 * 8 + lane / 4;
        bool there = query < a.Tq;
        lse[i / 2][i % 2] = there ? a.row_values(a.lse)[query] * LOG2_E : INFINITY;
        delta[i / 2][i % 2] = there ? a.row_values(a.delta)[query] : 0;
    }
#pragma unroll 1
    for (int k0 = 0; k0 < keys; k0 += N) {
        float p[R][N / 8][4], ds[R][N / 8][4];
        if (k0 + N < keys) {
            fetch<D, N>(other, ks, a.k_stride, k0 + N, keys, a.d);
            fetch<D, N>(other + L::MATRIX, vs, a.v_stride, k0 + N, keys, a.d);
        }
        copies_end();
        copies_land<1>(); /* all but the next tile's */
        __syncthreads();
        multiply<T, D, C, R, N>(p, own, stage);
        multiply<T, D, C, R, N>(ds, own + L::OWN_MATRIX, stage + L::MATRIX);
        int left = keys - k0 - lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float w = exp2_of(fmaf(p[r][j][e], a.factor, -lse[r][e / 2]));
                    bool there = j * 8 + e % 2 < left;
                    ds[r][j][e] = there ? w * (ds[r][j][e] - delta[r][e / 2]) : 0;
                }
        add_weighted<T, D, C, R, N>(dq, ds, stage);
        __syncthreads(); /* the stage is free */
        uint32_t was = stage;
        stage = other, other = was;
    }
#pragma unroll
    for (int i = 0; i < 4 * R * C; i++) dq[i / (4 * C)][i / 4 % C][i % 4] *= a.scale;
    T *to = a.head(a.dq, a.dq_stride, a.Tq) + first * a.dq_stride;
    store_rows<T, D, C, R>(memory, dq, to, a.dq_stride, a.Tq - first, a.d);
}

/* ---- on the host ---- */

/* Launches a kernel whose blocks own L::ROWS of `tokens`. */
template <typename L, typename T, typename K>
static void launch(lg_stream *s, K *kernel, const attention_args<T> &a, int tokens, int64_t B)
{
    static_assert(L::BYTES <= LG_CUDA_SHARED_LEAST, "of a block on any GPU");
    dim3 grid((unsigned)ceil_div(tokens, L::ROWS), (unsigned)a.H, (unsigned)B);
    LG_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    kernel<<<grid, THREADS, L::BYTES, lg_cuda_stream_of(s)>>>(a);
    LG_CUDA_LAUNCHED();
}
template <typename T, int D, int C>
static void launch_forward(lg_stream *s, const attention_args<T> &a, int64_t B)
{
    constexpr int R = D <= 80 ? 2 : 1;
    launch<forward_room<D>>(s, mma_forward_kernel<T, D, C, R, 64>, a, a.Tq, B);
}
template <typename T, int D, int C>
static void launch_backward(lg_stream *s, const attention_args<T> &a, int64_t B)
{
    constexpr int R = D <= 80 ? 2 : 1, N = D <= 80 ? 64 : 32;
    launch<keys_room<D>>(s, mma_keys_kernel<T, D, C, N>, a, a.Tk, B);
    launch<queries_room<D>>(s, mma_queries_kernel<T, D, C, R, 32>, a, a.Tq, B);
}
#define WITH_HEAD(d, D, C, ...)                                                                    \
    if ((d) <= 32) {                                                                               \
        constexpr int D = 32, C = 4;                                                               \
        __VA_ARGS__;                                                                               \
    } else if ((d) <= 64) {                                                                        \
        constexpr int D = 64, C = 8;                                                               \
        __VA_ARGS__;                                                                               \
    } else if ((d) <= 72) {                                                                        \
        constexpr int D = 80, C = 9;                                                               \
        __VA_ARGS__;                                                                               \
    } else if ((d) <= 80) {                                                                        \
        constexpr int D = 80, C = 10;                                                              \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        constexpr int D = HEAD_MAX, C = HEAD_MAX / 8;                                              \
        __VA_ARGS__;                                                                               \
    }

/* What both directions have. */
template <typename T, typename A> static attention_args<T> args_of(const A *a)
{
    attention_args<T> r = {};
    r.q = (const T *)a->q.data;
    r.k = (const T *)a->k.data;
    r.v = (const T *)a->v.data;
    r.k_length = (const int32_t *)a->k_length.data;
    r.q_stride = lg_row_stride(&a->q, 2);
    r.k_stride = lg_row_stride(&a->k, 2);
    r.v_stride = lg_row_stride(&a->v, 2);
    r.lse = (float *)a->lse.data;
    r.scale = (float)a->scale;
    r.factor = (float)(a->scale * LOG2_E);
    r.Tq = (int)a->q.dim[1];
    r.Tk = (int)a->k.dim[1];
    r.H = (int)a->q.dim[2];
    r.d = (int)a->q.dim[3];
    return r;
}

static bool all_aligned(const void *const *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!lg_cuda_aligned_16(p[i])) return false;
    return true;
}
static bool takes(const lg_cuda_device *d, const lg_tensor *q, const lg_tensor *k,
                  const lg_tensor *v, double scale)
{
    int64_t head = q->dim[3];
    return !lg_cuda_is_hopper(d) && q->dtype != LG_F32 && head % 8 == 0 && head <= HEAD_MAX &&
           scale > 0 && lg_row_stride(q, 2) % 8 == 0 && lg_row_stride(k, 2) % 8 == 0 &&
           lg_row_stride(v, 2) % 8 == 0;
}

bool cuda_mma_attention_forward_takes(const lg_cuda_device *d,
                                      const struct lg_attention_forward_args *a)
{
    const void *const p[] = {a->q.data, a->k.data, a->v.data, a->o.data, a->o_low.data};
    return takes(d, &a->q, &a->k, &a->v, a->scale) && !a->bias.rank && !a->causal &&
           all_aligned(p, sizeof p / sizeof *p);
}
template <typename T> static void forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    attention_args<T> r = args_of<T>(a);
    r.o = (T *)a->o.data;
    r.o_low = (T *)a->o_low.data;
    WITH_HEAD(r.d, D, C, launch_forward<T, D, C>(s, r, a->q.dim[0]))
}
void cuda_mma_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    a->q.dtype == LG_F16 ? forward<fp16>(s, a) : forward<bf16>(s, a);
}

bool cuda_mma_attention_backward_takes(const lg_cuda_device *d,
                                       const struct lg_attention_backward_args *a)
{
    const void *const p[] = {a->q.data,    a->k.data,  a->v.data,  a->o.data,
                             a->dout.data, a->dq.data, a->dk.data, a->dv.data};
    return takes(d, &a->q, &a->k, &a->v, a->scale) && lg_row_stride(&a->dq, 2) % 8 == 0 &&
           lg_row_stride(&a->dk, 2) % 8 == 0 && lg_row_stride(&a->dv, 2) % 8 == 0 &&
           all_aligned(p, sizeof p / sizeof *p);
}
template <typename T>
static void backward(lg_stream *s, const struct lg_attention_backward_args *a, const float *delta)
{
    attention_args<T> r = args_of<T>(a);
    r.dout = (const T *)a->dout.data;
    r.delta = delta;
    r.dq_stride = lg_row_stride(&a->dq, 2);
    r.dk_stride = lg_row_stride(&a->dk, 2);
    r.dv_stride = lg_row_stride(&a->dv, 2);
    r.dq = (T *)a->dq.data;
    r.dk = (T *)a->dk.data;
    r.dv = (T *)a->dv.data;
    WITH_HEAD(r.d, D, C, launch_backward<T, D, C>(s, r, a->q.dim[0]))
}
void cuda_mma_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a,
                                 const float *delta)
{
    a->q.dtype == LG_F16 ? backward<fp16>(s, a, delta) : backward<bf16>(s, a, delta);
}
