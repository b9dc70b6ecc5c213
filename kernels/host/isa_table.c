/* The table of one instruction set: every operation of ops.def, most from the isa_*.c files,
 * products and convolutions from onednn.c (oneDNN was told the same set when the device was
 * opened). */
#include "kernels/host/isa.h"

void LG_K(linear_forward)(lg_stream *s, const struct lg_linear_forward_args *a)
{
    lg_host_linear_forward(s, a);
}

void LG_K(linear_backward_data)(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    lg_host_linear_backward_data(s, a);
}

void LG_K(linear_backward_weight)(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    lg_host_linear_backward_weight(s, a);
}

void LG_K(conv2d_forward)(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    lg_onednn_conv2d_forward(s, a);
    if (a->mean_var.data) LG_K(group_mean_var)(s, a->y, a->mean_var);
}

void LG_K(conv2d_backward_data)(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    lg_onednn_conv2d_backward_data(s, a);
}

void LG_K(conv2d_backward_weight)(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    lg_onednn_conv2d_backward_weight(s, a);
}

void LG_K(conv3d_forward)(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    struct lg_conv3d_forward_args conv = *a;
    if (!a->y.data) conv.y = a->normed;
    lg_onednn_conv3d_forward(s, &conv);
    if (!a->normed.data) return;
    const int64_t D = conv.y.dim[3], rows = lg_host_numel(&conv.y) / D;
    LG_K(rms_act_forward)
    (s, &(struct lg_rms_act_forward_args){.x = lg_t2(conv.y.data, conv.y.dtype, rows, D),
                                          .y = lg_t2(a->normed.data, conv.y.dtype, rows, D),
                                          .eps = a->eps,
                                          .act = a->act});
}

void LG_K(norm_conv2d_forward)(lg_stream *s, const struct lg_norm_conv2d_forward_args *a)
{
    LG_K(group_norm_forward)(s, &a->norm);
    LG_K(conv2d_forward)(s, &a->conv);
}

const struct lg_host_kernels LG_K(kernels) = {
    .ops =
        {
#define LG_OP(name, ...) .name = LG_K(name),
#include "kernels/ops.def"
#undef LG_OP
        },
    .attention_forward_scratch = LG_K(attention_forward_scratch),
    .attention_backward_scratch = LG_K(attention_backward_scratch),
    .group_norm_scratch = LG_K(group_norm_scratch),
    .group_norm_backward_scratch = LG_K(group_norm_backward_scratch),
};
