/* The encoders on the CUDA backend against ref64, with random weights rounded to bf16: the SD autoencoder's
 * channels (128, 256, 512, 512) on small pictures, both halves; LTX-Video's, of either kind, on clips, whole and in slices of
 * frames, which have the same bits; a T5 v1.1 encoder with heads of 64. A
 * picture's and a caption's bits may not depend on their neighbours.
 *
 * Errors add up along 30 convolutions or 4 layers: a few times one operation's. */
#include "stages/nets/autoencoder.h"
#include "stages/nets/text_encoder.h"
#include "tests/gpu/gpu_test.h"
#include "tests/unit/denoiser_fixture.h"
#include <string.h>

enum { PICTURES = 2, SIDE = 32, CAPTIONS = 3, LENGTH = 77, OUTPUTS = 3 };
static const double LIMIT = 4; /* times the tolerance of one operation */

struct outputs {
    double *v[OUTPUTS];
    size_t n[OUTPUTS];
};
typedef void encoder(lg_device *, uint64_t variant, struct outputs *ret);

static void *room(lg_device *d, size_t bytes)
{
    void *p;
    gpu_need(lg_device_alloc(d, bytes, &p));
    return p;
}

/* A flat buffer of random weights; freed with the device. */
static void *random_weights(lg_device *d, lg_stream *s, const lg_params *params)
{
    lg_dtype t = lg_device_dtype(d);
    double *v = calloc(params->count, sizeof *v);
    void *flat = room(d, params->count * lg_dtype_bytes(t));
    LG_ASSERT(v);
    for (int i = 0; i < params->n; i++) {
        const struct lg_param *p = &params->p[i];
        bool matrix = p->rank > 1, gain = !matrix && strstr(p->name, "weight");
        double scale = matrix ? sqrt(3.0 * (double)p->dim[0] / (double)p->count) : 0.1;
        if (strstr(p->name, "Attention.q")) scale /= 8; /* T5 does not divide by sqrt(d) */
        if (strstr(p->name, "shared")) scale = 1;
        golden_fill(p->name, p->count, scale, v + p->offset);
        for (size_t e = p->offset; e < p->offset + p->count; e++)
            v[e] = gpu_to_bf16(v[e] + (gain ? 1 : 0));
    }
    gpu_put(s, flat, t, v, params->count);
    free(v);
    return flat;
}

static void run_autoencoder(lg_device *d, uint64_t variant, struct outputs *ret)
{
    const struct lg_aekl_config c = {3,    3,    4, 4, {128, 256, 512, 512}, 2, 32, true,
                                     true, true, 1, 0};
    const struct lg_aekl_shape shape = {LG_AEKL_BOTH, PICTURES, SIDE, SIDE, 0};
    lg_dtype t = lg_device_dtype(d);
    int64_t h = SIDE / lg_aekl_factor(&c);
    size_t pixels = (size_t)PICTURES * 3 * SIDE * SIDE, cells = (size_t)(PICTURES * 4 * h * h);
    lg_stream *s;
    lg_aekl *net;
    lg_params params;
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_aekl_params(&c, LG_AEKL_BOTH, &params));
    gpu_need(lg_aekl_open(d, &c, &shape, &net));
    void *weights = random_weights(d, s, &params);
    uint8_t *bytes = malloc(pixels);
    double *noise = malloc(pixels * sizeof *noise);
    LG_ASSERT(bytes && noise);
    golden_fill("pixels", pixels, 1, noise);
    for (size_t i = 0; i < pixels; i++) {
        bool first = i < pixels / PICTURES;
        bytes[i] = (uint8_t)(127.5 + 127 * noise[first ? i : (i + (size_t)variant * 7) % pixels]);
    }
    lg_tensor picture = lg_t4(room(d, pixels), LG_U8, PICTURES, 3, SIDE, SIDE);
    lg_stream_upload(s, picture.data, bytes, pixels);
    lg_tensor mean = lg_t4(room(d, cells * 8), t, PICTURES, 4, h, h), logvar = mean;
    lg_tensor image = lg_t4(room(d, pixels * 8), t, PICTURES, 3, SIDE, SIDE), latent = mean;
    logvar.data = room(d, cells * 8);
    latent.data = room(d, cells * 8);
    lg_aekl_encode(net, s, weights, picture, mean, logvar);
    golden_fill("latent", cells, 1, noise);
    for (size_t i = 0; i < cells; i++)
        noise[i] = gpu_to_bf16(i < cells / PICTURES ? noise[i] : noise[i] * (1 + (double)variant));
    gpu_put(s, latent.data, t, noise, cells);
    lg_aekl_decode(net, s, weights, latent, image, LG_NONE);
    *ret = (struct outputs){{gpu_get(s, mean.data, t, cells), gpu_get(s, logvar.data, t, cells),
                             gpu_get(s, image.data, t, pixels)},
                            {cells, cells, pixels}};
    free(bytes);
    free(noise);
    lg_aekl_close(&net);
    lg_params_free(&params);
    lg_stream_close(&s);
}

