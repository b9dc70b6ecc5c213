/* RMSNorm of vectors of D elements: rows, or the heads of packed queries and keys.
 *
 * LANES lanes of a warp hold a vector, a pack of 16 bytes each where D is at most 32 packs: four heads of 64 in 16 bits
 * fill a warp. Statistics are fp32. Sums over lanes are halved as warp_sum does it, so that a result depends on no LANES.
 *
 * Backward: a block owns a chunk of the vectors that one row of w norms. A lane keeps its columns' sums for dw in
 * registers over all its vectors, of which x and dy are read once; at the end the sums of a warp,
 * then those of the warps, are added in order, and the chunks' by cuda_add_sums. Chunks depend on the number of
 * vectors alone. What does not fit (D beyond 4 packs a lane, rows that are not aligned) takes two general kernels.
 *
 * The sums of dx over all tokens (dbias): a thread that has the same columns of every token keeps them, in the kernel for wide
 * vectors and in one for heads of 8, 16 or 32 packs, of which a block has a token's, and goes from token to token; of others dx is
 * read once more (cuda_column_sums). Those of what else the layer made (rest) are summed by blocks, or turns, of their own.
 *
 * Wide vectors (whole tokens: LTX-Video norms all 2048 channels of queries and of keys), of which a token has one for each row of
 * w, are a team's: four or eight warps, which in the forward have a token's normed vectors at once, so that its angles are read
 * once, in the backward one of them. A block takes a token of all samples before the next token, whose angles are the same.
 *
 * A token of many vectors (heads) has a block, and no dw: what its vectors have alike (angles, addresses) is worked out once,
 * and conversions go two at a time, for it is instructions that these kernels wait for, not memory.
 *
 * Turning: where pairs are parts of packs (and, in the backward, a vector's are in registers), they are turned there, after
 * rounding, which has the bits of the two operations (turn_pack is rope's). Else rope runs by itself, in place. */
#include "kernels/cuda/rms_norm_wide.cuh"

/* Runs the body with L lanes and P packs a lane for vectors of D elements in packs of N; several packs in a warp alone. */
#define WITH_LANES(D, N, L, P, ...)                                                                \
    do {                                                                                           \
        const int64_t packs_ = ceil_div(D, N);                                                     \
        LANES_CASE(packs_ <= 8, N, 8, 1, L, P, __VA_ARGS__)                                        \
        LANES_CASE(packs_ <= 16, N, 16, 1, L, P, __VA_ARGS__)                                      \
        LANES_CASE(packs_ <= 32, N, 32, 1, L, P, __VA_ARGS__)                                      \
        LANES_CASE(packs_ <= 64, N, 32, 2, L, P, __VA_ARGS__)                                      \
        LANES_CASE(packs_ <= 128, N, 32, 4, L, P, __VA_ARGS__)                                     \
    } while (0)
#define LANES_CASE(fits, N, l, n, L, P, ...)                                                       \
    if (fits) {                                                                                    \
        static_assert(n <= LANE_PACKS, "");                                                        \
        constexpr int L = l, P = n;                                                                \
        __VA_ARGS__;                                                                               \
        break;                                                                                     \
    }

/* ---- forward ---- */

/* N elements of a vector, turned by its token's angles, from number `from` on. */
template <typename T, int N>
static __device__ __forceinline__ void turn_at(float (&v)[N], const float *cosine,
                                               const float *sine, int64_t from, float sign)
{
    if constexpr (N >= 2) {
        float c[N / 2], z[N / 2];
        read<float, N / 2>(cosine + from, c);
        read<float, N / 2>(sine + from, z);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = rounded<T>(v[e]);
        turn_pack<N>(v, c, z, sign);
    }
}

/* The groups of LANES lanes take vectors, AT_ONCE each: a vector is a pack a lane. */
template <typename T, int N, int LANES>
static __global__ void __launch_bounds__(THREADS) forward_kernel(const forward_args<T> a)
{
    constexpr int GROUPS = THREADS / LANES;
    const int i = threadIdx.x % LANES * N;
    const uint32_t first = blockIdx.x * (GROUPS * AT_ONCE) + threadIdx.x / LANES;
    const bool active = i < a.p.D;
    float v[AT_ONCE][N] = {};
    place at[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const uint32_t n = first + k * GROUPS, token = n / a.p.heads;
        at[k] = {token, n - token * a.p.heads.by};
        if (active && n < a.p.vectors)
            load<T, N>(a.x + token * a.p.of_x + a.p.within(at[k].head) + i, v[k]);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        float squares = 0, w[N];
#pragma unroll
        for (int e = 0; e < N; e++) squares += v[k][e] * v[k][e];
        const float r = 1 / sqrtf(lanes_sum<LANES>(squares) / (float)a.p.D + a.eps);
        if (first + k * GROUPS >= a.p.vectors) continue;
        if (active) {
            load<T, N>(a.w + at[k].head / a.p.each * a.p.D + i, w);
#pragma unroll
            for (int e = 0; e < N; e++) v[k][e] = v[k][e] * r * w[e];
            if (a.cosine) turn_at<T, N>(v[k], a.cosine, a.sine, a.p.angles(at[k].token) + i / 2, 1);
            store<T, N>(a.y + at[k].token * a.p.of_out + a.p.within(at[k].head) + i, v[k]);
        }
        if (a.rstd && i == 0) a.rstd[a.p.vector(at[k].token, at[k].head)] = r;
    }
}

