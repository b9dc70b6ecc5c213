/* Weights that are not trained: the part of the net's table behind what is (lg_params_split), as model.frozen says, in the
 * type of the computation or in 8 bits (stages/nets/storage.h), once on each GPU, for all ranks there.
 *
 *   frozen/<gpu>/weights   (host: 0) the part, filled by whoever comes first (lg_stored_fill), from where lg_frozen_read
 *                          says; never written again. Who dies while it fills leaves it to the next one, which begins
 *                          anew and makes the same bytes: a row's codes depend on its values in the files alone */
#pragma once
#include "stages/trainer/state.h"

/* Of a run with nothing frozen: NULL. The stage closes the region. */
int lg_frozen_open(lg_stage *st, lg_device *d, const lg_trainer_state *s, const void **ret);
/* Unit u, counted in the whole table. */
const void *lg_frozen_unit(const lg_trainer_state *s, const lg_device *d, const void *frozen,
                           int unit);
/* The region of rank `rank`'s GPU, by number, and its bytes; 0: there is none. */
int lg_frozen_place(const lg_config *c, int rank);
size_t lg_frozen_bytes(const lg_params *all, lg_dtype type);
