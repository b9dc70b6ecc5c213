/* The CUDA backend's device: opening, memory, streams, copies, and the table of operations.
 *
 * Design: one lg_stream is one CUDA stream. Memory comes from cudaMalloc, zeroed before it is given
 * out. Calls that may fail for want of a device or memory return errors; a fault of work in flight
 * shows at a launch or a sync and aborts.
 *
 * Invariant: what decides bits stands in the fingerprint or in the file of pinned algorithms. */
#include "kernels/cuda/algos.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/group_norm.h"
#include "kernels/cuda/info.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct lg_ops OPS = {
#define LG_OP(name, ...) .name = cuda_##name,
#include "kernels/ops.def"
#undef LG_OP
};

void lg_cuda_fatal(const char *what, const char *why, const char *file, int line)
{
    fprintf(stderr, "%s:%d: the GPU failed: %s: %s\n", file, line, what, why);
    abort();
}

cudaStream_t lg_cuda_stream_of(const lg_stream *s)
{
    LG_CUDA(cudaSetDevice(lg_cuda_device_of(s)->index));
    return ((const lg_cuda_stream *)s)->cuda;
}

static size_t scratch_bytes(lg_device *base, lg_op_id op, const void *args)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    switch (op) {
    case LG_OP_linear_forward:
        return cuda_linear_forward_scratch(d, args);
    case LG_OP_linear_backward_data:
        return cuda_linear_backward_data_scratch(d, args);
    case LG_OP_linear_backward_weight:
        return cuda_linear_backward_weight_scratch(d, args);
    case LG_OP_sum_rows:
        return cuda_sum_rows_scratch(args);
    case LG_OP_rms_norm_backward:
        return cuda_rms_norm_backward_scratch(args);
    case LG_OP_group_norm_forward:
        return cuda_group_norm_scratch(args);
    case LG_OP_norm_modulate_backward:
        return cuda_norm_modulate_backward_scratch(args);
    case LG_OP_gate_residual_backward:
        return cuda_gate_residual_backward_scratch(args);
    case LG_OP_norm_residual_backward:
        return cuda_gate_residual_backward_scratch(
            &((const struct lg_norm_residual_backward_args *)args)->residual);
    case LG_OP_attention_forward:
        return cuda_attention_forward_scratch(d, args);
    case LG_OP_attention_backward:
        return cuda_attention_backward_scratch(d, args);
    case LG_OP_conv2d_forward:
        return cuda_conv2d_forward_scratch(d, args);
    case LG_OP_conv2d_backward_data:
        return cuda_conv2d_backward_data_scratch(d, args);
    case LG_OP_conv2d_backward_weight:
        return cuda_conv2d_backward_weight_scratch(d, args);
    case LG_OP_conv3d_forward:
        return cuda_conv3d_forward_scratch(d, args);
    case LG_OP_layer_norm_backward:
        return cuda_layer_norm_backward_scratch(args);
    case LG_OP_group_mean_var_forward:
        return cuda_group_mean_var_scratch(
            &((const struct lg_group_mean_var_forward_args *)args)->x);
    case LG_OP_group_norm_backward:
        return cuda_group_norm_backward_scratch(args);
    case LG_OP_shift_backward:
        return cuda_shift_backward_scratch(args);
    case LG_OP_norm_conv2d_forward:
        return cuda_norm_conv2d_forward_scratch(d, args);
    default:
        return 0;
    }
}

/* ---- memory ---- */

static int device_alloc(lg_device *base, size_t bytes, void **ret)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    void *p = NULL;
    size_t rounded = bytes ? bytes : 1;
    LG_CUDA(cudaSetDevice(d->index));
    cudaError_t e = cudaMalloc(&p, rounded);
    if (e == cudaErrorMemoryAllocation) {
        size_t available = 0, total = 0;
        cudaGetLastError();
        LG_CUDA(cudaMemGetInfo(&available, &total));
        return LG_FAIL(LG_ERR_NOSPACE,
                       "no %zu bytes on cuda:%d: %zu of %zu are free; lower the batch, or see with "
                       "nvidia-smi who holds the rest",
                       bytes, d->index, available, total);
    }
    LG_CUDA(e);
    LG_CUDA(cudaMemset(p, 0, rounded));
    LG_CUDA(cudaDeviceSynchronize());
    *ret = p;
    return 0;
}

static void device_free(lg_device *base, void *p)
{
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base)->index));
    LG_CUDA(cudaFree(p));
}

/* ---- streams ---- */

static int stream_open(lg_device *base, lg_stream **ret)
{
    lg_cuda_stream *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a stream");
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base)->index));
    LG_CUDA(cudaStreamCreateWithFlags(&s->cuda, cudaStreamNonBlocking));
    *ret = &s->base;
    return 0;
}

static void stream_close(lg_stream *s)
{
    cudaStream_t cuda = lg_cuda_stream_of(s);
    LG_CUDA(cudaStreamSynchronize(cuda));
    LG_CUDA(cudaStreamDestroy(cuda));
    free(s);
}

static void stream_sync(lg_stream *s)
{
    LG_CUDA(cudaStreamSynchronize(lg_cuda_stream_of(s)));
}

typedef struct lg_cuda_event {
    lg_event base;
    cudaEvent_t cuda;
} lg_cuda_event;

static int event_open(lg_device *base, lg_event **ret)
{
    lg_cuda_event *e = calloc(1, sizeof *e);
    if (!e) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an event");
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base)->index));
    LG_CUDA(cudaEventCreateWithFlags(&e->cuda, cudaEventDisableTiming));
    *ret = &e->base;
    return 0;
}

