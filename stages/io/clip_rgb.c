/* Decoded frames to RGB; see clip_rgb.h. Matrices and ranges are those of ITU-T H.273.
 *
 * Design: a row at a time goes through lines: a sample of each component for each pixel, from them R, G and B, each laid over
 * white where the row is not opaque, then put together. Every step is a plain loop over lines, which the compiler turns into one
 * over whole vectors. What Cb and Cr contribute is multiplied once for all rows that share their samples. */
#include "stages/io/clip_rgb.h"
#include "stages/io/wide.h"
#include <stdlib.h>
#include <string.h>

/* Samples of more bits are cut to DEPTH_MAX, so that sums of three products have 32 bits. */
enum { FRACTION = 16 /* bits of a factor on 8-bit samples */, DEPTH_MAX = 12 };

/* RGB in units of 2^-bits of a step: y (Y - y0) + of Cb - c0 and Cr - c0. */
struct matrix {
    int32_t y, red_cr, green_cb, green_cr, blue_cb;
    int y0, c0, bits;
};

struct lines {
    uint16_t *samples;           /* as they are stored */
    uint16_t *in[4];             /* of each component, one for each pixel */
    int32_t *red, *green, *blue; /* what Cb and Cr contribute to them */
    uint8_t *out[3];             /* R, G and B */
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

/* The loops are compiled for each layout that is called with constants, so that they are loops over whole vectors. */
LG_BODY void unpack_bytes(const uint8_t *row, int step, int n, uint16_t *ret)
{
    for (int x = 0; x < n; x++) ret[x] = row[(ptrdiff_t)x * step];
}

LG_BODY void unpack_words(const struct lg_clip_component *c, const uint8_t *row, int step, int n,
                          uint16_t *ret)
{
    const int cut = LG_MAX(c->depth - DEPTH_MAX, 0), shift = c->shift;
    const unsigned mask = (1u << c->depth) - 1;
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "as the samples are");
    for (int x = 0; x < n; x++) {
        uint16_t v;
        memcpy(&v, row + (ptrdiff_t)x * step, sizeof v);
        ret[x] = (uint16_t)(((unsigned)v >> shift & mask) >> cut);
    }
}

LG_BODY void unpack(const struct lg_clip_component *c, const uint8_t *row, int n, uint16_t *ret)
{
    if (c->depth > 8 && c->step == 2)
        unpack_words(c, row, 2, n, ret);
    else if (c->depth > 8)
        unpack_words(c, row, c->step, n, ret);
    else if (c->step == 1)
        unpack_bytes(row, 1, n, ret);
    else if (c->step == 3)
        unpack_bytes(row, 3, n, ret);
    else if (c->step == 4)
        unpack_bytes(row, 4, n, ret);
    else
        unpack_bytes(row, c->step, n, ret);
}

/* Each of the samples for 2^log2_x pixels. An odd width may end one pixel later. */
LG_BODY void repeat(const uint16_t *samples, int log2_x, int width, uint16_t *ret)
{
    if (log2_x == 1)
        for (int i = 0; i < (width + 1) / 2; i++) {
            const uint32_t twice = samples[i] * 0x10001u;
            memcpy(ret + 2 * i, &twice, sizeof twice);
        }
    else
        for (int x = 0; x < width; x++) ret[x] = samples[x >> log2_x];
}

/* Row y of a component, a sample for each pixel. */
LG_BODY void read_row(const struct lg_clip_component *c, int y, int width, const struct lines *l,
                      uint16_t *ret)
{
    const uint8_t *row = c->data + (ptrdiff_t)(y >> c->log2_y) * c->stride;
    if (c->log2_x == 0) {
        unpack(c, row, width, ret);
    } else {
        unpack(c, row, ((width - 1) >> c->log2_x) + 1, l->samples);
        repeat(l->samples, c->log2_x, width, ret);
    }
}

LG_BODY uint8_t clipped(int32_t v, int bits)
{
    const int32_t rounded = (v + (1 << (bits - 1))) >> bits;
    return (uint8_t)LG_MIN(LG_MAX(rounded, 0), 255);
}

LG_BODY void multiply_chroma(const struct matrix *m, const struct lines *l, int width)
{
    const uint16_t *Cb = l->in[1], *Cr = l->in[2];
    int32_t *red = l->red, *green = l->green, *blue = l->blue;
    const struct matrix k = *m;
#pragma GCC ivdep /* the lines do not overlap */
    for (int x = 0; x < width; x++) {
        const int32_t cb = Cb[x] - k.c0, cr = Cr[x] - k.c0;
        red[x] = k.red_cr * cr;
        green[x] = k.green_cb * cb + k.green_cr * cr;
        blue[x] = k.blue_cb * cb;
    }
}

LG_BODY void convert_yuv(const struct matrix *m, const struct lines *l, int width)
{
    const uint16_t *Y = l->in[0];
    const int32_t *red = l->red, *green = l->green, *blue = l->blue;
    uint8_t *r = l->out[0], *g = l->out[1], *b = l->out[2];
    const struct matrix k = *m;
#pragma GCC ivdep /* the lines do not overlap */
    for (int x = 0; x < width; x++) {
        const int32_t y = k.y * (Y[x] - k.y0);
        r[x] = clipped(y + red[x], k.bits);
        g[x] = clipped(y + green[x], k.bits);
        b[x] = clipped(y + blue[x], k.bits);
    }
}

/* RGB, or grey. */
LG_BODY void convert_each(const struct matrix *m, const struct lines *l, int n, int width)
{
    const struct matrix k = *m;
    const bool are_levels = k.y == 1 << k.bits && k.y0 == 0;
    for (int c = 0; c < 3; c++) {
        const uint16_t *in = l->in[n < 3 ? 0 : c];
        uint8_t *out = l->out[c];
        if (are_levels)
            for (int x = 0; x < width; x++) out[x] = (uint8_t)in[x];
        else
            for (int x = 0; x < width; x++) out[x] = clipped(k.y * (in[x] - k.y0), k.bits);
    }
}

