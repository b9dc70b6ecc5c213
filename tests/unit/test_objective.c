/* Objectives and learning-rate schedules against PyTorch and diffusers, and what the draws look
 * like. */
#include "stages/nets/objective.h"
#include "stages/nets/schedule.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

/* fp64 against fp64: the running product of a thousand factors. */
static const double TOL = 1e-12;

static void near(double got, double want)
{
    if (!(fabs(got - want) <= TOL * fmax(1.0, fabs(want)))) fail_msg("%.17g != %.17g", got, want);
}

static void test_alpha_bar(void **state)
{
    const struct lg_betas ddpm = {0};
    double *want = golden_read("objective.alpha_bar", 1000);
    for (int t = 0; t < 1000; t++) near(lg_alpha_bar(&ddpm, t), want[t]);
    assert_true(lg_alpha_bar(&ddpm, -1) == 1.0);
    free(want);
}

static void test_noising(void **state)
{
    struct lg_objective eps = {.kind = LG_OBJECTIVE_EPS}, v = {.kind = LG_OBJECTIVE_V};
    double x0[1000], e[1000], *x_t = golden_read("objective.x_t", 1000);
    double *velocity = golden_read("objective.v", 1000);
    golden_fill("x0", 1000, 1.0, x0);
    golden_fill("e", 1000, 1.0, e);
    for (int t = 0; t < 1000; t++) {
        struct lg_objective_sample a, b;
        lg_objective_at(&eps, t, &a);
        lg_objective_at(&v, t, &b);
        near(a.coef[0] * x0[t] + a.coef[1] * e[t], x_t[t]);
        near(b.coef[0] * x0[t] + b.coef[1] * e[t], x_t[t]);
        near(a.coef[2] * x0[t] + a.coef[3] * e[t], e[t]);
        near(b.coef[2] * x0[t] + b.coef[3] * e[t], velocity[t]);
        assert_true(a.t == t && a.weight == 1.0);
    }
    free(x_t);
    free(velocity);
}

static void test_flow(void **state)
{
    struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW};
    struct lg_objective_sample s;
    lg_objective_at(&flow, 0.25, &s);
    assert_true(s.t == 250.0 && s.weight == 1.0);
    assert_true(s.coef[0] == 0.75 && s.coef[1] == 0.25 && s.coef[2] == -1.0 && s.coef[3] == 1.0);
}

static void test_min_snr(void **state)
{
    double *eps = golden_read("objective.min_snr.eps", 1000);
    double *v = golden_read("objective.min_snr.v", 1000);
    for (int t = 0; t < 1000; t++) {
        struct lg_objective_sample s;
        lg_objective_at(&(struct lg_objective){.kind = LG_OBJECTIVE_EPS, .min_snr_gamma = 5}, t,
                        &s);
        near(s.weight, eps[t]);
        lg_objective_at(&(struct lg_objective){.kind = LG_OBJECTIVE_V, .min_snr_gamma = 5}, t, &s);
        near(s.weight, v[t]);
    }
    free(eps);
    free(v);
}

static void test_checks(void **state)
{
    struct lg_objective o = {.kind = LG_OBJECTIVE_FLOW, .min_snr_gamma = 5};
    assert_int_equal(lg_objective_check(&o), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "flow"));
    o.min_snr_gamma = 0;
    assert_int_equal(lg_objective_check(&o), 0);
    o = (struct lg_objective){.kind = LG_OBJECTIVE_V, .min_snr_gamma = -1};
    assert_int_equal(lg_objective_check(&o), LG_ERR_CONFIG);
    lg_objective_kind k;
    assert_int_equal(lg_objective_parse("v", &k), 0);
    assert_int_equal(k, LG_OBJECTIVE_V);
    assert_string_equal(lg_objective_name(LG_OBJECTIVE_FLOW), "flow");
    assert_int_equal(lg_objective_parse("x0", &k), LG_ERR_CONFIG);
    lg_err_clear();
}

