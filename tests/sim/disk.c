/* The simulated disk's calls; see disk.h. Paths, fds and open directories are looked up here, what they
 * lead to is kept by disk_nodes.c. */
#include "base/check.h"
#include "tests/sim/disk_nodes.h"
#include "tests/sim/wrap.h"
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- paths ---- */

static bool is_ours(const char *path)
{
    return !strncmp(path, "/sim", 4) && (path[4] == '/' || !path[4]);
}

/* Walks to path. Returns its node or -1; *ret_parent (-1: there is none) and ret_name say where it
 * would be. */
static int walk(const char *path, int *ret_parent, char ret_name[NAME_BYTES])
{
    int at = 0, parent = -1;
    const char *p = path + 4;
    ret_name[0] = 0;
    for (;;) {
        p += strspn(p, "/");
        size_t n = strcspn(p, "/");
        if (!n) break;
        LG_ASSERT(n < NAME_BYTES && !(n == 2 && p[0] == '.' && p[1] == '.'));
        if (at < 0 || g_disk.node[at].dir < 0) {
            errno = at < 0 ? ENOENT : ENOTDIR;
            if (ret_parent) *ret_parent = -1;
            return -1;
        }
        snprintf(ret_name, NAME_BYTES, "%.*s", (int)n, p);
        parent = at;
        at = disk_lookup(&disk_dir_of(&g_disk.node[at])->now, disk_text_of(ret_name));
        p += n;
    }
    if (ret_parent) *ret_parent = parent;
    if (at < 0) errno = ENOENT;
    return at;
}

static int find(const char *path)
{
    char name[NAME_BYTES];
    if (g_disk.dead) {
        errno = EIO;
        return -1;
    }
    return walk(path, NULL, name);
}

/* 0 for a file, too. */
static int names_in(const struct node *d)
{
    return d->dir < 0 ? 0 : disk_dir_of(d)->now.n;
}

uint64_t disk_hash(const char *path)
{
    char name[NAME_BYTES];
    int node = walk(path, NULL, name);
    return node < 0 ? 0 : disk_hash_node(node);
}

/* ---- changes ---- */

enum change_fate { REFUSED, DONE, LAST }; /* LAST: done, and the last thing that is */

static enum change_fate begin_change(void)
{
    if (g_disk.step && !g_disk.in_step && !g_disk.dead) {
        g_disk.in_step = true;
        g_disk.step(g_disk.step_arg);
        g_disk.in_step = false;
    }
    if (g_disk.dead) {
        errno = EIO;
        return REFUSED;
    }
    if (g_disk.refuse_every && disk_draw(g_disk.refuse_every) == 0) {
        errno = disk_draw(2) ? ENOSPC : EIO;
        return REFUSED;
    }
    if (++g_disk.changes != g_disk.die_at) return DONE;
    g_disk.dead = true;
    return LAST;
}

/* A call whose effect took place is not told to have: its caller is dead. */
static int end_change(enum change_fate f, int rc)
{
    if (f != LAST) return rc;
    errno = EIO;
    return -1;
}

/* ---- fds ---- */

static bool is_fd(int fd)
{
    return fd >= FD_FIRST && fd < FD_FIRST + FDS_MAX;
}

static struct node *node_of(int fd)
{
    return g_disk.fd_node[fd - FD_FIRST] ? &g_disk.node[g_disk.fd_node[fd - FD_FIRST] - 1] : NULL;
}

static int new_fd(int node)
{
    for (int i = 0; i < FDS_MAX; i++)
        if (!g_disk.fd_node[i]) {
            g_disk.fd_node[i] = node + 1;
            g_disk.fd_at[i] = 0;
            return FD_FIRST + i;
        }
    LG_ASSERT(!"the code under simulation leaks fds");
    return -1;
}

/* ---- the calls ---- */

REAL(int, open, const char *, int, ...);
REAL(int, close, int);
REAL(int, dup, int);
REAL(FILE *, fdopen, int, const char *);
REAL(ssize_t, read, int, void *, size_t);
REAL(ssize_t, pread, int, void *, size_t, off_t);
REAL(ssize_t, write, int, const void *, size_t);
REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
REAL(int, ftruncate, int, off_t);
REAL(int, fsync, int);
REAL(int, sync_file_range, int, off_t, off_t, unsigned);
REAL(int, rename, const char *, const char *);
REAL(int, unlink, const char *);
REAL(int, remove, const char *);
REAL(int, rmdir, const char *);
REAL(int, mkdir, const char *, mode_t);
REAL(int, stat, const char *, struct stat *);
REAL(int, fstat, int, struct stat *);
REAL(int, access, const char *, int);
REAL(DIR *, opendir, const char *);
REAL(struct dirent *, readdir, DIR *);
REAL(int, closedir, DIR *);
REAL(int, nftw, const char *, __nftw_func_t, int, int);

