/* Pictures in memory: PNG, JPEG and WebP to RGB, and RGB to PNG.
 *
 * Whatever cannot be decoded completely is LG_ERR_VOID with the reason: unknown format, damaged or
 * cut off data (a JPEG whose lower half would be grey counts as cut off), too large. Never
 * LG_ERR_IO: these functions do no I/O. Transparency is laid over white; grey, palette and 16-bit
 * pictures become 8-bit RGB; CMYK JPEGs are converted without colour profile. A JPEG is turned and mirrored
 * as its Exif data, before its frame, says (cameras store sideways what was taken upright); its sizes are those of the
 * turned picture. Colour profiles, gamma and the orientation of PNG and WebP are ignored; animations and arithmetic-coded JPEGs (whose end nobody
 * can tell from a cut) are refused.
 *
 * The time of a decode is bounded by counts, so that every machine calls the same pictures void. Its
 * cost is a sum of pixels, of compressed bytes, and, in a JPEG, of the blocks that its scans pass
 * over: a scan of a hundred bytes may pass over a million of them. What each can cost at the worst was
 * measured in CPU seconds with pictures of 8192 x 8192:
 * - JPEG: pixels 1 s; blocks 2.2 s (50 ns each in refinement scans, of which a component has 13 at
 *   most, 10 ns in others); bytes 3.3 s (noise at the highest quality, progressive, 25 ns each). The
 *   largest picture has 3 << 20 blocks without subsampling: 20 scans over all of them fit. libjpeg's
 *   own script has 10, and only those of the first coefficients go over all components. 128 MiB are
 *   2 bytes a pixel of the largest picture.
 * - PNG: 3.5 s for RGBA of 16 bits, interlaced, which is what that many pixels cost. Chunks beside
 *   the pixels are skipped, at 80 ns each. Data that unpacks to more than the pixels ends the decode.
 * - WebP: 5 s for its bytes, lossy noise (37 ns each); chunks beside the picture are skipped. */
#pragma once
#include "base/check.h"

enum {
    LG_PICTURE_SIDE_MAX = 16384,      /* pixels */
    LG_PICTURE_PIXELS_MAX = 64 << 20, /* width * height, checked before anything is allocated */
    LG_PICTURE_BYTES_MAX = 256 << 20, /* of the file */
    LG_JPEG_BYTES_MAX = 128 << 20,    /* of a JPEG file */
    LG_WEBP_BYTES_MAX = 128 << 20,    /* of a WebP file */
    LG_JPEG_SCANS_MAX = 1000,         /* about 1 us each beside their blocks */
    LG_JPEG_BLOCKS_MAX = 64 << 20,    /* 8 x 8 each; the sum over all scans */
};

typedef struct lg_picture {
    int width, height;               /* pixels */
    int stored_width, stored_height; /* before the JPEG decoder shrank it */
    uint8_t *rgb;                    /* (height, width, 3), owned */
    size_t capacity;                 /* bytes at rgb, kept between decodes */
} lg_picture;

/* The size that the file says, from its first bytes, without decoding; a file with a size may still be damaged. 0 with
 * width 0: that takes *ret_need bytes from the file's beginning, or the file is cut off if it has fewer. LG_ERR_VOID: no
 * picture, or out of bounds. */
enum { LG_PICTURE_HEAD_BYTES = 64 };
struct lg_picture_size {
    int width, height; /* pixels */
};
int lg_picture_size(const void *data, size_t bytes, size_t *ret_need, struct lg_picture_size *ret);
/* As in Exif, from 1 (as stored) to 8; from LG_ORIENTATION_TURNED on width is stored as height. 1 also for what is no JPEG. */
enum { LG_ORIENTATION_TURNED = 5 };
int lg_jpeg_orientation(const void *data, size_t bytes);
/* Turns and mirrors the picture so that it is upright. */
int lg_picture_orient(lg_picture *pic, int orientation);
/* LG_ERR_VOID, unless sides and pixels are within the bounds. */
int lg_picture_check_bounds(int64_t width, int64_t height);

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
