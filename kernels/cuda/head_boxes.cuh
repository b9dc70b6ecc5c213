/* TMA for attention: boxes of rows of a tensor (B, T, H, d) that one thread copies between it and shared
 * memory, and the description of such a tensor, which the driver makes.
 *
 * A box lies in shared memory row after row, on 128 bytes; where its rows are of 128 bytes, 16 bytes
 * number c of row r are at number c ^ r % 8 (wgmma's 128-byte swizzle; counted from addresses that are
 * multiples of 1024). What is put must be behind fence.proxy.async. */
#pragma once
#include "kernels/cuda/wgmma.cuh"
#include <cuda.h>

enum { SWIZZLED_COLUMNS = 64 };

/* The box from (row, column) to shared memory; the barrier is told. */
static __device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap *from, int column,
                                             int row, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(from), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
/* The other way round, in the thread's group that puts_end() closes. */
static __device__ __forceinline__ void put(const CUtensorMap *to, int column, int row,
                                           uint32_t from)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(to),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
static __device__ __forceinline__ void puts_end()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until all but the thread's latest N groups have been read, and their places are free. */
template <int N> static __device__ __forceinline__ void puts_wait()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Until all of it has arrived. */
static __device__ __forceinline__ void puts_done()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

typedef CUresult encode_function(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static encode_function *encoder(void)
{
    void *p = nullptr;
    cudaDriverEntryPointQueryResult found;
    LG_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault,
                                             &found));
    LG_ASSERT(p);
    return (encode_function *)p;
}
static CUtensorMap described(const lg_tensor *t, int rank, const cuuint64_t *size,
                             const cuuint64_t *pitch, const cuuint32_t *box,
                             CUtensorMapSwizzle swizzle)
{
    static encode_function *encode = encoder();
    cuuint32_t steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    CUresult rc = encode(
        &map,
        t->dtype == LG_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        (cuuint32_t)rank, t->data, size, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    LG_ASSERT(rc == CUDA_SUCCESS);
    return map;
}
/* Boxes of `rows` tokens and `columns` elements of a tensor (B, T, H, d) of 16 bits. */
[[maybe_unused]] static CUtensorMap boxes_of(const lg_tensor *t, int rows, int columns)
{
    cuuint64_t size[] = {(cuuint64_t)(t->dim[2] * t->dim[3]), (cuuint64_t)(t->dim[0] * t->dim[1])};
    cuuint64_t pitch[] = {(cuuint64_t)lg_row_stride(t, 2) * 2};
    cuuint32_t box[] = {(cuuint32_t)columns, (cuuint32_t)rows};
    return described(t, 2, size, pitch, box,
                     columns == SWIZZLED_COLUMNS ? CU_TENSOR_MAP_SWIZZLE_128B
                                                 : CU_TENSOR_MAP_SWIZZLE_NONE);
}
