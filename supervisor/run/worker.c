/* A thread and two lists; see worker.h. */
#include "supervisor/run/worker.h"
#include "base/check.h"
#include "base/clock.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>

struct list {
    struct lg_job *first, *last;
    int n;
};

struct lg_worker {
    pthread_mutex_t lock; /* of everything below */
    pthread_cond_t changed;
    pthread_t thread;
    bool has_thread;
    struct list waiting, finished;
    bool working;
    bool over;      /* ends when nothing waits */
    bool abandoned; /* nobody knows it any more: frees itself when it comes back from its job */
    uint64_t n_done;
    int jobs_max, wake_fd;
};

static void append(struct list *l, struct lg_job *job)
{
    job->next = NULL;
    if (l->last)
        l->last->next = job;
    else
        l->first = job;
    l->last = job;
    l->n++;
}

static struct lg_job *take_first(struct list *l)
{
    struct lg_job *job = l->first;
    if (!job) return NULL;
    l->first = job->next;
    if (!l->first) l->last = NULL;
    l->n--;
    return job;
}

static void release(struct lg_job *job)
{
    if (job->release)
        job->release(job);
    else
        free(job);
}

static void release_all(struct list *l)
{
    for (struct lg_job *job; (job = take_first(l));) release(job);
}

static void free_worker(lg_worker *w)
{
    release_all(&w->waiting);
    release_all(&w->finished);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

/* ---- the thread ---- */

/* The lock is held. */
static void finish(lg_worker *w, struct lg_job *job)
{
    w->working = false;
    w->n_done++;
    if (job->done)
        append(&w->finished, job);
    else
        release(job);
    if (w->finished.n && w->wake_fd >= 0) eventfd_write(w->wake_fd, 1);
    pthread_cond_broadcast(&w->changed);
}

/* Does the first job that waits; the lock is held, and let go meanwhile. */
static void do_one(lg_worker *w)
{
    struct lg_job *job = take_first(&w->waiting);
    w->working = true;
    pthread_mutex_unlock(&w->lock);
    job->work(job);
    if (w->has_thread) lg_err_clear(); /* else it is the owner's */
    pthread_mutex_lock(&w->lock);
    finish(w, job);
}

static void *run(void *arg)
{
    lg_worker *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!w->abandoned && !(w->over && !w->waiting.n))
        if (w->waiting.n)
            do_one(w);
        else
            pthread_cond_wait(&w->changed, &w->lock);
    bool abandoned = w->abandoned;
    pthread_mutex_unlock(&w->lock);
    if (abandoned) free_worker(w);
    return NULL;
}

/* Signals are for the thread that opened it; and with SIGTTOU blocked a terminal that stops
 * background writers does not stop lgsup. */
static void start_thread(lg_worker *w, const char *name)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    w->has_thread = pthread_create(&w->thread, NULL, run, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (w->has_thread) pthread_setname_np(w->thread, name);
}

/* ---- its owner ---- */

int lg_worker_open(const struct lg_worker_spec *spec, lg_worker **ret)
{
    pthread_condattr_t attr;
    lg_worker *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a worker");
    w->jobs_max = spec->jobs_max;
    w->wake_fd = spec->wake_fd;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attr);
    pthread_condattr_destroy(&attr);
    start_thread(w, spec->name);
    *ret = w;
    return 0;
}

/* True: it has taken the place of another. */
static bool replace(struct list *l, struct lg_job *job)
{
    struct lg_job **at = &l->first;
    while (*at && (*at)->work != job->work) at = &(*at)->next;
    struct lg_job *old = *at;
    if (!old) return false;
    LG_ASSERT(old->latest && !old->done && !job->done);
    job->next = old->next;
    *at = job;
    if (l->last == old) l->last = job;
    release(old);
    return true;
}

bool lg_worker_give(lg_worker *w, struct lg_job *job)
{
    pthread_mutex_lock(&w->lock);
    bool taken = job->latest && replace(&w->waiting, job);
    if (!taken && w->waiting.n < w->jobs_max) {
        append(&w->waiting, job);
        taken = true;
    }
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (!taken) release(job);
    return taken;
}

/* Without a thread. */
static void do_all(lg_worker *w)
{
    while (!w->has_thread && w->waiting.n) do_one(w);
}

void lg_worker_collect(lg_worker *w, void *context)
{
    pthread_mutex_lock(&w->lock);
    do_all(w);
    struct list done = w->finished;
    w->finished = (struct list){0};
    pthread_mutex_unlock(&w->lock);
    for (struct lg_job *job; (job = take_first(&done));) {
        job->done(job, context);
        release(job);
    }
}

static bool is_idle(const lg_worker *w)
{
    return !w->waiting.n && !w->working;
}

bool lg_worker_is_idle(lg_worker *w)
{
    pthread_mutex_lock(&w->lock);
    bool idle = is_idle(w);
    pthread_mutex_unlock(&w->lock);
    return idle;
}

bool lg_worker_wait(lg_worker *w, int patience_ms)
{
    pthread_mutex_lock(&w->lock);
    do_all(w);
    uint64_t seen = w->n_done;
    for (int64_t since_ns = lg_now_ns(), until_ns; !is_idle(w);) {
        if (w->n_done != seen) since_ns = lg_now_ns();
        seen = w->n_done;
        until_ns = since_ns + patience_ms * LG_MS_NS;
        if (lg_now_ns() >= until_ns) break;
        struct timespec t = {until_ns / LG_S_NS, until_ns % LG_S_NS};
        pthread_cond_timedwait(&w->changed, &w->lock, &t);
    }
    bool idle = is_idle(w);
    pthread_mutex_unlock(&w->lock);
    return idle;
}

bool lg_worker_close(lg_worker **worker, int patience_ms)
{
    lg_worker *w = *worker;
    *worker = NULL;
    if (!w) return true;
    bool idle = lg_worker_wait(w, patience_ms);
    pthread_mutex_lock(&w->lock);
    w->over = true;
    w->abandoned = !idle;
    w->wake_fd = -1;
    pthread_t thread = w->thread;
    bool has_thread = w->has_thread;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock); /* from here on an abandoned one may free itself */
    if (!idle) {
        pthread_detach(thread);
        return false;
    }
    if (has_thread) pthread_join(thread, NULL);
    free_worker(w);
    return true;
}
