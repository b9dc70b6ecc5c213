/* Is there such a GPU, and will this build run on it? Internal to liblg-cuda.so. */
#pragma once
#include "kernels/cuda/cuda.h"

/* What the common kernels need; Hopper's own need 9.0, neither more nor less (lg_cuda_is_hopper). */
enum { LG_CUDA_LEAST = 80 };

/* The capability whose kernels the GPU gets, 90 for 9.0, and the bytes of shared memory that a block may have there: its
 * own, or those of the lower one that $LG_CUDA_CAPABILITY names. LG_ERR_CONFIG: that is none, or a higher one. */
int lg_cuda_capability(const struct cudaDeviceProp *gpu, int *ret, size_t *ret_shared);
/* Does $LG_CUDA_NO_PEER say that no GPU reaches another one's memory, for tests? */
bool lg_cuda_no_peer(void);
/* Errors as in kernels/info.h. */
int lg_cuda_find_gpu(int index, struct cudaDeviceProp *ret);
/* Makes the calling thread's context on it, or says who is in the way. */
int lg_cuda_context(int index);
