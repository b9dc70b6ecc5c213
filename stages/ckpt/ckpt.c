/* The checkpoint writer. STAGE_MOMENTS and STAGE copy a committed state (its moments, for which the ranks
 * wait first; then weights and EMA of the same state) into the region ckpt/0/staging, which lets trainer
 * and EMA go on; WRITE turns the staging region into files. A successor, of this build or a newer one, that
 * finds a staged snapshot writes it, and one that finds half of it stages the other half.
 *
 * publish.c makes it visible, retention.c removes old ones.
 * A full disk loses nothing: the snapshot stays in memory, the old checkpoints stay, the write is
 * tried again. */
#include "base/clock.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "stages/ckpt/publish.h"
#include "stages/ckpt/retention.h"
#include "stages/roles.h"
#include "stages/trainer/state.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RETRY_FIRST_S = 1, RETRY_MAX_S = 30, PIECE_BYTES = 64 << 20 };
enum { TIDY_RETRY_MS = 100 };

/* First page of the staging region. */
struct staged_head {
    struct lg_stamp stamp;   /* of all but the moments, scalars included; set before the mark */
    struct lg_stamp moments; /* the same of these, which are staged and marked before */
    struct lg_state_scalars scalars;
    char fingerprint[LG_STATE_DEVICE_BYTES];
};

struct ckpt {
    lg_device *device[LG_INSTANCES_MAX]; /* of rank r's state */
    lg_stream *stream[LG_INSTANCES_MAX];
    lg_trainer_state *trainer;
    lg_region *ema[LG_INSTANCES_MAX][2];
    lg_region *staging;
    lg_moments_layout layout; /* of all moments, as staged */
    size_t pinned;            /* bytes of the staging region that are pinned so far */
    int64_t retry_at_ns;      /* 0: no failed attempt */
    int retry_s;
    bool untidy;                /* old checkpoints wait to be removed */
    int64_t tidy_at_ns;         /* next try */
    char source[LG_PATH_BYTES]; /* config.json of the transformer that the run began with, or "" */
    lg_manifest newest;         /* that this process has published */
};

/* Weights, moments, EMA. */
static size_t staging_bytes(const lg_moments_layout *l)
{
    return 2 * l->count * sizeof(float) + lg_moments_whole_bytes(l);
}

static struct lg_snapshot snapshot_of(const struct ckpt *c)
{
    float *w = c->staging->payload;
    char *moments = (char *)(w + c->layout.count);
    return (struct lg_snapshot){.w = w,
                                .moments = lg_moments_whole(&c->layout, moments),
                                .layout = &c->layout,
                                .ema =
                                    (const float *)(moments + lg_moments_whole_bytes(&c->layout))};
}

static int ckpt_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                      struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_denoiser_config net;
    lg_params all;
    LG_ASSERT(cap >= 1);
    LG_TRY(lg_net_table_of(c, p, &net, &all));
    snprintf(rows[0].name, sizeof rows[0].name, "ckpt/0/staging");
    const lg_params trained = lg_params_trained(&all);
    lg_moments_layout layout = lg_moments_layout_of(&trained, 0, 1);
    rows[0].bytes = staging_bytes(&layout);
    lg_moments_layout_free(&layout);
    lg_params_free(&all);
    *ret_n = 1;
    LG_TRY(lg_state_processes(c, p->shards, rows, cap, ret_n));
    return 0;
}

