/* The U-Nets' keys of config.json. SDXL says that it is one by its conditions: "addition_embed_type" is "text_time". Lengths of
 * the texts, and the widths of SDXL's two, which diffusers knows as a sum, are keys of this program's own. */
#include "stages/nets/unet.h"
#include <stdio.h>
#include <string.h>

enum { TEXT_LENGTH = 77, CLIP_L = 0, CLIP_G, CLIP_L_WIDTH = 768, CLIP_WIDTHS = 2048, NUMBERS = 6 };

static const char CROSS_DOWN[] = "CrossAttnDownBlock2D", DOWN[] = "DownBlock2D";
static const char CROSS_UP[] = "CrossAttnUpBlock2D", UP[] = "UpBlock2D";

bool lg_unet_is_sdxl(const lg_model_config *f)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(f->root, "addition_embed_type");
    return cJSON_IsString(v) && !strcmp(v->valuestring, "text_time");
}

/* ---- what is possible ---- */

static int check_level(const struct lg_unet *u, int i)
{
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    const int C = u->channels[i], heads = u->heads[i];
    WANT(C >= 1 && C <= LG_MODEL_WIDTH_MAX && C % u->groups == 0,
         "level %d has %d channels; the %d groups of its norms want a multiple", i, C, u->groups);
    WANT(heads >= 1 && C % heads == 0, "level %d has %d channels, which %d heads do not divide", i,
         C, heads);
    WANT(u->depths[i] >= 0 && u->depths[i] <= LG_UNET_DEPTH_MAX,
         "level %d has transformers of %d blocks; 0 to %d are possible", i, u->depths[i],
         LG_UNET_DEPTH_MAX);
    return 0;
}

static int check(const struct lg_denoiser_config *c)
{
    const struct lg_unet *u = &c->unet;
    WANT(u->levels >= 1 && u->levels <= LG_UNET_LEVELS_MAX,
         "a U-Net of %d levels; 1 to %d are possible. It takes its shape from model.from: a folder "
         "that somebody has published, or that lg-random-model has made",
         u->levels, LG_UNET_LEVELS_MAX);
    WANT(u->layers >= 1 && u->layers <= LG_UNET_LAYERS_MAX,
         "layers_per_block = %d; 1 to %d are possible", u->layers, LG_UNET_LAYERS_MAX);
    WANT(u->groups >= 1, "norm_num_groups = %d", u->groups);
    WANT(u->middle_depth >= 1 && u->middle_depth <= LG_UNET_DEPTH_MAX,
         "a middle of %d blocks; 1 to %d are possible", u->middle_depth, LG_UNET_DEPTH_MAX);
    for (int i = 0; i < u->levels; i++) LG_TRY(check_level(u, i));
    WANT(c->patch == 1, "patch = %d; a U-Net has none: set it to 1", c->patch);
    WANT(c->hidden == u->channels[0] && c->depth == lg_unet_blocks(u),
         "hidden = %d and depth = %d, but the U-Net of model.from begins with %d channels and has "
         "%d blocks",
         c->hidden, c->depth, u->channels[0], lg_unet_blocks(u));
    WANT(!c->learned_variance, "U-Nets predict no variance: set learned_variance = false");
    if (c->kind != LG_SDXL) return 0;
    WANT(u->number_waves >= 2 && u->number_waves % 2 == 0 && u->number_waves <= LG_MODEL_WIDTH_MAX,
         "addition_time_embed_dim = %d; it is even", u->number_waves);
    WANT(c->text[CLIP_L].length == c->text[CLIP_G].length,
         "texts of %d and %d tokens; those of both CLIP stand side by side, and have one length",
         c->text[CLIP_L].length, c->text[CLIP_G].length);
#undef WANT
    return 0;
}

/* ---- reading ---- */

