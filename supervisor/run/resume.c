/* What a start continues from; see run.h.
 *
 * Precedence: the newest complete checkpoint in the run directory (trainer.auto_resume), then
 * trainer.resume_from, then a new run (from trainer.init_from's weights or from nothing; that is
 * the trainer's matter). What decides bits is taken over from what is continued: the instruction
 * set, the length of the learning rate's schedule and the lineage; every other such key must be the
 * same. Where trainer.resume_changes lets one differ, another lineage begins, which follows from the old one
 * and the step. */
#include "base/check.h"
#include "config/lineage.h"
#include "config/manifest.h"
#include "config/models.h"
#include "supervisor/run/run.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is known of the run that made a checkpoint. */
struct origin {
    lg_config *config; /* NULL: its run directory is not there any more */
    lg_plan plan;
    bool has_plan;
};

static int load_origin(const char *run_dir, struct origin *ret)
{
    char path[LG_PATH_BYTES];
    *ret = (struct origin){0};
    LG_TRY(lg_path(path, "%s/plan.json", run_dir));
    if (!lg_path_exists(path)) return 0;
    LG_TRY(lg_plan_load(path, &ret->plan));
    ret->has_plan = true;
    LG_TRY(lg_path(path, "%s/config.toml", run_dir));
    if (lg_path_exists(path)) LG_TRY(lg_config_load(path, NULL, 0, &ret->config));
    return 0;
}

/* A plan that differs in what trainer.resume_changes names, and in nothing else: what was before still makes the old
 * one, with the models' files as they are now. */
static int plan_changed(lg_run *r, const struct origin *o, const lg_manifest *m)
{
    lg_plan before;
    LG_ASSERT(o->has_plan); /* where there is a config (load_origin) */
    LG_TRY(lg_plan_resume(o->config, &o->plan, &before));
    if (before.hash != m->plan_hash)
        return LG_FAIL(LG_ERR_MISMATCH, "the checkpoint %s was made by another plan than its run's",
                       r->resume);
    LG_TRY(lg_plan_make(r->config, o->plan.isa, &r->plan));
    r->plan.lr_steps = o->plan.lr_steps;
    return 0;
}

static int plan_like(lg_run *r, const struct origin *o, const lg_manifest *m, bool *ret_changed)
{
    *ret_changed = false;
    if (o->config)
        LG_TRY(lg_config_compatible(o->config, r->config, &r->config->trainer_resume_changes,
                                    ret_changed));
    if (*ret_changed) return plan_changed(r, o, m);
    if (o->has_plan) {
        LG_TRY(lg_plan_resume(r->config, &o->plan, &r->plan));
    } else {
        LG_TRY(lg_plan_make(r->config, m->isa, &r->plan));
        if (m->lr_steps) r->plan.lr_steps = (int64_t)m->lr_steps;
    }
    if (r->plan.hash != m->plan_hash)
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "the checkpoint %s was made by another plan (hash %016" PRIx64 ", now %016" PRIx64
            "): a model's files, the build or a key that decides the result has changed; "
            "restore it, or start a new run in another job.dir with "
            "trainer.init_from=%s",
            r->resume, m->plan_hash, r->plan.hash, r->resume);
    return 0;
}

/* Every byte is read once before anything is trained on it (the stages read it again, from the
 * cache): a checkpoint that was damaged since must not become the start of another thousand steps. */
static int check_bytes(const lg_run *r, const lg_manifest *m)
{
    char why[1024];
    int rc = lg_manifest_verify(m, r->resume);
    if (rc == 0) return 0;
    snprintf(why, sizeof why, "%s", lg_err_message());
    return LG_FAIL(rc,
                   "cannot go on from %s: %s; restore it, or move it away to go on from an older "
                   "checkpoint",
                   r->resume, why);
}

/* Whether it still is what the loaders see, they say (shm/data_set.h): lgsup reads no data sets. */
static int take_data(lg_run *r, const lg_manifest *m)
{
    if (m->n_data == LG_DATA_PARTS_MAX && r->config->data_allow_changed)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "data.allow_changed: the data set of this run has changed %d times, which is as "
            "often as a manifest can say: start a new run in another job.dir with "
            "trainer.init_from=%s",
            m->n_data - 1, r->resume);
    if (m->n_data && m->data[m->n_data - 1].first > m->step * (uint64_t)r->plan.batch)
        return LG_FAIL(LG_ERR_CORRUPT, "%s/manifest.json: its data set begins after its step",
                       r->resume);
    memcpy(r->data, m->data, sizeof r->data);
    r->n_data = m->n_data;
    return 0;
}