/* A block's token, and its thread's part of each vector. */
struct token_part {
    uint32_t token;
    int group, i; // elements [i, i + N)
    bool active;
};
template <int N, int LANES> static __device__ __forceinline__ token_part part_of(const places &p)
{
    token_part r;
    r.token = blockIdx.x;
    r.group = threadIdx.x / LANES;
    r.i = threadIdx.x % LANES * N;
    r.active = r.i < p.D;
    return r;
}
enum { OF_TOKEN = 3 }; // vectors of a group at once

/* The token's angles where this thread is. */
template <int N>
static __device__ __forceinline__ void load_angles(const token_part &b, const places &p,
                                                   const float *cosine, const float *sine,
                                                   float (&c)[N / 2], float (&z)[N / 2])
{
    if (!cosine || !b.active) return;
    const int64_t at = p.angles(b.token) + b.i / 2;
    read<float, N / 2>(cosine + at, c);
    read<float, N / 2>(sine + at, z);
}

template <typename T, int N, int LANES>
static __global__ void __launch_bounds__(THREADS) token_forward_kernel(const forward_args<T> a)
{
    const uint32_t groups = blockDim.x / LANES;
    const token_part b = part_of<N, LANES>(a.p);
    const uint32_t heads = a.p.heads.by;
    const T *x = a.x + b.token * a.p.of_x + b.i;
    T *y = a.y + b.token * a.p.of_out + b.i;
    float c[N / 2], z[N / 2];
    load_angles<N>(b, a.p, a.cosine, a.sine, c, z);
    for (uint32_t first = b.group; first - b.group < heads; first += groups * OF_TOKEN) {
        pack<T, N> in[OF_TOKEN] = {};
#pragma unroll
        for (uint32_t k = 0; k < OF_TOKEN; k++)
            if (b.active && first + k * groups < heads)
                in[k] = *(const pack<T, N> *)(x + (first + k * groups) * a.p.D);
#pragma unroll
        for (uint32_t k = 0; k < OF_TOKEN; k++) {
            const uint32_t head = first + k * groups;
            float v[N], w[N], squares = 0;
            unpack<T, N>(in[k], v);
#pragma unroll
            for (int e = 0; e < N; e++) squares += v[e] * v[e];
            const float r = 1 / sqrtf(lanes_sum<LANES>(squares) / (float)a.p.D + a.eps);
            if (!b.active || head >= heads) continue;
            read<T, N>(a.w + head / a.p.each * a.p.D + b.i, w);
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = v[e] * r * w[e];
            if (a.cosine) {
                unpack<T, N>(packed<T, N>(v), v);
                turn_pack<N>(v, c, z, 1);
            }
            put<T, N>(y + head * a.p.D, v);
            if (a.rstd && b.i == 0) a.rstd[a.p.vector(b.token, head)] = r;
        }
    }
}

/* A warp per vector, which it reads twice, from L1 the second time. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) long_forward_kernel(const forward_args<T> a)
{
    const uint32_t n = blockIdx.x * WARPS + threadIdx.x / WARP, token = n / a.p.heads;
    if (n >= a.p.vectors) return;
    const uint32_t head = n - token * a.p.heads.by;
    const T *x = a.x + token * a.p.of_x + a.p.within(head);
    const T *w = a.w + (int64_t)(head / a.p.each) * a.p.D;
    T *y = a.y + token * a.p.of_out + a.p.within(head);
    const int first = threadIdx.x % WARP * N;
    float v[N], u[N], squares = 0;
    for (int i = first; i < a.p.D; i += WARP * N) {
        load<T, N>(x + i, v);
#pragma unroll
        for (int e = 0; e < N; e++) squares += v[e] * v[e];
    }
    const float r = 1 / sqrtf(warp_sum(squares) / (float)a.p.D + a.eps);
    for (int i = first; i < a.p.D; i += WARP * N) {
        load<T, N>(x + i, v);
        load<T, N>(w + i, u);
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = v[e] * r * u[e];
        if (a.cosine) turn_at<T, N>(v, a.cosine, a.sine, a.p.angles(token) + i / 2, 1);
        store<T, N>(y + i, v);
    }
    if (a.rstd && first == 0) a.rstd[n] = r;
}

/* Of a block that has a token: so many that each group has as many vectors, and not more than THREADS. */
static int threads_of(const places &p, int lanes)
{
    const int64_t vectors = p.heads.by, most = THREADS / lanes;
    const int64_t turns = ceil_div(vectors, most), groups = ceil_div(vectors, turns);
    return (int)ceil_div(groups * lanes, WARP) * WARP;
}
/* A token's vectors are enough for most of a block. */
static bool fill_a_block(const places &p, int lanes)
{
    return (int64_t)p.heads.by * lanes * 4 >= (int64_t)THREADS * 3;
}

