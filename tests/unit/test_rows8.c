/* Matrices of 8 bits: the codes and scales that PyTorch gives, the nearest code for every kind of value, and rows that have none. */
#include "base/check.h"
#include "kernels/rows8.h"
#include "tests/golden/rows8_golden.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static float golden_element(int r, int i)
{
    const uint32_t u = 2654435761u * (uint32_t)(1000 * r + i + 1);
    if (r == 2) return 0;
    return ldexpf((float)(int32_t)u, -((int)(u % 13) + 3 * r));
}

static void check_golden(lg_rows8 format, const uint8_t *codes, const uint32_t *scales)
{
    enum { N = ROWS8_ROWS, K = ROWS8_COLUMNS };
    float w[N * K], scale[N];
    uint8_t got[N * K];
    for (int i = 0; i < N * K; i++) w[i] = golden_element(i / K, i % K);
    assert_int_equal(lg_rows8_encode(format, w, N, K, got, scale), -1);
    assert_memory_equal(scale, scales, sizeof scale);
    for (int i = 0; i < N * K; i++)
        if (got[i] != codes[i])
            fail_msg("format %d: %a in row %d is %d, PyTorch says %d", (int)format, (double)w[i],
                     i / K, got[i], codes[i]);
}

static void test_golden(void **state)
{
    (void)state;
    check_golden(LG_ROWS8_FP8, ROWS8_FP8_CODES, ROWS8_FP8_SCALE);
    check_golden(LG_ROWS8_INT8, ROWS8_INT8_CODES, ROWS8_INT8_SCALE);
}

static void test_values(void **state)
{
    (void)state;
    float value[256];
    lg_rows8_values(LG_ROWS8_FP8, value);
    for (int i = 0; i < 256; i++) {
        float want;
        memcpy(&want, &ROWS8_FP8_VALUES[i], sizeof want);
        if (i % 128 == 127)
            assert_true(isnan(value[i]) && isnan(want));
        else
            assert_memory_equal(&value[i], &want, sizeof want);
    }
    lg_rows8_values(LG_ROWS8_INT8, value);
    for (int i = 0; i < 256; i++) assert_true(value[i] == (float)(i < 128 ? i : i - 256));
}

/* Of all codes that a row may have; the even one of two that are as near, the code that is as good being the one of
 * x's sign. */
static int nearest(const float *value, double x)
{
    int best = -1;
    for (int i = 0; i < 256; i++) {
        if (isnan(value[i]) || (value[i] == 0 && !signbit(value[i]) != !signbit(x))) continue;
        const double off = fabs((double)value[i] - x);
        const double most = best < 0 ? INFINITY : fabs((double)value[best] - x);
        if (off < most || (off == most && i % 2 == 0)) best = i;
    }
    return best;
}

/* With an absmax that makes the scale 1, codes are those of the values themselves: of all values, of what lies in the
 * middle of two, and beside that. */
static void check_nearest(lg_rows8 format, float largest)
{
    float value[256], w[2] = {largest}, scale;
    uint8_t code[2];
    lg_rows8_values(format, value);
    for (int i = 0; i < 256; i++) {
        const int next = (i & 128) | ((i + 1) & 127);
        if (isnan(value[i]) || isnan(value[next]) || fabsf(value[i]) > largest) continue;
        const float middle = fabsf(value[next]) > largest ? value[i] : (value[i] + value[next]) / 2;
        const float tried[] = {value[i], middle, nextafterf(middle, INFINITY),
                               nextafterf(middle, -INFINITY)};
        for (size_t k = 0; k < LG_ARRAY_LEN(tried); k++) {
            if (fabsf(tried[k]) > largest) continue;
            w[1] = tried[k];
            assert_int_equal(lg_rows8_encode(format, w, 1, 2, code, &scale), -1);
            assert_true(scale == 1);
            const int want =
                format == LG_ROWS8_INT8 && w[1] == 0 ? 0 : nearest(value, (double)w[1]);
            if (value[code[1]] != value[want] || (format == LG_ROWS8_FP8 && code[1] != want))
                fail_msg("format %d: %a is %d, nearest is %d", (int)format, (double)w[1], code[1],
                         want);
        }
    }
}

static void test_nearest(void **state)
{
    (void)state;
    check_nearest(LG_ROWS8_FP8, 448);
    check_nearest(LG_ROWS8_INT8, 127);
}

/* What the header promises; the quotient and the product are rounded, too: 2^-22 beside it. */
static void test_what_is_left(void **state)
{
    (void)state;
    enum { N = 64, K = 97 };
    for (lg_rows8 format = 0; format < LG_ROWS8_COUNT; format++) {
        float w[N * K], scale[N], value[256];
        uint8_t code[N * K];
        for (int i = 0; i < N * K; i++) w[i] = ldexpf(golden_element(i / K % 2, i % K), 40 - i / K);
        assert_int_equal(lg_rows8_encode(format, w, N, K, code, scale), -1);
        lg_rows8_values(format, value);
        for (int i = 0; i < N * K; i++) {
            const double s = (double)scale[i / K], x = (double)w[i];
            const double most =
                format == LG_ROWS8_FP8 ? fmax(fabs(x) * 0x1p-4, s * 0x1p-10) : s / 2;
            assert_true(fabs(s * (double)value[code[i]] - x) <= most + fabs(x) * 0x1p-22);
        }
    }
}

static void test_rows_without_codes(void **state)
{
    (void)state;
    for (lg_rows8 format = 0; format < LG_ROWS8_COUNT; format++) {
        /* too small for a scale, and just large enough */
        const float small[] = {9e-36f, -1e-40f, -0.0f, 1.1e-35f, -1.1e-35f, 0};
        uint8_t code[6] = {1, 1, 1};
        float scale[2] = {1, 1}, value[256];
        lg_rows8_values(format, value);
        assert_int_equal(lg_rows8_encode(format, small, 2, 3, code, scale), -1);
        assert_true(scale[0] == 0 && code[0] == 0 && code[1] == 0 && code[2] == 0);
        assert_true(scale[1] >= FLT_MIN && value[code[3]] > 100 && value[code[4]] < -100);
        const float bad[] = {NAN, INFINITY, -INFINITY};
        for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
            const float w[] = {1, 2, 3, bad[i], 5, 6};
            assert_int_equal(lg_rows8_encode(format, w, 3, 2, code, scale), 1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_what_is_left),
        cmocka_unit_test(test_rows_without_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
