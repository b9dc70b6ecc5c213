/* AutoencoderKL against diffusers (fp64), the invariances that the pipeline stands on (a picture's
 * bits depend neither on its neighbours nor on its slot), slices, bad models. */
#include "base/fs.h"
#include "stages/nets/autoencoder_kl.h"
#include "tests/unit/encoder_fixture.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define EMOJI         "examples/emoji/vae"
#define EMOJI_GOLDEN  "tests/golden/emoji.safetensors"
#define SMALL         "tests/golden/encoders/"
#define TOLERANCE     1e-4 /* the project's promise for latents and pictures in fp32 */
#define TOLERANCE_F64 1e-6 /* the goldens are stored in fp32: 2^-24 each */

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

/* A model on a device, both halves, and the net of one shape. */
struct model {
    struct fixture f;
    struct lg_aekl_config c;
    void *weights;
    lg_aekl *net;
    int batch, height, width;
    size_t latent, picture; /* elements of one sample */
    lg_tensor pixels, mean, logvar, image, levels;
};

static struct model model_open(const char *dir, const char *device, int batch, int height,
                               int width, int slice)
{
    struct model m = {.f = fixture_open(device), .batch = batch, .height = height, .width = width};
    OK(lg_aekl_config_load(dir, &m.c));
    lg_params t;
    OK(lg_aekl_params(&m.c, LG_AEKL_BOTH, &t));
    float *w = malloc(t.count * sizeof *w);
    OK(lg_aekl_load(&m.c, dir, LG_AEKL_BOTH, w));
    m.weights = to_device(&m.f, w, t.count);
    free(w);
    lg_params_free(&t);
    struct lg_aekl_shape shape = {LG_AEKL_BOTH, batch, height, width, slice};
    size_t plan = 0;
    OK(lg_aekl_plan(m.f.device, &m.c, &shape, &plan));
    assert_true(plan > 0);
    OK(lg_aekl_open(m.f.device, &m.c, &shape, &m.net));
    int factor = lg_aekl_factor(&m.c), h = height / factor, w_ = width / factor;
    int C = m.c.latent_channels;
    lg_dtype d = lg_device_dtype(m.f.device);
    m.latent = (size_t)(C * h * w_);
    m.picture = (size_t)(3 * height * width);
    size_t B = (size_t)batch;
    m.mean = lg_t4(device_room(&m.f, B * m.latent), d, batch, C, h, w_);
    m.logvar = lg_t4(device_room(&m.f, B * m.latent), d, batch, C, h, w_);
    m.image = lg_t4(device_room(&m.f, B * m.picture), d, batch, 3, height, width);
    m.pixels = lg_t4(device_room(&m.f, B * m.picture), LG_U8, batch, 3, height, width);
    m.levels = lg_t4(device_room(&m.f, B * m.picture), LG_U8, batch, 3, height, width);
    return m;
}

static void model_close(struct model *m)
{
    lg_aekl_close(&m->net);
    fixture_close(&m->f);
}

struct latents {
    float *mean, *logvar; /* freed by the caller */
};

static struct latents encode(struct model *m, const uint8_t *pixels)
{
    size_t n = (size_t)m->batch * m->latent;
    lg_stream_upload(m->f.stream, m->pixels.data, pixels, lg_tensor_bytes(&m->pixels));
    lg_aekl_encode(m->net, m->f.stream, m->weights, m->pixels, m->mean, m->logvar);
    return (struct latents){from_device(&m->f, m->mean.data, n),
                            from_device(&m->f, m->logvar.data, n)};
}

/* The picture of the latents that lie in m->mean. */
static float *decode(struct model *m)
{
    lg_aekl_decode(m->net, m->f.stream, m->weights, m->mean, m->image, m->levels);
    return from_device(&m->f, m->image.data, (size_t)m->batch * m->picture);
}

