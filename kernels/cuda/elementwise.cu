/* Elementwise operations: y[i] = f(x0[i], x1[i], ...). One thread handles a pack of 16 bytes; where a
 * pointer is not on 16 bytes or the count not a multiple of a pack, one element. Outputs may alias
 * inputs: a thread has read its pack before it writes it. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256 };

template <typename T, int IN> struct inputs {
    const T *x[IN];
};

template <typename T, int N, int IN, typename F>
__global__ void map_kernel(inputs<T, IN> in, T *y, int64_t packs, F f)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    float x[IN][N], out[N];
#pragma unroll
    for (int j = 0; j < IN; j++) load<T, N>(in.x[j] + i * N, x[j]);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float v[IN];
#pragma unroll
        for (int j = 0; j < IN; j++) v[j] = x[j][e];
        out[e] = f(v);
    }
    store<T, N>(y + i * N, out);
}

template <typename T, int IN, typename F>
static void map(lg_stream *s, const lg_tensor *const (&x)[IN], const lg_tensor *y, F f)
{
    inputs<T, IN> in;
    int64_t count = lg_numel(y);
    bool fits = count % PACK<T> == 0 && lg_cuda_aligned_16(y->data);
    for (int j = 0; j < IN; j++) {
        in.x[j] = (const T *)x[j]->data;
        fits = fits && lg_cuda_aligned_16(x[j]->data);
    }
    WITH_PACK(fits, T, N, {
        unsigned blocks = (unsigned)ceil_div(count / N, THREADS);
        map_kernel<T, N, IN>
            <<<blocks, THREADS, 0, lg_cuda_stream_of(s)>>>(in, (T *)y->data, count / N, f);
    })
    LG_CUDA_LAUNCHED();
}

struct act_forward {
    lg_act act;
    __device__ float operator()(const float (&x)[1]) const { return act_of(act, x[0]); }
};
void cuda_act_forward(lg_stream *s, const struct lg_act_forward_args *a)
{
    WITH_TYPE(a->x.dtype, T, map<T, 1>(s, {&a->x}, &a->y, act_forward{a->act}))
}

struct act_backward {
    lg_act act;
    __device__ float operator()(const float (&x)[2]) const { return x[1] * act_slope(act, x[0]); }
    __device__ float operator()(const float (&x)[3]) const
    {
        return x[2] + x[1] * act_slope(act, x[0]);
    }
};
void cuda_act_backward(lg_stream *s, const struct lg_act_backward_args *a)
{
    act_backward f{a->act};
    if (a->accumulate) {
        WITH_TYPE(a->x.dtype, T, map<T, 3>(s, {&a->x, &a->dy, &a->dx}, &a->dx, f))
    } else {
        WITH_TYPE(a->x.dtype, T, map<T, 2>(s, {&a->x, &a->dy}, &a->dx, f))
    }
}

/* ---- gated linear units ---- */

/* act and its slope; for 16-bit types GELU by erf alone, whose digits are lost only where the result is nearly 0, and
 * SiLU by the hardware's 2^x and 1/x. */
template <typename T> __device__ __forceinline__ float2 act_and_slope(lg_act act, float x)
{
    if (sizeof(T) == 2 && act == LG_ACT_GELU_ERF) {
        float below = 0.5f + 0.5f * erff(x * 0.70710678118654752440f);
        return make_float2(x * below, below + x * SQRT_1_2PI * __expf(-0.5f * x * x));
    }
    if (sizeof(T) == 2 && act == LG_ACT_SILU) {
        float sigmoid = __fdividef(1, 1 + __expf(-x));
        return make_float2(x * sigmoid, sigmoid * (1 + x * (1 - sigmoid)));
    }
    return make_float2(act_of(act, x), act_slope<T>(act, x));
}

