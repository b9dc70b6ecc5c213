/* How often each role may die: its own section's word, else the supervisor's; counted by it. And which
 * deaths are failures, and when there are too many of these in a row. */
#include "base/clock.h"
#include "supervisor/core/intensity.h"
#include "supervisor/run/child.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <signal.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_config *load(const char *text)
{
    lg_config *c = NULL;
    if (lg_config_load(scratch_write("p.toml", text), NULL, 0, &c) < 0)
        fail_msg("%s", lg_err_text());
    return c;
}

static void assert_policy(const lg_config *c, const char *role, int64_t deaths_max,
                          int64_t window_s)
{
    struct lg_restart_policy p = lg_restart_policy(c, (lg_role)lg_role_find(role));
    if (p.deaths_max != deaths_max || p.window_s != window_s)
        fail_msg("%s: %lld in %lld s", role, (long long)p.deaths_max, (long long)p.window_s);
}

static const char *const roles[] = {"loader", "text", "vae", "trainer", "ema", "ckpt"};

static void test_the_supervisors(void **state)
{
    (void)state;
    lg_config *c = load("[supervisor]\nrestarts_max = 7\nrestart_window_s = 90\n");
    for (size_t r = 0; r < LG_ARRAY_LEN(roles); r++) assert_policy(c, roles[r], 7, 90);
    lg_config_free(&c);
}

/* Each role's number is another, so that none can be taken for its neighbour's. */
static void test_of_its_own(void **state)
{
    (void)state;
    lg_config *c = load("[loader]\nrestarts_max = 11\n[text]\nrestarts_max = 12\n"
                        "[vae]\nrestarts_max = 13\nrestart_window_s = 33\n"
                        "[trainer]\nrestarts_max = 14\n[ema]\nrestarts_max = 15\n"
                        "[checkpoint]\nrestart_window_s = 36\n");
    assert_policy(c, "loader", 11, 60);
    assert_policy(c, "text", 12, 60);
    assert_policy(c, "vae", 13, 33);
    assert_policy(c, "trainer", 14, 60);
    assert_policy(c, "ema", 15, 60);
    assert_policy(c, "ckpt", 5, 36);
    lg_config_free(&c);
}

static void test_counts(void **state)
{
    (void)state;
    lg_config *c = load("[vae]\nrestarts_max = 1\nrestart_window_s = 10\n");
    struct lg_restart_policy p = lg_restart_policy(c, LG_ROLE_vae);
    struct lg_intensity t;
    assert_int_equal(lg_intensity_init(&t, p.deaths_max, p.window_s), 0);
    assert_false(lg_intensity_exceeded(&t, 0, 3));
    assert_true(lg_intensity_exceeded(&t, 10 * LG_S_NS, 3));
    assert_false(lg_intensity_exceeded(&t, 11 * LG_S_NS, 3)); /* the first is too old */
    lg_intensity_free(&t);
    lg_config_free(&c);
}

enum { KILLED = LG_EXIT_SIGNAL + SIGKILL, CRASHED = LG_EXIT_SIGNAL + SIGSEGV };

