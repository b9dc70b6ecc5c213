/* Work that may block: done in order, by another thread, replaced, refused, and left behind when it never
 * ends. And what is said of a process that does not end. */
#include "base/check.h"
#include "base/clock.h"
#include "supervisor/run/stuck.h"
#include "supervisor/run/terminal.h"
#include "supervisor/run/worker.h"
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { JOBS_MAX = 4, LONG_MS = 5000, SHORT_MS = 50 };

static bool g_no_threads;
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
                          void *arg)
{
    return g_no_threads ? EAGAIN : __real_pthread_create(thread, attr, run, arg);
}

static struct {
    _Atomic(int) gate; /* jobs of "wait" end when it is open */
    _Atomic(int) works, releases;
    pthread_t worker;
    char order[64];
} g;

struct test_job {
    struct lg_job job;
    char name;
};

static void work(struct lg_job *job)
{
    g.order[atomic_fetch_add(&g.works, 1)] = ((struct test_job *)job)->name;
    g.worker = pthread_self();
}
static void work_other(struct lg_job *job)
{
    work(job);
}
static void wait_at_gate(struct lg_job *job)
{
    while (!atomic_load(&g.gate)) usleep(200);
    work(job);
}
static void done(struct lg_job *job, void *context)
{
    char *text = context;
    text[strlen(text)] = ((struct test_job *)job)->name;
}
static void release(struct lg_job *job)
{
    atomic_fetch_add(&g.releases, 1);
    free(job);
}

static struct test_job *make(char name, void (*w)(struct lg_job *))
{
    struct test_job *j = calloc(1, sizeof *j);
    assert_non_null(j);
    j->job = (struct lg_job){.work = w, .done = done, .release = release};
    j->name = name;
    return j;
}

static bool give(lg_worker *w, char name, void (*f)(struct lg_job *))
{
    return lg_worker_give(w, &make(name, f)->job);
}

static bool give_latest(lg_worker *w, char name)
{
    struct test_job *j = make(name, work_other);
    j->job.latest = true;
    j->job.done = NULL;
    return lg_worker_give(w, &j->job);
}

static int setup(void **state)
{
    (void)state;
    memset(&g, 0, sizeof g);
    g_no_threads = false;
    return 0;
}

static lg_worker *open_one(int wake_fd)
{
    lg_worker *w;
    struct lg_worker_spec spec = {.name = "test", .jobs_max = JOBS_MAX, .wake_fd = wake_fd};
    assert_int_equal(lg_worker_open(&spec, &w), 0);
    return w;
}

static void test_in_order_by_another_thread(void **state)
{
    (void)state;
    char text[16] = "";
    eventfd_t n;
    int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    lg_worker *w = open_one(wake);
    assert_true(lg_worker_is_idle(w));
    for (char c = 'a'; c < 'd'; c++) assert_true(give(w, c, work));
    assert_true(lg_worker_wait(w, LONG_MS));
    assert_string_equal(g.order, "abc");
    assert_false(pthread_equal(g.worker, pthread_self()));
    assert_int_equal(eventfd_read(wake, &n), 0); /* the loop is woken */
    assert_int_equal(g.releases, 0);
    lg_worker_collect(w, text);
    assert_string_equal(text, "abc");
    assert_int_equal(g.releases, 3);
    assert_true(give(w, 'd', work));
    assert_true(lg_worker_close(&w, LONG_MS)); /* not collected: released all the same */
    assert_null(w);
    assert_int_equal(g.releases, 4);
    assert_true(lg_worker_close(&w, LONG_MS));
    close(wake);
}

/* What does not fit is refused at once, and of what is only of interest in its latest form one waits. */
static void test_full_and_latest(void **state)
{
    (void)state;
    lg_worker *w = open_one(-1);
    assert_true(give(w, 'a', wait_at_gate));
    while (lg_worker_is_idle(w)) usleep(100);
    usleep(20000); /* it is at the gate, no longer in the queue */
    assert_true(give(w, 'b', work));
    assert_true(give_latest(w, 'c'));
    assert_true(give_latest(w, 'd'));
    assert_int_equal(g.releases, 1);
    assert_true(give(w, 'e', work));
    assert_true(give(w, 'f', work));
    int64_t before_ns = lg_now_ns();
    assert_false(give(w, 'g', work));
    assert_true(give_latest(w, 'h')); /* takes a place that is there */
    assert_true(lg_now_ns() - before_ns < LG_S_NS);
    assert_int_equal(g.releases, 3);
    assert_false(lg_worker_wait(w, SHORT_MS));
    g.gate = 1;
    assert_true(lg_worker_wait(w, LONG_MS));
    assert_string_equal(g.order, "abhef");
    assert_true(lg_worker_close(&w, LONG_MS));
    assert_int_equal(g.releases, 8);
}