/* A pack of a and of g a thread. dy, dx: NULL in the forward, which writes y. D: of a row, in packs. */
template <typename T, int N, bool BACKWARD>
__global__ void glu_kernel(const T *x, const T *dy, T *to, int64_t packs, int64_t D, lg_act act)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, at = (i / D * 2 * D + i % D) * N;
    if (i >= packs) return;
    float a[N], g[N], d[N];
    load<T, N>(x + at, a);
    load<T, N>(x + at + D * N, g);
    if (BACKWARD) load<T, N>(dy + i * N, d);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float2 f = act_and_slope<T>(act, g[e]);
        if (BACKWARD) g[e] = d[e] * a[e] * f.y;
        a[e] = (BACKWARD ? d[e] : a[e]) * f.x;
    }
    store<T, N>(to + (BACKWARD ? at : i * N), a);
    if (BACKWARD) store<T, N>(to + at + D * N, g);
}
template <bool BACKWARD>
static void glu(lg_stream *s, const lg_tensor *x, const lg_tensor *dy, const lg_tensor *to,
                lg_act act)
{
    int64_t D = x->dim[1] / 2, count = x->dim[0] * D;
    bool aligned = lg_cuda_aligned_16(x->data) && lg_cuda_aligned_16(to->data) &&
                   (!BACKWARD || lg_cuda_aligned_16(dy->data));
    WITH_TYPE(x->dtype, T, {WITH_PACK(aligned && D % PACK<T> == 0, T, N, {
                  unsigned blocks = (unsigned)ceil_div(count / N, THREADS);
                  glu_kernel<T, N, BACKWARD><<<blocks, THREADS, 0, lg_cuda_stream_of(s)>>>(
                      (const T *)x->data, (const T *)(BACKWARD ? dy->data : nullptr), (T *)to->data,
                      count / N, D / N, act);
              })})
    LG_CUDA_LAUNCHED();
}
void cuda_glu_forward(lg_stream *s, const struct lg_glu_forward_args *a)
{
    glu<false>(s, &a->x, nullptr, &a->y, a->act);
}
void cuda_glu_backward(lg_stream *s, const struct lg_glu_backward_args *a)
{
    glu<true>(s, &a->x, &a->dy, &a->dx, a->act);
}

struct multiply {
    __device__ float operator()(const float (&x)[2]) const { return x[0] * x[1]; }
};
void cuda_mul_forward(lg_stream *s, const struct lg_mul_forward_args *a)
{
    WITH_TYPE(a->a.dtype, T, map<T, 2>(s, {&a->a, &a->b}, &a->y, multiply{}))
}

template <int IN> struct weighted_sum {
    float c[IN];
    __device__ float operator()(const float (&x)[IN]) const
    {
        float sum = c[0] * x[0];
#pragma unroll
        for (int j = 1; j < IN; j++) sum += c[j] * x[j];
        return sum;
    }
};
template <int IN> static void combine(lg_stream *s, const struct lg_combine_args *a)
{
    const lg_tensor *x[IN];
    weighted_sum<IN> f;
    for (int j = 0; j < IN; j++) {
        x[j] = &a->x[j];
        f.c[j] = (float)a->c[j];
    }
    WITH_TYPE(a->y.dtype, T, map<T, IN>(s, x, &a->y, f))
}
void cuda_combine(lg_stream *s, const struct lg_combine_args *a)
{
    switch (a->count) {
    case 1:
        return combine<1>(s, a);
    case 2:
        return combine<2>(s, a);
    case 3:
        return combine<3>(s, a);
    default:
        return combine<4>(s, a);
    }
}

/* b repeats every `period` packs. */
template <typename T, int N>
__global__ void add_kernel(const T *a, const T *b, T *y, int64_t packs, int64_t period)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    float u[N], v[N];
    load<T, N>(a + i * N, u);
    load<T, N>(b + i % period * N, v);
#pragma unroll
    for (int e = 0; e < N; e++) u[e] += v[e];
    store<T, N>(y + i * N, u);
}
void cuda_add_forward(lg_stream *s, const struct lg_add_forward_args *a)
{
    int64_t count = lg_numel(&a->a), period = lg_numel(&a->b);
    bool aligned = lg_cuda_aligned_16(a->a.data) && lg_cuda_aligned_16(a->b.data) &&
                   lg_cuda_aligned_16(a->y.data);
    WITH_TYPE(a->a.dtype, T, {WITH_PACK(aligned && period % PACK<T> == 0, T, N, {
                  unsigned blocks = (unsigned)ceil_div(count / N, THREADS);
                  add_kernel<T, N><<<blocks, THREADS, 0, lg_cuda_stream_of(s)>>>(
                      (const T *)a->a.data, (const T *)a->b.data, (T *)a->y.data, count / N,
                      period / N);
              })})
    LG_CUDA_LAUNCHED();
}

