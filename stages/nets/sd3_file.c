/* SD3's keys of config.json.
 *
 * The class knows the sum of both CLIP's pooled widths and the width of what it attends to, which is T5's. Lengths and
 * widths by encoder are keys of this program's own; where they are absent the encoders are those of the published models
 * (768 and 1280 of a pooled 2048), or have one half each. */
#include "stages/nets/models.h"
#include <string.h>

enum { TEXTS = 3, CLIP_L = 0, CLIP_G, T5, CLIP_LENGTH = 77, T5_LENGTH = 256 };
enum { CLIP_L_WIDTH = 768, POOLED_WIDTH = 2048 /* of both */ };

static int check(const struct lg_denoiser_config *c)
{
    const int *joint = &c->text[T5].width;
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    WANT(c->text[CLIP_L].length == c->text[CLIP_G].length,
         "texts of %d and %d tokens; those of both CLIP stand side by side, and have one length",
         c->text[CLIP_L].length, c->text[CLIP_G].length);
    WANT(c->text[CLIP_L].width + c->text[CLIP_G].width <= *joint,
         "texts of width %d and %d stand side by side, but T5's is %d wide: nothing is cut off",
         c->text[CLIP_L].width, c->text[CLIP_G].width, *joint);
    WANT(!c->learned_variance, "SD3 predicts no variance: set learned_variance = false");
    WANT(!c->size_conditions, "SD3 has no conditions of a picture's size");
    WANT(!c->no_attention_bias, "SD3's attention has biases");
    WANT(c->positions_side >= 1 && c->positions_side <= LG_MODEL_SIDE_MAX,
         "pos_embed_max_size = %d; 1 to %d are possible", c->positions_side, LG_MODEL_SIDE_MAX);
    WANT(c->height / c->patch <= c->positions_side && c->width / c->patch <= c->positions_side,
         "a latent of %d x %d, patches of %d; the model has positions for %d x %d patches",
         c->height, c->width, c->patch, c->positions_side, c->positions_side);
    for (int i = c->depth; i < LG_DENOISER_DEPTH_MAX; i++)
        WANT(!lg_denoiser_is_dual(c, i), "block %d of %d has a second attention", i, c->depth);
#undef WANT
    return 0;
}

static int load_dual(const lg_model_config *f, struct lg_denoiser_config *c)
{
    static const char key[] = "dual_attention_layers";
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(f->root, key);
    int n, block[LG_DENOISER_DEPTH_MAX];
    if (!list || cJSON_IsNull(list) || (cJSON_IsArray(list) && !cJSON_GetArraySize(list))) return 0;
    LG_TRY(lg_model_config_ints(f, key, 0, c->depth - 1, LG_DENOISER_DEPTH_MAX, block, &n));
    for (int i = 0; i < n; i++) c->dual[block[i] / 64] |= (uint64_t)1 << block[i] % 64;
    return 0;
}

/* One number for each text, in its place. */
static int load_sizes(const lg_model_config *f, const char *key, int min, int ret[TEXTS])
{
    int n;
    if (!cJSON_GetObjectItemCaseSensitive(f->root, key)) return 0;
    LG_TRY(lg_model_config_ints(f, key, min, LG_MODEL_WIDTH_MAX, TEXTS, ret, &n));
    return n == TEXTS ? 0 : lg_model_config_refuse(f, key, "must have one number for each text");
}

