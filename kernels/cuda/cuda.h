/* Inside of liblg-cuda.so: the device, the stream, how an error ends, and what the files of this folder
 * offer each other. Included by C and by CUDA C++; nobody outside the folder includes it. */
#pragma once
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "base/check.h"
#include "kernels/backend.h"

struct lg_cuda_algos; /* pinned algorithms: algos.h */
struct lg_cuda_gemm;  /* cuBLASLt: gemm.c */
struct lg_cudnn;      /* cuDNN: cudnn.h */

typedef struct lg_cuda_device {
    lg_device base;
    int index;
    int multiprocessors;
    int capability;    /* of the kernels it gets, 80 for 8.0: info.h */
    size_t shared_max; /* bytes of shared memory that a block may have */
    bool tf32;
    struct lg_cuda_algos *algos;
    struct lg_cuda_gemm *gemm;
    struct lg_cudnn *cudnn; /* NULL: not installed, own kernels instead */
} lg_cuda_device;

typedef struct lg_cuda_stream {
    lg_stream base;
    cudaStream_t cuda;
} lg_cuda_stream;

/* A fault of the device is sticky: says what and where, then aborts; the supervisor restarts. */
void lg_cuda_fatal(const char *what, const char *why, const char *file, int line)
    __attribute__((noreturn));
#define LG_CUDA(call)                                                                              \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) lg_cuda_fatal(#call, cudaGetErrorString(e_), __FILE__, __LINE__);   \
    } while (0)
/* After every launch. */
#define LG_CUDA_LAUNCHED() LG_CUDA(cudaGetLastError())

static inline lg_cuda_device *lg_cuda_device_of(const lg_stream *s)
{
    return (lg_cuda_device *)s->device;
}
/* Bytes of shared memory that a block may have: on every GPU (8.6, 8.9, 12.0), on one of 9.0. */
enum { LG_CUDA_SHARED_LEAST = 99 << 10, LG_CUDA_SHARED_HOPPER = 227 << 10 };
/* May kernels of wgmma, TMA and clusters run? Code of 9.0a runs on 9.0 alone. Every operation has a path that
 * needs 8.0 alone, which all other GPUs take. */
static inline bool lg_cuda_is_hopper(const lg_cuda_device *d)
{
    return d->capability == 90;
}
/* The CUDA stream behind s; makes its device the calling thread's. */
cudaStream_t lg_cuda_stream_of(const lg_stream *s);

/* share.c: the device's functions of these names. */
int lg_cuda_share(lg_device *d, int gpu, size_t bytes, int *ret_fd);
int lg_cuda_map(lg_device *d, int fd, size_t bytes, void **ret);
void lg_cuda_unmap(lg_device *d, void *at, size_t bytes);
int lg_cuda_pin(lg_device *d, void *host, size_t bytes);
void lg_cuda_unpin(lg_device *d, void *host);
int lg_cuda_map_host(lg_device *d, void *host, size_t bytes, void **ret);

/* Product of all dimensions but the last. */
static inline int64_t lg_cuda_rows(const lg_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i + 1 < t->rank; i++) n *= t->dim[i];
    return n;
}
static inline bool lg_cuda_aligned_16(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}
static inline size_t lg_cuda_round_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

#define LG_OP(name, ...) void cuda_##name(lg_stream *s, const struct lg_##name##_args *a);
#include "kernels/ops.def"
#undef LG_OP

/* Scratch bytes of the operations that need any. */
size_t cuda_linear_forward_scratch(lg_cuda_device *d, const struct lg_linear_forward_args *a);
size_t cuda_linear_backward_data_scratch(lg_cuda_device *d,
                                         const struct lg_linear_backward_data_args *a);
size_t cuda_linear_backward_weight_scratch(lg_cuda_device *d,
                                           const struct lg_linear_backward_weight_args *a);
size_t cuda_sum_rows_scratch(const struct lg_sum_rows_args *a);
size_t cuda_norm_modulate_backward_scratch(const struct lg_norm_modulate_backward_args *a);
size_t cuda_gate_residual_backward_scratch(const struct lg_gate_residual_backward_args *a);
size_t cuda_rms_norm_backward_scratch(const struct lg_rms_norm_backward_args *a);
size_t cuda_group_norm_scratch(const struct lg_group_norm_forward_args *a);
size_t cuda_attention_forward_scratch(lg_cuda_device *d, const struct lg_attention_forward_args *a);
size_t cuda_attention_backward_scratch(lg_cuda_device *d,
                                       const struct lg_attention_backward_args *a);
