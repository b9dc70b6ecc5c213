/* Every call of the run directory, of checkpoints and of the commands that can fail fails once: see
 * tests/sim/faults.h. Memory and messages: test_faults_shm; lgsup's loop: test_faults_supervise. */
#include "config/ledger.h"
#include "config/manifest.h"
#include "shm/keeper.h"
#include "stages/ckpt/publish.h"
#include "stages/ckpt/retention.h"
#include "supervisor/commands/check.h"
#include "supervisor/commands/detach.h"
#include "supervisor/commands/doctor.h"
#include "supervisor/commands/finish.h"
#include "supervisor/commands/logs.h"
#include "supervisor/commands/start.h"
#include "supervisor/commands/units_write.h"
#include "supervisor/commands/verify.h"
#include "supervisor/core/intensity.h"
#include "supervisor/core/keep.h"
#include "supervisor/run/child.h"
#include "supervisor/run/run.h"
#include "supervisor/views/status.h"
#include "tests/sim/faults.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static struct shm_fixture f;
static char g_toml[LG_PATH_BYTES], g_run[LG_PATH_BYTES], g_resumed[LG_PATH_BYTES];
static char g_started[LG_PATH_BYTES + 16];
static struct lg_denoiser_config net = {.kind = LG_DIT,
                                        .channels = 1,
                                        .height = 2,
                                        .width = 2,
                                        .patch = 1,
                                        .hidden = 4,
                                        .depth = 1,
                                        .heads = 1,
                                        .mlp_ratio = 4,
                                        .num_classes = 1,
                                        .norm_eps = 1e-6};

static int enter(void *where, const struct lg_child *c)
{
    *(int *)where = c->pid;
    return 0;
}

static int child(void)
{
    char log[LG_PATH_BYTES], words[64], how[64], *text = NULL;
    int entered = 0;
    char *echo[] = {(char *)"echo", (char *)"hello", NULL};
    int code;
    struct lg_child c = LG_CHILD_NONE;
    snprintf(log, sizeof log, "%s/child.log", f.dir);
    faults_begin();
    int rc = lg_child_capture("/bin/echo", echo, 100, &text, &code);
    free(text);
    if (rc == 0)
        rc = lg_child_spawn(
            &(struct lg_spawn){.program = "/bin/echo", .argv = echo, .log = log, .pass_fd = -1},
            &c);
    if (rc == 0) rc = lg_child_wait(&c, 5000);
    if (c.pidfd >= 0) lg_exit_text(lg_child_reap(&c), how, sizeof how);
    lg_last_words(log, words, sizeof words);
    if (rc == 0)
        rc = lg_child_spawn(&(struct lg_spawn){.program = "/bin/echo",
                                               .argv = echo,
                                               .log = log,
                                               .pass_fd = -1,
                                               .enter = enter,
                                               .where = &entered},
                            &c);
    if (rc == 0) rc = lg_child_wait(&c, 5000);
    if (c.pidfd >= 0) lg_exit_text(lg_child_reap(&c), how, sizeof how);
    faults_end();
    return rc;
}

static int run_dir(void)
{
    static lg_run r;
    lg_config *config = NULL;
    int holder;
    lg_run_init(&r, g_run);
    LG_ASSERT(lg_config_load(g_toml, NULL, 0, &config) == 0);
    faults_begin();
    lg_run_init(&r, g_run);
    int rc = lg_run_create(&r);
    if (rc == 0) rc = lg_run_lock(&r);
    if (rc == 0) {
        rc = lg_run_decide(&r, config);
        config = NULL;
    }
    if (rc == 0) rc = lg_run_save(&r);
    if (rc == 0) rc = lg_run_runtime_create(&r);
    if (rc == 0) rc = lg_run_runtime_load(&r);
    if (rc == 0) rc = lg_run_load(&r);
    holder = lg_run_holder(g_run, NULL);
    if (holder >= 0) close(holder);
    TIDY(lg_config_free(&config), lg_run_runtime_remove(&r), lg_run_close(&r));
    return rc;
}

