/* See small_graph.h. */
#include "tests/unit/small_graph.h"
#include "base/check.h"
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- life ---- */

void small_open(struct small_graph *f, const char *device, const char *isa)
{
    *f = (struct small_graph){0};
    if (lg_device_open(device, &(struct lg_device_options){.threads = 1, .isa = isa}, &f->device) <
            0 ||
        lg_stream_open(f->device, &f->stream) < 0)
        fail_msg("%s", lg_err_text());
    LG_ASSERT(lg_device_is_host(f->device));
    f->type = lg_device_dtype(f->device);
}

static void free_program(struct small_graph *f)
{
    lg_program_free(&f->p);
    lg_device_free(f->device, &f->arena);
    lg_device_free(f->device, &f->scratch);
}

static void free_graph(struct small_graph *f)
{
    free_program(f);
    lg_graph_free(&f->g);
    while (f->n > 0) lg_device_free(f->device, &f->data[--f->n]);
}

void small_close(struct small_graph *f)
{
    free_graph(f);
    lg_stream_close(&f->stream);
    lg_device_close(&f->device);
}

void small_begin(struct small_graph *f, uint64_t seed)
{
    free_graph(f);
    f->seed = seed;
    f->g = lg_graph_new(f->device);
    f->s = lg_graph_stream(f->g);
    f->out = f->dout = -1;
}

/* ---- what is bound ---- */

lg_tensor small_t1(const struct small_graph *f, int64_t a)
{
    return lg_t1(NULL, f->type, a);
}

lg_tensor small_t2(const struct small_graph *f, int64_t a, int64_t b)
{
    return lg_t2(NULL, f->type, a, b);
}

lg_tensor small_t3(const struct small_graph *f, int64_t a, int64_t b, int64_t c)
{
    return lg_t3(NULL, f->type, a, b, c);
}

int small_number(const struct small_graph *f, lg_tensor t)
{
    int i = 0;
    while (i < f->n && f->on[i].data != t.data) i++;
    LG_ASSERT(i < f->n);
    return i;
}

int64_t small_numel(const struct small_graph *f, int i)
{
    return lg_numel(&f->on[i]);
}

double small_get(const struct small_graph *f, int i, int64_t e)
{
    return f->type == LG_F64 ? ((double *)f->data[i])[e] : (double)((float *)f->data[i])[e];
}

void small_set(struct small_graph *f, int i, int64_t e, double value)
{
    if (f->type == LG_F64)
        ((double *)f->data[i])[e] = value;
    else
        ((float *)f->data[i])[e] = (float)value;
}

static lg_tensor keep(struct small_graph *f, lg_tensor on)
{
    LG_ASSERT(f->n < SMALL_BOUND_MAX);
    if (lg_device_alloc(f->device, lg_tensor_bytes(&on), &f->data[f->n]) < 0)
        fail_msg("%s", lg_err_text());
    f->wanted[f->n] = false;
    f->gradient[f->n] = -1;
    f->on[f->n++] = on;
    return on;
}

static void fill(struct small_graph *f, int i, double value)
{
    for (int64_t e = 0; e < small_numel(f, i); e++) small_set(f, i, e, value);
}

lg_tensor small_input(struct small_graph *f, const char *name, lg_tensor shape)
{
    lg_tensor t = keep(f, lg_graph_bind(f->g, name, shape));
    const int i = f->n - 1;
    const int64_t n = small_numel(f, i);
    double *v = malloc((size_t)n * sizeof *v);
    LG_ASSERT(v);
    lg_philox_normal_f64(v, (size_t)n, f->seed, LG_PURPOSE_TEST, (uint64_t)i, 0);
    for (int64_t e = 0; e < n; e++) small_set(f, i, e, v[e]);
    free(v);
    return t;
}

lg_tensor small_wanted(struct small_graph *f, const char *name, lg_tensor shape)
{
    lg_tensor t = small_input(f, name, shape);
    f->wanted[f->n - 1] = true;
    return t;
}

lg_tensor small_ints(struct small_graph *f, const char *name, int64_t n, const int32_t *v)
{
    lg_tensor t = keep(f, lg_graph_bind(f->g, name, lg_t1(NULL, LG_I32, n)));
    memcpy(f->data[f->n - 1], v, (size_t)n * sizeof *v);
    return t;
}

