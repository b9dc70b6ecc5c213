/* Attention of any head size by matrix products; forward only. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
size_t cuda_wide_attention_scratch(lg_cuda_device *d, const struct lg_attention_forward_args *a);
void cuda_wide_attention(lg_stream *s, const struct lg_attention_forward_args *a);
/* weights (samples, Tq, Tk) = softmax(scale scores + bias, keys < k_length) of the samples from b
 * on, head h; their lse. */
void cuda_softmax_rows(cudaStream_t stream, const struct lg_attention_forward_args *a, int64_t b,
                       int64_t samples, int64_t h, const float *scores, void *weights);
#ifdef __cplusplus
}
#endif
