/* Pictures: every kind decodes to Pillow's pixels (tests/golden/make_pictures.py); whatever is cut,
 * damaged or too large is void; resizing equals Pillow's Lanczos, and plain sums bit for bit; the fit
 * crops and flips. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/picture.h"
#include "stages/io/resize.h"
#include "stages/io/safetensors.h"
#include "stages/io/wide.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static lg_st_file *golden;

static int open_golden(void **state)
{
    (void)state;
    return lg_st_open("tests/golden/pictures.safetensors", &golden);
}

static int close_golden(void **state)
{
    (void)state;
    lg_st_close(&golden);
    return 0;
}

static uint8_t *read_picture(const char *name, size_t *ret_bytes)
{
    char path[LG_PATH_BYTES], *data;
    assert_int_equal(lg_path(path, "tests/golden/pictures/%s", name), 0);
    assert_int_equal(lg_read_file(path, 1 << 20, &data, ret_bytes), 0);
    return (uint8_t *)data;
}

static const struct {
    const char *name;
    int tolerance; /* levels; see test_decode */
} FILES[] = {
    {"rgb.png", 0},        {"rgba.png", 0},
    {"palette.png", 0},    {"palette-transparent.png", 0},
    {"grey.png", 0},       {"grey-1bit.png", 0},
    {"grey-alpha.png", 0}, {"rgb-16bit.png", 0},
    {"interlaced.png", 0}, {"gamma.png", 0},
    {"baseline.jpg", 2},   {"progressive.jpg", 2},
    {"grey.jpg", 2},       {"cmyk.jpg", 2},
    {"lossy.webp", 2},     {"lossless-alpha.webp", 0},
};

static int worst(const uint8_t *a, const uint8_t *b, size_t n)
{
    int d = 0;
    for (size_t i = 0; i < n; i++) d = LG_MAX(d, abs(a[i] - b[i]));
    return d;
}

/* Lossless formats are exact. JPEG and WebP allow the decoder's rounding one level in the transform
 * and one in the colours. */
static void test_decode(void **state)
{
    (void)state;
    lg_picture pic = {0}; /* reused: sizes and channels change from one to the next */
    for (size_t i = 0; i < LG_ARRAY_LEN(FILES); i++) {
        size_t bytes;
        uint8_t *data = read_picture(FILES[i].name, &bytes);
        const struct lg_st_entry *want = lg_st_find(golden, FILES[i].name);
        assert_non_null(want);
        if (lg_picture_decode(data, bytes, 0, &pic) < 0)
            fail_msg("%s: %s", FILES[i].name, lg_err_text());
        assert_int_equal(pic.height, want->dim[0]);
        assert_int_equal(pic.width, want->dim[1]);
        int d = worst(pic.rgb, want->data, want->bytes);
        if (!(d <= FILES[i].tolerance)) fail_msg("%s differs by %d levels", FILES[i].name, d);
        free(data);
    }
    lg_picture_free(&pic);
}

static void is_void(const char *name, const uint8_t *data, size_t bytes)
{
    lg_picture pic = {0};
    int rc = lg_picture_decode(data, bytes, 0, &pic);
    if (rc != LG_ERR_VOID) fail_msg("%s, %zu bytes: %d instead of void", name, bytes, rc);
    assert_true(strlen(lg_err_message()) > 5);
    lg_err_clear();
    lg_picture_free(&pic);
}

/* Cut anywhere, a picture is void: never half grey. The copy has the exact size, so that a sanitizer
 * sees any read behind it. A PNG's last 12 bytes (IEND), a JPEG's last two and the padding of a WebP
 * carry no pixels; the first two are required all the same. */
static void test_cut(void **state)
{
    (void)state;
    for (size_t i = 0; i < LG_ARRAY_LEN(FILES); i++) {
        size_t bytes;
        uint8_t *data = read_picture(FILES[i].name, &bytes);
        size_t step = bytes > 600 ? 7 : 1;
        for (size_t cut = 0; cut + 2 < bytes; cut += step) {
            uint8_t *part = malloc(cut + !cut);
            memcpy(part, data, cut);
            is_void(FILES[i].name, part, cut);
            free(part);
        }
        is_void(FILES[i].name, data, bytes / 2);
        free(data);
    }
}

