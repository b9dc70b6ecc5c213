/* Denoisers in diffusers' layout: config.json and diffusion_pytorch_model.safetensors.
 *
 * Design: what diffusers can express and this program cannot (affine norms, other activations ...) is refused at loading,
 * key by key, with diffusers' defaults for absent keys. What this program knows and diffusers does not (the text length, a
 * latent of another size than sample_size) is written under keys that begin with an underscore, which diffusers skips.
 * Keys that mean nothing here are ignored, and written back (lg_denoiser_config_save).
 *
 * A parameter may stand in the file under several names (DiT's embedders: models.h): saving writes it under each;
 * loading wants all of them byte for byte equal, since unequal ones would be another function. */
#include "base/fs.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/models.h"
#include "stages/nets/unet.h"
#include "stages/nets/weights.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char WEIGHTS[] = "diffusion_pytorch_model.safetensors";
/* Fixed tables that some published files hold, which are made here: they follow from config.json. */
static const char FIXED[] = "pos_embed.pos_embed";
static const char OLD_CLASS[] = "Transformer2DModel";

/* Of this program's own: sizes that diffusers does not know. */
#define KEY_HEIGHT      "_sample_height"
#define KEY_WIDTH       "_sample_width"
#define KEY_TEXT_LENGTH "_text_length"

/* ---- config.json ---- */

/* The latent's channels, or twice as many. */
static int load_channels(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const struct lg_model *m = lg_model_of(c->kind);
    int out;
    LG_TRY(lg_model_config_int(f, "in_channels", 1, LG_MODEL_KEY_MAX, m->channels, &c->channels));
    /* null means in_channels; the default for an absent key is the model's. */
    bool said = cJSON_GetObjectItemCaseSensitive(f->root, "out_channels");
    out = m->out_channels && !said ? m->out_channels : c->channels;
    LG_TRY(lg_model_config_int(f, "out_channels", 1, LG_MODEL_KEY_MAX, out, &out));
    if (out != c->channels && out != 2 * c->channels)
        return lg_model_config_refuse(
            f, "out_channels",
            "must be in_channels, or twice as many for a model that also predicts a variance");
    c->learned_variance = out != c->channels;
    return 0;
}

/* *ret: its weights hold what the model has with size_conditions; -1: there are no weights to ask. */
static int has_size_tensors(const lg_model_config *f, const char *name, int *ret)
{
    char path[LG_PATH_BYTES];
    const char *slash = strrchr(f->path, '/');
    lg_weights *w;
    LG_TRY(lg_path(path, "%.*s%s", slash ? (int)(slash - f->path + 1) : 0, f->path, WEIGHTS));
    int rc = lg_weights_open(path, &w);
    if (rc == LG_ERR_NOTFOUND) {
        lg_err_clear();
        *ret = -1;
        return 0;
    }
    LG_TRY(rc);
    *ret = lg_weights_find(w, name) != NULL;
    lg_weights_close(&w);
    return 0;
}

/* The weights know: published configs lack the key, whose default would often be wrong. */
static int load_size_conditions(const lg_model_config *f, struct lg_denoiser_config *c)
{
    static const char key[] = "use_additional_conditions";
    const char *tensor = lg_model_of(c->kind)->size_tensor;
    if (!tensor) return 0;
    LG_TRY(lg_model_config_bool(f, key, c->sample_size == 128, &c->size_conditions));
    int found;
    LG_TRY(has_size_tensors(f, tensor, &found));
    const cJSON *said = cJSON_GetObjectItemCaseSensitive(f->root, key);
    if (found >= 0 && cJSON_IsBool(said) && cJSON_IsTrue(said) != found)
        return lg_model_config_refuse(
            f, key,
            found ? "is false, but the weights beside it hold a resolution embedder"
                  : "is true, but the weights beside it hold no resolution embedder");
    if (found >= 0) c->size_conditions = found;
    return 0;
}

/* Those that must be false, where they are. */
static int refuse_true(const lg_model_config *f)
{
    static const char *const keys[] = {"norm_elementwise_affine", "only_cross_attention",
                                       "double_self_attention"};
    for (size_t i = 0; i < LG_ARRAY_LEN(keys); i++) {
        bool is;
        LG_TRY(lg_model_config_bool(f, keys[i], false, &is));
        if (is) return lg_model_config_refuse(f, keys[i], "must be false");
    }
    return 0;
}