template <typename T, int N>
static void forward(cudaStream_t stream, const forward_args<T> &a, bool wide_vectors)
{
    const int64_t packs = ceil_div(a.p.D, N), vectors = a.p.vectors;
    if constexpr (N > 1)
        if (wide_vectors) {
            const int64_t tokens = vectors / a.p.heads.by;
            WITH_TEAM(a.p, N, TEAM, W, {
                const unsigned blocks = (unsigned)ceil_div(tokens, wide<TEAM>::TEAMS);
                if constexpr (W == WIDE_WEIGHTS) {
                    if (a.cosine)
                        wide_forward_kernel<T, N, TEAM, W, true><<<blocks, THREADS, 0, stream>>>(a);
                    else
                        wide_forward_kernel<T, N, TEAM, W, false>
                            <<<blocks, THREADS, 0, stream>>>(a);
                }
            });
            LG_CUDA_LAUNCHED();
            return;
        }
    if (packs > WARP)
        long_forward_kernel<T, N><<<(unsigned)ceil_div(vectors, WARPS), THREADS, 0, stream>>>(a);
    else
        WITH_LANES(a.p.D, N, LANES, PACKS, {
            constexpr int BLOCK = THREADS / LANES * AT_ONCE;
            if constexpr (PACKS == 1 && N > 1)
                if (fill_a_block(a.p, LANES)) {
                    token_forward_kernel<T, N, LANES>
                        <<<(unsigned)(vectors / a.p.heads.by), threads_of(a.p, LANES), 0, stream>>>(
                            a);
                    break;
                }
            if constexpr (PACKS == 1)
                forward_kernel<T, N, LANES>
                    <<<(unsigned)ceil_div(vectors, BLOCK), THREADS, 0, stream>>>(a);
        });
    LG_CUDA_LAUNCHED();
}

/* Packs may be used: vectors and tokens begin on 16 bytes. */
static bool packs_fit(const lg_tensor *const *t, int count, const lg_tensor &w)
{
    const int64_t e = (int64_t)lg_dtype_bytes(w.dtype);
    bool fits = w.dim[1] * e % 16 == 0 && lg_cuda_aligned_16(w.data);
    for (int i = 0; i < count; i++)
        fits = fits && lg_row_stride(t[i], 2) * e % 16 == 0 && lg_cuda_aligned_16(t[i]->data);
    return fits;
}

/* Whether vectors are turned where they are normed: pairs and their angles are parts of packs. */
static bool turns_here(bool fits, const lg_tensor &cosine, const lg_tensor &sine)
{
    return cosine.data && fits && lg_cuda_aligned_16(cosine.data) && lg_cuda_aligned_16(sine.data);
}

void cuda_rms_norm_forward(lg_stream *s, const struct lg_rms_norm_forward_args *a)
{
    const lg_tensor *t[] = {&a->x, &a->y};
    const bool fits = packs_fit(t, 2, a->w), turns = turns_here(fits, a->cos, a->sin);
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(a->x.dtype, T, {
        forward_args<T> f = {};
        f.x = (const T *)a->x.data;
        f.w = (const T *)a->w.data;
        f.y = (T *)a->y.data;
        f.rstd = (float *)a->rstd.data;
        f.eps = (float)a->eps;
        f.p = places_of(a->x, a->y, a->w, a->each);
        if (turns) f.cosine = (const float *)a->cos.data, f.sine = (const float *)a->sin.data;
        /* Of one vector a token, a warp has it: 38 us where a team takes 50 (4 x 2496 of 2048 elements). */
        const bool is_team = a->w.dim[0] == WIDE_WEIGHTS;
        WITH_PACK(fits, T, N, (forward<T, N>(stream, f, is_team && is_wide(a->w, a->each, N))));
    })
    if (!a->cos.data || turns) return;
    lg_rope_args rope = {};
    rope.x = rope.y = a->y;
    rope.cos = a->cos, rope.sin = a->sin;
    rope.turned = (int)a->w.dim[0] * a->each;
    cuda_rope(s, &rope);
}

/* ---- backward ---- */

/* This lane's column sums of all groups of the block, in order, to the block's row of a.partial. Call with all threads. */
template <int N, int LANES, int PACKS>
static __device__ __forceinline__ void store_partial(float *partial, int D, float (&sum)[PACKS][N])
{
    __shared__ float shared[WARPS][LANES * N];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        __syncthreads(); /* the pack before has been read */
#pragma unroll
        for (int e = 0; e < N; e++) {
#pragma unroll
            for (int o = LANES; o < WARP; o *= 2)
                sum[j][e] += __shfl_xor_sync(0xffffffff, sum[j][e], o);
            if (lane < LANES) shared[warp][lane * N + e] = sum[j][e];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < LANES * N && j * LANES * N + c < D; c += THREADS) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all += shared[w][c];
            partial[j * LANES * N + c] = all;
        }
    }
}

