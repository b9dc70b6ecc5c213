/* The CSV reader: fields, where they stand and in which line, and what is no CSV. The fields wanted are those of Python's csv
 * module, with strict=True, but for empty lines, which it gives as records of no field, and the byte order mark, which is its
 * codec's. */
#include "stages/io/csv.h"
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

/* Opens a copy of exactly that size, so that a sanitizer sees a read past the end; the caller frees. */
static char *open_copy(lg_csv *c, const char *text, size_t record_bytes_max)
{
    const size_t bytes = strlen(text);
    char *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    memcpy(copy, text, bytes);
    lg_csv_open(c, &(struct lg_csv_source){.label = "x.csv",
                                           .data = copy,
                                           .bytes = bytes,
                                           .record_bytes_max = record_bytes_max,
                                           .code = LG_ERR_CONFIG});
    return copy;
}

/* All fields, "a|b/c|d/" for two records of two. */
static void print_fields(const char *text, char ret[1024])
{
    lg_csv c;
    char *copy = open_copy(&c, text, 0);
    size_t n = 0;
    for (;;) {
        if (lg_csv_next(&c) < 0) fail_msg("%s: %s", text, lg_err_message());
        if (c.is_end) break;
        n += lg_csv_text(&c, ret + n);
        ret[n++] = c.is_last ? '/' : '|';
    }
    ret[n] = 0;
    free(copy);
}

static void test_fields(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"", ""},
        {"a", "a/"},
        {"a\n", "a/"},
        {"a,b\r\nc,d\r\n", "a|b/c|d/"},
        {"a,b\nc,d", "a|b/c|d/"},
        {"a,b\r\nc,d\ne,f\r\n", "a|b/c|d/e|f/"},
        {"a,b\n,\n", "a|b/|/"},
        {"a,\n,b", "a|/|b/"},
        {",", "|/"},
        {" a , b \n", " a | b /"},
        {"\"a\",\"b\"\n", "a|b/"},
        {"\"\",b\n\"\",\"\"", "|b/|/"},
        {"\"a,b\",c\n", "a,b|c/"},
        {"\"a \"\"b\"\"\",\"\"\"\"\n", "a \"b\"|\"/"},
        {"\"a\nb\",\"c\r\nd\"\r\n", "a\nb|c\r\nd/"},
        {"\"a\rb\",c\n", "a\rb|c/"},
        {"\"\"\"\"\"\",\"\"\",\"\"\"", "\"\"|\",\"/"},
        {"\xc3\xa9,\xe6\xbc\xa2\xe5\xad\x97\n", "\xc3\xa9|\xe6\xbc\xa2\xe5\xad\x97/"},
        {"\xff\xfe,'a'\n", "\xff\xfe|'a'/"},
        {"\xef\xbb\xbf\"a\",b\n", "a|b/"},
        {"\n\r\na,b\n\n\r\nc,d\n\n", "a|b/c|d/"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        char text[1024];
        print_fields(cases[i][0], text);
        assert_string_equal(text, cases[i][1]);
    }
}

static void test_broken(void **state)
{
    (void)state;
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"a,b\n\"c\n\n,d", "x.csv:2: a quote that does not end"},
        {"\"", "x.csv:1: a quote that does not end"},
        {"\"a\"\"", "x.csv:1: a quote that does not end"},
        {"a,b\n\nc\"d\",e\n", "x.csv:3: a quote inside a field"},
        {"a, \"b\"\n", "x.csv:1: a quote inside a field"},
        {"\"a\nb\",c\n\"d\"e,f\n", "x.csv:3: text behind the quote"},
        {"\"a\" ,b\n", "x.csv:1: text behind the quote"},
        {"a,b\rc,d\n", "x.csv:1: a carriage return"},
        {"a,\"b\"\rc,d\n", "x.csv:1: a carriage return"},
        {"a,b\nc,d\r", "x.csv:2: a carriage return"},
        {"a,b\nc\n", "x.csv:2: the record has fewer fields than the header, which has 2"},
        {"a,b\n\"c\n\",d,e", "x.csv:2: the record has more fields than the header, which has 2"},
        {"a\nb,", "x.csv:2: the record has more fields than the header, which has 1"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        lg_csv c;
        char *copy = open_copy(&c, cases[i].text, 0);
        int rc = 0;
        while (rc == 0 && !c.is_end) rc = lg_csv_next(&c);
        assert_int_equal(rc, LG_ERR_CONFIG);
        if (strncmp(lg_err_message(), cases[i].want, strlen(cases[i].want)))
            fail_msg("%s: %s", cases[i].want, lg_err_message());
        free(copy);
    }
    lg_err_clear();
}