static int ckpt_open(lg_stage *st)
{
    struct ckpt *c = calloc(1, sizeof *c);
    LG_ASSERT(c);
    st->state = c;
    if (st->config->model_from[0])
        LG_TRY(lg_path(c->source, "%s/config.json", st->config->model_from));
    LG_TRY(lg_state_devices(st, c->device));
    LG_TRY(lg_trainer_state_open(st, c->device, &c->trainer));
    for (int r = 0; r < c->trainer->shards; r++) {
        LG_TRY(lg_trainer_moments_open(st, c->device[r], c->trainer, r));
        LG_TRY(lg_stream_open(c->device[r], &c->stream[r]));
        for (int side = 0; side < 2; side++)
            LG_TRY(lg_ema_region(st, c->trainer, c->device[r], r, side, &c->ema[r][side]));
    }
    c->layout = lg_moments_layout_of(&c->trainer->params, 0, 1);
    const size_t bytes = staging_bytes(&c->layout);
    LG_TRY(lg_stage_region(
        st,
        &(struct lg_stage_memory){
            .bytes = bytes,
            .front_bytes = sizeof(struct staged_head),
            .is_made = atomic_load(&lg_board_row(st->board, LG_ROLE_ckpt, 0)->staged_moments) !=
                       LG_MARK_NONE},
        &c->staging, "ckpt/0/staging"));
    return 0;
}

/* Pinning takes time (up to 0.6 s a GiB), and a writer that comes back is wanted at once: the staging region
 * is pinned piece by piece while there is nothing else to do. Copies keep to the pieces. */
static int pin_some(struct ckpt *c)
{
    size_t bytes = LG_MIN(c->staging->bytes - c->pinned, (size_t)PIECE_BYTES);
    if (lg_device_is_host(c->device[0]) || !bytes) return 0;
    LG_TRY(lg_device_pin(c->device[0], (char *)c->staging->payload + c->pinned, bytes));
    c->pinned += bytes;
    return 1;
}

static void download(struct ckpt *c, int rank, size_t at, const void *from, size_t bytes)
{
    for (size_t done = 0, n; done < bytes; done += n) {
        n = LG_MIN(bytes - done, PIECE_BYTES - (at + done) % PIECE_BYTES);
        lg_stream_download(c->stream[rank], (char *)c->staging->payload + at + done,
                           (const char *)from + done, n);
        lg_heartbeat();
    }
}

static void sync_all(struct ckpt *c)
{
    for (int r = 0; r < c->trainer->shards; r++) lg_stream_sync(c->stream[r]);
}

/* From host memory. */
static void copy(struct ckpt *c, size_t at, const void *from, size_t bytes)
{
    for (size_t done = 0, n; done < bytes; done += n) {
        n = LG_MIN(bytes - done, (size_t)PIECE_BYTES);
        memcpy((char *)c->staging->payload + at + done, (const char *)from + done, n);
        lg_heartbeat();
    }
}

/* To a place in the staging region. */
static void stage_bytes(struct ckpt *c, int r, const void *to, const void *from, size_t bytes)
{
    const size_t at = (size_t)((const char *)to - (const char *)c->staging->payload);
    if (bytes) download(c, r, at, from, bytes);
}

/* A rank's shard into an array of the snapshot. */
static void stage_shard(struct ckpt *c, int r, const float *to, const float *from, bool from_host)
{
    for (int u = 0; u < c->trainer->params.n_units; u++) {
        const struct lg_piece p = lg_trainer_piece(c->trainer, r, u);
        const size_t at = (size_t)((const char *)(to + p.first) - (char *)c->staging->payload);
        if (from_host)
            copy(c, at, from + p.at, p.count * sizeof(float));
        else
            download(c, r, at, from + p.at, p.count * sizeof(float));
    }
}

