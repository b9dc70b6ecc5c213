/* The JSON reader: what is JSON is read as cJSON reads it, what is not is refused where it stops being
 * JSON; depth, tokens and memory stay within their bounds. */
#include "base/fs.h"
#include "base/json.h"
#include "base/json_tree.h"
#include "base/philox.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static void open_text(lg_json *j, const char *text, uint64_t tokens_max)
{
    lg_json_open(
        j, &(struct lg_json_source){
               .label = "doc", .data = text, .bytes = strlen(text), .tokens_max = tokens_max});
}

/* Reads to the end. The copy has the exact size: a sanitizer sees what is read behind it. */
static int read_all(const char *text, size_t bytes, bool loose)
{
    char *copy = malloc(bytes + !bytes);
    memcpy(copy, text, bytes);
    lg_json j;
    lg_json_open(&j, &(struct lg_json_source){
                         .label = "doc", .data = copy, .bytes = bytes, .loose_text = loose});
    int rc = 0;
    while (rc == 0 && j.kind != LG_JSON_END) rc = lg_json_next(&j);
    free(copy);
    return rc;
}

static void test_tokens(void **state)
{
    (void)state;
    static const struct {
        lg_json_kind kind;
        const char *text;
        int depth;
    } want[] = {
        {LG_JSON_OBJECT, "{", 1},       {LG_JSON_KEY, "a", 1},        {LG_JSON_ARRAY, "[", 2},
        {LG_JSON_NUMBER, "-1.5e+3", 2}, {LG_JSON_TRUE, "true", 2},    {LG_JSON_FALSE, "false", 2},
        {LG_JSON_NULL, "null", 2},      {LG_JSON_STRING, "x\\ny", 2}, {LG_JSON_ARRAY, "[", 3},
        {LG_JSON_ARRAY_END, "]", 2},    {LG_JSON_ARRAY_END, "]", 1},  {LG_JSON_KEY, "", 1},
        {LG_JSON_OBJECT, "{", 2},       {LG_JSON_OBJECT_END, "}", 1}, {LG_JSON_OBJECT_END, "}", 0},
    };
    lg_json j;
    open_text(&j,
              "\xef\xbb\xbf {\"a\" : [-1.5e+3,true,\tfalse,null , \"x\\ny\",[ ]],\r\n\"\":{ } } ",
              15);
    for (size_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        assert_int_equal(lg_json_next(&j), 0);
        assert_int_equal(j.kind, want[i].kind);
        assert_int_equal(j.depth, want[i].depth);
        assert_int_equal(j.bytes, strlen(want[i].text));
        assert_memory_equal(j.text, want[i].text, j.bytes);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(lg_json_next(&j), 0);
        assert_int_equal(j.kind, LG_JSON_END);
    }
}

static void test_texts(void **state)
{
    (void)state;
    char text[64];
    lg_json j;
    open_text(&j, "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83d\\uDE00\xc3\xa9\"", 0);
    assert_int_equal(lg_json_next(&j), 0);
    assert_true(j.bytes < sizeof text);
    assert_int_equal(lg_json_text(&j, text), 16);
    assert_string_equal(text, "\"\\/\b\f\n\r\t\xc3\xa9\xf0\x9f\x98\x80\xc3\xa9");
    assert_true(lg_json_is(&j, text));
    assert_false(lg_json_is(&j, ""));
    open_text(&j, "{\"\\u0061b\":1}", 0);
    assert_int_equal(lg_json_next(&j), 0);
    assert_false(lg_json_is(&j, "ab"));
    assert_int_equal(lg_json_next(&j), 0);
    assert_true(lg_json_is(&j, "ab"));
    assert_false(lg_json_is(&j, "a"));
    assert_int_equal(read_all("\"a\tb\xff\\u0000\"", 12, true), 0);
}

