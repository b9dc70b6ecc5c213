/* DIR/lock: which lgsup has the run in charge; see run.h.
 *
 * One line, "PID START_TIME BOOT_ID HOST". The kernel's lock on the file decides (also between machines
 * that mount the directory); the line says whose end is to be waited for, and whom to name.
 *
 * The kernel's lock belongs to an open file, of which a child that lgsup has just forked has a copy until its
 * process stands on the board, or until it becomes another program (child.h): so it holds the lock of an lgsup that has
 * died. Then it sees that its parent is gone and ends, which is waited for. One that does not, because it was stopped,
 * is known to nobody: whoever wants the lock ends it. It is told from another lgsup by what the kernel says of the
 * lock, in /proc/PID/fdinfo: the lock was taken by a process that has this file open and is not this one. */
#include "base/check.h"
#include "shm/board.h"
#include "supervisor/run/run.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FORMER_HOLDER_MS_MAX = 10000,
    COPY_MS_MAX = 10000,
    COPY_TRY_MS = 5,
    COPY_GRACE_MS = 100,
    OPEN_TRIES_MAX = 16
};

struct holder {
    int pid;
    uint64_t start;
    char boot_id[40], host[65];
};

static int parse_holder(const char *dir, struct holder *ret)
{
    char path[LG_PATH_BYTES], line[192];
    int rc = lg_path(path, "%s/lock", dir);
    *ret = (struct holder){0};
    if (rc == 0) rc = lg_read_line(path, line, sizeof line);
    if (rc < 0) {
        lg_err_clear();
        return rc;
    }
    int n =
        sscanf(line, "%d %" SCNu64 " %39s %64s", &ret->pid, &ret->start, ret->boot_id, ret->host);
    return n >= 2 && ret->pid > 0 ? 0 : LG_ERR_NOTFOUND;
}

/* A pid and a start time count since a boot: those of another one name a stranger. */
static bool is_of_this_boot(const struct holder *h)
{
    char boot_id[40];
    if (!h->boot_id[0]) return true;
    if (lg_boot_id(boot_id) == 0) return !strcmp(h->boot_id, boot_id);
    lg_err_clear();
    return true;
}

/* Does a process have the file open, by an fd of which `look`, unless it is NULL, says yes? */
typedef bool fd_look(int pid, const char *fd);
static bool has_open(int pid, const struct stat *lock, fd_look *look)
{
    char fds_path[64];
    struct stat st;
    bool yes = false;
    snprintf(fds_path, sizeof fds_path, "/proc/%d/fd", pid);
    DIR *fds = opendir(fds_path);
    if (!fds) return false;
    for (struct dirent *e; !yes && (e = readdir(fds));)
        yes = e->d_name[0] != '.' && fstatat(dirfd(fds), e->d_name, &st, 0) == 0 &&
              st.st_dev == lock->st_dev && st.st_ino == lock->st_ino &&
              (!look || look(pid, e->d_name));
    closedir(fds);
    return yes;
}

/* A container may show one boot id here and another one there, so that alone proves nothing: who has the
 * file open is no stranger. */
static bool has_it_open(int pid, const char *dir)
{
    char path[LG_PATH_BYTES];
    struct stat lock;
    return lg_path(path, "%s/lock", dir) == 0 && stat(path, &lock) == 0 &&
           has_open(pid, &lock, NULL);
}

/* A copy of the directory of a run that lives: its lock names the lgsup of the original. */
static bool is_copy(const char *dir)
{
    char path[LG_PATH_BYTES];
    struct lg_board_preamble p;
    int code;
    if (lg_path(path, "%s/board", dir) < 0 || !lg_path_exists(path)) return false;
    const bool copy = lg_board_look(path, &p, &code) == LG_BOARD_COPY;
    if (code < 0) lg_err_clear();
    return copy;
}

int lg_run_holder(const char *dir, int *ret_pid)
{
    struct holder h;
    if (parse_holder(dir, &h) < 0) return -1;
    if (!has_it_open(h.pid, dir) && (!is_of_this_boot(&h) || is_copy(dir))) return -1;
    int pidfd = pidfd_open(h.pid, 0);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    if (pidfd >= 0 && (lg_process_start_time(h.pid) != h.start || poll(&p, 1, 0) != 0)) {
        close(pidfd);
        pidfd = -1;
    }
    if (pidfd >= 0 && ret_pid) *ret_pid = h.pid;
    return pidfd;
}

/* Its file lock goes before its last thread does: only the pidfd proves the end. */
static int wait_for_former_holder(const lg_run *r)
{
    int pid, pidfd = lg_run_holder(r->dir, &pid);
    if (pidfd < 0) return 0;
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    int n = pid == getpid() ? 1 : poll(&p, 1, FORMER_HOLDER_MS_MAX);
    close(pidfd);
    if (n > 0) return 0;
    return LG_FAIL(LG_ERR_BUSY, "an earlier lgsup (pid %d) of %s has let go of the lock but lives",
                   pid, r->dir);
}

