/* Operations on one clip, (frames, H, W, C), but the convolution (tile_conv.cu, anygemm.cu): norms of its channels, boxes of it
 * as channels, its ends, its tiles.
 *
 * Norm: lanes that make up a row keep it in registers, 16 of them where a row has at most 128 channels of 16 bits, else a
 * warp; it is read once. Rows of other types, sizes or places are read twice, in the same order. What moves elements has one
 * thread for each that is written, but where a clip's patches are of 4 x 4, for 16, and where boxes become channels, for 16
 * bytes of each of a box's cells. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256 };
#define GRID(count) (unsigned)ceil_div(count, THREADS), THREADS, 0, lg_cuda_stream_of(s)
#define THIS_ELEMENT                                                                               \
    int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x;                                       \
    if (e >= count) return

/* ---- norm ---- */

/* In 16 bits silu by the hardware's tanh: half as many of the slow instructions. */
template <typename T> static __device__ __forceinline__ float activated(lg_act act, float x)
{
    if (sizeof(T) == 2 && act == LG_ACT_SILU) return fmaf(x / 2, tanh_for<T>(x / 2), x / 2);
    return act_of(act, x);
}
template <int LANES> static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffff, x, o);
    return x;
}

template <typename T> struct rms_args {
    const T *x, *shift, *scale; /* shift NULL: no modulation */
    T *y;
    int64_t rows;
    int D;
    float eps;
    lg_act act;
};

template <typename T, int N>
static __device__ __forceinline__ void finish(const rms_args<T> &a, int64_t row, int i, float rstd,
                                              float (&v)[N])
{
    float scale[N], shift[N];
    if (a.shift) {
        load<T, N>(a.scale + i, scale);
        load<T, N>(a.shift + i, shift);
    }
#pragma unroll
    for (int e = 0; e < N; e++) {
        v[e] *= rstd;
        if (a.shift) v[e] = fmaf(v[e], 1 + scale[e], shift[e]);
        v[e] = activated<T>(a.act, v[e]);
    }
    store<T, N>(a.y + row * a.D + i, v);
}

/* A row is PACKS packs of each of LANES lanes, at most. */
template <typename T, int LANES, int PACKS>
static __global__ void __launch_bounds__(THREADS) rms_rows_kernel(const rms_args<T> a)
{
    enum { N = PACK<T>, STEP = LANES * N };
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES;
    const int first = threadIdx.x % LANES * N;
    const bool there = row < a.rows;
    pack<T, N> in[PACKS];
    float squares = 0, v[N];
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        if (!there || first + j * STEP >= a.D) continue;
        in[j] = *reinterpret_cast<const pack<T, N> *>(a.x + row * a.D + first + j * STEP);
#pragma unroll
        for (int e = 0; e < N; e++)
            squares = fmaf(to_float(in[j].v[e]), to_float(in[j].v[e]), squares);
    }
    const float rstd = 1 / sqrtf(lanes_sum<LANES>(squares) / (float)a.D + a.eps);
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        if (!there || first + j * STEP >= a.D) continue;
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = to_float(in[j].v[e]);
        finish<T, N>(a, row, first + j * STEP, rstd, v);
    }
}
template <typename T>
static __global__ void __launch_bounds__(THREADS) rms_kernel(const rms_args<T> a)
{
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP;
    if (row >= a.rows) return;
    float squares = 0, v[1];
    for (int i = threadIdx.x % WARP; i < a.D; i += WARP) {
        const float x = to_float(a.x[row * a.D + i]);
        squares = fmaf(x, x, squares);
    }
    const float rstd = 1 / sqrtf(warp_sum(squares) / (float)a.D + a.eps);
    for (int i = threadIdx.x % WARP; i < a.D; i += WARP) {
        v[0] = to_float(a.x[row * a.D + i]);
        finish<T, 1>(a, row, i, rstd, v);
    }
}

