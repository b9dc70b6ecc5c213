/* The order of samples with buckets: every item once an epoch, all ranks in one bucket at a time, nothing absent but in a
 * bucket's last group and beyond its rows. */
#include "base/check.h"
#include "base/philox.h"
#include "stages/io/order.h"
#include "stages/io/permute.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { COUNT_MAX = 400 };

static struct lg_item_size size[COUNT_MAX];

static struct lg_buckets buckets_of(int square, int micro, int n, const char *const *words)
{
    struct lg_buckets b;
    struct lg_strlist wanted = {(char **)words, n};
    struct lg_buckets_spec spec = {.height = square,
                                   .width = square,
                                   .frames = 1,
                                   .factor_time = 1,
                                   .unit = 4,
                                   .micro_batch = micro};
    if (lg_buckets_make(&wanted, &spec, &b) < 0) fail_msg("%s", lg_err_text());
    return b;
}
#define BUCKETS(square, micro, ...)                                                                \
    buckets_of(square, micro, (int)LG_ARRAY_LEN(((const char *const[]){__VA_ARGS__})),             \
               (const char *const[]){__VA_ARGS__})

static lg_order *make(const struct lg_buckets *b, uint64_t count, uint64_t ranks, uint64_t micros,
                      uint64_t micro)
{
    lg_order *o;
    assert_int_equal(lg_order_make(&(struct lg_order_spec){.buckets = b,
                                                           .size = size,
                                                           .count = count,
                                                           .ranks = ranks,
                                                           .micros = micros,
                                                           .micro = micro},
                                   &o),
                     0);
    return o;
}

/* Sizes from 10 to 59; some unknown. */
static void draw_sizes(uint64_t seed)
{
    for (int i = 0; i < COUNT_MAX; i++) {
        lg_philox_out r = lg_philox(seed, LG_PURPOSE_TEST, (uint64_t)i, 0);
        const bool unknown = r.v[2] % 31 == 0;
        size[i] = (struct lg_item_size){unknown ? 0 : (uint16_t)(10 + r.v[0] % 50),
                                        unknown ? 0 : (uint16_t)(10 + r.v[1] % 50), 1, 0};
    }
}

/* Three epochs of a run of so many ranks, micro-batches and places. */
static void check_epochs(const struct lg_buckets *b, uint64_t count, uint64_t ranks,
                         uint64_t micros, uint64_t micro, const struct lg_order_key *key)
{
    lg_order *o = make(b, count, ranks, micros, micro);
    const uint64_t share = micros * micro, batch = ranks * share, all = lg_order_groups(o);
    static uint8_t seen[3][COUNT_MAX];
    static uint64_t groups[3][LG_BUCKETS_MAX], absent_groups[3][LG_BUCKETS_MAX];
    uint64_t items = 0;
    memset(seen, 0, sizeof seen);
    memset(groups, 0, sizeof groups);
    memset(absent_groups, 0, sizeof absent_groups);
    for (uint64_t p = 0; p < 3 * all; p++) {
        const uint64_t first = key->first + p / micros * batch + p % micros * micro;
        const int k = lg_order_at(o, key, first).bucket;
        const uint64_t rows = (uint64_t)b->of[k].rows, e = p / all;
        uint64_t absent = 0;
        groups[e][k]++;
        for (uint64_t r = 0; r < ranks; r++)
            for (uint64_t i = 0; i < micro; i++) {
                struct lg_order_place at = lg_order_at(o, key, first + r * share + i);
                assert_int_equal(at.bucket, k);
                assert_int_equal(at.epoch, key->epoch + e);
                if (at.item == LG_ITEM_ABSENT) {
                    absent += i < rows;
                    continue;
                }
                assert_true(i < rows && at.item < count);
                assert_false(absent); /* they come last, rank after rank */
                assert_int_equal(seen[e][at.item]++, 0);
            }
        absent_groups[e][k] += absent > 0;
        assert_true(absent < ranks * rows); /* no group of nothing */
    }
    for (int e = 0; e < 3; e++)
        for (uint64_t i = 0; i < count; i++) assert_int_equal(seen[e][i], 1);
    for (int k = 0; k < b->n; k++) {
        const struct lg_order_bucket of = lg_order_bucket(o, k);
        for (int e = 0; e < 3; e++) {
            assert_int_equal(groups[e][k], of.groups);
            assert_true(absent_groups[e][k] <= 1);
        }
        items += of.items;
    }
    assert_int_equal(items, count);
    lg_order_free(&o);
    assert_null(o);
}

