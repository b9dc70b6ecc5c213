/* A run's adapter that begins with a file's; see adapter_file.h. */
#include "stages/io/safetensors.h"
#include "stages/nets/adapter_file.h"
#include "stages/nets/adapter_private.h"
#include "stages/nets/kohya.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define METADATA "lora_adapter_metadata"
#define ALPHA    ".alpha"

/* ---- diffusers' layout ---- */

/* alpha / rank as the header says; 1 where it says nothing, as diffusers takes it. */
static int header_scale(const lg_st_file *f, const char *path, const char *prefix, double *ret)
{
    static const char *const unread[] = {"alpha_pattern", "rank_pattern", "use_rslora", "use_dora"};
    const char *text = lg_st_metadata(f, METADATA);
    *ret = 1;
    if (!text) return 0;
    cJSON *o = cJSON_Parse(text);
    int rc = cJSON_IsObject(o) ? 0 : LG_FAIL(LG_ERR_MISMATCH, "%s: " METADATA " is no JSON", path);
    for (size_t i = 0; rc == 0 && i < LG_ARRAY_LEN(unread); i++) {
        char key[64];
        snprintf(key, sizeof key, "%s%s", prefix, unread[i]);
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, key);
        if (cJSON_IsTrue(v) || cJSON_GetArraySize(v))
            rc = LG_FAIL(LG_ERR_MISMATCH, "%s: " METADATA " has %s, which cannot be read", path,
                         key);
    }
    char alpha_key[64], rank_key[64];
    snprintf(alpha_key, sizeof alpha_key, "%slora_alpha", prefix);
    snprintf(rank_key, sizeof rank_key, "%sr", prefix);
    const cJSON *alpha = cJSON_GetObjectItemCaseSensitive(o, alpha_key);
    const cJSON *rank = cJSON_GetObjectItemCaseSensitive(o, rank_key);
    if (rc == 0 && cJSON_IsNumber(alpha) && cJSON_IsNumber(rank) && rank->valuedouble >= 1)
        *ret = alpha->valuedouble / rank->valuedouble;
    cJSON_Delete(o);
    return rc;
}

/* Of one linear, MODULE with the prefix; a number of its own in the file comes before what its header says. */
static int scale_of(const lg_st_file *f, const char *path, const char *module, int rank,
                    double *ret)
{
    char name[LG_PARAM_NAME_BYTES + 32];
    float alpha;
    snprintf(name, sizeof name, "%s" ALPHA, module);
    const struct lg_st_entry *e = lg_st_find(f, name);
    if (!e) return 0;
    if (e->bytes != lg_dtype_bytes(e->dtype))
        return LG_FAIL(LG_ERR_MISMATCH, "%s: %s is not one number", path, name);
    LG_TRY(lg_st_read_f32(e, &alpha, 0, 1));
    *ret = (double)alpha / rank;
    return 0;
}

/* Every tensor is one of the adapter's, or an alpha of one of its linears. */
static int check_names(const lg_st_file *f, const char *path, const lg_params *t)
{
    const char *const front = lg_adapter_prefix(t);
    for (int i = 0; i < lg_st_count(f); i++) {
        const char *name = lg_st_at(f, i)->name;
        char param[2 * LG_PARAM_NAME_BYTES], modern[2 * LG_PARAM_NAME_BYTES];
        if (!strstr(name, ".lora_") && lg_adapter_older_name(name, modern, sizeof modern) &&
            !lg_st_find(f, modern))
            name = modern;
        const size_t n = strlen(name), prefix = strlen(front), tail = sizeof ALPHA - 1;
        const bool is_own = !strncmp(name, front, prefix) && n < sizeof param;
        snprintf(param, sizeof param, "%s", is_own ? name + prefix : "");
        if (is_own && n > prefix + tail && !strcmp(name + n - tail, ALPHA))
            snprintf(param + (n - prefix - tail), sizeof param - (n - prefix - tail), "%s",
                     LG_ADAPTER_DOWN);
        if (lg_params_find(t, param) < 0)
            return LG_FAIL(
                LG_ERR_MISMATCH,
                "%s: tensor %.200s is none of this adapter's; does adapter.targets leave "
                "its linear out, or is it of another model?",
                path, name);
    }
    return 0;
}

static int load_diffusers(const struct lg_adapter *a, const lg_params *t, const lg_st_file *f,
                          const char *path, float *ret)
{
    const double own = lg_adapter_scale(a);
    const char *const prefix = lg_adapter_prefix(t);
    char module[LG_PARAM_NAME_BYTES], name[LG_PARAM_NAME_BYTES + 16];
    char full[LG_ADAPTER_PREFIX_BYTES + LG_PARAM_NAME_BYTES];
    double all;
    LG_TRY(check_names(f, path, t));
    LG_TRY(header_scale(f, path, prefix, &all));
    memset(ret, 0, t->count * sizeof *ret);
    for (int i = 0; i < t->n; i++)
        LG_TRY(lg_adapter_read_param(f, path, t, i, ret + t->p[i].offset));
    for (int i = 0; i < t->n; i++) {
        double scale = all;
        if (!lg_adapter_module(t->p[i].name, module)) continue;
        snprintf(full, sizeof full, "%s%s", prefix, module);
        LG_TRY(scale_of(f, path, full, a->rank, &scale));
        if (scale == own) continue;
        if (!isfinite(scale / own))
            return LG_FAIL(LG_ERR_MISMATCH, "%s: alpha / rank of %s is %g, the adapter's is %g",
                           path, module, scale, own);
        snprintf(name, sizeof name, "%s" LG_ADAPTER_UP, module);
        const struct lg_param *b = &t->p[lg_params_find(t, name)];
        for (size_t e = 0; e < b->count; e++)
            ret[b->offset + e] = (float)(scale / own * (double)ret[b->offset + e]);
    }
    return 0;
}

/* ---- either ---- */

static int load(const struct lg_adapter_start *s, const lg_params *t, const lg_params *whole,
                float *ret)
{
    const struct lg_kohya k = {.kind = lg_denoiser_info(s->net->kind)->name,
                               .adapter = s->adapter,
                               .t = t,
                               .whole = whole};
    lg_st_file *f;
    LG_TRY(lg_st_open(s->path, &f));
    int rc = lg_kohya_is(f) ? lg_kohya_load(&k, f, s->path, ret)
                            : load_diffusers(s->adapter, t, f, s->path, ret);
    lg_st_close(&f);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_adapter_begin(const struct lg_adapter_start *s, const lg_params *to, float *ret)
{
    const struct lg_training training = {.adapter = *s->adapter};
    lg_params all = {0}, whole = {0};
    float *low = NULL;
    int rc;
    LG_TRY(lg_denoiser_table(s->net, &training, &all));
    const lg_params t = lg_params_trained(&all);
    LG_TRY_GOTO(rc, lg_denoiser_params(s->net, &whole), out);
    low = malloc(t.count * sizeof *low);
    LG_ASSERT(low);
    LG_TRY_GOTO(rc, load(s, &t, &whole, low), out);
    memset(ret, 0, to->count * sizeof *ret);
    for (int i = 0; i < to->n; i++) {
        const struct lg_param *from = &t.p[lg_params_find(&t, to->p[i].name)];
        memcpy(ret + to->p[i].offset, low + from->offset, from->count * sizeof *ret);
    }
out:
    free(low);
    lg_params_free(&whole);
    lg_params_free(&all);
    return rc;
}
