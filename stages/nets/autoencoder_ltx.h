/* diffusers' AutoencoderKLLTXVideo (HaCohen et al., "LTX-Video: Realtime Video Latent Diffusion", 2024), encoder and decoder,
 * of 0.9.0 (stride-2 convolutions), of 0.9.1 (whose decoder adds noise) and of 0.9.5 and later (boxes as channels).
 * DIR/config.json and DIR/diffusion_pytorch_model.safetensors. Refused by key: an encoder that is not causal, patches over time,
 * and what diffusers itself cannot run. A decoder with conditions on a timestep gets 0, as in diffusers' pipeline, unless it is
 * told otherwise; what it gets is a thousand times that (diffusers has this factor as a parameter, which nothing trains).
 *
 * Latents here are those of the files minus latents_mean, over latents_std, tensors of the weights' file: what denoisers are
 * trained on. */
#pragma once
#include "stages/nets/params.h"

enum { LG_AELTX_BLOCKS_MAX = 8 };
/* How a block makes its map smaller. */
typedef enum lg_aeltx_way {
    LG_AELTX_KEEPS,
    LG_AELTX_CONV, /* a convolution of stride 2 in time and space */
    LG_AELTX_SPACE,
    LG_AELTX_TIME,
    LG_AELTX_BOTH, /* these three: boxes become channels */
} lg_aeltx_way;
struct lg_aeltx_block {
    int in, out; /* channels */
    int layers;
    lg_aeltx_way way;  /* of the decoder: how its map was made smaller */
    bool has_residual; /* of the decoder: boxes are also copied into space */
    bool has_noise;    /* likewise: its resnets add some behind their convolutions */
};
struct lg_aeltx_half {
    struct lg_aeltx_block block[LG_AELTX_BLOCKS_MAX]; /* in the order in which they run */
    int blocks;
    int first, middle; /* channels of the first convolution and of the middle */
    int middle_layers;
    bool middle_has_noise;
};
struct lg_aeltx_config {
    int latent_channels, patch;
    int factor, factor_time; /* pixels per cell on a side; frames per latent frame */
    double eps;              /* of the shortcuts' norms */
    double scaling_factor;
    bool is_095; /* blocks of 0.9.5 */
    bool decoder_is_causal, has_timestep;
    struct lg_aeltx_half encoder, decoder;
};
/* Reads config.json; LG_ERR_CONFIG names the key that is not supported. */
int lg_aeltx_config_load(const char *dir, struct lg_aeltx_config *ret);