/* What of a unit's piece lies in a chunk of rank r. */
static void stage_moments_of(struct ckpt *c, int r, const struct lg_chunk *chunk,
                             struct lg_piece piece)
{
    const struct lg_piece p = lg_piece_within(piece, chunk->first, chunk->count);
    const struct lg_chunk all = snapshot_of(c).moments;
    if (!p.count) return;
    const struct lg_chunk from = lg_moments_part(&c->trainer->layout[r], chunk, p.at, p.count);
    const struct lg_chunk to = lg_moments_part(&c->layout, &all, p.first, p.count);
    const size_t full = from.full * sizeof(float);
    const size_t blocks = p.count / LG_ADAMW8_BLOCK * sizeof(float);
    LG_ASSERT(from.full == to.full);
    stage_bytes(c, r, to.m, from.m, full);
    stage_bytes(c, r, to.v, from.v, full);
    if (!c->layout.in_blocks) return;
    stage_bytes(c, r, to.m_max, from.m_max, blocks);
    stage_bytes(c, r, to.v_max, from.v_max, blocks);
    stage_bytes(c, r, to.m_code, from.m_code, p.count);
    stage_bytes(c, r, to.v_code, from.v_code, p.count);
}

static int stage_moments(lg_stage *st, struct ckpt *c, uint64_t state)
{
    int64_t start = lg_now_ns();
    struct staged_head *head = c->staging->front;
    LG_TRY(
        lg_trainer_state_expect(st, c->trainer, state)); /* its scalars say where the chunks lie */
    for (int r = 0; r < c->trainer->shards; r++)
        LG_TRY(lg_stage_expect(st, c->trainer->moments[r], state));
    lg_stamp_clear(&head->moments);
    for (int r = 0; r < c->trainer->shards; r++) {
        const uint64_t t = lg_trainer_state_view(c->trainer, r, state).scalars->optimizer_steps;
        for (int k = 0; k < lg_moments_chunks(lg_trainer_shard(c->trainer, r)); k++) {
            struct lg_chunk chunk = lg_trainer_chunk(c->trainer, r, k, t);
            for (int u = 0; u < c->trainer->params.n_units; u++)
                stage_moments_of(c, r, &chunk, lg_trainer_piece(c->trainer, r, u));
        }
    }
    sync_all(c);
    lg_stamp_set(&head->moments, state);
    lg_ckpt_mark_staged_moments(st->board, state);
    lg_log(LG_INFO, "staged moments of state %" PRIu64 " in %.2f ms", state,
           (double)(lg_now_ns() - start) / LG_MS_NS);
    return 0;
}

static int expect_state(lg_stage *st, const struct ckpt *c, uint64_t state)
{
    LG_TRY(lg_trainer_state_expect(st, c->trainer, state));
    for (int r = 0; r < c->trainer->shards && st->board->s->has_ema; r++)
        LG_TRY(lg_stage_expect(st, c->ema[r][state & 1], state));
    return 0;
}

static int stage_state(lg_stage *st, struct ckpt *c, uint64_t state)
{
    int64_t start = lg_now_ns();
    struct staged_head *head = c->staging->front;
    const struct lg_snapshot to = snapshot_of(c);
    LG_TRY(expect_state(st, c, state));
    lg_stamp_clear(&head->stamp);
    for (int r = 0; r < c->trainer->shards; r++) {
        const float *w = lg_trainer_state_view(c->trainer, r, state).w;
        stage_shard(c, r, to.w, w, false);
        stage_shard(c, r, to.ema, c->ema[r][state & 1]->payload, lg_ema_is_apart(st->config));
    }
    sync_all(c);
    const struct lg_state_view view = lg_trainer_state_view(c->trainer, 0, state);
    head->scalars = *view.scalars;
    LG_ASSERT(head->scalars.state == state);
    snprintf(head->fingerprint, sizeof head->fingerprint, "%s", view.device);
    lg_stamp_set(&head->stamp, state);
    lg_ckpt_mark_staged(st->board, state);
    lg_log(LG_INFO, "staged state %" PRIu64 " in %.2f ms", state,
           (double)(lg_now_ns() - start) / LG_MS_NS);
    return 0;
}

/* Both halves: memory may have been lost between them. */
static int expect_staged(lg_stage *st, const struct ckpt *c, uint64_t state)
{
    const struct staged_head *head = c->staging->front;
    LG_TRY(lg_stage_expect_stamp(st, &head->moments, "ckpt/0/staging (moments)", state));
    LG_TRY(lg_stage_expect(st, c->staging, state));
    return 0;
}

