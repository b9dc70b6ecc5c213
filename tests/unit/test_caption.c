/* Which text a sample gets: lines and tags, as functions of (seed, n). */
#include "stages/io/caption.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const TEXTS[] = {"one\r\n\r\n  two \n", "three\nfour", "", " \n"};

/* The text of sample n, copied into ret. */
static const char *text_of(const struct lg_caption_rule *rule, uint64_t n,
                           const char *const *caption, int count, char ret[256])
{
    lg_caption c = {0};
    const char *text;
    assert_int_equal(lg_caption_choose(rule, 11, n, caption, count, &c, &text), 0);
    assert_true(strlen(text) < 256);
    strcpy(ret, text);
    lg_caption_free(&c);
    return ret;
}

static void test_lines(void **state)
{
    (void)state;
    enum { N = 400 };
    static const char *const line[] = {"one", "two", "three", "four"};
    const struct lg_caption_rule first = {.choice = LG_CAPTION_FIRST},
                                 random = {.choice = LG_CAPTION_RANDOM};
    int came[4] = {0};
    char text[256], again[256];
    for (uint64_t n = 0; n < N; n++) {
        assert_string_equal(text_of(&first, n, TEXTS, 4, text), "one");
        text_of(&random, n, TEXTS, 4, text);
        int k = 0;
        while (k < 4 && strcmp(text, line[k])) k++;
        assert_true(k < 4);
        came[k]++;
    }
    /* five standard deviations of a binomial count, sqrt(400 / 4 * 3 / 4) = 8.7 */
    for (int k = 0; k < 4; k++) assert_true(abs(came[k] - N / 4) <= 44);
    for (uint64_t n = N; n-- > 0;) {
        text_of(&random, n, TEXTS, 4, text);
        text_of(&random, (n * 5 + 3) % N, TEXTS, 4, again);
        assert_string_equal(text, text_of(&random, n, TEXTS, 4, again));
    }
    assert_string_equal(text_of(&random, 3, TEXTS + 2, 2, text), ""); /* no line at all */
    assert_string_equal(text_of(&first, 3, NULL, 0, text), "");
}

/* Without lines to choose from, "random" is what "listed" is; "listed" leaves a text whole. */
static void test_listed(void **state)
{
    (void)state;
    static const char *const plain[] = {"a", "b", "c"};
    const struct lg_caption_rule listed = {.choice = LG_CAPTION_LISTED},
                                 random = {.choice = LG_CAPTION_RANDOM};
    char x[256], y[256];
    for (uint64_t n = 0; n < 100; n++)
        assert_string_equal(text_of(&listed, n, plain, 3, x), text_of(&random, n, plain, 3, y));
    assert_string_equal(text_of(&listed, 0, TEXTS, 1, x), TEXTS[0]);
    assert_string_equal(text_of(&listed, 0, NULL, 0, x), "");
    assert_int_equal(lg_caption_choice_of("listed"), LG_CAPTION_LISTED);
    assert_int_equal(lg_caption_choice_of("first"), LG_CAPTION_FIRST);
    assert_int_equal(lg_caption_choice_of("random"), LG_CAPTION_RANDOM);
}

/* Letter i at place p of tags of one letter each, or -1 where it is no such list. */
static int place_of(const char *text, char letter)
{
    const char *at = strchr(text, letter);
    return at && (at - text) % 3 == 0 ? (int)(at - text) / 3 : -1;
}

static void test_tags(void **state)
{
    (void)state;
    enum { TAGS = 6, KEEP = 2, N = 2400 };
    static const char *const tags[] = {" a,b , c,,d,e,  f,"};
    const struct lg_caption_rule all = {.shuffle_tags = true},
                                 some = {.shuffle_tags = true, .keep_tags = KEEP},
                                 more = {.shuffle_tags = true, .keep_tags = 100};
    int at[TAGS][TAGS] = {{0}};
    char text[256], kept[256];
    for (uint64_t n = 0; n < N; n++) {
        text_of(&all, n, tags, 1, text);
        assert_int_equal(strlen(text), 3 * TAGS - 2);
        for (int i = 0; i < TAGS; i++) {
            const int p = place_of(text, (char)('a' + i));
            assert_in_range(p, 0, TAGS - 1);
            at[i][p]++;
        }
        text_of(&some, n, tags, 1, kept);
        assert_memory_equal(kept, "a, b, ", 6);
        assert_int_equal(strlen(kept), 3 * TAGS - 2);
        assert_string_equal(text_of(&more, n, tags, 1, kept), "a, b, c, d, e, f");
    }
    /* Each tag at each place equally often: five standard deviations, sqrt(2400 / 6 * 5 / 6) = 18.3. */
    for (int i = 0; i < TAGS; i++)
        for (int p = 0; p < TAGS; p++) assert_true(abs(at[i][p] - N / TAGS) <= 92);
    static const char *const sentence[] = {"a cat on a mat"}, *const empty[] = {" ,, "};
    assert_string_equal(text_of(&all, 7, sentence, 1, text), sentence[0]);
    assert_string_equal(text_of(&all, 7, empty, 1, text), "");
    assert_string_equal(text_of(&all, 7, NULL, 0, text), "");
}

/* More tags than a block of the generator has words, and a text that grows by the spaces it gets. */
static void test_many_tags(void **state)
{
    (void)state;
    enum { TAGS = 5000 };
    static char list[2 * TAGS + 1];
    const char *const tags[] = {list}, *text;
    int n = 0;
    for (int i = 0; i < TAGS; i++) memcpy(list + 2 * i, i % 2 ? "y," : "x,", 2);
    lg_caption c = {0};
    const struct lg_caption_rule rule = {.shuffle_tags = true};
    assert_int_equal(lg_caption_choose(&rule, 1, 0, tags, 1, &c, &text), 0);
    assert_int_equal(strlen(text), 3 * TAGS - 2);
    for (const char *s = text; *s; s++) n += *s == 'x';
    assert_int_equal(n, TAGS / 2);
    lg_caption_free(&c);
}

/* The bits of a run: golden values of the choice and the order. */
static void test_golden(void **state)
{
    (void)state;
    static const char *const tags[] = {"a, b, c, d, e, f\ng, h"};
    const struct lg_caption_rule rule = {
        .choice = LG_CAPTION_RANDOM, .shuffle_tags = true, .keep_tags = 1};
    static const char *const want[] = {"a, c, f, e, b, d", "a, e, d, b, c, f", "a, f, c, d, b, e",
                                       "g, h"};
    char text[256];
    for (uint64_t n = 0; n < 4; n++) assert_string_equal(text_of(&rule, n, tags, 1, text), want[n]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),  cmocka_unit_test(test_listed),
        cmocka_unit_test(test_tags),   cmocka_unit_test(test_many_tags),
        cmocka_unit_test(test_golden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
