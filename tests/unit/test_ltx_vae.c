/* Autoencoders on clips: AutoencoderKLLTXVideo against diffusers (fp64), an AutoencoderKL frame by frame; slices of frames have
 * the bits of the whole, tiles are blended as tiles.h says; bad models. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/nets/autoencoder.h"
#include "stages/nets/tiles.h"
#include "stages/sample/decode_noise.h"
#include "tests/unit/encoder_fixture.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define EMOJI         "examples/emoji/vae"
#define SMALL         "tests/golden/encoders/"
#define TOLERANCE     1e-5
#define TOLERANCE_F64 1e-6 /* the goldens are stored in fp32: 2^-24 each */

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

/* A model on a device and a net of one shape. */
struct model {
    struct fixture f;
    struct lg_autoencoder_config c;
    struct lg_autoencoder_shape shape;
    void *weights;
    lg_autoencoder *net;
    size_t bytes, latents, pixels; /* planned; elements of all samples */
    lg_tensor in, mean, logvar, image, levels;
};

static struct model model_open(const char *dir, const char *device,
                               struct lg_autoencoder_shape shape)
{
    struct model m = {.f = fixture_open(device), .shape = shape};
    lg_params t;
    OK(lg_autoencoder_config_load(dir, &m.c));
    OK(lg_autoencoder_params(&m.c, shape.half, &t));
    float *w = malloc(t.count * sizeof *w);
    OK(lg_autoencoder_load(&m.c, dir, shape.half, w));
    m.weights = to_device(&m.f, w, t.count);
    free(w);
    lg_params_free(&t);
    OK(lg_autoencoder_plan_all(m.f.device, &m.c, &shape, 1, &m.bytes));
    OK(lg_autoencoder_open_all(m.f.device, &m.c, &shape, 1, &m.net));
    const int F = shape.frames, f = lg_autoencoder_latent_frames(&m.c, F), B = shape.batch;
    const int h = shape.height / m.c.factor, w_ = shape.width / m.c.factor, C = m.c.latent_channels;
    const lg_dtype d = lg_device_dtype(m.f.device);
    m.latents = (size_t)(B * C * f * h * w_);
    m.pixels = (size_t)(B * 3 * F * shape.height * shape.width);
    m.mean = lg_t4(device_room(&m.f, m.latents), d, B, C, f * h, w_);
    m.logvar = lg_t4(device_room(&m.f, m.latents), d, B, C, f * h, w_);
    m.image = lg_t4(device_room(&m.f, m.pixels), d, B, 3, F * shape.height, shape.width);
    m.in = lg_t4(device_room(&m.f, m.pixels), LG_U8, B, 3, F * shape.height, shape.width);
    m.levels = lg_t4(device_room(&m.f, m.pixels), LG_U8, B, 3, F * shape.height, shape.width);
    return m;
}

static void model_close(struct model *m)
{
    lg_autoencoder_close(&m->net);
    fixture_close(&m->f);
}

/* Means, then log-variances; the caller frees. */
static float *encode(struct model *m, const uint8_t *pixels)
{
    lg_stream_upload(m->f.stream, m->in.data, pixels, lg_tensor_bytes(&m->in));
    lg_autoencoder_encode(m->net, m->f.stream, m->weights, m->in, m->mean, m->logvar);
    float *mean = from_device(&m->f, m->mean.data, m->latents);
    float *logvar = from_device(&m->f, m->logvar.data, m->latents);
    mean = realloc(mean, 2 * m->latents * sizeof *mean);
    memcpy(mean + m->latents, logvar, m->latents * sizeof *mean);
    free(logvar);
    return mean;
}

static float *decode(struct model *m, const float *latents)
{
    m->mean.data = to_device(&m->f, latents, m->latents);
    lg_autoencoder_decode(m->net, m->f.stream, m->weights, m->mean, m->image, m->levels);
    return from_device(&m->f, m->image.data, m->pixels);
}

static void check(const char *what, const float *got, const float *want, size_t n, double tolerance)
{
    double error = relative_error(got, want, n);
    print_message("  %s: %.2e\n", what, error);
    if (!(error <= tolerance)) fail_msg("%s: relative error %g above %g", what, error, tolerance);
}

/* What is written as pixels is the rounded, clamped image. */
static void check_levels(const struct model *m, const float *image)
{
    const uint8_t *level = m->levels.data;
    for (size_t i = 0; i < m->pixels; i++) {
        float v = (image[i] + 1) * 127.5f;
        v = v < 0 ? 0 : v > 255 ? 255 : v;
        assert_true(level[i] >= v - 0.5001f && level[i] <= v + 0.5001f);
    }
}

