/* Clips to the bytes of a file: PNG, GIF, animated WebP, MP4, WebM, Matroska.
 *
 * Equal clips give equal bytes: PNG, WebP and Matroska with the same libraries, GIF, which needs none, everywhere. MP4 and WebM
 * do so on one machine (one thread, no dates, no names of programs); encoders do not promise it for another instruction set.
 * Sides that have to be even are brought there by repeating the last row and column. Colours of MP4 and WebM are BT.601
 * in the limited range, one chroma sample for 2 x 2 pixels, and say so.
 *
 * A clip of one frame is written as any other; one PNG of it is the picture itself. */
#pragma once
#include "base/check.h"

typedef enum lg_clip_format {
#define LG_CLIP_FORMAT(name, is_exact, text) LG_CLIP_##name,
#include "stages/io/clip_formats.def"
#undef LG_CLIP_FORMAT
    LG_CLIP_FORMATS
} lg_clip_format;

enum { LG_CLIP_SIDE_MAX = 16383 }; /* pixels of what is no PNG */
/* Frames per second that every container can say. */
#define LG_CLIP_FPS_MIN 0.002
#define LG_CLIP_FPS_MAX 1000

struct lg_clip {
    int frames, height, width;
    double fps;         /* frames per second; a GIF shows at most 50 */
    const uint8_t *rgb; /* (frames, height, width, 3) */
};

/* "gif"; the ending of its files, too. */
const char *lg_clip_format_name(lg_clip_format f);
extern const char lg_clip_endings[]; /* " .png .gif", and so on */
/* By the file's ending, in lower case; LG_ERR_USAGE with a list of all for another. */
int lg_clip_format_of(const char *path, lg_clip_format *ret);
/* The whole file in memory, which the caller frees. LG_ERR_USAGE: out of bounds; LG_ERR_NOTFOUND: there is no
 * liblg-av.so, or no encoder of the format; LG_ERR_NOSPACE; LG_ERR_FAILED: the library's reason. */
int lg_clip_encode(const struct lg_clip *clip, lg_clip_format format, uint8_t **ret_data,
                   size_t *ret_bytes);
/* Encodes by the path's ending and publishes the file atomically. */
int lg_clip_save(const struct lg_clip *clip, const char *path);