lg_tensor small_out(struct small_graph *f, lg_tensor shape)
{
    lg_tensor t = keep(f, lg_graph_bind(f->g, "out", shape));
    f->out = f->n - 1;
    fill(f, f->out, NAN);
    return t;
}

void small_fill_gradients(struct small_graph *f)
{
    for (int i = 0; i < f->n; i++)
        if (f->wanted[i]) fill(f, f->gradient[i], SMALL_FILL);
}

void small_grad(struct small_graph *f)
{
    struct lg_gradient given, wanted[SMALL_BOUND_MAX];
    int n_wanted = 0;
    given.of = f->on[f->out];
    given.is = small_input(f, "d out", given.of);
    f->dout = f->n - 1;
    for (int i = 0, n = f->n; i < n; i++) {
        if (!f->wanted[i]) continue;
        f->gradient[i] = f->n;
        lg_tensor sum = keep(f, lg_graph_bind_sum(f->g, "gradient", f->on[i]));
        wanted[n_wanted++] = (struct lg_gradient){f->on[i], sum};
    }
    small_fill_gradients(f);
    lg_graph_grad(f->g, &(struct lg_gradients){
                            .given = &given, .n_given = 1, .wanted = wanted, .n_wanted = n_wanted});
}

/* ---- nodes ---- */

static lg_tensor rows_of(lg_tensor t)
{
    int64_t k = t.dim[t.rank - 1];
    return lg_t2(t.data, t.dtype, lg_numel(&t) / k, k);
}

lg_tensor small_linear(struct small_graph *f, lg_tensor x, lg_tensor w, lg_tensor bias, lg_act act)
{
    lg_tensor shape = x;
    shape.dim[x.rank - 1] = w.dim[0];
    lg_tensor y = lg_graph_value(f->g, "linear", shape);
    lg_linear_forward(f->s,
                      &(struct lg_linear_forward_args){
                          .x = rows_of(x), .w = w, .bias = bias, .y = rows_of(y), .act = act});
    return y;
}

void small_act_into(struct small_graph *f, lg_tensor x, lg_tensor y)
{
    lg_act_forward(f->s, &(struct lg_act_forward_args){.x = x, .y = y, .act = LG_ACT_SILU});
}

lg_tensor small_act(struct small_graph *f, lg_tensor x)
{
    lg_tensor y = lg_graph_value(f->g, "act", x);
    small_act_into(f, x, y);
    return y;
}

lg_tensor small_mul(struct small_graph *f, lg_tensor a, lg_tensor b)
{
    lg_tensor y = lg_graph_value(f->g, "product", a);
    lg_mul_forward(f->s, &(struct lg_mul_forward_args){.a = a, .b = b, .y = y});
    return y;
}

lg_tensor small_add(struct small_graph *f, lg_tensor a, lg_tensor b)
{
    lg_tensor y = lg_graph_value(f->g, "sum", a);
    lg_add_forward(f->s, &(struct lg_add_forward_args){.a = a, .b = b, .y = y});
    return y;
}

lg_tensor small_norm(struct small_graph *f, lg_tensor x, lg_tensor shift, lg_tensor scale)
{
    lg_tensor y = lg_graph_value(f->g, "norm", x), stat = small_t2(f, x.dim[0], x.dim[1]);
    lg_norm_modulate_forward(f->s, &(struct lg_norm_modulate_forward_args){
                                       .x = x,
                                       .shift = shift,
                                       .scale = scale,
                                       .y = y,
                                       .mean = lg_graph_value(f->g, "mean", stat),
                                       .rstd = lg_graph_value(f->g, "rstd", stat),
                                       .eps = 1e-2}); /* few features: not too steep */
    return y;
}

lg_tensor small_residual(struct small_graph *f, lg_tensor x, lg_tensor y, lg_tensor gate)
{
    lg_tensor out = lg_graph_value(f->g, "residual", x);
    lg_gate_residual_forward(
        f->s, &(struct lg_gate_residual_forward_args){.x = x, .y = y, .gate = gate, .out = out});
    return out;
}

