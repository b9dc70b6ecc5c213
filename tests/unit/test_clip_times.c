/* Which frames a clip is, by times alone, against the definition; and colours against the formula in doubles, of every layout bit for bit
 * against one pixel at a time. */
#include "base/philox.h"
#include "stages/io/clip_decoder.h"
#include "stages/io/wide.h"
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* Shown at these times in 1 / den s, in the order of the file; every `key`-th a key frame. */
static int make(const int64_t *time, size_t n, int key, int64_t den, struct lg_clip_index *x,
                struct lg_clip_info *info)
{
    *x = (struct lg_clip_index){.width = 16, .height = 8, .unit_num = 1, .unit_den = den};
    for (size_t i = 0; i < n; i++) {
        const struct lg_clip_packet p = {
            .time = time[i], .is_shown = true, .is_key = i % (size_t)key == 0};
        assert_int_equal(lg_clip_index_add(x, &p), 0);
    }
    return lg_clip_index_close(x, info);
}

/* Microsecond by microsecond places; frame j is the last at or before start + j / fps. */
static void test_against_definition(void **state)
{
    (void)state;
    static const double rates[] = {5, 7.5, 23.976, 24, 25, 30, 60, 100};
    for (uint64_t round = 0; round < 200; round++) {
        const lg_philox_out r = lg_philox(1, LG_PURPOSE_TEST, round, 0);
        const size_t n = 2 + r.v[0] % 40;
        const int64_t den = 1000 + r.v[1] % 90000;
        const double fps = rates[r.v[2] % LG_ARRAY_LEN(rates)], start = lg_uniform_f64(r.v[3]);
        int64_t time[64], at = -500;
        for (size_t i = 0; i < n; i++) {
            time[i] = at;
            at += den / 50 + lg_philox(1, LG_PURPOSE_TEST, round, 1 + i).v[0] % (den / 20);
        }
        struct lg_clip_index x;
        struct lg_clip_info info;
        assert_int_equal(make(time, n, 6, den, &x, &info), 0);
        const double span = (double)(time[n - 1] - time[0]) / (double)den;
        const double whole = span * (double)n / (double)(n - 1);
        assert_true(fabs((double)info.duration_ms / 1000 - whole) <= 0.0011);
        const struct lg_clip_rate rate = {.fps = fps};
        const uint32_t most = lg_clip_frames_at(&info, &rate);
        /* The last of them begins before the end, one more would not. */
        assert_true((most - 1) / fps < info.duration_ms / 1e3 + 1e-6);
        assert_true(most / fps > info.duration_ms / 1e3 - 1e-6);
        const int frames = 1 + (int)(r.v[1] % most);
        const struct lg_clip_choice c = {.frames = frames, .rate = rate, .start = start};
        struct lg_clip_wanted w;
        assert_int_equal(lg_clip_pick(&x, &info, &c, &w), 0);
        const int64_t places =
            (int64_t)info.duration_ms * 1000 - (int64_t)floor((frames - 1) * 1e6 / fps);
        const int64_t first = LG_MIN((int64_t)(start * (double)places), places - 1);
        const int64_t slack =
            LG_MIN((1000000 + den - 1) / den, info.duration_ms * 1000LL / (int64_t)n / 4);
        int64_t begin = first;
        for (int j = 0; j < frames; j++) {
            const int64_t us = begin + (int64_t)floor(j * 1e6 / fps);
            size_t want = 0;
            while (want + 1 < n && (time[want + 1] - time[0]) * 1000000 / den <= us) want++;
            assert_int_equal(w.packet[j], want);
            if (j == 0) begin = (time[want] - time[0]) * 1000000 / den + slack;
        }
        assert_int_equal(w.run[0].first, w.packet[0] / 6 * 6);
        free(w.packet);
        lg_clip_index_free(&x);
    }
}

