/* Denoisers in diffusers' layout: what is saved is read back; DiT's embedder stands under every
 * block's name and unequal ones are refused; configs that mean another net are refused by key. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static float *random_weights(const struct lg_denoiser_config *c, lg_params *t)
{
    assert_int_equal(lg_denoiser_params(c, t), 0);
    float *w = calloc(t->count, sizeof *w);
    for (int i = 0; i < t->n; i++) {
        double *v = malloc(t->p[i].count * sizeof *v);
        golden_fill(t->p[i].name, t->p[i].count, 1.0, v);
        for (size_t e = 0; e < t->p[i].count; e++) w[t->p[i].offset + e] = (float)v[e];
        free(v);
    }
    return w;
}

static void same_config(const struct lg_denoiser_config *a, const struct lg_denoiser_config *b)
{
    assert_true(a->kind == b->kind && a->channels == b->channels && a->height == b->height &&
                a->width == b->width && a->patch == b->patch && a->hidden == b->hidden &&
                a->depth == b->depth && a->heads == b->heads && a->mlp_ratio == b->mlp_ratio &&
                a->num_classes == b->num_classes && a->n_texts == b->n_texts &&
                !memcmp(a->text, b->text, sizeof a->text) && a->norm_eps == b->norm_eps &&
                a->positions_side == b->positions_side && a->qk_norm == b->qk_norm &&
                !memcmp(a->dual, b->dual, sizeof a->dual) && a->singles == b->singles &&
                !memcmp(a->axes, b->axes, sizeof a->axes) && a->guidance == b->guidance);
}

static void round_trip(const struct lg_denoiser_config *c, int tensors)
{
    lg_params t;
    struct lg_denoiser_config read;
    const char *dir = scratch_make();
    float *w = random_weights(c, &t), *back = malloc(t.count * sizeof *back);
    assert_int_equal(lg_denoiser_save(c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w}),
                     0);
    assert_int_equal(lg_denoiser_config_load(scratch_path("config.json"), &read), 0);
    same_config(c, &read);
    assert_int_equal(lg_denoiser_load(&read, dir, back), 0);
    assert_memory_equal(w, back, t.count * sizeof *w);
    lg_st_file *f;
    assert_int_equal(lg_st_open(scratch_path("diffusion_pytorch_model.safetensors"), &f), 0);
    assert_int_equal(lg_st_count(f), tensors);
    assert_string_equal(lg_st_metadata(f, "format"), "pt");
    lg_st_close(&f);
    free(w);
    free(back);
    lg_params_free(&t);
    scratch_remove();
}

static void test_round_trip(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    struct lg_denoiser_config sd3 = denoiser_fixture_sd3(), flux = denoiser_fixture_flux();
    /* As diffusers' state_dict() counts: 2 + 2 (5 + 14) + 4, and 1 + 2 + 2 (1 + 8 + 8 + 4) + 2 +
     * 10, and 13 + 2 (32 + 12) + 26, and 16 + 2 32 + 3 14 + 4. */
    round_trip(&dit, 44);
    round_trip(&pixart, 57);
    round_trip(&sd3, 127);
    round_trip(&flux, 126);
}

/* Rewrites the saved DiT with one tensor changed (delta) or left out. */
static void tamper(const char *name, float delta, bool leave_out)
{
    const char *from = scratch_path("diffusion_pytorch_model.safetensors");
    const char *to = scratch_path("new.safetensors");
    lg_st_file *f;
    lg_st_writer *w;
    assert_int_equal(lg_st_open(from, &f), 0);
    assert_int_equal(lg_st_writer_open(to, &w), 0);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < lg_st_count(f); i++) {
            const struct lg_st_entry *e = lg_st_at(f, i);
            bool hit = !strcmp(e->name, name);
            if (hit && leave_out) continue;
            if (pass == 0) {
                assert_int_equal(lg_st_writer_declare(w, e->name, e->dtype, e->rank, e->dim), 0);
                continue;
            }
            float *copy = malloc(e->bytes);
            memcpy(copy, e->data, e->bytes);
            if (hit) copy[3] += delta;
            assert_int_equal(lg_st_writer_data(w, copy, e->bytes), 0);
            free(copy);
        }
    }
    lg_st_close(&f);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
    assert_int_equal(rename(to, from), 0);
}

