/* A convolution as products of matrices: its windows as rows, its filters flipped; and what is made in
 * one type added to another. See conv_columns.cu. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Windows of a map (N, rows, columns, C) of `type`, for each pixel (h, w) of a grid (N, high, wide): position (i, j) of u x v
 * shows the pixel at ((h up + i - top) / down, (w up + j - left) / down), or zeros where that is no whole number or outside.
 * A convolution's x has up = stride, down = 1; its dy, seen from dx, up = 1 and down = stride. */
struct cuda_windows {
    lg_dtype type;
    const void *map;
    int64_t C;
    int rows, columns, high, wide, u, v, up, down, top, left;
};
/* Elements from one row of a matrix of windows to the next: those of a row are followed by zeros, so that
 * every row begins on 16 bytes. */
static inline int64_t cuda_window_stride(lg_dtype type, int64_t elements)
{
    const int64_t pack = 16 / (int64_t)lg_dtype_bytes(type);
    return (elements + pack - 1) / pack * pack;
}
/* to (count, cuda_window_stride(u v C)): the windows of pixels [first, first + count) of the grid, by (i, j, c). */
void cuda_take_windows(cudaStream_t stream, const struct cuda_windows *z, int64_t first,
                       int64_t count, void *to);
/* to (I, cuda_window_stride(u v O)): filters w (O, u, v, I) flipped in both directions (rotated by 180 degrees), by (i, j, o). */
void cuda_flip_filters(cudaStream_t stream, lg_tensor w, void *to);
/* y (+)= x; as many elements, types of this device. */
void cuda_add_converted(cudaStream_t stream, lg_tensor x, lg_tensor y, bool accumulate);
#ifdef __cplusplus
}
#endif
