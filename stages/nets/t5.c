/* The encoder of T5; see t5.h.
 *
 * A pre-norm transformer with RMS norms, without biases, without scaling of the attention scores,
 * and with one learned bias per (head, relative position bucket), which layer 0 holds and all
 * layers add to their scores. Formulas: Raffel et al. 2020, section 2.1; v1.1 (Shazeer 2020, "GLU
 * Variants") replaces relu(x wi) by gelu(x wi_0) * (x wi_1).
 *
 * Activations lie in one arena that open() cuts once:
 *   x       the residual stream                                   (M, D), M = batch * length
 *   n       a norm's output, later a branch's output              (M, D)
 *   wide    q|k|v and the attention's output, or both halves of the feed-forward
 *   bias    the relative position bias                            (H, L, L)
 * The bias is computed in each forward: it is cheap (H L^2 against M D^2 per layer), and the
 * weights belong to the call, not to the net.
 *
 * Invariants: the table of a shard depends on (config, shard, shards) alone, and a layer's
 * arithmetic on its own weights alone, so the number of shards cannot change a bit. The net runs
 * the same shapes every time; rows of padding are computed like others. */
#include "stages/nets/t5.h"
#include "base/fs.h"
#include "stages/nets/model_config.h"
#include "stages/nets/weights.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM_MAX = 1 << 17, LAYERS_MAX = 256, VOCAB_MAX = 1 << 24, ARENA_ALIGN = 64 };
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

/* ---- the net ---- */

struct lg_t5 {
    lg_device *device;
    struct lg_t5_config c;
    lg_dtype dtype;
    int64_t batch, length;
    int shards;
    struct shard_offset at; /* each offset counts from the start of the shard that holds it */
    char *arena, *scratch;  /* NULL while planning */
    size_t x, n, wide, wide2, bias; /* bytes from the arena's start */
    size_t arena_bytes, scratch_bytes;
};

/* What one layer's forward works with. */
struct run {
    const struct lg_t5 *net;
    lg_stream *s;
    const void *weights; /* of the layer's shard; NULL on a dry stream */
    lg_tensor x, n, bias, k_length;
};

static size_t reserve(struct lg_t5 *net, int64_t elements)
{
    size_t at = net->arena_bytes, bytes = (size_t)elements * lg_dtype_bytes(net->dtype);
    net->arena_bytes += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return at;
}

static void cut_arena(struct lg_t5 *net)
{
    const struct lg_t5_config *c = &net->c;
    int64_t M = net->batch * net->length, I = (int64_t)c->heads * c->d_kv;
    net->x = reserve(net, M * c->d_model);
    net->n = reserve(net, M * c->d_model);
    net->bias = reserve(net, c->heads * net->length * net->length);
    /* Attention and feed-forward take turns in the wide buffer, each with a first and a second piece.
     */
    net->wide = reserve(net, M * LG_MAX(3 * I, (int64_t)c->d_ff));
    net->wide2 = reserve(net, M * LG_MAX(I, c->gated ? (int64_t)c->d_ff : 0));
}

static void *activation(const struct lg_t5 *net, size_t at)
{
    return net->arena ? net->arena + at : NULL;
}

static void *weight(const struct run *r, size_t offset)
{
    size_t bytes = offset * lg_dtype_bytes(r->net->dtype);
    return r->weights ? (char *)(uintptr_t)r->weights + bytes : NULL;
}

static void norm(const struct run *r, size_t w, lg_tensor y)
{
    const struct lg_t5 *net = r->net;
    lg_rms_norm_forward(r->s, &(struct lg_rms_norm_forward_args){
                                  .x = r->x,
                                  .w = lg_t1(weight(r, w), net->dtype, net->c.d_model),
                                  .y = y,
                                  .eps = net->c.eps});
}

static void linear(const struct run *r, lg_tensor x, size_t w, lg_act act, lg_tensor y)
{
    lg_linear_forward(r->s, &(struct lg_linear_forward_args){
                                .x = x,
                                .w = lg_t2(weight(r, w), r->net->dtype, y.dim[1], x.dim[1]),
                                .y = y,
                                .act = act});
}

/* x += attention(norm(x)). */
static void attend(const struct run *r, const struct layer_offset *l)
{
    const struct lg_t5 *net = r->net;
    int64_t B = net->batch, L = net->length, H = net->c.heads, d = net->c.d_kv, I = H * d;
    lg_dtype t = net->dtype;
    char *qkv = activation(net, net->wide);
    size_t offset = (size_t)I * lg_dtype_bytes(t);
    void *o = activation(net, net->wide2);
    norm(r, l->norm1, r->n);
    linear(r, r->n, l->q, LG_ACT_NONE, lg_t2(qkv, t, B * L, 3 * I));
    lg_attention_forward(r->s, &(struct lg_attention_forward_args){
                                   .q = lg_t4(qkv, t, B, L, H, d),
                                   .k = lg_t4(qkv ? qkv + offset : NULL, t, B, L, H, d),
                                   .v = lg_t4(qkv ? qkv + 2 * offset : NULL, t, B, L, H, d),
                                   .q_stride = 3 * I,
                                   .kv_stride = 3 * I,
                                   .k_length = r->k_length,
                                   .bias = r->bias,
                                   .o = lg_t4(o, t, B, L, H, d),
                                   .scale = 1.0});
    linear(r, lg_t2(o, t, B * L, I), l->o, LG_ACT_NONE, r->n);
    lg_add_forward(r->s, &(struct lg_add_forward_args){.a = r->x, .b = r->n, .y = r->x});
}

