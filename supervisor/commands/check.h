/* `lgsup check FILE`: is the config right, and what would run? Schema errors first, then rules, then
 * the machine's GPUs (`lg-device`), then each role is asked for its bytes (`lg-<role> --plan`): lgsup
 * itself computes nothing. */
#pragma once
#include "supervisor/run/run.h"

/* Prints plan, processes, regions and bytes per device. LG_ERR_NOSPACE when it does not fit. */
int lg_check(const char *file, const char *const *set, int n_set);
/* Before a start, silently: are the GPUs of this run's config fit, and has every device the memory? What
 * control groups allow counts: those of lgsup, or of the units that the run's processes are. Sets the plan's `apart` as the
 * GPUs ask for. */
int lg_check_room(const char *file, lg_run *r);
