/* Operations that only move elements, and the small tables: gathers, patches, NHWC, codes of 8 bits, T5's buckets, the
 * timestep's sinusoids. None of them is worth more than a plain loop. */
#include "kernels/host/isa.h"
#include <math.h>

void LG_K(upsample2x_forward)(lg_stream *s, const struct lg_upsample2x_forward_args *a)
{
    const int64_t H = a->x.dim[1], W = a->x.dim[2], C = a->x.dim[3];
    const int64_t Ho = a->y.dim[1], Wo = a->y.dim[2], rows = a->y.dim[0] * Ho;
    const size_t pixel = (size_t)C * sizeof(float);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t row = 0; row < rows; row++) {
        const float *x = (const float *)a->x.data + (row / Ho * H + row % Ho / 2) * W * C;
        float *y = (float *)a->y.data + row * Wo * C;
        for (int64_t w = 0; w < Wo; w++) memcpy(y + w * C, x + w / 2 * C, pixel);
    }
}

/* The pixels of dy that show one of x, at most four, in their order. */
void LG_K(upsample2x_backward)(lg_stream *s, const struct lg_upsample2x_backward_args *a)
{
    const int64_t H = a->dx.dim[1], W = a->dx.dim[2], C = a->dx.dim[3];
    const int64_t Ho = a->dy.dim[1], Wo = a->dy.dim[2], pixels = a->dx.dim[0] * H * W;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t p = 0; p < pixels; p++) {
        const int64_t h = p / W % H * 2, w = p % W * 2;
        const float *dy = (const float *)a->dy.data + ((p / (H * W) * Ho + h) * Wo + w) * C;
        float *dx = (float *)a->dx.data + p * C;
        const bool right = w + 1 < Wo, below = h + 1 < Ho;
        LG_VLOOP(i, r, C, {
            vf sum = vf_load_n(dy + i, r);
            if (right) sum += vf_load_n(dy + C + i, r);
            if (below) sum += vf_load_n(dy + Wo * C + i, r);
            if (right && below) sum += vf_load_n(dy + (Wo + 1) * C + i, r);
            if (a->accumulate) sum += vf_load_n(dx + i, r);
            vf_store_n(dx + i, sum, r);
        });
    }
}

void LG_K(copy_rows)(lg_stream *s, const struct lg_copy_rows_args *a)
{
    const int64_t M = a->x.dim[0], N = a->x.dim[1];
    const int64_t from = lg_row_stride(&a->x, 1), to = lg_row_stride(&a->y, 1);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t i = 0; i < M * LG_MAX(a->groups, 1); i++) {
        const int64_t g = i / M, m = i % M;
        memcpy((float *)a->y.data + g * a->y_apart + m * to,
               (const float *)a->x.data + g * a->x_apart + m * from, (size_t)N * sizeof(float));
    }
}

void LG_K(dequantize_rows)(lg_stream *s, const struct lg_dequantize_rows_args *a)
{
    const int64_t N = a->w.dim[0], K = a->w.dim[1];
    const float *scale = a->scale.data;
    float value[256];
    lg_rows8_values(a->format, value);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t n = 0; n < N; n++) {
        const uint8_t *codes = (const uint8_t *)a->codes.data + n * K;
        float *w = (float *)a->w.data + n * K;
        for (int64_t k = 0; k < K; k++) w[k] = scale[n] * value[codes[k]];
    }
}

/* A vector of p pairs. Sums and products round each for itself (isa.h), so a pair's bits do not depend on the compiler. */
LG_INLINE void turn(const float *x, float *y, const float *cosine, const float *sine, int64_t p,
                    float sign)
{
    for (int64_t i = 0; i < p; i++) {
        const float c = cosine[i], d = sign * sine[i], x0 = x[2 * i], x1 = x[2 * i + 1];
        y[2 * i] = x0 * c - x1 * d;
        y[2 * i + 1] = x1 * c + x0 * d;
    }
}

void LG_K(rope)(lg_stream *s, const struct lg_rope_args *a)
{
    const int64_t T = a->x.dim[1], h = a->x.dim[2], p = a->cos.dim[1], tokens = a->x.dim[0] * T;
    const int64_t from = lg_row_stride(&a->x, 2), to = lg_row_stride(&a->y, 2);
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t t = token % T;
        const float *x = (const float *)a->x.data + token * from;
        float *y = (float *)a->y.data + token * to;
        const float *cosine = (const float *)a->cos.data + t * p;
        const float *sine = (const float *)a->sin.data + t * p;
        for (int v = 0; v < a->turned; v++)
            turn(x + 2 * v * p, y + 2 * v * p, cosine, sine, p, a->inverse ? -1.0f : 1.0f);
        const int64_t done = 2 * a->turned * p;
        if (x != y && a->turned < h)
            memcpy(y + done, x + done, (size_t)(2 * h * p - done) * sizeof(float));
    }
}