static lg_manifest *manifest_of(const lg_stage *st, const struct ckpt *c)
{
    const struct staged_head *head = c->staging->front;
    lg_manifest *m = calloc(1, sizeof *m);
    LG_ASSERT(m);
    snprintf(m->name, sizeof m->name, "%s", st->config->job_name);
    m->step = head->scalars.state;
    m->next_n = head->scalars.state * (uint64_t)st->plan.batch;
    m->seed = (uint64_t)st->config->job_seed;
    m->plan_hash = st->plan.hash;
    m->lineage = st->board->s->lineage;
    snprintf(m->isa, sizeof m->isa, "%s", st->plan.isa);
    m->ranks = c->trainer->ranks;
    m->threads = st->plan.threads[LG_ROLE_trainer];
    snprintf(m->fingerprint, sizeof m->fingerprint, "%s", head->fingerprint);
    m->optimizer_steps = head->scalars.optimizer_steps;
    m->skipped = head->scalars.skipped;
    m->loss_scale = head->scalars.loss_scale.scale;
    m->loss_scale_steps = head->scalars.loss_scale.steps;
    if (strcmp(st->config->trainer_lr_schedule, "constant")) /* else it says nothing */
        m->lr_steps = (uint64_t)st->plan.lr_steps;
    m->n_data = lg_data_parts(st->board, m->data);
    return m;
}

/* Removes old checkpoints where that is due. What fails is tried again; what is left half-removed when
 * the run ends is removed by lgsup (supervisor/core/finish.c). */
static void tidy(lg_stage *st, struct ckpt *c)
{
    char parent[LG_PATH_BYTES];
    int64_t now = lg_now_ns();
    if (!c->untidy || now < c->tidy_at_ns) return;
    int rc = lg_path(parent, "%s/checkpoints", st->run_dir);
    if (rc == 0)
        rc = lg_retention_apply(
            &(struct lg_retention){.dir = parent,
                                   .newest = &c->newest,
                                   .keep = (int)st->config->checkpoint_keep,
                                   .shared = lg_config_shares_checkpoints(st->config)});
    if (rc < 0 && !c->tidy_at_ns) lg_log_error("old checkpoints could not be removed yet");
    lg_err_clear();
    c->tidy_at_ns = now + TIDY_RETRY_MS * LG_MS_NS;
    if (rc == 0) c->untidy = false;
}

/* What is not trained goes into the files of a whole model. */
static int read_frozen(lg_stage *st, const struct ckpt *c, float **ret)
{
    const lg_params *all = &c->trainer->all;
    const size_t count = all->count - all->trained_count;
    *ret = NULL;
    if (!count || c->trainer->training.adapter.rank) return 0;
    float *frozen = malloc(count * sizeof *frozen);
    if (!frozen) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights", count);
    int rc = lg_frozen_read(st, c->trainer, 0, count, frozen);
    if (rc == 0)
        *ret = frozen;
    else
        free(frozen);
    return rc;
}

