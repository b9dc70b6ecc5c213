/* What a later lgsup makes of the rows that it finds on the board (supervisor/core/adopt.c): processes that
 * live or not, that began or not, that were told to leave, that were standbys of a swap; and when memory of a
 * parked run is kept, used or let go (supervisor/core/park.h). */
#include "base/check.h"
#include "supervisor/commands/park_resume.h"
#include "supervisor/core/keep_jobs.h"
#include "supervisor/core/park.h"
#include "supervisor/core/scale.h"
#include "supervisor/run/terminal.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/supervisor_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { SPARE = LG_INSTANCES_MAX - 1 };

/* A process that has joined as this instance and waits to be killed. */
static pid_t join(lg_role role, int index)
{
    lg_incarnation me = lg_board_enlist(g_super.board, role, index);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (lg_board_join(g_super.board, me) < 0) _exit(1);
        atomic_store(&lg_board_row(g_super.board, role, index)->ready, me);
        for (;;) pause();
    }
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (atomic_load(&lg_board_row(g_super.board, role, index)->ready) == me) break;
    return pid;
}

/* One that was stopped before it has joined. */
static pid_t stopped(lg_role role, int index)
{
    lg_incarnation me = lg_board_enlist(g_super.board, role, index);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        raise(SIGSTOP);
        _exit(lg_board_join(g_super.board, me) < 0);
    }
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOWAIT), 0);
    lg_board_enter(g_super.board, me, pid, lg_process_start_time(pid));
    return pid;
}

static int end_of(pid_t pid)
{
    int status = 0;
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (waitpid(pid, &status, WNOHANG) == pid) return status;
    fail_msg("%d does not end", (int)pid);
    return 0;
}

static void only_vae(int wanted)
{
    for (int role = 0; role < LG_ROLE_keeper; role++)
        atomic_store(&g_super.board->s->wanted[role], role == LG_ROLE_vae ? (uint32_t)wanted : 0);
}

static void tell_to_leave(int index)
{
    struct lg_board_row *row = lg_board_row(g_super.board, LG_ROLE_vae, index);
    atomic_store(&row->leave, lg_board_life(g_super.board, LG_ROLE_vae, index, NULL));
}

/* Alive, dead, a pid that belongs to another by now, one that never began, one that has begun and not joined, a
 * standby. */
static void test_who_is_adopted(void **state)
{
    (void)state;
    pid_t alive = join(LG_ROLE_vae, 0), dead = join(LG_ROLE_vae, 1), other = join(LG_ROLE_vae, 2);
    pid_t standby = join(LG_ROLE_vae, SPARE), unjoined = stopped(LG_ROLE_vae, 4);
    lg_life life;
    only_vae(5);
    atomic_store(&lg_board_row(g_super.board, LG_ROLE_keeper, 0)->ready, 1); /* there was one */
    kill(dead, SIGKILL);
    end_of(dead);
    atomic_fetch_add(&lg_board_row(g_super.board, LG_ROLE_vae, 2)->start_time, 1);
    lg_board_enlist(g_super.board, LG_ROLE_vae, 3);
    struct lg_board_row *spare = lg_board_row(g_super.board, LG_ROLE_vae, SPARE);
    atomic_store(&spare->standby, lg_board_life(g_super.board, LG_ROLE_vae, SPARE, NULL));
    assert_true(lg_leftovers_live(g_super.board));
    /* Nobody keeps memory: that is found last. */
    assert_int_equal(lg_adopt_instances(&g_super, false), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "in nobody's hands"));
    assert_int_equal(g_super.n_instances, 5);
    assert_int_equal(vae(4)->child.pid, unjoined);
    assert_int_equal(vae(4)->state, LG_INSTANCE_starting);
    assert_int_equal(waitpid(unjoined, NULL, WNOHANG), 0);
    assert_int_equal(vae(0)->child.pid, alive);
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
    for (int k = 1; k < 4; k++) {
        assert_int_equal(vae(k)->state, LG_INSTANCE_down);
        lg_board_life(g_super.board, LG_ROLE_vae, k, &life);
        assert_int_equal(life, LG_LIFE_DEAD);
    }
    assert_text("run/logs/lgsup.log", "vae.1: died while no lgsup was there; restarted");
    assert_true(WIFSIGNALED(end_of(standby)));
    lg_board_life(g_super.board, LG_ROLE_vae, SPARE, &life);
    assert_int_equal(life, LG_LIFE_NONE);
    assert_int_equal(waitpid(other, NULL, WNOHANG), 0); /* not ours: left alone */
    lg_leftovers_kill(g_super.board, true);
    assert_true(WIFSIGNALED(end_of(alive)) && WIFSIGNALED(end_of(unjoined)));
    assert_false(lg_leftovers_live(g_super.board));
    assert_int_equal(atomic_load(&g_super.board->s->run_state), LG_RUN_FAILED);
    assert_int_equal(waitpid(other, NULL, WNOHANG), 0);
    kill(other, SIGKILL);
    end_of(other);
}

