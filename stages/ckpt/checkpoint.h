/* The files of a checkpoint directory:
 *   model/, ema/          diffusers layout (nets/denoiser.h)
 *   optimizer.safetensors exp_avg.<param>, exp_avg_sq.<param>, master.<param>: fp32, names and
 * shapes of the parameter table, independent of the number of ranks manifest.json
 * config/manifest.h; written last
 */
#pragma once
#include "config/manifest.h"
#include "stages/nets/denoiser.h"

/* A whole training state, each array (params.count) fp32 on the host. */
struct lg_snapshot {
    const float *w, *m, *v, *ema;
};
struct lg_checkpoint_net {
    const struct lg_denoiser_config *config;
    const char *source; /* config.json whose other keys are kept, or NULL (lg_denoiser_save) */
    const lg_params *params;
};
/* Writes everything but the manifest into dir (created), each file fsynced. manifest gets the rows.
 */
int lg_checkpoint_write(const char *dir, const struct lg_checkpoint_net *net,
                        const struct lg_snapshot *s, lg_manifest *manifest);
/* Reads elements [first, first + count) of the flat buffer from dir/optimizer.safetensors; each
 * destination may be NULL. */
int lg_checkpoint_read_optimizer(const char *dir, const lg_params *params, size_t first,
                                 size_t count, float *w, float *m, float *v);
