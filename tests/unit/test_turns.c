/* Turns on a GPU: order, bounds, and deaths of owners at every instruction. */
#include "base/check.h"
#include "base/clock.h"
#include "shm/turns.h"
#include "tests/unit/scratch.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    THREADS = 4,
    PROCESSES = 4,
    LONG_MS = 60000, /* a wait that must end sooner: by the turn */
    SHORT_MS = 50,   /* one that must end in vain */
    KILLS = 300,
    DEATHS_MAX = 200, /* of one kind, spread over its instructions */
};

struct world {
    struct lg_turn_shared turn;
    _Atomic(int) said; /* by a child, to the test */
    _Atomic(int) free; /* by the test, to a child */
    uint64_t done[PROCESSES];
};
static struct world *w;

static int setup(void **state)
{
    (void)state;
    w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(w != MAP_FAILED);
    assert_int_equal(lg_turn_create(&w->turn), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    munmap(w, sizeof *w);
    return 0;
}

static lg_turn turn_of(int wait_ms)
{
    lg_turn t = {0};
    lg_turn_use(&t, &w->turn);
    t.wait_ms = wait_ms;
    t.worth_ns = 0;
    return t;
}

static void assert_free(void)
{
    lg_turn t = turn_of(LONG_MS);
    assert_true(lg_turn_begin(&t));
    lg_turn_end(&t);
}

static void await(_Atomic(int) *word, int value)
{
    for (int i = 0; i < LONG_MS; i++) {
        if (atomic_load(word) == value) return;
        usleep(1000);
    }
    fail_msg("%d was not said", value);
}

/* ---- without deaths ---- */

static void test_alone(void **state)
{
    (void)state;
    lg_turn none = {0}, t = turn_of(SHORT_MS);
    assert_false(lg_turn_begin(&none)); /* nobody to take turns with */
    lg_turn_end(&none);
    assert_int_equal(none.had + none.went, 0);
    for (int i = 0; i < 3; i++) {
        assert_true(lg_turn_begin(&t));
        lg_turn_end(&t);
        lg_turn_end(&t); /* nothing */
    }
    assert_int_equal(t.had, 3);
    assert_int_equal(t.waited_ns, 0);
    assert_int_equal(atomic_load(&w->turn.hold), 3);
}

static void pieces(lg_turn *t, int n, int64_t worth_ns)
{
    t->worth_ns = worth_ns;
    for (int i = 0; i < n; i++) {
        assert_true(lg_turn_begin(t));
        lg_turn_end(t);
    }
}

/* Turns stop when they are not worth it, and begin anew with others to share with. */
static void test_short_pieces(void **state)
{
    (void)state;
    lg_turn t = turn_of(SHORT_MS);
    pieces(&t, LG_TURN_SHORT_MAX - 1, INT64_MAX);
    for (int i = 0; i < LG_TURN_SHORT_MAX; i++) { /* nothing to do: says nothing */
        assert_true(lg_turn_begin(&t));
        lg_turn_drop(&t);
    }
    pieces(&t, 1, 0); /* a long one */
    pieces(&t, LG_TURN_SHORT_MAX, INT64_MAX);
    uint64_t had = t.had;
    assert_false(lg_turn_begin(&t));
    lg_turn_end(&t);
    assert_int_equal(t.had, had);
    assert_int_equal(t.went, 0);
    assert_int_equal(atomic_load(&w->turn.hold), had);
    lg_turn_use(&t, &w->turn);
    pieces(&t, 1, 0);
}

/* One at a time: a count that loses some when two count together. */
static void *count(void *arg)
{
    lg_turn t = turn_of(LONG_MS);
    for (int i = 0; i < 2000; i++) {
        if (!lg_turn_begin(&t)) return (void *)"a turn did not come";
        uint64_t counted = atomic_load_explicit((_Atomic(uint64_t) *)arg, memory_order_relaxed);
        if (i % 64 == 0) sched_yield();
        atomic_store_explicit((_Atomic(uint64_t) *)arg, counted + 1, memory_order_relaxed);
        lg_turn_end(&t);
    }
    return NULL;
}

static void test_one_at_a_time(void **state)
{
    (void)state;
    pthread_t thread[THREADS];
    _Atomic(uint64_t) counted = 0;
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, count, &counted), 0);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(thread[i], &wrong);
        assert_null(wrong);
    }
    assert_int_equal(counted, 2000 * THREADS);
    assert_int_equal(atomic_load(&w->turn.hold), 2000 * THREADS);
}

