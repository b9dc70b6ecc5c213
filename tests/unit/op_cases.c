/* The table of cases and the functions that build their arguments; see op_cases.h. One build function
 * per operation, in the order of ops.def; at the end the table and the run. */
#include "tests/unit/op_cases.h"
#include "tests/unit/op_args.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { GUARD_BYTES = 64 };

struct shape {
    int64_t B, T, K, N, D, C, H, W, heads, d, Tk, V, groups, kernel, stride, Co, pad[4], count,
        first_queries, first_keys;
    lg_act act;
    lg_dtype from, to;
    lg_rows8 rows8;
    bool bias, dbias_filled, pre, mod, frozen, mask, lse, packed, residual, alias, accumulate,
        dpred, given, causal, rms, dbias, own_values;
    double scale;
};

/* ---- one function per operation ---- */

#define BUILD(op) static void build_##op(struct op_run *r, const struct shape *z)

/* Of linears: `groups` products side by side, each of K features in; N: all features out. */
static int64_t features_in(const struct shape *z)
{
    return z->K * LG_MAX(z->groups, 1);
}

/* packed: columns of a wider matrix. */
static lg_tensor weights_of(struct op_run *r, const struct shape *z)
{
    if (!z->packed) return op_in(r, 0, 1, DIMS(z->N, z->K));
    return op_slice(r, op_pack(r, 0, z->N, z->K + 24), NULL, 16, z->K, DIMS(z->N, z->K));
}

BUILD(linear_forward)
{
    int64_t M = z->B * z->T;
    struct lg_linear_forward_args a = {.act = z->act};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(M, features_in(z)));
    a.w = weights_of(r, z);
    if (z->bias) a.bias = op_in(r, 0, 1, DIMS(z->N));
    if (z->residual && !z->alias) a.residual = op_in(r, OP_SAMPLE, 1, DIMS(M, z->N));
    a.y = op_out(r, "y", OP_SAMPLE | (z->alias ? OP_FILLED : 0), DIMS(M, z->N));
    if (z->alias) a.residual = a.y;
    if (z->pre) a.pre = op_out(r, "pre", OP_SAMPLE, DIMS(M, z->N));
    lg_linear_forward(r->stream, &a);
}

BUILD(linear_backward_data)
{
    int64_t M = z->B * z->T;
    struct lg_linear_backward_data_args a = {.accumulate = z->accumulate, .act = z->act};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(M, z->N));
    a.w = weights_of(r, z);
    if (z->act) a.pre = op_in(r, OP_SAMPLE, 1, DIMS(M, z->K));
    a.dx = op_out(r, "dx", OP_SAMPLE | (z->accumulate ? OP_FILLED : 0), DIMS(M, features_in(z)));
    if (z->bias) a.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(z->K));
    a.accumulate_dbias = z->dbias_filled;
    lg_linear_backward_data(r->stream, &a);
}

BUILD(linear_backward_weight)
{
    int64_t M = z->B * z->T;
    int filled = z->accumulate ? OP_FILLED : 0;
    struct lg_linear_backward_weight_args a = {.accumulate = z->accumulate};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(M, z->N));
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(M, features_in(z)));
    a.dw = op_out(r, "dw", filled, DIMS(z->N, z->K));
    if (z->bias) a.dbias = op_out(r, "dbias", filled, DIMS(z->N));
    lg_linear_backward_weight(r->stream, &a);
}

BUILD(act_forward)
{
    struct lg_act_forward_args a = {.act = z->act};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.x, &a.y, DIMS(z->B, z->D));
    lg_act_forward(r->stream, &a);
}

BUILD(act_backward)
{
    struct lg_act_backward_args a = {.act = z->act, .accumulate = z->accumulate};
    a.x = op_in(r, OP_SAMPLE, 2, DIMS(z->B, z->D));
    a.dx =
        op_out(r, "dx", OP_SAMPLE | (z->accumulate || z->alias ? OP_FILLED : 0), DIMS(z->B, z->D));
    a.dy = z->alias ? a.dx : op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->D));
    lg_act_backward(r->stream, &a);
}

BUILD(glu_forward)
{
    struct lg_glu_forward_args a = {.act = z->act};
    a.x = op_in(r, OP_SAMPLE, 2, DIMS(z->B * z->T, 2 * z->D));
    a.y = op_out(r, "y", OP_SAMPLE, DIMS(z->B * z->T, z->D));
    lg_glu_forward(r->stream, &a);
}

BUILD(glu_backward)
{
    struct lg_glu_backward_args a = {.act = z->act};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B * z->T, z->D));
    op_in_out(r, z->alias, "dx", OP_SAMPLE, &a.x, &a.dx, DIMS(z->B * z->T, 2 * z->D));
    lg_glu_backward(r->stream, &a);
}

BUILD(mul_forward)
{
    struct lg_mul_forward_args a = {.b = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->D))};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.a, &a.y, DIMS(z->B, z->D));
    lg_mul_forward(r->stream, &a);
}

BUILD(add_forward)
{
    struct lg_add_forward_args a = {0};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.a, &a.y, DIMS(z->B, z->T, z->D));
    a.b = z->Tk ? op_in(r, 0, 1, DIMS(z->D)) : op_in(r, 0, 1, DIMS(z->T, z->D));
    lg_add_forward(r->stream, &a);
}

BUILD(sum_rows)
{
    struct lg_sum_rows_args a = {.accumulate = z->accumulate};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->D));
    a.y = op_out(r, "y", z->accumulate ? OP_FILLED : 0, DIMS(z->D));
    lg_sum_rows(r->stream, &a);
}

BUILD(combine)
{
    struct lg_combine_args a = {.count = (int)z->count, .c = {0.75, -1.25, 3, 0.1}};
    for (int i = 0; i < a.count - 1; i++) a.x[i] = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->D));
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.x[a.count - 1], &a.y, DIMS(z->B, z->D));
    lg_combine(r->stream, &a);
}

BUILD(cast)
{
    static const double EDGES[] = {
        0,          -0.0,       1,        -1,     65504,  65519.96, 65520,         -1e6,
        3.4e38,     6e-8,       3e-8,     2.9e-8, 3.1e-8, 6.1e-5,   1.00048828125, 1.00146484375,
        1.00390625, 1.01171875, INFINITY, 1e-40,
    };
    int64_t n = z->D;
    double *v = calloc((size_t)n, sizeof *v);
    LG_ASSERT(v);
    lg_philox_normal_f64(v, (size_t)n, r->seed, LG_PURPOSE_TEST, 0, 0);
    for (size_t i = 0; i < LG_ARRAY_LEN(EDGES) && (int64_t)i < n; i++) v[i] = EDGES[i];
    struct lg_cast_args a = {.x = op_in_values(r, z->from, OP_STATS, v, DIMS(n))};
    a.y = op_out_typed(r, "y", z->to, OP_EXACT, DIMS(n));
    lg_cast(r->stream, &a);
    free(v);
}

