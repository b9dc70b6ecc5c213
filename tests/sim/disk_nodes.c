/* The simulated disk's tree, its power cuts and its other futures; see disk.h and disk_nodes.h.
 *
 * Every file and directory is a node with two contents: `now`, what the running system sees, and
 * `kept`, what is surely on the medium. A directory also keeps the list of its changes since the
 * last fsync, in order. A power cut makes `now` of `kept` and a drawn part of the rest. Nodes are
 * freed when no name leads to them after a power cut.
 *
 * To look at another future costs little: bytes are shared, not copied, until somebody writes them, so
 * that an image of the disk is a copy of its small tables, and a file's hash is taken once. */
#include "tests/sim/disk_nodes.h"
#include "base/check.h"
#include "base/fs.h"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64 };

struct disk g_disk;
static struct disk g_image; /* while disk_what_if looks */
static bool g_has_image;
static uint64_t g_rng;
static char g_text[TEXTS_MAX][NAME_BYTES];

uint64_t disk_draw(uint64_t below)
{
    g_rng += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = g_rng;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (x ^ x >> 31) % below;
}

/* ---- names ---- */

const char *disk_text(int text)
{
    return g_text[text];
}

int disk_text_of(const char *name)
{
    uint64_t h = lg_hash(name, strlen(name));
    LG_ASSERT(*name && strlen(name) < NAME_BYTES);
    for (int i = 0; i < TEXTS_MAX; i++) {
        int at = (int)((h + (uint64_t)i) % TEXTS_MAX);
        if (!g_text[at][0]) snprintf(g_text[at], NAME_BYTES, "%s", name);
        if (!strcmp(g_text[at], name)) return at;
    }
    LG_ASSERT(!"the simulated disk has seen too many names");
    return -1;
}

int disk_lookup(const struct names *in, int text)
{
    for (int i = 0; i < in->n; i++)
        if (in->at[i].text == text) return in->at[i].node;
    return -1;
}

/* node -1 removes. */
static void set_name(struct names *in, int text, int node)
{
    int i = 0;
    while (i < in->n && in->at[i].text != text) i++;
    if (node < 0) {
        if (i < in->n) in->at[i] = in->at[--in->n];
        return;
    }
    LG_ASSERT(i < NAMES_MAX);
    if (i == in->n) in->n++;
    in->at[i] = (struct name){.text = text, .node = node};
}

static void apply(struct names *in, const struct change *c)
{
    if (c->from >= 0) set_name(in, c->from, -1);
    if (c->to.text >= 0) set_name(in, c->to.text, c->to.node);
}

static void add_change(struct dir *d, const struct change *c)
{
    if (d->n_changes == CHANGES_MAX) { /* the system writes back by itself, too */
        apply(&d->kept, &d->change[0]);
        memmove(d->change, d->change + 1, (size_t)--d->n_changes * sizeof *d->change);
    }
    d->change[d->n_changes++] = *c;
    apply(&d->now, c);
}

void disk_change_dir(struct node *d, const char *from, const char *to, int node)
{
    struct change c = {.from = *from ? disk_text_of(from) : -1,
                       .to = {.text = *to ? disk_text_of(to) : -1, .node = node}};
    add_change(disk_dir_of(d), &c);
}

void disk_sync_dir(struct node *d)
{
    struct dir *in = disk_dir_of(d);
    for (int i = 0; i < in->n_changes; i++) apply(&in->kept, &in->change[i]);
    in->n_changes = 0;
}

/* ---- files ---- */

static struct bytes *share(struct bytes *b)
{
    if (b) b->refs++;
    return b;
}

static void let_go(struct bytes **b)
{
    if (*b && --(*b)->refs == 0) free(*b);
    *b = NULL;
}

static struct bytes *new_bytes(size_t n)
{
    size_t cap = LG_MAX(n, (size_t)BLOCK);
    struct bytes *b = malloc(sizeof *b + cap);
    LG_ASSERT(b);
    *b = (struct bytes){.refs = 1, .n = n, .cap = cap};
    return b;
}