/* One number for each level, or one for all. */
static int load_levels(const lg_model_config *f, const char *key, int fallback,
                       const struct lg_unet *u, int ret[LG_UNET_LEVELS_MAX])
{
    int n;
    if (cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(f->root, key))) {
        LG_TRY(lg_model_config_ints(f, key, 1, LG_MODEL_WIDTH_MAX, LG_UNET_LEVELS_MAX, ret, &n));
        return n == u->levels ? 0
                              : lg_model_config_refuse(f, key, "must have one number per level");
    }
    LG_TRY(lg_model_config_int(f, key, 1, LG_MODEL_WIDTH_MAX, fallback, &ret[0]));
    for (int i = 1; i < u->levels; i++) ret[i] = ret[0];
    return 0;
}

/* Which levels have transformers: `crossed`. order -1: from the last on. */
static int load_types(const lg_model_config *f, const char *key, struct lg_unet *u,
                      const char *crossed, const char *plain, const bool fallback[4], int order,
                      bool ret[LG_UNET_LEVELS_MAX])
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(f->root, key);
    const int n = list && !cJSON_IsNull(list) ? cJSON_GetArraySize(list) : 4;
    if (n != u->levels) return lg_model_config_refuse(f, key, "must have one type per level");
    for (int i = 0; i < n; i++) {
        const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(list, i));
        bool *is = &ret[order > 0 ? i : n - 1 - i];
        *is = list ? type && !strcmp(type, crossed) : fallback[i];
        if (list && !*is && !(type && !strcmp(type, plain)))
            return lg_model_config_refuse(f, key, "has a type of block that is not read here");
    }
    return 0;
}

static int load_shape(const lg_model_config *f, struct lg_unet *u)
{
    static const bool has[] = {true, true, true, false}; /* of the class's defaults */
    static const bool has_up[] = {false, true, true, true};
    static const int channels[] = {320, 640, 1280, 1280};
    bool down[LG_UNET_LEVELS_MAX], up[LG_UNET_LEVELS_MAX];
    const cJSON *heads = cJSON_GetObjectItemCaseSensitive(f->root, "num_attention_heads");
    if (cJSON_GetObjectItemCaseSensitive(f->root, "block_out_channels")) {
        LG_TRY(lg_model_config_ints(f, "block_out_channels", 1, LG_MODEL_WIDTH_MAX,
                                    LG_UNET_LEVELS_MAX, u->channels, &u->levels));
    } else {
        u->levels = (int)LG_ARRAY_LEN(channels);
        memcpy(u->channels, channels, sizeof channels);
    }
    LG_TRY(load_types(f, "down_block_types", u, CROSS_DOWN, DOWN, has, 1, down));
    LG_TRY(load_types(f, "up_block_types", u, CROSS_UP, UP, has_up, -1, up));
    LG_TRY(load_levels(f, "transformer_layers_per_block", 1, u, u->depths));
    /* Published files call the numbers of heads dimensions. */
    LG_TRY(load_levels(f,
                       heads && !cJSON_IsNull(heads) ? "num_attention_heads" : "attention_head_dim",
                       8, u, u->heads));
    LG_TRY(lg_model_config_int(f, "layers_per_block", 1, LG_UNET_LAYERS_MAX, 2, &u->layers));
    LG_TRY(lg_model_config_int(f, "norm_num_groups", 1, LG_MODEL_WIDTH_MAX, 32, &u->groups));
    u->middle_depth = u->depths[u->levels - 1];
    for (int i = 0; i < u->levels; i++) {
        if (down[i] != up[i])
            return lg_model_config_refuse(f, "up_block_types",
                                          "must have attention where \"down_block_types\" has");
        if (!down[i]) u->depths[i] = 0;
    }
    return 0;
}

