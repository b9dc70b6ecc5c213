/* The linear operations: as products that cuBLASLt does (gemm.h), with what can ride on them where that
 * is faster; small and odd ones on own kernels. */
#include "kernels/cuda/gelu_product.h"
#include "kernels/cuda/gemm.h"

/* Bytes of workspace; 0 as well when cuBLASLt does not do it. */
static size_t workspace_of(lg_cuda_device *d, const struct lg_cuda_product *x, bool *ret_does)
{
    size_t bytes = 0;
    *ret_does = lg_cuda_gemm_plan(d, x, &bytes);
    return bytes;
}
/* On a dry stream data may be NULL: then the rank counts. */
static bool present(const lg_tensor *t, const lg_tensor *sure)
{
    return t->rank != 0 && (t->data || !sure->data);
}

/* Several products side by side: as one call of cuBLASLt, else one after the other. */
static void multiply(lg_stream *s, const struct lg_cuda_product *x)
{
    const size_t in = lg_dtype_bytes(x->g.in), out = lg_dtype_bytes(x->g.out);
    struct cuda_any_gemm g = x->g;
    if (lg_cuda_gemm_run(s, x)) return;
    for (int i = 0; i < LG_MAX(x->batch, 1); i++) {
        cuda_any_gemm(lg_cuda_stream_of(s), &g);
        g.a = (const char *)g.a + (size_t)x->next_a * in;
        g.b = (const char *)g.b + (size_t)x->next_b * in;
        g.d = (char *)g.d + (size_t)x->next_d * out;
    }
}

/* y or pre (M, N) = x (M, K) w (N, K)^T + bias; n of them side by side. */
static struct lg_cuda_product forward_product(const struct lg_linear_forward_args *a)
{
    int64_t M = a->x.dim[0], K = a->w.dim[1], n = a->x.dim[1] / K, N = a->w.dim[0] / n;
    return (struct lg_cuda_product){.g = {.in = a->x.dtype,
                                          .out = a->x.dtype,
                                          .a = a->x.data,
                                          .b = a->w.data,
                                          .bias = a->bias.data,
                                          .d = a->pre.data ? a->pre.data : a->y.data,
                                          .m = M,
                                          .n = N,
                                          .k = K,
                                          .sa_m = n * K,
                                          .sa_k = 1,
                                          .sb_n = lg_row_stride(&a->w, 1),
                                          .sb_k = 1,
                                          .ldd = n * N,
                                          .accumulate = present(&a->residual, &a->x)},
                                    .epilogue = present(&a->bias, &a->x) ? BIAS : PLAIN,
                                    .bias = a->bias.data,
                                    .batch = (int)n,
                                    .next_a = K,
                                    .next_b = N * lg_row_stride(&a->w, 1),
                                    .next_d = N};
}
/* The same with GELU: y and, if wanted, pre. 16-bit types only: cuBLASLt's tanh is no fp32 tanh. */
static bool gelu_product(const struct lg_linear_forward_args *a, struct lg_cuda_product *ret)
{
    if (a->act != LG_ACT_GELU_TANH || a->x.dtype == LG_F32 || a->residual.rank) return false;
    *ret = forward_product(a);
    if (ret->epilogue != BIAS) return false;
    ret->epilogue = BIAS_GELU;
    ret->g.d = a->y.data;
    ret->pre = a->pre.data;
    ret->keep_pre = present(&a->pre, &a->x);
    return true;
}
size_t cuda_linear_forward_scratch(lg_cuda_device *d, const struct lg_linear_forward_args *a)
{
    struct lg_cuda_product x;
    bool does;
    if (cuda_gelu_forward_fits(d, a)) return 0;
    if (gelu_product(a, &x)) {
        size_t bytes = workspace_of(d, &x, &does);
        if (does) return bytes;
    }
    x = forward_product(a);
    return workspace_of(d, &x, &does);
}
void cuda_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    struct lg_cuda_product x;
    if (cuda_gelu_forward_fits(lg_cuda_device_of(s), a)) {
        cuda_gelu_forward(s, a);
        return;
    }
    if (gelu_product(a, &x) && lg_cuda_gemm_run(s, &x)) return;
    x = forward_product(a);
    if (a->residual.data && a->residual.data != x.g.d)
        LG_CUDA(cudaMemcpyAsync(x.g.d, a->residual.data, lg_tensor_bytes(&a->y),
                                cudaMemcpyDeviceToDevice, lg_cuda_stream_of(s)));
    multiply(s, &x);
    if (a->act == LG_ACT_NONE) return;
    lg_tensor pre = a->pre.data ? a->pre : a->y;
    cuda_act_forward(s, &(struct lg_act_forward_args){.x = pre, .y = a->y, .act = a->act});
}

