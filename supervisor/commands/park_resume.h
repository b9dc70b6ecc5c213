/* What `lgsup start` and `lgsup stop` do with the memory of a parked run (supervisor/core/park.h). */
#pragma once
#include "config/config.h"
#include "supervisor/run/run.h"

struct lg_park_start {
    lg_run *run;        /* locked */
    lg_config **config; /* of this start; taken over when the run goes on from memory */
    bool quiet;
    int ready_fd;
};
/* Goes on from memory, to the end of the run. *ret_resumed: false when there is no parked run, or its
 * memory is gone or does not fit the config any more (said on stderr): start from the checkpoint then.
 * LG_ERR_MISMATCH when a key that decides the result has changed. */
int lg_park_resume(const struct lg_park_start *p, bool *ret_resumed, int *ret_exit);
/* Lets the memory of a parked run (locked) go; its state is `stopped` from then on. */
int lg_park_release(lg_run *r);