static void test_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool whole;
        uint64_t value;
    } cases[] = {{"0", true, 0},
                 {"18446744073709551615", true, UINT64_MAX},
                 {"18446744073709551616", false, 0},
                 {"99999999999999999999999", false, 0},
                 {"-1", false, 0},
                 {"1.0", false, 0},
                 {"1e3", false, 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        lg_json j;
        uint64_t v = 0;
        open_text(&j, cases[i].text, 0);
        assert_int_equal(lg_json_next(&j), 0);
        assert_int_equal(lg_json_u64(&j, &v), cases[i].whole);
        assert_true(v == cases[i].value);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "too early (at byte 0)"},
        {"  ", "too early (at byte 2)"},
        {"[1 2]", "a comma or the end of a list was expected (at byte 3)"},
        {"[1,]", "a value was expected (at byte 3)"},
        {"[,1]", "a value"},
        {"[1}", "a comma or the end"},
        {"{\"a\":1,}", "a name in quotes"},
        {"{a:1}", "a name in quotes"},
        {"{\"a\" 1}", "a colon"},
        {"{\"a\":}", "a value"},
        {"{1:2}", "a name in quotes"},
        {"{\"a\":1", "too early"},
        {"{\"a\":1,", "too early"},
        {"{\"a\"", "a colon"},
        {"1 2", "goes on after its end (at byte 2)"},
        {"{}]", "goes on"},
        {"01", "malformed number"},
        {"-", "malformed number"},
        {"1.", "malformed number"},
        {".5", "a value"},
        {"+1", "a value"},
        {"1e", "malformed number"},
        {"0x10", "goes on"},
        {"NaN", "a value"},
        {"Infinity", "a value"},
        {"nul", "a value"},
        {"True", "a value"},
        {"'a'", "a value"},
        {"// x\n1", "a value"},
        {"\"abc", "ends within a text"},
        {"\"\\x41\"", "escape"},
        {"\"\\u12g4\"", "escape"},
        {"\"\\u12", "escape"},
        {"\"\\", "escape"},
        {"\"\\ud800\"", "escape"},
        {"\"\\udc00\"", "escape"},
        {"\"\\ud800\\u0041\"", "escape"},
        {"\"\\u0000\"", "a NUL"},
        {"\"a\nb\"", "control character"},
        {"\"\xff\"", "not UTF-8"},
        {"\"\xc0\x80\"", "not UTF-8"},
        {"\"\xed\xa0\x80\"", "not UTF-8"},
        {"\"\xf4\x90\x80\x80\"", "not UTF-8"},
        {"\"\xe2\x82\"", "not UTF-8"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        int rc = read_all(cases[i].text, strlen(cases[i].text), false);
        if (rc != LG_ERR_CORRUPT || !strstr(lg_err_message(), cases[i].why))
            fail_msg("%s: %d, %s, not %s", cases[i].text, rc, lg_err_message(), cases[i].why);
        lg_err_clear();
    }
}

static void test_bounds(void **state)
{
    (void)state;
    char deep[2 * LG_JSON_DEPTH_MAX + 3];
    for (int n = LG_JSON_DEPTH_MAX; n <= LG_JSON_DEPTH_MAX + 1; n++) {
        memset(deep, '[', (size_t)n);
        memset(deep + n, ']', (size_t)n);
        assert_int_equal(read_all(deep, 2 * (size_t)n, false),
                         n > LG_JSON_DEPTH_MAX ? LG_ERR_CORRUPT : 0);
    }
    lg_json j;
    int rc = 0, n = 0;
    open_text(&j, "[1,2,3,4,5,6]", 5);
    while (n < 100 && (rc = lg_json_next(&j)) == 0) n++;
    assert_int_equal(rc, LG_ERR_CORRUPT);
    assert_int_equal(n, 5);
    assert_non_null(strstr(lg_err_message(), "more values"));
    open_text(&j, "[[1,{\"a\":[2]}],3]", 0);
    assert_int_equal(lg_json_next(&j), 0);
    assert_int_equal(lg_json_skip(&j), 0);
    assert_int_equal(lg_json_next(&j), 0);
    assert_true(lg_json_is(&j, "") == false && j.kind == LG_JSON_NUMBER && *j.text == '3');
    lg_err_clear();
}

