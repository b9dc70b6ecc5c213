/* See adapter_file.h. */
#include "stages/nets/adapter_file.h"
#include "config/manifest.h"
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_private.h"
#include "stages/nets/model_config.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANK_MAX = 1 << 16 };

const char *lg_adapter_prefix(const lg_params *t)
{
    static const char *const unet[] = {"down_blocks.", "mid_block.", "up_blocks.",
                                       "time_embedding.", "add_embedding."};
    for (size_t i = 0; i < LG_ARRAY_LEN(unet); i++)
        if (t->n && !strncmp(t->p[0].name, unet[i], strlen(unet[i]))) return "unet.";
    return "transformer.";
}

/* ---- the files' texts ---- */

bool lg_adapter_module(const char *name, char ret[LG_PARAM_NAME_BYTES])
{
    const size_t n = strlen(name), tail = sizeof LG_ADAPTER_DOWN - 1;
    if (n <= tail || strcmp(name + n - tail, LG_ADAPTER_DOWN)) return false;
    snprintf(ret, LG_PARAM_NAME_BYTES, "%.*s", (int)(n - tail), name);
    return true;
}

static cJSON *modules(const lg_params *t)
{
    cJSON *list = cJSON_CreateArray();
    char module[LG_PARAM_NAME_BYTES];
    LG_ASSERT(list);
    for (int i = 0; i < t->n; i++)
        if (lg_adapter_module(t->p[i].name, module))
            cJSON_AddItemToArray(list, cJSON_CreateString(module));
    return list;
}

/* peft's LoraConfig, each key with this in front. */
static cJSON *lora_config(const struct lg_adapter *a, const lg_params *t, const char *prefix)
{
    cJSON *o = cJSON_CreateObject();
    char key[64];
    LG_ASSERT(o);
#define KEY(name) (snprintf(key, sizeof key, "%s" name, prefix), key)
    cJSON_AddNumberToObject(o, KEY("r"), a->rank);
    cJSON_AddNumberToObject(o, KEY("lora_alpha"), a->alpha);
    cJSON_AddItemToObject(o, KEY("target_modules"), modules(t));
#undef KEY
    return o;
}

