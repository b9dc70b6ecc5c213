/* The backward of convolutions: who does it.
 *
 * 1 x 1 of stride 1 without padding: the products of a linear layer (linear.c). By data at stride 1: the forward of dy by
 * the flipped filters, with tile_conv.cu where that takes it; dx that is added to is its residual. By weight:
 * conv_weight.cu. What these do not take cuDNN does; and where cuDNN does not, or not in fp32, windows are copied to
 * rows (conv_columns.cu) of a bounded piece of scratch memory, and cuBLASLt multiplies them, one piece after the other. A piece
 * of dx is one of a sample, or whole samples as many as in every other piece, so that a sample's bits do not depend on its slot.
 *
 * Sums over pixels for the bias are a pass of their own over dy, 2 bytes for each 18 I operations of by weight. */
#include "kernels/cuda/conv_columns.h"
#include "kernels/cuda/conv_weight.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/tile_conv.h"

/* Of the matrix of windows; a row at least. */
enum { WINDOW_BYTES = 64 << 20 };

static bool is_linear(const lg_tensor *w, int stride, const int pad[4])
{
    return w->dim[1] == 1 && w->dim[2] == 1 && stride == 1 && !pad[0] && !pad[1] && !pad[2] &&
           !pad[3];
}
static lg_tensor as_rows(lg_tensor t)
{
    return lg_t2(t.data, t.dtype, lg_cuda_rows(&t), t.dim[t.rank - 1]);
}
/* w (O, 1, 1, I) */
static lg_tensor as_matrix(lg_tensor w)
{
    return lg_t2(w.data, w.dtype, w.dim[0], w.dim[3]);
}
static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---- by data ---- */

static bool data_is_linear(const struct lg_conv2d_backward_data_args *a)
{
    return is_linear(&a->w, a->stride, (const int[]){a->top, a->left, a->bottom, a->right});
}
static struct lg_linear_backward_data_args linear_data(const struct lg_conv2d_backward_data_args *a)
{
    return (struct lg_linear_backward_data_args){.dy = as_rows(a->dy),
                                                 .w = as_matrix(a->w),
                                                 .dx = as_rows(a->dx),
                                                 .accumulate = a->accumulate};
}

/* Places in scratch memory; the workspace of products lies at its end. */
struct data_room {
    size_t filters, bias, windows; /* bytes of each */
};
static size_t filter_bytes(const struct lg_conv2d_backward_data_args *a)
{
    const int64_t row = a->w.dim[1] * a->w.dim[2] * a->w.dim[0];
    return lg_cuda_round_up((size_t)(a->w.dim[3] * cuda_window_stride(a->w.dtype, row)) *
                            lg_dtype_bytes(a->w.dtype));
}
static size_t zero_bias_bytes(const struct lg_conv2d_backward_data_args *a)
{
    return lg_cuda_round_up((size_t)a->dx.dim[3] * lg_dtype_bytes(a->dx.dtype));
}

/* The same as a forward: scratch holds the flipped filters, then a bias of zeros. */
static struct lg_conv2d_forward_args as_forward(const struct lg_conv2d_backward_data_args *a,
                                                char *scratch)
{
    const int64_t u = a->w.dim[1], v = a->w.dim[2], O = a->w.dim[0], I = a->w.dim[3];
    return (struct lg_conv2d_forward_args){
        .x = a->dy,
        .w = lg_t4(scratch, a->w.dtype, I, u, v, O),
        .bias = lg_t1(scratch ? scratch + filter_bytes(a) : NULL, a->w.dtype, I),
        .residual = a->accumulate ? a->dx : LG_NONE,
        .y = a->dx,
        .stride = 1,
        .top = (int)u - 1 - a->top,
        .left = (int)v - 1 - a->left,
        .bottom = (int)u - 1 - a->bottom,
        .right = (int)v - 1 - a->right};
}
static bool data_in_tiles(const lg_cuda_device *d, const struct lg_conv2d_backward_data_args *a)
{
    const struct lg_conv2d_forward_args f = as_forward(a, NULL);
    return a->stride == 1 && cuda_tile_conv_fits(d, &f);
}

