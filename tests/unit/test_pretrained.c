/* Models as they are published: the forms that weights come in, old configs, what of a config.json is written back; and
 * what a pipeline's files become in a config, key by key. */
#include "base/fs.h"
#include "base/json_tree.h"
#include "config/config.h"
#include "config/models.h"
#include "config/schema.h"
#include "stages/io/safetensors.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static void assert_message(const char *part)
{
    if (!strstr(lg_err_message(), part))
        fail_msg("expected \"%s\" in:\n%s", part, lg_err_message());
    lg_err_clear();
}

/* ---- weights ---- */

static struct lg_denoiser_config tiny(void)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    c.width = c.height = 8;
    c.learned_variance = c.size_conditions = true;
    return c;
}

/* Multiples of 1/8 below 16: every type holds them. */
static float *simple_weights(const struct lg_denoiser_config *c, lg_params *t)
{
    assert_int_equal(lg_denoiser_params(c, t), 0);
    float *w = calloc(t->count, sizeof *w);
    assert_non_null(w);
    for (int i = 0; i < t->n; i++)
        for (size_t e = 0; e < t->p[i].count; e++)
            w[t->p[i].offset + e] = (float)((e * 7 + (size_t)i) % 256) / 8 - 16;
    return w;
}

static size_t as_type(const float *from, size_t n, lg_dtype type, void *ret)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        _Float16 half = (_Float16)from[i];
        memcpy(&bits, &from[i], sizeof bits);
        uint16_t brain = (uint16_t)(bits >> 16);
        if (type == LG_F32) memcpy((char *)ret + 4 * i, &bits, 4);
        if (type == LG_F16) memcpy((char *)ret + 2 * i, &half, 2);
        if (type == LG_BF16) memcpy((char *)ret + 2 * i, &brain, 2);
    }
    return n * lg_dtype_bytes(type);
}

/* Parameters [from, to) of the table, and a table of positions as old files have it. */
static void write_part(const char *name, const lg_params *t, const float *w, int from, int to,
                       lg_dtype type)
{
    const int64_t positions[] = {1, 16, 48};
    lg_st_writer *st;
    void *room = calloc(t->count, sizeof(float));
    assert_non_null(room);
    assert_int_equal(lg_st_writer_open(scratch_path(name), &st), 0);
    for (int i = from; i < to; i++)
        assert_int_equal(lg_st_writer_declare(st, t->p[i].name, type, t->p[i].rank, t->p[i].dim),
                         0);
    if (!from)
        assert_int_equal(lg_st_writer_declare(st, "pos_embed.pos_embed", LG_F32, 3, positions), 0);
    for (int i = from; i < to; i++)
        assert_int_equal(
            lg_st_writer_data(st, room, as_type(w + t->p[i].offset, t->p[i].count, type, room)), 0);
    if (!from) assert_int_equal(lg_st_writer_data(st, room, sizeof(float) * 16 * 48), 0);
    assert_int_equal(lg_st_writer_finish(&st, NULL), 0);
    free(room);
}

static void write_index(const char *name, const lg_params *t, const char *const part[2], int cut)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    fprintf(out, "{\"metadata\": {}, \"weight_map\": {");
    for (int i = 0; i < t->n; i++)
        fprintf(out, "%s\"%s\": \"%s\"", i ? ", " : "", t->p[i].name, part[i >= cut]);
    fprintf(out, "}}");
    fclose(out);
    scratch_write(name, text);
    free(text);
}

#define STEM "diffusion_pytorch_model"

