/* What a trainer rank allocates beside its net, said once for the plan and for the rank. */
#pragma once
#include "stages/stage.h"
#include "stages/trainer/batch.h"

struct lg_rank_bytes {
    size_t
        reduced; /* sum of gradients of the own shard; 0: with one rank the gradient is the sum */
    size_t squares; /* of the own shard's pieces (lg_reduce_ranks) */
};
struct lg_rank_bytes lg_rank_bytes_of(size_t shard, int ranks);
/* Pieces of the gradient's squares (lg_reduce_ranks) in so many elements. */
size_t lg_squares_count(size_t count);
/* How its net is opened; points into c. */
struct lg_denoiser_mode lg_rank_mode(const lg_config *c, const lg_plan *p);
struct lg_batch_options lg_rank_batch(const lg_plan *p, const struct lg_denoiser_config *net);
/* The role's rows for `lgsup check`; see lg_stage_def. */
int lg_trainer_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                     int *ret_n);
