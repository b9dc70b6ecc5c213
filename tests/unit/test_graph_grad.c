/* Differentiation of graphs (kernels/graph/grad.c): each rule against finite differences, how contributions meet,
 * random graphs, adding to what is there, and what is refused. On ref64: in double the differences of a wrong rule are
 * far above those of rounding. */
#include "base/check.h"
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

static lg_tensor x3(void)
{
    return small_t3(f, B, T, D);
}
static lg_tensor wanted(const char *name)
{
    return small_wanted(f, name, x3());
}
static lg_tensor frozen(const char *name)
{
    return small_input(f, name, x3());
}
static lg_tensor weight(int64_t out, int64_t in)
{
    return small_wanted(f, "w", small_t2(f, out, in));
}
static lg_tensor bias_of(int64_t n)
{
    return small_wanted(f, "bias", small_t1(f, n));
}
static lg_tensor chunk(lg_tensor mod, int i)
{
    return lg_slice(mod, 1, i * D, D);
}
/* Not a straight line, so that a gradient that forgets where it is taken shows. */
static void end(lg_tensor y)
{
    small_act_into(f, y, small_out(f, y));
}

static void differentiate(const char *what)
{
    small_grad(f);
    small_compile(f);
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, what);
}

/* ---- each rule alone ---- */

