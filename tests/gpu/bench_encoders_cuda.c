/* Times the encoders in bf16 with random weights on one GPU: the SD autoencoder's encoder at 256 and 512
 * pixels, those of LTX-Video 0.9.0 and 0.9.5 on 121 frames of 512 x 768 (peer_ltx_vae.py), whole and in slices, T5 v1.1 XXL's
 * encoder with 120 tokens. Each: median of RUNS runs between syncs, then its
 * operations with their time within TIMED_RUNS more (op_times.h).
 *
 * usage: bench_encoders_cuda [PRECISION [vae|ltx|t5]]      (bf16, all) */
#include "base/clock.h"
#include "stages/nets/autoencoder.h"
#include "stages/nets/text_encoder.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/op_times.h"
#include <string.h>

enum { RUNS = 9, TIMED_RUNS = 5 };
static lg_device *device;
static lg_stream *stream;

static void *room(size_t bytes)
{
    void *p;
    gpu_need(lg_device_alloc(device, bytes, &p));
    return p;
}

/* Uniform in scale (-1, 1) of the compute type, repeating after a million elements. */
static void *noise(size_t n, float scale)
{
    enum { PERIOD = 1 << 20 };
    static float host[PERIOD];
    uint32_t h = 1;
    lg_dtype t = lg_device_dtype(device);
    char *p = room(n * lg_dtype_bytes(t)), *staged = room(sizeof host);
    for (int i = 0; i < PERIOD; i++) {
        h = h * 1664525u + 1013904223u;
        host[i] = scale * ((float)h * 0x1p-31f - 1);
    }
    lg_stream_upload(stream, staged, host, sizeof host);
    for (size_t at = 0; at < n; at += PERIOD) {
        int64_t k = (int64_t)LG_MIN(n - at, (size_t)PERIOD);
        lg_cast(stream, &(struct lg_cast_args){.x = lg_t1(staged, LG_F32, k),
                                               .y = lg_t1(p + at * lg_dtype_bytes(t), t, k)});
    }
    lg_stream_sync(stream);
    void *s = staged;
    lg_device_free(device, &s);
    return p;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median milliseconds of body. */
#define MEDIAN_MS(ret, body)                                                                       \
    do {                                                                                           \
        double ms_[RUNS];                                                                          \
        body;                                                                                      \
        for (int i_ = 0; i_ < RUNS; i_++) {                                                        \
            lg_stream_sync(stream);                                                                \
            int64_t before_ = lg_now_ns();                                                         \
            body;                                                                                  \
            lg_stream_sync(stream);                                                                \
            ms_[i_] = (double)(lg_now_ns() - before_) * 1e-6;                                      \
        }                                                                                          \
        qsort(ms_, RUNS, sizeof *ms_, ascending);                                                  \
        ret = ms_[RUNS / 2];                                                                       \
    } while (0)
#define PRINT_OPERATIONS(body)                                                                     \
    do {                                                                                           \
        op_times_start(device);                                                                    \
        for (int i_ = 0; i_ < TIMED_RUNS; i_++) body;                                              \
        op_times_print(stream, TIMED_RUNS);                                                        \
        fflush(stdout);                                                                            \
    } while (0)

static void bench_vae(int side, int batch)
{
    const struct lg_aekl_config c = {3,    3,    4, 4, {128, 256, 512, 512}, 2, 32, true,
                                     true, true, 1, 0};
    const struct lg_aekl_shape shape = {LG_AEKL_ENCODER, batch, side, side, 0};
    lg_dtype t = lg_device_dtype(device);
    size_t pixels = (size_t)batch * 3 * (size_t)side * (size_t)side;
    int64_t h = side / 8, cells = batch * 4 * h * h;
    lg_aekl *net;
    lg_params params;
    size_t bytes;
    double ms;
    int64_t before = lg_now_ns();
    gpu_need(lg_aekl_params(&c, LG_AEKL_ENCODER, &params));
    gpu_need(lg_aekl_plan(device, &c, &shape, &bytes)); /* chooses the algorithms */
    printf("planned in %.1f s\n", (double)(lg_now_ns() - before) * 1e-9);
    gpu_need(lg_aekl_open(device, &c, &shape, &net));
    void *weights = noise(params.count, 0.03f);
    lg_tensor picture = lg_t4(room(pixels), LG_U8, batch, 3, side, side);
    uint8_t *host = malloc(pixels);
    LG_ASSERT(host);
    for (size_t i = 0; i < pixels; i++) host[i] = (uint8_t)(i * 2654435761u >> 13);
    lg_stream_upload(stream, picture.data, host, pixels);
    lg_tensor mean = lg_t4(noise((size_t)cells, 1), t, batch, 4, h, h), logvar = mean;
    logvar.data = noise((size_t)cells, 1);
    MEDIAN_MS(ms, lg_aekl_encode(net, stream, weights, picture, mean, logvar));
    printf("SD VAE encoder, %d px, batch %d: %.1f ms, %.0f img/s, %.1f GiB\n", side, batch, ms,
           batch / ms * 1e3, (double)bytes * 0x1p-30);
    PRINT_OPERATIONS(lg_aekl_encode(net, stream, weights, picture, mean, logvar));
    free(host);
    lg_aekl_close(&net);
    lg_params_free(&params);
    void *all[] = {weights, picture.data, mean.data, logvar.data};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]);
}

