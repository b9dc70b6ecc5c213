/* What crosses the bus where the state lies in host memory (memory.offload_optimizer): a step's summed gradient comes
 * down, the new weights go up, both in fp32, through pinned memory, piece by piece.
 *
 *     device                          host
 *     summed gradient (shard) ----->  down 0 | 1 --.
 *                                                  |--> AdamW (update.c) --> weights, moments: regions (state.h)
 *     staged (a piece)        <-----  up   0 | 1 --'
 *        |
 *        '-- cast --> working weights, own and peers' (working.h)
 *
 * Two places each way: while a piece is updated the next one comes down and the one before goes up. The device computes
 * nothing but casts in an update, so that a rank takes no turn on its GPU for it.
 *
 * All of it is private memory that means nothing to anybody: who dies with a piece on its way makes the chunk again
 * (moments.h). With device = "host" the same calls are copies in memory. */
#pragma once
#include "kernels/device.h"

/* Whole rows of what computes; a chunk of a large shard has several pieces, so that the ways overlap in it. */
enum { LG_FERRY_ALIGN = 1024, LG_FERRY_PIECES = 4, LG_FERRY_PIECE_MAX = 1 << 20 };

struct lg_ferry_bytes {
    size_t host, device; /* private; host: pinned */
};
struct lg_ferry_bytes lg_ferry_bytes_of(size_t shard);

typedef struct lg_ferry lg_ferry;
/* For a rank with a shard of so many elements. What is staged is so in the order of `compute`, which must outlive it. */
int lg_ferry_open(lg_device *d, lg_stream *compute, size_t shard, lg_ferry **ret);
void lg_ferry_close(lg_ferry **f);
/* The most elements of a piece. */
size_t lg_ferry_piece(const lg_ferry *f);

/* Down: calls for (count) elements that are there, the device done with them, and stay as they are. One piece may be on
 * its way; its place is that of the piece before the last taken, with which the caller is done. */
void lg_ferry_call(lg_ferry *f, const float *from, size_t count);
/* Waits for it. */
const float *lg_ferry_take(lg_ferry *f);

/* Up: where the caller writes the next piece. Waits until what went up from there has left. */
float *lg_ferry_load(lg_ferry *f);
/* Its first `count` elements go up; where they lie for what is enqueued on `compute` from now on, until the next. */
const float *lg_ferry_send(lg_ferry *f, size_t count);
