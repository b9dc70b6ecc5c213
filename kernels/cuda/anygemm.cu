/* Sums of products of any shape, layout and alignment, on the ordinary cores: the matrix product that
 * cuBLASLt is not asked for, and the convolution that cuDNN does not do.
 *
 * Products: a block of 256 threads makes a tile of 64 x 64, 4 x 4 a thread; 16 of the inner dimension
 * at a time go through shared memory (8 KB). The sum over the inner dimension is in its order. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/group_norm.h"
#include "kernels/cuda/picture_conv.h"
#include "kernels/cuda/tile_conv.h"

enum { THREADS = 256, TILE = 64, DEEP = 16, EACH = 4 };

/* Tile (rows r0.., columns c0..) of left(row, k) right(column, k), summed over k < depth. The two are
 * functions that return 0 outside. */
template <typename L, typename R>
static __device__ void tile_product(int64_t r0, int64_t c0, int64_t depth, L left, R right,
                                    float (&sum)[EACH][EACH])
{
    __shared__ float l[DEEP][TILE + 1], r[DEEP][TILE + 1];
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int64_t k0 = 0; k0 < depth; k0 += DEEP) {
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * DEEP; i += THREADS) {
            int k = i % DEEP, row = i / DEEP;
            l[k][row] = k0 + k < depth ? left(r0 + row, k0 + k) : 0;
            r[k][row] = k0 + k < depth ? right(c0 + row, k0 + k) : 0;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEEP; k++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(l[k][ty + 16 * i], r[k][tx + 16 * j], sum[i][j]);
    }
}
/* Calls put(row, column, value) for the values of this thread. */
template <typename P>
static __device__ void put_tile(int64_t r0, int64_t c0, const float (&sum)[EACH][EACH], P put)
{
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) put(r0 + ty + 16 * i, c0 + tx + 16 * j, sum[i][j]);
}

/* ---- products ---- */

template <typename T, typename W>
static __global__ void __launch_bounds__(THREADS) gemm_kernel(const struct cuda_any_gemm g)
{
    const T *a = (const T *)g.a, *b = (const T *)g.b, *bias = (const T *)g.bias;
    W *d = (W *)g.d;
    int64_t m0 = (int64_t)blockIdx.x * TILE, n0 = (int64_t)blockIdx.y * TILE;
    float sum[EACH][EACH] = {};
    tile_product(
        m0, n0, g.k,
        [&](int64_t m, int64_t k) { return m < g.m ? to_float(a[m * g.sa_m + k * g.sa_k]) : 0; },
        [&](int64_t n, int64_t k) { return n < g.n ? to_float(b[n * g.sb_n + k * g.sb_k]) : 0; },
        sum);
    put_tile(m0, n0, sum, [&](int64_t m, int64_t n, float v) {
        if (m >= g.m || n >= g.n) return;
        if (bias) v += to_float(bias[n]);
        if (g.accumulate) v += to_float(d[m * g.ldd + n]);
        d[m * g.ldd + n] = from_float<W>(v);
    });
}
void cuda_any_gemm(cudaStream_t stream, const struct cuda_any_gemm *g)
{
    dim3 grid((unsigned)ceil_div(g->m, TILE), (unsigned)ceil_div(g->n, TILE));
    WITH_TYPES(g->in, g->out, T, W, (gemm_kernel<T, W><<<grid, THREADS, 0, stream>>>(*g)))
    LG_CUDA_LAUNCHED();
}

/* ---- convolution ---- */

