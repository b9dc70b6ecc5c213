/* lg-emoji, from the font to what the loader reads: the four emoji of tests/golden/emoji.safetensors
 * come out as the pixels that the example's encoders were checked with, and twice the same. Skipped
 * where the font or the program is missing. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "stages/io/source.h"
#include "tests/unit/scratch.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

enum { SIZE = 64, PIXELS = 3 * SIZE * SIZE };

/* Path of lg-emoji; skips the test where it or its inputs are missing. */
static const char *program(void)
{
    static char bin[LG_PATH_BYTES];
    assert_int_equal(lg_program_dir(bin), 0);
    strcat(bin, "/../bin/lg-emoji");
    if (access(bin, X_OK) < 0 ||
        access("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf", R_OK) < 0 ||
        access("/usr/share/unicode/emoji/emoji-test.txt", R_OK) < 0)
        skip();
    return bin;
}

/* Runs lg-emoji for the captions of the golden file. */
static void make(const char *dir, const cJSON *captions)
{
    char command[LG_PATH_BYTES];
    int at = snprintf(command, sizeof command, "'%s' --per-shard 3", program());
    const cJSON *c;
    cJSON_ArrayForEach(c, captions) at +=
        snprintf(command + at, sizeof command - (size_t)at, " --only '%s'", c->valuestring);
    snprintf(command + at, sizeof command - (size_t)at, " '%s' > /dev/null", dir);
    assert_int_equal(system(command), 0);
}

/* Runs lg-emoji for a list file; returns its exit code. */
static int make_listed(const char *dir, const char *list)
{
    char command[3 * LG_PATH_BYTES], path[LG_PATH_BYTES];
    snprintf(path, sizeof path, "%s", scratch_path("list.txt"));
    assert_int_equal(lg_publish_file(path, list, strlen(list)), 0);
    snprintf(command, sizeof command, "'%s' --list '%s' '%s' > /dev/null 2> '%s'", program(), path,
             dir, scratch_path("said"));
    int status = system(command);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Which of the golden captions this is. */
static int find(const cJSON *captions, const char *caption)
{
    int i = 0;
    const cJSON *c;
    cJSON_ArrayForEach(c, captions)
    {
        if (strcmp(c->valuestring, caption) == 0) return i;
        i++;
    }
    fail_msg("caption not asked for: %s", caption);
    return -1;
}

static void test_against_golden(void **state)
{
    (void)state;
    static uint8_t pixels[PIXELS];
    lg_st_file *golden;
    assert_int_equal(lg_st_open("tests/golden/emoji.safetensors", &golden), 0);
    cJSON *captions = cJSON_Parse(lg_st_metadata(golden, "captions"));
    assert_non_null(captions);
    make(scratch_path("a"), captions);
    make(scratch_path("b"), captions);
    lg_source *a, *b;
    assert_int_equal(lg_source_open(scratch_path("a"), NULL, &a), 0);
    assert_int_equal(lg_source_open(scratch_path("b"), NULL, &b), 0);
    assert_int_equal(lg_source_count(a), cJSON_GetArraySize(captions));
    assert_true(lg_source_hash(a) == lg_source_hash(b));
    const uint8_t *want = lg_st_find(golden, "pixels")->data;
    struct lg_sample_rule rule = {.shape = {1, SIZE, SIZE}, .no_shuffle = true};
    lg_sample sample = {0};
    for (uint64_t i = 0; i < lg_source_count(a); i++) {
        assert_int_equal(lg_source_sample(a, &rule, i, pixels, &sample), 0);
        const uint8_t *w = want + PIXELS * find(captions, sample.caption);
        int sum = 0, worst = 0;
        for (int k = 0; k < PIXELS; k++) {
            sum += abs(pixels[k] - w[k]);
            worst = LG_MAX(worst, abs(pixels[k] - w[k]));
        }
        /* One level where a weight's rounding falls on an edge: seen in 0.9 % of the values. */
        if (!(worst <= 1 && sum * 50 <= PIXELS))
            fail_msg("%s: worst %d, sum %d", sample.caption, worst, sum);
    }
    lg_sample_free(&sample);
    lg_source_close(&a);
    lg_source_close(&b);
    cJSON_Delete(captions);
    lg_st_close(&golden);
}

static void test_list(void **state)
{
    (void)state;
    static const char list[] = "# a comment\n\nghost\nred heart = a heart, red = mine\nghost\n";
    assert_int_equal(make_listed(scratch_path("listed"), list), 0);
    lg_source *s;
    assert_int_equal(lg_source_open(scratch_path("listed"), NULL, &s), 0);
    assert_int_equal(lg_source_count(s), 2);
    static uint8_t pixels[PIXELS];
    struct lg_sample_rule rule = {.shape = {1, SIZE, SIZE}, .no_shuffle = true};
    lg_sample sample = {0};
    bool renamed = false, named = false;
    for (uint64_t i = 0; i < 2; i++) {
        assert_int_equal(lg_source_sample(s, &rule, i, pixels, &sample), 0);
        renamed |= !strcmp(sample.caption, "a heart, red = mine");
        named |= !strcmp(sample.caption, "ghost");
    }
    assert_true(renamed && named);
    lg_sample_free(&sample);
    lg_source_close(&s);
    /* A name that no emoji has is told, and nothing stands under a shard's name. */
    char *said;
    size_t bytes;
    assert_int_equal(make_listed(scratch_path("wrong"), "ghost\npurple dinosaur\n"),
                     -LG_ERR_CONFIG);
    assert_int_equal(lg_read_file(scratch_path("said"), 4096, &said, &bytes), 0);
    assert_non_null(strstr(said, "purple dinosaur"));
    free(said);
    assert_int_not_equal(access(scratch_path("wrong/emoji-00000.tar"), F_OK), 0);
    assert_int_equal(make_listed(scratch_path("none"), "# nothing\n"), -LG_ERR_CONFIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_golden),
                                       cmocka_unit_test(test_list)};
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
