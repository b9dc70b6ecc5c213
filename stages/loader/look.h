/* Data sets looked over without a run; what lg-loader does beside being a loader. */
#pragma once
#include "config/plan.h"
#include "stages/io/source.h"

/* At which a run's clips have their frames. */
struct lg_clip_rate lg_loader_rate(const lg_config *c);
/* The order of samples of a run with buckets. size: of all items. */
int lg_loader_order(const lg_config *c, const lg_plan *p, const lg_source *s,
                    const struct lg_item_size *size, lg_order **ret);

/* `lg-loader --look TARGET [--set KEY=VALUE ...]`, behind `lgsup data`: prints what is in a data set, in words: items,
 * pictures that do not decode (by name), sizes, buckets, captions, copies. Every picture is read and decoded once.
 * target: a pipeline.toml (its name ends so), whose data.path, buckets and text encoder count; or a data.path alone, with
 * the buckets "ratio" at data.size = 1024. Only a target that is no data set at all is an error. */
int lg_loader_look(const char *target, const char *const *set, int n_set);

/* `lg-loader --ledger RUN`, behind `lgsup verify` of a run with buckets or several sources: does each step up to the newest
 * checkpoint have the items that the order of samples gives it, and each item as often in an epoch as it is to come? Of
 * several sources without buckets: does no item of one come again before all of it have come, and does each source have its
 * share? Only the last part of a run whose data set has changed is looked at. Prints one line; LG_ERR_CORRUPT names the first step that has others. Where the data set is not
 * what the run was trained on, or is not there, the line says so, and that is no error. */
int lg_loader_check_ledger(const char *run_dir);
