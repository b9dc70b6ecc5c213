/* The U-Net of Stable Diffusion 2 and SDXL.
 * Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022; Podell et al., "SDXL", 2023; names and
 * semantics of diffusers' UNet2DConditionModel. Maps are (B, H, W, C) (maps.h).
 *
 *     e = linear_2(silu(linear_1(sinusoids of t))), and with SDXL + linear_2(silu(linear_1([pooled; sinusoids of 6 numbers])))
 *     resnet:      x + conv2(silu(norm2(conv1(silu(norm1(x))) + linear(silu(e))))), x by a 1x1 convolution where widths differ
 *     transformer: x + proj_out(blocks(proj_in(norm(x)))), and a block of it is
 *                  x += attention(norm1(x)), x += cross_attention(norm2(x), text), x += linear(a gelu(g)), [a; g] = linear(norm3(x))
 *     down:        per level so many layers (resnet, transformer where the level has one), then a convolution of stride 2
 *     middle:      resnet, transformer, resnet
 *     up:          per level one layer more, each of [x; what the layer opposite has made]; then twice the size, and a
 *                  convolution. A side that was odd becomes so again.
 *     out = conv_out(silu(norm(x)))
 *
 * Blocks, which are gathered and recomputed together, are layers, and of a deep transformer each block but the first by
 * itself (config/unet.h).
 *
 * Initial values, as in the authors' code, but for biases, which are zero: what ends a resnet, a transformer and the net is
 * zero, so that each begins as the identity; else uniform, Xavier's for linears, by the inputs alone for convolutions. */
#include "stages/nets/unet.h"
#include "stages/nets/maps.h"
#include <math.h>
#include <stdio.h>

enum { SKIPS_MAX = LG_UNET_LEVELS_MAX * (LG_UNET_LAYERS_MAX + 1) + 1, NUMBERS = 6 };
enum { CLIP_L, CLIP_G }; /* SDXL's texts */
static const double TRANSFORMER_EPS = 1e-6, LAYER_NORM_EPS = 1e-5;

struct unet {
    lg_net *n;
    const struct lg_denoiser_config *c;
    const struct lg_unet *shape;
    lg_tensor e;    // (B, 4 C): silu of the condition
    lg_tensor text; // (B, L, E)
    int block;      /* the next one's number */
    lg_tensor skip[SKIPS_MAX];
    int skips;
};

/* ---- a layer ---- */

static void begin_block(struct unet *u)
{
    lg_net_block(u->n, u->block++);
}

static struct lg_group_norm norm_of(const struct unet *u, const char *name, double eps, lg_act act)
{
    return (struct lg_group_norm){.name = name, .groups = u->shape->groups, .eps = eps, .act = act};
}

/* Its statistics are kept for the backward. */
static lg_tensor normed(struct unet *u, lg_tensor x, struct lg_group_norm norm)
{
    return lg_net_group_norm(u->n, lg_net_statistics(u->n, x, norm.groups), norm).x;
}

static lg_tensor convolved(struct unet *u, lg_tensor x, struct lg_conv c, const char *name)
{
    c.is_centred = true;
    c.init = c.init.kind == LG_INIT_UNIFORM
                 ? (struct lg_init){.kind = LG_INIT_UNIFORM,
                                    .scale = 1 / sqrt((double)(x.dim[3] * c.kernel * c.kernel))}
                 : c.init;
    return lg_net_conv(u->n, (struct lg_map){.x = x}, c, name).x;
}

static lg_tensor resnet(struct unet *u, lg_tensor x, int64_t out, const char *scope)
{
    const double eps = u->c->norm_eps;
    lg_net_scope(u->n, "%s", scope);
    lg_tensor h = normed(u, x, norm_of(u, "norm1", eps, LG_ACT_SILU));
    h = convolved(u, h, (struct lg_conv){.out = out, .kernel = 3, .init = LG_NET_XAVIER}, "conv1");
    lg_tensor e = lg_net_linear(u->n, u->e, (struct lg_layer){.out = out, .init = LG_NET_XAVIER},
                                "time_emb_proj");
    h = normed(u, lg_net_shift(u->n, h, e), norm_of(u, "norm2", eps, LG_ACT_SILU));
    if (x.dim[3] != out)
        x = convolved(u, x, (struct lg_conv){.out = out, .kernel = 1, .init = LG_NET_XAVIER},
                      "conv_shortcut");
    h = convolved(u, h, (struct lg_conv){.out = out, .kernel = 3, .residual = x}, "conv2");
    lg_net_scope(u->n, NULL);
    return h;
}

