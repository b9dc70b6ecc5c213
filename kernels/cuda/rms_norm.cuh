/* What the kernels of RMSNorm share (rms_norm.cu, rms_norm_wide.cuh): where vectors lie, what the kernels get. */
#pragma once
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/packs.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, AT_ONCE = 4, LANE_PACKS = 4 /* in registers, at most */ };
enum { CHUNKS_MAX = 512, CHUNK_MIN = 64 };
enum { WIDE_PACKS = 2 /* of a lane */, WIDE_WEIGHTS = 2, WIDE_CHUNK_MIN = 8 };
enum { WIDE_BLOCKS = 3 /* of the backward, in a multiprocessor */ };
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

/* Where vectors lie: elements from a token to the next one of what is normed, of what else is read (the backward's dy), and of
 * what is written. */
struct places {
    int64_t of_x, of_dy, of_out;
    divisor tokens, heads, each; // tokens of a sample; vectors of a token, of a row of w
    uint32_t vectors;            // all
    int D, weights;
    __device__ __forceinline__ int64_t within(uint32_t head) const { return (int64_t)head * D; }
    /* Of what has a value for each vector. */
    __device__ __forceinline__ int64_t vector(uint32_t token, uint32_t head) const
    {
        return (int64_t)token * heads.by + head;
    }
    /* Where the token's angles begin. */
    __device__ __forceinline__ int64_t angles(uint32_t token) const
    {
        return (int64_t)(token - token / tokens * tokens.by) * (D / 2);
    }
};
static places places_of(const lg_tensor &x, const lg_tensor &out, const lg_tensor &w, int each)
{
    const int64_t vectors = lg_numel(&x) / x.dim[3];
    LG_ASSERT(vectors < (int64_t)1 << 31 && x.dim[3] < 1 << 30);
    places p = {};
    p.of_x = lg_row_stride(&x, 2);
    p.of_out = lg_row_stride(&out, 2);
    p.tokens = divide_by(x.dim[1]);
    p.heads = divide_by(x.dim[2]);
    p.each = divide_by(each);
    p.vectors = (uint32_t)vectors;
    p.D = (int)x.dim[3];
    p.weights = (int)w.dim[0];
    return p;
}
struct place {
    uint32_t token, head;
};

template <int LANES> static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}

template <typename T> struct forward_args {
    const T *x, *w;
    const float *cosine, *sine; // (tokens, D / 2), or NULL
    T *y;
    float *rstd; // or NULL
    float eps;
    places p;
};

/* What T keeps of a value. */
template <typename T> static __device__ __forceinline__ float rounded(float v)
{
    return to_float(from_float<T>(v));
}

template <typename T> struct backward_args {
    const T *dy, *x, *w, *rest; // rest: (tokens, rest_width), or NULL
    const float *cosine, *sine; // (tokens, D / 2): dy is turned back; or NULL
    const float *rstd;
    T *dx;
    float *partial;  // (chunks, weights, D), or NULL
    float *bias;     // (chunks, columns of dx and of rest), or NULL
    int64_t of_rest; /* elements from a token to the next one */
    int rest_width;
    bool accumulate;
    places p;
};

/* The vectors of a block: [first, last) of those that weight blockIdx.y norms. */
struct range {
    uint32_t first, last;
};
static __device__ __forceinline__ range range_of(const places &p)
{
    const uint32_t tokens = p.vectors / p.heads;
    const int64_t all = (int64_t)tokens * p.each.by;
    const int64_t step = (all + gridDim.x - 1) / gridDim.x, first = blockIdx.x * step;
    return {(uint32_t)min(first, all), (uint32_t)min(first + step, all)};
}
static __device__ __forceinline__ place in_range(const places &p, uint32_t k)
{
    const uint32_t token = k / p.each;
    return {token, blockIdx.y * p.each.by + k - token * p.each.by};
}
/* Sums of rest's N columns from `column` on, of the tokens `first`, `first + step`, and so on below `last`. */
template <typename T, int N>
static __device__ __forceinline__ void sum_rest(const backward_args<T> &a, int column,
                                                uint32_t first, uint32_t last, uint32_t step,
                                                float (&sum)[N])
{
    const T *at = a.rest + column;
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] = 0;
    for (uint32_t token = first; token < last; token += AT_ONCE * step) {
        pack<T, N> in[AT_ONCE] = {};
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            if (token + k * step < last)
                in[k] = *(const pack<T, N> *)(at + (token + k * step) * a.of_rest);
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            float v[N];
            unpack<T, N>(in[k], v);
#pragma unroll
            for (int e = 0; e < N; e++) sum[e] += v[e];
        }
    }
}
