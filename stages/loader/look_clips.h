/* What a look at a data set (look.h) says of its clips. */
#pragma once
#include "stages/io/order.h"

/* Smallest, middle and largest of n numbers, which are sorted; 0 of none. */
struct lg_spread {
    uint32_t least, median, most;
};
struct lg_spread lg_spread_of(uint32_t *v, uint64_t n);

/* Its frames are counted, all its bytes are hashed, and `frames` of it in its middle, at most as many as it has, are decoded. ret_size
 * is set as soon as it is known. LG_ERR_VOID: it cannot be read. */
struct lg_clip_hash {
    uint64_t hash, bytes;
};
int lg_look_at_clip(const struct lg_clip_input *in, int frames, struct lg_item_size *ret_size,
                    struct lg_clip_hash *ret_hash);

/* What a run asks of them. */
struct lg_look_clips {
    const struct lg_item_size *size; /* (count) */
    uint64_t count;
    struct lg_clip_rate rate;
    int frames;        /* of the shortest clip that is trained on; 0: nothing is asked */
    bool has_pictures; /* pictures are trained on beside them */
    uint32_t *v;       /* (count), for use */
};
void lg_look_print_clips(const struct lg_look_clips *l);
