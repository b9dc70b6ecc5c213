/* Step time of the quick start's transformer, alone on the machine: R processes of one thread each, as
 * the trainer ranks run it: noise, forward, loss, backward, gradients summed in rank order through
 * shared memory, clip, AdamW of the own shard, weights gathered. Prints one JSON line. tests/bench/
 * peer_step.py is the same step in PyTorch on the same cores.
 *
 * Usage: bench_step [hidden depth heads batch ranks steps] */
#include "base/clock.h"
#include "kernels/ops.h"
#include "stages/nets/denoiser.h"
#include "stages/trainer/state.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS_MAX = 16, WARMUP = 5 };

struct shared {
    _Atomic(int) arrived[8];
    struct lg_exact_sum squares[RANKS_MAX];
};

struct arg {
    struct lg_denoiser_config net;
    int batch, ranks, steps;
    float *grad[RANKS_MAX], *w, *m, *v;
    struct shared *sync;
};

static void *share(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LG_ASSERT(p != MAP_FAILED);
    return p;
}

static void barrier(const struct arg *a, int which, int round)
{
    atomic_fetch_add(&a->sync->arrived[which], 1);
    while (atomic_load(&a->sync->arrived[which]) < round * a->ranks) usleep(0);
}

static void *take(lg_device *d, size_t bytes)
{
    void *p;
    LG_ASSERT(lg_device_alloc(d, bytes, &p) == 0);
    return p;
}

