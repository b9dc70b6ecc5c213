/* See pretrained.h. Each reader collects findings, a key and a value each; what becomes of them, to fill or to compare, is
 * the same for all. Absent keys of a file have the default of the class that reads it in diffusers. */
#include "config/pretrained.h"
#include "base/fs.h"
#include "base/json_tree.h"
#include "config/denoisers.h"
#include "config/models.h"
#include "config/schema.h"
#include "config/toml.h"
#include "config/unet.h"
#include <stdlib.h>
#include <string.h>

enum { FILE_BYTES_MAX = 1 << 20, FILE_TOKENS_MAX = 1 << 17, FINDINGS_MAX = 16 };
#define NUMBER_MAX 16777216.0

struct findings {
    char file[LG_PATH_BYTES]; /* that says so */
    cJSON *json;
    struct finding {
        const char *key;
        struct lg_toml_item item;
        char text[LG_PATH_BYTES];
    } found[FINDINGS_MAX];
    int n;
};

static struct finding *add(struct findings *f, const char *key, lg_toml_type type)
{
    LG_ASSERT(f->n < FINDINGS_MAX);
    struct finding *x = &f->found[f->n++];
    *x = (struct finding){.key = key, .item.type = type};
    return x;
}

static void add_int(struct findings *f, const char *key, int64_t value)
{
    add(f, key, LG_TOML_INT)->item.i = value;
}

static void add_number(struct findings *f, const char *key, double value)
{
    add(f, key, LG_TOML_NUM)->item.d = value;
}

static void add_bool(struct findings *f, const char *key, bool value)
{
    add(f, key, LG_TOML_BOOL)->item.b = value;
}

static int add_text(struct findings *f, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static int add_text(struct findings *f, const char *key, const char *fmt, ...)
{
    struct finding *x = add(f, key, LG_TOML_TEXT);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(x->text, sizeof x->text, fmt, ap);
    va_end(ap);
    if (n < 0 || n >= (int)sizeof x->text)
        return LG_FAIL(LG_ERR_CONFIG, "%s: a path is longer than %d bytes", f->file, LG_PATH_BYTES);
    x->item.text = x->text;
    return 0;
}

/* ---- reading ---- */

static int open_file(struct findings *f, const char *dir, const char *name)
{
    char *text = NULL;
    size_t bytes = 0;
    LG_TRY(lg_path(f->file, "%s/%s", dir, name));
    if (!lg_path_exists(f->file)) return LG_FAIL(LG_ERR_CONFIG, "%s does not exist", f->file);
    LG_TRY(lg_read_file(f->file, FILE_BYTES_MAX, &text, &bytes));
    int rc = lg_json_tree(f->file, text, bytes, FILE_TOKENS_MAX, &f->json);
    free(text);
    if (rc == 0 && cJSON_IsObject(f->json)) return 0;
    if (rc < 0 && rc != LG_ERR_CORRUPT) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return LG_FAIL(LG_ERR_CONFIG, "%s is not a JSON object%s%s", f->file, rc < 0 ? ": " : "",
                   rc < 0 ? lg_err_message() : "");
}

static void close_file(struct findings *f)
{
    cJSON_Delete(f->json);
    f->json = NULL;
}

/* NULL: absent or null. */
static const cJSON *value_of(const struct findings *f, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(f->json, key);
    return cJSON_IsNull(v) ? NULL : v;
}

/* In [0, 2^24]. */
static int number(const struct findings *f, const char *key, double fallback, double *ret)
{
    const cJSON *v = value_of(f, key);
    if (v && !(cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble <= NUMBER_MAX))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is no number from 0 to %.0f", f->file, key,
                       NUMBER_MAX);
    *ret = v ? v->valuedouble : fallback;
    return 0;
}

static int whole(const struct findings *f, const char *key, int fallback, int64_t *ret)
{
    double v;
    LG_TRY(number(f, key, fallback, &v));
    *ret = (int64_t)v;
    if (v == (double)*ret) return 0;
    return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a whole number", f->file, key);
}

static int text(const struct findings *f, const char *key, const char *fallback, const char **ret)
{
    const cJSON *v = value_of(f, key);
    if (v && !cJSON_IsString(v))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a text", f->file, key);
    *ret = v ? v->valuestring : fallback;
    return 0;
}

/* ---- a transformer's or U-Net's config.json ---- */

static const char UNET[] = "UNet2DConditionModel";

