/* lg_permute: a bijection for every count, different between epochs and seeds, spread evenly. */
#include "base/check.h"
#include "stages/io/permute.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void is_bijection(uint64_t seed, uint64_t epoch, uint64_t count)
{
    uint8_t *seen = calloc(count, 1);
    assert_non_null(seen);
    uint64_t applied_sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t applied = 0;
        uint64_t item = lg_permute_walk(seed, epoch, i, count, &applied);
        assert_true(item < count);
        assert_int_equal(seen[item], 0);
        seen[item] = 1;
        applied_sum += applied;
    }
    /* The domain is below 2 * count (4 for the smallest): the sum over all starts is bounded by the
     * size of the domain, since each of its points is visited at most once. */
    assert_true(applied_sum <= (count < 3 ? 4 : 2 * count));
    free(seen);
}

static void test_every_small_count(void **state)
{
    (void)state;
    for (uint64_t count = 1; count <= 130; count++)
        for (uint64_t epoch = 0; epoch < 4; epoch++) is_bijection(7, epoch, count);
}

static void test_around_powers_of_two(void **state)
{
    (void)state;
    for (unsigned bits = 8; bits <= 16; bits += 2)
        for (int d = -1; d <= 1; d++)
            is_bijection(0x1234567890abcdefULL, 3, (1ULL << bits) + (uint64_t)d);
    is_bijection(1, 0, 3655);
}

static void test_epochs_and_seeds_differ(void **state)
{
    (void)state;
    enum { COUNT = 1000 };
    int same_epoch = 0, same_seed = 0, in_place = 0, neighbours = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        uint64_t a = lg_permute(1, 0, i, COUNT);
        same_epoch += a == lg_permute(1, 1, i, COUNT);
        same_seed += a == lg_permute(2, 0, i, COUNT);
        in_place += a == i;
        neighbours += i + 1 < COUNT && lg_permute(1, 0, i + 1, COUNT) == a + 1;
    }
    /* Each is Poisson with mean 1 for random permutations: P(> 10) < 1e-8. */
    assert_true(same_epoch <= 10 && same_seed <= 10 && in_place <= 10 && neighbours <= 10);
}

/* Small counts: over many epochs each item must come first about equally often. */
static void test_first_item_is_uniform(void **state)
{
    (void)state;
    enum { EPOCHS = 6000 };
    for (uint64_t count = 2; count <= 6; count++) {
        int hits[6] = {0};
        for (uint64_t e = 0; e < EPOCHS; e++) hits[lg_permute(99, e, 0, count)]++;
        for (uint64_t i = 0; i < count; i++) {
            double want = (double)EPOCHS / (double)count;
            /* six standard deviations of a binomial count: below sqrt(want) each */
            assert_true((hits[i] - want) * (hits[i] - want) <= 36 * want);
        }
    }
}

static void test_huge_counts(void **state)
{
    (void)state;
    uint64_t counts[] = {1ULL << 32, (1ULL << 40) + 12345, UINT64_MAX};
    for (size_t c = 0; c < LG_ARRAY_LEN(counts); c++)
        for (uint64_t i = 0; i < 1000; i++) {
            uint32_t applied;
            uint64_t position = counts[c] / 1000 * i;
            assert_true(lg_permute_walk(5, 2, position, counts[c], &applied) < counts[c]);
            assert_true(applied < 64); /* geometric with p > 1/2: P < 2^-63 */
        }
}

/* The order of samples decides bits of every run: it must never change by accident. */
static void test_pinned_values(void **state)
{
    (void)state;
    uint64_t got[8];
    for (uint64_t i = 0; i < 8; i++) got[i] = lg_permute(42, 1, i, 3655);
    const uint64_t want[8] = {1481, 2938, 734, 1523, 1818, 1049, 3265, 647};
    assert_memory_equal(got, want, sizeof want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_small_count),
        cmocka_unit_test(test_around_powers_of_two),
        cmocka_unit_test(test_epochs_and_seeds_differ),
        cmocka_unit_test(test_first_item_is_uniform),
        cmocka_unit_test(test_huge_counts),
        cmocka_unit_test(test_pinned_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
