/* A run as systemd units (systemd/README.md): systemd starts every process and starts it again, lgsup
 * keeps the plan, the membership, the policy and the figures.
 *
 *     PREFIXsup.service       `lgsup start FILE --units PREFIX`
 *     PREFIX-end.service      `lgsup stop --units PREFIX DIR`, when PREFIXsup is stopped
 *     PREFIX-keeper.service   `lg-keeper --store`: memory outlives even the keeper, in the fd store
 *     PREFIX-ROLE@K.service   `lgsup role ROLE K DIR`: takes an incarnation, becomes lg-ROLE
 *     PREFIX.slice            the limits of all of them together
 *
 * lgsup starts no stage then; it looks for them on the board (lg_launcher_systemd). Here is what only
 * PREFIX-end needs to know of systemd. */
#pragma once
#include "supervisor/run/run.h"

/* What systemd has in mind for the unit PREFIXsup. */
typedef enum {
    LG_UNITS_DOWN,     /* nothing; also where systemd does not answer */
    LG_UNITS_UP,       /* it is started, or will be */
    LG_UNITS_CHANGING, /* it is being stopped, or a job for it waits: see again */
} lg_units_intent;
lg_units_intent lg_units_look_at_lgsup(const lg_run *r);
/* Is the unit PREFIX-end restarted, not stopped? */
bool lg_units_end_comes_back(const lg_run *r);