/* Of those told to leave as many as are too many were leaving for good; the others make place for a
 * successor. Rows that nobody has come to are filled. */
static void test_adoption_of_leavers(void **state)
{
    (void)state;
    pid_t pid[4];
    for (int k = 0; k < 4; k++) pid[k] = join(LG_ROLE_vae, k);
    only_vae(3);
    for (int k = 1; k < 4; k++) tell_to_leave(k);
    kill(pid[1], SIGKILL);
    end_of(pid[1]);
    lg_adopt_instances(&g_super, false);
    assert_int_equal(vae(3)->state, LG_INSTANCE_draining);
    assert_int_equal(vae(2)->state, LG_INSTANCE_yielding);
    assert_int_equal(vae(1)->state, LG_INSTANCE_down); /* it has left already: started anew */
    assert_int_equal(vae(0)->state, LG_INSTANCE_ready);
    lg_leftovers_kill(g_super.board, true);
    end_of(pid[0]), end_of(pid[2]), end_of(pid[3]);
    lg_err_clear();
}

/* A standby that was told to take over, and was stopped before it could join its new row: it is the instance. */
static void test_adoption_of_a_successor(void **state)
{
    (void)state;
    only_vae(1);
    pid_t pid = stopped(LG_ROLE_vae, 0), late = join(LG_ROLE_vae, SPARE);
    struct lg_board_row *row = lg_board_row(g_super.board, LG_ROLE_vae, 0);
    struct lg_board_row *spare = lg_board_row(g_super.board, LG_ROLE_vae, SPARE);
    lg_adopt_instances(&g_super, false);
    lg_err_clear();
    assert_int_equal(vae(0)->child.pid, pid);
    kill(pid, SIGCONT);
    assert_int_equal(end_of(pid), 0); /* it has joined */
    /* One that is told so, and has not left its spare row, is ended there; its instance is started anew. */
    g_super.n_instances = 0;
    lg_board_bury(g_super.board, lg_board_life(g_super.board, LG_ROLE_vae, 0, NULL));
    lg_incarnation now = lg_board_enlist(g_super.board, LG_ROLE_vae, 0);
    lg_board_enter(g_super.board, now, late, lg_process_start_time(late));
    atomic_store(&spare->standby, lg_board_life(g_super.board, LG_ROLE_vae, SPARE, NULL));
    atomic_store(&spare->takes, now);
    lg_adopt_instances(&g_super, false);
    lg_err_clear();
    assert_int_equal(g_super.n_instances, 1);
    assert_int_equal(vae(0)->state, LG_INSTANCE_down);
    assert_true(atomic_load(&row->restarts) > 0);
    assert_true(WIFSIGNALED(end_of(late)));
}

static void test_adoption_fills_rows(void **state)
{
    (void)state;
    pid_t pid = join(LG_ROLE_vae, 1);
    only_vae(3);
    lg_adopt_instances(&g_super, false);
    assert_int_equal(g_super.n_instances, 3);
    for (int k = 0; k < 3; k++)
        assert_int_equal(vae(k)->state, k == 1 ? LG_INSTANCE_ready : LG_INSTANCE_down);
    lg_leftovers_kill(g_super.board, true);
    end_of(pid);
    lg_err_clear();
}

/* ---- memory of a parked run ---- */

/* The run is parked; a child stands for its keeper. */
static pid_t parked(void)
{
    struct lg_board_row *row = lg_board_row(g_super.board, LG_ROLE_keeper, 0);
    pid_t pid = join(LG_ROLE_keeper, 0);
    assert_int_equal(atomic_load(&row->pid), pid);
    atomic_store(&g_super.board->s->run_state, LG_RUN_PARKED);
    atomic_store(&g_super.board->s->memory_kept, 1);
    return pid;
}

