/* A rank's part in what its sequence group computes together (shm/sequence.h has the protocol, nets/sequence.h what is
 * split).
 *
 *   trainer/<r>/exchanged   no front; what arrives at rank r within a micro-batch (nets/denoiser.h). Written by the members
 *                           of its group, straight into it; read by rank r. Nothing of it outlives the micro-batch.
 *
 * With a plan that is `apart` the region is host memory, and rank r copies what has come into memory of its own.
 *
 * With degree 1 all of this does nothing, and every question is answered by yes. */
#pragma once
#include "shm/sequence.h"
#include "stages/nets/denoiser.h"
#include "stages/stage.h"

typedef struct lg_exchanges lg_exchanges;
/* For rank st->index on device d, which computes on `compute`, with a net for each shape of samples (n, of equal exchanges:
 * lg_denoiser_same_events); maps the members' regions, of which each is as large as the net with most needs. All must
 * outlive it. The stage closes the regions. */
int lg_exchanges_open(lg_stage *st, lg_device *d, lg_stream *compute, lg_denoiser *const *nets,
                      int n, lg_exchanges **ret);
void lg_exchanges_close(lg_exchanges **x);

/* Does it belong to an epoch that has passed (or to none yet)? Then its micro-batch is given up, `compute` is waited for,
 * and join is next. */
bool lg_exchanges_is_late(const lg_exchanges *x);
/* micro: over the run, the first that is not wholly given away. */
void lg_exchanges_join(lg_exchanges *x, uint64_t micro);
/* Has the epoch begun? True once for each: *ret_micro is the micro-batch to begin with. first: of the step. */
bool lg_exchanges_begin(lg_exchanges *x, uint64_t first, uint64_t *ret_micro);
/* Has it, then or earlier? */
bool lg_exchanges_has_begun(const lg_exchanges *x);

/* Exchange i of a micro-batch of this net: sends when that may be, true when all has come. Ask again. Nets have their
 * arrivals at places of their own: the first exchange of a micro-batch is sent when all are done with the one before. */
bool lg_exchanges_go(lg_exchanges *x, const lg_denoiser *net, uint64_t micro, int i);
/* The micro-batch is done, and `compute` with it. */
void lg_exchanges_end_micro(lg_exchanges *x, uint64_t micro);

/* The gradient of the step is whole. */
void lg_exchanges_mark_made(lg_exchanges *x, uint64_t step);
/* Is every member's, in one epoch? */
bool lg_exchanges_is_made(const lg_exchanges *x, uint64_t step);
