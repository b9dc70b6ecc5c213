/* The system's calls as the machine answers them: poll, pids, signals, /proc, lgsup's memory and the
 * one file of its that matters here, DIR/programs. */
#include "supervisor/run/programs.h"
#include "tests/sim/machine.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

REAL(int, poll, struct pollfd *, nfds_t, int);
REAL(long, syscall, long, ...);
REAL(int, open, const char *, int, ...);
REAL(ssize_t, read, int, void *, size_t);
REAL(int, close, int);
REAL(void *, calloc, size_t, size_t);
REAL(void, free, void *);
REAL(void *, realloc, void *, size_t);
REAL(int, access, const char *, int);
REAL(int, lg_publish_file, const char *, const void *, size_t);
REAL(int, lg_read_file, const char *, size_t, char **, size_t *);
REAL(bool, lg_path_exists, const char *);

WRAP(int64_t, lg_now_ns, void)
{
    return g.now_ns;
}

static bool letter_is_due(void)
{
    for (int i = 0; i < g.n_letters; i++)
        if (g.letter[i].due_ns <= g.now_ns) return true;
    return false;
}

static bool is_ready(int fd)
{
    if (fd == SIGNAL_FD) return g.signals != 0;
    if (fd == CONTROL_FD) return letter_is_due();
    if (fd < PIDFD_FIRST) return false;
    const struct proc *p = by_serial((uint32_t)(fd - PIDFD_FIRST));
    if (g.trouble == SIM_DEAF_PIDFD && p && p->serial == g.deaf) return false;
    if (g.trouble == SIM_EARLY_FIRE && lives(p) && sim_random(&g.w, 400) == 0) return true;
    return !lives(p);
}

static int look(struct pollfd *p, nfds_t n)
{
    int ready = 0;
    for (nfds_t i = 0; i < n; i++) {
        p[i].revents = p[i].fd >= 0 && is_ready(p[i].fd) ? POLLIN : 0;
        ready += p[i].revents != 0;
    }
    return ready;
}

/* lgsup sleeps in its loop: what was begun before, by it or by one that has died, is complete. */
static void check_decisions(const struct pollfd *p, nfds_t n)
{
    bool in_loop = false;
    for (nfds_t i = 0; i < n; i++) in_loop |= p[i].fd == SIGNAL_FD;
    if (in_loop && atomic_load(&g.w.board.s->drain) &&
        atomic_load(&g.w.board.s->run_state) < LG_RUN_DRAINING)
        sim_fail(&g.w, "a run that is draining says that it runs");
}

WRAP(int, poll, struct pollfd *p, nfds_t n, int timeout_ms)
{
    int ready = look(p, n);
    if (!g.in_lgsup || timeout_ms == 0) return ready;
    check_decisions(p, n);
    int64_t until = g.now_ns + timeout_ms * LG_MS_NS;
    uint64_t every = g.w.result->steps < 200 ? 30 : 3000;
    if (sim_random(&g.w, every) == 0) until += (int64_t)sim_random(&g.w, 6) * LG_S_NS; /* SIGSTOP */
    while ((ready == 0 || until > g.now_ns + timeout_ms * LG_MS_NS) && g.now_ns < until) {
        g.in_lgsup = false;
        machine_step();
        g.in_lgsup = true;
        ready = look(p, n);
    }
    lgsup_calls();
    return ready;
}

WRAP(int, __poll_chk, struct pollfd *p, nfds_t n, int timeout_ms, size_t room)
{
    return __wrap_poll(p, n, timeout_ms);
}

static int pidfd_of(int pid)
{
    const struct proc *p = by_pid(pid);
    if (p) return PIDFD_FIRST + (int)p->serial;
    errno = ESRCH;
    return -1;
}

WRAP(int, pidfd_open, pid_t pid, unsigned flags)
{
    return pidfd_of(pid);
}
WRAP(long, syscall, long number, long a, long b, long c)
{
    return number == SYS_pidfd_open ? pidfd_of((int)a) : __real_syscall(number, a, b, c);
}
WRAP(int, pidfd_send_signal, int fd, int sig, siginfo_t *info, unsigned flags)
{
    sim_fail(&g.w, "a signal by other means than lg_child_signal");
}
WRAP(int, getpid, void)
{
    return g.getpid;
}
WRAP(int, signalfd, int fd, const sigset_t *set, int flags)
{
    return SIGNAL_FD;
}
WRAP(int, sigprocmask, int how, const sigset_t *set, sigset_t *old)
{
    return 0;
}
WRAP(__sighandler_t, signal, int sig, __sighandler_t handler)
{
    return SIG_DFL;
}

