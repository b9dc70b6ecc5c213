/* What both halves of AutoencoderKLLTXVideo are made of: norms with or without a modulation, resnets. Internal to its
 * description. */
#pragma once
#include "stages/nets/autoencoder_ltx.h"
#include "stages/nets/video.h"

/* A stretch of the net: what its layers share. */
struct lg_aeltx_part {
    lg_net *n;
    struct lg_video *clip;
    const struct lg_aeltx_config *c;
    bool has_noise;     /* resnets add some */
    lg_tensor embedded; // (4 channels): what the block's embedder makes of the timestep, or LG_NONE
    char name[64];      /* "encoder.down_blocks.0." */
};

/* What follows is called NAME of the part, or NAME.i; i < 0: there is one. */
void lg_aeltx_scope(const struct lg_aeltx_part *p, const char *name, int i);
/* count vectors (channels): what the timestep became, plus the table of this layer; LG_NONE without a timestep. */
lg_tensor lg_aeltx_modulation(lg_net *n, lg_tensor embedded, int count, int64_t channels);
/* Norm i: rows 2 i and 2 i + 1 of the modulation are its shift and scale. */
struct lg_video_norm lg_aeltx_norm(lg_tensor modulation, int i);
/* silu(norm(x)), convolved. */
lg_tensor lg_aeltx_normed_conv(const struct lg_aeltx_part *p, lg_tensor x,
                               struct lg_video_norm norm, struct lg_video_conv conv,
                               const char *name);
/* To `out` channels; y: where it writes, or LG_NONE. */
lg_tensor lg_aeltx_resnet(const struct lg_aeltx_part *p, lg_tensor x, int out, lg_tensor y);
/* count of them, that keep the channels; y: of the last one. */
lg_tensor lg_aeltx_resnets(const struct lg_aeltx_part *p, lg_tensor x, int count, lg_tensor y);
