/* Frozen parameters have units of their own behind all others, and no gradients; all others' are those of a net in which
 * everything is trained, bit by bit, and what leads to nothing that is trained is not computed. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Gradients are NaN where nobody writes. */
static void make_gradients(struct denoiser_fixture *f)
{
    LG_ASSERT(f->type == LG_F32);
    memset(f->grads, 0xff, f->params.count * sizeof(float));
    denoiser_fixture_forward(f);
    denoiser_fixture_backward(f, false);
    denoiser_fixture_forward(f);
    denoiser_fixture_backward(f, true);
}

static void check_trained(const struct denoiser_fixture *all, const struct denoiser_fixture *some,
                          const struct lg_param *p, const char *what)
{
    const float *was = all->grads, *is = some->grads;
    const struct lg_param *q = &all->params.p[lg_params_find(&all->params, p->name)];
    /* Attention knows that the bias of keys has none; behind a frozen weight its rounding is summed. */
    if (strstr(p->name, "to_k.bias")) return;
    if (memcmp(is + p->offset, was + q->offset, p->count * sizeof *is))
        fail_msg("%s: %s is another", what, p->name);
}

static void check(const struct lg_denoiser_config *c, const char *const *groups,
                  const char *const *recompute)
{
    const struct lg_training training = {.groups = groups};
    struct denoiser_fixture all, some;
    denoiser_fixture_open(&all, "host", NULL, c, true);
    denoiser_fixture_open_trained(&some, "host", c, &training, recompute);
    make_gradients(&all);
    make_gradients(&some);
    const lg_params *t = &some.params;
    assert_int_equal(t->n, all.params.n);
    assert_in_range(t->trained, 1, t->n - 1);
    for (int i = 0; i < t->n; i++) {
        const bool is_frozen = i >= t->trained;
        assert_int_equal(t->p[i].is_frozen, is_frozen);
        assert_int_equal(t->p[i].unit >= t->trained_units, is_frozen);
        assert_int_equal(t->p[i].offset >= t->trained_count, is_frozen);
        if (!is_frozen) check_trained(&all, &some, &t->p[i], groups[0]);
    }
    for (size_t i = t->trained_count; i < t->count; i++)
        assert_true(isnan(((float *)some.grads)[i]));
    denoiser_fixture_close(&all);
    denoiser_fixture_close(&some);
}

static void each(const char *const *groups)
{
    static const char *const block[] = {"block", NULL};
    const struct lg_denoiser_config dit = denoiser_fixture_dit(),
                                    pixart = denoiser_fixture_pixart();
    check(&dit, groups, NULL);
    check(&dit, groups, block);
    check(&pixart, groups, NULL);
    check(&pixart, groups, block);
}

static void test_a_block(void **state)
{
    (void)state;
    each((const char *const[]){"transformer_blocks.0.attn?.* frozen",
                               "transformer_blocks.0.ff.* frozen", "proj_out* lr=1", NULL});
}

static void test_attention(void **state)
{
    (void)state;
    each((const char *const[]){"*.attn1.* frozen", NULL});
    each((const char *const[]){"*.attn1.*.weight frozen", NULL});
    each((const char *const[]){"*.attn1.*.bias frozen", NULL});
}

static void test_weights_or_biases(void **state)
{
    (void)state;
    each((const char *const[]){"*.bias frozen", NULL});
    each((const char *const[]){"*.weight frozen", NULL});
}

static void test_what_comes_first(void **state)
{
    (void)state;
    each((const char *const[]){"pos_embed.* frozen", "*emb.* frozen", NULL});
}

static double planned_flops(struct denoiser_fixture *f, const char *const *groups)
{
    char *text = NULL;
    size_t bytes = 0;
    double gflop = 0;
    FILE *to = open_memstream(&text, &bytes);
    const struct lg_denoiser_mode mode = {
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .training = {.groups = groups}};
    assert_int_equal(lg_denoiser_print(f->device, &f->config, &mode, to), 0);
    fclose(to);
    const char *at = strrchr(text, ';');
    assert_int_equal(sscanf(at, "; %lg GFLOP", &gflop), 1);
    free(text);
    return gflop;
}

/* With all but the output layer frozen there is no backward through the blocks. */
static void test_nothing_is_computed_for_nothing(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    struct denoiser_fixture f;
    denoiser_fixture_open(&f, "host", NULL, &c, true);
    double all = planned_flops(&f, NULL);
    double last = planned_flops(&f, (const char *const[]){"[!p]* frozen", "pos* frozen", NULL});
    assert_true(last > 0.3 * all && last < 0.4 * all); /* the forward, and one layer's weights */
    denoiser_fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_block),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_weights_or_biases),
        cmocka_unit_test(test_what_comes_first),
        cmocka_unit_test(test_nothing_is_computed_for_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
