/* Which checkpoints stay; see retention.h. */
#include "stages/ckpt/retention.h"
#include "config/manifest.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHECKPOINTS_MAX = 4096 };

static int by_step_down(const void *a, const void *b)
{
    long long x = *(const long long *)a, y = *(const long long *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Steps of the complete checkpoints, newest first; leftovers of former attempts are removed. */
static int list(const char *dir, const char *name, long long *steps, int *ret_n)
{
    char prefix[300], path[LG_PATH_BYTES];
    int n = 0;
    snprintf(prefix, sizeof prefix, "%s_step", name);
    DIR *d = opendir(dir);
    if (!d) return LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d)) && n < CHECKPOINTS_MAX;) {
        if (lg_path(path, "%s/%s", dir, e->d_name) < 0) continue;
        if (!strncmp(e->d_name, ".tmp-", 5) || !strncmp(e->d_name, ".old-", 5)) {
            if (lg_remove_tree(path) < 0) lg_err_clear();
            continue;
        }
        const char *digits = e->d_name + strlen(prefix);
        if (strncmp(e->d_name, prefix, strlen(prefix)) || !*digits ||
            strspn(digits, "0123456789") != strlen(digits) || !lg_manifest_exists(path))
            continue;
        steps[n++] = atoll(digits);
    }
    closedir(d);
    qsort(steps, (size_t)n, sizeof *steps, by_step_down);
    *ret_n = n;
    return 0;
}

int lg_retention_apply(const char *dir, const char *name, int keep)
{
    static long long steps[CHECKPOINTS_MAX];
    int n = 0;
    LG_TRY(list(dir, name, steps, &n));
    for (int i = LG_MAX(keep, 1); i < n; i++) {
        char from[LG_PATH_BYTES], to[LG_PATH_BYTES];
        LG_TRY(lg_path(from, "%s/%s_step%lld", dir, name, steps[i]));
        LG_TRY(lg_path(to, "%s/.old-%s_step%lld", dir, name, steps[i]));
        if (rename(from, to) < 0)
            return LG_FAIL(LG_ERR_IO, "cannot rename %s: %s", from, strerror(errno));
        LG_TRY(lg_remove_tree(to));
    }
    return 0;
}
