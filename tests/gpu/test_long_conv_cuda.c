/* Convolutions with more tiles than the GPU has room for at once (see kernels/cuda/tile_conv.cu and
 * picture_conv.cu), where a block goes from tile to tile: every sample of the batch has the bits that
 * it has alone, which small batches compare with ref64 (test_ops_cuda), and its moments are those of
 * y.
 *
 * usage: test_long_conv_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { N = 27, SIDE = 64, OUT = 256, GROUPS = 32, TAPS = 3 }; /* SIDE: of y */
enum { PIXELS = SIDE * SIDE, Y_EACH = PIXELS * OUT, WIDE = OUT / GROUPS };

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;

static void *room(size_t bytes)
{
    void *p;
    gpu_need(lg_device_alloc(device, bytes, &p));
    return p;
}

static void *filled(size_t n, uint32_t seed, double scale, double offset)
{
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = scale * ((double)seed * 0x1p-31 - 1) + offset;
    }
    void *p = room(n * lg_dtype_bytes(type));
    gpu_put(stream, p, type, v, n);
    free(v);
    return p;
}

static lg_tensor part(void *data, int64_t first, int64_t n, int64_t side, int64_t channels)
{
    int64_t each = side * side * channels * (int64_t)lg_dtype_bytes(type);
    return lg_t4((char *)data + first * each, type, n, side, side, channels);
}

struct data {
    void *x, *w, *bias, *residual, *y;
    double *moments;
    int in, stride;
};

static void convolve(const struct data *d, int64_t first, int64_t n, bool residual)
{
    struct lg_conv2d_forward_args a = {
        .x = part(d->x, first, n, SIDE * d->stride, d->in),
        .w = lg_t4(d->w, type, OUT, TAPS, TAPS, d->in),
        .bias = lg_t1(d->bias, type, OUT),
        .residual = residual ? part(d->residual, first, n, SIDE, OUT) : LG_NONE,
        .y = part(d->y, first, n, SIDE, OUT),
        .moments = lg_t3(d->moments + first * GROUPS * 2, LG_F64, n, GROUPS, 2),
        .stride = d->stride,
        .top = d->stride == 1,
        .left = d->stride == 1,
        .bottom = 1,
        .right = 1};
    lg_stream *dry;
    gpu_need(lg_stream_open_dry(device, &dry));
    lg_conv2d_forward(dry, &a);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = room(bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    lg_conv2d_forward(stream, &a);
    lg_stream_sync(stream);
    lg_stream_close(&dry);
    lg_device_free(device, &scratch);
}

/* The largest error of a mean, and of a variance relative to it. */
static double moments_error(const double *y, const double *moments)
{
    double worst = 0;
    for (int g = 0; g < GROUPS; g++) {
        double mean = 0, variance = 0, count = PIXELS * WIDE;
        for (int i = 0; i < PIXELS * WIDE; i++)
            mean += y[i / WIDE * OUT + g * WIDE + i % WIDE] / count;
        for (int i = 0; i < PIXELS * WIDE; i++) {
            double d = y[i / WIDE * OUT + g * WIDE + i % WIDE] - mean;
            variance += d * d / count;
        }
        worst = fmax(worst, fabs(moments[g * 2] - mean) / sqrt(variance));
        worst = fmax(worst, fabs(moments[g * 2 + 1] - variance) / variance);
    }
    return worst;
}

static void check(const char *precision, int in, int stride, bool residual)
{
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    size_t x_each = (size_t)(PIXELS * stride * stride * in);
    struct data d = {filled(N * x_each, 1, 1, 0),
                     filled((size_t)(OUT * TAPS * TAPS * in), 2, 0.05, 0),
                     filled(OUT, 3, 1, 8), /* means far from 0 */
                     filled((size_t)N * Y_EACH, 4, 1, 0),
                     room((size_t)N * Y_EACH * lg_dtype_bytes(type)),
                     room((size_t)N * GROUPS * 2 * sizeof(double)),
                     in,
                     stride};
    convolve(&d, 0, N, residual);
    double *y = gpu_get(stream, d.y, type, (size_t)N * Y_EACH), *alone;
    double *moments = gpu_get(stream, d.moments, LG_F64, N * GROUPS * 2);
    for (int n = 0; n < N; n++) convolve(&d, n, 1, residual);
    alone = gpu_get(stream, d.y, type, (size_t)N * Y_EACH);
    double *again = gpu_get(stream, d.moments, LG_F64, N * GROUPS * 2), worst = 0;
    bool same = !memcmp(y, alone, (size_t)N * Y_EACH * sizeof *y) &&
                !memcmp(moments, again, N * GROUPS * 2 * sizeof *again);
    for (int n = 0; n < N; n++)
        worst = fmax(worst, moments_error(y + (size_t)n * Y_EACH, moments + n * GROUPS * 2));
    bool near =
        worst < 1e-5; /* sums of 256 differences in fp32, their squares: 256 2^-24 at most */
    printf("%sconvolution of %d channels in %s, stride %d%s: %s; error of the moments %.1e\n",
           same && near ? "" : "FAIL ", in, precision, stride, residual ? " with residual" : "",
           same ? "a sample alone has the same bits" : "a sample alone has other bits", worst);
    gpu_count(same);
    gpu_count(near);
    free(y), free(alone), free(moments), free(again);
    void *all[] = {d.x, d.w, d.bias, d.residual, d.y, d.moments};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]);
    lg_stream_close(&stream);
    lg_device_close(&device);
}

int main(void)
{
    check("bf16", 128, 1, true);
    check("bf16", 128, 1, false);
    check("fp16", 128, 1, true);
    check("bf16", 256, 2, false);
    check("bf16", 3, 1, false);
    check("fp16", 3, 1, false);
    return gpu_summary();
}
