/* memory.recompute on whole nets: every word gives the bits of a net that keeps everything, in less memory, and a
 * budget is kept or the error says what it takes. On the host backend, with each instruction set. */
#include "tests/unit/denoiser_fixture.h"
#include "tests/unit/isas.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { DEPTH = 4 };
static const char *const none[] = {NULL}, *const norms[] = {"norms", NULL};
static const char *const mlp[] = {"mlp", NULL}, *const block[] = {"block", NULL};
static const char *const first[] = {"1", NULL}, *const two[] = {"0", "2", NULL};
static const char *const every[] = {"every:2", NULL}, *const ratio[] = {"ratio:0.5", NULL};
static const char *const one[] = {"uniform:1", NULL}, *const twos[] = {"uniform:2", NULL};
static const char *const threes[] = {"uniform:3", NULL}, *const whole[] = {"uniform:99", NULL};

static struct lg_denoiser_config deep(struct lg_denoiser_config c)
{
    c.depth = DEPTH;
    return c;
}

/* The result, and the gradients of two backwards, of which the second adds. */
static char *run(struct denoiser_fixture *f, size_t *ret_bytes)
{
    size_t out = lg_tensor_bytes(&f->out), grads = f->params.count * lg_dtype_bytes(f->type);
    char *all = malloc(out + grads);
    LG_ASSERT(all);
    memset(f->out.data, 0xff, out);
    memset(f->grads, 0, grads);
    for (int add = 0; add < 2; add++) {
        denoiser_fixture_forward(f);
        denoiser_fixture_backward(f, add);
    }
    memcpy(all, f->out.data, out);
    memcpy(all + out, f->grads, grads);
    *ret_bytes = out + grads;
    return all;
}

/* Of the program alone: positions beside it are those that a DiT and a PixArt have. SD3's are a parameter. */
static size_t chunked_bytes(const struct denoiser_fixture *f, const char *const *words, int chunks)
{
    const struct lg_denoiser_config *c = &f->config;
    struct lg_denoiser_bytes bytes;
    struct lg_denoiser_mode mode = {
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .recompute = words, .mlp_chunks = chunks};
    if (lg_denoiser_plan(f->device, c, &mode, &bytes) < 0) fail_msg("%s", lg_err_text());
    if (c->kind == LG_SD3) return bytes.activations;
    size_t tokens = (size_t)(c->height / c->patch) * (size_t)(c->width / c->patch);
    return bytes.activations - tokens * (size_t)c->hidden * lg_dtype_bytes(f->type);
}

static size_t arena_bytes(const struct denoiser_fixture *f, const char *const *words)
{
    return chunked_bytes(f, words, 1);
}

/* ---- bits ---- */

static int differ(struct denoiser_fixture *f, const char *const *words, int chunks,
                  const char *kept, size_t n)
{
    size_t m;
    if (denoiser_fixture_chunks(f, words, chunks) < 0) {
        printf("  %s: %s\n", words[0], lg_err_text());
        return 1;
    }
    char *again = run(f, &m);
    int differs = n != m || memcmp(kept, again, n) != 0;
    if (differs) printf("  %s gives other bits\n", words[0]);
    free(again);
    return differs;
}

static int compare(const struct lg_denoiser_config *c, const char *isa)
{
    static const char *const *const words[] = {norms, mlp, block, first,  two,  every,
                                               ratio, one, twos,  threes, whole};
    struct denoiser_fixture f;
    char budget[2][48];
    size_t n;
    int failures = 0;
    denoiser_fixture_open(&f, "host", isa, c, true);
    char *kept = run(&f, &n);
    for (size_t i = 0; i < LG_ARRAY_LEN(words); i++) failures += differ(&f, words[i], 1, kept, n);
    /* One in which norms and some feed-forwards go, one in which blocks do. */
    size_t some = (arena_bytes(&f, norms) + arena_bytes(&f, block)) / 2;
    snprintf(budget[0], sizeof budget[0], "budget:%zu", some);
    snprintf(budget[1], sizeof budget[1], "budget:%zu", arena_bytes(&f, block));
    for (int i = 0; i < 2; i++)
        failures += differ(&f, (const char *const[]){budget[i], NULL}, 1, kept, n);
    free(kept);
    denoiser_fixture_close(&f);
    return failures;
}

