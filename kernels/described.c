/* A GPU that is only described; see device.h.
 *
 * What an operation wants of scratch memory there, before libraries are asked and algorithms timed, is a bound: what
 * kernels/cuda lets a library's product or convolution have (WORKSPACE_MAX of gemm.c and cudnn_conv.c), and beside it
 * sums in fp32 of pieces of an operand, which are fewer than its elements; scores of heads that are wider than own kernels
 * take (wide_attention.c). tests/e2e/gpu_fits.sh holds it to what liblg-cuda.so wants. */
#include "base/check.h"
#include "kernels/op_table.h"
#include <stdlib.h>
#include <string.h>

enum { HEAD_OWN_MAX = 128, ALIGNED = 256 };
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

/* Of a head that is wider: scores and what softmax makes of them, of as many samples as fit, at least one. */
static size_t scores(const lg_tensor *q, const lg_tensor *k)
{
    if (q->dim[3] <= HEAD_OWN_MAX) return 0;
    return 2 * LG_MAX(SCORES_BYTES, (size_t)(q->dim[1] * k->dim[1]) * sizeof(float));
}

static size_t scratch_bytes(lg_device *d, lg_op_id op, const void *args)
{
    const size_t sums = largest_operand(lg_op_info(op), args) + ALIGNED;
    (void)d;
    switch (op) {
    case LG_OP_linear_forward:
        return PRODUCT_BYTES;
    case LG_OP_linear_backward_data:
        return LG_MAX(PRODUCT_BYTES,
                      in_fp32(&((const struct lg_linear_backward_data_args *)args)->dx));
    case LG_OP_linear_backward_weight:
        return LG_MAX(PRODUCT_BYTES,
                      in_fp32(&((const struct lg_linear_backward_weight_args *)args)->dy));
    case LG_OP_conv2d_forward:
    case LG_OP_norm_conv2d_forward:
    case LG_OP_conv3d_forward:
        return CONV_BYTES + sums;
    case LG_OP_attention_forward: {
        const struct lg_attention_forward_args *a = args;
        const size_t wide = scores(&a->q, &a->k);
        return wide ? wide + PRODUCT_BYTES : 0;
    }
    case LG_OP_attention_backward:
    case LG_OP_sum_rows:
    case LG_OP_rms_norm_backward:
    case LG_OP_group_norm_forward:
    case LG_OP_norm_modulate_backward:
    case LG_OP_gate_residual_backward:
    case LG_OP_norm_residual_backward:
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
