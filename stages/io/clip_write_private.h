/* The writers of clip_write.h, a file each; use that one. The clip is within bounds. */
#pragma once
#include "stages/io/clip_write.h"

/* Bytes that grow. */
struct lg_clip_bytes {
    uint8_t *data;
    size_t count, capacity;
};
/* LG_ERR_NOSPACE. */
int lg_clip_put(struct lg_clip_bytes *b, const void *data, size_t bytes);

int lg_clip_write_gif(const struct lg_clip *clip, struct lg_clip_bytes *out);
int lg_clip_write_webp(const struct lg_clip *clip, struct lg_clip_bytes *out);
/* LG_CLIP_mp4, LG_CLIP_webm or LG_CLIP_mkv: found in liblg-av.so (stages/io/av.h). */
#define LG_CLIP_FILM_WRITER "lg_clip_film_writer"
struct lg_clip_film_writer {
    int (*write)(const struct lg_clip *clip, lg_clip_format format, struct lg_clip_bytes *out);
};
