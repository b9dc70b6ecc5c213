/* The text stage: token ids -> the states of a text encoder behind its last layer.
 *
 * Sharded without lock-step: the weights lie in plan.text_shards regions that nobody owns; whoever
 * comes first fills a shard from the model's files, every instance maps them all. So an instance
 * can start, die and be added without moving a weight and without any collective.
 *
 * A chunk of captions always runs at the same padded shape, in which a caption's bits depend on nothing else; so what was
 * made of it once is remembered (stages/memo.h). */
#include "base/log.h"
#include "stages/memo.h"
#include "stages/nets/text_encoder.h"
#include "stages/roles.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_MAX = 4096, LENGTH_MAX = 4096 }; /* schema.def */

struct text {
    struct lg_text_encoder_config net_config;
    lg_device *device;
    lg_stream *stream;
    lg_text_encoder *net;
    lg_window *window;
    const void *weights[LG_TEXT_SHARDS_MAX];
    lg_tensor ids, length, out;
    int32_t *host_ids, *host_length; // (B, L), (B)
    lg_stage_memo memo;
};

static int shard_count(const struct lg_text_encoder_config *c, int shard, int shards, size_t *ret)
{
    lg_params t;
    LG_TRY(lg_text_encoder_params(c, shard, shards, &t));
    *ret = t.count;
    lg_params_free(&t);
    return 0;
}

enum { LINES_OF_ITEM = 4 }; /* with data.caption = "random": of more, some are encoded again */

/* A caption's states, keyed by ids and length. Tags in another order are another caption. */
static struct lg_stage_memo_options memo_of(const lg_config *c, const lg_plan *p)
{
    return (struct lg_stage_memo_options){
        .role = "text",
        .size = c->text_memo,
        .bytes = (size_t)p->text_length * (size_t)p->text_dim * (size_t)p->element_bytes,
        .of_item = c->data_shuffle_tags                ? 0
                   : strcmp(c->data_caption, "random") ? 1
                                                       : LINES_OF_ITEM};
}

/* What an instance computes with: net, ids, lengths and states of a chunk. */
static int private_bytes(const lg_config *c, const lg_plan *p,
                         const struct lg_text_encoder_config *encoder, int index, size_t *ret)
{
    const size_t B = (size_t)p->text_chunk, L = (size_t)p->text_length;
    lg_device *d;
    size_t net = 0;
    LG_TRY(lg_stage_plan_device(c, p, LG_ROLE_text, index, &d));
    const struct lg_text_encoder_shape shape = {.batch = p->text_chunk, .length = p->text_length};
    int rc = lg_text_encoder_plan(d, encoder, &shape, &net);
    lg_device_close(&d);
    LG_TRY(rc);
    *ret = net + B * (L + 1) * sizeof(int32_t) +
           B * L * (size_t)p->text_dim * (size_t)p->element_bytes;
    return 0;
}

static int text_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                      int *ret_n)
{
    const int instances = p->instances[LG_ROLE_text];
    struct lg_text_encoder_config encoder;
    size_t net;
    int n = 0;
    *ret_n = 0;
    if (!instances) return 0;
    LG_ASSERT(p->text_shards + instances + 1 <= cap);
    LG_TRY(lg_text_encoder_config_load(c->text_model, &encoder));
    LG_TRY(private_bytes(c, p, &encoder, 0, &net));
    size_t remote[LG_INSTANCES_MAX] = {0}; /* copies of shards on other GPUs */
    for (int k = 0; k < p->text_shards; k++) {
        size_t count;
        LG_TRY(shard_count(&encoder, k, p->text_shards, &count));
        snprintf(rows[n].name, sizeof rows[n].name, "text/%d/weights", k);
        lg_stage_device_name(c, LG_ROLE_text, k, rows[n].device);
        rows[n++].bytes = count * (size_t)p->element_bytes;
        for (int i = 0; i < instances; i++)
            if (lg_plan_gpu(c, LG_ROLE_text, i) != lg_plan_gpu(c, LG_ROLE_text, k))
                remote[i] += count * (size_t)p->element_bytes;
    }
    for (int i = 0; i < instances; i++) {
        snprintf(rows[n].name, sizeof rows[n].name, "private");
        lg_stage_device_name(c, LG_ROLE_text, i, rows[n].device);
        rows[n].processes = 1;
        rows[n++].bytes = net + remote[i];
    }
    const struct lg_stage_memo_options memo = memo_of(c, p);
    snprintf(rows[n].name, sizeof rows[n].name, "memo/text");
    if ((rows[n].bytes = lg_stage_memo_bytes(&memo))) n++;
    *ret_n = n;
    return 0;
}

