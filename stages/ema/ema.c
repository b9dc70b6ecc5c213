/* The EMA keeper: follows the trainer's committed weights, one state behind at most, off the
 * critical path. It maps the trainer's sides read-only in effect and owns ema/<r>/state/<a|b>, one for each shard.
 *
 * EMA state e lies in side e & 1 and is made from EMA state e - 1 and the weights of state e:
 *     ema <- d ema + (1 - d) w,  d = min(decay, (1 + s) / (10 + s)), s = e - 1 the step that made
 * e. Dying in the middle of it: done again from the same two inputs, giving the same bytes. */
#include "base/log.h"
#include "kernels/ops.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/ema/host_average.h"
#include "stages/nets/adapter_file.h"
#include "stages/roles.h"
#include "stages/trainer/state.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ema {
    lg_device *device[LG_INSTANCES_MAX]; /* of rank r's state; equal ones where ranks share it */
    lg_stream *stream[LG_INSTANCES_MAX];
    lg_trainer_state *trainer;
    lg_region *side[LG_INSTANCES_MAX][2];
    lg_host_average *host[LG_INSTANCES_MAX]; /* NULL: a side lies where the state does */
};

static int ema_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                     struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_denoiser_config net;
    lg_params all;
    int n = 0;
    LG_TRY(lg_net_table_of(c, p, &net, &all));
    const lg_params params = lg_params_trained(&all);
    for (int r = 0; r < p->shards; r++)
        for (int side = 0; side < 2 && n < cap; side++) {
            size_t count = lg_shard_count(&params, r, p->shards);
            snprintf(rows[n].name, sizeof rows[n].name, "ema/%d/state/%c", r, "ab"[side]);
            if (lg_ema_is_apart(c))
                snprintf(rows[n].device, sizeof rows[n].device, "host");
            else
                lg_state_device_name(c, r, rows[n].device);
            rows[n++].bytes = LG_MAX(count, (size_t)1) * sizeof(float);
        }
    for (int r = 0; r < p->shards && n < cap && lg_ema_is_apart(c); r++) {
        snprintf(rows[n].name, sizeof rows[n].name, "private");
        lg_state_device_name(c, r, rows[n].device);
        rows[n++].bytes = lg_host_average_bytes();
    }
    lg_params_free(&all);
    LG_TRY(lg_state_processes(c, p->shards, rows, cap, &n));
    *ret_n = n;
    return 0;
}

static int ema_open(lg_stage *st)
{
    struct ema *e = calloc(1, sizeof *e);
    LG_ASSERT(e);
    st->state = e;
    LG_TRY(lg_state_devices(st, e->device));
    LG_TRY(lg_trainer_state_open(st, e->device, &e->trainer));
    for (int r = 0; r < e->trainer->shards; r++) {
        LG_TRY(lg_stream_open(e->device[r], &e->stream[r]));
        for (int side = 0; side < 2; side++)
            LG_TRY(lg_ema_region(st, e->trainer, e->device[r], r, side, &e->side[r][side]));
        float *const sides[] = {e->side[r][0]->payload, e->side[r][1]->payload};
        if (lg_ema_is_apart(st->config))
            LG_TRY(lg_host_average_open(e->device[r], sides, lg_trainer_shard(e->trainer, r),
                                        &e->host[r]));
    }
    return 0;
}

static void begin_state(struct ema *e, uint64_t state)
{
    for (int r = 0; r < e->trainer->shards; r++) lg_stamp_clear(e->side[r][state & 1]->front);
}

static void end_state(lg_stage *st, struct ema *e, uint64_t state)
{
    for (int r = 0; r < e->trainer->shards; r++) {
        lg_stream_sync(e->stream[r]);
        if (e->host[r]) lg_host_average_sync(e->host[r]);
        lg_stamp_set(e->side[r][state & 1]->front, state);
    }
    lg_ema_mark(st->board, state);
}

/* A shard of what a checkpoint had, or of the weights. */
static int put_all(struct ema *e, int r, uint64_t state, const float *all)
{
    float *to = e->side[r][state & 1]->payload;
    for (int u = 0; u < e->trainer->params.n_units; u++) {
        struct lg_piece p = lg_trainer_piece(e->trainer, r, u);
        if (e->host[r])
            memcpy(to + p.at, all + p.first, p.count * sizeof *all);
        else
            lg_stream_upload(e->stream[r], to + p.at, all + p.first, p.count * sizeof *all);
    }
    return 0;
}

static int take_weights(struct ema *e, int r, uint64_t state)
{
    const float *w = lg_trainer_state_view(e->trainer, r, state).w;
    if (e->host[r]) return lg_host_average_take(e->host[r], w, state & 1);
    lg_stream_copy(e->stream[r], e->side[r][state & 1]->payload, w,
                   lg_trainer_shard(e->trainer, r) * sizeof *w);
    return 0;
}

