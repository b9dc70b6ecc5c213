/* See supervise_fixture.h. */
#include "tests/unit/supervise_fixture.h"
#include "shm/board.h"
#include "supervisor/commands/cli.h"
#include "supervisor/core/supervise.h"
#include "tests/unit/fake_stage.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { ARGS_MAX = 24 };

char g_file[LG_PATH_BYTES], g_run[LG_PATH_BYTES], g_out[LG_PATH_BYTES];
pid_t g_lgsup;
struct lg_status g_status;

static void make_bin(void)
{
    char self[LG_PATH_BYTES], dir[LG_PATH_BYTES];
    static const char *const names[] = {"lgsup",     "lg-keeper", "lg-sample", "lg-histogram",
                                        "lg-loader", "lg-text",   "lg-vae",    "lg-trainer",
                                        "lg-ema",    "lg-ckpt"};
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

int lgsup_setup(void **state)
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

void kill_run(void)
{
    lg_board *b = NULL;
    char path[LG_PATH_BYTES + 16];
    if (g_lgsup > 0) {
        scratch_kill(g_lgsup);
    }
    snprintf(path, sizeof path, "%s/board", g_run);
    if (lg_board_open(path, 0, &b) == 0) lg_leftovers_kill(b, true);
    lg_board_close(&b);
    static lg_run run;
    lg_run_init(&run, g_run);
    lg_run_runtime_remove(&run);
    lg_err_clear();
}

int lgsup_teardown(void **state)
{
    (void)state;
    kill_run();
    scratch_remove();
    return 0;
}

void show_output(void)
{
    char *text;
    size_t bytes;
    if (lg_read_file(g_out, 1 << 20, &text, &bytes) == 0) {
        fprintf(stderr, "---- output of lgsup:\n%s----\n", text);
        free(text);
    }
}

bool file_has(const char *path, const char *part)
{
    char *text;
    size_t bytes;
    if (lg_read_file(path, 1 << 20, &text, &bytes) < 0) return false;
    bool has = strstr(text, part) != NULL;
    free(text);
    return has;
}

void assert_has(const char *path, const char *part)
{
    if (file_has(path, part)) return;
    show_output();
    fail_msg("%s lacks \"%s\"", path, part);
}

bool output_has(const char *part)
{
    char *text;
    size_t bytes;
    if (lg_read_file(g_out, 1 << 20, &text, &bytes) < 0) return false;
    bool has = strstr(text, part) != NULL;
    free(text);
    return has;
}

void assert_output(const char *part)
{
    if (output_has(part)) return;
    show_output();
    fail_msg("the output lacks \"%s\"", part);
}

void wait_for_output(const char *part)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (output_has(part)) return;
    assert_output(part);
}

/* Starts `lgsup words...` in a process of its own; output is added to g_out. */
pid_t launch(const char *const *words)
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
    scratch_mortal();
    int code = lg_cli_main(argc, argv);
    fflush(NULL);
    scratch_exit(code);
}

int exit_of(pid_t pid)
{
    int status = 0;
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US)) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    show_output();
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fail_msg("lgsup is still there after %d looks", LOOKS_MAX);
    return -1;
}

void assert_exit(int got, int want)
{
    if (got == want) return;
    show_output();
    fail_msg("exit code %d, expected %d", got, want);
}

bool read_status(void)
{
    bool well = lg_status_read(g_run, &g_status) == 0;
    lg_err_clear();
    return well;
}

const struct lg_status_instance *instance(const char *role, int index)
{
    for (int i = 0; i < g_status.n_instances; i++) {
        const struct lg_status_instance *p = &g_status.instance[i];
        if (!strcmp(lg_role_name(p->role), role) && p->index == index) return p;
    }
    return NULL;
}

void wait_for_log(const char *part)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (file_has(scratch_path("run/logs/lgsup.log"), part)) return;
    fail_msg("the log lacks \"%s\"", part);
}

void wait_for_step(uint64_t step)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US))
        if (read_status() && g_status.step >= step) return;
    show_output();
    unlink(g_out);
    RUN("status", g_run);
    show_output(); /* who waits for what */
    fail_msg("step %d is not reached", (int)step);
}

/* Kills one process, waits for its end and returns its pid. */
int kill_one(const char *role, int index)
{
    const struct lg_status_instance *p = NULL;
    for (int i = 0; i < 1000 && !(p && p->pid); i++, usleep(2000)) {
        read_status();
        p = instance(role, index);
    }
    assert_true(p && p->pid);
    int pid = p->pid, pidfd = pidfd_open(pid, 0);
    kill(pid, SIGKILL);
    struct pollfd end = {.fd = pidfd, .events = POLLIN};
    if (pidfd >= 0) {
        assert_int_equal(poll(&end, 1, LOOKS_MAX), 1);
        close(pidfd);
    }
    return pid;
}

void wait_until_ready(const char *role, int index)
{
    for (int look = 0; look < LOOKS_MAX; look++, usleep(LOOK_US)) {
        const struct lg_status_instance *p = read_status() ? instance(role, index) : NULL;
        if (p && (!strcmp(p->state, "working") || !strcmp(p->state, "waiting"))) return;
    }
    show_output();
    fail_msg("%s.%d does not become ready", role, index);
}

void assert_state(const char *state, uint64_t step)
{
    assert_true(read_status());
    assert_string_equal(g_status.state, state);
    if (step) assert_int_equal(g_status.step, step);
}

void assert_nobody_left(void)
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
void end_by_stop(void)
{
    assert_exit(RUN("stop", g_run), 0);
    assert_exit(exit_of(g_lgsup), 0);
    g_lgsup = 0;
    assert_state("stopped", 0);
    assert_nobody_left();
}

void kill_lgsup(void)
{
    scratch_kill(g_lgsup);
    g_lgsup = 0;
    unlink(g_out); /* what comes now is the next one's */
}

int count_of(const char *role)
{
    int n = 0;
    assert_true(read_status());
    for (int i = 0; i < g_status.n_instances; i++)
        n += !strcmp(lg_role_name(g_status.instance[i].role), role);
    return n;
}

/* Every process has its memory twice: from here on nobody needs lgsup. */
static void wait_for_copies(void)
{
    lg_board *b = NULL;
    assert_int_equal(lg_board_open(scratch_path("run/board"), 0, &b), 0);
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int i = 0; i < (int)atomic_load(&b->s->wanted[r]); i++) {
            struct lg_board_row *row = lg_board_row(b, (lg_role)r, i);
            for (int look = 0; atomic_load(&row->uncopied); look++, usleep(LOOK_US))
                assert_true(look < LOOKS_MAX);
        }
    lg_board_close(&b);
}

void start_long(void)
{
    g_lgsup = LAUNCH("start", g_file, "--set", "trainer.max_steps=100000");
    wait_for_output("every role is ready");
    wait_for_step(3);
    wait_for_copies();
}

void lgsup_tests_begin(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    if (!strncmp(name, "lg-", 3)) exit(fake_stage_main(argc, argv));
    if (argc > 1) cmocka_set_test_filter(argv[1]);
}