static int load_shard(lg_stage *st, size_t first, size_t count, float *ret, void *arg)
{
    const struct text *x = st->state;
    (void)first, (void)count; /* all at once */
    int shard = *(int *)arg;
    lg_log(LG_INFO, "reading shard %d of %d from %s", shard, st->plan.text_shards,
           st->config->text_model);
    return lg_text_encoder_load(&x->net_config, st->config->text_model, shard, st->plan.text_shards,
                                ret);
}

/* Shard k lies on the GPU of instance k. From another GPU it is copied once, at the start: a product
 * reads its weights many times over, which the link between GPUs would slow down. */
static int open_shard(lg_stage *st, struct text *x, int k)
{
    size_t count;
    lg_region *r;
    LG_TRY(shard_count(&x->net_config, k, st->plan.text_shards, &count));
    const size_t bytes = count * (size_t)st->plan.element_bytes;
    LG_TRY(
        lg_stage_region(st,
                        &(struct lg_stage_memory){
                            .bytes = bytes, .device = x->device, .role = LG_ROLE_text, .index = k},
                        &r, "text/%d/weights", k));
    LG_TRY(lg_stage_fill(st, r,
                         &(struct lg_stage_weights){
                             .device = x->device, .count = count, .load = load_shard, .arg = &k}));
    x->weights[k] = r->payload;
    if (lg_plan_gpu(st->config, LG_ROLE_text, k) ==
        lg_plan_gpu(st->config, LG_ROLE_text, st->index))
        return 0;
    void *copy;
    LG_TRY(lg_device_alloc(x->device, bytes, &copy));
    lg_stream_copy(x->stream, copy, r->payload, bytes);
    lg_stream_sync(x->stream);
    x->weights[k] = copy;
    return 0;
}

static int text_open(lg_stage *st)
{
    struct text *x = calloc(1, sizeof *x);
    LG_ASSERT(x);
    st->state = x;
    const int64_t B = st->plan.text_chunk, L = st->plan.text_length, E = st->plan.text_dim;
    const int shards = st->plan.text_shards;
    LG_ASSERT(shards <= LG_TEXT_SHARDS_MAX);
    LG_TRY(lg_text_encoder_config_load(st->config->text_model, &x->net_config));
    LG_TRY(lg_stage_device(st, LG_ROLE_text, st->index, &x->device));
    LG_TRY(lg_stage_window(st, x->device, &x->window));
    LG_TRY(lg_stream_open(x->device, &x->stream));
    /* One's own shard first, so that instances that start together read different files' parts. */
    for (int i = 0; i < shards; i++) LG_TRY(open_shard(st, x, (st->index + i) % shards));
    const struct lg_text_encoder_shape shape = {.batch = (int)B, .length = (int)L};
    LG_TRY(lg_text_encoder_open(x->device, &x->net_config, &shape, shards, &x->net));
    lg_dtype type = lg_device_dtype(x->device);
    void *ids, *length, *out;
    LG_TRY(lg_device_alloc(x->device, (size_t)(B * L) * sizeof(int32_t), &ids));
    LG_TRY(lg_device_alloc(x->device, (size_t)B * sizeof(int32_t), &length));
    LG_TRY(lg_device_alloc(x->device, (size_t)(B * L * E) * lg_dtype_bytes(type), &out));
    x->ids = lg_t2(ids, LG_I32, B, L);
    x->length = lg_t1(length, LG_I32, B);
    x->out = lg_t3(out, type, B, L, E);
    x->host_ids = calloc((size_t)(B * L), sizeof(int32_t));
    x->host_length = calloc((size_t)B, sizeof(int32_t));
    LG_ASSERT(x->host_ids && x->host_length);
    return 0;
}

static struct lg_memo_key key_of(const struct text *x, uint64_t row)
{
    const size_t L = (size_t)x->ids.dim[1];
    int32_t input[1 + LENGTH_MAX];
    input[0] = x->host_length[row];
    memcpy(input + 1, x->host_ids + row * L, L * sizeof *input);
    return lg_memo_key_of(input, (1 + L) * sizeof *input);
}

