/* Sequence parallelism of denoisers: the ranks are together the unsplit net. Outputs in a row, and gradients added up,
 * agree with its own to rounding: 1e-5 of a tensor's norm on the host (as test_denoiser_host.c), 1e-12 in double. */
#include "tests/unit/sequence_world.h"
#include "tests/unit/small_graph.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { B = DENOISER_FIXTURE_BATCH };

static const char *const none[] = {NULL}, *const norms[] = {"norms", NULL},
                         *const block[] = {"block", NULL};
static const char *const ones[] = {"uniform:1", NULL}, *const twos[] = {"uniform:2", NULL};

/* ---- against the unsplit net ---- */

static double tolerance(const struct world *w)
{
    return w->f.type == LG_F64 ? 1e-12 : 1e-5;
}

static int near(const struct world *w, const char *name, const void *data, const double *want,
                size_t n, double floor)
{
    struct distance d = denoiser_fixture_distance(&w->f, data, want, n);
    if (d.diff <= tolerance(w) * fmax(d.norm, floor)) return 0;
    printf("  %d ranks, %s: distance %.3e, norm %.3e\n", w->n, name, d.diff, d.norm);
    return 1;
}

static double *doubles(const struct world *w, const void *data, size_t n)
{
    double *v = malloc(n * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < n; i++) v[i] = denoiser_fixture_get(&w->f, data, i);
    return v;
}

static int compare_out(struct world *w)
{
    const size_t n = (size_t)lg_numel(&w->f.out);
    double *want = doubles(w, w->f.out.data, n);
    memset(w->f.out.data, 0xff, lg_tensor_bytes(&w->f.out));
    for (int i = 0; i < w->n; i++) {
        lg_tensor to = world_band(&w->rank[i], w->f.out);
        world_copy(&w->rank[i].out, &to);
    }
    int wrong = near(w, "out", w->f.out.data, want, n, 0);
    free(want);
    return wrong;
}

/* floor: norm below which a tensor counts as zero (to_k.bias has no gradient but rounding). */
static int compare_grads(struct world *w, bool last)
{
    const lg_params *p = &w->f.params;
    const size_t each = lg_dtype_bytes(w->f.type);
    int wrong = 0;
    double total = 0, *want = doubles(w, w->f.grads, p->count);
    for (size_t i = 0; i < p->trained_count; i++) total += want[i] * want[i];
    for (size_t i = 0; i < p->trained_count; i++) {
        double sum = 0;
        for (int r = 0; r < w->n; r++) sum += denoiser_fixture_get(&w->f, w->rank[r].grads, i);
        denoiser_fixture_set(&w->f, w->f.grads, i, sum);
    }
    const double floor = 0.01 * sqrt(total / p->trained);
    for (const struct lg_param *q = p->p; q < p->p + p->trained; q++)
        wrong += near(w, q->name, (char *)w->f.grads + q->offset * each, want + q->offset, q->count,
                      floor);
    for (size_t i = 0; i < p->trained_count && !last; i++)
        denoiser_fixture_set(&w->f, w->f.grads, i, want[i]);
    free(want);
    return wrong;
}

/* What the first micro-batch leaves of what was there would be seen. */
static void fill_gradients(struct world *w)
{
    for (const struct lg_param *q = w->f.params.p; q < w->f.params.p + w->f.params.trained; q++)
        for (int r = 0; r < w->n; r++)
            memset((char *)w->rank[r].grads + q->offset * lg_dtype_bytes(w->f.type), 0xff,
                   q->count * lg_dtype_bytes(w->f.type));
}

static void next_input(struct world *w)
{
    for (int64_t i = 0; i < lg_numel(&w->f.in.x); i++) {
        double v = denoiser_fixture_get(&w->f, w->f.in.x.data, (size_t)i);
        denoiser_fixture_set(&w->f, w->f.in.x.data, (size_t)i, 1.0 - 0.5 * v);
    }
    for (int i = 0; i < w->n; i++) {
        lg_tensor from = world_band(&w->rank[i], w->f.in.x);
        world_copy(&from, &w->rank[i].in.x);
    }
}