static int open_here(const char *path, int flags)
{
    int parent;
    char name[NAME_BYTES];
    if (g_disk.dead) {
        errno = EIO;
        return -1;
    }
    int node = walk(path, &parent, name);
    if (node < 0 && (!(flags & O_CREAT) || parent < 0)) return -1;
    if (node >= 0 && !(flags & O_TRUNC)) {
        if ((flags & O_DIRECTORY) && g_disk.node[node].dir < 0) {
            errno = ENOTDIR;
            return -1;
        }
        return new_fd(node);
    }
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    node = walk(path, &parent, name); /* the others went on meanwhile */
    if (node < 0) {
        node = disk_new_node(false);
        disk_change_dir(&g_disk.node[parent], "", name, node);
    } else if (disk_size(&g_disk.node[node])) {
        disk_own_bytes(&g_disk.node[node], 0);
    }
    return f == LAST ? end_change(f, -1) : new_fd(node);
}

WRAP(int, open, const char *path, int flags, mode_t mode)
{
    return is_ours(path) ? open_here(path, flags) : __real_open(path, flags, mode);
}
WRAP(int, __open_2, const char *path, int flags)
{
    return is_ours(path) ? open_here(path, flags) : __real_open(path, flags);
}
WRAP(int, close, int fd)
{
    if (!is_fd(fd)) return __real_close(fd);
    g_disk.fd_node[fd - FD_FIRST] = 0;
    return 0;
}
WRAP(int, dup, int fd)
{
    return is_fd(fd) ? new_fd(g_disk.fd_node[fd - FD_FIRST] - 1) : __real_dup(fd);
}

static ssize_t read_here(int fd, void *to, size_t n, off_t at)
{
    struct node *d = node_of(fd);
    if (g_disk.dead || !d) {
        errno = d ? EIO : EBADF;
        return -1;
    }
    if ((size_t)at >= disk_size(d)) return 0;
    n = LG_MIN(n, disk_size(d) - (size_t)at);
    memcpy(to, d->now->data + at, n);
    return (ssize_t)n;
}
static ssize_t read_on(int fd, void *to, size_t n)
{
    ssize_t got = read_here(fd, to, n, g_disk.fd_at[fd - FD_FIRST]);
    if (got > 0) g_disk.fd_at[fd - FD_FIRST] += got;
    return got;
}
WRAP(ssize_t, read, int fd, void *to, size_t n)
{
    return is_fd(fd) ? read_on(fd, to, n) : __real_read(fd, to, n);
}
WRAP(ssize_t, __read_chk, int fd, void *to, size_t n, size_t room)
{
    LG_ASSERT(n <= room);
    return is_fd(fd) ? read_on(fd, to, n) : __real_read(fd, to, n);
}
WRAP(ssize_t, pread, int fd, void *to, size_t n, off_t at)
{
    return is_fd(fd) ? read_here(fd, to, n, at) : __real_pread(fd, to, n, at);
}
WRAP(ssize_t, __pread_chk, int fd, void *to, size_t n, off_t at, size_t room)
{
    LG_ASSERT(n <= room);
    return is_fd(fd) ? read_here(fd, to, n, at) : __real_pread(fd, to, n, at);
}

static ssize_t stream_read(void *cookie, char *to, size_t n)
{
    return read_on((int)(intptr_t)cookie, to, n);
}
static int stream_close(void *cookie)
{
    return __wrap_close((int)(intptr_t)cookie);
}
WRAP(FILE *, fdopen, int fd, const char *mode)
{
    if (!is_fd(fd)) return __real_fdopen(fd, mode);
    return fopencookie((void *)(intptr_t)fd, mode,
                       (cookie_io_functions_t){.read = stream_read, .close = stream_close});
}

