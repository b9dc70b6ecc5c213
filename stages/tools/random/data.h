/* The data sets that lg-random-model makes: tar shards of 00000000.jpg (or .gif or another of clip_formats.def, or
 * .latent.safetensors), .txt, a caption of a few words, and .cls. The pictures are smooth coloured noise, about as large as
 * photographs once compressed; in clips, of 25 frames a second, coloured discs move. */
#pragma once
#include "stages/io/clip_write.h"
#include <stdint.h>

enum lg_random_kind { LG_RANDOM_PICTURES, LG_RANDOM_CLIPS, LG_RANDOM_LATENTS };

struct lg_random_data {
    const char *dir;
    enum lg_random_kind kind;
    lg_clip_format format; /* of clips */
    long count, per_shard, classes;
    long size; /* a side, in pixels or in cells of the latent */
    /* Pictures. 1: they are squares; R: they have about size^2 pixels, and ratios of all kinds from 1 : R to R : 1. */
    long ratio;
    /* Latents. frames = 0: (channels, size, size); else clips of (channels, frames, size, size). Clips have frames, too. */
    long channels, frames;
    uint64_t seed;
};

/* LG_ERR_USAGE: a number is out of its range. */
int lg_random_data_make(const struct lg_random_data *d);
