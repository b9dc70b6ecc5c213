/* Exchanges of graphs (kernels/graph/exchange.h) among three ranks with parts of different sizes: every element is
 * the number of its place in the whole, so that what arrives, and what the backward brings back, is known exactly. */
#include "base/check.h"
#include "kernels/graph/exchange.h"
#include "tests/unit/small_graph.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { P = 3, T = 7, H = 5 }; /* of (2, T, H, 3), cut along 1 and 2 */

static struct lg_cut tokens(void)
{
    return lg_cut_evenly(1, T, 1, P);
}
static struct lg_cut heads(void)
{
    return lg_cut_evenly(2, H, 1, P);
}
static struct lg_cut all(void)
{
    return (struct lg_cut){.dim = -1};
}

struct part {
    struct small_graph f;
    lg_program *p;
    lg_tensor x;
    double *memory[4]; /* of x, out, dout, dx */
    void *arena, *exchanged;
};

/* Of (2, T, H, 3), what rank r has. */
static lg_tensor part_of(const struct lg_cut *c, int r)
{
    int64_t dim[] = {2, T, H, 3};
    if (c->dim >= 0) dim[c->dim] = c->at[r + 1] - c->at[r];
    return lg_tensor_of(NULL, LG_F64, 4, dim);
}

/* The number of element n of what rank r has. */
static double number_of(const struct lg_cut *c, int r, int64_t n)
{
    const int64_t whole[] = {2, T, H, 3};
    lg_tensor t = part_of(c, r);
    int64_t at = 0, step = 1;
    for (int i = 3; i >= 0; i--) {
        int64_t index = n % t.dim[i] + (i == c->dim ? c->at[r] : 0);
        n /= t.dim[i];
        at += index * step;
        step *= whole[i];
    }
    return (double)at;
}

static lg_tensor copied(struct small_graph *f, lg_tensor x)
{
    lg_tensor y = lg_graph_value(f->g, "copy", x);
    lg_act_forward(f->s, &(struct lg_act_forward_args){.x = x, .y = y});
    return y;
}

static void *filled(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    LG_ASSERT(p);
    memset(p, 0xff, bytes); /* NaN */
    return p;
}

/* twice: what is given is given to two exchanges, whose results are added. */
static void open_part(struct part *r, const struct lg_cuts *c, bool twice)
{
    small_open(&r->f, "ref64", NULL);
    small_begin(&r->f, 1);
    lg_graph *g = r->f.g;
    lg_tensor before = part_of(&c->before, c->rank), after = part_of(&c->after, c->rank);
    lg_tensor x = r->x = lg_graph_bind(g, "x", before), out = lg_graph_bind(g, "out", after);
    lg_tensor dout = lg_graph_bind(g, "dout", after), dx = lg_graph_bind_sum(g, "dx", before);
    x = copied(&r->f, x);
    lg_tensor y = lg_graph_exchange(g, "y", c, x);
    if (twice) y = small_add(&r->f, y, lg_graph_exchange(g, "y again", c, x));
    lg_act_forward(r->f.s, &(struct lg_act_forward_args){.x = y, .y = out});
    x = r->x;
    const struct lg_gradient given = {out, dout}, wanted = {x, dx};
    lg_graph_grad(
        g, &(struct lg_gradients){.given = &given, .n_given = 1, .wanted = &wanted, .n_wanted = 1});
    if (lg_graph_compile(g, &r->p) < 0) fail_msg("%s", lg_err_text());
    lg_tensor shape[] = {before, after, after, before};
    for (int i = 0; i < 4; i++) r->memory[i] = filled(lg_tensor_bytes(&shape[i]));
    r->arena = filled(lg_program_arena_bytes(r->p));
    r->exchanged = filled(lg_program_exchanged_bytes(r->p));
}

static void close_part(struct part *r)
{
    lg_program_free(&r->p);
    for (int i = 0; i < 4; i++) free(r->memory[i]);
    free(r->arena);
    free(r->exchanged);
    small_close(&r->f);
}

static struct lg_program_memory memory_of(const struct part *r)
{
    return (struct lg_program_memory){
        .arena = r->arena, .exchanged = r->exchanged, .bound = (void *const *)r->memory};
}

static void bring(struct part *r, int exchange)
{
    for (int from = 0; from < P; from++)
        for (int to = 0; to < P; to++) {
            const struct lg_program_memory m = memory_of(&r[from]);
            struct lg_sent x = lg_program_sends(r[from].p, &m, exchange, to, r[to].exchanged);
            lg_send(r[from].f.stream, x);
        }
}