static void linear_plain(void)
{
    end(small_linear(f, wanted("x"), weight(5, D), LG_NONE, LG_ACT_NONE));
}
static void linear_with_bias(void)
{
    end(small_linear(f, wanted("x"), weight(5, D), bias_of(5), LG_ACT_NONE));
}
static void linear_with_silu(void)
{
    end(small_linear(f, wanted("x"), weight(5, D), LG_NONE, LG_ACT_SILU));
}
static void linear_with_bias_and_gelu(void)
{
    end(small_linear(f, wanted("x"), weight(5, D), bias_of(5), LG_ACT_GELU_TANH));
}
static void linear_whose_input_is_frozen(void)
{
    end(small_linear(f, frozen("x"), weight(5, D), bias_of(5), LG_ACT_SILU));
}
static void linear_whose_bias_is_frozen(void)
{
    lg_tensor bias = small_input(f, "bias", small_t1(f, 5));
    end(small_linear(f, wanted("x"), weight(5, D), bias, LG_ACT_SILU));
}
static void linear_whose_weight_and_bias_are_frozen(void)
{
    lg_tensor w = small_input(f, "w", small_t2(f, 5, D));
    lg_tensor bias = small_input(f, "bias", small_t1(f, 5));
    end(small_linear(f, wanted("x"), w, bias, LG_ACT_NONE));
}
static void linear_whose_weight_alone_is_frozen(void)
{
    lg_tensor w = small_input(f, "w", small_t2(f, 5, D));
    end(small_linear(f, wanted("x"), w, bias_of(5), LG_ACT_SILU));
}
static void linears_side_by_side(void)
{
    end(small_linear(f, wanted("x"), weight(6, D / 2), LG_NONE, LG_ACT_NONE));
}
static void linear_by_columns_of_what_is_frozen(void)
{
    lg_tensor w = small_input(f, "w", small_t2(f, 5, D + 3));
    end(small_linear(f, wanted("x"), lg_slice(w, 1, 2, D), LG_NONE, LG_ACT_SILU));
}
/* What is added to one part's gradient comes before the other part's is written for the first time. */
static void parts_that_are_read_twice(void)
{
    lg_tensor x = small_act(f, wanted("x")), y = lg_graph_value(f->g, "y", x3());
    for (int b = 0; b < B; b++) {
        lg_tensor part = lg_at(x, b * T * D, small_t2(f, T, D));
        lg_tensor u = small_linear(f, part, weight(D, D), LG_NONE, LG_ACT_NONE),
                  v = small_linear(f, part, weight(D, D), LG_NONE, LG_ACT_NONE);
        lg_mul_forward(f->s, &(struct lg_mul_forward_args){
                                 .a = u, .b = v, .y = lg_at(y, b * T * D, small_t2(f, T, D))});
    }
    end(y);
}
static void act_of(lg_act act)
{
    lg_tensor x = wanted("x"), y = lg_graph_value(f->g, "y", x3());
    const int n = small_number(f, x);
    for (int64_t e = 0; e < small_numel(f, n); e++) { /* away from the corner of ReLU */
        double v = small_get(f, n, e);
        small_set(f, n, e, v + (v < 0 ? -0.1 : 0.1));
    }
    lg_act_forward(f->s, &(struct lg_act_forward_args){.x = x, .y = y, .act = act});
    end(y);
}
static void act_none(void)
{
    act_of(LG_ACT_NONE);
}
static void act_silu(void)
{
    act_of(LG_ACT_SILU);
}
static void act_gelu(void)
{
    act_of(LG_ACT_GELU_TANH);
}
static void act_relu(void)
{
    act_of(LG_ACT_RELU);
}
static void mul_of_two(void)
{
    end(small_mul(f, wanted("a"), wanted("b")));
}
static void mul_by_itself(void)
{
    lg_tensor a = small_act(f, wanted("a"));
    end(small_mul(f, a, a));
}
static void mul_whose_first_is_frozen(void)
{
    end(small_mul(f, frozen("a"), wanted("b")));
}
static void mul_whose_second_is_frozen(void)
{
    end(small_mul(f, wanted("a"), frozen("b")));
}
static void add_of_two(void)
{
    end(small_add(f, wanted("a"), wanted("b")));
}
static void add_to_itself(void)
{
    lg_tensor a = small_act(f, wanted("a"));
    end(small_add(f, a, a));
}
static void add_of_a_row(void)
{
    end(small_add(f, wanted("a"), small_wanted(f, "row", small_t1(f, D))));
}
static void add_of_a_row_that_was_made(void)
{
    lg_tensor row = small_act(f, small_wanted(f, "row", small_t2(f, T, D)));
    end(small_add(f, wanted("a"), row));
}
static void add_whose_first_is_frozen(void)
{
    end(small_add(f, frozen("a"), small_wanted(f, "row", small_t1(f, D))));
}
static void add_whose_second_is_frozen(void)
{
    end(small_add(f, wanted("a"), small_input(f, "row", small_t1(f, D))));
}
static void norm_alone(void)
{
    end(small_norm(f, wanted("x"), LG_NONE, LG_NONE));
}
static void norm_with_slices(void)
{
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 2 * D)));
    end(small_norm(f, wanted("x"), chunk(mod, 1), chunk(mod, 0)));
}
static void norm_with_parameters(void)
{
    lg_tensor shift = small_wanted(f, "shift", small_t2(f, B, D));
    end(small_norm(f, wanted("x"), shift, small_wanted(f, "scale", small_t2(f, B, D))));
}
static void norm_whose_input_is_frozen(void)
{
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 2 * D)));
    end(small_norm(f, frozen("x"), chunk(mod, 0), chunk(mod, 1)));
}
static void norm_whose_slices_are_frozen(void)
{
    lg_tensor mod = small_input(f, "mod", small_t2(f, B, 3 * D));
    end(small_norm(f, wanted("x"), chunk(mod, 0), chunk(mod, 1)));
}
static void norm_whose_shift_is_frozen(void)
{
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 2 * D)));
    lg_tensor shift = small_input(f, "shift", small_t2(f, B, 2 * D));
    lg_tensor x = small_norm(f, wanted("x"), chunk(shift, 1), chunk(mod, 0));
    end(small_residual(f, x, x, chunk(mod, 1)));
}
/* x: tokens of H vectors, of which w norms one after the other; y: likewise. */
static void record_rms(lg_tensor x, lg_tensor w, lg_tensor y)
{
    lg_rms_norm_forward(
        f->s, &(struct lg_rms_norm_forward_args){.x = x, .w = w, .y = y, .each = 1, .eps = 0.1});
}
/* The first vectors of each token, as many as w has rows, which are added to the others: as q and k of packed heads. */
static void rms_of(lg_tensor x, lg_tensor w)
{
    const int64_t normed = w.dim[0] * D, all = x.dim[2];
    lg_tensor y = lg_graph_value(f->g, "y", lg_split(small_t3(f, B, T, normed), 2, D));
    record_rms(lg_split(lg_slice(x, 2, 0, normed), 2, D), w, y);
    y = lg_at(y, 0, small_t3(f, B, T, normed));
    if (normed == all) {
        end(y);
        return;
    }
    lg_tensor rest = lg_graph_value(f->g, "rest", small_t2(f, B * T, all - normed));
    lg_tensor from = lg_at(x, normed, small_t2(f, B * T, all - normed));
    from.stride[0] = all;
    lg_copy_rows(f->s, &(struct lg_copy_rows_args){.x = from, .y = rest});
    lg_tensor both = lg_graph_value(f->g, "both", small_t2(f, B * T, all));
    lg_copy_rows(f->s, &(struct lg_copy_rows_args){.x = lg_at(y, 0, small_t2(f, B * T, normed)),
                                                   .y = lg_slice(both, 1, 0, normed)});
    lg_copy_rows(
        f->s, &(struct lg_copy_rows_args){.x = rest, .y = lg_slice(both, 1, normed, all - normed)});
    end(lg_at(both, 0, small_t3(f, B, T, all)));
}
static void rms_norm_of_a_parameter(void)
{
    rms_of(small_wanted(f, "x", small_t3(f, B, T, 2 * D)), small_wanted(f, "w", small_t2(f, 2, D)));
}
static void rms_norm_of_what_was_made(void)
{
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, T, 3 * D)));
    rms_of(x, small_wanted(f, "w", small_t2(f, 3, D)));
}
static void rms_norm_of_a_part(void)
{
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, T, 3 * D)));
    rms_of(x, small_wanted(f, "w", small_t2(f, 2, D)));
}
static void rms_norm_whose_input_is_frozen(void)
{
    rms_of(small_input(f, "x", small_t3(f, B, T, 2 * D)), small_wanted(f, "w", small_t2(f, 2, D)));
}
static void rms_norm_whose_weight_is_frozen(void)
{
    rms_of(small_act(f, small_wanted(f, "x", small_t3(f, B, T, 3 * D))),
           small_input(f, "w", small_t2(f, 2, D)));
}
/* Vectors that are turned: nothing is added to their gradient where it is made. */
static void rms_norm_turned(bool twice)
{
    enum { d = D, P = d / 2 };
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, T, 2 * D)));
    lg_tensor w = small_wanted(f, "w", small_t2(f, 2, D)), heads = lg_split(x, 2, D), y[2];
    lg_tensor cosine = small_input(f, "cos", small_t2(f, T, P)),
              sine = small_input(f, "sin", small_t2(f, T, P));
    for (int i = 0; i < 1 + twice; i++) {
        y[i] = lg_graph_value(f->g, "y", heads);
        lg_rms_norm_forward(
            f->s,
            &(struct lg_rms_norm_forward_args){
                .x = heads, .w = w, .cos = cosine, .sin = sine, .y = y[i], .each = 1, .eps = 0.1});
    }
    end(twice ? small_mul(f, y[0], small_act(f, y[1])) : lg_at(y[0], 0, small_t3(f, B, T, 2 * D)));
}
static void rms_norm_that_turns(void)
{
    rms_norm_turned(false);
}
static void rms_norm_that_turns_one_twice(void)
{
    rms_norm_turned(true);
}
static void rms_norm_of_one_twice(void)
{
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, T, 2 * D)));
    lg_tensor w = small_wanted(f, "w", small_t2(f, 2, D)), heads = lg_split(x, 2, D), y[2];
    for (int i = 0; i < 2; i++) {
        y[i] = lg_graph_value(f->g, "y", heads);
        record_rms(heads, w, y[i]);
    }
    end(small_mul(f, y[0], small_act(f, y[1])));
}
/* Two streams behind each other in one value. */
static void rms_norms_into_one_value(void)
{
    enum { L = 2 };
    lg_tensor both = lg_graph_value(f->g, "both", small_t3(f, B, T + L, D));
    for (int i = 0; i < 2; i++) {
        lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, i ? L : T, D)));
        lg_tensor heads = lg_split(x, 2, D);
        record_rms(heads, small_wanted(f, "w", small_t2(f, 1, D)),
                   lg_at(both, (i ? B * T : 0) * D, lg_tensor_of(NULL, x.dtype, 4, heads.dim)));
    }
    end(both);
}
static void residual_alone(void)
{
    end(small_residual(f, wanted("x"), wanted("y"), LG_NONE));
}
static void residual_with_a_gate(void)
{
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 2 * D)));
    lg_tensor x = small_residual(f, wanted("x"), wanted("y"), chunk(mod, 1));
    end(small_residual(f, x, wanted("y"), chunk(mod, 0)));
}
static void residual_whose_x_is_frozen(void)
{
    lg_tensor gate = small_wanted(f, "gate", small_t2(f, B, D));
    end(small_residual(f, frozen("x"), wanted("y"), gate));
}
static void residual_whose_y_is_frozen(void)
{
    lg_tensor gate = small_wanted(f, "gate", small_t2(f, B, D));
    end(small_residual(f, wanted("x"), frozen("y"), gate));
}
static void residual_whose_gate_is_frozen(void)
{
    lg_tensor mod = small_input(f, "mod", small_t2(f, B, 3 * D));
    end(small_residual(f, wanted("x"), wanted("y"), chunk(mod, 1)));
}
static void residual_whose_gate_and_y_are_frozen(void)
{
    lg_tensor mod = small_input(f, "mod", small_t2(f, B, 3 * D));
    end(small_residual(f, wanted("x"), frozen("y"), chunk(mod, 1)));
}
static void residual_of_one_with_itself(void)
{
    lg_tensor x = small_act(f, wanted("x"));
    end(small_residual(f, x, x, small_wanted(f, "gate", small_t2(f, B, D))));
}
static void attention_of_three(void)
{
    end(small_attention(f, wanted("q"), wanted("k"), wanted("v"), LG_NONE));
}
static void attention_with_lengths(void)
{
    static const int32_t lengths[B] = {1, 3};
    lg_tensor length = small_ints(f, "lengths", B, lengths);
    end(small_attention(f, wanted("q"), wanted("k"), wanted("v"), length));
}
static void attention_of_one_packed(void)
{
    lg_tensor qkv = small_act(f, small_wanted(f, "qkv", small_t3(f, B, T, 3 * D)));
    end(small_attention(f, lg_slice(qkv, 2, 0, D), lg_slice(qkv, 2, D, D),
                        lg_slice(qkv, 2, 2 * D, D), LG_NONE));
}
static void attention_of_other_tokens(void)
{
    lg_tensor kv = small_act(f, small_wanted(f, "kv", small_t3(f, B, 5, 2 * D)));
    end(small_attention(f, wanted("q"), lg_slice(kv, 2, 0, D), lg_slice(kv, 2, D, D), LG_NONE));
}
static void attention_of_one_with_itself(void)
{
    lg_tensor x = small_act(f, wanted("x"));
    end(small_attention(f, x, x, x, LG_NONE));
}
static void attention_whose_query_is_frozen(void)
{
    end(small_attention(f, frozen("q"), wanted("k"), wanted("v"), LG_NONE));
}
static void attention_whose_keys_are_frozen(void)
{
    lg_tensor kv = small_input(f, "kv", small_t3(f, B, 5, 2 * D));
    end(small_attention(f, wanted("q"), lg_slice(kv, 2, 0, D), lg_slice(kv, 2, D, D), LG_NONE));
}
static void attention_whose_values_alone_are_frozen(void)
{
    lg_tensor k = small_act(f, small_wanted(f, "qk", small_t3(f, B, T, 2 * D)));
    lg_tensor v = small_input(f, "v", small_t3(f, B, T, 2 * D));
    end(small_attention(f, lg_slice(k, 2, 0, D), lg_slice(k, 2, D, D), lg_slice(v, 2, 0, D),
                        LG_NONE));
}
/* Tokens of two streams in one value, of each stream's samples apart. */
static lg_tensor two_streams(lg_tensor x, lg_tensor text)
{
    const int64_t N = x.dim[1] + text.dim[1], F = x.dim[2], rows = B * x.dim[1];
    lg_tensor both = lg_graph_value(f->g, "both", small_t3(f, B, N, F));
    lg_copy_rows(f->s,
                 &(struct lg_copy_rows_args){.x = lg_at(x, 0, lg_t2(NULL, x.dtype, rows, F)),
                                             .y = lg_at(both, 0, lg_t2(NULL, x.dtype, rows, F))});
    const lg_tensor others = lg_t2(NULL, x.dtype, B * text.dim[1], F);
    lg_copy_rows(f->s, &(struct lg_copy_rows_args){.x = lg_at(text, 0, others),
                                                   .y = lg_at(both, rows * F, others)});
    return both;
}
static void attend_streams(lg_tensor q, lg_tensor kv, int first_queries, int first_keys)
{
    lg_tensor o = lg_graph_value(f->g, "attention", small_t3(f, B, q.dim[1], D));
    const int64_t last = kv.dim[2] / D;
    lg_attention_forward(f->s,
                         &(struct lg_attention_forward_args){
                             .q = lg_split(lg_slice(q, 2, 0, D), 2, D / SMALL_H),
                             .k = lg_split(lg_slice(kv, 2, (last - 2) * D, D), 2, D / SMALL_H),
                             .v = lg_split(lg_slice(kv, 2, (last - 1) * D, D), 2, D / SMALL_H),
                             .o = lg_split(o, 2, D / SMALL_H),
                             .scale = 0.7,
                             .first_queries = first_queries,
                             .first_keys = first_keys});
    end(o);
}
static void attention_of_two_streams(void)
{
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, 2, 3 * D)));
    lg_tensor text = small_act(f, small_wanted(f, "text", small_t3(f, B, 5, 3 * D)));
    lg_tensor both = two_streams(x, text);
    attend_streams(both, both, 2, 2);
}
static void attention_of_one_to_two_streams(void)
{
    lg_tensor x = small_act(f, small_wanted(f, "x", small_t3(f, B, 4, 2 * D)));
    lg_tensor text = small_act(f, small_wanted(f, "text", small_t3(f, B, 1, 2 * D)));
    attend_streams(small_wanted(f, "q", small_t3(f, B, 3, D)), two_streams(x, text), 0, 4);
}
/* Parts of a value, whose makers ask for their gradients from the last to the first, one when that of the next part is there. */
static void parts_one_after_the_other(void)
{
    const int64_t rows = B * T, count[3] = {1, 2, rows - 3};
    int64_t at = 0;
    lg_tensor both = lg_graph_value(f->g, "both", small_t2(f, rows, D));
    lg_tensor made = lg_graph_value(f->g, "made", small_t2(f, rows, D));
    for (int i = 0; i < 3; at += count[i++] * D) {
        const lg_tensor shape = small_t2(f, count[i], D);
        lg_tensor x = small_wanted(f, "x", shape), part = lg_at(both, at, shape);
        lg_act_forward(f->s, &(struct lg_act_forward_args){.x = x, .y = part, .act = LG_ACT_SILU});
        lg_act_forward(f->s, &(struct lg_act_forward_args){
                                 .x = part, .y = lg_at(made, at, shape), .act = LG_ACT_SILU});
    }
    end(made);
}
static void embedding_of_rows(void)
{
    static const int32_t ids[] = {2, 0, 2, 1}; /* row 3 is nobody's */
    lg_tensor y = lg_graph_value(f->g, "y", small_t2(f, 4, D));
    lg_embedding_forward(f->s, &(struct lg_embedding_forward_args){
                                   .ids = small_ints(f, "ids", 4, ids),
                                   .table = small_wanted(f, "table", small_t2(f, 4, D)),
                                   .y = y});
    end(y);
}
static void unpatchify_to(lg_tensor x)
{
    lg_tensor y = lg_graph_value(f->g, "y", lg_t4(NULL, f->type, B, 1, 2, 6));
    lg_unpatchify_forward(f->s, &(struct lg_unpatchify_forward_args){.x = x, .y = y, .patch = 2});
    end(y);
}
static void unpatchify_of_a_parameter(void)
{
    unpatchify_to(wanted("x"));
}
static void unpatchify_of_a_value(void)
{
    unpatchify_to(small_act(f, wanted("x")));
}