static int adopt_nothing(void)
{
    static lg_run r;
    bool adopted;
    int code;
    lg_run_init(&r, g_run);
    faults_begin();
    int rc = lg_start_adopt(&r, true, true, -1, &adopted, &code);
    TIDY(lg_run_close(&r));
    return rc;
}

static int keep(void)
{
    static lg_keep k;
    char missing[LG_REGION_NAME_BYTES];
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    faults_begin();
    k.n_copies = 0;
    int rc = lg_keep_init(&k, g_run, f.dir, false);
    snprintf(k.socket, sizeof k.socket, "%s/keeper3", f.dir);
    if (rc == 0) rc = lg_keep_start(&k, f.board);
    if (rc == 0) {
        if (lg_keeper_put(k.socket, "kept", 1, null) < 0) lg_err_clear();
        lg_keep_refresh(&k);
        (void)lg_keep_is_whole(&k, missing);
        lg_keep_salvage(&k, getpid(), f.board->s->preamble.run_id);
    }
    lg_keep_end(&k);
    faults_end();
    lg_board_bury(f.board, lg_board_life(f.board, LG_ROLE_keeper, 0, NULL));
    close(null);
    return rc;
}

static int publish(void)
{
    static lg_manifest m;
    static float read_back[4 * LG_UNIT_ALIGN];
    char dir[LG_PATH_BYTES], parent[LG_PATH_BYTES + 16], weights[LG_PATH_BYTES];
    lg_params params;
    LG_ASSERT(lg_denoiser_params(&net, &params) == 0);
    float *values = calloc(4 * params.count, sizeof *values);
    LG_ASSERT(values && params.count <= LG_ARRAY_LEN(read_back));
    static uint64_t step;
    m = (lg_manifest){.name = "faults", .step = ++step, .isa = "sse2", .ranks = 1, .threads = 1};
    struct lg_publishing p = {
        .run_dir = g_run,
        .contents = {.net = &net,
                     .params = &params,
                     .state = {.w = values, .moments = {.m = values, .v = values}, .ema = values}},
    };
    snprintf(parent, sizeof parent, "%s/checkpoints", g_run);
    lg_remove_tree(parent);
    faults_begin();
    int rc = lg_checkpoint_publish(&p, &m, dir);
    if (rc == 0) {
        m.n_files = 0;
        rc = lg_checkpoint_publish(&p, &m, dir); /* it is there */
    }
    if (rc == 0)
        rc = lg_retention_apply(&(struct lg_retention){.dir = parent, .newest = &m, .keep = 1});
    if (rc == 0)
        rc = lg_checkpoint_read_optimizer(dir, &params, 0, params.count, read_back, NULL, NULL);
    if (rc == 0) rc = lg_checkpoint_weights_dir(dir, "ema", weights);
    TIDY(free(values), lg_params_free(&params));
    return rc;
}

/* A start that finds a checkpoint of its own. */
static int resume(void)
{
    static lg_run r;
    lg_config *config = NULL;
    LG_ASSERT(lg_config_load(g_toml, NULL, 0, &config) == 0);
    lg_run_init(&r, g_resumed);
    faults_begin();
    int rc = lg_run_decide(&r, config);
    faults_end();
    LG_ASSERT(rc < 0 || r.start_step == 1); /* never another start than the right one */
    lg_run_close(&r);
    return rc;
}

/* What is said when the processes are gone; it never fails the run. */
static int finish(void)
{
    static lg_run r;
    int code = 0;
    lg_run_init(&r, g_resumed);
    LG_ASSERT(lg_run_load(&r) == 0);
    faults_begin();
    lg_finish(&r, LG_RUN_DONE, false, &code);
    faults_end();
    lg_run_close(&r);
    return 0;
}

static int doctor(void)
{
    int code;
    faults_begin();
    lg_doctor(&code);
    faults_end();
    return 0;
}

/* ---- commands, as far as they need no processes; what they print goes nowhere ---- */

