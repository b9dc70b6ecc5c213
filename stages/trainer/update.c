/* The end of a step, seen by one rank (shards.h says what it owns):
 *   REDUCE   own shard = sum of all ranks' gradients in rank order; sum of squares
 *   TOTAL    with several hosts: the sum of squares, of what all hosts have added up
 *   UPDATE   total norm, clip, AdamW chunk by chunk from side s & 1 into the other, from the moments' places
 *            into their next ones, and into the working weights of every rank of the group; rank 0 writes
 *            the record; commit
 *
 * A state in host memory (lg_state_device) is updated there: a chunk's gradient comes down and its weights go up piece
 * by piece (transfer.h). */
#include "base/clock.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "kernels/ops.h"
#include "stages/trainer/rank.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOID_CHECK_SAMPLES = 100 }; /* the share of voids is judged from this many samples on */

/* What UPDATE needs. */
static int reduce(lg_stage *st, struct trainer *t, uint64_t step, struct lg_exact_sum *ret_squares)
{
    LG_TRY(lg_hosts_are_several(st->board) ? lg_gradients_total(t->gradients, step, ret_squares)
                                           : lg_gradients_reduce(t->gradients, step, ret_squares));
    t->reduced_of = lg_mark_of(step);
    return 0;
}

int lg_rank_total(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct lg_exact_sum squares;
    LG_TRY(reduce(st, t, step, &squares));
    lg_trainer_mark_partial(st->board, st->index, step, &squares);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

int lg_rank_reduce(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct lg_exact_sum squares; /* those of one host of several say nothing */
    if (!lg_hosts_are_several(st->board)) return lg_rank_total(st, t, step);
    LG_TRY(lg_gradients_reduce(t->gradients, step, &squares));
    lg_trainer_mark_local(st->board, st->index, step);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

struct step_sums {
    struct lg_loss_sum loss;
    double norm;
    bool finite;
};

static struct step_sums sum_ranks(lg_stage *st, struct trainer *t, uint64_t step)
{
    struct step_sums s = {0};
    struct lg_exact_sum squares = {0};
    for (int r = 0; r < t->state->ranks; r++) {
        const struct lg_board_row *row = lg_board_row(st->board, LG_ROLE_trainer, r);
        const lg_role has_loss =
            lg_hosts_are_several(st->board) ? LG_ROLE_exchange : LG_ROLE_trainer;
        const struct lg_loss_sum *loss = lg_board_row(st->board, has_loss, r)->loss_sum;
        s.loss.all += loss[step & 1].all;
        s.loss.vb += loss[step & 1].vb;
        if (r < t->state->shards) lg_exact_sum_merge(&squares, &row->sum_squares[step & 1]);
    }
    s.norm = sqrt(lg_exact_sum_total(&squares)) / lg_rank_loss_scale(st, t, step);
    s.finite = isfinite(s.loss.all) && isfinite(s.norm);
    return s;
}

/* An update that is under way. */
struct update {
    uint64_t step;
    struct lg_state_view from, to;
    struct lg_stamp *moments;
    int chunks, done; /* of the shard; of these count already */
};

/* Finds out what a former life has done of it. Nothing is computed with memory that was lost meanwhile: neither the
 * state, nor the moments, nor, where chunks count, the side that they lie in. */
static int begin_update(lg_stage *st, struct trainer *t, uint64_t step, struct update *ret)
{
    const int me = st->index;
    const lg_region *moments = t->state->moments[me];
    struct update u = {.step = step,
                       .from = lg_trainer_state_view(t->state, me, step),
                       .to = lg_trainer_state_view(t->state, me, step + 1),
                       .moments = moments->front,
                       .chunks = lg_moments_chunks(t->shard)};
    LG_TRY(lg_stage_expect(st, t->state->side[me][step & 1], step));
    u.done = lg_stamp_is(u.moments, step + 1) ? u.chunks : lg_stamp_parts(u.moments, step);
    if (u.done < 0) return lg_stage_lost_stamp(st, u.moments, moments->name, step);
    LG_ASSERT(u.done <= u.chunks);
    if (u.done > 0 && !lg_stamp_is_begun(u.to.stamp, step + 1))
        return lg_stage_lost_stamp(st, u.to.stamp, t->state->side[me][(step + 1) & 1]->name,
                                   step + 1);
    if (u.done > 0) lg_log(LG_INFO, "goes on with the update at chunk %d of %d", u.done, u.chunks);
    lg_stamp_begin(u.to.stamp, step + 1);
    *ret = u;
    return 0;
}

/* Chunks [0, done) count from here on: what they wrote is there. */
static void count_chunks(const struct update *u, int done)
{
    if (done < u->chunks)
        lg_stamp_set_parts(u->moments, u->step, done);
    else
        lg_stamp_set(u->moments, u->step + 1);
}

/* Not where the host computes for a GPU. */
static void begin_turn(lg_stage *st, const struct trainer *t)
{
    if (t->state_device == t->device || lg_device_is_host(t->device)) lg_turn_begin(&st->turn);
}

/* Skipped: the weights are copied, the same on every rank, and the moments are the next state's as they are. */
static void keep_state(lg_stage *st, struct trainer *t, const struct update *u)
{
    begin_turn(st, t);
    lg_stream_copy(t->state_stream, u->to.w, u->from.w, t->shard * sizeof(float));
    lg_stream_sync(t->state_stream);
    lg_turn_end(&st->turn);
    lg_working_make(t->working, u->step + 1);
    count_chunks(u, u->chunks);
    u->to.scalars->skipped++;
}

static lg_tensor part_of(lg_tensor t, size_t first, size_t count)
{
    return lg_slice(t, 0, (int64_t)first, (int64_t)count);
}

/* What is updated together: elements [first, first + count) of the shard. */
struct stretch {
    size_t first, count;
    /* w, w_out: of the shard; grad, working: of the stretch; no moments; else of what is trained as the config says of
     * all. */
    struct lg_adamw_args a;
    struct lg_chunk from, to; /* moments */
    bool is_sent; /* working is one, which goes up from there; else: where lg_working_copies says */
};

/* Moments in fp32, or as codes. */
static void update_full(lg_stream *s, struct lg_adamw_args *a, const struct lg_chunk *from,
                        const struct lg_chunk *to)
{
    const int64_t n = (int64_t)from->full;
    a->m = lg_t1(from->m, LG_F32, n);
    a->v = lg_t1(from->v, LG_F32, n);
    a->m_out = lg_t1(to->m, LG_F32, n);
    a->v_out = lg_t1(to->v, LG_F32, n);
    lg_adamw(s, a);
}

static void update_coded(lg_stream *s, const struct lg_adamw_args *a, const struct lg_chunk *from,
                         const struct lg_chunk *to)
{
    const int64_t n = (int64_t)from->count, blocks = n / LG_ADAMW8_BLOCK;
    struct lg_adamw8_args p = {.w = a->w,
                               .m = lg_t1(from->m_code, LG_U8, n),
                               .v = lg_t1(from->v_code, LG_U8, n),
                               .m_max = lg_t1(from->m_max, LG_F32, blocks),
                               .v_max = lg_t1(from->v_max, LG_F32, blocks),
                               .grad = a->grad,
                               .w_out = a->w_out,
                               .m_out = lg_t1(to->m_code, LG_U8, n),
                               .v_out = lg_t1(to->v_code, LG_U8, n),
                               .m_max_out = lg_t1(to->m_max, LG_F32, blocks),
                               .v_max_out = lg_t1(to->v_max, LG_F32, blocks),
                               .copies = a->copies,
                               .lr = a->lr,
                               .beta1 = a->beta1,
                               .beta2 = a->beta2,
                               .eps = a->eps,
                               .weight_decay = a->weight_decay,
                               .grad_scale = a->grad_scale,
                               .t = a->t};
    memcpy(p.working, a->working, sizeof p.working);
    lg_adamw8(s, &p);
}

/* What of a unit lies in the stretch. */
static void update_piece(lg_stage *st, struct trainer *t, const struct stretch *s, int unit)
{
    const lg_params *params = &t->state->params;
    const struct lg_piece own = lg_trainer_piece(t->state, st->index, unit);
    const struct lg_piece here = lg_piece_within(own, s->first, s->count);
    const size_t end = here.first + here.count;
    const lg_moments_layout *layout = &t->state->layout[st->index];
    for (size_t at = here.first, next; at < end; at = next) {
        int group;
        bool coded;
        next = lg_params_group_end(params, at, end, &group);
        next = lg_params_coded_end(params, at, next, &coded);
        const struct lg_param_group *g = &params->group[group];
        const size_t in_piece = at - own.first, in_shard = own.at + in_piece, count = next - at;
        struct lg_adamw_args p = s->a;
        lg_tensor *shards[] = {&p.w, &p.w_out};
        for (size_t i = 0; i < LG_ARRAY_LEN(shards); i++)
            *shards[i] = part_of(*shards[i], in_shard, count);
        const struct lg_chunk from = lg_moments_part(layout, &s->from, in_shard, count);
        const struct lg_chunk to = lg_moments_part(layout, &s->to, in_shard, count);
        p.grad = part_of(p.grad, in_shard - s->first, count);
        if (!s->is_sent) p.copies = lg_working_copies(t->working, unit, p.working);
        for (int i = 0; i < p.copies; i++)
            p.working[i] =
                part_of(p.working[i], s->is_sent ? in_shard - s->first : in_piece, count);
        p.lr *= g->lr;
        p.weight_decay *= g->decay;
        if (coded)
            update_coded(t->state_stream, &p, &from, &to);
        else
            update_full(t->state_stream, &p, &from, &to);
    }
}

static void update_stretch(lg_stage *st, struct trainer *t, const struct stretch *s)
{
    for (int unit = 0; unit < t->state->params.n_units; unit++) update_piece(st, t, s, unit);
}

/* The next piece comes down while this one is updated, the one before goes up. a.grad: of the chunk. */
static void update_from_host(lg_stage *st, struct trainer *t, const struct stretch *chunk)
{
    lg_transfer *transfer = lg_working_transfer(t->working);
    const float *gradient = chunk->a.grad.data;
    const size_t end = chunk->count, most = lg_transfer_piece(transfer);
    lg_transfer_call(transfer, gradient, LG_MIN(most, end));
    for (size_t at = 0, n, next; at < end; at = next) {
        n = LG_MIN(most, end - at);
        next = at + n;
        struct stretch s = *chunk;
        s.first += at;
        s.count = n;
        s.is_sent = true;
        s.a.grad = lg_t1((void *)lg_transfer_take(transfer), LG_F32, (int64_t)n);
        if (next < end) lg_transfer_call(transfer, gradient + next, LG_MIN(most, end - next));
        s.a.working[0] = lg_t1(lg_transfer_load(transfer), LG_F32, (int64_t)n);
        s.a.copies = 1;
        update_stretch(st, t, &s);
        lg_stream_sync(t->state_stream);
        lg_working_send(t->working, s.first, n);
        lg_heartbeat();
    }
}

/* From its place into the one that the chunk before has left. */
static void update_chunk(lg_stage *st, struct trainer *t, struct lg_adamw_args a, int k)
{
    const uint64_t steps = (uint64_t)a.t;
    struct stretch s = {.from = lg_trainer_chunk(t->state, st->index, k, steps - 1),
                        .to = lg_trainer_chunk(t->state, st->index, k, steps)};
    s.first = s.from.first;
    s.count = s.from.count;
    a.grad = part_of(a.grad, s.first, s.count);
    s.a = a;
    if (lg_working_transfer(t->working))
        update_from_host(st, t, &s);
    else
        update_stretch(st, t, &s);
    lg_stream_sync(t->stream);
}

/* The new state, and with it this shard of the working weights of every rank of the group. */
static void adamw(lg_stage *st, struct trainer *t, const struct update *u, double norm, double lr)
{
    const lg_config *c = st->config;
    const int64_t n = (int64_t)t->shard;
    struct lg_adamw_args a = {.w = lg_t1(u->from.w, LG_F32, n),
                              .grad = lg_t1(lg_gradients_sum(t->gradients), LG_F32, n),
                              .w_out = lg_t1(u->to.w, LG_F32, n),
                              .lr = lr,
                              .beta1 = c->trainer_beta1,
                              .beta2 = c->trainer_beta2,
                              .eps = c->trainer_adam_eps,
                              .weight_decay = c->trainer_weight_decay,
                              .grad_scale = 1,
                              .t = (int64_t)++u->to.scalars->optimizer_steps};
    if (c->trainer_clip_norm > 0) a.grad_scale = LG_MIN(1.0, c->trainer_clip_norm / (norm + 1e-6));
    a.grad_scale /= lg_rank_loss_scale(st, t, u->step);
    if (!u->done) lg_working_begin_copies(t->working, u->step + 1);
    begin_turn(st, t);
    for (int k = u->done; k < u->chunks; k++) {
        update_chunk(st, t, a, k);
        count_chunks(u, k + 1);
    }
    lg_turn_end(&st->turn);
    if (!u->chunks) count_chunks(u, 0);
    lg_working_mark_copies(t->working, u->step + 1);
}

void lg_rank_sign(const struct trainer *t, const struct lg_state_view *to)
{
    const char *of = lg_device_fingerprint(t->device);
    if (t->state_device == t->device || lg_device_is_host(t->device)) /* the same twice */
        snprintf(to->device, LG_STATE_DEVICE_BYTES, "%s", of);
    else
        snprintf(to->device, LG_STATE_DEVICE_BYTES, "%s; updates: %s", of,
                 lg_device_fingerprint(t->state_device));
}

static int make_state(lg_stage *st, struct trainer *t, uint64_t step, const struct step_sums *sums,
                      double lr)
{
    struct update u;
    LG_TRY(begin_update(st, t, step, &u));
    const struct lg_state_scalars *from = u.from.scalars;
    struct lg_state_scalars *to = u.to.scalars;
    *to = *from;
    to->state = step + 1;
    lg_rank_sign(t, &u.to);
    to->loss_scale = lg_loss_scale_next(st->config, from->loss_scale, sums->finite);
    /* A factor that can be halved explains a gradient that is not finite, a loss nothing does. */
    bool is_explained = isfinite(sums->loss.all) && from->loss_scale.scale > 1;
    if (sums->finite)
        to->skipped_in_row = 0;
    else
        to->skipped_in_row += !is_explained;
    if (sums->finite)
        adamw(st, t, &u, sums->norm, lr);
    else
        keep_state(st, t, &u);
    return 0;
}

/* The slots are still ours, the words of the other hosts too. */
static struct lg_ledger_record ledger_record(lg_stage *st, struct trainer *t, uint64_t step,
                                             const struct step_sums *sums)
{
    const uint64_t batch = (uint64_t)st->plan.batch, first = step * batch;
    struct lg_host_sums samples;
    LG_ASSERT(lg_samples_of_step(st->board, t->window, step, &samples));
    return (struct lg_ledger_record){.step = step + 1,
                                     .first = first,
                                     .last = first + batch - 1,
                                     .keys_hash = samples.keys_hash,
                                     .voids = (uint32_t)samples.voids,
                                     .skipped = !sums->finite,
                                     .loss = sums->loss.all,
                                     .lineage = st->board->s->lineage};
}

static void write_record(lg_stage *st, struct trainer *t, const struct lg_step_record *r)
{
    struct lg_board_metrics *m = &st->board->s->metrics;
    atomic_store_explicit(&m->step, r->ledger.step, memory_order_relaxed);
    atomic_store_explicit(&m->loss, r->loss, memory_order_relaxed);
    atomic_store_explicit(&m->loss_vb, r->loss_vb, memory_order_relaxed);
    atomic_store_explicit(&m->has_vb, r->has_vb, memory_order_relaxed);
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

/* Rule: every rank, also of a host that came later, knows the share of voids from the same numbers and parks at the
 * same step. */
static int check_health(lg_stage *st, const struct lg_state_scalars *s)
{
    const lg_config *c = st->config;
    uint64_t samples = (s->state - s->counted_from) * (uint64_t)st->plan.batch;
    /* A run that ends is judged however short it is. */
    bool is_last = s->state == st->board->s->max_steps;
    if (is_last && s->voids == samples)
        return lg_stage_park(st,
                             "none of the %" PRIu64 " samples of this run can be read: see "
                             "logs/loader.0.log",
                             samples);
    if (is_last && s->skipped_in_row == s->state)
        return lg_stage_park(st,
                             "no step of all %" PRIu64 " had a loss and gradient that are finite: "
                             "look at the weights and the data, or lower trainer.lr",
                             s->state);
    if ((int64_t)s->skipped_in_row >= c->trainer_nonfinite_max)
        return lg_stage_park(st,
                             "%" PRIu64 " steps in a row had a loss or gradient that is not finite "
                             "(up to step %" PRIu64 "): lower trainer.lr, or look at the data",
                             s->skipped_in_row, s->state);
    if (samples >= VOID_CHECK_SAMPLES &&
        (double)s->voids > c->data_void_ratio_max * (double)samples)
        return lg_stage_park(st,
                             "%" PRIu64 " of %" PRIu64 " samples are unreadable, more than "
                             "data.void_ratio_max = %g: see logs/loader.0.log",
                             s->voids, samples, c->data_void_ratio_max);
    return 0;
}

static bool learns_variance(const lg_config *c)
{
    return c->model_learned_variance && !strcmp(c->trainer_variance_loss, "vb");
}

int lg_rank_update(lg_stage *st, struct trainer *t, uint64_t step)
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
                                    .loss = sums.loss.all,
                                    .loss_vb = sums.loss.vb,
                                    .has_vb = learns_variance(st->config),
                                    .grad_norm = sums.norm,
                                    .lr = lr,
                                    .loss_scale = lg_rank_loss_scale(st, t, step),
                                    .data_wait_s = (double)t->wait_ns / LG_S_NS,
                                    .ckpt_wait_s = (double)t->floor_ns / LG_S_NS};
    to.scalars->voids += record.ledger.voids;
    int64_t now = lg_now_ns();
    if (t->last_commit_ns)
        record.samples_per_s = (double)st->plan.batch * LG_S_NS / (double)(now - t->last_commit_ns);
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
        lg_log(LG_WARN, "step skipped: loss %g, gradient norm %g, factor on the loss %g",
               sums.loss.all, sums.norm, record.loss_scale);
    LG_TRY(check_health(st, to.scalars));
    lg_stamp_set(to.stamp, step + 1);
    lg_trainer_mark_commit(st->board, st->index, step);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}
