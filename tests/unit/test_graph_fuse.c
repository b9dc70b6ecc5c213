/* Fusing (kernels/graph/fuse.c): each rule where it applies and where it must not, and that a fused program computes
 * what the other one does. */
#include "base/check.h"
#include "kernels/graph/fuse.h"
#include "tests/unit/isas.h"
#include "tests/unit/small_graph.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = SMALL_B, T = SMALL_T, D = SMALL_D };

static struct small_graph small, *const f = &small;

static int setup(void **state)
{
    (void)state;
    small_open(f, "ref64", NULL);
    small_begin(f, 1);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_close(f);
    return 0;
}

/* ---- tensors of these tests ---- */

static lg_tensor wanted(const char *name)
{
    return small_wanted(f, name, small_t3(f, B, T, D));
}
static lg_tensor weight(int64_t out, int64_t in)
{
    return small_wanted(f, "w", small_t2(f, out, in));
}
static lg_tensor bias_of(int64_t n)
{
    return small_wanted(f, "bias", small_t1(f, n));
}
static lg_tensor gate(void)
{
    return small_wanted(f, "gate", small_t2(f, B, D));
}
static lg_tensor square(lg_tensor x, lg_act act)
{
    return small_linear(f, x, weight(D, D), bias_of(D), act);
}
static lg_tensor norm(lg_tensor x)
{
    return small_norm(f, x, LG_NONE, LG_NONE);
}
static void end(lg_tensor y)
{
    small_act_into(f, y, small_out(f, y));
}

/* The pass over what was described, and its result against finite differences; the text of the program. */
static char *fused(const char *what, bool train)
{
    if (train) small_grad(f);
    lg_graph_fuse(f->g);
    small_compile(f);
    if (train) {
        small_run(f, LG_PROGRAM_ALL, false);
        small_check_gradients(f, what);
    }
    return small_text(f);
}

/* A forward alone is made too, so that rules of the forward are seen by themselves. */
static void assert_fused(const char *what, void (*describe)(void), bool train, const char *op,
                         int count)
{
    small_begin(f, 1);
    describe();
    char *text = fused(what, train);
    if (small_count(text, op) != count)
        fail_msg("%s: %d %s, not %d:\n%s", what, small_count(text, op), op, count, text);
    free(text);
}
#define FORWARD(describe, op, count)  assert_fused(#describe, describe, false, #op, count)
#define BACKWARD(describe, op, count) assert_fused(#describe, describe, true, #op, count)

/* ---- a residual and the norm of its result ---- */

static void norm_of_a_residual(void)
{
    end(norm(small_residual(f, wanted("x"), wanted("y"), gate())));
}
static void norm_of_an_ungated_residual(void)
{
    end(norm(small_residual(f, wanted("x"), wanted("y"), LG_NONE)));
}
static void norm_whose_modulation_is_made_in_between(void)
{
    lg_tensor r = small_residual(f, wanted("x"), wanted("y"), gate());
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 2 * D)));
    end(small_norm(f, r, lg_slice(mod, 1, 0, D), lg_slice(mod, 1, D, D)));
}
static void norm_behind_another_reader(void)
{
    lg_tensor r = small_residual(f, wanted("x"), wanted("y"), gate()), a = small_act(f, r);
    end(small_mul(f, norm(r), a));
}
static void norm_before_another_reader(void)
{
    lg_tensor r = small_residual(f, wanted("x"), wanted("y"), gate()), n = norm(r);
    end(small_mul(f, n, small_act(f, r)));
}
static void two_norms_of_a_residual(void)
{
    lg_tensor r = small_residual(f, wanted("x"), wanted("y"), gate()), n = norm(r);
    end(small_mul(f, n, norm(r)));
}
static void norm_of_the_residuals_input(void)
{
    lg_tensor x = small_act(f, wanted("x")), r = small_residual(f, x, wanted("y"), gate());
    end(small_mul(f, norm(x), r));
}
/* Each sample is a residual of its own. */
static void norm_of_two_residuals(void)
{
    lg_tensor whole = small_t3(f, B, T, D), r = lg_graph_value(f->g, "r", whole);
    lg_tensor x = wanted("x"), y = wanted("y");
    for (int i = 0; i < B; i++)
        lg_gate_residual_forward(f->s, &(struct lg_gate_residual_forward_args){
                                           .x = lg_slice(x, 0, i, 1),
                                           .y = lg_slice(y, 0, i, 1),
                                           .gate = small_wanted(f, "gate", small_t2(f, 1, D)),
                                           .out = lg_slice(r, 0, i, 1)});
    end(norm(r));
}
/* The residual takes all tokens for one sample's. */
static void norm_of_a_residual_of_another_shape(void)
{
    lg_tensor flat = small_t3(f, 1, B * T, D);
    lg_tensor r = small_residual(f, small_wanted(f, "x", flat), small_wanted(f, "y", flat),
                                 small_wanted(f, "gate", small_t2(f, 1, D)));
    end(norm(lg_at(r, 0, small_t3(f, B, T, D))));
}
static void norm_of_an_act(void)
{
    end(norm(small_act(f, wanted("x"))));
}

