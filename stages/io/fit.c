/* The fit of a picture to a training square; see resize.h. */
#include "stages/io/resize.h"
#include <math.h>
#include <stdlib.h>

/* The longer side after the shorter became `size`, rounded to nearest. */
static int longer(int side, int shorter, int size)
{
    return (int)(((int64_t)side * size * 2 + shorter) / (2 * (int64_t)shorter));
}

/* First pixel of the square within `surplus` pixels too many. */
static int offset(double crop, int surplus)
{
    if (crop < 0) return surplus / 2;
    return LG_MIN((int)floor(crop * (surplus + 1)), surplus);
}

int lg_fit(const struct lg_fit_args *a, lg_resize_scratch *scratch)
{
    LG_ASSERT(a->size > 0 && a->width > 0 && a->height > 0 && a->crop_x < 1 && a->crop_y < 1);
    int shorter = LG_MIN(a->width, a->height), size = a->size;
    int full_w = a->width == shorter ? size : longer(a->width, shorter, size);
    int full_h = a->height == shorter ? size : longer(a->height, shorter, size);
    size_t plane = (size_t)size * (size_t)size;
    uint8_t *rgb = malloc(plane * 3);
    if (!rgb) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture of %d x %d", size, size);
    int rc = lg_resize(
        &(struct lg_resize_args){
            .rgb = a->rgb,
            .width = a->width,
            .height = a->height,
            .full_w = full_w,
            .full_h = full_h,
            .x0 = offset(a->crop_x, full_w - size),
            .y0 = offset(a->crop_y, full_h - size),
            .out_w = size,
            .out_h = size,
            .out = rgb,
        },
        scratch);
    if (rc == 0)
        for (int y = 0; y < size; y++)
            for (int x = 0; x < size; x++) {
                const uint8_t *p = rgb + ((size_t)y * (size_t)size + (size_t)x) * 3;
                size_t at = (size_t)y * (size_t)size + (size_t)(a->flip ? size - 1 - x : x);
                for (size_t c = 0; c < 3; c++) a->out[c * plane + at] = p[c];
            }
    free(rgb);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
