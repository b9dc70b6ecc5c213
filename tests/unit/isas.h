/* The instruction sets of the host backend. A process computes with one of them alone, so a test
 * that tries them all gives each a child. */
#pragma once
#include <stdbool.h>

/* "sse2", "avx2" or "avx512". */
bool isa_is_here(const char *isa);

/* Runs check, which returns its number of failures, in a child for every set of this machine; names
 * the sets that it lacks. Fails the running test when a child failed or died. */
void for_each_isa(int (*check)(const char *isa));
