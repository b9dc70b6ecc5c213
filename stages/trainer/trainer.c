/* A trainer rank: one data-parallel share of the step.
 *
 * What to do next is asked of shm/commit.h at every turn; this file does the work and stores the
 * mark. Private memory (activations, the reduced shard) can be lost at any time: it is rebuilt from
 * regions. Persistent: state sides, gradients, working weights, marks on the board.
 *
 * Order within a step, seen by one rank:
 *   FORWARD  per micro-batch forward, loss, backward into the grad region
 *   REDUCE   own shard = sum of all ranks' gradients in rank order; sum of squares; loss
 *   UPDATE   total norm in rank order, clip, AdamW from side s & 1 into the other and into every
 *            rank's working weights; rank 0 writes the record; commit */
#include "base/clock.h"
#include "base/log.h"
#include "kernels/ops.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/nets/schedule.h"
#include "stages/roles.h"
#include "stages/trainer/batch.h"
#include "stages/trainer/exchange.h"
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/records.h"
#include "stages/trainer/state.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { VOID_CHECK_SAMPLES = 100 }; /* the share of voids is judged from this many samples on */

struct trainer {
    lg_device *device;
    lg_stream *stream;
    lg_denoiser *net;
    lg_trainer_state *state;
    lg_window *window;
    lg_batch *batch;
    lg_records *records; /* rank 0 */
    lg_exchange *exchange;
    struct lg_objective objective;
    struct lg_schedule schedule;
    struct lg_shard shard;
    unsigned needs; /* window fields a micro-batch needs */
    lg_dtype type;  /* of the computation */
    float *reduced; // (shard): sum of gradients of step `reduced_of`; NULL: the region itself
    void *squares;  // (pieces of the shard) f64, device memory
    double *host_squares;
    float *host_loss; // (micro batch)
    lg_tensor pred, loss;
    lg_mark reduced_of, forward_of; /* the step that the other private buffers hold */
    int64_t micro_done;             /* micro-batches of step forward_of that are done */
    double loss_sum;                /* of them */
    double divisor;                 /* non-void samples of the global batch of step forward_of */
    int64_t wait_start_ns;          /* 0: not waiting for data */
    int64_t wait_ns;                /* in the step so far */
    int64_t floor_start_ns;         /* 0: not waiting for the checkpoint writer */
    int64_t floor_ns;               /* in the step so far */
    int64_t last_commit_ns;
    bool records_failed;
};

/* ---- memory ---- */

/* Nothing for 0 bytes. */
static int alloc(lg_device *d, size_t bytes, void *ret_pointer)
{
    void *p = NULL;
    if (bytes) LG_TRY(lg_device_alloc(d, bytes, &p));
    memcpy(ret_pointer, &p, sizeof p);
    return 0;
}

static int open_rules(lg_stage *st, struct trainer *t)
{
    const lg_config *c = st->config;
    LG_TRY(lg_objective_parse(c->trainer_objective, &t->objective.kind));
    t->objective.timesteps =
        strcmp(c->trainer_timesteps, "uniform") ? LG_TIMESTEPS_LOGIT_NORMAL : LG_TIMESTEPS_UNIFORM;
    t->objective.min_snr_gamma = c->trainer_min_snr_gamma;
    LG_TRY(lg_objective_check(&t->objective));
    t->schedule = (struct lg_schedule){
        .kind = !strcmp(c->trainer_lr_schedule, "cosine")   ? LG_SCHEDULE_COSINE
                : !strcmp(c->trainer_lr_schedule, "linear") ? LG_SCHEDULE_LINEAR
                                                            : LG_SCHEDULE_CONSTANT,
        .peak = c->trainer_lr,
        .warmup_steps = c->trainer_warmup_steps,
        .steps = st->plan.lr_steps,
        .final_ratio = c->trainer_lr_final};
    t->needs = 1u << LG_FIELD_SOURCE | 1u << LG_FIELD_LATENT;
    if (st->plan.text_length) t->needs |= 1u << LG_FIELD_TEXT;
    return 0;
}

