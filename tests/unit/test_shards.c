/* Cuts of the parameters over ranks (stages/trainer/shards.h): every element has one owner in each group, pieces lie
 * where the gradient's squares want them, and no rank holds much more than another. */
#include "stages/trainer/shards.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static lg_params units(const size_t *count, int n)
{
    lg_params t = {0};
    for (int u = 0; u < n; u++) {
        struct lg_param p = {.rank = 1, .dim = {(int64_t)count[u]}};
        lg_params_begin_unit(&t, "unit.%d", u);
        snprintf(p.name, sizeof p.name, "p%d", u);
        lg_params_add(&t, &p);
    }
    return t;
}

static void check_cut(const lg_params *t, int shards)
{
    unsigned char *owners = calloc(t->count, 1);
    size_t total = 0;
    for (int k = 0; k < shards; k++) {
        size_t end = 0;
        for (int u = 0; u < t->n_units; u++) {
            struct lg_piece p = lg_shard_piece(t, u, k, shards);
            assert_int_equal(p.at, end);
            if (p.count) assert_int_equal(p.first % LG_UNIT_ALIGN, 0);
            if (p.count) assert_int_equal(p.at % LG_UNIT_ALIGN, 0);
            assert_true(p.first >= t->unit[u].first);
            assert_true(p.first + p.count <= t->unit[u].first + t->unit[u].count);
            for (size_t i = 0; i < p.count; i++) owners[p.first + i]++;
            end += p.count;
        }
        assert_int_equal(lg_shard_count(t, k, shards), end);
        total += end;
        /* Even but for one step of the alignment a unit. */
        assert_true(end <= t->count / (size_t)shards + (size_t)t->n_units * LG_UNIT_ALIGN);
    }
    assert_int_equal(total, t->count);
    for (size_t i = 0; i < t->count; i++) assert_int_equal(owners[i], 1);
    free(owners);
}

static void test_cuts(void **state)
{
    (void)state;
    static const size_t count[] = {5, 70000, 4096, 40961, 3, 12288, 100};
    lg_params t = units(count, 7);
    for (int shards = 1; shards <= 9; shards++) check_cut(&t, shards);
    lg_params_free(&t);
}

/* One shard is the flat buffer itself. */
static void test_whole(void **state)
{
    (void)state;
    static const size_t count[] = {5, 70000, 40961};
    lg_params t = units(count, 3);
    for (int u = 0; u < 3; u++) {
        struct lg_piece p = lg_shard_piece(&t, u, 0, 1);
        assert_int_equal(p.first, p.at);
        assert_int_equal(p.count, t.unit[u].count);
    }
    lg_params_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cuts), cmocka_unit_test(test_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
