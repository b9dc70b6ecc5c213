/* Matrix products with the weights stored (N, K), as PyTorch's nn.Linear has them; or several side by side. */
#include "kernels/ref64/ref64.h"

void ref64_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    int64_t M = a->x.dim[0], K = a->w.dim[1], width = a->x.dim[1], all = a->w.dim[0];
    int64_t N = all / (width / K), apart = lg_row_stride(&a->w, 1);
    const double *x = ref64_data(a->x), *w = ref64_data(a->w), *bias = ref64_data(a->bias);
    const double *residual = ref64_data(a->residual);
    double *y = ref64_data(a->y), *pre = ref64_data(a->pre);
    for (int64_t m = 0; m < M; m++) {
        for (int64_t n = 0; n < all; n++) {
            const double *of = &x[m * width + n / N * K];
            double sum = (bias ? bias[n] : 0) + (residual ? residual[m * all + n] : 0);
            for (int64_t k = 0; k < K; k++) sum += of[k] * w[n * apart + k];
            if (pre) pre[m * all + n] = sum;
            y[m * all + n] = ref64_act(a->act, sum);
        }
    }
}

void ref64_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    int64_t M = a->dy.dim[0], K = a->w.dim[1], width = a->dx.dim[1], all = a->w.dim[0];
    int64_t N = all / (width / K), apart = lg_row_stride(&a->w, 1);
    const double *dy = ref64_data(a->dy), *w = ref64_data(a->w), *pre = ref64_data(a->pre);
    double *dx = ref64_data(a->dx), *dbias = ref64_data(a->dbias);
    for (int64_t j = 0; j < width; j++) {
        const int64_t first = j / K * N, k = j % K;
        double total = 0;
        for (int64_t m = 0; m < M; m++) {
            double sum = 0;
            for (int64_t n = first; n < first + N; n++) sum += dy[m * all + n] * w[n * apart + k];
            if (pre) sum *= ref64_act_slope(a->act, pre[m * width + j]);
            ref64_put(&dx[m * width + j], sum, a->accumulate);
            total += sum;
        }
        if (dbias) ref64_put(&dbias[j], total, a->accumulate_dbias);
    }
}

void ref64_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    int64_t M = a->dy.dim[0], K = a->dw.dim[1], width = a->x.dim[1], all = a->dw.dim[0];
    int64_t N = all / (width / K);
    const double *dy = ref64_data(a->dy), *x = ref64_data(a->x);
    double *dw = ref64_data(a->dw), *dbias = ref64_data(a->dbias);
    for (int64_t n = 0; n < all; n++) {
        for (int64_t k = 0; k < K; k++) {
            double sum = 0;
            for (int64_t m = 0; m < M; m++) sum += dy[m * all + n] * x[m * width + n / N * K + k];
            ref64_put(&dw[n * K + k], sum, a->accumulate);
        }
        if (dbias) {
            double sum = 0;
            for (int64_t m = 0; m < M; m++) sum += dy[m * all + n];
            ref64_put(&dbias[n], sum, a->accumulate);
        }
    }
}
