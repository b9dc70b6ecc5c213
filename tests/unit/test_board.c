/* The board: creation and attachment, incarnations, death. */
#include "base/clock.h"
#include "base/fs.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct shm_fixture f;

static int setup(void **state)
{
    shm_fixture_open(&f, 2);
    return 0;
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    lg_err_clear();
    return 0;
}

static void assert_refused_as(int code, uint64_t plan_hash, const char *says)
{
    lg_board *b = NULL;
    assert_int_equal(lg_board_open(f.board_path, plan_hash, &b), code);
    assert_null(b);
    if (!strstr(lg_err_message(), says)) fail_msg("no \"%s\" in: %s", says, lg_err_message());
}

static void assert_refused(uint64_t plan_hash, const char *says)
{
    assert_refused_as(LG_ERR_MISMATCH, plan_hash, says);
}

static void test_create_and_open(void **state)
{
    lg_board *b;
    assert_int_equal(lg_board_open(f.board_path, 0x1234, &b), 0);
    assert_int_equal(b->s->preamble.run_id, f.board->s->preamble.run_id);
    assert_int_not_equal(b->s->preamble.run_id, 0);
    assert_int_equal(b->s->ranks, 2);
    assert_int_equal(b->s->max_steps, 10);
    assert_true(b->s->has_ema);
    atomic_store(&lg_board_row(b, LG_ROLE_vae, 1)->samples, 77);
    assert_int_equal(atomic_load(&lg_board_row(f.board, LG_ROLE_vae, 1)->samples), 77);
    lg_board_close(&b);
    assert_int_equal(lg_board_open("/tmp/lg-no-such-board", 0, &b), LG_ERR_NOTFOUND);
}

static void test_refusals(void **state)
{
    assert_refused(0x1235, "plan 0000000000001234");
    struct lg_board_shared *s = f.board->s;
    s->preamble.layout_hash ^= 1; /* its lowest 16 bits are lg_board_shared's */
    assert_refused(0, "lg_board_shared");
    s->preamble.layout_hash ^= 1 ^ UINT64_C(1) << 20;
    assert_refused(0, "lg_board_row");
    s->preamble.layout_hash = lg_layout_hash() ^ UINT64_C(1) << 63;
    assert_refused(0, "lg_region_head");
    s->preamble.layout_hash = lg_layout_hash();
    s->preamble.bytes++;
    assert_refused(0, "lg_board_shared");
    s->preamble.bytes--;
    s->preamble.boot_id[0] ^= 1;
    assert_refused(0, "last start");
    s->preamble.boot_id[0] ^= 1;
    s->preamble.version++;
    assert_refused(0, "version");
    s->preamble.version--;
    s->preamble.magic ^= 1;
    assert_refused_as(LG_ERR_CORRUPT, 0, "not a board");
    s->preamble.magic ^= 1;
    s->preamble.inode++;
    assert_refused(0, "is a copy");
    s->preamble.inode--;
    s->ranks = 0;
    assert_refused_as(LG_ERR_CORRUPT, 0, "damaged board");
    assert_int_equal(truncate(f.board_path, 4096), 0);
    assert_refused_as(LG_ERR_CORRUPT, 0, "has 4096 bytes");
    assert_int_equal(truncate(f.board_path, 103), 0);
    assert_refused_as(LG_ERR_CORRUPT, 0, "not a board");
}

/* What may live: only another boot, an end or no file say that nothing does. */
static void test_standing(void **state)
{
    struct lg_board_preamble *p = &f.board->s->preamble, seen;
    int code;
    assert_int_equal(lg_board_look(f.board_path, &seen, &code), LG_BOARD_FITS);
    assert_int_equal(seen.run_id, p->run_id);
    assert_int_equal(lg_board_look("/tmp/lg-no-such-board", &seen, &code), LG_BOARD_MISSING);
    assert_int_equal(code, LG_ERR_NOTFOUND);
    p->layout_hash ^= 1;
    assert_int_equal(lg_board_look(f.board_path, &seen, &code), LG_BOARD_OTHER_BUILD);
    p->layout_hash ^= 1;
    p->version = 2; /* which had the number of a step where `ended` is now */
    atomic_store(&p->ended, UINT64_C(1) << 40);
    assert_int_equal(lg_board_look(f.board_path, &seen, &code), LG_BOARD_OTHER_BUILD);
    atomic_store(&p->ended, LG_BOARD_ENDED);
    assert_int_equal(lg_board_look(f.board_path, &seen, &code), LG_BOARD_OVER);
    p->boot_id[0] ^= 1;
    assert_int_equal(lg_board_look(f.board_path, &seen, &code), LG_BOARD_OTHER_BOOT);
    assert_int_equal(lg_board_look("/", &seen, &code), LG_BOARD_UNREADABLE);
}

