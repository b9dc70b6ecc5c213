/* U-Nets against diffusers' UNet2DConditionModel: output and the gradient of every parameter, of one as SD 2's on sides that
 * are odd at two levels and on even ones, and of one as SDXL's with both texts and all six numbers; latents that are drawn
 * by DDIM and DPM-Solver++; adding to gradients, adapters, recomputation; files.
 *
 * The golden values are fp64 (tests/golden/make_unet.py). Tolerances as in test_denoiser_golden.c: ref64 1e-7, the rounding of
 * stored gradients; host 1e-5 (PyTorch's own fp32 is up to 5e-6 off there); a trajectory 1e-4. */
#include "base/fs.h"
#include "stages/nets/sampler.h"
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

static const char GOLDEN[] = "tests/golden/unet.safetensors";

static void compare(const char *device, const char *net, const struct lg_denoiser_config *c,
                    bool gradients, double tol)
{
    const struct denoiser_golden g = {
        .path = GOLDEN, .net = net, .gradients = gradients, .tolerance = tol};
    assert_int_equal(denoiser_fixture_compare(device, c, &g), 0);
}

static void compare_all(const char *device, double tol)
{
    struct lg_denoiser_config sd2 = denoiser_fixture_sd2(), sdxl = denoiser_fixture_sdxl();
    compare(device, "sd2", &sd2, true, tol);
    compare(device, "sdxl", &sdxl, true, tol);
    sd2.height = 8, sd2.width = 12;
    compare(device, "sd2_even", &sd2, false, tol);
}

static void ref64_is_diffusers(void **state)
{
    compare_all("ref64", 1e-7);
}

static void host_is_diffusers(void **state)
{
    compare_all("host", 1e-5);
}

/* A second backward adds; with everything recomputed the bits are the same. */
static void gradients_add_and_are_recomputed(void **state)
{
    const struct lg_denoiser_config nets[] = {denoiser_fixture_sd2(), denoiser_fixture_sdxl()};
    static const char *const words[][2] = {
        {"block", NULL}, {"norms", NULL}, {"mlp", NULL}, {"uniform:1", NULL}, {"uniform:2", NULL}};
    for (size_t k = 0; k < LG_ARRAY_LEN(nets); k++) {
        struct denoiser_fixture f;
        denoiser_fixture_open(&f, "host", NULL, &nets[k], true);
        const size_t n = f.params.count;
        float *once = malloc(n * sizeof *once);
        LG_ASSERT(once);
        denoiser_fixture_forward(&f);
        denoiser_fixture_backward(&f, false);
        memcpy(once, f.grads, n * sizeof *once);
        denoiser_fixture_forward(&f);
        denoiser_fixture_backward(&f, true);
        double diff = 0, norm = 0;
        for (size_t i = 0; i < n; i++) {
            diff += pow((double)((float *)f.grads)[i] - 2 * (double)once[i], 2);
            norm += pow(2 * (double)once[i], 2);
        }
        assert_true(norm > 0 && sqrt(diff / norm) < 1e-6);
        for (size_t w = 0; w < LG_ARRAY_LEN(words); w++) {
            assert_int_equal(denoiser_fixture_recompute(&f, words[w]), 0);
            denoiser_fixture_forward(&f);
            denoiser_fixture_backward(&f, false);
            assert_memory_equal(f.grads, once, n * sizeof *once);
        }
        free(once);
        denoiser_fixture_close(&f);
    }
}

/* ---- drawing ---- */