/* What the classes with norms of a named type have in common. */
static int load_ada_norm(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const struct lg_model *m = lg_model_of(c->kind);
    bool bias;
    double dropout;
    LG_TRY(lg_model_config_double(f, "norm_eps", m->norm_eps, &c->norm_eps));
    LG_TRY(lg_model_config_double(f, "interpolation_scale", 0, &c->interpolation));
    LG_TRY(load_size_conditions(f, c));
    LG_TRY(lg_model_config_bool(f, "attention_bias", true, &bias));
    c->no_attention_bias = !bias;
    LG_TRY(refuse_true(f));
    LG_TRY(lg_model_config_double(f, "dropout", 0, &dropout));
    if (dropout != 0) return lg_model_config_refuse(f, "dropout", "must be 0");
    LG_TRY(lg_model_config_expect(f, "activation_fn", "gelu-approximate", LG_DENOISERS_READ));
    return lg_model_config_expect(f, "norm_type", m->norm_type, LG_DENOISERS_READ);
}

static int load_common(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const struct lg_model *m = lg_model_of(c->kind);
    LG_TRY(lg_model_config_int(f, "sample_size", 1, LG_MODEL_KEY_MAX, m->sample_size,
                               &c->sample_size));
    LG_TRY(lg_model_config_int(f, KEY_HEIGHT, 1, LG_MODEL_KEY_MAX, c->sample_size, &c->height));
    LG_TRY(lg_model_config_int(f, KEY_WIDTH, 1, LG_MODEL_KEY_MAX, c->height, &c->width));
    c->norm_eps = m->norm_eps;
    c->mlp_ratio = 4;
    LG_TRY(load_channels(f, c));
    return m->norm_type ? load_ada_norm(f, c) : 0;
}

static int load_transformer(const lg_model_config *f, struct lg_denoiser_config *c)
{
    const struct lg_model *m = lg_model_of(c->kind);
    int head_dim;
    LG_TRY(lg_model_config_int(f, "num_attention_heads", 1, LG_MODEL_KEY_MAX, m->heads, &c->heads));
    LG_TRY(
        lg_model_config_int(f, "attention_head_dim", 1, LG_MODEL_KEY_MAX, m->head_dim, &head_dim));
    LG_TRY(lg_model_config_int(f, "num_layers", 1, LG_MODEL_KEY_MAX, m->depth, &c->depth));
    LG_TRY(lg_model_config_int(f, "patch_size", 1, LG_MODEL_KEY_MAX, 2, &c->patch));
    if ((int64_t)c->heads * head_dim > LG_MODEL_KEY_MAX)
        return lg_model_config_refuse(f, "attention_head_dim",
                                      "heads times head dimension is out of bounds");
    c->hidden = c->heads * head_dim;
    return 0;
}

/* The old class was both, and norm_type says which. */
static lg_denoiser_kind find_kind(const char *class, const char *norm_type)
{
    int kind = 0;
    if (strcmp(class, OLD_CLASS)) return lg_model_find(class);
    for (; kind < LG_DENOISER_KINDS; kind++) {
        const char *type = lg_model_of(kind)->norm_type;
        if (type && !strcmp(type, norm_type)) break;
    }
    return (lg_denoiser_kind)kind;
}

static int load_config(const lg_model_config *f, void *ret)
{
    struct lg_denoiser_config *c = ret;
    const char *class, *norm_type;
    LG_TRY(lg_model_config_string(f, "_class_name", NULL, &class));
    LG_TRY(lg_model_config_string(f, "norm_type", "", &norm_type));
    c->kind = find_kind(class, norm_type);
    if (c->kind == LG_DENOISER_KINDS)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"_class_name\" is \"%.64s\"%s%.64s%s; this program reads %s", f->path,
                       class, *norm_type ? ", \"norm_type\" \"" : "", norm_type,
                       *norm_type ? "\"" : "", LG_DENOISERS_READ);
    if (lg_model_of(c->kind)->is_unet) c->kind = lg_unet_is_sdxl(f) ? LG_SDXL : LG_SD2;
    if (!lg_model_of(c->kind)->is_unet) LG_TRY(load_transformer(f, c));
    LG_TRY(load_common(f, c));
    LG_TRY(lg_model_of(c->kind)->load(f, c));
    return lg_denoiser_config_check(c);
}

int lg_denoiser_config_load(const char *path, struct lg_denoiser_config *ret)
{
    struct lg_denoiser_config c = {0};
    LG_TRY(lg_model_config_read(path, load_config, &c));
    *ret = c;
    return 0;
}

