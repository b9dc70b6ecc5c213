/* What other people's decoders see in a clip: libav for GIF, MP4, WebM and Matroska, libwebpdemux for animated WebP. */
#pragma once
#include "base/check.h"

struct seen_clip {
    int frames, height, width;
    double fps;   /* by the file's duration */
    uint8_t *rgb; /* (frames, height, width, 3); free() */
};
/* Fails the test when the bytes are no clip. */
struct seen_clip read_clip(const uint8_t *data, size_t bytes, const char *name);