/* State start_step: of the checkpoint that the run goes on from, else a copy of the weights. */
static int init(lg_stage *st, struct ema *e, uint64_t state)
{
    lg_origin origin;
    char dir[LG_PATH_BYTES], ema_dir[LG_PATH_BYTES];
    float *all = NULL;
    LG_TRY(lg_trainer_state_expect(st, e->trainer, state));
    if (lg_hosts_fetched(st->board, 0)) { /* it came with the weights */
        for (int r = 0; r < e->trainer->shards; r++)
            LG_TRY(lg_stage_expect(st, e->side[r][state & 1], state));
        lg_ema_mark(st->board, state);
        return 0;
    }
    LG_TRY(lg_run_origin(st, &origin, dir));
    int rc = 0;
    if (origin == LG_ORIGIN_RESUME) {
        LG_TRY(lg_path(ema_dir, "%s/ema", dir));
        all = calloc(e->trainer->params.count, sizeof *all);
        LG_ASSERT(all);
        const lg_trainer_state *t = e->trainer;
        rc = t->training.adapter.rank
                 ? lg_adapter_load(&t->params, ema_dir, all)
                 : lg_denoiser_load_range(&t->net, &t->all, ema_dir, all, 0, t->params.count);
        if (rc < 0) {
            free(all);
            return rc;
        }
    }
    begin_state(e, state);
    for (int r = 0; r < e->trainer->shards && rc == 0; r++)
        rc = all ? put_all(e, r, state, all) : take_weights(e, r, state);
    if (rc == 0) end_state(st, e, state);
    free(all);
    LG_TRY(rc);
    lg_log(LG_INFO, "starts at state %" PRIu64 " from %s", state,
           origin == LG_ORIGIN_RESUME ? dir : "the weights");
    return 0;
}

static int advance(lg_stage *st, struct ema *e, uint64_t state)
{
    LG_TRY(lg_trainer_state_expect(st, e->trainer, state));
    for (int r = 0; r < e->trainer->shards; r++)
        LG_TRY(lg_stage_expect(st, e->side[r][(state - 1) & 1], state - 1));
    begin_state(e, state);
    double s = (double)(state - 1), decay = LG_MIN(st->config->ema_decay, (1 + s) / (10 + s));
    for (int r = 0; r < e->trainer->shards; r++) {
        const int64_t n = (int64_t)lg_trainer_shard(e->trainer, r);
        const float *w = lg_trainer_state_view(e->trainer, r, state).w;
        if (!n) continue;
        if (e->host[r]) {
            LG_TRY(lg_host_average_make(e->host[r], w, state & 1, decay));
            continue;
        }
        lg_ema(e->stream[r],
               &(struct lg_ema_args){.ema = lg_t1(e->side[r][(state - 1) & 1]->payload, LG_F32, n),
                                     .w = lg_t1((void *)w, LG_F32, n),
                                     .out = lg_t1(e->side[r][state & 1]->payload, LG_F32, n),
                                     .decay = decay});
    }
    end_state(st, e, state);
    return 0;
}

/* 1: something of what later steps would wait for is done. */
static int prepare(const struct ema *e)
{
    int rc = 0;
    for (int r = 0; r < e->trainer->shards && rc == 0; r++)
        if (e->host[r]) rc = lg_host_average_prepare(e->host[r]);
    return rc;
}

static int ema_step(lg_stage *st)
{
    struct ema *e = st->state;
    struct lg_action a = lg_ema_next(st->board);
    int prepared;
    switch (a.kind) {
    case LG_DO_INIT:
        LG_TRY(init(st, e, a.step));
        break;
    case LG_DO_ADVANCE:
        LG_TRY(advance(st, e, a.step));
        break;
    case LG_DO_DONE:
        return LG_STEP_DONE;
    default:
        prepared = prepare(e);
        LG_TRY(prepared);
        st->waiting_for = a.why;
        return prepared ? LG_STEP_WORKED : LG_STEP_IDLE;
    }
    lg_log_set_step((int64_t)a.step);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void ema_close(lg_stage *st)
{
    struct ema *e = st->state;
    for (int r = 0; r < LG_INSTANCES_MAX; r++) {
        lg_host_average_close(&e->host[r]);
        lg_stream_close(&e->stream[r]);
    }
    lg_trainer_state_close(&e->trainer);
    free(e);
    st->state = NULL;
}

const struct lg_stage_def lg_ema_def = {
    .role = LG_ROLE_ema,
    .bytes = ema_bytes,
    .open = ema_open,
    .step = ema_step,
    .close = ema_close,
};
