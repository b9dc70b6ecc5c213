/* Loops over pixels in vectors of eight: compiled once more for AVX2 on x86-64, whose base line has vectors of four. What they
 * compute is the same, bit for bit: whole numbers, or each sum in its own lane and order, without contraction. */
#pragma once
#include "base/check.h"

#if defined(__x86_64__)
#define LG_HAS_WIDE 1
#define LG_WIDE     __attribute__((target("avx2")))
#else
#define LG_HAS_WIDE 0
#endif
/* A body that a function of each kind is made of. */
#define LG_BODY static inline __attribute__((always_inline))

/* Whether this processor has them; asked once per picture. */
bool lg_wide(void);
/* For tests: false keeps to the base line from now on. */
void lg_wide_allow(bool is_allowed);
