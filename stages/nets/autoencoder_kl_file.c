/* The autoencoder's files: its config.json and its weights; see autoencoder_kl.h. */
#include "base/fs.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/nets/model_config.h"
#include "stages/nets/weights.h"
#include <stdio.h>
#include <string.h>

enum { CHANNELS_MAX = 1 << 14, LAYERS_MAX = 64 };

/* ---- configuration ---- */

static int check_block_types(const lg_model_config *m, const char *key, const char *type,
                             int blocks)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(m->root, key), *j;
    if (!list || cJSON_IsNull(list)) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != blocks)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a list as long as block_out_channels (%d)",
                       m->path, key, blocks);
    cJSON_ArrayForEach(j, list)
    {
        if (!cJSON_IsString(j) || strcmp(j->valuestring, type))
            return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" has an entry other than \"%s\"", m->path, key,
                           type);
    }
    return 0;
}

static int check_absent(const lg_model_config *m, const char *key)
{
    const cJSON *j = cJSON_GetObjectItemCaseSensitive(m->root, key);
    if (j && !cJSON_IsNull(j))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"%s\" is set: latents with statistics per channel are not "
                       "supported",
                       m->path, key);
    return 0;
}

static int parse_config(const lg_model_config *m, void *ret)
{
    struct lg_aekl_config *c = ret;
    const char *kind;
    LG_TRY(lg_model_config_string(m, "_class_name", NULL, &kind));
    LG_TRY(lg_model_config_expect(m, "_class_name", "AutoencoderKL", "diffusers' AutoencoderKL"));
    LG_TRY(lg_model_config_expect(m, "act_fn", "silu", "an AutoencoderKL"));
    LG_TRY(lg_model_config_int(m, "in_channels", 3, 3, 3, &c->in_channels));
    LG_TRY(lg_model_config_int(m, "out_channels", 3, 3, 3, &c->out_channels));
    LG_TRY(lg_model_config_int(m, "latent_channels", 1, 1024, 4, &c->latent_channels));
    LG_TRY(lg_model_config_ints(m, "block_out_channels", 1, CHANNELS_MAX, LG_AEKL_BLOCKS_MAX,
                                c->block_out_channels, &c->blocks));
    LG_TRY(check_block_types(m, "down_block_types", "DownEncoderBlock2D", c->blocks));
    LG_TRY(check_block_types(m, "up_block_types", "UpDecoderBlock2D", c->blocks));
    LG_TRY(lg_model_config_int(m, "layers_per_block", 1, LAYERS_MAX, 1, &c->layers_per_block));
    LG_TRY(lg_model_config_int(m, "norm_num_groups", 1, CHANNELS_MAX, 32, &c->norm_groups));
    for (int i = 0; i < c->blocks; i++)
        if (c->block_out_channels[i] % c->norm_groups)
            return LG_FAIL(LG_ERR_CONFIG,
                           "%s: norm_num_groups %d does not divide block_out_channels[%d] = %d",
                           m->path, c->norm_groups, i, c->block_out_channels[i]);
    LG_TRY(lg_model_config_bool(m, "mid_block_add_attention", true, &c->mid_attention));
    LG_TRY(lg_model_config_bool(m, "use_quant_conv", true, &c->quant_conv));
    LG_TRY(lg_model_config_bool(m, "use_post_quant_conv", true, &c->post_quant_conv));
    LG_TRY(lg_model_config_double(m, "scaling_factor", 0.18215, &c->scaling_factor));
    LG_TRY(lg_model_config_double(m, "shift_factor", 0, &c->shift_factor));
    if (!(c->scaling_factor > 0))
        return LG_FAIL(LG_ERR_CONFIG, "%s: scaling_factor %g is not positive", m->path,
                       c->scaling_factor);
    LG_TRY(check_absent(m, "latents_mean"));
    LG_TRY(check_absent(m, "latents_std"));
    return 0;
}

int lg_aekl_config_load(const char *dir, struct lg_aekl_config *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_aekl_config c = {0};
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_model_config_read(path, parse_config, &c));
    *ret = c;
    return 0;
}

/* ---- weights ---- */

/* Files from before diffusers 0.18 call the projections of the mid attention by other names. */
static void use_old_name(const lg_weights *w, struct lg_param *p)
{
    static const char *const names[][2] = {{".to_q.", ".query."},
                                           {".to_k.", ".key."},
                                           {".to_v.", ".value."},
                                           {".to_out.0.", ".proj_attn."}};
    if (lg_weights_find(w, p->name)) return;
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        const char *at = strstr(p->name, names[i][0]);
        if (!at) continue;
        char old[LG_PARAM_NAME_BYTES];
        int n = snprintf(old, sizeof old, "%.*s%s%s", (int)(at - p->name), p->name, names[i][1],
                         at + strlen(names[i][0]));
        if (n > 0 && (size_t)n < sizeof old && lg_weights_find(w, old)) strcpy(p->name, old);
    }
}

int lg_aekl_load(const struct lg_aekl_config *c, const char *dir, lg_aekl_half half, float *ret)
{
    static const char *const of_encoder[] = {"encoder.", "quant_conv."};
    static const char *const of_decoder[] = {"decoder.", "post_quant_conv."};
    const char *extra[5] = {0};
    int n = 0;
    for (int i = 0; i < 2; i++) {
        if (!(half & LG_AEKL_ENCODER)) extra[n++] = of_encoder[i];
        if (!(half & LG_AEKL_DECODER)) extra[n++] = of_decoder[i];
    }
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", dir));
    lg_params t = {0};
    lg_weights *w = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_aekl_params(c, half, &t), out);
    LG_TRY_GOTO(rc, lg_weights_open(path, &w), out);
    for (int i = 0; i < t.n; i++) use_old_name(w, &t.p[i]);
    LG_TRY_GOTO(rc, lg_params_load(&t, path, extra, ret, 0, ret ? t.count : 0), out);
out:
    lg_weights_close(&w);
    lg_params_free(&t);
    return rc;
}