static void run(struct part *r, int times)
{
    const int nodes = lg_program_nodes(r->p, LG_PROGRAM_ALL);
    int number = 0;
    for (int n = 0; n < nodes; n++) { /* all programs have the same nodes */
        if (lg_program_is_exchange(r->p, n)) {
            bring(r, number++);
            continue;
        }
        for (int i = 0; i < P; i++) {
            const struct lg_program_memory m = memory_of(&r[i]);
            lg_program_run_nodes(r[i].p, r[i].f.stream, &m, n, n + 1);
        }
    }
    assert_int_equal(number, 2 * times);
    assert_int_equal(lg_program_exchanges(r->p), 2 * times);
}

/* In rank order 1 is lost, in any other it is not: the first element of rank 0's dx. */
static void check_order(const struct part *r)
{
    assert_true(r[0].memory[3][0] == (1 + 1e16) - 1e16);
    r[0].memory[3][0] = 0;
}

static void check_times(struct lg_cut before, struct lg_cut after, int times)
{
    static const double terms[P] = {1, 1e16, -1e16};
    struct part r[P];
    for (int i = 0; i < P; i++) {
        const struct lg_cuts c = {.rank = i, .degree = P, .before = before, .after = after};
        open_part(&r[i], &c, times == 2);
        lg_tensor x = part_of(&before, i), out = part_of(&after, i);
        for (int64_t n = 0; n < lg_numel(&x); n++) r[i].memory[0][n] = number_of(&before, i, n);
        for (int64_t n = 0; n < lg_numel(&out); n++)
            r[i].memory[2][n] = (i + 1) * number_of(&after, i, n);
        if (after.dim < 0 && times == 1) r[i].memory[2][0] = terms[i];
        assert_int_equal(lg_program_exchanged_bytes(r[i].p), lg_program_exchanged_bytes(r[0].p));
    }
    run(r, times);
    if (after.dim < 0 && times == 1) check_order(r);
    for (int i = 0; i < P; i++) {
        lg_tensor x = part_of(&before, i), out = part_of(&after, i);
        for (int64_t n = 0; n < lg_numel(&out); n++)
            assert_true(r[i].memory[1][n] == times * number_of(&after, i, n));
        for (int64_t n = 0; n < lg_numel(&x); n++) {
            int64_t h = n / 3 % H;
            int factor = after.dim < 0 ? 1 + 2 + 3 : 1; /* of all ranks, or of the one with h */
            while (after.dim >= 0 && h >= after.at[factor]) factor++;
            assert_true(r[i].memory[3][n] == times * factor * number_of(&before, i, n));
        }
    }
    for (int i = 0; i < P; i++) close_part(&r[i]);
}

static void check(struct lg_cut before, struct lg_cut after)
{
    check_times(before, after, 1);
    check_times(before, after, 2);
}

static void test_all_to_all(void **state)
{
    (void)state;
    check(tokens(), heads());
}

static void test_gather(void **state)
{
    (void)state;
    check(tokens(), all());
}

/* Any part of any tensor: against the definition, and nothing around it is touched. */
static void send_part(struct small_graph *f, const int64_t *dim, int cut[2], const int64_t *part)
{
    lg_tensor x[2];
    struct lg_sent sent;
    for (int i = 0; i < 2;
         i++) { /* each a part of a whole of its own, cut along another dimension */
        int64_t whole[4];
        memcpy(whole, part, sizeof whole);
        whole[cut[i]] = dim[cut[i]];
        x[i] = lg_tensor_of(NULL, LG_F64, 4, whole);
        x[i].data = filled(lg_tensor_bytes(&x[i]));
        lg_tensor t = lg_slice(x[i], cut[i], 1, part[cut[i]]);
        if (i == 0)
            sent.from = t;
        else
            sent.to = t;
    }
    for (int64_t n = 0; n < lg_numel(&x[0]); n++) ((double *)x[0].data)[n] = (double)n;
    lg_send(f->stream, sent);
    lg_stream_sync(f->stream);
    int64_t found = 0, numbers = 0;
    for (int64_t n = 0; n < lg_numel(&sent.to); n++) {
        int64_t rest = n, at[2] = {0, 0};
        for (int i = 3; i >= 0; i--) {
            at[0] += rest % part[i] * sent.from.stride[i];
            at[1] += rest % part[i] * sent.to.stride[i];
            rest /= part[i];
        }
        found += ((double *)sent.to.data)[at[1]] == ((double *)sent.from.data)[at[0]];
    }
    for (int64_t n = 0; n < lg_numel(&x[1]); n++) {
        double v = ((double *)x[1].data)[n];
        numbers += v == v;
    }
    assert_int_equal(found, lg_numel(&sent.to));
    assert_int_equal(numbers, lg_numel(&sent.to));
    free(x[0].data);
    free(x[1].data);
}