/* Keys that must have one value, of those that change the net. */
static int refuse_others(const lg_model_config *f)
{
    static const struct {
        const char *key, *is;
    } texts[] = {{"act_fn", "silu"},
                 {"mid_block_type", "UNetMidBlock2DCrossAttn"},
                 {"resnet_time_scale_shift", "default"},
                 {"time_embedding_type", "positional"}};
    static const struct {
        const char *key;
        bool is, absent;
    } bools[] = {{"use_linear_projection", true, false}, {"flip_sin_to_cos", true, true},
                 {"center_input_sample", false, false},  {"dual_cross_attention", false, false},
                 {"only_cross_attention", false, false}, {"class_embeddings_concat", false, false}};
    static const char *const nulls[] = {
        "class_embed_type",   "encoder_hid_dim",       "encoder_hid_dim_type",
        "num_class_embeds",   "time_embedding_act_fn", "timestep_post_act",
        "time_cond_proj_dim", "cross_attention_norm",  "mid_block_only_cross_attention"};
    static const struct {
        const char *key;
        int is;
    } ints[] = {{"freq_shift", 0},     {"downsample_padding", 1}, {"mid_block_scale_factor", 1},
                {"conv_in_kernel", 3}, {"conv_out_kernel", 3},    {"dropout", 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(texts); i++)
        LG_TRY(lg_model_config_expect(f, texts[i].key, texts[i].is, LG_DENOISERS_READ));
    for (size_t i = 0; i < LG_ARRAY_LEN(bools); i++) {
        bool is;
        LG_TRY(lg_model_config_bool(f, bools[i].key, bools[i].absent, &is));
        if (is != bools[i].is)
            return lg_model_config_refuse(f, bools[i].key,
                                          bools[i].is ? "must be true" : "must be false");
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(nulls); i++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(f->root, nulls[i]);
        if (v && !cJSON_IsNull(v)) return lg_model_config_refuse(f, nulls[i], "must be null");
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(ints); i++) {
        double v;
        LG_TRY(lg_model_config_double(f, ints[i].key, ints[i].is, &v));
        if (v != ints[i].is)
            return lg_model_config_refuse(f, ints[i].key,
                                          ints[i].is == 3   ? "must be 3"
                                          : ints[i].is == 1 ? "must be 1"
                                                            : "must be 0");
    }
    return 0;
}

static int load_common(const lg_model_config *f, struct lg_denoiser_config *c, int *ret_width)
{
    LG_TRY(refuse_others(f));
    LG_TRY(load_shape(f, &c->unet));
    LG_TRY(lg_model_config_double(f, "norm_eps", 1e-5, &c->norm_eps));
    LG_TRY(lg_model_config_int(f, "cross_attention_dim", 1, LG_MODEL_WIDTH_MAX, 1280, ret_width));
    c->n_texts = c->kind == LG_SDXL ? 2 : 1;
    for (int k = 0; k < c->n_texts; k++)
        LG_TRY(lg_model_config_int(f, "_text_length", 1, LG_MODEL_KEY_MAX, TEXT_LENGTH,
                                   &c->text[k].length));
    c->patch = 1;
    c->hidden = c->unet.channels[0];
    c->heads = c->unet.heads[0];
    c->depth = lg_unet_blocks(&c->unet);
    return 0;
}

static int load_sd2(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(f->root, "addition_embed_type");
    if (v && !cJSON_IsNull(v))
        return lg_model_config_refuse(f, "addition_embed_type", "must be null or \"text_time\"");
    return load_common(f, c, &c->text[0].width);
}

static int load_sdxl(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int width, input, first;
    LG_TRY(load_common(f, c, &width));
    LG_TRY(lg_model_config_int(f, "addition_time_embed_dim", 2, LG_MODEL_WIDTH_MAX, 256,
                               &c->unet.number_waves));
    LG_TRY(lg_model_config_int(f, "projection_class_embeddings_input_dim", 1, LG_MODEL_KEY_MAX, -1,
                               &input));
    const int half = width == CLIP_WIDTHS ? CLIP_L_WIDTH : width / 2;
    LG_TRY(lg_model_config_int(f, LG_KEY_TEXT_WIDTHS, 1, LG_MODEL_WIDTH_MAX, half, &first));
    c->text[CLIP_L].width = first;
    c->text[CLIP_G].width = width - first;
    c->text[CLIP_G].pooled = input - NUMBERS * c->unet.number_waves;
    if (c->text[CLIP_G].width < 1)
        return lg_model_config_refuse(f, LG_KEY_TEXT_WIDTHS, "leaves nothing for the second text");
    if (c->text[CLIP_G].pooled < 1)
        return lg_model_config_refuse(f, "projection_class_embeddings_input_dim",
                                      "leaves nothing for the pooled text beside six numbers");
    c->size_conditions = true;
    return 0;
}

/* ---- writing ---- */

static void add_levels(cJSON *o, const char *key, const struct lg_unet *u, const int *v)
{
    cJSON *list = cJSON_AddArrayToObject(o, key);
    LG_ASSERT(list);
    for (int i = 0; i < u->levels; i++) cJSON_AddItemToArray(list, cJSON_CreateNumber(v[i]));
}

/* A level without transformers says 1, the last one the middle's. */
static void add_depths(cJSON *o, const struct lg_unet *u)
{
    int depth[LG_UNET_LEVELS_MAX];
    for (int i = 0; i < u->levels; i++) depth[i] = u->depths[i] ? u->depths[i] : 1;
    if (!u->depths[u->levels - 1]) depth[u->levels - 1] = u->middle_depth;
    add_levels(o, "transformer_layers_per_block", u, depth);
}

static void add_types(cJSON *o, const struct lg_unet *u)
{
    cJSON *down = cJSON_AddArrayToObject(o, "down_block_types");
    cJSON *up = cJSON_AddArrayToObject(o, "up_block_types");
    LG_ASSERT(down && up);
    for (int i = 0; i < u->levels; i++) {
        const bool last = u->depths[u->levels - 1 - i];
        cJSON_AddItemToArray(down, cJSON_CreateString(u->depths[i] ? CROSS_DOWN : DOWN));
        cJSON_AddItemToArray(up, cJSON_CreateString(last ? CROSS_UP : UP));
    }
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    const struct lg_unet *u = &c->unet;
    int width = 0;
    for (int k = 0; k < c->n_texts; k++) width += c->text[k].width;
    add_levels(o, "attention_head_dim", u, u->heads);
    add_levels(o, "block_out_channels", u, u->channels);
    cJSON_AddNumberToObject(o, "cross_attention_dim", width);
    add_types(o, u);
    cJSON_AddNumberToObject(o, "layers_per_block", u->layers);
    cJSON_AddNumberToObject(o, "norm_eps", c->norm_eps);
    cJSON_AddNumberToObject(o, "norm_num_groups", u->groups);
    add_depths(o, u);
    cJSON_AddBoolToObject(o, "use_linear_projection", true);
    if (c->text[0].length != TEXT_LENGTH)
        cJSON_AddNumberToObject(o, "_text_length", c->text[0].length);
    if (c->kind != LG_SDXL) return;
    cJSON_AddStringToObject(o, "addition_embed_type", "text_time");
    cJSON_AddNumberToObject(o, "addition_time_embed_dim", u->number_waves);
    cJSON_AddNumberToObject(o, "projection_class_embeddings_input_dim",
                            c->text[CLIP_G].pooled + NUMBERS * u->number_waves);
    cJSON_AddNumberToObject(o, LG_KEY_TEXT_WIDTHS, c->text[CLIP_L].width);
}

const struct lg_model lg_sd2 = {
    .class = "UNet2DConditionModel",
    .sample_size = 64,
    .channels = 4,
    .norm_eps = 1e-5,
    .is_unet = true,
    .describe = lg_unet_describe,
    .check = check,
    .load = load_sd2,
    .save = save,
};
const struct lg_model lg_sdxl = {
    .class = "UNet2DConditionModel",
    .sample_size = 128,
    .channels = 4,
    .norm_eps = 1e-5,
    .is_unet = true,
    .size_numbers = NUMBERS,
    .describe = lg_unet_describe,
    .check = check,
    .load = load_sdxl,
    .save = save,
};
