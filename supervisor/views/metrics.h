/* Reading RUN/metrics.jsonl: one line per step, steps in rising order. Trainer rank 0 writes a line
 * before it commits the step, so the newest line may be of a step that is not committed yet, and the
 * last bytes may be half a line. A line of a committed step never changes. */
#pragma once
#include "base/fs.h"

struct lg_metric {
    uint64_t step;          /* state that the step has made */
    double loss, grad_norm; /* NaN: was not finite */
    double loss_vb;         /* of the loss, a learned variance's variational bound; NaN likewise; */
    bool has_vb;            /* false: there is none */
    double lr;
    double samples_per_s; /* 0: not known (first step of a process) */
    double data_wait_s, ckpt_wait_s;
    double voids, skipped;
    double time_s; /* when it was written, since 1970; 0: not known */
};

/* One line. False when it is none of ours; *ret is untouched then. */
bool lg_metric_parse(const char *line, size_t bytes, struct lg_metric *ret);

typedef struct lg_metrics {
    int fd;       /* -1: no file yet */
    uint64_t at;  /* byte where the next line begins */
    char *buffer; /* buffer[pos, held) are the file's bytes from `at` on */
    size_t pos, held;
} lg_metrics;

/* Opens the file of a run and goes to its first line with a step above `after`. LG_ERR_NOTFOUND
 * (without a trace) when there is no file yet. */
int lg_metrics_open(const char *run_dir, uint64_t after, lg_metrics *ret);
void lg_metrics_close(lg_metrics *m);
/* The next whole line of a step <= last. False when there is none yet: ask again later. */
bool lg_metrics_next(lg_metrics *m, uint64_t last, struct lg_metric *ret);

/* The newest lines, cap at most, oldest first; returns how many. 0 when there is no file. */
int lg_metrics_tail(const char *run_dir, struct lg_metric *rows, int cap);
