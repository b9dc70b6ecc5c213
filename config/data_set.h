/* What a run is trained on, as its manifests and its board name it: which data set, and which sample is
 * which item of it.
 *
 * A data set's identity is the number of its items and a hash of names, order and sizes (stages/io/source.h);
 * no content is read for it. The order of samples follows from the number of items, so another data set
 * under the same path would silently train on other samples: whoever sees another identity than the run's
 * refuses. Someone who wants that goes on from a checkpoint with data.allow_changed: then a new *part* of
 * the run begins there, with a new epoch, and the manifest lists all parts. Mostly there is one. */
#pragma once
#include "base/check.h"
#include <stdint.h>

enum { LG_DATA_PARTS_MAX = 16 };

struct lg_data_part {
    uint64_t first; /* sample number with which the part begins */
    uint64_t epoch; /* that begins there; greater than all of the parts before */
    uint64_t items, hash;
};

/* The part that follows on `last` at sample `first`, of another data set. */
static inline struct lg_data_part lg_data_next(const struct lg_data_part *last, uint64_t first,
                                               uint64_t items, uint64_t hash)
{
    LG_ASSERT(first >= last->first && last->items > 0);
    uint64_t epochs = (first - last->first + last->items - 1) / last->items;
    return (struct lg_data_part){
        .first = first, .epoch = last->epoch + epochs, .items = items, .hash = hash};
}

static inline bool lg_data_same(const struct lg_data_part *a, const struct lg_data_part *b)
{
    return a->first == b->first && a->epoch == b->epoch && a->items == b->items &&
           a->hash == b->hash;
}
