/* The list of packets; a part of liblg-av.so as well. See clip_times.h. */
#include "stages/io/clip_times.h"
#include <stdlib.h>

enum { FEW = 256 };

int lg_clip_index_add(struct lg_clip_index *x, const struct lg_clip_packet *p)
{
    if (x->n == LG_CLIP_READ_FRAMES_MAX)
        return LG_FAIL(LG_ERR_VOID, "clip has more than %d frames", LG_CLIP_READ_FRAMES_MAX);
    if (x->n == x->capacity) {
        const size_t capacity = LG_MAX(2 * x->capacity, (size_t)FEW);
        struct lg_clip_packet *packet = realloc(x->packet, capacity * sizeof *packet);
        if (!packet) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the frames of a clip");
        x->packet = packet;
        x->capacity = capacity;
    }
    x->packet[x->n++] = *p;
    return 0;
}

void lg_clip_index_free(struct lg_clip_index *x)
{
    free(x->packet);
    free(x->shown);
    *x = (struct lg_clip_index){0};
}
