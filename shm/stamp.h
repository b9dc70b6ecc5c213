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
 * of which the mark speaks. It has been lost, and nothing may be computed with it.
 *
 * What is made in pieces that are never made again (chunks of the moments, shm/commit.h) needs two more words:
 *   - of the moments: {s, parts}, those of state s, of which so many parts have been moved on to state s + 1.
 *     With parts = 0 it is the stamp of state s. One word, so that it cannot tear, and never cleared between
 *     two states: a part is written beside what the word speaks of, and counts from the store on.
 *   - of all else that a part writes: "being made" of state s, before the first of them, instead of being
 *     cleared. Whoever goes on at a later part looks for it: memory that was made anew in between says nothing,
 *     and the parts that count are not in it.
 * The writer dying before lg_stamp_set_parts: its successor makes the part again, from what the word speaks of.
 * After it: the successor goes on with the next one. */
#pragma once
#include "shm/layout.h"

struct lg_stamp {
    _Atomic(lg_mark) of; /* LG_MARK_NONE: nothing whole lies here; else LG_STAMP_* and a mark */
};
#define LG_STAMP_BEING_MADE (UINT64_C(1) << 63)
enum { LG_STAMP_PARTS_SHIFT = 56, LG_STAMP_PARTS_MAX = 127 };
#define LG_STAMP_MARK ((UINT64_C(1) << LG_STAMP_PARTS_SHIFT) - 1)

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

/* Instead of lg_stamp_clear, where a successor does not begin again from the first byte. */
static inline void lg_stamp_begin(struct lg_stamp *s, uint64_t state)
{
    atomic_store_explicit(&s->of, LG_STAMP_BEING_MADE | lg_mark_of(state), memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}
/* Has it been begun here, or even ended? */
static inline bool lg_stamp_is_begun(const struct lg_stamp *s, uint64_t state)
{
    lg_mark of = atomic_load_explicit(&s->of, memory_order_acquire);
    return (of & ~LG_STAMP_BEING_MADE) == lg_mark_of(state);
}
/* With all parts moved on it is state s + 1 that lies here: lg_stamp_set(s + 1). */
static inline void lg_stamp_set_parts(struct lg_stamp *s, uint64_t state, int parts)
{
    LG_ASSERT(parts >= 0 && parts <= LG_STAMP_PARTS_MAX);
    __sync_synchronize();
    atomic_store_explicit(&s->of, (lg_mark)parts << LG_STAMP_PARTS_SHIFT | lg_mark_of(state),
                          memory_order_release);
}
/* -1: it is not state s that lies here. */
static inline int lg_stamp_parts(const struct lg_stamp *s, uint64_t state)
{
    lg_mark of = atomic_load_explicit(&s->of, memory_order_acquire);
    lg_mark parts = of >> LG_STAMP_PARTS_SHIFT;
    if ((of & LG_STAMP_MARK) != lg_mark_of(state)) return -1;
    return parts <= LG_STAMP_PARTS_MAX ? (int)parts : -1;
}
