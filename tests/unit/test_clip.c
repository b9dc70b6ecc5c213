/* The CLIP text encoders against transformers (fp64), all four outputs; the invariances that the pipeline stands on (a
 * caption's bits depend neither on its neighbours nor on the shards nor on what else is wanted); bad models. */
#include "base/fs.h"
#include "stages/nets/text_encoder.h"
#include "tests/unit/encoder_fixture.h"
#include "tests/unit/scratch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define L_DIR         "tests/golden/encoders/clip_l"
#define H_DIR         "tests/golden/encoders/clip_h"
#define BIGG_DIR      "tests/golden/encoders/clip_bigg"
#define TOLERANCE     1e-5
#define TOLERANCE_F64 1e-6 /* the goldens are stored in fp32: 2^-24 each */

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

static const char *const NAMES[LG_TEXT_OUTPUTS] = {"states", "penultimate", "pooled", "embeds"};

struct outputs {
    float *v[LG_TEXT_OUTPUTS];
    size_t n[LG_TEXT_OUTPUTS];
};

static void free_outputs(struct outputs *o)
{
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) free(o->v[k]);
}

static int64_t width_of(const struct lg_text_encoder_config *c, int k)
{
    const struct lg_text_encoder_sizes z = lg_text_encoder_sizes(c);
    return k == LG_TEXT_EMBEDS ? z.projection : z.width;
}

struct call {
    const char *dir, *device;
    int shards, batch, length;
    unsigned outputs; /* 0: all */
    const int32_t *ids;
};

static struct outputs run(const struct call *x)
{
    struct fixture f = fixture_open(x->device);
    struct lg_text_encoder_config c;
    struct outputs ret = {0};
    lg_text_encoder *net = NULL;
    const void *weights[LG_TEXT_SHARDS_MAX];
    const int B = x->batch, L = x->length;
    int32_t *ends = malloc((size_t)B * sizeof *ends), *at[2];
    OK(lg_text_encoder_config_load(x->dir, &c));
    for (int i = 0; i < x->shards; i++) {
        lg_params t;
        OK(lg_text_encoder_params(&c, i, x->shards, &t));
        float *w = malloc(t.count * sizeof *w);
        OK(lg_text_encoder_load(&c, x->dir, i, x->shards, w));
        weights[i] = to_device(&f, w, t.count);
        free(w);
        lg_params_free(&t);
    }
    for (int i = 0; i < B; i++) ends[i] = i * L + lg_clip_end(&c.clip, x->ids + i * L, L);
    OK(lg_device_alloc(f.device, (size_t)(B * L) * sizeof **at, (void **)&at[0]));
    OK(lg_device_alloc(f.device, (size_t)B * sizeof **at, (void **)&at[1]));
    lg_stream_upload(f.stream, at[0], x->ids, (size_t)(B * L) * sizeof **at);
    lg_stream_upload(f.stream, at[1], ends, (size_t)B * sizeof **at);
    struct lg_text_encoder_shape shape = {.batch = B, .length = L, .outputs = x->outputs};
    if (!shape.outputs) shape.outputs = lg_text_encoder_outputs(&c);
    struct lg_text_io io = {.ids = lg_t2(at[0], LG_I32, B, L), .ends = lg_t1(at[1], LG_I32, B)};
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
        if (!(shape.outputs & LG_TEXT_BIT(k))) continue;
        const int64_t D = width_of(&c, k);
        const bool tokens = k <= LG_TEXT_PENULTIMATE;
        ret.n[k] = (size_t)(B * (tokens ? L : 1) * D);
        void *out = device_room(&f, ret.n[k]);
        io.out[k] = tokens ? lg_t3(out, lg_device_dtype(f.device), B, L, D)
                           : lg_t2(out, lg_device_dtype(f.device), B, D);
    }
    OK(lg_text_encoder_open(f.device, &c, &shape, x->shards, &net));
    for (int repeat = 0; repeat < 2; repeat++) /* nothing of the last forward may matter */
        lg_text_encoder_forward(net, f.stream, weights, &io);
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++)
        if (io.out[k].rank) ret.v[k] = from_device(&f, io.out[k].data, ret.n[k]);
    lg_text_encoder_close(&net);
    fixture_close(&f);
    free(ends);
    return ret;
}

