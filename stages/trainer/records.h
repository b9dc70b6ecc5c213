/* What rank 0 writes about each step, before it commits it: a line of RUN/metrics.jsonl and a
 * record of RUN/ledger. A full disk does not stop training: what could not be written is kept in
 * memory and tried again with the next step, when there is nothing else to do, and at the end. */
#pragma once
#include "config/ledger.h"
#include "stages/stage.h"

typedef struct lg_records lg_records;

struct lg_step_record {
    struct lg_ledger_record ledger; /* sealed by the writer */
    double loss, grad_norm, lr, samples_per_s, data_wait_s, ckpt_wait_s;
    double loss_scale; /* 1: none, and no word of it */
    bool has_vb;       /* of a learned variance's variational bound: */
    double loss_vb;    /* its part of the loss */
};
/* Opens both files and finds what stands in them behind the steps <= committed: a former life may have
 * written a step that was never committed, or a later one than the checkpoint that this one goes on from.
 * Takes as long as there are lines to cut, however many there are. */
int lg_records_open(const char *run_dir, uint64_t committed, lg_records **ret);
/* Cuts that; metrics.jsonl ends with a whole line then. The first record does it by itself, and not the
 * opening: a start that a loader refuses, because the data set or the checkpoints are not what they were,
 * shall leave everything as it was. */
int lg_records_cut(lg_records *r);
/* Tries once more to write what waits. */
void lg_records_close(lg_records **r);
/* Never fails: 0, or 1 when the disk refuses (the record is kept; the caller tells the user once).
 */
int lg_records_append(lg_records *r, const struct lg_step_record *record);
/* Writes what waits: 0, or 1 when the disk still refuses. */
int lg_records_retry(lg_records *r);
