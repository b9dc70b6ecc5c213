/* Resizing of 8-bit RGB with an antialiasing Lanczos-3 filter, and the fit of a picture to what is
 * trained on, a square or a bucket's rectangle: resize, crop, flip.
 *
 * Separable, the horizontal pass first with its result rounded to 8 bits; when shrinking, the
 * filter widens by the scale, so nothing aliases. Each output is a sum in a fixed order, without
 * contraction: the same input gives the same bytes wherever libm's sine gives the same bits. */
#pragma once
#include "base/check.h"

/* Reusable working memory; zero it first, free it with lg_resize_free. Resizing the same part from the same size to the same
 * size once more, as with frames of a clip, it does not compute the weights again. */
typedef struct lg_resize_scratch {
    void *data;
    size_t capacity;
    int weights_of[8];
} lg_resize_scratch;
void lg_resize_free(lg_resize_scratch *scratch);

/* The part [x0, x0 + out_w) x [y0, y0 + out_h) of the picture resized to full_w x full_h. */
struct lg_resize_args {
    const uint8_t *rgb; /* (height, width, 3) */
    int width, height;  /* pixels of the input */
    int full_w, full_h; /* pixels of the whole resized picture */
    int x0, y0, out_w, out_h;
    uint8_t *out; /* (out_h, out_w, 3) */
};
/* LG_ERR_NOSPACE when the scratch cannot grow, else it succeeds. */
int lg_resize(const struct lg_resize_args *a, lg_resize_scratch *scratch);

/* The same row by row, from the top, into no picture (`out` is not used): rgb (out_w, 3) is there for the time of the call. */
typedef void lg_resize_row(void *arg, int y, const uint8_t *rgb);
int lg_resize_rows(const struct lg_resize_args *a, lg_resize_scratch *scratch,
                   lg_resize_row *on_row, void *arg);

/* The smallest size with the picture's sides in proportion (rounded to nearest) that covers out_w x out_h. */
struct lg_fit_size {
    int width, height;
};
struct lg_fit_size lg_fit_cover(int width, int height, int out_w, int out_h);

/* Resized to that, then out_w x out_h of it. */
struct lg_fit_args {
    const uint8_t *rgb; /* (height, width, 3) */
    int width, height;
    int out_w, out_h;
    double crop_x, crop_y; /* [0, 1): place of the cut in what one side has too much; below 0: the
                              centre */
    bool flip;             /* mirror left and right */
    uint8_t *out;          /* (3, out_h, out_w) planar, */
    size_t plane;          /* each so many bytes behind the other; 0: out_h * out_w */
};
/* Where that lies in the resized picture, mirrored if it is: its top and left edge. */
struct lg_fit_corner {
    int top, left;
};
struct lg_fit_corner lg_fit_corner(const struct lg_fit_args *a);
int lg_fit(const struct lg_fit_args *a, lg_resize_scratch *scratch);