/* Pixels of dx in a piece: the same number of whole samples in each, or pieces of one sample. */
static int64_t data_piece(const struct lg_conv2d_backward_data_args *a)
{
    const int64_t N = a->dx.dim[0], each = a->dx.dim[1] * a->dx.dim[2];
    const int64_t row = cuda_window_stride(a->dy.dtype, a->w.dim[1] * a->w.dim[2] * a->w.dim[0]) *
                        (int64_t)lg_dtype_bytes(a->dy.dtype);
    const int64_t most = LG_MAX(WINDOW_BYTES / row, 1);
    if (most < each) return most;
    int64_t samples = LG_MIN(most / each, N);
    while (N % samples) samples--;
    return samples * each;
}
static struct lg_cuda_product data_product(const struct lg_conv2d_backward_data_args *a,
                                           int64_t pixels)
{
    const int64_t I = a->w.dim[3], k = a->w.dim[1] * a->w.dim[2] * a->w.dim[0];
    const int64_t stride = cuda_window_stride(a->dy.dtype, k);
    return (struct lg_cuda_product){.g = {.in = a->dy.dtype,
                                          .out = a->dx.dtype,
                                          .m = pixels,
                                          .n = I,
                                          .k = k,
                                          .sa_m = stride,
                                          .sa_k = 1,
                                          .sb_n = stride,
                                          .sb_k = 1,
                                          .ldd = I,
                                          .accumulate = a->accumulate}};
}
static size_t window_bytes(int64_t pixels, int64_t row, lg_dtype type)
{
    return lg_cuda_round_up((size_t)(pixels * cuda_window_stride(type, row)) *
                            lg_dtype_bytes(type));
}
static size_t data_window_bytes(const struct lg_conv2d_backward_data_args *a)
{
    return window_bytes(data_piece(a), a->w.dim[1] * a->w.dim[2] * a->w.dim[0], a->dy.dtype);
}
/* Of the pieces of a sample the last is shorter. */
static size_t data_workspace(lg_cuda_device *d, const struct lg_conv2d_backward_data_args *a)
{
    const int64_t each = a->dx.dim[1] * a->dx.dim[2], piece = data_piece(a);
    size_t most = 0, last = 0;
    struct lg_cuda_product x = data_product(a, piece);
    if (!lg_cuda_gemm_plan(d, &x, &most)) most = 0;
    if (piece > each || each % piece == 0) return most;
    x = data_product(a, each % piece);
    return lg_cuda_gemm_plan(d, &x, &last) ? larger(most, last) : most;
}

size_t cuda_conv2d_backward_data_scratch(lg_cuda_device *d,
                                         const struct lg_conv2d_backward_data_args *a)
{
    size_t bytes = 0;
    if (data_is_linear(a)) {
        const struct lg_linear_backward_data_args l = linear_data(a);
        return cuda_linear_backward_data_scratch(d, &l);
    }
    if (data_in_tiles(d, a)) return filter_bytes(a) + zero_bias_bytes(a);
    if (lg_cudnn_conv2d_data_scratch(d, a, &bytes)) return bytes;
    return filter_bytes(a) + data_window_bytes(a) + data_workspace(d, a);
}

static void data_in_pieces(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    cudaStream_t stream = lg_cuda_stream_of(s);
    char *filters = s->scratch, *windows = filters + filter_bytes(a);
    const int64_t each = a->dx.dim[1] * a->dx.dim[2], pixels = a->dx.dim[0] * each;
    const int64_t piece = data_piece(a), I = a->dx.dim[3];
    const struct cuda_windows z = {.type = a->dy.dtype,
                                   .map = a->dy.data,
                                   .C = a->dy.dim[3],
                                   .rows = (int)a->dy.dim[1],
                                   .columns = (int)a->dy.dim[2],
                                   .high = (int)a->dx.dim[1],
                                   .wide = (int)a->dx.dim[2],
                                   .u = (int)a->w.dim[1],
                                   .v = (int)a->w.dim[2],
                                   .up = 1,
                                   .down = a->stride,
                                   .top = (int)a->w.dim[1] - 1 - a->top,
                                   .left = (int)a->w.dim[2] - 1 - a->left};
    cuda_flip_filters(stream, a->w, filters);
    for (int64_t at = 0, count; at < pixels; at += count) {
        count = piece < each ? LG_MIN(piece, each - at % each) : piece;
        struct lg_cuda_product x = data_product(a, count);
        cuda_take_windows(stream, &z, at, count, windows);
        x.g.a = windows, x.g.b = filters;
        x.g.d = (char *)a->dx.data + (size_t)(at * I) * lg_dtype_bytes(a->dx.dtype);
        x.workspace = windows + data_window_bytes(a);
        if (!lg_cuda_gemm_run(s, &x)) cuda_any_gemm(stream, &x.g);
    }
}