static void test_residual_and_norm(void **state)
{
    (void)state;
    FORWARD(norm_of_a_residual, residual_norm_forward, 1);
    FORWARD(norm_of_a_residual, gate_residual_forward, 0);
    FORWARD(norm_of_a_residual, norm_modulate_forward, 0);
    FORWARD(norm_of_an_ungated_residual, residual_norm_forward, 1);
    FORWARD(norm_whose_modulation_is_made_in_between, residual_norm_forward, 1);
    FORWARD(norm_behind_another_reader, residual_norm_forward, 0);
    FORWARD(norm_before_another_reader, residual_norm_forward, 1);
    FORWARD(two_norms_of_a_residual, residual_norm_forward, 1);
    FORWARD(two_norms_of_a_residual, norm_modulate_forward, 1);
    FORWARD(norm_of_the_residuals_input, residual_norm_forward, 0);
    FORWARD(norm_of_two_residuals, residual_norm_forward, 0);
    FORWARD(norm_of_an_act, residual_norm_forward, 0);
    FORWARD(norm_of_a_residual_of_another_shape, residual_norm_forward, 0);
}

/* ---- the backward of both ---- */

static void test_norm_and_residual_backward(void **state)
{
    (void)state;
    BACKWARD(norm_of_a_residual, norm_residual_backward, 1);
    BACKWARD(norm_of_a_residual, norm_modulate_backward, 0);
    BACKWARD(norm_of_a_residual, gate_residual_backward, 0);
    BACKWARD(norm_of_an_ungated_residual, norm_residual_backward, 0);
    BACKWARD(norm_whose_modulation_is_made_in_between, norm_residual_backward, 1);
    BACKWARD(norm_behind_another_reader, norm_residual_backward, 0); /* which adds to the norm's */
    BACKWARD(norm_before_another_reader, norm_residual_backward, 1); /* the norm adds to its */
    BACKWARD(two_norms_of_a_residual, norm_residual_backward, 1);
    BACKWARD(norm_of_the_residuals_input, norm_residual_backward, 0);
    BACKWARD(norm_of_two_residuals, norm_residual_backward, 0);
    BACKWARD(norm_of_an_act, norm_residual_backward, 0);
    BACKWARD(norm_of_a_residual_of_another_shape, norm_residual_backward, 0);
}

/* ---- a clip's convolution and the norm of its result ---- */

static lg_tensor clip(int64_t frames)
{
    return lg_t4(NULL, f->type, frames, T, B, D);
}
/* Of three frames each; y: where its result lies. */
static lg_tensor convolve_into(lg_tensor residual, lg_tensor y)
{
    enum { KERNEL = 3 };
    const int64_t dim[] = {D, KERNEL, KERNEL, KERNEL, D};
    lg_conv3d_forward(f->s, &(struct lg_conv3d_forward_args){
                                .x = small_input(f, "x", clip(y.dim[0] + KERNEL - 1)),
                                .w = small_input(f, "w", lg_tensor_of(NULL, f->type, 5, dim)),
                                .bias = small_input(f, "bias", small_t1(f, D)),
                                .residual = residual,
                                .y = y,
                                .stride_time = 1,
                                .stride = 1,
                                .pad = 1});
    return y;
}
static lg_tensor convolve(lg_tensor residual)
{
    return convolve_into(residual, lg_graph_value(f->g, "convolved", clip(2)));
}
static lg_tensor rows_of(lg_tensor t, int64_t width)
{
    return lg_at(t, 0, small_t2(f, lg_numel(&t) / width, width));
}
static lg_tensor norm_act_into(lg_tensor x, lg_tensor y, int64_t width, lg_tensor mod)
{
    lg_rms_act_forward(f->s, &(struct lg_rms_act_forward_args){.x = rows_of(x, width),
                                                               .y = rows_of(y, width),
                                                               .shift = mod,
                                                               .scale = mod,
                                                               .eps = 0.01,
                                                               .act = LG_ACT_SILU});
    return y;
}
static lg_tensor norm_act(lg_tensor x)
{
    return norm_act_into(x, lg_graph_value(f->g, "normed", x), D, LG_NONE);
}
static void norm_of_a_convolution(void)
{
    end(norm_act(convolve(LG_NONE)));
}
static void norm_of_a_convolution_and_a_residual(void)
{
    end(norm_act(convolve(small_input(f, "residual", clip(2)))));
}
static void norm_beside_a_reader(void)
{
    lg_tensor x = convolve(LG_NONE), n = norm_act(x);
    end(small_mul(f, n, small_act(f, x)));
}
static void norm_behind_a_reader(void)
{
    lg_tensor x = convolve(LG_NONE), a = small_act(f, x);
    end(small_mul(f, norm_act(x), a));
}
/* Behind frames of another maker, which are written between the two. */
static void norm_into_frames_of_another(void)
{
    lg_tensor all = lg_graph_value(f->g, "frames", clip(4)), x = convolve(LG_NONE);
    small_act_into(f, small_input(f, "before", clip(2)), lg_slice(all, 0, 0, 2));
    norm_act_into(x, lg_slice(all, 0, 2, 2), D, LG_NONE);
    end(all);
}
static void norm_of_the_callers(void)
{
    end(norm_act(convolve_into(LG_NONE, small_input(f, "convolved", clip(2)))));
}
static void norm_with_a_modulation(void)
{
    lg_tensor x = convolve(LG_NONE);
    end(norm_act_into(x, lg_graph_value(f->g, "normed", x), D,
                      small_input(f, "mod", small_t1(f, D))));
}
static void norm_over_two_pixels(void)
{
    lg_tensor x = convolve(LG_NONE);
    end(norm_act_into(x, lg_graph_value(f->g, "normed", x), 2 * D, LG_NONE));
}
static void two_norms_of_a_convolution(void)
{
    lg_tensor x = convolve(LG_NONE), n = norm_act(x);
    end(small_mul(f, n, norm_act(x)));
}