template <typename T, int N, int LANES, int PACKS>
static __global__ void __launch_bounds__(THREADS, PACKS == 1 ? 4 : 1)
    backward_kernel(const backward_args<T> a)
{
    constexpr int GROUPS = THREADS / LANES;
    const range k = range_of(a.p);
    const int lane = threadIdx.x % LANES * N;
    const T *w = a.w + (int64_t)blockIdx.y * a.p.D;
    float sum[PACKS][N] = {};
    /* All groups of a warp take as many turns: the sums over lanes want all lanes. */
    for (uint32_t turn = k.first; turn < k.last; turn += GROUPS) {
        const uint32_t n = turn + threadIdx.x / LANES;
        const bool there = n < k.last;
        const place at = in_range(a.p, there ? n : k.first);
        const T *x = a.x + at.token * a.p.of_x + a.p.within(at.head);
        const T *dy = a.dy + at.token * a.p.of_dy + a.p.within(at.head);
        T *dx = a.dx + at.token * a.p.of_out + a.p.within(at.head);
        const float r = a.rstd[a.p.vector(at.token, at.head)];
        pack<T, N> px[PACKS] = {}, pd[PACKS] = {};
        float mean = 0;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            if (!there || i >= a.p.D) continue;
            px[j] = *(const pack<T, N> *)(x + i);
            pd[j] = *(const pack<T, N> *)(dy + i);
            if (a.cosine) {
                float d[N];
#pragma unroll
                for (int e = 0; e < N; e++) d[e] = to_float(pd[j].v[e]);
                turn_at<T, N>(d, a.cosine, a.sine, a.p.angles(at.token) + i / 2, -1);
#pragma unroll
                for (int e = 0; e < N; e++) pd[j].v[e] = from_float<T>(d[e]);
            }
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            float u[N];
            if (!there || i >= a.p.D) continue;
            load<T, N>(w + i, u);
#pragma unroll
            for (int e = 0; e < N; e++) {
                const float d = to_float(pd[j].v[e]), n = to_float(px[j].v[e]) * r;
                sum[j][e] += d * n;
                mean += d * u[e] * n;
            }
        }
        mean = lanes_sum<LANES>(mean) / (float)a.p.D;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int i = j * LANES * N + lane;
            float u[N], v[N], old[N];
            if (!there || i >= a.p.D) continue;
            load<T, N>(w + i, u);
            if (a.accumulate) load<T, N>(dx + i, old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                v[e] = r * (to_float(pd[j].v[e]) * u[e] - to_float(px[j].v[e]) * r * mean);
                if (a.accumulate) v[e] += old[e];
            }
            store<T, N>(dx + i, v);
        }
    }
    if (a.partial)
        store_partial<N, LANES, PACKS>(
            a.partial + ((int64_t)blockIdx.x * a.p.weights + blockIdx.y) * a.p.D, a.p.D, sum);
}

/* Some heads of a block's tokens: all of dx, sums for dw and of dx. A block's tokens lie gridDim.x apart, so that blocks that run side
 * by side read what lies side by side. A thread has a pack of every token, the same one; vectors are LANES packs, and a block has
 * `heads` of a token's. Sums and products are fused as written, so that a vector's bits do not depend on which token of a turn it is.
 * Addresses are counted on from token to token: instructions are what this kernel waited for. */