static const uint8_t *golden_clip(const lg_st_file *g, int frames, struct lg_autoencoder_shape *ret)
{
    char name[32];
    snprintf(name, sizeof name, "pixels.%d", frames);
    const struct lg_st_entry *e = golden(g, name);
    *ret = (struct lg_autoencoder_shape){.half = LG_AEKL_BOTH,
                                         .batch = (int)e->dim[0],
                                         .frames = frames,
                                         .height = (int)e->dim[3],
                                         .width = (int)e->dim[4]};
    return e->data;
}

static float *golden_of(const lg_st_file *g, const char *what, int frames)
{
    char name[32];
    size_t n;
    snprintf(name, sizeof name, "%s.%d", what, frames);
    return golden_f32(g, name, &n);
}

static void check_golden(const char *dir, const char *device, int frames, double tolerance)
{
    char path[LG_PATH_BYTES];
    lg_st_file *g = NULL;
    struct lg_autoencoder_shape shape;
    OK(lg_path(path, "%s/golden.safetensors", dir));
    OK(lg_st_open(path, &g));
    const uint8_t *pixels = golden_clip(g, frames, &shape);
    float *mean = golden_of(g, "mean", frames), *logvar = golden_of(g, "logvar", frames);
    float *decoded = golden_of(g, "decoded", frames);
    struct model m = model_open(dir, device, shape);
    if (strstr(dir, "ltx_091"))
        lg_autoencoder_set_decoding(m.net, &(struct lg_decoding){.timestep = 0.05, .seed = 5});
    print_message("%s on %s, %d frames of %d x %d\n", dir, device, frames, shape.height,
                  shape.width);
    float *got = encode(&m, pixels);
    check("mean", got, mean, m.latents, tolerance);
    check("logvar", got + m.latents, logvar, m.latents, tolerance);
    float *image = decode(&m, mean);
    check("decoded", image, decoded, m.pixels, tolerance);
    if (!strcmp(device, "host")) check_levels(&m, image);
    model_close(&m);
    lg_st_close(&g);
    free(mean), free(logvar), free(decoded), free(got), free(image);
}

static const struct {
    const char *dir;
    int frames;
} GOLDEN[] = {{SMALL "ltx_090", 1}, {SMALL "ltx_090", 9},  {SMALL "ltx_090", 17},
              {SMALL "ltx_091", 1}, {SMALL "ltx_091", 9},  {SMALL "ltx_095", 1},
              {SMALL "ltx_095", 9}, {SMALL "ltx_095", 17}, {SMALL "ltx_old", 1},
              {SMALL "ltx_old", 9}};

static void is_diffusers(void **state)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(GOLDEN); i++)
        check_golden(GOLDEN[i].dir, "ref64", GOLDEN[i].frames, TOLERANCE_F64);
}

static void in_fp32(void **state)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(GOLDEN); i++)
        check_golden(GOLDEN[i].dir, "host", GOLDEN[i].frames, TOLERANCE);
}

/* ---- slices ---- */

static uint8_t *noise(size_t n)
{
    uint8_t *p = malloc(n);
    uint32_t x = 1;
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    return p;
}

/* What a clip is encoded to, and what that is decoded to, in slices of so many frames. */
struct made {
    float *latents, *images;
    size_t n_latents, n_images, bytes;
};
static struct made make(const char *dir, struct lg_autoencoder_shape shape, const uint8_t *pixels)
{
    struct model m = model_open(dir, "host", shape);
    struct made made = {.n_latents = 2 * m.latents, .n_images = m.pixels, .bytes = m.bytes};
    made.latents = encode(&m, pixels);
    made.images = decode(&m, made.latents);
    check_levels(&m, made.images);
    model_close(&m);
    return made;
}

static void made_free(struct made *m)
{
    free(m->latents);
    free(m->images);
}

