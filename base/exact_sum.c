/* See exact_sum.h. A double is 53 bits at some place of the fixed-point number, so it touches three digits; each
 * digit has 32 bits of room for carries. */
#include "base/exact_sum.h"
#include "base/check.h"
#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    LOWEST = -298,       /* exponent of digit 0's last bit */
    BIAS = 1075,         /* of a double whose mantissa is read as a whole number */
    HIGHEST = 288,       /* terms are below 2^HIGHEST; 2^32 and more of them fit */
    TERMS_MAX = 1 << 30, /* a digit grows by less than 2^32 each: no overflow */
};
static_assert(32 * LG_EXACT_DIGITS + LOWEST > HIGHEST + 64, "room for the sum of 2^64 terms");

static void carry(struct lg_exact_sum *s)
{
    uint64_t over = 0;
    for (int i = 0; i < LG_EXACT_DIGITS; i++) {
        s->digit[i] += over;
        over = s->digit[i] >> 32;
        s->digit[i] &= UINT32_MAX;
    }
    LG_ASSERT(!over);
    s->terms = 0;
}

void lg_exact_sum_add(struct lg_exact_sum *s, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52 & 0x7ff);
    if (exponent == 0x7ff) {
        s->nonfinite++;
        return;
    }
    LG_ASSERT(!(bits >> 63) || x == 0);
    if (x == 0) return;
    uint64_t mantissa = bits & (((uint64_t)1 << 52) - 1);
    if (exponent) mantissa |= (uint64_t)1 << 52;
    int at = LG_MAX(exponent, 1) - BIAS - LOWEST;
    if (at < 0) { /* a small number: zeros follow its last bit */
        LG_ASSERT(at > -53 && !(mantissa & (((uint64_t)1 << -at) - 1)));
        mantissa >>= -at;
        at = 0;
    }
    LG_ASSERT(at + LOWEST + 53 <= HIGHEST);
    uint64_t *d = &s->digit[at / 32];
    unsigned __int128 placed = (unsigned __int128)mantissa << at % 32;
    d[0] += (uint32_t)placed;
    d[1] += (uint32_t)(placed >> 32);
    d[2] += (uint32_t)(placed >> 64);
    if (++s->terms == TERMS_MAX) carry(s);
}

void lg_exact_sum_merge(struct lg_exact_sum *s, const struct lg_exact_sum *other)
{
    struct lg_exact_sum o = *other;
    carry(s);
    carry(&o);
    for (int i = 0; i < LG_EXACT_DIGITS; i++) s->digit[i] += o.digit[i];
    s->nonfinite += o.nonfinite;
    carry(s);
}

/* Whether one of the lowest `bits` bits is set. */
static bool has_below(const struct lg_exact_sum *s, int bits)
{
    for (int i = 0; i < bits / 32; i++)
        if (s->digit[i]) return true;
    return bits % 32 && s->digit[bits / 32] & (((uint64_t)1 << bits % 32) - 1);
}

double lg_exact_sum_total(const struct lg_exact_sum *s)
{
    struct lg_exact_sum own = *s;
    int top = LG_EXACT_DIGITS - 1;
    if (s->nonfinite) return NAN;
    carry(&own);
    while (top > 0 && !own.digit[top]) top--;
    if (!own.digit[top]) return 0;
    /* The highest 64 bits, of which the last also stands for all below: enough to round to 53. */
    int low = LG_MAX(32 * top + 63 - __builtin_clzll(own.digit[top]) - 63, 0);
    uint64_t bits = has_below(&own, low);
    for (int i = top; i >= low / 32; i--) {
        int shift = 32 * i - low;
        bits |= shift >= 0 ? own.digit[i] << shift : own.digit[i] >> -shift;
    }
    return ldexp((double)bits, low + LOWEST);
}