lg_tensor small_attention(struct small_graph *f, lg_tensor q, lg_tensor k, lg_tensor v,
                          lg_tensor k_length)
{
    const int64_t d = q.dim[2] / SMALL_H;
    lg_tensor o = lg_graph_value(f->g, "attention", q);
    lg_attention_forward(f->s, &(struct lg_attention_forward_args){.q = lg_split(q, 2, d),
                                                                   .k = lg_split(k, 2, d),
                                                                   .v = lg_split(v, 2, d),
                                                                   .k_length = k_length,
                                                                   .o = lg_split(o, 2, d),
                                                                   .scale = 0.7});
    return o;
}

static lg_tensor own_linear(struct small_graph *f, lg_tensor x, int64_t out, lg_act act)
{
    lg_tensor w = small_wanted(f, "w", small_t2(f, out, x.dim[x.rank - 1]));
    return small_linear(f, x, w, small_wanted(f, "bias", small_t1(f, out)), act);
}

lg_tensor small_block(struct small_graph *f, lg_tensor x, lg_tensor mod)
{
    enum { D = SMALL_D };
    lg_tensor chunk[6];
    for (int i = 0; i < 6; i++) chunk[i] = lg_slice(mod, 1, i * D, D);
    lg_tensor y = small_norm(f, x, chunk[0], chunk[1]);
    lg_tensor qkv = own_linear(f, y, 3 * D, LG_ACT_NONE);
    y = small_attention(f, lg_slice(qkv, 2, 0, D), lg_slice(qkv, 2, D, D),
                        lg_slice(qkv, 2, 2 * D, D), LG_NONE);
    x = small_residual(f, x, own_linear(f, y, D, LG_ACT_NONE), chunk[2]);
    y = own_linear(f, small_norm(f, x, chunk[3], chunk[4]), 2 * D, LG_ACT_GELU_TANH);
    return small_residual(f, x, own_linear(f, y, D, LG_ACT_NONE), chunk[5]);
}

/* ---- random graphs ---- */

enum { POOL_MAX = 32 };

struct random {
    struct small_graph *f;
    uint64_t drawn;
    lg_tensor x[POOL_MAX]; /* (B, T, D), whole values */
    int n;
    lg_tensor w, bias; /* of the linear before: (D, D), (D) or none */
};

static int draw(struct random *r, int below)
{
    return (int)(lg_philox(r->f->seed, LG_PURPOSE_TEST, 7, r->drawn++).v[0] % (uint32_t)below);
}

static lg_tensor pick(struct random *r)
{
    return r->x[draw(r, 2) ? r->n - 1 : draw(r, r->n)];
}

/* Three of four are wanted. Small ones, lest products grow steep. */
static lg_tensor parameter(struct random *r, const char *name, lg_tensor shape)
{
    lg_tensor t = small_input(r->f, name, shape);
    const int i = r->f->n - 1;
    r->f->wanted[i] = draw(r, 4) > 0;
    for (int64_t e = 0; e < small_numel(r->f, i); e++)
        small_set(r->f, i, e, 0.5 * small_get(r->f, i, e));
    return t;
}

static lg_tensor random_linear(struct random *r, lg_tensor x, int64_t out)
{
    static const lg_act ACTS[] = {LG_ACT_NONE, LG_ACT_SILU, LG_ACT_GELU_TANH};
    const int64_t in = x.dim[x.rank - 1];
    const bool square = in == SMALL_D && out == SMALL_D, again = square && draw(r, 3) == 0;
    lg_tensor w = again ? r->w : LG_NONE, bias = again ? r->bias : LG_NONE;
    if (!w.rank) {
        w = parameter(r, "w", small_t2(r->f, out, in));
        if (draw(r, 3)) bias = parameter(r, "bias", small_t1(r->f, out));
    }
    if (square) r->w = w, r->bias = bias;
    return small_linear(r->f, x, w, bias, ACTS[draw(r, 3)]);
}

/* Parts of a frozen parameter, or of a value. */
static lg_tensor random_modulation(struct random *r)
{
    enum { B = SMALL_B, D = SMALL_D };
    if (draw(r, 3) == 0) return small_input(r->f, "mod", small_t2(r->f, B, 3 * D));
    lg_tensor condition = parameter(r, "condition", small_t2(r->f, B, 3));
    return random_linear(r, condition, 3 * D);
}