/* At the film's own rate each frame comes once, wherever the clip begins, though times are rounded: to ms, to hundredths, to frames. */
static void test_own_rate(void **state)
{
    (void)state;
    enum { FILM = 201 /* a number that rounding makes none of them longer by */ };
    static const struct {
        double rate;
        int64_t den;
    } films[] = {{24, 1000}, {30, 1000}, {60, 1000}, {24000 / 1001.0, 1000},
                 {15, 100},  {25, 25},   {30, 15360}};
    for (size_t k = 0; k < LG_ARRAY_LEN(films); k++) {
        struct lg_clip_index x;
        struct lg_clip_info info;
        struct lg_clip_wanted w;
        int64_t time[FILM];
        for (int i = 0; i < FILM; i++) time[i] = llround(i * (double)films[k].den / films[k].rate);
        assert_int_equal(make(time, FILM, 10, films[k].den, &x, &info), 0);
        for (int s = 0; s < 2000; s++) {
            const struct lg_clip_choice c = {
                .frames = 16, .rate = {.fps = films[k].rate}, .start = (s + 0.5) / 2000};
            assert_int_equal(lg_clip_pick(&x, &info, &c, &w), 0);
            for (int j = 1; j < 16; j++) assert_int_equal(w.packet[j], w.packet[0] + (uint32_t)j);
            free(w.packet);
        }
        lg_clip_index_free(&x);
    }
}

/* 200 packets with key frames at some: where decoding begins, and from where on each must be whole, when it is tried again. */
static void test_open_groups(void **state)
{
    (void)state;
    static const int keys[] = {0, 30, 80, 100, 150, 190}; /* closed, if at all: 0 and 100 */
    static const struct {
        bool is_cut; /* 0 is open */
        int wanted, n_runs;
        size_t first, again, strict;
    } cases[] = {
        {false, 10, 1, 0, 0, 0},    {false, 40, 2, 30, 0, 30},      {false, 85, 2, 80, 0, 80},
        {false, 105, 1, 100, 0, 0}, {false, 160, 2, 150, 100, 150}, {false, 195, 2, 190, 100, 190},
        {true, 10, 2, 0, 0, 80},    {true, 40, 2, 30, 0, 80},       {true, 85, 2, 80, 0, 80},
    };
    for (size_t k = 0; k < LG_ARRAY_LEN(cases); k++) {
        struct lg_clip_index x = {.width = 16, .height = 8, .unit_num = 1, .unit_den = 25};
        struct lg_clip_info info;
        struct lg_clip_wanted w;
        for (int i = 0, n = 0; i < 200; i++) {
            const bool is_key = n < (int)LG_ARRAY_LEN(keys) && i == keys[n];
            const bool is_closed = (i == 0 && !cases[k].is_cut) || i == 100;
            n += is_key;
            const struct lg_clip_packet p = {i, true, is_key, is_key && !is_closed};
            assert_int_equal(lg_clip_index_add(&x, &p), 0);
        }
        assert_int_equal(lg_clip_index_close(&x, &info), 0);
        const struct lg_clip_choice c = {.frames = 1, .start = (cases[k].wanted + 0.5) / 200};
        assert_int_equal(lg_clip_pick(&x, &info, &c, &w), 0);
        assert_int_equal(w.n_runs, cases[k].n_runs);
        assert_int_equal(w.run[0].first, cases[k].first);
        assert_int_equal(w.run[0].strict, cases[k].first);
        if (w.n_runs > 1) {
            assert_int_equal(w.run[1].first, cases[k].again);
            assert_int_equal(w.run[1].strict, cases[k].strict);
        }
        free(w.packet);
        lg_clip_index_free(&x);
    }
}

/* I P B B P B B I B B: packets in the order of the file, times in that of the screen. An I that is shown after the wanted frame
 * does not serve, although it stands before it. */
