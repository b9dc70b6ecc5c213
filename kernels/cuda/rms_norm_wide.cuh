/* RMSNorm and its backward for wide vectors, of which a token has one for each row of w: see rms_norm.cu. */
#pragma once
#include "kernels/cuda/rms_norm.cuh"

template <int TEAM, int PACKS_OF_A_LANE = WIDE_PACKS> struct wide {
    static constexpr int LANES = TEAM * WARP, TEAMS = WARPS / TEAM, PACKS = PACKS_OF_A_LANE;
};
/* Normed vectors that these kernels take, in packs of `pack` elements: one for each row of w. */
static bool is_wide(const lg_tensor &w, int each, int64_t pack)
{
    const int64_t packs = ceil_div(w.dim[1], pack);
    return each == 1 && w.dim[0] <= WIDE_WEIGHTS && pack > 1 && packs > WARP * WIDE_PACKS * 2 &&
           packs <= WARP * WIDE_PACKS * WARPS;
}
/* Runs the body with TEAM warps a token, and W vectors of it. */
#define WITH_TEAM(p, N, TEAM, W, ...)                                                              \
    do {                                                                                           \
        const bool half_ = ceil_div((p).D, N) <= WARP * WIDE_PACKS * WARPS / 2;                    \
        TEAM_CASE(half_ && (p).weights == 1, 4, 1, TEAM, W, __VA_ARGS__)                           \
        TEAM_CASE(half_, 4, 2, TEAM, W, __VA_ARGS__)                                               \
        TEAM_CASE((p).weights == 1, 8, 1, TEAM, W, __VA_ARGS__)                                    \
        TEAM_CASE(true, 8, 2, TEAM, W, __VA_ARGS__)                                                \
    } while (0)
#define TEAM_CASE(fits, t, w, TEAM, W, ...)                                                        \
    if (fits) {                                                                                    \
        constexpr int TEAM = t, W = w;                                                             \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }

/* The k-th token: all samples' first ones, which have their angles in common, then their second ones. */
static __device__ __forceinline__ place wide_place(const places &p, uint32_t k, uint32_t samples)
{
    const uint32_t t = k / samples, sample = k - t * samples;
    return {sample, sample * p.tokens.by + t, 0, (int64_t)t * p.heads.by * p.D};
}
/* The team's sums, warp by warp in order. told: 2 W WARPS, of which turns use the halves alternately: one barrier is enough,
 * since a half is written again behind the barrier of the next turn, to which all come when they have read it. */
template <int TEAM, int W>
static __device__ __forceinline__ void team_sums(float (&v)[W], float *told, int turn)
{
    const int warp = threadIdx.x / WARP, team = threadIdx.x / wide<TEAM>::LANES;
    told += turn % 2 * W * WARPS;
#pragma unroll
    for (int w = 0; w < W; w++) {
        v[w] = warp_sum(v[w]);
        if (threadIdx.x % WARP == 0) told[w * WARPS + warp] = v[w];
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(wide<TEAM>::LANES) : "memory");
#pragma unroll
    for (int w = 0; w < W; w++) {
        v[w] = 0;
#pragma unroll
        for (int i = 0; i < TEAM; i++) v[w] += told[w * WARPS + team * TEAM + i];
    }
}

template <typename T, int N, int TEAM, int W>
static __global__ void __launch_bounds__(THREADS) wide_forward_kernel(const forward_args<T> a)
{
    constexpr int LANES = wide<TEAM>::LANES, TEAMS = wide<TEAM>::TEAMS, PACKS = wide<TEAM>::PACKS;
    __shared__ float told[2 * W * WARPS];
    const uint32_t tokens = a.p.vectors / a.p.heads, samples = tokens / a.p.tokens;
    const uint32_t k = blockIdx.x * TEAMS + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES * N;
    const bool there = k < tokens;
    const place at = wide_place(a.p, there ? k : 0, samples);
    const T *x = a.x + at.sample * a.p.stride_in + at.within;
    T *y = a.y + at.sample * a.p.stride_out + at.within;
    pack<T, N> in[W][PACKS] = {};
    float squares[W] = {};
#pragma unroll
    for (int w = 0; w < W; w++)
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            if (there && i < a.p.D) in[w][j] = *(const pack<T, N> *)(x + w * a.p.D + i);
        }
