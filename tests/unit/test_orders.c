/* Orders from the command line and their refusal, and every way in which a swap ends, at moments that a
 * whole run hardly shows. */
#include "base/check.h"
#include "supervisor/commands/order.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/swap.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervisor_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { SPARE = LG_INSTANCES_MAX - 1 };

static char g_program[LG_PATH_BYTES];

static int setup(void **state)
{
    supervisor_setup(state);
    script("new", "exec sleep 100");
    snprintf(g_program, sizeof g_program, "%s", scratch_path("new"));
    return 0;
}

/* ---- the command, in a program of its own: this one has threads, so a fork of it may not allocate ---- */

static pid_t g_command;

/* This program as `test_orders order DIR VERB WHAT TO`; to "-": NULL. Its text goes to standard error. */
static int be_the_command(char **word)
{
    const char *to = strcmp(word[3], "-") ? word[3] : NULL;
    int rc = !strcmp(word[1], "swap")
                 ? lg_order_swap(&(struct lg_order_to){.dir = word[0]}, word[2], to)
                 : lg_order_scale(&(struct lg_order_to){.dir = word[0]}, word[2], to);
    if (rc < 0) fprintf(stderr, "%s", lg_err_message());
    fflush(NULL);
    return -rc;
}

static void order(const char *verb, const char *what, const char *to)
{
    char out[LG_PATH_BYTES + 16], said[LG_PATH_BYTES + 16];
    char *argv[] = {(char *)"test_orders",
                    (char *)"order",
                    g_super_run.dir,
                    (char *)verb,
                    (char *)what,
                    (char *)(to ? to : "-"),
                    NULL};
    fflush(NULL);
    g_command = fork();
    if (g_command) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(out, sizeof out, "%s.%d", scratch_path("out"), getpid());
    snprintf(said, sizeof said, "%s.%d", scratch_path("said"), getpid());
    dup2(open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    dup2(open(said, O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    execv("/proc/self/exe", argv);
    _exit(127);
}

static void assert_said(const char *where, const char *part)
{
    char file[32];
    snprintf(file, sizeof file, "%s.%d", where, g_command);
    assert_text(file, part);
}

/* Turns until the command has its answer. */
static void assert_answer(int code, const char *part)
{
    int status = 0;
    pid_t got = 0;
    for (int look = 0; look < LOOKS_MAX && got == 0; look++) {
        turn();
        got = waitpid(g_command, &status, WNOHANG);
    }
    if (got != g_command) fail_msg("no answer: %s", part);
    if (WEXITSTATUS(status) != -code) assert_said("said", "another code");
    assert_said(code < 0 ? "said" : "out", part);
}

static void wait_for_swap(void)
{
    for (int look = 0; look < LOOKS_MAX && !g_super.swap; look++) turn();
    assert_non_null(g_super.swap);
}

static void refused(const char *what, const char *program, int code, const char *part)
{
    order("swap", what, program);
    assert_answer(code, part);
    for (int look = 0; look < LOOKS_MAX && g_super.swap; look++) turn();
    assert_null(g_super.swap);
}

static const char *in_force(int index)
{
    return lg_programs_get(&g_super.programs, LG_ROLE_vae, index);
}

/* A standby says that it is ready. */
static void ready(lg_role role, int spare)
{
    lg_incarnation who = lg_board_life(g_super.board, role, spare, NULL);
    atomic_store(&lg_board_row(g_super.board, role, spare)->ready, who);
}

/* ---- swap ---- */

static void test_swap_refused(void **state)
{
    (void)state;
    add(LG_ROLE_vae, 0);
    g_super.step = LG_RUN_STEP_starting;
    atomic_store(&g_super.board->s->run_state, LG_RUN_STARTING);
    refused("vae", NULL, LG_ERR_BUSY, "the run is starting: swap while it is running");
    g_super.step = LG_RUN_STEP_running;
    snprintf(g_super_run.units, sizeof g_super_run.units, "lg-fake-");
    g_super.launcher = lg_launcher_of(&g_super_run);
    refused("vae", NULL, LG_ERR_USAGE, "units of systemd's");
    g_super_run.units[0] = 0;
    g_super.launcher = lg_launcher_of(&g_super_run);
    refused("vae.1", NULL, LG_ERR_NOTFOUND, "there is no vae.1");
    refused("text", g_program, LG_ERR_NOTFOUND, "this run has no text");
    refused("trainer.0", NULL, LG_ERR_USAGE, "all ranks run one program");
    refused("keeper", NULL, LG_ERR_USAGE, "keeper cannot be swapped");
    vae(0)->state = LG_INSTANCE_draining;
    atomic_store(&g_super.board->s->wanted[LG_ROLE_vae], 0);
    refused("vae", NULL, LG_ERR_BUSY, "an instance of vae is leaving");
    vae(0)->state = LG_INSTANCE_ready;
    atomic_store(&g_super.board->s->wanted[LG_ROLE_vae], 1);
    unlink(scratch_path("bin/lg-vae"));
    refused("vae", NULL, LG_ERR_NOTFOUND, "bin/lg-vae is missing or not executable");
    lg_programs_set(&g_super.programs, LG_ROLE_vae, 0, "/nowhere"); /* the one in force has gone */
    refused("vae", NULL, LG_ERR_NOTFOUND, "the program /nowhere is missing");
    lg_programs_set(&g_super.programs, LG_ROLE_vae, 0, "relative");
    refused("vae", NULL, LG_ERR_NOTFOUND, "the program relative is missing");
    script("broken", "");
    scratch_write("broken", "#!/no/such/interpreter\n");
    refused("vae", scratch_path("broken"), LG_ERR_NOTFOUND, "cannot start");
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
}

/* A standby needs a row: with all but one taken the first is started, and ended again. */
static void test_swap_without_rows(void **state)
{
    (void)state;
    lg_life life;
    for (int k = 0; k < LG_INSTANCES_MAX; k++) add(LG_ROLE_vae, k);
    refused("vae.0", g_program, LG_ERR_BUSY, "no free row beside vae.0");
    atomic_store(&g_super.board->s->wanted[LG_ROLE_vae], SPARE);
    lg_board_vacate(g_super.board, vae(SPARE)->incarnation);
    vae(SPARE)->state = LG_INSTANCE_absent;
    lg_instances_sweep(&g_super);
    refused("vae", g_program, LG_ERR_BUSY, "no free row beside vae.1");
    lg_board_life(g_super.board, LG_ROLE_vae, SPARE, &life);
    assert_int_equal(life, LG_LIFE_NONE);
    assert_null(in_force(0));
}

static void test_one_swap_at_a_time(void **state)
{
    (void)state;
    struct lg_peer nobody = {0};
    add(LG_ROLE_vae, 0);
    lg_swap_order(&g_super, &nobody, LG_ROLE_vae, -1, g_program);
    assert_non_null(g_super.swap);
    order("swap", "vae", g_program);
    assert_answer(LG_ERR_BUSY, "another swap is under way");
    order("scale", "vae", "2");
    assert_answer(LG_ERR_BUSY, "a swap is under way");
    assert_non_null(g_super.swap);
    g_super.step = LG_RUN_STEP_draining; /* the end of the run is the end of the swap */
    for (int look = 0; look < LOOKS_MAX && g_super.swap; look++) turn();
    assert_null(g_super.swap);
    assert_null(in_force(0));
    lg_swap_cancel(&g_super); /* none: fine */
}

static void test_the_run_ends_meanwhile(void **state)
{
    (void)state;
    add(LG_ROLE_vae, 0);
    order("swap", "vae.0", g_program);
    wait_for_swap();
    g_super.step = LG_RUN_STEP_leaving;
    assert_answer(LG_ERR_BUSY, "vae.0 goes on with its former program");
    assert_said("said", "because the run ends");
}

/* The new program dies before it is ready: the best reason that is known is told. */
static void test_death_of_a_standby(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
        const char *says;
    } ends[] = {
        {"exit 0", LG_ERR_FAILED, "ended before it was ready: exit 0"},
        {"echo no ink; exit 5", LG_ERR_CORRUPT, "exit 5 CORRUPT: no ink"},
        {"exit 77", LG_ERR_FAILED, "exit 77"},
        {"kill -9 $$", LG_ERR_FAILED, "signal 9 (Killed)"},
    };
    add(LG_ROLE_vae, 0);
    add(LG_ROLE_vae, 1);
    for (size_t i = 0; i < LG_ARRAY_LEN(ends); i++) {
        script("dies", ends[i].text);
        refused("vae.1", scratch_path("dies"), ends[i].code, ends[i].says);
    }
    for (int which = 0; which < 2; which++) { /* its own words go before its log's */
        order("swap", "vae.0", g_program);
        wait_for_swap();
        struct lg_board_row *row = lg_board_row(g_super.board, LG_ROLE_vae, SPARE);
        struct lg_message m = {.level = LG_ERROR,
                               .incarnation =
                                   lg_board_life(g_super.board, LG_ROLE_vae, SPARE, NULL)};
        snprintf(m.text, sizeof m.text, "said by message");
        lg_swap_on_event(&g_super, &m);
        m.level = LG_WARN; /* no error, or another's: not the reason */
        snprintf(m.text, sizeof m.text, "only a warning");
        lg_swap_on_event(&g_super, &m);
        m.level = LG_ERROR;
        m.incarnation++;
        lg_swap_on_event(&g_super, &m);
        if (which) snprintf(row->cause, sizeof row->cause, "said on the board");
        kill((int)atomic_load(&row->pid), SIGKILL);
        assert_answer(LG_ERR_FAILED, which ? "said on the board" : "said by message");
    }
    assert_null(in_force(0));
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready); /* undisturbed */
}

static void test_not_ready_in_time(void **state)
{
    (void)state;
    add(LG_ROLE_vae, 0);
    g_super_run.config->supervisor_ready_s = 0;
    refused("vae", g_program, LG_ERR_TIMEOUT, "was not ready, and without a heartbeat for 0 s");
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
}

/* What cannot be recorded is not done: a later lgsup would start the old program again. */
static void test_swap_that_cannot_be_recorded(void **state)
{
    (void)state;
    add(LG_ROLE_vae, 0);
    mkdir(scratch_path("run/programs"), 0700);
    order("swap", "vae", g_program);
    wait_for_swap();
    ready(LG_ROLE_vae, SPARE);
    assert_answer(LG_ERR_IO, "vae goes on with its former program");
    assert_null(in_force(0));
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
}

/* Up to the hand-over; the standby of vae.0 has its row. */
static void hand_over(void)
{
    add(LG_ROLE_vae, 0);
    order("swap", "vae", g_program);
    wait_for_swap();
    assert_false(lg_swap_succeed(&g_super, vae(0))); /* not yet */
    ready(LG_ROLE_vae, SPARE);
    for (int look = 0; look < LOOKS_MAX && vae(0)->state != LG_INSTANCE_yielding; look++) turn();
    assert_int_equal(vae(0)->state, LG_INSTANCE_yielding);
    assert_string_equal(in_force(0), g_program);
    leaves(vae(0));
    assert_int_equal(vae(0)->state, LG_INSTANCE_starting);
    assert_true(vae(0)->child.pidfd >= 0 && vae(0)->was_standby != 0);
    lg_swap_on_death(&g_super, 0); /* seen in the same turn: it is no standby any more */
    assert_false(lg_swap_succeed(&g_super, vae(0)));
}

static void test_swap_is_carried_out(void **state)
{
    (void)state;
    hand_over();
    lg_instance_raise(&g_super, vae(0), LG_INSTANCE_EVENT_ready);
    assert_answer(0, "vae runs ");
    assert_string_equal(in_force(0), g_program);
    assert_null(g_super.swap);
}

static void test_death_after_the_hand_over(void **state)
{
    (void)state;
    hand_over();
    lg_incarnation former = vae(0)->incarnation;
    lg_child_signal(&vae(0)->child, SIGKILL);
    vae(0)->exit_code = lg_child_reap(&vae(0)->child);
    lg_board_bury(g_super.board, former);
    lg_board_vacate(g_super.board, vae(0)->was_standby);
    lg_instance_raise(&g_super, vae(0), LG_INSTANCE_EVENT_died); /* restarted at once */
    assert_int_not_equal(vae(0)->incarnation, former);
    assert_answer(LG_ERR_FAILED, "ended as soon as it had taken over");
    assert_null(in_force(0));
    assert_true(vae(0)->excused); /* killed by us, to start with the former program */
}

static void test_hang_after_the_hand_over(void **state)
{
    (void)state;
    hand_over();
    lg_instance_raise(&g_super, vae(0), LG_INSTANCE_EVENT_late);
    mkdir(scratch_path("block"), 0700);
    unlink(scratch_path("run/programs")); /* nor can going back be recorded: it is done */
    mkdir(scratch_path("run/programs"), 0700);
    assert_answer(LG_ERR_FAILED, "it was not ready, and without a heartbeat for ");
    assert_null(in_force(0));
    assert_text("run/logs/lgsup.log", "swap rolled back: vae goes on");
}

/* Whoever has nothing left to do needs no successor. */
static void test_swap_of_one_at_rest(void **state)
{
    (void)state;
    struct lg_peer nobody = {0};
    add(LG_ROLE_vae, 0)->state = LG_INSTANCE_resting;
    add(LG_ROLE_vae, 1);
    lg_swap_order(&g_super, &nobody, LG_ROLE_vae, -1, g_program);
    vae(1)->state = LG_INSTANCE_absent; /* and one that has gone in between */
    lg_instances_sweep(&g_super);
    ready(LG_ROLE_vae, SPARE);
    ready(LG_ROLE_vae, SPARE - 1);
    for (int look = 0; look < LOOKS_MAX && g_super.swap; look++) turn();
    assert_null(g_super.swap);
    assert_string_equal(in_force(0), g_program);
    assert_text("run/logs/lgsup.log", "swapped: vae runs");
}

/* The ranks leave before the same step: told by one word that stays until the last has left. */
static void test_swap_of_trainers(void **state)
{
    (void)state;
    struct lg_peer nobody = {0};
    _Atomic(uint32_t) *word = &g_super.board->s->yield;
    for (int k = 0; k < 2; k++) add(LG_ROLE_trainer, k);
    add(LG_ROLE_vae, 0);
    lg_swap_order(&g_super, &nobody, LG_ROLE_trainer, -1, g_program);
    ready(LG_ROLE_trainer, SPARE);
    turn();
    assert_int_equal(atomic_load(word), 0); /* one is not ready yet */
    ready(LG_ROLE_trainer, SPARE - 1);
    turn();
    assert_int_equal(atomic_load(word), 1);
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
    for (int k = 0; k < 2; k++) {
        struct lg_instance *i = lg_instance_find(&g_super, LG_ROLE_trainer, k);
        turn();
        assert_int_equal(atomic_load(word), 1);
        leaves(i);
    }
    turn();
    assert_int_equal(atomic_load(word), 0);
}

/* ---- scale ---- */

static void test_scale_refused(void **state)
{
    (void)state;
    struct lg_peer nobody = {0};
    g_super.step = LG_RUN_STEP_starting;
    atomic_store(&g_super.board->s->run_state, LG_RUN_STARTING);
    order("scale", "vae", "2");
    assert_answer(LG_ERR_BUSY, "the run is starting: scale it");
    g_super.step = LG_RUN_STEP_running;
    g_super_run.plan.instances[LG_ROLE_vae] = 0;
    order("scale", "vae", "2");
    assert_answer(LG_ERR_USAGE, "this run has no vae");
    lg_scale_order(&g_super, &nobody, LG_ROLE_COUNT, 2); /* not from our command */
    lg_scale_order(&g_super, &nobody, (lg_role)-1, 2);
    lg_scale_order(&g_super, &nobody, LG_ROLE_ema, 2);
    assert_int_equal(g_super.n_instances, 0);
}

/* The newest order counts; whoever waits for an earlier one, or for one when the run ends, is told. */
static void test_scale_overtaken(void **state)
{
    (void)state;
    add(LG_ROLE_vae, 0);
    order("scale", "vae", "3");
    for (int look = 0; look < LOOKS_MAX && g_super.n_instances != 3; look++) turn();
    assert_int_equal(g_super.n_instances, 3);
    pid_t first = g_command;
    order("scale", "vae", "2");
    pid_t second = g_command;
    g_command = first;
    assert_answer(LG_ERR_BUSY, "another scale of this role came after it");
    g_command = second;
    g_super.step = LG_RUN_STEP_draining;
    assert_answer(LG_ERR_BUSY, "the run ends before it was carried out");
}

/* A row whose process is still leaving is in the way: nothing is lost, it is filled later. */
static void test_scale_waits_for_a_row(void **state)
{
    (void)state;
    for (int k = 0; k < LG_INSTANCES_MAX; k++) add(LG_ROLE_vae, k);
    lg_incarnation leaver = vae(7)->incarnation;
    vae(7)->state = LG_INSTANCE_absent;
    lg_instances_sweep(&g_super);
    lg_scale_adjust(&g_super, LG_ROLE_vae);
    assert_int_equal(g_super.n_instances, LG_INSTANCES_MAX - 1);
    lg_board_vacate(g_super.board, leaver);
    lg_scale_adjust(&g_super, LG_ROLE_vae);
    assert_int_equal(g_super.n_instances, LG_INSTANCES_MAX);
    assert_int_equal(vae(7)->state, LG_INSTANCE_starting);
}

int main(int argc, char **argv)
{
    if (argc == 6 && !strcmp(argv[1], "order")) return be_the_command(argv + 2);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, supervisor_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_swap_refused),
        TEST(test_swap_without_rows),
        TEST(test_one_swap_at_a_time),
        TEST(test_the_run_ends_meanwhile),
        TEST(test_death_of_a_standby),
        TEST(test_not_ready_in_time),
        TEST(test_swap_that_cannot_be_recorded),
        TEST(test_swap_is_carried_out),
        TEST(test_death_after_the_hand_over),
        TEST(test_hang_after_the_hand_over),
        TEST(test_swap_of_one_at_rest),
        TEST(test_swap_of_trainers),
        TEST(test_scale_refused),
        TEST(test_scale_overtaken),
        TEST(test_scale_waits_for_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
