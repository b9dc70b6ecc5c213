/* The text encoder of CLIP, described.
 *
 * A pre-norm transformer with learned positions in which a token sees itself and those before it. Padding is a token
 * like others: behind a caption's end, hence seen by none of its tokens.
 *
 *     x = token_embedding[ids] + position_embedding                   (M, D), M = B T tokens
 *     per layer: x += out_proj(causal attention(q, k, v of norm1(x)))
 *                x += fc2(act(fc1(norm2(x))))
 *     states = final_norm(x);  penultimate = x in front of the last layer
 *     pooled = states of the end token;  embeds = pooled W^T
 *
 * Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", section 2.4, as
 * transformers' CLIPTextModel computes it.
 *
 * Invariant: a layer's arithmetic depends on its own weights alone, so the number of shards cannot change a bit. */
#include "stages/nets/clip.h"
#include "base/fs.h"
#include "stages/nets/encoders.h"
#include "stages/nets/model_config.h"
#include <string.h>

/* x + attention(norm(x)) */
static lg_tensor attend(lg_net *n, const struct lg_clip_config *c, lg_tensor x)
{
    static const char *const names[] = {"q_proj", "k_proj", "v_proj"};
    const int64_t T = x.dim[0] / n->batch, d = c->hidden / c->heads;
    const struct lg_layer packed = {.out = 3 * (int64_t)c->hidden, .parts = names, .n_parts = 3};
    const struct lg_layer out = {.out = c->hidden};
    lg_tensor part[3], h = lg_net_layer_norm(n, x, c->eps, LG_NONE, "layer_norm1");
    lg_tensor qkv = lg_split(lg_net_linear(n, h, packed, "self_attn."), 0, T);
    for (int k = 0; k < 3; k++) part[k] = lg_net_heads(qkv, c->heads, d, k);
    h = lg_net_attention(
        n, (struct lg_attention){.q = part[0], .k = part[1], .v = part[2], .causal = true});
    return lg_net_add(n, x, lg_net_linear(n, lg_net_rows(h), out, "self_attn.out_proj"));
}

/* x + feed_forward(norm(x)), into y. */
static void feed_forward(lg_net *n, const struct lg_clip_config *c, lg_tensor x, lg_tensor y)
{
    const struct lg_layer up = {.out = c->mlp, .act = c->act}, down = {.out = c->hidden};
    lg_tensor h = lg_net_layer_norm(n, x, c->eps, LG_NONE, "layer_norm2");
    h = lg_net_linear(n, h, up, "mlp.fc1");
    lg_net_add_into(n, x, lg_net_linear(n, h, down, "mlp.fc2"), y);
}

/* What goes into layer i. */
static lg_tensor input_of(lg_net *n, const struct lg_clip_config *c, const struct lg_text_io *io,
                          int i)
{
    lg_tensor penultimate = io->out[LG_TEXT_PENULTIMATE];
    if (i == c->layers - 1 && penultimate.rank) return lg_net_rows(penultimate);
    return lg_net_value(n, "x", lg_t2(NULL, n->type, lg_numel(&io->ids), c->hidden));
}

static void pool(lg_net *n, const struct lg_clip_config *c, const struct lg_text_io *io,
                 lg_tensor states)
{
    lg_tensor pooled = io->out[LG_TEXT_POOLED], embeds = io->out[LG_TEXT_EMBEDS];
    if (!pooled.rank && !embeds.rank) return;
    if (!pooled.rank) pooled = lg_net_value(n, "pooled", lg_t2(NULL, n->type, n->batch, c->hidden));
    LG_NET_RECORD(n, embedding_forward, .ids = io->ends, .table = states, .y = pooled);
    if (!embeds.rank) return;
    lg_tensor w = lg_net_param(n, LG_NET_NORMAL, lg_t2(NULL, n->type, c->projection, c->hidden),
                               "text_projection.weight");
    LG_NET_RECORD(n, linear_forward, .x = pooled, .w = w, .y = embeds);
}

void lg_clip_describe(lg_net *n, const struct lg_clip_config *c, int shards,
                      const struct lg_text_io *io)
{
    const int64_t T = lg_numel(&io->ids) / n->batch;
    const lg_tensor places = lg_t2(NULL, n->type, c->positions, c->hidden);
    lg_tensor states = io->out[LG_TEXT_STATES], x = input_of(n, c, io, 0);
    const bool whole = states.rank || io->out[LG_TEXT_POOLED].rank || io->out[LG_TEXT_EMBEDS].rank;
    lg_net_unit(n, "shard.0");
    lg_net_scope(n, "text_model.embeddings.");
    lg_tensor token = lg_net_embedding(n, io->ids, c->vocab, c->hidden, "token_embedding.weight");
    lg_tensor place = lg_net_param(n, LG_NET_NORMAL, places, "position_embedding.weight");
    lg_net_add_into(n, token, lg_slice(place, 0, 0, T), x);
    for (int i = 0, shard = 0; i < (whole ? c->layers : c->layers - 1); i++) {
        if (i == (int64_t)c->layers * (shard + 1) / shards) lg_net_unit(n, "shard.%d", ++shard);
        lg_net_scope(n, "text_model.encoder.layers.%d.", i);
        lg_tensor y = input_of(n, c, io, i + 1);
        feed_forward(n, c, attend(n, c, x), y);
        x = y;
    }
    if (!whole) return;
    lg_net_scope(n, "text_model.");
    states = lg_net_layer_norm(n, x, c->eps, states.rank ? lg_net_rows(states) : LG_NONE,
                               "final_layer_norm");
    lg_net_scope(n, NULL);
    pool(n, c, io, states);
}

