/* wgmma: the tensor cores' asynchronous products, 64 rows a warpgroup, and what goes with them. A kernel
 * names the shapes that it needs (tensor_core in short_attention.cu) by the macros at the end.
 *
 * Order: products_begin() after the last write to a register that a product reads or adds to; products;
 * products_end(); products_wait(); settled() of the results. What other threads wrote to shared memory
 * must be behind fence.proxy.async before a product reads it. */
#pragma once
#include "kernels/cuda/mma.cuh"

/* A descriptor of an operand in shared memory: bytes from 8 rows or columns to the next 8 in the two
 * directions that PTX calls leading and stride; swizzle 3 is that of 32 bytes, 1 of 128, 0 none. */
static __device__ __forceinline__ uint64_t operand(uint32_t address, int leading, int stride,
                                                   int swizzle)
{
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}
/* The same in two steps: what bytes / 16 may be added to, to move the address, and the whole. */
static __device__ __forceinline__ uint32_t operand_start(uint32_t address, int leading)
{
    return (address & 0x3FFFF) >> 4 | (uint32_t)leading >> 4 << 16;
}
static __device__ __forceinline__ uint64_t operand_at(uint32_t start, int stride, int swizzle)
{
    return (uint64_t)((uint32_t)stride >> 4 | (uint32_t)swizzle << 30) << 32 | start;
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
/* Two 8 x 8 matrices, as store_matrices does with four, by lanes 0 to 15. */
static __device__ __forceinline__ void store_two_matrices(uint32_t to, const uint32_t *x)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(x[0]),
                 "r"(x[1])
                 : "memory");
}
/* Until at most N groups of the thread's copies are under way; products may read the others. */
template <int N> static __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(N) : "memory");
}

/* ---- parts of a block that wait for one another ---- */

/* Nothing; in a backend made with -DLG_LATE (`make gpu-late`) a pause now and then, before whatever waits
 * or arrives: 1 to 33 us one time in 16, half a millisecond one time in 512. Whoever comes late must not be
 * passed by, and no bit may change. Lanes of a warp that come together pause together. */
static __device__ __forceinline__ void come_late()
{
#ifdef LG_LATE
    uint32_t x;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
    x = (x ^ blockIdx.x << 12 ^ threadIdx.x / WARP << 24) * 0x9E3779B1u;
    x = (x ^ x >> 15) * 0x85EBCA77u;
    x ^= x >> 13;
    if (x % 512 == 0)
        __nanosleep(500000);
    else if (x % 16 == 0)
        __nanosleep(1000 + (x >> 17));
#endif
}
/* A barrier in shared memory that counts arrivals. Its phase, 0 at first, changes when they are complete. */
static __device__ __forceinline__ void mbarrier_begin(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    come_late();
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives; the phase is complete only when that many bytes have come, too. */
static __device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes)
{
    come_late();
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/* Until that phase, 0 or 1, is complete. */
static __device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase)
{
    come_late();
    asm volatile("{\n.reg .pred p;\nwait:\n"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra wait;\ndone:\n}\n" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}
/* One arrival for all 32 threads. */
static __device__ __forceinline__ void warp_arrive(uint32_t barrier)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0) mbarrier_arrive(barrier);
}
/* The hardware's barriers, 0 to 15; threads that arrive do not wait. */
static __device__ __forceinline__ void barrier_sync(int barrier, int threads)
{
    come_late();
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
static __device__ __forceinline__ void barrier_arrive(int barrier, int threads)
{
    come_late();
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/* Registers a thread from here on, for a whole warpgroup: fewer, or more when others have given theirs. */
template <int N> static __device__ __forceinline__ void registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#define COMMA     ,
#define F4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)
#define N4        "%0, %1, %2, %3"
#define N16       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define N20       N16 ", %16, %17, %18, %19"
#define N32       N20 ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N36       N32 ", %32, %33, %34, %35"
#define N64                                                                                        \
    N36 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"                  \
        " %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define N96                                                                                        \
    N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"         \
        ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define N128                                                                                       \
    N96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
        "%111"                                                                                     \
        ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
        "%126, %127"
/* d (64 x n) = or += a b, a and b in shared memory. transposed: for a and for b 1 where the summed dimension
 * is not the contiguous one, "0, 1". */
#define PRODUCT_SHARED(n, type, list, outputs, ia, ib, ic, transposed)                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ic ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list "}, " ia \
                 ", " ib ", p, 1, 1, " transposed ";\n}\n"                                         \
                 : outputs                                                                         \
                 : "l"(a), "l"(b), "r"(add))
/* d += a b, a in registers, b in shared memory, transposed. */
#define PRODUCT_REGISTERS(n, type, list, outputs, ia, ib)                                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list          \
                 "}, {" ia "}, " ib ", 1, 1, 1, 1;\n"                                              \
                 : outputs                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
/* d = or += a b, a in registers, b in shared memory; transposed: 1 where b's summed dimension is not the
 * contiguous one. */
#define PRODUCT_REGISTERS_OR_SET(n, type, list, outputs, ia, ib, ic, transposed)                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ic ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" list          \
                 "}, {" ia "}, " ib ", p, 1, 1, " transposed ";\n}\n"                              \
                 : outputs                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
