/* Files; see fs.h. Publishing follows the one order that survives a power cut: data, fsync, rename,
 * fsync of the directory. */
#include "base/fs.h"
#include "base/check.h"
#include "base/heartbeat.h"
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { SYNC_BYTES = 16 << 20 }; /* of data on its way to the disk between two heartbeats */

int lg_path(char ret_path[LG_PATH_BYTES], const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(ret_path, LG_PATH_BYTES, fmt, ap);
    va_end(ap);
    if (n < 0 || n >= LG_PATH_BYTES)
        return LG_FAIL(LG_ERR_CONFIG, "path longer than %d bytes: %.80s...", LG_PATH_BYTES,
                       ret_path);
    return 0;
}

size_t lg_path_list_part(const char *list)
{
    size_t n = 0;
    for (int level = 0; list[n] && (level > 0 || list[n] != ','); n++)
        level += (list[n] == '{') - (list[n] == '}');
    return n;
}

/* Directory that holds path. */
static int parent_of(const char *path, char ret[LG_PATH_BYTES])
{
    LG_TRY(lg_path(ret, "%s", path));
    char *slash = strrchr(ret, '/');
    if (slash)
        slash[slash == ret] = 0;
    else
        strcpy(ret, ".");
    return 0;
}

/* found: somebody may have made it whose directories cannot be read, or lie where nothing can be made durable. */
static int sync_dir(const char *path, bool found)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && found && errno == EACCES) return 0;
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    int bad = lg_fsync(fd) < 0 ? errno : 0;
    close(fd);
    if (found && (bad == EINVAL || bad == EROFS)) return 0;
    if (bad) return LG_FAIL(lg_err_from_errno(bad), "fsync of %s: %s", path, strerror(bad));
    return 0;
}

/* What is published below a name would be lost with it. */
static int sync_name(const char *path, bool found)
{
    char parent[LG_PATH_BYTES];
    LG_TRY(parent_of(path, parent));
    LG_TRY(sync_dir(parent, found));
    return 0;
}

/* A name that is there may be of a process that died before it had made it durable. That one made nothing below it, so
 * of the names that are there only the last is in doubt. found: that one, so far; "": none. */
static int make_dir(const char *path, char found[LG_PATH_BYTES])
{
    struct stat st;
    if (stat(path, &st) == 0) {
        strcpy(found, path);
        return 0;
    }
    if (*found) LG_TRY(sync_name(found, true));
    *found = 0;
    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return LG_FAIL(lg_err_from_errno(errno), "cannot create the directory %s: %s", path,
                       strerror(errno));
    LG_TRY(sync_name(path, false));
    return 0;
}

int lg_mkdirs(const char *path)
{
    char p[LG_PATH_BYTES], found[LG_PATH_BYTES] = "";
    LG_TRY(lg_path(p, "%s", path));
    for (char *s = p + 1;; s++) {
        if (*s != '/' && *s) continue;
        char c = *s;
        *s = 0;
        if (s[-1] != '/' || s == p + 1) LG_TRY(make_dir(p, found));
        *s = c;
        if (!c) break;
    }
    if (*found) LG_TRY(sync_name(found, true));
    struct stat st;
    if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode))
        return LG_FAIL(LG_ERR_IO, "%s exists and is not a directory", path);
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    if (remove(path) < 0 && errno != ENOENT) return -1;
    lg_heartbeat();
    return 0;
}

int lg_remove_tree(const char *path)
{
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT)
        return LG_FAIL(lg_err_from_errno(errno), "cannot remove %s: %s", path, strerror(errno));
    return 0;
}

bool lg_path_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

int lg_check_private_dir(const char *path)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "the directory of the sockets, %s: %s", path,
                       strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077))
        return LG_FAIL(LG_ERR_IO,
                       "the directory of the sockets, %s, must be a directory of user %u with mode "
                       "0700; it belongs to user %u with mode %04o",
                       path, (unsigned)geteuid(), (unsigned)st.st_uid, st.st_mode & 07777);
    return 0;
}

int lg_open_file(const char *path, int *ret_fd, uint64_t *ret_bytes)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return LG_FAIL(LG_ERR_IO, "%s is not a regular file", path);
    }
    *ret_fd = fd;
    *ret_bytes = (uint64_t)st.st_size;
    return 0;
}

int lg_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes)
{
    int fd, rc = 0;
    char *data = NULL;
    uint64_t size;
    LG_TRY(lg_open_file(path, &fd, &size));
    size_t bytes = (size_t)size, at = 0;
    if (size > bytes_max) {
        rc = LG_FAIL(LG_ERR_CORRUPT, "%s has %zu bytes, more than the %zu expected", path, bytes,
                     bytes_max);
        goto out;
    }
    data = malloc(bytes + 1);
    if (!data) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for the %zu bytes of %s", bytes, path);
        goto out;
    }
    while (at < bytes) {
        ssize_t n = read(fd, data + at, LG_MIN(bytes - at, (size_t)LG_PIECE_BYTES));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            rc = LG_FAIL(LG_ERR_IO, "reading %s at byte %zu: %s", path, at,
                         n ? strerror(errno) : "the file became shorter");
            goto out;
        }
        at += (size_t)n;
        lg_heartbeat();
    }
    data[bytes] = 0;
    *ret_data = data;
    *ret_bytes = bytes;
    data = NULL;
