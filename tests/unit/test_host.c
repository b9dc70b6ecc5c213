/* What the host backend promises beyond agreeing with ref64 (test_ops_host.c).
 *
 * Products and convolutions keep rows apart: at a fixed shape a row's bits depend neither on its
 * slot nor on the other rows. Libraries break this at tails and block borders, so it is tried over
 * many shapes, for each instruction set the machine has, with one and two threads. And what is not
 * a number stays visible, while what a mask excludes has no effect.
 *
 * A process computes with one instruction set: each is tried in a child. */
#include "base/check.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "tests/unit/isas.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS_MAX = 1030, WIDTH_MAX = 3072, ELEMENTS_MAX = 4 << 20, SCRATCH_BYTES = 64 << 20 };

struct rig {
    lg_device *device;
    lg_stream *stream;
    float *in, *weights, *bias, *out, *kept;
};

static float *take(lg_device *d, size_t bytes)
{
    void *p = NULL;
    LG_ASSERT(lg_device_alloc(d, bytes, &p) == 0);
    return p;
}

static void open_rig(struct rig *r, const char *isa, int threads)
{
    struct lg_device_options options = {.isa = isa, .threads = threads};
    LG_ASSERT(lg_device_open("host", &options, &r->device) == 0);
    LG_ASSERT(lg_stream_open(r->device, &r->stream) == 0);
    lg_stream_set_scratch(r->stream, take(r->device, SCRATCH_BYTES), SCRATCH_BYTES);
    r->in = take(r->device, ELEMENTS_MAX * sizeof(float));
    r->weights = take(r->device, ELEMENTS_MAX * sizeof(float));
    r->out = take(r->device, ELEMENTS_MAX * sizeof(float));
    r->bias = take(r->device, WIDTH_MAX * sizeof(float));
    r->kept = take(r->device, ELEMENTS_MAX * sizeof(float));
    uint32_t u = 1;
    for (int i = 0; i < ELEMENTS_MAX; i++) {
        u = u * 1664525u + 1013904223u;
        r->weights[i] = (float)(u >> 8) * 0x1p-23f - 1.0f;
    }
    memcpy(r->bias, r->weights + 7, WIDTH_MAX * sizeof(float));
}

static void close_rig(struct rig *r)
{
    lg_stream_close(&r->stream);
    lg_device_close(&r->device);
}

/* One row of `wide` elements after the other: the same in all, or in the row `same` alone. */
static void fill(struct rig *r, int64_t rows, int64_t wide, int64_t same)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(r->in + i * wide, r->weights + (same < 0 || i == same ? 12345 : 1 + i % 1000),
               (size_t)wide * sizeof(float));
}

/* rows in, rows out, of so many elements. */
struct shape {
    int64_t rows, in, out;
};

/* Runs with equal rows, which must come out equal, then with one of them among strangers. */
static int check(struct rig *r, const struct shape *p, void (*run)(struct rig *, const void *),
                 const void *args)
{
    const size_t bytes = (size_t)p->out * sizeof(float);
    LG_ASSERT(p->rows * p->in <= ELEMENTS_MAX && p->rows * p->out <= ELEMENTS_MAX);
    int64_t middle = p->rows / 2;
    fill(r, p->rows, p->in, -1);
    run(r, args);
    for (int64_t i = 1; i < p->rows; i++)
        if (memcmp(r->out, r->out + i * p->out, bytes)) return 1;
    memcpy(r->kept, r->out, bytes);
    fill(r, p->rows, p->in, middle);
    run(r, args);
    return memcmp(r->kept, r->out + middle * p->out, bytes) != 0;
}

struct product {
    int64_t M, N, K;
};

static void run_forward(struct rig *r, const void *args)
{
    const struct product *p = args;
    lg_linear_forward(r->stream,
                      &(struct lg_linear_forward_args){.x = lg_t2(r->in, LG_F32, p->M, p->K),
                                                       .w = lg_t2(r->weights, LG_F32, p->N, p->K),
                                                       .bias = lg_t1(r->bias, LG_F32, p->N),
                                                       .y = lg_t2(r->out, LG_F32, p->M, p->N),
                                                       .act = LG_ACT_GELU_TANH});
}