/* Whoever has joined holds the file until the end of its process. */
static void test_held(void **state)
{
    assert_false(lg_board_is_held(f.board_path));
    fflush(NULL);
    int fds[2];
    char byte;
    assert_int_equal(pipe(fds), 0);
    pid_t child = fork();
    if (child == 0) {
        lg_board *b;
        LG_ASSERT(lg_board_open(f.board_path, 0, &b) == 0);
        shm_fixture_join(b, LG_ROLE_vae, 0);
        LG_ASSERT(write(fds[1], "", 1) == 1);
        for (;;) pause();
    }
    assert_int_equal(read(fds[0], &byte, 1), 1);
    assert_true(lg_board_is_held(f.board_path));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_false(lg_board_is_held(f.board_path));
    close(fds[0]);
    close(fds[1]);
}

static void test_create_replaces_whole(void **state)
{
    uint64_t old_run = f.board->s->preamble.run_id;
    lg_board *b;
    struct lg_board_spec spec = {.plan = &f.plan, .start_step = 5, .max_steps = 20};
    assert_int_equal(lg_board_create(f.board_path, &spec, &b), 0);
    assert_int_not_equal(b->s->preamble.run_id, old_run);
    assert_int_equal(f.board->s->preamble.run_id, old_run); /* who mapped the former one keeps it */
    lg_board_close(&b);
    assert_int_equal(
        lg_board_create("/proc/no/board", &(struct lg_board_spec){.plan = &f.plan}, &b),
        LG_ERR_NOTFOUND);
}

static void test_incarnations(void **state)
{
    lg_life life;
    assert_int_equal(lg_board_life(f.board, LG_ROLE_vae, 0, &life), 0);
    assert_int_equal(life, LG_LIFE_NONE);
    lg_incarnation a = lg_board_enlist(f.board, LG_ROLE_vae, 0);
    assert_int_equal(lg_incarnation_row(a), lg_row(LG_ROLE_vae, 0));
    assert_int_equal(lg_board_life(f.board, LG_ROLE_vae, 0, &life), a);
    assert_int_equal(life, LG_LIFE_STARTING);
    assert_false(lg_board_is_dead(f.board, a));
    assert_int_equal(lg_board_join(f.board, a), 0);
    assert_int_equal(atomic_load(&lg_board_row(f.board, LG_ROLE_vae, 0)->pid), getpid());
    assert_false(lg_board_is_dead(f.board, a));
    assert_int_equal(lg_board_join(f.board, a), LG_ERR_MISMATCH); /* once only */

    lg_board_bury(f.board, a);
    assert_true(lg_board_is_dead(f.board, a));
    lg_incarnation b = lg_board_enlist(f.board, LG_ROLE_vae, 0);
    assert_int_not_equal(a, b);
    assert_true(lg_board_is_dead(f.board, a));
    assert_false(lg_board_is_dead(f.board, b));
    lg_board_bury(f.board, a); /* late: no effect on b */
    assert_false(lg_board_is_dead(f.board, b));
}

/* A child of a supervisor that died: the next one buries it before it has joined. It must not
 * write anything, least of all into its successor's row. */
/* A row that nobody follows in is as it was before anybody came; a later one is not touched. */
static void test_vacate(void **state)
{
    (void)state;
    lg_life life;
    lg_incarnation a = lg_board_enlist(f.board, LG_ROLE_vae, 3);
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_vae, 3);
    assert_int_equal(lg_board_join(f.board, a), 0);
    atomic_store(&row->samples, 5);
    lg_board_vacate(f.board, a);
    assert_int_equal(lg_board_life(f.board, LG_ROLE_vae, 3, &life), 0);
    assert_int_equal(life, LG_LIFE_NONE);
    assert_int_equal(atomic_load(&row->pid), 0);
    assert_int_equal(atomic_load(&row->samples), 5);
    assert_true(lg_board_is_dead(f.board, a)); /* its claims pass on */
    lg_incarnation c = lg_board_enlist(f.board, LG_ROLE_vae, 3);
    assert_int_equal(lg_board_join(f.board, c), 0);
    lg_board_vacate(f.board, a);
    assert_int_equal(lg_board_life(f.board, LG_ROLE_vae, 3, &life), c);
    assert_int_equal(life, LG_LIFE_RUNNING);
    assert_int_equal(atomic_load(&row->pid), getpid());
}

