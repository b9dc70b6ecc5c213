/* wgmma: the tensor cores' asynchronous products, 64 rows a warpgroup, and what goes with them. A kernel
 * names the shapes that it needs (tensor_core in short_attention.cu) by the macros at the end.
 *
 * Order: products_begin() after the last write to a register that a product reads or adds to; products;
 * products_end(); products_wait(); settled() of the results. What other threads wrote to shared memory
 * must be behind fence.proxy.async before a product reads it. */
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
/* A descriptor of an operand in shared memory: bytes from 8 rows or columns to the next 8 in the two
 * directions that PTX calls leading and stride; swizzle 3 is that of 32 bytes, 0 none. */
static __device__ __forceinline__ uint64_t operand(uint32_t address, int leading, int stride,
                                                   int swizzle)
{
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}
static __device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void products_end()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N groups are under way. */
template <int N> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps reads of x behind the wait before it. */
template <int N> static __device__ __forceinline__ void settled(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define COMMA     ,
#define F4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define N16       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define N20       N16 ", %16, %17, %18, %19"
#define N32       N20 ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N36       N32 ", %32, %33, %34, %35"
/* d (64 x n) = or += a b, a and b in shared memory. turned: 1 where the summed dimension is not the
 * contiguous one, in both. */
#define PRODUCT_SHARED(n, type, list, outputs, ia, ib, ic, turned)                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ic ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list "}, " ia \
                 ", " ib ", p, 1, 1, " turned ", " turned ";\n}\n"                                 \
                 : outputs                                                                         \
                 : "l"(a), "l"(b), "r"(add))
/* d += a b, a in registers, b in shared memory, turned. */
#define PRODUCT_REGISTERS(n, type, list, outputs, ia, ib)                                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list          \
                 "}, {" ia "}, " ib ", 1, 1, 1, 1;\n"                                              \
                 : outputs                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
