/* Whose files a run directory holds; see folder.h. */
#include "supervisor/run/folder.h"
#include "base/check.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ASIDE_TRIES_MAX = 1000 };

/* ---- what is there ---- */

static uint64_t bytes_of(const lg_run *r, const char *name)
{
    char path[LG_PATH_BYTES];
    struct stat st;
    if (lg_run_path(r, path, "%s", name) < 0 || stat(path, &st) < 0) return 0;
    return (uint64_t)st.st_size;
}

/* 0: none is recorded. */
static uint64_t recorded_lineage(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[32], *end = line;
    uint64_t id = 0;
    if (lg_run_path(r, path, "lineage") == 0 && lg_read_line(path, line, sizeof line) == 0)
        id = strtoull(line, &end, 16);
    lg_err_clear();
    return end == line + 16 && !*end ? id : 0;
}

/* A folder of a build that recorded no lineage. */
static bool is_same_plan(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    lg_plan there;
    bool same = lg_run_path(r, path, "plan.json") == 0 && lg_path_exists(path) &&
                lg_plan_load(path, &there) == 0 && there.hash == r->plan.hash;
    lg_err_clear();
    return same;
}

static bool continues_here(const lg_run *r)
{
    char checkpoints[LG_PATH_BYTES], real[PATH_MAX];
    if (!r->resume[0] || !realpath(r->resume, real)) return false;
    if (lg_run_path(r, checkpoints, "checkpoints/") < 0) return false;
    return !strncmp(real, checkpoints, strlen(checkpoints)) ||
           !strncmp(r->resume, checkpoints, strlen(checkpoints));
}

/* ---- refusals ---- */

static int refuse(const lg_run *r, const char *what)
{
    return LG_FAIL(
        LG_ERR_MISMATCH,
        "%s: choose another job.dir, or move what is there to %s/aside with `lgsup start "
        "FILE --set-aside`%s",
        what, r->dir,
        r->resume[0] || r->config->trainer_auto_resume
            ? ""
            : ", or go on from it with trainer.auto_resume = true");
}

/* One entry of checkpoints/ as this start sees it. */
struct entry {
    const char *file;
    char path[LG_PATH_BYTES];
    bool is_named; /* as this run's are called */
    uint64_t step;
};

/* A manifest that cannot be read, or files that are not what it says: no start goes on from that. */
static int check_damaged(const lg_run *r, const struct entry *e)
{
    char what[2048], why[1024];
    if (r->resume[0] || !e->is_named) {
        lg_err_clear();
        return 0;
    }
    snprintf(why, sizeof why, "%s", lg_err_message());
    lg_err_clear();
    snprintf(what, sizeof what,
             "a new run would begin in %.300s, which holds the checkpoint %.200s, damaged (%s): "
             "restore it to go on from it, or",
             r->dir, e->file, why);
    return refuse(r, what);
}

static int check_named(const lg_run *r, const struct entry *e, const lg_manifest *m)
{
    char what[2048];
    static lg_manifest ours, there;
    ours.lineage = r->lineage;
    ours.plan_hash = r->plan.hash;
    snprintf(ours.name, sizeof ours.name, "%s", r->config->job_name);
    if (!lg_manifest_same_run(m, &ours)) {
        snprintf(what, sizeof what,
                 "%.300s holds another run: the checkpoint %.200s is of lineage %016" PRIx64
                 ", this start %s lineage %016" PRIx64,
                 r->dir, e->file, m->lineage, r->resume[0] ? "goes on with" : "begins", r->lineage);
        return refuse(r, what);
    }
    if (m->step <= r->start_step && r->resume[0]) return 0;
    /* Of a folder that hosts share: another one has published it since this start has looked. */
    if (lg_config_shares_checkpoints(r->config) && r->config->trainer_auto_resume) return 0;
    if (lg_manifest_load(e->path, &there) < 0) return check_damaged(r, e);
    snprintf(what, sizeof what,
             "%.300s holds the checkpoint %.200s of lineage %016" PRIx64
             ", a later step than the %" PRIu64 " that this start %s",
             r->dir, e->file, m->lineage, r->start_step,
             r->resume[0] ? "would go back to" : "would begin with");
    return refuse(r, what);
}

static int check_other_name(const lg_run *r, const struct entry *e, const lg_manifest *m)
{
    char what[2048];
    if (continues_here(r)) return 0; /* somebody has put it there; nothing of ours touches it */
    snprintf(
        what, sizeof what,
        "%.300s holds another run: the checkpoint %.200s of job \"%.100s\", lineage %016" PRIx64,
        r->dir, e->file, m->name, m->lineage);
    return refuse(r, what);
}

static int check_entry(const lg_run *r, const char *dir, const char *file)
{
    static struct entry e;
    static lg_manifest m;
    e.file = file;
    e.is_named = lg_checkpoint_step(file, r->config->job_name, &e.step);
    LG_TRY(lg_path(e.path, "%s/%s", dir, file));
    if (file[0] == '.' || !strstr(file, "_step") || strstr(file, ".of-")) return 0;
    if (!lg_manifest_exists(e.path)) return 0;
    if (lg_manifest_read(e.path, &m) < 0) return check_damaged(r, &e);
    return e.is_named ? check_named(r, &e, &m) : check_other_name(r, &e, &m);
}

static int check_checkpoints(const lg_run *r)
{
    char dir[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, dir, "checkpoints"));
    DIR *d = opendir(dir);
    if (!d && errno == ENOENT) return 0;
    if (!d) return LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", dir, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) rc = check_entry(r, dir, e->d_name);
    closedir(d);
    LG_TRY(rc);
    return 0;
}

