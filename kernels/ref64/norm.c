/* LayerNorm with modulation, gated residual, RMSNorm, GroupNorm. */
#include "base/check.h"
#include "kernels/ref64/ref64.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

void ref64_norm_modulate_forward(lg_stream *s, const struct lg_norm_modulate_forward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    const double *shift = ref64_data(a->shift), *scale = ref64_data(a->scale);
    const int64_t stride = lg_row_stride(&a->scale, 1);
    for (int64_t row = 0; row < B * T; row++) {
        const double *x = ref64_data(a->x) + row * D;
        double *y = ref64_data(a->y) + row * D;
        int64_t mod = row / T * stride;
        double mean = 0, var = 0;
        for (int64_t i = 0; i < D && !a->rms; i++) mean += x[i];
        mean /= (double)D;
        for (int64_t i = 0; i < D; i++) var += (x[i] - mean) * (x[i] - mean);
        double rstd = 1 / sqrt(var / (double)D + a->eps);
        for (int64_t i = 0; i < D; i++) {
            double normed = (x[i] - mean) * rstd;
            y[i] = scale ? normed * (1 + scale[mod + i]) + shift[mod + i] : normed;
        }
        ref64_data(a->mean)[row] = mean;
        ref64_data(a->rstd)[row] = rstd;
    }
}

/* dbias (+)= column sums of dx, rows of `width`, where wanted. */
static void bias_gradient(lg_stream *s, const lg_tensor *dx, int64_t width, lg_tensor dbias,
                          bool accumulate)
{
    const lg_tensor rows = lg_t2(dx->data, LG_F64, lg_numel(dx) / width, width);
    if (dbias.data)
        ref64_sum_rows(s,
                       &(struct lg_sum_rows_args){.x = rows, .y = dbias, .accumulate = accumulate});
}

/* With n = (x - mean) rstd and g = dy (1 + scale): dx = rstd (g - avg(g) - n avg(g n)), of an RMSNorm without avg(g),
 * dshift = sum over T of dy, dscale = sum over T of dy n. */
void ref64_norm_modulate_backward(lg_stream *s, const struct lg_norm_modulate_backward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    const double *scale = ref64_data(a->scale);
    const int64_t stride = lg_row_stride(&a->scale, 1);
    double *dshift = ref64_data(a->dshift), *dscale = ref64_data(a->dscale);
    for (int64_t b = 0; dscale && b < B; b++)
        for (int64_t i = 0; i < D; i++) dshift[b * stride + i] = dscale[b * stride + i] = 0;
    for (int64_t row = 0; row < B * T; row++) {
        const double *x = ref64_data(a->x) + row * D, *dy = ref64_data(a->dy) + row * D;
        double *dx = ref64_data(a->dx) + row * D;
        double mean = ref64_data(a->mean)[row], rstd = ref64_data(a->rstd)[row];
        int64_t mod = row / T * stride;
        double avg_g = 0, avg_gn = 0;
        for (int64_t i = 0; i < D; i++) {
            double normed = (x[i] - mean) * rstd;
            double g = scale ? dy[i] * (1 + scale[mod + i]) : dy[i];
            if (!a->rms) avg_g += g / (double)D;
            avg_gn += g * normed / (double)D;
            if (dscale) {
                dshift[mod + i] += dy[i];
                dscale[mod + i] += dy[i] * normed;
            }
        }
        for (int64_t i = 0; i < D; i++) {
            double normed = (x[i] - mean) * rstd;
            double g = scale ? dy[i] * (1 + scale[mod + i]) : dy[i];
            ref64_put(&dx[i], rstd * (g - avg_g - normed * avg_gn), a->accumulate);
        }
    }
    bias_gradient(s, &a->dx, D, a->dbias, a->accumulate_dbias);
}

void ref64_gate_residual_forward(lg_stream *s, const struct lg_gate_residual_forward_args *a)
{
    int64_t B = a->x.dim[0], T = a->x.dim[1], D = a->x.dim[2];
    const double *x = ref64_data(a->x), *y = ref64_data(a->y), *gate = ref64_data(a->gate);
    double *out = ref64_data(a->out);
    const int64_t stride = lg_row_stride(&a->gate, 1);
    for (int64_t row = 0; row < B * T; row++)
        for (int64_t i = 0; i < D; i++) {
            double g = gate ? gate[row / T * stride + i] : 1;
            out[row * D + i] = x[row * D + i] + g * y[row * D + i];
        }
}

