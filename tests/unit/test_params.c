/* Parameter tables: places, initial values (statistics, shards), loading (types, shards, layouts,
 * every way in which a file can be another model's). */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static struct lg_param spec(const char *name, int rank, int64_t a, int64_t b, lg_param_init init,
                            double scale)
{
    struct lg_param p = {.rank = rank, .dim = {a, b}, .init = init, .init_scale = scale};
    snprintf(p.name, sizeof p.name, "%s", name);
    return p;
}

static lg_params small_table(void)
{
    lg_params t = {0};
    struct lg_param rows[] = {
        spec("n", 2, 100, 101, LG_INIT_NORMAL, 0.02), spec("u", 2, 97, 103, LG_INIT_UNIFORM, 0.5),
        spec("u2", 2, 97, 103, LG_INIT_UNIFORM, 0.5), spec("one", 1, 7, 0, LG_INIT_ONE, 0),
        spec("zero", 1, 9, 0, LG_INIT_ZERO, 0),
    };
    lg_params_add(&t, &rows[0]);
    lg_params_add(&t, &rows[1]);
    lg_params_add_packed(&t, &rows[2]);
    lg_params_add(&t, &rows[3]);
    lg_params_add(&t, &rows[4]);
    return t;
}

static void test_places(void **state)
{
    lg_params t = small_table();
    assert_int_equal(t.n, 5);
    for (int i = 0; i < t.n; i++)
        if (i != 2) assert_int_equal(t.p[i].offset % LG_PARAM_ALIGN, 0);
    assert_int_equal(t.p[2].offset, t.p[1].offset + t.p[1].count);
    assert_int_not_equal(t.p[2].offset % LG_PARAM_ALIGN, 0);
    assert_int_equal(t.count % LG_PARAM_ALIGN, 0);
    assert_true(t.count >= t.p[4].offset + 9);
    assert_int_equal(lg_params_find(&t, "one"), 3);
    assert_int_equal(lg_params_find(&t, "two"), -1);
    lg_params_free(&t);
    assert_int_equal(t.n, 0);
}

/* Units begin on whole pieces of the gradient's squares and hold everything between them. */
static void test_units(void **state)
{
    lg_params t = {0};
    const struct lg_param rows[] = {spec("a", 1, 5000, 0, LG_INIT_NORMAL, 1),
                                    spec("b", 1, 3, 0, LG_INIT_NORMAL, 1),
                                    spec("c", 1, 20, 0, LG_INIT_NORMAL, 1)};
    lg_params_begin_unit(&t, "embed");
    lg_params_add(&t, &rows[0]);
    lg_params_begin_unit(&t, "block.%d", 0);
    lg_params_add(&t, &rows[1]);
    lg_params_add(&t, &rows[2]);
    assert_int_equal(t.n_units, 2);
    assert_string_equal(t.unit[1].name, "block.0");
    assert_true(t.unit[0].first == 0 && t.unit[0].count == 8192);
    assert_true(t.unit[1].first == 8192 && t.p[1].offset == 8192 && t.unit[1].count == 48);
    assert_int_equal(t.count, 8240);
    float *w = malloc(t.count * sizeof *w);
    lg_params_init(&t, 1, w, 0, t.count);
    for (size_t e = 5000; e < 8192; e++) assert_true(w[e] == 0.0f);
    free(w);
    lg_params_free(&t);
}

/* A parameter's values are its own, whatever stands before it. */
static void test_init_by_name(void **state)
{
    lg_params t = small_table(), alone = {0};
    struct lg_param u = spec("u", 2, 97, 103, LG_INIT_UNIFORM, 0.5);
    float *w = malloc(t.count * sizeof *w), *own = malloc(t.count * sizeof *own);
    lg_params_add(&alone, &u);
    lg_params_init(&t, 9, w, 0, t.count);
    lg_params_init(&alone, 9, own, 0, alone.count);
    assert_memory_equal(w + t.p[1].offset, own, u.dim[0] * u.dim[1] * sizeof *w);
    free(w);
    free(own);
    lg_params_free(&t);
    lg_params_free(&alone);
}

