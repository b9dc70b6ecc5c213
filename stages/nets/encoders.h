/* The descriptions (layers.h) of the text encoder and of the autoencoder. Internal to stages/nets; use t5.h and
 * autoencoder_kl.h. */
#pragma once
#include "stages/nets/autoencoder_kl.h"
#include "stages/nets/layers.h"
#include "stages/nets/t5.h"

/* ids (M) i32, rows of M / B tokens; length (B) i32; out (M, d_model). Unit k of the parameters is shard k. */
void lg_t5_describe(lg_net *n, const struct lg_t5_config *c, int shards, lg_tensor ids,
                    lg_tensor length, lg_tensor out);

/* pixels (B, C, H, W) u8 to the posterior's mean and logvar (B, latent_channels, h, w). */
void lg_aekl_describe_encoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor pixels,
                              lg_tensor mean, lg_tensor logvar);
/* latent (B, latent_channels, h, w) to the picture (B, H, W, out_channels). */
void lg_aekl_describe_decoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor latent,
                              lg_tensor picture);