static void check(const char *what, const char *device, const float *got, const float *want,
                  size_t n, double tolerance)
{
    double error = relative_error(got, want, n);
    print_message("  %s on %s: %.2e\n", what, device, error);
    if (!(error <= tolerance)) fail_msg("%s: relative error %g above %g", what, error, tolerance);
}

/* What is written as pixels is the rounded, clamped image. */
static void check_levels(const struct model *m, const float *image)
{
    const uint8_t *level = m->levels.data;
    for (size_t i = 0; i < (size_t)m->batch * m->picture; i++) {
        float v = (image[i] + 1) * 127.5f;
        v = v < 0 ? 0 : v > 255 ? 255 : v;
        assert_true(level[i] >= v - 0.5001f && level[i] <= v + 0.5001f);
    }
}

static void check_golden(const char *dir, const char *golden_path, const char *device, int slice,
                         double tolerance)
{
    lg_st_file *g = NULL;
    OK(lg_st_open(golden_path, &g));
    const struct lg_st_entry *pixels = golden(g, "pixels");
    size_t n, n_image;
    float *mean = golden_f32(g, "latent_mean", &n), *logvar = golden_f32(g, "latent_logvar", &n);
    float *decoded = golden_f32(g, "decoded", &n_image);
    struct model m = model_open(dir, device, (int)pixels->dim[0], (int)pixels->dim[2],
                                (int)pixels->dim[3], slice);
    print_message("%s, slice %d\n", dir, slice);
    struct latents got = encode(&m, pixels->data);
    check("latent_mean", device, got.mean, mean, n, tolerance);
    check("latent_logvar", device, got.logvar, logvar, n, tolerance);
    void *ours = m.mean.data;
    m.mean.data = to_device(&m.f, mean, n); /* the golden decodes its own mean */
    float *image = decode(&m);
    check("decoded", device, image, decoded, n_image, tolerance);
    check_levels(&m, image);
    m.mean.data = ours;
    free(image);
    free(got.mean);
    free(got.logvar);
    free(mean);
    free(logvar);
    free(decoded);
    model_close(&m);
    lg_st_close(&g);
}

static void test_emoji_golden(void **state)
{
    (void)state;
    check_golden(EMOJI, EMOJI_GOLDEN, "host", 0, TOLERANCE);
    check_golden(EMOJI, EMOJI_GOLDEN, "host", 3, TOLERANCE); /* the last slice is padded */
}

static void test_small_goldens(void **state)
{
    (void)state;
    static const char *const names[] = {"vae_deep", "vae_plain", "vae_old", "vae_sd3"};
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        char dir[128], path[192];
        snprintf(dir, sizeof dir, SMALL "%s", names[i]);
        snprintf(path, sizeof path, "%s/golden.safetensors", dir);
        check_golden(dir, path, "host", 0, TOLERANCE);
        check_golden(dir, path, "ref64", 2, TOLERANCE_F64);
    }
}

/* The same picture in every slot, among changing neighbours, in full and partial slices. */
static void check_slots(const char *dir, int side, int batch, int slice)
{
    struct model m = model_open(dir, "host", batch, side, side, slice);
    size_t bytes = m.latent * sizeof(float), picture_bytes = m.picture * sizeof(float);
    uint8_t *pixels = malloc((size_t)batch * m.picture);
    struct latents first = {0};
    float *first_image = NULL;
    for (int slot = 0; slot < batch; slot++) {
        for (size_t i = 0; i < (size_t)batch * m.picture; i++)
            pixels[i] = (uint8_t)((i * 2654435761u + (size_t)slot * 977) >> 13);
        for (size_t i = 0; i < m.picture; i++)
            pixels[(size_t)slot * m.picture + i] = (uint8_t)(i * 40503u >> 7);
        struct latents out = encode(&m, pixels);
        float *image = decode(&m);
        if (!first.mean) {
            first.mean = malloc(bytes);
            first.logvar = malloc(bytes);
            first_image = malloc(picture_bytes);
            memcpy(first.mean, out.mean, bytes);
            memcpy(first.logvar, out.logvar, bytes);
            memcpy(first_image, image, picture_bytes);
        }
        assert_memory_equal(first.mean, out.mean + (size_t)slot * m.latent, bytes);
        assert_memory_equal(first.logvar, out.logvar + (size_t)slot * m.latent, bytes);
        assert_memory_equal(first_image, image + (size_t)slot * m.picture, picture_bytes);
        free(out.mean);
        free(out.logvar);
        free(image);
    }
    free(first.mean);
    free(first.logvar);
    free(first_image);
    free(pixels);
    model_close(&m);
}

