/* Small products for attention: C (m, n) = A (m, k) B (k, n) (+ C).
 *
 * A is read one element at a time at any strides (so A^T costs nothing); B and C have contiguous,
 * padded rows: n is a multiple of LG_VW. A tile of C lives in registers over the whole of k, so
 * each element is one chain of multiply-adds in the order of k: its bits depend neither on the tile
 * that computed it nor on the other rows. No blocking over k or n beyond that: the operands of a
 * head fit the second cache.
 */
#pragma once
#include "kernels/host/isa.h"

struct small_gemm {
    int64_t m, n, k;
    const float *a;
    int64_t a_row, a_col; /* strides */
    const float *b;
    int64_t b_row;
    float *c;
    int64_t c_row;
    bool accumulate;
};

/* Registers: 32 with AVX-512, else 16; a tile takes rows * vectors of them, plus vectors + 1. */
#if LG_VW == 16
enum { TILE_VECTORS = 4, TILE_ROWS = 6, TILE_ROWS_NARROW = 8 };
#else
enum { TILE_VECTORS = 2, TILE_ROWS = 6, TILE_ROWS_NARROW = 6 };
#endif

LG_INLINE void small_gemm_tile(const struct small_gemm *g, int64_t i, int64_t j, const int rows,
                               const int vectors)
{
    vf acc[TILE_ROWS_NARROW][TILE_VECTORS];
    const float *a = g->a + i * g->a_row, *b = g->b + j;
    const int64_t a_row = g->a_row, a_col = g->a_col, b_row = g->b_row, k = g->k;
    float *c = g->c + i * g->c_row + j;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[r][v] = g->accumulate ? vf_load(c + r * g->c_row + v * LG_VW) : vf_set(0);
    for (int64_t p = 0; p < k; p++, a += a_col, b += b_row) {
        vf bv[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) bv[v] = vf_load(b + v * LG_VW);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vf av = vf_set(a[r * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[r][v] = vf_fma(av, bv[v], acc[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vf_store(c + r * g->c_row + v * LG_VW, acc[r][v]);
}

LG_INLINE void small_gemm_strip(const struct small_gemm *g, int64_t j, const int vectors)
{
    int64_t i = 0;
    if (vectors <= 2)
        for (; i + TILE_ROWS_NARROW <= g->m; i += TILE_ROWS_NARROW)
            small_gemm_tile(g, i, j, TILE_ROWS_NARROW, vectors);
    for (; i + TILE_ROWS <= g->m; i += TILE_ROWS) small_gemm_tile(g, i, j, TILE_ROWS, vectors);
    for (; i + 4 <= g->m; i += 4) small_gemm_tile(g, i, j, 4, vectors);
    for (; i + 2 <= g->m; i += 2) small_gemm_tile(g, i, j, 2, vectors);
    if (i < g->m) small_gemm_tile(g, i, j, 1, vectors);
}

static void small_gemm(const struct small_gemm *g)
{
    int64_t j = 0, step = TILE_VECTORS * LG_VW;
    for (; j + step <= g->n; j += step) small_gemm_strip(g, j, TILE_VECTORS);
    switch ((g->n - j) / LG_VW) {
#if LG_VW == 16
    case 3:
        small_gemm_strip(g, j, 3);
        break;
    case 2:
        small_gemm_strip(g, j, 2);
        break;
#endif
    case 1:
        small_gemm_strip(g, j, 1);
        break;
    default:
        break;
    }
}
