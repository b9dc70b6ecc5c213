/* Offloaded activations: whatever moment a copy really happens at, between its beginning and the node that waits
 * for it, outputs and gradients are those without, and less lies on the device.
 *
 * Design: the host backend copies at once, the earliest moment; here its device can also be made to copy as late as
 * it may, when somebody waits. A value whose memory is given away too early, or taken too early, then has other
 * bits in one of the two. */
#include "base/philox.h"
#include "kernels/backend.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- a device whose lanes are late ---- */

enum { COPIES_MAX = 4096, LANES_MAX = 8, BATCH = 4 };

struct late_copy {
    void *to;
    const void *from;
    size_t bytes;
};
struct lane {
    lg_stream *s;
    struct late_copy copy[COPIES_MAX];
    int n, done;
};
struct late_event {
    lg_event base;
    struct lane *lane; /* NULL: recorded on the computation */
    int n;
};
static struct lane lane[LANES_MAX];
static int n_lanes, late_copies;

static struct lane *lane_of(const lg_stream *s)
{
    for (int i = 0; i < n_lanes; i++)
        if (lane[i].s == s) return &lane[i];
    return NULL;
}

static void late_copy(lg_stream *s, void *to, const void *from, size_t bytes)
{
    struct lane *l = lane_of(s);
    if (!l) {
        memcpy(to, from, bytes);
        return;
    }
    assert_true(l->n < COPIES_MAX);
    l->copy[l->n++] = (struct late_copy){to, from, bytes};
}

static int late_event_open(lg_device *d, lg_event **ret)
{
    (void)d;
    struct late_event *e = calloc(1, sizeof *e);
    LG_ASSERT(e);
    *ret = &e->base;
    return 0;
}

static void late_event_close(lg_event *e)
{
    free(e);
}

static void late_record(lg_stream *s, lg_event *base)
{
    struct late_event *e = (struct late_event *)base;
    e->lane = lane_of(s);
    e->n = e->lane ? e->lane->n : 0;
}

/* A lane waits for the computation, which has always come that far; who waits for a lane makes it do its copies. */
static void late_wait(lg_stream *s, lg_event *base)
{
    struct late_event *e = (struct late_event *)base;
    if (!e->lane) {
        if (lane_of(s)) return;
        assert_true(n_lanes < LANES_MAX);
        lane[n_lanes++].s = s;
        return;
    }
    for (; e->lane->done < e->n; e->lane->done++) {
        struct late_copy *c = &e->lane->copy[e->lane->done];
        memcpy(c->to, c->from, c->bytes);
        late_copies++;
    }
}

static void make_late(lg_device *d)
{
    memset(lane, 0, sizeof lane);
    n_lanes = 0;
    d->upload = d->download = late_copy;
    d->event_open = late_event_open;
    d->event_close = late_event_close;
    d->record = late_record;
    d->wait = late_wait;
}

/* ---- a net ---- */

static const struct lg_denoiser_config DIT =
    DENOISER_SHAPE(LG_DIT, 4, 16, 16, 2, 64, 6, 4, 4, 5, 0, 0, 1e-6);
static const struct lg_denoiser_config PIXART =
    DENOISER_SHAPE(LG_PIXART, 4, 16, 16, 2, 64, 6, 4, 4, 0, 9, 40, 1e-6);
static const struct lg_denoiser_config SD3 = {.kind = LG_SD3,
                                              .channels = 4,
                                              .height = 16,
                                              .width = 16,
                                              .patch = 2,
                                              .hidden = 64,
                                              .depth = 6,
                                              .heads = 4,
                                              .mlp_ratio = 4,
                                              .n_texts = 3,
                                              .text = {{.length = 5, .width = 12, .pooled = 10},
                                                       {.length = 5, .width = 20, .pooled = 14},
                                                       {.length = 9, .width = 40}},
                                              .norm_eps = 1e-6,
                                              .positions_side = 8,
                                              .qk_norm = true,
                                              .dual = {7}};

struct result {
    float *out, *grads;
    size_t values, params;
    struct lg_denoiser_bytes bytes;
};