static void test_foreign_and_animated(void **state)
{
    (void)state;
    size_t bytes;
    uint8_t *data = read_picture("animated.webp", &bytes);
    is_void("animation", data, bytes);
    free(data);
    is_void("gif", (const uint8_t *)"GIF89a..................", 24);
    is_void("html", (const uint8_t *)"<html>404 not found</html>", 26);
    is_void("nothing", (const uint8_t *)"", 0);
}

/* A damaged byte anywhere never crashes, and in the middle of a PNG it is noticed (checksums). */
static void test_damaged(void **state)
{
    (void)state;
    lg_picture pic = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(FILES); i++) {
        size_t bytes;
        uint8_t *data = read_picture(FILES[i].name, &bytes);
        for (size_t at = 0; at < bytes; at += 3) {
            data[at] ^= 0x5a;
            int rc = lg_picture_decode(data, bytes, 0, &pic);
            assert_true(rc == 0 || rc == LG_ERR_VOID);
            data[at] ^= 0x5a;
        }
        if (strstr(FILES[i].name, ".png")) {
            data[bytes - 30] ^= 1;
            is_void(FILES[i].name, data, bytes);
        }
        free(data);
    }
    lg_err_clear();
    lg_picture_free(&pic);
}

/* A header that promises too many pixels is refused before any memory is taken. */
static void test_too_large(void **state)
{
    (void)state;
    uint8_t png[] = "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0????????????????";
    is_void("65536 a side", png, sizeof png);
    size_t bytes;
    uint8_t *jpeg = read_picture("baseline.jpg", &bytes);
    for (size_t i = 0; i + 9 < bytes; i++)
        if (jpeg[i] == 0xff && jpeg[i + 1] == 0xc0) { /* SOF0: length, precision, height, width */
            memset(jpeg + i + 5, 0x7f, 4);
            break;
        }
    is_void("32639 a side", jpeg, bytes);
    lg_picture pic = {0};
    assert_int_equal(lg_picture_decode(jpeg, bytes, 0, &pic), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "32639"));
    free(jpeg);
    assert_int_equal(lg_picture_reserve(&pic, 16384, 16384), LG_ERR_VOID);
    lg_picture_free(&pic);
    lg_err_clear();
}

static void test_encode_png(void **state)
{
    (void)state;
    const struct lg_st_entry *want = lg_st_find(golden, "rgb.png");
    uint8_t *png, *again;
    size_t bytes, bytes_again;
    int h = (int)want->dim[0], w = (int)want->dim[1];
    assert_int_equal(lg_picture_encode_png(want->data, w, h, &png, &bytes), 0);
    assert_int_equal(lg_picture_encode_png(want->data, w, h, &again, &bytes_again), 0);
    assert_int_equal(bytes, bytes_again);
    assert_memory_equal(png, again, bytes);
    lg_picture pic = {0};
    assert_int_equal(lg_picture_decode(png, bytes, 0, &pic), 0);
    assert_int_equal(pic.width, w);
    assert_memory_equal(pic.rgb, want->data, want->bytes);
    lg_picture_free(&pic);
    free(png);
    free(again);
}

static void test_jpeg_reduction(void **state)
{
    (void)state;
    size_t bytes;
    uint8_t *data = read_picture("baseline.jpg", &bytes); /* 27 x 20 */
    static const struct {
        int side_min, width, height;
    } cases[] = {{0, 27, 20}, {11, 27, 20}, {10, 14, 10}, {5, 7, 5}, {2, 4, 3}};
    lg_picture pic = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        assert_int_equal(lg_picture_decode(data, bytes, cases[i].side_min, &pic), 0);
        assert_int_equal(pic.width, cases[i].width);
        assert_int_equal(pic.height, cases[i].height);
        assert_true(pic.stored_width == 27 && pic.stored_height == 20);
    }
    lg_picture_free(&pic);
    free(data);
}

