/* Weights in 8 bits: which are, and where; however they get there the same bytes; a net computes with them what it
 * computes with the numbers that they stand for, bit by bit, and holds those for one product at a time. */
#include "stages/stored.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const LINEAR[] = {"linear", NULL};
static const lg_storage STORAGES[] = {LG_STORAGE_FP8, LG_STORAGE_INT8};

static struct lg_training training_of(lg_storage frozen)
{
    return (struct lg_training){.adapter = {.rank = 2, .alpha = 3, .targets = LINEAR},
                                .frozen = frozen};
}

static lg_params table_of(const struct lg_denoiser_config *c, lg_storage frozen)
{
    const struct lg_training training = training_of(frozen);
    lg_params t;
    assert_int_equal(lg_denoiser_table(c, &training, &t), 0);
    return t;
}

/* ---- which, and where ---- */

static void expect_stored(const lg_params *t, const char *const *names)
{
    for (int i = 0; i < t->n; i++) {
        bool want = false;
        for (const char *const *n = names; *n; n++) want = want || strstr(t->p[i].name, *n);
        want = want && i >= t->trained && strstr(t->p[i].name, ".weight");
        if (t->p[i].in_8_bits != want)
            fail_msg("%s is %sin 8 bits", t->p[i].name, want ? "not " : "");
    }
}

/* By the fixtures' widths: 3 x 32 x 32 and 48 x 48 are too few elements, 4 x 32 x 32 and, as one product, 2 x 48 x 48
 * are enough. */
static void test_which(void **state)
{
    (void)state;
    const struct lg_denoiser_config dit = denoiser_fixture_dit(),
                                    pixart = denoiser_fixture_pixart();
    lg_params t = table_of(&dit, LG_STORAGE_FP8);
    expect_stored(&t, (const char *const[]){".ff.", ".norm1.linear.", NULL});
    lg_params_free(&t);
    t = table_of(&pixart, LG_STORAGE_INT8);
    expect_stored(&t, (const char *const[]){".ff.", ".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v.",
                                            ".attn2.to_k.", ".attn2.to_v.", NULL});
    lg_params_free(&t);
    t = table_of(&pixart, LG_STORAGE_AUTO);
    expect_stored(&t, (const char *const[]){NULL});
    for (int u = 0; u < t.n_units; u++) {
        assert_false(lg_stored_has_codes(&t, u));
        assert_int_equal(lg_stored_unit_at(&t, u, LG_BF16), 2 * t.unit[u].first);
    }
    assert_int_equal(lg_stored_bytes(&t, LG_F32), 4 * t.count);
    lg_params_free(&t);
    /* Nothing to store: no adapter, and none of the matrices large enough. */
    struct lg_training training = {.frozen = LG_STORAGE_FP8};
    assert_int_equal(lg_denoiser_table(&dit, &training, &t), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "model.frozen"));
    training.groups = (const char *const[]){"*.attn1.* frozen", NULL};
    assert_int_equal(lg_denoiser_table(&dit, &training, &t), LG_ERR_CONFIG);
    lg_err_clear();
}

/* A group's own storage, which may be none. */
static void test_groups(void **state)
{
    (void)state;
    const struct lg_denoiser_config dit = denoiser_fixture_dit();
    struct lg_training training = {
        .groups = (const char *const[]){"transformer_blocks.0.ff.net.2.* frozen storage=auto",
                                        "transformer_blocks.1.ff.* frozen storage=int8",
                                        "*.ff.* frozen", NULL},
        .frozen = LG_STORAGE_FP8};
    lg_params t;
    assert_int_equal(lg_denoiser_table(&dit, &training, &t), 0);
    for (int i = t.trained; i < t.n; i++) {
        const char *name = t.p[i].name;
        const bool second = strstr(name, "blocks.1."), matrix = strstr(name, ".weight");
        assert_int_equal(t.p[i].in_8_bits, matrix && !strstr(name, "blocks.0.ff.net.2."));
        if (t.p[i].in_8_bits)
            assert_int_equal(t.p[i].format, second ? LG_ROWS8_INT8 : LG_ROWS8_FP8);
    }
    lg_params_free(&t);
    static const struct {
        const char *groups[3];
        lg_storage frozen;
        const char *of; /* what has nothing to store */
    } none[] = {
        {{"*.attn1.* frozen storage=int8"}, LG_STORAGE_AUTO, "\"*.attn1.*\""},
        {{"*.ff.* frozen storage=int8"}, LG_STORAGE_FP8, "model.frozen"},
        {{"*.ff.* storage=int8", "*.attn1.* frozen"}, LG_STORAGE_AUTO, "\"*.ff.*\""},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(none); i++) {
        training = (struct lg_training){.groups = none[i].groups, .frozen = none[i].frozen};
        assert_int_equal(lg_denoiser_table(&dit, &training, &t), LG_ERR_CONFIG);
        assert_non_null(strstr(lg_err_message(), none[i].of));
        lg_err_clear();
    }
    /* What an adapter adapts is frozen anyway. */
    training = training_of(LG_STORAGE_AUTO);
    training.groups = (const char *const[]){"*.ff.* storage=int8 lr=2", NULL};
    assert_int_equal(lg_denoiser_table(&dit, &training, &t), 0);
    expect_stored(&t, (const char *const[]){".ff.", NULL});
    lg_params_free(&t);
}

