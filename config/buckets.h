/* Buckets (data.buckets): the shapes to which pictures and clips are brought. One micro-batch of all ranks holds
 * samples of one of them; which ones is decided by the loader (stages/io/order.h).
 *
 * Sizes are frames x height x width, in pixels; a picture has one frame. A bucket has about as many pixels as
 * data.frames of data.size. */
#pragma once
#include "config/config.h"

enum { LG_BUCKETS_MAX = 128, LG_BUCKET_SIDE_MAX = 8192 };

struct lg_bucket {
    int frames;
    int height, width; /* pixels */
    /* Samples that a rank's micro-batch holds of it: as many as have no more pixels than micro_batch of data.frames x
     * data.size, from 1 to micro_batch. Places of the micro-batch from there on are absent. */
    int rows;
};
/* Sorted by frames, then height, then width, no two alike. n 0: there are none, all samples have one shape. */
struct lg_buckets {
    int n;
    struct lg_bucket of[LG_BUCKETS_MAX];
};
struct lg_buckets_spec {
    int height, width; /* data.size */
    int frames;        /* data.frames */
    int unit;          /* what sides must be multiples of: pixels of a patch */
    int factor_time;   /* frames must be a multiple of it, and one; 1: any number */
    int micro_batch;
};
/* wanted (data.buckets):
 *   empty, "square"       none
 *   "ratio"               heights and widths in steps of 64 pixels (below 512: of size / 8, made a multiple of the
 *                         unit), the least 256 (size / 2), at most 2 size, no more pixels than the square: the table
 *                         that kohya-ss/sd-scripts makes. size: the square root of height x width, rounded down
 *   "pixart"              the 40 shapes that PixArt was trained on (ASPECT_RATIO_1024; halves for 512, quarters for 256)
 *   "HxW", "FxHxW", ..    these
 * All but the last have `frames` frames. LG_ERR_CONFIG says what is wrong with an entry, and what would be right. */
int lg_buckets_make(const struct lg_strlist *wanted, const struct lg_buckets_spec *spec,
                    struct lg_buckets *ret);

/* Is this a number of frames of which a latent can be made? See lg_buckets_spec. */
static inline bool lg_frames_fit(int frames, int factor_time)
{
    return factor_time == 1 || frames % factor_time == 1;
}

/* The bucket nearest in ratio to a picture of height x width, among those of `used` (n, at least one true; NULL: all):
 * the one where the larger of the two ratios is the smallest multiple of the other. Of equal ones the largest that
 * the picture covers without being enlarged, else the smallest. Integers alone: every machine finds the same. */
int lg_buckets_nearest(const struct lg_buckets *b, const bool *used, int height, int width);

/* "64x32", of more frames than one "17x64x32". */
enum { LG_BUCKET_TEXT_BYTES = 40 };
const char *lg_bucket_text(const struct lg_bucket *b, char ret[LG_BUCKET_TEXT_BYTES]);
/* "64x32*4,64x64*4,17x64x64*2", for the plan's file; "" for none. Read: LG_ERR_CORRUPT. */
enum { LG_BUCKETS_TEXT_BYTES = 32 * LG_BUCKETS_MAX };
void lg_buckets_print(const struct lg_buckets *b, char ret[LG_BUCKETS_TEXT_BYTES]);
int lg_buckets_parse(const char *text, struct lg_buckets *ret);
