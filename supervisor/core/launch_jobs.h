/* What the loop wants of the launcher that may take long (the middle of launcher.def: what a service
 * manager is asked), done by the launcher's worker, and what lg-device is asked, by that of the GPUs: the loop goes on
 * meanwhile, and acts when the answer is there. The jobs are done in the order in which they were given, so that a unit which is asked for
 * after it was let go is there in the end. */
#pragma once
#include "shm/board.h"
#include <stdint.h>

struct lg_supervisor;

/* For an instance that nobody has come for in a while. A failure is said. */
void lg_launch_request(struct lg_supervisor *s, lg_role role, int index);
/* Before a role is scaled to n: sees to it that instances from `first` on can come, and that their GPUs reach the others
 * (supervisor/run/gpus.h). */
struct lg_launch_order {
    lg_role role;
    int first, n;
    uint64_t order; /* says which order it was about */
    /* In the loop, afterwards: rc, and why it failed. */
    void (*then)(struct lg_supervisor *s, const struct lg_launch_order *o, int rc, const char *why);
};
void lg_launch_prepare(struct lg_supervisor *s, const struct lg_launch_order *o);
/* After an instance has left for good: nobody else comes for it. */
void lg_launch_dismiss(struct lg_supervisor *s, lg_role role, int index);
/* SIGTERM came at came_ns: is it half of a restart of lgsup itself? then: in the loop, with the answer;
 * false where it cannot be had. */
void lg_launch_ask_restart(struct lg_supervisor *s, int64_t came_ns,
                           void (*then)(struct lg_supervisor *s, bool restart, int64_t came_ns));