template <typename T, int N, int LANES>
static __global__ void __launch_bounds__(THREADS, HEAD_WARPS_AT_ONCE / WARPS)
    heads_backward_kernel(const backward_args<T> a, int heads)
{
    constexpr int D = LANES * N;
    __shared__ float shared[THREADS * N];
    const uint32_t tokens = a.p.vectors / a.p.heads;
    const int first = (int)blockIdx.y * heads, all = (int)a.p.heads.by, width = all * D;
    float *biases = a.bias + (int64_t)blockIdx.x * (width + a.rest_width);
    if (first >= all) { /* rest */
        const int slices = (all + heads - 1) / heads;
        const int i = (((int)blockIdx.y - slices) * (int)blockDim.x + (int)threadIdx.x) * N;
        float sum[N];
        if (i >= a.rest_width) return;
        sum_rest<T, N>(a, i, blockIdx.x, tokens, gridDim.x, sum);
        store<float, N>(biases + width + i, sum);
        return;
    }
    const int head = first + threadIdx.x / LANES, within = threadIdx.x % LANES * N;
    const int last = min(first + heads, all), at = head * D + within;
    const bool there = head < last;
    const uint32_t apart = gridDim.x, sample = blockIdx.x / a.p.tokens;
    uint32_t t = blockIdx.x - sample * a.p.tokens.by; /* of the sample */
    const T *dy_at = a.dy + blockIdx.x * a.p.of_dy + at;
    const T *x_at = a.x + blockIdx.x * a.p.of_x + at;
    T *dx_at = a.dx + blockIdx.x * a.p.of_out + at;
    const float *rstd_at = a.rstd + a.p.vector(blockIdx.x, head);
    float u[N] = {}, dw[N] = {}, bias[N] = {};
    if (there) unpack<T, N>(*(const pack<T, N> *)(a.w + head / (int)a.p.each.by * D + within), u);
    for (uint32_t token = blockIdx.x; token < tokens; token += HEAD_TOKENS * apart) {
        pack<T, N> dy[HEAD_TOKENS] = {}, x[HEAD_TOKENS] = {};
        float rstd[HEAD_TOKENS] = {};
        T *dx[HEAD_TOKENS];
        uint32_t of_sample[HEAD_TOKENS];
#pragma unroll
        for (uint32_t k = 0; k < HEAD_TOKENS; k++) {
            if (there && token + k * apart < tokens) {
                dy[k] = *(const pack<T, N> *)dy_at;
                x[k] = *(const pack<T, N> *)x_at;
                rstd[k] = *rstd_at;
            }
            dx[k] = dx_at, of_sample[k] = t;
            dy_at += apart * a.p.of_dy, x_at += apart * a.p.of_x, dx_at += apart * a.p.of_out;
            rstd_at += apart * a.p.heads.by;
            t += apart;
            while (t >= a.p.tokens.by) t -= a.p.tokens.by;
        }
#pragma unroll
        for (uint32_t k = 0; k < HEAD_TOKENS; k++) {
            float d[N], n[N], old[N], mean = 0;
            const bool is_token = token + k * apart < tokens;
            unpack<T, N>(dy[k], d);
            unpack<T, N>(x[k], n);
            if (a.cosine && there && is_token) {
                float c[N / 2], z[N / 2];
                const int64_t angles = of_sample[k] * (int64_t)(D / 2) + within / 2;
                read<float, N / 2>(a.cosine + angles, c);
                read<float, N / 2>(a.sine + angles, z);
                turn_pack<N>(d, c, z, -1);
                unpack<T, N>(packed<T, N>(d), d);
            }
#pragma unroll
            for (int e = 0; e < N; e++) {
                n[e] *= rstd[k];
                dw[e] = fmaf(d[e], n[e], dw[e]);
                d[e] *= u[e];
                mean = fmaf(d[e], n[e], mean);
            }
            mean = lanes_sum<LANES>(mean) / (float)D;
#pragma unroll
            for (int e = 0; e < N; e++) d[e] = rstd[k] * fmaf(-n[e], mean, d[e]);
            if (!there || !is_token) continue;
            if (a.accumulate) get<T, N>(dx[k], old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                if (a.accumulate) d[e] += old[e];
                bias[e] += d[e];
            }
            put<T, N>(dx[k], d);
        }
    }
    if (head < last) {
        if (a.bias) store<float, N>(biases + at, bias);
        store<float, N>(shared + threadIdx.x * N, dw);
    }
    __syncthreads();
    if (!a.partial) return;
    const int slices = (all + heads - 1) / heads;
    float *to = a.partial + ((int64_t)blockIdx.x * slices + blockIdx.y) * a.p.weights * D;
    for (int i = threadIdx.x; i < a.p.weights * D; i += blockDim.x) {
        const int from = max(i / D * (int)a.p.each.by - first, 0);
        const int till = min((i / D + 1) * (int)a.p.each.by, last) - first;
        float sum = 0;
        for (int h = from; h < till; h++) sum += shared[h * D + i % D];
        to[i] = sum;
    }
}

/* dx alone, of a token. */
template <typename T, int N, int LANES>
static __global__ void __launch_bounds__(THREADS) token_dx_kernel(const backward_args<T> a)
{
    const uint32_t groups = blockDim.x / LANES;
    const token_part b = part_of<N, LANES>(a.p);
    const uint32_t heads = a.p.heads.by;
    const T *dy_at = a.dy + b.token * a.p.of_dy + b.i, *x_at = a.x + b.token * a.p.of_x + b.i;
    T *dx = a.dx + b.token * a.p.of_out + b.i;
    float c[N / 2], z[N / 2];
    load_angles<N>(b, a.p, a.cosine, a.sine, c, z);
    for (uint32_t first = b.group; first - b.group < heads; first += groups * OF_TOKEN) {
        pack<T, N> dy[OF_TOKEN] = {}, x_of[OF_TOKEN] = {};
#pragma unroll
        for (uint32_t k = 0; k < OF_TOKEN; k++) {
            const uint32_t head = first + k * groups;
            if (!b.active || head >= heads) continue;
            dy[k] = *(const pack<T, N> *)(dy_at + head * a.p.D);
            x_of[k] = *(const pack<T, N> *)(x_at + head * a.p.D);
        }
#pragma unroll
        for (uint32_t k = 0; k < OF_TOKEN; k++) {
            const uint32_t head = first + k * groups;
            const bool there = b.active && head < heads;
            float d[N], x[N], u[N] = {}, v[N], old[N], mean = 0;
            const float r = there ? a.rstd[a.p.vector(b.token, head)] : 0;
            unpack<T, N>(dy[k], d);
            unpack<T, N>(x_of[k], x);
            if (there) {
                read<T, N>(a.w + head / a.p.each * a.p.D + b.i, u);
                if (a.cosine) {
                    turn_pack<N>(d, c, z, -1);
                    unpack<T, N>(packed<T, N>(d), d);
                }
            }
#pragma unroll
            for (int e = 0; e < N; e++) {
                const float n = x[e] * r;
                mean += d[e] * u[e] * n;
            }
            mean = lanes_sum<LANES>(mean) / (float)a.p.D;
            if (!there) continue;
            if (a.accumulate) get<T, N>(dx + head * a.p.D, old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                v[e] = r * (d[e] * u[e] - x[e] * r * mean);
                if (a.accumulate) v[e] += old[e];
            }
            put<T, N>(dx + head * a.p.D, v);
        }
    }
}

