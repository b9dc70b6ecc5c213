/* A trainer rank from inside: what its parts share. trainer.c opens it and asks what is next, forward.c does FORWARD,
 * update.c does REDUCE and UPDATE. All of it is private memory, which a death may take at any time. */
#pragma once
#include "stages/nets/schedule.h"
#include "stages/trainer/batch.h"
#include "stages/trainer/exchanges.h"
#include "stages/trainer/frozen.h"
#include "stages/trainer/gradients.h"
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/records.h"
#include "stages/trainer/samples.h"
#include "stages/trainer/state.h"
#include "stages/trainer/working.h"

enum { LG_NO_EVENT = -1 }; /* no micro-batch is under way */

struct trainer {
    lg_device *device;
    lg_stream *stream;
    lg_device *state_device; /* that has and updates the state (lg_state_device) */
    lg_stream *state_stream; /* of it; `stream` where it is `device` */
    struct lg_rank_nets nets;
    lg_denoiser *net; /* that of the micro-batch under way; before the first one, the first */
    lg_trainer_state *state;
    lg_window *window;
    lg_batch *batch;
    lg_records *records; /* rank 0 */
    lg_working *working;
    const void *frozen; /* lg_frozen_open */
    lg_gradients *gradients;
    lg_exchanges *exchanges;
    struct lg_objective objective;
    struct lg_schedule schedule;
    size_t shard;                   /* elements that this rank owns */
    unsigned needs;                 /* window fields a micro-batch needs */
    lg_dtype type;                  /* of the computation */
    float *host_loss;               // as loss
    lg_tensor pred, loss;           /* of the micro-batch under way; room for the largest */
    lg_mark reduced_of, forward_of; /* the step that the private buffers hold */
    uint64_t micro_done;            /* micro-batches of step forward_of that are done */
    int event;           /* of the net's: the next one of a micro-batch that is under way */
    uint64_t micro;      /* that one, counted over the run */
    uint64_t begin_with; /* micro-batch of the step, where others lack one; UINT64_MAX: none do */
    bool is_backward;    /* it has begun */
    struct lg_loss_sum loss_sum; /* of them */
    struct lg_host_sums samples; /* of the whole batch of step forward_of */
    double
        divisor; /* samples that are neither void nor absent of the global batch of step forward_of */
    int64_t wait_start_ns;  /* 0: not waiting for data */
    int64_t wait_ns;        /* in the step so far */
    int64_t floor_start_ns; /* 0: not waiting for the checkpoint writer */
    int64_t floor_ns;       /* in the step so far */
    int64_t last_commit_ns;
    bool records_failed;
};

/* The factor on this step's loss, the same on every rank. */
static inline double lg_rank_loss_scale(const lg_stage *st, const struct trainer *t, uint64_t step)
{
    return (double)lg_trainer_state_view(t->state, st->index, step).scalars->loss_scale.scale;
}

/* Says in a state that is being made which devices have made it. */
void lg_rank_sign(const struct trainer *t, const struct lg_state_view *to);

/* Each does one piece of its phase and stores the mark with the last: LG_STEP_WORKED, LG_STEP_IDLE when there is no data
 * yet, or an error. */
int lg_rank_forward(lg_stage *st, struct trainer *t, uint64_t step);
int lg_rank_reduce(lg_stage *st, struct trainer *t, uint64_t step);
int lg_rank_total(lg_stage *st, struct trainer *t, uint64_t step);
int lg_rank_update(lg_stage *st, struct trainer *t, uint64_t step);
