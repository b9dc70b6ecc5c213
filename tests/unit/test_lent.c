/* Activations where gradients will lie (lg_graph_lend): the bits of a net that has memory for both, less memory, and
 * nothing written between the parameters' gradients. And the places behind it (base/lifetimes.h). On the host backend. */
#include "base/lifetimes.h"
#include "base/philox.h"
#include "tests/unit/denoiser_fixture.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { DEPTH = 5, GAP = 0xa5 };

/* ---- nets ---- */

/* Where parameters have their gradients; the rest are gaps. */
static char *owned(const lg_params *t, size_t element)
{
    char *is = calloc(t->count, element);
    LG_ASSERT(is);
    for (int i = 0; i < t->trained; i++)
        memset(is + t->p[i].offset * element, 1, t->p[i].count * element);
    return is;
}

/* A unit's weights to where the net has a place for them in that part. */
static void gather(struct denoiser_fixture *f, int unit, bool backward)
{
    const struct lg_param_unit *u = &f->params.unit[unit];
    const size_t element = lg_dtype_bytes(f->type);
    memcpy(lg_denoiser_weights_place(f->net, unit, backward),
           (char *)f->weights + u->first * element, u->count * element);
}

/* The next unit that is used from event i on is gathered, with `ahead` when the one before it begins to be used. */
static void gather_next(struct denoiser_fixture *f, int i)
{
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(f->net, &n, &n_forward);
    while (i < n && (e[i].kind != LG_EVENT_WEIGHTS || e[i].unit >= f->params.trained_units)) i++;
    if (i < n) gather(f, e[i].unit, i >= n_forward);
}

/* Weights come for each use and are spoilt when they are done with, as late as they may and as early. */
static void run_gathered(struct denoiser_fixture *f, const struct lg_denoiser_mode *mode)
{
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(f->net, &n, &n_forward);
    const size_t element = lg_dtype_bytes(f->type);
    if (mode->ahead) gather_next(f, 0);
    lg_denoiser_begin_forward(f->net, &f->in, f->out);
    for (int i = 0; i < n; i++) {
        const int u = e[i].unit;
        const bool backward = i >= n_forward, trained = u < f->params.trained_units;
        const struct lg_param_unit *unit = &f->params.unit[u];
        if (i == n_forward) lg_denoiser_begin_backward(f->net, &f->in, f->dout, false);
        if (e[i].kind == LG_EVENT_RUN) lg_denoiser_run(f->net, f->stream, &e[i]);
        if (e[i].kind == LG_EVENT_GRADIENT)
            lg_denoiser_set_gradient(f->net, u, (char *)f->grads + unit->first * element);
        if (e[i].kind == LG_EVENT_WEIGHTS && !trained)
            lg_denoiser_set_weights(f->net, u, (char *)f->weights + unit->first * element);
        if (e[i].kind == LG_EVENT_WEIGHTS && trained) {
            gather_next(f, i + mode->ahead);
            lg_denoiser_set_weights(f->net, u, lg_denoiser_weights_place(f->net, u, backward));
        }
        if (e[i].kind == LG_EVENT_WEIGHTS_DONE && trained)
            memset(lg_denoiser_weights_place(f->net, u, backward), 0xff, unit->count * element);
    }
    lg_stream_sync(f->stream);
}

static void run(struct denoiser_fixture *f, const struct lg_denoiser_mode *mode, char *ret)
{
    const size_t out = lg_tensor_bytes(&f->out), grads = f->params.count * lg_dtype_bytes(f->type);
    lg_denoiser_close(&f->net);
    if (lg_denoiser_open(f->device, &f->config, mode, &f->net) < 0) fail_msg("%s", lg_err_text());
    memset(f->out.data, 0xff, out);
    memset(f->grads, GAP, grads);
    if (mode->lends) lg_denoiser_set_lent(f->net, f->grads);
    for (int i = 0; i < 2; i++) { /* the second finds gradients where activations go */
        if (mode->places_weights) {
            run_gathered(f, mode);
            continue;
        }
        denoiser_fixture_forward(f);
        denoiser_fixture_backward(f, false);
    }
    memcpy(ret, f->out.data, out);
    memcpy(ret + out, f->grads, grads);
}

static void compare(struct denoiser_fixture *f, struct lg_denoiser_mode mode)
{
    const size_t out = lg_tensor_bytes(&f->out), element = lg_dtype_bytes(f->type);
    const size_t grads = f->params.count * element;
    char *apart = malloc(out + grads), *lent = malloc(out + grads),
         *is = owned(&f->params, element);
    LG_ASSERT(apart && lent);
    run(f, &mode, apart);
    const struct lg_denoiser_bytes before = *lg_denoiser_bytes_of(f->net);
    mode.lends = true;
    run(f, &mode, lent);
    const struct lg_denoiser_bytes after = *lg_denoiser_bytes_of(f->net);
    assert_memory_equal(apart, lent, out + grads);
    for (size_t i = 0; i < grads; i++)
        if (!is[i]) assert_int_equal((unsigned char)lent[out + i], GAP);
    assert_int_equal(before.lent, 0);
    assert_true(after.lent > 0 && after.lent <= grads);
    assert_true(after.activations < before.activations);
    for (int k = 0; k < 3; k++) { /* and weights that come for each use; the last lend nothing */
        mode.places_weights = true;
        mode.ahead = k != 1;
        mode.lends = k != 2;
        run(f, &mode, lent);
        assert_memory_equal(apart, lent, out + grads);
    }
    free(apart);
    free(lent);
    free(is);
}

