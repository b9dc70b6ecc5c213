/* From latents to pixels: a net of zeros leaves the noise as it is, so what is drawn is known: the autoencoder's picture of
 * noise / scaling_factor + shift_factor. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/picture.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/sample/draw.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define VAE  "tests/golden/encoders/vae_sd3" /* shifted and scaled, 16 channels, 8 pixels a cell */
#define TEXT "examples/emoji/text_encoder"
enum { CHANNELS = 16, FACTOR = 8, SEED = 5, TEXT_LENGTH = 6, TEXT_WIDTH = 192 };
static const double scaling = 1.5305, shift = 0.0609; /* the autoencoder's */

static void need(int rc)
{
    if (rc < 0) fail_msg("%s", lg_err_text());
}

/* Zeros. */
static void write_net(struct lg_denoiser_config c, const char *dir)
{
    lg_params t;
    c.channels = CHANNELS;
    need(lg_mkdirs(dir));
    need(lg_denoiser_params(&c, &t));
    float *zeros = calloc(t.count, sizeof *zeros);
    LG_ASSERT(zeros);
    need(lg_denoiser_save(&c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = zeros}));
    free(zeros);
    lg_params_free(&t);
}

static void *alloc(lg_device *d, size_t bytes)
{
    void *p;
    need(lg_device_alloc(d, bytes, &p));
    return p;
}

struct size {
    int frames, height, width; /* cells */
};

static size_t cells_of(const struct size *z)
{
    return (size_t)(z->frames * z->height * z->width);
}

/* latent (C, 1, h, w), ret (3, 1, H, W). */
static void decode(lg_device *d, const float *latent, const struct size *z, uint8_t *ret)
{
    const int height = z->height * FACTOR, width = z->width * FACTOR;
    const size_t bytes = CHANNELS * cells_of(z) * sizeof(float),
                 pixels = (size_t)(3 * height * width);
    struct lg_aekl_config c;
    lg_params t;
    lg_stream *s;
    lg_aekl *net;
    need(lg_aekl_config_load(VAE, &c));
    need(lg_aekl_params(&c, LG_AEKL_DECODER, &t));
    float *weights = alloc(d, t.count * sizeof *weights), *x = alloc(d, bytes);
    uint8_t *out = alloc(d, pixels);
    need(lg_aekl_load(&c, VAE, LG_AEKL_DECODER, weights));
    memcpy(x, latent, bytes);
    need(lg_stream_open(d, &s));
    const struct lg_aekl_shape shape = {
        .half = LG_AEKL_DECODER, .batch = 1, .height = height, .width = width};
    need(lg_aekl_open(d, &c, &shape, &net));
    lg_aekl_decode(net, s, weights, lg_t4(x, LG_F32, 1, CHANNELS, z->height, z->width), LG_NONE,
                   lg_t4(out, LG_U8, 1, 3, height, width));
    lg_stream_sync(s);
    memcpy(ret, out, pixels);
    lg_aekl_close(&net);
    lg_stream_close(&s);
    lg_params_free(&t);
}

/* rgb (H, W, 3) of 4 x 6 cells; ret (C, 1, 4, 6), the means, as decode takes them. */
static void encode(lg_device *d, const uint8_t *rgb, float *ret)
{
    enum { CELLS = 4 * 6, PIXELS = CELLS * FACTOR * FACTOR };
    struct lg_aekl_config c;
    lg_params t;
    lg_stream *s;
    lg_aekl *net;
    need(lg_aekl_config_load(VAE, &c));
    need(lg_aekl_params(&c, LG_AEKL_ENCODER, &t));
    float *weights = alloc(d, t.count * sizeof *weights);
    float *mean = alloc(d, 2 * CHANNELS * CELLS * sizeof *mean);
    uint8_t *pixels = alloc(d, 3 * PIXELS);
    need(lg_aekl_load(&c, VAE, LG_AEKL_ENCODER, weights));
    for (int i = 0; i < 3 * PIXELS; i++) pixels[i] = rgb[i % PIXELS * 3 + i / PIXELS];
    need(lg_stream_open(d, &s));
    const struct lg_aekl_shape shape = {
        .half = LG_AEKL_ENCODER, .batch = 1, .height = 4 * FACTOR, .width = 6 * FACTOR};
    need(lg_aekl_open(d, &c, &shape, &net));
    lg_aekl_encode(net, s, weights, lg_t4(pixels, LG_U8, 1, 3, 4 * FACTOR, 6 * FACTOR),
                   lg_t4(mean, LG_F32, 1, CHANNELS, 4, 6),
                   lg_t4(mean + CHANNELS * CELLS, LG_F32, 1, CHANNELS, 4, 6));
    lg_stream_sync(s);
    memcpy(ret, mean, CHANNELS * CELLS * sizeof *ret);
    lg_aekl_close(&net);
    lg_stream_close(&s);
    lg_params_free(&t);
}

