/* The reference backend against the outside world: values of PyTorch, transformers and diffusers
 * (tests/golden/make_ops.py) and the published vectors of Philox. What ref64 says here, the other
 * backends are held to.
 *
 * Both sides compute in double: agreement to 1e-12, relative 2-norm; diffusers' timestep embedding
 * is fp32 whatever the default type: 2^-24 of an angle of up to 999, 6e-5. */
#include "base/check.h"
#include "kernels/adamw8.h"
#include "kernels/ops.h"
#include "stages/nets/objective.h"
#include "tests/golden/adamw8_golden.h"
#include "tests/golden/ops_golden.h"
#include "tests/unit/ref64_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TOLERANCE 1e-12
enum { WAVE_MAX = 1024, WAVES_MAX = 8 };

/* Input number k of make_ops.py; valid until it is asked for WAVES_MAX later ones. */
static double *wave(double k)
{
    static double waves[WAVES_MAX][WAVE_MAX];
    static int next;
    double *v = waves[next++ % WAVES_MAX];
    for (int i = 0; i < WAVE_MAX; i++) v[i] = sin(k + 0.7 * i + 0.01 * i * i);
    return v;
}

static void close_to(const char *what, const double *got, const double *want, size_t n,
                     double tolerance)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = sqrt(difference / norm);
    if (!(error <= tolerance)) fail_msg("%s: relative error %.3g", what, error);
}
#define CLOSE(got, want) close_to(#want, got, want, LG_ARRAY_LEN(want), TOLERANCE)

#define T1(v, a)          lg_t1((v), LG_F64, (a))
#define T2(v, a, b)       lg_t2((v), LG_F64, (a), (b))
#define T3(v, a, b, c)    lg_t3((v), LG_F64, (a), (b), (c))
#define T4(v, a, b, c, d) lg_t4((v), LG_F64, (a), (b), (c), (d))

/* kat_vectors of Random123, philox4x32-10. */
static void philox_known_answers(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } KAT[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(KAT); i++) {
        lg_philox_out out = lg_philox4x32(KAT[i].counter, KAT[i].key);
        assert_memory_equal(out.v, KAT[i].want, sizeof out.v);
    }
}

/* Element e of a stream is the same whether asked for alone or in a run, in f32 or f64. */
static void philox_normals_by_index(void **state)
{
    enum { N = 4099 };
    static double all[N];
    double mean = 0, squares = 0;
    lg_philox_normal_f64(all, N, 7, LG_PURPOSE_TEST, 3, 1);
    for (int i = 0; i < N; i++) {
        double one;
        float f;
        lg_philox_normal_f64(&one, 1, 7, LG_PURPOSE_TEST, 3, 1 + (uint64_t)i);
        lg_philox_normal_f32(&f, 1, 7, LG_PURPOSE_TEST, 3, 1 + (uint64_t)i);
        assert_true(one == all[i] && f == (float)all[i]);
        mean += all[i] / N;
        squares += all[i] * all[i] / N;
    }
    /* Five standard deviations of the estimates. */
    assert_true(fabs(mean) <= 5 / sqrt(N) && fabs(squares - 1) <= 5 * sqrt(2.0 / N));
}

static void adamw(void **state)
{
    enum { N = 5 };
    double w[N], m[N] = {0}, v[N] = {0}, working[2][N];
    memcpy(w, wave(1), sizeof w);
    for (int step = 0; step < 3; step++) {
        lg_adamw(g_stream,
                 &(struct lg_adamw_args){.w = T1(w, N),
                                         .m = T1(m, N),
                                         .v = T1(v, N),
                                         .grad = T1(wave(10 + step), N),
                                         .w_out = T1(w, N),
                                         .m_out = T1(m, N),
                                         .v_out = T1(v, N),
                                         .working = {T1(working[0], N), T1(working[1], N)},
                                         .copies = 2,
                                         .lr = 0.1,
                                         .beta1 = 0.9,
                                         .beta2 = 0.99,
                                         .eps = 1e-8,
                                         .weight_decay = 0.1,
                                         .grad_scale = 1,
                                         .t = step + 1});
    }
    CLOSE(w, ADAMW_W);
    CLOSE(m, ADAMW_M);
    CLOSE(v, ADAMW_V);
    for (int c = 0; c < 2; c++) assert_memory_equal(working[c], w, sizeof w);
}