static bool is_held_by_a_copy(const lg_run *r)
{
    struct holder h;
    char host[sizeof h.host] = "";
    if (parse_holder(r->dir, &h) < 0 || !is_of_this_boot(&h)) return false;
    if (gethostname(host, sizeof host - 1) < 0 || strcmp(h.host, host) != 0) return false;
    int pidfd = lg_run_holder(r->dir, NULL);
    if (pidfd >= 0) close(pidfd);
    return pidfd < 0;
}

/* "lock:  1: FLOCK  ADVISORY  WRITE PID ...": the lock of this open file was taken by another process; PID is 0 where
 * that one is dead and its number means nothing in this namespace. */
static bool took_it_from_another(int pid, const char *fd)
{
    char path[384], line[256];
    int taker = pid;
    snprintf(path, sizeof path, "/proc/%d/fdinfo/%s", pid, fd);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    while (taker == pid && fgets(line, sizeof line, f))
        if (sscanf(line, "lock: %*s FLOCK %*s %*s %d", &taker) != 1) taker = pid;
    fclose(f);
    return taker != pid;
}

static void end_copy(int pid, const struct stat *lock)
{
    int pidfd = pidfd_open(pid, 0);
    if (pidfd < 0) return;
    if (has_open(pid, lock, took_it_from_another)) pidfd_send_signal(pidfd, SIGKILL, NULL, 0);
    close(pidfd);
}

/* Of the dead holder's children; who is not ours to end stays, and is waited for. */
static void end_copies(int fd)
{
    struct stat lock;
    DIR *proc = opendir("/proc");
    if (!proc) return;
    for (struct dirent *e; fstat(fd, &lock) == 0 && (e = readdir(proc));) {
        int pid = atoi(e->d_name);
        if (pid > 0 && pid != getpid()) end_copy(pid, &lock);
    }
    closedir(proc);
}

static int is_taken(const lg_run *r)
{
    struct holder h;
    int pid = 0, pidfd = lg_run_holder(r->dir, &pid);
    if (pidfd >= 0) close(pidfd);
    if (pidfd < 0 && parse_holder(r->dir, &h) == 0 && h.host[0])
        return LG_FAIL(LG_ERR_BUSY,
                       "the run in %s is already supervised by lgsup (pid %d) on %s, which cannot "
                       "be seen from here: use `lgsup status` and `lgsup stop` there",
                       r->dir, h.pid, h.host);
    return LG_FAIL(LG_ERR_BUSY,
                   "the run in %s is already supervised by lgsup (pid %d); see `lgsup status "
                   "%s`, end it with `lgsup stop %s`",
                   r->dir, pid, r->dir, r->dir);
}

/* The lock of a file that was removed, or replaced, between open and flock keeps nobody out. */
static bool is_the_file(int fd, const char *path)
{
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && stat(path, &there) == 0 && mine.st_ino == there.st_ino &&
           mine.st_dev == there.st_dev;
}

static int take(const lg_run *r, const char *path, int *ret_fd)
{
    for (int i = 0, waited_ms = 0; i < OPEN_TRIES_MAX; i++) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
            return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            bool taken = errno == EWOULDBLOCK;
            int e = errno;
            bool wait = taken && waited_ms < COPY_MS_MAX && is_held_by_a_copy(r);
            if (wait && waited_ms == COPY_GRACE_MS) end_copies(fd);
            close(fd);
            if (wait) {
                poll(NULL, 0, COPY_TRY_MS);
                waited_ms += COPY_TRY_MS;
                i--;
                continue;
            }
            if (taken) return is_taken(r);
            return LG_FAIL(lg_err_from_errno(e),
                           "cannot lock %s: %s; job.dir must lie on a file system with locks", path,
                           strerror(e));
        }
        if (is_the_file(fd, path)) {
            *ret_fd = fd;
            return 0;
        }
        close(fd);
    }
    return LG_FAIL(LG_ERR_BUSY, "%s is being replaced all the time", path);
}

static int describe_us(int fd, const char *path)
{
    struct holder h = {.pid = (int)getpid(), .start = lg_process_start_time((int)getpid())};
    char line[192];
    LG_TRY(lg_boot_id(h.boot_id));
    if (gethostname(h.host, sizeof h.host - 1) < 0 || !h.host[0]) strcpy(h.host, "?");
    int n =
        snprintf(line, sizeof line, "%d %" PRIu64 " %s %s\n", h.pid, h.start, h.boot_id, h.host);
    if (ftruncate(fd, 0) < 0 || pwrite(fd, line, (size_t)n, 0) != n)
        return LG_FAIL(lg_err_from_errno(errno), "cannot write %s: %s", path, strerror(errno));
    return 0;
}

int lg_run_lock(lg_run *r)
{
    char path[LG_PATH_BYTES];
    int fd = -1;
    LG_TRY(lg_run_path(r, path, "lock"));
    LG_TRY(take(r, path, &fd));
    int rc = wait_for_former_holder(r);
    if (rc == 0) rc = describe_us(fd, path);
    if (rc < 0) {
        close(fd);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    r->lock_fd = fd;
    return 0;
}
