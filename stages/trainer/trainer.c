/* A trainer rank: one data-parallel share of the step.
 *
 * What to do next is asked of shm/commit.h at every turn; forward.c and update.c do the work and store the
 * marks. Private memory (activations, the reduced shard) can be lost at any time: it is rebuilt from
 * regions. Persistent: state sides, gradients, working weights, marks on the board. */
#include "base/clock.h"
#include "base/log.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/nets/adapter_file.h"
#include "stages/roles.h"
#include "stages/trainer/rank.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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
    LG_TRY(lg_objective_of(c, &t->objective));
    t->schedule = (struct lg_schedule){
        .kind = !strcmp(c->trainer_lr_schedule, "cosine")   ? LG_SCHEDULE_COSINE
                : !strcmp(c->trainer_lr_schedule, "linear") ? LG_SCHEDULE_LINEAR
                                                            : LG_SCHEDULE_CONSTANT,
        .peak = c->trainer_lr,
        .warmup_steps = c->trainer_warmup_steps,
        .steps = st->plan.lr_steps,
        .final_ratio = c->trainer_lr_final};
    t->needs = 1u << LG_FIELD_SOURCE | 1u << LG_FIELD_LATENT;
    for (int k = 0; k < st->plan.n_texts; k++) t->needs |= 1u << lg_field_text(k);
    return 0;
}

static int open_memory(lg_stage *st, struct trainer *t)
{
    const int ranks = st->plan.instances[LG_ROLE_trainer];
    lg_device *maps[LG_INSTANCES_MAX];
    /* Peers' regions too, where they can be read. */
    const bool own = st->plan.apart && !lg_device_is_host(t->state_device);
    for (int r = 0; r < ranks; r++) maps[r] = own && r != st->index ? NULL : t->state_device;
    LG_TRY(lg_stage_window(st, t->device, &t->window));
    LG_TRY(lg_trainer_state_open(st, maps, &t->state));
    LG_TRY(lg_trainer_moments_open(st, t->state_device, t->state, st->index));
    const struct lg_denoiser_config *net = &t->state->net;
    t->shard = lg_trainer_shard(t->state, st->index);
    LG_TRY(lg_rank_nets_compile(t->device, st->config, &st->plan, st->index, net, &t->nets));
    LG_TRY(lg_denoiser_open_all(t->nets.net, t->nets.n));
    t->net = t->nets.net[0];
    LG_TRY(lg_batch_open(t->device, t->nets.batch, t->nets.n, &t->batch));
    LG_TRY(lg_working_open(st, t->device, t->stream, t->state, t->net, &t->working));
    LG_TRY(lg_frozen_open(st, t->device, t->state, &t->frozen));
    LG_TRY(lg_gradients_open(st, t->device, t->stream, t->state, t->net, &t->gradients));
    if (lg_gradients_lends(&st->plan)) {
        void *lent = lg_gradients_lent(t->gradients);
        for (int k = 0; k < t->nets.n; k++) lg_denoiser_set_lent(t->nets.net[k], lent);
    }
    LG_TRY(lg_exchanges_open(st, t->device, t->stream, t->nets.net, t->nets.n, &t->exchanges));
    const size_t losses = (size_t)(st->plan.micro_batch * (net->learned_variance ? 2 : 1));
    LG_TRY(alloc(t->device, lg_rank_prediction(&t->nets) * lg_dtype_bytes(t->type), &t->pred.data));
    LG_TRY(alloc(t->device, losses * sizeof(float), &t->loss.data));
    t->host_loss = calloc(losses, sizeof(float));
    LG_ASSERT(t->host_loss);
    return 0;
}

static int trainer_open(lg_stage *st)
{
    struct trainer *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    t->event = LG_NO_EVENT;
    t->begin_with = UINT64_MAX;
    st->state = t;
    LG_TRY(open_rules(st, t));
    LG_TRY(lg_stage_device(st, LG_ROLE_trainer, st->index, &t->device));
    t->type = lg_device_dtype(t->device);
    LG_TRY(lg_stream_open(t->device, &t->stream));
    LG_TRY(lg_state_device(st, st->index, &t->state_device));
    if (t->state_device == t->device)
        t->state_stream = t->stream;
    else
        LG_TRY(lg_stream_open(t->state_device, &t->state_stream));
    LG_TRY(open_memory(st, t));
    if (st->index == 0) {
        lg_mark commit = atomic_load_explicit(&st->row->commit, memory_order_acquire);
        uint64_t state = commit ? lg_mark_state(commit) : st->board->s->start_step;
        LG_TRY(lg_records_open(st->run_dir, state, &t->records));
    }
    return 0;
}

/* ---- INIT ---- */