/* Codes are equal, not close. */
static void adamw8(void **state)
{
    enum { N = LG_ARRAY_LEN(ADAMW8_W), BLOCKS = 3 };
    static double w[N], m_max[BLOCKS], v_max[BLOCKS];
    static uint8_t m[N], v[N];
    memset(m, LG_ADAMW8_ZERO_M, sizeof m);
    memset(v, LG_ADAMW8_ZERO_V, sizeof v);
    memcpy(w, wave(1), sizeof w);
    for (int step = 0; step < 3; step++) {
        double *grad = wave(10 + step);
        if (step == 1) grad[300] = NAN;
        struct lg_adamw8_args a = {.w = T1(w, N),
                                   .m = lg_t1(m, LG_U8, N),
                                   .v = lg_t1(v, LG_U8, N),
                                   .m_max = T1(m_max, BLOCKS),
                                   .v_max = T1(v_max, BLOCKS),
                                   .grad = T1(grad, N),
                                   .lr = 0.1,
                                   .beta1 = 0.9,
                                   .beta2 = 0.99,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .grad_scale = 1,
                                   .t = step + 1};
        a.w_out = a.w, a.m_out = a.m, a.v_out = a.v;
        a.m_max_out = a.m_max, a.v_max_out = a.v_max;
        lg_adamw8(g_stream, &a);
    }
    CLOSE(w, ADAMW8_W);
    CLOSE(m_max, ADAMW8_M_MAX);
    CLOSE(v_max, ADAMW8_V_MAX);
    assert_memory_equal(m, ADAMW8_M, sizeof m);
    assert_memory_equal(v, ADAMW8_V, sizeof v);
}

/* The codes of fp32 that every backend has: each value of the map has its own, a middle belongs to the lower one, what is
 * below 0 stays there, and a block of zeros has the code of 0. */
static void adamw8_codes(void **state)
{
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        const uint8_t zero = is_signed ? LG_ADAMW8_ZERO_M : LG_ADAMW8_ZERO_V;
        struct lg_adamw8_map map;
        uint8_t code[LG_ADAMW8_CODES];
        float x[LG_ADAMW8_CODES] = {0};
        lg_adamw8_map_f32(is_signed, &map);
        lg_adamw8_encode(&map, is_signed, x, LG_ADAMW8_CODES, 0, code);
        for (int i = 0; i < LG_ADAMW8_CODES; i++) assert_int_equal(code[i], zero);
        lg_adamw8_encode(&map, is_signed, map.value, LG_ADAMW8_CODES, 1, code);
        for (int i = 0; i < LG_ADAMW8_CODES; i++) {
            assert_int_equal(code[i], i);
            assert_true(i == 0 || map.value[i - 1] < map.value[i]);
        }
        lg_adamw8_encode(&map, is_signed, map.bound, LG_ADAMW8_CODES, 1, code);
        for (int i = 0; i + 1 < LG_ADAMW8_CODES; i++) assert_int_equal(code[i], i);
        x[0] = -1e-9f, x[1] = 1e-9f;
        lg_adamw8_encode(&map, is_signed, x, 2, 1, code);
        assert_int_equal(code[0], is_signed ? zero - 1 : zero);
        assert_int_equal(code[1], zero);
    }
}

static void attention(void **state)
{
    enum { B = 2, TQ = 3, TK = 4, H = 2, D = 3, W = H * D };
    int32_t length[B] = {4, 2};
    double o[B * TQ * W], lse[B * H * TQ], dq[B * TQ * W], dk[B * TK * W], dv[B * TK * W];
    struct lg_attention_forward_args f = {.q = T4(wave(1), B, TQ, H, D),
                                          .k = T4(wave(2), B, TK, H, D),
                                          .v = T4(wave(3), B, TK, H, D),
                                          .k_length = lg_t1(length, LG_I32, B),
                                          .bias = T3(wave(4), H, TQ, TK),
                                          .o = T4(o, B, TQ, H, D),
                                          .scale = 0.8};
    lg_attention_forward(g_stream, &f);
    CLOSE(o, ATTENTION_BIASED_O);
    f.bias = LG_NONE;
    f.lse = T3(lse, B, H, TQ);
    lg_attention_forward(g_stream, &f);
    CLOSE(o, ATTENTION_O);
    CLOSE(lse, ATTENTION_LSE);
    lg_attention_backward(g_stream,
                          &(struct lg_attention_backward_args){.dout = T4(wave(5), B, TQ, H, D),
                                                               .o = f.o,
                                                               .q = f.q,
                                                               .k = f.k,
                                                               .v = f.v,
                                                               .k_length = f.k_length,
                                                               .lse = f.lse,
                                                               .dq = T4(dq, B, TQ, H, D),
                                                               .dk = T4(dk, B, TK, H, D),
                                                               .dv = T4(dv, B, TK, H, D),
                                                               .scale = f.scale});
    CLOSE(dq, ATTENTION_DQ);
    CLOSE(dk, ATTENTION_DK);
    CLOSE(dv, ATTENTION_DV);
}

