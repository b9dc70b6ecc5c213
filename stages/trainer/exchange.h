/* What the ranks hand each other within a step, and the regions it lies in.
 *
 *   trainer/<r>/grad      front: lg_stamp; fp32 (whole flat buffer): rank r's gradient of the step in
 *                         flight. Rank q reads its shard there in REDUCE
 *   trainer/<r>/working   front: lg_working_front; the whole flat buffer in the type of the computation:
 *                         what rank r computes with. UPDATE writes a rank's shard into those of all of its
 *                         group, so that nothing is gathered before the next FORWARD
 *
 * Gradients: rank r writes in FORWARD(s), before its grads mark and after every commit of s; they are
 * read between that mark and the reader's commit of s + 1 (shm/commit.h). The stamp says of which step
 * they are (shm/stamp.h).
 *
 * Working weights: of[k] is the mark of the state whose shard k lies there. Writer: its rank q of the group, release,
 * when its UPDATE has written the shard and its stream is done, before the commit. Reader: rank r,
 * acquire, in FORWARD(s), which follows every commit of s: a shard of another state (a run's first
 * step, after a skipped update) it makes itself, from the state, and knows by itself that it did.
 * Rank q writes its shard in UPDATE(s), after every partial of s, so after the last FORWARD(s); rank r
 * reads it, and may write it, in FORWARD alone. UPDATE begins its shard in each by "being made"
 * (lg_stamp_begin), because a successor that goes on in the middle writes the later chunks only
 * (moments.h): the shard is of the new state where that still stands. Memory that had to be made anew, in
 * the middle or not, says something else, and the shard is made there from the state again. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/trainer/state.h"

struct lg_working_front {
    struct lg_stamp of[LG_INSTANCES_MAX];
};

/* Payloads of a rank's regions; 0: there is none. */
struct lg_exchange_bytes {
    size_t grad;
    size_t working; /* 0: in fp32 a rank that owns all computes with the state itself */
};
struct lg_exchange_bytes lg_exchange_bytes_of(lg_dtype type, size_t params, int shards);

typedef struct lg_exchange lg_exchange;
/* For rank st->index on device d; maps the peers' regions too. s must outlive it. The stage closes the
 * regions. */
int lg_exchange_open(lg_stage *st, lg_device *d, const lg_trainer_state *s, lg_exchange **ret);
void lg_exchange_close(lg_exchange **x);

/* FORWARD: what the net reads for this state, (params) of the device's type; missing shards are made on
 * the stream. */
const void *lg_exchange_weights(lg_exchange *x, lg_stream *s, uint64_t state);
/* FORWARD: where the backward leaves its gradient, fp32 (params). */
float *lg_exchange_grad(lg_exchange *x);
/* FORWARD: before the first byte of it, and when it is whole, with its step. */
void lg_exchange_begin_grad(lg_exchange *x);
void lg_exchange_end_grad(lg_exchange *x, uint64_t step);
/* REDUCE: do the gradients of all ranks that the marks speak of lie there? 0, or as lg_stage_lost. */
int lg_exchange_expect_grads(lg_stage *st, const lg_exchange *x, uint64_t step);
/* REDUCE: rank r's gradient, the whole flat buffer. */
const float *lg_exchange_grad_of(const lg_exchange *x, int r);

/* UPDATE: the own piece of a unit in the working weights of every rank of the group, to be written; returns how many
 * (0: none). */
int lg_exchange_copies(const lg_exchange *x, int unit, lg_tensor ret[LG_RANKS_MAX]);
/* Before the first byte of the first chunk that is written there. */
void lg_exchange_begin_copies(lg_exchange *x, uint64_t state);
/* They are written, with `state`, and the stream is done. */
void lg_exchange_mark_copies(lg_exchange *x, uint64_t state);