/* What a parameter has, as ranges of bytes of the table: of its elements or codes, and of its scales. */
struct range {
    size_t from, to;
};

static int ranges_of(const lg_params *t, lg_dtype type, struct range *ret)
{
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        const struct lg_stored at = lg_stored_place(t, i, type);
        const size_t unit = lg_stored_unit_at(t, p->unit, type);
        const size_t rows = (size_t)p->dim[0], element = p->in_8_bits ? 1 : lg_dtype_bytes(type);
        ret[n++] = (struct range){unit + at.at, unit + at.at + p->count * element};
        assert_true(at.at % 64 == 0 || p->packed || !p->in_8_bits);
        assert_true(ret[n - 1].to <= unit + lg_stored_unit_bytes(t, p->unit, type));
        if (!p->in_8_bits) continue;
        const size_t each = type == LG_F64 ? 8 : 4;
        ret[n++] = (struct range){unit + at.scale_at, unit + at.scale_at + rows * each};
        if (!p->packed) continue;
        const struct lg_stored before = lg_stored_place(t, i - 1, type);
        assert_int_equal(at.at, before.at + t->p[i - 1].count);
        assert_int_equal(at.scale_at, before.scale_at + (size_t)t->p[i - 1].dim[0] * each);
    }
    return n;
}

static void test_where(void **state)
{
    (void)state;
    static const lg_dtype TYPES[] = {LG_F32, LG_BF16, LG_F64};
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    for (size_t k = 0; k < LG_ARRAY_LEN(TYPES); k++) {
        lg_params t = table_of(&c, LG_STORAGE_FP8), plain = table_of(&c, LG_STORAGE_AUTO);
        struct range *r = calloc((size_t)t.n * 2, sizeof *r);
        const int n = ranges_of(&t, TYPES[k], r);
        size_t coded = 0, gained = 0;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++)
                if (r[i].from < r[j].to && r[j].from < r[i].to) fail_msg("%d lies on %d", i, j);
        for (int i = 0; i < t.n; i++)
            if (t.p[i].in_8_bits) coded += t.p[i].count;
        assert_true(coded > 0);
        gained = lg_stored_bytes(&plain, TYPES[k]) - lg_stored_bytes(&t, TYPES[k]);
        /* Scales take less than a thirtieth of that here; units' gaps are saved as well. */
        assert_true(gained >= coded * (lg_dtype_bytes(TYPES[k]) - 1) * 8 / 10);
        for (int u = 0; u < t.trained_units; u++)
            assert_int_equal(lg_stored_unit_at(&t, u, TYPES[k]),
                             t.unit[u].first * lg_dtype_bytes(TYPES[k]));
        free(r);
        lg_params_free(&t);
        lg_params_free(&plain);
    }
}

/* ---- filling ---- */

static float *random_values(const lg_params *t)
{
    float *w = calloc(t->count, sizeof *w);
    for (int i = 0; i < t->n; i++) {
        double *v = malloc(t->p[i].count * sizeof *v);
        golden_fill(t->p[i].name, t->p[i].count, 0.5, v);
        for (size_t e = 0; e < t->p[i].count; e++) w[t->p[i].offset + e] = (float)v[e];
        free(v);
    }
    return w;
}

