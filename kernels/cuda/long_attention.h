/* Attention over many tokens on the tensor cores of 9.0: forward (long_attention_forward.cu) and backward
 * (long_attention.cu). */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* On 9.0: at least 512 queries and keys; heads of 64, 72 or 128, of 64 and 72 with or without key lengths, and also to few keys (forward:
 * from 16 on; backward: heads of 64, from 128 keys and 4096 queries on); 16-bit types, no bias, everything on 16 bytes. */
bool cuda_long_attention_forward_takes(const lg_cuda_device *d,
                                       const struct lg_attention_forward_args *a);
void cuda_long_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a);
bool cuda_long_attention_takes(const lg_cuda_device *d, const struct lg_attention_backward_args *a);
/* Linear in the number of tokens. */
size_t cuda_long_attention_scratch(const struct lg_attention_backward_args *a);
/* All but dbias. */
void cuda_long_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a);
#ifdef __cplusplus
}
#endif
