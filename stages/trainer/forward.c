/* FORWARD: micro-batches, each with forward, loss and backward into the grad region. */
#include "base/clock.h"
#include "kernels/ops.h"
#include "stages/trainer/rank.h"

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

/* In a turn on the GPU. */
static void micro_step(lg_stage *st, struct trainer *t, uint64_t step, uint64_t first)
{
    const double scale = lg_rank_loss_scale(st, t, step);
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

int lg_rank_forward(lg_stage *st, struct trainer *t, uint64_t step)
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