static void *filled(lg_device *d, const lg_params *t, const float *w, size_t first, size_t most)
{
    const size_t front = first * lg_dtype_bytes(lg_device_dtype(d));
    const size_t bytes = lg_stored_bytes(t, lg_device_dtype(d)) - front;
    char *memory = calloc(1, bytes);
    for (size_t at = first, end; at < t->count; at = end) {
        end = lg_stored_end(t, at, most);
        assert_true(end > at && end <= t->count);
        const struct lg_stored_piece piece = {.table = t,
                                              .values = w + at,
                                              .first = at,
                                              .count = end - at,
                                              .memory = memory,
                                              .front = front};
        assert_int_equal(lg_stored_put(d, &piece), 0);
    }
    return memory;
}

static void test_pieces(void **state)
{
    (void)state;
    static const char *const DEVICES[] = {"host", "ref64"};
    static const size_t PIECES[] = {100, 777, 5000, 12345};
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    for (size_t k = 0; k < 2; k++) {
        lg_device *d;
        assert_int_equal(lg_device_open(DEVICES[k], &(struct lg_device_options){.threads = 1}, &d),
                         0);
        lg_params t = table_of(&c, STORAGES[k]);
        const size_t first = t.trained_count;
        float *w = random_values(&t);
        const size_t bytes =
            lg_stored_bytes(&t, lg_device_dtype(d)) - first * lg_dtype_bytes(lg_device_dtype(d));
        char *all = filled(d, &t, w, first, t.count);
        for (size_t i = 0; i < LG_ARRAY_LEN(PIECES); i++) {
            char *memory = filled(d, &t, w, first, PIECES[i]);
            assert_memory_equal(memory, all, bytes);
            free(memory);
        }
        free(all);
        free(w);
        lg_params_free(&t);
        lg_device_close(&d);
    }
}

static void test_not_finite(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    lg_device *d;
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    lg_params t = table_of(&c, LG_STORAGE_FP8);
    float *w = random_values(&t);
    char *memory = calloc(1, lg_stored_bytes(&t, LG_F32));
    const struct lg_stored_piece piece = {
        .table = &t, .values = w, .count = t.count, .memory = memory};
    const struct lg_param *p = &t.p[lg_params_find(&t, "transformer_blocks.1.attn1.to_k.weight")];
    w[p->offset + 7 * 48 + 3] = INFINITY;
    assert_int_equal(lg_stored_put(d, &piece), LG_ERR_CORRUPT);
    assert_non_null(strstr(lg_err_message(), "transformer_blocks.1.attn1.to_k.weight"));
    assert_non_null(strstr(lg_err_message(), "row 7 "));
    lg_err_clear();
    free(memory);
    free(w);
    lg_params_free(&t);
    lg_device_close(&d);
}

/* ---- nets ---- */

/* Into the plain net's memory the numbers that the other's stand for. */
static void take_numbers(const struct denoiser_fixture *coded, const struct denoiser_fixture *plain)
{
    const lg_params *t = &coded->params;
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        float value[256];
        lg_rows8_values(p->format, value);
        const struct lg_stored at = lg_stored_place(t, i, coded->type);
        const char *unit =
            (const char *)coded->weights + lg_stored_unit_at(t, p->unit, coded->type);
        for (size_t e = 0; e < p->count && p->in_8_bits; e++) {
            const size_t row = e / (size_t)p->dim[1];
            const uint8_t code = (uint8_t)unit[at.at + e];
            const double scale = denoiser_fixture_get(coded, unit + at.scale_at, row);
            denoiser_fixture_set(plain, plain->weights, p->offset + e, scale * (double)value[code]);
        }
    }
}

static void same_bits(const char *what, const struct denoiser_fixture *a, const void *x,
                      const void *y, size_t count)
{
    if (memcmp(x, y, count * lg_dtype_bytes(a->type))) fail_msg("%s: other bits", what);
}

