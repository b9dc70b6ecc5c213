/* The diffusion process, the loss, and what an optimizer step is made of.
 *
 * diffuse: one thread per element, normals in double as on the other backends (the libraries' log, sin
 * and cos may differ in the last bit of a double, seldom one of an fp32).
 * mse_loss, learned_range_loss: one block per sample. reduce_ranks: one block per piece. adamw, ema: one thread per four elements.
 * adamw8: one warp per block of the moments. */
#include "base/philox.h"
#include "kernels/adamw8.h"
#include "kernels/cuda/common.cuh"
#include <math.h>

enum { THREADS = 256 };

/* ---- Philox4x32-10, as base/philox.c ---- */

__device__ __forceinline__ void philox(uint64_t seed, int purpose, uint64_t n, uint64_t block,
                                       uint32_t (&ret)[4])
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)n,
             c3 = (uint32_t)(n >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32) ^ (uint32_t)purpose * 0x9E3779B9u;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    ret[0] = c0, ret[1] = c1, ret[2] = c2, ret[3] = c3;
}
/* Standard normal number e of the stream (seed, purpose, n). */
__device__ double philox_normal(uint64_t seed, int purpose, uint64_t n, uint64_t e)
{
    uint32_t w[4];
    philox(seed, purpose, n, e / 4, w);
    bool second = e % 4 >= 2;
    double u = ((double)(second ? w[2] : w[0]) + 0.5) * 0x1p-32;
    double v = ((double)(second ? w[3] : w[1]) + 0.5) * 0x1p-32;
    double r = sqrt(-2.0 * log(u)), t = 6.283185307179586476925 * v;
    return e % 2 ? r * sin(t) : r * cos(t);
}

struct diffusion {
    const int64_t *n;
    uint64_t seed;
    double scaling_factor, shift_factor;
    int64_t per_sample, count;
};
template <typename T, typename W>
__global__ void diffuse_kernel(const T *mean, const T *logvar, const W *coef, T *x_t, T *target,
                               diffusion d)
{
    int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (e >= d.count) return;
    int64_t b = e / d.per_sample, i = e % d.per_sample;
    uint64_t n = (uint64_t)d.n[b];
    double z = philox_normal(d.seed, LG_PURPOSE_LATENT, n, (uint64_t)i);
    double noise = philox_normal(d.seed, LG_PURPOSE_NOISE, n, (uint64_t)i);
    double v = to_float(logvar[e]);
    v = v < -30 ? -30 : v > 20 ? 20 : v;
    double x0 = ((double)to_float(mean[e]) + exp(v / 2) * z - d.shift_factor) * d.scaling_factor;
    const W *c = coef + b * 4;
    x_t[e] = from_float<T>((float)((double)to_float(c[0]) * x0 + (double)to_float(c[1]) * noise));
    target[e] =
        from_float<T>((float)((double)to_float(c[2]) * x0 + (double)to_float(c[3]) * noise));
}
void cuda_diffuse_forward(lg_stream *s, const struct lg_diffuse_forward_args *a)
{
    int64_t count = lg_numel(&a->mean);
    diffusion d = {(const int64_t *)a->n.data, a->seed, a->scaling_factor, a->shift_factor,
                   count / a->mean.dim[0],     count};
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPES(a->mean.dtype, a->coef.dtype, T, W,
               (diffuse_kernel<<<(unsigned)ceil_div(count, THREADS), THREADS, 0, stream>>>(
                   (const T *)a->mean.data, (const T *)a->logvar.data, (const W *)a->coef.data,
                   (T *)a->x_t.data, (T *)a->target.data, d)))
    LG_CUDA_LAUNCHED();
}

/* ---- losses: a block has a sample, and as many threads as may be, for a clip's may be long ---- */

