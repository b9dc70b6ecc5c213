/* Decoded frames to 8-bit RGB, in integers. */
#pragma once
#include "stages/io/picture.h"

typedef enum lg_clip_colours {
    LG_CLIP_RGB, /* components are R, G, B */
    /* Y, Cb, Cr by the matrix of */
    LG_CLIP_BT601,
    LG_CLIP_BT709,
    LG_CLIP_BT2020, /* non-constant luminance */
    LG_CLIP_SMPTE240M,
    LG_CLIP_FCC,
} lg_clip_colours;

/* Where a component's samples lie: sample (x, y) is the number at data + y * stride + x * step, shifted down. */
struct lg_clip_component {
    const uint8_t *data;
    ptrdiff_t stride; /* bytes */
    int step;         /* bytes */
    int depth;        /* bits, 8 to 16; more than 8: two bytes, little-endian */
    int shift;
    int log2_x, log2_y; /* a sample covers 2^log2_x x 2^log2_y pixels */
};
struct lg_clip_planes {
    int width, height;
    lg_clip_colours colours;
    bool is_full; /* 0 .. 255 of 8 bits; else 16 .. 235, chroma to 240 */
    int n;        /* components: 1 grey, 3, or 4 with opacity, 0 .. 255 always */
    struct lg_clip_component of[4];
};
/* Into *ret, a zeroed or earlier used picture. Y outside of its range is clipped. LG_ERR_VOID: out of bounds. */
int lg_clip_rgb(const struct lg_clip_planes *p, lg_picture *ret);
