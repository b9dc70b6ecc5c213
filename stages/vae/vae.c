/* The VAE stage: pixels -> mean and log-variance of the latent.
 *
 * Instances are data parallel: each claims whole chunks. The weights lie once on each device in the
 * region vae/<gpu>/weights (host: 0), filled by whoever comes first. A chunk always runs at the same padded shape (`slice`
 * rows in flight at once), in which a picture's bits depend on nothing else; so what was made of it once is remembered
 * (stages/memo.h). */
#include "base/log.h"
#include "stages/memo.h"
#include "stages/nets/autoencoder.h"
#include "stages/roles.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_MAX = 4096 }; /* schema.def */

/* What is to be done for each row of a chunk. */
struct rows {
    bool wanted[CHUNK_MAX]; /* and it has memory */
    struct lg_memo_key key[CHUNK_MAX];
    const void *found[CHUNK_MAX]; /* what is remembered of it */
    int n_wanted;
    bool all_found;
};

struct vae {
    struct lg_autoencoder_config net_config;
    lg_device *device;
    lg_stream *stream;
    lg_autoencoder *net[LG_BUCKETS_MAX]; /* by the shapes of the plan, in memory of the first */
    int n_nets;
    lg_window *window;
    const void *weights;
    void *pixels, *mean, *logvar; /* in and out of a chunk, on the device */
    lg_stage_memo memo;
    struct rows rows;
};

/* The means of a picture, or clip, then its log-variances, keyed by its pixels and their shape. */
static struct lg_stage_memo_options memo_of(const lg_config *c, const lg_plan *p)
{
    size_t most = 0;
    for (int k = 0; k < lg_plan_shapes(p); k++) {
        const struct lg_plan_shape s = lg_plan_shape(p, k);
        most = LG_MAX(most, lg_plan_shape_cells(&s));
    }
    return (struct lg_stage_memo_options){
        .role = "vae",
        .size = c->vae_memo,
        .bytes = 2 * (size_t)p->latent_channels * most * (size_t)p->element_bytes,
        .of_item = !strcmp(c->data_crop, "random") || p->frames > 1 ? 0
                   : c->data_flip                                   ? 2
                                                                    : 1};
}

/* Pictures, or clips, of shape k that a chunk holds at most. */
static int chunk_of(const lg_plan *p, int k)
{
    return p->buckets.n ? LG_MIN(p->vae_chunk, lg_plan_shape(p, k).rows) : p->vae_chunk;
}

/* Of vae.slice = "auto": bytes of activations of an instance. */
static const size_t SLICE_BYTES = (size_t)2 << 30;

static int shapes_of(lg_device *d, const lg_config *c, const lg_plan *p,
                     const struct lg_autoencoder_config *net, struct lg_autoencoder_shape *ret)
{
    for (int k = 0; k < lg_plan_shapes(p); k++) {
        const struct lg_plan_shape s = lg_plan_shape(p, k);
        const int most = s.frames > 1 ? lg_autoencoder_slice(net, s.height, s.width) : 0;
        ret[k] = (struct lg_autoencoder_shape){.half = LG_AEKL_ENCODER,
                                               .batch = chunk_of(p, k),
                                               .frames = s.frames,
                                               .height = s.height,
                                               .width = s.width,
                                               .slice = c->vae_slice ? (int)c->vae_slice : most,
                                               .tile = (int)c->vae_tile};
        if (c->vae_slice == LG_AUTO) LG_TRY(lg_autoencoder_fit_slice(d, net, SLICE_BYTES, &ret[k]));
    }
    return 0;
}

/* For people, what was chosen. */
static void say_slices(const lg_plan *p, const struct lg_autoencoder_shape *shape, char *to,
                       size_t room)
{
    int n = snprintf(to, room, "vae.slice = \"auto\":");
    for (int k = 0; k < lg_plan_shapes(p) && n < (int)room; k++) {
        const bool clip = shape[k].frames > 1;
        n += snprintf(to + n, room - (size_t)n, "%s %d of %d %s of %d x %d", k ? "," : "",
                      shape[k].slice, clip ? shape[k].frames : shape[k].batch,
                      clip ? "frames" : "pictures", shape[k].height, shape[k].width);
    }
}

static int weights_count(const struct lg_autoencoder_config *c, size_t *ret)
{
    lg_params t;
    LG_TRY(lg_autoencoder_params(c, LG_AEKL_ENCODER, &t));
    *ret = t.count;
    lg_params_free(&t);
    return 0;
}