struct bytes *disk_own_bytes(struct node *f, size_t n)
{
    struct bytes *old = f->now, *b = old;
    size_t had = disk_size(f);
    if (!old || old->refs > 1 || old->cap < n) {
        b = new_bytes(n + n / 2);
        if (had) memcpy(b->data, old->data, LG_MIN(had, n));
        let_go(&f->now);
        f->now = b;
    }
    if (n > had) memset(b->data + had, 0, n - had);
    b->n = n;
    b->hash = 0;
    f->dirty = true;
    return b;
}

void disk_sync_file(struct node *f)
{
    if (!f->dirty) return;
    let_go(&f->kept);
    f->kept = share(f->now);
    f->dirty = false;
}

static uint64_t hash_of(struct bytes *b)
{
    if (!b) return 1;
    if (!b->hash) b->hash = lg_hash(b->data, b->n) | 1;
    return b->hash;
}

/* ---- nodes ---- */

int disk_new_node(bool is_dir)
{
    bool taken[DIRS_MAX] = {0};
    int i = 0, k = 0;
    while (i < NODES_MAX && g_disk.node[i].used) i++;
    LG_ASSERT(i < NODES_MAX); /* else the simulated disk has too few nodes */
    g_disk.n_nodes = LG_MAX(g_disk.n_nodes, i + 1);
    g_disk.node[i] = (struct node){.used = true, .dir = -1};
    if (!is_dir) return i;
    for (int j = 0; j < g_disk.n_nodes; j++)
        if (g_disk.node[j].used && g_disk.node[j].dir >= 0) taken[g_disk.node[j].dir] = true;
    while (k < DIRS_MAX && taken[k]) k++;
    LG_ASSERT(k < DIRS_MAX);
    g_disk.n_dirs = LG_MAX(g_disk.n_dirs, k + 1);
    g_disk.dir[k].now.n = g_disk.dir[k].kept.n = g_disk.dir[k].n_changes = 0;
    g_disk.node[i].dir = k;
    return i;
}

static void free_node(struct node *d)
{
    let_go(&d->now);
    let_go(&d->kept);
    d->used = false;
}

static void forget_handles(void)
{
    memset(g_disk.fd_node, 0, sizeof g_disk.fd_node);
    for (int i = 0; i < DIRS_OPEN_MAX; i++) g_disk.open[i].node = -1;
}

/* The tables up to what was ever used. The hold of the bytes passes on with them. */
static void copy_disk(struct disk *to, const struct disk *from)
{
    memcpy(to->node, from->node, sizeof *to->node * (size_t)from->n_nodes);
    memcpy(to->dir, from->dir, sizeof *to->dir * (size_t)from->n_dirs);
    size_t rest = offsetof(struct disk, fd_node);
    memcpy((char *)to + rest, (const char *)from + rest, sizeof *to - rest);
    to->n_nodes = from->n_nodes;
    to->n_dirs = from->n_dirs;
}

static void free_nodes(struct disk *d)
{
    for (int i = 0; i < d->n_nodes; i++) free_node(&d->node[i]);
    d->n_nodes = d->n_dirs = 0;
}

void disk_format(uint64_t seed, enum disk_lie lie)
{
    free_nodes(&g_disk);
    if (g_has_image) free_nodes(&g_image); /* what a look has been left by longjmp in */
    g_has_image = false;
    LG_ASSERT(disk_new_node(true) == 0);
    forget_handles();
    g_rng = seed * UINT64_C(0x2545f4914f6cdd1d) + 1;
    g_disk.changes = g_disk.die_at = g_disk.refuse_every = 0;
    g_disk.lie = lie;
    g_disk.dead = g_disk.in_step = false;
    g_disk.step = NULL;
}

/* ---- power cuts ---- */

