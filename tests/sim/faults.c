/* Fail-nth; see faults.h. */
#include "tests/sim/faults.h"
#include "base/check.h"
#include "base/fs.h"
#include "tests/unit/scratch.h"
#include "tests/unit/seeds.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

enum { FDS_MAX = 512, FAULTS_MAX = 4000, LIMIT_S = 20 };
enum { FINE = 0, NO_MESSAGE = 81, FD_LEFT, NOTHING_FAILED, FAILED_BY_ITSELF, DIED };

static bool g_on, g_dies, g_memory; /* g_memory: what failed was an allocation */
static bool g_said;                 /* was there a message when the scenario ended? */
static long g_count, g_at;
static pid_t g_process;
static const char *g_call = "";

/* Does this call fail? */
static bool fails(const char *call)
{
    if (!g_on || getpid() != g_process || ++g_count != g_at) return false;
    g_call = call;
    if (g_dies) {
        g_on = false; /* of what a coverage count does while it is saved */
        scratch_exit(DIED);
    }
    return true;
}

#define REAL(type, name, ...) extern type __real_##name(__VA_ARGS__)
#define WRAP(type, name, ...)                                                                      \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)
/* A call that fails with one errno and one result. */
#define FAULT(type, name, bad, code, parameters, arguments)                                        \
    extern type __real_##name parameters;                                                          \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters                                                                  \
    {                                                                                              \
        if (!fails(#name)) return __real_##name arguments;                                         \
        errno = code;                                                                              \
        return bad;                                                                                \
    }
/* One that is interrupted every other time: the code has to ask again. */
#define INTERRUPTED(type, name, code, parameters, arguments)                                       \
    FAULT(type, name, -1, (g_at % 2 ? EINTR : code), parameters, arguments)

FAULT(int, open, -1, EMFILE, (const char *p, int f, mode_t m), (p, f, m))
FAULT(int, openat, -1, EMFILE, (int d, const char *p, int f, mode_t m), (d, p, f, m))
INTERRUPTED(ssize_t, read, EIO, (int fd, void *to, size_t n), (fd, to, n))
INTERRUPTED(ssize_t, __read_chk, EIO, (int fd, void *to, size_t n, size_t r), (fd, to, n, r))
INTERRUPTED(ssize_t, pread, EIO, (int fd, void *to, size_t n, off_t a), (fd, to, n, a))
INTERRUPTED(ssize_t, __pread_chk, EIO, (int fd, void *to, size_t n, off_t a, size_t r),
            (fd, to, n, a, r))
INTERRUPTED(ssize_t, write, ENOSPC, (int fd, const void *p, size_t n), (fd, p, n))
FAULT(ssize_t, pwrite, -1, ENOSPC, (int fd, const void *p, size_t n, off_t a), (fd, p, n, a))
/* Not a test of the medium: the good case returns at once. */
WRAP(int, fsync, int fd)
{
    if (!fails("fsync")) return 0;
    errno = EIO;
    return -1;
}
FAULT(int, ftruncate, -1, EIO, (int fd, off_t n), (fd, n))
FAULT(int, rename, -1, EIO, (const char *a, const char *b), (a, b))
FAULT(int, mkdir, -1, ENOSPC, (const char *p, mode_t m), (p, m))
FAULT(int, rmdir, -1, EIO, (const char *p), (p))
FAULT(int, stat, -1, EIO, (const char *p, struct stat *s), (p, s))
FAULT(int, fstat, -1, EIO, (int fd, struct stat *s), (fd, s))
FAULT(int, lstat, -1, EIO, (const char *p, struct stat *s), (p, s))
/* /proc as the scenario sees it: a folder that names its own process, the test's and the test's other children. Each other
 * process of the machine would be calls that may fail, all alike. */
extern DIR *__real_opendir(const char *p);
static char g_proc[LG_PATH_BYTES];
static void name_process(int pid, bool lives)
{
    char name[LG_PATH_BYTES + 16];
    snprintf(name, sizeof name, "%s/%d", g_proc, pid);
    if (lives)
        __real_mkdir(name, 0700);
    else
        __real_rmdir(name);
}
static int parent_of(const char *pid)
{
    char path[300];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    if (fscanf(f, "%*d (%*[^)]) %*c %d", &parent) != 1) parent = 0;
    fclose(f);
    return parent;
}
static void name_processes(void)
{
    snprintf(g_proc, sizeof g_proc, "%s", scratch_path("processes"));
    __real_mkdir(g_proc, 0700);
    name_process(getpid(), true);
    DIR *proc = __real_opendir("/proc");
    LG_ASSERT(proc);
    for (struct dirent *e; (e = readdir(proc));)
        if (atoi(e->d_name) > 0 && parent_of(e->d_name) == getpid())
            name_process(atoi(e->d_name), true);
    closedir(proc);
}
WRAP(DIR *, opendir, const char *p)
{
    if (fails("opendir")) {
        errno = EMFILE;
        return NULL;
    }
    bool all = !g_on || strcmp(p, "/proc") != 0;
    if (!all) name_process(getpid(), true);
    return __real_opendir(all ? p : g_proc);
}
FAULT(int, access, -1, EACCES, (const char *p, int m), (p, m))
FAULT(ssize_t, readlink, -1, EIO, (const char *p, char *to, size_t n), (p, to, n))
FAULT(ssize_t, __readlink_chk, -1, EIO, (const char *p, char *to, size_t n, size_t r),
      (p, to, n, r))
FAULT(char *, realpath, NULL, EIO, (const char *p, char *to), (p, to))
FAULT(char *, __realpath_chk, NULL, EIO, (const char *p, char *to, size_t r), (p, to, r))
FAULT(void *, mmap, MAP_FAILED, ENOMEM, (void *a, size_t n, int p, int f, int fd, off_t o),
      (a, n, p, f, fd, o))
FAULT(int, fcntl, -1, EINVAL, (int fd, int c, long a), (fd, c, a))
FAULT(int, memfd_create, -1, EMFILE, (const char *n, unsigned f), (n, f))
INTERRUPTED(int, fallocate, ENOSPC, (int fd, int m, off_t a, off_t n), (fd, m, a, n))
FAULT(int, posix_fallocate, ENOSPC, ENOSPC, (int fd, off_t a, off_t n), (fd, a, n))
FAULT(int, socket, -1, EMFILE, (int d, int t, int p), (d, t, p))
FAULT(int, bind, -1, EACCES, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n))
FAULT(int, listen, -1, EIO, (int fd, int n), (fd, n))
INTERRUPTED(int, connect, ECONNREFUSED, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n))
FAULT(int, accept4, -1, EMFILE, (int fd, struct sockaddr *a, socklen_t *n, int f), (fd, a, n, f))
INTERRUPTED(ssize_t, sendmsg, EPIPE, (int fd, const struct msghdr *h, int f), (fd, h, f))
INTERRUPTED(ssize_t, recvmsg, ECONNRESET, (int fd, struct msghdr *h, int f), (fd, h, f))
FAULT(int, setsockopt, -1, EINVAL, (int fd, int l, int o, const void *v, socklen_t n),
      (fd, l, o, v, n))
