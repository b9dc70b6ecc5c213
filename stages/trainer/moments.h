/* Where the Adam moments of a shard lie: once, though an update never writes what it reads.
 *
 * A shard's moments are cut into n chunks (n <= LG_MOMENTS_CHUNKS; small shards have fewer), which live in n + 1 places
 * of the region trainer/<r>/moments. After t optimizer steps (lg_state_scalars.optimizer_steps, which a skipped step
 * does not advance) chunk k lies at place (k - t) mod (n + 1), so that one place is free. The update from t to t + 1
 * goes through the chunks in order: chunk k is read at its place and written to the one that chunk k - 1 has just
 * left, chunk 0 to the free one:
 *
 *     place     0    1    2    3    4                  n = 4
 *     t = 0    [0]  [1]  [2]  [3]   -
 *              [0]  [1]  [2]  [3]  [0]      chunk 0 is written; when that counts, its old place is free
 *              [1]  [1]  [2]  [3]  [0]      chunk 1 ..
 *     t = 1    [1]  [2]  [3]   -   [0]
 *
 * The weights, read by many, have two sides (state.h); moments twice would be 8 bytes a parameter more.
 *
 * The region's front is a stamp (shm/stamp.h) with parts: {s, k}, the moments of state s, of which the chunks
 * before k are those of state s + 1 already; s's optimizer steps say where each lies. Not {s, n} but {s + 1, 0}
 * says that the update is done, or skipped: then nothing has moved.
 *   Writer: the rank alone. Chunk k counts, {s, k + 1}, when its moments, its weights in the other side and in
 *     every working copy are written and all streams are done; only then chunk k + 1 is begun, which writes over
 *     what chunk k has been read from. So a chunk that counts is never updated again.
 *   Readers: the rank and its successors, before UPDATE(s): {s, any} or {s + 1, 0}, else memory is lost. The
 *     checkpoint writer, before STAGE_MOMENTS(s): {s, 0}, which stands until the moments are staged
 *     (shm/commit.h).
 *   The rank dying before the store: chunk k is made again from the same place, to the same bits, over what lies
 *     half-written where nothing counts. After it: the successor goes on with chunk k + 1. Its weights and
 *     working copies, of which parts count, too, say "being made" (lg_stamp_begin) where none of it was lost. */
#pragma once
#include "stages/trainer/shards.h"

enum { LG_MOMENTS_CHUNKS = 16 };

struct lg_chunk {
    size_t first, count; /* elements of the shard; count > 0 */
    float *m, *v;        // (count), where the state lies (state.h)
};

/* Of the region's payload, for a shard of so many elements. */
size_t lg_moments_bytes(size_t shard);
int lg_moments_chunks(size_t shard);
/* Elements of a chunk but the last. */
size_t lg_moments_chunk_count(size_t shard);
/* The place of chunk k of n after t optimizer steps, in [0, n]. */
static inline int lg_moments_place(int n, int k, uint64_t t)
{
    const uint64_t places = (uint64_t)n + 1;
    return (int)(((uint64_t)k + places - t % places) % places);
}
/* Chunk k where it lies after t optimizer steps; payload: of the region. */
struct lg_chunk lg_moments_chunk(float *payload, size_t shard, int k, uint64_t t);
