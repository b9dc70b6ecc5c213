/* How much of a shard's gradient has left its rank for the other hosts, while the rest of it is still being made: the last
 * so many elements of `outgoing` (stages/trainer/gradients.h), where blocks stand in the order of the forward and are done
 * in that of the backward. One word in the region's front: (step + 1) << 40 | elements.
 *
 *   Writer: the rank, release, when the elements lie there; it grows. Reader: its exchange process, acquire, which adds and
 *   sends them, but the stamp of the region says first whose they are.
 *   Dying before the store: the successor writes the same elements again, of which nobody reads. After it: they are not
 *   written again before the next step.
 *
 * What of step s lies there stays until UPDATE(s) of its rank is done, and that is after all hosts have exchanged s. */
#pragma once
#include "base/check.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LG_LEAVING_BITS = 40 };

struct lg_leaving {
    _Atomic(uint64_t) word;
};

static inline void lg_leaving_mark(struct lg_leaving *l, uint64_t step, size_t elements)
{
    const uint64_t now = (step + 1) << LG_LEAVING_BITS | elements;
    LG_ASSERT(!(elements >> LG_LEAVING_BITS));
    if (atomic_load_explicit(&l->word, memory_order_relaxed) >= now) return;
    __sync_synchronize(); /* drains non-temporal stores, too */
    atomic_store_explicit(&l->word, now, memory_order_release);
}
/* Elements of step s that are there; 0 of any other. */
static inline size_t lg_leaving_of(const struct lg_leaving *l, uint64_t step)
{
    const uint64_t word = atomic_load_explicit(&l->word, memory_order_acquire);
    const uint64_t of = word >> LG_LEAVING_BITS;
    return of == step + 1 ? (size_t)(word & ((UINT64_C(1) << LG_LEAVING_BITS) - 1)) : 0;
}
