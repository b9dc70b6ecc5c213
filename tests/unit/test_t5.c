/* The T5 encoder against transformers (fp64), the invariances that the pipeline stands on (a caption's
 * bits depend neither on its neighbours nor on the number of shards), the tokenizer, bad models. */
#include "base/fs.h"
#include "stages/io/spiece.h"
#include "stages/io/tokenizer.h"
#include "stages/nets/text_encoder.h"
#include "tests/unit/encoder_fixture.h"
#include "tests/unit/scratch.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define EMOJI         "examples/emoji/text_encoder"
#define EMOJI_GOLDEN  "tests/golden/emoji.safetensors"
#define RELU          "tests/golden/encoders/t5_relu"
#define GATED         "tests/golden/encoders/t5_gated"
#define TOLERANCE     1e-4 /* the project's promise for hidden states in fp32 */
#define TOLERANCE_F64 1e-6 /* the goldens are stored in fp32: 2^-24 each */

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

/* Runs ids (batch, length) through the model in `dir`; the caller frees the states. */
static float *run(const char *dir, const char *device, int shards, int batch, int length,
                  const int32_t *ids)
{
    struct fixture f = fixture_open(device);
    struct lg_text_encoder_config c;
    OK(lg_text_encoder_config_load(dir, &c));
    const struct lg_text_encoder_shape shape = {.batch = batch, .length = length};
    const int64_t D = c.t5.d_model;
    const void *weights[LG_TEXT_SHARDS_MAX];
    for (int i = 0; i < shards; i++) {
        lg_params t;
        OK(lg_text_encoder_params(&c, i, shards, &t));
        float *w = malloc(t.count * sizeof *w);
        OK(lg_text_encoder_load(&c, dir, i, shards, w));
        weights[i] = to_device(&f, w, t.count);
        free(w);
        lg_params_free(&t);
    }
    size_t cells = (size_t)(batch * length), n = cells * (size_t)D;
    int32_t *ids_at, *length_at, *lengths = calloc((size_t)batch, sizeof *lengths);
    OK(lg_device_alloc(f.device, cells * sizeof *ids, (void **)&ids_at));
    OK(lg_device_alloc(f.device, (size_t)batch * sizeof *ids, (void **)&length_at));
    for (int i = 0; i < batch; i++)
        while (lengths[i] < length && ids[i * length + lengths[i]]) lengths[i]++;
    lg_stream_upload(f.stream, ids_at, ids, cells * sizeof *ids);
    lg_stream_upload(f.stream, length_at, lengths, (size_t)batch * sizeof *ids);
    void *out = device_room(&f, n);
    lg_text_encoder *net = NULL;
    size_t plan = 0;
    OK(lg_text_encoder_plan(f.device, &c, &shape, &plan));
    assert_true(plan > 0);
    OK(lg_text_encoder_open(f.device, &c, &shape, shards, &net));
    for (int repeat = 0; repeat < 2; repeat++) /* nothing of the last forward may matter */
        lg_text_encoder_forward(
            net, f.stream, weights,
            &(struct lg_text_io){.ids = lg_t2(ids_at, LG_I32, batch, length),
                                 .length = lg_t1(length_at, LG_I32, batch),
                                 .out = {[LG_TEXT_STATES] = lg_t3(out, lg_device_dtype(f.device),
                                                                  batch, length, D)}});
    float *states = from_device(&f, out, n);
    lg_text_encoder_close(&net);
    fixture_close(&f);
    free(lengths);
    return states;
}

static void check_golden(const char *dir, const char *golden_path, const char *device, int shards,
                         double tolerance)
{
    lg_st_file *g = NULL;
    OK(lg_st_open(golden_path, &g));
    const struct lg_st_entry *ids = golden(g, "token_ids");
    size_t n;
    float *want = golden_f32(g, "text_hidden", &n);
    float *got = run(dir, device, shards, (int)ids->dim[0], (int)ids->dim[1], ids->data);
    double error = relative_error(got, want, n);
    print_message("%s on %s, %d shards: %.2e\n", dir, device, shards, error);
    if (!(error <= tolerance)) fail_msg("relative error %g above %g", error, tolerance);
    free(got);
    free(want);
    lg_st_close(&g);
}

static void test_emoji_golden(void **state)
{
    (void)state;
    check_golden(EMOJI, EMOJI_GOLDEN, "host", 1, TOLERANCE);
    check_golden(EMOJI, EMOJI_GOLDEN, "ref64", 2, TOLERANCE_F64);
}

static void test_small_goldens(void **state)
{
    (void)state;
    check_golden(RELU, RELU "/golden.safetensors", "host", 1, TOLERANCE);
    check_golden(RELU, RELU "/golden.safetensors", "ref64", 2, TOLERANCE_F64);
    check_golden(GATED, GATED "/golden.safetensors", "host", 3, TOLERANCE);
    check_golden(GATED, GATED "/golden.safetensors", "ref64", 1, TOLERANCE_F64);
}