/* dx alone: a warp per vector, which it reads twice. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) long_dx_kernel(const backward_args<T> a)
{
    const range k = range_of(a.p);
    const T *w = a.w + (int64_t)blockIdx.y * a.p.D;
    const int first = threadIdx.x % WARP * N;
    for (uint32_t n = k.first + threadIdx.x / WARP; n < k.last; n += WARPS) {
        const place at = in_range(a.p, n);
        const T *x = a.x + at.token * a.p.of_x + a.p.within(at.head);
        const T *dy = a.dy + at.token * a.p.of_dy + a.p.within(at.head);
        T *dx = a.dx + at.token * a.p.of_out + a.p.within(at.head);
        const float r = a.rstd[a.p.vector(at.token, at.head)];
        float v[N], d[N], u[N], old[N], mean = 0;
        for (int i = first; i < a.p.D; i += WARP * N) {
            load<T, N>(x + i, v);
            load<T, N>(dy + i, d);
            load<T, N>(w + i, u);
#pragma unroll
            for (int e = 0; e < N; e++) mean += d[e] * u[e] * (v[e] * r);
        }
        mean = warp_sum(mean) / (float)a.p.D;
        for (int i = first; i < a.p.D; i += WARP * N) {
            load<T, N>(x + i, v);
            load<T, N>(dy + i, d);
            load<T, N>(w + i, u);
            if (a.accumulate) load<T, N>(dx + i, old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                v[e] = r * (d[e] * u[e] - v[e] * r * mean);
                if (a.accumulate) v[e] += old[e];
            }
            store<T, N>(dx + i, v);
        }
    }
}
/* The chunk's sums for dw: a block takes 32 packs of columns, its warps every eighth vector. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) long_dw_kernel(const backward_args<T> a)
{
    const range k = range_of(a.p);
    const int first = blockIdx.z * WARP * N, i = first + threadIdx.x % WARP * N;
    float sum[1][N] = {}, v[N], d[N];
    for (uint32_t n = k.first + threadIdx.x / WARP; i < a.p.D && n < k.last; n += WARPS) {
        const place at = in_range(a.p, n);
        const float r = a.rstd[a.p.vector(at.token, at.head)];
        load<T, N>(a.x + at.token * a.p.of_x + a.p.within(at.head) + i, v);
        load<T, N>(a.dy + at.token * a.p.of_dy + a.p.within(at.head) + i, d);
#pragma unroll
        for (int e = 0; e < N; e++) sum[0][e] += d[e] * (v[e] * r);
    }
    const int64_t row = (int64_t)blockIdx.x * a.p.weights + blockIdx.y;
    store_partial<N, WARP, 1>(a.partial + row * a.p.D + first, a.p.D - first, sum);
}

/* How the backward is done: which kernel, and how tokens and a token's heads are dealt out to blocks. */
struct backward_way {
    enum { WIDE, HEADS, ANY } kernel;
    int64_t chunks; /* of tokens; with ANY of the vectors that a weight norms */
    int64_t heads;  /* of a block, with HEADS */
    int64_t rows;   /* of partial sums for dw */
};
/* Heads of `packs` packs: those of one weight are a block's where they fill half of it, else as many as it has threads for. */
static backward_way heads_way(int64_t tokens, int64_t vectors, int64_t each, int64_t packs)
{
    const int64_t most = THREADS / packs;
    const int64_t heads = each <= most && each * 2 > most ? each : LG_MIN(most, vectors);
    const int64_t slices = ceil_div(vectors, heads), warps = ceil_div(heads * packs, WARP);
    const int64_t at_once = 132 * (HEAD_WARPS_AT_ONCE / warps); /* blocks */
    const int64_t chunks =
        LG_MIN(ceil_div(tokens, HEAD_CHUNK_MIN), LG_MAX(at_once / slices, (int64_t)1));
    return {backward_way::HEADS, chunks, heads, chunks * slices};
}
/* By sizes and alignment alone; of wide vectors and heads an H200 has all blocks at once. */
static backward_way way_of(const struct lg_rms_norm_backward_args *a, bool fits)
{
    const int64_t tokens = a->dy.dim[0] * a->dy.dim[1], vectors = a->dy.dim[2], D = a->w.dim[1];
    const int64_t N = 16 / (int64_t)lg_dtype_bytes(a->w.dtype), packs = D / N;
    if (fits && !a->accumulate && is_wide(a->w, a->each, N)) {
        const int64_t most = 132 * WIDE_BLOCKS / a->w.dim[0];
        const int64_t chunks = LG_MIN(ceil_div(tokens, WIDE_CHUNK_MIN), most);
        return {backward_way::WIDE, chunks, 0, chunks};
    }
    const bool full = D % N == 0 && (packs == 8 || packs == 16 || packs == 32);
    if (fits && full && vectors * packs >= WARP && (a->dw.rank || a->dbias.rank || a->rest.rank))
        return heads_way(tokens, vectors, a->each, packs);
    const int64_t chunks = LG_MIN(ceil_div(tokens * a->each, CHUNK_MIN), (int64_t)CHUNKS_MAX);
    return {backward_way::ANY, chunks, 0, chunks};
}
static int64_t dw_floats(const struct lg_rms_norm_backward_args *a, const backward_way &way)
{
    return a->dw.rank ? way.rows * lg_numel(&a->dw) : 0;
}
/* First dw's partial sums, then dbias'; how the memory will be aligned is not known yet. */
size_t cuda_rms_norm_backward_scratch(const struct lg_rms_norm_backward_args *a)
{
    const int64_t tokens = a->dy.dim[0] * a->dy.dim[1];
    const bool biased = a->dbias.rank || a->rest.rank;
    const int64_t width = a->dx.dim[2] * a->dx.dim[3] + (a->rest.rank ? a->rest.dim[2] : 0);
    size_t bytes = 0;
    for (int fits = 0; fits < 2; fits++) {
        const backward_way way = way_of(a, fits);
        const size_t own = way.kernel == backward_way::ANY ? 0 : (size_t)(way.chunks * width);
        const size_t columns = cuda_column_sums_scratch(tokens, width);
        const size_t biases = biased ? LG_MAX(own * sizeof(float), columns) : 0;
        bytes = LG_MAX(bytes, (size_t)dw_floats(a, way) * sizeof(float) + biases);
    }
    return bytes;
}

