/* Encoding files and data sets: the goldens through files, results that do not depend on how many
 * samples a file has, latent shards that the source reads back, bad input that leaves no output. */
#include "base/fs.h"
#include "stages/encode/encode.h"
#include "stages/io/picture.h"
#include "stages/io/source.h"
#include "tests/unit/encoder_fixture.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define VAE    "examples/emoji/vae"
#define TEXT   "examples/emoji/text_encoder"
#define GOLDEN "tests/golden/emoji.safetensors"

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

static struct fixture f;

static struct lg_encode_options options(const char *model)
{
    return (struct lg_encode_options){.device = f.device, .model = model, .batch = 3, .length = 24};
}

static int set_up(void **state)
{
    (void)state;
    scratch_make();
    f = fixture_open("host");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fixture_close(&f);
    scratch_remove();
    return 0;
}

static void check_against_golden(const char *path, const char *name)
{
    lg_st_file *got = NULL, *want = NULL;
    OK(lg_st_open(path, &got));
    OK(lg_st_open(GOLDEN, &want));
    size_t n, m;
    float *a = golden_f32(got, name, &n), *b = golden_f32(want, name, &m);
    assert_int_equal(n, m);
    double error = relative_error(a, b, n);
    if (!(error <= 1e-4)) fail_msg("%s: relative error %g", name, error);
    free(a);
    free(b);
    lg_st_close(&got);
    lg_st_close(&want);
}

static void test_golden_through_files(void **state)
{
    (void)state;
    struct lg_encode_options vae = options(VAE), text = options(TEXT);
    OK(lg_encode_pictures(&vae, GOLDEN, scratch_path("latents")));
    check_against_golden(scratch_path("latents"), "latent_mean");
    check_against_golden(scratch_path("latents"), "latent_logvar");
    OK(lg_decode_pictures(&vae, GOLDEN, scratch_path("decoded")));
    check_against_golden(scratch_path("decoded"), "decoded");
    OK(lg_encode_captions(&text, GOLDEN, scratch_path("text")));
    check_against_golden(scratch_path("text"), "text_hidden");
}

/* The named tensor of a file; its data is copied and freed by the caller. */
static void *read_tensor(const char *path, const char *name, struct lg_st_entry *ret)
{
    lg_st_file *g = NULL;
    OK(lg_st_open(path, &g));
    *ret = *golden(g, name);
    void *copy = malloc(ret->bytes);
    memcpy(copy, ret->data, ret->bytes);
    lg_st_close(&g);
    return copy;
}

static void write_tensor(const char *path, const char *name, const struct lg_st_entry *like,
                         int64_t n, const void *data)
{
    lg_st_writer *w = NULL;
    int64_t dim[8];
    memcpy(dim, like->dim, sizeof dim);
    dim[0] = n;
    OK(lg_st_writer_open(path, &w));
    OK(lg_st_writer_declare(w, name, like->dtype, like->rank, dim));
    OK(lg_st_writer_data(w, data, like->bytes / (size_t)like->dim[0] * (size_t)n));
    OK(lg_st_writer_finish(&w, NULL));
}

/* One picture alone, and the same one as the last of four in batches of three. */
static void test_count_does_not_matter(void **state)
{
    (void)state;
    struct lg_encode_options vae = options(VAE);
    struct lg_st_entry pixels, all, one;
    char *p = read_tensor(GOLDEN, "pixels", &pixels);
    size_t picture = pixels.bytes / 4;
    write_tensor(scratch_path("one"), "pixels", &pixels, 1, p + 3 * picture);
    OK(lg_encode_pictures(&vae, GOLDEN, scratch_path("a")));
    OK(lg_encode_pictures(&vae, scratch_path("one"), scratch_path("b")));
    char *a = read_tensor(scratch_path("a"), "latent_mean", &all);
    char *b = read_tensor(scratch_path("b"), "latent_mean", &one);
    assert_int_equal(all.bytes, 4 * one.bytes);
    assert_memory_equal(a + 3 * one.bytes, b, one.bytes);
    free(a);
    free(b);
    free(p);
}

static void test_text_files(void **state)
{
    (void)state;
    struct lg_encode_options text = options(TEXT);
    struct lg_st_entry ids, want;
    scratch_write("c.txt", "fog\r\n\nwoman gesturing NO: dark skin tone");
    OK(lg_encode_captions(&text, scratch_path("c.txt"), scratch_path("out")));
    int32_t *got = read_tensor(scratch_path("out"), "token_ids", &ids);
    int32_t *g = read_tensor(GOLDEN, "token_ids", &want);
    assert_true(ids.dim[0] == 3 && ids.dim[1] == 24);
    assert_memory_equal(got, g, 24 * sizeof *g);
    assert_true(got[24] == 1 && got[25] == 0);
    assert_memory_equal(got + 48, g + 48, 24 * sizeof *g);
    free(got);
    free(g);
}

