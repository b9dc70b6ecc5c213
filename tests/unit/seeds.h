/* How much of what could be tested is: all or some modes; and what the programs of the simulations share,
 * runs that are named by a seed, with or without a planted bug. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Is this `make check-all` (CHECK_ALL in the environment)? Then whole tables of modes, of which `make check` takes
 * each mode once, not with every other. */
bool checks_everything(void);

struct seeds_run {
    uint64_t seed;
    int bug;   /* 0: none */
    bool told; /* on stderr */
};
struct seeds_spec {
    const char *program; /* test_sim_disk */
    int bugs;            /* the planted ones, counted with 0: none */
    const char *(*bug_name)(int bug), *(*bug_what)(int bug);
    /* false: something was noticed, and ret_why says what. */
    bool (*run)(const struct seeds_run *r, char *ret_why, size_t bytes);
};

/* The arguments SEED [BUG]: that run, told; FROM-TO [BUG]: each seed, saying which fail. Returns the
 * exit code, or -1 without arguments. */
int seeds_replay(int argc, char **argv, const struct seeds_spec *spec);
/* Under AddressSanitizer, which looks for other mistakes and takes three times as long, `make check` makes a SANITIZED_PART-th
 * of the runs that a plain build makes: */
enum { SANITIZED_PART = 5 };
bool checks_a_part(void);

/* Runs the seeds from 1 to `seeds`; with LG_SEEDS=N in the environment those from N on, at least as many, for
 * cpu_ms of CPU time. Returns how many were run, or 0 when one failed: told on stderr, with how it is
 * repeated. An assertion that fails names its seed, too. */
uint64_t seeds_honest(const struct seeds_spec *spec, uint64_t seeds, int cpu_ms, double *ret_cpu_s);
/* Each planted bug must be noticed at one of seeds_max seeds; a failed assertion is a way of noticing. Where a part is
 * checked none is planted: that they are noticed the plain build shows.
 * Prints a line for each; returns how many are missed. */
int seeds_missed_bugs(const struct seeds_spec *spec, uint64_t seeds_max);
