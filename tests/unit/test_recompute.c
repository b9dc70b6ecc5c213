/* memory.recompute: every form, LiteGen's figures, and the text of every refusal. */
#include "config/recompute.h"
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { BLOCKS_MAX = 64 };

static int parse(const char *const *words, int blocks, struct lg_recompute *ret)
{
    return lg_recompute_parse(words, blocks, ret);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* The blocks as a text of '#' (recomputed) and '.'. */
static void assert_blocks(const char *const *words, int blocks, const char *expected)
{
    struct lg_recompute r;
    char got[BLOCKS_MAX + 1] = "";
    if (parse(words, blocks, &r) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(r.kind, LG_RECOMPUTE_BLOCKS);
    for (int i = 0; i < blocks; i++) got[i] = r.block[i] ? '#' : '.';
    assert_string_equal(got, expected);
    lg_recompute_free(&r);
    assert_null(r.block);
}

static void assert_kind(const char *const *words, enum lg_recompute_kind kind)
{
    struct lg_recompute r;
    if (parse(words, 3, &r) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(r.kind, kind);
    for (int i = 0; i < 3; i++) assert_false(r.block[i]);
    lg_recompute_free(&r);
}

static void refuses(const char *const *words, const char *message)
{
    struct lg_recompute r = {.budget = 17};
    if (parse(words, 4, &r) != LG_ERR_CONFIG) fail_msg("\"%s\" is accepted", words[0]);
    assert_int_equal(r.budget, 17); /* untouched */
    assert_null(r.block);
    if (!strstr(lg_err_message(), message))
        fail_msg("expected \"%s\" in:\n%s", message, lg_err_message());
    assert_null(strchr(lg_err_message(), '\n'));
    lg_err_clear();
}

static void test_words(void **state)
{
    (void)state;
    assert_kind(NULL, LG_RECOMPUTE_NONE);
    assert_kind((const char *const[]){NULL}, LG_RECOMPUTE_NONE);
    assert_kind(WORDS("none"), LG_RECOMPUTE_NONE);
    assert_kind(WORDS("norms"), LG_RECOMPUTE_NORMS);
    assert_kind(WORDS("mlp"), LG_RECOMPUTE_MLP);
    assert_kind(WORDS("budget:1"), LG_RECOMPUTE_BUDGET);
    assert_blocks(WORDS("block"), 4, "####");
    assert_blocks(WORDS("block"), 1, "#");
}

static void test_blocks(void **state)
{
    (void)state;
    assert_blocks(WORDS("0", "2", "5"), 6, "#.#..#");
    assert_blocks(WORDS("5", "0", "5"), 6, "#....#");
    assert_blocks(WORDS("3"), 4, "...#");
    assert_blocks(WORDS("every:1"), 4, "####");
    assert_blocks(WORDS("every:2"), 5, "#.#.#");
    assert_blocks(WORDS("every:3"), 7, "#..#..#");
    assert_blocks(WORDS("every:99999999999999999999"), 4, "#...");
}

static int group(const char *word, int blocks)
{
    struct lg_recompute r;
    if (parse(WORDS(word), blocks, &r) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(r.kind, LG_RECOMPUTE_UNIFORM);
    for (int i = 0; i < blocks; i++) assert_false(r.block[i]);
    lg_recompute_free(&r);
    return r.group;
}

static void test_uniform(void **state)
{
    (void)state;
    assert_int_equal(group("uniform:1", 4), 1);
    assert_int_equal(group("uniform:3", 4), 3);
    assert_int_equal(group("uniform:5", 4), 4);
    assert_int_equal(group("uniform:99999999999999999999", 4), 4);
    refuses(WORDS("uniform:"), "\"uniform:\" has no whole number of at least 1");
    refuses(WORDS("uniform:0"), "\"uniform:0\" has no whole number of at least 1");
    refuses(WORDS("uniform"), "\"uniform\" is unknown");
}

static int count(const char *ratio, int blocks)
{
    struct lg_recompute r;
    int n = 0;
    if (parse(WORDS(ratio), blocks, &r) < 0) fail_msg("%s", lg_err_text());
    for (int i = 0; i < blocks; i++) n += r.block[i];
    lg_recompute_free(&r);
    return n;
}

/* selective_ratio on 28 blocks: how many LiteGen recomputes. */
static void test_ratio(void **state)
{
    (void)state;
    assert_int_equal(count("ratio:0", 28), 28);
    assert_int_equal(count("ratio:0.2", 28), 22);
    assert_int_equal(count("ratio:0.5", 28), 14);
    assert_int_equal(count("ratio:1", 28), 0);
    assert_int_equal(count("ratio:1.0", 28), 0);
    assert_blocks(WORDS("ratio:0.5"), 6, "#.#.#.");
    assert_blocks(WORDS("ratio:0.75"), 8, ".#...#..");
}

static void test_budget(void **state)
{
    (void)state;
    const struct {
        const char *word;
        size_t bytes;
    } sizes[] = {{"budget:1", 1},
                 {"budget:123456789", 123456789},
                 {"budget:3KiB", 3 << 10},
                 {"budget:512MiB", 512u << 20},
                 {"budget:10GiB", (size_t)10 << 30},
                 {"budget:1.5GiB", (size_t)3 << 29},
                 {"budget:2TiB", (size_t)2 << 40},
                 {"budget:3KB", 3000},
                 {"budget:3MB", 3000000},
                 {"budget:2.5GB", 2500000000},
                 {"budget:2TB", 2000000000000}};
    for (size_t i = 0; i < LG_ARRAY_LEN(sizes); i++) {
        struct lg_recompute r;
        if (parse(WORDS(sizes[i].word), 4, &r) < 0) fail_msg("%s", lg_err_text());
        assert_int_equal(r.kind, LG_RECOMPUTE_BUDGET);
        if (r.budget != sizes[i].bytes)
            fail_msg("%s: %zu bytes instead of %zu", sizes[i].word, r.budget, sizes[i].bytes);
        lg_recompute_free(&r);
    }
}

static void test_unknown_words(void **state)
{
    (void)state;
    refuses(
        WORDS("blocks"),
        "memory.recompute: \"blocks\" is unknown; expected \"none\", \"norms\", \"mlp\", "
        "\"block\", a list of blocks like [0, 2, 5], \"every:N\", \"ratio:R\", \"uniform:N\" or "
        "\"budget:SIZE\"");
    static const char *const wrong[] = {"", " ", "Block", " block", "block ", "every", "ratio0.5"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++) refuses(WORDS(wrong[i]), "is unknown");
    char longest[1000];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    refuses(WORDS(longest), "\"budget:SIZE\""); /* the message still has its end */
}

static void test_wrong_blocks(void **state)
{
    (void)state;
    refuses(WORDS("4"), "memory.recompute: there is no block 4: the net has 4, from 0 on");
    refuses(WORDS("0", "1", "7"), "there is no block 7");
    refuses(WORDS("0", "99999999999999999999"), "there is no block 99999999999999999999");
    refuses(WORDS("norms", "mlp"), "\"norms\" is no number of a block");
    static const char *const wrong[] = {"-1", "+1",  "1.0", "0x1", "1e0", " 1",
                                        "1 ", "1,2", "nan", "inf", "",    "block"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++)
        refuses(WORDS("0", wrong[i]), "\" is no number of a block; expected");
}

/* Each behind the prefix is refused with the message. */
static void refuse_numbers(const char *prefix, const char *const *numbers, const char *message)
{
    for (; *numbers; numbers++) {
        char word[80];
        snprintf(word, sizeof word, "%s%s", prefix, *numbers);
        refuses(WORDS(word), message);
    }
}

static void test_wrong_numbers(void **state)
{
    (void)state;
    refuse_numbers("", WORDS("-1", "1.0", "0x1", " 1", "1 "), "is unknown");
    refuse_numbers(
        "every:", WORDS("", "0", "-1", "+1", "1.0", "1.5", "0x1", "1e0", " 1", "1 ", "nan", "inf"),
        " has no whole number of at least 1; expected");
    refuse_numbers("ratio:",
                   WORDS("", "-0.1", "+0.1", "1.01", "2", "0x0.8", "1e-1", ".5", "0.", " 0.5",
                         "0.5 ", "0.5x", "0.5.5", "0,5", "nan", "inf"),
                   " has no number from 0 to 1; expected");
    refuse_numbers("budget:",
                   WORDS("", "0", "0GiB", "0.5", "-1", "+1GiB", "0x10", "1e9", "10 GiB", " 10GiB",
                         "10GiB ", "10gib", "10G", "10GiBs", "GiB", ".5GiB", "1.GiB", "nan", "inf",
                         "4194304TiB", "99999999999999999999", "9999999999999999999999TB"),
                   " has no size like 10GiB or 512MiB; expected");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_words),        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_uniform),      cmocka_unit_test(test_ratio),
        cmocka_unit_test(test_budget),       cmocka_unit_test(test_unknown_words),
        cmocka_unit_test(test_wrong_blocks), cmocka_unit_test(test_wrong_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
