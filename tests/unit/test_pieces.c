/* Work in pieces (base/pieces.h): each element once, none beyond, whatever the sizes; with signals as they were. */
#include "base/check.h"
#include "base/heartbeat.h"
#include "base/pieces.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

struct seen {
    _Atomic int times[1000];
    _Atomic size_t most;
};

static void see(void *arg, size_t at, size_t n)
{
    struct seen *s = arg;
    if (n > atomic_load(&s->most)) atomic_store(&s->most, n);
    for (size_t i = at; i < at + n; i++) atomic_fetch_add(&s->times[i], 1);
}

static void test_each_once(void **state)
{
    static const size_t counts[] = {0, 1, 7, 8, 9, 999, 1000}, pieces[] = {1, 8, 1000, 5000};
    (void)state;
    for (size_t c = 0; c < LG_ARRAY_LEN(counts); c++)
        for (size_t p = 0; p < LG_ARRAY_LEN(pieces); p++) {
            struct seen *s = calloc(1, sizeof *s);
            lg_pieces_make(
                &(struct lg_pieces){.count = counts[c], .piece = pieces[p], .make = see, .arg = s});
            assert_true(s->most <= pieces[p]);
            for (size_t i = 0; i < 1000; i++) assert_int_equal(s->times[i], i < counts[c]);
            free(s);
        }
}

struct threads {
    pthread_t caller;
    _Atomic int callers, helpers,
        open_helpers; /* pieces of the caller, of others, of others that take signals */
};

static void look_at_mask(void *arg, size_t at, size_t n)
{
    struct threads *t = arg;
    sigset_t now;
    (void)at, (void)n;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    if (pthread_equal(pthread_self(), t->caller)) {
        atomic_fetch_add(&t->callers, 1);
        return;
    }
    atomic_fetch_add(&t->helpers, 1);
    if (!sigismember(&now, SIGTERM)) atomic_fetch_add(&t->open_helpers, 1);
}

static void beat(void *arg)
{
    ++*(int *)arg;
}

/* The calling thread makes pieces too, and beats; a signal that is sent to the process meets no other. */
static void test_caller(void **state)
{
    struct threads t = {.caller = pthread_self()};
    int beats = 0;
    sigset_t now;
    (void)state;
    lg_heartbeat_set(beat, &beats);
    const struct lg_pieces p = {.count = 64, .piece = 1, .make = look_at_mask, .arg = &t};
    for (int i = 0; i < 1000 && (!t.callers || !t.helpers); i++) lg_pieces_make(&p);
    lg_heartbeat_set(NULL, NULL);
    assert_true(t.callers > 0);
    assert_int_equal(beats, t.callers);
    assert_int_equal(t.open_helpers, 0);
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    assert_false(sigismember(&now, SIGTERM));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_once),
                                       cmocka_unit_test(test_caller)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
