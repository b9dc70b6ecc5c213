/* PNG by libpng; see picture.h.
 *
 * libpng's low-level interface, not its simplified one: that lays transparency over the background
 * in linear light, where everything else (browsers, PIL) does it on the stored values. Gamma and
 * profiles are left alone. Chunks that are not needed are skipped unread. */
#include "stages/io/picture_png.h"
#include <png.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void lg_picture_over_white(const uint8_t *rgba, uint8_t *rgb, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        unsigned a = rgba[4 * i + 3];
        for (int c = 0; c < 3; c++)
            rgb[3 * i + (size_t)c] =
                (uint8_t)((rgba[4 * i + (size_t)c] * a + 255 * (255 - a) + 127) / 255);
    }
}

/* Everything that changes between setjmp and longjmp lives here. */
struct png_work {
    png_structp png;
    png_infop info;
    const uint8_t *data;
    size_t bytes, at, end; /* no byte from `end` on is read */
    uint8_t *rgba;
    jmp_buf jump;
    char text[128];
};

static void png_fail(png_structp png, const char *text)
{
    struct png_work *w = png_get_error_ptr(png);
    snprintf(w->text, sizeof w->text, "%s", text);
    longjmp(w->jump, 1);
}

/* Warnings of libpng are about chunks beside the pixels. */
static void png_ignore(png_structp png, const char *text)
{
    (void)png, (void)text;
}

static void png_take(png_structp png, png_bytep dst, size_t bytes)
{
    struct png_work *w = png_get_io_ptr(png);
    if (bytes > w->end - w->at)
        png_error(png, w->end < w->bytes ? "data after the last pixel" : "the data ends too early");
    memcpy(dst, w->data + w->at, bytes);
    w->at += bytes;
}

/* To 8-bit RGB, or RGBA when the file has any transparency. */
static bool png_transform(struct png_work *w, int *ret_passes)
{
    int color = png_get_color_type(w->png, w->info);
    bool alpha = (color & PNG_COLOR_MASK_ALPHA) || png_get_valid(w->png, w->info, PNG_INFO_tRNS);
    png_set_expand(w->png); /* palette, 1 to 4 bits, tRNS */
    png_set_scale_16(w->png);
    if (!(color & PNG_COLOR_MASK_COLOR)) png_set_gray_to_rgb(w->png);
    *ret_passes = png_set_interlace_handling(w->png);
    png_read_update_info(w->png, w->info);
    return alpha;
}

/* Rows in all passes. With the last one libpng also unpacks all that follows in the stream, a
 * thousand times its size or more: it gets no more bytes than a row may take (RGBA of 16 bits that
 * does not compress, and as much again), and what libpng reads at a time. */
static void png_rows(struct png_work *w, int passes, uint8_t *first, size_t height, size_t stride)
{
    enum { READ_AHEAD = 16384, PIXEL_BYTES = 8 };
    size_t row_max = 2 * PIXEL_BYTES * png_get_image_width(w->png, w->info) + READ_AHEAD;
    for (int pass = 1; pass <= passes; pass++)
        for (size_t y = 0; y < height; y++) {
            if (pass == passes && y == height - 1)
                w->end = w->at + LG_MIN(row_max, w->bytes - w->at);
            png_read_row(w->png, first + y * stride, NULL);
        }
    w->end = w->bytes;
}