/* Vectors of two features, of which the second is copied. */
static void rope_of(lg_tensor x, bool inverse)
{
    lg_tensor y = lg_graph_value(f->g, "y", x3());
    lg_tensor table = small_input(f, "angles", small_t2(f, 2, T));
    lg_rope(f->s, &(struct lg_rope_args){.x = lg_split(x, 2, 2),
                                         .cos = lg_at(table, 0, small_t2(f, T, 1)),
                                         .sin = lg_at(table, T, small_t2(f, T, 1)),
                                         .y = lg_split(y, 2, 2),
                                         .turned = 1,
                                         .inverse = inverse});
    end(y);
}
static void rope_of_a_parameter(void)
{
    rope_of(wanted("x"), false);
}
static void rope_back_of_a_value(void)
{
    rope_of(small_act(f, wanted("x")), true);
}

static const struct {
    const char *name;
    void (*describe)(void);
} ALONE[] = {
#define CASE(name)                                                                                 \
    {                                                                                              \
#name, name                                                                                \
    }
    CASE(linear_plain),
    CASE(linear_with_bias),
    CASE(linear_with_silu),
    CASE(linear_with_bias_and_gelu),
    CASE(linear_whose_input_is_frozen),
    CASE(linear_whose_bias_is_frozen),
    CASE(linear_whose_weight_and_bias_are_frozen),
    CASE(linears_side_by_side),
    CASE(linear_by_columns_of_what_is_frozen),
    CASE(parts_that_are_read_twice),
    CASE(linear_whose_weight_alone_is_frozen),
    CASE(act_none),
    CASE(act_silu),
    CASE(act_gelu),
    CASE(act_relu),
    CASE(mul_of_two),
    CASE(mul_by_itself),
    CASE(mul_whose_first_is_frozen),
    CASE(mul_whose_second_is_frozen),
    CASE(add_of_two),
    CASE(add_to_itself),
    CASE(add_of_a_row),
    CASE(add_of_a_row_that_was_made),
    CASE(add_whose_first_is_frozen),
    CASE(add_whose_second_is_frozen),
    CASE(norm_alone),
    CASE(norm_with_slices),
    CASE(norm_with_parameters),
    CASE(norm_whose_input_is_frozen),
    CASE(rms_norm_of_a_parameter),
    CASE(rms_norm_of_what_was_made),
    CASE(rms_norm_of_a_part),
    CASE(rms_norm_whose_input_is_frozen),
    CASE(rms_norm_whose_weight_is_frozen),
    CASE(rms_norm_of_one_twice),
    CASE(rms_norm_that_turns),
    CASE(rms_norm_that_turns_one_twice),
    CASE(rms_norms_into_one_value),
    CASE(norm_whose_slices_are_frozen),
    CASE(norm_whose_shift_is_frozen),
    CASE(residual_alone),
    CASE(residual_with_a_gate),
    CASE(residual_whose_x_is_frozen),
    CASE(residual_whose_y_is_frozen),
    CASE(residual_whose_gate_is_frozen),
    CASE(residual_whose_gate_and_y_are_frozen),
    CASE(residual_of_one_with_itself),
    CASE(attention_of_three),
    CASE(attention_with_lengths),
    CASE(attention_of_one_packed),
    CASE(attention_of_other_tokens),
    CASE(attention_of_one_with_itself),
    CASE(attention_whose_query_is_frozen),
    CASE(attention_whose_keys_are_frozen),
    CASE(attention_whose_values_alone_are_frozen),
    CASE(attention_of_two_streams),
    CASE(attention_of_one_to_two_streams),
    CASE(parts_one_after_the_other),
    CASE(embedding_of_rows),
    CASE(unpatchify_of_a_parameter),
    CASE(unpatchify_of_a_value),
    CASE(rope_of_a_parameter),
    CASE(rope_back_of_a_value),
};

