/* What every isa_*.c stands on. These files are compiled once per instruction set with LG_ISA =
 * sse2, avx2 or avx512; here that becomes a vector type `vf` of LG_VW floats, loads with a short
 * tail, and the name mangling that lets the three builds live in one library.
 *
 * Rounding is a property of this source: an element's bits do not depend on where it stands in an
 * array, on the compiler's options or on what it inlines.
 * - A vector loop runs the same expressions for its tail (short load and store) as for its body.
 * - The compiler fuses nothing (-ffp-contract=off): it would do so only where a product and a sum
 *   meet in one basic block, which may hold for a body and not for its tail. A multiply-add is
 *   written vf_fma, where it pays; + and * round each for itself.
 * - Zeros have signs and sums their order (kernels.mk has no option that lets the compiler differ).
 * tests/unit/test_rounding.c holds both: any place in a row, and this library against one that is
 * compiled without optimization.
 */
#pragma once
#include "kernels/host/host.h"
#include <immintrin.h>
#include <string.h>

#define LG_CAT3_(a, b, c) a##b##_##c
#define LG_CAT3(a, b, c)  LG_CAT3_(a, b, c)
/* lg_host_<name>_<isa> */
#define LG_K(name) LG_CAT3(lg_host_, name, LG_ISA)

#define LG_OP(name, ...) void LG_K(name)(lg_stream * s, const struct lg_##name##_args *a);
#include "kernels/ops.def"
#undef LG_OP
/* y (columns) (+)= column sums of x, in the order of its rows. */
struct lg_host_rows {
    const float *data;
    int64_t rows, columns, stride;
};
void LG_K(column_sums)(lg_stream *s, const struct lg_host_rows *x, float *y, bool accumulate);
size_t LG_K(attention_forward_scratch)(const struct lg_attention_forward_args *a, int threads);
size_t LG_K(attention_backward_scratch)(const struct lg_attention_backward_args *a, int threads);
size_t LG_K(group_norm_scratch)(int64_t C, int64_t groups, int threads);
size_t LG_K(group_norm_backward_scratch)(int64_t N, int64_t C, int threads);
/* mean_var (N, groups, 2) f64 of x (N, H, W, C); scratch as for group_norm. */
void LG_K(group_mean_var)(lg_stream *s, lg_tensor x, lg_tensor mean_var);

#if defined(__AVX512F__)
#define LG_VW            16
#define LG_VSET(x)       ((vf)_mm512_set1_ps(x))
#define LG_VMAX(a, b)    ((vf)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define LG_VMIN(a, b)    ((vf)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define LG_VSQRT(a)      ((vf)_mm512_sqrt_ps((__m512)(a)))
#define LG_VFMA(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#elif defined(__AVX2__)
#define LG_VW            8
#define LG_VSET(x)       ((vf)_mm256_set1_ps(x))
#define LG_VMAX(a, b)    ((vf)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define LG_VMIN(a, b)    ((vf)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define LG_VSQRT(a)      ((vf)_mm256_sqrt_ps((__m256)(a)))
#define LG_VFMA(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
#define LG_VW            4
#define LG_VSET(x)       ((vf)_mm_set1_ps(x))
#define LG_VMAX(a, b)    ((vf)_mm_max_ps((__m128)(a), (__m128)(b)))
#define LG_VMIN(a, b)    ((vf)_mm_min_ps((__m128)(a), (__m128)(b)))
#define LG_VSQRT(a)      ((vf)_mm_sqrt_ps((__m128)(a)))
#define LG_VFMA(a, b, c) ((a) * (b) + (c))
#endif

#define LG_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LG_VW * 4)));
typedef int32_t vi __attribute__((vector_size(LG_VW * 4)));
typedef float vf_unaligned __attribute__((vector_size(LG_VW * 4), aligned(4), may_alias));
/* Half as many lanes, and as many doubles. */
typedef float vh __attribute__((vector_size(LG_VW * 2)));
typedef float vh_unaligned __attribute__((vector_size(LG_VW * 2), aligned(4), may_alias));
typedef double vd __attribute__((vector_size(LG_VW * 4)));

LG_INLINE vf vf_set(float x)
{
    return LG_VSET(x);
}
/* a b + c: rounded once with AVX2 and AVX-512, twice with SSE2, which has no such instruction (and
 * is another set of bits anyhow). */
LG_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return LG_VFMA(a, b, c);
}
LG_INLINE vf vf_load(const float *p)
{
    return *(const vf_unaligned *)p;
}
LG_INLINE void vf_store(float *p, vf v)
{
    *(vf_unaligned *)p = v;
}
/* The first r lanes; the others are 0. r = LG_VW, a constant in a loop's body, is a plain load. */
LG_INLINE vf vf_load_n(const float *p, int r)
{
    if (r == LG_VW) return vf_load(p);
    vf v = {0};
    memcpy(&v, p, (size_t)r * sizeof(float));
    return v;
}
LG_INLINE void vf_store_n(float *p, vf v, int r)
{
    if (r == LG_VW)
        vf_store(p, v);
    else
        memcpy(p, &v, (size_t)r * sizeof(float));
}
/* Lanes added, or compared, in a fixed tree: halves onto each other. */
LG_INLINE float v4_sum(__m128 v)
{
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
LG_INLINE float v4_max(__m128 v)
{
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
}
#define LG_V8_FOLD(v, f) f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1))
LG_INLINE float vf_sum(vf v)
{
#if LG_VW == 16
    __m512 w = (__m512)v;
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(w), _mm512_extractf32x8_ps(w, 1));
    return v4_sum(LG_V8_FOLD(half, _mm_add_ps));
#elif LG_VW == 8
    return v4_sum(LG_V8_FOLD((__m256)v, _mm_add_ps));
#else
    return v4_sum((__m128)v);
#endif
}
LG_INLINE float vf_max_lane(vf v)
{
#if LG_VW == 16
    __m512 w = (__m512)v;
    __m256 half = _mm256_max_ps(_mm512_castps512_ps256(w), _mm512_extractf32x8_ps(w, 1));
    return v4_max(LG_V8_FOLD(half, _mm_max_ps));
#elif LG_VW == 8
    return v4_max(LG_V8_FOLD((__m256)v, _mm_max_ps));
#else
    return v4_max((__m128)v);
#endif
}
LG_INLINE double vd_sum(vd v)
{
    double sum = 0, lane[LG_VW / 2];
    memcpy(lane, &v, sizeof lane);
    for (int i = 0; i < LG_VW / 2; i++) sum += lane[i];
    return sum;
}

/* Runs the block for i = 0, LG_VW, ... below n; r is the number of valid lanes at i. */
#define LG_VLOOP(i, r, n, ...)                                                                     \
    do {                                                                                           \
        const int64_t n_ = (n);                                                                    \
        int64_t i = 0;                                                                             \
        for (; i + LG_VW <= n_; i += LG_VW) {                                                      \
            enum { r = LG_VW };                                                                    \
            __VA_ARGS__                                                                            \
        }                                                                                          \
        if (i < n_) {                                                                              \
            const int r = (int)(n_ - i);                                                           \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

/* The loop after it is shared among the device's threads by a fixed partition. */
#define LG_PRAGMA_(x) _Pragma(#x)
#define LG_PRAGMA(x)  LG_PRAGMA_(x)
#define LG_PARALLEL(threads)                                                                       \
    LG_PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((threads) > 1))
/* Flat arrays are cut into pieces of this many elements. */
enum { LG_PIECE = 16384 };
