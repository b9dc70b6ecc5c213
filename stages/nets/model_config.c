/* config.json of a model; see model_config.h.
 *
 * Unknown keys are ignored: these files are written by other programs and carry dozens of keys that
 * do not touch the forward pass. What does touch it and has another value than we compute is
 * refused by the caller with lg_model_config_expect. */
#include "stages/nets/model_config.h"
#include "base/fs.h"
#include "base/json_tree.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CONFIG_BYTES_MAX = 1 << 20, CONFIG_TOKENS_MAX = 1 << 17 };

int lg_model_config_open(const char *path, lg_model_config *ret)
{
    char *text = NULL;
    size_t bytes;
    LG_TRY(lg_read_file(path, CONFIG_BYTES_MAX, &text, &bytes));
    ret->path = strdup(path);
    int rc = lg_json_tree(path, text, bytes, CONFIG_TOKENS_MAX, &ret->root);
    free(text);
    if (rc == LG_ERR_CORRUPT)
        return LG_FAIL(LG_ERR_CONFIG, "%s is not a JSON object: %s", path, lg_err_message());
    LG_TRY(rc);
    if (!ret->path) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", path);
    if (!cJSON_IsObject(ret->root)) return LG_FAIL(LG_ERR_CONFIG, "%s is not a JSON object", path);
    return 0;
}

void lg_model_config_close(lg_model_config *c)
{
    cJSON_Delete(c->root);
    free(c->path);
    *c = (lg_model_config){0};
}

int lg_model_config_read(const char *path, int (*parse)(const lg_model_config *c, void *ret),
                         void *ret)
{
    lg_model_config c = {0};
    int rc = lg_model_config_open(path, &c);
    if (rc == 0) rc = parse(&c, ret);
    lg_model_config_close(&c);
    LG_TRY(rc);
    return 0;
}

/* NULL when absent or null. */
static const cJSON *find(const lg_model_config *c, const char *key)
{
    const cJSON *j = cJSON_GetObjectItemCaseSensitive(c->root, key);
    return cJSON_IsNull(j) ? NULL : j;
}

static int missing(const lg_model_config *c, const char *key)
{
    return LG_FAIL(LG_ERR_CONFIG,
                   "%s: \"%s\" is missing: is it the config of another kind of model?", c->path,
                   key);
}

static int check_int(const lg_model_config *c, const char *key, const cJSON *j, int min, int max,
                     int *ret)
{
    if (!cJSON_IsNumber(j) || j->valuedouble != floor(j->valuedouble))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a whole number", c->path, key);
    if (!(j->valuedouble >= min && j->valuedouble <= max))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is %g, must be %d to %d", c->path, key,
                       j->valuedouble, min, max);
    *ret = (int)j->valuedouble;
    return 0;
}

int lg_model_config_int(const lg_model_config *c, const char *key, int min, int max, int fallback,
                        int *ret)
{
    const cJSON *j = find(c, key);
    if (j) return check_int(c, key, j, min, max, ret);
    if (fallback < 0) return missing(c, key);
    *ret = fallback;
    return 0;
}

int lg_model_config_double(const lg_model_config *c, const char *key, double fallback, double *ret)
{
    const cJSON *j = find(c, key);
    if (j && !(cJSON_IsNumber(j) && isfinite(j->valuedouble)))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a number", c->path, key);
    *ret = j ? j->valuedouble : fallback;
    return 0;
}

int lg_model_config_bool(const lg_model_config *c, const char *key, bool fallback, bool *ret)
{
    const cJSON *j = find(c, key);
    if (j && !cJSON_IsBool(j))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is neither true nor false", c->path, key);
    *ret = j ? cJSON_IsTrue(j) : fallback;
    return 0;
}

int lg_model_config_string(const lg_model_config *c, const char *key, const char *fallback,
                           const char **ret)
{
    const cJSON *j = find(c, key);
    if (!j && !fallback) return missing(c, key);
    if (j && !cJSON_IsString(j))
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a string", c->path, key);
    *ret = j ? j->valuestring : fallback;
    return 0;
}

int lg_model_config_expect(const lg_model_config *c, const char *key, const char *value,
                           const char *kind)
{
    const char *s;
    LG_TRY(lg_model_config_string(c, key, value, &s));
    if (strcmp(s, value))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"%s\" is \"%.64s\"; %s, which has \"%s\", is needed here", c->path,
                       key, s, kind, value);
    return 0;
}

int lg_model_config_ints(const lg_model_config *c, const char *key, int min, int max, int room,
                         int *ret, int *ret_count)
{
    const cJSON *j = find(c, key);
    if (!j) return missing(c, key);
    int n = cJSON_IsArray(j) ? cJSON_GetArraySize(j) : 0;
    if (n < 1 || n > room)
        return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\" is not a list of 1 to %d numbers", c->path, key,
                       room);
    for (int i = 0; i < n; i++)
        LG_TRY(check_int(c, key, cJSON_GetArrayItem(j, i), min, max, &ret[i]));
    *ret_count = n;
    return 0;
}

int lg_model_config_refuse(const lg_model_config *c, const char *key, const char *why)
{
    return LG_FAIL(LG_ERR_CONFIG, "%s: \"%s\": %s", c->path, key, why);
}
