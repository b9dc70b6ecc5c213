/* Attention over more heads than the GPU has multiprocessors, so that a block takes several
 * (short_attention.cu, short_attention_forward.cu), which ref64 would take too long for: 16-bit results
 * against those in fp32 from the same inputs; samples with equal inputs in both halves of the batch have
 * equal bits; the same bits twice, and dbias, accumulated the second time, is twice what it was.
 *
 * usage: test_long_attention_cuda */
#include "kernels/ops.h"
#include "tests/gpu/gpu_test.h"

enum { B = 26, T = 256, H = 16, OUTPUTS = 8 }; /* 416 heads: three or four a block */
enum { DQ, DK, DV, O, LSE, DBIAS };            /* that of q, k, v */
static const char *const NAMES[OUTPUTS] = {"dq",  "dk",         "dv",         "o",
                                           "lse", "dbias of q", "dbias of k", "dbias of v"};

static lg_device *device;
static lg_stream *stream;
static lg_dtype type;

static void *alloc(int64_t count, lg_dtype t)
{
    void *p;
    gpu_need(lg_device_alloc(device, (size_t)count * lg_dtype_bytes(t), &p));
    return p;
}

/* Samples b and b + B / 2 are equal; values rounded to bf16, in scale (-1, 1). */
static void *filled(int64_t count, uint32_t seed, double scale)
{
    size_t n = (size_t)count;
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        v[i] = v[i + n / 2] = gpu_to_bf16(scale * ((double)seed * 0x1p-31 - 1));
    }
    void *p = alloc(count, type);
    gpu_put(stream, p, type, v, n);
    free(v);
    return p;
}

/* Slice i of rows of 3 D elements. */
static lg_tensor slice(void *packed, int64_t d, int i)
{
    lg_tensor t = lg_slice(lg_t3(packed, type, B, T, 3 * H * d), 2, i * H * d, H * d);
    return lg_split(t, 2, d);
}

/* Forward, for o and lse, and backward. */
static void enqueue(lg_stream *s, const struct lg_attention_backward_args *a)
{
    lg_attention_forward(
        s, &(struct lg_attention_forward_args){
               .q = a->q, .k = a->k, .v = a->v, .o = a->o, .lse = a->lse, .scale = a->scale});
    lg_attention_backward(s, a);
}

/* Outputs of a run, as doubles. */
static void download(const struct lg_attention_backward_args *a, double *ret[OUTPUTS])
{
    int64_t D = H * a->q.dim[3], rows = B * T;
    double *packed = gpu_get(stream, a->dq.data, type, (size_t)(rows * 3 * D));
    for (int i = 0; i < 3; i++) {
        ret[i] = malloc((size_t)(rows * D) * sizeof(double));
        ret[DBIAS + i] = gpu_get(stream, (float *)a->dbias.data + i * D, LG_F32, (size_t)D);
        LG_ASSERT(ret[i]);
        for (int64_t r = 0; r < rows; r++)
            memcpy(ret[i] + r * D, packed + (3 * r + i) * D, (size_t)D * sizeof(double));
    }
    free(packed);
    ret[O] = gpu_get(stream, a->o.data, type, (size_t)(rows * D));
    ret[LSE] = gpu_get(stream, a->lse.data, LG_F32, (size_t)(rows * H));
}

/* Two runs; the second accumulates dbias. */
static void results(int64_t d, const char *precision, double *ret[2][OUTPUTS])
{
    lg_stream *dry;
    int64_t D = H * d, values = B * T * D;
    device = gpu_open("cuda:0", precision);
    type = lg_device_dtype(device);
    gpu_need(lg_stream_open(device, &stream));
    gpu_need(lg_stream_open_dry(device, &dry));
    void *qkv = filled(3 * values, 1, 2), *dqkv = filled(3 * values, 2, 1);
    struct lg_attention_backward_args a = {.dout = lg_t4(filled(values, 3, 1), type, B, T, H, d),
                                           .o = lg_t4(filled(values, 4, 1), type, B, T, H, d),
                                           .q = slice(qkv, d, 0),
                                           .k = slice(qkv, d, 1),
                                           .v = slice(qkv, d, 2),
                                           .lse = lg_t3(alloc(B * H * T, LG_F32), LG_F32, B, H, T),
                                           .dq = slice(dqkv, d, 0),
                                           .dk = slice(dqkv, d, 1),
                                           .dv = slice(dqkv, d, 2),
                                           .dbias = lg_t1(alloc(3 * D, LG_F32), LG_F32, 3 * D),
                                           .scale = 1 / sqrt((double)d)};
    enqueue(dry, &a);
    size_t bytes = lg_stream_scratch_need(dry);
    lg_stream_set_scratch(stream, gpu_scratch(device, bytes), bytes);
    for (int i = 0; i < 2; i++) {
        a.accumulate_dbias = i == 1;
        enqueue(stream, &a);
        download(&a, ret[i]);
    }
    lg_stream_close(&dry);
    lg_stream_close(&stream);
    lg_device_close(&device);
}

static void report(bool ok, int64_t d, const struct gpu_precision *p, int output, const char *what,
                   double error)
{
    gpu_count(ok);
    if (!ok || error >= 0)
        printf("%sd = %d in %s: %s %s %.2e\n", ok ? "" : "FAIL ", (int)d, p->name, NAMES[output],
               what, error);
}

static void check(int64_t d, const struct gpu_precision *p)
{
    double *want[2][OUTPUTS], *got[2][OUTPUTS];
    results(d, gpu_sanitized() ? p->name : "fp32", want);
    results(d, p->name, got);
    for (int o = 0; o < OUTPUTS; o++) {
        size_t n = (size_t)(o < LSE ? B * T * H * d : o == LSE ? B * T * H : H * d);
        /* The bias of k: 0 against 0. */
        double error = gpu_error(got[0][o], want[0][o], n, 1e-30);
        bool again = true, halves = true;
        for (size_t i = 0; i < n; i++) again &= got[1][o][i] == (o < DBIAS ? 1 : 2) * got[0][o][i];
        for (size_t i = 0; o < DBIAS && i < n / 2; i++)
            halves &= got[0][o][i] == got[0][o][i + n / 2];
        report(error <= sqrt(2) * p->tolerance, d, p, o, "error", error);
        report(again, d, p, o, "differs the second time", -1);
        report(halves, d, p, o, "differs in the second half", -1);
        for (int i = 0; i < 2; i++) free(want[i][o]), free(got[i][o]);
    }
}

int main(void)
{
    for (int k = 0; k < GPU_PRECISION_COUNT; k++)
        for (int64_t d = 64; d <= 72 && strstr("fp16 bf16", GPU_PRECISIONS[k].name); d += 8)
            if (gpu_my_turn()) check(d, &GPU_PRECISIONS[k]);
    return gpu_summary();
}
