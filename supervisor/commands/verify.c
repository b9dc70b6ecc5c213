/* `lgsup verify`; see verify.h. */
#include "supervisor/commands/verify.h"
#include "base/printable.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "supervisor/run/child.h"
#include "supervisor/run/run.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OUTPUT_BYTES_MAX = 1 << 16, ITEMS_MS = 3600000 /* reads all pictures' beginnings */ };

static int verify_checkpoint(const char *dir, lg_manifest *m)
{
    LG_TRY(lg_manifest_load(dir, m));
    LG_TRY(lg_manifest_verify(m, dir));
    printf("ok  %s: step %" PRIu64 ", %d files\n", dir, m->step, m->n_files);
    return 0;
}

/* Directories with a manifest; half-written ones have none, or a temporary name. newest: of the run; what
 * has this run's name must be of its lineage too. */
static int verify_entry(const char *path, const char *entry, const lg_manifest *newest)
{
    static lg_manifest m;
    uint64_t step;
    LG_TRY(verify_checkpoint(path, &m));
    if (!lg_checkpoint_step(entry, newest->name, &step)) return 0;
    if (lg_manifest_same_run(&m, newest) && m.step <= newest->step &&
        !lg_manifest_same_data(&m, newest))
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s was trained on other data than the newest checkpoint says", path);
    if (lg_manifest_same_run(&m, newest)) return 0;
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s is of another run: of lineage %016" PRIx64
                   ", the newest checkpoint is of %016" PRIx64,
                   path, m.lineage, newest->lineage);
}

static int verify_checkpoints(const char *dir, const lg_manifest *newest, int *ret_count)
{
    *ret_count = 0;
    DIR *d = opendir(dir);
    if (!d) return 0;
    struct dirent *e;
    int rc = 0;
    while (rc == 0 && (e = readdir(d))) {
        char path[LG_PATH_BYTES];
        if (e->d_name[0] == '.' || !strstr(e->d_name, "_step")) continue;
        rc = lg_path(path, "%s/%s", dir, e->d_name);
        if (rc < 0 || !lg_manifest_exists(path)) continue;
        rc = verify_entry(path, e->d_name, newest);
        ++*ret_count;
    }
    closedir(d);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* Which items the samples were follows from the sizes of pictures: the loader's program knows. Its words are ours. */
static int verify_items(const lg_run *r)
{
    char program[LG_PATH_BYTES], *text = NULL;
    char *argv[] = {program, (char *)"--ledger", (char *)r->dir, NULL};
    int code = 0;
    LG_TRY(lg_program_path(lg_role_program(LG_ROLE_loader), program));
    struct lg_capture c;
    LG_TRY(lg_capture_begin(program, argv, &c));
    c.timeout_ms = ITEMS_MS;
    LG_TRY(lg_capture_end(&c, OUTPUT_BYTES_MAX, &text, &code));
    if (code == 0)
        lg_print(stdout, "%s", text);
    else
        code = LG_FAIL(code > 0 && code < LG_EXIT_SIGNAL ? -code : LG_ERR_FAILED, "%.800s", text);
    free(text);
    return code;
}

/* The records begin at 0, or, when this run went on from a checkpoint of another directory
 * (trainer.resume_from), behind a hole. */
static int verify_ledger(const lg_run *r, const lg_manifest *newest)
{
    char path[LG_PATH_BYTES];
    struct lg_ledger_check c = {
        .last_step = newest->step, .batch = (uint64_t)r->plan.batch, .lineage = newest->lineage};
    LG_TRY(lg_run_path(r, path, "ledger"));
    if (r->config->trainer_resume_from[0]) LG_TRY(lg_ledger_first(path, &c.first_step));
    LG_TRY(lg_ledger_verify(path, &c));
    lg_print(stdout, "ok  %s: steps %" PRIu64 " to %" PRIu64 ", each sample once\n", path,
             c.first_step, c.last_step);
    if (r->plan.buckets.n || r->config->data_source.n) LG_TRY(verify_items(r));
    for (int i = 1; i < newest->n_data; i++)
        printf("the data set has changed, allowed, at step %" PRIu64 ": %" PRIu64
               " items, then %" PRIu64 "\n",
               newest->data[i].first / c.batch, newest->data[i - 1].items, newest->data[i].items);
    return 0;
}

static int verify_run(lg_run *r, lg_manifest *m)
{
    char checkpoints[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    int count;
    LG_TRY(lg_run_load(r));
    LG_TRY(lg_run_path(r, checkpoints, "checkpoints"));
    int rc = lg_manifest_newest(checkpoints, r->config->job_name, newest, m);
    if (rc < 0 && rc != LG_ERR_NOTFOUND) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    lg_err_clear();
    LG_TRY(verify_checkpoints(checkpoints, m, &count)); /* damaged ones are named here */
    if (count == 0) {
        lg_print(stdout, "%s has no complete checkpoint yet\n", r->dir);
        return 0;
    }
    LG_TRY(lg_manifest_newest(checkpoints, r->config->job_name, newest, m));
    LG_TRY(verify_ledger(r, m));
    return 0;
}

static int verify(const char *dir, lg_run *r, lg_manifest *m)
{
    char path[LG_PATH_BYTES];
    if (lg_manifest_exists(dir)) return verify_checkpoint(dir, m);
    LG_TRY(lg_path(path, "%s/config.toml", dir));
    if (!lg_path_exists(path) && errno == EACCES)
        return LG_FAIL(LG_ERR_IO, "cannot look into %s: %s", dir, strerror(errno));
    if (!lg_path_exists(path))
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "%s is neither a complete checkpoint (no manifest.json) nor a run directory "
                       "(no config.toml)",
                       dir);
    lg_run_init(r, dir);
    int rc = verify_run(r, m);
    lg_run_close(r);
    return rc;
}

int lg_verify(const char *dir)
{
    lg_manifest *m = calloc(1, sizeof *m);
    lg_run *r = calloc(1, sizeof *r);
    int rc = m && r ? verify(dir, r, m) : LG_FAIL(LG_ERR_NOSPACE, "no memory to verify %s", dir);
    free(r);
    free(m);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