/* The second run has another second clip, and sees the first one in slices. */
static void run_ltx(lg_device *d, uint64_t variant, const struct lg_aeltx_config *ltx,
                    struct outputs *ret)
{
    enum { CLIPS = 2, F = 9, H = 64, W = 48 };
    const struct lg_autoencoder_config c = {.kind = LG_VAE_LTX,
                                            .ltx = *ltx,
                                            .latent_channels = ltx->latent_channels,
                                            .factor = ltx->factor,
                                            .factor_time = ltx->factor_time,
                                            .scaling_factor = 1};
    const struct lg_autoencoder_shape shape = {LG_AEKL_BOTH, CLIPS, F, H, W, variant ? 4 : 0, 0};
    const int f = lg_autoencoder_latent_frames(&c, F), h = H / c.factor, w = W / c.factor;
    const size_t pixels = (size_t)CLIPS * 3 * F * H * W;
    const size_t cells = (size_t)(CLIPS * c.latent_channels * f * h * w);
    const lg_dtype t = lg_device_dtype(d);
    lg_stream *s;
    lg_autoencoder *net;
    lg_params params;
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_autoencoder_params(&c, LG_AEKL_BOTH, &params));
    gpu_need(lg_autoencoder_open_all(d, &c, &shape, 1, &net));
    void *weights = random_weights(d, s, &params);
    uint8_t *bytes = malloc(pixels);
    double *noise = malloc(pixels * sizeof *noise);
    LG_ASSERT(bytes && noise);
    golden_fill("pixels", pixels, 1, noise);
    for (size_t i = 0; i < pixels; i++) {
        bool first = i < pixels / CLIPS;
        bytes[i] = (uint8_t)(127.5 + 127 * noise[first ? i : (i + (size_t)variant * 7) % pixels]);
    }
    lg_tensor clip = lg_t4(room(d, pixels), LG_U8, CLIPS, 3, F * H, W);
    lg_stream_upload(s, clip.data, bytes, pixels);
    lg_tensor mean = lg_t4(room(d, cells * 8), t, CLIPS, c.latent_channels, f * h, w);
    lg_tensor image = lg_t4(room(d, pixels * 8), t, CLIPS, 3, F * H, W), latent = mean;
    lg_tensor logvar = mean;
    logvar.data = room(d, cells * 8);
    latent.data = room(d, cells * 8);
    lg_autoencoder_encode(net, s, weights, clip, mean, logvar);
    golden_fill("latent", cells, 1, noise);
    for (size_t i = 0; i < cells; i++)
        noise[i] = gpu_to_bf16(i < cells / CLIPS ? noise[i] : noise[i] * (1 + (double)variant));
    gpu_put(s, latent.data, t, noise, cells);
    lg_autoencoder_decode(net, s, weights, latent, image, LG_NONE);
    *ret = (struct outputs){{gpu_get(s, mean.data, t, cells), gpu_get(s, logvar.data, t, cells),
                             gpu_get(s, image.data, t, pixels)},
                            {cells, cells, pixels}};
    free(bytes);
    free(noise);
    lg_autoencoder_close(&net);
    lg_params_free(&params);
    lg_stream_close(&s);
}

