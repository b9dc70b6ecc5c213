/* See mixture.h. */
#include "stages/io/mixture.h"
#include "stages/io/permute.h"
#include <math.h>

enum { MILLION = 1000000, SOURCE_SHIFT = 48 };

/* ---- making ---- */

static uint64_t divisor(uint64_t a, uint64_t b)
{
    while (b) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static uint64_t millionths(double weight)
{
    return (uint64_t)llround(weight * MILLION);
}

/* What the sources have of each other: share[i] of their sum. False: it is too much to be counted, or weights leave nothing. */
static bool find_shares(const struct lg_mixture_source *s, int n, uint64_t *share)
{
    uint64_t weights = 0, items = 0;
    int weighted = 0;
    bool counts = true;
    for (int i = 0; i < n; i++) {
        weighted += s[i].weight > 0;
        weights += millionths(s[i].weight);
        counts &= !__builtin_mul_overflow(s[i].items, s[i].repeats, &share[i]);
        if (s[i].weight <= 0) counts &= !__builtin_add_overflow(items, share[i], &items);
    }
    /* In units of 1 / (MILLION x items of those without a weight). */
    if (weighted && weighted < n && weights >= MILLION) return false;
    for (int i = 0; i < n && weighted; i++) {
        const bool own = s[i].weight > 0;
        const uint64_t part = own ? millionths(s[i].weight) : MILLION - weights;
        const uint64_t times = weighted == n ? 1 : own ? items : share[i];
        counts &= !__builtin_mul_overflow(part, times, &share[i]);
    }
    return counts;
}

int lg_mixture_make(const struct lg_mixture_source *source, int n, struct lg_mixture *ret)
{
    uint64_t share[LG_MIXTURE_MAX], left = 0, first = 0;
    LG_ASSERT(n >= 1 && n <= LG_MIXTURE_MAX);
    bool counts = find_shares(source, n, share);
    for (int i = n; counts && i-- > 0;) {
        counts = !__builtin_add_overflow(left, share[i], &left) && left < UINT64_C(1) << 63;
        if (!counts) break;
        const uint64_t common = divisor(share[i], left);
        ret->of[i].share = share[i] / common;
        ret->of[i].left = left / common;
    }
    if (!counts)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.source: items times repeats, or times their weights in "
                       "millionths, cannot be counted: use smaller repeats, or "
                       "weights with fewer digits; weights below 1 leave the rest to "
                       "the sources without one");
    for (int i = 0; i < n; first += source[i++].items) {
        LG_ASSERT(source[i].items && ret->of[i].share);
        ret->of[i].items = source[i].items;
        ret->of[i].first = first;
    }
    ret->n = n;
    return 0;
}

/* ---- asking ---- */

/* Source i's samples of the first t of those that the sources before it leave. */
static uint64_t before(const struct lg_mixture *m, int i, uint64_t t)
{
    return (uint64_t)((unsigned __int128)t * m->of[i].share / m->of[i].left);
}

struct lg_mixture_place lg_mixture_at(const struct lg_mixture *m, const struct lg_mixture_key *key,
                                      uint64_t n)
{
    LG_ASSERT(n >= key->first);
    uint64_t t = n - key->first, k = 0;
    int i = 0;
    for (;; i++) {
        k = before(m, i, t);
        if (i == m->n - 1 || before(m, i, t + 1) > k) break;
        t -= k;
    }
    const uint64_t items = m->of[i].items, pass = k / items;
    const uint64_t seed = key->seed + (m->n > 1 ? key->first : 0);
    const uint64_t epoch = key->epoch + pass;
    LG_ASSERT(epoch < UINT64_C(1) << SOURCE_SHIFT || !i);
    const uint64_t at =
        key->no_shuffle ? k % items
                        : lg_permute(seed, epoch | (uint64_t)i << SOURCE_SHIFT, k % items, items);
    return (struct lg_mixture_place){.source = i, .item = m->of[i].first + at, .epoch = epoch};
}

uint64_t lg_mixture_count(const struct lg_mixture *m, int i, uint64_t t)
{
    for (int k = 0; k < i; k++) t -= before(m, k, t);
    return before(m, i, t);
}

double lg_mixture_share(const struct lg_mixture *m, int i)
{
    double left = 1;
    for (int k = 0; k < i; k++) left *= 1 - (double)m->of[k].share / (double)m->of[k].left;
    return left * (double)m->of[i].share / (double)m->of[i].left;
}