/* opaque: what the opacity is of opaque pixels. */
LG_BODY bool is_all_opaque(const uint16_t *opacity, unsigned opaque, int width)
{
    unsigned all = opaque;
    for (int x = 0; x < width; x++) all &= opacity[x];
    return all == opaque;
}

LG_BODY void lay_over_white(const uint16_t *opacity, unsigned opaque, int width, uint8_t *level)
{
    for (int x = 0; x < width; x++)
        level[x] =
            (uint8_t)((level[x] * opacity[x] + 255 * (opaque - opacity[x]) + opaque / 2) / opaque);
}

/* The same with sums of 16 bits. */
LG_BODY void lay_over_white_of_255(const uint16_t *opacity, int width, uint8_t *level)
{
    for (int x = 0; x < width; x++) {
        const uint16_t sum = (uint16_t)(level[x] * opacity[x] + 255 * (255 - opacity[x]) + 127);
        level[x] = (uint8_t)(sum / 255);
    }
}

/* Division by the usual depths' constants is multiplication. */
LG_BODY void lay_row_over_white(int depth, const struct lines *l, int width)
{
    const uint16_t *opacity = l->in[3];
    const unsigned opaque = (1u << depth) - 1;
    if (is_all_opaque(opacity, opaque, width)) return;
    for (int c = 0; c < 3; c++)
        if (depth == 8)
            lay_over_white_of_255(opacity, width, l->out[c]);
        else if (depth == 10)
            lay_over_white(opacity, 1023, width, l->out[c]);
        else if (depth == 12)
            lay_over_white(opacity, 4095, width, l->out[c]);
        else
            lay_over_white(opacity, opaque, width, l->out[c]);
}

LG_BODY void interleave(const struct lines *l, int width, uint8_t *rgb)
{
    const uint8_t *r = l->out[0], *g = l->out[1], *b = l->out[2];
#pragma GCC ivdep /* neither do these */
    for (int x = 0; x < width; x++) {
        rgb[3 * x] = r[x];
        rgb[3 * x + 1] = g[x];
        rgb[3 * x + 2] = b[x];
    }
}

LG_BODY void read_yuv(const struct matrix *m, const struct lg_clip_planes *p, const struct lines *l,
                      int y)
{
    const int shared = LG_MIN(p->of[1].log2_y, p->of[2].log2_y);
    const bool has_chroma_of_last = y % (1 << shared) != 0;
    if (!has_chroma_of_last) {
        for (int c = 1; c < 3; c++) read_row(&p->of[c], y, p->width, l, l->in[c]);
        multiply_chroma(m, l, p->width);
    }
    read_row(&p->of[0], y, p->width, l, l->in[0]);
}

LG_BODY void convert_row(const struct matrix *m, const struct lg_clip_planes *p,
                         const struct lines *l, int y, uint8_t *rgb)
{
    if (p->colours == LG_CLIP_RGB || p->n < 3) {
        for (int c = 0; c < LG_MIN(p->n, 3); c++) read_row(&p->of[c], y, p->width, l, l->in[c]);
        convert_each(m, l, p->n, p->width);
    } else {
        read_yuv(m, p, l, y);
        convert_yuv(m, l, p->width);
    }
    if (p->n == 4) {
        read_row(&p->of[3], y, p->width, l, l->in[3]);
        lay_row_over_white(LG_MIN(p->of[3].depth, DEPTH_MAX), l, p->width);
    }
    interleave(l, p->width, rgb);
}

LG_BODY void convert(const struct matrix *m, const struct lg_clip_planes *p, const struct lines *l,
                     uint8_t *rgb)
{
    for (int y = 0; y < p->height; y++)
        convert_row(m, p, l, y, rgb + 3 * (size_t)y * (size_t)p->width);
}

static void convert_base(const struct matrix *m, const struct lg_clip_planes *p,
                         const struct lines *l, uint8_t *rgb)
{
    convert(m, p, l, rgb);
}

#if LG_HAS_WIDE
LG_WIDE static void convert_wide(const struct matrix *m, const struct lg_clip_planes *p,
                                 const struct lines *l, uint8_t *rgb)
{
    convert(m, p, l, rgb);
}
#endif

int lg_clip_rgb(const struct lg_clip_planes *p, lg_picture *ret)
{
    const struct matrix m = matrix_of(p);
    const size_t w = (size_t)p->width;
    LG_ASSERT((p->n == 1 || p->n == 3 || p->n == 4) && p->of[0].depth >= 8 && p->of[0].depth <= 16);
    LG_TRY(lg_picture_reserve(ret, p->width, p->height));
    const size_t line = w + 1; /* see repeat */
    int32_t *memory = malloc(line * (3 * sizeof(int32_t) + 5 * sizeof(uint16_t) + 3));
    if (!memory) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a row of a picture");
    struct lines l = {.red = memory, .green = memory + line, .blue = memory + 2 * line};
    l.samples = (uint16_t *)(memory + 3 * line);
    for (size_t c = 0; c < 4; c++) l.in[c] = l.samples + (c + 1) * line;
    for (size_t c = 0; c < 3; c++) l.out[c] = (uint8_t *)(l.samples + 5 * line) + c * line;
#if LG_HAS_WIDE
    if (lg_wide())
        convert_wide(&m, p, &l, ret->rgb);
    else
#endif
        convert_base(&m, p, &l, ret->rgb);
    free(memory);
    return 0;
}
