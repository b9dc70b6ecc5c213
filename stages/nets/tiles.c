/* See tiles.h. The last tile may share more with the one before it than the others do: then it counts nothing where it
 * begins, and hands over at the end of that one as all do. */
#include "stages/nets/tiles.h"
#include "base/check.h"

struct lg_tiles lg_tiles_cut(int cells, int size)
{
    struct lg_tiles t = {.n = 1, .size = cells};
    if (size <= 0 || size >= cells) return t;
    t.size = LG_MAX(size, 2); /* of one cell none could be shared */
    if (t.size >= cells) return (struct lg_tiles){.n = 1, .size = cells};
    t.overlap = LG_MAX(t.size / 4, 1);
    const int step = t.size - t.overlap;
    t.n = (cells - t.overlap + step - 1) / step;
    LG_ASSERT(t.n <= LG_TILES_MAX);
    for (int i = 0; i < t.n; i++) t.at[i] = LG_MIN(i * step, cells - t.size);
    return t;
}

/* 0 before `from`, then rising over n to 1. */
static double ramp(int pixel, int from, int n)
{
    const double w = (pixel - from + 0.5) / n;
    return w < 0 ? 0 : w > 1 ? 1 : w;
}

void lg_tiles_weights(const struct lg_tiles *t, int i, int factor, double *ret)
{
    const int n = t->overlap * factor, first = t->at[i] * factor;
    for (int k = 0; k < t->size * factor; k++) {
        const int pixel = first + k;
        ret[k] = 1;
        if (i > 0) ret[k] *= ramp(pixel, (t->at[i - 1] + t->size) * factor - n, n);
        if (i + 1 < t->n) ret[k] *= 1 - ramp(pixel, (t->at[i] + t->size) * factor - n, n);
    }
}
