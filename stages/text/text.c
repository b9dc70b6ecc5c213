/* The text stage: token ids -> hidden states of a T5 encoder.
 *
 * Sharded without lock-step: the weights lie in plan.text_shards regions that nobody owns; whoever
 * comes first fills a shard from the model's files, every instance maps them all. So an instance
 * can start, die and be added without moving a weight and without any collective.
 *
 * A chunk of captions always runs at the same padded shape and a caption always at the same row of
 * it, so its bits depend on nothing else. */
#include "base/log.h"
#include "stages/nets/t5.h"
#include "stages/roles.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct text {
    struct lg_t5_config net_config;
    lg_device *device;
    lg_stream *stream;
    lg_t5 *net;
    lg_window *window;
    const void *weights[LG_T5_SHARDS_MAX];
    lg_tensor ids, length, out;
    int32_t *host_ids, *host_length; // (B, L), (B)
    float *host_out;                 // (B, L, E)
};

static int shard_count(const struct lg_t5_config *c, int shard, int shards, size_t *ret)
{
    lg_params t;
    LG_TRY(lg_t5_params(c, shard, shards, &t));
    *ret = t.count;
    lg_params_free(&t);
    return 0;
}

static int text_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                      int *ret_n)
{
    struct lg_t5_config t5;
    int n = 0;
    *ret_n = 0;
    if (!p->instances[LG_ROLE_text]) return 0;
    LG_TRY(lg_t5_config_load(c->text_model, &t5));
    for (int k = 0; k < p->text_shards && n < cap; k++) {
        size_t count;
        LG_TRY(shard_count(&t5, k, p->text_shards, &count));
        snprintf(rows[n].name, sizeof rows[n].name, "text/%d/weights", k);
        rows[n++].bytes = count * sizeof(float);
    }
    lg_device *d;
    size_t net;
    LG_TRY(lg_device_open(c->_device, NULL, &d));
    int rc = lg_t5_plan(d, &t5, p->text_chunk, p->text_length, &net);
    lg_device_close(&d);
    LG_TRY(rc);
    snprintf(rows[n].name, sizeof rows[n].name, "private");
    rows[n++].bytes = (size_t)p->instances[LG_ROLE_text] * net;
    *ret_n = n;
    return 0;
}

static int fill_shard(lg_stage *st, void *payload, void *arg)
{
    const struct text *x = st->state;
    int shard = *(int *)arg;
    lg_log(LG_INFO, "reading shard %d of %d from %s", shard, st->plan.text_shards,
           st->config->text_model);
    return lg_t5_load(&x->net_config, st->config->text_model, shard, st->plan.text_shards, payload);
}

static int open_shards(lg_stage *st, struct text *x)
{
    int shards = st->plan.text_shards;
    LG_ASSERT(shards <= LG_T5_SHARDS_MAX);
    /* One's own shard first, so that instances that start together read different files' parts. */
    for (int i = 0; i < shards; i++) {
        int k = (st->index + i) % shards;
        size_t count;
        lg_region *r;
        LG_TRY(shard_count(&x->net_config, k, shards, &count));
        LG_TRY(lg_stage_region(st, count * sizeof(float), &r, "text/%d/weights", k));
        LG_TRY(lg_stage_fill(st, r, fill_shard, &k));
        x->weights[k] = r->payload;
    }
    return 0;
}

