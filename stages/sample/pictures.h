/* Pictures, or clips of one size, as they are drawn; as a grid, to a file. */
#pragma once
#include "base/check.h"

typedef struct lg_pictures {
    int n;
    int frames, height, width; /* 1 frame: pictures */
    uint8_t *pixels;           /* (n, 3, frames, height, width), owned */
} lg_pictures;

struct lg_grid_look {
    int columns; /* 0: about square; one, where clips become a PNG */
    double fps;  /* of clips */
};

void lg_pictures_free(lg_pictures *p);
/* A (rows, columns) grid with a white border of 2 pixels around each, published atomically as what the path's ending says
 * (stages/io/clip_write.h): clips play all at once, or lie as strips of frames in a PNG. */
int lg_pictures_save(const lg_pictures *p, const struct lg_grid_look *look, const char *path);