void LG_K(embedding_forward)(lg_stream *s, const struct lg_embedding_forward_args *a)
{
    const int64_t M = lg_host_numel(&a->ids), V = a->table.dim[0], D = a->table.dim[1];
    const int32_t *ids = a->ids.data;
    LG_PARALLEL(lg_host_threads(s))
    for (int64_t m = 0; m < M; m++) {
        LG_ASSERT(ids[m] >= 0 && ids[m] < V);
        memcpy((float *)a->y.data + m * D, (const float *)a->table.data + ids[m] * D,
               (size_t)D * sizeof(float));
    }
}

void LG_K(embedding_backward)(lg_stream *s, const struct lg_embedding_backward_args *a)
{
    const int64_t M = lg_host_numel(&a->ids), V = a->dtable.dim[0], D = a->dtable.dim[1];
    const int32_t *ids = a->ids.data;
    if (!a->accumulate) memset(a->dtable.data, 0, (size_t)(V * D) * sizeof(float));
    for (int64_t m = 0; m < M; m++) {
        LG_ASSERT(ids[m] >= 0 && ids[m] < V);
        float *row = (float *)a->dtable.data + ids[m] * D;
        const float *dy = (const float *)a->dy.data + m * D;
        LG_VLOOP(i, r, D,
                 { vf_store_n(row + i, vf_load_n(row + i, r) + vf_load_n(dy + i, r), r); });
    }
}

/* Half of the buckets for each direction; of these the first half exact, the rest logarithmic up to
 * max_distance (Raffel et al. 2020). */
static int64_t t5_bucket(int64_t relative, int64_t buckets, int max_distance)
{
    const int64_t half = buckets / 2, exact = half / 2, base = relative > 0 ? half : 0;
    const int64_t distance = relative < 0 ? -relative : relative;
    if (distance < exact) return base + distance;
    double far = log((double)distance / (double)exact) / log((double)max_distance / (double)exact);
    int64_t bucket = exact + (int64_t)(far * (double)(half - exact));
    return base + LG_MIN(bucket, half - 1);
}

void LG_K(t5_bias_forward)(lg_stream *s, const struct lg_t5_bias_forward_args *a)
{
    const int64_t H = a->out.dim[0], T = a->out.dim[1], buckets = a->table.dim[0];
    const float *table = a->table.data;
    float *out = a->out.data;
    for (int64_t relative = 1 - T; relative < T; relative++) {
        const float *row = table + t5_bucket(relative, buckets, a->max_distance) * H;
        for (int64_t i = LG_MAX(0, -relative); i < LG_MIN(T, T - relative); i++)
            for (int64_t h = 0; h < H; h++) out[(h * T + i) * T + i + relative] = row[h];
    }
}

void LG_K(timestep_embedding_forward)(lg_stream *s,
                                      const struct lg_timestep_embedding_forward_args *a)
{
    const int64_t B = lg_host_numel(&a->t), D = a->out.dim[1], half = D / 2;
    const float *t = a->t.data;
    for (int64_t b = 0; b < B; b++) {
        float *out = (float *)a->out.data + b * D;
        for (int64_t i = 0; i < half; i++) {
            double f = exp(-log(10000.0) * (double)i / ((double)half - a->freq_shift));
            out[i] = (float)cos((double)t[b] * f);
            out[half + i] = (float)sin((double)t[b] * f);
        }
    }
}

/* Where element (c, y, x) of a picture stands in (T, c p p) and in (T, p p c). */
struct patches {
    int64_t C, H, W, p;
};

static int64_t patch_first(const struct patches *g, int64_t c, int64_t y, int64_t x)
{
    const int64_t token = y / g->p * (g->W / g->p) + x / g->p;
    return (token * g->C + c) * g->p * g->p + y % g->p * g->p + x % g->p;
}

static int64_t patch_last(const struct patches *g, int64_t c, int64_t y, int64_t x)
{
    const int64_t token = y / g->p * (g->W / g->p) + x / g->p;
    return (token * g->p * g->p + y % g->p * g->p + x % g->p) * g->C + c;
}

