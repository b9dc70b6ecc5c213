/* Tiles of attention over many tokens (long_attention.cu, long_attention_forward.cu): some rows of a head in shared
 * memory, as wgmma reads them, TMA that brings and takes them, and their descriptors.
 *
 * A tile is cut into panels of 64 columns, whose rows of 128 bytes have the swizzle of 128 bytes, or, where that
 * would not come out even, of 16 columns with that of 32: a row's 16 bytes number c lie at c ^ r % 8, or at
 * c ^ r / 4 % 2. A panel is all rows of the tile, one behind the other; panels begin on multiples of 1024. Columns
 * beyond the head's last, and rows beyond the last token, come as zeros, and are not taken away. */
#pragma once
#include "kernels/cuda/head_boxes.cuh"

#ifndef LG_LEAST
#define LG_LEAST 512
#endif
enum { GROUP = 128, LONG_LEAST = LG_LEAST };

template <int D> struct panels {
    static constexpr int COLUMNS = D % 64 ? 16 : 64, COUNT = (D + COLUMNS - 1) / COLUMNS;
    static constexpr int ROW = 2 * COLUMNS,
                         STEPS = (D + 15) / 16; /* bytes; products of 16 columns */
    static constexpr int EIGHT = 8 * ROW, SWIZZLE = COLUMNS == 64 ? 1 : 3;
    static constexpr int bytes(int rows) { return COUNT * rows * ROW; }
};

/* ---- TMA ---- */

/* A ring of N places with two barriers each, `came` and `free`; this one is the caller's next. */
template <int N> struct ring {
    uint32_t barriers;
    int at = 0, turn = 0;
    __device__ __forceinline__ explicit ring(uint32_t where) : barriers(where) {}
    __device__ __forceinline__ uint32_t came() const { return barriers + 16 * at; }
    __device__ __forceinline__ uint32_t free() const { return barriers + 16 * at + 8; }
    __device__ __forceinline__ void wait_came() const { mbarrier_wait(came(), turn); }
    __device__ __forceinline__ void wait_free() const { mbarrier_wait(free(), turn ^ 1); }
    __device__ __forceinline__ void next()
    {
        if (++at == N) at = 0, turn ^= 1;
    }
};

/* Which rows of which head. */
struct place {
    int token, head, sample;
};
/* The tile of ROWS rows from `at` to shared memory; the barrier is told. */
template <int D, int ROWS>
static __device__ __forceinline__ void fetch_tile(uint32_t to, const CUtensorMap *from, place at,
                                                  uint32_t barrier)
{
    using P = panels<D>;
#pragma unroll
    for (int p = 0; p < P::COUNT; p++)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to + p * ROWS * P::ROW),
                     "l"(from), "r"(p * P::COLUMNS), "r"(at.head), "r"(at.token), "r"(at.sample),
                     "r"(barrier)
                     : "memory");
}
/* A warp's 16 rows of a tile of ROWS the other way, in the thread's group that puts_end() closes. */
template <int D, int ROWS>
static __device__ __forceinline__ void put_rows(const CUtensorMap *to, place at, uint32_t from)
{
    using P = panels<D>;
#pragma unroll
    for (int p = 0; p < P::COUNT; p++)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                     "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(to),
                     "r"(p * P::COLUMNS), "r"(at.head), "r"(at.token), "r"(at.sample),
                     "r"(from + p * ROWS * P::ROW)
                     : "memory");
}
/* Panels of `rows` rows of a tensor (B, T, H, D). */
template <int D> static CUtensorMap panels_of(const lg_tensor *t, int rows)
{
    using P = panels<D>;
    int64_t stride = lg_row_stride(t, 2) * 2;
    cuuint64_t size[] = {(cuuint64_t)D, (cuuint64_t)t->dim[2], (cuuint64_t)t->dim[1],
                         (cuuint64_t)t->dim[0]};
    cuuint64_t pitch[] = {2 * D, (cuuint64_t)stride, (cuuint64_t)(stride * t->dim[1])};
    cuuint32_t box[] = {P::COLUMNS, 1, (cuuint32_t)rows, 1};
    return described(t, 4, size, pitch, box,
                     P::SWIZZLE == 1 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B);
}

/* ---- operands ---- */

/* Descriptors of the tile at `tile`, of ROWS rows: of 16 of its columns, those of step s (whose sum a product is), from
 * a row that `tile` includes; of 16 of its rows, transposed. low: operand_start of the tile. */
template <int D, int ROWS>
static __device__ __forceinline__ uint64_t columns_at(uint32_t low, int s)
{
    using P = panels<D>;
    constexpr int IN_PANEL = P::COLUMNS / 16;
    return operand_at(low + (s / IN_PANEL * ROWS * P::ROW + s % IN_PANEL * 32) / 16, P::EIGHT,
                      P::SWIZZLE);
}
template <int D> static __device__ __forceinline__ uint64_t rows_at(uint32_t low, int s)
{
    using P = panels<D>;
    return operand_at(low + s * P::ROW, P::EIGHT, P::SWIZZLE);
}
/* x, not known to be the same: what is computed from it is computed where it is used. Else descriptors of all tiles
 * are held in registers. */
static __device__ __forceinline__ uint32_t again(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
/* Of a tile of ROWS rows; both kinds. */
template <int D, int ROWS> static __device__ __forceinline__ uint32_t tile_start(uint32_t tile)
{
    return again(operand_start(tile, ROWS * panels<D>::ROW));
}

/* ---- a product's results ---- */

/* The warp's 16 rows of D columns of a product's result, times factor, to rows of a tile of ROWS rows. */
template <typename T, int D, int ROWS>
static __device__ __forceinline__ void stage_rows(uint32_t to, const float (&x)[D / 2],
                                                  float factor)
{
    using P = panels<D>;
    int lane = threadIdx.x % WARP, row = lane % 16;
    int turn = P::SWIZZLE == 1 ? row % 8 : row / 4 % 2;
    to += row * P::ROW + (lane / 16 ^ turn) * 16;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        uint32_t p[4];
        /* An even number of eights more is the same by xor: bits that no row's place has. */
        uint32_t at = (to ^ j * 8 % P::COLUMNS * 2) + j * 8 / P::COLUMNS * ROWS * P::ROW;
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * j + 2 * e < D / 2)
                p[e] = packed(x[4 * j + 2 * e] * factor, x[4 * j + 2 * e + 1] * factor, T());
        if (j + 1 < D / 8)
            store_matrices(at, p);
        else
            store_two_matrices(at, p);
    }
}
