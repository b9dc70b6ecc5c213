/* Counter-based random numbers: Philox4x32-10.
 * Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
 *
 * Every random number of a run is a pure function of (seed, purpose, n, block): key = (seed,
 * purpose), counter = (n or step, block of four 32-bit outputs). Nothing is ever "drawn", so a
 * replay, another number of processes or another order gives the same numbers. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Purposes: base/philox.def. */
typedef enum lg_purpose {
#define LG_PURPOSE(name, doc) LG_PURPOSE_##name,
#include "base/philox.def"
#undef LG_PURPOSE
    LG_PURPOSE_COUNT
} lg_purpose;

typedef struct lg_philox_out {
    uint32_t v[4];
} lg_philox_out;

/* The raw function: counter of 128 bits, key of 64. */
lg_philox_out lg_philox4x32(const uint32_t counter[4], const uint32_t key[2]);
/* Block `block` of the stream (seed, purpose, n). The seed's 64 bits and the purpose are folded into
 * the key (seed_lo, seed_hi ^ purpose * 0x9E3779B9); counter = (block_lo, block_hi, n_lo, n_hi). */
lg_philox_out lg_philox(uint64_t seed, lg_purpose purpose, uint64_t n, uint64_t block);
/* [0, 1) with 24 bits. */
float lg_uniform_f32(uint32_t u);
/* (0, 1) with 32 bits: (u + 0.5) / 2^32. */
double lg_uniform_f64(uint32_t u);
/* Two standard normals of two words, Box-Muller in double: deterministic given the libm. */
void lg_normal_pair(uint32_t a, uint32_t b, double ret[2]);
/* out[i] = standard normal number (first + i) of the stream; element e lies in block e / 4. */
void lg_philox_normal_f32(float *out, size_t count, uint64_t seed, lg_purpose purpose, uint64_t n,
                          uint64_t first);
void lg_philox_normal_f64(double *out, size_t count, uint64_t seed, lg_purpose purpose, uint64_t n,
                          uint64_t first);
