/* What the files of GroupNorm share: sizes, and how blocks lie on a map. */
#pragma once
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/group_norm.h"

/* A thread takes WALK pixels for a result, of which STEPS are loaded at once: what it knows of its channels costs as much.
 * A block is at most COLUMNS_MAX packs of channels wide, so that small maps have several pixels under way at once, too. */
enum { THREADS = 256, STEPS = 4, WALK = 16, ADDERS = 128, COLUMNS_MAX = 64 };

struct dims {
    int64_t N, HW, C;
    int groups, wide;   /* channels of a group */
    int pixels, blocks; /* of a block that sums; of a sample */
};
static inline dims dims_of(const lg_tensor &x, int64_t groups)
{
    const int64_t HW = x.dim[1] * x.dim[2], C = x.dim[3], pixels = HW <= 4096 ? 64 : 256;
    return {
        x.dim[0], HW, C, (int)groups, (int)(C / groups), (int)pixels, (int)ceil_div(HW, pixels)};
}

/* How a block lies on (pixels, packs of channels): `columns` packs wide, `rows` pixels high. */
struct lay {
    int columns, rows;
};
static inline lay lay_of(const dims &z, int pack)
{
    int64_t columns = z.C / pack < COLUMNS_MAX ? z.C / pack : COLUMNS_MAX;
    return {(int)columns, THREADS / (int)columns};
}