/* ---- the same as cJSON ---- */

static uint32_t draw(uint64_t stream, uint32_t *i)
{
    return lg_philox(stream, LG_PURPOSE_CROP, (*i)++, 0).v[0];
}

static cJSON *random_value(uint64_t stream, uint32_t *i, int depth)
{
    static const char *const texts[] = {"",
                                        "a",
                                        "\"\\/\b\n\x01",
                                        "\xc3\xa9\xe7\x8c\xab\xf0\x9f\x98\x80",
                                        "a longer text, with a comma",
                                        "\x7f{}[]:,"};
    uint32_t what = draw(stream, i) % (depth < 5 ? 8 : 6);
    char name[80];
    cJSON *v;
    switch (what) {
    case 0:
        return cJSON_CreateNull();
    case 1:
        return cJSON_CreateBool(draw(stream, i) & 1);
    case 2:
        return cJSON_CreateNumber(draw(stream, i));
    case 3:
        return cJSON_CreateNumber(((double)draw(stream, i) - 2e9) *
                                  pow(10, (int)(draw(stream, i) % 60) - 30));
    case 4:
    case 5:
        return cJSON_CreateString(texts[draw(stream, i) % LG_ARRAY_LEN(texts)]);
    case 6:
        v = cJSON_CreateArray();
        for (uint32_t n = draw(stream, i) % 5; n-- > 0;)
            cJSON_AddItemToArray(v, random_value(stream, i, depth + 1));
        return v;
    default:
        v = cJSON_CreateObject();
        for (uint32_t n = draw(stream, i) % 5; n-- > 0;) {
            snprintf(name, sizeof name, "%u%s", n, texts[draw(stream, i) % LG_ARRAY_LEN(texts)]);
            cJSON_AddItemToObject(v, name, random_value(stream, i, depth + 1));
        }
        return v;
    }
}

/* The tree that the tokens describe; j stands on the value's first token. */
static cJSON *tree_of(lg_json *j)
{
    char text[512], key[512];
    cJSON *v;
    assert_true(j->bytes < sizeof text);
    switch (j->kind) {
    case LG_JSON_NULL:
        return cJSON_CreateNull();
    case LG_JSON_TRUE:
    case LG_JSON_FALSE:
        return cJSON_CreateBool(j->kind == LG_JSON_TRUE);
    case LG_JSON_NUMBER:
        memcpy(text, j->text, j->bytes);
        text[j->bytes] = 0;
        return cJSON_CreateNumber(strtod(text, NULL));
    case LG_JSON_STRING:
        lg_json_text(j, text);
        return cJSON_CreateString(text);
    case LG_JSON_ARRAY:
        v = cJSON_CreateArray();
        while (lg_json_next(j) == 0 && j->kind != LG_JSON_ARRAY_END)
            cJSON_AddItemToArray(v, tree_of(j));
        return v;
    default:
        assert_int_equal(j->kind, LG_JSON_OBJECT);
        v = cJSON_CreateObject();
        while (lg_json_next(j) == 0 && j->kind != LG_JSON_OBJECT_END) {
            assert_int_equal(j->kind, LG_JSON_KEY);
            lg_json_text(j, key);
            assert_int_equal(lg_json_next(j), 0);
            cJSON_AddItemToObject(v, key, tree_of(j));
        }
        return v;
    }
}

