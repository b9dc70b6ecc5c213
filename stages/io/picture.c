/* Decoding of pictures; see picture.h. The PNG writer is in picture_png.c with the PNG reader.
 *
 * The format is told by the first bytes, never by the name. Each decoder first reads the size,
 * which is checked against the bounds before memory is taken. libjpeg reports damage as warnings
 * and fills up with grey: here the first warning ends the decode. Its scans are counted as they
 * begin. */
#include "stages/io/picture.h"
#include "stages/io/picture_png.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <webp/decode.h>

int lg_picture_check_bounds(int64_t width, int64_t height)
{
    if (width < 1 || height < 1 || width > LG_PICTURE_SIDE_MAX || height > LG_PICTURE_SIDE_MAX ||
        width * height > LG_PICTURE_PIXELS_MAX)
        return LG_FAIL(
            LG_ERR_VOID, "picture of %lld x %lld pixels; the bounds are %d a side and %d Mpixel",
            (long long)width, (long long)height, LG_PICTURE_SIDE_MAX, LG_PICTURE_PIXELS_MAX >> 20);
    return 0;
}

int lg_picture_reserve(lg_picture *pic, int64_t width, int64_t height)
{
    LG_TRY(lg_picture_check_bounds(width, height));
    size_t bytes = (size_t)(width * height) * 3;
    if (bytes > pic->capacity) {
        free(pic->rgb);
        pic->capacity = 0;
        pic->rgb = malloc(bytes);
        if (!pic->rgb)
            return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture of %lld x %lld pixels",
                           (long long)width, (long long)height);
        pic->capacity = bytes;
    }
    pic->width = pic->stored_width = (int)width;
    pic->height = pic->stored_height = (int)height;
    return 0;
}

void lg_picture_free(lg_picture *pic)
{
    free(pic->rgb);
    *pic = (lg_picture){0};
}

/* ---- JPEG ---- */

struct jpeg_work {
    struct jpeg_decompress_struct d; /* its client_data points to this struct */
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf jump;
    char text[JMSG_LENGTH_MAX];
    JSAMPLE *row;
    int scan; /* the last one that was counted */
    uint64_t blocks;
};

/* What setjmp returns. */
enum { JPEG_DAMAGED = 1, JPEG_TOO_MUCH_WORK };

static void jpeg_fail(j_common_ptr info)
{
    struct jpeg_work *w = info->client_data;
    w->errors.format_message(info, w->text);
    longjmp(w->jump, JPEG_DAMAGED);
}

/* Level -1 is a warning: damaged data that libjpeg would paint over. Others are traces. */
static void jpeg_message(j_common_ptr info, int level)
{
    if (level < 0) jpeg_fail(info);
}

/* Called before each piece of input is decoded: counts a scan when it begins. */
static void jpeg_count_work(j_common_ptr info)
{
    struct jpeg_work *w = info->client_data;
    const struct jpeg_decompress_struct *d = &w->d;
    if (d->input_scan_number == w->scan) return;
    w->scan = d->input_scan_number;
    w->blocks += (uint64_t)d->MCUs_per_row * d->MCU_rows_in_scan * (unsigned)d->blocks_in_MCU;
    if (w->scan <= LG_JPEG_SCANS_MAX && w->blocks <= LG_JPEG_BLOCKS_MAX) return;
    longjmp(w->jump, JPEG_TOO_MUCH_WORK);
}

/* The largest reduction by a power of two that keeps the shorter side at side_min or more. */
static unsigned jpeg_reduction(unsigned width, unsigned height, int side_min)
{
    unsigned reduction = 1, side = LG_MIN(width, height);
    if (side_min <= 0) return 1;
    while (reduction < 8 && side / (reduction * 2) >= (unsigned)side_min) reduction *= 2;
    return reduction;
}

/* One row of CMYK to RGB. Adobe's files, nearly all there are, store the inks inverted. */
static void cmyk_to_rgb(const uint8_t *cmyk, uint8_t *rgb, int width, bool inverted)
{
    for (int x = 0; x < width; x++)
        for (int c = 0; c < 3; c++) {
            unsigned ink = cmyk[4 * x + c], key = cmyk[4 * x + 3];
            if (!inverted) ink = 255 - ink, key = 255 - key;
            rgb[3 * x + c] = (uint8_t)((ink * key + 127) / 255);
        }
}

