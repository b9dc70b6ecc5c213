/* Products long enough for every tile of cuBLASLt to be tried (see kernels/cuda/gemm.c), those with
 * GELU in a kernel of their own (gelu_product.cu), with rows that end within a tile, and one of few
 * outputs whose inner dimension may be split, all of which ref64 would take hours for: results in
 * tf32 and in 16 bits against those in fp32 from the same inputs, rows with equal inputs in both
 * halves of the batch have equal bits, the same bits twice, and nothing written behind a tensor.
 * Weight gradients whose output is done in pieces have the bits of the whole.
 *
 * usage: test_long_products_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"
#include <unistd.h>

enum { K = 1152, PRODUCTS_N = 10 };
enum { GUARD = 1 << 20, GUARD_BYTE = 0x5A }; /* bytes behind every tensor */
enum op { FORWARD, FORWARD_GELU, TO_X, TO_WEIGHTS, THROUGH_GELU };
enum out { X, W, Y, PRE, BIAS, TENSORS }; /* (M, K), (N, K), (M, N), (M, N), (N) */
static const struct product {
    const char *name;
    enum op op;
    enum out out;
    int64_t M, N;
    bool apart; /* rows of w are parts of others twice as long */
} PRODUCTS[PRODUCTS_N] = {
    {"forward", FORWARD, Y, 4096, 2304, false},
    {"forward, GELU", FORWARD_GELU, Y, 32838, 512, false},
    {"forward, before GELU", FORWARD_GELU, PRE, 32838, 512, false},
    {"backward to x", TO_X, X, 4096, 2304, false},
    {"backward through GELU", THROUGH_GELU, Y, 4166, 2304, false},
    {"backward through GELU, bias", THROUGH_GELU, BIAS, 4166, 2304, false},
    {"weights", TO_WEIGHTS, W, 4096, 2304, false},
    {"backward to few x", TO_X, X, 256, 6912, false},
    {"forward, columns of w", FORWARD, Y, 4096, 2304, true},
    {"backward through GELU, columns of w", THROUGH_GELU, Y, 4166, 2304, true}};
/* So many results that the partial sums of a split k would not fit the workspace: pieces have none either. */
static const struct product LONG_WEIGHTS = {
    "weights, whole and in pieces", TO_WEIGHTS, W, 1024, 8 * K, false};

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;
static bool in_bf16;
static unsigned char guard[GUARD];

/* Rows m and m + rows / 2 are equal; values in scale (-1, 1), of bf16 where that is wanted. */
static lg_tensor filled(int64_t rows, int64_t columns, uint32_t seed, double scale)
{
    size_t n = (size_t)(rows * columns);
    double *v = malloc(n * sizeof *v);
    void *p;
    LG_ASSERT(v);
    for (size_t i = 0; i < n / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = scale * ((double)seed * 0x1p-31 - 1);
        v[i] = v[i + n / 2] = in_bf16 ? gpu_to_bf16(v[i]) : (double)(float)v[i];
    }
    size_t bytes = n * lg_dtype_bytes(type);
    gpu_need(lg_device_alloc(device, bytes + GUARD, &p));
    gpu_put(stream, p, type, v, n);
    free(v);
    memset(guard, GUARD_BYTE, GUARD);
    lg_stream_upload(stream, (char *)p + bytes, guard, GUARD);
    lg_stream_sync(stream);
    return lg_t2(p, type, rows, columns);
}

/* Is what lies behind it as it was? */
static bool whole(const lg_tensor *t, int64_t elements)
{
    size_t bytes = (size_t)elements * lg_dtype_bytes(t->dtype);
    lg_stream_download(stream, guard, (char *)t->data + bytes, GUARD);
    lg_stream_sync(stream);
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != GUARD_BYTE) return false;
    return true;
}

/* w as rows x columns, or apart. */
static lg_tensor weights(const struct product *p, lg_tensor w, int64_t rows, int64_t columns)
{
    if (!p->apart) return lg_t2(w.data, w.dtype, rows, columns);
    return lg_slice(lg_t2(w.data, w.dtype, rows, 2 * columns), 1, columns / 2, columns);
}

static void enqueue(const struct product *p, lg_stream *s, const lg_tensor t[TENSORS])
{
    lg_tensor w = weights(p, t[W], p->N, K), transposed = weights(p, t[W], K, p->N);
    struct lg_linear_forward_args f = {.x = t[X], .w = w, .bias = t[BIAS], .y = t[Y]};
    switch (p->op) {
    case FORWARD_GELU:
        f.pre = t[PRE], f.act = LG_ACT_GELU_TANH;
        lg_linear_forward(s, &f);
        return;
    case FORWARD:
        lg_linear_forward(s, &f);
        return;
    case TO_X:
        lg_linear_backward_data(
            s, &(struct lg_linear_backward_data_args){.dy = t[Y], .w = w, .dx = t[X]});
        return;
    case THROUGH_GELU:
        lg_linear_backward_data(s, &(struct lg_linear_backward_data_args){.dy = t[X],
                                                                          .w = transposed,
                                                                          .dx = t[Y],
                                                                          .act = LG_ACT_GELU_TANH,
                                                                          .pre = t[PRE],
                                                                          .dbias = t[BIAS]});
        return;
    case TO_WEIGHTS:
        lg_linear_backward_weight(
            s, &(struct lg_linear_backward_weight_args){.dy = t[Y], .x = t[X], .dw = w});
        return;
    }
}