/* What is said of each field, and that it can be read again alone. */
static void test_places(void **state)
{
    (void)state;
    static const char text[] = "\xef\xbb\xbfname,x\r\n\"a\nb\",\r\n\n\"c \"\"d\"\"\",\"\"";
    static const struct {
        size_t at, bytes, column;
        uint64_t line;
        bool is_last;
        const char *text;
    } want[] = {{3, 4, 0, 1, false, "name"},     {8, 1, 1, 1, true, "x"},
                {11, 5, 0, 2, false, "a\nb"},    {17, 0, 1, 2, true, ""},
                {20, 9, 0, 5, false, "c \"d\""}, {30, 2, 1, 5, true, ""}};
    lg_csv c;
    char *copy = open_copy(&c, text, 0), field[64];
    for (size_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        assert_int_equal(lg_csv_next(&c), 0);
        assert_false(c.is_end);
        assert_int_equal(c.at, want[i].at);
        assert_int_equal(c.bytes, want[i].bytes);
        assert_int_equal(c.column, want[i].column);
        assert_int_equal(c.line, want[i].line);
        assert_int_equal(c.is_last, want[i].is_last);
        assert_int_equal(lg_csv_is(&c, want[i].text), i != 4); /* which holds a quote */
        assert_false(lg_csv_is(&c, "nam"));
        assert_int_equal(lg_csv_text(&c, field), strlen(want[i].text));
        assert_string_equal(field, want[i].text);
        if (!c.bytes) continue;
        lg_csv alone;
        memcpy(field, copy + c.at, c.bytes);
        lg_csv_open(&alone,
                    &(struct lg_csv_source){.label = "it", .data = field, .bytes = c.bytes});
        assert_int_equal(lg_csv_next(&alone), 0);
        lg_csv_text(&alone, field); /* in place */
        assert_string_equal(field, want[i].text);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(lg_csv_next(&c), 0);
        assert_true(c.is_end);
    }
    free(copy);
}

static void test_bound(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *want; /* NULL: it is right */
    } cases[] = {
        {"a,b\n1,345678\n", NULL},
        {"a,b\n1,\"34567\"\n", "x.csv:2: the record is longer than 8 bytes"},
        {"a,b\n1,\"3456\"\r\n1,\"3456\"", NULL},
        {"a,b\n1,3456789\n", "x.csv:2: the record is longer than 8 bytes"},
        {"a,b\n12345,789\n", "x.csv:2: the record is longer than 8 bytes"},
        {"a,b\n1,\"3456789\n", "bytes: is there a quote too many, or one missing?"},
        {"a,b\n1,\"34567", "x.csv:2: a quote that does not end"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        lg_csv c;
        char *copy = open_copy(&c, cases[i].text, 8);
        int rc = 0;
        while (rc == 0 && !c.is_end) rc = lg_csv_next(&c);
        assert_int_equal(rc, cases[i].want ? LG_ERR_CONFIG : 0);
        if (cases[i].want && !strstr(lg_err_message(), cases[i].want))
            fail_msg("%s: %s", cases[i].want, lg_err_message());
        free(copy);
    }
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_broken),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
