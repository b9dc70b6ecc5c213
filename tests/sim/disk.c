/* The simulated disk; see disk.h.
 *
 * Every file and directory is a node with two contents: `now`, what the running system sees, and
 * `kept`, what is surely on the medium. A directory also keeps the list of its changes since the
 * last fsync, in order. A power cut makes `now` of `kept` and a drawn part of the rest. Nodes are
 * freed when no name leads to them after a power cut. */
#include "tests/sim/disk.h"
#include "base/check.h"
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    NODES_MAX = 1024,
    NAMES_MAX = 48,
    CHANGES_MAX = 512,
    FDS_MAX = 64,
    FD_FIRST = 1 << 20, /* no real fd is that large */
    BLOCK = 64,
    DIRS_OPEN_MAX = 8
};

struct name {
    char text[96];
    int node; /* -1: no such name */
};
struct names {
    struct name at[NAMES_MAX];
    int n;
};
struct change {     /* of a directory */
    char from[96];  /* "": none */
    struct name to; /* text "": none; node -1: removed */
};
struct bytes {
    uint8_t *data;
    size_t n, cap;
};
struct node {
    bool used, is_dir, dirty;
    struct bytes now, kept;
    struct names *names, *kept_names;
    struct change *change;
    int n_changes;
};
struct disk_dir {
    int node, at;
    struct dirent entry;
};

static struct node g_node[NODES_MAX]; /* 0: /sim */
static int g_fd_node[FDS_MAX];        /* node + 1; 0: free */
static off_t g_fd_at[FDS_MAX];
static struct disk_dir g_dir[DIRS_OPEN_MAX];
static uint64_t g_rng, g_changes, g_die_at, g_refuse_every;
static enum disk_lie g_lie;
static bool g_dead, g_in_step;
static void (*g_step)(void *);
static void *g_step_arg;

static uint64_t draw(uint64_t below)
{
    g_rng += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = g_rng;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (x ^ x >> 31) % below;
}

/* ---- nodes ---- */

static void assign(struct bytes *to, const struct bytes *from)
{
    if (to->cap < from->n) {
        to->data = realloc(to->data, from->n);
        LG_ASSERT(to->data);
        to->cap = from->n;
    }
    if (from->n) memcpy(to->data, from->data, from->n);
    to->n = from->n;
}

static void resize(struct bytes *b, size_t n)
{
    if (b->cap < n) {
        b->cap = LG_MAX(n, 2 * b->cap);
        b->data = realloc(b->data, b->cap);
        LG_ASSERT(b->data);
    }
    if (n > b->n) memset(b->data + b->n, 0, n - b->n);
    b->n = n;
}

static void free_node(struct node *d)
{
    free(d->now.data);
    free(d->kept.data);
    free(d->names);
    free(d->kept_names);
    free(d->change);
    *d = (struct node){0};
}

static int new_node(bool is_dir)
{
    for (int i = 0; i < NODES_MAX; i++) {
        struct node *d = &g_node[i];
        if (d->used) continue;
        *d = (struct node){.used = true, .is_dir = is_dir};
        if (!is_dir) return i;
        d->names = calloc(1, sizeof *d->names);
        d->kept_names = calloc(1, sizeof *d->kept_names);
        d->change = calloc(CHANGES_MAX, sizeof *d->change);
        LG_ASSERT(d->names && d->kept_names && d->change);
        return i;
    }
    LG_ASSERT(!"the simulated disk has too few nodes");
    return -1;
}

static int lookup(const struct names *in, const char *name)
{
    for (int i = 0; i < in->n; i++)
        if (!strcmp(in->at[i].text, name)) return in->at[i].node;
    return -1;
}

