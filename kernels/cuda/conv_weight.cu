/* Gradients of 3x3 filters, stride 1, on the tensor cores (wgmma), NHWC, bf16 or fp16:
 *
 *     dw[o][i][j][c] (+)= sum over pixels p of dy[p][o] x[p + (i - top, j - left)][c]
 *
 * A tile of dw is 64 channels of dy by all nine positions by 64 channels of x: 64 x 576 sums, a warpgroup for each of
 * the three rows of positions with 64 x 192. The inner dimension comes 64 pixels at a time: a box of 8 x 8 pixels of dy
 * and the patch of 10 x 10 pixels of x around it, 21 KB by TMA for 1152 cycles of the tensor cores: so much may be read from
 * memory as often as it is (18 bytes a cycle and multiprocessor), and nothing needs a cluster. TMA fills with zeros what lies
 * outside of the pictures: the padding, and the ends of maps that are no multiple of 8.
 *
 * Both operands lie with their channels along the rows, so wgmma reads them transposed. 16 pixels are two rows of 8;
 * those of x begin at any pixel of the patch, since its rows of 128 bytes are permuted by bits of their own address,
 * and its 192 columns are three times 64 channels, one pixel further each: the three positions of a row are one product.
 * Shared memory is read at 85 bytes a cycle of 128, and written at 18.
 *
 * The work, tiles times boxes, is cut into equal ranges, one for each multiprocessor (Osama et al., "Stream-K", 2023).
 * A tile that lies within one range is written to dw; of the others each range stores its part, and a second kernel adds
 * the parts in the order of the ranges. So every sum has a fixed order, for one shape and one number of multiprocessors. */
#include "kernels/cuda/conv_weight.h"
#include "kernels/cuda/tma.cuh"

enum { SIDE = 8, PATCH = SIDE + 2, PIXELS = SIDE * SIDE, CHANNELS = 64, ROW = CHANNELS * 2 };
enum { TAPS = 3, GROUPS = TAPS, WIDE = TAPS * CHANNELS, STEP = 16, STAGES = 10 };
enum { GROUP_THREADS = 128, THREADS = GROUP_THREADS * (1 + GROUPS) };
enum { BOX_BYTES = PIXELS * ROW, PATCH_BYTES = PATCH * PATCH * ROW, PATCH_SLOT = 13 << 10 };
enum { TILE = CHANNELS * TAPS * WIDE, ADDERS = 256 };
static_assert(PATCH_BYTES <= PATCH_SLOT && PATCH_SLOT % 1024 == 0, "swizzle counts from 1024 on");

struct shared {
    /* First: compute-sanitizer takes a product's 192 columns, which share rows, for 6 KB behind each other. */
    alignas(1024) char patch[STAGES][PATCH_SLOT];
    alignas(1024) char box[STAGES][BOX_BYTES];
    uint64_t full[STAGES], empty[STAGES];
};
enum { SHARED_BYTES = sizeof(shared) };
static_assert((int)SHARED_BYTES <= (int)LG_CUDA_SHARED_HOPPER, "a block may have so much");

/* What a kernel needs to know of the ranges. */
struct work {
    int64_t units; /* tiles x boxes, a tile's boxes behind each other */
    int boxes, ranges;
    __host__ __device__ int64_t start(int64_t range) const { return range * units / ranges; }
    /* Whose unit it is. */
    __host__ __device__ int owner(int64_t unit) const
    {
        return (int)(((unit + 1) * ranges - 1) / units);
    }
};
struct problem {
    CUtensorMap dy, x;
    work w;
    int slices, in; /* tiles next to each other along x's channels; x's channels */
    int wide, high; /* boxes of a picture */
    int top, left;
    float *parts; /* (ranges, 2, TILE): of a range's first tile, and of its last */
    void *dw;
    bool accumulate;
};

/* A tile's boxes within a range. */
struct piece {
    int tile, first, last; /* boxes [first, last) */
};
static __device__ __forceinline__ piece piece_at(const work &w, int64_t unit, int64_t end)
{
    const int tile = (int)(unit / w.boxes), first = (int)(unit - (int64_t)tile * w.boxes);
    return {tile, first, (int)min((int64_t)w.boxes, end - (int64_t)tile * w.boxes)};
}
#define FOR_EACH_PIECE(w, p)                                                                       \
    for (int64_t unit_ = (w).start(blockIdx.x), end_ = (w).start(blockIdx.x + 1); unit_ < end_;)   \
        if (piece p = piece_at(w, unit_, end_); unit_ += p.last - p.first, true)

