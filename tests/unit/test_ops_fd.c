/* Every backward operation of ref64 against finite differences of its forward.
 *
 * The scalar L = sum of r y over the forward's output y, with random r, has the gradient that the
 * backward gives for dy = r. Each element x_i is moved by +-h and +-2h, and
 *     (8 (L(+h) - L(-h)) - (L(+2h) - L(-2h))) / 12h
 * has a truncation error of h^4 L'''''/30 and a rounding error of about 1e-16 |L| / h: with h = 1e-3
 * both lie near 1e-12, five digits below the tolerance. */
#include "base/check.h"
#include "kernels/ops.h"
#include "tests/unit/ref64_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define TOLERANCE 1e-7
#define STEP      1e-3
enum { ARRAYS_MAX = 64 };

static double *arrays[ARRAYS_MAX]; /* of the running test */
static int n_arrays;

static int free_arrays(void **state)
{
    while (n_arrays > 0) free(arrays[--n_arrays]);
    return 0;
}

static double *zeros(int64_t n)
{
    LG_ASSERT(n_arrays < ARRAYS_MAX);
    double *v = calloc((size_t)n, sizeof *v);
    LG_ASSERT(v);
    return arrays[n_arrays++] = v;
}

/* Standard normals, others for each array of a test. */
static double *normals(int64_t n)
{
    double *v = zeros(n);
    lg_philox_normal_f64(v, (size_t)n, 1, LG_PURPOSE_TEST, (uint64_t)n_arrays, 0);
    return v;
}

/* NaN: what a backward that overwrites starts from. */
static double *poison(int64_t n)
{
    double *v = zeros(n);
    for (int64_t i = 0; i < n; i++) v[i] = NAN;
    return v;
}

#define T1(v, a)          lg_t1((v), LG_F64, (a))
#define T2(v, a, b)       lg_t2((v), LG_F64, (a), (b))
#define T3(v, a, b, c)    lg_t3((v), LG_F64, (a), (b), (c))
#define T4(v, a, b, c, d) lg_t4((v), LG_F64, (a), (b), (c), (d))

/* L: runs the forward with the given arguments and adds up r y. */
struct loss {
    void (*forward)(const void *args);
    const void *args;
    const double *y, *r;
    int64_t n;
};

#define FORWARD(op)                                                                                \
    static void run_##op(const void *args)                                                         \
    {                                                                                              \
        lg_##op(g_stream, args);                                                                   \
    }
FORWARD(linear_forward)
FORWARD(act_forward)
FORWARD(mul_forward)
FORWARD(add_forward)
FORWARD(norm_modulate_forward)
FORWARD(gate_residual_forward)
FORWARD(rms_norm_forward)
FORWARD(attention_forward)
FORWARD(rope)
FORWARD(embedding_forward)
FORWARD(unpatchify_forward)
FORWARD(mse_loss)
FORWARD(glu_forward)
FORWARD(layer_norm_forward)
FORWARD(shift_forward)
FORWARD(conv2d_forward)
FORWARD(upsample2x_forward)
FORWARD(learned_range_loss)

static double loss_at(const struct loss *l, double *x, double value)
{
    double was = *x, sum = 0;
    *x = value;
    l->forward(l->args);
    *x = was;
    for (int64_t i = 0; i < l->n; i++) sum += l->r[i] * l->y[i];
    return sum;
}

/* gradient - before is dL/dx for the n elements of x; before: what it was accumulated to, or NULL. */
static void check(const char *what, const struct loss *l, double *x, int64_t n,
                  const double *gradient, const double *before)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double near = loss_at(l, &x[i], x[i] + STEP) - loss_at(l, &x[i], x[i] - STEP);
        double far = loss_at(l, &x[i], x[i] + 2 * STEP) - loss_at(l, &x[i], x[i] - 2 * STEP);
        double numeric = (8 * near - far) / (12 * STEP);
        double analytic = before ? gradient[i] - before[i] : gradient[i];
        difference += (numeric - analytic) * (numeric - analytic);
        norm += numeric * numeric;
    }
    double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    if (!(error <= TOLERANCE)) fail_msg("%s: relative error %.3g", what, error);
}

static double *copy_of(const double *v, int64_t n)
{
    double *c = zeros(n);
    for (int64_t i = 0; i < n; i++) c[i] = v[i];
    return c;
}

/* The gradient of the residual is that of the result. */
static void linear_with(int64_t M, int64_t K, int64_t N, bool accumulate)
{
    double *x = normals(M * K), *w = normals(N * K), *bias = normals(N), *y = poison(M * N);
    double *r = normals(M * N);
    struct lg_linear_forward_args f = {
        .x = T2(x, M, K), .w = T2(w, N, K), .bias = T1(bias, N), .y = T2(y, M, N)};
    double *residual = normals(M * N);
    f.residual = T2(residual, M, N);
    struct loss l = {run_linear_forward, &f, y, r, M * N};
    double *dx = accumulate ? normals(M * K) : poison(M * K);
    double *dw = accumulate ? normals(N * K) : poison(N * K);
    double *db = accumulate ? normals(N) : poison(N);
    const double *dx0 = accumulate ? copy_of(dx, M * K) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, N * K) : NULL;
    const double *db0 = accumulate ? copy_of(db, N) : NULL;
    lg_linear_backward_data(g_stream,
                            &(struct lg_linear_backward_data_args){
                                .dy = T2(r, M, N), .w = f.w, .dx = T2(dx, M, K), accumulate});
    lg_linear_backward_weight(
        g_stream,
        &(struct lg_linear_backward_weight_args){
            .dy = T2(r, M, N), .x = f.x, .dw = T2(dw, N, K), .dbias = T1(db, N), accumulate});
    check("dx", &l, x, M * K, dx, dx0);
    check("dw", &l, w, N * K, dw, dw0);
    check("dbias", &l, bias, N, db, db0);
    check("dresidual", &l, residual, M * N, r, NULL);
}

