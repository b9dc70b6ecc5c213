/* Pictures in memory: PNG, JPEG and WebP to RGB, and RGB to PNG.
 *
 * Whatever cannot be decoded completely is LG_ERR_VOID with the reason: unknown format, damaged or
 * cut off data (a JPEG whose lower half would be grey counts as cut off), too large. Never
 * LG_ERR_IO: these functions do no I/O. Transparency is laid over white; grey, palette and 16-bit
 * pictures become 8-bit RGB; CMYK JPEGs are converted without colour profile. Colour profiles,
 * gamma and EXIF orientation are ignored; animations are refused. */
#pragma once
#include "base/check.h"

enum {
    LG_PICTURE_SIDE_MAX = 16384,      /* pixels */
    LG_PICTURE_PIXELS_MAX = 64 << 20, /* width * height, checked before anything is allocated */
};

typedef struct lg_picture {
    int width, height; /* pixels */
    uint8_t *rgb;      /* (height, width, 3), owned */
    size_t capacity;   /* bytes at rgb, kept between decodes */
} lg_picture;

/* Decodes into *pic, a zeroed or earlier used picture, whose memory is reused. `side_min` > 0 lets
 * the JPEG decoder shrink by 2, 4 or 8 in the transform, which is much quicker, as long as the
 * shorter side stays at least side_min; 0 decodes at full size. */
int lg_picture_decode(const void *data, size_t bytes, int side_min, lg_picture *pic);
/* Makes room for width x height; the content is undefined. Out of bounds is LG_ERR_VOID. */
int lg_picture_reserve(lg_picture *pic, int64_t width, int64_t height);
/* Frees the memory and zeroes the struct. */
void lg_picture_free(lg_picture *pic);

/* 8-bit RGB PNG of (height, width, 3) in memory; the caller frees *ret_data. */
int lg_picture_encode_png(const uint8_t *rgb, int width, int height, uint8_t **ret_data,
                          size_t *ret_bytes);
