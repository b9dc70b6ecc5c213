/* The calls behind columns.def: each hands its columns to one operation, in the view its name or its
 * comment tells. What is no column (a row's mean, a rank's weight) is the same in every call. */
#include "tests/unit/columns.h"
#include "base/check.h"
#include "kernels/adamw8.h"
#include "kernels/ops.h"
#include <string.h>

enum { ROWS = COLUMN_ROWS, SHORT = COLUMN_SHORT, FLAT = COLUMN_FLAT, WIDE = COLUMN_WIDE };

/* Shapes: (n), (1, n), (ROWS, n) ... of an input or output. */
#define FLAT_IN(k)  lg_t1(c->in[k], LG_F32, c->n)
#define FLAT_OUT(k) lg_t1(c->out[k], LG_F32, c->n)
#define ROWS_IN(k)  lg_t2(c->in[k], LG_F32, ROWS, c->n)
#define ROWS_OUT(k) lg_t2(c->out[k], LG_F32, ROWS, c->n)
/* (B, T, D) as two samples, and their modulation. */
#define TOKENS_IN(k)  lg_t3(c->in[k], LG_F32, 2, ROWS / 2, c->n)
#define TOKENS_OUT(k) lg_t3(c->out[k], LG_F32, 2, ROWS / 2, c->n)
#define MOD_IN(k)     lg_t2(c->in[k], LG_F32, 2, c->n)
#define MOD_OUT(k)    lg_t2(c->out[k], LG_F32, 2, c->n)

/* What is no column: statistics of rows, as an operation takes them, and where others are left. */
static float g_mean[ROWS] = {0.01f, -0.2f, 0.07f, 0.3f, -0.13f, 0.0f};
static float g_rstd[ROWS] = {1.1f, 0.9f, 1.7f, 1.3f, 0.77f, 2.1f};
static float g_left[3][ROWS];
static double g_squares[COLUMN_FLAT / LG_SQUARES_PIECE + 1];

static void copy_in(struct column_call *c, int out, int in, int rows)
{
    memcpy(c->out[out], c->in[in], (size_t)(rows * c->n) * sizeof(float));
}

static void run_act_forward(struct column_call *c)
{
    lg_act_forward(c->stream, &(struct lg_act_forward_args){
                                  .x = FLAT_IN(0), .y = FLAT_OUT(0), .act = (lg_act)c->variant});
}

static void run_act_backward(struct column_call *c)
{
    copy_in(c, 0, 2, 1);
    lg_act_backward(c->stream, &(struct lg_act_backward_args){.x = FLAT_IN(0),
                                                              .dy = FLAT_IN(1),
                                                              .dx = FLAT_OUT(0),
                                                              .act = (lg_act)(c->variant / 2),
                                                              .accumulate = c->variant % 2});
}

/* A row is its values, then its gates. */
static void run_glu_forward(struct column_call *c)
{
    static float x[2 * COLUMN_WIDE];
    memcpy(x, c->in[0], (size_t)c->n * sizeof *x);
    memcpy(x + c->n, c->in[1], (size_t)c->n * sizeof *x);
    lg_glu_forward(c->stream, &(struct lg_glu_forward_args){.x = lg_t2(x, LG_F32, 1, 2 * c->n),
                                                            .y = lg_t2(c->out[0], LG_F32, 1, c->n),
                                                            .act = (lg_act)c->variant});
    lg_stream_sync(c->stream);
}

static void run_glu_backward(struct column_call *c)
{
    static float x[2 * COLUMN_WIDE];
    memcpy(x, c->in[0], (size_t)c->n * sizeof *x);
    memcpy(x + c->n, c->in[1], (size_t)c->n * sizeof *x);
    lg_glu_backward(c->stream,
                    &(struct lg_glu_backward_args){.dy = lg_t2(c->in[2], LG_F32, 1, c->n),
                                                   .x = lg_t2(x, LG_F32, 1, 2 * c->n),
                                                   .dx = lg_t2(x, LG_F32, 1, 2 * c->n),
                                                   .act = (lg_act)c->variant});
    lg_stream_sync(c->stream);
    memcpy(c->out[0], x, (size_t)c->n * sizeof *x);
    memcpy(c->out[1], x + c->n, (size_t)c->n * sizeof *x);
}

