/* The order of samples of several sources: one of them alone is a data.path's, shares hold in every stretch, each source walks
 * through its items by itself. */
#include "stages/io/mixture.h"
#include "stages/io/permute.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ITEMS_MAX = 64, SOURCES_MAX = 4 };

static struct lg_mixture make(const struct lg_mixture_source *source, int n)
{
    struct lg_mixture m;
    assert_int_equal(lg_mixture_make(source, n, &m), 0);
    return m;
}

static void test_one_source(void **state)
{
    (void)state;
    const struct lg_mixture_source kinds[] = {{.items = 7, .repeats = 1},
                                              {.items = 7, .repeats = 5},
                                              {.items = 7, .repeats = 1, .weight = 0.3}};
    for (size_t k = 0; k < LG_ARRAY_LEN(kinds); k++) {
        const struct lg_mixture m = make(&kinds[k], 1);
        struct lg_mixture_key key = {.seed = 5, .first = 3, .epoch = 2};
        for (uint64_t n = 3; n < 40; n++) {
            const uint64_t epoch = 2 + (n - 3) / 7;
            struct lg_mixture_place at = lg_mixture_at(&m, &key, n);
            assert_int_equal(at.item, lg_permute(5, epoch, (n - 3) % 7, 7));
            assert_int_equal(at.epoch, epoch);
            key.no_shuffle = true;
            at = lg_mixture_at(&m, &key, n);
            assert_int_equal(at.item, (n - 3) % 7);
            key.no_shuffle = false;
        }
        assert_true(lg_mixture_share(&m, 0) == 1);
    }
}

/* Walks `samples` samples: each source's share holds at every one of them, and none of its items comes again before all have. */
static void walk(const struct lg_mixture_source *source, int n, const double *share,
                 uint64_t samples)
{
    const struct lg_mixture m = make(source, n);
    const struct lg_mixture_key key = {.seed = 9, .first = 64, .epoch = 3};
    uint64_t times[SOURCES_MAX][ITEMS_MAX] = {{0}}, had[SOURCES_MAX] = {0};
    for (uint64_t t = 0; t < samples; t++) {
        const struct lg_mixture_place at = lg_mixture_at(&m, &key, 64 + t);
        const int i = at.source;
        uint64_t first = 0;
        for (int k = 0; k < i; k++) first += source[k].items;
        assert_in_range(at.item, first, first + source[i].items - 1);
        const uint64_t pass = had[i] / source[i].items;
        assert_int_equal(at.epoch, 3 + pass);
        assert_int_equal(times[i][at.item - first]++, pass);
        had[i]++;
        for (int k = 0; k < n; k++) {
            assert_int_equal(lg_mixture_count(&m, k, t + 1), had[k]);
            /* Each floor takes less than one from the count, and hands less than one on to those behind it. */
            if (fabs((double)had[k] - share[k] * (double)(t + 1)) > k + 1)
                fail_msg("source %d had %d of %d samples", k, (int)had[k], (int)t + 1);
        }
    }
    for (int k = 0; k < n; k++) assert_true(fabs(lg_mixture_share(&m, k) - share[k]) < 1e-12);
}

static void test_shares(void **state)
{
    (void)state;
    const struct lg_mixture_source repeats[] = {
        {.items = 13, .repeats = 1}, {.items = 3, .repeats = 10}, {.items = 5, .repeats = 2}};
    walk(repeats, 3, (double[]){13. / 53, 30. / 53, 10. / 53}, 530);
    const struct lg_mixture_source weights[] = {{.items = 50, .repeats = 1, .weight = 2},
                                                {.items = 7, .repeats = 1, .weight = 1},
                                                {.items = 1, .repeats = 1, .weight = 5}};
    walk(weights, 3, (double[]){0.25, 0.125, 0.625}, 1000);
    const struct lg_mixture_source both[] = {{.items = 6, .repeats = 10},
                                             {.items = 40, .repeats = 1, .weight = 0.9},
                                             {.items = 20, .repeats = 2},
                                             {.items = 2, .repeats = 1, .weight = 0.05}};
    walk(both, 4, (double[]){0.03, 0.9, 0.02, 0.05}, 4000);
}

/* After items x repeats samples of all, each item has come as often as it is repeated, whatever the numbers. */
static void test_epochs_are_exact(void **state)
{
    (void)state;
    for (uint64_t a = 1; a <= 9; a++)
        for (uint64_t b = 1; b <= 9; b++)
            for (uint64_t repeats = 1; repeats <= 4; repeats++) {
                const struct lg_mixture_source s[] = {{.items = a, .repeats = repeats},
                                                      {.items = b, .repeats = 1},
                                                      {.items = a + b, .repeats = 3}};
                const struct lg_mixture m = make(s, 3);
                uint64_t times[ITEMS_MAX] = {0};
                const uint64_t epoch = a * repeats + b + 3 * (a + b);
                for (uint64_t n = 0; n < 2 * epoch; n++)
                    times[lg_mixture_at(&m, &(struct lg_mixture_key){.seed = 1}, n).item]++;
                for (uint64_t i = 0; i < 2 * (a + b); i++)
                    assert_int_equal(times[i], 2 * (i < a ? repeats : i < a + b ? 1 : 3));
            }
}

/* Another source, another pass, another part of the run: another permutation. */
static void test_keys_differ(void **state)
{
    (void)state;
    enum { COUNT = 40 };
    const struct lg_mixture_source s[] = {{.items = COUNT, .repeats = 1},
                                          {.items = COUNT, .repeats = 1}};
    const struct lg_mixture m = make(s, 2);
    uint64_t order[6][COUNT];
    for (int part = 0; part < 2; part++) {
        const struct lg_mixture_key key = {.seed = 1, .first = (uint64_t)part * 1024};
        for (uint64_t t = 0, had[2] = {0}; t < 4 * COUNT; t++) {
            const struct lg_mixture_place at = lg_mixture_at(&m, &key, key.first + t);
            const uint64_t k = had[at.source]++, pass = k / COUNT;
            if (part && pass) continue;
            order[part ? 4 + at.source : 2 * at.source + (int)pass][k % COUNT] = at.item % COUNT;
        }
    }
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < i; k++) assert_memory_not_equal(order[i], order[k], sizeof *order);
}

static void test_too_much(void **state)
{
    (void)state;
    struct lg_mixture m;
    const struct lg_mixture_source many[] = {{.items = UINT64_C(1) << 40, .repeats = 10000},
                                             {.items = 7, .repeats = 1, .weight = 0.123457}};
    assert_int_equal(lg_mixture_make(many, 2, &m), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "cannot be counted"));
    /* Rounded to millionths nothing is left. */
    const struct lg_mixture_source all[] = {{.items = 7, .repeats = 1},
                                            {.items = 7, .repeats = 1, .weight = 0.9999996}};
    assert_int_equal(lg_mixture_make(all, 2, &m), LG_ERR_CONFIG);
    /* Far along in a run nothing overflows. */
    const struct lg_mixture_source large[] = {{.items = 4000000000, .repeats = 1000},
                                              {.items = 3999999999, .repeats = 999}};
    m = make(large, 2);
    const uint64_t t = (UINT64_C(1) << 62) - 1;
    assert_int_equal(lg_mixture_count(&m, 0, t) + lg_mixture_count(&m, 1, t), t);
    assert_in_range(lg_mixture_at(&m, &(struct lg_mixture_key){.seed = 1}, t).item, 0, 7999999998);
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_source),       cmocka_unit_test(test_shares),
        cmocka_unit_test(test_epochs_are_exact), cmocka_unit_test(test_keys_differ),
        cmocka_unit_test(test_too_much),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
