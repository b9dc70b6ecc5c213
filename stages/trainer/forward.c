/* FORWARD: micro-batches, each with forward, loss and backward, event by event of the net (nets/denoiser.h). */
#include "base/clock.h"
#include "kernels/ops.h"
#include "stages/trainer/rank.h"

static int no_data_yet(struct trainer *t)
{
    if (!t->wait_start_ns) t->wait_start_ns = lg_now_ns();
    return LG_STEP_IDLE;
}

/* The divisor of the loss is fixed before the backward: every rank waits until the source of the
 * whole global batch is known, and counts the same voids and absent ones. */
static bool count_valid(lg_stage *st, struct trainer *t, uint64_t step)
{
    if (!lg_samples_of_step(st->board, t->window, step, &t->samples)) return false;
    t->divisor = (double)LG_MAX(t->samples.valid, (uint64_t)1);
    return true;
}

/* Outputs lie in the memory of the largest micro-batch. */
static void use_net(struct trainer *t, int kind)
{
    const struct lg_denoiser_config *c = &t->nets.config[kind];
    const struct lg_batch_options *batch = &t->nets.batch[kind];
    t->net = t->nets.net[kind];
    const int64_t B = batch->size;
    t->pred = lg_t4(t->pred.data, t->type, B, lg_denoiser_out_channels(c), lg_rank_height(batch),
                    c->width);
    t->loss =
        c->learned_variance ? lg_t2(t->loss.data, LG_F32, B, 2) : lg_t1(t->loss.data, LG_F32, B);
}

/* The inputs of a micro-batch, whose first sample is n. */
static int begin_micro(lg_stage *st, struct trainer *t, uint64_t step, uint64_t n)
{
    const int kind = st->plan.buckets.n ? (int)lg_window_slot(t->window, n)->bucket : 0;
    use_net(t, kind);
    LG_TRY(lg_working_begin(t->working, step));
    lg_gradients_begin_micro(t->gradients, t->micro_done);
    t->micro = step * (uint64_t)(st->plan.rank_batch / st->plan.micro_batch) + t->micro_done;
    lg_batch_load(t->batch, t->stream, t->window,
                  &(struct lg_batch_spec){.kind = kind,
                                          .first = n,
                                          .of_run = lg_stage_sample(st, n),
                                          .divisor = t->divisor / lg_rank_loss_scale(st, t, step),
                                          .seed = (uint64_t)st->config->job_seed,
                                          .scaling_factor = st->plan.scaling_factor,
                                          .shift_factor = st->plan.shift_factor,
                                          .objective = &t->objective});
    lg_denoiser_begin_forward(t->net, &lg_batch_tensors(t->batch)->in, t->pred);
    t->event = 0;
    t->is_backward = false;
    return 0;
}

static void begin_backward(struct trainer *t)
{
    const struct lg_batch_tensors *b = lg_batch_tensors(t->batch);
    lg_batch_loss(t->batch, t->stream, t->pred, t->loss);
    lg_stream_download(t->stream, t->host_loss, t->loss.data, lg_tensor_bytes(&t->loss));
    lg_denoiser_begin_backward(t->net, &b->in, t->pred, lg_gradients_accumulate(t->gradients));
}

/* False: there is no room for its gradient, or others have not sent their part. */
static bool go_on(struct trainer *t, const struct lg_denoiser_event *e)
{
    float *gradient;
    switch (e->kind) {
    case LG_EVENT_RUN:
        lg_denoiser_run(t->net, t->stream, e);
        return true;
    case LG_EVENT_WEIGHTS:
        lg_denoiser_set_weights(t->net, e->unit,
                                e->unit < t->state->all.trained_units
                                    ? lg_working_unit(t->working, e->unit)
                                    : lg_frozen_unit(t->state, t->device, t->frozen, e->unit));
        return true;
    case LG_EVENT_GRADIENT:
        if (!lg_gradients_place(t->gradients, e->unit, &gradient)) return false;
        lg_denoiser_set_gradient(t->net, e->unit, gradient);
        return true;
    case LG_EVENT_GRADIENT_DONE:
        lg_gradients_done(t->gradients, e->unit);
        return true;
    case LG_EVENT_EXCHANGE:
        return lg_exchanges_go(t->exchanges, t->net, t->micro, e->exchange);
    case LG_EVENT_WEIGHTS_DONE:
        return true;
    }
    return true;
}

static void end_micro(lg_stage *st, struct trainer *t, uint64_t step)
{
    const float *weight = lg_batch_weights(t->batch);
    const double scale = lg_rank_loss_scale(st, t, step);
    lg_stream_sync(t->stream);
    for (int64_t i = 0; i < lg_numel(&t->loss); i++) {
        const double part = (double)weight[i] * (double)t->host_loss[i] / scale;
        t->loss_sum.all += part;
        if (t->loss.rank == 2 && i % 2) t->loss_sum.vb += part; /* (B, 2) */
    }
    lg_gradients_end_micro(t->gradients, t->loss_sum);
    lg_exchanges_end_micro(t->exchanges, t->micro);
    t->event = LG_NO_EVENT;
    t->micro_done++;
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)st->plan.micro_batch,
                              memory_order_relaxed);
}