static void run_mul_forward(struct column_call *c)
{
    lg_mul_forward(c->stream, &(struct lg_mul_forward_args){
                                  .a = FLAT_IN(0), .b = FLAT_IN(1), .y = FLAT_OUT(0)});
}

static void run_add_forward(struct column_call *c)
{
    lg_add_forward(c->stream,
                   &(struct lg_add_forward_args){.a = c->variant ? ROWS_IN(0) : FLAT_IN(0),
                                                 .b = FLAT_IN(1),
                                                 .y = c->variant ? ROWS_OUT(0) : FLAT_OUT(0)});
}

static void run_sum_rows(struct column_call *c)
{
    copy_in(c, 0, 1, 1);
    lg_sum_rows(c->stream, &(struct lg_sum_rows_args){
                               .x = ROWS_IN(0), .y = FLAT_OUT(0), .accumulate = c->variant});
}

static void run_combine(struct column_call *c)
{
    lg_combine(c->stream,
               &(struct lg_combine_args){.x = {FLAT_IN(0), FLAT_IN(1), FLAT_IN(2), FLAT_IN(3)},
                                         .c = {0.3, -1.7, 0.9, 1.1},
                                         .count = c->variant,
                                         .y = FLAT_OUT(0)});
}

/* The scales are no columns. */
static void run_dequantize_rows(struct column_call *c)
{
    lg_dequantize_rows(
        c->stream, &(struct lg_dequantize_rows_args){.codes = lg_t2(c->in[0], LG_U8, ROWS, c->n),
                                                     .scale = lg_t1(g_rstd, LG_F32, ROWS),
                                                     .w = ROWS_OUT(0),
                                                     .format = (lg_rows8)c->variant});
}

enum { FLOATS = 4 }; /* f32, f64, f16, bf16: the first of lg_dtype */

static void run_cast(struct column_call *c)
{
    lg_cast(c->stream,
            &(struct lg_cast_args){.x = lg_t1(c->in[0], (lg_dtype)(c->variant / FLOATS), c->n),
                                   .y = lg_t1(c->out[0], (lg_dtype)(c->variant % FLOATS), c->n)});
}

static void run_norm_modulate_forward(struct column_call *c)
{
    lg_norm_modulate_forward(c->stream, &(struct lg_norm_modulate_forward_args){
                                            .x = TOKENS_IN(0),
                                            .shift = c->variant ? MOD_IN(1) : LG_NONE,
                                            .scale = c->variant ? MOD_IN(2) : LG_NONE,
                                            .y = TOKENS_OUT(0),
                                            .mean = lg_t2(g_left[0], LG_F32, 2, ROWS / 2),
                                            .rstd = lg_t2(g_left[1], LG_F32, 2, ROWS / 2),
                                            .eps = 1e-6});
}

static void run_norm_modulate_backward(struct column_call *c)
{
    const bool mod = c->variant % 2, frozen = c->variant >= 4;
    copy_in(c, 0, 3, ROWS);
    lg_norm_modulate_backward(c->stream, &(struct lg_norm_modulate_backward_args){
                                             .dy = TOKENS_IN(0),
                                             .x = TOKENS_IN(1),
                                             .mean = lg_t2(g_mean, LG_F32, 2, ROWS / 2),
                                             .rstd = lg_t2(g_rstd, LG_F32, 2, ROWS / 2),
                                             .scale = mod ? MOD_IN(2) : LG_NONE,
                                             .dx = TOKENS_OUT(0),
                                             .dshift = mod && !frozen ? MOD_OUT(1) : LG_NONE,
                                             .dscale = mod && !frozen ? MOD_OUT(2) : LG_NONE,
                                             .dbias = mod && !frozen ? FLAT_OUT(3) : LG_NONE,
                                             .accumulate = c->variant / 2 % 2});
}

