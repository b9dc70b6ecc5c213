/* Convolutions with more tiles than the GPU has room for at once (see kernels/cuda/tile_conv.cu and
 * picture_conv.cu), where a block goes from tile to tile: every sample of the batch has the bits that
 * it has alone, its mean_var are those of y, and y is right at some places of each sample: its
 * corners, edges and others. On a path where the library convolves more than 3 channels, which chooses an
 * algorithm for each batch, a sample alone may have other bits there. (test_ops_cuda compares all of y with ref64, in small batches.)
 *
 * usage: test_long_conv_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { SIDE = 64, OUT = 256, GROUPS = 32, TAPS = 3 }; /* SIDE: of y */
enum { PIXELS = SIDE * SIDE, Y_EACH = PIXELS * OUT, WIDE = OUT / GROUPS, BIAS = 8 };

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;

/* Whether the kernel is ours, whose blocks go from tile to tile. */
static bool own(int in)
{
    return in == 3 || !strcmp(lg_device_isa(device), "sm_90a");
}

/* Samples. Under compute-sanitizer, where a convolution takes minutes, 9: still more tiles than a GPU of 132
 * multiprocessors has room for at once; or 2, where blocks do not go from tile to tile. */
static int samples(int in)
{
    return !gpu_sanitized() || in == 3 ? 27 : own(in) ? 9 : 2;
}

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
    int N;
    void *x, *w, *bias, *residual, *y, *gain, *normed;
    double *mean_var;
    int in, stride;
    bool norm, add;
};

static void run(lg_stream *s, const struct lg_norm_conv2d_forward_args *a, bool norm)
{
    if (norm)
        lg_norm_conv2d_forward(s, a);
    else
        lg_conv2d_forward(s, &a->conv);
}

static void convolve(const struct data *d, int64_t first, int64_t n)
{
    struct lg_norm_conv2d_forward_args a = {0};
    a.norm =
        (struct lg_group_norm_forward_args){.x = part(d->x, first, n, SIDE * d->stride, d->in),
                                            .w = lg_t1(d->gain, type, d->in),
                                            .b = lg_t1(d->gain, type, d->in),
                                            .y = part(d->normed, first, n, SIDE * d->stride, d->in),
                                            .groups = GROUPS,
                                            .eps = 1e-6,
                                            .act = LG_ACT_SILU};
    a.conv = (struct lg_conv2d_forward_args){
        .x = d->norm ? a.norm.y : a.norm.x,
        .w = lg_t4(d->w, type, OUT, TAPS, TAPS, d->in),
        .bias = lg_t1(d->bias, type, OUT),
        .residual = d->add ? part(d->residual, first, n, SIDE, OUT) : LG_NONE,
        .y = part(d->y, first, n, SIDE, OUT),
        .mean_var = lg_t3(d->mean_var + first * GROUPS * 2, LG_F64, n, GROUPS, 2),
        .stride = d->stride,
        .top = d->stride == 1,
        .left = d->stride == 1,
        .bottom = 1,
        .right = 1};
    lg_stream *dry;
    gpu_need(lg_stream_open_dry(device, &dry));
    run(dry, &a, d->norm);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = gpu_scratch(device, bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    run(stream, &a, d->norm);
    lg_stream_sync(stream);
    lg_stream_close(&dry);
    if (!gpu_sanitized()) lg_device_free(device, &scratch);
}

/* The largest error of a mean, and of a variance relative to it. */
static double moments_error(const double *y, const double *mean_var)
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
        worst = fmax(worst, fabs(mean_var[g * 2] - mean) / sqrt(variance));
        worst = fmax(worst, fabs(mean_var[g * 2 + 1] - variance) / variance);
    }
    return worst;
}

/* silu(GroupNorm(x)) in place; x: one sample */
static void normalise(double *x, const double *gain, int64_t pixels, int in)
{
    int wide = in / GROUPS;
    for (int g = 0; g < GROUPS; g++) {
        double mean = 0, variance = 0, count = (double)(pixels * wide);
        for (int64_t i = 0; i < pixels * wide; i++)
            mean += x[i / wide * in + g * wide + i % wide] / count;
        for (int64_t i = 0; i < pixels * wide; i++) {
            double d = x[i / wide * in + g * wide + i % wide] - mean;
            variance += d * d / count;
        }
        for (int64_t i = 0; i < pixels * wide; i++) {
            int64_t c = g * wide + i % wide, at = i / wide * in + c;
            double v = (x[at] - mean) / sqrt(variance + 1e-6) * gain[c] + gain[c];
            x[at] = v / (1 + exp(-v));
        }
    }
}

/* What a sample's y is without bias and residual; x and w on the host. */
static double point(const struct data *d, const double *x, const double *w, int h, int v, int co)
{
    int side = SIDE * d->stride, before = d->stride == 1;
    double sum = 0;
    for (int tap = 0; tap < TAPS * TAPS; tap++) {
        int i = h * d->stride + tap / TAPS - before, j = v * d->stride + tap % TAPS - before;
        if (i < 0 || j < 0 || i >= side || j >= side) continue;
        for (int c = 0; c < d->in; c++)
            sum += x[(i * side + j) * d->in + c] * w[(co * TAPS * TAPS + tap) * d->in + c];
    }
    return sum;
}