/* Rows that are not wanted, or absent without memory, get a caption of one end token: their result is thrown away. */
static int gather(lg_stage *st, struct text *x, const struct lg_claim *claim, bool *wanted)
{
    lg_window *w = x->window;
    const int L = st->plan.text_length;
    int n_wanted = 0;
    for (uint64_t i = 0; i < claim->count; i++) {
        int32_t *ids = x->host_ids + i * (uint64_t)L;
        wanted[i] = lg_window_wanted(w, claim, LG_FIELD_TEXT, claim->n + i) &&
                    lg_window_has_place(w, claim->n + i);
        memset(ids, 0, (size_t)L * sizeof *ids);
        ids[0] = 1;
        x->host_length[i] = 1;
        if (!wanted[i]) continue;
        memcpy(ids, lg_window_tokens(w, claim->n + i), (size_t)L * sizeof *ids);
        x->host_length[i] = lg_window_slot(w, claim->n + i)->text_length;
        n_wanted++;
    }
    return n_wanted;
}

/* Captions that nobody has encoded yet are encoded, with the whole chunk; found[i]: what is remembered of row i. */
static void encode(struct text *x, const struct lg_claim *claim, const bool *wanted,
                   const void *const *found)
{
    lg_window *w = x->window;
    const size_t bytes = w->g.text_bytes;
    void *kept[CHUNK_MAX];
    lg_stream_upload(x->stream, x->ids.data, x->host_ids, lg_tensor_bytes(&x->ids));
    lg_stream_upload(x->stream, x->length.data, x->host_length, lg_tensor_bytes(&x->length));
    lg_text_encoder_forward(x->net, x->stream, x->weights,
                            &(struct lg_text_io){.ids = x->ids,
                                                 .length = x->length,
                                                 .out = {[LG_TEXT_STATES] = x->out}});
    for (uint64_t i = 0; i < claim->count; i++) {
        const uint8_t *from = (uint8_t *)x->out.data + i * bytes;
        if (wanted[i]) lg_stream_copy(x->stream, lg_window_text(w, claim->n + i), from, bytes);
        kept[i] = wanted[i] && !found[i] ? lg_memo_begin(&x->memo.table, key_of(x, i)) : NULL;
        if (kept[i]) lg_stream_download(x->stream, kept[i], from, bytes);
    }
    lg_stream_sync(x->stream);
    for (uint64_t i = 0; i < claim->count; i++)
        if (kept[i]) lg_memo_end(&x->memo.table, kept[i]);
}

/* Looks up what is wanted; is all of it there? */
static bool look(struct text *x, const struct lg_claim *claim, const bool *wanted,
                 const void **found)
{
    bool all = true;
    for (uint64_t i = 0; i < claim->count; i++) {
        found[i] = wanted[i] ? lg_stage_memo_look(&x->memo, key_of(x, i)) : NULL;
        all = all && (!wanted[i] || found[i]);
    }
    return all;
}

static int text_step(lg_stage *st)
{
    struct text *x = st->state;
    lg_window *w = x->window;
    struct lg_claim claim;
    bool wanted[CHUNK_MAX];
    const void *found[CHUNK_MAX];
    const struct lg_stage_memo_options memo = memo_of(st->config, &st->plan);
    uint64_t end = lg_stage_end(st);
    lg_turn_begin(&st->turn); /* before the claim: what waits for a turn is nobody's yet */
    int rc =
        lg_window_claim(w, st->board, st->me, LG_FIELD_TEXT, 1u << LG_FIELD_SOURCE, end, &claim);
    if (rc < 0) lg_turn_drop(&st->turn);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    lg_log_set_step((int64_t)(claim.n / st->board->s->batch));
    LG_ASSERT(claim.count <= CHUNK_MAX);
    if (lg_window_publish_absent(w, LG_FIELD_TEXT, &claim)) {
        lg_turn_drop(&st->turn);
        lg_bus_notify(st->bus);
        return LG_STEP_WORKED;
    }
    if (!x->memo.is_open) lg_stage_memo_open(st, &memo, &x->memo);
    int n = gather(st, x, &claim, wanted);
    if (look(x, &claim, wanted, found)) {
        for (uint64_t i = 0; i < claim.count; i++)
            if (wanted[i])
                lg_stream_upload(x->stream, lg_window_text(w, claim.n + i), found[i],
                                 w->g.text_bytes);
        lg_stream_sync(x->stream);
    } else {
        encode(x, &claim, wanted, found);
    }
    lg_turn_end(&st->turn);
    for (uint64_t i = claim.from; i < claim.to; i++)
        if (lg_window_wanted(w, &claim, LG_FIELD_TEXT, i)) lg_window_publish(w, LG_FIELD_TEXT, i);
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)n, memory_order_relaxed);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void text_close(lg_stage *st)
{
    struct text *x = st->state;
    lg_stage_memo_close(&x->memo, "captions");
    lg_text_encoder_close(&x->net);
    lg_stream_close(&x->stream);
    lg_window_close(&x->window);
    free(x->host_ids);
    free(x->host_length);
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
