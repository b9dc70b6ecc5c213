/* One clip, (frames, H, W, C): convolution over time, norms of its channels, boxes of it as channels, and its ends. */
#include "kernels/ref64/ref64.h"
#include <math.h>
#include <stdlib.h>

#include "base/check.h"

/* Position of y: frame, row, column, channel. */
struct cell {
    int64_t d, h, w, c;
};
static struct cell cell_of(lg_tensor t, int64_t i)
{
    const int64_t C = t.dim[3], W = t.dim[2], H = t.dim[1];
    return (struct cell){i / (C * W * H), i / (C * W) % H, i / C % W, i % C};
}
static double at(lg_tensor t, struct cell p)
{
    return ref64_data(t)[((p.d * t.dim[1] + p.h) * t.dim[2] + p.w) * t.dim[3] + p.c];
}

void ref64_conv3d_forward(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    const lg_tensor y = a->y.data ? a->y : a->normed;
    const int64_t t = a->w.dim[1], u = a->w.dim[2], v = a->w.dim[3], I = a->w.dim[4];
    const int64_t O = y.dim[3], K = t * u * v * I;
    double *columns =
        malloc((size_t)(K * REF64_SUMS) * sizeof *columns); // (K, REF64_SUMS): filters, transposed
    LG_ASSERT(columns);
    for (int64_t first = 0; first < O; first += REF64_SUMS) {
        const int64_t channels = LG_MIN(REF64_SUMS, O - first);
        ref64_transpose_rows(columns, ref64_data(a->w) + first * K, channels, K);
        for (int64_t o = first; o < lg_numel(&y); o += O) {
            const struct cell p = cell_of(y, o);
            double sum[REF64_SUMS];
            for (int64_t r = 0; r < REF64_SUMS; r++)
                sum[r] = r < channels ? ref64_data(a->bias)[first + r] : 0;
            for (int64_t k = 0; k < t * u * v; k++) {
                const struct cell q = {p.d * a->stride_time + k / (u * v),
                                       p.h * a->stride + k / v % u - a->pad,
                                       p.w * a->stride + k % v - a->pad, 0};
                if (q.h < 0 || q.h >= a->x.dim[1] || q.w < 0 || q.w >= a->x.dim[2]) continue;
                const double *pixel =
                    ref64_data(a->x) + ((q.d * a->x.dim[1] + q.h) * a->x.dim[2] + q.w) * I;
                const double *filters = columns + k * I * REF64_SUMS;
                ref64_add_products(sum, pixel, filters, I);
            }
            for (int64_t r = 0; r < channels; r++)
                ref64_data(y)[o + r] =
                    sum[r] + (a->residual.data ? ref64_data(a->residual)[o + r] : 0);
        }
    }
    free(columns);
    if (!a->normed.data) return;
    const int64_t rows = lg_numel(&y) / y.dim[3];
    ref64_rms_act_forward(
        s, &(struct lg_rms_act_forward_args){.x = lg_t2(y.data, y.dtype, rows, y.dim[3]),
                                             .y = lg_t2(a->normed.data, y.dtype, rows, y.dim[3]),
                                             .eps = a->eps,
                                             .act = a->act});
}

void ref64_rms_act_forward(lg_stream *s, const struct lg_rms_act_forward_args *a)
{
    const int64_t D = a->x.dim[1];
    for (int64_t m = 0; m < a->x.dim[0]; m++) {
        const double *x = ref64_data(a->x) + m * D;
        double squares = 0;
        for (int64_t i = 0; i < D; i++) squares += x[i] * x[i];
        const double rstd = 1 / sqrt(squares / (double)D + a->eps);
        for (int64_t i = 0; i < D; i++) {
            double v = x[i] * rstd;
            if (a->scale.data) v = v * (1 + ref64_data(a->scale)[i]) + ref64_data(a->shift)[i];
            ref64_data(a->y)[m * D + i] = ref64_act(a->act, v);
        }
    }
}

/* What channel c of cell p, of boxes (time, space, space), is in space. */
static struct cell in_space(struct cell p, int64_t c, int time, int space)
{
    const int64_t k = c % space, j = c / space % space, i = c / (space * space) % time;
    return (struct cell){p.d * time + i, p.h * space + j, p.w * space + k,
                         c / (space * space * time)};
}
void ref64_space_to_depth_forward(lg_stream *s, const struct lg_space_to_depth_forward_args *a)
{
    const int64_t g = a->mean_of.data ? a->mean_of.dim[3] / a->x.dim[3] : 0;
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        const struct cell p = cell_of(a->y, o);
        double sum = 0;
        for (int64_t i = 0; i < g; i++)
            sum += at(a->mean_of, in_space(p, p.c * g + i, a->time, a->space));
        ref64_data(a->y)[o] =
            at(a->x, in_space(p, p.c, a->time, a->space)) + (g ? sum / (double)g : 0);
    }
}

