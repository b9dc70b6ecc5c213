/* The products that have GELU at their end, see gelu_product.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Does this kernel do it? On 9.0, 16-bit types, GELU, a width out in multiples of 256, an inner dimension in
 * multiples of 64 and of at least 1024, and rows enough: 32768 with a bias forward, 4096 backward. */
bool cuda_gelu_forward_fits(const lg_cuda_device *d, const struct lg_linear_forward_args *a);
bool cuda_gelu_backward_fits(const lg_cuda_device *d, const struct lg_linear_backward_data_args *a);
/* Bytes of scratch that the backward needs. */
size_t cuda_gelu_backward_scratch(const struct lg_linear_backward_data_args *a);
void cuda_gelu_forward(lg_stream *s, const struct lg_linear_forward_args *a);
void cuda_gelu_backward(lg_stream *s, const struct lg_linear_backward_data_args *a);
#ifdef __cplusplus
}
#endif
