/* The latent of a picture that drawn clips begin with (sample.first_frame). */
#pragma once
#include "kernels/device.h"

struct lg_first_frame_spec {
    lg_device *device;
    const char *
        path; /* PNG, JPEG or WebP: scaled to cover the frame, what is too much cut off at both ends */
    const char *vae_dir;
    int channels;      /* of the net's latents */
    int height, width; /* of a frame, in cells */
};
/* (C, h, w) as denoisers are trained on them, the means of the posterior; the caller frees *ret_latent. LG_ERR_VOID: no
 * whole picture; LG_ERR_MISMATCH: the autoencoder is another model's. */
int lg_first_frame_encode(const struct lg_first_frame_spec *spec, float **ret_latent);
