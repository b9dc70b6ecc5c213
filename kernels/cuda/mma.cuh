/* A warp's own products on the tensor cores: operands in registers, 16 bits, sums in fp32. */
#pragma once
#include "kernels/cuda/async.cuh"

/* d += a b, 16 x 8, over 16 k. */
template <typename T>
static __device__ __forceinline__ void product(float (&d)[4], const uint32_t *a, const uint32_t *b)
{
#define PRODUCT(type)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (__is_same(T, bf16))
        PRODUCT("bf16");
    else
        PRODUCT("f16");
#undef PRODUCT
}
/* Four 8 x 8 matrices from shared memory, as products take them: matrix i's row r lies where lane 8 i + r
 * says. */
static __device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
/* The same, each transposed. */
static __device__ __forceinline__ void load_transposed_matrices(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
/* A warp's four 8 x 8 matrices, as products hold them, to shared memory: matrix i's row r goes where lane
 * 8 i + r says. */
static __device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t *x)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#else
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t row = __shfl_sync(0xffffffff, to, 8 * i + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(x[i]) : "memory");
    }
#endif
}
