/* AutoencoderKL, described.
 *
 * Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022; names, padding,
 * strides and the order of norm, activation and convolution are those of diffusers (DownEncoderBlock2D,
 * UNetMidBlock2D, UpDecoderBlock2D). Everything is NHWC.
 *
 *     resnet:    x + conv2(silu(norm2(conv1(silu(norm1(x)))))), x through a 1x1 convolution where widths differ
 *     attention: x + out(attention(q, k, v of norm(x))), one head as wide as the map
 *     middle:    resnet, attention, resnet
 *     encoder:   conv_in; per block resnets and, but in the last, a convolution of stride 2; middle; norm, conv_out
 *     decoder:   conv_in; middle; per block resnets, one more than the encoder has, and, but in the last,
 *                a doubling and a convolution; norm, conv_out */
#include "stages/nets/encoders.h"
#include "stages/nets/maps.h"

/* Of both halves: the decoder's parameters follow the encoder's like any others. */
static const char unit[] = "weights";

static struct lg_group_norm norm(const struct lg_aekl_config *c, const char *name, lg_act act)
{
    return (struct lg_group_norm){.name = name, .groups = c->norm_groups, .eps = 1e-6, .act = act};
}

/* Of 3x3. then_norm: a norm comes next. */
static struct lg_map conv(lg_net *n, const struct lg_aekl_config *c, struct lg_map m, int64_t out,
                          bool then_norm, const char *name)
{
    const int groups = then_norm ? c->norm_groups : 0;
    return lg_net_conv(n, m, (struct lg_conv){.out = out, .kernel = 3, .groups_next = groups},
                       name);
}

static struct lg_map pointwise(lg_net *n, struct lg_map m, int64_t out, const char *name)
{
    return lg_net_conv(n, m, (struct lg_conv){.out = out, .kernel = 1}, name);
}

static struct lg_map resnet(lg_net *n, const struct lg_aekl_config *c, struct lg_map x, int64_t out,
                            bool then_norm)
{
    struct lg_conv first = {.out = out,
                            .kernel = 3,
                            .norm = norm(c, "norm1", LG_ACT_SILU),
                            .groups_next = c->norm_groups};
    struct lg_conv second = {.out = out,
                             .kernel = 3,
                             .norm = norm(c, "norm2", LG_ACT_SILU),
                             .groups_next = then_norm ? c->norm_groups : 0};
    struct lg_map h = lg_net_conv(n, x, first, "conv1");
    if (x.x.dim[3] != out) x = pointwise(n, x, out, "conv_shortcut");
    second.residual = x.x;
    return lg_net_conv(n, h, second, "conv2");
}

static struct lg_map attention(lg_net *n, const struct lg_aekl_config *c, struct lg_map x)
{
    static const char *const names[] = {"q", "k", "v"};
    const int64_t T = x.x.dim[1] * x.x.dim[2], C = x.x.dim[3];
    const struct lg_layer packed = {.out = 3 * C, .parts = names, .n_parts = 3};
    lg_tensor h = lg_net_group_norm(n, x, norm(c, "group_norm", LG_ACT_NONE)).x, part[3];
    lg_tensor qkv = lg_net_linear(n, h, packed, "to_");
    qkv = lg_at(qkv, 0, lg_t3(NULL, n->type, x.x.dim[0], T, 3 * C));
    for (int i = 0; i < 3; i++) part[i] = lg_net_heads(qkv, 1, C, i);
    h = lg_net_attention(n, (struct lg_attention){.q = part[0], .k = part[1], .v = part[2]});
    h = lg_net_linear(n, h, (struct lg_layer){.out = C}, "to_out.0");
    return (struct lg_map){.x = lg_net_add(n, x.x, lg_at(h, 0, x.x))};
}

static struct lg_map middle(lg_net *n, const struct lg_aekl_config *c, struct lg_map m,
                            const char *half)
{
    const int64_t channels = m.x.dim[3];
    lg_net_scope(n, "%s.mid_block.resnets.0.", half);
    m = resnet(n, c, m, channels, true);
    lg_net_scope(n, "%s.mid_block.attentions.0.", half);
    if (c->mid_attention) m = attention(n, c, m);
    lg_net_scope(n, "%s.mid_block.resnets.1.", half);
    return resnet(n, c, m, channels, true);
}

static struct lg_map down_block(lg_net *n, const struct lg_aekl_config *c, struct lg_map m, int i)
{
    const bool last = i == c->blocks - 1;
    const int64_t channels = c->block_out_channels[i];
    for (int j = 0; j < c->layers_per_block; j++) {
        lg_net_scope(n, "encoder.down_blocks.%d.resnets.%d.", i, j);
        m = resnet(n, c, m, channels, last || j < c->layers_per_block - 1);
    }
    if (last) return m;
    lg_net_scope(n, "encoder.down_blocks.%d.downsamplers.0.", i);
    const struct lg_conv half = {
        .out = channels, .kernel = 3, .stride = 2, .groups_next = c->norm_groups};
    return lg_net_conv(n, m, half, "conv");
}

