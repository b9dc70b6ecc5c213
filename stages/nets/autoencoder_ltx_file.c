/* AutoencoderKLLTXVideo's config.json; see autoencoder_ltx.h. What is left out has diffusers' defaults. */
#include "base/fs.h"
#include "stages/nets/autoencoder_ltx.h"
#include "stages/nets/model_config.h"
#include <string.h>

enum { CHANNELS_MAX = 1 << 14, LAYERS_MAX = 64, LIST_MAX = LG_AELTX_BLOCKS_MAX + 1 };

/* A list of the file, or diffusers' own. */
struct list {
    int n, v[LIST_MAX];
};
#define LIST(...)                                                                                  \
    ((struct list){.n = sizeof((int[]){__VA_ARGS__}) / sizeof(int), .v = {__VA_ARGS__}})

static int read_list(const lg_model_config *m, const char *key, int min, int max, struct list *l)
{
    const cJSON *j = cJSON_GetObjectItemCaseSensitive(m->root, key);
    if (!j || cJSON_IsNull(j)) return 0;
    LG_TRY(lg_model_config_ints(m, key, min, max, LIST_MAX, l->v, &l->n));
    return 0;
}

/* A list of words, of which each becomes its number. */
static int read_words(const lg_model_config *m, const char *key, const char *const *words,
                      struct list *l)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(m->root, key), *j;
    int n = 0;
    if (!list || cJSON_IsNull(list)) return 0;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > LIST_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a list of at most %d entries", m->path,
                       key, LIST_MAX);
    cJSON_ArrayForEach(j, list)
    {
        const char *word = cJSON_IsString(j) ? j->valuestring : cJSON_IsTrue(j) ? "true" : "false";
        int k = 0;
        while (words[k] && strcmp(words[k], word)) k++;
        if (!words[k] || !(cJSON_IsString(j) || cJSON_IsBool(j)))
            return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" has an entry that is not known here: %.60s",
                           m->path, key, word);
        l->v[n++] = k;
    }
    l->n = n;
    return 0;
}

static const char *const BOOLS[] = {"false", "true", NULL};

static int read_flags(const lg_model_config *m, const char *key, struct list *l)
{
    LG_TRY(read_words(m, key, BOOLS, l));
    return 0;
}

static int need_entries(const lg_model_config *m, const char *key, int is, int wanted)
{
    if (is >= wanted) return 0;
    return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" has %d entries, wanted are %d", m->path, key, is,
                   wanted);
}

static int refuse(const lg_model_config *m, const char *key, const char *why)
{
    return lg_model_config_refuse(m, key, why);
}

static int parse_encoder(const lg_model_config *m, struct lg_aeltx_config *c)
{
    static const char *const KINDS[] = {"LTXVideoDownBlock3D", "LTXVideo095DownBlock3D", NULL};
    static const char *const WAYS[] = {"", "conv", "spatial", "temporal", "spatiotemporal", NULL};
    struct list channels = LIST(128, 256, 512, 512), layers = LIST(4, 3, 3, 3, 4);
    struct list scales = LIST(1, 1, 1, 0), kinds = LIST(0, 0, 0, 0), ways = LIST(1, 1, 1, 1);
    struct lg_aeltx_half *e = &c->encoder;
    LG_TRY(read_list(m, "block_out_channels", 1, CHANNELS_MAX, &channels));
    LG_TRY(read_list(m, "layers_per_block", 1, LAYERS_MAX, &layers));
    LG_TRY(read_flags(m, "spatio_temporal_scaling", &scales));
    LG_TRY(read_words(m, "down_block_types", KINDS, &kinds));
    LG_TRY(read_words(m, "downsample_type", WAYS, &ways));
    c->is_095 = kinds.n > 0 && kinds.v[kinds.n - 1];
    e->blocks = channels.n - c->is_095;
    if (e->blocks < 1 || e->blocks > LG_AELTX_BLOCKS_MAX)
        return refuse(m, "block_out_channels", "1 to 8 blocks are possible");
    LG_TRY(need_entries(m, "layers_per_block", layers.n, e->blocks + 1));
    LG_TRY(need_entries(m, "spatio_temporal_scaling", scales.n, e->blocks));
    LG_TRY(need_entries(m, "down_block_types", kinds.n, e->blocks));
    LG_TRY(need_entries(m, "downsample_type", c->is_095 ? ways.n : e->blocks, e->blocks));
    c->factor = c->patch;
    c->factor_time = 1;
    e->first = channels.v[0];
    for (int i = 0; i < e->blocks; i++) {
        const int next = i + 1 < channels.n ? channels.v[i + 1] : channels.v[i];
        struct lg_aeltx_block *b = &e->block[i];
        *b = (struct lg_aeltx_block){.in = channels.v[i], .out = next, .layers = layers.v[i]};
        if (kinds.v[i] != (int)c->is_095)
            return refuse(m, "down_block_types", "blocks of several kinds are not supported");
        if (scales.v[i]) b->way = c->is_095 ? (lg_aeltx_way)ways.v[i] : LG_AELTX_CONV;
        if (scales.v[i] && !b->way) return refuse(m, "downsample_type", "an entry is empty");
        if (c->is_095 && b->way <= LG_AELTX_CONV && b->in != b->out)
            return refuse(m, "downsample_type", "a block without boxes cannot widen");
        const int boxes = b->way == LG_AELTX_BOTH ? 8 : b->way == LG_AELTX_TIME ? 2 : 4;
        if (b->way >= LG_AELTX_SPACE && (b->out % boxes || b->in * boxes % b->out))
            return refuse(m, "block_out_channels", "boxes do not divide the channels");
        if (b->way && b->way != LG_AELTX_TIME) c->factor *= 2;
        if (b->way && b->way != LG_AELTX_SPACE) c->factor_time *= 2;
    }
    e->middle = e->block[e->blocks - 1].out;
    e->middle_layers = layers.v[layers.n - 1];
    return 0;
}

