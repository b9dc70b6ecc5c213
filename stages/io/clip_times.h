/* Which frames of a film a clip is, by the times of its packets; see clip_read.h. Pure arithmetic. */
#pragma once
#include "stages/io/clip_read.h"

enum { LG_CLIP_REORDERED_MAX = 16 }; /* frames that a decoder keeps */

struct lg_clip_packet {
    int64_t time;  /* of its frame, in units of the index */
    bool is_shown; /* it makes a frame that is shown */
    bool is_key;   /* decoding may begin with it */
    bool is_open;  /* of those: what is decoded later may still name what was before it */
};
/* All packets of a track, in the order of the file. */
struct lg_clip_index {
    int width, height;          /* of frames as they are stored */
    int orientation;            /* as in Exif (picture.h), which they are shown in; 0 as 1 */
    int64_t unit_num, unit_den; /* of times: unit_num / unit_den seconds */
    size_t n, capacity;
    struct lg_clip_packet *packet; /* (n), owned */
    /* made by lg_clip_index_close */
    int reordered; /* packets that stand before one and are shown behind it, at most; up to LG_CLIP_REORDERED_MAX */
    uint32_t n_shown;
    uint32_t *shown; /* (n_shown) packets by time, owned */
};
/* LG_ERR_VOID: more than LG_CLIP_READ_FRAMES_MAX. */
int lg_clip_index_add(struct lg_clip_index *x, const struct lg_clip_packet *p);
/* When all have been added: orders them. LG_ERR_VOID as in clip_read.h. */
int lg_clip_index_close(struct lg_clip_index *x, struct lg_clip_info *ret);
void lg_clip_index_free(struct lg_clip_index *x);

/* Decoding begins with packet `first`; of those before `strict` (>= first) some may have nothing that they refer to. */
struct lg_clip_run {
    size_t first, strict;
};
struct lg_clip_wanted {
    /* Ways to decode them; each is tried when the one before it is void. */
    int n_runs;
    struct lg_clip_run run[2];
    int n;            /* frames of the clip */
    uint32_t *packet; /* (n): that make them, owned; times never fall */
};
/* LG_ERR_VOID: too few frames, or too much work. */
int lg_clip_pick(const struct lg_clip_index *x, const struct lg_clip_info *info,
                 const struct lg_clip_choice *c, struct lg_clip_wanted *ret);
