/* What a rank allocates, in bytes; see rank_memory.h. */
#include "stages/trainer/rank_memory.h"
#include "stages/trainer/exchange.h"
#include <stdio.h>

struct lg_reduce_ranks_args lg_rank_reduce(int ranks, size_t count, lg_dtype sum)
{
    struct lg_reduce_ranks_args a = {.count = ranks,
                                     .y = lg_t1(NULL, sum, (int64_t)count),
                                     .sum_squares = lg_t1(NULL, LG_F64, 1)};
    for (int r = 0; r < ranks; r++) a.x[r] = a.y;
    return a;
}

int lg_rank_bytes_of(lg_device *d, size_t params, size_t shard, int ranks,
                     struct lg_rank_bytes *ret)
{
    lg_stream *dry;
    *ret = (struct lg_rank_bytes){0};
    if (ranks > 1) ret->reduced = shard * sizeof(float);
    if (!shard) return 0;
    LG_TRY(lg_stream_open_dry(d, &dry));
    struct lg_reduce_ranks_args a = lg_rank_reduce(ranks, shard, LG_F32);
    lg_reduce_ranks(dry, &a);
    ret->scratch = lg_stream_scratch_need(dry);
    lg_stream_close(&dry);
    return 0;
}

struct lg_batch_options lg_rank_batch(const lg_plan *p, const struct lg_denoiser_config *net)
{
    return (struct lg_batch_options){
        .net = net, .size = p->micro_batch, .latents_on_host = lg_stage_latents_on_host(p)};
}

static int private_bytes(const lg_config *c, const lg_plan *p, const struct lg_denoiser_config *net,
                         size_t params, lg_dtype *ret_type, size_t *ret)
{
    const int ranks = p->instances[LG_ROLE_trainer];
    struct lg_batch_options batch = lg_rank_batch(p, net);
    struct lg_denoiser_bytes bytes = {0};
    struct lg_rank_bytes own = {0};
    lg_device *d;
    LG_TRY(lg_stage_plan_device(c, p, LG_ROLE_trainer, 0, &d));
    int rc = lg_denoiser_plan(d, net, (int)p->micro_batch, true, &bytes);
    if (rc == 0) rc = lg_rank_bytes_of(d, params, lg_shard_of(params, 0, ranks).count, ranks, &own);
    size_t pred = (size_t)(p->micro_batch * net->channels * net->height * net->width) *
                  lg_dtype_bytes(lg_device_dtype(d));
    *ret_type = lg_device_dtype(d);
    *ret = bytes.activations + bytes.scratch + own.reduced + own.scratch + pred +
           lg_batch_bytes(d, &batch);
    lg_device_close(&d);
    return rc;
}

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
    size_t own;
    int n = 0, ranks = p->instances[LG_ROLE_trainer];
    LG_ASSERT(cap > 5 * ranks);
    LG_TRY(lg_net_config_of(c, p, &net));
    LG_TRY(lg_denoiser_params(&net, &params));
    int rc = private_bytes(c, p, &net, params.count, &type, &own);
    for (int r = 0; r < ranks && rc == 0; r++) {
        const int first = n;
        const size_t state = lg_trainer_state_bytes(lg_shard_of(params.count, r, ranks));
        struct lg_exchange_bytes b = lg_exchange_bytes_of(type, params.count, ranks);
        add_row(rows, &n, state, r, "state/a");
        add_row(rows, &n, state, r, "state/b");
        add_row(rows, &n, b.grad, r, "grad");
        add_row(rows, &n, b.working, r, "working");
        snprintf(rows[n].name, sizeof rows[n].name, "private");
        rows[n].processes = 1;
        rows[n++].bytes = own;
        for (int i = first; i < n; i++) lg_stage_device_name(c, LG_ROLE_trainer, r, rows[i].device);
    }
    lg_params_free(&params);
    *ret_n = n;
    return rc;
}