/* Picture i is that of its noise, frame by frame. */
static void check_drawn(lg_device *d, const lg_pictures *p, int i, const struct size *z)
{
    const struct size one = {1, z->height, z->width};
    const size_t cells = cells_of(&one), pixels = cells * FACTOR * FACTOR,
                 frames = (size_t)z->frames;
    float *noise = malloc(CHANNELS * cells * frames * sizeof *noise),
          *latent = malloc(CHANNELS * cells * sizeof *latent);
    uint8_t *want = malloc(3 * pixels);
    assert_true(noise && latent && want);
    assert_true(p->frames == z->frames && p->height == z->height * FACTOR &&
                p->width == z->width * FACTOR);
    lg_philox_normal_f32(noise, CHANNELS * cells * frames, SEED, LG_PURPOSE_SAMPLE, (uint64_t)i, 0);
    for (size_t f = 0; f < frames; f++) {
        for (size_t k = 0; k < CHANNELS * cells; k++)
            latent[k] =
                (float)((double)noise[(k / cells * frames + f) * cells + k % cells] / scaling +
                        shift);
        decode(d, latent, &one, want);
        /* Between batches of other sizes a sum may differ in its last bit, and a pixel in its last level. */
        for (size_t k = 0; k < 3 * pixels; k++) {
            const uint8_t drawn =
                p->pixels[(((size_t)(3 * i) + k / pixels) * frames + f) * pixels + k % pixels];
            if (abs(drawn - want[k]) > 1)
                fail_msg("picture %d, frame %zu, value %zu is %d, not %d", i, f, k, drawn, want[k]);
        }
    }
    free(noise);
    free(latent);
    free(want);
}

static struct lg_draw_spec spec_of(lg_device *d, const char *const *prompts, int n)
{
    return (struct lg_draw_spec){.weights_dir = scratch_path("net"),
                                 .vae_dir = VAE,
                                 .text = {{.dir = TEXT, .length = TEXT_LENGTH}},
                                 .method = {.objective = LG_OBJECTIVE_FLOW, .flow_shift = 1},
                                 .prompts = prompts,
                                 .n = n,
                                 .negative = "",
                                 .steps = 3,
                                 .guidance = 1,
                                 .seed = SEED,
                                 .device = d};
}

static void test_shift_and_scale(void **state)
{
    (void)state;
    const struct size size = {1, 4, 4};
    struct lg_denoiser_config c = denoiser_fixture_dit();
    lg_device *d;
    lg_pictures drawn;
    scratch_make();
    c.height = c.width = size.height;
    write_net(c, scratch_path("net"));
    need(lg_device_open("host", NULL, &d));
    const struct lg_draw_spec spec = spec_of(d, (const char *const[]){"2"}, 1);
    need(lg_draw(&spec, &drawn));
    assert_int_equal(drawn.n, 1);
    check_drawn(d, &drawn, 0, &size);
    lg_pictures_free(&drawn);
    lg_device_close(&d);
    scratch_remove();
}

