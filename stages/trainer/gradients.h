/* A step's gradients: where the backward writes them, and how a rank gets its shard (shards.h) of their sum over all
 * ranks.
 *
 * Whole (zero = 0, 1): a rank's micro-batches add up in one buffer, which others read in REDUCE.
 *
 *   trainer/<r>/grad   front: lg_gradients_front; fp32, the flat buffer: rank r's gradient of the step in flight.
 *                      Written in FORWARD(s), before its grads mark and after every commit of s; read between that
 *                      mark and the reader's commit of s + 1 (shm/commit.h). The stamp says of which step it is
 *                      (shm/stamp.h).
 *
 * With a plan that is `apart` the region is host memory; the backward writes into memory of the rank's own, cut the same
 * way, from where a lane of copies brings each unit that is whole into the region. All else is the same.
 *
 * Scattered (zero = 2, 3): a unit's gradient is given away when its backward ends, and its memory is another's soon
 * after. Each rank adds its piece of it, of all ranks, to its own sum: ((sum + r0) + r1) + .., micro-batch after
 * micro-batch; with one of them these are the bits of the whole ones.
 *
 *   trainer/<r>/grad   front: lg_gradients_front; a ring (ring.h), which all ranks read. Words on the board say what
 *                      lies there and who is done with it (shm/scatter.h). Its stamp names the step from the first
 *                      given unit on; who reads it, and its writer's successor, compare it with the board's.
 *   trainer/<r>/sum    front: lg_gradients_front; fp32 (shard), with several micro-batches twice: what adds micro-batch
 *                      m reads side m & 1 and writes the other, so that whoever died in the middle is followed by one
 *                      who does the same again. Read and written by its rank alone. Its stamp names the step from the
 *                      first addition on. */
#pragma once
#include "shm/leaving.h"
#include "shm/scatter.h"
#include "shm/stamp.h"
#include "stages/nets/denoiser.h"
#include "stages/stage.h"
#include "stages/trainer/ring.h"
#include "stages/trainer/state.h"

/* With several hosts (shm/hosts.h) a rank's shard, added up over this host, leaves it and comes back as the sum over all:
 *
 *   trainer/<r>/outgoing  front: lg_outgoing_front; fp32 (shard). Written by rank r in REDUCE, read by exchange r. Scattered
 *                         gradients leave as they come, from the shard's end to its beginning: what is added of the last
 *                         micro-batch is copied here in FORWARD, and the front says how far. Its stamp names the step from
 *                         the first of them on.
 *   trainer/<r>/incoming  front: lg_stamp; fp32 (shard). Written by exchange r, read by rank r and exchange r.
 *
 * Their stamps are set before the marks `local` and `exchanged`. They are not cleared: of what is being written over nobody
 * reads any more. Where they lie: */
typedef enum lg_host_way {
    LG_HOST_WAY_HERE, /* device = "host": with the host, and the rank computes there */
    LG_HOST_WAY_STAGED, /* GPUs, hosts.transport = "ucx": with the host, pinned; between it and a GPU go copies */
    LG_HOST_WAY_ON_GPU /* GPUs, "nccl": on the rank's GPU */
} lg_host_way;
lg_host_way lg_host_way_of(const lg_config *c);

struct lg_outgoing_front {
    struct lg_stamp stamp;
    struct lg_leaving leaving; /* scattered gradients alone */
};

struct lg_host_gradients {
    lg_region *outgoing, *incoming;
    size_t count; /* elements of each */
};
/* Of rank st->index; for the rank and for its exchange process, with the device that is to reach them: the rank's, or NULL
 * for a process that uses host memory alone. The stage closes the regions. */
int lg_host_gradients_open(lg_stage *st, lg_device *d, const lg_trainer_state *s,
                           struct lg_host_gradients *ret);

struct lg_gradients_front {
    struct lg_stamp stamp;
    _Atomic(uint64_t)
        ring; /* hash of the ring that lies here; 0: none yet. Whoever opens it first, by
                               compare-and-swap; another build's differs, and cannot be read */
};

struct lg_gradients_bytes {
    size_t grad, sum; /* regions of a rank; sum: 0: it has none */
    size_t host;      /* outgoing, and incoming; 0: there is one host */
    size_t staged;    /* private: likewise, with LG_HOST_WAY_STAGED alone */
    size_t own;       /* private, all else */
};
/* net: compiled; shard: elements. */
struct lg_gradients_bytes lg_gradients_bytes_of(const lg_plan *p, const lg_params *t,
                                                const lg_denoiser *net, size_t shard);

typedef struct lg_gradients lg_gradients;
/* For rank st->index on device d, whose backward runs on `compute`; maps the peers' regions. All must outlive it. The
 * stage closes the regions. */
int lg_gradients_open(lg_stage *st, lg_device *d, lg_stream *compute, const lg_trainer_state *s,
                      const lg_denoiser *net, lg_gradients **ret);
void lg_gradients_close(lg_gradients **g);

/* Where every backward of the plan's overwrites the same flat buffer: activations may lie there before it (denoiser.h,
 * `lends`). A rank writes there in FORWARD alone, as it does its gradients, and its stamp says of no step that it lies there. */
bool lg_gradients_lends(const lg_plan *p);
void *lg_gradients_lent(const lg_gradients *g);
/* The first micro-batch of a step that is not wholly given away. */
uint64_t lg_gradients_next_micro(const lg_gradients *g, uint64_t step);
/* FORWARD begins, or goes on where a former life has died, or begins again with a micro-batch that others lack: *ret_micro
 * is the first to do, at most `from`, *ret_loss the loss of those before. */
int lg_gradients_begin(lg_gradients *g, uint64_t step, uint64_t from, uint64_t *ret_micro,
                       struct lg_loss_sum *ret_loss);
void lg_gradients_begin_micro(lg_gradients *g, uint64_t micro);
/* Where a unit's gradient goes; false: there is no room yet, ask again after lg_gradients_add. */
bool lg_gradients_place(lg_gradients *g, int unit, float **ret);
/* The calls enqueued so far complete it; the one before it is given away now, this one later. */
void lg_gradients_done(lg_gradients *g, int unit);
/* Waits until it is complete and gives it away. */
void lg_gradients_flush(lg_gradients *g);
/* The micro-batch is done, `compute` too; loss_sum: of the step so far. */
void lg_gradients_end_micro(lg_gradients *g, struct lg_loss_sum loss_sum);
/* And it was the last. */
void lg_gradients_end(lg_gradients *g);
/* A former life has ended the step: its loss. 0, or as lg_stage_lost. */
int lg_gradients_expect(lg_gradients *g, uint64_t step, struct lg_loss_sum *ret_loss);
/* Adds what all ranks have given: 1 when there was something, 0, or an error as lg_stage_lost. */
int lg_gradients_add(lg_gradients *g);
/* Does the backward add to what a former micro-batch left? Else it overwrites. */
bool lg_gradients_accumulate(const lg_gradients *g);

/* REDUCE: the own shard of the sum, and the sum of its squares. May be done again. With several hosts it lies in
 * `outgoing` then. */
int lg_gradients_reduce(lg_gradients *g, uint64_t step, struct lg_exact_sum *ret_squares);
/* TOTAL: the same of `incoming`. */
int lg_gradients_total(lg_gradients *g, uint64_t step, struct lg_exact_sum *ret_squares);
/* UPDATE, after them: (shard). */
float *lg_gradients_sum(const lg_gradients *g);
