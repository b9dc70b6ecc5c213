/* What ops.c refuses and what it lets pass, dry streams, and opening devices. A refusal is an abort,
 * so each is looked for in a child of its own. */
#include "base/check.h"
#include "kernels/ops.h"
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static lg_device *device;
static lg_stream *stream;
static double memory[4096];

static int open_device(void **state)
{
    if (lg_device_open("ref64", NULL, &device) < 0 || lg_stream_open(device, &stream) < 0) {
        printf("%s\n", lg_err_text());
        return -1;
    }
    return 0;
}

static int close_device(void **state)
{
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}

/* The signal that ends a child which runs the operation; 0: none. */
static int signal_of(void (*operation)(lg_stream *, const void *), const void *args)
{
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (null >= 0) dup2(null, STDERR_FILENO);
        operation(stream, args);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

#define WRAP(op)                                                                                   \
    static void run_##op(lg_stream *s, const void *args)                                           \
    {                                                                                              \
        lg_##op(s, args);                                                                          \
    }
WRAP(linear_forward)
WRAP(act_forward)
WRAP(attention_forward)
WRAP(gate_residual_backward)
WRAP(residual_norm_forward)
WRAP(norm_residual_backward)
WRAP(embedding_forward)
WRAP(conv2d_forward)
WRAP(norm_conv2d_forward)
WRAP(adamw)

#define REFUSED(op, args) assert_int_equal(signal_of(run_##op, &(args)), SIGABRT)
#define ALLOWED(op, args) assert_int_equal(signal_of(run_##op, &(args)), 0)

/* Element `at` of the test's memory as a tensor. */
static lg_tensor m2(int at, int64_t a, int64_t b)
{
    return lg_t2(memory + at, LG_F64, a, b);
}

static void wrong_shapes_and_types(void **state)
{
    const struct lg_linear_forward_args good = {.x = m2(0, 4, 8),
                                                .w = m2(100, 3, 8),
                                                .bias = lg_t1(memory + 200, LG_F64, 3),
                                                .y = m2(300, 4, 3)};
    ALLOWED(linear_forward, good);
    struct lg_linear_forward_args bad = good;
    bad.w.dim[1] = 7;
    REFUSED(linear_forward, bad);
    bad = good, bad.y.dim[0] = 5;
    REFUSED(linear_forward, bad);
    bad = good, bad.x.dtype = LG_F32;
    REFUSED(linear_forward, bad);
    bad = good, bad.x = LG_NONE;
    REFUSED(linear_forward, bad);
    bad = good, bad.x.rank = 3;
    REFUSED(linear_forward, bad);
    bad = good, bad.bias.dim[0] = 4;
    REFUSED(linear_forward, bad);
    bad = good, bad.x.dim[0] = bad.y.dim[0] = 0;
    REFUSED(linear_forward, bad);
    bad = good, bad.pre = m2(400, 4, 3); /* without an activation it would be y */
    REFUSED(linear_forward, bad);
    bad.act = LG_ACT_SILU;
    ALLOWED(linear_forward, bad);
    bad = good, bad.bias = LG_NONE;
    ALLOWED(linear_forward, bad);
}

static lg_tensor m1(int at)
{
    return lg_t1(memory + at, LG_F64, 5);
}

static void overlaps(void **state)
{
    struct lg_act_forward_args act = {.x = m2(0, 4, 8), .y = m2(0, 4, 8), .act = LG_ACT_SILU};
    ALLOWED(act_forward, act);
    act.y.data = memory + 8; /* partly */
    REFUSED(act_forward, act);
    struct lg_linear_forward_args linear = {.x = m2(0, 4, 8), .w = m2(100, 8, 8), .y = m2(0, 4, 8)};
    REFUSED(linear_forward, linear);
    linear.y = m2(32, 4, 8); /* right behind */
    ALLOWED(linear_forward, linear);
    linear.y = m2(31, 4, 8);
    REFUSED(linear_forward, linear);
    const struct lg_adamw_args adamw = {.w = m1(0),
                                        .m = m1(5),
                                        .v = m1(10),
                                        .grad = m1(15),
                                        .w_out = m1(20),
                                        .m_out = m1(25),
                                        .v_out = m1(30),
                                        .working = {m1(35), m1(40)},
                                        .copies = 2,
                                        .t = 1};
    ALLOWED(adamw, adamw);
    for (int at = 0; at < 40; at += 5) {
        struct lg_adamw_args a = adamw;
        a.working[1] = m1(at);
        REFUSED(adamw, a);
    }
}

/* Slices of one buffer lie among each other: allowed while no element is shared. */
static void interleaved_slices(void **state)
{
    enum { B = 2, T = 3, D = 4, STRIDE = 12 };
    struct lg_gate_residual_backward_args a = {.dout = lg_t3(memory, LG_F64, B, T, D),
                                               .y = lg_t3(memory + 100, LG_F64, B, T, D),
                                               .gate = m2(200, B, D),
                                               .dy = lg_t3(memory + 300, LG_F64, B, T, D),
                                               .dgate = m2(200 + D, B, D),
                                               .mod_stride = STRIDE};
    ALLOWED(gate_residual_backward, a);
    a.dgate = m2(200 + STRIDE - 1, B, D); /* its end meets the next row's gate */
    REFUSED(gate_residual_backward, a);
    a.dgate = m2(200 + D - 1, B, D);
    REFUSED(gate_residual_backward, a);
    a.dgate = m2(400, B, D), a.mod_stride = D - 1;
    REFUSED(gate_residual_backward, a);
}

static lg_tensor m3(int at)
{
    return lg_t3(memory + at, LG_F64, 2, 3, 4);
}

/* The second of the two works on the first one's result, and leaves what the first has read. */
static void two_at_once(void **state)
{
    const struct lg_residual_norm_forward_args forward = {
        .residual = {.x = m3(0), .y = m3(24), .out = m3(48)},
        .norm = {.x = m3(48), .y = m3(72), .mean = m2(96, 2, 3), .rstd = m2(102, 2, 3), .eps = 1}};
    ALLOWED(residual_norm_forward, forward);
    struct lg_residual_norm_forward_args f = forward;
    f.norm.x = m3(0);
    REFUSED(residual_norm_forward, f);
    f = forward, f.norm.y = m3(24);
    REFUSED(residual_norm_forward, f);
    f = forward, f.norm.mean = m2(0, 2, 3);
    REFUSED(residual_norm_forward, f);
    const struct lg_norm_residual_backward_args backward = {.norm = {.dy = m3(0),
                                                                     .x = m3(24),
                                                                     .mean = m2(96, 2, 3),
                                                                     .rstd = m2(102, 2, 3),
                                                                     .dx = m3(48)},
                                                            .residual = {.dout = m3(48),
                                                                         .y = m3(120),
                                                                         .gate = m2(144, 2, 4),
                                                                         .dy = m3(72),
                                                                         .dgate = m2(152, 2, 4),
                                                                         .mod_stride = 4}};
    ALLOWED(norm_residual_backward, backward);
    struct lg_norm_residual_backward_args b = backward;
    b.residual.dout = m3(0);
    REFUSED(norm_residual_backward, b);
    b = backward, b.residual.dy = m3(0);
    REFUSED(norm_residual_backward, b);
    b = backward, b.residual.y = m3(48);
    REFUSED(norm_residual_backward, b);
    b = backward, b.residual.dgate = m2(96, 2, 4);
    REFUSED(norm_residual_backward, b);
}

static void conv_asks_for_16_bytes(void **state)
{
    static _Alignas(16) double x[9], w[9], y[10], bias[2];
    struct lg_conv2d_forward_args a = {.x = lg_t4(x, LG_F64, 1, 3, 3, 1),
                                       .w = lg_t4(w, LG_F64, 1, 3, 3, 1),
                                       .bias = lg_t1(bias, LG_F64, 1),
                                       .y = lg_t4(y, LG_F64, 1, 3, 3, 1),
                                       .stride = 1,
                                       .top = 1,
                                       .left = 1,
                                       .bottom = 1,
                                       .right = 1};
    ALLOWED(conv2d_forward, a);
    a.y.data = y + 1;
    REFUSED(conv2d_forward, a);
    a.y.data = y, a.bottom = 0; /* now y is too high */
    REFUSED(conv2d_forward, a);
    static double moments[4];
    a.bottom = 1, a.moments = lg_t3(moments, LG_F64, 1, 1, 2);
    ALLOWED(conv2d_forward, a);
    a.moments.dim[1] = 2; /* of one channel */
    REFUSED(conv2d_forward, a);
    a.moments = lg_t3(y + 4, LG_F64, 1, 1, 2);
    REFUSED(conv2d_forward, a);
}

/* The norm's result may take its input's place, and the moments theirs. */
static void a_norm_then_a_conv(void **state)
{
    static _Alignas(16) double x[9], norm[8], w[18], y[4], moments[4], v[8];
    const struct lg_norm_conv2d_forward_args good = {
        .norm = {.x = lg_t4(x, LG_F64, 1, 2, 2, 2),
                 .moments = lg_t3(moments, LG_F64, 1, 1, 2),
                 .w = lg_t1(v, LG_F64, 2),
                 .b = lg_t1(v + 2, LG_F64, 2),
                 .y = lg_t4(norm, LG_F64, 1, 2, 2, 2),
                 .groups = 1,
                 .eps = 1},
        .conv = {.x = lg_t4(norm, LG_F64, 1, 2, 2, 2),
                 .w = lg_t4(w, LG_F64, 1, 3, 3, 2),
                 .bias = lg_t1(v + 4, LG_F64, 1),
                 .y = lg_t4(y, LG_F64, 1, 2, 2, 1),
                 .moments = lg_t3(moments, LG_F64, 1, 1, 2),
                 .stride = 1,
                 .top = 1,
                 .left = 1,
                 .bottom = 1,
                 .right = 1}};
    ALLOWED(norm_conv2d_forward, good);
    struct lg_norm_conv2d_forward_args a = good;
    a.norm.y.data = a.conv.x.data = x;
    ALLOWED(norm_conv2d_forward, a);
    a = good, a.norm.w.dim[0] = 1; /* what each of the two asks for by itself */
    REFUSED(norm_conv2d_forward, a);
    a = good, a.conv.y.dim[3] = 2;
    REFUSED(norm_conv2d_forward, a);
    a = good, a.norm.x.data = x + 1; /* of 16 bytes, which the norm alone does not ask for */
    REFUSED(norm_conv2d_forward, a);
    a = good, a.conv.x.data = x; /* not what the norm wrote */
    REFUSED(norm_conv2d_forward, a);
    a = good, a.conv.y.data = x; /* a backend reads x while it writes y */
    REFUSED(norm_conv2d_forward, a);
    a = good, a.conv.moments.data = x;
    REFUSED(norm_conv2d_forward, a);
    a = good, a.conv.moments.data = moments + 1;
    REFUSED(norm_conv2d_forward, a);
    a = good, a.norm.y.data = a.conv.x.data = w;
    REFUSED(norm_conv2d_forward, a);
}

static void contents(void **state)
{
    int32_t ids[2] = {0, 5}, length[1] = {0};
    struct lg_embedding_forward_args e = {
        .ids = lg_t1(ids, LG_I32, 2), .table = m2(0, 6, 3), .y = m2(100, 2, 3)};
    ALLOWED(embedding_forward, e);
    ids[1] = 6;
    REFUSED(embedding_forward, e);
    ids[1] = -1;
    REFUSED(embedding_forward, e);
    struct lg_attention_forward_args a = {.q = lg_t4(memory, LG_F64, 1, 2, 1, 4),
                                          .k = lg_t4(memory + 100, LG_F64, 1, 2, 1, 4),
                                          .v = lg_t4(memory + 200, LG_F64, 1, 2, 1, 4),
                                          .q_stride = 4,
                                          .kv_stride = 4,
                                          .k_length = lg_t1(length, LG_I32, 1),
                                          .o = lg_t4(memory + 300, LG_F64, 1, 2, 1, 4),
                                          .scale = 1};
    REFUSED(attention_forward, a);
    length[0] = 2;
    ALLOWED(attention_forward, a);
}

/* Shapes are checked, pointers are not looked at, nothing runs. */
static void dry_streams(void **state)
{
    lg_stream *dry;
    assert_int_equal(lg_stream_open_dry(device, &dry), 0);
    assert_true(lg_stream_is_dry(dry) && lg_stream_device(dry) == device);
    lg_linear_forward(dry, &(struct lg_linear_forward_args){.x = lg_t2(NULL, LG_F64, 4, 8),
                                                            .w = lg_t2(NULL, LG_F64, 3, 8),
                                                            .y = lg_t2(NULL, LG_F64, 4, 3)});
    lg_stream_zero(dry, NULL, 100);
    lg_stream_sync(dry);
    assert_int_equal(lg_stream_scratch_need(dry), 0); /* ref64 needs none */
    lg_stream_close(&dry);
    assert_null(dry);
    lg_stream_close(&dry);
}

static void device_memory(void **state)
{
    lg_device *d;
    void *a, *b;
    assert_int_equal(lg_device_open("ref64", NULL, &d), 0);
    assert_int_equal(lg_device_alloc(d, 1000, &a), 0);
    assert_int_equal(lg_device_alloc(d, 0, &b), 0);
    assert_true((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0);
    for (int i = 0; i < 1000; i++) assert_int_equal(((char *)a)[i], 0);
    lg_device_free(d, &a);
    assert_null(a);
    lg_device_free(d, &a);
    assert_int_equal(lg_device_alloc(d, (size_t)-1, &a), LG_ERR_NOSPACE);
    lg_err_clear();
    lg_device_close(&d); /* frees b; a sanitizer build would tell */
    assert_null(d);
}

static void wrong_devices(void **state)
{
    static const char *const NAMES[] = {
        "gpu", "", "hos", "cuda:", "cuda:x", "cuda:-1", "cuda:4096", "ref64:1"};
    lg_device *d = NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(NAMES); i++) {
        if (lg_device_open(NAMES[i], NULL, &d) != LG_ERR_CONFIG)
            fail_msg("\"%s\": %s", NAMES[i], lg_err_text());
        assert_null(d);
    }
    /* The message of the backend itself arrives. */
    assert_non_null(strstr(lg_err_message(), "ref64:1"));
    assert_int_equal(setenv("LG_BACKEND_DIR", "/nonexistent", 1), 0);
    assert_int_equal(lg_device_open("ref64", NULL, &d), LG_ERR_NOTFOUND);
    assert_non_null(strstr(lg_err_message(), "/nonexistent"));
    assert_int_equal(unsetenv("LG_BACKEND_DIR"), 0);
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_shapes_and_types),
        cmocka_unit_test(overlaps),
        cmocka_unit_test(interleaved_slices),
        cmocka_unit_test(two_at_once),
        cmocka_unit_test(conv_asks_for_16_bytes),
        cmocka_unit_test(a_norm_then_a_conv),
        cmocka_unit_test(contents),
        cmocka_unit_test(dry_streams),
        cmocka_unit_test(device_memory),
        cmocka_unit_test(wrong_devices),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
