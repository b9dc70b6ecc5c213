/* A machine on which everything takes long, for test_heartbeat: what reads, writes, syncs, takes memory or
 * computes goes well and at once, but the clock says otherwise. Meanwhile somebody looks at the heartbeat
 * of a row of the board at every moment, as lgsup does, and remembers how old it became. It has one core: its clock is one for
 * all threads, so that what helpers do at the same time would count as if it came before the watched thread's. */
#pragma once
#include "shm/board.h"

struct slow_machine {
    int64_t bytes_per_s;  /* of its disk: reading, writing, and writing back what was written */
    int64_t pages_per_s;  /* bytes of fallocate() */
    int64_t values_per_s; /* lg_philox_normal_f32() */
    int64_t copied_per_s; /* bytes to and from a device, which are not copied */
    int64_t call_ns;      /* of fts_read(), pread(), fsync(), remove(), lg_bus_wait() */
    bool mapped;          /* memcpy() reads from the disk: its source is a mapped file */
    int64_t hangs_ns;     /* the first write() takes that long; 0: none does */
};
/* From now on the machine is slow (0: a part that takes no time), and `row` is watched. */
void slow_begin(const struct slow_machine *m, const struct lg_board_row *row);
/* lg_bus_wait() calls fn(arg) when so much time has passed. */
void slow_at(int64_t elapsed_ns, void (*fn)(void *arg), void *arg);
/* It is quick again. */
void slow_end(void);
/* Between slow_begin and slow_end: */
int64_t slow_elapsed_ns(void);
int64_t slow_oldest_ns(void); /* age of the heartbeat, at its oldest */
