/* A thread that does what may block, so that the supervisor's loop waits for nobody.
 *
 * One worker for each thing that may hang by itself: the terminal, the disk, the keeper. The loop
 * gives a worker jobs; it does them one after the other, in the order in which they were given; the
 * loop collects those that are done and does what follows from them. Nothing that has to survive
 * depends on a job: decisions stand on the board, in memory, before a job is given, and a process that
 * dies with jobs undone has only lost what was to be seen or could be found out again.
 *
 * A job owns all that it works with (copies of bytes, paths, an fd of its own), because a worker that
 * is stuck in the kernel cannot be ended: it is left behind, with its job, until the process ends.
 *
 * All functions are called by the thread that opened the worker. */
#pragma once
#include <stdbool.h>

/* The first member of a larger struct that comes from calloc. */
struct lg_job {
    void (*work)(struct lg_job *); /* by the worker; may block */
    void (*done)(struct lg_job *,
                 void *context);      /* by lg_worker_collect, afterwards; may be NULL */
    void (*release)(struct lg_job *); /* frees it and all that it owns; NULL: free() */
    bool
        latest; /* takes the place of a job with the same `work` that still waits; needs done NULL */
    struct lg_job *next; /* the worker's */
};

typedef struct lg_worker lg_worker;

struct lg_worker_spec {
    const char *name; /* of the thread: 15 bytes at most */
    int jobs_max;     /* that wait */
    int wake_fd;      /* an eventfd that is raised when there is something to collect; -1: none */
};
/* Where no thread can be had the jobs are done all the same, by lg_worker_collect and lg_worker_wait:
 * slowness is better than a run without its log. Simulations make use of that. */
int lg_worker_open(const struct lg_worker_spec *spec, lg_worker **ret);
/* Takes the job over, whatever happens. False: jobs_max are waiting, and it has been released. */
bool lg_worker_give(lg_worker *w, struct lg_job *job);
/* Calls `done` of every job that is done, in order. */
void lg_worker_collect(lg_worker *w, void *context);
/* Nothing waits and nothing is being done (there may be something to collect). */
bool lg_worker_is_idle(lg_worker *w);
/* Waits until it is idle. False: not a single job was finished for patience_ms. */
bool lg_worker_wait(lg_worker *w, int patience_ms);
/* Waits, then ends the thread; what has not been collected is released. False: the worker is stuck and
 * has been left behind: it touches nothing but the job that it is at, and does no other. NULL is fine. */
bool lg_worker_close(lg_worker **w, int patience_ms);
