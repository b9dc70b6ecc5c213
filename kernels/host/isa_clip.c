/* Operations on one clip, (frames, H, W, C), but the convolution: norms of its channels, boxes of it as channels, its ends. */
#include "kernels/host/vmath.h"
#include <math.h>

static bool present(const lg_tensor *t)
{
    return t->rank > 0 && t->data;
}

static float square_sum(const float *x, int64_t n)
{
    vf sum = {0};
    LG_VLOOP(i, r, n, {
        vf v = vf_load_n(x + i, r);
        sum = vf_fma(v, v, sum);
    });
    return vf_sum(sum);
}

LG_INLINE void rms_act_row(const struct lg_rms_act_forward_args *a, int64_t row, const lg_act act)
{
    const int64_t D = a->x.dim[1];
    const float *x = (const float *)a->x.data + row * D, *scale = a->scale.data;
    const float *shift = a->shift.data;
    float *y = (float *)a->y.data + row * D;
    const float rstd = (float)(1.0 / sqrt((double)square_sum(x, D) / (double)D + a->eps));
    if (present(&a->scale))
        LG_VLOOP(i, r, D, {
            vf factor = 1.0f + vf_load_n(scale + i, r);
            vf v = vf_fma(vf_load_n(x + i, r) * rstd, factor, vf_load_n(shift + i, r));
            vf_store_n(y + i, vf_act(v, act), r);
        });
    else
        LG_VLOOP(i, r, D, { vf_store_n(y + i, vf_act(vf_load_n(x + i, r) * rstd, act), r); });
}

void LG_K(rms_act_forward)(lg_stream *s, const struct lg_rms_act_forward_args *a)
{
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < a->x.dim[0]; row++) {
        if (a->act == LG_ACT_SILU)
            rms_act_row(a, row, LG_ACT_SILU);
        else
            rms_act_row(a, row, a->act);
    }
}

/* Offset of channel 0 of (frame, row, column) of a clip. */
static int64_t pixel(const lg_tensor *t, int64_t d, int64_t h, int64_t w)
{
    return ((d * t->dim[1] + h) * t->dim[2] + w) * t->dim[3];
}

/* A box of a clip: offsets of its pixels from the first one. */
struct boxes {
    int64_t time, space, all; /* all: pixels of a box */
};
static struct boxes boxes_of(int time, int space)
{
    return (struct boxes){time, space, (int64_t)time * space * space};
}
static int64_t in_box(const struct boxes *b, const lg_tensor *clip, int64_t k)
{
    return pixel(clip, k / (b->space * b->space), k / b->space % b->space, k % b->space);
}

void LG_K(space_to_depth_forward)(lg_stream *s, const struct lg_space_to_depth_forward_args *a)
{
    const struct boxes b = boxes_of(a->time, a->space);
    const int64_t H = a->y.dim[1], W = a->y.dim[2], C = a->y.dim[3], cells = a->y.dim[0] * H * W;
    const bool adds = present(&a->mean_of);
    const int64_t g = adds ? a->mean_of.dim[3] / a->x.dim[3] : 0;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t p = 0; p < cells; p++) {
        const int64_t d = p / (W * H) * b.time, h = p / W % H * b.space, w = p % W * b.space;
        const float *x = (const float *)a->x.data + pixel(&a->x, d, h, w);
        const float *of = (const float *)a->mean_of.data + (adds ? pixel(&a->mean_of, d, h, w) : 0);
        float *y = (float *)a->y.data + p * C;
        for (int64_t c = 0; c < C; c++) {
            float v = x[in_box(&b, &a->x, c % b.all) + c / b.all], sum = 0;
            for (int64_t i = c * g; i < (c + 1) * g; i++)
                sum += of[in_box(&b, &a->mean_of, i % b.all) + i / b.all];
            y[c] = adds ? v + sum / (float)g : v;
        }
    }
}

void LG_K(depth_to_space_forward)(lg_stream *s, const struct lg_depth_to_space_forward_args *a)
{
    const struct boxes b = boxes_of(a->time, a->space);
    const int64_t H = a->y.dim[1], W = a->y.dim[2], C = a->y.dim[3], cells = a->y.dim[0] * H * W;
    const int64_t dropped = a->x.dim[0] * b.time - a->y.dim[0];
    const bool adds = present(&a->repeated);
    const int64_t R = adds ? a->repeated.dim[3] / b.all : 1;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t p = 0; p < cells; p++) {
        const int64_t d = p / (W * H) + dropped, h = p / W % H, w = p % W;
        const int64_t box = (d % b.time * b.space + h % b.space) * b.space + w % b.space;
        const int64_t at[] = {d / b.time, h / b.space, w / b.space};
        const float *x = (const float *)a->x.data + pixel(&a->x, at[0], at[1], at[2]) + box;
        const float *more = (const float *)a->repeated.data +
                            (adds ? pixel(&a->repeated, at[0], at[1], at[2]) + box : 0);
        float *y = (float *)a->y.data + p * C;
        for (int64_t c = 0; c < C; c++)
            y[c] = adds ? x[c * b.all] + more[c % R * b.all] : x[c * b.all];
    }
}