/* Two products side by side, by columns of a wider w. */
static void linears_with(bool accumulate)
{
    enum { M = 5, K = 3, N = 4, G = 2, WIDE = K + 2 };
    double *x = normals(M * G * K), *w = normals(G * N * WIDE), *y = poison(M * G * N);
    double *r = normals(M * G * N), *dx = accumulate ? normals(M * G * K) : poison(M * G * K);
    double *dw = accumulate ? normals(G * N * K) : poison(G * N * K), *narrow = zeros(G * N * K);
    const double *dx0 = accumulate ? copy_of(dx, M * G * K) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, G * N * K) : NULL;
    struct lg_linear_forward_args f = {
        .x = T2(x, M, G * K), .w = lg_slice(T2(w, G * N, WIDE), 1, 1, K), .y = T2(y, M, G * N)};
    struct loss l = {run_linear_forward, &f, y, r, M * G * N};
    lg_linear_backward_data(
        g_stream, &(struct lg_linear_backward_data_args){
                      .dy = T2(r, M, G * N), .w = f.w, .dx = T2(dx, M, G * K), accumulate});
    lg_linear_backward_weight(
        g_stream,
        &(struct lg_linear_backward_weight_args){
            .dy = T2(r, M, G * N), .x = f.x, .dw = T2(dw, G * N, K), .accumulate = accumulate});
    check("dx", &l, x, M * G * K, dx, dx0);
    for (int i = 0; i < G * N * K; i++) narrow[i] = w[i / K * WIDE + 1 + i % K];
    f.w = T2(narrow, G * N, K);
    check("dw", &l, narrow, G * N * K, dw, dw0);
}

static void linear(void **state)
{
    linears_with(false);
    linears_with(true);
    linear_with(1, 1, 1, false);
    linear_with(5, 7, 3, false);
    linear_with(4, 6, 8, true);
}

/* The way through the activation: pre is kept by the forward and feeds act_backward. */
static void linear_with_activation(void **state)
{
    enum { M = 3, K = 5, N = 4 };
    static const lg_act ACTS[] = {LG_ACT_SILU, LG_ACT_GELU_TANH};
    for (size_t k = 0; k < LG_ARRAY_LEN(ACTS); k++) {
        double *x = normals(M * K), *w = normals(N * K), *y = poison(M * N), *pre = poison(M * N);
        double *r = normals(M * N), *dpre = poison(M * N), *dx = poison(M * K);
        struct lg_linear_forward_args f = {.x = T2(x, M, K),
                                           .w = T2(w, N, K),
                                           .y = T2(y, M, N),
                                           .pre = T2(pre, M, N),
                                           .act = ACTS[k]};
        struct loss l = {run_linear_forward, &f, y, r, M * N};
        run_linear_forward(&f);
        lg_act_backward(g_stream,
                        &(struct lg_act_backward_args){
                            .x = f.pre, .dy = T2(r, M, N), .dx = T2(dpre, M, N), .act = ACTS[k]});
        lg_linear_backward_data(g_stream, &(struct lg_linear_backward_data_args){
                                              .dy = T2(dpre, M, N), .w = f.w, .dx = T2(dx, M, K)});
        check("dx", &l, x, M * K, dx, NULL);
    }
}

/* Two layers with an activation between them: the backward of the second one gives dpre and the
 * first one's bias gradient at once. */
struct two_layers {
    struct lg_linear_forward_args first, second;
};
static void run_two_layers(const void *args)
{
    const struct two_layers *a = args;
    lg_linear_forward(g_stream, &a->first);
    lg_linear_forward(g_stream, &a->second);
}
static void linear_through_activation(void **state)
{
    enum { M = 5, K = 4, N = 6, P = 3 };
    double *x = normals(M * K), *w1 = normals(N * K), *b1 = normals(N), *w2 = normals(P * N);
    double *pre = poison(M * N), *h = poison(M * N), *y = poison(M * P), *r = normals(M * P);
    double *dpre = poison(M * N), *db = normals(N);
    const double *db0 = copy_of(db, N);
    struct two_layers f = {.first = {.x = T2(x, M, K),
                                     .w = T2(w1, N, K),
                                     .bias = T1(b1, N),
                                     .y = T2(h, M, N),
                                     .pre = T2(pre, M, N),
                                     .act = LG_ACT_GELU_TANH},
                           .second = {.x = T2(h, M, N), .w = T2(w2, P, N), .y = T2(y, M, P)}};
    struct loss l = {run_two_layers, &f, y, r, M * P};
    run_two_layers(&f);
    lg_linear_backward_data(g_stream,
                            &(struct lg_linear_backward_data_args){.dy = T2(r, M, P),
                                                                   .w = f.second.w,
                                                                   .dx = T2(dpre, M, N),
                                                                   .act = LG_ACT_GELU_TANH,
                                                                   .pre = f.first.pre,
                                                                   .dbias = T1(db, N),
                                                                   .accumulate_dbias = true});
    check("bias of the layer below", &l, b1, N, db, db0);
    double *dw = poison(N * K);
    lg_linear_backward_weight(g_stream,
                              &(struct lg_linear_backward_weight_args){
                                  .dy = T2(dpre, M, N), .x = f.first.x, .dw = T2(dw, N, K)});
    check("dw of the layer below", &l, w1, N * K, dw, NULL);
}