static void test_each_item_once(void **state)
{
    (void)state;
    const struct lg_buckets tables[] = {BUCKETS(16, 4, "ratio"), BUCKETS(32, 4, "32x32"),
                                        BUCKETS(16, 4, "16x16", "32x32", "16x32", "64x64")};
    for (uint64_t seed = 0; seed < 3; seed++) {
        draw_sizes(seed);
        for (size_t t = 0; t < LG_ARRAY_LEN(tables); t++)
            for (uint64_t count = 1; count <= COUNT_MAX; count += 1 + count / 2)
                for (uint64_t ranks = 1; ranks <= 3; ranks++)
                    for (uint64_t micros = 1; micros <= 3; micros++) {
                        const uint64_t batch = ranks * micros * 4;
                        struct lg_order_key key = {.seed = seed, .first = 5 * batch, .epoch = 9};
                        check_epochs(&tables[t], count, ranks, micros, 4, &key);
                        key.no_shuffle = true;
                        check_epochs(&tables[t], count, ranks, micros, 4, &key);
                    }
    }
}

/* With one bucket, and one rank or one micro-batch a step, the whole groups are what the square's rule gives. */
static void test_one_bucket_is_the_square(void **state)
{
    (void)state;
    enum { COUNT = 103 };
    const struct lg_buckets b = BUCKETS(32, 4, "32x32");
    static const uint64_t cut[][2] = {{1, 3}, {3, 1}, {1, 1}}; /* ranks, micro-batches */
    draw_sizes(1);
    for (size_t i = 0; i < LG_ARRAY_LEN(cut); i++) {
        lg_order *o = make(&b, COUNT, cut[i][0], cut[i][1], 4);
        struct lg_order_key key = {.seed = 77, .epoch = 2};
        const uint64_t whole = COUNT / (4 * cut[i][0]) * 4 * cut[i][0];
        for (uint64_t n = 0; n < whole; n++)
            assert_int_equal(lg_order_at(o, &key, n).item, lg_permute(77, 2, n, COUNT));
        lg_order_free(&o);
    }
}

/* Epochs, seeds and buckets are shuffled differently, and so are groups. */
static void test_shuffled(void **state)
{
    (void)state;
    enum { COUNT = 320 };
    const struct lg_buckets b = BUCKETS(16, 4, "16x16", "12x20");
    for (int i = 0; i < COUNT; i++)
        size[i] = (struct lg_item_size){i % 2 ? 16 : 20, i % 2 ? 16 : 12, 1, 0};
    lg_order *o = make(&b, COUNT, 2, 1, 4);
    struct lg_order_key key = {.seed = 1}, other = {.seed = 2};
    int same_epoch = 0, same_seed = 0, runs = 0;
    uint64_t nth[2] = {0, 0}, item[2][COUNT];
    for (uint64_t n = 0; n < COUNT; n++) {
        struct lg_order_place at = lg_order_at(o, &key, n);
        same_epoch += at.item == lg_order_at(o, &key, n + COUNT).item;
        same_seed += at.item == lg_order_at(o, &other, n).item;
        runs += n && at.bucket != lg_order_at(o, &key, n - 1).bucket;
        item[at.bucket][nth[at.bucket]++] = at.item / 2;
    }
    int alike = 0;
    for (int i = 0; i < COUNT / 2; i++) alike += item[0][i] == item[1][i];
    /* Poisson with mean 1 or 2: P(> 14) < 1e-8. */
    assert_true(same_epoch <= 14 && same_seed <= 14 && alike <= 14);
    /* 40 groups in random order change bucket about 20 times: not sorted, not in turns. */
    assert_true(runs >= 8 && runs <= 32);
    lg_order_free(&o);
}

static void test_small_buckets_are_given_up(void **state)
{
    (void)state;
    const struct lg_buckets b = BUCKETS(16, 4, "8x32", "12x20", "16x16", "20x12", "32x8");
    static const struct {
        int height, width, count;
    } of[] = {{8, 32, 2}, {12, 20, 9}, {16, 16, 7}, {20, 12, 20}, {32, 8, 3}};
    int n = 0;
    for (size_t k = 0; k < LG_ARRAY_LEN(of); k++)
        for (int i = 0; i < of[k].count; i++)
            size[n++] = (struct lg_item_size){(uint16_t)of[k].width, (uint16_t)of[k].height, 1, 0};
    lg_order *o = make(&b, (uint64_t)n, 2, 1, 4); /* a group holds 8 */
    /* 8x32 (2) goes to 12x20, 32x8 (3) to 20x12, 16x16 (7) to 12x20, the first of the two as near. */
    assert_int_equal(lg_order_bucket(o, 0).items, 0);
    assert_int_equal(lg_order_bucket(o, 0).nearest, 2);
    assert_int_equal(lg_order_bucket(o, 1).items, 9 + 2 + 7);
    assert_int_equal(lg_order_bucket(o, 2).items, 0);
    assert_int_equal(lg_order_bucket(o, 3).items, 20 + 3);
    assert_int_equal(lg_order_bucket(o, 4).items, 0);
    assert_int_equal(lg_order_groups(o), 3 + 3);
    lg_order_free(&o);
    /* All too small: one is left, and has them all. */
    const struct lg_buckets large = BUCKETS(16, 400, "8x32", "12x20", "16x16", "20x12", "32x8");
    o = make(&large, (uint64_t)n, 2, 1, 400);
    assert_int_equal(lg_order_groups(o), 1);
    uint64_t used = 0;
    for (int k = 0; k < b.n; k++) {
        used += lg_order_bucket(o, k).items > 0;
        assert_true(!lg_order_bucket(o, k).items || lg_order_bucket(o, k).items == (uint64_t)n);
    }
    assert_int_equal(used, 1);
    lg_order_free(&o);
}