static int load_texts(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int joint, sum;
    LG_TRY(lg_model_config_int(f, "joint_attention_dim", 2, LG_MODEL_WIDTH_MAX, 2 * POOLED_WIDTH,
                               &joint));
    LG_TRY(
        lg_model_config_int(f, "pooled_projection_dim", 2, LG_MODEL_WIDTH_MAX, POOLED_WIDTH, &sum));
    const int first = sum == POOLED_WIDTH ? CLIP_L_WIDTH : sum / 2;
    int length[TEXTS] = {CLIP_LENGTH, CLIP_LENGTH, T5_LENGTH};
    int width[TEXTS] = {LG_MIN(first, joint / 2), LG_MIN(sum - first, joint / 2), joint};
    int pooled[TEXTS] = {first, sum - first};
    LG_TRY(load_sizes(f, LG_KEY_TEXT_LENGTHS, 1, length));
    LG_TRY(load_sizes(f, LG_KEY_TEXT_WIDTHS, 1, width));
    LG_TRY(load_sizes(f, LG_KEY_TEXT_POOLED, 0, pooled));
    if (width[T5] != joint)
        return lg_model_config_refuse(f, LG_KEY_TEXT_WIDTHS, "must end with joint_attention_dim");
    if (pooled[CLIP_L] + pooled[CLIP_G] != sum)
        return lg_model_config_refuse(f, LG_KEY_TEXT_POOLED,
                                      "must add up to pooled_projection_dim");
    c->n_texts = TEXTS;
    for (int k = 0; k < TEXTS; k++)
        c->text[k] = (struct lg_denoiser_text){length[k], width[k], pooled[k]};
    return 0;
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const char *norm;
    int width;
    LG_TRY(lg_model_config_int(f, "caption_projection_dim", 1, LG_MODEL_KEY_MAX, 1152, &width));
    if (width != c->hidden)
        return lg_model_config_refuse(f, "caption_projection_dim",
                                      "must be heads times head dimension");
    LG_TRY(
        lg_model_config_int(f, "pos_embed_max_size", 1, LG_MODEL_SIDE_MAX, 96, &c->positions_side));
    LG_TRY(lg_model_config_string(f, "qk_norm", "", &norm));
    if (*norm && strcmp(norm, "rms_norm"))
        return lg_model_config_refuse(f, "qk_norm", "must be null or \"rms_norm\"");
    c->qk_norm = *norm;
    LG_TRY(load_dual(f, c));
    return load_texts(f, c);
}

static void add_sizes(cJSON *o, const char *key, const struct lg_denoiser_config *c, size_t at)
{
    cJSON *list = cJSON_AddArrayToObject(o, key);
    LG_ASSERT(list);
    for (int k = 0; k < TEXTS; k++)
        cJSON_AddItemToArray(list,
                             cJSON_CreateNumber(*(const int *)((const char *)&c->text[k] + at)));
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    cJSON_AddNumberToObject(o, "caption_projection_dim", c->hidden);
    cJSON *dual = cJSON_AddArrayToObject(o, "dual_attention_layers");
    LG_ASSERT(dual);
    for (int i = 0; i < c->depth; i++)
        if (lg_denoiser_is_dual(c, i)) cJSON_AddItemToArray(dual, cJSON_CreateNumber(i));
    cJSON_AddNumberToObject(o, "joint_attention_dim", c->text[T5].width);
    cJSON_AddNumberToObject(o, "pooled_projection_dim",
                            c->text[CLIP_L].pooled + c->text[CLIP_G].pooled);
    cJSON_AddNumberToObject(o, "pos_embed_max_size", c->positions_side);
    if (c->qk_norm)
        cJSON_AddStringToObject(o, "qk_norm", "rms_norm");
    else
        cJSON_AddNullToObject(o, "qk_norm");
    add_sizes(o, LG_KEY_TEXT_LENGTHS, c, offsetof(struct lg_denoiser_text, length));
    add_sizes(o, LG_KEY_TEXT_WIDTHS, c, offsetof(struct lg_denoiser_text, width));
    add_sizes(o, LG_KEY_TEXT_POOLED, c, offsetof(struct lg_denoiser_text, pooled));
}

const struct lg_model lg_sd3 = {
    .class = "SD3Transformer2DModel",
    .sample_size = 128,
    .channels = 16,
    .depth = 18,
    .heads = 18,
    .head_dim = 64,
    .norm_eps = 1e-6,
    .describe = lg_sd3_describe,
    .check = check,
    .load = load,
    .save = save,
};
