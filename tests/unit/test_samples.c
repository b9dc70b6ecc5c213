/* What sample n is: a function of n alone, whatever was read before; half a picture or a latent of
 * another shape makes it void. How data sets are found and read: test_source. */
#include "base/fs.h"
#include "stages/io/permute.h"
#include "stages/io/picture.h"
#include "stages/io/safetensors.h"
#include "tests/unit/scratch.h"
#include "tests/unit/source_fixture.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_sample_is_a_function_of_n(void **state)
{
    (void)state;
    enum { COUNT = 7, S = 8 };
    lg_source *s = open_source(make_shard("s.tar", 0, COUNT));
    struct lg_sample_rule rule = {
        .seed = 5, .shape = {1, S, S}, .random_crop = true, .random_flip = true, .dropout = 0.3};
    lg_sample x = {0}, y = {0};
    uint8_t a[3 * S * S], b[3 * S * S];
    int dropped = 0, seen[3][COUNT] = {0};
    for (uint64_t n = 0; n < 3 * COUNT; n++) {
        assert_int_equal(lg_source_sample(s, &rule, n, a, &x), 0);
        assert_int_equal(x.item, lg_permute(5, n / COUNT, n % COUNT, COUNT));
        seen[n / COUNT][x.item]++;
        assert_int_equal(a[0], x.item); /* the shade is the number */
        char want[32];
        snprintf(want, sizeof want, "caption %d", (int)x.item);
        assert_string_equal(x.caption, x.dropped ? "" : want);
        assert_int_equal(x.label, -1);
        dropped += x.dropped;
    }
    for (int i = 0; i < 3 * COUNT; i++) assert_int_equal(seen[i / COUNT][i % COUNT], 1);
    assert_true(dropped > 0 && dropped < 15);
    /* In any order, from another object, the same. */
    for (uint64_t n = 3 * COUNT; n-- > 0;) {
        assert_int_equal(lg_source_sample(s, &rule, n, a, &x), 0);
        assert_int_equal(lg_source_sample(s, &rule, (n * 5 + 3) % 21, b, &y), 0);
        assert_int_equal(lg_source_sample(s, &rule, n, b, &y), 0);
        assert_memory_equal(a, b, sizeof a);
        assert_string_equal(x.caption, y.caption);
    }
    rule.no_shuffle = true;
    assert_int_equal(lg_source_sample(s, &rule, 9, a, &x), 0);
    assert_int_equal(x.item, 2);
    lg_sample_free(&x);
    lg_sample_free(&y);
    lg_source_close(&s);
}

/* Pictures of two halves tell the crop and the flip; four captions tell the choice. */
static void test_random_choices(void **state)
{
    (void)state;
    enum { S = 8, W = 32, N = 400 };
    uint8_t rgb[W * S * 3], *png, out[3 * S * S];
    size_t bytes;
    for (int i = 0; i < W * S; i++) memset(rgb + 3 * i, 4 * (i % W), 3);
    assert_int_equal(lg_picture_encode_png(rgb, W, S, &png, &bytes), 0);
    lg_tar_writer *w = tar_open("r.tar");
    assert_int_equal(lg_tar_writer_add(w, "1.png", png, bytes), 0);
    put_text(w, "1.json", "[\"0\", \"1\", \"2\", \"3\"]");
    put_text(w, "1.cls", "3");
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    free(png);
    lg_source *s = open_source(scratch_path("r.tar"));
    struct lg_sample_rule rule = {.seed = 1,
                                  .shape = {1, S, S},
                                  .random_crop = true,
                                  .random_flip = true,
                                  .dropout = 0.25,
                                  .num_classes = 10};
    lg_sample x = {0};
    int caption[4] = {0}, crop[W - S + 1] = {0}, flipped = 0, dropped = 0, crops = 0;
    for (uint64_t n = 0; n < N; n++) {
        assert_int_equal(lg_source_sample(s, &rule, n, out, &x), 0);
        bool flip = out[0] > out[S - 1];
        int x0 = LG_MIN(out[0], out[S - 1]) / 4;
        assert_true(x0 <= W - S);
        /* Where the cut lies is told of the picture as it is seen. */
        assert_true(x.crop_top == 0 && x.crop_left == (flip ? W - S - x0 : x0));
        crop[x0]++;
        flipped += flip;
        dropped += x.dropped;
        assert_int_equal(x.label, x.dropped ? 10 : 3);
        if (!x.dropped) caption[x.caption[0] - '0']++;
    }
    for (int i = 0; i <= W - S; i++) crops += crop[i] > 0;
    /* five standard deviations around the mean of each binomial count */
    assert_int_equal(crops, W - S + 1);
    assert_true(abs(flipped - N / 2) <= 50);
    assert_true(abs(dropped - N / 4) <= 44);
    for (int i = 0; i < 4; i++) assert_true(abs(caption[i] - (N - dropped) / 4) <= 44);
    rule.num_classes = 3;
    assert_int_equal(lg_source_sample(s, &rule, 0, out, &x), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "class 3"));
    lg_sample_free(&x);
    lg_source_close(&s);
}