static void activations(void **state)
{
    enum { N = 33 };
    static const lg_act ACTS[] = {LG_ACT_NONE, LG_ACT_SILU,     LG_ACT_GELU_TANH,
                                  LG_ACT_RELU, LG_ACT_GELU_ERF, LG_ACT_QUICK_GELU};
    for (size_t k = 0; k < LG_ARRAY_LEN(ACTS); k++) {
        double *x = normals(N), *y = poison(N), *r = normals(N), *dx = normals(N);
        const double *dx0 = copy_of(dx, N);
        for (int i = 0; i < N; i++) { /* away from ReLU's corner */
            if (fabs(x[i]) < 0.1) x[i] += 0.5;
        }
        struct lg_act_forward_args f = {.x = T1(x, N), .y = T1(y, N), .act = ACTS[k]};
        struct loss l = {run_act_forward, &f, y, r, N};
        struct lg_act_backward_args b = {
            .x = f.x, .dy = T1(r, N), .dx = T1(dx, N), .act = ACTS[k], .accumulate = true};
        lg_act_backward(g_stream, &b);
        check("accumulated dx", &l, x, N, dx, dx0);
        b.accumulate = false;
        lg_act_backward(g_stream, &b);
        check("dx", &l, x, N, dx, NULL);
    }
}

/* Nets use mul_forward and sum_rows as the backwards of mul and of a repeated addend. */
static void products_and_sums(void **state)
{
    enum { M = 4, N = 5 };
    double *a = normals(M * N), *b = normals(M * N), *y = poison(M * N), *r = normals(M * N);
    double *da = poison(M * N), *row = normals(N), *drow = normals(N);
    const double *drow0 = copy_of(drow, N);
    struct lg_mul_forward_args mul = {.a = T2(a, M, N), .b = T2(b, M, N), .y = T2(y, M, N)};
    lg_mul_forward(g_stream,
                   &(struct lg_mul_forward_args){.a = T2(r, M, N), .b = mul.b, .y = T2(da, M, N)});
    check("da of a b", &(struct loss){run_mul_forward, &mul, y, r, M * N}, a, M * N, da, NULL);

    struct lg_add_forward_args add = {.a = T2(a, M, N), .b = T1(row, N), .y = T2(y, M, N)};
    lg_sum_rows(g_stream,
                &(struct lg_sum_rows_args){.x = T2(r, M, N), .y = T1(drow, N), .accumulate = true});
    check("db of a + b", &(struct loss){run_add_forward, &add, y, r, M * N}, row, N, drow, drow0);
}

/* Columns [from, from + n) of rows of `stride` elements. */
static lg_tensor slice(double *rows, int64_t count, int64_t stride, int64_t from, int64_t n)
{
    return lg_slice(T2(rows, count, stride), 1, from, n);
}

/* The same of (B, T) rows, as heads (B, T, H, D). */
static lg_tensor heads(double *rows, const int64_t dim[4], int64_t stride, int64_t from)
{
    lg_tensor t = slice(rows, dim[0] * dim[1], stride, from, dim[2] * dim[3]);
    return lg_split(lg_split(t, 1, dim[3]), 0, dim[1]);
}

struct norm_kind {
    bool mod, accumulate, rms;
};

static void norm_with(int64_t B, int64_t T, int64_t D, struct norm_kind k)
{
    int64_t n = B * T * D, stride = 3 * D;
    double *x = normals(n), *y = poison(n), *r = normals(n), *m = normals(B * stride);
    double *mean = poison(B * T), *rstd = poison(B * T), *dm = zeros(B * stride);
    double *dx = k.accumulate ? normals(n) : poison(n);
    const double *dx0 = k.accumulate ? copy_of(dx, n) : NULL;
    struct lg_norm_modulate_forward_args f = {.x = T3(x, B, T, D),
                                              .y = T3(y, B, T, D),
                                              .mean = T2(mean, B, T),
                                              .rstd = T2(rstd, B, T),
                                              .eps = 1e-6,
                                              .rms = k.rms};
    struct lg_norm_modulate_backward_args b = {.dy = T3(r, B, T, D),
                                               .x = f.x,
                                               .mean = f.mean,
                                               .rstd = f.rstd,
                                               .dx = T3(dx, B, T, D),
                                               .accumulate = k.accumulate,
                                               .rms = k.rms};
    if (k.mod) {
        f.shift = slice(m, B, stride, 0, D), f.scale = slice(m, B, stride, 2 * D, D);
        b.dshift = slice(dm, B, stride, 0, D), b.dscale = slice(dm, B, stride, 2 * D, D);
        b.scale = f.scale;
    }
    struct loss l = {run_norm_modulate_forward, &f, y, r, n};
    run_norm_modulate_forward(&f);
    lg_norm_modulate_backward(g_stream, &b);
    /* The differences disturb mean and rstd, which the backward has read already. */
    check("dx", &l, x, n, dx, dx0);
    check("dshift, dscale and the unused slice", &l, m, B * stride, dm, NULL);
}

