/* What published models of DiT and PixArt vary in, and what they are trained and drawn with, against diffusers
 * (tests/golden/make_published.py, which says what is in the file): nets, noise schedules, weights, timesteps, samplers.
 *
 * Tolerances: nets as in test_denoiser_golden.c: ref64 1e-7 (positions are fp32 there and here), host 1e-5. diffusers'
 * schedulers step in fp32, 6e-8 of the state each, and a step multiplies what was before: 1e-5. */
#include "base/philox.h"
#include "stages/nets/sampler.h"
#include "stages/nets/sincos.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#define GOLDEN "tests/golden/published.safetensors"
enum { DIGEST = 4 };

static double *golden(const char *name, size_t count)
{
    return golden_read_of(GOLDEN, name, count);
}

/* ---- nets ---- */

static struct lg_denoiser_config small(lg_denoiser_kind kind, int height, int width)
{
    return (struct lg_denoiser_config){
        .kind = kind,
        .channels = 4,
        .height = height,
        .width = width,
        .patch = 2,
        .hidden = 24,
        .depth = 2,
        .heads = 2,
        .mlp_ratio = 4,
        .num_classes = kind == LG_DIT ? 5 : 0,
        .n_texts = kind != LG_DIT,
        .text = {{.length = kind == LG_DIT ? 0 : 6, .width = kind == LG_DIT ? 0 : 20}},
        .norm_eps = kind == LG_DIT ? 1e-5 : 1e-6};
}

static int check(const struct denoiser_fixture *f, const char *net, const char *what,
                 const void *data, size_t count, double tol)
{
    char name[200];
    double *v = malloc(count * sizeof *v), *with = malloc(count * sizeof *with), norm = 0;
    LG_ASSERT(v && with);
    snprintf(name, sizeof name, "%s.%s", net, what);
    double *want = golden(name, DIGEST);
    for (size_t i = 0; i < count; i++) {
        v[i] = denoiser_fixture_get(f, data, i);
        norm += v[i] * v[i];
    }
    double worst = fabs(sqrt(norm) - want[0]);
    for (int k = 0; k < DIGEST - 1; k++) {
        char digest[16];
        double product = 0;
        snprintf(digest, sizeof digest, "digest%d", k);
        golden_fill(digest, count, 1.0, with);
        for (size_t i = 0; i < count; i++) product += with[i] * v[i];
        worst = fmax(worst, fabs(product - want[1 + k]));
    }
    free(v);
    free(with);
    /* The gradient of to_k.bias is zero but for rounding. */
    const bool bad = !(worst <= tol * fmax(want[0], 0.3));
    if (bad) printf("  %s: %.3e apart, norm %.3e\n", name, worst, want[0]);
    free(want);
    return bad;
}

static void compare(const char *net, const char *device, const struct lg_denoiser_config *c,
                    double tol)
{
    struct denoiser_fixture f;
    int wrong = 0;
    denoiser_fixture_open(&f, device, NULL, c, true);
    const size_t size = lg_dtype_bytes(f.type);
    denoiser_fixture_forward(&f);
    wrong += check(&f, net, "out", f.out.data, (size_t)lg_numel(&f.out), tol);
    denoiser_fixture_backward(&f, false);
    for (int i = 0; i < f.params.n; i++) {
        const struct lg_param *p = &f.params.p[i];
        char what[160];
        snprintf(what, sizeof what, "grad.%s", p->name);
        wrong += check(&f, net, what, (char *)f.grads + p->offset * size, p->count, tol);
    }
    denoiser_fixture_close(&f);
    assert_int_equal(wrong, 0);
}

static struct lg_denoiser_config with_size(void)
{
    struct lg_denoiser_config c = small(LG_PIXART, 10, 6);
    c.sample_size = 10, c.learned_variance = c.size_conditions = true, c.interpolation = 0.5;
    return c;
}

static void nets(const char *device, double tol)
{
    struct lg_denoiser_config c = small(LG_DIT, 10, 10);
    c.sample_size = 6, c.learned_variance = true;
    compare("dit.variance", device, &c, tol);
    c = small(LG_DIT, 6, 6);
    c.sample_size = 14, c.no_attention_bias = true, c.norm_eps = 1e-6;
    compare("dit.no_bias", device, &c, tol);
    c = with_size();
    compare("pixart.size", device, &c, tol);
    c = small(LG_PIXART, 14, 10);
    c.sample_size = 6, c.interpolation = 2, c.no_attention_bias = true;
    compare("pixart.scale", device, &c, tol);
    c = small(LG_PIXART, 6, 10);
    c.sample_size = 128, c.learned_variance = true;
    compare("pixart.default", device, &c, tol);
}

