/* exp, sigmoid and the activations on vectors of floats.
 *
 * exp: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts), Taylor's polynomial of degree 7 on
 * r, then n into the exponent: at most 2 ulp over [-87.3, 88.3]. Below and above the argument is
 * clamped, so results stay finite and normal (1.2e-38 stands for 0). NaN stays NaN: a broken
 * gradient must stay visible.
 */
#pragma once
#include "kernels/host/isa.h"

/* x, and nothing that the compiler may fuse into what follows. It fuses a product with a sum only
 * where both stand in one basic block, which may hold for whole vectors and not for the rest of a row
 * (bounds checks of a sanitizer, masks), and then a value's bits depend on its place. */
LG_INLINE vf vf_rounded(vf x)
{
    __asm__("" : "+x"(x));
    return x;
}

LG_INLINE vf vf_exp(vf x)
{
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    /* min and max return the second operand when one is NaN */
    x = LG_VMIN(vf_set(88.3f), LG_VMAX(vf_set(-87.3f), x));
    vf t = x * 1.44269504f + magic;
    vf n = t - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = vf_set(1.9841270e-4f); /* 1/7!, 1/6! ... */
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    vi e = ((vi)t - 0x4B400000 + 127) << 23;
    return p * (vf)e;
}

/* log of positive normal numbers: x = m 2^e with m from 0.70 to 1.41, log m = 2 artanh(z), z = (m -
 * 1) / (m + 1), five terms of the series; at most 2 ulp, or 1e-7 where the result is small. */
LG_INLINE vf vf_log(vf x)
{
    vi e = ((vi)x - 0x3f3504f3) >> 23;
    vf m = (vf)((vi)x - (e << 23));
    vf z = (m - 1.0f) / (m + 1.0f), q = z * z;
    vf p = vf_set(0.22222222f);
    p = p * q + 0.28571429f;
    p = p * q + 0.4f;
    p = p * q + 0.66666667f;
    p = p * q * z + 2.0f * z;
    vf n = __builtin_convertvector(e, vf);
    return n * 0.693359375f + (n * -2.12194440e-4f + p);
}

LG_INLINE vf vf_sigmoid(vf x)
{
    return 1.0f / (1.0f + vf_exp(-x));
}

/* gelu_tanh(x) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3): the same function, without the
 * cancellation of 1 + tanh. */
#define LG_GELU_A 1.5957691216f /* 2 sqrt(2 / pi) */
#define LG_GELU_B 0.044715f

LG_INLINE vf vf_act(vf x, lg_act act)
{
    switch (act) {
    case LG_ACT_SILU:
        return x * vf_sigmoid(x);
    case LG_ACT_GELU_TANH:
        return x * vf_sigmoid(LG_GELU_A * (x + LG_GELU_B * (x * x * x)));
    case LG_ACT_RELU:
        return LG_VMAX(vf_set(0), x);
    case LG_ACT_NONE:
        break;
    }
    return x;
}

/* act'(x) */
LG_INLINE vf vf_act_slope(vf x, lg_act act)
{
    switch (act) {
    case LG_ACT_SILU: {
        vf g = vf_sigmoid(x);
        return g * (1.0f + x * (1.0f - g));
    }
    case LG_ACT_GELU_TANH: {
        vf g = vf_sigmoid(LG_GELU_A * (x + LG_GELU_B * (x * x * x)));
        vf du = LG_GELU_A * (1.0f + 3.0f * LG_GELU_B * (x * x));
        return g * (1.0f + x * (1.0f - g) * du);
    }
    case LG_ACT_RELU:
        return (vf)((vi)vf_set(1.0f) & (vi)(x > 0.0f));
    case LG_ACT_NONE:
        break;
    }
    return vf_set(1.0f);
}