static void tampered(const char *name, float delta, bool leave_out, int code, const char *needle)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    lg_params t;
    const char *dir = scratch_make();
    float *w = random_weights(&c, &t);
    assert_int_equal(
        lg_denoiser_save(&c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w}), 0);
    tamper(name, delta, leave_out);
    int rc = lg_denoiser_load(&c, dir, w);
    if (rc != code || (rc && !strstr(lg_err_message(), needle)))
        fail_msg("rc %d, \"%s\" lacks \"%s\"", rc, rc ? lg_err_message() : "loaded", needle);
    lg_err_clear();
    free(w);
    lg_params_free(&t);
    scratch_remove();
}

static void test_unequal_embedders(void **state)
{
    static const char one[] = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_2.weight";
    static const char table[] =
        "transformer_blocks.1.norm1.emb.class_embedder.embedding_table.weight";
    tampered(one, 0, false, 0, "");
    tampered(one, 0.5f, false, LG_ERR_MISMATCH, "differ");
    tampered(table, 1e-3f, false, LG_ERR_MISMATCH, table);
    tampered(one, 0, true, LG_ERR_MISMATCH, "missing");
    tampered("proj_out_1.bias", 0, true, LG_ERR_MISMATCH, "proj_out_1.bias (64) is missing");
}

static void test_wrong_depth(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_dit(), other = c;
    lg_params t;
    const char *dir = scratch_make();
    float *w = random_weights(&c, &t);
    assert_int_equal(
        lg_denoiser_save(&c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w}), 0);
    other.depth = 1;
    assert_int_equal(lg_denoiser_load(&other, dir, w), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "transformer_blocks.1."));
    other.depth = 2, other.heads = 4; /* same shapes: only the config can tell */
    assert_int_equal(lg_denoiser_load(&other, dir, w), 0);
    lg_err_clear();
    free(w);
    lg_params_free(&t);
    scratch_remove();
}

static const char PIXART[] =
    "{\"_class_name\": \"PixArtTransformer2DModel\", \"sample_size\": 16, \"in_channels\": %d, "
    "\"num_attention_heads\": 2, \"attention_head_dim\": 16, \"cross_attention_dim\": 32, "
    "\"caption_channels\": 24, \"num_layers\": 3%s}";

static void config_refused(const char *more, const char *needle)
{
    char text[1024];
    struct lg_denoiser_config c;
    snprintf(text, sizeof text, PIXART, 8, more);
    int rc = lg_denoiser_config_load(scratch_write("c.json", text), &c);
    if (rc != LG_ERR_CONFIG || !strstr(lg_err_message(), needle))
        fail_msg("%s: rc %d, \"%s\" lacks \"%s\"", more, rc, rc ? lg_err_message() : "ok", needle);
    lg_err_clear();
}