/* A first state on the host. */
struct first_state {
    float *w; // (shard)
    struct lg_chunk
        moments; /* of a checkpoint, of the whole shard; else count 0: all are zeros, made where they lie */
    struct lg_state_scalars scalars;
};

static int read_checkpoint(lg_stage *st, struct trainer *t, const char *dir, struct first_state *s)
{
    for (int u = 0; u < t->state->params.n_units; u++) {
        struct lg_piece p = lg_trainer_piece(t->state, st->index, u);
        if (!p.count) continue;
        const struct lg_chunk moments =
            lg_moments_part(&t->state->layout[st->index], &s->moments, p.at, p.count);
        LG_TRY(lg_checkpoint_read_optimizer(dir, &t->state->params, p.first, p.count, s->w + p.at,
                                            NULL, NULL));
        LG_TRY(lg_checkpoint_read_moments(dir, &t->state->params, p.first, p.count, &moments));
    }
    lg_manifest *m = calloc(1, sizeof *m);
    LG_ASSERT(m);
    int rc = lg_manifest_load(dir, m);
    s->scalars.optimizer_steps = m->optimizer_steps;
    s->scalars.skipped = m->skipped;
    if (m->loss_scale)
        s->scalars.loss_scale = (struct lg_loss_scale){m->loss_scale, m->loss_scale_steps};
    free(m);
    return rc;
}

static void draw_first(lg_stage *st, struct trainer *t, struct first_state *s)
{
    for (int u = 0; u < t->state->params.n_units; u++) {
        struct lg_piece p = lg_trainer_piece(t->state, st->index, u);
        lg_params_init(&t->state->params, (uint64_t)st->config->job_seed, s->w + p.at, p.first,
                       p.count);
    }
}

static int read_weights(lg_stage *st, struct trainer *t, const char *dir, struct first_state *s)
{
    char weights_dir[LG_PATH_BYTES];
    LG_TRY(lg_checkpoint_weights_dir(dir, "ema", weights_dir));
    for (int u = 0; u < t->state->params.n_units; u++) {
        struct lg_piece p = lg_trainer_piece(t->state, st->index, u);
        LG_TRY(lg_denoiser_load_range(&t->state->net, &t->state->all, weights_dir, s->w + p.at,
                                      p.first, p.count));
    }
    return 0;
}

