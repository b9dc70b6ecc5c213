/* Convolutions 3x3 of stride 1 from 3 channels, NHWC, bf16 or fp16: an encoder's first.
 *
 *     y[n][p][c] = sum over k of a[n][p][k] w[c][k] + bias[c], and sums over y for the GroupNorm
 *
 * k runs over 3 rows of taps; the 3 pixels of a row are 9 neighbours in memory. 10 places a row
 * and 2 more make 32, two products of m16n8k16: place 9 of a row is 0, and of the last two one is 1
 * in a and the bias in w. So the tensor cores do all of it, and the time is that of writing y: at
 * 256 pixels and 128 channels 16 MiB a picture; its own 384 KiB come from the caches.
 *
 * A warp computes tiles of 128 pixels x 64 channels, in strips of 16 pixels. It keeps the weights
 * and the sums in registers, takes x from global memory (a strip ahead) and needs no other warp. Of
 * a product a thread gets two neighbouring columns of two pixels; which channel a column is was
 * chosen such that four products give it 8 channels in a row: 16 bytes, and 4 threads fill two
 * sectors.
 *
 * Sums: as tile_conv.cu's, of 128 pixels and 2 channels. Differences from the tile's first pixel,
 * so that a mean far from 0 costs no digits; in fp32, 32 terms a thread, then 8 threads by halves.
 *
 * A tile's bits depend on its pixels alone. */
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/picture_conv.h"

enum { THREADS = 256, WARPS = THREADS / WARP, BLOCKS = 2 }; /* BLOCKS: a multiprocessor */
enum { IN = 3, TAPS = 3, RUN = TAPS * IN, DEPTH = 32, RUN_PAIRS = (RUN + 1) / 2 };
enum { SLICE = 64, TILES = SLICE / 8, STRIP = 16, STRIPS = 8, PIXELS = STRIP * STRIPS };
enum { PAIRS = DEPTH / 8 }; /* pairs of k that a thread has of a pixel: lane % 4 + 4 i */

struct problem {
    const void *x, *w, *bias;
    void *y;
    float2 *sums; /* (N, tiles, out / 2), or NULL */
    int64_t tiles_all;
    int tiles, slices; /* of a picture; of the channels */
    int H, W, high, wide, out, top, left;
};

static __device__ __forceinline__ uint32_t pair_of(uint16_t first, uint16_t second)
{
    return (uint32_t)second << 16 | first;
}

/* ---- what goes in ---- */

/* Where in the 3 x 9 values of a pixel the thread's pairs lie. Place 9 of a row is none; row `TAPS`
 * is the bias's pair. */
struct pairs {
    int row[PAIRS], at[PAIRS];
    int place[PAIRS];           /* in x, from a patch's corner */
    uint32_t keep[PAIRS], also; /* what of a pair counts, and what the last one has besides */
};
template <typename T> static __device__ __forceinline__ pairs pairs_of(const problem &z, int lane)
{
    pairs r;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int pair = lane % 4 + 4 * i;
        r.row[i] = pair / RUN_PAIRS;
        r.at[i] = pair % RUN_PAIRS * 2;
        r.place[i] = r.row[i] % TAPS * z.W * IN + r.at[i];
        r.keep[i] = r.row[i] == TAPS ? 0 : r.at[i] + 1 < RUN ? 0xffffffff : 0xffff;
    }
    r.also = r.row[PAIRS - 1] == TAPS ? from_two<T>(1, 0) : 0;
    return r;
}

/* The products' right operand. Column c of tile j is channel 32 (j / 4) + 8 (c / 2) + 2 (j % 4) +
 * c % 2 of the slice. */
static __device__ __forceinline__ void load_weights(const problem &z, int slice, int lane,
                                                    const pairs &my, uint32_t (&b)[TILES][PAIRS])
{
    const uint16_t *w = (const uint16_t *)z.w, *bias = (const uint16_t *)z.bias;
    int column = lane / 4;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        int c = slice * SLICE + j / 4 * 32 + column / 2 * 8 + j % 4 * 2 + column % 2;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const uint16_t *from = w + (c * TAPS + my.row[i]) * RUN + my.at[i];
            bool two = my.at[i] + 1 < RUN;
            b[j][i] = my.row[i] == TAPS ? bias[c] : pair_of(from[0], two ? from[1] : (uint16_t)0);
        }
    }
}

/* A pixel of y, as row and column of its picture. */
struct pixel {
    int h, w;
    __device__ __forceinline__ void on(int by, int wide)
    {
        for (w += by; w >= wide; w -= wide) h++;
    }
};

/* What of x the thread takes for its two pixels of a strip, `raw`: all three rows of both. */
typedef uint16_t raw[2][2 * PAIRS];