#pragma unroll
    for (int w = 0; w < W; w++)
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            float v[N];
            unpack<T, N>(in[w][j], v);
#pragma unroll
            for (int e = 0; e < N; e++) squares[w] += v[e] * v[e];
        }
    team_sums<TEAM, W>(squares, told, 0);
    if (!there) return;
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int i = j * LANES * N + lane;
        float c[N / 2], z[N / 2];
        if (i >= a.p.D) continue;
        if (a.cosine) {
            const int64_t from =
                (int64_t)(at.token - at.sample * a.p.tokens.by) * (a.p.D / 2) + i / 2;
            load<float, N / 2>(a.cosine + from, c);
            load<float, N / 2>(a.sine + from, z);
        }
#pragma unroll
        for (int w = 0; w < W; w++) {
            const float r = 1 / sqrtf(squares[w] / (float)a.p.D + a.eps);
            float v[N], u[N];
            if (a.kept)
                *(pack<T, N> *)(a.kept + ((int64_t)at.token * W + w) * a.p.D + i) = in[w][j];
            unpack<T, N>(in[w][j], v);
            unpack<T, N>(*(const pack<T, N> *)(a.w + w * a.p.D + i), u);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = v[e] * r * u[e];
            if (a.cosine) {
                unpack<T, N>(packed<T, N>(v), v);
                turn_pack<N>(v, c, z, 1);
            }
            *(pack<T, N> *)(y + w * a.p.D + i) = packed<T, N>(v);
            if (a.rstd && i == 0) a.rstd[(int64_t)at.token * W + w] = r;
        }
        for (uint32_t h = W; !a.p.in_place && h < a.p.heads.by; h++)
            *(pack<T, N> *)(y + h * a.p.D + i) = *(const pack<T, N> *)(x + h * a.p.D + i);
    }
}

/* The sums of all threads' columns, team by team in order, to a block's row of a.partial or a.bias. Call with all threads. */
template <int N, int TEAM, int PACKS>
static __device__ __forceinline__ void store_wide_partial(float *partial, int D,
                                                          const float (&sum)[PACKS][N])
{
    __shared__ float shared[THREADS * PACKS * N];
    constexpr int WIDTH = wide<TEAM>::LANES * PACKS * N;
    __syncthreads(); /* the vector before has been read */
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const int team = threadIdx.x / wide<TEAM>::LANES, lane = threadIdx.x % wide<TEAM>::LANES;
        float *to = shared + team * WIDTH + (j * wide<TEAM>::LANES + lane) * N;
#pragma unroll
        for (int e = 0; e < N; e += 4)
            *(float4 *)(to + e) =
                make_float4(sum[j][e], sum[j][e + 1], sum[j][e + 2], sum[j][e + 3]);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < D; c += THREADS) {
        float all = 0;
#pragma unroll
        for (int t = 0; t < wide<TEAM>::TEAMS; t++) all += shared[t * WIDTH + c];
        partial[c] = all;
    }
}

