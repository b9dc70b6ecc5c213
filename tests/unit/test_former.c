/* What a start and a stop find in a run directory that is not as the last lgsup of this build has left
 * it: another build's board, a damaged one, a copy, a decision that was only half stored. Processes
 * that live are never started over, and never ended but by who says so. */
#include "base/fs.h"
#include "shm/board.h"
#include "supervisor/commands/start.h"
#include "supervisor/core/supervise.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define LONG "--set", "trainer.max_steps=100000"

static lg_board *g_board;        /* of the run, mapped before it was changed */
static int g_held[16], g_n_held; /* processes that may not end */

static bool is_held(int pid)
{
    int status = 0;
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (waitpid(pid, &status, __WALL | WNOHANG) == pid) break;
    return status >> 8 == (SIGTRAP | PTRACE_EVENT_EXIT << 8);
}

/* Who has not been killed is by now, and comes to be held. */
static void let_go(void)
{
    while (g_n_held > 0) {
        const int pid = g_held[--g_n_held];
        kill(pid, SIGKILL);
        if (ptrace(PTRACE_DETACH, pid, NULL, NULL) < 0 && is_held(pid))
            ptrace(PTRACE_DETACH, pid, NULL, NULL);
    }
}

static const char *board_path(void)
{
    return scratch_path("run/board");
}

/* The run lives without its lgsup, which has written its status before (a worker does that), and its board is
 * mapped. */
static void orphan(void)
{
    start_long();
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (lg_path_exists(scratch_path("run/status.json"))) break;
    kill_lgsup();
    assert_int_equal(lg_board_open(board_path(), 0, &g_board), 0);
}

static int pid_of(lg_role role, int index)
{
    return (int)atomic_load(&lg_board_row(g_board, role, index)->pid);
}

static bool is_alive(int pid)
{
    int pidfd = pidfd_open(pid, 0);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    bool alive = pidfd >= 0 && poll(&p, 1, 0) == 0;
    if (pidfd >= 0) close(pidfd);
    return alive;
}

static uint64_t step_of(void)
{
    return lg_status_step(g_board);
}

static void wait_for_board_step(uint64_t step)
{
    for (int look = 0; look < LOOKS_MAX && step_of() < step; look++) usleep(LOOK_US);
    assert_true(step_of() >= step);
}

static int teardown(void **state)
{
    let_go();
    lg_board_close(&g_board);
    if (g_lgsup > 0) scratch_kill(g_lgsup);
    g_lgsup = 0;
    if (lg_stop_kill(g_run) < 0) lg_err_clear(); /* also of a test that has failed half-way */
    return lgsup_teardown(state);
}

/* A board of the same boot that this build cannot read is no proof of death: the same processes train
 * on, and `stop --kill` ends them although nothing of the board can be believed. */
static void ends_without_its_build(void)
{
    int trainer = pid_of(LG_ROLE_trainer, 0), keeper = pid_of(LG_ROLE_keeper, 0);
    uint64_t step = step_of();
    wait_for_board_step(step + 5);
    assert_true(is_alive(trainer) && is_alive(keeper));
    lg_board_close(&g_board); /* `stop --kill` takes who maps it for a stage */
    assert_exit(RUN("stop", "--kill", g_run), 0);
    assert_output("killed without a checkpoint");
    assert_false(is_alive(trainer) || is_alive(keeper));
    assert_false(lg_path_exists(board_path()));
    assert_false(lg_path_exists(scratch_path("run/runtime")));
    unlink(g_out);
    assert_exit(RUN("stop", "--kill", g_run), 0);
    assert_output("nothing runs here");
    assert_exit(RUN("stop", g_run), 0);
}

static void refused(int code, const char *what)
{
    assert_exit(RUN("start", g_file, LONG), code);
    assert_output(what);
    assert_output("lgsup stop --kill ");
    assert_exit(RUN("stop", g_run), code);
    assert_false(output_has("nothing runs here"));
}

