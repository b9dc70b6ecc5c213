/* A parked run's memory. When a run is parked its processes end, but the keeper stays and with it every
 * region: the next `lgsup start` goes on from the committed step in memory, `lgsup stop` lets the
 * memory go (supervisor/commands/park_resume.h). Kept only when there is something in it that no
 * checkpoint or seed would give again: at least one committed step; and not where the keeper is a
 * service, which a new run makes forget: there the newest checkpoint counts.
 *
 * What says that it is kept: the board's run_state `parked` and memory_kept, and the keeper of the
 * board's row alive. */
#pragma once
#include "supervisor/core/keep.h"

/* Is memory lost of which a mark says that it was made? What is left of it is worth nothing then. */
bool lg_park_is_lost(const lg_keep *k, const lg_board *b);
/* Is there memory to keep, if the keeper has all of it? */
bool lg_park_may_keep(const lg_keep *k, lg_board *b);
/* The board of the parked run in DIR. LG_ERR_NOTFOUND, without a trace: there is none of this build and
 * boot. */
int lg_park_open(const char *dir, lg_board **ret);
/* Is the run in DIR parked with its memory kept? *ret_step (or NULL): the step it goes on from. */
bool lg_park_is_kept(const char *dir, uint64_t *ret_step);
/* Makes the board of a parked run one whose lgsup has died: the next may adopt it. */
void lg_park_reopen(lg_board *b);