static void run_gate_residual_forward(struct column_call *c)
{
    lg_gate_residual_forward(
        c->stream, &(struct lg_gate_residual_forward_args){.x = TOKENS_IN(0),
                                                           .y = TOKENS_IN(1),
                                                           .gate = c->variant ? MOD_IN(2) : LG_NONE,
                                                           .out = TOKENS_OUT(0)});
}

static void run_gate_residual_backward(struct column_call *c)
{
    const bool frozen = c->variant;
    lg_gate_residual_backward(c->stream, &(struct lg_gate_residual_backward_args){
                                             .dout = TOKENS_IN(0),
                                             .y = frozen ? LG_NONE : TOKENS_IN(1),
                                             .gate = MOD_IN(2),
                                             .dy = TOKENS_OUT(0),
                                             .dgate = frozen ? LG_NONE : MOD_OUT(1),
                                             .dbias = frozen ? LG_NONE : FLAT_OUT(2)});
}

/* A column is a pair: its two features are two inputs, and two outputs. */
static void run_rope(struct column_call *c)
{
    static float x[2 * ROWS * COLUMN_SHORT], y[2 * ROWS * COLUMN_SHORT];
    const float *in[] = {c->in[0], c->in[1]};
    float *out[] = {c->out[0], c->out[1]};
    LG_ASSERT(c->n <= COLUMN_SHORT);
    for (int64_t i = 0; i < 2 * ROWS * c->n; i++) x[i] = in[i % 2][i / 2];
    lg_rope(c->stream, &(struct lg_rope_args){.x = lg_t4(x, LG_F32, 2, ROWS / 2, 1, 2 * c->n),
                                              .cos = lg_t2(c->in[2], LG_F32, ROWS / 2, c->n),
                                              .sin = lg_t2(c->in[3], LG_F32, ROWS / 2, c->n),
                                              .y = lg_t4(y, LG_F32, 2, ROWS / 2, 1, 2 * c->n),
                                              .turned = 1,
                                              .inverse = c->variant});
    lg_stream_sync(c->stream);
    for (int64_t i = 0; i < 2 * ROWS * c->n; i++) out[i % 2][i / 2] = y[i];
}

/* Two samples of a token with two vectors. */
#define VECTORS_IN(k)  lg_t4(c->in[k], LG_F32, 2, 1, 2, c->n)
#define VECTORS_OUT(k) lg_t4(c->out[k], LG_F32, 2, 1, 2, c->n)

static void run_rms_norm_forward(struct column_call *c)
{
    lg_rms_norm_forward(c->stream, &(struct lg_rms_norm_forward_args){
                                       .x = lg_t4(c->in[0], LG_F32, 1, 1, ROWS, c->n),
                                       .w = lg_t2(c->in[1], LG_F32, 1, c->n),
                                       .y = lg_t4(c->out[0], LG_F32, 1, 1, ROWS, c->n),
                                       .each = ROWS,
                                       .eps = 1e-6});
}

/* Variant 1 adds. */
static void run_rms_norm_backward(struct column_call *c)
{
    copy_in(c, 0, 3, 4);
    copy_in(c, 1, 4, 2);
    lg_rms_norm_backward(
        c->stream, &(struct lg_rms_norm_backward_args){.dy = VECTORS_IN(0),
                                                       .x = VECTORS_IN(1),
                                                       .w = MOD_IN(2),
                                                       .rstd = lg_t3(g_rstd, LG_F32, 2, 1, 2),
                                                       .dx = VECTORS_OUT(0),
                                                       .dw = MOD_OUT(1),
                                                       .dbias = lg_t1(c->out[2], LG_F32, 2 * c->n),
                                                       .each = 1,
                                                       .accumulate = c->variant,
                                                       .accumulate_dw = c->variant});
}

static void run_layer_norm_forward(struct column_call *c)
{
    lg_layer_norm_forward(
        c->stream,
        &(struct lg_layer_norm_forward_args){
            .x = ROWS_IN(0), .w = FLAT_IN(1), .b = FLAT_IN(2), .y = ROWS_OUT(0), .eps = 1e-6});
}