/* Encoders as lg-random-model's presets ltx and ltx-095 have them. */
static struct lg_autoencoder_config ltx(bool is_095)
{
    static const struct lg_aeltx_half of_090 = {.block = {{128, 256, 4, LG_AELTX_CONV, false},
                                                          {256, 512, 3, LG_AELTX_CONV, false},
                                                          {512, 512, 3, LG_AELTX_CONV, false},
                                                          {512, 512, 3, LG_AELTX_KEEPS, false}},
                                                .blocks = 4,
                                                .first = 128,
                                                .middle = 512,
                                                .middle_layers = 4};
    static const struct lg_aeltx_half of_095 = {.block = {{128, 256, 4, LG_AELTX_SPACE, false},
                                                          {256, 512, 6, LG_AELTX_TIME, false},
                                                          {512, 1024, 6, LG_AELTX_BOTH, false},
                                                          {1024, 2048, 2, LG_AELTX_BOTH, false}},
                                                .blocks = 4,
                                                .first = 128,
                                                .middle = 2048,
                                                .middle_layers = 2};
    return (struct lg_autoencoder_config){.kind = LG_VAE_LTX,
                                          .ltx = {.latent_channels = 128,
                                                  .patch = 4,
                                                  .factor = 32,
                                                  .factor_time = 8,
                                                  .eps = 1e-6,
                                                  .scaling_factor = 1,
                                                  .is_095 = is_095,
                                                  .encoder = is_095 ? of_095 : of_090},
                                          .latent_channels = 128,
                                          .factor = 32,
                                          .factor_time = 8,
                                          .scaling_factor = 1};
}

