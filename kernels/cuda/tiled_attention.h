/* Attention's forward on the tensor cores for any lengths, key lengths and a bias (tiled_attention.cu). */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* 16-bit types, heads of up to 128 in multiples of 8, everything on 16 bytes. */
bool cuda_tiled_attention_takes(const struct lg_attention_forward_args *a);
void cuda_tiled_attention(lg_stream *s, const struct lg_attention_forward_args *a);
#ifdef __cplusplus
}
#endif
