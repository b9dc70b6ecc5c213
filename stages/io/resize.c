/* Separable Lanczos-3 resize; see resize.h.
 *
 * Design: for each output position of an axis, the taps are the input positions within three lobes
 * (times the scale when shrinking) of its centre, weighted by the filter and normalised to one; at
 * the border the missing taps are left out. Weights are computed in double and used as float; sums
 * are at most a few hundred terms of bytes, so their error is some 1e-4 of a level. The horizontal
 * pass takes GROUP rows at a time, turned so that each is a lane of the vectors, and keeps the rows
 * that an output needs in a ring; the vertical pass sums whole rows (both in resize_passes.h).
 *
 * An axis that keeps its size has the single weight 1 and copies exactly; where both do, rows are
 * given as they are. */
#include "stages/io/resize.h"
#include "stages/io/wide.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOBES = 3,
    GROUP = 8,    /* rows of a horizontal pass */
    CHUNK = 64,   /* bytes of each that are turned at once */
    PADDING = 32, /* rows are whole blocks of the vertical pass */
    LINE = 64     /* bytes of a line of a cache */
};

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

/* Outputs [o0, o0 + count) of an axis of `in` positions resized to `full`; scratch: taps_max numbers. */
static void axis_fill(struct axis *a, int in, int full, int o0, int count, double *scratch)
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
        for (int k = from; k < to; k++)
            sum += scratch[k - from] = lanczos((k + 0.5 - center) / stretch);
        for (int k = from; k < to; k++) out[k - from] = (float)(scratch[k - from] / sum);
        a->first[i] = from;
        a->n[i] = to - from;
    }
}

/* Behind the last input of `count` outputs. */
static int axis_end(const struct axis *a, int count)
{
    return a->first[count - 1] + a->n[count - 1];
}

struct work {
    struct axis x, y;
    double *scratch; /* of axis_fill */
    float *columns;  /* (3 * columns in use, GROUP) */
    float *sums;     /* (3 * out_w, GROUP) */
    float *ring;     /* (ring_rows, stride), each row (out_w, 3) */
    size_t ring_rows, stride, sums_bytes;
    const float **tap; /* rows of one output */
    float *row_sums;   /* (out_w, 3) */
    uint8_t *row;      /* (out_w, 3) */
};

static inline float *ring_row(const struct work *w, int y)
{
    return w->ring + (size_t)y % w->ring_rows * w->stride;
}

/* Rounded, then clipped: whole numbers are clipped without branches. */
static inline int to_level(float x)
{
    const int level = (int)(x + 0.5f);
    return level < 0 ? 0 : level > 255 ? 255 : level;
}