/* Weights lie once on each GPU, filled by whoever of its instances comes first; named by the GPU. */
static int weights_place(const lg_config *c, int index)
{
    return LG_MAX(lg_plan_gpu(c, LG_ROLE_vae, index), 0);
}

/* In and out of a chunk, on the device: pixels; mean or logvar. */
static size_t chunk_bytes(const lg_plan *p, size_t ret[2])
{
    ret[0] = ret[1] = 0;
    for (int k = 0; k < lg_plan_shapes(p); k++) {
        const struct lg_plan_shape s = lg_plan_shape(p, k);
        const size_t B = (size_t)chunk_of(p, k), C = (size_t)p->latent_channels;
        ret[0] = LG_MAX(ret[0], B * 3 * lg_plan_shape_pixels(&s));
        ret[1] = LG_MAX(ret[1], B * C * lg_plan_shape_cells(&s) * (size_t)p->element_bytes);
    }
    return ret[0] + 2 * ret[1];
}

static int private_bytes(const lg_config *c, const lg_plan *p,
                         const struct lg_autoencoder_config *net, struct lg_stage_bytes *ret)
{
    struct lg_autoencoder_shape shape[LG_BUCKETS_MAX];
    lg_device *d;
    size_t part[2], bytes = 0;
    LG_TRY(lg_stage_plan_device(c, p, LG_ROLE_vae, 0, &d));
    int rc = shapes_of(d, c, p, net, shape);
    if (rc == 0) rc = lg_autoencoder_plan_all(d, net, shape, lg_plan_shapes(p), &bytes);
    lg_device_close(&d);
    LG_TRY(rc);
    if (c->vae_slice == LG_AUTO) say_slices(p, shape, ret->note, sizeof ret->note);
    ret->bytes = bytes + chunk_bytes(p, part);
    return 0;
}

/* The decoder draws samples. */
static int check_files(const lg_config *c, const lg_plan *p,
                       const struct lg_autoencoder_config *net)
{
    const lg_aekl_half half = c->sample_captions.n ? LG_AEKL_BOTH : LG_AEKL_ENCODER;
    if (p->is_described) return 0;
    return lg_stage_error_of_key("vae.model", lg_autoencoder_load(net, c->vae_model, half, NULL));
}

static int vae_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                     struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_autoencoder_config net;
    struct lg_stage_bytes own = {.name = "private", .processes = 1};
    size_t count;
    int n = 0;
    *ret_n = 0;
    if (!p->instances[LG_ROLE_vae]) return 0;
    LG_TRY(lg_autoencoder_config_load(c->vae_model, &net));
    LG_TRY(weights_count(&net, &count));
    LG_TRY(check_files(c, p, &net));
    LG_TRY(private_bytes(c, p, &net, &own));
    for (int i = 0; i < p->instances[LG_ROLE_vae]; i++) {
        bool first = true;
        for (int j = 0; j < i; j++) first = first && weights_place(c, j) != weights_place(c, i);
        LG_ASSERT(n + 2 <= cap);
        if (first) {
            snprintf(rows[n].name, sizeof rows[n].name, "vae/%d/weights", weights_place(c, i));
            lg_stage_device_name(c, LG_ROLE_vae, i, rows[n].device);
            rows[n++].bytes = count * (size_t)p->element_bytes;
        }
        rows[n] = own;
        if (i) rows[n].note[0] = 0;
        lg_stage_device_name(c, LG_ROLE_vae, i, rows[n++].device);
    }
    const struct lg_stage_memo_options memo = memo_of(c, p);
    LG_ASSERT(n < cap);
    snprintf(rows[n].name, sizeof rows[n].name, "memo/vae");
    if ((rows[n].bytes = lg_stage_memo_bytes(&memo))) n++;
    *ret_n = n;
    return 0;
}

static int load_weights(lg_stage *st, size_t first, size_t count, float *ret, void *arg)
{
    const struct vae *v = st->state;
    (void)first, (void)count, (void)arg; /* all at once */
    lg_log(LG_INFO, "reading the encoder from %s", st->config->vae_model);
    return lg_autoencoder_load(&v->net_config, st->config->vae_model, LG_AEKL_ENCODER, ret);
}

static int open_weights(lg_stage *st, struct vae *v)
{
    size_t count;
    lg_region *r;
    LG_TRY(weights_count(&v->net_config, &count));
    LG_TRY(
        lg_stage_region(st,
                        &(struct lg_stage_memory){.bytes = count * (size_t)st->plan.element_bytes,
                                                  .device = v->device,
                                                  .role = LG_ROLE_vae,
                                                  .index = st->index},
                        &r, "vae/%d/weights", weights_place(st->config, st->index)));
    LG_TRY(lg_stage_fill(
        st, r,
        &(struct lg_stage_weights){.device = v->device, .count = count, .load = load_weights}));
    v->weights = r->payload;
    return 0;
}

