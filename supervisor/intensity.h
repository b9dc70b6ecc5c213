/* Restart intensity: how often a role may die before the run is parked. Only deaths without a
 * committed step between them count, and only those within the window. */
#pragma once
#include "config/plan.h"

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
/* Records a death; true when there are now more than deaths_max. */
bool lg_intensity_exceeded(struct lg_intensity *t, int64_t now_ns, uint64_t commit);