static void test_half_a_picture_is_void(void **state)
{
    (void)state;
    enum { S = 8 };
    size_t bytes;
    uint8_t *png = flat_png(40, 40, 7, &bytes), out[3 * S * S];
    lg_tar_writer *w = tar_open("v.tar");
    assert_int_equal(lg_tar_writer_add(w, "bad.png", png, bytes / 2), 0);
    put_text(w, "bad.txt", "cut");
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    free(png);
    lg_source *s = open_source(scratch_path("v.tar"));
    lg_sample x = {0};
    struct lg_sample_rule rule = {.shape = {1, S, S}};
    assert_int_equal(lg_source_sample(s, &rule, 4, out, &x), LG_ERR_VOID);
    assert_string_equal(x.key, "v.tar/bad");
    assert_int_equal(x.key_hash, lg_hash("v.tar/bad", 9));
    assert_int_equal(x.item, 0);
    assert_non_null(strstr(lg_err_message(), "v.tar/bad: PNG is cut off or damaged"));
    lg_sample_free(&x);
    lg_source_close(&s);
}

static void put_latent(lg_tar_writer *w, const char *name, const float *mean, bool with_logvar)
{
    lg_st_writer *st;
    void *data;
    size_t bytes;
    float logvar[12];
    for (int i = 0; i < 12; i++) logvar[i] = -mean[i];
    assert_int_equal(lg_st_writer_open_memory(&st), 0);
    assert_int_equal(lg_st_writer_declare(st, "latent_mean", LG_F32, 3, (int64_t[]){2, 3, 2}), 0);
    if (with_logvar)
        assert_int_equal(
            lg_st_writer_declare(st, "latent_logvar", LG_F32, 4, (int64_t[]){1, 2, 3, 2}), 0);
    assert_int_equal(lg_st_writer_data(st, mean, 48), 0);
    if (with_logvar) assert_int_equal(lg_st_writer_data(st, logvar, 48), 0);
    assert_int_equal(lg_st_writer_finish_memory(&st, &data, &bytes), 0);
    assert_int_equal(lg_tar_writer_add(w, name, data, bytes), 0);
    free(data);
}

