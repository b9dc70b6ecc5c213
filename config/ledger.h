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
    uint64_t lineage; /* of the run (config/lineage.h); 0: of a build that did not know lineages */
    uint64_t check;   /* XXH3-64 of the 56 bytes before */
};
static_assert(sizeof(struct lg_ledger_record) == 64, "one record is 64 bytes");

void lg_ledger_seal(struct lg_ledger_record *r);
/* Checks the records of steps [first_step, last_step) of a run: present, sealed, samples in one unbroken
 * line of `batch` each, and all of one lineage, which is `lineage` unless that is 0. Records without one
 * may come before, never behind. Steps before the run's start (resumed elsewhere) are not in the file. */
struct lg_ledger_check {
    uint64_t first_step, last_step, batch, lineage;
};
int lg_ledger_verify(const char *path, const struct lg_ledger_check *c);
/* First step that has a record, for a run that began with another's checkpoint: before it there is a
 * hole. Steps in the file when it has none. */
int lg_ledger_first(const char *path, uint64_t *ret);
