/* Turns on a GPU; see turns.h.
 *
 * Why a mutex of the kernel's: it alone knows at once that an owner is dead. A lock on a file is let go
 * as well, but cannot be waited for with a limit, nor in order; a word with the owner's incarnation
 * needs somebody who watches its pidfd. Why priority inheritance, where all have the same priority: the
 * kernel then hands the mutex over in the order of asking. A plain mutex goes to who comes first, and
 * that is the process that has just given it up.
 *
 * Invariant: held says that this thread owns the mutex; every return of lg_turn_begin without it leaves
 * the mutex as it was. */
#include "shm/turns.h"
#include "base/check.h"
#include "base/clock.h"
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int lg_turn_create(struct lg_turn_shared *s)
{
    pthread_mutexattr_t a;
    int e = pthread_mutexattr_init(&a);
    if (!e) e = pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    if (!e) e = pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    if (!e) e = pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT);
    if (!e) e = pthread_mutex_init(&s->mutex, &a);
    if (e) return LG_FAIL(LG_ERR_FAILED, "cannot make a shared mutex: %s", strerror(e));
    pthread_mutexattr_destroy(&a);
    atomic_store_explicit(&s->hold, 0, memory_order_relaxed);
    return 0;
}

void lg_turn_use(lg_turn *t, struct lg_turn_shared *s)
{
    LG_ASSERT(!t->held);
    t->shared = s;
    t->wait_ms = LG_TURN_WAIT_MS;
    t->worth_ns = LG_TURN_WORTH_MS * LG_MS_NS;
    t->n_short = 0;
    t->given_up = UINT64_MAX;
}

/* 0, ETIMEDOUT or another errno; a dead owner's mutex is made whole. */
static int owned(struct lg_turn_shared *s, int rc)
{
    return rc == EOWNERDEAD ? pthread_mutex_consistent(&s->mutex) : rc;
}

static uint32_t word_of(struct lg_turn_shared *s)
{
    return (uint32_t)__atomic_load_n(&s->mutex.__data.__lock, __ATOMIC_ACQUIRE);
}

/* Is the owner gone without the kernel having marked it? That is the case after a death in which the
 * kernel could not reach its list of mutexes, and glibc ends (assert) who then waits. The kernel marks
 * before a thread can no longer be found, so the order of the looks matters. */
static bool is_lost(struct lg_turn_shared *s)
{
    uint32_t before = word_of(s), owner = before & FUTEX_TID_MASK;
    if (!owner || before & FUTEX_OWNER_DIED) return false;
    if (syscall(SYS_tkill, owner, 0) == 0 || errno != ESRCH) return false;
    uint32_t after = word_of(s);
    return (after & FUTEX_TID_MASK) == owner && !(after & FUTEX_OWNER_DIED);
}

static int wait_for(lg_turn *t)
{
    struct lg_turn_shared *s = t->shared;
    if (is_lost(s)) return ESRCH;
    const int64_t start = lg_now_ns(), end = start + t->wait_ms * LG_MS_NS;
    struct timespec limit = {.tv_sec = end / LG_S_NS, .tv_nsec = end % LG_S_NS};
    int rc = owned(s, pthread_mutex_clocklock(&s->mutex, CLOCK_MONOTONIC, &limit));
    t->waited_ns += lg_now_ns() - start;
    if (rc == ETIMEDOUT) t->given_up = atomic_load_explicit(&s->hold, memory_order_relaxed);
    return rc;
}

/* What should not be: shared without, from now on. */
static void stop_taking(lg_turn *t, int error)
{
    t->error = error;
    t->shared = NULL;
}

bool lg_turn_begin(lg_turn *t)
{
    struct lg_turn_shared *s = t->shared;
    LG_ASSERT(!t->held);
    if (!s || t->n_short == LG_TURN_SHORT_MAX) return false;
    int rc = owned(s, pthread_mutex_trylock(&s->mutex)); /* never before those who wait: turns.h */
    if (rc == EBUSY && atomic_load_explicit(&s->hold, memory_order_relaxed) != t->given_up)
        rc = wait_for(t);
    t->held = rc == 0;
    if (!t->held) {
        t->went++;
        if (rc != EBUSY && rc != ETIMEDOUT) stop_taking(t, rc);
        return false;
    }
    t->had++;
    t->began_ns = lg_now_ns();
    uint64_t hold = atomic_load_explicit(&s->hold, memory_order_relaxed);
    atomic_store_explicit(&s->hold, hold + 1, memory_order_relaxed);
    return true;
}

void lg_turn_end(lg_turn *t)
{
    if (!t->held) return;
    t->n_short = lg_now_ns() - t->began_ns < t->worth_ns ? t->n_short + 1 : 0;
    lg_turn_drop(t);
}

void lg_turn_drop(lg_turn *t)
{
    if (!t->held) return;
    t->held = false;
    int rc = pthread_mutex_unlock(&t->shared->mutex);
    if (rc) stop_taking(t, rc);
}
