/* The keeper beside a service manager's fd store (store_manager.h). */
#include "base/check.h"
#include "base/clock.h"
#include "shm/keeper.h"
#include "shm/keeper_store.h"
#include "shm/region.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include "tests/unit/store_manager.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { WAIT_MS_MAX = 10000 };

static struct shm_fixture f;
static struct store_manager m;

static void spawn_keeper(void)
{
    f.keeper_pid = fork();
    if (f.keeper_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (m.n_stored) store_manager_pass(&m);
        scratch_exit(lg_keeper_serve_stored(f.keeper) < 0);
    }
}

static void start_keeper(void)
{
    m.ready = false;
    spawn_keeper();
    for (int i = 0; i < WAIT_MS_MAX && !m.ready; i++) usleep(1000);
    assert_true(m.ready);
}

/* ---- the tests ---- */

static char g_fresh[200];

static int setup(void **state)
{
    shm_fixture_open(&f, 1);
    snprintf(g_fresh, sizeof g_fresh, "%s.new", f.keeper);
    store_manager_start(&m, f.dir);
    start_keeper();
    return rename(g_fresh, f.keeper); /* nothing is stored yet: the first one waits to be named */
}

static int teardown(void **state)
{
    shm_fixture_close(&f);
    store_manager_stop(&m);
    lg_err_clear();
    return 0;
}

static int put(const char *name, const char *text)
{
    return shm_fixture_put(&f, name, text);
}

static void assert_holds(const char *name, const char *text)
{
    assert_true(shm_fixture_holds(&f, name, text));
}

static void assert_lacks(const char *name)
{
    assert_true(shm_fixture_lacks(&f, name));
}

static void test_what_is_stored(void **state)
{
    assert_int_equal(put("vae/0/weights", "alpha"), 0);
    assert_int_equal(m.n_stored, 1);
    assert_string_equal(m.last_store, "FDSTORE=1\nFDPOLL=0\nFDNAME=vae/0/weights=5");
    assert_int_equal(m.n_barriers, 1);
    assert_int_equal(put("vae/0/weights", "beta"), LG_ERR_BUSY);
    assert_int_equal(m.n_stored, 1); /* not a second one of the name */
}

/* Who puts or gets is told that the store has it: a second copy, which needs no lgsup. */
static void test_a_second_copy(void **state)
{
    uint64_t bytes;
    int fd = shm_fixture_memory("alpha"), got;
    assert_int_equal(lg_keeper_put(f.keeper, "a", 5, fd), LG_KEEPER_STORED);
    assert_int_equal(lg_keeper_get(f.keeper, "a", &bytes, &got), LG_KEEPER_STORED);
    close(got);
    close(fd);
    struct lg_region_spec spec = {.keeper = f.keeper, .name = "x/0/a", .bytes = 100};
    lg_region *r;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_true(lg_region_is_copied(r));
    atomic_store(&r->head->copied, 0); /* its creator died before it said so: who finds it does */
    lg_region_close(&r);
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_true(lg_region_is_copied(r));
    atomic_store(&r->head->copied, 0);
    assert_int_equal(lg_region_deposit(f.keeper, r), 0);
    assert_true(lg_region_is_copied(r));
    lg_region_close(&r);
}

/* Of a payload that others make on a GPU, who uses the front alone knows nothing: the store has the head, and that is no
 * second copy of all. */
static void test_a_front_alone(void **state)
{
    const struct lg_region_place front = {.name = "cuda:0"};
    const struct lg_region_spec spec = {
        .keeper = f.keeper, .name = "x/0/a", .bytes = 100, .front_bytes = 100, .place = &front};
    lg_region *r;
    assert_int_equal(lg_region_open(&spec, &r), 0);
    assert_false(lg_region_is_copied(r));
    assert_int_equal(lg_region_deposit(f.keeper, r), 0);
    assert_false(lg_region_is_copied(r));
    lg_region_close(&r);
}

/* The answer waits for the barrier: a name that somebody was told of survives. */
static void test_put_waits_for_the_store(void **state)
{
    int status;
    m.hold = true;
    pid_t child = fork();
    if (child == 0) _exit(put("a", "alpha") != 0);
    usleep(300000);
    assert_int_equal(waitpid(child, &status, WNOHANG), 0);
    m.hold = false;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_holds("a", "alpha");
}

