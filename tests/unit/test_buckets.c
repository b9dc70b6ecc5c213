/* Tables of buckets, and the bucket that is nearest to a picture. */
#include "config/buckets.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static int make(struct lg_buckets *ret, int size, int unit, int micro_batch, int n,
                const char *const *words)
{
    struct lg_strlist wanted = {(char **)words, n};
    return lg_buckets_make(&wanted,
                           &(struct lg_buckets_spec){.height = size,
                                                     .width = size,
                                                     .frames = 1,
                                                     .factor_time = 1,
                                                     .unit = unit,
                                                     .micro_batch = micro_batch},
                           ret);
}
#define MAKE(ret, size, unit, micro_batch, ...)                                                    \
    make(ret, size, unit, micro_batch, (int)LG_ARRAY_LEN(((const char *const[]){__VA_ARGS__})),    \
         (const char *const[]){__VA_ARGS__})

static int find(const struct lg_buckets *b, int height, int width)
{
    for (int k = 0; k < b->n; k++)
        if (b->of[k].height == height && b->of[k].width == width) return k;
    return -1;
}

static void test_none(void **state)
{
    (void)state;
    struct lg_buckets b = {.n = 7};
    assert_int_equal(make(&b, 64, 16, 4, 0, NULL), 0);
    assert_int_equal(b.n, 0);
    b.n = 7;
    assert_int_equal(MAKE(&b, 64, 16, 4, "square"), 0);
    assert_int_equal(b.n, 0);
}

/* What kohya-ss/sd-scripts' make_bucket_resolutions gives for these sizes, and its properties for others. */
static void test_ratio(void **state)
{
    (void)state;
    struct lg_buckets b;
    assert_int_equal(MAKE(&b, 1024, 16, 4, "ratio"), 0);
    assert_int_equal(b.n, 41);
    assert_true(find(&b, 1024, 1024) >= 0 && find(&b, 832, 1216) >= 0 && find(&b, 512, 2048) >= 0);
    assert_true(find(&b, 256, 2048) >= 0 && find(&b, 2048, 256) >= 0);
    assert_int_equal(MAKE(&b, 512, 16, 4, "ratio"), 0);
    assert_true(find(&b, 512, 512) >= 0 && find(&b, 256, 1024) >= 0 && find(&b, 576, 448) >= 0);
    for (int size = 16; size <= 2048; size *= 2) {
        assert_int_equal(MAKE(&b, size, 4, 8, "ratio"), 0);
        assert_true(b.n >= 3 && find(&b, size, size) >= 0);
        for (int k = 0; k < b.n; k++) {
            const struct lg_bucket *o = &b.of[k];
            assert_true(find(&b, o->width, o->height) >= 0);
            assert_true(o->height * o->width <= size * size && o->height <= 2 * size);
            assert_true(o->height % 4 == 0 && o->width % 4 == 0);
            assert_int_equal(o->rows, 8);
            if (k) /* sorted */
                assert_true(b.of[k - 1].height < o->height ||
                            (b.of[k - 1].height == o->height && b.of[k - 1].width < o->width));
        }
    }
}

/* ASPECT_RATIO_1024 of PixArt: height and width of each key. */
static void test_pixart(void **state)
{
    (void)state;
    static const int wider[][2] = {
        {512, 2048}, {512, 1984}, {512, 1920}, {512, 1856}, {576, 1792}, {576, 1728}, {576, 1664},
        {640, 1600}, {640, 1536}, {704, 1472}, {704, 1408}, {704, 1344}, {768, 1344}, {768, 1280},
        {832, 1216}, {832, 1152}, {896, 1152}, {896, 1088}, {960, 1088}, {960, 1024},
    };
    struct lg_buckets b;
    for (int part = 1; part <= 4; part *= 2) {
        assert_int_equal(MAKE(&b, 1024 / part, 16, 2, "pixart"), 0);
        assert_int_equal(b.n, 40);
        assert_true(find(&b, 1024 / part, 1024 / part) >= 0);
        for (size_t i = 0; i < LG_ARRAY_LEN(wider); i++) {
            const int h = wider[i][0] / part, w = wider[i][1] / part;
            assert_true(find(&b, h, w) >= 0);
            assert_int_equal(find(&b, w, h) >= 0, wider[i][1] != 1344 || wider[i][0] != 704);
        }
    }
    assert_int_equal(MAKE(&b, 768, 16, 2, "pixart"), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "data.size = 256, 512 or 1024, not 768"));
}