static void norm_modulate(void **state)
{
    norm_with(1, 1, 3, (struct norm_kind){.mod = true});
    norm_with(3, 4, 5, (struct norm_kind){.mod = true, .accumulate = true});
    norm_with(2, 3, 7, (struct norm_kind){.mod = false});
    norm_with(3, 4, 5, (struct norm_kind){.mod = true, .rms = true});
    norm_with(2, 3, 7, (struct norm_kind){.accumulate = true, .rms = true});
}

/* Tokens of h vectors in a buffer of wider rows; what lies between them stays. */
static lg_tensor vectors(double *v, int64_t B, int64_t T, int64_t h, int64_t D, int64_t stride)
{
    lg_tensor t = T4(v, B, T, h, D);
    t.stride[0] = T * stride, t.stride[1] = stride;
    return t;
}

struct rms {
    int64_t g;
    int each;
    int64_t D;
    bool accumulate, turned;
};
static void rms_norm_with(struct rms z)
{
    enum { B = 2, T = 3 };
    const int64_t g = z.g, D = z.D;
    const int each = z.each;
    const bool accumulate = z.accumulate;
    const int64_t h = g * each, stride = h * D + 2, n = B * T * stride;
    double *x = normals(n), *w = normals(g * D), *y = zeros(n), *r = normals(n);
    double *angle = normals(T * D / 2), *sine = poison(T * D / 2);
    double *rstd = poison(B * T * h), *dx = accumulate ? normals(n) : zeros(n);
    double *dw = accumulate ? normals(g * D) : poison(g * D);
    const double *dx0 = accumulate ? copy_of(dx, n) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, g * D) : NULL;
    struct lg_rms_norm_forward_args f = {.x = vectors(x, B, T, h, D, stride),
                                         .w = T2(w, g, D),
                                         .y = vectors(y, B, T, h, D, stride),
                                         .rstd = T3(rstd, B, T, h),
                                         .each = each,
                                         .eps = 1e-2};
    for (int64_t i = 0; i < T * D / 2; i++) sine[i] = sin(angle[i]), angle[i] = cos(angle[i]);
    if (z.turned) f.cos = T2(angle, T, D / 2), f.sin = T2(sine, T, D / 2);
    struct loss l = {run_rms_norm_forward, &f, y, r, n};
    run_rms_norm_forward(&f);
    lg_rms_norm_backward(g_stream,
                         &(struct lg_rms_norm_backward_args){.dy = vectors(r, B, T, h, D, stride),
                                                             .x = f.x,
                                                             .w = f.w,
                                                             .cos = f.cos,
                                                             .sin = f.sin,
                                                             .rstd = f.rstd,
                                                             .dx = vectors(dx, B, T, h, D, stride),
                                                             .dw = T2(dw, g, D),
                                                             .each = each,
                                                             .accumulate = accumulate,
                                                             .accumulate_dw = accumulate});
    check("dx and the gaps", &l, x, n, dx, dx0);
    check("dw", &l, w, g * D, dw, dw0);
}

static void rms_norm(void **state)
{
    rms_norm_with((struct rms){1, 1, 5, false, false});
    rms_norm_with((struct rms){2, 2, 3, true, false});
    rms_norm_with((struct rms){2, 1, 4, false, false});
    rms_norm_with((struct rms){2, 2, 4, false, true});
    rms_norm_with((struct rms){1, 3, 6, false, true});
}

static void layer_norm_with(int64_t M, int64_t D, bool accumulate)
{
    double *x = normals(M * D), *w = normals(D), *b = normals(D), *y = poison(M * D);
    double *r = normals(M * D), *mean = poison(M), *rstd = poison(M);
    double *dx = accumulate ? normals(M * D) : poison(M * D);
    double *dw = accumulate ? normals(D) : poison(D), *db = accumulate ? normals(D) : poison(D);
    const double *dx0 = accumulate ? copy_of(dx, M * D) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, D) : NULL;
    const double *db0 = accumulate ? copy_of(db, D) : NULL;
    struct lg_layer_norm_forward_args f = {.x = T2(x, M, D),
                                           .w = T1(w, D),
                                           .b = T1(b, D),
                                           .y = T2(y, M, D),
                                           .mean = T1(mean, M),
                                           .rstd = T1(rstd, M),
                                           .eps = 1e-2};
    struct loss l = {run_layer_norm_forward, &f, y, r, M * D};
    run_layer_norm_forward(&f);
    lg_layer_norm_backward(g_stream,
                           &(struct lg_layer_norm_backward_args){.dy = T2(r, M, D),
                                                                 .x = f.x,
                                                                 .w = f.w,
                                                                 .mean = f.mean,
                                                                 .rstd = f.rstd,
                                                                 .dx = T2(dx, M, D),
                                                                 .dw = T1(dw, D),
                                                                 .db = T1(db, D),
                                                                 .accumulate = accumulate,
                                                                 .accumulate_dw = accumulate});
    check("dx", &l, x, M * D, dx, dx0);
    check("dw", &l, w, D, dw, dw0);
    check("db", &l, b, D, db, db0);
}

static void layer_norm(void **state)
{
    layer_norm_with(1, 3, false);
    layer_norm_with(4, 7, true);
}

