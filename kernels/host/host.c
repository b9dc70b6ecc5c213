/* The host backend: opens the device, picks the kernels of the instruction set, owns nothing else.
 *
 * Design: device memory is ordinary memory and an operation runs when it is called, so streams have
 * nothing to wait for. The table of a set (isa_table.c) is complete at link time.
 *
 * Invariant: bits depend on the plan alone: the set is named, not detected, whenever the caller
 * names one; threads come from the options; OMP_* and DNNL_* variables change nothing. */
#include "kernels/host/host.h"
#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool machine_has(const char *isa)
{
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!strcmp(isa, "sse2")) return true;
    if (!strcmp(isa, "avx2")) return avx2;
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

struct set {
    const char *name;
    const struct lg_host_kernels *kernels;
};

static int choose_set(const char *wanted, struct set *ret)
{
    const struct set sets[] = {{"avx512", &lg_host_kernels_avx512},
                               {"avx2", &lg_host_kernels_avx2},
                               {"sse2", &lg_host_kernels_sse2}};
    for (size_t i = 0; i < LG_ARRAY_LEN(sets); i++) {
        if (wanted && wanted[0] && strcmp(wanted, sets[i].name)) continue;
        if (!machine_has(sets[i].name)) {
            if (!wanted || !wanted[0]) continue;
            return LG_FAIL(LG_ERR_CONFIG, "this machine has no %s: choose a lower isa", wanted);
        }
        if (!sets[i].kernels && (!wanted || !wanted[0])) continue;
        if (!sets[i].kernels)
            return LG_FAIL(LG_ERR_CONFIG,
                           "this build has no %s: it was made with other ISAS (kernels/kernels.mk)",
                           sets[i].name);
        *ret = sets[i];
        return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG, "unknown isa \"%s\": sse2, avx2 or avx512", wanted);
}

static size_t group_norm_scratch(const lg_host_device *h,
                                 const struct lg_group_norm_forward_args *a)
{
    return h->kernels->group_norm_scratch(a->x.dim[3], a->groups, h->base.threads);
}

static size_t conv2d_scratch(const lg_host_device *h, const struct lg_conv2d_forward_args *a)
{
    size_t bytes = lg_onednn_scratch(h->onednn, LG_OP_conv2d_forward, a);
    if (!a->mean_var.rank) return bytes;
    return LG_MAX(bytes,
                  h->kernels->group_norm_scratch(a->y.dim[3], a->mean_var.dim[1], h->base.threads));
}

static size_t host_scratch_bytes(lg_device *d, lg_op_id op, const void *args)
{
    const lg_host_device *h = (const lg_host_device *)d;
    switch (op) {
    case LG_OP_linear_forward:
    case LG_OP_linear_backward_data:
    case LG_OP_linear_backward_weight:
        return lg_host_linear_scratch(h->onednn, op, args);
    case LG_OP_conv2d_backward_data:
    case LG_OP_conv2d_backward_weight:
    case LG_OP_conv3d_forward:
        return lg_onednn_scratch(h->onednn, op, args);
    case LG_OP_conv2d_forward:
        return conv2d_scratch(h, args);
    case LG_OP_norm_conv2d_forward: {
        const struct lg_norm_conv2d_forward_args *a = args;
        return LG_MAX(group_norm_scratch(h, &a->norm), conv2d_scratch(h, &a->conv));
    }
    case LG_OP_attention_forward:
        return h->kernels->attention_forward_scratch(args, d->threads);
    case LG_OP_attention_backward:
        return h->kernels->attention_backward_scratch(args, d->threads);
    case LG_OP_group_norm_forward:
        return group_norm_scratch(h, args);
    case LG_OP_group_mean_var_forward: {
        const struct lg_group_mean_var_forward_args *a = args;
        return h->kernels->group_norm_scratch(a->x.dim[3], a->mean_var.dim[1], d->threads);
    }
    case LG_OP_group_norm_backward: {
        const struct lg_group_norm_backward_args *a = args;
        return h->kernels->group_norm_backward_scratch(a->x.dim[0], a->x.dim[3], d->threads);
    }
    default:
        return 0;
    }
}

static int host_alloc(lg_device *d, size_t bytes, void **ret)
{
    size_t rounded = lg_host_align(bytes ? bytes : 1);
    if (rounded < bytes) return LG_FAIL(LG_ERR_NOSPACE, "%zu bytes cannot be allocated", bytes);
    void *p = aligned_alloc(64, rounded);
    if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu bytes", bytes);
    memset(p, 0, rounded);
    *ret = p;
    return 0;
}

static void host_free(lg_device *d, void *p)
{
    free(p);
}

static int host_stream_open(lg_device *d, lg_stream **ret)
{
    lg_stream *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a stream");
    s->device = d;
    *ret = s;
    return 0;
}

static void host_stream_close(lg_stream *s)
{
    free(s);
}

static void host_sync(lg_stream *s) {}

static void host_copy(lg_stream *s, void *dst, const void *src, size_t bytes)
{
    if (bytes && dst != src) memcpy(dst, src, bytes);
}

static void host_zero(lg_stream *s, void *dst, size_t bytes)
{
    if (bytes) memset(dst, 0, bytes);
}

static void host_close(lg_device *d)
{
    lg_host_device *h = (lg_host_device *)d;
    lg_onednn_close(&h->onednn);
    free(h);
}

static void write_fingerprint(lg_device *d)
{
    char onednn[64];
    lg_onednn_version(onednn, sizeof onednn);
    snprintf(d->fingerprint, sizeof d->fingerprint,
             "host isa=%s threads=%d onednn=%s libc=%s compiler=%s", d->isa, d->threads, onednn,
             gnu_get_libc_version(), __VERSION__);
}

__attribute__((visibility("default"))) lg_backend_open_fn lg_backend_open;

int lg_backend_open(int index, const struct lg_device_options *options, lg_device **ret)
{
    if (index != 0) return LG_FAIL(LG_ERR_CONFIG, "there is one host device: \"host\"");
    struct set set;
    LG_TRY(choose_set(options->isa, &set));
    lg_host_device *h = calloc(1, sizeof *h);
    if (!h) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a device");
    int threads = options->threads > 0 ? options->threads : 1;
    int rc = lg_onednn_open(set.name, threads, &h->onednn);
    if (rc < 0) {
        free(h);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    h->kernels = set.kernels;
    h->base = (lg_device){.ops = &set.kernels->ops,
                          .dtype = LG_F32,
                          .is_host = true,
                          .threads = threads,
                          .scratch_bytes = host_scratch_bytes,
                          .alloc = host_alloc,
                          .free = host_free,
                          .stream_open = host_stream_open,
                          .stream_close = host_stream_close,
                          .sync = host_sync,
                          .upload = host_copy,
                          .download = host_copy,
                          .zero = host_zero,
                          .copy = host_copy,
                          .close = host_close};
    snprintf(h->base.isa, sizeof h->base.isa, "%s", set.name);
    write_fingerprint(&h->base);
    *ret = &h->base;
    return 0;
}