enum {
    LOSS_THREADS = 1024,
    RANGE_THREADS = 512,
    AT_ONCE = 4 /* packs of a thread that are read together */
};
template <typename T, typename W, int N>
static __global__ void __launch_bounds__(LOSS_THREADS)
    mse_kernel(const T *pred, const T *target, const W *weight, W *loss, T *dpred, int64_t size)
{
    const int64_t b = blockIdx.x;
    const float w = to_float(weight[b]), slope = w * 2 / (float)size;
    float sum = 0;
    pred += b * size, target += b * size;
    if (dpred) dpred += b * size;
    for (int64_t i = threadIdx.x * N; i < size; i += LOSS_THREADS * N * AT_ONCE) {
        float error[AT_ONCE][N] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t at = i + k * LOSS_THREADS * N;
            float v[N];
            if (w == 0 || at >= size) continue;
            load<T, N>(pred + at, error[k]);
            load<T, N>(target + at, v);
#pragma unroll
            for (int e = 0; e < N; e++) error[k][e] -= v[e];
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t at = i + k * LOSS_THREADS * N;
            if (at >= size) break;
#pragma unroll
            for (int e = 0; e < N; e++) {
                sum += error[k][e] * error[k][e];
                error[k][e] *= slope;
            }
            if (dpred) store<T, N>(dpred + at, error[k]);
        }
    }
    sum = block_sum<LOSS_THREADS>(sum);
    if (threadIdx.x == 0) loss[b] = from_float<W>(sum / (float)size);
}
void cuda_mse_loss(lg_stream *s, const struct lg_mse_loss_args *a)
{
    LG_ASSERT(a->weight.dtype == a->loss.dtype);
    const int64_t B = a->target.dim[0], size = lg_numel(&a->target) / B;
    const bool aligned = lg_cuda_aligned_16(a->pred.data) && lg_cuda_aligned_16(a->target.data) &&
                         lg_cuda_aligned_16(a->dpred.data);
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPES(a->pred.dtype, a->loss.dtype, T, W,
               {WITH_PACK(aligned && size % PACK<T> == 0, T, N, {
                   mse_kernel<T, W, N><<<(unsigned)B, LOSS_THREADS, 0, stream>>>(
                       (const T *)a->pred.data, (const T *)a->target.data,
                       (const W *)a->weight.data, (W *)a->loss.data, (T *)a->dpred.data, size);
               })})
    LG_CUDA_LAUNCHED();
}

/* ---- a learned variance ---- */

/* What an element adds to the loss, in nats, and its slope in L. */
struct vb {
    float loss, slope;
};

__device__ vb vb_between(float l, float L, float deviation)
{
    float ratio = expf(l - L), square = deviation * deviation * expf(-L);
    return {0.5f * (L - l - 1 + ratio + square), 0.5f * (1 - ratio - square)};
}

__device__ double normal_cdf(double x, double *ret_slope)
{
    const double root = 0.79788456080286535588;
    double t = tanh(root * (x + 0.044715 * x * x * x));
    *ret_slope = 0.5 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
    return 0.5 * (1 + t);
}
/* In double: the bin's probability is a difference. One sample in a thousand comes here. */
__device__ vb vb_first(float x0, float L, float deviation)
{
    const double half = 1.0 / 255, least = 1e-12, scale = exp(-0.5 * (double)L);
    const float open = 0.999f;
    double from = scale * (deviation - half), to = scale * (deviation + half);
    double slope_from, slope_to, below = normal_cdf(from, &slope_from);
    double above = normal_cdf(to, &slope_to);
    if (x0 < -open) below = slope_from = 0;
    if (x0 > open) above = 1, slope_to = 0;
    double p = above - below;
    if (p <= least) return {(float)-log(least), 0}; /* NaN stays */
    return {(float)-log(p), (float)((slope_to * to - slope_from * from) / (2 * p))};
}

template <typename T, typename W> struct learned_range {
    const T *pred, *target, *x_t;
    const W *terms, *weight;
    W *loss;
    T *dpred;
    int64_t size; /* of a sample's noise */
};
/* A thread reads both halves of its elements before it writes them: dpred may lie on pred. */
template <typename T, typename W>
static __global__ void __launch_bounds__(RANGE_THREADS)
    learned_range_kernel(const learned_range<T, W> a)
{
    int64_t b = blockIdx.x;
    float term[6], weight[2], sum[2] = {};
    for (int k = 0; k < 6; k++) term[k] = to_float(a.terms[6 * b + k]);
    for (int k = 0; k < 2; k++) weight[k] = to_float(a.weight[2 * b + k]);
    const float half = 0.5f * (term[1] - term[0]), ln2 = 0.69314718f;
    for (int64_t i = threadIdx.x; i < a.size; i += RANGE_THREADS) {
        int64_t at = 2 * b * a.size + i, e = b * a.size + i;
        float noise = to_float(a.target[e]), error = to_float(a.pred[at]) - noise;
        float L = term[0] + half * (to_float(a.pred[at + a.size]) + 1);
        float x0 = term[3] * to_float(a.x_t[e]) + term[4] * noise;
        vb v = term[5] > 0 ? vb_first(x0, L, term[2] * error)
                           : vb_between(term[0], L, term[2] * error);
        if (weight[0] != 0) sum[0] += error * error;
        if (weight[1] != 0) sum[1] += v.loss;
        if (!a.dpred) continue;
        a.dpred[at] = from_float<T>(weight[0] == 0 ? 0 : weight[0] * 2 * error / (float)a.size);
        a.dpred[at + a.size] =
            from_float<T>(weight[1] == 0 ? 0 : weight[1] * half * v.slope / (ln2 * (float)a.size));
    }
    for (int k = 0; k < 2; k++) {
        sum[k] = block_sum<RANGE_THREADS>(sum[k]);
        if (threadIdx.x == 0)
            a.loss[2 * b + k] = from_float<W>(sum[k] / ((k ? ln2 : 1) * (float)a.size));
    }
}
void cuda_learned_range_loss(lg_stream *s, const struct lg_learned_range_loss_args *a)
{
    LG_ASSERT(a->weight.dtype == a->loss.dtype && a->terms.dtype == a->loss.dtype);
    int64_t B = a->target.dim[0];
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPES(a->pred.dtype, a->loss.dtype, T, W, {
        learned_range<T, W> k = {(const T *)a->pred.data,   (const T *)a->target.data,
                                 (const T *)a->x_t.data,    (const W *)a->terms.data,
                                 (const W *)a->weight.data, (W *)a->loss.data,
                                 (T *)a->dpred.data,        lg_numel(&a->target) / B};
        learned_range_kernel<T, W><<<(unsigned)B, RANGE_THREADS, 0, stream>>>(k);
    })
    LG_CUDA_LAUNCHED();
}

