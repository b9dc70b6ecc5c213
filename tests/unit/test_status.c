/* `lgsup status` of boards made by hand: what it says of each process and of the run, alive, ended,
 * crashed, parked; and of a run whose board is gone (status.json). */
#include "supervisor/views/status.h"
#include "tests/unit/command_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run g_run;
static lg_board *g_board;
static char g_dir[LG_PATH_BYTES];

static int setup(void **state)
{
    command_setup(state);
    command_run(command_pipeline(""), &g_run, &g_board);
    snprintf(g_dir, sizeof g_dir, "%s", g_run.dir);
    return 0;
}

static int teardown(void **state)
{
    lg_board_close(&g_board);
    lg_run_close(&g_run);
    return command_teardown(state);
}

static struct lg_board_row *join(lg_role role, int index)
{
    shm_fixture_join(g_board, role, index); /* this process: alive */
    return lg_board_row(g_board, role, index);
}

/* Its pid is another process's now. */
static void die(lg_role role, int index, bool buried)
{
    atomic_store(&lg_board_row(g_board, role, index)->start_time, 1);
    if (buried) lg_board_bury(g_board, lg_board_life(g_board, role, index, NULL));
}

static void expect_process(const char *name, bool alive, const char *state)
{
    char line[128], pid[16] = "-";
    if (alive) snprintf(pid, sizeof pid, "%d", getpid());
    snprintf(line, sizeof line, "\n%-12s %8s  %-9s ", name, pid, state);
    command_also(line);
}

static void test_processes(void **state)
{
    (void)state;
    lg_board_beat(join(LG_ROLE_vae, 0), LG_PHASE_WORKING);
    lg_board_beat(join(LG_ROLE_vae, 1), LG_PHASE_WAITING);
    struct lg_board_row *standby = join(LG_ROLE_vae, 2), *leaves = join(LG_ROLE_text, 1);
    atomic_store(&standby->standby, (uint32_t)(atomic_load(&standby->life) >> 8));
    atomic_store(&leaves->leave, (uint32_t)(atomic_load(&leaves->life) >> 8));
    lg_board_beat(join(LG_ROLE_ckpt, 0), (lg_phase)9); /* of a later build */
    atomic_store(&join(LG_ROLE_loader, 0)->restarts, 3);
    die(LG_ROLE_loader, 0, false);
    lg_board_enlist(g_board, LG_ROLE_text, 0);
    join(LG_ROLE_trainer, 0);
    die(LG_ROLE_trainer, 0, true);
    join(LG_ROLE_lgsup, 0);
    atomic_store(&g_board->s->wanted[LG_ROLE_vae], 4);
    atomic_store(&g_board->s->run_state, LG_RUN_RUNNING);
    EXPECT(0, "state       running\n", "status", g_dir);
    expect_process("vae.0", true, "working");
    expect_process("vae.1", true, "waiting");
    expect_process("vae.2", true, "standby");
    expect_process("text.1", true, "leaving");
    expect_process("ckpt.0", true, "?");
    expect_process("loader.0", false, "dead");
    command_also("dead             3\n");
    expect_process("text.0", false, "starting");
    expect_process("trainer.0", false, "dead");
    expect_process("lgsup.0", true, "working");
    command_also("\nwanted      4 vae, 3 there\n");
    command_never("ema");
    EXPECT(0, "\"heartbeat_age_s\":\tnull", "status", "--json", g_dir); /* of the dead */
    command_also("\"standby\"");
    command_also("\"wanted\":\t{");
}

/* As of a run in another container, whose pids mean nothing here. */
static void test_run_that_cannot_be_seen(void **state)
{
    (void)state;
    atomic_store(&g_board->s->run_state, LG_RUN_RUNNING);
    EXPECT(0, "state       failed\n", "status", g_dir);
    command_never("cause");
    lg_board_hold(g_board->fd);
    EXPECT(0, "cause       processes of the run live where they cannot be seen from here", "status",
           g_dir);
    atomic_store(&g_board->s->run_state, LG_RUN_FAILED);
    EXPECT(0, "state       failed\n", "status", g_dir);
    command_never("cause");
}

static void test_figures(void **state)
{
    (void)state;
    struct lg_board_metrics *m = &g_board->s->metrics;
    EXPECT(0, "step        0 of 60\ncheckpoint  none yet\n", "status", g_dir);
    command_never("samples/s");
    atomic_store(&m->samples_per_s, 12.25);
    atomic_store(&m->loss, 0.5);
    atomic_store(&m->voids, 3);
    atomic_store(&m->skipped, 2);
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "vae.0 died 4 times");
    command_checkpoint(&g_run, 20);
    EXPECT(0, "job         made\nstate       failed\n", "status", g_dir);
    command_also("\nloss        0.5000\nsamples/s   12.2\nvoid        3 samples\n"
                 "skipped     2 steps\ncause       vae.0 died 4 times\n");
    command_also("checkpoints/made_step20\n");
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "void: \x1b[31m\nstate       done");
    EXPECT(0, "cause       void: \\x1b[31m\n    state       done\n", "status", g_dir);
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "vae.0 died 4 times");
    command_never("vb");
    atomic_store(&m->has_vb, 1);
    atomic_store(&m->loss_vb, 0.125);
    EXPECT(0, "\nloss        0.5000 (mse 0.3750, vb 0.1250)\n", "status", g_dir);
    EXPECT(0, "\"loss_mse\":\t0.375,\n\t\"loss_vb\":\t0.125", "status", "--json", g_dir);
    atomic_store(&m->loss, (double)NAN);
    EXPECT(0, "\"loss\":\tnull", "status", "--json", g_dir);
}

