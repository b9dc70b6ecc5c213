/* The supervisor with real processes that do not compute (fake_stage.h): whole lives of a run, ends
 * of every kind, deaths of every role, of the keeper and of lgsup itself. */
#include "base/clock.h"
#include "base/fs.h"
#include "shm/commit.h"
#include "supervisor/cli.h"
#include "supervisor/intensity.h"
#include "supervisor/status.h"
#include "supervisor/supervise.h"
#include "tests/unit/fake_stage.h"
#include "tests/unit/json_schema.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
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

enum { WAIT_MS_MAX = 20000, ARGS_MAX = 24 };

static char g_file[LG_PATH_BYTES], g_run[LG_PATH_BYTES], g_out[LG_PATH_BYTES];
static pid_t g_lgsup; /* in the foreground, 0: none */
static struct lg_status g_status;

/* ---- scaffolding ---- */

static void make_bin(void)
{
    char self[LG_PATH_BYTES], dir[LG_PATH_BYTES];
    static const char *const names[] = {"lg-keeper", "lg-sample",  "lg-loader", "lg-text",
                                        "lg-vae",    "lg-trainer", "lg-ema",    "lg-ckpt"};
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = 0;
    snprintf(dir, sizeof dir, "%s", scratch_path("bin"));
    lg_mkdirs(dir);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        char link[LG_PATH_BYTES + 32];
        snprintf(link, sizeof link, "%s/%s", dir, names[i]);
        assert_int_equal(symlink(self, link), 0);
    }
    setenv("LG_BIN_DIR", dir, 1);
}

static int setup(void **state)
{
    (void)state;
    scratch_make();
    make_bin();
    char cwd[1024], toml[8192];
    if (!getcwd(cwd, sizeof cwd)) return -1;
    scratch_write("data/a.txt", "a caption");
    snprintf(toml, sizeof toml,
             "[job]\nname = \"fake\"\ndir = \"run\"\n[data]\npath = \"data\"\n"
             "[text]\nmodel = \"%s/examples/emoji/text_encoder\"\ninstances = 2\n"
             "[vae]\nmodel = \"%s/examples/emoji/vae\"\ninstances = 2\n"
             "[trainer]\nranks = 2\nmax_steps = 60\nglobal_batch_size = 16\n"
             "[checkpoint]\nevery = 20\nkeep = 10\n[sample]\ncaptions = [\"a cat\"]\n"
             "[supervisor]\nrestarts_max = 3\n",
             cwd, cwd);
    snprintf(g_file, sizeof g_file, "%s", scratch_write("pipeline.toml", toml));
    snprintf(g_run, sizeof g_run, "%s", scratch_path("run"));
    snprintf(g_out, sizeof g_out, "%s", scratch_path("out"));
    g_lgsup = 0;
    return 0;
}

static void kill_run(void)
{
    lg_board *b = NULL;
    char path[LG_PATH_BYTES + 16];
    if (g_lgsup > 0) {
        kill(g_lgsup, SIGKILL);
        waitpid(g_lgsup, NULL, 0);
    }
    snprintf(path, sizeof path, "%s/board", g_run);
    if (lg_board_open(path, 0, &b) == 0) lg_leftovers_kill(b);
    lg_board_close(&b);
    static lg_run run;
    lg_run_init(&run, g_run);
    lg_run_runtime_remove(&run);
    lg_err_clear();
}

static int teardown(void **state)
{
    (void)state;
    kill_run();
    scratch_remove();
    return 0;
}

static void show_output(void)
{
    char *text;
    size_t bytes;
    if (lg_read_file(g_out, 1 << 20, &text, &bytes) == 0) {
        fprintf(stderr, "---- output of lgsup:\n%s----\n", text);
        free(text);
    }
}

static bool output_has(const char *part)
{
    char *text;
    size_t bytes;
    if (lg_read_file(g_out, 1 << 20, &text, &bytes) < 0) return false;
    bool has = strstr(text, part) != NULL;
    free(text);
    return has;
}

static void assert_output(const char *part)
{
    if (output_has(part)) return;
    show_output();
    fail_msg("the output lacks \"%s\"", part);
}

static void wait_for_output(const char *part)
{
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000))
        if (output_has(part)) return;
    assert_output(part);
}

