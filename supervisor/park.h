/* A parked run's memory. When a run is parked its processes end, but the keeper stays and with it every
 * region: the next `lgsup start` goes on from the committed step in memory, `lgsup stop` lets the
 * memory go. Kept only when there is something in it that no checkpoint or seed would give again: at
 * least one committed step; and not in units of systemd's, where the newest checkpoint counts. */
#pragma once
#include "config/config.h"
#include "supervisor/supervise.h"

/* lgsup, before the processes are ended: is there memory to keep, and is the keeper whole? */
bool lg_park_can_keep(lg_supervisor *s);
/* Is the run in DIR parked with its memory kept? *ret_step (or NULL): the step it goes on from. */
bool lg_park_is_kept(const char *dir, uint64_t *ret_step);

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
/* The board of a parked run as one whose lgsup has died: the next may adopt it. */
void lg_park_reopen(lg_board *b);
/* Lets the memory of a parked run (locked) go; its state is `stopped` from then on. */
int lg_park_release(lg_run *r);
