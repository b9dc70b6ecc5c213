/* Sums and maxima over lanes of a warp that hold parts of one row or column of a product's result. */
#pragma once
#include "kernels/cuda/common.cuh"

/* Over the 4 lanes that hold a row: they differ in lane % 4. */
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
/* Sums of v[j] over the 8 lanes that differ in lane / 4; the result is that of j = lane / 4. */
static __device__ __forceinline__ float sum_of_eight(float (&v)[8], int lane)
{
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
        bool upper = lane & (n * 4);
#pragma unroll
        for (int i = 0; i < n; i++) {
            float send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
            v[i] = keep + __shfl_xor_sync(0xffffffff, send, n * 4);
        }
    }
    return v[0];
}
