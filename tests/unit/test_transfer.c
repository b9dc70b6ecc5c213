/* Pieces between host and device (stages/trainer/transfer.h): on the host, where a copy is done at once, and on a stand-in
 * for a GPU that does everything as late as it may (tests/stub/late.h). Between the two no place can be used too early
 * or given away too soon without being seen. */
#include "base/check.h"
#include "base/fs.h"
#include "kernels/ops.h"
#include "stages/trainer/moments.h"
#include "stages/trainer/transfer.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { SHARD = 16 * 5 * 4096 + 77 };

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

static void test_pieces(void **state)
{
    (void)state;
    static const size_t shards[] = {0, 1, 4096, 70000, SHARD, 10000019, (size_t)3 << 30};
    for (size_t i = 0; i < LG_ARRAY_LEN(shards); i++) {
        const struct lg_transfer_bytes b = lg_transfer_bytes_of(shards[i]);
        const size_t chunk = lg_moments_chunk_count(shards[i]), piece = b.device / sizeof(float);
        assert_true(piece % LG_TRANSFER_ALIGN == 0 && piece <= LG_TRANSFER_PIECE_MAX);
        assert_true(piece == LG_TRANSFER_PIECE_MAX || piece * LG_TRANSFER_PIECES >= chunk);
        assert_true(piece * LG_TRANSFER_PIECES <= chunk); /* several, even of the smallest chunk */
        assert_int_equal(b.host, 4 * b.device);
    }
}

/* A shard comes down piece by piece as an update takes it, is changed, and goes up. */
static void round_trip(lg_device *d)
{
    lg_stream *compute;
    lg_transfer *f;
    float *from, *to;
    float *values = calloc(SHARD, sizeof *values), *got = calloc(SHARD, sizeof *got);
    assert_true(values && got);
    for (size_t i = 0; i < SHARD; i++) values[i] = (float)i;
    assert_int_equal(lg_device_alloc(d, SHARD * sizeof *from, (void **)&from), 0);
    assert_int_equal(lg_device_alloc(d, SHARD * sizeof *to, (void **)&to), 0);
    assert_int_equal(lg_stream_open(d, &compute), 0);
    assert_int_equal(lg_transfer_open(d, compute, SHARD, &f), 0);
    lg_stream_upload(compute, from, values, SHARD * sizeof *from);
    lg_stream_sync(compute);
    const size_t piece = lg_transfer_piece(f);
    lg_transfer_call(f, from, piece);
    for (size_t at = 0, n; at < SHARD; at += n) {
        n = LG_MIN(piece, SHARD - at);
        const float *down = lg_transfer_take(f);
        if (at + n < SHARD) lg_transfer_call(f, from + at + n, LG_MIN(piece, SHARD - at - n));
        float *up = lg_transfer_load(f);
        for (size_t i = 0; i < n; i++) up[i] = 2 * down[i];
        const float *staged = lg_transfer_send(f, n);
        lg_cast(compute, &(struct lg_cast_args){.x = lg_t1((void *)staged, LG_F32, (int64_t)n),
                                                .y = lg_t1(to + at, LG_F32, (int64_t)n)});
    }
    lg_stream_download(compute, got, to, SHARD * sizeof *got);
    lg_stream_sync(compute);
    for (size_t i = 0; i < SHARD; i++)
        if (got[i] != 2 * values[i]) fail_msg("element %zu is %g", i, (double)got[i]);
    lg_transfer_close(&f);
    assert_null(f);
    lg_stream_close(&compute);
    lg_device_close(&d);
    free(values);
    free(got);
}

static void test_at_once(void **state)
{
    (void)state;
    lg_device *d;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    round_trip(d);
}

static void test_late(void **state)
{
    (void)state;
    lg_device *d;
    use_stub();
    assert_int_equal(lg_device_open("cuda:0", NULL, &d), 0);
    assert_false(lg_device_is_host(d));
    round_trip(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_at_once),
        cmocka_unit_test(test_late),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
