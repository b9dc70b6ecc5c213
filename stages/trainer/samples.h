/* What all ranks must know of the samples of a step: how many count in the loss, and which they were. */
#pragma once
#include "shm/window.h"

/* Of this host's, from the window: false while a SOURCE is missing. Afterwards until the step is committed. */
bool lg_samples_of_host(lg_board *b, lg_window *w, uint64_t step, struct lg_host_sums *ret);
/* Of all, on several hosts as these say (shm/hosts.h). */
bool lg_samples_of_step(lg_board *b, lg_window *w, uint64_t step, struct lg_host_sums *ret);