static void test_another_layout_version(void **state)
{
    (void)state;
    orphan();
    char versions[64];
    snprintf(versions, sizeof versions, "has layout version %d, this program %d",
             LG_LAYOUT_VERSION + 1, LG_LAYOUT_VERSION);
    g_board->s->preamble.version++;
    refused(10, versions);
    assert_exit(RUN("status", g_run), 0);
    assert_output("processes may live");
    ends_without_its_build();
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("every role is ready"); /* from the newest checkpoint */
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_another_layout(void **state)
{
    (void)state;
    orphan();
    g_board->s->preamble.layout_hash ^= 1;
    refused(10, "the layout of lg_board_shared differs");
    ends_without_its_build();
}

/* A run of another build that has ended keeps nobody from a start. */
static void test_another_build_has_ended(void **state)
{
    (void)state;
    start_long();
    end_by_stop();
    assert_int_equal(lg_board_open(board_path(), 0, &g_board), 0);
    assert_true(g_board->s->preamble.ended == LG_BOARD_ENDED);
    g_board->s->preamble.version++;
    unlink(g_out);
    assert_exit(RUN("stop", g_run), 0);
    assert_output("nothing runs here");
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("every role is ready");
    end_by_stop();
}

static void test_another_boot(void **state)
{
    (void)state;
    orphan();
    g_board->s->preamble.boot_id[0] ^= 1; /* the processes live: as if on another machine */
    assert_exit(RUN("start", g_file, LONG), 7);
    assert_output("on another machine");
    assert_exit(RUN("stop", g_run), 7);
    int trainer = pid_of(LG_ROLE_trainer, 0);
    assert_true(is_alive(trainer));
    g_board->s->preamble.boot_id[0] ^= 1;
    kill_run();
    g_board->s->preamble.boot_id[0] ^= 1;
    unlink(g_out);
    assert_exit(RUN("stop", g_run), 0);
    assert_output("nothing runs here");
}

/* Nobody whom the rows name lives, but somebody has joined the board: in another container, say. */
static void test_unseen_processes(void **state)
{
    (void)state;
    orphan();
    kill_run();
    atomic_store(&g_board->s->preamble.ended, 0);
    atomic_store(&g_board->s->run_state, LG_RUN_RUNNING);
    lg_board_hold(g_board->fd);
    assert_exit(RUN("start", g_file, LONG), 7);
    assert_output("cannot be seen from here");
    assert_exit(RUN("stop", g_run), 7);
}

static void damage(off_t bytes)
{
    char scrap[8192];
    memset(scrap, 0x5a, sizeof scrap);
    assert_int_equal(truncate(board_path(), bytes), 0);
    int fd = open(board_path(), O_WRONLY | O_CLOEXEC);
    if (bytes == 0) assert_int_equal(pwrite(fd, scrap, sizeof scrap, 0), (int)sizeof scrap);
    close(fd);
}

/* Of any length. What the processes do with a board that was cut is theirs: they die of it. */
static void test_damaged_boards(void **state)
{
    (void)state;
    static const off_t lengths[] = {4096, 104, 103, 40, 1, 0};
    orphan();
    int keeper = pid_of(LG_ROLE_keeper, 0);
    lg_board_close(&g_board);
    for (size_t i = 0; i < LG_ARRAY_LEN(lengths); i++) {
        damage(lengths[i]);
        refused(5, "processes may live");
        assert_exit(RUN("status", g_run), 0);
        assert_exit(RUN("top", "--once", g_run), 0);
    }
    assert_true(is_alive(keeper));
    assert_exit(RUN("stop", "--kill", g_run), 0);
    assert_false(is_alive(keeper));
}

/* Numbers that bound loops, behind a preamble that is whole. */
static void test_damaged_numbers(void **state)
{
    (void)state;
    orphan();
    int ranks = g_board->s->ranks;
    g_board->s->ranks = 1 << 20;
    refused(5, "is a damaged board");
    assert_exit(RUN("status", g_run), 0);
    g_board->s->ranks = ranks;
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
}

/* `stop --kill` of a run in good order, its lgsup included; another run beside it is left alone, and
 * so is who only looks. */
static void test_kill_ends_one_run(void **state)
{
    (void)state;
    orphan();
    lg_board_close(&g_board);
    char other[LG_PATH_BYTES + 16];
    snprintf(other, sizeof other, "job.dir=%s", scratch_path("other"));
    g_lgsup = LAUNCH("start", g_file, LONG); /* adopts */
    wait_for_output("adopted");
    int pid = g_lgsup;
    pid_t second = LAUNCH("start", g_file, LONG, "--set", other);
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (file_has(scratch_path("other/logs/lgsup.log"), "every role is ready")) break;
    assert_exit(RUN("stop", "--kill", g_run), 0);
    assert_exit(exit_of(pid), 128 + SIGKILL);
    g_lgsup = 0;
    assert_false(lg_path_exists(board_path()));
    assert_int_equal(kill(second, 0), 0);
    assert_exit(RUN("stop", scratch_path("other")), 0);
    assert_exit(exit_of(second), 0);
    assert_true(read_status());
    assert_string_equal(g_status.state, "failed");
}

/* Holds it in the kernel on its way out, as a driver does that lets go of its memory. */
static void hold_end(int pid)
{
    assert_int_equal(ptrace(PTRACE_SEIZE, pid, NULL, PTRACE_O_TRACEEXIT), 0);
    assert_in_range(g_n_held, 0, LG_ARRAY_LEN(g_held) - 1);
    g_held[g_n_held++] = pid;
}

/* A run without its lgsup, none of whose processes can end. */
static void orphan_and_hold(void)
{
    /* Who is no descendant may not be traced everywhere. */
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    orphan();
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        for (int k = 0; k < 2; k++)
            if (is_alive(pid_of((lg_role)r, k))) hold_end(pid_of((lg_role)r, k));
    assert_int_equal(g_n_held, 10); /* text, VAE and trainer twice; not lgsup */
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

static bool all_are_held(void)
{
    for (int i = 0; i < g_n_held; i++)
        if (!is_held(g_held[i])) return false;
    return true;
}

/* Processes that take long to end: each is killed all the same, before any is waited for. */
static void test_kill_of_slow_ends(void **state)
{
    (void)state;
    orphan_and_hold();
    lg_board_close(&g_board);
    unlink(g_out);
    pid_t stop = LAUNCH("stop", "--kill", g_run);
    assert_true(all_are_held());
    wait_for_output("waiting     for the end of lg-");
    assert_output("state t (traced)");
    let_go();
    assert_exit(exit_of(stop), 0);
    assert_false(lg_path_exists(board_path()));
}

/* So does who starts again over a run whose memory is lost. */
static void test_slow_leftovers(void **state)
{
    (void)state;
    orphan_and_hold();
    pid_t pid = fork();
    if (pid == 0) {
        lg_leftovers_kill(g_board, true);
        _exit(lg_leftovers_live(g_board));
    }
    assert_true(all_are_held());
    let_go();
    assert_exit(exit_of(pid), 0);
}

/* The file of the lock was removed under a living lgsup: still no second one. */
static void test_removed_lock(void **state)
{
    (void)state;
    start_long();
    assert_int_equal(unlink(scratch_path("run/lock")), 0);
    assert_exit(RUN("start", g_file, LONG), 7);
    assert_output("is not held: the file was removed or replaced");
    assert_exit(RUN("stop", g_run), 7);
    kill(g_lgsup, SIGHUP);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
}

static void shell(const char *command)
{
    int status = system(command);
    assert_int_equal(status, 0);
}

/* A copy of a run directory names the processes of the original: neither adopted nor ended. */
static void test_copied_directory(void **state)
{
    (void)state;
    char command[3 * LG_PATH_BYTES], there[LG_PATH_BYTES + 16];
    orphan();
    /* Of a run that writes checkpoints on: what comes and goes meanwhile may be missing. */
    snprintf(command, sizeof command, "cp -a %s %s 2>%s", g_run, scratch_path("copy"),
             scratch_path("cp.log"));
    if (system(command) != 0) assert_true(lg_path_exists(scratch_path("copy/board")));
    snprintf(there, sizeof there, "job.dir=%s", scratch_path("copy"));
    assert_exit(RUN("start", g_file, LONG, "--set", there), 10);
    assert_output("is a copy: ");
    assert_exit(RUN("stop", scratch_path("copy")), 10);
    uint64_t step = step_of();
    wait_for_board_step(step + 5);
    assert_true(is_alive(pid_of(LG_ROLE_keeper, 0)));
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    snprintf(command, sizeof command, "rm -r %s && cp -a %s %s", scratch_path("copy"), g_run,
             scratch_path("copy"));
    shell(command); /* of a run that has ended: a start goes on from its newest checkpoint */
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, LONG, "--set", there);
    wait_for_output("every role is ready");
    assert_exit(RUN("stop", scratch_path("copy")), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
}

/* The state alone says that the run is stopping, and the word that the ranks obey is missing: the next
 * lgsup asserts it. (The other half, and every death in between: test_sim_supervisor.) */
static void half_a_stop(bool start)
{
    orphan();
    atomic_store(&g_board->s->run_state, LG_RUN_DRAINING);
    if (start)
        assert_exit(RUN("start", g_file, LONG), 0);
    else
        assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_true(g_status.checkpoint[0]);
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_stop_half_stored(void **state)
{
    (void)state;
    half_a_stop(false);
}

static void test_stop_half_stored_then_start(void **state)
{
    (void)state;
    half_a_stop(true);
}

/* A stop that comes to a run that is stopping already asserts the word again. */
static void test_stop_again(void **state)
{
    (void)state;
    orphan();
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("adopted");
    atomic_store(&g_board->s->drain, 1); /* ranks go on only after the word */
    for (int r = 0; r < 2; r++) kill(pid_of(LG_ROLE_trainer, r), SIGSTOP);
    pid_t first = LAUNCH("stop", g_run);
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (atomic_load(&g_board->s->run_state) == LG_RUN_DRAINING) break;
    atomic_store(&g_board->s->drain, 0); /* lost, however that came about */
    pid_t second = LAUNCH("stop", g_run);
    for (int look = 0; look < LOOKS_MAX && !atomic_load(&g_board->s->drain); look++)
        usleep(LOOK_US);
    assert_int_equal(atomic_load(&g_board->s->drain), 1);
    for (int r = 0; r < 2; r++) kill(pid_of(LG_ROLE_trainer, r), SIGCONT);
    assert_exit(exit_of(first), 0);
    assert_exit(exit_of(second), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
#define TEST(f) cmocka_unit_test_setup_teardown(f, lgsup_setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_another_layout_version),
        TEST(test_another_layout),
        TEST(test_another_build_has_ended),
        TEST(test_another_boot),
        TEST(test_unseen_processes),
        TEST(test_damaged_boards),
        TEST(test_damaged_numbers),
        TEST(test_kill_ends_one_run),
        TEST(test_kill_of_slow_ends),
        TEST(test_slow_leftovers),
        TEST(test_removed_lock),
        TEST(test_copied_directory),
        TEST(test_stop_half_stored),
        TEST(test_stop_half_stored_then_start),
        TEST(test_stop_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
