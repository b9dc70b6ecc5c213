/* The shape of a U-Net (diffusers' UNet2DConditionModel), as plan and net know it. */
#pragma once

enum { LG_UNET_LEVELS_MAX = 8, LG_UNET_LAYERS_MAX = 8, LG_UNET_DEPTH_MAX = 64 };

struct lg_unet {
    int levels, layers; /* layers of each level on the way down; one more on the way up */
    int channels[LG_UNET_LEVELS_MAX]; /* of each level */
    int heads[LG_UNET_LEVELS_MAX];  /* of its attentions; those of the last are the middle's, too */
    int depths[LG_UNET_LEVELS_MAX]; /* blocks of each of its transformers; 0: it has none */
    int middle_depth;               /* blocks of the middle's transformer */
    int groups;                     /* of GroupNorm */
    int number_waves;               /* SDXL: sinusoids of each of its six numbers */
};

/* What is gathered and recomputed together, in the order of a forward: each layer, the middle, and each further block of
 * a transformer that has several. The number of them is model.depth. */
int lg_unet_blocks(const struct lg_unet *u);