static void test_each_rule_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < LG_ARRAY_LEN(ALONE); i++) {
        small_begin(f, 1 + i);
        ALONE[i].describe();
        differentiate(ALONE[i].name);
    }
}

/* ---- how contributions meet ---- */

/* The last reader writes its contribution; the one before it adds its own there; the first, a product, cannot add, so
 * that a sum is made. */
static void test_readers_add_in_reverse_order(void **state)
{
    (void)state;
    lg_tensor h = small_act(f, wanted("x")), y = small_mul(f, h, frozen("factor"));
    lg_tensor a = small_act(f, h), b = small_act(f, h);
    end(small_mul(f, small_mul(f, a, b), y));
    small_grad(f);
    small_assert_print(
        f,
        "v0 x f64 2,3,4: 192 bytes, bound 0, used up to n16\n"
        "v1 act f64 2,3,4: 192 bytes at 0, made by n0, used up to n13\n"
        "v2 factor f64 2,3,4: 192 bytes, bound 1, used up to n14\n"
        "v3 product f64 2,3,4: 192 bytes at 192, made by n1, used up to n8\n"
        "v4 act f64 2,3,4: 192 bytes at 384, made by n2, used up to n11\n"
        "v5 act f64 2,3,4: 192 bytes at 576, made by n3, used up to n10\n"
        "v6 product f64 2,3,4: 192 bytes at 768, made by n4, used up to n9\n"
        "v7 product f64 2,3,4: 192 bytes at 960, made by n5, used up to n7\n"
        "v8 out f64 2,3,4: 192 bytes, bound 2, made by n6, used up to n6\n"
        "v9 d out f64 2,3,4: 192 bytes, bound 3, used up to n7\n"
        "v10 gradient f64 2,3,4: 192 bytes, bound 4, made by n16, used up to n16\n"
        "v11 d product f64 2,3,4: 192 bytes at 1152, made by n7, used up to n9\n"
        "v12 d product f64 2,3,4: 192 bytes at 192 in place of v3, made by n8, used up to n11\n"
        "v13 d product f64 2,3,4: 192 bytes at 1152 in place of v11, made by n9, used up to n14\n"
        "v14 d act f64 2,3,4: 192 bytes at 576 in place of v5, made by n10, used up to n13\n"
        "v15 d act f64 2,3,4: 192 bytes at 192 in place of v3, made by n11, used up to n12\n"
        "v16 d act f64 2,3,4: 192 bytes at 192 in place of v3, made by n12, used up to n13\n"
        "v17 d act f64 2,3,4: 192 bytes at 192 in place of v3, made by n13, used up to n15\n"
        "v18 unwanted or added f64 2,3,4: 192 bytes at 1152 in place of v11, made by n14, used up "
        "to n15\n"
        "v19 d act f64 2,3,4: 192 bytes at 192 in place of v3, made by n15, used up to n16\n"
        "n0 act_forward act=1 | x=v0(2,3,4) >y=v1(2,3,4)\n"
        "n1 mul_forward | a=v1(2,3,4) b=v2(2,3,4) >y=v3(2,3,4)\n"
        "n2 act_forward act=1 | x=v1(2,3,4) >y=v4(2,3,4)\n"
        "n3 act_forward act=1 | x=v1(2,3,4) >y=v5(2,3,4)\n"
        "n4 mul_forward | a=v4(2,3,4) b=v5(2,3,4) >y=v6(2,3,4)\n"
        "n5 mul_forward | a=v6(2,3,4) b=v3(2,3,4) >y=v7(2,3,4)\n"
        "n6 act_forward act=1 | x=v7(2,3,4) >y=v8(2,3,4)\n"
        "n7 backward act_backward act=1 accumulate=0 | x=v7(2,3,4) dy=v9(2,3,4) >dx=v11(2,3,4)\n"
        "n8 backward mul_forward | a=v11(2,3,4) b=v3(2,3,4) >y=v12(2,3,4)\n"
        "n9 backward mul_forward | a=v11(2,3,4) b=v6(2,3,4) >y=v13(2,3,4)\n"
        "n10 backward mul_forward | a=v12(2,3,4) b=v5(2,3,4) >y=v14(2,3,4)\n"
        "n11 backward mul_forward | a=v12(2,3,4) b=v4(2,3,4) >y=v15(2,3,4)\n"
        "n12 backward act_backward act=1 accumulate=0 | x=v1(2,3,4) dy=v15(2,3,4) >dx=v16(2,3,4)\n"
        "n13 backward act_backward act=1 accumulate=1 | x=v1(2,3,4) dy=v14(2,3,4) >dx=v17(2,3,4)\n"
        "n14 backward mul_forward | a=v13(2,3,4) b=v2(2,3,4) >y=v18(2,3,4)\n"
        "n15 backward add_forward | a=v17(2,3,4) b=v18(2,3,4) >y=v19(2,3,4)\n"
        "n16 backward act_backward act=1 accumulate=0 | x=v0(2,3,4) dy=v19(2,3,4) >dx=v10(2,3,4)\n"
        "17 nodes, 20 values, arena 1344 bytes, of which n7 uses 1344\n");
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "three readers");
}

