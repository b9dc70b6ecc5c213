/* Tiles of attention over many tokens (long_attention.cu, long_attention_forward.cu): some rows of a head in shared
 * memory, as wgmma reads them, TMA that brings and takes them, and their descriptors.
 *
 * A tile is cut into panels of 64 columns, whose rows of 128 bytes have the swizzle of 128 bytes: 16 bytes number c of
 * row r lie at c ^ r % 8. At d = 72 the last 8 columns follow, 16 bytes a row, without swizzle. (In panels of 16
 * columns with the swizzle of 32 bytes all would be of one kind, but products read those at half the speed.) A panel is
 * all rows of the tile, one behind the other; tiles begin on multiples of 1024. Rows beyond the last token come as
 * zeros, and are not taken away.
 *
 * Where a tensor has two streams (ops.def), rows are numbered through a sample all the same, and each stream has its own
 * description for TMA. A tile that begins in the first and ends in the second is fetched in boxes of 16 rows. */
#pragma once
#include "kernels/cuda/head_boxes.cuh"
#include <limits.h>

enum { GROUP = 128, LONG_LEAST = 512 };
enum {
    COLUMNS = SWIZZLED_COLUMNS,
    ROW = 128,
    REST_ROW = 16,
    ZEROS = 64 * REST_ROW
}; /* bytes, but COLUMNS */

/* What both kernels take. */
static inline bool long_enough(int64_t queries, int64_t keys)
{
    return queries >= LONG_LEAST && keys >= LONG_LEAST;
}

/* What P is multiplied with in a backward, and all that is made of it, until it is stored. */
template <typename T> constexpr int WEIGHT_EXPONENT = std::is_same<T, bf16>::value ? 15 : 0;
template <typename T> constexpr float weight_factor = 1 << WEIGHT_EXPONENT<T>;

template <int D> struct panels {
    static constexpr int COUNT = D / COLUMNS, STEPS = COUNT * COLUMNS / 16;
    static constexpr bool REST = D % COLUMNS != 0;
    static constexpr int bytes(int rows) { return rows * (COUNT * ROW + REST * REST_ROW); }
    static_assert(D % COLUMNS == 0 || D % COLUMNS == 8, "one more product of 8 columns");
};
/* Of a tile of ROWS rows. */
template <int D, int ROWS>
static __device__ __forceinline__ uint32_t rest_of(uint32_t tile, int row)
{
    return tile + panels<D>::COUNT * ROWS * ROW + row * REST_ROW;
}
struct tensor_maps {
    CUtensorMap main, rest; /* rest: at d = 72 */
};

/* Rows of a tensor of one stream or two, in boxes of so many; first: where the second begins, ONE_STREAM: nowhere. */
struct streams {
    tensor_maps of[2];
    int first;
};
/* Tiles, and what 16 rows of one are fetched by. */
struct tile_maps {
    streams whole, some;
};
enum { ONE_STREAM = INT_MAX, SOME_ROWS = 16 };

/* How many keys a sample has; lengths: of all samples, or NULL. */
static __device__ __forceinline__ int keys_of(const int32_t *lengths, int sample, int Tk)
{
    int n = lengths ? lengths[sample] : Tk;
    if (n < 1 || n > Tk) __trap();
    return n;
}

/* ---- TMA ---- */

/* Which rows of which head. */
struct place {
    int token, head, sample;
};
static __device__ __forceinline__ void fetch_box(uint32_t to, const CUtensorMap *from, int column,
                                                 place at, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(from), "r"(column), "r"(at.head), "r"(at.token), "r"(at.sample), "r"(barrier)
                 : "memory");
}
static __device__ __forceinline__ void put_box(const CUtensorMap *to, int column, place at,
                                               uint32_t from)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
                 "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(to),
                 "r"(column), "r"(at.head), "r"(at.token), "r"(at.sample), "r"(from)
                 : "memory");
}
/* What describes the rows from `at` on, which becomes their place within the stream. TWO: there may be a second one; without,
 * addresses are known, which makes the forward of one stream 2 to 4 % faster. */