/* Row and column of the stored picture that come to (y, x), for each orientation (Exif 2.3): its 0th row and 0th column are
 * top and left, top and right, bottom and right, bottom and left, left and top, right and top, right and bottom, left and
 * bottom. */
static size_t stored_at(int orientation, size_t y, size_t x, size_t h, size_t w)
{
    switch (orientation) {
    case 2:
        return y * w + w - 1 - x;
    case 3:
        return (h - 1 - y) * w + w - 1 - x;
    case 4:
        return (h - 1 - y) * w + x;
    case 5:
        return x * w + y;
    case 6:
        return (h - 1 - x) * w + y;
    case 7:
        return (h - 1 - x) * w + w - 1 - y;
    case 8:
        return x * w + w - 1 - y;
    default:
        return y * w + x;
    }
}

static void check_orientation(const uint8_t *jpeg, size_t bytes, int orientation, bool big)
{
    /* Length, name, byte order, the directory's place and count, a text, the orientation, of which byte 40 or 41 is the value. */
    static const uint8_t little_exif[] = {
        0xff, 0xe1, 0, 42, 'E', 'x', 'i', 'f', 0,   0, 'I',  'I', 42, 0, 8, 0, 0, 0, 2, 0, 0x0f, 1,
        2,    0,    4, 0,  0,   0,   'a', 'b', 'c', 0, 0x12, 1,   3,  0, 1, 0, 0, 0, 0, 0, 0,    0};
    static const uint8_t big_exif[] = {
        0xff, 0xe1, 0, 42, 'E', 'x', 'i', 'f', 0,   0, 'M', 'M',  0, 42, 0, 0, 0, 8, 0, 2, 1, 0x0f,
        0,    2,    0, 0,  0,   4,   'a', 'b', 'c', 0, 1,   0x12, 0, 3,  0, 0, 0, 1, 0, 0, 0, 0};
    enum { EXIF_BYTES = sizeof little_exif };
    _Static_assert(sizeof big_exif == EXIF_BYTES, "the same, in another order of bytes");
    uint8_t exif[EXIF_BYTES];
    const size_t n = EXIF_BYTES;
    memcpy(exif, big ? big_exif : little_exif, n);
    exif[big ? 41 : 40] = (uint8_t)orientation;
    uint8_t *turned = malloc(bytes + n);
    memcpy(turned, jpeg, 2);
    memcpy(turned + 2, exif, n);
    memcpy(turned + 2 + n, jpeg + 2, bytes - 2);
    lg_picture a = {0}, b = {0};
    struct lg_picture_size size;
    size_t need;
    assert_int_equal(lg_picture_decode(jpeg, bytes, 11, &a), 0);
    assert_int_equal(lg_picture_decode(turned, bytes + n, 11, &b), 0);
    const bool sideways = orientation >= 5 && orientation <= 8;
    assert_int_equal(b.width, sideways ? a.height : a.width);
    assert_int_equal(b.height, sideways ? a.width : a.height);
    assert_true(b.stored_width == b.width && b.stored_height == b.height);
    assert_int_equal(lg_picture_size(turned, bytes + n, &need, &size), 0);
    assert_true(size.width == b.width && size.height == b.height);
    for (int y = 0; y < b.height; y++)
        for (int x = 0; x < b.width; x++) {
            size_t from =
                stored_at(orientation, (size_t)y, (size_t)x, (size_t)a.height, (size_t)a.width);
            assert_memory_equal(b.rgb + 3 * (y * b.width + x), a.rgb + 3 * from, 3);
        }
    lg_picture_free(&a);
    lg_picture_free(&b);
    free(turned);
}

static void test_orientation(void **state)
{
    (void)state;
    size_t bytes;
    uint8_t *jpeg = read_picture("baseline.jpg", &bytes); /* 27 x 20 */
    for (int orientation = 0; orientation <= 9; orientation++) {
        check_orientation(jpeg, bytes, orientation, false);
        check_orientation(jpeg, bytes, orientation, true);
    }
    free(jpeg);
}

