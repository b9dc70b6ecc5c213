/* What recomputation and offload cost and save: a training step of one net (forward, loss, backward, the gradient's
 * squares, AdamW on fp32 state) under several settings of [memory], in bf16, on random inputs.
 *
 * usage: bench_memory_cuda [WIDTH DEPTH HEADS SIDE BATCH [STEPS]]      (2048 28 16 100 1 6)
 *
 * Activations lie where gradients will (denoiser.h, `lends`) but in the first and last row. "cast": no copy of the weights in
 * bf16 is kept; each unit is cast from the fp32 ones before it is used, in forward and backward (memory.cast_weights; here by the
 * stream that computes, where a rank has a lane).
 *
 * The net is a PixArt of patch 2 on latents SIDE x SIDE, with 128 text tokens; (SIDE / 2)^2 tokens a sample. Settings
 * take turns, the first again at the end. Prints for each: GiB of activations on the GPU and in host memory, GiB on the
 * GPU in all, ms a step (median and range), its ratio to the first. */
#include "base/clock.h"
#include "stages/nets/denoiser.h"
#include "tests/gpu/gpu_test.h"
#include "tests/unit/denoiser_fixture.h"
#include <string.h>

enum { STEPS_MAX = 50, WARM_UP = 2, TEXT = 128, TEXT_WIDTH = 4096 };

static const struct setting {
    const char *recompute;
    bool offload, lends, casts;
} SETTINGS[] = {
    {"none", false, false, false},   {"none", true, true, false},
    {"none", false, true, false},    {"every:4", false, true, false},
    {"every:2", false, true, false}, {"block", false, true, false},
    {"none", false, true, true},     {"every:4", false, true, true},
    {"every:2", false, true, true},  {"block", false, true, true},
    {"none", false, false, false},
};

struct bench {
    lg_device *device;
    lg_stream *stream;
    struct lg_denoiser_config c;
    int64_t batch;
    lg_params params;
    struct lg_denoiser_input in;
    lg_tensor out, target, weight, loss;
    lg_tensor w, grads, master, m, v, squares;
    size_t bytes;
};

static lg_tensor get(struct bench *b, lg_tensor shape)
{
    gpu_need(lg_device_alloc(b->device, lg_tensor_bytes(&shape), &shape.data));
    b->bytes += lg_tensor_bytes(&shape);
    return shape;
}

/* fp32 values in scale (-1, 1), which repeat, cast to the tensor's type. */
static lg_tensor noise(struct bench *b, lg_tensor shape, double scale)
{
    enum { PERIOD = 1 << 20 };
    static float host[PERIOD];
    uint32_t h = 12345;
    lg_tensor t = get(b, shape);
    void *staged;
    for (int i = 0; i < PERIOD; i++) {
        h = h * 1664525u + 1013904223u;
        host[i] = (float)(scale * ((double)h * 0x1p-31 - 1));
    }
    gpu_need(lg_device_alloc(b->device, sizeof host, &staged));
    lg_stream_upload(b->stream, staged, host, sizeof host);
    for (int64_t at = 0, n = lg_numel(&t); at < n; at += PERIOD) {
        int64_t k = LG_MIN(n - at, (int64_t)PERIOD);
        char *to = (char *)t.data + (size_t)at * lg_dtype_bytes(t.dtype);
        lg_cast(b->stream,
                &(struct lg_cast_args){.x = lg_t1(staged, LG_F32, k), .y = lg_t1(to, t.dtype, k)});
    }
    lg_stream_sync(b->stream);
    lg_device_free(b->device, &staged);
    return t;
}

