/* Samplers against diffusers' DDIMScheduler (trailing) and FlowMatchEulerDiscreteScheduler: with
 * a toy model, and whole guided trajectories of the nets from Philox noise, on ref64 and host. */
#include "stages/nets/sampler.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static void toy(lg_objective_kind kind, int steps)
{
    double x[16];
    char name[64];
    snprintf(name, sizeof name, "sampler.toy.%s.%d", lg_objective_name(kind), steps);
    double *want = golden_read(name, 16);
    golden_fill("toy", 16, 1.0, x);
    for (int i = 0; i < steps; i++) {
        struct lg_sampler_step s =
            lg_sampler_step_at(&(struct lg_sampler_method){.objective = kind}, steps, i);
        for (int e = 0; e < 16; e++)
            x[e] = s.cx * x[e] + s.cm * (0.6 * x[e] + 0.3 * cos(s.t / 100.0));
    }
    for (int e = 0; e < 16; e++)
        if (!(fabs(x[e] - want[e]) <= 1e-11 * fmax(1, fabs(want[e]))))
            fail_msg("%s[%d]: %.15g, not %.15g", name, e, x[e], want[e]);
    free(want);
}

static void test_toy(void **state)
{
    for (int kind = LG_OBJECTIVE_EPS; kind <= LG_OBJECTIVE_FLOW; kind++) {
        toy((lg_objective_kind)kind, 10);
        toy((lg_objective_kind)kind, 25);
    }
}

/* Every spacing ends at no noise and never repeats a timestep, also when 1000 / steps is no
 * integer. */
static void test_spacings(void **state)
{
    const struct lg_sampler_method eps = {.objective = LG_OBJECTIVE_EPS};
    const struct lg_sampler_method flow = {.objective = LG_OBJECTIVE_FLOW};
    for (int steps = 1; steps <= 60; steps++) {
        double last = 1000;
        for (int i = 0; i < steps; i++) {
            struct lg_sampler_step s = lg_sampler_step_at(&eps, steps, i);
            assert_true(s.t < last && s.t >= 0 && (i > 0 || s.t == 999));
            last = s.t;
        }
        double t = 1000;
        for (int i = 0; i < steps; i++) t += 1000 * lg_sampler_step_at(&flow, steps, i).cm;
        assert_true(fabs(t) <= 1e-9);
    }
}

/* As many steps as there are timesteps: no coefficient is a quotient by 0. */
static void test_many_steps(void **state)
{
    static const int steps[] = {1, 2, 334, 999, 1000};
    for (int k = 0; k < 16 * (int)LG_ARRAY_LEN(steps); k++) {
        const int n = steps[k / 16];
        const struct lg_sampler_method m = {.sampler = k & 1 ? LG_SAMPLER_DPM : LG_SAMPLER_DDIM,
                                            .spacing =
                                                k & 2 ? LG_SPACING_LINSPACE : LG_SPACING_TRAILING,
                                            .objective = k & 4 ? LG_OBJECTIVE_V : LG_OBJECTIVE_EPS,
                                            .betas = {.zero_snr = (k & 12) == 12}};
        double x = 0.7, before = 0;
        for (int i = 0; i < n; i++) {
            const struct lg_sampler_step s = lg_sampler_step_at(&m, n, i);
            const double p = 0.6 * x + 0.3 * cos(s.t / 100), picture = s.px * x + s.pm * p;
            x = s.cx * x + (s.multistep ? s.c[0] * picture + s.c[1] * before : s.cm * p);
            before = picture;
            assert_true(isfinite(s.c[0]) && isfinite(s.c[1]));
        }
        assert_true(isfinite(x));
        /* diffusers' DPMSolverMultistepScheduler with its alphas in fp32 */
        if (m.sampler == LG_SAMPLER_DPM && m.betas.zero_snr && !(k & 2) && n == 1000)
            assert_true(fabs(x - 0.247662) <= 1e-5);
    }
}

struct run {
    const char *device, *golden;
    lg_objective_kind kind;
    int steps;
    double guidance, tol;
    uint64_t first;
};

