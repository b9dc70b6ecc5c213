/* Decoded frames to RGB; see clip_rgb.h. Matrices and ranges are those of ITU-T H.273. */
#include "stages/io/clip_rgb.h"
#include <stdlib.h>
#include <string.h>

/* Samples of more bits are cut to DEPTH_MAX, so that sums of three products have 32 bits. */
enum { FRACTION = 16 /* bits of a factor on 8-bit samples */, DEPTH_MAX = 12 };

/* RGB in units of 2^-bits of a step: y (Y - y0) + of Cb - c0 and Cr - c0. */
struct matrix {
    int32_t y, red_cr, green_cb, green_cr, blue_cb;
    int y0, c0, bits;
};

/* A row of each component, then of R, G and B. */
struct lines {
    uint16_t *in[4];
    uint8_t *out[3];
};

static int64_t divided(int64_t a, int64_t b)
{
    return (2 * a + (a < 0 ? -b : b)) / (2 * b);
}

static struct matrix matrix_of(const struct lg_clip_planes *p)
{
    /* Kr and Kb in 1 / 10000 */
    static const int64_t weights[][2] = {[LG_CLIP_BT601] = {2990, 1140},
                                         [LG_CLIP_BT709] = {2126, 722},
                                         [LG_CLIP_BT2020] = {2627, 593},
                                         [LG_CLIP_SMPTE240M] = {2120, 870},
                                         [LG_CLIP_FCC] = {3000, 1100}};
    const int depth = LG_MIN(p->of[0].depth, DEPTH_MAX);
    const bool is_rgb = p->colours == LG_CLIP_RGB;
    const int64_t r = is_rgb ? 0 : weights[p->colours][0], b = is_rgb ? 0 : weights[p->colours][1];
    const int64_t g = 10000 - r - b, steps = INT64_C(1) << (depth - 8);
    const int64_t luma = p->is_full ? (INT64_C(1) << depth) - 1 : 219 * steps;
    const int64_t chroma = p->is_full ? (INT64_C(1) << depth) - 1 : 224 * steps;
    const int bits = FRACTION + depth - 8;
    const int64_t white = INT64_C(255) << bits; /* below 2^32 */
    return (struct matrix){
        .y = (int32_t)divided(white, luma),
        .red_cr = (int32_t)divided(2 * (10000 - r) * white, 10000 * chroma),
        .green_cb = (int32_t)divided(-2 * b * (10000 - b) * white, g * 10000 * chroma),
        .green_cr = (int32_t)divided(-2 * r * (10000 - r) * white, g * 10000 * chroma),
        .blue_cb = (int32_t)divided(2 * (10000 - b) * white, 10000 * chroma),
        .y0 = p->is_full ? 0 : (int)(16 * steps),
        .c0 = 1 << (depth - 1),
        .bits = bits};
}

/* Compiled for each layout that is called with constants, so that it is a loop over whole vectors. */
static inline __attribute__((always_inline)) void unpack_bytes(const uint8_t *row, int step,
                                                               int log2_x, int width, uint16_t *ret)
{
    for (int x = 0; x < width; x++) ret[x] = row[(ptrdiff_t)(x >> log2_x) * step];
}

static void unpack_words(const struct lg_clip_component *c, const uint8_t *row, int width,
                         uint16_t *ret)
{
    const int cut = LG_MAX(c->depth - DEPTH_MAX, 0);
    const unsigned mask = (1u << c->depth) - 1;
    for (int x = 0; x < width; x++) {
        const uint8_t *at = row + (ptrdiff_t)(x >> c->log2_x) * c->step;
        const unsigned v = (unsigned)at[0] | (unsigned)at[1] << 8;
        ret[x] = (uint16_t)((v >> c->shift & mask) >> cut);
    }
}

/* Row y of a component, a sample for each pixel. */
static void unpack(const struct lg_clip_component *c, int y, int width, uint16_t *ret)
{
    const uint8_t *row = c->data + (ptrdiff_t)(y >> c->log2_y) * c->stride;
    if (c->depth > 8)
        unpack_words(c, row, width, ret);
    else if (c->step == 1 && c->log2_x == 0)
        unpack_bytes(row, 1, 0, width, ret);
    else if (c->step == 1 && c->log2_x == 1)
        unpack_bytes(row, 1, 1, width, ret);
    else
        unpack_bytes(row, c->step, c->log2_x, width, ret);
}

