/* How a file is taken apart: libav (stages/io/av) and WebP; see clip_read.h. */
#pragma once
#include "stages/io/clip_rgb.h"
#include "stages/io/clip_times.h"

typedef enum lg_clip_kind {
    LG_CLIP_NONE,
    LG_CLIP_WEBP,
    LG_CLIP_GIF,
    LG_CLIP_MOV,
    LG_CLIP_MATROSKA
} lg_clip_kind;

struct lg_clip_file {
    const struct lg_clip_input *in;
    lg_clip_kind kind;
    int reordered; /* of the closed index, when it is decoded */
};
/* Frame that packet number `packet` made. An error ends the decoding and is returned; > 0: no more are needed. */
typedef int (*lg_clip_on_decoded)(void *arg, size_t packet, const struct lg_clip_planes *frame);

struct lg_clip_decoder {
    /* Adds all packets to a zeroed index, which the caller closes and frees. */
    int (*index)(const struct lg_clip_file *f, struct lg_clip_index *ret);
    /* Decodes these packets of the index, until on_decoded has enough or the file ends. Frames come in the order in
     * which they are shown; those before run->strict that are not whole are left out. */
    int (*decode)(const struct lg_clip_file *f, const struct lg_clip_run *run,
                  lg_clip_on_decoded on_decoded, void *arg);
};
extern const struct lg_clip_decoder lg_clip_webp;
/* A struct lg_clip_decoder in liblg-av.so (av.h). */
#define LG_CLIP_AV "lg_clip_av"
