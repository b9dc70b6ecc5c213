/* Convolution and nearest upsampling, (N, H, W, C). */
#include "kernels/ref64/ref64.h"

void ref64_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    int64_t H = a->x.dim[1], W = a->x.dim[2], Ci = a->x.dim[3];
    int64_t Co = a->w.dim[0], kh = a->w.dim[1], kw = a->w.dim[2];
    int64_t Ho = a->y.dim[1], Wo = a->y.dim[2];
    const double *x = ref64_data(a->x), *w = ref64_data(a->w), *residual = ref64_data(a->residual);
    double *y = ref64_data(a->y);
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        int64_t co = o % Co, wo = o / Co % Wo, ho = o / (Co * Wo) % Ho, n = o / (Co * Wo * Ho);
        double sum = ref64_data(a->bias)[co];
        for (int64_t i = 0; i < kh; i++) {
            for (int64_t j = 0; j < kw; j++) {
                int64_t hi = ho * a->stride + i - a->top, wi = wo * a->stride + j - a->left;
                if (hi < 0 || hi >= H || wi < 0 || wi >= W) continue;
                const double *pixel = x + ((n * H + hi) * W + wi) * Ci;
                const double *filter = w + ((co * kh + i) * kw + j) * Ci;
                for (int64_t c = 0; c < Ci; c++) sum += pixel[c] * filter[c];
            }
        }
        y[o] = residual ? sum + residual[o] : sum;
    }
    if (a->mean_var.data) ref64_group_mean_var(a->y, a->mean_var.dim[1], ref64_data(a->mean_var));
}

void ref64_norm_conv2d_forward(lg_stream *s, const struct lg_norm_conv2d_forward_args *a)
{
    ref64_group_norm_forward(s, &a->norm);
    ref64_conv2d_forward(s, &a->conv);
}

void ref64_upsample2x_forward(lg_stream *s, const struct lg_upsample2x_forward_args *a)
{
    int64_t H = a->x.dim[1], W = a->x.dim[2], C = a->x.dim[3];
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        int64_t c = o % C, w = o / C % (2 * W), h = o / (C * 2 * W) % (2 * H);
        int64_t n = o / (C * 4 * W * H);
        y[o] = x[((n * H + h / 2) * W + w / 2) * C + c];
    }
}