template <typename T, int LANES, int PACKS>
static void launch_rows(cudaStream_t stream, const rms_args<T> &a)
{
    rms_rows_kernel<T, LANES, PACKS>
        <<<(unsigned)ceil_div(a.rows, THREADS / LANES), THREADS, 0, stream>>>(a);
}
void cuda_rms_act_forward(lg_stream *s, const struct lg_rms_act_forward_args *a)
{
    const int64_t rows = a->x.dim[0], D = a->x.dim[1];
    cudaStream_t stream = lg_cuda_stream_of(s);
    const bool aligned = lg_cuda_aligned_16(a->x.data) && lg_cuda_aligned_16(a->y.data) &&
                         lg_cuda_aligned_16(a->scale.data) && lg_cuda_aligned_16(a->shift.data);
    WITH_TYPE(a->x.dtype, T, {
        const rms_args<T> r = {(const T *)a->x.data,
                               (const T *)a->shift.data,
                               (const T *)a->scale.data,
                               (T *)a->y.data,
                               rows,
                               (int)D,
                               (float)a->eps,
                               a->act};
        const int64_t packs = ceil_div(D, (int64_t)WARP * PACK<T>);
        if (!aligned || D % PACK<T> || packs > 8)
            rms_kernel<T><<<(unsigned)ceil_div(rows, THREADS / WARP), THREADS, 0, stream>>>(r);
        else if (D <= 16 * PACK<T>)
            launch_rows<T, 16, 1>(stream, r);
        else if (packs == 1)
            launch_rows<T, WARP, 1>(stream, r);
        else if (packs == 2)
            launch_rows<T, WARP, 2>(stream, r);
        else if (packs <= 4)
            launch_rows<T, WARP, 4>(stream, r);
        else
            launch_rows<T, WARP, 8>(stream, r);
    })
    LG_CUDA_LAUNCHED();
}

/* ---- boxes ---- */

struct cell {
    int64_t d, h, w, c;
};
struct volume { /* (.., H, W, C) */
    int64_t H, W, C;
};
static volume volume_of(const lg_tensor &t)
{
    return {t.dim[1], t.dim[2], t.dim[3]};
}
static __device__ __forceinline__ cell cell_of(volume z, int64_t e)
{
    return {e / (z.C * z.W * z.H), e / (z.C * z.W) % z.H, e / z.C % z.W, e % z.C};
}
static __device__ __forceinline__ int64_t place(volume z, cell p)
{
    return ((p.d * z.H + p.h) * z.W + p.w) * z.C + p.c;
}
/* What channel c of boxes at p is in space. */
static __device__ __forceinline__ cell in_space(cell p, int64_t c, int t, int u)
{
    return {p.d * t + c / (u * u) % t, p.h * u + c / u % u, p.w * u + c % u, c / (u * u * t)};
}
/* Where p lies in boxes. */
static __device__ __forceinline__ cell in_depth(cell p, int t, int u)
{
    return {p.d / t, p.h / u, p.w / u, p.c * t * u * u + (p.d % t * u + p.h % u) * u + p.w % u};
}

template <typename T>
static __global__ void space_to_depth_kernel(const T *x, const T *of, T *y, volume x_z, volume of_z,
                                             volume y_z, int t, int u, int64_t count)
{
    THIS_ELEMENT;
    const cell p = cell_of(y_z, e);
    const int64_t g = of_z.C / x_z.C;
    float v = to_float(x[place(x_z, in_space(p, p.c, t, u))]), sum = 0;
    for (int64_t i = p.c * g; of && i < (p.c + 1) * g; i++)
        sum += to_float(of[place(of_z, in_space(p, i, t, u))]);
    y[e] = from_float<T>(of ? v + sum / (float)g : v);
}
/* The same where channels are whole packs: a thread has a pack of each of the K cells of a box, which it transposes, for
 * channels of boxes lie cell by cell within those of space. Where boxes of `of`, with G times as many channels, are averaged,
 * each of its packs gives K / G packs of y. Sums have the order of the kernel above. */
