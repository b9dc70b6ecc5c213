/* The text stage: token ids -> what the denoiser takes of a text encoder (config/denoiser_texts.def): states of the tokens,
 * a pooled value, or both. Of a model with several encoders each has processes, shards, a memo and a field of the window of
 * its own, named after its role.
 *
 * Sharded without lock-step: the weights lie in as many regions as the plan says, that nobody owns; whoever
 * comes first fills a shard from the model's files, every instance maps them all. So an instance
 * can start, die and be added without moving a weight and without any collective.
 *
 * A chunk of captions always runs at the same padded shape, in which a caption's bits depend on nothing else; so what was
 * made of it once is remembered (stages/memo.h). */
#include "base/log.h"
#include "config/texts.h"
#include "stages/memo.h"
#include "stages/nets/text_encoder.h"
#include "stages/roles.h"
#include "stages/stored.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_MAX = 4096, LENGTH_MAX = 4096 }; /* schema.def */

struct text {
    int k; /* which of the plan's texts */
    const struct lg_plan_text *plan;
    struct lg_text_config keys;
    struct lg_text_encoder_config net_config;
    lg_device *device;
    lg_stream *stream;
    lg_text_encoder *net;
    lg_window *window;
    const void *weights[LG_TEXT_SHARDS_MAX];
    lg_tensor ids, length;
    lg_tensor ends;           // (B) i32, lg_text_io; LG_NONE without a pooled value
    lg_tensor states, pooled; // (B, L, E), (B, P); LG_NONE where they are not wanted
    int32_t *host_ids, *host_length, *host_ends; // (B, L), (B), (B)
    lg_stage_memo memo;
};

/* With weights as the keys say. */
static int load_config(const struct lg_text_config *keys, struct lg_text_encoder_config *ret)
{
    LG_TRY(lg_text_encoder_config_load(keys->model, ret));
    ret->storage = lg_storage_of(keys->storage);
    return 0;
}

static int shard_bytes(const struct text *x, int shard, size_t *ret)
{
    lg_params t;
    LG_TRY(lg_text_encoder_params(&x->net_config, shard, x->plan->shards, &t));
    *ret = lg_stored_bytes(&t, lg_device_dtype(x->device));
    lg_params_free(&t);
    return 0;
}

/* The model's row for this text. */
static struct lg_text_config keys_of(const lg_config *c, lg_role role)
{
    struct lg_text_config text[LG_TEXTS_MAX];
    const int n = lg_config_texts(c, text);
    for (int k = 0; k < n; k++)
        if (text[k].role == role) return text[k];
    LG_ASSERT(!"a text of the model");
    return text[0];
}

/* Bytes of what is made of a caption. */
static size_t caption_bytes(const lg_plan *p, const struct lg_plan_text *t)
{
    return ((size_t)t->length * (size_t)t->dim + (size_t)t->pooled) * (size_t)p->element_bytes;
}

static struct lg_text_encoder_shape shape_of(const struct lg_plan_text *t,
                                             const struct lg_text_config *keys)
{
    struct lg_text_encoder_shape shape = {.batch = t->chunk, .length = t->length};
    if (t->dim) shape.outputs |= LG_TEXT_BIT(keys->info->states);
    if (t->pooled) shape.outputs |= LG_TEXT_BIT(keys->info->pooled);
    return shape;
}

enum { LINES_OF_ITEM = 4 }; /* with data.caption = "random": of more, some are encoded again */

/* What is made of a caption, keyed by ids and length. Tags in another order are another caption. */
static struct lg_stage_memo_options memo_of(const lg_config *c, const lg_plan *p,
                                            const struct lg_plan_text *t,
                                            const struct lg_text_config *keys)
{
    return (struct lg_stage_memo_options){.role = keys->section,
                                          .size = keys->memo,
                                          .bytes = caption_bytes(p, t),
                                          .of_item = c->data_shuffle_tags ? 0
                                                     : strcmp(c->data_caption, "random")
                                                         ? 1
                                                         : LINES_OF_ITEM};
}

