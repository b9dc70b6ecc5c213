/* Adapters in kohya's layout: what is written of SD3's and FLUX.1's is what diffusers' converters read (tests/golden/
 * make_kohya.py); every net's comes back as it was; files of others; those that cannot be used. All compared bit by bit: nothing
 * is computed, or with exact factors. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/kohya.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN "tests/golden/kohya.safetensors"

/* An adapter in memory. */
struct world {
    struct lg_adapter adapter;
    lg_params all, t, whole;
    float *w;
    struct lg_kohya k;
    char path[LG_PATH_BYTES];
};

static void begin(struct world *o, const char *kind)
{
    o->k = (struct lg_kohya){.kind = kind, .adapter = &o->adapter, .t = &o->t, .whole = &o->whole};
    snprintf(o->path, sizeof o->path, "%s", scratch_path("a.safetensors"));
}

static void end(struct world *o)
{
    free(o->w);
    lg_params_free(&o->all);
    lg_params_free(&o->whole);
    lg_err_clear();
}

static lg_st_file *open_file(const char *path)
{
    lg_st_file *f;
    assert_int_equal(lg_st_open(path, &f), 0);
    return f;
}

/* The adapter's weights as this file has them; the error, if any. */
static int load(const struct world *o, const char *path, float *ret)
{
    lg_st_file *f = open_file(path);
    assert_true(lg_kohya_is(f));
    int rc = lg_kohya_load(&o->k, f, path, ret);
    lg_st_close(&f);
    return rc;
}

static void check_comes_back(const struct world *o)
{
    float *back = malloc(o->t.count * sizeof *back);
    memset(back, 0xff, o->t.count * sizeof *back);
    assert_int_equal(lg_kohya_save(&o->k, o->w, o->path), 0);
    assert_int_equal(load(o, o->path, back), 0);
    assert_memory_equal(back, o->w, o->t.count * sizeof *back);
    free(back);
}

/* ---- beside diffusers ---- */

/* Adds a parameter of this name for each tensor of the file whose name begins with prefix. */
static void table_of(const lg_st_file *f, const char *prefix, const char *tail, lg_params *ret)
{
    const size_t n = strlen(prefix);
    for (int i = 0; i < lg_st_count(f); i++) {
        const struct lg_st_entry *e = lg_st_at(f, i);
        if (strncmp(e->name, prefix, n)) continue;
        struct lg_param p = {.rank = 2, .dim = {e->dim[0], e->dim[1]}};
        snprintf(p.name, sizeof p.name, "%s%s", e->name + n, tail);
        lg_params_add(ret, &p);
    }
}

/* As many tensors, of the same shapes and bytes. */
static void check_same(const lg_st_file *golden, const char *prefix, const char *path)
{
    lg_st_file *f = open_file(path);
    int want = 0;
    for (int i = 0; i < lg_st_count(golden); i++) {
        const struct lg_st_entry *e = lg_st_at(golden, i);
        if (strncmp(e->name, prefix, strlen(prefix))) continue;
        const struct lg_st_entry *got = lg_st_find(f, e->name + strlen(prefix));
        if (!got) fail_msg("%s is not written", e->name);
        assert_int_equal(got->rank, e->rank);
        for (int d = 0; d < e->rank; d++) assert_int_equal(got->dim[d], e->dim[d]);
        if (memcmp(got->data, e->data, e->bytes)) fail_msg("%s differs", e->name);
        want++;
    }
    assert_int_equal(lg_st_count(f), want);
    lg_st_close(&f);
}

static void check_golden(const char *kind)
{
    struct world o = {.adapter = {.rank = 2, .alpha = 3}};
    char ours[32], theirs[32], whole[32];
    lg_st_file *f = open_file(GOLDEN);
    snprintf(ours, sizeof ours, "%s.ours.", kind);
    snprintf(theirs, sizeof theirs, "%s.kohya.", kind);
    snprintf(whole, sizeof whole, "%s.whole.", kind);
    begin(&o, kind);
    table_of(f, ours, "", &o.all);
    table_of(f, whole, ".weight", &o.whole);
    assert_true(o.all.n > 50);
    o.t = o.all;
    o.w = calloc(o.t.count, sizeof *o.w);
    for (int i = 0; i < o.t.n; i++) {
        char name[2 * LG_PARAM_NAME_BYTES];
        snprintf(name, sizeof name, "%s%s", ours, o.t.p[i].name);
        assert_int_equal(
            lg_st_read_f32(lg_st_find(f, name), o.w + o.t.p[i].offset, 0, o.t.p[i].count), 0);
    }
    check_comes_back(&o);
    check_same(f, theirs, o.path);
    lg_st_close(&f);
    end(&o);
}