/* x += feed_forward(norm(x)). */
static void feed_forward(const struct run *r, const struct layer_offset *l)
{
    const struct lg_t5 *net = r->net;
    int64_t M = net->batch * net->length, F = net->c.d_ff;
    lg_tensor h = lg_t2(activation(net, net->wide), net->dtype, M, F);
    norm(r, l->norm2, r->n);
    linear(r, r->n, l->wi0, net->c.gated ? LG_ACT_GELU_TANH : LG_ACT_RELU, h);
    if (net->c.gated) {
        lg_tensor g = lg_t2(activation(net, net->wide2), net->dtype, M, F);
        linear(r, r->n, l->wi1, LG_ACT_NONE, g);
        lg_mul_forward(r->s, &(struct lg_mul_forward_args){.a = h, .b = g, .y = h});
    }
    linear(r, h, l->wo, LG_ACT_NONE, r->n);
    lg_add_forward(r->s, &(struct lg_add_forward_args){.a = r->x, .b = r->n, .y = r->x});
}

static void embed(const struct run *r, lg_tensor ids)
{
    const struct lg_t5 *net = r->net;
    const struct lg_t5_config *c = &net->c;
    lg_embedding_forward(
        r->s, &(struct lg_embedding_forward_args){
                  .ids = lg_t1(ids.data, LG_I32, net->batch * net->length),
                  .table = lg_t2(weight(r, net->at.embedding), net->dtype, c->vocab, c->d_model),
                  .y = r->x});
    lg_t5_bias_forward(
        r->s, &(struct lg_t5_bias_forward_args){
                  .table = lg_t2(weight(r, net->at.bias), net->dtype, c->buckets, c->heads),
                  .out = r->bias,
                  .max_distance = c->max_distance});
}

void lg_t5_forward(lg_t5 *net, lg_stream *s, const void *const *weights, lg_tensor ids,
                   lg_tensor length, lg_tensor out)
{
    const struct lg_t5_config *c = &net->c;
    int64_t B = net->batch, L = net->length, D = c->d_model;
    LG_ASSERT(ids.rank == 2 && ids.dim[0] == B && ids.dim[1] == L && ids.dtype == LG_I32);
    LG_ASSERT(out.rank == 3 && out.dim[0] == B && out.dim[1] == L && out.dim[2] == D);
    if (!lg_stream_is_dry(s)) lg_stream_set_scratch(s, net->scratch, net->scratch_bytes);
    struct run r = {
        .net = net,
        .s = s,
        .x = lg_t2(activation(net, net->x), net->dtype, B * L, D),
        .n = lg_t2(activation(net, net->n), net->dtype, B * L, D),
        .bias = lg_t3(activation(net, net->bias), net->dtype, c->heads, L, L),
        .k_length = length,
    };
    for (int shard = 0; shard < net->shards; shard++) {
        r.weights = weights ? weights[shard] : NULL;
        if (shard == 0) embed(&r, ids);
        int end = first_layer(c, shard + 1, net->shards);
        for (int i = first_layer(c, shard, net->shards); i < end; i++) {
            attend(&r, &net->at.layer[i]);
            feed_forward(&r, &net->at.layer[i]);
        }
    }
    norm(&r, net->at.final_norm, lg_t2(out.data, out.dtype, B * L, D));
}

/* A net without memory, its sizes known. */
static int plan(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
                lg_t5 **ret)
{
    LG_ASSERT(batch >= 1 && length >= 1);
    LG_TRY(check_shards(c, shards));
    lg_t5 *net = calloc(1, sizeof *net);
    if (!net) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a text encoder");
    net->device = d;
    net->c = *c;
    net->dtype = lg_device_dtype(d);
    net->batch = batch;
    net->length = length;
    net->shards = shards;
    for (int shard = 0; shard < shards; shard++) {
        lg_params t = {0};
        lay_out(c, shard, shards, &t, &net->at);
        lg_params_free(&t);
    }
    cut_arena(net);
    lg_stream *dry = NULL;
    int rc = lg_stream_open_dry(d, &dry);
    if (rc < 0) {
        free(net);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    lg_t5_forward(net, dry, NULL, lg_t2(NULL, LG_I32, batch, length), lg_t1(NULL, LG_I32, batch),
                  lg_t3(NULL, net->dtype, batch, length, c->d_model));
    net->scratch_bytes = lg_stream_scratch_need(dry);
    lg_stream_close(&dry);
    *ret = net;
    return 0;
}

int lg_t5_plan(lg_device *d, const struct lg_t5_config *c, int batch, int length, size_t *ret_bytes)
{
    lg_t5 *net = NULL;
    LG_TRY(plan(d, c, batch, length, 1, &net));
    *ret_bytes = net->arena_bytes + net->scratch_bytes;
    lg_t5_close(&net);
    return 0;
}

int lg_t5_open(lg_device *d, const struct lg_t5_config *c, int batch, int length, int shards,
               lg_t5 **ret)
{
    lg_t5 *net = NULL;
    int rc;
    LG_TRY(plan(d, c, batch, length, shards, &net));
    LG_TRY_GOTO(rc, lg_device_alloc(d, net->arena_bytes, (void **)&net->arena), fail);
    if (net->scratch_bytes)
        LG_TRY_GOTO(rc, lg_device_alloc(d, net->scratch_bytes, (void **)&net->scratch), fail);
    *ret = net;
    return 0;
fail:
    lg_t5_close(&net);
    return rc;
}

void lg_t5_close(lg_t5 **net)
{
    if (!*net) return;
    lg_device_free((*net)->device, (void **)&(*net)->arena);
    lg_device_free((*net)->device, (void **)&(*net)->scratch);
    free(*net);
    *net = NULL;
}
