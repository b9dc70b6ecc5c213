/* Convolutions of pictures: from 3 channels, see picture_conv.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Does this kernel do it? 16-bit types, 3x3, stride 1, 3 channels in, out a multiple of 64, no
 * residual. */
bool cuda_picture_conv_fits(const struct lg_conv2d_forward_args *a);
/* Can it sum as well? Pictures of a multiple of 128 pixels. */
bool cuda_picture_conv_sums(const struct lg_conv2d_forward_args *a);
/* sums: as cuda_tile_conv's, or NULL. */
void cuda_picture_conv(lg_stream *s, const struct lg_conv2d_forward_args *a, float *sums);
#ifdef __cplusplus
}
#endif
