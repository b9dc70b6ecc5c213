/* Deaths of every role and of the keeper, hangs, and what the log says of them. */
#include "base/clock.h"
#include "base/fs.h"
#include "shm/keeper.h"
#include "supervisor/core/intensity.h"
#include "supervisor/core/supervise.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervise_fixture.h"
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_intensity(void **state)
{
    (void)state;
    struct lg_intensity t;
    assert_int_equal(lg_intensity_init(&t, 2, 10), 0);
    assert_false(lg_intensity_exceeded(&t, 0, 0));
    assert_false(lg_intensity_exceeded(&t, 1, 0));
    assert_true(lg_intensity_exceeded(&t, 2, 0));
    assert_false(lg_intensity_exceeded(&t, 3, 1)); /* a step was committed in between */
    assert_false(lg_intensity_exceeded(&t, 4, 1));
    assert_true(lg_intensity_exceeded(&t, 5, 1));
    assert_false(lg_intensity_exceeded(&t, 11 * LG_S_NS, 1)); /* the others are too old */
    lg_intensity_free(&t);
}

static void test_every_role_dies(void **state)
{
    (void)state;
    static const struct {
        const char *role;
        int index;
    } victim[] = {{"loader", 0}, {"text", 1}, {"vae", 0},    {"trainer", 0}, {"trainer", 1},
                  {"ema", 0},    {"ckpt", 0}, {"keeper", 0}, {"trainer", 0}, {"vae", 0}};
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=400");
    wait_for_step(3);
    for (size_t i = 0; i < LG_ARRAY_LEN(victim); i++) {
        kill_one(victim[i].role, victim[i].index);
        wait_for_step(g_status.step + 5);
    }
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("done", 400);
    assert_nobody_left();
    assert_int_equal(instance("vae", 0)->restarts, 2);
    assert_int_equal(instance("trainer", 1)->restarts, 1);
    assert_int_equal(instance("keeper", 0)->restarts, 1);
    assert_int_equal(instance("text", 0)->restarts, 0);
    assert_exit(RUN("verify", g_run), 0);
}

/* Death of a stage to the moment when its replacement runs its first lines. */
static void test_restart_is_quick(void **state)
{
    (void)state;
    enum { KILLS = 8 };
    lg_board *b = NULL;
    double sum_ms = 0, max_ms = 0, seen_ms = 0;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    for (int i = 0; i < KILLS; i++) {
        lg_life life;
        const struct lg_board_row *row = lg_board_row(b, LG_ROLE_vae, 1);
        while (atomic_load(&row->ready) != lg_board_life(b, LG_ROLE_vae, 1, NULL)) usleep(500);
        usleep(60000); /* lgsup has seen it */
        lg_incarnation before = lg_board_life(b, LG_ROLE_vae, 1, &life);
        int64_t start_ns = lg_now_ns();
        kill((int)atomic_load(&row->pid), SIGKILL);
        while (lg_board_life(b, LG_ROLE_vae, 1, &life) == before &&
               lg_now_ns() - start_ns < 5 * LG_S_NS)
            usleep(50);
        seen_ms += (double)(lg_now_ns() - start_ns) / LG_MS_NS;
        while (lg_board_life(b, LG_ROLE_vae, 1, &life) && life != LG_LIFE_RUNNING &&
               lg_now_ns() - start_ns < 5 * LG_S_NS)
            usleep(50);
        double ms = (double)(lg_now_ns() - start_ns) / LG_MS_NS;
        sum_ms += ms;
        max_ms = LG_MAX(max_ms, ms);
    }
    printf("SIGKILL to its replacement's start: mean %.2f ms; to its first lines: mean %.2f ms, "
           "max %.2f ms\n",
           seen_ms / KILLS, sum_ms / KILLS, max_ms);
    assert_true(sum_ms / KILLS < 1000); /* a loaded machine; idle it is a few ms */
    lg_board_close(&b);
    end_by_stop();
}

/* Between the death of a keeper and the next, nobody may see one that has forgotten a region: a stage
 * that starts just then would make the region anew. */
