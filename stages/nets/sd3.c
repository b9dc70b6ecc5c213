/* SD3: multimodal diffusion transformer (MMDiT), texts and image in one attention.
 * Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024, and SD3.5; names and
 * semantics of diffusers' SD3Transformer2DModel.
 *
 *     e = timestep embedding + linear_2(silu(linear_1(pooled of both CLIP)))                     (B, D)
 *     text = linear([ [CLIP-L, CLIP-G, zeros]; T5 ])         rows of both CLIP, then T5's       (B, S, D)
 *     x = patches(x_t) + the middle of the stored positions                                     (B, T, D)
 *     per block and stream: mod = linear(silu(e))                  (B, 6 D); 9 D of x in a dual block
 *                q k v = linear(modulate(norm(stream), shift1, scale1)); q, k through RMSNorm per head (qk_norm)
 *                one attention over [x; text]; stream += gate1 linear(its rows)
 *                dual: x += gate3 attention2(modulate(norm(x before), shift3, scale3)), of x alone
 *                stream += gate2 mlp(modulate(norm(stream), shift2, scale2))
 *                last block: text is modulated by (scale, shift) and gives keys and values alone
 *     out = unpatchify(linear(modulate(norm(x), linear(silu(e)) as (scale, shift))))
 *
 * Padding is not masked, in the encoders neither. The last block's query of the texts stands in the file and is read by
 * nobody.
 *
 * Initial values, which no code of the authors has; as DiT's: Xavier uniform for linears (q, k, v as one matrix) and
 * patches, normal with 0.02 for the MLPs of timestep and pooled texts, one for RMSNorms, zero for all biases, the adaLN
 * linears and the last projection. */
#include "stages/nets/models.h"
#include <stdio.h>

static const double EPS = 1e-6; /* of all norms */
enum { CLIP_L, CLIP_G, T5 };

/* The streams of a block: x (B, T, D), text (B, S, D). */
struct streams {
    lg_tensor x, text;
};
/* A stream's names in an attention. */
struct names {
    const char *part[3], *norm[2]; /* q, k, v */
};
static const struct names OF_X = {{".to_q", ".to_k", ".to_v"}, {".norm_q", ".norm_k"}};
static const struct names OF_TEXT = {{".add_q_proj", ".add_k_proj", ".add_v_proj"},
                                     {".norm_added_q", ".norm_added_k"}};

/* ---- attention ---- */

/* Parts [first, first + count) of q, k, v of x, normed, to tokens `to` or, LG_NONE, as a value: (.., count D). */
static lg_tensor project(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                         const struct names *names, int first, int count, lg_tensor to,
                         const char *name)
{
    const struct lg_layer parts = {.out = count * c->hidden,
                                   .init = LG_NET_XAVIER,
                                   .parts = names->part + first,
                                   .n_parts = count};
    const struct lg_head_norms norms = {.norms = names->norm + first,
                                        .n_norms = LG_MIN(count, 2 - first),
                                        .heads = c->heads,
                                        .d = c->hidden / c->heads,
                                        .eps = EPS};
    lg_tensor packed = lg_net_linear(n, x, parts, "%s", name);
    if (c->qk_norm) return lg_net_head_norms(n, packed, &norms, to, name);
    if (to.rank) lg_net_copy_tokens(n, packed, to);
    return packed;
}

/* q: packed in front of k and v, unless it is given. */
static lg_tensor attend(lg_net *n, const struct lg_denoiser_config *c, lg_tensor packed,
                        const lg_tensor *q)
{
    const int d = c->hidden / c->heads, first = q ? 0 : 1;
    return lg_net_attention(
        n, (struct lg_attention){.q = lg_net_heads(q ? *q : packed, c->heads, d, 0),
                                 .k = lg_net_heads(packed, c->heads, d, first),
                                 .v = lg_net_heads(packed, c->heads, d, first + 1)});
}

/* What each stream gets of both; with `last` x alone. */
static struct streams joint_attention(lg_net *n, const struct lg_denoiser_config *c,
                                      struct streams s, bool last, const char *name)
{
    const int64_t T = s.x.dim[1], S = s.text.dim[1], D = c->hidden;
    const int first = last, parts = 3 - first;
    lg_tensor both = lg_net_value(n, "joint", lg_t3(NULL, n->type, n->batch, T + S, parts * D)), q;
    if (last) q = project(n, c, s.x, &OF_X, 0, 1, LG_NONE, name);
    project(n, c, s.x, &OF_X, first, parts, lg_slice(both, 1, 0, T), name);
    project(n, c, s.text, &OF_TEXT, first, parts, lg_slice(both, 1, T, S), name);
    lg_tensor o = attend(n, c, both, last ? &q : NULL);
    if (last) return (struct streams){.x = o};
    return (struct streams){lg_net_take_tokens(n, o, 0, T), lg_net_take_tokens(n, o, T, S)};
}

