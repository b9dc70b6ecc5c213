/* `lgsup start` and `lgsup stop`: everything around the supervisor's loop. */
#pragma once
#include "supervisor/run/run.h"

struct lg_start_args {
    const char *file;
    const char *const *set;
    int n_set;
    bool detach;
    bool set_aside;    /* what an old run has left is moved out of the way first */
    const char *units; /* prefix of the systemd units that this lgsup is one of; NULL: none */
};
/* Loads and checks the config, then adopts, resumes or begins the run and supervises it to its end.
 * With detach: returns when every role is ready. *ret_exit is the exit code when 0 is returned. */
int lg_start(const struct lg_start_args *args, int *ret_exit);
/* Drains the run and returns when every process is gone; a run whose lgsup has died is adopted for
 * that. Nothing runs: fine. units: as in lg_start_args; then waits until its unit is at rest, and only
 * ends a run that has no lgsup then; what a parked one keeps stays. */
int lg_stop(const char *dir, const char *units, int *ret_exit);
/* Supervises what an earlier lgsup of this (locked, loaded) run has left, and ends it in order when
 * `drain`. *ret_adopted: false when there was nothing to take over. */
int lg_start_adopt(lg_run *r, bool drain, bool quiet, int ready_fd, bool *ret_adopted,
                   int *ret_exit);
/* `lgsup stop --kill`: ends every process of the run at once, of whatever build, without a checkpoint;
 * its memory goes, and the board with it. LG_ERR_TIMEOUT when one cannot be ended, LG_ERR_BUSY when
 * they are units of systemd's. */
int lg_stop_kill(const char *dir);
