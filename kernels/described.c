/* A GPU that is only described; see device.h.
 *
 * What an operation wants of scratch memory there, before libraries are asked and algorithms timed, is a bound: what
 * kernels/cuda lets a library's product or convolution have (WORKSPACE_MAX of gemm.c and cudnn_conv.c); sums in fp32 over
 * pieces of at least PIECE rows (column_sums.cu, gelu_product.cu, norm.cuh), else of an operand's elements; an attention's dQ in
 * fp32, its rows and counters (long_attention_scratch.cuh), scores of heads that are wider than own kernels take
 * (wide_attention.c), and two streams' tokens brought together, which some kernels do (streams.h). tests/e2e/gpu_fits.sh holds it to what liblg-cuda.so wants. */
#include "base/check.h"
#include "kernels/op_table.h"
#include "kernels/streams.h"
#include <stdlib.h>
#include <string.h>

enum { HEAD_OWN_MAX = 128, ALIGNED = 256, PIECE = 64, NORM_SUMS = 4 };
#define PRODUCT_BYTES ((size_t)32 << 20)
#define CONV_BYTES    ((size_t)256 << 20)
#define SCORES_BYTES  ((size_t)256 << 20) /* PASS_BYTES of wide_attention.c, at least */

#define LG_OP(name, ...)                                                                           \
    static void only_planned_##name(lg_stream *s, const struct lg_##name##_args *a)                \
    {                                                                                              \
        (void)s, (void)a;                                                                          \
        LG_ASSERT(!"a described device runs nothing");                                             \
    }
#include "kernels/ops.def"
#undef LG_OP

static const struct lg_ops OPS = {
#define LG_OP(name, ...) .name = only_planned_##name,
#include "kernels/ops.def"
#undef LG_OP
};

static size_t in_fp32(const lg_tensor *t)
{
    return t->rank ? (size_t)lg_numel(t) * sizeof(float) : 0;
}

/* Of a call. */
static size_t largest_operand(const struct lg_op_info *op, const void *args)
{
    size_t most = 0;
    for (int i = 0; i < op->n_operands; i++) {
        const struct lg_operand *o = &op->operand[i];
        for (int k = 0; k < lg_operand_count(o, args); k++)
            most = LG_MAX(most, in_fp32(lg_operand_at(o, args, k)));
    }
    return most;
}

/* A sum of each column for each piece of rows. */
static size_t column_sums(int64_t rows, int64_t columns)
{
    return (size_t)((rows + PIECE - 1) / PIECE * columns) * sizeof(float) + ALIGNED;
}

/* x: (B, T, D); all kinds of sums, and one of each sample. */
static size_t norm_sums(const lg_tensor *x)
{
    return (size_t)x->dim[0] *
           (NORM_SUMS * column_sums(x->dim[1], x->dim[2]) + (size_t)x->dim[2] * sizeof(float));
}