/* Each code is there, but those of NaN. */
BUILD(dequantize_rows)
{
    double *scale = calloc((size_t)z->N, sizeof *scale);
    double *code = calloc((size_t)(z->N * z->K), sizeof *code);
    LG_ASSERT(scale && code);
    struct lg_dequantize_rows_args a = {.format = z->rows8};
    for (int64_t n = 0; n < z->N; n++) scale[n] = n == 1 ? 0 : ldexp(1.1 + 0.1 * (double)n, -9);
    for (int64_t i = 0; i < z->N * z->K; i++) code[i] = (double)(i % 128 == 127 ? 0 : i % 256);
    a.codes = op_in_values(r, LG_U8, 0, code, DIMS(z->N, z->K));
    a.scale = op_in_values(r, r->stats, OP_STATS, scale, DIMS(z->N));
    a.w = op_out(r, "w", 0, DIMS(z->N, z->K));
    lg_dequantize_rows(r->stream, &a);
    free(code);
    free(scale);
}

BUILD(copy_rows)
{
    const int64_t wide = z->N + 8; /* that the widest pack divides, where it divides a row */
    const int64_t rows = z->B * LG_MAX(z->count, 1); /* groups of B */
    struct op_pack from = op_pack(r, OP_SAMPLE, rows, 2 * wide);
    struct op_pack to = op_pack(r, OP_SAMPLE | OP_OUTPUT | OP_EXACT, rows, wide);
    const lg_tensor x = op_slice(r, from, NULL, wide, z->N, DIMS(rows, z->N));
    const lg_tensor y = op_slice(r, to, "y", 8, z->N, DIMS(rows, z->N));
    struct lg_copy_rows_args a = {.x = lg_slice(x, 0, 0, z->B),
                                  .y = lg_slice(y, 0, 0, z->B),
                                  .groups = z->count,
                                  .x_apart = z->B * 2 * wide,
                                  .y_apart = z->B * wide};
    lg_copy_rows(r->stream, &a);
}

/* packed: as many vectors again that are copied. Samples of x and y lie apart unless y is x. */
/* Cosines and sines (T, p) of random angles. */
static void angles_of(struct op_run *r, int64_t T, int64_t p, lg_tensor *ret_cos,
                      lg_tensor *ret_sin)
{
    double *angle = calloc((size_t)(2 * T * p), sizeof *angle);
    LG_ASSERT(angle);
    lg_philox_normal_f64(angle, (size_t)(T * p), r->seed, LG_PURPOSE_TEST, 1, 0);
    for (int64_t i = 0; i < T * p; i++) {
        angle[T * p + i] = sin(angle[i]);
        angle[i] = cos(angle[i]);
    }
    *ret_cos = op_in_values(r, r->stats, OP_STATS, angle, DIMS(T, p));
    *ret_sin = op_in_values(r, r->stats, OP_STATS, angle + T * p, DIMS(T, p));
    free(angle);
}

BUILD(rope)
{
    const int64_t p = z->d / 2, h = z->heads * (z->packed ? 2 : 1), all = h * z->d;
    struct lg_rope_args a = {.turned = (int)z->heads, .inverse = z->given};
    angles_of(r, z->T, p, &a.cos, &a.sin);
    const int64_t dim[] = {z->B, z->T, h, z->d};
    if (z->alias) {
        op_in_out(r, true, "y", OP_SAMPLE, &a.x, &a.y, 4, dim);
    } else {
        const int64_t tokens = z->B * z->T;
        a.x = op_slice(r, op_pack(r, OP_SAMPLE, tokens, all + 16), NULL, 8, all, 4, dim);
        a.y = op_slice(r, op_pack(r, OP_SAMPLE | OP_OUTPUT, tokens, all + 8), "y", 0, all, 4, dim);
    }
    lg_rope(r->stream, &a);
}

BUILD(norm_modulate_forward)
{
    struct lg_norm_modulate_forward_args a = {.eps = 1e-6, .rms = z->rms};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
    if (z->mod) {
        struct op_pack p = op_pack(r, OP_SAMPLE, z->B, 6 * z->D);
        a.shift = op_slice(r, p, NULL, 0, z->D, DIMS(z->B, z->D));
        a.scale = op_slice(r, p, NULL, z->D, z->D, DIMS(z->B, z->D));
    }
    a.y = op_out(r, "y", OP_SAMPLE, DIMS(z->B, z->T, z->D));
    a.mean = op_out_typed(r, "mean", r->stats, OP_SAMPLE, DIMS(z->B, z->T));
    a.rstd = op_out_typed(r, "rstd", r->stats, OP_SAMPLE, DIMS(z->B, z->T));
    lg_norm_modulate_forward(r->stream, &a);
}

typedef struct lg_norm_modulate_backward_args norm_back;
static norm_back make_norm_back(struct op_run *r, const struct shape *z)
{
    norm_back a = {.accumulate = z->accumulate, .rms = z->rms};
    const int64_t rows = z->B * z->T;
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
    double *stats = op_row_stats(op_values_of(r, a.x), rows, z->D, z->rms);
    a.mean = op_in_values(r, r->stats, OP_STATS, stats, DIMS(z->B, z->T));
    a.rstd = op_in_values(r, r->stats, OP_STATS, stats + rows, DIMS(z->B, z->T));
    free(stats);
    a.dx = op_out(r, "dx", OP_SAMPLE | (z->accumulate ? OP_FILLED : 0), DIMS(z->B, z->T, z->D));
    if (z->mod) {
        struct op_pack p = op_pack(r, OP_SAMPLE, z->B, 6 * z->D);
        a.scale = op_slice(r, p, NULL, 4 * z->D, z->D, DIMS(z->B, z->D));
    }
    if (z->mod && !z->frozen) {
        struct op_pack dp = op_pack(r, OP_SAMPLE | OP_OUTPUT, z->B, 6 * z->D);
        a.dshift = op_slice(r, dp, "dshift", 3 * z->D, z->D, DIMS(z->B, z->D));
        a.dscale = op_slice(r, dp, "dscale", 4 * z->D, z->D, DIMS(z->B, z->D));
    }
    return a;
}
BUILD(norm_modulate_backward)
{
    norm_back a = make_norm_back(r, z);
    if (z->dbias) a.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(z->D));
    a.accumulate_dbias = z->dbias_filled;
    lg_norm_modulate_backward(r->stream, &a);
}

BUILD(gate_residual_forward)
{
    struct lg_gate_residual_forward_args a = {0};
    op_in_out(r, z->alias, "out", OP_SAMPLE, &a.x, &a.out, DIMS(z->B, z->T, z->D));
    a.y = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
    if (z->mod)
        a.gate = op_slice(r, op_pack(r, OP_SAMPLE, z->B, 6 * z->D), NULL, 2 * z->D, z->D,
                          DIMS(z->B, z->D));
    lg_gate_residual_forward(r->stream, &a);
}

BUILD(gate_residual_backward)
{
    struct lg_gate_residual_backward_args a = {0};
    op_in_out(r, z->alias, "dy", OP_SAMPLE, &a.dout, &a.dy, DIMS(z->B, z->T, z->D));
    struct op_pack p = op_pack(r, OP_SAMPLE, z->B, 6 * z->D);
    a.gate = op_slice(r, p, NULL, 5 * z->D, z->D, DIMS(z->B, z->D));
    if (!z->frozen) {
        struct op_pack dp = op_pack(r, OP_SAMPLE | OP_OUTPUT, z->B, 6 * z->D);
        a.y = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
        a.dgate = op_slice(r, dp, "dgate", 5 * z->D, z->D, DIMS(z->B, z->D));
    }
    if (z->bias) a.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(z->D));
    a.accumulate_dbias = z->dbias_filled;
    lg_gate_residual_backward(r->stream, &a);
}

