/* FLUX.1: a rectified flow transformer of blocks with two streams, then of blocks with one; black-forest-labs, 2024. Names
 * and semantics of diffusers' FluxTransformer2DModel.
 *
 *     e = silu(timestep embedding + guidance embedding + linear_2(silu(linear_1(pooled of CLIP))))    (B, D)
 *     text = linear(T5)                                                                            (B, S, D)
 *     x = linear(patches of 2 x 2, channels first)                                                 (B, T, D)
 *     double block, per stream: mod = linear(e)                                                    (B, 6 D)
 *                q k v = linear(modulate(norm(stream), shift1, scale1)); q, k through RMSNorm per head
 *                one attention over [text; x], q and k turned (RoPE); stream += gate1 linear(its rows)
 *                stream += gate2 mlp(modulate(norm(stream), shift2, scale2))
 *     single block, on z = [text; x]: shift, scale, gate = linear(e)                               (B, 3 D)
 *                n = modulate(norm(z)); z += gate linear([attention(n); gelu(linear(n))])
 *     out = patches back of linear(modulate(norm(x rows of z), linear(e) as (scale, shift)))
 *
 * A token's angles follow from (0, row, column) of its patch, (0, 0, 0) of texts. Padding is not masked.
 *
 * What the last single block makes of the texts is read by nobody.
 *
 * Initial values, which no code of the authors has; as SD3's (sd3.c). */
#include "stages/nets/flux.h"
#include "stages/nets/joint.h"
#include <stdio.h>

/* ---- blocks ---- */

static struct lg_streams double_block(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                      lg_tensor e)
{
    const struct lg_denoiser_config *c = j->config;
    const int64_t D = c->hidden;
    lg_tensor mod = lg_joint_modulation(n, c, e, 6, "norm1");
    lg_tensor mod_text = lg_joint_modulation(n, c, e, 6, "norm1_context");
    const struct lg_modulation of_x = lg_net_chunks(mod, D, 0);
    const struct lg_modulation of_text = lg_net_chunks(mod_text, D, 0);
    struct lg_streams normed;
    normed.text = lg_net_norm(n, s.text, of_text, LG_JOINT_EPS);
    normed.x = lg_net_norm(n, s.x, of_x, LG_JOINT_EPS);
    const struct lg_streams o = lg_joint_attention(n, j, normed, false, "attn");
    lg_tensor h = lg_joint_linear(n, c, o.x, "attn.to_out.0");
    s.x = lg_net_residual(n, s.x, h, of_x.gate);
    s.x = lg_joint_feed_forward(n, c, s.x, lg_net_chunks(mod, D, 3), "ff");
    h = lg_joint_linear(n, c, o.text, "attn.to_add_out");
    s.text = lg_net_residual(n, s.text, h, of_text.gate);
    s.text = lg_joint_feed_forward(n, c, s.text, lg_net_chunks(mod_text, D, 3), "ff_context");
    return s;
}

static lg_tensor single_block(lg_net *n, const struct lg_joint *j, lg_tensor z, lg_tensor e)
{
    const struct lg_denoiser_config *c = j->config;
    const int64_t D = c->hidden, wide = c->mlp_ratio * D;
    const struct lg_modulation m = lg_net_chunks(lg_joint_modulation(n, c, e, 3, "norm"), D, 0);
    lg_tensor normed = lg_net_norm(n, z, m, LG_JOINT_EPS);
    const struct lg_mlp mlp = {.x = normed,
                               .beside = lg_joint_self_attention(n, j, normed, true, "attn"),
                               .up = {.out = wide, .init = LG_NET_XAVIER, .act = LG_ACT_GELU_TANH},
                               .down = {.out = D, .init = LG_NET_XAVIER},
                               .scope = "",
                               .up_name = "proj_mlp",
                               .down_name = "proj_out"};
    return lg_net_residual(n, z, lg_net_mlp(n, &mlp), m.gate);
}

/* ---- the net ---- */

static lg_tensor condition(lg_net *n, const struct lg_denoiser_config *c,
                           const struct lg_model_input *in)
{
    const int64_t D = c->hidden;
    const struct lg_layer up = {.out = D, .init = LG_NET_NORMAL, .act = LG_ACT_SILU};
    const struct lg_layer down = {.out = D, .init = LG_NET_NORMAL};
    lg_net_scope(n, "time_text_embed.");
    lg_tensor e = lg_net_timestep(n, in->t, D, 0.0, "timestep_embedder");
    if (c->guidance)
        e = lg_net_add(n, e, lg_net_timestep(n, in->guidance, D, 0.0, "guidance_embedder"));
    lg_tensor h = lg_net_linear(n, in->text[LG_FLUX_CLIP].pooled, up, "text_embedder.linear_1");
    h = lg_net_linear(n, h, down, "text_embedder.linear_2");
    lg_net_scope(n, NULL);
    return lg_net_act(n, lg_net_add(n, e, h), LG_ACT_SILU);
}

void lg_flux_describe(lg_net *n, const struct lg_denoiser_config *c,
                      const struct lg_model_input *in, lg_tensor out)
{
    const int64_t D = c->hidden, P = (int64_t)c->channels * c->patch * c->patch;
    const struct lg_joint joint = {
        .config = c, .norms = true, .text_first = true, .angles = in->positions};
    const int doubles = c->depth - c->singles;
    lg_net_unit(n, "embed");
    struct lg_streams s;
    s.x = lg_joint_linear(n, c, lg_net_flat_patches(n, in->x, c->patch), "x_embedder");
    s.text = lg_joint_linear(n, c, lg_joint_own_text(n, in->text[LG_FLUX_T5].states),
                             "context_embedder");
    const lg_tensor e = condition(n, c, in);
    const int64_t S = s.text.dim[1], T = s.x.dim[1];
    for (int i = 0; i < doubles; i++) {
        lg_net_block(n, i);
        lg_net_scope(n, "transformer_blocks.%d.", i);
        s = double_block(n, &joint, s, e);
    }
    lg_net_scope(n, NULL);
    lg_net_unit(n, "out");
    lg_tensor z = lg_joint_tokens(n, &joint, s);
    for (int i = doubles; i < c->depth; i++) {
        lg_net_block(n, i);
        lg_net_scope(n, "single_transformer_blocks.%d.", i - doubles);
        z = single_block(n, &joint, z, e);
    }
    lg_net_scope(n, NULL);
    lg_net_unit(n, "out");
    lg_net_unused(n, lg_slice(z, 1, 0, S));
    const struct lg_modulation m =
        lg_joint_scale_first(lg_joint_modulation(n, c, e, 2, "norm_out"), D);
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, lg_net_take_tokens(n, z, S, T), m, LG_JOINT_EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    LG_NET_RECORD(n, unpatchify_forward, .x = y, .y = out, .patch = c->patch,
                  .channels_first = true);
}
