/* Conversions among f32, f64, f16 and bf16, rounding once to nearest even. The 16-bit types come
 * with the weights' files, so only f16 and bf16 to f32 are worth a vector. */
#include "kernels/host/isa.h"

static uint16_t bf16_of_f32(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40); /* stays NaN */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float f32_of_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* To f32 by rounding to odd: rounding that result to a type of at most 22 bits of mantissa is as
 * good as rounding x itself. */
static float odd_f32_of_f64(double x)
{
    float y = (float)x;
    if ((double)y == x || x != x) return y;
    uint32_t u;
    memcpy(&u, &y, sizeof u);
    bool away = (x > 0) == ((double)y > x);
    if (away) u -= 1; /* towards zero, from infinity too */
    u |= 1;
    memcpy(&y, &u, sizeof y);
    return y;
}

static uint16_t bits_of_f16(_Float16 h)
{
    uint16_t u;
    memcpy(&u, &h, sizeof u);
    return u;
}

static _Float16 f16_of_bits(uint16_t u)
{
    _Float16 h;
    memcpy(&h, &u, sizeof h);
    return h;
}

#define LOOP(X, Y, expr)                                                                           \
    do {                                                                                           \
        const X *x = a->x.data;                                                                    \
        Y *y = a->y.data;                                                                          \
        for (int64_t i = 0; i < n; i++) y[i] = (expr);                                             \
    } while (0)

void LG_K(cast)(lg_stream *s, const struct lg_cast_args *a)
{
    const int64_t n = lg_host_numel(&a->x);
#define PAIR(from, to) ((from)*16 + (to))
    switch (PAIR(a->x.dtype, a->y.dtype)) {
    case PAIR(LG_F32, LG_F32):
        LOOP(float, float, x[i]);
        break;
    case PAIR(LG_F32, LG_F64):
        LOOP(float, double, x[i]);
        break;
    case PAIR(LG_F32, LG_F16):
        LOOP(float, uint16_t, bits_of_f16((_Float16)x[i]));
        break;
    case PAIR(LG_F32, LG_BF16):
        LOOP(float, uint16_t, bf16_of_f32(x[i]));
        break;
    case PAIR(LG_F64, LG_F32):
        LOOP(double, float, (float)x[i]);
        break;
    case PAIR(LG_F64, LG_F64):
        LOOP(double, double, x[i]);
        break;
    case PAIR(LG_F64, LG_F16):
        LOOP(double, uint16_t, bits_of_f16((_Float16)odd_f32_of_f64(x[i])));
        break;
    case PAIR(LG_F64, LG_BF16):
        LOOP(double, uint16_t, bf16_of_f32(odd_f32_of_f64(x[i])));
        break;
    case PAIR(LG_F16, LG_F32):
        LOOP(uint16_t, float, (float)f16_of_bits(x[i]));
        break;
    case PAIR(LG_F16, LG_F64):
        LOOP(uint16_t, double, (double)(float)f16_of_bits(x[i]));
        break;
    case PAIR(LG_F16, LG_F16):
        LOOP(uint16_t, uint16_t, x[i]);
        break;
    case PAIR(LG_F16, LG_BF16):
        LOOP(uint16_t, uint16_t, bf16_of_f32((float)f16_of_bits(x[i])));
        break;
    case PAIR(LG_BF16, LG_F32):
        LOOP(uint16_t, float, f32_of_bf16(x[i]));
        break;
    case PAIR(LG_BF16, LG_F64):
        LOOP(uint16_t, double, f32_of_bf16(x[i]));
        break;
    case PAIR(LG_BF16, LG_F16):
        LOOP(uint16_t, uint16_t, bits_of_f16((_Float16)f32_of_bf16(x[i])));
        break;
    case PAIR(LG_BF16, LG_BF16):
        LOOP(uint16_t, uint16_t, x[i]);
        break;
    default:
        LG_ASSERT(!"a cast between floating types");
    }
#undef PAIR
}