void ref64_gate_residual_backward(lg_stream *s, const struct lg_gate_residual_backward_args *a)
{
    int64_t B = a->dout.dim[0], T = a->dout.dim[1], D = a->dout.dim[2];
    const double *dout = ref64_data(a->dout), *y = ref64_data(a->y);
    double *dy = ref64_data(a->dy);
    for (int64_t b = 0; b < B; b++) {
        const double *gate = ref64_data(a->gate) + b * lg_row_stride(&a->gate, 1);
        for (int64_t i = 0; i < D; i++) {
            double sum = 0;
            for (int64_t t = 0; t < T; t++) {
                int64_t e = (b * T + t) * D + i;
                if (y) sum += dout[e] * y[e];
                dy[e] = gate[i] * dout[e];
            }
            if (y) ref64_data(a->dgate)[b * lg_row_stride(&a->dgate, 1) + i] = sum;
        }
    }
    bias_gradient(s, &a->dy, D, a->dbias, a->accumulate_dbias);
}

void ref64_residual_norm_forward(lg_stream *s, const struct lg_residual_norm_forward_args *a)
{
    ref64_gate_residual_forward(s, &a->residual);
    ref64_norm_modulate_forward(s, &a->norm);
}

void ref64_norm_residual_backward(lg_stream *s, const struct lg_norm_residual_backward_args *a)
{
    ref64_norm_modulate_backward(s, &a->norm);
    ref64_gate_residual_backward(s, &a->residual);
}

void ref64_rms_norm_forward(lg_stream *s, const struct lg_rms_norm_forward_args *a)
{
    const int64_t vectors = a->x.dim[2], D = a->x.dim[3], tokens = a->x.dim[0] * a->x.dim[1];
    for (int64_t v = 0; v < tokens * vectors; v++) {
        const int64_t token = v / vectors, within = v % vectors * D;
        const double *x = ref64_data(a->x) + token * lg_row_stride(&a->x, 2) + within;
        const double *w = ref64_data(a->w) + v % vectors / a->each * D;
        double *y = ref64_data(a->y) + token * lg_row_stride(&a->y, 2) + within, squares = 0;
        for (int64_t i = 0; i < D; i++) squares += x[i] * x[i];
        const double rms = sqrt(squares / (double)D + a->eps);
        for (int64_t i = 0; i < D; i++) y[i] = x[i] / rms * w[i];
        if (a->rstd.data) ref64_data(a->rstd)[v] = 1 / rms;
    }
    if (a->cos.data)
        ref64_rope(s,
                   &(struct lg_rope_args){
                       .x = a->y, .cos = a->cos, .sin = a->sin, .y = a->y, .turned = (int)vectors});
}

void ref64_rms_norm_backward(lg_stream *s, const struct lg_rms_norm_backward_args *a)
{
    const int64_t vectors = a->x.dim[2], D = a->x.dim[3], tokens = a->x.dim[0] * a->x.dim[1];
    const lg_tensor from = a->cos.data ? a->dx : a->dy; /* turned back it lies where dx will */
    double *dw = ref64_data(a->dw), *dbias = ref64_data(a->dbias);
    double *of_rest = ref64_data(a->dbias_of_rest);
    if (a->cos.data)
        ref64_rope(s, &(struct lg_rope_args){.x = a->dy,
                                             .cos = a->cos,
                                             .sin = a->sin,
                                             .y = a->dx,
                                             .turned = (int)vectors,
                                             .inverse = true});
    for (int64_t i = 0; dw && !a->accumulate_dw && i < a->w.dim[0] * D; i++) dw[i] = 0;
    for (int64_t i = 0; dbias && !a->accumulate_dbias && i < vectors * D; i++) dbias[i] = 0;
    for (int64_t v = 0; v < tokens * vectors; v++) {
        const int64_t token = v / vectors, within = v % vectors * D;
        const int64_t at = v % vectors / a->each * D;
        const double *x = ref64_data(a->x) + token * lg_row_stride(&a->x, 2) + within;
        const double *dy = ref64_data(from) + token * lg_row_stride(&from, 2) + within;
        const double *w = ref64_data(a->w) + at, rstd = ref64_data(a->rstd)[v];
        double *dx = ref64_data(a->dx) + token * lg_row_stride(&a->dx, 2) + within, mean = 0;
        for (int64_t i = 0; i < D; i++) mean += dy[i] * w[i] * x[i] * rstd / (double)D;
        for (int64_t i = 0; i < D; i++) {
            if (dw) dw[at + i] += dy[i] * x[i] * rstd;
            ref64_put(&dx[i], rstd * (dy[i] * w[i] - x[i] * rstd * mean), a->accumulate);
            if (dbias) dbias[within + i] += dx[i];
        }
    }
    for (int64_t i = 0; of_rest && i < a->rest.dim[2]; i++) {
        double sum = 0;
        for (int64_t token = 0; token < tokens; token++)
            sum += ref64_data(a->rest)[token * lg_row_stride(&a->rest, 2) + i];
        ref64_put(&of_rest[i], sum, a->accumulate_dbias);
    }
}

