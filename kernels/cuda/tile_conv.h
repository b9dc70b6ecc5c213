/* Convolutions of many channels on the tensor cores, see tile_conv.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Does this kernel do it? On 9.0, 16-bit types, 3x3, stride 1, or 2 without a residual, y of a multiple of
 * 16 on both sides, channels in and out multiples of 64. */
bool cuda_tile_conv_fits(const lg_cuda_device *d, const struct lg_conv2d_forward_args *a);
/* Pieces of a picture y that have sums of their own: 128 pixels each. */
int64_t cuda_conv_tiles(const struct lg_conv2d_forward_args *a);
/* factors: NULL, or (N, 2, Ci), factors and offsets: what is convolved is silu(x factor + offset),
 * rounded to x's type; stride 1, channels out a multiple of 128.
 * sums: (N, tiles, Co / 2) pairs of floats, mean and sum of squared distances from it over a
 * tile's pixels and two neighbouring channels of y; or NULL. */
void cuda_tile_conv(lg_stream *s, const struct lg_conv2d_forward_args *a, const float *factors,
                    float *sums);
/* The same over time: pictures are frames of one clip, of which each of y sees w.dim[1]. 3x3, stride 1, or 2 without a residual
 * in space; any y; channels in a multiple of 8, out of 64. A frame's bits do not depend on how many there are. fits: what has
 * no `normed`; norms: what has it, of 128 channels, with SiLU and stride 1 in space. */
bool cuda_tile_conv3d_fits(const lg_cuda_device *d, const struct lg_conv3d_forward_args *a);
bool cuda_tile_conv3d_norms(const lg_cuda_device *d, const struct lg_conv3d_forward_args *a);
void cuda_tile_conv3d(lg_stream *s, const struct lg_conv3d_forward_args *a);
#ifdef __cplusplus
}
#endif