static int compare_on(const char *isa)
{
    struct lg_denoiser_config dit = deep(denoiser_fixture_dit());
    struct lg_denoiser_config pixart = deep(denoiser_fixture_pixart());
    struct lg_denoiser_config sd3 = deep(denoiser_fixture_sd3());
    struct lg_denoiser_config flux = deep(denoiser_fixture_flux());
    dit.modulation_weights = 1; /* each block's are a product of their own */
    return compare(&dit, isa) + compare(&pixart, isa) + compare(&sd3, isa) + compare(&flux, isa);
}

/* No device is open yet: each process has one instruction set. */
static void test_bits_are_the_same(void **state)
{
    (void)state;
    for_each_isa(compare_on);
}

/* ---- memory ---- */

static void check_memory(const struct lg_denoiser_config *c)
{
    struct denoiser_fixture f;
    denoiser_fixture_open(&f, "host", NULL, c, true);
    size_t all = arena_bytes(&f, none), less = arena_bytes(&f, norms);
    assert_true(arena_bytes(&f, NULL) == all);
    assert_true(less < all && arena_bytes(&f, mlp) < all && arena_bytes(&f, block) < less);
    assert_true(arena_bytes(&f, block) < arena_bytes(&f, every));
    assert_true(arena_bytes(&f, every) < arena_bytes(&f, first));
    assert_true(arena_bytes(&f, first) < all);
    assert_true(arena_bytes(&f, every) == arena_bytes(&f, two));
    assert_true(arena_bytes(&f, every) == arena_bytes(&f, ratio));
    denoiser_fixture_close(&f);
}

static size_t with_budget(const struct denoiser_fixture *f, size_t bytes)
{
    char word[48];
    snprintf(word, sizeof word, "budget:%zu", bytes);
    return arena_bytes(f, (const char *const[]){word, NULL});
}

/* Of a deeper net, of which one value of each block lies there, or of each group and of the blocks of one. */
static void check_groups(struct lg_denoiser_config c)
{
    struct denoiser_fixture f;
    c.depth = 4 * DEPTH;
    denoiser_fixture_open(&f, "host", NULL, &c, true);
    assert_true(arena_bytes(&f, one) < arena_bytes(&f, block));
    assert_true(arena_bytes(&f, twos) < arena_bytes(&f, one));
    const size_t fewest = arena_bytes(&f, threes);
    assert_true(fewest <= arena_bytes(&f, twos)); /* 6 and 3, 8 and 2 */
    assert_true(with_budget(&f, fewest) <= fewest);
    denoiser_fixture_close(&f);
}

static void test_memory_shrinks(void **state)
{
    (void)state;
    struct lg_denoiser_config dit = deep(denoiser_fixture_dit());
    struct lg_denoiser_config pixart = deep(denoiser_fixture_pixart());
    struct lg_denoiser_config sd3 = deep(denoiser_fixture_sd3());
    check_memory(&dit);
    check_memory(&pixart);
    check_memory(&sd3);
    check_groups(dit);
    check_groups(pixart);
    check_groups(sd3);
}

