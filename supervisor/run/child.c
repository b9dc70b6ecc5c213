/* Starting programs; see child.h.
 *
 * posix_spawn clones like vfork: the time to exec does not grow with lgsup. The pidfd is opened
 * right after; the pid cannot be reused before we have waited for it.
 *
 * With lg_spawn.enter the child is forked and held by a pipe, the gate: a byte lets it begin, and the
 * end of the pipe, which comes when lgsup dies, ends it. Until then it does nothing that may wait for a disk,
 * and has the lock of the run open, so that it can be found. Another pipe says what exec made of it, for which
 * lgsup waits a moment and no longer: a child that is stopped, or whose disk stalls, counts as started. */
#include "supervisor/run/child.h"
#include "base/clock.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { CAPTURE_TIMEOUT_MS = 60000, EXEC_MS_MAX = 1000, EXIT_UNBEGUN = 127 };

int lg_program_path(const char *name, char ret_path[LG_PATH_BYTES])
{
    char here[LG_PATH_BYTES];
    const char *dir = getenv("LG_BIN_DIR");
    if (!dir || !*dir) {
        LG_TRY(lg_program_dir(here));
        dir = here;
    }
    LG_TRY(lg_path(ret_path, "%s/%s", dir, name));
    if (access(ret_path, X_OK) < 0)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "the program %s is missing or not executable (%s); build or install it "
                       "beside lgsup",
                       ret_path, strerror(errno));
    return 0;
}

/* What to do where that is not in the message: EAGAIN of a fork is always a limit. */
static const char *limit_of(int error)
{
    return error != EAGAIN ? ""
                           : ": no more processes are allowed (ulimit -u, TasksMax= of the unit, "
                             "--pids-limit of the container)";
}

/* Signals back to default, except those that the parent ignores and exec keeps ignored: writing into a pipe or a
 * file is then an error, no death. */
static bool stays_ignored(int sig)
{
    return sig == SIGPIPE || sig == SIGXFSZ;
}