/* node -1 removes. */
static void set_name(struct names *in, const char *name, int node)
{
    int i = 0;
    while (i < in->n && strcmp(in->at[i].text, name)) i++;
    if (node < 0) {
        if (i < in->n) in->at[i] = in->at[--in->n];
        return;
    }
    if (i == in->n) {
        LG_ASSERT(in->n < NAMES_MAX && strlen(name) < sizeof in->at[i].text);
        snprintf(in->at[in->n++].text, sizeof in->at[i].text, "%s", name);
    }
    in->at[i].node = node;
}

static void apply(struct names *in, const struct change *c)
{
    if (c->from[0]) set_name(in, c->from, -1);
    if (c->to.text[0]) set_name(in, c->to.text, c->to.node);
}

static void change_dir(struct node *d, const char *from, const char *to, int node)
{
    if (d->n_changes == CHANGES_MAX) { /* the system writes back by itself, too */
        apply(d->kept_names, &d->change[0]);
        memmove(d->change, d->change + 1, (size_t)--d->n_changes * sizeof *d->change);
    }
    struct change *c = &d->change[d->n_changes++];
    *c = (struct change){.to = {.node = node}};
    snprintf(c->from, sizeof c->from, "%s", from);
    snprintf(c->to.text, sizeof c->to.text, "%s", to);
    apply(d->names, c);
}

/* ---- paths ---- */

static bool is_ours(const char *path)
{
    return !strncmp(path, "/sim", 4) && (path[4] == '/' || !path[4]);
}

/* Walks to path. Returns its node or -1; *ret_parent (-1: there is none) and ret_name say where it
 * would be. */
static int walk(const char *path, int *ret_parent, char ret_name[96])
{
    int at = 0, parent = -1;
    const char *p = path + 4;
    ret_name[0] = 0;
    for (;;) {
        p += strspn(p, "/");
        size_t n = strcspn(p, "/");
        if (!n) break;
        LG_ASSERT(n < 96 && !(n == 2 && p[0] == '.' && p[1] == '.'));
        if (at < 0 || !g_node[at].is_dir) {
            errno = at < 0 ? ENOENT : ENOTDIR;
            if (ret_parent) *ret_parent = -1;
            return -1;
        }
        snprintf(ret_name, 96, "%.*s", (int)n, p);
        parent = at;
        at = lookup(g_node[at].names, ret_name);
        p += n;
    }
    if (ret_parent) *ret_parent = parent;
    if (at < 0) errno = ENOENT;
    return at;
}

static int find(const char *path)
{
    char name[96];
    if (g_dead) {
        errno = EIO;
        return -1;
    }
    return walk(path, NULL, name);
}

/* ---- changes ---- */

enum change_fate { REFUSED, DONE, LAST }; /* LAST: done, and the last thing that is */

static enum change_fate begin_change(void)
{
    if (g_step && !g_in_step && !g_dead) {
        g_in_step = true;
        g_step(g_step_arg);
        g_in_step = false;
    }
    if (g_dead) {
        errno = EIO;
        return REFUSED;
    }
    if (g_refuse_every && draw(g_refuse_every) == 0) {
        errno = draw(2) ? ENOSPC : EIO;
        return REFUSED;
    }
    if (++g_changes != g_die_at) return DONE;
    g_dead = true;
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
    return g_fd_node[fd - FD_FIRST] ? &g_node[g_fd_node[fd - FD_FIRST] - 1] : NULL;
}

static int new_fd(int node)
{
    for (int i = 0; i < FDS_MAX; i++)
        if (!g_fd_node[i]) {
            g_fd_node[i] = node + 1;
            g_fd_at[i] = 0;
            return FD_FIRST + i;
        }
    LG_ASSERT(!"the code under simulation leaks fds");
    return -1;
}

/* ---- the calls ---- */

