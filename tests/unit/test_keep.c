/* lgsup's side of the keeper (supervisor/core/keep.h), where the keeper is a service that outlives runs, and
 * what it takes for memory of this run. Keepers are children of the test. */
#include "base/clock.h"
#include "shm/region.h"
#include "supervisor/core/keep.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static struct shm_fixture f;
static lg_keep k;
static pid_t g_keeper[4];
static int g_keepers, g_null;

static int setup(void **state)
{
    (void)state;
    shm_fixture_open(&f, 2);
    scratch_make();
    lg_mkdirs(scratch_path("logs"));
    memset(&k, 0, sizeof k);
    assert_int_equal(lg_keep_init(&k, scratch_path("."), f.dir, true), 0);
    g_keepers = 0;
    g_null = open("/dev/null", O_RDWR | O_CLOEXEC);
    return 0;
}

static void end_keepers(void)
{
    for (; g_keepers > 0; g_keepers--) {
        kill(g_keeper[g_keepers - 1], SIGKILL);
        waitpid(g_keeper[g_keepers - 1], NULL, 0);
    }
}

static int teardown(void **state)
{
    (void)state;
    k.service = false;
    lg_keep_leave(&k);
    end_keepers();
    close(g_null);
    shm_fixture_close(&f);
    scratch_remove();
    lg_err_clear();
    return 0;
}

/* What the service manager does: a keeper that listens at RUNTIME/keeper<suffix>. */
static pid_t serve(const char *suffix)
{
    char socket[LG_PATH_BYTES], byte;
    int ready[2];
    assert_int_equal(lg_path(socket, "%s%s", k.socket, suffix), 0);
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        scratch_exit(lg_keeper_serve(socket, ready[1]) < 0);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return g_keeper[g_keepers++] = pid;
}

static void hold(const char *name)
{
    assert_int_equal(lg_keeper_put(k.socket, name, 1, g_null), 0);
}

static bool holds(const char *name)
{
    uint64_t bytes;
    int fd = -1;
    bool there = lg_keeper_get(k.socket, name, &bytes, &fd) == 0;
    if (fd >= 0) close(fd);
    lg_err_clear();
    return there;
}

static uint32_t row_pid(void)
{
    return atomic_load(&lg_board_row(f.board, LG_ROLE_keeper, 0)->pid);
}

static uint64_t epoch(void)
{
    return atomic_load(&f.board->s->keeper_epoch);
}

/* ---- the service ---- */

/* Its unit does not run: said so, within seconds. */
static void test_no_service(void **state)
{
    (void)state;
    scratch_write("x", "");
    close(open(k.socket, O_CREAT | O_WRONLY | O_CLOEXEC, 0600)); /* a path that nobody listens at */
    assert_int_equal(lg_keep_start(&k, f.board), LG_ERR_TIMEOUT);
    assert_non_null(strstr(lg_err_message(), "its unit is not running"));
    assert_int_equal(k.child.pidfd, -1);
    assert_int_equal(lg_keep_adopt(&k, f.board), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "the keeper is dead"));
    lg_keep_forget(f.dir); /* nobody to forget: fine */
    lg_keep_forget("/nowhere");
    assert_string_equal(lg_err_message(), "");
}

/* One with an empty store is found at keeper.new, and by everybody only when it is full. */
static void test_fresh_service(void **state)
{
    (void)state;
    struct stat st;
    pid_t pid = serve(".new");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    assert_int_equal(k.child.pid, pid);
    assert_int_equal(row_pid(), pid);
    assert_int_equal(epoch(), 0); /* nobody has another keeper's fds */
    assert_int_equal(stat(k.socket, &st), 0);
    hold("a");
    lg_keep_refresh(&k);
    assert_int_equal(k.n_copies, 1);
    kill(pid, SIGKILL); /* the manager starts another, again with nothing */
    lg_child_wait(&k.child, 5000);
    lg_child_reap(&k.child);
    unlink(k.socket);
    pid = serve(".new");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    assert_int_equal(row_pid(), pid);
    assert_int_equal(epoch(), 1);
    assert_true(holds("a"));
    assert_int_equal(atomic_load(&lg_board_row(f.board, LG_ROLE_keeper, 0)->restarts), 1);
}

