/* libchaos.so: preloaded into the processes of a run; makes one chosen call fail, or all writes;
 * makes fsync slow, and sets the clock.
 *
 * Only calls that come from the program's own code count (all of it is linked into the program), not
 * those of libzmq or libc: the return address tells. The shim does nothing in other programs. */
#include "tests/chaos/shim.h"
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
/* Not zmq.h: the shim must not need it. */
typedef struct zmq_pollitem_t zmq_pollitem_t;

static struct chaos_control *control;
static uint64_t program;
static uintptr_t code_from, code_to;

static const int errno_of[CHAOS_CALLS][2] = {
#define CALL(name, type, parameters, arguments, failure, first, other)                             \
    [CHAOS_CALL_##name] = {first, other},
#define CALL_BY_HAND(name, first, other) [CHAOS_CALL_##name] = {first, other},
#include "tests/chaos/calls.def"
#undef CALL
#undef CALL_BY_HAND
};

static int first_object(struct dl_phdr_info *info, size_t bytes, void *arg)
{
    (void)bytes, (void)arg;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
        code_from = info->dlpi_addr;
        code_to = info->dlpi_addr + p->p_vaddr + p->p_memsz;
    }
    return 1; /* the program itself comes first */
}

__attribute__((constructor)) static void attach(void)
{
    const char *path = getenv("LG_CHAOS_CONTROL");
    int which = 0;
    while (which < CHAOS_PROGRAMS &&
           strcmp(program_invocation_short_name, chaos_programs[which]) != 0)
        which++;
    if (!path || which == CHAOS_PROGRAMS) return;
    dl_iterate_phdr(first_object, NULL);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    struct stat st;
    void *at = fstat(fd, &st) == 0 && st.st_size >= (off_t)sizeof *control
                   ? (void *)syscall(SYS_mmap, NULL, sizeof *control, PROT_READ | PROT_WRITE,
                                     MAP_SHARED, fd, 0)
                   : MAP_FAILED;
    syscall(SYS_close, fd);
    program = (uint64_t)which;
    if (at != MAP_FAILED) control = at;
}

static int site_of(enum chaos_call call, uintptr_t offset)
{
    uint64_t key = 1ull << 60 | program << 56 | (uint64_t)call << 48 | offset;
    uint32_t i = (uint32_t)((key * 0x9E3779B97F4A7C15ull) >> 52);
    for (int n = 0; n < CHAOS_SITES_MAX; n++, i = (i + 1) % CHAOS_SITES_MAX) {
        uint64_t there = 0;
        if (atomic_compare_exchange_strong(&control->site[i].key, &there, key) || there == key)
            return (int)i;
    }
    return -1;
}

/* Is this the call that is to fail? */
static bool fails(enum chaos_call call, void *from)
{
    uintptr_t address = (uintptr_t)from;
    if (!control || address < code_from || address >= code_to) return false;
    int i = site_of(call, address - code_from);
    if (i < 0) return false;
    atomic_fetch_add_explicit(&control->site[i].hits, 1, memory_order_relaxed);
    uint32_t armed = (uint32_t)i + 1, pass = atomic_load(&control->pass);
    if (atomic_load(&control->armed) != armed) return false;
    if (pass && atomic_compare_exchange_strong(&control->pass, &pass, pass - 1)) return false;
    if (!atomic_compare_exchange_strong(&control->armed, &armed, 0)) return false;
    atomic_fetch_add(&control->site[i].fails, 1);
    atomic_store(&control->fired_pid, (uint32_t)getpid());
    atomic_store(&control->fired, (uint32_t)i + 1);
    errno = errno_of[call][atomic_load(&control->other_errno) & 1];
    return true;
}

#define NEXT(name)                                                                                 \
    static __typeof__(&name) next;                                                                 \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAILS(name) fails(CHAOS_CALL_##name, __builtin_return_address(0))

#define CALL(name, type, parameters, arguments, failure, first, other)                             \
    type name parameters;                                                                          \
    type name parameters                                                                           \
    {                                                                                              \
        NEXT(name);                                                                                \
        if (FAILS(name)) return failure;                                                           \
        return next arguments;                                                                     \
    }
#define CALL_BY_HAND(name, first, other)
#pragma GCC diagnostic ignored "-Wnonnull-compare"
#include "tests/chaos/calls.def"
#undef CALL
#undef CALL_BY_HAND

/* ---- a full disk ---- */

/* Memory files are no files of the disk. */
static bool is_full(int fd)
{
    struct stat st;
    return control && atomic_load_explicit(&control->disk_full, memory_order_relaxed) &&
           syscall(SYS_fcntl, fd, F_GET_SEALS) < 0 &&
           syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) == 0 && S_ISREG(st.st_mode);
}

