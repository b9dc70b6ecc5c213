/* lgsup as its user meets it: started, listened to, started again when it was killed.
 *
 * What it prints goes through a pipe of one page or through a pseudo-terminal, by turns, so that the
 * terminal can be frozen: a pipe that is full and read by nobody, a terminal after Ctrl-S. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum {
    REFUSED_MAX = 20,     /* starts of lgsup that a failing call has ended, in a row */
    RESTART_MS_MAX = 200, /* a killed lgsup stays away for so long at most */
    REFUSED_MS = 50,      /* until a user starts it again */
    PIPE_BYTES = 4096,    /* the least that Linux gives */
    CTRL_Q = 0x11,
    CTRL_S = 0x13
};

/* ---- the terminal ---- */

static int open_terminal(struct chaos_run *r, int *ret_slave)
{
    struct termios t;
    char name[64];
    int fd = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    LG_ASSERT(fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0 &&
              ptsname_r(fd, name, sizeof name) == 0);
    *ret_slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    LG_ASSERT(*ret_slave >= 0 && tcgetattr(*ret_slave, &t) == 0);
    cfmakeraw(&t);
    t.c_iflag |= IXON;
    LG_ASSERT(tcsetattr(*ret_slave, TCSANOW, &t) == 0);
    r->terminal = true;
    return fd;
}

static int open_pipe(struct chaos_run *r, int *ret_write)
{
    int fds[2];
    LG_ASSERT(pipe2(fds, O_CLOEXEC) == 0);
    fcntl(fds[1], F_SETPIPE_SZ, PIPE_BYTES);
    *ret_write = fds[1];
    r->terminal = false;
    return fds[0];
}

/* By an open of its own: O_NONBLOCK would be shared with lgsup otherwise. */
static void fill_pipe(const struct chaos_run *r)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", r->out_fd);
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    while (fd >= 0 && write(fd, "\n", 1) == 1) continue;
    if (fd >= 0) close(fd);
}

void chaos_freeze_terminal(struct chaos_run *r, bool frozen)
{
    char key = frozen ? CTRL_S : CTRL_Q;
    r->frozen = frozen;
    if (r->out_fd < 0) return;
    if (r->terminal)
        LG_ASSERT(write(r->out_fd, &key, 1) == 1);
    else if (frozen)
        fill_pipe(r);
}

/* ---- the start ---- */

/* A process that is stopped while it sets itself up is found before the run counts as stuck (run.c). */
enum { READY_S = 20 };

static const struct {
    int runs;
    const char *settings;
} mode[] = {
#define MODE(runs, settings) {runs, settings},
#include "tests/chaos/modes.def"
#undef MODE
};

const char *chaos_mode(const struct chaos_run *r)
{
    int64_t of_ten = r->number / 2 % 10; /* with and without the shim */
    for (size_t i = 0; i < LG_ARRAY_LEN(mode) && r->number >= 0 && r->o->has_modes; i++)
        if ((of_ten -= mode[i].runs) < 0) return mode[i].settings;
    return mode[0].settings;
}

/* The command line's settings. */
static void settings(const struct chaos_run *r, char text[][LG_PATH_BYTES + 16], int *ret_n)
{
    size_t bytes = LG_PATH_BYTES + 16;
    int n = 0;
    snprintf(text[n++], bytes, "job.dir=%s", r->dir);
    snprintf(text[n++], bytes, "trainer.max_steps=%" PRId64, r->o->steps);
    snprintf(text[n++], bytes, "checkpoint.keep=%d", r->number < 0 ? 1000000 : 3);
    snprintf(text[n++], bytes, "supervisor.hang_s=%d", r->hang_s);
    snprintf(text[n++], bytes, "supervisor.ready_s=%d", READY_S);
    if (r->data[0]) snprintf(text[n++], bytes, "data.path=%s", r->data);
    for (const char *m = chaos_mode(r); *m; m += strcspn(m, " "), m += *m == ' ')
        snprintf(text[n++], bytes, "%.*s", (int)strcspn(m, " "), m);
    *ret_n = n;
}

static void set_environment(const struct chaos_run *r)
{
    char text[LG_PATH_BYTES + 64];
    setenv("XDG_RUNTIME_DIR", r->runtime, 1);
    unsetenv("LG_BIN_DIR");
    if (r->preload) {
        snprintf(text, sizeof text, "%s/control.%d", r->o->home, r->slot);
        setenv("LG_CHAOS_CONTROL", text, 1);
        snprintf(text, sizeof text, "%s/libchaos.so", r->o->tools);
        setenv("LD_PRELOAD", text, 1);
    }
    if (CHAOS_SANITIZED) {
        /* The shim stands before the runtime, and does it no harm. */
        snprintf(text, sizeof text, "verify_asan_link_order=0:log_path=%s/sanitizer.%d", r->o->home,
                 r->slot);
        setenv("ASAN_OPTIONS", text, 1);
        setenv("UBSAN_OPTIONS", strchr(text, ':') + 1, 1);
    }
}

static void exec_start(const struct chaos_run *r, int out)
{
    enum { SETTINGS_MAX = 12 };
    static char program[LG_PATH_BYTES + 8], text[SETTINGS_MAX][LG_PATH_BYTES + 16];
    char *argv[4 + 2 * SETTINGS_MAX] = {program, (char *)"start", (char *)r->o->pipeline};
    int n, at = 3;
    snprintf(program, sizeof program, "%s/lgsup", r->o->bin);
    settings(r, text, &n);
    for (int i = 0; i < n; i++) {
        argv[at++] = (char *)"--set";
        argv[at++] = text[i];
    }
    set_environment(r);
    chaos_cgroup_enter(r);
    dup2(out, 1);
    dup2(out, 2);
    execv(program, argv);
    _exit(127);
}

