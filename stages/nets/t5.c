/* The encoder of T5; see t5.h.
 *
 * A pre-norm transformer with RMS norms, without biases, without scaling of the attention scores,
 * and with one learned bias per (head, relative position bucket), which layer 0 holds and all
 * layers add to their scores. Formulas: Raffel et al. 2020, section 2.1; v1.1 (Shazeer 2020, "GLU
 * Variants") replaces relu(x wi) by gelu(x wi_0) * (x wi_1).
 *
 * The net is a graph (kernels/graph): what follows describes the forward once, and the compiler finds where its
 * values lie. The bias is computed in each forward: it is cheap (H L^2 against M D^2 per layer), and
 * the weights belong to the call, not to the net.
 *
 * Invariants: the table of a shard depends on (config, shard, shards) alone, and a layer's
 * arithmetic on its own weights alone, so the number of shards cannot change a bit. The net runs
 * the same shapes every time; rows of padding are computed like others. */
#include "stages/nets/t5.h"
#include "base/fs.h"
#include "kernels/graph/program.h"
#include "stages/nets/model_config.h"
#include "stages/nets/weights.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM_MAX = 1 << 17, LAYERS_MAX = 256, VOCAB_MAX = 1 << 24 };
static const char embedding_name[] = "shared.weight";
static const char embedding_alias[] = "encoder.embed_tokens.weight";

/* ---- configuration ---- */

static int parse_config(const lg_model_config *m, struct lg_t5_config *c)
{
    const char *kind;
    LG_TRY(lg_model_config_string(m, "model_type", NULL, &kind));
    LG_TRY(lg_model_config_expect(m, "model_type", "t5", "a T5 text encoder"));
    LG_TRY(lg_model_config_int(m, "vocab_size", 2, VOCAB_MAX, -1, &c->vocab));
    LG_TRY(lg_model_config_int(m, "d_model", 1, DIM_MAX, -1, &c->d_model));
    LG_TRY(lg_model_config_int(m, "d_kv", 1, DIM_MAX, -1, &c->d_kv));
    LG_TRY(lg_model_config_int(m, "d_ff", 1, DIM_MAX, -1, &c->d_ff));
    LG_TRY(lg_model_config_int(m, "num_heads", 1, 4096, -1, &c->heads));
    LG_TRY(lg_model_config_int(m, "num_layers", 1, LAYERS_MAX, -1, &c->layers));
    LG_TRY(lg_model_config_int(m, "relative_attention_num_buckets", 4, 4096, 32, &c->buckets));
    LG_TRY(lg_model_config_int(m, "relative_attention_max_distance", 2, 1 << 20, 128,
                               &c->max_distance));
    if (c->buckets % 4 || c->max_distance <= c->buckets / 4)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "%s: relative_attention_num_buckets %d must be a multiple of 4 and below 4 x "
            "relative_attention_max_distance %d",
            m->path, c->buckets, c->max_distance);
    LG_TRY(lg_model_config_double(m, "layer_norm_epsilon", 1e-6, &c->eps));
    const char *ff;
    LG_TRY(lg_model_config_string(m, "feed_forward_proj", "relu", &ff));
    c->gated = !strcmp(ff, "gated-gelu");
    if (!c->gated && strcmp(ff, "relu"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"feed_forward_proj\" is \"%.64s\"; \"relu\" (v1.0) and \"gated-gelu\" "
                       "(v1.1) are supported",
                       m->path, ff);
    if (c->gated) LG_TRY(lg_model_config_expect(m, "dense_act_fn", "gelu_new", "T5 v1.1"));
    return 0;
}

int lg_t5_config_load(const char *dir, struct lg_t5_config *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/config.json", dir));
    lg_model_config m = {0};
    struct lg_t5_config c = {0};
    int rc;
    LG_TRY_GOTO(rc, lg_model_config_open(path, &m), out);
    LG_TRY_GOTO(rc, parse_config(&m, &c), out);
    *ret = c;
out:
    lg_model_config_close(&m);
    return rc;
}

/* ---- parameters ---- */

/* First layer of a shard; shard == shards gives the number of layers. */
static int first_layer(const struct lg_t5_config *c, int shard, int shards)
{
    return (int)((int64_t)c->layers * shard / shards);
}