/* Expects the code, a part of the message, and no output. */
static void refused(int rc, int want, const char *needle)
{
    if (rc != want || !strstr(lg_err_message(), needle))
        fail_msg("rc %d, wanted %d; \"%s\" lacks \"%s\"", rc, want, rc ? lg_err_message() : "",
                 needle);
    lg_err_clear();
    assert_false(lg_path_exists(scratch_path("none")));
}

static void test_bad_pictures(void **state)
{
    (void)state;
    struct lg_encode_options vae = options(VAE);
    struct lg_st_entry like = {.dtype = LG_U8, .rank = 4, .dim = {1, 3, 6, 8}, .bytes = 3 * 6 * 8};
    const char *in = "in", *out = "none";
    void *zero = calloc(1, 4096);
    write_tensor(scratch_path(in), "pixels", &like, 1, zero);
    refused(lg_encode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_CONFIG,
            "multiples of 4");
    write_tensor(scratch_path(in), "images", &like, 1, zero);
    refused(lg_encode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_MISMATCH,
            "no tensor \"pixels\"");
    like = (struct lg_st_entry){.dtype = LG_U8, .rank = 3, .dim = {3, 8, 8}, .bytes = 192};
    write_tensor(scratch_path(in), "pixels", &like, 3, zero);
    refused(lg_encode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_MISMATCH,
            "has 3 dimensions");
    like = (struct lg_st_entry){.dtype = LG_F32, .rank = 4, .dim = {1, 3, 8, 8}, .bytes = 768};
    write_tensor(scratch_path(in), "pixels", &like, 1, zero);
    refused(lg_encode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_MISMATCH,
            "is F32, wanted is U8");
    like = (struct lg_st_entry){.dtype = LG_U8, .rank = 4, .dim = {1, 1, 8, 8}, .bytes = 64};
    write_tensor(scratch_path(in), "pixels", &like, 1, zero);
    refused(lg_encode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_MISMATCH,
            "1 channels");
    like = (struct lg_st_entry){.dtype = LG_F32, .rank = 4, .dim = {1, 8, 2, 2}, .bytes = 128};
    write_tensor(scratch_path(in), "latent_mean", &like, 1, zero);
    refused(lg_decode_pictures(&vae, scratch_path(in), scratch_path(out)), LG_ERR_MISMATCH,
            "has 8 channels");
    free(zero);
    vae.model = TEXT;
    refused(lg_encode_pictures(&vae, GOLDEN, scratch_path(out)), LG_ERR_CONFIG, "_class_name");
    vae.model = VAE;
    refused(lg_encode_pictures(&vae, GOLDEN, scratch_path("no/such/none")), LG_ERR_NOTFOUND,
            "cannot write");
}

static void ids_refused(const int32_t ids[3], const char *needle)
{
    struct lg_encode_options text = options(TEXT);
    struct lg_st_entry like = {.dtype = LG_I32, .rank = 2, .dim = {1, 3}, .bytes = 12};
    write_tensor(scratch_path("ids"), "token_ids", &like, 1, ids);
    refused(lg_encode_captions(&text, scratch_path("ids"), scratch_path("none")), LG_ERR_MISMATCH,
            needle);
}

static void test_bad_captions(void **state)
{
    (void)state;
    struct lg_encode_options text = options(TEXT);
    ids_refused((int32_t[]){5, 0, 1}, "padding (0) before other ids");
    ids_refused((int32_t[]){0, 0, 0}, "padding alone");
    ids_refused((int32_t[]){5, 2048, 1}, "id 2048");
    ids_refused((int32_t[]){-1, 1, 0}, "id -1");
    scratch_write("empty.txt", "");
    refused(lg_encode_captions(&text, scratch_path("empty.txt"), scratch_path("none")),
            LG_ERR_MISMATCH, "empty");
    text.spiece = "/nonexistent/spiece.model";
    scratch_write("c.txt", "fog\n");
    refused(lg_encode_captions(&text, scratch_path("c.txt"), scratch_path("none")), LG_ERR_NOTFOUND,
            "spiece.model");
}

enum { SIDE = 32, PICTURES = 7 };

