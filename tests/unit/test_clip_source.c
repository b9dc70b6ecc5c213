/* Clips as samples: in shards and folders, beside pictures; which part of a film sample n is, and where it is void. */
#include "base/fs.h"
#include "tests/unit/clip_fixture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/source_fixture.h"
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { W = 48, H = 32, FRAMES = 20, RATE = 10, S = 16, F = 5 };

static void put_film(lg_tar_writer *w, const char *name, const char *container, const char *encoder,
                     int frames)
{
    const struct film_spec spec = {.container = container,
                                   .encoder = encoder,
                                   .pixels = strcmp(encoder, "gif") ? NULL : "gray",
                                   .width = W,
                                   .height = H,
                                   .frames = frames,
                                   .rate = RATE,
                                   .key_every = 6};
    struct film f = film_make(&spec);
    if (w)
        assert_int_equal(lg_tar_writer_add(w, name, f.data, f.bytes), 0);
    else
        assert_int_equal(lg_publish_file(scratch_path(name), f.data, f.bytes), 0);
    film_free(&f);
}

/* Items 0 to 5: mp4, gif, animated WebP, a picture, a short clip, what is none. */
enum { MP4, GIF, WEBP, PICTURE, SHORT, NONE, ITEMS };

static const char *make_clips(bool in_shard)
{
    lg_tar_writer *w = in_shard ? tar_open("c.tar") : NULL;
    static const char *const text[ITEMS] = {"an mp4",    "a gif", "a webp",
                                            "a picture", "short", "none"};
    char name[64];
    if (!w) lg_mkdirs(scratch_path("clips"));
    const char *in = in_shard ? "" : "clips/";
#define NAME(stem) (snprintf(name, sizeof name, "%s" stem, in), name)
    for (int i = 0; i < ITEMS; i++) {
        if (i == MP4) put_film(w, NAME("0.mp4"), "mp4", "mpeg4", FRAMES);
        if (i == GIF) put_film(w, NAME("1.GIF"), "gif", "gif", FRAMES);
        if (i == WEBP) put_film(w, NAME("2.webp"), "webp", "webp", FRAMES);
        if (i == PICTURE && w) put_png(w, "3.png", 77);
        if (i == PICTURE && !w) write_png(NAME("3.png"), 77);
        if (i == SHORT) put_film(w, NAME("4.webm"), "webm", "libvpx", F - 1);
        if (i == NONE && w) put_text(w, "5.mkv", "no film");
        if (i == NONE && !w) scratch_write(NAME("5.mkv"), "no film");
        snprintf(name, sizeof name, "%s%d.txt", in, i);
        if (w)
            put_text(w, name, text[i]);
        else
            scratch_write(name, text[i]);
    }
    if (w) assert_int_equal(lg_tar_writer_finish(&w), 0);
    return scratch_path(in_shard ? "c.tar" : "clips");
}

static lg_source *open_clips(const char *path, bool clips)
{
    lg_source *s;
    const struct lg_source_options o = {.need_caption = true, .clips = clips};
    if (lg_source_open(path, &o, &s) < 0) fail_msg("%s", lg_err_text());
    return s;
}

/* Number of frame i of a sample of (3, F, S, S) pixels, by its left edge. */
static int number_of(const uint8_t *pixels, int i)
{
    return film_number(pixels[(size_t)i * S * S]);
}

static void test_samples(void **state)
{
    (void)state;
    static uint8_t a[3 * F * S * S], b[sizeof a];
    for (int shard = 0; shard < 2; shard++) {
        lg_source *s = open_clips(make_clips(shard), true),
                  *again = open_clips(scratch_path(shard ? "c.tar" : "clips"), true);
        assert_int_equal(lg_source_count(s), ITEMS);
        struct lg_sample_rule rule = {
            .seed = 3, .shape = {F, S, S}, .rate = {.stride = 2}, .no_shuffle = true};
        lg_sample x = {0}, y = {0};
        int seen[FRAMES] = {0};
        for (uint64_t n = 0; n < 12 * ITEMS; n++) {
            const int item = (int)(n % ITEMS);
            int rc = lg_source_sample(s, &rule, n, a, &x);
            assert_int_equal(rc, item <= WEBP ? 0 : LG_ERR_VOID);
            static const char *const why[ITEMS] = {
                [PICTURE] = "3: a picture, and there is no bucket of one frame",
                [SHORT] = "4: clip is too short: 4 frames in 0.400 s make 2 of the 5",
                [NONE] = "5: clip is none of MP4"};
            if (rc && !strstr(lg_err_message(), why[item])) fail_msg("%s", lg_err_text());
            if (rc) continue;
            assert_int_equal(x.stored_width, W);
            assert_int_equal(x.stored_height, H);
            const int first = number_of(a, 0);
            seen[first]++;
            for (int i = 0; i < F; i++) assert_int_equal(number_of(a, i), first + 2 * i);
            for (int c = 1; c < 3; c++) /* grey: planes are alike, and in their places */
                for (int i = 0; i < F * S * S; i++)
                    assert_in_range(a[c * F * S * S + i] + 3 - a[i], 0, 6);
            assert_int_equal(lg_source_sample(again, &rule, n, b, &y), 0);
            assert_memory_equal(a, b, sizeof a);
        }
        int starts = 0;
        for (int i = 0; i < FRAMES; i++) starts += seen[i] > 0;
        assert_true(starts >= 8); /* of 12 places, 36 times */
        assert_int_equal(seen[12], 0);
        rule.shape.frames = 1; /* one frame of it, or the picture */
        rule.seed = 4;
        assert_int_equal(lg_source_sample(s, &rule, GIF, a, &x), 0);
        assert_int_equal(lg_source_sample(s, &rule, PICTURE, a, &x), 0);
        assert_int_equal(a[0], 77);
        lg_sample_free(&x);
        lg_sample_free(&y);
        lg_source_close(&s);
        lg_source_close(&again);
    }
}