#define DISK_REAL(type, name, ...) extern type __real_##name(__VA_ARGS__)
DISK_REAL(int, open, const char *, int, ...);
DISK_REAL(int, close, int);
DISK_REAL(int, dup, int);
DISK_REAL(FILE *, fdopen, int, const char *);
DISK_REAL(ssize_t, read, int, void *, size_t);
DISK_REAL(ssize_t, pread, int, void *, size_t, off_t);
DISK_REAL(ssize_t, write, int, const void *, size_t);
DISK_REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
DISK_REAL(int, ftruncate, int, off_t);
DISK_REAL(int, fsync, int);
DISK_REAL(int, rename, const char *, const char *);
DISK_REAL(int, unlink, const char *);
DISK_REAL(int, remove, const char *);
DISK_REAL(int, rmdir, const char *);
DISK_REAL(int, mkdir, const char *, mode_t);
DISK_REAL(int, stat, const char *, struct stat *);
DISK_REAL(int, fstat, int, struct stat *);
DISK_REAL(int, access, const char *, int);
DISK_REAL(DIR *, opendir, const char *);
DISK_REAL(struct dirent *, readdir, DIR *);
DISK_REAL(int, closedir, DIR *);
DISK_REAL(int, nftw, const char *, __nftw_func_t, int, int);

#define DISK_WRAP(type, name, ...)                                                                 \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)

static int open_here(const char *path, int flags)
{
    int parent;
    char name[96];
    if (g_dead) {
        errno = EIO;
        return -1;
    }
    int node = walk(path, &parent, name);
    if (node < 0 && (!(flags & O_CREAT) || parent < 0)) return -1;
    if (node >= 0 && !(flags & O_TRUNC)) {
        if ((flags & O_DIRECTORY) && !g_node[node].is_dir) {
            errno = ENOTDIR;
            return -1;
        }
        return new_fd(node);
    }
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    node = walk(path, &parent, name); /* the others went on meanwhile */
    if (node < 0) {
        node = new_node(false);
        change_dir(&g_node[parent], "", name, node);
    } else if (g_node[node].now.n) {
        g_node[node].now.n = 0;
        g_node[node].dirty = true;
    }
    return f == LAST ? end_change(f, -1) : new_fd(node);
}

DISK_WRAP(int, open, const char *path, int flags, mode_t mode)
{
    return is_ours(path) ? open_here(path, flags) : __real_open(path, flags, mode);
}
DISK_WRAP(int, __open_2, const char *path, int flags)
{
    return is_ours(path) ? open_here(path, flags) : __real_open(path, flags);
}
DISK_WRAP(int, close, int fd)
{
    if (!is_fd(fd)) return __real_close(fd);
    g_fd_node[fd - FD_FIRST] = 0;
    return 0;
}
DISK_WRAP(int, dup, int fd)
{
    return is_fd(fd) ? new_fd(g_fd_node[fd - FD_FIRST] - 1) : __real_dup(fd);
}