/* In a turn on the GPU. What others have given is added by the way: they may be waiting for it. Whoever must wait
 * himself gives up the turn, and begins again at the same event. */
static int run_micro(lg_stage *st, struct trainer *t, uint64_t step)
{
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(t->net, &n, &n_forward);
    while (t->event < n) {
        if (t->event == n_forward && !t->is_backward) begin_backward(t);
        t->is_backward = t->event >= n_forward;
        bool went = go_on(t, &e[t->event]);
        t->event += went;
        if (!went) lg_gradients_flush(t->gradients);
        int added = lg_gradients_add(t->gradients);
        LG_TRY(added);
        if (went || added) continue;
        st->waiting_for = e[t->event].kind == LG_EVENT_EXCHANGE ? "ranks of its sequence group"
                                                                : "room for gradients";
        return LG_STEP_IDLE;
    }
    end_micro(st, t, step);
    return LG_STEP_WORKED;
}

static int begin_step(lg_stage *st, struct trainer *t, uint64_t step)
{
    LG_TRY(lg_trainer_state_expect(st, t->state, step));
    LG_TRY(lg_gradients_begin(t->gradients, step, t->begin_with, &t->micro_done, &t->loss_sum));
    t->begin_with = UINT64_MAX;
    t->forward_of = lg_mark_of(step);
    return 0;
}

static int end_step(lg_stage *st, struct trainer *t, uint64_t step)
{
    lg_trainer_mark_grads(st->board, st->index, step, t->loss_sum);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static int wait_for(lg_stage *st, const char *why)
{
    st->waiting_for = why;
    return LG_STEP_IDLE;
}

static uint64_t micros_of(const lg_stage *st)
{
    return (uint64_t)(st->plan.rank_batch / st->plan.micro_batch);
}

/* A process has come to the sequence group: what is under way is given up, since nobody will answer. */
static void join_again(lg_stage *st, struct trainer *t, uint64_t step)
{
    lg_stream_sync(t->stream);
    lg_gradients_flush(t->gradients);
    t->event = LG_NO_EVENT;
    t->forward_of = LG_MARK_NONE;
    lg_exchanges_join(t->exchanges,
                      step * micros_of(st) + lg_gradients_next_micro(t->gradients, step));
}

/* Where its sequence group stands: LG_STEP_WORKED when this rank can go on with the step. */
static int agree(lg_stage *st, struct trainer *t, uint64_t step)
{
    const uint64_t first = step * micros_of(st);
    uint64_t micro;
    if (lg_exchanges_is_late(t->exchanges)) join_again(st, t, step);
    if (lg_exchanges_begin(t->exchanges, first, &micro)) {
        t->begin_with = micro - first;
        t->forward_of = LG_MARK_NONE;
    }
    return lg_exchanges_has_begun(t->exchanges) ? LG_STEP_WORKED
                                                : wait_for(st, "ranks of its sequence group");
}

/* The own gradient is whole. */
static int made(lg_stage *st, struct trainer *t, uint64_t step)
{
    lg_gradients_end(t->gradients);
    lg_exchanges_mark_made(t->exchanges, step);
    if (lg_exchanges_is_made(t->exchanges, step)) return end_step(st, t, step);
    return wait_for(st, "ranks of its sequence group");
}

static int run_or_wait(lg_stage *st, struct trainer *t, uint64_t step, bool added)
{
    const uint64_t share = (uint64_t)st->plan.rank_batch, micro = (uint64_t)st->plan.micro_batch;
    const uint64_t n = step * st->board->s->batch +
                       (uint64_t)(st->index / st->plan.sequence) * share + t->micro_done * micro;
    if (t->event == LG_NO_EVENT && !lg_window_range_ready(t->window, t->needs, n, micro))
        return added ? LG_STEP_WORKED : no_data_yet(t);
    if (t->wait_start_ns) {
        t->wait_ns += lg_now_ns() - t->wait_start_ns;
        t->wait_start_ns = 0;
    }
    lg_turn_begin(&st->turn);
    int rc = t->event == LG_NO_EVENT ? begin_micro(st, t, step, n) : 0;
    if (rc == 0) rc = run_micro(st, t, step);
    if (rc == LG_STEP_IDLE) lg_stream_sync(t->stream);
    lg_turn_end(&st->turn);
    return rc;
}

int lg_rank_forward(lg_stage *st, struct trainer *t, uint64_t step)
{
    int added = lg_gradients_add(t->gradients);
    LG_TRY(added);
    if (st->plan.sequence > 1 && lg_exchanges_is_made(t->exchanges, step)) {
        LG_TRY(lg_gradients_expect(t->gradients, step, &t->loss_sum));
        return end_step(st, t, step);
    }
    int rc = agree(st, t, step);
    if (rc != LG_STEP_WORKED) return added ? LG_STEP_WORKED : rc;
    if (t->forward_of != lg_mark_of(step)) {
        if (!count_valid(st, t, step)) return no_data_yet(t);
        LG_TRY(begin_step(st, t, step));
    }
    if (t->micro_done < micros_of(st)) {
        rc = run_or_wait(st, t, step, added);
        LG_TRY(rc);
        if (rc != LG_STEP_WORKED || t->micro_done < micros_of(st)) return rc;
    }
    return made(st, t, step);
}
