/* Packs of 16 bytes: as floats and back, from and to memory. */
#pragma once
#include "kernels/cuda/common.cuh"

/* A pack as floats and back, two at a time where T has 16 bits. */
template <typename T, int N>
static __device__ __forceinline__ void unpack(const pack<T, N> &p, float (&ret)[N])
{
    if constexpr (sizeof p == sizeof(quad) && sizeof(T) == 2) {
        const quad &q = reinterpret_cast<const quad &>(p);
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            const float2 f = two<T>(q.v[k]);
            ret[2 * k] = f.x, ret[2 * k + 1] = f.y;
        }
    } else {
#pragma unroll
        for (int e = 0; e < N; e++) ret[e] = to_float(p.v[e]);
    }
}
template <typename T, int N>
static __device__ __forceinline__ pack<T, N> packed(const float (&v)[N])
{
    pack<T, N> p;
    if constexpr (sizeof p == sizeof(quad) && sizeof(T) == 2) {
        quad &q = reinterpret_cast<quad &>(p);
#pragma unroll
        for (int k = 0; k < N / 2; k++) q.v[k] = from_two<T>(v[2 * k], v[2 * k + 1]);
    } else {
#pragma unroll
        for (int e = 0; e < N; e++) p.v[e] = from_float<T>(v[e]);
    }
    return p;
}

/* 16 bytes as one access: left to itself the compiler makes four or seven of many here. read: of what the kernel does not write,
 * get: of what it does, or what shall be on the way before anything that follows is done. */
static __device__ __forceinline__ void put_quad(void *to, const quad &q)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(q.v[0]), "r"(q.v[1]),
                 "r"(q.v[2]), "r"(q.v[3])
                 : "memory");
}
static __device__ __forceinline__ quad read_quad(const void *from)
{
    quad q;
    asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3])
        : "l"(from));
    return q;
}
static __device__ __forceinline__ quad get_quad(const void *from)
{
    quad q;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3])
                 : "l"(from)
                 : "memory");
    return q;
}
template <typename T, int N> constexpr bool IS_QUAD = sizeof(pack<T, N>) == sizeof(quad);

template <typename T, int N>
static __device__ __forceinline__ void put_pack(T *to, const pack<T, N> &p)
{
    if constexpr (IS_QUAD<T, N>)
        put_quad(to, reinterpret_cast<const quad &>(p));
    else
        *reinterpret_cast<pack<T, N> *>(to) = p;
}
template <typename T, int N> static __device__ __forceinline__ void put(T *to, const float (&v)[N])
{
    put_pack<T, N>(to, packed<T, N>(v));
}
template <typename T, int N>
static __device__ __forceinline__ void read(const T *from, float (&v)[N])
{
    if constexpr (IS_QUAD<T, N>) {
        const quad q = read_quad(from);
        unpack<T, N>(reinterpret_cast<const pack<T, N> &>(q), v);
    } else {
        load<T, N>(from, v);
    }
}
template <typename T, int N> static __device__ __forceinline__ pack<T, N> get_pack(const T *from)
{
    if constexpr (IS_QUAD<T, N>) {
        const quad q = get_quad(from);
        return reinterpret_cast<const pack<T, N> &>(q);
    } else {
        return *(const pack<T, N> *)from;
    }
}
template <typename T, int N>
static __device__ __forceinline__ void get(const T *from, float (&v)[N])
{
    unpack<T, N>(get_pack<T, N>(from), v);
}
