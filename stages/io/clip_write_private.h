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

int lg_clip_gif(const struct lg_clip *clip, struct lg_clip_bytes *out);
int lg_clip_webp(const struct lg_clip *clip, struct lg_clip_bytes *out);
/* LG_CLIP_mp4, LG_CLIP_webm or LG_CLIP_mkv. */
int lg_clip_av(const struct lg_clip *clip, lg_clip_format format, struct lg_clip_bytes *out);