/* Conditions of the net: the fixture's sample 0, and as "unconditional" the null label or sample
 * 1. */
static void set_conditions(struct denoiser_fixture *f, struct lg_sampler_run *r, int pictures)
{
    static int32_t label[8], length[8];
    for (int i = 0; i < pictures; i++) {
        label[i] = 2, label[pictures + i] = f->config.num_classes;
        length[i] = 6, length[pictures + i] = 1;
    }
    r->label = lg_t1(label, LG_I32, 2 * pictures);
    r->text[0].length = lg_t1(length, LG_I32, 2 * pictures);
    if (f->config.kind == LG_DIT) return;
    const int L = f->config.text[0].length, E = f->config.text[0].width;
    size_t row = (size_t)(L * E) * lg_dtype_bytes(f->type);
    void *text;
    assert_int_equal(lg_device_alloc(f->device, 2 * (size_t)pictures * row, &text), 0);
    for (int i = 0; i < 2 * pictures; i++)
        memcpy((char *)text + (size_t)i * row,
               (char *)f->in.text[0].states.data + (i < pictures ? 0 : row), row);
    r->text[0].states = lg_t3(text, f->type, 2 * pictures, L, E);
}

/* Draws `pictures` and compares the one with golden's index 40 or 41 (r->first + at). */
static void draw(const struct lg_denoiser_config *c, const struct run *r, int pictures, int at)
{
    struct denoiser_fixture f;
    lg_sampler *s;
    denoiser_fixture_open(&f, r->device, NULL, c, false);
    assert_int_equal(
        lg_sampler_open(f.device, &(struct lg_sampler_spec){c, pictures, true, false}, &s), 0);
    assert_int_equal(lg_sampler_batch(s), 2 * pictures);
    struct lg_sampler_run run = {.method = {.objective = r->kind},
                                 .steps = r->steps,
                                 .guidance = r->guidance,
                                 .seed = 7,
                                 .first = r->first,
                                 .weights = f.weights};
    set_conditions(&f, &run, pictures);
    size_t each = (size_t)(c->channels * c->height * c->width);
    void *out;
    assert_int_equal(
        lg_device_alloc(f.device, (size_t)pictures * each * lg_dtype_bytes(f.type), &out), 0);
    lg_tensor t = lg_t4(out, f.type, pictures, c->channels, c->height, c->width);
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, t), 0);
    double *want = golden_read(r->golden, each);
    struct distance d = denoiser_fixture_distance(
        &f, (char *)out + (size_t)at * each * lg_dtype_bytes(f.type), want, each);
    if (!(d.diff <= r->tol * d.norm))
        fail_msg("%s on %s: distance %.3e of %.3e", r->golden, r->device, d.diff, d.norm);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

/* A trajectory multiplies the error of a forward by its own growth: 1e-6 and 1e-4 leave room for
 * that over the 1e-7 and 1e-5 of a single forward. */
static void draws(const char *device, double tol)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    struct run flow = {device, "sampler.pixart.flow", LG_OBJECTIVE_FLOW, 10, 3.0, tol, 40};
    struct run v = {device, "sampler.dit.v", LG_OBJECTIVE_V, 10, 1.5, tol, 41};
    struct run eps = {device, "sampler.dit.eps", LG_OBJECTIVE_EPS, 5, 1.5, tol, 41};
    draw(&pixart, &flow, 1, 0);
    draw(&dit, &v, 1, 0);
    draw(&dit, &eps, 1, 0);
    flow.first = 39, v.first = 39;
    draw(&pixart, &flow, 2, 1);
    draw(&dit, &v, 3, 2);
}

static void test_ref64(void **state)
{
    draws("ref64", 1e-6);
}

static void test_host(void **state)
{
    draws("host", 1e-4);
}