static int vae_open(lg_stage *st)
{
    struct vae *v = calloc(1, sizeof *v);
    LG_ASSERT(v);
    st->state = v;
    const lg_plan *p = &st->plan;
    struct lg_autoencoder_shape shape[LG_BUCKETS_MAX];
    LG_TRY(lg_autoencoder_config_load(st->config->vae_model, &v->net_config));
    LG_TRY(lg_stage_device(st, LG_ROLE_vae, st->index, &v->device));
    LG_TRY(shapes_of(v->device, st->config, p, &v->net_config, shape));
    LG_TRY(lg_stage_window(st, v->device, &v->window));
    LG_TRY(lg_device_pin(v->device, v->window->pixels,
                         v->window->g.slots * v->window->g.pixels_bytes));
    LG_TRY(open_weights(st, v));
    LG_TRY(lg_stream_open(v->device, &v->stream));
    LG_TRY(lg_autoencoder_open_all(v->device, &v->net_config, shape, lg_plan_shapes(p), v->net));
    v->n_nets = lg_plan_shapes(p);
    size_t bytes[2];
    chunk_bytes(p, bytes);
    LG_TRY(lg_device_alloc(v->device, bytes[0], &v->pixels));
    LG_TRY(lg_device_alloc(v->device, bytes[1], &v->mean));
    LG_TRY(lg_device_alloc(v->device, bytes[1], &v->logvar));
    return 0;
}

/* Samples [from, to) of the chunk that are to be filled and lie behind each other. */
static uint64_t wanted_run(lg_window *w, const struct lg_claim *claim, const bool *wanted,
                           uint64_t from, uint64_t *ret_to)
{
    uint64_t end = claim->n + claim->count;
    while (from < end && !wanted[from - claim->n]) from++;
    if (from == end) return end;
    uint64_t to = from + lg_window_run(w, from, end);
    *ret_to = from;
    while (*ret_to < to && wanted[*ret_to - claim->n]) ++*ret_to;
    return from;
}

static void run_net(lg_stage *st, struct vae *v, int k)
{
    const struct lg_plan_shape s = lg_plan_shape(&st->plan, k);
    const int64_t B = chunk_of(&st->plan, k), C = st->plan.latent_channels;
    const int64_t rows = (int64_t)s.latent_frames * s.latent_height;
    const lg_dtype type = lg_device_dtype(v->device);
    lg_autoencoder_encode(v->net[k], v->stream, v->weights,
                          lg_t4(v->pixels, LG_U8, B, 3, s.frames * s.height, s.width),
                          lg_t4(v->mean, type, B, C, rows, s.latent_width),
                          lg_t4(v->logvar, type, B, C, rows, s.latent_width));
}

/* The bytes of a picture may be those of another one of another shape. */
static struct lg_memo_key key_of(lg_window *w, uint64_t n)
{
    const struct lg_memo_key key =
        lg_memo_key_of(lg_window_pixels(w, n), lg_window_shape(w, n).pixels_bytes);
    return w->g.n_shapes ? lg_memo_key_with(key, lg_window_slot(w, n)->bucket) : key;
}

static void look(struct vae *v, const struct lg_claim *claim, struct rows *r)
{
    LG_ASSERT(claim->count <= CHUNK_MAX);
    r->n_wanted = 0;
    r->all_found = true;
    for (uint64_t i = 0; i < claim->count; i++) {
        const uint64_t n = claim->n + i;
        r->wanted[i] = lg_window_wanted(v->window, claim, LG_FIELD_LATENT, n) &&
                       lg_window_has_place(v->window, n);
        r->found[i] = NULL;
        if (!r->wanted[i]) continue;
        if (v->memo.table.entries) r->key[i] = key_of(v->window, n);
        r->found[i] = lg_stage_memo_look(&v->memo, r->key[i]);
        r->all_found = r->all_found && r->found[i];
        r->n_wanted++;
    }
}

static void bring(struct vae *v, const struct lg_claim *claim, const struct rows *r)
{
    const size_t half = lg_window_shape(v->window, claim->from).half_bytes;
    for (uint64_t i = 0; i < claim->count; i++) {
        const uint8_t *found = r->found[i];
        if (!found) continue;
        lg_stream_upload(v->stream, lg_window_mean(v->window, claim->n + i), found, half);
        lg_stream_upload(v->stream, lg_window_logvar(v->window, claim->n + i), found + half, half);
    }
    lg_stream_sync(v->stream);
}