static void causal_attention(void **state)
{
    enum { B = 2, T = 4, H = 2, D = 3 };
    double o[B * T * H * D];
    lg_attention_forward(g_stream, &(struct lg_attention_forward_args){.q = T4(wave(1), B, T, H, D),
                                                                       .k = T4(wave(2), B, T, H, D),
                                                                       .v = T4(wave(3), B, T, H, D),
                                                                       .o = T4(o, B, T, H, D),
                                                                       .scale = 0.8,
                                                                       .causal = true});
    CLOSE(o, ATTENTION_CAUSAL_O);
}

static void gelus(void **state)
{
    enum { N = LG_ARRAY_LEN(GELU_ERF_Y) };
    double *x = wave(1), y[N], dy[N], dx[N];
    for (int i = 0; i < N; i++) x[i] *= 4, dy[i] = 1;
    struct lg_act_forward_args f = {.x = T1(x, N), .y = T1(y, N), .act = LG_ACT_GELU_ERF};
    struct lg_act_backward_args b = {
        .x = f.x, .dy = T1(dy, N), .dx = T1(dx, N), .act = LG_ACT_GELU_ERF};
    lg_act_forward(g_stream, &f);
    lg_act_backward(g_stream, &b);
    CLOSE(y, GELU_ERF_Y);
    CLOSE(dx, GELU_ERF_SLOPE);
    f.act = b.act = LG_ACT_QUICK_GELU;
    lg_act_forward(g_stream, &f);
    lg_act_backward(g_stream, &b);
    CLOSE(y, QUICK_GELU_Y);
    CLOSE(dx, QUICK_GELU_SLOPE);
}

static void norm_modulate(void **state)
{
    enum { B = 2, T = 3, D = 4 };
    double y[B * T * D], mean[B * T], rstd[B * T], dx[B * T * D], dmod[B * 2 * D], *mod = wave(2);
    struct lg_norm_modulate_forward_args f = {.x = T3(wave(1), B, T, D),
                                              .shift = lg_slice(T2(mod, B, 2 * D), 1, 0, D),
                                              .scale = lg_slice(T2(mod, B, 2 * D), 1, D, D),
                                              .y = T3(y, B, T, D),
                                              .mean = T2(mean, B, T),
                                              .rstd = T2(rstd, B, T),
                                              .eps = 1e-6};
    lg_norm_modulate_forward(g_stream, &f);
    lg_norm_modulate_backward(g_stream, &(struct lg_norm_modulate_backward_args){
                                            .dy = T3(wave(3), B, T, D),
                                            .x = f.x,
                                            .mean = f.mean,
                                            .rstd = f.rstd,
                                            .scale = f.scale,
                                            .dx = T3(dx, B, T, D),
                                            .dshift = lg_slice(T2(dmod, B, 2 * D), 1, 0, D),
                                            .dscale = lg_slice(T2(dmod, B, 2 * D), 1, D, D)});
    CLOSE(y, NORM_Y);
    CLOSE(dx, NORM_DX);
    CLOSE(dmod, NORM_DMOD);
}