static void test_new_keeper_is_full(void **state)
{
    (void)state;
    char socket[LG_PATH_BYTES], name[LG_REGION_NAME_BYTES];
    static lg_run run;
    lg_board *b = NULL;
    uint64_t bytes;
    int last = 0, seen = 0;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    lg_run_init(&run, g_run);
    assert_int_equal(lg_run_runtime_load(&run), 0);
    snprintf(socket, sizeof socket, "%.4000s/keeper", run.runtime_dir);
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    while (lg_keeper_list(socket, last + 1, name, &bytes) == 0) last++;
    assert_int_equal(last + 1, 11); /* 2 + 2 + 1 + 2 * 2 + 1 + 1 */
    for (int i = 0; i < 5; i++) {
        const _Atomic(uint32_t) *pid = &lg_board_row(b, LG_ROLE_keeper, 0)->pid;
        uint32_t old = atomic_load(pid);
        kill((int)old, SIGKILL);
        for (int look = 0; look < 20 * LOOKS_MAX; look++, usleep(LOOK_US / 20)) {
            int rc = lg_keeper_list(socket, last, name, &bytes);
            assert_int_not_equal(rc, LG_ERR_NOTFOUND);
            uint32_t now = atomic_load(pid);
            if (rc == 0 && now && now != old) break;
        }
        seen += lg_keeper_list(socket, last, name, &bytes) == 0;
    }
    assert_int_equal(seen, 5);
    lg_err_clear();
    lg_board_close(&b);
    end_by_stop();
}

/* The keeper dies, and a rank with it, while somebody else still sets up. */
static void test_keeper_dies_early(void **state)
{
    (void)state;
    scratch_write("run/fault", "text 0 unready");
    g_lgsup = LAUNCH("start", g_file, "--set", "supervisor.ready_s=1", "--set",
                     "trainer.max_steps=100000");
    wait_for_step(5);
    kill_one("keeper", 0);
    kill_one("trainer", 1);
    wait_for_output("every role is ready");
    wait_for_step(g_status.step + 5);
    end_by_stop();
    assert_int_equal(instance("keeper", 0)->restarts, 1);
    assert_exit(RUN("verify", g_run), 0);
}

static void test_hang_is_killed(void **state)
{
    (void)state;
    scratch_write("run/fault", "ema 0 hang");
    assert_exit(RUN("start", g_file, "--set", "supervisor.hang_s=1"), 0);
    assert_state("done", 60);
    assert_int_equal(instance("ema", 0)->restarts, 1);
    assert_output("without a heartbeat");
}

/* A keeper that hangs would hold up whoever starts. */
static void test_hung_keeper_is_killed(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    wait_for_step(3);
    assert_true(instance("keeper", 0)->pid > 0);
    kill(instance("keeper", 0)->pid, SIGSTOP);
    wait_for_output("keeper: killed: it does not answer");
    wait_for_output("restarted with 11 regions");
    kill_one("trainer", 1); /* its memory is still kept */
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_nobody_left();
}

static void test_unready_is_killed(void **state)
{
    (void)state;
    scratch_write("run/fault", "text 1 unready");
    g_lgsup = LAUNCH("start", g_file, "--set", "supervisor.ready_s=1", "--set",
                     "trainer.max_steps=100000");
    wait_for_output("without a heartbeat for 1 s (supervisor.ready_s)");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_int_equal(instance("text", 1)->restarts, 1);
}

/* Longer than every limit, but it beats meanwhile. */
static void assert_left_alone(const char *fault, const char *role, int index)
{
    int64_t began_ns = lg_now_ns();
    scratch_write("run/fault", fault);
    assert_exit(
        RUN("start", g_file, "--set", "supervisor.ready_s=1", "--set", "supervisor.hang_s=1"), 0);
    assert_true(lg_now_ns() - began_ns > 5 * LG_S_NS);       /* a hang is believed after 3 to 4 s */
    assert_false(lg_path_exists(scratch_path("run/fault"))); /* it was long */
    assert_state("done", 60);
    assert_int_equal(instance(role, index)->restarts, 0);
    assert_exit(RUN("verify", g_run), 0);
}

static void test_long_setup_is_left_alone(void **state)
{
    (void)state;
    assert_left_alone("trainer 1 long_setup", "trainer", 1);
}

static void test_long_write_is_left_alone(void **state)
{
    (void)state;
    assert_left_alone("ckpt 0 long_write", "ckpt", 0);
}