int lg_clip_end(const struct lg_clip_config *c, const int32_t *ids, int length)
{
    int end = 0;
    for (int i = 0; i < length; i++) {
        if (ids[i] == c->eos) return i;
        if (c->eos < 0 && ids[i] > ids[end]) end = i;
    }
    return end;
}

/* ---- its config.json ---- */

enum { DIM_MAX = 1 << 17, LAYERS_MAX = 256, VOCAB_MAX = 1 << 24, POSITIONS_MAX = 1 << 16 };
/* The id that the first published configs give for the end, and that none of their captions ends with: transformers
 * takes the largest id instead. */
enum { EOS_UNSET = 2, EOS_DEFAULT = 49407 };

static int parse_act(const lg_model_config *m, lg_act *ret)
{
    const char *act;
    LG_TRY(lg_model_config_string(m, "hidden_act", "quick_gelu", &act));
    *ret = !strcmp(act, "gelu") ? LG_ACT_GELU_ERF : LG_ACT_QUICK_GELU;
    if (*ret == LG_ACT_QUICK_GELU && strcmp(act, "quick_gelu") != 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"hidden_act\" is \"%.64s\"; \"quick_gelu\" (CLIP L) and \"gelu\" (H "
                       "and bigG) are supported",
                       m->path, act);
    return 0;
}

/* The class that wrote the weights says whether there is a projection. */
static int parse_projection(const lg_model_config *m, int *ret)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(m->root, "architectures");
    const cJSON *first = cJSON_GetArrayItem(list, 0);
    const char *class = cJSON_IsString(first) ? first->valuestring : "CLIPTextModel";
    *ret = 0;
    if (!strcmp(class, "CLIPTextModel")) return 0;
    if (strcmp(class, "CLIPTextModelWithProjection") != 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: \"architectures\" names \"%.64s\"; CLIPTextModel and "
                       "CLIPTextModelWithProjection can be read",
                       m->path, class);
    LG_TRY(lg_model_config_int(m, "projection_dim", 1, DIM_MAX, 512, ret));
    return 0;
}

static int parse_config(const lg_model_config *m, void *ret)
{
    struct lg_clip_config *c = ret;
    const char *kind;
    LG_TRY(lg_model_config_string(m, "model_type", NULL, &kind));
    LG_TRY(lg_model_config_expect(m, "model_type", LG_CLIP_MODEL_TYPE, "a CLIP text encoder"));
    LG_TRY(lg_model_config_int(m, "vocab_size", 2, VOCAB_MAX, 49408, &c->vocab));
    LG_TRY(lg_model_config_int(m, "hidden_size", 1, DIM_MAX, 512, &c->hidden));
    LG_TRY(lg_model_config_int(m, "intermediate_size", 1, DIM_MAX, 2048, &c->mlp));
    LG_TRY(lg_model_config_int(m, "num_attention_heads", 1, 4096, 8, &c->heads));
    LG_TRY(lg_model_config_int(m, "num_hidden_layers", 1, LAYERS_MAX, 12, &c->layers));
    LG_TRY(lg_model_config_int(m, "max_position_embeddings", 2, POSITIONS_MAX, 77, &c->positions));
    LG_TRY(lg_model_config_int(m, "eos_token_id", 0, VOCAB_MAX, EOS_DEFAULT, &c->eos));
    if (c->eos == EOS_UNSET) c->eos = -1;
    LG_TRY(lg_model_config_double(m, "layer_norm_eps", 1e-5, &c->eps));
    if (c->hidden % c->heads)
        return LG_FAIL(LG_ERR_CONFIG,
                       "%s: hidden_size %d does not divide by num_attention_heads %d", m->path,
                       c->hidden, c->heads);
    LG_TRY(parse_act(m, &c->act));
    LG_TRY(parse_projection(m, &c->projection));
    return 0;
}

int lg_clip_config_load(const char *dir, struct lg_clip_config *ret)
{
    char path[LG_PATH_BYTES];
    struct lg_clip_config c = {0};
    LG_TRY(lg_path(path, "%s/config.json", dir));
    LG_TRY(lg_model_config_read(path, parse_config, &c));
    *ret = c;
    return 0;
}