FAULT(int, getsockopt, -1, EINVAL, (int fd, int l, int o, void *v, socklen_t *n), (fd, l, o, v, n))
FAULT(ssize_t, getrandom, -1, ENOSYS, (void *to, size_t n, unsigned f), (to, n, f))
FAULT(int, pipe, -1, EMFILE, (int fds[2]), (fds))
FAULT(int, pipe2, -1, EMFILE, (int fds[2], int f), (fds, f))
FAULT(int, posix_spawn, EAGAIN, EAGAIN,
      (pid_t * p, const char *f, const posix_spawn_file_actions_t *a, const posix_spawnattr_t *t,
       char *const *v, char *const *e),
      (p, f, a, t, v, e))
FAULT(int, pidfd_open, -1, EMFILE, (pid_t p, unsigned f), (p, f))
FAULT(int, poll, -1, EINTR, (struct pollfd * p, nfds_t n, int t), (p, n, t))
FAULT(int, __poll_chk, -1, EINTR, (struct pollfd * p, nfds_t n, int t, size_t r), (p, n, t, r))
FAULT(int, flock, -1, EINTR, (int fd, int o), (fd, o))
FAULT(int, signalfd, -1, EMFILE, (int fd, const sigset_t *s, int f), (fd, s, f))
FAULT(int, sigprocmask, -1, EINVAL, (int h, const sigset_t *s, sigset_t *o), (h, s, o))
FAULT(int, getrlimit, -1, EINVAL, (int r, struct rlimit *l), (r, l))
FAULT(void *, zmq_ctx_new, NULL, EMFILE, (void), ())
FAULT(void *, zmq_socket, NULL, EMFILE, (void *c, int t), (c, t))
FAULT(int, zmq_bind, -1, EADDRINUSE, (void *s, const char *a), (s, a))
FAULT(int, zmq_connect, -1, EINVAL, (void *s, const char *a), (s, a))

/* No threads: what workers do is then done by whoever gave it to them (supervisor/run/worker.h), and its
 * calls count like all others. */
WRAP(int, pthread_create, pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
     void *arg)
{
    return EAGAIN;
}