static void test_slot_and_neighbours(void **state)
{
    (void)state;
    check_slots(EMOJI, 32, 4, 0);
    check_slots(EMOJI, 32, 5, 2);
    check_slots(SMALL "vae_deep", 16, 7, 3);
}

static void test_slice_bounds_memory(void **state)
{
    (void)state;
    struct fixture f = fixture_open("host");
    struct lg_aekl_config c;
    OK(lg_aekl_config_load(EMOJI, &c));
    size_t whole, half, one;
    OK(lg_aekl_plan(f.device, &c, &(struct lg_aekl_shape){LG_AEKL_ENCODER, 16, 64, 64, 0}, &whole));
    OK(lg_aekl_plan(f.device, &c, &(struct lg_aekl_shape){LG_AEKL_ENCODER, 16, 64, 64, 8}, &half));
    OK(lg_aekl_plan(f.device, &c, &(struct lg_aekl_shape){LG_AEKL_ENCODER, 16, 64, 64, 1}, &one));
    print_message("16 pictures: %zu bytes, slices of 8: %zu, of 1: %zu\n", whole, half, one);
    assert_true(one < half && half < whole && one < whole / 8);
    fixture_close(&f);
}

/* A half alone reads only its own tensors and gives the bits of the whole. */
static void test_halves(void **state)
{
    (void)state;
    struct lg_aekl_config c;
    OK(lg_aekl_config_load(SMALL "vae_deep", &c));
    lg_params both, encoder, decoder;
    OK(lg_aekl_params(&c, LG_AEKL_BOTH, &both));
    OK(lg_aekl_params(&c, LG_AEKL_ENCODER, &encoder));
    OK(lg_aekl_params(&c, LG_AEKL_DECODER, &decoder));
    assert_int_equal(encoder.n + decoder.n, both.n);
    assert_true(lg_params_find(&encoder, "quant_conv.weight") >= 0);
    assert_true(lg_params_find(&decoder, "post_quant_conv.weight") >= 0);
    float *all = malloc(both.count * sizeof *all), *part = malloc(both.count * sizeof *part);
    OK(lg_aekl_load(&c, SMALL "vae_deep", LG_AEKL_BOTH, all));
    OK(lg_aekl_load(&c, SMALL "vae_deep", LG_AEKL_ENCODER, part));
    assert_memory_equal(all, part, encoder.count * sizeof *all);
    OK(lg_aekl_load(&c, SMALL "vae_deep", LG_AEKL_DECODER, part));
    assert_memory_equal(all + encoder.count, part, decoder.count * sizeof *all);
    free(all);
    free(part);
    lg_params_free(&both);
    lg_params_free(&encoder);
    lg_params_free(&decoder);
}

/* Expects rc and a part of the message. */
static void refused(int rc, int want, const char *needle)
{
    if (rc != want || !strstr(lg_err_message(), needle))
        fail_msg("rc %d, wanted %d; \"%s\" lacks \"%s\"", rc, want, rc ? lg_err_message() : "",
                 needle);
    lg_err_clear();
}

