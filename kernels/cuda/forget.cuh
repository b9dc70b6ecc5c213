/* Registers for what is read once and used twice. */
#pragma once
#include "kernels/cuda/common.cuh"

/* From here on a pack of 16 bytes has other values, as far as the compiler knows: what it has converted before it converts again,
 * and needs no registers for it until then. */
template <typename T, int N> __device__ __forceinline__ void forget(pack<T, N> &p)
{
    if constexpr (sizeof p == sizeof(uint4)) {
        uint4 &q = reinterpret_cast<uint4 &>(p);
        asm volatile("" : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w));
    }
}
