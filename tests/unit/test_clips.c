/* Transformers of clips, Latte and LTX, against diffusers' LatteTransformer3DModel and LTXVideoTransformer3DModel: output and
 * the gradient of every parameter, of several frames on odd sides and of a picture; recomputation; files, published ones too;
 * what is refused.
 *
 * The golden values are fp64 (tests/golden/make_video.py). Tolerances as in test_denoiser_golden.c: ref64 1e-7, the rounding of
 * stored gradients and of positions; host 1e-5. */
#include "base/fs.h"
#include "stages/nets/layers.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static struct lg_denoiser_config of_size(struct lg_denoiser_config c, int frames, int height,
                                         int width)
{
    c.frames = frames, c.height = height, c.width = width;
    c.depth = 1;
    return c;
}

static void compare_all(const char *device, double tol)
{
    const struct lg_denoiser_config latte = denoiser_fixture_latte(), ltx = denoiser_fixture_ltx();
    const struct {
        const char *net;
        struct lg_denoiser_config config;
        bool frame_times;
    } cases[] = {{"latte", latte, false},
                 {"latte_other", of_size(latte, 5, 4, 2), false},
                 {"latte_picture", of_size(latte, 1, 4, 10), false},
                 {"ltx", ltx, false},
                 {"ltx_other", of_size(ltx, 4, 3, 2), false},
                 {"ltx_picture", of_size(ltx, 1, 6, 5), false},
                 {"ltx_frame_times", of_size(ltx, 3, 5, 7), true}};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        const struct denoiser_golden g = {.path = "tests/golden/video.safetensors",
                                          .net = cases[i].net,
                                          .gradients = true,
                                          .frame_times = cases[i].frame_times,
                                          .tolerance = tol};
        assert_int_equal(denoiser_fixture_compare(device, &cases[i].config, &g), 0);
    }
}

static void ref64_is_diffusers(void **state)
{
    compare_all("ref64", 1e-7);
}

static void host_is_diffusers(void **state)
{
    compare_all("host", 1e-5);
}

/* With anything recomputed the bits are the same; and with adapters. */
static void gradients_are_recomputed(void **state)
{
    static const char *const words[][2] = {
        {"block", NULL}, {"norms", NULL}, {"mlp", NULL}, {"uniform:1", NULL}, {"uniform:2", NULL}};
    const struct lg_denoiser_config nets[] = {denoiser_fixture_latte(), denoiser_fixture_ltx()};
    for (size_t k = 0; k < 2 * LG_ARRAY_LEN(nets); k++) {
        struct denoiser_fixture f;
        if (k % 2)
            denoiser_fixture_open_frames(&f, "host", &nets[k / 2]);
        else
            denoiser_fixture_open(&f, "host", NULL, &nets[k / 2], true);
        const size_t bytes = f.params.count * sizeof(float);
        float *once = malloc(bytes);
        LG_ASSERT(once);
        denoiser_fixture_forward(&f);
        denoiser_fixture_backward(&f, false);
        memcpy(once, f.grads, bytes);
        for (size_t w = 0; w < LG_ARRAY_LEN(words); w++) {
            assert_int_equal(denoiser_fixture_recompute(&f, words[w]), 0);
            denoiser_fixture_forward(&f);
            denoiser_fixture_backward(&f, false);
            assert_memory_equal(f.grads, once, bytes);
        }
        free(once);
        denoiser_fixture_close(&f);
    }
}

/* Attention along time of more heads than one operation takes goes in parts, with and without a rest. */
static void heads_go_in_parts(void **state)
{
    static const int64_t most[] = {7, 15, 44}; /* of 3 x 5 places of 3 heads */
    const struct lg_denoiser_config latte = denoiser_fixture_latte();
    const int64_t all = lg_net_place_heads_max;
    struct denoiser_fixture f;
    denoiser_fixture_open(&f, "host", NULL, &latte, true);
    const size_t bytes = f.params.count * sizeof(float), out = lg_tensor_bytes(&f.out);
    char *once = malloc(bytes + out);
    LG_ASSERT(once);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, false);
    memcpy(once, f.grads, bytes);
    memcpy(once + bytes, f.out.data, out);
    const double flops = lg_denoiser_flops(&latte);
    for (size_t i = 0; i < LG_ARRAY_LEN(most); i++) {
        lg_net_place_heads_max = most[i];
        assert_int_equal(denoiser_fixture_recompute(&f, (const char *const[]){"norms", NULL}), 0);
        denoiser_fixture_forward(&f);
        denoiser_fixture_backward(&f, false);
        assert_memory_equal(f.grads, once, bytes);
        assert_memory_equal(f.out.data, once + bytes, out);
        assert_true(lg_denoiser_flops(&latte) == flops);
    }
    lg_net_place_heads_max = all;
    free(once);
    denoiser_fixture_close(&f);
}

