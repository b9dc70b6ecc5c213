/* What follows when the processes of a run are gone: the end grid, the closing words. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/run.h"

/* Draws [sample] captions from the final checkpoint when the run is done, removes the runtime
 * directory and half-removed checkpoints, says where things are. May turn *exit_code from 0 to an error's. */
void lg_finish(lg_run *r, lg_run_state outcome, bool quiet, int *exit_code);