/* Where cell p of space lies in boxes. */
static struct cell in_depth(struct cell p, int time, int space)
{
    const int64_t box = (p.d % time * space + p.h % space) * space + p.w % space;
    return (struct cell){p.d / time, p.h / space, p.w / space, p.c * time * space * space + box};
}
void ref64_depth_to_space_forward(lg_stream *s, const struct lg_depth_to_space_forward_args *a)
{
    const int64_t dropped = a->x.dim[0] * a->time - a->y.dim[0];
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        struct cell p = cell_of(a->y, o);
        p.d += dropped;
        double v = at(a->x, in_depth(p, a->time, a->space));
        if (a->repeated.data) {
            p.c %= a->repeated.dim[3] / (a->time * a->space * a->space);
            v += at(a->repeated, in_depth(p, a->time, a->space));
        }
        ref64_data(a->y)[o] = v;
    }
}

/* The element of a clip (C|D H W) that channel p.c of patch p shows. */
static int64_t in_clip(lg_tensor clip, struct cell p, int patch)
{
    const int64_t i = p.c % patch, j = p.c / patch % patch, c = p.c / (patch * patch);
    return c * lg_row_stride(&clip, 1) + (p.d * clip.dim[2] + p.h * patch + i) * clip.dim[3] +
           p.w * patch + j;
}
void ref64_clip_to_patches_forward(lg_stream *s, const struct lg_clip_to_patches_forward_args *a)
{
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        const struct cell p = cell_of(a->y, o);
        const int64_t i = in_clip(a->x, p, a->patch), c = p.c / (a->patch * a->patch);
        double v =
            a->x.dtype == LG_U8 ? ((const uint8_t *)a->x.data)[i] / 127.5 - 1 : ref64_data(a->x)[i];
        if (a->scale.data) v = v * ref64_data(a->scale)[c] + ref64_data(a->shift)[c];
        ref64_data(a->y)[o] = v;
    }
}
void ref64_patches_to_clip_forward(lg_stream *s, const struct lg_patches_to_clip_forward_args *a)
{
    for (int64_t o = 0; o < lg_numel(&a->x); o++) {
        const int64_t i = in_clip(a->y, cell_of(a->x, o), a->patch);
        const double v = ref64_data(a->x)[o];
        if (a->y.dtype == LG_U8)
            ((uint8_t *)a->y.data)[i] = (uint8_t)nearbyint(fmin(fmax((v + 1) * 127.5, 0), 255));
        else
            ref64_data(a->y)[i] = v;
    }
}

void ref64_clip_posterior_forward(lg_stream *s, const struct lg_clip_posterior_forward_args *a)
{
    const int64_t C = a->mean.dim[0], q = a->x.dim[3], cells = lg_numel(&a->x) / q;
    const int64_t mean_row = lg_row_stride(&a->mean, 1), logvar_row = lg_row_stride(&a->logvar, 1);
    for (int64_t i = 0; i < cells * C; i++) {
        const int64_t p = i % cells, c = i / cells;
        const double *x = ref64_data(a->x) + p * q;
        const double l = x[q == C + 1 ? C : C + c];
        const double center = a->spread.data ? ref64_data(a->center)[c] : 0;
        const double spread = a->spread.data ? ref64_data(a->spread)[c] : 1;
        ref64_data(a->mean)[c * mean_row + p] = (x[c] - center) / spread;
        ref64_data(a->logvar)[c * logvar_row + p] = (l < -30  ? -30
                                                     : l > 20 ? 20
                                                              : l) -
                                                    2 * log(spread); /* NaN stays */
    }
}

void ref64_tile_take(lg_stream *s, const struct lg_tile_take_args *a)
{
    const int64_t h = a->y.dim[1], w = a->y.dim[2], H = a->x.dim[1], W = a->x.dim[2];
    for (int64_t o = 0; o < lg_numel(&a->y); o++) {
        const int64_t i = (o / (w * h) * H + o / w % h + a->top) * W + o % w + a->left;
        ref64_data(a->y)[o] =
            a->x.dtype == LG_U8 ? ((const uint8_t *)a->x.data)[i] / 127.5 - 1 : ref64_data(a->x)[i];
    }
}

void ref64_tile_add(lg_stream *s, const struct lg_tile_add_args *a)
{
    const int64_t h = a->x.dim[1], w = a->x.dim[2], H = a->y.dim[1], W = a->y.dim[2];
    for (int64_t o = 0; o < lg_numel(&a->x); o++) {
        const int64_t r = o / w % h, c = o % w;
        ref64_data(a->y)[(o / (w * h) * H + r + a->top) * W + c + a->left] +=
            ref64_data(a->rows)[r] * ref64_data(a->columns)[c] * ref64_data(a->x)[o];
    }
}
