/* A small JSON Schema checker; see json_schema.h. */
#include "tests/unit/json_schema.h"
#include "base/check.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

struct place {
    char *why;
    size_t bytes;
    const cJSON *root; /* what "$ref": "#" means */
    char path[256];
};

static bool wrong(const struct place *p, const char *what)
{
    snprintf(p->why, p->bytes, "%.200s: %.200s", p->path[0] ? p->path : "(top)", what);
    return false;
}

static bool is_of_type(const cJSON *v, const char *type)
{
    if (!strcmp(type, "object")) return cJSON_IsObject(v);
    if (!strcmp(type, "array")) return cJSON_IsArray(v);
    if (!strcmp(type, "string")) return cJSON_IsString(v);
    if (!strcmp(type, "null")) return cJSON_IsNull(v);
    if (!strcmp(type, "boolean")) return cJSON_IsBool(v);
    if (!strcmp(type, "number")) return cJSON_IsNumber(v);
    return !strcmp(type, "integer") && cJSON_IsNumber(v) && v->valuedouble == floor(v->valuedouble);
}

static bool check_type(const struct place *p, const cJSON *type, const cJSON *v)
{
    if (cJSON_IsString(type))
        return is_of_type(v, type->valuestring) || wrong(p, "has another type");
    const cJSON *one;
    cJSON_ArrayForEach(one, type) if (is_of_type(v, one->valuestring)) return true;
    return wrong(p, "has none of the types");
}

static bool check(const struct place *p, const cJSON *schema, const cJSON *v);

static bool check_child(const struct place *p, const char *name, const cJSON *schema,
                        const cJSON *v)
{
    struct place q = *p;
    size_t at = strlen(q.path);
    snprintf(q.path + at, sizeof q.path - at, ".%s", name);
    return check(&q, schema, v);
}

static bool check_properties(const struct place *p, const cJSON *schema, const cJSON *v)
{
    const cJSON *properties = cJSON_GetObjectItemCaseSensitive(schema, "properties"), *child;
    const cJSON *more = cJSON_GetObjectItemCaseSensitive(schema, "additionalProperties");
    if (!cJSON_IsObject(v)) return true;
    cJSON_ArrayForEach(child, v)
    {
        const cJSON *of = cJSON_GetObjectItemCaseSensitive(properties, child->string);
        if (!of) of = more;
        if (of && !check_child(p, child->string, of, child)) return false;
    }
    return true;
}

static bool check_keyword(const struct place *p, const cJSON *key, const cJSON *schema,
                          const cJSON *v)
{
    const cJSON *one;
    const char *name = key->string;
    if (!strcmp(name, "$schema") || !strcmp(name, "title") || !strcmp(name, "description") ||
        (!strcmp(name, "additionalProperties") &&
         cJSON_HasObjectItem(schema, "properties"))) /* seen with them */
        return true;
    if (!strcmp(name, "type")) return check_type(p, key, v);
    if (!strcmp(name, "properties") || !strcmp(name, "additionalProperties"))
        return check_properties(p, schema, v);
    if (!strcmp(name, "$ref") && !strcmp(key->valuestring, "#")) return check(p, p->root, v);
    if (!strcmp(name, "anyOf")) { /* the last one says what is wrong */
        cJSON_ArrayForEach(one, key) if (check(p, one, v)) return true;
        return false;
    }
    if (!strcmp(name, "minimum"))
        return !cJSON_IsNumber(v) || v->valuedouble >= key->valuedouble || wrong(p, "is too small");
    if (!strcmp(name, "enum")) {
        cJSON_ArrayForEach(one, key) if (cJSON_Compare(one, v, true)) return true;
        return wrong(p, "is none of the values");
    }
    if (!strcmp(name, "required")) {
        cJSON_ArrayForEach(one, key) if (!cJSON_HasObjectItem(v, one->valuestring)) return wrong(
            p, one->valuestring);
        return true;
    }
    if (!strcmp(name, "items")) {
        cJSON_ArrayForEach(one, v) if (!check_child(p, "[]", key, one)) return false;
        return true;
    }
    return wrong(p, "the schema has a keyword that is not checked");
}

static bool check(const struct place *p, const cJSON *schema, const cJSON *v)
{
    const cJSON *key;
    if (cJSON_IsBool(schema)) return cJSON_IsTrue(schema) || wrong(p, "must not be there");
    cJSON_ArrayForEach(key, schema) if (!check_keyword(p, key, schema, v)) return false;
    return true;
}

bool json_schema_holds(const cJSON *schema, const cJSON *value, char *ret_why, size_t bytes)
{
    struct place p = {.why = ret_why, .bytes = bytes, .root = schema};
    return check(&p, schema, value);
}
