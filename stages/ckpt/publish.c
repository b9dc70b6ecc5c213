/* Publishing a checkpoint; see publish.h. Invariant: a directory under a real name is complete, and
 * its name is durable before this says so, whoever has renamed it. */
#include "stages/ckpt/publish.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file that another process writes: fsync concerns the file, whoever has the data's fd. */
static int sync_file(const char *run_dir, const char *name)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/%s", run_dir, name));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT
                   ? 0
                   : LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    int bad = lg_fsync(fd) < 0 ? errno : 0;
    close(fd);
    if (bad) return LG_FAIL(lg_err_from_errno(bad), "fsync of %s: %s", path, strerror(bad));
    return 0;
}

/* The directory too: the trainer has created the files and not waited for their names. */
static int sync_records(const char *run_dir)
{
    LG_TRY(sync_file(run_dir, "ledger"));
    LG_TRY(sync_file(run_dir, "metrics.jsonl"));
    LG_TRY(lg_fsync_dir(run_dir));
    return 0;
}

static bool same_files(const lg_manifest *a, const lg_manifest *b)
{
    if (a->n_files != b->n_files || a->step != b->step || !lg_manifest_same_run(a, b)) return false;
    for (int i = 0; i < a->n_files; i++)
        if (strcmp(a->file[i].path, b->file[i].path) || a->file[i].hash != b->file[i].hash)
            return false;
    return true;
}

/* A predecessor may have come this far before it died. */
static bool is_there(const char *dir, const lg_manifest *m)
{
    lg_manifest *there = calloc(1, sizeof *there);
    LG_ASSERT(there);
    bool done = lg_manifest_exists(dir) && lg_manifest_load(dir, there) == 0 &&
                same_files(there, m) && lg_manifest_verify(there, dir) == 0;
    free(there);
    lg_err_clear();
    return done;
}

struct names {
    char parent[LG_PATH_BYTES], tmp[LG_PATH_BYTES];
    const char *final;
};

enum { ASIDE_TRIES_MAX = 100 };

/* What stands under the name and is not this checkpoint: one of this run that is damaged goes; one of another
 * lineage, which somebody has put there, is not ours to remove and gets another name. */
static int make_way(const char *parent, const char *final, const lg_manifest *m)
{
    lg_manifest *there = calloc(1, sizeof *there);
    if (!there) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a manifest");
    bool foreign = lg_manifest_read(final, there) == 0 && !lg_manifest_same_run(there, m);
    uint64_t lineage = there->lineage;
    free(there);
    lg_err_clear();
    if (!foreign) return lg_remove_tree(final);
    for (int i = 0; i < ASIDE_TRIES_MAX; i++) {
        char to[LG_PATH_BYTES];
        LG_TRY(lg_path(to, "%s.of-%016" PRIx64 ".%d", final, lineage, i));
        if (lg_path_exists(to)) continue;
        if (rename(final, to) < 0)
            return LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", final, to,
                           strerror(errno));
        /* Else a power cut may undo this and keep that ours has the name. */
        LG_TRY(lg_fsync_dir(parent));
        return 0;
    }
    return LG_FAIL(LG_ERR_BUSY, "too many checkpoints of other runs beside %s: move them away",
                   final);
}

/* A name is taken once: rename() puts no directory in the place of one that has something in it. *ret_taken: by the
 * same checkpoint, which another host has published meanwhile. */
static int take_name(const struct names *n, const lg_manifest *m, bool *ret_taken)
{
    const char *tmp = n->tmp, *final = n->final;
    *ret_taken = false;
    if (rename(tmp, final) == 0) return 0;
    if (lg_path_exists(final)) {
        *ret_taken = is_there(final, m);
        if (*ret_taken) return 0;
        LG_TRY(make_way(n->parent, final, m));
        if (rename(tmp, final) == 0) return 0;
    }
    return LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", tmp, final,
                   strerror(errno));
}

static int publish(const struct lg_publishing *p, const struct names *n, lg_manifest *m)
{
    LG_TRY(lg_mkdirs(n->parent));
    LG_TRY(lg_remove_tree(n->tmp));
    LG_TRY(lg_mkdirs(n->tmp));
    LG_TRY(lg_checkpoint_write(n->tmp, &p->contents, m));
    LG_TRY(sync_records(p->run_dir));
    bool taken = is_there(n->final, m);
    if (!taken) {
        LG_TRY(lg_manifest_save(m, n->tmp));
        LG_TRY(lg_fsync_dir(n->tmp));
        LG_TRY(take_name(n, m, &taken));
    }
    if (taken) LG_TRY(lg_remove_tree(n->tmp));
    /* In both cases: who has renamed may have died before this. */
    LG_TRY(lg_fsync_dir(n->parent));
    return 0;
}

int lg_checkpoint_publish(const struct lg_publishing *p, lg_manifest *m,
                          char ret_dir[LG_PATH_BYTES])
{
    struct names n;
    char final[LG_PATH_BYTES], why[1024];
    LG_TRY(lg_path(n.parent, "%s/checkpoints", p->run_dir));
    LG_TRY(lg_path(n.tmp, "%s/.tmp-%s_step%" PRIu64 "%s%s", n.parent, m->name, m->step,
                   p->writer ? "." : "", p->writer ? p->writer : ""));
    LG_TRY(lg_path(final, "%s/%s_step%" PRIu64, n.parent, m->name, m->step));
    n.final = final;
    int rc = publish(p, &n, m);
    if (rc == 0) {
        memcpy(ret_dir, final, LG_PATH_BYTES);
        return 0;
    }
    snprintf(why, sizeof why, "%s", lg_err_message());
    lg_remove_tree(n.tmp);
    return LG_FAIL(rc, "%s", why);
}
