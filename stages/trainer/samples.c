/* Samples of a step; see samples.h. */
#include "stages/trainer/samples.h"
#include <xxhash.h>

bool lg_samples_of_host(lg_board *b, lg_window *w, uint64_t step, struct lg_host_sums *ret)
{
    const uint64_t batch = b->s->batch, first = step * batch;
    struct lg_host_sums sums = {0};
    if (!lg_window_range_ready(w, 1u << LG_FIELD_SOURCE, first, batch)) return false;
    XXH3_state_t *hash = XXH3_createState();
    LG_ASSERT(hash);
    XXH3_64bits_reset(hash);
    for (uint64_t n = first; n < first + batch; n++) {
        const struct lg_slot *slot = lg_window_slot(w, n);
        XXH3_64bits_update(hash, &slot->key_hash, sizeof slot->key_hash);
        sums.voids += slot->is_void;
        sums.valid += !slot->is_void && !slot->is_absent;
    }
    sums.keys_hash = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    *ret = sums;
    return true;
}

bool lg_samples_of_step(lg_board *b, lg_window *w, uint64_t step, struct lg_host_sums *ret)
{
    return lg_hosts_are_several(b) ? lg_hosts_sums(b, step, ret)
                                   : lg_samples_of_host(b, w, step, ret);
}
