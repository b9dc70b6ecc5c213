/* Every call of the supervisor's larger pieces that can fail fails once: what lgsup opens before
 * its loop, parked memory, what watches a run beside it, orders. See tests/sim/faults.h. */
#include "base/check.h"
#include "shm/board.h"
#include "shm/keeper.h"
#include "supervisor/commands/finish.h"
#include "supervisor/commands/order.h"
#include "supervisor/commands/park_resume.h"
#include "supervisor/core/keep.h"
#include "supervisor/core/park.h"
#include "supervisor/core/supervise.h"
#include "supervisor/run/programs.h"
#include "supervisor/views/preview.h"
#include "supervisor/views/prometheus.h"
#include "supervisor/views/tensorboard.h"
#include "supervisor/views/top.h"
#include "tests/sim/faults.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static lg_run r;
static struct shm_fixture f; /* a keeper */
static lg_board *b;          /* DIR/board */

static int tensorboard(void)
{
    lg_tensorboard t = {.fd = -1};
    lg_remove_tree(scratch_path("run/tensorboard"));
    faults_begin();
    int rc = lg_tensorboard_open(r.dir, 0, &t);
    if (rc == 0) {
        lg_tensorboard_look(&t, 2);
        lg_tensorboard_flush(&t, 3);
        lg_tensorboard_close(&t);
        rc = lg_tensorboard_open(r.dir, 2, &t); /* step 3 is cut off */
    }
    if (rc == 0) {
        lg_tensorboard_flush(&t, 3);
        lg_tensorboard_close(&t);
    }
    faults_end();
    return rc;
}

static int prometheus(void)
{
    lg_prometheus p = {0};
    faults_begin();
    int rc = lg_prometheus_open(0, &p);
    if (rc == 0) {
        free(lg_prometheus_text(&r, b));
        lg_prometheus_serve(&p, &r, b);
        lg_prometheus_close(&p);
    }
    faults_end();
    return rc;
}

static int top(void)
{
    faults_begin();
    int rc = lg_top(r.dir, true, NULL);
    faults_end();
    return rc;
}

static int programs(void)
{
    lg_programs p = {0};
    faults_begin();
    int rc = lg_programs_load(&p, r.dir, 7);
    if (rc == 0) rc = lg_programs_set(&p, LG_ROLE_vae, 0, "/bin/true");
    if (rc == 0) rc = lg_programs_save(&p);
    lg_programs_free(&p);
    if (rc == 0) rc = lg_programs_load(&p, r.dir, 7);
    TIDY(lg_programs_free(&p));
    return rc;
}

static int preview(void)
{
    struct lg_preview_job job;
    struct lg_child c = LG_CHILD_NONE;
    int rc = 0;
    faults_begin();
    if (lg_preview_next(&r, LG_PREVIEW_PICTURES, 0, &job)) rc = lg_preview_spawn(&r, &job, &c);
    if (c.pidfd >= 0) {
        while (lg_child_wait(&c, 1000) < 0) continue;
        rc = lg_preview_result(&r, LG_PREVIEW_PICTURES,
                               lg_child_reap(&c)); /* it has failed: with its last words */
        LG_ASSERT(rc < 0);
        rc = 0;
    }
    faults_end();
    return rc;
}

/* All that lgsup opens, up to a keeper that is dead. */
static int supervise(void)
{
    int code;
    lg_run_state outcome;
    struct lg_supervise_spec spec = {
        .run = &r, .board = b, .adopt = true, .ready_fd = -1, .quiet = true};
    faults_begin();
    int rc = lg_supervise(&spec, &code, &outcome);
    faults_end();
    LG_ASSERT(rc < 0);
    return rc == LG_ERR_NOTFOUND ? 0 : rc;
}

static void park(uint32_t keeper_pid)
{
    struct lg_board_row *row = lg_board_row(b, LG_ROLE_keeper, 0);
    atomic_store(&b->s->run_state, LG_RUN_PARKED);
    atomic_store(&b->s->memory_kept, 1);
    atomic_store(&row->pid, keeper_pid);
    atomic_store(&row->start_time, keeper_pid ? lg_process_start_time((int)keeper_pid) : 0);
}

/* Memory that cannot be used any more is never taken for a run that went on. */
static int park_resume(void)
{
    int code;
    bool resumed = true;
    lg_config *c = run_fixture_config(NULL);
    park(0);
    faults_begin();
    int rc = lg_park_resume(
        &(struct lg_park_start){.run = &r, .config = &c, .quiet = true, .ready_fd = -1}, &resumed,
        &code);
    TIDY(lg_config_free(&c));
    LG_ASSERT(!resumed);
    return rc;
}

static int park_release(void)
{
    uint64_t step;
    park(0);
    faults_begin();
    lg_park_is_kept(r.dir, &step);
    int rc = lg_park_release(&r);
    faults_end();
    return rc;
}

static int finish(void)
{
    int code = 0;
    faults_begin();
    lg_finish(&r, LG_RUN_DONE, false, &code);
    faults_end();
    return 0;
}

static int order(void)
{
    faults_begin();
    int rc = lg_order_swap(&(struct lg_order_to){.dir = r.dir}, "vae.0", "/bin/true");
    if (rc == LG_ERR_NOTFOUND) rc = lg_order_scale(&(struct lg_order_to){.dir = r.dir}, "vae", "2");
    faults_end();
    LG_ASSERT(rc < 0); /* nobody is there to carry it out */
    return rc == LG_ERR_NOTFOUND ? 0 : rc;
}