BUILD(residual_norm_forward)
{
    struct lg_residual_norm_forward_args a = {.norm = {.eps = 1e-6, .rms = z->rms}};
    lg_tensor *out = &a.residual.out;
    op_in_out(r, z->alias, "out", OP_SAMPLE, &a.residual.x, out, DIMS(z->B, z->T, z->D));
    a.residual.y = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
    if (z->mod) {
        struct op_pack p = op_pack(r, OP_SAMPLE, z->B, 6 * z->D);
        struct op_pack next = op_pack(r, OP_SAMPLE, z->B, 2 * z->D);
        a.residual.gate = op_slice(r, p, NULL, 2 * z->D, z->D, DIMS(z->B, z->D));
        a.norm.shift = op_slice(r, next, NULL, 0, z->D, DIMS(z->B, z->D));
        a.norm.scale = op_slice(r, next, NULL, z->D, z->D, DIMS(z->B, z->D));
    }
    a.norm.x = *out;
    a.norm.y = op_out(r, "y", OP_SAMPLE, DIMS(z->B, z->T, z->D));
    a.norm.mean = op_out_typed(r, "mean", r->stats, OP_SAMPLE, DIMS(z->B, z->T));
    a.norm.rstd = op_out_typed(r, "rstd", r->stats, OP_SAMPLE, DIMS(z->B, z->T));
    lg_residual_norm_forward(r->stream, &a);
}

BUILD(norm_residual_backward)
{
    struct lg_norm_residual_backward_args a = {.norm = make_norm_back(r, z),
                                               .residual = {.accumulate_dbias = z->dbias_filled}};
    struct op_pack p = op_pack(r, OP_SAMPLE, z->B, 2 * z->D);
    a.residual.dout = a.norm.dx;
    a.residual.gate = op_slice(r, p, NULL, z->D, z->D, DIMS(z->B, z->D));
    a.residual.dy = op_out(r, "dy", OP_SAMPLE, DIMS(z->B, z->T, z->D));
    if (!z->frozen) {
        struct op_pack dp = op_pack(r, OP_SAMPLE | OP_OUTPUT, z->B, 2 * z->D);
        a.residual.y = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D));
        a.residual.dgate = op_slice(r, dp, "dgate", z->D, z->D, DIMS(z->B, z->D));
    }
    if (z->bias) a.residual.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(z->D));
    lg_norm_residual_backward(r->stream, &a);
}

/* x, y and their like, of so many vectors a token: tokens `gap` elements apart. */
static lg_tensor vectors_of(struct op_run *r, const struct shape *z, int64_t vectors, int64_t gap,
                            int flags, const char *name)
{
    const int64_t row = vectors * z->D;
    struct op_pack p = op_pack(r, OP_SAMPLE | flags, z->B * z->T, row + gap);
    return op_slice(r, p, name, 0, row, DIMS(z->B, z->T, vectors, z->D));
}

BUILD(rms_norm_forward)
{
    const int64_t g = z->groups ? z->groups : 1, each = z->count ? z->count : 1;
    struct lg_rms_norm_forward_args a = {.each = (int)each, .eps = 1e-6};
    if (!z->alias) a.x = vectors_of(r, z, g * each, 8, 0, NULL);
    a.w = op_in(r, 0, 1, DIMS(g, z->D));
    if (z->given) angles_of(r, z->T, z->D / 2, &a.cos, &a.sin);
    if (z->alias)
        op_in_out(r, true, "y", OP_SAMPLE, &a.x, &a.y, DIMS(z->B, z->T, g * each, z->D));
    else
        a.y = vectors_of(r, z, g * each, 16, OP_OUTPUT, "y");
    if (z->lse) a.rstd = op_out_typed(r, "rstd", r->stats, OP_SAMPLE, DIMS(z->B, z->T, g * each));
    lg_rms_norm_forward(r->stream, &a);
}

/* rstd of x's vectors, in memory of the caller's. */
static double *rms_stats(const struct op_run *r, lg_tensor x)
{
    const int64_t n = x.dim[2], D = x.dim[3], vectors = x.dim[0] * x.dim[1] * n;
    double *rstd = calloc((size_t)vectors, sizeof *rstd);
    LG_ASSERT(rstd);
    for (int64_t k = 0; k < vectors; k++) {
        const double *v = op_values_of(r, x) + k / n * lg_row_stride(&x, 2) + k % n * D;
        double squares = 0;
        for (int64_t i = 0; i < D; i++) squares += v[i] * v[i];
        rstd[k] = 1 / sqrt(squares / (double)D + 1e-6);
    }
    return rstd;
}

BUILD(rms_norm_backward)
{
    const int64_t g = z->groups ? z->groups : 1, each = z->count ? z->count : 1;
    const int filled = z->accumulate ? OP_FILLED : 0;
    struct lg_rms_norm_backward_args a = {
        .each = (int)each, .accumulate = z->accumulate, .accumulate_dw = z->dbias_filled};
    a.accumulate_dbias = z->dbias_filled;
    const int64_t h = g * each;
    a.x = vectors_of(r, z, h, z->alias ? 0 : 24, 0, NULL);
    if (!z->alias) a.dy = vectors_of(r, z, h, 8, 0, NULL);
    a.w = op_in(r, 0, 1, DIMS(g, z->D));
    if (z->given) angles_of(r, z->T, z->D / 2, &a.cos, &a.sin);
    double *rstd = rms_stats(r, a.x);
    a.rstd = op_in_values(r, r->stats, OP_STATS, rstd, DIMS(z->B, z->T, g * each));
    free(rstd);
    /* What is added to lies side by side: packs are outputs of NaN. */
    if (z->alias)
        op_in_out(r, true, "dx", OP_SAMPLE, &a.dy, &a.dx, DIMS(z->B, z->T, h, z->D));
    else
        a.dx = filled ? op_out(r, "dx", OP_SAMPLE | filled, DIMS(z->B, z->T, h, z->D))
                      : vectors_of(r, z, h, 16, OP_OUTPUT, "dx");
    if (z->bias) a.dw = op_out(r, "dw", z->dbias_filled ? OP_FILLED : 0, DIMS(g, z->D));
    if (z->dbias) a.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(h * z->D));
    if (z->C) {
        a.rest = op_slice(r, op_pack(r, OP_SAMPLE, z->B * z->T, z->C + 16), NULL, 8, z->C,
                          DIMS(z->B, z->T, z->C));
        a.dbias_of_rest = op_out(r, "of_rest", z->dbias_filled ? OP_FILLED : 0, DIMS(z->C));
    }
    lg_rms_norm_backward(r->stream, &a);
}

BUILD(layer_norm_forward)
{
    int64_t M = z->B * z->T;
    struct lg_layer_norm_forward_args a = {.eps = 1e-5};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(M, z->D));
    a.w = op_in(r, 0, 1, DIMS(z->D));
    a.b = op_in(r, 0, 1, DIMS(z->D));
    a.y = op_out(r, "y", OP_SAMPLE, DIMS(M, z->D));
    if (z->lse) {
        a.mean = op_out_typed(r, "mean", r->stats, OP_SAMPLE, DIMS(M));
        a.rstd = op_out_typed(r, "rstd", r->stats, OP_SAMPLE, DIMS(M));
    }
    lg_layer_norm_forward(r->stream, &a);
}

