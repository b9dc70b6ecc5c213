/* Histograms of weights: TensorBoard's buckets, every value in the right one, groups, the file. */
#include "base/fs.h"
#include "stages/ckpt/histogram.h"
#include "stages/io/safetensors.h"
#include "tests/unit/scratch.h"
#include <cjson/cJSON.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static void test_limits(void **state)
{
    (void)state;
    const double *l = lg_histogram_limits();
    assert_true(l[0] == -DBL_MAX && l[775] == 0 && l[1550] == DBL_MAX);
    assert_true(l[776] == 1e-12 && l[777] == 1e-12 * 1.1 && l[778] == 1e-12 * 1.1 * 1.1);
    assert_true(l[1549] < 1e20 && l[1549] * 1.1 >= 1e20);
    for (int i = 1; i < LG_HISTOGRAM_LIMITS; i++) assert_true(l[i] > l[i - 1]);
    for (int i = 0; i < LG_HISTOGRAM_LIMITS; i++) assert_true(l[i] == -l[1550 - i]);
}

/* Where a value belongs, found by looking at every limit. */
static void assert_counted_once(const lg_histogram *h, double x, uint64_t expected)
{
    const double *l = lg_histogram_limits();
    for (int i = 0; i < LG_HISTOGRAM_LIMITS; i++) {
        bool here = x < l[i] && (i == 0 || x >= l[i - 1]);
        if (here && h->bucket[i] != expected)
            fail_msg("%g: bucket %d has %llu", x, i, (unsigned long long)h->bucket[i]);
    }
}

static void test_counting(void **state)
{
    (void)state;
    static lg_histogram h;
    const float v[] = {0,        -0.0f, 1e-13f, -1e-13f,  0.3f,      -0.3f,
                       -FLT_MAX, 0.3f,  NAN,    INFINITY, -INFINITY, FLT_MAX};
    lg_histogram_begin(&h, "g");
    lg_histogram_add(&h, v, 5);
    lg_histogram_add(&h, v + 5, LG_ARRAY_LEN(v) - 5);
    assert_true(h.count == 9 && h.nonfinite == 3);
    assert_true(h.min == -(double)FLT_MAX && h.max == (double)FLT_MAX);
    assert_true(h.sum == 0);       /* in their order: the second 0.3 vanishes in -FLT_MAX */
    assert_counted_once(&h, 0, 3); /* with -0 and 1e-13 */
    assert_counted_once(&h, -1e-13, 1);
    assert_counted_once(&h, (double)0.3f, 2);
    assert_counted_once(&h, -(double)0.3f, 1);
    assert_counted_once(&h, (double)FLT_MAX, 1);
    assert_counted_once(&h, -(double)FLT_MAX, 1);
    uint64_t total = 0;
    for (int i = 0; i < LG_HISTOGRAM_LIMITS; i++) total += h.bucket[i];
    assert_int_equal(total, 9);
}

/* A value that is a limit belongs above it. */
static void test_at_a_limit(void **state)
{
    (void)state;
    static lg_histogram h;
    const float one = 1e-12f; /* a little below or above the double: where it belongs follows */
    lg_histogram_begin(&h, "g");
    lg_histogram_add(&h, &one, 1);
    assert_counted_once(&h, (double)one, 1);
    assert_int_equal(h.bucket[(double)one < 1e-12 ? 776 : 777], 1);
    assert_true(h.sum_squares == (double)one * (double)one);
}

static void assert_group(const char *name, const char *group)
{
    char got[128];
    lg_histogram_group(name, got);
    assert_string_equal(got, group);
}

static void test_groups(void **state)
{
    (void)state;
    assert_group("transformer_blocks.3.attn1.to_q.weight", "transformer_blocks.3.attn1");
    assert_group("transformer_blocks.3.attn1.to_out.0.bias", "transformer_blocks.3.attn1");
    assert_group("transformer_blocks.3.scale_shift_table",
                 "transformer_blocks.3.scale_shift_table");
    assert_group("pos_embed.proj.weight", "pos_embed.proj");
    assert_group("proj_out.bias", "proj_out");
    assert_group("scale_shift_table", "scale_shift_table");
    assert_group("weight", "weight");
    assert_group("adaln_single.emb.timestep_embedder.linear_1.weight",
                 "adaln_single.emb.timestep_embedder");
}

