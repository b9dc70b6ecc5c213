/* Text encoders whose weights are in 8 bits: they compute what they compute with the numbers that the codes stand for, bit by
 * bit, however the weights are sharded and read; and memory holds codes. */
#include "stages/nets/text_encoder.h"
#include "stages/stored.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/encoder_fixture.h"
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define EMOJI "examples/emoji/text_encoder"

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) < 0) fail_msg("%s", lg_err_text());                                             \
    } while (0)

enum { B = 2, T = 7 };
static const int32_t IDS[B * T] = {3, 9, 4, 1, 0, 0, 0, 17, 2, 2, 40, 8, 30, 1};

static struct lg_text_encoder_config t5_config(void)
{
    return (struct lg_text_encoder_config){.kind = LG_TEXT_T5,
                                           .t5 = {.vocab = 50,
                                                  .d_model = 64,
                                                  .d_kv = 16,
                                                  .d_ff = 96,
                                                  .heads = 3,
                                                  .layers = 3,
                                                  .buckets = 8,
                                                  .max_distance = 20,
                                                  .gated = true,
                                                  .eps = 1e-6}};
}

static struct lg_text_encoder_config clip_config(void)
{
    return (struct lg_text_encoder_config){.kind = LG_TEXT_CLIP,
                                           .clip = {.vocab = 50,
                                                    .hidden = 48,
                                                    .mlp = 96,
                                                    .heads = 3,
                                                    .layers = 2,
                                                    .positions = 9,
                                                    .act = LG_ACT_QUICK_GELU,
                                                    .eps = 1e-5,
                                                    .eos = 1,
                                                    .projection = 40}};
}

static float *random_weights(const lg_params *t)
{
    float *w = calloc(t->count, sizeof *w);
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++) {
        double *v = malloc(p->count * sizeof *v);
        golden_fill(p->name, p->count, 0.3, v);
        for (size_t e = 0; e < p->count; e++) w[p->offset + e] = (float)v[e];
        free(v);
    }
    return w;
}

/* The numbers that they become in 8 bits; returns the elements of which that is so. */
static size_t round_weights(const lg_params *t, float *w)
{
    size_t rounded = 0;
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++) {
        const int64_t K = p->dim[1];
        if (!p->in_8_bits) continue;
        float value[256], *scale = malloc((size_t)p->dim[0] * sizeof *scale);
        uint8_t *code = malloc(p->count);
        lg_rows8_values(p->format, value);
        assert_int_equal(lg_rows8_encode(p->format, w + p->offset, p->dim[0], K, code, scale), -1);
        for (size_t e = 0; e < p->count; e++)
            w[p->offset + e] = scale[e / (size_t)K] * value[code[e]];
        rounded += p->count;
        free(code);
        free(scale);
    }
    return rounded;
}

struct call {
    struct lg_text_encoder_config c;
    const char *device;
    int shards;
    lg_storage rounded; /* weights are first what this makes of them */
};

static const void *put_shard(const struct call *x, struct fixture *f, int shard)
{
    struct lg_text_encoder_config rounded = x->c;
    lg_params t, of;
    void *ret;
    rounded.storage = x->rounded;
    OK(lg_text_encoder_params(&x->c, shard, x->shards, &t));
    OK(lg_text_encoder_params(&rounded, shard, x->shards, &of));
    float *w = random_weights(&t);
    const size_t n = round_weights(&of, w), plain = t.count * lg_dtype_bytes(LG_F32);
    assert_int_equal(n > 0, x->rounded != LG_STORAGE_AUTO);
    if (x->c.storage == LG_STORAGE_AUTO)
        assert_int_equal(lg_stored_bytes(&t, LG_F32), plain);
    else /* most of it, embeddings stay */
        assert_true(lg_stored_bytes(&t, LG_F32) < plain * 6 / 10);
    OK(lg_device_alloc(f->device, lg_stored_bytes(&t, lg_device_dtype(f->device)), &ret));
    for (size_t at = 0, end; at < t.count; at = end) {
        end = lg_stored_end(&t, at, 1000);
        OK(lg_stored_put(
            f->device,
            &(struct lg_stored_piece){
                .table = &t, .values = w + at, .first = at, .count = end - at, .memory = ret}));
    }
    free(w);
    lg_params_free(&t);
    lg_params_free(&of);
    return ret;
}

