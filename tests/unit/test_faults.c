/* Every call of shm, bus, supervisor and the checkpoint writer that can fail fails once: see
 * tests/sim/faults.h. */
#include "bus/control.h"
#include "bus/wake.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "shm/commit.h"
#include "shm/keeper.h"
#include "shm/region.h"
#include "shm/window.h"
#include "stages/ckpt/publish.h"
#include "stages/ckpt/retention.h"
#include "supervisor/check.h"
#include "supervisor/child.h"
#include "supervisor/detach.h"
#include "supervisor/doctor.h"
#include "supervisor/finish.h"
#include "supervisor/intensity.h"
#include "supervisor/keep.h"
#include "supervisor/logs.h"
#include "supervisor/run.h"
#include "supervisor/start.h"
#include "supervisor/status.h"
#include "supervisor/units.h"
#include "supervisor/verify.h"
#include "tests/sim/faults.h"
#include "tests/unit/scratch.h"
#include "tests/unit/shm_fixture.h"
#include "tests/unit/store_manager.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static struct shm_fixture f;
static struct store_manager g_manager; /* of keeper_stored */
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

/* The error stays for the caller to see, whatever tidying up says. */
#define TIDY(...)                                                                                  \
    do {                                                                                           \
        faults_end();                                                                              \
        __VA_ARGS__;                                                                               \
    } while (0)

static int board(void)
{
    lg_board *a = NULL, *b = NULL;
    char path[LG_PATH_BYTES];
    struct lg_board_spec spec = {.plan = &f.plan, .max_steps = 10};
    snprintf(path, sizeof path, "%s/board2", f.dir);
    faults_begin();
    int rc = lg_board_create(path, &spec, &a);
    if (rc == 0) rc = lg_board_open(path, f.plan.hash, &b);
    if (rc == 0) {
        lg_incarnation me = lg_board_enlist(a, LG_ROLE_vae, 0);
        rc = lg_board_join(a, me);
        int fd = rc == 0 ? lg_board_pidfd(a, LG_ROLE_vae, 0) : -1;
        if (fd >= 0) close(fd);
        if (rc == 0) (void)lg_board_is_dead(b, me); /* may not know, and says so by "alive" */
    }
    TIDY(lg_board_close(&a), lg_board_close(&b));
    return rc;
}

static struct lg_region_spec region_spec(void)
{
    return (struct lg_region_spec){.keeper = f.keeper,
                                   .name = "faults/0/x",
                                   .bytes = 5000,
                                   .plan_hash = f.plan.hash,
                                   .run_id = f.board->s->run_id};
}

static int region(void)
{
    struct lg_region_spec spec = region_spec();
    lg_region *r = NULL, *again = NULL;
    lg_keeper_drop(f.keeper, spec.name);
    faults_begin();
    int rc = lg_region_open(&spec, &r);
    if (rc == 0) rc = lg_region_deposit(f.keeper, r);
    if (rc == 0) rc = lg_region_open(&spec, &again);
    TIDY(lg_region_close(&r), lg_region_close(&again));
    return rc;
}

static int device_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    (void)bytes;
    *ret_fd = memfd_create(p->name, MFD_CLOEXEC);
    return *ret_fd < 0 ? LG_FAIL(LG_ERR_NOSPACE, "no memory on %s", p->name) : 0;
}

static int device_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    void *at = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return LG_FAIL(LG_ERR_IO, "cannot map on %s", p->name);
    *ret = at;
    return 0;
}

static void device_unmap(const struct lg_region_place *p, void *at, size_t bytes)
{
    (void)p;
    munmap(at, bytes);
}

static int device_region(void)
{
    static const struct lg_region_place place = {
        .name = "cuda:0", .create = device_create, .map = device_map, .unmap = device_unmap};
    struct lg_region_spec spec = region_spec();
    lg_region *r = NULL, *again = NULL;
    spec.place = &place;
    lg_keeper_drop(f.keeper, spec.name);
    lg_keeper_drop(f.keeper, "faults/0/x@");
    faults_begin();
    int rc = lg_region_open(&spec, &r);
    if (rc == 0) rc = lg_region_deposit(f.keeper, r);
    if (rc == 0) rc = lg_region_open(&spec, &again);
    TIDY(lg_region_close(&r), lg_region_close(&again));
    return rc;
}