/* Clips, as trained and of another size; what no latent has is refused. */
static void test_clips(void **state)
{
    (void)state;
    static const char *const prompts[] = {"a", "b"};
    struct lg_denoiser_config c = denoiser_fixture_latte();
    const struct size trained = {3, 4, 6}, other = {2, 6, 2};
    lg_device *d;
    lg_pictures drawn;
    scratch_make();
    c.frames = trained.frames, c.height = trained.height, c.width = trained.width;
    c.text[0].width = TEXT_WIDTH;
    c.learned_variance = false;
    write_net(c, scratch_path("net"));
    need(lg_device_open("host", NULL, &d));
    struct lg_draw_spec spec = spec_of(d, prompts, 2);
    need(lg_draw(&spec, &drawn));
    for (int i = 0; i < 2; i++) check_drawn(d, &drawn, i, &trained);
    lg_pictures_free(&drawn);
    spec.frames = other.frames, spec.height = other.height * FACTOR,
    spec.width = other.width * FACTOR;
    need(lg_draw(&spec, &drawn));
    for (int i = 0; i < 2; i++) check_drawn(d, &drawn, i, &other);
    lg_pictures_free(&drawn);
    spec.height = 3 * FACTOR; /* half a patch */
    assert_int_equal(lg_draw(&spec, &drawn), LG_ERR_USAGE);
    assert_non_null(strstr(lg_err_message(), "multiples of 16"));
    lg_err_clear();
    lg_device_close(&d);
    scratch_remove();
}

/* A clip that begins with a picture shows it, as the autoencoder gives it back, and then what it shows without. A net of zeros
 * changes nothing of what it begins with. */
static void test_first_frame(void **state)
{
    (void)state;
    static const char *const prompts[] = {"a", "b"};
    enum { HEIGHT = 4 * FACTOR, WIDTH = 6 * FACTOR, PIXELS = HEIGHT * WIDTH };
    struct lg_denoiser_config c = denoiser_fixture_latte();
    lg_device *d;
    lg_pictures plain, begun;
    uint8_t *png, rgb[3 * PIXELS];
    size_t bytes;
    scratch_make();
    c.frames = 3, c.height = 4, c.width = 6;
    c.text[0].width = TEXT_WIDTH;
    c.learned_variance = false;
    write_net(c, scratch_path("net"));
    for (int i = 0; i < PIXELS; i++) { /* smooth: autoencoders keep that */
        rgb[3 * i] = (uint8_t)(i / WIDTH * 255 / HEIGHT);
        rgb[3 * i + 1] = (uint8_t)(i % WIDTH * 255 / WIDTH);
        rgb[3 * i + 2] = 128;
    }
    need(lg_picture_encode_png(rgb, WIDTH, HEIGHT, &png, &bytes));
    need(lg_publish_file(scratch_path("first.png"), (const char *)png, bytes));
    free(png);
    need(lg_device_open("host", NULL, &d));
    struct lg_draw_spec spec = spec_of(d, prompts, 2);
    need(lg_draw(&spec, &plain));
    char first[256];
    snprintf(first, sizeof first, "%s", scratch_path("first.png"));
    spec.weights_dir = scratch_path("net"); /* the one text for both */
    spec.first_frame = first;
    need(lg_draw(&spec, &begun));
    assert_int_equal(begun.frames, 3);
    float latent[CHANNELS * 4 * 6];
    uint8_t want[3 * PIXELS];
    encode(d, rgb, latent);
    decode(d, latent, &(struct size){1, 4, 6}, want);
    for (int i = 0; i < 2 * 3 * 3 * PIXELS; i++) {
        const int frame = i / PIXELS % 3, channel = i / PIXELS / 3 % 3;
        const int is = begun.pixels[i],
                  should = frame ? plain.pixels[i] : want[channel * PIXELS + i % PIXELS];
        if (abs(is - should) > 1)
            fail_msg("frame %d, value %d is %d, not %d", frame, i, is, should);
    }
    lg_pictures_free(&plain);
    lg_pictures_free(&begun);
    spec.frames = 1;
    assert_int_equal(lg_draw(&spec, &begun), LG_ERR_USAGE);
    spec.frames = 0, spec.first_frame = "/nowhere.png";
    assert_int_equal(lg_draw(&spec, &begun), LG_ERR_NOTFOUND);
    spec.first_frame = TEXT "/config.json";
    assert_int_equal(lg_draw(&spec, &begun), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "config.json"));
    lg_err_clear();
    lg_device_close(&d);
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shift_and_scale),
                                       cmocka_unit_test(test_clips),
                                       cmocka_unit_test(test_first_frame)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