/* Clips of LTX that begin with a frame that is given, as diffusers' LTXImageToVideoPipeline draws them. */
static void first_frame(const char *device, double tol, int pictures)
{
    struct lg_denoiser_config c = denoiser_fixture_ltx();
    struct denoiser_fixture f;
    lg_sampler *s;
    void *out, *first;
    c.depth = 1;
    denoiser_fixture_open(&f, device, NULL, &c, false);
    const struct lg_sampler_spec spec = {&c, pictures, true, true};
    assert_int_equal(lg_sampler_open(f.device, &spec, &s), 0);
    const size_t frame = (size_t)(c.channels * c.height * c.width), each = frame * (size_t)c.frames;
    const size_t bytes = lg_dtype_bytes(f.type);
    double *values = malloc(frame * sizeof *values);
    assert_int_equal(lg_device_alloc(f.device, (size_t)pictures * each * bytes, &out), 0);
    assert_int_equal(lg_device_alloc(f.device, frame * bytes, &first), 0);
    golden_fill("first_frame", frame, 1.0, values);
    for (size_t i = 0; i < frame; i++) denoiser_fixture_set(&f, first, i, values[i]);
    struct lg_sampler_run run = {.method = {.objective = LG_OBJECTIVE_FLOW},
                                 .steps = 6,
                                 .guidance = 3,
                                 .seed = 7,
                                 .first = 41 - (uint64_t)pictures,
                                 .weights = f.weights,
                                 .first_frame =
                                     lg_t4(first, f.type, 1, c.channels, c.height, c.width)};
    set_conditions(&f, &run, pictures);
    lg_tensor t = lg_t4(out, f.type, pictures, c.channels, c.frames * c.height, c.width);
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, t), 0);
    double *want = golden_read_of("tests/golden/video.safetensors", "ltx_first_frame.out", each);
    const char *last = (const char *)out + (size_t)(pictures - 1) * each * bytes;
    struct distance d = denoiser_fixture_distance(&f, last, want, each);
    if (!(d.diff <= tol * d.norm)) fail_msg("on %s: distance %.3e of %.3e", device, d.diff, d.norm);
    for (size_t i = 0; i < frame; i++) /* as it was, to the last bit */
        assert_true(
            denoiser_fixture_get(&f, last, i / (frame / 4) * (each / 4) + i % (frame / 4)) ==
            denoiser_fixture_get(&f, first, i));
    run.method.objective = LG_OBJECTIVE_V;
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, t), LG_ERR_CONFIG);
    lg_err_clear();
    free(values);
    free(want);
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

static void test_first_frame(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), ltx = denoiser_fixture_ltx();
    size_t bytes;
    lg_device *d;
    first_frame("ref64", 1e-6, 1);
    first_frame("host", 1e-4, 2);
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    ltx.frames = 1;
    assert_int_equal(lg_sampler_plan(d, &(struct lg_sampler_spec){&ltx, 1, true, true}, &bytes),
                     LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "no other to draw"));
    assert_int_equal(lg_sampler_plan(d, &(struct lg_sampler_spec){&dit, 1, true, true}, &bytes),
                     LG_ERR_CONFIG);
    lg_err_clear();
    lg_device_close(&d);
}

static void test_refusals(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    struct denoiser_fixture f;
    lg_sampler *s;
    size_t bytes;
    denoiser_fixture_open(&f, "host", NULL, &c, false);
    assert_int_equal(
        lg_sampler_plan(f.device, &(struct lg_sampler_spec){&c, 2, false, false}, &bytes), 0);
    assert_true(bytes > 0);
    assert_int_equal(
        lg_sampler_open(f.device,
                        &(struct lg_sampler_spec){&c, DENOISER_FIXTURE_BATCH, false, false}, &s),
        0);
    struct lg_sampler_run run = {.steps = 0, .guidance = 1, .weights = f.weights};
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, f.out), LG_ERR_CONFIG);
    run.steps = 1001;
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, f.out), LG_ERR_CONFIG);
    lg_err_clear();
    run.steps = 2, run.label = f.in.label, run.method.objective = LG_OBJECTIVE_FLOW;
    assert_int_equal(lg_sampler_draw(s, f.stream, &run, f.out), 0); /* without guidance */
    lg_sampler_close(&s);
    denoiser_fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_toy),        cmocka_unit_test(test_spacings),
        cmocka_unit_test(test_many_steps), cmocka_unit_test(test_ref64),
        cmocka_unit_test(test_host),       cmocka_unit_test(test_first_frame),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
