/* RMSNorm and its backward for wide vectors, of which a token has one for each row of w: see rms_norm.cu. */
#pragma once
#include "kernels/cuda/rms_norm.cuh"

template <int TEAM> struct wide {
    static constexpr int LANES = TEAM * WARP, TEAMS = WARPS / TEAM, PACKS = WIDE_PACKS;
};
/* Normed vectors that these kernels take, in packs of `pack` elements: one for each row of w. */
static bool is_wide(const lg_tensor &w, int each, int64_t pack)
{
    const int64_t packs = ceil_div(w.dim[1], pack);
    return each == 1 && w.dim[0] <= WIDE_WEIGHTS && pack > 1 && packs > WARP * WIDE_PACKS * 2 &&
           packs <= WARP * WIDE_PACKS * WARPS;
}
/* Are four warps enough for a vector? Else eight. */
static bool is_half_wide(int D, int pack)
{
    return ceil_div(D, pack) <= WARP * WIDE_PACKS * WARPS / 2;
}
/* Runs the body with TEAM warps a token, and W vectors of it. */
#define WITH_TEAM(p, N, TEAM, W, ...)                                                              \
    do {                                                                                           \
        const bool half_ = is_half_wide((p).D, N);                                                 \
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
static __device__ __forceinline__ uint32_t wide_token(const places &p, uint32_t k, uint32_t samples)
{
    const uint32_t t = k / samples, sample = k - t * samples;
    return sample * p.tokens.by + t;
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
    const uint32_t token = wide_token(a.p, there ? k : 0, samples);
    const T *x = a.x + token * a.p.of_x;
    T *y = a.y + token * a.p.of_out;
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
            const int64_t from = a.p.angles(token) + i / 2;
            read<float, N / 2>(a.cosine + from, c);
            read<float, N / 2>(a.sine + from, z);
        }
#pragma unroll
        for (int w = 0; w < W; w++) {
            const float r = 1 / sqrtf(squares[w] / (float)a.p.D + a.eps);
            float v[N], u[N];
            unpack<T, N>(in[w][j], v);
            read<T, N>(a.w + w * a.p.D + i, u);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = v[e] * r * u[e];
            if (a.cosine) {
                unpack<T, N>(packed<T, N>(v), v);
                turn_pack<N>(v, c, z, 1);
            }
            put<T, N>(y + w * a.p.D + i, v);
            if (a.rstd && i == 0) a.rstd[(int64_t)token * W + w] = r;
        }
    }
}