void cuda_conv2d_backward_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    if (data_is_linear(a)) {
        const struct lg_linear_backward_data_args l = linear_data(a);
        cuda_linear_backward_data(s, &l);
    } else if (data_in_tiles(lg_cuda_device_of(s), a)) {
        const struct lg_conv2d_forward_args f = as_forward(a, s->scratch);
        cuda_flip_filters(lg_cuda_stream_of(s), a->w, f.w.data);
        LG_CUDA(cudaMemsetAsync(f.bias.data, 0, lg_tensor_bytes(&f.bias), lg_cuda_stream_of(s)));
        cuda_tile_conv(s, &f, NULL, NULL);
    } else if (!lg_cudnn_conv2d_data(s, a)) {
        data_in_pieces(s, a);
    }
}

/* ---- by weight ---- */

static bool weight_is_linear(const struct lg_conv2d_backward_weight_args *a)
{
    return is_linear(&a->dw, a->stride, (const int[]){a->top, a->left, a->bottom, a->right});
}
static struct lg_linear_backward_weight_args linear_weight(
    const struct lg_conv2d_backward_weight_args *a)
{
    return (struct lg_linear_backward_weight_args){.dy = as_rows(a->dy),
                                                   .x = as_rows(a->x),
                                                   .dw = as_matrix(a->dw),
                                                   .dbias = a->dbias,
                                                   .accumulate = a->accumulate};
}

/* Pieces of all pixels of dy. The products add up in fp32, in dw itself where that is its type. dy is copied where its rows do
 * not begin on 16 bytes. */
struct weight_pieces {
    int64_t pixels, piece, row; /* row: of a window, elements */
    size_t windows, dy, sum;    /* bytes of scratch memory; dy, sum: 0 where there is no copy */
};
static struct weight_pieces weight_pieces(const struct lg_conv2d_backward_weight_args *a)
{
    struct weight_pieces p = {.pixels = lg_cuda_rows(&a->dy),
                              .row = a->dw.dim[1] * a->dw.dim[2] * a->dw.dim[3]};
    const int64_t e = (int64_t)lg_dtype_bytes(a->x.dtype), O = a->dy.dim[3];
    const int64_t most = WINDOW_BYTES / (cuda_window_stride(a->x.dtype, p.row) * e);
    p.piece = LG_MIN(LG_MAX(most, 1), p.pixels);
    p.windows = window_bytes(p.piece, p.row, a->x.dtype);
    if (O != cuda_window_stride(a->dy.dtype, O)) p.dy = window_bytes(p.piece, O, a->dy.dtype);
    if (a->dw.dtype != LG_F32 && p.piece < p.pixels)
        p.sum = lg_cuda_round_up((size_t)lg_numel(&a->dw) * sizeof(float));
    return p;
}
static struct lg_cuda_product weight_product(const struct lg_conv2d_backward_weight_args *a,
                                             const struct weight_pieces *p, int64_t pixels)
{
    const int64_t O = a->dy.dim[3];
    return (struct lg_cuda_product){.g = {.in = a->x.dtype,
                                          .out = p->sum ? LG_F32 : a->dw.dtype,
                                          .m = O,
                                          .n = p->row,
                                          .k = pixels,
                                          .sa_m = 1,
                                          .sa_k = cuda_window_stride(a->dy.dtype, O),
                                          .sb_n = 1,
                                          .sb_k = cuda_window_stride(a->x.dtype, p->row),
                                          .ldd = p->row},
                                    .split_k = true};
}
static size_t weight_workspace(lg_cuda_device *d, const struct lg_conv2d_backward_weight_args *a,
                               const struct weight_pieces *p)
{
    size_t most = 0, last = 0;
    struct lg_cuda_product x = weight_product(a, p, p->piece);
    if (!lg_cuda_gemm_plan(d, &x, &most)) most = 0;
    if (p->pixels % p->piece == 0) return most;
    x = weight_product(a, p, p->pixels % p->piece);
    return lg_cuda_gemm_plan(d, &x, &last) ? larger(most, last) : most;
}

