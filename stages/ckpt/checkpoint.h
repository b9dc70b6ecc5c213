/* The files of a checkpoint directory:
 *   model/, ema/          diffusers layout (nets/denoiser.h); of an adapter: adapter/, ema/ (nets/adapter_file.h)
 *   optimizer.safetensors exp_avg.<param>, exp_avg_sq.<param>, master.<param>: fp32, names and
 *                         shapes of the parameters that are trained, independent of the number of ranks
 *   manifest.json         config/manifest.h; written last
 */
#pragma once
#include "config/manifest.h"
#include "stages/nets/denoiser.h"

/* A whole training state, each array (trained_count) fp32 on the host. */
struct lg_snapshot {
    const float *w, *m, *v, *ema;
};
struct lg_contents {
    const struct lg_denoiser_config *net;
    const lg_params *params;          /* the whole table */
    const struct lg_adapter *adapter; /* NULL, or of rank 0: none */
    const char *base;                 /* the folder of the net that it adapts */
    const float *frozen;              /* what is not trained, where there is no adapter */
    const char *source;               /* config.json whose other keys are kept, or NULL */
    struct lg_snapshot state;
};
/* Writes everything but the manifest into dir (created), each file fsynced. manifest gets the rows.
 */
int lg_checkpoint_write(const char *dir, const struct lg_contents *c, lg_manifest *manifest);
/* Reads elements [first, first + count) of the flat buffer from dir/optimizer.safetensors; each
 * destination may be NULL. */
int lg_checkpoint_read_optimizer(const char *dir, const lg_params *params, size_t first,
                                 size_t count, float *w, float *m, float *v);