WRAP(int, open, const char *path, int flags, mode_t mode)
{
    int pid;
    if (sscanf(path, "/proc/%d/stat", &pid) != 1) return __real_open(path, flags, mode);
    g.stat_pid = pid;
    return by_pid(pid) ? STAT_FD : -1;
}
WRAP(ssize_t, read, int fd, void *to, size_t bytes)
{
    if (fd == STAT_FD) {
        const struct proc *p = by_pid(g.stat_pid);
        return snprintf(to, bytes, "%d (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %llu 0",
                        g.stat_pid, (unsigned long long)(p ? p->start : 0));
    }
    if (fd != SIGNAL_FD) return __real_read(fd, to, bytes);
    if (!g.signals) return -1;
    int sig = g.signals & 1 ? SIGHUP : SIGINT;
    g.signals &= sig == SIGHUP ? ~1 : ~2;
    *(struct signalfd_siginfo *)to = (struct signalfd_siginfo){.ssi_signo = (uint32_t)sig};
    return sizeof(struct signalfd_siginfo);
}
WRAP(ssize_t, __read_chk, int fd, void *to, size_t bytes, size_t room)
{
    return __wrap_read(fd, to, bytes);
}
WRAP(int, close, int fd)
{
    return fd >= SIGNAL_FD ? 0 : __real_close(fd);
}
/* lgsup's workers have no threads: their jobs are done when it collects (supervisor/run/worker.h), which
 * it comes to now and then. */
WRAP(int, pthread_create, pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
     void *arg)
{
    return EAGAIN;
}
WRAP(int, eventfd, unsigned n, int flags)
{
    return WAKE_FD;
}
WRAP(int, eventfd_read, int fd, eventfd_t *ret)
{
    *ret = 0;
    return 0;
}
WRAP(int, eventfd_write, int fd, eventfd_t n)
{
    return 0;
}
WRAP(uint64_t, lg_process_start_time, int pid)
{
    const struct proc *p = by_pid(pid);
    return p ? p->start : 0;
}

/* lgsup's memory, so that its death frees it. */
static void **slot_of(const void *at)
{
    for (int i = 0; i < ALLOCATIONS_MAX; i++)
        if (g.allocation[i] == at) return &g.allocation[i];
    return NULL;
}
void *own(void *at)
{
    void **slot = g.in_lgsup && at ? slot_of(NULL) : NULL;
    LG_ASSERT(slot || !g.in_lgsup || !at);
    if (slot) *slot = at;
    return at;
}
static void disown(const void *at)
{
    void **slot = at ? slot_of(at) : NULL;
    if (slot) *slot = NULL;
}
void free_all(void)
{
    for (int i = 0; i < ALLOCATIONS_MAX; i++) {
        __real_free(g.allocation[i]);
        g.allocation[i] = NULL;
    }
}
WRAP(void *, calloc, size_t n, size_t bytes)
{
    return own(__real_calloc(n, bytes));
}
WRAP(void *, realloc, void *at, size_t bytes)
{
    disown(at);
    return own(__real_realloc(at, bytes));
}
WRAP(char *, strdup, const char *text)
{
    size_t bytes = strlen(text) + 1;
    return memcpy(own(__real_calloc(1, bytes)), text, bytes);
}
WRAP(void, free, void *at)
{
    disown(at);
    __real_free(at);
}

/* DIR/programs, and the files that it names. */
static bool is_programs(const char *path)
{
    return !strcmp(path, "/nowhere/programs");
}
WRAP(int, access, const char *path, int mode)
{
    enum program p = program_of_path(path);
    if (p == PROGRAM_COUNT) return __real_access(path, mode);
    errno = ENOENT;
    return p == PROGRAM_missing ? -1 : 0;
}
WRAP(bool, lg_path_exists, const char *path)
{
    return is_programs(path) ? g.programs_bytes > 0 : __real_lg_path_exists(path);
}
WRAP(int, lg_read_file, const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes)
{
    if (!is_programs(path)) return __real_lg_read_file(path, bytes_max, ret_data, ret_bytes);
    *ret_data = own(__real_calloc(1, g.programs_bytes + 1));
    *ret_bytes = g.programs_bytes;
    memcpy(*ret_data, g.programs, g.programs_bytes);
    return 0;
}
/* A failure is told before or after the file has been replaced, and so is a death. */
WRAP(int, lg_publish_file, const char *path, const void *data, size_t bytes)
{
    if (!is_programs(path)) return __real_lg_publish_file(path, data, bytes);
    bool fails = g.fail_every && sim_random(&g.w, g.fail_every) == 0;
    union {
        const void *text;
        void *at;
    } u = {.text = data};
    own(u.at);
    lgsup_calls();
    if (!fails || sim_random(&g.w, 2)) {
        LG_ASSERT(bytes <= sizeof g.programs);
        memcpy(g.programs, data, bytes);
        g.programs_bytes = bytes;
    }
    lgsup_calls();
    if (!fails) return 0;
    orders_unsaved();
    return LG_FAIL(LG_ERR_IO, "cannot write %s: planted", path);
}