static int run_rank(const struct arg *a, int rank)
{
    lg_device *d;
    lg_stream *s;
    lg_denoiser *net;
    lg_params params;
    const struct lg_denoiser_config *c = &a->net;
    const int64_t B = a->batch / a->ranks;
    LG_TRY(lg_device_open("host", NULL, &d));
    LG_TRY(lg_stream_open(d, &s));
    const struct lg_denoiser_mode mode = {.batch = (int)B, .train = true};
    LG_TRY(lg_denoiser_open(d, c, &mode, &net));
    LG_TRY(lg_denoiser_params(c, &params));
    const size_t n = params.count, latent = (size_t)(B * c->channels * c->height * c->width);
    struct lg_piece shard = lg_piece_of(n, rank, a->ranks);
    float *weights = take(d, n * 4), *reduced = take(d, shard.count * 4);
    const size_t pieces = (shard.count + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
    double *squares = take(d, pieces * sizeof *squares);
    float *text = take(d, (size_t)(B * c->text[0].length * c->text[0].width) * 4),
          *mean = take(d, latent * 4);
    int32_t *length = take(d, (size_t)B * 4);
    int64_t *numbers = take(d, (size_t)B * 8);
    float *coef = take(d, (size_t)B * 16), *t = take(d, (size_t)B * 4),
          *weight = take(d, (size_t)B * 4);
    lg_philox_normal_f32(text, (size_t)(B * c->text[0].length * c->text[0].width), 1,
                         LG_PURPOSE_TEST, 1, 0);
    lg_philox_normal_f32(mean, latent, 1, LG_PURPOSE_TEST, 2, 0);
    for (int64_t b = 0; b < B; b++) {
        length[b] = 4 + (int)b % 12, numbers[b] = b, t[b] = 500, weight[b] = 1.0f / (float)a->batch;
        coef[4 * b] = coef[4 * b + 1] = 0.5f, coef[4 * b + 2] = -1, coef[4 * b + 3] = 1;
    }
    lg_tensor lat = lg_t4(mean, LG_F32, B, c->channels, c->height, c->width);
    lg_tensor x_t = lat, target = lat, logvar = lat, pred = lat;
    x_t.data = take(d, latent * 4), target.data = take(d, latent * 4);
    logvar.data = take(d, latent * 4), pred.data = take(d, latent * 4);
    lg_tensor loss = lg_t1(take(d, (size_t)B * 4), LG_F32, B);
    struct lg_denoiser_input in = {
        .x = x_t,
        .t = lg_t1(t, LG_F32, B),
        .text = {{.states = lg_t3(text, LG_F32, B, c->text[0].length, c->text[0].width),
                  .length = lg_t1(length, LG_I32, B)}}};
    int64_t start = 0;
    for (int step = -WARMUP; step < a->steps; step++) {
        int round = step + WARMUP + 1;
        if (step == 0) start = lg_now_ns();
        memcpy(weights, a->w, n * 4);
        lg_diffuse_forward(s, &(struct lg_diffuse_forward_args){.mean = lat,
                                                                .logvar = logvar,
                                                                .n = lg_t1(numbers, LG_I64, B),
                                                                .coef = lg_t2(coef, LG_F32, B, 4),
                                                                .x_t = x_t,
                                                                .target = target,
                                                                .seed = (uint64_t)round,
                                                                .scaling_factor = 0.75});
        lg_denoiser_forward(net, s, weights, &in, pred);
        lg_mse_loss(s, &(struct lg_mse_loss_args){.pred = pred,
                                                  .target = target,
                                                  .weight = lg_t1(weight, LG_F32, B),
                                                  .loss = loss,
                                                  .dpred = pred});
        lg_denoiser_backward(net, s, weights, &in, pred, a->grad[rank], false);
        lg_stream_sync(s);
        barrier(a, 0, round);
        struct lg_reduce_ranks_args r = {.count = a->ranks,
                                         .y = lg_t1(reduced, LG_F32, (int64_t)shard.count),
                                         .squares = lg_t1(squares, LG_F64, (int64_t)pieces)};
        for (int k = 0; k < a->ranks; k++)
            r.x[k] = lg_t1(a->grad[k] + shard.first, LG_F32, (int64_t)shard.count);
        lg_reduce_ranks(s, &r);
        lg_stream_sync(s);
        a->sync->squares[rank] = (struct lg_exact_sum){0};
        for (size_t i = 0; i < pieces; i++) lg_exact_sum_add(&a->sync->squares[rank], squares[i]);
        barrier(a, 1, round);
        struct lg_exact_sum all = {0};
        for (int k = 0; k < a->ranks; k++) lg_exact_sum_merge(&all, &a->sync->squares[k]);
        double norm = lg_exact_sum_total(&all);
        lg_tensor w = lg_t1(a->w + shard.first, LG_F32, (int64_t)shard.count), m = w, v = w;
        m.data = a->m + shard.first, v.data = a->v + shard.first;
        lg_adamw(s, &(struct lg_adamw_args){.w = w,
                                            .m = m,
                                            .v = v,
                                            .w_out = w,
                                            .m_out = m,
                                            .v_out = v,
                                            .grad = r.y,
                                            .lr = 1e-4,
                                            .beta1 = 0.9,
                                            .beta2 = 0.99,
                                            .eps = 1e-8,
                                            .weight_decay = 0.01,
                                            .grad_scale = fmin(1, 1 / (sqrt(norm) + 1e-6)),
                                            .t = round});
        lg_stream_sync(s);
        barrier(a, 2, round);
    }
    double ms = (double)(lg_now_ns() - start) / 1e6 / a->steps;
    double flops = 3 * lg_denoiser_flops(c) * a->batch;
    if (rank == 0)
        printf("{\"bench\": \"step\", \"hidden\": %d, \"depth\": %d, \"batch\": %d, \"ranks\": %d, "
               "\"parameters\": %zu, \"step_ms\": %.3f, \"gflop_per_s\": %.1f}\n",
               c->hidden, c->depth, a->batch, a->ranks, n, ms, flops / ms / 1e6);
    lg_params_free(&params);
    lg_denoiser_close(&net);
    lg_stream_close(&s);
    lg_device_close(&d);
    return 0;
}

int main(int argc, char **argv)
{
    int v[6] = {128, 4, 4, 16, 2, 30};
    for (int i = 1; i < argc && i <= 6; i++) v[i - 1] = atoi(argv[i]);
    struct arg a = {.net = {.kind = LG_PIXART,
                            .channels = 4,
                            .height = 16,
                            .width = 16,
                            .patch = 2,
                            .hidden = v[0],
                            .depth = v[1],
                            .heads = v[2],
                            .mlp_ratio = 4,
                            .n_texts = 1,
                            .text = {{.length = 24, .width = 192}},
                            .norm_eps = 1e-6},
                    .batch = v[3],
                    .ranks = v[4],
                    .steps = v[5]};
    lg_params params;
    if (a.ranks < 1 || a.ranks > RANKS_MAX || a.batch % a.ranks ||
        lg_denoiser_params(&a.net, &params) < 0) {
        fprintf(stderr, "bench_step: %s\n", lg_err_message());
        return 2;
    }
    for (int r = 0; r < a.ranks; r++) a.grad[r] = share(params.count * 4);
    a.w = share(params.count * 4), a.m = share(params.count * 4), a.v = share(params.count * 4);
    a.sync = share(sizeof *a.sync);
    lg_params_init(&params, 0, a.w, 0, params.count);
    lg_params_free(&params);
    for (int r = 1; r < a.ranks; r++)
        if (fork() == 0) return run_rank(&a, r) < 0;
    int rc = run_rank(&a, 0);
    while (wait(NULL) > 0) {
    }
    if (rc < 0) fprintf(stderr, "bench_step: %s\n", lg_err_text());
    return rc < 0;
}
