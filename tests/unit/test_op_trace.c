/* What a trace says of the operations that have run. */
#include "base/check.h"
#include "base/fs.h"
#include "kernels/op_trace.h"
#include "kernels/ops.h"
#include "tests/unit/scratch.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static lg_device *device;
static lg_stream *stream;
static char *text; /* of the trace so far */
static _Alignas(64) char scratch[1 << 20];

static int setup(void **state)
{
    (void)state;
    scratch_make();
    setenv("LG_TRACE_OPS", scratch_path("trace"), 1);
    assert_int_equal(lg_device_open("host", NULL, &device), 0);
    assert_int_equal(lg_stream_open(device, &stream), 0);
    lg_stream_set_scratch(stream, scratch, sizeof scratch);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(text);
    lg_stream_close(&stream);
    lg_device_close(&device);
    scratch_remove();
    return 0;
}

/* The trace's last line. */
static const char *last_line(void)
{
    char name[64];
    size_t bytes;
    free(text);
    snprintf(name, sizeof name, "trace.%d", (int)getpid());
    assert_int_equal(lg_read_file(scratch_path(name), 1 << 20, &text, &bytes), 0);
    assert_true(bytes > 0 && text[bytes - 1] == '\n');
    text[bytes - 1] = 0;
    const char *line = strrchr(text, '\n');
    return line ? line + 1 : text;
}

static float *memory(size_t bytes)
{
    void *p;
    assert_int_equal(lg_device_alloc(device, bytes, &p), 0);
    return p;
}

/* Buffers are numbered in the order of their allocation; what is freed is forgotten, and its number with it. */
static void test_places(void **state)
{
    (void)state;
    float *a = memory(4096), *b = memory(4096);
    struct lg_mul_forward_args call = {.a = lg_t2(a, LG_F32, 2, 3),
                                       .b = lg_t1(a + 16, LG_F32, 6),
                                       .y = lg_t2(b + 32, LG_F32, 3, 2)};
    lg_mul_forward(stream, &call);
    assert_string_equal(last_line(), "mul_forward | a f32 2,3 memory.0+0 | b f32 6 memory.0+64"
                                     " | y f32 3,2 memory.1+128");
    lg_device_free(device, (void **)&a);
    a = memory(4096);
    call.a.data = call.b.data = a;
    lg_mul_forward(stream, &call);
    assert_string_equal(last_line(), "mul_forward | a f32 2,3 memory.2+0 | b f32 6 memory.2+0"
                                     " | y f32 3,2 memory.1+128");
    lg_device_free(device, (void **)&a);
    lg_device_free(device, (void **)&b);
}

/* A region goes by its name, whatever its address. */
static void test_regions(void **state)
{
    (void)state;
    int fd = memfd_create("trainer/0/working", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, 8192) == 0);
    char *at = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(at != MAP_FAILED);
    lg_cast(stream,
            &(struct lg_cast_args){.x = lg_t1(at + 4096, LG_F32, 3), .y = lg_t1(at, LG_BF16, 3)});
    assert_string_equal(last_line(),
                        "cast | x f32 3 trainer/0/working+4096 | y bf16 3 trainer/0/working+0");
    munmap(at, 8192);
    close(fd);
}

/* Scalars of every kind, strides, arrays, parts, absent tensors. */
static void test_words(void **state)
{
    (void)state;
    float *m = memory(1 << 16);
    lg_linear_forward(stream, &(struct lg_linear_forward_args){.x = lg_t2(m, LG_F32, 2, 3),
                                                               .w = lg_t2(m + 16, LG_F32, 4, 3),
                                                               .y = lg_t2(m + 32, LG_F32, 2, 4),
                                                               .act = LG_ACT_RELU});
    assert_string_equal(last_line(),
                        "linear_forward act=3 | x f32 2,3 memory.3+0 | w f32 4,3/3 "
                        "memory.3+64 | bias - | residual - | y f32 2,4 memory.3+128 | pre -");
    lg_combine(stream,
               &(struct lg_combine_args){.x = {lg_t1(m, LG_F32, 3), lg_t1(m + 16, LG_F32, 3)},
                                         .c = {0.1, -2},
                                         .count = 2,
                                         .y = lg_t1(m, LG_F32, 3)});
    assert_non_null(
        strstr(last_line(), "combine c=0.10000000000000001,-2,0,0 count=2 | x[0] f32 3 "));
    assert_non_null(strstr(text, " | x[1] f32 3 "));
    lg_residual_norm_forward(
        stream, &(struct lg_residual_norm_forward_args){
                    .residual = {.x = lg_t3(m, LG_F32, 2, 2, 4),
                                 .y = lg_t3(m + 64, LG_F32, 2, 2, 4),
                                 .gate = lg_slice(lg_t2(m + 128, LG_F32, 2, 12), 1, 0, 4),
                                 .out = lg_t3(m, LG_F32, 2, 2, 4)},
                    .norm = {.x = lg_t3(m, LG_F32, 2, 2, 4),
                             .y = lg_t3(m + 256, LG_F32, 2, 2, 4),
                             .mean = lg_t2(m + 320, LG_F32, 2, 2),
                             .rstd = lg_t2(m + 384, LG_F32, 2, 2),
                             .eps = 1e-6}});
    assert_non_null(
        strstr(last_line(), "residual_norm_forward norm.eps=9.9999999999999995e-07 norm.rms=0 | "));
    assert_non_null(strstr(text, " | residual.gate f32 2,4/12 "));
    assert_non_null(strstr(text, " | norm.shift - | "));
    lg_device_free(device, (void **)&m);
}

/* A dry stream runs nothing, so there is nothing to record. */
static void test_dry(void **state)
{
    (void)state;
    lg_stream *dry;
    char *before = strdup(last_line());
    assert_int_equal(lg_stream_open_dry(device, &dry), 0);
    lg_act_forward(dry, &(struct lg_act_forward_args){.x = lg_t1(NULL, LG_F32, 3),
                                                      .y = lg_t1(NULL, LG_F32, 3),
                                                      .act = LG_ACT_SILU});
    assert_string_equal(last_line(), before);
    lg_stream_close(&dry);
    free(before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_regions),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_dry),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
