/* Mean and variance of groups of channels, for GroupNorm; see group_norm.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* mean_var (N, groups, 2) f64 of x (N, H, W, C); scratch: cuda_group_mean_var_scratch bytes. */
size_t cuda_group_mean_var_scratch(const lg_tensor *x);
void cuda_group_mean_var(lg_stream *s, lg_tensor x, lg_tensor mean_var);
/* The same from what a convolution summed (tile_conv.h, picture_conv.h): (N, tiles, C / 2) pairs. */
void cuda_group_mean_var_of_sums(lg_stream *s, const float *sums, int64_t tiles, lg_tensor x,
                                 lg_tensor mean_var);
/* factors (N, 2, C): the norm of x, before its activation, is x times the first plus the second. Takes
 * `mean_var`, not a's; no scratch. */
void cuda_norm_factors(lg_stream *s, const struct lg_group_norm_forward_args *a, lg_tensor mean_var,
                       float *factors);
#ifdef __cplusplus
}
#endif