static void test_is_what_diffusers_reads(void **state)
{
    (void)state;
    check_golden("sd3");
    check_golden("flux");
}

/* ---- every net ---- */

static void open_net(struct world *o, const struct lg_denoiser_config *c,
                     const char *const *targets, int rank)
{
    *o = (struct world){.adapter = {.rank = rank, .alpha = 0.7, .targets = targets}};
    const struct lg_training training = {.adapter = o->adapter};
    begin(o, lg_denoiser_info(c->kind)->name);
    assert_int_equal(lg_denoiser_table(c, &training, &o->all), 0);
    assert_int_equal(lg_denoiser_params(c, &o->whole), 0);
    o->t = lg_params_trained(&o->all);
    o->w = calloc(o->t.count, sizeof *o->w);
    for (int i = 0; i < o->t.n; i++) {
        const struct lg_param *p = &o->t.p[i];
        double *v = malloc(p->count * sizeof *v);
        golden_fill(p->name, p->count, 0.5, v);
        for (size_t e = 0; e < p->count; e++) o->w[p->offset + e] = (float)v[e];
        free(v);
    }
}

static void check_net(const struct lg_denoiser_config *c, const char *const *targets,
                      const char *has, int64_t outputs, int64_t rank)
{
    struct world o;
    char name[128];
    open_net(&o, c, targets, 3);
    check_comes_back(&o);
    lg_st_file *f = open_file(o.path);
    snprintf(name, sizeof name, "lora_unet_%s.lora_up.weight", has);
    const struct lg_st_entry *e = lg_st_find(f, name);
    if (!e) fail_msg("no %s", name);
    assert_int_equal(e->dim[0], outputs);
    assert_int_equal(e->dim[1], rank);
    lg_st_close(&f);
    end(&o);
}

static const char *const LINEAR[] = {"linear", NULL}, *const ATTENTION[] = {"attention", NULL};

static void test_every_net(void **state)
{
    (void)state;
    static const char *const some[] = {"*to_k", "*.add_v_proj", "*to_q", NULL};
    static const char *const outside[] = {"norm_out.linear", "proj_out", "context_embedder",
                                          "time_text_embed.*", NULL};
    const struct lg_denoiser_config dit = denoiser_fixture_dit(), sd3 = denoiser_fixture_sd3(),
                                    pixart = denoiser_fixture_pixart(),
                                    flux = denoiser_fixture_flux(), sd2 = denoiser_fixture_sd2(),
                                    sdxl = denoiser_fixture_sdxl();
    static const char *const of_sdxl[] = {"*.time_emb_proj", "time_embedding.*", "add_embedding.*",
                                          NULL};
    check_net(&dit, LINEAR, "transformer_blocks_1_ff_net_0_proj", 128, 3);
    check_net(&pixart, LINEAR, "transformer_blocks_0_attn2_to_out_0", 48, 3);
    check_net(&sd3, LINEAR, "joint_blocks_0_x_block_attn2_qkv", 144, 9);
    check_net(&sd3, ATTENTION, "joint_blocks_1_context_block_attn_qkv", 144, 9);
    /* Nobody reads the last block's queries of texts. */
    check_net(&sd3, ATTENTION, "joint_blocks_2_context_block_attn_qkv", 144, 6);
    check_net(&sd3, some, "joint_blocks_1_x_block_attn_qkv", 144, 6);
    check_net(&sd3, outside, "final_layer_adaLN_modulation_1", 96, 3);
    check_net(&flux, LINEAR, "single_blocks_2_linear1", 336, 12);
    check_net(&flux, ATTENTION, "single_blocks_2_linear1", 336, 9);
    check_net(&flux, some, "double_blocks_1_txt_attn_qkv", 144, 3);
    check_net(&flux, outside, "vector_in_out_layer", 48, 3);
    check_net(&sd2, LINEAR, "up_blocks_1_attentions_0_proj_in", 16, 3);
    check_net(&sd2, ATTENTION, "mid_block_attentions_0_transformer_blocks_0_attn2_to_k", 16, 3);
    check_net(&sdxl, LINEAR, "middle_block_1_transformer_blocks_1_ff_net_0_proj", 128, 3);
    check_net(&sdxl, LINEAR, "input_blocks_5_1_proj_out", 16, 3);
    check_net(&sdxl, ATTENTION, "output_blocks_2_1_transformer_blocks_0_attn1_to_out_0", 16, 3);
    check_net(&sdxl, of_sdxl, "output_blocks_4_0_emb_layers_1", 8, 3);
    check_net(&sdxl, of_sdxl, "label_emb_0_2", 32, 3);
}

