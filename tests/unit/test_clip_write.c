/* Clips as other decoders see them: exact where the format is, near where it is not; the same bytes each time. */
#include "base/fs.h"
#include "base/philox.h"
#include "stages/io/clip_write.h"
#include "stages/io/palette.h"
#include "stages/io/picture.h"
#include "tests/unit/read_clip.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static const bool is_exact[] = {
#define LG_CLIP_FORMAT(name, is_exact, text) is_exact,
#include "stages/io/clip_formats.def"
#undef LG_CLIP_FORMAT
};

/* A disc of few colours that goes to the right on a slope of grey; it rests in the second frame. */
static uint8_t *disc(const struct lg_clip *c, int greys)
{
    uint8_t *rgb = malloc((size_t)c->frames * (size_t)c->height * (size_t)c->width * 3), *p = rgb;
    assert_non_null(rgb);
    for (int f = 0; f < c->frames; f++)
        for (int y = 0; y < c->height; y++)
            for (int x = 0; x < c->width; x++, p += 3) {
                const int dx = x - (f < 2 ? 0 : f) - c->width / 3, dy = y - c->height / 2;
                const int grey = 255 - (x * greys / c->width) * (128 / greys);
                const bool in = 9 * (dx * dx + dy * dy) < c->height * c->height;
                p[0] = (uint8_t)(in ? 200 : grey);
                p[1] = (uint8_t)(in ? 30 : grey);
                p[2] = (uint8_t)(in ? 60 : grey);
            }
    return rgb;
}

static struct seen_clip written(const struct lg_clip *c, lg_clip_format format)
{
    uint8_t *data, *again;
    size_t bytes, bytes_again;
    assert_int_equal(lg_clip_encode(c, format, &data, &bytes), 0);
    assert_int_equal(lg_clip_encode(c, format, &again, &bytes_again), 0);
    assert_int_equal(bytes, bytes_again);
    assert_memory_equal(data, again, bytes);
    struct seen_clip seen = read_clip(data, bytes, lg_clip_format_name(format));
    free(data);
    free(again);
    return seen;
}

static void test_exact_formats(void **state)
{
    (void)state;
    /* The GIF has few enough colours. */
    static const struct lg_clip shapes[] = {
        {.frames = 8, .height = 32, .width = 32, .fps = 8},
        {.frames = 3, .height = 17, .width = 41, .fps = 10},
        {.frames = 2, .height = 1, .width = 1, .fps = 25},
        {.frames = 5, .height = 90, .width = 120, .fps = 30},
    };
    static const lg_clip_format formats[] = {LG_CLIP_gif, LG_CLIP_webp, LG_CLIP_mkv};
    for (size_t i = 0; i < LG_ARRAY_LEN(shapes); i++)
        for (size_t k = 0; k < LG_ARRAY_LEN(formats); k++) {
            struct lg_clip c = shapes[i];
            uint8_t *rgb = disc(&c, 64);
            c.rgb = rgb;
            struct seen_clip s = written(&c, formats[k]);
            assert_int_equal(s.width, c.width);
            assert_int_equal(s.height, c.height);
            assert_int_equal(s.frames, c.frames);
            /* A GIF counts hundredths of a second, the others thousandths. */
            assert_true(fabs(s.fps - c.fps) < 0.04 * c.fps);
            assert_memory_equal(s.rgb, rgb, (size_t)3 * c.frames * c.height * c.width);
            free(s.rgb);
            free(rgb);
        }
}

/* Noise of 256 greys fills the table of codes several times, and every width of a code occurs. */
static void test_gif_of_noise(void **state)
{
    (void)state;
    struct lg_clip c = {.frames = 2, .height = 150, .width = 151, .fps = 12};
    const size_t pixels = (size_t)c.frames * (size_t)c.height * (size_t)c.width;
    uint8_t *rgb = malloc(3 * pixels);
    for (int greys = 2; greys <= 256; greys += greys < 8 ? 1 : 62) {
        for (size_t i = 0; i < pixels; i++) {
            lg_philox_out b = lg_philox(77, LG_PURPOSE_NOISE, i, 0);
            memset(rgb + 3 * i, (int)(b.v[0] % (uint32_t)greys) * (255 / (greys - 1)), 3);
        }
        c.rgb = rgb;
        struct seen_clip s = written(&c, LG_CLIP_gif);
        assert_int_equal(s.frames, c.frames);
        assert_memory_equal(s.rgb, rgb, 3 * pixels);
        free(s.rgb);
    }
    free(rgb);
}

