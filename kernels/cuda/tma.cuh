/* TMA: boxes of a tensor that are copied to shared memory by one thread, with the 128-byte swizzle that
 * wgmma reads, the barriers that count their bytes, the cluster whose blocks share them, and the
 * description of a tensor that the driver makes for it. */
#pragma once
#include "kernels/cuda/wgmma.cuh"
#include <cuda.h>

static __device__ __forceinline__ void barrier_init(uint64_t *b, int arrivals)
{
    mbarrier_begin(shared_address(b), arrivals);
}
static __device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t phase)
{
    mbarrier_wait(shared_address(b), phase);
}
static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
    mbarrier_arrive(shared_address(b));
}
static __device__ __forceinline__ void barrier_expect(uint64_t *b, int bytes)
{
    mbarrier_expect(shared_address(b), bytes);
}
/* At the barrier of the same place in block `rank` of the cluster. */
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *b, uint32_t rank)
{
    come_late();
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [a];\n}\n" ::"r"(shared_address(b)),
                 "r"(rank)
                 : "memory");
}
static __device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
static __device__ __forceinline__ void cluster_sync()
{
    come_late();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/* A box of a matrix to shared memory, whose bytes `full` counts; x: along the rows. */
static __device__ __forceinline__ void load_matrix(void *to, const CUtensorMap *from,
                                                   uint64_t *full, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                 "l"(from), "r"(shared_address(full)), "r"(x), "r"(y)
                 : "memory");
}
/* A box of a map (N, H, W, C): from channel c of pixel (h, w) of picture n on. */
static __device__ __forceinline__ void load_map(void *to, const CUtensorMap *from, uint64_t *full,
                                                int c, int w, int h, int n)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
                 "l"(from), "r"(shared_address(full)), "r"(c), "r"(w), "r"(h), "r"(n)
                 : "memory");
}
/* A matrix's box to every block of the cluster, at the same place, and so do the bytes that `full` counts. */
static __device__ __forceinline__ void load_for_all(void *to, const CUtensorMap *from,
                                                    uint64_t *full, int blocks, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(from), "r"(shared_address(full)), "r"(x), "r"(y),
                 "h"((uint16_t)((1 << blocks) - 1))
                 : "memory");
}

/* The next slot of a ring of N, and the phase of its barriers. */
template <int N> struct ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next()
    {
        if (++slot < N) return;
        slot = 0;
        phase ^= 1;
    }
    __device__ __forceinline__ void skip(int n) { slot = (slot + n) % N; } /* phase is void then */
};

/* An operand whose rows are swizzled by 128 bytes. */
static __device__ __forceinline__ uint64_t rows_of(const void *p)
{
    return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

static CUtensorMapDataType type_of(lg_dtype t)
{
    return t == LG_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}
/* A matrix or map in boxes of `box`, of every `each`-th element, fastest dimension first. apart: elements from one row to
 * the next; 0: nothing lies between them. */
static CUtensorMap describe(const lg_tensor &t, int rank, const uint64_t *dim, const uint32_t *box,
                            const uint32_t *each,
                            CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                            uint64_t apart = 0)
{
    static decltype(&cuTensorMapEncodeTiled) encode = [] {
        void *at = NULL;
        cudaDriverEntryPointQueryResult found;
        LG_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000,
                                                 cudaEnableDefault, &found));
        LG_ASSERT(found == cudaDriverEntryPointSuccess);
        return (decltype(&cuTensorMapEncodeTiled))at;
    }();
    CUtensorMap map;
    uint64_t stride[4] = {(apart ? apart : dim[0]) * lg_dtype_bytes(t.dtype)};
    for (int i = 1; i < rank - 1; i++) stride[i] = stride[i - 1] * dim[i];
    CUresult e = encode(&map, type_of(t.dtype), (uint32_t)rank, t.data, dim, stride, box, each,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e) lg_cuda_fatal("cuTensorMapEncodeTiled", "it refuses a tensor", __FILE__, __LINE__);
    return map;
}
