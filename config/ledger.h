/* RUN/ledger: one record of 64 bytes per committed step, record of step s (which makes state s + 1)
 * at byte 64 s. Written by trainer rank 0 before its commit; a replay writes the same bytes again.
 * It proves that each sample was trained exactly once: records follow each other without a gap. */
#pragma once
#include "base/check.h"
#include <assert.h>

struct lg_ledger_record {
    uint64_t step;      /* s + 1: committed steps after this one; 0: never written */
    uint64_t first;     /* first sample number */
    uint64_t last;      /* last sample number */
    uint64_t keys_hash; /* XXH3-64 over the samples' key hashes, in order of n */
    uint32_t voids;     /* void samples among them */
    uint32_t skipped;   /* 1: the update was skipped (not finite) */
    double loss;
    uint64_t reserved;
    uint64_t check; /* XXH3-64 of the 56 bytes before */
};
static_assert(sizeof(struct lg_ledger_record) == 64, "one record is 64 bytes");

void lg_ledger_seal(struct lg_ledger_record *r);
/* Checks records of steps [first_step, last_step): present, sealed, samples in one unbroken line of
 * `batch` each. Steps before the run's start (resumed elsewhere) are not in the file. */
int lg_ledger_verify(const char *path, uint64_t first_step, uint64_t last_step, uint64_t batch);