/* One that never comes back is left behind: what waits is not begun any more. */
static void test_left_behind(void **state)
{
    (void)state;
    lg_worker *w = open_one(-1);
    assert_true(give(w, 'a', wait_at_gate));
    assert_true(give(w, 'b', work));
    int64_t before_ns = lg_now_ns();
    assert_false(lg_worker_close(&w, SHORT_MS));
    assert_true(lg_now_ns() - before_ns >= SHORT_MS * LG_MS_NS);
    assert_null(w);
    g.gate = 1; /* it comes back after all, ends, and frees what it had */
    for (int i = 0; i < 5000 && g.releases < 2; i++) usleep(1000);
    assert_int_equal(g.releases, 2);
    assert_string_equal(g.order, "a");
}

static void test_without_threads(void **state)
{
    (void)state;
    char text[16] = "";
    g_no_threads = true;
    lg_worker *w = open_one(-1);
    assert_true(give(w, 'a', work));
    assert_true(give(w, 'b', work));
    assert_int_equal(g.works, 0);
    lg_worker_collect(w, text);
    assert_string_equal(text, "ab");
    assert_true(give(w, 'c', work));
    assert_true(lg_worker_wait(w, LONG_MS));
    assert_true(lg_worker_is_idle(w));
    assert_true(lg_worker_close(&w, LONG_MS));
    assert_string_equal(g.order, "abc");
    assert_int_equal(g.releases, 3);
}

/* ---- the terminal ---- */

static size_t drain(int fd, char *ret, size_t bytes)
{
    size_t n = 0;
    for (ssize_t got; n < bytes - 1 && (got = read(fd, ret + n, bytes - 1 - n)) > 0;)
        n += (size_t)got;
    ret[n] = 0;
    return n;
}

/* A pipe that nobody reads: what does not fit is dropped, and told when it goes on. */
static void test_terminal_that_stops(void **state)
{
    (void)state;
    static char text[1 << 20], line[4096];
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    memset(line, 'x', sizeof line - 1);
    line[sizeof line - 1] = '\n';
    int64_t before_ns = lg_now_ns();
    int taken = 0;
    while (taken < 10000 && lg_terminal_write(fds[1], line, sizeof line)) taken++;
    assert_true(taken > 16 && taken < 10000);
    for (int i = 0; i < 4; i++) assert_false(lg_terminal_write(fds[1], line, sizeof line));
    assert_true(lg_now_ns() - before_ns < 2 * LG_S_NS);
    assert_false(lg_terminal_is_idle());
    ssize_t got = 1;
    for (size_t n = 0; got > 0 && n < (size_t)taken * sizeof line; n += (size_t)got)
        got = read(fds[0], text, sizeof text);
    assert_true(got > 0);
    while (!lg_terminal_is_idle()) usleep(100);
    lg_terminal_say(fds[1], "%s again\n", "here");
    assert_true(lg_terminal_finish());
    close(fds[1]);
    drain(fds[0], text, sizeof text);
    assert_string_equal(text, "(5 lines were not shown; see logs/lgsup.log)\nhere again\n");
    close(fds[0]);
}

static void test_terminal_at_the_end(void **state)
{
    (void)state;
    static char line[1 << 18];
    int fds[2];
    memset(line, 'x', sizeof line);
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    lg_terminal_write(fds[1], line, sizeof line);
    int64_t before_ns = lg_now_ns();
    assert_false(lg_terminal_finish());
    assert_true(lg_now_ns() - before_ns < 10 * LG_S_NS);
    assert_true(lg_terminal_is_idle()); /* begins anew */
    close(fds[0]);
    close(fds[1]);
}

/* ---- a process that does not end ---- */

static void test_place_of_a_process(void **state)
{
    (void)state;
    char text[128];
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    kill(pid, SIGSTOP);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    lg_process_place(pid, text, sizeof text);
    assert_int_equal(strncmp(text, "state T (stopped)", 17), 0);
    kill(pid, SIGKILL);
    siginfo_t info;
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    lg_process_place(pid, text, sizeof text);
    assert_string_equal(text, "state Z (zombie)");
    waitpid(pid, &status, 0);
    lg_process_place(pid, text, sizeof text);
    assert_string_equal(text, "");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
#define TEST(t) cmocka_unit_test_setup(t, setup)
    const struct CMUnitTest tests[] = {
        TEST(test_in_order_by_another_thread),
        TEST(test_full_and_latest),
        TEST(test_left_behind),
        TEST(test_without_threads),
        TEST(test_terminal_that_stops),
        TEST(test_terminal_at_the_end),
        TEST(test_place_of_a_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