/* Pillow rounds its weights to 22 bits, we to floats: sums of equal taps differ by less than 0.01
 * level, so results by at most one where they fall on a rounding edge, in each of two passes. The
 * second pass amplifies a changed level by the largest weight, below 1.3. */
static void test_resize(void **state)
{
    (void)state;
    static const int sizes[][2] = {{16, 16}, {50, 12}, {77, 64}, {50, 37}};
    const struct lg_st_entry *from = lg_st_find(golden, "fit.source");
    lg_resize_scratch scratch = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(sizes); i++) {
        char name[32];
        int w = sizes[i][0], h = sizes[i][1];
        snprintf(name, sizeof name, "fit.%dx%d", w, h);
        const struct lg_st_entry *want = lg_st_find(golden, name);
        uint8_t *whole = malloc(want->bytes), *part = malloc(want->bytes);
        struct lg_resize_args a = {.rgb = from->data,
                                   .width = (int)from->dim[1],
                                   .height = (int)from->dim[0],
                                   .full_w = w,
                                   .full_h = h,
                                   .out_w = w,
                                   .out_h = h,
                                   .out = whole};
        assert_int_equal(lg_resize(&a, &scratch), 0);
        assert_true(worst(whole, want->data, want->bytes) <= 2);
        size_t differ = 0;
        for (size_t k = 0; k < want->bytes; k++)
            differ += whole[k] != ((const uint8_t *)want->data)[k];
        assert_true(differ * 100 <= want->bytes);
        /* A window of the result equals that part of the whole. */
        a.x0 = 3, a.y0 = 5, a.out_w = w - 7, a.out_h = h - 6, a.out = part;
        assert_int_equal(lg_resize(&a, &scratch), 0);
        for (int y = 0; y < a.out_h; y++)
            assert_memory_equal(part + 3 * y * a.out_w, whole + 3 * ((y + 5) * w + 3),
                                (size_t)(3 * a.out_w));
        free(whole);
        free(part);
    }
    lg_resize_free(&scratch);
}

static double plain_lanczos(double x)
{
    x = fabs(x);
    if (x < 1e-12) return 1;
    if (x >= 3) return 0;
    const double p = M_PI * x;
    return 3 * sin(p) * sin(p / 3) / (p * p);
}

/* Weights of output i of an axis, for inputs from *ret_first on; returns how many. */
static int plain_weights(int in, int full, int i, int *ret_first, float *weight)
{
    const double scale = (double)in / full, stretch = LG_MAX(scale, 1.0);
    const double center = (i + 0.5) * scale, reach = 3 * stretch;
    const int first = LG_MAX((int)floor(center - reach + 0.5), 0);
    const int end = LG_MIN((int)floor(center + reach + 0.5), in);
    double sum = 0;
    *ret_first = first;
    for (int k = first; k < end; k++) sum += plain_lanczos((k + 0.5 - center) / stretch);
    for (int k = first; k < end; k++)
        weight[k - first] = (float)(plain_lanczos((k + 0.5 - center) / stretch) / sum);
    return end - first;
}

static uint8_t plain_level(float sum)
{
    return (uint8_t)((sum < 0 ? 0 : sum > 255 ? 255 : sum) + 0.5f);
}

/* Lines of `in` bytes of three to lines of `out` from o0 on; the axis is (line, position) or (position, line). */
static void plain_axis(const uint8_t *from, int lines, int in, int full, int o0, int out,
                       bool is_across, uint8_t *to)
{
    float *weight = malloc((size_t)in * sizeof *weight);
    for (int o = 0; o < out; o++) {
        int first, n = in == full ? 1 : plain_weights(in, full, o0 + o, &first, weight);
        if (in == full) first = o0 + o, weight[0] = 1;
        for (int l = 0; l < lines; l++)
            for (int c = 0; c < 3; c++) {
                float sum = 0;
                for (int k = 0; k < n; k++)
                    sum +=
                        (float)from[3 * (is_across ? l * in + first + k : (first + k) * lines + l) +
                                    c] *
                        weight[k];
                to[3 * (is_across ? l * out + o : o * lines + l) + c] = plain_level(sum);
            }
    }
    free(weight);
}

