/* What every shared structure starts with, and the limits they share. A process that was built with
 * another layout refuses to attach and says which structure differs. */
#pragma once
#include "base/check.h"
#include <assert.h>
#include <stdatomic.h>
#include <stdint.h>

enum {
    LG_LAYOUT_VERSION =
        9, /* raised for what no structure shows: how a net's parameters lie, fronts */
    LG_PAGE_BYTES = 4096,
    LG_INSTANCES_MAX = 64, /* of one role */
    LG_ROLES_MAX = 16,
    LG_ROWS = LG_ROLES_MAX * LG_INSTANCES_MAX,
    LG_REGION_NAME_BYTES = 64,
    LG_CAUSE_BYTES = 512, /* a path and what is wrong with it */
};

/* A mark says how far something has come: 0 is "none", s + 1 is "state s is there". Marks never
 * decrease. State s is the state before step s, so a run begins with state `start_step` and step s
 * turns state s into state s + 1. */
typedef uint64_t lg_mark;
#define LG_MARK_NONE ((lg_mark)0)
static inline lg_mark lg_mark_of(uint64_t state)
{
    return state + 1;
}
static inline uint64_t lg_mark_state(lg_mark m) /* m != LG_MARK_NONE */
{
    return m - 1;
}

/* An incarnation names one process for ever: counter * LG_ROWS + row. 0 is nobody. lgsup gives them
 * out, never twice in the life of a board. */
typedef uint32_t lg_incarnation;
static inline int lg_incarnation_row(lg_incarnation i)
{
    return (int)(i % LG_ROWS);
}
static inline int lg_row(int role, int index)
{
    return role * LG_INSTANCES_MAX + index;
}

/* Hash of every offset and size of the shared structures of this build, 16 bits for each of
 * lg_board_shared, lg_board_row, lg_slot and lg_region_head, so that a mismatch can be named. */
uint64_t lg_layout_hash(void);
/* Name of the first structure in which two layout hashes differ; NULL when they are equal. */
const char *lg_layout_difference(uint64_t a, uint64_t b);