/* In grey, since colours have half the resolution: each row of each frame within 3 levels, root mean square, which is where the
 * quantisers that were chosen end. */
static void test_lossy_formats(void **state)
{
    (void)state;
    static const lg_clip_format formats[] = {LG_CLIP_mp4, LG_CLIP_webm};
    for (size_t k = 0; k < LG_ARRAY_LEN(formats); k++)
        for (int odd = 0; odd < 2; odd++) {
            struct lg_clip c = {.frames = 8, .height = 48 + odd, .width = 64 + odd, .fps = 12.5};
            uint8_t *rgb = disc(&c, 64);
            for (int i = 0; i < c.frames * c.height * c.width; i++)
                memset(rgb + 3 * i, rgb[3 * i + 1], 3);
            c.rgb = rgb;
            assert_false(is_exact[formats[k]]);
            struct seen_clip s = written(&c, formats[k]);
            assert_int_equal(s.frames, c.frames);
            assert_int_equal(s.height, 48 + 2 * odd);
            assert_int_equal(s.width, 64 + 2 * odd);
            assert_true(fabs(s.fps - c.fps) < 0.01 * c.fps);
            for (int f = 0; f < c.frames; f++)
                for (int y = 0; y < c.height; y++) {
                    const uint8_t *a = s.rgb + 3 * ((f * s.height + y) * s.width),
                                  *b = rgb + 3 * ((f * c.height + y) * c.width);
                    double squares = 0;
                    for (int i = 0; i < 3 * c.width; i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
                    assert_true(squares < 3 * 3 * 3 * c.width);
                }
            free(s.rgb);
            free(rgb);
        }
}

/* Levels of black, white and primaries in BT.601: what a player shows is what was meant, to the rounding. */
static void test_flat_colours(void **state)
{
    (void)state;
    static const uint8_t colours[][3] = {{0, 0, 0},   {255, 255, 255}, {255, 0, 0},
                                         {0, 255, 0}, {0, 0, 255},     {120, 130, 140}};
    for (size_t i = 0; i < 2 * LG_ARRAY_LEN(colours); i++) {
        const uint8_t *want = colours[i / 2];
        struct lg_clip c = {.frames = 1, .height = 32, .width = 32, .fps = 1};
        uint8_t rgb[32 * 32 * 3];
        for (int p = 0; p < 32 * 32; p++) memcpy(rgb + 3 * p, want, 3);
        c.rgb = rgb;
        struct seen_clip s = written(&c, i % 2 ? LG_CLIP_mp4 : LG_CLIP_webm);
        for (int k = 0; k < 3; k++) assert_in_range(s.rgb[3 * 500 + k] - want[k] + 3, 0, 6);
        free(s.rgb);
    }
}

static void test_strip(void **state)
{
    (void)state;
    struct lg_clip c = {.frames = 3, .height = 5, .width = 7, .fps = 8};
    uint8_t *rgb = disc(&c, 4), *png;
    size_t bytes;
    lg_picture pic = {0};
    c.rgb = rgb;
    assert_int_equal(lg_clip_encode(&c, LG_CLIP_png, &png, &bytes), 0);
    assert_int_equal(lg_picture_decode(png, bytes, 0, &pic), 0);
    assert_int_equal(pic.width, 21);
    assert_int_equal(pic.height, 5);
    for (int f = 0; f < 3; f++)
        for (int y = 0; y < 5; y++)
            assert_memory_equal(pic.rgb + 3 * (y * 21 + f * 7), rgb + 3 * ((f * 5 + y) * 7), 21);
    lg_picture_free(&pic);
    free(png);
    free(rgb);
}

/* All of 32^3 colours in 256: better than three bits of red and green and two of blue; few colours stay what they are. */
static void test_palette(void **state)
{
    (void)state;
    enum { N = 32 * 32 * 32 };
    struct lg_palette p;
    uint8_t *rgb = malloc(3 * N), *index = malloc(N);
    double error = 0, fixed = 0;
    for (int i = 0; i < N; i++)
        for (int c = 0; c < 3; c++) rgb[3 * i + c] = (uint8_t)((i >> 5 * c & 31) * 8);
    assert_int_equal(lg_palette_of(rgb, N, &p, index), 0);
    assert_int_equal(p.n, 256);
    for (int i = 0; i < N; i++)
        for (int c = 0; c < 3; c++) {
            const int bits = c == 2 ? 2 : 3, v = rgb[3 * i + c], step = 256 >> bits;
            const double middle = v / step * step + step / 2 - 4; /* the mean of the levels in it */
            fixed += (v - middle) * (v - middle);
            error += (v - p.rgb[index[i]][c]) * (v - p.rgb[index[i]][c]);
        }
    assert_true(error <= fixed);
    for (int i = 0; i < N; i++) memset(rgb + 3 * i, i * 7 % 256, 3);
    assert_int_equal(lg_palette_of(rgb, N, &p, index), 0);
    assert_int_equal(p.n, 256);
    for (int i = 0; i < N; i++) assert_memory_equal(rgb + 3 * i, p.rgb[index[i]], 3);
    free(rgb);
    free(index);
}

static void test_refusals(void **state)
{
    (void)state;
    lg_clip_format f;
    uint8_t rgb[3] = {0}, *data;
    size_t bytes;
    struct lg_clip c = {.frames = 1, .height = 1, .width = 1, .fps = 0, .rgb = rgb};
    assert_int_equal(lg_clip_format_of("a.b/c.gif", &f), 0);
    assert_int_equal(f, LG_CLIP_gif);
    static const char *const bad[] = {"clip", "a.gif/clip", "a.GIF", "a.avi", ".gif/", "gif"};
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        assert_int_equal(lg_clip_format_of(bad[i], &f), LG_ERR_USAGE);
        assert_non_null(strstr(lg_err_message(), ".webm"));
    }
    assert_int_equal(lg_clip_encode(&c, LG_CLIP_gif, &data, &bytes), LG_ERR_USAGE);
    c.fps = 1001;
    assert_int_equal(lg_clip_encode(&c, LG_CLIP_gif, &data, &bytes), LG_ERR_USAGE);
    c.fps = NAN;
    assert_int_equal(lg_clip_encode(&c, LG_CLIP_gif, &data, &bytes), LG_ERR_USAGE);
    c.fps = 8;
    c.width = 16384;
    for (int i = LG_CLIP_gif; i < LG_CLIP_FORMATS; i++)
        assert_int_equal(lg_clip_encode(&c, (lg_clip_format)i, &data, &bytes), LG_ERR_USAGE);
    assert_non_null(strstr(lg_err_message(), "16384"));
    lg_err_clear();
}

static void test_save(void **state)
{
    (void)state;
    struct lg_clip c = {.frames = 2, .height = 9, .width = 9, .fps = 8};
    uint8_t *rgb = disc(&c, 4);
    char *text;
    size_t bytes;
    c.rgb = rgb;
    assert_int_equal(lg_clip_save(&c, scratch_path("clip.gif")), 0);
    assert_int_equal(lg_read_file(scratch_path("clip.gif"), 1 << 20, &text, &bytes), 0);
    assert_memory_equal(text, "GIF89a", 6);
    assert_int_equal(lg_clip_save(&c, scratch_path("clip.bmp")), LG_ERR_USAGE);
    lg_err_clear();
    free(text);
    free(rgb);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_formats), cmocka_unit_test(test_gif_of_noise),
        cmocka_unit_test(test_lossy_formats), cmocka_unit_test(test_flat_colours),
        cmocka_unit_test(test_strip),         cmocka_unit_test(test_palette),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_save),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