struct waiter {
    _Atomic(int) tid;
    _Atomic(int) *order; /* who had a turn so far */
    int place;
};

static void *wait_once(void *arg)
{
    struct waiter *v = arg;
    lg_turn t = turn_of(LONG_MS);
    atomic_store(&v->tid, (int)syscall(SYS_gettid));
    if (!lg_turn_begin(&t)) return (void *)"a turn did not come";
    v->place = atomic_fetch_add(v->order, 1);
    lg_turn_end(&t);
    return NULL;
}

/* Until the thread sleeps: it waits for the turn, there is nothing else it could sleep in. */
static void await_asleep(int tid)
{
    char path[64], line[256] = "", *state;
    snprintf(path, sizeof path, "/proc/%d/stat", tid);
    for (int i = 0; i < LONG_MS; i++, usleep(1000)) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
        if (fd >= 0) close(fd);
        line[LG_MAX(n, 0)] = 0;
        if ((state = strrchr(line, ')')) && state[2] == 'S') return;
    }
    fail_msg("%s never sleeps", path);
}

/* Who has just given it up and asks at once does not come before those who wait; they come in their
 * order. */
static void test_in_order(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        _Atomic(int) order = 0;
        struct waiter waiter[THREADS];
        pthread_t thread[THREADS];
        lg_turn t = turn_of(LONG_MS);
        assert_true(lg_turn_begin(&t));
        for (int i = 0; i < THREADS; i++) {
            waiter[i] = (struct waiter){.order = &order, .place = -1};
            assert_int_equal(pthread_create(&thread[i], NULL, wait_once, &waiter[i]), 0);
            while (!atomic_load(&waiter[i].tid)) usleep(100);
            await_asleep(atomic_load(&waiter[i].tid));
        }
        lg_turn_end(&t);
        assert_true(lg_turn_begin(&t));
        int before = atomic_load(&order);
        lg_turn_end(&t);
        for (int i = 0; i < THREADS; i++) {
            void *wrong;
            pthread_join(thread[i], &wrong);
            assert_null(wrong);
            assert_int_equal(waiter[i].place, i);
        }
        assert_int_equal(before, THREADS);
    }
}

/* ---- owners that do not give it up ---- */

static pid_t start(void (*child)(void))
{
    atomic_store(&w->said, 0);
    atomic_store(&w->free, 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        child();
        scratch_exit(0);
    }
    return pid;
}

/* Holds it until it is told to give it up, and then until it is killed. */
static void hold(void)
{
    lg_turn t = turn_of(LONG_MS);
    if (!lg_turn_begin(&t)) abort();
    atomic_store(&w->said, 1);
    while (!atomic_load(&w->free)) usleep(1000);
    lg_turn_end(&t);
    atomic_store(&w->said, 2);
    for (;;) pause();
}