template <typename T, int TIME, int SPACE, int G>
static __global__ void __launch_bounds__(THREADS)
    space_to_depth_packs_kernel(const T *x, const T *of, T *y, uint32_t H, uint32_t W,
                                uint32_t packs, int64_t count)
{
    THIS_ELEMENT;
    enum { N = PACK<T>, K = TIME * SPACE * SPACE, PARTS = G ? G : 1, EACH = N * K / PARTS };
    static_assert(K % PARTS == 0 && N % PARTS == 0, "a pack of `of` gives whole packs of y");
    const uint32_t n = (uint32_t)e, c = n % packs, cell = n / packs, w = cell % W, row = cell / W,
                   h = row % H, d = row / H;
    const int64_t wide = (int64_t)W * SPACE, plane = H * SPACE * wide;
    const int64_t first = d * TIME * plane + h * SPACE * wide + w * SPACE;
    pack<T, N> in[K], mean[K];
    int64_t from[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        from[k] = first + k / (SPACE * SPACE) * plane + k / SPACE % SPACE * wide + k % SPACE;
        in[k] = *(const pack<T, N> *)(x + (from[k] * packs + c) * N);
    }
#pragma unroll
    for (int m = 0; m < PARTS; m++) {
        if (G) {
#pragma unroll
            for (int k = 0; k < K; k++)
                mean[k] = *(const pack<T, N> *)(of + ((from[k] * packs + c) * PARTS + m) * N);
        }
#pragma unroll
        for (int j = 0; j < EACH; j += N) {
            float v[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                const int at = m * EACH + j + i;
                float sum = 0;
                v[i] = to_float(in[at % K].v[at / K]);
#pragma unroll
                for (int r = (j + i) * G; r < (j + i + 1) * G; r++)
                    sum += to_float(mean[r % K].v[r / K]);
                if (G) v[i] += sum / (float)PARTS;
            }
            store<T, N>(y + (int64_t)n * N * K + m * EACH + j, v);
        }
    }
}
/* Whether it has been launched: the boxes and groups of LTX-Video's autoencoders. */
template <typename T>
static bool by_packs(cudaStream_t stream, const struct lg_space_to_depth_forward_args *a)
{
    const int64_t packs = a->x.dim[3] / PACK<T>,
                  count = lg_numel(&a->x) / (a->time * a->space * a->space * PACK<T>);
    const int G = a->mean_of.data ? (int)(a->mean_of.dim[3] / a->x.dim[3]) : 0;
    if (a->x.dim[3] % PACK<T> || count >= INT32_MAX || !lg_cuda_aligned_16(a->x.data) ||
        !lg_cuda_aligned_16(a->mean_of.data) || !lg_cuda_aligned_16(a->y.data))
        return false;
#define BOXES(TIME, SPACE, GROUP)                                                                  \
    if (a->time == TIME && a->space == SPACE && G == GROUP) {                                      \
        space_to_depth_packs_kernel<T, TIME, SPACE, GROUP>                                         \
            <<<(unsigned)ceil_div(count, THREADS), THREADS, 0, stream>>>(                          \
                (const T *)a->x.data, (const T *)a->mean_of.data, (T *)a->y.data,                  \
                (uint32_t)a->y.dim[1], (uint32_t)a->y.dim[2], (uint32_t)packs, count);             \
        return true;                                                                               \
    }
    BOXES(1, 2, 0)
    BOXES(1, 2, 1)
    BOXES(1, 2, 2)
    BOXES(2, 1, 0)
    BOXES(2, 1, 1)
    BOXES(2, 1, 2)
    BOXES(2, 2, 0)
    BOXES(2, 2, 1)
    BOXES(2, 2, 2)
    BOXES(2, 2, 4)
#undef BOXES
    return false;
}
void cuda_space_to_depth_forward(lg_stream *s, const struct lg_space_to_depth_forward_args *a)
{
    const int64_t count = lg_numel(&a->y);
    const volume of = a->mean_of.data ? volume_of(a->mean_of) : volume{1, 1, 1};
    WITH_TYPE(a->x.dtype, T, {
        if (!by_packs<T>(lg_cuda_stream_of(s), a))
            space_to_depth_kernel<<<GRID(count)>>>((const T *)a->x.data, (const T *)a->mean_of.data,
                                                   (T *)a->y.data, volume_of(a->x), of,
                                                   volume_of(a->y), a->time, a->space, count);
    })
    LG_CUDA_LAUNCHED();
}

template <typename T>
static __global__ void depth_to_space_kernel(const T *x, const T *more, T *y, volume x_z,
                                             volume more_z, volume y_z, int t, int u,
                                             int64_t dropped, int64_t count)
{
    THIS_ELEMENT;
    cell p = cell_of(y_z, e);
    p.d += dropped;
    float v = to_float(x[place(x_z, in_depth(p, t, u))]);
    if (more) {
        p.c %= more_z.C / (t * u * u);
        v += to_float(more[place(more_z, in_depth(p, t, u))]);
    }
    y[e] = from_float<T>(v);
}
void cuda_depth_to_space_forward(lg_stream *s, const struct lg_depth_to_space_forward_args *a)
{
    const int64_t count = lg_numel(&a->y), dropped = a->x.dim[0] * a->time - a->y.dim[0];
    const volume more = a->repeated.data ? volume_of(a->repeated) : volume{1, 1, 1};
    WITH_TYPE(a->x.dtype, T,
              (depth_to_space_kernel<<<GRID(count)>>>(
                  (const T *)a->x.data, (const T *)a->repeated.data, (T *)a->y.data,
                  volume_of(a->x), more, volume_of(a->y), a->time, a->space, dropped, count)))
    LG_CUDA_LAUNCHED();
}

/* ---- ends ---- */

