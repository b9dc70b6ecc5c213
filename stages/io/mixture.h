/* Which item of several sources each sample is (data.source; without buckets).
 *
 * A source has c items and a share of the samples, p of P. Samples come in turn: of the first t samples of a run the first source has
 * had floor(t p / P), whatever t is; of what is left the second has floor of its part of that, and so on to the last, which has the
 * rest. So every stretch of a run holds each source's share but for a sample or so, all is a function of n, and with n
 * of a source known its item is found in O(sources) time.
 *
 * A source walks through its items by itself: its m-th sample is place m % c of its pass m / c, each pass in a keyed
 * permutation of its own; no item of a source comes a (k + 1)-th time before all have come k times. One source alone is what a
 * data.path is: its passes are epochs.
 *
 * Shares. Sources without a weight have items x repeats; after as many samples as these add up to, an epoch, each item has come
 * `repeats` times exactly. With weights, in millionths: where all sources have one, these; else those without one divide what is left
 * to 1 by items x repeats.
 *
 * Keys: permute.h's, with bits 48 on of the pass for the source; and where there are several sources, the part of the run
 * (config/data_set.h) in the seed, since passes of all sources have no common count from which a new part could go on. */
#pragma once
#include "base/check.h"
#include <stdint.h>

enum { LG_MIXTURE_MAX = 64 };

struct lg_mixture_source {
    uint64_t items, repeats;
    double weight; /* 0: none */
};
struct lg_mixture {
    int n;
    struct {
        uint64_t items,
            share; /* of what the sources before it leave, `left`; without a common divisor */
        uint64_t left;
        uint64_t first; /* its items are numbered from here on */
    } of[LG_MIXTURE_MAX];
};
/* LG_ERR_CONFIG: so many items and repeats that they cannot be counted. */
int lg_mixture_make(const struct lg_mixture_source *source, int n, struct lg_mixture *ret);

struct lg_mixture_key {
    uint64_t seed;
    uint64_t first, epoch; /* of the part of the run */
    bool no_shuffle;
};
struct lg_mixture_place {
    int source;
    uint64_t item;  /* of all sources' */
    uint64_t epoch; /* the part's, and the passes of its source before */
};
struct lg_mixture_place lg_mixture_at(const struct lg_mixture *m, const struct lg_mixture_key *key,
                                      uint64_t n);
/* How many of the first t samples are source i's. */
uint64_t lg_mixture_count(const struct lg_mixture *m, int i, uint64_t t);
/* Its share of all samples. */
double lg_mixture_share(const struct lg_mixture *m, int i);
