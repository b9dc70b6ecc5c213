/* Attention through cuDNN, for bf16 and fp16: head sizes up to 128, key lengths, packed inputs.
 *
 * Forward: cuDNN's own operation, which takes no bias on the scores; causal ones are left to others.
 * Backward: composed, as cuDNN 9.19 has none that builds:
 *
 *     r = rows' sums of dout o,  p = exp(scale q k^T - lse)              (B, H, Tq, Tk), virtual
 *     dv = p^T dout,  ds = scale p (dout v^T - r),  dk = ds^T q,  dq = ds k
 *
 * dq by a product with ds, which goes through the workspace in 16 bits (B H Tq Tk 2 bytes, both
 * rounded up to 64), and not by adding to an fp32 sum: that makes the bits always the same.
 *
 * Key lengths: a padding mask wants the lengths of the queries, too: all Tq, filled into the scratch
 * memory before the plan's workspace. The rows of keys beyond the length are cleared beforehand. */
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/cudnn_api.h"
#include <string.h>

enum uid { Q = 1, K, V, O, DOUT, LSE, SCALE, Q_LENGTH, K_LENGTH, DQ, DK, DV, ONE, ROW_SUMS, MINUS };
enum { HEAD_MAX = 128 };

/* Places in the key. */
enum { N_TYPE, N_B, N_H, N_TQ, N_TK, N_D, N_QS, N_KS, N_VS, N_DQS, N_DKS, N_DVS, N_MASK, N_LSE };

typedef cudnnBackendDescriptor_t desc;

/* (B, H, T, d) seen through token stride ts. */
static desc heads(struct cudnn_graph *g, const struct cudnn_key *k, int64_t uid, int64_t T,
                  int64_t ts)
{
    const int64_t *n = k->n;
    return cudnn_tensor(g, &(struct cudnn_tensor_spec){.uid = uid,
                                                       .type = cudnn_type((lg_dtype)n[N_TYPE]),
                                                       .dim = {n[N_B], n[N_H], T, n[N_D]},
                                                       .stride = {T * ts, n[N_D], ts, 1}});
}
/* The same with the last two dimensions swapped: (B, H, d, T). */
static desc heads_swapped(struct cudnn_graph *g, const struct cudnn_key *k, int64_t uid, int64_t T,
                          int64_t ts)
{
    const int64_t *n = k->n;
    return cudnn_tensor(g, &(struct cudnn_tensor_spec){.uid = uid,
                                                       .type = cudnn_type((lg_dtype)n[N_TYPE]),
                                                       .dim = {n[N_B], n[N_H], n[N_D], T},
                                                       .stride = {T * ts, n[N_D], 1, ts}});
}
/* (B, H, Tq, Tk), virtual. */
static desc scores(struct cudnn_graph *g, const struct cudnn_key *k, cudnnDataType_t type)
{
    const int64_t *n = k->n, tq = n[N_TQ], tk = n[N_TK];
    return cudnn_tensor(g,
                        &(struct cudnn_tensor_spec){.type = type,
                                                    .dim = {n[N_B], n[N_H], tq, tk},
                                                    .stride = {n[N_H] * tq * tk, tq * tk, tk, 1}});
}
static desc scores_swapped(struct cudnn_graph *g, const struct cudnn_key *k)
{
    const int64_t *n = k->n, tq = n[N_TQ], tk = n[N_TK];
    return cudnn_tensor(g,
                        &(struct cudnn_tensor_spec){.type = cudnn_type((lg_dtype)n[N_TYPE]),
                                                    .dim = {n[N_B], n[N_H], tk, tq},
                                                    .stride = {n[N_H] * tq * tk, tq * tk, 1, tk}});
}
/* (B, H, Tq, 1), fp32. */
static desc rows(struct cudnn_graph *g, const struct cudnn_key *k, int64_t uid)
{
    const int64_t *n = k->n;
    return cudnn_tensor(g,
                        &(struct cudnn_tensor_spec){.uid = uid,
                                                    .type = CUDNN_DATA_FLOAT,
                                                    .dim = {n[N_B], n[N_H], n[N_TQ], 1},
                                                    .stride = {n[N_H] * n[N_TQ], n[N_TQ], 1, 1}});
}
static desc scalar(struct cudnn_graph *g, int64_t uid)
{
    return cudnn_tensor(g, &(struct cudnn_tensor_spec){.uid = uid,
                                                       .type = CUDNN_DATA_FLOAT,
                                                       .dim = {1, 1, 1, 1},
                                                       .stride = {1, 1, 1, 1},
                                                       .by_value = true});
}
static desc lengths(struct cudnn_graph *g, const struct cudnn_key *k, int64_t uid)
{
    return cudnn_tensor(g, &(struct cudnn_tensor_spec){.uid = uid,
                                                       .type = CUDNN_DATA_INT32,
                                                       .dim = {k->n[N_B], 1, 1, 1},
                                                       .stride = {1, 1, 1, 1}});
}