static void test_bad_configs(void **state)
{
    (void)state;
#define AEKL "{\"_class_name\": \"AutoencoderKL\", "
    static const char *const bad[][2] = {
        {"{\"_class_name\": \"AutoencoderTiny\"}", "AutoencoderTiny"},
        {"{}", "\"_class_name\" is missing"},
        {AEKL "\"latent_channels\": 4}", "\"block_out_channels\" is missing"},
        {AEKL "\"block_out_channels\": 32}", "not a list"},
        {AEKL "\"block_out_channels\": []}", "not a list"},
        {AEKL "\"block_out_channels\": [32, \"x\"]}", "not a whole number"},
        {AEKL "\"block_out_channels\": [32, 40]}", "does not divide"},
        {AEKL "\"block_out_channels\": [32], \"act_fn\": \"relu\"}", "act_fn"},
        {AEKL "\"block_out_channels\": [32], \"in_channels\": 1}", "in_channels"},
        {AEKL "\"block_out_channels\": [32], \"scaling_factor\": 0}", "scaling_factor"},
        {AEKL "\"block_out_channels\": [32], \"latents_mean\": [1]}", "latents_mean"},
        {AEKL "\"block_out_channels\": [32], \"use_quant_conv\": 1}", "use_quant_conv"},
        {AEKL "\"block_out_channels\": [32], \"down_block_types\": [\"AttnDownBlock2D\"]}",
         "down_block_types"},
    };
    scratch_make();
    struct lg_aekl_config c;
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        scratch_write("m/config.json", bad[i][0]);
        refused(lg_aekl_config_load(scratch_path("m"), &c), LG_ERR_CONFIG, bad[i][1]);
    }
    refused(lg_aekl_config_load("examples/emoji/text_encoder", &c), LG_ERR_CONFIG, "_class_name");
    scratch_write("m/config.json", AEKL "\"block_out_channels\": [64]}");
    OK(lg_aekl_config_load(scratch_path("m"), &c)); /* diffusers' defaults */
    assert_true(c.mid_attention && c.quant_conv && c.post_quant_conv && c.norm_groups == 32 &&
                c.layers_per_block == 1 && c.latent_channels == 4);
    assert_true(c.scaling_factor == 0.18215 && c.shift_factor == 0);
    OK(lg_aekl_config_load(SMALL "vae_sd3", &c));
    assert_true(c.latent_channels == 16 && !c.quant_conv && !c.post_quant_conv);
    assert_true(c.scaling_factor == 1.5305 && c.shift_factor == 0.0609);
    OK(lg_aekl_config_load(EMOJI, &c));
    struct fixture f = fixture_open("host");
    size_t bytes;
    refused(
        lg_aekl_plan(f.device, &c, &(struct lg_aekl_shape){LG_AEKL_ENCODER, 1, 66, 64, 0}, &bytes),
        LG_ERR_CONFIG, "multiples of 4");
    fixture_close(&f);
    scratch_remove();
}

static void test_bad_weights(void **state)
{
    (void)state;
    struct lg_aekl_config c, d;
    OK(lg_aekl_config_load(SMALL "vae_plain", &c));
    float *w = calloc(1 << 20, sizeof *w);
    const char *dir = SMALL "vae_plain";
    d = c;
    d.layers_per_block = 2;
    refused(lg_aekl_load(&d, dir, LG_AEKL_BOTH, w), LG_ERR_MISMATCH, "resnets.1");
    d = c;
    d.mid_attention = true;
    refused(lg_aekl_load(&d, dir, LG_AEKL_BOTH, w), LG_ERR_MISMATCH, "attentions.0");
    d = c;
    d.quant_conv = true;
    refused(lg_aekl_load(&d, dir, LG_AEKL_BOTH, w), LG_ERR_MISMATCH, "quant_conv.weight");
    d = c;
    d.latent_channels = 8;
    refused(lg_aekl_load(&d, dir, LG_AEKL_BOTH, w), LG_ERR_MISMATCH, "has shape (8, 16, 3, 3)");
    d = c;
    d.blocks = 1;
    refused(lg_aekl_load(&d, dir, LG_AEKL_BOTH, w), LG_ERR_MISMATCH, "none of this model's");
    refused(lg_aekl_load(&c, "examples/emoji/text_encoder", LG_AEKL_BOTH, w), LG_ERR_NOTFOUND,
            "diffusion_pytorch_model.safetensors");
    char *data;
    size_t bytes;
    OK(lg_read_file(SMALL "vae_plain/diffusion_pytorch_model.safetensors", 1 << 24, &data, &bytes));
    scratch_make();
    OK(lg_publish_file(scratch_path("diffusion_pytorch_model.safetensors"), data, bytes - 12345));
    refused(lg_aekl_load(&c, scratch_path("."), LG_AEKL_BOTH, w), LG_ERR_CORRUPT,
            "12345 bytes are missing");
    scratch_remove();
    free(data);
    free(w);
}

