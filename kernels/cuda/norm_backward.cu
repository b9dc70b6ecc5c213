/* Backward of the modulated LayerNorm in one pass, for 16-bit types and rows of at most ROW_MAX elements
 * (norm.cu has the general one, which reads dy and x twice).
 *
 * Per row n = (x - mean) rstd, g = dy (1 + scale): dx (+)= rstd (g - avg(g) - n avg(g n)); and per sample
 * dshift = sum over T of dy, dscale = sum over T of dy n.
 *
 * A block owns a sample, its 8 warps every eighth row. A lane has packs (8 elements) lane, lane + 32, ...
 * of the row, at most PACKS, and keeps both sums of its columns in registers over all its rows; at the end
 * the warps' sums are added in order. Rows come through shared memory, STAGES - 1 ahead; a lane copies
 * just what it will read itself, so no warp waits for another.
 *
 * Shared memory: 8 warps x 3 stages x (dy, x, dx) x 2560 bytes = 184,320 bytes; the sums, afterwards,
 * 2 x 8 x 5120 bytes. Bytes: 4 B T D elements when accumulating: 0.60 GB at B = 256, T = 256, D = 1152. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/norm.cuh"

enum { WARPS = 8, THREADS = WARP * WARPS, N = 8, PACKS = 5, STAGES = 3 };
enum { ROW_MAX = PACKS * WARP * N, TOKENS_MIN = 64, ROW_BYTES = ROW_MAX * 2 };
enum { DY, X, DX, ROWS };
enum { RING_BYTES = STAGES * ROWS * ROW_BYTES, SHARED_BYTES = WARPS * RING_BYTES };

template <typename T> struct one_pass_args {
    const T *dy, *x, *scale;
    const float *mean, *rstd;
    T *dx, *dshift, *dscale;
    int64_t stride;
    int tokens, D;
    bool accumulate;
};

/* Row t of the sample into a stage of the warp's ring; nothing behind the last row. */
template <typename T>
static __device__ __forceinline__ void fetch(const one_pass_args<T> &a, char *ring, int stage,
                                             int t)
{
    int lane = threadIdx.x % WARP;
    int64_t row = ((int64_t)blockIdx.x * a.tokens + t) * a.D;
    const T *from[ROWS] = {a.dy + row, a.x + row, a.dx + row};
#pragma unroll
    for (int w = 0; w < ROWS; w++) {
        if (t >= a.tokens || (w == DX && !a.accumulate)) continue;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            int i = lane + WARP * j;
            if (i * N >= a.D) continue;
            char *to = ring + (stage * ROWS + w) * ROW_BYTES + i * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(to)),
                         "l"(from[w] + i * N)
                         : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The warps' sums (WARPS, D) in order, D / N packs by the threads. */
template <typename T>
static __device__ __forceinline__ void add_warps(const float *sums, T *out, int D)
{
    for (int i = threadIdx.x; i < D / N; i += THREADS) {
        float sum[N] = {};
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int e = 0; e < N; e++) sum[e] += sums[w * ROW_MAX + i * N + e];
        store<T, N>(out + i * N, sum);
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, 1) one_pass_kernel(const one_pass_args<T> a)
{
    extern __shared__ __align__(128) char shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    char *ring = shared + warp * RING_BYTES;
    float shift[PACKS][N] = {}, scale[PACKS][N] = {}, mean = 0, rstd = 0;
    pack<T, N> modulation[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        modulation[j] = {};
        if ((lane + WARP * j) * N < a.D)
            modulation[j] =
                *(const pack<T, N> *)(a.scale + blockIdx.x * a.stride + (lane + WARP * j) * N);
    }
    for (int s = 0; s < STAGES - 1; s++) fetch(a, ring, s, warp + s * WARPS);
    int stage = 0;
    for (int t = warp, k = 0; t < a.tokens; t += WARPS, k++) {
        fetch(a, ring, (stage + STAGES - 1) % STAGES, t + (STAGES - 1) * WARPS);
        if (k % WARP == 0 && t + lane * WARPS < a.tokens) { /* of this warp's next 32 rows */
            mean = a.mean[(int64_t)blockIdx.x * a.tokens + t + lane * WARPS];
            rstd = a.rstd[(int64_t)blockIdx.x * a.tokens + t + lane * WARPS];
        }
        float average = __shfl_sync(0xffffffff, mean, k % WARP);
        float r = __shfl_sync(0xffffffff, rstd, k % WARP);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        const char *row = ring + stage * ROWS * ROW_BYTES;
        float sum_g = 0, sum_gn = 0, g[N], n[N], old[N];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            int i = lane + WARP * j;
            if (i * N >= a.D) continue;
            load<T, N>((const T *)(row + DY * ROW_BYTES) + i * N, g);
            load<T, N>((const T *)(row + X * ROW_BYTES) + i * N, n);
#pragma unroll
            for (int e = 0; e < N; e++) {
                n[e] = (n[e] - average) * r;
                shift[j][e] += g[e];
                scale[j][e] += g[e] * n[e];
                g[e] *= 1 + to_float(modulation[j].v[e]);
                sum_g += g[e];
                sum_gn += g[e] * n[e];
            }
        }
        float avg_g = warp_sum(sum_g) / (float)a.D, avg_gn = warp_sum(sum_gn) / (float)a.D;
        T *out = a.dx + ((int64_t)blockIdx.x * a.tokens + t) * a.D;
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            int i = lane + WARP * j;
            if (i * N >= a.D) continue;
            load<T, N>((const T *)(row + DY * ROW_BYTES) + i * N, g);
            load<T, N>((const T *)(row + X * ROW_BYTES) + i * N, n);
            if (a.accumulate) load<T, N>((const T *)(row + DX * ROW_BYTES) + i * N, old);
#pragma unroll
            for (int e = 0; e < N; e++) {
                float v = g[e] * (1 + to_float(modulation[j].v[e])) - avg_g;
                v = r * (v - (n[e] - average) * r * avg_gn);
                g[e] = a.accumulate ? old[e] + v : v;
            }
            store<T, N>(out + i * N, g);
        }
        stage = (stage + 1) % STAGES;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    float *sums = (float *)shared;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
#pragma unroll
        for (int e = 0; e < N; e++) {
            int at = warp * ROW_MAX + (lane + WARP * j) * N + e;
            sums[at] = shift[j][e];
            sums[WARPS * ROW_MAX + at] = scale[j][e];
        }
    __syncthreads();
    add_warps<T>(sums, a.dshift + blockIdx.x * a.stride, a.D);
    add_warps<T>(sums + WARPS * ROW_MAX, a.dscale + blockIdx.x * a.stride, a.D);
}