static ssize_t read_here(int fd, void *to, size_t n, off_t at)
{
    struct node *d = node_of(fd);
    if (g_dead || !d) {
        errno = d ? EIO : EBADF;
        return -1;
    }
    if ((size_t)at >= d->now.n) return 0;
    n = LG_MIN(n, d->now.n - (size_t)at);
    memcpy(to, d->now.data + at, n);
    return (ssize_t)n;
}
static ssize_t read_on(int fd, void *to, size_t n)
{
    ssize_t got = read_here(fd, to, n, g_fd_at[fd - FD_FIRST]);
    if (got > 0) g_fd_at[fd - FD_FIRST] += got;
    return got;
}
DISK_WRAP(ssize_t, read, int fd, void *to, size_t n)
{
    return is_fd(fd) ? read_on(fd, to, n) : __real_read(fd, to, n);
}
DISK_WRAP(ssize_t, __read_chk, int fd, void *to, size_t n, size_t room)
{
    LG_ASSERT(n <= room);
    return is_fd(fd) ? read_on(fd, to, n) : __real_read(fd, to, n);
}
DISK_WRAP(ssize_t, pread, int fd, void *to, size_t n, off_t at)
{
    return is_fd(fd) ? read_here(fd, to, n, at) : __real_pread(fd, to, n, at);
}
DISK_WRAP(ssize_t, __pread_chk, int fd, void *to, size_t n, off_t at, size_t room)
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
DISK_WRAP(FILE *, fdopen, int fd, const char *mode)
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
    LG_ASSERT(d && !d->is_dir);
    if (f == DONE && n > 1 && g_refuse_every && draw(g_refuse_every) == 0) n = 1 + draw(n - 1);
    if (d->now.n < (size_t)at + n) resize(&d->now, (size_t)at + n);
    memcpy(d->now.data + at, from, n);
    d->dirty = true;
    return f == LAST ? end_change(f, -1) : (ssize_t)n;
}
DISK_WRAP(ssize_t, write, int fd, const void *from, size_t n)
{
    if (!is_fd(fd)) return __real_write(fd, from, n);
    ssize_t put = write_here(fd, from, n, g_fd_at[fd - FD_FIRST]);
    if (put > 0) g_fd_at[fd - FD_FIRST] += put;
    return put;
}
DISK_WRAP(ssize_t, pwrite, int fd, const void *from, size_t n, off_t at)
{
    return is_fd(fd) ? write_here(fd, from, n, at) : __real_pwrite(fd, from, n, at);
}
DISK_WRAP(int, ftruncate, int fd, off_t n)
{
    if (!is_fd(fd)) return __real_ftruncate(fd, n);
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    struct node *d = node_of(fd);
    if (d->now.n != (size_t)n) d->dirty = true;
    resize(&d->now, (size_t)n);
    return end_change(f, 0);
}

static bool is_ledger(const struct node *d)
{
    for (int i = 0; i < NODES_MAX; i++) {
        if (!g_node[i].used || !g_node[i].is_dir) continue;
        const struct names *in = g_node[i].names;
        for (int k = 0; k < in->n; k++)
            if (&g_node[in->at[k].node] == d && !strncmp(in->at[k].text, "ledger", 6)) return true;
    }
    return false;
}

DISK_WRAP(int, fsync, int fd)
{
    if (!is_fd(fd)) return __real_fsync(fd);
    enum change_fate f = begin_change();
    if (f != DONE) return end_change(f, -1); /* cut in the middle: whatever is kept is kept */
    struct node *d = node_of(fd);
    if (d->is_dir && g_lie == DISK_DIR_SYNC) return 0;
    if (!d->is_dir && g_lie == DISK_FILE_SYNC) return 0;
    if (g_lie == DISK_LEDGER_SYNC && is_ledger(d)) return 0;
    if (d->is_dir) {
        for (int i = 0; i < d->n_changes; i++) apply(d->kept_names, &d->change[i]);
        d->n_changes = 0;
    } else if (d->dirty) {
        assign(&d->kept, &d->now);
        d->dirty = false;
    }
    return 0;
}

DISK_WRAP(int, rename, const char *from, const char *to)
{
    int from_parent, to_parent;
    char from_name[96], to_name[96];
    if (!is_ours(from)) return __real_rename(from, to);
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    int node = walk(from, &from_parent, from_name);
    if (node < 0) return -1;
    int old = walk(to, &to_parent, to_name);
    LG_ASSERT(from_parent >= 0 && from_parent == to_parent);
    if (old >= 0 && g_node[old].is_dir && g_node[old].names->n) {
        errno = ENOTEMPTY;
        return -1;
    }
    change_dir(&g_node[from_parent], from_name, to_name, node);
    return end_change(f, 0);
}