size_t cuda_conv2d_backward_weight_scratch(lg_cuda_device *d,
                                           const struct lg_conv2d_backward_weight_args *a)
{
    size_t bytes = 0;
    if (weight_is_linear(a)) {
        const struct lg_linear_backward_weight_args l = linear_weight(a);
        return cuda_linear_backward_weight_scratch(d, &l);
    }
    if (cuda_conv_weight_fits(d, a)) {
        bytes = cuda_conv_weight_scratch(d, a);
    } else if (!lg_cudnn_conv2d_weight_scratch(d, a, &bytes)) {
        const struct weight_pieces p = weight_pieces(a);
        bytes = p.windows + p.dy + p.sum + weight_workspace(d, a, &p);
    }
    if (!a->dbias.rank) return bytes;
    return larger(bytes, cuda_column_sums_scratch(lg_cuda_rows(&a->dy), a->dy.dim[3]));
}

static void weight_in_pieces(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    cudaStream_t stream = lg_cuda_stream_of(s);
    const struct weight_pieces p = weight_pieces(a);
    char *windows = s->scratch, *dy = windows + p.windows, *sum = dy + p.dy;
    const struct cuda_windows of_x = {.type = a->x.dtype,
                                      .map = a->x.data,
                                      .C = a->x.dim[3],
                                      .rows = (int)a->x.dim[1],
                                      .columns = (int)a->x.dim[2],
                                      .high = (int)a->dy.dim[1],
                                      .wide = (int)a->dy.dim[2],
                                      .u = (int)a->dw.dim[1],
                                      .v = (int)a->dw.dim[2],
                                      .up = a->stride,
                                      .down = 1,
                                      .top = a->top,
                                      .left = a->left};
    const struct cuda_windows of_dy = {.type = a->dy.dtype,
                                       .map = a->dy.data,
                                       .C = a->dy.dim[3],
                                       .rows = (int)a->dy.dim[1],
                                       .columns = (int)a->dy.dim[2],
                                       .high = (int)a->dy.dim[1],
                                       .wide = (int)a->dy.dim[2],
                                       .u = 1,
                                       .v = 1,
                                       .up = 1,
                                       .down = 1};
    for (int64_t at = 0, count; at < p.pixels; at += count) {
        count = LG_MIN(p.piece, p.pixels - at);
        struct lg_cuda_product x = weight_product(a, &p, count);
        cuda_take_windows(stream, &of_x, at, count, windows);
        if (p.dy) cuda_take_windows(stream, &of_dy, at, count, dy);
        const size_t begun = (size_t)(at * a->dy.dim[3]) * lg_dtype_bytes(a->dy.dtype);
        x.g.a = p.dy ? dy : (const char *)a->dy.data + begun;
        x.g.b = windows;
        x.g.d = p.sum ? sum : a->dw.data;
        x.g.accumulate = at > 0 || (!p.sum && a->accumulate);
        x.workspace = sum + p.sum;
        if (!lg_cuda_gemm_run(s, &x)) cuda_any_gemm(stream, &x.g);
    }
    if (p.sum)
        cuda_add_converted(stream, lg_t1(sum, LG_F32, lg_numel(&a->dw)), a->dw, a->accumulate);
}

void cuda_conv2d_backward_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    if (weight_is_linear(a)) {
        const struct lg_linear_backward_weight_args l = linear_weight(a);
        cuda_linear_backward_weight(s, &l);
        return;
    }
    if (cuda_conv_weight_fits(lg_cuda_device_of(s), a))
        cuda_conv_weight(s, a);
    else if (!lg_cudnn_conv2d_weight(s, a))
        weight_in_pieces(s, a);
    const lg_tensor rows = as_rows(a->dy);
    if (a->dbias.data)
        cuda_column_sums(lg_cuda_stream_of(s), rows, rows.dim[1], a->dbias, a->accumulate,
                         s->scratch);
}