static void other_norms(void **state)
{
    double y[LG_ARRAY_LEN(RMS_Y)], z[LG_ARRAY_LEN(GROUP_NORM_SILU_Y)];
    double rstd[3], dx[LG_ARRAY_LEN(RMS_DX)], dw[LG_ARRAY_LEN(RMS_DW)];
    const lg_tensor x = T4(wave(1), 1, 1, 3, 4), w = T2(wave(2), 1, 4);
    lg_rms_norm_forward(g_stream, &(struct lg_rms_norm_forward_args){.x = x,
                                                                     .w = w,
                                                                     .y = T4(y, 1, 1, 3, 4),
                                                                     .rstd = T3(rstd, 1, 1, 3),
                                                                     .each = 3,
                                                                     .eps = 1e-6});
    lg_rms_norm_backward(g_stream,
                         &(struct lg_rms_norm_backward_args){.dy = T4(wave(3), 1, 1, 3, 4),
                                                             .x = x,
                                                             .w = w,
                                                             .rstd = T3(rstd, 1, 1, 3),
                                                             .dx = T4(dx, 1, 1, 3, 4),
                                                             .dw = T2(dw, 1, 4),
                                                             .each = 3});
    CLOSE(dx, RMS_DX);
    CLOSE(dw, RMS_DW);
    CLOSE(y, RMS_Y);
    lg_layer_norm_forward(g_stream, &(struct lg_layer_norm_forward_args){.x = T2(wave(1), 3, 4),
                                                                         .w = T1(wave(2), 4),
                                                                         .b = T1(wave(3), 4),
                                                                         .y = T2(y, 3, 4),
                                                                         .eps = 1e-5});
    CLOSE(y, LAYER_NORM_Y);
    lg_group_norm_forward(g_stream,
                          &(struct lg_group_norm_forward_args){.x = T4(wave(1), 2, 2, 3, 6),
                                                               .w = T1(wave(2), 6),
                                                               .b = T1(wave(3), 6),
                                                               .y = T4(z, 2, 2, 3, 6),
                                                               .groups = 3,
                                                               .eps = 1e-6,
                                                               .act = LG_ACT_SILU});
    CLOSE(z, GROUP_NORM_SILU_Y);
}

/* As the downsampling convolution of AutoencoderKL: stride 2, padded below and on the right. */
static void conv_with_uneven_padding(void **state)
{
    assert_true(CONV_SHAPE[0] == 2 && CONV_SHAPE[1] == 2);
    int64_t Ho = CONV_SHAPE[2], Wo = CONV_SHAPE[3];
    double y[LG_ARRAY_LEN(CONV_Y)], residual[LG_ARRAY_LEN(CONV_Y)];
    struct lg_conv2d_forward_args f = {.x = T4(wave(1), 2, 4, 5, 3),
                                       .w = T4(wave(2), 2, 3, 3, 3),
                                       .bias = T1(wave(3), 2),
                                       .y = T4(y, 2, Ho, Wo, 2),
                                       .stride = 2,
                                       .bottom = 1,
                                       .right = 1};
    lg_conv2d_forward(g_stream, &f);
    CLOSE(y, CONV_Y);
    for (size_t i = 0; i < LG_ARRAY_LEN(residual); i++) residual[i] = 1 - y[i];
    f.residual = T4(residual, 2, Ho, Wo, 2);
    lg_conv2d_forward(g_stream, &f);
    for (size_t i = 0; i < LG_ARRAY_LEN(y); i++) assert_true(fabs(y[i] - 1) <= TOLERANCE);
}

static void t5_buckets(void **state)
{
    enum { BUCKETS = 32, REACH = 140, T = REACH + 1 };
    static double table[BUCKETS], out[T * T];
    for (int i = 0; i < BUCKETS; i++) table[i] = i;
    lg_t5_bias_forward(g_stream, &(struct lg_t5_bias_forward_args){.table = T2(table, BUCKETS, 1),
                                                                   .out = T3(out, 1, T, T),
                                                                   .max_distance = 128});
    assert_int_equal(LG_ARRAY_LEN(T5_BUCKETS), 2 * REACH + 1);
    for (int i = 0; i < T; i++)
        for (int j = 0; j < T; j++)
            assert_int_equal((int)out[i * T + j], T5_BUCKETS[j - i + REACH]);
}

static void timestep_embedding(void **state)
{
    double t[4] = {0, 1, 37.5, 999}, out[4 * 8];
    struct lg_timestep_embedding_forward_args f = {.t = T1(t, 4), .out = T2(out, 4, 8)};
    lg_timestep_embedding_forward(g_stream, &f);
    close_to("no shift", out, TIMESTEP_SHIFT_0, LG_ARRAY_LEN(TIMESTEP_SHIFT_0), 6e-5);
    f.freq_shift = 1;
    lg_timestep_embedding_forward(g_stream, &f);
    close_to("shift 1", out, TIMESTEP_SHIFT_1, LG_ARRAY_LEN(TIMESTEP_SHIFT_1), 6e-5);
}