/* Over time where t > 1: pictures are frames of one clip. */
struct conv {
    int H, W, Ci, Ho, Wo, Co, t, kh, kw, stride_time, stride, top, left;
    int64_t pixels; /* N Ho Wo */
};
/* Rows: output pixels; columns: output channels; inner dimension: (t, kh, kw, Ci). */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    conv_kernel(const T *x, const T *w, const T *bias, const T *residual, T *y, const conv z)
{
    int64_t p0 = (int64_t)blockIdx.x * TILE, c0 = (int64_t)blockIdx.y * TILE;
    int depth = z.t * z.kh * z.kw * z.Ci;
    float sum[EACH][EACH] = {};
    tile_product(
        p0, c0, depth,
        [&](int64_t p, int64_t k) -> float {
            int c = (int)k % z.Ci, j = (int)k / z.Ci % z.kw, i = (int)k / z.Ci / z.kw % z.kh;
            int h = (int)(p / z.Wo % z.Ho) * z.stride + i - z.top;
            int v = (int)(p % z.Wo) * z.stride + j - z.left;
            if (p >= z.pixels || h < 0 || h >= z.H || v < 0 || v >= z.W) return 0;
            int64_t n = p / ((int64_t)z.Ho * z.Wo) * z.stride_time + k / z.Ci / (z.kw * z.kh);
            return to_float(x[((n * z.H + h) * z.W + v) * z.Ci + c]);
        },
        [&](int64_t c, int64_t k) -> float { return c < z.Co ? to_float(w[c * depth + k]) : 0; },
        sum);
    put_tile(p0, c0, sum, [&](int64_t p, int64_t c, float v) {
        if (p >= z.pixels || c >= z.Co) return;
        v += to_float(bias[c]);
        if (residual) v += to_float(residual[p * z.Co + c]);
        y[p * z.Co + c] = from_float<T>(v);
    });
}
static void any_conv(cudaStream_t stream, const struct lg_conv3d_forward_args *a, const conv &z)
{
    dim3 grid((unsigned)ceil_div(z.pixels, TILE), (unsigned)ceil_div(z.Co, TILE));
    WITH_TYPE(a->x.dtype, T,
              (conv_kernel<T><<<grid, THREADS, 0, stream>>>(
                  (const T *)a->x.data, (const T *)a->w.data, (const T *)a->bias.data,
                  (const T *)a->residual.data, (T *)a->y.data, z)))
    LG_CUDA_LAUNCHED();
}
void cuda_any_conv(cudaStream_t stream, const struct lg_conv2d_forward_args *a)
{
    const conv z = {(int)a->x.dim[1],
                    (int)a->x.dim[2],
                    (int)a->x.dim[3],
                    (int)a->y.dim[1],
                    (int)a->y.dim[2],
                    (int)a->y.dim[3],
                    1,
                    (int)a->w.dim[1],
                    (int)a->w.dim[2],
                    1,
                    a->stride,
                    a->top,
                    a->left,
                    lg_cuda_rows(&a->y)};
    struct lg_conv3d_forward_args of = {};
    of.x = a->x, of.w = a->w, of.bias = a->bias, of.residual = a->residual, of.y = a->y;
    any_conv(stream, &of, z);
}
void cuda_any_conv3d(cudaStream_t stream, const struct lg_conv3d_forward_args *a)
{
    const conv z = {(int)a->x.dim[1], (int)a->x.dim[2],   (int)a->x.dim[3], (int)a->y.dim[1],
                    (int)a->y.dim[2], (int)a->y.dim[3],   (int)a->w.dim[1], (int)a->w.dim[2],
                    (int)a->w.dim[3], a->stride_time,     a->stride,        a->pad,
                    a->pad,           lg_cuda_rows(&a->y)};
    any_conv(stream, a, z);
}

/* Who does it. */
enum conv_kind { TILES, PICTURES, LIBRARY };
static conv_kind kind_of(const lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    return cuda_tile_conv_fits(d, a) ? TILES : cuda_picture_conv_fits(a) ? PICTURES : LIBRARY;
}
/* Mean and variance need even groups of channels to come from the convolution's own sums. */
static bool own_sums(const lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    conv_kind kind = kind_of(d, a);
    return a->mean_var.rank && a->y.dim[3] / a->mean_var.dim[1] % 2 == 0 &&
           (kind == TILES || (kind == PICTURES && cuda_picture_conv_sums(a)));
}
static size_t tile_sums_bytes(const struct lg_conv2d_forward_args *a)
{
    return (size_t)(a->y.dim[0] * cuda_conv_tiles(a) * a->y.dim[3]) * sizeof(float);
}

size_t cuda_conv2d_forward_scratch(lg_cuda_device *d, const struct lg_conv2d_forward_args *a)
{
    size_t bytes = kind_of(d, a) == LIBRARY ? lg_cudnn_conv2d_scratch(d, a) : 0;
    if (!a->mean_var.rank) return bytes;
    return LG_MAX(bytes, own_sums(d, a) ? tile_sums_bytes(a) : cuda_group_mean_var_scratch(&a->y));
}
/* factors: as cuda_tile_conv's */
static void convolve(lg_stream *s, const struct lg_conv2d_forward_args *a, const float *factors)
{
    const lg_cuda_device *d = lg_cuda_device_of(s);
    bool summed = a->mean_var.data && own_sums(d, a);
    float *sums = summed ? (float *)s->scratch : nullptr;
    conv_kind kind = kind_of(d, a);
    if (kind == TILES)
        cuda_tile_conv(s, a, factors, sums);
    else if (kind == PICTURES)
        cuda_picture_conv(s, a, sums);
    else if (!lg_cudnn_conv2d(s, a))
        cuda_any_conv(lg_cuda_stream_of(s), a);
    if (summed)
        cuda_group_mean_var_of_sums(s, sums, cuda_conv_tiles(a), a->y, a->mean_var);
    else if (a->mean_var.data)
        cuda_group_mean_var(s, a->y, a->mean_var);
}
void cuda_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    convolve(s, a, nullptr);
}

