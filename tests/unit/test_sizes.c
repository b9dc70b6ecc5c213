/* Sizes of pictures from their first bytes, those of a whole data set and the file that remembers them; and the
 * fit of a picture to a rectangle. */
#include "base/fs.h"
#include "stages/io/resize.h"
#include "tests/unit/scratch.h"
#include "tests/unit/source_fixture.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static uint8_t *read_picture(const char *name, size_t *ret_bytes)
{
    char path[LG_PATH_BYTES], *data;
    assert_int_equal(lg_path(path, "tests/golden/pictures/%s", name), 0);
    assert_int_equal(lg_read_file(path, 1 << 20, &data, ret_bytes), 0);
    return (uint8_t *)data;
}

/* Whatever part of the file is there: the size, or that more is needed, in the end the size. */
static void check_size(const uint8_t *data, size_t bytes, int width, int height)
{
    size_t need = 0, shown = 0;
    for (size_t n = 0; n <= bytes; n++) {
        struct lg_picture_size size = {-1, -1};
        uint8_t *part = malloc(n ? n : 1); /* so that a sanitizer sees a byte too far */
        memcpy(part, data, n);
        assert_int_equal(lg_picture_size(part, n, &need, &size), 0);
        free(part);
        if (size.width) {
            assert_int_equal(size.width, width);
            assert_int_equal(size.height, height);
            if (!shown) shown = n;
        } else {
            assert_true(need > n && need <= LG_MAX(bytes, (size_t)LG_PICTURE_HEAD_BYTES));
            assert_false(shown);
        }
    }
    assert_true(shown);
}

static void test_golden_pictures(void **state)
{
    (void)state;
    struct dirent *e;
    DIR *dir = opendir("tests/golden/pictures");
    int n = 0;
    assert_non_null(dir);
    while ((e = readdir(dir))) {
        lg_picture pic = {0};
        size_t bytes;
        if (e->d_name[0] == '.' || !strcmp(e->d_name, "animated.webp")) continue;
        uint8_t *data = read_picture(e->d_name, &bytes);
        assert_int_equal(lg_picture_decode(data, bytes, 0, &pic), 0);
        check_size(data, bytes, pic.width, pic.height);
        lg_picture_free(&pic);
        free(data);
        n++;
    }
    closedir(dir);
    assert_true(n >= 16);
}

/* A JPEG whose frame stands behind segments and fill bytes: a profile of 60 KB, a thumbnail with a frame of its own. */
static void test_jpeg_segments(void **state)
{
    (void)state;
    size_t bytes, at = 2;
    uint8_t *jpeg = read_picture("baseline.jpg", &bytes), *more = malloc(bytes + 70000);
    lg_picture pic = {0};
    static const uint8_t thumbnail[] = {0xff, 0xe1, 0, 14, 0xff, 0xd8, 0xff, 0xc0,
                                        0,    17,   8, 0,  7,    0,    9,    3};
    assert_int_equal(lg_picture_decode(jpeg, bytes, 0, &pic), 0);
    memcpy(more, jpeg, 2);
    memcpy(more + at, thumbnail, sizeof thumbnail);
    at += sizeof thumbnail;
    memset(more + at, 0xff, 5); /* fill */
    at += 4;
    memcpy(more + at, (const uint8_t[]){0xff, 0xe2, 60000 >> 8, 60000 & 255}, 4);
    memset(more + at + 4, 0xc0, 60000 - 2);
    at += 2 + 60000;
    memcpy(more + at, jpeg + 2, bytes - 2);
    struct lg_picture_size size;
    size_t need;
    assert_int_equal(lg_picture_size(more, at + bytes - 2, &need, &size), 0);
    assert_int_equal(size.width, pic.width);
    assert_int_equal(size.height, pic.height);
    assert_int_equal(lg_picture_size(more, 4096, &need, &size), 0);
    assert_true(size.width == 0 && need > 60000 && need < 61000);
    lg_picture_free(&pic);
    free(jpeg);
    free(more);
}

