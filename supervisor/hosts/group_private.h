/* Between the files of group.h. */
#pragma once
#include "supervisor/hosts/group.h"

/* Bits of the members of own.epoch that are up, or have nothing left to do and so are no loss. */
uint64_t lg_group_present(const struct lg_group *g, int64_t now_ns);
/* own.epoch is e from now on. */
unsigned lg_group_enter(struct lg_group *g, const struct lg_epoch *e);
/* group_vote.c: promises and accepts what others ask for. */
unsigned lg_group_answer(struct lg_group *g);
/* A step towards `want` being the successor of own.epoch; wanted by this place, the present members' lowest. */
unsigned lg_group_decide(struct lg_group *g, const struct lg_epoch *want, int64_t now_ns);
/* Nothing is wanted (any more). */
void lg_group_rest(struct lg_group *g);