static int verify_run(void)
{
    faults_begin();
    int rc = lg_verify(g_run);
    faults_end();
    return rc;
}

static int logs(void)
{
    faults_begin();
    int rc = lg_logs(&(struct lg_logs_args){.dir = g_run});
    faults_end();
    return rc;
}

static int status(void)
{
    static struct lg_status st;
    faults_begin();
    int rc = lg_status_read(g_run, &st);
    if (rc == 0) {
        cJSON *j = lg_status_json(&st);
        cJSON_Delete(j);
        lg_status_print(&st, stdout);
    }
    if (rc == 0) lg_status_save(g_run, f.board);
    faults_end();
    return rc;
}

static int stop(void)
{
    int code;
    faults_begin();
    int rc = lg_stop(g_run, NULL, &code);
    faults_end();
    return rc;
}

static int check_file(void)
{
    faults_begin();
    int rc = lg_check(&(struct lg_check_args){.file = g_toml});
    faults_end();
    return rc;
}

static int units(void)
{
    char dir[LG_PATH_BYTES];
    LG_ASSERT(lg_path(dir, "%s/units", f.dir) == 0);
    const char *set = "job.seed=1";
    faults_begin();
    int rc = lg_units_write(
        &(struct lg_units_args){.file = g_toml, .set = &set, .n_set = 1, .dir = dir});
    faults_end();
    return rc;
}

/* Everything that a start does before its processes, and, as the keeper cannot run, what it does
 * when they do not start. The roles are scripts, quicker to ask. */
static int start(void)
{
    int code;
    const char *set = g_started;
    setenv("LG_BIN_DIR", scratch_path("scripts"), 1);
    faults_begin();
    int rc = lg_start(&(struct lg_start_args){.file = g_toml, .set = &set, .n_set = 1}, &code);
    TIDY();
    return rc < 0 && strstr(lg_err_message(), "keeper") ? 0 : rc;
}

static int intensity(void)
{
    struct lg_intensity t;
    faults_begin();
    int rc = lg_intensity_init(&t, 5, 60);
    if (rc == 0) lg_intensity_free(&t);
    faults_end();
    return rc;
}

/* ---- */

/* Those beside this test's folder: BUILD/bin. */
static void use_programs(void)
{
    char here[LG_PATH_BYTES], bin[LG_PATH_BYTES];
    LG_ASSERT(lg_program_dir(here) == 0 && lg_path(bin, "%s/../bin", here) == 0);
    setenv("LG_BIN_DIR", bin, 1);
}

static void make_scripts(void)
{
    char name[64];
    for (int r = 0; r < LG_ROLE_lgsup; r++) {
        snprintf(name, sizeof name, "scripts/%s", lg_role_program((lg_role)r));
        LG_ASSERT(chmod(scratch_write(name, r == LG_ROLE_keeper
                                                ? "#!/bin/sh\nexit 1\n"
                                                : "#!/bin/sh\n"
                                                  "echo '{\"regions\": [], \"private\": []}'\n"),
                        0700) == 0);
    }
}

/* A run of one step: its ledger and its board, for the commands that read them. */
static void make_history(void)
{
    char path[LG_PATH_BYTES + 16];
    lg_board *b = NULL;
    struct lg_ledger_record r = {.step = 1, .first = 0, .last = 15};
    lg_ledger_seal(&r);
    snprintf(path, sizeof path, "%s/ledger", g_run);
    LG_ASSERT(lg_publish_file(path, &r, sizeof r) == 0);
    snprintf(path, sizeof path, "%s/board", g_run);
    LG_ASSERT(lg_board_create(path, &(struct lg_board_spec){.plan = &f.plan, .max_steps = 1}, &b) ==
              0);
    lg_board_close(&b);
}

