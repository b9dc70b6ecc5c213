/* The codes of AdamW's moments in 8 bits: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021),
 * "dynamic tree" maps. A block of LG_ADAMW8_BLOCK elements has one absmax; an element is map[code] absmax. The map of m
 * has both signs:
 *
 *     0, 1, and for i = 0 .. 6 the decade [10^(i-7), 10^(i-6)]: midpoints of 2^i (m, +-) or 2^(i+1) (v) equal parts
 *
 * which makes 256 values, sorted; -1 is not one of them. One header for all backends and for who reads checkpoints. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { LG_ADAMW8_BLOCK = 256, LG_ADAMW8_CODES = 256 };
enum { LG_ADAMW8_ZERO_M = 127, LG_ADAMW8_ZERO_V = 0 }; /* the codes of 0 */

static inline void lg_adamw8_map(bool is_signed, double ret[LG_ADAMW8_CODES])
{
    static const double top[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1}; /* of a decade */
    const int zero = is_signed ? LG_ADAMW8_ZERO_M : LG_ADAMW8_ZERO_V;
    int n = 0;
    ret[zero] = 0;
    for (int i = 0; i < 7; i++) {
        const int parts = is_signed ? 1 << i : 2 << i;
        for (int k = 0; k < parts; k++) {
            const double x = top[i] * (0.1 + 0.9 * (k + 0.5) / parts);
            n++;
            ret[zero + n] = x;
            if (is_signed) ret[zero - n] = -x;
        }
    }
    ret[LG_ADAMW8_CODES - 1] = 1;
}

/* The same in fp32, and where the next code begins: x has code c when so many of the 255 bounds lie below it. A bound is
 * the middle of two neighbours, which belongs to the lower one. */
struct lg_adamw8_map {
    float value[LG_ADAMW8_CODES], bound[LG_ADAMW8_CODES]; /* the last bound is no one's */
};
static inline void lg_adamw8_map_f32(bool is_signed, struct lg_adamw8_map *ret)
{
    double map[LG_ADAMW8_CODES];
    lg_adamw8_map(is_signed, map);
    for (int i = 0; i < LG_ADAMW8_CODES; i++) ret->value[i] = (float)map[i];
    for (int i = 0; i + 1 < LG_ADAMW8_CODES; i++)
        ret->bound[i] = (ret->value[i] + ret->value[i + 1]) * 0.5f;
    ret->bound[LG_ADAMW8_CODES - 1] = 1;
}

/* The codes of n <= LG_ADAMW8_BLOCK values, by their absmax. A value below 0 never becomes 0: m keeps its sign. */
static inline void lg_adamw8_encode(const struct lg_adamw8_map *map, bool is_signed, const float *x,
                                    int n, float absmax, uint8_t *ret)
{
    int32_t code[LG_ADAMW8_BLOCK] = {0};
    const int zero = is_signed ? LG_ADAMW8_ZERO_M : LG_ADAMW8_ZERO_V;
    float unit[LG_ADAMW8_BLOCK];
    for (int i = 0; i < n; i++) unit[i] = absmax > 0 ? x[i] / absmax : 0;
    for (int step = LG_ADAMW8_CODES / 2; step; step /= 2)
        for (int i = 0; i < n; i++) code[i] += unit[i] > map->bound[code[i] + step - 1] ? step : 0;
    for (int i = 0; i < n; i++)
        ret[i] = (uint8_t)(code[i] - (is_signed && unit[i] < 0 && code[i] == zero));
}