/* The first group that fits counts; stretches of one group end where another's begins, gaps go with what is before them. */
static void test_groups(void **state)
{
    lg_params t = small_table(); /* n, u, u2 (packed), one, zero */
    static const char *const texts[] = {"u? decay=0", "u* lr=0.5", "[no]* lr=2 decay=0.25", NULL};
    assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){.texts = texts}), 0);
    static const int want[] = {3, 2, 1, 3, 0};
    for (int i = 0; i < t.n; i++) assert_int_equal(t.p[i].group, want[i]);
    assert_true(t.group[1].decay == 0 && t.group[1].lr == 1 && t.group[2].lr == 0.5);
    int group;
    assert_int_equal(lg_params_group_end(&t, 0, t.count, &group), t.p[1].offset);
    assert_int_equal(group, 3);
    assert_int_equal(lg_params_group_end(&t, t.p[1].offset - 1, t.count, &group), t.p[1].offset);
    assert_int_equal(group, 3);
    assert_int_equal(lg_params_group_end(&t, t.p[2].offset + 5, t.count, &group), t.p[3].offset);
    assert_int_equal(group, 1);
    assert_int_equal(lg_params_group_end(&t, t.p[1].offset, t.p[1].offset + 7, &group),
                     t.p[1].offset + 7);
    assert_int_equal(lg_params_group_end(&t, t.p[4].offset, t.count, &group), t.count);
    assert_int_equal(group, 0);
    assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){0}),
                     0); /* and out of them again */
    assert_int_equal(lg_params_group_end(&t, 0, t.count, &group), t.count);
    assert_int_equal(group, 0);
    lg_params_free(&t);
}

static void test_groups_refused(void **state)
{
    lg_params t = small_table();
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"v* frozen", "fits none of the 5 parameters"},
        {"u frozen", "are one product"},
        {"u2 frozen", "are one product"},
        {"n", "does not say what becomes of them"},
        {"", "it is empty"},
        {"n frozen lr=2", "has no factors"},
        {"n frozen optimizer=adamw", "no optimizer"},
        {"n frozen storage=auto storage=fp8", "no optimizer"},
        {"n storage=bf16", "none of these"},
        {"n optimizer=sgd", "none of these"},
        {"n optimizer=adamw8bit", "for tensors of at least 4096 elements, of which it has none"},
        {"n lr=-1", "a factor that is no number"},
        {"n lr=0x1", "a factor that is no number"},
        {"n lr=2e6", "a factor that is no number"},
        {"n warm", "none of these"}};
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        const char *const texts[] = {bad[i].text, NULL};
        assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){.texts = texts}),
                         LG_ERR_CONFIG);
        if (!strstr(lg_err_message(), bad[i].why))
            fail_msg("\"%s\": %s", bad[i].text, lg_err_message());
        lg_err_clear();
    }
    static const char *const stored[] = {"u frozen storage=fp8", "u2 frozen storage=int8", NULL};
    assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){.texts = stored}),
                     LG_ERR_CONFIG);
    assert_non_null(
        strstr(lg_err_message(), "u and u2 are one product; give both the same storage"));
    lg_err_clear();
    static const char *const both[] = {"u* frozen", NULL};
    assert_int_equal(lg_params_group(&t, &(struct lg_params_grouping){.texts = both}), 0);
    lg_params_free(&t);
}