static int remove_here(const char *path, bool dirs, bool files)
{
    int parent;
    char name[96];
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    int node = walk(path, &parent, name);
    if (node < 0) return -1;
    struct node *d = &g_node[node];
    if (d->is_dir ? !dirs || d->names->n : !files) {
        errno = d->is_dir && dirs ? ENOTEMPTY : d->is_dir ? EISDIR : ENOTDIR;
        return -1;
    }
    change_dir(&g_node[parent], name, "", -1);
    return end_change(f, 0);
}
DISK_WRAP(int, unlink, const char *path)
{
    return is_ours(path) ? remove_here(path, false, true) : __real_unlink(path);
}
DISK_WRAP(int, rmdir, const char *path)
{
    return is_ours(path) ? remove_here(path, true, false) : __real_rmdir(path);
}
DISK_WRAP(int, remove, const char *path)
{
    return is_ours(path) ? remove_here(path, true, true) : __real_remove(path);
}
DISK_WRAP(int, mkdir, const char *path, mode_t mode)
{
    int parent;
    char name[96];
    if (!is_ours(path)) return __real_mkdir(path, mode);
    if (find(path) >= 0) {
        errno = EEXIST;
        return -1;
    }
    enum change_fate f = begin_change();
    if (f == REFUSED) return -1;
    walk(path, &parent, name);
    if (parent < 0) return -1;
    change_dir(&g_node[parent], "", name, new_node(true));
    return end_change(f, 0);
}

static void describe(const struct node *d, struct stat *st)
{
    *st = (struct stat){.st_mode = (d->is_dir ? S_IFDIR : S_IFREG) | 0600,
                        .st_size = (off_t)d->now.n};
}
DISK_WRAP(int, stat, const char *path, struct stat *st)
{
    if (!is_ours(path)) return __real_stat(path, st);
    int node = find(path);
    if (node < 0) return -1;
    describe(&g_node[node], st);
    return 0;
}
DISK_WRAP(int, fstat, int fd, struct stat *st)
{
    if (!is_fd(fd)) return __real_fstat(fd, st);
    describe(node_of(fd), st);
    return 0;
}
DISK_WRAP(int, access, const char *path, int mode)
{
    if (!is_ours(path)) return __real_access(path, mode);
    return find(path) < 0 ? -1 : 0;
}

static struct disk_dir *dir_of(DIR *d)
{
    struct disk_dir *s = (struct disk_dir *)(void *)d;
    return s >= g_dir && s < g_dir + DIRS_OPEN_MAX ? s : NULL;
}
DISK_WRAP(DIR *, opendir, const char *path)
{
    if (!is_ours(path)) return __real_opendir(path);
    int node = find(path);
    if (node < 0) return NULL;
    for (int i = 0; i < DIRS_OPEN_MAX; i++)
        if (g_dir[i].node < 0) {
            g_dir[i].node = node;
            g_dir[i].at = g_node[node].names->n;
            return (DIR *)(void *)&g_dir[i];
        }
    LG_ASSERT(!"the code under simulation leaks directories");
    return NULL;
}
/* From the last to the first, so that what is removed meanwhile moves nothing that is to come. */
DISK_WRAP(struct dirent *, readdir, DIR *dir)
{
    struct disk_dir *s = dir_of(dir);
    if (!s) return __real_readdir(dir);
    const struct names *in = g_node[s->node].names;
    s->at = LG_MIN(s->at, in->n);
    if (g_dead || s->at == 0) return NULL;
    snprintf(s->entry.d_name, sizeof s->entry.d_name, "%s", in->at[--s->at].text);
    return &s->entry;
}
DISK_WRAP(int, closedir, DIR *dir)
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
    while (g_node[node].is_dir && g_node[node].names->n) {
        int before = g_node[node].names->n;
        char child[4200];
        snprintf(child, sizeof child, "%s/%s", path, g_node[node].names->at[before - 1].text);
        int rc = walk_tree(child, each);
        if (rc != 0) return rc;
        LG_ASSERT(g_node[node].names->n < before); /* this is rm -r and nothing else */
    }
    describe(&g_node[node], &st);
    return each(path, &st, g_node[node].is_dir ? FTW_DP : FTW_F, &ftw);
}
DISK_WRAP(int, nftw, const char *path, __nftw_func_t each, int fds, int flags)
{
    return is_ours(path) ? walk_tree(path, each) : __real_nftw(path, each, fds, flags);
}

