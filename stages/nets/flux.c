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
 * Attention and feed-forward of a single block are copied side by side, which costs a few percent of its time and keeps
 * their operations as all nets have them. What the last one makes of the texts is read by nobody.
 *
 * Initial values, which no code of the authors has; as SD3's (sd3.c). */
#include "stages/nets/flux.h"
#include <stdio.h>

static const double EPS = 1e-6; /* of all norms */

struct streams {
    lg_tensor text, x; // (B, S, D), (B, T, D)
};
/* A stream's names in an attention. */
struct names {
    const char *part[3], *norm[2]; /* q, k, v */
};
static const struct names OF_X = {{".to_q", ".to_k", ".to_v"}, {".norm_q", ".norm_k"}};
static const struct names OF_TEXT = {{".add_q_proj", ".add_k_proj", ".add_v_proj"},
                                     {".norm_added_q", ".norm_added_k"}};

/* ---- attention ---- */

/* q, k, v of x with q and k normed, to tokens `to` or, LG_NONE, as a value: (.., 3 D). */
static lg_tensor project(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                         const struct names *names, lg_tensor to)
{
    const struct lg_layer parts = {
        .out = 3 * c->hidden, .init = LG_NET_XAVIER, .parts = names->part, .n_parts = 3};
    const struct lg_head_norms norms = {.norms = names->norm,
                                        .n_norms = 2,
                                        .heads = c->heads,
                                        .d = c->hidden / c->heads,
                                        .eps = EPS};
    return lg_net_head_norms(n, lg_net_linear(n, x, parts, "attn"), &norms, to, "attn");
}

/* Of packed (B, N, 3 D), its q and k turned by their tokens' angles (2, N, d / 2). */
static lg_tensor attend(lg_net *n, const struct lg_denoiser_config *c, lg_tensor packed,
                        lg_tensor angles)
{
    const int d = c->hidden / c->heads;
    packed = lg_net_rope(n, packed, 2 * c->heads, angles);
    return lg_net_attention(n, (struct lg_attention){.q = lg_net_heads(packed, c->heads, d, 0),
                                                     .k = lg_net_heads(packed, c->heads, d, 1),
                                                     .v = lg_net_heads(packed, c->heads, d, 2)});
}

static struct streams joint_attention(lg_net *n, const struct lg_denoiser_config *c,
                                      struct streams s, lg_tensor angles)
{
    const int64_t S = s.text.dim[1], T = s.x.dim[1];
    lg_tensor both = lg_net_value(n, "joint", lg_t3(NULL, n->type, n->batch, S + T, 3 * c->hidden));
    project(n, c, s.text, &OF_TEXT, lg_slice(both, 1, 0, S));
    project(n, c, s.x, &OF_X, lg_slice(both, 1, S, T));
    lg_tensor o = attend(n, c, both, angles);
    return (struct streams){lg_net_take_tokens(n, o, 0, S), lg_net_take_tokens(n, o, S, T)};
}

/* ---- blocks ---- */

static lg_tensor modulation(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e, int chunks,
                            const char *name)
{
    const struct lg_layer l = {.out = (int64_t)chunks * c->hidden, .init = LG_NET_ZERO};
    return lg_net_linear(n, e, l, "%s.linear", name);
}

static lg_tensor to_width(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                          const char *name)
{
    return lg_net_linear(n, x, (struct lg_layer){.out = c->hidden, .init = LG_NET_XAVIER}, "%s",
                         name);
}

static lg_tensor widened(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                         const char *name)
{
    const struct lg_layer up = {
        .out = c->mlp_ratio * c->hidden, .init = LG_NET_XAVIER, .act = LG_ACT_GELU_TANH};
    return lg_net_linear(n, x, up, "%s", name);
}