static void test_next_keeper_has_everything(void **state)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    assert_int_equal(put("a", "alpha"), 0);
    assert_int_equal(put("ckpt/0/staging@", "gamma!"), 0);
    assert_int_equal(put("dropped", "delta"), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "dropped"), 0);
    assert_int_equal(m.n_stored, 2);
    for (int i = 0; i < 3; i++) {
        shm_fixture_kill_keeper(&f);
        start_keeper();
        assert_int_equal(access(g_fresh, F_OK), -1); /* it is at its place at once */
        assert_holds("a", "alpha");
        assert_holds("ckpt/0/staging@", "gamma!");
        assert_lacks("dropped");
        assert_int_equal(lg_keeper_list(f.keeper, 2, name, &bytes), LG_ERR_NOTFOUND);
    }
    assert_int_equal(put("b", "beta"), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "a"), 0); /* also of what came from the store */
    shm_fixture_kill_keeper(&f);
    start_keeper();
    assert_holds("b", "beta");
    assert_lacks("a");
}

/* Without anything from the store nobody knows whether nothing is missing: somebody has to say so.
 * */
static void test_empty_store(void **state)
{
    int fd;
    uint64_t bytes;
    shm_fixture_kill_keeper(&f);
    start_keeper();
    assert_int_equal(lg_keeper_get(f.keeper, "a", &bytes, &fd), LG_ERR_IO);
    assert_int_equal(rename(g_fresh, f.keeper), 0);
    assert_lacks("a");
}

/* "Ends" is not "forgets": the unit is stopped or restarted by its manager, who has the store. */
static void test_sigterm_keeps_the_store(void **state)
{
    assert_int_equal(put("a", "alpha"), 0);
    shm_fixture_end_keeper(&f);
    assert_int_equal(m.n_stored, 1);
    start_keeper();
    assert_holds("a", "alpha");
    assert_int_equal(lg_keeper_drop(f.keeper, ""), 0);
    assert_int_equal(shm_fixture_await_keeper(&f), 0);
    assert_int_equal(m.n_stored, 0);
}

static void test_what_cannot_be_stored_is_not_put(void **state)
{
    assert_int_equal(put("a:b", "alpha"), LG_ERR_USAGE);
    assert_int_equal(put("a=b", "alpha"), LG_ERR_USAGE);
    assert_int_equal(unlink(m.path), 0); /* no manager any more */
    assert_int_equal(put("a", "alpha"), LG_ERR_IO);
    assert_lacks("a");
}

/* A manager that is gone cannot be told of a drop: the memory goes here, and the caller is not held
 * up. */
static void test_drop_without_a_manager(void **state)
{
    assert_int_equal(put("a", "alpha"), 0);
    assert_int_equal(unlink(m.path), 0);
    assert_int_equal(lg_keeper_drop(f.keeper, "a"), 0);
    assert_lacks("a");
}

/* ---- a manager that is slow, or deaf ---- */

static pid_t put_elsewhere(const char *name)
{
    pid_t child = fork();
    if (child != 0) return child;
    close_range(3, ~0U, 0); /* the manager's barriers */
    _exit(-put(name, "alpha"));
}

static int code_of(pid_t child)
{
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return -WEXITSTATUS(status);
}

static void wait_for_count(int n)
{
    for (int i = 0; i < WAIT_MS_MAX && store_manager_count(&m) != n; i++) usleep(1000);
    assert_int_equal(store_manager_count(&m), n);
}

/* Who needs the manager's word waits for it, nobody else does; it is not waited for for ever. What
 * came of a put that was given up is taken out before the name is stored again. */
static void test_a_slow_manager_holds_nobody(void **state)
{
    assert_int_equal(put("a", "alpha"), 0);
    m.hold = true;
    pid_t child = put_elsewhere("b");
    wait_for_count(2); /* it lies there, but nobody has said so */
    assert_lacks("b"); /* answered while the put waits */
    assert_holds("a", "alpha");
    assert_int_equal(put("a", "beta"), LG_ERR_BUSY);
    assert_int_equal(waitpid(child, NULL, WNOHANG), 0);
    assert_int_equal(code_of(child), LG_ERR_TIMEOUT);
    child = put_elsewhere("b"); /* waits for the drop of the first */
    assert_lacks("b");
    m.hold = false;
    assert_int_equal(code_of(child), 0);
    assert_holds("b", "alpha");
    wait_for_count(2);
    assert_false(m.doubled);
}

