/* What a later lgsup finds: processes to adopt, memory of a parked run, or neither. */
#include "base/fs.h"
#include "shm/keeper.h"
#include "supervisor/core/keep.h"
#include "supervisor/core/supervise.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* lgsup dies; training goes on; a stage and even the keeper die meanwhile; a new lgsup adopts. */
static void adopt_after(const char *victim)
{
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    wait_for_output("every role is ready");
    int ema = instance("ema", 0)->pid, trainer = instance("trainer", 0)->pid;
    lg_board *b = NULL;
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    kill_lgsup();
    uint32_t members = atomic_load(&b->s->members_epoch);
    wait_for_step(g_status.step + 10);
    assert_string_equal(g_status.state, "running");
    assert_string_equal(instance("lgsup", 0)->state, "dead");
    if (victim) kill_one(victim, 0);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted");
    wait_for_step(g_status.step + 5);
    /* All look again who is there: said after "adopted", and steps may be ahead of what status has said. */
    for (int look = 0; look < LOOKS_MAX && atomic_load(&b->s->members_epoch) == members; look++)
        usleep(LOOK_US);
    assert_true(atomic_load(&b->s->members_epoch) != members);
    lg_board_close(&b);
    assert_int_equal(instance("ema", 0)->pid, ema);
    if (!victim || strcmp(victim, "trainer") != 0)
        assert_int_equal(instance("trainer", 0)->pid, trainer);
    kill_one("trainer", 1); /* its memory is still kept */
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

/* `start --detach` on an orphaned run returns when it is adopted and everybody is ready. */
static void test_adopt_detached(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    wait_for_step(3);
    kill_lgsup();
    assert_exit(RUN("start", g_file, "--detach"), 0);
    assert_state("running", 0);
    assert_int_equal(instance("lgsup", 0)->restarts, 1);
    assert_exit(RUN("start", g_file, "--detach"), 7);
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
}

static void test_adopt(void **state)
{
    (void)state;
    adopt_after(NULL);
}

static void test_adopt_with_a_dead_trainer(void **state)
{
    (void)state;
    adopt_after("trainer");
}

static void test_adopt_with_a_dead_keeper(void **state)
{
    (void)state;
    adopt_after("keeper");
}

/* As lgsup names a keeper before it begins. */
static void name_keeper(pid_t pid)
{
    lg_board *b = NULL;
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    lg_board_enter(b, lg_keep_enlist(b), pid, lg_process_start_time(pid));
    lg_board_close(&b);
}

/* An lgsup that dies between making a keeper visible and saying that it is the run's leaves one that the board
 * names: the next lgsup takes it over, and stages deposit there what it lacks. */
static void test_adopt_a_keeper_that_is_not_ready(void **state)
{
    (void)state;
    char socket[LG_PATH_BYTES];
    static lg_run run;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    wait_for_output("every role is ready");
    lg_run_init(&run, g_run);
    assert_int_equal(lg_run_runtime_load(&run), 0);
    snprintf(socket, sizeof socket, "%.4000s/keeper", run.runtime_dir);
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    uint32_t regions = 0;
    while (lg_keeper_list(socket, regions, name, &bytes) == 0) regions++;
    assert_true(regions > 0);
    kill_lgsup();
    kill_one("keeper", 0);
    pid_t stray = fork();
    if (stray == 0) _exit(lg_keeper_serve(socket, -1) < 0);
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (lg_keeper_list(socket, 0, name, &bytes) == LG_ERR_NOTFOUND) break;
    name_keeper(stray);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted");
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (lg_keeper_list(socket, regions - 1, name, &bytes) == 0) break;
    kill_one("trainer", 1); /* its memory is still kept: that of all has been given again */
    wait_for_step(g_status.step + 10);
    assert_int_equal(instance("keeper", 0)->pid, stray);
    end_by_stop();
    assert_int_equal(waitpid(stray, NULL, 0), stray);
    assert_nobody_left();
}

/* One that was stopped before it could listen is ended, and another takes the place. */
static void test_adopt_ends_a_keeper_that_has_not_begun(void **state)
{
    (void)state;
    int status = 0;
    start_long();
    kill_lgsup();
    kill_one("keeper", 0);
    pid_t stopped = fork();
    if (stopped == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        raise(SIGSTOP);
        _exit(0);
    }
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)stopped, &info, WSTOPPED | WNOWAIT), 0);
    name_keeper(stopped);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("lgsup died while it started it");
    wait_for_output("adopted");
    assert_int_equal(waitpid(stopped, &status, 0), stopped);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    kill_one("trainer", 1);
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_nobody_left();
}

