/* `lgsup stop` and `lgsup start` beside a run that is in other hands, or in nobody's: what they say and
 * their exit codes. The other lgsup is a process of the test that holds the lock. */
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run g_run;
static lg_board *g_board;
static char g_dir[LG_PATH_BYTES], g_file[LG_PATH_BYTES];
static pid_t g_other;

static int setup(void **state)
{
    command_setup(state);
    command_roles();
    snprintf(g_file, sizeof g_file, "%s", command_pipeline(""));
    command_run(g_file, &g_run, &g_board);
    snprintf(g_dir, sizeof g_dir, "%s", g_run.dir);
    g_other = 0;
    return 0;
}

static int teardown(void **state)
{
    if (g_other) {
        kill(g_other, SIGKILL);
        waitpid(g_other, NULL, 0);
    }
    lg_board_close(&g_board);
    lg_run_close(&g_run);
    return command_teardown(state);
}

/* An lgsup without a socket: a signal reaches it. It ends the run in this state. */
static void be_lgsup(lg_run_state outcome, int ready_fd)
{
    sigset_t hup;
    int sig;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigemptyset(&hup);
    sigaddset(&hup, SIGHUP);
    sigprocmask(SIG_BLOCK, &hup, NULL);
    LG_ASSERT(lg_run_lock(&g_run) == 0 && write(ready_fd, "", 1) == 1);
    LG_ASSERT(sigwait(&hup, &sig) == 0);
    if (outcome >= LG_RUN_PARKED) strcpy(g_board->s->cause, "vae.0 died 4 times");
    atomic_store(&g_board->s->run_state, outcome);
    scratch_exit(0);
}

static void start_other(lg_run_state outcome)
{
    int fds[2];
    char byte;
    fflush(NULL);
    assert_int_equal(pipe(fds), 0);
    g_other = fork();
    if (g_other == 0) be_lgsup(outcome, fds[1]);
    close(fds[1]);
    assert_int_equal(read(fds[0], &byte, 1), 1);
    close(fds[0]);
}