static void check_golden(const char *dir, const char *device, int shards, double tolerance)
{
    char path[LG_PATH_BYTES];
    lg_st_file *g = NULL;
    OK(lg_path(path, "%s/golden.safetensors", dir));
    OK(lg_st_open(path, &g));
    const struct lg_st_entry *ids = golden(g, "token_ids");
    struct outputs got = run(&(struct call){.dir = dir,
                                            .device = device,
                                            .shards = shards,
                                            .batch = (int)ids->dim[0],
                                            .length = (int)ids->dim[1],
                                            .ids = ids->data});
    for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
        size_t n;
        if (!lg_st_find(g, NAMES[k])) {
            assert_null(got.v[k]);
            continue;
        }
        float *want = golden_f32(g, NAMES[k], &n);
        assert_non_null(got.v[k]);
        assert_int_equal(n, got.n[k]);
        double error = relative_error(got.v[k], want, n);
        print_message("%s on %s, %d shards, %s: %.2e\n", dir, device, shards, NAMES[k], error);
        if (!(error <= tolerance)) fail_msg("%s: %g above %g", NAMES[k], error, tolerance);
        free(want);
    }
    free_outputs(&got);
    lg_st_close(&g);
}

static void test_goldens(void **state)
{
    (void)state;
    check_golden(L_DIR, "host", 1, TOLERANCE);
    check_golden(L_DIR, "ref64", 2, TOLERANCE_F64);
    check_golden(H_DIR, "host", 2, TOLERANCE);
    check_golden(H_DIR, "ref64", 1, TOLERANCE_F64);
    check_golden(BIGG_DIR, "host", 3, TOLERANCE);
    check_golden(BIGG_DIR, "ref64", 4, TOLERANCE_F64);
}

enum { B = 5, T = 7 };

static void some_ids(int32_t ids[B][T], int salt)
{
    for (int i = 0; i < B; i++)
        for (int k = 0; k < T; k++) ids[i][k] = (i * 131 + k * 17 + salt * 7) % 53;
}

static void test_shards_and_outputs_keep_bits(void **state)
{
    (void)state;
    int32_t ids[B][T];
    some_ids(ids, 1);
    struct call x = {BIGG_DIR, "host", 1, B, T, 0, ids[0]};
    struct outputs one = run(&x);
    for (x.shards = 2; x.shards <= 4; x.shards++) {
        struct outputs many = run(&x);
        for (int k = 0; k < LG_TEXT_OUTPUTS; k++)
            assert_memory_equal(one.v[k], many.v[k], one.n[k] * sizeof(float));
        free_outputs(&many);
    }
    for (x.shards = 3, x.outputs = 1; x.outputs < LG_TEXT_BIT(LG_TEXT_OUTPUTS); x.outputs++) {
        struct outputs some = run(&x);
        for (int k = 0; k < LG_TEXT_OUTPUTS; k++) {
            assert_int_equal(some.v[k] != NULL, !!(x.outputs & LG_TEXT_BIT(k)));
            if (some.v[k]) assert_memory_equal(one.v[k], some.v[k], one.n[k] * sizeof(float));
        }
        free_outputs(&some);
    }
    free_outputs(&one);
}

/* The same caption in every slot, among other neighbours: the same bits. And what stands behind a token is nothing to
 * it. */