static int publish(lg_stage *st, const struct ckpt *c, lg_manifest *m, char dir[LG_PATH_BYTES])
{
    const lg_trainer_state *t = c->trainer;
    float *frozen;
    char writer[32];
    snprintf(writer, sizeof writer, "%016" PRIx64, st->board->s->hosts.life);
    LG_TRY(read_frozen(st, c, &frozen));
    struct lg_publishing p = {.run_dir = st->run_dir,
                              .writer = lg_config_shares_checkpoints(st->config) ? writer : NULL,
                              .contents = {.net = &t->net,
                                           .params = &t->all,
                                           .adapter = &t->training.adapter,
                                           .base = lg_config_begins_with(st->config),
                                           .source = c->source[0] ? c->source : NULL,
                                           .frozen = frozen,
                                           .state = snapshot_of(c)}};
    int rc = lg_checkpoint_publish(&p, m, dir);
    free(frozen);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int write_state(lg_stage *st, struct ckpt *c, uint64_t state)
{
    char dir[LG_PATH_BYTES];
    int64_t start = lg_now_ns();
    lg_manifest *m = manifest_of(st, c);
    int rc = publish(st, c, m, dir);
    if (rc == 0) c->newest = *m;
    free(m);
    LG_TRY(rc);
    /* Before the mark: whoever dies in the middle of a removal has a successor that ends it, after
     * the run's last checkpoint, too. */
    c->untidy = true;
    c->tidy_at_ns = 0;
    tidy(st, c);
    lg_ckpt_mark_published(st->board, state);
    lg_log(LG_INFO, "published %s in %.1f ms", dir, (double)(lg_now_ns() - start) / LG_MS_NS);
    return 0;
}

/* One attempt; a failed one is told and tried again later, twice as late each time. */
static int try_write(lg_stage *st, struct ckpt *c, uint64_t state)
{
    if (c->retry_at_ns && lg_now_ns() < c->retry_at_ns) return LG_STEP_IDLE;
    if (write_state(st, c, state) == 0) {
        if (c->retry_at_ns) lg_bus_event(st->bus, LG_INFO, "the checkpoint could be written now");
        c->retry_at_ns = 0;
        c->retry_s = 0;
        return LG_STEP_WORKED;
    }
    c->retry_s = c->retry_s ? LG_MIN(2 * c->retry_s, RETRY_MAX_S) : RETRY_FIRST_S;
    c->retry_at_ns = lg_now_ns() + c->retry_s * LG_S_NS;
    char text[200], event[700];
    snprintf(text, sizeof text,
             "checkpoint of step %" PRIu64
             " not written, next try in %d s (training goes on, and does not end before it is "
             "written; older checkpoints stay)",
             state, c->retry_s);
    snprintf(event, sizeof event, "%s: %s", text, lg_err_message());
    lg_bus_event(st->bus, LG_WARN, event);
    lg_log_error(text); /* which adds the reason */
    return LG_STEP_IDLE;
}

static int ckpt_step(lg_stage *st)
{
    struct ckpt *c = st->state;
    struct lg_action a = lg_ckpt_next(st->board);
    lg_log_set_step((int64_t)a.step);
    tidy(st, c);
    switch (a.kind) {
    case LG_DO_STAGE_MOMENTS:
        LG_TRY(stage_moments(st, c, a.step));
        break;
    case LG_DO_STAGE:
        LG_TRY(stage_state(st, c, a.step));
        break;
    case LG_DO_WRITE: {
        LG_TRY(expect_staged(st, c, a.step));
        if (lg_hosts_write(st->board, a.step) == LG_HOST_WRITTEN) {
            lg_ckpt_mark_published(st->board, a.step);
            break;
        }
        int rc = try_write(st, c, a.step);
        if (rc != LG_STEP_WORKED) return rc;
        break;
    }
    case LG_DO_DONE:
        return LG_STEP_DONE;
    default: {
        int pinned = pin_some(c);
        LG_TRY(pinned);
        st->waiting_for = a.why;
        return pinned ? LG_STEP_WORKED : LG_STEP_IDLE;
    }
    }
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void ckpt_close(lg_stage *st)
{
    struct ckpt *c = st->state;
    for (int r = 0; r < LG_INSTANCES_MAX; r++) lg_stream_close(&c->stream[r]);
    lg_moments_layout_free(&c->layout);
    lg_trainer_state_close(&c->trainer);
    free(c);
    st->state = NULL;
}

const struct lg_stage_def lg_ckpt_def = {
    .role = LG_ROLE_ckpt,
    .bytes = ckpt_bytes,
    .open = ckpt_open,
    .step = ckpt_step,
    .close = ckpt_close,
};