static void test_what_is_a_failure(void **state)
{
    (void)state;
    static const struct {
        struct lg_death death;
        bool failure;
    } all[] = {
        /* Idle, ended from outside: an operator, a campaign. */
        {{.exit_code = KILLED, .ready = true, .phase = LG_PHASE_WAITING}, false},
        {{.exit_code = KILLED, .ready = true, .phase = LG_PHASE_DONE}, false},
        {{.exit_code = LG_EXIT_UNKNOWN, .ready = true, .phase = LG_PHASE_WAITING}, false},
        /* SIGTERM: it goes between two pieces of work. */
        {{.exit_code = 0, .ready = true, .phase = LG_PHASE_WAITING}, false},
        {{.exit_code = 0, .ready = true, .phase = LG_PHASE_WORKING}, false},
        /* At work: it may have been the kernel, for memory. */
        {{.exit_code = KILLED, .ready = true, .phase = LG_PHASE_WORKING}, true},
        {{.exit_code = LG_EXIT_UNKNOWN, .ready = true, .phase = LG_PHASE_WORKING}, true},
        /* Before it was ready; it may wait for another that fills a region. */
        {{.exit_code = KILLED, .phase = LG_PHASE_SETUP}, true},
        {{.exit_code = KILLED, .phase = LG_PHASE_WAITING}, true},
        {{.exit_code = 0, .phase = LG_PHASE_WAITING}, true},
        /* By itself. */
        {{.exit_code = 4, .ready = true, .phase = LG_PHASE_WORKING}, true},
        {{.exit_code = 4, .ready = true, .phase = LG_PHASE_WAITING}, true},
        {{.exit_code = CRASHED, .ready = true, .phase = LG_PHASE_WAITING}, true},
        /* It hung. */
        {{.exit_code = KILLED, .late = true, .ready = true, .phase = LG_PHASE_WAITING}, true},
        {{.exit_code = KILLED, .late = true, .ready = true, .phase = LG_PHASE_WORKING}, true},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++)
        if (lg_death_is_failure(&all[i].death) != all[i].failure) fail_msg("line %zu", i);
}

static void test_failures_in_a_row(void **state)
{
    (void)state;
    struct lg_failures t = {0};
    struct lg_death idle = {.exit_code = KILLED, .ready = true, .phase = LG_PHASE_WAITING};
    struct lg_death d = {.exit_code = KILLED, .late = true, .ready = true, .lived_ns = 500};
    assert_false(lg_failures_exceeded(&t, 2, &d));
    d.lived_ns = 120 * LG_S_NS; /* hours may lie between them: only the number counts */
    assert_false(lg_failures_exceeded(&t, 2, &d));
    for (int i = 0; i < 10; i++) assert_false(lg_failures_exceeded(&t, 2, &idle));
    d.lived_ns = 125 * LG_S_NS;
    assert_true(lg_failures_exceeded(&t, 2, &d)); /* the idle deaths changed nothing */
    assert_int_equal(t.count, 3);
    assert_true(t.shortest_ns == 120 * LG_S_NS && t.longest_ns == 125 * LG_S_NS);
    /* It got something done, then dies idle: the row is over all the same. */
    idle.progress = d.progress = 1;
    assert_false(lg_failures_exceeded(&t, 2, &idle));
    assert_int_equal(t.count, 0);
    for (d.progress = 2; d.progress < 100; d.progress++)
        assert_false(lg_failures_exceeded(&t, 1, &d)); /* between any two it gets something done */
    d.progress--;
    assert_true(lg_failures_exceeded(&t, 1, &d));
}

static void test_own_progress(void **state)
{
    (void)state;
    struct lg_board_row row = {0};
    _Atomic(lg_mark) *const mark[] = {&row.grads,          &row.partial, &row.commit,
                                      &row.staged_moments, &row.staged,  &row.published};
    for (size_t i = 0; i < LG_ARRAY_LEN(mark); i++)
        for (int r = 0; r < LG_ROLE_keeper; r++) {
            uint64_t before = lg_own_progress(&row, (lg_role)r);
            bool by_samples =
                r == LG_ROLE_loader || lg_role_is_text((lg_role)r) || r == LG_ROLE_vae;
            atomic_fetch_add(mark[i], 1);
            assert_int_equal(lg_own_progress(&row, (lg_role)r), before + !by_samples);
            atomic_fetch_add(&row.samples, 7);
            assert_int_equal(lg_own_progress(&row, (lg_role)r), before + (by_samples ? 7 : 1));
        }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_the_supervisors),   TEST(test_of_its_own),        TEST(test_counts),
        TEST(test_what_is_a_failure), TEST(test_failures_in_a_row), TEST(test_own_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
