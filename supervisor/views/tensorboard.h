/* RUN/tensorboard: event files for TensorBoard, made from metrics.jsonl, samples/ and
 * histograms/.
 *
 * Written by lgsup beside its work, a bounded piece at a time. Every step stands in them exactly once
 * and whole, whatever has died: what is already there is read again at the start, a torn end and steps
 * that are not committed any more (the run went back to a checkpoint) are cut off, and writing goes on
 * from the step after the last. While lgsup is dead nothing is written; the next one catches up. */
#pragma once
#include "supervisor/views/metrics.h"

typedef struct lg_tensorboard {
    char run_dir[LG_PATH_BYTES];
    char path[LG_PATH_BYTES]; /* of the file that grows */
    int fd;                   /* -1: not open */
    uint64_t bytes;           /* of it, whole records */
    uint64_t last_step, last_picture, last_histogram;
    lg_metrics metrics;
    uint8_t *buffer;
    int64_t next_ns, next_file_ns;
    bool failed; /* the last attempt to write */
} lg_tensorboard;

/* Reads what is there, cuts what is torn or beyond `committed`. Free with lg_tensorboard_close. */
int lg_tensorboard_open(const char *run_dir, uint64_t committed, lg_tensorboard *ret);
/* Writes what has come up to state `committed`, when a second has passed since the last time. Never
 * fails: 1 when the disk begins to refuse (tell the user; tried again later), else 0. */
int lg_tensorboard_look(lg_tensorboard *t, uint64_t committed);
/* Writes all that is left, due or not. Best effort. */
void lg_tensorboard_flush(lg_tensorboard *t, uint64_t committed);
void lg_tensorboard_close(lg_tensorboard *t);