static void run_group_norm_forward(struct column_call *c)
{
    lg_group_norm_forward(c->stream, &(struct lg_group_norm_forward_args){
                                         .x = lg_t4(c->in[0], LG_F32, 1, 2, ROWS / 2, c->n),
                                         .w = FLAT_IN(1),
                                         .b = FLAT_IN(2),
                                         .y = lg_t4(c->out[0], LG_F32, 1, 2, ROWS / 2, c->n),
                                         .groups = 1,
                                         .eps = 1e-6,
                                         .act = (lg_act)c->variant});
}

/* Variant 1 adds. */
static void run_layer_norm_backward(struct column_call *c)
{
    copy_in(c, 0, 3, ROWS);
    copy_in(c, 1, 4, 1);
    copy_in(c, 2, 2, 1);
    lg_layer_norm_backward(
        c->stream, &(struct lg_layer_norm_backward_args){.dy = ROWS_IN(0),
                                                         .x = ROWS_IN(1),
                                                         .w = FLAT_IN(2),
                                                         .mean = lg_t1(g_mean, LG_F32, ROWS),
                                                         .rstd = lg_t1(g_rstd, LG_F32, ROWS),
                                                         .dx = ROWS_OUT(0),
                                                         .dw = FLAT_OUT(1),
                                                         .db = FLAT_OUT(2),
                                                         .accumulate = c->variant,
                                                         .accumulate_dw = c->variant});
}

/* Maps of one group. Odd variants add. */
#define MAP_IN(k)  lg_t4(c->in[k], LG_F32, 1, 2, ROWS / 2, c->n)
#define MAP_OUT(k) lg_t4(c->out[k], LG_F32, 1, 2, ROWS / 2, c->n)

static void run_group_norm_backward(struct column_call *c)
{
    static double mean_var[2] = {0.13, 1.7};
    const bool adds = c->variant % 2;
    copy_in(c, 0, 4, ROWS);
    copy_in(c, 1, 2, 1);
    copy_in(c, 2, 3, 1);
    lg_group_norm_backward(c->stream, &(struct lg_group_norm_backward_args){
                                          .dy = MAP_IN(0),
                                          .x = MAP_IN(1),
                                          .mean_var = lg_t3(mean_var, LG_F64, 1, 1, 2),
                                          .w = FLAT_IN(2),
                                          .b = FLAT_IN(3),
                                          .dx = MAP_OUT(0),
                                          .dw = FLAT_OUT(1),
                                          .db = FLAT_OUT(2),
                                          .groups = 1,
                                          .eps = 1e-5,
                                          .act = c->variant / 2 ? LG_ACT_SILU : LG_ACT_NONE,
                                          .accumulate = adds,
                                          .accumulate_dw = adds});
}

static void run_shift_forward(struct column_call *c)
{
    lg_shift_forward(c->stream, &(struct lg_shift_forward_args){
                                    .x = TOKENS_IN(0), .shift = MOD_IN(1), .y = TOKENS_OUT(0)});
}

static void run_shift_backward(struct column_call *c)
{
    lg_shift_backward(c->stream,
                      &(struct lg_shift_backward_args){.dy = TOKENS_IN(0), .dshift = MOD_OUT(0)});
}

/* Of 2 x 3 pixels one of 1 x 2, the last of which is seen in one column. */
static void run_upsample2x_backward(struct column_call *c)
{
    copy_in(c, 0, 1, 2);
    lg_upsample2x_backward(c->stream, &(struct lg_upsample2x_backward_args){
                                          .dy = MAP_IN(0),
                                          .dx = lg_t4(c->out[0], LG_F32, 1, 1, 2, c->n),
                                          .accumulate = c->variant});
}