static inline uint8_t clipped(int32_t v, int bits)
{
    v = (v + (1 << (bits - 1))) >> bits;
    return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
}

static void convert_yuv(const struct matrix *m, const struct lines *l, int width)
{
    const uint16_t *Y = l->in[0], *Cb = l->in[1], *Cr = l->in[2];
    uint8_t *r = l->out[0], *g = l->out[1], *b = l->out[2];
    const struct matrix k = *m;
#pragma GCC ivdep /* the lines do not overlap */
    for (int x = 0; x < width; x++) {
        const int32_t y = k.y * (Y[x] - k.y0), cb = Cb[x] - k.c0, cr = Cr[x] - k.c0;
        r[x] = clipped(y + k.red_cr * cr, k.bits);
        g[x] = clipped(y + k.green_cb * cb + k.green_cr * cr, k.bits);
        b[x] = clipped(y + k.blue_cb * cb, k.bits);
    }
}

static void convert_each(const struct matrix *m, const struct lines *l, int n, int width)
{
    const struct matrix k = *m;
    for (int c = 0; c < 3; c++) {
        const uint16_t *in = l->in[n < 3 ? 0 : c];
        uint8_t *out = l->out[c];
        for (int x = 0; x < width; x++) out[x] = clipped(k.y * (in[x] - k.y0), k.bits);
    }
}

/* Over white; opaque: what the opacity is of opaque pixels. */
static void lay_over_white(const uint16_t *opacity, unsigned opaque, int width, uint8_t *rgb)
{
    for (int x = 0; x < width; x++, rgb += 3)
        for (int c = 0; c < 3; c++)
            rgb[c] = (uint8_t)((rgb[c] * (uint64_t)opacity[x] + 255u * (opaque - opacity[x]) +
                                opaque / 2) /
                               opaque);
}

static void interleave(const struct lines *l, int width, uint8_t *rgb)
{
    const uint8_t *r = l->out[0], *g = l->out[1], *b = l->out[2];
    for (int x = 0; x < width; x++) {
        rgb[3 * x] = r[x];
        rgb[3 * x + 1] = g[x];
        rgb[3 * x + 2] = b[x];
    }
}

static void convert_row(const struct matrix *m, const struct lg_clip_planes *p,
                        const struct lines *l, uint8_t *rgb)
{
    if (p->colours == LG_CLIP_RGB || p->n < 3)
        convert_each(m, l, p->n, p->width);
    else
        convert_yuv(m, l, p->width);
    interleave(l, p->width, rgb);
    if (p->n == 4)
        lay_over_white(l->in[3], (1u << LG_MIN(p->of[3].depth, DEPTH_MAX)) - 1, p->width, rgb);
}

int lg_clip_rgb(const struct lg_clip_planes *p, lg_picture *ret)
{
    const struct matrix m = matrix_of(p);
    const size_t w = (size_t)p->width;
    struct lines l;
    LG_ASSERT((p->n == 1 || p->n == 3 || p->n == 4) && p->of[0].depth >= 8 && p->of[0].depth <= 16);
    LG_TRY(lg_picture_reserve(ret, p->width, p->height));
    uint16_t *lines = malloc(4 * w * sizeof(uint16_t) + 3 * w);
    if (!lines) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a row of a picture");
    for (size_t c = 0; c < 4; c++) l.in[c] = lines + c * w;
    for (size_t c = 0; c < 3; c++) l.out[c] = (uint8_t *)(lines + 4 * w) + c * w;
    for (int y = 0; y < p->height; y++) {
        for (int c = 0; c < p->n; c++) unpack(&p->of[c], y, p->width, l.in[c]);
        convert_row(&m, p, &l, ret->rgb + 3 * (size_t)y * w);
    }
    free(lines);
    return 0;
}