/* The convolution norms, and keeps its own result or not, and what comes out has the same bits as without. */
static void assert_norms(const char *what, void (*describe)(void), bool norms, bool keeps)
{
    double *apart = NULL;
    for (int fuses = 0; fuses < 2; fuses++) {
        small_begin(f, 1);
        describe();
        if (fuses) lg_graph_fuse(f->g);
        small_compile(f);
        small_run(f, LG_PROGRAM_FORWARD, false);
        const int64_t n = small_numel(f, f->out);
        if (!fuses) apart = calloc((size_t)n, sizeof *apart);
        LG_ASSERT(apart);
        for (int64_t e = 0; e < n; e++)
            if (!fuses)
                apart[e] = small_get(f, f->out, e);
            else if (!(small_get(f, f->out, e) == apart[e]))
                fail_msg("%s: %.17g, fused %.17g", what, apart[e], small_get(f, f->out, e));
    }
    free(apart);
    char *text = small_text(f), *node = strstr(text, "conv3d_forward");
    assert_non_null(node);
    *strchr(node, '\n') = 0;
    if (!strstr(node, ">normed=") == norms || !strstr(node, ">y=") == keeps)
        fail_msg("%s: %s", what, node);
    free(text);
}
#define NORMS(describe, norms, keeps) assert_norms(#describe, describe, norms, keeps)

static void test_convolution_and_norm(void **state)
{
    (void)state;
    NORMS(norm_of_a_convolution, true, false);
    NORMS(norm_of_a_convolution_and_a_residual, true, false);
    NORMS(norm_beside_a_reader, true, true);
    NORMS(norm_behind_a_reader, true, true);
    NORMS(norm_into_frames_of_another, false, true);
    NORMS(norm_of_the_callers, true, true);
    NORMS(norm_with_a_modulation, false, true);
    NORMS(norm_over_two_pixels, false, true);
    NORMS(two_norms_of_a_convolution, true, true);
}

/* ---- a linear behind an activation ---- */

static void linear_behind_an_activation(void)
{
    end(square(square(wanted("x"), LG_ACT_SILU), LG_ACT_NONE));
}
static void linear_by_columns_behind_an_activation(void)
{
    lg_tensor w = small_input(f, "w", small_t2(f, 3, D + 3));
    lg_tensor x = square(wanted("x"), LG_ACT_SILU);
    end(small_linear(f, x, lg_slice(w, 1, 2, D), LG_NONE, LG_ACT_NONE));
}
static void linears_side_by_side_behind_an_activation(void)
{
    lg_tensor w = small_wanted(f, "w", small_t2(f, 6, D / 2));
    end(small_linear(f, square(wanted("x"), LG_ACT_SILU), w, LG_NONE, LG_ACT_NONE));
}
static void linear_behind_an_act_forward(void)
{
    lg_tensor x = small_mul(f, wanted("x"), wanted("factor"));
    end(square(small_act(f, x), LG_ACT_NONE));
}
/* A run may add to its gradient, which the fused operation cannot. */
static void linear_behind_an_act_of_a_parameter(void)
{
    end(square(small_act(f, wanted("x")), LG_ACT_NONE));
}
static void linear_behind_an_act_that_is_none(void)
{
    lg_tensor x = small_mul(f, wanted("x"), wanted("factor")), y = lg_graph_value(f->g, "y", x);
    lg_act_forward(f->s, &(struct lg_act_forward_args){.x = x, .y = y});
    end(square(y, LG_ACT_NONE));
}
/* The data gradient is another value's too, whose maker stands before or behind the activation. */
static void linear_behind_a_sum(bool before)
{
    lg_tensor z, h = LG_NONE, x = wanted("x");
    if (!before) h = square(x, LG_ACT_SILU);
    z = small_mul(f, x, wanted("factor"));
    if (before) h = square(x, LG_ACT_SILU);
    end(square(small_residual(f, z, h, LG_NONE), LG_ACT_NONE));
}
static void linear_behind_a_sum_of_one_before(void)
{
    linear_behind_a_sum(true);
}
static void linear_behind_a_sum_of_one_in_between(void)
{
    linear_behind_a_sum(false);
}
static void two_linears_behind_an_activation(void)
{
    lg_tensor h = square(wanted("x"), LG_ACT_SILU), a = square(h, LG_ACT_NONE);
    end(small_mul(f, a, square(h, LG_ACT_NONE)));
}
static void linear_behind_an_act_of_what_another_reads(void)
{
    lg_tensor x = small_mul(f, wanted("x"), wanted("factor"));
    lg_tensor y = square(small_act(f, x), LG_ACT_NONE);
    end(small_mul(f, y, small_act(f, x)));
}
/* What the linear's data gradient is made of gets added to before the activation's turn comes. */
static void linear_whose_gradient_goes_on(void)
{
    lg_tensor x = small_mul(f, wanted("x"), wanted("factor"));
    lg_tensor h = square(wanted("u"), LG_ACT_SILU), z = small_act(f, x);
    lg_tensor y = square(h, LG_ACT_NONE);
    end(small_mul(f, small_residual(f, x, y, LG_NONE), z));
}