BUILD(layer_norm_backward)
{
    const int64_t M = z->B * z->T;
    const int filled = z->dbias_filled ? OP_FILLED : 0;
    struct lg_layer_norm_backward_args a = {.accumulate = z->accumulate,
                                            .accumulate_dw = z->dbias_filled};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(M, z->D));
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(M, z->D));
    a.w = op_in(r, 0, 1, DIMS(z->D));
    double *stats = op_row_stats(op_values_of(r, a.x), M, z->D, false);
    a.mean = op_in_values(r, r->stats, OP_STATS, stats, DIMS(M));
    a.rstd = op_in_values(r, r->stats, OP_STATS, stats + M, DIMS(M));
    free(stats);
    a.dx = op_out(r, "dx", OP_SAMPLE | (z->accumulate ? OP_FILLED : 0), DIMS(M, z->D));
    if (z->bias) {
        a.dw = op_out(r, "dw", filled, DIMS(z->D));
        a.db = op_out(r, "db", filled, DIMS(z->D));
    }
    lg_layer_norm_backward(r->stream, &a);
}

BUILD(group_mean_var_forward)
{
    struct lg_group_mean_var_forward_args a = {
        .x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.mean_var = op_out_typed(r, "mean_var", LG_F64, OP_SAMPLE, DIMS(z->B, z->groups, 2));
    lg_group_mean_var_forward(r->stream, &a);
}

BUILD(group_norm_forward)
{
    struct lg_group_norm_forward_args a = {.groups = (int)z->groups, .eps = 1e-6, .act = z->act};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.x, &a.y, DIMS(z->B, z->H, z->W, z->C));
    a.w = op_in(r, 0, 1, DIMS(z->C));
    a.b = op_in(r, 0, 1, DIMS(z->C));
    if (z->given) a.mean_var = op_in_integers(r, LG_F64, OP_SAMPLE, 1, 4, DIMS(z->B, z->groups, 2));
    lg_group_norm_forward(r->stream, &a);
}

/* What a backward finds of x, in memory of the caller's. */
static double *group_stats(const struct op_run *r, lg_tensor x, int64_t groups)
{
    const int64_t HW = x.dim[1] * x.dim[2], C = x.dim[3], wide = C / groups;
    double *stats = calloc((size_t)(x.dim[0] * groups * 2), sizeof *stats), *at = stats;
    LG_ASSERT(stats);
    for (int64_t ng = 0; ng < x.dim[0] * groups; ng++, at += 2) {
        const double *v = op_values_of(r, x) + ng / groups * HW * C + ng % groups * wide;
        const double count = (double)(HW * wide);
        for (int64_t i = 0; i < HW * wide; i++) at[0] += v[i / wide * C + i % wide] / count;
        for (int64_t i = 0; i < HW * wide; i++)
            at[1] += pow(v[i / wide * C + i % wide] - at[0], 2) / count;
    }
    return stats;
}

BUILD(group_norm_backward)
{
    const int filled = z->dbias_filled ? OP_FILLED : 0;
    struct lg_group_norm_backward_args a = {.groups = (int)z->groups,
                                            .eps = 1e-5,
                                            .act = z->act,
                                            .accumulate = z->accumulate,
                                            .accumulate_dw = z->dbias_filled};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    double *stats = group_stats(r, a.x, z->groups);
    a.mean_var = op_in_values(r, LG_F64, OP_STATS, stats, DIMS(z->B, z->groups, 2));
    free(stats);
    a.w = op_in(r, 0, 1, DIMS(z->C));
    a.b = op_in(r, 0, 1, DIMS(z->C));
    a.dx = op_out(r, "dx", OP_SAMPLE | (z->accumulate || z->alias ? OP_FILLED : 0),
                  DIMS(z->B, z->H, z->W, z->C));
    a.dy = z->alias ? a.dx : op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    if (z->bias) {
        a.dw = op_out(r, "dw", filled, DIMS(z->C));
        a.db = op_out(r, "db", filled, DIMS(z->C));
    }
    lg_group_norm_backward(r->stream, &a);
}

/* The shift is a part of wider rows. */
BUILD(shift_forward)
{
    struct op_pack pack = op_pack(r, OP_SAMPLE, z->B, 2 * z->D);
    struct lg_shift_forward_args a = {.shift =
                                          op_slice(r, pack, NULL, z->D, z->D, DIMS(z->B, z->D))};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.x, &a.y, DIMS(z->B, z->T, z->D));
    lg_shift_forward(r->stream, &a);
}

BUILD(shift_backward)
{
    struct op_pack pack = op_pack(r, OP_SAMPLE | OP_OUTPUT, z->B, 2 * z->D);
    struct lg_shift_backward_args a = {
        .dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->D)),
        .dshift = op_slice(r, pack, "dshift", z->D, z->D, DIMS(z->B, z->D))};
    lg_shift_backward(r->stream, &a);
}

/* What is made from now on has tokens of queries, or of keys. */
static void of_queries(struct op_run *r, const struct shape *z)
{
    r->streams = (struct op_streams){z->T, z->first_queries};
}
static void of_keys(struct op_run *r, const struct shape *z)
{
    r->streams = (struct op_streams){z->Tk ? z->Tk : z->T, z->first_keys};
}
static void of_neither(struct op_run *r)
{
    r->streams = (struct op_streams){0};
}

/* q, k, v as slices: of one buffer (packed, Tq = Tk), or q alone and k, v of another one; own_values: v of one whose rows are
 * longer. */
struct qkv {
    lg_tensor q, k, v;
};

static struct qkv make_qkv(struct op_run *r, const struct shape *z, int flags,
                           const char *const name[3])
{
    int64_t w = z->heads * z->d, Tk = z->Tk ? z->Tk : z->T;
    struct qkv x;
    int64_t q_dim[] = {z->B, z->T, z->heads, z->d}, k_dim[] = {z->B, Tk, z->heads, z->d};
    of_queries(r, z);
    struct op_pack q = op_pack(r, flags, z->B * z->T, z->packed ? 3 * w : w);
    of_keys(r, z);
    struct op_pack kv = z->packed ? q : op_pack(r, flags, z->B * Tk, 2 * w);
    struct op_pack v = z->own_values ? op_pack(r, flags, z->B * Tk, 4 * w) : kv;
    x.q = op_slice(r, q, name[0], 0, w, 4, q_dim);
    x.k = op_slice(r, kv, name[1], z->packed ? w : 0, w, 4, k_dim);
    x.v = op_slice(r, v, name[2], z->packed || z->own_values ? 2 * w : w, w, 4, k_dim);
    of_neither(r);
    return x;
}

BUILD(attention_forward)
{
    static const char *const NO_NAMES[3] = {0};
    int64_t Tk = z->Tk ? z->Tk : z->T;
    struct qkv x = make_qkv(r, z, OP_SAMPLE, NO_NAMES);
    struct lg_attention_forward_args a = {
        .q = x.q, .k = x.k, .v = x.v, .scale = 1 / sqrt((double)z->d), .causal = z->causal};
    a.first_queries = (int)z->first_queries, a.first_keys = (int)z->first_keys;
    if (z->mask) a.k_length = op_in_integers(r, LG_I32, OP_SAMPLE, 1, Tk, DIMS(z->B));
    if (z->bias) a.bias = op_in(r, 0, 1, DIMS(z->heads, z->T, Tk));
    of_queries(r, z);
    a.o = op_out(r, "o", OP_SAMPLE, DIMS(z->B, z->T, z->heads, z->d));
    of_neither(r);
    if (z->lse) a.lse = op_out_typed(r, "lse", r->stats, OP_SAMPLE, DIMS(z->B, z->heads, z->T));
    lg_attention_forward(r->stream, &a);
}

