/* Stretches of memory that are needed for a while: each gets the lowest place where it meets none that is needed at
 * the same time, the largest first. Greedy, and the same for the same stretches in the same order. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct lg_lifetime {
    size_t bytes;
    int first, last; /* needed from first to last, both included; in any unit of time */
    size_t at;       /* result: bytes from the start, a multiple of 64 */
};
/* Returns the bytes that all of them take together. */
size_t lg_lifetimes_place(struct lg_lifetime *l, int n);

/* Memory of so many bytes, of which some stretches are taken for a while: by these, at their places. */
struct lg_lifetimes_room {
    size_t bytes;
    const struct lg_lifetime *taken;
    int n_taken;
};
/* Within it each gets the highest place where it meets nothing, the largest first; LG_NO_PLACE: there is none. So where
 * memory is taken from its end on, what must be gone soon leaves the beginning to what stays longer. */
#define LG_NO_PLACE SIZE_MAX
void lg_lifetimes_place_in(const struct lg_lifetimes_room *room, struct lg_lifetime *l, int n);