/* The states, and behind them the projected pooled ones of a CLIP; the caller frees. */
static float *run(const struct call *x, size_t *ret_n)
{
    struct fixture f = fixture_open(x->device);
    const lg_dtype type = lg_device_dtype(f.device);
    const struct lg_text_encoder_sizes z = lg_text_encoder_sizes(&x->c);
    const void *weights[LG_TEXT_SHARDS_MAX];
    const bool clip = x->c.kind == LG_TEXT_CLIP;
    int32_t *at, length[B] = {4, 7}, ends[B] = {3, 13};
    lg_text_encoder *net = NULL;
    for (int i = 0; i < x->shards; i++) weights[i] = put_shard(x, &f, i);
    OK(lg_device_alloc(f.device, sizeof IDS + sizeof length + sizeof ends, (void **)&at));
    lg_stream_upload(f.stream, at, IDS, sizeof IDS);
    lg_stream_upload(f.stream, at + B * T, length, sizeof length);
    lg_stream_upload(f.stream, at + B * T + B, ends, sizeof ends);
    const size_t states = (size_t)(B * T * z.width), embeds = (size_t)(B * z.projection);
    struct lg_text_encoder_shape shape = {
        .batch = B, .length = T, .outputs = LG_TEXT_BIT(LG_TEXT_STATES)};
    struct lg_text_io io = {.ids = lg_t2(at, LG_I32, B, T),
                            .length = lg_t1(at + B * T, LG_I32, B),
                            .ends = lg_t1(at + B * T + B, LG_I32, B)};
    io.out[LG_TEXT_STATES] = lg_t3(device_room(&f, states), type, B, T, z.width);
    if (clip) {
        shape.outputs |= LG_TEXT_BIT(LG_TEXT_EMBEDS);
        io.out[LG_TEXT_EMBEDS] = lg_t2(device_room(&f, embeds), type, B, z.projection);
    }
    OK(lg_text_encoder_open(f.device, &x->c, &shape, x->shards, &net));
    for (int repeat = 0; repeat < 2; repeat++) lg_text_encoder_forward(net, f.stream, weights, &io);
    float *ret = malloc((states + embeds) * sizeof *ret);
    float *part = from_device(&f, io.out[LG_TEXT_STATES].data, states);
    memcpy(ret, part, states * sizeof *ret);
    free(part);
    if (clip) {
        part = from_device(&f, io.out[LG_TEXT_EMBEDS].data, embeds);
        memcpy(ret + states, part, embeds * sizeof *ret);
        free(part);
    }
    *ret_n = states + embeds;
    lg_text_encoder_close(&net);
    fixture_close(&f);
    return ret;
}

static void check(const char *device, struct lg_text_encoder_config c, lg_storage storage)
{
    struct call x = {.c = c, .device = device, .shards = 1};
    size_t n;
    float *whole = run(&x, &n);
    x.rounded = storage;
    float *rounded = run(&x, &n);
    x.rounded = LG_STORAGE_AUTO;
    x.c.storage = storage;
    for (x.shards = 1; x.shards <= 2; x.shards++) {
        float *coded = run(&x, &n);
        assert_memory_equal(coded, rounded, n * sizeof *coded);
        free(coded);
    }
    /* A weight is off by at most 2^-4 of itself, 2^-5.8 in the mean square; two or three layers of residuals. */
    const double off = relative_error(rounded, whole, n);
    if (!(off > 0 && off < 0x1p-4)) fail_msg("%s: off by %g", device, off);
    free(whole);
    free(rounded);
}

static void test_computes_with_its_numbers(void **state)
{
    (void)state;
    static const lg_storage storages[] = {LG_STORAGE_FP8, LG_STORAGE_INT8};
    for (size_t k = 0; k < LG_ARRAY_LEN(storages); k++) {
        check("host", t5_config(), storages[k]);
        check("host", clip_config(), storages[k]);
    }
}

/* A file's weights in pieces are those as a whole. */
static void test_ranges(void **state)
{
    (void)state;
    struct lg_text_encoder_config c;
    lg_params t;
    OK(lg_text_encoder_config_load(EMOJI, &c));
    OK(lg_text_encoder_params(&c, 1, 2, &t));
    float *all = malloc(t.count * sizeof *all), *part = malloc(t.count * sizeof *part);
    OK(lg_text_encoder_load(&c, EMOJI, 1, 2, all));
    struct lg_text_range r = {.shard = 1, .shards = 2};
    for (; r.first < t.count; r.first += r.count) {
        r.count = LG_MIN((size_t)100001, t.count - r.first);
        OK(lg_text_encoder_load_range(&c, EMOJI, &r, part + r.first));
    }
    assert_memory_equal(part, all, t.count * sizeof *all);
    free(all);
    free(part);
    lg_params_free(&t);
}

static void test_nothing_to_store(void **state)
{
    (void)state;
    struct lg_text_encoder_config c = clip_config();
    lg_params t;
    c.clip.hidden = 24;
    c.clip.mlp = 48;
    c.storage = LG_STORAGE_INT8;
    assert_int_equal(lg_text_encoder_params(&c, 0, 1, &t), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "leave its storage at \"auto\""));
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_computes_with_its_numbers),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_nothing_to_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