static void nets_on_ref64(void **state)
{
    nets("ref64", 1e-7);
}

static void nets_on_host(void **state)
{
    nets("host", 1e-5);
}

/* ---- noise ---- */

static void near(const char *what, double got, double want, double tol)
{
    if (!(fabs(got - want) <= tol * fmax(1.0, fabs(want))))
        fail_msg("%s: %.17g != %.17g", what, got, want);
}

static const struct lg_betas SCALED = {.first = 0.00085, .last = 0.012, .scaled_linear = true};

static void noise_schedules(void **state)
{
    struct lg_betas zero = SCALED;
    zero.zero_snr = true;
    double *scaled = golden("alpha_bar.scaled", 1000), *none = golden("alpha_bar.zero_snr", 1000);
    for (int t = 0; t < 1000; t++) {
        near("scaled_linear", lg_alpha_bar(&SCALED, t), scaled[t], 1e-12);
        near("zero_snr", lg_alpha_bar(&zero, t), none[t], 1e-12);
    }
    assert_true(lg_alpha_bar(&zero, 999) == 0);
    free(scaled);
    free(none);
}

/* fp32 there. */
static void weightings(void **state)
{
    double *root = golden("weighting.sigma_sqrt", 50), *cosine = golden("weighting.cosmap", 50);
    struct lg_objective o = {.kind = LG_OBJECTIVE_FLOW, .weighting = LG_WEIGHTING_SIGMA_SQRT};
    for (int i = 0; i < 50; i++) {
        struct lg_objective_sample s;
        o.weighting = LG_WEIGHTING_SIGMA_SQRT;
        lg_objective_at(&o, 0.01 + 0.02 * i, &s);
        near("sigma_sqrt", s.weight, root[i], 1e-6);
        o.weighting = LG_WEIGHTING_COSMAP;
        lg_objective_at(&o, 0.01 + 0.02 * i, &s);
        near("cosmap", s.weight, cosine[i], 1e-6);
    }
    free(root);
    free(cosine);
}

/* Of the same random numbers; shifted as the scheduler's list of noise levels is. */
static void timesteps(void **state)
{
    double *mode = golden("timesteps.mode", 64), *logit = golden("timesteps.logit_normal", 64);
    double *shifted = golden("flow_shift", 1000);
    struct lg_objective m = {.kind = LG_OBJECTIVE_FLOW, .timesteps = LG_TIMESTEPS_MODE};
    struct lg_objective l = {.kind = LG_OBJECTIVE_FLOW,
                             .timesteps = LG_TIMESTEPS_LOGIT_NORMAL,
                             .timesteps_mean = 0.7,
                             .timesteps_std = 1.5};
    struct lg_objective by3 = m, eps = m;
    by3.flow_shift = 3;
    eps.kind = LG_OBJECTIVE_EPS;
    for (uint64_t n = 0; n < 64; n++) {
        struct lg_objective_sample s;
        lg_objective_draw(&m, 5, n, &s);
        near("mode", s.t, 1000 * mode[n], 1e-12);
        lg_objective_draw(&l, 5, n, &s);
        near("logit_normal", s.t, 1000 * logit[n], 1e-12);
        lg_objective_draw(&by3, 5, n, &s);
        near("shifted", s.t, 1000 * lg_flow_shift(&by3, mode[n]), 1e-12);
        near("x_t", s.coef[1], s.t / 1000, 1e-12);
        lg_objective_draw(&eps, 5, n, &s);
        assert_true(s.t == floor(1000 * mode[n]));
    }
    for (int i = 0; i < 1000; i++) /* fp32 there */
        near("flow_shift", lg_flow_shift(&by3, (1000.0 - i) / 1000), shifted[i], 1e-6);
    free(mode);
    free(logit);
    free(shifted);
}

static void refused(struct lg_objective o, const char *word)
{
    assert_int_equal(lg_objective_check(&o), LG_ERR_CONFIG);
    if (!strstr(lg_err_message(), word)) fail_msg("\"%s\" lacks %s", lg_err_message(), word);
    lg_err_clear();
}