size_t cuda_conv2d_forward_scratch(lg_cuda_device *d, const struct lg_conv2d_forward_args *a);
size_t cuda_conv2d_backward_data_scratch(lg_cuda_device *d,
                                         const struct lg_conv2d_backward_data_args *a);
size_t cuda_conv2d_backward_weight_scratch(lg_cuda_device *d,
                                           const struct lg_conv2d_backward_weight_args *a);
size_t cuda_conv3d_forward_scratch(lg_cuda_device *d, const struct lg_conv3d_forward_args *a);
size_t cuda_layer_norm_backward_scratch(const struct lg_layer_norm_backward_args *a);
size_t cuda_group_norm_backward_scratch(const struct lg_group_norm_backward_args *a);
size_t cuda_shift_backward_scratch(const struct lg_shift_backward_args *a);
size_t cuda_norm_conv2d_forward_scratch(lg_cuda_device *d,
                                        const struct lg_norm_conv2d_forward_args *a);

/* y (N) (+)= column sums of x (M, N), whose rows lie `stride` elements apart, in fixed chunks of rows;
 * scratch: cuda_column_sums_scratch bytes. */
size_t cuda_column_sums_scratch(int64_t M, int64_t N);
void cuda_column_sums(cudaStream_t stream, lg_tensor x, int64_t stride, lg_tensor y,
                      bool accumulate, void *scratch);
/* dx *= act'(pre), dbias (+)= column sums of dx; scratch as for cuda_column_sums. */
void cuda_act_backward_sums(cudaStream_t stream, const struct lg_linear_backward_data_args *a,
                            void *scratch);
/* y (N) (+)= column sums of partial (chunks, N), in a fixed order. */
void cuda_add_partial_sums(cudaStream_t stream, const float *partial, int64_t chunks, lg_tensor y,
                           bool accumulate);
/* Several, at most CUDA_SUMS_MAX, in one launch where they are of one type; rows of partial lie `stride` floats apart. */
enum { CUDA_SUMS_MAX = 3 };
struct cuda_sums {
    const float *partial;
    int64_t chunks, stride;
    lg_tensor y;
    bool accumulate;
};
void cuda_add_sums(cudaStream_t stream, const struct cuda_sums *sums, int count);

/* Whether a product of matrices with so many values (both factors and the result, in any order) goes to
 * tf32's tensor cores where that is the precision; gemm.c says why small ones do not. */
static inline bool lg_cuda_enough_for_tf32(int64_t x, int64_t w, int64_t y)
{
    return LG_MIN(LG_MIN(x, w), y) >= 1 << 15;
}

/* The product of any shape and layout, without the tensor cores: what the libraries do not take.
 * d[m][n] (+)= sum over k of a[m sa_m + k sa_k] b[n sb_n + k sb_k] + bias[n]; a, b, bias of type
 * `in`, d (row length ldd) of type `out`: in or LG_F32. */
struct cuda_any_gemm {
    lg_dtype in, out;
    const void *a, *b, *bias;
    void *d;
    int64_t m, n, k, sa_m, sa_k, sb_n, sb_k, ldd;
    bool accumulate;
};
void cuda_any_gemm(cudaStream_t stream, const struct cuda_any_gemm *g);

/* Which code of this build's common kernels runs on the current device: machine code made for *ret_code (80: 8.0),
 * or, when they differ, made by the driver from PTX of *ret_ptx. */
void cuda_code_of(int *ret_code, int *ret_ptx);
/* p[i] = value, i < n. */
void cuda_fill_i32(cudaStream_t stream, int32_t *p, int64_t n, int32_t value);
/* Are `count` pieces of `bytes` bytes behind each other all equal to `piece`? Waits for the stream. */
bool cuda_all_equal(cudaStream_t stream, const void *pieces, const void *piece, int64_t bytes,
                    int64_t count);
/* n elements of type t, never zero, much as data is: for timing. */
void cuda_fill_noise(cudaStream_t stream, void *p, lg_dtype t, int64_t n, uint32_t seed);

#ifdef __cplusplus
}
#endif
