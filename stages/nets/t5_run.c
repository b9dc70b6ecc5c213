/* The encoder of T5 as a net that runs; see t5.h. What it computes stands in t5.c.
 *
 * Invariants: the table of a shard depends on (config, shard, shards) alone. The net runs the same
 * shapes every time; rows of padding are computed like others. */
#include "base/fs.h"
#include "stages/nets/encoders.h"
#include "stages/nets/weights.h"
#include <stdlib.h>
#include <string.h>

static const char embedding_name[] = "shared.weight";
static const char embedding_alias[] = "encoder.embed_tokens.weight";

/* ---- parameters ---- */

/* Of all shards, each a unit. */
static int table(const struct lg_t5_config *c, int shards, lg_params *ret)
{
    const int most = LG_MIN(c->layers, (int)LG_T5_SHARDS_MAX);
    if (shards < 1 || shards > most)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%d shards of a text encoder with %d layers: 1 to %d are possible", shards,
                       c->layers, most);
    lg_net n = lg_net_declare(1);
    lg_t5_describe(&n, c, shards, lg_t1(NULL, LG_I32, 1), lg_t1(NULL, LG_I32, 1),
                   lg_t2(NULL, n.type, 1, c->d_model));
    *ret = lg_net_finish(&n);
    return 0;
}

int lg_t5_params(const struct lg_t5_config *c, int shard, int shards, lg_params *ret)
{
    lg_params all;
    LG_TRY(table(c, shards, &all));
    LG_ASSERT(shard >= 0 && shard < shards);
    *ret = lg_params_of_unit(&all, shard);
    lg_params_free(&all);
    return 0;
}

/* A checkpoint of the encoder alone may know the embedding by its other name only. */
static int name_embedding(const char *path, lg_params *t)
{
    lg_weights *w = NULL;
    LG_TRY(lg_weights_open(path, &w));
    if (!lg_weights_find(w, embedding_name) && lg_weights_find(w, embedding_alias))
        strcpy(t->p[0].name, embedding_alias);
    lg_weights_close(&w);
    return 0;
}

/* The file's names and shapes are held to those of all shards. */
int lg_t5_load(const struct lg_t5_config *c, const char *dir, int shard, int shards, float *ret)
{
    static const char *const extra[] = {"decoder.", "lm_head.", embedding_name, embedding_alias,
                                        NULL};
    char path[LG_PATH_BYTES];
    lg_params all = {0}, part = {0};
    int rc;
    LG_TRY(lg_path(path, "%s/model.safetensors", dir));
    LG_TRY_GOTO(rc, table(c, shards, &all), out);
    LG_TRY_GOTO(rc, lg_t5_params(c, shard, shards, &part), out);
    LG_TRY_GOTO(rc, name_embedding(path, &all), out);
    LG_TRY_GOTO(rc, lg_params_load(&all, path, extra, ret, all.unit[shard].first, part.count), out);
out:
    lg_params_free(&all);
    lg_params_free(&part);
    return rc;
}

/* ---- the net ---- */

enum { BOUND_IDS, BOUND_LENGTH, BOUND_OUT, BOUND_WEIGHTS }; /* from here on one a shard */

struct lg_t5 {
    lg_device *device;
    lg_program *program;
    lg_dtype dtype;
    int64_t batch, length, width;
    int shards;
    void *arena, *scratch;
};

static int make_program(const lg_t5 *net, const struct lg_t5_config *c, lg_program **ret)
{
    const int64_t M = net->batch * net->length;
    lg_params all;
    LG_TRY(table(c, net->shards, &all));
    lg_net n = lg_net_record(net->device, &all, net->batch);
    lg_tensor ids = lg_graph_bind(n.g, "ids", lg_t1(NULL, LG_I32, M));
    lg_tensor length = lg_graph_bind(n.g, "length", lg_t1(NULL, LG_I32, net->batch));
    lg_tensor out = lg_graph_bind(n.g, "out", lg_t2(NULL, n.type, M, c->d_model));
    lg_net_bind(&n);
    lg_t5_describe(&n, c, net->shards, ids, length, out);
    int rc = lg_net_compile(&n, ret);
    lg_params_free(&all);
    return rc;
}

void lg_t5_forward(lg_t5 *net, lg_stream *s, const void *const *weights, lg_tensor ids,
                   lg_tensor length, lg_tensor out)
{
    void *bound[BOUND_WEIGHTS + LG_T5_SHARDS_MAX] = {ids.data, length.data, out.data};
    LG_ASSERT(ids.rank == 2 && ids.dim[0] == net->batch && ids.dim[1] == net->length);
    LG_ASSERT(ids.dtype == LG_I32 && length.dtype == LG_I32 && out.dtype == net->dtype);
    LG_ASSERT(length.rank == 1 && length.dim[0] == net->batch && out.rank == 3);
    LG_ASSERT(out.dim[0] == net->batch && out.dim[1] == net->length && out.dim[2] == net->width);
    for (int i = 0; i < net->shards; i++) bound[BOUND_WEIGHTS + i] = (void *)(uintptr_t)weights[i];
    lg_program_run(
        net->program, s,
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound},
        LG_PROGRAM_ALL);
}

/* A net without memory, its sizes known. */
static int plan(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
                lg_t5 **ret)
{
    LG_ASSERT(batch >= 1 && length >= 1);
    lg_t5 *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a text encoder");
    *net = (lg_t5){.device = d,
                   .dtype = lg_device_dtype(d),
                   .batch = batch,
                   .length = length,
                   .width = c->d_model,
                   .shards = shards};
    int rc = make_program(net, c, &net->program);
    if (rc < 0) {
        lg_t5_close(&net);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = net;
    return 0;
}

int lg_t5_plan(lg_device *d, const struct lg_t5_config *c, int batch, int length, size_t *ret_bytes)
{
    lg_t5 *net = NULL;
    LG_TRY(plan(d, c, batch, length, 1, &net));
    *ret_bytes = lg_program_arena_bytes(net->program) + lg_program_scratch_bytes(net->program);
    lg_t5_close(&net);
    return 0;
}

int lg_t5_print(lg_device *d, const struct lg_t5_config *c, int batch, int length, FILE *to)
{
    lg_t5 *net = NULL;
    LG_TRY(plan(d, c, batch, length, 1, &net));
    lg_program_print(net->program, to);
    lg_t5_close(&net);
    return 0;
}

int lg_t5_open(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
               lg_t5 **ret)
{
    lg_t5 *net = NULL;
    int rc;
    LG_TRY(plan(d, c, batch, length, shards, &net));
    size_t arena = lg_program_arena_bytes(net->program);
    size_t scratch = lg_program_scratch_bytes(net->program);
    LG_TRY_GOTO(rc, lg_device_alloc(d, arena, &net->arena), fail);
    if (scratch) LG_TRY_GOTO(rc, lg_device_alloc(d, scratch, &net->scratch), fail);
    *ret = net;
    return 0;
fail:
    lg_t5_close(&net);
    return rc;
}

void lg_t5_close(lg_t5 **net)
{
    if (!*net) return;
    lg_device_free((*net)->device, &(*net)->arena);
    lg_device_free((*net)->device, &(*net)->scratch);
    lg_program_free(&(*net)->program);
    free(*net);
    *net = NULL;
}
