/* The host backend against ref64 on whole nets, tensor by tensor; and what every backend owes
 * its callers: accumulation, untouched gaps, neighbours that do not matter, inference equal to
 * training.
 *
 * Tolerance 1e-5 of a tensor's 2-norm: fp32 with sums of a few hundred terms has about 1e-6. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static const double TOL = 1e-5;
static const char *isa; /* of this process: the host backend knows one per process */

static double *copy(const struct denoiser_fixture *f, const void *data, size_t n)
{
    double *v = malloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++) v[i] = denoiser_fixture_get(f, data, i);
    return v;
}

/* floor: norm below which a tensor counts as zero (to_k.bias has no gradient but rounding). */
static int near(const struct denoiser_fixture *f, const char *name, const void *data,
                const double *want, size_t n, double floor)
{
    struct distance d = denoiser_fixture_distance(f, data, want, n);
    if (d.diff <= TOL * fmax(d.norm, floor)) return 0;
    printf("  %s: distance %.3e, norm %.3e\n", name, d.diff, d.norm);
    return 1;
}

/* The weights' gaps (alignment) must stay as they are: zero. */
static int gaps_touched(const struct denoiser_fixture *f)
{
    size_t at = 0;
    int wrong = 0;
    const int n = f->params.trained;
    for (int i = 0; i <= n; i++) {
        size_t to = i < n ? f->params.p[i].offset : f->params.trained_count;
        for (; at < to; at++) wrong += denoiser_fixture_get(f, f->grads, at) != 0;
        if (i < n) at = to + f->params.p[i].count;
    }
    return wrong;
}

static int compare_grads(const struct denoiser_fixture *f, const double *want, double factor)
{
    int wrong = 0;
    double total = 0;
    double *scaled = malloc(f->params.trained_count * sizeof *scaled);
    for (size_t i = 0; i < f->params.trained_count; i++) {
        scaled[i] = factor * want[i];
        total += scaled[i] * scaled[i];
    }
    double floor = 0.01 * sqrt(total / f->params.trained);
    for (int i = 0; i < f->params.trained; i++) {
        const struct lg_param *p = &f->params.p[i];
        wrong += near(f, p->name, (char *)f->grads + p->offset * lg_dtype_bytes(f->type),
                      scaled + p->offset, p->count, floor);
    }
    free(scaled);
    return wrong + gaps_touched(f);
}

static void against_ref64(const struct lg_denoiser_config *c, const char *set)
{
    struct denoiser_fixture ref, f;
    int wrong = 0;
    denoiser_fixture_open(&ref, "ref64", NULL, c, true);
    denoiser_fixture_forward(&ref);
    denoiser_fixture_backward(&ref, false);
    double *out = copy(&ref, ref.out.data, (size_t)lg_numel(&ref.out));
    double *grads = copy(&ref, ref.grads, ref.params.trained_count);
    denoiser_fixture_open(&f, "host", set, c, true);
    denoiser_fixture_forward(&f);
    wrong += near(&f, "out", f.out.data, out, (size_t)lg_numel(&f.out), 0);
    /* Without accumulation nothing of what was there before may survive. */
    for (int i = 0; i < f.params.trained; i++)
        for (size_t e = 0; e < f.params.p[i].count; e++)
            denoiser_fixture_set(&f, f.grads, f.params.p[i].offset + e, NAN);
    denoiser_fixture_backward(&f, false);
    wrong += compare_grads(&f, grads, 1.0);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, true);
    wrong += compare_grads(&f, grads, 2.0);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, true);
    wrong += compare_grads(&f, grads, 3.0);
    free(out);
    free(grads);
    denoiser_fixture_close(&f);
    denoiser_fixture_close(&ref);
    assert_int_equal(wrong, 0);
}

static void test_dit(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    against_ref64(&c, isa);
}

static void test_pixart(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    against_ref64(&c, isa);
}

static void test_sd3(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    against_ref64(&c, isa);
}

/* All samples but the first. */
static void disturb(struct denoiser_fixture *f, lg_tensor t, double value)
{
    const size_t n = (size_t)lg_numel(&t);
    for (size_t i = n / DENOISER_FIXTURE_BATCH; i < n; i++)
        denoiser_fixture_set(f, t.data, i, value);
}

/* Changes everything about samples 1 and 2 but nothing about sample 0. */
static void disturb_neighbours(struct denoiser_fixture *f)
{
    disturb(f, f->in.x, 3.5);
    for (size_t b = 1; b < DENOISER_FIXTURE_BATCH; b++)
        denoiser_fixture_set(f, f->in.t.data, b, 77.0 * (double)b);
    if (f->config.kind == LG_DIT) {
        ((int32_t *)f->in.label.data)[1] = 1;
        return;
    }
    for (int k = 0; k < f->config.n_texts; k++) {
        disturb(f, f->in.text[k].states, -0.25);
        if (f->config.text[k].pooled) disturb(f, f->in.text[k].pooled, 0.75);
    }
    if (f->in.text[0].length.data) ((int32_t *)f->in.text[0].length.data)[1] = 6;
}