/* It outlives runs: a new run must not find an earlier one's memory in it. */
static void test_service_of_an_earlier_run(void **state)
{
    (void)state;
    serve("");
    hold("old/1");
    hold("old/2");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    assert_false(holds("old/1") || holds("old/2"));
}

/* The same run: what its store has stays, what only lgsup has is added. */
static void test_service_with_a_store(void **state)
{
    (void)state;
    serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    hold("a");
    hold("b");
    lg_keep_refresh(&k);
    assert_int_equal(k.n_copies, 2);
    lg_keeper_drop(k.socket, "b");
    lg_child_reap(&k.child);
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    assert_true(holds("a") && holds("b"));
    assert_int_equal(epoch(), 1);
}

static void test_adopt_a_service(void **state)
{
    (void)state;
    pid_t pid = serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    lg_child_reap(&k.child);
    assert_int_equal(lg_keep_adopt(&k, f.board), 0); /* the one that the board names */
    assert_int_equal(k.child.pid, pid);
    assert_int_equal(epoch(), 0);
    lg_child_reap(&k.child);
    atomic_fetch_add(&lg_board_row(f.board, LG_ROLE_keeper, 0)->start_time, 1); /* a reused pid */
    assert_int_equal(lg_keep_adopt(&k, f.board), 0);
    assert_int_equal(epoch(), 1);
    lg_child_reap(&k.child);
    end_keepers(); /* its manager has started the next */
    pid = serve("");
    assert_int_equal(lg_keep_adopt(&k, f.board), 0);
    assert_int_equal(row_pid(), pid);
    assert_int_equal(epoch(), 2);
}

/* The end of a run: the memory is let go, the service lives on for the next. */
static void test_end_of_a_service(void **state)
{
    (void)state;
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    pid_t pid = serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    hold("a");
    lg_keep_end(&k);
    assert_int_equal(k.child.pidfd, -1);
    assert_int_equal(lg_keeper_list(k.socket, 0, name, &bytes), LG_ERR_NOTFOUND);
    assert_int_equal(kill(pid, 0), 0);
    hold("b");
    lg_keep_forget(f.dir);
    assert_false(holds("b"));
    assert_int_equal(lg_keep_adopt(&k, f.board), 0);
    end_keepers();
    lg_keep_end(&k); /* it has died: nothing to wait for */
    assert_int_equal(k.child.pidfd, -1);
}

/* Two of a run's regions in a keeper that dies while it is filled: the start fails with a reason, and
 * nothing of it stays. */
static void test_service_that_dies_while_it_is_filled(void **state)
{
    (void)state;
    serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    lg_child_reap(&k.child);
    k.copy[k.n_copies++] = (struct lg_keep_copy){.name = "a", .fd = -1}; /* cannot be sent */
    assert_true(lg_keep_start(&k, f.board) < 0);
    assert_true(lg_err_message()[0]);
    assert_int_equal(k.child.pidfd, -1);
    k.n_copies = 0;
}

/* ---- our own ---- */

/* A pid on the board is no proof: another process may have it by now. */
static void test_adopt_by_pid(void **state)
{
    (void)state;
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_keeper, 0);
    k.service = false;
    assert_int_equal(lg_keep_adopt(&k, f.board), LG_ERR_NOTFOUND); /* nobody was ever there */
    pid_t pid = serve("");
    atomic_store(&row->pid, (uint32_t)pid);
    atomic_store(&row->start_time, lg_process_start_time(pid) + 1);
    assert_int_equal(lg_keep_adopt(&k, f.board), LG_ERR_NOTFOUND);
    atomic_store(&row->start_time, lg_process_start_time(pid));
    assert_int_equal(lg_keep_adopt(&k, f.board), 0);
    assert_int_equal(k.child.pid, pid);
    lg_child_reap(&k.child);
    kill(pid, SIGKILL);
    siginfo_t info;
    waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT); /* dead, and its pid not free yet */
    assert_int_equal(lg_keep_adopt(&k, f.board), LG_ERR_NOTFOUND);
}

