/* RMSNorm and its backward for wide vectors, of which a token has one for each row of w: see rms_norm.cu. The backward adds to nothing:
 * nets never ask it. */
#pragma once
#include "kernels/cuda/forget.cuh"
#include "kernels/cuda/rms_norm.cuh"

template <int TEAM> struct wide {
    static constexpr int LANES = TEAM * WARP, TEAMS = WARPS / TEAM, PACKS = WIDE_PACKS;
};
/* Normed vectors that these kernels take, in packs of `pack` elements: one for each row of w, of which each lane has a pack. */
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
struct wide_place {
    uint32_t t, sample; // of the sample's tokens
    __device__ __forceinline__ wide_place(uint32_t k, uint32_t samples)
        : t(k / samples), sample(k - t * samples)
    {
    }
    __device__ __forceinline__ void skip(uint32_t tokens, uint32_t samples)
    {
        sample += tokens;
        while (sample >= samples) sample -= samples, t++;
    }
    __device__ __forceinline__ uint32_t token(const places &p) const
    {
        return sample * p.tokens.by + t;
    }
};
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

/* p + n stride, a single instruction where the stride is one of 32 bits. */
template <typename T> static __device__ __forceinline__ T *row_of(T *p, uint32_t n, uint32_t stride)
{
    return (T *)((char *)p + (uint64_t)n * (stride * (uint32_t)sizeof(T)));
}
/* A vector's packs that this lane has begin at its first one; of the others the last may be missing (is_wide). */
template <int N, int TEAM> static __device__ __forceinline__ bool has_pack(int j, int lane, int D)
{
    return j + 1 < wide<TEAM>::PACKS || j * wide<TEAM>::LANES * N + lane < D;
}
/* A token's angles at this lane's packs. */
template <int N, int TEAM>
static __device__ __forceinline__ void load_wide_angles(const float *cosine, const float *sine,
                                                        int lane, int D,
                                                        float (&c)[wide<TEAM>::PACKS][N / 2],
                                                        float (&z)[wide<TEAM>::PACKS][N / 2])
{
#pragma unroll
    for (int j = 0; j < wide<TEAM>::PACKS; j++) {
        const int i = j * wide<TEAM>::LANES * N / 2;
        if (!has_pack<N, TEAM>(j, lane, D)) continue;
        get<float, N / 2>(cosine + i, c[j]);
        get<float, N / 2>(sine + i, z[j]);
    }
}

