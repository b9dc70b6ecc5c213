/* Graphs and programs: what is recorded, what is refused, where values come to lie, and that a program computes
 * what the calls themselves compute, bit for bit. */
#include "base/check.h"
#include "base/philox.h"
#include "kernels/graph/graph_private.h"
#include "kernels/graph/program.h"
#include "tests/unit/small_graph.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static lg_device *device;
static lg_graph *graph;
static lg_stream *record;

static int setup(void **state)
{
    (void)state;
    assert_int_equal(lg_device_open("host", NULL, &device), 0);
    graph = lg_graph_new(device);
    record = lg_graph_stream(graph);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    lg_graph_free(&graph);
    lg_device_close(&device);
    return 0;
}

/* ---- nodes of these tests ---- */

static lg_tensor f2(int64_t a, int64_t b)
{
    return lg_t2(NULL, LG_F32, a, b);
}

static void linear(lg_tensor x, lg_tensor w, lg_tensor y)
{
    lg_linear_forward(record, &(struct lg_linear_forward_args){.x = x, .w = w, .y = y});
}

static void act(lg_tensor x, lg_tensor y)
{
    lg_act_forward(record, &(struct lg_act_forward_args){.x = x, .y = y, .act = LG_ACT_SILU});
}

static void mul(lg_tensor a, lg_tensor b, lg_tensor y)
{
    lg_mul_forward(record, &(struct lg_mul_forward_args){.a = a, .b = b, .y = y});
}

static void add(lg_tensor a, lg_tensor b, lg_tensor y)
{
    lg_add_forward(record, &(struct lg_add_forward_args){.a = a, .b = b, .y = y});
}

/* ---- the print ---- */

static void assert_print(const char *expected)
{
    lg_program *p;
    char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(lg_graph_compile(graph, &p), 0);
    FILE *f = open_memstream(&text, &bytes);
    lg_program_print(p, f);
    fclose(f);
    char *scratch = strstr(text, "; scratch ");
    assert_non_null(scratch);
    strcpy(scratch, "\n"); /* the backend's matter */
    assert_string_equal(text, expected);
    free(text);
    lg_program_free(&p);
}

/* A gated unit: views of one product, a value that two nodes read, two in-place outputs, one that is not. */
static void test_print(void **state)
{
    (void)state;
    lg_tensor x = lg_graph_bind(graph, "x", f2(8, 16)), w = lg_graph_bind(graph, "w", f2(16, 16));
    lg_tensor out = lg_graph_bind(graph, "out", f2(8, 16));
    lg_tensor h = lg_graph_value(graph, "h", f2(8, 16)), half = f2(4, 16);
    lg_tensor a = lg_graph_value(graph, "a", half), g = lg_graph_value(graph, "g", half);
    lg_tensor y = lg_graph_value(graph, "y", f2(8, 16));
    linear(x, w, h);
    act(lg_at(h, 0, half), a);     /* a view: not in place */
    mul(a, lg_at(h, 64, half), g); /* in place of a */
    act(h, y);                     /* in place of h */
    add(y, g, out);
    assert_print("v0 x f32 8,16: 512 bytes, bound 0, used up to n0\n"
                 "v1 w f32 16,16: 1024 bytes, bound 1, used up to n0\n"
                 "v2 out f32 8,16: 512 bytes, bound 2, made by n4, used up to n4\n"
                 "v3 h f32 8,16: 512 bytes at 0, made by n0, used up to n3\n"
                 "v4 a f32 4,16: 256 bytes at 512, made by n1, used up to n2\n"
                 "v5 g f32 4,16: 256 bytes at 512 in place of v4, made by n2, used up to n4\n"
                 "v6 y f32 8,16: 512 bytes at 0 in place of v3, made by n3, used up to n4\n"
                 "n0 linear_forward act=0 | x=v0(8,16) w=v1(16,16) >y=v3(8,16)\n"
                 "n1 act_forward act=1 | x=v3(4,16) >y=v4(4,16)\n"
                 "n2 mul_forward | a=v4(4,16) b=v3+256(4,16) >y=v5(4,16)\n"
                 "n3 act_forward act=1 | x=v3(8,16) >y=v6(8,16)\n"
                 "n4 add_forward | a=v6(8,16) b=v5(4,16) >y=v2(8,16)\n"
                 "5 nodes, 7 values, arena 768 bytes, of which n1 uses 768\n");
}

