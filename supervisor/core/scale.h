/* `lgsup scale`: how many instances of a role run. Up: new rows are filled. Down: the instances with
 * the highest index leave when they have finished what they have claimed. The wanted number stands on
 * the board (`wanted`, lgsup alone writes it) before anything is done for it; a later lgsup makes it
 * so. */
#pragma once
#include "supervisor/core/supervise.h"

/* May role run n instances at all? Else why not (LG_ERR_USAGE), for command line and lgsup alike. */
int lg_scale_check(lg_role role, int n);
/* An order from the command line; answered when it is carried out, or at once when it cannot be. */
void lg_scale_order(lg_supervisor *s, const struct lg_peer *peer, lg_role role, int n);
/* Answers what has been carried out since. */
void lg_scale_look(lg_supervisor *s);
/* Adds instances or tells some to leave until the wanted number will run. */
void lg_scale_adjust(lg_supervisor *s, lg_role role);

/* The table of instances, in the order of role and index. */
struct lg_instance *lg_instance_find(lg_supervisor *s, lg_role role, int index);
/* A new one, state down; pointers to others become stale. */
struct lg_instance *lg_instance_add(lg_supervisor *s, lg_role role, int index);
/* Takes those out that are absent. Pointers become stale. */
void lg_instances_sweep(lg_supervisor *s);
