/* The run directory: creation, lock, runtime directory; see run.h. What a start continues from is
 * in resume.c. */
#include "supervisor/run.h"
#include "base/check.h"
#include "shm/board.h"
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/pidfd.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORMER_HOLDER_MS_MAX = 10000, RUNTIME_PATH_MAX = 80, RUNTIME_TRIES_MAX = 16 };

void lg_run_init(lg_run *r, const char *dir)
{
    *r = (lg_run){.lock_fd = -1};
    snprintf(r->dir, sizeof r->dir, "%s", dir);
    char absolute[PATH_MAX];
    if (realpath(dir, absolute)) snprintf(r->dir, sizeof r->dir, "%s", absolute);
}

void lg_run_close(lg_run *r)
{
    lg_config_free(&r->config);
    if (r->lock_fd >= 0) close(r->lock_fd);
    r->lock_fd = -1;
}

int lg_run_path(const lg_run *r, char ret[LG_PATH_BYTES], const char *fmt, ...)
{
    char rest[LG_PATH_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(rest, sizeof rest, fmt, ap);
    va_end(ap);
    return lg_path(ret, "%s/%s", r->dir, rest);
}

int lg_read_line(const char *path, char *ret, size_t bytes)
{
    char *text;
    size_t n;
    LG_TRY(lg_read_file(path, bytes - 1, &text, &n));
    text[strcspn(text, "\n")] = 0;
    snprintf(ret, bytes, "%s", text);
    free(text);
    return 0;
}

int lg_run_create(lg_run *r)
{
    char path[LG_PATH_BYTES];
    static const char *const folders[] = {"logs", "samples", "checkpoints"};
    for (size_t i = 0; i < LG_ARRAY_LEN(folders); i++) {
        LG_TRY(lg_run_path(r, path, "%s", folders[i]));
        int rc = lg_mkdirs(path);
        if (rc == 0 && access(path, W_OK | X_OK) < 0) rc = lg_err_from_errno(errno);
        if (rc < 0) {
            char why[512];
            snprintf(why, sizeof why, "%s", lg_err_message());
            lg_err_clear();
            return LG_FAIL(rc == LG_ERR_NOSPACE ? rc : LG_ERR_IO,
                           "the run directory %s cannot be written: %s; set job.dir (or --set "
                           "job.dir=PATH) to a directory that you may write",
                           r->dir, *why ? why : "no permission");
        }
    }
    lg_run_init(r, strcpy((char[LG_PATH_BYTES]){0}, r->dir));
    return 0;
}

static int parse_holder(const char *dir, int *ret_pid, uint64_t *ret_start)
{
    char path[LG_PATH_BYTES], line[64];
    int rc = lg_path(path, "%s/lock", dir);
    if (rc == 0) rc = lg_read_line(path, line, sizeof line);
    if (rc < 0) {
        lg_err_clear();
        return rc;
    }
    return sscanf(line, "%d %" SCNu64, ret_pid, ret_start) == 2 && *ret_pid > 0 ? 0
                                                                                : LG_ERR_NOTFOUND;
}

int lg_run_holder(const char *dir, int *ret_pid)
{
    int pid;
    uint64_t start;
    if (parse_holder(dir, &pid, &start) < 0) return -1;
    int pidfd = pidfd_open(pid, 0);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    if (pidfd >= 0 && (lg_process_start_time(pid) != start || poll(&p, 1, 0) != 0)) {
        close(pidfd);
        pidfd = -1;
    }
    if (pidfd >= 0 && ret_pid) *ret_pid = pid;
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

int lg_run_lock(lg_run *r)
{
    char path[LG_PATH_BYTES], line[64];
    LG_TRY(lg_run_path(r, path, "lock"));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        int pid = 0;
        int pidfd = lg_run_holder(r->dir, &pid);
        if (pidfd >= 0) close(pidfd);
        close(fd);
        return LG_FAIL(LG_ERR_BUSY,
                       "the run in %s is already supervised by lgsup (pid %d); see `lgsup status "
                       "%s`, end it with `lgsup stop %s`",
                       r->dir, pid, r->dir, r->dir);
    }
    int n = snprintf(line, sizeof line, "%d %" PRIu64 "\n", (int)getpid(),
                     lg_process_start_time((int)getpid()));
    int rc = wait_for_former_holder(r);
    if (rc == 0 && (ftruncate(fd, 0) < 0 || pwrite(fd, line, (size_t)n, 0) != n))
        rc = LG_FAIL(lg_err_from_errno(errno), "cannot write %s: %s", path, strerror(errno));
    if (rc == 0)
        r->lock_fd = fd;
    else
        close(fd);
    LG_TRY(rc);
    return 0;
}

static bool usable_base(const char *base)
{
    return base && base[0] == '/' && strlen(base) < RUNTIME_PATH_MAX - 24 &&
           access(base, W_OK | X_OK) == 0;
}

static int make_runtime(const char *base, char ret[LG_PATH_BYTES])
{
    for (int i = 0; i < RUNTIME_TRIES_MAX; i++) {
        uint32_t salt;
        if (getrandom(&salt, sizeof salt, 0) != (ssize_t)sizeof salt)
            return LG_FAIL(LG_ERR_IO, "getrandom: %s", strerror(errno));
        LG_TRY(lg_path(ret, "%s/lg-%u-%08x", base, (unsigned)getuid(), salt));
        if (mkdir(ret, 0700) == 0) return 0;
        if (errno != EEXIST) break;
    }
    return LG_FAIL(lg_err_from_errno(errno), "cannot make a directory for sockets in %s: %s", base,
                   strerror(errno));
}

/* Whoever else could enter it could bind our sockets. */
static int check_private(const char *dir)
{
    struct stat st;
    if (lstat(dir, &st) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "the directory of the sockets, %s: %s", dir,
                       strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077))
        return LG_FAIL(LG_ERR_IO,
                       "the directory of the sockets, %s, must be a directory of user %u with mode "
                       "0700; it belongs to user %u with mode %04o",
                       dir, (unsigned)geteuid(), (unsigned)st.st_uid, st.st_mode & 07777);
    return 0;
}