/* Starts `lgsup words...` in a process of its own; output is added to g_out. */
static pid_t launch(const char *const *words)
{
    char *argv[ARGS_MAX] = {(char *)"lgsup"};
    int argc = 1;
    while (words[argc - 1] && argc < ARGS_MAX - 1) {
        argv[argc] = (char *)words[argc - 1];
        argc++;
    }
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) return pid;
    int fd = open(g_out, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(fd, 1);
    dup2(fd, 2);
    int code = lg_cli_main(argc, argv);
    fflush(NULL);
    scratch_exit(code);
}
#define LAUNCH(...) launch((const char *const[]){__VA_ARGS__, NULL})

static int exit_of(pid_t pid)
{
    int status = 0;
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000)) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    show_output();
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fail_msg("lgsup is still there after %d ms", WAIT_MS_MAX);
    return -1;
}
#define RUN(...) exit_of(LAUNCH(__VA_ARGS__))

static void assert_exit(int got, int want)
{
    if (got == want) return;
    show_output();
    fail_msg("exit code %d, expected %d", got, want);
}

static bool read_status(void)
{
    bool well = lg_status_read(g_run, &g_status) == 0;
    lg_err_clear();
    return well;
}

static const struct lg_status_instance *instance(const char *role, int index)
{
    for (int i = 0; i < g_status.n_instances; i++) {
        const struct lg_status_instance *p = &g_status.instance[i];
        if (!strcmp(lg_role_name(p->role), role) && p->index == index) return p;
    }
    return NULL;
}

static void wait_for_step(uint64_t step)
{
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000))
        if (read_status() && g_status.step >= step) return;
    show_output();
    fail_msg("step %d is not reached", (int)step);
}

/* Kills one process and returns its pid. */
static int kill_one(const char *role, int index)
{
    const struct lg_status_instance *p = NULL;
    for (int i = 0; i < 1000 && !(p && p->pid); i++, usleep(2000)) {
        read_status();
        p = instance(role, index);
    }
    assert_true(p && p->pid);
    int pid = p->pid;
    kill(pid, SIGKILL);
    return pid;
}

static void assert_state(const char *state, uint64_t step)
{
    assert_true(read_status());
    assert_string_equal(g_status.state, state);
    if (step) assert_int_equal(g_status.step, step);
}

static void assert_nobody_left(void)
{
    char path[LG_PATH_BYTES + 16];
    lg_board *b = NULL;
    snprintf(path, sizeof path, "%s/board", g_run);
    assert_int_equal(lg_board_open(path, 0, &b), 0);
    assert_false(lg_leftovers_live(b));
    lg_board_close(&b);
    snprintf(path, sizeof path, "%s/runtime", g_run);
    assert_false(lg_path_exists(path));
}

/* Ends the lgsup in the foreground by `lgsup stop`. */
static void end_by_stop(void)
{
    assert_exit(RUN("stop", g_run), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_nobody_left();
}

/* ---- tests ---- */

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

static void test_whole_run(void **state)
{
    (void)state;
    assert_exit(RUN("start", g_file), 0);
    assert_state("done", 60);
    assert_output("every role is ready");
    assert_output("fake: done");
    assert_nobody_left();
    assert_true(lg_path_exists(scratch_path("run/checkpoints/fake_step20/manifest.json")));
    assert_true(lg_path_exists(scratch_path("run/checkpoints/fake_step60/manifest.json")));
    assert_true(lg_path_exists(scratch_path("run/samples/step60.png")));
    assert_int_equal(instance("vae", 1)->restarts, 0);
    assert_exit(RUN("verify", g_run), 0);
    assert_exit(RUN("status", "--json", g_run), 0);
    assert_output("\"state\":\t\"done\"");
    assert_exit(RUN("start", g_file), 0); /* nothing left to do */
    assert_output("nothing to do");
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=80"), 0);
    assert_output("resuming fake at step 60");
    assert_state("done", 80);
    assert_exit(RUN("verify", g_run), 0);
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=90", "--set", "job.seed=7"), 10);
    assert_output("job.seed");
}

/* On a terminal: the screen comes, and goes at the key q. */
static void assert_top_on_a_terminal(void)
{
    char text[65536];
    size_t n = 0;
    int fd, status = -1;
    bool shown = false;
    setenv("TERM", "xterm", 1);
    struct winsize size = {.ws_row = 40, .ws_col = 140};
    pid_t pid = forkpty(&fd, NULL, NULL, &size);
    if (pid == 0) {
        char *argv[] = {(char *)"lgsup", (char *)"top", g_run, NULL};
        scratch_exit(lg_cli_main(3, argv));
    }
    assert_true(pid > 0);
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t got = poll(&p, 1, 100) > 0 ? read(fd, text + n, sizeof text - 1 - n) : 0;
        n += (size_t)LG_MAX(got, 0);
        text[n] = 0;
        if (!shown && strstr(text, "fake: running") && strstr(text, "last beat")) {
            shown = true;
            assert_int_equal(write(fd, "q", 1), 1);
        }
        if (waitpid(pid, &status, WNOHANG) == pid) break;
    }
    close(fd);
    assert_true(shown);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_top(void **state)
{
    (void)state;
    assert_exit(RUN("top", g_run), 8);
    assert_output("is not a run directory");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready"); /* the screen is not rewritten as a whole */
    assert_top_on_a_terminal();
    kill_one("vae", 1);
    wait_for_output("vae.1: signal 9");
    kill(g_lgsup, SIGKILL);
    waitpid(g_lgsup, NULL, 0);
    g_lgsup = 0;
    unlink(g_out);
    assert_exit(RUN("top", "--once", g_run), 0); /* lgsup is dead */
    assert_output("fake: running");
    assert_output("lgsup.0            -  dead");
    assert_output("vae.1: signal 9 (Killed); restarted"); /* the newest event */
    assert_output("regions 88 B (11)");
    assert_exit(RUN("stop", g_run), 0);
    unlink(g_out);
    assert_exit(RUN("top", g_run), 0); /* no terminal */
    assert_output("fake: stopped");
}

static bool has_preview(int step)
{
    char name[64];
    snprintf(name, sizeof name, "run/samples/step%d.png", step);
    return lg_path_exists(scratch_path(name));
}

static void wait_for_preview(int step)
{
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000))
        if (has_preview(step)) return;
    show_output();
    fail_msg("no preview of step %d", step);
}

