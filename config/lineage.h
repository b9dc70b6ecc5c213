/* The lineage of a run: which history a file belongs to. Every checkpoint's manifest, every record of
 * the ledger, the board and DIR/lineage carry its id; a resume carries it on.
 *
 * The id is a hash of what decides the bits of every state: the plan (seed, model, batch ...), the length
 * of the learning rate's schedule, the job's name, and the weights that the run began with. It is not a
 * random number, for three reasons:
 *   - two runs of one config make the same bytes, manifests and ledger included, so that they can be
 *     compared with cmp;
 *   - a run that loses power before its first checkpoint begins again under its own id, whatever of
 *     its files is left;
 *   - a checkpoint of the same lineage that was copied here is the one this run would have written.
 * What it cannot tell apart, a second run of the same config that begins from nothing in a folder that is
 * in use, is told apart by the files: supervisor/run/folder.h refuses such a start.
 *
 * The data set is not in it: nobody knows it before a loader has read it. */
#pragma once
#include "config/plan.h"

/* Of a new run by this config and its plan. weights: hash of those it begins with, 0 when they come from the seed. Never 0, which
 * stands for "not known" (files of builds that did not know lineages). */
uint64_t lg_lineage_new(const lg_config *c, const lg_plan *p, uint64_t weights);
/* Of a run that goes on from this step of another lineage with another plan (trainer.resume_changes). Never 0. */
uint64_t lg_lineage_changed(uint64_t lineage, const lg_plan *p, uint64_t step);
