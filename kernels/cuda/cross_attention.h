/* Backward of attention of many queries to few keys, as of an image to a text, on the tensor cores of 9.0 (cross_attention.cu). */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* On 9.0: at most 128 keys, heads of 64 or 72, 16-bit types, one stream of each, everything on 16 bytes. */
bool cuda_cross_attention_takes(const lg_cuda_device *d,
                                const struct lg_attention_backward_args *a);
/* Nothing, or linear in the number of heads. */
size_t cuda_cross_attention_scratch(const struct lg_attention_backward_args *a);
/* All but dbias. */
void cuda_cross_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a);
#ifdef __cplusplus
}
#endif
