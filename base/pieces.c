/* Work in pieces; see pieces.h. */
#include "base/pieces.h"
#include "base/check.h"
#include "base/heartbeat.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum { HELPERS_MAX = 31 };

struct work {
    const struct lg_pieces *p;
    _Atomic size_t next;
};

/* Whoever comes first takes the next. */
static void *make_some(void *arg)
{
    struct work *w = arg;
    const struct lg_pieces *p = w->p;
    for (size_t at; (at = atomic_fetch_add(&w->next, p->piece)) < p->count;) {
        p->make(p->arg, at, LG_MIN(p->count - at, p->piece));
        lg_heartbeat();
    }
    return NULL;
}

static int helpers_for(const struct lg_pieces *p)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores) < 0) return 0;
    const size_t pieces = (p->count + p->piece - 1) / p->piece;
    const size_t threads = LG_MIN((size_t)CPU_COUNT(&cores), pieces);
    return (int)LG_MIN(threads, (size_t)HELPERS_MAX + 1) - 1;
}

void lg_pieces_make(const struct lg_pieces *p)
{
    struct work w = {.p = p};
    pthread_t helper[HELPERS_MAX];
    int n = 0;
    sigset_t all, before;
    sigfillset(&all); /* signals are the process's own business, not theirs */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (const int wanted = helpers_for(p); n < wanted; n++)
        if (pthread_create(&helper[n], NULL, make_some, &w) != 0) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    make_some(&w);
    while (n > 0) pthread_join(helper[--n], NULL);
}