/* (C, f, h, w), or (1, C, f, h, w): what has frames is told by the rule, since (1, C, h, w) is one without. */
static void test_latents_with_frames(void **state)
{
    (void)state;
    static const int64_t shapes[][5] = {{2, 3, 1, 2}, {1, 2, 3, 1, 2}, {1, 3, 2, 2}, {3, 2, 2}};
    static const int rank[] = {4, 5, 4, 3};
    float mean[12];
    lg_tar_writer *w = tar_open("f.tar");
    for (int i = 0; i < 12; i++) mean[i] = (float)i;
    for (size_t k = 0; k < LG_ARRAY_LEN(shapes); k++) {
        lg_st_writer *st;
        void *data;
        size_t bytes;
        char name[40];
        snprintf(name, sizeof name, "%zu.latent.safetensors", k);
        assert_int_equal(lg_st_writer_open_memory(&st), 0);
        assert_int_equal(lg_st_writer_declare(st, "latent_mean", LG_F32, rank[k], shapes[k]), 0);
        assert_int_equal(lg_st_writer_declare(st, "latent_logvar", LG_F32, rank[k], shapes[k]), 0);
        assert_int_equal(lg_st_writer_data(st, mean, sizeof mean), 0);
        assert_int_equal(lg_st_writer_data(st, mean, sizeof mean), 0);
        assert_int_equal(lg_st_writer_finish_memory(&st, &data, &bytes), 0);
        assert_int_equal(lg_tar_writer_add(w, name, data, bytes), 0);
        free(data);
    }
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    lg_source *s = open_source(scratch_path("f.tar"));
    lg_sample x = {0};
    struct lg_sample_rule rule = {
        .shape = {1, 8, 8}, .latents_have_frames = true, .no_shuffle = true};
    static const int want[][4] = {{2, 3, 1, 2}, {2, 3, 1, 2}, {1, 3, 2, 2}};
    for (uint64_t n = 0; n < 3; n++) {
        if (lg_source_sample(s, &rule, n, NULL, &x) < 0) fail_msg("%s", lg_err_text());
        assert_memory_equal(x.latent_dim, want[n], sizeof want[n]);
        assert_true(x.latent_mean[7] == 7 && x.latent_logvar[11] == 11);
    }
    assert_int_equal(lg_source_sample(s, &rule, 3, NULL, &x), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "no latent_mean of shape (C, f, h, w)"));
    rule.latents_have_frames = false;
    assert_int_equal(lg_source_sample(s, &rule, 0, NULL, &x), LG_ERR_VOID);
    assert_int_equal(lg_source_sample(s, &rule, 1, NULL, &x), LG_ERR_VOID);
    assert_int_equal(lg_source_sample(s, &rule, 2, NULL, &x), 0);
    static const int flat[] = {3, 1, 2, 2};
    assert_memory_equal(x.latent_dim, flat, sizeof flat);
    lg_sample_free(&x);
    lg_source_close(&s);
}

static void test_latents(void **state)
{
    (void)state;
    float mean[12];
    for (int i = 0; i < 12; i++) mean[i] = (float)i + 0.5f;
    lg_tar_writer *w = tar_open("l.tar");
    put_latent(w, "1.latent.safetensors", mean, true);
    put_text(w, "1.txt", "encoded");
    put_latent(w, "2.latent.safetensors", mean, false);
    put_text(w, "3.latent.safetensors", "nonsense");
    put_png(w, "4.png", 3);
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    lg_source *s = open_source(scratch_path("l.tar"));
    assert_true(lg_source_has_latents(s));
    lg_sample x = {0};
    struct lg_sample_rule rule = {.shape = {1, 8, 8}, .no_shuffle = true};
    assert_int_equal(lg_source_sample(s, &rule, 0, NULL, &x), 0);
    assert_true(x.is_latent);
    assert_string_equal(x.caption, "encoded");
    assert_int_equal(x.latent_dim[0], 2);
    assert_int_equal(x.latent_dim[1], 1);
    assert_int_equal(x.latent_dim[2], 3);
    assert_int_equal(x.latent_dim[3], 2);
    for (int i = 0; i < 12; i++)
        assert_true(x.latent_mean[i] == mean[i] && x.latent_logvar[i] == -mean[i]);
    assert_int_equal(lg_source_sample(s, &rule, 1, NULL, &x), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "latent_logvar"));
    assert_int_equal(lg_source_sample(s, &rule, 2, NULL, &x), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "l.tar/3"));
    assert_int_equal(lg_source_sample(s, &rule, 3, NULL, &x), LG_ERR_VOID);
    assert_int_equal(lg_source_sample(s, &rule, 4, NULL, &x), 0);
    lg_sample_free(&x);
    lg_source_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        SOURCE_TEST(test_sample_is_a_function_of_n), SOURCE_TEST(test_random_choices),
        SOURCE_TEST(test_half_a_picture_is_void),    SOURCE_TEST(test_latents),
        SOURCE_TEST(test_latents_with_frames),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
