/* `lgsup verify`; see verify.h. */
#include "supervisor/verify.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "supervisor/run.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int verify_checkpoint(const char *dir, lg_manifest *m)
{
    LG_TRY(lg_manifest_load(dir, m));
    LG_TRY(lg_manifest_verify(m, dir));
    printf("ok  %s: step %" PRIu64 ", %d files\n", dir, m->step, m->n_files);
    return 0;
}

/* Directories with a manifest; half-written ones have none, or a temporary name. */
static int verify_checkpoints(const char *dir, lg_manifest *m, int *ret_count)
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
        rc = verify_checkpoint(path, m);
        ++*ret_count;
    }
    closedir(d);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* Where the ledger begins: 0, or the step of the checkpoint of another run that this one went on
 * from (trainer.resume_from); then the records before it are a hole. */
static int first_step(const lg_run *r, const char *ledger, uint64_t *ret)
{
    struct lg_ledger_record record;
    *ret = 0;
    if (!r->config->trainer_resume_from[0]) return 0;
    int fd = open(ledger, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", ledger, strerror(errno));
    while (pread(fd, &record, sizeof record, (off_t)(*ret * sizeof record)) ==
               (ssize_t)sizeof record &&
           record.step == 0)
        ++*ret;
    close(fd);
    return 0;
}

static int verify_ledger(const lg_run *r, uint64_t last)
{
    char path[LG_PATH_BYTES];
    uint64_t first;
    LG_TRY(lg_run_path(r, path, "ledger"));
    LG_TRY(first_step(r, path, &first));
    LG_TRY(lg_ledger_verify(path, first, last, (uint64_t)r->plan.batch));
    printf("ok  %s: steps %" PRIu64 " to %" PRIu64 ", each sample once\n", path, first, last);
    return 0;
}

static int verify_run(lg_run *r, lg_manifest *m)
{
    char checkpoints[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    int count;
    LG_TRY(lg_run_load(r));
    LG_TRY(lg_run_path(r, checkpoints, "checkpoints"));
    LG_TRY(verify_checkpoints(checkpoints, m, &count));
    if (count == 0) {
        printf("%s has no complete checkpoint yet\n", r->dir);
        return 0;
    }
    LG_TRY(lg_manifest_newest(checkpoints, r->config->job_name, newest, m));
    LG_TRY(verify_ledger(r, m->step));
    return 0;
}

static int verify(const char *dir, lg_run *r, lg_manifest *m)
{
    char path[LG_PATH_BYTES];
    if (lg_manifest_exists(dir)) return verify_checkpoint(dir, m);
    LG_TRY(lg_path(path, "%s/config.toml", dir));
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
