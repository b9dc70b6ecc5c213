/* Modulated LayerNorm of 16-bit rows of at most FORWARD_PACKS_MAX packs a lane, also with the gated residual before it
 * (norm.cu has the general ones).
 *
 * A block has CHUNK_ROWS rows of a sample, and its scale, shift and gate in shared memory: read from
 * global memory they would be waited for behind the rows of the other warps. A warp has a row in
 * registers: out = x + gate y, rounded as it is stored; mean; variance about it; (out - mean) rstd
 * (1 + scale) + shift. The last rows come first: the layer before has just written them, and they are
 * still in the cache.
 *
 * Bytes: 2 B T D elements, with the residual 4: 0.60 GB at B = 256, T = 256, D = 1152. */
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, CHUNK_ROWS = 16 };
enum { FORWARD_PACKS_MAX = 12, FORWARD_ROW_MAX = FORWARD_PACKS_MAX * ROW_STEP };
/* Blocks a multiprocessor, as the registers of so many packs allow. */
constexpr int blocks_of(int packs, bool residual)
{
    return packs > 8 ? 1 : packs > ROW_PACKS_MAX ? 2 : residual ? 3 : 4;
}

template <typename T> struct rows_args {
    const T *x, *y, *gate, *shift, *scale;
    int64_t gate_stride, mod_stride;
    T *out, *n;
    float *mean, *rstd;
    float eps, inverse_D;
    int tokens, chunks, D; /* chunks of CHUNK_ROWS rows, of a sample */
    bool rms;
};

/* Pack j of a row, for this lane; 0 where it has none. */
template <int PACKS>
static __device__ __forceinline__ quad pack_of(const void *row, int j, bool last)
{
    return j + 1 < PACKS || last ? ((const quad *)row)[j * WARP] : quad{};
}

template <typename T, int PACKS, bool RESIDUAL>
static __global__ void __launch_bounds__(THREADS, blocks_of(PACKS, RESIDUAL))
    rows_kernel(const rows_args<T> a)
{
    __shared__ quad gates[PACKS * WARP], scales[PACKS * WARP], shifts[PACKS * WARP];
    int64_t chunk = gridDim.x - 1 - blockIdx.x, b = chunk / a.chunks;
    int first = threadIdx.x % WARP, t = (int)(chunk % a.chunks) * CHUNK_ROWS + threadIdx.x / WARP;
    int end = min((int)(chunk % a.chunks + 1) * CHUNK_ROWS, a.tokens);
    const bool last = (first + (PACKS - 1) * WARP) * ROW_PACK < a.D;
    for (int i = threadIdx.x; i * ROW_PACK < a.D; i += THREADS) {
        scales[i] = ((const quad *)(a.scale + b * a.mod_stride))[i];
        shifts[i] = ((const quad *)(a.shift + b * a.mod_stride))[i];
        if (RESIDUAL && a.gate) gates[i] = ((const quad *)(a.gate + b * a.gate_stride))[i];
    }
    __syncthreads();
    for (; t < end; t += WARPS) {
        int64_t row = b * a.tokens + t, at = row * a.D + first * ROW_PACK;
        quad x[PACKS], y[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            x[j] = pack_of<PACKS>(a.x + at, j, last);
            if (RESIDUAL) y[j] = pack_of<PACKS>(a.y + at, j, last);
        }
        float v[PACKS][ROW_PACK], sum = 0, squares = 0;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            quad gate = {};
            if (RESIDUAL && a.gate) gate = gates[first + j * WARP];
#pragma unroll
            for (int e = 0; e < ROW_PACK; e += 2) {
                float2 u = two<T>(x[j].v[e / 2]);
                if (RESIDUAL) {
                    float2 w = two<T>(y[j].v[e / 2]);
                    float2 g = a.gate ? two<T>(gate.v[e / 2]) : make_float2(1, 1);
                    x[j].v[e / 2] = from_two<T>(u.x + g.x * w.x, u.y + g.y * w.y);
                    u = two<T>(x[j].v[e / 2]);
                }
                v[j][e] = u.x, v[j][e + 1] = u.y;
                if (j + 1 < PACKS || last) sum += u.x, sum += u.y;
            }
            if (RESIDUAL && (j + 1 < PACKS || last)) ((quad *)(a.out + at))[j * WARP] = x[j];
        }
        float average = a.rms ? 0 : warp_sum(sum) * a.inverse_D;
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            if (j + 1 < PACKS || last)
#pragma unroll
                for (int e = 0; e < ROW_PACK; e++)
                    squares += (v[j][e] - average) * (v[j][e] - average);
        float r = rsqrtf(warp_sum(squares) * a.inverse_D + a.eps), offset = -average * r;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            if (j + 1 == PACKS && !last) break;
            quad scale = scales[first + j * WARP], shift = shifts[first + j * WARP];
#pragma unroll
            for (int e = 0; e < ROW_PACK; e += 2) {
                float2 f = two<T>(scale.v[e / 2]), h = two<T>(shift.v[e / 2]);
                float n0 = v[j][e] * r + offset, n1 = v[j][e + 1] * r + offset;
                scale.v[e / 2] = from_two<T>(n0 * f.x + n0 + h.x, n1 * f.y + n1 + h.y);
            }
            ((quad *)(a.n + at))[j * WARP] = scale;
        }
        if (first == 0) {
            a.mean[row] = average;
            a.rstd[row] = r;
        }
    }
}

