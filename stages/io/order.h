/* Which item each place of a run is, with buckets (config/buckets.h); without them see lg_sample_rule.
 *
 * Places are numbered like samples: n of step s in [s batch, (s + 1) batch), rank r's share the r-th of R equal parts,
 * cut into micro-batches. The j-th micro-batches of all ranks in a step are a *group*: one bucket. Groups are counted
 * over the run, p = s M + j with M micro-batches in a share. A group of bucket k holds R B_k items, B_k its rows.
 *
 * An epoch is the list of all groups, ceil(c_k / (R B_k)) of each bucket k with c_k items, in keyed permutation; group q
 * of a bucket holds its items q R B_k, .. (q + 1) R B_k - 1 in that epoch's keyed permutation of them, rank after rank.
 * So each item comes once in an epoch. What the last group of a bucket lacks, and the places of a micro-batch from B_k
 * on, are *absent*: no item stands there. The epoch's groups follow one another without regard to steps.
 *
 * Item i's bucket is the nearest in ratio to its picture; what has no readable picture counts as a square. A clip goes to
 * buckets of the most frames that it has, but more than one, a picture to those of one; what suits no bucket goes to the
 * nearest of all, where it is void when it is read. A bucket with fewer items than a group holds is given up, the smallest
 * first, to the nearest in ratio of those that are left, of the most frames that all its clips have (pictures: of one
 * frame); where there is none, it stays.
 *
 * Keys: permute.h's, with bits 48 on of the epoch for the bucket (groups: 2^16 - 1). With one bucket alone the groups
 * keep their order and its key is 0: for one rank, or one micro-batch a step, its whole groups are the samples of the
 * square's rule. All is O(1) in time but the search of a group's bucket, O(log n of buckets). */
#pragma once
#include "config/buckets.h"
#include "stages/io/clip_read.h"
#include <assert.h>
#include <stdint.h>

/* Pixels of an item's picture; 0: no readable one. */
struct lg_item_size {
    uint16_t width, height;
    uint32_t frames;      /* 0 or 1: a picture */
    uint32_t duration_ms; /* of a clip */
};

struct lg_order_spec {
    const struct lg_buckets *buckets;
    const struct lg_item_size *size; /* (count) */
    uint64_t count;                  /* items, >= 1 */
    struct lg_clip_rate rate;        /* at which clips have their frames */
    uint64_t ranks, micros, micro;   /* R, M, and places of a micro-batch */
};
typedef struct lg_order lg_order;
int lg_order_make(const struct lg_order_spec *spec, lg_order **ret);
void lg_order_free(lg_order **o);

struct lg_order_key {
    uint64_t seed;
    uint64_t first,
        epoch; /* of the part of the run (config/data_set.h); first is a multiple of the batch */
    bool no_shuffle;
};
#define LG_ITEM_ABSENT UINT64_MAX
struct lg_order_place {
    int bucket;
    uint64_t item; /* or LG_ITEM_ABSENT */
    uint64_t epoch;
};
struct lg_order_place lg_order_at(const lg_order *o, const struct lg_order_key *key, uint64_t n);

/* Fingerprint of what decides which item a place is: `source` (lg_source_hash), buckets, each item's bucket, ranks and
 * micro-batches. Never 0. */
uint64_t lg_order_hash(const lg_order *o, uint64_t source);

/* For people. */
struct lg_order_bucket {
    uint64_t nearest; /* items whose nearest bucket it is */
    uint64_t items;   /* that it holds: 0, or with those of buckets that were given up */
    uint64_t groups;  /* of it in an epoch */
};
struct lg_order_bucket lg_order_bucket(const lg_order *o, int k);
uint64_t lg_order_groups(const lg_order *o); /* of an epoch */