/* A column is one of the head's d elements; with variant, one of the queries. */
static void run_attention_forward(struct column_call *c)
{
    static float keys[2][ROWS];
    for (int i = 0; i < ROWS; i++) keys[0][i] = g_mean[i] * 9, keys[1][i] = g_rstd[i];
    const int64_t Tq = c->variant ? c->n : ROWS, d = c->variant ? 1 : c->n;
    void *k = c->variant ? keys[0] : c->in[1], *v = c->variant ? keys[1] : c->in[2];
    lg_attention_forward(c->stream, &(struct lg_attention_forward_args){
                                        .q = lg_t4(c->in[0], LG_F32, 1, Tq, 1, d),
                                        .k = lg_t4(k, LG_F32, 1, ROWS, 1, d),
                                        .v = lg_t4(v, LG_F32, 1, ROWS, 1, d),
                                        .o = lg_t4(c->out[0], LG_F32, 1, Tq, 1, d),
                                        .lse = c->variant ? lg_t3(c->out[1], LG_F32, 1, 1, Tq)
                                                          : lg_t3(g_left[0], LG_F32, 1, 1, Tq),
                                        .scale = 0.3});
}

/* A column is a key. The values are the identity, so an output row holds the softmax itself. */
static void run_softmax(struct column_call *c)
{
    static float one_hot[SHORT * SHORT], keys[SHORT * SHORT];
    static float queries[ROWS * SHORT];
    LG_ASSERT(c->n <= SHORT);
    for (int64_t j = 0; j < c->n; j++)
        for (int64_t i = 0; i < c->n; i++) {
            one_hot[j * c->n + i] = i == j;
            keys[j * c->n + i] = ((const float *)c->in[1])[j];
        }
    for (int64_t i = 0; i < ROWS * c->n; i++) queries[i] = g_mean[i % ROWS];
    lg_attention_forward(c->stream,
                         &(struct lg_attention_forward_args){
                             .q = lg_t4(queries, LG_F32, 1, ROWS, 1, c->n),
                             .k = lg_t4(keys, LG_F32, 1, c->n, 1, c->n),
                             .v = lg_t4(one_hot, LG_F32, 1, c->n, 1, c->n),
                             .bias = c->variant ? lg_t3(c->in[0], LG_F32, 1, ROWS, c->n) : LG_NONE,
                             .o = lg_t4(c->out[0], LG_F32, 1, ROWS, 1, c->n),
                             .scale = 0.7});
}

static void run_attention_backward(struct column_call *c)
{
    const int64_t n = c->n;
    lg_attention_backward(c->stream, &(struct lg_attention_backward_args){
                                         .dout = lg_t4(c->in[0], LG_F32, 1, ROWS, 1, n),
                                         .o = lg_t4(c->in[1], LG_F32, 1, ROWS, 1, n),
                                         .q = lg_t4(c->in[2], LG_F32, 1, ROWS, 1, n),
                                         .k = lg_t4(c->in[3], LG_F32, 1, ROWS, 1, n),
                                         .v = lg_t4(c->in[4], LG_F32, 1, ROWS, 1, n),
                                         .lse = lg_t3(g_rstd, LG_F32, 1, 1, ROWS),
                                         .dq = lg_t4(c->out[0], LG_F32, 1, ROWS, 1, n),
                                         .dk = lg_t4(c->out[1], LG_F32, 1, ROWS, 1, n),
                                         .dv = lg_t4(c->out[2], LG_F32, 1, ROWS, 1, n),
                                         .scale = 0.3});
}

/* A column is a key, of d = 1. */
static void run_attention_backward_keys(struct column_call *c)
{
    static float o[ROWS] = {0.3f, -0.1f, 0.7f, 0.2f, -0.9f, 0.4f};
    lg_attention_backward(c->stream, &(struct lg_attention_backward_args){
                                         .dout = lg_t4(g_rstd, LG_F32, 1, ROWS, 1, 1),
                                         .o = lg_t4(o, LG_F32, 1, ROWS, 1, 1),
                                         .q = lg_t4(g_mean, LG_F32, 1, ROWS, 1, 1),
                                         .k = lg_t4(c->in[0], LG_F32, 1, c->n, 1, 1),
                                         .v = lg_t4(c->in[1], LG_F32, 1, c->n, 1, 1),
                                         .lse = lg_t3(g_rstd, LG_F32, 1, 1, ROWS),
                                         .dq = lg_t4(g_left[0], LG_F32, 1, ROWS, 1, 1),
                                         .dk = lg_t4(c->out[0], LG_F32, 1, c->n, 1, 1),
                                         .dv = lg_t4(c->out[1], LG_F32, 1, c->n, 1, 1),
                                         .scale = 0.3});
}

