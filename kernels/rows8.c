/* See rows8.h. The loops are over plain arrays, with masks instead of branches, so that a compiler makes vectors of them: a
 * model has billions of weights. */
#include "kernels/rows8.h"
#include <math.h>
#include <string.h>

#define ROW_MIN 1e-35f
static const float LARGEST[] = {[LG_ROWS8_INT8] = 127, [LG_ROWS8_FP8] = 448};

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* ---- codes to values ---- */

static float fp8_value(uint32_t code)
{
    const int exponent = (int)(code >> 3 & 15), mantissa = (int)(code & 7);
    if ((code & 0x7f) == 0x7f) return NAN;
    const float x =
        exponent ? ldexpf(1 + (float)mantissa / 8, exponent - 7) : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -x : x;
}

void lg_rows8_values(lg_rows8 format, float ret[256])
{
    for (uint32_t i = 0; i < 256; i++)
        ret[i] = format == LG_ROWS8_FP8 ? fp8_value(i) : (float)(int8_t)i;
}

/* ---- values to codes ---- */

/* x: at most a rounding above 448. From 2^-6 on three bits of mantissa are kept; below, adding 2^14 leaves multiples
 * of 2^-9. */
static uint8_t fp8_code(float x)
{
    const uint32_t u = bits_of(x), sign = u >> 24 & 0x80, size = u & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t small = bits_of(float_of(size) + 0x1p14f) - bits_of(0x1p14f);
    return (uint8_t)(sign | (size < bits_of(0x1p-6f) ? small : normal));
}

/* Adding 3 2^22 leaves whole numbers, the even one of two that are as near. */
static uint8_t int8_code(float x)
{
    const float shift = 0x1.8p23f;
    return (uint8_t)(bits_of(x + shift) - bits_of(shift));
}

/* The bits of a row's absmax, which grow with it; not finite from 0x7f800000 on. */
static uint32_t absmax_bits(const float *w, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(w[i]) & 0x7fffffff;
        most = u > most ? u : most;
    }
    return most;
}

static void encode_row(lg_rows8 format, const float *w, int64_t n, float scale, uint8_t *codes)
{
    if (format == LG_ROWS8_FP8)
        for (int64_t i = 0; i < n; i++) codes[i] = fp8_code(w[i] / scale);
    else
        for (int64_t i = 0; i < n; i++) codes[i] = int8_code(w[i] / scale);
}

int64_t lg_rows8_encode(lg_rows8 format, const float *w, int64_t rows, int64_t columns,
                        uint8_t *codes, float *scale)
{
    for (int64_t r = 0; r < rows; r++, w += columns, codes += columns) {
        const uint32_t most = absmax_bits(w, columns);
        if (most >= 0x7f800000) return r;
        scale[r] = 0;
        if (float_of(most) < ROW_MIN) {
            memset(codes, 0, (size_t)columns);
            continue;
        }
        scale[r] = float_of(most) / LARGEST[format];
        encode_row(format, w, columns, scale[r], codes);
    }
    return -1;
}
