/* Text of others on terminals and in logs: nothing in it moves a cursor or forges a line, and what is
 * only text stays as it is. */
#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/utf8.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static const struct {
    const char *text, *one_line, *indented;
} cases[] = {
    {"", "", NULL},
    {"plain, with a tab\t and a \\ backslash", "plain, with a tab\t and a \\ backslash", NULL},
    {"caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80",
     "caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80", NULL},
    {"\x1b[2J\x07\r\x7f", "\\x1b[2J\\x07\\x0d\\x7f", NULL},
    {"\xc2\x9b"
     "31m\xc2\x80\xc2\xa0",
     "\\u{9b}31m\\u{80}\xc2\xa0", NULL},
    {"a\xe2\x80\xa8"
     "b\xe2\x80\xa9"
     "c",
     "a\\u{2028}b\\u{2029}c", NULL},
    {"\xe2\x80\xaa\xe2\x80\xae\xe2\x81\xa6\xe2\x81\xa9", "\\u{202a}\\u{202e}\\u{2066}\\u{2069}",
     NULL},
    {"\xe2\x80\xa7\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa",
     "\xe2\x80\xa7\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa", NULL},
    {"\xff\xc3", "\\xff\\xc3", NULL},
    {"\x9b"
     "1m",
     "\\x9b1m", NULL},
    {"\xed\xa0\x80\xc0\x8a", "\\xed\\xa0\\x80\\xc0\\x8a", NULL},
    {"a\nb", "a\\x0ab", "a\n    b"},
    {"a\n  b\n    at c\n", "a\\x0a  b\\x0a    at c\\x0a", "a\n    b\n    at c\n    "},
};

static void test_each(void **state)
{
    (void)state;
    char once[256], twice[256];
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        size_t n = strlen(cases[i].text);
        lg_printable(once, sizeof once, cases[i].text, n, LG_NEWLINES_ESCAPED);
        assert_string_equal(once, cases[i].one_line);
        assert_int_equal(lg_printable(twice, sizeof twice, once, strlen(once), LG_NEWLINES_ESCAPED),
                         strlen(once));
        assert_string_equal(twice, once);
        lg_printable(once, sizeof once, cases[i].text, n, LG_NEWLINES_INDENTED);
        assert_string_equal(once, cases[i].indented ? cases[i].indented : cases[i].one_line);
        lg_printable(twice, sizeof twice, once, strlen(once), LG_NEWLINES_INDENTED);
        assert_string_equal(twice, once);
    }
    assert_int_equal(lg_printable(once, sizeof once, "a\0b", 3, LG_NEWLINES_ESCAPED), 6);
    assert_string_equal(once, "a\\x00b");
}

/* Whatever the room, whole characters and a NUL. */
static void test_room(void **state)
{
    (void)state;
    const char *text = "a\x1b\xc3\xa9\xff\xe6\x97\xa5\nz",
               *whole = "a\\x1b\xc3\xa9\\xff\xe6\x97\xa5\n    z";
    for (size_t room = 1; room <= strlen(whole) + 1; room++) {
        char *got = malloc(room);
        size_t n = lg_printable(got, room, text, strlen(text), LG_NEWLINES_INDENTED);
        assert_true(n < room && n == strlen(got) && lg_utf8_valid(got, n));
        assert_memory_equal(got, whole, n);
        assert_true(room <= strlen(whole) || n == strlen(whole));
        free(got);
    }
}

/* All bytes, alone and in pairs: what comes out is UTF-8 without a control character. */
static void test_all_bytes(void **state)
{
    (void)state;
    char text[3], got[32];
    for (int a = 0; a < 256; a++)
        for (int b = 0; b < 256; b++) {
            text[0] = (char)a, text[1] = (char)b;
            size_t n = lg_printable(got, sizeof got, text, 2, LG_NEWLINES_ESCAPED);
            assert_true(lg_utf8_valid(got, n));
            for (size_t at = 0; at < n;) {
                uint32_t code = 0;
                at += lg_utf8_next(got + at, n - at, &code);
                assert_true((code >= 0x20 && code < 0x7F) || code > 0x9F || code == '\t');
            }
        }
}

static void test_stream(void **state)
{
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    lg_print_text(f, "plain \x1b text\n", 13, LG_NEWLINES_ESCAPED);
    lg_print(f, "|%s|%d\n", "\xc2\x9d\xc3\xa9", 7);
    fclose(f);
    assert_string_equal(text, "plain \\x1b text\\x0a|\\u{9d}\xc3\xa9|7\n");
    free(text);
}

/* What lg_log and lg_log_error write, read back from a pipe. */
static void logged(char ret[16384], void (*say)(const char *), const char *text)
{
    int pipes[2], saved = dup(STDERR_FILENO);
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    dup2(pipes[1], STDERR_FILENO);
    say(text);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(pipes[1]);
    ssize_t n, at = 0;
    while ((n = read(pipes[0], ret + at, (size_t)(16383 - at))) > 0) at += n;
    close(pipes[0]);
    ret[at] = 0;
}

static void log_it(const char *text)
{
    lg_log(LG_WARN, "file %s", text);
}

static void fail_with_it(const char *text)
{
    (void)LG_FAIL(LG_ERR_VOID, "%s: no picture", text);
    assert_null(strpbrk(lg_err_message(), "\x1b\x7f\xff"));
    lg_log_error("sample");
}

static void test_log_lines(void **state)
{
    (void)state;
    static const char forged[] =
        "a\x1b[31m\xff\n2026-01-01T00:00:00.000Z error lgsup all is lost \xe6\x97\xa5\x7f";
    void (*const ways[])(const char *) = {log_it, fail_with_it};
    char line[16384];
    for (size_t i = 0; i < LG_ARRAY_LEN(ways); i++) {
        logged(line, ways[i], forged);
        assert_non_null(strstr(line, "a\\x1b[31m\\xff\n    2026-01-01T"));
        assert_non_null(strstr(line, "\xe6\x97\xa5\\x7f"));
        for (const char *s = line; (s = strchr(s, '\n')) && *++s;)
            assert_int_equal(strncmp(s, "    ", 4), 0); /* one line that begins with a time */
    }
    /* Longer than a line may be: cut, with its newline. */
    char *large = malloc(50000);
    memset(large, 1, 49999);
    large[49999] = 0;
    logged(line, log_it, large);
    assert_true(strlen(line) <= 6000 && line[strlen(line) - 1] == '\n');
    free(large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each),      cmocka_unit_test(test_room),
        cmocka_unit_test(test_all_bytes), cmocka_unit_test(test_stream),
        cmocka_unit_test(test_log_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