/* Element i of a list, or the number that stands for all. */
static int element(const struct findings *f, const char *key, int i, int fallback, int *ret)
{
    const cJSON *v = value_of(f, key);
    if (cJSON_IsArray(v)) v = cJSON_GetArrayItem(v, i);
    const double x = cJSON_IsNumber(v) ? v->valuedouble : fallback;
    *ret = (int)x;
    if (x >= 1 && x <= NUMBER_MAX && x == (double)*ret && (!v || cJSON_IsNumber(v))) return 0;
    return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" has no number for level %d", f->file, key, i);
}

/* What the plan knows of it; the net reads the rest, and refuses what it does not have (unet_file.c). */
static int read_unet(struct findings *f)
{
    static const bool crossed[] = {true, true, true, false}; /* of the class's defaults */
    const cJSON *types = value_of(f, "down_block_types"),
                *channels = value_of(f, "block_out_channels");
    const char *heads =
        value_of(f, "num_attention_heads") ? "num_attention_heads" : "attention_head_dim";
    const cJSON *added = value_of(f, "addition_embed_type");
    const bool sdxl = cJSON_IsString(added) && !strcmp(added->valuestring, "text_time");
    struct lg_unet u = {.levels = cJSON_IsArray(channels) ? cJSON_GetArraySize(channels) : 4};
    if (u.levels < 1 || u.levels > LG_UNET_LEVELS_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"block_out_channels\" is no list of 1 to %d numbers",
                       f->file, LG_UNET_LEVELS_MAX);
    LG_TRY(element(f, "block_out_channels", 0, 320, &u.channels[0]));
    LG_TRY(element(f, heads, 0, 8, &u.heads[0]));
    LG_TRY(element(f, "layers_per_block", 0, 2, &u.layers));
    for (int i = 0; i < u.levels; i++) {
        const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(types, i));
        LG_TRY(element(f, "transformer_layers_per_block", i, 1, &u.depths[i]));
        u.middle_depth = u.depths[i]; /* the last level's */
        if (types ? !type || strncmp(type, "CrossAttn", 9) : !crossed[i]) u.depths[i] = 0;
    }
    LG_TRY(add_text(f, "model.kind", "%s", sdxl ? "sdxl" : "sd2"));
    add_int(f, "model.hidden", u.channels[0]);
    add_int(f, "model.heads", u.heads[0]);
    add_int(f, "model.depth", lg_unet_blocks(&u));
    add_int(f, "model.patch", 1);
    add_int(f, "model.mlp_ratio", 4);
    add_bool(f, "model.learned_variance", false);
    return 0;
}

static const struct transformer {
    const char *class, *norm_type, *kind;
    bool labels;
    /* of absent keys; out_channels 0: as many as in_channels */
    int out_channels, channels, heads, width, depth;
} TRANSFORMERS[] = {
    {"DiTTransformer2DModel", "ada_norm_zero", "dit", true, 0, 4, 16, 72, 28},
    {"PixArtTransformer2DModel", "ada_norm_single", "pixart", false, 8, 4, 16, 72, 28},
    {"SD3Transformer2DModel", NULL, "sd3", false, 16, 16, 18, 64, 18},
    {"FluxTransformer2DModel", NULL, "flux", false, 0, 64, 24, 128, 19},
    {"LatteTransformer3DModel", NULL, "latte", false, 0, 4, 16, 88, 1},
    {"LTXVideoTransformer3DModel", NULL, "ltx", false, 0, 128, 32, 64, 28},
    {UNET, NULL, "sd2", false, 0, 4, 0, 0, 0}, /* or sdxl: read_unet */
};

static int find_transformer(const struct findings *f, const struct transformer **ret)
{
    const char *class, *norm;
    LG_TRY(text(f, "_class_name", "", &class));
    LG_TRY(text(f, "norm_type", "", &norm));
    const bool old = !strcmp(class, "Transformer2DModel"); /* was both */
    for (size_t i = 0; i < LG_ARRAY_LEN(TRANSFORMERS); i++) {
        const struct transformer *t = &TRANSFORMERS[i];
        *ret = t;
        if (old ? t->norm_type && !strcmp(norm, t->norm_type) : !strcmp(class, t->class)) return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG,
                   "%s: \"_class_name\" is \"%.64s\": expected DiTTransformer2DModel, "
                   "PixArtTransformer2DModel, SD3Transformer2DModel, FluxTransformer2DModel, "
                   "LatteTransformer3DModel, LTXVideoTransformer3DModel or UNet2DConditionModel",
                   f->file, class);
}

