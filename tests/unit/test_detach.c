/* Going into the background: what the parent hears of a child that gets ready, fails, or ends without a
 * word. The parent of each pair runs in a process of its own, and its child, too. */
#include "supervisor/commands/detach.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { LONG_BYTES = 20000 };

static struct {
    int rc, exit_code;
    char said[9000];
} g_told;

static int setup(void **state)
{
    command_setup(state);
    return lg_mkdirs(scratch_path("run/logs"));
}

/* lg_detach and what the parent gets, in g_told. `child`: what the background does. */
static void detach(void (*child)(struct lg_detached *))
{
    int fds[2];
    fflush(NULL);
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct lg_detached d;
        if (g_command_before) g_command_before();
        g_told.rc = lg_detach(scratch_path("run"), &d);
        if (g_told.rc == 0 && !d.is_parent) {
            close(fds[1]);
            child(&d);
            scratch_exit(0);
        }
        if (g_told.rc == 0) g_told.rc = lg_detach_wait(&d, &g_told.exit_code);
        snprintf(g_told.said, sizeof g_told.said, "%s", lg_err_message());
        LG_ASSERT(write(fds[1], &g_told, sizeof g_told) == sizeof g_told);
        scratch_exit(0);
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], &g_told, sizeof g_told), sizeof g_told);
    close(fds[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void assert_log(const char *part)
{
    char *text;
    size_t bytes;
    for (int i = 0; i < 2000; i++, usleep(5000)) { /* the child writes on its own time */
        if (lg_read_file(scratch_path("run/logs/lgsup.log"), 1 << 16, &text, &bytes) == 0) {
            bool has = strstr(text, part) != NULL;
            free(text);
            if (has) return;
        }
        lg_err_clear();
    }
    fail_msg("the log lacks %s", part);
}

/* stdin is empty, output goes to the log, and there is no terminal to be had. */
static void gets_ready(struct lg_detached *d)
{
    char byte;
    LG_ASSERT(write(d->fd, "", 1) == 1);
    printf("stdin %zd, leader %d\n", read(0, &byte, 1), getsid(0) == getpid());
    fflush(stdout);
    fprintf(stderr, "errors as well\n");
}

static void test_ready(void **state)
{
    (void)state;
    detach(gets_ready);
    assert_int_equal(g_told.rc, 0);
    assert_int_equal(g_told.exit_code, 0);
    assert_log("stdin 0, leader 0\n");
    assert_log("errors as well\n");
}

static void fails(struct lg_detached *d)
{
    lg_detach_end(d, 5, "vae/config.json: not JSON");
}

static void fails_at_length(struct lg_detached *d)
{
    static char text[LONG_BYTES];
    memset(text, 'x', sizeof text - 1);
    lg_detach_end(d, 6, text);
}

static void ends_well(struct lg_detached *d)
{
    lg_detach_end(d, 0, "there was nothing to do");
}

static void ends_silently(struct lg_detached *d)
{
    (void)d;
}

static void test_ends(void **state)
{
    (void)state;
    detach(fails);
    assert_int_equal(g_told.rc, LG_ERR_CORRUPT);
    assert_string_equal(g_told.said, "vae/config.json: not JSON");
    detach(fails_at_length);
    assert_int_equal(g_told.rc, LG_ERR_NOSPACE);
    assert_true(strlen(g_told.said) > 1000 && g_told.said[0] == 'x');
    detach(ends_well);
    assert_int_equal(g_told.rc, 0);
    assert_int_equal(g_told.exit_code, 0);
    detach(ends_silently);
    assert_int_equal(g_told.rc, LG_ERR_FAILED);
    assert_non_null(strstr(g_told.said, "ended before the run was ready; see "));
    assert_non_null(strstr(g_told.said, "run/logs/lgsup.log"));
}

/* A log that cannot be written is no reason not to train. */
static void test_without_a_log(void **state)
{
    (void)state;
    assert_int_equal(lg_remove_tree(scratch_path("run/logs")), 0);
    detach(gets_ready);
    assert_int_equal(g_told.rc, 0);
    detach(fails);
    assert_int_equal(g_told.rc, LG_ERR_CORRUPT);
}

static void on_alarm(int sig)
{
    (void)sig;
}

/* Signals come while the parent waits. */
static void interrupt(void)
{
    struct sigaction act = {.sa_handler = on_alarm};
    struct itimerval often = {{0, 1000}, {0, 1000}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
}

static void gets_ready_late(struct lg_detached *d)
{
    usleep(100000);
    LG_ASSERT(write(d->fd, "", 1) == 1);
}

static void test_interrupted(void **state)
{
    (void)state;
    g_command_before = interrupt;
    detach(gets_ready_late);
    assert_int_equal(g_told.rc, 0);
}

static void no_pipe(void)
{
    command_refuse(SYS_pipe2, EMFILE);
}
static void no_fork(void)
{
    command_refuse(SYS_clone, EAGAIN);
}

static void test_no_means(void **state)
{
    (void)state;
    g_command_before = no_pipe;
    detach(fails);
    assert_int_equal(g_told.rc, LG_ERR_IO);
    assert_string_equal(g_told.said, "pipe: Too many open files");
    g_command_before = no_fork;
    detach(fails);
    assert_int_equal(g_told.rc, LG_ERR_IO);
    assert_string_equal(g_told.said, "fork: Resource temporarily unavailable");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, command_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_ready),       TEST(test_ends),     TEST(test_without_a_log),
        TEST(test_interrupted), TEST(test_no_means),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