/* The statistics move with x. */
struct normed_groups {
    struct lg_group_mean_var_forward_args stats;
    struct lg_group_norm_forward_args norm;
};
static void run_normed_groups(const void *args)
{
    const struct normed_groups *a = args;
    lg_group_mean_var_forward(g_stream, &a->stats);
    lg_group_norm_forward(g_stream, &a->norm);
}

static void group_norm_with(lg_act act, bool accumulate)
{
    enum { N = 2, H = 3, W = 2, C = 6, G = 3, n = N * H * W * C };
    double *x = normals(n), *w = normals(C), *b = normals(C), *y = poison(n), *r = normals(n);
    double *mean_var = poison(N * G * 2), *dx = accumulate ? normals(n) : poison(n);
    double *dw = accumulate ? normals(C) : poison(C), *db = accumulate ? normals(C) : poison(C);
    const double *dx0 = accumulate ? copy_of(dx, n) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, C) : NULL;
    const double *db0 = accumulate ? copy_of(db, C) : NULL;
    struct normed_groups f = {.stats = {.x = T4(x, N, H, W, C), .mean_var = T3(mean_var, N, G, 2)},
                              .norm = {.x = T4(x, N, H, W, C),
                                       .mean_var = T3(mean_var, N, G, 2),
                                       .w = T1(w, C),
                                       .b = T1(b, C),
                                       .y = T4(y, N, H, W, C),
                                       .groups = G,
                                       .eps = 1e-2,
                                       .act = act}};
    struct loss l = {run_normed_groups, &f, y, r, n};
    run_normed_groups(&f);
    lg_group_norm_backward(g_stream,
                           &(struct lg_group_norm_backward_args){.dy = T4(r, N, H, W, C),
                                                                 .x = f.norm.x,
                                                                 .mean_var = f.norm.mean_var,
                                                                 .w = f.norm.w,
                                                                 .b = f.norm.b,
                                                                 .dx = T4(dx, N, H, W, C),
                                                                 .dw = T1(dw, C),
                                                                 .db = T1(db, C),
                                                                 .groups = G,
                                                                 .eps = f.norm.eps,
                                                                 .act = act,
                                                                 .accumulate = accumulate,
                                                                 .accumulate_dw = accumulate});
    check("dx", &l, x, n, dx, dx0);
    check("dw", &l, w, C, dw, dw0);
    check("db", &l, b, C, db, db0);
}

static void group_norm(void **state)
{
    group_norm_with(LG_ACT_NONE, true);
    group_norm_with(LG_ACT_SILU, false);
}

static void glu(void **state)
{
    enum { M = 3, D = 5 };
    double *x = normals(M * 2 * D), *y = poison(M * D), *r = normals(M * D);
    struct lg_glu_forward_args f = {.x = T2(x, M, 2 * D), .y = T2(y, M, D), .act = LG_ACT_GELU_ERF};
    struct loss l = {run_glu_forward, &f, y, r, M * D};
    double *dx = copy_of(x, M * 2 * D); /* in its place */
    lg_glu_backward(g_stream, &(struct lg_glu_backward_args){.dy = T2(r, M, D),
                                                             .x = T2(dx, M, 2 * D),
                                                             .dx = T2(dx, M, 2 * D),
                                                             .act = f.act});
    check("dx", &l, x, M * 2 * D, dx, NULL);
}

static void shift(void **state)
{
    enum { B = 2, T = 4, D = 3, n = B * T * D, STRIDE = 2 * D };
    double *x = normals(n), *y = poison(n), *r = normals(n), *m = normals(B * STRIDE);
    double *dm = zeros(B * STRIDE);
    struct lg_shift_forward_args f = {
        .x = T3(x, B, T, D), .shift = slice(m, B, STRIDE, D, D), .y = T3(y, B, T, D)};
    struct loss l = {run_shift_forward, &f, y, r, n};
    lg_shift_backward(g_stream, &(struct lg_shift_backward_args){
                                    .dy = T3(r, B, T, D), .dshift = slice(dm, B, STRIDE, D, D)});
    check("dx", &l, x, n, r, NULL);
    check("dshift and the unused slice", &l, m, B * STRIDE, dm, NULL);
}