/* variant: "" or ".fp16"; parts: 1 or 2. */
static void check_form(const char *variant, int parts, lg_dtype type)
{
    const struct lg_denoiser_config c = tiny();
    struct lg_denoiser_config read;
    lg_params t;
    char name[2][96], index[96];
    const char *dir = scratch_make();
    float *w = simple_weights(&c, &t), *back = calloc(t.count, sizeof *back);
    const int cut = parts == 1 ? t.n : t.n / 2;
    snprintf(index, sizeof index, STEM ".safetensors.index%s.json", variant);
    for (int i = 0; i < 2; i++)
        snprintf(name[i], sizeof name[i], STEM "%s-0000%d-of-00002.safetensors", variant, i + 1);
    if (parts == 1) snprintf(name[0], sizeof name[0], STEM "%s.safetensors", variant);
    write_part(name[0], &t, w, 0, cut, type);
    if (parts == 2) write_part(name[1], &t, w, cut, t.n, type);
    if (parts == 2) write_index(index, &t, (const char *const[]){name[0], name[1]}, cut);
    assert_int_equal(lg_denoiser_config_save(&c, NULL, scratch_path("config.json")), 0);
    if (lg_denoiser_config_load(scratch_path("config.json"), &read) < 0)
        fail_msg("%s: %s", name[0], lg_err_text());
    assert_true(read.size_conditions && read.learned_variance);
    if (lg_denoiser_load(&read, dir, back) < 0) fail_msg("%s: %s", name[0], lg_err_text());
    assert_memory_equal(w, back, t.count * sizeof *w);
    uint64_t identity, other;
    assert_int_equal(lg_denoiser_identity(dir, &identity), 0);
    w[t.p[t.n - 1].offset] += 1; /* in the last file */
    write_part(name[parts - 1], &t, w, parts == 2 ? cut : 0, t.n, type);
    assert_int_equal(lg_denoiser_identity(dir, &other), 0);
    assert_true(identity != other);
    free(w);
    free(back);
    lg_params_free(&t);
    scratch_remove();
}

static void forms_of_weights(void **state)
{
    check_form("", 1, LG_F32);
    check_form("", 1, LG_BF16);
    check_form("", 2, LG_F32);
    check_form(".fp16", 1, LG_F16);
    check_form(".fp16", 2, LG_F16);
}

/* ---- config.json of a transformer ---- */

/* As the first DiT-XL/2 has it. */
static const char OLD_DIT[] =
    "{\"_class_name\": \"Transformer2DModel\", \"_diffusers_version\": \"0.12.0.dev0\", "
    "\"activation_fn\": \"gelu-approximate\", \"attention_bias\": true, \"attention_head_dim\": "
    "72, "
    "\"cross_attention_dim\": null, \"dropout\": 0.0, \"in_channels\": 4, "
    "\"norm_elementwise_affine\": false, \"norm_type\": \"ada_norm_zero\", "
    "\"num_attention_heads\": 16, \"num_embeds_ada_norm\": 1000, \"num_layers\": 28, "
    "\"num_vector_embeds\": null, \"only_cross_attention\": false, \"out_channels\": 8, "
    "\"patch_size\": 2, \"sample_size\": 32, \"upcast_attention\": true}";
static const char OLD_PIXART[] =
    "{\"_class_name\": \"Transformer2DModel\", \"activation_fn\": \"gelu-approximate\", "
    "\"attention_bias\": true, \"attention_head_dim\": 72, \"caption_channels\": 4096, "
    "\"cross_attention_dim\": 1152, \"in_channels\": 4, \"norm_elementwise_affine\": false, "
    "\"norm_eps\": 1e-06, \"norm_type\": \"ada_norm_single\", \"num_attention_heads\": 16, "
    "\"num_layers\": 28, \"out_channels\": 8, \"patch_size\": 2, \"sample_size\": %d%s}";

static void old_class(void **state)
{
    struct lg_denoiser_config c;
    char text[1024];
    scratch_make();
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", OLD_DIT), &c), 0);
    assert_true(c.kind == LG_DIT && c.hidden == 1152 && c.depth == 28 && c.learned_variance);
    assert_true(c.norm_eps == 1e-5 && c.num_classes == 1000 && c.sample_size == 32);
    snprintf(text, sizeof text, OLD_PIXART, 64, "");
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", text), &c), 0);
    assert_true(c.kind == LG_PIXART && c.text[0].width == 4096 && !c.size_conditions);
    snprintf(text, sizeof text, OLD_PIXART, 128, ", \"interpolation_scale\": 0.5");
    assert_int_equal(lg_denoiser_config_load(scratch_write("c.json", text), &c), 0);
    assert_true(c.size_conditions && c.interpolation == 0.5); /* no weights: the class's default */
    assert_int_equal(
        lg_denoiser_config_load(scratch_write("c.json", "{\"_class_name\": \"Transformer2DModel\", "
                                                        "\"norm_type\": \"layer_norm\"}"),
                                &c),
        LG_ERR_CONFIG);
    assert_message("\"norm_type\" \"layer_norm\"");
    scratch_remove();
}