typedef float v4 __attribute__((vector_size(16), may_alias));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int v4i __attribute__((vector_size(16)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (v4i){__VA_ARGS__})
#endif

/* Four rows of four floats to four columns. */
LG_BODY void transpose(const float *in, size_t in_stride, float *out, size_t out_stride)
{
    const v4 a = *(const v4 *)in, b = *(const v4 *)(in + in_stride);
    const v4 c = *(const v4 *)(in + 2 * in_stride), d = *(const v4 *)(in + 3 * in_stride);
    const v4 ab01 = PICK(a, b, 0, 4, 1, 5), ab23 = PICK(a, b, 2, 6, 3, 7);
    const v4 cd01 = PICK(c, d, 0, 4, 1, 5), cd23 = PICK(c, d, 2, 6, 3, 7);
    *(v4 *)out = PICK(ab01, cd01, 0, 1, 4, 5);
    *(v4 *)(out + out_stride) = PICK(ab01, cd01, 2, 3, 6, 7);
    *(v4 *)(out + 2 * out_stride) = PICK(ab23, cd23, 0, 1, 4, 5);
    *(v4 *)(out + 3 * out_stride) = PICK(ab23, cd23, 2, 3, 6, 7);
}

#define VECTOR 4
#define TARGET
#define PASS(name) name##_4
#include "stages/io/resize_passes.h"
#if LG_HAS_WIDE
#undef VECTOR
#undef TARGET
#undef PASS
#define VECTOR     8
#define TARGET     LG_WIDE
#define PASS(name) name##_8
#include "stages/io/resize_passes.h"
#endif

/* Takes `bytes` from the scratch at *at, in whole lines of a cache. */
static void *take(size_t *at, char *base, size_t bytes)
{
    void *p = base ? base + *at : NULL;
    *at += (bytes + LINE - 1) / LINE * LINE;
    return p;
}

/* Lays the working memory out; with base NULL just counts it. */
static size_t layout(struct work *w, const struct lg_resize_args *a, char *base)
{
    const size_t out_w = (size_t)a->out_w, out_h = (size_t)a->out_h;
    w->x.taps_max = axis_taps_max(a->width, a->full_w);
    w->y.taps_max = axis_taps_max(a->height, a->full_h);
    const size_t x_taps = (size_t)w->x.taps_max, y_taps = (size_t)w->y.taps_max;
    /* A whole line more: rows should not all lie in the same sets of a cache. */
    w->stride = (3 * out_w + PADDING - 1) / PADDING * PADDING + LINE / sizeof(float);
    /* Whole groups that have all rows of an output, wherever it begins. */
    w->ring_rows = ((LG_MIN(y_taps, (size_t)a->height) + GROUP - 2) / GROUP + 1) * GROUP;
    w->sums_bytes = (3 * out_w + 3) * GROUP * sizeof(float);
    size_t at = 0;
    w->x.first = take(&at, base, out_w * sizeof(int));
    w->x.n = take(&at, base, out_w * sizeof(int));
    w->x.weight = take(&at, base, out_w * x_taps * sizeof(float));
    w->y.first = take(&at, base, out_h * sizeof(int));
    w->y.n = take(&at, base, out_h * sizeof(int));
    w->y.weight = take(&at, base, out_h * y_taps * sizeof(float));
    w->scratch = take(&at, base, LG_MAX(x_taps, y_taps) * sizeof(double));
    w->columns = take(&at, base, (3 * (size_t)a->width + 3) * GROUP * sizeof(float));
    w->sums = take(&at, base, w->sums_bytes);
    w->ring = take(&at, base, w->ring_rows * w->stride * sizeof(float));
    w->tap = take(&at, base, y_taps * sizeof(float *));
    w->row_sums = take(&at, base, w->stride * sizeof(float));
    w->row = take(&at, base, 3 * out_w);
    return at;
}

/* The window as it is. */
static void copy_rows(const struct lg_resize_args *a, lg_resize_row *on_row, void *arg)
{
    for (int y = 0; y < a->out_h; y++)
        on_row(arg, y, a->rgb + ((size_t)(a->y0 + y) * (size_t)a->width + (size_t)a->x0) * 3);
}

/* Working memory in that layout, with the weights in it. */
static int prepare(struct work *w, const struct lg_resize_args *a, lg_resize_scratch *scratch)
{
    const int weights_of[] = {a->width, a->height, a->full_w, a->full_h,
                              a->x0,    a->y0,     a->out_w,  a->out_h};
    _Static_assert(sizeof weights_of == sizeof scratch->weights_of, "all that they depend on");
    const size_t bytes = layout(w, a, NULL);
    if (bytes > scratch->capacity) {
        lg_resize_free(scratch);
        scratch->data = aligned_alloc(LINE, bytes);
        if (!scratch->data) return LG_FAIL(LG_ERR_NOSPACE, "no memory to resize a picture");
        scratch->capacity = bytes;
    }
    layout(w, a, scratch->data);
    if (memcmp(weights_of, scratch->weights_of, sizeof weights_of) == 0) return 0;
    memcpy(scratch->weights_of, weights_of, sizeof weights_of);
    axis_fill(&w->x, a->width, a->full_w, a->x0, a->out_w, w->scratch);
    axis_fill(&w->y, a->height, a->full_h, a->y0, a->out_h, w->scratch);
    /* What pads rows is summed as well. */
    memset(w->sums, 0, w->sums_bytes);
    memset(w->ring, 0, w->ring_rows * w->stride * sizeof(float));
    return 0;
}

int lg_resize_rows(const struct lg_resize_args *a, lg_resize_scratch *scratch,
                   lg_resize_row *on_row, void *arg)
{
    LG_ASSERT(a->width > 0 && a->height > 0 && a->out_w > 0 && a->out_h > 0);
    LG_ASSERT(a->x0 >= 0 && a->x0 + a->out_w <= a->full_w);
    LG_ASSERT(a->y0 >= 0 && a->y0 + a->out_h <= a->full_h);
    if (a->width == a->full_w && a->height == a->full_h) {
        copy_rows(a, on_row, arg);
        return 0;
    }
    struct work w;
    LG_TRY(prepare(&w, a, scratch));
#if LG_HAS_WIDE
    if (lg_wide()) {
        resize_8(&w, a, on_row, arg);
        return 0;
    }
#endif
    resize_4(&w, a, on_row, arg);
    return 0;
}

struct picture {
    uint8_t *rgb;
    size_t row_bytes;
};

static void keep_row(void *arg, int y, const uint8_t *rgb)
{
    const struct picture *p = arg;
    memcpy(p->rgb + (size_t)y * p->row_bytes, rgb, p->row_bytes);
}

int lg_resize(const struct lg_resize_args *a, lg_resize_scratch *scratch)
{
    LG_TRY(lg_resize_rows(a, scratch, keep_row,
                          &(struct picture){.rgb = a->out, .row_bytes = 3 * (size_t)a->out_w}));
    return 0;
}

void lg_resize_free(lg_resize_scratch *scratch)
{
    free(scratch->data);
    *scratch = (lg_resize_scratch){0};
}