/* What there is room for stays; every budget between the most and the least that a net can take is kept. */
static void check_budget(const struct lg_denoiser_config *c)
{
    struct denoiser_fixture f;
    char word[48], says[64];
    denoiser_fixture_open(&f, "host", NULL, c, true);
    size_t most = arena_bytes(&f, none), least = arena_bytes(&f, block);
    least = LG_MIN(least, LG_MIN(arena_bytes(&f, one), arena_bytes(&f, twos))); /* DEPTH is 2 x 2 */
    assert_true(with_budget(&f, most) == most);
    assert_true(with_budget(&f, 2 * most) == most);
    assert_true(with_budget(&f, most - 1) < most);
    assert_true(with_budget(&f, least) == least);
    for (int i = 1; i < 16; i++) {
        size_t budget = least + (most - least) * (size_t)i / 16;
        assert_true(with_budget(&f, budget) <= budget);
    }
    snprintf(word, sizeof word, "budget:%zu", least - 1);
    assert_int_equal(denoiser_fixture_recompute(&f, (const char *const[]){word, NULL}),
                     LG_ERR_CONFIG);
    snprintf(says, sizeof says, "still take %.2f MiB", (double)least * 0x1p-20);
    assert_non_null(strstr(lg_err_text(), says));
    denoiser_fixture_close(&f);
}

static void test_a_budget_is_kept(void **state)
{
    (void)state;
    struct lg_denoiser_config dit = deep(denoiser_fixture_dit());
    struct lg_denoiser_config pixart = deep(denoiser_fixture_pixart());
    struct lg_denoiser_config sd3 = deep(denoiser_fixture_sd3());
    check_budget(&dit);
    check_budget(&pixart);
    check_budget(&sd3);
}

/* ---- feed-forwards in chunks of tokens ---- */

/* Each number of chunks is another order of sums, and in that order nothing else has any bits to say. */
static int compare_chunks(const struct lg_denoiser_config *c, int chunks)
{
    static const char *const *const words[] = {norms, mlp, block, first, one, twos, threes, whole};
    struct denoiser_fixture f;
    int failures = 0;
    size_t n;
    denoiser_fixture_open(&f, "host", NULL, c, true);
    assert_int_equal(denoiser_fixture_chunks(&f, none, chunks), 0);
    char *kept = run(&f, &n);
    for (size_t i = 0; i < LG_ARRAY_LEN(words); i++)
        failures += differ(&f, words[i], chunks, kept, n);
    free(kept);
    denoiser_fixture_close(&f);
    return failures;
}

/* In double precision, of the same gradients: the result, too, is the sum of the same products. */
static int compare_with_whole(const struct lg_denoiser_config *c, int chunks)
{
    struct denoiser_fixture f;
    size_t n;
    denoiser_fixture_open(&f, "ref64", NULL, c, true);
    double *want = (double *)run(&f, &n);
    assert_int_equal(denoiser_fixture_chunks(&f, NULL, chunks), 0);
    double *have = (double *)run(&f, &n);
    const struct distance d = denoiser_fixture_distance(&f, have, want, n / sizeof *want);
    free(want);
    free(have);
    denoiser_fixture_close(&f);
    if (d.diff <= 1e-12 * d.norm) return 0;
    printf("  in %d chunks: %g of %g\n", chunks, d.diff, d.norm);
    return 1;
}

static void test_chunks(void **state)
{
    const struct lg_denoiser_config nets[] = {
        deep(denoiser_fixture_dit()), deep(denoiser_fixture_pixart()),
        deep(denoiser_fixture_sd3()), deep(denoiser_fixture_flux()),
        denoiser_fixture_latte(),     denoiser_fixture_ltx()};
    int failures = 0;
    (void)state;
    for (size_t i = 0; i < LG_ARRAY_LEN(nets); i++)
        for (int chunks = 2; chunks <= (i ? 7 : 256); chunks = chunks * chunks + 3) { /* 2, 7, 52 */
            failures += compare_chunks(&nets[i], chunks);
            failures += compare_with_whole(&nets[i], chunks);
        }
    assert_int_equal(failures, 0);
}

/* Of 48 tokens a block's hidden layer is 4 x 48 wide numbers, there twice, and its gradient. With "block" attention comes to take
 * the most, with "mlp" much else is there. */