/* Of tokens x (B, T, D) with a norm before it, added to them. */
static lg_tensor attention(struct unet *u, lg_tensor x, int heads, bool cross, const char *scope)
{
    static const char *const own[] = {".to_q", ".to_k", ".to_v"};
    const int64_t D = x.dim[2], d = D / heads;
    const struct lg_layer one = {.out = D, .init = LG_NET_XAVIER, .no_bias = true};
    struct lg_layer packed = {
        .init = LG_NET_XAVIER, .parts = own + cross, .n_parts = 3 - cross, .no_bias = true};
    lg_net_scope(u->n, "%s", scope);
    lg_tensor y =
        lg_net_layer_norm(u->n, lg_net_rows(x), LAYER_NORM_EPS, LG_NONE, cross ? "norm2" : "norm1");
    const char *name = cross ? "attn2" : "attn1";
    y = lg_at(y, 0, lg_t3(NULL, x.dtype, x.dim[0], x.dim[1], D));
    packed.out = packed.n_parts * D;
    if (cross) {
        lg_tensor q = lg_net_linear(u->n, y, one, "attn2.to_q");
        lg_tensor kv = lg_net_linear(u->n, u->text, packed, "attn2");
        y = lg_net_attention(u->n, (struct lg_attention){.q = lg_net_heads(q, heads, d, 0),
                                                         .k = lg_net_heads(kv, heads, d, 0),
                                                         .v = lg_net_heads(kv, heads, d, 1)});
    } else {
        y = lg_net_self_attention(u->n, y, packed, heads, name);
    }
    y = lg_net_linear(u->n, y, (struct lg_layer){.out = D, .init = LG_NET_XAVIER}, "%s.to_out.0",
                      name);
    return lg_net_residual(u->n, x, y, LG_NONE);
}

static lg_tensor feed_forward(struct unet *u, lg_tensor x, const char *scope)
{
    const int64_t D = x.dim[2];
    lg_net_scope(u->n, "%s", scope);
    lg_tensor y = lg_net_layer_norm(u->n, lg_net_rows(x), LAYER_NORM_EPS, LG_NONE, "norm3");
    y = lg_net_linear(u->n, y, (struct lg_layer){.out = 8 * D, .init = LG_NET_XAVIER},
                      "ff.net.0.proj");
    y = lg_net_linear(u->n, lg_net_glu(u->n, y, LG_ACT_GELU_ERF),
                      (struct lg_layer){.out = D, .init = LG_NET_XAVIER}, "ff.net.2");
    return lg_net_residual(u->n, x, lg_at(y, 0, lg_t3(NULL, x.dtype, x.dim[0], x.dim[1], D)),
                           LG_NONE);
}

static lg_tensor transformer(struct unet *u, lg_tensor map, int level, int depth, const char *scope)
{
    const int64_t D = map.dim[3], T = map.dim[1] * map.dim[2];
    const struct lg_layer proj = {.out = D, .init = LG_NET_XAVIER};
    char within[64];
    lg_net_scope(u->n, "%s", scope);
    lg_tensor x = normed(u, map, norm_of(u, "norm", TRANSFORMER_EPS, LG_ACT_NONE));
    x = lg_net_linear(u->n, lg_at(x, 0, lg_t3(NULL, map.dtype, map.dim[0], T, D)), proj, "proj_in");
    for (int k = 0; k < depth; k++) {
        if (k) begin_block(u);
        snprintf(within, sizeof within, "%stransformer_blocks.%d.", scope, k);
        x = attention(u, x, u->shape->heads[level], false, within);
        x = attention(u, x, u->shape->heads[level], true, within);
        x = feed_forward(u, x, within);
    }
    lg_net_scope(u->n, "%s", scope);
    x = lg_net_linear(u->n, x, (struct lg_layer){.out = D, .init = LG_NET_ZERO}, "proj_out");
    lg_net_scope(u->n, NULL);
    return lg_at(lg_net_residual(u->n, lg_at(map, 0, x), x, LG_NONE), 0, map);
}

/* Layer j of "down_blocks.i." or so, of a level. */
static lg_tensor layer(struct unet *u, lg_tensor x, int level, const char *in, int j)
{
    const int depth = u->shape->depths[level];
    char scope[64];
    begin_block(u);
    snprintf(scope, sizeof scope, "%sresnets.%d.", in, j);
    x = resnet(u, x, u->shape->channels[level], scope);
    snprintf(scope, sizeof scope, "%sattentions.%d.", in, j);
    return depth ? transformer(u, x, level, depth, scope) : x;
}

/* ---- the three parts ---- */

static void keep(struct unet *u, lg_tensor x)
{
    LG_ASSERT(u->skips < SKIPS_MAX);
    u->skip[u->skips++] = x;
}

static lg_tensor down(struct unet *u, lg_tensor x, int level)
{
    const struct lg_conv half = {
        .out = u->shape->channels[level], .kernel = 3, .stride = 2, .init = LG_NET_XAVIER};
    char in[32];
    snprintf(in, sizeof in, "down_blocks.%d.", level);
    for (int j = 0; j < u->shape->layers; j++) keep(u, x = layer(u, x, level, in, j));
    if (level == u->shape->levels - 1) return x;
    lg_net_scope(u->n, "%s", in);
    x = convolved(u, x, half, "downsamplers.0.conv");
    lg_net_scope(u->n, NULL);
    keep(u, x);
    return x;
}