static void run_embedding_backward(struct column_call *c)
{
    static int32_t ids[ROWS] = {1, 0, 1, 1, 0, 1};
    lg_embedding_backward(c->stream, &(struct lg_embedding_backward_args){
                                         .ids = lg_t1(ids, LG_I32, ROWS),
                                         .dy = ROWS_IN(0),
                                         .dtable = lg_t2(c->out[0], LG_F32, 2, c->n)});
}

static void run_timestep_embedding_forward(struct column_call *c)
{
    lg_timestep_embedding_forward(c->stream,
                                  &(struct lg_timestep_embedding_forward_args){
                                      .t = FLAT_IN(0), .out = lg_t2(c->out[0], LG_F32, c->n, 2)});
}

static void run_pixels_to_nhwc(struct column_call *c)
{
    lg_pixels_to_nhwc(
        c->stream, &(struct lg_pixels_to_nhwc_args){.x = lg_t4(c->in[0], LG_U8, 1, 1, 1, c->n),
                                                    .y = lg_t4(c->out[0], LG_F32, 1, 1, c->n, 1)});
}

static void run_nhwc_to_pixels(struct column_call *c)
{
    lg_nhwc_to_pixels(
        c->stream, &(struct lg_nhwc_to_pixels_args){.x = lg_t4(c->in[0], LG_F32, 1, 1, c->n, 1),
                                                    .y = lg_t4(c->out[0], LG_U8, 1, 1, 1, c->n)});
}

static void run_rms_act_forward(struct column_call *c)
{
    struct lg_rms_act_forward_args a = {
        .x = ROWS_IN(0), .y = ROWS_OUT(0), .eps = 1e-6, .act = LG_ACT_SILU};
    if (c->variant) a.shift = FLAT_IN(1), a.scale = FLAT_IN(2);
    lg_rms_act_forward(c->stream, &a);
}

/* One pixel, whose column is the mean of two of `mean_of`. */
static void run_space_to_depth_forward(struct column_call *c)
{
    static float both[2 * COLUMN_WIDE];
    for (int64_t i = 0; i < c->n; i++)
        for (int k = 0; k < 2; k++) both[2 * i + k] = ((float *)c->in[1 + k])[i];
    lg_space_to_depth_forward(c->stream, &(struct lg_space_to_depth_forward_args){
                                             .x = lg_t4(c->in[0], LG_F32, 1, 1, 1, c->n),
                                             .mean_of = lg_t4(both, LG_F32, 1, 1, 1, 2 * c->n),
                                             .y = lg_t4(c->out[0], LG_F32, 1, 1, 1, c->n),
                                             .time = 1,
                                             .space = 1});
    lg_stream_sync(c->stream);
}

static void run_depth_to_space_forward(struct column_call *c)
{
    lg_depth_to_space_forward(c->stream, &(struct lg_depth_to_space_forward_args){
                                             .x = lg_t4(c->in[0], LG_F32, 1, 1, 1, c->n),
                                             .repeated = lg_t4(c->in[1], LG_F32, 1, 1, 1, c->n),
                                             .y = lg_t4(c->out[0], LG_F32, 1, 1, 1, c->n),
                                             .time = 1,
                                             .space = 1});
}

/* A column is a pixel, or a channel. */
static void run_clip_to_patches_forward(struct column_call *c)
{
    struct lg_clip_to_patches_forward_args a = {.patch = 1};
    a.x = lg_t4(c->in[0], LG_U8, 1, 1, 1, c->n);
    a.y = lg_t4(c->out[0], LG_F32, 1, 1, c->n, 1);
    if (c->variant) {
        a.x = lg_t4(c->in[0], LG_F32, c->n, 1, 1, 1);
        a.y = lg_t4(c->out[0], LG_F32, 1, 1, 1, c->n);
        a.scale = FLAT_IN(1), a.shift = FLAT_IN(2);
    }
    lg_clip_to_patches_forward(c->stream, &a);
}