static cJSON *config_json(const struct lg_denoiser_config *c)
{
    cJSON *o = cJSON_CreateObject();
    LG_ASSERT(o);
    const struct lg_model *m = lg_model_of(c->kind);
    const int side = c->sample_size ? c->sample_size : c->height;
    const bool ada_norm = m->norm_type; /* load_ada_norm */
    const bool transformer = !m->is_unet;
    cJSON_AddStringToObject(o, "_class_name", m->class);
    if (ada_norm) {
        cJSON_AddStringToObject(o, "activation_fn", "gelu-approximate");
        cJSON_AddBoolToObject(o, "attention_bias", !c->no_attention_bias);
    }
    if (transformer) cJSON_AddNumberToObject(o, "attention_head_dim", c->hidden / c->heads);
    if (ada_norm) cJSON_AddNumberToObject(o, "dropout", 0);
    cJSON_AddNumberToObject(o, "in_channels", c->channels);
    if (ada_norm) {
        cJSON_AddBoolToObject(o, "norm_elementwise_affine", false);
        cJSON_AddNumberToObject(o, "norm_eps", c->norm_eps);
        cJSON_AddStringToObject(o, "norm_type", m->norm_type);
    }
    if (transformer) cJSON_AddNumberToObject(o, "num_attention_heads", c->heads);
    if (ada_norm)
        cJSON_AddNumberToObject(o, "num_embeds_ada_norm", c->num_classes ? c->num_classes : 1000);
    if (transformer) cJSON_AddNumberToObject(o, "num_layers", c->depth);
    cJSON_AddNumberToObject(o, "out_channels", lg_denoiser_out_channels(c));
    if (transformer) cJSON_AddNumberToObject(o, "patch_size", c->patch);
    cJSON_AddNumberToObject(o, "sample_size", side);
    if (ada_norm) cJSON_AddBoolToObject(o, "upcast_attention", false);
    if (m->save) m->save(c, o);
    if (c->height != side) cJSON_AddNumberToObject(o, KEY_HEIGHT, c->height);
    if (c->width != c->height) cJSON_AddNumberToObject(o, KEY_WIDTH, c->width);
    return o;
}

/* A key that o lacks is taken over. */
static int take_keys(const lg_model_config *source, void *ret)
{
    static const char *const own[] = {KEY_HEIGHT,          KEY_WIDTH,           KEY_TEXT_LENGTH,
                                      LG_KEY_TEXT_LENGTHS, LG_KEY_TEXT_WIDTHS,  LG_KEY_TEXT_POOLED,
                                      LG_KEY_FRAMES,       LG_KEY_CELL_SECONDS, LG_KEY_CELL_PIXELS};
    cJSON *o = ret;
    for (const cJSON *j = source->root->child; j; j = j->next) {
        bool skip = cJSON_GetObjectItemCaseSensitive(o, j->string) &&
                    strcmp(j->string, "upcast_attention"); /* for fp16, to others */
        for (size_t i = 0; i < LG_ARRAY_LEN(own); i++) skip |= !strcmp(j->string, own[i]);
        if (skip) continue;
        cJSON *copy = cJSON_Duplicate(j, true);
        LG_ASSERT(copy);
        cJSON_DeleteItemFromObjectCaseSensitive(o, j->string); /* one that means nothing here */
        cJSON_AddItemToObject(o, j->string, copy);
    }
    return 0;
}

int lg_denoiser_config_save(const struct lg_denoiser_config *c, const char *source,
                            const char *path)
{
    LG_TRY(lg_denoiser_config_check(c));
    cJSON *o = config_json(c);
    int rc = source ? lg_model_config_read(source, take_keys, o) : 0;
    char *text = rc == 0 ? cJSON_Print(o) : NULL;
    cJSON_Delete(o);
    LG_TRY(rc);
    LG_ASSERT(text);
    rc = lg_publish_file(path, text, strlen(text));
    free(text);
    return rc;
}

/* ---- weights ---- */

static int check_copy(const lg_weights *w, const char *name, const char *other)
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

static int check_copies(const struct lg_denoiser_config *c, const lg_params *t, const char *path)
{
    const struct lg_model *m = lg_model_of(c->kind);
    lg_weights *w;
    LG_TRY(lg_weights_open(path, &w));
    int rc = 0;
    char other[LG_PARAM_NAME_BYTES];
    for (int i = 0; i < t->n && rc == 0; i++) {
        for (int b = 1; b < c->depth && rc == 0; b++)
            if (m->other_name(t->p[i].name, b, other)) rc = check_copy(w, t->p[i].name, other);
    }
    lg_weights_close(&w);
    return rc;
}

