/* Gradients of convolutions with more work than the GPU has room for at once (kernels/cuda/conv_weight.cu cuts it into
 * ranges, tile_conv.cu's blocks go from tile to tile): the same bits twice, the right values at some places, corners and
 * edges among them, and what is added to is still in it. On 9.0 a sample's dx of sides that are multiples of 16 has the bits
 * that it has alone; where the library computes, it may take another algorithm for another number of samples.
 * (test_ops_cuda compares everything with ref64, in small batches.)
 *
 * usage: test_long_gradients_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { TAPS = 3, POINTS = 192, TILE = 16 };

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;
static uint32_t seed = 1;

static double drawn(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (double)seed * 0x1p-31 - 1;
}
static lg_tensor filled(lg_tensor t, double scale)
{
    const size_t n = (size_t)lg_numel(&t);
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) v[i] = scale * drawn();
    gpu_need(lg_device_alloc(device, lg_tensor_bytes(&t), &t.data));
    gpu_put(stream, t.data, t.dtype, v, n);
    free(v);
    return t;
}
static double *values(lg_tensor t)
{
    return gpu_get(stream, t.data, t.dtype, (size_t)lg_numel(&t));
}

struct shape {
    int N, H, W, in, out, top, left; /* of x; bottom and right are 1 */
};
struct call {
    struct lg_conv2d_backward_data_args data;
    struct lg_conv2d_backward_weight_args weight;
};
static void enqueue(lg_stream *s, const struct call *c, bool data)
{
    if (data)
        lg_conv2d_backward_data(s, &c->data);
    else
        lg_conv2d_backward_weight(s, &c->weight);
}
static void run(const struct call *c, bool data)
{
    lg_stream *dry;
    gpu_need(lg_stream_open_dry(device, &dry));
    enqueue(dry, c, data);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = gpu_scratch(device, bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    enqueue(stream, c, data);
    lg_stream_sync(stream);
    lg_stream_close(&dry);
    if (!gpu_sanitized()) lg_device_free(device, &scratch);
}

static void settle(const struct shape *z, const char *what, const char *precision, bool same,
                   double error, double limit)
{
    bool right = error <= limit;
    printf("%s%s of %d x %d x %d x %d to %d channels in %s: %s, error %.1e of %.1e\n",
           same && right ? "" : "FAIL ", what, z->N, z->H, z->W, z->in, z->out, precision,
           same ? "the same bits" : "other bits", error, limit);
    gpu_count(same);
    gpu_count(right);
}

/* One of dw: every pixel of dy with the pixel of x that the position shows. */
static double one_of_dw(const struct shape *z, const lg_tensor *dy, const double *dyv,
                        const double *x, int o, int tap, int c)
{
    const int64_t h = dy->dim[1], w = dy->dim[2];
    double sum = 0;
    for (int64_t p = 0; p < z->N * h * w; p++) {
        int64_t n = p / (h * w), i = p / w % h + tap / TAPS - z->top;
        int64_t j = p % w + tap % TAPS - z->left;
        if (i < 0 || j < 0 || i >= z->H || j >= z->W) continue;
        sum += dyv[p * z->out + o] * x[((n * z->H + i) * z->W + j) * z->in + c];
    }
    return sum;
}
static double one_of_dx(const struct shape *z, const lg_tensor *dy, const double *dyv,
                        const double *w, const int64_t at[4])
{
    double sum = 0;
    for (int tap = 0; tap < TAPS * TAPS; tap++) {
        int64_t i = at[1] + z->top - tap / TAPS, j = at[2] + z->left - tap % TAPS;
        if (i < 0 || j < 0 || i >= dy->dim[1] || j >= dy->dim[2]) continue;
        const double *pixel = dyv + ((at[0] * dy->dim[1] + i) * dy->dim[2] + j) * z->out;
        for (int o = 0; o < z->out; o++)
            sum += pixel[o] * w[(o * TAPS * TAPS + tap) * (int64_t)z->in + at[3]];
    }
    return sum;
}

/* dw, in fp32: a sum of so many products of numbers of size one errs by what rounding leaves of them. cuDNN gives it in 16 bits,
 * rounded once: where parts of the sum were rounded, too, most points are one of the neighbours of the nearest. */
static void check_weight(const struct shape *z, const char *precision, const struct call *c)
{
    double *before = values(c->weight.dw), *first, *again;
    double *dy = values(c->weight.dy), *x = values(c->weight.x);
    run(c, false);
    first = values(c->weight.dw);
    gpu_put(stream, c->weight.dw.data, LG_F32, before, (size_t)lg_numel(&c->weight.dw));
    run(c, false);
    again = values(c->weight.dw);
    bool same = !memcmp(first, again, (size_t)lg_numel(&c->weight.dw) * sizeof *first);
    double difference = 0, from_nearest = 0, norm = 0;
    for (int k = 0; k < POINTS / 4; k++) {
        int o = k % 4 == 0 ? z->out - 1 : (int)((drawn() + 1) / 2 * z->out);
        int i = k % 3 == 0 ? z->in - 1 : (int)((drawn() + 1) / 2 * z->in), tap = k % 9;
        int64_t at = (o * TAPS * TAPS + tap) * (int64_t)z->in + i;
        double want = one_of_dw(z, &c->weight.dy, dy, x, o, tap, i);
        double nearest = type == LG_BF16 ? gpu_to_bf16(want) : (double)(_Float16)want;
        difference += pow(first[at] - before[at] - want, 2);
        from_nearest += pow(first[at] - before[at] - nearest, 2);
        norm += want * want;
    }
    /* One neighbour of the nearest among so many points, where the sum in fp32 lies between two, costs at most 1.1e-3 in bf16. */
    const double limit = 1e-3, limit_nearest = type == LG_BF16 ? 1.3e-3 : 1e-3;
    const bool rounded = strcmp(lg_device_isa(device), "sm_90a") && difference > from_nearest;
    settle(z, rounded ? "gradient by weight, rounded," : "gradient by weight", precision, same,
           sqrt((rounded ? from_nearest : difference) / norm), rounded ? limit_nearest : limit);
    free(before), free(first), free(again), free(dy), free(x);
}

static lg_tensor sample(lg_tensor t, int64_t n)
{
    return lg_slice(t, 0, n, 1);
}
static void check_data(const struct shape *z, const char *precision, const struct call *c)
{
    const lg_tensor dx = c->data.dx;
    const size_t each = (size_t)(lg_numel(&dx) / z->N);
    double *before = values(dx), *first, *again, *alone, difference = 0, norm = 0;
    double *dy = values(c->data.dy), *w = values(c->data.w);
    run(c, true);
    first = values(dx);
    gpu_put(stream, dx.data, type, before, each * (size_t)z->N);
    run(c, true);
    again = values(dx);
    bool same = !memcmp(first, again, each * (size_t)z->N * sizeof *first);
    if (!strcmp(lg_device_isa(device), "sm_90a") && z->H % TILE == 0 && z->W % TILE == 0) {
        struct call one = *c;
        int64_t n = z->N - 1;
        one.data.dy = sample(one.data.dy, n), one.data.dx = sample(one.data.dx, n);
        gpu_put(stream, one.data.dx.data, type, before + (size_t)n * each, each);
        run(&one, true);
        alone = values(dx);
        same = same && !memcmp(first, alone, each * (size_t)z->N * sizeof *first);
        free(alone);
    }
    for (int k = 0; k < POINTS; k++) {
        int64_t at[4] = {k % z->N, k % 5 == 0 ? z->H - 1 : k % 7 % z->H,
                         k % 3 == 0 ? z->W - 1 : k % 11 % z->W,
                         k % 4 == 0 ? z->in - 1 : (int64_t)((drawn() + 1) / 2 * z->in)};
        int64_t i = ((at[0] * z->H + at[1]) * z->W + at[2]) * z->in + at[3];
        double want = one_of_dx(z, &c->data.dy, dy, w, at) + before[i];
        difference += pow(first[i] - want, 2);
        norm += want * want;
    }
    settle(z, "gradient by data", precision, same, sqrt(difference / norm),
           type == LG_BF16 ? 4e-3 : 5e-4); /* rounding to 8 and 11 bits */
    free(before), free(first), free(again), free(dy), free(w);
}

static void check(const char *precision, struct shape z)
{
    if (!gpu_my_turn()) return;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    const int64_t y = z.H + z.top - 1, w = z.W + z.left - 1;
    lg_tensor dy = filled(lg_t4(NULL, type, z.N, y, w, z.out), 1);
    lg_tensor x = filled(lg_t4(NULL, type, z.N, z.H, z.W, z.in), 1);
    lg_tensor filters = filled(lg_t4(NULL, type, z.out, TAPS, TAPS, z.in), 1);
    lg_tensor dw = filled(lg_t4(NULL, LG_F32, z.out, TAPS, TAPS, z.in), 1);
    lg_tensor dbias = filled(lg_t1(NULL, LG_F32, z.out), 1);
    const struct call c = {{.dy = dy,
                            .w = filters,
                            .dx = x,
                            .stride = 1,
                            .top = z.top,
                            .left = z.left,
                            .bottom = 1,
                            .right = 1,
                            .accumulate = true},
                           {.dy = dy,
                            .x = x,
                            .dw = dw,
                            .dbias = dbias,
                            .stride = 1,
                            .top = z.top,
                            .left = z.left,
                            .bottom = 1,
                            .right = 1,
                            .accumulate = true}};
    if (gpu_sanitized()) {
        run(&c, false);
        run(&c, true);
        gpu_count(true);
    } else {
        check_weight(&z, precision, &c);
        check_data(&z, precision, &c);
    }
    lg_tensor *all[] = {&dy, &x, &filters, &dw, &dbias};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
    lg_stream_close(&stream);
    lg_device_close(&device);
}

int main(void)
{
    check("bf16",
          (struct shape){9, 64, 64, 320, 320, 1, 1}); /* few tiles of dw, each in several ranges */
    check("bf16", (struct shape){5, 16, 16, 1280, 640, 1, 1}); /* many, of which most lie in one */
    check("fp16", (struct shape){7, 33, 27, 128, 192, 1, 1});  /* boxes that hang over */
    check("bf16", (struct shape){40, 16, 32, 640, 320, 0, 2});
    check("fp16",
          (struct shape){3, 8, 8, 2560, 1280, 1, 1}); /* more tiles than boxes times ranges */
    return gpu_summary();
}