/* A folder of pictures of another size than is encoded, one of them cut in half. */
static const char *make_data(void)
{
    static const char *const more[PICTURES][2] = {
        {"txt", "a caption"}, {"json", "{\"captions\": [\"one\", \"two \\u00e9\"]}"},
        {"cls", "3"},         {"txt", ""},
        {"txt", "unused"},
    };
    uint8_t *rgb = malloc(48 * 40 * 3);
    for (int i = 0; i < PICTURES; i++) {
        char name[64];
        for (int k = 0; k < 48 * 40 * 3; k++) rgb[k] = (uint8_t)(k * (i + 3) / 7);
        uint8_t *png;
        size_t bytes;
        OK(lg_picture_encode_png(rgb, 48, 40, &png, &bytes));
        snprintf(name, sizeof name, "data/p%d.png", i);
        scratch_write(name, ""); /* makes the folder */
        OK(lg_publish_file(scratch_path(name), png, i == 4 ? bytes / 2 : bytes));
        free(png);
        if (!more[i][0]) continue;
        snprintf(name, sizeof name, "data/p%d.%s", i, more[i][0]);
        scratch_write(name, more[i][1]);
    }
    free(rgb);
    return scratch_path("data");
}

static void test_dataset(void **state)
{
    (void)state;
    struct lg_encode_options vae = options(VAE);
    struct lg_encode_dataset_spec spec = {.o = vae,
                                          .data = make_data(),
                                          .out = scratch_path("shards"),
                                          .shard_size = 4,
                                          .size = SIDE};
    struct lg_encode_dataset_result r;
    OK(lg_encode_dataset(&spec, &r));
    assert_true(r.encoded == PICTURES - 1 && r.left_out == 1 && r.shards == 2);
    assert_true(lg_path_exists(scratch_path("shards/00000.tar")));
    assert_true(lg_path_exists(scratch_path("shards/00001.tar")));
    assert_false(lg_path_exists(scratch_path("shards/00002.tar")));

    lg_source *pictures = NULL, *latents = NULL;
    OK(lg_source_open(scratch_path("data"), NULL, &pictures));
    OK(lg_source_open(scratch_path("shards"), NULL, &latents));
    assert_true(lg_source_has_latents(latents));
    assert_int_equal(lg_source_count(latents), PICTURES - 1); /* the cut one is left out */
    struct lg_sample_rule rule = {.shape = {1, SIDE, SIDE}, .no_shuffle = true};
    lg_sample from = {0}, to = {0};
    lg_item a = {0}, b = {0};
    uint8_t pixels[3 * SIDE * SIDE];
    for (int i = 0, k = 0; i < PICTURES; i++) {
        if (i == 4) continue;
        /* The latents are those of the pixels that the loader would make. */
        OK(lg_source_sample(pictures, &rule, (uint64_t)i, pixels, &from));
        struct lg_st_entry like = {.dtype = LG_U8,
                                   .rank = 4,
                                   .dim = {1, 3, SIDE, SIDE},
                                   .bytes = sizeof pixels},
                           e;
        write_tensor(scratch_path("one"), "pixels", &like, 1, pixels);
        OK(lg_encode_pictures(&vae, scratch_path("one"), scratch_path("direct")));
        float *want = read_tensor(scratch_path("direct"), "latent_logvar", &e);
        OK(lg_source_sample(latents, &rule, (uint64_t)k, NULL, &to));
        assert_true(to.is_latent && to.latent_dim[0] == 4 && to.latent_dim[2] == SIDE / 4);
        assert_memory_equal(to.latent_logvar, want, e.bytes);
        free(want);
        OK(lg_source_read(pictures, (uint64_t)i, &a));
        OK(lg_source_read(latents, (uint64_t)k++, &b));
        assert_int_equal(a.n_captions, b.n_captions);
        for (int c = 0; c < a.n_captions; c++) assert_string_equal(a.caption[c], b.caption[c]);
        assert_int_equal(a.label, b.label);
    }
    lg_item_free(&a);
    lg_item_free(&b);
    lg_sample_free(&from);
    lg_sample_free(&to);
    lg_source_close(&pictures);
    lg_source_close(&latents);

    spec.data = scratch_path("data"), spec.out = scratch_path("shards");
    refused(lg_encode_dataset(&spec, &r), LG_ERR_BUSY, "already holds");
    spec.data = scratch_path("shards"), spec.out = scratch_path("again");
    refused(lg_encode_dataset(&spec, &r), LG_ERR_CONFIG, "latents already");
    spec.data = scratch_path("data"), spec.size = 30;
    refused(lg_encode_dataset(&spec, &r), LG_ERR_CONFIG, "multiples of 4");
    spec.data = scratch_path("nowhere");
    assert_true(lg_encode_dataset(&spec, &r) < 0);
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_through_files), cmocka_unit_test(test_count_does_not_matter),
        cmocka_unit_test(test_text_files),           cmocka_unit_test(test_bad_pictures),
        cmocka_unit_test(test_bad_captions),         cmocka_unit_test(test_dataset),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
