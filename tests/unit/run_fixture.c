/* See run_fixture.h. */
#include "tests/unit/run_fixture.h"
#include "base/check.h"
#include "config/manifest.h"
#include "tests/unit/scratch.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void run_fixture_open(lg_run *r, const char *more)
{
    char cwd[1024], toml[8192];
    scratch_make();
    scratch_write("data/a.txt", "a caption");
    LG_ASSERT(getcwd(cwd, sizeof cwd));
    int n = snprintf(toml, sizeof toml,
                     "[job]\nname = \"fake\"\ndir = \"run\"\n[data]\npath = \"data\"\n"
                     "[text]\nmodel = \"%s/examples/emoji/text_encoder\"\n"
                     "[vae]\nmodel = \"%s/examples/emoji/vae\"\n"
                     "[trainer]\nmax_steps = 60\nglobal_batch_size = 16\n%s",
                     cwd, cwd, more);
    LG_ASSERT((size_t)n < sizeof toml);
    scratch_write("pipeline.toml", toml);
    lg_run_init(r, scratch_path("run"));
}

lg_config *run_fixture_config(const char *const *set)
{
    lg_config *c = NULL;
    int n = 0;
    while (set && set[n]) n++;
    LG_ASSERT(lg_config_load(scratch_path("pipeline.toml"), set, n, &c) == 0);
    return c;
}

void run_fixture_make(lg_run *r, const char *more)
{
    run_fixture_open(r, more);
    LG_ASSERT(lg_run_create(r) == 0);
    LG_ASSERT(lg_run_decide(r, run_fixture_config(NULL)) == 0);
    LG_ASSERT(lg_run_save(r) == 0);
}

void run_fixture_close(lg_run *r)
{
    lg_run_runtime_remove(r);
    lg_run_close(r);
    scratch_remove();
    lg_err_clear();
}

void run_fixture_checkpoint(const lg_run *r, const char *dir, uint64_t step)
{
    char path[LG_PATH_BYTES], file[LG_PATH_BYTES];
    lg_manifest *m = calloc(1, sizeof *m);
    LG_ASSERT(m);
    m->step = step;
    m->plan_hash = r->plan.hash;
    m->lineage = r->lineage;
    m->seed = (uint64_t)r->config->job_seed;
    m->lr_steps = (uint64_t)r->plan.lr_steps;
    m->ranks = m->threads = 1;
    snprintf(m->name, sizeof m->name, "%s", r->config->job_name);
    snprintf(m->isa, sizeof m->isa, "%s", r->plan.isa);
    LG_ASSERT(lg_path(path, "%s/checkpoints/%s_step%" PRIu64, dir, m->name, step) == 0);
    LG_ASSERT(lg_path(file, "%s/state", path) == 0);
    LG_ASSERT(lg_mkdirs(path) == 0);
    LG_ASSERT(lg_publish_file(file, "state\n", 6) == 0);
    LG_ASSERT(lg_manifest_add(m, path, "state") == 0);
    LG_ASSERT(lg_manifest_save(m, path) == 0);
    free(m);
}
