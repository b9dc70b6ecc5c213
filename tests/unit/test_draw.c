/* From latents to pixels: a net of zeros leaves the noise as it is, so what is drawn is known: the autoencoder's picture of
 * noise / scaling_factor + shift_factor. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/sample/draw.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define VAE "tests/golden/encoders/vae_sd3" /* shifted and scaled, 16 channels, 8 pixels a cell */
enum { CHANNELS = 16, CELLS = 4, SIDE = 8 * CELLS, SEED = 5 };
enum { LATENT = CHANNELS * CELLS * CELLS, PIXELS = 3 * SIDE * SIDE };

static void need(int rc)
{
    if (rc < 0) fail_msg("%s", lg_err_text());
}

/* A DiT of zeros. */
static void write_net(const char *dir)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    lg_params t;
    c.channels = CHANNELS, c.height = c.width = CELLS;
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

static void decode(lg_device *d, const float *latent, uint8_t *ret)
{
    struct lg_aekl_config c;
    lg_params t;
    lg_stream *s;
    lg_aekl *net;
    need(lg_aekl_config_load(VAE, &c));
    need(lg_aekl_params(&c, LG_AEKL_DECODER, &t));
    float *weights = alloc(d, t.count * sizeof *weights), *x = alloc(d, LATENT * sizeof *x);
    uint8_t *pixels = alloc(d, PIXELS);
    need(lg_aekl_load(&c, VAE, LG_AEKL_DECODER, weights));
    memcpy(x, latent, LATENT * sizeof *x);
    need(lg_stream_open(d, &s));
    const struct lg_aekl_shape shape = {LG_AEKL_DECODER, 1, SIDE, SIDE, 0};
    need(lg_aekl_open(d, &c, &shape, &net));
    lg_aekl_decode(net, s, weights, lg_t4(x, LG_F32, 1, CHANNELS, CELLS, CELLS), LG_NONE,
                   lg_t4(pixels, LG_U8, 1, 3, SIDE, SIDE));
    lg_stream_sync(s);
    memcpy(ret, pixels, PIXELS);
    lg_aekl_close(&net);
    lg_stream_close(&s);
    lg_params_free(&t);
}

static void test_shift_and_scale(void **state)
{
    (void)state;
    static const double scaling = 1.5305, shift = 0.0609;
    float latent[LATENT];
    uint8_t want[PIXELS];
    lg_device *d;
    lg_pictures drawn;
    scratch_make();
    write_net(scratch_path("net"));
    need(lg_device_open("host", NULL, &d));
    const struct lg_draw_spec spec = {
        .weights_dir = scratch_path("net"),
        .vae_dir = VAE,
        .method = {.objective = LG_OBJECTIVE_FLOW, .flow_shift = 1},
        .prompts = (const char *const[]){"2"},
        .n = 1,
        .negative = "",
        .steps = 3,
        .guidance = 1,
        .seed = SEED,
        .device = d,
    };
    need(lg_draw(&spec, &drawn));
    assert_true(drawn.n == 1 && drawn.frames == 1 && drawn.height == SIDE && drawn.width == SIDE);
    lg_philox_normal_f32(latent, LATENT, SEED, LG_PURPOSE_SAMPLE, 0, 0);
    for (int i = 0; i < LATENT; i++) latent[i] = (float)((double)latent[i] / scaling + shift);
    decode(d, latent, want);
    /* Between batches of other sizes a sum may differ in its last bit, and a pixel in its last level. */
    for (int i = 0; i < PIXELS; i++)
        if (abs(drawn.pixels[i] - want[i]) > 1)
            fail_msg("pixel %d is %d, not %d", i, drawn.pixels[i], want[i]);
    lg_pictures_free(&drawn);
    lg_device_close(&d);
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shift_and_scale)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
