/* Attention with heads wider than the tiles of attention.cu (the autoencoder's single head of
 * 512): scores = q k^T, softmax row by row, o = p v, as two products and a launch, for as many
 * samples at once as PASS_BYTES of scores hold. In fp32 also where the precision is tf32 (gemm.c
 * says why): 2.1 GFLOP a picture of 256 x 256.
 *
 * A pass has the same number of samples always, a divisor of the batch: a sample's bits depend on
 * the algorithm, which is chosen for that number.
 *
 * Scratch: scores (samples, Tq, Tk) in fp32, p likewise in the compute type, the products'
 * workspace. */
#include "kernels/cuda/wide_attention.h"
#include "kernels/cuda/gemm.h"

#define PASS_BYTES ((int64_t)256 << 20)

/* Samples of a pass. */
static int64_t samples_of(const struct lg_attention_forward_args *a)
{
    int64_t each = a->q.dim[1] * a->k.dim[1] * (int64_t)sizeof(float), n = a->q.dim[0];
    while (a->q.dim[0] % n || (n > 1 && n * each > PASS_BYTES)) n--;
    return n;
}

static size_t scores_bytes(const struct lg_attention_forward_args *a)
{
    int64_t scores = samples_of(a) * a->q.dim[1] * a->k.dim[1];
    return lg_cuda_round_up((size_t)scores * sizeof(float));
}
static size_t weights_bytes(const struct lg_attention_forward_args *a)
{
    int64_t scores = samples_of(a) * a->q.dim[1] * a->k.dim[1];
    return lg_cuda_round_up((size_t)scores * lg_dtype_bytes(a->q.dtype));
}

/* Sample b, head h; NULL stays. */
static void *head_of(const lg_tensor *t, int64_t b, int64_t h)
{
    if (!t->data) return NULL;
    return (char *)t->data +
           (size_t)(b * t->stride[0] + h * t->stride[2]) * lg_dtype_bytes(t->dtype);
}

static struct lg_cuda_product scores_product(const struct lg_attention_forward_args *a, int64_t b,
                                             int64_t h, void *scores)
{
    int64_t Tq = a->q.dim[1], Tk = a->k.dim[1];
    int64_t q_stride = lg_row_stride(&a->q, 2), k_stride = lg_row_stride(&a->k, 2);
    return (struct lg_cuda_product){.g = {.in = a->q.dtype,
                                          .out = LG_F32,
                                          .a = head_of(&a->q, b, h),
                                          .b = head_of(&a->k, b, h),
                                          .d = scores,
                                          .m = Tq,
                                          .n = Tk,
                                          .k = a->q.dim[3],
                                          .sa_m = q_stride,
                                          .sa_k = 1,
                                          .sb_n = k_stride,
                                          .sb_k = 1,
                                          .ldd = Tk},
                                    .exact = true,
                                    .batch = (int)samples_of(a),
                                    .next_a = Tq * q_stride,
                                    .next_b = Tk * k_stride,
                                    .next_d = Tq * Tk};
}
static struct lg_cuda_product output_product(const struct lg_attention_forward_args *a, int64_t b,
                                             int64_t h, const void *weights)
{
    int64_t Tq = a->q.dim[1], Tk = a->k.dim[1], width = a->q.dim[2] * a->q.dim[3];
    int64_t v_stride = lg_row_stride(&a->v, 2);
    return (struct lg_cuda_product){.g = {.in = a->q.dtype,
                                          .out = a->q.dtype,
                                          .a = weights,
                                          .b = head_of(&a->v, b, h),
                                          .d = head_of(&a->o, b, h),
                                          .m = Tq,
                                          .n = a->q.dim[3],
                                          .k = Tk,
                                          .sa_m = Tk,
                                          .sa_k = 1,
                                          .sb_n = 1,
                                          .sb_k = v_stride,
                                          .ldd = width},
                                    .exact = true,
                                    .batch = (int)samples_of(a),
                                    .next_a = Tq * Tk,
                                    .next_b = Tk * v_stride,
                                    .next_d = Tq * width};
}

size_t cuda_wide_attention_scratch(lg_cuda_device *d, const struct lg_attention_forward_args *a)
{
    size_t bytes[2] = {0, 0};
    struct lg_cuda_product scores = scores_product(a, 0, 0, NULL);
    struct lg_cuda_product output = output_product(a, 0, 0, NULL);
    lg_cuda_gemm_plan(d, &scores, &bytes[0]);
    lg_cuda_gemm_plan(d, &output, &bytes[1]);
    return scores_bytes(a) + weights_bytes(a) + LG_MAX(bytes[0], bytes[1]);
}

static void multiply(lg_stream *s, struct lg_cuda_product *x)
{
    if (lg_cuda_gemm_run(s, x)) return;
    struct cuda_any_gemm g = x->g;
    size_t in = lg_dtype_bytes(g.in), out = lg_dtype_bytes(g.out);
    for (int i = 0; i < x->batch; i++) {
        cuda_any_gemm(lg_cuda_stream_of(s), &g);
        g.a = (const char *)g.a + (size_t)x->next_a * in;
        g.b = (const char *)g.b + (size_t)x->next_b * in;
        g.d = (char *)g.d + (size_t)x->next_d * out;
    }
}

void cuda_wide_attention(lg_stream *s, const struct lg_attention_forward_args *a)
{
    char *scores = s->scratch, *weights = scores + scores_bytes(a);
    char *workspace = weights + weights_bytes(a);
    int64_t B = a->q.dim[0], H = a->q.dim[2], samples = samples_of(a);
    for (int64_t b = 0; b < B; b += samples) {
        for (int64_t h = 0; h < H; h++) {
            struct lg_cuda_product qk = scores_product(a, b, h, scores);
            struct lg_cuda_product pv = output_product(a, b, h, weights);
            qk.workspace = pv.workspace = workspace;
            multiply(s, &qk);
            cuda_softmax_rows(lg_cuda_stream_of(s), a, b, samples, h, (const float *)scores,
                              weights);
            multiply(s, &pv);
        }
    }
}