struct layer_offset {
    size_t norm1, q, o, norm2, wi0, wi1, wo; /* elements; k and v follow q */
};
struct shard_offset {
    size_t embedding, bias, final_norm;
    struct layer_offset layer[LAYERS_MAX]; /* by the layer's number in the model */
};

static size_t add(lg_params *t, bool packed, int64_t rows, int64_t columns, const char *name)
{
    struct lg_param p = {.rank = columns ? 2 : 1, .dim = {rows, columns}};
    LG_ASSERT(strlen(name) < sizeof p.name);
    strcpy(p.name, name);
    if (!columns) p.init = LG_INIT_ONE;
    int i = packed ? lg_params_add_packed(t, &p) : lg_params_add(t, &p); /* may move t->p */
    return t->p[i].offset;
}

static size_t add_layer_param(lg_params *t, bool packed, int layer, int64_t rows, int64_t columns,
                              const char *leaf)
{
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "encoder.block.%d.layer.%s.weight", layer, leaf);
    return add(t, packed, rows, columns, name);
}

static void add_layer(const struct lg_t5_config *c, int i, lg_params *t, struct shard_offset *at)
{
    int64_t D = c->d_model, I = (int64_t)c->heads * c->d_kv, F = c->d_ff;
    struct layer_offset *l = &at->layer[i];
    l->norm1 = add_layer_param(t, false, i, D, 0, "0.layer_norm");
    if (i == 0)
        at->bias = add_layer_param(t, false, i, c->buckets, c->heads,
                                   "0.SelfAttention.relative_attention_bias");
    l->q = add_layer_param(t, false, i, I, D, "0.SelfAttention.q");
    add_layer_param(t, true, i, I, D, "0.SelfAttention.k");
    add_layer_param(t, true, i, I, D, "0.SelfAttention.v");
    l->o = add_layer_param(t, false, i, D, I, "0.SelfAttention.o");
    l->norm2 = add_layer_param(t, false, i, D, 0, "1.layer_norm");
    if (c->gated) {
        l->wi0 = add_layer_param(t, false, i, F, D, "1.DenseReluDense.wi_0");
        l->wi1 = add_layer_param(t, false, i, F, D, "1.DenseReluDense.wi_1");
    } else
        l->wi0 = add_layer_param(t, false, i, F, D, "1.DenseReluDense.wi");
    l->wo = add_layer_param(t, false, i, D, F, "1.DenseReluDense.wo");
}

/* The one description of a shard: its table and where the forward finds things in it. */
static void lay_out(const struct lg_t5_config *c, int shard, int shards, lg_params *t,
                    struct shard_offset *at)
{
    if (shard == 0) at->embedding = add(t, false, c->vocab, c->d_model, embedding_name);
    int end = first_layer(c, shard + 1, shards);
    for (int i = first_layer(c, shard, shards); i < end; i++) add_layer(c, i, t, at);
    if (shard == shards - 1)
        at->final_norm = add(t, false, c->d_model, 0, "encoder.final_layer_norm.weight");
}

static int check_shards(const struct lg_t5_config *c, int shards)
{
    if (shards < 1 || shards > LG_MIN(c->layers, (int)LG_T5_SHARDS_MAX))
        return LG_FAIL(LG_ERR_CONFIG,
                       "%d shards of a text encoder with %d layers: 1 to %d are "
                       "possible",
                       shards, c->layers, LG_MIN(c->layers, (int)LG_T5_SHARDS_MAX));
    return 0;
}

int lg_t5_params(const struct lg_t5_config *c, int shard, int shards, lg_params *ret)
{
    LG_TRY(check_shards(c, shards));
    LG_ASSERT(shard >= 0 && shard < shards);
    struct shard_offset at;
    lg_params t = {0};
    lay_out(c, shard, shards, &t, &at);
    *ret = t;
    return 0;
}

/* What else may stand in the file: the decoder, the other name of the embedding, other shards. */
struct extras {
    char layer[LAYERS_MAX][32];
    const char *list[LAYERS_MAX + 8];
};