/* ---- conversions: exact to double, rounded once ---- */

__device__ __forceinline__ double widen(double x)
{
    return x;
}
template <typename T> __device__ __forceinline__ float widen(T x)
{
    return to_float(x);
}
template <typename T, typename F> __device__ __forceinline__ T narrow(F x);
template <> __device__ __forceinline__ double narrow<double>(double x)
{
    return x;
}
template <> __device__ __forceinline__ double narrow<double>(float x)
{
    return x;
}
template <> __device__ __forceinline__ float narrow<float>(double x)
{
    return (float)x;
}
template <> __device__ __forceinline__ bf16 narrow<bf16>(double x)
{
    return __double2bfloat16(x);
}
template <> __device__ __forceinline__ fp16 narrow<fp16>(double x)
{
    return __double2half(x);
}
template <> __device__ __forceinline__ float narrow<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ fp16 narrow<fp16>(float x)
{
    return __float2half_rn(x);
}

/* N elements a thread, 16 bytes or more of either side; the last thread may have fewer. */
template <typename X, typename Y, int N>
__global__ void cast_kernel(const X *x, Y *y, int64_t count)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i + N > count) {
        for (; i < count; i++) y[i] = narrow<Y>(widen(x[i]));
        return;
    }
    struct alignas(N > 1 ? 16 : sizeof(X)) from {
        X v[N];
    } in = *reinterpret_cast<const from *>(x + i);
    struct alignas(N > 1 ? 16 : sizeof(Y)) to {
        Y v[N];
    } out;
#pragma unroll
    for (int e = 0; e < N; e++) out.v[e] = narrow<Y>(widen(in.v[e]));
    *reinterpret_cast<to *>(y + i) = out;
}
template <typename X, typename Y> static void cast(lg_stream *s, const struct lg_cast_args *a)
{
    int64_t count = lg_numel(&a->x);
    cudaStream_t stream = lg_cuda_stream_of(s);
    const X *x = (const X *)a->x.data;
    Y *y = (Y *)a->y.data;
    if (lg_cuda_aligned_16(x) && lg_cuda_aligned_16(y))
        cast_kernel<X, Y, 8>
            <<<(unsigned)ceil_div(count, THREADS * 8), THREADS, 0, stream>>>(x, y, count);
    else
        cast_kernel<X, Y, 1>
            <<<(unsigned)ceil_div(count, THREADS), THREADS, 0, stream>>>(x, y, count);
    LG_CUDA_LAUNCHED();
}
template <typename X> static void cast_from(lg_stream *s, const struct lg_cast_args *a)
{
    if (a->y.dtype == LG_F64) return cast<X, double>(s, a);
    WITH_TYPE(a->y.dtype, Y, (cast<X, Y>(s, a)))
}
void cuda_cast(lg_stream *s, const struct lg_cast_args *a)
{
    if (a->x.dtype == LG_F64) return cast_from<double>(s, a);
    WITH_TYPE(a->x.dtype, X, cast_from<X>(s, a))
}

/* ---- matrices of 8 bits ---- */

/* E4M3 has the bits of an fp16 that is 2^8 times smaller, but for the last mantissa bits, denormals included. */
template <lg_rows8 FORMAT> __device__ __forceinline__ float value_of(uint8_t code)
{
    if (FORMAT == LG_ROWS8_INT8) return (float)(int8_t)code;
    if ((code & 0x7f) == 0x7f) return NAN;
    unsigned short half = (unsigned short)((code & 0x80) << 8 | (code & 0x7f) << 7);
    return __half2float(__ushort_as_half(half)) * 256;
}

/* N elements of one row a thread; columns is a multiple of N. */
template <lg_rows8 FORMAT, typename T, int N>
__global__ void dequantize_kernel(const uint8_t *codes, const float *scale, T *w, int64_t columns,
                                  int64_t count)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    const pack<uint8_t, N> in = *reinterpret_cast<const pack<uint8_t, N> *>(codes + i);
    const float factor = scale[i / columns];
    struct alignas(N > 1 ? 16 : sizeof(T)) to {
        T v[N];
    } out;
