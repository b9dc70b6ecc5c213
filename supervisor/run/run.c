/* The run directory: creation, runtime directory; see run.h. The lock is in lock.c, what a start continues
 * from in resume.c. */
#include "supervisor/run/run.h"
#include "base/check.h"
#include "config/manifest.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RUNTIME_PATH_MAX = 80, RUNTIME_TRIES_MAX = 16 };

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

int lg_run_is_there(const char *dir)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/config.toml", dir));
    if (lg_path_exists(path)) return 0;
    if (errno != ENOENT && errno != ENOTDIR)
        return LG_FAIL(lg_err_from_errno(errno),
                       "cannot look into %s: %s; a run belongs to the user who started it", dir,
                       strerror(errno));
    return LG_FAIL(LG_ERR_NOTFOUND,
                   "%s is not a run directory (no config.toml in it): name the job.dir of a run "
                   "that was started",
                   dir);
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

/* Whoever may write there could plant what a start believes: a board, a checkpoint, a program's path
 * (DIR/programs). A group that shares the directory is the owner's choice. */
static int check_owner(const char *dir)
{
    struct stat st;
    if (stat(dir, &st) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot look at %s: %s", dir, strerror(errno));
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return LG_FAIL(
            LG_ERR_IO,
            "the run directory %s belongs to user %u, not to %u, who starts the run: its "
            "owner could make the run execute any program; start it as that user, `chown` "
            "it, or set job.dir to a directory of your own",
            dir, (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_mode & S_IWOTH)
        return LG_FAIL(
            LG_ERR_IO,
            "the run directory %s may be written by everybody (mode %04o), who could make "
            "the run execute any program: `chmod o-w %s`",
            dir, st.st_mode & 07777, dir);
    return 0;
}

int lg_run_make_folders(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    static const char *const folders[] = {"logs", "samples", "checkpoints"};
    for (size_t i = 0; i < LG_ARRAY_LEN(folders); i++) {
        LG_TRY(lg_run_path(r, path, "%s", folders[i]));
        int rc = lg_mkdirs(path);
        if (rc == 0 && access(path, W_OK | X_OK) < 0)
            rc = LG_FAIL(lg_err_from_errno(errno), "%s: %s", path, strerror(errno));
        if (rc < 0) {
            char why[512];
            snprintf(why, sizeof why, "%s", lg_err_message());
            lg_err_clear();
            return LG_FAIL(rc == LG_ERR_NOSPACE ? rc : LG_ERR_IO,
                           "the run directory %s cannot be written: %s; set job.dir (or --set "
                           "job.dir=PATH) to a directory that you may write",
                           r->dir, why);
        }
        LG_TRY(check_owner(path));
    }
    return 0;
}

/* What stands there instead of the link: an empty folder, or a link to elsewhere. */
static int clear_place(const char *path, const char *shared)
{
    if (unlink(path) == 0 || rmdir(path) == 0 || errno == ENOENT) return 0;
    return LG_FAIL(
        LG_ERR_CONFIG,
        "%s has files of its own, and with hosts.shared the checkpoints of all hosts lie "
        "in %s: move what is in it there, and remove it",
        path, shared);
}

int lg_run_share_checkpoints(const lg_run *r, const lg_config *config)
{
    char path[LG_PATH_BYTES], shared[LG_PATH_BYTES], target[PATH_MAX], now[PATH_MAX];
    if (!lg_config_shares_checkpoints(config)) return 0;
    LG_TRY(lg_run_path(r, path, "checkpoints"));
    LG_TRY(lg_path(shared, "%s/checkpoints", config->hosts_shared));
    LG_TRY(lg_mkdirs(shared));
    LG_TRY(check_owner(shared));
    if (!realpath(shared, target))
        return LG_FAIL(lg_err_from_errno(errno), "hosts.shared: %s: %s", shared, strerror(errno));
    if (realpath(path, now) && !strcmp(now, target)) return 0;
    LG_TRY(clear_place(path, target));
    if (symlink(target, path) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot make the link %s: %s", path,
                       strerror(errno));
    LG_TRY(lg_fsync_dir(r->dir));
    return 0;
}

void lg_run_remove_leftovers(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    if (lg_config_shares_checkpoints(r->config)) return;
    if (lg_run_path(r, path, "checkpoints") < 0)
        lg_err_clear();
    else
        lg_manifest_remove_leftovers(path, r->config->job_name, UINT64_MAX);
}

int lg_run_create(lg_run *r)
{
    LG_TRY(lg_run_make_folders(r));
    LG_TRY(check_owner(r->dir));
    lg_run_init(r, strcpy((char[LG_PATH_BYTES]){0}, r->dir));
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

static int record_runtime(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[LG_PATH_BYTES + 1];
    LG_TRY(lg_run_path(r, path, "runtime"));
    int n = snprintf(line, sizeof line, "%s\n", r->runtime_dir);
    LG_TRY(lg_publish_file(path, line, (size_t)n));
    return 0;
}

/* RuntimeDirectory= of the units. */
int lg_run_runtime_use(lg_run *r, const char *dir)
{
    if (!dir || dir[0] != '/' || strchr(dir, ':') || strlen(dir) >= RUNTIME_PATH_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "--units is for the units that `lgsup units` writes: RUNTIME_DIRECTORY is "
                       "%s, not one short path",
                       dir ? dir : "not set");
    LG_TRY(lg_check_private_dir(dir));
    LG_TRY(lg_path(r->runtime_dir, "%s", dir));
    LG_TRY(record_runtime(r));
    return 0;
}

int lg_run_runtime_create(lg_run *r)
{
    char user[64];
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
    rc = record_runtime(r);
    if (rc < 0) { /* nobody would ever find it */
        rmdir(r->runtime_dir);
        r->runtime_dir[0] = 0;
    }
    LG_TRY(rc);
    return 0;
}

int lg_run_runtime_load(lg_run *r)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "runtime"));
    LG_TRY(lg_read_line(path, r->runtime_dir, sizeof r->runtime_dir));
    LG_TRY(lg_check_private_dir(r->runtime_dir));
    return 0;
}