/* The first pixel of a patch in a channel of a clip. */
static int64_t first_pixel(const lg_tensor *patches, const lg_tensor *clip, int64_t cell, int p)
{
    const int64_t wide = patches->dim[2];
    return (cell / wide * clip->dim[3] + cell % wide) * p;
}

void LG_K(clip_to_patches_forward)(lg_stream *s, const struct lg_clip_to_patches_forward_args *a)
{
    const int64_t p = a->patch, C = a->y.dim[3], stride = lg_row_stride(&a->x, 1);
    const int64_t W = a->x.dim[3], cells = lg_host_rows(&a->y);
    const float *scale = present(&a->scale) ? a->scale.data : NULL, *shift = a->shift.data;
    float *y = a->y.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t cell = 0; cell < cells; cell++) {
        const int64_t row = first_pixel(&a->y, &a->x, cell, a->patch);
        for (int64_t k = 0; k < C; k++) {
            const int64_t c = k / (p * p), at = c * stride + row + k % p * W + k / p % p;
            const float v = a->x.dtype == LG_U8
                                ? (float)((const uint8_t *)a->x.data)[at] / 127.5f - 1.0f
                                : ((const float *)a->x.data)[at];
            y[cell * C + k] = scale ? v * scale[c] + shift[c] : v;
        }
    }
}

static uint8_t level_of(float x)
{
    float v = (x + 1.0f) * 127.5f;
    v = v > 0.0f ? v : 0.0f; /* NaN becomes 0 */
    return (uint8_t)nearbyintf(v < 255.0f ? v : 255.0f);
}

void LG_K(patches_to_clip_forward)(lg_stream *s, const struct lg_patches_to_clip_forward_args *a)
{
    const int64_t p = a->patch, C = a->x.dim[3], stride = lg_row_stride(&a->y, 1);
    const int64_t W = a->y.dim[3], cells = lg_host_rows(&a->x);
    const float *x = a->x.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t cell = 0; cell < cells; cell++) {
        const int64_t row = first_pixel(&a->x, &a->y, cell, a->patch);
        for (int64_t k = 0; k < C; k++) {
            const int64_t at = k / (p * p) * stride + row + k % p * W + k / p % p;
            if (a->y.dtype == LG_U8)
                ((uint8_t *)a->y.data)[at] = level_of(x[cell * C + k]);
            else
                ((float *)a->y.data)[at] = x[cell * C + k];
        }
    }
}

void LG_K(clip_posterior_forward)(lg_stream *s, const struct lg_clip_posterior_forward_args *a)
{
    const int64_t C = a->mean.dim[0], q = a->x.dim[3], cells = lg_host_rows(&a->x);
    const int64_t mean_row = lg_row_stride(&a->mean, 1), logvar_row = lg_row_stride(&a->logvar, 1);
    const float *center = present(&a->spread) ? a->center.data : NULL, *spread = a->spread.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t c = 0; c < C; c++) {
        const float *x = a->x.data;
        float *mean = (float *)a->mean.data + c * mean_row;
        float *logvar = (float *)a->logvar.data + c * logvar_row;
        const int64_t of = q == C + 1 ? C : C + c;
        const double narrower = center ? 2 * log((double)spread[c]) : 0;
        for (int64_t i = 0; i < cells; i++, x += q) {
            const float l = x[of] < -30 ? -30 : x[of] > 20 ? 20 : x[of]; /* NaN stays */
            mean[i] = center ? (x[c] - center[c]) / spread[c] : x[c];
            logvar[i] = (float)((double)l - narrower);
        }
    }
}

void LG_K(tile_take)(lg_stream *s, const struct lg_tile_take_args *a)
{
    const int64_t h = a->y.dim[1], w = a->y.dim[2], H = a->x.dim[1], W = a->x.dim[2];
    const int64_t rows = a->y.dim[0] * h;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = (row / h * H + row % h + a->top) * W + a->left;
        float *y = (float *)a->y.data + row * w;
        if (a->x.dtype != LG_U8) {
            memcpy(y, (const float *)a->x.data + at, (size_t)w * sizeof *y);
            continue;
        }
        const uint8_t *x = (const uint8_t *)a->x.data + at;
        for (int64_t i = 0; i < w; i++) y[i] = (float)x[i] / 127.5f - 1.0f;
    }
}

void LG_K(tile_add)(lg_stream *s, const struct lg_tile_add_args *a)
{
    const int64_t h = a->x.dim[1], w = a->x.dim[2], H = a->y.dim[1], W = a->y.dim[2];
    const int64_t rows = a->x.dim[0] * h;
    const float *weight = a->rows.data, *columns = a->columns.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + row * w;
        float *y = (float *)a->y.data + (row / h * H + row % h + a->top) * W + a->left;
        const vf of_row = vf_set(weight[row % h]);
        LG_VLOOP(i, r, w, {
            vf factor = of_row * vf_load_n(columns + i, r);
            vf_store_n(y + i, vf_fma(factor, vf_load_n(x + i, r), vf_load_n(y + i, r)), r);
        });
    }
}