/* Both linears read one weight: what the first of them adds is what the second has written. */
static void test_a_weight_used_twice(void **state)
{
    (void)state;
    lg_tensor w = weight(D, D), bias = bias_of(D), x = frozen("x");
    end(small_linear(f, small_linear(f, x, w, bias, LG_ACT_SILU), w, bias, LG_ACT_NONE));
    small_grad(f);
    small_assert_print(
        f, "v0 w f64 4,4: 128 bytes, bound 0, used up to n5\n"
           "v1 bias f64 4: 32 bytes, bound 1, used up to n1\n"
           "v2 x f64 2,3,4: 192 bytes, bound 2, used up to n7\n"
           "v3 linear f64 2,3,4: 192 bytes at 0, made by n0, used up to n4\n"
           "v4 linear f64 2,3,4: 192 bytes at 192, made by n1, used up to n3\n"
           "v5 out f64 2,3,4: 192 bytes, bound 3, made by n2, used up to n2\n"
           "v6 d out f64 2,3,4: 192 bytes, bound 4, used up to n3\n"
           "v7 gradient f64 4,4: 128 bytes, bound 5, made by n4, used up to n7\n"
           "v8 gradient f64 4: 32 bytes, bound 6, made by n4, used up to n7\n"
           "v9 pre f64 6,4: 192 bytes at 384, made by n0, used up to n6\n"
           "v10 d linear f64 2,3,4: 192 bytes at 576, made by n3, used up to n5\n"
           "v11 d linear f64 2,3,4: 192 bytes at 0, made by n5, used up to n6\n"
           "v12 d pre f64 6,4: 192 bytes at 0 in place of v11, made by n6, used up to n7\n"
           "n0 linear_forward act=1 | x=v2(6,4) w=v0(4,4) bias=v1(4) >y=v3(6,4) >pre=v9(6,4)\n"
           "n1 linear_forward act=0 | x=v3(6,4) w=v0(4,4) bias=v1(4) >y=v4(6,4)\n"
           "n2 act_forward act=1 | x=v4(2,3,4) >y=v5(2,3,4)\n"
           "n3 backward act_backward act=1 accumulate=0 | x=v4(2,3,4) dy=v6(2,3,4) >dx=v10(2,3,4)\n"
           "n4 backward linear_backward_weight accumulate=0 | dy=v10(6,4) x=v3(6,4) >dw=v7(4,4) "
           ">dbias=v8(4)\n"
           "n5 backward linear_backward_data accumulate=0 act=0 accumulate_dbias=0 | dy=v10(6,4) "
           "w=v0(4,4) >dx=v11(6,4)\n"
           "n6 backward act_backward act=1 accumulate=0 | x=v9(6,4) dy=v11(6,4) >dx=v12(6,4)\n"
           "n7 backward linear_backward_weight accumulate=1 | dy=v12(6,4) x=v2(6,4) >dw=v7(4,4) "
           ">dbias=v8(4)\n"
           "8 nodes, 13 values, arena 768 bytes, of which n3 uses 768\n");
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "a weight used twice");
}

/* The residual's x has the gradient of its result. When x gets more, that is added to a copy, since the caller's dout
 * must stay; and then in place, since the copy is nobody else's. */
static void test_a_gradient_that_is_another_is_copied(void **state)
{
    (void)state;
    lg_tensor h = small_act(f, wanted("x")), a = small_act(f, h), b = small_act(f, h);
    lg_tensor y = small_mul(f, a, b), out = small_out(f, x3());
    lg_gate_residual_forward(f->s,
                             &(struct lg_gate_residual_forward_args){.x = h, .y = y, .out = out});
    small_grad(f);
    small_assert_print(
        f,
        "v0 x f64 2,3,4: 192 bytes, bound 0, used up to n10\n"
        "v1 act f64 2,3,4: 192 bytes at 0, made by n0, used up to n9\n"
        "v2 act f64 2,3,4: 192 bytes at 192, made by n1, used up to n6\n"
        "v3 act f64 2,3,4: 192 bytes at 384, made by n2, used up to n5\n"
        "v4 product f64 2,3,4: 192 bytes at 576, made by n3, used up to n4\n"
        "v5 out f64 2,3,4: 192 bytes, bound 1, made by n4, used up to n4\n"
        "v6 d out f64 2,3,4: 192 bytes, bound 2, used up to n7\n"
        "v7 gradient f64 2,3,4: 192 bytes, bound 3, made by n10, used up to n10\n"
        "v8 d act f64 2,3,4: 192 bytes at 384 in place of v3, made by n5, used up to n9\n"
        "v9 d act f64 2,3,4: 192 bytes at 192 in place of v2, made by n6, used up to n8\n"
        "v10 d act f64 2,3,4: 192 bytes at 576, made by n7, used up to n8\n"
        "v11 d act f64 2,3,4: 192 bytes at 576 in place of v10, made by n8, used up to n9\n"
        "v12 d act f64 2,3,4: 192 bytes at 576 in place of v10, made by n9, used up to n10\n"
        "n0 act_forward act=1 | x=v0(2,3,4) >y=v1(2,3,4)\n"
        "n1 act_forward act=1 | x=v1(2,3,4) >y=v2(2,3,4)\n"
        "n2 act_forward act=1 | x=v1(2,3,4) >y=v3(2,3,4)\n"
        "n3 mul_forward | a=v2(2,3,4) b=v3(2,3,4) >y=v4(2,3,4)\n"
        "n4 gate_residual_forward | x=v1(2,3,4) y=v4(2,3,4) >out=v5(2,3,4)\n"
        "n5 backward mul_forward | a=v6(2,3,4) b=v3(2,3,4) >y=v8(2,3,4)\n"
        "n6 backward mul_forward | a=v6(2,3,4) b=v2(2,3,4) >y=v9(2,3,4)\n"
        "n7 backward combine c=1,0,0,0 count=1 | x[0]=v6(2,3,4) >y=v10(2,3,4)\n"
        "n8 backward act_backward act=1 accumulate=1 | x=v1(2,3,4) dy=v9(2,3,4) >dx=v11(2,3,4)\n"
        "n9 backward act_backward act=1 accumulate=1 | x=v1(2,3,4) dy=v8(2,3,4) >dx=v12(2,3,4)\n"
        "n10 backward act_backward act=1 accumulate=0 | x=v0(2,3,4) dy=v12(2,3,4) >dx=v7(2,3,4)\n"
        "11 nodes, 13 values, arena 768 bytes, of which n3 uses 768\n");
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "a residual");
}