/* Views with gaps: a gate, which is a part of a wider buffer, and the heads of packed q, k, v. */
static void test_print_strides(void **state)
{
    (void)state;
    lg_tensor x = lg_graph_bind(graph, "x", lg_t3(NULL, LG_F32, 2, 3, 4));
    lg_tensor mod = lg_graph_bind(graph, "mod", f2(2, 12)), out = lg_graph_bind(graph, "out", x);
    lg_tensor qkv = lg_graph_bind(graph, "qkv", lg_t3(NULL, LG_F32, 2, 3, 12)), head[3];
    lg_gate_residual_forward(record,
                             &(struct lg_gate_residual_forward_args){
                                 .x = x, .y = x, .gate = lg_slice(mod, 1, 8, 4), .out = out});
    for (int i = 0; i < 3; i++) head[i] = lg_split(lg_slice(qkv, 2, 4 * i, 4), 2, 2);
    lg_tensor o = lg_graph_value(graph, "o", head[0]); /* its shape alone */
    lg_attention_forward(record, &(struct lg_attention_forward_args){
                                     .q = head[0], .k = head[1], .v = head[2], .o = o, .scale = 1});
    assert_print(
        "v0 x f32 2,3,4: 96 bytes, bound 0, used up to n0\n"
        "v1 mod f32 2,12: 96 bytes, bound 1, used up to n0\n"
        "v2 out f32 2,3,4: 96 bytes, bound 2, made by n0, used up to n0\n"
        "v3 qkv f32 2,3,12: 288 bytes, bound 3, used up to n1\n"
        "v4 o f32 2,3,2,2: 96 bytes at 0, made by n1, used up to n1\n"
        "n0 gate_residual_forward | x=v0(2,3,4) y=v0(2,3,4) gate=v1+32(2,4/12) >out=v2(2,3,4)\n"
        "n1 attention_forward scale=1 causal=0 first_queries=0 first_keys=0 | q=v3(2,3,2,2/12) "
        "k=v3+16(2,3,2,2/12) "
        "v=v3+32(2,3,2,2/12) "
        ">o=v4(2,3,2,2)\n"
        "2 nodes, 5 values, arena 128 bytes, of which n1 uses 96\n");
}

/* One whose value is read again later may not be replaced, nor may one that is read twice by the node. */
static void test_not_in_place(void **state)
{
    (void)state;
    lg_tensor x = lg_graph_bind(graph, "x", f2(4, 4)), out = lg_graph_bind(graph, "out", f2(4, 4));
    lg_tensor a = lg_graph_value(graph, "a", f2(4, 4)), b = lg_graph_value(graph, "b", f2(4, 4));
    lg_tensor c = lg_graph_value(graph, "c", f2(4, 4)), d = lg_graph_value(graph, "d", f2(4, 4));
    act(x, a);
    act(a, b);    /* a is read again */
    mul(a, b, c); /* in place of a: it comes first */
    add(c, c, d); /* may be one of them, but not the other */
    act(d, out);
    assert_print("v0 x f32 4,4: 64 bytes, bound 0, used up to n0\n"
                 "v1 out f32 4,4: 64 bytes, bound 1, made by n4, used up to n4\n"
                 "v2 a f32 4,4: 64 bytes at 0, made by n0, used up to n2\n"
                 "v3 b f32 4,4: 64 bytes at 64, made by n1, used up to n2\n"
                 "v4 c f32 4,4: 64 bytes at 0 in place of v2, made by n2, used up to n3\n"
                 "v5 d f32 4,4: 64 bytes at 64, made by n3, used up to n4\n"
                 "n0 act_forward act=1 | x=v0(4,4) >y=v2(4,4)\n"
                 "n1 act_forward act=1 | x=v2(4,4) >y=v3(4,4)\n"
                 "n2 mul_forward | a=v2(4,4) b=v3(4,4) >y=v4(4,4)\n"
                 "n3 add_forward | a=v4(4,4) b=v4(4,4) >y=v5(4,4)\n"
                 "n4 act_forward act=1 | x=v5(4,4) >y=v1(4,4)\n"
                 "5 nodes, 6 values, arena 128 bytes, of which n1 uses 128\n");
}