/* The first step from `from` on, in strides of 40, that gets a preview. A checkpoint is left out while
 * the one before it is still written, so which ones there are depends on the machine. */
static int wait_for_a_preview(int from)
{
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000))
        for (int s = from; s < from + 40 * 200; s += 40)
            if (has_preview(s)) return s;
    show_output();
    fail_msg("no preview from step %d on", from);
    return 0;
}

static void test_previews(void **state)
{
    (void)state;
    char text[64], name[64];
    assert_exit(RUN("start", g_file, "--set", "sample.every=30"), 3);
    assert_output("sample.every = 30 is not a multiple of checkpoint.every = 20");
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=40", "--set", "checkpoint.keep=100000",
                     "--set", "trainer.max_steps=100000");
    int first = wait_for_a_preview(40);
    wait_for_a_preview(first + 40);
    end_by_stop();
    for (int s = 20; s < 2000; s += 40) assert_false(has_preview(s));
    snprintf(text, sizeof text, "preview of step %d drawn", first);
    assert_output(text);
    snprintf(name, sizeof name, "run/samples/step%d.png", first);
    unlink(scratch_path(name)); /* as if its drawing had been cut off */
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=40", "--set", "checkpoint.keep=100000",
                     "--set", "trainer.max_steps=100000");
    wait_for_preview(first);
    end_by_stop();
}

/* What training was too quick for is drawn at the end. */
static void test_previews_at_the_end(void **state)
{
    (void)state;
    assert_exit(RUN("start", g_file, "--set", "sample.every=20"), 0);
    assert_true(has_preview(20) && has_preview(60));
    assert_true(has_preview(40) ==
                lg_path_exists(scratch_path("run/checkpoints/fake_step40/manifest.json")));
    struct stat before, after; /* and only once */
    assert_int_equal(stat(scratch_path("run/samples/step20.png"), &before), 0);
    assert_exit(RUN("start", g_file, "--set", "sample.every=20", "--set", "trainer.max_steps=80"),
                0);
    assert_int_equal(stat(scratch_path("run/samples/step20.png"), &after), 0);
    assert_true(before.st_ino == after.st_ino);
    assert_true(has_preview(80));
}

