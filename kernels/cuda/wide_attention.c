/* Attention with heads wider than the tiles of attention.cu (the autoencoder's single head of 512): for
 * each sample and head, scores = q k^T, softmax row by row, o = p v, as two products and a launch. In
 * fp32 also where the precision is tf32 (gemm.c says why): 2.1 GFLOP a picture of 256 x 256.
 *
 * Scratch: scores (Tq, Tk) in fp32, p (Tq, Tk) in the compute type, the products' workspace. */
#include "kernels/cuda/wide_attention.h"
#include "kernels/cuda/gemm.h"

static size_t scores_bytes(const struct lg_attention_forward_args *a)
{
    return lg_cuda_round_up((size_t)(a->q.dim[1] * a->k.dim[1]) * sizeof(float));
}
static size_t weights_bytes(const struct lg_attention_forward_args *a)
{
    return lg_cuda_round_up((size_t)(a->q.dim[1] * a->k.dim[1]) * lg_dtype_bytes(a->q.dtype));
}

/* Sample b, head h of a tensor with T tokens a sample; NULL stays. */
static void *head_of(const lg_tensor *t, int64_t T, int64_t stride, int64_t b, int64_t h)
{
    if (!t->data) return NULL;
    return (char *)t->data + (size_t)(b * T * stride + h * t->dim[3]) * lg_dtype_bytes(t->dtype);
}

static struct lg_cuda_product scores_product(const struct lg_attention_forward_args *a, int64_t b,
                                             int64_t h, void *scores)
{
    int64_t Tq = a->q.dim[1], Tk = a->k.dim[1];
    return (struct lg_cuda_product){.g = {.in = a->q.dtype,
                                          .out = LG_F32,
                                          .a = head_of(&a->q, Tq, a->q_stride, b, h),
                                          .b = head_of(&a->k, Tk, a->kv_stride, b, h),
                                          .d = scores,
                                          .m = Tq,
                                          .n = Tk,
                                          .k = a->q.dim[3],
                                          .sa_m = a->q_stride,
                                          .sa_k = 1,
                                          .sb_n = a->kv_stride,
                                          .sb_k = 1,
                                          .ldd = Tk},
                                    .exact = true};
}
static struct lg_cuda_product output_product(const struct lg_attention_forward_args *a, int64_t b,
                                             int64_t h, const void *weights)
{
    int64_t Tq = a->q.dim[1], Tk = a->k.dim[1], width = a->q.dim[2] * a->q.dim[3];
    return (struct lg_cuda_product){.g = {.in = a->q.dtype,
                                          .out = a->q.dtype,
                                          .a = weights,
                                          .b = head_of(&a->v, Tk, a->kv_stride, b, h),
                                          .d = head_of(&a->o, Tq, width, b, h),
                                          .m = Tq,
                                          .n = a->q.dim[3],
                                          .k = Tk,
                                          .sa_m = Tk,
                                          .sa_k = 1,
                                          .sb_n = 1,
                                          .sb_k = a->kv_stride,
                                          .ldd = width},
                                    .exact = true};
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

void cuda_wide_attention(lg_stream *s, const struct lg_attention_forward_args *a)
{
    cudaStream_t stream = lg_cuda_stream_of(s);
    char *scores = s->scratch, *weights = scores + scores_bytes(a);
    char *workspace = weights + weights_bytes(a);
    int64_t B = a->q.dim[0], H = a->q.dim[2];
    for (int64_t b = 0; b < B; b++) {
        for (int64_t h = 0; h < H; h++) {
            struct lg_cuda_product qk = scores_product(a, b, h, scores);
            struct lg_cuda_product pv = output_product(a, b, h, weights);
            qk.workspace = pv.workspace = workspace;
            if (!lg_cuda_gemm_run(s, &qk)) cuda_any_gemm(stream, &qk.g);
            cuda_softmax_rows(stream, a, b, h, (const float *)scores, weights);
            if (!lg_cuda_gemm_run(s, &pv)) cuda_any_gemm(stream, &pv.g);
        }
    }
}