static void convolution_with(int k, int stride, const int pad[4], bool accumulate)
{
    enum { N = 2, H = 5, W = 4, I = 3, O = 2 };
    const int64_t Ho = (H + pad[0] + pad[2] - k) / stride + 1;
    const int64_t Wo = (W + pad[1] + pad[3] - k) / stride + 1;
    const int64_t nx = N * H * W * I, nw = O * k * k * I, ny = N * Ho * Wo * O;
    double *x = normals(nx), *w = normals(nw), *bias = normals(O), *y = poison(ny);
    double *r = normals(ny), *residual = normals(ny);
    double *dx = accumulate ? normals(nx) : poison(nx), *dw = accumulate ? normals(nw) : poison(nw);
    double *db = accumulate ? normals(O) : poison(O);
    const double *dx0 = accumulate ? copy_of(dx, nx) : NULL;
    const double *dw0 = accumulate ? copy_of(dw, nw) : NULL;
    const double *db0 = accumulate ? copy_of(db, O) : NULL;
    struct lg_conv2d_forward_args f = {.x = T4(x, N, H, W, I),
                                       .w = T4(w, O, k, k, I),
                                       .bias = T1(bias, O),
                                       .residual = T4(residual, N, Ho, Wo, O),
                                       .y = T4(y, N, Ho, Wo, O),
                                       .stride = stride,
                                       .top = pad[0],
                                       .left = pad[1],
                                       .bottom = pad[2],
                                       .right = pad[3]};
    struct loss l = {run_conv2d_forward, &f, y, r, ny};
    lg_conv2d_backward_data(g_stream,
                            &(struct lg_conv2d_backward_data_args){.dy = T4(r, N, Ho, Wo, O),
                                                                   .w = f.w,
                                                                   .dx = T4(dx, N, H, W, I),
                                                                   .stride = stride,
                                                                   .top = pad[0],
                                                                   .left = pad[1],
                                                                   .bottom = pad[2],
                                                                   .right = pad[3],
                                                                   .accumulate = accumulate});
    lg_conv2d_backward_weight(g_stream,
                              &(struct lg_conv2d_backward_weight_args){.dy = T4(r, N, Ho, Wo, O),
                                                                       .x = f.x,
                                                                       .dw = T4(dw, O, k, k, I),
                                                                       .dbias = T1(db, O),
                                                                       .stride = stride,
                                                                       .top = pad[0],
                                                                       .left = pad[1],
                                                                       .bottom = pad[2],
                                                                       .right = pad[3],
                                                                       .accumulate = accumulate});
    check("dx", &l, x, nx, dx, dx0);
    check("dw", &l, w, nw, dw, dw0);
    check("dbias", &l, bias, O, db, db0);
    check("dresidual", &l, residual, ny, r, NULL);
}

static void convolution(void **state)
{
    convolution_with(1, 1, (const int[]){0, 0, 0, 0}, true);
    convolution_with(3, 1, (const int[]){1, 1, 1, 1}, false);
    convolution_with(3, 2, (const int[]){1, 1, 1, 1}, true);
    convolution_with(3, 2, (const int[]){1, 0, 0, 1}, false);
}

static void upsampling(void **state)
{
    enum { N = 2, H = 3, W = 2, C = 2, n = N * H * W * C };
    for (int cut = 0; cut < 4; cut++) {
        const int64_t Ho = 2 * H - cut % 2, Wo = 2 * W - cut / 2, ny = N * Ho * Wo * C;
        double *x = normals(n), *y = poison(ny), *r = normals(ny), *dx = normals(n);
        const double *dx0 = copy_of(dx, n);
        struct lg_upsample2x_forward_args f = {.x = T4(x, N, H, W, C), .y = T4(y, N, Ho, Wo, C)};
        struct loss l = {run_upsample2x_forward, &f, y, r, ny};
        struct lg_upsample2x_backward_args b = {
            .dy = T4(r, N, Ho, Wo, C), .dx = T4(dx, N, H, W, C), .accumulate = true};
        lg_upsample2x_backward(g_stream, &b);
        check("accumulated dx", &l, x, n, dx, dx0);
        b.accumulate = false;
        lg_upsample2x_backward(g_stream, &b);
        check("dx", &l, x, n, dx, NULL);
    }
}

static void gate_residual(void **state)
{
    enum { B = 3, T = 4, D = 5, n = B * T * D, STRIDE = 2 * D };
    double *x = normals(n), *y = normals(n), *out = poison(n), *r = normals(n), *dy = poison(n);
    double *m = normals(B * STRIDE), *dm = zeros(B * STRIDE), *db = poison(D);
    struct lg_gate_residual_forward_args f = {.x = T3(x, B, T, D),
                                              .y = T3(y, B, T, D),
                                              .gate = slice(m, B, STRIDE, D, D),
                                              .out = T3(out, B, T, D)};
    struct loss l = {run_gate_residual_forward, &f, out, r, n};
    lg_gate_residual_backward(
        g_stream, &(struct lg_gate_residual_backward_args){.dout = T3(r, B, T, D),
                                                           .y = f.y,
                                                           .gate = f.gate,
                                                           .dy = T3(dy, B, T, D),
                                                           .dgate = slice(dm, B, STRIDE, D, D),
                                                           .dbias = T1(db, D)});
    for (int i = 0; i < D; i++) {
        double sum = 0;
        for (int row = 0; row < B * T; row++) sum += dy[row * D + i];
        assert_true(fabs(db[i] - sum) < 1e-12);
    }
    check("dx", &l, x, n, r, NULL);
    check("dy", &l, y, n, dy, NULL);
    check("dgate and the unused slice", &l, m, B * STRIDE, dm, NULL);
}

/* Self-attention on one packed buffer, which a bias is added to. */
struct biased_attention {
    struct lg_add_forward_args bias;
    struct lg_attention_forward_args attention;
};
static void run_biased_attention(const void *args)
{
    const struct biased_attention *a = args;
    lg_add_forward(g_stream, &a->bias);
    lg_attention_forward(g_stream, &a->attention);
}

