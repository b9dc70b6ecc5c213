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
 * In a place lie, one behind the other (count: elements of a chunk; full: the most fp32 elements of one of them):
 *
 *     m, v (full) fp32        of all elements, or, in blocks (nets/params.h), of those that have no code, packed
 *     m_max, v_max (count / 256) fp32, m_code, v_code (count) u8       in blocks, of all elements
 *
 * Chunks, shards' pieces and tensors begin at multiples of a block, so that none is cut, and what a block is depends on the
 * table alone. So the moments of all that is trained, as a snapshot has them, are a layout like a shard's, in one chunk.
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

/* What of a shard (or of all that is trained) is kept in fp32 though the table is in blocks. */
struct lg_full_part {
    size_t first, count, before; /* elements; before: fp32 elements in front of them */
};
typedef struct lg_moments_layout {
    size_t count; /* elements of the shard */
    bool in_blocks;
    struct lg_full_part *part; /* in blocks; in order */
    int n_parts;
    size_t full; /* in blocks: the most fp32 elements of a chunk */
} lg_moments_layout;

/* The moments of elements [first, first + count) of a layout. */
struct lg_chunk {
    size_t first, count;      /* elements of the shard; count > 0 */
    size_t full;              /* of which so many are fp32 */
    float *m, *v;             // (full), where the state lies (state.h)
    float *m_max, *v_max;     // (count / 256); these four NULL: not in blocks
    uint8_t *m_code, *v_code; // (count)
};

/* Of a shard; free it. Of all: shard 0 of 1. */
lg_moments_layout lg_moments_layout_of(const lg_params *t, int shard, int shards);
void lg_moments_layout_free(lg_moments_layout *l);
/* What of a chunk lies in elements [first, first + count) of the shard; in blocks both are multiples of one. */
struct lg_chunk lg_moments_part(const lg_moments_layout *l, const struct lg_chunk *of, size_t first,
                                size_t count);
/* fp32 elements in front of this one of the shard. */
size_t lg_moments_full_before(const lg_moments_layout *l, size_t element);
/* The whole shard as one chunk: its bytes, and where it lies in memory of so many. */
size_t lg_moments_whole_bytes(const lg_moments_layout *l);
struct lg_chunk lg_moments_whole(const lg_moments_layout *l, void *memory);
/* Zeros everywhere, on the host. */
void lg_moments_clear(const struct lg_chunk *c);

/* Of the region's payload. */
size_t lg_moments_bytes(const lg_moments_layout *l);
/* Of a shard of so many elements. */
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
struct lg_chunk lg_moments_chunk(const lg_moments_layout *l, void *payload, int k, uint64_t t);