static __device__ void load_all(const problem &z, shared &s)
{
    ring<STAGES> at;
    FOR_EACH_PIECE(z.w, p)
    {
        const int o = p.tile / z.slices * CHANNELS, c = p.tile % z.slices * CHANNELS;
        for (int box = p.first; box < p.last; box++, at.next()) {
            const int n = box / (z.wide * z.high), k = box % (z.wide * z.high);
            const int w = k % z.wide * SIDE, h = k / z.wide * SIDE;
            uint64_t *full = &s.full[at.slot];
            barrier_wait(&s.empty[at.slot], at.phase ^ 1);
            barrier_expect(full, BOX_BYTES + PATCH_BYTES);
            load_map(s.box[at.slot], &z.dy, full, o, w, h, n);
            load_map(s.patch[at.slot], &z.x, full, c, w - z.left, h - z.top, n);
        }
    }
}

#define PRODUCT(type)                                                                              \
    PRODUCT_SHARED("192", type, N96, F64(d, 0) COMMA F16(d, 64) COMMA F16(d, 80), "%96", "%97",    \
                   "%98", "1, 1")
/* d (64 x 192) = or += a b. */
template <typename T>
static __device__ __forceinline__ void product(float (&d)[96], uint64_t a, uint64_t b, int add)
{
    if constexpr (__is_same(T, bf16))
        PRODUCT("bf16");
    else
        PRODUCT("f16");
}

/* A thread's sums to (64, 9, `in`): rows 16 warp + lane / 4 and 8 more, of each 8 columns the two from 2 (lane % 4) on. */
template <typename W>
static __device__ __forceinline__ void put(const float (&d)[96], W *to, int in, int group, bool add)
{
    const int warp = threadIdx.x % GROUP_THREADS / WARP, lane = threadIdx.x % WARP;
    W *row = to + (int64_t)((warp * 16 + lane / 4) * TAPS + group) * TAPS * in + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            W *at = row + (int64_t)r * 8 * TAPS * TAPS * in + j / 8 * in + j % 8 * 8;
            float v[2] = {d[j * 4 + r * 2], d[j * 4 + r * 2 + 1]};
            if (add) {
                float old[2];
                load<W, 2>(at, old);
                v[0] += old[0], v[1] += old[1];
            }
            store<W, 2>(at, v);
        }
}

template <typename T, typename W>
static __device__ __forceinline__ void multiply_all(const problem &z, shared &s)
{
    const int group = threadIdx.x / GROUP_THREADS - 1;
    const bool speaks = threadIdx.x % GROUP_THREADS == 0;
    ring<STAGES> at;
    float d[96];
    bool first_piece = true;
    FOR_EACH_PIECE(z.w, p)
    {
        int before = 0;
        for (int box = p.first; box < p.last; box++) {
            barrier_wait(&s.full[at.slot], at.phase);
            const uint64_t a = operand(shared_address(s.box[at.slot]), ROW, SIDE * ROW, 1);
            const uint64_t b = operand(shared_address(s.patch[at.slot]) + group * PATCH * ROW, ROW,
                                       PATCH * ROW, 1);
            products_begin();
#pragma unroll
            for (int k = 0; k < PIXELS / STEP; k++)
                product<T>(d, a + k * STEP * ROW / 16, b + k * (STEP / SIDE) * PATCH * ROW / 16,
                           box > p.first || k > 0);
            products_end();
            products_wait<1>();
            if (box > p.first && speaks) barrier_arrive(&s.empty[before]);
            before = at.slot;
            at.next();
        }
        products_wait<0>();
        settled(d);
        if (speaks) barrier_arrive(&s.empty[before]);
        if (p.last - p.first == z.w.boxes) {
            W *tile = (W *)z.dw + (int64_t)(p.tile / z.slices * CHANNELS) * TAPS * TAPS * z.in +
                      p.tile % z.slices * CHANNELS;
            put<W>(d, tile, z.in, group, z.accumulate);
        } else {
            float *part = z.parts + ((int64_t)blockIdx.x * 2 + !first_piece) * TILE;
            put<float>(d, part, CHANNELS, group, false);
        }
        first_piece = false;
    }
}

template <typename T, typename W>
static __global__ void __launch_bounds__(THREADS, 1)
    weight_kernel(const __grid_constant__ problem z)
{
    extern __shared__ __align__(1024) char memory[];
    shared &s = *reinterpret_cast<shared *>(memory);
    if (shared_address(memory) % 1024) __trap(); /* the swizzle counts from there */
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<40>();
        if (threadIdx.x == 0) load_all(z, s);
    } else {
        registers_take<152>();
        multiply_all<T, W>(z, s);
    }
}

