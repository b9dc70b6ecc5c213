/* What kernels of the tensor cores share on every GPU from 8.0 on: addresses in shared memory, copies to it that
 * are not waited for, results packed into 16 bits, exponentials. */
#pragma once
#include "kernels/cuda/common.cuh"

#define LOG2_E 1.44269504f

static __device__ __forceinline__ uint32_t packed(float a, float b, bf16)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&x);
}
static __device__ __forceinline__ uint32_t packed(float a, float b, fp16)
{
    __half2 x = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&x);
}
static __device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
/* 16 bytes to shared memory; not waited for. */
static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/* 16 bytes to shared memory, or zeros; not waited for. */
static __device__ __forceinline__ void copy_16_or_0(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
static __device__ __forceinline__ void copies_end()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until at most N groups of the thread's copies are under way. */
template <int N> static __device__ __forceinline__ void copies_land()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
