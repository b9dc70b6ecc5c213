/* Devices: opening them, their memory, dry streams, and the contents of tensors that a kernel refuses. A
 * refusal is an abort, so each is looked for in a child of its own. */
#include "base/check.h"
#include "base/room.h"
#include "kernels/backend.h"
#include "kernels/ops.h"
#include "tests/unit/ref64_fixture.h"
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

static double memory[4096];

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
        operation(g_stream, args);
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
WRAP(attention_forward)
WRAP(embedding_forward)

#define REFUSED(op, args) assert_int_equal(signal_of(run_##op, &(args)), SIGABRT)
#define ALLOWED(op, args) assert_int_equal(signal_of(run_##op, &(args)), 0)

/* Element `at` of the test's memory as a tensor. */
static lg_tensor m2(int at, int64_t a, int64_t b)
{
    return lg_t2(memory + at, LG_F64, a, b);
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
    assert_int_equal(lg_stream_open_dry(g_device, &dry), 0);
    assert_true(lg_stream_is_dry(dry) && lg_stream_device(dry) == g_device);
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

/* Others hold what they are about to give back. */
static int (*roomy)(lg_device *, size_t, void **);
static int without_room;
static int crowded(lg_device *d, size_t bytes, void **ret)
{
    if (without_room-- <= 0) return roomy(d, bytes, ret);
    return LG_FAIL(LG_ERR_NOSPACE, "others have it");
}

static void room_that_comes(void **state)
{
    lg_device *d;
    void *a;
    assert_int_equal(lg_device_open("ref64", NULL, &d), 0);
    roomy = d->alloc;
    d->alloc = crowded;
    without_room = 3;
    assert_int_equal(lg_device_alloc(d, 1000, &a), 0);
    assert_true(((char *)a)[999] == 0 && without_room == -1);
    without_room = 1000;
    assert_int_equal(lg_device_alloc(d, 1000, &a), LG_ERR_NOSPACE);
    assert_non_null(strstr(lg_err_message(), "others have it"));
    lg_err_clear();
    lg_device_close(&d);
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
    lg_room_wait_ms = 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contents),      cmocka_unit_test(dry_streams),
        cmocka_unit_test(device_memory), cmocka_unit_test(room_that_comes),
        cmocka_unit_test(wrong_devices),
    };
    return cmocka_run_group_tests(tests, ref64_open, ref64_close);
}