template <typename T>
static void launch(cudaStream_t stream, const struct lg_norm_modulate_backward_args *a)
{
    one_pass_args<T> o = {(const T *)a->dy.data,
                          (const T *)a->x.data,
                          (const T *)a->scale.data,
                          (const float *)a->mean.data,
                          (const float *)a->rstd.data,
                          (T *)a->dx.data,
                          (T *)a->dshift.data,
                          (T *)a->dscale.data,
                          a->mod_stride,
                          (int)a->x.dim[1],
                          (int)a->x.dim[2],
                          a->accumulate};
    LG_CUDA(cudaFuncSetAttribute(one_pass_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SHARED_BYTES));
    one_pass_kernel<T><<<(unsigned)a->x.dim[0], THREADS, SHARED_BYTES, stream>>>(o);
    LG_CUDA_LAUNCHED();
}
bool cuda_norm_backward_in_one_pass(cudaStream_t stream,
                                    const struct lg_norm_modulate_backward_args *a)
{
    if (a->x.dtype == LG_F32 || a->x.dim[2] > ROW_MAX || a->x.dim[1] < TOKENS_MIN) return false;
    if (a->x.dtype == LG_BF16)
        launch<bf16>(stream, a);
    else
        launch<fp16>(stream, a);
    return true;
}