/* Its numbers of blocks would be those of others. */
static void test_other_sdxl(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_sdxl();
    for (int layers = 1; layers <= 3; layers++) {
        struct world o;
        c.unet.layers = layers;
        c.depth = lg_unet_blocks(&c.unet);
        open_net(&o, &c, ATTENTION, 3);
        const int rc = lg_kohya_save(&o.k, o.w, o.path);
        assert_int_equal(rc, layers == 2 ? 0 : LG_ERR_MISMATCH);
        if (rc < 0) assert_non_null(strstr(lg_err_message(), "another layers_per_block"));
        lg_err_clear();
        end(&o);
    }
}

/* ---- files of others ---- */

/* Writes q, k, v of block 0 as one linear of this rank, with numbers up to 8; its row and column with another number. */
static void write_fused(const struct world *o, int64_t inputs, int64_t rank, const float *alpha)
{
    const char *const name = "lora_unet_double_blocks_0_img_attn_qkv";
    char full[128];
    lg_st_writer *w;
    assert_int_equal(lg_st_writer_open(o->path, &w), 0);
    snprintf(full, sizeof full, "%s.lora_up.weight", name);
    lg_st_writer_declare(w, full, LG_F32, 2, (int64_t[]){3 * inputs, rank});
    snprintf(full, sizeof full, "%s.lora_down.weight", name);
    lg_st_writer_declare(w, full, LG_F32, 2, (int64_t[]){rank, inputs});
    snprintf(full, sizeof full, "%s.alpha", name);
    if (alpha) lg_st_writer_declare(w, full, LG_F32, 1, (int64_t[]){1});
    for (int64_t i = 0; i < 4 * inputs * rank; i++) {
        const float v = (float)(i % 17) / 2;
        lg_st_writer_data(w, &v, sizeof v);
    }
    if (alpha) lg_st_writer_data(w, alpha, sizeof *alpha);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
}

static const char *const QKV[] = {"transformer_blocks.0.attn.to_?", NULL};

/* One A for all parts, and B's rows of each, by (alpha / rank of the file) / (alpha / rank of ours). */
static void test_one_adapter_of_three_linears(void **state)
{
    (void)state;
    enum { D = 48, R = 6 };
    static const char *const part[] = {"to_q", "to_k", "to_v"};
    const struct lg_denoiser_config c = denoiser_fixture_flux();
    const float alphas[] = {1.5f, 12}, factor[] = {0.5f, 4, 2};
    struct world o;
    open_net(&o, &c, QKV, R);
    o.adapter.alpha = 3;
    float *back = malloc(o.t.count * sizeof *back);
    for (int n = 0; n < 3; n++) { /* without alpha it is the rank: 6 / 3 */
        write_fused(&o, D, R, n < 2 ? &alphas[n] : NULL);
        assert_int_equal(load(&o, o.path, back), 0);
        for (int i = 0; i < 3; i++)
            for (int half = 0; half < 2; half++) {
                char name[128];
                snprintf(name, sizeof name, "transformer_blocks.0.attn.%s%s", part[i],
                         half ? LG_ADAPTER_UP : LG_ADAPTER_DOWN);
                const struct lg_param *p = &o.t.p[lg_params_find(&o.t, name)];
                const size_t from = half ? (size_t)i * D * R : 3 * D * R;
                for (size_t e = 0; e < p->count; e++)
                    assert_true(back[p->offset + e] ==
                                (float)((from + e) % 17) / 2 * (half ? factor[n] : 1));
            }
    }
    free(back);
    end(&o);
}

static void refused(const struct world *o, const char *why)
{
    float *back = malloc(o->t.count * sizeof *back);
    assert_int_equal(load(o, o->path, back), LG_ERR_MISMATCH);
    if (!strstr(lg_err_message(), why)) fail_msg("%s\nlacks \"%s\"", lg_err_message(), why);
    free(back);
    lg_err_clear();
}

static void test_another_adapter_is_refused(void **state)
{
    (void)state;
    static const char *const two[] = {"transformer_blocks.0.attn.to_[qk]", NULL};
    const struct lg_denoiser_config c = denoiser_fixture_flux();
    const float alpha = 6, endless = HUGE_VALF;
    struct world o;
    open_net(&o, &c, LINEAR, 6);
    write_fused(&o, 48, 6, &alpha);
    refused(&o, "_img_mod_lin.lora_down.weight is missing");
    end(&o);
    open_net(&o, &c, QKV, 6);
    write_fused(&o, 48, 5, &alpha);
    refused(&o, "n = 6 or, of 3 linears in one, 18");
    write_fused(&o, 40, 6, &alpha);
    refused(&o, "is not (144, n)");
    write_fused(&o, 48, 18, &alpha);
    refused(&o, "not zero in row 0, column 6");
    write_fused(&o, 48, 6, &endless);
    refused(&o, "cannot become alpha");
    end(&o);
    open_net(&o, &c, two, 6);
    write_fused(&o, 48, 6, &alpha);
    refused(&o, "not zero in row 96, column 0");
    end(&o);
}