static void test_list(void **state)
{
    (void)state;
    struct lg_buckets b;
    assert_int_equal(MAKE(&b, 512, 16, 8, "1024x512", "512x512", "1024x1024", "2048x2048"), 0);
    assert_int_equal(b.n, 4);
    assert_int_equal(b.of[find(&b, 512, 512)].rows, 8);
    assert_int_equal(b.of[find(&b, 1024, 512)].rows, 4);
    assert_int_equal(b.of[find(&b, 1024, 1024)].rows, 2);
    assert_int_equal(b.of[find(&b, 2048, 2048)].rows, 1); /* although it is twice as much */
    assert_int_equal(MAKE(&b, 1024, 16, 8, "512x512"), 0);
    assert_int_equal(b.of[0].rows, 8); /* no more than the micro-batch has places */
    static const struct {
        const char *word, *says;
    } wrong[] = {
        {"1024", "expected HEIGHTxWIDTH"},
        {"1024x", "expected HEIGHTxWIDTH"},
        {"1024x512x3x4", "expected HEIGHTxWIDTH"},
        {"0x512x512", "expected HEIGHTxWIDTH"},
        {"4097x512x512", "expected HEIGHTxWIDTH"},
        {"0x512", "expected HEIGHTxWIDTH"},
        {"-16x512", "expected HEIGHTxWIDTH"},
        {"16384x512", "at most 8192"},
        {"99999999999x512", "expected HEIGHTxWIDTH"},
        {"ratio", "expected HEIGHTxWIDTH"}, /* beside another */
        {"1000x512", "multiples of 16 pixels (the VAE's factor x model.patch), as 1008x512"},
        {"64x64", "64x64 stands there twice"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++) {
        assert_int_equal(MAKE(&b, 512, 16, 8, "64x64", wrong[i].word), LG_ERR_CONFIG);
        if (!strstr(lg_err_message(), wrong[i].says)) fail_msg("%s", lg_err_message());
        assert_int_equal(b.n, 0);
    }
}

/* Beside pictures; a shape without frames has those of data.frames. */
static void test_frames(void **state)
{
    (void)state;
    const char *words[] = {"1x64x64", "17x64x64", "32x64", "9x64x64", "17x64x32", "17x64x96"};
    struct lg_strlist wanted = {(char **)words, 4};
    struct lg_buckets_spec spec = {
        .height = 64, .width = 64, .frames = 17, .unit = 16, .factor_time = 8, .micro_batch = 4};
    struct lg_buckets b, again;
    char text[LG_BUCKETS_TEXT_BYTES];
    assert_int_equal(lg_buckets_make(&wanted, &spec, &b), 0);
    lg_buckets_print(&b, text);
    assert_string_equal(text, "64x64*4,9x64x64*4,17x32x64*4,17x64x64*4");
    assert_int_equal(lg_buckets_parse(text, &again), 0);
    assert_memory_equal(&b, &again, sizeof b);
    wanted = (struct lg_strlist){(char **)words + 4, 2};
    assert_int_equal(lg_buckets_make(&wanted, &spec, &b), 0);
    assert_int_equal(b.of[1].rows, 2); /* 4 x 17 x 64 x 64 pixels and no more */
    words[0] = "16x64x64";
    wanted = (struct lg_strlist){(char **)words, 1};
    assert_int_equal(lg_buckets_make(&wanted, &spec, &b), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "16x64x64: frames must be a multiple of 8 (the VAE's "
                                             "factor in time) and one more, as 17x64x64"));
    spec.factor_time = 1;
    assert_int_equal(lg_buckets_make(&wanted, &spec, &b), 0);
    words[0] = "ratio", spec.frames = 5;
    assert_int_equal(lg_buckets_make(&wanted, &spec, &b), 0);
    for (int k = 0; k < b.n; k++) assert_int_equal(b.of[k].frames, 5);
    static const char *const wrong[] = {"0x64x64*4", "17x64*4*4", "17x64x64x2*4", "5000x64x64*1"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++)
        assert_int_equal(lg_buckets_parse(wrong[i], &again), LG_ERR_CORRUPT);
}