static void test_bits_are_the_same(void **state)
{
    (void)state;
    struct lg_denoiser_config nets[] = {denoiser_fixture_dit(),   denoiser_fixture_pixart(),
                                        denoiser_fixture_sd3(),   denoiser_fixture_flux(),
                                        denoiser_fixture_sd2(),   denoiser_fixture_sdxl(),
                                        denoiser_fixture_latte(), denoiser_fixture_ltx()};
    static const char *const words[][2] = {
        {"none", NULL}, {"norms", NULL}, {"block", NULL}, {"uniform:1", NULL}, {"uniform:2", NULL}};
    for (size_t i = 0; i < LG_ARRAY_LEN(nets); i++) {
        struct denoiser_fixture f;
        if (i < 2) nets[i].depth = DEPTH;
        denoiser_fixture_open(&f, "host", NULL, &nets[i], true);
        for (size_t k = 0; k < LG_ARRAY_LEN(words); k++)
            compare(&f, (struct lg_denoiser_mode){
                            .batch = DENOISER_FIXTURE_BATCH, .train = true, .recompute = words[k]});
        compare(&f, (struct lg_denoiser_mode){
                        .batch = DENOISER_FIXTURE_BATCH, .train = true, .offload = true});
        denoiser_fixture_close(&f);
    }
}

/* Only what is trained has gradients: the others' units come behind it. */
static void test_a_part_is_trained(void **state)
{
    (void)state;
    static const char *const groups[] = {"*attn1* frozen", NULL};
    const struct lg_training training = {.groups = groups};
    const struct lg_denoiser_config c = denoiser_fixture_dit();
    struct denoiser_fixture f;
    denoiser_fixture_open_trained(&f, "host", &c, &training, NULL);
    compare(&f, (struct lg_denoiser_mode){
                    .batch = DENOISER_FIXTURE_BATCH, .train = true, .training = training});
    denoiser_fixture_close(&f);
}

/* In a deep net all but a few blocks' activations find a place: those of block k where the gradients of blocks before it
 * will lie. */
static void test_most_find_a_place(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_dit();
    struct lg_denoiser_bytes apart, lent;
    lg_device *d;
    c.depth = 24;
    c.hidden = 128;
    c.height = c.width = 16;
    struct lg_denoiser_mode mode = {.batch = 1, .train = true};
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_denoiser_plan(d, &c, &mode, &apart), 0);
    mode.lends = true;
    assert_int_equal(lg_denoiser_plan(d, &c, &mode, &lent), 0);
    assert_true(5 * lent.activations < apart.activations);
    lg_device_close(&d);
}

/* ---- places ---- */

static unsigned draw(unsigned *n, unsigned below)
{
    return lg_philox(161, LG_PURPOSE_TEST, 0, (*n)++).v[0] % below;
}

static bool meet(const struct lg_lifetime *a, const struct lg_lifetime *b)
{
    return a->first <= b->last && b->first <= a->last && a->at < b->at + b->bytes &&
           b->at < a->at + a->bytes;
}

static void test_places(void **state)
{
    (void)state;
    enum { TAKEN = 6, N = 40, TIMES = 30 };
    unsigned n = 0;
    int without = 0;
    for (int round = 0; round < 200; round++) {
        struct lg_lifetime taken[TAKEN], l[N];
        size_t end = 0;
        for (int i = 0; i < TAKEN; i++) {
            end += draw(&n, 300);
            taken[i] = (struct lg_lifetime){.at = end,
                                            .bytes = 1 + draw(&n, 900),
                                            .first = (int)draw(&n, TIMES),
                                            .last = TIMES};
            end += taken[i].bytes;
        }
        for (int i = 0; i < N; i++) {
            const int first = (int)draw(&n, TIMES);
            l[i] = (struct lg_lifetime){
                .bytes = 1 + draw(&n, 700), .first = first, .last = first + (int)draw(&n, 10)};
        }
        const struct lg_lifetimes_room room = {
            .bytes = end - draw(&n, 64), .taken = taken, .n_taken = TAKEN};
        lg_lifetimes_place_in(&room, l, N);
        for (int i = 0; i < N; i++) {
            without += l[i].at == LG_NO_PLACE;
            if (l[i].at == LG_NO_PLACE) continue;
            assert_int_equal(l[i].at % 64, 0);
            assert_true(l[i].at + l[i].bytes <= room.bytes);
            for (int k = 0; k < TAKEN; k++) assert_false(meet(&l[i], &taken[k]));
            for (int k = 0; k < i; k++)
                if (l[k].at != LG_NO_PLACE) assert_false(meet(&l[i], &l[k]));
        }
    }
    assert_true(without > 0 && without < 200 * N);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_are_the_same),
        cmocka_unit_test(test_a_part_is_trained),
        cmocka_unit_test(test_most_find_a_place),
        cmocka_unit_test(test_places),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
