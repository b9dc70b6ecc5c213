/* The PNG half of picture.h; use that one. */
#pragma once
#include "stages/io/picture.h"

/* `data` begins with the PNG signature. Results as lg_picture_decode. */
int lg_png_decode(const void *data, size_t bytes, lg_picture *pic);
/* (count, 4) RGBA, not premultiplied, over white to (count, 3). */
void lg_picture_over_white(const uint8_t *rgba, uint8_t *rgb, size_t count);