static ssize_t write_here(int fd, const void *from, size_t n, off_t at)
{
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    struct node *d = node_of(fd);
    LG_ASSERT(d && d->dir < 0);
    bool short_one = g_disk.refuse_every && disk_draw(1 + g_disk.refuse_every / 8) == 0;
    if (f == DONE && n > 1 && short_one) n = 1 + disk_draw(n - 1);
    memcpy(disk_own_bytes(d, LG_MAX(disk_size(d), (size_t)at + n))->data + at, from, n);
    return f == LAST ? end_change(f, -1) : (ssize_t)n;
}
WRAP(ssize_t, write, int fd, const void *from, size_t n)
{
    if (!is_fd(fd)) return __real_write(fd, from, n);
    ssize_t put = write_here(fd, from, n, g_disk.fd_at[fd - FD_FIRST]);
    if (put > 0) g_disk.fd_at[fd - FD_FIRST] += put;
    return put;
}
WRAP(ssize_t, pwrite, int fd, const void *from, size_t n, off_t at)
{
    return is_fd(fd) ? write_here(fd, from, n, at) : __real_pwrite(fd, from, n, at);
}
WRAP(int, ftruncate, int fd, off_t n)
{
    if (!is_fd(fd)) return __real_ftruncate(fd, n);
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    struct node *d = node_of(fd);
    if (disk_size(d) != (size_t)n) disk_own_bytes(d, (size_t)n);
    return end_change(f, 0);
}

static bool is_ledger(const struct node *d)
{
    for (int i = 0; i < NODES_MAX; i++) {
        if (!g_disk.node[i].used || g_disk.node[i].dir < 0) continue;
        const struct names *in = &disk_dir_of(&g_disk.node[i])->now;
        for (int k = 0; k < in->n; k++)
            if (&g_disk.node[in->at[k].node] == d &&
                !strncmp(disk_text(in->at[k].text), "ledger", 6))
                return true;
    }
    return false;
}

/* Promises nothing: the data may be there after a power cut, as it may without. */
WRAP(int, sync_file_range, int fd, off_t from, off_t bytes, unsigned flags)
{
    if (!is_fd(fd)) return __real_sync_file_range(fd, from, bytes, flags);
    if (!disk_is_dead()) return 0;
    errno = EIO;
    return -1;
}
WRAP(int, fsync, int fd)
{
    if (!is_fd(fd)) return __real_fsync(fd);
    enum change_fate f = begin_change();
    if (f != DONE) return end_change(f, -1); /* cut in the middle: whatever is kept is kept */
    struct node *d = node_of(fd);
    if (d->dir >= 0 && g_disk.lie == DISK_DIR_SYNC) return 0;
    if (d->dir < 0 && g_disk.lie == DISK_FILE_SYNC) return 0;
    if (g_disk.lie == DISK_LEDGER_SYNC && is_ledger(d)) return 0;
    if (d->dir >= 0)
        disk_sync_dir(d);
    else
        disk_sync_file(d);
    return 0;
}

WRAP(int, rename, const char *from, const char *to)
{
    int from_parent, to_parent;
    char from_name[NAME_BYTES], to_name[NAME_BYTES];
    if (!is_ours(from)) return __real_rename(from, to);
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    int node = walk(from, &from_parent, from_name);
    if (node < 0) return -1;
    int old = walk(to, &to_parent, to_name);
    LG_ASSERT(from_parent >= 0 && from_parent == to_parent);
    if (old >= 0 && names_in(&g_disk.node[old])) {
        errno = ENOTEMPTY;
        return -1;
    }
    disk_change_dir(&g_disk.node[from_parent], from_name, to_name, node);
    return end_change(f, 0);
}

static int remove_here(const char *path, bool dirs, bool files)
{
    int parent;
    char name[NAME_BYTES];
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    int node = walk(path, &parent, name);
    if (node < 0) return -1;
    struct node *d = &g_disk.node[node];
    bool is_dir = d->dir >= 0;
    if (is_dir ? !dirs || names_in(d) : !files) {
        errno = is_dir && dirs ? ENOTEMPTY : is_dir ? EISDIR : ENOTDIR;
        return -1;
    }
    disk_change_dir(&g_disk.node[parent], name, "", -1);
    return end_change(f, 0);
}
WRAP(int, unlink, const char *path)
{
    return is_ours(path) ? remove_here(path, false, true) : __real_unlink(path);
}
WRAP(int, rmdir, const char *path)
{
    return is_ours(path) ? remove_here(path, true, false) : __real_rmdir(path);
}
WRAP(int, remove, const char *path)
{
    return is_ours(path) ? remove_here(path, true, true) : __real_remove(path);
}
WRAP(int, mkdir, const char *path, mode_t mode)
{
    int parent;
    char name[NAME_BYTES];
    if (!is_ours(path)) return __real_mkdir(path, mode);
    if (find(path) >= 0) {
        errno = EEXIST;
        return -1;
    }
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    walk(path, &parent, name);
    if (parent < 0) return -1;
    disk_change_dir(&g_disk.node[parent], "", name, disk_new_node(true));
    return end_change(f, 0);
}