/* The text's query of the last block. */
static void unused_query(lg_net *n, const struct lg_denoiser_config *c, const char *name)
{
    const struct lg_layer query = {.out = c->hidden, .init = LG_NET_XAVIER};
    lg_net_unused_linear(n, c->hidden, query, "%s%s", name, OF_TEXT.part[0]);
    if (!c->qk_norm) return;
    lg_net_unused(n, lg_net_param(n, LG_NET_ONE, lg_t1(NULL, n->type, c->hidden / c->heads),
                                  "%s%s.weight", name, OF_TEXT.norm[0]));
}

/* ---- a block ---- */

static lg_tensor modulation(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e, int chunks,
                            const char *name)
{
    const struct lg_layer l = {.out = (int64_t)chunks * c->hidden, .init = LG_NET_ZERO};
    return lg_net_linear(n, e, l, "%s.linear", name);
}

/* (scale, shift), the other way round than elsewhere. */
static struct lg_modulation scale_first(lg_tensor mod, int64_t D)
{
    return (struct lg_modulation){.scale = lg_slice(mod, 1, 0, D), .shift = lg_slice(mod, 1, D, D)};
}

static lg_tensor square(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                        const char *name)
{
    return lg_net_linear(n, x, (struct lg_layer){.out = c->hidden, .init = LG_NET_XAVIER}, "%s",
                         name);
}

static lg_tensor feed_forward(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                              struct lg_modulation m, const char *name)
{
    const struct lg_layer up = {
        .out = c->mlp_ratio * c->hidden, .init = LG_NET_XAVIER, .act = LG_ACT_GELU_TANH};
    const struct lg_layer down = {.out = c->hidden, .init = LG_NET_XAVIER};
    lg_tensor h = lg_net_linear(n, lg_net_norm(n, x, m, EPS), up, "%s.net.0.proj", name);
    return lg_net_residual(n, x, lg_net_linear(n, h, down, "%s.net.2", name), m.gate);
}

static struct streams block(lg_net *n, const struct lg_denoiser_config *c, struct streams s,
                            lg_tensor e, int i)
{
    const bool last = i == c->depth - 1, dual = lg_denoiser_is_dual(c, i);
    const int64_t D = c->hidden;
    lg_net_block(n, i);
    lg_net_scope(n, "transformer_blocks.%d.", i);
    lg_tensor mod = modulation(n, c, e, dual ? 9 : 6, "norm1");
    lg_tensor mod_text = modulation(n, c, e, last ? 2 : 6, "norm1_context");
    const struct lg_modulation of_x = lg_net_chunks(mod, D, 0);
    const struct lg_modulation of_text =
        last ? scale_first(mod_text, D) : lg_net_chunks(mod_text, D, 0);
    const struct streams normed = {lg_net_norm(n, s.x, of_x, EPS),
                                   lg_net_norm(n, s.text, of_text, EPS)};
    struct streams o = joint_attention(n, c, normed, last, "attn");
    lg_tensor before = s.x;
    s.x = lg_net_residual(n, s.x, square(n, c, o.x, "attn.to_out.0"), of_x.gate);
    if (dual) {
        const struct lg_modulation m = lg_net_chunks(mod, D, 6);
        lg_tensor packed =
            project(n, c, lg_net_norm(n, before, m, EPS), &OF_X, 0, 3, LG_NONE, "attn2");
        lg_tensor h = square(n, c, attend(n, c, packed, NULL), "attn2.to_out.0");
        s.x = lg_net_residual(n, s.x, h, m.gate);
    }
    s.x = feed_forward(n, c, s.x, lg_net_chunks(mod, D, 3), "ff");
    if (last) {
        unused_query(n, c, "attn");
    } else {
        lg_tensor h = square(n, c, o.text, "attn.to_add_out");
        s.text = lg_net_residual(n, s.text, h, of_text.gate);
        s.text = feed_forward(n, c, s.text, lg_net_chunks(mod_text, D, 3), "ff_context");
    }
    lg_net_scope(n, NULL);
    return s;
}

/* ---- what stands before them ---- */

