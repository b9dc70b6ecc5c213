/* What a trainer rank allocates, said once for the plan and for the rank. */
#pragma once
#include "stages/stage.h"
#include "stages/trainer/batch.h"

/* How its net is opened; points into c. */
struct lg_denoiser_mode lg_rank_mode(const lg_config *c, const lg_plan *p, int rank);
int lg_rank_batch(const lg_plan *p, const struct lg_denoiser_config *net,
                  const struct lg_denoiser_mode *mode, struct lg_batch_options *ret);
/* Rows of latents that it computes. */
int64_t lg_rank_height(const struct lg_batch_options *batch);
/* The role's rows for `lgsup check`; see lg_stage_def. */
int lg_trainer_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                     int *ret_n);
