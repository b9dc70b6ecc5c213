/* GroupNorm with affine and activation over (N, H, W, C), in three launches, or two where a
 * convolution has summed (tile_conv.cu, picture_conv.cu) and mean and variance are given.
 *
 * 1. sums: a block takes 64 or 256 pixels of one sample. A thread keeps one pack of channels and
 *    walks the pixels; it sums d = x - k and d^2 with k the group's first element: the variance
 *    does not suffer from a mean far from 0.
 * 2. statistics: one block per (sample, group) adds the blocks' and channels' sums in double. The
 *    mean_var is mean and variance, the statistics mean and rstd.
 * 3. result: a thread keeps one pack of channels, whose factors and offsets it works out once, and
 *    walks the pixels. Divisions by C or a group's width inside of that walk would cost more than
 *    the memory.
 *
 * Scratch: per sample, block and channel two floats; then mean and rstd per sample and group. The
 * blocks of a sample depend on H W alone, so its bits do not depend on the batch. */
#include "kernels/cuda/group_norm.cuh"

/* grid (blocks, N, ceil(C / (columns packs))) */
template <typename T, int P> __global__ void sums_kernel(const T *x, float *sums, dims z, lay l)
{
    __shared__ float partial[2 * P][THREADS + 1];
    int row = threadIdx.x / l.columns, column = threadIdx.x % l.columns;
    int64_t n = blockIdx.y, c = ((int64_t)blockIdx.z * l.columns + column) * P;
    const T *sample = x + n * z.HW * z.C;
    float k[P], v[P], sum[P] = {}, squares[P] = {};
    int64_t last = ((int64_t)blockIdx.x + 1) * z.pixels;
    if (last > z.HW) last = z.HW;
    if (row < l.rows && c < z.C) {
#pragma unroll
        for (int e = 0; e < P; e++) k[e] = to_float(sample[((int)c + e) / z.wide * z.wide]);
#pragma unroll 4
        for (int64_t p = (int64_t)blockIdx.x * z.pixels + row; p < last; p += l.rows) {
            load<T, P>(sample + p * z.C + c, v);
#pragma unroll
            for (int e = 0; e < P; e++) {
                float d = v[e] - k[e];
                sum[e] += d;
                squares[e] += d * d;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < P; e++) {
        partial[2 * e][threadIdx.x] = sum[e];
        partial[2 * e + 1][threadIdx.x] = squares[e];
    }
    __syncthreads();
    float *out =
        sums + ((n * z.blocks + blockIdx.x) * z.C + (int64_t)blockIdx.z * l.columns * P) * 2;
    int64_t here =
        (z.C - (int64_t)blockIdx.z * l.columns * P) * 2; /* that there are from `out` on */
    for (int i = threadIdx.x; i < l.columns * 2 * P && i < here; i += THREADS) {
        float total = 0;
        for (int r = 0; r < l.rows; r++) total += partial[i % (2 * P)][r * l.columns + i / (2 * P)];
        out[i] = total;
    }
}

/* Where the results go: either may be NULL. */
struct results {
    double *mean_var;
    float *statistics;
    float eps;
};
static __device__ __forceinline__ void put(const results &to, int64_t group, double mean,
                                           double variance)
{
    if (!(variance > 0)) variance = 0;
    if (to.mean_var) {
        to.mean_var[group * 2] = mean;
        to.mean_var[group * 2 + 1] = variance;
    }
    if (to.statistics) {
        to.statistics[group * 2] = (float)mean;
        to.statistics[group * 2 + 1] = (float)(1 / sqrt(variance + (double)to.eps));
    }
}

/* grid (groups, N) */
template <typename T>
__global__ void statistics_kernel(const T *x, const float *sums, results to, dims z)
{
    int64_t n = blockIdx.y, c = (int64_t)blockIdx.x * z.wide;
    double sum = 0, squares = 0;
    for (int i = threadIdx.x; i < z.blocks * z.wide; i += ADDERS) {
        const float *at = sums + ((n * z.blocks + i / z.wide) * z.C + c + i % z.wide) * 2;
        sum += at[0];
        squares += at[1];
    }
    double count = (double)(z.HW * z.wide);
    double mean = block_sum<ADDERS>(sum) / count;
    double variance = block_sum<ADDERS>(squares) / count - mean * mean;
    if (threadIdx.x == 0)
        put(to, n * z.groups + blockIdx.x, mean + (double)to_float(x[n * z.HW * z.C + c]),
            variance);
}

/* From means and sums of squared distances over equal tiles; grid (groups, N). */
__global__ void tiles_kernel(const float2 *sums, results to, dims z, int tiles)
{
    int64_t n = blockIdx.y, pairs = z.C / 2;
    int wide = z.wide / 2, items = tiles * wide;
    const float2 *first = sums + n * tiles * pairs + (int64_t)blockIdx.x * wide;
    double k = first->x, mean = 0, squares = 0, inside = 0;
    for (int i = threadIdx.x; i < items; i += ADDERS) {
        float2 at = first[i / wide * pairs + i % wide];
        double d = at.x - k;
        mean += d;
        squares += d * d;
        inside += at.y;
    }
    mean = block_sum<ADDERS>(mean) / items;
    squares = block_sum<ADDERS>(squares) / items;
    inside = block_sum<ADDERS>(inside) / (double)(z.HW * z.wide);
    if (threadIdx.x == 0)
        put(to, n * z.groups + blockIdx.x, k + mean, inside + squares - mean * mean);
}

__global__ void given_kernel(const double *mean_var, results to, int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * ADDERS + threadIdx.x;
    if (i < count) put(to, i, mean_var[i * 2], mean_var[i * 2 + 1]);
}

/* For 16-bit types by the hardware's 2^x and 1/x, good to 2^-20. */
template <typename T> static __device__ __forceinline__ float act_for(lg_act act, float x)
{
    if (sizeof(T) == 2 && act == LG_ACT_SILU) return __fdividef(x, 1 + __expf(-x));
    return act_of(act, x);
}

/* grid (pixels / (rows WALK), N, ceil(C / (columns packs))) */
template <typename T, int P, lg_act ACT>
__global__ void result_kernel(const T *x, const T *w, const T *b, const float *statistics, T *y,
                              dims z, lay l)
{
    int row = threadIdx.x / l.columns, column = threadIdx.x % l.columns;
    int64_t n = blockIdx.y, c = ((int64_t)blockIdx.z * l.columns + column) * P;
    if (row >= l.rows || c >= z.C) return;
    float v[P], mean[P], factor[P], offset[P];
    load<T, P>(w + c, factor);
    load<T, P>(b + c, offset);
#pragma unroll
    for (int e = 0; e < P; e++) {
        const float *at = statistics + (n * z.groups + ((int)c + e) / z.wide) * 2;
        mean[e] = at[0];
        factor[e] *= at[1];
    }
    int64_t first = (int64_t)blockIdx.x * l.rows * WALK + row, step = l.rows * z.C;
    int64_t last = first + (int64_t)l.rows * WALK, at = (n * z.HW + first) * z.C + c;
    if (last > z.HW) last = z.HW;
    for (int64_t p = first; p < last; p += l.rows * STEPS, at += STEPS * step) {
        pack<T, P> raw[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (p + i * l.rows < last)
                raw[i] = *reinterpret_cast<const pack<T, P> *>(x + at + i * step);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (p + i * l.rows >= last) break;
#pragma unroll
            for (int e = 0; e < P; e++)
                v[e] = act_for<T>(ACT, (to_float(raw[i].v[e]) - mean[e]) * factor[e] + offset[e]);
            store<T, P>(y + at + i * step, v);
        }
    }
}

static size_t sums_bytes(const dims &z)
{
    return (size_t)(z.N * z.blocks * z.C) * 2 * sizeof(float);
}
size_t cuda_group_mean_var_scratch(const lg_tensor *x)
{
    return sums_bytes(dims_of(*x, 1));
}
size_t cuda_group_norm_scratch(const struct lg_group_norm_forward_args *a)
{
    dims z = dims_of(a->x, a->groups);
    size_t statistics = (size_t)(z.N * z.groups) * 2 * sizeof(float);
    return statistics + (a->mean_var.rank ? 0 : sums_bytes(z));
}

/* scratch: sums_bytes */
template <typename T, int P>
static void measure(cudaStream_t stream, const lg_tensor &t, const dims &z, float *sums, results to)
{
    lay l = lay_of(z, P);
    const T *x = (const T *)t.data;
    unsigned N = (unsigned)z.N, across = (unsigned)ceil_div(z.C, (int64_t)l.columns * P);
    sums_kernel<T, P><<<dim3((unsigned)z.blocks, N, across), THREADS, 0, stream>>>(x, sums, z, l);
    LG_CUDA_LAUNCHED();
    statistics_kernel<<<dim3((unsigned)z.groups, N), ADDERS, 0, stream>>>(x, sums, to, z);
    LG_CUDA_LAUNCHED();
}

void cuda_group_mean_var(lg_stream *s, lg_tensor x, lg_tensor mean_var)
{
    dims z = dims_of(x, mean_var.dim[1]);
    results to{(double *)mean_var.data, NULL, 0};
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(x.dtype, T,
              {WITH_PACK(lg_cuda_aligned_16(x.data) && x.dim[3] % PACK<T> == 0, T, P,
                         (measure<T, P>(stream, x, z, (float *)s->scratch, to)))})
}

void cuda_group_mean_var_forward(lg_stream *s, const struct lg_group_mean_var_forward_args *a)
{
    cuda_group_mean_var(s, a->x, a->mean_var);
}

void cuda_group_mean_var_of_sums(lg_stream *s, const float *sums, int64_t tiles, lg_tensor x,
                                 lg_tensor mean_var)
{
    dims z = dims_of(x, mean_var.dim[1]);
    results to{(double *)mean_var.data, NULL, 0};
    tiles_kernel<<<dim3((unsigned)z.groups, (unsigned)z.N), ADDERS, 0, lg_cuda_stream_of(s)>>>(
        (const float2 *)sums, to, z, (int)tiles);
    LG_CUDA_LAUNCHED();
}

template <typename T, int P>
static void run(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    dims z = dims_of(a->x, a->groups);
    lay l = lay_of(z, P);
    cudaStream_t stream = lg_cuda_stream_of(s);
    const T *x = (const T *)a->x.data, *w = (const T *)a->w.data, *b = (const T *)a->b.data;
    T *y = (T *)a->y.data;
    float *statistics = (float *)s->scratch, *sums = statistics + z.N * z.groups * 2;
    results to{NULL, statistics, (float)a->eps};
    int64_t count = z.N * z.groups;
    if (a->mean_var.data)
        given_kernel<<<(unsigned)ceil_div(count, ADDERS), ADDERS, 0, stream>>>(
            (const double *)a->mean_var.data, to, count);
    else
        measure<T, P>(stream, a->x, z, sums, to);
    LG_CUDA_LAUNCHED();
    unsigned N = (unsigned)z.N, across = (unsigned)ceil_div(z.C, (int64_t)l.columns * P);
    dim3 grid((unsigned)ceil_div(z.HW, (int64_t)l.rows * WALK), N, across);
#define RESULT(ACT)                                                                                \
    case ACT:                                                                                      \
        result_kernel<T, P, ACT><<<grid, THREADS, 0, stream>>>(x, w, b, statistics, y, z, l);      \
        break;
    switch (a->act) {
        RESULT(LG_ACT_NONE)
        RESULT(LG_ACT_SILU)
        RESULT(LG_ACT_GELU_TANH)
        RESULT(LG_ACT_RELU)
        RESULT(LG_ACT_GELU_ERF)
        RESULT(LG_ACT_QUICK_GELU)
    case LG_ACT_COUNT:
        break;
    }
#undef RESULT
    LG_CUDA_LAUNCHED();
}

void cuda_group_norm_forward(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data) &&
                   lg_cuda_aligned_16(a->w.data) && lg_cuda_aligned_16(a->b.data);
    WITH_TYPE(a->x.dtype, T,
              {WITH_PACK(aligned && a->x.dim[3] % PACK<T> == 0, T, P, (run<T, P>(s, a)))})
}

/* count: N C */
template <typename T>
__global__ void factors_kernel(const double *mean_var, const T *w, const T *b, float *factors,
                               dims z, double eps, int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * ADDERS + threadIdx.x;
    if (i >= count) return;
    int64_t n = i / z.C, c = i % z.C;
    const double *at = mean_var + (n * z.groups + c / z.wide) * 2;
    double factor = (double)to_float(w[c]) / sqrt(at[1] + eps);
    factors[n * 2 * z.C + c] = (float)factor;
    factors[(n * 2 + 1) * z.C + c] = (float)((double)to_float(b[c]) - at[0] * factor);
}

void cuda_norm_factors(lg_stream *s, const struct lg_group_norm_forward_args *a, lg_tensor mean_var,
                       float *factors)
{
    dims z = dims_of(a->x, a->groups);
    int64_t count = z.N * z.C;
    cudaStream_t stream = lg_cuda_stream_of(s);
    WITH_TYPE(a->x.dtype, T,
              (factors_kernel<T><<<(unsigned)ceil_div(count, ADDERS), ADDERS, 0, stream>>>(
                  (const double *)mean_var.data, (const T *)a->w.data, (const T *)a->b.data,
                  factors, z, a->eps, count)))
    LG_CUDA_LAUNCHED();
}
