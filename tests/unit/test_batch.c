/* What a micro-batch brings to the device: of each slot its timestep's numbers, its weight, and, where the net has them, the
 * terms of a learned variance and the conditions of a size; whole, of a band, and of another shape. */
#include "stages/trainer/batch.h"
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

enum { B = 4, SIDE = 8, VALUES = 4 * SIDE * SIDE, TEXT = 6 * 20 };

static const struct lg_objective EPS = {
    .kind = LG_OBJECTIVE_EPS, .min_snr_gamma = 5, .has_variance = true, .variance_weight = 1};

static struct lg_denoiser_config net(void)
{
    struct lg_denoiser_config c = denoiser_fixture_pixart();
    c.height = c.width = SIDE;
    c.learned_variance = c.size_conditions = true;
    return c;
}

static lg_window *make_window(void **ret_memory)
{
    const struct lg_window_geometry g = {.slots = 4 * B,
                                         .batch = B,
                                         .chunk = {B, B, B},
                                         .latent_bytes = 2 * VALUES * sizeof(float),
                                         .text = {{24, TEXT * sizeof(float), 0, ""}},
                                         .ranks = 1};
    lg_window *w;
    void *memory = aligned_alloc(4096, (lg_window_bytes(&g) + 4095) / 4096 * 4096);
    assert_non_null(memory);
    memset(memory, 0, lg_window_bytes(&g));
    assert_int_equal(lg_window_over(memory, &g, &w), 0);
    for (uint64_t n = 0; n < B; n++) {
        struct lg_slot *slot = lg_window_slot(w, n);
        slot->text_length[0] = 3;
        slot->is_void = n == 2;
        slot->is_absent = n == 1;
        slot->original_height = 600 + (uint32_t)n;
        slot->original_width = 800 + (uint32_t)n;
        float *mean = (float *)(void *)lg_window_mean(w, n);
        for (int i = 0; i < VALUES; i++) mean[i] = (float)(i % 5) - 2;
    }
    *ret_memory = memory;
    return w;
}

static void same(const float *got, double want)
{
    if (!(fabs((double)*got - want) <= 1e-6 * fmax(1, fabs(want))))
        fail_msg("%.9g, not %.9g", (double)*got, want);
}

static void check_rows(const struct lg_batch_tensors *t, double share, double ratio)
{
    for (int n = 0; n < B; n++) {
        struct lg_objective_sample s;
        lg_objective_draw(&EPS, 11, (uint64_t)n, &s);
        const float *weight = (const float *)t->weight.data + 2 * n;
        const double valid = n == 1 || n == 2 ? 0 : share / 2;
        same((const float *)t->in.t.data + n, s.t);
        same(&weight[0], s.weight * valid);
        same(&weight[1], valid); /* min-SNR is not for the variance */
        for (int i = 0; i < 6; i++) same((const float *)t->terms.data + 6 * n + i, s.variance[i]);
        same((const float *)t->in.size.data + 2 * n, 600 + n);
        same((const float *)t->in.size.data + 2 * n + 1, 800 + n);
        same((const float *)t->in.ratio.data + n, ratio);
    }
}

/* kind 1 is twice as high as wide. */
static void load(int kind, const struct lg_band *band, double share)
{
    struct lg_denoiser_config c = net(), tall = net();
    lg_device *d;
    lg_stream *s;
    lg_batch *b;
    void *memory;
    lg_window *w = make_window(&memory);
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    assert_int_equal(lg_stream_open(d, &s), 0);
    tall.width = SIDE / 2;
    const struct lg_batch_options o[] = {{.net = &c, .size = B, .band = *band},
                                         {.net = &tall, .size = B}};
    assert_int_equal(lg_batch_open(d, o, 2, &b), 0);
    lg_batch_load(
        b, s, w,
        &(struct lg_batch_spec){
            .kind = kind, .divisor = 2, .seed = 11, .scaling_factor = 1, .objective = &EPS});
    lg_stream_sync(s);
    const struct lg_batch_tensors *t = lg_batch_tensors(b);
    assert_int_equal(t->in.x.dim[2], band->height ? band->height : SIDE);
    assert_int_equal(t->target.dim[2], t->in.x.dim[2]);
    assert_int_equal(t->in.x.dim[3], kind ? SIDE / 2 : SIDE);
    check_rows(t, share, kind ? 2 : 1);
    lg_batch_close(&b);
    lg_stream_close(&s);
    lg_device_close(&d);
    lg_window_close(&w);
    free(memory);
}

