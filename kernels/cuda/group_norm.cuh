/* What the files of GroupNorm share: sizes, and how blocks lie on a map. */
#pragma once
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/group_norm.h"

/* A thread takes WALK pixels for a result, of which STEPS are loaded at once: what it knows of its channels costs as much. */
enum { THREADS = 256, PIXELS = 256, STEPS = 4, WALK = 16, ADDERS = 128 };

struct dims {
    int64_t N, HW, C;
    int groups, wide, blocks; /* wide: channels of a group; blocks: of a sample */
};
static inline dims dims_of(const lg_tensor &x, int64_t groups)
{
    int64_t HW = x.dim[1] * x.dim[2], C = x.dim[3];
    return {x.dim[0], HW, C, (int)groups, (int)(C / groups), (int)ceil_div(HW, PIXELS)};
}

/* How a block lies on (pixels, packs of channels): `columns` packs wide, `rows` pixels high. */
struct lay {
    int columns, rows;
};
static inline lay lay_of(const dims &z, int pack, int most = THREADS)
{
    int64_t columns = z.C / pack < most ? z.C / pack : most;
    return {(int)columns, THREADS / (int)columns};
}