static void check_slices(const char *dir, int frames, const int *slices)
{
    struct lg_autoencoder_shape shape = {LG_AEKL_BOTH, 2, frames, 32, 16, 0, 0};
    uint8_t *pixels = noise((size_t)(2 * 3 * frames * 32 * 16));
    struct made whole = make(dir, shape, pixels);
    for (; *slices; slices++) {
        shape.slice = *slices;
        struct made cut = make(dir, shape, pixels);
        print_message("  %s, %d frames in slices of %d: %zu bytes instead of %zu\n", dir, frames,
                      *slices, cut.bytes, whole.bytes);
        assert_memory_equal(cut.latents, whole.latents, whole.n_latents * sizeof(float));
        assert_memory_equal(cut.images, whole.images, whole.n_images * sizeof(float));
        assert_true(cut.bytes < whole.bytes);
        made_free(&cut);
    }
    made_free(&whole);
    free(pixels);
}

static void slices_have_the_bits_of_the_whole(void **state)
{
    check_slices(SMALL "ltx_090", 37, (int[]){1, 4, 8, 11, 20, 0});
    check_slices(SMALL "ltx_095", 37, (int[]){1, 4, 8, 12, 0});
    check_slices(SMALL "ltx_old", 41, (int[]){1, 8, 17, 24, 0}); /* its decoder, too */
}

static void refused(int rc, int code, const char *words)
{
    if (rc != code || !strstr(lg_err_text(), words))
        fail_msg("got %d, wanted %d with \"%s\": %s", rc, code, words, lg_err_text());
}

/* The largest slice of whole, half, a quarter .. that keeps within some bytes. */
static void slices_fit(void **state)
{
    struct lg_autoencoder_config c;
    struct fixture f = fixture_open("host");
    const struct lg_autoencoder_shape whole = {LG_AEKL_ENCODER, 2, 37, 32, 16, 0, 0};
    size_t last = SIZE_MAX;
    OK(lg_autoencoder_config_load(SMALL "ltx_090", &c));
    for (int parts = 1; parts <= 4; parts *= 2) {
        struct lg_autoencoder_shape cut = whole, found = whole;
        size_t bytes;
        cut.slice = (37 + parts - 1) / parts;
        OK(lg_autoencoder_plan_all(f.device, &c, &cut, 1, &bytes));
        assert_true(bytes < last);
        OK(lg_autoencoder_fit_slice(f.device, &c, bytes, &found)); /* scratch memory included */
        assert_int_equal(found.slice, cut.slice);
        last = bytes;
    }
    struct lg_autoencoder_shape least = whole;
    OK(lg_autoencoder_fit_slice(f.device, &c, 1, &least));
    assert_int_equal(least.slice, 1);
    fixture_close(&f);
}

/* As diffusers' pipeline mixes it into a latent of the file, z = x std + mean. */
static void noise_is_mixed(void **state)
{
    enum { C = 6, VALUES = 10 };
    lg_st_file *w;
    float x[2 * C * VALUES], was[2 * C * VALUES], e[C * VALUES], mean[C], spread[C];
    const struct lg_decode_noise m = {
        .vae_dir = SMALL "ltx_091", .channels = C, .values = VALUES, .share = 0.25, .seed = 5};
    OK(lg_st_open(SMALL "ltx_091/diffusion_pytorch_model.safetensors", &w));
    OK(lg_st_read_f32(lg_st_find(w, "latents_mean"), mean, 0, C));
    OK(lg_st_read_f32(lg_st_find(w, "latents_std"), spread, 0, C));
    lg_st_close(&w);
    for (int i = 0; i < 2 * C * VALUES; i++) x[i] = was[i] = (float)(i % 7) - 3;
    OK(lg_decode_noise_mix(&m, x, 2));
    for (int i = 0; i < 2 * C * VALUES; i++) {
        const int c = i / VALUES % C;
        if (i % (C * VALUES) == 0)
            lg_philox_normal_f32(e, C * VALUES, 5, LG_PURPOSE_DECODE, (uint64_t)(i > 0),
                                 (uint64_t)1 << 62);
        const float z = 0.75f * (was[i] * spread[c] + mean[c]) + 0.25f * e[i % (C * VALUES)];
        assert_true(fabsf(x[i] * spread[c] + mean[c] - z) < 1e-5f);
    }
    struct lg_decode_noise wrong = m;
    wrong.channels = 5;
    refused(lg_decode_noise_mix(&wrong, x, 2), LG_ERR_MISMATCH, "latents_mean");
}

