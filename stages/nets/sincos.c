/* See sincos.h.
 *
 * Token (i, j) gets D/2 features of its column j (yes, the column first, as diffusers' comment "here w goes first" says),
 * then D/2 of its row i: each D/4 sines, then D/4 cosines. diffusers: coordinate / (grid / base_size) /
 * interpolation_scale; coordinates are fp32 there, products and sines fp64. */
#include "stages/nets/sincos.h"
#include <math.h>
#include <string.h>

/* Of row, or column, i of `count`. */
static float coordinate(const struct lg_grid *grid, int i, int count)
{
    return (float)i / (float)(count / grid->base) / (float)grid->scale;
}

static double angle(float at, int k, int quarter)
{
    return (double)at / pow(10000.0, (double)k / quarter);
}

float lg_sincos(const struct lg_grid *grid, int D, size_t e)
{
    const int token = (int)(e / (size_t)D), feature = (int)(e % (size_t)D), quarter = D / 4;
    const int row = token / grid->columns, column = token % grid->columns;
    const float at = feature < 2 * quarter ? coordinate(grid, column, grid->columns)
                                           : coordinate(grid, row, grid->rows);
    const double a = angle(at, feature % quarter, quarter);
    return (float)(feature / quarter % 2 ? cos(a) : sin(a));
}

/* Of a row or a column at `at`: sines, then cosines. */
static void waves(float at, int quarter, float *out)
{
    for (int k = 0; k < quarter; k++) {
        const double a = angle(at, k, quarter);
        out[k] = (float)sin(a);
        out[quarter + k] = (float)cos(a);
    }
}

/* Columns are the same in every row, and a row's in each of its columns: they are worked out once (132,000 tokens of width 2048 took
 * ten seconds). */
void lg_net_positions(const struct lg_grid *grid, int D, float *ret)
{
    const int quarter = D / 4;
    const size_t half = (size_t)(2 * quarter), width = (size_t)D;
    const size_t columns = (size_t)grid->columns;
    for (int j = 0; j < grid->columns; j++)
        waves(coordinate(grid, j, grid->columns), quarter, ret + (size_t)j * width);
    for (int i = 0; i < grid->rows; i++) {
        float *const row = ret + (size_t)i * columns * width;
        waves(coordinate(grid, i, grid->rows), quarter, row + half);
        for (size_t j = 0; j < columns; j++) {
            if (i) memcpy(row + j * width, ret + j * width, half * sizeof *ret);
            if (j) memcpy(row + j * width + half, row + half, half * sizeof *ret);
        }
    }
}

void lg_net_frame_positions(int first, int count, int D, float *ret)
{
    const int half = D / 2;
    for (int i = 0; i < count; i++, ret += D) {
        for (int k = 0; k < half; k++) {
            const double a = angle((float)(first + i), k, half);
            ret[k] = (float)sin(a);
            ret[half + k] = (float)cos(a);
        }
    }
}
