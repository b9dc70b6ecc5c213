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
enum { LG_TRANSFER_ALIGN = 1024, LG_TRANSFER_PIECES = 4, LG_TRANSFER_PIECE_MAX = 1 << 20 };

struct lg_transfer_bytes {
    size_t host, device; /* private; host: pinned */
};
struct lg_transfer_bytes lg_transfer_bytes_of(size_t shard);

typedef struct lg_transfer lg_transfer;
/* For a rank with a shard of so many elements. What is staged is so in the order of `compute`, which must outlive it. */
int lg_transfer_open(lg_device *d, lg_stream *compute, size_t shard, lg_transfer **ret);
void lg_transfer_close(lg_transfer **f);
/* The most elements of a piece. */
size_t lg_transfer_piece(const lg_transfer *f);

/* Down: calls for (count) elements that are there, the device done with them, and stay as they are. One piece may be on
 * its way; its place is that of the piece before the last taken, with which the caller is done. */
void lg_transfer_call(lg_transfer *f, const float *from, size_t count);
/* Waits for it. */
const float *lg_transfer_take(lg_transfer *f);

/* Up: where the caller writes the next piece. Waits until what went up from there has left. */
float *lg_transfer_load(lg_transfer *f);
/* Its first `count` elements go up; where they lie for what is enqueued on `compute` from now on, until the next. */
const float *lg_transfer_send(lg_transfer *f, size_t count);