/* Slices of one packed value are parts of one gradient, to which a reader of the whole before them adds. Halves of
 * rows are also added to what a reader of the whole behind them has written. */
static void read_slices_and_the_whole(bool whole_first)
{
    lg_tensor qkv = small_linear(f, wanted("x"), weight(3 * D, D), LG_NONE, LG_ACT_NONE), z, y;
    for (int i = 0; i < 2; i++)
        if (whole_first == (i == 0))
            z = small_linear(f, qkv, weight(D, 3 * D), LG_NONE, LG_ACT_NONE);
        else
            y = small_attention(f, lg_slice(qkv, 2, 0, D), lg_slice(qkv, 2, D, D),
                                lg_slice(qkv, 2, 2 * D, D), LG_NONE);
    lg_tensor u = small_act(f, z), v = lg_graph_value(f->g, "halves", x3());
    const lg_tensor half = small_t1(f, T * D);
    for (int i = 0; i < B; i++)
        small_act_into(f, lg_at(u, i * T * D, half), lg_at(v, i * T * D, half));
    end(small_add(f, small_mul(f, u, y), v));
    small_grad(f);
}
static void read_the_whole_before_slices(void)
{
    read_slices_and_the_whole(true);
}
static void read_slices_before_the_whole(void)
{
    read_slices_and_the_whole(false);
}

static void test_slices_and_the_whole(void **state)
{
    (void)state;
    read_the_whole_before_slices();
    small_compile(f);
    char *text = small_text(f);
    assert_int_equal(small_count(text, "add_forward"), 1); /* of the forward */
    assert_int_equal(small_count(text, "combine"), 0);
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "slices and the whole");
    free(text);
}

/* pre and lse are made for the backward alone, and only where the caller has none. */
static void test_outputs_are_switched_on(void **state)
{
    (void)state;
    lg_tensor x = wanted("x"), own = lg_graph_value(f->g, "own", small_t2(f, B * T, D));
    lg_tensor y = lg_graph_value(f->g, "y", own), w = weight(D, D);
    lg_linear_forward(
        f->s,
        &(struct lg_linear_forward_args){
            .x = lg_t2(x.data, f->type, B * T, D), .w = w, .y = y, .pre = own, .act = LG_ACT_SILU});
    y = small_linear(f, lg_at(y, 0, x3()), weight(D, D), LG_NONE, LG_ACT_SILU);
    end(small_attention(f, y, y, y, LG_NONE));
    small_compile(f);
    char *before = small_text(f);
    assert_null(strstr(before, " pre "));
    assert_null(strstr(before, " lse "));
    small_grad(f);
    small_compile(f);
    char *text = small_text(f);
    assert_non_null(strstr(text, " >pre=v1(6,4)\n")); /* as it was */
    assert_non_null(strstr(text, " pre f64 6,4: "));
    assert_non_null(strstr(text, " lse f64 2,2,3: "));
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "switched on");
    free(before);
    free(text);
}

/* What no trained value stands behind gets no gradient, and no node is made for it. */
static void test_frozen_parts_cost_nothing(void **state)
{
    (void)state;
    lg_tensor w = small_input(f, "w", small_t2(f, D, D));
    lg_tensor y = small_linear(f, frozen("x"), w, LG_NONE, LG_ACT_SILU);
    y = small_linear(f, small_act(f, y), weight(D, D), LG_NONE, LG_ACT_NONE);
    end(y);
    small_grad(f);
    small_compile(f);
    char *text = small_text(f);
    assert_int_equal(small_count(text, "act_backward"), 1);
    assert_int_equal(small_count(text, "linear_backward_weight"), 1);
    assert_int_equal(small_count(text, "linear_backward_data"), 0);
    free(text);
}

/* A modulation that is frozen gets no gradients either, and what only they would read is not kept. */
static void test_a_frozen_modulation_costs_nothing(void **state)
{
    (void)state;
    lg_tensor mod = small_input(f, "mod", small_t2(f, B, 3 * D));
    lg_tensor x = small_norm(f, wanted("x"), chunk(mod, 0), chunk(mod, 1));
    lg_tensor y = small_linear(f, x, weight(D, D), LG_NONE, LG_ACT_NONE);
    end(small_residual(f, x, y, chunk(mod, 2)));
    small_grad(f);
    small_compile(f);
    char *text = small_text(f);
    assert_int_equal(small_count(text, "norm_modulate_backward"), 1);
    assert_int_equal(small_count(text, "gate_residual_backward"), 1);
    assert_null(strstr(text, ">dshift="));
    assert_null(strstr(text, ">dscale="));
    assert_null(strstr(text, ">dgate="));
    const char *backward = strstr(text, "gate_residual_backward");
    const char *end_of_line = strchr(backward, '\n'), *reads_y = strstr(backward, " y=");
    assert_true(!reads_y || reads_y > end_of_line);
    small_run(f, LG_PROGRAM_ALL, false);
    small_check_gradients(f, "a frozen modulation");
    free(text);
}

/* ---- running ---- */

/* A sum that is added to what is there: the result of one run, then twice that. Each gradient has one contribution, so
 * that the double is exact. */