static void whole(void **state)
{
    load(0, &(struct lg_band){0}, 1);
}

static void of_a_band(void **state)
{
    load(0, &(struct lg_band){.first = 2, .height = 6, .share = 0.75}, 0.75);
}

static void of_another_shape(void **state)
{
    load(1, &(struct lg_band){0}, 1);
}

/* SDXL's six numbers, and no ratio. */
static void of_a_crop(void **state)
{
    struct lg_denoiser_config c = denoiser_fixture_sdxl();
    lg_device *d;
    lg_stream *s;
    lg_batch *b;
    void *memory;
    lg_window *w = make_window(&memory);
    const struct lg_objective eps = {.kind = LG_OBJECTIVE_EPS};
    for (uint64_t n = 0; n < B; n++) {
        lg_window_slot(w, n)->crop_top = 10 + (uint32_t)n;
        lg_window_slot(w, n)->crop_left = 20 + (uint32_t)n;
    }
    c.height = SIDE, c.width = SIDE / 2, c.n_texts = 1;
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    assert_int_equal(lg_stream_open(d, &s), 0);
    const struct lg_batch_options o = {.net = &c, .size = B, .factor = 16};
    assert_int_equal(lg_batch_open(d, &o, 1, &b), 0);
    lg_batch_load(b, s, w,
                  &(struct lg_batch_spec){.divisor = 2, .scaling_factor = 1, .objective = &eps});
    lg_stream_sync(s);
    const struct lg_denoiser_input *in = &lg_batch_tensors(b)->in;
    assert_true(in->size.dim[0] == B && in->size.dim[1] == 6 && !in->ratio.rank);
    for (int n = 0; n < B; n++) {
        const double want[] = {600 + n, 800 + n, 10 + n, 20 + n, SIDE * 16, SIDE * 8};
        for (int i = 0; i < 6; i++) same((const float *)in->size.data + 6 * n + i, want[i]);
    }
    lg_batch_close(&b);
    lg_stream_close(&s);
    lg_device_close(&d);
    lg_window_close(&w);
    free(memory);
}

/* ---- clips whose first frame is clean ---- */

enum { FRAMES = 4, ROWS = SIDE / FRAMES };

/* Element i of rows [at, ..) of sample n, channel c, row y of a tensor of latents or a band of them. */
static float *at(const lg_tensor *t, int n, int c, int y, int x)
{
    return (float *)t->data + ((n * t->dim[1] + c) * t->dim[2] + y) * t->dim[3] + x;
}

struct clip_batch {
    lg_batch *b;
    lg_stream *s;
    lg_window *w;
};

static const struct lg_batch_tensors *load_clips(struct clip_batch *of, int kind, double clean)
{
    const struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW, .clean_first_frame = clean};
    lg_batch_load(
        of->b, of->s, of->w,
        &(struct lg_batch_spec){
            .kind = kind, .divisor = 2, .seed = 11, .scaling_factor = 1, .objective = &flow});
    lg_stream_sync(of->s);
    return lg_batch_tensors(of->b);
}

/* Row y of the band: whose draw says so begins with frames without noise. */
static void check_clip(const struct lg_batch_tensors *got, const float *noisy, const float *target,
                       const struct lg_band *band, int n)
{
    const struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW, .clean_first_frame = 0.5};
    struct lg_objective_sample s;
    lg_objective_draw(&flow, 11, (uint64_t)n, &s);
    const int64_t times = got->in.t.dim[0] / B, each = band->height / times;
    for (int y = 0; y < band->height; y++) {
        const bool clean = s.first_is_clean && band->first + y < ROWS;
        same((const float *)got->in.t.data + n * times + y / each, clean ? 0 : s.t);
        for (int i = 0; i < 4 * SIDE; i++) {
            const float *x = at(&got->in.x, n, i / SIDE, y, i % SIDE);
            const ptrdiff_t e = x - (const float *)got->in.x.data;
            /* x_t = x0 + t target */
            const double t = s.t / LG_TRAIN_TIMESTEPS;
            if (clean && fabs(*x - (noisy[e] - t * target[e])) > 1e-5)
                fail_msg("noise in row %d", y);
            if (!clean && *x != noisy[e]) fail_msg("another noise in row %d", y);
            assert_true(((const float *)got->target.data)[e] == target[e]);
        }
    }
    const double weight = s.first_is_clean ? (double)FRAMES / (FRAMES - 1) : 1;
    same((const float *)got->weight.data + n,
         n == 1 || n == 2 ? 0 : weight * (band->share > 0 ? band->share : 1) / 2);
}