static void test_shards_keep_bits(void **state)
{
    (void)state;
    lg_st_file *g = NULL;
    OK(lg_st_open(EMOJI_GOLDEN, &g));
    const struct lg_st_entry *ids = golden(g, "token_ids");
    int B = (int)ids->dim[0], L = (int)ids->dim[1];
    size_t bytes = (size_t)(B * L * 192) * sizeof(float);
    float *one = run(EMOJI, "host", 1, B, L, ids->data);
    for (int shards = 2; shards <= 4; shards++) {
        float *many = run(EMOJI, "host", shards, B, L, ids->data);
        assert_memory_equal(one, many, bytes);
        free(many);
    }
    free(one);
    lg_st_close(&g);
}

/* The same caption in every slot, among other neighbours: the same bits. */
static void test_slot_and_neighbours(void **state)
{
    (void)state;
    enum { B = 8, L = 24, D = 192 };
    lg_st_file *g = NULL;
    OK(lg_st_open(EMOJI_GOLDEN, &g));
    const int32_t *golden_ids = golden(g, "token_ids")->data;
    float *first = NULL;
    for (int slot = 0; slot < B; slot++) {
        int32_t ids[B][L] = {0};
        for (int i = 0; i < B; i++) { /* neighbours of changing length */
            int n = 1 + (i * 5 + slot * 3) % L;
            for (int k = 0; k < n; k++) ids[i][k] = 2 + (i * 131 + k * 17 + slot) % 2000;
        }
        memcpy(ids[slot], golden_ids + L, sizeof ids[slot]);
        float *out = run(EMOJI, "host", 1, B, L, ids[0]);
        if (!first) {
            first = malloc(L * D * sizeof *first);
            memcpy(first, out, L * D * sizeof *first);
        }
        assert_memory_equal(first, out + (size_t)slot * L * D, L * D * sizeof *first);
        free(out);
    }
    free(first);
    lg_st_close(&g);
}

static void test_tokenizer_golden(void **state)
{
    (void)state;
    lg_st_file *g = NULL;
    lg_tokenizer *t = NULL;
    OK(lg_st_open(EMOJI_GOLDEN, &g));
    OK(lg_tokenizer_open(EMOJI, &t));
    assert_in_range(lg_tokenizer_pieces(t), 1000, 2048);
    const struct lg_st_entry *e = golden(g, "token_ids");
    cJSON *captions = cJSON_Parse(lg_st_metadata(g, "captions"));
    assert_int_equal(cJSON_GetArraySize(captions), e->dim[0]);
    int L = (int)e->dim[1], i = 0;
    const cJSON *caption;
    cJSON_ArrayForEach(caption, captions)
    {
        int32_t ids[64];
        int n;
        const int32_t *want = (const int32_t *)e->data + i++ * L;
        OK(lg_tokenizer_encode(t, caption->valuestring, L, ids, &n));
        assert_memory_equal(ids, want, (size_t)L * sizeof *ids);
        assert_true(ids[n - 1] == LG_SPIECE_EOS && (n == L || ids[n] == LG_SPIECE_PAD));
        OK(lg_tokenizer_encode(t, caption->valuestring, 2, ids, &n)); /* cut: L - 1, then eos */
        assert_true(n == 2 && ids[0] == want[0] && ids[1] == LG_SPIECE_EOS);
    }
    int32_t one[3];
    int n;
    OK(lg_tokenizer_encode(t, "", 3, one, &n));
    assert_true(n == 1 && one[0] == LG_SPIECE_EOS && one[1] == 0 && one[2] == 0);
    OK(lg_tokenizer_encode(t, "fog", 1, one, NULL));
    assert_int_equal(one[0], LG_SPIECE_EOS);
    OK(lg_tokenizer_encode(t, "\xff\xfe broken \xc3", 3, one, &n)); /* not UTF-8: no failure */
    cJSON_Delete(captions);
    lg_tokenizer_close(&t);
    assert_null(t);
    lg_st_close(&g);
}

/* Expects rc and a part of the message. */
static void refused(int rc, int want, const char *needle)
{
    if (rc != want || !strstr(lg_err_message(), needle))
        fail_msg("rc %d, wanted %d; \"%s\" lacks \"%s\"", rc, want, rc ? lg_err_message() : "",
                 needle);
    lg_err_clear();
}

static void test_tokenizer_refuses(void **state)
{
    (void)state;
    scratch_make();
    lg_tokenizer *t = NULL;
    refused(lg_tokenizer_open("/nonexistent/spiece.model", &t), LG_ERR_NOTFOUND, "spiece.model");
    refused(lg_tokenizer_open(scratch_write("x.model", "no model at all"), &t), LG_ERR_CORRUPT,
            "sentencepiece");
    char *data;
    size_t bytes;
    OK(lg_read_file(EMOJI "/spiece.model", 1 << 24, &data, &bytes));
    OK(lg_publish_file(scratch_path("cut.model"), data, bytes / 2));
    refused(lg_tokenizer_open(scratch_path("cut.model"), &t), LG_ERR_CORRUPT, "cut.model");
    free(data);
    assert_null(t);
    scratch_remove();
}

