/* A denoiser for other shapes than its own, as buckets have them: what diffusers gives, and several nets in one piece of
 * memory, which take turns without a trace in the bits. */
#include "stages/io/safetensors.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SHAPES = 3 };
static const int shape[SHAPES][2] = {{12, 4}, {10, 10}, {4, 16}}; /* height, width */

/* The fixture's model has a sample_size of 8. */
static struct lg_denoiser_config config_of(int k)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    c.height = shape[k][0];
    c.width = shape[k][1];
    c.sample_size = 8;
    return c;
}

static void compare(const char *device, double tol)
{
    lg_st_file *golden;
    assert_int_equal(lg_st_open("tests/golden/denoiser_shapes.safetensors", &golden), 0);
    for (int k = 0; k < SHAPES; k++) {
        struct denoiser_fixture f;
        struct lg_denoiser_config c = config_of(k);
        char name[32];
        snprintf(name, sizeof name, "%dx%d.out", shape[k][0], shape[k][1]);
        const struct lg_st_entry *e = lg_st_find(golden, name);
        denoiser_fixture_open(&f, device, NULL, &c, false);
        const size_t count = (size_t)lg_numel(&f.out);
        assert_true(e && e->dtype == LG_F64 && e->bytes == count * sizeof(double));
        double *want = malloc(e->bytes);
        memcpy(want, e->data, e->bytes);
        denoiser_fixture_forward(&f);
        struct distance d = denoiser_fixture_distance(&f, f.out.data, want, count);
        if (!(d.diff <= tol * d.norm))
            fail_msg("%s on %s: distance %.3e, norm %.3e", name, device, d.diff, d.norm);
        free(want);
        denoiser_fixture_close(&f);
    }
    lg_st_close(&golden);
}

/* An SD3 without T5 is one that gets zeros from it. */
static void without_t5(const char *device)
{
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    struct denoiser_fixture zeros, without;
    denoiser_fixture_open(&zeros, device, NULL, &c, true);
    c.n_texts = 2;
    denoiser_fixture_open(&without, device, NULL, &c, true);
    assert_int_equal(without.in.text[2].states.rank, 0);
    assert_int_equal(zeros.params.count, without.params.count);
    const size_t size = lg_dtype_bytes(zeros.type), n = (size_t)lg_numel(&zeros.out);
    struct lg_text_states *t5 = &zeros.in.text[2];
    denoiser_fixture_forward(&zeros);
    denoiser_fixture_forward(&without);
    assert_memory_not_equal(zeros.out.data, without.out.data, n * size);
    memset(t5->states.data, 0, (size_t)lg_numel(&t5->states) * size);
    for (int i = 0; i < 2; i++) {
        denoiser_fixture_forward(&zeros);
        denoiser_fixture_forward(&without);
        assert_memory_equal(zeros.out.data, without.out.data, n * size);
        denoiser_fixture_backward(&zeros, i);
        denoiser_fixture_backward(&without, i);
        assert_memory_equal(zeros.grads, without.grads, zeros.params.count * size);
    }
    denoiser_fixture_close(&zeros);
    denoiser_fixture_close(&without);
}

static void test_without_t5(void **state)
{
    (void)state;
    without_t5("ref64");
    without_t5("host");
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    c.n_texts = 1;
    assert_int_equal(lg_denoiser_config_check(&c), LG_ERR_CONFIG);
    c = denoiser_fixture_flux();
    c.n_texts = 1;
    assert_int_equal(lg_denoiser_config_check(&c), LG_ERR_CONFIG);
    lg_err_clear();
}

/* Tolerances as in test_denoiser_golden.c. */
static void test_ref64(void **state)
{
    compare("ref64", 1e-7);
}

static void test_host(void **state)
{
    compare("host", 1e-5);
}

/* Forward and backward of each shape, f->net being the net. Caller frees. */
static void *gradients_of(struct denoiser_fixture *f)
{
    const size_t bytes = f->params.count * lg_dtype_bytes(f->type);
    void *copy = malloc(bytes);
    memset(f->grads, 0xff, bytes); /* NaN */
    denoiser_fixture_forward(f);
    denoiser_fixture_backward(f, false);
    memcpy(copy, f->grads, bytes);
    return copy;
}

static void test_one_memory(void **state)
{
    static const char *const recompute[] = {"norms", NULL};
    struct denoiser_fixture f[SHAPES];
    lg_denoiser *own[SHAPES], *net[SHAPES];
    void *want[SHAPES], *got;
    for (int k = 0; k < SHAPES; k++) {
        struct lg_denoiser_config c = config_of(k);
        /* One device for all, as a rank has. */
        denoiser_fixture_open(&f[k], "host", NULL, &c, true);
        const struct lg_denoiser_mode mode = {.batch = DENOISER_FIXTURE_BATCH,
                                              .train = true,
                                              .recompute = recompute,
                                              .offload = k > 0};
        own[k] = f[k].net;
        want[k] = gradients_of(&f[k]);
        assert_int_equal(lg_denoiser_compile(f[0].device, &c, &mode, &net[k]), 0);
    }
    assert_int_equal(lg_denoiser_open_all(net, SHAPES), 0);
    for (int i = 0; i < 3 * SHAPES; i++) {
        const int k = i * 2 % SHAPES;
        f[k].net = net[k];
        got = gradients_of(&f[k]);
        assert_memory_equal(got, want[k], f[k].params.count * lg_dtype_bytes(f[k].type));
        free(got);
    }
    /* The largest, not the sum; positions apart. */
    struct lg_denoiser_bytes all = lg_denoiser_bytes_of_all(net, SHAPES), sum = {0};
    size_t most = 0;
    for (int k = 0; k < SHAPES; k++) {
        const struct lg_denoiser_bytes *b = lg_denoiser_bytes_of(net[k]);
        sum.activations += b->activations;
        most = LG_MAX(most, b->activations);
        assert_true(all.scratch >= b->scratch && all.host >= b->host);
    }
    assert_true(all.activations >= most && all.activations < sum.activations);
    for (int k = SHAPES - 1; k >= 0; k--) {
        lg_denoiser_close(&net[k]);
        f[k].net = own[k];
        free(want[k]);
    }
    for (int k = SHAPES - 1; k >= 0; k--) denoiser_fixture_close(&f[k]);
}

/* Shapes of one model go through its units alike; another depth does not, nor a net without a backward. */
static void test_same_events(void **state)
{
    lg_device *d;
    lg_denoiser *net[SHAPES + 2];
    static const char *const block[] = {"block", NULL};
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    for (int k = 0; k < SHAPES + 2; k++) {
        struct lg_denoiser_config c = config_of(k % SHAPES);
        const struct lg_denoiser_mode mode = {
            .batch = 1 + k, .train = k <= SHAPES, .recompute = k == 1 ? block : NULL};
        if (k == SHAPES) c.depth++;
        assert_int_equal(lg_denoiser_compile(d, &c, &mode, &net[k]), 0);
    }
    for (int k = 0; k < SHAPES; k++) assert_true(lg_denoiser_same_events(net[0], net[k]));
    assert_false(lg_denoiser_same_events(net[0], net[SHAPES]));
    assert_false(lg_denoiser_same_events(net[0], net[SHAPES + 1]));
    assert_false(lg_denoiser_same_events(net[SHAPES + 1], net[0]));
    for (int k = 0; k < SHAPES + 2; k++) lg_denoiser_close(&net[k]);
    lg_device_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ref64),       cmocka_unit_test(test_host),
        cmocka_unit_test(test_one_memory),  cmocka_unit_test(test_without_t5),
        cmocka_unit_test(test_same_events),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