/* The service manager. Fails with -errno. */
WRAP(int, sd_notifyf, int u, const char *fmt, ...)
{
    char text[1024];
    if (fails("sd_notifyf")) return g_at % 2 ? -ECONNREFUSED : 0; /* 0: no NOTIFY_SOCKET */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return sd_notify(u, text);
}

#define NO_MEMORY(name, parameters, arguments)                                                     \
    extern void *__real_##name parameters;                                                         \
    void *__wrap_##name parameters;                                                                \
    void *__wrap_##name parameters                                                                 \
    {                                                                                              \
        if (!fails(#name)) return __real_##name arguments;                                         \
        g_memory = true;                                                                           \
        errno = ENOMEM;                                                                            \
        return NULL;                                                                               \
    }
NO_MEMORY(open_memstream, (char **text, size_t *bytes), (text, bytes))
NO_MEMORY(malloc, (size_t n), (n))
NO_MEMORY(calloc, (size_t n, size_t m), (n, m))
NO_MEMORY(realloc, (void *p, size_t n), (p, n))

WRAP(int, lg_path, char ret_path[LG_PATH_BYTES], const char *fmt, ...)
{
    if (fails("lg_path")) return LG_FAIL(LG_ERR_CONFIG, "path longer than there is room for");
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(ret_path, LG_PATH_BYTES, fmt, ap);
    va_end(ap);
    return n < LG_PATH_BYTES ? 0 : LG_FAIL(LG_ERR_CONFIG, "path longer than there is room for");
}

void faults_begin(void)
{
    g_process = getpid();
    g_count = 0;
    g_on = true;
}

void faults_end(void)
{
    if (g_on) g_said = lg_err_message()[0] != 0;
    g_on = false;
}

static int open_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < FDS_MAX; fd++) n += fcntl(fd, F_GETFD, 0) >= 0;
    return n;
}

static void run_child(const struct fault_scenario *s)
{
    alarm(LIMIT_S);
    if (!freopen("/dev/null", "w", stdout)) _exit(1); /* what commands print */
    int before = open_fds();
    int rc = s->run();
    faults_end();
    bool hit = g_count >= g_at;
    int code = FINE;
    if (rc < 0 && !g_said) code = NO_MESSAGE;
    if (open_fds() != before) code = FD_LEFT;
    if (!hit) code = rc < 0 ? FAILED_BY_ITSELF : NOTHING_FAILED;
    if (code != FINE && code != NOTHING_FAILED)
        fprintf(stderr, "  run %ld, %s failed: result %d, fds %d -> %d: %s\n", g_at, g_call, rc,
                before, open_fds(), lg_err_text());
    fflush(NULL);
    scratch_exit(code);
}

static void on_abort(int sig)
{
    (void)sig;
    if (g_memory) scratch_exit(FINE);
    fprintf(stderr, "  aborted when run %ld, %s failed\n", g_at, g_call);
}

/* Runs the scenario with fault g_at. How it ended, or -1, which was told. */
static int run_one(const struct fault_scenario *s)
{
    static const char *const what[] = {"an error without a message", "a file descriptor is left",
                                       "", "it fails although nothing was made to"};
    int status;
    fflush(NULL);
    pid_t child = fork();
    LG_ASSERT(child >= 0);
    if (child == 0) {
        struct sigaction act = {.sa_handler = on_abort, .sa_flags = (int)SA_RESETHAND};
        sigaction(SIGABRT, &act, NULL);
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        g_dies = s->dies;
        run_child(s);
    }
    LG_ASSERT(waitpid(child, &status, 0) == child);
    name_process(child, false);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == FINE || code == NOTHING_FAILED || code == DIED) return code;
    if (code >= NO_MESSAGE && code <= FAILED_BY_ITSELF)
        printf("%s, fault %ld: %s\n", s->name, g_at, what[code - NO_MESSAGE]);
    else
        printf("%s, fault %ld: %s %d\n", s->name, g_at, WIFSIGNALED(status) ? "signal" : "exit",
               WIFSIGNALED(status) ? WTERMSIG(status) : code);
    return -1;
}

int faults_each(const struct fault_scenario *s)
{
    int step = (s->every ? s->every : 1) * (checks_a_part() ? SANITIZED_PART : 1), runs = 0;
    name_processes();
    for (g_at = 1; g_at <= FAULTS_MAX; g_at += step, runs++) {
        int code = run_one(s);
        if (code < 0) return -1;
        if (s->after && s->after() < 0) {
            printf("%s, after fault %ld: %s\n", s->name, g_at, lg_err_text());
            return -1;
        }
        if (code == NOTHING_FAILED) return runs;
    }
    printf("%s: more than %d calls\n", s->name, FAULTS_MAX);
    return -1;
}