static void run_ltx_090(lg_device *d, uint64_t variant, struct outputs *ret)
{
    static const struct lg_aeltx_config c = {
        .latent_channels = 24,
        .patch = 4,
        .factor = 16,
        .factor_time = 4,
        .eps = 1e-6,
        .scaling_factor = 1,
        .encoder = {.block = {{64, 128, 1, LG_AELTX_CONV, false},
                              {128, 192, 1, LG_AELTX_CONV, false},
                              {192, 192, 1, LG_AELTX_KEEPS, false}},
                    .blocks = 3,
                    .first = 64,
                    .middle = 192,
                    .middle_layers = 1},
        .decoder = {.block = {{192, 128, 1, LG_AELTX_BOTH, false},
                              {128, 64, 1, LG_AELTX_BOTH, false},
                              {64, 64, 1, LG_AELTX_KEEPS, false}},
                    .blocks = 3,
                    .first = 192,
                    .middle = 192,
                    .middle_layers = 1}};
    run_ltx(d, variant, &c, ret);
}

static void run_ltx_095(lg_device *d, uint64_t variant, struct outputs *ret)
{
    static const struct lg_aeltx_config c = {
        .latent_channels = 24,
        .patch = 4,
        .factor = 16,
        .factor_time = 4,
        .eps = 1e-6,
        .scaling_factor = 1,
        .is_095 = true,
        .has_timestep = true,
        .encoder = {.block = {{64, 256, 1, LG_AELTX_SPACE, false},
                              {256, 256, 1, LG_AELTX_TIME, false},
                              {256, 512, 1, LG_AELTX_BOTH, false}},
                    .blocks = 3,
                    .first = 64,
                    .middle = 512,
                    .middle_layers = 1},
        .decoder = {.block = {{64, 64, 1, LG_AELTX_BOTH, true}, {32, 32, 1, LG_AELTX_BOTH, true}},
                    .blocks = 2,
                    .first = 128,
                    .middle = 128,
                    .middle_layers = 1}};
    run_ltx(d, variant, &c, ret);
}

static void run_t5(lg_device *d, uint64_t variant, struct outputs *ret)
{
    const struct lg_text_encoder_config c = {
        .kind = LG_TEXT_T5, .t5 = {1000, 512, 64, 1024, 6, 4, 32, 128, true, 1e-6}};
    const struct lg_text_encoder_shape shape = {.batch = CAPTIONS, .length = LENGTH};
    lg_dtype t = lg_device_dtype(d);
    lg_stream *s;
    lg_text_encoder *net;
    lg_params params;
    double ids[CAPTIONS * LENGTH] = {0}, length[CAPTIONS] = {LENGTH, 1 + 4 * (double)variant, 30};
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_text_encoder_params(&c, 0, 1, &params));
    gpu_need(lg_text_encoder_open(d, &c, &shape, 1, &net));
    const void *weights = random_weights(d, s, &params);
    for (int i = 0; i < CAPTIONS; i++)
        for (int j = 0; j < (int)length[i]; j++)
            ids[i * LENGTH + j] = 1 + (i * 131 + j * 17 + (i ? (int)variant : 0)) % 999;
    lg_tensor id = lg_t2(room(d, sizeof ids), LG_I32, CAPTIONS, LENGTH);
    lg_tensor n = lg_t1(room(d, sizeof length), LG_I32, CAPTIONS);
    size_t count = (size_t)CAPTIONS * LENGTH * 512;
    lg_tensor out = lg_t3(room(d, count * 8), t, CAPTIONS, LENGTH, 512);
    gpu_put(s, id.data, LG_I32, ids, CAPTIONS * LENGTH);
    gpu_put(s, n.data, LG_I32, length, CAPTIONS);
    lg_text_encoder_forward(
        net, s, &weights,
        &(struct lg_text_io){.ids = id, .length = n, .out = {[LG_TEXT_STATES] = out}});
    *ret = (struct outputs){{gpu_get(s, out.data, t, count)}, {count}};
    lg_text_encoder_close(&net);
    lg_params_free(&params);
    lg_stream_close(&s);
}