static int open_memory(lg_stage *st, struct trainer *t)
{
    const int64_t B = st->plan.micro_batch;
    const int ranks = st->plan.instances[LG_ROLE_trainer];
    lg_device *maps[LG_INSTANCES_MAX];
    for (int r = 0; r < ranks; r++) maps[r] = t->device; /* peers' regions too */
    LG_TRY(lg_stage_window(st, t->device, &t->window));
    LG_TRY(lg_trainer_state_open(st, maps, &t->state));
    const struct lg_denoiser_config *net = &t->state->net;
    const size_t params = t->state->params.count;
    t->shard = lg_shard_of(params, st->index, ranks);
    struct lg_batch_options batch = lg_rank_batch(&st->plan, net);
    struct lg_denoiser_mode mode = lg_rank_mode(st->config, &st->plan);
    LG_TRY(lg_denoiser_open(t->device, net, &mode, &t->net));
    LG_TRY(lg_batch_open(t->device, &batch, &t->batch));
    struct lg_rank_bytes own = lg_rank_bytes_of(t->shard.count, ranks);
    LG_TRY(lg_exchange_open(st, t->device, t->state, &t->exchange));
    LG_TRY(alloc(t->device, own.reduced, &t->reduced));
    LG_TRY(alloc(t->device, own.squares, &t->squares));
    t->host_squares = malloc(LG_MAX(own.squares, (size_t)1));
    LG_ASSERT(t->host_squares);
    t->pred = lg_t4(NULL, t->type, B, net->channels, net->height, net->width);
    t->loss = lg_t1(NULL, LG_F32, B);
    LG_TRY(alloc(t->device, lg_tensor_bytes(&t->pred), &t->pred.data));
    LG_TRY(alloc(t->device, lg_tensor_bytes(&t->loss), &t->loss.data));
    t->host_loss = calloc((size_t)B, sizeof(float));
    LG_ASSERT(t->host_loss);
    return 0;
}

static int trainer_open(lg_stage *st)
{
    struct trainer *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    st->state = t;
    LG_TRY(open_rules(st, t));
    LG_TRY(lg_stage_device(st, LG_ROLE_trainer, st->index, &t->device));
    t->type = lg_device_dtype(t->device);
    LG_TRY(lg_stream_open(t->device, &t->stream));
    LG_TRY(open_memory(st, t));
    if (st->index == 0) {
        lg_mark commit = atomic_load_explicit(&st->row->commit, memory_order_acquire);
        uint64_t state = commit ? lg_mark_state(commit) : st->board->s->start_step;
        LG_TRY(lg_records_open(st->run_dir, state, &t->records));
    }
    return 0;
}

/* ---- INIT ---- */

/* Fills the shard's weights and moments, host memory laid out like a side. */
static int read_origin(lg_stage *st, struct trainer *t, lg_origin origin, const char *dir,
                       float *side)
{
    const lg_params *params = &t->state->params;
    const size_t first = t->shard.first, count = t->shard.count;
    char weights_dir[LG_PATH_BYTES];
    switch (origin) {
    case LG_ORIGIN_SEED:
        lg_params_init(params, (uint64_t)st->config->job_seed, side, first, count);
        return 0;
    case LG_ORIGIN_INIT: {
        LG_TRY(lg_checkpoint_weights_dir(dir, "ema", weights_dir));
        float *all = malloc(params->count * sizeof *all);
        LG_ASSERT(all);
        int rc = lg_denoiser_load(&t->state->net, weights_dir, all);
        if (rc == 0) memcpy(side, all + first, count * sizeof *all);
        free(all);
        return lg_stage_park_if_lasting(st, rc, "trainer.init_from");
    }
    case LG_ORIGIN_RESUME:
        return lg_stage_park_if_lasting(st,
                                        lg_checkpoint_read_optimizer(dir, params, first, count,
                                                                     side, side + count,
                                                                     side + 2 * count),
                                        "the checkpoint cannot be read");
    }
    return LG_FAIL(LG_ERR_FAILED, "unknown origin");
}

