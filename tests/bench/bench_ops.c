/* Speed of the operations at the shapes that the example's nets use, as JSON lines:
 *
 * {"op":"linear_forward","shape":"M=512 N=576 K=192","ns":1006012,"gflops":112.6,"of_peak":0.96}
 *
 * `of_peak` compares with multiply-adds in registers, measured first with the device's instruction
 * set; `of_copy` (for what moves memory) with memcpy of as many bytes in and out. Both on one
 * thread: with more threads they can exceed 1. A time is the best of REPEATS runs of about RUN_NS:
 * CPU time with one thread, so that other work on the machine matters little, else wall time.
 *
 * Usage: bench_ops [isa [threads]] */
#include "base/check.h"
#include "base/clock.h"
#include "kernels/ops.h"
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPEATS = 5, ARENA_BYTES = 192 << 20, SCRATCH_BYTES = 32 << 20 };
#define RUN_NS (8 * LG_MS_NS)

struct bench {
    lg_device *device;
    lg_stream *stream, *dry;
    void *arena, *scratch;
    size_t used;
    int threads;
    double peak_gflops;
};

typedef void run_fn(lg_stream *, const void *);
#define LG_OP(name, ...)                                                                           \
    __attribute__((unused)) static void run_##name(lg_stream *s, const void *args)                 \
    {                                                                                              \
        lg_##name(s, args);                                                                        \
    }
#include "kernels/ops.def"
#undef LG_OP

/* A tensor of small random numbers. */
static void *take(struct bench *b, size_t bytes)
{
    char *p = (char *)b->arena + b->used;
    b->used += (bytes + 63) & ~(size_t)63;
    LG_ASSERT(b->used <= ARENA_BYTES);
    return p;
}

static lg_tensor fresh(struct bench *b, lg_tensor shape)
{
    int64_t n = lg_numel(&shape);
    float *x = shape.data = take(b, lg_tensor_bytes(&shape));
    uint32_t u = 12345;
    for (int64_t i = 0; i < n; i++) {
        u = u * 1664525u + 1013904223u;
        x[i] = (float)(u >> 8) * 0x1p-24f - 0.5f;
    }
    return shape;
}
#define T1(a)          fresh(b, lg_t1(NULL, LG_F32, a))
#define T2(a, c)       fresh(b, lg_t2(NULL, LG_F32, a, c))
#define T3(a, c, d)    fresh(b, lg_t3(NULL, LG_F32, a, c, d))
#define T4(a, c, d, e) fresh(b, lg_t4(NULL, LG_F32, a, c, d, e))

static int64_t clock_of(const struct bench *b)
{
    return b->threads == 1 ? lg_cpu_ns() : lg_now_ns();
}

/* ns of one call, once caches are warm. */
static double time_of(const struct bench *b, void (*call)(const struct bench *, const void *),
                      const void *what)
{
    int64_t times = 1;
    double best = 1e30;
    for (int k = 0; k < REPEATS;) {
        int64_t start = clock_of(b);
        for (int64_t i = 0; i < times; i++) call(b, what);
        int64_t took = clock_of(b) - start;
        if (took < RUN_NS / 2 && times < INT32_MAX) {
            times *= 2;
            continue;
        }
        best = LG_MIN(best, (double)took / (double)times);
        k++;
    }
    return best;
}

static void call_copy(const struct bench *b, const void *what)
{
    const size_t *bytes = what;
    char *dst = b->arena;
    memcpy(dst, dst + ARENA_BYTES / 2, LG_MIN(*bytes / 2, (size_t)ARENA_BYTES / 2));
    __asm__ volatile("" ::: "memory");
}

/* flops or bytes: what one call computes or must move at least; 0 leaves that out. Empties the
 * arena. */
struct job {
    const char *op, *shape;
    run_fn *run;
    const void *args;
    double flops, bytes;
};

static void call_job(const struct bench *b, const void *what)
{
    const struct job *j = what;
    j->run(b->stream, j->args);
}