/* Worked out by hand. */
static void test_flops(void **state)
{
    (void)state;
    lg_program *p;
    lg_tensor x = lg_graph_bind(graph, "x", f2(8, 16)), w = lg_graph_bind(graph, "w", f2(24, 16));
    lg_tensor y = lg_graph_value(graph, "y", f2(8, 24));
    /* 2 samples, 4 tokens, q, k and v, 2 heads of 4 */
    const lg_tensor head = lg_split(lg_split(y, 0, 4), 2, 4);
    linear(x, w, y); /* 2 * 8 * 24 * 16 */
    lg_attention_forward(record, &(struct lg_attention_forward_args){
                                     .q = lg_slice(head, 2, 0, 2),
                                     .k = lg_slice(head, 2, 2, 2),
                                     .v = lg_slice(head, 2, 4, 2),
                                     .o = lg_graph_value(graph, "o", lg_slice(head, 2, 0, 2)),
                                     .scale = 1}); /* 2 * 2 heads * 2 products * 2 * 4 * 4 * 4 */
    lg_tensor map = lg_graph_bind(graph, "map", lg_t4(NULL, LG_F32, 1, 4, 4, 16));
    lg_tensor kernel = lg_graph_bind(graph, "kernel", lg_t4(NULL, LG_F32, 32, 3, 3, 16));
    lg_tensor bias = lg_graph_bind(graph, "bias", lg_t1(NULL, LG_F32, 32));
    lg_tensor made = lg_graph_bind(graph, "made", lg_t4(NULL, LG_F32, 1, 2, 2, 32));
    lg_conv2d_forward(record,
                      &(struct lg_conv2d_forward_args){.x = map,
                                                       .w = kernel,
                                                       .bias = bias,
                                                       .y = made,
                                                       .stride = 1}); /* 2 * 2 * 2 * 32 * 9 * 16 */
    assert_int_equal(lg_graph_compile(graph, &p), 0);
    assert_true(lg_program_flops(p) == 6144 + 1024 + 36864);
    lg_program_free(&p);
}

/* ---- what is refused ---- */

static lg_tensor bound, value, other; /* (4, 4) */