BUILD(attention_backward)
{
    static const char *const NO_NAMES[3] = {0}, *const NAMES[3] = {"dq", "dk", "dv"};
    int64_t H = z->heads, d = z->d, T = z->T, Tk = z->Tk ? z->Tk : T;
    struct qkv x = make_qkv(r, z, OP_SAMPLE, NO_NAMES);
    struct lg_attention_backward_args a = {
        .q = x.q, .k = x.k, .v = x.v, .scale = 1 / sqrt((double)d)};
    a.first_queries = (int)z->first_queries, a.first_keys = (int)z->first_keys;
    if (z->mask) a.k_length = op_in_integers(r, LG_I32, OP_SAMPLE, 1, Tk, DIMS(z->B));
    double *o = calloc((size_t)(z->B * T * H * d), sizeof *o);
    double *lse = calloc((size_t)(z->B * H * T), sizeof *lse);
    LG_ASSERT(o && lse);
    op_softmax_rows(r, &a, o, lse);
    a.lse = op_in_values(r, r->stats, OP_STATS, lse, DIMS(z->B, H, T));
    free(lse);
    of_queries(r, z);
    a.o = op_in_values(r, r->F, 0, o, DIMS(z->B, T, H, d));
    a.dout = op_in(r, OP_SAMPLE, 1, DIMS(z->B, T, H, d));
    struct qkv g = make_qkv(r, z, OP_SAMPLE | OP_OUTPUT, NAMES);
    a.dq = g.q, a.dk = g.k, a.dv = g.v;
    if (z->bias) a.dbias = op_out(r, "dbias", z->dbias_filled ? OP_FILLED : 0, DIMS(3 * H * d));
    a.accumulate_dbias = z->dbias_filled;
    if (lg_dtype_bytes(r->F) == 2) {
        const double *rounded = op_values_of(r, a.o);
        for (int64_t i = 0; i < lg_numel(&a.o); i++) o[i] -= rounded[i];
        of_queries(r, z);
        a.o_low = op_in_values(r, r->F, 0, o, DIMS(z->B, T, H, d));
        of_neither(r);
    }
    free(o);
    lg_attention_backward(r->stream, &a);
}

BUILD(conv2d_forward)
{
    if (r->lead) r->lead = 16; /* the least it asks for */
    const int64_t *p = z->pad; /* top, left, bottom, right */
    int64_t Ho = (z->H + p[0] + p[2] - z->kernel) / z->stride + 1;
    int64_t Wo = (z->W + p[1] + p[3] - z->kernel) / z->stride + 1;
    struct lg_conv2d_forward_args a = {.stride = (int)z->stride};
    a.top = (int)p[0], a.left = (int)p[1], a.bottom = (int)p[2], a.right = (int)p[3];
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    a.w = op_in(r, 0, 1, DIMS(z->Co, z->kernel, z->kernel, z->C));
    a.bias = op_in(r, 0, 1, DIMS(z->Co));
    if (z->alias)
        op_in_out(r, true, "y", OP_SAMPLE, &a.residual, &a.y, DIMS(z->B, Ho, Wo, z->Co));
    else
        a.y = op_out(r, "y", OP_SAMPLE, DIMS(z->B, Ho, Wo, z->Co));
    if (z->residual) a.residual = op_in(r, OP_SAMPLE, 1, DIMS(z->B, Ho, Wo, z->Co));
    if (z->groups)
        a.mean_var = op_out_typed(r, "mean_var", LG_F64, OP_SAMPLE, DIMS(z->B, z->groups, 2));
    lg_conv2d_forward(r->stream, &a);
}

BUILD(conv2d_backward_data)
{
    if (r->lead) r->lead = 16;
    const int64_t *p = z->pad;
    int64_t Ho = (z->H + p[0] + p[2] - z->kernel) / z->stride + 1;
    int64_t Wo = (z->W + p[1] + p[3] - z->kernel) / z->stride + 1;
    struct lg_conv2d_backward_data_args a = {.stride = (int)z->stride, .accumulate = z->accumulate};
    a.top = (int)p[0], a.left = (int)p[1], a.bottom = (int)p[2], a.right = (int)p[3];
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, Ho, Wo, z->Co));
    a.w = op_in(r, 0, 1, DIMS(z->Co, z->kernel, z->kernel, z->C));
    a.dx =
        op_out(r, "dx", OP_SAMPLE | (z->accumulate ? OP_FILLED : 0), DIMS(z->B, z->H, z->W, z->C));
    lg_conv2d_backward_data(r->stream, &a);
}

BUILD(conv2d_backward_weight)
{
    if (r->lead) r->lead = 16;
    const int64_t *p = z->pad;
    const int filled = z->accumulate ? OP_FILLED : 0;
    int64_t Ho = (z->H + p[0] + p[2] - z->kernel) / z->stride + 1;
    int64_t Wo = (z->W + p[1] + p[3] - z->kernel) / z->stride + 1;
    struct lg_conv2d_backward_weight_args a = {.stride = (int)z->stride,
                                               .accumulate = z->accumulate};
    a.top = (int)p[0], a.left = (int)p[1], a.bottom = (int)p[2], a.right = (int)p[3];
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, Ho, Wo, z->Co));
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    a.dw = op_out(r, "dw", filled, DIMS(z->Co, z->kernel, z->kernel, z->C));
    if (z->bias) a.dbias = op_out(r, "dbias", filled, DIMS(z->Co));
    lg_conv2d_backward_weight(r->stream, &a);
}

/* The norm's result lies in its input's place, or in memory that nobody looks at. */
BUILD(norm_conv2d_forward)
{
    if (r->lead) r->lead = 16; /* the least it asks for */
    struct lg_norm_conv2d_forward_args a = {
        .norm = {.groups = (int)z->groups, .eps = 1e-6, .act = z->act},
        .conv = {.stride = (int)z->stride}};
    struct lg_group_norm_forward_args *n = &a.norm;
    struct lg_conv2d_forward_args *c = &a.conv;
    c->top = (int)z->pad[0], c->left = (int)z->pad[1];
    c->bottom = (int)z->pad[2], c->right = (int)z->pad[3];
    int64_t Ho = (z->H + c->top + c->bottom - z->kernel) / z->stride + 1;
    int64_t Wo = (z->W + c->left + c->right - z->kernel) / z->stride + 1;
    n->x = op_in(r, OP_SAMPLE, 2, DIMS(z->B, z->H, z->W, z->C));
    n->w = op_in(r, 0, 1, DIMS(z->C));
    n->b = op_in(r, 0, 1, DIMS(z->C));
    n->y = z->alias ? n->x : op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    c->x = n->y;
    c->w = op_in(r, 0, 1, DIMS(z->Co, z->kernel, z->kernel, z->C));
    c->bias = op_in(r, 0, 1, DIMS(z->Co));
    if (z->residual) c->residual = op_in(r, OP_SAMPLE, 1, DIMS(z->B, Ho, Wo, z->Co));
    c->y = op_out(r, "y", OP_SAMPLE, DIMS(z->B, Ho, Wo, z->Co));
    if (z->given)
        n->mean_var = op_in_integers(r, LG_F64, OP_SAMPLE, 1, 4, DIMS(z->B, z->groups, 2));
    if (z->mod)
        c->mean_var = op_out_typed(r, "mean_var", LG_F64, OP_SAMPLE, DIMS(z->B, z->groups, 2));
    lg_norm_conv2d_forward(r->stream, &a);
}