/* A clip (C|D H W) in patches of p x p. */
struct patches {
    volume z;       /* of the patches */
    int64_t W, row; /* of the clip: its width, elements from one channel to the next */
    int p;
};
static patches patches_of(const lg_tensor &patch, const lg_tensor &clip, int p)
{
    return {volume_of(patch), clip.dim[3], lg_row_stride(&clip, 1), p};
}
static __device__ __forceinline__ int64_t in_clip(const patches &g, const cell &k, int64_t *ret_c)
{
    const int64_t p = g.p, c = k.c / (p * p), H = g.z.H * p;
    *ret_c = c;
    return c * g.row + (k.d * H + k.h * p + k.c % p) * g.W + k.w * p + k.c / p % p;
}
template <typename X, typename T>
static __device__ __forceinline__ float in_patch(X x, const T *scale, const T *shift, int64_t c)
{
    float v;
    if constexpr (sizeof(X) == 1)
        v = (float)x / 127.5f - 1;
    else
        v = to_float(x);
    return scale ? fmaf(v, to_float(scale[c]), to_float(shift[c])) : v;
}
template <typename X, typename T>
static __global__ void to_patches_kernel(const X *x, const T *scale, const T *shift, T *y,
                                         patches g, int64_t count)
{
    THIS_ELEMENT;
    int64_t c, i = in_clip(g, cell_of(g.z, e), &c);
    y[e] = from_float<T>(in_patch(x[i], scale, shift, c));
}
/* Patches of 4 x 4: a thread has one channel of one, four rows of four neighbours, which it turns round. */
enum { FOUR = 4 };
template <typename X, typename T>
static __global__ void __launch_bounds__(THREADS)
    to_patches_of_4_kernel(const X *x, const T *scale, const T *shift, T *y, patches g,
                           uint32_t channels, int64_t count)
{
    THIS_ELEMENT;
    enum { N = PACK<T>, ALL = FOUR * FOUR };
    const uint32_t n = (uint32_t)e, c = n % channels, cell = n / channels;
    const uint32_t W = (uint32_t)g.z.W, w = cell % W, row = cell / W; /* row: of all frames */
    const X *from = x + c * g.row + (int64_t)row * FOUR * g.W + w * FOUR;
    pack<X, FOUR> in[FOUR];
    float v[ALL];
#pragma unroll
    for (int i = 0; i < FOUR; i++) in[i] = *(const pack<X, FOUR> *)(from + i * g.W);
#pragma unroll
    for (int k = 0; k < ALL; k++) v[k] = in_patch(in[k % FOUR].v[k / FOUR], scale, shift, c);
#pragma unroll
    for (int k = 0; k < ALL; k += N)
        store<T, N>(y + e * ALL + k, reinterpret_cast<const float(&)[N]>(v[k]));
}
template <typename X, typename T>
static void to_patches(lg_stream *s, const struct lg_clip_to_patches_forward_args *a)
{
    const int64_t count = lg_numel(&a->y), each = FOUR * FOUR;
    const patches g = patches_of(a->y, a->x, a->patch);
    const X *x = (const X *)a->x.data;
    const T *scale = (const T *)a->scale.data, *shift = (const T *)a->shift.data;
    const bool fits = a->patch == FOUR && count / each < INT32_MAX && g.row % FOUR == 0 &&
                      (uintptr_t)x % (FOUR * sizeof(X)) == 0 && lg_cuda_aligned_16(a->y.data);
    if (fits)
        to_patches_of_4_kernel<X, T><<<GRID(count / each)>>>(
            x, scale, shift, (T *)a->y.data, g, (uint32_t)(g.z.C / each), count / each);
    else
        to_patches_kernel<X, T><<<GRID(count)>>>(x, scale, shift, (T *)a->y.data, g, count);
    LG_CUDA_LAUNCHED();
}
void cuda_clip_to_patches_forward(lg_stream *s, const struct lg_clip_to_patches_forward_args *a)
{
    WITH_TYPE(a->y.dtype, T, {
        if (a->x.dtype == LG_U8)
            to_patches<uint8_t, T>(s, a);
        else
            to_patches<T, T>(s, a);
    })
}