static void write_value(void)
{
    act(bound, value);
}
static void write_twice(void)
{
    act(bound, value);
    act(bound, value);
}
static void write_over_a_part(void)
{
    act(bound, value);
    act(lg_at(bound, 0, f2(1, 4)), lg_at(value, 12, f2(1, 4)));
}
static void write_two_parts(void)
{
    act(lg_at(bound, 0, f2(2, 4)), lg_at(value, 0, f2(2, 4)));
    act(lg_at(bound, 0, f2(2, 4)), lg_at(value, 8, f2(2, 4)));
}
static void read_what_nobody_wrote(void)
{
    act(other, value);
}
static void write_where_it_reads(void)
{
    act(bound, value);
    act(value, value);
}
static void reach_behind_a_value(void)
{
    act(bound, lg_at(value, 1, f2(4, 4)));
}
static void be_no_value(void)
{
    static float memory[16];
    act(bound, lg_t2(memory, LG_F32, 4, 4));
}
static void accumulate(void)
{
    lg_sum_rows(record, &(struct lg_sum_rows_args){.x = bound,
                                                   .y = lg_at(value, 0, lg_t1(NULL, LG_F32, 4)),
                                                   .accumulate = true});
}
/* dx (+)= dy act'(x), of all of it. */
static void act_backward(lg_tensor x, lg_tensor dy, lg_tensor dx, bool add)
{
    lg_act_backward(record, &(struct lg_act_backward_args){
                                .x = x, .dy = dy, .dx = dx, .act = LG_ACT_SILU, .accumulate = add});
}
static void add_to_a_value(void)
{
    act(bound, value);
    act_backward(bound, bound, lg_graph_again(graph, value), true);
}
static void add_to_one_after_the_other(void)
{
    act(bound, value);
    lg_tensor more = lg_graph_again(graph, value);
    act_backward(bound, bound, more, true);
    act_backward(bound, bound, lg_graph_again(graph, more), true);
}
static void add_to_a_value_twice(void)
{
    act(bound, value);
    lg_tensor more = lg_graph_again(graph, value);
    act_backward(bound, bound, more, true);
    act_backward(bound, bound, more, true);
}
static void continue_a_value_twice(void)
{
    act(bound, value);
    lg_graph_again(graph, value);
    lg_graph_again(graph, value);
}
static void continue_what_is_bound(void)
{
    lg_graph_again(graph, bound);
}
static void overwrite_what_was_continued(void)
{
    act(bound, value);
    act_backward(bound, bound, lg_graph_again(graph, value), false);
}
static void add_to_what_nobody_wrote(void)
{
    act_backward(bound, bound, lg_graph_again(graph, value), true);
}
static void read_before_it_is_added_to(void)
{
    act(bound, value);
    lg_tensor more = lg_graph_again(graph, value);
    act(value, other);
    act_backward(bound, bound, more, true);
}
static void read_after_it_was_added_to(void)
{
    add_to_a_value();
    act(value, other);
}
static void add_to_a_sum(bool sum, bool first)
{
    lg_tensor into =
        sum ? lg_graph_bind_sum(graph, "sum", bound) : lg_graph_bind(graph, "no sum", bound);
    if (first) act_backward(bound, bound, into, false);
    act_backward(bound, bound, into, true);
}
static void add_to_a_sum_that_was_written(void)
{
    add_to_a_sum(true, true);
}
static void add_to_a_sum_that_nobody_wrote(void)
{
    add_to_a_sum(true, false);
}
static void add_to_a_bound_one_that_is_no_sum(void)
{
    add_to_a_sum(false, true);
}
static void compile_only(void)
{
    lg_program *p;
    if (lg_graph_compile(graph, &p) == 0) lg_program_free(&p);
}
/* A run could not add there. */
static void compile_a_sum_to_which_nobody_can_add(void)
{
    act(bound, lg_graph_bind_sum(graph, "sum", bound));
    compile_only();
}
static void compile_a_sum(void)
{
    add_to_a_sum(true, true);
    compile_only();
}
static void copy(void)
{
    lg_stream_zero(record, value.data, 16);
}
/* Slices of one buffer, as a backward writes its modulation. */
static void write_slices(int64_t first, int64_t second)
{
    lg_tensor x = lg_graph_bind(graph, "x", lg_t3(NULL, LG_F32, 2, 3, 4));
    lg_tensor mod = lg_graph_value(graph, "dmod", f2(2, 12));
    lg_tensor gate = lg_graph_bind(graph, "gate", f2(2, 12));
    for (int i = 0; i < 2; i++)
        lg_gate_residual_backward(record, &(struct lg_gate_residual_backward_args){
                                              .dout = x,
                                              .y = x,
                                              .gate = lg_slice(gate, 1, 0, 4),
                                              .dy = lg_graph_value(graph, "dy", x),
                                              .dgate = lg_slice(mod, 1, i ? second : first, 4)});
}
/* With 12, as it lies in the buffer, it would not. */
static void reach_behind_by_strides(int64_t stride)
{
    lg_tensor x = lg_graph_bind(graph, "x", lg_t3(NULL, LG_F32, 2, 3, 4));
    lg_tensor gate = lg_slice(lg_graph_bind(graph, "gate", f2(2, 12)), 1, 8, 4);
    gate.stride[0] = stride;
    lg_gate_residual_forward(
        record, &(struct lg_gate_residual_forward_args){
                    .x = x, .y = x, .gate = gate, .out = lg_graph_value(graph, "out", x)});
}
static void reach_the_end_by_strides(void)
{
    reach_behind_by_strides(12);
}
static void reach_behind_a_value_by_strides(void)
{
    reach_behind_by_strides(13);
}
static void write_slices_apart(void)
{
    write_slices(0, 8);
}
static void write_slices_that_meet(void)
{
    write_slices(0, 3);
}
static void write_slices_that_meet_from_behind(void)
{
    write_slices(3, 0);
}

