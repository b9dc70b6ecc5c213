/* What the pictures and clips of lg-random-model show. */
#pragma once
#include <stdint.h>

struct lg_random_sides {
    int width, height;
};

/* Picture n: a grid of random colours, interpolated, and grain on each pixel. rgb: (height, width, 3) */
void lg_random_paint_picture(uint64_t seed, uint64_t n, struct lg_random_sides s, uint8_t *rgb);

/* Clip n: discs of few colours that move along straight lines and come in again at the other side. rgb: (frames, height,
 * width, 3) */
void lg_random_paint_clip(uint64_t seed, uint64_t n, struct lg_random_sides s, int frames,
                          uint8_t *rgb);
