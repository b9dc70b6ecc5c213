/* cuDNN, opened at run time: $LG_CUDNN (a file), else libcudnn.so.9. Each function below says by its
 * result whether cuDNN does the operation; where not, or where cuDNN is missing, own kernels do it. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif
/* *ret stays NULL, without an error, where there is no cuDNN. */
int lg_cudnn_open(lg_cuda_device *d, struct lg_cudnn **ret);
void lg_cudnn_close(struct lg_cudnn **c);
size_t lg_cudnn_version(const struct lg_cudnn *c); /* 0: none */
/* What is opened: $LG_CUDNN, else libcudnn.so.9; NULL where $LG_CUDNN is "none". */
const char *lg_cudnn_file(void);

/* Scratch bytes, 0 when cuDNN does not do it. */
size_t lg_cudnn_attention_forward_scratch(lg_cuda_device *d,
                                          const struct lg_attention_forward_args *a);
size_t lg_cudnn_attention_backward_scratch(lg_cuda_device *d,
                                           const struct lg_attention_backward_args *a);
size_t lg_cudnn_conv2d_scratch(lg_cuda_device *d, const struct lg_conv2d_forward_args *a);
size_t lg_cudnn_conv3d_scratch(lg_cuda_device *d, const struct lg_conv3d_forward_args *a);
/* False when cuDNN does not do it; else *ret: scratch bytes. */
bool lg_cudnn_conv2d_data_scratch(lg_cuda_device *d, const struct lg_conv2d_backward_data_args *a,
                                  size_t *ret);
bool lg_cudnn_conv2d_weight_scratch(lg_cuda_device *d,
                                    const struct lg_conv2d_backward_weight_args *a, size_t *ret);
/* False when cuDNN does not do it. */
bool lg_cudnn_attention_forward(lg_stream *s, const struct lg_attention_forward_args *a);
bool lg_cudnn_attention_backward(lg_stream *s, const struct lg_attention_backward_args *a);
bool lg_cudnn_conv2d(lg_stream *s, const struct lg_conv2d_forward_args *a);
bool lg_cudnn_conv3d(lg_stream *s, const struct lg_conv3d_forward_args *a);
bool lg_cudnn_conv2d_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a);
/* dw alone. */
bool lg_cudnn_conv2d_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a);

/* Own convolutions, any shape. */
void cuda_any_conv(cudaStream_t stream, const struct lg_conv2d_forward_args *a);
void cuda_any_conv3d(cudaStream_t stream, const struct lg_conv3d_forward_args *a);
#ifdef __cplusplus
}
#endif
