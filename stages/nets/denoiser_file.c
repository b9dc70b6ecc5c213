/* Denoisers in diffusers' layout: config.json and diffusion_pytorch_model.safetensors.
 *
 * Design: what diffusers can express and this program cannot (learned variances, additional
 * conditions, affine norms ...) is refused at loading, key by key, with diffusers' defaults for
 * absent keys. What this program knows and diffusers does not (the text length, a latent that is
 * not square) is written under keys that begin with an underscore, which diffusers skips.
 *
 * DiT: diffusers has a timestep and label embedder in every block; block 0's drives the output
 * layer. Here there is one, called block 0's. Saving writes it under every block's name; loading
 * wants all of them byte for byte equal, since unequal ones would be another function. */
#include "base/fs.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/model_config.h"
#include "stages/nets/transformer.h"
#include "stages/nets/weights.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char DIT_CLASS[] = "DiTTransformer2DModel";
static const char PIXART_CLASS[] = "PixArtTransformer2DModel";
static const char KIND[] = "DiT and PixArt transformers as diffusers has them";
static const char WEIGHTS[] = "diffusion_pytorch_model.safetensors";
static const char EMBEDDER[] = "norm1.emb.";
enum { INT_KEY_MAX = 1 << 24, TEXT_LENGTH_DEFAULT = 120 /* PixArt-alpha's */ };

/* ---- config.json ---- */

static int refuse(const lg_model_config *f, const char *key, const char *why)
{
    return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\": %s", f->path, key, why);
}

static int load_common(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int head_dim, out;
    bool bias, affine;
    LG_TRY(lg_model_config_int(f, "num_attention_heads", 1, INT_KEY_MAX, 16, &c->heads));
    LG_TRY(lg_model_config_int(f, "attention_head_dim", 1, INT_KEY_MAX, 72, &head_dim));
    LG_TRY(lg_model_config_int(f, "in_channels", 1, INT_KEY_MAX, 4, &c->channels));
    LG_TRY(lg_model_config_int(f, "num_layers", 1, INT_KEY_MAX, 28, &c->depth));
    LG_TRY(lg_model_config_int(f, "patch_size", 1, INT_KEY_MAX, 2, &c->patch));
    LG_TRY(lg_model_config_int(f, "sample_size", 1, INT_KEY_MAX, c->kind == LG_DIT ? 32 : 128,
                               &c->height));
    LG_TRY(lg_model_config_int(f, "_sample_width", 1, INT_KEY_MAX, c->height, &c->width));
    LG_TRY(lg_model_config_double(f, "norm_eps", c->kind == LG_DIT ? 1e-5 : 1e-6, &c->norm_eps));
    if ((int64_t)c->heads * head_dim > INT_KEY_MAX)
        return refuse(f, "attention_head_dim", "heads times head dimension is out of bounds");
    c->hidden = c->heads * head_dim;
    c->mlp_ratio = 4;
    /* null means in_channels, but PixArt's default for an absent key is 8. */
    bool said = cJSON_GetObjectItemCaseSensitive(f->root, "out_channels");
    out = c->kind == LG_PIXART && !said ? 8 : c->channels;
    LG_TRY(lg_model_config_int(f, "out_channels", 1, INT_KEY_MAX, out, &out));
    if (out != c->channels)
        return refuse(f, "out_channels",
                      "must equal in_channels: models that also predict a variance cannot be used");
    LG_TRY(lg_model_config_bool(f, "attention_bias", true, &bias));
    if (!bias) return refuse(f, "attention_bias", "must be true");
    LG_TRY(lg_model_config_bool(f, "norm_elementwise_affine", false, &affine));
    if (affine) return refuse(f, "norm_elementwise_affine", "must be false");
    LG_TRY(lg_model_config_expect(f, "activation_fn", "gelu-approximate", KIND));
    return lg_model_config_expect(f, "norm_type",
                                  c->kind == LG_DIT ? "ada_norm_zero" : "ada_norm_single", KIND);
}

static int load_pixart(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int cross, scale;
    bool more;
    LG_TRY(lg_model_config_int(f, "caption_channels", 1, INT_KEY_MAX, -1, &c->text_dim));
    LG_TRY(lg_model_config_int(f, "_text_length", 1, INT_KEY_MAX, TEXT_LENGTH_DEFAULT,
                               &c->text_length));
    LG_TRY(lg_model_config_int(f, "cross_attention_dim", 1, INT_KEY_MAX, 1152, &cross));
    if (cross != c->hidden)
        return refuse(f, "cross_attention_dim", "must be heads times head dimension");
    LG_TRY(lg_model_config_bool(f, "use_additional_conditions", c->height == 128, &more));
    if (more)
        return refuse(
            f, "use_additional_conditions",
            "must be false: conditioning on resolution and aspect ratio is not supported");
    int usual = lg_tf_interpolation_scale(c);
    LG_TRY(lg_model_config_int(f, "interpolation_scale", 1, INT_KEY_MAX, usual, &scale));
    if (scale != usual)
        return refuse(f, "interpolation_scale", "must be absent or max(sample_size / 64, 1)");
    return lg_model_config_expect(f, "attention_type", "default", KIND);
}

