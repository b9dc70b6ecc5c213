/* See supervisor_fixture.h. */
#include "tests/unit/supervisor_fixture.h"
#include "base/check.h"
#include "supervisor/core/scale.h"
#include "supervisor/core/swap.h"
#include "tests/unit/run_fixture.h"
#include "tests/unit/scratch.h"
#include <poll.h>
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

lg_run g_super_run;
lg_supervisor g_super;

void script(const char *name, const char *text)
{
    char all[256];
    snprintf(all, sizeof all, "#!/bin/sh\n%s\n", text);
    chmod(scratch_write(name, all), 0700);
}

int supervisor_setup(void **state)
{
    (void)state;
    run_fixture_make(&g_super_run, "");
    assert_int_equal(lg_run_lock(&g_super_run), 0);
    assert_int_equal(lg_run_runtime_create(&g_super_run), 0);
    script("bin/lg-vae", "exec sleep 100");
    script("bin/lg-trainer", "exec sleep 100");
    setenv("LG_BIN_DIR", scratch_path("bin"), 1);
    memset(&g_super, 0, sizeof g_super);
    g_super.run = &g_super_run;
    g_super.launcher = &lg_launcher_fork;
    g_super.signal_fd = g_super.ready_fd = -1;
    g_super.step = LG_RUN_STEP_running;
    g_super.instance = calloc(LG_INSTANCE_TABLE, sizeof *g_super.instance);
    struct lg_board_spec spec = {.plan = &g_super_run.plan, .max_steps = 60};
    assert_int_equal(lg_board_create(scratch_path("run/board"), &spec, &g_super.board), 0);
    atomic_store(&g_super.board->s->run_state, LG_RUN_RUNNING);
    assert_int_equal(lg_control_open(g_super_run.runtime_dir, &g_super.control), 0);
    assert_int_equal(
        lg_programs_load(&g_super.programs, g_super_run.dir, g_super.board->s->preamble.run_id), 0);
    assert_int_equal(lg_keep_init(&g_super.keep, g_super_run.dir, g_super_run.runtime_dir, false),
                     0);
    for (int i = 0; i < LG_ROLE_keeper; i++) atomic_store(&g_super.board->s->wanted[i], 0);
    for (int i = 0; i < LG_ROLE_keeper; i++) lg_intensity_init(&g_super.intensity[i], 3, 60);
    assert_int_equal(lg_background_open(&g_super.background), 0);
    lg_progress_open(&g_super.progress,
                     &(struct lg_progress_spec){.run_dir = g_super_run.dir,
                                                .quiet = true,
                                                .disk = g_super.background.worker[LG_WORKER_disk]});
    return 0;
}

int supervisor_teardown(void **state)
{
    (void)state;
    lg_swap_free(&g_super);
    for (int i = 0; i < g_super.n_instances; i++) {
        if (g_super.instance[i].child.pidfd < 0) continue;
        lg_child_signal(&g_super.instance[i].child, SIGKILL);
        lg_child_reap(&g_super.instance[i].child);
    }
    for (int i = 0; i < LG_ROLE_keeper; i++) lg_intensity_free(&g_super.intensity[i]);
    free(g_super.instance);
    lg_programs_free(&g_super.programs);
    workers_are_done();
    lg_progress_close(&g_super.progress);
    assert_true(lg_background_close(&g_super.background));
    lg_keep_leave(&g_super.keep);
    lg_control_close(&g_super.control);
    lg_board_close(&g_super.board);
    run_fixture_close(&g_super_run);
    return 0;
}

/* An instance that is ready, without a process of its own. */
struct lg_instance *add(lg_role role, int index)
{
    struct lg_instance *i = lg_instance_add(&g_super, role, index);
    i->incarnation = lg_board_enlist(g_super.board, role, index);
    atomic_store(&lg_board_row(g_super.board, role, index)->ready, i->incarnation);
    char *argv[] = {(char *)"sleep", (char *)"100", NULL};
    assert_int_equal(
        lg_child_spawn(&(struct lg_spawn){.program = "/bin/sleep", .argv = argv, .pass_fd = -1},
                       &i->child),
        0);
    i->state = LG_INSTANCE_ready;
    atomic_fetch_add(&g_super.board->s->wanted[role], 1);
    return i;
}

struct lg_instance *vae(int index)
{
    return lg_instance_find(&g_super, LG_ROLE_vae, index);
}

void workers_are_done(void)
{
    for (int k = 0; k < LG_WORKER_COUNT; k++)
        assert_true(lg_background_finish(&g_super, (lg_worker_kind)k));
}

/* What the loop does beside deaths of instances. */
void turn(void)
{
    struct pollfd p[LG_INSTANCES_MAX];
    lg_control_handle(&g_super);
    int n = lg_swap_poll(&g_super, p);
    if (n > 0 && poll(p, (nfds_t)n, 0) > 0)
        for (int i = 0; i < n; i++)
            if (p[i].revents) lg_swap_on_death(&g_super, i);
    workers_are_done();
    lg_swap_look(&g_super);
    lg_scale_look(&g_super);
    workers_are_done();
    lg_instances_sweep(&g_super);
    usleep(LOOK_US);
}

void assert_text(const char *file, const char *part)
{
    char *text;
    size_t bytes;
    workers_are_done(); /* it may be the log */
    assert_int_equal(lg_read_file(scratch_path(file), 1 << 16, &text, &bytes), 0);
    if (!strstr(text, part)) fail_msg("\"%s\" lacks \"%s\"", text, part);
    free(text);
}

void leaves(struct lg_instance *i)
{
    lg_child_signal(&i->child, SIGKILL);
    lg_child_reap(&i->child);
    i->exit_code = 0;
    lg_board_bury(g_super.board, i->incarnation);
    lg_instance_raise(&g_super, i, LG_INSTANCE_EVENT_left);
}