/* Recorded by hand: dh, of which the activation makes something. */
static void linear_and_act_backward(lg_tensor dh, lg_act act)
{
    lg_tensor rows = small_t2(f, B * T, D), dy = small_input(f, "dy", rows);
    lg_tensor x = small_input(f, "x", rows), w = small_input(f, "w", small_t2(f, D, D));
    lg_linear_backward_data(
        f->s, &(struct lg_linear_backward_data_args){
                  .dy = dy, .w = w, .dx = dh, .act = act, .pre = act != LG_ACT_NONE ? x : LG_NONE});
    lg_act_backward(f->s, &(struct lg_act_backward_args){
                              .x = x, .dy = dh, .dx = small_out(f, rows), .act = LG_ACT_SILU});
}
static void linear_whose_gradient_is_a_value(void)
{
    linear_and_act_backward(lg_graph_value(f->g, "dh", small_t2(f, B * T, D)), LG_ACT_NONE);
}
static void linear_whose_gradient_is_the_callers(void)
{
    linear_and_act_backward(lg_graph_bind(f->g, "dh", small_t2(f, B * T, D)), LG_ACT_NONE);
}
static void linear_that_has_an_activation(void)
{
    linear_and_act_backward(lg_graph_value(f->g, "dh", small_t2(f, B * T, D)), LG_ACT_SILU);
}

static void test_linear_and_activation(void **state)
{
    (void)state;
    BACKWARD(linear_behind_an_activation, act_backward, 1); /* that of the end */
    BACKWARD(linear_by_columns_behind_an_activation, act_backward, 1);
    BACKWARD(linears_side_by_side_behind_an_activation, act_backward, 2); /* they are bare */
    BACKWARD(linear_behind_an_act_forward, act_backward, 1);
    BACKWARD(linear_behind_an_act_of_a_parameter, act_backward, 2);
    BACKWARD(linear_behind_a_sum_of_one_before, act_backward, 2);
    BACKWARD(linear_behind_a_sum_of_one_in_between, act_backward, 2);
    BACKWARD(two_linears_behind_an_activation, act_backward, 2);
    BACKWARD(linear_behind_an_act_of_what_another_reads, act_backward, 3); /* one adds */
    BACKWARD(linear_behind_an_act_that_is_none, act_backward, 2);
    BACKWARD(linear_whose_gradient_goes_on, act_backward, 2);
    FORWARD(linear_whose_gradient_is_a_value, act_backward, 0);
    FORWARD(linear_whose_gradient_is_the_callers, act_backward, 1);
    FORWARD(linear_that_has_an_activation, act_backward, 1);
}

/* ---- the gradient of a bias ---- */

/* Linears whose bias is summed on its own. */
static int own_biases(const char *text)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, "linear_backward_weight")); at++) {
        const char *dbias = strstr(at, ">dbias"), *line = strchr(at, '\n');
        count += dbias && dbias < line;
    }
    return count;
}
static void assert_own_biases(const char *what, void (*describe)(void), int count)
{
    small_begin(f, 1);
    describe();
    char *text = fused(what, true);
    if (own_biases(text) != count)
        fail_msg("%s: %d biases are summed on their own, not %d:\n%s", what, own_biases(text),
                 count, text);
    free(text);
}
#define OWN_BIASES(describe, count) assert_own_biases(#describe, describe, count)