static void alone_or_not(const struct lg_denoiser_config *c)
{
    struct denoiser_fixture train, infer;
    denoiser_fixture_open(&train, "host", isa, c, true);
    denoiser_fixture_open(&infer, "host", isa, c, false);
    denoiser_fixture_forward(&train);
    denoiser_fixture_forward(&infer);
    size_t bytes = lg_tensor_bytes(&train.out);
    assert_memory_equal(train.out.data, infer.out.data, bytes);
    disturb_neighbours(&infer);
    denoiser_fixture_forward(&infer);
    assert_memory_equal(train.out.data, infer.out.data, bytes / DENOISER_FIXTURE_BATCH);
    assert_memory_not_equal((char *)train.out.data + bytes / DENOISER_FIXTURE_BATCH,
                            (char *)infer.out.data + bytes / DENOISER_FIXTURE_BATCH,
                            bytes / DENOISER_FIXTURE_BATCH);
    denoiser_fixture_close(&infer);
    denoiser_fixture_close(&train);
}

static void test_neighbours(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    struct lg_denoiser_config sd3 = denoiser_fixture_sd3();
    alone_or_not(&dit);
    alone_or_not(&pixart);
    alone_or_not(&sd3);
}

/* Text beyond a sample's length must not matter, whatever it holds. */
static void test_mask(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    struct denoiser_fixture f;
    denoiser_fixture_open(&f, "host", isa, &c, true);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, false);
    size_t n = (size_t)lg_numel(&f.out), row = (size_t)c.text[0].width;
    double *out = copy(&f, f.out.data, n), *grads = copy(&f, f.grads, f.params.count);
    for (size_t i = 0; i < 5 * row; i++) /* sample 1 has one token of six */
        denoiser_fixture_set(&f, f.in.text[0].states.data, (6 + 1) * row + i, 100.0 - (double)i);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, false);
    struct distance d = denoiser_fixture_distance(&f, f.out.data, out, n);
    struct distance g = denoiser_fixture_distance(&f, f.grads, grads, f.params.count);
    assert_true(d.diff == 0 && g.diff == 0);
    free(out);
    free(grads);
    denoiser_fixture_close(&f);
}

static void *zeros(lg_device *d, size_t bytes)
{
    void *p = NULL;
    if (lg_device_alloc(d, bytes, &p) < 0) fail_msg("%s", lg_err_text());
    return p;
}

/* Adding gradients can want more scratch memory than writing them (oneDNN, 4096 rows of 64): the net
 * must have planned for it. Many samples, since with long ones the attention wants most. */
static void test_accumulation_is_planned(void **state)
{
    enum { B = 16, SIDE = 32 };
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.hidden = 64;
    c.heads = 4;
    c.depth = 1;
    c.height = c.width = SIDE;
    lg_device *d;
    lg_stream *s;
    lg_denoiser *net;
    lg_params params;
    if (lg_device_open("host", &(struct lg_device_options){.isa = isa}, &d) < 0 ||
        lg_stream_open(d, &s) < 0 ||
        lg_denoiser_open(d, &c, &(struct lg_denoiser_mode){.batch = B, .train = true}, &net) < 0 ||
        lg_denoiser_params(&c, &params) < 0)
        fail_msg("%s", lg_err_text());
    lg_tensor out = lg_t4(NULL, LG_F32, B, c.channels, SIDE, SIDE);
    struct lg_denoiser_input in = {.x = out,
                                   .t = lg_t1(zeros(d, B * sizeof(float)), LG_F32, B),
                                   .label = lg_t1(zeros(d, B * sizeof(int32_t)), LG_I32, B)};
    out.data = zeros(d, lg_tensor_bytes(&out));
    in.x.data = zeros(d, lg_tensor_bytes(&out));
    void *weights = zeros(d, params.count * sizeof(float));
    void *grads = zeros(d, params.count * sizeof(float));
    lg_denoiser_forward(net, s, weights, &in, out);
    lg_denoiser_backward(net, s, weights, &in, out, grads, false);
    lg_denoiser_forward(net, s, weights, &in, out);
    lg_denoiser_backward(net, s, weights, &in, out, grads, true); /* aborts without the plan */
    lg_stream_sync(s);
    lg_params_free(&params);
    lg_denoiser_close(&net);
    lg_stream_close(&s);
    lg_device_close(&d);
}

static int run_all(const char *set)
{
    lg_device *d;
    isa = set;
    if (lg_device_open("host", &(struct lg_device_options){.isa = isa}, &d) < 0) {
        printf("no %s: %s\n", isa, lg_err_message());
        return strcmp(isa, "sse2") == 0; /* every x86-64 has it */
    }
    lg_device_close(&d);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dit),  cmocka_unit_test(test_pixart),
        cmocka_unit_test(test_sd3),  cmocka_unit_test(test_neighbours),
        cmocka_unit_test(test_mask), cmocka_unit_test(test_accumulation_is_planned),
    };
    return cmocka_run_group_tests_name(isa, tests, NULL, NULL);
}

int main(void)
{
    static const char *const sets[] = {"sse2", "avx2", "avx512"};
    int failed = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(sets); i++) {
        pid_t child = fork();
        LG_ASSERT(child >= 0);
        if (child == 0) {
            int rc = run_all(sets[i]);
            fflush(stdout);
            _exit(rc != 0);
        }
        int status;
        LG_ASSERT(waitpid(child, &status, 0) == child);
        failed += status != 0;
    }
    return failed != 0;
}
