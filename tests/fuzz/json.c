/* Fuzz target: a JSON document. What the reader takes, cJSON takes, and both understand the same; texts
 * fit where they are said to fit; the loose way takes no less. */
#include "base/json.h"
#include "base/json_tree.h"
#include "tests/fuzz/fuzz.h"
#include <stdlib.h>
#include <string.h>

static void check_text(const lg_json *j)
{
    char *text = malloc(j->bytes + 1);
    LG_ASSERT(text && lg_json_text(j, text) <= j->bytes);
    free(text);
}

/* Token by token along the tree. */
static void compare(lg_json *j, const cJSON *v)
{
    LG_ASSERT(lg_json_next(j) == 0);
    bool object = j->kind == LG_JSON_OBJECT;
    char *text;
    switch (j->kind) {
    case LG_JSON_OBJECT:
    case LG_JSON_ARRAY:
        LG_ASSERT(object ? cJSON_IsObject(v) : cJSON_IsArray(v));
        for (const cJSON *c = v->child; c; c = c->next) {
            if (object) LG_ASSERT(lg_json_next(j) == 0 && j->kind == LG_JSON_KEY);
            if (object && j->bytes < 200) LG_ASSERT(lg_json_is(j, c->string));
            compare(j, c);
        }
        LG_ASSERT(lg_json_next(j) == 0);
        LG_ASSERT(j->kind == (object ? LG_JSON_OBJECT_END : LG_JSON_ARRAY_END));
        return;
    case LG_JSON_STRING:
        LG_ASSERT((text = malloc(j->bytes + 1)));
        lg_json_text(j, text);
        LG_ASSERT(cJSON_IsString(v) && !strcmp(text, v->valuestring));
        free(text);
        return;
    case LG_JSON_NUMBER:
        LG_ASSERT(cJSON_IsNumber(v) && strtod(j->text, NULL) == v->valuedouble);
        return;
    default:
        LG_ASSERT(j->kind == LG_JSON_TRUE    ? cJSON_IsTrue(v)
                  : j->kind == LG_JSON_FALSE ? cJSON_IsFalse(v)
                                             : cJSON_IsNull(v));
    }
}

static int read_all(const struct lg_json_source *source)
{
    lg_json j;
    lg_json_open(&j, source);
    while (j.kind != LG_JSON_END) {
        if (lg_json_next(&j) < 0) return -1;
        LG_ASSERT(j.depth >= 0 && j.depth <= LG_JSON_DEPTH_MAX);
        if (j.kind == LG_JSON_KEY || j.kind == LG_JSON_STRING) check_text(&j);
    }
    LG_ASSERT(j.depth == 0);
    return 0;
}

LG_FUZZ_TARGET(json)
{
    struct lg_fuzz_input in = {data, bytes};
    size_t n;
    char *text = lg_fuzz_take(&in, bytes, &n); /* with a NUL behind it, for strtod */
    struct lg_json_source source = {.label = "fuzz", .data = text, .bytes = n};
    int strict = read_all(&source);
    source.loose_text = true;
    if (strict == 0) LG_ASSERT(read_all(&source) == 0);
    if (strict < 0) read_all(&source);
    lg_err_clear();
    source.loose_text = false;
    source.infinities = true; /* the tree's */
    if (strict == 0) LG_ASSERT(read_all(&source) == 0);
    if (strict < 0) strict = read_all(&source);
    lg_err_clear();
    cJSON *tree = NULL;
    int rc = lg_json_tree("fuzz", text, n, SIZE_MAX, &tree);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CORRUPT);
    LG_ASSERT(rc < 0 || strict == 0);
    if (rc == 0) {
        lg_json j;
        lg_json_open(&j, &source);
        compare(&j, tree);
    }
    cJSON_Delete(tree);
    free(text);
}