/* Strays of an lgsup that died while it started a keeper, before and after the rename. */
static void test_strays_are_ended(void **state)
{
    (void)state;
    int status;
    pid_t a = serve(""), b = serve(".new");
    lg_keep_end_strays(f.dir);
    g_keepers = 0;
    assert_true(waitpid(a, &status, 0) == a && WIFEXITED(status));
    assert_true(waitpid(b, &status, 0) == b && WIFEXITED(status));
    lg_keep_end_strays(f.dir); /* nobody: fine */
}

/* A keeper that hangs is not waited for without end. */
static void test_end_of_a_hung_keeper(void **state)
{
    (void)state;
    struct lg_board_row *row = lg_board_row(f.board, LG_ROLE_keeper, 0);
    k.service = false;
    pid_t pid = serve("");
    atomic_store(&row->pid, (uint32_t)pid);
    atomic_store(&row->start_time, lg_process_start_time(pid));
    assert_int_equal(lg_keep_adopt(&k, f.board), 0);
    kill(pid, SIGSTOP);
    lg_keep_end(&k);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    g_keepers = 0;
}

/* ---- whose memory is it ---- */

static int region_like(const struct lg_region_head *head, bool sealed)
{
    int fd = memfd_create("lg-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0 && ftruncate(fd, 8192) == 0);
    assert_int_equal(pwrite(fd, head, sizeof *head, 0), sizeof *head);
    if (sealed) assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    return fd;
}

/* Of all that a process has open only regions of this run and this layout are taken. */
static void test_salvage(void **state)
{
    (void)state;
    enum { RUN_ID = 77, OURS, UNSEALED, VERSION, LAYOUT, OTHER_RUN, NAMELESS, ENDLESS, KINDS };
    struct lg_region_head good = {.version = LG_LAYOUT_VERSION,
                                  .layout_hash = lg_layout_hash(),
                                  .run_id = RUN_ID,
                                  .name = "ours",
                                  .bytes = 8192};
    int fd[KINDS];
    for (int i = OURS; i < KINDS; i++) {
        struct lg_region_head head = good;
        if (i != OURS) snprintf(head.name, sizeof head.name, "other %d", i);
        if (i == VERSION) head.version++;
        if (i == LAYOUT) head.layout_hash++;
        if (i == OTHER_RUN) head.run_id++;
        if (i == NAMELESS) head.name[0] = 0;
        if (i == ENDLESS) memset(head.name, 'a', sizeof head.name);
        fd[i] = region_like(&head, i != UNSEALED);
    }
    int small = memfd_create("lg-small", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    fcntl(small, F_ADD_SEALS, F_SEAL_GROW);
    lg_keep_salvage(&k, getpid(), RUN_ID);
    assert_int_equal(k.n_copies, 1);
    assert_string_equal(k.copy[0].name, "ours");
    lg_keep_salvage(&k, getpid(), RUN_ID); /* we have it */
    assert_int_equal(k.n_copies, 1);
    lg_keep_salvage(&k, 0x7fffffff, RUN_ID); /* nobody */
    assert_int_equal(k.n_copies, 1);
    for (int i = OURS; i < KINDS; i++) close(fd[i]);
    close(small);
}

/* Memory counts as whole only when every name that was ever recorded is in our hands. */
static void test_whole(void **state)
{
    (void)state;
    char missing[LG_REGION_NAME_BYTES];
    assert_false(lg_keep_is_whole(&k, missing));
    assert_string_equal(missing, "(no list)");
    serve("");
    hold("a");
    hold("b");
    lg_keep_refresh(&k);
    assert_true(lg_keep_is_whole(&k, missing));
    scratch_write("regions", "a\nb\nw@\n"); /* a GPU's payload comes by itself */
    assert_true(lg_keep_is_whole(&k, missing));
    scratch_write("regions", "a\nc\nb\n");
    assert_false(lg_keep_is_whole(&k, missing));
    assert_string_equal(missing, "c");
}

/* ---- second copies ---- */

static lg_region *open_region(const char *name)
{
    lg_region *r;
    struct lg_region_spec spec = {
        .keeper = k.socket, .name = name, .bytes = 100, .run_id = f.board->s->preamble.run_id};
    assert_int_equal(lg_region_open(&spec, &r), 0);
    return r;
}

static bool is_recorded(const char *name)
{
    char *text, line[80];
    size_t bytes;
    assert_int_equal(lg_read_file(k.regions, 10000, &text, &bytes), 0);
    snprintf(line, sizeof line, "%s\n", name);
    bool is = strstr(text, line) != NULL;
    free(text);
    return is;
}

/* The run begins with an empty record, whoever used the folder before. A region says that it is copied when
 * its name is on record, not before. */
static void test_copies(void **state)
{
    (void)state;
    char missing[LG_REGION_NAME_BYTES];
    scratch_write("regions", "of/another/run\n");
    serve(".new");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    assert_true(k.complete && lg_keep_is_whole(&k, missing));
    lg_region *a = open_region("x/0/a"), *b;
    assert_false(lg_region_is_copied(a));
    assert_int_equal(unlink(k.regions), 0);
    assert_int_equal(lg_mkdirs(k.regions), 0); /* nothing can be recorded */
    assert_true(lg_keep_refresh(&k) < 0);
    assert_int_equal(k.n_copies, 1);
    assert_false(lg_region_is_copied(a));
    assert_true(lg_keep_refresh(&k) < 0);
    assert_int_equal(rmdir(k.regions), 0);
    lg_err_clear();
    assert_int_equal(lg_keep_refresh(&k), 0);
    assert_true(lg_region_is_copied(a) && is_recorded("x/0/a"));
    b = open_region("x/0/b");
    assert_false(lg_region_is_copied(b));
    assert_int_equal(lg_keep_refresh(&k), 0);
    assert_true(lg_region_is_copied(b) && is_recorded("x/0/b") && is_recorded("x/0/a"));
    lg_region_close(&a);
    lg_region_close(&b);
}

/* A keeper that dies in the middle of being copied: what could not be copied stays on record, so that it is
 * missed. */
static void test_copies_cut_short(void **state)
{
    (void)state;
    char missing[LG_REGION_NAME_BYTES];
    lg_keep next;
    serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    hold("a");
    hold("b");
    assert_int_equal(lg_keep_refresh(&k), 0);
    memset(&next, 0, sizeof next); /* the next lgsup */
    assert_int_equal(lg_keep_init(&next, scratch_path("."), f.dir, false), 0);
    next.copy[next.n_copies++] = (struct lg_keep_copy){.name = "a", .fd = dup(g_null)};
    end_keepers();
    assert_true(lg_keep_refresh(&next) < 0);
    lg_err_clear();
    assert_false(next.complete);
    assert_true(is_recorded("b"));
    assert_false(lg_keep_is_whole(&next, missing));
    assert_string_equal(missing, "b");
    lg_keep_leave(&next);
}

/* A payload on a GPU is the second fd of its region. */
static void test_copies_of_payloads(void **state)
{
    (void)state;
    serve("");
    assert_int_equal(lg_keep_start(&k, f.board), 0);
    lg_region *a = open_region("x/0/a");
    snprintf(a->head->place, sizeof a->head->place, "cuda:0");
    assert_int_equal(lg_keep_refresh(&k), LG_ERR_BUSY);
    assert_string_equal(lg_err_message(), "");
    assert_false(lg_region_is_copied(a));
    hold("x/0/a@");
    assert_int_equal(lg_keep_refresh(&k), 0);
    assert_true(lg_region_is_copied(a));
    lg_region_close(&a);
}

int main(void)
{
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_no_service),
        TEST(test_fresh_service),
        TEST(test_service_of_an_earlier_run),
        TEST(test_service_with_a_store),
        TEST(test_adopt_a_service),
        TEST(test_end_of_a_service),
        TEST(test_service_that_dies_while_it_is_filled),
        TEST(test_adopt_by_pid),
        TEST(test_strays_are_ended),
        TEST(test_end_of_a_hung_keeper),
        TEST(test_salvage),
        TEST(test_whole),
        TEST(test_copies),
        TEST(test_copies_cut_short),
        TEST(test_copies_of_payloads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
