/* Mean and variance of groups of channels, for GroupNorm; see group_norm.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* moments (N, groups, 2) f64 of x (N, H, W, C); scratch: cuda_moments_scratch bytes. */
size_t cuda_moments_scratch(const lg_tensor *x);
void cuda_moments(lg_stream *s, lg_tensor x, lg_tensor moments);
/* The same from what a convolution summed (tile_conv.h, picture_conv.h): (N, parts, C / 2) pairs. */
void cuda_moments_of_parts(lg_stream *s, const float *sums, int64_t parts, lg_tensor x,
                           lg_tensor moments);
/* factors (N, 2, C): the norm of x, before its activation, is x times the first plus the second. Takes
 * `moments`, not a's; no scratch. */
void cuda_norm_factors(lg_stream *s, const struct lg_group_norm_forward_args *a, lg_tensor moments,
                       float *factors);
#ifdef __cplusplus
}
#endif