/* A prediction of 7 everywhere. */
static void check_loss(struct clip_batch *of, const struct lg_band *band)
{
    const struct lg_objective flow = {.kind = LG_OBJECTIVE_FLOW, .clean_first_frame = 0.5};
    const struct lg_batch_tensors *t = lg_batch_tensors(of->b);
    static float seven[B * VALUES], loss[B];
    lg_tensor pred = t->target;
    const int64_t each = lg_numel(&pred) / B;
    double want[B] = {0};
    pred.data = seven;
    for (int i = 0; i < B * VALUES; i++) seven[i] = 7;
    lg_batch_loss(of->b, of->s, pred, lg_t1(loss, LG_F32, B));
    lg_stream_sync(of->s);
    for (int64_t i = 0; i < lg_numel(&pred); i++) {
        const int n = (int)(i / each), y = (int)(i / SIDE % band->height);
        const double weight = (double)lg_batch_weights(of->b)[n];
        struct lg_objective_sample s;
        lg_objective_draw(&flow, 11, (uint64_t)n, &s);
        const bool counts = weight != 0 && !(s.first_is_clean && band->first + y < ROWS);
        const double error = counts ? 7 - (double)((const float *)t->target.data)[i] : 0;
        want[n] += error * error / (double)each;
        same(&seven[i], 2 * weight * error / (double)each);
    }
    for (int n = 0; n < B; n++)
        if (!(fabs((double)loss[n] - want[n]) <= 1e-5 * want[n]))
            fail_msg("loss %d is %g, not %g", n, (double)loss[n], want[n]);
}

static void check_band(const struct lg_band *band, int64_t times)
{
    struct lg_denoiser_config c = denoiser_fixture_ltx(), picture;
    lg_device *d;
    void *memory;
    struct clip_batch of = {.w = make_window(&memory)};
    const struct lg_band part = *band, whole = {.height = SIDE, .share = 0};
    c.frames = FRAMES, c.height = ROWS, c.width = SIDE;
    picture = c;
    picture.frames = 1, picture.height = SIDE;
    assert_int_equal(lg_device_open("host", &(struct lg_device_options){.threads = 1}, &d), 0);
    assert_int_equal(lg_stream_open(d, &of.s), 0);
    const struct lg_batch_options o[] = {
        {.net = &c, .size = B, .band = part, .frame_times = true},
        {.net = &picture, .size = B, .band = part, .frame_times = true}};
    assert_int_equal(lg_batch_open(d, o, 2, &of.b), 0);
    const struct lg_batch_tensors *t = load_clips(&of, 0, 0);
    const size_t bytes = lg_tensor_bytes(&t->in.x);
    float *noisy = malloc(bytes), *target = malloc(bytes);
    assert_true(noisy && target);
    memcpy(noisy, t->in.x.data, bytes);
    memcpy(target, t->target.data, bytes);
    /* A picture, which is all frames at once, is not clean, whatever was drawn. */
    t = load_clips(&of, 1, 1);
    assert_int_equal(t->in.t.dim[0], B);
    assert_memory_equal(t->in.x.data, noisy, bytes);
    t = load_clips(&of, 0, 0.5);
    assert_int_equal(t->in.t.dim[0], B * times);
    const struct lg_band *seen = band->height ? band : &whole;
    for (int n = 0; n < B; n++) check_clip(t, noisy, target, seen, n);
    check_loss(&of, seen);
    free(noisy);
    free(target);
    lg_batch_close(&of.b);
    lg_stream_close(&of.s);
    lg_device_close(&d);
    lg_window_close(&of.w);
    free(memory);
}

/* Whole; a band that begins in the first frame; one behind it. */
static void clean_first_frames(void **state)
{
    check_band(&(struct lg_band){0}, FRAMES);
    check_band(&(struct lg_band){.first = 1, .height = 5, .share = 0.625}, 5);
    check_band(&(struct lg_band){.first = 2, .height = 4, .share = 0.5}, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole), cmocka_unit_test(of_a_band), cmocka_unit_test(of_another_shape),
        cmocka_unit_test(of_a_crop), cmocka_unit_test(clean_first_frames)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
