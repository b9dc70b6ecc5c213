/* A rank's average in host memory while its weights lie on a GPU (memory.offload_ema): pieces of it go up, are averaged
 * with the weights there, by the operation that would have made it on the GPU, and come down. So it decides no bit.
 *
 *     host: side e - 1  --> place 0 | 1 | 2 on the GPU: average with w --> side e
 *
 * Each place has a stream of its own, so that one piece goes up while another comes down. The sides are pinned piece by
 * piece, which takes time, once in a process: while there is nothing else to do (lg_host_average_prepare), or where a copy first
 * wants them. */
#pragma once
#include "kernels/device.h"

typedef struct lg_host_average lg_host_average;
/* Bytes on the GPU. */
size_t lg_host_average_bytes(void);
/* side: (count) fp32 each, in the host's memory, which the caller keeps mapped until the process ends. d must outlive it. */
int lg_host_average_open(lg_device *d, float *const side[2], size_t count, lg_host_average **ret);
void lg_host_average_close(lg_host_average **a);
/* Pins the next piece of a side: 1; 0 where nothing is left to pin. An idle keeper calls it, as it does before the first state
 * is there. */
int lg_host_average_prepare(lg_host_average *a);
/* side[to] <- decay side[1 - to] + (1 - decay) w. w: on d. There after the sync. */
int lg_host_average_make(lg_host_average *a, const float *w, int to, double decay);
/* side[to] <- w. */
int lg_host_average_take(lg_host_average *a, const float *w, int to);
void lg_host_average_sync(lg_host_average *a);
