/* How fast a rank of a split sequence gives others their part (kernels/graph/exchange.h): the copies of Ulysses, written by the
 * first GPU into memory of the last one that is there (its own, where there is one GPU), in bf16.
 *
 * usage: bench_exchange_cuda [BATCH TOKENS HEADS D] ...      (1 33124 32 64  and  512 64 8 64; of two ranks)
 *
 * Prints for q, k and v of own tokens -> own heads, and for the result's way back: MB, ms, GB/s (bytes that arrive). */
#include "base/clock.h"
#include "kernels/graph/exchange.h"
#include "tests/gpu/gpu_test.h"
#include <unistd.h>

enum { CALLS = 20, RANKS = 2 };
static lg_device *device;
static lg_stream *stream;
static int last_gpu;

static void *theirs(size_t bytes)
{
    int fd;
    void *at;
    gpu_need(lg_device_share(device, last_gpu, bytes, &fd));
    gpu_need(lg_device_map(device, fd, bytes, &at));
    close(fd);
    return at;
}

static void measure(const char *what, const struct lg_sent *x)
{
    const double bytes = (double)lg_tensor_bytes(&x->from);
    lg_send(stream, *x);
    lg_stream_sync(stream);
    const int64_t begin = lg_now_ns();
    for (int i = 0; i < CALLS; i++) lg_send(stream, *x);
    lg_stream_sync(stream);
    const double ms = (double)(lg_now_ns() - begin) * 1e-6 / CALLS;
    printf("  %-28s %8.1f MB %8.3f ms %6.0f GB/s\n", what, bytes * 1e-6, ms, bytes / ms * 1e-6);
}

/* Rows (B, own tokens, n, heads, d) before, (B, tokens, n, own heads, d) afterwards. */
static void bench(int64_t B, int64_t T, int64_t H, int64_t d)
{
    const int64_t own = T / RANKS, heads = H / RANKS;
    printf("batch %lld, %lld tokens, %lld heads of %lld, %d ranks, GPU 0 to %d\n", (long long)B,
           (long long)T, (long long)H, (long long)d, RANKS, last_gpu);
    for (int64_t n = 3; n >= 1; n -= 2) { /* q, k and v; the result */
        const int64_t tokens[] = {B, own, n, H, d}, all[] = {B, T, n, heads, d};
        const size_t bytes =
            (size_t)(B * LG_MAX(own * H, T * heads) * n * d) * lg_dtype_bytes(LG_BF16);
        void *mine, *at = theirs(bytes);
        gpu_need(lg_device_alloc(device, bytes, &mine));
        const struct lg_sent there = {
            .from = lg_slice(lg_tensor_of(mine, LG_BF16, 5, tokens), 3, heads, heads),
            .to = lg_slice(lg_tensor_of(at, LG_BF16, 5, all), 1, 0, own)};
        const struct lg_sent back = {
            .from = lg_slice(lg_tensor_of(mine, LG_BF16, 5, all), 1, own, own),
            .to = lg_slice(lg_tensor_of(at, LG_BF16, 5, tokens), 3, 0, heads)};
        measure(n == 3 ? "queries, keys, values" : "the result's gradient", &there);
        measure(n == 3 ? "their gradients" : "the result", &back);
        lg_device_free(device, &mine);
        lg_device_unmap(device, at, bytes);
    }
}

int main(int argc, char **argv)
{
    static const char *const usual[] = {"1", "33124", "32", "64", "512", "64", "8", "64"};
    const char *const *shape = argc > 1 ? (const char *const *)argv + 1 : usual;
    const int n = argc > 1 ? argc - 1 : (int)LG_ARRAY_LEN(usual);
    lg_device *second;
    device = gpu_open("cuda:0", "bf16");
    if (lg_device_open("cuda:1", NULL, &second) == 0) {
        last_gpu = 1;
        lg_device_close(&second);
    } else {
        lg_err_clear();
    }
    gpu_need(lg_stream_open(device, &stream));
    for (int i = 0; i + 4 <= n; i += 4)
        bench(atoll(shape[i]), atoll(shape[i + 1]), atoll(shape[i + 2]), atoll(shape[i + 3]));
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}
