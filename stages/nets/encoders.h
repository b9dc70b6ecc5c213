/* The descriptions (layers.h) of the text encoders and of the autoencoder. Internal to stages/nets; use text_encoder.h and
 * autoencoder_kl.h. */
#pragma once
#include "stages/nets/autoencoder.h"
#include "stages/nets/text_encoder.h"
#include "stages/nets/video.h"

#define LG_T5_MODEL_TYPE   "t5"
#define LG_CLIP_MODEL_TYPE "clip_text_model"
/* io->ids (M) i32 of M / B tokens a caption, its states (M, D), the rest as text_encoder.h has it; what is not wanted is
 * LG_NONE. Unit k of the parameters is shard k. While parameters are declared, everything that the model has is wanted. */
void lg_t5_describe(lg_net *n, const struct lg_t5_config *c, int shards,
                    const struct lg_text_io *io);
void lg_clip_describe(lg_net *n, const struct lg_clip_config *c, int shards,
                      const struct lg_text_io *io);

/* pixels (B, C, H, W) u8 to the posterior's mean and logvar (B, latent_channels, h, w). */
void lg_aekl_describe_encoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor pixels,
                              lg_tensor mean, lg_tensor logvar);
/* latent (B, latent_channels, h, w) to the picture (B, H, W, out_channels). */
void lg_aekl_describe_decoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor latent,
                              lg_tensor picture);

/* The ends of a slice of a clip. Encoder: pixels (3|D H W) u8 to mean and logvar (C|d h w). Decoder: latent (C|d h w) to patches
 * (D, H / p, W / p, 3 p p) of pictures, in the order of clip_to_patches_forward; p is 1 of an AutoencoderKL. */
struct lg_video_ends {
    lg_tensor from, to[2];
};
/* The same as above of the frames of a clip, each for itself. */
void lg_aekl_describe_video_encoder(lg_net *n, const struct lg_aekl_config *c,
                                    const struct lg_video_ends *ends);
void lg_aekl_describe_video_decoder(lg_net *n, const struct lg_aekl_config *c,
                                    const struct lg_video_ends *ends);
/* Before either of the two below, while parameters are declared: what both have. */
void lg_aeltx_declare_statistics(lg_net *n, const struct lg_aeltx_config *c);
void lg_aeltx_describe_encoder(lg_net *n, const struct lg_aeltx_config *c, struct lg_video *clip,
                               const struct lg_video_ends *ends);
void lg_aeltx_describe_decoder(lg_net *n, const struct lg_aeltx_config *c, struct lg_video *clip,
                               const struct lg_video_ends *ends);
