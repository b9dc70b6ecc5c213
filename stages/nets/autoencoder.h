/* An autoencoder of either kind, an AutoencoderKL (autoencoder_kl.h), which sees every frame alone, or an AutoencoderKLLTXVideo
 * (autoencoder_ltx.h), on pictures and on clips: the one that stages and tools use.
 *
 * A clip's frames lie below one another: pixels of a sample are (3, F, H, W), its latents (C, f, h, w); a picture has one. */
#pragma once
#include "config/models.h"
#include "stages/nets/autoencoder_kl.h"
#include "stages/nets/autoencoder_ltx.h"

struct lg_autoencoder_config {
    lg_vae_kind kind;
    struct lg_aekl_config kl;   /* this one, */
    struct lg_aeltx_config ltx; /* or this one */
    int latent_channels;
    int factor;      /* pixels per cell on a side */
    int factor_time; /* frames per latent frame (config/models.h) */
    double scaling_factor, shift_factor;
};
/* DIR/config.json, in diffusers layout. */
int lg_autoencoder_config_load(const char *dir, struct lg_autoencoder_config *ret);
/* 0: it takes no such number of frames. */
int lg_autoencoder_latent_frames(const struct lg_autoencoder_config *c, int frames);
/* Only the half that is used needs to be in memory. */
int lg_autoencoder_params(const struct lg_autoencoder_config *c, lg_aekl_half half, lg_params *ret);
/* ret NULL: the files alone are looked at, whether they hold what the config wants. */
int lg_autoencoder_load(const struct lg_autoencoder_config *c, const char *dir, lg_aekl_half half,
                        float *ret);

typedef struct lg_autoencoder lg_autoencoder;
/* A net for `batch` clips of so many frames (0: 1) of height x width pixels, multiples of the factor.
 *
 * slice: how much is in flight at once, 0: all. Of pictures of an AutoencoderKL so many (autoencoder_kl.h); of clips, which run
 * one after the other, so many frames of pixels, as far as the net can be cut: an encoder or decoder that is causal at whole
 * latent frames, at least one, an AutoencoderKL everywhere; a decoder that is not causal runs whole.
 * tile: a picture or frame that is larger on a side runs in tiles of so many pixels (rounded to the factor), of which each two
 * neighbours share a quarter, where what they made is blended linearly; 0: whole. Not of pictures of an AutoencoderKL.
 *
 * Bits of a clip do not depend on its neighbours; those of a causal net not on slice. */
struct lg_autoencoder_shape {
    lg_aekl_half half;
    int batch, frames, height, width, slice, tile;
};
/* What slice is best of clips of these sizes, where nobody says: as many frames as make 16 megapixels, of an AutoencoderKL one. */
int lg_autoencoder_slice(const struct lg_autoencoder_config *c, int height, int width);
/* shape's slice becomes the largest with which a net's activations keep within so many bytes: all, half, a quarter .. (rounded
 * up); the smallest that there is where none does. It follows from the shape and the type of numbers, not from the device. */
int lg_autoencoder_fit_slice(lg_device *d, const struct lg_autoencoder_config *c, size_t bytes,
                             struct lg_autoencoder_shape *shape);
/* Nets of n shapes that never run at the same time, in one piece of memory, as large as the largest needs. ret[0] owns it
 * and is closed last. On failure none is open. */
int lg_autoencoder_open_all(lg_device *d, const struct lg_autoencoder_config *c,
                            const struct lg_autoencoder_shape *shapes, int n, lg_autoencoder **ret);
/* Bytes of that. */
int lg_autoencoder_plan_all(lg_device *d, const struct lg_autoencoder_config *c,
                            const struct lg_autoencoder_shape *shapes, int n, size_t *ret_bytes);
void lg_autoencoder_close(lg_autoencoder **a);
/* The programs as text (kernels/graph/program.h), for people. */
int lg_autoencoder_print(lg_device *d, const struct lg_autoencoder_config *c,
                         const struct lg_autoencoder_shape *shape, FILE *to);
/* Floating-point operations of one clip, or of one slice of pictures, encoded and decoded, as far as the net has the halves. */
double lg_autoencoder_flops(const lg_autoencoder *a);
/* pixels (B, 3, F H, W) u8; mean, logvar (B, C, f h, w). */
void lg_autoencoder_encode(lg_autoencoder *a, lg_stream *s, const void *weights, lg_tensor pixels,
                           lg_tensor mean, lg_tensor logvar);
/* Of decoders of clips that are conditioned on a timestep or add noise (LTX-Video's of 0.9.1 and later); others know nothing of it.
 * All 0 unless it is said. */
struct lg_decoding {
    double timestep;      /* 0 to 1 */
    uint64_t seed, first; /* noise: Philox DECODE (seed, first + the clip's place in the batch) */
};
void lg_autoencoder_set_decoding(lg_autoencoder *a, const struct lg_decoding *d);
/* latent (B, C, f h, w), already divided by the scaling factor; image (B, 3, F H, W) in [-1, 1] and pixels, the same in u8: either
 * may be absent. */
void lg_autoencoder_decode(lg_autoencoder *a, lg_stream *s, const void *weights, lg_tensor latent,
                           lg_tensor image, lg_tensor pixels);