static int resume_from(void)
{
    char set[LG_PATH_BYTES + 32];
    snprintf(set, sizeof set, "trainer.resume_from=%s",
             scratch_path("other/checkpoints/fake_step20"));
    static lg_run mine;
    lg_run_init(&mine, scratch_path("mine"));
    lg_config *c = run_fixture_config((const char *const[]){set, NULL});
    faults_begin();
    int rc = lg_run_decide(&mine, c);
    faults_end();
    LG_ASSERT(rc < 0 || mine.start_step == 20);
    TIDY(lg_run_close(&mine));
    return rc;
}

static int units_runtime(void)
{
    static lg_run mine;
    lg_run_init(&mine, r.dir);
    snprintf(mine.units, sizeof mine.units, "lg-fake-");
    faults_begin();
    int rc = lg_run_runtime_create(&mine);
    faults_end();
    lg_run_runtime_remove(&mine);
    return rc;
}

/* A keeper that the service manager has started. */
static int service(void)
{
    static lg_keep k;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    k.n_copies = 0;
    LG_ASSERT(lg_keeper_put(f.keeper, "old", 1, null) == 0);
    faults_begin();
    int rc = lg_keep_init(&k, r.dir, f.dir, true);
    if (rc == 0) rc = lg_keep_start(&k, f.board);
    if (rc == 0) {
        if (lg_keeper_put(k.socket, "new", 1, null) < 0) lg_err_clear();
        lg_keep_refresh(&k);
        lg_child_reap(&k.child);
        rc = lg_keep_adopt(&k, f.board);
        if (rc == 0) lg_child_reap(&k.child);
        if (rc == 0) rc = lg_keep_start(&k, f.board);
    }
    LG_ASSERT(rc < 0 || k.child.pid == f.keeper_pid);
    if (rc == 0)
        lg_keep_end(&k);
    else
        lg_keep_leave(&k);
    faults_end();
    lg_keep_forget(f.dir);
    lg_board_vacate(f.board, lg_board_life(f.board, LG_ROLE_keeper, 0, NULL));
    close(null);
    return rc;
}

/* ---- */

static void make_other(void)
{
    char *toml = lg_config_to_toml(r.config);
    run_fixture_checkpoint(&r, scratch_path("other"), 20);
    scratch_write("other/config.toml", toml);
    LG_ASSERT(lg_plan_save(&r.plan, scratch_path("other/plan.json")) == 0);
    free(toml);
}

static int setup(void **state)
{
    (void)state;
    struct lg_board_spec spec = {.plan = &r.plan, .max_steps = 60};
    run_fixture_make(&r, "[checkpoint]\nevery = 10\n[sample]\ncaptions = [\"a cat\"]\nevery = 10\n"
                         "[tensorboard]\nenabled = true\n");
    run_fixture_checkpoint(&r, r.dir, 10);
    make_other();
    LG_ASSERT(lg_run_runtime_create(&r) == 0);
    LG_ASSERT(lg_board_create(scratch_path("run/board"), &spec, &b) == 0);
    scratch_write("run/metrics.jsonl", "{\"step\": 1, \"loss\": 1}\n{\"step\": 2, \"loss\": 1}\n"
                                       "{\"step\": 3, \"loss\": 1}\n");
    scratch_write("run/samples/step2.png", "\x89PNG\r\n\x1a\n................");
    scratch_write("run/logs/lgsup.log", "2026-01-01T00:00:00.000Z info  lgsup step 1 hello\n");
    scratch_write("run/logs/sample.log", "2026-01-01T00:00:00.000Z error sample no ink\n");
    lg_mkdirs(scratch_path("bin"));
    LG_ASSERT(symlink("/bin/false", scratch_path("bin/lg-sample")) == 0);
    setenv("LG_BIN_DIR", scratch_path("bin"), 1);
    mkdir(scratch_path("sockets"), 0700);
    chmod(scratch_path("sockets"), 0700);
    setenv("RUNTIME_DIRECTORY", scratch_path("sockets"), 1);
    shm_fixture_open(&f, 2);
    shm_fixture_start_keeper(&f);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    shm_fixture_close(&f);
    lg_board_close(&b);
    run_fixture_close(&r);
    return 0;
}

SCENARIO(tensorboard, 1)
SCENARIO(prometheus, 1)
SCENARIO(top, 1)
SCENARIO(programs, 1)
SCENARIO(preview, 1)
SCENARIO(supervise, 1)
SCENARIO(park_resume, 3)
SCENARIO(park_release, 1)
SCENARIO(finish, 1)
SCENARIO(order, 1)
SCENARIO(resume_from, 3)
SCENARIO(units_runtime, 1)
SCENARIO(service, 1)

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensorboard), cmocka_unit_test(test_prometheus),
        cmocka_unit_test(test_top),         cmocka_unit_test(test_programs),
        cmocka_unit_test(test_preview),     cmocka_unit_test(test_supervise),
        cmocka_unit_test(test_park_resume), cmocka_unit_test(test_park_release),
        cmocka_unit_test(test_finish),      cmocka_unit_test(test_order),
        cmocka_unit_test(test_resume_from), cmocka_unit_test(test_units_runtime),
        cmocka_unit_test(test_service),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