static void refusals(void **state)
{
    refused((struct lg_objective){.kind = LG_OBJECTIVE_V, .flow_shift = 3}, "flow_shift");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_V, .shift_by = LG_FLOW_SHIFT_TOKENS},
            "flow_shift_by");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_FLOW,
                                  .shift_by = LG_FLOW_SHIFT_TOKENS,
                                  .flow_shift = 3},
            "flow_shift_by");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_EPS, .weighting = LG_WEIGHTING_COSMAP},
            "loss_weighting");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_EPS, .betas.zero_snr = true}, "zero_snr");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_V, .clean_first_frame = 0.1},
            "clean_first_frame");
    refused((struct lg_objective){.kind = LG_OBJECTIVE_FLOW,
                                  .has_variance = true,
                                  .variance_weight = 1},
            "variance");
    const struct lg_objective untrained = {.kind = LG_OBJECTIVE_FLOW, .has_variance = true};
    assert_int_equal(lg_objective_check(&untrained), 0);
    const struct lg_sampler_method dpm = {.sampler = LG_SAMPLER_DPM,
                                          .objective = LG_OBJECTIVE_FLOW};
    assert_int_equal(lg_sampler_method_check(&dpm), LG_ERR_CONFIG);
    lg_err_clear();
}

/* ---- samplers ---- */

static void trajectory(const char *name, const struct lg_sampler_method *m, int steps, bool times)
{
    double x[16], p[2][16], *want = golden(name, 16), *t = NULL;
    char of_times[80];
    snprintf(of_times, sizeof of_times, "%s.t", name);
    if (times) t = golden(of_times, (size_t)steps);
    golden_fill("toy", 16, 1.0, x);
    for (int i = 0; i < steps; i++) {
        const struct lg_sampler_step s = lg_sampler_step_at(m, steps, i);
        double *now = p[i & 1], *before = p[~i & 1];
        if (t) near(of_times, s.t, t[i], 1e-6);
        for (int e = 0; e < 16; e++) {
            const double y = 0.6 * x[e] + 0.3 * cos(s.t / 100.0);
            now[e] = s.px * x[e] + s.pm * y;
            if (!s.multistep)
                x[e] = s.cx * x[e] + s.cm * y;
            else
                x[e] = s.cx * x[e] + s.c[0] * now[e] + (s.c[1] != 0 ? s.c[1] * before[e] : 0);
        }
    }
    for (int e = 0; e < 16; e++) near(name, x[e], want[e], 1e-5);
    free(want);
    free(t);
}

static void samplers(void **state)
{
    static const int steps[] = {1, 2, 3, 10, 25};
    static const char *const spacing[] = {"auto", "trailing", "linspace"};
    char name[64];
    for (int s = LG_SPACING_TRAILING; s <= LG_SPACING_LINSPACE; s++)
        for (size_t i = 0; i < LG_ARRAY_LEN(steps); i++) {
            for (int kind = LG_OBJECTIVE_EPS; kind <= LG_OBJECTIVE_V; kind++) {
                const struct lg_sampler_method m = {.sampler = LG_SAMPLER_DPM,
                                                    .spacing = (lg_spacing_kind)s,
                                                    .objective = (lg_objective_kind)kind};
                snprintf(name, sizeof name, "dpm.%s.%s.%d", lg_objective_name(m.objective),
                         spacing[s], steps[i]);
                trajectory(name, &m, steps[i], true);
            }
            const struct lg_sampler_method flow = {
                .spacing = (lg_spacing_kind)s, .objective = LG_OBJECTIVE_FLOW, .flow_shift = 3};
            snprintf(name, sizeof name, "flow.%s.%d", spacing[s], steps[i]);
            trajectory(name, &flow, steps[i], true);
        }
    static const int tokens[] = {24, 256, 1000, 4096};
    for (size_t i = 0; i < LG_ARRAY_LEN(tokens); i++) {
        const struct lg_objective by = {.kind = LG_OBJECTIVE_FLOW,
                                        .shift_by = LG_FLOW_SHIFT_TOKENS};
        const struct lg_sampler_method flow = {.objective = LG_OBJECTIVE_FLOW,
                                               .flow_shift =
                                                   lg_objective_of_size(&by, tokens[i]).flow_shift};
        snprintf(name, sizeof name, "flow.tokens.%d", tokens[i]);
        trajectory(name, &flow, 10, true);
    }
    static const int of_ltx[] = {384, 1024, 2496};
    for (size_t i = 0; i < LG_ARRAY_LEN(of_ltx); i++) {
        const struct lg_objective by = {.kind = LG_OBJECTIVE_FLOW,
                                        .shift_by = LG_FLOW_SHIFT_TOKENS_LTX};
        const struct lg_sampler_method flow = {.objective = LG_OBJECTIVE_FLOW,
                                               .flow_end = 0.1,
                                               .flow_shift =
                                                   lg_objective_of_size(&by, of_ltx[i]).flow_shift};
        snprintf(name, sizeof name, "flow.ltx.%d", of_ltx[i]);
        trajectory(name, &flow, 10, true);
    }
    struct lg_sampler_method zero = {.sampler = LG_SAMPLER_DPM,
                                     .spacing = LG_SPACING_TRAILING,
                                     .objective = LG_OBJECTIVE_V,
                                     .betas = SCALED};
    zero.betas.zero_snr = true;
    trajectory("dpm.v.zero_snr", &zero, 10, false);
}

