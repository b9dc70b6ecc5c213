/* Window and board under real concurrency: threads over one mapping, for the thread sanitizer
 * (make SAN=thread). Payloads are plain memory: only the rules of window.h order the accesses.
 *
 * A worker "dies" now and then in the middle of a chunk: it stops, and is buried and enlisted anew,
 * as lgsup would do. What it has written must be ordered before what its successor does.
 */
#include "base/clock.h"
#include "shm/window.h"
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANKS = 2, BATCH = 6, SLOTS = 24, WORDS = 8, RUN_MS = 1500, DIE_EVERY = 40 };

static struct lg_board_shared shared;
static lg_board board = {&shared, -1};
static const struct lg_window_geometry geometry = {.slots = SLOTS,
                                                   .batch = BATCH,
                                                   .chunk = {4, 3, 8},
                                                   .pixels_bytes = WORDS * 8,
                                                   .latent_bytes = 2 * WORDS * 8,
                                                   .text = {{.states_bytes = WORDS * 8}}};
static void *memory;
static atomic_bool over;
static atomic_ullong deaths, wrong;

static uint64_t word(lg_field f, uint64_t n, int i)
{
    return n * 1000003 + (uint64_t)f * 101 + (uint64_t)i;
}

static uint64_t *payload(lg_window *w, lg_field f, uint64_t n)
{
    return (uint64_t *)(f == LG_FIELD_SOURCE   ? lg_window_pixels(w, n)
                        : f == LG_FIELD_LATENT ? lg_window_mean(w, n)
                                               : lg_window_states(w, f - LG_FIELD_TEXT, n));
}

static void check(lg_window *w, lg_field f, uint64_t n)
{
    for (int i = 0; i < WORDS; i++)
        if (payload(w, f, n)[i] != word(f, n, i)) atomic_fetch_add(&wrong, 1);
}

struct worker {
    lg_role role;
    int index;
    lg_field field;
    unsigned seed;
};

static lg_incarnation enlist(const struct worker *k)
{
    lg_incarnation me = lg_board_enlist(&board, k->role, k->index);
    atomic_store(&lg_board_row(&board, k->role, k->index)->life,
                 (uint64_t)me << 8 | LG_LIFE_RUNNING); /* no pid: judged by its state */
    return me;
}

/* False: died in the middle. */
static bool fill(struct worker *k, lg_window *w, const struct lg_claim *c)
{
    for (uint64_t n = c->n; n < c->n + c->count; n++) {
        if (!lg_window_wanted(w, c, k->field, n)) continue;
        if (k->field != LG_FIELD_SOURCE) check(w, LG_FIELD_SOURCE, n);
        for (int i = 0; i < WORDS; i++) {
            payload(w, k->field, n)[i] = word(k->field, n, i);
            if (rand_r(&k->seed) % (DIE_EVERY * WORDS) == 0) return false;
        }
        lg_window_publish(w, k->field, n);
    }
    return true;
}

static void *work(void *arg)
{
    struct worker *k = arg;
    lg_window *w;
    LG_ASSERT(lg_window_over(memory, &geometry, &w) == 0);
    lg_incarnation me = enlist(k);
    while (!atomic_load(&over)) {
        struct lg_claim c;
        unsigned needs = k->field == LG_FIELD_SOURCE ? 0 : 1u << LG_FIELD_SOURCE;
        if (lg_window_claim(w, &board, me, k->field, needs, UINT64_MAX / 2, &c) < 0) {
            sched_yield();
            continue;
        }
        if (fill(k, w, &c)) continue;
        lg_board_bury(&board, me);
        atomic_fetch_add(&deaths, 1);
        sched_yield();
        me = enlist(k);
    }
    lg_window_close(&w);
    return NULL;
}

static void *train(void *arg)
{
    struct worker *k = arg;
    _Atomic(lg_mark) *commit = &lg_board_row(&board, LG_ROLE_trainer, k->index)->commit;
    lg_window *w;
    LG_ASSERT(lg_window_over(memory, &geometry, &w) == 0);
    for (uint64_t s = 0; !atomic_load(&over);) {
        uint64_t n = s * BATCH + (uint64_t)k->index * (BATCH / RANKS);
        /* A rank may be one step ahead of the other, as in the step protocol. */
        if (lg_board_global_commit(&board) < lg_mark_of(s) ||
            !lg_window_range_ready(w, 7, n, BATCH / RANKS)) {
            sched_yield();
            continue;
        }
        for (uint64_t i = n; i < n + BATCH / RANKS; i++)
            for (int f = 0; f <= LG_FIELD_TEXT; f++) check(w, (lg_field)f, i);
        atomic_store_explicit(commit, lg_mark_of(++s), memory_order_release);
    }
    lg_window_close(&w);
    return NULL;
}

static void test_threads(void **state)
{
    static struct worker worker[] = {
        {LG_ROLE_loader, 0, LG_FIELD_SOURCE, 1},
        {LG_ROLE_loader, 1, LG_FIELD_SOURCE, 2},
        {LG_ROLE_vae, 0, LG_FIELD_LATENT, 3},
        {LG_ROLE_vae, 1, LG_FIELD_LATENT, 4},
        {LG_ROLE_text, 0, LG_FIELD_TEXT, 5},
        {LG_ROLE_text, 1, LG_FIELD_TEXT, 6},
        {LG_ROLE_trainer, 0, 0, 7},
        {LG_ROLE_trainer, 1, 0, 8},
    };
    pthread_t thread[LG_ARRAY_LEN(worker)];
    size_t bytes = lg_window_bytes(&geometry);
    memory = aligned_alloc(LG_PAGE_BYTES, bytes);
    memset(memory, 0, bytes);
    shared.batch = BATCH;
    shared.ranks = RANKS;
    atomic_store(&shared.next_counter, 1);
    for (int r = 0; r < RANKS; r++)
        atomic_store(&lg_board_row(&board, LG_ROLE_trainer, r)->commit, lg_mark_of(0));
    for (size_t i = 0; i < LG_ARRAY_LEN(worker); i++)
        assert_int_equal(pthread_create(&thread[i], NULL,
                                        worker[i].role == LG_ROLE_trainer ? train : work,
                                        &worker[i]),
                         0);
    int64_t start = lg_now_ns();
    while (lg_now_ns() - start < RUN_MS * LG_MS_NS) sched_yield();
    atomic_store(&over, true);
    for (size_t i = 0; i < LG_ARRAY_LEN(worker); i++) pthread_join(thread[i], NULL);
    uint64_t steps = lg_mark_state(lg_board_global_commit(&board));
    print_message("%llu steps, %llu deaths\n", (unsigned long long)steps,
                  (unsigned long long)atomic_load(&deaths));
    assert_int_equal(atomic_load(&wrong), 0);
    assert_true(steps > 20 && atomic_load(&deaths) > 5);
    free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
