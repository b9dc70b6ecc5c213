/* The memo of an encoder: what is found is what was kept, whatever dies in between and however full it is. */
#include "base/philox.h"
#include "shm/memo.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BYTES = 100, THREADS = 4, INPUTS = 300, ROUNDS = 4000 };

static void payload_of(uint64_t input, uint8_t ret[BYTES])
{
    for (int i = 0; i < BYTES; i++) ret[i] = (uint8_t)(input * 31 + (uint64_t)i * input);
}

static lg_memo new_memo(uint64_t entries)
{
    void *memory = aligned_alloc(64, lg_memo_bytes(entries, BYTES));
    assert_non_null(memory);
    memset(memory, 0, lg_memo_bytes(entries, BYTES));
    return lg_memo_over(memory, entries, BYTES);
}

static bool keep(lg_memo *m, uint64_t input)
{
    void *p = lg_memo_begin(m, lg_memo_key_of(&input, sizeof input));
    if (!p) return false;
    payload_of(input, p);
    lg_memo_end(m, p);
    return true;
}

/* 1: it is there, and right; 0: it is not there; -1: wrong. */
static int look(const lg_memo *m, uint64_t input)
{
    uint8_t want[BYTES];
    const void *p = lg_memo_find(m, lg_memo_key_of(&input, sizeof input));
    if (!p) return 0;
    payload_of(input, want);
    return memcmp(p, want, BYTES) ? -1 : 1;
}

static void test_keeps(void **state)
{
    (void)state;
    lg_memo m = new_memo(2 * INPUTS);
    int kept = 0;
    for (uint64_t i = 0; i < INPUTS; i++) {
        assert_int_equal(look(&m, i), 0);
        const bool is = keep(&m, i);
        kept += is;
        assert_int_equal(look(&m, i), is);
        assert_false(keep(&m, i)); /* once */
    }
    assert_true(kept >= INPUTS - 3);
    for (uint64_t i = 0; i < INPUTS; i++) assert_true(look(&m, i) >= 0);
    free(m.entry);
}

static void test_full(void **state)
{
    (void)state;
    for (uint64_t entries = 1; entries < 9; entries++) {
        lg_memo m = new_memo(entries);
        uint64_t kept = 0, there = 0;
        for (uint64_t i = 0; i < INPUTS; i++) kept += keep(&m, i);
        for (uint64_t i = 0; i < INPUTS; i++) there += look(&m, i) == 1;
        assert_int_equal(kept, entries);
        assert_int_equal(there, entries);
        free(m.entry);
    }
    lg_memo nothing = {0};
    assert_int_equal(look(&nothing, 1), 0);
    assert_false(keep(&nothing, 1));
}

/* Who dies in the middle leaves nothing that is read, and nothing in the way of others. */
static void test_death(void **state)
{
    (void)state;
    lg_memo m = new_memo(8);
    for (uint64_t i = 0; i < 3; i++) {
        uint8_t *p = lg_memo_begin(&m, lg_memo_key_of(&i, sizeof i));
        assert_non_null(p);
        memset(p, 0xee, BYTES / 2);
        assert_int_equal(look(&m, i), 0);
    }
    for (uint64_t i = 0; i < 3; i++) assert_true(keep(&m, i));
    for (uint64_t i = 0; i < 3; i++) assert_int_equal(look(&m, i), 1);
    int more = 0;
    for (uint64_t i = 3; i < 20; i++) more += keep(&m, i);
    assert_int_equal(more, 2); /* three places are gone */
    free(m.entry);
}

struct work {
    lg_memo m;
    uint64_t seed;
    int wrong;
};

static void *use(void *arg)
{
    struct work *w = arg;
    for (uint64_t i = 0; i < ROUNDS; i++) {
        const uint64_t input = lg_philox(w->seed, LG_PURPOSE_TEST, i, 0).v[0] % INPUTS;
        const int found = look(&w->m, input);
        w->wrong += found < 0;
        if (!found) (void)keep(&w->m, input);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    pthread_t thread[THREADS];
    struct work w[THREADS];
    lg_memo m = new_memo(2 * INPUTS);
    for (int i = 0; i < THREADS; i++) {
        w[i] = (struct work){.m = m, .seed = (uint64_t)i};
        assert_int_equal(pthread_create(&thread[i], NULL, use, &w[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        assert_int_equal(w[i].wrong, 0);
    }
    free(m.entry);
}

static void test_sizes(void **state)
{
    (void)state;
    size_t bytes;
    for (size_t room = 0; room < 5000; room += 7) {
        const uint64_t n = lg_memo_entries(room, BYTES);
        assert_true(!n || lg_memo_bytes(n, BYTES) <= room);
        assert_true(lg_memo_bytes(n + 1, BYTES) + 64 > room);
    }
    assert_true(lg_memo_parse("auto", &bytes) && bytes == SIZE_MAX);
    assert_true(lg_memo_parse("0", &bytes) && bytes == 0);
    assert_true(lg_memo_parse("1.5KiB", &bytes) && bytes == 1536);
    assert_false(lg_memo_parse("much", &bytes));
    assert_false(lg_memo_parse("-1", &bytes));
}

static void test_keys(void **state)
{
    (void)state;
    const uint64_t input = 7;
    const struct lg_memo_key key = lg_memo_key_of(&input, sizeof input);
    struct lg_memo_key with[3];
    for (uint64_t i = 0; i < LG_ARRAY_LEN(with); i++) with[i] = lg_memo_key_with(key, i);
    assert_memory_not_equal(&with[0], &key, sizeof key);
    assert_memory_not_equal(&with[0], &with[1], sizeof key);
    assert_memory_not_equal(&with[1], &with[2], sizeof key);
    struct lg_memo_key again = lg_memo_key_with(key, 1);
    assert_memory_equal(&with[1], &again, sizeof key);
    const uint64_t other = 8;
    again = lg_memo_key_with(lg_memo_key_of(&other, sizeof other), 1);
    assert_memory_not_equal(&with[1], &again, sizeof key);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps),   cmocka_unit_test(test_full),  cmocka_unit_test(test_death),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_sizes), cmocka_unit_test(test_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
