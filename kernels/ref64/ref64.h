/* The reference backend: every operation in plain C and double, as the formula in ops.h reads.
 * Nothing here is fast but products (linear.c) and convolutions (conv.c, clip.c), for which tests of wide nets would wait; where clarity and speed differ, clarity wins. */
#pragma once
#include "kernels/backend.h"

#define LG_OP(name, ...) void ref64_##name(lg_stream *s, const struct lg_##name##_args *a);
#include "kernels/ops.def"
#undef LG_OP

/* The elements of a tensor of doubles; NULL when absent. */
static inline double *ref64_data(lg_tensor t)
{
    return t.data;
}

/* act(x) and its derivative at x. */
double ref64_act(lg_act act, double x);
double ref64_act_slope(lg_act act, double x);

/* mean and variance (N, groups, 2) of x (N, H, W, C) over (H, W, C / groups). */
void ref64_group_mean_var(lg_tensor x, int64_t groups, double *ret);

/* *out = value, or += when accumulating. */
static inline void ref64_put(double *out, double value, bool accumulate)
{
    *out = accumulate ? *out + value : value;
}

enum {
    REF64_SUMS = 8
}; /* made side by side: each in the order of its own index, so of the same bits as alone */

/* columns (n, REF64_SUMS) = the transposed of `count` rows of n; those that are missing are zeros. */
static inline void ref64_transpose_rows(double *columns, const double *rows, int64_t count,
                                        int64_t n)
{
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < REF64_SUMS; r++)
            columns[k * REF64_SUMS + r] = r < count ? rows[r * n + k] : 0;
}

/* sum[r] += a[k] columns[k][r] for k = 0 ... n - 1, by two lanes of a register: compilers do not see it in the plain loops. */
static inline void ref64_add_products(double sum[REF64_SUMS], const double *a,
                                      const double *columns, int64_t n)
{
    typedef double pair __attribute__((vector_size(16), aligned(8), may_alias));
    const pair *column = (const pair *)columns;
    pair *sums = (pair *)sum, s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
    for (int64_t k = 0; k < n; k++, column += 4) {
        s0 += a[k] * column[0];
        s1 += a[k] * column[1];
        s2 += a[k] * column[2];
        s3 += a[k] * column[3];
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}