void chaos_start_lgsup(struct chaos_run *r)
{
    int out, fd = chaos_draw(r, 2) ? open_terminal(r, &out) : open_pipe(r, &out);
    r->started_ns = lg_now_ns();
    r->spoke_ns = 0;
    r->killed_lgsup = r->frozen = false;
    r->said_from = r->said;
    r->pid = fork();
    LG_ASSERT(r->pid >= 0);
    if (r->pid == 0) exec_start(r, out);
    close(out);
    if (r->out_fd >= 0) close(r->out_fd);
    r->out_fd = fd;
    fcntl(r->out_fd, F_SETFL, O_NONBLOCK);
    r->start_at_ns = 0;
    r->starts++;
}

pid_t chaos_stop_lgsup(const struct chaos_run *r)
{
    char program[LG_PATH_BYTES + 8], log[LG_PATH_BYTES + 16];
    snprintf(program, sizeof program, "%s/lgsup", r->o->bin);
    snprintf(log, sizeof log, "%s.stop", r->dir);
    char *argv[] = {program, (char *)"stop", (char *)r->dir, NULL};
    pid_t pid = fork();
    LG_ASSERT(pid >= 0);
    if (pid > 0) return pid;
    int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd >= 0) dup2(fd, 1), dup2(fd, 2);
    setenv("XDG_RUNTIME_DIR", r->runtime, 1);
    execv(program, argv);
    _exit(127);
}

/* ---- what it says ---- */

static void spoke(struct chaos_run *r, bool adopted)
{
    if (r->spoke_ns) return;
    r->spoke_ns = lg_now_ns();
    for (int i = 0; i < r->n_events; i++) {
        struct chaos_event *e = &r->event[i];
        if (e->waits && e->role == LG_ROLE_lgsup && e->adopt_ms < 0 && adopted)
            e->adopt_ms = (double)(r->spoke_ns - r->started_ns) / LG_MS_NS;
    }
}

/* A terminal's line is drawn over: "\r\033[K" becomes the end of the line. Empty lines, which fill a
 * frozen pipe, go. */
static size_t plain(char *text, size_t n)
{
    size_t to = 0;
    for (size_t i = 0; i < n; i++) {
        char c = text[i] == '\r' ? '\n' : text[i];
        if (!strncmp(text + i, "\033[K", 3))
            i += 2;
        else if (c != '\n' || to == 0 || text[to - 1] != '\n')
            text[to++] = c;
    }
    text[to] = 0;
    return to;
}

/* To DIR.out; "adopted" tells that it has taken the run over. */
void chaos_listen(struct chaos_run *r)
{
    char text[4096], path[LG_PATH_BYTES + 8];
    ssize_t n;
    while (!r->frozen && r->out_fd >= 0 && (n = read(r->out_fd, text, sizeof text - 1)) > 0) {
        text[n] = 0;
        n = (ssize_t)plain(text, (size_t)n);
        if (strstr(text, "adopted ")) spoke(r, true);
        if (strstr(text, "starting ") || strstr(text, "resuming ")) spoke(r, false);
        snprintf(path, sizeof path, "%s.out", r->dir);
        int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd >= 0) lg_write_all(fd, text, (size_t)n), close(fd);
        r->said += n;
    }
}

void chaos_first_error(const struct chaos_run *r, char *ret, size_t bytes)
{
    char path[LG_PATH_BYTES + 8], *text, *line = NULL, *rest = NULL;
    size_t n;
    ret[0] = 0;
    snprintf(path, sizeof path, "%s.out", r->dir);
    if (lg_read_file(path, 64 << 20, &text, &n) < 0) {
        lg_err_clear();
        return;
    }
    char *from = text + LG_MIN((size_t)r->said_from, n);
    for (char *t = strtok_r(from, "\n", &rest); t && !line; t = strtok_r(NULL, "\n", &rest))
        if (!strncmp(t, "error", 5) || !strncmp(t, "lgsup: ", 7)) line = t;
    if (line) snprintf(ret, bytes, "%.600s", line);
    free(text);
}

/* ---- the end ---- */

void chaos_lgsup_ended(struct chaos_run *r, int status)
{
    char words[700];
    int64_t now = lg_now_ns();
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    r->frozen = false;
    chaos_listen(r);
    r->pid = 0;
    r->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (r->episode.takes_end) { /* which starts it again */
        r->episode.ended = true;
        r->start_at_ns = INT64_MAX;
        return;
    }
    if (r->code == 0) {
        r->done = true;
        return;
    }
    if (killed && (r->killed_lgsup || chaos_cgroup_has_killed(r))) {
        r->start_at_ns = now + (int64_t)chaos_draw(r, RESTART_MS_MAX) * LG_MS_NS;
        return;
    }
    chaos_first_error(r, words, sizeof words);
    r->refused++;
    r->refused_in_row++;
    if (r->code == -LG_ERR_PARKED || !r->preload || r->refused_in_row > REFUSED_MAX)
        chaos_fail(r, "lgsup ended with %d: %.400s", r->code, words);
    r->start_at_ns = now + REFUSED_MS * LG_MS_NS;
}
