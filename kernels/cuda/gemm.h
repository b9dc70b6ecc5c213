/* cuBLASLt's handle and its plans; gemm.c holds the linear operations. */
#pragma once
#include "kernels/cuda/cuda.h"

int lg_cuda_gemm_open(lg_cuda_device *d, struct lg_cuda_gemm **ret);
void lg_cuda_gemm_close(struct lg_cuda_gemm **g);
size_t lg_cuda_gemm_version(void);