static void test_send(void **state)
{
    (void)state;
    static const int64_t parts[][4] = {{2, 3, 4, 5}, {1, 3, 4, 5}, {2, 1, 4, 5}, {2, 3, 1, 5},
                                       {2, 3, 4, 1}, {1, 1, 4, 1}, {1, 1, 1, 5}, {1, 1, 1, 1}};
    struct small_graph f;
    const int64_t dim[] = {4, 5, 6, 7};
    small_open(&f, "ref64", NULL);
    for (size_t p = 0; p < LG_ARRAY_LEN(parts); p++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++) send_part(&f, dim, (int[]){i, k}, parts[p]);
    small_close(&f);
}

static void test_print(void **state)
{
    (void)state;
    struct part r;
    char *text = NULL;
    size_t bytes = 0;
    const struct lg_cuts c = {.rank = 1, .degree = P, .before = tokens(), .after = all()};
    open_part(&r, &c, false);
    FILE *to = open_memstream(&text, &bytes);
    lg_program_print(r.p, to);
    fclose(to);
    assert_non_null(
        strstr(text, "v5 y f64 2,7,5,3: 1680 bytes at 2176 of what arrives, made by n1"));
    assert_non_null(strstr(text, "n1 exchange: rank 1 of 3, dimension 1 at 0 2 4 7 to whole | "
                                 "from=v4(2,2,5,3) >to=v5(2,7,5,3)\n"));
    assert_non_null(strstr(text, " d parts f64 3,2,2,5,3: 1440 bytes at "));
    assert_non_null(
        strstr(text, " backward exchange: rank 1 of 3, whole to dimension 1 at 0 2 4 7 | "));
    assert_non_null(strstr(text, " sum_rows accumulate=0 | x="));
    assert_non_null(strstr(text, " bytes of what arrives; scratch"));
    free(text);
    close_part(&r);
    open_part(&r, &c, true); /* the sum of two might lie on one of them, were it not what arrived */
    to = open_memstream(&text, &bytes);
    lg_program_print(r.p, to);
    fclose(to);
    assert_non_null(strstr(text, "v5 y f64"));
    assert_non_null(strstr(text, "v6 y again f64"));
    assert_null(strstr(text, "in place of v5"));
    assert_null(strstr(text, "in place of v6"));
    free(text);
    close_part(&r);
}

/* ---- what is refused ---- */

static void exchange_of(struct lg_cut before, struct lg_cut after, int rank, lg_tensor shape,
                        bool gaps)
{
    struct small_graph f;
    const struct lg_cuts c = {.rank = rank, .degree = P, .before = before, .after = after};
    small_open(&f, "ref64", NULL);
    small_begin(&f, 1);
    lg_tensor x = small_wanted(&f, "x", shape);
    if (gaps) x = lg_slice(x, 3, 0, 2);
    lg_tensor y = lg_graph_exchange(f.g, "y", &c, x), out = small_out(&f, y);
    lg_act_forward(f.s, &(struct lg_act_forward_args){.x = y, .y = out});
    small_grad(&f);
}

static void as_it_should_be(void)
{
    const struct lg_cut c = tokens();
    exchange_of(c, heads(), 2, part_of(&c, 2), false);
}
static void another_ranks_part(void)
{
    const struct lg_cut c = tokens();
    exchange_of(c, heads(), 1, part_of(&c, 2), false);
}
static void rows_apart(void)
{
    const struct lg_cut c = tokens();
    exchange_of(c, heads(), 2, part_of(&c, 2), true);
}
static void cut_twice_along_one_dimension(void)
{
    const struct lg_cut c = tokens();
    exchange_of(c, c, 2, part_of(&c, 2), false);
}
static void the_gradient_of_a_scatter(void)
{
    const struct lg_cut c = all();
    exchange_of(c, tokens(), 2, part_of(&c, 2), false);
}
static void fewer_things_than_ranks(void)
{
    lg_cut_evenly(1, 2, 4, P);
}
static void run_through(bool through)
{
    struct part r;
    const struct lg_cuts c = {.rank = 1, .degree = P, .before = tokens(), .after = heads()};
    open_part(&r, &c, false);
    const struct lg_program_memory m = memory_of(&r);
    lg_program_run_nodes(r.p, r.f.stream, &m, 0, through ? 2 : 1);
}
static void run_up_to_it(void)
{
    run_through(false);
}
static void run_through_it(void)
{
    run_through(true);
}

static void test_refused(void **state)
{
    (void)state;
    assert_false(small_aborts(as_it_should_be));
    assert_true(small_aborts(another_ranks_part));
    assert_true(small_aborts(rows_apart));
    assert_true(small_aborts(cut_twice_along_one_dimension));
    assert_true(small_aborts(the_gradient_of_a_scatter));
    assert_true(small_aborts(fewer_things_than_ranks));
    assert_false(small_aborts(run_up_to_it));
    assert_true(small_aborts(run_through_it));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_to_all), cmocka_unit_test(test_gather),
        cmocka_unit_test(test_send),       cmocka_unit_test(test_print),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
