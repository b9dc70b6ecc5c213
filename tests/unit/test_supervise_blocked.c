/* Nothing that may block holds up the supervisor: a terminal that takes nothing, a keeper that does
 * not answer, a disk that is slow, a service manager that does not listen. A stage that dies meanwhile is started again at once, and `lgsup
 * stop` is obeyed. */
#include "base/clock.h"
#include "base/fs.h"
#include "shm/board.h"
#include "supervisor/commands/cli.h"
#include "supervisor/run/run.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { SLOW_DISK_S = 10, RESTART_MS_MAX = 3000 /* of a loaded machine; idle it is a few ms */ };

/* Shared with lgsup, a child of this program; its stages are programs of their own. */
static struct {
    _Atomic(bool) is_slow;
    _Atomic(int) in_sync; /* fsyncs that have begun since */
} * g_disk;
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    if (g_disk && g_disk->is_slow) {
        g_disk->in_sync++;
        sleep(SLOW_DISK_S);
    }
    return __real_fsync(fd);
}

static int setup(void **state)
{
    g_disk = mmap(NULL, sizeof *g_disk, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return g_disk == MAP_FAILED ? -1 : lgsup_setup(state);
}
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, lgsup_teardown)

/* Kills a stage; how long until its replacement is enlisted, ms? -1: longer than 20 s. */
static double restart_ms(const char *role, int index)
{
    lg_board *b = NULL;
    lg_role r = (lg_role)lg_role_find(role);
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    const struct lg_board_row *row = lg_board_row(b, r, index);
    lg_incarnation before = lg_board_life(b, r, index, NULL);
    int64_t start_ns = lg_now_ns();
    kill((int)atomic_load(&row->pid), SIGKILL);
    while (lg_board_life(b, r, index, NULL) == before && lg_now_ns() - start_ns < 20 * LG_S_NS)
        usleep(200);
    bool came = lg_board_life(b, r, index, NULL) != before;
    double ms = came ? (double)(lg_now_ns() - start_ns) / LG_MS_NS : -1;
    lg_board_close(&b);
    return ms;
}

static void assert_restarted_at_once(const char *role, int index)
{
    double ms = restart_ms(role, index);
    if (ms >= 0 && ms < RESTART_MS_MAX) return;
    fail_msg("%s.%d was started again after %.0f ms", role, index, ms);
}

/* lgsup in the foreground writes into a pipe that is full and that nobody reads. *ret_fd: the pipe's
 * reading end, which keeps it open. */
static pid_t launch_into_full_pipe(const char *const *words, int n, int *ret_fd)
{
    int fds[2];
    char zeros[4096] = {0}, *argv[8] = {(char *)"lgsup"};
    for (int i = 0; i < n; i++) argv[i + 1] = (char *)words[i];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        int flags = fcntl(fds[1], F_GETFL);
        fcntl(fds[1], F_SETFL, flags | O_NONBLOCK);
        while (write(fds[1], zeros, sizeof zeros) > 0) continue;
        fcntl(fds[1], F_SETFL, flags);
        dup2(fds[1], 1);
        dup2(fds[1], 2);
        scratch_mortal();
        scratch_exit(lg_cli_main(n + 1, argv));
    }
    close(fds[1]);
    *ret_fd = fds[0];
    return pid;
}

static void test_frozen_terminal(void **state)
{
    (void)state;
    int fd;
    const char *const words[] = {"start", g_file, "--set", "trainer.max_steps=100000"};
    g_lgsup = launch_into_full_pipe(words, 4, &fd);
    wait_for_step(3);
    assert_restarted_at_once("vae", 0);
    wait_for_step(g_status.step + 5);
    assert_restarted_at_once("trainer", 1); /* after something was to be said */
    wait_for_step(g_status.step + 5);
    end_by_stop();
    close(fd);
    assert_has(scratch_path("run/logs/lgsup.log"), "vae.0: signal 9 (Killed); restarted");
    assert_has(scratch_path("run/logs/lgsup.log"), "trainer.1: signal 9 (Killed); restarted");
}