static void run_patches_to_clip_forward(struct column_call *c)
{
    lg_patches_to_clip_forward(c->stream, &(struct lg_patches_to_clip_forward_args){
                                              .x = lg_t4(c->in[0], LG_F32, 1, 1, c->n, 1),
                                              .y = lg_t4(c->out[0], LG_U8, 1, 1, 1, c->n),
                                              .patch = 1});
}

/* A column is a channel; all have one logarithm of a variance. */
static void run_clip_posterior_forward(struct column_call *c)
{
    static float x[COLUMN_WIDE + 1];
    memcpy(x, c->in[0], (size_t)c->n * sizeof *x);
    x[c->n] = 0.5f;
    lg_clip_posterior_forward(c->stream, &(struct lg_clip_posterior_forward_args){
                                             .x = lg_t4(x, LG_F32, 1, 1, 1, c->n + 1),
                                             .center = FLAT_IN(1),
                                             .spread = FLAT_IN(2),
                                             .mean = lg_t4(c->out[0], LG_F32, c->n, 1, 1, 1),
                                             .logvar = lg_t4(c->out[1], LG_F32, c->n, 1, 1, 1)});
    lg_stream_sync(c->stream);
}

static void run_tile_take(struct column_call *c)
{
    lg_tile_take(c->stream, &(struct lg_tile_take_args){.x = lg_t3(c->in[0], LG_U8, 1, 1, c->n),
                                                        .y = lg_t3(c->out[0], LG_F32, 1, 1, c->n)});
}

static void run_tile_add(struct column_call *c)
{
    static float row = 0.7f;
    copy_in(c, 0, 2, 1);
    lg_tile_add(c->stream, &(struct lg_tile_add_args){.x = lg_t3(c->in[0], LG_F32, 1, 1, c->n),
                                                      .rows = lg_t1(&row, LG_F32, 1),
                                                      .columns = FLAT_IN(1),
                                                      .y = lg_t3(c->out[0], LG_F32, 1, 1, c->n)});
}

/* The place in the sample is an input: it is the number of the noise. */
static void run_diffuse_forward(struct column_call *c)
{
    static int64_t number = 77;
    static float coef[] = {0.8f, 0.6f, -0.6f, 0.8f};
    lg_diffuse_forward(c->stream, &(struct lg_diffuse_forward_args){
                                      .mean = lg_t4(c->in[0], LG_F32, 1, 1, 1, c->n),
                                      .logvar = lg_t4(c->in[1], LG_F32, 1, 1, 1, c->n),
                                      .n = lg_t1(&number, LG_I64, 1),
                                      .coef = lg_t2(coef, LG_F32, 1, 4),
                                      .x_t = lg_t4(c->out[0], LG_F32, 1, 1, 1, c->n),
                                      .target = lg_t4(c->out[1], LG_F32, 1, 1, 1, c->n),
                                      .seed = 5,
                                      .scaling_factor = 0.13,
                                      .shift_factor = 0.1});
}

static void run_mse_loss(struct column_call *c)
{
    static float weight[ROWS] = {0.1f, 0.3f, 1.0f, 0.7f, 0.0f, 0.9f};
    lg_mse_loss(c->stream,
                &(struct lg_mse_loss_args){.pred = lg_t4(c->in[0], LG_F32, ROWS, 1, 1, c->n),
                                           .target = lg_t4(c->in[1], LG_F32, ROWS, 1, 1, c->n),
                                           .weight = lg_t1(weight, LG_F32, ROWS),
                                           .loss = lg_t1(g_left[0], LG_F32, ROWS),
                                           .dpred = lg_t4(c->out[0], LG_F32, ROWS, 1, 1, c->n)});
}

