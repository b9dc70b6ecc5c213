/* A sum without rounding, after Kulisch: a fixed-point number that holds every sum of squares of fp32 values. In
 * whatever order terms are added, and over however many sums they are spread that are added up later, the total is
 * the same bits. So a gradient's norm depends neither on the number of ranks nor on how the parameters are cut.
 *
 * Plain data, which may lie in shared memory; all zero bytes is the empty sum. */
#pragma once
#include <stdint.h>

enum { LG_EXACT_DIGITS = 22 };

/* sum of digit[i] 2^(32 i - 298): 2^-298 is the square of the smallest fp32 value. Digits may be larger than 32
 * bits (carries wait). */
struct lg_exact_sum {
    uint64_t digit[LG_EXACT_DIGITS];
    uint64_t terms;     /* additions since the carries were last passed on */
    uint64_t nonfinite; /* terms that were infinite or NaN; with one the total is NaN */
};

/* x: not negative, a multiple of 2^-298 and less than 2^288, as any sum of at most 2^31 squares of fp32 values
 * is that was made in double; else a bug. */
void lg_exact_sum_add(struct lg_exact_sum *s, double x);
/* Adds another sum. */
void lg_exact_sum_merge(struct lg_exact_sum *s, const struct lg_exact_sum *other);
/* The total, rounded once, to nearest even: of terms times a power of two it is that many times as large. */
double lg_exact_sum_total(const struct lg_exact_sum *s);
