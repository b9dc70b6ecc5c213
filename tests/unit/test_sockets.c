/* The directory of the sockets is removed under a run, with lgsup alive and dead: the same processes train
 * on from the same step, nothing goes back to a checkpoint, and what is started or stopped afterwards finds
 * them. */
#include "base/fs.h"
#include "shm/board.h"
#include "shm/keeper.h"
#include "supervisor/run/run.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define LONG "--set", "trainer.max_steps=100000"

static char g_base[LG_PATH_BYTES]; /* XDG_RUNTIME_DIR */

static int setup(void **state)
{
    lgsup_setup(state);
    snprintf(g_base, sizeof g_base, "%s", scratch_path("rt"));
    assert_int_equal(lg_mkdirs(g_base), 0);
    setenv("XDG_RUNTIME_DIR", g_base, 1);
    return 0;
}

static int teardown(void **state)
{
    lg_mkdirs(g_base);
    int rc = lgsup_teardown(state);
    unsetenv("XDG_RUNTIME_DIR");
    return rc;
}

static void runtime_of(char ret[LG_PATH_BYTES])
{
    assert_int_equal(lg_read_line(scratch_path("run/runtime"), ret, LG_PATH_BYTES), 0);
}

struct before {
    int trainer, vae, keeper;
    uint64_t step;
    char runtime[LG_PATH_BYTES];
};

static struct before look(void)
{
    struct before b;
    assert_true(read_status());
    b.trainer = instance("trainer", 0)->pid;
    b.vae = instance("vae", 1)->pid;
    b.keeper = instance("keeper", 0)->pid;
    b.step = g_status.step;
    runtime_of(b.runtime);
    return b;
}

static bool is_reached(void)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES + 32];
    int pid;
    struct stat st;
    runtime_of(dir);
    if (stat(dir, &st) < 0 || (st.st_mode & 07777) != 0700) return false;
    static const char *const wakes[] = {"wake.trainer.0", "wake.trainer.1", "wake.vae.1",
                                        "wake.ema.0", "lgsup"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wakes); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, wakes[i]);
        if (!lg_path_exists(path)) return false;
    }
    snprintf(path, sizeof path, "%s/keeper", dir);
    bool there = lg_path_exists(path) && lg_keeper_pid(path, &pid) == 0;
    lg_err_clear();
    return there;
}

static void wait_until_reached(void)
{
    for (int i = 0; i < LOOKS_MAX; i++, usleep(LOOK_US))
        if (is_reached()) return;
    show_output();
    fail_msg("not every socket is there again");
}

/* All of them, and they have gone on. */
static void assert_same(const struct before *b)
{
    wait_for_step(b->step + 10);
    assert_int_equal(instance("trainer", 0)->pid, b->trainer);
    assert_int_equal(instance("vae", 1)->pid, b->vae);
    assert_false(output_has("starting again from the newest checkpoint"));
    kill_one("trainer", 1); /* finds its memory at the new keeper, and the others */
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_true(g_status.checkpoint[0]);
    assert_exit(RUN("verify", g_run), 0);
}

static void test_lgsup_alive(void **state)
{
    (void)state;
    start_long();
    struct before b = look();
    assert_int_equal(lg_remove_tree(b.runtime), 0);
    wait_until_reached();
    char now[LG_PATH_BYTES];
    runtime_of(now);
    assert_string_equal(now, b.runtime);
    wait_for_output("the directory of the sockets was removed: made again");
    assert_same(&b);
}

/* Its parent, too: another place, which is recorded, and which all find. */
static void test_parent_removed(void **state)
{
    (void)state;
    start_long();
    struct before b = look();
    assert_int_equal(lg_remove_tree(g_base), 0);
    wait_until_reached();
    char now[LG_PATH_BYTES];
    runtime_of(now);
    assert_string_not_equal(now, b.runtime);
    assert_same(&b);
}

static void test_one_socket(void **state)
{
    (void)state;
    static const char *const names[] = {"wake.vae.1", "keeper", "lgsup"};
    start_long();
    struct before b = look();
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        char path[LG_PATH_BYTES + 32];
        snprintf(path, sizeof path, "%s/%s", b.runtime, names[i]);
        assert_int_equal(unlink(path), 0);
        wait_until_reached();
    }
    assert_same(&b);
}

static void orphaned(bool parent)
{
    start_long();
    struct before b = look();
    kill_lgsup();
    assert_int_equal(lg_remove_tree(parent ? g_base : b.runtime), 0);
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("adopted");
    wait_until_reached();
    assert_output("keeper: its socket was removed");
    assert_int_not_equal(look().keeper, b.keeper);
    assert_same(&b);
}

static void test_lgsup_dead(void **state)
{
    (void)state;
    orphaned(false);
}

static void test_lgsup_dead_parent_removed(void **state)
{
    (void)state;
    orphaned(true);
}

/* The record of the path, too. */
static void test_no_record(void **state)
{
    (void)state;
    start_long();
    struct before b = look();
    kill_lgsup();
    assert_int_equal(unlink(scratch_path("run/runtime")), 0);
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("adopted");
    wait_until_reached();
    assert_same(&b);
    lg_remove_tree(b.runtime);
}

/* `lgsup stop` of a run that nobody has in hand: a checkpoint of the step that it has reached. */
static void test_stop_of_an_orphan(void **state)
{
    (void)state;
    start_long();
    struct before b = look();
    kill_lgsup();
    assert_int_equal(lg_remove_tree(b.runtime), 0);
    assert_exit(RUN("stop", g_run), 0);
    assert_false(output_has("nothing runs here"));
    assert_state("stopped", 0);
    assert_true(g_status.step > b.step);
    char name[32];
    snprintf(name, sizeof name, "_step%d", (int)g_status.step);
    assert_non_null(strstr(g_status.checkpoint, name));
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

/* Who has made the directory in our place does not get our sockets. */
static void test_others_directory(void **state)
{
    (void)state;
    start_long();
    struct before b = look();
    kill_lgsup();
    assert_int_equal(lg_remove_tree(b.runtime), 0);
    assert_int_equal(mkdir(b.runtime, 0700), 0);
    assert_int_equal(chmod(b.runtime, 0777), 0);
    g_lgsup = LAUNCH("start", g_file, LONG);
    wait_for_output("adopted");
    wait_until_reached();
    assert_int_equal(rmdir(b.runtime), 0); /* nothing was put there */
    assert_same(&b);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_lgsup_alive),
        TEST(test_parent_removed),
        TEST(test_one_socket),
        TEST(test_lgsup_dead),
        TEST(test_lgsup_dead_parent_removed),
        TEST(test_no_record),
        TEST(test_stop_of_an_orphan),
        TEST(test_others_directory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