/* The part that libjpeg may leave by longjmp. Its locals are not used after the jump. */
static int jpeg_rows(struct jpeg_work *w, const void *data, size_t bytes, int side_min,
                     lg_picture *pic)
{
    struct jpeg_decompress_struct *d = &w->d;
    jpeg_create_decompress(d);
    d->progress = &w->progress;
    jpeg_mem_src(d, data, (unsigned long)bytes);
    jpeg_read_header(d, TRUE);
    if (d->arith_code) return LG_FAIL(LG_ERR_VOID, "JPEG with arithmetic coding");
    bool cmyk = d->jpeg_color_space == JCS_CMYK || d->jpeg_color_space == JCS_YCCK;
    d->out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    d->dct_method = JDCT_ISLOW;
    d->scale_num = 1;
    d->scale_denom = jpeg_reduction(d->image_width, d->image_height, side_min);
    /* The full size is bounded too: a progressive file keeps all its coefficients in memory. */
    LG_TRY(lg_picture_check_bounds(d->image_width, d->image_height));
    jpeg_start_decompress(d);
    LG_TRY(lg_picture_reserve(pic, d->output_width, d->output_height));
    pic->stored_width = (int)d->image_width;
    pic->stored_height = (int)d->image_height;
    if (cmyk) {
        w->row = malloc((size_t)d->output_width * 4);
        if (!w->row) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a row of a picture");
    }
    while (d->output_scanline < d->output_height) {
        uint8_t *rgb = pic->rgb + (size_t)d->output_scanline * d->output_width * 3;
        JSAMPROW row = cmyk ? w->row : rgb;
        jpeg_read_scanlines(d, &row, 1);
        if (cmyk) cmyk_to_rgb(row, rgb, pic->width, d->saw_Adobe_marker);
    }
    jpeg_finish_decompress(d);
    return 0;
}

/* From 5 on rows are columns; the others mirror. */
int lg_picture_orient(lg_picture *pic, int orientation)
{
    if (orientation == 1) return 0;
    const bool turned = orientation >= LG_ORIENTATION_TURNED;
    const bool from_below =
        orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    const bool from_right =
        orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    const size_t w = (size_t)pic->width, h = (size_t)pic->height;
    const size_t out_w = turned ? h : w, out_h = turned ? w : h;
    uint8_t *rgb = malloc(w * h * 3), *to = rgb;
    if (!rgb) return LG_FAIL(LG_ERR_NOSPACE, "no memory to turn a picture");
    for (size_t y = 0; y < out_h; y++)
        for (size_t x = 0; x < out_w; x++, to += 3) {
            const size_t row = turned ? x : y, column = turned ? y : x;
            const size_t from =
                (from_below ? h - 1 - row : row) * w + (from_right ? w - 1 - column : column);
            memcpy(to, pic->rgb + 3 * from, 3);
        }
    free(pic->rgb);
    pic->rgb = rgb;
    pic->capacity = w * h * 3;
    pic->width = (int)out_w;
    pic->height = (int)out_h;
    if (turned) {
        const int stored_width = pic->stored_width;
        pic->stored_width = pic->stored_height;
        pic->stored_height = stored_width;
    }
    return 0;
}

static int decode_jpeg(const void *data, size_t bytes, int side_min, lg_picture *pic)
{
    if (bytes > LG_JPEG_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "JPEG of %zu bytes; the bound is %d MiB", bytes,
                       LG_JPEG_BYTES_MAX >> 20);
    /* In memory of its own, so that no local variable is changed between setjmp and longjmp. */
    struct jpeg_work *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a JPEG decoder");
    w->d.err = jpeg_std_error(&w->errors);
    w->d.client_data = w;
    w->errors.error_exit = jpeg_fail;
    w->errors.emit_message = jpeg_message;
    w->progress.progress_monitor = jpeg_count_work;
    int rc;
    switch (setjmp(w->jump)) {
    case 0:
        rc = jpeg_rows(w, data, bytes, side_min, pic);
        break;
    case JPEG_TOO_MUCH_WORK:
        rc = LG_FAIL(LG_ERR_VOID,
                     "JPEG asks for too much work: scan %d passes over block %llu; the bounds are "
                     "%d scans and %d Mi blocks",
                     w->scan, (unsigned long long)w->blocks, LG_JPEG_SCANS_MAX,
                     LG_JPEG_BLOCKS_MAX >> 20);
        break;
    default:
        rc = LG_FAIL(LG_ERR_VOID, "JPEG is cut off or damaged: %s", w->text);
    }
    jpeg_destroy_decompress(&w->d);
    free(w->row);
    free(w);
    return rc;
}