/* A board that says "running" tells of a crash when nobody is there but the keeper. */
static void test_states(void **state)
{
    (void)state;
    static const struct {
        lg_run_state said;
        const char *nobody, *keeper, *stage;
    } cases[] = {
        {LG_RUN_STARTING, "failed", "failed", "starting"},
        {LG_RUN_RUNNING, "failed", "failed", "running"},
        {LG_RUN_DRAINING, "failed", "failed", "draining"},
        {LG_RUN_DONE, "done", "done", "done"},
        {LG_RUN_STOPPED, "stopped", "stopped", "stopped"},
        {LG_RUN_PARKED, "parked", "parked", "parked"},
        {LG_RUN_FAILED, "failed", "failed", "failed"},
    };
    struct lg_status st;
    for (int there = 0; there < 3; there++) {
        if (there == 1) join(LG_ROLE_keeper, 0);
        if (there == 2) join(LG_ROLE_vae, 0);
        for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
            atomic_store(&g_board->s->run_state, cases[i].said);
            assert_int_equal(lg_status_read(g_dir, &st), 0);
            assert_string_equal(st.state, there == 0   ? cases[i].nobody
                                          : there == 1 ? cases[i].keeper
                                                       : cases[i].stage);
        }
    }
    die(LG_ROLE_vae, 0, false);
    EXPECT(0, "vae.0               -  gone ", "status", g_dir); /* after the end: not a failure */
}

static void test_parked_memory(void **state)
{
    (void)state;
    atomic_store(&g_board->s->run_state, LG_RUN_PARKED);
    EXPECT(0, "state       parked\n", "status", g_dir);
    command_never("memory ");
    atomic_store(&g_board->s->memory_kept, 1);
    EXPECT(0, "state       parked\n", "status", g_dir);
    command_never("memory "); /* its keeper is dead */
    join(LG_ROLE_keeper, 0);
    EXPECT(0, "memory      kept: `lgsup start` goes on from step 0, `lgsup stop` lets it go\n",
           "status", g_dir);
    EXPECT(0, "\"memory_kept\":\ttrue", "status", "--json", g_dir);
}

/* ---- without a board: the machine was restarted, say ---- */

static void saved(const char *json)
{
    unlink(scratch_path("run/board"));
    if (json)
        scratch_write("run/status.json", json);
    else
        unlink(scratch_path("run/status.json"));
}

static void test_saved_status(void **state)
{
    (void)state;
    atomic_store(&g_board->s->run_state, LG_RUN_STOPPED);
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "told to");
    lg_status_save(g_dir, g_board);
    unlink(scratch_path("run/board"));
    EXPECT(0, "job         made\nstate       stopped\nstep        0 of 60\ncause       told to\n",
           "status", g_dir);
    snprintf(g_board->s->cause, sizeof g_board->s->cause, "cut in a letter: \xc3");
    lg_status_save(g_dir, g_board);
    EXPECT(0, "state       stopped\nstep        0 of 60\ncause       cut in a letter: \\xc3\n",
           "status", g_dir);
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"{\"state\": \"running\", \"step\": 7, \"max_steps\": 60}",
         "state       failed\nstep        7 of 60\n"}, /* it did not end by itself */
        {"{\"state\": \"parked\", \"cause\": \"bad data\"}",
         "state       parked\nstep        0 of 0\ncause       bad data\n"},
        {"{\"state\": 3, \"step\": -1, \"max_steps\": \"many\", \"cause\": 3}",
         "state       failed\nstep        0 of 0\ncheckpoint"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        saved(cases[i].json);
        EXPECT(0, cases[i].says, "status", g_dir);
    }
    saved("{\"state\": ");
    EXPECT(5, "run/status.json is not JSON", "status", g_dir);
    saved(NULL);
    EXPECT(8, "run/status.json", "status", g_dir);
    assert_int_equal(lg_mkdirs(scratch_path("run/status.json")), 0); /* it cannot be written */
    lg_status_save(g_dir, g_board);
    assert_int_equal(lg_status_read(g_dir, &(struct lg_status){0}), LG_ERR_IO);
}

/* A config that no longer loads hides the job's name, not the state. */
static void test_damaged_config(void **state)
{
    (void)state;
    scratch_write("run/config.toml", "[job\n");
    EXPECT(0, "job         \nstate       failed\n", "status", g_dir);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_processes),      TEST(test_figures),
        TEST(test_states),         TEST(test_run_that_cannot_be_seen),
        TEST(test_parked_memory),  TEST(test_saved_status),
        TEST(test_damaged_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
