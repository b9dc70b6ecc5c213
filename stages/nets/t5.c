/* The encoder of T5, described.
 *
 * A pre-norm transformer with RMS norms, without biases, without scaling of the attention scores,
 * and with one learned bias per (head, relative position bucket), which layer 0 holds and all
 * layers add to their scores. Formulas: Raffel et al. 2020, section 2.1; v1.1 (Shazeer 2020, "GLU
 * Variants") replaces relu(x wi) by gelu(x wi_0) * (x wi_1).
 *
 *     x = embedding[ids]                                              (M, D), M = B T tokens
 *     per layer: x += o(attention(q, k, v of norm(x)) with the bias)
 *                x += wo(relu(wi(norm(x)))), or the gated one
 *     out = norm(x)
 *
 * The bias is computed in each forward: it is cheap (H T^2 against M D^2 per layer), and the weights
 * belong to the call, not to the net.
 *
 * Invariant: a layer's arithmetic depends on its own weights alone, so the number of shards cannot
 * change a bit. */
#include "base/fs.h"
#include "stages/nets/encoders.h"
#include "stages/nets/model_config.h"
#include <string.h>

static lg_tensor norm_weight(lg_net *n, const struct lg_t5_config *c, const char *name)
{
    return lg_net_param(n, LG_NET_ONE, lg_t1(NULL, n->type, c->d_model), "%s.weight", name);
}

/* What all layers share. */
struct attended {
    lg_tensor length; // (B) i32
    lg_tensor bias;   // (H, T, T)
};

static lg_tensor position_bias(lg_net *n, const struct lg_t5_config *c, int64_t T)
{
    lg_tensor table = lg_net_param(n, LG_NET_NORMAL, lg_t2(NULL, n->type, c->buckets, c->heads),
                                   "SelfAttention.relative_attention_bias.weight");
    lg_tensor bias = lg_net_value(n, "bias", lg_t3(NULL, n->type, c->heads, T, T));
    LG_NET_RECORD(n, t5_bias_forward, .table = table, .out = bias, .max_distance = c->max_distance);
    return bias;
}

/* x + attention(norm(x)) */
static lg_tensor attend(lg_net *n, const struct lg_t5_config *c, lg_tensor x, struct attended *to,
                        int i)
{
    static const char *const names[] = {"q", "k", "v"};
    const int64_t I = (int64_t)c->heads * c->d_kv, T = x.dim[0] / n->batch;
    const struct lg_layer packed = {.out = 3 * I, .parts = names, .n_parts = 3, .no_bias = true};
    const struct lg_layer out = {.out = c->d_model, .no_bias = true};
    lg_net_scope(n, "encoder.block.%d.layer.0.", i);
    lg_tensor weight = norm_weight(n, c, "layer_norm"), part[3];
    if (i == 0) to->bias = position_bias(n, c, T);
    lg_tensor h = lg_net_rms_norm(n, x, weight, c->eps, LG_NONE);
    lg_tensor qkv = lg_split(lg_net_linear(n, h, packed, "SelfAttention."), 0, T);
    for (int k = 0; k < 3; k++) part[k] = lg_net_heads(qkv, c->heads, c->d_kv, k);
    h = lg_net_attention(n, (struct lg_attention){.q = part[0],
                                                  .k = part[1],
                                                  .v = part[2],
                                                  .keys = to->length,
                                                  .bias = to->bias,
                                                  .scale = 1.0});
    return lg_net_add(n, x, lg_net_linear(n, lg_net_rows(h), out, "SelfAttention.o"));
}

/* x + feed_forward(norm(x)) */
static lg_tensor feed_forward(lg_net *n, const struct lg_t5_config *c, lg_tensor x, int i)
{
    struct lg_layer up = {.out = c->d_ff, .act = LG_ACT_RELU, .no_bias = true};
    const struct lg_layer gate = {.out = c->d_ff, .no_bias = true};
    const struct lg_layer down = {.out = c->d_model, .no_bias = true};
    if (c->gated) up.act = LG_ACT_GELU_TANH;
    lg_net_scope(n, "encoder.block.%d.layer.1.", i);
    lg_tensor y = lg_net_rms_norm(n, x, norm_weight(n, c, "layer_norm"), c->eps, LG_NONE);
    lg_tensor h = lg_net_linear(n, y, up, "DenseReluDense.wi%s", c->gated ? "_0" : "");
    if (c->gated) h = lg_net_multiply(n, h, lg_net_linear(n, y, gate, "DenseReluDense.wi_1"));
    return lg_net_add(n, x, lg_net_linear(n, h, down, "DenseReluDense.wo"));
}

void lg_t5_describe(lg_net *n, const struct lg_t5_config *c, int shards,
                    const struct lg_text_io *io)
{
    struct attended to = {.length = io->length};
    lg_net_unit(n, "shard.0");
    lg_tensor x = lg_net_embedding(n, io->ids, c->vocab, c->d_model, "shared.weight");
    for (int i = 0, shard = 0; i < c->layers; i++) {
        if (i == (int64_t)c->layers * (shard + 1) / shards) lg_net_unit(n, "shard.%d", ++shard);
        x = feed_forward(n, c, attend(n, c, x, &to, i), i);
    }
    lg_net_scope(n, "encoder.");
    lg_net_rms_norm(n, x, norm_weight(n, c, "final_layer_norm"), c->eps, io->out[LG_TEXT_STATES]);
}

/* ---- its config.json ---- */

enum { DIM_MAX = 1 << 17, LAYERS_MAX = 256, VOCAB_MAX = 1 << 24 };

static int parse_config(const lg_model_config *m, void *ret)
{
    struct lg_t5_config *c = ret;
    const char *kind;
    LG_TRY(lg_model_config_string(m, "model_type", NULL, &kind));
    LG_TRY(lg_model_config_expect(m, "model_type", LG_T5_MODEL_TYPE, "a T5 text encoder"));
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
    struct lg_t5_config c = {0};
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_model_config_read(path, parse_config, &c));
    *ret = c;
    return 0;
}