/* It cannot start any more, and nobody else minds: the other one encodes, the ranks commit. */
static void test_one_of_two_never_starts(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=1000000");
    wait_for_output("every role is ready");
    wait_for_step(5);
    scratch_write("run/fault", "text 1 crash");
    kill_one("text", 1);
    assert_exit(exit_of(g_lgsup), 11);
    g_lgsup = 0;
    assert_output("parked: text.1 failed 4 times in a row setting up");
    assert_output("last: exit 5 CORRUPT; ");
    assert_output("the weights are damaged"); /* as its event or its log says it, whichever came */
}

/* Never within one second, and the ranks commit on: but nothing is ever published. */
static void test_write_that_hangs_parks(void **state)
{
    (void)state;
    scratch_write("run/fault", "ckpt 0 stuck_write");
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=1000000", "--set",
                    "supervisor.hang_s=1", "--set", "supervisor.restart_window_s=1", "--set",
                    "checkpoint.restarts_max=1"),
                11);
    assert_output("parked: ckpt.0 failed 2 times in a row writing the checkpoint of step 20, each "
                  "after ");
    assert_output("last: it was without a heartbeat for 1 s (supervisor.hang_s); look at its disk");
    read_status();
    assert_string_equal(g_status.state, "parked");
    assert_int_equal(instance("ckpt", 0)->restarts, 1);
    assert_true(g_status.step > 100);
}

static bool log_has(const char *level, const char *text)
{
    char *log, *rest = NULL, got[8];
    size_t bytes;
    bool found = false;
    assert_int_equal(lg_read_file(scratch_path("run/logs/lgsup.log"), 1 << 22, &log, &bytes), 0);
    for (char *l = strtok_r(log, "\n", &rest); l; l = strtok_r(NULL, "\n", &rest)) {
        long long step = -1;
        if (sscanf(l, "%*24s %7s lgsup step %lld", got, &step) != 2 || step < 0)
            fail_msg("no level, role and step: %s", l);
        found |= !strcmp(got, level) && strstr(l, text);
    }
    free(log);
    return found;
}

/* Every restart stands in the log with its reason, also when nobody was there to see the death. */
static void test_reasons_in_the_log(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    kill_one("vae", 0);
    wait_for_output("vae.0: signal 9");
    wait_until_ready("vae", 0);
    wait_for_log("vae.0: signal 9");
    scratch_kill(g_lgsup);
    kill_one("text", 1);
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    wait_for_log("adopted 8 of 9 processes");
    scratch_kill(g_lgsup);
    kill_one("keeper", 0);
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_true(log_has("warn", "vae.0: signal 9 (Killed); restarted"));
    assert_true(log_has("info", "an earlier lgsup has died: adopted 8 of 9 processes"));
    assert_true(log_has("warn", "text.1: died while no lgsup was there, its log ends with: ready"));
    assert_true(log_has("warn", "keeper: died while no lgsup was there; restarted with 11 "));
}

/* No keeper, no memory for whoever starts next: the run is parked, with the reason. */
static void test_keeper_cannot_be_restarted(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    unlink(scratch_path("bin/lg-keeper"));
    kill_one("keeper", 0);
    assert_exit(exit_of(g_lgsup), 11);
    g_lgsup = 0;
    assert_output("parked: the keeper cannot be restarted: the program ");
    assert_output("lg-keeper is missing or not executable");
    assert_state("parked", 0);
    assert_false(g_status.memory_kept);
}

int main(int argc, char **argv)
{
    lgsup_tests_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_intensity),
        LGSUP_TEST(test_every_role_dies),
        LGSUP_TEST(test_restart_is_quick),
        LGSUP_TEST(test_new_keeper_is_full),
        LGSUP_TEST(test_keeper_dies_early),
        LGSUP_TEST(test_hang_is_killed),
        LGSUP_TEST(test_hung_keeper_is_killed),
        LGSUP_TEST(test_unready_is_killed),
        LGSUP_TEST(test_long_setup_is_left_alone),
        LGSUP_TEST(test_long_write_is_left_alone),
        LGSUP_TEST(test_write_that_hangs_parks),
        LGSUP_TEST(test_one_of_two_never_starts),
        LGSUP_TEST(test_keeper_cannot_be_restarted),
        LGSUP_TEST(test_reasons_in_the_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