/* The order within a patch, by what it is for: a patch times the convolution's weights as they lie. */
static void patches(void **state)
{
    double p[2 * 6 * 12], y[2 * 6 * 5], x[2 * 3 * 4 * 6];
    lg_patchify_forward(g_stream, &(struct lg_patchify_forward_args){.x = T4(wave(1), 2, 3, 4, 6),
                                                                     .y = T3(p, 2, 6, 12),
                                                                     .patch = 2});
    lg_linear_forward(g_stream, &(struct lg_linear_forward_args){.x = T2(p, 12, 12),
                                                                 .w = T2(wave(2), 5, 12),
                                                                 .y = T2(y, 12, 5)});
    CLOSE(y, PATCH_EMBED_Y);
    lg_unpatchify_forward(g_stream, &(struct lg_unpatchify_forward_args){.x = T3(wave(1), 2, 6, 12),
                                                                         .y = T4(x, 2, 3, 4, 6),
                                                                         .patch = 2});
    CLOSE(x, UNPATCHIFY_Y);
}

static void linear_gelu(void **state)
{
    double y[3 * 5];
    lg_linear_forward(g_stream, &(struct lg_linear_forward_args){.x = T2(wave(1), 3, 4),
                                                                 .w = T2(wave(2), 5, 4),
                                                                 .bias = T1(wave(3), 5),
                                                                 .y = T2(y, 3, 5),
                                                                 .act = LG_ACT_GELU_TANH});
    CLOSE(y, LINEAR_GELU_Y);
}

/* Ties, the ends of the range, subnormals; and back again without loss. */
static void casts(void **state)
{
    enum { N = LG_ARRAY_LEN(CAST_X) };
    float x[N], back[N];
    uint16_t half[N], again[N];
    memcpy(x, CAST_X, sizeof x);
    const struct {
        lg_dtype type;
        const uint16_t *want;
    } TO[] = {{LG_F16, CAST_F16}, {LG_BF16, CAST_BF16}};
    for (size_t k = 0; k < LG_ARRAY_LEN(TO); k++) {
        lg_tensor wide = lg_t1(x, LG_F32, N), narrow = lg_t1(half, TO[k].type, N);
        lg_tensor rewidened = lg_t1(back, LG_F32, N), renarrowed = lg_t1(again, TO[k].type, N);
        lg_cast(g_stream, &(struct lg_cast_args){.x = wide, .y = narrow});
        assert_memory_equal(half, TO[k].want, sizeof half);
        lg_cast(g_stream, &(struct lg_cast_args){.x = narrow, .y = rewidened});
        lg_cast(g_stream, &(struct lg_cast_args){.x = rewidened, .y = renarrowed});
        assert_memory_equal(again, TO[k].want, sizeof again);
    }
}

static void pixels(void **state)
{
    uint8_t x[6] = {0, 127, 128, 255, 1, 254}, back[6]; /* (1, 2, 1, 3) */
    double y[6], beyond[3] = {-7, 7, 0.999};
    lg_pixels_to_nhwc(g_stream, &(struct lg_pixels_to_nhwc_args){.x = lg_t4(x, LG_U8, 1, 2, 1, 3),
                                                                 .y = T4(y, 1, 1, 3, 2)});
    assert_true(y[0] == -1 && y[1] == 1 && y[2] == 127 / 127.5 - 1);
    lg_nhwc_to_pixels(g_stream, &(struct lg_nhwc_to_pixels_args){
                                    .x = T4(y, 1, 1, 3, 2), .y = lg_t4(back, LG_U8, 1, 2, 1, 3)});
    assert_memory_equal(back, x, sizeof x);
    lg_nhwc_to_pixels(g_stream,
                      &(struct lg_nhwc_to_pixels_args){.x = T4(beyond, 1, 1, 3, 1),
                                                       .y = lg_t4(back, LG_U8, 1, 1, 1, 3)});
    assert_true(back[0] == 0 && back[1] == 255 && back[2] == 255);
}

