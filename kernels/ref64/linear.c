/* Matrix products with the weights stored (N, K), as PyTorch's nn.Linear has them. */
#include "kernels/ref64/ref64.h"

void ref64_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    int64_t M = a->x.dim[0], K = a->x.dim[1], N = a->w.dim[0];
    const double *x = ref64_data(a->x), *w = ref64_data(a->w), *bias = ref64_data(a->bias);
    const double *residual = ref64_data(a->residual);
    double *y = ref64_data(a->y), *pre = ref64_data(a->pre);
    for (int64_t m = 0; m < M; m++) {
        for (int64_t n = 0; n < N; n++) {
            double sum = (bias ? bias[n] : 0) + (residual ? residual[m * N + n] : 0);
            for (int64_t k = 0; k < K; k++) sum += x[m * K + k] * w[n * K + k];
            if (pre) pre[m * N + n] = sum;
            y[m * N + n] = ref64_act(a->act, sum);
        }
    }
}

void ref64_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    int64_t M = a->dy.dim[0], N = a->dy.dim[1], K = a->w.dim[1];
    const double *dy = ref64_data(a->dy), *w = ref64_data(a->w), *pre = ref64_data(a->pre);
    double *dx = ref64_data(a->dx), *dbias = ref64_data(a->dbias);
    for (int64_t k = 0; k < K; k++) {
        double total = 0;
        for (int64_t m = 0; m < M; m++) {
            double sum = 0;
            for (int64_t n = 0; n < N; n++) sum += dy[m * N + n] * w[n * K + k];
            if (pre) sum *= ref64_act_slope(a->act, pre[m * K + k]);
            ref64_put(&dx[m * K + k], sum, a->accumulate);
            total += sum;
        }
        if (dbias) ref64_put(&dbias[k], total, a->accumulate_dbias);
    }
}

void ref64_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    int64_t M = a->dy.dim[0], N = a->dy.dim[1], K = a->x.dim[1];
    const double *dy = ref64_data(a->dy), *x = ref64_data(a->x);
    double *dw = ref64_data(a->dw), *dbias = ref64_data(a->dbias);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t k = 0; k < K; k++) {
            double sum = 0;
            for (int64_t m = 0; m < M; m++) sum += dy[m * N + n] * x[m * K + k];
            ref64_put(&dw[n * K + k], sum, a->accumulate);
        }
        if (dbias) {
            double sum = 0;
            for (int64_t m = 0; m < M; m++) sum += dy[m * N + n];
            ref64_put(&dbias[n], sum, a->accumulate);
        }
    }
}
