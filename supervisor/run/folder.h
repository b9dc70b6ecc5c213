/* Whose files a run directory holds: may this start begin or go on there? And putting an old run's files
 * aside.
 *
 * A run directory belongs to one lineage (config/lineage.h). A start is refused that would write a second
 * one beside it, or would go on from an older step while later checkpoints are there: retention and
 * `verify` could not tell the files apart any more, and metrics.jsonl and the ledger would be cut.
 *
 *   what the folder holds                        going on from NAME_stepS    beginning at step 0
 *   checkpoints of another lineage, same name    refused                     refused
 *   complete ones of this lineage, after S       refused                     refused
 *   damaged ones of this lineage, after S        passed over                 refused
 *   checkpoints of another name                  fine if S is of this folder refused
 *   later ones, where hosts share the folder     fine: others go on         likewise
 *   ledger or metrics of another lineage         refused                     refused
 *   ledger or metrics of this lineage            cut to S                    cut to nothing
 *
 * So a run that lost power goes on from its newest checkpoint, or begins again when it had none; and one
 * whose newest checkpoint was removed by hand, or is damaged, goes back to an older one in the same lineage:
 * what it writes from there are the same bytes once more. A folder of a build that knew no lineages is
 * told by its plan's hash, and gets the id with its first start. */
#pragma once
#include "supervisor/run/run.h"

/* After lg_run_decide, before anything is written. LG_ERR_MISMATCH says what is there and the ways out. */
int lg_folder_check(const lg_run *r);

/* `start --set-aside`: moves what the run in this (locked) directory has left to DIR/aside/<lineage>, which
 * is a run directory of its own then: it can be verified and continued from. Paths of `config` (resume_from,
 * init_from) that lead to what was moved follow. *ret_to: that folder, "" when there was nothing.
 *
 * All are renames within DIR. DIR/setting-aside, written first and removed last, names the folder: cut off
 * anywhere, the next call of lg_folder_finish_aside does what is left. */
int lg_folder_set_aside(const lg_run *r, lg_config *config, char ret_to[LG_PATH_BYTES]);
/* Ends what a start that was cut off has begun; nothing to do: 0. */
int lg_folder_finish_aside(const lg_run *r);