/* pad: how many rows and columns of y are left out. */
BUILD(upsample2x_forward)
{
    struct lg_upsample2x_forward_args a = {
        .x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT,
                 DIMS(z->B, 2 * z->H - z->pad[0], 2 * z->W - z->pad[1], z->C));
    lg_upsample2x_forward(r->stream, &a);
}

BUILD(upsample2x_backward)
{
    struct lg_upsample2x_backward_args a = {.accumulate = z->accumulate};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, 2 * z->H - z->pad[0], 2 * z->W - z->pad[1], z->C));
    a.dx =
        op_out(r, "dx", OP_SAMPLE | (z->accumulate ? OP_FILLED : 0), DIMS(z->B, z->H, z->W, z->C));
    lg_upsample2x_backward(r->stream, &a);
}

/* T: frames of x; Tk: of the filter; count: its stride in time; mod: normed is wanted, and given: y is not. */
BUILD(conv3d_forward)
{
    if (r->lead) r->lead = 16;
    struct lg_conv3d_forward_args a = {
        .stride_time = (int)z->count, .stride = (int)z->stride, .pad = (int)z->pad[0]};
    const int64_t E = (z->T - z->Tk) / z->count + 1;
    const int64_t Ho = (z->H + 2 * z->pad[0] - z->kernel) / z->stride + 1;
    const int64_t Wo = (z->W + 2 * z->pad[0] - z->kernel) / z->stride + 1;
    a.x = op_in(r, 0, 1, DIMS(z->T, z->H, z->W, z->C));
    a.w = op_in(r, 0, 1, DIMS(z->Co, z->Tk, z->kernel, z->kernel, z->C));
    a.bias = op_in(r, 0, 1, DIMS(z->Co));
    if (z->residual && !z->alias) a.residual = op_in(r, 0, 1, DIMS(E, Ho, Wo, z->Co));
    if (!z->given) a.y = op_out(r, "y", z->alias ? OP_FILLED : 0, DIMS(E, Ho, Wo, z->Co));
    if (z->alias) a.residual = a.y;
    if (z->mod) {
        a.normed = op_out(r, "normed", 0, DIMS(E, Ho, Wo, z->Co));
        a.eps = 1e-6;
        a.act = z->act;
    }
    lg_conv3d_forward(r->stream, &a);
}

BUILD(rms_act_forward)
{
    struct lg_rms_act_forward_args a = {.eps = z->scale, .act = z->act};
    op_in_out(r, z->alias, "y", OP_SAMPLE, &a.x, &a.y, DIMS(z->B, z->D));
    if (z->mod) a.scale = op_in(r, 0, 1, DIMS(z->D)), a.shift = op_in(r, 0, 1, DIMS(z->D));
    lg_rms_act_forward(r->stream, &a);
}

/* B x H x W boxes of Tk x kernel x kernel; groups: channels of which one is the mean. */
BUILD(space_to_depth_forward)
{
    const int64_t t = z->Tk, u = z->kernel, g = z->groups;
    struct lg_space_to_depth_forward_args a = {.time = (int)t, .space = (int)u};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B * t, z->H * u, z->W * u, z->C));
    if (g) a.mean_of = op_in(r, OP_SAMPLE, 1, DIMS(z->B * t, z->H * u, z->W * u, z->C * g));
    a.y = op_out(r, "y", g ? 0 : OP_EXACT, DIMS(z->B, z->H, z->W, z->C * t * u * u));
    lg_space_to_depth_forward(r->stream, &a);
}

/* pad: how many frames are left out. */
BUILD(depth_to_space_forward)
{
    const int64_t t = z->Tk, u = z->kernel, all = t * u * u, R = z->groups;
    struct lg_depth_to_space_forward_args a = {.time = (int)t, .space = (int)u};
    a.x = op_in(r, 0, 1, DIMS(z->B, z->H, z->W, z->C * all));
    if (R) a.repeated = op_in(r, 0, 1, DIMS(z->B, z->H, z->W, R * all));
    a.y = op_out(r, "y", R ? 0 : OP_EXACT, DIMS(z->B * t - z->pad[0], z->H * u, z->W * u, z->C));
    lg_depth_to_space_forward(r->stream, &a);
}

/* Frames [1, 1 + T) of a clip of T + 3. */
static lg_tensor frames_of(lg_tensor clip, int64_t T)
{
    return lg_slice(clip, 1, 1, T);
}

BUILD(clip_to_patches_forward)
{
    const int64_t p = z->kernel, T = z->T, C = z->C;
    struct lg_clip_to_patches_forward_args a = {.patch = (int)p};
    a.x = z->given ? op_in_integers(r, LG_U8, 0, 0, 255, DIMS(C, T + 3, z->H * p, z->W * p))
                   : op_in(r, 0, 1, DIMS(C, T + 3, z->H * p, z->W * p));
    a.x = frames_of(a.x, T);
    if (z->mod) a.scale = op_in(r, 0, 1, DIMS(C)), a.shift = op_in(r, 0, 1, DIMS(C));
    a.y = op_out(r, "y", z->mod || z->given ? 0 : OP_EXACT, DIMS(T, z->H, z->W, C * p * p));
    lg_clip_to_patches_forward(r->stream, &a);
}

/* An output (rows, row) whose rows have a gap behind them, as (rows, D, H, W). */
static lg_tensor clip_out(struct op_run *r, const char *name, const struct shape *z, int64_t p)
{
    const int64_t row = z->T * z->H * p * z->W * p;
    const struct op_pack wide = op_pack(r, OP_OUTPUT, z->C, row + 40);
    return op_slice(r, wide, name, 0, row, DIMS(z->C, z->T, z->H * p, z->W * p));
}

BUILD(patches_to_clip_forward)
{
    const int64_t p = z->kernel;
    struct lg_patches_to_clip_forward_args a = {.patch = (int)p};
    a.x = op_in(r, 0, 1, DIMS(z->T, z->H, z->W, z->C * p * p));
    a.y = z->given ? op_out_typed(r, "y", LG_U8, OP_EXACT, DIMS(z->C, z->T, z->H * p, z->W * p))
                   : clip_out(r, "y", z, p);
    lg_patches_to_clip_forward(r->stream, &a);
}

/* given: one logarithm for all channels. */
BUILD(clip_posterior_forward)
{
    struct lg_clip_posterior_forward_args a = {0};
    a.x = op_in(r, 0, 20, DIMS(z->T, z->H, z->W, z->given ? z->C + 1 : 2 * z->C));
    if (z->mod)
        a.center = op_in(r, 0, 1, DIMS(z->C)),
        a.spread = op_in_integers(r, r->F, 0, 1, 5, DIMS(z->C));
    a.mean = clip_out(r, "mean", z, 1);
    a.logvar = clip_out(r, "logvar", z, 1);
    lg_clip_posterior_forward(r->stream, &a);
}

/* H x W of T x Tk, from (1, 2) on. */
BUILD(tile_take)
{
    struct lg_tile_take_args a = {.top = 1, .left = 2};
    a.x = z->given ? op_in_integers(r, LG_U8, OP_SAMPLE, 0, 255, DIMS(z->B, z->T, z->Tk))
                   : op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->T, z->Tk));
    a.y = op_out(r, "y", OP_SAMPLE | (z->given ? 0 : OP_EXACT), DIMS(z->B, z->H, z->W));
    lg_tile_take(r->stream, &a);
}

