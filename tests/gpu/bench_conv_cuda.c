/* Times convolutions alone, 3x3 of stride 1 and padding 1 and in bf16: forward, backward by data, by weight with the bias,
 * and the backward of the GroupNorm with SiLU before it.
 *
 * usage: bench_conv_cuda [SIDE IN OUT BATCH ...]      (those of SD 2.1's U-Net at 512 px in a batch of 32)
 *
 * Prints for each shape milliseconds a call (median of 5 rounds of 10), TFLOP/s of the convolutions, 18 times the product of
 * pixels and channels, and GB/s of the norm, of which 10 bytes an element must move. For the library instead of own
 * kernels set LG_CUDA_CAPABILITY=8.0. */
#include "base/clock.h"
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { ROUNDS = 5, CALLS = 10, GROUPS = 32 };
static lg_device *device;
static lg_stream *stream;

static lg_tensor noise(lg_tensor t, uint32_t seed)
{
    const size_t n = (size_t)lg_numel(&t);
    uint16_t *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (uint16_t)((seed >> 16 & 0x80ff) | 0x3f00); /* +-0.5 to 2 */
    }
    gpu_need(lg_device_alloc(device, n * sizeof *v, &t.data));
    lg_stream_upload(stream, t.data, v, n * sizeof *v);
    lg_stream_sync(stream);
    free(v);
    return t;
}
static lg_tensor room(lg_tensor t)
{
    gpu_need(lg_device_alloc(device, lg_tensor_bytes(&t), &t.data));
    return t;
}

struct work {
    struct lg_conv2d_forward_args forward;
    struct lg_conv2d_backward_data_args data;
    struct lg_conv2d_backward_weight_args weight;
    struct lg_group_norm_backward_args norm;
};
enum kind { FORWARD, DATA, WEIGHT, NORM, KINDS };
static void enqueue(lg_stream *s, const struct work *w, enum kind kind)
{
    if (kind == FORWARD) lg_conv2d_forward(s, &w->forward);
    if (kind == DATA) lg_conv2d_backward_data(s, &w->data);
    if (kind == WEIGHT) lg_conv2d_backward_weight(s, &w->weight);
    if (kind == NORM) lg_group_norm_backward(s, &w->norm);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double time_of(const struct work *w, enum kind kind)
{
    double ms[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) { /* the first is to warm up */
        int64_t began = lg_now_ns();
        for (int k = 0; k < CALLS; k++) enqueue(stream, w, kind);
        lg_stream_sync(stream);
        if (i >= 0) ms[i] = (double)(lg_now_ns() - began) * 1e-6 / CALLS;
    }
    qsort(ms, ROUNDS, sizeof *ms, by_size);
    return ms[ROUNDS / 2];
}

static void bench(int64_t side, int64_t in, int64_t out, int64_t B)
{
    lg_tensor x = noise(lg_t4(NULL, LG_BF16, B, side, side, in), 1);
    lg_tensor dx = room(lg_t4(NULL, LG_BF16, B, side, side, in));
    lg_tensor y = noise(lg_t4(NULL, LG_BF16, B, side, side, out), 2);
    lg_tensor w = noise(lg_t4(NULL, LG_BF16, out, 3, 3, in), 3);
    lg_tensor dw = room(lg_t4(NULL, LG_F32, out, 3, 3, in));
    lg_tensor bias = noise(lg_t1(NULL, LG_BF16, out), 4), dbias = room(lg_t1(NULL, LG_F32, out));
    lg_tensor gain = noise(lg_t1(NULL, LG_BF16, in), 5), dgain = room(lg_t1(NULL, LG_F32, in));
    lg_tensor doffset = room(lg_t1(NULL, LG_F32, in));
    lg_tensor mean_var = room(lg_t3(NULL, LG_F64, B, GROUPS, 2));
    const struct work work = {{.x = x, .w = w, .bias = bias, .y = y, .stride = 1, 1, 1, 1, 1},
                              {.dy = y, .w = w, .dx = dx, .stride = 1, 1, 1, 1, 1},
                              {.dy = y, .x = x, .dw = dw, .dbias = dbias, .stride = 1, 1, 1, 1, 1},
                              {.dy = dx,
                               .x = x,
                               .mean_var = mean_var,
                               .w = gain,
                               .b = gain,
                               .dx = dx,
                               .dw = dgain,
                               .db = doffset,
                               .groups = GROUPS,
                               .eps = 1e-5,
                               .act = LG_ACT_SILU}};
    double ms[KINDS], flops = 18 * (double)(B * side * side) * (double)(in * out) * 1e-9;
    lg_stream *dry;
    gpu_need(lg_stream_open_dry(device, &dry));
    for (int k = 0; k < KINDS; k++) enqueue(dry, &work, k);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = gpu_scratch(device, bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    for (int k = 0; k < KINDS; k++) ms[k] = time_of(&work, k);
    printf("%d x %d, %d to %d, batch %d: forward %.3f ms %.0f TFLOP/s, by data %.3f ms %.0f, by "
           "weight %.3f ms %.0f; norm %.3f ms %.0f GB/s\n",
           (int)side, (int)side, (int)in, (int)out, (int)B, ms[FORWARD], flops / ms[FORWARD],
           ms[DATA], flops / ms[DATA], ms[WEIGHT], flops / ms[WEIGHT], ms[NORM],
           10 * (double)lg_numel(&x) * 1e-6 / ms[NORM]);
    fflush(stdout);
    lg_stream_close(&dry);
    lg_tensor *all[] = {&x, &dx, &y, &w, &dw, &bias, &dbias, &gain, &dgain, &doffset, &mean_var};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
    lg_device_free(device, &scratch);
}

int main(int argc, char **argv)
{
    static const char *const usual[] = {"64", "320",  "320",  "32", "64", "640",  "320",  "32",
                                        "64", "960",  "320",  "32", "32", "640",  "640",  "32",
                                        "32", "1280", "640",  "32", "32", "1920", "640",  "32",
                                        "16", "1280", "1280", "32", "16", "2560", "1280", "32",
                                        "8",  "1280", "1280", "32", "8",  "2560", "1280", "32"};
    const char *const *shape = argc > 1 ? (const char *const *)argv + 1 : usual;
    int n = argc > 1 ? argc - 1 : (int)LG_ARRAY_LEN(usual);
    device = gpu_open("cuda:0", "bf16");
    gpu_need(lg_stream_open(device, &stream));
    for (int i = 0; i + 4 <= n; i += 4)
        bench(atoll(shape[i]), atoll(shape[i + 1]), atoll(shape[i + 2]), atoll(shape[i + 3]));
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}