static struct lg_map up_block(lg_net *n, const struct lg_aekl_config *c, struct lg_map m, int i)
{
    const bool last = i == c->blocks - 1;
    const int64_t channels = c->block_out_channels[c->blocks - 1 - i];
    for (int j = 0; j <= c->layers_per_block; j++) {
        lg_net_scope(n, "decoder.up_blocks.%d.resnets.%d.", i, j);
        m = resnet(n, c, m, channels, last || j < c->layers_per_block);
    }
    if (last) return m;
    lg_net_scope(n, "decoder.up_blocks.%d.upsamplers.0.", i);
    return conv(n, c, lg_net_upsample(n, m, 2 * m.x.dim[1], 2 * m.x.dim[2]), channels, true,
                "conv");
}

/* Pictures (n, H, W, 3) to means and logarithms (n, h, w, 2 C). */
static lg_tensor encoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor pictures)
{
    const int64_t out = 2 * c->latent_channels;
    struct lg_map m = {.x = pictures};
    lg_net_unit(n, unit);
    lg_net_scope(n, "encoder.");
    m = conv(n, c, m, c->block_out_channels[0], true, "conv_in");
    for (int i = 0; i < c->blocks; i++) m = down_block(n, c, m, i);
    m = middle(n, c, m, "encoder");
    lg_net_scope(n, "encoder.");
    m = lg_net_group_norm(n, m, norm(c, "conv_norm_out", LG_ACT_SILU));
    m = conv(n, c, m, out, false, "conv_out");
    lg_net_scope(n, NULL);
    if (c->quant_conv) m = pointwise(n, m, out, "quant_conv");
    return m.x;
}

/* Latents (n, h, w, C) to pictures (n, H, W, 3). */
static void decoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor latents,
                    lg_tensor pictures)
{
    struct lg_map m = {.x = latents};
    lg_net_unit(n, unit);
    lg_net_scope(n, NULL);
    if (c->post_quant_conv) m = pointwise(n, m, c->latent_channels, "post_quant_conv");
    lg_net_scope(n, "decoder.");
    m = conv(n, c, m, c->block_out_channels[c->blocks - 1], true, "conv_in");
    m = middle(n, c, m, "decoder");
    for (int i = 0; i < c->blocks; i++) m = up_block(n, c, m, i);
    lg_net_scope(n, "decoder.");
    m = lg_net_group_norm(n, m, norm(c, "conv_norm_out", LG_ACT_SILU));
    lg_net_conv(n, m, (struct lg_conv){.out = c->out_channels, .kernel = 3, .y = pictures},
                "conv_out");
}

void lg_aekl_describe_encoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor pixels,
                              lg_tensor mean, lg_tensor logvar)
{
    const lg_tensor shape =
        lg_t4(NULL, n->type, n->batch, pixels.dim[2], pixels.dim[3], c->in_channels);
    lg_tensor x = lg_net_value(n, "pixels", shape);
    LG_NET_RECORD(n, pixels_to_nhwc, .x = pixels, .y = x);
    x = encoder(n, c, x);
    LG_NET_RECORD(n, posterior_split, .x = x, .mean = mean, .logvar = logvar);
}

void lg_aekl_describe_decoder(lg_net *n, const struct lg_aekl_config *c, lg_tensor latent,
                              lg_tensor picture)
{
    const lg_tensor shape =
        lg_t4(NULL, n->type, n->batch, latent.dim[2], latent.dim[3], c->latent_channels);
    lg_tensor x = lg_net_value(n, "latent", shape);
    LG_NET_RECORD(n, nchw_to_nhwc, .x = latent, .y = x);
    decoder(n, c, x, picture);
}

/* Frames (C|D H W) of a clip as pictures (D, H, W, C). */
static lg_tensor frames(lg_net *n, lg_tensor clip)
{
    const int64_t *dim = clip.dim;
    lg_tensor y = lg_net_value(n, "frames", lg_t4(NULL, n->type, dim[1], dim[2], dim[3], dim[0]));
    LG_NET_RECORD(n, clip_to_patches_forward, .x = clip, .y = y, .patch = 1);
    return y;
}

void lg_aekl_describe_video_encoder(lg_net *n, const struct lg_aekl_config *c,
                                    const struct lg_video_ends *ends)
{
    lg_tensor x = encoder(n, c, frames(n, ends->from));
    LG_NET_RECORD(n, clip_posterior_forward, .x = x, .mean = ends->to[0], .logvar = ends->to[1]);
}

void lg_aekl_describe_video_decoder(lg_net *n, const struct lg_aekl_config *c,
                                    const struct lg_video_ends *ends)
{
    decoder(n, c, frames(n, ends->from), ends->to[0]);
}
