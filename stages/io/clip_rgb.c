/* Decoded frames to RGB; see clip_rgb.h. Matrices and ranges are those of ITU-T H.273. */
#include "stages/io/clip_rgb.h"
#include <stdlib.h>
#include <string.h>

enum { FRACTION = 16 /* bits of a factor on 8-bit samples */ };

/* RGB in units of 2^-bits of a step: y (Y - y0) + of Cb - c0 and Cr - c0. */
struct matrix {
    int64_t y, red_cr, green_cb, green_cr, blue_cb;
    int y0, c0, bits;
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
    const int depth = p->of[0].depth;
    const bool is_rgb = p->colours == LG_CLIP_RGB;
    const int64_t r = is_rgb ? 0 : weights[p->colours][0], b = is_rgb ? 0 : weights[p->colours][1];
    const int64_t g = 10000 - r - b, steps = INT64_C(1) << (depth - 8);
    const int64_t luma = p->is_full ? (INT64_C(1) << depth) - 1 : 219 * steps;
    const int64_t chroma = p->is_full ? (INT64_C(1) << depth) - 1 : 224 * steps;
    const int bits = FRACTION + depth - 8;
    const int64_t white = INT64_C(255) << bits; /* below 2^32 */
    return (struct matrix){.y = divided(white, luma),
                           .red_cr = divided(2 * (10000 - r) * white, 10000 * chroma),
                           .green_cb = divided(-2 * b * (10000 - b) * white, g * 10000 * chroma),
                           .green_cr = divided(-2 * r * (10000 - r) * white, g * 10000 * chroma),
                           .blue_cb = divided(2 * (10000 - b) * white, 10000 * chroma),
                           .y0 = p->is_full ? 0 : (int)(16 * steps),
                           .c0 = 1 << (depth - 1),
                           .bits = bits};
}

/* Row y of a component, a sample for each pixel. */
static void unpack(const struct lg_clip_component *c, int y, int width, uint16_t *ret)
{
    const uint8_t *row = c->data + (ptrdiff_t)(y >> c->log2_y) * c->stride;
    for (int x = 0; x < width; x++) {
        const uint8_t *at = row + (ptrdiff_t)(x >> c->log2_x) * c->step;
        const unsigned v = c->depth > 8 ? (unsigned)at[0] | (unsigned)at[1] << 8 : at[0];
        ret[x] = (uint16_t)(v >> c->shift & ((1u << c->depth) - 1));
    }
}

static uint8_t clipped(int64_t v, int bits)
{
    v = (v + (INT64_C(1) << (bits - 1))) >> bits;
    return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
}

static void convert_row(const struct matrix *m, bool is_rgb, int n, uint16_t *const *line,
                        int width, uint8_t *rgb)
{
    for (int x = 0; x < width; x++, rgb += 3) {
        const int64_t y = m->y * (line[0][x] - m->y0);
        if (n < 3) {
            rgb[0] = rgb[1] = rgb[2] = clipped(y, m->bits);
        } else if (is_rgb) {
            for (int c = 0; c < 3; c++) rgb[c] = clipped(m->y * (line[c][x] - m->y0), m->bits);
        } else {
            const int64_t cb = line[1][x] - m->c0, cr = line[2][x] - m->c0;
            rgb[0] = clipped(y + m->red_cr * cr, m->bits);
            rgb[1] = clipped(y + m->green_cb * cb + m->green_cr * cr, m->bits);
            rgb[2] = clipped(y + m->blue_cb * cb, m->bits);
        }
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

int lg_clip_rgb(const struct lg_clip_planes *p, lg_picture *ret)
{
    const struct matrix m = matrix_of(p);
    const bool is_rgb = p->colours == LG_CLIP_RGB;
    LG_ASSERT((p->n == 1 || p->n == 3 || p->n == 4) && p->of[0].depth >= 8 && p->of[0].depth <= 16);
    LG_TRY(lg_picture_reserve(ret, p->width, p->height));
    uint16_t *lines = malloc(4 * (size_t)p->width * sizeof *lines), *line[4];
    if (!lines) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a row of a picture");
    for (int c = 0; c < 4; c++) line[c] = lines + (size_t)c * (size_t)p->width;
    for (int y = 0; y < p->height; y++) {
        uint8_t *rgb = ret->rgb + 3 * (size_t)y * (size_t)p->width;
        for (int c = 0; c < p->n; c++) unpack(&p->of[c], y, p->width, line[c]);
        convert_row(&m, is_rgb, p->n, line, p->width, rgb);
        if (p->n == 4) lay_over_white(line[3], (1u << p->of[3].depth) - 1, p->width, rgb);
    }
    free(lines);
    return 0;
}