static void test_reordered(void **state)
{
    (void)state;
    static const int64_t time[] = {0, 3, 1, 2, 6, 4, 5, 9, 7, 8};
    struct lg_clip_index x = {.width = 16, .height = 8, .unit_num = 1, .unit_den = 25};
    struct lg_clip_info info;
    struct lg_clip_wanted w;
    for (size_t i = 0; i < LG_ARRAY_LEN(time); i++)
        assert_int_equal(
            lg_clip_index_add(&x, &(struct lg_clip_packet){time[i], true, i == 0 || i == 7, false}),
            0);
    assert_int_equal(lg_clip_index_close(&x, &info), 0);
    static const uint32_t order[] = {0, 2, 3, 1, 5, 6, 4, 8, 9, 7};
    static const size_t key[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 7};
    for (int s = 0; s < 10; s++) {
        assert_int_equal(
            lg_clip_pick(&x, &info, &(struct lg_clip_choice){.frames = 1, .start = (s + 0.5) / 10},
                         &w),
            0);
        assert_int_equal(w.packet[0], order[s]);
        assert_int_equal(w.run[0].first, key[s]);
        free(w.packet);
    }
    lg_clip_index_free(&x);
}

static void test_refused(void **state)
{
    (void)state;
    static const int64_t twice[] = {0, 4, 8, 4}, slow[] = {0, 26, 52}, quick[] = {0, 1, 2},
                         far_apart[] = {INT64_MIN + 1, INT64_MAX};
    struct lg_clip_index x;
    struct lg_clip_info info;
    assert_int_equal(make(twice, 4, 1, 25, &x, &info), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "two frames at one time, 0.16 s after"));
    lg_clip_index_free(&x);
    assert_int_equal(make(slow, 3, 1, 25, &x, &info), LG_ERR_VOID);
    lg_clip_index_free(&x);
    assert_int_equal(make(slow, 3, 1, 26, &x, &info), 0); /* one a second */
    lg_clip_index_free(&x);
    assert_int_equal(make(quick, 3, 1, 1001, &x, &info), LG_ERR_VOID);
    lg_clip_index_free(&x);
    assert_int_equal(make(quick, 3, 1, 1000, &x, &info), 0);
    lg_clip_index_free(&x);
    assert_int_equal(make(far_apart, 2, 1, 1, &x, &info), LG_ERR_VOID);
    lg_clip_index_free(&x);
    assert_int_equal(make(NULL, 0, 1, 25, &x, &info), LG_ERR_VOID);
    lg_clip_index_free(&x);
    assert_int_equal(make(quick, 3, 1, 0, &x, &info), LG_ERR_VOID);
    lg_clip_index_free(&x);
    static const int sides[][2] = {{0, 8}, {8193, 8}, {8, 8193}, {4097, 4097}, {-1, 4}};
    for (size_t i = 0; i < LG_ARRAY_LEN(sides); i++) {
        x = (struct lg_clip_index){
            .width = sides[i][0], .height = sides[i][1], .unit_num = 1, .unit_den = 25};
        assert_int_equal(lg_clip_index_close(&x, &info), LG_ERR_VOID);
        lg_clip_index_free(&x);
    }
}

/* ---- colours ---- */

static uint8_t rounded(double v)
{
    return (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : floor(v + 0.5));
}

static const double KR[] = {[LG_CLIP_BT601] = .299,
                            [LG_CLIP_BT709] = .2126,
                            [LG_CLIP_BT2020] = .2627,
                            [LG_CLIP_SMPTE240M] = .212,
                            [LG_CLIP_FCC] = .3};
static const double KB[] = {[LG_CLIP_BT601] = .114,
                            [LG_CLIP_BT709] = .0722,
                            [LG_CLIP_BT2020] = .0593,
                            [LG_CLIP_SMPTE240M] = .087,
                            [LG_CLIP_FCC] = .11};

