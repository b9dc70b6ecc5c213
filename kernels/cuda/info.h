/* Is there such a GPU, and will this build run on it? Internal to liblg-cuda.so. */
#pragma once
#include "kernels/cuda/cuda.h"

/* Errors as in kernels/info.h. */
int lg_cuda_find_gpu(int index, struct cudaDeviceProp *ret);
/* Makes the calling thread's context on it, or says who is in the way. */
int lg_cuda_context(int index);