static void test_a_run_may_add(void **state)
{
    (void)state;
    lg_tensor x = wanted("x"), w = weight(D, D), bias = bias_of(D);
    lg_tensor alone = wanted("alone"); /* the loss does not depend on it */
    lg_tensor row = small_wanted(f, "row", small_t1(f, D));
    end(small_add(f, small_linear(f, x, w, bias, LG_ACT_SILU), row));
    small_grad(f);
    small_compile(f);
    const lg_tensor each[] = {x, w, bias, row};
    double once[64];
    for (size_t i = 0; i < LG_ARRAY_LEN(each); i++) {
        const int n = f->gradient[small_number(f, each[i])];
        small_run(f, LG_PROGRAM_ALL, false);
        for (int64_t e = 0; e < small_numel(f, n); e++) once[e] = small_get(f, n, e);
        assert_true(once[0] != SMALL_FILL && once[0] != 0);
        small_run(f, LG_PROGRAM_ALL, true);
        for (int64_t e = 0; e < small_numel(f, n); e++)
            assert_true(small_get(f, n, e) == 2 * once[e]);
        small_run(f, LG_PROGRAM_ALL, false);
        for (int64_t e = 0; e < small_numel(f, n); e++) assert_true(small_get(f, n, e) == once[e]);
    }
    const int n = f->gradient[small_number(f, alone)];
    for (int64_t e = 0; e < small_numel(f, n); e++) assert_true(small_get(f, n, e) == SMALL_FILL);
}

/* A weight used twice: only its first contribution overwrites. */
static void test_a_run_may_add_to_what_is_tied(void **state)
{
    (void)state;
    lg_tensor w = weight(D, D), bias = bias_of(D);
    double once[D * D];
    end(small_linear(f, small_linear(f, wanted("x"), w, bias, LG_ACT_SILU), w, bias, LG_ACT_NONE));
    small_grad(f);
    small_compile(f);
    const int n = f->gradient[small_number(f, w)];
    small_run(f, LG_PROGRAM_ALL, false);
    for (int e = 0; e < D * D; e++) once[e] = small_get(f, n, e);
    small_run(f, LG_PROGRAM_ALL, true); /* two terms are added to two: a rounding each */
    for (int e = 0; e < D * D; e++)
        assert_true(fabs(small_get(f, n, e) - 2 * once[e]) <= 1e-13 * (1 + fabs(once[e])));
}

/* Forward and backward by themselves: each needs what it reads and writes, and no more. */
static void test_parts_need_what_they_use(void **state)
{
    (void)state;
    lg_tensor w = weight(D, D), x = frozen("x");
    double at_once[D * D];
    end(small_linear(f, x, w, LG_NONE, LG_ACT_SILU));
    small_grad(f);
    small_compile(f);
    small_run(f, LG_PROGRAM_ALL, false);
    const int n = f->gradient[small_number(f, w)];
    for (int e = 0; e < D * D; e++) at_once[e] = small_get(f, n, e);
    small_fill_gradients(f);
    void *gradient = f->data[n], *dout = f->data[f->dout], *out = f->data[f->out];
    f->data[n] = f->data[f->dout] = NULL;
    small_run(f, LG_PROGRAM_FORWARD, false);
    f->data[n] = gradient, f->data[f->dout] = dout, f->data[f->out] = NULL;
    assert_true(small_get(f, n, 0) == SMALL_FILL);
    small_run(f, LG_PROGRAM_BACKWARD, false);
    f->data[f->out] = out;
    for (int e = 0; e < D * D; e++) assert_true(small_get(f, n, e) == at_once[e]);
}

/* ---- what is refused ---- */

/* T samples of one row of one pixel of D channels. */
static lg_tensor map_of(lg_tensor rows)
{
    return lg_tensor_of(rows.data, rows.dtype, 4, (const int64_t[]){T, 1, 1, D});
}
static void differentiate_what_has_no_rule(void)
{
    lg_tensor x = small_wanted(f, "x", small_t2(f, T, D)), y = small_out(f, small_t2(f, T, D));
    y = lg_tensor_of(y.data, y.dtype, 4, (const int64_t[]){T, 1, D, 1});
    lg_nchw_to_nhwc(f->s, &(struct lg_nchw_to_nhwc_args){.x = map_of(x), .y = y});
    small_grad(f);
}
static void differentiate_a_norm(bool keeps)
{
    lg_tensor x = small_wanted(f, "x", small_t2(f, T, D)), y = small_out(f, small_t2(f, T, D));
    struct lg_group_norm_forward_args a = {.x = map_of(x),
                                           .w = small_input(f, "w", small_t1(f, D)),
                                           .b = small_input(f, "b", small_t1(f, D)),
                                           .y = map_of(y),
                                           .groups = 1,
                                           .eps = 1e-6};
    if (keeps) {
        a.mean_var = lg_graph_value(f->g, "mean_var", lg_t3(NULL, LG_F64, T, 1, 2));
        lg_group_mean_var_forward(
            f->s, &(struct lg_group_mean_var_forward_args){.x = map_of(x), .mean_var = a.mean_var});
    }
    lg_group_norm_forward(f->s, &a);
    small_grad(f);
}
static void differentiate_a_norm_with_statistics(void)
{
    differentiate_a_norm(true);
}
static void differentiate_a_norm_without_statistics(void)
{
    differentiate_a_norm(false);
}
static void leave_half_unread(void)
{
    lg_tensor h = small_act(f, wanted("x")), y = small_out(f, small_t1(f, T * D));
    small_act_into(f, lg_at(h, 0, y), y);
    small_grad(f);
}
/* Their slices are views of the caller's: contributions with gaps cannot be added there. */
static void modulate_by_slices_of_a_parameter(void)
{
    lg_tensor mod = small_wanted(f, "mod", small_t2(f, B, 2 * D));
    end(small_norm(f, wanted("x"), chunk(mod, 0), chunk(mod, 1)));
    small_grad(f);
}
static void modulate(int second_shift)
{
    lg_tensor mod = small_act(f, small_wanted(f, "mod", small_t2(f, B, 4 * D)));
    lg_tensor x = small_norm(f, wanted("x"), chunk(mod, 0), chunk(mod, 1));
    end(small_norm(f, x, chunk(mod, second_shift), chunk(mod, 3)));
    small_grad(f);
}
static void modulate_by_four_slices(void)
{
    modulate(2);
}
static void modulate_by_one_slice_twice(void)
{
    modulate(0);
}
static void share_a_bias(bool weight_too)
{
    lg_tensor w = weight(D, D), bias = bias_of(D), x = wanted("x");
    x = small_linear(f, x, w, bias, LG_ACT_NONE);
    end(small_linear(f, x, weight_too ? w : weight(D, D), bias, LG_ACT_NONE));
    small_grad(f);
}
static void share_a_weight_and_its_bias(void)
{
    share_a_bias(true);
}
static void share_a_bias_alone(void)
{
    share_a_bias(false);
}
static void attend_with_a_bias_of_scores(bool train)
{
    lg_tensor q = lg_split(wanted("q"), 2, D / SMALL_H), shape = small_t3(f, SMALL_H, T, T);
    lg_tensor bias = train ? small_wanted(f, "bias", shape) : small_input(f, "bias", shape);
    lg_attention_forward(
        f->s, &(struct lg_attention_forward_args){
                  .q = q, .k = q, .v = q, .bias = bias, .o = small_out(f, q), .scale = 1});
    small_grad(f);
}
static void attend_with_a_trained_bias(void)
{
    attend_with_a_bias_of_scores(true);
}
static void attend_with_a_constant_bias(void)
{
    attend_with_a_bias_of_scores(false);
}
/* In the backward's order the part comes first. */
static void read_a_part_behind_the_whole(bool residual)
{
    lg_tensor h = small_act(f, wanted("x")), half = small_t1(f, T * D);
    lg_tensor y = residual ? small_residual(f, h, frozen("y"), LG_NONE) : small_act(f, h);
    lg_tensor z = lg_graph_value(f->g, "z", half);
    small_act_into(f, lg_at(h, 0, half), z);
    end(small_add(f, y, z));
    small_grad(f);
}
static void read_a_part_behind_the_whole_of_an_act(void)
{
    read_a_part_behind_the_whole(false);
}
static void read_a_part_behind_the_whole_of_a_residual(void)
{
    read_a_part_behind_the_whole(true);
}
/* The forward uses what a linear keeps: its rule knows of y alone. */
static void read_pre(bool y_too)
{
    lg_tensor pre = lg_graph_value(f->g, "pre", small_t2(f, B * T, D));
    lg_tensor y = lg_graph_value(f->g, "y", pre), x = wanted("x");
    lg_linear_forward(f->s, &(struct lg_linear_forward_args){.x = lg_t2(x.data, f->type, B * T, D),
                                                             .w = weight(D, D),
                                                             .y = y,
                                                             .pre = pre,
                                                             .act = LG_ACT_SILU});
    end(y_too ? small_mul(f, y, pre) : pre);
    small_grad(f);
}
static void read_pre_alone(void)
{
    read_pre(false);
}
static void read_pre_and_y(void)
{
    read_pre(true);
}
/* The caller's gradient is a value of the graph; to what two readers need is added where it lies. */
static void use_a_gradient_given(bool afterwards)
{
    lg_tensor x = wanted("w"), y = small_act(f, x), z = small_act(f, y);
    lg_tensor u = small_residual(f, y, frozen("v"), LG_NONE);
    lg_tensor dz = small_input(f, "d z", x3()), du = small_act(f, small_input(f, "s", x3()));
    lg_tensor dx = lg_graph_bind_sum(f->g, "d x", x3());
    const struct lg_gradient given[] = {{z, dz}, {u, du}}, want = {x, dx};
    lg_graph_grad(
        f->g, &(struct lg_gradients){.given = given, .n_given = 2, .wanted = &want, .n_wanted = 1});
    if (afterwards) small_act(f, du);
}
static void give_a_gradient(void)
{
    use_a_gradient_given(false);
}
static void read_a_gradient_that_was_added_to(void)
{
    use_a_gradient_given(true);
}
static void want(lg_tensor is, bool made)
{
    lg_tensor x = small_input(f, "x", x3()), y = small_out(f, x3());
    small_act_into(f, x, y);
    const struct lg_gradient given = {y, small_input(f, "d y", x3())}, w = {made ? y : x, is};
    lg_graph_grad(
        f->g, &(struct lg_gradients){.given = &given, .n_given = 1, .wanted = &w, .n_wanted = 1});
}
static void want_as_a_sum(void)
{
    want(lg_graph_bind_sum(f->g, "sum", x3()), false);
}
static void want_in_what_is_no_sum(void)
{
    want(lg_graph_bind(f->g, "no sum", x3()), false);
}
static void want_in_a_smaller_one(void)
{
    want(lg_graph_bind_sum(f->g, "sum", small_t1(f, D)), false);
}
static void want_of_what_was_made(void)
{
    want(lg_graph_bind_sum(f->g, "sum", x3()), true);
}