static void plain_resize(const struct lg_resize_args *a, uint8_t *out)
{
    uint8_t *rows = malloc((size_t)(a->height * a->out_w * 3));
    plain_axis(a->rgb, a->height, a->width, a->full_w, a->x0, a->out_w, true, rows);
    plain_axis(rows, a->out_w, a->height, a->full_h, a->y0, a->out_h, false, out);
    free(rows);
}

/* What the processor has, then what every one has. */
static void with_both_widths(void (*check)(void))
{
    check();
    lg_wide_allow(false);
    assert_false(lg_wide());
    check();
    lg_wide_allow(true);
}

static int below(uint64_t round, uint64_t what, int n)
{
    return (int)(lg_philox(3, LG_PURPOSE_TEST, round, what).v[0] % (uint32_t)n);
}

/* The picture's memory ends with it, for the sanitizer. Hard edges, so that sums are clipped. */
static uint8_t *random_picture(uint64_t round, int width, int height)
{
    const size_t bytes = (size_t)(width * height) * 3;
    uint8_t *rgb = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++) {
        const uint32_t v = lg_philox(4, LG_PURPOSE_TEST, round, i).v[0];
        rgb[i] = (uint8_t)(v & 0x100 ? v : v & 0x200 ? 255 : 0);
    }
    return rgb;
}

static void check_resize(void)
{
    lg_resize_scratch scratch = {0};
    for (uint64_t round = 0; round < 400; round++) {
        /* Each width up to 40 in turn; at times wide or high, or as many as there were. */
        const int width = round % 9 == 8 ? 90 + below(round, 0, 90) : 1 + below(round, 0, 40);
        const int height = round % 11 == 10 ? 200 : 1 + below(round, 1, 40);
        const int full_w = round % 5 == 1 ? width : 1 + (int)(round % 40);
        const int full_h = round % 5 == 2 ? height : 1 + below(round, 2, 60);
        const int x0 = round % 3 ? below(round, 3, full_w) : 0, y0 = below(round, 4, full_h);
        struct lg_resize_args a = {
            .rgb = random_picture(round, width, height),
            .width = width,
            .height = height,
            .full_w = full_w,
            .full_h = full_h,
            .x0 = x0,
            .y0 = y0,
            /* to the right edge, or not */
            .out_w = round % 2 ? full_w - x0 : 1 + below(round, 5, full_w - x0),
            .out_h = round % 7 ? full_h - y0 : 1 + below(round, 6, full_h - y0)};
        const size_t bytes = (size_t)(a.out_w * a.out_h) * 3;
        uint8_t *want = malloc(bytes);
        a.out = malloc(bytes);
        /* Twice with one scratch, and once with its place moved by one: what it keeps is of that place. */
        for (int k = 0; k < 3; k++) {
            if (k == 2 && a.x0 + a.out_w < full_w)
                a.x0++;
            else if (k == 2 && a.y0 + a.out_h < full_h)
                a.y0++;
            plain_resize(&a, want);
            memset(a.out, 77, bytes);
            assert_int_equal(lg_resize(&a, &scratch), 0);
            if (memcmp(a.out, want, bytes) != 0)
                fail_msg("%d x %d to (%d, %d) %d x %d of %d x %d differs", width, height, a.x0,
                         a.y0, a.out_w, a.out_h, full_w, full_h);
        }
        free((void *)(uintptr_t)a.rgb);
        free(a.out);
        free(want);
    }
    lg_resize_free(&scratch);
}

static void test_resize_plain(void **state)
{
    (void)state;
    with_both_widths(check_resize);
}