static int save_config(const struct lg_adapter *a, const char *base, const lg_params *t,
                       const char *path)
{
    cJSON *o = lora_config(a, t, "");
    cJSON_AddStringToObject(o, "peft_type", "LORA");
    cJSON_AddStringToObject(o, "base_model_name_or_path", base);
    cJSON_AddStringToObject(o, "bias", "none");
    cJSON_AddNumberToObject(o, "lora_dropout", 0);
    char *text = cJSON_Print(o);
    cJSON_Delete(o);
    LG_ASSERT(text);
    int rc = lg_publish_file(path, text, strlen(text));
    free(text);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int write_weights(lg_st_writer *w, const struct lg_adapter *a, const lg_params *t,
                         const float *weights)
{
    cJSON *o = lora_config(a, t, lg_adapter_prefix(t));
    char *text = cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    LG_ASSERT(text);
    int rc = lg_st_writer_metadata(w, "format", "pt");
    if (rc == 0) rc = lg_st_writer_metadata(w, "lora_adapter_metadata", text);
    free(text);
    LG_TRY(rc);
    for (int i = 0; i < t->n; i++) {
        char name[LG_ADAPTER_PREFIX_BYTES + LG_PARAM_NAME_BYTES];
        snprintf(name, sizeof name, "%s%s", lg_adapter_prefix(t), t->p[i].name);
        LG_TRY(lg_st_writer_declare(w, name, LG_F32, t->p[i].rank, t->p[i].dim));
    }
    for (int i = 0; i < t->n; i++)
        LG_TRY(lg_st_writer_data(w, weights + t->p[i].offset, t->p[i].count * sizeof *weights));
    return 0;
}

int lg_adapter_save(const struct lg_adapter *a, const char *base, const lg_params *t,
                    const char *dir, const float *weights)
{
    char path[LG_PATH_BYTES];
    lg_st_writer *w;
    LG_TRY(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, dir));
    LG_TRY(lg_st_writer_open(path, &w));
    int rc = write_weights(w, a, t, weights);
    if (rc < 0) {
        lg_st_writer_abort(&w);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    LG_TRY(lg_st_writer_finish(&w, NULL));
    LG_TRY(lg_path(path, "%s/" LG_ADAPTER_CONFIG, dir));
    return save_config(a, base, t, path);
}

/* ---- reading ---- */

bool lg_adapter_older_name(const char *name, char *ret, size_t bytes)
{
    static const char *const tail[][2] = {{LG_ADAPTER_DOWN, ".lora.down.weight"},
                                          {LG_ADAPTER_UP, ".lora.up.weight"}};
    const size_t length = strlen(name);
    for (int i = 0; i < 4; i++) {
        const char *has = tail[i / 2][i % 2], *other = tail[i / 2][!(i % 2)];
        const size_t n = strlen(has);
        if (length <= n || strcmp(name + length - n, has) != 0) continue;
        const int written = snprintf(ret, bytes, "%.*s%s", (int)(length - n), name, other);
        return written < (int)bytes;
    }
    return false;
}

int lg_adapter_read_param(const lg_st_file *f, const char *path, const lg_params *t, int i,
                          float *to)
{
    const struct lg_param *p = &t->p[i];
    char name[LG_ADAPTER_PREFIX_BYTES + LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s%s", lg_adapter_prefix(t), p->name);
    const struct lg_st_entry *e = lg_st_find(f, name);
    char older[sizeof name];
    if (!e && lg_adapter_older_name(name, older, sizeof older)) e = lg_st_find(f, older);
    if (!e) return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s is missing", path, name);
    if (e->rank != 2 || e->dim[0] != p->dim[0] || e->dim[1] != p->dim[1])
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "%s: tensor %s is not (%lld, %lld), as the adapter's rank and the model want "
            "it",
            path, name, (long long)p->dim[0], (long long)p->dim[1]);
    return lg_st_read_f32(e, to, 0, p->count);
}

int lg_adapter_load(const lg_params *t, const char *dir, float *ret)
{
    char path[LG_PATH_BYTES];
    lg_st_file *f;
    LG_TRY(lg_path(path, "%s/" LG_ADAPTER_WEIGHTS, dir));
    LG_TRY(lg_st_open(path, &f));
    int rc = lg_st_count(f) == t->n ? 0
                                    : LG_FAIL(LG_ERR_MISMATCH,
                                              "%s has %d tensors, the adapter has %d: it adapts "
                                              "other linears",
                                              path, lg_st_count(f), t->n);
    memset(ret, 0, t->count * sizeof *ret);
    for (int i = 0; i < t->n && rc == 0; i++)
        rc = lg_adapter_read_param(f, path, t, i, ret + t->p[i].offset);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

bool lg_adapter_is(const char *dir)
{
    char path[LG_PATH_BYTES];
    bool is = lg_path(path, "%s/" LG_ADAPTER_CONFIG, dir) == 0 && lg_path_exists(path);
    lg_err_clear();
    return is;
}

void lg_adapter_read_free(struct lg_adapter_read *r)
{
    for (char **t = r->target; t && *t; t++) free(*t);
    free(r->target);
}

static int read_targets(const lg_model_config *f, struct lg_adapter_read *r)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(f->root, "target_modules"), *item;
    int n = 0;
    if (!cJSON_IsArray(list) || !cJSON_GetArraySize(list))
        return lg_model_config_refuse(f, "target_modules", "must be a list of modules' names");
    r->target = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *r->target);
    LG_ASSERT(r->target);
    cJSON_ArrayForEach(item, list)
    {
        if (!cJSON_IsString(item))
            return lg_model_config_refuse(f, "target_modules", "must be a list of modules' names");
        LG_ASSERT(r->target[n++] = strdup(item->valuestring));
    }
    r->adapter.targets = (const char *const *)r->target;
    return 0;
}

static int parse(const lg_model_config *f, void *ret)
{
    struct lg_adapter_read *r = ret;
    const char *base;
    LG_TRY(lg_model_config_int(f, "r", 1, RANK_MAX, -1, &r->adapter.rank));
    LG_TRY(lg_model_config_double(f, "lora_alpha", r->adapter.rank, &r->adapter.alpha));
    LG_TRY(lg_model_config_string(f, "base_model_name_or_path", NULL, &base));
    if ((size_t)snprintf(r->base, sizeof r->base, "%s", base) >= sizeof r->base)
        return lg_model_config_refuse(f, "base_model_name_or_path", "is too long");
    return read_targets(f, r);
}

int lg_adapter_read(const char *dir, struct lg_adapter_read *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/" LG_ADAPTER_CONFIG, dir));
    LG_TRY(lg_model_config_read(path, parse, ret));
    return 0;
}

int lg_adapter_base(const char *dir, char ret_base[LG_PATH_BYTES])
{
    struct lg_adapter_read r = {0};
    int rc = lg_adapter_read(dir, &r);
    if (rc == 0) rc = lg_checkpoint_weights_dir(r.base, "ema", ret_base);
    lg_adapter_read_free(&r);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