/* Do the blocks that the file has reach so far, those reserved behind its end among them? */
static bool has_room(int fd, off_t end)
{
    struct stat st;
    return syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) == 0 && end <= st.st_blocks * 512;
}

ssize_t write(int fd, const void *p, size_t n)
{
    NEXT(write);
    if (FAILS(write)) return -1;
    if (!is_full(fd)) return next(fd, p, n);
    if (n > 1 && (n & 8)) return next(fd, p, n / 2); /* the last bytes that fit */
    errno = ENOSPC;
    return -1;
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    NEXT(pwrite);
    if (FAILS(pwrite)) return -1;
    if (!is_full(fd) || has_room(fd, at + (off_t)n)) return next(fd, p, n, at);
    if (n > 1 && (n & 8)) return next(fd, p, n / 2, at);
    errno = ENOSPC;
    return -1;
}

size_t fwrite(const void *p, size_t size, size_t n, FILE *f)
{
    NEXT(fwrite);
    if (f == stdout || f == stderr) return next(p, size, n, f);
    if (FAILS(fwrite)) {
        f->_flags |=
            0x20; /* glibc's _IO_ERR_SEEN, which a call that fails sets: what ferror tells */
        return 0;
    }
    if (!is_full(fileno(f))) return next(p, size, n, f);
    errno = ENOSPC;
    return 0;
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    NEXT(fallocate);
    if (FAILS(fallocate)) return -1;
    if (!is_full(fd) || has_room(fd, at + n)) return next(fd, mode, at, n);
    errno = ENOSPC;
    return -1;
}

int posix_fallocate(int fd, off_t at, off_t n)
{
    NEXT(posix_fallocate);
    if (FAILS(posix_fallocate)) return errno;
    return is_full(fd) && !has_room(fd, at + n) ? ENOSPC : next(fd, at, n);
}

/* ---- a slow disk ---- */

static void be_slow(void)
{
    uint32_t ms = control ? atomic_load_explicit(&control->slow_ms, memory_order_relaxed) : 0;
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    while (ms && syscall(SYS_nanosleep, &left, &left) < 0 && errno == EINTR) continue;
}

int fsync(int fd)
{
    NEXT(fsync);
    if (FAILS(fsync)) return -1;
    be_slow();
    return next(fd);
}

int fdatasync(int fd)
{
    NEXT(fdatasync);
    be_slow();
    return next(fd);
}

int msync(void *at, size_t n, int flags)
{
    NEXT(msync);
    be_slow();
    return next(at, n, flags);
}

int sync_file_range(int fd, off_t at, off_t n, unsigned flags)
{
    NEXT(sync_file_range);
    be_slow();
    return next(fd, at, n, flags);
}

/* ---- the clock of the day ---- */

static time_t off(void)
{
    return control ? (time_t)atomic_load_explicit(&control->clock_s, memory_order_relaxed) : 0;
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    NEXT(clock_gettime);
    int rc = next(id, t);
    if (rc == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI))
        t->tv_sec += off();
    return rc;
}

int gettimeofday(struct timeval *t, void *zone)
{
    NEXT(gettimeofday);
    int rc = next(t, zone);
    if (rc == 0 && t) t->tv_sec += off();
    return rc;
}

time_t time(time_t *ret)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (ret) *ret = t.tv_sec;
    return t.tv_sec;
}

/* ---- irregular ---- */

int open(const char *path, int flags, ...)
{
    NEXT(open);
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    if (FAILS(open)) return -1;
    if (control && (flags & O_CREAT) && atomic_load(&control->disk_full) &&
        syscall(SYS_faccessat, AT_FDCWD, path, F_OK) < 0) {
        errno = ENOSPC;
        return -1;
    }
    return next(path, flags, mode);
}

int fcntl(int fd, int command, ...)
{
    NEXT(fcntl);
    va_list ap;
    va_start(ap, command);
    void *arg = va_arg(ap, void *);
    va_end(ap);
    if (FAILS(fcntl)) return -1;
    return next(fd, command, arg);
}

long syscall(long number, ...)
{
    NEXT(syscall);
    long a[6];
    va_list ap;
    va_start(ap, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(ap, long);
    va_end(ap);
    if (FAILS(syscall)) return -1;
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    NEXT(mmap);
    if (FAILS(mmap)) return MAP_FAILED;
    return next(at, n, prot, flags, fd, offset);
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files,
                const posix_spawnattr_t *attr, char *const *argv, char *const *envp)
{
    NEXT(posix_spawn);
    if (FAILS(posix_spawn)) return errno;
    return next(pid, path, files, attr, argv, envp);
}