static lg_tensor random_half_block(struct random *r, lg_tensor x)
{
    enum { D = SMALL_D };
    lg_tensor mod = random_modulation(r);
    lg_tensor y = small_norm(r->f, x, lg_slice(mod, 1, 0, D), lg_slice(mod, 1, D, D));
    if (draw(r, 4)) y = random_linear(r, y, D);
    return small_residual(r->f, draw(r, 3) ? x : pick(r), y, lg_slice(mod, 1, 2 * D, D));
}

static lg_tensor random_attention(struct random *r, lg_tensor x)
{
    enum { D = SMALL_D };
    static const int32_t lengths[] = {2, 3};
    if (draw(r, 2)) {
        lg_tensor qkv = random_linear(r, x, 3 * D);
        return small_attention(r->f, lg_slice(qkv, 2, 0, D), lg_slice(qkv, 2, D, D),
                               lg_slice(qkv, 2, 2 * D, D), LG_NONE);
    }
    lg_tensor k = pick(r), v = pick(r);
    bool shorter = draw(r, 2);
    return small_attention(r->f, x, k, v,
                           shorter ? small_ints(r->f, "lengths", SMALL_B, lengths) : LG_NONE);
}

static lg_tensor random_halves(struct random *r, lg_tensor x)
{
    enum { HALF = SMALL_T * SMALL_D };
    const int first = draw(r, 2);
    lg_tensor whole = small_act(r->f, x), y = lg_graph_value(r->f->g, "halves", whole);
    for (int i = 0; i < 2; i++) {
        int64_t at = (i ^ first) * HALF;
        small_act_into(r->f, lg_at(whole, at, small_t1(r->f, HALF)),
                       lg_at(y, at, small_t1(r->f, HALF)));
    }
    return draw(r, 2) ? small_mul(r->f, y, whole) : y;
}

/* y + c (x A^T) B^T, its columns in two parts that are brought together. */
static lg_tensor random_low_rank(struct random *r, lg_tensor x, lg_tensor y)
{
    enum { ROWS = SMALL_B * SMALL_T, D = SMALL_D, HALF = D / 2, RANK = 2 };
    const lg_act act = draw(r, 3) ? LG_ACT_NONE : LG_ACT_SILU;
    lg_tensor h =
        small_linear(r->f, x, parameter(r, "A", small_t2(r->f, RANK, D)), LG_NONE, LG_ACT_NONE);
    lg_tensor scaled = lg_graph_value(r->f->g, "scaled", h);
    lg_combine(r->f->s, &(struct lg_combine_args){.x = {h}, .c = {0.5}, .count = 1, .y = scaled});
    lg_tensor b = parameter(r, "B", small_t2(r->f, D, RANK));
    lg_tensor sum = lg_graph_value(r->f->g, "sum", y);
    lg_linear_forward(
        r->f->s,
        &(struct lg_linear_forward_args){
            .x = rows_of(scaled), .w = b, .residual = rows_of(y), .y = rows_of(sum), .act = act});
    if (draw(r, 2)) return sum;
    lg_tensor whole = lg_graph_value(r->f->g, "whole", y);
    for (int i = 0; i < 2; i++) {
        lg_tensor part = small_linear(r->f, sum, parameter(r, "part", small_t2(r->f, HALF, D)),
                                      LG_NONE, LG_ACT_NONE);
        lg_copy_rows(r->f->s,
                     &(struct lg_copy_rows_args){.x = rows_of(part),
                                                 .y = lg_slice(rows_of(whole), 1, i * HALF, HALF)});
    }
    return whole;
}

static lg_tensor random_rows(struct random *r)
{
    lg_tensor rows = draw(r, 2) ? parameter(r, "row", small_t1(r->f, SMALL_D))
                                : parameter(r, "rows", small_t2(r->f, SMALL_T, SMALL_D));
    return draw(r, 2) ? rows : small_act(r->f, rows);
}