/* What an instance computes with: net, ids, lengths, ends and results of a chunk. */
static int private_bytes(const lg_plan *p, const struct text *x, size_t *ret)
{
    const struct lg_plan_text *t = x->plan;
    const size_t B = (size_t)t->chunk, L = (size_t)t->length;
    const struct lg_text_encoder_shape shape = shape_of(t, &x->keys);
    size_t net = 0;
    LG_TRY(lg_text_encoder_plan(x->device, &x->net_config, &shape, &net));
    *ret = net + B * (L + 1 + (t->pooled > 0)) * sizeof(int32_t) + B * caption_bytes(p, t);
    return 0;
}

/* A region that several instances name counts once. */
static void add_copy(const lg_config *c, lg_role role, int k, int instance, size_t bytes,
                     struct lg_stage_bytes *rows, int *n)
{
    const int gpu = lg_plan_gpu(c, role, instance);
    for (int i = 0; i < instance; i++)
        if (lg_plan_gpu(c, role, i) == gpu) return;
    snprintf(rows[*n].name, sizeof rows[*n].name, "%s/%d/weights/%d", lg_text_keys(c, role).section,
             k, gpu);
    lg_stage_device_name(c, role, instance, rows[*n].device);
    rows[(*n)++].bytes = bytes;
}
/* Has an instance its GPU where the shard has? Where GPUs are apart, nobody else makes or reads it there. */
static bool has_reader(const lg_config *c, const lg_plan *p, lg_role role, int shard)
{
    if (!p->apart) return true;
    for (int i = 0; i < p->instances[role]; i++)
        if (lg_plan_gpu(c, role, i) == lg_plan_gpu(c, role, shard)) return true;
    return false;
}

/* On a device that is planned with. */
static int weight_bytes(const lg_config *c, const lg_plan *p, struct text *x,
                        size_t ret_shard[LG_TEXT_SHARDS_MAX], size_t *ret_private)
{
    int rc = 0;
    LG_TRY(lg_stage_plan_device(c, p, x->plan->role, 0, &x->device));
    for (int k = 0; rc == 0 && k < x->plan->shards; k++) rc = shard_bytes(x, k, &ret_shard[k]);
    if (rc == 0) rc = private_bytes(p, x, ret_private);
    lg_device_close(&x->device);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int check_files(const lg_plan *p, const struct text *x)
{
    const struct lg_text_range none = {.shards = x->plan->shards};
    char key[LG_REGION_NAME_BYTES];
    if (p->is_described) return 0;
    snprintf(key, sizeof key, "%s.model", x->keys.section);
    return lg_stage_error_of_key(
        key, lg_text_encoder_load_range(&x->net_config, x->keys.model, &none, NULL));
}

static int text_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                      struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    const int k_text = lg_plan_text_of(p, role), instances = p->instances[role];
    size_t net = 0, shard[LG_TEXT_SHARDS_MAX];
    int n = 0;
    *ret_n = 0;
    if (k_text < 0) return 0;
    const struct lg_plan_text *t = &p->text[k_text];
    const struct lg_text_config keys = keys_of(c, role);
    struct text x = {.plan = t, .keys = keys};
    LG_ASSERT(t->shards * (p->apart ? instances : 1) + instances + 1 <= cap);
    LG_TRY(load_config(&keys, &x.net_config));
    LG_TRY(check_files(p, &x));
    LG_TRY(weight_bytes(c, p, &x, shard, &net));
    size_t remote[LG_INSTANCES_MAX] = {0}; /* copies of shards on other GPUs */
    for (int k = 0; k < t->shards; k++) {
        if (has_reader(c, p, role, k)) {
            snprintf(rows[n].name, sizeof rows[n].name, "%s/%d/weights", keys.section, k);
            lg_stage_device_name(c, role, k, rows[n].device);
            rows[n++].bytes = shard[k];
        }
        for (int i = 0; i < instances; i++) {
            if (lg_plan_gpu(c, role, i) == lg_plan_gpu(c, role, k)) continue;
            if (p->apart)
                add_copy(c, role, k, i, shard[k], rows, &n);
            else
                remote[i] += shard[k];
        }
    }
    for (int i = 0; i < instances; i++) {
        snprintf(rows[n].name, sizeof rows[n].name, "private");
        lg_stage_device_name(c, role, i, rows[n].device);
        rows[n].processes = 1;
        rows[n++].bytes = net + remote[i];
    }
    const struct lg_stage_memo_options memo = memo_of(c, p, t, &keys);
    snprintf(rows[n].name, sizeof rows[n].name, "memo/%s", keys.section);
    if ((rows[n].bytes = lg_stage_memo_bytes(&memo))) n++;
    *ret_n = n;
    return 0;
}

