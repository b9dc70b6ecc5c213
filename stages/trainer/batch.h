/* One micro-batch: from window slots to the net's inputs on the device. */
#pragma once
#include "stages/nets/denoiser.h"
#include "stages/nets/objective.h"
#include "stages/stage.h"

typedef struct lg_batch lg_batch;

/* The tensors of a loaded batch, on the device; owned by the batch. */
struct lg_batch_tensors {
    struct lg_denoiser_input in; // in.x is x_t
    lg_tensor target;            // (B, C, H, W)
    lg_tensor weight;            // (B): loss weight of each sample
};
int lg_batch_open(lg_device *d, const struct lg_denoiser_config *net, int64_t size, lg_batch **ret);
/* The device memory goes with the device. */
void lg_batch_close(lg_batch **b);
/* Device and host bytes of one. */
size_t lg_batch_bytes(const struct lg_denoiser_config *net, int64_t size);
const struct lg_batch_tensors *lg_batch_tensors(const lg_batch *b);
/* Host copy of the loss weights, (B). */
const float *lg_batch_weights(const lg_batch *b);

struct lg_batch_spec {
    uint64_t first; /* sample number of row 0 */
    double divisor; /* non-void samples of the global batch, >= 1 */
    uint64_t seed;
    double scaling_factor, shift_factor;
    const struct lg_objective *objective;
};
/* Fills the batch from ready slots: gathers, uploads, makes x_t and target (lg_diffuse_forward).
 * The loss weight of a row is objective weight / divisor, 0 for void samples. */
void lg_batch_load(lg_batch *b, lg_stream *s, lg_window *w, const struct lg_batch_spec *spec);