static void measure(struct bench *b, const struct job *j)
{
    j->run(b->dry, j->args);
    LG_ASSERT(lg_stream_scratch_need(b->dry) <= SCRATCH_BYTES);
    const double best = time_of(b, call_job, j);
    printf("{\"op\":\"%s\",\"shape\":\"%s\",\"ns\":%.0f", j->op, j->shape, best);
    if (j->flops > 0)
        printf(",\"gflops\":%.1f,\"of_peak\":%.2f", j->flops / best,
               j->flops / best / b->peak_gflops);
    if (j->bytes > 0)
        printf(",\"gbytes_per_s\":%.1f,\"of_copy\":%.2f", j->bytes / best,
               time_of(b, call_copy, &(size_t){(size_t)j->bytes}) / best);
    printf("}\n");
    fflush(stdout);
    b->used = 0;
}
#define MEASURE(name, shape_text, flop_count, byte_count, ...)                                     \
    measure(b, &(struct job){.op = #name,                                                          \
                             .shape = shape_text,                                                  \
                             .run = run_##name,                                                    \
                             .args = &(struct lg_##name##_args){__VA_ARGS__},                      \
                             .flops = (flop_count),                                                \
                             .bytes = (byte_count)})

/* Multiply-adds on as many independent registers as hide their latency. */
#define PEAK(name, features, vec, set, mul_add, lanes)                                             \
    __attribute__((target(features), optimize("O3"))) static double name(void)                     \
    {                                                                                              \
        enum { CHAINS = 10, TIMES = 2000000 };                                                     \
        vec a0 = set(0), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0, a8 = a0,   \
            a9 = a0, x = set(0.999f), y = set(0.001f);                                             \
        int64_t start = lg_cpu_ns();                                                               \
        for (int64_t n = 0; n < TIMES; n++) {                                                      \
            a0 = mul_add(a0, x, y), a1 = mul_add(a1, x, y), a2 = mul_add(a2, x, y);                \
            a3 = mul_add(a3, x, y), a4 = mul_add(a4, x, y), a5 = mul_add(a5, x, y);                \
            a6 = mul_add(a6, x, y), a7 = mul_add(a7, x, y), a8 = mul_add(a8, x, y);                \
            a9 = mul_add(a9, x, y);                                                                \
            __asm__ volatile("" : "+x"(a0), "+x"(a1), "+x"(a2), "+x"(a3), "+x"(a4));               \
            __asm__ volatile("" : "+x"(a5), "+x"(a6), "+x"(a7), "+x"(a8), "+x"(a9));               \
        }                                                                                          \
        return 2.0 * lanes * CHAINS * TIMES / (double)(lg_cpu_ns() - start);                       \
    }
#define SSE_MUL_ADD(a, x, y) _mm_add_ps(_mm_mul_ps(a, x), y)
PEAK(peak_sse2, "sse2", __m128, _mm_set1_ps, SSE_MUL_ADD, 4)
PEAK(peak_avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 8)
PEAK(peak_avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, 16)

static double peak_gflops(const char *isa)
{
    double best = 0;
    for (int k = 0; k < REPEATS; k++) {
        double g = !strcmp(isa, "avx512") ? peak_avx512()
                   : !strcmp(isa, "avx2") ? peak_avx2()
                                          : peak_sse2();
        best = LG_MAX(best, g);
    }
    return best;
}

static void bench_linear(struct bench *b)
{
    static const int SHAPES[][3] = {{512, 128, 128}, {512, 384, 128}, {512, 512, 128},
                                    {512, 128, 512}, {512, 192, 192}, {512, 576, 192},
                                    {512, 768, 192}, {512, 192, 768}, {512, 1536, 768},
                                    {192, 384, 192}, {8, 1152, 192},  {512, 16, 192}};
    for (size_t i = 0; i < LG_ARRAY_LEN(SHAPES); i++) {
        const int M = SHAPES[i][0], N = SHAPES[i][1], K = SHAPES[i][2];
        char shape[64];
        snprintf(shape, sizeof shape, "M=%d N=%d K=%d", M, N, K);
        double flops = 2.0 * M * N * K;
        MEASURE(linear_forward, shape, flops, 0, .x = T2(M, K), .w = T2(N, K), .bias = T1(N),
                .y = T2(M, N));
        if (N == 768)
            MEASURE(linear_forward, "M=512 N=768 K=192 gelu, pre kept", flops, 0, .x = T2(M, K),
                    .w = T2(N, K), .bias = T1(N), .y = T2(M, N), .pre = T2(M, N),
                    .act = LG_ACT_GELU_TANH);
        MEASURE(linear_backward_data, shape, flops, 0, .dy = T2(M, N), .w = T2(N, K),
                .dx = T2(M, K));
        MEASURE(linear_backward_weight, shape, flops, 0, .dy = T2(M, N), .x = T2(M, K),
                .dw = T2(N, K), .dbias = T1(N), .accumulate = true);
    }
}

static void bench_attention(struct bench *b)
{
    static const int SHAPES[][5] = {
        /* B, Tq, Tk, H, d */
        {8, 64, 64, 4, 32},   {8, 64, 64, 8, 24}, {8, 64, 64, 12, 16},   {8, 64, 24, 6, 32},
        {8, 256, 256, 4, 72}, {8, 24, 24, 6, 32}, {8, 256, 256, 1, 128}, {1, 1024, 1024, 1, 512}};
    for (size_t i = 0; i < LG_ARRAY_LEN(SHAPES); i++) {
        const int B = SHAPES[i][0], Tq = SHAPES[i][1], Tk = SHAPES[i][2], H = SHAPES[i][3];
        const int d = SHAPES[i][4], D = H * d;
        char shape[64];
        snprintf(shape, sizeof shape, "B=%d Tq=%d Tk=%d H=%d d=%d", B, Tq, Tk, H, d);
        double flops = 4.0 * B * Tq * Tk * D;
        MEASURE(attention_forward, shape, flops, 0, .q = T4(B, Tq, H, d), .k = T4(B, Tk, H, d),
                .v = T4(B, Tk, H, d), .o = T4(B, Tq, H, d), .lse = T3(B, H, Tq), .scale = 0.2);
        MEASURE(attention_backward, shape, 2.5 * flops, 0, .dout = T4(B, Tq, H, d),
                .o = T4(B, Tq, H, d), .q = T4(B, Tq, H, d), .k = T4(B, Tk, H, d),
                .v = T4(B, Tk, H, d), .lse = T3(B, H, Tq), .dq = T4(B, Tq, H, d),
                .dk = T4(B, Tk, H, d), .dv = T4(B, Tk, H, d), .scale = 0.2);
    }
}

static void bench_conv(struct bench *b)
{
    static const int SHAPES[][6] = {/* N, H, Ci, Co, k, stride */
                                    {8, 64, 3, 32, 3, 1},   {8, 64, 32, 32, 3, 1},
                                    {8, 64, 32, 32, 3, 2},  {8, 32, 32, 64, 3, 1},
                                    {8, 32, 64, 64, 3, 1},  {8, 32, 32, 64, 1, 1},
                                    {8, 16, 64, 128, 3, 1}, {8, 16, 128, 128, 3, 1},
                                    {8, 16, 128, 8, 3, 1},  {1, 64, 512, 512, 3, 1}};
    for (size_t i = 0; i < LG_ARRAY_LEN(SHAPES); i++) {
        const int N = SHAPES[i][0], H = SHAPES[i][1], Ci = SHAPES[i][2], Co = SHAPES[i][3];
        const int k = SHAPES[i][4], stride = SHAPES[i][5], out = H / stride;
        const int before = stride == 1 ? k / 2 : 0, after = k / 2;
        char shape[64];
        snprintf(shape, sizeof shape, "N=%d H=W=%d Ci=%d Co=%d k=%d stride=%d", N, H, Ci, Co, k,
                 stride);
        MEASURE(conv2d_forward, shape, 2.0 * N * out * out * Ci * Co * k * k, 0,
                .x = T4(N, H, H, Ci), .w = T4(Co, k, k, Ci), .bias = T1(Co),
                .y = T4(N, out, out, Co), .stride = stride, .top = before, .left = before,
                .bottom = after, .right = after);
    }
    MEASURE(group_norm_forward, "N=8 H=W=64 C=32 silu", 0, 12.0 * 8 * 4096 * 32,
            .x = T4(8, 64, 64, 32), .w = T1(32), .b = T1(32), .y = T4(8, 64, 64, 32), .groups = 32,
            .eps = 1e-6, .act = LG_ACT_SILU);
    MEASURE(group_norm_forward, "N=8 H=W=16 C=128 silu", 0, 12.0 * 8 * 256 * 128,
            .x = T4(8, 16, 16, 128), .w = T1(128), .b = T1(128), .y = T4(8, 16, 16, 128),
            .groups = 32, .eps = 1e-6, .act = LG_ACT_SILU);
    MEASURE(upsample2x_forward, "N=8 H=W=32 C=64", 0, 20.0 * 8 * 1024 * 64, .x = T4(8, 32, 32, 64),
            .y = T4(8, 64, 64, 64));
}

static void bench_rows(struct bench *b)
{
    enum { B = 8, T = 64, D = 192, M = B * T };
    const double e = 4.0 * M * D;
    MEASURE(norm_modulate_forward, "B=8 T=64 D=192", 0, 2 * e, .x = T3(B, T, D), .shift = T2(B, D),
            .scale = T2(B, D), .y = T3(B, T, D), .mean = T2(B, T), .rstd = T2(B, T), .eps = 1e-6);
    MEASURE(norm_modulate_backward, "B=8 T=64 D=192", 0, 3 * e, .dy = T3(B, T, D), .x = T3(B, T, D),
            .mean = T2(B, T), .rstd = T2(B, T), .scale = T2(B, D), .dx = T3(B, T, D),
            .dshift = T2(B, D), .dscale = T2(B, D));
    MEASURE(gate_residual_forward, "B=8 T=64 D=192", 0, 3 * e, .x = T3(B, T, D), .y = T3(B, T, D),
            .gate = T2(B, D), .out = T3(B, T, D));
    MEASURE(gate_residual_backward, "B=8 T=64 D=192", 0, 3 * e, .dout = T3(B, T, D),
            .y = T3(B, T, D), .gate = T2(B, D), .dy = T3(B, T, D), .dgate = T2(B, D));
    MEASURE(rms_norm_forward, "M=192 D=192", 0, 8.0 * 192 * D, .x = T4(1, 192, 1, D), .w = T2(1, D),
            .y = T4(1, 192, 1, D), .each = 1, .eps = 1e-6);
    MEASURE(act_forward, "M=512 N=768 gelu_tanh", 0, 8 * e, .x = T2(M, 4 * D), .y = T2(M, 4 * D),
            .act = LG_ACT_GELU_TANH);
    MEASURE(act_backward, "M=512 N=768 gelu_tanh", 0, 12 * e, .x = T2(M, 4 * D), .dy = T2(M, 4 * D),
            .dx = T2(M, 4 * D), .act = LG_ACT_GELU_TANH);
    MEASURE(act_forward, "M=512 N=768 silu", 0, 8 * e, .x = T2(M, 4 * D), .y = T2(M, 4 * D),
            .act = LG_ACT_SILU);
    MEASURE(add_forward, "M=512 N=192, b of one row", 0, 2 * e, .a = T2(M, D), .b = T1(D),
            .y = T2(M, D));
    MEASURE(sum_rows, "M=512 N=768", 0, 4 * e, .x = T2(M, 4 * D), .y = T1(4 * D));
}

static void bench_training(struct bench *b)
{
    enum { B = 8, N = 4 << 20 };
    int64_t *n = take(b, sizeof(int64_t[B]));
    for (int i = 0; i < B; i++) n[i] = 1000 + i;
    MEASURE(diffuse_forward, "B=8 C=4 H=W=16", 0, 0, .mean = T4(B, 4, 16, 16),
            .logvar = T4(B, 4, 16, 16), .n = lg_t1(n, LG_I64, B), .coef = T2(B, 4),
            .x_t = T4(B, 4, 16, 16), .target = T4(B, 4, 16, 16), .seed = 1, .scaling_factor = 0.75);
    MEASURE(mse_loss, "B=8 C=4 H=W=16", 0, 12.0 * B * 1024, .pred = T4(B, 4, 16, 16),
            .target = T4(B, 4, 16, 16), .weight = T1(B), .loss = T1(B), .dpred = T4(B, 4, 16, 16));
    lg_tensor sum =
        lg_t1(take(b, sizeof(double[N / LG_SQUARES_PIECE])), LG_F64, N / LG_SQUARES_PIECE);
    MEASURE(reduce_ranks, "n=4M, 2 ranks", 0, 12.0 * N, .x = {T1(N), T1(N)}, .count = 2, .y = T1(N),
            .squares = sum);
    lg_tensor v = T1(N);
    for (int64_t i = 0; i < N; i++) ((float *)v.data)[i] *= ((float *)v.data)[i];
    MEASURE(adamw, "n=4M", 0, 28.0 * N, .w = T1(N), .m = T1(N), .v = v, .grad = T1(N),
            .w_out = T1(N), .m_out = T1(N), .v_out = T1(N), .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99,
            .eps = 1e-8, .weight_decay = 0.01, .grad_scale = 0.5, .t = 10);
    MEASURE(ema, "n=4M", 0, 12.0 * N, .ema = T1(N), .w = T1(N), .out = T1(N), .decay = 0.999);
    MEASURE(cast, "n=4M f16 to f32", 0, 6.0 * N, .x = {take(b, 2 * N), LG_F16, 1, {N, 1, 1, 1}},
            .y = T1(N));
}

int main(int argc, char **argv)
{
    struct bench bench = {.threads = argc > 2 ? atoi(argv[2]) : 1}, *b = &bench;
    struct lg_device_options options = {.isa = argc > 1 ? argv[1] : NULL, .threads = b->threads};
    if (lg_device_open("host", &options, &b->device) < 0 ||
        lg_device_alloc(b->device, ARENA_BYTES, &b->arena) < 0 ||
        lg_device_alloc(b->device, SCRATCH_BYTES, &b->scratch) < 0 ||
        lg_stream_open(b->device, &b->stream) < 0 || lg_stream_open_dry(b->device, &b->dry) < 0) {
        fprintf(stderr, "bench_ops: %s\n", lg_err_text());
        return 1;
    }
    lg_stream_set_scratch(b->stream, b->scratch, SCRATCH_BYTES);
    b->peak_gflops = peak_gflops(lg_device_isa(b->device));
    printf("{\"device\":\"%s\",\"peak_gflops\":%.1f}\n", lg_device_fingerprint(b->device),
           b->peak_gflops);
    bench_linear(b);
    bench_attention(b);
    bench_conv(b);
    bench_rows(b);
    bench_training(b);
    lg_stream_close(&b->dry);
    lg_stream_close(&b->stream);
    lg_device_close(&b->device);
    return 0;
}