static void bias_before_a_gate(void)
{
    end(small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), gate()));
}
static void bias_before_a_gate_and_a_norm(void)
{
    end(norm(small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), gate())));
}
static void bias_before_an_ungated_residual(void)
{
    end(small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), LG_NONE));
}
static void bias_before_an_ungated_residual_and_a_norm(void)
{
    end(norm(small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), LG_NONE)));
}
/* The norm adds to the gradient that the gated residual has left. */
static void bias_before_a_norm_and_a_reader(void)
{
    lg_tensor r = small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), LG_NONE);
    end(small_residual(f, r, norm(r), gate()));
}
/* The reader adds to the norm's gradient. */
static void bias_before_a_reader_and_a_norm(void)
{
    lg_tensor r = small_residual(f, wanted("x"), square(wanted("y"), LG_ACT_NONE), LG_NONE);
    lg_tensor a = small_act(f, r);
    end(small_mul(f, a, norm(r)));
}
/* Vectors of D, w's rows norm one of a token each. */
static lg_tensor norm_vectors(lg_tensor x)
{
    const lg_tensor shape = lg_tensor_of(NULL, x.dtype, 4, x.dim);
    lg_tensor y = lg_graph_value(f->g, "n", shape);
    lg_rms_norm_forward(f->s, &(struct lg_rms_norm_forward_args){
                                  .x = x,
                                  .w = small_wanted(f, "w", small_t2(f, x.dim[2], D)),
                                  .y = y,
                                  .each = 1,
                                  .eps = 0.1});
    return lg_at(y, 0, small_t3(f, B, T, x.dim[2] * D));
}
/* A linear, 2 * width features a row, as two vectors a token. */
static void norm_of_vectors(int64_t rows, int64_t width)
{
    lg_tensor x = small_wanted(f, "x", small_t2(f, rows, D));
    lg_tensor y = small_linear(f, x, weight(2 * width, D), bias_of(2 * width), LG_ACT_NONE);
    end(norm_vectors(lg_at(y, 0, lg_t4(NULL, f->type, B, T, 2, D))));
}
static void bias_before_a_norm_of_vectors(void)
{
    norm_of_vectors(B * T, D);
}
static void bias_before_a_norm_of_vectors_of_other_rows(void)
{
    norm_of_vectors(B * T * 2, D / 2);
}
/* Of packed q, k and v the norms have q and k, from feature `first` on, and attention has v, from `values` on. */
static void attend_normed(lg_tensor x, int64_t first, int64_t values)
{
    lg_tensor qkv = small_linear(f, x, weight(3 * D, D), bias_of(3 * D), LG_ACT_NONE);
    lg_tensor qk = norm_vectors(lg_split(lg_slice(qkv, 2, first, 2 * D), 2, D));
    end(small_attention(f, lg_slice(qk, 2, 0, D), lg_slice(qk, 2, D, D),
                        lg_slice(qkv, 2, values, D), LG_NONE));
}
static void bias_of_packed_and_normed(void)
{
    attend_normed(wanted("x"), 0, 2 * D);
}
static void bias_of_values_in_front_of_what_is_normed(void)
{
    attend_normed(wanted("x"), D, 0);
}
/* Part i of what is packed as a value of its own. */
static lg_tensor copy_of_part(lg_tensor packed, int i)
{
    lg_tensor y = lg_graph_value(f->g, "part", small_t3(f, B, T, D));
    const lg_tensor rows = lg_at(packed, 0, small_t2(f, B * T, packed.dim[2]));
    lg_copy_rows(f->s, &(struct lg_copy_rows_args){.x = lg_slice(rows, 1, i * D, D),
                                                   .y = lg_at(y, 0, small_t2(f, B * T, D))});
    return y;
}
/* Attention's values are a copy of what was packed, whose gradient comes before the norm's. */
static void bias_of_values_copied(void)
{
    lg_tensor packed = small_linear(f, wanted("x"), weight(3 * D, D), bias_of(3 * D), LG_ACT_NONE);
    lg_tensor qk = norm_vectors(lg_split(lg_slice(packed, 2, 0, 2 * D), 2, D));
    end(small_attention(f, lg_slice(qk, 2, 0, D), lg_slice(qk, 2, D, D), copy_of_part(packed, 2),
                        LG_NONE));
}
/* It comes when the norm's has; a fourth part's comes before. */
static void bias_of_values_made_elsewhere(void)
{
    lg_tensor packed = small_linear(f, wanted("x"), weight(4 * D, D), bias_of(4 * D), LG_ACT_NONE);
    lg_tensor v = copy_of_part(packed, 2);
    lg_tensor qk = norm_vectors(lg_split(lg_slice(packed, 2, 0, 2 * D), 2, D));
    lg_tensor o = small_attention(f, lg_slice(qk, 2, 0, D), lg_slice(qk, 2, D, D), v, LG_NONE);
    end(small_mul(f, o, copy_of_part(packed, 3)));
}
static void bias_before_an_activation(void)
{
    lg_tensor h = square(wanted("x"), LG_ACT_SILU);
    end(small_linear(f, h, weight(D, D), LG_NONE, LG_ACT_NONE));
}
static void bias_before_a_linear(void)
{
    lg_tensor h = square(wanted("x"), LG_ACT_NONE);
    end(small_linear(f, h, weight(D, D), LG_NONE, LG_ACT_NONE));
}
/* order: which third of the packed buffer q, k and v are. */
static void attend_to_packed(int q, int k, int v)
{
    lg_tensor qkv = small_linear(f, wanted("x"), weight(3 * D, D), bias_of(3 * D), LG_ACT_NONE);
    end(small_attention(f, lg_slice(qkv, 2, q * D, D), lg_slice(qkv, 2, k * D, D),
                        lg_slice(qkv, 2, v * D, D), LG_NONE));
}
static void bias_of_packed_attention(void)
{
    attend_to_packed(0, 1, 2);
}
static void bias_of_attention_packed_otherwise(void)
{
    attend_to_packed(0, 2, 1);
}
static void bias_of_attention_to_others(void)
{
    lg_tensor q = square(wanted("x"), LG_ACT_NONE);
    lg_tensor kv = small_linear(f, wanted("u"), weight(2 * D, D), bias_of(2 * D), LG_ACT_NONE);
    end(small_attention(f, q, lg_slice(kv, 2, 0, D), lg_slice(kv, 2, D, D), LG_NONE));
}
/* Both get their gradient from one operation, which can sum once. */
static void two_biases_before_a_gate(void)
{
    lg_tensor a = square(wanted("a"), LG_ACT_NONE), b = square(wanted("b"), LG_ACT_NONE);
    end(small_residual(f, wanted("x"), small_add(f, a, b), gate()));
}
/* One gradient, whose halves are those of two linears. */
static void two_biases_of_halves(lg_tensor (*reader)(lg_tensor))
{
    lg_tensor y = lg_graph_value(f->g, "y", small_t3(f, B, T, D));
    for (int i = 0; i < B; i++)
        lg_linear_forward(
            f->s, &(struct lg_linear_forward_args){.x = small_wanted(f, "x", small_t2(f, T, D)),
                                                   .w = weight(D, D),
                                                   .bias = bias_of(D),
                                                   .y = lg_at(y, i * T * D, small_t2(f, T, D))});
    end(reader(y));
}
static lg_tensor gated(lg_tensor y)
{
    return small_residual(f, wanted("x"), y, gate());
}
static lg_tensor act_and_linear(lg_tensor y)
{
    return small_linear(f, small_act(f, y), weight(D, D), LG_NONE, LG_ACT_NONE);
}
static void two_biases_of_halves_before_an_activation(void)
{
    two_biases_of_halves(act_and_linear);
}
static void two_biases_of_halves_before_a_gate(void)
{
    two_biases_of_halves(gated);
}
static void two_biases_of_halves_before_a_norm(void)
{
    two_biases_of_halves(norm);
}
/* Rows of half the length are another's whole ones. */
static void bias_of_rows_of_another_length(void)
{
    lg_tensor x = small_wanted(f, "x", small_t2(f, 2 * B * T, D / 2));
    lg_tensor y = small_linear(f, x, weight(D / 2, D / 2), bias_of(D / 2), LG_ACT_SILU);
    y = lg_at(y, 0, small_t3(f, B, T, D));
    end(small_linear(f, y, weight(D, D), LG_NONE, LG_ACT_NONE));
}
/* In the backward what is summed first is made last. */
static void bias_used_twice(void)
{
    lg_tensor w = weight(D, D), bias = bias_of(D);
    lg_tensor a = small_linear(f, wanted("a"), w, bias, LG_ACT_NONE);
    lg_tensor b = small_linear(f, wanted("b"), w, bias, LG_ACT_NONE);
    end(small_residual(f, small_residual(f, wanted("x"), b, gate()), a, gate()));
}