/* A net with a variance, which the sampler leaves out, and with conditions of a size; guided. */
static void drawn(const char *device, double tol)
{
    static int32_t length[] = {6, 1};
    static const double size[] = {1024, 768, 1024, 768}, ratio[] = {1.3125, 1.3125};
    const struct lg_denoiser_config c = with_size();
    const size_t each = (size_t)(c.channels * c.height * c.width);
    struct denoiser_fixture f;
    lg_sampler *s;
    void *memory;
    denoiser_fixture_open(&f, device, NULL, &c, false);
    const size_t bytes = lg_dtype_bytes(f.type);
    assert_int_equal(lg_sampler_open(f.device, &(struct lg_sampler_spec){&c, 1, true, false}, &s),
                     0);
    assert_int_equal(lg_device_alloc(f.device, (each + 6) * bytes, &memory), 0);
    lg_tensor out = lg_t4(memory, f.type, 1, c.channels, c.height, c.width);
    lg_tensor at = lg_t2((char *)memory + each * bytes, f.type, 2, 2);
    lg_tensor of = lg_t1((char *)at.data + 4 * bytes, f.type, 2);
    for (size_t i = 0; i < 4; i++) denoiser_fixture_set(&f, at.data, i, size[i]);
    for (size_t i = 0; i < 2; i++) denoiser_fixture_set(&f, of.data, i, ratio[i]);
    struct lg_sampler_run run = {
        .method = {.sampler = LG_SAMPLER_DPM, .objective = LG_OBJECTIVE_EPS},
        .steps = 8,
        .guidance = 4.5,
        .seed = 7,
        .first = 40,
        .weights = f.weights,
        .text = {{.states = lg_slice(f.in.text[0].states, 0, 0, 2),
                  .length = lg_t1(length, LG_I32, 2)}},
        .size = at,
        .ratio = of};
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, out), 0);
    double *want = golden("dpm.net", each);
    struct distance d = denoiser_fixture_distance(&f, memory, want, each);
    if (!(d.diff <= tol * d.norm)) fail_msg("on %s: distance %.3e of %.3e", device, d.diff, d.norm);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

/* FLUX is told the guidance; the shift is that of its 24 tokens. */
static void drawn_by_flux(const char *device, double tol)
{
    const struct lg_denoiser_config c = denoiser_fixture_flux();
    const size_t each = (size_t)(c.channels * c.height * c.width);
    struct denoiser_fixture f;
    lg_sampler *s;
    void *memory;
    denoiser_fixture_open(&f, device, NULL, &c, false);
    assert_int_equal(lg_sampler_open(f.device, &(struct lg_sampler_spec){&c, 1, false, false}, &s),
                     0);
    assert_int_equal(lg_device_alloc(f.device, each * lg_dtype_bytes(f.type), &memory), 0);
    struct lg_sampler_run run = {
        .method = {.objective = LG_OBJECTIVE_FLOW, .shift_by = LG_FLOW_SHIFT_TOKENS},
        .steps = 6,
        .guidance = 3.5,
        .seed = 7,
        .first = 40,
        .weights = f.weights,
        .text = {{.pooled = lg_slice(f.in.text[0].pooled, 0, 0, 1)},
                 {.states = lg_slice(f.in.text[1].states, 0, 0, 1)}}};
    lg_tensor out = lg_t4(memory, f.type, 1, c.channels, c.height, c.width);
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, out), 0);
    double *want = golden("flux.drawn", each);
    struct distance d = denoiser_fixture_distance(&f, memory, want, each);
    if (!(d.diff <= tol * d.norm)) fail_msg("on %s: distance %.3e of %.3e", device, d.diff, d.norm);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

