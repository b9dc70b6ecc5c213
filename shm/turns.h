/* Taking turns on a GPU: processes that share one hold it, one after the other, for one piece of work
 * each (a micro-batch, a chunk of an encoder), instead of being switched by the driver within it.
 *
 * Only speed hangs on it. Nobody may conclude anything from holding a turn, and a piece that is done
 * without one has the same bits. So every doubt is resolved towards going on: who cannot have the turn
 * in time, for whatever reason, works without it.
 *
 * One lg_turn_shared per GPU lies on the board (lgsup makes it). Its words, who writes them, and what a
 * death leaves behind:
 *  mutex  a robust, process-shared mutex with priority inheritance. Its owner is written by who takes
 *         and gives it, and by the kernel. Dead owner: the kernel marks the mutex and hands it to the
 *         one that waits longest, or leaves it to who comes next (EOWNERDEAD; it is made consistent
 *         then, and a death before that leaves it as it was). That takes nobody's help, lgsup's neither,
 *         and may come before the pidfd fires, while a kernel of the dead process still runs: the
 *         next piece then shares the GPU for that moment.
 *  hold   the number of turns taken; written by the owner alone, once, just after it has become it.
 *         Read by who waits, to tell whether the turn that it has given up on still lasts. Death
 *         before: the next turn has the number of the last one, and may not be waited for.
 *
 * Fairness: the kernel hands a mutex with priority inheritance from owner to owner in the order of
 * asking, and who asks again stands at the end. So a trainer waits at most for one piece of each other
 * process on its GPU, and an encoder has its turn between two micro-batches.
 *
 * Worth: handing a turn over costs 0.1 to 0.2 ms, in which the GPU does nothing: the last synchronisation,
 * the next one's wake-up, its first launch. Measured on an H200, switching costs about 6 % of the work, so
 * turns of 20 ms save 5 % and turns of 1 ms lose. A process all of whose pieces are shorter than
 * LG_TURN_WORTH_MS stops taking turns.
 *
 * Bounds: a wait ends after wait_ms. Who has waited in vain does not wait for that turn again: a stopped
 * or hanging owner delays each other process once, by wait_ms. Pieces of work that take longer than that
 * are not worth taking turns with, and share the GPU as before.
 */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    LG_TURNS_MAX = 64, /* on a board: one for each GPU number below it, others are shared without */
    LG_TURN_WAIT_MS = 1000,
    LG_TURN_WORTH_MS = 4,
    LG_TURN_SHORT_MAX = 8, /* pieces in a row shorter than that */
};

struct lg_turn_shared {
    _Alignas(64) pthread_mutex_t mutex;
    _Atomic(uint64_t) hold;
};
/* lgsup, before anybody maps it. LG_ERR_FAILED when the system has no such mutexes. */
int lg_turn_create(struct lg_turn_shared *s);

/* One thread's side of it. */
typedef struct lg_turn {
    struct lg_turn_shared *shared; /* NULL: no turns are taken, and the calls cost nothing */
    int wait_ms;
    int64_t worth_ns; /* 0: turns are taken however short the pieces are */
    bool held;
    int error;          /* errno of why no turns are taken any more, shared became NULL; 0: none */
    uint64_t given_up;  /* the turn waited for in vain; UINT64_MAX: none */
    int64_t waited_ns;  /* in all */
    int64_t began_ns;   /* of the turn that is held */
    int n_short;        /* turns in a row with pieces too short; LG_TURN_SHORT_MAX: no more turns */
    uint64_t had, went; /* turns had, and times that one did not come */
} lg_turn;

/* From now on with these turns; NULL for none. Not while one is held. */
void lg_turn_use(lg_turn *t, struct lg_turn_shared *s);
/* Waits for the turn, wait_ms at most. Call it when there is work to be launched at once. False: work
 * without it. */
bool lg_turn_begin(lg_turn *t);
/* Gives it up, by the thread that has begun it, when the device has finished the work: right after the
 * stream's synchronisation. Nothing without a turn. */
void lg_turn_end(lg_turn *t);
/* The same where there was nothing to do in it. */
void lg_turn_drop(lg_turn *t);