static void test_colours(void **state)
{
    (void)state;
    enum { SIDE = 64 };
    uint16_t plane[3][SIDE * SIDE];
    lg_picture pic = {0};
    for (int colours = LG_CLIP_BT601; colours <= LG_CLIP_FCC; colours++)
        for (int depth = 8; depth <= 16; depth += 2)
            for (int full = 0; full < 2; full++) {
                struct lg_clip_planes p = {.width = SIDE,
                                           .height = SIDE,
                                           .is_full = full,
                                           .n = 3,
                                           .colours = (lg_clip_colours)colours};
                for (int c = 0; c < 3; c++) {
                    for (uint64_t i = 0; i < SIDE * SIDE; i++)
                        plane[c][i] =
                            (uint16_t)(lg_philox(2, LG_PURPOSE_TEST, i, (uint64_t)c).v[0] >>
                                       (32 - depth));
                    p.of[c] = (struct lg_clip_component){.data = (const uint8_t *)plane[c],
                                                         .stride = 2 * SIDE,
                                                         .step = 2,
                                                         .depth = depth};
                }
                if (lg_clip_rgb(&p, &pic) < 0) fail_msg("%s", lg_err_text());
                const double r = KR[colours], b = KB[colours], g = 1 - r - b,
                             steps = 1 << (depth - 8);
                const double most = (1 << depth) - 1, luma = full ? most : 219 * steps,
                             chroma = full ? most : 224 * steps;
                for (int i = 0; i < SIDE * SIDE; i++) {
                    const unsigned mask = depth > 8 ? 0xffff : 0xff;
                    const double y = ((plane[0][i] & mask) - (full ? 0 : 16 * steps)) / luma;
                    const double cb = ((plane[1][i] & mask) - 128 * steps) / chroma,
                                 cr = ((plane[2][i] & mask) - 128 * steps) / chroma;
                    const double want[3] = {y + 2 * (1 - r) * cr,
                                            y - 2 * b * (1 - b) / g * cb - 2 * r * (1 - r) / g * cr,
                                            y + 2 * (1 - b) * cb};
                    for (int c = 0; c < 3; c++)
                        assert_in_range(pic.rgb[3 * i + c] + 1, rounded(255 * want[c]),
                                        rounded(255 * want[c]) + 2);
                }
            }
    lg_picture_free(&pic);
}

/* Samples that cover several pixels, a packed format with opacity, grey. */
static void test_layouts(void **state)
{
    (void)state;
    lg_picture pic = {0};
    const uint8_t y[] = {16, 235, 126, 16, 16, 16}, cb[] = {128, 240}, cr[] = {128, 128};
    struct lg_clip_planes p = {
        .width = 3,
        .height = 2,
        .colours = LG_CLIP_BT601,
        .n = 3,
        .of = {{y, 3, 1, 8, 0, 0, 0}, {cb, 2, 1, 8, 0, 1, 1}, {cr, 2, 1, 8, 0, 1, 1}}};
    assert_int_equal(lg_clip_rgb(&p, &pic), 0);
    assert_int_equal(pic.rgb[0], 0);
    assert_int_equal(pic.rgb[5], 255);
    assert_int_equal(pic.rgb[6], 128);
    assert_int_equal(pic.rgb[8], 255);         /* the third column has the second sample of Cb */
    assert_int_equal(pic.rgb[3 * 5 + 2], 226); /* and so has the second row */
    const uint8_t bgra[] = {1, 2, 3, 255, 10, 20, 30, 0, 0, 100, 255, 51};
    p = (struct lg_clip_planes){.width = 3,
                                .height = 1,
                                .colours = LG_CLIP_RGB,
                                .is_full = true,
                                .n = 4,
                                .of = {{bgra + 2, 12, 4, 8, 0, 0, 0},
                                       {bgra + 1, 12, 4, 8, 0, 0, 0},
                                       {bgra, 12, 4, 8, 0, 0, 0},
                                       {bgra + 3, 12, 4, 8, 0, 0, 0}}};
    assert_int_equal(lg_clip_rgb(&p, &pic), 0);
    static const uint8_t want[] = {3, 2, 1, 255, 255, 255, 255, 224, 204};
    assert_memory_equal(pic.rgb, want, sizeof want);
    p = (struct lg_clip_planes){
        .width = 3, .height = 1, .colours = LG_CLIP_BT709, .n = 1, .of = {{y, 3, 1, 8, 0, 0, 0}}};
    assert_int_equal(lg_clip_rgb(&p, &pic), 0);
    static const uint8_t grey[] = {0, 0, 0, 255, 255, 255, 128, 128, 128};
    assert_memory_equal(pic.rgb, grey, sizeof grey);
    lg_picture_free(&pic);
}

