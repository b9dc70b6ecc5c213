/* Whole lives of a run: to its end, stopped and started again, ends of every kind. */
#include "base/fs.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_whole_run(void **state)
{
    (void)state;
    assert_exit(RUN("start", g_file), 0);
    assert_state("done", 60);
    assert_output("every role is ready");
    assert_output("fake: done");
    assert_nobody_left();
    assert_true(lg_path_exists(scratch_path("run/checkpoints/fake_step20/manifest.json")));
    assert_true(lg_path_exists(scratch_path("run/checkpoints/fake_step60/manifest.json")));
    assert_true(lg_path_exists(scratch_path("run/samples/step60.png")));
    assert_int_equal(instance("vae", 1)->restarts, 0);
    assert_exit(RUN("verify", g_run), 0);
    assert_exit(RUN("status", "--json", g_run), 0);
    assert_output("\"state\":\t\"done\"");
    assert_exit(RUN("start", g_file), 0); /* nothing left to do */
    assert_output("nothing to do");
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=80"), 0);
    assert_output("resuming fake at step 60");
    assert_state("done", 80);
    assert_exit(RUN("verify", g_run), 0);
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=90", "--set", "job.seed=7"), 10);
    assert_output("job.seed");
}

static void test_stop_and_second_start(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(30);
    assert_exit(RUN("start", g_file), 7);
    assert_output("already supervised");
    end_by_stop();
    uint64_t step = g_status.step;
    assert_true(step >= 30 && step < 100000);
    assert_exit(RUN("stop", g_run), 0); /* nothing runs: fine */
    assert_output("nothing runs here");
    char set[64];
    snprintf(set, sizeof set, "trainer.max_steps=%d", (int)step + 40);
    assert_exit(RUN("start", g_file, "--set", set), 10); /* may only grow */
    assert_output("trainer.max_steps");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100001");
    wait_for_step(step + 10);
    assert_output("resuming fake at step");
    kill(g_lgsup, SIGINT); /* Ctrl-C drains as well */
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_exit(RUN("verify", g_run), 0);
}

static void test_interrupt_twice(void **state)
{
    (void)state;
    scratch_write("run/fault", "ckpt 0 unready"); /* the drain cannot end */
    g_lgsup = LAUNCH("start", g_file);
    wait_for_step(20);
    kill(g_lgsup, SIGINT);
    wait_for_output("stopping:");
    kill(g_lgsup, SIGINT); /* within a second: the same interrupt */
    usleep(1100000);
    assert_false(output_has("fake: failed"));
    kill(g_lgsup, SIGINT);
    assert_exit(exit_of(g_lgsup), 130);
    g_lgsup = 0;
    assert_state("failed", 0);
    assert_nobody_left();
}

static void test_crash_loop_parks(void **state)
{
    (void)state;
    scratch_write("run/fault", "trainer 1 crash");
    assert_exit(RUN("start", g_file), 11);
    assert_state("parked", 0);
    assert_non_null(strstr(g_status.cause, "trainer.1"));
    assert_non_null(strstr(g_status.cause, "weights are damaged"));
    assert_nobody_left();
    unlink(scratch_path("run/fault"));
    assert_exit(RUN("start", g_file), 0);
    assert_state("done", 60);
}

static void test_a_stage_parks_the_run(void **state)
{
    (void)state;
    scratch_write("run/fault", "loader 0 park");
    assert_exit(RUN("start", g_file), 11);
    assert_state("parked", 0);
    assert_non_null(strstr(g_status.cause, "the data set is empty"));
    assert_int_equal(instance("loader", 0)->restarts, 0);
    scratch_write("run/fault", "trainer 0 crash"); /* never ready: --detach tells why */
    assert_exit(RUN("start", g_file, "--detach"), 11);
    assert_output("the weights are damaged");
}

static void test_unwritable(void **state)
{
    (void)state;
    scratch_write("file", "in the way");
    char set[LG_PATH_BYTES + 16];
    snprintf(set, sizeof set, "job.dir=%s/run", scratch_path("file"));
    assert_exit(RUN("start", g_file, "--set", set), 4);
    assert_output("cannot be written");
    assert_output("job.dir");
}

static void test_missing_program(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=400");
    wait_for_step(3);
    unlink(scratch_path("bin/lg-trainer"));
    kill_one("trainer", 0);
    assert_exit(exit_of(g_lgsup), 11); /* it ran and cannot be replaced */
    g_lgsup = 0;
    assert_output("lg-trainer");
    /* Nothing is started, and the kept memory stays. */
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=400"), 8);
    assert_output("lg-trainer is missing or not executable");
    assert_true(read_status() && g_status.memory_kept);
    assert_exit(RUN("stop", g_run), 0);
    assert_nobody_left();
}

static void test_check(void **state)
{
    (void)state;
    assert_exit(RUN("check", g_file), 0);
    assert_output("fake/0/scratch");
    assert_output("its claimed chunks");
    assert_exit(RUN("check", g_file, "--set", "trainer.maxsteps=3"), 3);
    assert_output("max_steps");
    assert_false(lg_path_exists(g_run)); /* check leaves nothing behind */
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        LGSUP_TEST(test_whole_run),
        LGSUP_TEST(test_stop_and_second_start),
        LGSUP_TEST(test_interrupt_twice),
        LGSUP_TEST(test_crash_loop_parks),
        LGSUP_TEST(test_a_stage_parks_the_run),
        LGSUP_TEST(test_unwritable),
        LGSUP_TEST(test_missing_program),
        LGSUP_TEST(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