static int read_transformer(struct findings *f, const char *dir)
{
    const struct transformer *t;
    int64_t heads, width, in, out, classes, depth, patch;
    LG_TRY(open_file(f, dir, "config.json"));
    LG_TRY(find_transformer(f, &t));
    if (!strcmp(t->class, UNET)) return read_unet(f);
    LG_TRY(whole(f, "num_attention_heads", t->heads, &heads));
    LG_TRY(whole(f, "attention_head_dim", t->width, &width));
    LG_TRY(whole(f, "num_layers", t->depth, &depth));
    LG_TRY(whole(f, "patch_size", strcmp(t->kind, "ltx") ? 2 : 1, &patch));
    LG_TRY(whole(f, "num_embeds_ada_norm", 1000, &classes));
    LG_TRY(whole(f, "in_channels", t->channels, &in));
    const bool said = cJSON_GetObjectItemCaseSensitive(f->json, "out_channels");
    LG_TRY(whole(f, "out_channels", (int)(t->out_channels && !said ? t->out_channels : in), &out));
    LG_TRY(add_text(f, "model.kind", "%s", t->kind));
    add_int(f, "model.hidden", heads * width);
    add_int(f, "model.heads", heads);
    if (!strcmp(t->kind,
                "flux")) { /* counts blocks of one stream apart; its patches are packed outside */
        int64_t singles;
        LG_TRY(whole(f, "num_single_layers", 38, &singles));
        depth += singles;
        patch = 2;
    }
    add_int(f, "model.depth", depth);
    add_int(f, "model.patch", patch);
    add_int(f, "model.mlp_ratio", 4);
    if (t->labels) add_int(f, "model.num_classes", classes);
    add_bool(f, "model.learned_variance", out == 2 * in);
    return 0;
}

/* ---- a pipeline ---- */

/* What diffusers' pipelines have as defaults, and the authors use. */
static const struct pipeline {
    const char *class;
    int text_length, steps;
    double guidance;
    const char *spacing; /* NULL: the scheduler's */
} PIPELINES[] = {
    {"DiTPipeline", 0, 50, 4, NULL},
    {"PixArtAlphaPipeline", 120, 20, 4.5, NULL},
    {"PixArtSigmaPipeline", 300, 20, 4.5, NULL},
    {"StableDiffusion3Pipeline", 0, 28, 7, "linspace"},
    {"FluxPipeline", 0, 28, 3.5, NULL},
    {"StableDiffusionPipeline", 77, 50, 7.5, NULL},
    {"StableDiffusionXLPipeline", 77, 50, 5, NULL},
    {"LattePipeline", 120, 50, 7.5, NULL},
    {"LTXPipeline", 128, 50, 3, NULL},
};

/* Which encoders the parts text_encoder, text_encoder_2 .. of a pipeline with several are. */
static const struct {
    const char *class;
    const char *text[LG_TEXTS_MAX];
} ENCODERS[] = {
    {"StableDiffusion3Pipeline", {"clip_l", "clip_g", "t5"}},
    {"FluxPipeline", {"clip_l", "t5"}},
    {"StableDiffusionXLPipeline", {"clip_l", "clip_g"}},
};

/* Their keys live as long as the program: findings point to them. */
static const char *encoder_key(const char *text)
{
#define LG_ENCODER(name)                                                                           \
    if (!strcmp(text, #name)) return "text." #name ".model";
#include "config/encoders.def"
#undef LG_ENCODER
    LG_ASSERT(!"a text encoder");
    return NULL;
}

/* "name": ["library", "class"]; null for what a pipeline does without. */
static bool has_part(const struct findings *f, const char *name)
{
    const cJSON *v = value_of(f, name);
    return cJSON_IsArray(v) && cJSON_IsString(cJSON_GetArrayItem(v, 1));
}

/* NULL: the pipeline has one encoder, or none. */
static const char *const *encoders_of(const char *class)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(ENCODERS); i++)
        if (!strcmp(class, ENCODERS[i].class)) return ENCODERS[i].text;
    return NULL;
}

static int read_encoders(struct findings *f, const char *dir, const char *const *text)
{
    for (int k = 0; k < LG_TEXTS_MAX && text[k]; k++) {
        char part[32] = "text_encoder";
        if (k) snprintf(part, sizeof part, "text_encoder_%d", k + 1);
        if (has_part(f, part)) LG_TRY(add_text(f, encoder_key(text[k]), "%s/%s", dir, part));
    }
    return 0;
}