/* Variant 1: the first timestep. */
static void run_learned_range_loss(struct column_call *c)
{
    static float weight[] = {0.7f, 0.3f};
    float terms[] = {-0.4f, 0.9f, 0.8f, 1.1f, -0.6f, (float)c->variant};
    lg_learned_range_loss(c->stream, &(struct lg_learned_range_loss_args){
                                         .pred = lg_t4(c->in[0], LG_F32, 1, 2, 1, c->n),
                                         .target = lg_t4(c->in[1], LG_F32, 1, 1, 1, c->n),
                                         .x_t = lg_t4(c->in[2], LG_F32, 1, 1, 1, c->n),
                                         .terms = lg_t2(terms, LG_F32, 1, 6),
                                         .weight = lg_t2(weight, LG_F32, 1, 2),
                                         .loss = lg_t2(g_left[0], LG_F32, 1, 2),
                                         .dpred = lg_t4(c->out[0], LG_F32, 1, 2, 1, c->n)});
}

static void run_reduce_ranks(struct column_call *c)
{
    const int64_t pieces = (c->n + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
    lg_reduce_ranks(c->stream,
                    &(struct lg_reduce_ranks_args){.x = {FLAT_IN(0), FLAT_IN(1), FLAT_IN(2)},
                                                   .count = 3,
                                                   .y = FLAT_OUT(0),
                                                   .squares = lg_t1(g_squares, LG_F64, pieces)});
}

static void run_adamw(struct column_call *c)
{
    float *v = c->in[2];
    for (int64_t i = 0; i < c->n; i++) v[i] *= v[i] < 0 ? -1.0f : 1.0f;
    lg_adamw(c->stream, &(struct lg_adamw_args){.w = FLAT_IN(0),
                                                .m = FLAT_IN(1),
                                                .v = FLAT_IN(2),
                                                .grad = FLAT_IN(3),
                                                .w_out = FLAT_OUT(0),
                                                .m_out = FLAT_OUT(1),
                                                .v_out = FLAT_OUT(2),
                                                .working = {FLAT_OUT(3)},
                                                .copies = 1,
                                                .lr = 3e-3,
                                                .beta1 = 0.9,
                                                .beta2 = 0.99,
                                                .eps = 1e-8,
                                                .weight_decay = 0.1,
                                                .grad_scale = 0.37,
                                                .t = 3});
}

/* One block; a first step makes the moments. */
static void run_adamw8(struct column_call *c)
{
    static uint8_t m[256], v[256];
    static float most[2];
    memset(m, LG_ADAMW8_ZERO_M, sizeof m);
    memset(v, LG_ADAMW8_ZERO_V, sizeof v);
    most[0] = most[1] = 0;
    struct lg_adamw8_args a = {.w = FLAT_IN(0),
                               .m = lg_t1(m, LG_U8, c->n),
                               .v = lg_t1(v, LG_U8, c->n),
                               .m_max = lg_t1(&most[0], LG_F32, 1),
                               .v_max = lg_t1(&most[1], LG_F32, 1),
                               .grad = FLAT_IN(1),
                               .w_out = FLAT_OUT(0),
                               .working = {FLAT_OUT(1)},
                               .copies = 1,
                               .lr = 3e-3,
                               .beta1 = 0.9,
                               .beta2 = 0.99,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .grad_scale = 0.37,
                               .t = 1};
    a.m_out = a.m, a.v_out = a.v, a.m_max_out = a.m_max, a.v_max_out = a.v_max;
    lg_adamw8(c->stream, &a);
    a.t = 2;
    a.w = a.w_out;
    a.grad = FLAT_IN(2);
    lg_adamw8(c->stream, &a);
}

static void run_ema(struct column_call *c)
{
    lg_ema(c->stream, &(struct lg_ema_args){
                          .ema = FLAT_IN(0), .w = FLAT_IN(1), .out = FLAT_OUT(0), .decay = 0.999});
}

const struct column_work COLUMN_WORK[] = {
#define WORK(op, ...) {#op, __VA_ARGS__},
#include "tests/unit/columns.def"
#undef WORK
    {0}};