static lg_tensor random_step(struct random *r)
{
    lg_tensor x = pick(r), y = pick(r);
    switch (draw(r, 13)) {
    case 0:
    case 1:
        return random_linear(r, x, SMALL_D);
    case 2:
        return random_linear(r, random_linear(r, x, 6), SMALL_D);
    case 3:
        return small_act(r->f, x);
    case 4:
        return small_norm(r->f, small_mul(r->f, x, y), LG_NONE, LG_NONE);
    case 5:
        return small_add(r->f, x, y);
    case 6:
        return small_add(r->f, x, random_rows(r));
    case 7:
        return small_residual(r->f, x, y, LG_NONE);
    case 8:
        return random_attention(r, x);
    case 9:
        return random_halves(r, x);
    case 10:
        return random_low_rank(r, x, y);
    default:
        return random_half_block(r, x);
    }
}

static lg_tensor random_embedding(struct random *r)
{
    enum { ROWS = SMALL_B * SMALL_T };
    static const int32_t ids[ROWS] = {0, 2, 2, 1, 0, 2};
    lg_tensor y = lg_graph_value(r->f->g, "rows", small_t3(r->f, SMALL_B, SMALL_T, SMALL_D));
    lg_tensor table = parameter(r, "table", small_t2(r->f, 3, SMALL_D));
    lg_embedding_forward(r->f->s, &(struct lg_embedding_forward_args){
                                      .ids = small_ints(r->f, "ids", ROWS, ids),
                                      .table = table,
                                      .y = lg_at(y, 0, small_t2(r->f, ROWS, SMALL_D))});
    return y;
}

void small_random(struct small_graph *f, uint64_t seed)
{
    small_begin(f, seed);
    struct random r = {.f = f};
    const int steps = 2 + draw(&r, 8);
    r.x[r.n++] = small_wanted(f, "x", small_t3(f, SMALL_B, SMALL_T, SMALL_D));
    r.x[r.n++] = draw(&r, 3) ? small_act(f, r.x[0]) : random_embedding(&r);
    for (int i = 0; i < steps; i++) {
        bool block = draw(&r, 2);
        if (block) lg_graph_begin_block(f->g);
        r.x[r.n] = random_step(&r);
        r.n++;
        if (block) lg_graph_end_block(f->g);
    }
    lg_tensor last = draw(&r, 2) ? r.x[r.n - 1] : small_add(f, r.x[r.n - 1], pick(&r));
    small_act_into(f, last, small_out(f, last));
}

/* ---- running ---- */

void small_compile(struct small_graph *f)
{
    free_program(f);
    if (lg_graph_compile(f->g, &f->p) < 0) fail_msg("%s", lg_err_text());
    size_t bytes = lg_program_arena_bytes(f->p), scratch = lg_program_scratch_bytes(f->p);
    if ((bytes && lg_device_alloc(f->device, bytes, &f->arena) < 0) ||
        (scratch && lg_device_alloc(f->device, scratch, &f->scratch) < 0))
        fail_msg("%s", lg_err_text());
}

void small_run(struct small_graph *f, enum lg_program_part part, bool add)
{
    if ((part & LG_PROGRAM_FORWARD) && f->arena)
        memset(f->arena, 0xff, lg_program_arena_bytes(f->p));
    lg_program_run(f->p, f->stream,
                   &(struct lg_program_memory){
                       .arena = f->arena, .scratch = f->scratch, .bound = f->data, .add = add},
                   part);
    lg_stream_sync(f->stream);
}

char *small_text(struct small_graph *f)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    LG_ASSERT(to);
    lg_program_print(f->p, to);
    fclose(to);
    char *scratch = strstr(text, "; scratch ");
    LG_ASSERT(scratch);
    memcpy(scratch, "\n", 2); /* the backend's matter */
    return text;
}

int small_count(const char *text, const char *op)
{
    int count = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        const char *name = strchr(line, ' ');
        if (*line != 'n' || !name) continue;
        int block = 0, marks = 0; /* "n12 b3 backward NAME" */
        if (sscanf(name, " b%d%n", &block, &marks) == 1) name += marks;
        if (!strncmp(name, " backward ", 10)) name += 9;
        size_t n = strcspn(name + 1, " ");
        count += n == strlen(op) && !strncmp(name + 1, op, n);
    }
    return count;
}

void small_assert_print(struct small_graph *f, const char *expected)
{
    small_compile(f);
    char *text = small_text(f);
    assert_string_equal(text, expected);
    free(text);
}

/* ---- finite differences ---- */