BUILD(tile_add)
{
    struct lg_tile_add_args a = {.top = 1, .left = 2};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W));
    a.rows = op_in(r, OP_STATS, 1, DIMS(z->H));
    a.columns = op_in(r, OP_STATS, 1, DIMS(z->W));
    a.y = op_out(r, "y", OP_SAMPLE | OP_FILLED, DIMS(z->B, z->T, z->Tk));
    lg_tile_add(r->stream, &a);
}

BUILD(embedding_forward)
{
    int64_t M = z->B * z->T;
    struct lg_embedding_forward_args a = {0};
    a.ids = op_in_integers(r, LG_I32, OP_SAMPLE, 0, z->V - 1, DIMS(M));
    a.table = op_in(r, 0, 1, DIMS(z->V, z->D));
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT, DIMS(M, z->D));
    lg_embedding_forward(r->stream, &a);
}

BUILD(embedding_backward)
{
    int64_t M = z->B * z->T;
    struct lg_embedding_backward_args a = {.accumulate = z->accumulate};
    a.ids = op_in_integers(r, LG_I32, OP_SAMPLE, 0, z->V - 1, DIMS(M));
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(M, z->D));
    a.dtable = op_out(r, "dtable", z->accumulate ? OP_FILLED : 0, DIMS(z->V, z->D));
    lg_embedding_backward(r->stream, &a);
}

BUILD(t5_bias_forward)
{
    struct lg_t5_bias_forward_args a = {.max_distance = (int)z->K};
    a.table = op_in(r, 0, 1, DIMS(z->V, z->heads));
    a.out = op_out(r, "out", OP_EXACT, DIMS(z->heads, z->T, z->T));
    lg_t5_bias_forward(r->stream, &a);
}

BUILD(timestep_embedding_forward)
{
    struct lg_timestep_embedding_forward_args a = {.freq_shift = z->scale};
    a.t = op_in_integers(r, r->stats, OP_SAMPLE, 0, 1000, DIMS(z->B));
    a.out = op_out(r, "out", OP_SAMPLE, DIMS(z->B, z->D));
    lg_timestep_embedding_forward(r->stream, &a);
}

BUILD(patchify_forward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_patchify_forward_args a = {.patch = (int)p};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT, DIMS(z->B, T, z->C * p * p));
    lg_patchify_forward(r->stream, &a);
}

BUILD(unpatchify_forward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_unpatchify_forward_args a = {.patch = (int)p, .channels_first = z->given};
    a.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, T, p * p * z->C));
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_unpatchify_forward(r->stream, &a);
}

BUILD(unpatchify_backward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_unpatchify_backward_args a = {.patch = (int)p, .channels_first = z->given};
    a.dy = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.dx = op_out(r, "dx", OP_SAMPLE | OP_EXACT, DIMS(z->B, T, p * p * z->C));
    lg_unpatchify_backward(r->stream, &a);
}

BUILD(pixels_to_nhwc)
{
    struct lg_pixels_to_nhwc_args a = {0};
    a.x = op_in_integers(r, LG_U8, OP_SAMPLE, 0, 255, DIMS(z->B, z->C, z->H, z->W));
    a.y = op_out(r, "y", OP_SAMPLE, DIMS(z->B, z->H, z->W, z->C));
    lg_pixels_to_nhwc(r->stream, &a);
}

BUILD(nhwc_to_pixels)
{
    struct lg_nhwc_to_pixels_args a = {.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = op_out_typed(r, "y", LG_U8, OP_SAMPLE | OP_EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_nhwc_to_pixels(r->stream, &a);
}

BUILD(nchw_to_nhwc)
{
    struct lg_nchw_to_nhwc_args a = {.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W))};
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT, DIMS(z->B, z->H, z->W, z->C));
    lg_nchw_to_nhwc(r->stream, &a);
}

