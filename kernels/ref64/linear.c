/* Matrix products with the weights stored (N, K), as PyTorch's nn.Linear has them; or several side by side. */
#include "kernels/ref64/ref64.h"

#include <stdlib.h>

#include "base/check.h"

void ref64_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    int64_t M = a->x.dim[0], K = a->w.dim[1], width = a->x.dim[1], all = a->w.dim[0];
    int64_t N = all / (width / K), apart = lg_row_stride(&a->w, 1);
    const double *x = ref64_data(a->x), *w = ref64_data(a->w), *bias = ref64_data(a->bias);
    const double *residual = ref64_data(a->residual);
    double *y = ref64_data(a->y), *pre = ref64_data(a->pre);
    double *columns = malloc((size_t)(width * REF64_SUMS) *
                             sizeof *columns); // (width, REF64_SUMS): rows of x, transposed
    LG_ASSERT(columns);
    for (int64_t m = 0; m < M; m += REF64_SUMS) {
        const int64_t rows = M - m < REF64_SUMS ? M - m : REF64_SUMS;
        ref64_transpose_rows(columns, x + m * width, rows, width);
        for (int64_t n = 0; n < all; n++) {
            const double *of = &columns[n / N * K * REF64_SUMS];
            double sum[REF64_SUMS];
            for (int64_t r = 0; r < REF64_SUMS; r++)
                sum[r] =
                    (bias ? bias[n] : 0) + (residual && r < rows ? residual[(m + r) * all + n] : 0);
            ref64_add_products(sum, &w[n * apart], of, K);
            for (int64_t r = 0; r < rows; r++) {
                if (pre) pre[(m + r) * all + n] = sum[r];
                y[(m + r) * all + n] = ref64_act(a->act, sum[r]);
            }
        }
    }
    free(columns);
}

void ref64_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    int64_t M = a->dy.dim[0], K = a->w.dim[1], width = a->dx.dim[1], all = a->w.dim[0];
    int64_t N = all / (width / K), apart = lg_row_stride(&a->w, 1);
    const double *dy = ref64_data(a->dy), *w = ref64_data(a->w), *pre = ref64_data(a->pre);
    double *dx = ref64_data(a->dx), *dbias = ref64_data(a->dbias);
    double *sums = malloc((size_t)((REF64_SUMS + 1) * width) * sizeof *sums);
    double *total = &sums[REF64_SUMS * width];
    LG_ASSERT(sums);
    for (int64_t j = 0; j < width; j++) total[j] = 0;
    for (int64_t m = 0; m < M; m += REF64_SUMS) {
        const int64_t rows = M - m < REF64_SUMS ? M - m : REF64_SUMS;
        for (int64_t j = 0; j < rows * width; j++) sums[j] = 0;
        for (int64_t n = 0; n < all; n++)
            for (int64_t r = 0; r < rows; r++) {
                double *sum = &sums[r * width + n / N * K];
                const double d = dy[(m + r) * all + n], *of = &w[n * apart];
                for (int64_t k = 0; k < K; k++) sum[k] += d * of[k];
            }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < width; j++) {
                const int64_t at = (m + r) * width + j;
                double sum = sums[r * width + j];
                if (pre) sum *= ref64_act_slope(a->act, pre[at]);
                ref64_put(&dx[at], sum, a->accumulate);
                total[j] += sum;
            }
    }
    for (int64_t j = 0; dbias && j < width; j++)
        ref64_put(&dbias[j], total[j], a->accumulate_dbias);
    free(sums);
}

void ref64_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    int64_t M = a->dy.dim[0], K = a->dw.dim[1], width = a->x.dim[1], all = a->dw.dim[0];
    int64_t N = all / (width / K);
    const double *dy = ref64_data(a->dy), *x = ref64_data(a->x);
    double *dw = ref64_data(a->dw), *dbias = ref64_data(a->dbias);
    double *sums = malloc((size_t)(REF64_SUMS * K) * sizeof *sums);
    LG_ASSERT(sums);
    for (int64_t first = 0; first < all; first += REF64_SUMS) {
        const int64_t rows = all - first < REF64_SUMS ? all - first : REF64_SUMS;
        double total[REF64_SUMS] = {0};
        for (int64_t k = 0; k < rows * K; k++) sums[k] = 0;
        for (int64_t m = 0; m < M; m++)
            for (int64_t r = 0; r < rows; r++) {
                const double d = dy[m * all + first + r];
                const double *of = &x[m * width + (first + r) / N * K];
                for (int64_t k = 0; k < K; k++) sums[r * K + k] += d * of[k];
                total[r] += d;
            }
        for (int64_t k = 0; k < rows * K; k++)
            ref64_put(&dw[first * K + k], sums[k], a->accumulate);
        for (int64_t r = 0; dbias && r < rows; r++)
            ref64_put(&dbias[first + r], total[r], a->accumulate);
    }
    free(sums);
}
