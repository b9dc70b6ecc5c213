/* Films made by libav's and libwebp's encoders, for the tests of clips. What cannot be made ends the program.
 *
 * Frame i of a film is grey level clip_level(i) in its left half and 255 minus that in its right: a frame tells its number. */
#pragma once
#include "stages/io/clip_read.h"

struct film_spec {
    const char *container, *encoder; /* as libav calls them; "webp" for both */
    const char *options;             /* of the encoder, "key=value:key=value", or NULL */
    const char *pixels;              /* "yuv420p" when NULL */
    int width, height, frames;
    int rate;           /* frames a second */
    const int *at;      /* (frames): their times in 1 / rate s; NULL: one after the other */
    int key_every;      /* frames between key frames at most; 0: the encoder's habit */
    const char *muxing; /* options of the container, or NULL */
    int black_rows;     /* at the top of each frame */
    bool
        is_cut; /* begins with its second key frame, which has time 0, as if cut by a player's copy of packets */
    bool has_sound; /* an audio track beside it, PCM, of which half comes first */
};
struct film {
    uint8_t *data; /* owned */
    size_t bytes;
};
struct film film_make(const struct film_spec *spec);
void film_free(struct film *f);
int film_level(int i);      /* 20 to 230 in steps of 7 */
int film_number(int level); /* the frame with the nearest level */
/* Levels of the two halves of a frame. */
struct film_levels {
    int left, right;
} film_levels_of(const lg_picture *p);