/* To what is there anyhow. */
static void add_ones(struct world *w)
{
    for (const struct lg_param *q = w->f.params.p; q < w->f.params.p + w->f.params.trained; q++)
        for (size_t i = q->offset; i < q->offset + q->count; i++) {
            double was = denoiser_fixture_get(&w->f, w->f.grads, i);
            denoiser_fixture_set(&w->f, w->f.grads, i, was + w->n);
            for (int r = 0; r < w->n; r++) {
                was = denoiser_fixture_get(&w->f, w->rank[r].grads, i);
                denoiser_fixture_set(&w->f, w->rank[r].grads, i, was + 1);
            }
        }
}

/* Three micro-batches. */
static void check_world(struct world *w)
{
    int wrong = 0;
    fill_gradients(w);
    for (int micro = 0; micro < 3; micro++) {
        if (micro == 2) wrong += compare_grads(w, false);
        if (micro == 2) add_ones(w);
        denoiser_fixture_forward(&w->f);
        denoiser_fixture_backward(&w->f, micro > 0);
        world_run(w, micro > 0);
        wrong += compare_out(w);
        next_input(w);
    }
    wrong += compare_grads(w, true);
    assert_int_equal(wrong, 0);
}

static void check(const char *device, const struct lg_denoiser_config *c,
                  const struct lg_denoiser_mode *mode)
{
    struct world w;
    world_open(&w, device, c, mode);
    check_world(&w);
    world_close(&w);
}

static struct lg_denoiser_mode split(int degree, enum lg_sequence_kind kind)
{
    return (struct lg_denoiser_mode){
        .batch = B, .train = true, .sequence = {.degree = degree, .kind = kind}};
}

/* Five rows and five heads over two, three and four ranks. */
static struct lg_denoiser_config dit(void)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.height = c.width = 10;
    c.heads = 5;
    c.hidden = 40;
    return c;
}

static void check_kinds(const struct lg_denoiser_config *c, int degree_max)
{
    const char *const *const recompute[] = {none, norms, block, ones, twos};
    for (int degree = 2; degree <= degree_max; degree++)
        for (int k = 0; k < 2; k++)
            for (size_t i = 0; i < LG_ARRAY_LEN(recompute); i++) {
                struct lg_denoiser_mode mode = split(degree, (enum lg_sequence_kind)k);
                mode.recompute = recompute[i];
                check("host", c, &mode);
                if (i % 2 == 0) check("ref64", c, &mode);
            }
}

static void test_dit(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = dit();
    check_kinds(&c, 4);
}

/* Four rows of six, and three heads; then four heads. */
static void test_pixart(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    check_kinds(&c, 3);
    c.heads = 4;
    const struct lg_denoiser_mode ulysses = split(4, LG_SEQUENCE_ULYSSES),
                                  fastseq = split(4, LG_SEQUENCE_FASTSEQ);
    check("host", &c, &ulysses);
    check("host", &c, &fastseq);
}

/* Four rows of six, three heads and eight tokens of text; a second attention in two blocks. Then without norms of queries
 * and keys, and nowhere a second attention. */
static void test_sd3(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    check_kinds(&c, 3);
    c.qk_norm = false;
    c.dual[0] = 0;
    for (int k = 0; k < 2; k++) {
        const struct lg_denoiser_mode mode = split(3, (enum lg_sequence_kind)k);
        check("ref64", &c, &mode);
    }
}

/* Four rows of six, three heads and five tokens of text. */
static void test_flux(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_flux();
    check_kinds(&c, 3);
}

/* Three frames and three heads: frames stay whole, and attention along time goes through all ranks. */
static void test_latte(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_latte();
    check_kinds(&c, 3);
    c.frames = 5;
    struct lg_denoiser_mode mode = split(2, LG_SEQUENCE_ULYSSES);
    check("ref64", &c, &mode);
    mode.frame_times = true;
    check("ref64", &c, &mode);
}