/* The weights know whether they have conditions of a size; a config that says otherwise is refused. */
static void size_conditions_are_the_weights(void **state)
{
    struct lg_denoiser_config c = tiny(), read;
    lg_params t;
    char text[1024];
    const char *dir = scratch_make();
    c.size_conditions = false;
    float *w = simple_weights(&c, &t);
    assert_int_equal(
        lg_denoiser_save(&c, dir, &(struct lg_denoiser_weights){.t = &t, .trained = w}), 0);
    snprintf(text, sizeof text, OLD_PIXART, 128, "");
    assert_int_equal(lg_denoiser_config_load(scratch_write("config.json", text), &read), 0);
    assert_false(read.size_conditions);
    snprintf(text, sizeof text, OLD_PIXART, 128, ", \"use_additional_conditions\": true");
    assert_int_equal(lg_denoiser_config_load(scratch_write("config.json", text), &read),
                     LG_ERR_CONFIG);
    assert_message("is true, but the weights beside it hold no resolution embedder");
    free(w);
    lg_params_free(&t);
    scratch_remove();
}

static void keys_are_written_back(void **state)
{
    struct lg_denoiser_config c, read;
    char *text;
    size_t bytes;
    cJSON *j;
    scratch_make();
    const char *source = scratch_write("source.json", OLD_DIT), *to = scratch_path("config.json");
    assert_int_equal(lg_denoiser_config_load(source, &c), 0);
    c.height = c.width = 64; /* trained at twice the size */
    assert_int_equal(lg_denoiser_config_save(&c, source, to), 0);
    assert_int_equal(lg_read_file(to, 1 << 20, &text, &bytes), 0);
    assert_int_equal(lg_json_tree(to, text, bytes, 1000, &j), 0);
    free(text);
    assert_string_equal(cJSON_GetObjectItem(j, "_diffusers_version")->valuestring, "0.12.0.dev0");
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(j, "upcast_attention")));
    assert_string_equal(cJSON_GetObjectItem(j, "_class_name")->valuestring,
                        "DiTTransformer2DModel");
    assert_int_equal(cJSON_GetObjectItem(j, "out_channels")->valueint, 8);
    assert_int_equal(cJSON_GetObjectItem(j, "sample_size")->valueint, 32);
    cJSON_Delete(j);
    assert_int_equal(lg_denoiser_config_load(to, &read), 0);
    assert_true(read.height == 64 && read.width == 64 && read.sample_size == 32);
    c.height = c.width = 32; /* and back: its own keys are not taken over */
    const char *again = scratch_path("again.json");
    assert_int_equal(lg_denoiser_config_save(&c, to, again), 0);
    assert_int_equal(lg_denoiser_config_load(again, &read), 0);
    assert_true(read.height == 32 && read.width == 32);
    scratch_remove();
}

/* ---- what a pipeline becomes in a config ---- */

static const char INDEX[] =
    "{\"_class_name\": \"PixArtAlphaPipeline\", \"scheduler\": [\"diffusers\", \"X\"], "
    "\"text_encoder\": [\"transformers\", \"T5EncoderModel\"], \"tokenizer\": [\"transformers\", "
    "\"T5Tokenizer\"], \"transformer\": [\"diffusers\", \"PixArtTransformer2DModel\"], \"vae\": "
    "[\"diffusers\", \"AutoencoderKL\"]}";