static int load_shard(lg_stage *st, size_t first, size_t count, float *ret, void *arg)
{
    const struct text *x = st->state;
    const struct lg_text_range range = {
        .shard = *(int *)arg, .shards = x->plan->shards, .first = first, .count = count};
    if (!first)
        lg_log(LG_INFO, "reading shard %d of %d from %s", range.shard, range.shards, x->keys.model);
    return lg_text_encoder_load_range(&x->net_config, x->keys.model, &range, ret);
}

/* Shard k lies on the GPU of instance k. From another GPU it is copied once, at the start: a product
 * reads its weights many times over, which the link between GPUs would slow down. Where GPUs do not reach each other
 * (the plan is apart) each has a region of its own for it, text/<k>/weights/<GPU>, which its instances fill. */
static int open_shard(lg_stage *st, struct text *x, int k)
{
    lg_params table;
    lg_region *r;
    LG_TRY(lg_text_encoder_params(&x->net_config, k, x->plan->shards, &table));
    const size_t bytes = lg_stored_bytes(&table, lg_device_dtype(x->device));
    const int gpu = lg_plan_gpu(st->config, st->role, st->index);
    const bool is_near = lg_plan_gpu(st->config, st->role, k) == gpu;
    struct lg_stage_memory m = {.bytes = bytes, .device = x->device, .role = st->role, .index = k};
    int rc;
    if (st->plan.apart && !is_near) {
        m.index = st->index;
        rc = lg_stage_region(st, &m, &r, "%s/%d/weights/%d", x->keys.section, k, gpu);
    } else {
        rc = lg_stage_region(st, &m, &r, "%s/%d/weights", x->keys.section, k);
    }
    if (rc == 0)
        rc = lg_stored_fill(
            st, r,
            &(struct lg_stored_fill){
                .device = x->device, .table = &table, .load = load_shard, .arg = &k});
    lg_params_free(&table);
    LG_TRY(rc);
    x->weights[k] = r->payload;
    if (st->plan.apart || is_near) return 0;
    void *copy;
    LG_TRY(lg_device_alloc(x->device, bytes, &copy));
    lg_stream_copy(x->stream, copy, r->payload, bytes);
    lg_stream_sync(x->stream);
    x->weights[k] = copy;
    return 0;
}

static int alloc(const struct text *x, lg_tensor *t)
{
    return lg_device_alloc(x->device, lg_tensor_bytes(t), &t->data);
}

static int open_tensors(struct text *x)
{
    const struct lg_plan_text *t = x->plan;
    const int64_t B = t->chunk, L = t->length;
    const lg_dtype type = lg_device_dtype(x->device);
    x->ids = lg_t2(NULL, LG_I32, B, L);
    x->length = lg_t1(NULL, LG_I32, B);
    LG_TRY(alloc(x, &x->ids));
    LG_TRY(alloc(x, &x->length));
    if (t->dim) {
        x->states = lg_t3(NULL, type, B, L, t->dim);
        LG_TRY(alloc(x, &x->states));
    }
    if (t->pooled) {
        x->ends = lg_t1(NULL, LG_I32, B);
        x->pooled = lg_t2(NULL, type, B, t->pooled);
        LG_TRY(alloc(x, &x->ends));
        LG_TRY(alloc(x, &x->pooled));
    }
    x->host_ids = calloc((size_t)(B * L), sizeof(int32_t));
    x->host_length = calloc((size_t)B, sizeof(int32_t));
    x->host_ends = calloc((size_t)B, sizeof(int32_t));
    LG_ASSERT(x->host_ids && x->host_length && x->host_ends);
    return 0;
}