template <bool TWO>
static __device__ __forceinline__ const tensor_maps &stream_of(const streams &x, place &at)
{
    if (!TWO) return x.of[0];
    const bool second = at.token >= x.first;
    if (second) at.token -= x.first;
    return x.of[second];
}
/* A box of rows, all of one stream, of a tile of ROWS, from `row` on. */
template <int D, int ROWS>
static __device__ __forceinline__ void fetch_rows(uint32_t to, int row, const tensor_maps &from,
                                                  place at, uint32_t barrier)
{
    using P = panels<D>;
#pragma unroll
    for (int p = 0; p < P::COUNT; p++)
        fetch_box(to + p * ROWS * ROW + row * ROW, &from.main, p * COLUMNS, at, barrier);
    if (P::REST) fetch_box(rest_of<D, ROWS>(to, row), &from.rest, P::COUNT * COLUMNS, at, barrier);
}
/* Tiles of one stream; of two, of which none has rows of both; of any two. In this order fetching takes more registers. */
enum tiles_kind { OF_ONE, WHOLE, ANY };
/* The tile of ROWS rows from `at` to shared memory; the barrier is told. */
template <int D, int ROWS, tiles_kind KIND>
static __device__ __forceinline__ void fetch_tile(uint32_t to, const tile_maps &from, place at,
                                                  uint32_t barrier)
{
    if (KIND != ANY) {
        const tensor_maps &maps = stream_of<KIND != OF_ONE>(from.whole, at);
        return fetch_rows<D, ROWS>(to, 0, maps, at, barrier);
    }
    const int first = from.whole.first;
    const bool in_one = at.token >= first || at.token + ROWS <= first;
    const streams &by = in_one ? from.whole : from.some;
    const int step = in_one ? ROWS : SOME_ROWS;
#pragma unroll 1
    for (int row = 0; row < ROWS; row += step, at.token += step) {
        place within = at;
        const tensor_maps &maps = stream_of<true>(by, within);
        fetch_rows<D, ROWS>(to, row, maps, within, barrier);
    }
}
/* 16 rows of a tile of ROWS, from `row` on, the other way, in the thread's group that puts_end() closes. */
template <int D, int ROWS, bool TWO>
static __device__ __forceinline__ void put_rows(const streams &to, place at, uint32_t tile, int row)
{
    using P = panels<D>;
    const tensor_maps &maps = stream_of<TWO>(to, at);
#pragma unroll
    for (int p = 0; p < P::COUNT; p++)
        put_box(&maps.main, p * COLUMNS, at, tile + p * ROWS * ROW + row * ROW);
    if (P::REST) put_box(&maps.rest, P::COUNT * COLUMNS, at, rest_of<D, ROWS>(tile, row));
}
/* Boxes of `rows` rows of a tensor (B, T, H, D). */
template <int D> static tensor_maps maps_of(const lg_tensor *t, int rows)
{
    int64_t stride = lg_row_stride(t, 2) * 2;
    cuuint64_t size[] = {(cuuint64_t)D, (cuuint64_t)t->dim[2], (cuuint64_t)t->dim[1],
                         (cuuint64_t)t->dim[0]};
    cuuint64_t pitch[] = {2 * D, (cuuint64_t)stride, (cuuint64_t)(stride * t->dim[1])};
    cuuint32_t box[] = {COLUMNS, 1, (cuuint32_t)rows, 1};
    tensor_maps maps = {};
    maps.main = described(t, 4, size, pitch, box, CU_TENSOR_MAP_SWIZZLE_128B);
    box[0] = D % COLUMNS;
    if (panels<D>::REST) maps.rest = described(t, 4, size, pitch, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    return maps;
}

/* Does anybody's second stream lie apart? One sample's tokens lie together. */
static inline bool lie_apart(const lg_tensor &q, int first_queries, int first_keys)
{
    return q.dim[0] > 1 && (first_queries || first_keys);
}
/* Of B samples of T tokens, of which each has `first` of the first stream, or 0. */
template <int D> static streams streams_of(const lg_tensor *t, int first, int rows)
{
    const int64_t B = t->dim[0], T = t->dim[1], step = lg_row_stride(t, 2);
    if (!first || B == 1) {
        const tensor_maps all = maps_of<D>(t, rows);
        return {{all, all}, ONE_STREAM};
    }
    lg_tensor x = *t, y = *t;
    x.dim[1] = first, y.dim[1] = T - first;
    y.data = (char *)t->data + (size_t)(B * first * step) * lg_dtype_bytes(t->dtype);
    return {{maps_of<D>(&x, rows), maps_of<D>(&y, rows)}, first};
}
template <int D> static tile_maps tiles_of(const lg_tensor *t, int first, int rows)
{
    return {streams_of<D>(t, first, rows), streams_of<D>(t, first, SOME_ROWS)};
}
/* Does every tile of so many rows have those of one stream? */
static inline bool all_whole(const tile_maps &x, int rows)
{
    return x.whole.first == ONE_STREAM || x.whole.first % rows == 0;
}
/* May a stream end there? */
static inline bool ends_on_rows(int first)
{
    return first % SOME_ROWS == 0;
}

/* ---- places ---- */

/* The n-th use of one of N places, whose pairs of barriers begin at `pairs`: until it has come, or is free. */
template <int N> static __device__ __forceinline__ uint32_t came(uint32_t pairs, int n)
{
    return pairs + n % N * 16;
}
template <int N> static __device__ __forceinline__ void wait_came(uint32_t pairs, int n)
{
    mbarrier_wait(came<N>(pairs, n), n / N % 2);
}
template <int N> static __device__ __forceinline__ void wait_free(uint32_t pairs, int n)
{
    mbarrier_wait(came<N>(pairs, n) + 8, n / N % 2 ^ 1);
}

/* ---- operands ---- */

/* x, not known to be the same: what is computed from it is computed where it is used. Else descriptors of all tiles
 * are held in registers. */
static __device__ __forceinline__ uint32_t again(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
/* operand_start of the panels of a tile of ROWS rows, from `row` on, a multiple of 8. */
template <int ROWS> static __device__ __forceinline__ uint32_t tile_start(uint32_t tile, int row)
{
    return again(operand_start(tile + row * ROW, ROWS * ROW));
}
/* Descriptors, from such a `low`: of step s of 16 columns, over which a product sums; of step s of 16 rows, over which
 * it sums when it takes the tile transposed. */
template <int ROWS> static __device__ __forceinline__ uint64_t columns_at(uint32_t low, int s)
{
    return operand_at(low + (s / 4 * ROWS * ROW + s % 4 * 32) / 16, 8 * ROW, 1);
}
static __device__ __forceinline__ uint64_t rows_at(uint32_t low, int s)
{
    return operand_at(low + s * ROW, 8 * ROW, 1);
}
/* The last 8 columns at rest_of, with 8 others: for a left operand ZEROS bytes of zeros behind it, for a right one the
 * same 8 again; transposed, alone. */
static __device__ __forceinline__ uint64_t left_rest(uint32_t rest, uint32_t zeros)
{
    return operand(rest, (int)(zeros - rest), 128, 0);
}
static __device__ __forceinline__ uint64_t right_rest(uint32_t rest)
{
    return operand(rest, 0, 128, 0);
}
static __device__ __forceinline__ uint64_t rest_rows_at(uint32_t rest, int s)
{
    return operand(rest + s * 16 * REST_ROW, 128, 0, 0);
}

/* ---- a product's results ---- */

/* The warp's 16 rows of D columns of a product's result, times factor, to those from `row` on of a tile of ROWS. */
template <typename T, int D, int ROWS>
static __device__ __forceinline__ void stage_rows(uint32_t tile, int row, const float (&x)[D / 2],
                                                  float factor)
{
    int lane = threadIdx.x % WARP, r = row + lane % 16;
    uint32_t to = tile + r * ROW + (lane / 16 ^ r % 8) * 16;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        uint32_t p[4] = {};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * j + 2 * e < D / 2)
                p[e] = packed(x[4 * j + 2 * e] * factor, x[4 * j + 2 * e + 1] * factor, T());
        if (j + 1 < D / 8) /* an even number of 16 bytes more is the same by xor */
            store_matrices((to ^ j % 8 * 16) + j / 8 * ROWS * ROW, p);
        else
            store_two_matrices(rest_of<D, ROWS>(tile, r), p);
    }
}