template <typename T, int N, int TEAM>
static void wide_backward_by(cudaStream_t stream, int64_t chunks, const backward_args<T> &a)
{
    const dim3 grid((unsigned)chunks, (unsigned)a.p.weights);
    LG_ASSERT(LG_MAX(a.p.of_x, LG_MAX(a.p.of_dy, a.p.of_out)) < 1 << 29); /* bytes: 32 bits */
    if (a.bias && a.cosine)
        wide_backward_kernel<T, N, TEAM, true, true><<<grid, THREADS, 0, stream>>>(a);
    else if (a.bias)
        wide_backward_kernel<T, N, TEAM, true, false><<<grid, THREADS, 0, stream>>>(a);
    else if (a.cosine)
        wide_backward_kernel<T, N, TEAM, false, true><<<grid, THREADS, 0, stream>>>(a);
    else
        wide_backward_kernel<T, N, TEAM, false, false><<<grid, THREADS, 0, stream>>>(a);
    LG_CUDA_LAUNCHED();
}
template <typename T, int N>
static void wide_backward(cudaStream_t stream, int64_t chunks, const backward_args<T> &a)
{
    is_half_wide(a.p.D, N) ? wide_backward_by<T, N, 4>(stream, chunks, a)
                           : wide_backward_by<T, N, 8>(stream, chunks, a);
}

template <typename T, int N>
static void heads_backward(cudaStream_t stream, const backward_way &way, const backward_args<T> &a)
{
    const int lanes = a.p.D / N, heads = (int)way.heads;
    const int threads = (int)ceil_div(heads * lanes, WARP) * WARP;
    const int64_t slices = ceil_div(a.p.heads.by, heads) + ceil_div(a.rest_width, threads * N);
    const dim3 grid((unsigned)way.chunks, (unsigned)slices);
    if (lanes == 8)
        heads_backward_kernel<T, N, 8><<<grid, threads, 0, stream>>>(a, heads);
    else if (lanes == 16)
        heads_backward_kernel<T, N, 16><<<grid, threads, 0, stream>>>(a, heads);
    else
        heads_backward_kernel<T, N, 32><<<grid, threads, 0, stream>>>(a, heads);
    LG_CUDA_LAUNCHED();
}

template <typename T, int N>
static void backward(cudaStream_t stream, const backward_way &way, const backward_args<T> &a)
{
    const dim3 grid((unsigned)way.chunks, (unsigned)a.p.weights);
    if constexpr (N > 1) {
        if (way.kernel == backward_way::WIDE) return wide_backward<T, N>(stream, way.chunks, a);
        if (way.kernel == backward_way::HEADS) return heads_backward<T, N>(stream, way, a);
    }
    WITH_LANES(a.p.D, N, LANES, PACKS, {
        if constexpr (PACKS == 1 && N > 1)
            if (!a.partial && fill_a_block(a.p, LANES)) {
                token_dx_kernel<T, N, LANES>
                    <<<a.p.vectors / a.p.heads.by, threads_of(a.p, LANES), 0, stream>>>(a);
                LG_CUDA_LAUNCHED();
                return;
            }
        backward_kernel<T, N, LANES, PACKS><<<grid, THREADS, 0, stream>>>(a);
        LG_CUDA_LAUNCHED();
        return;
    });
    const dim3 columns((unsigned)way.chunks, (unsigned)a.p.weights,
                       (unsigned)ceil_div(a.p.D, WARP * N));
    if (a.partial) long_dw_kernel<T, N><<<columns, THREADS, 0, stream>>>(a);
    long_dx_kernel<T, N><<<grid, THREADS, 0, stream>>>(a);
    LG_CUDA_LAUNCHED();
}

