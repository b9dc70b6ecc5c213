/* What the user sees while a run lives: one line that is rewritten (on a terminal) or repeated every
 * few seconds, and events on lines of their own. Everything but the rewritten line also goes to
 * logs/lgsup.log, with its time.
 *
 * Nothing here waits: lines go to the terminal's worker (supervisor/run/terminal.h) and to the disk's.
 * What either does not take any more is dropped and counted, and the number is said when it takes
 * lines again. */
#pragma once
#include "base/log.h"
#include "shm/board.h"
#include "supervisor/run/worker.h"
#include <stdbool.h>

struct lg_view;

enum { LG_RATE_POINTS = 64 };

typedef struct lg_progress {
    bool terminal; /* stdout is one, and not quiet */
    bool quiet;
    int log_fd; /* -1: cannot be written */
    lg_worker *disk;
    struct lg_job *closing; /* of log_fd, made beforehand; NULL: there is no log */
    unsigned log_dropped;   /* lines that the disk's worker did not take since it last took one */
    uint64_t step;          /* committed, as of the last look: stands in every line of the log */
    bool line_shown;
    int64_t next_ns, next_log_ns;
    /* (time, step) of the last while, for the rate */
    struct {
        int64_t ns;
        uint64_t step;
    } point[LG_RATE_POINTS];
    int n_points;
    /* share of the step's time that rank 0 waited for data, smoothed over steps */
    double wait_share;
    uint64_t wait_step;
} lg_progress;

struct lg_progress_spec {
    const char *run_dir;
    bool quiet;
    lg_worker *disk; /* writes the log; open until after lg_progress_close */
};
void lg_progress_open(lg_progress *p, const struct lg_progress_spec *spec);
/* What is on its way to the log is still written. */
void lg_progress_close(lg_progress *p);
/* An event on its own line: `level` as in log.h. */
void lg_progress_say(lg_progress *p, lg_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The line, when it is due. */
void lg_progress_show(lg_progress *p, const struct lg_view *v);
/* The final line, due or not. */
void lg_progress_last(lg_progress *p, const struct lg_view *v);
