/* diffusers' AutoencoderKL (Rombach et al. 2022), encoder and decoder: any block_out_channels,
 * layers_per_block, with or without mid attention and quant convs. DIR/config.json +
 * DIR/diffusion_pytorch_model.safetensors. Inside, pictures and features are NHWC; convolution
 * weights are permuted to (Co, kh, kw, Ci) when loaded. */
#pragma once
#include "kernels/device.h"
#include "kernels/ops.h"
#include "stages/nets/params.h"
#include <stdio.h>

enum { LG_AEKL_BLOCKS_MAX = 8 };
struct lg_aekl_config {
    int in_channels, out_channels, latent_channels;
    int blocks, block_out_channels[LG_AEKL_BLOCKS_MAX];
    int layers_per_block, norm_groups;
    bool mid_attention, quant_conv, post_quant_conv;
    double scaling_factor, shift_factor; /* shift 0 where the config has none */
};
int lg_aekl_config_load(const char *dir, struct lg_aekl_config *ret);
/* Pixels per latent cell on a side: 2^(blocks - 1). */
int lg_aekl_factor(const struct lg_aekl_config *c);

typedef enum lg_aekl_half {
    LG_AEKL_ENCODER = 1,
    LG_AEKL_DECODER = 2,
    LG_AEKL_BOTH = 3
} lg_aekl_half;
/* Only the half that is used needs to be in memory. quant_conv belongs to the encoder. */
int lg_aekl_params(const struct lg_aekl_config *c, lg_aekl_half half, lg_params *ret);
/* ret NULL: as lg_autoencoder_load. */
int lg_aekl_load(const struct lg_aekl_config *c, const char *dir, lg_aekl_half half, float *ret);

typedef struct lg_aekl lg_aekl;
/* A net for `batch` pictures of height x width pixels (multiples of the factor). slice: how many
 * pictures are in flight at once (0: all); it bounds memory and divides batch or is rounded up, the
 * last slice being padded. Bits of a picture do not depend on its neighbours; they may depend on
 * slice, which the plan fixes. */
struct lg_aekl_shape {
    lg_aekl_half half;
    int batch, height, width, slice;
};
int lg_aekl_plan(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 size_t *ret_bytes);
int lg_aekl_open(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                 lg_aekl **ret);
/* Nets of n shapes that never run at the same time, in one piece of memory, as large as the largest needs. ret[0] owns it
 * and is closed last. On failure none is open. */
int lg_aekl_open_all(lg_device *d, const struct lg_aekl_config *c,
                     const struct lg_aekl_shape *shapes, int n, lg_aekl **ret);
/* Bytes of that. */
int lg_aekl_plan_all(lg_device *d, const struct lg_aekl_config *c,
                     const struct lg_aekl_shape *shapes, int n, size_t *ret_bytes);
void lg_aekl_close(lg_aekl **net);
/* The programs of a slice as text (kernels/graph/program.h), for people. */
int lg_aekl_print(lg_device *d, const struct lg_aekl_config *c, const struct lg_aekl_shape *shape,
                  FILE *to);
/* pixels (B, 3, H, W) u8; mean, logvar (B, C, h, w): logvar is clamped to [-30, 20]. */
void lg_aekl_encode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor pixels,
                    lg_tensor mean, lg_tensor logvar);
/* latent (B, C, h, w), already divided by the scaling factor; image (B, 3, H, W) in [-1, 1], may be
 * absent; pixels (B, 3, H, W) u8, may be absent. */
void lg_aekl_decode(lg_aekl *net, lg_stream *s, const void *weights, lg_tensor latent,
                    lg_tensor image, lg_tensor pixels);
