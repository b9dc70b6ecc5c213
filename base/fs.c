/* Files; see fs.h. Publishing follows the one order that survives a power cut: data, fsync, rename,
 * fsync of the directory. */
#include "base/fs.h"
#include "base/check.h"
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

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

/* The name is made durable: what is published below it would be lost with it. */
static int make_dir(const char *path)
{
    char parent[LG_PATH_BYTES];
    if (mkdir(path, 0700) < 0)
        return errno == EEXIST
                   ? 0
                   : LG_FAIL(lg_err_from_errno(errno), "cannot create the directory %s: %s", path,
                             strerror(errno));
    LG_TRY(parent_of(path, parent));
    LG_TRY(lg_fsync_dir(parent));
    return 0;
}

int lg_mkdirs(const char *path)
{
    char p[LG_PATH_BYTES];
    LG_TRY(lg_path(p, "%s", path));
    for (char *s = p + 1;; s++) {
        if (*s != '/' && *s) continue;
        char c = *s;
        *s = 0;
        LG_TRY(make_dir(p));
        *s = c;
        if (!c) break;
    }
    struct stat st;
    if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode))
        return LG_FAIL(LG_ERR_IO, "%s exists and is not a directory", path);
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0;
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

int lg_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    int rc = 0;
    char *data = NULL;
    struct stat st;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        rc = LG_FAIL(LG_ERR_IO, "%s is not a regular file", path);
        goto out;
    }
    if ((uint64_t)st.st_size > bytes_max) {
        rc = LG_FAIL(LG_ERR_CORRUPT, "%s has %lld bytes, more than the %zu expected", path,
                     (long long)st.st_size, bytes_max);
        goto out;
    }
    size_t bytes = (size_t)st.st_size, at = 0;
    data = malloc(bytes + 1);
    if (!data) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for the %zu bytes of %s", bytes, path);
        goto out;
    }
    while (at < bytes) {
        ssize_t n = read(fd, data + at, bytes - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            rc = LG_FAIL(LG_ERR_IO, "reading %s at byte %zu: %s", path, at,
                         n ? strerror(errno) : "the file became shorter");
            goto out;
        }
        at += (size_t)n;
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

int lg_close_text(FILE *text)
{
    bool bad = ferror(text);
    return fclose(text) == 0 && !bad ? 0 : -1;
}

int lg_write_all(int fd, const void *data, size_t bytes)
{
    const char *p = data;
    while (bytes) {
        ssize_t n = write(fd, p, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return LG_FAIL(lg_err_from_errno(errno), "write failed: %s", strerror(errno));
        p += n;
        bytes -= (size_t)n;
    }
    return 0;
}

int lg_fsync_dir(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    int bad = fsync(fd) < 0 ? errno : 0;
    close(fd);
    if (bad) return LG_FAIL(lg_err_from_errno(bad), "fsync of %s: %s", path, strerror(bad));
    return 0;
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
    if (rc == 0 && fsync(fd) < 0)
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
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
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