/* A clip's bits do not depend on what else there is. */
static void clips_are_alone(void **state)
{
    struct lg_autoencoder_shape shape = {LG_AEKL_BOTH, 3, 5, 16, 16, 0, 0};
    const size_t each = 3 * 5 * 16 * 16;
    uint8_t *pixels = noise(3 * each);
    struct made all = make(SMALL "ltx_090", shape, pixels);
    shape.batch = 1;
    for (size_t i = 0; i < 3; i++) {
        struct made one = make(SMALL "ltx_090", shape, pixels + i * each);
        const size_t n = one.n_latents / 2;
        for (size_t k = 0; k < 2; k++)
            assert_memory_equal(one.latents + k * n, all.latents + (3 * k + i) * n,
                                n * sizeof(float));
        assert_memory_equal(one.images, all.images + i * each, each * sizeof(float));
        made_free(&one);
    }
    made_free(&all);
    free(pixels);
}

/* ---- an AutoencoderKL ---- */

/* Frame k of channel c of a clip (C, F, each). */
static void copy_frame(float *to, const float *clip, size_t C, size_t F, size_t each, size_t k)
{
    for (size_t c = 0; c < C; c++)
        memcpy(to + c * each, clip + (c * F + k) * each, each * sizeof *to);
}

static void frame_by_frame(void **state)
{
    enum { F = 5, S = 32 };
    struct lg_autoencoder_shape shape = {LG_AEKL_BOTH, 1, F, S, S, 2, 0};
    uint8_t *pixels = noise(3 * F * S * S), *frame = malloc(3 * S * S);
    struct made clip = make(EMOJI, shape, pixels);
    shape.frames = 1;
    shape.slice = 0;
    float latent[2 * 4 * S * S], image[3 * S * S];
    for (size_t k = 0; k < F; k++) {
        for (size_t c = 0; c < 3; c++)
            memcpy(frame + c * S * S, pixels + (c * F + k) * S * S, S * S);
        struct made one = make(EMOJI, shape, frame);
        const size_t C = one.n_latents / 2 / (size_t)((S / 4) * (S / 4));
        const size_t cells = one.n_latents / 2 / C;
        for (size_t i = 0; i < 2; i++)
            copy_frame(latent + i * C * cells, clip.latents + i * C * F * cells, C, F, cells, k);
        copy_frame(image, clip.images, 3, F, S * S, k);
        check("latents of a frame", latent, one.latents, one.n_latents, 1e-6);
        check("a frame", image, one.images, one.n_images, 1e-6);
        made_free(&one);
    }
    made_free(&clip);
    free(pixels);
    free(frame);
}

/* ---- tiles ---- */

static void tiles_cover_a_side(void **state)
{
    for (int cells = 1; cells < 40; cells++)
        for (int size = 0; size < 42; size++) {
            const struct lg_tiles t = lg_tiles_cut(cells, size);
            double sum[80] = {0}, w[80];
            assert_true(t.size <= cells && t.at[0] == 0 && t.at[t.n - 1] + t.size == cells);
            assert_true(size == 0 || size >= cells || t.size == LG_MAX(size, 2) || t.n == 1);
            for (int i = 0; i < t.n; i++) {
                assert_true(i == 0 || (t.at[i] > t.at[i - 1] && t.at[i] < t.at[i - 1] + t.size));
                lg_tiles_weights(&t, i, 2, w);
                for (int k = 0; k < 2 * t.size; k++) {
                    assert_true(w[k] >= 0 && w[k] <= 1);
                    sum[2 * t.at[i] + k] += w[k];
                }
            }
            for (int k = 0; k < 2 * cells; k++) assert_true(fabs(sum[k] - 1) < 1e-12);
        }
    const struct lg_tiles t = lg_tiles_cut(7, 4);
    double w[4];
    assert_int_equal(t.n, 2);
    lg_tiles_weights(&t, 0, 1, w);
    assert_true(w[0] == 1 && w[2] == 1 && w[3] == 0.5);
    assert_int_equal(lg_tiles_cut(17, 8).n, 3);
}

/* planes (P, h, w), weighted, into (P, H, W). */
struct area {
    size_t planes, H, W, h, w, top, left;
    const double *rows, *columns;
};
static void add_tile(const struct area *a, const float *tile, double *ret)
{
    for (size_t i = 0; i < a->planes * a->h * a->w; i++) {
        const size_t p = i / (a->h * a->w), r = i / a->w % a->h, c = i % a->w;
        ret[(p * a->H + a->top + r) * a->W + a->left + c] +=
            a->rows[r] * a->columns[c] * (double)tile[i];
    }
}