/* ---- WebP ---- */

static const char *webp_reason(VP8StatusCode code)
{
    switch (code) {
    case VP8_STATUS_NOT_ENOUGH_DATA:
        return "cut off";
    case VP8_STATUS_SUSPENDED:
        return "cut off";
    case VP8_STATUS_BITSTREAM_ERROR:
        return "damaged";
    case VP8_STATUS_UNSUPPORTED_FEATURE:
        return "of an unsupported kind";
    case VP8_STATUS_OUT_OF_MEMORY:
        return "too large";
    default:
        return "not readable";
    }
}

static int decode_webp(const void *data, size_t bytes, lg_picture *pic)
{
    if (bytes > LG_WEBP_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "WebP of %zu bytes; the bound is %d MiB", bytes,
                       LG_WEBP_BYTES_MAX >> 20);
    WebPDecoderConfig config;
    if (!WebPInitDecoderConfig(&config)) return LG_FAIL(LG_ERR_FAILED, "libwebp: other version");
    VP8StatusCode code = WebPGetFeatures(data, bytes, &config.input);
    if (code != VP8_STATUS_OK) return LG_FAIL(LG_ERR_VOID, "WebP is %s", webp_reason(code));
    if (config.input.has_animation) return LG_FAIL(LG_ERR_VOID, "WebP is an animation");
    LG_TRY(lg_picture_reserve(pic, config.input.width, config.input.height));
    size_t pixels = (size_t)pic->width * (size_t)pic->height;
    uint8_t *rgba = NULL;
    config.output.is_external_memory = 1;
    if (config.input.has_alpha) {
        rgba = malloc(pixels * 4);
        if (!rgba) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a picture with transparency");
        config.output.colorspace = MODE_RGBA;
        config.output.u.RGBA = (WebPRGBABuffer){rgba, pic->width * 4, pixels * 4};
    } else {
        config.output.colorspace = MODE_RGB;
        config.output.u.RGBA = (WebPRGBABuffer){pic->rgb, pic->width * 3, pixels * 3};
    }
    int rc = 0;
    code = WebPDecode(data, bytes, &config);
    if (code != VP8_STATUS_OK)
        rc = LG_FAIL(LG_ERR_VOID, "WebP is %s", webp_reason(code));
    else if (rgba)
        lg_picture_over_white(rgba, pic->rgb, pixels);
    WebPFreeDecBuffer(&config.output);
    free(rgba);
    return rc;
}

/* ---- all ---- */

int lg_picture_decode(const void *data, size_t bytes, int side_min, lg_picture *pic)
{
    const uint8_t *p = data;
    if (bytes > LG_PICTURE_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "picture of %zu bytes; the bound is %d MiB", bytes,
                       LG_PICTURE_BYTES_MAX >> 20);
    if (bytes >= 8 && memcmp(p, "\x89PNG\r\n\x1a\n", 8) == 0) {
        LG_TRY(lg_png_decode(data, bytes, pic));
    } else if (bytes >= 3 && memcmp(p, "\xff\xd8\xff", 3) == 0) {
        LG_TRY(decode_jpeg(data, bytes, side_min, pic));
        LG_TRY(lg_picture_orient(pic, lg_jpeg_orientation(data, bytes)));
    } else if (bytes >= 12 && memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0) {
        LG_TRY(decode_webp(data, bytes, pic));
    } else if (bytes == 0) {
        return LG_FAIL(LG_ERR_VOID, "picture is empty");
    } else {
        return LG_FAIL(LG_ERR_VOID, "picture is neither PNG, JPEG nor WebP");
    }
    return 0;
}