static void draws(const char *device, const char *golden, struct lg_sampler_method m, double tol)
{
    enum { STEPS = 8 };
    const struct lg_denoiser_config c = denoiser_fixture_sd2();
    const size_t each = (size_t)(c.channels * c.height * c.width);
    struct denoiser_fixture f;
    lg_sampler *s;
    void *out;
    denoiser_fixture_open(&f, device, NULL, &c, false);
    assert_int_equal(lg_sampler_open(f.device, &(struct lg_sampler_spec){&c, 1, true, false}, &s),
                     0);
    m.betas = (struct lg_betas){.first = 0.00085, .last = 0.012, .scaled_linear = true};
    m.spacing = LG_SPACING_TRAILING;
    struct lg_sampler_run run = {
        .method = m, .steps = STEPS, .guidance = 3, .seed = 7, .first = 40, .weights = f.weights};
    run.text[0].states = lg_slice(f.in.text[0].states, 0, 0, 2);
    assert_int_equal(lg_device_alloc(f.device, each * lg_dtype_bytes(f.type), &out), 0);
    assert_int_equal(
        lg_sampler_draw(s, f.stream, &run, lg_t4(out, f.type, 1, c.channels, c.height, c.width)),
        0);
    double *want = golden_read_of(GOLDEN, golden, each);
    const struct distance d = denoiser_fixture_distance(&f, out, want, each);
    if (!(d.diff <= tol * d.norm))
        fail_msg("%s on %s: distance %.3e of %.3e", golden, device, d.diff, d.norm);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

static void draws_as_diffusers(void **state)
{
    const struct {
        const char *golden;
        struct lg_sampler_method method;
    } runs[] = {
        {"draw.ddim.eps", {.sampler = LG_SAMPLER_DDIM, .objective = LG_OBJECTIVE_EPS}},
        {"draw.ddim.v", {.sampler = LG_SAMPLER_DDIM, .objective = LG_OBJECTIVE_V}},
        {"draw.dpm.eps", {.sampler = LG_SAMPLER_DPM, .objective = LG_OBJECTIVE_EPS}},
        {"draw.dpm.v", {.sampler = LG_SAMPLER_DPM, .objective = LG_OBJECTIVE_V}},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(runs); i++) {
        draws("ref64", runs[i].golden, runs[i].method, 1e-6);
        draws("host", runs[i].golden, runs[i].method, 1e-4);
    }
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
    assert_memory_equal(&c->unet, &read.unet, sizeof read.unet);
    assert_memory_equal(c->text, read.text, sizeof read.text);
    assert_true(c->kind == read.kind && c->height == read.height && c->width == read.width &&
                c->depth == read.depth && c->hidden == read.hidden && c->heads == read.heads &&
                c->norm_eps == read.norm_eps && c->size_conditions == read.size_conditions);
    assert_int_equal(lg_denoiser_load(&read, dir, back), 0);
    assert_memory_equal(w, back, t.count * sizeof *w);
    free(w);
    free(back);
    lg_params_free(&t);
    scratch_remove();
}

static void files(void **state)
{
    const struct lg_denoiser_config sd2 = denoiser_fixture_sd2(), sdxl = denoiser_fixture_sdxl();
    round_trip(&sd2);
    round_trip(&sdxl);
}

/* What the published files say; the numbers of parameters are diffusers' own. */
static const char PUBLISHED_SD21[] =
    "{\"_class_name\": \"UNet2DConditionModel\", \"act_fn\": \"silu\", \"attention_head_dim\": [5, "
    "10, 20, 20],"
    "\"block_out_channels\": [320, 640, 1280, 1280], \"center_input_sample\": false, "
    "\"cross_attention_dim\": 1024,"
    "\"down_block_types\": [\"CrossAttnDownBlock2D\", \"CrossAttnDownBlock2D\", "
    "\"CrossAttnDownBlock2D\","
    "\"DownBlock2D\"], \"downsample_padding\": 1, \"dual_cross_attention\": false, "
    "\"flip_sin_to_cos\": true,"
    "\"freq_shift\": 0, \"in_channels\": 4, \"layers_per_block\": 2, \"mid_block_scale_factor\": 1,"
    "\"norm_eps\": 1e-05, \"norm_num_groups\": 32, \"num_class_embeds\": null, "
    "\"only_cross_attention\": false,"
    "\"out_channels\": 4, \"sample_size\": 96, \"up_block_types\": [\"UpBlock2D\", "
    "\"CrossAttnUpBlock2D\","
    "\"CrossAttnUpBlock2D\", \"CrossAttnUpBlock2D\"], \"use_linear_projection\": true, "
    "\"upcast_attention\": true}";
static const char PUBLISHED_SDXL[] =
    "{\"_class_name\": \"UNet2DConditionModel\", \"act_fn\": \"silu\", \"addition_embed_type\": "
    "\"text_time\","
    "\"addition_embed_type_num_heads\": 64, \"addition_time_embed_dim\": 256, "
    "\"attention_head_dim\": [5, 10, 20],"
    "\"block_out_channels\": [320, 640, 1280], \"class_embed_type\": null, "
    "\"class_embeddings_concat\": false,"
    "\"conv_in_kernel\": 3, \"conv_out_kernel\": 3, \"cross_attention_dim\": 2048, "
    "\"cross_attention_norm\": null,"
    "\"down_block_types\": [\"DownBlock2D\", \"CrossAttnDownBlock2D\", \"CrossAttnDownBlock2D\"],"
    "\"encoder_hid_dim\": null, \"in_channels\": 4, \"layers_per_block\": 2,"
    "\"mid_block_only_cross_attention\": null, \"mid_block_type\": \"UNetMidBlock2DCrossAttn\","
    "\"norm_eps\": 1e-05, \"norm_num_groups\": 32, \"num_attention_heads\": null, "
    "\"out_channels\": 4,"
    "\"projection_class_embeddings_input_dim\": 2816, \"resnet_time_scale_shift\": \"default\","
    "\"sample_size\": 128, \"time_embedding_type\": \"positional\", \"timestep_post_act\": null,"
    "\"transformer_layers_per_block\": [1, 2, 10], \"up_block_types\": [\"CrossAttnUpBlock2D\","
    "\"CrossAttnUpBlock2D\", \"UpBlock2D\"], \"use_linear_projection\": true}";

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
    assert_int_equal(load(PUBLISHED_SD21, &c), 0);
    assert_true(c.kind == LG_SD2 && c.height == 96 && c.text[0].width == 1024 && c.depth == 21);
    assert_int_equal(parameters(&c), 865910724);
    assert_int_equal(load(PUBLISHED_SDXL, &c), 0);
    assert_true(c.kind == LG_SDXL && c.height == 128 && c.depth == 75);
    assert_true(c.text[0].width == 768 && c.text[1].width == 1280 && c.text[1].pooled == 1280);
    assert_int_equal(parameters(&c), 2567463684);
}

