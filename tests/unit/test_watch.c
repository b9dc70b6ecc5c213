/* What lgsup finds at its looks: a process that was killed and does not end is said, once, with where it
 * is; while the run ends its status says so, too. And when one that sets up counts as hung. */
#include "base/clock.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervisor_fixture.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static int count_in_log(const char *part)
{
    char *text, *at;
    size_t bytes;
    int n = 0;
    workers_are_done();
    assert_int_equal(lg_read_file(scratch_path("run/logs/lgsup.log"), 1 << 16, &text, &bytes), 0);
    for (at = text; (at = strstr(at, part)); at++) n++;
    free(text);
    return n;
}

static void look(void)
{
    g_super.last_hang_look_ns = 0;
    lg_watch_look(&g_super);
}

static void test_killed_and_still_there(void **state)
{
    (void)state;
    char want[96];
    struct lg_instance *i = add(LG_ROLE_vae, 0);
    snprintf(want, sizeof want, "vae.0 (pid %d) was killed 5 s ago and is still there, in state ",
             i->child.pid);
    look();
    i->killed_ns = lg_now_ns() - 4 * LG_S_NS;
    look();
    assert_int_equal(count_in_log("is still there"), 0);
    i->killed_ns = lg_now_ns() - 6 * LG_S_NS;
    look();
    look();
    assert_int_equal(count_in_log(want), 1);
    assert_int_equal(count_in_log("is still there"), 1);
    assert_string_equal(g_super.board->s->cause, ""); /* the run goes on */
}

static void test_killed_and_still_there_at_the_end(void **state)
{
    (void)state;
    struct lg_instance *i = add(LG_ROLE_vae, 0);
    g_super.step = LG_RUN_STEP_leaving;
    i->state = LG_INSTANCE_leaving;
    i->killed_ns = lg_now_ns() - 6 * LG_S_NS;
    look();
    assert_non_null(strstr(g_super.board->s->cause, "vae.0 (pid "));
    assert_non_null(strstr(g_super.board->s->cause, "does not answer"));
}

/* A look a second and a half after the one before, between which lgsup ran normally. */
static void look_for_hangs(void)
{
    g_super.last_hang_look_ns = lg_now_ns() - 1500 * LG_MS_NS;
    lg_watch_look(&g_super);
}

/* Who sets up has ready_s from its start or its last heartbeat on, whatever its predecessor has left in the row;
 * one look that finds it late is not believed. */
static void test_late_in_its_setup(void **state)
{
    (void)state;
    const int64_t ready_ns = g_super_run.config->supervisor_ready_s * LG_S_NS;
    struct lg_instance *i = add(LG_ROLE_vae, 0);
    struct lg_board_row *row = lg_board_row(g_super.board, LG_ROLE_vae, 0);
    atomic_store(&row->ready, 0);
    i->state = LG_INSTANCE_starting;
    i->spawned_ns = lg_now_ns();
    atomic_store(&row->heartbeat_ns, lg_now_ns() - 10 * ready_ns);
    for (int n = 0; n < 3; n++) look_for_hangs();
    assert_int_equal(i->state, LG_INSTANCE_starting);
    i->spawned_ns -= 2 * ready_ns;
    atomic_store(&row->heartbeat_ns, lg_now_ns());
    for (int n = 0; n < 3; n++) look_for_hangs();
    assert_int_equal(i->state, LG_INSTANCE_starting);
    atomic_store(&row->heartbeat_ns, lg_now_ns() - 2 * ready_ns);
    look_for_hangs();
    assert_int_equal(i->state, LG_INSTANCE_starting);
    look_for_hangs();
    assert_int_equal(i->state, LG_INSTANCE_doomed);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, supervisor_setup, supervisor_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_killed_and_still_there),
        TEST(test_killed_and_still_there_at_the_end),
        TEST(test_late_in_its_setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