static void test_late_child_writes_nothing(void **state)
{
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_text, 3);
    lg_incarnation late = lg_board_enlist(f.board, LG_ROLE_text, 3);
    lg_board_bury(f.board, late);
    lg_incarnation next = lg_board_enlist(f.board, LG_ROLE_text, 3);
    assert_int_equal(lg_board_join(f.board, late), LG_ERR_MISMATCH);
    assert_int_equal(atomic_load(&row->pid), 0);
    assert_int_equal(atomic_load(&row->start_time), 0);
    assert_int_equal(lg_board_join(f.board, next), 0);
}

static pid_t sleeper(void)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        for (;;) pause();
    }
    return child;
}

static void test_death_by_pidfd(void **state)
{
    lg_incarnation me = lg_board_enlist(f.board, LG_ROLE_loader, 0);
    int up[2];
    char byte;
    assert_int_equal(pipe(up), 0);
    pid_t child = fork();
    if (child == 0) {
        if (lg_board_join(f.board, me) < 0 || write(up[1], "", 1) < 0) _exit(1);
        for (;;) pause();
    }
    assert_int_equal(read(up[0], &byte, 1), 1);
    assert_int_equal(lg_process_start_time(child),
                     atomic_load(&lg_board_row(f.board, LG_ROLE_loader, 0)->start_time));
    assert_false(lg_board_is_dead(f.board, me));
    int fd = lg_board_pidfd(f.board, LG_ROLE_loader, 0);
    assert_true(fd >= 0);
    kill(child, SIGKILL);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 2000), 1);
    assert_true(lg_board_is_dead(f.board, me)); /* a zombie is dead */
    assert_int_equal(lg_board_pidfd(f.board, LG_ROLE_loader, 0), -1);
    waitpid(child, NULL, 0);
    assert_true(lg_board_is_dead(f.board, me)); /* and so is nobody */
    close(fd);
    close(up[0]);
    close(up[1]);
}

/* The same pid with another start time is another process. */
static void test_reused_pid(void **state)
{
    lg_incarnation me = shm_fixture_join(f.board, LG_ROLE_ema, 0);
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_ema, 0);
    assert_false(lg_board_is_dead(f.board, me));
    atomic_fetch_add(&row->start_time, 1);
    assert_true(lg_board_is_dead(f.board, me));
    assert_int_equal(lg_board_pidfd(f.board, LG_ROLE_ema, 0), -1);
    assert_true(lg_process_start_time(getpid()) > 0);
    pid_t child = sleeper();
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_int_equal(lg_process_start_time(child), 0);
}

/* A row between its process's join and the rest of it, or never filled: nobody to look for. */
static void test_rows_without_a_process(void **state)
{
    (void)state;
    lg_incarnation me = lg_board_enlist(f.board, LG_ROLE_ema, 0);
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_ema, 0);
    assert_int_equal(lg_board_pidfd(f.board, LG_ROLE_ema, 0), -1); /* starting */
    assert_int_equal(lg_board_pidfd(f.board, LG_ROLE_vae, 7), -1); /* none */
    atomic_store(&row->life, (uint64_t)me << 8 | LG_LIFE_RUNNING);
    assert_int_equal(lg_board_pidfd(f.board, LG_ROLE_ema, 0), -1);
    assert_false(lg_board_is_dead(f.board, me)); /* judged by its state alone */
    assert_true(lg_board_is_dead(f.board, me + LG_ROWS));
    assert_string_equal(lg_run_state_name((lg_run_state)99), "unknown"); /* of another build */
    assert_string_equal(lg_run_state_name((lg_run_state)-1), "unknown");
}