/* Values of the operation's result, twice. */
static int64_t results(const struct product *p, const char *precision, double *ret[2])
{
    lg_stream *dry;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    gpu_need(lg_stream_open_dry(device, &dry));
    lg_tensor t[TENSORS] = {filled(p->M, K, 1, 1), filled((1 + p->apart) * p->N, K, 2, 0.05),
                            filled(p->M, p->N, 3, 1), filled(p->M, p->N, 4, 1),
                            filled(2, p->N, 5, 1)};
    t[BIAS] = lg_t1(t[BIAS].data, type, p->N);
    enqueue(p, dry, t);
    size_t bytes = lg_stream_scratch_need(dry);
    lg_stream_set_scratch(stream, gpu_scratch(device, bytes), bytes);
    const lg_tensor *out = &t[p->out];
    for (int i = 0; i < (gpu_sanitized() ? 1 : 2); i++) {
        enqueue(p, stream, t);
        ret[i] = gpu_get(stream, out->data, type, (size_t)lg_numel(out));
    }
    for (int i = 0; i < TENSORS; i++)
        if (!whole(&t[i], lg_numel(&t[i]) * (i == BIAS ? 2 : 1))) {
            printf("FAIL %s in %s: written behind tensor %d\n", p->name, precision, i);
            gpu_count(false);
        }
    lg_stream_close(&dry);
    lg_stream_close(&stream);
    lg_device_close(&device);
    return lg_numel(out);
}

static void check(const struct product *x, const struct gpu_precision *p)
{
    double *want[2], *got[2];
    if (gpu_sanitized()) {
        results(x, p->name, got);
        gpu_count(true);
        free(got[0]);
        return;
    }
    in_bf16 = p->round != LG_F32; /* tf32 would lose nothing of bf16 */
    int64_t n = results(x, "fp32", want);
    results(x, p->name, got);
    double error = gpu_error(got[0], want[0], (size_t)n, 0);
    /* In 16 bits: the largest error of one rounding. Values scatter, so that one costs 0.4 of that in
     * the norm, GELU's second one 0.57 together, and its tanh (2^-11) little more. */
    double sixteen = p->round == LG_F16 ? 0x1p-11 : 0x1p-8;
    double tolerance = p->round == LG_F32 ? p->tolerance : sixteen;
    bool near = error <= tolerance;
    bool again = memcmp(got[0], got[1], (size_t)n * sizeof(double)) == 0;
    bool halves = x->out == W || x->out == BIAS ||
                  memcmp(got[0], got[0] + n / 2, (size_t)n / 2 * sizeof(double)) == 0;
    printf("%s%s in %s: error %.2e%s%s\n", near && again && halves ? "" : "FAIL ", x->name, p->name,
           error, again ? "" : ", other bits the second time",
           halves ? "" : ", other bits in the second half");
    gpu_count(near);
    gpu_count(again);
    gpu_count(halves);
    for (int i = 0; i < 2; i++) free(want[i]), free(got[i]);
}

/* In a file of pinned algorithms with one weight gradient: in three pieces what was whole, whole what
 * was in pieces. False when it has none. */
static bool cut_otherwise(const char *path)
{
    char line[1024] = "";
    FILE *f = fopen(path, "r");
    LG_ASSERT(f);
    while (!strstr(line, " parts = ") && fgets(line, sizeof line, f)) continue;
    fclose(f);
    if (!strstr(line, " parts = ") || strstr(line, " = none")) return false;
    char *pieces = strstr(line, " in ");
    line[pieces ? (size_t)(pieces - line) : strcspn(line, "\n")] = 0;
    f = fopen(path, "w");
    LG_ASSERT(f);
    fprintf(f, "%s%s\n", line, pieces ? "" : " in 3");
    LG_ASSERT(fclose(f) == 0);
    return true;
}

static void check_pieces(const struct gpu_precision *p)
{
    const struct product *x = &LONG_WEIGHTS;
    const char *folder = getenv("TMPDIR"), *cache = getenv("LG_CUDA_CACHE");
    char path[4096];
    double *one[2], *other[2];
    if (gpu_sanitized()) return;
    char *before = cache ? strdup(cache) : NULL;
    snprintf(path, sizeof path, "%s/lg-algorithms-XXXXXX", folder ? folder : "/tmp");
    int fd = mkstemp(path);
    LG_ASSERT(fd >= 0);
    close(fd);
    setenv("LG_CUDA_CACHE", path, 1);
    in_bf16 = p->round != LG_F32;
    int64_t n = results(x, p->name, one);
    bool changed = cut_otherwise(path);
    results(x, p->name, other);
    bool same = changed && memcmp(one[0], other[0], (size_t)n * sizeof(double)) == 0;
    printf("%s%s in %s: %s\n", same ? "" : "FAIL ", x->name, p->name,
           same      ? "the same bits"
           : changed ? "other bits"
                     : "no algorithm was pinned");
    gpu_count(same);
    if (before)
        setenv("LG_CUDA_CACHE", before, 1);
    else
        unsetenv("LG_CUDA_CACHE");
    unlink(path);
    free(before);
    for (int i = 0; i < 2; i++) free(one[i]), free(other[i]);
}

int main(void)
{
    for (int k = 0; k < GPU_PRECISION_COUNT; k++)
        for (int i = 0; i < PRODUCTS_N && strcmp(GPU_PRECISIONS[k].name, "fp32"); i++)
            if (gpu_my_turn()) check(&PRODUCTS[i], &GPU_PRECISIONS[k]);
    for (int k = 0; k < GPU_PRECISION_COUNT; k++)
        if (strcmp(GPU_PRECISIONS[k].name, "fp32") && gpu_my_turn())
            check_pieces(&GPU_PRECISIONS[k]);
    return gpu_summary();
}
