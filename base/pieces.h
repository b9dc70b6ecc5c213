/* Work on a range in pieces that need nothing of each other, by as many threads as the process may use cores (at most 32):
 * for bursts where one thread would be waited for, as filling gigabytes. Which thread makes a piece decides nothing. */
#pragma once
#include <stddef.h>

struct lg_pieces {
    size_t count, piece;                          /* of anything; piece > 0 */
    void (*make)(void *arg, size_t at, size_t n); /* [at, at + n) of [0, count) */
    void *arg;
};
/* Returns when all are made; the calling thread, whose heartbeat counts (heartbeat.h), makes some of them. One piece, or
 * threads that cannot be had: it makes them alone. */
void lg_pieces_make(const struct lg_pieces *p);