static int continue_from(lg_run *r, const char *origin_dir, const lg_manifest *m)
{
    struct origin o;
    bool changed;
    int rc = load_origin(origin_dir, &o);
    if (rc == 0) rc = plan_like(r, &o, m, &changed);
    if (rc == 0) rc = take_data(r, m);
    if (rc == 0) rc = check_bytes(r, m);
    lg_config_free(&o.config);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    r->start_step = m->step;
    /* A build that knew no lineages: as if the run had begun with this one. */
    r->lineage = m->lineage ? m->lineage : lg_lineage_new(r->config, &r->plan, 0);
    if (changed) r->lineage = lg_lineage_changed(r->lineage, &r->plan, m->step);
    return 0;
}

static int begin_new(lg_run *r)
{
    const lg_config *c = r->config;
    uint64_t weights = 0;
    LG_TRY(lg_plan_make(c, NULL, &r->plan));
    if (c->trainer_init_from[0]) {
        char dir[LG_PATH_BYTES];
        LG_TRY(lg_checkpoint_weights_dir(c->trainer_init_from, "ema", dir));
        LG_TRY(lg_denoiser_identity(dir, &weights));
    } else if (c->model_from[0] && !c->model_fresh) {
        LG_TRY(lg_denoiser_identity(c->model_from, &weights));
    }
    r->lineage = lg_lineage_new(c, &r->plan, weights);
    return 0;
}

static int find_newest(lg_run *r, lg_manifest *m)
{
    char checkpoints[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, checkpoints, "checkpoints"));
    int rc = lg_manifest_newest(checkpoints, r->config->job_name, r->resume, m);
    if (rc < 0) r->resume[0] = 0;
    if (rc == LG_ERR_NOTFOUND) {
        lg_err_clear();
        return rc;
    }
    LG_TRY(rc);
    return 0;
}

/* Where hosts share a folder the others go on meanwhile, and remove what is too old by now: there is a newer one. */
static bool was_removed(const lg_run *r)
{
    return lg_config_shares_checkpoints(r->config) && r->resume[0] &&
           !lg_manifest_exists(r->resume);
}

static int decide(lg_run *r, lg_manifest *m)
{
    const lg_config *c = r->config;
    char origin_dir[LG_PATH_BYTES];
    while (c->trainer_auto_resume) {
        int rc = find_newest(r, m);
        if (rc == LG_ERR_NOTFOUND) break;
        if (rc == 0) rc = continue_from(r, r->dir, m);
        if (rc == 0 || !was_removed(r)) return rc;
        lg_err_clear();
    }
    if (!c->trainer_resume_from[0]) return begin_new(r);
    LG_TRY(lg_manifest_load(c->trainer_resume_from, m));
    LG_TRY(lg_path(r->resume, "%s", c->trainer_resume_from));
    LG_TRY(lg_path(origin_dir, "%s/../..", c->trainer_resume_from));
    return continue_from(r, origin_dir, m);
}

int lg_run_decide(lg_run *r, lg_config *config)
{
    lg_config_free(&r->config);
    r->config = config;
    r->resume[0] = 0;
    r->start_step = r->lineage = 0;
    r->n_data = 0;
    lg_manifest *m = calloc(1, sizeof *m);
    if (!m) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a manifest");
    int rc = decide(r, m);
    free(m);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_run_load(lg_run *r)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_run_path(r, path, "config.toml"));
    lg_config_free(&r->config);
    LG_TRY(lg_config_load(path, NULL, 0, &r->config));
    LG_TRY(lg_run_path(r, path, "plan.json"));
    LG_TRY(lg_plan_load(path, &r->plan));
    return 0;
}

int lg_run_save_config(const lg_run *r)
{
    char path[LG_PATH_BYTES];
    char *toml = lg_config_to_toml(r->config);
    if (!toml) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the effective config");
    int rc = lg_run_path(r, path, "config.toml");
    if (rc == 0) rc = lg_publish_file(path, toml, strlen(toml));
    free(toml);
    LG_TRY(rc);
    LG_TRY(lg_run_path(r, path, "plan.json"));
    LG_TRY(lg_plan_save(&r->plan, path));
    return 0;
}

int lg_run_save(const lg_run *r)
{
    char path[LG_PATH_BYTES], line[LG_PATH_BYTES + 1];
    LG_TRY(lg_run_save_config(r));
    LG_TRY(lg_run_path(r, path, "resume"));
    int n = snprintf(line, sizeof line, "%s\n", r->resume);
    LG_TRY(lg_publish_file(path, line, (size_t)n));
    LG_TRY(lg_run_path(r, path, "lineage"));
    n = snprintf(line, sizeof line, "%016" PRIx64 "\n", r->lineage);
    LG_TRY(lg_publish_file(path, line, (size_t)n));
    return 0;
}