static struct streams double_block(lg_net *n, const struct lg_denoiser_config *c, struct streams s,
                                   lg_tensor e, lg_tensor angles)
{
    static const char *const outs[] = {"attn.to_add_out", "attn.to_out.0"};
    static const char *const ups[] = {"ff_context.net.0.proj", "ff.net.0.proj"};
    static const char *const downs[] = {"ff_context.net.2", "ff.net.2"};
    lg_tensor mod[2], *stream[] = {&s.text, &s.x};
    mod[1] = modulation(n, c, e, 6, "norm1");
    mod[0] = modulation(n, c, e, 6, "norm1_context");
    const struct streams normed = {lg_net_norm(n, s.text, lg_net_chunks(mod[0], c->hidden, 0), EPS),
                                   lg_net_norm(n, s.x, lg_net_chunks(mod[1], c->hidden, 0), EPS)};
    const struct streams o = joint_attention(n, c, normed, angles);
    const lg_tensor attended[] = {o.text, o.x};
    for (int i = 1; i >= 0; i--) {
        const struct lg_modulation first = lg_net_chunks(mod[i], c->hidden, 0);
        const struct lg_modulation second = lg_net_chunks(mod[i], c->hidden, 3);
        lg_tensor h = to_width(n, c, attended[i], outs[i]);
        lg_tensor x = lg_net_residual(n, *stream[i], h, first.gate);
        h = to_width(n, c, widened(n, c, lg_net_norm(n, x, second, EPS), ups[i]), downs[i]);
        *stream[i] = lg_net_residual(n, x, h, second.gate);
    }
    return s;
}

static lg_tensor single_block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor z,
                              lg_tensor e, lg_tensor angles)
{
    const int64_t D = c->hidden, wide = c->mlp_ratio * D;
    const struct lg_modulation m = lg_net_chunks(modulation(n, c, e, 3, "norm"), D, 0);
    lg_tensor normed = lg_net_norm(n, z, m, EPS);
    lg_tensor h = widened(n, c, normed, "proj_mlp");
    lg_tensor o = attend(n, c, project(n, c, normed, &OF_X, LG_NONE), angles);
    lg_tensor both =
        lg_net_value(n, "attention, mlp", lg_t3(NULL, n->type, n->batch, z.dim[1], D + wide));
    lg_net_copy_features(n, o, lg_slice(both, 2, 0, D));
    lg_net_copy_features(n, h, lg_slice(both, 2, D, wide));
    return lg_net_residual(n, z, to_width(n, c, both, "proj_out"), m.gate);
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

static lg_tensor patches(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x)
{
    const int64_t p = c->patch, T = x.dim[2] / p * (x.dim[3] / p);
    lg_tensor flat =
        lg_net_value(n, "patches", lg_t3(NULL, n->type, n->batch, T, c->channels * p * p));
    LG_NET_RECORD(n, patchify_forward, .x = x, .y = flat, .patch = (int)p);
    return to_width(n, c, flat, "x_embedder");
}

void lg_flux_describe(lg_net *n, const struct lg_denoiser_config *c,
                      const struct lg_model_input *in, lg_tensor out)
{
    const int64_t D = c->hidden, P = (int64_t)c->channels * c->patch * c->patch;
    const int doubles = c->depth - c->singles;
    lg_net_unit(n, "embed");
    struct streams s = {.x = patches(n, c, in->x)};
    s.text = to_width(n, c, in->text[LG_FLUX_T5].states, "context_embedder");
    const lg_tensor e = condition(n, c, in);
    const int64_t S = s.text.dim[1], T = s.x.dim[1];
    for (int i = 0; i < doubles; i++) {
        lg_net_block(n, i);
        lg_net_scope(n, "transformer_blocks.%d.", i);
        s = double_block(n, c, s, e, in->positions);
    }
    lg_net_scope(n, NULL);
    lg_net_unit(n, "out");
    lg_tensor z = lg_net_value(n, "text, x", lg_t3(NULL, n->type, n->batch, S + T, D));
    lg_net_copy_tokens(n, s.text, lg_slice(z, 1, 0, S));
    lg_net_copy_tokens(n, s.x, lg_slice(z, 1, S, T));
    for (int i = doubles; i < c->depth; i++) {
        lg_net_block(n, i);
        lg_net_scope(n, "single_transformer_blocks.%d.", i - doubles);
        z = single_block(n, c, z, e, in->positions);
    }
    lg_net_scope(n, NULL);
    lg_net_unit(n, "out");
    lg_net_unused(n, lg_slice(z, 1, 0, S));
    const lg_tensor mod = modulation(n, c, e, 2, "norm_out");
    const struct lg_modulation m = {.scale = lg_slice(mod, 1, 0, D),
                                    .shift = lg_slice(mod, 1, D, D)};
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, lg_net_take_tokens(n, z, S, T), m, EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    LG_NET_RECORD(n, unpatchify_forward, .x = y, .y = out, .patch = c->patch,
                  .channels_first = true);
}