/* The part that libpng may leave by longjmp. */
static int png_pixels(struct png_work *w, lg_picture *pic)
{
    w->png = png_create_read_struct(PNG_LIBPNG_VER_STRING, w, png_fail, png_ignore);
    if (w->png) w->info = png_create_info_struct(w->png);
    if (!w->info) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a PNG decoder");
    png_set_user_limits(w->png, LG_PICTURE_SIDE_MAX, LG_PICTURE_SIDE_MAX);
    png_set_keep_unknown_chunks(w->png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);
    png_set_read_fn(w->png, w, png_take);
    png_read_info(w->png, w->info);
    LG_TRY(lg_picture_reserve(pic, png_get_image_width(w->png, w->info),
                              png_get_image_height(w->png, w->info)));
    int passes;
    bool alpha = png_transform(w, &passes);
    size_t channels = alpha ? 4 : 3, width = (size_t)pic->width, height = (size_t)pic->height;
    if (png_get_rowbytes(w->png, w->info) != width * channels)
        return LG_FAIL(LG_ERR_VOID, "PNG of an unsupported kind");
    if (alpha) w->rgba = malloc(width * height * 4);
    if (alpha && !w->rgba)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture of %zu x %zu pixels", width,
                       height);
    png_rows(w, passes, alpha ? w->rgba : pic->rgb, height, width * channels);
    png_read_end(w->png, NULL);
    if (alpha) lg_picture_over_white(w->rgba, pic->rgb, width * height);
    return 0;
}

int lg_png_decode(const void *data, size_t bytes, lg_picture *pic)
{
    struct png_work *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a PNG decoder");
    w->data = data;
    w->bytes = w->end = bytes;
    int rc;
    if (setjmp(w->jump))
        rc = LG_FAIL(LG_ERR_VOID, "PNG is cut off or damaged: %s", w->text);
    else
        rc = png_pixels(w, pic);
    png_destroy_read_struct(&w->png, &w->info, NULL);
    free(w->rgba);
    free(w);
    return rc;
}

/* ---- writing ---- */

struct png_sink {
    png_structp png;
    png_infop info;
    uint8_t *data;
    size_t bytes, capacity;
    jmp_buf jump;
    char text[128];
};

static void sink_fail(png_structp png, const char *text)
{
    struct png_sink *s = png_get_error_ptr(png);
    snprintf(s->text, sizeof s->text, "%s", text);
    longjmp(s->jump, 1);
}

static void sink_put(png_structp png, png_bytep src, size_t bytes)
{
    struct png_sink *s = png_get_io_ptr(png);
    if (bytes > s->capacity - s->bytes) {
        size_t capacity = LG_MAX(2 * s->capacity, s->bytes + bytes + 4096);
        uint8_t *data = realloc(s->data, capacity);
        if (!data) png_error(png, "no memory");
        s->data = data;
        s->capacity = capacity;
    }
    memcpy(s->data + s->bytes, src, bytes);
    s->bytes += bytes;
}

static void sink_flush(png_structp png)
{
    (void)png;
}

static void sink_write(struct png_sink *s, const uint8_t *rgb, int width, int height)
{
    png_set_write_fn(s->png, s, sink_put, sink_flush);
    png_set_IHDR(s->png, s->info, (png_uint_32)width, (png_uint_32)height, 8, PNG_COLOR_TYPE_RGB,
                 PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_write_info(s->png, s->info);
    for (int y = 0; y < height; y++) png_write_row(s->png, rgb + (size_t)y * (size_t)width * 3);
    png_write_end(s->png, s->info);
}

int lg_picture_encode_png(const uint8_t *rgb, int width, int height, uint8_t **ret_data,
                          size_t *ret_bytes)
{
    LG_ASSERT(width >= 1 && height >= 1);
    struct png_sink *s = calloc(1, sizeof *s);
    if (s) s->png = png_create_write_struct(PNG_LIBPNG_VER_STRING, s, sink_fail, png_ignore);
    if (s && s->png) s->info = png_create_info_struct(s->png);
    int rc = 0;
    if (!s || !s->info)
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for a PNG encoder");
    else if (setjmp(s->jump))
        rc = LG_FAIL(LG_ERR_FAILED, "writing a PNG of %d x %d pixels: %s", width, height, s->text);
    else
        sink_write(s, rgb, width, height);
    if (rc == 0) {
        *ret_data = s->data;
        *ret_bytes = s->bytes;
    } else if (s) {
        free(s->data);
    }
    if (s) png_destroy_write_struct(&s->png, &s->info);
    free(s);
    return rc;
}