static lg_tensor middle(struct unet *u, lg_tensor x)
{
    const int level = u->shape->levels - 1;
    const int64_t C = u->shape->channels[level];
    begin_block(u);
    x = resnet(u, x, C, "mid_block.resnets.0.");
    x = transformer(u, x, level, u->shape->middle_depth, "mid_block.attentions.0.");
    return resnet(u, x, C, "mid_block.resnets.1.");
}

/* The first of its upward layers reads what the last downward one has made. */
static lg_tensor up(struct unet *u, lg_tensor x, int level)
{
    const struct lg_conv same = {
        .out = u->shape->channels[level], .kernel = 3, .init = LG_NET_XAVIER};
    char in[32];
    snprintf(in, sizeof in, "up_blocks.%d.", u->shape->levels - 1 - level);
    for (int j = 0; j <= u->shape->layers; j++)
        x = layer(u, lg_net_side_by_side(u->n, x, u->skip[--u->skips]), level, in, j);
    if (level == 0) return x;
    const lg_tensor *like = &u->skip[u->skips - 1];
    lg_net_scope(u->n, "%s", in);
    x = lg_net_upsample(u->n, (struct lg_map){.x = x}, like->dim[1], like->dim[2]).x;
    x = convolved(u, x, same, "upsamplers.0.conv");
    lg_net_scope(u->n, NULL);
    return x;
}

/* ---- conditions ---- */

static lg_tensor embedded(struct unet *u, lg_tensor x, const char *name)
{
    const int64_t D = 4 * u->shape->channels[0];
    const struct lg_layer first = {.out = D, .init = LG_NET_XAVIER, .act = LG_ACT_SILU};
    const struct lg_layer second = {.out = D, .init = LG_NET_XAVIER};
    return lg_net_linear(u->n, lg_net_linear(u->n, x, first, "%s.linear_1", name), second,
                         "%s.linear_2", name);
}

/* The pooled text, then the sinusoids of the picture's numbers. */
static lg_tensor added(struct unet *u, const struct lg_model_input *in)
{
    lg_net *n = u->n;
    const int64_t P = u->c->text[CLIP_G].pooled, waves = NUMBERS * u->shape->number_waves;
    lg_tensor all = lg_net_value(n, "added", lg_t2(NULL, n->type, n->batch, P + waves));
    lg_tensor numbers = lg_net_waves(n, in->size, u->shape->number_waves, 0);
    LG_NET_RECORD(n, copy_rows, .x = in->text[CLIP_G].pooled, .y = lg_slice(all, 1, 0, P));
    LG_NET_RECORD(n, copy_rows, .x = lg_at(numbers, 0, lg_t2(NULL, n->type, n->batch, waves)),
                  .y = lg_slice(all, 1, P, waves));
    return embedded(u, all, "add_embedding");
}

/* The texts' states side by side. */
static lg_tensor context(struct unet *u, const struct lg_model_input *in)
{
    if (u->c->n_texts == 1) return in->text[0].states;
    return lg_net_side_by_side(u->n, in->text[CLIP_L].states, in->text[CLIP_G].states);
}

void lg_unet_describe(lg_net *n, const struct lg_denoiser_config *c,
                      const struct lg_model_input *in, lg_tensor out)
{
    struct unet u = {.n = n, .c = c, .shape = &c->unet};
    const int64_t C = c->unet.channels[0], B = n->batch, H = in->x.dim[2], W = in->x.dim[3];
    lg_net_unit(n, "embed");
    lg_tensor e = embedded(&u, lg_net_waves(n, in->t, C, 0), "time_embedding");
    if (c->kind == LG_SDXL) e = lg_net_add(n, e, added(&u, in));
    u.e = lg_net_act(n, e, LG_ACT_SILU);
    u.text = context(&u, in);
    lg_tensor x = lg_net_value(n, "x", lg_t4(NULL, n->type, B, H, W, c->channels));
    LG_NET_RECORD(n, nchw_to_nhwc, .x = in->x, .y = x);
    x = convolved(&u, x, (struct lg_conv){.out = C, .kernel = 3, .init = LG_NET_XAVIER}, "conv_in");
    keep(&u, x);
    for (int level = 0; level < c->unet.levels; level++) x = down(&u, x, level);
    x = middle(&u, x);
    for (int level = c->unet.levels - 1; level >= 0; level--) x = up(&u, x, level);
    LG_ASSERT(u.block == c->depth && !u.skips);
    lg_net_unit(n, "out");
    x = normed(&u, x, norm_of(&u, "conv_norm_out", c->norm_eps, LG_ACT_SILU));
    x = convolved(&u, x, (struct lg_conv){.out = lg_denoiser_out_channels(c), .kernel = 3},
                  "conv_out");
    LG_NET_RECORD(n, nhwc_to_nchw, .x = x, .y = out);
}