static void write_pipeline(const char *scheduler)
{
    char text[1024];
    snprintf(text, sizeof text, OLD_PIXART, 64, "");
    scratch_write("pipe/model_index.json", INDEX);
    scratch_write("pipe/transformer/config.json", text);
    scratch_write("pipe/transformer/" STEM ".safetensors", "weights");
    scratch_write("pipe/vae/config.json", "{\"block_out_channels\": [1, 1, 1, 1]}");
    scratch_write("pipe/vae/" STEM ".fp16.safetensors", "weights");
    scratch_write("pipe/text_encoder/config.json", "{\"d_model\": 4096, \"num_layers\": 24}");
    scratch_write("pipe/text_encoder/model.safetensors", "weights");
    scratch_write("pipe/tokenizer/spiece.model", "pieces");
    scratch_write("pipe/scheduler/scheduler_config.json", scheduler);
    scratch_write("data/a.txt", "");
}

static const char DPM[] =
    "{\"_class_name\": \"DPMSolverMultistepScheduler\", \"beta_end\": 0.012, "
    "\"beta_start\": 0.00085, \"beta_schedule\": \"scaled_linear\", "
    "\"prediction_type\": \"v_prediction\", \"timestep_spacing\": \"trailing\", "
    "\"rescale_betas_zero_snr\": true, \"trained_betas\": null}";

