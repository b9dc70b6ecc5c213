/* The fit of a picture to what is trained on; see resize.h. */
#include "stages/io/resize.h"
#include "stages/io/wide.h"
#include <math.h>

/* side * to / from, rounded to nearest. */
static int scaled(int side, int from, int to)
{
    return (int)(((int64_t)side * to * 2 + from) / (2 * (int64_t)from));
}

struct lg_fit_size lg_fit_cover(int width, int height, int out_w, int out_h)
{
    LG_ASSERT(width > 0 && height > 0 && out_w > 0 && out_h > 0);
    if ((int64_t)out_w * height >= (int64_t)out_h * width)
        return (struct lg_fit_size){out_w, scaled(height, width, out_w)};
    return (struct lg_fit_size){scaled(width, height, out_h), out_h};
}

/* First pixel of the cut within `surplus` pixels too many. */
static int offset(double crop, int surplus)
{
    if (crop < 0) return surplus / 2;
    return LG_MIN((int)floor(crop * (surplus + 1)), surplus);
}

struct lg_fit_corner lg_fit_corner(const struct lg_fit_args *a)
{
    const struct lg_fit_size full = lg_fit_cover(a->width, a->height, a->out_w, a->out_h);
    const int left = offset(a->crop_x, full.width - a->out_w);
    return (struct lg_fit_corner){.top = offset(a->crop_y, full.height - a->out_h),
                                  .left = a->flip ? full.width - a->out_w - left : left};
}

struct planes {
    uint8_t *r, *g, *b;
    int width;
    bool is_mirrored, is_wide;
};

LG_BODY void mirror(uint8_t *row, int width)
{
    const int half = width / 2;
    uint8_t *left = row, *right = row + width - half;
#pragma GCC ivdep /* the halves do not overlap */
    for (int x = 0; x < half; x++) {
        const uint8_t kept = left[x];
        left[x] = right[half - 1 - x];
        right[half - 1 - x] = kept;
    }
}

LG_BODY void split(const struct planes *p, size_t at, const uint8_t *rgb)
{
    uint8_t *r = p->r + at, *g = p->g + at, *b = p->b + at;
    const int width = p->width;
#pragma GCC ivdep /* the planes do not overlap */
    for (int x = 0; x < width; x++) {
        r[x] = rgb[3 * x];
        g[x] = rgb[3 * x + 1];
        b[x] = rgb[3 * x + 2];
    }
    if (!p->is_mirrored) return;
    mirror(r, width);
    mirror(g, width);
    mirror(b, width);
}

static void split_base(const struct planes *p, size_t at, const uint8_t *rgb)
{
    split(p, at, rgb);
}

#if LG_HAS_WIDE
LG_WIDE static void split_wide(const struct planes *p, size_t at, const uint8_t *rgb)
{
    split(p, at, rgb);
}
#endif

static void split_row(void *arg, int y, const uint8_t *rgb)
{
    const struct planes *p = arg;
    const size_t at = (size_t)y * (size_t)p->width;
#if LG_HAS_WIDE
    if (p->is_wide) {
        split_wide(p, at, rgb);
        return;
    }
#endif
    split_base(p, at, rgb);
}

int lg_fit(const struct lg_fit_args *a, lg_resize_scratch *scratch)
{
    LG_ASSERT(a->crop_x < 1 && a->crop_y < 1);
    const struct lg_fit_size full = lg_fit_cover(a->width, a->height, a->out_w, a->out_h);
    const size_t plane = a->plane ? a->plane : (size_t)a->out_w * (size_t)a->out_h;
    struct planes planes = {.r = a->out,
                            .g = a->out + plane,
                            .b = a->out + 2 * plane,
                            .width = a->out_w,
                            .is_mirrored = a->flip,
                            .is_wide = lg_wide()};
    const struct lg_resize_args resize = {
        .rgb = a->rgb,
        .width = a->width,
        .height = a->height,
        .full_w = full.width,
        .full_h = full.height,
        .x0 = offset(a->crop_x, full.width - a->out_w),
        .y0 = offset(a->crop_y, full.height - a->out_h),
        .out_w = a->out_w,
        .out_h = a->out_h,
    };
    LG_TRY(lg_resize_rows(&resize, scratch, split_row, &planes));
    return 0;
}
