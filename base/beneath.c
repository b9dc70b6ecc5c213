/* Links that stay inside a folder; see beneath.h.
 *
 * The kernel decides while it walks the name (openat2, RESOLVE_BENEATH). It refuses absolute links even
 * if they lead back into the folder, and old kernels and some sandboxes do not have it: then the name
 * is resolved first, and after the opening the descriptor is asked where it is. */
#include "base/beneath.h"
#include "base/fs.h"
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FLAGS = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK };

/* Both absolute and without links. */
static bool is_inside(const char *folder, const char *path)
{
    size_t n = strlen(folder);
    if (n == 1) return true; /* "/" */
    return strncmp(folder, path, n) == 0 && (path[n] == '/' || path[n] == 0);
}

bool lg_is_beneath(const char *folder, const char *path, int *ret_errno)
{
    char *root = realpath(folder, NULL), *real = root ? realpath(path, NULL) : NULL;
    int e = root && real ? 0 : errno;
    bool inside = root && real && is_inside(root, real);
    free(root);
    free(real);
    *ret_errno = e == ENOENT || e == ENOTDIR || e == ELOOP ? 0 : e;
    return inside;
}

/* Where the descriptor's file is now. */
static bool is_open_inside(const char *root, int fd)
{
    char name[64], at[LG_PATH_BYTES];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, at, sizeof at - 1);
    if (n <= 0 || n == sizeof at - 1) return false;
    at[n] = 0;
    return is_inside(root, at);
}

static int open_resolved(const char *folder, const char *relative)
{
    char path[LG_PATH_BYTES];
    int fd = -1, e = ENAMETOOLONG;
    if (lg_path(path, "%s/%s", folder, relative) < 0) {
        lg_err_clear();
        errno = e;
        return -1;
    }
    char *root = realpath(folder, NULL), *real = root ? realpath(path, NULL) : NULL;
    if (real && is_inside(root, real)) {
        fd = open(real, FLAGS | O_NOFOLLOW);
        e = errno;
        if (fd >= 0 && !is_open_inside(root, fd)) {
            close(fd);
            fd = -1;
            e = EXDEV;
        }
    } else {
        e = real ? EXDEV : errno;
    }
    free(root);
    free(real);
    if (fd < 0) errno = e;
    return fd;
}

int lg_open_beneath(const char *folder, const char *relative)
{
    int dir = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return -1;
    struct open_how how = {.flags = FLAGS, .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS};
    int fd = (int)syscall(SYS_openat2, dir, relative, &how, sizeof how), e = errno;
    close(dir);
    if (fd >= 0) return fd;
    if (e == ENOENT || e == EACCES || e == EMFILE || e == ENFILE || e == ELOOP) {
        errno = e;
        return -1;
    }
    return open_resolved(folder, relative);
}