static void pointwise(struct cudnn_graph *g, cudnnPointwiseMode_t mode, desc x, desc b, desc y)
{
    cudnn_pointwise(g, &(struct cudnn_pointwise_spec){
                           .mode = mode, .precision = CUDNN_DATA_FLOAT, .x = x, .b = b, .y = y});
}

/* x where the key is below its sample's length, else -infinity. */
static desc masked(struct cudnn_graph *g, const struct cudnn_key *k, desc x, desc q_length,
                   desc k_length)
{
    desc row = scores(g, k, CUDNN_DATA_INT32), column = scores(g, k, CUDNN_DATA_INT32);
    desc row_in = scores(g, k, CUDNN_DATA_BOOLEAN), column_in = scores(g, k, CUDNN_DATA_BOOLEAN);
    desc both = scores(g, k, CUDNN_DATA_BOOLEAN), y = scores(g, k, CUDNN_DATA_FLOAT);
    const struct cudnn_pointwise_spec steps[] = {
        {.mode = CUDNN_POINTWISE_GEN_INDEX,
         .precision = CUDNN_DATA_INT32,
         .x = x,
         .y = row,
         .axis = 2},
        {.mode = CUDNN_POINTWISE_GEN_INDEX,
         .precision = CUDNN_DATA_INT32,
         .x = x,
         .y = column,
         .axis = 3},
        {.mode = CUDNN_POINTWISE_CMP_LT,
         .precision = CUDNN_DATA_BOOLEAN,
         .x = row,
         .b = q_length,
         .y = row_in},
        {.mode = CUDNN_POINTWISE_CMP_LT,
         .precision = CUDNN_DATA_BOOLEAN,
         .x = column,
         .b = k_length,
         .y = column_in},
        {.mode = CUDNN_POINTWISE_LOGICAL_AND,
         .precision = CUDNN_DATA_BOOLEAN,
         .x = row_in,
         .b = column_in,
         .y = both},
        {.mode = CUDNN_POINTWISE_BINARY_SELECT,
         .precision = CUDNN_DATA_FLOAT,
         .x = x,
         .b = scalar(g, MINUS),
         .t = both,
         .y = y},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(steps); i++) cudnn_pointwise(g, &steps[i]);
    return y;
}

/* ---- forward ---- */