static int read_index(struct findings *f, const char *dir)
{
    static const struct {
        const char *part, *key;
    } parts[] = {{"transformer", "model.from"},
                 {"unet", "model.from"},
                 {"vae", "vae.model"},
                 {"text_encoder", "text.model"}};
    const char *class;
    LG_TRY(open_file(f, dir, "model_index.json"));
    LG_TRY(text(f, "_class_name", "", &class));
    if (!has_part(f, "transformer") && !has_part(f, "unet"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s names no transformer and no unet: %.64s is none of the models that can "
                       "be trained here (DiT, PixArt, SD3, FLUX, SD 2, SDXL, Latte, LTX)",
                       f->file, class);
    const char *const *texts = encoders_of(class);
    for (size_t i = 0; i < LG_ARRAY_LEN(parts); i++)
        if (has_part(f, parts[i].part) && !(texts && !strcmp(parts[i].part, "text_encoder")))
            LG_TRY(add_text(f, parts[i].key, "%s/%s", dir, parts[i].part));
    if (texts) LG_TRY(read_encoders(f, dir, texts));
    for (size_t i = 0; i < LG_ARRAY_LEN(PIPELINES); i++) {
        const struct pipeline *p = &PIPELINES[i];
        if (strcmp(class, p->class)) continue;
        if (p->text_length) add_int(f, "text.length", p->text_length);
        add_int(f, "sample.steps", p->steps);
        add_number(f, "sample.guidance", p->guidance);
        if (p->spacing) LG_TRY(add_text(f, "sample.spacing", "%s", p->spacing));
    }
    return 0;
}

static int read_objective(struct findings *f, const char *dir)
{
    const char *class, *prediction;
    LG_TRY(open_file(f, dir, "scheduler/scheduler_config.json"));
    LG_TRY(text(f, "_class_name", "", &class));
    LG_TRY(text(f, "prediction_type", "epsilon", &prediction));
    const bool flow = !strncmp(class, "FlowMatch", 9) || !strcmp(prediction, "flow_prediction");
    if (!flow && strcmp(prediction, "epsilon") && strcmp(prediction, "v_prediction"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"prediction_type\" is \"%.32s\": expected epsilon or v_prediction; "
                       "write trainer.objective",
                       f->file, prediction);
    return add_text(f, "trainer.objective", "%s",
                    flow                             ? "flow"
                    : !strcmp(prediction, "epsilon") ? "eps"
                                                     : "v");
}

static int read_betas(struct findings *f)
{
    double first, last, steps;
    const char *schedule;
    LG_TRY(number(f, "beta_start", 1e-4, &first));
    LG_TRY(number(f, "beta_end", 0.02, &last));
    LG_TRY(number(f, "num_train_timesteps", 1000, &steps));
    LG_TRY(text(f, "beta_schedule", "linear", &schedule));
    if (value_of(f, "trained_betas"))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"trained_betas\" cannot be used: expected null",
                       f->file);
    if (steps != 1000)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"num_train_timesteps\" is %g: expected 1000", f->file,
                       steps);
    if (strcmp(schedule, "linear") && strcmp(schedule, "scaled_linear"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"beta_schedule\" is \"%.32s\": expected linear or scaled_linear",
                       f->file, schedule);
    LG_TRY(add_text(f, "trainer.beta_schedule", "%s", schedule));
    add_number(f, "trainer.beta_start", first);
    add_number(f, "trainer.beta_end", last);
    add_bool(f, "trainer.zero_snr", cJSON_IsTrue(value_of(f, "rescale_betas_zero_snr")));
    return add_text(f, "trainer.timesteps", "uniform");
}

/* FLUX's or LTX's: those that trainer.flow_shift_by knows. */
static int read_dynamic_shift(struct findings *f)
{
    static const struct {
        const char *key;
        double is[2];
    } want[] = {{"base_shift", {0.5, 0.95}},
                {"max_shift", {1.15, 2.05}},
                {"base_image_seq_len", {256, 1024}},
                {"max_image_seq_len", {4096, 4096}}};
    const char *type;
    double base, end;
    LG_TRY(text(f, "time_shift_type", "exponential", &type));
    if (strcmp(type, "exponential"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"time_shift_type\" is \"%.32s\": expected exponential; write "
                       "trainer.flow_shift_by",
                       f->file, type);
    LG_TRY(number(f, "base_shift", 0.5, &base));
    LG_TRY(number(f, "shift_terminal", 0, &end));
    const bool ltx = base == want[0].is[1];
    for (size_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        double v;
        LG_TRY(number(f, want[i].key, want[i].is[0], &v));
        if (v != want[i].is[ltx])
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s: \"%s\" is %g: expected %g; write trainer.flow_shift_by", f->file,
                           want[i].key, v, want[i].is[ltx]);
    }
    if (end > 0) add_number(f, "sample.flow_end", end);
    return add_text(f, "trainer.flow_shift_by", ltx ? "tokens_ltx" : "tokens");
}

/* Of an objective that is decided: the rest of the scheduler. */
static int read_scheduler(struct findings *f, const char *dir, bool flow)
{
    const char *class, *spacing;
    double shift;
    LG_TRY(open_file(f, dir, "scheduler/scheduler_config.json"));
    LG_TRY(text(f, "_class_name", "", &class));
    if (flow && cJSON_IsTrue(value_of(f, "use_dynamic_shifting"))) return read_dynamic_shift(f);
    if (flow) {
        LG_TRY(number(f, "shift", 1, &shift));
        add_number(f, "trainer.flow_shift", shift);
        return 0;
    }
    LG_TRY(read_betas(f));
    if (strcmp(class, "DPMSolverMultistepScheduler")) return 0;
    LG_TRY(add_text(f, "sample.sampler", "dpm++"));
    LG_TRY(text(f, "timestep_spacing", "linspace", &spacing));
    if (strcmp(spacing, "linspace") && strcmp(spacing, "trailing")) return 0;
    return add_text(f, "sample.spacing", "%s", spacing);
}

/* ---- filling and comparing ---- */

static bool is_written(const lg_config *c, const char *key)
{
    int i = lg_key_find(key);
    LG_ASSERT(i >= 0);
    return c->lines[i] != 0;
}

static bool any_unwritten(const lg_config *c, const char *const *keys)
{
    for (; *keys; keys++)
        if (!is_written(c, *keys)) return true;
    return false;
}

static void fill(lg_config *c, struct findings *f, struct lg_problems *p)
{
    for (int i = 0; i < f->n; i++) {
        int k = lg_key_find(f->found[i].key);
        LG_ASSERT(k >= 0);
        if (c->lines[k] || c->chosen[k]) continue;
        lg_config_set(c, lg_key_at(k), &f->found[i].item, f->file, p);
        c->chosen[k] = strdup(f->file);
        LG_ASSERT(c->chosen[k]);
    }
    f->n = 0;
    close_file(f);
}

/* rc: of the reader. False: it has failed, which is a problem by now. */
static bool take(lg_config *c, struct findings *f, int rc, const char *key, struct lg_problems *p)
{
    char where[LG_PROBLEM_BYTES / 2];
    if (rc == 0) {
        fill(c, f, p);
        return true;
    }
    lg_key_where(c, key, where, sizeof where);
    lg_problem(p, "%s%s: %s", where, key, lg_err_message());
    lg_err_clear();
    f->n = 0;
    close_file(f);
    return false;
}

static const char *const OF_INDEX[] = {"model.from",  "vae.model",    "text.model",
                                       "text.length", "sample.steps", "sample.guidance",
                                       NULL};
static const char *const OF_SCHEDULER[] = {
    "trainer.objective", "trainer.beta_schedule", "trainer.beta_start", "trainer.beta_end",
    "trainer.zero_snr",  "trainer.timesteps",     "trainer.flow_shift", "sample.sampler",
    "sample.spacing",    "trainer.flow_shift_by", "sample.flow_end",    NULL};
static const char *const OF_LATENTS[] = {"data.latent_channels", "data.latent_scaling",
                                         "data.latent_shift", NULL};
static const char *const OF_TRANSFORMER[] = {
    "model.kind",  "model.hidden",    "model.heads",       "model.depth",
    "model.patch", "model.mlp_ratio", "model.num_classes", "model.learned_variance",
    NULL};

static void choose_scheduler(lg_config *c, struct findings *f, struct lg_problems *p)
{
    char path[LG_PATH_BYTES];
    if (lg_path(path, "%s/scheduler/scheduler_config.json", c->_pipeline) < 0 ||
        !lg_path_exists(path)) { /* a pipeline may be without; then the objective is the user's */
        lg_err_clear();
        if (is_written(c, "trainer.objective")) return;
        int rc = LG_FAIL(LG_ERR_CONFIG,
                         "%s does not exist, which says what the net predicts; fetch it, or write "
                         "trainer.objective (eps, v or flow) and the keys of its noise",
                         path);
        take(c, f, rc, "pipeline", p);
        return;
    }
    if (!is_written(c, "trainer.objective") &&
        !take(c, f, read_objective(f, c->_pipeline), "pipeline", p))
        return;
    take(c, f, read_scheduler(f, c->_pipeline, !strcmp(c->trainer_objective, "flow")), "pipeline",
         p);
}

/* Of a pipeline whose autoencoder is left out (vae.model = ""): what it says of the latents that it has made. */
static int read_latents(struct findings *f, const char *dir)
{
    struct lg_vae_info vae;
    char folder[LG_PATH_BYTES];
    LG_TRY(lg_path(folder, "%s/vae", dir));
    LG_TRY(lg_path(f->file, "%s/config.json", folder));
    if (!lg_path_exists(f->file)) return 0;
    LG_TRY(lg_vae_info_read(folder, &vae));
    add_int(f, "data.latent_channels", vae.latent_channels);
    add_number(f, "data.latent_scaling", vae.scaling_factor);
    add_number(f, "data.latent_shift", vae.shift_factor);
    return 0;
}

void lg_pretrained_choose(lg_config *c, struct lg_problems *p)
{
    struct findings *f = calloc(1, sizeof *f);
    LG_ASSERT(f);
    if (c->_pipeline[0] && any_unwritten(c, OF_INDEX))
        take(c, f, read_index(f, c->_pipeline), "pipeline", p);
    if (c->_pipeline[0] && !c->vae_model[0] && any_unwritten(c, OF_LATENTS))
        take(c, f, read_latents(f, c->_pipeline), "pipeline", p);
    if (c->_pipeline[0] && any_unwritten(c, OF_SCHEDULER)) choose_scheduler(c, f, p);
    if (c->model_from[0] && any_unwritten(c, OF_TRANSFORMER))
        take(c, f, read_transformer(f, c->model_from), "model.from", p);
    free(f);
}

static bool is_equal(const lg_config *c, const lg_key *k, const struct lg_toml_item *item)
{
    const void *field = lg_key_field(c, k);
    switch (k->type) {
    case LG_KEY_INT:
        return *(const int64_t *)field == item->i;
    case LG_KEY_BOOL:
        return *(const bool *)field == item->b;
    case LG_KEY_ENUM:
        return !strcmp(*(char *const *)field, item->text);
    default:
        LG_ASSERT(!"a type of [model]");
        return false;
    }
}

static void complain(const lg_config *c, const struct findings *f, const struct finding *x,
                     struct lg_problems *p)
{
    char where[LG_PROBLEM_BYTES / 2], *is = NULL, says[64];
    size_t bytes = 0;
    FILE *out = open_memstream(&is, &bytes);
    LG_ASSERT(out);
    lg_key_print(out, c, lg_key_at(lg_key_find(x->key)));
    LG_ASSERT(lg_close_text(out) == 0);
    lg_key_where(c, x->key, where, sizeof where);
    if (x->item.type == LG_TOML_TEXT)
        snprintf(says, sizeof says, "\"%.32s\"", x->text);
    else if (x->item.type == LG_TOML_BOOL)
        snprintf(says, sizeof says, "%s", x->item.b ? "true" : "false");
    else
        snprintf(says, sizeof says, "%lld", (long long)x->item.i);
    lg_problem(p, "%s%s = %.64s, but the weights of model.from have %s (%.200s): remove it", where,
               x->key, is, says, f->file);
    free(is);
}

void lg_pretrained_compare(const lg_config *c, struct lg_problems *p)
{
    struct findings *f = calloc(1, sizeof *f);
    LG_ASSERT(f);
    if (read_transformer(f, c->model_from) < 0) {
        char where[LG_PROBLEM_BYTES / 2];
        lg_key_where(c, "model.from", where, sizeof where);
        lg_problem(p, "%smodel.from: %s", where, lg_err_message());
        lg_err_clear();
    } else {
        for (int i = 0; i < f->n; i++)
            if (!is_equal(c, lg_key_at(lg_key_find(f->found[i].key)), &f->found[i].item))
                complain(c, f, &f->found[i], p);
    }
    close_file(f);
    free(f);
}