static int init_side(lg_stage *st, struct trainer *t, lg_origin origin, const char *dir,
                     const struct lg_state_view *v)
{
    float *side = calloc(LG_MAX(3 * t->shard.count, (size_t)1), sizeof *side);
    LG_ASSERT(side);
    int rc = read_origin(st, t, origin, dir, side);
    if (rc == 0) {
        lg_stream_upload(t->stream, v->w, side, 3 * t->shard.count * sizeof *side);
        lg_stream_sync(t->stream);
    }
    free(side);
    return rc;
}

/* Makes state start_step of this rank's shard. Cut off halfway it is simply made again. */
static int init(lg_stage *st, struct trainer *t, uint64_t state)
{
    lg_origin origin;
    char dir[LG_PATH_BYTES];
    struct lg_state_view v = lg_trainer_state_view(t->state, st->index, state);
    LG_TRY(lg_run_origin(st, &origin, dir));
    lg_stamp_clear(v.stamp);
    memset(v.scalars, 0, sizeof *v.scalars);
    LG_TRY(init_side(st, t, origin, dir, &v));
    v.scalars->state = state;
    v.scalars->optimizer_steps = 0;
    v.scalars->loss_scale = lg_loss_scale_first(st->config);
    if (origin == LG_ORIGIN_RESUME) {
        lg_manifest *m = calloc(1, sizeof *m);
        LG_ASSERT(m);
        int rc = lg_manifest_load(dir, m);
        v.scalars->optimizer_steps = m->optimizer_steps;
        v.scalars->skipped = m->skipped;
        if (m->loss_scale)
            v.scalars->loss_scale = (struct lg_loss_scale){m->loss_scale, m->loss_scale_steps};
        free(m);
        LG_TRY(rc);
    }
    lg_stamp_set(v.stamp, state);
    lg_trainer_mark_init(st->board, st->index);
    lg_log(LG_INFO, "state %" PRIu64 " from %s", state, dir[0] ? dir : "the seed");
    return 0;
}

/* ---- FORWARD ---- */

static int no_data_yet(struct trainer *t)
{
    if (!t->wait_start_ns) t->wait_start_ns = lg_now_ns();
    return LG_STEP_IDLE;
}

/* The divisor of the loss is fixed before the backward: every rank waits until the source of the
 * whole global batch is known, and counts the same voids. */
static bool count_valid(lg_stage *st, struct trainer *t, uint64_t step)
{
    uint64_t first = step * st->board->s->batch, valid = 0;
    if (!lg_window_range_ready(t->window, 1u << LG_FIELD_SOURCE, first, st->board->s->batch))
        return false;
    for (uint64_t n = first; n < first + st->board->s->batch; n++)
        valid += !lg_window_slot(t->window, n)->is_void;
    t->divisor = (double)LG_MAX(valid, (uint64_t)1);
    return true;
}

/* The factor on this step's loss, the same on every rank. */
static double scale_of(lg_stage *st, struct trainer *t, uint64_t step)
{
    return (double)lg_trainer_state_view(t->state, st->index, step).scalars->loss_scale.scale;
}

/* In a turn on the GPU. */
static void micro_step(lg_stage *st, struct trainer *t, uint64_t step, uint64_t first)
{
    const double scale = scale_of(st, t, step);
    const struct lg_batch_tensors *b = lg_batch_tensors(t->batch);
    lg_turn_begin(&st->turn);
    const void *weights = lg_exchange_weights(t->exchange, t->stream, step);
    lg_batch_load(t->batch, t->stream, t->window,
                  &(struct lg_batch_spec){.first = first,
                                          .divisor = t->divisor / scale,
                                          .seed = (uint64_t)st->config->job_seed,
                                          .scaling_factor = st->plan.scaling_factor,
                                          .shift_factor = st->plan.shift_factor,
                                          .objective = &t->objective});
    lg_denoiser_forward(t->net, t->stream, weights, &b->in, t->pred);
    lg_mse_loss(t->stream, &(struct lg_mse_loss_args){.pred = t->pred,
                                                      .target = b->target,
                                                      .weight = b->weight,
                                                      .loss = t->loss,
                                                      .dpred = t->pred});
    lg_denoiser_backward(t->net, t->stream, weights, &b->in, t->pred, lg_exchange_grad(t->exchange),
                         t->micro_done > 0);
    lg_stream_download(t->stream, t->host_loss, t->loss.data, lg_tensor_bytes(&t->loss));
    lg_stream_sync(t->stream);
    lg_turn_end(&st->turn);
    const float *weight = lg_batch_weights(t->batch);
    for (int64_t i = 0; i < st->plan.micro_batch; i++)
        t->loss_sum += (double)weight[i] * (double)t->host_loss[i] / scale;
}