template <typename T, int N, int TEAM, int W, bool TURNS>
static __global__ void __launch_bounds__(THREADS, 3) wide_forward_kernel(const forward_args<T> a)
{
    constexpr int LANES = wide<TEAM>::LANES, TEAMS = wide<TEAM>::TEAMS, PACKS = wide<TEAM>::PACKS;
    __shared__ float told[2 * W * WARPS];
    const uint32_t tokens = a.p.vectors / a.p.heads, samples = tokens / a.p.tokens;
    const uint32_t k = blockIdx.x * TEAMS + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES * N;
    const bool there = k < tokens;
    const wide_place place(there ? k : 0, samples);
    const uint32_t token = place.token(a.p);
    const T *x = a.x + token * a.p.of_x;
    T *y = a.y + token * a.p.of_out;
    pack<T, N> in[W][PACKS] = {};
    float squares[W] = {}, c[PACKS][N / 2] = {}, z[PACKS][N / 2] = {};
#pragma unroll
    for (int w = 0; w < W; w++)
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            if (i < a.p.D) in[w][j] = *(const pack<T, N> *)(x + w * a.p.D + i);
        }
    if (TURNS) {
        const uint32_t pairs = (uint32_t)a.p.D / 2;
        load_wide_angles<N, TEAM>(row_of(a.cosine, place.t, pairs) + lane / 2,
                                  row_of(a.sine, place.t, pairs) + lane / 2, lane, a.p.D, c, z);
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
        if (i >= a.p.D) continue;
#pragma unroll
        for (int w = 0; w < W; w++) {
            const float r = 1 / sqrtf(squares[w] / (float)a.p.D + a.eps);
            float v[N], u[N];
            unpack<T, N>(in[w][j], v);
            read<T, N>(a.w + w * a.p.D + i, u);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = v[e] * r * u[e];
            if (TURNS) {
                unpack<T, N>(packed<T, N>(v), v);
                turn_pack<N>(v, c[j], z[j], 1);
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
 * left. All of a turn's loads are on the way before the first is used; dy w / rms, which both passes need, stays in registers. */
template <typename T, int N, int TEAM, bool BIASED, bool TURNS>
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
    const T *const x = a.x + at, *const dy = a.dy + at;
    const float *const cosine = a.cosine + lane / 2, *const sine = a.sine + lane / 2;
    const float inverse_D = 1 / (float)a.p.D;
    float sum[PACKS][N] = {};
    pack<T, N> w[PACKS] = {};
    int turns = 0;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        if (has_pack<N, TEAM>(j, lane, a.p.D))
            w[j] = *(const pack<T, N> *)(a.w + at + j * LANES * N);
    for (int n = 0; BIASED && n < FOURS; n++) sums.four[n][threadIdx.x] = float4{};
    /* All teams take as many turns; one that has no token has zeros, with the angles of the chunk's first. */
    const wide_place of_first(first, samples);
    wide_place next(first + threadIdx.x / LANES, samples);
    for (uint32_t turn = first; turn < last; turn += TEAMS, turns++) {
        const bool there = turn + threadIdx.x / LANES < last;
        const wide_place place = there ? next : of_first;
        const uint32_t token = place.token(a.p);
        const T *const of_x = row_of(x, token, (uint32_t)a.p.of_x);
        const T *const of_dy = row_of(dy, token, (uint32_t)a.p.of_dy);
        pack<T, N> px[PACKS] = {}, pd[PACKS] = {};
        float c[PACKS][N / 2] = {}, z[PACKS][N / 2] = {}, scaled[PACKS][N], mean[1] = {};
        const float rstd = a.rstd[(int64_t)token * a.p.weights + vector];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            if (!there || !has_pack<N, TEAM>(j, lane, a.p.D)) continue;
            pd[j] = get_pack<T, N>(of_dy + j * LANES * N);
            px[j] = get_pack<T, N>(of_x + j * LANES * N);
        }
        if (TURNS) {
            const uint32_t pairs = (uint32_t)a.p.D / 2;
            load_wide_angles<N, TEAM>(row_of(cosine, place.t, pairs), row_of(sine, place.t, pairs),
                                      lane, a.p.D, c, z);
        }
        next.skip(TEAMS, samples);
        const float r = there ? rstd : 0;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            float d[N], v[N], u[N];
            unpack<T, N>(pd[j], d);
            if (TURNS) {
                turn_pack<N>(d, c[j], z[j], -1);
                unpack<T, N>(packed<T, N>(d), d);
            }
            forget<T, N>(w[j]); /* else all of it would stay in registers as floats */
            unpack<T, N>(px[j], v);
            unpack<T, N>(w[j], u);
#pragma unroll
            for (int e = 0; e < N; e++) {
                d[e] *= r;
                sum[j][e] += d[e] * v[e];
                scaled[j][e] = d[e] * u[e];
                mean[0] += scaled[j][e] * v[e];
            }
        }
        team_sums<TEAM, 1>(mean, told, turns);
        const float slope = -r * r * (mean[0] * inverse_D);
        T *const dx = row_of(a.dx + at, token, (uint32_t)a.p.of_out);
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            float v[N];
            if (!there || !has_pack<N, TEAM>(j, lane, a.p.D)) continue;
            unpack<T, N>(px[j], v);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = scaled[j][e] + v[e] * slope;
            put<T, N>(dx + j * LANES * N, v);
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