/* Adds what ranges stored of a tile. grid (TILE / 4 / ADDERS, tiles) */
template <typename W>
static __global__ void __launch_bounds__(ADDERS)
    add_parts_kernel(const work w, const float *parts, W *dw, int slices, int in, bool accumulate)
{
    const int64_t from = blockIdx.y * (int64_t)w.boxes;
    const int first = w.owner(from), last = w.owner(from + w.boxes - 1);
    if (first == last) return;
    const int e = ((int)blockIdx.x * ADDERS + (int)threadIdx.x) * 4;
    const int o = e / (TILE / CHANNELS), tap = e / CHANNELS % (TAPS * TAPS), c = e % CHANNELS;
    W *to = dw + ((int64_t)((int)blockIdx.y / slices * CHANNELS + o) * (TAPS * TAPS) + tap) * in +
            (int)blockIdx.y % slices * CHANNELS + c;
    float sum[4], v[4], old[4];
    load<float, 4>(parts + ((int64_t)first * 2 + (w.start(first) < from)) * TILE + e, sum);
    for (int r = first + 1; r <= last; r++) {
        load<float, 4>(parts + (int64_t)r * 2 * TILE + e, v);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += v[i];
    }
    if (accumulate) {
        load<W, 4>(to, old);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += old[i];
    }
    store<W, 4>(to, sum);
}
static_assert(TILE % (4 * ADDERS) == 0, "");

/* ---- launching ---- */

static int boxes_along(int64_t pixels)
{
    return (int)ceil_div(pixels, (int64_t)SIDE);
}
static int64_t tiles_of(const struct lg_conv2d_backward_weight_args *a)
{
    return a->dw.dim[0] / CHANNELS * (a->dw.dim[3] / CHANNELS);
}
static work work_of(const lg_cuda_device *d, const struct lg_conv2d_backward_weight_args *a)
{
    work w;
    w.boxes = (int)a->dy.dim[0] * boxes_along(a->dy.dim[1]) * boxes_along(a->dy.dim[2]);
    w.units = tiles_of(a) * w.boxes;
    w.ranges = (int)LG_MIN(w.units, (int64_t)d->multiprocessors);
    return w;
}
bool cuda_conv_weight_fits(const lg_cuda_device *d, const struct lg_conv2d_backward_weight_args *a)
{
    return lg_cuda_is_hopper(d) && (a->x.dtype == LG_BF16 || a->x.dtype == LG_F16) &&
           a->dw.dim[1] == TAPS && a->dw.dim[2] == TAPS && a->stride == 1 &&
           a->dw.dim[0] % CHANNELS == 0 && a->dw.dim[3] % CHANNELS == 0 &&
           lg_numel(&a->dy) / PIXELS < INT32_MAX && tiles_of(a) < (1 << 16);
}
size_t cuda_conv_weight_scratch(const lg_cuda_device *d,
                                const struct lg_conv2d_backward_weight_args *a)
{
    return (size_t)work_of(d, a).ranges * 2 * TILE * sizeof(float);
}

/* Boxes of side x side pixels of 64 channels. */
static CUtensorMap boxes_of(const lg_tensor &t, int side)
{
    const uint64_t dim[] = {(uint64_t)t.dim[3], (uint64_t)t.dim[2], (uint64_t)t.dim[1],
                            (uint64_t)t.dim[0]};
    const uint32_t box[] = {CHANNELS, (uint32_t)side, (uint32_t)side, 1}, each[] = {1, 1, 1, 1};
    return describe(t, 4, dim, box, each);
}
template <typename T, typename W> static void launch(cudaStream_t stream, const problem &z)
{
    LG_CUDA(cudaFuncSetAttribute(weight_kernel<T, W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SHARED_BYTES));
    weight_kernel<T, W><<<(unsigned)z.w.ranges, THREADS, SHARED_BYTES, stream>>>(z);
    LG_CUDA_LAUNCHED();
    const dim3 grid(TILE / 4 / ADDERS, (unsigned)(z.w.units / z.w.boxes));
    add_parts_kernel<W>
        <<<grid, ADDERS, 0, stream>>>(z.w, z.parts, (W *)z.dw, z.slices, z.in, z.accumulate);
    LG_CUDA_LAUNCHED();
}
void cuda_conv_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    cudaStream_t stream = lg_cuda_stream_of(s);
    const bool wide = a->dw.dtype == LG_F32;
    problem z = {.dy = boxes_of(a->dy, SIDE),
                 .x = boxes_of(a->x, PATCH),
                 .w = work_of(lg_cuda_device_of(s), a),
                 .slices = (int)a->dw.dim[3] / CHANNELS,
                 .in = (int)a->dw.dim[3],
                 .wide = boxes_along(a->dy.dim[2]),
                 .high = boxes_along(a->dy.dim[1]),
                 .top = a->top,
                 .left = a->left,
                 .parts = (float *)s->scratch,
                 .dw = a->dw.data,
                 .accumulate = a->accumulate};
    if (a->x.dtype == LG_BF16)
        wide ? launch<bf16, float>(stream, z) : launch<bf16, bf16>(stream, z);
    else
        wide ? launch<fp16, float>(stream, z) : launch<fp16, fp16>(stream, z);
}
