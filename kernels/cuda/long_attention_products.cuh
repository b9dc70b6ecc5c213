/* The products of the backwards of attention, whose tiles are those of long_attention_tiles.cuh: of 64 rows of a tile with all rows of
 * another (scores), of P or dS in registers with a tile (keys), and of P or dS in shared memory, as it lies (rows) or transposed (queries). The last 8
 * columns of d = 72 are products of their own (rest). */
#pragma once
#include "kernels/cuda/long_attention_tiles.cuh"

template <typename T> struct tensor_core;
#define TENSOR_CORE(T, type)                                                                       \
    template <> struct tensor_core<T> {                                                            \
        static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "0, 0");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void scores(float (&d)[64], uint64_t a, uint64_t b,      \
                                                      int add)                                     \
        {                                                                                          \
            PRODUCT_SHARED("128", type, N64, F64(d, 0), "%64", "%65", "%66", "0, 0");              \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[16], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("32", type, N16, F16(d, 0), "%16", "%17", "%18", "1, 1");               \
        }                                                                                          \
        static __device__ __forceinline__ void queries(float (&d)[32], uint64_t a, uint64_t b,     \
                                                       int add)                                    \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "1, 1");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void rest_of_queries(float *d, uint64_t a, uint64_t b,   \
                                                               int add)                            \
        {                                                                                          \
            PRODUCT_SHARED("8", type, N4, F4(d, 0), "%4", "%5", "%6", "1, 1");                     \
        }                                                                                          \
        static __device__ __forceinline__ void rows(float (&d)[32], uint64_t a, uint64_t b,        \
                                                    int add)                                       \
        {                                                                                          \
            PRODUCT_SHARED("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32", "%33", "%34",       \
                           "0, 1");                                                                \
        }                                                                                          \
        static __device__ __forceinline__ void rest_of_rows(float *d, uint64_t a, uint64_t b,      \
                                                            int add)                               \
        {                                                                                          \
            PRODUCT_SHARED("8", type, N4, F4(d, 0), "%4", "%5", "%6", "0, 1");                     \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[32], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("64", type, N32, F16(d, 0) COMMA F16(d, 16), "%32, %33, %34, %35",   \
                              "%36");                                                              \
        }                                                                                          \
        static __device__ __forceinline__ void keys(float (&d)[64], const uint32_t *a, uint64_t b) \
        {                                                                                          \
            PRODUCT_REGISTERS("128", type, N64, F64(d, 0), "%64, %65, %66, %67", "%68");           \
        }                                                                                          \
        static __device__ __forceinline__ void rest_of_keys(float *d, const uint32_t *a,           \
                                                            uint64_t b)                            \
        {                                                                                          \
            PRODUCT_REGISTERS("8", type, N4, F4(d, 0), "%4, %5, %6, %7", "%8");                    \
        }                                                                                          \
    };
TENSOR_CORE(bf16, "bf16")
TENSOR_CORE(fp16, "f16")
