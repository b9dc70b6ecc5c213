/* What a rank allocates, in bytes; see rank_memory.h. */
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/exchange.h"
#include <stdio.h>

size_t lg_squares_count(size_t count)
{
    return (count + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
}

struct lg_rank_bytes lg_rank_bytes_of(size_t shard, int ranks)
{
    return (struct lg_rank_bytes){.reduced = ranks > 1 ? shard * sizeof(float) : 0,
                                  .squares = lg_squares_count(shard) * sizeof(double)};
}

struct lg_batch_options lg_rank_batch(const lg_plan *p, const struct lg_denoiser_config *net)
{
    return (struct lg_batch_options){
        .net = net, .size = p->micro_batch, .latents_on_host = lg_stage_latents_on_host(p)};
}

struct lg_denoiser_mode lg_rank_mode(const lg_config *c, const lg_plan *p)
{
    return (struct lg_denoiser_mode){.batch = (int)p->micro_batch,
                                     .train = true,
                                     .recompute = (const char *const *)c->memory_recompute.v,
                                     .offload = c->memory_offload_activations,
                                     .groups = (const char *const *)c->trainer_groups.v};
}

static int private_bytes(const lg_config *c, const lg_plan *p, const struct lg_denoiser_config *net,
                         size_t shard, lg_dtype *ret_type, struct lg_stage_bytes *ret,
                         size_t *ret_host)
{
    const int ranks = p->instances[LG_ROLE_trainer];
    struct lg_batch_options batch = lg_rank_batch(p, net);
    struct lg_denoiser_bytes bytes = {0};
    struct lg_rank_bytes own = lg_rank_bytes_of(shard, ranks);
    struct lg_denoiser_mode mode = lg_rank_mode(c, p);
    lg_device *d;
    LG_TRY(lg_stage_plan_device(c, p, LG_ROLE_trainer, 0, &d));
    int rc = lg_denoiser_plan(d, net, &mode, &bytes);
    size_t pred = (size_t)(p->micro_batch * net->channels * net->height * net->width) *
                  lg_dtype_bytes(lg_device_dtype(d));
    *ret_type = lg_device_dtype(d);
    ret->bytes = bytes.activations + bytes.scratch + own.reduced + own.squares + pred +
                 lg_batch_bytes(d, &batch);
    if (bytes.recomputed[0])
        snprintf(ret->note, sizeof ret->note, "recomputed: %s", bytes.recomputed);
    *ret_host = bytes.host;
    lg_device_close(&d);
    return rc;
}

enum { ROWS = 7 }; /* of a rank */

/* A row for what there is. */
static void add_row(struct lg_stage_bytes *rows, int *n, size_t bytes, int rank, const char *what)
{
    if (!bytes) return;
    snprintf(rows[*n].name, sizeof rows[*n].name, "trainer/%d/%s", rank, what);
    rows[(*n)++].bytes = bytes;
}

int lg_trainer_bytes(const lg_config *c, const lg_plan *p, struct lg_stage_bytes *rows, int cap,
                     int *ret_n)
{
    struct lg_denoiser_config net;
    lg_params params;
    lg_dtype type = LG_F32;
    struct lg_stage_bytes own = {.name = "private", .processes = 1};
    int n = 0, ranks = p->instances[LG_ROLE_trainer];
    LG_ASSERT(cap >= ROWS * ranks);
    LG_TRY(lg_net_config_of(c, p, &net));
    LG_TRY(lg_denoiser_params(&net, &params));
    size_t host = 0;
    int rc = private_bytes(c, p, &net, lg_shard_count(&params, 0, p->shards), &type, &own, &host);
    for (int r = 0; r < ranks && rc == 0; r++) {
        const int first = n;
        const size_t shard = lg_shard_count(&params, r % p->shards, p->shards);
        const size_t state = lg_trainer_state_bytes(shard);
        struct lg_exchange_bytes b = lg_exchange_bytes_of(type, params.count, p->shards);
        add_row(rows, &n, state, r, "state/a");
        add_row(rows, &n, state, r, "state/b");
        add_row(rows, &n, lg_moments_bytes(shard), r, "moments");
        add_row(rows, &n, b.grad, r, "grad");
        add_row(rows, &n, b.working, r, "working");
        rows[n++] = own;
        for (int i = first; i < n; i++) lg_stage_device_name(c, LG_ROLE_trainer, r, rows[i].device);
        const int pool = n;
        add_row(rows, &n, host, r, "offloaded");
        if (n > pool) snprintf(rows[pool].device, sizeof rows[pool].device, "host");
    }
    lg_params_free(&params);
    *ret_n = n;
    return rc;
}