/* Encoded and decoded in tiles of 16 of 40 x 24: as the net of a tile's size does each, blended. */
static void tiles_are_blended(void **state)
{
    enum { F = 9, H = 40, W = 24, T = 16 };
    const char *dir = SMALL "ltx_090";
    struct lg_autoencoder_shape shape = {LG_AEKL_BOTH, 1, F, H, W, 4, T};
    uint8_t *pixels = noise(3 * F * H * W), *tile = malloc(3 * F * T * T);
    struct made got = make(dir, shape, pixels);
    shape = (struct lg_autoencoder_shape){LG_AEKL_BOTH, 1, F, T, T, 0, 0};
    struct model m = model_open(dir, "host", shape);
    const int f = m.c.factor;
    const size_t F_ = F, cells = (size_t)(H / f * (W / f)), of_tile = (size_t)(T / f * (T / f));
    const size_t all = got.n_latents / 2, planes = all / cells;
    double *latent = calloc(2 * all, sizeof *latent), *image = calloc(got.n_images, sizeof *image);
    float *cut = malloc(planes * of_tile * sizeof *cut), *want = malloc(2 * all * sizeof *want);
    float *pictures = malloc(got.n_images * sizeof *pictures);
    const struct lg_tiles rows = lg_tiles_cut(H / f, T / f), columns = lg_tiles_cut(W / f, T / f);
    assert_true(rows.n > 2 && columns.n > 1);
    for (int i = 0; i < rows.n * columns.n; i++) {
        const int r = i / columns.n, c = i % columns.n;
        double w[2][T], wide[2][T];
        lg_tiles_weights(&rows, r, 1, w[0]), lg_tiles_weights(&columns, c, 1, w[1]);
        lg_tiles_weights(&rows, r, f, wide[0]), lg_tiles_weights(&columns, c, f, wide[1]);
        const size_t top = (size_t)rows.at[r], left = (size_t)columns.at[c], t = (size_t)(T / f);
        const size_t sides[] = {H / (size_t)f, W / (size_t)f};
        for (size_t p = 0; p < 3 * F_ * T; p++)
            memcpy(tile + p * T,
                   pixels + (p / T * H + top * (size_t)f + p % T) * W + left * (size_t)f, T);
        float *made = encode(&m, tile);
        for (size_t k = 0; k < 2; k++)
            add_tile(&(struct area){planes, sides[0], sides[1], t, t, top, left, w[0], w[1]},
                     made + k * planes * of_tile, latent + k * all);
        for (size_t p = 0; p < planes * t; p++)
            memcpy(cut + p * t, got.latents + (p / t * sides[0] + top + p % t) * sides[1] + left,
                   t * sizeof *cut);
        float *decoded = decode(&m, cut);
        add_tile(
            &(struct area){3 * F_, H, W, T, T, top * (size_t)f, left * (size_t)f, wide[0], wide[1]},
            decoded, image);
        free(made);
        free(decoded);
    }
    for (size_t i = 0; i < 2 * all; i++) want[i] = (float)latent[i];
    for (size_t i = 0; i < got.n_images; i++) pictures[i] = (float)image[i];
    check("latents in tiles", got.latents, want, 2 * all, 1e-6);
    check("pictures in tiles", got.images, pictures, got.n_images, 1e-6);
    model_close(&m);
    made_free(&got);
    free(latent), free(image), free(cut), free(want), free(pictures), free(pixels), free(tile);
}

/* ---- shapes together, bad models ---- */

static void shapes_share_memory(void **state)
{
    const char *dir[] = {SMALL "ltx_095", EMOJI};
    for (int i = 0; i < 2; i++) {
        struct fixture f = fixture_open("host");
        struct lg_autoencoder_config c;
        OK(lg_autoencoder_config_load(dir[i], &c));
        const struct lg_autoencoder_shape shape[] = {{LG_AEKL_ENCODER, 2, 9, 32, 32, 0, 0},
                                                     {LG_AEKL_ENCODER, 2, 1, 64, 32, 0, 0}};
        lg_autoencoder *net[2];
        size_t both, one[2];
        for (int k = 0; k < 2; k++)
            OK(lg_autoencoder_plan_all(f.device, &c, &shape[k], 1, &one[k]));
        OK(lg_autoencoder_plan_all(f.device, &c, shape, 2, &both));
        assert_true(both >= LG_MAX(one[0], one[1]) && both < one[0] + one[1]);
        OK(lg_autoencoder_open_all(f.device, &c, shape, 2, net));
        assert_true(lg_autoencoder_flops(net[0]) > lg_autoencoder_flops(net[1]));
        for (int k = 1; k >= 0; k--) lg_autoencoder_close(&net[k]);
        fixture_close(&f);
    }
}