/* Clips: the most frames that they have, then the nearest ratio; pictures: one frame. */
static void test_frames(void **state)
{
    (void)state;
    const struct lg_buckets b =
        BUCKETS(16, 1, "1x16x16", "5x16x16", "5x12x20", "9x16x16", "9x12x20");
    static const struct lg_item_size of[] = {
        {16, 16, 1, 0},   {20, 12, 1, 0},       {0, 0, 0, 0}, /* pictures */
        {16, 16, 4, 400}, {16, 16, 5, 500},     {20, 12, 8, 800},
        {20, 12, 9, 900}, {10, 10, 900, 90000},
    };
    static const int want[] = {0, 0, 0, 2,
                               2, 1, 3, 4}; /* as they are sorted: 5x12x20 before 5x16x16 */
    for (int twice = 0; twice < 2; twice++) {
        for (size_t i = 0; i < LG_ARRAY_LEN(of); i++) {
            size[0] = of[i];
            lg_order *o;
            /* The same frames by their time; every second one, of twice as many. */
            const struct lg_clip_rate rate = {.fps = twice == 1 ? 10 : 0};
            assert_int_equal(lg_order_make(&(struct lg_order_spec){.buckets = &b,
                                                                   .size = size,
                                                                   .count = 1,
                                                                   .rate = rate,
                                                                   .ranks = 1,
                                                                   .micros = 1,
                                                                   .micro = 1},
                                           &o),
                             0);
            /* Too short for any: the nearest of all, of whatever frames. */
            for (int k = 0; k < b.n; k++)
                if (i != 3) assert_int_equal(lg_order_bucket(o, k).nearest, k == want[i]);
            lg_order_free(&o);
        }
    }
}

/* Clips that are given up go to fewer frames, never to pictures, and pictures never to clips. */
static void test_frames_given_up(void **state)
{
    (void)state;
    const struct lg_buckets b = BUCKETS(16, 4, "1x16x16", "5x16x16", "9x12x20", "9x16x16");
    static const struct {
        struct lg_item_size of;
        int count;
    } some[] = {
        {{16, 16, 1, 0}, 2}, {{16, 16, 6, 600}, 1}, {{20, 12, 9, 900}, 3}, {{16, 16, 12, 1200}, 9}};
    int n = 0;
    for (size_t k = 0; k < LG_ARRAY_LEN(some); k++)
        for (int i = 0; i < some[k].count; i++) size[n++] = some[k].of;
    assert_int_equal(b.of[0].rows, 4);
    lg_order *o = make(&b, (uint64_t)n, 4, 1, 4);
    /* A group of pictures holds 16, of clips 4: 9x12x20 (3) goes to 9x16x16; 5x16x16 and the pictures have nowhere to go. */
    assert_int_equal(lg_order_bucket(o, 0).items, 2);
    assert_int_equal(lg_order_bucket(o, 1).items, 1);
    assert_int_equal(lg_order_bucket(o, 2).items, 0);
    assert_int_equal(lg_order_bucket(o, 3).items, 12);
    lg_order_free(&o);
}

static void test_hash(void **state)
{
    (void)state;
    const struct lg_buckets b = BUCKETS(16, 4, "ratio"), other = BUCKETS(16, 4, "16x16", "32x8");
    draw_sizes(3);
    lg_order *o = make(&b, 100, 2, 1, 4);
    const uint64_t hash = lg_order_hash(o, 7);
    assert_true(hash && hash == lg_order_hash(o, 7) && hash != lg_order_hash(o, 8));
    lg_order_free(&o);
    static const uint64_t cut[][3] = {{1, 1, 4}, {2, 2, 4}, {2, 1, 8}};
    for (size_t i = 0; i < LG_ARRAY_LEN(cut); i++) {
        o = make(&b, 100, cut[i][0], cut[i][1], cut[i][2]);
        assert_true(hash != lg_order_hash(o, 7));
        lg_order_free(&o);
    }
    o = make(&other, 100, 2, 1, 4);
    assert_true(hash != lg_order_hash(o, 7));
    lg_order_free(&o);
    uint64_t wide_or_high[2]; /* one item's bucket */
    for (int i = 0; i < 2; i++) {
        size[50] = (struct lg_item_size){i ? 10 : 60, i ? 60 : 10, 1, 0};
        o = make(&b, 100, 2, 1, 4);
        wide_or_high[i] = lg_order_hash(o, 7);
        lg_order_free(&o);
    }
    assert_true(wide_or_high[0] != wide_or_high[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_item_once), cmocka_unit_test(test_one_bucket_is_the_square),
        cmocka_unit_test(test_shuffled),       cmocka_unit_test(test_small_buckets_are_given_up),
        cmocka_unit_test(test_frames),         cmocka_unit_test(test_frames_given_up),
        cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