/* Rows of both CLIP side by side, as wide as T5's, whose rows follow: (B, S, E). */
static lg_tensor context(lg_net *n, const struct lg_denoiser_config *c,
                         const struct lg_model_input *in)
{
    const int64_t B = n->batch, L = c->text[CLIP_L].length, S = L + c->text[T5].length;
    const int64_t E = c->text[T5].width;
    lg_tensor clip = lg_net_value(n, "clip", lg_t3(NULL, n->type, B, L, E)), rows;
    lg_tensor all = lg_net_value(n, "context", lg_t3(NULL, n->type, B, S, E));
    int64_t at = 0;
    rows = lg_net_rows(clip);
    for (int k = CLIP_L; k <= CLIP_G; at += c->text[k++].width)
        LG_NET_RECORD(n, copy_rows, .x = lg_net_rows(in->text[k].states),
                      .y = lg_slice(rows, 1, at, c->text[k].width));
    if (at < E) {
        lg_tensor zeros = lg_net_value(n, "zeros", lg_t2(NULL, n->type, B * L, E - at));
        if (n->g) lg_graph_zero(n->g, zeros);
        LG_NET_RECORD(n, copy_rows, .x = zeros, .y = lg_slice(rows, 1, at, E - at));
    }
    lg_net_copy_tokens(n, clip, lg_slice(all, 1, 0, L));
    lg_net_copy_tokens(n, in->text[T5].states, lg_slice(all, 1, L, S - L));
    return all;
}

static lg_tensor condition(lg_net *n, const struct lg_denoiser_config *c,
                           const struct lg_model_input *in)
{
    const int64_t D = c->hidden, P = c->text[CLIP_L].pooled;
    const struct lg_layer up = {.out = D, .init = LG_NET_NORMAL, .act = LG_ACT_SILU};
    const struct lg_layer down = {.out = D, .init = LG_NET_NORMAL};
    lg_tensor t = lg_net_timestep(n, in->t, D, 0.0, "time_text_embed.timestep_embedder");
    lg_tensor pooled =
        lg_net_value(n, "pooled", lg_t2(NULL, n->type, n->batch, P + c->text[CLIP_G].pooled));
    for (int k = CLIP_L; k <= CLIP_G; k++)
        LG_NET_RECORD(n, copy_rows, .x = in->text[k].pooled,
                      .y = lg_slice(pooled, 1, k == CLIP_L ? 0 : P, c->text[k].pooled));
    lg_tensor h = lg_net_linear(n, pooled, up, "time_text_embed.text_embedder.linear_1");
    h = lg_net_linear(n, h, down, "time_text_embed.text_embedder.linear_2");
    return lg_net_act(n, lg_net_add(n, t, h), LG_ACT_SILU);
}

/* The middle rows and columns of the table: (T, D). */
static lg_tensor positions(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x)
{
    const int64_t side = c->positions_side, D = c->hidden;
    const int64_t rows = x.dim[2] / c->patch, columns = x.dim[3] / c->patch;
    const int base = (c->sample_size ? c->sample_size : c->height) / c->patch;
    const struct lg_init init = {.kind = LG_INIT_SINCOS, .scale = base, .is_fixed = true};
    lg_tensor table =
        lg_net_param(n, init, lg_t3(NULL, n->type, 1, side * side, D), "pos_embed.pos_embed");
    lg_tensor middle = lg_at(table, ((side - rows) / 2 * side + (side - columns) / 2) * D,
                             lg_t2(NULL, n->type, rows, columns * D));
    lg_tensor y = lg_net_value(n, "positions", lg_t2(NULL, n->type, rows, columns * D));
    middle.stride[0] = side * D;
    LG_NET_RECORD(n, copy_rows, .x = middle, .y = y);
    return lg_at(y, 0, lg_t2(NULL, n->type, rows * columns, D));
}

void lg_sd3_describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out)
{
    const int64_t D = c->hidden, P = (int64_t)c->channels * c->patch * c->patch;
    struct streams s;
    lg_net_unit(n, "embed");
    s.x = lg_net_patches(n, in->x, c->patch, positions(n, c, in->x), "pos_embed.proj");
    lg_tensor e = condition(n, c, in);
    s.text = square(n, c, context(n, c, in), "context_embedder");
    for (int i = 0; i < c->depth; i++) s = block(n, c, s, e, i);
    lg_net_unit(n, "out");
    const struct lg_modulation m = scale_first(modulation(n, c, e, 2, "norm_out"), D);
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, s.x, m, EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    lg_net_unpatchify(n, y, c->patch, out);
}