static const char small_config[] =
    "{\"model_type\": \"t5\", \"vocab_size\": 61, \"d_model\": 16, \"d_kv\": 8, \"d_ff\": 24,"
    " \"num_layers\": 3, \"num_heads\": 3, \"relative_attention_num_buckets\": 8,"
    " \"relative_attention_max_distance\": 20, \"feed_forward_proj\": \"gated-gelu\"%s}";

static int config_with(const char *more)
{
    char text[1024];
    struct lg_t5_config c;
    snprintf(text, sizeof text, small_config, more);
    scratch_write("m/config.json", text);
    return lg_t5_config_load(scratch_path("m"), &c);
}

static void test_bad_configs(void **state)
{
    (void)state;
    scratch_make();
    struct lg_t5_config c;
    assert_int_equal(config_with(""), 0);
    refused(lg_t5_config_load("examples/emoji/vae", &c), LG_ERR_CONFIG, "model_type");
    refused(lg_t5_config_load("/nonexistent", &c), LG_ERR_NOTFOUND, "/nonexistent/config.json");
    /* cJSON takes the first of equal keys, so each row brings a new one or a whole text. */
    static const char *const bad[][2] = {
        {"{\"model_type\": \"clip_text_model\"}", "clip_text_model"},
        {"{\"model_type\": \"t5\"}", "\"vocab_size\" is missing"},
        {"{\"vocab_size\": 61.5, \"model_type\": \"t5\"}", "not a whole number"},
        {"{\"vocab_size\": -3, \"model_type\": \"t5\"}", "must be 2 to"},
        {"{\"vocab_size\": \"many\", \"model_type\": \"t5\"}", "not a whole number"},
        {"{\"model_type\": 5}", "not a string"},
        {"[1, 2]", "not a JSON object"},
        {"{\"model_type\": \"t5\", ", "not a JSON object"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        scratch_write("m/config.json", bad[i][0]);
        refused(lg_t5_config_load(scratch_path("m"), &c), LG_ERR_CONFIG, bad[i][1]);
    }
    refused(config_with(", \"dense_act_fn\": \"silu\""), LG_ERR_CONFIG, "dense_act_fn");
    refused(config_with(", \"layer_norm_epsilon\": \"x\""), LG_ERR_CONFIG, "layer_norm_epsilon");
    struct lg_text_encoder_config e;
    refused(lg_text_encoder_config_load("examples/emoji/vae", &e), LG_ERR_CONFIG, "model_type");
    OK(lg_text_encoder_config_load(EMOJI, &e));
    lg_params t;
    refused(lg_text_encoder_params(&e, 0, 5, &t), LG_ERR_CONFIG, "5 shards");
    refused(lg_text_encoder_params(&e, 0, 0, &t), LG_ERR_CONFIG, "0 shards");
    scratch_remove();
}

/* Puts the golden's weights, cut to `bytes`, beside a config. */
static void model_with(const char *config, size_t cut)
{
    char *data;
    size_t bytes;
    OK(lg_read_file(GATED "/model.safetensors", 1 << 24, &data, &bytes));
    scratch_write("m/config.json", config);
    OK(lg_publish_file(scratch_path("m/model.safetensors"), data, bytes - cut));
    free(data);
}

static void test_bad_weights(void **state)
{
    (void)state;
    scratch_make();
    struct lg_text_encoder_config c;
    char text[1024];
    float *w = calloc(1 << 16, sizeof *w);
    snprintf(text, sizeof text, small_config, "");
    model_with(text, 0);
    OK(lg_text_encoder_config_load(scratch_path("m"), &c));
    OK(lg_text_encoder_load(&c, scratch_path("m"), 0, 1, w));
    model_with(text, 1000);
    refused(lg_text_encoder_load(&c, scratch_path("m"), 0, 1, w), LG_ERR_CORRUPT,
            "1000 bytes are missing");
    model_with(text, 0);
    struct lg_text_encoder_config deep = c, shallow = c, wide = c;
    deep.t5.layers = 4;
    refused(lg_text_encoder_load(&deep, scratch_path("m"), 0, 1, w), LG_ERR_MISMATCH, "block.3");
    shallow.t5.layers = 2; /* an unused layer in the file: the config is another model's */
    refused(lg_text_encoder_load(&shallow, scratch_path("m"), 0, 1, w), LG_ERR_MISMATCH, "block.2");
    wide.t5.d_ff = 32;
    refused(lg_text_encoder_load(&wide, scratch_path("m"), 0, 1, w), LG_ERR_MISMATCH,
            "shape (24, 16)");
    wide = c;
    wide.t5.gated = false;
    refused(lg_text_encoder_load(&wide, scratch_path("m"), 0, 1, w), LG_ERR_MISMATCH,
            "DenseReluDense.wi");
    refused(lg_text_encoder_load(&c, "examples/emoji", 0, 1, w), LG_ERR_NOTFOUND,
            "model.safetensors");
    free(w);
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_emoji_golden),     cmocka_unit_test(test_small_goldens),
        cmocka_unit_test(test_shards_keep_bits), cmocka_unit_test(test_slot_and_neighbours),
        cmocka_unit_test(test_tokenizer_golden), cmocka_unit_test(test_tokenizer_refuses),
        cmocka_unit_test(test_bad_configs),      cmocka_unit_test(test_bad_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
