/* Filling memory with weights that lie as stages/nets/storage.h says: in the type of the computation, or in 8 bits. What is
 * made of a weight depends on nothing but the values of its row, so that whoever fills makes the same bytes. */
#pragma once
#include "stages/nets/storage.h"
#include "stages/stage.h"

/* Elements [first, first + count) of the table, fp32 on the host, into `memory` of the device, in which the table lies from
 * byte `front` on. They begin and end with a row where they would part a matrix of 8 bits (lg_stored_end). Waits until they
 * are there. LG_ERR_CORRUPT: such a matrix has values that are not finite; it is named. */
struct lg_stored_piece {
    const lg_params *table;
    const float *values;
    size_t first, count;
    void *memory;
    size_t front;
};
int lg_stored_put(lg_device *d, const struct lg_stored_piece *piece);
/* Where a piece from element `first` on ends that is to have about `most` elements: at most that, or one row more. */
size_t lg_stored_end(const lg_params *t, size_t first, size_t most);

/* Fills a region with the elements of a table from `first` on (lg_stage_fill), which `load` reads as fp32: elements
 * [from, from + count), counted from `first`. */
struct lg_stored_fill {
    lg_device *device; /* of the region */
    const lg_params *table;
    size_t first;
    int (*load)(lg_stage *, size_t from, size_t count, float *ret, void *arg);
    void *arg;
};
int lg_stored_fill(lg_stage *st, lg_region *r, const struct lg_stored_fill *f);