/* One that nobody can reach, as its socket was removed: it goes with the run. */
static void test_a_lost_keeper_ends_with_the_run(void **state)
{
    (void)state;
    static lg_run run;
    char socket[LG_PATH_BYTES + 16], name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd, status = 0;
    start_long();
    lg_run_init(&run, g_run);
    assert_int_equal(lg_run_runtime_load(&run), 0);
    snprintf(socket, sizeof socket, "%s/keeper", run.runtime_dir);
    assert_int_equal(lg_keeper_list(socket, 0, name, &bytes), 0);
    assert_int_equal(lg_keeper_get(socket, name, &bytes, &fd), 0);
    pid_t lost = fork();
    if (lost == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_NAME, "lg-keeper");
        for (;;) pause();
    }
    close(fd);
    end_by_stop();
    assert_int_equal(waitpid(lost, &status, WNOHANG), lost);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Memory that nobody holds any more: back to the checkpoint, not on with zeros. */
static void test_lost_memory(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(45);
    kill_lgsup();
    kill_one("keeper", 0);
    kill_one("trainer", 1);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("resuming fake at step");
    assert_output("starting again from the newest checkpoint");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

/* A keeper that cannot be asked holds what nobody else does: it is read from its fds at once, because it
 * may be dead at the next look. */
static void test_adopt_with_a_frozen_keeper(void **state)
{
    (void)state;
    start_long();
    kill_lgsup();
    const struct lg_status_instance *keeper = read_status() ? instance("keeper", 0) : NULL;
    assert_true(keeper && keeper->pid);
    int pid = keeper->pid;
    kill(pid, SIGSTOP);
    kill_one("trainer", 1);
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted 8 of 9 processes and 11 regions");
    kill(pid, SIGKILL);
    wait_for_step(g_status.step + 10);
    assert_false(output_has("starting again"));
    end_by_stop();
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_stop_of_an_orphan(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    kill_lgsup();
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_everything_dies(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(45);
    kill_run();
    g_lgsup = 0;
    assert_state("failed", 0);
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=100000", "--detach"), 0);
    wait_for_step(g_status.step + 1);
    assert_state("running", 0);
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
}

/* A rank that cannot start any more, in a run that has come somewhere. */
static void park(void)
{
    wait_for_step(30);
    scratch_write("run/fault", "trainer 1 crash");
    kill_one("trainer", 1);
    assert_exit(exit_of(g_lgsup), 11);
    g_lgsup = 0;
    unlink(scratch_path("run/fault"));
    assert_state("parked", 0);
    assert_true(g_status.memory_kept);
    assert_output("memory is kept");
    unlink(g_out);
}

static void test_parked_memory(void **state)
{
    (void)state;
    start_long();
    park();
    while (g_status.step % 20 ==
           0) { /* a checkpoint is there: nothing would be lost; park elsewhere */
        unlink(g_out);
        g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
        wait_for_output("every role is ready");
        park();
    }
    uint64_t at = g_status.step;
    char says[64];
    snprintf(says, sizeof says, "going on with fake at step %d from memory", (int)at);
    g_lgsup =
        LAUNCH("start", g_file, "--set", "trainer.max_steps=100001", "--set", "vae.instances=3");
    wait_for_output(says);
    wait_for_output("every role is ready");
    wait_for_step(at + 20); /* from the very numbers that were there, or it would park */
    assert_int_equal(count_of("vae"), 3);
    assert_int_equal(g_status.max_steps, 100001);
    park();
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=100001", "--set", "job.seed=5"),
                10);
    assert_true(read_status() && g_status.memory_kept); /* a refused start touches nothing */
    assert_exit(RUN("stop", g_run), 0);
    assert_output("its memory has been let go");
    assert_state("stopped", 0);
    assert_nobody_left();
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100001");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_parked_memory_is_gone(void **state)
{
    (void)state;
    start_long();
    park();
    kill_one("keeper", 0);
    for (int i = 0; i < 1000 && read_status() && g_status.memory_kept; i++) usleep(2000);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("the parked run's memory cannot be used: its keeper has died");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    assert_true(read_status());
    wait_for_step(g_status.step + 1); /* else there is nothing that a checkpoint does not give */
    park();
    g_lgsup =
        LAUNCH("start", g_file, "--set", "trainer.max_steps=100000", "--set", "window.batches=8");
    wait_for_output("the window (window.batches) has changed");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        LGSUP_TEST(test_adopt_detached),
        LGSUP_TEST(test_adopt),
        LGSUP_TEST(test_adopt_with_a_dead_trainer),
        LGSUP_TEST(test_adopt_with_a_dead_keeper),
        LGSUP_TEST(test_adopt_a_keeper_that_is_not_ready),
        LGSUP_TEST(test_adopt_ends_a_keeper_that_has_not_begun),
        LGSUP_TEST(test_a_lost_keeper_ends_with_the_run),
        LGSUP_TEST(test_lost_memory),
        LGSUP_TEST(test_adopt_with_a_frozen_keeper),
        LGSUP_TEST(test_stop_of_an_orphan),
        LGSUP_TEST(test_everything_dies),
        LGSUP_TEST(test_parked_memory),
        LGSUP_TEST(test_parked_memory_is_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