/* Against the definition in doubles, for ratios that are not nearly as far from two buckets. */
static void test_nearest(void **state)
{
    (void)state;
    struct lg_buckets b;
    assert_int_equal(MAKE(&b, 1024, 16, 1, "ratio"), 0);
    int differs = 0;
    for (int h = 1; h <= 16384; h += 1 + h / 7)
        for (int w = 1; w <= 16384; w += 1 + w / 9) {
            const int k = lg_buckets_nearest(&b, NULL, h, w);
            const double r = log((double)h / w);
            double least = INFINITY;
            for (int i = 0; i < b.n; i++)
                least = fmin(least, fabs(log((double)b.of[i].height / b.of[i].width) - r));
            const double mine = fabs(log((double)b.of[k].height / b.of[k].width) - r);
            assert_true(mine <= least + 1e-12);
            const struct lg_bucket *o = &b.of[k]; /* a picture turned: the bucket turned */
            const struct lg_bucket *turned = &b.of[lg_buckets_nearest(&b, NULL, w, h)];
            differs += turned->height != o->width || turned->width != o->height;
        }
    assert_true(differs <= 20); /* as far from two */
    bool used[LG_BUCKETS_MAX] = {false};
    used[find(&b, 512, 2048)] = used[find(&b, 1024, 1024)] = true;
    assert_int_equal(lg_buckets_nearest(&b, used, 2048, 512), find(&b, 1024, 1024));
    assert_int_equal(lg_buckets_nearest(&b, used, 500, 1500), find(&b, 512, 2048));
}

/* Buckets of one ratio: a picture goes to the largest that it covers. */
static void test_nearest_of_one_ratio(void **state)
{
    (void)state;
    struct lg_buckets b;
    assert_int_equal(MAKE(&b, 512, 16, 8, "256x256", "512x512", "1024x1024"), 0);
    assert_int_equal(b.of[lg_buckets_nearest(&b, NULL, 100, 100)].height, 256);
    assert_int_equal(b.of[lg_buckets_nearest(&b, NULL, 256, 300)].height, 256);
    assert_int_equal(b.of[lg_buckets_nearest(&b, NULL, 800, 600)].height, 512);
    assert_int_equal(b.of[lg_buckets_nearest(&b, NULL, 1023, 5000)].height, 512);
    assert_int_equal(b.of[lg_buckets_nearest(&b, NULL, 5000, 1024)].height, 1024);
}

static void test_text(void **state)
{
    (void)state;
    struct lg_buckets b, again;
    char text[LG_BUCKETS_TEXT_BYTES], other[LG_BUCKETS_TEXT_BYTES];
    assert_int_equal(MAKE(&b, 1024, 16, 4, "ratio"), 0);
    lg_buckets_print(&b, text);
    assert_int_equal(lg_buckets_parse(text, &again), 0);
    lg_buckets_print(&again, other);
    assert_string_equal(text, other);
    assert_int_equal(again.n, 41);
    assert_int_equal(lg_buckets_parse("", &again), 0);
    assert_int_equal(again.n, 0);
    static const char *const wrong[] = {"64x64",  "64x64*4,", ",64x64*4",        "64x64*0",
                                        "0x64*1", "64x64*4 ", "64x64*4;64x64*4", "x"};
    for (size_t i = 0; i < LG_ARRAY_LEN(wrong); i++)
        assert_int_equal(lg_buckets_parse(wrong[i], &again), LG_ERR_CORRUPT);
    char many[8 * 140] = "";
    for (int i = 0; i < 130; i++) strcat(many, i ? ",8x8*1" : "8x8*1");
    assert_int_equal(lg_buckets_parse(many, &again), LG_ERR_CORRUPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_none),    cmocka_unit_test(test_ratio),
        cmocka_unit_test(test_pixart),  cmocka_unit_test(test_list),
        cmocka_unit_test(test_nearest), cmocka_unit_test(test_nearest_of_one_ratio),
        cmocka_unit_test(test_text),    cmocka_unit_test(test_frames),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