/* Without an fd to look with, nobody is dead, and no board is "not there". */
static void test_blind(void **state)
{
    (void)state;
    struct rlimit limit, none;
    lg_board *b = NULL;
    lg_incarnation me = shm_fixture_join(f.board, LG_ROLE_ema, 0);
    getrlimit(RLIMIT_NOFILE, &limit);
    none = limit;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
    bool dead = lg_board_is_dead(f.board, me);
    int pidfd = lg_board_pidfd(f.board, LG_ROLE_ema, 0), rc = lg_board_open(f.board_path, 0, &b);
    setrlimit(RLIMIT_NOFILE, &limit);
    assert_false(dead);
    assert_int_equal(pidfd, LG_ERR_BUSY);
    assert_int_equal(rc, LG_ERR_IO);
    lg_err_clear();
}

/* A child of an earlier board's lgsup that comes too late is not taken for one of this board's. */
static void test_boards_share_no_incarnation(void **state)
{
    (void)state;
    lg_board *other = NULL;
    struct lg_board_spec spec = {.plan = &f.plan, .max_steps = 10};
    int same = 0;
    lg_incarnation mine = lg_board_enlist(f.board, LG_ROLE_vae, 0);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(lg_board_create(f.board_path, &spec, &other), 0);
        same += lg_board_enlist(other, LG_ROLE_vae, 0) == mine;
        lg_board_close(&other);
    }
    assert_true(same <= 1); /* one in two million each */
}

/* Wherever a board's numbers begin, two million processes can be started. */
static void test_incarnations_are_left(void **state)
{
    (void)state;
    lg_board *b = NULL;
    const struct lg_board_spec spec = {.plan = &f.plan, .max_steps = 10};
    for (int i = 0; i < 40; i++) {
        assert_int_equal(lg_board_create(f.board_path, &spec, &b), 0);
        assert_in_range(lg_board_enlist(b, LG_ROLE_vae, 0), LG_ROWS, UINT32_MAX / 2 + LG_ROWS);
        lg_board_close(&b);
    }
}

static void test_global_commit(void **state)
{
    assert_int_equal(lg_board_global_commit(f.board), LG_MARK_NONE);
    atomic_store(&lg_board_row(f.board, LG_ROLE_trainer, 0)->commit, 9);
    assert_int_equal(lg_board_global_commit(f.board), LG_MARK_NONE);
    atomic_store(&lg_board_row(f.board, LG_ROLE_trainer, 1)->commit, 8);
    assert_int_equal(lg_board_global_commit(f.board), 8);
    assert_string_equal(lg_run_state_name(LG_RUN_DRAINING), "draining");
    assert_string_equal(lg_run_state_name(LG_RUN_FAILED), "failed");
}

static void test_speed(void **state)
{
    enum { N = 2000 };
    lg_incarnation me = shm_fixture_join(f.board, LG_ROLE_loader, 5);
    int64_t t = lg_now_ns();
    for (int i = 0; i < N; i++) assert_false(lg_board_is_dead(f.board, me));
    print_message("is_dead of a living process: %lld ns", (long long)(lg_now_ns() - t) / N);
    lg_board_bury(f.board, me);
    t = lg_now_ns();
    for (int i = 0; i < N; i++) assert_true(lg_board_is_dead(f.board, me));
    print_message("; of a buried one: %lld ns\n", (long long)(lg_now_ns() - t) / N);
}

/* What reads words that others write, the least mark of all ranks for one, hands loads to these. */
static int g_calls;
static int call(int n)
{
    g_calls++;
    return n;
}
static void test_least_and_most_of_calls(void **state)
{
    assert_int_equal(LG_MIN(call(3), call(4)), 3);
    assert_int_equal(LG_MAX(call(3), LG_MIN(call(9), call(4))), 4);
    assert_int_equal(g_calls, 5);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_create_and_open),
        T(test_refusals),
        T(test_standing),
        T(test_held),
        T(test_create_replaces_whole),
        T(test_rows_without_a_process),
        T(test_blind),
        T(test_boards_share_no_incarnation),
        T(test_incarnations_are_left),
        T(test_incarnations),
        T(test_vacate),
        T(test_late_child_writes_nothing),
        T(test_death_by_pidfd),
        T(test_reused_pid),
        T(test_global_commit),
        T(test_speed),
        T(test_least_and_most_of_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