static int text_open(lg_stage *st)
{
    struct text *x = calloc(1, sizeof *x);
    LG_ASSERT(x);
    st->state = x;
    const int64_t B = st->plan.text_chunk, L = st->plan.text_length, E = st->plan.text_dim;
    LG_TRY(lg_t5_config_load(st->config->text_model, &x->net_config));
    LG_TRY(lg_stage_window(st, &x->window));
    LG_TRY(open_shards(st, x));
    LG_TRY(lg_stage_device(st, &x->device));
    LG_TRY(lg_stream_open(x->device, &x->stream));
    LG_TRY(lg_t5_open(x->device, &x->net_config, (int)B, (int)L, st->plan.text_shards, &x->net));
    void *ids, *length, *out;
    LG_TRY(lg_device_alloc(x->device, (size_t)(B * L) * sizeof(int32_t), &ids));
    LG_TRY(lg_device_alloc(x->device, (size_t)B * sizeof(int32_t), &length));
    LG_TRY(lg_device_alloc(x->device, (size_t)(B * L * E) * sizeof(float), &out));
    x->ids = lg_t2(ids, LG_I32, B, L);
    x->length = lg_t1(length, LG_I32, B);
    x->out = lg_t3(out, LG_F32, B, L, E);
    x->host_ids = calloc((size_t)(B * L), sizeof(int32_t));
    x->host_length = calloc((size_t)B, sizeof(int32_t));
    x->host_out = calloc((size_t)(B * L * E), sizeof(float));
    LG_ASSERT(x->host_ids && x->host_length && x->host_out);
    return 0;
}

/* Rows that are not wanted get a caption of one end token: their result is thrown away. */
static int gather(lg_stage *st, struct text *x, const struct lg_claim *claim, bool *wanted)
{
    lg_window *w = x->window;
    const int L = st->plan.text_length;
    int n_wanted = 0;
    for (uint64_t i = 0; i < claim->count; i++) {
        int32_t *ids = x->host_ids + i * (uint64_t)L;
        wanted[i] = lg_window_wanted(w, claim, LG_FIELD_TEXT, claim->n + i);
        memset(ids, 0, (size_t)L * sizeof *ids);
        ids[0] = 1;
        x->host_length[i] = 1;
        if (!wanted[i]) continue;
        size_t slot = (claim->n + i) % w->g.slots;
        memcpy(ids, w->tokens + slot * w->g.tokens_bytes, (size_t)L * sizeof *ids);
        x->host_length[i] = w->slot[slot].text_length;
        n_wanted++;
    }
    return n_wanted;
}

static int text_step(lg_stage *st)
{
    struct text *x = st->state;
    lg_window *w = x->window;
    struct lg_claim claim;
    bool wanted[4096];
    uint64_t end = lg_stage_end(st);
    int rc =
        lg_window_claim(w, st->board, st->me, LG_FIELD_TEXT, 1u << LG_FIELD_SOURCE, end, &claim);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    LG_ASSERT(claim.count <= LG_ARRAY_LEN(wanted));
    int n = gather(st, x, &claim, wanted);
    lg_stream_upload(x->stream, x->ids.data, x->host_ids, lg_tensor_bytes(&x->ids));
    lg_stream_upload(x->stream, x->length.data, x->host_length, lg_tensor_bytes(&x->length));
    lg_t5_forward(x->net, x->stream, x->weights, x->ids, x->length, x->out);
    lg_stream_download(x->stream, x->host_out, x->out.data, lg_tensor_bytes(&x->out));
    lg_stream_sync(x->stream);
    for (uint64_t i = 0; i < claim.count; i++) {
        if (!wanted[i]) continue;
        size_t slot = (claim.n + i) % w->g.slots;
        memcpy(w->text + slot * w->g.text_bytes,
               x->host_out + i * (w->g.text_bytes / sizeof(float)), w->g.text_bytes);
        lg_window_publish(w, LG_FIELD_TEXT, claim.n + i);
    }
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)n, memory_order_relaxed);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void text_close(lg_stage *st)
{
    struct text *x = st->state;
    lg_t5_close(&x->net);
    lg_stream_close(&x->stream);
    lg_device_close(&x->device); /* frees ids, length, out */
    lg_window_close(&x->window);
    free(x->host_ids);
    free(x->host_length);
    free(x->host_out);
    free(x);
    st->state = NULL;
}

const struct lg_stage_def lg_text_def = {
    .role = LG_ROLE_text,
    .bytes = text_bytes,
    .open = text_open,
    .step = text_step,
    .close = text_close,
};