static void test_biases(void **state)
{
    (void)state;
    OWN_BIASES(bias_before_a_gate, 0);
    OWN_BIASES(bias_before_a_gate_and_a_norm, 0);
    OWN_BIASES(bias_before_an_ungated_residual, 1);
    OWN_BIASES(bias_before_an_ungated_residual_and_a_norm, 0);
    OWN_BIASES(bias_before_a_norm_and_a_reader, 0);
    OWN_BIASES(bias_before_a_reader_and_a_norm, 1);
    OWN_BIASES(bias_before_a_norm_of_vectors, 0);
    OWN_BIASES(bias_before_a_norm_of_vectors_of_other_rows, 1);
    OWN_BIASES(bias_of_packed_and_normed, 0);
    OWN_BIASES(bias_of_values_in_front_of_what_is_normed, 1);
    OWN_BIASES(bias_of_values_copied, 0);
    OWN_BIASES(bias_of_values_made_elsewhere, 1);
    OWN_BIASES(bias_before_an_activation, 0);
    OWN_BIASES(bias_before_a_linear, 1);
    OWN_BIASES(bias_of_packed_attention, 0);
    OWN_BIASES(bias_of_attention_packed_otherwise, 1);
    OWN_BIASES(bias_of_attention_to_others, 2);
    OWN_BIASES(two_biases_before_a_gate, 1);
    OWN_BIASES(two_biases_of_halves_before_a_gate, 2);
    OWN_BIASES(two_biases_of_halves_before_a_norm, 2);
    OWN_BIASES(two_biases_of_halves_before_an_activation, 2);
    OWN_BIASES(bias_of_rows_of_another_length, 1);
    OWN_BIASES(bias_used_twice, 1); /* what is added comes in its turn */
}

/* ---- a whole block ---- */

static void describe_block(void)
{
    lg_tensor mod = small_act(f, small_wanted(f, "condition", small_t2(f, B, 6 * D)));
    end(small_block(f, small_act(f, wanted("x")), mod));
}

/* One block forward and backward: each rule applies once or more, no bias is summed on its own, and the residual
 * stream's gradient is added to where it lies. */