static void describe(const struct node *d, struct stat *st)
{
    *st = (struct stat){.st_mode = (d->dir >= 0 ? S_IFDIR : S_IFREG) | 0600,
                        .st_size = (off_t)disk_size(d)};
}
WRAP(int, stat, const char *path, struct stat *st)
{
    if (!is_ours(path)) return __real_stat(path, st);
    int node = find(path);
    if (node < 0) return -1;
    describe(&g_disk.node[node], st);
    return 0;
}
WRAP(int, fstat, int fd, struct stat *st)
{
    if (!is_fd(fd)) return __real_fstat(fd, st);
    describe(node_of(fd), st);
    return 0;
}
WRAP(int, access, const char *path, int mode)
{
    if (!is_ours(path)) return __real_access(path, mode);
    return find(path) < 0 ? -1 : 0;
}

static struct disk_dir *dir_of(DIR *d)
{
    struct disk_dir *s = (struct disk_dir *)(void *)d;
    return s >= g_disk.open && s < g_disk.open + DIRS_OPEN_MAX ? s : NULL;
}
WRAP(DIR *, opendir, const char *path)
{
    if (!is_ours(path)) return __real_opendir(path);
    int node = find(path);
    if (node < 0) return NULL;
    for (int i = 0; i < DIRS_OPEN_MAX; i++)
        if (g_disk.open[i].node < 0) {
            g_disk.open[i].node = node;
            g_disk.open[i].at = names_in(&g_disk.node[node]);
            return (DIR *)(void *)&g_disk.open[i];
        }
    LG_ASSERT(!"the code under simulation leaks directories");
    return NULL;
}
/* From the last to the first, so that what is removed meanwhile moves nothing that is to come. */
WRAP(struct dirent *, readdir, DIR *dir)
{
    struct disk_dir *s = dir_of(dir);
    if (!s) return __real_readdir(dir);
    const struct names *in = &disk_dir_of(&g_disk.node[s->node])->now;
    s->at = LG_MIN(s->at, in->n);
    if (g_disk.dead || s->at == 0) return NULL;
    snprintf(s->entry.d_name, sizeof s->entry.d_name, "%s", disk_text(in->at[--s->at].text));
    return &s->entry;
}
WRAP(int, closedir, DIR *dir)
{
    struct disk_dir *s = dir_of(dir);
    if (!s) return __real_closedir(dir);
    s->node = -1;
    return 0;
}

static int walk_tree(const char *path, __nftw_func_t each)
{
    struct stat st;
    struct FTW ftw = {0};
    int node = find(path);
    if (node < 0) return -1;
    while (names_in(&g_disk.node[node])) {
        int before = names_in(&g_disk.node[node]);
        const struct names *in = &disk_dir_of(&g_disk.node[node])->now;
        char child[4200];
        snprintf(child, sizeof child, "%s/%s", path, disk_text(in->at[before - 1].text));
        int rc = walk_tree(child, each);
        if (rc != 0) return rc;
        LG_ASSERT(in->n < before); /* this is rm -r and nothing else */
    }
    describe(&g_disk.node[node], &st);
    return each(path, &st, g_disk.node[node].dir >= 0 ? FTW_DP : FTW_F, &ftw);
}
WRAP(int, nftw, const char *path, __nftw_func_t each, int fds, int flags)
{
    return is_ours(path) ? walk_tree(path, each) : __real_nftw(path, each, fds, flags);
}

/* ---- what a simulation asks ---- */

uint64_t disk_changes(void)
{
    return g_disk.changes;
}
void disk_die_at(uint64_t at)
{
    g_disk.die_at = at;
}
bool disk_is_dead(void)
{
    return g_disk.dead;
}
void disk_refuse(uint64_t every)
{
    g_disk.refuse_every = every;
}
void disk_meanwhile(void (*step)(void *), void *arg)
{
    g_disk.step = step;
    g_disk.step_arg = arg;
}