static int window(void)
{
    struct lg_window_geometry g = {.slots = 8,
                                   .batch = 4,
                                   .chunk = {4, 4, 4},
                                   .pixels_bytes = 48,
                                   .latent_bytes = 16,
                                   .text_bytes = 16};
    struct lg_region_spec spec = region_spec();
    struct lg_window_places nowhere = {0};
    lg_window *w = NULL;
    faults_begin();
    int rc = lg_window_open(&spec, &g, &nowhere, &w);
    TIDY(lg_window_close(&w));
    return rc;
}

static int keeper_client(void)
{
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    int fd = -1, null = open("/dev/null", O_RDWR | O_CLOEXEC);
    lg_keeper_drop(f.keeper, "faults/fd");
    faults_begin();
    int rc = lg_keeper_put(f.keeper, "faults/fd", 1, null);
    if (rc == 0) rc = lg_keeper_get(f.keeper, "faults/fd", &bytes, &fd);
    if (fd >= 0) close(fd);
    if (rc == 0) rc = lg_keeper_list(f.keeper, 0, name, &bytes);
    if (rc == 0) rc = lg_keeper_drop(f.keeper, "faults/fd");
    TIDY(close(null));
    return rc;
}

/* The other end: a client insists until the keeper has ended. */
static void insist(const char *socket)
{
    uint64_t bytes;
    int fd = -1, mine = shm_fixture_memory("a");
    for (int i = 0; i < 1000 && !lg_path_exists(socket); i++) usleep(1000);
    for (int i = 0; i < 3; i++) {
        lg_keeper_put(socket, "a", 1, mine);
        if (lg_keeper_get(socket, "a", &bytes, &fd) == 0) close(fd);
        lg_keeper_get(socket, "b", &bytes, &fd);
        lg_keeper_drop(socket, "c");
    }
    for (int i = 0; i < 50 && lg_keeper_drop(socket, "") < 0 && lg_path_exists(socket); i++)
        usleep(1000);
}

static int serve_to_one(const char *name, bool stored)
{
    char socket[LG_PATH_BYTES], waits[LG_PATH_BYTES + 8];
    int status, ready[2];
    snprintf(socket, sizeof socket, "%s/%s", f.dir, name);
    snprintf(waits, sizeof waits, "%s%s", socket,
             stored ? ".new" : ""); /* nothing is in the store */
    unlink(waits);
    LG_ASSERT(pipe(ready) == 0);
    pid_t client = fork();
    if (client == 0) {
        insist(waits);
        _exit(0);
    }
    sigset_t old;
    sigprocmask(SIG_BLOCK, NULL, &old);
    faults_begin();
    int rc = stored ? lg_keeper_serve_stored(socket) : lg_keeper_serve(socket, ready[1]);
    faults_end();
    close(ready[0]);
    close(ready[1]);
    kill(client, SIGKILL);
    waitpid(client, &status, 0);
    sigprocmask(SIG_SETMASK, &old, NULL);
    return rc;
}

static int keeper_server(void)
{
    return serve_to_one("keeper2", false);
}

static int keeper_stored(void)
{
    return serve_to_one("keeper4", true);
}

/* Two fds of one name must never lie there: the next keeper would not know which is meant. */
static int store_is_sane(void)
{
    store_manager_clear(&g_manager);
    return g_manager.doubled ? LG_FAIL(LG_ERR_FAILED, "the store had two fds of one name") : 0;
}

static int control(void)
{
    lg_control *c = NULL;
    lg_bus *bus = NULL;
    struct lg_peer peer;
    struct lg_message m, answer, ping = {.kind = LG_MESSAGE_ping, .role = LG_ROLE_lgsup};
    struct lg_bus_spec spec = {
        .runtime_dir = f.dir, .role = LG_ROLE_ema, .incarnation = 77, .plan = &f.plan};
    faults_begin();
    int rc = lg_control_open(f.dir, &c);
    if (rc == 0) rc = lg_bus_open(&spec, &bus);
    if (rc == 0) {
        lg_bus_hello(bus);
        lg_bus_notify(bus);
        lg_bus_event(bus, 1, "something");
        lg_bus_wait(bus, 5);
        for (int i = 0; i < 3; i++)
            if (lg_control_receive(c, &peer, &m)) lg_control_answer(c, &peer, &m);
        lg_control_nudge(c, LG_ROLE_ema, 0, 77);
        lg_bus_wait(bus, 5);
        rc = lg_control_ask(f.dir, &ping, 10, &answer); /* nobody answers: we are lgsup */
        if (rc == LG_ERR_TIMEOUT) rc = 0;
    }
    TIDY(lg_bus_close(&bus), lg_control_close(&c));
    return rc;
}