static void test_refused(void **state)
{
    (void)state;
    bound = lg_graph_bind(graph, "bound", f2(4, 4));
    value = lg_graph_value(graph, "value", f2(4, 4));
    other = lg_graph_value(graph, "other", f2(4, 4));
    assert_false(small_aborts(write_value));
    assert_false(small_aborts(write_two_parts));
    assert_false(small_aborts(write_slices_apart));
    assert_false(small_aborts(reach_the_end_by_strides));
    assert_true(small_aborts(write_twice));
    assert_true(small_aborts(write_over_a_part));
    assert_true(small_aborts(write_slices_that_meet));
    assert_true(small_aborts(write_slices_that_meet_from_behind));
    assert_true(small_aborts(read_what_nobody_wrote));
    assert_true(small_aborts(write_where_it_reads));
    assert_true(small_aborts(reach_behind_a_value));
    assert_true(small_aborts(reach_behind_a_value_by_strides));
    assert_true(small_aborts(be_no_value));
    assert_true(small_aborts(accumulate));
    assert_true(small_aborts(copy));
    assert_false(small_aborts(add_to_a_value));
    assert_false(small_aborts(add_to_one_after_the_other));
    assert_false(small_aborts(read_before_it_is_added_to));
    assert_false(small_aborts(add_to_a_sum_that_was_written));
    assert_false(small_aborts(compile_a_sum));
    assert_true(small_aborts(add_to_a_value_twice));
    assert_true(small_aborts(continue_a_value_twice));
    assert_true(small_aborts(continue_what_is_bound));
    assert_true(small_aborts(overwrite_what_was_continued));
    assert_true(small_aborts(add_to_what_nobody_wrote));
    assert_true(small_aborts(read_after_it_was_added_to));
    assert_true(small_aborts(add_to_a_sum_that_nobody_wrote));
    assert_true(small_aborts(add_to_a_bound_one_that_is_no_sum));
    assert_true(small_aborts(compile_a_sum_to_which_nobody_can_add));
}

/* ---- random graphs ---- */

enum { VALUES = 24, ROWS = 6, COLUMNS = 16, ELEMENTS = ROWS * COLUMNS, BOUND = 4 };

/* The same calls twice: recorded, and run at once with every value in memory of its own. */
struct twice {
    lg_stream *live;
    float *memory;          /* of every value, ELEMENTS each */
    lg_tensor on[VALUES];   /* in the graph */
    lg_tensor real[VALUES]; /* at once */
    bool gone[VALUES];      /* continued by another */
    uint64_t seed, drawn;
};

static uint32_t draw(struct twice *t, uint32_t below)
{
    return lg_philox(t->seed, LG_PURPOSE_INIT, 7, t->drawn++).v[0] % below;
}

static lg_tensor piece(lg_tensor t, int64_t from, int64_t rows)
{
    return lg_at(t, from * COLUMNS, f2(rows, COLUMNS));
}

static void call(struct twice *t, int op, const int *in, int out, int64_t from, int64_t rows)
{
    for (int live = 0; live < 2; live++) {
        lg_stream *s = live ? t->live : record;
        const lg_tensor *v = live ? t->real : t->on;
        lg_tensor a = piece(v[in[0]], op == 3 ? 0 : from, rows), y = piece(v[out], from, rows);
        if (op == 0)
            lg_act_forward(s, &(struct lg_act_forward_args){.x = a, .y = y, .act = LG_ACT_SILU});
        else if (op == 1)
            lg_mul_forward(
                s, &(struct lg_mul_forward_args){.a = a, .b = piece(v[in[1]], from, rows), .y = y});
        else if (op == 2)
            lg_add_forward(
                s, &(struct lg_add_forward_args){.a = a, .b = piece(v[in[1]], from, 1), .y = y});
        else
            lg_combine(s, &(struct lg_combine_args){.x = {a, piece(v[in[1]], from, rows)},
                                                    .c = {0.5, -0.25},
                                                    .count = 2,
                                                    .y = y});
    }
}

static int pick(struct twice *t, int below)
{
    int v;
    do v = 1 + (int)draw(t, (uint32_t)below - 1);
    while (t->gone[v]);
    return v;
}

/* v continues `old`, to which something is added, to all of it or to some rows; at once it is a copy. */
static void continue_one(struct twice *t, int v, int old, const int *in)
{
    int64_t rows = draw(t, 2) ? ROWS : 1 + draw(t, ROWS - 1);
    t->on[v] = lg_graph_again(graph, t->on[old]);
    t->gone[old] = true;
    memcpy(t->real[v].data, t->real[old].data, ELEMENTS * sizeof(float));
    for (int live = 0; live < 2; live++) {
        const lg_tensor *of = live ? t->real : t->on;
        lg_act_backward(live ? t->live : record,
                        &(struct lg_act_backward_args){.x = piece(of[in[0]], 0, rows),
                                                       .dy = piece(of[in[1]], 0, rows),
                                                       .dx = piece(of[v], 0, rows),
                                                       .act = LG_ACT_SILU,
                                                       .accumulate = true});
    }
}

