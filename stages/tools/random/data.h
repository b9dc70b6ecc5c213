/* The data sets that lg-random-model makes: tar shards of 00000000.jpg (or .latent.safetensors), .txt, a caption of a few
 * words, and .cls. The pictures are smooth coloured noise, about as large as photographs once compressed. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct lg_random_data {
    const char *dir;
    bool pictures; /* else latents */
    long count, per_shard, classes;
    long size; /* a side, in pixels or in cells of the latent */
    /* Pictures. 1: they are squares; R: they have about size^2 pixels, and ratios of all kinds from 1 : R to R : 1. */
    long ratio;
    /* Latents. frames = 0: (channels, size, size); else clips of (channels, frames, size, size). */
    long channels, frames;
    uint64_t seed;
};

/* LG_ERR_USAGE: a number is out of its range. */
int lg_random_data_make(const struct lg_random_data *d);