static void run_backward(struct rig *r, const void *args)
{
    const struct product *p = args;
    lg_linear_backward_data(r->stream, &(struct lg_linear_backward_data_args){
                                           .dy = lg_t2(r->in, LG_F32, p->M, p->N),
                                           .w = lg_t2(r->weights, LG_F32, p->N, p->K),
                                           .dx = lg_t2(r->out, LG_F32, p->M, p->K)});
}

static int products(struct rig *r, const char *isa)
{
    static const int M[] = {1, 3, 8, 24, 64, 100, 192, 257, 512, 1024};
    static const int NK[][2] = {{4, 16},    {16, 4},     {32, 32},   {16, 192},
                                {100, 72},  {384, 128},  {128, 512}, {768, 192},
                                {192, 768}, {1152, 192}, {96, 3072}, {3072, 96}};
    int failures = 0;
    for (size_t m = 0; m < LG_ARRAY_LEN(M); m++) {
        for (size_t k = 0; k < LG_ARRAY_LEN(NK); k++) {
            struct product p = {M[m], NK[k][0], NK[k][1]};
            int forward = check(r, &(struct shape){p.M, p.K, p.N}, run_forward, &p);
            int backward = check(r, &(struct shape){p.M, p.N, p.K}, run_backward, &p);
            failures += forward + backward;
            if (forward || backward)
                printf("  %s: M=%d N=%d K=%d:%s%s\n", isa, M[m], NK[k][0], NK[k][1],
                       forward ? " forward" : "", backward ? " backward" : "");
        }
    }
    return failures;
}

struct convolution {
    int64_t N, H, Ci, Co, k, stride;
};

static void run_conv(struct rig *r, const void *args)
{
    const struct convolution *c = args;
    const int64_t out = c->H / c->stride;
    const int before = c->stride == 1 ? (int)c->k / 2 : 0, after = (int)c->k / 2;
    lg_conv2d_forward(r->stream, &(struct lg_conv2d_forward_args){
                                     .x = lg_t4(r->in, LG_F32, c->N, c->H, c->H, c->Ci),
                                     .w = lg_t4(r->weights, LG_F32, c->Co, c->k, c->k, c->Ci),
                                     .bias = lg_t1(r->bias, LG_F32, c->Co),
                                     .y = lg_t4(r->out, LG_F32, c->N, out, out, c->Co),
                                     .stride = (int)c->stride,
                                     .top = before,
                                     .left = before,
                                     .bottom = after,
                                     .right = after});
}

static int convolutions(struct rig *r, const char *isa)
{
    static const struct convolution C[] = {
        {8, 64, 3, 32, 3, 1},   {3, 64, 32, 32, 3, 2}, {3, 32, 32, 64, 3, 1}, {5, 32, 32, 64, 1, 1},
        {8, 16, 64, 128, 3, 1}, {8, 16, 128, 8, 3, 1}, {8, 16, 8, 8, 1, 1},   {3, 7, 5, 9, 3, 1}};
    int failures = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(C); i++) {
        const struct convolution *c = &C[i];
        const int64_t out = c->H / c->stride;
        const struct shape p = {c->N, c->H * c->H * c->Ci, out * out * c->Co};
        int failed = check(r, &p, run_conv, c);
        failures += failed;
        if (failed) printf("  %s: convolution %zu of the table\n", isa, i);
    }
    return failures;
}

