/* What a rank allocates, in bytes; see rank_memory.h. */
#include "stages/trainer/rank_memory.h"
#include "base/bytes.h"
#include "config/manifest.h"
#include "stages/trainer/frozen.h"
#include "stages/trainer/gradients.h"
#include "stages/trainer/ring.h"
#include "stages/trainer/working.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t lg_rank_height(const struct lg_batch_options *batch)
{
    return batch->band.height ? batch->band.height : lg_denoiser_rows(batch->net);
}

struct lg_denoiser_mode lg_rank_mode(const lg_config *c, const lg_plan *p, int rank)
{
    const bool gathers = !strcmp(c->parallel_sp_kind, "fastseq");
    return (struct lg_denoiser_mode){
        .batch = (int)p->micro_batch,
        .train = true,
        .recompute = (const char *const *)c->memory_recompute.v,
        .offload = c->memory_offload_activations,
        .offload_keep = (int)c->memory_offload_keep,
        .mlp_chunks = (int)c->memory_mlp_chunks,
        .frame_times = c->trainer_clean_first_frame > 0,
        .lends = lg_gradients_lends(p),
        .places_weights = lg_working_lies_in_net(c, p),
        .ahead = true,
        .training = lg_training_of(c),
        .sequence = {.rank = rank % p->sequence,
                     .degree = p->sequence,
                     .kind = gathers ? LG_SEQUENCE_FASTSEQ : LG_SEQUENCE_ULYSSES}};
}

static int find_batch(const lg_config *c, const lg_plan *p, const struct lg_denoiser_config *net,
                      const struct lg_denoiser_mode *mode, struct lg_batch_options *ret)
{
    *ret = (struct lg_batch_options){.net = net,
                                     .size = mode->batch,
                                     .guidance = c->model_guidance,
                                     .factor = p->image_height / p->latent_height,
                                     .latents_on_host = lg_stage_latents_on_host(p),
                                     .texts_on_host = p->apart,
                                     .frame_times = mode->frame_times};
    if (lg_sequence_is_split(&mode->sequence))
        LG_TRY(lg_denoiser_band(net, &mode->sequence, &ret->band));
    return 0;
}

int lg_rank_nets_compile(lg_device *d, const lg_config *c, const lg_plan *p, int rank,
                         const struct lg_denoiser_config *square, struct lg_rank_nets *ret)
{
    ret->n = 0;
    for (int k = 0; k < lg_plan_shapes(p); k++) {
        const struct lg_plan_shape shape = lg_plan_shape(p, k), first = lg_plan_shape(p, 0);
        struct lg_denoiser_mode mode = lg_rank_mode(c, p, rank);
        mode.batch = shape.rows;
        ret->config[k] = *square;
        ret->config[k].sample_size = square->sample_size ? square->sample_size : square->height;
        ret->config[k].frames = shape.latent_frames;
        ret->config[k].height = shape.latent_height;
        ret->config[k].width = shape.latent_width;
        LG_TRY(find_batch(c, p, &ret->config[k], &mode, &ret->batch[k]));
        LG_TRY(lg_denoiser_compile(d, &ret->config[k], &mode, &ret->net[k]));
        ret->n = k + 1;
        if (!lg_denoiser_same_events(ret->net[0], ret->net[k]))
            return LG_FAIL(LG_ERR_CONFIG,
                           "memory.recompute: with this budget the net of bucket %dx%d uses its "
                           "weights in another order than that of %dx%d: choose otherwise what is "
                           "recomputed, as \"norms\" or \"block\"%s",
                           shape.height, shape.width, first.height, first.width,
                           c->memory_mlp_chunks > 1
                               ? ", or set memory.mlp_chunks to 1, if one of them has one token"
                               : "");
    }
    return 0;
}

void lg_rank_nets_close(struct lg_rank_nets *nets)
{
    while (nets->n) lg_denoiser_close(&nets->net[--nets->n]);
}

size_t lg_rank_prediction(const struct lg_rank_nets *nets)
{
    int64_t most = 0;
    for (int k = 0; k < nets->n; k++) {
        const struct lg_denoiser_config *c = &nets->config[k];
        const int64_t one =
            lg_denoiser_out_channels(c) * lg_rank_height(&nets->batch[k]) * c->width;
        most = LG_MAX(most, nets->batch[k].size * one);
    }
    return (size_t)most;
}

