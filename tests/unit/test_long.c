/* Sequences so long that a tensor has more than 2^31 elements (1.5 million tokens of width 2048): what an operation of the
 * host computes at its end is what it computes of a short one. No machine of the tests has that memory: rows that lie
 * far apart touch few pages, and a tensor without gaps is the same few pages over and over, but for its end. Around it
 * nothing is mapped, so that an offset that was cut to 32 bits meets nothing, or does not come to the end. */
#include "base/check.h"
#include "kernels/ops.h"
#include "stages/nets/denoiser.h"
#include "tests/unit/denoiser_fixture.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

enum { WINDOW = 32 << 20, D = 2048, SHORT = 40, SCRATCH = 64 << 20 };
static const size_t AROUND = (size_t)20 << 30;
static const int64_t LONG = (1 << 20) + 4096 / 4; /* tokens: 2^31 elements and more */
static const int64_t FAR =
    1200000000; /* elements from one row to the next; two are more than 2^31 */

static lg_device *g_device;
static lg_stream *g_stream;

static char *reserve(size_t bytes)
{
    char *at = mmap(NULL, bytes + 2 * AROUND, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(at != MAP_FAILED);
    return at + AROUND;
}

static void give_back(void *at, size_t bytes)
{
    munmap((char *)at - AROUND, bytes + 2 * AROUND);
}

/* Pages that are there when they are touched. */
static float *sparse(size_t elements)
{
    char *at = reserve(elements * sizeof(float));
    assert_int_equal(mprotect(at, elements * sizeof(float), PROT_READ | PROT_WRITE), 0);
    return (float *)(void *)at;
}

/* One window over and over; the last two, as far as they are needed, are their own. */
static float *folded(size_t elements)
{
    const size_t bytes = (elements * sizeof(float) + WINDOW - 1) / WINDOW * WINDOW;
    char *at = reserve(bytes);
    int fd = memfd_create("folded", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, 3 * (off_t)WINDOW) == 0);
    for (size_t to = 0; to < bytes; to += WINDOW) {
        const off_t from = to + 2 * WINDOW < bytes ? 0 : to + WINDOW < bytes ? WINDOW : 2 * WINDOW;
        assert_true(mmap(at + to, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                         from) != MAP_FAILED);
    }
    close(fd);
    return (float *)(void *)at;
}

static void fill(float *to, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) to[i] = scale * (float)((int)(i * 2654435761u % 2001) - 1000);
}

/* ---- rows far apart ---- */

static void test_rows(void **state)
{
    (void)state;
    enum { N = 96 };
    float *x = sparse(3 * (size_t)FAR), *y = sparse(3 * (size_t)FAR);
    for (int r = 0; r < 3; r++) fill(x + r * FAR, N, (float)(r + 1));
    lg_tensor from = lg_t2(x, LG_F32, 3, N), to = lg_t2(y, LG_F32, 3, N);
    from.stride[0] = to.stride[0] = FAR;
    lg_copy_rows(g_stream, &(struct lg_copy_rows_args){.x = from, .y = to});
    lg_stream_sync(g_stream);
    for (int r = 0; r < 3; r++) assert_memory_equal(x + r * FAR, y + r * FAR, N * sizeof *x);
    give_back(x, 3 * (size_t)FAR * sizeof *x);
    give_back(y, 3 * (size_t)FAR * sizeof *y);
}

/* Of queries, keys and values, too, that lie in wider rows. */
static void test_products(void **state)
{
    (void)state;
    enum { M = 5, N = 3, K = 32 };
    float *w = sparse((N + 1) * (size_t)FAR), near[N * K], x[M * K], y[M * N], want[M * N];
    float o[2][N * K];
    fill(x, M * K, 1e-3f);
    for (int r = 0; r < N; r++) {
        fill(w + r * FAR, K, 1e-3f * (float)(r + 1));
        memcpy(near + r * K, w + r * FAR, K * sizeof *w);
    }
    lg_tensor far = lg_t2(w, LG_F32, N, K);
    far.stride[0] = FAR;
    struct lg_linear_forward_args product = {
        .x = lg_t2(x, LG_F32, M, K), .w = far, .y = lg_t2(y, LG_F32, M, N)};
    lg_linear_forward(g_stream, &product);
    product.w = lg_t2(near, LG_F32, N, K);
    product.y = lg_t2(want, LG_F32, M, N);
    lg_linear_forward(g_stream, &product);
    lg_stream_sync(g_stream);
    for (int i = 0; i < M * N; i++) assert_float_equal(y[i], want[i], 1e-5);

    for (int is_near = 0; is_near < 2; is_near++) {
        lg_tensor q = lg_t4(is_near ? near : w, LG_F32, 1, N, 2, K / 2);
        if (!is_near) q.stride[1] = FAR, q.stride[0] = N * FAR;
        lg_attention_forward(g_stream, &(struct lg_attention_forward_args){
                                           .q = q,
                                           .k = q,
                                           .v = q,
                                           .o = lg_t4(o[is_near], LG_F32, 1, N, 2, K / 2),
                                           .scale = 0.25});
    }
    lg_stream_sync(g_stream);
    assert_memory_equal(o[0], o[1], sizeof o[0]);
    give_back(w, (N + 1) * (size_t)FAR * sizeof *w);
}