/* ---- files ---- */

static void round_trip(const struct lg_denoiser_config *c)
{
    const char *dir = scratch_make();
    struct lg_denoiser_config read;
    lg_params t;
    assert_int_equal(lg_denoiser_params(c, &t), 0);
    float *w = calloc(t.count, sizeof *w), *back = malloc(t.count * sizeof *back);
    LG_ASSERT(w && back);
    for (int i = 0; i < t.n; i++)
        for (size_t e = 0; e < t.p[i].count; e++) w[t.p[i].offset + e] = (float)(t.p[i].offset + e);
    assert_int_equal(lg_denoiser_save(c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w}),
                     0);
    assert_int_equal(lg_denoiser_config_load(scratch_path("config.json"), &read), 0);
    assert_memory_equal(c->text, read.text, sizeof read.text);
    assert_true(c->kind == read.kind && c->frames == read.frames && c->height == read.height &&
                c->width == read.width && c->depth == read.depth && c->hidden == read.hidden &&
                c->heads == read.heads && c->patch == read.patch && c->norm_eps == read.norm_eps &&
                c->learned_variance == read.learned_variance &&
                c->no_attention_bias == read.no_attention_bias &&
                c->cell_seconds == read.cell_seconds && c->cell_pixels == read.cell_pixels);
    assert_int_equal(lg_denoiser_load(&read, dir, back), 0);
    assert_memory_equal(w, back, t.count * sizeof *w);
    free(w);
    free(back);
    lg_params_free(&t);
    scratch_remove();
}

static void files(void **state)
{
    struct lg_denoiser_config latte = denoiser_fixture_latte(), ltx = denoiser_fixture_ltx();
    round_trip(&latte);
    round_trip(&ltx);
    latte.frames = 1, latte.no_attention_bias = true, latte.learned_variance = false;
    ltx.no_attention_bias = true, ltx.cell_seconds = 0.25, ltx.cell_pixels = 16, ltx.frames = 2;
    round_trip(&latte);
    round_trip(&ltx);
}

/* What the published files say; the numbers of parameters are diffusers' own. */
static const char PUBLISHED_LTX[] =
    "{\"_class_name\": \"LTXVideoTransformer3DModel\", \"activation_fn\": \"gelu-approximate\","
    "\"attention_bias\": true, \"attention_head_dim\": 64, \"attention_out_bias\": true,"
    "\"caption_channels\": 4096, \"cross_attention_dim\": 2048, \"in_channels\": 128,"
    "\"norm_elementwise_affine\": false, \"norm_eps\": 1e-06, \"num_attention_heads\": 32,"
    "\"num_layers\": 28, \"out_channels\": 128, \"patch_size\": 1, \"patch_size_t\": 1,"
    "\"qk_norm\": \"rms_norm_across_heads\"}";
static const char PUBLISHED_LATTE[] =
    "{\"_class_name\": \"LatteTransformer3DModel\", \"activation_fn\": \"gelu-approximate\","
    "\"attention_bias\": true, \"attention_head_dim\": 72, \"caption_channels\": 4096,"
    "\"cross_attention_dim\": 1152, \"dropout\": 0.0, \"in_channels\": 4,"
    "\"norm_elementwise_affine\": false, \"norm_eps\": 1e-06, \"norm_type\": \"ada_norm_single\","
    "\"num_attention_heads\": 16, \"num_embeds_ada_norm\": 1000, \"num_layers\": 28,"
    "\"out_channels\": 8, \"patch_size\": 2, \"sample_size\": 64, \"video_length\": 16}";