static void event_close(lg_event *e)
{
    LG_CUDA(cudaEventDestroy(((lg_cuda_event *)e)->cuda));
    free(e);
}

static void record(lg_stream *s, lg_event *e)
{
    LG_CUDA(cudaEventRecord(((lg_cuda_event *)e)->cuda, lg_cuda_stream_of(s)));
}

static void wait(lg_stream *s, lg_event *e)
{
    LG_CUDA(cudaStreamWaitEvent(lg_cuda_stream_of(s), ((lg_cuda_event *)e)->cuda, 0));
}

static void event_sync(lg_event *e)
{
    LG_CUDA(cudaEventSynchronize(((lg_cuda_event *)e)->cuda));
}

static void upload(lg_stream *s, void *dst, const void *src, size_t bytes)
{
    LG_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, lg_cuda_stream_of(s)));
}

static void download(lg_stream *s, void *dst, const void *src, size_t bytes)
{
    LG_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, lg_cuda_stream_of(s)));
}

static void zero(lg_stream *s, void *dst, size_t bytes)
{
    LG_CUDA(cudaMemsetAsync(dst, 0, bytes, lg_cuda_stream_of(s)));
}

static void copy(lg_stream *s, void *dst, const void *src, size_t bytes)
{
    if (dst == src) return;
    LG_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, lg_cuda_stream_of(s)));
}

/* ---- opening ---- */

static int parse_precision(const char *name, lg_dtype *ret_dtype, bool *ret_tf32)
{
    static const struct {
        const char *name;
        lg_dtype dtype;
        bool tf32;
    } KNOWN[] = {
        {"fp32", LG_F32, false},
        {"tf32", LG_F32, true},
        {"bf16", LG_BF16, false},
        {"fp16", LG_F16, false},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(KNOWN); i++) {
        if (strcmp(name, KNOWN[i].name)) continue;
        *ret_dtype = KNOWN[i].dtype;
        *ret_tf32 = KNOWN[i].tf32;
        return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG, "unknown precision \"%s\": fp32, tf32, bf16 or fp16", name);
}

static void device_close(lg_device *base)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    lg_cudnn_close(&d->cudnn);
    lg_cuda_gemm_close(&d->gemm);
    lg_cuda_algos_close(&d->algos);
    free(d);
}

static void write_fingerprint(lg_cuda_device *d, const struct cudaDeviceProp *gpu,
                              const char *precision)
{
    int driver = 0, own = gpu->major * 10 + gpu->minor;
    char forced[16] = "";
    cudaDriverGetVersion(&driver);
    if (d->capability != own) snprintf(forced, sizeof forced, " kernels=%d", d->capability);
    snprintf(d->base.isa, sizeof d->base.isa, "sm_%d%s", d->capability,
             lg_cuda_is_hopper(d) ? "a" : "");
    snprintf(
        d->base.fingerprint, sizeof d->base.fingerprint,
        "cuda gpu=%.64s precision=%s cublaslt=%zu cudnn=%zu runtime=%d driver=%d compiler=%s%s",
        gpu->name, precision, lg_cuda_gemm_version(), lg_cudnn_version(d->cudnn), CUDART_VERSION,
        driver, __VERSION__, forced);
}

static int open_parts(lg_cuda_device *d, const char *gpu)
{
    LG_TRY(lg_cuda_gemm_open(d, &d->gemm));
    LG_TRY(lg_cudnn_open(d, &d->cudnn));
    LG_TRY(lg_cuda_algos_open(gpu, lg_cuda_gemm_version(), lg_cudnn_version(d->cudnn), &d->algos));
    return 0;
}

__attribute__((visibility("default"))) lg_backend_open_fn lg_backend_open;

int lg_backend_open(int index, const struct lg_device_options *options, lg_device **ret)
{
    const char *precision = options->precision ? options->precision : "fp32";
    struct cudaDeviceProp gpu;
    lg_dtype dtype;
    bool tf32;
    int capability;
    size_t shared;
    LG_TRY(parse_precision(precision, &dtype, &tf32));
    LG_TRY(lg_cuda_find_gpu(index, &gpu));
    LG_TRY(lg_cuda_capability(&gpu, &capability, &shared));
    LG_TRY(lg_cuda_context(index));
    lg_cuda_device *d = calloc(1, sizeof *d);
    if (!d) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a device");
    d->index = index;
    d->tf32 = tf32;
    d->capability = capability;
    d->shared_max = shared;
    d->multiprocessors = gpu.multiProcessorCount;
    d->base = (lg_device){.ops = &OPS,
                          .dtype = dtype,
                          .threads = 1,
                          .scratch_bytes = scratch_bytes,
                          .alloc = device_alloc,
                          .free = device_free,
                          .stream_open = stream_open,
                          .stream_close = stream_close,
                          .sync = stream_sync,
                          .event_open = event_open,
                          .event_close = event_close,
                          .record = record,
                          .wait = wait,
                          .event_sync = event_sync,
                          .upload = upload,
                          .download = download,
                          .zero = zero,
                          .copy = copy,
                          .share = lg_cuda_share,
                          .map = lg_cuda_map,
                          .unmap = lg_cuda_unmap,
                          .pin = lg_cuda_pin,
                          .unpin = lg_cuda_unpin,
                          .map_host = lg_cuda_map_host,
                          .close = device_close};
    int rc = open_parts(d, gpu.name);
    if (rc < 0) {
        device_close(&d->base);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    write_fingerprint(d, &gpu, precision);
    *ret = &d->base;
    return 0;
}