static void run_a_backward_without_a_place(bool without)
{
    lg_tensor x = wanted("x");
    end(small_act(f, x));
    small_grad(f);
    small_compile(f);
    small_run(f, LG_PROGRAM_FORWARD, false);
    if (without) f->data[f->gradient[small_number(f, x)]] = NULL;
    small_run(f, LG_PROGRAM_BACKWARD, false);
}
static void run_a_backward(void)
{
    run_a_backward_without_a_place(false);
}
static void run_a_backward_into_nothing(void)
{
    run_a_backward_without_a_place(true);
}

static void test_refused(void **state)
{
    (void)state;
    assert_false(small_aborts(run_a_backward));
    assert_true(small_aborts(run_a_backward_into_nothing));
    assert_false(small_aborts(modulate_by_four_slices));
    assert_false(small_aborts(share_a_weight_and_its_bias));
    assert_false(small_aborts(give_a_gradient));
    assert_false(small_aborts(want_as_a_sum));
    assert_true(small_aborts(differentiate_what_has_no_rule));
    assert_false(small_aborts(differentiate_a_norm_with_statistics));
    assert_true(small_aborts(differentiate_a_norm_without_statistics));
    assert_true(small_aborts(leave_half_unread));
    assert_true(small_aborts(modulate_by_slices_of_a_parameter));
    assert_true(small_aborts(modulate_by_one_slice_twice));
    assert_true(small_aborts(read_slices_before_the_whole));
    assert_true(small_aborts(share_a_bias_alone));
    assert_true(small_aborts(attend_with_a_trained_bias));
    assert_true(small_aborts(read_a_part_behind_the_whole_of_an_act));
    assert_true(small_aborts(read_pre_alone));
    assert_true(small_aborts(read_a_gradient_that_was_added_to));
    assert_true(small_aborts(want_of_what_was_made));
    assert_true(small_aborts(attend_with_a_constant_bias));
    assert_true(small_aborts(read_a_part_behind_the_whole_of_a_residual));
    assert_true(small_aborts(read_pre_and_y));
    assert_true(small_aborts(want_in_what_is_no_sum));
    assert_true(small_aborts(want_in_a_smaller_one));
}

/* ---- random graphs ---- */

static void check_random(uint64_t seed)
{
    char what[32];
    snprintf(what, sizeof what, "seed %llu", (unsigned long long)seed);
    small_random(f, seed);
    differentiate(what);
}

static void test_random_graphs(void **state)
{
    (void)state;
    const char *seeds = getenv("LG_SEEDS");
    uint64_t first = seeds ? strtoull(seeds, NULL, 10) : 1;
    for (uint64_t i = 0; i < 1000; i++) check_random(first + i);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_each_rule_alone),
        TEST(test_readers_add_in_reverse_order),
        TEST(test_a_weight_used_twice),
        TEST(test_a_gradient_that_is_another_is_copied),
        TEST(test_slices_and_the_whole),
        TEST(test_outputs_are_switched_on),
        TEST(test_frozen_parts_cost_nothing),
        TEST(test_a_frozen_modulation_costs_nothing),
        TEST(test_a_run_may_add),
        TEST(test_a_run_may_add_to_what_is_tied),
        TEST(test_parts_need_what_they_use),
        TEST(test_refused),
        TEST(test_random_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