static void test_slot_and_what_follows(void **state)
{
    (void)state;
    enum { D = 24 };
    float first[T * D];
    for (int slot = 0; slot < B; slot++) {
        int32_t ids[B][T];
        some_ids(ids, slot);
        for (int k = 0; k < T; k++) ids[slot][k] = 3 + k;
        struct outputs o = run(&(struct call){L_DIR, "host", 1, B, T, LG_TEXT_BIT(0), ids[0]});
        if (slot == 0) memcpy(first, o.v[0], sizeof first);
        assert_memory_equal(first, o.v[0] + slot * T * D, sizeof first);
        free_outputs(&o);
    }
    int32_t ids[T] = {3, 4, 5, 6, 50, 51, 52};
    struct outputs o = run(&(struct call){L_DIR, "host", 1, 1, T, LG_TEXT_BIT(0), ids});
    assert_memory_equal(first, o.v[0], 4 * D * sizeof *first);
    assert_memory_not_equal(first + 4 * D, o.v[0] + 4 * D, D * sizeof *first);
    free_outputs(&o);
}

static void test_ends(void **state)
{
    (void)state;
    const struct lg_clip_config largest = {.eos = -1}, named = {.eos = 8};
    const int32_t ids[] = {6, 8, 9, 8, 9, 0};
    assert_int_equal(lg_clip_end(&largest, ids, 6), 2);
    assert_int_equal(lg_clip_end(&named, ids, 6), 1);
    assert_int_equal(lg_clip_end(&named, ids, 1), 0); /* none: the first, as transformers does */
}

static void refused(int rc, int code, const char *why)
{
    assert_int_equal(rc, code);
    if (!strstr(lg_err_message(), why)) fail_msg("\"%s\" lacks \"%s\"", lg_err_message(), why);
    lg_err_clear();
}

static void test_published_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        struct lg_clip_config c;
        double millions;
    } KNOWN[] = {
        {"L", {49408, 768, 3072, 12, 12, 77, LG_ACT_QUICK_GELU, 1e-5, -1, 0}, 123.06},
        {"H", {49408, 1024, 4096, 16, 23, 77, LG_ACT_GELU_ERF, 1e-5, -1, 0}, 340.39},
        {"bigG", {49408, 1280, 5120, 20, 32, 77, LG_ACT_GELU_ERF, 1e-5, -1, 1280}, 694.66},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(KNOWN); i++) {
        struct lg_text_encoder_config c = {.kind = LG_TEXT_CLIP, .clip = KNOWN[i].c};
        lg_params t;
        double count = 0;
        OK(lg_text_encoder_params(&c, 0, 1, &t));
        for (int k = 0; k < t.n; k++) count += (double)t.p[k].count;
        lg_params_free(&t);
        print_message("%s: %.2f M\n", KNOWN[i].what, count / 1e6);
        assert_true(count / 1e6 > KNOWN[i].millions - 0.01 &&
                    count / 1e6 < KNOWN[i].millions + 0.01);
    }
}

