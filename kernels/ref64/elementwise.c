/* Activations, sums and products by element, conversions between element types, layouts. */
#include "base/check.h"
#include "kernels/ref64/ref64.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define SQRT_2_OVER_PI 0.79788456080286535588
#define GELU_CUBIC     0.044715
#define SQRT_1_2       0.70710678118654752440
#define SQRT_1_2PI     0.39894228040143267794
#define QUICK_GELU     1.702

double ref64_act(lg_act act, double x)
{
    switch (act) {
    case LG_ACT_NONE:
        return x;
    case LG_ACT_SILU:
        return x / (1 + exp(-x));
    case LG_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)));
    case LG_ACT_RELU:
        return x < 0 ? 0 : x; /* NaN stays */
    case LG_ACT_GELU_ERF:
        return 0.5 * x * erfc(-x * SQRT_1_2);
    case LG_ACT_QUICK_GELU:
        return x / (1 + exp(-QUICK_GELU * x));
    case LG_ACT_COUNT:
        break;
    }
    LG_ASSERT(!"a known activation");
    return 0;
}

/* ReLU's slope at 0 is 0, as in PyTorch. */
double ref64_act_slope(lg_act act, double x)
{
    switch (act) {
    case LG_ACT_NONE:
        return 1;
    case LG_ACT_SILU: {
        double sigmoid = 1 / (1 + exp(-x));
        return sigmoid * (1 + x * (1 - sigmoid));
    }
    case LG_ACT_GELU_TANH: {
        double t = tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
        double inner_slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x);
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner_slope;
    }
    case LG_ACT_RELU:
        return x > 0;
    case LG_ACT_GELU_ERF:
        return 0.5 * erfc(-x * SQRT_1_2) + x * SQRT_1_2PI * exp(-0.5 * x * x);
    case LG_ACT_QUICK_GELU: {
        double sigmoid = 1 / (1 + exp(-QUICK_GELU * x));
        return sigmoid * (1 + QUICK_GELU * x * (1 - sigmoid));
    }
    case LG_ACT_COUNT:
        break;
    }
    LG_ASSERT(!"a known activation");
    return 0;
}

void ref64_act_forward(lg_stream *s, const struct lg_act_forward_args *a)
{
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t i = 0; i < lg_numel(&a->x); i++) y[i] = ref64_act(a->act, x[i]);
}

void ref64_act_backward(lg_stream *s, const struct lg_act_backward_args *a)
{
    const double *x = ref64_data(a->x), *dy = ref64_data(a->dy);
    double *dx = ref64_data(a->dx);
    for (int64_t i = 0; i < lg_numel(&a->x); i++)
        ref64_put(&dx[i], dy[i] * ref64_act_slope(a->act, x[i]), a->accumulate);
}

void ref64_glu_forward(lg_stream *s, const struct lg_glu_forward_args *a)
{
    int64_t D = a->y.dim[1];
    for (int64_t i = 0; i < lg_numel(&a->y); i++) {
        const double *x = ref64_data(a->x) + i / D * 2 * D + i % D;
        ref64_data(a->y)[i] = x[0] * ref64_act(a->act, x[D]);
    }
}

void ref64_glu_backward(lg_stream *s, const struct lg_glu_backward_args *a)
{
    int64_t D = a->dy.dim[1];
    for (int64_t i = 0; i < lg_numel(&a->dy); i++) {
        const double *x = ref64_data(a->x) + i / D * 2 * D + i % D, value = x[0], gate = x[D];
        double *dx = ref64_data(a->dx) + i / D * 2 * D + i % D, dy = ref64_data(a->dy)[i];
        dx[0] = dy * ref64_act(a->act, gate);
        dx[D] = dy * value * ref64_act_slope(a->act, gate);
    }
}

void ref64_mul_forward(lg_stream *s, const struct lg_mul_forward_args *args)
{
    const double *a = ref64_data(args->a), *b = ref64_data(args->b);
    double *y = ref64_data(args->y);
    for (int64_t i = 0; i < lg_numel(&args->a); i++) y[i] = a[i] * b[i];
}

void ref64_add_forward(lg_stream *s, const struct lg_add_forward_args *args)
{
    const double *a = ref64_data(args->a), *b = ref64_data(args->b);
    double *y = ref64_data(args->y);
    int64_t period = lg_numel(&args->b);
    for (int64_t i = 0; i < lg_numel(&args->a); i++) y[i] = a[i] + b[i % period];
}

void ref64_sum_rows(lg_stream *s, const struct lg_sum_rows_args *a)
{
    int64_t M = a->x.dim[0], N = a->x.dim[1];
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t n = 0; n < N; n++) {
        double sum = 0;
        for (int64_t m = 0; m < M; m++) sum += x[m * N + n];
        ref64_put(&y[n], sum, a->accumulate);
    }
}

void ref64_combine(lg_stream *s, const struct lg_combine_args *a)
{
    double *y = ref64_data(a->y);
    for (int64_t i = 0; i < lg_numel(&a->y); i++) {
        double sum = 0;
        for (int j = 0; j < a->count; j++) sum += a->c[j] * ref64_data(a->x[j])[i];
        y[i] = sum;
    }
}

/* x rounded once, to nearest even, to `bits` significant bits with smallest normal exponent
 * `exponent_min`; beyond `largest` it is infinite. NaN and infinities pass. */