static void write_weights(const char *third, const float *v)
{
    lg_st_writer *w;
    scratch_write("w/x", "");
    assert_int_equal(lg_st_writer_open(scratch_path("w/diffusion_pytorch_model.safetensors"), &w),
                     0);
    lg_st_writer_declare(w, "a.weight", LG_F32, 2, (int64_t[]){2, 2});
    lg_st_writer_declare(w, "b.weight", LG_F32, 1, (int64_t[]){1});
    lg_st_writer_declare(w, third, LG_F32, 1, (int64_t[]){2});
    lg_st_writer_data(w, v, 7 * sizeof *v);
    assert_int_equal(lg_st_writer_finish(&w, NULL), 0);
}

static double number(const cJSON *h, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(h, name)->valuedouble;
}

static void test_file(void **state)
{
    (void)state;
    char *text;
    size_t bytes;
    const float v[] = {0.5f, -0.25f, 0.5f, 2, 7, -1, NAN};
    write_weights("a.bias", v);
    assert_int_equal(lg_histograms_write(scratch_path("w"), scratch_path("out.json")), 0);
    assert_int_equal(lg_read_file(scratch_path("out.json"), 1 << 20, &text, &bytes), 0);
    cJSON *root = cJSON_Parse(text), *list = cJSON_GetObjectItem(root, "histograms");
    free(text);
    assert_int_equal(cJSON_GetArraySize(list), 2);
    const cJSON *h = list->child;
    assert_string_equal(cJSON_GetObjectItem(h, "group")->valuestring, "a");
    assert_true(number(h, "min") == -1 && number(h, "max") == 2 && number(h, "count") == 5 &&
                number(h, "nonfinite") == 1 && number(h, "sum") == 1.75 &&
                number(h, "sum_squares") == 5.5625);
    /* Empty ones, -1, empty ones, -0.25, empty ones, 0.5 twice, empty ones, 2, empty ones. */
    static const double in[] = {-1, -0.25, 0.5, 2}, n[] = {1, 1, 2, 1};
    const cJSON *limits = cJSON_GetObjectItem(h, "limits"),
                *counts = cJSON_GetObjectItem(h, "counts");
    assert_int_equal(cJSON_GetArraySize(limits), 9);
    assert_int_equal(cJSON_GetArraySize(counts), 9);
    for (int i = 0; i < 9; i++)
        assert_true(cJSON_GetArrayItem(counts, i)->valuedouble == (i % 2 ? n[i / 2] : 0));
    for (int i = 0; i < 4; i++) {
        double low = cJSON_GetArrayItem(limits, 2 * i)->valuedouble;
        double high = cJSON_GetArrayItem(limits, 2 * i + 1)->valuedouble;
        assert_true(low <= in[i] && in[i] < high);
        assert_true(!(fabs(high - low) > 0.1001 * fabs(in[i]) * 1.1)); /* neighbours: 1.1 apart */
    }
    assert_true(cJSON_GetArrayItem(limits, 8)->valuedouble == DBL_MAX);
    assert_string_equal(cJSON_GetObjectItem(h->next, "group")->valuestring, "b");
    cJSON_Delete(root);
    write_weights("a\"b", v); /* it would not stand in JSON as it is */
    assert_int_equal(lg_histograms_write(scratch_path("w"), scratch_path("o2.json")),
                     LG_ERR_CORRUPT);
    assert_false(lg_path_exists(scratch_path("o2.json")));
    assert_int_equal(lg_histograms_write(scratch_path("none"), scratch_path("o2.json")),
                     LG_ERR_NOTFOUND);
    lg_err_clear();
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, scratch_setup, scratch_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_limits), TEST(test_counting), TEST(test_at_a_limit),
        TEST(test_groups), TEST(test_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
