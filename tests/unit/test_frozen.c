/* Frozen parameters: their gradients are not touched, all others are those of a net in which everything is trained, bit
 * by bit, and what leads to nothing that is trained is not computed. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void reopen(struct denoiser_fixture *f, const char *const *groups,
                   const char *const *recompute)
{
    const struct lg_denoiser_mode mode = {
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .groups = groups, .recompute = recompute};
    lg_denoiser_close(&f->net);
    if (lg_denoiser_open(f->device, &f->config, &mode, &f->net) < 0) fail_msg("%s", lg_err_text());
}

/* Gradients are NaN where nobody writes. The caller frees them. */
static float *gradients(struct denoiser_fixture *f)
{
    size_t bytes = f->params.count * sizeof(float);
    float *own = malloc(bytes);
    LG_ASSERT(own && f->type == LG_F32);
    memset(f->grads, 0xff, bytes);
    denoiser_fixture_forward(f);
    denoiser_fixture_backward(f, false);
    denoiser_fixture_forward(f);
    denoiser_fixture_backward(f, true);
    memcpy(own, f->grads, bytes);
    return own;
}

static void check(const struct lg_denoiser_config *c, const char *const *groups,
                  const char *const *recompute)
{
    struct denoiser_fixture f;
    int frozen = 0;
    denoiser_fixture_open(&f, "host", NULL, c, true);
    float *all = gradients(&f);
    reopen(&f, groups, recompute);
    float *some = gradients(&f);
    assert_int_equal(lg_params_group(&f.params, groups), 0);
    for (const struct lg_param *p = f.params.p; p < f.params.p + f.params.n; p++) {
        bool is_frozen = f.params.group[p->group].is_frozen;
        frozen += is_frozen;
        /* Attention knows that the bias of keys has none; behind a frozen weight its rounding is summed. */
        if (strstr(p->name, "to_k.bias") && !is_frozen) continue;
        for (size_t i = p->offset; i < p->offset + p->count; i++) {
            if (is_frozen ? !isnan(some[i]) : memcmp(&some[i], &all[i], sizeof all[i]) != 0)
                fail_msg("%s with %s: %s[%zu] is %g, was %g", groups[0],
                         recompute ? recompute[0] : "none", p->name, i - p->offset, (double)some[i],
                         (double)all[i]);
        }
    }
    assert_true(frozen > 0);
    free(all);
    free(some);
    denoiser_fixture_close(&f);
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
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .groups = groups};
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
