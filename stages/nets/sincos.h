/* Sinusoidal positions of patches, diffusers' get_2d_sincos_pos_embed. */
#pragma once
#include <stddef.h>

/* A row's coordinate goes from 0 to base / scale (base_size, interpolation_scale), whatever their number, and so does a
 * column's. */
struct lg_grid {
    int rows, columns; /* patches */
    double base, scale;
};
/* Element e of (rows columns, D). */
float lg_sincos(const struct lg_grid *grid, int D, size_t e);
/* All of them. */
void lg_net_positions(const struct lg_grid *grid, int D, float *ret);
/* diffusers' get_1d_sincos_pos_embed of numbers first .. first + count - 1: (count, D), D/2 sines, then D/2 cosines. */
void lg_net_frame_positions(int first, int count, int D, float *ret);
