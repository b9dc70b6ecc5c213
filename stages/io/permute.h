/* The order of samples: a keyed permutation of [0, count) for every epoch, computed in O(1) time
 * and memory, so that a run resumes at any sample of any data set at once and no list is kept. */
#pragma once
#include <stdint.h>

/* The item at `position` (< count) of epoch `epoch`. For a fixed (seed, epoch, count) a bijection
 * of [0, count); count >= 1. Reads no state: any process gets the same answer. */
uint64_t lg_permute(uint64_t seed, uint64_t epoch, uint64_t position, uint64_t count);

/* The same, and how many times the network was applied (1 + steps walked); for tests. */
uint64_t lg_permute_walk(uint64_t seed, uint64_t epoch, uint64_t position, uint64_t count,
                         uint32_t *ret_applied);