/* A place in shared memory for sums that every thread has of its columns: its n-th four of them are one access. */
struct sums_of_threads {
    float4 (*four)[THREADS];
    __device__ __forceinline__ void put(int n, const float *v) const
    {
        four[n][threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __device__ __forceinline__ void add(int n, const float *v) const
    {
        float4 &to = four[n][threadIdx.x];
        to = make_float4(to.x + v[0], to.y + v[1], to.z + v[2], to.w + v[3]);
    }
    __device__ __forceinline__ float get(int n, int thread, int e) const
    {
        return ((const float *)&four[n][thread])[e];
    }
};
/* The sums of a vector's columns, team by team in order, to a block's row of a.partial or a.bias. */
template <int N, int TEAM>
static __device__ __forceinline__ void store_wide_partial(float *partial, int D,
                                                          const sums_of_threads &sums)
{
    constexpr int LANES = wide<TEAM>::LANES, FOURS = N / 4;
    for (int c = threadIdx.x; c < D; c += THREADS) {
        const int pack = c / N, fours = pack / LANES * FOURS + c % N / 4;
        float all = 0;
#pragma unroll
        for (int t = 0; t < wide<TEAM>::TEAMS; t++)
            all += sums.get(fours, t * LANES + pack % LANES, c % 4);
        partial[c] = all;
    }
}

/* A block has one of a token's vectors, that of w's row blockIdx.y, of a chunk of tokens; and in the end that share of the columns of
 * what else is summed. (With both vectors of a token in a block, whose angles it then read once, two blocks had room in a
 * multiprocessor, not three.) BIASED: with the sums of what is written to dx, which are kept in shared memory: there are no registers
 * left. */
template <typename T, int N, int TEAM, bool BIASED>
static __global__ void __launch_bounds__(THREADS, WIDE_BLOCKS)
    wide_backward_kernel(const backward_args<T> a)
{
    constexpr int LANES = wide<TEAM>::LANES, TEAMS = wide<TEAM>::TEAMS, PACKS = wide<TEAM>::PACKS;
    constexpr int FOURS = PACKS * N / 4; /* of a thread's columns */
    __shared__ float4 shared[FOURS][THREADS];
    const sums_of_threads sums = {shared};
    __shared__ float told[2 * WARPS];
    const uint32_t tokens = a.p.vectors / a.p.heads, samples = tokens / a.p.tokens;
    const uint32_t step = (tokens + gridDim.x - 1) / gridDim.x, first = blockIdx.x * step;
    const uint32_t last = min(first + step, tokens);
    const int lane = threadIdx.x % LANES * N, vector = blockIdx.y, at = vector * a.p.D + lane;
    const T *u_at = a.w + at;
    float sum[PACKS][N] = {};
    int turns = 0;
    for (int n = 0; BIASED && n < FOURS; n++) sums.four[n][threadIdx.x] = float4{};
    /* All teams take as many turns. */
    for (uint32_t turn = first; turn < last; turn += TEAMS, turns++) {
        const uint32_t k = turn + threadIdx.x / LANES;
        const bool there = k < last;
        const uint32_t token = wide_token(a.p, there ? k : first, samples);
        const T *dy = a.dy + token * a.p.of_dy + at;
        const T *x = a.x + token * a.p.of_x + at;
        T *dx = a.dx + token * a.p.of_out + at;
        pack<T, N> px[PACKS] = {}, pd[PACKS] = {};
        float mean[1] = {};
        const float r = a.rstd[(int64_t)token * a.p.weights + vector];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N;
            if (!there || i + lane >= a.p.D) continue;
            px[j] = *(const pack<T, N> *)(x + i);
            pd[j] = *(const pack<T, N> *)(dy + i);
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N;
            float d[N], n[N], u[N];
            if (!there || i + lane >= a.p.D) continue;
            unpack<T, N>(pd[j], d);
            if (a.cosine) {
                float c[N / 2], z[N / 2];
                const int64_t from = a.p.angles(token) + (i + lane) / 2;
                read<float, N / 2>(a.cosine + from, c);
                read<float, N / 2>(a.sine + from, z);
                turn_pack<N>(d, c, z, -1);
                pd[j] = packed<T, N>(d);
                unpack<T, N>(pd[j], d);
            }
            unpack<T, N>(px[j], n);
            read<T, N>(u_at + i, u);
#pragma unroll
            for (int e = 0; e < N; e++) {
                n[e] *= r;
                sum[j][e] += d[e] * n[e];
                mean[0] += d[e] * u[e] * n[e];
            }
        }
        team_sums<TEAM, 1>(mean, told, turns);
        const float slope = r * r * (mean[0] / (float)a.p.D);
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N;
            float v[N], d[N], n[N], u[N], old[N];
            if (!there || i + lane >= a.p.D) continue;
            unpack<T, N>(pd[j], d);
            unpack<T, N>(px[j], n);
            read<T, N>(u_at + i, u);
            if (a.accumulate) get<T, N>(dx + i, old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                v[e] = d[e] * u[e] * r - n[e] * slope;
                if (a.accumulate) v[e] += old[e];
            }
            put<T, N>(dx + i, v);
#pragma unroll
            for (int e = 0; BIASED && e < N; e += 4) sums.add((j * N + e) / 4, v + e);
        }
    }
    const int width = a.p.weights * a.p.D;
    float *bias = a.bias + (int64_t)blockIdx.x * (width + a.rest_width);
    __syncthreads();
    if (BIASED) store_wide_partial<N, TEAM>(bias + vector * a.p.D, a.p.D, sums);
    if (a.partial) {
        __syncthreads(); /* what was there has been read */
#pragma unroll
        for (int n = 0; n < FOURS; n++) sums.put(n, sum[n * 4 / N] + n * 4 % N);
        __syncthreads();
        store_wide_partial<N, TEAM>(a.partial + (int64_t)blockIdx.x * width + vector * a.p.D, a.p.D,
                                    sums);
    }
    const int share = (a.rest_width / N + a.p.weights - 1) / a.p.weights * N;
    const int end = min(a.rest_width, (vector + 1) * share);
    for (int i = vector * share + (int)threadIdx.x * N; BIASED && i < end; i += THREADS * N) {
        float rest[N];
        sum_rest<T, N>(a, i, first, last, 1, rest);
        store<float, N>(bias + width + i, rest);
    }
}