static void test_previews_that_fail(void **state)
{
    (void)state;
    scratch_write("run/sample_fault", "crash");
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=20", "--set",
                     "trainer.max_steps=100000", "--set", "checkpoint.keep=100000");
    wait_for_output("preview of step 20: lg-sample: exit 5 CORRUPT: a lens is missing");
    wait_for_output("sample.log); drawn again");
    wait_for_output("sample.log); given up");
    scratch_write("run/sample_fault", "hang"); /* neither does a hanging one keep the run */
    wait_for_step(g_status.step + 5);
    usleep(2500000);
    end_by_stop();
    assert_false(has_preview(20));
    unlink(scratch_path("run/sample_fault")); /* the next start tries again */
    g_lgsup = LAUNCH("start", g_file, "--set", "sample.every=20", "--set",
                     "trainer.max_steps=100000", "--set", "checkpoint.keep=100000");
    wait_for_preview(20);
    end_by_stop();
}

/* ---- docs/status.schema.json ---- */

static cJSON *load_json(const char *path)
{
    char *text;
    size_t bytes;
    assert_int_equal(lg_read_file(path, 1 << 20, &text, &bytes), 0);
    cJSON *j = cJSON_Parse(text);
    assert_non_null(j);
    free(text);
    return j;
}

static bool follows_schema(const cJSON *status)
{
    char why[512] = "";
    cJSON *schema = load_json("docs/status.schema.json");
    bool holds = json_schema_holds(schema, status, why, sizeof why);
    if (!holds) fprintf(stderr, "%s\n", why);
    cJSON_Delete(schema);
    return holds;
}

/* What the command prints now; the caller deletes it. */
static cJSON *assert_status_follows_schema(void)
{
    unlink(g_out);
    assert_exit(RUN("status", "--json", g_run), 0);
    cJSON *j = load_json(g_out);
    if (!follows_schema(j)) show_output();
    assert_true(follows_schema(j));
    return j;
}

/* The schema describes every field, and one that it does not know or that is missing is noticed. */
static void assert_schema_is_strict(cJSON *status)
{
    cJSON *schema = load_json("docs/status.schema.json"), *field;
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(schema, "required")),
                     cJSON_GetArraySize(cJSON_GetObjectItem(schema, "properties")));
    cJSON_Delete(schema);
    cJSON_ArrayForEach(field, status)
    {
        cJSON *without = cJSON_Duplicate(status, true);
        cJSON_DeleteItemFromObject(without, field->string);
        assert_false(follows_schema(without));
        cJSON_Delete(without);
    }
    cJSON_AddNumberToObject(cJSON_GetArrayItem(cJSON_GetObjectItem(status, "instances"), 0), "more",
                            1);
    assert_false(follows_schema(status));
}

