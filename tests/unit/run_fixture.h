/* A run directory "run" in a scratch folder as `lgsup start` makes it: config, plan, folders. No
 * process. Failures are assertions. */
#pragma once
#include "supervisor/run/run.h"

/* Makes the scratch folder, pipeline.toml (`more` is added to it) and an empty lg_run for "run". */
void run_fixture_open(lg_run *r, const char *more);
/* Also decides what it continues from and writes its files. */
void run_fixture_make(lg_run *r, const char *more);
void run_fixture_close(lg_run *r);
/* pipeline.toml, with settings "key=value" (ended by NULL), checked. The caller owns it. */
lg_config *run_fixture_config(const char *const *set);
/* A complete checkpoint of the run's plan in DIR/checkpoints. */
void run_fixture_checkpoint(const lg_run *r, const char *dir, uint64_t step);