template <typename T>
static __global__ void from_patches_kernel(const T *x, T *y, uint8_t *levels, patches g,
                                           int64_t count)
{
    THIS_ELEMENT; /* levels in double, so that ties fall as on the other backends */
    int64_t c, i = in_clip(g, cell_of(g.z, e), &c);
    if (levels)
        levels[i] = (uint8_t)rint(fmin(fmax(((double)to_float(x[e]) + 1) * 127.5, 0.0), 255.0));
    else
        y[i] = x[e];
}
void cuda_patches_to_clip_forward(lg_stream *s, const struct lg_patches_to_clip_forward_args *a)
{
    const int64_t count = lg_numel(&a->x);
    const patches g = patches_of(a->x, a->y, a->patch);
    const bool is_levels = a->y.dtype == LG_U8;
    WITH_TYPE(a->x.dtype, T,
              (from_patches_kernel<<<GRID(count)>>>(
                  (const T *)a->x.data, is_levels ? (T *)NULL : (T *)a->y.data,
                  is_levels ? (uint8_t *)a->y.data : NULL, g, count)))
    LG_CUDA_LAUNCHED();
}

template <typename T>
static __global__ void clip_posterior_kernel(const T *x, const T *center, const T *spread, T *mean,
                                             T *logvar, int64_t q, int64_t C, int64_t cells,
                                             int64_t mean_row, int64_t logvar_row, int64_t count)
{
    THIS_ELEMENT;
    const int64_t p = e % cells, c = e / cells;
    float m = to_float(x[p * q + c]), l = to_float(x[p * q + (q == C + 1 ? C : C + c)]);
    l = l < -30 ? -30 : l > 20 ? 20 : l; /* NaN stays */
    if (spread) {
        const float deviation = to_float(spread[c]);
        m = (m - to_float(center[c])) / deviation;
        l -= 2 * logf(deviation);
    }
    mean[c * mean_row + p] = from_float<T>(m);
    logvar[c * logvar_row + p] = from_float<T>(l);
}
void cuda_clip_posterior_forward(lg_stream *s, const struct lg_clip_posterior_forward_args *a)
{
    const int64_t count = lg_numel(&a->mean), C = a->mean.dim[0];
    WITH_TYPE(a->x.dtype, T,
              (clip_posterior_kernel<<<GRID(count)>>>(
                  (const T *)a->x.data, (const T *)a->center.data, (const T *)a->spread.data,
                  (T *)a->mean.data, (T *)a->logvar.data, a->x.dim[3], C, count / C,
                  lg_row_stride(&a->mean, 1), lg_row_stride(&a->logvar, 1), count)))
    LG_CUDA_LAUNCHED();
}

/* ---- tiles ---- */

/* Planes of H x W, of which a tile is h x w from (top, left) on. */
struct tile {
    int64_t H, W, h, w, top, left;
};
static tile tile_of(const lg_tensor &part, const lg_tensor &of, int top, int left)
{
    return {of.dim[1], of.dim[2], part.dim[1], part.dim[2], top, left};
}
static __device__ __forceinline__ int64_t in_plane(const tile &z, int64_t e)
{
    return (e / (z.w * z.h) * z.H + e / z.w % z.h + z.top) * z.W + e % z.w + z.left;
}
template <typename X, typename T>
static __global__ void tile_take_kernel(const X *x, T *y, tile z, int64_t count)
{
    THIS_ELEMENT;
    if constexpr (sizeof(X) == 1)
        y[e] = from_float<T>((float)x[in_plane(z, e)] / 127.5f - 1);
    else
        y[e] = x[in_plane(z, e)];
}
void cuda_tile_take(lg_stream *s, const struct lg_tile_take_args *a)
{
    const int64_t count = lg_numel(&a->y);
    const tile z = tile_of(a->y, a->x, a->top, a->left);
    WITH_TYPE(a->y.dtype, T, {
        if (a->x.dtype == LG_U8)
            tile_take_kernel<<<GRID(count)>>>((const uint8_t *)a->x.data, (T *)a->y.data, z, count);
        else
            tile_take_kernel<<<GRID(count)>>>((const T *)a->x.data, (T *)a->y.data, z, count);
    })
    LG_CUDA_LAUNCHED();
}
template <typename T>
static __global__ void tile_add_kernel(const T *x, const float *rows, const float *columns, T *y,
                                       tile z, int64_t count)
{
    THIS_ELEMENT;
    T *to = y + in_plane(z, e);
    const float weight = rows[e / z.w % z.h] * columns[e % z.w];
    *to = from_float<T>(fmaf(weight, to_float(x[e]), to_float(*to)));
}
void cuda_tile_add(lg_stream *s, const struct lg_tile_add_args *a)
{
    const int64_t count = lg_numel(&a->x);
    WITH_TYPE(a->x.dtype, T,
              (tile_add_kernel<<<GRID(count)>>>((const T *)a->x.data, (const float *)a->rows.data,
                                                (const float *)a->columns.data, (T *)a->y.data,
                                                tile_of(a->x, a->y, a->top, a->left), count)))
    LG_CUDA_LAUNCHED();
}