static int64_t rounded(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* dQ, of which some of a head's columns lie twice; three numbers of each of its rows; with few keys dK and dV for each part of
 * the queries; beside them the bias's. */
static size_t attention_sums(const struct lg_attention_backward_args *a)
{
    enum { BLOCK = 128, FEW_KEYS = 512, PART = 1024 };
    const int64_t B = a->q.dim[0], Tq = a->q.dim[1], Tk = a->k.dim[1], H = a->q.dim[2];
    const int64_t D = a->q.dim[3], rows = B * H * rounded(Tq, BLOCK);
    const int64_t parts = Tk < FEW_KEYS ? 2 * rounded(Tq, PART) / PART : 0;
    const int64_t floats =
        rows * (D + D / 8 + 3) + parts * B * H * rounded(Tk, BLOCK) * D + 4 * ALIGNED;
    return (size_t)floats * sizeof(float) +
           (a->dbias.rank ? column_sums(B * LG_MAX(Tq, Tk), 3 * H * D) : 0);
}

/* Of a head that is wider: scores and what softmax makes of them, of as many samples as fit, at least one. */
static size_t scores(const lg_tensor *q, const lg_tensor *k)
{
    if (q->dim[3] <= HEAD_OWN_MAX) return 0;
    return 2 * LG_MAX(SCORES_BYTES, (size_t)(q->dim[1] * k->dim[1]) * sizeof(float));
}

/* A product, or the sums of what has as many rows as it. */
static size_t rows_of(const lg_tensor *t)
{
    return LG_MAX(PRODUCT_BYTES, column_sums(t->dim[0], t->dim[1]));
}

static size_t scratch_bytes(lg_device *d, lg_op_id op, const void *args)
{
    const size_t sums = largest_operand(lg_op_info(op), args) + ALIGNED;
    (void)d;
    switch (op) {
    case LG_OP_linear_forward:
        return PRODUCT_BYTES;
    case LG_OP_linear_backward_data:
        return rows_of(&((const struct lg_linear_backward_data_args *)args)->dx);
    case LG_OP_linear_backward_weight:
        return rows_of(&((const struct lg_linear_backward_weight_args *)args)->dy);
    case LG_OP_conv2d_forward:
    case LG_OP_norm_conv2d_forward:
    case LG_OP_conv3d_forward:
        return CONV_BYTES + sums;
    case LG_OP_attention_forward: {
        const struct lg_attention_forward_args *a = args;
        struct lg_attention_forward_args one;
        const size_t wide = scores(&a->q, &a->k);
        return lg_streams_join_forward(a, NULL, &one) + (wide ? wide + PRODUCT_BYTES : 0);
    }
    case LG_OP_attention_backward: {
        struct lg_attention_backward_args one;
        return lg_streams_join_backward(args, NULL, &one) + LG_MAX(sums, attention_sums(args));
    }
    case LG_OP_norm_modulate_backward:
        return norm_sums(&((const struct lg_norm_modulate_backward_args *)args)->x);
    case LG_OP_gate_residual_backward:
        return norm_sums(&((const struct lg_gate_residual_backward_args *)args)->dout);
    case LG_OP_norm_residual_backward:
        return norm_sums(&((const struct lg_norm_residual_backward_args *)args)->norm.x);
    case LG_OP_sum_rows: {
        const struct lg_sum_rows_args *a = args;
        return column_sums(a->x.dim[0], a->x.dim[1]);
    }
    case LG_OP_rms_norm_backward: {
        const struct lg_rms_norm_backward_args *a = args;
        const int64_t tokens = a->dx.dim[0] * a->dx.dim[1];
        const int64_t width = a->dx.dim[2] * a->dx.dim[3] + (a->rest.rank ? a->rest.dim[2] : 0);
        return sums + (a->dbias.rank || a->rest.rank ? column_sums(tokens, width) : 0);
    }
    case LG_OP_group_norm_forward:
        return sums;
    default:
        return 0;
    }
}

static void only_planned(void)
{
    LG_ASSERT(!"a described device has no memory and no streams but dry ones");
}

static int alloc(lg_device *d, size_t bytes, void **ret)
{
    (void)d, (void)bytes, (void)ret;
    only_planned();
    return LG_ERR_FAILED;
}

static void close_described(lg_device *d)
{
    free(d);
}

int lg_device_describe(const char *precision, lg_device **ret)
{
    static const struct {
        const char *name;
        lg_dtype dtype;
    } known[] = {{"fp32", LG_F32}, {"tf32", LG_F32}, {"bf16", LG_BF16}, {"fp16", LG_F16}};
    lg_device *d = calloc(1, sizeof *d);
    if (!d) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a device");
    *d = (lg_device){.ops = &OPS,
                     .dtype = LG_F32,
                     .isa = "described",
                     .fingerprint = "described",
                     .threads = 1,
                     .scratch_bytes = scratch_bytes,
                     .alloc = alloc,
                     .close = close_described};
    for (size_t i = 0; i < LG_ARRAY_LEN(known); i++)
        if (!strcmp(precision, known[i].name)) d->dtype = known[i].dtype;
    *ret = d;
    return 0;
}