/* Every activation, forward and backward, of a row with one NaN among huge elements. */
static int extremes(struct rig *r, const char *isa)
{
    enum { N = 37, BAD = 18 };
    int failures = 0;
    for (lg_act act = LG_ACT_NONE; act < LG_ACT_COUNT; act++) {
        for (int i = 0; i < N; i++) r->in[i] = (float)(i - BAD) * 1e3f;
        r->in[BAD] = NAN;
        lg_tensor x = lg_t1(r->in, LG_F32, N), y = lg_t1(r->out, LG_F32, N);
        lg_act_forward(r->stream, &(struct lg_act_forward_args){.x = x, .y = y, .act = act});
        bool good = isnan(r->out[BAD]);
        for (int i = 0; i < N; i++) {
            float want = act != LG_ACT_NONE && i < BAD ? 0.0f : r->in[i];
            good = good && (i == BAD || fabsf(r->out[i] - want) <= 1e-30f);
        }
        if (act != LG_ACT_NONE && act != LG_ACT_RELU) {
            lg_tensor dy = lg_t1(r->bias, LG_F32, N);
            lg_act_backward(r->stream,
                            &(struct lg_act_backward_args){.x = x, .dy = dy, .dx = y, .act = act});
            for (int i = 0; i < N; i++) good = good && isnan(r->out[i]) == (i == BAD);
        }
        if (!good) printf("  %s: activation %d\n", isa, (int)act);
        failures += !good;
    }
    return failures;
}

/* Keys beyond k_length hold NaN: without effect. A NaN in a query reaches its own row alone. */
static int masked_keys(struct rig *r, const char *isa)
{
    enum { T = 20, H = 2, D = 12, KEYS = 9, ROW = H * D, BAD = 5 };
    int32_t keys = KEYS;
    float *q = r->in, *k = q + T * ROW, *v = k + T * ROW;
    memcpy(q, r->weights, 3 * T * ROW * sizeof(float));
    for (int i = KEYS * ROW; i < T * ROW; i++) k[i] = v[i] = NAN;
    q[BAD * ROW] = NAN; /* head 0 */
    lg_attention_forward(r->stream,
                         &(struct lg_attention_forward_args){.q = lg_t4(q, LG_F32, 1, T, H, D),
                                                             .k = lg_t4(k, LG_F32, 1, T, H, D),
                                                             .v = lg_t4(v, LG_F32, 1, T, H, D),
                                                             .k_length = lg_t1(&keys, LG_I32, 1),
                                                             .o = lg_t4(r->out, LG_F32, 1, T, H, D),
                                                             .scale = 0.3});
    bool good = true;
    for (int i = 0; i < T * ROW; i++)
        good = good && !isnan(r->out[i]) == !(i / ROW == BAD && i % ROW < D);
    if (!good) printf("  %s: attention\n", isa);
    return !good;
}

static int check_promises(const char *isa)
{
    int failures = 0;
    for (int threads = 1; threads <= 2; threads++) {
        struct rig r;
        open_rig(&r, isa, threads);
        failures +=
            products(&r, isa) + convolutions(&r, isa) + extremes(&r, isa) + masked_keys(&r, isa);
        close_rig(&r);
    }
    return failures;
}

static void promises_hold_on_every_isa(void **state)
{
    for_each_isa(check_promises);
}

/* oneDNN cannot change its instruction set once it is used: the device must say so. */
static void second_isa_is_refused(void **state)
{
    lg_device *first = NULL, *second = NULL;
    struct lg_device_options sse2 = {.isa = "sse2"}, avx2 = {.isa = "avx2"};
    if (!isa_is_here("avx2")) skip();
    assert_int_equal(lg_device_open("host", &sse2, &first), 0);
    assert_int_equal(lg_device_open("host", &avx2, &second), LG_ERR_CONFIG);
    assert_null(second);
    lg_err_clear();
    assert_int_equal(lg_device_open("host", &sse2, &second), 0);
    lg_device_close(&second);
    lg_device_close(&first);
}

static void unknown_isa_is_refused(void **state)
{
    lg_device *d = NULL;
    struct lg_device_options options = {.isa = "mmx"};
    assert_int_equal(lg_device_open("host", &options, &d), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), "mmx"));
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promises_hold_on_every_isa),
        cmocka_unit_test(second_isa_is_refused),
        cmocka_unit_test(unknown_isa_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