static size_t parameters(const struct lg_denoiser_config *c)
{
    lg_params t;
    size_t n = 0;
    assert_int_equal(lg_denoiser_params(c, &t), 0);
    for (int i = 0; i < t.n; i++) n += t.p[i].count;
    lg_params_free(&t);
    return n;
}

static int load(const char *text, struct lg_denoiser_config *ret)
{
    scratch_make();
    assert_int_equal(lg_publish_file(scratch_path("config.json"), text, strlen(text)), 0);
    int rc = lg_denoiser_config_load(scratch_path("config.json"), ret);
    scratch_remove();
    return rc;
}

static void published(void **state)
{
    struct lg_denoiser_config c;
    assert_int_equal(load(PUBLISHED_LTX, &c), 0);
    assert_true(c.kind == LG_LTX && c.channels == 128 && c.patch == 1 && c.hidden == 2048);
    assert_int_equal(parameters(&c), 1923385472);
    assert_int_equal(load(PUBLISHED_LATTE, &c), 0);
    assert_true(c.kind == LG_LATTE && c.frames == 16 && c.depth == 28 && c.learned_variance);
    assert_int_equal(parameters(&c), 1057246880);
}

/* A published config with another value of a key. */
static void refused(const char *published, const char *key, const char *value, const char *needle)
{
    char text[2048];
    struct lg_denoiser_config c;
    const char *at = strstr(published, key);
    assert_non_null(at);
    at += strlen(key);
    snprintf(text, sizeof text, "%.*s\": %s%s", (int)(at - published), published, value,
             at + strcspn(at, ",}"));
    assert_int_equal(load(text, &c), LG_ERR_CONFIG);
    if (!strstr(lg_err_text(), needle)) fail_msg("%s: %s", key, lg_err_text());
    lg_err_clear();
}

static void others_are_refused(void **state)
{
    refused(PUBLISHED_LTX, "patch_size", "2", "patch = 1");
    refused(PUBLISHED_LTX, "patch_size_t", "2", "patch_size_t");
    refused(PUBLISHED_LTX, "cross_attention_dim", "1024", "cross_attention_dim");
    refused(PUBLISHED_LTX, "attention_out_bias", "false", "attention_out_bias");
    refused(PUBLISHED_LTX, "norm_elementwise_affine", "true", "norm_elementwise_affine");
    refused(PUBLISHED_LTX, "qk_norm", "\"rms_norm\"", "qk_norm");
    refused(PUBLISHED_LTX, "out_channels", "256", "learned_variance");
    refused(PUBLISHED_LATTE, "cross_attention_dim", "1024", "cross_attention_dim");
    refused(PUBLISHED_LATTE, "activation_fn", "\"geglu\"", "activation_fn");
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    c.frames = 2;
    assert_int_equal(lg_denoiser_config_check(&c), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_text(), "pixart takes pictures"));
    lg_err_clear();
}

/* Latte's frames stay whole; LTX's norms want all heads. */
static void splits_are_refused(void **state)
{
    struct lg_denoiser_config latte = denoiser_fixture_latte(), ltx = denoiser_fixture_ltx();
    struct lg_band band;
    assert_int_equal(lg_denoiser_band(&latte, &(struct lg_sequence){.degree = 2}, &band), 0);
    assert_true(band.first == 0 && band.height == 6);
    latte.frames = 1;
    assert_int_equal(lg_denoiser_band(&latte, &(struct lg_sequence){.degree = 2}, &band),
                     LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_text(), "1 frames"));
    lg_err_clear();
    const struct lg_sequence fastseq = {.degree = 2, .kind = LG_SEQUENCE_FASTSEQ};
    assert_int_equal(lg_denoiser_band(&ltx, &fastseq, &band), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_text(), "ulysses"));
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ref64_is_diffusers),
                                       cmocka_unit_test(host_is_diffusers),
                                       cmocka_unit_test(gradients_are_recomputed),
                                       cmocka_unit_test(heads_go_in_parts),
                                       cmocka_unit_test(files),
                                       cmocka_unit_test(published),
                                       cmocka_unit_test(others_are_refused),
                                       cmocka_unit_test(splits_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
