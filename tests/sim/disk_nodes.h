/* The inside of the simulated disk (disk.h): disk_nodes.c keeps the tree, disk.c answers the calls. */
#pragma once
#include "tests/sim/disk.h"
#include <dirent.h>
#include <stddef.h>
#include <sys/types.h>

enum {
    NODES_MAX = 1024,
    DIRS_MAX = 256,
    NAMES_MAX = 48,   /* in one directory */
    CHANGES_MAX = 64, /* of one directory, not yet durable */
    TEXTS_MAX = 1024, /* different names */
    NAME_BYTES = 96,
    FDS_MAX = 64,
    FD_FIRST = 1 << 20, /* no real fd is that large */
    DIRS_OPEN_MAX = 8
};

/* A file's bytes. Shared by whoever holds them; changed only by disk_own_bytes. */
struct bytes {
    int refs;
    size_t n, cap;
    uint64_t hash; /* 0: not known */
    uint8_t data[];
};
/* Names are numbers into one table of texts. */
struct name {
    int text;
    int node; /* -1: no such name */
};
struct names {
    struct name at[NAMES_MAX];
    int n;
};
struct change {     /* of a directory */
    int from;       /* -1: none */
    struct name to; /* text -1: none */
};
struct dir {
    struct names now, kept;
    struct change change[CHANGES_MAX];
    int n_changes;
};
struct node {
    bool used, dirty;
    int dir; /* its struct dir; -1: a file */
    struct bytes *now, *kept;
};
struct disk_dir { /* an open directory */
    int node, at;
    struct dirent entry;
};

/* Everything that a look at another future must leave as it was. */
struct disk {
    int n_nodes, n_dirs;         /* those beyond were never used */
    struct node node[NODES_MAX]; /* 0: /sim */
    struct dir dir[DIRS_MAX];
    int fd_node[FDS_MAX]; /* node + 1; 0: free */
    off_t fd_at[FDS_MAX];
    struct disk_dir open[DIRS_OPEN_MAX];
    uint64_t changes, die_at, refuse_every;
    enum disk_lie lie;
    bool dead, in_step;
    void (*step)(void *);
    void *step_arg;
};
extern struct disk g_disk;

uint64_t disk_draw(uint64_t below);
int disk_new_node(bool is_dir);
const char *disk_text(int text);
int disk_text_of(const char *name);
int disk_lookup(const struct names *in, int text);
/* from "" or to "": none; node -1: removed. */
void disk_change_dir(struct node *d, const char *from, const char *to, int node);
void disk_sync_dir(struct node *d);
/* The file's bytes, n of them, nobody else's: to be written. */
struct bytes *disk_own_bytes(struct node *f, size_t n);
void disk_sync_file(struct node *f);
uint64_t disk_hash_node(int node);
static inline size_t disk_size(const struct node *f)
{
    return f->now ? f->now->n : 0;
}
static inline struct dir *disk_dir_of(const struct node *d)
{
    return d->dir < 0 ? NULL : &g_disk.dir[d->dir];
}
