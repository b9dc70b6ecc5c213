/* Separable Lanczos-3 resize; see resize.h.
 *
 * Design: for each output position of an axis, the taps are the input positions within three lobes
 * (times the scale when shrinking) of its centre, weighted by the filter and normalised to one; at
 * the border the missing taps are left out. Weights are computed in double and used as float; sums
 * are at most a few hundred terms of bytes, so their error is some 1e-4 of a level. The horizontal
 * pass handles one pixel as a vector of four floats (red, green, blue, unused), over just the rows
 * that the vertical pass will read; the vertical pass sums whole rows.
 *
 * An axis that keeps its size has the single weight 1 and copies exactly. */
#include "stages/io/resize.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef float v4 __attribute__((vector_size(16)));

enum { LOBES = 3 };

/* Taps of output i: input [first[i], first[i] + n[i]), weights at weight[i * taps_max]. */
struct axis {
    int taps_max;
    int *first, *n;
    float *weight;
};

static double lanczos(double x)
{
    x = fabs(x);
    if (x < 1e-12) return 1;
    if (x >= LOBES) return 0;
    double p = M_PI * x;
    return LOBES * sin(p) * sin(p / LOBES) / (p * p);
}

static int axis_taps_max(int in, int full)
{
    double stretch = in > full ? (double)in / full : 1;
    return 2 * (int)ceil(LOBES * stretch) + 1;
}

/* Outputs [o0, o0 + count) of an axis of `in` positions resized to `full`. */
static void axis_fill(struct axis *a, int in, int full, int o0, int count)
{
    double scale = (double)in / full, stretch = LG_MAX(scale, 1.0);
    for (int i = 0; i < count; i++) {
        if (in == full) {
            a->first[i] = o0 + i;
            a->n[i] = 1;
            a->weight[(size_t)i * (size_t)a->taps_max] = 1;
            continue;
        }
        double center = (o0 + i + 0.5) * scale, reach = LOBES * stretch, sum = 0;
        int from = LG_MAX((int)floor(center - reach + 0.5), 0);
        int to = LG_MIN((int)floor(center + reach + 0.5), in);
        if (to - from > a->taps_max) to = from + a->taps_max;
        float *out = a->weight + (size_t)i * (size_t)a->taps_max;
        for (int k = from; k < to; k++) sum += lanczos((k + 0.5 - center) / stretch);
        for (int k = from; k < to; k++)
            out[k - from] = (float)(lanczos((k + 0.5 - center) / stretch) / sum);
        a->first[i] = from;
        a->n[i] = to - from;
    }
}

static inline float to_level(float x)
{
    x = x < 0 ? 0 : x > 255 ? 255 : x;
    return (float)(int)(x + 0.5f);
}

/* One row: (width, 3) bytes to (out_w) vectors of whole levels. */
static void horizontal(const uint8_t *rgb, int width, const struct axis *a, int out_w, v4 *row,
                       v4 *out)
{
    for (int x = 0; x < width; x++) row[x] = (v4){rgb[3 * x], rgb[3 * x + 1], rgb[3 * x + 2], 0};
    for (int o = 0; o < out_w; o++) {
        const float *w = a->weight + (size_t)o * (size_t)a->taps_max;
        const v4 *in = row + a->first[o];
        v4 sum = {0, 0, 0, 0};
        for (int k = 0; k < a->n[o]; k++) sum += in[k] * w[k];
        for (int c = 0; c < 3; c++) sum[c] = to_level(sum[c]);
        out[o] = sum;
    }
}

static void vertical(const v4 *rows, const struct axis *a, int o, int y_first, int out_w, v4 *sum,
                     uint8_t *out)
{
    const float *w = a->weight + (size_t)o * (size_t)a->taps_max;
    const v4 *in = rows + (size_t)(a->first[o] - y_first) * (size_t)out_w;
    for (int x = 0; x < out_w; x++) sum[x] = in[x] * w[0];
    for (int k = 1; k < a->n[o]; k++) {
        in += out_w;
        for (int x = 0; x < out_w; x++) sum[x] += in[x] * w[k];
    }
    for (int x = 0; x < out_w; x++)
        for (int c = 0; c < 3; c++) out[3 * x + c] = (uint8_t)to_level(sum[x][c]);
}

