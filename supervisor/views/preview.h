/* What is made of published checkpoints beside training: so sample.every and
 * tensorboard.histograms_every are multiples of checkpoint.every, and nobody who trains waits for a
 * reader.
 *
 *   pictures     DIR/samples/step<N>.png, [sample] captions drawn by lg-sample from the EMA weights; of clips .gif, or
 *                what sample.format says
 *   histograms   DIR/histograms/step<N>.json, counted by lg-histogram, for TensorBoard
 *
 * What is to be made follows from the files: complete checkpoints of which it is missing or older.
 * So what was cut off by a death is made at the next look or the next start, to the same bytes; what
 * cannot be made is given up after a few attempts until the next start. Of a checkpoint that
 * checkpoint.keep has removed before its turn there is none. */
#pragma once
#include "supervisor/run/child.h"
#include "supervisor/run/run.h"
#include "supervisor/views/news.h"

typedef enum lg_preview_kind {
    LG_PREVIEW_PICTURES,
    LG_PREVIEW_HISTOGRAMS,
    LG_PREVIEW_KINDS
} lg_preview_kind;

struct lg_preview_job {
    lg_preview_kind kind;
    uint64_t step;
    char checkpoint[LG_PATH_BYTES];
};

typedef struct lg_preview {
    lg_preview_kind kind;
    struct lg_child child;
    uint64_t step; /* that `child` works at */
    uint64_t past; /* up to this step everything is made or given up */
    int attempts;  /* at `step` that failed */
    int64_t next_ns, deadline_ns;
} lg_preview;

/* RUN/samples/step<N>.png, or what else is made of this step. */
int lg_preview_path(const lg_run *r, lg_preview_kind kind, uint64_t step, char ret[LG_PATH_BYTES]);
/* The job of this kind with the least step > past. False: none. */
bool lg_preview_next(const lg_run *r, lg_preview_kind kind, uint64_t past,
                     struct lg_preview_job *ret);
/* Starts the job's program, at a lower priority. It ends when this process dies. */
int lg_preview_spawn(const lg_run *r, const struct lg_preview_job *job, struct lg_child *ret);
/* After its end: LG_ERR_FAILED with what it said last, unless exit_code is 0. */
int lg_preview_result(const lg_run *r, lg_preview_kind kind, int exit_code);

/* Starts the next one, or looks whether the running one has ended. ending: the run's end is near, the
 * running one is ended. */
void lg_preview_look(lg_preview *p, const lg_run *r, bool ending, struct lg_news *news);
/* Ends the running one and waits for that; it is made later. */
void lg_preview_stop(lg_preview *p);
