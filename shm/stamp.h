/* The stamp of memory whose contents follow a mark on the board (shm/board.h): which state, or the gradient
 * of which step, lies there. It lies in the same region, in its front, so that it is lost with what it
 * speaks of: memory that had to be made anew has no stamp, whatever the marks say.
 *
 * Writer: the one process that writes the contents (the rank, the EMA keeper, the checkpoint writer):
 *     lg_stamp_clear();  the contents;  the device is done;  lg_stamp_set(s);  the mark on the board
 * Readers: everybody who reads the contents because of the mark, the writer's successor included, looks
 * first, acquire. The mark's own rules (shm/commit.h) keep the memory from being overwritten meanwhile.
 *
 * The writer dying before lg_stamp_set: the mark does not name s yet, nobody reads, the successor clears
 * the stamp and writes the same contents again. Dying between the stamp and the mark: the same. After the
 * mark: both agree. A stamp that is not the mark's therefore means one thing only: the memory is not that
 * of which the mark speaks. It has been lost, and nothing may be computed with it. */
#pragma once
#include "shm/layout.h"

struct lg_stamp {
    _Atomic(lg_mark) of; /* LG_MARK_NONE: nothing whole lies here */
};

static inline void lg_stamp_clear(struct lg_stamp *s)
{
    atomic_store_explicit(&s->of, LG_MARK_NONE, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* before the first byte of the contents */
}
static inline void lg_stamp_set(struct lg_stamp *s, uint64_t state)
{
    __sync_synchronize(); /* drains non-temporal stores, too */
    atomic_store_explicit(&s->of, lg_mark_of(state), memory_order_release);
}
static inline bool lg_stamp_is(const struct lg_stamp *s, uint64_t state)
{
    return atomic_load_explicit(&s->of, memory_order_acquire) == lg_mark_of(state);
}