/* What is said at the very end, when there is no loop any more, is not waited for either. */
static void test_frozen_terminal_at_the_end(void **state)
{
    (void)state;
    int fd;
    const char *const words[] = {"start", g_file};
    g_lgsup = launch_into_full_pipe(words, 2, &fd);
    assert_exit(exit_of(g_lgsup), 0); /* with "checkpoint", "pictures" and "done" unsaid */
    g_lgsup = 0;
    assert_state("done", 60);
    assert_true(lg_path_exists(scratch_path("run/samples/step60.png")));
    const char *const wrong[] = {"start", g_file, "--set", "job.seed=7"};
    g_lgsup = launch_into_full_pipe(wrong, 4, &fd);
    assert_exit(exit_of(g_lgsup), 10); /* with an error unsaid */
    g_lgsup = 0;
    close(fd);
}

static void test_hung_keeper(void **state)
{
    (void)state;
    start_long();
    assert_true(read_status());
    kill(instance("keeper", 0)->pid, SIGSTOP);
    usleep(1200000); /* lgsup has asked it for something meanwhile */
    assert_restarted_at_once("trainer", 1);
    assert_restarted_at_once("vae", 0);
    wait_for_output("keeper: killed: it does not answer");
    wait_for_output("restarted with 11 regions");
    wait_until_ready("trainer", 1);
    assert_true(read_status());
    wait_for_step(g_status.step + 10);
    end_by_stop();
}

static void test_slow_disk(void **state)
{
    (void)state;
    scratch_write("run/fault", "text 0 unready"); /* so that "running" is written a second later */
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000", "--set",
                     "supervisor.ready_s=1");
    wait_for_step(3);
    g_disk->is_slow = true;
    for (int look = 0; look < LOOKS_MAX && !g_disk->in_sync; look++) usleep(LOOK_US);
    assert_true(g_disk->in_sync > 0);
    assert_restarted_at_once("vae", 1);
    assert_restarted_at_once("loader", 0);
    wait_for_step(g_status.step + 5);
    assert_restarted_at_once("trainer", 0);
    wait_for_step(g_status.step + 5);
    g_disk->is_slow = false;
    end_by_stop();
    assert_true(lg_path_exists(scratch_path("run/status.json"))); /* waited for at the end */
}

/* Their directory is made again, and its path, whose record is gone as well, is written to the slow disk. */
static void test_removed_sockets_on_a_slow_disk(void **state)
{
    (void)state;
    char dir[LG_PATH_BYTES];
    start_long();
    assert_int_equal(lg_read_line(scratch_path("run/runtime"), dir, sizeof dir), 0);
    assert_int_equal(unlink(scratch_path("run/runtime")), 0);
    g_disk->is_slow = true;
    assert_int_equal(lg_remove_tree(dir), 0);
    for (int look = 0; look < LOOKS_MAX && !lg_path_exists(dir); look++) usleep(LOOK_US);
    assert_true(lg_path_exists(dir)); /* its record is being written */
    assert_restarted_at_once("vae", 0);
    assert_restarted_at_once("trainer", 1);
    g_disk->is_slow = false;
    wait_for_output("the directory of the sockets was removed: made again");
    wait_until_ready("trainer", 1);
    assert_true(read_status());
    wait_for_step(g_status.step + 5);
    end_by_stop();
}

/* A service manager that does not read what it is told: its socket takes nothing more. */
static void test_deaf_service_manager(void **state)
{
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s", scratch_path("notify"));
    int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int sender = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s, (struct sockaddr *)&at, sizeof at), 0);
    while (sendto(sender, "x", 1, MSG_DONTWAIT, (struct sockaddr *)&at, sizeof at) == 1) continue;
    assert_int_equal(errno, EAGAIN);
    setenv("NOTIFY_SOCKET", at.sun_path, 1);
    setenv("WATCHDOG_USEC", "200000", 1);
    start_long();
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    assert_restarted_at_once("vae", 0);
    wait_for_step(g_status.step + 5);
    end_by_stop();
    close(sender);
    close(s);
}

/* Ctrl-C twice while lgsup cannot run, or in quick succession, is one interrupt: only one that comes
 * when the drain has been said kills. */
static void test_queued_signals_are_one_interrupt(void **state)
{
    (void)state;
    start_long();
    kill(g_lgsup, SIGSTOP);
    kill(g_lgsup, SIGINT);
    kill(g_lgsup, SIGTERM);
    kill(g_lgsup, SIGCONT);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_nobody_left();
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        TEST(test_frozen_terminal),
        TEST(test_frozen_terminal_at_the_end),
        TEST(test_hung_keeper),
        TEST(test_slow_disk),
        TEST(test_removed_sockets_on_a_slow_disk),
        TEST(test_deaf_service_manager),
        TEST(test_queued_signals_are_one_interrupt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