/* Encoders of three shapes in one memory, the largest's, take turns: each gives what it gives alone. */
static void test_shapes_in_one_memory(void **state)
{
    (void)state;
    enum { SHAPES = 3 };
    static const int side[SHAPES][2] = {{16, 32}, {32, 32}, {48, 16}}; /* height, width */
    struct model m[SHAPES];
    struct latents want[SHAPES];
    struct lg_aekl_shape shape[SHAPES];
    lg_aekl *own[SHAPES], *net[SHAPES];
    uint8_t pixels[2 * 3 * 32 * 32];
    size_t all = 0, one = 0, most = 0, sum = 0;
    for (size_t i = 0; i < sizeof pixels; i++) pixels[i] = (uint8_t)(i * 37 + i / 90);
    for (int k = 0; k < SHAPES; k++) {
        m[k] = model_open(EMOJI, "host", 2, side[k][0], side[k][1], 1);
        shape[k] = (struct lg_aekl_shape){LG_AEKL_ENCODER, 2, side[k][0], side[k][1], 1};
        want[k] = encode(&m[k], pixels);
        own[k] = m[k].net;
        OK(lg_aekl_plan(m[0].f.device, &m[0].c, &shape[k], &one));
        most = LG_MAX(most, one);
        sum += one;
    }
    OK(lg_aekl_plan_all(m[0].f.device, &m[0].c, shape, SHAPES, &all));
    assert_true(all >= most && all < sum);
    OK(lg_aekl_open_all(m[0].f.device, &m[0].c, shape, SHAPES, net));
    for (int i = 0; i < 3 * SHAPES; i++) {
        const int k = i * 2 % SHAPES;
        const size_t bytes = 2 * m[k].latent * sizeof(float);
        m[k].net = net[k];
        struct latents got = encode(&m[k], pixels);
        assert_memory_equal(got.mean, want[k].mean, bytes);
        assert_memory_equal(got.logvar, want[k].logvar, bytes);
        free(got.mean);
        free(got.logvar);
        m[k].net = own[k];
    }
    for (int k = SHAPES - 1; k >= 0; k--) lg_aekl_close(&net[k]);
    shape[2].width = 30; /* no multiple of the factor */
    assert_int_equal(lg_aekl_open_all(m[0].f.device, &m[0].c, shape, SHAPES, net), LG_ERR_CONFIG);
    for (int k = 0; k < SHAPES; k++) assert_null(net[k]);
    for (int k = 0; k < SHAPES; k++) {
        free(want[k].mean);
        free(want[k].logvar);
        model_close(&m[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes_in_one_memory), cmocka_unit_test(test_emoji_golden),
        cmocka_unit_test(test_small_goldens),        cmocka_unit_test(test_slot_and_neighbours),
        cmocka_unit_test(test_slice_bounds_memory),  cmocka_unit_test(test_halves),
        cmocka_unit_test(test_bad_configs),          cmocka_unit_test(test_bad_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
