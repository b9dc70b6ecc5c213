/* Products long enough for every tile of cuBLASLt to be tried (see kernels/cuda/gemm.c), and one of few
 * outputs whose inner dimension may be split, all of which ref64 would take hours for: results in tf32 and
 * in 16 bits against those in fp32 from the same inputs, rows with equal inputs in both halves of the batch
 * have equal bits, and the same bits twice.
 *
 * usage: test_long_products_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { K = 1152, OPS = 5 };
static const struct {
    const char *name;
    int64_t M, N;
} PRODUCTS[OPS] = {{"forward", 4096, 2304},
                   {"forward, GELU", 4096, 2304},
                   {"backward to x", 4096, 2304},
                   {"weights", 4096, 2304},
                   {"backward to few x", 256, 6912}};

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;
static bool in_bf16;

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
    gpu_need(lg_device_alloc(device, n * lg_dtype_bytes(type), &p));
    gpu_put(stream, p, type, v, n);
    free(v);
    return lg_t2(p, type, rows, columns);
}

static void enqueue(int op, lg_stream *s, const lg_tensor t[3], lg_tensor bias, lg_tensor pre)
{
    struct lg_linear_forward_args f = {.x = t[0], .w = t[1], .bias = bias, .y = t[2]};
    if (op == 1) f.pre = pre, f.act = LG_ACT_GELU_TANH;
    if (op < 2) lg_linear_forward(s, &f);
    if (op == 2 || op == 4)
        lg_linear_backward_data(
            s, &(struct lg_linear_backward_data_args){.dy = t[2], .w = t[1], .dx = t[0]});
    if (op == 3)
        lg_linear_backward_weight(
            s, &(struct lg_linear_backward_weight_args){.dy = t[2], .x = t[0], .dw = t[1]});
}

/* Values of the operation's result, twice. */
static int64_t results(int op, const char *precision, double *ret[2])
{
    lg_stream *dry;
    void *scratch;
    const int64_t M = PRODUCTS[op].M, N = PRODUCTS[op].N;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    gpu_need(lg_stream_open_dry(device, &dry));
    lg_tensor t[3] = {filled(M, K, 1, 1), filled(N, K, 2, 0.05), filled(M, N, 3, 1)};
    lg_tensor pre = filled(M, N, 4, 1), bias = filled(2, N, 5, 1);
    bias = lg_t1(bias.data, type, N);
    enqueue(op, dry, t, bias, pre);
    size_t bytes = lg_stream_scratch_need(dry);
    gpu_need(lg_device_alloc(device, bytes, &scratch));
    lg_stream_set_scratch(stream, scratch, bytes);
    const lg_tensor *out = op < 2 ? &t[2] : op == 3 ? &t[1] : &t[0];
    for (int i = 0; i < 2; i++) {
        enqueue(op, stream, t, bias, pre);
        ret[i] = gpu_get(stream, out->data, type, (size_t)lg_numel(out));
    }
    lg_stream_close(&dry);
    lg_stream_close(&stream);
    lg_device_close(&device);
    return lg_numel(out);
}

static void check(int op, const struct gpu_precision *p)
{
    double *want[2], *got[2];
    in_bf16 = p->round != LG_F32; /* tf32 would lose nothing of bf16 */
    int64_t n = results(op, "fp32", want);
    results(op, p->name, got);
    double error = gpu_error(got[0], want[0], (size_t)n, 0);
    /* So many uniform values do not scatter about 2.6e-4. */
    double tolerance = strcmp(p->name, "tf32") ? p->tolerance : 3e-4;
    bool near = error <= tolerance;
    bool again = memcmp(got[0], got[1], (size_t)n * sizeof(double)) == 0;
    bool halves = op == 3 || memcmp(got[0], got[0] + n / 2, (size_t)n / 2 * sizeof(double)) == 0;
    printf("%s%s in %s: error %.2e%s%s\n", near && again && halves ? "" : "FAIL ",
           PRODUCTS[op].name, p->name, error, again ? "" : ", other bits the second time",
           halves ? "" : ", other bits in the second half");
    gpu_count(near);
    gpu_count(again);
    gpu_count(halves);
    for (int i = 0; i < 2; i++) free(want[i]), free(got[i]);
}

int main(void)
{
    for (int k = 0; k < GPU_PRECISION_COUNT; k++)
        for (int op = 0; op < OPS && strcmp(GPU_PRECISIONS[k].name, "fp32"); op++)
            check(op, &GPU_PRECISIONS[k]);
    return gpu_summary();
}
