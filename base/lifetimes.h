/* Stretches of memory that are needed for a while: each gets the lowest place where it meets none that is needed at
 * the same time, the largest first. Greedy, and the same for the same stretches in the same order. */
#pragma once
#include <stddef.h>

struct lg_lifetime {
    size_t bytes;
    int first, last; /* needed from first to last, both included; in any unit of time */
    size_t at;       /* result: bytes from the start, a multiple of 64 */
};
/* Returns the bytes that all of them take together. */
size_t lg_lifetimes_place(struct lg_lifetime *l, int n);