/* Where it was, if that can be: who lives knows the path. */
static int make_again(const char *dir)
{
    if (mkdir(dir, 0700) < 0 && errno != EEXIST)
        return LG_FAIL(LG_ERR_IO, "cannot make the directory of the sockets, %s, again: %s", dir,
                       strerror(errno));
    LG_TRY(lg_check_private_dir(dir));
    return 0;
}

int lg_run_runtime_restore(lg_run *r, bool may_move)
{
    char recorded[LG_PATH_BYTES], path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "runtime"));
    int rc = lg_read_line(path, recorded, sizeof recorded);
    if (rc == 0) snprintf(r->runtime_dir, sizeof r->runtime_dir, "%s", recorded);
    bool known = r->runtime_dir[0] == '/' && strlen(r->runtime_dir) < RUNTIME_PATH_MAX;
    bool kept = known && make_again(r->runtime_dir) == 0;
    if (!kept && !may_move)
        return known ? LG_ERR_IO
                     : LG_FAIL(LG_ERR_IO, "%s does not name the directory of the sockets", path);
    lg_err_clear();
    if (kept && rc < 0) LG_TRY(record_runtime(r));
    if (!kept) LG_TRY(lg_run_runtime_create(r));
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

/* No error is cleared, other than of a record that is not there: the caller may have one on its way to
 * the user. */
static void end_runtime(lg_run *r, bool remove)
{
    char path[LG_PATH_BYTES];
    if (!r->runtime_dir[0] && lg_run_runtime_load(r) < 0) {
        lg_err_clear();
        return;
    }
    if (remove && is_ours(r->runtime_dir)) lg_remove_tree(r->runtime_dir);
    if (lg_run_path(r, path, "runtime") == 0) unlink(path);
    r->runtime_dir[0] = 0;
}

void lg_run_runtime_remove(lg_run *r)
{
    end_runtime(r, true);
}

void lg_run_runtime_forget(lg_run *r)
{
    end_runtime(r, false);
}