/* Heads of 64, as all published CLIPs have; the widths and the activation are bigG's in small. */
static void run_clip(lg_device *d, uint64_t variant, struct outputs *ret)
{
    enum { WIDTH = 256, PROJECTION = 192, TOKENS = 77 };
    const struct lg_text_encoder_config c = {
        .kind = LG_TEXT_CLIP,
        .clip = {1000, WIDTH, 1024, 4, 4, TOKENS, LG_ACT_GELU_ERF, 1e-5, -1, PROJECTION}};
    const struct lg_text_encoder_shape shape = {
        CAPTIONS, TOKENS, LG_TEXT_BIT(LG_TEXT_STATES) | LG_TEXT_BIT(LG_TEXT_EMBEDS)};
    lg_dtype t = lg_device_dtype(d);
    lg_stream *s;
    lg_text_encoder *net;
    lg_params params;
    double ids[CAPTIONS * TOKENS] = {0}, ends[CAPTIONS];
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_text_encoder_params(&c, 0, 1, &params));
    gpu_need(lg_text_encoder_open(d, &c, &shape, 1, &net));
    const void *weights = random_weights(d, s, &params);
    for (int i = 0; i < CAPTIONS; i++) {
        const int end = 5 + 7 * i;
        for (int j = 0; j <= end; j++)
            ids[i * TOKENS + j] =
                j == end ? 999 : 1 + (i * 131 + j * 17 + (i ? (int)variant : 0)) % 900;
        ends[i] = i * TOKENS + end;
    }
    const size_t states = (size_t)CAPTIONS * TOKENS * WIDTH, embeds = (size_t)CAPTIONS * PROJECTION;
    struct lg_text_io io = {.ids = lg_t2(room(d, sizeof ids), LG_I32, CAPTIONS, TOKENS),
                            .ends = lg_t1(room(d, sizeof ends), LG_I32, CAPTIONS)};
    io.out[LG_TEXT_STATES] = lg_t3(room(d, states * 8), t, CAPTIONS, TOKENS, WIDTH);
    io.out[LG_TEXT_EMBEDS] = lg_t2(room(d, embeds * 8), t, CAPTIONS, PROJECTION);
    gpu_put(s, io.ids.data, LG_I32, ids, CAPTIONS * TOKENS);
    gpu_put(s, io.ends.data, LG_I32, ends, CAPTIONS);
    lg_text_encoder_forward(net, s, &weights, &io);
    *ret = (struct outputs){{gpu_get(s, io.out[LG_TEXT_STATES].data, t, states),
                             gpu_get(s, io.out[LG_TEXT_EMBEDS].data, t, embeds)},
                            {states, embeds}};
    lg_text_encoder_close(&net);
    lg_params_free(&params);
    lg_stream_close(&s);
}

static void free_outputs(struct outputs *o)
{
    for (int i = 0; i < OUTPUTS; i++) free(o->v[i]);
}

static void check(const char *name, encoder *run, size_t samples)
{
    struct outputs want, got, again;
    lg_device *ref = gpu_open("ref64", NULL);
    run(ref, 0, &want);
    for (int k = 0; k < GPU_PRECISION_COUNT; k++) {
        const struct gpu_precision *p = &GPU_PRECISIONS[k];
        lg_device *cuda = gpu_open("cuda:0", p->name);
        double worst = 0;
        bool alone = true;
        run(cuda, 0, &got);
        run(cuda, 1, &again);
        for (int i = 0; i < OUTPUTS && want.n[i]; i++) {
            double error = gpu_error(got.v[i], want.v[i], want.n[i], 0);
            if (!(error <= worst)) worst = error;
            alone = alone && !memcmp(got.v[i], again.v[i], want.n[i] / samples * sizeof(double));
        }
        bool near = worst <= LIMIT * p->tolerance;
        printf("%s%s in %s: largest error %.2e%s\n", near && alone ? "" : "FAIL ", name, p->name,
               worst, alone ? "" : "; a sample depends on its neighbours");
        fflush(stdout);
        gpu_count(near);
        gpu_count(alone);
        free_outputs(&got);
        free_outputs(&again);
        lg_device_close(&cuda);
    }
    free_outputs(&want);
    lg_device_close(&ref);
}

int main(void)
{
    check("SD autoencoder", run_autoencoder, PICTURES);
    check("LTX-Video 0.9.0's autoencoder", run_ltx_090, 2);
    check("LTX-Video 0.9.5's autoencoder", run_ltx_095, 2);
    check("T5 v1.1", run_t5, CAPTIONS);
    check("CLIP", run_clip, CAPTIONS);
    return gpu_summary();
}