static void set_attributes(posix_spawnattr_t *attr)
{
    sigset_t none, reset;
    sigemptyset(&none);
    sigfillset(&reset);
    for (int sig = 1; sig < NSIG; sig++)
        if (stays_ignored(sig)) sigdelset(&reset, sig);
    posix_spawnattr_init(attr);
    posix_spawnattr_setsigmask(attr, &none);
    posix_spawnattr_setsigdefault(attr, &reset);
    posix_spawnattr_setflags(attr,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

/* stdin from nowhere; out and err to out_fd when it is one; pass_fd to 3; nothing above. */
static void set_files(posix_spawn_file_actions_t *files, int out_fd, int pass_fd)
{
    posix_spawn_file_actions_init(files);
    posix_spawn_file_actions_addopen(files, 0, "/dev/null", O_RDONLY, 0);
    if (out_fd >= 0) {
        posix_spawn_file_actions_adddup2(files, out_fd, 1);
        posix_spawn_file_actions_adddup2(files, out_fd, 2);
    }
    if (pass_fd >= 0) posix_spawn_file_actions_adddup2(files, pass_fd, 3);
    posix_spawn_file_actions_addclosefrom_np(files, pass_fd >= 0 ? 4 : 3);
}

/* ---- held until it has been entered ---- */

struct held {
    int gate[2], fault[2]; /* read and write ends: a byte to begin; errno of an exec that failed */
};

static int open_held(struct held *ret)
{
    if (pipe2(ret->gate, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    if (pipe2(ret->fault, O_CLOEXEC) == 0) return 0;
    return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
}

/* What set_attributes and set_files say, in the forked child: calls alone that are safe there. fault: above
 * pass_fd's place. */
static void prepare_held(int out_fd, int pass_fd, int fault)
{
    sigset_t none;
    sigemptyset(&none);
    for (int sig = 1; sig < NSIG; sig++)
        if (!stays_ignored(sig)) signal(sig, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(null_fd, 0);
    if (out_fd >= 0) {
        dup2(out_fd, 1);
        dup2(out_fd, 2);
    }
    if (pass_fd == 3) fcntl(3, F_SETFD, 0);
    if (pass_fd >= 0 && pass_fd != 3) dup2(pass_fd, 3);
    /* At once, not at exec: the lock of the run is among them. */
    unsigned first = pass_fd >= 0 ? 4 : 3, last = (unsigned)fault - 1;
    if (first <= last) close_range(first, last, 0);
    close_range((unsigned)fault + 1, ~0U, 0);
}

static _Noreturn void begin_held(const struct lg_spawn *s, int out_fd, const struct held *h)
{
    char byte;
    ssize_t n;
    setsid();          /* what a terminal sends to lgsup is not meant for it */
    close(h->gate[1]); /* or it would never see its end */
    do n = read(h->gate[0], &byte, 1);
    while (n < 0 && errno == EINTR);
    if (n != 1) _exit(EXIT_UNBEGUN);
    int fault = fcntl(h->fault[1], F_DUPFD_CLOEXEC, 4);
    if (fault >= 0) {
        prepare_held(out_fd, s->pass_fd, fault);
        execve(s->program, s->argv, environ);
    }
    n = write(fault >= 0 ? fault : h->fault[1], &errno, sizeof errno);
    _exit(EXIT_UNBEGUN);
}

static bool is_said(int fd, int limit_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    const int64_t until_ns = lg_now_ns() + limit_ms * LG_MS_NS;
    int rc;
    do {
        int64_t left_ms = (until_ns - lg_now_ns()) / LG_MS_NS;
        rc = poll(&p, 1, (int)LG_MAX(left_ms, 0));
    } while (rc < 0 && errno == EINTR);
    return rc != 0;
}

static int enter_held(const struct lg_spawn *s, const struct held *h, struct lg_child *c)
{
    int bad = 0;
    ssize_t n;
    c->pidfd = pidfd_open(c->pid, 0);
    if (c->pidfd < 0) return LG_FAIL(LG_ERR_IO, "pidfd_open: %s", strerror(errno));
    LG_TRY(s->enter(s->where, c));
    do n = write(h->gate[1], "", 1);
    while (n < 0 && errno == EINTR);
    if (n < 0) return LG_FAIL(LG_ERR_IO, "cannot start %s: %s", s->program, strerror(errno));
    if (!is_said(h->fault[0], EXEC_MS_MAX))
        return 0;                               /* late, or stopped: who watches it will see */
    do n = read(h->fault[0], &bad, sizeof bad); /* nothing when exec has closed its end */
    while (n < 0 && errno == EINTR);
    if (n <= 0) return 0;
    return LG_FAIL(lg_err_from_errno(bad), "cannot start %s: %s", s->program, strerror(bad));
}

/* One thread at a time: of two children that are held at once only the later one has a copy of the other's
 * gate, so that the end of lgsup ends it, and then the other. */
static int fork_held(const struct lg_spawn *s, int out_fd, struct held *h, struct lg_child *c)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    int rc = open_held(h);
    c->pid = rc == 0 ? fork() : -1;
    if (c->pid == 0) begin_held(s, out_fd, h);
    int e = errno;
    pthread_mutex_unlock(&one);
    LG_TRY(rc);
    if (c->pid < 0) rc = LG_FAIL(lg_err_from_errno(e), "fork: %s%s", strerror(e), limit_of(e));
    return rc;
}

static int spawn_held(const struct lg_spawn *s, int out_fd, struct lg_child *ret)
{
    struct held h = {{-1, -1}, {-1, -1}};
    struct lg_child c = {.pid = -1, .pidfd = -1, .mine = true};
    int rc = fork_held(s, out_fd, &h, &c);
    close(h.gate[0]);
    close(h.fault[1]);
    if (rc == 0) rc = enter_held(s, &h, &c);
    close(h.gate[1]);
    close(h.fault[0]);
    if (rc < 0 && c.pid > 0) {
        kill(c.pid, SIGKILL);
        waitpid(c.pid, NULL, 0);
        if (c.pidfd >= 0) close(c.pidfd);
    }
    LG_TRY(rc);
    *ret = c;
    return 0;
}

static int spawn_with(const struct lg_spawn *s, int out_fd, struct lg_child *ret)
{
    posix_spawnattr_t attr;
    posix_spawn_file_actions_t files;
    pid_t pid;
    set_attributes(&attr);
    set_files(&files, out_fd, s->pass_fd);
    int bad = posix_spawn(&pid, s->program, &files, &attr, s->argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    if (bad)
        return LG_FAIL(lg_err_from_errno(bad), "cannot start %s: %s%s", s->program, strerror(bad),
                       limit_of(bad));
    int pidfd = pidfd_open(pid, 0); /* close-on-exec by definition */
    if (pidfd < 0) {
        bad = errno;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return LG_FAIL(LG_ERR_IO, "pidfd_open: %s", strerror(bad));
    }
    *ret = (struct lg_child){.pid = pid, .pidfd = pidfd, .mine = true};
    return 0;
}

/* A full disk must not keep a process from starting: without its log it writes into the void. */
static int open_log(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    return fd >= 0 ? fd : open("/dev/null", O_WRONLY | O_CLOEXEC);
}

int lg_child_spawn(const struct lg_spawn *s, struct lg_child *ret)
{
    int out_fd = s->log ? open_log(s->log) : -1;
    int rc = s->enter ? spawn_held(s, out_fd, ret) : spawn_with(s, out_fd, ret);
    if (out_fd >= 0) close(out_fd);
    return rc;
}

int lg_child_reap(struct lg_child *c)
{
    siginfo_t info = {0};
    int code = LG_EXIT_UNKNOWN;
    if (c->mine && waitid(P_PIDFD, (id_t)c->pidfd, &info, WEXITED) == 0)
        code = info.si_code == CLD_EXITED ? info.si_status : LG_EXIT_SIGNAL + info.si_status;
    close(c->pidfd);
    *c = LG_CHILD_NONE;
    return code;
}

void lg_child_signal(const struct lg_child *c, int sig)
{
    if (c->pidfd >= 0) pidfd_send_signal(c->pidfd, sig, NULL, 0);
}

int lg_child_wait(const struct lg_child *c, int timeout_ms)
{
    int64_t deadline_ns = lg_now_ns() + timeout_ms * LG_MS_NS;
    struct pollfd p = {.fd = c->pidfd, .events = POLLIN};
    for (;;) {
        int64_t left_ms = (deadline_ns - lg_now_ns()) / LG_MS_NS;
        int n = poll(&p, 1, (int)LG_MAX(left_ms, 0));
        if (n > 0) return 0;
        if (n == 0) return LG_ERR_TIMEOUT;
        if (errno != EINTR) return LG_FAIL(LG_ERR_IO, "poll: %s", strerror(errno));
    }
}

static int read_all(const struct lg_capture *c, size_t bytes_max, char **ret_text)
{
    char *text = malloc(bytes_max + 1);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu bytes of output", bytes_max);
    int64_t deadline_ns = lg_now_ns() + c->timeout_ms * LG_MS_NS;
    size_t at = 0;
    int rc = 0;
    for (;;) {
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        int64_t left_ms = (deadline_ns - lg_now_ns()) / LG_MS_NS;
        if (left_ms <= 0 || poll(&p, 1, (int)left_ms) == 0) {
            rc = LG_FAIL(LG_ERR_TIMEOUT, "no end of its output within %d s", c->timeout_ms / 1000);
            break;
        }
        ssize_t n = read(c->fd, text + at, bytes_max + 1 - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        at += (size_t)n;
        if (at > bytes_max) {
            rc = LG_FAIL(LG_ERR_CORRUPT, "more than %zu bytes of output", bytes_max);
            break;
        }
    }
    if (rc < 0) {
        free(text);
        return rc;
    }
    text[at] = 0;
    *ret_text = text;
    return 0;
}

int lg_capture_begin(const char *program, char *const *argv, struct lg_capture *ret)
{
    int fds[2];
    struct lg_capture c;
    if (pipe2(fds, O_CLOEXEC) < 0) return LG_FAIL(LG_ERR_IO, "pipe: %s", strerror(errno));
    int rc = spawn_with(&(struct lg_spawn){.program = program, .argv = argv, .pass_fd = -1}, fds[1],
                        &c.child);
    close(fds[1]);
    c.fd = fds[0];
    c.timeout_ms = CAPTURE_TIMEOUT_MS;
    if (rc < 0) {
        close(fds[0]);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = c;
    return 0;
}

int lg_capture_end(struct lg_capture *c, size_t bytes_max, char **ret_text, int *ret_exit)
{
    int rc = read_all(c, bytes_max, ret_text);
    if (rc < 0) lg_child_signal(&c->child, SIGKILL);
    int code = lg_child_reap(&c->child);
    if (rc == 0) *ret_exit = code;
    close(c->fd);
    return rc;
}

int lg_child_capture(const char *program, char *const *argv, size_t bytes_max, char **ret_text,
                     int *ret_exit)
{
    struct lg_capture c;
    LG_TRY(lg_capture_begin(program, argv, &c));
    LG_TRY(lg_capture_end(&c, bytes_max, ret_text, ret_exit));
    return 0;
}

const char *lg_child_json(const char *output)
{
    while (*output && *output != '{') {
        output += strcspn(output, "\n");
        output += *output == '\n';
    }
    return output;
}

void lg_exit_text(int exit_code, char *ret, size_t bytes)
{
    if (exit_code == LG_EXIT_UNKNOWN)
        snprintf(ret, bytes, "ended");
    else if (exit_code >= LG_EXIT_SIGNAL)
        snprintf(ret, bytes, "signal %d (%s)", exit_code - LG_EXIT_SIGNAL,
                 strsignal(exit_code - LG_EXIT_SIGNAL));
    else
        snprintf(ret, bytes, "exit %d%s%s", exit_code, exit_code ? " " : "",
                 exit_code ? lg_err_name(-exit_code) : "");
}

static bool has_stamp(const char *line)
{
    return strlen(line) > 24 && line[4] == '-' && line[10] == 'T' && line[23] == 'Z';
}

/* Past time, level and role of a log line (base/log.h). */
static const char *skip_head(const char *line)
{
    for (int word = 0; word < 3; word++) {
        line += strcspn(line, " ");
        line += strspn(line, " ");
    }
    return line;
}

/* The frames of an error's trace follow its message on lines of their own, without a time. */
void lg_last_words(const char *path, char *ret, size_t bytes)
{
    char tail[8192], *rest = NULL;
    ret[0] = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    off_t end = lseek(fd, 0, SEEK_END);
    ssize_t n = pread(fd, tail, sizeof tail - 1, LG_MAX(end - (off_t)sizeof tail + 1, 0));
    close(fd);
    if (n <= 0) return;
    tail[n] = 0;
    const char *last = NULL, *stamped = NULL;
    for (char *line = strtok_r(tail, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        last = line;
        if (has_stamp(line)) stamped = line;
        if (!has_stamp(line) && line[0] != ' ')
            stamped = NULL; /* not ours: a library's last words */
    }
    if (stamped)
        snprintf(ret, bytes, "%s", skip_head(stamped));
    else if (last)
        snprintf(ret, bytes, "%s", last);
}