/* SD3 is guided by a second pass of another caption. */
static void drawn_by_sd3(const char *device, double tol)
{
    const struct lg_denoiser_config c = denoiser_fixture_sd3();
    const size_t each = (size_t)(c.channels * c.height * c.width);
    struct denoiser_fixture f;
    lg_sampler *s;
    void *memory;
    denoiser_fixture_open(&f, device, NULL, &c, false);
    assert_int_equal(lg_sampler_open(f.device, &(struct lg_sampler_spec){&c, 1, true, false}, &s),
                     0);
    assert_int_equal(lg_device_alloc(f.device, each * lg_dtype_bytes(f.type), &memory), 0);
    struct lg_sampler_run run = {
        .method = {.objective = LG_OBJECTIVE_FLOW, .spacing = LG_SPACING_LINSPACE, .flow_shift = 3},
        .steps = 6,
        .guidance = 7,
        .seed = 7,
        .first = 40,
        .weights = f.weights};
    for (int k = 0; k < c.n_texts; k++) {
        run.text[k].states = lg_slice(f.in.text[k].states, 0, 0, 2);
        if (c.text[k].pooled) run.text[k].pooled = lg_slice(f.in.text[k].pooled, 0, 0, 2);
    }
    lg_tensor out = lg_t4(memory, f.type, 1, c.channels, c.height, c.width);
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, out), 0);
    double *want = golden("sd3.drawn", each);
    struct distance d = denoiser_fixture_distance(&f, memory, want, each);
    if (!(d.diff <= tol * d.norm)) fail_msg("on %s: distance %.3e of %.3e", device, d.diff, d.norm);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

/* ---- positions ---- */

/* Both are sines and cosines in double, rounded once to fp32: half a unit of what is below 1, twice. */
#define POSITION_TOLERANCE 6e-8

static void check_position(const char *name, size_t i, double got, double want)
{
    if (!(fabs(got - want) <= POSITION_TOLERANCE))
        fail_msg("%s[%zu]: %.9g, not %.9g", name, i, got, want);
}

static void positions_of(int side, double base, double scale)
{
    enum { D = 16 };
    const struct lg_grid grid = {side, side, base, scale};
    const size_t n = (size_t)(side * side * D);
    char name[32];
    float *all = malloc(n * sizeof *all);
    LG_ASSERT(all);
    snprintf(name, sizeof name, "positions.%d", side);
    double *want = golden(name, n);
    lg_net_positions(&grid, D, all);
    for (size_t i = 0; i < n; i++) {
        check_position(name, i, (double)all[i], want[i]);
        assert_true(all[i] == lg_sincos(&grid, D, i));
    }
    free(all);
    free(want);
}

/* The table of a new SD3, all of which is made, the middle of which is used. */
static void positions(void **state)
{
    const struct lg_denoiser_config c = denoiser_fixture_sd3();
    lg_params t;
    positions_of(9, 4, 1);
    positions_of(12, 16, 2);
    positions_of(5, 7, 0.5);
    assert_int_equal(lg_denoiser_params(&c, &t), 0);
    const int at = lg_params_find(&t, "pos_embed.pos_embed");
    assert_true(at >= 0);
    const struct lg_param *p = &t.p[at];
    double *want = golden("positions.sd3", p->count);
    float *table = malloc(p->count * sizeof *table);
    LG_ASSERT(table);
    lg_params_init(&t, 7, table, p->offset, p->count);
    for (size_t i = 0; i < p->count; i++)
        check_position("positions.sd3", i, (double)table[i], want[i]);
    free(table);
    free(want);
    lg_params_free(&t);
}

static void draws(void **state)
{
    drawn_by_sd3("ref64", 1e-5);
    drawn_by_sd3("host", 1e-4);
    drawn_by_flux("ref64", 1e-5);
    drawn_by_flux("host", 1e-4);
    drawn("ref64", 1e-5);
    drawn("host", 1e-4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(positions),    cmocka_unit_test(nets_on_ref64),
        cmocka_unit_test(nets_on_host), cmocka_unit_test(noise_schedules),
        cmocka_unit_test(weightings),   cmocka_unit_test(timesteps),
        cmocka_unit_test(refusals),     cmocka_unit_test(samplers),
        cmocka_unit_test(draws),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