static int parse_decoder(const lg_model_config *m, struct lg_aeltx_config *c)
{
    enum { BOXES = 8 };
    struct list channels = LIST(128, 256, 512, 512), layers = LIST(4, 3, 3, 3, 4);
    struct list scales = LIST(1, 1, 1, 0), noise = {0};
    struct list residual = LIST(0, 0, 0, 0), factor = LIST(1, 1, 1, 1);
    struct lg_aeltx_half *d = &c->decoder;
    LG_TRY(read_list(m, "decoder_block_out_channels", 1, CHANNELS_MAX, &channels));
    LG_TRY(read_list(m, "decoder_layers_per_block", 1, LAYERS_MAX, &layers));
    LG_TRY(read_flags(m, "decoder_spatio_temporal_scaling", &scales));
    LG_TRY(read_flags(m, "decoder_inject_noise", &noise));
    LG_TRY(read_flags(m, "upsample_residual", &residual));
    LG_TRY(read_list(m, "upsample_factor", 1, BOXES, &factor));
    const int n = d->blocks = channels.n;
    if (n > LG_AELTX_BLOCKS_MAX)
        return refuse(m, "decoder_block_out_channels", "1 to 8 blocks are possible");
    LG_TRY(need_entries(m, "decoder_layers_per_block", layers.n, n + 1));
    LG_TRY(need_entries(m, "decoder_spatio_temporal_scaling", scales.n, n));
    LG_TRY(need_entries(m, "upsample_residual", residual.n, n));
    LG_TRY(need_entries(m, "upsample_factor", factor.n, n));
    if (noise.n) LG_TRY(need_entries(m, "decoder_inject_noise", noise.n, n + 1));
    d->middle_has_noise = noise.n && noise.v[noise.n - 1];
    d->first = d->middle = channels.v[n - 1];
    d->middle_layers = layers.v[layers.n - 1];
    int shrinks = c->patch, wide = d->first;
    for (int i = 0; i < n; i++) { /* reversed, each list from its end */
        const int narrows = factor.v[factor.n - 1 - i];
        struct lg_aeltx_block *b = &d->block[i];
        *b = (struct lg_aeltx_block){.in = wide / narrows,
                                     .out = channels.v[n - 1 - i] / narrows,
                                     .layers = layers.v[layers.n - 2 - i],
                                     .has_residual = residual.v[residual.n - 1 - i],
                                     .has_noise = noise.n && noise.v[noise.n - 2 - i]};
        b->way = scales.v[scales.n - 1 - i] ? LG_AELTX_BOTH : LG_AELTX_KEEPS;
        if (b->out < 1 || wide % narrows || (narrows > 1 && (b->in != b->out || !b->way)))
            return refuse(m, "upsample_factor", "does not fit the channels");
        if (b->has_residual && (wide % BOXES || b->out % (wide / BOXES)) && b->way)
            return refuse(m, "upsample_residual", "boxes do not divide the channels");
        if (b->has_noise && b->in != b->out)
            return refuse(m, "decoder_inject_noise", "a block that widens adds no noise");
        if (c->has_timestep && b->in != b->out)
            return refuse(m, "timestep_conditioning", "a block that widens has no timestep");
        if (b->way) shrinks *= 2;
        wide = b->out;
    }
    if (shrinks != c->factor)
        return refuse(m, "decoder_spatio_temporal_scaling",
                      "the decoder's pictures have not the size of the encoder's");
    return 0;
}

static int parse_config(const lg_model_config *m, void *ret)
{
    struct lg_aeltx_config *c = ret;
    bool causal;
    int channels, time;
    LG_TRY(lg_model_config_expect(m, "_class_name", "AutoencoderKLLTXVideo",
                                  "diffusers' AutoencoderKLLTXVideo"));
    LG_TRY(lg_model_config_int(m, "in_channels", 3, 3, 3, &channels));
    LG_TRY(lg_model_config_int(m, "out_channels", 3, 3, 3, &channels));
    LG_TRY(lg_model_config_int(m, "patch_size_t", 1, 1, 1, &time));
    LG_TRY(lg_model_config_int(m, "patch_size", 1, 16, 4, &c->patch));
    LG_TRY(lg_model_config_int(m, "latent_channels", 1, 1024, 128, &c->latent_channels));
    LG_TRY(lg_model_config_double(m, "resnet_norm_eps", 1e-6, &c->eps));
    LG_TRY(lg_model_config_double(m, "scaling_factor", 1, &c->scaling_factor));
    LG_TRY(lg_model_config_bool(m, "encoder_causal", true, &causal));
    LG_TRY(lg_model_config_bool(m, "decoder_causal", false, &c->decoder_is_causal));
    LG_TRY(lg_model_config_bool(m, "timestep_conditioning", false, &c->has_timestep));
    if (!causal) return refuse(m, "encoder_causal", "an encoder that is not causal");
    if (!(c->scaling_factor > 0)) return refuse(m, "scaling_factor", "is not positive");
    LG_TRY(parse_encoder(m, c));
    LG_TRY(parse_decoder(m, c));
    return 0;
}

int lg_aeltx_config_load(const char *dir, struct lg_aeltx_config *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_aeltx_config c = {0};
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_model_config_read(path, parse_config, &c));
    *ret = c;
    return 0;
}