/* dw, dbias and that of rest, from the sums that the kernel left, or (biases) of what has been written. */
static void add_all_sums(cudaStream_t stream, const struct lg_rms_norm_backward_args *a,
                         const backward_way &way, int64_t rest, const float *partial, float *biases)
{
    const int64_t tokens = a->dx.dim[0] * a->dx.dim[1], width = a->dx.dim[2] * a->dx.dim[3];
    const int64_t all = width + rest, e = (int64_t)lg_dtype_bytes(a->dbias.dtype);
    const bool add = a->accumulate_dbias, columns = way.kernel == backward_way::ANY;
    struct cuda_sums sums[CUDA_SUMS_MAX];
    int count = 0;
    if (a->dw.data) sums[count++] = {partial, way.rows, lg_numel(&a->dw), a->dw, a->accumulate_dw};
    if (!columns && rest && a->dbias_of_rest.data == (char *)a->dbias.data + width * e) {
        const lg_tensor one = lg_t1(a->dbias.data, a->dbias.dtype, all); /* they lie together */
        sums[count++] = {biases, way.chunks, all, one, add};
    } else if (!columns && biases) {
        if (a->dbias.data) sums[count++] = {biases, way.chunks, all, a->dbias, add};
        if (rest) sums[count++] = {biases + width, way.chunks, all, a->dbias_of_rest, add};
    }
    if (count > 0) cuda_add_sums(stream, sums, count);
    if (!columns) return;
    const lg_tensor dx = lg_t2(a->dx.data, a->dx.dtype, tokens, width);
    const lg_tensor others = lg_t2(a->rest.data, a->rest.dtype, tokens, rest);
    if (a->dbias.data)
        cuda_column_sums(stream, dx, lg_row_stride(&a->dx, 2), a->dbias, add, biases);
    if (rest)
        cuda_column_sums(stream, others, lg_row_stride(&a->rest, 2), a->dbias_of_rest, add, biases);
}

void cuda_rms_norm_backward(lg_stream *s, const struct lg_rms_norm_backward_args *a)
{
    const lg_tensor *t[] = {&a->x, &a->dy, &a->dx, &a->rest};
    const int64_t pack = 16 / (int64_t)lg_dtype_bytes(a->w.dtype);
    const int64_t rest = a->rest.data ? a->rest.dim[2] : 0;
    const bool fits = packs_fit(t, rest ? 4 : 3, a->w) && rest % pack == 0;
    const backward_way way = way_of(a, fits);
    const bool turns =
        turns_here(fits, a->cos, a->sin) &&
        (way.kernel == backward_way::WIDE || a->w.dim[1] <= WARP * LANE_PACKS * pack);
    const bool apart = a->cos.data && !turns; /* then what is turned back lies where dx will */
    const lg_tensor dy = apart ? a->dx : a->dy;
    cudaStream_t stream = lg_cuda_stream_of(s);
    const bool biased = a->dbias.data || rest;
    float *biases = biased ? (float *)s->scratch + dw_floats(a, way) : nullptr;
    if (apart) {
        lg_rope_args rope = {};
        rope.x = a->dy, rope.y = a->dx;
        rope.cos = a->cos, rope.sin = a->sin;
        rope.turned = (int)a->w.dim[0] * a->each;
        rope.inverse = true;
        cuda_rope(s, &rope);
    }
    WITH_TYPE(a->dy.dtype, T, {
        backward_args<T> b = {};
        b.dy = (const T *)dy.data;
        b.x = (const T *)a->x.data;
        b.w = (const T *)a->w.data;
        b.rstd = (const float *)a->rstd.data;
        b.dx = (T *)a->dx.data;
        b.partial = a->dw.data ? (float *)s->scratch : nullptr;
        b.bias = way.kernel == backward_way::ANY ? nullptr : biases;
        b.accumulate = a->accumulate;
        b.p = places_of(a->x, a->dx, a->w, a->each);
        b.p.of_dy = lg_row_stride(&dy, 2);
        if (rest) b.rest = (const T *)a->rest.data, b.of_rest = lg_row_stride(&a->rest, 2);
        b.rest_width = (int)rest;
        if (turns) b.cosine = (const float *)a->cos.data, b.sine = (const float *)a->sin.data;
        WITH_PACK(fits, T, N, (backward<T, N>(stream, way, b)));
    })
    add_all_sums(stream, a, way, rest, (const float *)s->scratch, biases);
}
