/* FLUX's keys of config.json, and its rotary positions.
 *
 * The class sees what its pipeline has packed: in_channels are those of a 2 x 2 patch, patch_size is 1. num_layers counts
 * the blocks of two streams, num_single_layers those of one; here depth counts both. */
#include "stages/nets/flux.h"
#include <math.h>

enum { PATCH = 2, T5_LENGTH = 512 };
static const double THETA = 1e4;

static int check(const struct lg_denoiser_config *c)
{
    const int *a = c->axes, d = c->hidden / c->heads;
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    WANT(c->patch == PATCH, "patches of %d; FLUX has patches of %d", c->patch, PATCH);
    WANT(c->singles >= 0 && c->singles <= c->depth, "%d single blocks of %d", c->singles, c->depth);
    WANT(a[0] >= 2 && a[1] >= 2 && a[2] >= 2 && a[0] % 2 == 0 && a[1] % 2 == 0 && a[2] % 2 == 0 &&
             (int64_t)a[0] + a[1] + a[2] == d,
         "axes_dims_rope = [%d, %d, %d]; three even numbers of at least 2 that add up to a head's "
         "dimension, %d",
         a[0], a[1], a[2], d);
    WANT(!c->learned_variance, "FLUX predicts no variance: set learned_variance = false");
    WANT(!c->size_conditions, "FLUX has no conditions of a picture's size");
    WANT(!c->no_attention_bias, "FLUX's attention has biases");
#undef WANT
    return 0;
}

static int load_axes(const lg_model_config *f, struct lg_denoiser_config *c)
{
    static const char key[] = "axes_dims_rope";
    int n = LG_FLUX_AXES;
    c->axes[0] = 16, c->axes[1] = c->axes[2] = 56;
    if (!cJSON_GetObjectItemCaseSensitive(f->root, key)) return 0;
    LG_TRY(lg_model_config_ints(f, key, 2, LG_MODEL_WIDTH_MAX, LG_FLUX_AXES, c->axes, &n));
    return n == LG_FLUX_AXES ? 0 : lg_model_config_refuse(f, key, "must have three numbers");
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int patch, width, pooled, length;
    LG_TRY(lg_model_config_int(f, "patch_size", 1, LG_MODEL_KEY_MAX, 1, &patch));
    if (patch != 1)
        return lg_model_config_refuse(f, "patch_size", "must be 1: in_channels are a patch's");
    if (c->channels % (PATCH * PATCH))
        return lg_model_config_refuse(f, "in_channels", "must be a multiple of 4, a patch's cells");
    c->patch = PATCH;
    c->channels /= PATCH * PATCH;
    LG_TRY(lg_model_config_int(f, "num_single_layers", 0, LG_DENOISER_DEPTH_MAX, 38, &c->singles));
    c->depth += c->singles;
    LG_TRY(lg_model_config_bool(f, "guidance_embeds", false, &c->guidance));
    LG_TRY(load_axes(f, c));
    LG_TRY(lg_model_config_int(f, "joint_attention_dim", 1, LG_MODEL_WIDTH_MAX, 4096, &width));
    LG_TRY(lg_model_config_int(f, "pooled_projection_dim", 1, LG_MODEL_WIDTH_MAX, 768, &pooled));
    LG_TRY(lg_model_config_int(f, "_text_length", 1, LG_MODEL_WIDTH_MAX, T5_LENGTH, &length));
    c->n_texts = LG_FLUX_TEXTS;
    c->text[LG_FLUX_CLIP] = (struct lg_denoiser_text){.pooled = pooled};
    c->text[LG_FLUX_T5] = (struct lg_denoiser_text){.length = length, .width = width};
    return 0;
}

static void replace(cJSON *o, const char *key, double value)
{
    cJSON_ReplaceItemInObjectCaseSensitive(o, key, cJSON_CreateNumber(value));
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    replace(o, "in_channels", c->channels * PATCH * PATCH);
    replace(o, "out_channels", c->channels * PATCH * PATCH);
    replace(o, "num_layers", c->depth - c->singles);
    replace(o, "patch_size", 1);
    cJSON_AddNumberToObject(o, "num_single_layers", c->singles);
    cJSON_AddBoolToObject(o, "guidance_embeds", c->guidance);
    cJSON_AddNumberToObject(o, "joint_attention_dim", c->text[LG_FLUX_T5].width);
    cJSON_AddNumberToObject(o, "pooled_projection_dim", c->text[LG_FLUX_CLIP].pooled);
    cJSON *axes = cJSON_AddArrayToObject(o, "axes_dims_rope");
    for (int i = 0; i < LG_FLUX_AXES; i++)
        cJSON_AddItemToArray(axes, cJSON_CreateNumber(c->axes[i]));
    cJSON_AddNumberToObject(o, "_text_length", c->text[LG_FLUX_T5].length);
}

/* diffusers' FluxPosEmbed, fp64 rounded once: of each token the angles of the axes behind each other. */
static void angles(const struct lg_denoiser_config *c, float *ret)
{
    const int S = c->text[LG_FLUX_T5].length, columns = c->width / c->patch;
    const int N = S + c->height / c->patch * columns, pairs = c->hidden / c->heads / 2;
    for (int t = 0; t < N; t++) {
        const int cell = t - S,
                  at[LG_FLUX_AXES] = {0, t < S ? 0 : cell / columns, t < S ? 0 : cell % columns};
        for (int axis = 0, k = 0; axis < LG_FLUX_AXES; axis++)
            for (int i = 0; i < c->axes[axis]; i += 2, k++) {
                const double a = at[axis] / pow(THETA, (double)i / c->axes[axis]);
                ret[(size_t)t * (size_t)pairs + (size_t)k] = (float)cos(a);
                ret[((size_t)N + (size_t)t) * (size_t)pairs + (size_t)k] = (float)sin(a);
            }
    }
}

const struct lg_model lg_flux = {
    .class = "FluxTransformer2DModel",
    .sample_size = 128,
    .channels = 64,
    .depth = 19,
    .heads = 24,
    .head_dim = 128,
    .norm_eps = 1e-6,
    .describe = lg_flux_describe,
    .angles = angles,
    .check = check,
    .load = load,
    .save = save,
};
