/* What a trainer rank allocates, said once for the plan and for the rank. */
#pragma once
#include "stages/stage.h"
#include "stages/trainer/batch.h"

/* How its net is opened; points into c. */
struct lg_denoiser_mode lg_rank_mode(const lg_config *c, const lg_plan *p, int rank);
/* The nets of a rank, one for each of the plan's shapes, with the same events. Where it lies it stays: batch points into
 * config. */
struct lg_rank_nets {
    int n;
    lg_denoiser *net[LG_BUCKETS_MAX];
    struct lg_denoiser_config config[LG_BUCKETS_MAX];
    struct lg_batch_options batch[LG_BUCKETS_MAX];
};
/* Compiles them; square: the net of the square's latents. Close also what has failed. */
int lg_rank_nets_compile(lg_device *d, const lg_config *c, const lg_plan *p, int rank,
                         const struct lg_denoiser_config *square, struct lg_rank_nets *ret);
void lg_rank_nets_close(struct lg_rank_nets *nets);
/* Elements of the largest prediction. */
size_t lg_rank_prediction(const struct lg_rank_nets *nets);
/* Rows of latents that it computes. */
int64_t lg_rank_height(const struct lg_batch_options *batch);
/* The role's rows for `lgsup check`; see lg_stage_def. */
int lg_trainer_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                     struct lg_stage_bytes *rows, int cap, int *ret_n);
