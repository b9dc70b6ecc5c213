/* Where the units of a scattered gradient lie while they are on their way (ZeRO-2, 3; gradients.h): a plan that follows
 * from the net's events alone, so that every rank knows the places of all. Each unit has one place. Two units share
 * memory when the later one is begun no earlier than RING_LAG units after the former was done, so that nobody waits
 * while others are adding. */
#pragma once
#include "stages/nets/denoiser.h"

struct lg_ring_unit {
    size_t at;    /* bytes from the start of the ring */
    size_t bytes; /* fp32 */
    int order;    /* its place in the order in which units are done */
    int back; /* units ago, in that order over micro-batches, what shares its memory was done; 1 to the number of units */
};
struct lg_ring {
    int units;
    struct lg_ring_unit *unit; /* by unit */
    int *by_order;             /* the unit of a place in the order */
    size_t bytes;              /* of the ring */
    size_t
        largest; /* unit, bytes: room for what a rank writes to no purpose when it repeats a micro-batch */
    uint64_t hash; /* of all this: ranks compare it */
};
/* net: compiled, to be trained. */
void lg_ring_plan(const lg_params *t, const lg_denoiser *net, struct lg_ring *ret);
void lg_ring_free(struct lg_ring *r);