static void test_print(void **state)
{
    (void)state;
    describe_block();
    small_grad(f);
    lg_graph_fuse(f->g);
    small_assert_print(
        f,
        "v0 condition f64 2,24: 384 bytes, bound 0, used up to n25\n"
        "v1 act f64 2,24: 384 bytes at 1152, made by n0, used up to n23\n"
        "v2 x f64 2,3,4: 192 bytes, bound 1, used up to n24\n"
        "v3 act f64 2,3,4: 192 bytes at 2304, made by n1, used up to n23\n"
        "v4 norm f64 2,3,4: 192 bytes at 2496, made by n2, used up to n21\n"
        "v5 mean f64 2,3: 48 bytes at 3968, made by n2, used up to n23\n"
        "v6 rstd f64 2,3: 48 bytes at 4032, made by n2, used up to n23\n"
        "v7 w f64 12,4: 384 bytes, bound 2, used up to n22\n"
        "v8 bias f64 12: 96 bytes, bound 3, used up to n3\n"
        "v9 linear f64 2,3,12: 576 bytes at 0, made by n3, used up to n20\n"
        "v10 attention f64 2,3,4: 192 bytes at 2688, made by n4, used up to n20\n"
        "v11 w f64 4,4: 128 bytes, bound 4, used up to n19\n"
        "v12 bias f64 4: 32 bytes, bound 5, used up to n5\n"
        "v13 linear f64 2,3,4: 192 bytes at 960, made by n5, used up to n17\n"
        "v14 residual f64 2,3,4: 192 bytes at 2880, made by n6, used up to n17\n"
        "v15 norm f64 2,3,4: 192 bytes at 3072, made by n6, used up to n15\n"
        "v16 mean f64 2,3: 48 bytes at 4096, made by n6, used up to n17\n"
        "v17 rstd f64 2,3: 48 bytes at 4160, made by n6, used up to n17\n"
        "v18 w f64 8,4: 256 bytes, bound 6, used up to n16\n"
        "v19 bias f64 8: 64 bytes, bound 7, used up to n7\n"
        "v20 linear f64 2,3,8: 384 bytes at 576, made by n7, used up to n13\n"
        "v21 w f64 4,8: 256 bytes, bound 8, used up to n14\n"
        "v22 bias f64 4: 32 bytes, bound 9, used up to n8\n"
        "v23 linear f64 2,3,4: 192 bytes at 3264, made by n8, used up to n12\n"
        "v24 residual f64 2,3,4: 192 bytes at 1920, made by n9, used up to n11\n"
        "v25 out f64 2,3,4: 192 bytes, bound 10, made by n10, used up to n10\n"
        "v26 d out f64 2,3,4: 192 bytes, bound 11, used up to n11\n"
        "v27 gradient f64 2,24: 384 bytes, bound 12, made by n25, used up to n25\n"
        "v28 gradient f64 2,3,4: 192 bytes, bound 13, made by n24, used up to n24\n"
        "v29 gradient f64 12,4: 384 bytes, bound 14, made by n21, used up to n21\n"
        "v30 gradient f64 12: 96 bytes, bound 15, made by n20, used up to n20\n"
        "v31 gradient f64 4,4: 128 bytes, bound 16, made by n18, used up to n18\n"
        "v32 gradient f64 4: 32 bytes, bound 17, made by n17, used up to n17\n"
        "v33 gradient f64 8,4: 256 bytes, bound 18, made by n15, used up to n15\n"
        "v34 gradient f64 8: 64 bytes, bound 19, made by n14, used up to n14\n"
        "v35 gradient f64 4,8: 256 bytes, bound 20, made by n13, used up to n13\n"
        "v36 gradient f64 4: 32 bytes, bound 21, made by n12, used up to n12\n"
        "v37 lse f64 2,2,3: 96 bytes at 3840, made by n4, used up to n20\n"
        "v38 pre f64 6,8: 384 bytes at 1536, made by n7, used up to n14\n"
        "v39 d residual f64 2,3,4: 192 bytes at 3456, made by n11, used up to n17\n"
        "v40 d linear f64 2,3,4: 192 bytes at 3648, made by n12, used up to n14\n"
        "v41 d act f64 2,24: 384 bytes at 1920, made by n12, used up to n25\n"
        "v42 d linear f64 2,3,8: 384 bytes\n"
        "v43 d pre f64 6,8: 384 bytes at 576, made by n14, used up to n16\n"
        "v44 d norm f64 2,3,4: 192 bytes at 1536, made by n16, used up to n17\n"
        "v45 d residual f64 2,3,4: 192 bytes at 3456 in place of v39, made by n17, used up to n23\n"
        "v46 d linear f64 2,3,4: 192 bytes at 576, made by n17, used up to n19\n"
        "v47 d attention f64 2,3,4: 192 bytes at 1536, made by n19, used up to n20\n"
        "v48 d linear f64 2,3,12: 576 bytes at 576, made by n20, used up to n22\n"
        "v49 d norm f64 2,3,4: 192 bytes at 0, made by n22, used up to n23\n"
        "v50 d residual f64 2,3,4: 192 bytes at 3456 in place of v39, made by n23, used up to n24\n"
        "n0 act_forward act=1 | x=v0(2,24) >y=v1(2,24)\n"
        "n1 act_forward act=1 | x=v2(2,3,4) >y=v3(2,3,4)\n"
        "n2 norm_modulate_forward eps=0.01 rms=0 | x=v3(2,3,4) shift=v1(2,4/24) "
        "scale=v1+32(2,4/24) "
        ">y=v4(2,3,4) >mean=v5(2,3) >rstd=v6(2,3)\n"
        "n3 linear_forward act=0 | x=v4(6,4) w=v7(12,4) bias=v8(12) >y=v9(6,12)\n"
        "n4 attention_forward scale=0.7 causal=0 first_queries=0 first_keys=0 | q=v9(2,3,2,2/12) "
        "k=v9+32(2,3,2,2/12) "
        "v=v9+64(2,3,2,2/12) "
        ">o=v10(2,3,2,2) >lse=v37(2,2,3)\n"
        "n5 linear_forward act=0 | x=v10(6,4) w=v11(4,4) bias=v12(4) >y=v13(6,4)\n"
        "n6 residual_norm_forward norm.eps=0.01 norm.rms=0 | residual.x=v3(2,3,4) "
        "residual.y=v13(2,3,4) "
        "residual.gate=v1+64(2,4/24) >residual.out=v14(2,3,4) norm.x=v14(2,3,4) "
        "norm.shift=v1+96(2,4/24) norm.scale=v1+128(2,4/24) >norm.y=v15(2,3,4) >norm.mean=v16(2,3) "
        ">norm.rstd=v17(2,3)\n"
        "n7 linear_forward act=2 | x=v15(6,4) w=v18(8,4) bias=v19(8) >y=v20(6,8) >pre=v38(6,8)\n"
        "n8 linear_forward act=0 | x=v20(6,8) w=v21(4,8) bias=v22(4) >y=v23(6,4)\n"
        "n9 gate_residual_forward | x=v14(2,3,4) y=v23(2,3,4) gate=v1+160(2,4/24) >out=v24(2,3,4)\n"
        "n10 act_forward act=1 | x=v24(2,3,4) >y=v25(2,3,4)\n"
        "n11 backward act_backward act=1 accumulate=0 | x=v24(2,3,4) dy=v26(2,3,4) >dx=v39(2,3,4)\n"
        "n12 backward gate_residual_backward accumulate_dbias=0 | dout=v39(2,3,4) y=v23(2,3,4) "
        "gate=v1+160(2,4/24) >dy=v40(2,3,4) >dgate=v41+160(2,4/24) >dbias=v36(4)\n"
        "n13 backward linear_backward_weight accumulate=0 | dy=v40(6,4) x=v20(6,8) >dw=v35(4,8)\n"
        "n14 backward linear_backward_data accumulate=0 act=2 accumulate_dbias=0 | dy=v40(6,4) "
        "w=v21(4,8) >dx=v43(6,8) pre=v38(6,8) >dbias=v34(8)\n"
        "n15 backward linear_backward_weight accumulate=0 | dy=v43(6,8) x=v15(6,4) >dw=v33(8,4)\n"
        "n16 backward linear_backward_data accumulate=0 act=0 accumulate_dbias=0 | dy=v43(6,8) "
        "w=v18(8,4) >dx=v44(6,4)\n"
        "n17 backward norm_residual_backward norm.accumulate=1 norm.rms=0 norm.accumulate_dbias=0 "
        "residual.accumulate_dbias=0 | "
        "norm.dy=v44(2,3,4) norm.x=v14(2,3,4) norm.mean=v16(2,3) norm.rstd=v17(2,3) "
        "norm.scale=v1+128(2,4/24) >norm.dx=v45(2,3,4) >norm.dshift=v41+96(2,4/24) "
        ">norm.dscale=v41+128(2,4/24) residual.dout=v45(2,3,4) residual.y=v13(2,3,4) "
        "residual.gate=v1+64(2,4/24) >residual.dy=v46(2,3,4) >residual.dgate=v41+64(2,4/24) "
        ">residual.dbias=v32(4)\n"
        "n18 backward linear_backward_weight accumulate=0 | dy=v46(6,4) x=v10(6,4) >dw=v31(4,4)\n"
        "n19 backward linear_backward_data accumulate=0 act=0 accumulate_dbias=0 | dy=v46(6,4) "
        "w=v11(4,4) >dx=v47(6,4)\n"
        "n20 backward attention_backward accumulate_dbias=0 scale=0.7 first_queries=0 first_keys=0 "
        "| dout=v47(2,3,2,2) "
        "o=v10(2,3,2,2) q=v9(2,3,2,2/12) k=v9+32(2,3,2,2/12) v=v9+64(2,3,2,2/12) lse=v37(2,2,3) "
        ">dq=v48(2,3,2,2/12) >dk=v48+32(2,3,2,2/12) >dv=v48+64(2,3,2,2/12) >dbias=v30(12)\n"
        "n21 backward linear_backward_weight accumulate=0 | dy=v48(6,12) x=v4(6,4) >dw=v29(12,4)\n"
        "n22 backward linear_backward_data accumulate=0 act=0 accumulate_dbias=0 | dy=v48(6,12) "
        "w=v7(12,4) >dx=v49(6,4)\n"
        "n23 backward norm_modulate_backward accumulate=1 rms=0 accumulate_dbias=0 | dy=v49(2,3,4) "
        "x=v3(2,3,4) "
        "mean=v5(2,3) "
        "rstd=v6(2,3) scale=v1+32(2,4/24) >dx=v50(2,3,4) >dshift=v41(2,4/24) "
        ">dscale=v41+32(2,4/24)\n"
        "n24 backward act_backward act=1 accumulate=0 | x=v2(2,3,4) dy=v50(2,3,4) >dx=v28(2,3,4)\n"
        "n25 backward act_backward act=1 accumulate=0 | x=v0(2,24) dy=v41(2,24) >dx=v27(2,24)\n"
        "26 nodes, 51 values, arena 4224 bytes, of which n12 uses 4128\n");
}