/* <out, dout> and the sum of the products' absolute values. */
static double loss(struct small_graph *f, double *ret_scale)
{
    double sum = 0;
    *ret_scale = 0;
    small_run(f, LG_PROGRAM_FORWARD, false);
    for (int64_t e = 0; e < small_numel(f, f->out); e++) {
        double product = small_get(f, f->out, e) * small_get(f, f->dout, e);
        sum += product;
        *ret_scale += fabs(product);
    }
    return sum;
}

static double loss_at(struct small_graph *f, int i, const double *was, const double *v, double step,
                      double *ret_scale)
{
    const int64_t n = small_numel(f, i);
    for (int64_t e = 0; e < n; e++) small_set(f, i, e, was[e] + step * v[e]);
    double l = loss(f, ret_scale);
    for (int64_t e = 0; e < n; e++) small_set(f, i, e, was[e]);
    return l;
}

static double difference(struct small_graph *f, int i, const double *was, const double *v, double h,
                         double *ret_scale)
{
    double near = loss_at(f, i, was, v, h, ret_scale) - loss_at(f, i, was, v, -h, ret_scale);
    double far = loss_at(f, i, was, v, 2 * h, ret_scale) - loss_at(f, i, was, v, -2 * h, ret_scale);
    return (8 * near - far) / (12 * h);
}

/* Of the gradient's length, or of 1. A rule that is wrong is wrong by a part that can be seen. */
static const double TOLERANCE = 1e-6;

/* A fourth-order difference with half the step has a sixteenth of the error, so two of them differ by fifteen times the
 * error of the second. It adds what rounding does: of the loss's terms some n 1e-16 for n operations, divided by the
 * step. The step is halved until the sum of both, which does not look at the gradient, is within the tolerance: a
 * graph may be steep. */
static void check_direction(struct small_graph *f, int i, const double *was, const double *g,
                            const double *v, const char *what)
{
    double exact = 0, norm = 0, scale, h = 4e-3, fine, error;
    for (int64_t e = 0; e < small_numel(f, i); e++) exact += g[e] * v[e], norm += g[e] * g[e];
    const double tolerance = TOLERANCE * fmax(sqrt(norm), 1);
    do {
        h /= 2;
        double rough = difference(f, i, was, v, h, &scale);
        fine = difference(f, i, was, v, h / 2, &scale);
        error = fabs(rough - fine) + 1e-14 * (scale + 1) / h;
    } while (!(error <= tolerance) && h > 1e-6);
    if (!(error <= tolerance && fabs(fine - exact) <= tolerance))
        fail_msg("%s: v%d has the derivative %.15g, by differences %.15g +- %.3g", what, i, exact,
                 fine, error);
}

static void make_unit(double *v, int64_t n)
{
    double norm = 0;
    for (int64_t e = 0; e < n; e++) norm += v[e] * v[e];
    for (int64_t e = 0; e < n && norm > 0; e++) v[e] /= sqrt(norm);
}

/* Along the gradient itself, where a factor would show, and along any other direction. */
static void check_one(struct small_graph *f, int i, const char *what)
{
    const int64_t n = small_numel(f, i);
    double *was = malloc(3 * (size_t)n * sizeof *was), *g = was + n, *v = g + n;
    bool untouched = true;
    LG_ASSERT(was);
    for (int64_t e = 0; e < n; e++) {
        was[e] = small_get(f, i, e);
        v[e] = g[e] = small_get(f, f->gradient[i], e);
        untouched &= g[e] == SMALL_FILL;
    }
    for (int64_t e = 0; e < n && untouched; e++) g[e] = 0; /* the loss does not depend on it */
    make_unit(v, n);
    check_direction(f, i, was, g, v, what);
    lg_philox_normal_f64(v, (size_t)n, f->seed, LG_PURPOSE_TEST, 1000 + (uint64_t)i, 0);
    make_unit(v, n);
    check_direction(f, i, was, g, v, what);
    free(was);
}

void small_check_gradients(struct small_graph *f, const char *what)
{
    for (int i = 0; i < f->n; i++)
        if (f->wanted[i]) check_one(f, i, what);
}

/* ---- what is refused ---- */

bool small_aborts(void (*what)(void))
{
    int status;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (null >= 0) dup2(null, STDERR_FILENO);
        what();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}