static int text_open(lg_stage *st)
{
    struct text *x = calloc(1, sizeof *x);
    LG_ASSERT(x);
    st->state = x;
    x->k = lg_plan_text_of(&st->plan, st->role);
    if (x->k < 0) return LG_FAIL(LG_ERR_USAGE, "this run has no %s", lg_role_name(st->role));
    x->plan = &st->plan.text[x->k];
    x->keys = keys_of(st->config, st->role);
    const int shards = x->plan->shards;
    LG_ASSERT(shards <= LG_TEXT_SHARDS_MAX);
    LG_TRY(load_config(&x->keys, &x->net_config));
    LG_TRY(lg_stage_device(st, st->role, st->index, &x->device));
    LG_TRY(lg_stage_window(st, x->device, &x->window));
    LG_TRY(lg_stream_open(x->device, &x->stream));
    /* One's own shard first, so that instances that start together read different files' parts. */
    for (int i = 0; i < shards; i++) LG_TRY(open_shard(st, x, (st->index + i) % shards));
    const struct lg_text_encoder_shape shape = shape_of(x->plan, &x->keys);
    LG_TRY(lg_text_encoder_open(x->device, &x->net_config, &shape, shards, &x->net));
    LG_TRY(open_tensors(x));
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
static int gather(struct text *x, const struct lg_claim *claim, bool *wanted)
{
    lg_window *w = x->window;
    const int L = x->plan->length;
    int n_wanted = 0;
    for (uint64_t i = 0; i < claim->count; i++) {
        int32_t *ids = x->host_ids + i * (uint64_t)L;
        wanted[i] = lg_window_wanted(w, claim, lg_field_text(x->k), claim->n + i) &&
                    lg_window_has_place(w, claim->n + i);
        memset(ids, 0, (size_t)L * sizeof *ids);
        ids[0] = 1;
        x->host_length[i] = 1;
        if (!wanted[i]) continue;
        memcpy(ids, lg_window_tokens(w, x->k, claim->n + i), (size_t)L * sizeof *ids);
        x->host_length[i] = x->keys.info->padding == LG_PADDING_MASKED
                                ? lg_window_slot(w, claim->n + i)->text_length[x->k]
                                : L;
        n_wanted++;
    }
    return n_wanted;
}

/* The row of each caption's end among all B L. */
static void find_ends(struct text *x)
{
    const int B = x->plan->chunk, L = x->plan->length;
    for (int i = 0; i < B; i++)
        x->host_ends[i] =
            i * L + lg_clip_end(&x->net_config.clip, x->host_ids + (size_t)i * (size_t)L, L);
    lg_stream_upload(x->stream, x->ends.data, x->host_ends, lg_tensor_bytes(&x->ends));
}

static void run_net(struct text *x)
{
    struct lg_text_io io = {.ids = x->ids, .length = x->length};
    lg_stream_upload(x->stream, x->ids.data, x->host_ids, lg_tensor_bytes(&x->ids));
    lg_stream_upload(x->stream, x->length.data, x->host_length, lg_tensor_bytes(&x->length));
    if (x->plan->dim) io.out[x->keys.info->states] = x->states;
    if (x->plan->pooled) {
        find_ends(x);
        io.ends = x->ends;
        io.out[x->keys.info->pooled] = x->pooled;
    }
    lg_text_encoder_forward(x->net, x->stream, x->weights, &io);
}

/* A caption's result: states, then the pooled value, each where it lies in the chunk and in the window. */
struct part {
    const uint8_t *made;
    uint8_t *to;
    size_t bytes;
};
enum { PARTS = 2 };

static void parts_of(const struct text *x, uint64_t row, uint64_t n, struct part ret[PARTS])
{
    const lg_window *w = x->window;
    const struct lg_window_text *t = &w->g.text[x->k];
    ret[0] = ret[1] = (struct part){0};
    if (t->states_bytes)
        ret[0] = (struct part){(const uint8_t *)x->states.data + row * t->states_bytes,
                               lg_window_states(w, x->k, n), t->states_bytes};
    if (t->pooled_bytes)
        ret[1] = (struct part){(const uint8_t *)x->pooled.data + row * t->pooled_bytes,
                               lg_window_pooled(w, x->k, n), t->pooled_bytes};
}

/* Captions that nobody has encoded yet are encoded, with the whole chunk; found[i]: what is remembered of row i. */
static void encode(struct text *x, const struct lg_claim *claim, const bool *wanted,
                   const void *const *found)
{
    uint8_t *kept[CHUNK_MAX];
    struct part part[PARTS];
    run_net(x);
    for (uint64_t i = 0; i < claim->count; i++) {
        size_t at = 0;
        kept[i] = wanted[i] && !found[i] ? lg_memo_begin(&x->memo.table, key_of(x, i)) : NULL;
        if (!wanted[i]) continue;
        parts_of(x, i, claim->n + i, part);
        for (int k = 0; k < PARTS; at += part[k++].bytes) {
            if (!part[k].bytes) continue;
            lg_stream_copy(x->stream, part[k].to, part[k].made, part[k].bytes);
            if (kept[i]) lg_stream_download(x->stream, kept[i] + at, part[k].made, part[k].bytes);
        }
    }
    lg_stream_sync(x->stream);
    for (uint64_t i = 0; i < claim->count; i++)
        if (kept[i]) lg_memo_end(&x->memo.table, kept[i]);
}

static void copy_found(struct text *x, const struct lg_claim *claim, const bool *wanted,
                       const void *const *found)
{
    struct part part[PARTS];
    for (uint64_t i = 0; i < claim->count; i++) {
        const uint8_t *from = found[i];
        if (!wanted[i]) continue;
        parts_of(x, i, claim->n + i, part);
        for (int k = 0; k < PARTS; from += part[k++].bytes)
            if (part[k].bytes) lg_stream_upload(x->stream, part[k].to, from, part[k].bytes);
    }
    lg_stream_sync(x->stream);
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
    const struct lg_stage_memo_options memo = memo_of(st->config, &st->plan, x->plan, &x->keys);
    const lg_field field = lg_field_text(x->k);
    uint64_t end = lg_stage_end(st);
    lg_turn_begin(&st->turn); /* before the claim: what waits for a turn is nobody's yet */
    int rc = lg_window_claim(w, st->board, st->me, field, 1u << LG_FIELD_SOURCE, end, &claim);
    if (rc < 0) lg_turn_drop(&st->turn);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    lg_log_set_step((int64_t)(claim.n / st->board->s->batch));
    LG_ASSERT(claim.count <= CHUNK_MAX);
    if (lg_window_publish_absent(w, field, &claim)) {
        lg_turn_drop(&st->turn);
        lg_bus_notify(st->bus);
        return LG_STEP_WORKED;
    }
    if (!x->memo.is_open) lg_stage_memo_open(st, &memo, &x->memo);
    int n = gather(x, &claim, wanted);
    if (look(x, &claim, wanted, found))
        copy_found(x, &claim, wanted, found);
    else
        encode(x, &claim, wanted, found);
    lg_turn_end(&st->turn);
    for (uint64_t i = claim.from; i < claim.to; i++)
        if (lg_window_wanted(w, &claim, field, i)) lg_window_publish(w, field, i);
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
    free(x->host_ends);
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
