/* Restart intensity: how often a role may die before the run is parked. Two rules, each over the role's
 * restarts_max:
 *
 * 1. Of the whole role: deaths without a committed step between them, within restart_window_s. It stops
 *    what crashes at once and keeps the run from training.
 * 2. Of one instance: failures in a row without progress of its own between them, however long each try
 *    takes and whatever the others commit meanwhile. It stops what never gets done: a checkpoint that
 *    hangs in each write, an encoder that the system kills for its memory at each start.
 *
 * Progress of its own is what stands in the instance's row and only grows: a rank's gradients, sums and
 * commits, the EMA keeper's commits, what the writer has staged and published, a loader's or encoder's
 * published samples.
 *
 * A failure is every death but that of a process which was ready and had nothing to do (phase WAITING or
 * DONE), if it was ended from outside, and but one that was asked to go (SIGTERM: exit 0). An operator or
 * a campaign may kill the idle for ever; and between kills of those that work they make progress. A hang
 * that lgsup ends is a failure in any phase. SIGKILL at work counts although it may have been an operator's:
 * the kernel's, for memory, looks the same. A death without weight does not end the row: with two loaders
 * and one picture that hangs, each of them waits for the other in between.
 *
 * A new lgsup counts anew. */
#pragma once
#include "config/plan.h"
#include "shm/board.h"

/* What the config says of a role: its section's restarts_max and restart_window_s, where they are 0
 * the supervisor's. Of stages; keeper and lgsup have none. */
struct lg_restart_policy {
    int64_t deaths_max, window_s;
};
struct lg_restart_policy lg_restart_policy(const lg_config *c, lg_role role);

struct lg_intensity {
    int deaths_max;
    int64_t window_ns;
    int64_t *death_ns; /* ring (deaths_max), oldest at `first` */
    int first, count;
    uint64_t commit; /* global commit at the last death */
};

int lg_intensity_init(struct lg_intensity *t, int64_t deaths_max, int64_t window_s);
void lg_intensity_free(struct lg_intensity *t);
/* Rule 1. Records a death; true when there are now more than deaths_max. */
bool lg_intensity_exceeded(struct lg_intensity *t, int64_t now_ns, uint64_t commit);

/* A process of an instance has died. */
struct lg_death {
    int exit_code;     /* LG_EXIT_* of supervisor/run/child.h */
    bool late;         /* lgsup has killed it: it hung, or did not become ready */
    bool ready;        /* it had finished its setup */
    lg_phase phase;    /* its last */
    uint64_t progress; /* lg_own_progress of its row */
    int64_t lived_ns;
};
bool lg_death_is_failure(const struct lg_death *d);
/* Grows with each step, checkpoint or sample that the instance has got done; see above. */
uint64_t lg_own_progress(const struct lg_board_row *row, lg_role role);

/* Failures of an instance in a row. Begins as zeros. */
struct lg_failures {
    int count;
    uint64_t progress;               /* at the last death */
    int64_t shortest_ns, longest_ns; /* the lives of all but the first */
};
/* Rule 2. Records a death; true when there are now more than max failures. */
bool lg_failures_exceeded(struct lg_failures *t, int max, const struct lg_death *d);
