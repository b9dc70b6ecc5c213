/* Attention on the tensor cores with what every GPU from 8.0 on has, forward and backward (mma_attention.cu). */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* On GPUs other than 9.0: 16-bit types, heads of up to 128 in multiples of 8, any lengths, key lengths, no bias on
 * the scores, everything on 16 bytes. */
bool cuda_mma_attention_forward_takes(const lg_cuda_device *d,
                                      const struct lg_attention_forward_args *a);
void cuda_mma_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a);
bool cuda_mma_attention_backward_takes(const lg_cuda_device *d,
                                       const struct lg_attention_backward_args *a);
/* All but dbias. delta (B, H, Tq): rows' sums of dout o. */
void cuda_mma_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a,
                                 const float *delta);
#ifdef __cplusplus
}
#endif