/* Each value is made of earlier ones, as a whole or in two pieces, or continues one. */
static void make_random(struct twice *t)
{
    for (int v = BOUND; v < VALUES; v++) {
        const int in[2] = {pick(t, v), pick(t, v)};
        int64_t cut = draw(t, 3) ? ROWS : 1 + draw(t, ROWS - 1);
        int op = (int)draw(t, 5), old = pick(t, v);
        t->real[v] = lg_t2(t->memory + v * ELEMENTS, LG_F32, ROWS, COLUMNS);
        if (op == 4 && old >= BOUND && old != in[0] && old != in[1] && v + 1 < VALUES) {
            continue_one(t, v, old, in);
            continue;
        }
        t->on[v] = v + 1 < VALUES ? lg_graph_value(graph, "v", f2(ROWS, COLUMNS)) : t->on[0];
        if (op == 2 && in[0] == in[1]) op = 0;
        call(t, op, in, v, 0, cut);
        if (cut < ROWS) call(t, op, in, v, cut, ROWS - cut);
    }
}

static void random_graph(uint64_t seed)
{
    struct twice t = {.seed = seed};
    void *arena = NULL, *where[BOUND];
    float *memory;
    size_t bytes = (size_t)VALUES * ELEMENTS * sizeof(float);
    lg_program *p;
    graph = lg_graph_new(device);
    record = lg_graph_stream(graph);
    assert_int_equal(lg_stream_open(device, &t.live), 0);
    assert_int_equal(lg_device_alloc(device, bytes, (void **)&t.memory), 0);
    assert_int_equal(lg_device_alloc(device, bytes, (void **)&memory), 0);
    for (int i = 0; i < BOUND; i++) { /* 0: the result */
        t.on[i] = lg_graph_bind(graph, "bound", f2(ROWS, COLUMNS));
        t.real[i] = lg_t2(t.memory + i * ELEMENTS, LG_F32, ROWS, COLUMNS);
        lg_philox_normal_f32(t.memory + i * ELEMENTS, ELEMENTS, seed, LG_PURPOSE_INIT, (uint64_t)i,
                             0);
        where[i] = memory + i * ELEMENTS;
    }
    memcpy(memory, t.memory, BOUND * ELEMENTS * sizeof(float));
    make_random(&t);
    assert_int_equal(lg_graph_compile(graph, &p), 0);
    lg_graph_free(&graph);
    assert_true(lg_program_arena_bytes(p) <= bytes);
    if (lg_program_arena_bytes(p)) {
        assert_int_equal(lg_device_alloc(device, lg_program_arena_bytes(p), &arena), 0);
        memset(arena, 0xff,
               lg_program_arena_bytes(p)); /* NaN: what a value's place held is never read */
    }
    for (int again = 0; again < 2; again++) {
        memset(memory, 0xff, ELEMENTS * sizeof(float));
        lg_program_run(p, t.live, &(struct lg_program_memory){.arena = arena, .bound = where},
                       LG_PROGRAM_ALL);
        if (memcmp(memory, t.memory + (VALUES - 1) * ELEMENTS, ELEMENTS * sizeof(float)) != 0)
            fail_msg("graph of seed %llu differs", (unsigned long long)seed);
        assert_memory_equal(memory + ELEMENTS, t.memory + ELEMENTS,
                            (BOUND - 1) * ELEMENTS * sizeof(float));
    }
    lg_program_free(&p);
    lg_stream_close(&t.live);
    lg_device_free(device, &arena);
    lg_device_free(device, (void **)&t.memory);
    lg_device_free(device, (void **)&memory);
}

static void test_random_graphs(void **state)
{
    (void)state;
    const char *seeds = getenv("LG_SEEDS");
    uint64_t first = seeds ? strtoull(seeds, NULL, 10) : 1;
    lg_graph_free(&graph);
    for (uint64_t i = 0; i < 300; i++) random_graph(first + i);
    graph = lg_graph_new(device);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_print), TEST(test_print_strides), TEST(test_not_in_place),
        TEST(test_flops), TEST(test_refused),       TEST(test_random_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