/* ---- every layout ---- */

/* A component's memory, which ends with its last sample, for the sanitizer. */
static struct lg_clip_component random_component(uint64_t round, int c, int width, int height,
                                                 const struct lg_clip_component *like)
{
    struct lg_clip_component k = *like;
    const int n = ((width - 1) >> k.log2_x) + 1, rows = ((height - 1) >> k.log2_y) + 1;
    const int bytes = k.depth > 8 ? 2 : 1;
    k.stride = n * k.step + 5;
    const size_t all = (size_t)((rows - 1) * k.stride + (n - 1) * k.step + bytes);
    uint8_t *data = malloc(all);
    for (uint64_t i = 0; i < all; i++)
        data[i] = (uint8_t)lg_philox(5, LG_PURPOSE_TEST, round, i * 4 + (uint64_t)c).v[0];
    k.data = data;
    return k;
}

static int64_t sample(const struct lg_clip_component *k, int x, int y)
{
    const uint8_t *at = k->data + (y >> k->log2_y) * k->stride + (x >> k->log2_x) * k->step;
    if (k->depth == 8) return at[0];
    const int64_t v = (at[0] | at[1] << 8) >> k->shift & ((1 << k->depth) - 1);
    return k->depth > 12 ? v >> (k->depth - 12) : v;
}

static int64_t in_range(int64_t v, int bits)
{
    v = (v + (INT64_C(1) << (bits - 1))) >> bits;
    return v < 0 ? 0 : v > 255 ? 255 : v;
}

static void plain_pixel(const struct lg_clip_planes *p, int x, int y, int64_t rgb[3])
{
    const int depth = LG_MIN(p->of[0].depth, 12), bits = 16 + depth - 8;
    const double steps = 1 << (depth - 8), white = ldexp(255, bits), most = (1 << depth) - 1;
    const double luma = p->is_full ? most : 219 * steps, chroma = p->is_full ? most : 224 * steps;
    const int64_t by_luma = llround(white / luma), y0 = p->is_full ? 0 : 16 << (depth - 8);
    if (p->colours == LG_CLIP_RGB || p->n == 1) {
        for (int c = 0; c < 3; c++)
            rgb[c] = in_range(by_luma * (sample(&p->of[p->n == 1 ? 0 : c], x, y) - y0), bits);
    } else {
        const double r = KR[p->colours], b = KB[p->colours], g = 1 - r - b, unit = white / chroma;
        const int64_t luma_part = by_luma * (sample(&p->of[0], x, y) - y0);
        const int64_t cb = sample(&p->of[1], x, y) - (1 << (depth - 1));
        const int64_t cr = sample(&p->of[2], x, y) - (1 << (depth - 1));
        rgb[0] = in_range(luma_part + llround(2 * (1 - r) * unit) * cr, bits);
        rgb[1] = in_range(luma_part - llround(2 * b * (1 - b) / g * unit) * cb -
                              llround(2 * r * (1 - r) / g * unit) * cr,
                          bits);
        rgb[2] = in_range(luma_part + llround(2 * (1 - b) * unit) * cb, bits);
    }
    if (p->n < 4) return;
    const int64_t opaque = (1 << depth) - 1, opacity = sample(&p->of[3], x, y);
    for (int c = 0; c < 3; c++)
        rgb[c] = (rgb[c] * opacity + 255 * (opaque - opacity) + opaque / 2) / opaque;
}