static void test_bad_configs(void **state)
{
    (void)state;
    scratch_make();
    struct lg_text_encoder_config c;
    static const char *const bad[][2] = {
        {"{\"model_type\": \"clip\", \"text_config\": {}}", "\"model_type\" is \"clip\""},
        {"{}", "\"model_type\" is missing"},
        {"{\"model_type\": \"clip_text_model\", \"hidden_act\": \"relu\"}", "\"hidden_act\" is"},
        {"{\"model_type\": \"clip_text_model\", \"hidden_size\": 30}", "does not divide"},
        {"{\"model_type\": \"clip_text_model\", \"num_hidden_layers\": 0}", "must be 1 to"},
        {"{\"model_type\": \"clip_text_model\", \"architectures\": [\"CLIPModel\"]}",
         "CLIPTextModelWithProjection"},
        {"{\"model_type\": \"clip_text_model\", \"architectures\": "
         "[\"CLIPTextModelWithProjection\"],"
         " \"projection_dim\": -1}",
         "projection_dim"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        scratch_write("m/config.json", bad[i][0]);
        refused(lg_text_encoder_config_load(scratch_path("m"), &c), LG_ERR_CONFIG, bad[i][1]);
    }
    scratch_write("m/config.json",
                  "{\"model_type\": \"clip_text_model\"}"); /* the class's defaults */
    OK(lg_text_encoder_config_load(scratch_path("m"), &c));
    assert_int_equal(c.clip.hidden, 512);
    assert_int_equal(c.clip.eos, 49407);
    assert_int_equal(lg_text_encoder_sizes(&c).length_max, 77);
    scratch_remove();
}

static void test_bad_models(void **state)
{
    (void)state;
    struct lg_text_encoder_config c, wrong;
    struct fixture f = fixture_open("host");
    size_t bytes;
    float *w = calloc(1 << 16, sizeof *w);
    OK(lg_text_encoder_config_load(L_DIR, &c));
    const struct lg_text_encoder_shape longer = {.batch = 1, .length = 12};
    refused(lg_text_encoder_plan(f.device, &c, &longer, &bytes), LG_ERR_CONFIG,
            "captions of 12 tokens: the text encoder takes 11");
    const struct lg_text_encoder_shape embeds = {1, 11, LG_TEXT_BIT(LG_TEXT_EMBEDS)};
    refused(lg_text_encoder_plan(f.device, &c, &embeds, &bytes), LG_ERR_CONFIG, "no such output");
    wrong = c;
    wrong.clip.layers = 2;
    refused(lg_text_encoder_load(&wrong, L_DIR, 0, 1, w), LG_ERR_MISMATCH, "layers.2");
    wrong = c;
    wrong.clip.positions = 77;
    refused(lg_text_encoder_load(&wrong, L_DIR, 0, 1, w), LG_ERR_MISMATCH, "position_embedding");
    wrong = c;
    wrong.clip.projection = 24;
    refused(lg_text_encoder_load(&wrong, L_DIR, 0, 1, w), LG_ERR_MISMATCH, "text_projection");
    free(w);
    fixture_close(&f);
}

/* A file without the prefix, as transformers 5 holds the parameters in memory. */
static void test_other_names(void **state)
{
    (void)state;
    static const char prefix[] = "text_model.";
    lg_st_file *f = NULL;
    lg_st_writer *w = NULL;
    struct lg_text_encoder_config c;
    lg_params t;
    char *config;
    size_t bytes;
    scratch_make();
    OK(lg_read_file(L_DIR "/config.json", 1 << 20, &config, &bytes));
    scratch_write("m/config.json", config);
    free(config);
    OK(lg_st_open(L_DIR "/model.safetensors", &f));
    OK(lg_st_writer_open(scratch_path("m/model.safetensors"), &w));
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < lg_st_count(f); i++) {
            const struct lg_st_entry *e = lg_st_at(f, i);
            if (pass == 0)
                OK(lg_st_writer_declare(w, e->name + sizeof prefix - 1, e->dtype, e->rank, e->dim));
            else
                OK(lg_st_writer_data(w, e->data, e->bytes));
        }
    OK(lg_st_writer_finish(&w, NULL));
    lg_st_close(&f);
    OK(lg_text_encoder_config_load(L_DIR, &c));
    OK(lg_text_encoder_params(&c, 0, 1, &t));
    float *a = malloc(t.count * sizeof *a), *b = malloc(t.count * sizeof *b);
    OK(lg_text_encoder_load(&c, L_DIR, 0, 1, a));
    OK(lg_text_encoder_load(&c, scratch_path("m"), 0, 1, b));
    assert_memory_equal(a, b, t.count * sizeof *a);
    free(a);
    free(b);
    lg_params_free(&t);
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),
        cmocka_unit_test(test_shards_and_outputs_keep_bits),
        cmocka_unit_test(test_slot_and_what_follows),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_published_sizes),
        cmocka_unit_test(test_bad_configs),
        cmocka_unit_test(test_bad_models),
        cmocka_unit_test(test_other_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