/* One micro-batch of step's forward and backward. */
static int forward(lg_stage *st, struct trainer *t, uint64_t step)
{
    const int64_t share = st->plan.rank_batch, micro = st->plan.micro_batch;
    if (t->forward_of != lg_mark_of(step)) {
        if (!count_valid(st, t, step)) return no_data_yet(t);
        LG_TRY(lg_trainer_state_expect(st, t->state, step));
        lg_exchange_begin_grad(t->exchange);
        t->forward_of = lg_mark_of(step);
        t->micro_done = 0;
        t->loss_sum = 0;
    }
    uint64_t first = step * st->board->s->batch + (uint64_t)(st->index * share) +
                     (uint64_t)(t->micro_done * micro);
    if (!lg_window_range_ready(t->window, t->needs, first, (uint64_t)micro)) return no_data_yet(t);
    if (t->wait_start_ns) {
        t->wait_ns += lg_now_ns() - t->wait_start_ns;
        t->wait_start_ns = 0;
    }
    micro_step(st, t, step, first);
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)micro, memory_order_relaxed);
    if (++t->micro_done < share / micro) return LG_STEP_WORKED;
    lg_exchange_end_grad(t->exchange, step);
    lg_trainer_mark_grads(st->board, st->index, step, t->loss_sum);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

/* ---- REDUCE and UPDATE ---- */

/* The gradient of the own shard, summed. With one rank it lies in its region: a sum in place of one
 * addend changes nothing, so a rank that dies in the middle may do it again. */
static float *reduced(struct trainer *t)
{
    return t->reduced ? t->reduced : lg_exchange_grad(t->exchange) + t->shard.first;
}

static int reduce(lg_stage *st, struct trainer *t, uint64_t step, struct lg_exact_sum *ret_squares)
{
    *ret_squares = (struct lg_exact_sum){0};
    LG_TRY(lg_exchange_expect_grads(st, t->exchange, step));
    t->reduced_of = lg_mark_of(step);
    if (!t->shard.count) return 0;
    struct lg_reduce_ranks_args args = lg_rank_reduce(t->state->ranks, t->shard.count, LG_F32);
    for (int r = 0; r < t->state->ranks; r++)
        args.x[r].data = (void *)lg_exchange_grad_of(t->exchange, r);
    args.y.data = reduced(t);
    args.squares.data = t->squares;
    lg_turn_begin(&st->turn);
    lg_reduce_ranks(t->stream, &args);
    lg_stream_download(t->stream, t->host_squares, t->squares, lg_tensor_bytes(&args.squares));
    lg_stream_sync(t->stream);
    lg_turn_end(&st->turn);
    for (int64_t i = 0; i < args.squares.dim[0]; i++)
        lg_exact_sum_add(ret_squares, t->host_squares[i]);
    return 0;
}

static int publish_partial(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct lg_exact_sum squares;
    LG_TRY(reduce(st, t, step, &squares));
    lg_trainer_mark_partial(st->board, st->index, step, &squares);
    lg_bus_notify(st->bus);
    return 0;
}

struct step_sums {
    double loss, norm;
    bool finite;
};

