/* See slow.h. */
#include "tests/sim/slow.h"
#include "base/clock.h"
#include "base/philox.h"
#include "bus/wake.h"
#include "kernels/device.h"
#include "tests/sim/wrap.h"
#include <fcntl.h>
#include <fts.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { FDS_MAX = 1024 };

static struct {
    struct slow_machine m;
    const struct lg_board_row *row; /* NULL: the machine is quick */
    int64_t skew_ns, began_ns, oldest_ns, at_ns;
    int64_t dirty[FDS_MAX]; /* bytes that were written and are not on the disk yet */
    void (*at)(void *);
    void *arg;
} g;

REAL(int64_t, lg_now_ns, void);
REAL(ssize_t, write, int, const void *, size_t);
REAL(ssize_t, read, int, void *, size_t);
REAL(ssize_t, __read_chk, int, void *, size_t, size_t);
REAL(ssize_t, pread, int, void *, size_t, off_t);
REAL(ssize_t, __pread_chk, int, void *, size_t, off_t, size_t);
REAL(int, fsync, int);
REAL(int, sync_file_range, int, off_t, off_t, unsigned);
REAL(int, fallocate, int, int, off_t, off_t);
REAL(void *, memcpy, void *, const void *, size_t);
REAL(int, remove, const char *);
REAL(FTSENT *, fts_read, FTS *);
REAL(void, lg_philox_normal_f32, float *, size_t, uint64_t, lg_purpose, uint64_t, uint64_t);
REAL(void, lg_stream_upload, lg_stream *, void *, const void *, size_t);
REAL(void, lg_stream_download, lg_stream *, void *, const void *, size_t);
REAL(int, lg_bus_wait, lg_bus *, int);
REAL(int, sched_getaffinity, pid_t, size_t, cpu_set_t *);

WRAP(int64_t, lg_now_ns, void)
{
    return __real_lg_now_ns() + g.skew_ns;
}

/* One call takes so long. lgsup sees the heartbeat grow old until the call is over. */
static void pass(int64_t ns)
{
    if (!g.row) return;
    g.skew_ns += ns;
    g.oldest_ns = LG_MAX(g.oldest_ns, __wrap_lg_now_ns() - atomic_load(&g.row->heartbeat_ns));
}

static void pass_for(int64_t count, int64_t per_s)
{
    if (per_s) pass((int64_t)((double)count / (double)per_s * LG_S_NS));
}

void slow_begin(const struct slow_machine *m, const struct lg_board_row *row)
{
    int64_t skew_ns = g.skew_ns;
    memset(&g, 0, sizeof g);
    g.skew_ns = skew_ns;
    g.began_ns = __wrap_lg_now_ns();
    g.m = *m;
    g.row = row;
}

void slow_at(int64_t elapsed_ns, void (*fn)(void *arg), void *arg)
{
    g.at_ns = elapsed_ns;
    g.at = fn;
    g.arg = arg;
}

void slow_end(void)
{
    g.row = NULL;
}

int64_t slow_elapsed_ns(void)
{
    return __wrap_lg_now_ns() - g.began_ns;
}

int64_t slow_oldest_ns(void)
{
    return g.oldest_ns;
}

/* ---- calls ---- */

static bool is_file(int fd)
{
    return fd >= 0 && fd < FDS_MAX && lseek(fd, 0, SEEK_CUR) >= 0;
}

WRAP(ssize_t, write, int fd, const void *from, size_t bytes)
{
    ssize_t n = __real_write(fd, from, bytes);
    if (n <= 0 || !is_file(fd)) return n;
    g.dirty[fd] += n;
    pass_for(n, g.m.bytes_per_s);
    pass(g.m.hangs_ns);
    g.m.hangs_ns = 0;
    return n;
}
static ssize_t has_read(int fd, ssize_t n)
{
    if (n > 0 && is_file(fd)) pass_for(n, g.m.bytes_per_s);
    return n;
}
WRAP(ssize_t, read, int fd, void *to, size_t bytes)
{
    return has_read(fd, __real_read(fd, to, bytes));
}
WRAP(ssize_t, __read_chk, int fd, void *to, size_t bytes, size_t room)
{
    return has_read(fd, __real___read_chk(fd, to, bytes, room));
}
WRAP(ssize_t, pread, int fd, void *to, size_t bytes, off_t at)
{
    pass(g.m.call_ns);
    return has_read(fd, __real_pread(fd, to, bytes, at));
}
WRAP(ssize_t, __pread_chk, int fd, void *to, size_t bytes, off_t at, size_t room)
{
    pass(g.m.call_ns);
    return has_read(fd, __real___pread_chk(fd, to, bytes, at, room));
}
static void write_back(int fd, int64_t bytes_max)
{
    if (!is_file(fd)) return;
    int64_t bytes = LG_MIN(g.dirty[fd], bytes_max);
    g.dirty[fd] -= bytes;
    pass_for(bytes, g.m.bytes_per_s);
}
WRAP(int, fsync, int fd)
{
    pass(g.m.call_ns);
    write_back(fd, INT64_MAX);
    return 0;
}
WRAP(int, sync_file_range, int fd, off_t from, off_t bytes, unsigned flags)
{
    if (flags & SYNC_FILE_RANGE_WAIT_AFTER) write_back(fd, bytes);
    return 0;
}
/* No pages: nobody touches them. */
WRAP(int, fallocate, int fd, int mode, off_t at, off_t bytes)
{
    if (!g.row) return __real_fallocate(fd, mode, at, bytes);
    pass_for(bytes, g.m.pages_per_s);
    return ftruncate(fd, at + bytes);
}
WRAP(void *, memcpy, void *to, const void *from, size_t bytes)
{
    if (g.row && g.m.mapped) pass_for((int64_t)bytes, g.m.bytes_per_s);
    return __real_memcpy(to, from, bytes);
}
WRAP(int, remove, const char *path)
{
    pass(g.m.call_ns);
    return __real_remove(path);
}
WRAP(FTSENT *, fts_read, FTS *fts)
{
    pass(g.m.call_ns);
    return __real_fts_read(fts);
}
WRAP(void, lg_philox_normal_f32, float *out, size_t count, uint64_t seed, lg_purpose purpose,
     uint64_t n, uint64_t first)
{
    if (!g.row) {
        __real_lg_philox_normal_f32(out, count, seed, purpose, n, first);
        return;
    }
    pass_for((int64_t)count, g.m.values_per_s);
}
WRAP(void, lg_stream_upload, lg_stream *s, void *to, const void *from, size_t bytes)
{
    if (g.row && g.m.copied_per_s)
        pass_for((int64_t)bytes, g.m.copied_per_s);
    else
        __real_lg_stream_upload(s, to, from, bytes);
}
WRAP(void, lg_stream_download, lg_stream *s, void *to, const void *from, size_t bytes)
{
    if (g.row && g.m.copied_per_s)
        pass_for((int64_t)bytes, g.m.copied_per_s);
    else
        __real_lg_stream_download(s, to, from, bytes);
}
WRAP(int, lg_bus_wait, lg_bus *b, int timeout_ms)
{
    if (!g.row) return __real_lg_bus_wait(b, timeout_ms);
    pass(g.m.call_ns);
    if (g.at && slow_elapsed_ns() >= g.at_ns) g.at(g.arg);
    return 0;
}
WRAP(int, sched_getaffinity, pid_t pid, size_t bytes, cpu_set_t *ret)
{
    if (!g.row) return __real_sched_getaffinity(pid, bytes, ret);
    memset(ret, 0, bytes);
    CPU_SET(0, ret);
    return 0;
}
