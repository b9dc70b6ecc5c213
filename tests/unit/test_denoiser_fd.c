/* The whole net on ref64: the backward against finite differences of a weighted squared error,
 * for every parameter tensor, along its own gradient and along a random direction.
 *
 * Differences are the fourth-order central ones, (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12 h,
 * with h = 1e-3 along a unit vector: truncation about h^4 = 1e-12 and rounding about 1e-16 f / h
 * = 1e-13 f, both far below the tolerance of 1e-7. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static const double H = 1e-3, TOL = 1e-7;

/* Sum over samples of weight mse(out, target), the target being the fixture's dout as it was
 * filled; with `backward`, f->dout receives the gradient of the output. */
enum { OUT_MAX = 8 * 18 * 10 }; /* of a sample: Latte's */

struct loss {
    struct denoiser_fixture *f;
    lg_tensor target, weight, each;
    double target_data[DENOISER_FIXTURE_BATCH * OUT_MAX], weight_data[DENOISER_FIXTURE_BATCH];
    double each_data[DENOISER_FIXTURE_BATCH];
};

static void loss_init(struct loss *l, struct denoiser_fixture *f)
{
    static const double weights[DENOISER_FIXTURE_BATCH] = {0.5, 1.25, 0.75};
    size_t n = (size_t)lg_numel(&f->out);
    LG_ASSERT(n <= LG_ARRAY_LEN(l->target_data));
    l->f = f;
    l->target = f->out;
    l->target.data = l->target_data;
    l->weight = lg_t1(l->weight_data, LG_F64, DENOISER_FIXTURE_BATCH);
    l->each = lg_t1(l->each_data, LG_F64, DENOISER_FIXTURE_BATCH);
    for (size_t i = 0; i < n; i++) l->target_data[i] = denoiser_fixture_get(f, f->dout.data, i);
    for (int i = 0; i < DENOISER_FIXTURE_BATCH; i++) l->weight_data[i] = weights[i];
}

static double loss_of(struct loss *l, bool backward)
{
    struct denoiser_fixture *f = l->f;
    denoiser_fixture_forward(f);
    lg_mse_loss(f->stream, &(struct lg_mse_loss_args){.pred = f->out,
                                                      .target = l->target,
                                                      .weight = l->weight,
                                                      .loss = l->each,
                                                      .dpred = backward ? f->dout : LG_NONE});
    lg_stream_sync(f->stream);
    double sum = 0;
    for (int i = 0; i < DENOISER_FIXTURE_BATCH; i++) sum += l->weight_data[i] * l->each_data[i];
    return sum;
}

static double loss_at(struct loss *l, double *w, const double *keep, const double *v, size_t n,
                      double step)
{
    for (size_t i = 0; i < n; i++) w[i] = keep[i] + step * v[i];
    double f = loss_of(l, false);
    for (size_t i = 0; i < n; i++) w[i] = keep[i];
    return f;
}

static double norm_of(const double *v, size_t n)
{
    double s = 0;
    for (size_t i = 0; i < n; i++) s += v[i] * v[i];
    return sqrt(s);
}

/* Directional derivatives along the unit vector v; returns 1 and complains when they differ by more
 * than `floor`, the size that a derivative along a random direction has. */
static int check(struct loss *l, const struct lg_param *p, const double *v, double floor,
                 const char *what)
{
    double *w = (double *)l->f->weights + p->offset, *g = (double *)l->f->grads + p->offset;
    double *keep = malloc(p->count * sizeof *keep), exact = 0;
    for (size_t i = 0; i < p->count; i++) keep[i] = w[i], exact += g[i] * v[i];
    double near = loss_at(l, w, keep, v, p->count, H) - loss_at(l, w, keep, v, p->count, -H);
    double far = loss_at(l, w, keep, v, p->count, 2 * H) - loss_at(l, w, keep, v, p->count, -2 * H);
    free(keep);
    double fd = (8 * near - far) / (12 * H);
    if (fabs(fd - exact) <= TOL * fmax(fabs(exact), floor)) return 0;
    printf("  %s along %s: backward %.12g, differences %.12g\n", p->name, what, exact, fd);
    return 1;
}

static int check_param(struct loss *l, const struct lg_param *p)
{
    const double *g = (double *)l->f->grads + p->offset;
    double *v = malloc(p->count * sizeof *v);
    /* Of to_k.bias the gradient is zero but for rounding, hence the absolute floor. */
    double norm = norm_of(g, p->count), floor = fmax(norm / sqrt((double)p->count), 1e-4);
    int wrong = 0;
    if (norm > 1e-10) {
        for (size_t i = 0; i < p->count; i++) v[i] = g[i] / norm;
        wrong += check(l, p, v, floor, "its gradient");
    }
    golden_fill("direction", p->count, 1.0, v);
    double length = norm_of(v, p->count);
    for (size_t i = 0; i < p->count; i++) v[i] /= length;
    wrong += check(l, p, v, floor, "a random direction");
    free(v);
    return wrong;
}

static void check_mode(const struct lg_denoiser_config *c, bool frame_times)
{
    struct denoiser_fixture f;
    struct loss l;
    int wrong = 0, zero = 0;
    if (frame_times)
        denoiser_fixture_open_frames(&f, "ref64", c);
    else
        denoiser_fixture_open(&f, "ref64", NULL, c, true);
    loss_init(&l, &f);
    loss_of(&l, true);
    denoiser_fixture_backward(&f, false);
    for (int i = 0; i < f.params.trained; i++) {
        const struct lg_param *p = &f.params.p[i];
        wrong += check_param(&l, p);
        zero += !(norm_of((double *)f.grads + p->offset, p->count) > 1e-6);
    }
    /* Biases of keys, of which Latte has three attentions a block, and LTX, whose keys are normed, none; of SD3, whose keys are normed, the last block's queries of the text, which nothing reads. */
    const int of_keys[LG_DENOISER_KINDS] = {[LG_DIT] = 1, [LG_PIXART] = 2, [LG_LATTE] = 3};
    int zeros = c->kind == LG_SD3 ? 3 : c->depth * of_keys[c->kind];
    denoiser_fixture_close(&f);
    assert_int_equal(wrong, 0);
    assert_int_equal(zero, zeros); /* the check means something for all the others */
}

static void check_net(const struct lg_denoiser_config *c)
{
    check_mode(c, false);
}

static void test_dit(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    check_net(&c);
}

static void test_pixart(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    check_net(&c);
}

static void test_sd3(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    c.depth = 2, c.dual[0] = 1;
    check_net(&c);
}

static void test_clips(void **state)
{
    struct lg_denoiser_config latte = denoiser_fixture_latte(), ltx = denoiser_fixture_ltx();
    latte.depth = ltx.depth = 1;
    check_net(&latte);
    check_net(&ltx);
    latte.frames = 2, latte.width = 4;
    check_mode(&latte, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_dit), cmocka_unit_test(test_pixart),
                                       cmocka_unit_test(test_sd3), cmocka_unit_test(test_clips)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
