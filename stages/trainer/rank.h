/* A trainer rank from inside: what its parts share. trainer.c opens it and asks what is next, forward.c does FORWARD,
 * update.c does REDUCE and UPDATE. All of it is private memory, which a death may take at any time. */
#pragma once
#include "stages/nets/schedule.h"
#include "stages/trainer/batch.h"
#include "stages/trainer/exchange.h"
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/records.h"
#include "stages/trainer/state.h"

struct trainer {
    lg_device *device;
    lg_stream *stream;
    lg_denoiser *net;
    lg_trainer_state *state;
    lg_window *window;
    lg_batch *batch;
    lg_records *records; /* rank 0 */
    lg_exchange *exchange;
    struct lg_objective objective;
    struct lg_schedule schedule;
    size_t shard;   /* elements that this rank owns */
    unsigned needs; /* window fields a micro-batch needs */
    lg_dtype type;  /* of the computation */
    float *reduced; // (shard): sum of gradients of step `reduced_of`; NULL: the region itself
    void *squares;  // (pieces of the shard) f64, device memory
    double *host_squares;
    float *host_loss; // (micro batch)
    lg_tensor pred, loss;
    lg_mark reduced_of, forward_of; /* the step that the other private buffers hold */
    int64_t micro_done;             /* micro-batches of step forward_of that are done */
    double loss_sum;                /* of them */
    double divisor;                 /* non-void samples of the global batch of step forward_of */
    int64_t wait_start_ns;          /* 0: not waiting for data */
    int64_t wait_ns;                /* in the step so far */
    int64_t floor_start_ns;         /* 0: not waiting for the checkpoint writer */
    int64_t floor_ns;               /* in the step so far */
    int64_t last_commit_ns;
    bool records_failed;
};

/* The factor on this step's loss, the same on every rank. */
static inline double lg_rank_loss_scale(const lg_stage *st, const struct trainer *t, uint64_t step)
{
    return (double)lg_trainer_state_view(t->state, st->index, step).scalars->loss_scale.scale;
}

/* Each does one piece of its phase and stores the mark with the last: LG_STEP_WORKED, LG_STEP_IDLE when there is no data
 * yet, or an error. */
int lg_rank_forward(lg_stage *st, struct trainer *t, uint64_t step);
int lg_rank_reduce(lg_stage *st, struct trainer *t, uint64_t step);
int lg_rank_update(lg_stage *st, struct trainer *t, uint64_t step);
