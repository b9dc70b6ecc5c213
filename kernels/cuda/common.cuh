/* What the kernels share: element types, packs of 16 bytes, sums over a warp and a block.
 *
 * Every kernel computes in fp32 (or fp64 where it says so) and rounds once at the store. Sums have a
 * fixed order: that of the code, then halving within the warp (xor shuffles), then warps in order. */
#pragma once
#include "kernels/cuda/cuda.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;
typedef __half fp16;

enum { WARP = 32 };

__device__ __forceinline__ float to_float(float x)
{
    return x;
}
__device__ __forceinline__ float to_float(bf16 x)
{
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(fp16 x)
{
    return __half2float(x);
}
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ fp16 from_float<fp16>(float x)
{
    return __float2half_rn(x);
}

/* N elements that are loaded and stored at once; N sizeof(T) is at most 16. */
template <typename T, int N> struct alignas(sizeof(T) * N) pack {
    T v[N];
};
template <typename T> constexpr int PACK = 16 / (int)sizeof(T);

template <typename T, int N> __device__ __forceinline__ void load(const T *p, float (&ret)[N])
{
    pack<T, N> x = *reinterpret_cast<const pack<T, N> *>(p);
#pragma unroll
    for (int i = 0; i < N; i++) ret[i] = to_float(x.v[i]);
}
template <typename T, int N> __device__ __forceinline__ void store(T *p, const float (&x)[N])
{
    pack<T, N> y;
#pragma unroll
    for (int i = 0; i < N; i++) y.v[i] = from_float<T>(x[i]);
    *reinterpret_cast<pack<T, N> *>(p) = y;
}

/* Pairs of neighbours turned by angles of these cosines and sines; sign -1: back. Sums and products are fused as written, so
 * that a pair's bits do not depend on N. */
template <int N>
static __device__ __forceinline__ void turn_pack(float (&v)[N], const float (&cosine)[N / 2],
                                                 const float (&sine)[N / 2], float sign)
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const float turn = sign * sine[k], x0 = v[2 * k], x1 = v[2 * k + 1];
        v[2 * k] = fmaf(x0, cosine[k], -__fmul_rn(x1, turn));
        v[2 * k + 1] = fmaf(x1, cosine[k], __fmul_rn(x0, turn));
    }
}

/* Two elements of 16 bits in a register: where the conversions count. */
template <typename T> __device__ __forceinline__ float2 two(uint32_t x);
template <> __device__ __forceinline__ float2 two<bf16>(uint32_t x)
{
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 two<fp16>(uint32_t x)
{
    return __half22float2(*reinterpret_cast<__half2 *>(&x));
}
template <typename T> __device__ __forceinline__ uint32_t from_two(float x, float y);
template <> __device__ __forceinline__ uint32_t from_two<bf16>(float x, float y)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t *>(&v);
}
template <> __device__ __forceinline__ uint32_t from_two<fp16>(float x, float y)
{
    __half2 v = __floats2half2_rn(x, y);
    return *reinterpret_cast<uint32_t *>(&v);
}
/* 16 bytes of them. */
struct alignas(16) quad {
    uint32_t v[4];
};

template <typename F> __device__ __forceinline__ F warp_sum(F x)
{
#pragma unroll
    for (int o = WARP / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}
/* The sum over a block of THREADS, in every thread. */
template <int THREADS, typename F> __device__ __forceinline__ F block_sum(F x)
{
    __shared__ F partial[THREADS / WARP];
    x = warp_sum(x);
    __syncthreads(); /* an earlier sum has been read */
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
    __syncthreads();
    F sum = 0;
    for (int w = 0; w < THREADS / WARP; w++) sum += partial[w];
    return sum;
}

__host__ __device__ __forceinline__ int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#define SQRT_2_OVER_PI 0.79788456080286535588f
#define GELU_CUBIC     0.044715f
#define SQRT_1_2PI     0.39894228040143267794f
#define QUICK_GELU     1.702f

__device__ __forceinline__ float act_of(lg_act act, float x)
{
    switch (act) {
    case LG_ACT_NONE:
        return x;
    case LG_ACT_SILU:
        return x / (1 + expf(-x));
    case LG_ACT_GELU_TANH:
        return 0.5f * x * (1 + tanhf(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)));
    case LG_ACT_RELU:
        return x < 0 ? 0 : x; /* NaN stays */
    case LG_ACT_GELU_ERF:
        return x * normcdff(x);
    case LG_ACT_QUICK_GELU:
        return x / (1 + expf(-QUICK_GELU * x));
    case LG_ACT_COUNT:
        break;
    }
    return x;
}
/* tanh(x); for 16-bit types the hardware's, whose relative error is 2^-11. */
template <typename T> __device__ __forceinline__ float tanh_for(float x)
{
    float y;
    if constexpr (sizeof(T) == sizeof(float))
        y = tanhf(x);
    else
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <typename T = float> __device__ __forceinline__ float act_slope(lg_act act, float x)
{
    switch (act) {
    case LG_ACT_NONE:
        return 1;
    case LG_ACT_SILU: {
        float sigmoid = 1 / (1 + expf(-x));
        return sigmoid * (1 + x * (1 - sigmoid));
    }
    case LG_ACT_GELU_TANH: {
        float t = tanh_for<T>(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
        float inner_slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x);
        return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * inner_slope;
    }
    case LG_ACT_RELU:
        return x > 0;
    case LG_ACT_GELU_ERF:
        return normcdff(x) + x * SQRT_1_2PI * expf(-0.5f * x * x);
    case LG_ACT_QUICK_GELU: {
        float sigmoid = 1 / (1 + expf(-QUICK_GELU * x));
        return sigmoid * (1 + QUICK_GELU * x * (1 - sigmoid));
    }
    case LG_ACT_COUNT:
        break;
    }
    return 1;
}

/* Runs the body with T the type of dtype: float, bf16 or fp16. */
#define WITH_TYPE(dtype, T, ...)                                                                   \
    switch (dtype) {                                                                               \
    case LG_F32: {                                                                                 \
        using T = float;                                                                           \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case LG_BF16: {                                                                                \
        using T = bf16;                                                                            \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    case LG_F16: {                                                                                 \
        using T = fp16;                                                                            \
        __VA_ARGS__;                                                                               \
    } break;                                                                                       \
    default:                                                                                       \
        LG_ASSERT(!"a type of this device");                                                       \
    }
/* As WITH_TYPE(dtype, T), and W is T or float: the type of a tensor that may be fp32. */
#define WITH_TYPES(dtype, wide, T, W, ...)                                                         \
    WITH_TYPE(dtype, T, {                                                                          \
        if ((wide) == LG_F32) {                                                                    \
            using W = float;                                                                       \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            using W = T;                                                                           \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    })
/* Runs the body with N = PACK<T> where `fits`, else 1. */
#define WITH_PACK(fits, T, N, ...)                                                                 \
    if (fits) {                                                                                    \
        constexpr int N = PACK<T>;                                                                 \
        __VA_ARGS__;                                                                               \
    } else {                                                                                       \
        constexpr int N = 1;                                                                       \
        __VA_ARGS__;                                                                               \
    }
