/* Which checkpoints stay; see retention.h. */
#include "stages/ckpt/retention.h"
#include "config/manifest.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECKPOINTS_MAX = 4096 };

struct found {
    long long step;
    bool complete;
};

static int by_step_down(const void *a, const void *b)
{
    long long x = ((const struct found *)a)->step, y = ((const struct found *)b)->step;
    return (x < y) - (x > y);
}

/* N of "<name>_step<N>" as publish.c writes it: "_step01" is somebody else's. */
static bool step_of(const char *entry, const char *name, long long *ret_step)
{
    char again[300];
    size_t at = strlen(name) + strlen("_step");
    long long step = strlen(entry) > at ? strtoll(entry + at, NULL, 10) : -1;
    snprintf(again, sizeof again, "%s_step%lld", name, step);
    if (step < 0 || strcmp(again, entry) != 0) return false;
    *ret_step = step;
    return true;
}

/* As a start looks for what to continue from: what that passes over must not count here, or a damaged
 * one of a higher step would push out the one that the run goes on from. */
static bool is_complete(const char *path)
{
    static lg_manifest m;
    if (lg_manifest_load(path, &m) == 0) return true;
    lg_err_clear();
    return false;
}

/* Those with a manifest, newest first. */
static int list(const char *dir, const char *name, struct found *found, int *ret_n)
{
    char path[LG_PATH_BYTES];
    int n = 0;
    DIR *d = opendir(dir);
    if (!d) return LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d)) && n < CHECKPOINTS_MAX;) {
        if (lg_path(path, "%s/%s", dir, e->d_name) < 0) continue;
        if (!step_of(e->d_name, name, &found[n].step) || !lg_manifest_exists(path)) continue;
        found[n++].complete = is_complete(path);
    }
    closedir(d);
    qsort(found, (size_t)n, sizeof *found, by_step_down);
    *ret_n = n;
    return 0;
}

static int remove_one(const char *dir, const char *name, long long step)
{
    char from[LG_PATH_BYTES], to[LG_PATH_BYTES];
    LG_TRY(lg_path(from, "%s/%s_step%lld", dir, name, step));
    LG_TRY(lg_path(to, "%s/.old-%s_step%lld", dir, name, step));
    if (rename(from, to) < 0)
        return LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", from, strerror(errno));
    /* Else a power cut may undo the rename and keep the removals. */
    LG_TRY(lg_fsync_dir(dir));
    LG_TRY(lg_remove_tree(to));
    return 0;
}

int lg_retention_apply(const char *dir, const char *name, int keep)
{
    static struct found found[CHECKPOINTS_MAX];
    int n = 0, kept = 0;
    lg_manifest_remove_leftovers(dir);
    LG_TRY(list(dir, name, found, &n));
    for (int i = 0; i < n; i++) {
        if (kept >= LG_MAX(keep, 1))
            LG_TRY(remove_one(dir, name, found[i].step));
        else
            kept += found[i].complete;
    }
    return 0;
}