static void list_extras(const struct lg_t5_config *c, int shard, int shards, struct extras *e)
{
    int n = 0;
    e->list[n++] = "decoder.";
    e->list[n++] = "lm_head.";
    e->list[n++] = embedding_name;
    e->list[n++] = embedding_alias;
    if (shard < shards - 1) e->list[n++] = "encoder.final_layer_norm.";
    for (int i = 0; i < c->layers; i++) {
        if (i >= first_layer(c, shard, shards) && i < first_layer(c, shard + 1, shards)) continue;
        snprintf(e->layer[i], sizeof e->layer[i], "encoder.block.%d.", i);
        e->list[n++] = e->layer[i];
    }
    e->list[n] = NULL;
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

int lg_t5_load(const struct lg_t5_config *c, const char *dir, int shard, int shards, float *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/model.safetensors", dir));
    lg_params t = {0};
    int rc;
    struct extras *e = malloc(sizeof *e);
    if (!e) return LG_FAIL(LG_ERR_NOSPACE, "no memory to load %s", path);
    LG_TRY_GOTO(rc, lg_t5_params(c, shard, shards, &t), out);
    if (shard == 0) LG_TRY_GOTO(rc, name_embedding(path, &t), out);
    list_extras(c, shard, shards, e);
    LG_TRY_GOTO(rc, lg_params_load(&t, path, e->list, ret, 0, t.count), out);
out:
    lg_params_free(&t);
    free(e);
    return rc;
}

/* ---- the forward ---- */

/* While it is described. Rows are tokens: M = batch * length. */
struct build {
    const struct lg_t5_config *c;
    lg_graph *g;
    lg_stream *s;
    lg_dtype t;
    int64_t B, L, M, D, H, d; // d: of a head
    lg_tensor length;         // (B) i32
    lg_tensor weights;        // the flat buffer of the layer's shard
    lg_tensor bias;           // (H, L, L)
};

static lg_tensor norm_into(const struct build *b, lg_tensor x, size_t w, lg_tensor y)
{
    lg_rms_norm_forward(b->s, &(struct lg_rms_norm_forward_args){
                                  .x = x,
                                  .w = lg_at(b->weights, (int64_t)w, lg_t1(NULL, b->t, b->D)),
                                  .y = y,
                                  .eps = b->c->eps});
    return y;
}

static lg_tensor norm(const struct build *b, lg_tensor x, size_t w)
{
    return norm_into(b, x, w, lg_graph_value(b->g, "norm", x));
}

static lg_tensor linear(const struct build *b, const char *name, lg_tensor x, size_t w,
                        int64_t columns, lg_act act)
{
    lg_tensor y = lg_graph_value(b->g, name, lg_t2(NULL, b->t, b->M, columns));
    lg_linear_forward(b->s,
                      &(struct lg_linear_forward_args){
                          .x = x,
                          .w = lg_at(b->weights, (int64_t)w, lg_t2(NULL, b->t, columns, x.dim[1])),
                          .y = y,
                          .act = act});
    return y;
}

static lg_tensor add_to(const struct build *b, lg_tensor x, lg_tensor branch)
{
    lg_tensor y = lg_graph_value(b->g, "x", x);
    lg_add_forward(b->s, &(struct lg_add_forward_args){.a = x, .b = branch, .y = y});
    return y;
}

static lg_tensor multiply(const struct build *b, lg_tensor x, lg_tensor gate)
{
    lg_tensor y = lg_graph_value(b->g, "gated", x);
    lg_mul_forward(b->s, &(struct lg_mul_forward_args){.a = x, .b = gate, .y = y});
    return y;
}

/* x + attention(norm(x)) */
static lg_tensor attend(const struct build *b, const struct layer_offset *l, lg_tensor x)
{
    const int64_t I = b->H * b->d;
    const lg_tensor heads = lg_t4(NULL, b->t, b->B, b->L, b->H, b->d);
    lg_tensor qkv = linear(b, "qkv", norm(b, x, l->norm1), l->q, 3 * I, LG_ACT_NONE);
    lg_tensor o = lg_graph_value(b->g, "attention", heads);
    lg_attention_forward(b->s, &(struct lg_attention_forward_args){.q = lg_at(qkv, 0, heads),
                                                                   .k = lg_at(qkv, I, heads),
                                                                   .v = lg_at(qkv, 2 * I, heads),
                                                                   .q_stride = 3 * I,
                                                                   .kv_stride = 3 * I,
                                                                   .k_length = b->length,
                                                                   .bias = b->bias,
                                                                   .o = o,
                                                                   .scale = 1.0});
    o = lg_at(o, 0, lg_t2(NULL, b->t, b->M, I));
    return add_to(b, x, linear(b, "branch", o, l->o, b->D, LG_ACT_NONE));
}

/* x + feed_forward(norm(x)) */
static lg_tensor feed_forward(const struct build *b, const struct layer_offset *l, lg_tensor x)
{
    const int64_t F = b->c->d_ff;
    lg_tensor n = norm(b, x, l->norm2);
    lg_tensor h = linear(b, "up", n, l->wi0, F, b->c->gated ? LG_ACT_GELU_TANH : LG_ACT_RELU);
    if (b->c->gated) h = multiply(b, h, linear(b, "gate", n, l->wi1, F, LG_ACT_NONE));
    return add_to(b, x, linear(b, "branch", h, l->wo, b->D, LG_ACT_NONE));
}

static lg_tensor embed(struct build *b, const struct shard_offset *at, lg_tensor ids)
{
    const struct lg_t5_config *c = b->c;
    lg_tensor x = lg_graph_value(b->g, "x", lg_t2(NULL, b->t, b->M, b->D));
    lg_embedding_forward(
        b->s, &(struct lg_embedding_forward_args){.ids = ids,
                                                  .table = lg_at(b->weights, (int64_t)at->embedding,
                                                                 lg_t2(NULL, b->t, c->vocab, b->D)),
                                                  .y = x});
    b->bias = lg_graph_value(b->g, "bias", lg_t3(NULL, b->t, b->H, b->L, b->L));
    lg_t5_bias_forward(
        b->s, &(struct lg_t5_bias_forward_args){.table = lg_at(b->weights, (int64_t)at->bias,
                                                               lg_t2(NULL, b->t, c->buckets, b->H)),
                                                .out = b->bias,
                                                .max_distance = c->max_distance});
    return x;
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

/* Shard by shard: the weights of one at a time. */
static void describe(struct build *b, const struct lg_t5_config *c, int shards)
{
    struct shard_offset at; /* each counts from the start of its shard */
    lg_tensor x = LG_NONE, ids = lg_graph_bind(b->g, "ids", lg_t1(NULL, LG_I32, b->M));
    b->length = lg_graph_bind(b->g, "length", lg_t1(NULL, LG_I32, b->B));
    lg_tensor out = lg_graph_bind(b->g, "out", lg_t2(NULL, b->t, b->M, b->D));
    for (int shard = 0; shard < shards; shard++) {
        lg_params t = {0};
        lay_out(c, shard, shards, &t, &at);
        b->weights = lg_graph_bind(b->g, "weights", lg_t1(NULL, b->t, (int64_t)t.count));
        lg_params_free(&t);
        if (shard == 0) x = embed(b, &at, ids);
        int end = first_layer(c, shard + 1, shards);
        for (int i = first_layer(c, shard, shards); i < end; i++)
            x = feed_forward(b, &at.layer[i], attend(b, &at.layer[i], x));
    }
    norm_into(b, x, at.final_norm, out);
}

static int make_program(lg_device *d, const struct lg_t5_config *c, const struct lg_t5 *net,
                        lg_program **ret)
{
    lg_graph *g = lg_graph_new(d);
    struct build b = {.c = c,
                      .g = g,
                      .s = lg_graph_stream(g),
                      .t = net->dtype,
                      .B = net->batch,
                      .L = net->length,
                      .M = net->batch * net->length,
                      .D = c->d_model,
                      .H = c->heads,
                      .d = c->d_kv};
    describe(&b, c, net->shards);
    int rc = lg_graph_compile(g, ret);
    lg_graph_free(&g);
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
        &(struct lg_program_memory){.arena = net->arena, .scratch = net->scratch, .bound = bound});
}

/* A net without memory, its sizes known. */
static int plan(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
                lg_t5 **ret)
{
    LG_ASSERT(batch >= 1 && length >= 1);
    LG_TRY(check_shards(c, shards));
    lg_t5 *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a text encoder");
    *net = (lg_t5){.device = d,
                   .dtype = lg_device_dtype(d),
                   .batch = batch,
                   .length = length,
                   .width = c->d_model,
                   .shards = shards};
    int rc = make_program(d, c, net, &net->program);
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