/* dx (M, K) = dy (M, N) w (N, K), n of them side by side: the inner dimension is N. Where the tiles are too few for the GPU the
 * inner dimension may be split, for all rows alike. */
enum { FEW_OUTPUTS = 1 << 20 };
static struct lg_cuda_product data_product(const struct lg_linear_backward_data_args *a)
{
    int64_t M = a->dy.dim[0], K = a->w.dim[1], n = a->dx.dim[1] / K, N = a->w.dim[0] / n;
    return (struct lg_cuda_product){.g = {.in = a->dy.dtype,
                                          .out = a->dx.dtype,
                                          .a = a->dy.data,
                                          .b = a->w.data,
                                          .d = a->dx.data,
                                          .m = M,
                                          .n = K,
                                          .k = N,
                                          .sa_m = n * N,
                                          .sa_k = 1,
                                          .sb_n = 1,
                                          .sb_k = lg_row_stride(&a->w, 1),
                                          .ldd = n * K,
                                          .accumulate = a->accumulate},
                                    .split_k = M * K <= FEW_OUTPUTS && N > K,
                                    .batch = (int)n,
                                    .next_a = N,
                                    .next_b = N * lg_row_stride(&a->w, 1),
                                    .next_d = K};
}
size_t cuda_linear_backward_data_scratch(lg_cuda_device *d,
                                         const struct lg_linear_backward_data_args *a)
{
    struct lg_cuda_product x = data_product(a);
    bool does;
    if (cuda_gelu_backward_fits(d, a)) return cuda_gelu_backward_scratch(a);
    size_t product = workspace_of(d, &x, &does);
    size_t sums = a->dbias.rank ? cuda_column_sums_scratch(a->dx.dim[0], a->dx.dim[1]) : 0;
    return LG_MAX(product, sums);
}
void cuda_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    struct lg_cuda_product x = data_product(a);
    if (cuda_gelu_backward_fits(lg_cuda_device_of(s), a)) {
        cuda_gelu_backward(s, a);
        return;
    }
    multiply(s, &x);
    if (a->act == LG_ACT_NONE) return;
    if (a->dbias.data)
        cuda_act_backward_sums(lg_cuda_stream_of(s), a, s->scratch);
    else
        cuda_act_backward(s, &(struct lg_act_backward_args){
                                 .x = a->pre, .dy = a->dx, .dx = a->dx, .act = a->act});
}

/* dw (N, K) = dy (M, N)^T x (M, K), n of them side by side: the inner dimension is M. */
static struct lg_cuda_product weight_product(const struct lg_linear_backward_weight_args *a)
{
    int64_t M = a->dy.dim[0], K = a->dw.dim[1], n = a->x.dim[1] / K, N = a->dw.dim[0] / n;
    return (struct lg_cuda_product){.g = {.in = a->dy.dtype,
                                          .out = a->dw.dtype,
                                          .a = a->dy.data,
                                          .b = a->x.data,
                                          .d = a->dw.data,
                                          .m = N,
                                          .n = K,
                                          .k = M,
                                          .sa_m = 1,
                                          .sa_k = n * N,
                                          .sb_n = 1,
                                          .sb_k = n * K,
                                          .ldd = K,
                                          .accumulate = a->accumulate},
                                    .split_k = true,
                                    .batch = (int)n,
                                    .next_a = N,
                                    .next_b = K,
                                    .next_d = N * K};
}
/* The same with dbias (N), which is overwritten: not when accumulating. */
static bool bias_gradient_product(const struct lg_linear_backward_weight_args *a,
                                  struct lg_cuda_product *ret)
{
    if (a->accumulate || a->dy.dtype == LG_F32 || !present(&a->dbias, &a->dy)) return false;
    *ret = weight_product(a);
    ret->epilogue = BIAS_GRADIENT;
    ret->bias = a->dbias.data;
    ret->bias_type = a->dbias.dtype;
    return true;
}
size_t cuda_linear_backward_weight_scratch(lg_cuda_device *d,
                                           const struct lg_linear_backward_weight_args *a)
{
    struct lg_cuda_product x;
    bool does;
    if (bias_gradient_product(a, &x)) {
        size_t bytes = workspace_of(d, &x, &does);
        if (does) return bytes;
    }
    x = weight_product(a);
    size_t product = workspace_of(d, &x, &does);
    size_t sums = a->dbias.rank ? cuda_column_sums_scratch(a->dy.dim[0], a->dy.dim[1]) : 0;
    return LG_MAX(product, sums);
}
void cuda_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    struct lg_cuda_product x;
    if (bias_gradient_product(a, &x) && lg_cuda_gemm_run(s, &x)) return;
    x = weight_product(a);
    multiply(s, &x);
    if (a->dbias.data)
        cuda_column_sums(lg_cuda_stream_of(s), a->dy, a->dy.dim[1], a->dbias, a->accumulate,
                         s->scratch);
}