out:
    free(data);
    close(fd);
    return rc;
}

int lg_raise_open_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot ask for the limit of open files: %s", strerror(errno));
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max >= LG_OPEN_FILES_MIN) return 0;
    return LG_FAIL(
        LG_ERR_IO,
        "only %llu files may be open (the hard limit, `ulimit -Hn`), and a run needs %d: "
        "raise it in /etc/security/limits.conf, by LimitNOFILE= of the unit, or by "
        "--ulimit nofile= of the container",
        (unsigned long long)limit.rlim_max, LG_OPEN_FILES_MIN);
}

int lg_close_text(FILE *text)
{
    bool bad = ferror(text);
    return fclose(text) == 0 && !bad ? 0 : -1;
}

int lg_write_all(int fd, const void *data, size_t bytes)
{
    const char *p = data;
    while (bytes) {
        ssize_t n = write(fd, p, LG_MIN(bytes, (size_t)LG_PIECE_BYTES));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return LG_FAIL(lg_err_from_errno(errno), "write failed: %s", strerror(errno));
        p += n;
        bytes -= (size_t)n;
        lg_heartbeat();
    }
    return 0;
}

/* One piece is waited for while the next is already on its way. An error is told once, here or by fsync();
 * a file system that does not know the call leaves everything to that. */
static int sync_data(int fd, off_t end)
{
    const unsigned wait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    for (off_t at = 0; at < end; at += SYNC_BYTES) {
        off_t next = at + SYNC_BYTES;
        bool bad = next < end && sync_file_range(fd, next, SYNC_BYTES, SYNC_FILE_RANGE_WRITE) < 0;
        if (bad || sync_file_range(fd, at, SYNC_BYTES, wait) < 0)
            return errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP ? 0 : -1;
        lg_heartbeat();
    }
    return 0;
}

int lg_fsync(int fd)
{
    struct stat st;
    if (fstat(fd, &st) < 0) return -1;
    if (S_ISREG(st.st_mode) && st.st_size > SYNC_BYTES && sync_data(fd, st.st_size) < 0) return -1;
    if (fsync(fd) < 0) return -1;
    lg_heartbeat();
    return 0;
}

int lg_fsync_dir(const char *path)
{
    return sync_dir(path, false);
}

int lg_publish_file(const char *path, const void *data, size_t bytes)
{
    char tmp[LG_PATH_BYTES], dir[LG_PATH_BYTES];
    LG_TRY(lg_path(tmp, "%s.tmp.%d", path, (int)getpid()));
    LG_TRY(parent_of(path, dir));
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot create %s: %s", tmp, strerror(errno));
    int rc = lg_write_all(fd, data, bytes);
    if (rc == 0 && lg_fsync(fd) < 0)
        rc = LG_FAIL(lg_err_from_errno(errno), "fsync of %s: %s", tmp, strerror(errno));
    close(fd);
    if (rc == 0 && rename(tmp, path) < 0)
        rc = LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", tmp, path,
                     strerror(errno));
    if (rc < 0) {
        unlink(tmp);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    LG_TRY(lg_fsync_dir(dir));
    return 0;
}

uint64_t lg_hash(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

int lg_hash_file(const char *path, uint64_t *ret_hash, uint64_t *ret_bytes)
{
    enum { CHUNK = 1 << 20 };
    int fd;
    uint64_t size;
    LG_TRY(lg_open_file(path, &fd, &size));
    XXH3_state_t *state = XXH3_createState();
    char *buf = malloc(CHUNK);
    int rc = 0;
    uint64_t total = 0;
    if (!state || !buf) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory to hash %s", path);
        goto out;
    }
    XXH3_64bits_reset(state);
    for (;;) {
        ssize_t n = read(fd, buf, CHUNK);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            rc = LG_FAIL(LG_ERR_IO, "reading %s: %s", path, strerror(errno));
            goto out;
        }
        if (n == 0) break;
        XXH3_64bits_update(state, buf, (size_t)n);
        total += (uint64_t)n;
        lg_heartbeat();
    }
    *ret_hash = XXH3_64bits_digest(state);
    if (ret_bytes) *ret_bytes = total;
out:
    XXH3_freeState(state);
    free(buf);
    close(fd);
    return rc;
}

int lg_program_dir(char ret_path[LG_PATH_BYTES])
{
    ssize_t n = readlink("/proc/self/exe", ret_path, LG_PATH_BYTES - 1);
    if (n < 0) return LG_FAIL(LG_ERR_IO, "cannot read /proc/self/exe: %s", strerror(errno));
    ret_path[n] = 0;
    char *slash = strrchr(ret_path, '/');
    if (slash) *slash = 0;
    return 0;
}