static bool build_forward(struct lg_cudnn *c, const struct cudnn_key *k, struct cudnn_plan *ret)
{
    struct cudnn_graph g = {.c = c};
    const int64_t *n = k->n;
    desc op = cudnn_make(&g, CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR);
#define ATTACH(what, value)                                                                        \
    cudnn_set_desc(&g, op, CUDNN_ATTR_OPERATION_SDPA_FWD_##what##DESC, value)
    ATTACH(Q, heads(&g, k, Q, n[N_TQ], n[N_QS]));
    ATTACH(K, heads(&g, k, K, n[N_TK], n[N_KS]));
    ATTACH(V, heads(&g, k, V, n[N_TK], n[N_VS]));
    ATTACH(O, heads(&g, k, O, n[N_TQ], n[N_H] * n[N_D]));
    if (n[N_LSE]) ATTACH(STATS, rows(&g, k, LSE));
    ATTACH(SCALE, scalar(&g, SCALE));
    if (n[N_MASK]) {
        ATTACH(SEQ_LEN_Q, lengths(&g, k, Q_LENGTH));
        ATTACH(SEQ_LEN_KV, lengths(&g, k, K_LENGTH));
    }
#undef ATTACH
    cudnn_operation(&g, op);
    bool ok = cudnn_first_plan(&g, &ret->plan, &ret->workspace);
    cudnn_graph_free(&g);
    return ok;
}

/* ---- backward ---- */

static bool build_backward(struct lg_cudnn *c, const struct cudnn_key *k, struct cudnn_plan *ret)
{
    struct cudnn_graph graph = {.c = c}, *g = &graph;
    const int64_t *n = k->n, tq = n[N_TQ], tk = n[N_TK], width = n[N_H] * n[N_D];
    cudnnDataType_t F = CUDNN_DATA_FLOAT, T = cudnn_type((lg_dtype)n[N_TYPE]);
    desc q = heads(g, k, Q, tq, n[N_QS]), kt = heads_swapped(g, k, K, tk, n[N_KS]);
    desc vt = heads_swapped(g, k, V, tk, n[N_VS]), o = heads(g, k, O, tq, width);
    desc dout = heads(g, k, DOUT, tq, width), scale = scalar(g, SCALE);
    desc ql = n[N_MASK] ? lengths(g, k, Q_LENGTH) : NULL;
    desc kl = n[N_MASK] ? lengths(g, k, K_LENGTH) : NULL;

    desc dout_o =
        cudnn_tensor(g, &(struct cudnn_tensor_spec){.type = F,
                                                    .dim = {n[N_B], n[N_H], tq, n[N_D]},
                                                    .stride = {tq * width, tq * n[N_D], width, 1}});
    desc sums = rows(g, k, 0), row_sums = rows(g, k, ROW_SUMS);
    pointwise(g, CUDNN_POINTWISE_MUL, dout, o, dout_o);
    cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, dout_o, sums);
    pointwise(g, CUDNN_POINTWISE_MUL, sums, scalar(g, ONE), row_sums);

    desc qk = scores(g, k, F), scaled = scores(g, k, F), shifted = scores(g, k, F);
    desc p = scores(g, k, F), pt = scores_swapped(g, k);
    cudnn_matmul(g, &(struct cudnn_matmul_spec){.a = q, .b = kt, .c = qk, .m = ql, .n = kl});
    pointwise(g, CUDNN_POINTWISE_MUL, qk, scale, scaled);
    if (n[N_MASK]) scaled = masked(g, k, scaled, ql, kl);
    pointwise(g, CUDNN_POINTWISE_SUB, scaled, rows(g, k, LSE), shifted);
    pointwise(g, CUDNN_POINTWISE_EXP, shifted, NULL, p);
    cudnn_reshape(g, p, pt);
    desc dv = heads(g, k, DV, tk, n[N_DVS]);
    cudnn_matmul(g, &(struct cudnn_matmul_spec){.a = pt, .b = dout, .c = dv, .m = kl, .k = ql});

    desc dp = scores(g, k, F), centred = scores(g, k, F), weighted = scores(g, k, F);
    desc ds = scores(g, k, T), dst = scores_swapped(g, k);
    cudnn_matmul(g, &(struct cudnn_matmul_spec){.a = dout, .b = vt, .c = dp, .m = ql, .n = kl});
    pointwise(g, CUDNN_POINTWISE_SUB, dp, row_sums, centred);
    pointwise(g, CUDNN_POINTWISE_MUL, centred, p, weighted);
    pointwise(g, CUDNN_POINTWISE_MUL, weighted, scale, ds);
    cudnn_reshape(g, ds, dst);
    desc dk = heads(g, k, DK, tk, n[N_DKS]);
    cudnn_matmul(g, &(struct cudnn_matmul_spec){.a = dst, .b = q, .c = dk, .m = kl, .k = ql});

    desc keys = heads(g, k, 0, tk, n[N_KS]), dq = heads(g, k, DQ, tq, n[N_DQS]);
    cudnn_reshape(g, kt, keys);
    cudnn_matmul(g, &(struct cudnn_matmul_spec){.a = ds, .b = keys, .c = dq, .m = ql, .k = kl});
    bool ok = cudnn_first_plan(g, &ret->plan, &ret->workspace);
    cudnn_graph_free(g);
    return ok;
}

