/* The workers of a supervisor: what its loop must not wait for (supervisor/run/worker.h).
 *
 *   disk     lines of logs/lgsup.log, status.json, DIR/regions, DIR/programs
 *   keeper   everything that asks the keeper for something (keep_jobs.h), and the directory of its socket
 *   launcher what a service manager is asked for (launch_jobs.h)
 *   gpus     what lg-device is asked, which a driver may hold up (launch_jobs.h)
 *   notify   what the service manager is told (supervisor/views/notify.h)
 *   views    previews, event files, Prometheus (supervisor/views/extras.h)
 *
 * The terminal has its own, because things are said before and after a supervisor's life, too
 * (supervisor/run/terminal.h). */
#pragma once
#include "base/fs.h"
#include "supervisor/run/worker.h"

/* X(name, jobs that may wait, how long the end waits for one job in ms) */
#define LG_WORKERS(X)                                                                              \
    X(disk, 1024, 15000)                                                                           \
    X(keeper, 256, 40000)                                                                          \
    X(launcher, 256, 25000)                                                                        \
    X(gpus, 16, 15000)                                                                             \
    X(notify, 64, 5000)                                                                            \
    X(views, 8, 15000)

typedef enum lg_worker_kind {
#define X(name, jobs_max, patience_ms) LG_WORKER_##name,
    LG_WORKERS(X)
#undef X
        LG_WORKER_COUNT
} lg_worker_kind;

struct lg_background {
    int wake_fd; /* readable when there is something to collect */
    lg_worker *worker[LG_WORKER_COUNT];
};

struct lg_supervisor;

int lg_background_open(struct lg_background *b);
/* False: too many wait already, and the job has been released. */
bool lg_background_give(struct lg_supervisor *s, lg_worker_kind which, struct lg_job *job);
bool lg_background_is_idle(const struct lg_supervisor *s, lg_worker_kind which);
/* What follows from what has been done. */
void lg_background_collect(struct lg_supervisor *s);
/* Waits for what is under way and does what follows from it. False: that worker is stuck. */
bool lg_background_finish(struct lg_supervisor *s, lg_worker_kind which);
/* Waits likewise for all of them, as far as they still do something, and ends them. False: one is stuck
 * and has been left behind. */
bool lg_background_close(struct lg_background *b);

/* ---- the disk ---- */

/* status.json, as the board is when its turn comes. */
void lg_background_save_status(struct lg_supervisor *s);
/* A file to publish. */
struct lg_publication {
    char path[LG_PATH_BYTES];
    char *text; /* taken over; NULL: there was no memory for it */
    size_t bytes;
    /* In the loop, afterwards: rc, why it failed, and `tag`, which says what it was about. NULL: a
     * failure is said as a warning. */
    void (*then)(struct lg_supervisor *s, uint64_t tag, int rc, const char *why);
    uint64_t tag;
};
void lg_background_publish(struct lg_supervisor *s, const struct lg_publication *p);
/* DIR/programs as it is now in memory; then and tag as above. */
void lg_background_save_programs(struct lg_supervisor *s,
                                 void (*then)(struct lg_supervisor *, uint64_t, int, const char *),
                                 uint64_t tag);