static void check_net(const char *device, const struct lg_denoiser_config *c,
                      const struct lg_training *training, const char *const *recompute)
{
    const struct lg_training as_is = training_of(LG_STORAGE_AUTO);
    struct denoiser_fixture coded, plain;
    denoiser_fixture_open_trained(&coded, device, c, training, recompute);
    denoiser_fixture_open_trained(&plain, device, c, &as_is, recompute);
    const size_t trained = coded.params.trained_count, size = lg_dtype_bytes(coded.type);
    memset(coded.grads, 0, trained * size);
    memset(plain.grads, 0, trained * size);
    denoiser_fixture_forward(&plain);
    double *first = malloc((size_t)lg_numel(&plain.out) * sizeof *first);
    for (size_t i = 0; i < (size_t)lg_numel(&plain.out); i++)
        first[i] = denoiser_fixture_get(&plain, plain.out.data, i);
    take_numbers(&coded, &plain);
    for (int i = 0; i < 2; i++) {
        denoiser_fixture_forward(&coded);
        denoiser_fixture_forward(&plain);
        same_bits("out", &coded, coded.out.data, plain.out.data, (size_t)lg_numel(&coded.out));
        denoiser_fixture_backward(&coded, i);
        denoiser_fixture_backward(&plain, i);
        same_bits("gradients", &coded, coded.grads, plain.grads, trained);
    }
    /* And near the net that is not in 8 bits: a weight is off by 2^-4 of itself at most, 2^-5.8 in the mean square, which
     * two blocks of residuals do not make larger. */
    const struct distance off =
        denoiser_fixture_distance(&coded, coded.out.data, first, (size_t)lg_numel(&coded.out));
    assert_true(off.diff > 0 && off.diff < 0x1p-4 * off.norm);
    free(first);
    denoiser_fixture_close(&coded);
    denoiser_fixture_close(&plain);
}

static void test_computes_with_its_numbers(void **state)
{
    (void)state;
    static const char *const block[] = {"block", NULL}, *const mlp[] = {"mlp", NULL},
                             *const norms[] = {"norms", NULL};
    const struct lg_denoiser_config dit = denoiser_fixture_dit(),
                                    pixart = denoiser_fixture_pixart();
    for (size_t k = 0; k < LG_ARRAY_LEN(STORAGES); k++) {
        const struct lg_training training = training_of(STORAGES[k]);
        check_net("ref64", &dit, &training, NULL);
        check_net("ref64", &pixart, &training, block);
        check_net("host", &dit, &training, mlp);
        check_net("host", &pixart, &training, NULL);
        check_net("host", &pixart, &training, block);
        check_net("host", &pixart, &training, norms);
    }
    struct lg_training mixed = training_of(LG_STORAGE_FP8);
    mixed.groups = (const char *const[]){"transformer_blocks.0.ff.* storage=int8",
                                         "*.attn1.to_?.weight storage=auto", NULL};
    check_net("ref64", &dit, &mixed, NULL);
    check_net("host", &pixart, &mixed, block);
}

/* Beside what the plain net needs, the largest matrix, which no place of something else may fit. */
static void check_memory(const struct lg_denoiser_config *c, const char *const *recompute,
                         bool offload)
{
    struct lg_denoiser_mode mode = {.batch = 3, .train = true, .recompute = recompute};
    struct lg_denoiser_bytes coded, plain;
    lg_device *d;
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    mode.offload = offload;
    mode.training = training_of(LG_STORAGE_FP8);
    assert_int_equal(lg_denoiser_plan(d, c, &mode, &coded), 0);
    mode.training = training_of(LG_STORAGE_AUTO);
    assert_int_equal(lg_denoiser_plan(d, c, &mode, &plain), 0);
    const size_t largest = (size_t)(4 * c->hidden * c->hidden) * sizeof(float);
    if (coded.activations > plain.activations + largest)
        fail_msg("%zu bytes, %zu without codes, %zu the largest", coded.activations,
                 plain.activations, largest);
    assert_int_equal(coded.host, plain.host);
    lg_device_close(&d);
}

static void test_memory(void **state)
{
    (void)state;
    static const char *const block[] = {"block", NULL};
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    c.depth = 6;
    check_memory(&c, NULL, false);
    check_memory(&c, block, false);
    check_memory(&c, NULL, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_which),      cmocka_unit_test(test_groups),
        cmocka_unit_test(test_where),      cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_not_finite), cmocka_unit_test(test_computes_with_its_numbers),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