template <typename T, int PACKS>
static void launch(cudaStream_t stream, const struct lg_gate_residual_forward_args *before,
                   const struct lg_norm_modulate_forward_args *a)
{
    int64_t D = a->x.dim[2], chunks = ceil_div(a->x.dim[1], CHUNK_ROWS);
    unsigned blocks = (unsigned)(a->x.dim[0] * chunks);
    rows_args<T> r = {};
    r.x = (const T *)a->x.data;
    r.shift = (const T *)a->shift.data;
    r.scale = (const T *)a->scale.data;
    r.mod_stride = lg_row_stride(&a->scale, 1);
    r.n = (T *)a->y.data;
    r.mean = (float *)a->mean.data;
    r.rstd = (float *)a->rstd.data;
    r.eps = (float)a->eps;
    r.inverse_D = 1 / (float)D;
    r.tokens = (int)a->x.dim[1];
    r.chunks = (int)chunks;
    r.D = (int)D;
    r.rms = a->rms;
    if (before) {
        r.x = (const T *)before->x.data;
        r.y = (const T *)before->y.data;
        r.gate = (const T *)before->gate.data;
        r.gate_stride = lg_row_stride(&before->gate, 1);
        r.out = (T *)before->out.data;
        rows_kernel<T, PACKS, true><<<blocks, THREADS, 0, stream>>>(r);
    } else {
        rows_kernel<T, PACKS, false><<<blocks, THREADS, 0, stream>>>(r);
    }
    LG_CUDA_LAUNCHED();
}

template <typename T>
static void launch_width(cudaStream_t stream, const struct lg_gate_residual_forward_args *before,
                         const struct lg_norm_modulate_forward_args *a)
{
#define WIDTH(packs)                                                                               \
    case packs:                                                                                    \
        return launch<T, packs>(stream, before, a);
    /* clang-format off */
    switch (ceil_div(a->x.dim[2], ROW_STEP)) {
        WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6)
        WIDTH(7) WIDTH(8) WIDTH(9) WIDTH(10) WIDTH(11) WIDTH(12)
    }
    /* clang-format on */
#undef WIDTH
}

bool cuda_norm_forward_of_rows(cudaStream_t stream,
                               const struct lg_gate_residual_forward_args *before,
                               const struct lg_norm_modulate_forward_args *a)
{
    lg_dtype t = a->x.dtype;
    int64_t D = a->x.dim[2];
    const void *p[] = {a->x.data, a->y.data, a->shift.data, a->scale.data};
    if (t == LG_F32 || D > FORWARD_ROW_MAX || !a->scale.data ||
        !rows_fit(t, D, lg_row_stride(&a->scale, 1), p, 4))
        return false;
    if (before) {
        const void *q[] = {before->x.data, before->y.data, before->out.data, before->gate.data};
        if (!rows_fit(t, D, before->gate.data ? lg_row_stride(&before->gate, 1) : 0, q, 4))
            return false;
    }
    if (t == LG_BF16)
        launch_width<bf16>(stream, before, a);
    else
        launch_width<fp16>(stream, before, a);
    return true;
}