/* Fifteen rows of seven and four heads, by Ulysses alone. */
static void test_ltx(void **state)
{
    (void)state;
    static const char *const linear[] = {"linear", NULL};
    struct lg_denoiser_config c = denoiser_fixture_ltx();
    c.heads = 4;
    for (int degree = 2; degree <= 4; degree++) {
        struct lg_denoiser_mode mode = split(degree, LG_SEQUENCE_ULYSSES);
        check("host", &c, &mode);
        mode.recompute = block;
        check("ref64", &c, &mode);
    }
    /* Frames' timesteps: of bands that end within frames, of whole frames, and of one that begins within. */
    static const struct {
        int frames, height, degree;
    } cases[] = {{3, 5, 2}, {3, 5, 3}, {5, 2, 4}};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        struct lg_denoiser_mode times = split(cases[i].degree, LG_SEQUENCE_ULYSSES);
        times.frame_times = true;
        times.recompute = i ? block : none;
        c.frames = cases[i].frames, c.height = cases[i].height;
        check(i ? "host" : "ref64", &c, &times);
    }
    c = denoiser_fixture_ltx();
    c.heads = 4;
    struct lg_denoiser_mode mode = split(2, LG_SEQUENCE_ULYSSES);
    mode.training = (struct lg_training){.adapter = {.rank = 2, .alpha = 3, .targets = linear}};
    check("ref64", &c, &mode);
}

/* One sample's tokens lie together: what streams project and norm goes straight where it is exchanged. */
static void test_one_sample(void **state)
{
    (void)state;
    struct lg_denoiser_config c[] = {dit(), denoiser_fixture_pixart(), denoiser_fixture_sd3(),
                                     denoiser_fixture_sd3(), denoiser_fixture_flux()};
    c[3].qk_norm = false;
    c[3].dual[0] = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(c); i++)
        for (int k = 0; k < 2; k++) {
            struct lg_denoiser_mode mode = split(3, (enum lg_sequence_kind)k);
            mode.batch = 1;
            check("ref64", &c[i], &mode);
            mode.recompute = block;
            check("host", &c[i], &mode);
        }
}

/* Eight rows and four heads over three ranks: what has enough bytes on one of them alone waits on all. */
static void test_offload(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.height = c.width = 16;
    c.depth = 5;
    c.heads = 4;
    c.hidden = 48;
    for (int degree = 2; degree <= 3; degree++)
        for (int k = 0; k < 2; k++) {
            struct lg_denoiser_mode mode = split(degree, (enum lg_sequence_kind)k);
            struct world w, kept;
            world_open(&kept, "host", &c, &mode);
            mode.offload = true;
            world_open(&w, "host", &c, &mode);
            assert_true(w.offloaded > 0);
            assert_true(lg_denoiser_bytes_of(w.rank[0].net)->exchanged <
                        lg_denoiser_bytes_of(kept.rank[0].net)->exchanged);
            check_world(&w);
            world_close(&w);
            world_close(&kept);
        }
}

/* A budget that one rank alone would have kept with less recomputation. */
static void test_budget(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = dit();
    for (int k = 0; k < 2; k++) {
        struct lg_denoiser_mode mode = split(3, (enum lg_sequence_kind)k);
        size_t bytes[2];
        for (int i = 0; i < 2; i++) {
            struct world w;
            mode.recompute = i ? block : none;
            world_open(&w, "host", &c, &mode);
            bytes[i] = lg_denoiser_bytes_of(w.rank[2].net)->activations +
                       lg_denoiser_bytes_of(w.rank[2].net)->exchanged;
            world_close(&w);
        }
        assert_true(bytes[1] < bytes[0]);
        for (int i = 1; i < 8; i++) {
            char word[48];
            snprintf(word, sizeof word, "budget:%zu",
                     bytes[1] + (bytes[0] - bytes[1]) * (size_t)i / 8);
            mode.recompute = (const char *const[]){word, NULL};
            check("host", &c, &mode);
        }
    }
}

