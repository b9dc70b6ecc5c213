/* The reference backend: every operation in plain C and double, as the formula in ops.h reads.
 * Nothing here is fast but products (linear.c), for which tests of wide nets would wait; where clarity and speed differ, clarity wins. */
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