BUILD(nhwc_to_nchw)
{
    struct lg_nhwc_to_nchw_args a = {.x = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = op_out(r, "y", OP_SAMPLE | OP_EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_nhwc_to_nchw(r->stream, &a);
}

BUILD(posterior_split)
{
    struct lg_posterior_split_args a = {0};
    a.x = op_in(r, OP_SAMPLE, 20, DIMS(z->B, z->H, z->W, 2 * z->C)); /* also beyond the clamp */
    a.mean = op_out(r, "mean", OP_SAMPLE | OP_EXACT, DIMS(z->B, z->C, z->H, z->W));
    a.logvar = op_out(r, "logvar", OP_SAMPLE | OP_EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_posterior_split(r->stream, &a);
}

BUILD(diffuse_forward)
{
    struct lg_diffuse_forward_args a = {
        .seed = 0x123456789abcdefULL, .scaling_factor = 0.75124, .shift_factor = z->scale};
    a.mean = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.logvar = op_in(r, OP_SAMPLE, 12, DIMS(z->B, z->C, z->H, z->W)); /* also beyond the clamp */
    a.n = op_in_integers(r, LG_I64, OP_SAMPLE, 0, 1000000, DIMS(z->B));
    a.coef = op_in(r, OP_SAMPLE | OP_STATS, 1, DIMS(z->B, 4));
    a.x_t = op_out(r, "x_t", OP_SAMPLE, DIMS(z->B, z->C, z->H, z->W));
    a.target = op_out(r, "target", OP_SAMPLE, DIMS(z->B, z->C, z->H, z->W));
    lg_diffuse_forward(r->stream, &a);
}

BUILD(mse_loss)
{
    struct lg_mse_loss_args a = {0};
    lg_tensor dpred;
    op_in_out(r, z->alias, "dpred", OP_SAMPLE, &a.pred, &dpred, DIMS(z->B, z->C, z->H, z->W));
    if (z->dpred)
        a.dpred = dpred;
    else
        r->n_outs--, r->buffer[0].output = false;
    a.target = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.weight = op_in_integers(r, r->stats, OP_SAMPLE, 0, 2, DIMS(z->B)); /* 0: a void sample */
    a.loss = op_out(r, "loss", OP_SAMPLE | OP_STATS, DIMS(z->B));
    lg_mse_loss(r->stream, &a);
}

/* Normals as terms: the samples whose last one is above 0 are at the first timestep. */
BUILD(learned_range_loss)
{
    struct lg_learned_range_loss_args a = {0};
    lg_tensor dpred;
    op_in_out(r, z->alias, "dpred", OP_SAMPLE, &a.pred, &dpred, DIMS(z->B, 2 * z->C, z->H, z->W));
    if (z->dpred)
        a.dpred = dpred;
    else
        r->n_outs--, r->buffer[0].output = false;
    a.target = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.x_t = op_in(r, OP_SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.terms = op_in(r, OP_SAMPLE | OP_STATS, 1, DIMS(z->B, 6));
    a.weight = op_in_integers(r, r->stats, OP_SAMPLE, 0, 2, DIMS(z->B, 2)); /* 0: a void sample */
    a.loss = op_out(r, "loss", OP_SAMPLE | OP_STATS, DIMS(z->B, 2));
    lg_learned_range_loss(r->stream, &a);
}

BUILD(reduce_ranks)
{
    struct lg_reduce_ranks_args a = {.count = (int)z->count};
    op_in_out(r, z->alias, "y", 0, &a.x[0], &a.y, DIMS(z->D));
    for (int i = 1; i < a.count; i++) a.x[i] = op_in(r, 0, 1, DIMS(z->D));
    a.squares = op_out_typed(r, "squares", LG_F64, 0,
                             DIMS((z->D + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE));
    lg_reduce_ranks(r->stream, &a);
}

BUILD(adamw)
{
    struct lg_adamw_args a = {.lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .weight_decay = 0.1,
                              .grad_scale = 0.37,
                              .t = z->count};
    double *squares = calloc((size_t)z->D, sizeof *squares);
    LG_ASSERT(squares);
    op_in_out(r, z->alias, "w_out", OP_STATS, &a.w, &a.w_out, DIMS(z->D));
    op_in_out(r, z->alias, "m_out", OP_STATS, &a.m, &a.m_out, DIMS(z->D));
    a.grad = op_in(r, OP_STATS, 1, DIMS(z->D));
    for (int64_t i = 0; i < z->D; i++) squares[i] = pow(op_values_of(r, a.grad)[z->D - 1 - i], 2);
    a.v = op_in_values(r, r->stats, OP_STATS, squares, DIMS(z->D));
    free(squares);
    a.v_out = op_out(r, "v_out", OP_STATS, DIMS(z->D));
    a.copies = (int)z->N;
    for (int i = 0; i < a.copies; i++)
        a.working[i] = op_out(r, "working", i ? OP_TWIN : 0, DIMS(z->D));
    lg_adamw(r->stream, &a);
    if (!a.copies) return;
    struct lg_cast_args cast = {.x = a.w_out, .y = op_out(r, "cast w_out", OP_TWIN, DIMS(z->D))};
    lg_cast(r->stream, &cast);
}

BUILD(adamw8)
{
    const int64_t n = z->D, blocks = (n + 255) / 256;
    struct lg_adamw8_args a = {.lr = 1e-2,
                               .beta1 = 0.9,
                               .beta2 = 0.99,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .grad_scale = 0.37,
                               .t = z->count};
    double *absmax = calloc((size_t)blocks, sizeof *absmax);
    LG_ASSERT(absmax);
    op_in_out(r, z->alias, "w_out", OP_STATS, &a.w, &a.w_out, DIMS(n));
    a.m = op_in_integers(r, LG_U8, 0, 0, 255, DIMS(n));
    a.v = op_in_integers(r, LG_U8, 0, 0, 255, DIMS(n));
    a.grad = op_in(r, OP_STATS, 1, DIMS(n));
    for (int64_t i = 0; i < blocks; i++) absmax[i] = i % 5 == 3 ? 0 : 0.5 + 0.25 * (double)i;
    a.m_max = op_in_values(r, r->stats, OP_STATS, absmax, DIMS(blocks));
    a.v_max = op_in_values(r, r->stats, OP_STATS, absmax, DIMS(blocks));
    free(absmax);
    a.m_out = op_out_typed(r, "m_out", LG_U8, 0, DIMS(n));
    a.v_out = op_out_typed(r, "v_out", LG_U8, 0, DIMS(n));
    a.m_max_out = op_out(r, "m_max_out", OP_STATS, DIMS(blocks));
    a.v_max_out = op_out(r, "v_max_out", OP_STATS, DIMS(blocks));
    a.copies = (int)z->N;
    for (int i = 0; i < a.copies; i++)
        a.working[i] = op_out(r, "working", i ? OP_TWIN : 0, DIMS(n));
    lg_adamw8(r->stream, &a);
    if (!a.copies) return;
    struct lg_cast_args cast = {.x = a.w_out, .y = op_out(r, "cast w_out", OP_TWIN, DIMS(n))};
    lg_cast(r->stream, &cast);
}

BUILD(ema)
{
    struct lg_ema_args a = {.decay = 0.999};
    op_in_out(r, z->alias, "out", OP_STATS, &a.ema, &a.out, DIMS(z->D));
    a.w = op_in(r, OP_STATS, 1, DIMS(z->D));
    lg_ema(r->stream, &a);
}

/* ---- the table ---- */

static const struct op_case {
    const char *op, *text;
    void (*build)(struct op_run *, const struct shape *);
    struct shape shape;
} CASES[] = {
#define CASE(op, ...) {#op, #__VA_ARGS__, build_##op, {__VA_ARGS__}},
#include "tests/unit/op_cases.def"
#include "tests/unit/op_shapes.def"
#undef CASE
};
enum {
    SMALL_CASES = 0
#define CASE(...) +1
#include "tests/unit/op_cases.def"
#undef CASE
};

int op_case_count(void)
{
    return SMALL_CASES;
}

int op_case_count_all(void)
{
    return (int)LG_ARRAY_LEN(CASES);
}

const char *op_case_op(int i)
{
    return CASES[i].op;
}

const char *op_case_shape(int i)
{
    return CASES[i].text;
}

/* A case has its values wherever it stands. */
static uint64_t seed_of(int i)
{
    const char *op = op_case_op(i), *shape = op_case_shape(i);
    return XXH3_64bits_withSeed(shape, strlen(shape), XXH3_64bits(op, strlen(op))) >> 1;
}

void op_case_run(int i, lg_device *d, const struct op_variant *variant, struct op_result *ret)
{
    static const uint64_t IN_ORDER[OP_BATCH_MAX] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
    const struct op_case *z = &CASES[i];
    struct op_run r = {.device = d, .F = lg_device_dtype(d), .ids = IN_ORDER, .seed = seed_of(i)};
    r.stats = r.F == LG_F64 ? LG_F64 : LG_F32;
    r.batch = z->shape.B ? z->shape.B : 1;
    LG_ASSERT(r.batch <= OP_BATCH_MAX);
    if (variant) {
        r.lead = variant->misaligned ? sizeof(double) : 0;
        if (variant->ids) r.ids = variant->ids;
        r.round = variant->round;
    }

    r.dry = true;
    op_must(lg_stream_open_dry(d, &r.stream)); /* sizes the scratch memory */
    z->build(&r, &z->shape);
    size_t scratch_bytes = lg_stream_scratch_need(r.stream);
    lg_stream_close(&r.stream);
    op_release(&r);
    r.dry = false;

    /* Scratch memory holds anything at the start, and ends where the backend said. */
    bool fresh = variant && variant->fresh_scratch;
    size_t clean = fresh ? scratch_bytes : 0, bytes = scratch_bytes + GUARD_BYTES;
    char guard[GUARD_BYTES], *dirt = malloc(bytes);
    void *scratch;
    LG_ASSERT(dirt);
    memset(dirt, 0xFF, bytes);
    op_must(lg_stream_open(d, &r.stream));
    op_must(fresh ? variant->fresh_scratch(bytes, &scratch) : lg_device_alloc(d, bytes, &scratch));
    lg_stream_upload(r.stream, (char *)scratch + clean, dirt, bytes - clean);
    lg_stream_set_scratch(r.stream, scratch, scratch_bytes);
    z->build(&r, &z->shape);
    lg_stream_download(r.stream, guard, (char *)scratch + scratch_bytes, GUARD_BYTES);
    lg_stream_sync(r.stream);
    op_collect(&r, ret);
    if (memcmp(guard, dirt, GUARD_BYTES)) ret->wrote_outside = true;
    lg_stream_close(&r.stream);
    if (!fresh) lg_device_free(d, &scratch);
    op_release(&r);
    free(dirt);
}

void op_result_free(struct op_result *r)
{
    for (int i = 0; i < r->n_out; i++) free(r->out[i].v);
    *r = (struct op_result){0};
}