void ref64_layer_norm_forward(lg_stream *s, const struct lg_layer_norm_forward_args *a)
{
    int64_t M = a->x.dim[0], D = a->x.dim[1];
    const double *w = ref64_data(a->w), *b = ref64_data(a->b);
    for (int64_t m = 0; m < M; m++) {
        const double *x = ref64_data(a->x) + m * D;
        double *y = ref64_data(a->y) + m * D;
        double mean = 0, var = 0;
        for (int64_t i = 0; i < D; i++) mean += x[i] / (double)D;
        for (int64_t i = 0; i < D; i++) var += (x[i] - mean) * (x[i] - mean) / (double)D;
        for (int64_t i = 0; i < D; i++) y[i] = (x[i] - mean) / sqrt(var + a->eps) * w[i] + b[i];
        if (!a->rstd.data) continue;
        ref64_data(a->mean)[m] = mean;
        ref64_data(a->rstd)[m] = 1 / sqrt(var + a->eps);
    }
}

void ref64_layer_norm_backward(lg_stream *s, const struct lg_layer_norm_backward_args *a)
{
    int64_t M = a->x.dim[0], D = a->x.dim[1];
    const double *w = ref64_data(a->w);
    double *dw = ref64_data(a->dw), *db = ref64_data(a->db);
    for (int64_t i = 0; dw && !a->accumulate_dw && i < D; i++) dw[i] = db[i] = 0;
    for (int64_t m = 0; m < M; m++) {
        const double *x = ref64_data(a->x) + m * D, *dy = ref64_data(a->dy) + m * D;
        double mean = ref64_data(a->mean)[m], rstd = ref64_data(a->rstd)[m];
        double avg = 0, avg_n = 0;
        for (int64_t i = 0; i < D; i++) {
            double n = (x[i] - mean) * rstd;
            avg += dy[i] * w[i] / (double)D;
            avg_n += dy[i] * w[i] * n / (double)D;
            if (dw) dw[i] += dy[i] * n, db[i] += dy[i];
        }
        for (int64_t i = 0; i < D; i++) {
            double n = (x[i] - mean) * rstd;
            ref64_put(&ref64_data(a->dx)[m * D + i], rstd * (dy[i] * w[i] - avg - n * avg_n),
                      a->accumulate);
        }
    }
}

void ref64_group_mean_var_forward(lg_stream *s, const struct lg_group_mean_var_forward_args *a)
{
    ref64_group_mean_var(a->x, a->mean_var.dim[1], ref64_data(a->mean_var));
}

void ref64_group_mean_var(lg_tensor t, int64_t groups, double *ret)
{
    int64_t N = t.dim[0], HW = t.dim[1] * t.dim[2], C = t.dim[3];
    int64_t wide = C / groups; /* channels of a group */
    for (int64_t ng = 0; ng < N * groups; ng++) {
        int64_t c0 = ng % groups * wide;
        const double *x = ref64_data(t) + ng / groups * HW * C;
        double mean = 0, var = 0, count = (double)(HW * wide);
        for (int64_t p = 0; p < HW; p++)
            for (int64_t c = c0; c < c0 + wide; c++) mean += x[p * C + c];
        mean /= count;
        for (int64_t p = 0; p < HW; p++)
            for (int64_t c = c0; c < c0 + wide; c++)
                var += (x[p * C + c] - mean) * (x[p * C + c] - mean);
        ret[ng * 2] = mean;
        ret[ng * 2 + 1] = var / count;
    }
}