/* One element worked out by hand from the words of Philox. */
static void diffuse(void **state)
{
    enum { SEED = 99, AT = 5 };
    double mean[6], logvar[6], x_t[6], target[6], coef[4] = {0.25, 0.5, -1, 2}, z[2], e[2];
    int64_t n = 12345678901;
    for (int i = 0; i < 6; i++) mean[i] = 0.1 * i, logvar[i] = -1 + i;
    logvar[AT] = 50; /* clamped to 20 */
    struct lg_diffuse_forward_args f = {.mean = T4(mean, 1, 1, 2, 3),
                                        .logvar = T4(logvar, 1, 1, 2, 3),
                                        .n = lg_t1(&n, LG_I64, 1),
                                        .coef = T2(coef, 1, 4),
                                        .x_t = T4(x_t, 1, 1, 2, 3),
                                        .target = T4(target, 1, 1, 2, 3),
                                        .seed = SEED,
                                        .scaling_factor = 0.5,
                                        .shift_factor = 0.1};
    lg_diffuse_forward(g_stream, &f);
    lg_philox_out a = lg_philox(SEED, LG_PURPOSE_LATENT, (uint64_t)n, AT / 4);
    lg_philox_out b = lg_philox(SEED, LG_PURPOSE_NOISE, (uint64_t)n, AT / 4);
    lg_normal_pair(a.v[0], a.v[1], z);
    lg_normal_pair(b.v[0], b.v[1], e);
    double x0 = (0.1 * AT + exp(10) * z[AT % 4] - 0.1) * 0.5;
    assert_true(fabs(x_t[AT] - (0.25 * x0 + 0.5 * e[AT % 4])) <= 1e-12 * fabs(x0));
    assert_true(fabs(target[AT] - (2 * e[AT % 4] - x0)) <= 1e-12 * fabs(x0));
}

static void reduce_ranks(void **state)
{
    double a[3] = {1, 2, 3}, b[3] = {10, 20, 30}, squares;
    lg_reduce_ranks(g_stream, &(struct lg_reduce_ranks_args){.x = {T1(a, 3), T1(b, 3)},
                                                             .count = 2,
                                                             .y = T1(a, 3),
                                                             .squares = T1(&squares, 1)});
    assert_true(a[0] == 11 && a[1] == 22 && a[2] == 33 && squares == 121 + 484 + 1089);
}

/* The terms are the objective's (stages/nets/objective.h): one sample at each of make_ops.py's timesteps. */
static void learned_range_as_in_improved_ddpm(void **state)
{
    enum { B = 5, C = 12 };
    static const int steps[B] = {0, 0, 1, 500, 999};
    const struct lg_objective o = {
        .kind = LG_OBJECTIVE_EPS, .has_variance = true, .variance_weight = 1};
    double terms[6 * B], weight[2 * B], loss[2 * B], dpred[2 * B * C];
    for (int b = 0; b < B; b++) {
        struct lg_objective_sample s;
        lg_objective_at(&o, steps[b], &s);
        memcpy(terms + 6 * b, s.variance, sizeof s.variance);
        weight[2 * b] = s.weight, weight[2 * b + 1] = s.variance_weight;
    }
    lg_learned_range_loss(g_stream, &(struct lg_learned_range_loss_args){
                                        .pred = T4((double *)LEARNED_RANGE_PRED, B, 2 * C, 1, 1),
                                        .target = T4((double *)LEARNED_RANGE_NOISE, B, C, 1, 1),
                                        .x_t = T4((double *)LEARNED_RANGE_X_T, B, C, 1, 1),
                                        .terms = T2(terms, B, 6),
                                        .weight = T2(weight, B, 2),
                                        .loss = T2(loss, B, 2),
                                        .dpred = T4(dpred, B, 2 * C, 1, 1)});
    /* There a difference of two means enters, 1e-4 of them: that costs four digits. */
    close_to("loss", loss, LEARNED_RANGE_LOSS, LG_ARRAY_LEN(loss), 1e-11);
    close_to("dpred", dpred, LEARNED_RANGE_DPRED, LG_ARRAY_LEN(dpred), 1e-11);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(philox_normals_by_index),
        cmocka_unit_test(adamw),
        cmocka_unit_test(adamw8),
        cmocka_unit_test(adamw8_codes),
        cmocka_unit_test(attention),
        cmocka_unit_test(causal_attention),
        cmocka_unit_test(gelus),
        cmocka_unit_test(norm_modulate),
        cmocka_unit_test(other_norms),
        cmocka_unit_test(conv_with_uneven_padding),
        cmocka_unit_test(t5_buckets),
        cmocka_unit_test(timestep_embedding),
        cmocka_unit_test(patches),
        cmocka_unit_test(linear_gelu),
        cmocka_unit_test(casts),
        cmocka_unit_test(pixels),
        cmocka_unit_test(diffuse),
        cmocka_unit_test(reduce_ranks),
        cmocka_unit_test(learned_range_as_in_improved_ddpm),
    };
    return cmocka_run_group_tests(tests, ref64_open, ref64_close);
}