static void test_no_size(void **state)
{
    (void)state;
    enum { BYTES = LG_PICTURE_HEAD_BYTES };
    static const struct {
        const char *what;
        uint8_t data[BYTES];
    } cases[] = {
        {"text", "<html>404 not found</html>"},
        {"PNG without IHDR", "\x89PNG\r\n\x1a\n\0\0\0\x0dIDAT\0\0\0\x01\0\0\0\x01"},
        {"PNG of nothing", "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\0\0\0\0\x01"},
        {"PNG too wide", "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\x01\0\0\0\0\0\x01"},
        {"PNG of -1", "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\xff\xff\xff\xff\0\0\0\x01"},
        {"PNG of too many pixels", "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x3f\xff\0\0\x3f\xff"},
        {"JPEG of data alone", "\xff\xd8\xff\xda\0\x08"},
        {"JPEG without a marker", "\xff\xd8\xff\xe0\0\x04\0\0zzz"},
        {"JPEG with a segment of 1", "\xff\xd8\xff\xe0\0\x01"},
        {"JPEG of height 0", "\xff\xd8\xff\xc0\0\x11\x08\0\0\0\x10\x03"},
        {"WebP of nothing", "RIFF\x20\0\0\0WEBPnone"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        struct lg_picture_size size;
        size_t need;
        if (lg_picture_size(cases[i].data, BYTES, &need, &size) != LG_ERR_VOID || size.width)
            fail_msg("%s has a size", cases[i].what);
        lg_err_clear();
    }
}

/* ---- a data set ---- */

static void put(const char *name, int width, int height, size_t *ret_bytes)
{
    uint8_t *png = flat_png(width, height, 9, ret_bytes);
    assert_int_equal(lg_publish_file(scratch_path(name), png, *ret_bytes), 0);
    free(png);
}

static void expect_sizes(const char *cache, const struct lg_item_size *want, size_t n)
{
    lg_source *s = open_source(scratch_path("p"));
    struct lg_item_size *got;
    assert_int_equal(lg_source_count(s), n);
    assert_int_equal(lg_source_sizes(s, cache ? scratch_path(cache) : NULL, &got), 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(got[i].width, want[i].width);
        assert_int_equal(got[i].height, want[i].height);
    }
    free(got);
    lg_source_close(&s);
}

/* Another picture in a file's place, of its size: the fingerprint is the same. */
static void exchange(const char *name, int width, int height, size_t bytes)
{
    size_t less;
    char *png = (char *)flat_png(width, height, 9, &less);
    assert_true(less <= bytes);
    char *padded = calloc(1, bytes);
    memcpy(padded, png, less);
    assert_int_equal(lg_publish_file(scratch_path(name), padded, bytes), 0);
    free(padded);
    free(png);
}

static void test_remembered(void **state)
{
    (void)state;
    size_t bytes, other;
    char *file;
    lg_mkdirs(scratch_path("p"));
    put("p/a.png", 300, 20, &bytes);
    put("p/c.png", 7, 9, &other);
    scratch_write("p/b.png", "no picture");
    const struct lg_item_size first[] = {{300, 20, 1, 0}, {0}, {7, 9, 1, 0}},
                              later[] = {{5, 6, 1, 0}, {0}, {7, 9, 1, 0}};
    expect_sizes("sizes", first, 3);
    exchange("p/a.png", 5, 6, bytes);
    expect_sizes(NULL, later, 3);
    expect_sizes("sizes", first, 3); /* so it was not read again */
    /* Damaged at any byte, cut, or longer: made again, and kept. */
    assert_int_equal(lg_read_file(scratch_path("sizes"), 1 << 16, &file, &bytes), 0);
    for (size_t i = 0; i <= bytes; i++) {
        char *damaged = malloc(bytes + 1);
        memcpy(damaged, file, bytes);
        damaged[bytes] = 0;
        if (i < bytes) damaged[i] ^= 1;
        assert_int_equal(
            lg_publish_file(scratch_path("sizes"), damaged, i == bytes ? bytes + 1 : bytes), 0);
        free(damaged);
        expect_sizes("sizes", later, 3);
        assert_int_equal(lg_publish_file(scratch_path("sizes"), file, bytes), 0);
        expect_sizes("sizes", first, 3);
    }
    assert_int_equal(lg_publish_file(scratch_path("sizes"), file, bytes - 4), 0);
    expect_sizes("sizes", later, 3);
    assert_int_equal(lg_publish_file(scratch_path("sizes"), file, bytes), 0);
    /* Another data set: another fingerprint. */
    scratch_write("p/d.png", "nor this");
    const struct lg_item_size four[] = {{5, 6, 1, 0}, {0}, {7, 9, 1, 0}, {0}};
    expect_sizes("sizes", four, 4);
    expect_sizes("sizes", four, 4);
    /* As many items, others. */
    assert_int_equal(rename(scratch_path("p/c.png"), scratch_path("p/f.png")), 0);
    const struct lg_item_size moved[] = {{5, 6, 1, 0}, {0}, {0}, {7, 9, 1, 0}};
    expect_sizes("sizes", moved, 4);
    expect_sizes("no/such/folder/sizes", moved, 4); /* cannot be kept: no failure */
    free(file);
}

/* A picture whose size comes late, in a shard between others. */
static void test_late_size(void **state)
{
    (void)state;
    enum { FILL = 65000 };
    size_t bytes;
    uint8_t *jpeg = read_picture("baseline.jpg", &bytes), *late = malloc(bytes + FILL);
    lg_picture pic = {0};
    assert_int_equal(lg_picture_decode(jpeg, bytes, 0, &pic), 0);
    memcpy(late, jpeg, 2);
    memcpy(late + 2, (const uint8_t[]){0xff, 0xe3, (FILL - 2) >> 8, (FILL - 2) & 255}, 4);
    memset(late + 6, 0, FILL - 4);
    memcpy(late + 2 + FILL, jpeg + 2, bytes - 2);
    lg_tar_writer *w = tar_open("l.tar");
    put_png(w, "1.png", 3);
    assert_int_equal(lg_tar_writer_add(w, "2.jpg", late, bytes + FILL), 0);
    assert_int_equal(lg_tar_writer_add(w, "3.jpg", late, FILL / 2), 0); /* cut before it */
    put_text(w, "4.txt", "no picture");
    put_png(w, "5.png", 3);
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    lg_source *s = open_source(scratch_path("l.tar"));
    static const int rc[] = {0, 0, LG_ERR_VOID, LG_ERR_VOID, 0};
    for (uint64_t i = 0; i < 5; i++) {
        struct lg_item_size size;
        assert_int_equal(lg_source_size(s, i, &size), rc[i]);
        if (rc[i] == 0) assert_int_equal(size.width, i == 1 ? pic.width : 12);
        if (rc[i] == 0) assert_int_equal(size.height, i == 1 ? pic.height : 8);
    }
    char key[LG_PATH_BYTES];
    lg_source_key(s, 1, key);
    assert_string_equal(key, "l.tar/2");
    lg_source_close(&s);
    lg_picture_free(&pic);
    free(jpeg);
    free(late);
}

/* ---- the fit ---- */

static void test_cover(void **state)
{
    (void)state;
    for (int w = 1; w < 300; w += 7)
        for (int h = 1; h < 300; h += 11)
            for (int out_w = 8; out_w <= 64; out_w += 8)
                for (int out_h = 8; out_h <= 64; out_h += 8) {
                    const struct lg_fit_size f = lg_fit_cover(w, h, out_w, out_h);
                    assert_true(f.width == out_w || f.height == out_h);
                    assert_true(f.width >= out_w && f.height >= out_h);
                    /* the other side in proportion, to half a pixel */
                    const double scale = f.width == out_w ? (double)out_w / w : (double)out_h / h;
                    const double d = f.width == out_w ? f.height - scale * h : f.width - scale * w;
                    assert_true(f.width == out_w && f.height == out_h ? true
                                                                      : d >= -0.5 && d <= 0.5);
                }
}

/* Without scaling: the middle of the wider side, each pixel in its place. */
static void test_rectangle(void **state)
{
    (void)state;
    enum { W = 14, H = 6, OUT_W = 9, OUT_H = 6 };
    uint8_t rgb[W * H * 3], out[3 * OUT_W * OUT_H];
    for (int i = 0; i < W * H; i++)
        for (int c = 0; c < 3; c++) rgb[3 * i + c] = (uint8_t)(i + 85 * c);
    lg_resize_scratch scratch = {0};
    for (int turned = 0; turned < 2; turned++) {
        const int w = turned ? H : W, h = turned ? W : H;
        const int out_w = turned ? OUT_H : OUT_W, out_h = turned ? OUT_W : OUT_H;
        for (int flip = 0; flip < 2; flip++) {
            struct lg_fit_args a = {rgb, w, h, out_w, out_h, -1, -1, flip, out, 0};
            assert_int_equal(lg_fit(&a, &scratch), 0);
            const int x0 = turned ? 0 : 2, y0 = turned ? 2 : 0;
            for (int c = 0; c < 3; c++)
                for (int y = 0; y < out_h; y++)
                    for (int x = 0; x < out_w; x++)
                        assert_int_equal(
                            out[(c * out_h + y) * out_w + x],
                            (uint8_t)((y + y0) * w + (flip ? out_w - 1 - x : x) + x0 + 85 * c));
        }
    }
    lg_resize_free(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_pictures),
        cmocka_unit_test(test_jpeg_segments),
        cmocka_unit_test(test_no_size),
        SOURCE_TEST(test_remembered),
        SOURCE_TEST(test_late_size),
        cmocka_unit_test(test_cover),
        cmocka_unit_test(test_rectangle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