static int record_runtime(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[LG_PATH_BYTES + 1];
    LG_TRY(lg_run_path(r, path, "runtime"));
    int n = snprintf(line, sizeof line, "%s\n", r->runtime_dir);
    LG_TRY(lg_publish_file(path, line, (size_t)n));
    return 0;
}

/* RuntimeDirectory= of the units. */
static int use_units_runtime(lg_run *r)
{
    const char *dir = getenv("RUNTIME_DIRECTORY");
    if (!dir || dir[0] != '/' || strchr(dir, ':') || strlen(dir) >= RUNTIME_PATH_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "--units is for the units that `lgsup units` writes: RUNTIME_DIRECTORY is "
                       "%s, not one short path",
                       dir ? dir : "not set");
    LG_TRY(check_private(dir));
    LG_TRY(lg_path(r->runtime_dir, "%s", dir));
    LG_TRY(record_runtime(r));
    return 0;
}

int lg_run_runtime_create(lg_run *r)
{
    char user[64];
    if (lg_run_in_units(r)) {
        LG_TRY(use_units_runtime(r));
        return 0;
    }
    snprintf(user, sizeof user, "/run/user/%u", (unsigned)getuid());
    const char *bases[] = {getenv("XDG_RUNTIME_DIR"), user, "/tmp"};
    int rc = -1;
    for (size_t i = 0; i < LG_ARRAY_LEN(bases) && rc < 0; i++) {
        if (!usable_base(bases[i])) continue;
        lg_err_clear();
        rc = make_runtime(bases[i], r->runtime_dir);
    }
    if (rc < 0)
        return LG_FAIL(LG_ERR_IO,
                       "no directory for sockets: set XDG_RUNTIME_DIR to a short path "
                       "that you may write (tried it, %s and /tmp)",
                       user);
    LG_TRY(record_runtime(r));
    return 0;
}

int lg_run_runtime_load(lg_run *r)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "runtime"));
    LG_TRY(lg_read_line(path, r->runtime_dir, sizeof r->runtime_dir));
    LG_TRY(check_private(r->runtime_dir));
    return 0;
}

/* Only what make_runtime has named: a damaged record must not remove anything else. */
static bool is_ours(const char *dir)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "lg-%u-", (unsigned)getuid());
    const char *name = strrchr(dir, '/');
    struct stat st;
    return name && !strncmp(name + 1, prefix, strlen(prefix)) && lstat(dir, &st) == 0 &&
           S_ISDIR(st.st_mode) && st.st_uid == getuid();
}

void lg_run_runtime_remove(lg_run *r)
{
    char path[LG_PATH_BYTES];
    if (!r->runtime_dir[0] && lg_run_runtime_load(r) < 0) {
        lg_err_clear();
        return;
    }
    /* No error is cleared: the caller may have one on its way to the user. */
    if (!lg_run_in_units(r) && is_ours(r->runtime_dir)) lg_remove_tree(r->runtime_dir);
    if (lg_run_path(r, path, "runtime") == 0) unlink(path);
    r->runtime_dir[0] = 0;
}