static void attention_packed(void **state)
{
    enum { B = 2, T = 4, H = 2, D = 3, W = H * D, n = B * T * 3 * W };
    double *qkv = normals(n), *dqkv = poison(n), *o = poison(B * T * W), *r = normals(B * T * W);
    double *lse = poison(B * H * T), *bias = zeros(3 * W), *db = normals(3 * W), *sum = zeros(n);
    const double *db0 = copy_of(db, 3 * W);
    const int64_t dim[] = {B, T, H, D};
    struct lg_attention_forward_args f = {.q = heads(qkv, dim, 3 * W, 0),
                                          .k = heads(qkv, dim, 3 * W, W),
                                          .v = heads(qkv, dim, 3 * W, 2 * W),
                                          .o = T4(o, B, T, H, D),
                                          .lse = T3(lse, B, H, T),
                                          .scale = 0.6};
    struct loss l = {run_attention_forward, &f, o, r, B * T * W};
    run_attention_forward(&f);
    lg_attention_backward(g_stream,
                          &(struct lg_attention_backward_args){.dout = T4(r, B, T, H, D),
                                                               .o = f.o,
                                                               .q = f.q,
                                                               .k = f.k,
                                                               .v = f.v,
                                                               .lse = f.lse,
                                                               .dq = heads(dqkv, dim, 3 * W, 0),
                                                               .dk = heads(dqkv, dim, 3 * W, W),
                                                               .dv = heads(dqkv, dim, 3 * W, 2 * W),
                                                               .dbias = T1(db, 3 * W),
                                                               .accumulate_dbias = true,
                                                               .scale = f.scale});
    check("dqkv", &l, qkv, n, dqkv, NULL);
    struct biased_attention biased = {
        .bias = {.a = T2(qkv, B * T, 3 * W), .b = T1(bias, 3 * W), .y = T2(sum, B * T, 3 * W)},
        .attention = f};
    biased.attention.q.data = sum, biased.attention.k.data = sum + W;
    biased.attention.v.data = sum + 2 * W;
    check("dbias", &(struct loss){run_biased_attention, &biased, o, r, B * T * W}, bias, 3 * W, db,
          db0);
}

/* Cross-attention with lengths; q and dq, kv and dkv have strides of their own. */
static void attention_masked(void **state)
{
    enum { B = 3, TQ = 3, TK = 5, H = 2, D = 3, W = H * D };
    int32_t length[B] = {5, 1, 3};
    double *q = normals(B * TQ * W), *kv = normals(B * TK * 2 * W), *o = poison(B * TQ * W);
    double *r = normals(B * TQ * W), *lse = poison(B * H * TQ);
    double *dq = zeros(B * TQ * (W + 1)), *dk = poison(B * TK * W), *dv = poison(B * TK * W);
    const int64_t q_dim[] = {B, TQ, H, D}, k_dim[] = {B, TK, H, D};
    struct lg_attention_forward_args f = {.q = T4(q, B, TQ, H, D),
                                          .k = heads(kv, k_dim, 2 * W, 0),
                                          .v = heads(kv, k_dim, 2 * W, W),
                                          .k_length = lg_t1(length, LG_I32, B),
                                          .o = T4(o, B, TQ, H, D),
                                          .lse = T3(lse, B, H, TQ),
                                          .scale = 0.6};
    struct loss l = {run_attention_forward, &f, o, r, B * TQ * W};
    run_attention_forward(&f);
    lg_attention_backward(g_stream,
                          &(struct lg_attention_backward_args){.dout = T4(r, B, TQ, H, D),
                                                               .o = f.o,
                                                               .q = f.q,
                                                               .k = f.k,
                                                               .v = f.v,
                                                               .k_length = f.k_length,
                                                               .lse = f.lse,
                                                               .dq = heads(dq, q_dim, W + 1, 0),
                                                               .dk = T4(dk, B, TK, H, D),
                                                               .dv = T4(dv, B, TK, H, D),
                                                               .scale = f.scale});
    double *dq_dense = zeros(B * TQ * W), *dkv = zeros(B * TK * 2 * W);
    for (int i = 0; i < B * TQ * W; i++) dq_dense[i] = dq[i / W * (W + 1) + i % W];
    for (int i = 0; i < B * TK * W; i++) {
        dkv[i / W * 2 * W + i % W] = dk[i];
        dkv[i / W * 2 * W + W + i % W] = dv[i];
    }
    check("dq", &l, q, B * TQ * W, dq_dense, NULL);
    check("dk, dv", &l, kv, B * TK * 2 * W, dkv, NULL);
}

static void embedding(void **state)
{
    enum { M = 6, V = 4, D = 3 };
    int32_t ids[M] = {3, 0, 3, 1, 3, 0}; /* repeated, and one never used */
    double *table = normals(V * D), *y = poison(M * D), *r = normals(M * D), *dt = normals(V * D);
    const double *dt0 = copy_of(dt, V * D);
    struct lg_embedding_forward_args f = {
        .ids = lg_t1(ids, LG_I32, M), .table = T2(table, V, D), .y = T2(y, M, D)};
    struct lg_embedding_backward_args b = {
        .ids = f.ids, .dy = T2(r, M, D), .dtable = T2(dt, V, D), .accumulate = true};
    struct loss l = {run_embedding_forward, &f, y, r, M * D};
    lg_embedding_backward(g_stream, &b);
    check("accumulated dtable", &l, table, V * D, dt, dt0);
    b.accumulate = false;
    lg_embedding_backward(g_stream, &b);
    check("dtable", &l, table, V * D, dt, NULL);
}

static void unpatchify(void **state)
{
    enum { B = 2, C = 3, P = 2, H = 4, W = 6, T = (H / P) * (W / P), n = B * C * H * W };
    double *x = normals(n), *y = poison(n), *r = normals(n), *dx = poison(n);
    for (int first = 0; first < 2; first++) {
        struct lg_unpatchify_forward_args f = {.x = T3(x, B, T, P * P * C),
                                               .y = T4(y, B, C, H, W),
                                               .patch = P,
                                               .channels_first = first};
        struct loss l = {run_unpatchify_forward, &f, y, r, n};
        lg_unpatchify_backward(g_stream,
                               &(struct lg_unpatchify_backward_args){.dy = T4(r, B, C, H, W),
                                                                     .dx = T3(dx, B, T, P * P * C),
                                                                     .patch = P,
                                                                     .channels_first = first});
        check("dx", &l, x, n, dx, NULL);
    }
}

