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
 * Without T5 its rows are zeros, as in diffusers' pipeline: they pass the linear, whose bias they become, and the blocks.
 *
 * Padding is not masked, in the encoders neither. The last block's query of the texts stands in the file and is read by
 * nobody.
 *
 * Initial values, which no code of the authors has; as DiT's: Xavier uniform for linears (q, k, v as one matrix) and
 * patches, normal with 0.02 for the MLPs of timestep and pooled texts, one for RMSNorms, zero for all biases, the adaLN
 * linears and the last projection. */
#include "stages/nets/joint.h"
#include <stdio.h>

enum { CLIP_L, CLIP_G, T5 };

/* ---- a block ---- */

/* A second attention, of x alone, normed before the first one with a modulation of its own. */
static lg_tensor image_attention(lg_net *n, const struct lg_joint *j, lg_tensor normed,
                                 lg_tensor gate, lg_tensor x)
{
    lg_tensor o = lg_joint_self_attention(n, j, normed, false, "attn2");
    return lg_net_residual(n, x, lg_joint_linear(n, j->config, o, "attn2.to_out.0"), gate);
}

static struct lg_streams block(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                               lg_tensor e, int i)
{
    const struct lg_denoiser_config *c = j->config;
    const bool last = i == c->depth - 1, dual = lg_denoiser_is_dual(c, i);
    const int64_t D = c->hidden;
    lg_net_block(n, i);
    lg_net_scope(n, "transformer_blocks.%d.", i);
    lg_tensor mod = lg_joint_modulation(n, c, e, dual ? 9 : 6, "norm1");
    lg_tensor mod_text = lg_joint_modulation(n, c, e, last ? 2 : 6, "norm1_context");
    const struct lg_modulation of_x = lg_net_chunks(mod, D, 0);
    const struct lg_modulation of_text =
        last ? lg_joint_scale_first(mod_text, D) : lg_net_chunks(mod_text, D, 0);
    const struct lg_modulation second = dual ? lg_net_chunks(mod, D, 6) : (struct lg_modulation){0};
    struct lg_streams normed;
    lg_tensor normed_again = LG_NONE;
    normed.x = lg_net_norm(n, s.x, of_x, LG_JOINT_EPS);
    /* Recorded before the residuals, its backward comes behind theirs and adds to the gradient of x that they leave; behind the first
     * one that gradient would still be read, and the sum be an operation of its own. */
    if (dual) normed_again = lg_net_norm(n, s.x, second, LG_JOINT_EPS);
    normed.text = lg_net_norm(n, s.text, of_text, LG_JOINT_EPS);
    const struct lg_streams o = lg_joint_attention(n, j, normed, last, "attn");
    s.x = lg_net_residual(n, s.x, lg_joint_linear(n, c, o.x, "attn.to_out.0"), of_x.gate);
    if (dual) s.x = image_attention(n, j, normed_again, second.gate, s.x);
    s.x = lg_joint_feed_forward(n, c, s.x, lg_net_chunks(mod, D, 3), "ff");
    if (last) {
        lg_joint_unused_query(n, j, "attn");
    } else {
        lg_tensor h = lg_joint_linear(n, c, o.text, "attn.to_add_out");
        s.text = lg_net_residual(n, s.text, h, of_text.gate);
        s.text = lg_joint_feed_forward(n, c, s.text, lg_net_chunks(mod_text, D, 3), "ff_context");
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
    lg_tensor t5 = in->text[T5].states;
    if (c->n_texts <= T5) {
        t5 = lg_net_value(n, "zeros of t5", lg_t3(NULL, n->type, B, S - L, E));
        if (n->g) lg_graph_zero(n->g, t5);
    }
    lg_net_copy_tokens(n, t5, lg_slice(all, 1, L, S - L));
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

/* Of the middle rows and columns of the table, those of x: (T, D). */
static lg_tensor positions(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x)
{
    const int64_t side = c->positions_side, D = c->hidden;
    const int64_t all = c->height / c->patch, rows = x.dim[2] / c->patch;
    const int64_t columns = x.dim[3] / c->patch;
    const int64_t first = lg_net_is_split(n) ? n->tokens.at[n->sequence.rank] / columns : 0;
    const int base = (c->sample_size ? c->sample_size : c->height) / c->patch;
    const struct lg_init init = {.kind = LG_INIT_SINCOS, .scale = base, .is_fixed = true};
    lg_tensor table =
        lg_net_param(n, init, lg_t3(NULL, n->type, 1, side * side, D), "pos_embed.pos_embed");
    lg_tensor middle = lg_at(table, (((side - all) / 2 + first) * side + (side - columns) / 2) * D,
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
    const struct lg_joint joint = {.config = c, .norms = c->qk_norm};
    struct lg_streams s;
    lg_net_unit(n, "embed");
    s.x = lg_net_patches(n, in->x, c->patch, positions(n, c, in->x), "pos_embed.proj");
    lg_tensor e = condition(n, c, in);
    s.text = lg_joint_linear(n, c, lg_joint_own_text(n, context(n, c, in)), "context_embedder");
    for (int i = 0; i < c->depth; i++) s = block(n, &joint, s, e, i);
    lg_net_unit(n, "out");
    const struct lg_modulation m =
        lg_joint_scale_first(lg_joint_modulation(n, c, e, 2, "norm_out"), D);
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, s.x, m, LG_JOINT_EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    lg_net_unpatchify(n, y, c->patch, out);
}