#pragma unroll
    for (int e = 0; e < N; e++) out.v[e] = from_float<T>(factor * value_of<FORMAT>(in.v[e]));
    *reinterpret_cast<to *>(w + i) = out;
}
template <lg_rows8 FORMAT, typename T, int N>
static void dequantize(lg_stream *s, const struct lg_dequantize_rows_args *a)
{
    int64_t count = lg_numel(&a->w);
    dequantize_kernel<FORMAT, T, N>
        <<<(unsigned)ceil_div(count, THREADS * N), THREADS, 0, lg_cuda_stream_of(s)>>>(
            (const uint8_t *)a->codes.data, (const float *)a->scale.data, (T *)a->w.data,
            a->w.dim[1], count);
    LG_CUDA_LAUNCHED();
}
template <lg_rows8 FORMAT>
static void dequantize_format(lg_stream *s, const struct lg_dequantize_rows_args *a)
{
    const bool wide =
        a->w.dim[1] % 8 == 0 && (uintptr_t)a->codes.data % 8 == 0 && lg_cuda_aligned_16(a->w.data);
    WITH_TYPE(a->w.dtype, T, {
        if (wide)
            dequantize<FORMAT, T, 8>(s, a);
        else
            dequantize<FORMAT, T, 1>(s, a);
    })
}
void cuda_dequantize_rows(lg_stream *s, const struct lg_dequantize_rows_args *a)
{
    if (a->format == LG_ROWS8_FP8)
        dequantize_format<LG_ROWS8_FP8>(s, a);
    else
        dequantize_format<LG_ROWS8_INT8>(s, a);
}

/* ---- noise for timings ---- */

template <typename T> __global__ void noise_kernel(T *p, int64_t n, uint32_t seed)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    uint32_t h = (uint32_t)i * 2654435761u + seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13, h *= 3266489917u, h ^= h >> 16;
    p[i] = from_float<T>((float)h * 0x1p-31f - 1);
}
void cuda_fill_noise(cudaStream_t stream, void *p, lg_dtype t, int64_t n, uint32_t seed)
{
    unsigned blocks = (unsigned)ceil_div(n, THREADS);
    WITH_TYPE(t, T, (noise_kernel<T><<<blocks, THREADS, 0, stream>>>((T *)p, n, seed)))
    LG_CUDA_LAUNCHED();
}

static __global__ void fill_kernel(int32_t *p, int64_t n, int32_t value)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) p[i] = value;
}
void cuda_fill_i32(cudaStream_t stream, int32_t *p, int64_t n, int32_t value)
{
    fill_kernel<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, stream>>>(p, n, value);
    LG_CUDA_LAUNCHED();
}

void cuda_code_of(int *ret_code, int *ret_ptx)
{
    struct cudaFuncAttributes f;
    LG_CUDA(cudaFuncGetAttributes(&f, fill_kernel));
    *ret_code = f.binaryVersion;
    *ret_ptx = f.ptxVersion;
}

static __global__ void differ_kernel(const uint8_t *pieces, const uint8_t *piece, int64_t bytes,
                                     int64_t count, int *ret)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < bytes * count && pieces[i] != piece[i % bytes]) *ret = 1; /* whoever comes last */
}
bool cuda_all_equal(cudaStream_t stream, const void *pieces, const void *piece, int64_t bytes,
                    int64_t count)
{
    int differ = 0, *on_device;
    LG_CUDA(cudaMalloc((void **)&on_device, sizeof differ));
    LG_CUDA(cudaMemsetAsync(on_device, 0, sizeof differ, stream));
    differ_kernel<<<(unsigned)ceil_div(bytes * count, THREADS), THREADS, 0, stream>>>(
        (const uint8_t *)pieces, (const uint8_t *)piece, bytes, count, on_device);
    LG_CUDA_LAUNCHED();
    LG_CUDA(cudaMemcpyAsync(&differ, on_device, sizeof differ, cudaMemcpyDeviceToHost, stream));
    LG_CUDA(cudaStreamSynchronize(stream));
    LG_CUDA(cudaFree(on_device));
    return !differ;
}
