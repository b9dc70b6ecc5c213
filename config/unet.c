/* See unet.h. */
#include "config/unet.h"

static int blocks_of(int depth)
{
    return depth > 1 ? depth : 1;
}

int lg_unet_blocks(const struct lg_unet *u)
{
    int n = blocks_of(u->middle_depth);
    for (int i = 0; i < u->levels; i++) n += (2 * u->layers + 1) * blocks_of(u->depths[i]);
    return n;
}
