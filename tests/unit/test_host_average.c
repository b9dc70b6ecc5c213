/* Averages in host memory (stages/ema/host_average.h): the bytes of the operation on the whole, on the host and on a
 * stand-in for a GPU that does everything as late as it may (tests/stub/late.h), where a place that is used again too
 * early would be seen. */
#include "base/check.h"
#include "base/fs.h"
#include "kernels/ops.h"
#include "stages/ema/host_average.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { COUNT = (18 << 20) + 77 }; /* five pieces, the last a short one; two pinned ones */

static void use_stub(void)
{
    char here[LG_PATH_BYTES], path[LG_PATH_BYTES];
    assert_int_equal(lg_program_dir(here), 0);
    assert_int_equal(lg_path(path, "%s/stub", here), 0);
    setenv("LG_BACKEND_DIR", path, 1);
    assert_int_equal(lg_path(path, "%s/../lib/liblg-host.so", here), 0);
    setenv("LG_STUB_HOST", path, 1);
    setenv("LG_STUB_MEMORY", "1", 1);
    setenv("LG_STUB_LATE", "1", 1);
}

static float *values(float scale)
{
    float *v = malloc(COUNT * sizeof *v);
    assert_non_null(v);
    for (size_t i = 0; i < COUNT; i++) v[i] = scale * (float)(i % 100003);
    return v;
}

/* Pinned until the process ends, and so never given back. */
static float *side(void)
{
    void *at = mmap(NULL, COUNT * sizeof(float), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    return at;
}

/* host: makes what is expected; prepared: so many pieces are pinned before, of each side two. */
static void average(lg_device *host, lg_device *d, int prepared)
{
    lg_stream *s, *plain;
    lg_host_average *a;
    float *w = values(0.5f), *sides[] = {side(), side()}, *on;
    float *whole = values(-0.25f);
    assert_int_equal(lg_stream_open(host, &plain), 0);
    assert_int_equal(lg_stream_open(d, &s), 0);
    assert_int_equal(lg_device_alloc(d, COUNT * sizeof *w, (void **)&on), 0);
    lg_stream_upload(s, on, w, COUNT * sizeof *w);
    lg_stream_sync(s);
    assert_int_equal(lg_host_average_open(d, sides, COUNT, &a), 0);
    for (int i = 0; i < prepared; i++)
        assert_int_equal(lg_host_average_prepare(a), i < 4); /* then nothing is left */

    assert_int_equal(lg_host_average_take(a, on, 1), 0);
    lg_host_average_sync(a);
    assert_memory_equal(sides[1], w, COUNT * sizeof *w);

    memcpy(sides[1], whole, COUNT * sizeof *w);
    assert_int_equal(lg_host_average_make(a, on, 0, 0.9), 0);
    lg_host_average_sync(a);
    assert_memory_equal(sides[1], whole, COUNT * sizeof *w);
    const lg_tensor t = lg_t1(whole, LG_F32, COUNT);
    lg_ema(plain,
           &(struct lg_ema_args){.ema = t, .w = lg_t1(w, LG_F32, COUNT), .out = t, .decay = 0.9});
    lg_stream_sync(plain);
    assert_memory_equal(sides[0], whole, COUNT * sizeof *w);

    assert_int_equal(lg_host_average_prepare(a), 0); /* each was wanted */

    lg_host_average_close(&a);
    lg_stream_close(&s);
    lg_stream_close(&plain);
    free(w);
    free(whole);
}

static void test_averages(void **state)
{
    lg_device *host, *late;
    (void)state;
    assert_int_equal(lg_device_open("host", NULL, &host), 0);
    average(host, host, 0);
    use_stub();
    assert_int_equal(lg_device_open("cuda:0", NULL, &late), 0);
    average(host, late, 0);
    average(host, late, 3);
    average(host, late, 6);
    lg_device_close(&late);
    lg_device_close(&host);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_averages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