/* Crop and flip are one choice for all frames. */
static void test_crop(void **state)
{
    (void)state;
    static uint8_t a[3 * F * S * S], b[sizeof a];
    lg_source *s = open_clips(make_clips(true), true);
    struct lg_sample_rule rule = {
        .seed = 3, .shape = {F, S, S}, .random_crop = true, .no_shuffle = true};
    lg_sample x = {0};
    int flipped = 0, places[24 - S + 1] = {0}, moved = 0;
    for (uint64_t n = MP4; n < 20 * ITEMS; n += ITEMS) {
        rule.random_flip = false;
        assert_int_equal(lg_source_sample(s, &rule, n, a, &x), 0);
        assert_in_range(x.crop_left, 0, 24 - S);
        places[x.crop_left]++;
        for (int i = 0; i < F; i++) {
            const uint8_t *row = a + (size_t)i * S * S;
            if (abs(row[0] - row[S - 1]) < 60) continue; /* the halves are too much alike */
            int at = 0;                                  /* the column where they meet */
            while (abs(row[at] - row[0]) < abs(row[at] - row[S - 1])) at++;
            assert_in_range(at, 12 - x.crop_left - 1, 12 - x.crop_left + 1);
        }
        rule.random_flip = true;
        assert_int_equal(lg_source_sample(s, &rule, n, b, &x), 0);
        const bool is_same = !memcmp(a, b, sizeof a);
        for (size_t i = 0; !is_same && i < sizeof a; i++)
            assert_int_equal(a[i], b[i / S * S + (S - 1 - i % S)]);
        flipped += !is_same;
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(places); i++) moved += places[i] > 0;
    assert_in_range(flipped, 4, 16);
    assert_true(moved >= 4);
    lg_sample_free(&x);
    lg_source_close(&s);
}

static void test_sizes(void **state)
{
    (void)state;
    for (int shard = 0; shard < 2; shard++) {
        lg_source *s = open_clips(make_clips(shard), true);
        struct lg_item_size *size, *again;
        assert_int_equal(lg_source_sizes(s, scratch_path("sizes"), &size), 0);
        static const uint32_t frames[ITEMS] = {FRAMES, FRAMES, FRAMES, 1, F - 1, 0};
        for (int i = 0; i < ITEMS; i++) {
            assert_int_equal(size[i].frames, frames[i]);
            assert_int_equal(size[i].width, i == PICTURE ? 12 : i == NONE ? 0 : W);
            assert_int_equal(size[i].duration_ms, frames[i] > 1 ? 1000 * frames[i] / RATE : 0);
        }
        assert_int_equal(lg_source_sizes(s, scratch_path("sizes"), &again), 0);
        assert_memory_equal(size, again, ITEMS * sizeof *size);
        free(size);
        free(again);
        lg_source_close(&s);
    }
}

/* A run of pictures does not see them, and has the fingerprint that it had. */
static void test_pictures_alone(void **state)
{
    (void)state;
    make_clips(false);
    lg_source *with = open_clips(scratch_path("clips"), false);
    assert_int_equal(lg_source_count(with), 2); /* the picture, and the WebP, which is void */
    const uint64_t hash = lg_source_hash(with);
    lg_source_close(&with);
    unlink(scratch_path("clips/0.mp4"));
    unlink(scratch_path("clips/1.GIF"));
    unlink(scratch_path("clips/4.webm"));
    unlink(scratch_path("clips/5.mkv"));
    lg_source *without = open_clips(scratch_path("clips"), false);
    assert_true(hash == lg_source_hash(without));
    lg_source_close(&without);
    without = open_clips(scratch_path("clips"), true);
    assert_true(hash == lg_source_hash(without));
    lg_source_close(&without);
}

int main(void)
{
    const struct CMUnitTest tests[] = {SOURCE_TEST(test_samples), SOURCE_TEST(test_crop),
                                       SOURCE_TEST(test_sizes), SOURCE_TEST(test_pictures_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