/* Any strip; p: its first pixel. 0 outside of the picture x. */
static __device__ __forceinline__ void fetch_any(const problem &z, const uint16_t *x, pixel p,
                                                 int lane, const pairs &my, raw &ret)
{
    int row_length = z.W * IN;
    p.on(lane / 4, z.wide);
#pragma unroll
    for (int r = 0; r < 2; r++, p.on(STRIP / 2, z.wide)) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int h = p.h - z.top + my.row[i], at = (p.w - z.left) * IN + my.at[i];
            bool inside = (unsigned)h < (unsigned)z.H && my.row[i] < TAPS;
            const uint16_t *from = x + h * row_length + at;
            bool first = inside && (unsigned)at < (unsigned)row_length;
            bool second = inside && (unsigned)(at + 1) < (unsigned)row_length;
            ret[r][2 * i] = first ? from[0] : (uint16_t)0;
            ret[r][2 * i + 1] = second ? from[1] : (uint16_t)0;
        }
    }
}
/* A strip of one row whose patches lie inside, with a pixel to spare. */
static __device__ __forceinline__ void fetch_inside(const problem &z, const uint16_t *x,
                                                    const pixel &p, int lane, const pairs &my,
                                                    raw &ret)
{
    const uint16_t *corner = x + ((p.h - z.top) * z.W + p.w - z.left + lane / 4) * IN;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint16_t *from = corner + my.place[i];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            ret[r][2 * i] = from[r * STRIP / 2 * IN];
            ret[r][2 * i + 1] = from[r * STRIP / 2 * IN + 1];
        }
    }
}
static __device__ __forceinline__ void fetch(const problem &z, const uint16_t *x, const pixel &p,
                                             int lane, const pairs &my, raw &ret)
{
    bool inside = p.h >= z.top && p.h - z.top + TAPS <= z.H && p.w >= z.left &&
                  p.w - z.left + STRIP + TAPS <= z.W && p.w + STRIP <= z.wide;
    if (inside)
        fetch_inside(z, x, p, lane, my, ret);
    else
        fetch_any(z, x, p, lane, my, ret);
}
/* The products' left operand: k 0 to 15, and 16 to 31. */
static __device__ __forceinline__ void merge(const raw &from, const pairs &my,
                                             uint32_t (&ret)[2][4])
{
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t v = pair_of(from[r][2 * i], from[r][2 * i + 1]) & my.keep[i];
            ret[i / 2][i % 2 * 2 + r] = i == PAIRS - 1 ? v | my.also : v;
        }
}

/* ---- what comes out ---- */

/* Of the thread's pixels, each pair of channels. */
struct tile_sums {
    float first[TILES], sum[TILES], squares[TILES]; /* sum, squares: of y - first */
};

/* Two pixels' channels of four tiles. */
template <typename T>
static __device__ __forceinline__ void put(const float (&d)[4][4], T *const (&y)[2],
                                           const bool (&there)[2], quad (&ret)[2])
{
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) ret[r].v[j] = from_two<T>(d[j][2 * r], d[j][2 * r + 1]);
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (there[r]) *reinterpret_cast<quad *>(y[r]) = ret[r];
}
/* begin: these are the tile's first pixels. */
template <typename T>
static __device__ __forceinline__ void add(const quad (&y)[2], int half, bool begin, int lane,
                                           tile_sums &s)
{
    if (begin)
#pragma unroll
        for (int j = 0; j < 4; j++)
            s.first[half * 4 + j] = __shfl_sync(0xffffffff, two<T>(y[0].v[j]).x, lane % 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int t = half * 4 + j;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 u = two<T>(y[r].v[j]);
            u.x -= s.first[t], u.y -= s.first[t];
            s.sum[t] += u.x + u.y;
            s.squares[t] = fmaf(u.x, u.x, fmaf(u.y, u.y, s.squares[t]));
        }
    }
}

/* to: the tile's pairs of the slice; tile j's of lane q (of 4) is pair 16 (j / 4) + 4 q + j % 4. */
static __device__ __forceinline__ void put_sums(tile_sums &s, int lane, float2 *to)
{
    const double count = PIXELS * 2;
    float first = 0;
    int j = lane / 4;
#pragma unroll
    for (int i = 0; i < TILES; i++)
        if (i == j) first = s.first[i];
    double sum = sum_of_eight(s.sum, lane), squares = sum_of_eight(s.squares, lane);
    to[j / 4 * 16 + lane % 4 * 4 + j % 4] = {(float)(first + sum / count),
                                             (float)(squares - sum * sum / count)};
}

/* ---- the kernel ---- */

/* Block b does slice b % slices of the channels, each of its warps every n-th tile. Grid: a multiple
 * of slices. */