static void bad_configs(void **state)
{
    static const char *const bad[][2] = {
        {"\"encoder_causal\": false", "encoder_causal"},
        {"\"patch_size_t\": 2", "patch_size_t"},
        {"\"block_out_channels\": [4, 8]", "_class_name"},
        {"\"layers_per_block\": [1, 1]", "layers_per_block"},
        {"\"down_block_types\": [\"DownBlock\"]", "down_block_types"},
        {"\"down_block_types\": [\"LTXVideo095DownBlock3D\", \"LTXVideoDownBlock3D\", "
         "\"LTXVideoDownBlock3D\", \"LTXVideoDownBlock3D\"]",
         "several kinds"},
        {"\"spatio_temporal_scaling\": [true, 1, true, true]", "spatio_temporal_scaling"},
        {"\"spatio_temporal_scaling\": [true, false, false, false]",
         "decoder_spatio_temporal_scaling"},
        {"\"upsample_factor\": [2, 2, 2, 2]", "upsample_factor"},
        {"\"timestep_conditioning\": true, \"decoder_block_out_channels\": [4, 8, 8, 8]",
         "timestep_conditioning"},
        {"\"scaling_factor\": 0", "scaling_factor"},
        {"\"spatio_temporal_scaling\": [true, true, true, false, true]", "more blocks"},
    };
    struct lg_autoencoder_config c;
    char text[512];
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        const bool other = !strcmp(bad[i][1], "_class_name");
        snprintf(text, sizeof text, "{\"_class_name\": \"%s\", %s}",
                 other ? "AutoencoderKLWan" : "AutoencoderKLLTXVideo", bad[i][0]);
        scratch_write("m/config.json", text);
        refused(lg_autoencoder_config_load(scratch_path("m"), &c), LG_ERR_CONFIG, bad[i][1]);
    }
    /* 0.9.0's: diffusers' defaults */
    const char *plain = "{\"_class_name\": \"AutoencoderKLLTXVideo\"}";
    scratch_write("m/config.json", plain);
    OK(lg_autoencoder_config_load(scratch_path("m"), &c));
    assert_int_equal(c.factor, 32);
    assert_int_equal(c.factor_time, 8);
    assert_int_equal(c.latent_channels, 128);
    assert_int_equal(lg_autoencoder_latent_frames(&c, 121), 16);
    assert_int_equal(lg_autoencoder_latent_frames(&c, 120), 0);
    struct fixture f = fixture_open("host");
    size_t bytes;
    const struct lg_autoencoder_shape wrong[] = {{LG_AEKL_ENCODER, 1, 8, 32, 32, 0, 0},
                                                 {LG_AEKL_ENCODER, 1, 9, 48, 32, 0, 0}};
    refused(lg_autoencoder_plan_all(f.device, &c, &wrong[0], 1, &bytes), LG_ERR_CONFIG, "8 frames");
    refused(lg_autoencoder_plan_all(f.device, &c, &wrong[1], 1, &bytes), LG_ERR_CONFIG, "32 x 48");
    fixture_close(&f);
    /* A decoder that adds noise: too few entries, and a block that widens (of which diffusers has no scales). */
    const char *few = "{\"_class_name\": \"AutoencoderKLLTXVideo\", "
                      "\"decoder_inject_noise\": [true, true, true, false]}";
    const char *wide = "{\"_class_name\": \"AutoencoderKLLTXVideo\", "
                       "\"decoder_inject_noise\": [false, true, false, false, false]}";
    scratch_write("m/config.json", few);
    refused(lg_autoencoder_config_load(scratch_path("m"), &c), LG_ERR_CONFIG,
            "\"decoder_inject_noise\" has 4 entries, wanted are 5");
    scratch_write("m/config.json", wide);
    refused(lg_autoencoder_config_load(scratch_path("m"), &c), LG_ERR_CONFIG,
            "a block that widens adds no noise");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_diffusers),
        cmocka_unit_test(in_fp32),
        cmocka_unit_test(slices_have_the_bits_of_the_whole),
        cmocka_unit_test(slices_fit),
        cmocka_unit_test(noise_is_mixed),
        cmocka_unit_test(clips_are_alone),
        cmocka_unit_test(frame_by_frame),
        cmocka_unit_test(tiles_cover_a_side),
        cmocka_unit_test(tiles_are_blended),
        cmocka_unit_test(shapes_share_memory),
        cmocka_unit_test(bad_configs),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