/* PUBLISHED_SD21 with another value of a key. */
static void refused(const char *key, const char *value, const char *needle)
{
    char text[4096];
    struct lg_denoiser_config c;
    const char *at = strstr(PUBLISHED_SD21, key);
    assert_non_null(at);
    at += strlen(key);
    const int depth = at[3] == '[';
    const char *end = at + strcspn(at, depth ? "]" : ",}") + depth;
    snprintf(text, sizeof text, "%.*s\": %s%s", (int)(at - PUBLISHED_SD21), PUBLISHED_SD21, value,
             end);
    assert_int_equal(load(text, &c), LG_ERR_CONFIG);
    if (!strstr(lg_err_text(), needle)) fail_msg("%s: %s", key, lg_err_text());
    lg_err_clear();
}

static void others_are_refused(void **state)
{
    refused("use_linear_projection", "false", "use_linear_projection");
    refused("num_class_embeds", "7", "num_class_embeds");
    refused("dual_cross_attention", "true", "dual_cross_attention");
    refused("downsample_padding", "0", "downsample_padding");
    refused("norm_num_groups", "48", "groups");
    refused("attention_head_dim", "[5, 10, 20]", "attention_head_dim");
    refused("attention_head_dim", "[7, 10, 20, 20]", "7 heads");
    refused("up_block_types", "[\"UpBlock2D\"]", "up_block_types");
    refused(
        "up_block_types",
        "[\"CrossAttnUpBlock2D\", \"UpBlock2D\", \"CrossAttnUpBlock2D\", \"CrossAttnUpBlock2D\"]",
        "where \"down_block_types");
    refused("flip_sin_to_cos", "false", "flip_sin_to_cos");
}

/* It has no sequence that ranks could share. */
static void is_not_split(void **state)
{
    const struct lg_denoiser_config c = denoiser_fixture_sd2();
    struct lg_band band;
    assert_int_equal(lg_denoiser_band(&c, &(struct lg_sequence){.rank = 0, .degree = 2}, &band),
                     LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_text(), "a sd2 has no sequence"));
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ref64_is_diffusers),
        cmocka_unit_test(host_is_diffusers),
        cmocka_unit_test(gradients_add_and_are_recomputed),
        cmocka_unit_test(draws_as_diffusers),
        cmocka_unit_test(files),
        cmocka_unit_test(published),
        cmocka_unit_test(others_are_refused),
        cmocka_unit_test(is_not_split),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