template <typename T, bool SUMS>
__global__ void __launch_bounds__(THREADS, BLOCKS) picture_conv_kernel(const problem z)
{
    int lane = threadIdx.x % WARP, slice = blockIdx.x % z.slices;
    int64_t walkers = (int64_t)gridDim.x / z.slices * WARPS;
    int64_t at = (int64_t)blockIdx.x / z.slices * WARPS + threadIdx.x / WARP;
    int area = z.high * z.wide;
    const pairs my = pairs_of<T>(z, lane);
    uint32_t b[TILES][PAIRS];
    load_weights(z, slice, lane, my, b);
    for (; at < z.tiles_all; at += walkers) {
        int64_t n = at / z.tiles;
        int first = (int)(at % z.tiles) * PIXELS;
        const uint16_t *x = (const uint16_t *)z.x + n * z.H * z.W * IN;
        T *y = (T *)z.y + (n * area + first + lane / 4) * z.out + slice * SLICE + lane % 4 * 8;
        pixel p = {first / z.wide, first % z.wide};
        tile_sums sums;
#pragma unroll
        for (int j = 0; j < TILES; j++) sums.sum[j] = sums.squares[j] = 0;
        raw from;
        fetch(z, x, p, lane, my, from);
#pragma unroll 1
        for (int s = 0; s < STRIPS; s++, y += (int64_t)STRIP * z.out) {
            uint32_t a[2][4];
            merge(from, my, a);
            if (s + 1 < STRIPS) {
                p.on(STRIP, z.wide);
                fetch(z, x, p, lane, my, from);
            }
            int here = first + s * STRIP + lane / 4; /* tiles with sums are whole */
            bool there[2] = {SUMS || here < area, SUMS || here + STRIP / 2 < area};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float d[4][4] = {};
                quad out[2];
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int k = 0; k < 2; k++) product<T>(d[j], a[k], &b[half * 4 + j][2 * k]);
                T *const to[2] = {y + half * 32, y + half * 32 + STRIP / 2 * (int64_t)z.out};
                put<T>(d, to, there, out);
                if (SUMS) add<T>(out, half, s == 0, lane, sums);
            }
        }
        if (SUMS) put_sums(sums, lane, z.sums + (at * z.slices + slice) * (SLICE / 2));
    }
}

/* ---- launching ---- */

bool cuda_picture_conv_fits(const struct lg_conv2d_forward_args *a)
{
    return (a->x.dtype == LG_BF16 || a->x.dtype == LG_F16) && a->x.dim[3] == IN &&
           a->w.dim[1] == TAPS && a->w.dim[2] == TAPS && a->stride == 1 && !a->residual.rank &&
           a->y.dim[3] % SLICE == 0 && a->y.dim[3] < 1 << 16 &&
           a->x.dim[1] * a->x.dim[2] < 1 << 28 && a->y.dim[1] * a->y.dim[2] < 1 << 28;
}
bool cuda_picture_conv_sums(const struct lg_conv2d_forward_args *a)
{
    return a->y.dim[1] * a->y.dim[2] % PIXELS == 0;
}

template <typename T> static void launch(lg_stream *s, const problem &z)
{
    int64_t most = (int64_t)lg_cuda_device_of(s)->multiprocessors * BLOCKS / z.slices;
    int64_t walks = ceil_div(z.tiles_all, WARPS); /* of blocks, each with one slice */
    if (most > 0 && walks > most) walks = most;
    unsigned grid = (unsigned)(walks * z.slices);
    cudaStream_t stream = lg_cuda_stream_of(s);
    if (z.sums)
        picture_conv_kernel<T, true><<<grid, THREADS, 0, stream>>>(z);
    else
        picture_conv_kernel<T, false><<<grid, THREADS, 0, stream>>>(z);
    LG_CUDA_LAUNCHED();
}

void cuda_picture_conv(lg_stream *s, const struct lg_conv2d_forward_args *a, float *sums)
{
    int64_t tiles = ceil_div(a->y.dim[1] * a->y.dim[2], PIXELS);
    problem z = {.x = a->x.data,
                 .w = a->w.data,
                 .bias = a->bias.data,
                 .y = a->y.data,
                 .sums = (float2 *)sums,
                 .tiles_all = a->y.dim[0] * tiles,
                 .tiles = (int)tiles,
                 .slices = (int)(a->y.dim[3] / SLICE),
                 .H = (int)a->x.dim[1],
                 .W = (int)a->x.dim[2],
                 .high = (int)a->y.dim[1],
                 .wide = (int)a->y.dim[2],
                 .out = (int)a->y.dim[3],
                 .top = a->top,
                 .left = a->left};
    a->x.dtype == LG_BF16 ? launch<bf16>(s, z) : launch<fp16>(s, z);
}
