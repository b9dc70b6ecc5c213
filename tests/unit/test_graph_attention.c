/* What a derived backward asks of attention's forward on a GPU of 16-bit types, which is only described: what the output lost by
 * rounding, from so many queries and keys on. */
#include "base/check.h"
#include "kernels/graph/grad.h"
#include "kernels/graph/program.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { D = 128, HEAD = 64, MANY = LG_GRAD_MANY_TOKENS };

/* The program of attention and its backward; the caller frees. */
static char *program_of(const char *precision, int64_t queries, int64_t keys)
{
    lg_device *device;
    lg_program *p;
    char *text = NULL;
    size_t bytes = 0;
    if (lg_device_describe(precision, &device) < 0) fail_msg("%s", lg_err_text());
    const lg_dtype type = lg_device_dtype(device);
    lg_graph *g = lg_graph_new(device);
    lg_tensor q = lg_graph_bind(g, "q", lg_t3(NULL, type, 1, queries, D));
    lg_tensor k = lg_graph_bind(g, "k", lg_t3(NULL, type, 1, keys, D));
    lg_tensor v = lg_graph_bind(g, "v", k);
    lg_tensor o = lg_graph_value(g, "o", q);
    lg_attention_forward(lg_graph_stream(g),
                         &(struct lg_attention_forward_args){.q = lg_split(q, 2, HEAD),
                                                             .k = lg_split(k, 2, HEAD),
                                                             .v = lg_split(v, 2, HEAD),
                                                             .o = lg_split(o, 2, HEAD),
                                                             .scale = 0.125});
    const struct lg_gradient given = {o, lg_graph_bind(g, "dout", o)};
    const struct lg_gradient wanted[] = {{q, lg_graph_bind_sum(g, "dq", q)},
                                         {k, lg_graph_bind_sum(g, "dk", k)},
                                         {v, lg_graph_bind_sum(g, "dv", v)}};
    lg_graph_grad(
        g, &(struct lg_gradients){.given = &given, .wanted = wanted, .n_given = 1, .n_wanted = 3});
    if (lg_graph_compile(g, &p) < 0) fail_msg("%s", lg_err_text());
    FILE *to = open_memstream(&text, &bytes);
    assert_non_null(to);
    lg_program_print(p, to);
    fclose(to);
    lg_program_free(&p);
    lg_graph_free(&g);
    lg_device_close(&device);
    return text;
}

static int count(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, word)); at++) n++;
    return n;
}

static void check(const char *precision, int64_t queries, int64_t keys, bool kept)
{
    char *text = program_of(precision, queries, keys);
    if (count(text, "o_low=") != (kept ? 2 : 0)) /* of the forward and of the backward */
        fail_msg("%s, %d queries, %d keys:\n%s", precision, (int)queries, (int)keys, text);
    free(text);
}

static void test_what_rounding_took_is_kept_of_many_tokens(void **state)
{
    (void)state;
    check("bf16", MANY, MANY, true);
    check("fp16", MANY, 2 * MANY, true);
    check("bf16", MANY - 1, MANY, false);
    check("bf16", MANY, MANY - 1, false); /* of a text */
}
static void test_nothing_is_rounded_in_fp32(void **state)
{
    (void)state;
    check("fp32", MANY, MANY, false);
    check("tf32", MANY, MANY, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_rounding_took_is_kept_of_many_tokens),
        cmocka_unit_test(test_nothing_is_rounded_in_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