/* With adapters, and with frozen weights, in 8 bits too: the unsplit net's gradients, zeros of others' heads included. */
static void test_trained_in_part(void **state)
{
    (void)state;
    static const char *const groups[] = {"*.attn1.to_[qkv].weight frozen", NULL};
    static const char *const linear[] = {"linear", NULL};
    const struct lg_denoiser_config c = dit();
    struct lg_denoiser_config joint[] = {denoiser_fixture_sd3(), denoiser_fixture_flux(),
                                         denoiser_fixture_sd3(), denoiser_fixture_latte()};
    joint[2].n_texts = 2;
    for (int k = 0; k < 2; k++) {
        struct lg_denoiser_mode mode = split(2, (enum lg_sequence_kind)k);
        mode.training.groups = groups;
        check("ref64", &c, &mode);
        mode.training = (struct lg_training){.adapter = {.rank = 2, .alpha = 3, .targets = linear}};
        for (size_t i = 0; i < LG_ARRAY_LEN(joint); i++) check("ref64", &joint[i], &mode);
        check("ref64", &c, &mode);
        mode.training.frozen = LG_STORAGE_FP8;
        check("ref64", &c, &mode);
    }
}

static lg_tensor loss_of(const struct world *w, lg_tensor pred, lg_tensor target, double share,
                         double *ret_loss)
{
    double weight[B];
    lg_tensor dpred = lg_tensor_of(malloc(lg_tensor_bytes(&pred)), LG_F64, 4, pred.dim);
    for (int b = 0; b < B; b++) weight[b] = 0.25 * (b + 1) * share;
    lg_mse_loss(w->f.stream, &(struct lg_mse_loss_args){.pred = pred,
                                                        .target = target,
                                                        .weight = lg_t1(weight, LG_F64, B),
                                                        .loss = lg_t1(ret_loss, LG_F64, B),
                                                        .dpred = dpred});
    lg_stream_sync(w->f.stream);
    return dpred;
}

/* The bands' losses, and their gradients, by their shares. */
static void test_loss(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = dit();
    const struct lg_denoiser_mode mode = split(3, LG_SEQUENCE_ULYSSES);
    struct world w;
    double loss[B], sum[B] = {0}, part[B];
    int row = 0;
    world_open(&w, "ref64", &c, &mode);
    lg_tensor dpred = loss_of(&w, w.f.in.x, w.f.dout, 1, loss);
    for (int i = 0; i < w.n; i++) {
        const struct rank *r = &w.rank[i];
        lg_tensor got = loss_of(&w, r->in.x, r->dout, r->band.share, part), want = got;
        assert_int_equal(r->band.first, row);
        row += r->band.height;
        want.data = malloc(lg_tensor_bytes(&got));
        lg_tensor band = world_band(r, dpred);
        world_copy(&band, &want);
        for (int64_t n = 0; n < lg_numel(&got); n++)
            assert_true(fabs(((double *)got.data)[n] - ((double *)want.data)[n]) <= 1e-15);
        for (int b = 0; b < B; b++) sum[b] += r->band.share * part[b];
        free(got.data);
        free(want.data);
    }
    assert_int_equal(row, c.height);
    for (int b = 0; b < B; b++) assert_true(fabs(sum[b] - loss[b]) <= 1e-14 * loss[b]);
    free(dpred.data);
    world_close(&w);
}

/* Without a backward: the forward alone. */
static void test_inference(void **state)
{
    (void)state;
    const struct lg_denoiser_config c = denoiser_fixture_pixart();
    for (int k = 0; k < 2; k++) {
        struct lg_denoiser_mode mode = split(3, (enum lg_sequence_kind)k);
        struct world w;
        int n, forward;
        mode.train = false;
        world_open(&w, "host", &c, &mode);
        denoiser_fixture_forward(&w.f);
        (void)lg_denoiser_events(w.rank[0].net, &n, &forward);
        assert_int_equal(n, forward);
        world_begin_forward(&w);
        world_go(&w, 0, n, 2 * c.depth);
        assert_int_equal(w.exchanges, 2 * c.depth);
        assert_int_equal(compare_out(&w), 0);
        world_close(&w);
    }
}

/* ---- what is refused ---- */