/* ---- tensors without gaps ---- */

/* The last tokens of a long sequence, which see nothing of the others. */
static void test_ends(void **state)
{
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    skip(); /* what it keeps of each byte is folded nowhere */
#endif
    const size_t all = (size_t)LONG * D, end = all - (size_t)SHORT * D;
    float *x = folded(all), *y = folded(all), *want = malloc((size_t)SHORT * D * sizeof *want);
    float gate[D];
    LG_ASSERT(want);
    fill(y, WINDOW / sizeof *y, -2e-3f);
    fill(x + end, (size_t)SHORT * D, 2e-3f);
    fill(y + end, (size_t)SHORT * D, 3e-3f);
    fill(gate, D, 1e-3f);
    struct lg_gate_residual_forward_args a = {.x = lg_t3(x + end, LG_F32, 1, SHORT, D),
                                              .y = lg_t3(y + end, LG_F32, 1, SHORT, D),
                                              .gate = lg_t2(gate, LG_F32, 1, D),
                                              .out = lg_t3(want, LG_F32, 1, SHORT, D)};
    lg_gate_residual_forward(g_stream, &a);
    lg_stream_sync(g_stream);
    a.x = a.out = lg_t3(x, LG_F32, 1, LONG, D);
    a.y = lg_t3(y, LG_F32, 1, LONG, D);
    lg_gate_residual_forward(g_stream, &a);
    lg_stream_sync(g_stream);
    assert_memory_equal(x + end, want, (size_t)SHORT * D * sizeof *x);
    free(want);
    give_back(x, all * sizeof *x);
    give_back(y, all * sizeof *y);
}

/* ---- plans ---- */

/* 3 million tokens in one picture and in a clip, whose attention is factorised: shapes, places and bytes. */
static void test_plans(void **state)
{
    (void)state;
    struct lg_denoiser_config dit = denoiser_fixture_dit(), latte = denoiser_fixture_latte();
    struct lg_denoiser_bytes b;
    const struct lg_denoiser_mode mode = {
        .batch = 1, .train = true, .recompute = (const char *const[]){"block", NULL}};
    dit.patch = 2;
    dit.hidden = latte.hidden = 2048;
    dit.heads = latte.heads = 32;
    dit.height = dit.width = 3464; /* 1732 x 1732 patches */
    latte.frames = 128;
    latte.height = latte.width = 308; /* 128 frames of 154 x 154 */
    struct lg_denoiser_config *nets[] = {&dit, &latte};
    for (size_t i = 0; i < LG_ARRAY_LEN(nets); i++) {
        const int patch = nets[i]->patch;
        const double tokens = (double)lg_denoiser_frames(nets[i]) * (nets[i]->height / patch) *
                              (nets[i]->width / patch);
        assert_true(tokens >= 2.99e6);
        if (lg_denoiser_plan(g_device, nets[i], &mode, &b) < 0) fail_msg("%s", lg_err_text());
        assert_true((double)b.activations > 4 * tokens * 2048 * sizeof(float)); /* some streams */
        assert_true((double)b.activations < 400 * tokens * 2048 * sizeof(float));
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    LG_ASSERT(lg_device_open("host", &(struct lg_device_options){.threads = 2}, &g_device) == 0);
    LG_ASSERT(lg_stream_open(g_device, &g_stream) == 0);
    void *scratch = aligned_alloc(64, SCRATCH);
    LG_ASSERT(scratch);
    lg_stream_set_scratch(g_stream, scratch, SCRATCH);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_products),
                                       cmocka_unit_test(test_ends), cmocka_unit_test(test_plans)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    lg_stream_close(&g_stream);
    lg_device_close(&g_device);
    free(scratch);
    return failed;
}
