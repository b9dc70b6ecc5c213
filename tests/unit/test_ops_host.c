/* The host backend against the reference, and the promises about bits: the same arguments give the
 * same bits, and a sample's outputs depend neither on its neighbours nor on its slot. Every case of
 * op_cases.def for every instruction set the machine has; the encoders' own shapes for the best.
 *
 * Tolerance: 1e-5 in relative 2-norm per tensor. fp32 rounds to 6e-8; a sum of n terms in any order
 * stays within sqrt(n) of that on random data, and the longest here has 1024 terms (2e-6). */
#include "base/check.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "tests/unit/isas.h"
#include "tests/unit/op_cases.h"
#include "tests/unit/seeds.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define TOLERANCE 1e-5
enum { FAILURES_SHOWN_MAX = 20 };

static lg_device *open_device(const char *name, const char *isa, int threads)
{
    lg_device *d = NULL;
    if (lg_device_open(name, &(struct lg_device_options){.isa = isa, .threads = threads}, &d) < 0) {
        printf("  cannot open %s: %s\n", name, lg_err_text());
        fflush(stdout);
        _exit(2);
    }
    return d;
}

static void every_operation_has_a_case(void **state)
{
#define LG_OP(name, ...)                                                                           \
    {                                                                                              \
        int n = 0;                                                                                 \
        for (int i = 0; i < op_case_count(); i++) n += !strcmp(op_case_op(i), #name);              \
        if (n == 0) fail_msg("no case for " #name);                                                \
    }
#include "kernels/ops.def"
#undef LG_OP
}

/* ||got - want|| / ||want||; infinities must agree in place and sign. */
static double relative_error(const struct op_output *got, const struct op_output *want)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < want->count; i++) {
        if (isinf(want->v[i]) && got->v[i] == want->v[i]) continue;
        difference += (got->v[i] - want->v[i]) * (got->v[i] - want->v[i]);
        norm += want->v[i] * want->v[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static bool same_bits(const double *a, const double *b, int64_t n)
{
    return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

static int complain(int i, const char *isa, const char *what, const char *output, double error)
{
    printf("  %s(%s) on %s: %s %s", op_case_op(i), op_case_shape(i), isa, output, what);
    if (error >= 0 || isnan(error)) printf(" (%.3g)", error);
    printf("\n");
    return 1;
}

/* Output o, if it is to be a twin. */
static bool is_twin(const struct op_result *r, int o)
{
    return !r->out[o].twin || same_bits(r->out[o].v, r->out[o - 1].v, r->out[o].count);
}

static int compare(int i, const char *isa, const struct op_result *got,
                   const struct op_result *want)
{
    int failures = 0;
    if (got->wrote_outside) failures += complain(i, isa, "wrote outside its outputs", "", -1);
    for (int o = 0; o < want->n_out; o++) {
        double error = relative_error(&got->out[o], &want->out[o]);
        if (!(error <= (want->out[o].exact ? 0 : TOLERANCE)))
            failures += complain(i, isa, "differs from ref64", want->out[o].name, error);
        if (!is_twin(got, o))
            failures += complain(i, isa, "has bits of its own", got->out[o].name, -1);
        if (!is_twin(want, o))
            failures += complain(i, "ref64", "has bits of its own", got->out[o].name, -1);
    }
    return failures;
}

/* Of every case, computed once for all instruction sets, each of which is a child's. */
static struct op_result *g_want;

static int check_against_ref64(const char *isa)
{
    int failures = 0;
    lg_device *host = open_device("host", isa, 1);
    if (strcmp(lg_device_isa(host), isa)) failures += complain(0, isa, "is not the isa", "", -1);
    for (int i = 0; i < op_case_count() && failures < FAILURES_SHOWN_MAX; i++) {
        struct op_result got;
        op_case_run(i, host, NULL, &got);
        failures += compare(i, isa, &got, &g_want[i]);
        op_result_free(&got);
    }
    lg_device_close(&host);
    return failures;
}

static void agrees_with_ref64(void **state)
{
    lg_device *ref = open_device("ref64", NULL, 1);
    g_want = calloc((size_t)op_case_count(), sizeof *g_want);
    assert_non_null(g_want);
    for (int i = 0; i < op_case_count(); i++) op_case_run(i, ref, NULL, &g_want[i]);
    lg_device_close(&ref);
    for_each_isa(check_against_ref64);
    for (int i = 0; i < op_case_count(); i++) op_result_free(&g_want[i]);
    free(g_want);
}

/* Twice, each time on a device opened anew, with one thread or two as the slots below. */
static int check_repeat(const char *isa)
{
    int failures = 0;
    for (int i = 0; i < 2 * op_case_count(); i++) {
        if (!checks_everything() && i % 2 == i / 2 % 2) continue;
        struct op_result r[2];
        for (int k = 0; k < 2; k++) {
            lg_device *host = open_device("host", isa, 1 + i % 2);
            op_case_run(i / 2, host, NULL, &r[k]);
            lg_device_close(&host);
        }
        for (int o = 0; o < r[0].n_out; o++)
            if (!same_bits(r[0].out[o].v, r[1].out[o].v, r[0].out[o].count))
                failures += complain(i / 2, isa, "has other bits now", r[0].out[o].name, -1);
        for (int k = 0; k < 2; k++) op_result_free(&r[k]);
    }
    return failures;
}

static void same_arguments_same_bits(void **state)
{
    for_each_isa(check_repeat);
}

/* Case i at other addresses: the samples of one parity are moved one slot on, and strangers put into the others'
 * places. */
static int check_moved(int i, lg_device *host, int parity, const struct op_result *before)
{
    const char *isa = lg_device_isa(host);
    uint64_t ids[OP_BATCH_MAX] = {0};
    struct op_result after;
    int failures = 0;
    int64_t B = before->batch;
    for (int64_t b = 0; b < B; b++) ids[(b + 1) % B] = (uint64_t)(b % 2 == parity ? b : 1000 + b);
    op_case_run(i, host, &(struct op_variant){.ids = ids, .misaligned = true}, &after);
    for (int o = 0; o < before->n_out; o++) {
        if (!before->out[o].per_sample) continue;
        int64_t each = before->out[o].count / B;
        for (int64_t b = parity; b < B; b += 2) {
            const double *was = before->out[o].v + b * each;
            const double *is = after.out[o].v + (b + 1) % B * each;
            if (same_bits(was, is, each)) continue;
            failures += complain(i, isa, "depends on neighbours or slot", before->out[o].name, -1);
            break;
        }
    }
    op_result_free(&after);
    return failures;
}

/* Against samples 0, 1, 2 ... in order. */
static int check_slots(int i, lg_device *host)
{
    struct op_result before;
    int failures = 0;
    op_case_run(i, host, NULL, &before);
    for (int parity = 0; parity < 2; parity++) failures += check_moved(i, host, parity, &before);
    op_result_free(&before);
    return failures;
}

/* With one thread or two, the cases in turn; `make check-all`: with both. */
static int check_all_slots(const char *isa)
{
    int failures = 0;
    for (int threads = 1; threads <= 2; threads++) {
        lg_device *host = open_device("host", isa, threads);
        for (int i = 0; i < op_case_count(); i++)
            if (checks_everything() || i % 2 == threads - 1) failures += check_slots(i, host);
        lg_device_close(&host);
    }
    return failures;
}

/* The large shapes, with the instruction set that a plan would choose. */
static void encoders_samples_do_not_see_each_other(void **state)
{
    int failures = 0;
    lg_device *host = open_device("host", NULL, 1);
    for (int i = op_case_count(); i < op_case_count_all(); i++) failures += check_slots(i, host);
    lg_device_close(&host);
    assert_int_equal(failures, 0);
}

static void samples_do_not_see_each_other(void **state)
{
    for_each_isa(check_all_slots);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_has_a_case),
        cmocka_unit_test(agrees_with_ref64),
        cmocka_unit_test(same_arguments_same_bits),
        cmocka_unit_test(samples_do_not_see_each_other),
        cmocka_unit_test(encoders_samples_do_not_see_each_other), /* after the last fork */
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