static void keep(struct vae *v, const struct lg_claim *claim, const struct rows *r)
{
    const size_t half = lg_window_shape(v->window, claim->from).half_bytes;
    uint8_t *kept[CHUNK_MAX];
    for (uint64_t i = 0; i < claim->count; i++) {
        const bool is_new = r->wanted[i] && !r->found[i];
        kept[i] = is_new ? lg_memo_begin(&v->memo.table, r->key[i]) : NULL;
        if (!kept[i]) continue;
        lg_stream_download(v->stream, kept[i], (uint8_t *)v->mean + i * half, half);
        lg_stream_download(v->stream, kept[i] + half, (uint8_t *)v->logvar + i * half, half);
    }
    lg_stream_sync(v->stream);
    for (uint64_t i = 0; i < claim->count; i++)
        if (kept[i]) lg_memo_end(&v->memo.table, kept[i]);
}

/* Straight from the window to the device and back into the window, where the rank trains. Rows that
 * are not wanted hold what was there before: a row's bits depend on nothing but itself. */
static void encode(lg_stage *st, struct vae *v, const struct lg_claim *claim, const struct rows *r)
{
    lg_window *w = v->window;
    const struct lg_window_shape shape = lg_window_shape(w, claim->from);
    const size_t pixels = shape.pixels_bytes, half = shape.half_bytes;
    const uint64_t end = claim->n + claim->count;
    uint64_t to = 0;
    for (uint64_t n = claim->n; (n = wanted_run(w, claim, r->wanted, n, &to)) < end; n = to)
        lg_stream_upload(v->stream, (uint8_t *)v->pixels + (n - claim->n) * pixels,
                         lg_window_pixels(w, n), (to - n) * pixels);
    run_net(st, v, st->plan.buckets.n ? (int)lg_window_slot(w, claim->from)->bucket : 0);
    for (uint64_t n = claim->n; (n = wanted_run(w, claim, r->wanted, n, &to)) < end; n = to) {
        size_t at = (n - claim->n) * half, bytes = (to - n) * half;
        lg_stream_copy(v->stream, lg_window_mean(w, n), (uint8_t *)v->mean + at, bytes);
        lg_stream_copy(v->stream, lg_window_logvar(w, n), (uint8_t *)v->logvar + at, bytes);
    }
    keep(v, claim, r);
}

static int vae_step(lg_stage *st)
{
    struct vae *v = st->state;
    struct lg_claim claim;
    uint64_t end = lg_stage_end(st);
    lg_turn_begin(&st->turn); /* before the claim: what waits for a turn is nobody's yet */
    int rc = lg_window_claim(v->window, st->board, st->me, LG_FIELD_LATENT, 1u << LG_FIELD_SOURCE,
                             end, &claim);
    if (rc < 0) lg_turn_drop(&st->turn);
    if (rc == LG_ERR_BUSY || rc == LG_ERR_STOP) return LG_STEP_IDLE;
    LG_TRY(rc);
    lg_log_set_step((int64_t)(claim.n / st->board->s->batch));
    if (lg_window_publish_absent(v->window, LG_FIELD_LATENT, &claim)) {
        lg_turn_drop(&st->turn);
        lg_bus_notify(st->bus);
        return LG_STEP_WORKED;
    }
    const struct lg_stage_memo_options memo = memo_of(st->config, &st->plan);
    if (!v->memo.is_open) lg_stage_memo_open(st, &memo, &v->memo);
    look(v, &claim, &v->rows);
    if (v->rows.all_found)
        bring(v, &claim, &v->rows);
    else
        encode(st, v, &claim, &v->rows);
    lg_turn_end(&st->turn);
    for (uint64_t n = claim.from; n < claim.to; n++)
        if (lg_window_wanted(v->window, &claim, LG_FIELD_LATENT, n))
            lg_window_publish(v->window, LG_FIELD_LATENT, n);
    atomic_fetch_add_explicit(&st->row->samples, (uint64_t)v->rows.n_wanted, memory_order_relaxed);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static void vae_close(lg_stage *st)
{
    struct vae *v = st->state;
    lg_stage_memo_close(&v->memo, "pictures");
    for (int k = v->n_nets - 1; k >= 0; k--) lg_autoencoder_close(&v->net[k]);
    lg_stream_close(&v->stream);
    lg_window_close(&v->window);
    free(v);
    st->state = NULL;
}

const struct lg_stage_def lg_vae_def = {
    .role = LG_ROLE_vae,
    .bytes = vae_bytes,
    .open = vae_open,
    .step = vae_step,
    .close = vae_close,
};