static int load_dit(const lg_model_config *f, struct lg_denoiser_config *c)
{
    return lg_model_config_int(f, "num_embeds_ada_norm", 1, INT_KEY_MAX, 1000, &c->num_classes);
}

static int load_config(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const char *class;
    LG_TRY(lg_model_config_string(f, "_class_name", NULL, &class));
    if (!strcmp(class, DIT_CLASS))
        c->kind = LG_DIT;
    else if (!strcmp(class, PIXART_CLASS))
        c->kind = LG_PIXART;
    else
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"_class_name\" is \"%s\"; this program reads %s and %s",
                       f->path, class, DIT_CLASS, PIXART_CLASS);
    LG_TRY(load_common(f, c));
    LG_TRY(c->kind == LG_DIT ? load_dit(f, c) : load_pixart(f, c));
    return lg_denoiser_config_check(c);
}

int lg_denoiser_config_load(const char *path, struct lg_denoiser_config *ret)
{
    lg_model_config f = {0};
    struct lg_denoiser_config c = {0};
    int rc = lg_model_config_open(path, &f);
    if (rc == 0) rc = load_config(&f, &c);
    lg_model_config_close(&f);
    LG_TRY(rc);
    *ret = c;
    return 0;
}

static cJSON *config_json(const struct lg_denoiser_config *c)
{
    cJSON *o = cJSON_CreateObject();
    LG_ASSERT(o);
    bool dit = c->kind == LG_DIT;
    cJSON_AddStringToObject(o, "_class_name", dit ? DIT_CLASS : PIXART_CLASS);
    cJSON_AddStringToObject(o, "activation_fn", "gelu-approximate");
    cJSON_AddBoolToObject(o, "attention_bias", true);
    cJSON_AddNumberToObject(o, "attention_head_dim", c->hidden / c->heads);
    cJSON_AddNumberToObject(o, "dropout", 0);
    cJSON_AddNumberToObject(o, "in_channels", c->channels);
    cJSON_AddBoolToObject(o, "norm_elementwise_affine", false);
    cJSON_AddNumberToObject(o, "norm_eps", c->norm_eps);
    cJSON_AddStringToObject(o, "norm_type", dit ? "ada_norm_zero" : "ada_norm_single");
    cJSON_AddNumberToObject(o, "num_attention_heads", c->heads);
    cJSON_AddNumberToObject(o, "num_embeds_ada_norm", dit ? c->num_classes : 1000);
    cJSON_AddNumberToObject(o, "num_layers", c->depth);
    cJSON_AddNumberToObject(o, "out_channels", c->channels);
    cJSON_AddNumberToObject(o, "patch_size", c->patch);
    cJSON_AddNumberToObject(o, "sample_size", c->height);
    cJSON_AddBoolToObject(o, "upcast_attention", false);
    if (!dit) {
        cJSON_AddStringToObject(o, "attention_type", "default");
        cJSON_AddNumberToObject(o, "caption_channels", c->text_dim);
        cJSON_AddNumberToObject(o, "cross_attention_dim", c->hidden);
        cJSON_AddNullToObject(o, "interpolation_scale");
        cJSON_AddBoolToObject(o, "use_additional_conditions", false);
        cJSON_AddNumberToObject(o, "_text_length", c->text_length);
        if (c->width != c->height) cJSON_AddNumberToObject(o, "_sample_width", c->width);
    }
    return o;
}

int lg_denoiser_config_save(const struct lg_denoiser_config *c, const char *path)
{
    LG_TRY(lg_denoiser_config_check(c));
    cJSON *o = config_json(c);
    char *text = cJSON_Print(o);
    cJSON_Delete(o);
    LG_ASSERT(text);
    int rc = lg_publish_file(path, text, strlen(text));
    free(text);
    return rc;
}

/* ---- weights ---- */

/* "transformer_blocks.0.norm1.emb.X" -> "transformer_blocks.I.norm1.emb.X"; false for other names.
 */
static bool embedder_name(const char *name, int block, char ret[LG_PARAM_NAME_BYTES])
{
    static const char first[] = "transformer_blocks.0.";
    if (strncmp(name, first, sizeof first - 1)) return false;
    const char *tail = name + sizeof first - 1;
    if (strncmp(tail, EMBEDDER, sizeof EMBEDDER - 1)) return false;
    snprintf(ret, LG_PARAM_NAME_BYTES, "transformer_blocks.%d.%s", block, tail);
    return true;
}