static lg_config *load(const char *text)
{
    lg_config *c;
    if (lg_config_load(scratch_write("p.toml", text), NULL, 0, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

#define PIPE "pipeline = 'pipe'\ndevice = 'host'\n[data]\npath = 'data'\nsize = 256\n"

static bool is_chosen(const lg_config *c, const char *key, const char *by)
{
    const char *file = c->chosen[lg_key_find(key)];
    return file && strstr(file, by);
}

static void a_pipeline_fills_what_is_unwritten(void **state)
{
    scratch_make();
    write_pipeline(DPM);
    lg_config *c = load(PIPE "[trainer]\nbeta_end = 0.01\nvariance_loss = 'none'\n");
    assert_string_equal(c->model_from, scratch_path("pipe/transformer"));
    assert_string_equal(c->vae_model, scratch_path("pipe/vae"));
    assert_string_equal(c->text_model, scratch_path("pipe/text_encoder"));
    assert_string_equal(c->model_kind, "pixart");
    assert_true(c->model_hidden == 1152 && c->model_depth == 28 && c->model_heads == 16);
    assert_true(c->model_learned_variance && c->text_length == 120 && c->sample_steps == 20);
    assert_string_equal(c->trainer_objective, "v");
    assert_string_equal(c->trainer_timesteps, "uniform");
    assert_string_equal(c->trainer_beta_schedule, "scaled_linear");
    assert_true(c->trainer_beta_start == 0.00085 && c->trainer_zero_snr);
    assert_true(c->trainer_beta_end == 0.01); /* as written */
    assert_string_equal(c->sample_sampler, "dpm++");
    assert_string_equal(c->sample_spacing, "trailing");
    assert_true(is_chosen(c, "model.depth", "transformer/config.json"));
    assert_true(is_chosen(c, "trainer.objective", "scheduler_config.json"));
    assert_false(is_chosen(c, "trainer.beta_end", ""));
    if (lg_config_check(c) < 0) fail_msg("%s", lg_err_text());
    /* What is saved is whole: it needs no file to be read again. */
    char *saved = lg_config_to_toml(c);
    assert_int_equal(lg_remove_tree(scratch_path("pipe")), 0);
    lg_config *again = load(saved);
    assert_true(again->model_depth == 28 && !is_chosen(again, "model.depth", ""));
    free(saved);
    lg_config_free(&again);
    lg_config_free(&c);
    scratch_remove();
}

/* A written objective wins, and takes no noise schedule of another one. */
static void what_is_written_wins(void **state)
{
    scratch_make();
    write_pipeline("{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", \"shift\": 3.0}");
    lg_config *c = load(PIPE "[trainer]\nvariance_loss = 'none'\n");
    assert_string_equal(c->trainer_objective, "flow");
    assert_true(c->trainer_flow_shift == 3 && c->trainer_beta_start == 1e-4);
    lg_config_free(&c);
    write_pipeline(DPM);
    c = load(PIPE "[trainer]\nobjective = 'flow'\nvariance_loss = 'none'\n[text]\nlength = 77\n");
    assert_string_equal(c->trainer_objective, "flow");
    assert_true(c->trainer_beta_start == 1e-4 && c->text_length == 77);
    assert_string_equal(c->sample_sampler, "auto");
    if (lg_config_check(c) < 0) fail_msg("%s", lg_err_text());
    lg_config_free(&c);
    scratch_remove();
}

static void refused(const char *text, const char *part);

/* FLUX counts blocks of one stream apart, and its shift follows from the picture's size. */
static void flux(void **state)
{
    scratch_make();
    scratch_write("pipe/model_index.json",
                  "{\"_class_name\": \"FluxPipeline\", \"transformer\": [\"diffusers\", "
                  "\"FluxTransformer2DModel\"]}");
    scratch_write("pipe/transformer/config.json",
                  "{\"_class_name\": \"FluxTransformer2DModel\", \"guidance_embeds\": true}");
    scratch_write("pipe/scheduler/scheduler_config.json",
                  "{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", \"shift\": 3.0, "
                  "\"use_dynamic_shifting\": true, \"base_shift\": 0.5, \"max_shift\": 1.15, "
                  "\"base_image_seq_len\": 256, \"max_image_seq_len\": 4096}");
    lg_config *c = load(PIPE);
    assert_string_equal(c->model_kind, "flux");
    assert_true(c->model_depth == 57 && c->model_hidden == 3072 && c->model_heads == 24);
    assert_true(c->model_patch == 2 && !c->model_learned_variance && c->model_guidance == 1);
    assert_string_equal(c->trainer_objective, "flow");
    assert_string_equal(c->trainer_flow_shift_by, "tokens");
    assert_true(c->trainer_flow_shift == 1 && c->sample_guidance == 3.5);
    lg_config_free(&c);
    scratch_write("pipe/scheduler/scheduler_config.json",
                  "{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", "
                  "\"use_dynamic_shifting\": true, \"max_shift\": 2.05}");
    refused(PIPE, "\"max_shift\" is 2.05: expected 1.15; write trainer.flow_shift_by");
    refused("[trainer]\nflow_shift = 3\nflow_shift_by = 'tokens'\n",
            "trainer.flow_shift = 3 with trainer.flow_shift_by = \"tokens\"");
    refused("[trainer]\nobjective = 'eps'\nflow_shift_by = 'tokens'\n",
            "trainer.flow_shift_by has no meaning");
    scratch_remove();
}

/* Of clips: Latte's pipeline, and LTX-Video's, whose shift has a line of its own. */
static void clips(void **state)
{
    scratch_make();
    scratch_write("pipe/model_index.json",
                  "{\"_class_name\": \"LTXPipeline\", \"transformer\": [\"diffusers\", "
                  "\"LTXVideoTransformer3DModel\"]}");
    scratch_write("pipe/transformer/config.json",
                  "{\"_class_name\": \"LTXVideoTransformer3DModel\"}");
    scratch_write("pipe/scheduler/scheduler_config.json",
                  "{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", \"shift\": 1.0, "
                  "\"use_dynamic_shifting\": true, \"base_shift\": 0.95, \"max_shift\": 2.05, "
                  "\"base_image_seq_len\": 1024, \"max_image_seq_len\": 4096, "
                  "\"shift_terminal\": 0.1}");
    lg_config *c = load(PIPE);
    assert_string_equal(c->model_kind, "ltx");
    assert_true(c->model_depth == 28 && c->model_hidden == 2048 && c->model_heads == 32);
    assert_true(c->model_patch == 1 && !c->model_learned_variance && c->text_length == 128);
    assert_string_equal(c->trainer_objective, "flow");
    assert_string_equal(c->trainer_flow_shift_by, "tokens_ltx");
    assert_true(c->sample_flow_end == 0.1 && c->sample_guidance == 3 && c->sample_steps == 50);
    lg_config_free(&c);
    refused("[trainer]\nobjective = 'eps'\n[sample]\nflow_end = 0.1\n",
            "sample.flow_end has no meaning");
    scratch_write("pipe/model_index.json",
                  "{\"_class_name\": \"LattePipeline\", \"transformer\": [\"diffusers\", "
                  "\"LatteTransformer3DModel\"]}");
    scratch_write("pipe/transformer/config.json",
                  "{\"_class_name\": \"LatteTransformer3DModel\", \"attention_head_dim\": 72, "
                  "\"num_layers\": 28, \"in_channels\": 4, \"out_channels\": 8}");
    scratch_write("pipe/scheduler/scheduler_config.json",
                  "{\"_class_name\": \"DDIMScheduler\", \"beta_schedule\": \"linear\", "
                  "\"beta_start\": 0.0001, \"beta_end\": 0.02}");
    c = load(PIPE);
    assert_string_equal(c->model_kind, "latte");
    assert_true(c->model_depth == 28 && c->model_hidden == 1152 && c->model_heads == 16);
    assert_true(c->model_patch == 2 && c->model_learned_variance && c->text_length == 120);
    assert_string_equal(c->trainer_objective, "eps");
    assert_true(c->sample_guidance == 7.5);
    lg_config_free(&c);
    scratch_remove();
}

/* Latents made before, of the pipeline's own autoencoder, which is left out: it says how they are scaled. */
static void latents_are_scaled_as_the_pipeline_says(void **state)
{
    scratch_make();
    write_pipeline("{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\"}");
    scratch_write("pipe/vae/config.json",
                  "{\"block_out_channels\": [1, 1, 1, 1], \"latent_channels\": 4, "
                  "\"scaling_factor\": 0.5, \"shift_factor\": 0.25}");
    lg_config *c = load(PIPE "[vae]\nmodel = ''\n");
    assert_string_equal(c->vae_model, "");
    assert_true(c->data_latent_scaling == 0.5 && c->data_latent_shift == 0.25);
    assert_true(is_chosen(c, "data.latent_scaling", "vae/config.json"));
    lg_config_free(&c);
    c = load(PIPE "latent_scaling = 1\n[vae]\nmodel = ''\n"); /* as written */
    assert_true(c->data_latent_scaling == 1 && c->data_latent_shift == 0.25);
    lg_config_free(&c);
    c = load(PIPE); /* pictures */
    assert_true(c->data_latent_scaling == 1 && !is_chosen(c, "data.latent_scaling", ""));
    lg_config_free(&c);
    scratch_remove();
}

/* SD3's pipeline has three text encoders, of which a folder may lack T5, and draws at its scheduler's own timesteps. */
static void sd3(void **state)
{
    scratch_make();
    scratch_write("pipe/model_index.json",
                  "{\"_class_name\": \"StableDiffusion3Pipeline\", "
                  "\"text_encoder\": [\"transformers\", \"CLIPTextModelWithProjection\"], "
                  "\"text_encoder_2\": [\"transformers\", \"CLIPTextModelWithProjection\"], "
                  "\"text_encoder_3\": [null, null], "
                  "\"transformer\": [\"diffusers\", \"SD3Transformer2DModel\"]}");
    scratch_write("pipe/transformer/config.json",
                  "{\"_class_name\": \"SD3Transformer2DModel\", \"num_layers\": 24, "
                  "\"num_attention_heads\": 24}");
    scratch_write("pipe/scheduler/scheduler_config.json",
                  "{\"_class_name\": \"FlowMatchEulerDiscreteScheduler\", \"shift\": 3.0}");
    lg_config *c = load(PIPE);
    assert_string_equal(c->model_kind, "sd3");
    assert_true(c->model_depth == 24 && c->model_hidden == 1536 && c->model_heads == 24);
    assert_string_equal(c->trainer_objective, "flow");
    assert_true(c->trainer_flow_shift == 3 && c->sample_guidance == 7 && c->sample_steps == 28);
    assert_string_equal(c->sample_spacing, "linspace");
    assert_true(is_chosen(c, "sample.spacing", "model_index.json"));
    assert_non_null(strstr(c->text.clip_l_model, "pipe/text_encoder"));
    assert_non_null(strstr(c->text.clip_g_model, "pipe/text_encoder_2"));
    assert_string_equal(c->text.t5_model, "");
    assert_true(c->text.clip_g_length == 77 && c->text.t5_length == 256);
    lg_config_free(&c);
    scratch_remove();
}

static void refused(const char *text, const char *part)
{
    lg_config *c = NULL;
    int rc = lg_config_load(scratch_write("p.toml", text), NULL, 0, &c);
    if (rc == 0) rc = lg_config_check(c);
    lg_config_free(&c);
    assert_int_equal(rc, LG_ERR_CONFIG);
    assert_message(part);
}

static void refusals_name_key_and_file(void **state)
{
    scratch_make();
    write_pipeline(DPM);
    refused(PIPE "[model]\ndepth = 4\n[trainer]\nvariance_loss = 'none'\n",
            "p.toml:7: model.depth = 4, but the weights of model.from have 28 (");
    refused(PIPE "[model]\nlearned_variance = false\n",
            "model.learned_variance = false, but the weights of model.from have true");
    refused(PIPE, "a learned variance is trained with \"eps\" alone"); /* DPM says v */
    refused("[trainer]\nvariance_loss = 'none'\n", "without model.learned_variance");
    refused("[trainer]\nzero_snr = true\n", "trainer.zero_snr has no meaning");
    refused("[trainer]\nobjective = 'eps'\nflow_shift = 3\n", "trainer.flow_shift has no meaning");
    refused("[sample]\nsampler = 'dpm++'\n", "sample.sampler has no meaning");
    refused("[trainer]\nobjective = 'eps'\nbeta_start = 0.03\n", "is above trainer.beta_end");
    refused("pipeline = 'none'\n", "none/model_index.json does not exist");
    refused("[model]\nfrom = 'none'\n", "none/config.json does not exist");
    scratch_write("pipe/scheduler/scheduler_config.json", "{\"prediction_type\": \"sample\"}");
    refused(PIPE, "\"prediction_type\" is \"sample\"");
    scratch_write("pipe/scheduler/scheduler_config.json", "{\"num_train_timesteps\": 500}");
    refused(PIPE, "\"num_train_timesteps\" is 500");
    scratch_write("pipe/scheduler/scheduler_config.json", "{\"beta_schedule\": \"cosine\"}");
    refused(PIPE, "\"beta_schedule\" is \"cosine\"");
    scratch_write("pipe/scheduler/scheduler_config.json", "{,}");
    lg_config *c = NULL;
    int rc = lg_config_load(scratch_path("p.toml"), NULL, 0, &c);
    assert_int_equal(rc == 0 ? lg_config_check(c) : rc, LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "scheduler_config.json is not a JSON object"));
    assert_null(strstr(lg_err_message(), "errors:")); /* it is one */
    lg_config_free(&c);
    assert_int_equal(unlink(scratch_path("pipe/scheduler/scheduler_config.json")), 0);
    refused(PIPE, "scheduler_config.json does not exist, which says what the net predicts");
    c = load(PIPE "[trainer]\nobjective = 'eps'\n"); /* it is said then */
    assert_int_equal(lg_config_check(c), 0);
    lg_config_free(&c);
    scratch_write("pipe/model_index.json", "{\"_class_name\": \"WuerstchenPriorPipeline\", "
                                           "\"prior\": [\"diffusers\", \"WuerstchenPrior\"]}");
    refused(PIPE, "names no transformer and no unet: WuerstchenPriorPipeline");
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms_of_weights),
        cmocka_unit_test(old_class),
        cmocka_unit_test(size_conditions_are_the_weights),
        cmocka_unit_test(keys_are_written_back),
        cmocka_unit_test(a_pipeline_fills_what_is_unwritten),
        cmocka_unit_test(what_is_written_wins),
        cmocka_unit_test(flux),
        cmocka_unit_test(clips),
        cmocka_unit_test(latents_are_scaled_as_the_pipeline_says),
        cmocka_unit_test(sd3),
        cmocka_unit_test(refusals_name_key_and_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