/* q, k and v, weights and biases, lie behind each other in the nets' tables. */
static void test_packing(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    lg_params t;
    assert_int_equal(lg_denoiser_params(&c, &t), 0);
    static const char *const pairs[][2] = {
        {"attn1.to_q", "attn1.to_k"}, {"attn1.to_k", "attn1.to_v"}, {"attn2.to_k", "attn2.to_v"}};
    for (size_t i = 0; i < LG_ARRAY_LEN(pairs); i++) {
        for (int bias = 0; bias < 2; bias++) {
            char a[96], b[96];
            const char *tail = bias ? "bias" : "weight";
            snprintf(a, sizeof a, "transformer_blocks.1.%s.%s", pairs[i][0], tail);
            snprintf(b, sizeof b, "transformer_blocks.1.%s.%s", pairs[i][1], tail);
            const struct lg_param *p = &t.p[lg_params_find(&t, a)];
            assert_int_equal(t.p[lg_params_find(&t, b)].offset, p->offset + p->count);
        }
    }
    lg_params_free(&t);
}

struct moments {
    double mean, variance, low, high;
};

static struct moments moments_of(const float *v, size_t n)
{
    struct moments m = {0, 0, v[0], v[0]};
    for (size_t i = 0; i < n; i++) {
        m.mean += v[i] / (double)n;
        m.low = fmin(m.low, v[i]);
        m.high = fmax(m.high, v[i]);
    }
    for (size_t i = 0; i < n; i++) m.variance += (v[i] - m.mean) * (v[i] - m.mean) / (double)n;
    return m;
}

static void test_init(void **state)
{
    lg_params t = small_table();
    float *w = malloc(t.count * sizeof *w);
    lg_params_init(&t, 1, w, 0, t.count);
    /* About 1e4 values: the mean within 5 sigma / 100, the variance within 5 sqrt(2) %. */
    struct moments n = moments_of(w + t.p[0].offset, t.p[0].count);
    assert_true(fabs(n.mean) <= 0.001 && fabs(n.variance / 4e-4 - 1) <= 0.07);
    struct moments u = moments_of(w + t.p[1].offset, t.p[1].count);
    assert_true(fabs(u.mean) <= 0.015 && fabs(u.variance * 12 - 1) <= 0.07);
    assert_true(u.low >= -0.5 && u.high <= 0.5 && u.low < -0.499 && u.high > 0.499);
    size_t same = 0; /* two parameters alike in all but their name have other values */
    for (size_t e = 0; e < t.p[1].count; e++) same += w[t.p[1].offset + e] == w[t.p[2].offset + e];
    assert_true(same < 10);
    for (size_t e = 0; e < 7; e++) assert_true(w[t.p[3].offset + e] == 1.0f);
    for (size_t e = 0; e < 9; e++) assert_true(w[t.p[4].offset + e] == 0.0f);
    for (size_t e = t.p[3].offset + 7; e < t.p[4].offset; e++) assert_true(w[e] == 0.0f);
    free(w);
    lg_params_free(&t);
}

static void test_init_shards(void **state)
{
    lg_params t = small_table();
    float *whole = malloc(t.count * sizeof *whole), *part = malloc(t.count * sizeof *part);
    lg_params_init(&t, 77, whole, 0, t.count);
    static const size_t cuts[] = {0, 1, 10099, 10102, 10115, 20000, 30121, 1u << 30};
    for (size_t i = 0; i + 1 < LG_ARRAY_LEN(cuts); i++) {
        size_t to = LG_MIN(cuts[i + 1], t.count);
        lg_params_init(&t, 77, part + cuts[i], cuts[i], to - cuts[i]);
    }
    assert_memory_equal(whole, part, t.count * sizeof *whole);
    lg_params_init(&t, 78, part, 0, t.count);
    assert_memory_not_equal(whole, part, t.count * sizeof *whole);
    free(whole);
    free(part);
    lg_params_free(&t);
}

