/* A side cut into tiles of one size, and what each counts where two overlap. */
#pragma once

enum { LG_TILES_MAX = 256 };
struct lg_tiles {
    int n, size;          /* cells of a tile */
    int overlap;          /* cells over which a tile hands over to the next */
    int at[LG_TILES_MAX]; /* where each begins; the last one ends where the side does */
};
/* `cells` in tiles of `size`, which share a quarter; 0, or no less than cells: one tile. */
struct lg_tiles lg_tiles_cut(int cells, int size);
/* ret (size factor): the weights of tile i where a cell is `factor` pixels: 1, or rising linearly over the first cells that it
 * shares, falling over the last ones; those of all tiles add up to 1 everywhere. */
void lg_tiles_weights(const struct lg_tiles *t, int i, int factor, double *ret);