static int check_embedder(const lg_weights *w, const char *name, const char *other)
{
    const struct lg_st_entry *a = lg_weights_find(w, name), *b = lg_weights_find(w, other);
    if (!a || !b)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s is missing", lg_weights_path(w),
                       a ? other : name);
    if (a->dtype != b->dtype || a->bytes != b->bytes || memcmp(a->data, b->data, a->bytes))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s: %s and %s differ; only models whose blocks share one timestep and "
                       "label embedder can be used",
                       lg_weights_path(w), name, other);
    return 0;
}

static int check_embedders(const lg_params *t, int depth, const char *path)
{
    lg_weights *w;
    LG_TRY(lg_weights_open(path, &w));
    int rc = 0;
    char other[LG_PARAM_NAME_BYTES];
    for (int i = 0; i < t->n && rc == 0; i++) {
        for (int b = 1; b < depth && rc == 0; b++)
            if (embedder_name(t->p[i].name, b, other)) rc = check_embedder(w, t->p[i].name, other);
    }
    lg_weights_close(&w);
    return rc;
}

/* The names of the further blocks' embedders, as lg_params_load wants them. */
struct extra {
    char (*text)[64];
    const char **list;
};

static struct extra extra_new(int depth)
{
    struct extra e = {.text = calloc((size_t)depth, sizeof *e.text),
                      .list = calloc((size_t)depth, sizeof *e.list)};
    LG_ASSERT(e.text && e.list);
    for (int b = 1; b < depth; b++) {
        snprintf(e.text[b], sizeof e.text[b], "transformer_blocks.%d.%s", b, EMBEDDER);
        e.list[b - 1] = e.text[b];
    }
    return e;
}

static int load_weights(const struct lg_denoiser_config *c, const lg_params *t, const char *path,
                        float *ret)
{
    if (c->kind == LG_PIXART) return lg_params_load(t, path, NULL, ret, 0, t->count);
    struct extra e = extra_new(c->depth);
    int rc = lg_params_load(t, path, e.list, ret, 0, t->count);
    free(e.text);
    free(e.list);
    LG_TRY(rc);
    return check_embedders(t, c->depth, path);
}

int lg_denoiser_load(const struct lg_denoiser_config *c, const char *dir, float *ret_weights)
{
    char path[LG_PATH_BYTES];
    lg_params t;
    LG_TRY(lg_path(path, "%s/%s", dir, WEIGHTS));
    LG_TRY(lg_denoiser_params(c, &t));
    int rc = load_weights(c, &t, path, ret_weights);
    lg_params_free(&t);
    return rc;
}

/* Calls declare or data for every tensor of the file: the table's, each embedder tensor once per
 * block. */
static int write_pass(lg_st_writer *w, const lg_params *t, const struct lg_denoiser_config *c,
                      const float *weights, bool declare)
{
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        LG_ASSERT(p->layout == LG_LAYOUT_FILE);
        char name[LG_PARAM_NAME_BYTES];
        int copies = c->kind == LG_DIT && embedder_name(p->name, 0, name) ? c->depth : 1;
        for (int b = 0; b < copies; b++) {
            const char *as = b && embedder_name(p->name, b, name) ? name : p->name;
            if (declare)
                LG_TRY(lg_st_writer_declare(w, as, LG_F32, p->rank, p->dim));
            else
                LG_TRY(lg_st_writer_data(w, weights + p->offset, p->count * sizeof *weights));
        }
    }
    return 0;
}

static int save_weights(const lg_params *t, const struct lg_denoiser_config *c, const char *path,
                        const float *weights)
{
    lg_st_writer *w;
    LG_TRY(lg_st_writer_open(path, &w));
    int rc;
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    LG_TRY_GOTO(rc, write_pass(w, t, c, weights, true), fail);
    LG_TRY_GOTO(rc, write_pass(w, t, c, weights, false), fail);
    return lg_st_writer_finish(&w, NULL);
fail:
    lg_st_writer_abort(&w);
    return rc;
}

int lg_denoiser_save(const struct lg_denoiser_config *c, const char *dir, const float *weights)
{
    char config[LG_PATH_BYTES], path[LG_PATH_BYTES];
    lg_params t;
    LG_TRY(lg_path(config, "%s/config.json", dir));
    LG_TRY(lg_path(path, "%s/%s", dir, WEIGHTS));
    LG_TRY(lg_denoiser_params(c, &t));
    int rc = save_weights(&t, c, path, weights);
    lg_params_free(&t);
    LG_TRY(rc);
    return lg_denoiser_config_save(c, config);
}
