/* The fit of a picture to what is trained on; see resize.h. */
#include "stages/io/resize.h"
#include <math.h>
#include <stdlib.h>

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

int lg_fit(const struct lg_fit_args *a, lg_resize_scratch *scratch)
{
    LG_ASSERT(a->crop_x < 1 && a->crop_y < 1);
    const struct lg_fit_size full = lg_fit_cover(a->width, a->height, a->out_w, a->out_h);
    const size_t w = (size_t)a->out_w, h = (size_t)a->out_h, plane = w * h;
    uint8_t *rgb = malloc(plane * 3);
    if (!rgb)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture of %d x %d", a->out_w, a->out_h);
    int rc = lg_resize(
        &(struct lg_resize_args){
            .rgb = a->rgb,
            .width = a->width,
            .height = a->height,
            .full_w = full.width,
            .full_h = full.height,
            .x0 = offset(a->crop_x, full.width - a->out_w),
            .y0 = offset(a->crop_y, full.height - a->out_h),
            .out_w = a->out_w,
            .out_h = a->out_h,
            .out = rgb,
        },
        scratch);
    if (rc == 0)
        for (size_t y = 0; y < h; y++)
            for (size_t x = 0; x < w; x++) {
                const uint8_t *p = rgb + (y * w + x) * 3;
                size_t at = y * w + (a->flip ? w - 1 - x : x);
                for (size_t c = 0; c < 3; c++)
                    a->out[c * (a->plane ? a->plane : plane) + at] = p[c];
            }
    free(rgb);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