static int child(void)
{
    char log[LG_PATH_BYTES], words[64], how[64], *text = NULL;
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
        lg_keep_salvage(&k, getpid(), f.board->s->run_id);
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
    static float read_back[4000];
    char dir[LG_PATH_BYTES], parent[LG_PATH_BYTES + 16], weights[LG_PATH_BYTES];
    lg_params params;
    LG_ASSERT(lg_denoiser_params(&net, &params) == 0);
    float *values = calloc(4 * params.count, sizeof *values);
    LG_ASSERT(values && params.count <= LG_ARRAY_LEN(read_back));
    static uint64_t step;
    m = (lg_manifest){.name = "faults", .step = ++step, .isa = "sse2", .ranks = 1, .threads = 1};
    struct lg_publishing p = {
        .run_dir = g_run,
        .net = &net,
        .params = &params,
        .state = {.w = values, .m = values, .v = values, .ema = values},
    };
    snprintf(parent, sizeof parent, "%s/checkpoints", g_run);
    lg_remove_tree(parent);
    faults_begin();
    int rc = lg_checkpoint_publish(&p, &m, dir);
    if (rc == 0) {
        m.n_files = 0;
        rc = lg_checkpoint_publish(&p, &m, dir); /* it is there */
    }
    if (rc == 0) rc = lg_retention_apply(parent, "faults", 1);
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
    int rc = lg_logs(g_run, NULL, false);
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
        lg_status_print(&st);
    }
    if (rc == 0) lg_status_save(g_run, f.board);
    faults_end();
    return rc;
}

static int stop(void)
{
    int code;
    faults_begin();
    int rc = lg_stop(g_run, &code);
    faults_end();
    return rc;
}

static int check_file(void)
{
    faults_begin();
    int rc = lg_check(g_toml, NULL, 0);
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

/* Everything that a start does before its processes, and, as the keeper cannot run, what it does when
 * they do not start. The roles are scripts, quicker to ask. */
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
        .net = &net,
        .params = &params,
        .state = {.w = values, .m = values, .v = values, .ema = values},
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

#define SCENARIO(function, step)                                                                   \
    static void test_##function(void **state)                                                      \
    {                                                                                              \
        (void)state;                                                                               \
        int n = faults_each(                                                                       \
            &(struct fault_scenario){.name = #function, .run = function, .every = step});          \
        print_message("%d faults\n", n);                                                           \
        assert_true(n > 0);                                                                        \
    }
SCENARIO(board, 1)
SCENARIO(region, 1)
SCENARIO(device_region, 1)
SCENARIO(window, 1)
SCENARIO(keeper_client, 1)
SCENARIO(keeper_server, 1)
static void test_keeper_stored(void **state)
{
    (void)state;
    store_manager_start(&g_manager, f.dir);
    int n = faults_each(&(struct fault_scenario){
        .name = "keeper_stored", .run = keeper_stored, .after = store_is_sane});
    store_manager_stop(&g_manager);
    print_message("%d faults\n", n);
    assert_true(n > 0);
}
SCENARIO(control, 1)
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
        cmocka_unit_test(test_intensity),     cmocka_unit_test(test_board),
        cmocka_unit_test(test_region),        cmocka_unit_test(test_window),
        cmocka_unit_test(test_device_region), cmocka_unit_test(test_keeper_client),
        cmocka_unit_test(test_keeper_server), cmocka_unit_test(test_keeper_stored),
        cmocka_unit_test(test_control),       cmocka_unit_test(test_child),
        cmocka_unit_test(test_run_dir),       cmocka_unit_test(test_adopt_nothing),
        cmocka_unit_test(test_keep),          cmocka_unit_test(test_publish),
        cmocka_unit_test(test_resume),        cmocka_unit_test(test_finish),
        cmocka_unit_test(test_doctor),        cmocka_unit_test(test_verify_run),
        cmocka_unit_test(test_logs),          cmocka_unit_test(test_status),
        cmocka_unit_test(test_stop),          cmocka_unit_test(test_check_file),
        cmocka_unit_test(test_units),         cmocka_unit_test(test_start),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
