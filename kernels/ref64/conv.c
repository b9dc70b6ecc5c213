/* Convolution and nearest upsampling, (N, H, W, C). */
#include "kernels/ref64/ref64.h"

#include <stdlib.h>

#include "base/check.h"

void ref64_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    int64_t H = a->x.dim[1], W = a->x.dim[2], Ci = a->x.dim[3];
    int64_t Co = a->w.dim[0], kh = a->w.dim[1], kw = a->w.dim[2];
    int64_t Ho = a->y.dim[1], Wo = a->y.dim[2], pixels = lg_numel(&a->y) / Co, K = kh * kw * Ci;
    const double *x = ref64_data(a->x), *w = ref64_data(a->w), *residual = ref64_data(a->residual);
    const double *bias = ref64_data(a->bias);
    double *y = ref64_data(a->y);
    double *columns =
        malloc((size_t)(K * REF64_SUMS) * sizeof *columns); // (K, REF64_SUMS): filters, transposed
    LG_ASSERT(columns);
    for (int64_t first = 0; first < Co; first += REF64_SUMS) {
        const int64_t channels = LG_MIN(REF64_SUMS, Co - first);
        ref64_transpose_rows(columns, w + first * K, channels, K);
        for (int64_t p = 0; p < pixels; p++) {
            int64_t wo = p % Wo, ho = p / Wo % Ho, n = p / (Wo * Ho);
            double sum[REF64_SUMS];
            for (int64_t r = 0; r < REF64_SUMS; r++) sum[r] = r < channels ? bias[first + r] : 0;
            for (int64_t i = 0; i < kh; i++) {
                for (int64_t j = 0; j < kw; j++) {
                    int64_t hi = ho * a->stride + i - a->top, wi = wo * a->stride + j - a->left;
                    if (hi < 0 || hi >= H || wi < 0 || wi >= W) continue;
                    const double *pixel = x + ((n * H + hi) * W + wi) * Ci;
                    const double *filters = columns + (i * kw + j) * Ci * REF64_SUMS;
                    ref64_add_products(sum, pixel, filters, Ci);
                }
            }
            for (int64_t r = 0; r < channels; r++) {
                const int64_t o = p * Co + first + r;
                y[o] = residual ? sum[r] + residual[o] : sum[r];
            }
        }
    }
    free(columns);
    if (a->mean_var.data) ref64_group_mean_var(a->y, a->mean_var.dim[1], ref64_data(a->mean_var));
}

/* A convolution's sizes, by the letters of ops.def. */
struct window {
    int64_t H, W, I, u, v, y, z, O, stride, top, left;
};

/* Of element o of y and filter position (i, j): the first channel of the pixel of x, or -1 beyond it. */
static int64_t pixel_of(const struct window *k, int64_t o, int64_t i, int64_t j)
{
    int64_t zo = o / k->O % k->z, yo = o / (k->O * k->z) % k->y, n = o / (k->O * k->z * k->y);
    int64_t h = yo * k->stride + i - k->top, w = zo * k->stride + j - k->left;
    return h < 0 || h >= k->H || w < 0 || w >= k->W ? -1 : ((n * k->H + h) * k->W + w) * k->I;
}

void ref64_conv2d_backward_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    const struct window k = {a->dx.dim[1], a->dx.dim[2], a->dx.dim[3], a->w.dim[1],
                             a->w.dim[2],  a->dy.dim[1], a->dy.dim[2], a->dy.dim[3],
                             a->stride,    a->top,       a->left};
    const double *dy = ref64_data(a->dy), *w = ref64_data(a->w);
    double *dx = ref64_data(a->dx);
    for (int64_t i = 0; !a->accumulate && i < lg_numel(&a->dx); i++) dx[i] = 0;
    for (int64_t o = 0; o < lg_numel(&a->dy); o++)
        for (int64_t i = 0; i < k.u; i++)
            for (int64_t j = 0; j < k.v; j++) {
                const int64_t at = pixel_of(&k, o, i, j);
                const double *filter = w + ((o % k.O * k.u + i) * k.v + j) * k.I;
                if (at < 0) continue;
                for (int64_t c = 0; c < k.I; c++) dx[at + c] += dy[o] * filter[c];
            }
}

void ref64_conv2d_backward_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    const struct window k = {a->x.dim[1],  a->x.dim[2],  a->x.dim[3],  a->dw.dim[1],
                             a->dw.dim[2], a->dy.dim[1], a->dy.dim[2], a->dy.dim[3],
                             a->stride,    a->top,       a->left};
    const double *dy = ref64_data(a->dy), *x = ref64_data(a->x);
    double *dw = ref64_data(a->dw), *dbias = ref64_data(a->dbias);
    for (int64_t i = 0; !a->accumulate && i < lg_numel(&a->dw); i++) dw[i] = 0;
    for (int64_t i = 0; dbias && !a->accumulate && i < k.O; i++) dbias[i] = 0;
    for (int64_t o = 0; o < lg_numel(&a->dy); o++) {
        if (dbias) dbias[o % k.O] += dy[o];
        for (int64_t i = 0; i < k.u; i++)
            for (int64_t j = 0; j < k.v; j++) {
                const int64_t at = pixel_of(&k, o, i, j);
                double *filter = dw + ((o % k.O * k.u + i) * k.v + j) * k.I;
                if (at < 0) continue;
                for (int64_t c = 0; c < k.I; c++) filter[c] += dy[o] * x[at + c];
            }
    }
}

void ref64_norm_conv2d_forward(lg_stream *s, const struct lg_norm_conv2d_forward_args *a)
{
    ref64_group_norm_forward(s, &a->norm);
    ref64_conv2d_forward(s, &a->conv);
}

void ref64_upsample2x_forward(lg_stream *s, const struct lg_upsample2x_forward_args *a)
{
    int64_t H = a->x.dim[1], W = a->x.dim[2], C = a->x.dim[3], Ho = a->y.dim[1], Wo = a->y.dim[2];
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        int64_t c = o % C, w = o / C % Wo, h = o / (C * Wo) % Ho, n = o / (C * Wo * Ho);
        y[o] = x[((n * H + h / 2) * W + w / 2) * C + c];
    }
}

void ref64_upsample2x_backward(lg_stream *s, const struct lg_upsample2x_backward_args *a)
{
    int64_t H = a->dx.dim[1], W = a->dx.dim[2], C = a->dx.dim[3];
    int64_t Ho = a->dy.dim[1], Wo = a->dy.dim[2];
    const double *dy = ref64_data(a->dy);
    double *dx = ref64_data(a->dx);
    for (int64_t i = 0; !a->accumulate && i < lg_numel(&a->dx); i++) dx[i] = 0;
    for (int64_t o = 0; o < lg_numel(&a->dy); o++) {
        int64_t c = o % C, w = o / C % Wo, h = o / (C * Wo) % Ho, n = o / (C * Wo * Ho);
        dx[((n * H + h / 2) * W + w / 2) * C + c] += dy[o];
    }
}
