/* What the kernels of RMSNorm share (rms_norm.cu, rms_norm_wide.cuh): where vectors lie, what the kernels get, packs as floats. */
#pragma once
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, AT_ONCE = 4, LANE_PACKS = 4 /* in registers, at most */ };
enum { CHUNKS_MAX = 512, CHUNK_MIN = 64 };
enum { WIDE_PACKS = 2 /* of a lane */, WIDE_WEIGHTS = 2, WIDE_CHUNK_MIN = 8 };
/* In the kernel of heads that sums columns: tokens that a block has under way, and its tokens at least; warps of a
 * multiprocessor, as registers allow. */
enum { HEAD_TOKENS = 2, HEAD_CHUNK_MIN = 8, HEAD_WARPS_AT_ONCE = 24 };

/* n / by for n < 2^31. */
struct divisor {
    uint32_t by, shift;
    uint64_t magic;
};
static divisor divide_by(int64_t by)
{
    divisor d = {(uint32_t)by, 31, 0};
    while ((int64_t)1 << (d.shift - 31) < by) d.shift++;
    d.magic = (((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by;
    return d;
}
static __device__ __forceinline__ uint32_t operator/(uint32_t n, const divisor &d)
{
    return (uint32_t)(n * d.magic >> d.shift);
}

/* Where vectors lie: what is read and what is written. */
struct places {
    int64_t stride_in, stride_out; // of samples
    bool in_place;
    divisor tokens, heads, each, copied; // tokens of a sample; vectors of a token
    uint32_t vectors, normed;            // all; of a token
    int D, weights;
};
static places places_of(const lg_tensor &x, const lg_tensor &out, const lg_tensor &w, int each)
{
    const int64_t h = x.dim[2], normed = w.dim[0] * each, vectors = lg_numel(&x) / x.dim[3];
    LG_ASSERT(vectors < (int64_t)1 << 31 && x.dim[3] < 1 << 30);
    places p = {};
    p.stride_in = lg_row_stride(&x, 1);
    p.stride_out = lg_row_stride(&out, 1);
    p.in_place = x.data == out.data;
    p.tokens = divide_by(x.dim[1]);
    p.heads = divide_by(h);
    p.each = divide_by(each);
    p.copied = divide_by(LG_MAX(h - normed, (int64_t)1));
    p.vectors = (uint32_t)vectors;
    p.normed = (uint32_t)normed;
    p.D = (int)x.dim[3];
    p.weights = (int)w.dim[0];
    return p;
}
/* Vector `head` of a token, behind its sample's first element. */
struct place {
    uint32_t sample, token, head;
    int64_t within;
};
static __device__ __forceinline__ place place_of(const places &p, uint32_t token, uint32_t head)
{
    const uint32_t sample = token / p.tokens, t = token - sample * p.tokens.by;
    return {sample, token, head, ((int64_t)t * p.heads.by + head) * p.D};
}

template <int LANES> static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}

template <typename T> struct forward_args {
    const T *x, *w;
    const float *cosine, *sine; // (tokens, D / 2), or NULL
    T *y, *kept;                // kept (tokens, normed, D), or NULL
    float *rstd;                // or NULL
    float eps;
    places p;
};

/* A normed vector in what is kept. */
static __device__ __forceinline__ int64_t kept_at(const places &p, const place &at)
{
    return ((int64_t)at.token * p.normed + at.head) * p.D;
}

/* What T keeps of a value. */
template <typename T> static __device__ __forceinline__ float rounded(float v)
{
    return to_float(from_float<T>(v));
}

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
 * get: of what it does. */
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
template <typename T, int N>
static __device__ __forceinline__ void get(const T *from, float (&v)[N])
{
    if constexpr (IS_QUAD<T, N>) {
        const quad q = get_quad(from);
        unpack<T, N>(reinterpret_cast<const pack<T, N> &>(q), v);
    } else {
        load<T, N>(from, v);
    }
}

template <typename T> struct backward_args {
    const T *dy, *kept, *w;
    const float *cosine, *sine; // (tokens, D / 2): dy is turned back; or NULL
    const float *rstd;
    T *dx;
    float *partial; // (chunks, weights, D), or NULL
    float *bias;    // (chunks, columns of dx), or NULL
    bool accumulate;
    places p;
};

/* The vectors of a block: [first, last) of those that weight blockIdx.y norms, or, behind the last one, that were copied. */
struct range {
    uint32_t first, last;
};
static __device__ __forceinline__ range range_of(const places &p, bool copies)
{
    const uint32_t tokens = p.vectors / p.heads;
    const int64_t all = (int64_t)tokens * (copies ? p.copied.by : p.each.by);
    const int64_t step = (all + gridDim.x - 1) / gridDim.x, first = blockIdx.x * step;
    return {(uint32_t)min(first, all), (uint32_t)min(first + step, all)};
}
static __device__ __forceinline__ place in_range(const places &p, bool copies, uint32_t k)
{
    const divisor &each = copies ? p.copied : p.each;
    const uint32_t token = k / each, head = k - token * each.by;
    return place_of(p, token, copies ? p.normed + head : blockIdx.y * each.by + head);
}

/* dx (+)= dy. */
template <typename T, int N>
static __device__ __forceinline__ void copy_vectors(const backward_args<T> &a, int lanes)
{
    const range k = range_of(a.p, true);
    const int lane = threadIdx.x % lanes;
    if (a.p.in_place) return;
    for (uint32_t n = k.first + threadIdx.x / lanes; n < k.last; n += THREADS / lanes) {
        const place at = in_range(a.p, true, n);
        const T *dy = a.dy + at.sample * a.p.stride_in + at.within;
        T *dx = a.dx + at.sample * a.p.stride_out + at.within;
        for (int i = lane * N; i < a.p.D; i += lanes * N) {
            float v[N], old[N];
            get<T, N>(dy + i, v);
            if (a.accumulate) {
                get<T, N>(dx + i, old);
#pragma unroll
                for (int e = 0; e < N; e++) v[e] += old[e];
            }
            put<T, N>(dx + i, v);
        }
    }
}