static struct step_sums sum_ranks(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct step_sums s = {0};
    struct lg_exact_sum squares = {0};
    for (int r = 0; r < t->state->ranks; r++) {
        const struct lg_board_row *row = lg_board_row(st->board, LG_ROLE_trainer, r);
        s.loss += row->loss_sum[step & 1];
        lg_exact_sum_merge(&squares, &row->sum_squares[step & 1]);
    }
    s.norm = sqrt(lg_exact_sum_total(&squares)) / scale_of(st, t, step);
    s.finite = isfinite(s.loss) && isfinite(s.norm);
    return s;
}

/* Skipped: the state is copied, the same on every rank. */
static void keep_state(lg_stage *st, struct trainer *t, const struct lg_state_view *from,
                       const struct lg_state_view *to)
{
    lg_turn_begin(&st->turn);
    lg_stream_copy(t->stream, to->w, from->w, t->shard.count * 3 * sizeof(float));
    lg_stream_sync(t->stream);
    lg_turn_end(&st->turn);
    to->scalars->skipped++;
}

static lg_tensor part_of(lg_tensor t, size_t first, size_t count)
{
    return lg_slice(t, 0, (int64_t)first, (int64_t)count);
}

/* a: of the whole shard and of what is trained as the config says of all. What is frozen has no gradient and no
 * moments, and a rate of 0 leaves it as it is. */
static void update_groups(struct trainer *t, const struct lg_adamw_args *a)
{
    const lg_params *params = &t->state->params;
    const size_t begin = t->shard.first, end = begin + t->shard.count;
    for (size_t at = begin, next; at < end; at = next) {
        int group;
        next = lg_params_group_end(params, at, end, &group);
        const struct lg_param_group *g = &params->group[group];
        const size_t first = at - begin, count = next - at;
        struct lg_adamw_args p = *a;
        lg_tensor *parts[] = {&p.w, &p.m, &p.v, &p.grad, &p.w_out, &p.m_out, &p.v_out};
        for (size_t i = 0; i < LG_ARRAY_LEN(parts); i++)
            *parts[i] = part_of(*parts[i], first, count);
        for (int i = 0; i < p.copies; i++) p.working[i] = part_of(p.working[i], first, count);
        p.lr *= g->is_frozen ? 0 : g->lr;
        p.weight_decay *= g->decay;
        if (g->is_frozen) p.eps = 1; /* 0 / 0 is no rate of anything */
        lg_adamw(t->stream, &p);
    }
}

/* The new state, and with it this shard of every rank's working weights. */
static void adamw(lg_stage *st, struct trainer *t, uint64_t step, const struct lg_state_view *from,
                  const struct lg_state_view *to, double norm, double lr)
{
    const lg_config *c = st->config;
    const int64_t n = (int64_t)t->shard.count;
    struct lg_adamw_args a = {.w = lg_t1(from->w, LG_F32, n),
                              .m = lg_t1(from->m, LG_F32, n),
                              .v = lg_t1(from->v, LG_F32, n),
                              .grad = lg_t1(reduced(t), LG_F32, n),
                              .w_out = lg_t1(to->w, LG_F32, n),
                              .m_out = lg_t1(to->m, LG_F32, n),
                              .v_out = lg_t1(to->v, LG_F32, n),
                              .lr = lr,
                              .beta1 = c->trainer_beta1,
                              .beta2 = c->trainer_beta2,
                              .eps = c->trainer_adam_eps,
                              .weight_decay = c->trainer_weight_decay,
                              .grad_scale = 1,
                              .t = (int64_t)++to->scalars->optimizer_steps};
    if (c->trainer_clip_norm > 0) a.grad_scale = LG_MIN(1.0, c->trainer_clip_norm / (norm + 1e-6));
    a.grad_scale /= scale_of(st, t, step);
    a.copies = lg_exchange_copies(t->exchange, a.working);
    if (!n) return;
    lg_turn_begin(&st->turn);
    update_groups(t, &a);
    lg_stream_sync(t->stream);
    lg_turn_end(&st->turn);
    lg_exchange_mark_copies(t->exchange, step + 1);
}