/* ---- reduction over ranks ---- */

template <typename T> struct rank_inputs {
    const T *x[LG_RANKS_MAX];
    int count;
};
/* A thread's elements are all under way before the first is used. */
template <typename T, typename W>
__global__ void reduce_ranks_kernel(rank_inputs<T> in, W *y, double *squares, int64_t n, bool write)
{
    enum { EACH = LG_SQUARES_PIECE / THREADS };
    int64_t first = (int64_t)blockIdx.x * LG_SQUARES_PIECE + threadIdx.x;
    float v[EACH] = {};
    double sum = 0;
    for (int r = 0; r < in.count; r++) {
        float x[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++)
            x[k] = first + k * THREADS < n ? to_float(in.x[r][first + k * THREADS]) : 0;
#pragma unroll
        for (int k = 0; k < EACH; k++) v[k] = r ? v[k] + x[k] : x[k];
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        W out = from_float<W>(v[k]);
        if (write && first + k * THREADS < n) y[first + k * THREADS] = out;
        sum += (double)to_float(out) * (double)to_float(out);
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
void cuda_reduce_ranks(lg_stream *s, const struct lg_reduce_ranks_args *a)
{
    int64_t n = a->y.dim[0], blocks = ceil_div(n, LG_SQUARES_PIECE);
    double *squares = (double *)a->squares.data;
    cudaStream_t stream = lg_cuda_stream_of(s);
    bool write = a->count > 1 || a->y.data != a->x[0].data; /* else the sum is there already */
#define RANKS(T, W)                                                                                \
    do {                                                                                           \
        rank_inputs<T> in = {{}, a->count};                                                        \
        for (int r = 0; r < a->count; r++) in.x[r] = (const T *)a->x[r].data;                      \
        reduce_ranks_kernel<T, W>                                                                  \
            <<<(unsigned)blocks, THREADS, 0, stream>>>(in, (W *)a->y.data, squares, n, write);     \
    } while (0)
    if (a->x[0].dtype == LG_F32) {
        WITH_TYPE(a->y.dtype, W, RANKS(float, W))
    } else {
        WITH_TYPES(a->x[0].dtype, a->y.dtype, T, W, RANKS(T, W))
    }
#undef RANKS
    LG_CUDA_LAUNCHED();
}

/* ---- optimizer ---- */

struct adamw_constants {
    float keep, lr, beta1, rest1, beta2, rest2, eps, grad_scale, correct1, root2;
};
/* Where the working weights go: this GPU and, over NVLink, those of the other ranks. */
template <typename T> struct adamw_copies {
    T *to[LG_RANKS_MAX];
    int count;
};
template <typename T, int N>
__global__ void adamw_kernel(const float *w, const float *m, const float *v, const float *grad,
                             float *w_out, float *m_out, float *v_out,
                             const __grid_constant__ adamw_copies<T> working, adamw_constants c,
                             int64_t packs)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= packs) return;
    float wi[N], mi[N], vi[N], gi[N];
    load<float, N>(w + i * N, wi);
    load<float, N>(m + i * N, mi);
    load<float, N>(v + i * N, vi);
    load<float, N>(grad + i * N, gi);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float g = c.grad_scale * gi[e];
        mi[e] = c.beta1 * mi[e] + c.rest1 * g;
        vi[e] = c.beta2 * vi[e] + c.rest2 * g * g;
        wi[e] = wi[e] * c.keep - c.lr * (mi[e] / c.correct1) / (sqrtf(vi[e]) / c.root2 + c.eps);
    }
    store<float, N>(w_out + i * N, wi);
    store<float, N>(m_out + i * N, mi);
    store<float, N>(v_out + i * N, vi);
    for (int k = 0; k < working.count; k++) store<T, N>(working.to[k] + i * N, wi);
}
static bool all_fit(int64_t n, const void *const *p, int count)
{
    bool fits = n % PACK<float> == 0;
    for (int i = 0; i < count; i++) fits = fits && lg_cuda_aligned_16(p[i]);
    return fits;
}
template <typename T>
static void adamw(cudaStream_t stream, const struct lg_adamw_args *a, const adamw_constants &c)
{
    int64_t n = a->w.dim[0];
    const void *p[] = {a->w.data,     a->m.data,     a->v.data,    a->grad.data,
                       a->w_out.data, a->m_out.data, a->v_out.data};
    bool fits = all_fit(n, p, 7);
    adamw_copies<T> working = {.count = a->copies};
    for (int k = 0; k < a->copies; k++) {
        working.to[k] = (T *)a->working[k].data;
        fits = fits && lg_cuda_aligned_16(working.to[k]);
    }
    WITH_PACK(fits, float, N,
              (adamw_kernel<T, N><<<(unsigned)ceil_div(n / N, THREADS), THREADS, 0, stream>>>(
                  (const float *)a->w.data, (const float *)a->m.data, (const float *)a->v.data,
                  (const float *)a->grad.data, (float *)a->w_out.data, (float *)a->m_out.data,
                  (float *)a->v_out.data, working, c, n / N)))
    LG_CUDA_LAUNCHED();
}
void cuda_adamw(lg_stream *s, const struct lg_adamw_args *a)
{
    adamw_constants c = {(float)(1 - a->lr * a->weight_decay),
                         (float)a->lr,
                         (float)a->beta1,
                         (float)(1 - a->beta1),
                         (float)a->beta2,
                         (float)(1 - a->beta2),
                         (float)a->eps,
                         (float)a->grad_scale,
                         (float)(1 - pow(a->beta1, (double)a->t)),
                         (float)sqrt(1 - pow(a->beta2, (double)a->t))};
    lg_dtype type = a->copies ? a->working[0].dtype : LG_F32;
    WITH_TYPE(type, T, adamw<T>(lg_cuda_stream_of(s), a, c));
}

