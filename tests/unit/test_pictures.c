/* The grid of pictures and clips: each where it belongs, in the right colour, on white; strips of frames in a PNG. */
#include "base/fs.h"
#include "stages/io/picture.h"
#include "stages/sample/pictures.h"
#include "tests/unit/read_clip.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { H = 3, W = 5, CELL_H = H + 4, CELL_W = W + 4 };

/* Its own level for each value, below 250. */
static uint8_t level(int picture, int channel, int frame, int y, int x)
{
    return (uint8_t)((picture * 77 + channel * 50 + frame * 31 + y * 7 + x * 3) % 250);
}

static lg_pictures make(int n, int frames)
{
    lg_pictures p = {.n = n, .frames = frames, .height = H, .width = W};
    uint8_t *at = p.pixels = malloc((size_t)(n * 3 * frames * H * W));
    assert_non_null(at);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 3; c++)
            for (int f = 0; f < frames; f++)
                for (int y = 0; y < H; y++)
                    for (int x = 0; x < W; x++) *at++ = level(i, c, f, y, x);
    return p;
}

/* A pixel of a frame of the grid. */
static uint8_t want(int n, int columns, int f, int y, int x, int c)
{
    const int i = y / CELL_H * columns + x / CELL_W, py = y % CELL_H - 2, px = x % CELL_W - 2;
    return i < n && py >= 0 && py < H && px >= 0 && px < W ? level(i, c, f, py, px) : 255;
}

struct view {
    int n, columns, frames, height, width;
    bool in_strips;
};

/* rgb: frames one behind the other, or side by side. */
static void compare(const struct view *v, const uint8_t *rgb)
{
    for (int f = 0; f < v->frames; f++)
        for (int y = 0; y < v->height; y++)
            for (int x = 0; x < v->width; x++)
                for (int c = 0; c < 3; c++) {
                    const size_t at = v->in_strips ? (size_t)((y * v->frames + f) * v->width + x)
                                                   : (size_t)((f * v->height + y) * v->width + x);
                    if (rgb[3 * at + (size_t)c] != want(v->n, v->columns, f, y, x, c))
                        fail_msg("frame %d, row %d, column %d, colour %d", f, y, x, c);
                }
}

static uint8_t *saved(const lg_pictures *p, int columns, const char *name, size_t *ret_bytes)
{
    char *data;
    const struct lg_grid_look look = {.columns = columns, .fps = 8};
    assert_int_equal(lg_pictures_save(p, &look, scratch_path(name)), 0);
    assert_int_equal(lg_read_file(scratch_path(name), 1 << 20, &data, ret_bytes), 0);
    return (uint8_t *)data;
}

static void check_png(int n, int frames, int columns, int want_columns)
{
    const int rows = (n + want_columns - 1) / want_columns;
    const struct view v = {n, want_columns, frames, rows * CELL_H, want_columns * CELL_W, true};
    lg_pictures p = make(n, frames);
    lg_picture seen = {0};
    size_t bytes;
    uint8_t *png = saved(&p, columns, "grid.png", &bytes);
    assert_int_equal(lg_picture_decode(png, bytes, 0, &seen), 0);
    assert_int_equal(seen.width, v.width * frames);
    assert_int_equal(seen.height, v.height);
    compare(&v, seen.rgb);
    lg_picture_free(&seen);
    lg_pictures_free(&p);
    free(png);
}

static void test_png(void **state)
{
    (void)state;
    check_png(1, 1, 0, 1);
    check_png(5, 1, 0, 3);
    check_png(5, 1, 2, 2);
    check_png(3, 1, 7, 3);
    check_png(3, 4, 0, 1); /* a row for each */
    check_png(3, 4, 2, 2);
}

static void test_animations(void **state)
{
    (void)state;
    static const char *const names[] = {"gif", "webp", "mkv"};
    const struct view v = {2, 2, 3, CELL_H, 2 * CELL_W, false}; /* few enough colours for a GIF */
    lg_pictures p = make(v.n, v.frames);
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        char name[32] = "grid.";
        size_t bytes;
        uint8_t *data = saved(&p, 0, strcat(name, names[i]), &bytes);
        struct seen_clip seen = read_clip(data, bytes, names[i]);
        assert_int_equal(seen.frames, v.frames);
        assert_int_equal(seen.height, v.height);
        assert_int_equal(seen.width, v.width);
        compare(&v, seen.rgb);
        free(seen.rgb);
        free(data);
    }
    assert_int_equal(
        lg_pictures_save(&p, &(struct lg_grid_look){.fps = 8}, scratch_path("grid.bmp")),
        LG_ERR_USAGE);
    assert_false(lg_path_exists(scratch_path("grid.bmp")));
    lg_err_clear();
    lg_pictures_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_png),
                                       cmocka_unit_test(test_animations)};
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