static void test_status_follows_its_schema(void **state)
{
    (void)state;
    scratch_write("run/fault", "text 0 unready");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    cJSON *j = assert_status_follows_schema(); /* one is in its setup */
    assert_string_equal(cJSON_GetObjectItem(j, "state")->valuestring, "starting");
    cJSON_Delete(j);
    kill(g_lgsup, SIGKILL);
    waitpid(g_lgsup, NULL, 0);
    g_lgsup = 0;
    kill_one("vae", 1);
    usleep(100000);
    j = assert_status_follows_schema(); /* two are dead */
    assert_schema_is_strict(j);
    cJSON_Delete(j);
    assert_exit(RUN("stop", g_run), 0);
    cJSON_Delete(assert_status_follows_schema());
    j = load_json(scratch_path("run/status.json"));
    assert_true(follows_schema(j));
    cJSON_Delete(j);
    unlink(scratch_path("run/board")); /* as after a restart of the machine */
    cJSON_Delete(assert_status_follows_schema());
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

static void wait_until_ready(const char *role, int index)
{
    for (int64_t end = lg_now_ns() + WAIT_MS_MAX * LG_MS_NS; lg_now_ns() < end; usleep(2000)) {
        const struct lg_status_instance *p = read_status() ? instance(role, index) : NULL;
        if (p && (!strcmp(p->state, "working") || !strcmp(p->state, "waiting"))) return;
    }
    show_output();
    fail_msg("%s.%d does not become ready", role, index);
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
    kill(g_lgsup, SIGKILL);
    waitpid(g_lgsup, NULL, 0);
    kill_one("text", 1);
    unlink(g_out);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    kill(g_lgsup, SIGKILL);
    waitpid(g_lgsup, NULL, 0);
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
        for (int64_t end = lg_now_ns() + 5 * LG_S_NS; lg_now_ns() < end;) {
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

static void test_stop_and_second_start(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(30);
    assert_exit(RUN("start", g_file), 7);
    assert_output("already supervised");
    end_by_stop();
    uint64_t step = g_status.step;
    assert_true(step >= 30 && step < 100000);
    assert_exit(RUN("stop", g_run), 0); /* nothing runs: fine */
    assert_output("nothing runs here");
    char set[64];
    snprintf(set, sizeof set, "trainer.max_steps=%d", (int)step + 40);
    assert_exit(RUN("start", g_file, "--set", set), 10); /* may only grow */
    assert_output("trainer.max_steps");
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100001");
    wait_for_step(step + 10);
    assert_output("resuming fake at step");
    kill(g_lgsup, SIGINT); /* Ctrl-C drains as well */
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_exit(RUN("verify", g_run), 0);
}

static void test_interrupt_twice(void **state)
{
    (void)state;
    scratch_write("run/fault", "ckpt 0 unready"); /* the drain cannot end */
    g_lgsup = LAUNCH("start", g_file);
    wait_for_step(20);
    kill(g_lgsup, SIGINT);
    wait_for_output("stopping:"); /* two that are pending are one */
    kill(g_lgsup, SIGINT);
    assert_exit(exit_of(g_lgsup), 130);
    g_lgsup = 0;
    assert_state("failed", 0);
    assert_nobody_left();
}

static void test_crash_loop_parks(void **state)
{
    (void)state;
    scratch_write("run/fault", "trainer 1 crash");
    assert_exit(RUN("start", g_file), 11);
    assert_state("parked", 0);
    assert_non_null(strstr(g_status.cause, "trainer.1"));
    assert_non_null(strstr(g_status.cause, "weights are damaged"));
    assert_nobody_left();
    unlink(scratch_path("run/fault"));
    assert_exit(RUN("start", g_file), 0);
    assert_state("done", 60);
}

static void test_a_stage_parks_the_run(void **state)
{
    (void)state;
    scratch_write("run/fault", "loader 0 park");
    assert_exit(RUN("start", g_file), 11);
    assert_state("parked", 0);
    assert_non_null(strstr(g_status.cause, "the data set is empty"));
    assert_int_equal(instance("loader", 0)->restarts, 0);
    scratch_write("run/fault", "trainer 0 crash"); /* never ready: --detach tells why */
    assert_exit(RUN("start", g_file, "--detach"), 11);
    assert_output("the weights are damaged");
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
    wait_for_output("not ready after 1 s");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_int_equal(instance("text", 1)->restarts, 1);
}

static void kill_lgsup(void)
{
    kill(g_lgsup, SIGKILL);
    waitpid(g_lgsup, NULL, 0);
    g_lgsup = 0;
    unlink(g_out); /* what comes now is the next one's */
}

/* lgsup dies; training goes on; a stage and even the keeper die meanwhile; a new lgsup adopts. */
static void adopt_after(const char *victim)
{
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    wait_for_output("every role is ready");
    int ema = instance("ema", 0)->pid, trainer = instance("trainer", 0)->pid;
    kill_lgsup();
    wait_for_step(g_status.step + 10);
    assert_string_equal(g_status.state, "running");
    assert_string_equal(instance("lgsup", 0)->state, "dead");
    if (victim) kill_one(victim, 0);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted");
    wait_for_step(g_status.step + 5);
    assert_int_equal(instance("ema", 0)->pid, ema);
    if (!victim || strcmp(victim, "trainer") != 0)
        assert_int_equal(instance("trainer", 0)->pid, trainer);
    kill_one("trainer", 1); /* its memory is still kept */
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

/* `start --detach` on an orphaned run returns when it is adopted and everybody is ready. */
static void test_adopt_detached(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    wait_for_step(3);
    kill_lgsup();
    assert_exit(RUN("start", g_file, "--detach"), 0);
    assert_state("running", 0);
    assert_int_equal(instance("lgsup", 0)->restarts, 1);
    assert_exit(RUN("start", g_file, "--detach"), 7);
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
}

static void test_adopt(void **state)
{
    (void)state;
    adopt_after(NULL);
}

static void test_adopt_with_a_dead_trainer(void **state)
{
    (void)state;
    adopt_after("trainer");
}

static void test_adopt_with_a_dead_keeper(void **state)
{
    (void)state;
    adopt_after("keeper");
}

/* Memory that nobody holds any more: back to the checkpoint, not on with zeros. */
/* An lgsup that dies between making a keeper visible and entering it on the board leaves one that
 * nobody knows: the next lgsup takes over what it holds, and ends it. */
static void test_adopt_ends_a_stray_keeper(void **state)
{
    (void)state;
    char socket[LG_PATH_BYTES];
    static lg_run run;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    wait_for_output("every role is ready");
    lg_run_init(&run, g_run);
    assert_int_equal(lg_run_runtime_load(&run), 0);
    snprintf(socket, sizeof socket, "%.4000s/keeper", run.runtime_dir);
    kill_lgsup();
    kill_one("keeper", 0);
    pid_t stray = fork();
    if (stray == 0) _exit(lg_keeper_serve(socket, -1) < 0);
    char name[LG_REGION_NAME_BYTES];
    uint64_t bytes;
    for (int64_t end = lg_now_ns() + 5 * LG_S_NS; lg_now_ns() < end; usleep(1000))
        if (lg_keeper_list(socket, 0, name, &bytes) == LG_ERR_NOTFOUND) break;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("adopted");
    int status = 0, rc = 0;
    for (int i = 0; i < 5000 && rc == 0; i++, usleep(1000)) rc = waitpid(stray, &status, WNOHANG);
    if (rc == 0) kill(stray, SIGKILL);
    assert_int_equal(rc, stray);
    kill_one("trainer", 1); /* its memory is still kept */
    wait_for_step(g_status.step + 10);
    end_by_stop();
    assert_nobody_left();
}

static void test_lost_memory(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(45);
    kill_lgsup();
    kill_one("keeper", 0);
    kill_one("trainer", 1);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("resuming fake at step");
    assert_output("starting again from the newest checkpoint");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_stop_of_an_orphan(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(3);
    kill_lgsup();
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_everything_dies(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_step(45);
    kill_run();
    g_lgsup = 0;
    assert_state("failed", 0);
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=100000", "--detach"), 0);
    wait_for_step(g_status.step + 1);
    assert_state("running", 0);
    assert_exit(RUN("stop", g_run), 0);
    assert_state("stopped", 0);
    assert_nobody_left();
}

static void test_unwritable(void **state)
{
    (void)state;
    scratch_write("file", "in the way");
    char set[LG_PATH_BYTES + 16];
    snprintf(set, sizeof set, "job.dir=%s/run", scratch_path("file"));
    assert_exit(RUN("start", g_file, "--set", set), 4);
    assert_output("cannot be written");
    assert_output("job.dir");
}

static void test_missing_program(void **state)
{
    (void)state;
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=400");
    wait_for_step(3);
    unlink(scratch_path("bin/lg-trainer"));
    kill_one("trainer", 0);
    assert_exit(exit_of(g_lgsup), 11); /* it ran and cannot be replaced */
    g_lgsup = 0;
    assert_output("lg-trainer");
    /* Nothing is started, and the kept memory stays. */
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=400"), 8);
    assert_output("lg-trainer is missing or not executable");
    assert_true(read_status() && g_status.memory_kept);
    assert_exit(RUN("stop", g_run), 0);
    assert_nobody_left();
}

static int count_of(const char *role)
{
    int n = 0;
    assert_true(read_status());
    for (int i = 0; i < g_status.n_instances; i++)
        n += !strcmp(lg_role_name(g_status.instance[i].role), role);
    return n;
}

static void start_long(void)
{
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000", "--set",
                     "supervisor.ready_s=1");
    wait_for_output("every role is ready");
    wait_for_step(3);
}

static void test_scale(void **state)
{
    (void)state;
    static const struct {
        const char *role, *n;
        int code;
        const char *says;
    } order[] = {{"vae", "5", 0, "vae: 5 ready"},
                 {"text", "1", 0, "text: 1 ready"},
                 {"loader", "3", 0, "loader: 3 ready"},
                 {"vae", "1", 0, "vae: 1 ready"},
                 {"vae", "0", 2, "1 to 64"},
                 {"vae", "65", 2, "1 to 64"},
                 {"vae", "2x", 2, "not a number"},
                 {"trainer", "3", 2, "decides how sums are rounded"},
                 {"ema", "2", 2, "one ema process"},
                 {"ckpt", "2", 2, "one ckpt process"},
                 {"keeper", "2", 2, "cannot be scaled"},
                 {"lvae", "2", 2, "no role"}};
    assert_exit(RUN("scale", "vae", "2", g_run), 8);
    start_long();
    for (size_t i = 0; i < LG_ARRAY_LEN(order); i++) {
        assert_exit(RUN("scale", order[i].role, order[i].n, g_run), order[i].code);
        assert_output(order[i].says);
    }
    assert_int_equal(count_of("vae"), 1); /* what has left is forgotten */
    assert_int_equal(count_of("text"), 1);
    assert_int_equal(count_of("loader"), 3);
    assert_int_equal(g_status.wanted[LG_ROLE_loader], 3);
    assert_int_equal(instance("loader", 2)->restarts, 0);
    kill_lgsup();
    assert_exit(RUN("scale", "vae", "2", g_run), 8);
    assert_output("no lgsup is in charge");
    kill_one("loader", 1); /* wanted, and dead */
    start_long();
    assert_int_equal(count_of("vae"), 1);
    assert_int_equal(count_of("loader"), 3);
    assert_exit(RUN("scale", "loader", "2", g_run), 0);
    assert_int_equal(count_of("loader"), 2);
    assert_non_null(instance("loader", 1));
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

/* lgsup dies when the order is on the board, but nothing has been done for it. */
static void test_scale_survives_lgsup(void **state)
{
    (void)state;
    lg_board *b = NULL;
    start_long();
    kill_lgsup();
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    atomic_store(&b->s->wanted[LG_ROLE_vae], 4);
    atomic_store(&b->s->wanted[LG_ROLE_text], 1);
    lg_incarnation text = lg_board_life(b, LG_ROLE_text, 1, NULL);
    atomic_store(&lg_board_row(b, LG_ROLE_text, 1)->leave, text); /* it may be gone by then */
    lg_board_close(&b);
    start_long();
    for (int i = 0; i < 1000 && (count_of("vae") != 4 || count_of("text") != 1); i++) usleep(5000);
    assert_int_equal(count_of("vae"), 4);
    assert_int_equal(count_of("text"), 1);
    end_by_stop();
}

static void test_swap(void **state)
{
    (void)state;
    static const char *const all[] = {"loader", "text", "vae", "ema", "ckpt", "trainer"};
    assert_exit(RUN("swap", "ckpt", g_run), 8);
    start_long();
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) {
        int before = instance(all[i], 0)->pid;
        assert_exit(RUN("swap", all[i], g_run), 0);
        assert_true(read_status());
        assert_int_not_equal(instance(all[i], 0)->pid, before);
        assert_int_equal(instance(all[i], 0)->restarts, 0);
    }
    wait_for_step(g_status.step + 10); /* on the same memory, or it would park */
    assert_exit(RUN("swap", "vae.1", "--bin", scratch_path("bin/lg-vae"), g_run), 0);
    assert_exit(RUN("swap", "vae.7", g_run), 8);
    assert_exit(RUN("swap", "trainer.0", g_run), 2);
    assert_exit(RUN("swap", "keeper", g_run), 2);
    assert_exit(RUN("swap", "nobody", g_run), 2);
    assert_exit(RUN("swap", "vae.x", g_run), 2);
    assert_exit(RUN("swap", "vae", "--bin", scratch_path("none"), g_run), 8);
    assert_int_equal(count_of("vae"), 2); /* nobody stands by any more */
    int vae = instance("vae", 1)->pid;
    kill_lgsup();
    start_long();
    assert_int_equal(instance("vae", 1)->pid, vae);
    assert_non_null(strstr(instance("vae", 1)->program, "bin/lg-vae"));

    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_swap_is_rolled_back(void **state)
{
    (void)state;
    start_long();
    int ckpt = instance("ckpt", 0)->pid;
    scratch_write("run/fault", "ckpt 0 crash");
    assert_exit(RUN("swap", "ckpt", g_run), 5);
    assert_output("the weights are damaged");
    scratch_write("run/fault", "ckpt 0 unready");
    assert_exit(RUN("swap", "ckpt", g_run), 9);
    assert_output("not ready after 1 s");
    assert_true(read_status());
    assert_int_equal(instance("ckpt", 0)->pid, ckpt);
    /* One of the two sets up well: neither is put in place. */
    int vae = instance("vae", 0)->pid;
    scratch_write("run/fault", "vae 1 crash");
    assert_exit(RUN("swap", "vae", g_run), 5);
    unlink(scratch_path("run/fault"));
    assert_int_equal(count_of("vae"), 2);
    assert_int_equal(instance("vae", 0)->pid, vae);
    /* A rank opens its memory when it has taken over: both ranks go back. */
    scratch_write("run/fault", "trainer 1 unready");
    assert_exit(RUN("swap", "trainer", "--bin", scratch_path("bin/lg-trainer"), g_run), 1);
    assert_output("trainer goes on with its former program");
    wait_for_step(g_status.step + 20);
    assert_int_equal(count_of("trainer"), 2);
    assert_string_equal(instance("trainer", 0)->program, "");
    assert_string_equal(instance("trainer", 1)->program, "");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

/* A rank that cannot start any more, in a run that has come somewhere. */
static void park(void)
{
    wait_for_step(30);
    scratch_write("run/fault", "trainer 1 crash");
    kill_one("trainer", 1);
    assert_exit(exit_of(g_lgsup), 11);
    g_lgsup = 0;
    unlink(scratch_path("run/fault"));
    assert_state("parked", 0);
    assert_true(g_status.memory_kept);
    assert_output("memory is kept");
    unlink(g_out);
}

static void test_parked_memory(void **state)
{
    (void)state;
    start_long();
    park();
    uint64_t at = g_status.step;
    assert_int_not_equal(at % 20, 0); /* no checkpoint is there: it would be lost */
    char says[64];
    snprintf(says, sizeof says, "going on with fake at step %d from memory", (int)at);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100001", "--set",
                     "vae.instances=3", "--set", "supervisor.ready_s=1");
    wait_for_output(says);
    wait_for_output("every role is ready");
    wait_for_step(at + 20); /* from the very numbers that were there, or it would park */
    assert_int_equal(count_of("vae"), 3);
    assert_int_equal(g_status.max_steps, 100001);
    park();
    assert_exit(RUN("start", g_file, "--set", "trainer.max_steps=100001", "--set", "job.seed=5"),
                10);
    assert_true(read_status() && g_status.memory_kept); /* a refused start touches nothing */
    assert_exit(RUN("stop", g_run), 0);
    assert_output("its memory has been let go");
    assert_state("stopped", 0);
    assert_nobody_left();
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100001");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_parked_memory_is_gone(void **state)
{
    (void)state;
    start_long();
    park();
    kill_one("keeper", 0);
    for (int i = 0; i < 1000 && read_status() && g_status.memory_kept; i++) usleep(2000);
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("the parked run's memory cannot be used: its keeper has died");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    park();
    g_lgsup =
        LAUNCH("start", g_file, "--set", "trainer.max_steps=100000", "--set", "window.batches=8");
    wait_for_output("the window (window.batches) has changed");
    wait_for_output("resuming fake at step");
    wait_for_output("every role is ready");
    end_by_stop();
    assert_nobody_left();
    assert_exit(RUN("verify", g_run), 0);
}

static void test_check(void **state)
{
    (void)state;
    assert_exit(RUN("check", g_file), 0);
    assert_output("fake/0/scratch");
    assert_output("its claimed chunks");
    assert_exit(RUN("check", g_file, "--set", "trainer.maxsteps=3"), 3);
    assert_output("max_steps");
    assert_false(lg_path_exists(g_run)); /* check leaves nothing behind */
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    if (!strncmp(name, "lg-", 3)) return fake_stage_main(argc, argv);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_intensity),
        TEST(test_whole_run),
        TEST(test_every_role_dies),
        TEST(test_top),
        TEST(test_status_follows_its_schema),
        TEST(test_reasons_in_the_log),
        TEST(test_previews),
        TEST(test_previews_at_the_end),
        TEST(test_previews_that_fail),
        TEST(test_restart_is_quick),
        TEST(test_new_keeper_is_full),
        TEST(test_keeper_dies_early),
        TEST(test_stop_and_second_start),
        TEST(test_interrupt_twice),
        TEST(test_crash_loop_parks),
        TEST(test_a_stage_parks_the_run),
        TEST(test_hang_is_killed),
        TEST(test_hung_keeper_is_killed),
        TEST(test_unready_is_killed),
        TEST(test_adopt_detached),
        TEST(test_adopt),
        TEST(test_adopt_with_a_dead_trainer),
        TEST(test_adopt_with_a_dead_keeper),
        TEST(test_adopt_ends_a_stray_keeper),
        TEST(test_lost_memory),
        TEST(test_stop_of_an_orphan),
        TEST(test_everything_dies),
        TEST(test_unwritable),
        TEST(test_missing_program),
        TEST(test_scale),
        TEST(test_scale_survives_lgsup),
        TEST(test_swap),
        TEST(test_swap_is_rolled_back),
        TEST(test_parked_memory),
        TEST(test_parked_memory_is_gone),
        TEST(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
