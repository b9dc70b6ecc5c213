/* Exact sums: known totals, any order and any cut the same bits, carries, what is no number, what is refused. */
#include "base/check.h"
#include "base/exact_sum.h"
#include "base/philox.h"
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { TERMS = 4096 };

static double total_of(const double *x, int n, int step)
{
    struct lg_exact_sum s = {0};
    for (int i = 0; i < n; i++) lg_exact_sum_add(&s, x[i * step % n]);
    return lg_exact_sum_total(&s);
}

/* In plain double the small terms would be lost. */
static void test_known(void **state)
{
    const double x[] = {0x1p200, 1, 0x1p-298, 3, 0, 0x1p-298};
    struct lg_exact_sum s = {0};
    assert_true(lg_exact_sum_total(&s) == 0);
    for (size_t i = 1; i < LG_ARRAY_LEN(x); i++) lg_exact_sum_add(&s, x[i]);
    assert_true(lg_exact_sum_total(&s) == 4);
    for (int i = 0; i < 1 << 20; i++) lg_exact_sum_add(&s, 0x1p-40);
    assert_true(lg_exact_sum_total(&s) == 4 + 0x1p-20);
    lg_exact_sum_add(&s, 0x1p200);
    assert_true(lg_exact_sum_total(&s) == 0x1p200);
    struct lg_exact_sum tiny = {0};
    lg_exact_sum_add(&tiny, 0x1p-298);
    assert_true(lg_exact_sum_total(&tiny) == 0x1p-298);
}

/* Squares of all magnitudes, forwards, in another order, and in 7 parts. */
static void test_any_order(void **state)
{
    static double x[TERMS];
    struct lg_exact_sum part[7], all = {0};
    long double plain = 0;
    memset(part, 0, sizeof part);
    for (int i = 0; i < TERMS; i++) {
        lg_philox_out r = lg_philox(5, LG_PURPOSE_INIT, 1, (uint64_t)i);
        float v = (float)ldexp(lg_uniform_f64(r.v[0]), (int)(r.v[1] % 250) - 140);
        x[i] = (double)v * (double)v;
        plain += x[i];
        lg_exact_sum_add(&part[r.v[2] % 7], x[i]);
    }
    for (int i = 6; i >= 0; i--) lg_exact_sum_merge(&all, &part[i]);
    double total = total_of(x, TERMS, 1);
    assert_true(fabs(total - (double)plain) <= 1e-15 * total);
    assert_true(total == total_of(x, TERMS, 1789) && total == lg_exact_sum_total(&all));
    double forwards = 0, backwards = 0; /* what it is for */
    for (int i = 0; i < TERMS; i++) forwards += x[i], backwards += x[TERMS - 1 - i];
    assert_true(forwards != backwards);
}

/* To nearest even, wherever the bits lie, as the processor rounds what fits into two doubles. */
static void test_rounding(void **state)
{
    for (int i = 0; i < TERMS; i++) {
        lg_philox_out r = lg_philox(6, LG_PURPOSE_INIT, 2, (uint64_t)i);
        double a =
            ldexp((double)(((uint64_t)r.v[0] << 21 | r.v[1] >> 11) | (uint64_t)1 << 52), -100);
        double b = ldexp((double)(r.v[2] >> 8), -100 - (int)(r.v[3] % 40));
        if (i % 3 == 0) b = ldexp(1, -101); /* half a unit: a tie */
        for (int shift = 0; shift < 70; shift++) {
            struct lg_exact_sum s = {0};
            lg_exact_sum_add(&s, ldexp(a, shift));
            lg_exact_sum_add(&s, ldexp(b, shift));
            assert_true(lg_exact_sum_total(&s) == ldexp(a + b, shift));
        }
    }
}

/* A digit that is full after 2^32 of the largest terms has passed its carries on long before. */
static void test_carries(void **state)
{
    struct lg_exact_sum s = {.terms = (1 << 30) - 2}, double_s;
    for (int i = 0; i < 5; i++) s.digit[i] = (uint64_t)1 << 62;
    double before = lg_exact_sum_total(&s);
    for (int i = 0; i < 4; i++) lg_exact_sum_add(&s, 0x1p-250);
    assert_true(s.terms == 2 && s.digit[0] >> 32 == 0);
    assert_true(lg_exact_sum_total(&s) == before + 0x1p-248);
    double_s = s;
    for (int i = 0; i < 100; i++) lg_exact_sum_merge(&double_s, &s);
    assert_true(fabs(lg_exact_sum_total(&double_s) / lg_exact_sum_total(&s) - 101) < 1e-12);
}

static void test_no_number(void **state)
{
    struct lg_exact_sum s = {0}, t = {0};
    lg_exact_sum_add(&s, 1);
    lg_exact_sum_add(&t, INFINITY);
    assert_true(isnan(lg_exact_sum_total(&t)));
    lg_exact_sum_merge(&s, &t);
    assert_true(isnan(lg_exact_sum_total(&s)));
    t = (struct lg_exact_sum){0};
    lg_exact_sum_add(&t, NAN);
    assert_true(isnan(lg_exact_sum_total(&t)));
}

static bool aborts(double x)
{
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct lg_exact_sum s = {0};
        signal(SIGABRT, SIG_DFL);
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (null >= 0) dup2(null, STDERR_FILENO);
        lg_exact_sum_add(&s, x);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_refused(void **state)
{
    assert_false(aborts(0x1.fffffffffffffp287));
    assert_true(aborts(0x1p288));
    assert_true(aborts(-1));
    assert_true(aborts(0x1p-299));
    assert_true(aborts(0x1.8p-298));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known),     cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_rounding),  cmocka_unit_test(test_carries),
        cmocka_unit_test(test_no_number), cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