/* So large that several threads fill it: the same values as of small pieces, each filled by one. */
static void test_init_large(void **state)
{
    enum { PIECE = 1 << 20 };
    lg_params t = {0};
    const struct lg_param rows[] = {spec("a", 2, 3001, 4099, LG_INIT_UNIFORM, 0.5),
                                    spec("b", 1, 4099, 0, LG_INIT_ONE, 1),
                                    spec("c", 2, 2003, 999, LG_INIT_NORMAL, 0.02)};
    for (size_t i = 0; i < LG_ARRAY_LEN(rows); i++) lg_params_add(&t, &rows[i]);
    float *whole = malloc(t.count * sizeof *whole), *part = malloc(t.count * sizeof *part);
    lg_params_init(&t, 5, whole, 0, t.count);
    for (size_t at = 0; at < t.count; at += PIECE)
        lg_params_init(&t, 5, part + at, at, LG_MIN(t.count - at, (size_t)PIECE));
    assert_memory_equal(whole, part, t.count * sizeof *whole);
    free(whole);
    free(part);
    lg_params_free(&t);
}

/* What a fresh net must be: each block the identity, the output zero. */
static double largest(const lg_params *t, const float *w, const char *name)
{
    int i = lg_params_find(t, name);
    assert_true(i >= 0);
    struct moments m = moments_of(w + t->p[i].offset, t->p[i].count);
    return fmax(fabs(m.low), fabs(m.high));
}

static void test_init_nets(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    lg_params t;
    assert_int_equal(lg_denoiser_params(&dit, &t), 0);
    float *w = malloc(t.count * sizeof *w);
    lg_params_init(&t, 5, w, 0, t.count);
    assert_true(largest(&t, w, "transformer_blocks.1.norm1.linear.weight") == 0);
    assert_true(largest(&t, w, "proj_out_1.weight") == 0);
    assert_true(largest(&t, w, "proj_out_2.weight") == 0);
    double bound = sqrt(6.0 / (4 * 32)),
           q = largest(&t, w, "transformer_blocks.0.attn1.to_q.weight");
    assert_true(q <= bound && q > 0.98 * bound);
    free(w);
    lg_params_free(&t);
    assert_int_equal(lg_denoiser_params(&pixart, &t), 0);
    w = malloc(t.count * sizeof *w);
    lg_params_init(&t, 5, w, 0, t.count);
    assert_true(largest(&t, w, "transformer_blocks.0.attn2.to_out.0.weight") == 0);
    assert_true(largest(&t, w, "proj_out.weight") == 0);
    assert_true(largest(&t, w, "adaln_single.linear.weight") > 0.04);
    int i = lg_params_find(&t, "transformer_blocks.0.scale_shift_table");
    struct moments m = moments_of(w + t.p[i].offset, t.p[i].count);
    assert_true(fabs(m.variance * 48 - 1) <= 0.4); /* 288 values: 5 sigma are 0.42 */
    free(w);
    lg_params_free(&t);
}

/* What ranks gather and give away at once is not much larger than a block, or than DiT-XL/2's modulations, however large the
 * net is. */
static void test_units_of_large_nets(void **state)
{
    static const struct {
        int hidden, depth, products;
    } nets[] = {{768, 12, 1}, {1152, 28, 1}, {2048, 28, 28}, {3072, 48, 48}};
    for (size_t i = 0; i < LG_ARRAY_LEN(nets); i++) {
        struct lg_denoiser_config c = denoiser_fixture_dit();
        const size_t D = (size_t)nets[i].hidden, block = 12 * D * D + 13 * D;
        size_t modulations = 0, most = 0;
        lg_params t;
        c.hidden = nets[i].hidden, c.depth = nets[i].depth;
        assert_int_equal(lg_denoiser_params(&c, &t), 0);
        assert_int_equal(t.n_units, 2 + nets[i].depth + nets[i].products);
        for (int u = 1 + nets[i].depth; u < t.n_units - 1; u++) {
            modulations += t.unit[u].count;
            most = LG_MAX(most, t.unit[u].count);
        }
        const size_t want = (size_t)nets[i].depth * (6 * D * D + 6 * D);
        assert_in_range(modulations, want, want + (size_t)nets[i].products * 4096); /* alignment */
        assert_true(most <= (nets[i].products > 1 ? block : (size_t)LG_DIT_MODULATION_WEIGHTS));
        lg_params_free(&t);
    }
}