/* A barrier speaks of what was handed over before it, not of what came later. */
static void test_a_barrier_confirms_what_came_before(void **state)
{
    int behind = 0;
    m.hold = true;
    pid_t first = put_elsewhere("a");
    wait_for_count(1);
    assert_lacks("a"); /* its barrier has been sent */
    pid_t second = put_elsewhere("b");
    for (int i = 0; i < WAIT_MS_MAX && !behind; i++, usleep(1000))
        assert_int_equal(ioctl(m.socket, FIONREAD, &behind), 0);
    assert_true(behind > 0);
    m.let = 1;
    assert_int_equal(code_of(first), 0);
    wait_for_count(2);
    assert_lacks("b");
    m.hold = false;
    assert_int_equal(code_of(second), 0);
    assert_holds("b", "alpha");
}

/* Even when its queue is full. Nothing that was dropped is forgotten. */
static void test_a_deaf_manager_holds_nobody(void **state)
{
    static const char *const names[] = {"1", "2", "3", "4",  "5",  "6",
                                        "7", "8", "9", "10", "11", "12"};
    pid_t child[LG_ARRAY_LEN(names)];
    assert_int_equal(put("a", "alpha"), 0);
    assert_int_equal(put("b", "beta"), 0);
    store_manager_deafen(&m);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) child[i] = put_elsewhere(names[i]);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++)
        assert_int_equal(code_of(child[i]), LG_ERR_TIMEOUT);
    assert_holds("a", "alpha");
    assert_int_equal(lg_keeper_drop(f.keeper, "b"), 0); /* the manager does not know yet */
    assert_lacks("b");
    assert_int_equal(store_manager_count(&m), 2);
    pid_t again = put_elsewhere("b"); /* not before it does */
    assert_lacks("b");
    m.deaf = false;
    assert_int_equal(code_of(again), 0);
    assert_int_equal(put("1", "delta"), 0);
    wait_for_count(3);
    assert_false(m.doubled);
    shm_fixture_kill_keeper(&f);
    start_keeper();
    assert_holds("b", "alpha");
    assert_holds("1", "delta");
    assert_holds("a", "alpha");
}

/* One that starts serves although it cannot say that it is ready, and says it when it can. */
static void test_ready_is_said_later(void **state)
{
    assert_int_equal(put("a", "alpha"), 0);
    shm_fixture_kill_keeper(&f);
    store_manager_deafen(&m);
    m.ready = false;
    struct lg_store s;
    assert_int_equal(lg_store_open(&s), 0);
    int n = 0;
    while (lg_store_drop(&s, "nothing", 0) == 0) assert_true(++n < 100000);
    lg_store_close(&s);
    spawn_keeper();
    for (int i = 0; i < WAIT_MS_MAX && !shm_fixture_holds(&f, "a", "alpha"); i++) usleep(1000);
    assert_holds("a", "alpha");
    assert_false(m.ready);
    m.deaf = false;
    for (int i = 0; i < WAIT_MS_MAX && !m.ready; i++) usleep(1000);
    assert_true(m.ready);
}

/* Somebody else's fd in the store, a wrong name, or a second one of a name, is let go. */
static void test_strange_fds_in_the_store(void **state)
{
    static const char *const names[] = {"stored", "x=", "=5", "a=5x", "good=5", "good=5"};
    shm_fixture_kill_keeper(&f);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++)
        store_manager_add(&m, names[i], shm_fixture_memory("alpha"));
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    start_keeper();
    assert_holds("good", "alpha");
    assert_int_equal(lg_keeper_list(f.keeper, 1, name, &bytes), LG_ERR_NOTFOUND);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_what_is_stored),
        T(test_a_second_copy),
        T(test_a_front_alone),
        T(test_put_waits_for_the_store),
        T(test_next_keeper_has_everything),
        T(test_empty_store),
        T(test_sigterm_keeps_the_store),
        T(test_what_cannot_be_stored_is_not_put),
        T(test_drop_without_a_manager),
        T(test_a_slow_manager_holds_nobody),
        T(test_a_barrier_confirms_what_came_before),
        T(test_a_deaf_manager_holds_nobody),
        T(test_ready_is_said_later),
        T(test_strange_fds_in_the_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
