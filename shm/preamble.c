/* Reading and judging a board's first bytes; see preamble.h. */
#include "shm/preamble.h"
#include "shm/board.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int lg_boot_id(char ret[40])
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, ret, 36);
    if (fd >= 0) close(fd);
    if (n != 36)
        return LG_FAIL(LG_ERR_IO, "cannot read /proc/sys/kernel/random/boot_id: is /proc mounted?");
    memset(ret + 36, 0, 4);
    return 0;
}

static lg_board_standing unreadable(const char *path, int *ret_code)
{
    *ret_code = LG_FAIL(LG_ERR_CORRUPT, "%s is not a board, or a damaged one", path);
    return LG_BOARD_UNREADABLE;
}

/* The layout of this build, of this boot, in this file. */
static lg_board_standing judge_file(const char *path, const struct lg_board_preamble *p,
                                    const struct stat *st, int *ret_code)
{
    if (st->st_size != (off_t)sizeof(struct lg_board_shared)) {
        *ret_code = LG_FAIL(LG_ERR_CORRUPT, "%s has %lld bytes, not the %zu of lg_board_shared",
                            path, (long long)st->st_size, sizeof(struct lg_board_shared));
        return LG_BOARD_UNREADABLE;
    }
    if (p->inode != st->st_ino && p->ended != LG_BOARD_ENDED) {
        *ret_code = LG_FAIL(LG_ERR_MISMATCH,
                            "%s is a copy of a file of another run directory: the processes that "
                            "it names are not of this one",
                            path);
        return LG_BOARD_COPY;
    }
    *ret_code = 0;
    return LG_BOARD_FITS;
}

static lg_board_standing judge(const char *path, const struct lg_board_preamble *p,
                               const struct stat *st, int *ret_code)
{
    char boot_id[40];
    if (p->magic != LG_BOARD_MAGIC || p->boot_id[36]) return unreadable(path, ret_code);
    if ((*ret_code = lg_boot_id(boot_id)) < 0) return LG_BOARD_UNREADABLE;
    if (strncmp(p->boot_id, boot_id, sizeof boot_id) != 0) {
        *ret_code = LG_FAIL(LG_ERR_MISMATCH,
                            "%s is from before the machine's last start: the run must be started "
                            "again",
                            path);
        return LG_BOARD_OTHER_BOOT;
    }
    lg_board_standing other = p->ended == LG_BOARD_ENDED ? LG_BOARD_OVER : LG_BOARD_OTHER_BUILD;
    const char *differs = lg_layout_difference(p->layout_hash, lg_layout_hash());
    if (p->version != LG_LAYOUT_VERSION) {
        *ret_code = LG_FAIL(LG_ERR_MISMATCH, "%s has layout version %" PRIu64 ", this program %d",
                            path, p->version, LG_LAYOUT_VERSION);
        return other;
    }
    if (differs || p->bytes != sizeof(struct lg_board_shared)) {
        *ret_code =
            LG_FAIL(LG_ERR_MISMATCH,
                    "%s was made by another build: the layout of %s differs (hash "
                    "%016" PRIx64 ", of this build %016" PRIx64 ")",
                    path, differs ? differs : "lg_board_shared", p->layout_hash, lg_layout_hash());
        return other;
    }
    return judge_file(path, p, st, ret_code);
}

lg_board_standing lg_board_look_fd(const char *path, int fd, struct lg_board_preamble *ret,
                                   int *ret_code)
{
    struct stat st;
    ssize_t n = fstat(fd, &st) < 0 ? -1 : pread(fd, ret, sizeof *ret, 0);
    if (n < 0) {
        *ret_code = LG_FAIL(lg_err_from_errno(errno), "cannot read the board %s: %s", path,
                            strerror(errno));
        return LG_BOARD_UNREADABLE;
    }
    if (n < (ssize_t)sizeof *ret) return unreadable(path, ret_code);
    return judge(path, ret, &st, ret_code);
}

lg_board_standing lg_board_look(const char *path, struct lg_board_preamble *ret, int *ret_code)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        bool missing = errno == ENOENT;
        *ret_code = LG_FAIL(lg_err_from_errno(errno), "cannot open the board %s: %s", path,
                            strerror(errno));
        return missing ? LG_BOARD_MISSING : LG_BOARD_UNREADABLE;
    }
    lg_board_standing standing = lg_board_look_fd(path, fd, ret, ret_code);
    close(fd);
    return standing;
}

/* Of the open file, so that neither another descriptor's end nor a fork releases it. */
static struct flock lock_of(short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
}

void lg_board_hold(int fd)
{
    struct flock lock = lock_of(F_RDLCK);
    fcntl(fd, F_OFD_SETLK, &lock);
}

bool lg_board_is_held(const char *path)
{
    struct flock lock = lock_of(F_WRLCK);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    bool held = fd >= 0 && fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
    if (fd >= 0) close(fd);
    return held;
}