static void test_more_than_the_adapter_is_refused(void **state)
{
    (void)state;
    static const char *const one[] = {"*.0.attn1.to_k", NULL};
    const struct lg_denoiser_config c = denoiser_fixture_dit();
    struct world all, o;
    open_net(&all, &c, ATTENTION, 2);
    open_net(&o, &c, one, 2);
    assert_int_equal(lg_kohya_save(&all.k, all.w, all.path), 0);
    refused(&o, "has 24 tensors, the adapter has 3 of them");
    end(&o);
    end(&all);
}

/* sd-scripts writes the adapters of text encoders into the same file. */
static void test_texts_are_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"lora_te1_text_model_x.alpha",
                                        "lora_unet_double_blocks_0_img_attn_qkv.alpha"};
    const struct lg_denoiser_config c = denoiser_fixture_flux();
    const float one = 1;
    struct world o;
    lg_st_writer *w;
    open_net(&o, &c, QKV, 2);
    assert_int_equal(lg_st_writer_open(o.path, &w), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(lg_st_writer_declare(w, names[i], LG_F32, 0, NULL), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(lg_st_writer_data(w, &one, sizeof one), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
    lg_st_file *f = open_file(o.path);
    assert_true(lg_kohya_is(f));
    lg_st_close(&f);
    refused(&o, "tensor lora_te1_text_model_x.alpha is no adapter's of a transformer");
    end(&o);
}

static void test_what_the_original_lacks(void **state)
{
    (void)state;
    struct world o;
    const struct lg_denoiser_config c = denoiser_fixture_sd3();
    open_net(&o, &c, LINEAR, 2);
    o.k.kind = "flux";
    assert_int_equal(lg_kohya_save(&o.k, o.w, o.path), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "has no name in kohya's layout"));
    assert_false(lg_path_exists(o.path));
    end(&o);
}

/* ---- where adapters are read ---- */

static void test_a_folder_with_either(void **state)
{
    (void)state;
    struct world o;
    const struct lg_denoiser_config c = denoiser_fixture_sd3();
    open_net(&o, &c, LINEAR, 2);
    char base[LG_PATH_BYTES], dir[LG_PATH_BYTES], file[LG_PATH_BYTES];
    float *whole = malloc(o.whole.count * sizeof *whole),
          *ours = malloc(o.whole.count * sizeof *ours),
          *theirs = malloc(o.whole.count * sizeof *theirs);
    snprintf(base, sizeof base, "%s", scratch_path("base"));
    snprintf(dir, sizeof dir, "%s", scratch_path("adapter"));
    snprintf(file, sizeof file, "%s", scratch_path("adapter/" LG_ADAPTER_WEIGHTS));
    assert_int_equal(lg_mkdirs(base), 0);
    assert_int_equal(lg_mkdirs(dir), 0);
    lg_params_init(&o.whole, 5, whole, 0, o.whole.count);
    assert_int_equal(
        lg_denoiser_save(&c, base, &(struct lg_denoiser_weights){.t = &o.whole, .trained = whole}),
        0);
    assert_int_equal(lg_adapter_save(&o.adapter, base, &o.t, dir, o.w), 0);
    assert_int_equal(lg_whole_load(&c, dir, ours), 0);
    assert_memory_not_equal(ours, whole, o.whole.count * sizeof *ours);
    assert_int_equal(lg_adapter_export_kohya(dir, o.path), 0);
    assert_int_equal(rename(o.path, file), 0);
    assert_int_equal(lg_whole_load(&c, dir, theirs), 0);
    assert_memory_equal(ours, theirs, o.whole.count * sizeof *ours);
    free(whole), free(ours), free(theirs);
    end(&o);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_is_what_diffusers_reads),
        TEST(test_every_net),
        TEST(test_other_sdxl),
        TEST(test_one_adapter_of_three_linears),
        TEST(test_another_adapter_is_refused),
        TEST(test_more_than_the_adapter_is_refused),
        TEST(test_texts_are_refused),
        TEST(test_what_the_original_lacks),
        TEST(test_a_folder_with_either),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