/* ---- what is computed ---- */

/* All gradients, and the result. */
static double *results(int64_t *ret_n)
{
    int64_t n = 0, at = 0;
    for (int i = 0; i < f->n; i++) n += f->wanted[i] || i == f->out ? small_numel(f, i) : 0;
    double *v = malloc((size_t)n * sizeof *v);
    LG_ASSERT(v);
    small_run(f, LG_PROGRAM_ALL, false);
    for (int i = 0; i < f->n; i++) {
        int of = i == f->out ? i : f->gradient[i];
        for (int64_t e = 0; (f->wanted[i] || i == f->out) && e < small_numel(f, i); e++)
            v[at++] = small_get(f, of, e);
    }
    *ret_n = n;
    return v;
}

static double *compute(uint64_t seed, bool fuse, int64_t *ret_n, int *ret_nodes)
{
    if (seed) {
        small_random(f, seed);
    } else {
        small_begin(f, 1);
        describe_block();
    }
    small_grad(f);
    if (fuse) lg_graph_fuse(f->g);
    small_compile(f);
    char *text = small_text(f);
    const char *nodes = strstr(text, " nodes, ");
    while (nodes[-1] != '\n') nodes--;
    *ret_nodes = atoi(nodes);
    free(text);
    return results(ret_n);
}

/* Every bit, but where the bias of k is no more summed: what its gradient is of rounding is then 0. Returns how many
 * nodes fusing has saved. */
static int compare(uint64_t seed, double rounding)
{
    int64_t n, m;
    int apart, together;
    double *a = compute(seed, false, &n, &apart), *b = compute(seed, true, &m, &together);
    double sum = 0;
    assert_int_equal(n, m);
    for (int64_t i = 0; i < n; i++) sum += a[i] * a[i];
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i] && !(b[i] == 0 && fabs(a[i]) <= rounding * sqrt(sum)))
            fail_msg("seed %llu: %.17g, fused %.17g", (unsigned long long)seed, a[i], b[i]);
    free(a);
    free(b);
    return apart - together;
}

static void compare_all(double rounding)
{
    int saved = 0;
    for (uint64_t seed = 0; seed < 300; seed++) saved += compare(seed, rounding);
    assert_true(saved > 100);
}

static void test_ref64_computes_the_same(void **state)
{
    (void)state;
    compare_all(1e-15);
}

static int compare_on(const char *isa)
{
    small_close(f);
    small_open(f, "host", isa);
    compare_all(1e-7);
    return 0;
}

static void test_host_computes_the_same(void **state)
{
    (void)state;
    for_each_isa(compare_on);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_residual_and_norm),
        TEST(test_norm_and_residual_backward),
        TEST(test_convolution_and_norm),
        TEST(test_linear_and_activation),
        TEST(test_biases),
        TEST(test_print),
        TEST(test_ref64_computes_the_same),
        TEST(test_host_computes_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