static void kill_child(pid_t pid)
{
    int status;
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Delays others once, by their bound; later turns of others are waited for again. */
static void test_stopped_owner(void **state)
{
    (void)state;
    lg_turn t = turn_of(SHORT_MS);
    pid_t pid = start(hold);
    await(&w->said, 1);
    kill(pid, SIGSTOP);
    int64_t before = lg_now_ns();
    assert_false(lg_turn_begin(&t));
    assert_true(lg_now_ns() - before >= SHORT_MS * LG_MS_NS);
    int64_t waited = t.waited_ns;
    assert_true(waited >= SHORT_MS * LG_MS_NS);
    lg_turn_end(&t); /* nothing: it is the other's */
    for (int i = 0; i < 1000; i++) assert_false(lg_turn_begin(&t));
    assert_int_equal(t.waited_ns, waited);
    assert_int_equal(t.went, 1001);
    kill(pid, SIGCONT);
    atomic_store(&w->free, 1);
    await(&w->said, 2);
    assert_true(lg_turn_begin(&t));
    assert_int_equal(t.waited_ns, waited);
    lg_turn_end(&t);
    kill_child(pid);
    pid = start(hold); /* another turn: a new wait */
    await(&w->said, 1);
    assert_false(lg_turn_begin(&t));
    assert_true(t.waited_ns >= waited + SHORT_MS * LG_MS_NS);
    kill_child(pid);
    assert_free();
}

/* Who waits has the turn of one that is killed, and so has who comes later. */
static void test_dead_owner(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        _Atomic(int) order = 0;
        struct waiter waiter = {.order = &order, .place = -1};
        pthread_t thread;
        void *wrong;
        pid_t pid = start(hold);
        await(&w->said, 1);
        if (i % 2) {
            assert_int_equal(pthread_create(&thread, NULL, wait_once, &waiter), 0);
            while (!atomic_load(&waiter.tid)) usleep(100);
            await_asleep(atomic_load(&waiter.tid));
        }
        kill_child(pid);
        if (i % 2) {
            pthread_join(thread, &wrong);
            assert_null(wrong);
        }
        assert_free();
    }
}

/* Dies with the turn, and its list of mutexes out of the kernel's sight: nobody is told. */
static void hold_unlisted(void)
{
    lg_turn t = turn_of(LONG_MS);
    static struct {
        void *next;
        long offset;
        void *pending;
    } nothing = {&nothing, 0, NULL};
    if (!lg_turn_begin(&t)) abort();
    if (syscall(SYS_set_robust_list, &nothing, sizeof nothing) < 0) abort();
    atomic_store(&w->said, 1);
    for (;;) pause();
}

static void test_unmarked_death(void **state)
{
    (void)state;
    lg_turn t = turn_of(LONG_MS);
    pid_t pid = start(hold_unlisted);
    await(&w->said, 1);
    kill_child(pid);
    assert_false(lg_turn_begin(&t));
    assert_int_equal(t.error, ESRCH);
    assert_null(t.shared);
    assert_false(lg_turn_begin(&t)); /* for good, and at no cost */
    assert_int_equal(t.waited_ns, 0);
}

/* ---- deaths everywhere ---- */

static void take_turns(void)
{
    lg_turn t = turn_of(LONG_MS);
    int me = atomic_load(&w->said);
    for (unsigned i = 0;; i++) {
        if (!lg_turn_begin(&t)) abort();
        w->done[me]++;
        for (volatile unsigned k = 0; k < i * 7919 % 4096; k++) continue;
        lg_turn_end(&t);
    }
}

static pid_t start_taker(int k)
{
    atomic_store(&w->said, k);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        take_turns();
        scratch_exit(0);
    }
    return pid;
}

/* Four processes that do nothing but take turns, killed at random: the others go on, each of them. */
static void test_kills(void **state)
{
    (void)state;
    pid_t pid[PROCESSES];
    lg_turn t = turn_of(LONG_MS);
    unsigned seed = 1;
    for (int k = 0; k < PROCESSES; k++) {
        pid[k] = start_taker(k);
        while (!((volatile uint64_t *)w->done)[k]) usleep(100);
    }
    for (int i = 0; i < KILLS; i++) {
        int k = i % PROCESSES;
        usleep((useconds_t)rand_r(&seed) % 1000);
        kill_child(pid[k]);
        assert_true(lg_turn_begin(&t));
        uint64_t done = w->done[k];
        lg_turn_end(&t);
        pid[k] = start_taker(k);
        while (((volatile uint64_t *)w->done)[k] == done) usleep(100);
    }
    for (int k = 0; k < PROCESSES; k++) kill_child(pid[k]);
    assert_free();
}

