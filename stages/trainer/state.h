/* The persistent state of the trainer ranks, and who maps which part of it.
 *
 * The parameters are cut as shards.h says. A rank owns a shard of the master weights, twice: side a and
 * side b; state s lies in side s & 1. Every rank maps all of them, the EMA keeper and the checkpoint
 * writer too; these two read the first group's copy alone. And it owns the shard's Adam moments, once
 * (moments.h), which only the checkpoint writer maps beside it. So state is 8 + 8 (n + 1) / n bytes a
 * parameter, 16.5 with n = 16 chunks; 10.2 where moments have 8 bits.
 *
 *   trainer/<r>/state/<a|b>   front: lg_state_front; w: fp32 (shard)
 *   trainer/<r>/moments       front: lg_stamp with parts; n + 1 places of a chunk's m and v each (moments.h)
 *   ema/<r>/state/<a|b>       front: lg_stamp; fp32 (shard)
 *
 * The stamps (shm/stamp.h) say which state lies in a side. Whoever is about to read one looks first
 * (lg_trainer_state_expect, lg_stage_expect), before each step that reads it. UPDATE(s) begins side
 * (s + 1) & 1 by lg_stamp_begin; a successor that goes on in the middle finds that there.
 *
 * All of rank r lies on rank r's GPU; or, with memory.offload_optimizer, in host memory, where the host's backend makes
 * the update and the average. lg_state_device is the one place that decides: whoever maps, names or computes with a
 * state asks it. Where lg_ema_is_apart says so the average alone is with the host. What then goes up and comes down is in transfer.h; what ranks hand each other in
 * gradients.h, working.h, exchanges.h. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/stage.h"
#include "stages/trainer/loss_scale.h"
#include "stages/trainer/moments.h"
#include "stages/trainer/shards.h"

/* The scalars of a state, the same on every rank. */
struct lg_state_scalars {
    uint64_t state;           /* s */
    uint64_t optimizer_steps; /* Adam's t: updates that were not skipped */
    uint64_t skipped, skipped_in_row;
    uint64_t voids, counted_from; /* void samples trained over since this state, the run's first */
    struct lg_loss_scale loss_scale; /* of the step that begins with this state */
};

enum { LG_STATE_DEVICE_BYTES = 512 };

struct lg_state_front {
    struct lg_stamp stamp;
    struct lg_state_scalars scalars;
    char device[LG_STATE_DEVICE_BYTES]; /* fingerprints of what has made it, for manifests */
};

struct lg_state_view {
    struct lg_stamp *stamp;
    struct lg_state_scalars *scalars;
    float *w;     // (shard), memory of lg_state_device
    char *device; // (LG_STATE_DEVICE_BYTES)
};

typedef struct lg_trainer_state {
    struct lg_denoiser_config net;
    struct lg_training training;
    lg_params all;    /* the net's table */
    lg_params params; /* of it, what is trained: all that states and gradients know */
    int ranks, shards;
    lg_region *side[LG_INSTANCES_MAX][2];
    lg_region *moments[LG_INSTANCES_MAX]; /* NULL: not opened; else these lie so: */
    lg_moments_layout layout[LG_INSTANCES_MAX];
} lg_trainer_state;

/* The net that a config and a plan describe, and how it is trained; that points into the config. */
int lg_net_config_of(const lg_config *c, const lg_plan *p, struct lg_denoiser_config *ret);
/* What adapter.from begins with: (t->count) fp32 of these parameters; the caller frees. */
int lg_net_adapter_of(const lg_config *c, const struct lg_denoiser_config *net, const lg_params *t,
                      float **ret);
struct lg_training lg_training_of(const lg_config *c);
/* The two together. Free the table. */
int lg_net_table_of(const lg_config *c, const lg_plan *p, struct lg_denoiser_config *ret,
                    lg_params *ret_all);
/* The device that maps and updates a rank's state: the rank's, or a host device beside it. */
int lg_state_device(lg_stage *st, int rank, lg_device **ret);
/* Of every rank's own, for stages that serve all ranks. */
int lg_state_devices(lg_stage *st, lg_device *ret[LG_INSTANCES_MAX]);
/* The same for the plan: "host", "cuda:0". */
void lg_state_device_name(const lg_config *c, int rank, char ret[LG_DEVICE_NAME_BYTES]);
/* Parameter table and regions of all ranks. device[r] maps those of rank r: the same one for all (a
 * rank reads its peers'), or each rank's own (lg_state_devices); NULL: their fronts alone. */
int lg_trainer_state_open(lg_stage *st, lg_device *const device[], lg_trainer_state **ret);
/* The moments of a rank, for itself and for the checkpoint writer. */
int lg_trainer_moments_open(lg_stage *st, lg_device *d, lg_trainer_state *s, int rank);
void lg_trainer_state_close(lg_trainer_state **s); /* the stage closes the regions */
struct lg_state_view lg_trainer_state_view(const lg_trainer_state *s, int rank, uint64_t state);
/* Does every rank's shard of this state lie where its mark says? 0, or as lg_stage_lost. */
int lg_trainer_state_expect(lg_stage *st, const lg_trainer_state *s, uint64_t state);
/* Chunk k of a rank's moments, where it lies after t optimizer steps. */
struct lg_chunk lg_trainer_chunk(const lg_trainer_state *s, int rank, int k, uint64_t t);
/* Of a side whose shard has so many elements. */
size_t lg_trainer_state_bytes(size_t shard);
/* What rank r owns of a unit, and of all. */
struct lg_piece lg_trainer_piece(const lg_trainer_state *s, int rank, int unit);
size_t lg_trainer_shard(const lg_trainer_state *s, int rank);
/* Does the average alone lie with the host (memory.offload_ema), while GPUs have the state and make it? */
bool lg_ema_is_apart(const lg_config *c);
/* Of shard `rank`; d: the device of its state. */
int lg_ema_region(lg_stage *st, const lg_trainer_state *s, lg_device *d, int rank, int side,
                  lg_region **ret);

/* `bytes` rows of one process that has a context on every GPU with a state. */
int lg_state_processes(const lg_config *c, int ranks, struct lg_stage_bytes *rows, int cap, int *n);

/* Where a run's first state comes from: RUN/resume names a checkpoint, else trainer.init_from or
 * model.from a folder of weights, else the seed. */
typedef enum lg_origin { LG_ORIGIN_SEED, LG_ORIGIN_INIT, LG_ORIGIN_RESUME } lg_origin;
int lg_run_origin(lg_stage *st, lg_origin *ret, char ret_dir[LG_PATH_BYTES]);
/* Elements [first, first + count) of the part of the table that is not trained, on the host: what the run's first state has
 * there; with an adapter always the net that it adapts. LG_ERR_* as lg_params_load. */
int lg_frozen_read(lg_stage *st, const lg_trainer_state *s, size_t first, size_t count, float *ret);
