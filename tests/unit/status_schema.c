/* `lgsup status --json` and its schema; see status_schema.h. */
#include "tests/unit/status_schema.h"
#include "base/fs.h"
#include "config/plan.h"
#include "tests/unit/json_schema.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static cJSON *load_schema(void)
{
    char *text;
    size_t bytes;
    assert_int_equal(lg_read_file("docs/status.schema.json", 1 << 20, &text, &bytes), 0);
    cJSON *j = cJSON_ParseWithLength(text, bytes);
    free(text);
    assert_non_null(j);
    return j;
}

bool status_follows_schema(const cJSON *status)
{
    char why[512] = "";
    cJSON *schema = load_schema();
    const bool holds = json_schema_holds(schema, status, why, sizeof why);
    if (!holds) fprintf(stderr, "%s\n", why);
    cJSON_Delete(schema);
    return holds;
}

/* ---- does it notice ---- */

struct strict {
    const cJSON *schema;
    cJSON *status;
};

static void expect_wrong(const struct strict *s, const char *field, const char *how)
{
    char why[512];
    if (json_schema_holds(s->schema, s->status, why, sizeof why))
        fail_msg("\"%s\" is %s, and the schema allows it", field, how);
}

/* Only the whole run's status has "hosts", and only of several; what is wanted goes by role. */
static bool may_be_missing(const cJSON *field)
{
    return !strcmp(field->string, "hosts");
}

static void go_into(const struct strict *s, cJSON *v);

static void check_object(const struct strict *s, cJSON *v)
{
    const int n = cJSON_GetArraySize(v);
    for (int i = 0; i < n; i++) { /* each goes from the front to the end */
        cJSON *field = cJSON_DetachItemFromArray(v, 0);
        char *name = field->string, renamed[] = "renamed";
        if (!may_be_missing(field)) expect_wrong(s, name, "missing");
        assert_true(cJSON_AddItemToArray(v, field));
        field->string = renamed;
        expect_wrong(s, name, "renamed");
        field->string = name;
        if (strcmp(name, "wanted") != 0) go_into(s, field);
    }
    cJSON_AddNumberToObject(v, "more", 1);
    expect_wrong(s, "more", "there");
    cJSON_DeleteItemFromObject(v, "more");
}

static void go_into(const struct strict *s, cJSON *v)
{
    cJSON *one;
    if (cJSON_IsObject(v)) check_object(s, v);
    if (cJSON_IsArray(v)) cJSON_ArrayForEach(one, v) go_into(s, one);
}

/* Every field that an object's schema describes is required there, and no other is allowed. */
static void expect_all_required(const cJSON *schema)
{
    const cJSON *one, *described = cJSON_GetObjectItemCaseSensitive(schema, "properties");
    const cJSON *required = cJSON_GetObjectItemCaseSensitive(schema, "required");
    if (cJSON_IsArray(required)) {
        assert_true(
            cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(schema, "additionalProperties")));
        assert_int_equal(cJSON_GetArraySize(required) + cJSON_HasObjectItem(described, "hosts"),
                         cJSON_GetArraySize(described));
    }
    cJSON_ArrayForEach(one, schema) expect_all_required(one);
}

void status_schema_is_strict(cJSON *status)
{
    cJSON *schema = load_schema();
    expect_all_required(schema);
    const struct strict s = {schema, status};
    char why[512];
    go_into(&s, status);
    if (!json_schema_holds(schema, status, why, sizeof why)) /* it is as it was */
        fail_msg("%s", why);
    cJSON_Delete(schema);
}

void status_schema_has_roles(void)
{
    cJSON *schema = load_schema();
    const cJSON *in = schema;
    static const char *const way[] = {"properties", "instances", "items",
                                      "properties", "role",      "enum"};
    for (size_t i = 0; i < LG_ARRAY_LEN(way); i++)
        in = cJSON_GetObjectItemCaseSensitive(in, way[i]);
    assert_int_equal(cJSON_GetArraySize(in), LG_ROLE_COUNT);
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        assert_string_equal(cJSON_GetArrayItem(in, r)->valuestring, lg_role_name((lg_role)r));
    cJSON_Delete(schema);
}