#if !defined(__SANITIZE_THREAD__) /* whose own locks would be left behind */

static void step_of_life(void)
{
    lg_turn t = turn_of(LONG_MS);
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) _exit(1);
    raise(SIGSTOP);
    if (!lg_turn_begin(&t)) _exit(2);
    lg_turn_end(&t);
    _exit(0);
}

/* The first half alone: what is killed from `said` on holds the turn, while somebody waits for it. */
static void end_of_a_turn(void)
{
    lg_turn t = turn_of(LONG_MS);
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) _exit(1);
    if (!lg_turn_begin(&t)) _exit(2);
    atomic_store(&w->said, 1);
    while (!atomic_load(&w->free)) usleep(100);
    raise(SIGSTOP);
    lg_turn_end(&t);
    _exit(0);
}

/* Lets it make so many instructions; true when it has ended by itself before, else it is killed. */
static bool kill_after(pid_t pid, int instructions, int *ret_made)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSTOPPED(status));
    for (*ret_made = 0; *ret_made < instructions; ++*ret_made) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status)) {
            assert_int_equal(WEXITSTATUS(status), 0);
            return true;
        }
    }
    kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) continue;
    assert_true(WIFSIGNALED(status));
    return false;
}

static void leave_it_to_the_dead(void)
{
    pid_t pid = start(hold);
    await(&w->said, 1);
    kill_child(pid);
}

enum kind { FREE, OF_A_DEAD, WAITED_FOR, KINDS };

static bool one_death(enum kind kind, int instructions, int *ret_made)
{
    _Atomic(int) order = 0;
    struct waiter waiter = {.order = &order, .place = -1};
    pthread_t thread;
    if (kind == OF_A_DEAD) leave_it_to_the_dead();
    pid_t pid = start(kind == WAITED_FOR ? end_of_a_turn : step_of_life);
    if (kind == WAITED_FOR) {
        await(&w->said, 1);
        assert_int_equal(pthread_create(&thread, NULL, wait_once, &waiter), 0);
        while (!atomic_load(&waiter.tid)) usleep(100);
        await_asleep(atomic_load(&waiter.tid));
        atomic_store(&w->free, 1);
    }
    bool ended = kill_after(pid, instructions, ret_made);
    if (kind == WAITED_FOR) {
        void *wrong;
        pthread_join(thread, &wrong);
        assert_null(wrong);
    }
    assert_free();
    return ended;
}

/* Between any two instructions of taking and giving a turn: of a free one, of a dead process's, and of
 * one that somebody waits for. The next one has it. */
static void test_deaths_everywhere(void **state)
{
    (void)state;
    for (enum kind kind = FREE; kind < KINDS; kind++) {
        int all, made, deaths = 0;
        assert_true(one_death(kind, 1 << 20, &all));
        int stride = all / DEATHS_MAX + 1;
        for (int n = 0; n < all; n += stride, deaths++)
            if (one_death(kind, n, &made)) break;
        print_message("  %d deaths in %d instructions\n", deaths, all);
        assert_true(deaths >= LG_MIN(all, DEATHS_MAX) / 2);
    }
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_alone, setup, teardown),
        cmocka_unit_test_setup_teardown(test_short_pieces, setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_at_a_time, setup, teardown),
        cmocka_unit_test_setup_teardown(test_in_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stopped_owner, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dead_owner, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unmarked_death, setup, teardown),
        cmocka_unit_test_setup_teardown(test_kills, setup, teardown),
#if !defined(__SANITIZE_THREAD__)
        cmocka_unit_test_setup_teardown(test_deaths_everywhere, setup, teardown),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
