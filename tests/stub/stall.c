/* libstall.so: preloaded into lgsup, a disk that stalls (tests/bench/bench_loop.c). While the file
 * $LG_STALL is there, what lgsup itself writes and syncs takes a second a call: fsync, fdatasync, rename,
 * and writes to regular files. Other programs, its stages among them, are not slowed; $LG_STALL_PROGRAM: another one
 * instead of lgsup. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void stall(int fd)
{
    static const struct timespec second = {.tv_sec = 1};
    const char *path = getenv("LG_STALL"), *of = getenv("LG_STALL_PROGRAM");
    struct stat st;
    if (!path || strcmp(program_invocation_short_name, of ? of : "lgsup") != 0 ||
        access(path, F_OK) < 0)
        return;
    if (fd >= 0 && (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))) return;
    nanosleep(&second, NULL);
}

#pragma GCC visibility push(default) /* they stand in front of libc's */

#define NEXT(name)                                                                                 \
    static __typeof__(&name) next;                                                                 \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int fsync(int fd)
{
    NEXT(fsync);
    stall(-1);
    return next(fd);
}
int fdatasync(int fd)
{
    NEXT(fdatasync);
    stall(-1);
    return next(fd);
}
int rename(const char *from, const char *to)
{
    NEXT(rename);
    stall(-1);
    return next(from, to);
}
ssize_t write(int fd, const void *p, size_t n)
{
    NEXT(write);
    stall(fd);
    return next(fd, p, n);
}
ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    NEXT(pwrite);
    stall(fd);
    return next(fd, p, n, at);
}
