/* How the weights of a checkpoint are spread: one histogram per group of parameters, written as JSON
 * for lgsup, which puts them into TensorBoard's event files (supervisor/views/histograms.h).
 *
 * Buckets are those of TensorBoard's own writer: limits 0 and +-1e-12 * 1.1^k below 1e20, closed by
 * +-DBL_MAX; bucket i counts limit[i - 1] <= x < limit[i]. */
#pragma once
#include "base/check.h"
#include <stddef.h>
#include <stdint.h>

enum { LG_HISTOGRAM_LIMITS = 1551 };
/* (LG_HISTOGRAM_LIMITS), rising. */
const double *lg_histogram_limits(void);

typedef struct lg_histogram {
    char group[128];
    double min, max, sum, sum_squares; /* of the finite values, in their order */
    uint64_t count, nonfinite;
    uint64_t bucket[LG_HISTOGRAM_LIMITS];
} lg_histogram;

void lg_histogram_begin(lg_histogram *h, const char *group);
void lg_histogram_add(lg_histogram *h, const float *v, size_t n);

/* A parameter's group: the first three parts of its name, without a last part "weight" or "bias":
 * "transformer_blocks.3.attn1.to_q.weight" is of "transformer_blocks.3.attn1". */
void lg_histogram_group(const char *name, char ret[128]);

/* Counts what lies in weights_dir (diffusers layout) and publishes it at path. LG_ERR_CORRUPT for a
 * name that is none of a parameter. */
int lg_histograms_write(const char *weights_dir, const char *path);
