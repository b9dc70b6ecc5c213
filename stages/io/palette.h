/* A palette for pictures with more colours than a byte can number: variance cut.
 *
 * Colours are kept as they are where there are no more than 256. Otherwise a box of all of them is cut in two, and on, always
 * the box with the greatest squared error, across the channel in which it varies most, at its mean (X. Wu, "Efficient
 * statistical computations for optimal color quantization", Graphics Gems II, 1991, without its search for the best plane).
 * An entry is the mean of its box, and each colour gets the entry that is nearest. No dither: it would flicker. The same
 * pixels give the same palette everywhere. */
#pragma once
#include "base/check.h"

enum { LG_PALETTE_MAX = 256 };

struct lg_palette {
    int n;
    uint8_t rgb[LG_PALETTE_MAX][3];
};

/* rgb (count, 3), index (count). LG_ERR_NOSPACE. */
int lg_palette_of(const uint8_t *rgb, size_t count, struct lg_palette *ret, uint8_t *ret_index);