static int make_state(lg_stage *st, struct trainer *t, uint64_t step, const struct step_sums *sums,
                      double lr)
{
    struct lg_state_view from = lg_trainer_state_view(t->state, st->index, step);
    struct lg_state_view to = lg_trainer_state_view(t->state, st->index, step + 1);
    LG_TRY(lg_stage_expect(st, t->state->side[st->index][step & 1], step));
    lg_stamp_clear(to.stamp);
    *to.scalars = *from.scalars;
    to.scalars->state = step + 1;
    to.scalars->loss_scale = lg_loss_scale_next(st->config, from.scalars->loss_scale, sums->finite);
    /* A factor that can be halved explains a gradient that is not finite, a loss nothing does. */
    bool is_explained = isfinite(sums->loss) && from.scalars->loss_scale.scale > 1;
    if (sums->finite)
        to.scalars->skipped_in_row = 0;
    else
        to.scalars->skipped_in_row += !is_explained;
    if (sums->finite)
        adamw(st, t, step, &from, &to, sums->norm, lr);
    else
        keep_state(st, t, &from, &to);
    return 0;
}

/* Voids and key hashes of the step's samples, from the window: the slots are still ours. */
static struct lg_ledger_record ledger_record(lg_stage *st, struct trainer *t, uint64_t step,
                                             const struct step_sums *sums)
{
    const uint64_t batch = st->board->s->batch, first = step * batch;
    XXH3_state_t *hash = XXH3_createState();
    LG_ASSERT(hash);
    XXH3_64bits_reset(hash);
    struct lg_ledger_record r = {.step = step + 1,
                                 .first = first,
                                 .last = first + batch - 1,
                                 .skipped = !sums->finite,
                                 .loss = sums->loss,
                                 .lineage = st->board->s->lineage};
    for (uint64_t n = first; n < first + batch; n++) {
        const struct lg_slot *slot = lg_window_slot(t->window, n);
        XXH3_64bits_update(hash, &slot->key_hash, sizeof slot->key_hash);
        r.voids += slot->is_void;
    }
    r.keys_hash = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return r;
}

static void write_record(lg_stage *st, struct trainer *t, const struct lg_step_record *r)
{
    struct lg_board_metrics *m = &st->board->s->metrics;
    atomic_store_explicit(&m->step, r->ledger.step, memory_order_relaxed);
    atomic_store_explicit(&m->loss, r->loss, memory_order_relaxed);
    atomic_store_explicit(&m->grad_norm, r->grad_norm, memory_order_relaxed);
    atomic_store_explicit(&m->lr, r->lr, memory_order_relaxed);
    atomic_store_explicit(&m->samples_per_s, r->samples_per_s, memory_order_relaxed);
    atomic_store_explicit(&m->data_wait_s, r->data_wait_s, memory_order_relaxed);
    bool failed = lg_records_append(t->records, r) != 0;
    if (failed && !t->records_failed)
        lg_bus_event(st->bus, LG_WARN,
                     "metrics.jsonl and ledger cannot be written (disk full?); kept in memory");
    t->records_failed = failed;
}

/* Rule: every rank knows the share of voids from the same numbers and parks at the same step. */
static int check_health(lg_stage *st, const struct lg_state_scalars *s)
{
    const lg_config *c = st->config;
    double samples = (double)((s->state - st->board->s->start_step) * st->board->s->batch);
    if ((int64_t)s->skipped_in_row >= c->trainer_nonfinite_max)
        return lg_stage_park(st,
                             "%" PRIu64 " steps in a row had a loss or gradient that is not finite "
                             "(up to step %" PRIu64 "): lower trainer.lr, or look at the data",
                             s->skipped_in_row, s->state);
    if (samples >= VOID_CHECK_SAMPLES && (double)s->voids > c->data_void_ratio_max * samples)
        return lg_stage_park(st,
                             "%" PRIu64 " of %.0f samples are unreadable, more than "
                             "data.void_ratio_max = %g: see logs/loader.0.log",
                             s->voids, samples, c->data_void_ratio_max);
    return 0;
}