/* A picture that needs no resizing shows crop, flip and the planar order exactly. */
static void check_fit(void)
{
    enum { W = 11, H = 4, S = 4 };
    uint8_t rgb[H * W * 3], out[3 * S * S];
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++)
            for (int c = 0; c < 3; c++) rgb[3 * (y * W + x) + c] = (uint8_t)(80 * c + 16 * y + x);
    static const struct {
        double crop_x;
        int x0;
    } cases[] = {{-1, 3}, {0, 0}, {0.1249, 0}, {0.126, 1}, {0.9999, 7}};
    lg_resize_scratch scratch = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++)
        for (int flip = 0; flip < 2; flip++) {
            struct lg_fit_args a = {rgb, W, H, S, S, cases[i].crop_x, 0.5, flip, out, 0};
            assert_int_equal(lg_fit(&a, &scratch), 0);
            for (int c = 0; c < 3; c++)
                for (int y = 0; y < S; y++)
                    for (int x = 0; x < S; x++)
                        assert_int_equal(out[c * S * S + y * S + x],
                                         80 * c + 16 * y + cases[i].x0 + (flip ? S - 1 - x : x));
        }
    lg_resize_free(&scratch);
}

/* Frames of a clip of any width, resized and not: the planes lie apart, and nothing between them is touched. */
static void check_planes(void)
{
    enum { H = 3, FRAMES = 2 };
    lg_resize_scratch scratch = {0};
    for (int round = 0; round < 300; round++) {
        const int w = 1 + round % 150, from_w = w * (1 + round % 3), from_h = H * (1 + round % 3);
        const bool flip = round / 150 == 1;
        const size_t plane = (size_t)(w * H), bytes = plane * 3;
        uint8_t *rgb = random_picture((uint64_t)round, from_w, from_h), *want = malloc(bytes);
        uint8_t *out = malloc(FRAMES * bytes);
        memset(out, 77, FRAMES * bytes);
        const struct lg_fit_args a = {rgb, from_w, from_h, w, H, -1, -1, flip, out, FRAMES * plane};
        assert_int_equal(lg_fit(&a, &scratch), 0);
        plain_resize(&(struct lg_resize_args){rgb, from_w, from_h, w, H, 0, 0, w, H, NULL}, want);
        for (int c = 0; c < 3; c++)
            for (size_t i = 0; i < plane; i++) {
                const size_t x = i % (size_t)w, y = i / (size_t)w;
                const size_t from = y * (size_t)w + (flip ? (size_t)w - 1 - x : x);
                const uint8_t *at = out + (size_t)c * FRAMES * plane + i;
                assert_int_equal(at[0], want[3 * from + (size_t)c]);
                assert_int_equal(at[plane], 77);
            }
        free(rgb);
        free(want);
        free(out);
    }
    lg_resize_free(&scratch);
}

static void test_fit(void **state)
{
    (void)state;
    with_both_widths(check_fit);
    with_both_widths(check_planes);
}

/* One colour stays that colour through any resize: the weights sum to one. */
static void test_flat_stays_flat(void **state)
{
    (void)state;
    enum { W = 701, H = 33 };
    uint8_t *rgb = malloc(W * H * 3), out[3 * 24 * 24];
    memset(rgb, 201, W * H * 3);
    lg_resize_scratch scratch = {0};
    for (int size = 1; size <= 24; size++) {
        struct lg_fit_args a = {rgb, W, H, size, size, 0.7, 0.2, false, out, 0};
        assert_int_equal(lg_fit(&a, &scratch), 0);
        for (int i = 0; i < 3 * size * size; i++) assert_int_equal(out[i], 201);
    }
    lg_resize_free(&scratch);
    free(rgb);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_foreign_and_animated),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_encode_png),
        cmocka_unit_test(test_jpeg_reduction),
        cmocka_unit_test(test_orientation),
        cmocka_unit_test(test_resize),
        cmocka_unit_test(test_resize_plain),
        cmocka_unit_test(test_fit),
        cmocka_unit_test(test_flat_stays_flat),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