static void lose_file(struct node *d, int chance)
{
    if (!d->dirty) return;
    if (chance == 0) {
        let_go(&d->now);
        d->now = share(d->kept);
    } else if (chance < 16) {
        size_t now = disk_size(d), kept = d->kept ? d->kept->n : 0;
        size_t n = LG_MIN(now, kept) + disk_draw(LG_MAX(now, kept) - LG_MIN(now, kept) + 1);
        struct bytes *out = new_bytes(n);
        for (size_t at = 0; at < n; at += BLOCK) {
            const struct bytes *from = (int)disk_draw(16) < chance ? d->now : d->kept;
            size_t want = LG_MIN((size_t)BLOCK, n - at);
            size_t has = from && from->n > at ? LG_MIN(want, from->n - at) : 0;
            if (has) memcpy(out->data + at, from->data + at, has);
            memset(out->data + at + has, 0, want - has);
        }
        let_go(&d->now);
        d->now = out;
    }
    let_go(&d->kept);
    d->kept = share(d->now);
    d->dirty = false;
}

static void lose_names(struct dir *d, int chance)
{
    for (int i = 0; i < d->n_changes; i++)
        if ((int)disk_draw(16) < chance) apply(&d->kept, &d->change[i]);
    d->n_changes = 0;
    d->now = d->kept;
}

static void lose_tree(int node, int chance, bool *seen)
{
    struct node *d = &g_disk.node[node];
    if (seen[node]) return;
    seen[node] = true;
    if (d->dir < 0) {
        lose_file(d, chance);
        return;
    }
    lose_names(disk_dir_of(d), chance);
    const struct names *in = &disk_dir_of(d)->now;
    for (int i = 0; i < in->n; i++) lose_tree(in->at[i].node, chance, seen);
}

void disk_revive(void)
{
    g_disk.dead = false;
    g_disk.die_at = 0;
}

void disk_power_loss(int chance)
{
    bool seen[NODES_MAX] = {0};
    static const int often[] = {0, 2, 8, 14, 16};
    if (chance < 0) chance = often[disk_draw(LG_ARRAY_LEN(often))];
    lose_tree(0, chance, seen);
    for (int i = 0; i < g_disk.n_nodes; i++)
        if (!seen[i]) free_node(&g_disk.node[i]);
    forget_handles();
    disk_revive();
}

void disk_what_if(int chance, void (*look)(void *), void *arg)
{
    LG_ASSERT(!g_has_image);
    copy_disk(&g_image, &g_disk);
    g_has_image = true;
    for (int i = 0; i < g_disk.n_nodes; i++) { /* held by the image, too */
        share(g_disk.node[i].now);
        share(g_disk.node[i].kept);
    }
    g_disk.step = NULL;
    g_disk.refuse_every = 0;
    if (chance == DISK_DEATH) {
        forget_handles();
        disk_revive();
    } else {
        disk_power_loss(chance);
    }
    look(arg);
    free_nodes(&g_disk);
    copy_disk(&g_disk, &g_image);
    g_has_image = false;
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ (b + UINT64_C(0x9e3779b97f4a7c15))) * UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 29;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 32;
}

uint64_t disk_hash_node(int node)
{
    const struct node *d = &g_disk.node[node];
    if (d->dir < 0) return hash_of(d->now);
    const struct names *in = &disk_dir_of(d)->now;
    uint64_t sum = 2; /* in no order */
    for (int i = 0; i < in->n; i++)
        sum += mix((uint64_t)in->at[i].text, disk_hash_node(in->at[i].node));
    return mix(sum, 3) | 1;
}

static void show(int node, const char *name, int depth)
{
    const struct node *d = &g_disk.node[node];
    const struct dir *in = disk_dir_of(d);
    bool durable = in ? !in->n_changes : !d->dirty;
    fprintf(stderr, "%*s%s%s %zu%s\n", 2 * depth, "", name, in ? "/" : "", disk_size(d),
            durable ? "" : " (not durable)");
    for (int i = 0; in && i < in->now.n; i++)
        show(in->now.at[i].node, disk_text(in->now.at[i].text), depth + 1);
}

void disk_show(void)
{
    show(0, "/sim", 0);
}