/* What one rank has. */
struct rank_bytes {
    struct lg_gradients_bytes gradients;
    struct lg_working_bytes working;
    struct lg_transfer_bytes transfer;
    size_t shard, all; /* elements: its own, all that are trained */
    size_t sums;       /* additions of all ranks' gradients in a step */
    size_t own, host, exchanged, moments, activations;
    char note[sizeof((struct lg_stage_bytes *)NULL)->note];
};

static void add_text(char *to, size_t room, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void add_text(char *to, size_t room, const char *fmt, ...)
{
    const size_t n = strlen(to);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(to + n, room - n, fmt, ap);
    va_end(ap);
}

/* What crosses a rank's bus in a step of a plan that is apart: its gradient down and its shard's of all ranks up, its new
 * weights down and all of the group's up, what is exchanged down and up, samples up. */
static void say_host_traffic(const lg_plan *p, const struct rank_bytes *r, size_t element,
                             size_t exchanged, char *to, size_t room)
{
    const size_t ranks = (size_t)p->instances[LG_ROLE_trainer], sp = (size_t)p->sequence;
    const size_t gradients = ranks > 1 ? r->sums * sizeof(float) : 0;
    const size_t sent = sp > 1 ? exchanged / (sp - 1) * sp : 0; /* its own part, too */
    struct lg_window_geometry g;
    size_t sample, down, up;
    char a[32], b[32];
    lg_window_geometry_of(p, &g);
    sample = g.latent_bytes;
    for (int k = 0; k < p->n_texts; k++) sample += g.text[k].states_bytes + g.text[k].pooled_bytes;
    down = gradients * r->all + sent + (p->shards > 1 ? r->shard * element : 0);
    up = gradients * r->shard * ranks + sent + (p->shards > 1 ? r->working.traffic : 0) +
         sample * (size_t)p->rank_batch;
    add_text(to, room,
             "\nthrough host memory, of each rank in a step: %s down, %s up (parallel.exchange)",
             lg_bytes_text(down, a), lg_bytes_text(up, b));
}

/* What a rank reads from others and writes to them in a step. */
static void say_traffic(const lg_plan *p, const struct rank_bytes *r, size_t element,
                        size_t exchanged, char *to, size_t room)
{
    const size_t others = (size_t)p->instances[LG_ROLE_trainer] - 1;
    char a[32], b[32];
    if (p->apart) {
        say_host_traffic(p, r, element, exchanged, to, room);
        return;
    }
    if (!others) return;
    add_text(to, room, "\nbetween ranks, of each in a step: %s of gradients, %s of weights",
             lg_bytes_text(others * r->shard * sizeof(float) * r->sums, a),
             lg_bytes_text(r->working.traffic, b));
    if (exchanged) add_text(to, room, ", %s within sequence groups", lg_bytes_text(exchanged, a));
}

static struct rank_bytes bytes_of(const lg_config *c, const lg_plan *p, lg_device *d,
                                  const struct lg_rank_nets *nets, const lg_params *t, size_t batch,
                                  int shard)
{
    const lg_denoiser *net = nets->net[0];
    const struct lg_denoiser_bytes all = lg_denoiser_bytes_of_all(nets->net, nets->n), *b = &all;
    struct rank_bytes r = {
        .host = b->host, .exchanged = b->exchanged, .activations = b->activations};
    const size_t count = lg_shard_count(t, shard, p->shards), room = sizeof r.note;
    char text[6][32];
    lg_moments_layout moments = lg_moments_layout_of(t, shard, p->shards);
    const size_t micros = (size_t)(p->rank_batch / p->micro_batch);
    const size_t element = lg_dtype_bytes(lg_device_dtype(d));
    r.shard = count;
    r.all = t->count;
    r.sums = p->scatters ? micros : 1;
    r.moments = lg_moments_bytes(&moments);
    lg_moments_layout_free(&moments);
    r.gradients = lg_gradients_bytes_of(p, t, net, count);
    if (lg_host_way_of(c) == LG_HOST_WAY_STAGED) r.gradients.own += r.gradients.staged;
    r.working = lg_working_bytes_of(c, p, lg_device_dtype(d), t, net, shard);
    if (c->memory_offload_optimizer) r.transfer = lg_transfer_bytes_of(count);
    r.own = b->activations + b->scratch + r.gradients.own + r.working.gathered + batch +
            r.transfer.device + (p->apart ? r.exchanged : 0);
    add_text(r.note, room,
             "of a rank: activations %s, workspace %s, gradients %s, "
             "gathered weights %s, inputs %s",
             lg_bytes_text(b->activations, text[0]), lg_bytes_text(b->scratch, text[1]),
             lg_bytes_text(r.gradients.own, text[2]), lg_bytes_text(r.working.gathered, text[3]),
             lg_bytes_text(batch, text[4]));
    if (c->memory_offload_optimizer)
        add_text(r.note, room, ", weights on their way %s; over the bus in a step: %s each way",
                 lg_bytes_text(r.transfer.device, text[0]),
                 lg_bytes_text(count * sizeof(float), text[5]));
    if (nets->n > 1)
        add_text(r.note, room, "\nactivations, workspace and inputs: of the largest of %d shapes",
                 nets->n);
    if (b->lent)
        add_text(r.note, room, "\nmore activations, where gradients lie later: %s",
                 lg_bytes_text(b->lent, text[0]));
    if (b->recomputed[0]) add_text(r.note, room, "\nrecomputed: %s", b->recomputed);
    say_traffic(p, &r, element, b->traffic * micros, r.note, room);
    return r;
}

/* A hash of it, where it must be that of all ranks (gradients.h). */
static uint64_t order_of_gradients(const lg_plan *p, const lg_params *t, const lg_denoiser *net)
{
    struct lg_ring ring;
    if (!p->scatters) return 0;
    lg_ring_plan(t, net, &ring);
    const uint64_t hash = ring.hash;
    lg_ring_free(&ring);
    return hash;
}

/* Of the ranks that have the same part of the sequence; these have nets of one kind. */
static int find_bytes_of_part(const lg_config *c, const lg_plan *p, lg_device *d,
                              const struct lg_denoiser_config *config, const lg_params *t, int part,
                              struct rank_bytes *ret, uint64_t *ret_order)
{
    struct lg_rank_nets *nets = calloc(1, sizeof *nets);
    LG_ASSERT(nets);
    int rc = lg_rank_nets_compile(d, c, p, part, config, nets);
    if (rc == 0) {
        const size_t batch = lg_rank_prediction(nets) * lg_dtype_bytes(lg_device_dtype(d)) +
                             lg_batch_bytes(d, nets->batch, nets->n);
        for (int r = part; r < p->instances[LG_ROLE_trainer]; r += p->sequence)
            ret[r] = bytes_of(c, p, d, nets, t, batch, r % p->shards);
        *ret_order = order_of_gradients(p, t, nets->net[0]);
    }
    lg_rank_nets_close(nets);
    free(nets);
    return rc;
}

static int find_bytes(const lg_config *c, const lg_plan *p, const struct lg_denoiser_config *config,
                      const lg_params *t, struct rank_bytes *ret)
{
    lg_device *d;
    int rc = 0;
    LG_TRY(lg_stage_plan_device(c, p, LG_ROLE_trainer, 0, &d));
    uint64_t order = 0, first = 0;
    for (int part = 0; part < p->sequence && rc == 0; part++) {
        rc = find_bytes_of_part(c, p, d, config, t, part, ret, &order);
        if (part == 0) first = order;
        if (rc == 0 && order != first && c->memory_mlp_chunks > 1)
            rc = LG_FAIL(LG_ERR_CONFIG,
                         "memory.mlp_chunks = %d: rank %d's part of the sequence is one token, of "
                         "which there are no chunks, so "
                         "that its gradients leave in another order than rank 0's: set it to 1",
                         (int)c->memory_mlp_chunks, part);
    }
    lg_device_close(&d);
    return rc;
}

enum { ROWS = 11 }; /* of a rank */

struct place {
    int rank;
    char device[LG_DEVICE_NAME_BYTES];
};

/* A row for what there is. */
static void add_row(struct lg_stage_bytes *rows, int *n, size_t bytes, const struct place *p,
                    const char *what)
{
    if (!bytes) return;
    snprintf(rows[*n].name, sizeof rows[*n].name, "trainer/%d/%s", p->rank, what);
    memcpy(rows[*n].device, p->device, sizeof p->device);
    rows[(*n)++].bytes = bytes;
}

static void add_rank(const lg_config *c, const lg_plan *p, const struct rank_bytes *b, int rank,
                     struct lg_stage_bytes *rows, int *n)
{
    const size_t side = lg_trainer_state_bytes(b->shard);
    struct place state = {.rank = rank}, own = state, host = {rank, "host"};
    lg_state_device_name(c, rank, state.device);
    lg_stage_device_name(c, LG_ROLE_trainer, rank, own.device);
    /* Where those that others read lie. */
    const struct place *grads = p->apart && p->instances[LG_ROLE_trainer] > 1 ? &host : &own;
    const struct place *weights = p->apart && p->shards > 1 ? &host : &own;
    const struct place *exchanged = lg_host_way_of(c) == LG_HOST_WAY_ON_GPU ? &own : &host;
    add_row(rows, n, side, &state, "state/a");
    add_row(rows, n, side, &state, "state/b");
    add_row(rows, n, b->moments, &state, "moments");
    add_row(rows, n, b->gradients.grad, grads, "grad");
    add_row(rows, n, b->gradients.sum, &own, "sum");
    add_row(rows, n, b->gradients.host, exchanged, "outgoing");
    add_row(rows, n, b->gradients.host, exchanged, "incoming");
    add_row(rows, n, b->working.region, weights, "working");
    add_row(rows, n, b->exchanged, p->apart ? &host : &own, "exchanged");
    rows[*n] = (struct lg_stage_bytes){
        .name = "private", .processes = 1, .bytes = b->own, .activations = b->activations};
    memcpy(rows[*n].device, own.device, sizeof own.device);
    snprintf(rows[*n].note, sizeof rows[*n].note, "%s", b->note);
    (*n)++;
    add_row(rows, n, b->host, &host, "offloaded");
    add_row(rows, n, b->transfer.host, &host, "transfer");
}

/* Once on each GPU. */
static void add_frozen(const lg_config *c, size_t bytes, int rank, struct lg_stage_bytes *rows,
                       int *n)
{
    for (int r = 0; r < rank; r++)
        if (lg_frozen_place(c, r) == lg_frozen_place(c, rank)) return;
    if (!bytes) return;
    snprintf(rows[*n].name, sizeof rows[*n].name, "frozen/%d/weights", lg_frozen_place(c, rank));
    lg_stage_device_name(c, LG_ROLE_trainer, rank, rows[*n].device);
    rows[(*n)++].bytes = bytes;
}

/* Will the weights that training begins with be read? Those beside an adapter are at each start, others at a run's first. */
static bool begins(const lg_config *c)
{
    char checkpoints[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    if (!lg_config_begins_with(c)[0]) return false;
    if (lg_training_of(c).adapter.rank) return true;
    if (c->trainer_resume_from[0]) return false;
    lg_manifest *m = calloc(1, sizeof *m);
    LG_ASSERT(m);
    int rc = lg_path(checkpoints, "%s/checkpoints", c->job_dir);
    if (rc == 0) rc = lg_manifest_newest(checkpoints, c->job_name, newest, m);
    free(m);
    if (rc < 0) lg_err_clear();
    return rc == LG_ERR_NOTFOUND;
}

static int check_weights(const lg_config *c, const struct lg_denoiser_config *net,
                         const lg_params *all)
{
    const lg_params frozen = lg_params_frozen(all);
    const bool adapts = lg_training_of(c).adapter.rank;
    char dir[LG_PATH_BYTES];
    LG_TRY(lg_checkpoint_weights_dir(lg_config_begins_with(c), "ema", dir));
    return lg_denoiser_load_range(net, adapts ? &frozen : all, dir, NULL, 0, 0);
}

static int check_files(const lg_config *c, const lg_plan *p, const struct lg_denoiser_config *net,
                       const lg_params *all, const lg_params *trained)
{
    const char *key = c->trainer_init_from[0] ? "trainer.init_from" : "model.from";
    float *first;
    if (!p->is_described && begins(c))
        LG_TRY(lg_stage_error_of_key(key, check_weights(c, net, all)));
    if (!c->adapter_from[0]) return 0;
    int rc = lg_net_adapter_of(c, net, trained, &first);
    free(first);
    return rc;
}

int lg_trainer_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                     struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_denoiser_config net;
    lg_params all, params;
    int n = 0, ranks = p->instances[LG_ROLE_trainer];
    struct rank_bytes of[LG_INSTANCES_MAX];
    LG_ASSERT(cap >= ROWS * ranks);
    if (c->memory_offload_optimizer)
        LG_TRY(lg_stage_plan_host_device(c, p, role, "memory.offload_optimizer"));
    LG_TRY(lg_net_table_of(c, p, &net, &all));
    params = lg_params_trained(&all);
    int rc = find_bytes(c, p, &net, &params, of);
    for (int r = 0; r < ranks && rc == 0; r++) {
        add_rank(c, p, &of[r], r, rows, &n);
        add_frozen(c, lg_frozen_bytes(&all, p->element_bytes == 4 ? LG_F32 : LG_BF16), r, rows, &n);
    }
    if (rc == 0) rc = check_files(c, p, &net, &all, &params);
    lg_params_free(&all);
    *ret_n = n;
    return rc;
}