static int check_records(const lg_run *r)
{
    char what[1024];
    uint64_t ledger = bytes_of(r, "ledger"), id = recorded_lineage(r);
    if (!ledger && !bytes_of(r, "metrics.jsonl")) return 0;
    if (id ? id == r->lineage : continues_here(r) || is_same_plan(r)) return 0;
    snprintf(what, sizeof what,
             "%.300s holds the ledger and metrics of another run (%" PRIu64
             " steps, lineage %016" PRIx64 "); this start %s lineage %016" PRIx64,
             r->dir, ledger / sizeof(struct lg_ledger_record), id,
             r->resume[0] ? "goes on with" : "begins", r->lineage);
    return refuse(r, what);
}

int lg_folder_check(const lg_run *r)
{
    LG_TRY(check_checkpoints(r));
    LG_TRY(check_records(r));
    return 0;
}

/* ---- setting aside ---- */

/* What belongs to the run rather than to the directory: what is left is a lock and what lgsup makes anew
 * with each start. */
static const char *const of_run[] = {
    "checkpoints", "metrics.jsonl", "ledger", "samples", "tensorboard", "histograms", "logs",
    "config.toml", "plan.json",     "resume", "lineage", "status.json", "algorithms", "data.json",
};

static bool holds_a_run(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    static const char *const signs[] = {"config.toml", "lineage", "metrics.jsonl", "ledger"};
    for (size_t i = 0; i < LG_ARRAY_LEN(signs); i++)
        if (lg_run_path(r, path, "%s", signs[i]) == 0 && lg_path_exists(path)) return true;
    if (lg_run_path(r, path, "checkpoints") < 0) return false;
    DIR *d = opendir(path);
    bool any = false;
    for (struct dirent *e; d && (e = readdir(d));)
        any = any || (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."));
    if (d) closedir(d);
    return any;
}

/* A name that is free, relative to the run directory. */
static int choose_place(const lg_run *r, char ret[64])
{
    char path[LG_PATH_BYTES];
    uint64_t id = recorded_lineage(r);
    for (int i = 1; i <= ASIDE_TRIES_MAX; i++) {
        int n = snprintf(ret, 64, "aside/%016" PRIx64, id);
        if (i > 1) snprintf(ret + n, 64 - (size_t)n, ".%d", i);
        LG_TRY(lg_run_path(r, path, "%s", ret));
        if (!lg_path_exists(path)) return 0;
    }
    return LG_FAIL(LG_ERR_BUSY, "%s/aside holds %d runs of lineage %016" PRIx64 ": move some away",
                   r->dir, ASIDE_TRIES_MAX, id);
}

/* What stands at the new place has been moved already; under the old one is a new start's folder then. */
static int move_one(const lg_run *r, const char *to_dir, const char *name)
{
    char from[LG_PATH_BYTES], to[LG_PATH_BYTES];
    struct stat st;
    LG_TRY(lg_run_path(r, from, "%s", name));
    LG_TRY(lg_path(to, "%s/%s", to_dir, name));
    if (lstat(to, &st) == 0 || lstat(from, &st) < 0) return 0;
    if (rename(from, to) < 0)
        return LG_FAIL(
            lg_err_from_errno(errno),
            "cannot move %s to %s: %s; where it is a mount point, move its content by hand", from,
            to, strerror(errno));
    return 0;
}

int lg_folder_finish_aside(const lg_run *r)
{
    char marker[LG_PATH_BYTES], place[64], to[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, marker, "setting-aside"));
    if (!lg_path_exists(marker)) return 0;
    LG_TRY(lg_read_line(marker, place, sizeof place));
    if (strncmp(place, "aside/", 6) || strchr(place + 6, '/') || strstr(place, "..") || !place[6])
        return LG_FAIL(LG_ERR_CORRUPT, "%s does not name a folder below aside/: remove it", marker);
    LG_TRY(lg_run_path(r, to, "%s", place));
    LG_TRY(lg_mkdirs(to));
    for (size_t i = 0; i < LG_ARRAY_LEN(of_run); i++) LG_TRY(move_one(r, to, of_run[i]));
    LG_TRY(lg_fsync_dir(to));
    LG_TRY(lg_fsync_dir(r->dir));
    if (unlink(marker) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot remove %s: %s", marker, strerror(errno));
    LG_TRY(lg_run_make_folders(r)); /* empty */
    return 0;
}

/* A path into DIR/checkpoints, which is now below `to`. */
static int follow(const lg_run *r, const char *to, char **path)
{
    char from[LG_PATH_BYTES], real[PATH_MAX], now[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, from, "checkpoints/"));
    if (!**path || !realpath(*path, real) || strncmp(real, from, strlen(from))) return 0;
    LG_TRY(lg_path(now, "%s/checkpoints/%s", to, real + strlen(from)));
    char *copy = strdup(now);
    if (!copy) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a path");
    free(*path);
    *path = copy;
    return 0;
}

int lg_folder_set_aside(const lg_run *r, lg_config *config, char ret_to[LG_PATH_BYTES])
{
    char place[64], line[80], path[LG_PATH_BYTES];
    *ret_to = 0;
    LG_TRY(lg_folder_finish_aside(r));
    if (!holds_a_run(r)) return 0;
    LG_TRY(choose_place(r, place));
    LG_TRY(lg_run_path(r, ret_to, "%s", place));
    LG_TRY(follow(r, ret_to, &config->trainer_resume_from));
    LG_TRY(follow(r, ret_to, &config->trainer_init_from));
    int n = snprintf(line, sizeof line, "%s\n", place);
    LG_TRY(lg_run_path(r, path, "setting-aside"));
    LG_TRY(lg_publish_file(path, line, (size_t)n));
    LG_TRY(lg_folder_finish_aside(r));
    return 0;
}
