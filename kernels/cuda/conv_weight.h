/* Gradients of 3x3 filters of many channels on the tensor cores, see conv_weight.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Does this kernel do it? On 9.0, 16-bit types, 3x3, stride 1, channels in and out multiples of 64. */
bool cuda_conv_weight_fits(const lg_cuda_device *d, const struct lg_conv2d_backward_weight_args *a);
size_t cuda_conv_weight_scratch(const lg_cuda_device *d,
                                const struct lg_conv2d_backward_weight_args *a);
/* dw (+)=; dbias is not looked at. */
void cuda_conv_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a);
#ifdef __cplusplus
}
#endif
