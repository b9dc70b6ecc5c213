/* Attention on the tensor cores for heads that fit into shared memory: forward
 * (short_attention_forward.cu) and backward (short_attention.cu). */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* On 9.0: 256 queries and keys, heads of 64 or 72, 16-bit types, no key lengths, everything on 16 bytes. */
bool cuda_short_attention_forward_takes(const lg_cuda_device *d,
                                        const struct lg_attention_forward_args *a);
void cuda_short_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a);
bool cuda_short_attention_takes(const lg_cuda_device *d,
                                const struct lg_attention_backward_args *a);
size_t cuda_short_attention_scratch(const struct lg_attention_backward_args *a);
void cuda_short_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a);
#ifdef __cplusplus
}
#endif