static void test_stop_tells_how_it_ended(void **state)
{
    (void)state;
    static const struct {
        lg_run_state outcome;
        int code;
        const char *says;
    } cases[] = {
        {LG_RUN_STOPPED, 0, "made: stopped at step 0 of 60\n"},
        {LG_RUN_DONE, 0, "made: done at step 0 of 60\n"}, /* it came too late: as good */
        {LG_RUN_PARKED, 11, "made: parked at step 0 of 60\ncause: vae.0 died 4 times\n"},
        {LG_RUN_FAILED, 1, "made: failed at step 0 of 60\ncause: vae.0 died 4 times\n"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        start_other(cases[i].outcome);
        EXPECT(cases[i].code, cases[i].says, "stop", g_dir);
        assert_int_equal(waitpid(g_other, NULL, 0), g_other);
        g_other = 0;
    }
}

static void test_stop_of_nothing(void **state)
{
    (void)state;
    EXPECT(0, "nothing runs here\n", "stop", g_dir);
    unlink(scratch_path("run/board"));
    EXPECT(0, "nothing runs here\n", "stop", g_dir);
    scratch_write("run/board", "too short");
    EXPECT(5, "run/board is not a board, or a damaged one; its processes may live", "stop", g_dir);
    command_also("`lgsup stop --kill ");
}

/* It asks what the run has not come to yet. */
static void test_stop_of_a_start(void **state)
{
    (void)state;
    unlink(scratch_path("run/board"));
    EXPECT(8, "has no status yet", "status", g_dir);
    start_other(LG_RUN_STOPPED);
    EXPECT(0, "run: ended before the run had begun\n", "stop", g_dir);
    assert_int_equal(waitpid(g_other, NULL, 0), g_other);
    g_other = 0;
}

/* Its lock and its sockets' directory are those of the original, which lives and goes on. */
static void test_stop_of_a_copy(void **state)
{
    (void)state;
    char copy[LG_PATH_BYTES], command[3 * LG_PATH_BYTES];
    start_other(LG_RUN_STOPPED);
    snprintf(copy, sizeof copy, "%s", scratch_path("copy"));
    snprintf(command, sizeof command, "cp -a %s %s", g_dir, copy);
    assert_int_equal(system(command), 0);
    EXPECT(8, "no lgsup is in charge", "scale", "vae", "2", copy);
    EXPECT(10, "board is a copy", "stop", "--kill", copy);
    EXPECT(10, "board is a copy", "stop", copy);
    assert_int_equal(waitpid(g_other, NULL, WNOHANG), 0);
}

static void as_another_user(void)
{
    if (geteuid() == 0) assert_int_equal(seteuid(65534), 0);
}

/* That a board may not be opened is no damage. */
static void test_status_of_another_users_board(void **state)
{
    (void)state;
    scratch_write("run/status.json", "{\"state\": \"done\"}");
    assert_int_equal(chmod(scratch_path("run/board"), 0444), 0);
    assert_int_equal(chmod(g_dir, 0755) + chmod(scratch_path("run/config.toml"), 0644) +
                         chmod(scratch_path("run/status.json"), 0644) +
                         chmod(scratch_path(""), 0755),
                     0);
    g_command_before = as_another_user;
    EXPECT(0, "run/board: Permission denied; its processes may live", "status", g_dir);
    g_board->s->preamble.ended = LG_BOARD_ENDED;
    EXPECT(0, "state       done", "status", g_dir);
    command_never("cause");
    g_command_before = NULL;
}

/* Memory that was kept for a start is let go, and the run is stopped then. */
static void test_stop_of_a_parked_run(void **state)
{
    (void)state;
    int status;
    pid_t keeper = fork();
    if (keeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        shm_fixture_join(g_board, LG_ROLE_keeper, 0);
        atomic_store(&g_board->s->memory_kept, 1);
        for (;;) pause();
    }
    atomic_store(&g_board->s->run_state, LG_RUN_PARKED);
    for (int i = 0; i < 2000 && !atomic_load(&g_board->s->memory_kept); i++) usleep(5000);
    EXPECT(0, "it was parked at step 0; its memory has been let go", "stop", g_dir);
    assert_int_equal(waitpid(keeper, &status, 0), keeper);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(atomic_load(&g_board->s->run_state), LG_RUN_STOPPED);
    EXPECT(0, "nothing runs here\n", "stop", g_dir);
}

/* Processes that live belong to another plan than the files of the run: nobody may touch either. */
static void test_another_plan(void **state)
{
    (void)state;
    shm_fixture_join(g_board, LG_ROLE_vae, 0);
    g_board->s->preamble.plan_hash ^= 1;
    EXPECT(10, "run/plan.json is not the plan of the processes that live", "stop", g_dir);
    EXPECT(10, "run/plan.json is not the plan of the processes that live", "start", g_file);
}

/* systemd and lgsup must not both start what dies. */
static void test_another_owner(void **state)
{
    (void)state;
    shm_fixture_join(g_board, LG_ROLE_vae, 0);
    setenv("RUNTIME_DIRECTORY", scratch_path("rt"), 1);
    EXPECT(7, "were not started by systemd: end them with `lgsup stop ", "start", g_file, "--units",
           "job");
    unsetenv("RUNTIME_DIRECTORY");
    scratch_write("run/systemd", "job\n");
    EXPECT(7, "are units of systemd's: use `systemctl start jobsup` and `systemctl stop jobsup`",
           "start", g_file);
}

static void test_start_while_another_runs(void **state)
{
    (void)state;
    start_other(LG_RUN_STOPPED);
    EXPECT(7, "lgsup: ", "start", g_file);
    EXPECT(7, "lgsup: ", "start", g_file, "--detach"); /* told by the parent as well */
}

static void test_nothing_to_do(void **state)
{
    (void)state;
    command_checkpoint(&g_run, 60);
    EXPECT(0, "nothing to do: made is at step 60 of trainer.max_steps = 60\ncheckpoint  ", "start",
           g_file);
    command_also("made_step60\n");
    EXPECT(0, "", "start", g_file, "--detach");
    command_never("lgsup:");
}

/* Refused before a stage is started: by the parent of a start in the background, too. */
static void test_refused_starts(void **state)
{
    (void)state;
    for (int detach = 0; detach < 2; detach++) {
        const char *last = detach ? "--detach" : "--set=job.seed=0";
        char dir[LG_PATH_BYTES + 16];
        scratch_write("plain", "no directory");
        snprintf(dir, sizeof dir, "job.dir=%s", scratch_path("plain/run"));
        EXPECT(3, "trainer.rankz", "start", g_file, last, "--set", "trainer.rankz=1");
        EXPECT(4, "plain/run cannot be written: ", "start", g_file, last, "--set", dir);
        command_also("set job.dir (or --set job.dir=PATH) to a directory that you may write");
        command_program("lg-vae", "echo 'lg-vae: damaged'; exit 5");
        EXPECT(5, "lg-vae --plan: exit 5 CORRUPT: lg-vae: damaged", "start", g_file, last);
        command_roles();
        command_program("lg-keeper", "echo no memory left; exit 1");
        EXPECT(1, "lgsup: lg-keeper ended before it listened: no memory left\n", "start", g_file,
               last);
        assert_false(lg_path_exists(scratch_path("run/runtime"))); /* nothing is left behind */
        command_roles();
    }
}

/* What others could plant there would be believed, and executed. */
static void test_directory_of_others(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES + 16], path[LG_PATH_BYTES];
    snprintf(path, sizeof path, "%s", scratch_path("open"));
    snprintf(dir, sizeof dir, "job.dir=%s", path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(chmod(path, 01777), 0);
    EXPECT(4, "may be written by everybody (mode 1777)", "start", g_file, "--set", dir);
    command_also("chmod o-w ");
    assert_int_equal(chmod(path, 0700), 0);
    assert_int_equal(chmod(scratch_path("open/checkpoints"), 0777), 0);
    EXPECT(4, "open/checkpoints may be written by everybody", "start", g_file, "--set", dir);
    assert_int_equal(chmod(scratch_path("open/checkpoints"), 0700), 0);
    if (geteuid() == 0) { /* only root can give it away */
        assert_int_equal(chown(path, 12345, (gid_t)-1), 0);
        EXPECT(4, "belongs to user 12345, not to 0", "start", g_file, "--set", dir);
        assert_int_equal(chown(path, 0, (gid_t)-1), 0);
    }
    assert_int_equal(chmod(path, 02775), 0); /* a group's, on purpose */
    command_program("lg-keeper", "echo no memory left; exit 1");
    EXPECT(1, "lg-keeper ended before it listened", "start", g_file, "--set", dir);
    command_roles();
}

static struct rlimit g_files;
static void limit_files(void)
{
    LG_ASSERT(setrlimit(RLIMIT_NOFILE, &g_files) == 0);
}

/* The soft limit is raised; a hard one that is too low is said before anything starts. */
static void test_few_open_files(void **state)
{
    (void)state;
    g_files = (struct rlimit){.rlim_cur = 40, .rlim_max = 200};
    g_command_before = limit_files;
    EXPECT(4, "only 200 files may be open (the hard limit, `ulimit -Hn`), and a run needs 1024",
           "start", g_file);
    g_files = (struct rlimit){.rlim_cur = 40, .rlim_max = 2000};
    command_program("lg-keeper", "echo limit $(ulimit -Sn); exit 1");
    EXPECT(1, "lg-keeper ended before it listened: limit 2000", "start", g_file);
    command_roles();
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_stop_tells_how_it_ended), TEST(test_stop_of_nothing),
        TEST(test_stop_tells_how_it_ended), TEST(test_stop_of_a_start),
        TEST(test_stop_tells_how_it_ended), TEST(test_stop_of_a_copy),
        TEST(test_stop_tells_how_it_ended), TEST(test_status_of_another_users_board),
        TEST(test_stop_of_a_parked_run),    TEST(test_another_plan),
        TEST(test_another_owner),           TEST(test_start_while_another_runs),
        TEST(test_directory_of_others),     TEST(test_few_open_files),
        TEST(test_nothing_to_do),           TEST(test_refused_starts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