static void test_configs(void **state)
{
    char text[1024];
    struct lg_denoiser_config c;
    scratch_make();
    snprintf(text, sizeof text, PIXART, 4, ", \"out_channels\": null");
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", text), &c), 0);
    struct lg_denoiser_config want = denoiser_fixture_pixart();
    want.height = want.width = 16, want.hidden = 32, want.heads = 2, want.depth = 3;
    want.text[0] = (struct lg_denoiser_text){.length = 120, .width = 24};
    same_config(&c, &want);
    assert_false(c.learned_variance || c.size_conditions || c.no_attention_bias);
    snprintf(text, sizeof text, PIXART, 4, ""); /* diffusers' default is 8 */
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", text), &c), 0);
    assert_true(c.learned_variance);
    snprintf(text, sizeof text, PIXART, 8, "");
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", text), &c), 0);
    assert_false(c.learned_variance);
    config_refused(", \"out_channels\": 12", "out_channels");
    config_refused(", \"interpolation_scale\": -2", "interpolation_scale");
    config_refused(", \"dropout\": 0.1", "dropout");
    config_refused(", \"double_self_attention\": true", "double_self_attention");
    config_refused(", \"use_additional_conditions\": true", "multiple of 3"); /* of 32 */
    config_refused(", \"norm_elementwise_affine\": true", "norm_elementwise_affine");
    config_refused(", \"norm_type\": \"ada_norm_zero\"", "norm_type");
    config_refused(", \"activation_fn\": \"geglu\"", "activation_fn");
    config_refused(", \"patch_size\": 5", "patches of 5");
    int rc = lg_denoiser_config_load(
        scratch_write("u.json", "{\"_class_name\": \"UNet3DConditionModel\"}"), &c);
    assert_int_equal(rc, LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "UNet3DConditionModel"));
    lg_err_clear();
    scratch_remove();
}

static void check_refused(struct lg_denoiser_config c, const char *needle)
{
    assert_int_equal(lg_denoiser_config_check(&c), LG_ERR_CONFIG);
    if (!strstr(lg_err_message(), needle))
        fail_msg("\"%s\" lacks \"%s\"", lg_err_message(), needle);
    lg_err_clear();
}

static void test_checks(void **state)
{
    struct lg_denoiser_config good = denoiser_fixture_dit(), c = good;
    assert_int_equal(lg_denoiser_config_check(&c), 0);
    c.heads = 3, check_refused(c, "heads"), c = good;
    c.patch = 3, check_refused(c, "patches of 3"), c = good;
    c.width = 12, check_refused(c, "squares"), c = good;
    c.hidden = 30, check_refused(c, "multiple of 4"), c = good;
    c.mlp_ratio = 2, check_refused(c, "mlp_ratio"), c = good;
    c.num_classes = 0, check_refused(c, "num_classes"), c = good;
    c.norm_eps = 0, check_refused(c, "norm_eps"), c = good;
    c.depth = 0, check_refused(c, "depth");
    c = denoiser_fixture_pixart(), c.text[0].length = 0, check_refused(c, "the length of text.t5");
    c = denoiser_fixture_pixart(), c.text[0].width = 0, check_refused(c, "the width of text.t5");
    c = denoiser_fixture_pixart(), c.text[0].pooled = 8, check_refused(c, "wants none");
    c = denoiser_fixture_flux(), c.axes[1] = 6, check_refused(c, "axes_dims_rope");
    c = denoiser_fixture_flux(), c.axes[1] = 5, c.axes[2] = 7, check_refused(c, "axes_dims_rope");
    c = denoiser_fixture_flux(), c.patch = 4, check_refused(c, "FLUX has patches of 2");
    c = denoiser_fixture_flux(), c.singles = 6, check_refused(c, "6 single blocks of 5");
    c = denoiser_fixture_flux(), c.learned_variance = true, check_refused(c, "no variance");
    c = denoiser_fixture_pixart(), c.n_texts = 2, check_refused(c, "2 texts; a pixart has 1");
}

/* DiT-XL/2 at 256 pixels: 711.7 GFLOP per trained image, three forwards' worth; 675 M
 * parameters. */
static void test_size(void **state)
{
    struct lg_denoiser_config xl = denoiser_fixture_dit();
    xl.height = xl.width = 32, xl.hidden = 1152, xl.depth = 28, xl.heads = 16;
    xl.num_classes = 1000;
    double g = 3e-9 * lg_denoiser_flops(&xl);
    assert_true(g > 710 && g < 713);
    lg_params t;
    assert_int_equal(lg_denoiser_params(&xl, &t), 0);
    assert_true(t.count > 674.5e6 && t.count < 675.5e6);
    lg_params_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),  cmocka_unit_test(test_unequal_embedders),
        cmocka_unit_test(test_wrong_depth), cmocka_unit_test(test_configs),
        cmocka_unit_test(test_checks),      cmocka_unit_test(test_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