static void open_bench(struct bench *b)
{
    const lg_dtype type = lg_device_dtype(b->device);
    const int64_t B = b->batch;
    gpu_need(lg_denoiser_params(&b->c, &b->params));
    const int64_t n = (int64_t)b->params.count;
    const lg_tensor sample = lg_t4(NULL, type, B, b->c.channels, b->c.height, b->c.width);
    b->w = noise(b, lg_t1(NULL, type, n), 0.02);
    lg_tensor *state[] = {&b->grads, &b->master, &b->m, &b->v};
    for (size_t i = 0; i < LG_ARRAY_LEN(state); i++) *state[i] = get(b, lg_t1(NULL, LG_F32, n));
    lg_cast(b->stream, &(struct lg_cast_args){.x = b->w, .y = b->master});
    b->squares = get(b, lg_t1(NULL, LG_F64, (n + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE));
    b->in.x = noise(b, sample, 1.5);
    b->target = noise(b, sample, 1);
    b->out = get(b, sample);
    b->in.t = noise(b, lg_t1(NULL, LG_F32, B), 500);
    b->weight = noise(b, lg_t1(NULL, LG_F32, B), 1);
    b->loss = get(b, lg_t1(NULL, LG_F32, B));
    b->in.text[0].states = noise(b, lg_t3(NULL, type, B, TEXT, TEXT_WIDTH), 1);
    int32_t *length = malloc((size_t)B * sizeof *length);
    LG_ASSERT(length);
    for (int64_t i = 0; i < B; i++) length[i] = TEXT;
    b->in.text[0].length = get(b, lg_t1(NULL, LG_I32, B));
    lg_stream_upload(b->stream, b->in.text[0].length.data, length, (size_t)B * sizeof *length);
    lg_stream_sync(b->stream);
    free(length);
}

/* Event by event, each unit cast from the fp32 ones into the net's place for it. */
static void run_events(struct bench *b, lg_denoiser *net, bool is_backward)
{
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(net, &n, &n_forward);
    const lg_dtype type = lg_device_dtype(b->device);
    for (int i = is_backward ? n_forward : 0; i < (is_backward ? n : n_forward); i++) {
        const struct lg_param_unit *u = &b->params.unit[e[i].unit];
        if (e[i].kind == LG_EVENT_RUN) lg_denoiser_run(net, b->stream, &e[i]);
        if (e[i].kind == LG_EVENT_GRADIENT)
            lg_denoiser_set_gradient(net, e[i].unit, (float *)b->grads.data + u->first);
        if (e[i].kind != LG_EVENT_WEIGHTS) continue;
        void *place = lg_denoiser_weights_place(net, e[i].unit, is_backward);
        lg_cast(b->stream, &(struct lg_cast_args){.x = lg_t1((float *)b->master.data + u->first,
                                                             LG_F32, (int64_t)u->count),
                                                  .y = lg_t1(place, type, (int64_t)u->count)});
        lg_denoiser_set_weights(net, e[i].unit, place);
    }
}

static void forward(struct bench *b, lg_denoiser *net)
{
    if (b->w.data) {
        lg_denoiser_forward(net, b->stream, b->w.data, &b->in, b->out);
        return;
    }
    lg_denoiser_begin_forward(net, &b->in, b->out);
    run_events(b, net, false);
}

static void backward(struct bench *b, lg_denoiser *net)
{
    if (b->w.data) {
        lg_denoiser_backward(net, b->stream, b->w.data, &b->in, b->out, b->grads.data, false);
        return;
    }
    lg_denoiser_begin_backward(net, &b->in, b->out, false);
    run_events(b, net, true);
}

static void step(struct bench *b, lg_denoiser *net)
{
    forward(b, net);
    lg_mse_loss(b->stream, &(struct lg_mse_loss_args){.pred = b->out,
                                                      .target = b->target,
                                                      .weight = b->weight,
                                                      .loss = b->loss,
                                                      .dpred = b->out});
    backward(b, net);
    struct lg_reduce_ranks_args r = {
        .count = 1, .x = {b->grads}, .y = b->grads, .squares = b->squares};
    lg_reduce_ranks(b->stream, &r);
    lg_adamw(b->stream, &(struct lg_adamw_args){.w = b->master,
                                                .m = b->m,
                                                .v = b->v,
                                                .grad = b->grads,
                                                .w_out = b->master,
                                                .m_out = b->m,
                                                .v_out = b->v,
                                                .working = {b->w},
                                                .copies = b->w.data != NULL,
                                                .lr = 1e-6,
                                                .beta1 = 0.9,
                                                .beta2 = 0.999,
                                                .eps = 1e-8,
                                                .grad_scale = 1,
                                                .t = 10});
    lg_stream_sync(b->stream);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The copy in bf16 is there or not. */
static void keep_weights(struct bench *b, bool keep)
{
    if (keep == (b->w.data != NULL)) return;
    if (!keep) {
        b->bytes -= lg_tensor_bytes(&b->w);
        lg_device_free(b->device, &b->w.data);
        return;
    }
    b->w = get(b, b->w);
    lg_cast(b->stream, &(struct lg_cast_args){.x = b->master, .y = b->w});
}

static void bench_setting(struct bench *b, const struct setting *set, int steps)
{
    static double first;
    double ms[STEPS_MAX];
    lg_denoiser *net;
    struct lg_denoiser_bytes bytes;
    const char *const words[] = {set->recompute, NULL};
    const struct lg_denoiser_mode mode = {.batch = (int)b->batch,
                                          .train = true,
                                          .recompute = words,
                                          .offload = set->offload,
                                          .lends = set->lends,
                                          .places_weights = set->casts};
    keep_weights(b, !set->casts);
    gpu_need(lg_denoiser_plan(b->device, &b->c, &mode, &bytes));
    double gib = (double)(bytes.activations + bytes.scratch + b->bytes) * 0x1p-30;
    printf("%-8s %-8s %-5s %-5s %7.2f %7.2f %7.2f", set->recompute, set->offload ? "offload" : "",
           set->lends ? "lent" : "", set->casts ? "cast" : "", (double)bytes.activations * 0x1p-30,
           (double)bytes.host * 0x1p-30, gib);
    fflush(stdout);
    if (lg_denoiser_open(b->device, &b->c, &mode, &net) < 0) {
        printf("  %s\n", lg_err_message());
        return;
    }
    if (set->lends) lg_denoiser_set_lent(net, b->grads.data);
    for (int i = 0; i < WARM_UP + steps; i++) {
        int64_t before = lg_now_ns();
        step(b, net);
        if (i >= WARM_UP) ms[i - WARM_UP] = (double)(lg_now_ns() - before) * 1e-6;
    }
    lg_denoiser_close(&net);
    qsort(ms, (size_t)steps, sizeof *ms, ascending);
    if (first == 0) first = ms[steps / 2];
    printf("  %8.1f (%.1f to %.1f)  %.3f\n", ms[steps / 2], ms[0], ms[steps - 1],
           ms[steps / 2] / first);
    fflush(stdout);
}

static int number(int argc, char **argv, int i, int fallback)
{
    return argc > i ? atoi(argv[i]) : fallback;
}

int main(int argc, char **argv)
{
    struct bench b = {.device = gpu_open("cuda:0", "bf16"), .batch = number(argc, argv, 5, 1)};
    int side = number(argc, argv, 4, 100), steps = number(argc, argv, 6, 6);
    LG_ASSERT(steps >= 1 && steps <= STEPS_MAX);
    b.c = (struct lg_denoiser_config)DENOISER_SHAPE(
        LG_PIXART, 4, side, side, 2, number(argc, argv, 1, 2048), number(argc, argv, 2, 28),
        number(argc, argv, 3, 16), 4, 0, TEXT, TEXT_WIDTH, 1e-6);
    gpu_need(lg_stream_open(b.device, &b.stream));
    open_bench(&b);
    printf("%s\nwidth %d, depth %d, %d heads, %d tokens, batch %lld, %.2f G parameters\n",
           lg_device_fingerprint(b.device), b.c.hidden, b.c.depth, b.c.heads, side / 2 * (side / 2),
           (long long)b.batch, (double)b.params.count * 1e-9);
    printf("recompute                     activ.    host  in all        ms               over the "
           "first\n");
    for (size_t i = 0; i < LG_ARRAY_LEN(SETTINGS); i++) bench_setting(&b, &SETTINGS[i], steps);
    lg_params_free(&b.params);
    lg_stream_close(&b.stream);
    lg_device_close(&b.device);
    return 0;
}
