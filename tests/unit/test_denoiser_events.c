/* A denoiser that runs in stretches gives the bits of one that runs at once, although each unit's weights and gradient
 * have a place between their events only: before and after, there is nothing but NaN. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static size_t bytes_of(const struct denoiser_fixture *f, int unit)
{
    return f->params.unit[unit].count * lg_dtype_bytes(f->type);
}

static char *flat_of(const struct denoiser_fixture *f, void *flat, int unit)
{
    return (char *)flat + f->params.unit[unit].first * lg_dtype_bytes(f->type);
}

static void poison(void *at, size_t bytes)
{
    memset(at, 0xff, bytes); /* NaN as float and as double */
}

enum { PLACES_MAX = 4096 };

struct places {
    void *all[PLACES_MAX]; /* that were made */
    int n;
    void **weights, **gradient; /* of each unit; NULL: none now */
    int gradients;              /* that were done */
    int most;                   /* units of weights with a place at once */
};

static void make(const struct denoiser_fixture *f, struct places *p, void **at, int unit)
{
    assert_null(*at);
    assert_true(p->n < PLACES_MAX);
    *at = p->all[p->n++] = malloc(bytes_of(f, unit));
    assert_non_null(*at);
    poison(*at, bytes_of(f, unit));
}

/* Its memory stays until the end, so that who still reads it finds no numbers there, and no other unit's. */
static void drop(const struct denoiser_fixture *f, void **at, int unit)
{
    assert_non_null(*at);
    poison(*at, bytes_of(f, unit));
    *at = NULL;
}

static void go(struct denoiser_fixture *f, struct places *p, const struct lg_denoiser_event *e,
               void *grads)
{
    const int u = e->unit;
    switch (e->kind) {
    case LG_EVENT_RUN:
        assert_true(e->from < e->to);
        lg_denoiser_run(f->net, f->stream, e);
        return;
    case LG_EVENT_WEIGHTS:
        make(f, p, &p->weights[u], u);
        memcpy(p->weights[u], flat_of(f, f->weights, u), bytes_of(f, u));
        lg_denoiser_set_weights(f->net, u, p->weights[u]);
        break;
    case LG_EVENT_WEIGHTS_DONE:
        drop(f, &p->weights[u], u);
        break;
    case LG_EVENT_GRADIENT:
        make(f, p, &p->gradient[u], u);
        memset(p->gradient[u], 0, bytes_of(f, u)); /* the gaps */
        lg_denoiser_set_gradient(f->net, u, p->gradient[u]);
        break;
    case LG_EVENT_GRADIENT_DONE:
        memcpy(flat_of(f, grads, u), p->gradient[u], bytes_of(f, u));
        drop(f, &p->gradient[u], u);
        p->gradients++;
        break;
    case LG_EVENT_EXCHANGE:
        fail();
    }
    int now = 0;
    for (int i = 0; i < f->params.n_units; i++) now += p->weights[i] != NULL;
    p->most = LG_MAX(p->most, now);
}

static void check(const struct lg_denoiser_config *c, const char *const *recompute)
{
    struct denoiser_fixture f;
    int n, n_forward;
    denoiser_fixture_open(&f, "host", NULL, c, true);
    assert_int_equal(denoiser_fixture_recompute(&f, recompute), 0);
    const size_t out = lg_tensor_bytes(&f.out),
                 all = f.params.trained_count * lg_dtype_bytes(f.type);
    denoiser_fixture_forward(&f);
    denoiser_fixture_backward(&f, false);
    void *want = malloc(out), *grads = malloc(all);
    assert_true(want && grads);
    memcpy(want, f.out.data, out);
    memset(f.out.data, 0, out);
    const struct lg_denoiser_event *e = lg_denoiser_events(f.net, &n, &n_forward);
    struct places p = {.weights = calloc((size_t)f.params.n_units, sizeof(void *)),
                       .gradient = calloc((size_t)f.params.n_units, sizeof(void *))};
    lg_denoiser_begin_forward(f.net, &f.in, f.out);
    for (int i = 0; i < n_forward; i++) go(&f, &p, &e[i], grads);
    assert_memory_equal(f.out.data, want, out);
    for (int u = 0; u < f.params.n_units; u++) assert_null(p.weights[u]);
    lg_denoiser_begin_backward(f.net, &f.in, f.dout, false);
    for (int i = n_forward; i < n; i++) go(&f, &p, &e[i], grads);
    for (int u = 0; u < f.params.n_units; u++) assert_null(p.weights[u]);
    for (int u = 0; u < f.params.trained_units; u++) assert_null(p.gradient[u]);
    assert_int_equal(p.gradients, f.params.trained_units);
    assert_true(p.most < f.params.n_units); /* else nothing would be won */
    assert_memory_equal(grads, f.grads, all);
    for (int i = 0; i < p.n; i++) free(p.all[i]);
    free(p.weights);
    free(p.gradient);
    free(want);
    free(grads);
    denoiser_fixture_close(&f);
}

static const char *const none[] = {NULL}, *const norms[] = {"norms", NULL},
                         *const block[] = {"block", NULL}, *const twos[] = {"uniform:2", NULL};

static void test_dit(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_dit();
    check(&c, none);
    check(&c, norms);
    check(&c, block);
    check(&c, twos);
    c.modulation_weights =
        1; /* each block's modulations come just before it, and their gradients just after */
    check(&c, none);
    check(&c, block);
    check(&c, twos);
}

static void test_pixart(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    check(&c, none);
    check(&c, norms);
    check(&c, block);
    check(&c, twos);
}

/* Its positions are a unit that has no gradient. */
static void test_sd3(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    check(&c, none);
    check(&c, norms);
    check(&c, block);
    check(&c, twos);
}

static void test_flux(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_flux();
    check(&c, none);
    check(&c, norms);
    check(&c, block);
    check(&c, twos);
}

/* What a level has made waits for the level that reads it on the way up. */
static void test_unets(void **state)
{
    (void)state;
    const struct lg_denoiser_config c[] = {denoiser_fixture_sd2(), denoiser_fixture_sdxl()};
    for (int i = 0; i < 2; i++) {
        check(&c[i], none);
        check(&c[i], norms);
        check(&c[i], block);
        check(&c[i], twos);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_dit), cmocka_unit_test(test_pixart),
                                       cmocka_unit_test(test_sd3), cmocka_unit_test(test_flux),
                                       cmocka_unit_test(test_unets)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
