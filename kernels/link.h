/* A link carries messages from memory of a GPU to memory of another machine's GPU, one way, between two processes. Each
 * side gives places one by one; the n-th message of one side goes into the n-th place of the other, which must be as long.
 * Nothing is computed with what is carried.
 *
 * No call waits for the other side, but closing may take a second. A link that lost its other side may say so, or never:
 * who finds that out otherwise closes it. */
#pragma once
#include "kernels/device.h"
#include <stdint.h>

enum { LG_LINK_DEPTH = 8 }; /* messages under way */

/* Made by one side, told to the other, for one link. */
struct lg_link_id {
    char bytes[128];
};

typedef struct lg_link lg_link;
/* LG_ERR_NOTFOUND: what carries links is not on this machine, or this device has none. */
int lg_link_new_id(lg_device *d, struct lg_link_id *ret);
/* Begins; places may be given at once. */
int lg_link_open(lg_device *d, const struct lg_link_id *id, bool sends, lg_link **ret);
/* Whatever is under way ends, and no memory is read or written any more. */
void lg_link_close(lg_link **l);
/* The next message lies there, or goes there, and is left alone until it is done. At most LG_LINK_DEPTH are not done. */
void lg_link_give(lg_link *l, void *data, size_t bytes);
/* Moves on. *ret_done: messages that are done, of all that were given. LG_ERR_IO: the link has failed. */
int lg_link_progress(lg_link *l, uint64_t *ret_done);

/* ---- for backends ---- */

/* Base of every backend's link: places given; those that are begun and done are the backend's to count. */
struct lg_link_place {
    void *data;
    size_t bytes;
};
struct lg_link {
    lg_device *device;
    const struct lg_link_calls *calls;
    struct lg_link_place place[LG_LINK_DEPTH]; /* number n at n mod LG_LINK_DEPTH */
    uint64_t given, done;
};
/* The symbol that a backend exports where its devices have links. open fills only what it embeds beyond the base. */
#define LG_BACKEND_LINKS "lg_backend_links"
struct lg_link_calls {
    int (*new_id)(lg_device *, struct lg_link_id *);
    int (*open)(lg_device *, const struct lg_link_id *, bool sends, lg_link **);
    void (*close)(lg_link *);
    int (*progress)(lg_link *);
};
