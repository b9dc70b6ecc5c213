/* The views of a run (supervisor/views/extras.h), looked after by the views' worker: one job for each
 * look, one look at a time. */
#pragma once
#include "supervisor/views/extras.h"

struct lg_supervisor;

/* What the loop waits for on their behalf; returns how many. None while a look is under way. */
int lg_views_poll(const struct lg_supervisor *s, struct pollfd ret[LG_EXTRAS_FDS_MAX]);
/* Gives a look when one is due, or when something that was waited for has come. */
void lg_views_look(struct lg_supervisor *s, bool something_came);
/* The loop is over. Waits, as long as anything is done, for what is left to be written. */
void lg_views_close(struct lg_supervisor *s);