/* Error of y in the 2-norm at POINTS places of each sample, relative to what is added to the bias. */
static double points_error(const struct data *d, const double *y)
{
    enum { POINTS = 64 };
    static const int EDGES[] = {0, SIDE - 1, SIDE / 2, SIDE / 2 - 1};
    int64_t pixels = (int64_t)PIXELS * d->stride * d->stride, each = pixels * d->in;
    double *w = gpu_get(stream, d->w, type, (size_t)(OUT * TAPS * TAPS * d->in));
    double *bias = gpu_get(stream, d->bias, type, OUT);
    double *gain = gpu_get(stream, d->gain, type, (size_t)d->in), difference = 0, norm = 0;
    uint32_t seed = 7;
    for (int n = 0; n < d->N; n++) {
        double *x =
            gpu_get(stream, part(d->x, n, 1, SIDE * d->stride, d->in).data, type, (size_t)each);
        double *more = gpu_get(stream, part(d->residual, n, 1, SIDE, OUT).data, type, Y_EACH);
        if (d->norm) normalise(x, gain, pixels, d->in);
        for (int k = 0; k < POINTS; k++) {
            seed = seed * 1664525u + 1013904223u;
            int h = k < 32 ? EDGES[k % 4] : (int)(seed >> 8) % SIDE;
            int v = k < 16 ? EDGES[k / 4] : (int)(seed >> 16) % SIDE, co = (int)(seed >> 24) % OUT;
            int64_t at = (h * SIDE + v) * OUT + co;
            double want = point(d, x, w, h, v, co) + (d->add ? more[at] : 0);
            double off = y[(size_t)n * Y_EACH + (size_t)at] - bias[co] - want;
            difference += off * off;
            norm += want * want;
        }
        free(x), free(more);
    }
    free(w), free(bias), free(gain);
    return sqrt(difference / norm);
}

enum { PLAIN, ADD = 1, NORM = 2 };
static void check(const char *precision, int in, int stride, int how)
{
    if (!gpu_my_turn()) return;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    const int N = samples(in);
    size_t x_each = (size_t)(PIXELS * stride * stride * in);
    struct data d = {N,
                     filled((size_t)N * x_each, 1, 1, 0),
                     filled((size_t)(OUT * TAPS * TAPS * in), 2, in < 64 ? 1 : 0.1, 0),
                     filled(OUT, 3, 1, BIAS), /* means far from 0 */
                     filled((size_t)N * Y_EACH, 4, 1, 0),
                     room((size_t)N * Y_EACH * lg_dtype_bytes(type)),
                     filled((size_t)in, 5, 1, 1),
                     room((size_t)N * x_each * lg_dtype_bytes(type)),
                     room((size_t)(N * GROUPS) * 2 * sizeof(double)),
                     in,
                     stride,
                     how & NORM,
                     how & ADD};
    convolve(&d, 0, N);
    double *y = gpu_get(stream, d.y, type, (size_t)N * Y_EACH), *alone;
    double *mean_var = gpu_get(stream, d.mean_var, LG_F64, (size_t)(N * GROUPS) * 2);
    for (int n = 0; n < (gpu_sanitized() ? 1 : N); n++) convolve(&d, n, 1);
    alone = gpu_get(stream, d.y, type, (size_t)N * Y_EACH);
    double *again = gpu_get(stream, d.mean_var, LG_F64, (size_t)(N * GROUPS) * 2), worst = 0;
    bool same = !memcmp(y, alone, (size_t)N * Y_EACH * sizeof *y) &&
                !memcmp(mean_var, again, (size_t)(N * GROUPS) * 2 * sizeof *again);
    for (int n = 0; n < N; n++)
        worst = fmax(worst, moments_error(y + (size_t)n * Y_EACH, mean_var + n * GROUPS * 2));
    bool near =
        worst < 1e-5; /* sums of 256 differences in fp32, their squares: 256 2^-24 at most */
    double error = points_error(&d, y);
    bool right = error < 3e-2; /* bf16 has a bias of 8 to within 0.016 */
    same = same || !own(in);
    printf(
        "%s%sconvolution of %d channels in %s, stride %d%s: %s; error %.1e, of the mean_var %.1e\n",
        same && near && right ? "" : "FAIL ", d.norm ? "norm and " : "", in, precision, stride,
        d.add ? " with residual" : "",
        !own(in) ? "by the library"
        : same   ? "a sample alone has the same bits"
                 : "a sample alone has other bits",
        error, worst);
    if (own(in)) gpu_count(same);
    gpu_count(near);
    gpu_count(right);
    free(y), free(alone), free(mean_var), free(again);
    void *all[] = {d.x, d.w, d.bias, d.residual, d.y, d.gain, d.normed, d.mean_var};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]);
    lg_stream_close(&stream);
    lg_device_close(&device);
}

int main(void)
{
    check("bf16", 128, 1, ADD);
    check("bf16", 128, 1, PLAIN);
    check("fp16", 128, 1, ADD);
    check("bf16", 128, 1, NORM | ADD);
    check("bf16", 512, 1, NORM);
    check("fp16", 64, 1, NORM | ADD);
    check("bf16", 256, 2, PLAIN);
    check("bf16", 3, 1, PLAIN);
    check("fp16", 3, 1, PLAIN);
    return gpu_summary();
}