/* Widths to 40 and some beyond, all depths, colours and coverings, steps of packed and planar formats; rows that are opaque
 * beside others. */
static void check_every_layout(void)
{
    static const int depths[] = {8, 8, 8, 9, 10, 12, 14, 16}, numbers[] = {1, 3, 3, 4, 4};
    static const int steps[] = {1, 1, 2, 3, 4};
    lg_picture pic = {0};
    for (uint64_t round = 0; round < 1500; round++) {
        const lg_philox_out a = lg_philox(6, LG_PURPOSE_TEST, round, 0);
        const lg_philox_out b = lg_philox(6, LG_PURPOSE_TEST, round, 1);
        const int depth = depths[a.v[0] % LG_ARRAY_LEN(depths)];
        struct lg_clip_planes p = {.width = 1 + (int)(round % (round % 10 ? 40 : 100)),
                                   .height = 1 + (int)(a.v[1] % 5),
                                   .colours = (lg_clip_colours)(a.v[2] % (LG_CLIP_FCC + 1)),
                                   .is_full = a.v[3] & 1,
                                   .n = numbers[b.v[0] % LG_ARRAY_LEN(numbers)]};
        for (int c = 0; c < p.n; c++) {
            const bool covers = (c == 1 || c == 2) && b.v[1] % 4;
            const int two = depth > 8 ? 2 : 1;
            const uint32_t own = lg_philox(6, LG_PURPOSE_TEST, round, 2 + (uint64_t)c).v[0];
            /* Both of chroma cover the same, but one time in four. */
            const uint32_t covering = b.v[1] % 4 == 3 ? own : b.v[2];
            const struct lg_clip_component like = {
                .step = two * steps[b.v[3] % LG_ARRAY_LEN(steps)],
                .depth = depth,
                .shift = depth > 8 ? (int)(own >> 8) % (16 - depth + 1) : 0,
                .log2_x = covers ? (int)(covering % 4) : 0,
                .log2_y = covers ? (int)(covering / 4 % 4) : 0};
            p.of[c] = random_component(round, c, p.width, p.height, &like);
        }
        for (int y = 0; p.n == 4 && y < p.height; y++) /* opaque, but for the last pixel, any */
            for (int x = 0; x < p.width; x++) {
                uint8_t *at =
                    (uint8_t *)(uintptr_t)p.of[3].data + y * p.of[3].stride + x * p.of[3].step;
                const int kind = (int)(round + (uint64_t)y) % 3;
                if (kind == 0 || (kind == 1 && x < p.width - 1)) memset(at, 255, depth > 8 ? 2 : 1);
            }
        if (lg_clip_rgb(&p, &pic) < 0) fail_msg("%s", lg_err_text());
        for (int y = 0; y < p.height; y++)
            for (int x = 0; x < p.width; x++) {
                int64_t want[3];
                plain_pixel(&p, x, y, want);
                for (int c = 0; c < 3; c++)
                    if (pic.rgb[3 * (y * p.width + x) + c] != want[c])
                        fail_msg("round %llu, %d of (%d, %d): %d for %d", (unsigned long long)round,
                                 c, x, y, pic.rgb[3 * (y * p.width + x) + c], (int)want[c]);
            }
        for (int c = 0; c < p.n; c++) free((void *)(uintptr_t)p.of[c].data);
    }
    lg_picture_free(&pic);
}

/* In the vectors that the processor has, then in those that every one has. */
static void test_every_layout(void **state)
{
    (void)state;
    check_every_layout();
    lg_wide_allow(false);
    assert_false(lg_wide());
    check_every_layout();
    lg_wide_allow(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_own_rate),
        cmocka_unit_test(test_open_groups),
        cmocka_unit_test(test_reordered),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_colours),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_every_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
