/* Times attention alone, forward and backward, in bf16, from q, k and v in one buffer, or to K others.
 *
 * usage: bench_attention_cuda [d T[xK] B H ...]      (of PixArt, DiT, LTX, SD3.5 and FLUX, and to the texts of LTX, PixArt and SDXL)
 *
 * Prints for each shape milliseconds a call (median of 7 rounds of 10) and TFLOP/s: of the forward 4 B H T K d, of the
 * backward 10, which is what it takes beyond the forward's time, of both 14. From 512 tokens on with o_low, as a step
 * does it (kernels/graph/grad.c), unless NO_O_LOW is set. For the path of another GPU set LG_CUDA_CAPABILITY. */
#include "base/clock.h"
#include "kernels/graph/grad.h"
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { ROUNDS = 7, CALLS = 10 };
static lg_device *device;
static lg_stream *stream;

static lg_tensor noise(int64_t rows, int64_t columns, uint32_t seed)
{
    size_t n = (size_t)(rows * columns);
    uint16_t *v = malloc(n * sizeof *v);
    void *p;
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = (uint16_t)((seed >> 16 & 0x80ff) | 0x3f00); /* +-0.5 to 2 */
    }
    gpu_need(lg_device_alloc(device, n * sizeof *v, &p));
    lg_stream_upload(stream, p, v, n * sizeof *v);
    lg_stream_sync(stream);
    free(v);
    return lg_t2(p, LG_BF16, rows, columns);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void enqueue(lg_stream *s, const struct lg_attention_backward_args *a, bool backward)
{
    lg_attention_forward(s, &(struct lg_attention_forward_args){.q = a->q,
                                                                .k = a->k,
                                                                .v = a->v,
                                                                .o = a->o,
                                                                .lse = a->lse,
                                                                .o_low = a->o_low,
                                                                .scale = a->scale});
    if (backward) lg_attention_backward(s, a);
}

/* Milliseconds of a forward, or of that and a backward. */
static double time_of(const struct lg_attention_backward_args *a, bool backward)
{
    double ms[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) { /* the first is to warm up */
        int64_t began = lg_now_ns();
        for (int k = 0; k < CALLS; k++) enqueue(stream, a, backward);
        lg_stream_sync(stream);
        if (i >= 0) ms[i] = (double)(lg_now_ns() - began) * 1e-6 / CALLS;
    }
    qsort(ms, ROUNDS, sizeof *ms, by_size);
    return ms[ROUNDS / 2];
}

static lg_tensor heads(lg_tensor t, int64_t T, int64_t H, int64_t d, int i)
{
    return lg_split(lg_split(lg_slice(t, 1, i * H * d, H * d), 1, d), 0, T);
}

static void bench(int64_t d, const char *tokens, int64_t B, int64_t H)
{
    const char *x = strchr(tokens, 'x');
    const int64_t T = atoll(tokens), K = x ? atoll(x + 1) : T;
    int64_t rows = B * T, D = H * d;
    lg_tensor kv = noise(B * K, 2 * D, 7), dkv = noise(B * K, 2 * D, 8);
    lg_tensor qkv = noise(rows, 3 * D, 1), dqkv = noise(rows, 3 * D, 2), o = noise(rows, D, 3);
    lg_tensor dout = noise(rows, D, 4), lse = noise(rows * H, 2, 5), low = noise(rows, D, 6);
    struct lg_attention_backward_args a = {.dout = heads(dout, T, H, d, 0),
                                           .o = heads(o, T, H, d, 0),
                                           .q = heads(qkv, T, H, d, 0),
                                           .k = heads(qkv, T, H, d, 1),
                                           .v = heads(qkv, T, H, d, 2),
                                           .lse = lg_t3(lse.data, LG_F32, B, H, T),
                                           .dq = heads(dqkv, T, H, d, 0),
                                           .dk = heads(dqkv, T, H, d, 1),
                                           .dv = heads(dqkv, T, H, d, 2),
                                           .scale = 1 / sqrt((double)d)};
    if (x) {
        a.k = heads(kv, K, H, d, 0), a.v = heads(kv, K, H, d, 1);
        a.dk = heads(dkv, K, H, d, 0), a.dv = heads(dkv, K, H, d, 1);
    }
    if (T >= LG_GRAD_MANY_TOKENS && K >= LG_GRAD_MANY_TOKENS && !getenv("NO_O_LOW"))
        a.o_low = heads(low, T, H, d, 0);
    lg_stream *dry;
    gpu_need(lg_stream_open_dry(device, &dry));
    enqueue(dry, &a, true);
    size_t bytes = lg_stream_scratch_need(dry);
    void *scratch = gpu_scratch(device, bytes);
    lg_stream_set_scratch(stream, scratch, bytes);
    double flops = (double)(B * H * T) * (double)(K * d) * 1e-9, forward = time_of(&a, false);
    printf("d %d, %s tokens, batch %d, %d heads: forward %.3f ms %.0f TFLOP/s, ", (int)d, tokens,
           (int)B, (int)H, forward, 4 * flops / forward);
    fflush(stdout);
    double both = time_of(&a, true);
    printf("backward %.3f ms %.0f, both %.3f ms %.0f; scratch %.0f MiB\n", both - forward,
           10 * flops / (both - forward), both, 14 * flops / both, (double)bytes * 0x1p-20);
    lg_stream_close(&dry);
    lg_tensor *all[] = {&qkv, &dqkv, &o, &dout, &lse, &low, &kv, &dkv};
    for (size_t i = 0; i < LG_ARRAY_LEN(all); i++) lg_device_free(device, &all[i]->data);
    lg_device_free(device, &scratch);
}

int main(int argc, char **argv)
{
    static const char *const usual[] = {
        "72",  "4096", "4",  "16",       "72", "256",      "64", "16",      "64", "4096",
        "4",   "16",   "64", "4096",     "4",  "24",       "64", "4429",    "4",  "24",
        "128", "4608", "2",  "24",       "64", "2496x128", "4",  "32",      "64", "16000x128",
        "1",   "32",   "72", "4096x120", "12", "16",       "64", "4096x77", "4",  "10"};
    const char *const *shape = argc > 1 ? (const char *const *)argv + 1 : usual;
    int n = argc > 1 ? argc - 1 : (int)LG_ARRAY_LEN(usual);
    device = gpu_open("cuda:0", "bf16");
    gpu_need(lg_stream_open(device, &stream));
    for (int i = 0; i + 4 <= n; i += 4)
        bench(atoll(shape[i]), shape[i + 1], atoll(shape[i + 2]), atoll(shape[i + 3]));
    lg_stream_close(&stream);
    lg_device_close(&device);
    return 0;
}