/* A warp has a block of 256, each lane every 32nd element. */
struct adamw8_map {
    float value[LG_ADAMW8_CODES];
};
struct adamw8_call {
    const float *w, *grad, *m_max, *v_max;
    const uint8_t *m, *v;
    float *w_out, *m_max_out, *v_max_out;
    uint8_t *m_out, *v_out;
    adamw8_map m_map, v_map;
    float keep, step, beta1, rest1, beta2, rest2, eps, grad_scale;
    int64_t n;
};
/* As lg_adamw8_encode: how many bounds, the middles of neighbours, lie below x. */
__device__ __forceinline__ int adamw8_code(const float *map, float x)
{
    int code = 0;
#pragma unroll
    for (int step = LG_ADAMW8_CODES / 2; step; step /= 2)
        if (x > (map[code + step - 1] + map[code + step]) * 0.5f) code += step;
    return code;
}
__device__ __forceinline__ float warp_most(float x)
{
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
template <typename T>
__global__ void adamw8_kernel(const __grid_constant__ adamw8_call c,
                              const __grid_constant__ adamw_copies<T> working)
{
    enum { EACH = LG_ADAMW8_BLOCK / 32 };
    __shared__ float m_map[LG_ADAMW8_CODES], v_map[LG_ADAMW8_CODES];
    for (int i = threadIdx.x; i < LG_ADAMW8_CODES; i += THREADS) {
        m_map[i] = c.m_map.value[i];
        v_map[i] = c.v_map.value[i];
    }
    __syncthreads();
    const int64_t block = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int64_t first = block * LG_ADAMW8_BLOCK + threadIdx.x % 32;
    if (block * LG_ADAMW8_BLOCK >= c.n) return;
    float m[EACH], v[EACH], m_most = 0, v_most = 0;
    const float m_unit = c.m_max[block], v_unit = c.v_max[block];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int64_t i = first + e * 32;
        m[e] = v[e] = 0;
        if (i >= c.n) continue;
        const float g = c.grad_scale * c.grad[i];
        float w = c.w[i];
        if (isfinite(g)) {
            m[e] = c.beta1 * (m_map[c.m[i]] * m_unit) + c.rest1 * g;
            v[e] = c.beta2 * (v_map[c.v[i]] * v_unit) + c.rest2 * g * g;
            w = (w - c.step * m[e] / (sqrtf(v[e]) + c.eps)) * c.keep;
        }
        m_most = fmaxf(m_most, fabsf(m[e]));
        v_most = fmaxf(v_most, v[e]);
        c.w_out[i] = w;
        for (int k = 0; k < working.count; k++) working.to[k][i] = from_float<T>(w);
    }
    m_most = warp_most(m_most);
    v_most = warp_most(v_most);
    if (threadIdx.x % 32 == 0) {
        c.m_max_out[block] = m_most;
        c.v_max_out[block] = v_most;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int64_t i = first + e * 32;
        if (i >= c.n) continue;
        const float x = m_most > 0 ? m[e] / m_most : 0;
        const int code = adamw8_code(m_map, x);
        c.m_out[i] = (uint8_t)(code - (x < 0 && code == LG_ADAMW8_ZERO_M)); /* keeps its sign */
        c.v_out[i] = (uint8_t)adamw8_code(v_map, v_most > 0 ? v[e] / v_most : 0);
    }
}
static adamw8_map adamw8_map_of(bool is_signed)
{
    struct lg_adamw8_map map;
    adamw8_map ret;
    lg_adamw8_map_f32(is_signed, &map);
    memcpy(ret.value, map.value, sizeof ret.value);
    return ret;
}
template <typename T>
static void adamw8(cudaStream_t stream, const struct lg_adamw8_args *a, const adamw8_call &c)
{
    adamw_copies<T> working = {.count = a->copies};
    for (int k = 0; k < a->copies; k++) working.to[k] = (T *)a->working[k].data;
    const int64_t blocks = ceil_div(c.n, LG_ADAMW8_BLOCK);
    adamw8_kernel<T><<<(unsigned)ceil_div(blocks, THREADS / 32), THREADS, 0, stream>>>(c, working);
    LG_CUDA_LAUNCHED();
}
void cuda_adamw8(lg_stream *s, const struct lg_adamw8_args *a)
{
    const double c1 = 1 - pow(a->beta1, (double)a->t), c2 = sqrt(1 - pow(a->beta2, (double)a->t));
    const adamw8_call c = {(const float *)a->w.data,     (const float *)a->grad.data,
                           (const float *)a->m_max.data, (const float *)a->v_max.data,
                           (const uint8_t *)a->m.data,   (const uint8_t *)a->v.data,
                           (float *)a->w_out.data,       (float *)a->m_max_out.data,
                           (float *)a->v_max_out.data,   (uint8_t *)a->m_out.data,
                           (uint8_t *)a->v_out.data,     adamw8_map_of(true),
                           adamw8_map_of(false),         (float)(1 - a->lr * a->weight_decay),
                           (float)(a->lr * c2 / c1),     (float)a->beta1,
                           (float)(1 - a->beta1),        (float)a->beta2,
                           (float)(1 - a->beta2),        (float)(c2 * a->eps),
                           (float)a->grad_scale,         a->w.dim[0]};
    lg_dtype type = a->copies ? a->working[0].dtype : LG_F32;
    WITH_TYPE(type, T, adamw8<T>(lg_cuda_stream_of(s), a, c));
}

template <int N>
__global__ void ema_kernel(const float *ema, const float *w, float *out, float decay, float rest,
                           int64_t packs)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= packs) return;
    float x[N], y[N];
    load<float, N>(ema + i * N, x);
    load<float, N>(w + i * N, y);
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = decay * x[e] + rest * y[e];
    store<float, N>(out + i * N, x);
}
void cuda_ema(lg_stream *s, const struct lg_ema_args *a)
{
    int64_t n = a->ema.dim[0];
    const void *p[] = {a->ema.data, a->w.data, a->out.data};
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_PACK(all_fit(n, p, 3), float, N,
              (ema_kernel<N><<<(unsigned)ceil_div(n / N, THREADS), THREADS, 0, stream>>>(
                  (const float *)a->ema.data, (const float *)a->w.data, (float *)a->out.data,
                  (float)a->decay, (float)(1 - a->decay), n / N)))
    LG_CUDA_LAUNCHED();
}