/* The gradient is the turn by the negative angles, and a copy of what was copied; samples lie apart. */
static void rope(void **state)
{
    enum { B = 2, T = 3, H = 3, P = 3, EACH = H * 2 * P, WIDE = EACH + 4, ALL = B * T };
    enum { n = ALL * EACH };
    double *x = normals(ALL * WIDE), *y = poison(n), *r = normals(n), *dx = zeros(ALL * WIDE);
    double *cosine = normals(T * P), *sine = normals(T * P);
    const int64_t dim[] = {B, T, H, 2 * P};
    struct lg_rope_args f = {.x = heads(x, dim, WIDE, 2),
                             .cos = T2(cosine, T, P),
                             .sin = T2(sine, T, P),
                             .y = T4(y, B, T, H, 2 * P),
                             .turned = 2};
    struct loss l = {run_rope, &f, y, r, n};
    struct lg_rope_args b = f;
    b.x = T4(r, B, T, H, 2 * P);
    b.y = heads(dx, dim, WIDE, 2);
    b.inverse = true;
    lg_rope(g_stream, &b);
    check("dx and what lies between", &l, x, ALL * WIDE, dx, NULL);
}

/* L is the weighted sum of the samples' losses; the void sample holds NaN and gives 0. */
static void mse(void **state)
{
    enum { B = 3, EACH = 2 * 2 * 3, n = B * EACH };
    double *pred = normals(n), *target = normals(n), *loss = poison(B), *dpred = poison(n);
    double weight[B] = {0.7, 0, 1.9};
    struct lg_mse_loss_args f = {.pred = T4(pred, B, 2, 2, 3),
                                 .target = T4(target, B, 2, 2, 3),
                                 .weight = T1(weight, B),
                                 .loss = T1(loss, B)};
    struct lg_mse_loss_args b = f;
    b.dpred = T4(dpred, B, 2, 2, 3);
    for (int i = 0; i < EACH; i++) target[EACH + i] = NAN;
    lg_mse_loss(g_stream, &b);
    assert_true(loss[1] == 0);
    check("dpred", &(struct loss){run_mse_loss, &f, loss, weight, B}, pred, n, dpred, NULL);
}

/* dv belongs to the second part of the loss alone, de' to the first alone. */
static void learned_range(void **state)
{
    enum { B = 3, EACH = 2 * 2 * 3, n = B * EACH };
    double *pred = normals(2 * n), *target = normals(n), *x_t = normals(n);
    double *loss = poison(2 * B), *dpred = poison(2 * n);
    double terms[6 * B] = {-1.3, 0.4, 0.7, 1.1,  -0.6, 0,   -1,  1,    1,
                           1,    1,   1,   -1.1, 0.2,  0.6, 1.2, -0.4, 1};
    double weight[2 * B] = {0.7, 0.4, 0, 0, 1.9, 1.3}, noise[2 * B], variance[2 * B];
    for (int i = 0; i < 2 * B; i++) {
        noise[i] = i % 2 ? 0 : weight[i];
        variance[i] = i % 2 ? weight[i] : 0;
    }
    struct lg_learned_range_loss_args f = {.pred = T4(pred, B, 4, 2, 3),
                                           .target = T4(target, B, 2, 2, 3),
                                           .x_t = T4(x_t, B, 2, 2, 3),
                                           .terms = T2(terms, B, 6),
                                           .weight = T2(weight, B, 2),
                                           .loss = T2(loss, B, 2)};
    struct lg_learned_range_loss_args b = f;
    b.dpred = T4(dpred, B, 4, 2, 3);
    for (int i = 0; i < EACH; i++) target[EACH + i] = x_t[EACH + i] = NAN;
    lg_learned_range_loss(g_stream, &b);
    assert_true(loss[2] == 0 && loss[3] == 0);
    for (int s = 0; s < B; s++) {
        double *of = pred + 2 * s * EACH, *d = dpred + 2 * s * EACH;
        check("de", &(struct loss){run_learned_range_loss, &f, loss, noise, 2 * B}, of, EACH, d,
              NULL);
        check("dv", &(struct loss){run_learned_range_loss, &f, loss, variance, 2 * B}, of + EACH,
              EACH, d + EACH, NULL);
    }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_teardown(f, free_arrays)
    const struct CMUnitTest tests[] = {
        TEST(linear),
        TEST(linear_with_activation),
        TEST(linear_through_activation),
        TEST(activations),
        TEST(products_and_sums),
        TEST(norm_modulate),
        TEST(rms_norm),
        TEST(layer_norm),
        TEST(group_norm),
        TEST(glu),
        TEST(shift),
        TEST(convolution),
        TEST(upsampling),
        TEST(gate_residual),
        TEST(attention_packed),
        TEST(attention_masked),
        TEST(embedding),
        TEST(unpatchify),
        TEST(rope),
        TEST(mse),
        TEST(learned_range),
    };
    return cmocka_run_group_tests(tests, ref64_open, ref64_close);
}