static void test_like_cjson(void **state)
{
    (void)state;
    for (uint64_t stream = 0; stream < 3000; stream++) {
        uint32_t i = 0;
        cJSON *want = random_value(stream, &i, 0), *tree = NULL;
        char *text = stream & 1 ? cJSON_Print(want) : cJSON_PrintUnformatted(want);
        lg_json j;
        open_text(&j, text, 0);
        assert_int_equal(lg_json_next(&j), 0);
        cJSON *got = tree_of(&j);
        assert_int_equal(lg_json_next(&j), 0);
        assert_int_equal(j.kind, LG_JSON_END);
        if (!cJSON_Compare(want, got, true)) fail_msg("%s", text);
        assert_int_equal(lg_json_tree("doc", text, strlen(text), 1 << 16, &tree), 0);
        assert_true(cJSON_Compare(want, tree, true));
        /* Cut anywhere, only a number at the top is still JSON. */
        for (size_t cut = 0; cut < strlen(text) && want->type != cJSON_Number; cut++)
            assert_int_equal(read_all(text, cut, false), LG_ERR_CORRUPT);
        cJSON_Delete(tree);
        cJSON_Delete(got);
        cJSON_Delete(want);
        free(text);
    }
    lg_err_clear();
}

static void tree_refused(const char *text, size_t tokens_max, const char *why)
{
    cJSON *tree = NULL;
    assert_int_equal(lg_json_tree("doc", text, strlen(text), tokens_max, &tree), LG_ERR_CORRUPT);
    assert_null(tree);
    if (!strstr(lg_err_message(), why)) fail_msg("%s, not %s", lg_err_message(), why);
    lg_err_clear();
}

static void test_tree(void **state)
{
    (void)state;
    cJSON *tree = NULL;
    const char *same = "[{\"a\":1,\"b\":{\"a\":2}},{\"a\":3}]";
    assert_int_equal(lg_json_tree("doc", same, strlen(same), 20, &tree), 0);
    assert_int_equal(cJSON_GetArraySize(tree), 2);
    cJSON_Delete(tree);
    const char *python = "{\"a\": -Infinity, \"b\": [Infinity,2]}";
    assert_int_equal(lg_json_tree("doc", python, strlen(python), 20, &tree), 0);
    const cJSON *b = cJSON_GetObjectItem(tree, "b");
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(tree, "a")) == -INFINITY);
    assert_true(cJSON_GetNumberValue(cJSON_GetArrayItem(b, 0)) == INFINITY);
    assert_true(cJSON_GetNumberValue(cJSON_GetArrayItem(b, 1)) == 2);
    cJSON_Delete(tree);
    assert_int_equal(read_all(python, strlen(python), false), LG_ERR_CORRUPT);
    tree_refused("[-Infinit]", 20, "malformed");
    tree_refused("[Infinit]", 20, "malformed");
    tree_refused("[-Infinity1]", 20, "comma");
    tree_refused("[NaN]", 20, "a value was expected");
    tree_refused("{\"a\":1,\"b\":2,\"a\":1}", 100, "twice");
    tree_refused("{\"a\":1,\"\\u0061\":1}", 100, "twice");
    tree_refused("[{\"a\":{\"x\":1,\"x\":2}}]", 100, "twice");
    tree_refused("[1,2,3]", 4, "more values");
    tree_refused("{} trailing", 10, "goes on");
}

/* 32 MB of numbers: a tree of them would take a gigabyte. */
static void test_memory(void **state)
{
    (void)state;
    size_t bytes = 32 << 20;
    char *text = malloc(bytes);
    for (size_t i = 0; i < bytes; i += 2) memcpy(text + i, i ? "0," : "[", i ? 2 : 1);
    text[1] = ' ';
    struct rusage before, after;
    cJSON *tree = NULL;
    getrusage(RUSAGE_SELF, &before);
    assert_int_equal(lg_json_tree("doc", text, bytes, 1 << 17, &tree), LG_ERR_CORRUPT);
    assert_int_equal(read_all(text, bytes, false), LG_ERR_CORRUPT); /* has a copy of its own */
    getrusage(RUSAGE_SELF, &after);
    assert_true(after.ru_maxrss - before.ru_maxrss < 64 << 10);
    lg_err_clear();
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens),  cmocka_unit_test(test_texts),
        cmocka_unit_test(test_numbers), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bounds),  cmocka_unit_test(test_like_cjson),
        cmocka_unit_test(test_tree),    cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