/* ---- which calls ---- */

/* A 16-bit type, heads of whole 16 bytes, tensors on 16 bytes. */
static bool takes(const lg_cuda_device *d, const lg_tensor *q, const lg_tensor *k,
                  const lg_tensor *v)
{
    int64_t head = q->dim[3];
    return d->cudnn && q->dtype != LG_F32 && head % 8 == 0 && head <= HEAD_MAX &&
           lg_row_stride(q, 2) % 8 == 0 && lg_row_stride(k, 2) % 8 == 0 &&
           lg_row_stride(v, 2) % 8 == 0;
}
static bool present(const lg_tensor *t, const lg_tensor *sure)
{
    return t->rank != 0 && (t->data || !sure->data);
}

static struct cudnn_plan *forward_plan(lg_cuda_device *d, const struct lg_attention_forward_args *a)
{
    const void *p[] = {a->q.data, a->k.data, a->v.data, a->o.data, a->lse.data};
    if (!takes(d, &a->q, &a->k, &a->v) || present(&a->bias, &a->q) || a->causal) return NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(p); i++)
        if (!lg_cuda_aligned_16(p[i])) return NULL;
    struct cudnn_key key;
    memset(&key, 0, sizeof key);
    key.op = LG_OP_attention_forward;
    key.n[N_TYPE] = a->q.dtype;
    key.n[N_B] = a->q.dim[0], key.n[N_TQ] = a->q.dim[1], key.n[N_H] = a->q.dim[2];
    key.n[N_D] = a->q.dim[3], key.n[N_TK] = a->k.dim[1];
    key.n[N_QS] = lg_row_stride(&a->q, 2), key.n[N_KS] = lg_row_stride(&a->k, 2);
    key.n[N_VS] = lg_row_stride(&a->v, 2);
    key.n[N_MASK] = present(&a->k_length, &a->q), key.n[N_LSE] = present(&a->lse, &a->q);
    return cudnn_plan_of(d->cudnn, &key, build_forward);
}

static struct cudnn_plan *backward_plan(lg_cuda_device *d,
                                        const struct lg_attention_backward_args *a)
{
    const void *p[] = {a->q.data,    a->k.data,  a->v.data,  a->o.data, a->lse.data,
                       a->dout.data, a->dq.data, a->dk.data, a->dv.data};
    if (!takes(d, &a->q, &a->k, &a->v)) return NULL;
    if (!takes(d, &a->dq, &a->dk, &a->dv)) return NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(p); i++)
        if (!lg_cuda_aligned_16(p[i])) return NULL;
    struct cudnn_key key;
    memset(&key, 0, sizeof key);
    key.op = LG_OP_attention_backward;
    key.n[N_TYPE] = a->q.dtype;
    key.n[N_B] = a->q.dim[0], key.n[N_TQ] = a->q.dim[1], key.n[N_H] = a->q.dim[2];
    key.n[N_D] = a->q.dim[3], key.n[N_TK] = a->k.dim[1];
    key.n[N_QS] = lg_row_stride(&a->q, 2), key.n[N_KS] = lg_row_stride(&a->k, 2);
    key.n[N_VS] = lg_row_stride(&a->v, 2);
    key.n[N_DQS] = lg_row_stride(&a->dq, 2), key.n[N_DKS] = lg_row_stride(&a->dk, 2);
    key.n[N_DVS] = lg_row_stride(&a->dv, 2);
    key.n[N_MASK] = present(&a->k_length, &a->q);
    return cudnn_plan_of(d->cudnn, &key, build_backward);
}

/* Scratch: the queries' lengths, the rows' sums (backward), the workspace. */
static size_t lengths_bytes(const lg_tensor *q)
{
    return lg_cuda_round_up((size_t)q->dim[0] * sizeof(int32_t));
}
static size_t sums_bytes(const lg_tensor *q)
{
    return lg_cuda_round_up((size_t)(q->dim[0] * q->dim[1] * q->dim[2]) * sizeof(float));
}

