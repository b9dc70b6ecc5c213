/* What the files of the norms share. */
#pragma once
#include "kernels/cuda/cuda.h"

/* norm_modulate_backward where everything is on 16 bytes and scale is there; false when not for it. */
bool cuda_norm_backward_in_one_pass(cudaStream_t stream,
                                    const struct lg_norm_modulate_backward_args *a);