static void test_chunks_take_less(void **state)
{
    struct denoiser_fixture f;
    const struct lg_denoiser_config c = deep(denoiser_fixture_dit());
    (void)state;
    denoiser_fixture_open(&f, "host", NULL, &c, true);
    const size_t hidden = sizeof(float) * 4 * 48 * (size_t)c.hidden;
    const char *const *const words[] = {mlp, block, one, twos};
    for (size_t i = 0; i < LG_ARRAY_LEN(words); i++) {
        const size_t whole_bytes = arena_bytes(&f, words[i]);
        const size_t half = chunked_bytes(&f, words[i], 2), sixth = chunked_bytes(&f, words[i], 6);
        assert_true(half + (i < 2 ? 0 : hidden) <= whole_bytes && sixth < half);
    }
    assert_true(chunked_bytes(&f, none, 6) >= arena_bytes(&f, none));
    denoiser_fixture_close(&f);
}

/* ---- what is repeated ---- */

static int lines_with(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) n++;
    return n;
}

static int count(const struct denoiser_fixture *f, const char *const *words, const char *op)
{
    char *text = NULL, name[64];
    size_t bytes = 0;
    const struct lg_denoiser_mode mode = {
        .batch = DENOISER_FIXTURE_BATCH, .train = true, .recompute = words};
    FILE *to = open_memstream(&text, &bytes);
    LG_ASSERT(to);
    if (lg_denoiser_print(f->device, &f->config, &mode, to) < 0) fail_msg("%s", lg_err_text());
    fclose(to);
    snprintf(name, sizeof name, " %s ", op);
    int n = lines_with(text, name);
    free(text);
    return n;
}

/* DiT: per block qkv, attention's projection and two of the feed-forward; beside them patches, two of the timestep,
 * two modulations and the output. The last of a block is the next one's, too. Sums of residuals are kept with "norms". */
static void test_nodes_that_are_repeated(void **state)
{
    (void)state;
    struct lg_denoiser_config c = deep(denoiser_fixture_dit());
    struct denoiser_fixture f;
    denoiser_fixture_open(&f, "host", NULL, &c, true);
    const int linears = 4 * DEPTH + 6;
    assert_int_equal(count(&f, none, "linear_forward"), linears);
    assert_int_equal(count(&f, norms, "linear_forward"), linears);
    assert_int_equal(count(&f, mlp, "linear_forward"), linears + DEPTH);
    assert_int_equal(count(&f, block, "linear_forward"), linears + 3 * DEPTH);
    assert_int_equal(count(&f, first, "linear_forward"), linears + 3);
    assert_int_equal(count(&f, none, "attention_forward"), DEPTH);
    assert_int_equal(count(&f, norms, "attention_forward"), DEPTH);
    assert_int_equal(count(&f, mlp, "attention_forward"), DEPTH);
    assert_int_equal(count(&f, every, "attention_forward"), DEPTH + DEPTH / 2);
    assert_int_equal(count(&f, none, "residual_norm_forward"), 2 * DEPTH);
    assert_int_equal(count(&f, norms, "residual_norm_forward"), 2 * DEPTH);
    assert_int_equal(count(&f, none, "norm_modulate_forward"), 1);
    assert_int_equal(count(&f, norms, "norm_modulate_forward"), 1 + 2 * DEPTH);
    assert_int_equal(count(&f, mlp, "residual_norm_forward"), 2 * DEPTH);
    assert_int_equal(count(&f, one, "linear_forward"), linears + 4 * DEPTH);
    assert_int_equal(count(&f, one, "attention_forward"), 2 * DEPTH);
    assert_int_equal(count(&f, twos, "attention_forward"), 2 * DEPTH + DEPTH / 2);
    assert_int_equal(count(&f, whole, "attention_forward"), 2 * DEPTH + DEPTH - 1);
    denoiser_fixture_close(&f);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_are_the_same), cmocka_unit_test(test_memory_shrinks),
        cmocka_unit_test(test_a_budget_is_kept),  cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_chunks_take_less),  cmocka_unit_test(test_nodes_that_are_repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
