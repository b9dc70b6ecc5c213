/* Inside of liblg-host.so: the device, the kernels' table of each instruction set, and what
 * onednn.c offers. Only files of this folder include it. */
#pragma once
#include "base/check.h"
#include "kernels/backend.h"

/* Everything that a kernel file compiled per instruction set provides. */
struct lg_host_kernels {
    struct lg_ops ops;
    size_t (*attention_forward_scratch)(const struct lg_attention_forward_args *, int threads);
    size_t (*attention_backward_scratch)(const struct lg_attention_backward_args *, int threads);
    size_t (*group_norm_scratch)(int64_t C, int64_t groups, int threads);
    size_t (*group_norm_backward_scratch)(int64_t N, int64_t C, int threads);
};
/* Those of the build's ISAS (kernels.mk); of the others the address is NULL. */
extern const struct lg_host_kernels lg_host_kernels_sse2 __attribute__((weak)),
    lg_host_kernels_avx2 __attribute__((weak)), lg_host_kernels_avx512 __attribute__((weak));

struct lg_onednn; /* primitives made so far, see onednn.c */

typedef struct lg_host_device {
    lg_device base;
    const struct lg_host_kernels *kernels;
    struct lg_onednn *onednn;
} lg_host_device;

static inline lg_host_device *lg_host(lg_stream *s)
{
    return (lg_host_device *)s->device;
}
static inline int lg_host_threads(const lg_stream *s)
{
    return s->device->threads;
}
static inline int64_t lg_host_numel(const lg_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) n *= t->dim[i];
    return n;
}
/* Product of all dimensions but the last. */
static inline int64_t lg_host_rows(const lg_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < t->rank; i++) n *= t->dim[i];
    return n;
}
static inline size_t lg_host_align(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

/* isa: "sse2", "avx2" or "avx512". The set is a property of the process in oneDNN: a second device
 * with another one is LG_ERR_CONFIG. threads is used for every product of this device. */
int lg_onednn_open(const char *isa, int threads, struct lg_onednn **ret);
void lg_onednn_close(struct lg_onednn **o);
/* "2.6.3 <commit>" */
void lg_onednn_version(char *ret, size_t bytes);
void lg_onednn_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a);
void lg_onednn_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a);
void lg_onednn_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a);
void lg_onednn_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a);
void lg_onednn_conv2d_backward_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a);
void lg_onednn_conv2d_backward_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a);
void lg_onednn_conv3d_forward(lg_stream *s, const struct lg_conv3d_forward_args *a);
/* Scratch bytes of one of the operations above, 0 for any other. */
size_t lg_onednn_scratch(struct lg_onednn *o, lg_op_id op, const void *args);

/* linear.c: the linear operations, also those that are no single product of contiguous matrices. */
void lg_host_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a);
void lg_host_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a);
void lg_host_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a);
size_t lg_host_linear_scratch(struct lg_onednn *o, lg_op_id op, const void *args);