/* What an adapter begins with. */
static int read_adapter(lg_stage *st, struct trainer *t, struct first_state *s)
{
    const lg_params *params = &t->state->params;
    float *all;
    int rc = lg_net_adapter_of(st->config, &t->state->net, params, &all);
    for (int u = 0; rc == 0 && u < params->n_units; u++) {
        struct lg_piece p = lg_trainer_piece(t->state, st->index, u);
        memcpy(s->w + p.at, all + p.first, p.count * sizeof *all);
    }
    free(all);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int read_origin(lg_stage *st, struct trainer *t, lg_origin origin, const char *dir,
                       struct first_state *s)
{
    if (origin == LG_ORIGIN_RESUME)
        return lg_stage_park_if_lasting(st, read_checkpoint(st, t, dir, s),
                                        "the checkpoint cannot be read");
    if (origin == LG_ORIGIN_INIT && !t->state->training.adapter.rank)
        return lg_stage_park_if_lasting(st, read_weights(st, t, dir, s),
                                        st->config->trainer_init_from[0] ? "trainer.init_from"
                                                                         : "model.from");
    if (st->config->adapter_from[0])
        return lg_stage_park_if_lasting(st, read_adapter(st, t, s), "adapter.from");
    draw_first(st, t, s);
    return 0;
}

static void upload_moments(struct trainer *t, const struct lg_chunk *to,
                           const struct lg_chunk *from)
{
    const size_t full = to->full * sizeof(float);
    const size_t blocks = to->count / LG_ADAMW8_BLOCK * sizeof(float);
    lg_stream_upload(t->state_stream, to->m, from->m, full);
    lg_stream_upload(t->state_stream, to->v, from->v, full);
    if (!to->m_code) return;
    lg_stream_upload(t->state_stream, to->m_max, from->m_max, blocks);
    lg_stream_upload(t->state_stream, to->v_max, from->v_max, blocks);
    lg_stream_upload(t->state_stream, to->m_code, from->m_code, to->count);
    lg_stream_upload(t->state_stream, to->v_code, from->v_code, to->count);
}

/* codes: of zeros, for m and behind them for v, as many as a chunk has each. */
static void zero_moments(struct trainer *t, const struct lg_chunk *to, const uint8_t *codes,
                         size_t most)
{
    const size_t full = to->full * sizeof(float);
    const size_t blocks = to->count / LG_ADAMW8_BLOCK * sizeof(float);
    lg_stream_zero(t->state_stream, to->m, full);
    lg_stream_zero(t->state_stream, to->v, full);
    if (!to->m_code) return;
    lg_stream_zero(t->state_stream, to->m_max, blocks);
    lg_stream_zero(t->state_stream, to->v_max, blocks);
    lg_stream_upload(t->state_stream, to->m_code, codes, to->count);
    lg_stream_upload(t->state_stream, to->v_code, codes + most, to->count);
}

static void upload_state(lg_stage *st, struct trainer *t, const struct first_state *s,
                         const struct lg_state_view *to)
{
    const lg_moments_layout *layout = &t->state->layout[st->index];
    const size_t most = layout->in_blocks ? lg_moments_chunk_count(t->shard) : 0;
    uint8_t *codes = malloc(2 * most + 1);
    LG_ASSERT(codes);
    memset(codes, LG_ADAMW8_ZERO_M, most);
    memset(codes + most, LG_ADAMW8_ZERO_V, most);
    lg_stream_upload(t->state_stream, to->w, s->w, t->shard * sizeof(float));
    for (int k = 0; k < lg_moments_chunks(t->shard); k++) {
        struct lg_chunk c = lg_trainer_chunk(t->state, st->index, k, s->scalars.optimizer_steps);
        if (s->moments.count) {
            const struct lg_chunk from = lg_moments_part(layout, &s->moments, c.first, c.count);
            upload_moments(t, &c, &from);
        } else {
            zero_moments(t, &c, codes, most);
        }
    }
    lg_stream_sync(t->state_stream);
    free(codes);
    *to->scalars = s->scalars;
    lg_rank_sign(t, to);
}

/* State start_step lies here already: it is another host's. */
static int begin_fetched(lg_stage *st, struct trainer *t, uint64_t state)
{
    LG_TRY(lg_stage_expect(st, t->state->side[st->index][state & 1], state));
    LG_TRY(lg_stage_expect(st, t->state->moments[st->index], state));
    lg_working_make(t->working, state);
    lg_trainer_mark_init(st->board, st->index);
    lg_log(LG_INFO, "state %" PRIu64 " from the leading host", state);
    return 0;
}

/* Makes state start_step of this rank's shard. Cut off halfway it is simply made again. */
static int init(lg_stage *st, struct trainer *t, uint64_t state)
{
    if (lg_hosts_fetched(st->board, st->index)) return begin_fetched(st, t, state);
    lg_origin origin;
    char dir[LG_PATH_BYTES];
    struct lg_state_view v = lg_trainer_state_view(t->state, st->index, state);
    struct lg_stamp *stamp = t->state->moments[st->index]->front;
    LG_TRY(lg_run_origin(st, &origin, dir));
    lg_stamp_clear(v.stamp);
    lg_stamp_clear(stamp);
    const lg_moments_layout *layout = &t->state->layout[st->index];
    const size_t moments_bytes = origin == LG_ORIGIN_RESUME ? lg_moments_whole_bytes(layout) : 0;
    float *side = calloc(1, t->shard * sizeof *side + moments_bytes + 1);
    LG_ASSERT(side);
    struct first_state first = {.w = side,
                                .scalars = {.state = state,
                                            .counted_from = state,
                                            .loss_scale = lg_loss_scale_first(st->config)}};
    if (moments_bytes) {
        first.moments = lg_moments_whole(layout, side + t->shard);
        lg_moments_clear(&first.moments);
    }
    int rc = read_origin(st, t, origin, dir, &first);
    if (rc == 0) upload_state(st, t, &first, &v);
    free(side);
    LG_TRY(rc);
    lg_working_make(t->working, state);
    lg_stamp_set(stamp, state);
    lg_stamp_set(v.stamp, state);
    lg_trainer_mark_init(st->board, st->index);
    lg_log(LG_INFO, "state %" PRIu64 " from %s", state, dir[0] ? dir : "the seed");
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
        return lg_rank_forward(st, t, a.step);
    case LG_DO_ADD:
        LG_TRY(lg_gradients_add(t->gradients));
        return LG_STEP_WORKED;
    case LG_DO_REDUCE:
        return lg_rank_reduce(st, t, a.step);
    case LG_DO_TOTAL:
        return lg_rank_total(st, t, a.step);
    case LG_DO_UPDATE:
        return lg_rank_update(st, t, a.step);
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
    lg_rank_nets_close(&t->nets);
    lg_batch_close(&t->batch);
    lg_exchanges_close(&t->exchanges);
    lg_gradients_close(&t->gradients);
    lg_working_close(&t->working);
    if (t->state_stream != t->stream) lg_stream_close(&t->state_stream);
    lg_stream_close(&t->stream);
    lg_trainer_state_close(&t->state);
    lg_window_close(&t->window);
    free(t->host_loss);
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