size_t lg_cudnn_attention_forward_scratch(lg_cuda_device *d,
                                          const struct lg_attention_forward_args *a)
{
    const struct cudnn_plan *plan = forward_plan(d, a);
    return plan ? lengths_bytes(&a->q) + (size_t)plan->workspace : 0;
}

bool lg_cudnn_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    cudaStream_t stream = lg_cuda_stream_of(s);
    const struct cudnn_plan *plan = forward_plan(d, a);
    if (!plan) return false;
    struct cudnn_binding b = {0};
    float scale = (float)a->scale;
    char *scratch = s->scratch;
    cudnn_bind(&b, Q, a->q.data);
    cudnn_bind(&b, K, a->k.data);
    cudnn_bind(&b, V, a->v.data);
    cudnn_bind(&b, O, a->o.data);
    cudnn_bind(&b, SCALE, &scale);
    if (a->lse.data) cudnn_bind(&b, LSE, a->lse.data);
    if (a->k_length.data) {
        cuda_fill_i32(stream, (int32_t *)scratch, a->q.dim[0], (int32_t)a->q.dim[1]);
        cudnn_bind(&b, Q_LENGTH, scratch);
        cudnn_bind(&b, K_LENGTH, a->k_length.data);
    }
    cudnn_run(d->cudnn, plan->plan, &b, scratch + lengths_bytes(&a->q), stream);
    return true;
}

size_t lg_cudnn_attention_backward_scratch(lg_cuda_device *d,
                                           const struct lg_attention_backward_args *a)
{
    const struct cudnn_plan *plan = backward_plan(d, a);
    return plan ? lengths_bytes(&a->q) + sums_bytes(&a->q) + (size_t)plan->workspace : 0;
}

/* dk or dv := 0, only the heads' part of each row. */
static void clear_rows(const lg_tensor *t, cudaStream_t stream)
{
    size_t e = lg_dtype_bytes(t->dtype);
    LG_CUDA(cudaMemset2DAsync(t->data, (size_t)lg_row_stride(t, 2) * e, 0,
                              (size_t)(t->dim[2] * t->dim[3]) * e, (size_t)(t->dim[0] * t->dim[1]),
                              stream));
}

bool lg_cudnn_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a)
{
    lg_cuda_device *d = lg_cuda_device_of(s);
    cudaStream_t stream = lg_cuda_stream_of(s);
    const struct cudnn_plan *plan = backward_plan(d, a);
    if (!plan) return false;
    struct cudnn_binding b = {0};
    float scale = (float)a->scale, one = 1, minus = -1e30f;
    char *sums = (char *)s->scratch + lengths_bytes(&a->q);
    cudnn_bind(&b, Q, a->q.data);
    cudnn_bind(&b, K, a->k.data);
    cudnn_bind(&b, V, a->v.data);
    cudnn_bind(&b, O, a->o.data);
    cudnn_bind(&b, DOUT, a->dout.data);
    cudnn_bind(&b, LSE, a->lse.data);
    cudnn_bind(&b, SCALE, &scale);
    cudnn_bind(&b, ONE, &one);
    cudnn_bind(&b, ROW_SUMS, sums);
    cudnn_bind(&b, DQ, a->dq.data);
    cudnn_bind(&b, DK, a->dk.data);
    cudnn_bind(&b, DV, a->dv.data);
    if (a->k_length.data) {
        cuda_fill_i32(stream, s->scratch, a->q.dim[0], (int32_t)a->q.dim[1]);
        cudnn_bind(&b, Q_LENGTH, s->scratch);
        cudnn_bind(&b, K_LENGTH, a->k_length.data);
        cudnn_bind(&b, MINUS, &minus);
        clear_rows(&a->dk, stream);
        clear_rows(&a->dv, stream);
    }
    cudnn_run(d->cudnn, plan->plan, &b, sums + sums_bytes(&a->q), stream);
    return true;
}
