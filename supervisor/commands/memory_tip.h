/* What would make room on a GPU that is too small for a run's trainer, or use what stays free: found by trying. */
#pragma once
#include "supervisor/commands/memory.h"

enum { LG_MEMORY_TIP_BYTES = 320 };

/* Would the run fit with these settings, "memory.recompute=block", beside its own? */
typedef bool lg_memory_try(void *of, const char *const *set, int n);

/* As much recomputation as makes the first such GPU large enough, else all of it, with activations, then also the average, in
 * host memory, then with feed-forwards in chunks: "set ...". "": no GPU is too small, or nothing of this is enough. */
void lg_memory_tip(const struct lg_memory *m, lg_memory_try *fits, void *of,
                   char ret[LG_MEMORY_TIP_BYTES]);
/* Of a run that fits and recomputes: "none", or the budget that leaves a fiftieth of every GPU free, where that is a tenth more than
 * activations have; "": no GPU has so much room, or it does not fit. */
void lg_memory_less_recomputed(const struct lg_memory *m, lg_memory_try *fits, void *of,
                               char ret[LG_MEMORY_TIP_BYTES]);