void ref64_group_norm_forward(lg_stream *s, const struct lg_group_norm_forward_args *a)
{
    int64_t N = a->x.dim[0], HW = a->x.dim[1] * a->x.dim[2], C = a->x.dim[3];
    int64_t wide = C / a->groups; /* channels of a group */
    const double *w = ref64_data(a->w), *bias = ref64_data(a->b);
    double *own = calloc((size_t)(N * a->groups * 2), sizeof *own);
    LG_ASSERT(own);
    if (!a->mean_var.data) ref64_group_mean_var(a->x, a->groups, own);
    const double *mean_var = a->mean_var.data ? ref64_data(a->mean_var) : own;
    for (int64_t i = 0; i < N * HW * C; i++) {
        int64_t c = i % C, group = i / (HW * C) * a->groups + c / wide;
        double mean = mean_var[group * 2], rstd = 1 / sqrt(mean_var[group * 2 + 1] + a->eps);
        double x = ref64_data(a->x)[i];
        ref64_data(a->y)[i] = ref64_act(a->act, (x - mean) * rstd * w[c] + bias[c]);
    }
    free(own);
}

/* One group of one sample: the channels [c0, c0 + wide). */
static void group_backward(const struct lg_group_norm_backward_args *a, int64_t n, int64_t group)
{
    int64_t HW = a->x.dim[1] * a->x.dim[2], C = a->x.dim[3], wide = C / a->groups;
    const double *mean_var = ref64_data(a->mean_var) + (n * a->groups + group) * 2;
    const double *w = ref64_data(a->w), *b = ref64_data(a->b);
    double *dw = ref64_data(a->dw), *db = ref64_data(a->db);
    double mean = mean_var[0], rstd = 1 / sqrt(mean_var[1] + a->eps), avg = 0, avg_n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t p = 0; p < HW; p++)
            for (int64_t c = group * wide; c < (group + 1) * wide; c++) {
                int64_t at = (n * HW + p) * C + c;
                double normed = (ref64_data(a->x)[at] - mean) * rstd;
                double d = ref64_data(a->dy)[at] * ref64_act_slope(a->act, normed * w[c] + b[c]);
                if (pass == 1) {
                    ref64_put(&ref64_data(a->dx)[at],
                              rstd * (d * w[c] - (avg + normed * avg_n) / (double)(HW * wide)),
                              a->accumulate);
                    continue;
                }
                avg += d * w[c];
                avg_n += d * w[c] * normed;
                if (dw) dw[c] += d * normed, db[c] += d;
            }
}

void ref64_group_norm_backward(lg_stream *s, const struct lg_group_norm_backward_args *a)
{
    double *dw = ref64_data(a->dw), *db = ref64_data(a->db);
    for (int64_t c = 0; dw && !a->accumulate_dw && c < a->x.dim[3]; c++) dw[c] = db[c] = 0;
    for (int64_t n = 0; n < a->x.dim[0]; n++)
        for (int64_t group = 0; group < a->groups; group++) group_backward(a, n, group);
}

void ref64_shift_forward(lg_stream *s, const struct lg_shift_forward_args *a)
{
    int64_t T = a->x.dim[1], D = a->x.dim[2], stride = lg_row_stride(&a->shift, 1);
    for (int64_t i = 0; i < lg_numel(&a->x); i++)
        ref64_data(a->y)[i] =
            ref64_data(a->x)[i] + ref64_data(a->shift)[i / (T * D) * stride + i % D];
}

void ref64_shift_backward(lg_stream *s, const struct lg_shift_backward_args *a)
{
    int64_t B = a->dy.dim[0], T = a->dy.dim[1], D = a->dy.dim[2];
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < D; i++) {
            double sum = 0;
            for (int64_t t = 0; t < T; t++) sum += ref64_data(a->dy)[(b * T + t) * D + i];
            ref64_data(a->dshift)[b * lg_row_stride(&a->dshift, 1) + i] = sum;
        }
}
