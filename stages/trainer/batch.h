/* One micro-batch: from window slots to the net's inputs on the device. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/nets/objective.h"
#include "stages/stage.h"

typedef struct lg_batch lg_batch;

/* The tensors of a loaded batch, on the device. Text states are used where they lie in the window (but for
 * texts_on_host), which is why a batch's samples must not be committed before its backward is done. */
struct lg_batch_tensors {
    struct lg_denoiser_input in; // in.x is x_t, or its band
    lg_tensor target;            // (B, C, H, W), or its band
    lg_tensor weight;            // (B), fp32: loss weight of each sample, times the band's share
    /* With a learned variance weight is (B, 2), noise and variance, and there are */
    lg_tensor terms; // (B, 6): lg_learned_range_loss's
};
struct lg_batch_options {
    const struct lg_denoiser_config *net;
    int64_t size;    /* B */
    double guidance; /* where the net has it as a condition */
    int factor; /* pixels of a side of a cell of the latent, where numbers of the picture are conditions */
    bool latents_on_host; /* as fp32, while the device computes elsewhere or otherwise */
    bool
        texts_on_host; /* in the device's type, where it reaches them: copied, since products read them often */
    bool frame_times; /* as the net's mode: a clip's first frame may be clean */
    struct lg_band
        band; /* of the latents, where others of a sequence group have the rest; height 0: all */
};
/* One for batches of n kinds (data.buckets), one at a time; o[k].net outlives it. */
int lg_batch_open(lg_device *d, const struct lg_batch_options *o, int n, lg_batch **ret);
/* The device memory goes with the device. */
void lg_batch_close(lg_batch **b);
/* Device bytes of that. */
size_t lg_batch_bytes(const lg_device *d, const struct lg_batch_options *o, int n);
const struct lg_batch_tensors *lg_batch_tensors(const lg_batch *b);
/* Host copy of the loss weights, (B) or (B, 2). */
const float *lg_batch_weights(const lg_batch *b);

struct lg_batch_spec {
    int kind;        /* of the options */
    uint64_t first;  /* this host's sample number of row 0 */
    uint64_t of_run; /* and the run's (lg_stage_sample): those of the next rows follow it */
    double divisor;  /* non-void samples of the global batch, >= 1 */
    uint64_t seed;
    double scaling_factor, shift_factor;
    const struct lg_objective *objective;
};
/* Fills the batch from ready slots of one rank's share: makes x_t and target (lg_diffuse_forward).
 * The loss weight of a row is objective weight / divisor, 0 for void and
 * absent samples. */
void lg_batch_load(lg_batch *b, lg_stream *s, lg_window *w, const struct lg_batch_spec *spec);
/* Of the prediction (B, C or 2 C, H, W), or its band, the loss, (B) or (B, 2) as the weights are, and the gradient of its weighted
 * sum, which takes the prediction's place. A first frame that is clean has no part in either: its samples' weights make of the
 * mean over all frames that over the others. */
void lg_batch_loss(lg_batch *b, lg_stream *s, lg_tensor pred, lg_tensor loss);