/* Share of 20000 draws with t (of 1000) below `limit`; whole numbers in 0..999 for eps. */
static double share_below(const struct lg_objective *o, double limit)
{
    int below = 0;
    for (uint64_t n = 0; n < 20000; n++) {
        struct lg_objective_sample s;
        lg_objective_draw(o, 3, n, &s);
        below += s.t < limit;
        assert_true(s.t >= 0 && s.t < 1000);
        if (o->kind != LG_OBJECTIVE_FLOW) assert_true(s.t == floor(s.t) && s.t <= 999);
    }
    return below / 20000.0;
}

static void test_draws(void **state)
{
    /* Five standard deviations of a share are at most 0.018. P(sigmoid(z) < 0.25) = P(z < -ln
     * 3). */
    for (int kind = LG_OBJECTIVE_EPS; kind <= LG_OBJECTIVE_FLOW; kind++) {
        struct lg_objective u = {.kind = (lg_objective_kind)kind};
        struct lg_objective l = {.kind = (lg_objective_kind)kind,
                                 .timesteps = LG_TIMESTEPS_LOGIT_NORMAL};
        assert_true(fabs(share_below(&u, 250) - 0.25) <= 0.018);
        assert_true(fabs(share_below(&l, 500) - 0.5) <= 0.018);
        assert_true(fabs(share_below(&l, 250) - 0.5 * erfc(log(3.0) / sqrt(2.0))) <= 0.018);
    }
    struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW};
    struct lg_objective_sample a, b, c;
    lg_objective_draw(&flow, 3, 17, &a);
    lg_objective_draw(&flow, 3, 17, &b);
    lg_objective_draw(&flow, 4, 17, &c);
    assert_true(a.t == b.t && a.t != c.t);
}

/* A tenth of the clips, whatever their timestep, which is the one that it would be without. */
static void test_clean_first_frames(void **state)
{
    const struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW},
                              tenth = {.kind = LG_OBJECTIVE_FLOW, .clean_first_frame = 0.1};
    int clean[2] = {0}, all[2] = {0};
    for (uint64_t n = 0; n < 20000; n++) {
        struct lg_objective_sample s, without;
        lg_objective_draw(&tenth, 3, n, &s);
        lg_objective_draw(&flow, 3, n, &without);
        assert_true(s.t == without.t && !without.first_is_clean);
        all[s.t < 500]++;
        clean[s.t < 500] += s.first_is_clean;
    }
    /* Five standard deviations of a share of 10,000. */
    for (int i = 0; i < 2; i++) assert_true(fabs((double)clean[i] / all[i] - 0.1) <= 0.015);
}

static void test_schedules(void **state)
{
    static const char *const names[] = {"constant", "cosine", "linear"};
    for (int kind = LG_SCHEDULE_CONSTANT; kind <= LG_SCHEDULE_LINEAR; kind++) {
        struct lg_schedule s = {.kind = (lg_schedule_kind)kind,
                                .peak = 0.01,
                                .warmup_steps = 10,
                                .steps = 50,
                                .final_ratio = 0.1};
        char name[64];
        snprintf(name, sizeof name, "schedule.%s", names[kind]);
        double *want = golden_read(name, 50);
        for (int i = 0; i < 50; i++) near(lg_schedule_rate(&s, i), want[i]);
        free(want);
        double end = kind == LG_SCHEDULE_CONSTANT ? 0.01 : 0.001;
        near(lg_schedule_rate(&s, 50), end);
        near(lg_schedule_rate(&s, 1000000), end);
    }
    struct lg_schedule none = {.kind = LG_SCHEDULE_COSINE, .peak = 2};
    assert_true(lg_schedule_rate(&none, 0) == 0); /* a schedule of no steps is over */
    none = (struct lg_schedule){.kind = LG_SCHEDULE_LINEAR, .peak = 2, .steps = 4};
    assert_true(lg_schedule_rate(&none, 0) == 2 && lg_schedule_rate(&none, 1) == 1.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alpha_bar),
        cmocka_unit_test(test_noising),
        cmocka_unit_test(test_flow),
        cmocka_unit_test(test_min_snr),
        cmocka_unit_test(test_checks),
        cmocka_unit_test(test_draws),
        cmocka_unit_test(test_clean_first_frames),
        cmocka_unit_test(test_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