/* ---- over time ---- */

/* The convolution alone; where y is not wanted, with normed as its place. */
static struct lg_conv3d_forward_args bare(const struct lg_conv3d_forward_args *a)
{
    struct lg_conv3d_forward_args conv = *a;
    if (!conv.y.rank) conv.y = a->normed;
    conv.normed = LG_NONE;
    return conv;
}
size_t cuda_conv3d_forward_scratch(lg_cuda_device *d, const struct lg_conv3d_forward_args *a)
{
    const struct lg_conv3d_forward_args conv = bare(a);
    if (cuda_tile_conv3d_norms(d, a) || cuda_tile_conv3d_fits(d, &conv)) return 0;
    return lg_cudnn_conv3d_scratch(d, &conv);
}
void cuda_conv3d_forward(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    const lg_cuda_device *d = lg_cuda_device_of(s);
    if (cuda_tile_conv3d_norms(d, a)) return cuda_tile_conv3d(s, a);
    const struct lg_conv3d_forward_args conv = bare(a);
    if (cuda_tile_conv3d_fits(d, &conv))
        cuda_tile_conv3d(s, &conv);
    else if (!lg_cudnn_conv3d(s, &conv))
        cuda_any_conv3d(lg_cuda_stream_of(s), &conv);
    if (!a->normed.data) return;
    const int64_t D = conv.y.dim[3], rows = lg_numel(&conv.y) / D;
    struct lg_rms_act_forward_args norm = {};
    norm.x = lg_t2(conv.y.data, conv.y.dtype, rows, D);
    norm.y = lg_t2(a->normed.data, conv.y.dtype, rows, D);
    norm.eps = a->eps;
    norm.act = a->act;
    cuda_rms_act_forward(s, &norm);
}

/* ---- a norm, then a convolution ---- */

/* Scratch where the convolution normalises: the convolution's or cuda_group_mean_var's, factors, means and
 * variances. */
struct norm_room {
    size_t factors, mean_var, bytes; /* where they begin */
};
static norm_room room_of(lg_cuda_device *d, const struct lg_norm_conv2d_forward_args *a)
{
    const lg_tensor &x = a->norm.x;
    size_t first = cuda_conv2d_forward_scratch(d, &a->conv);
    if (!a->norm.mean_var.rank) first = LG_MAX(first, cuda_group_mean_var_scratch(&x));
    norm_room r = {.factors = lg_cuda_round_up(first)};
    r.mean_var = r.factors + lg_cuda_round_up((size_t)(x.dim[0] * 2 * x.dim[3]) * sizeof(float));
    r.bytes = r.mean_var + (size_t)(x.dim[0] * a->norm.groups * 2) * sizeof(double);
    return r;
}
/* Every tile of channels normalises all of x again: with more of them it is better done before. */
enum { NORMED_OUT_MAX = 256, NORMED_OUT_MULTIPLE = 128 };
static bool on_the_way(const lg_cuda_device *d, const struct lg_norm_conv2d_forward_args *a)
{
    return a->norm.act == LG_ACT_SILU && a->conv.stride == 1 && kind_of(d, &a->conv) == TILES &&
           a->conv.y.dim[3] <= NORMED_OUT_MAX && a->conv.y.dim[3] % NORMED_OUT_MULTIPLE == 0;
}

size_t cuda_norm_conv2d_forward_scratch(lg_cuda_device *d,
                                        const struct lg_norm_conv2d_forward_args *a)
{
    if (on_the_way(d, a)) return room_of(d, a).bytes;
    return LG_MAX(cuda_group_norm_scratch(&a->norm), cuda_conv2d_forward_scratch(d, &a->conv));
}
void cuda_norm_conv2d_forward(lg_stream *s, const struct lg_norm_conv2d_forward_args *a)
{
    struct lg_conv2d_forward_args conv = a->conv;
    if (!on_the_way(lg_cuda_device_of(s), a)) {
        cuda_group_norm_forward(s, &a->norm);
        cuda_conv2d_forward(s, &conv);
        return;
    }
    norm_room room = room_of(lg_cuda_device_of(s), a);
    char *scratch = (char *)s->scratch;
    lg_tensor mean_var = a->norm.mean_var;
    if (!mean_var.data) {
        mean_var = lg_t3(scratch + room.mean_var, LG_F64, a->norm.x.dim[0], a->norm.groups, 2);
        cuda_group_mean_var(s, a->norm.x, mean_var);
    }
    float *factors = (float *)(scratch + room.factors);
    cuda_norm_factors(s, &a->norm, mean_var, factors);
    conv.x = a->norm.x;
    convolve(s, &conv, factors);
}