static void refuse(const struct lg_denoiser_config *c, int degree, const char *expected)
{
    const struct lg_denoiser_mode mode = split(degree, LG_SEQUENCE_ULYSSES);
    lg_device *d;
    lg_denoiser *net;
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_denoiser_compile(d, c, &mode, &net), LG_ERR_CONFIG);
    assert_non_null(strstr(lg_err_message(), expected));
    lg_err_clear();
    lg_device_close(&d);
}

static void at_once(int degree)
{
    const struct lg_denoiser_mode mode = split(degree, LG_SEQUENCE_FASTSEQ);
    struct lg_denoiser_config c = dit();
    struct world w;
    world_open(&w, "host", &c, &mode);
    lg_denoiser_forward(w.rank[0].net, w.f.stream, w.f.weights, &w.rank[0].in, w.rank[0].out);
}

static void whole_at_once(void)
{
    at_once(1);
}
static void split_at_once(void)
{
    at_once(2);
}

static void test_refused(void **state)
{
    (void)state;
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    refuse(&c, 4, "3 heads of attention cannot be split among 4 ranks");
    refuse(&c, 5, "4 rows of patches (a latent of height 8, patches of 2) cannot be split");
    c = denoiser_fixture_flux();
    c.text[1].length = 2;
    refuse(&c, 3, "texts of 2 tokens cannot be split among 3 ranks");
    assert_false(small_aborts(whole_at_once));
    assert_true(small_aborts(split_at_once));
}

/* ---- one rank ---- */

static char *print_of(const struct lg_denoiser_config *c, int batch, struct lg_sequence s)
{
    const struct lg_denoiser_mode mode = {.batch = batch, .train = true, .sequence = s};
    char *text = NULL;
    size_t bytes = 0;
    lg_device *d;
    FILE *to = open_memstream(&text, &bytes);
    assert_int_equal(lg_device_open("host", NULL, &d), 0);
    assert_int_equal(lg_denoiser_print(d, c, &mode, to), 0);
    fclose(to);
    lg_device_close(&d);
    return text;
}

static int lines_of(const char *text)
{
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void test_one_rank_is_the_net(void **state)
{
    (void)state;
    const struct lg_denoiser_config c[] = {dit(), denoiser_fixture_pixart(), denoiser_fixture_sd3(),
                                           denoiser_fixture_flux()};
    for (size_t i = 0; i < LG_ARRAY_LEN(c); i++)
        for (int k = 0; k < 2; k++) {
            const struct lg_sequence one = {.degree = 1, .kind = (enum lg_sequence_kind)k};
            char *want = print_of(&c[i], B, (struct lg_sequence){0}),
                 *got = print_of(&c[i], B, one);
            assert_string_equal(got, want);
            assert_null(strstr(want, "exchange"));
            free(want);
            free(got);
        }
}

/* A graph has as many operations for few samples as for many. */
static void test_many_samples(void **state)
{
    (void)state;
    const struct lg_denoiser_config c[] = {denoiser_fixture_sd3(), denoiser_fixture_flux()};
    for (size_t i = 0; i < LG_ARRAY_LEN(c); i++)
        for (int k = 0; k < 2; k++) {
            const struct lg_sequence two = {.degree = 2, .kind = (enum lg_sequence_kind)k};
            char *few = print_of(&c[i], 2, two), *many = print_of(&c[i], 1100, two);
            assert_int_equal(lines_of(many), lines_of(few));
            free(few);
            free(many);
        }
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dit),          cmocka_unit_test(test_pixart),
        cmocka_unit_test(test_sd3),          cmocka_unit_test(test_flux),
        cmocka_unit_test(test_latte),        cmocka_unit_test(test_ltx),
        cmocka_unit_test(test_one_sample),   cmocka_unit_test(test_offload),
        cmocka_unit_test(test_budget),       cmocka_unit_test(test_trained_in_part),
        cmocka_unit_test(test_inference),    cmocka_unit_test(test_loss),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_one_rank_is_the_net),
        cmocka_unit_test(test_many_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