static float *filled(lg_device *d, size_t n, uint64_t key, double scale)
{
    void *p;
    assert_int_equal(lg_device_alloc(d, n * sizeof(float), &p), 0);
    lg_philox_normal_f32(p, n, 5, LG_PURPOSE_INIT, key, 0);
    for (size_t i = 0; i < n; i++) ((float *)p)[i] *= (float)scale;
    return p;
}

static void fill_texts(lg_device *d, const struct lg_denoiser_config *c,
                       struct lg_denoiser_input *in)
{
    for (int k = 0; k < c->n_texts; k++) {
        const struct lg_denoiser_text *t = &c->text[k];
        const uint64_t key = k ? 20 + (uint64_t)k : 4;
        in->text[k].states = lg_t3(filled(d, (size_t)(BATCH * t->length * t->width), key, 1),
                                   LG_F32, BATCH, t->length, t->width);
        if (!t->pooled) continue;
        in->text[k].pooled =
            lg_t2(filled(d, (size_t)(BATCH * t->pooled), 30 + key, 1), LG_F32, BATCH, t->pooled);
    }
}

/* Two micro-batches: the second adds, and its copies follow the first's into the same places. */
static struct result run(const struct lg_denoiser_config *c, const struct lg_denoiser_mode *mode,
                         bool late)
{
    lg_device *d;
    lg_stream *s;
    lg_denoiser *net;
    lg_params params;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    if (late) make_late(d);
    assert_int_equal(lg_stream_open(d, &s), 0);
    if (lg_denoiser_open(d, c, mode, &net) < 0) fail_msg("%s", lg_err_text());
    assert_int_equal(lg_denoiser_params(c, &params), 0);
    struct result r = {.params = params.count};
    assert_int_equal(lg_denoiser_plan(d, c, mode, &r.bytes), 0);
    r.values = (size_t)BATCH * (size_t)(c->channels * c->height * c->width);
    float *weights = filled(d, params.count, 1, 0.1);
    float t[BATCH] = {3, 500, 999, 71};
    int32_t label[BATCH] = {0, 3, 5, 1}, length[BATCH] = {9, 1, 4, 7};
    lg_tensor x = lg_t4(NULL, LG_F32, BATCH, c->channels, c->height, c->width), out = x, dout = x;
    out.data = filled(d, r.values, 2, 1);
    dout.data = filled(d, r.values, 3, 1);
    struct lg_denoiser_input in = {.t = lg_t1(t, LG_F32, BATCH),
                                   .label = lg_t1(label, LG_I32, BATCH),
                                   .text = {{.length = lg_t1(length, LG_I32, BATCH)}}};
    fill_texts(d, c, &in);
    float *grads = filled(d, params.count, 5, 1);
    for (uint64_t micro = 0; micro < 2; micro++) {
        in.x = x;
        in.x.data = filled(d, r.values, 10 + micro, 1.5);
        lg_denoiser_forward(net, s, weights, &in, out);
        lg_denoiser_backward(net, s, weights, &in, dout, grads, micro > 0);
    }
    lg_stream_sync(s);
    r.out = malloc(r.values * sizeof *r.out);
    r.grads = malloc(r.params * sizeof *r.grads);
    LG_ASSERT(r.out && r.grads);
    memcpy(r.out, out.data, r.values * sizeof *r.out);
    for (int i = 0; i < params.trained; i++)
        memcpy(r.grads + params.p[i].offset, grads + params.p[i].offset,
               params.p[i].count * sizeof *r.grads);
    lg_params_free(&params);
    lg_denoiser_close(&net);
    lg_stream_close(&s);
    lg_device_close(&d);
    return r;
}

static void same_gradients(const struct lg_denoiser_config *c, const char *what,
                           const struct result *got, const struct result *want)
{
    lg_params params;
    assert_int_equal(lg_denoiser_params(c, &params), 0);
    for (int i = 0; i < params.trained; i++) {
        const struct lg_param *p = &params.p[i];
        if (memcmp(got->grads + p->offset, want->grads + p->offset, p->count * sizeof(float)) != 0)
            fail_msg("%s: other gradients of %s", what, p->name);
    }
    lg_params_free(&params);
}