static double round_to(double x, int bits, int exponent_min, double largest)
{
    if (!isfinite(x) || x == 0) return x;
    int exponent = LG_MAX(ilogb(x), exponent_min);
    double unit = ldexp(1, exponent - (bits - 1));
    double rounded = nearbyint(x / unit) * unit;
    return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

static double load_element(const lg_tensor *t, int64_t i)
{
    switch (t->dtype) {
    case LG_F32:
        return ((const float *)t->data)[i];
    case LG_F64:
        return ((const double *)t->data)[i];
    case LG_F16:
        return (double)((const _Float16 *)t->data)[i];
    case LG_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)t->data)[i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    }
    default:
        LG_ASSERT(!"a floating type");
        return 0;
    }
}

static void store_element(const lg_tensor *t, int64_t i, double x)
{
    switch (t->dtype) {
    case LG_F32:
        ((float *)t->data)[i] = (float)x;
        return;
    case LG_F64:
        ((double *)t->data)[i] = x;
        return;
    case LG_F16:
        ((_Float16 *)t->data)[i] = (_Float16)round_to(x, 11, -14, 65504);
        return;
    case LG_BF16: {
        float f = (float)round_to(x, 8, -126, 0x1.fep127);
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        ((uint16_t *)t->data)[i] = (uint16_t)(bits >> 16);
        return;
    }
    default:
        LG_ASSERT(!"a floating type");
    }
}

void ref64_cast(lg_stream *s, const struct lg_cast_args *a)
{
    for (int64_t i = 0; i < lg_numel(&a->x); i++) store_element(&a->y, i, load_element(&a->x, i));
}

void ref64_pixels_to_nhwc(lg_stream *s, const struct lg_pixels_to_nhwc_args *a)
{
    int64_t N = a->x.dim[0], C = a->x.dim[1], HW = a->x.dim[2] * a->x.dim[3];
    const uint8_t *x = a->x.data;
    double *y = ref64_data(a->y);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t p = 0; p < HW; p++)
                y[(n * HW + p) * C + c] = x[(n * C + c) * HW + p] / 127.5 - 1;
}

void ref64_nhwc_to_pixels(lg_stream *s, const struct lg_nhwc_to_pixels_args *a)
{
    int64_t N = a->y.dim[0], C = a->y.dim[1], HW = a->y.dim[2] * a->y.dim[3];
    const double *x = ref64_data(a->x);
    uint8_t *y = a->y.data;
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t p = 0; p < HW; p++) {
                double level = (x[(n * HW + p) * C + c] + 1) * 127.5;
                y[(n * C + c) * HW + p] = (uint8_t)nearbyint(fmin(fmax(level, 0), 255));
            }
}

void ref64_dequantize_rows(lg_stream *s, const struct lg_dequantize_rows_args *a)
{
    const int64_t N = a->w.dim[0], K = a->w.dim[1];
    const uint8_t *codes = a->codes.data;
    const double *scale = ref64_data(a->scale);
    double *w = ref64_data(a->w);
    float value[256];
    lg_rows8_values(a->format, value);
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++) w[n * K + k] = scale[n] * (double)value[codes[n * K + k]];
}

void ref64_copy_rows(lg_stream *s, const struct lg_copy_rows_args *a)
{
    const int64_t M = a->x.dim[0], N = a->x.dim[1];
    const int64_t from = lg_row_stride(&a->x, 1), to = lg_row_stride(&a->y, 1);
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t g = 0; g < LG_MAX(a->groups, 1); g++)
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < N; n++)
                y[g * a->y_apart + m * to + n] = x[g * a->x_apart + m * from + n];
}

void ref64_rope(lg_stream *s, const struct lg_rope_args *a)
{
    const int64_t B = a->x.dim[0], T = a->x.dim[1], h = a->x.dim[2], p = a->cos.dim[1];
    const int64_t from = lg_row_stride(&a->x, 2), to = lg_row_stride(&a->y, 2);
    for (int64_t token = 0; token < B * T; token++)
        for (int64_t head = 0; head < h; head++)
            for (int64_t i = 0; i < p; i++) {
                const double *x = ref64_data(a->x) + token * from + (head * p + i) * 2;
                double *y = ref64_data(a->y) + token * to + (head * p + i) * 2;
                const double x0 = x[0], x1 = x[1];
                double c = 1, d = 0;
                if (head < a->turned) {
                    c = ref64_data(a->cos)[token % T * p + i];
                    d = ref64_data(a->sin)[token % T * p + i] * (a->inverse ? -1 : 1);
                }
                y[0] = x0 * c - x1 * d;
                y[1] = x1 * c + x0 * d;
            }
}

void ref64_nchw_to_nhwc(lg_stream *s, const struct lg_nchw_to_nhwc_args *a)
{
    int64_t N = a->x.dim[0], C = a->x.dim[1], HW = a->x.dim[2] * a->x.dim[3];
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t p = 0; p < HW; p++) y[(n * HW + p) * C + c] = x[(n * C + c) * HW + p];
}

void ref64_nhwc_to_nchw(lg_stream *s, const struct lg_nhwc_to_nchw_args *a)
{
    int64_t N = a->y.dim[0], C = a->y.dim[1], HW = a->y.dim[2] * a->y.dim[3];
    const double *x = ref64_data(a->x);
    double *y = ref64_data(a->y);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            for (int64_t p = 0; p < HW; p++) y[(n * C + c) * HW + p] = x[(n * HW + p) * C + c];
}