#define EACH_ELEMENT(g, B, at, picture, ...)                                                       \
    for (int64_t b = 0; b < (B); b++)                                                              \
        for (int64_t c = 0; c < (g).C; c++)                                                        \
            for (int64_t y = 0; y < (g).H; y++)                                                    \
                for (int64_t x = 0; x < (g).W; x++) {                                              \
                    const int64_t at = ((b * (g).C + c) * (g).H + y) * (g).W + x,                  \
                                  picture = b * (g).C * (g).H * (g).W;                             \
                    __VA_ARGS__;                                                                   \
                }

void LG_K(patchify_forward)(lg_stream *s, const struct lg_patchify_forward_args *a)
{
    const struct patches g = {a->x.dim[1], a->x.dim[2], a->x.dim[3], a->patch};
    const float *in = a->x.data;
    float *out = a->y.data;
    EACH_ELEMENT(g, a->x.dim[0], at, picture, out[picture + patch_first(&g, c, y, x)] = in[at]);
}

static int64_t patch_place(const struct patches *g, bool channels_first, int64_t c, int64_t y,
                           int64_t x)
{
    return channels_first ? patch_first(g, c, y, x) : patch_last(g, c, y, x);
}

void LG_K(unpatchify_forward)(lg_stream *s, const struct lg_unpatchify_forward_args *a)
{
    const struct patches g = {a->y.dim[1], a->y.dim[2], a->y.dim[3], a->patch};
    const bool first = a->channels_first;
    const float *in = a->x.data;
    float *out = a->y.data;
    EACH_ELEMENT(g, a->y.dim[0], at, picture,
                 out[at] = in[picture + patch_place(&g, first, c, y, x)]);
}

void LG_K(unpatchify_backward)(lg_stream *s, const struct lg_unpatchify_backward_args *a)
{
    const struct patches g = {a->dy.dim[1], a->dy.dim[2], a->dy.dim[3], a->patch};
    const bool first = a->channels_first;
    const float *in = a->dy.data;
    float *out = a->dx.data;
    EACH_ELEMENT(g, a->dy.dim[0], at, picture,
                 out[picture + patch_place(&g, first, c, y, x)] = in[at]);
}

/* The four orders of a picture: out[n][p][c] against in[n][c][p]. */
#define EACH_PIXEL(N, C, P, nchw, nhwc, ...)                                                       \
    for (int64_t n = 0; n < (N); n++)                                                              \
        for (int64_t p = 0; p < (P); p++)                                                          \
            for (int64_t c = 0; c < (C); c++) {                                                    \
                const int64_t nchw = (n * (C) + c) * (P) + p, nhwc = (n * (P) + p) * (C) + c;      \
                __VA_ARGS__;                                                                       \
            }

void LG_K(pixels_to_nhwc)(lg_stream *s, const struct lg_pixels_to_nhwc_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[1], P = a->x.dim[2] * a->x.dim[3];
    const uint8_t *x = a->x.data;
    float *y = a->y.data;
    EACH_PIXEL(N, C, P, nchw, nhwc, y[nhwc] = (float)x[nchw] / 127.5f - 1.0f);
}

void LG_K(nhwc_to_pixels)(lg_stream *s, const struct lg_nhwc_to_pixels_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[3], P = a->x.dim[1] * a->x.dim[2];
    const float *x = a->x.data;
    uint8_t *y = a->y.data;
    EACH_PIXEL(N, C, P, nchw, nhwc, {
        float v = (x[nhwc] + 1.0f) * 127.5f;
        v = v > 0.0f ? v : 0.0f; /* NaN becomes 0 */
        y[nchw] = (uint8_t)nearbyintf(v < 255.0f ? v : 255.0f);
    });
}

void LG_K(nchw_to_nhwc)(lg_stream *s, const struct lg_nchw_to_nhwc_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[1], P = a->x.dim[2] * a->x.dim[3];
    const float *x = a->x.data;
    float *y = a->y.data;
    EACH_PIXEL(N, C, P, nchw, nhwc, y[nhwc] = x[nchw]);
}

void LG_K(nhwc_to_nchw)(lg_stream *s, const struct lg_nhwc_to_nchw_args *a)
{
    const int64_t N = a->x.dim[0], C = a->x.dim[3], P = a->x.dim[1] * a->x.dim[2];
    const float *x = a->x.data;
    float *y = a->y.data;
    EACH_PIXEL(N, C, P, nchw, nhwc, y[nchw] = x[nhwc]);
}
