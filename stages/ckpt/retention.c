/* Which checkpoints stay; see retention.h. */
#include "stages/ckpt/retention.h"
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECKPOINTS_MAX = 4096 };

struct found {
    uint64_t step;
    bool complete;
};

static int by_step_down(const void *a, const void *b)
{
    uint64_t x = ((const struct found *)a)->step, y = ((const struct found *)b)->step;
    return (x < y) - (x > y);
}

/* Is it this run's? complete: only what a start would go on from. What that passes over must not count, or a
 * damaged one of a higher step would push out the one that the run goes on from. */
static bool is_ours(const struct lg_retention *r, const char *path, struct found *f)
{
    static lg_manifest m;
    int rc = lg_manifest_load(path, &m);
    f->complete = rc == 0;
    if (rc < 0) rc = lg_manifest_read(path, &m);
    lg_err_clear();
    return rc == 0 && m.step == f->step && lg_manifest_same_run(&m, r->newest);
}

/* This run's, newest first. */
static int list(const struct lg_retention *r, struct found *found, int *ret_n)
{
    char path[LG_PATH_BYTES];
    int n = 0;
    DIR *d = opendir(r->dir);
    if (!d) return LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", r->dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d)) && n < CHECKPOINTS_MAX;) {
        struct found *f = &found[n];
        if (!lg_checkpoint_step(e->d_name, r->newest->name, &f->step)) continue;
        if (f->step > r->newest->step || lg_path(path, "%s/%s", r->dir, e->d_name) < 0) continue;
        n += is_ours(r, path, f);
    }
    closedir(d);
    qsort(found, (size_t)n, sizeof *found, by_step_down);
    *ret_n = n;
    return 0;
}

static int remove_one(const char *dir, const char *name, uint64_t step)
{
    char from[LG_PATH_BYTES], to[LG_PATH_BYTES];
    LG_TRY(lg_path(from, "%s/%s_step%" PRIu64, dir, name, step));
    LG_TRY(lg_path(to, "%s/.old-%s_step%" PRIu64, dir, name, step));
    if (rename(from, to) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", from, strerror(errno));
    /* Else a power cut may undo the rename and keep the removals. */
    LG_TRY(lg_fsync_dir(dir));
    LG_TRY(lg_remove_tree(to));
    return 0;
}

int lg_retention_apply(const struct lg_retention *r)
{
    static struct found found[CHECKPOINTS_MAX];
    const char *name = r->newest->name;
    int n = 0, kept = 0;
    lg_manifest_remove_leftovers(r->dir, name, r->shared ? r->newest->step : UINT64_MAX);
    LG_TRY(list(r, found, &n));
    for (int i = 0; i < n; i++) {
        if (kept >= LG_MAX(r->keep, 1))
            LG_TRY(remove_one(r->dir, name, found[i].step));
        else
            kept += found[i].complete;
    }
    return 0;
}
