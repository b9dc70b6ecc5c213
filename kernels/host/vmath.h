/* exp, sigmoid and the activations on vectors of floats.
 *
 * exp: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts), Taylor's polynomial of degree 7 on
 * r, then n into the exponent: at most 2 ulp over [-87.3, 88.3]. Below and above the argument is
 * clamped, so results stay finite and normal (1.2e-38 stands for 0). NaN stays NaN: a broken
 * gradient must stay visible.
 */
#pragma once
#include "kernels/host/isa.h"

/* exp(x) in two factors, a number near 1 and a power of two. */
LG_INLINE vf vf_exp_factors(vf x, vf *ret_power)
{
    const vf magic = vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    /* min and max return the second operand when one is NaN */
    x = LG_VMIN(vf_set(88.3f), LG_VMAX(vf_set(-87.3f), x));
    vf t = vf_fma(x, vf_set(1.44269504f), magic);
    vf n = t - magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9841270e-4f); /* 1/7!, 1/6! ... */
    p = vf_fma(p, r, vf_set(1.3888889e-3f));
    p = vf_fma(p, r, vf_set(8.3333333e-3f));
    p = vf_fma(p, r, vf_set(4.1666667e-2f));
    p = vf_fma(p, r, vf_set(1.6666667e-1f));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r * r, r);
    p = p + 1.0f;
    *ret_power = (vf)(((vi)t - 0x4B400000 + 127) << 23);
    return p;
}

LG_INLINE vf vf_exp(vf x)
{
    vf power, p = vf_exp_factors(x, &power);
    return p * power;
}

/* log of positive normal numbers: x = m 2^e with m from 0.70 to 1.41, log m = 2 artanh(z), z = (m -
 * 1) / (m + 1), five terms of the series; at most 2 ulp, or 1e-7 where the result is small. */
LG_INLINE vf vf_log(vf x)
{
    vi e = ((vi)x - 0x3f3504f3) >> 23;
    vf m = (vf)((vi)x - (e << 23));
    vf z = (m - 1.0f) / (m + 1.0f), q = z * z;
    vf p = vf_set(0.22222222f);
    p = vf_fma(p, q, vf_set(0.28571429f));
    p = vf_fma(p, q, vf_set(0.4f));
    p = vf_fma(p, q, vf_set(0.66666667f));
    p = vf_fma(p * q, z, 2.0f * z);
    vf n = __builtin_convertvector(e, vf);
    return vf_fma(n, vf_set(0.693359375f), vf_fma(n, vf_set(-2.12194440e-4f), p));
}

LG_INLINE vf vf_sigmoid(vf x)
{
    vf power, p = vf_exp_factors(-x, &power);
    return 1.0f / vf_fma(p, power, vf_set(1.0f));
}

/* gelu_tanh(x) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3): the same function, without the
 * cancellation of 1 + tanh. */
#define LG_GELU_A 1.5957691216f /* 2 sqrt(2 / pi) */
#define LG_GELU_B 0.044715f

LG_INLINE vf vf_gelu_2u(vf x)
{
    return LG_GELU_A * vf_fma(vf_set(LG_GELU_B), x * x * x, x);
}

/* exp(-x^2 / 2), and the normal distribution's Phi(x): Phi(-|x|) = exp(-x^2 / 2) t P(t), t = 1 / (1 + 0.3 |x|), P a
 * polynomial of degree 8 by least squares of the relative error, 1.1e-7 at most for |x| <= 14. */
LG_INLINE vf vf_phi(vf x, vf *ret_bell)
{
    const vf size = (vf)((vi)x & 0x7fffffff), bell = vf_exp(-0.5f * x * x);
    const vf t = 1.0f / vf_fma(vf_set(0.3f), size, vf_set(1.0f));
    vf p = vf_set(0.0044832626f);
    p = vf_fma(p, t, vf_set(0.015419968f));
    p = vf_fma(p, t, vf_set(-0.11857448f));
    p = vf_fma(p, t, vf_set(0.16585992f));
    p = vf_fma(p, t, vf_set(-0.02824132f));
    p = vf_fma(p, t, vf_set(0.11877795f));
    p = vf_fma(p, t, vf_set(0.10215701f));
    p = vf_fma(p, t, vf_set(0.12047387f));
    p = vf_fma(p, t, vf_set(0.11964387f));
    const vf below = bell * t * p;
    const vi positive = (vi)(x > 0.0f);
    *ret_bell = bell;
    return (vf)(((vi)(1.0f - below) & positive) | ((vi)below & ~positive));
}

#define LG_QUICK_GELU 1.702f

LG_INLINE vf vf_act(vf x, lg_act act)
{
    switch (act) {
    case LG_ACT_SILU:
        return x * vf_sigmoid(x);
    case LG_ACT_GELU_TANH:
        return x * vf_sigmoid(vf_gelu_2u(x));
    case LG_ACT_RELU:
        return LG_VMAX(vf_set(0), x);
    case LG_ACT_GELU_ERF: {
        vf bell;
        return x * vf_phi(x, &bell);
    }
    case LG_ACT_QUICK_GELU:
        return x * vf_sigmoid(LG_QUICK_GELU * x);
    case LG_ACT_NONE:
    case LG_ACT_COUNT:
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
        return g * vf_fma(x, 1.0f - g, vf_set(1.0f));
    }
    case LG_ACT_GELU_TANH: {
        vf g = vf_sigmoid(vf_gelu_2u(x));
        vf du = LG_GELU_A * vf_fma(vf_set(3.0f * LG_GELU_B), x * x, vf_set(1.0f));
        return g * vf_fma(x * (1.0f - g), du, vf_set(1.0f));
    }
    case LG_ACT_RELU:
        return (vf)((vi)vf_set(1.0f) & (vi)(x > 0.0f));
    case LG_ACT_GELU_ERF: {
        vf bell, phi = vf_phi(x, &bell);
        return vf_fma(x * 0.39894228f, bell, phi);
    }
    case LG_ACT_QUICK_GELU: {
        vf g = vf_sigmoid(LG_QUICK_GELU * x);
        return g * vf_fma(LG_QUICK_GELU * x, 1.0f - g, vf_set(1.0f));
    }
    case LG_ACT_NONE:
    case LG_ACT_COUNT:
        break;
    }
    return vf_set(1.0f);
}