static int update(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct step_sums sums = sum_ranks(st, t, step);
    if (t->floor_start_ns) t->floor_ns += lg_now_ns() - t->floor_start_ns;
    t->floor_start_ns = 0;
    double lr = lg_schedule_rate(&t->schedule, (int64_t)step);
    if (t->reduced_of != lg_mark_of(step)) { /* a former life published the sums */
        struct lg_exact_sum published;
        LG_TRY(reduce(st, t, step, &published));
    }
    LG_TRY(make_state(st, t, step, &sums, lr));
    struct lg_state_view to = lg_trainer_state_view(t->state, st->index, step + 1);
    struct lg_step_record record = {.ledger = ledger_record(st, t, step, &sums),
                                    .loss = sums.loss,
                                    .grad_norm = sums.norm,
                                    .lr = lr,
                                    .loss_scale = scale_of(st, t, step),
                                    .data_wait_s = (double)t->wait_ns / LG_S_NS,
                                    .ckpt_wait_s = (double)t->floor_ns / LG_S_NS};
    to.scalars->voids += record.ledger.voids;
    int64_t now = lg_now_ns();
    if (t->last_commit_ns)
        record.samples_per_s =
            (double)st->board->s->batch * LG_S_NS / (double)(now - t->last_commit_ns);
    t->last_commit_ns = now;
    t->wait_ns = t->floor_ns = 0;
    if (st->index == 0) {
        atomic_store_explicit(&st->board->s->metrics.voids, to.scalars->voids,
                              memory_order_relaxed);
        atomic_store_explicit(&st->board->s->metrics.skipped, to.scalars->skipped,
                              memory_order_relaxed);
        write_record(st, t, &record);
    }
    if (!sums.finite)
        lg_log(LG_WARN, "step skipped: loss %g, gradient norm %g, factor on the loss %g", sums.loss,
               sums.norm, record.loss_scale);
    LG_TRY(check_health(st, to.scalars));
    lg_stamp_set(to.stamp, step + 1);
    lg_trainer_mark_commit(st->board, st->index, step);
    lg_bus_notify(st->bus);
    return 0;
}

static int trainer_step(lg_stage *st)
{
    struct trainer *t = st->state;
    struct lg_action a = lg_trainer_next(st->board, st->index);
    if (t->records_failed) t->records_failed = lg_records_retry(t->records) != 0;
    lg_log_set_step((int64_t)a.step);
    switch (a.kind) {
    case LG_DO_INIT:
        LG_TRY(init(st, t, a.step));
        lg_bus_notify(st->bus);
        return LG_STEP_WORKED;
    case LG_DO_DECIDE:
        lg_commit_decide(st->board, a.step);
        return LG_STEP_WORKED;
    case LG_DO_FORWARD:
        return forward(st, t, a.step);
    case LG_DO_REDUCE:
        LG_TRY(publish_partial(st, t, a.step));
        return LG_STEP_WORKED;
    case LG_DO_UPDATE:
        LG_TRY(update(st, t, a.step));
        return LG_STEP_WORKED;
    case LG_DO_DONE:
        return LG_STEP_DONE;
    default:
        st->waiting_for = a.why;
        if (!strcmp(a.why, LG_WHY_STAGING) && !t->floor_start_ns) t->floor_start_ns = lg_now_ns();
        return LG_STEP_IDLE;
    }
}

static void trainer_close(lg_stage *st)
{
    struct trainer *t = st->state;
    lg_records_close(&t->records);
    lg_denoiser_close(&t->net);
    lg_batch_close(&t->batch);
    lg_exchange_close(&t->exchange);
    lg_stream_close(&t->stream);
    lg_trainer_state_close(&t->state);
    lg_window_close(&t->window);
    free(t->host_loss);
    free(t->host_squares);
    free(t);
    st->state = NULL;
}

const struct lg_stage_def lg_trainer_def = {
    .role = LG_ROLE_trainer,
    .bytes = lg_trainer_bytes,
    .open = trainer_open,
    .step = trainer_step,
    .close = trainer_close,
};