/* Takes `bytes` from the scratch at *at, in whole vectors. */
static void *take(size_t *at, char *base, size_t bytes)
{
    void *p = base ? base + *at : NULL;
    *at += (bytes + sizeof(v4) - 1) / sizeof(v4) * sizeof(v4);
    return p;
}

struct work {
    struct axis x, y;
    v4 *row, *sum, *rows;
};

/* Lays the working memory out; with base NULL just counts it. */
static size_t layout(struct work *w, const struct lg_resize_args *a, size_t n_rows, char *base)
{
    size_t at = 0, out_w = (size_t)a->out_w, out_h = (size_t)a->out_h;
    w->x.taps_max = axis_taps_max(a->width, a->full_w);
    w->y.taps_max = axis_taps_max(a->height, a->full_h);
    w->x.first = take(&at, base, out_w * sizeof(int));
    w->x.n = take(&at, base, out_w * sizeof(int));
    w->x.weight = take(&at, base, out_w * (size_t)w->x.taps_max * sizeof(float));
    w->y.first = take(&at, base, out_h * sizeof(int));
    w->y.n = take(&at, base, out_h * sizeof(int));
    w->y.weight = take(&at, base, out_h * (size_t)w->y.taps_max * sizeof(float));
    w->row = take(&at, base, (size_t)a->width * sizeof(v4));
    w->sum = take(&at, base, out_w * sizeof(v4));
    w->rows = take(&at, base, n_rows * out_w * sizeof(v4));
    return at;
}

int lg_resize(const struct lg_resize_args *a, lg_resize_scratch *scratch)
{
    LG_ASSERT(a->width > 0 && a->height > 0 && a->out_w > 0 && a->out_h > 0);
    LG_ASSERT(a->x0 >= 0 && a->x0 + a->out_w <= a->full_w);
    LG_ASSERT(a->y0 >= 0 && a->y0 + a->out_h <= a->full_h);
    /* Input rows within reach of the first and last output row; all of them at most. */
    double scale = (double)a->height / a->full_h, reach = LOBES * LG_MAX(scale, 1.0) + 1;
    int first = LG_MAX((int)floor(a->y0 * scale - reach), 0);
    int end = LG_MIN((int)ceil((a->y0 + a->out_h) * scale + reach), a->height);
    struct work w;
    size_t bytes = layout(&w, a, (size_t)(end - first), NULL);
    if (bytes > scratch->capacity) {
        lg_resize_free(scratch);
        scratch->data = aligned_alloc(sizeof(v4), bytes);
        if (!scratch->data) return LG_FAIL(LG_ERR_NOSPACE, "no memory to resize a picture");
        scratch->capacity = bytes;
    }
    layout(&w, a, (size_t)(end - first), scratch->data);
    axis_fill(&w.x, a->width, a->full_w, a->x0, a->out_w);
    axis_fill(&w.y, a->height, a->full_h, a->y0, a->out_h);
    for (int y = first; y < end; y++)
        horizontal(a->rgb + (size_t)y * (size_t)a->width * 3, a->width, &w.x, a->out_w, w.row,
                   w.rows + (size_t)(y - first) * (size_t)a->out_w);
    for (int y = 0; y < a->out_h; y++)
        vertical(w.rows, &w.y, y, first, a->out_w, w.sum,
                 a->out + (size_t)y * (size_t)a->out_w * 3);
    return 0;
}

void lg_resize_free(lg_resize_scratch *scratch)
{
    free(scratch->data);
    *scratch = (lg_resize_scratch){0};
}