static void bench_ltx(bool is_095, int slice)
{
    enum { F = 121, H = 512, W = 768, f = 16, h = H / 32, w = W / 32, C = 128 };
    const struct lg_autoencoder_config c = ltx(is_095);
    const struct lg_autoencoder_shape shape = {LG_AEKL_ENCODER, 1, F, H, W, slice, 0};
    const size_t pixels = (size_t)3 * F * H * W, cells = (size_t)C * f * h * w;
    const lg_dtype t = lg_device_dtype(device);
    lg_autoencoder *net;
    lg_params params;
    size_t bytes;
    double ms;
    gpu_need(lg_autoencoder_params(&c, LG_AEKL_ENCODER, &params));
    gpu_need(lg_autoencoder_plan_all(device, &c, &shape, 1, &bytes));
    gpu_need(lg_autoencoder_open_all(device, &c, &shape, 1, &net));
    void *weights = noise(params.count, 0.03f);
    lg_tensor clip = lg_t4(room(pixels), LG_U8, 1, 3, F * H, W);
    uint8_t *host = malloc(pixels);
    LG_ASSERT(host);
    for (size_t i = 0; i < pixels; i++) host[i] = (uint8_t)(i * 2654435761u >> 13);
    lg_stream_upload(stream, clip.data, host, pixels);
    lg_tensor mean = lg_t4(noise(cells, 1), t, 1, C, f * h, w), logvar = mean;
    logvar.data = noise(cells, 1);
    MEDIAN_MS(ms, lg_autoencoder_encode(net, stream, weights, clip, mean, logvar));
    printf("LTX %dx%dx%d, encoder of %s, slices of %d: %.1f ms, %.0f frames/s, %.0f TFLOP/s, %.1f "
           "GiB\n",
           F, H, W, is_095 ? "0.9.5" : "0.9.0", slice, ms, F / ms * 1e3,
           lg_autoencoder_flops(net) / ms * 1e-9, (double)bytes * 0x1p-30);
    PRINT_OPERATIONS(lg_autoencoder_encode(net, stream, weights, clip, mean, logvar));
    free(host);
    lg_autoencoder_close(&net);
    lg_params_free(&params);
    void *all[] = {weights, clip.data, mean.data, logvar.data};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]);
}

static void bench_t5(int batch, int length)
{
    const struct lg_text_encoder_config c = {
        .kind = LG_TEXT_T5, .t5 = {32128, 4096, 64, 10240, 64, 24, 32, 128, true, 1e-6}};
    const struct lg_text_encoder_shape shape = {.batch = batch, .length = length};
    lg_text_encoder *net;
    lg_params params;
    double ms, *ids = calloc((size_t)(batch * length), sizeof *ids);
    double *lengths = calloc((size_t)batch, sizeof *lengths);
    LG_ASSERT(ids && lengths);
    gpu_need(lg_text_encoder_params(&c, 0, 1, &params));
    gpu_need(lg_text_encoder_open(device, &c, &shape, 1, &net));
    const void *weights = noise(params.count, 0.02f);
    for (int i = 0; i < batch * length; i++) ids[i] = 1 + i * 7919 % 32000;
    for (int i = 0; i < batch; i++) lengths[i] = length;
    lg_tensor id = lg_t2(room((size_t)(batch * length) * 4), LG_I32, batch, length);
    lg_tensor n = lg_t1(room((size_t)batch * 4), LG_I32, batch);
    gpu_put(stream, id.data, LG_I32, ids, (size_t)(batch * length));
    gpu_put(stream, n.data, LG_I32, lengths, (size_t)batch);
    lg_tensor out = lg_t3(noise((size_t)(batch * length) * 4096, 1), lg_device_dtype(device), batch,
                          length, 4096);
    const struct lg_text_io io = {.ids = id, .length = n, .out = {[LG_TEXT_STATES] = out}};
    MEDIAN_MS(ms, lg_text_encoder_forward(net, stream, &weights, &io));
    printf("T5 v1.1 XXL encoder, %d tokens, batch %d: %.1f ms, %.0f captions/s\n", length, batch,
           ms, batch / ms * 1e3);
    PRINT_OPERATIONS(lg_text_encoder_forward(net, stream, &weights, &io));
    free(ids);
    free(lengths);
    lg_text_encoder_close(&net);
    lg_params_free(&params);
}

int main(int argc, char **argv)
{
    const char *only = argc > 2 ? argv[2] : NULL;
    device = gpu_open("cuda:0", argc > 1 ? argv[1] : "bf16");
    gpu_need(lg_stream_open(device, &stream));
    printf("%s\n", lg_device_fingerprint(device));
    if (!only || !strcmp(only, "vae")) {
        bench_vae(256, 32);
        bench_vae(512, 16);
    }
    if (!only || !strcmp(only, "ltx")) {
        bench_ltx(false, 0);
        bench_ltx(false, 41);
        bench_ltx(true, 0);
    }
    if (!only || !strcmp(only, "t5")) bench_t5(64, 120);
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}