/* copies: as many at least are late. */
static void same(const struct lg_denoiser_config *c, const char *const *recompute, int copies)
{
    const struct lg_denoiser_mode kept = {.batch = BATCH, .train = true, .recompute = recompute};
    struct lg_denoiser_mode offloaded = kept;
    offloaded.offload = true;
    struct result want = run(c, &kept, false);
    assert_int_equal(want.bytes.host, 0);
    for (int late = 0; late < 2; late++) {
        late_copies = 0;
        struct result got = run(c, &offloaded, late);
        assert_true(got.bytes.host > 0 && got.bytes.activations < want.bytes.activations);
        assert_true(!late || late_copies >= copies);
        assert_memory_equal(got.out, want.out, want.values * sizeof *want.out);
        same_gradients(c, late ? "late copies" : "early copies", &got, &want);
        free(got.out);
        free(got.grads);
    }
    free(want.out);
    free(want.grads);
}

static void test_dit(void **state)
{
    (void)state;
    same(&DIT, NULL, 9);
    same(&DIT, (const char *const[]){"block", NULL}, 9);
    same(&DIT, (const char *const[]){"mlp", NULL}, 9);
    same(&DIT, (const char *const[]){"uniform:1", NULL}, 2);
    same(&DIT, (const char *const[]){"uniform:2", NULL}, 2);
}

static void test_pixart(void **state)
{
    (void)state;
    same(&PIXART, NULL, 9);
    same(&PIXART, (const char *const[]){"block", NULL}, 9);
    same(&PIXART, (const char *const[]){"every:2", NULL}, 9);
    same(&PIXART, (const char *const[]){"uniform:1", NULL}, 2);
    same(&PIXART, (const char *const[]){"uniform:2", NULL}, 2);
}

static void test_sd3(void **state)
{
    (void)state;
    same(&SD3, NULL, 9);
    same(&SD3, (const char *const[]){"block", NULL}, 9);
    same(&SD3, (const char *const[]){"mlp", NULL}, 9);
    same(&SD3, (const char *const[]){"uniform:1", NULL}, 2);
    same(&SD3, (const char *const[]){"uniform:2", NULL}, 2);
}

/* Blocks that keep theirs: with each more lies on the device and less in the host's memory, to the same bits. */
static void test_keep(void **state)
{
    (void)state;
    const struct lg_denoiser_mode kept = {.batch = BATCH, .train = true};
    struct lg_denoiser_mode mode = kept;
    struct result want = run(&DIT, &kept, false);
    size_t host = SIZE_MAX, device = 0;
    mode.offload = true;
    for (mode.offload_keep = 2; mode.offload_keep <= DIT.depth; mode.offload_keep++) {
        struct result got = run(&DIT, &mode, true);
        assert_true(got.bytes.host < host && got.bytes.activations > device);
        assert_memory_equal(got.out, want.out, want.values * sizeof *want.out);
        same_gradients(&DIT, "blocks that keep theirs", &got, &want);
        host = got.bytes.host, device = got.bytes.activations;
        free(got.out);
        free(got.grads);
    }
    assert_int_equal(host, 0);
    assert_int_equal(device, want.bytes.activations);
    free(want.out);
    free(want.grads);
}

/* Without a backward, or with too few blocks, nothing waits anywhere. */
static void test_nothing_to_offload(void **state)
{
    (void)state;
    lg_device *d;
    struct lg_denoiser_config two = DIT;
    struct lg_denoiser_bytes bytes;
    two.depth = 2;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    struct lg_denoiser_mode mode = {.batch = BATCH, .offload = true};
    assert_int_equal(lg_denoiser_plan(d, &DIT, &mode, &bytes), 0);
    assert_int_equal(bytes.host, 0);
    mode.train = true;
    assert_int_equal(lg_denoiser_plan(d, &two, &mode, &bytes), 0);
    assert_int_equal(bytes.host, 0);
    lg_device_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dit),
        cmocka_unit_test(test_pixart),
        cmocka_unit_test(test_sd3),
        cmocka_unit_test(test_keep),
        cmocka_unit_test(test_nothing_to_offload),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