/* ---- life and death ---- */

static void forget_handles(void)
{
    memset(g_fd_node, 0, sizeof g_fd_node);
    for (int i = 0; i < DIRS_OPEN_MAX; i++) g_dir[i].node = -1;
}

void disk_format(uint64_t seed, enum disk_lie lie)
{
    for (int i = 0; i < NODES_MAX; i++) free_node(&g_node[i]);
    LG_ASSERT(new_node(true) == 0);
    forget_handles();
    g_rng = seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    g_changes = g_die_at = g_refuse_every = 0;
    g_lie = lie;
    g_dead = false;
    g_step = NULL;
}

uint64_t disk_changes(void)
{
    return g_changes;
}
void disk_die_at(uint64_t at)
{
    g_die_at = at;
}
bool disk_is_dead(void)
{
    return g_dead;
}
void disk_refuse(uint64_t every)
{
    g_refuse_every = every;
}
void disk_meanwhile(void (*step)(void *), void *arg)
{
    g_step = step;
    g_step_arg = arg;
}
void disk_revive(void)
{
    g_dead = false;
    g_die_at = 0;
}

static void lose_file(struct node *d, int chance)
{
    if (!d->dirty) return;
    size_t least = LG_MIN(d->now.n, d->kept.n), most = LG_MAX(d->now.n, d->kept.n);
    size_t n = chance == 0 ? d->kept.n : chance == 16 ? d->now.n : least + draw(most - least + 1);
    struct bytes out = {0};
    resize(&out, n);
    for (size_t at = 0; at < n; at += BLOCK) {
        const struct bytes *from = (int)draw(16) < chance ? &d->now : &d->kept;
        if (at < from->n)
            memcpy(out.data + at, from->data + at, LG_MIN((size_t)BLOCK, LG_MIN(n, from->n) - at));
    }
    assign(&d->now, &out);
    assign(&d->kept, &out);
    free(out.data);
    d->dirty = false;
}

static void lose_names(struct node *d, int chance)
{
    for (int i = 0; i < d->n_changes; i++)
        if ((int)draw(16) < chance) apply(d->kept_names, &d->change[i]);
    d->n_changes = 0;
    *d->names = *d->kept_names;
}

static void mark_reachable(int node, bool *seen)
{
    if (seen[node]) return;
    seen[node] = true;
    if (!g_node[node].is_dir) return;
    const struct names *in = g_node[node].names;
    for (int i = 0; i < in->n; i++) mark_reachable(in->at[i].node, seen);
}

void disk_power_loss(int chance)
{
    bool seen[NODES_MAX] = {0};
    static const int often[] = {0, 2, 8, 14, 16};
    if (chance < 0) chance = often[draw(LG_ARRAY_LEN(often))];
    for (int i = 0; i < NODES_MAX; i++) {
        if (!g_node[i].used) continue;
        if (g_node[i].is_dir)
            lose_names(&g_node[i], chance);
        else
            lose_file(&g_node[i], chance);
    }
    mark_reachable(0, seen);
    for (int i = 0; i < NODES_MAX; i++)
        if (!seen[i]) free_node(&g_node[i]);
    forget_handles();
    disk_revive();
}

static void show(int node, const char *name, int depth)
{
    const struct node *d = &g_node[node];
    fprintf(stderr, "%*s%s%s %zu%s\n", 2 * depth, "", name, d->is_dir ? "/" : "", d->now.n,
            d->dirty || d->n_changes ? " (not durable)" : "");
    for (int i = 0; d->is_dir && i < d->names->n; i++)
        show(d->names->at[i].node, d->names->at[i].text, depth + 1);
}

void disk_show(void)
{
    show(0, "/sim", 0);
}