/* ---- loading ---- */

struct tensor {
    const char *name;
    lg_dtype dtype;
    int rank;
    int64_t dim[4];
    const void *data;
    size_t bytes;
};

static void write_file(const char *path, const struct tensor *t, int n)
{
    lg_st_writer *w;
    assert_int_equal(lg_st_writer_open(path, &w), 0);
    for (int i = 0; i < n; i++)
        assert_int_equal(lg_st_writer_declare(w, t[i].name, t[i].dtype, t[i].rank, t[i].dim), 0);
    for (int i = 0; i < n; i++) assert_int_equal(lg_st_writer_data(w, t[i].data, t[i].bytes), 0);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
}

static const float A[6] = {1, 2, 3, 4, 5, 6}, CONV[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static const uint16_t HALVES[2] = {0x3C00, 0xC000}, BRAINS[2] = {0x3F80, 0xC000};

/* a (2, 3), conv (2, 2, 1, 2) in OHWI, h (2), b (2). */
static lg_params file_table(void)
{
    lg_params t = {0};
    struct lg_param a = spec("a", 2, 2, 3, LG_INIT_ZERO, 0),
                    h = spec("h", 1, 2, 0, LG_INIT_ZERO, 0);
    struct lg_param b = spec("b", 1, 2, 0, LG_INIT_ZERO, 0);
    struct lg_param conv = {
        .name = "conv", .rank = 4, .dim = {2, 2, 1, 2}, .layout = LG_LAYOUT_CONV_OHWI};
    lg_params_add(&t, &a);
    lg_params_add(&t, &conv);
    lg_params_add(&t, &h);
    lg_params_add(&t, &b);
    return t;
}

static const struct tensor FILE_A = {"a", LG_F32, 2, {2, 3}, A, sizeof A};
static const struct tensor FILE_CONV = {"conv", LG_F32, 4, {2, 2, 1, 2}, CONV, sizeof CONV};
static const struct tensor FILE_H = {"h", LG_F16, 1, {2}, HALVES, sizeof HALVES};
static const struct tensor FILE_B = {"b", LG_BF16, 1, {2}, BRAINS, sizeof BRAINS};

static void check_loaded(const lg_params *t, const char *path)
{
    float w[64], part[64];
    assert_true(t->count <= 64);
    memset(w, 0xFF, sizeof w);
    assert_int_equal(lg_params_load(t, path, NULL, w, 0, t->count), 0);
    assert_memory_equal(w, A, sizeof A);
    static const float ohwi[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    assert_memory_equal(w + t->p[1].offset, ohwi, sizeof ohwi);
    for (int i = 2; i < 4; i++)
        assert_true(w[t->p[i].offset] == 1.0f && w[t->p[i].offset + 1] == -2.0f);
    for (size_t e = 6; e < t->p[1].offset; e++) assert_true(w[e] == 0.0f);
    for (size_t from = 0; from < t->count; from += 3)
        assert_int_equal(
            lg_params_load(t, path, NULL, part + from, from, LG_MIN((size_t)3, t->count - from)),
            0);
    assert_memory_equal(w, part, t->count * sizeof *w);
}

static void test_load(void **state)
{
    lg_params t = file_table();
    scratch_make();
    const char *path = scratch_path("m.safetensors");
    write_file(path, (struct tensor[]){FILE_A, FILE_CONV, FILE_H, FILE_B}, 4);
    check_loaded(&t, path);
    lg_params_free(&t);
    scratch_remove();
}

static void test_load_sharded(void **state)
{
    lg_params t = file_table();
    scratch_make();
    write_file(scratch_path("m-1.safetensors"), (struct tensor[]){FILE_A, FILE_H}, 2);
    write_file(scratch_path("m-2.safetensors"), (struct tensor[]){FILE_CONV, FILE_B}, 2);
    scratch_write("m.safetensors.index.json",
                  "{\"weight_map\": {\"a\": \"m-1.safetensors\", \"conv\": \"m-2.safetensors\", "
                  "\"h\": \"m-1.safetensors\", \"b\": \"m-2.safetensors\"}}");
    check_loaded(&t, scratch_path("m.safetensors"));
    check_loaded(&t, scratch_path("m.safetensors.index.json"));
    lg_params_free(&t);
    scratch_remove();
}

static void refused(const lg_params *t, const char *path, const char *const *extra, int code,
                    const char *needle)
{
    float w[64];
    int rc = lg_params_load(t, path, extra, w, 0, t->count);
    if (rc != code || !strstr(lg_err_message(), needle))
        fail_msg("rc %d, \"%s\" lacks \"%s\"", rc, rc ? lg_err_message() : "loaded", needle);
    lg_err_clear();
}

static void test_load_refusals(void **state)
{
    lg_params t = file_table();
    scratch_make();
    const char *path = scratch_path("m.safetensors");
    struct tensor extra = FILE_A, flat = FILE_A;
    extra.name = "more.x";
    flat.rank = 1, flat.dim[0] = 6;
    refused(&t, path, NULL, LG_ERR_NOTFOUND, "no such file");
    write_file(path, (struct tensor[]){FILE_A, FILE_CONV, FILE_H}, 3);
    refused(&t, path, NULL, LG_ERR_MISMATCH, "tensor b (2) is missing");
    write_file(path, (struct tensor[]){flat, FILE_CONV, FILE_H, FILE_B}, 4);
    refused(&t, path, NULL, LG_ERR_MISMATCH, "tensor a has shape (6), the model wants (2, 3)");
    write_file(path, (struct tensor[]){FILE_A, FILE_CONV, FILE_H, FILE_B, extra}, 5);
    refused(&t, path, NULL, LG_ERR_MISMATCH, "more.x");
    refused(&t, path, (const char *const[]){"most.", NULL}, LG_ERR_MISMATCH, "more.x");
    float w[64];
    const char *const allowed[] = {"most.", "more.", NULL};
    assert_int_equal(lg_params_load(&t, path, allowed, w, 0, t.count), 0);
    lg_params_free(&t);
    scratch_remove();
}

static void test_index_refusals(void **state)
{
    lg_params t = file_table();
    scratch_make();
    const char *path = scratch_path("m.safetensors.index.json");
    write_file(scratch_path("m-1.safetensors"), (struct tensor[]){FILE_A}, 1);
    scratch_write("m.safetensors.index.json", "{");
    refused(&t, path, NULL, LG_ERR_CORRUPT, "not JSON");
    scratch_write("m.safetensors.index.json", "{\"weight_map\": 3}");
    refused(&t, path, NULL, LG_ERR_CORRUPT, "weight_map");
    scratch_write("m.safetensors.index.json", "{\"weight_map\": {\"a\": 3}}");
    refused(&t, path, NULL, LG_ERR_CORRUPT, "\"a\" does not name a file");
    scratch_write("m.safetensors.index.json", "{\"weight_map\": {\"a\": \"../m-1.safetensors\"}}");
    refused(&t, path, NULL, LG_ERR_CORRUPT, "not a plain file name");
    scratch_write("m.safetensors.index.json", "{\"weight_map\": {\"b\": \"m-1.safetensors\"}}");
    refused(&t, path, NULL, LG_ERR_CORRUPT, "tensor b is not in m-1.safetensors");
    lg_params_free(&t);
    scratch_remove();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_groups_refused),
        cmocka_unit_test(test_init_by_name),
        cmocka_unit_test(test_packing),
        cmocka_unit_test(test_init),
        cmocka_unit_test(test_init_shards),
        cmocka_unit_test(test_init_large),
        cmocka_unit_test(test_init_nets),
        cmocka_unit_test(test_units_of_large_nets),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_load_sharded),
        cmocka_unit_test(test_load_refusals),
        cmocka_unit_test(test_index_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
