/* The parts of a source, of which source.h tells what they do. */
#pragma once
#include "stages/io/source_index.h"

struct lg_open_shard {
    int fd; /* -1: free */
    size_t shard;
    uint64_t used; /* the read that used it last */
};

struct lg_source {
    struct lg_index index;
    struct lg_mixture mixture;
    uint64_t stands; /* items, each as often as it is repeated */
    struct lg_source_options options;
    struct lg_open_shard open[LG_SOURCE_FDS_MAX];
    uint64_t reads;
    lg_item head; /* the beginning of a picture */
};

/* The first bytes of a member. LG_ERR_IO. */
int lg_source_read_member(lg_source *s, size_t shard, const struct lg_index_member *m, size_t bytes,
                          char *dst);
/* A member that is read as a clip, while *ret stays where it is; its file stays open until it is closed. Zeroed ones may be
 * closed. */
void lg_item_clip_open(lg_source *s, size_t shard, const struct lg_index_member *m,
                       struct lg_item_clip *ret);
void lg_item_clip_close(struct lg_item_clip *c);
/* Room for bytes in the item's memory; what was there is lost. LG_ERR_NOSPACE. */
int lg_item_reserve(lg_item *item, size_t bytes);