static int resume(const char *set, bool *ret_resumed)
{
    int code;
    lg_config *c = run_fixture_config((const char *const[]){set, NULL});
    int rc = lg_park_resume(
        &(struct lg_park_start){.run = &g_super_run, .config = &c, .quiet = true, .ready_fd = -1},
        ret_resumed, &code);
    lg_config_free(&c);
    return rc;
}

/* A start that is refused leaves the memory as it was: its mistake can be mended. */
static void test_refused_starts_keep_parked_memory(void **state)
{
    (void)state;
    bool resumed = true;
    uint64_t step = 1;
    pid_t keeper = parked();
    assert_int_equal(resume("job.seed=7", &resumed), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "job.seed"));
    lg_err_clear();
    assert_int_equal(resume("trainer.ranks=2", &resumed), LG_ERR_MISMATCH);
    assert_non_null(strstr(lg_err_message(), "trainer.ranks"));
    lg_err_clear();
    assert_int_equal(resume(NULL, &resumed), LG_ERR_NOTFOUND); /* there is no bin/lg-loader */
    assert_non_null(strstr(lg_err_message(), "bin/lg-loader is missing"));
    lg_err_clear();
    snprintf(g_super_run.units, sizeof g_super_run.units, "lg-fake-");
    g_super.launcher = lg_launcher_of(&g_super_run);
    assert_int_equal(resume(NULL, &resumed), 0); /* in units the checkpoint counts */
    g_super_run.units[0] = 0;
    g_super.launcher = lg_launcher_of(&g_super_run);
    assert_false(resumed);
    assert_true(lg_park_is_kept(g_super_run.dir, &step) && step == 0);
    assert_int_equal(waitpid(keeper, NULL, WNOHANG), 0);
    assert_int_equal(lg_park_release(&g_super_run), 0);
    assert_true(WIFSIGNALED(end_of(keeper)));
    assert_false(lg_park_is_kept(g_super_run.dir, &step));
    assert_int_equal(lg_park_release(&g_super_run), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "cannot be opened any more"));
}

#define TWO_GPUS "device=cuda", "trainer.ranks=2"

/* A start with this key over a run that was parked with its memory: the memory is let go, for this reason, and the
 * checkpoint counts. */
static void assert_let_go(const char *set, const char *why)
{
    bool resumed = true;
    int code;
    pid_t keeper = parked();
    lg_config *c = run_fixture_config((const char *const[]){TWO_GPUS, set, NULL});
    fflush(stderr);
    int terminal = dup(STDERR_FILENO), said = creat(scratch_path("said"), 0600);
    dup2(said, STDERR_FILENO);
    int rc = lg_park_resume(
        &(struct lg_park_start){.run = &g_super_run, .config = &c, .quiet = true, .ready_fd = -1},
        &resumed, &code);
    lg_terminal_finish();
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    close(said);
    if (rc < 0) fail_msg("%s: %s", set, lg_err_message());
    assert_false(resumed);
    assert_text("said", why);
    assert_non_null(c); /* for the start from the checkpoint */
    lg_config_free(&c);
    assert_true(WIFSIGNALED(end_of(keeper)));
    assert_int_equal(atomic_load(&g_super.board->s->memory_kept), 0);
    lg_board_bury(g_super.board, lg_board_life(g_super.board, LG_ROLE_keeper, 0, NULL));
}

/* Memory that lies elsewhere, or is cut otherwise, than the new config wants it; or samples of another data set lie in it. */
static void test_parked_memory_of_another_shape(void **state)
{
    (void)state;
    static const struct {
        const char *set, *why;
    } all[] = {
        {"trainer.gpus=\"1\"", "the GPU of a role has changed"},
        {"vae.gpus=\"1\"", "the GPU of a role has changed"},
        {"window.batches=7", "the window (window.batches) has changed"},
        {"parallel.zero=0", "how state, gradients and weights are cut (parallel) has changed"},
        {"parallel.exchange=host", "the way between GPUs (parallel.exchange) has changed"},
        {"memory.cast_weights=true", "which weights are kept (memory.cast_weights) has changed"},
        {"memory.offload_ema=true", "where the average lies (memory.offload_ema) has changed"},
    };
    assert_int_equal(
        lg_run_decide(&g_super_run, run_fixture_config((const char *const[]){TWO_GPUS, NULL})), 0);
    assert_int_equal(lg_run_save(&g_super_run), 0);
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        char name[64];
        snprintf(name, sizeof name, "bin/%s", lg_role_program((lg_role)r));
        script(name, "exec sleep 100");
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) assert_let_go(all[i].set, all[i].why);
    atomic_store(&g_super.board->s->data.changed, 1);
    assert_let_go("data.allow_changed=true", "the data set has changed");
}