/* Blocks of a multiprocessor, as registers allow for `packs` packs of x and of dy a thread. */
static constexpr int wide_blocks(int packs, bool biased)
{
    return biased ? LG_MAX(4 - packs, 1) : packs < 4 ? 3 : 2;
}
/* BIASED: with the sums of what is written to dx. */
template <typename T, int N, int TEAM, int PACKS, int W, bool BIASED>
static __global__ void __launch_bounds__(THREADS, wide_blocks(W *PACKS, BIASED))
    wide_backward_kernel(const backward_args<T> a)
{
    constexpr int LANES = wide<TEAM>::LANES, TEAMS = wide<TEAM>::TEAMS;
    __shared__ float told[2 * W * WARPS];
    if (blockIdx.y > 0) return copy_vectors<T, N>(a, WARP);
    const uint32_t tokens = a.p.vectors / a.p.heads, samples = tokens / a.p.tokens;
    const uint32_t step = (tokens + gridDim.x - 1) / gridDim.x, first = blockIdx.x * step;
    const uint32_t last = min(first + step, tokens);
    const int lane = threadIdx.x % LANES * N;
    float sum[W][PACKS][N] = {}, bias[BIASED ? W : 1][PACKS][N] = {};
    int turns = 0;
    /* All teams take as many turns. */
    for (uint32_t turn = first; turn < last; turn += TEAMS, turns++) {
        const uint32_t k = turn + threadIdx.x / LANES;
        const bool there = k < last;
        const place at = wide_place(a.p, there ? k : first, samples);
        const T *dy = a.dy + at.sample * a.p.stride_in + at.within + lane;
        const T *x = a.kept + (int64_t)at.token * W * a.p.D + lane;
        T *dx = a.dx + at.sample * a.p.stride_out + at.within + lane;
        pack<T, N> px[W][PACKS] = {}, pd[W][PACKS] = {};
        float mean[W] = {}, r[W];
#pragma unroll
        for (int w = 0; w < W; w++) {
            r[w] = a.rstd[(int64_t)at.token * W + w];
#pragma unroll
            for (int j = 0; j < PACKS; j++) {
                const int i = j * LANES * N;
                if (!there || i + lane >= a.p.D) continue;
                px[w][j] = *(const pack<T, N> *)(x + w * a.p.D + i);
                pd[w][j] = *(const pack<T, N> *)(dy + w * a.p.D + i);
            }
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            float c[N / 2], z[N / 2];
            if (!there || i >= a.p.D) continue;
            if (a.cosine) {
                const int64_t t = at.token - at.sample * a.p.tokens.by;
                load<float, N / 2>(a.cosine + t * (a.p.D / 2) + i / 2, c);
                load<float, N / 2>(a.sine + t * (a.p.D / 2) + i / 2, z);
            }
#pragma unroll
            for (int w = 0; w < W; w++) {
                float d[N], n[N], u[N];
                unpack<T, N>(pd[w][j], d);
                if (a.cosine) {
                    turn_pack<N>(d, c, z, -1);
                    pd[w][j] = packed<T, N>(d);
                    unpack<T, N>(pd[w][j], d);
                }
                unpack<T, N>(px[w][j], n);
                unpack<T, N>(*(const pack<T, N> *)(a.w + w * a.p.D + i), u);
#pragma unroll
                for (int e = 0; e < N; e++) {
                    n[e] *= r[w];
                    sum[w][j][e] += d[e] * n[e];
                    mean[w] += d[e] * u[e] * n[e];
                }
            }
        }
        team_sums<TEAM, W>(mean, told, turns);
#pragma unroll
        for (int w = 0; w < W; w++)
#pragma unroll
            for (int j = 0; j < PACKS; j++) {
                const int i = j * LANES * N;
                const float slope = r[w] * r[w] * (mean[w] / (float)a.p.D);
                float v[N], d[N], n[N], u[N], old[N];
                if (!there || i + lane >= a.p.D) continue;
                T *to = dx + w * a.p.D + i;
                unpack<T, N>(pd[w][j], d);
                unpack<T, N>(px[w][j], n);
                unpack<T, N>(*(const pack<T, N> *)(a.w + w * a.p.D + i + lane), u);
                if (a.accumulate) unpack<T, N>(*(const pack<T, N> *)to, old);
#pragma unroll
                for (int e = 0; e < N; e++) {
                    v[e] = d[e] * u[e] * r[w] - n[e] * slope;
                    if (a.accumulate) v[e] += old[e];
                    if (BIASED) bias[w][j][e] += v[e];
                }
                *(pack<T, N> *)to = packed<T, N>(v);
            }
    }
    for (int w = 0; w < W; w++) {
        const int64_t row = ((int64_t)blockIdx.x * W + w) * a.p.D;
        if (a.partial) store_wide_partial<N, TEAM, PACKS>(a.partial + row, a.p.D, sum[w]);
        if (BIASED) store_wide_partial<N, TEAM, PACKS>(a.bias + row, a.p.D, bias[BIASED ? w : 0]);
    }
}