/* The other names of all parameters and of what is not read, as lg_params_load wants them; free the text, then the list. */
static const char **other_names(const struct lg_denoiser_config *c, const lg_params *t,
                                char (**ret_text)[LG_PARAM_NAME_BYTES])
{
    const struct lg_model *m = lg_model_of(c->kind);
    size_t room = (size_t)t->n * (size_t)c->depth + 2, n = 0;
    char(*text)[LG_PARAM_NAME_BYTES] = calloc(room, sizeof *text);
    const char **list = calloc(room, sizeof *list);
    LG_ASSERT(text && list);
    for (int i = 0; i < t->n; i++)
        for (int b = 1; b < c->depth; b++)
            if (m->other_name && m->other_name(t->p[i].name, b, text[n])) list[n] = text[n], n++;
    list[n] = FIXED;
    *ret_text = text;
    return list;
}

int lg_denoiser_load_range(const struct lg_denoiser_config *c, const lg_params *t, const char *dir,
                           float *ret, size_t first, size_t count)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", dir, WEIGHTS));
    char(*text)[LG_PARAM_NAME_BYTES];
    const char **list = other_names(c, t, &text);
    int rc = lg_params_load(t, path, list, ret, first, count);
    free(text);
    free(list);
    LG_TRY(rc);
    return count && lg_model_of(c->kind)->other_name ? check_copies(c, t, path) : 0;
}

int lg_denoiser_load(const struct lg_denoiser_config *c, const char *dir, float *ret_weights)
{
    lg_params t;
    LG_TRY(lg_denoiser_params(c, &t));
    int rc = lg_denoiser_load_range(c, &t, dir, ret_weights, 0, t.count);
    lg_params_free(&t);
    return rc;
}

int lg_denoiser_write_values(lg_st_writer *w, const struct lg_param *p, const float *values)
{
    if (p->layout == LG_LAYOUT_FILE) return lg_st_writer_data(w, values, p->count * sizeof *values);
    const int64_t in = p->dim[1], each = (int64_t)p->count / p->dim[0], pixels = each / in;
    float *filter = malloc((size_t)each * sizeof *filter); /* of one output */
    if (!filter) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a filter of %s", p->name);
    int rc = 0;
    for (int64_t o = 0; o < p->dim[0] && rc == 0; o++) {
        for (int64_t i = 0; i < each; i++)
            filter[i] = values[o * each + i % pixels * in + i / pixels];
        rc = lg_st_writer_data(w, filter, (size_t)each * sizeof *filter);
    }
    free(filter);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* Calls declare or data for every tensor of the file: the table's, each under all of its names. */
static int write_pass(lg_st_writer *w, const struct lg_denoiser_config *c,
                      const struct lg_denoiser_weights *weights, bool declare)
{
    const struct lg_model *m = lg_model_of(c->kind);
    const lg_params *t = weights->t;
    const float *frozen = weights->frozen ? weights->frozen : weights->trained + t->trained_count;
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        const float *values =
            i < t->trained ? weights->trained + p->offset : frozen + (p->offset - t->trained_count);
        for (int b = 0; b < c->depth; b++) {
            char other[LG_PARAM_NAME_BYTES];
            if (b && (!m->other_name || !m->other_name(p->name, b, other))) break;
            const char *as = b ? other : p->name;
            if (declare)
                LG_TRY(lg_st_writer_declare(w, as, LG_F32, p->rank, p->dim));
            else
                LG_TRY(lg_denoiser_write_values(w, p, values));
        }
    }
    return 0;
}

static int save_weights(const struct lg_denoiser_config *c, const char *path,
                        const struct lg_denoiser_weights *weights)
{
    lg_st_writer *w;
    LG_TRY(lg_st_writer_open(path, &w));
    int rc;
    LG_TRY_GOTO(rc, lg_st_writer_metadata(w, "format", "pt"), fail);
    LG_TRY_GOTO(rc, write_pass(w, c, weights, true), fail);
    LG_TRY_GOTO(rc, write_pass(w, c, weights, false), fail);
    return lg_st_writer_finish(&w, NULL);
fail:
    lg_st_writer_abort(&w);
    return rc;
}

int lg_denoiser_save(const struct lg_denoiser_config *c, const char *dir,
                     const struct lg_denoiser_weights *w)
{
    char config[LG_PATH_BYTES], path[LG_PATH_BYTES];
    LG_TRY(lg_path(config, "%s/config.json", dir));
    LG_TRY(lg_path(path, "%s/%s", dir, WEIGHTS));
    LG_TRY(save_weights(c, path, w));
    return lg_denoiser_config_save(c, w->source, config);
}
