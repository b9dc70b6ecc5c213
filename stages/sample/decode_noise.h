/* Noise in latents before they are decoded: decoders that are conditioned on a timestep (LTX-Video's from 0.9.1 on) remove it
 * themselves. As diffusers' LTXPipeline with decode_noise_scale: (1 - share) z + share e, z being a latent of the files, which is
 * the denoiser's times latents_std plus latents_mean. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct lg_decode_noise {
    const char *vae_dir;
    int channels;
    size_t values; /* of a channel of a clip: frames, rows and columns of the latent */
    double share;  /* 0 to 1 */
    uint64_t seed;
};
/* latents (n, C, values) as denoisers make them, changed in place; e: Philox DECODE (seed, clip), from block 2^60 on. */
int lg_decode_noise_mix(const struct lg_decode_noise *m, float *latents, int n);