static bool g_whole;
static void on_answer(lg_supervisor *s, bool whole)
{
    (void)s;
    g_whole = whole;
}
static bool keeper_is_whole(void)
{
    g_whole = false;
    lg_keep_ask_whole(&g_super, on_answer);
    workers_are_done();
    return g_whole;
}

/* Kept is only what no checkpoint or seed would give again, and only whole. */
static void test_what_can_be_kept(void **state)
{
    (void)state;
    pid_t keeper = join(LG_ROLE_keeper, 0);
    scratch_write("run/regions", "a\n");
    assert_false(lg_park_may_keep(&g_super.keep, g_super.board)); /* no step yet */
    atomic_store(&lg_board_row(g_super.board, LG_ROLE_trainer, 0)->commit, lg_mark_of(3));
    assert_true(lg_park_may_keep(&g_super.keep, g_super.board));
    assert_int_equal(lg_keep_adopt(&g_super.keep, g_super.board), 0);
    assert_false(keeper_is_whole()); /* it lacks "a" */
    scratch_write("run/regions", "");
    assert_true(keeper_is_whole());
    g_super.keep.service = true;
    assert_false(lg_park_may_keep(&g_super.keep, g_super.board));
    g_super.keep.service = false;
    /* What is left of lost memory would park the next run as well. */
    _Atomic(uint32_t) *lost = &lg_board_row(g_super.board, LG_ROLE_ema, 0)->lost;
    atomic_store(lost, 1);
    assert_false(lg_park_may_keep(&g_super.keep, g_super.board));
    atomic_store(lost, 0);
    g_super.keep.lost = true;
    assert_false(lg_park_may_keep(&g_super.keep, g_super.board));
    g_super.keep.lost = false;
    assert_true(lg_park_may_keep(&g_super.keep, g_super.board));
    kill(keeper, SIGKILL);
    end_of(keeper);
    lg_child_reap(&g_super.keep.child);
}

/* ---- a keeper that dies before lgsup has copied everything ---- */

static void assert_parked(const char *cause)
{
    workers_are_done();
    assert_true(g_super.step >= LG_RUN_STEP_leaving);
    if (!strstr(g_super.cause, cause)) fail_msg("\"%s\" lacks \"%s\"", g_super.cause, cause);
}

/* What nobody holds any more is lost, and no keeper is started that would have it made anew. */
static void test_memory_lost_with_the_keeper(void **state)
{
    (void)state;
    scratch_write("run/regions", "a\n");
    script("bin/lg-keeper", "touch \"$(dirname \"$0\")/started\"; exit 1");
    lg_keep_replace(&g_super, "killed");
    assert_parked("the keeper has died and region a is in nobody's hands");
    assert_true(g_super.keep.lost);
    assert_false(lg_path_exists(scratch_path("bin/started")));
}

/* And what lgsup or a stage holds is not: here only the start of another keeper fails. */
static void test_memory_that_outlives_the_keeper(void **state)
{
    (void)state;
    scratch_write("run/regions", "");
    script("bin/lg-keeper", "exit 1");
    lg_keep_replace(&g_super, "killed");
    assert_parked("the keeper cannot be restarted: lg-keeper ended before it listened");
    assert_false(g_super.keep.lost);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, supervisor_setup, supervisor_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_who_is_adopted),
        TEST(test_adoption_of_leavers),
        TEST(test_adoption_of_a_successor),
        TEST(test_adoption_fills_rows),
        TEST(test_refused_starts_keep_parked_memory),
        TEST(test_parked_memory_of_another_shape),
        TEST(test_what_can_be_kept),
        TEST(test_memory_lost_with_the_keeper),
        TEST(test_memory_that_outlives_the_keeper),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