/* A run with a checkpoint of step 1, as its own plan has it. */
static void make_resumed(void)
{
    static lg_run r;
    static lg_manifest m;
    char dir[LG_PATH_BYTES];
    lg_config *config = NULL;
    lg_params params;
    LG_ASSERT(lg_config_load(g_toml, NULL, 0, &config) == 0);
    lg_run_init(&r, g_resumed);
    LG_ASSERT(lg_run_create(&r) == 0 && lg_run_decide(&r, config) == 0 && lg_run_save(&r) == 0);
    LG_ASSERT(lg_denoiser_params(&net, &params) == 0);
    float *values = calloc(params.count, sizeof *values);
    m = (lg_manifest){
        .name = "faults", .step = 1, .plan_hash = r.plan.hash, .ranks = 1, .threads = 1};
    snprintf(m.isa, sizeof m.isa, "%s", r.plan.isa);
    struct lg_publishing p = {
        .run_dir = g_resumed,
        .contents = {.net = &net,
                     .params = &params,
                     .state = {.w = values, .moments = {.m = values, .v = values}, .ema = values}},
    };
    LG_ASSERT(lg_checkpoint_publish(&p, &m, dir) == 0);
    free(values);
    lg_params_free(&params);
    lg_run_close(&r);
}

static int setup(void **state)
{
    (void)state;
    char cwd[1024], toml[8192], checkpoints[LG_PATH_BYTES + 16];
    scratch_make();
    if (mkdir(scratch_path("r"), 0700) < 0) return -1;
    setenv("XDG_RUNTIME_DIR", scratch_path("r"), 1); /* also of those that abort */
    scratch_write("data/a.txt", "a caption");
    if (!getcwd(cwd, sizeof cwd)) return -1;
    use_programs();
    snprintf(toml, sizeof toml,
             "[job]\nname = \"faults\"\ndir = \"run\"\n[data]\npath = \"data\"\n"
             "[text]\nmodel = \"%s/examples/emoji/text_encoder\"\n"
             "[vae]\nmodel = \"%s/examples/emoji/vae\"\n"
             "[trainer]\nmax_steps = 60\nglobal_batch_size = 16\n",
             cwd, cwd);
    snprintf(g_toml, sizeof g_toml, "%s", scratch_write("pipeline.toml", toml));
    snprintf(g_run, sizeof g_run, "%s", scratch_path("run"));
    snprintf(checkpoints, sizeof checkpoints, "%s/logs", g_run);
    LG_ASSERT(lg_mkdirs(checkpoints) == 0);
    scratch_write("run/logs/vae.0.log", "2026-01-01T00:00:00.000Z INFO vae.0 a line\n");
    scratch_write("run/config.toml", toml);
    shm_fixture_open(&f, 2);
    shm_fixture_start_keeper(&f);
    make_history();
    make_scripts();
    snprintf(g_started, sizeof g_started, "job.dir=%s", scratch_path("started"));
    snprintf(g_resumed, sizeof g_resumed, "%s", scratch_path("resumed"));
    make_resumed();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    shm_fixture_close(&f);
    scratch_remove();
    return 0;
}

SCENARIO(child, 1)
SCENARIO(intensity, 1)
SCENARIO(run_dir, 3)
SCENARIO(adopt_nothing, 1)
SCENARIO(keep, 1)
SCENARIO(publish, 1)
SCENARIO(resume, 3)
SCENARIO(finish, 2)
SCENARIO(doctor, 2)
SCENARIO(verify_run, 1)
SCENARIO(logs, 1)
SCENARIO(status, 1)
SCENARIO(stop, 1)
SCENARIO(check_file, 5)
SCENARIO(units, 1)
SCENARIO(start, 1)

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_intensity), cmocka_unit_test(test_child),
        cmocka_unit_test(test_run_dir),   cmocka_unit_test(test_adopt_nothing),
        cmocka_unit_test(test_keep),      cmocka_unit_test(test_publish),
        cmocka_unit_test(test_resume),    cmocka_unit_test(test_finish),
        cmocka_unit_test(test_doctor),    cmocka_unit_test(test_verify_run),
        cmocka_unit_test(test_logs),      cmocka_unit_test(test_status),
        cmocka_unit_test(test_stop),      cmocka_unit_test(test_check_file),
        cmocka_unit_test(test_units),     cmocka_unit_test(test_start),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
