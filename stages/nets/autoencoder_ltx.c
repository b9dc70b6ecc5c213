/* AutoencoderKLLTXVideo, described.
 *
 * Names, order of norm, activation and convolution, and who sees which frames are those of diffusers. (frames, h, w,
 * channels); norms are RMSNorm over channels without a weight.
 *
 *     resnet:   x + conv2(silu(norm2(conv1(silu(norm1(x)))))), x through LayerNorm and a linear where widths differ
 *     down:     resnets, then a convolution of stride 2 and a resnet that widens; or, since 0.9.5, boxes of a convolution's
 *               result as channels, plus those of its input, averaged over so many channels that as many remain
 *     up:       (widening resnet,) boxes of a convolution's result into space, without the first frame, (plus those of its
 *               input, repeated,) resnets
 *     encoder:  patches, convolution, downs, resnets, norm, silu, convolution to the means and one log-variance
 *     decoder:  convolution, resnets, ups, norm, silu, convolution, patches
 *
 * With a timestep norms are modulated: by a table's rows plus what the block's embedder makes of it. */
#include "stages/nets/encoders.h"
#include "stages/nets/video.h"
#include <stdio.h>

static const char unit[] = "weights";
static const double NORM_EPS = 1e-8;

/* A stretch of the net: what its layers share. */
struct part {
    lg_net *n;
    struct lg_video *clip;
    const struct lg_aeltx_config *c;
    lg_tensor embedded; // (4 channels): what the block's embedder makes of the timestep, or LG_NONE
    char name[64];      /* "encoder.down_blocks.0." */
};

static void scope(const struct part *p, const char *name, int i)
{
    if (i < 0)
        lg_net_scope(p->n, "%s%s.", p->name, name);
    else
        lg_net_scope(p->n, "%s%s.%d.", p->name, name, i);
}

/* count vectors (channels): what the timestep became, and the table of this layer. */
static lg_tensor modulation(lg_net *n, lg_tensor embedded, int count, int64_t channels)
{
    if (!embedded.rank) return LG_NONE;
    const lg_tensor shape = lg_t2(NULL, n->type, count, channels);
    lg_tensor table = lg_net_param(n, LG_NET_ZERO, shape, "scale_shift_table");
    return lg_net_add(n, lg_at(embedded, 0, shape), table);
}

/* Norm i: rows 2 i and 2 i + 1 of the modulation are its shift and scale. */
static struct lg_video_norm norm_of(lg_tensor modulation, int i)
{
    struct lg_video_norm norm = {.eps = NORM_EPS};
    if (!modulation.rank) return norm;
    const lg_tensor row = lg_t1(NULL, modulation.dtype, modulation.dim[1]);
    norm.shift = lg_at(modulation, 2 * i * row.dim[0], row);
    norm.scale = lg_at(modulation, (2 * i + 1) * row.dim[0], row);
    return norm;
}

/* silu(norm(x)), convolved. */
static lg_tensor normed_conv(const struct part *p, lg_tensor x, struct lg_video_norm norm,
                             struct lg_video_conv conv, const char *name)
{
    const struct lg_frames f = lg_video_room(p->n, p->clip, x, 1, 0);
    lg_video_norm_silu(p->n, x, norm, f.own);
    return lg_video_conv(p->n, p->clip, &f, conv, name);
}

static lg_tensor resnet(const struct part *p, lg_tensor x, int out, lg_tensor y)
{
    const lg_tensor m = modulation(p->n, p->embedded, 4, x.dim[3]);
    lg_tensor h =
        normed_conv(p, x, norm_of(m, 0), (struct lg_video_conv){.out = out}, "conv1.conv");
    if (x.dim[3] != out)
        x = lg_video_shortcut(p->n, x, out, p->c->eps, "norm3", "conv_shortcut.conv");
    const struct lg_video_conv second = {.out = out, .residual = x, .y = y};
    return normed_conv(p, h, norm_of(m, 1), second, "conv2.conv");
}

/* y: of the last one. */
static lg_tensor resnets(const struct part *p, lg_tensor x, int count, lg_tensor y)
{
    for (int i = 0; i < count; i++) {
        scope(p, "resnets", i);
        x = resnet(p, x, (int)x.dim[3], i == count - 1 ? y : LG_NONE);
    }
    return x;
}

static lg_tensor of_shape(lg_net *n, lg_tensor t, int64_t frames, int factor, int64_t channels)
{
    return lg_t4(NULL, n->type, frames, t.dim[1] / factor, t.dim[2] / factor, channels);
}

static lg_tensor down(const struct part *p, lg_tensor x, const struct lg_aeltx_block *b)
{
    lg_net *n = p->n;
    const bool has_boxes = b->way >= LG_AELTX_SPACE;
    if (b->way == LG_AELTX_KEEPS) return resnets(p, x, b->layers, LG_NONE);
    const int time = b->way == LG_AELTX_SPACE ? 1 : 2, space = b->way == LG_AELTX_TIME ? 1 : 2;
    const int extra = has_boxes && p->clip->is_first ? time - 1 : 0;
    const struct lg_frames f = lg_video_room(n, p->clip, x, has_boxes ? 1 : 2, extra);
    resnets(p, x, b->layers, f.own);
    scope(p, "downsamplers", 0);
    if (!has_boxes)
        return lg_video_conv(n, p->clip, &f, (struct lg_video_conv){.out = b->in, .stride = 2},
                             "conv");
    const int out = b->out / (time * space * space);
    lg_tensor h = lg_video_conv(n, p->clip, &f, (struct lg_video_conv){.out = out}, "conv.conv");
    const lg_tensor own = lg_slice(f.all, 0, f.before - extra, h.dim[0]);
    lg_tensor y = lg_net_value(n, "boxes", of_shape(n, h, h.dim[0] / time, space, b->out));
    LG_NET_RECORD(n, space_to_depth_forward, .x = h, .mean_of = own, .y = y, .time = time,
                  .space = space);
    return y;
}

static lg_tensor down_block(const struct part *p, lg_tensor x, const struct lg_aeltx_block *b)
{
    x = down(p, x, b);
    if (b->out == b->in || b->way >= LG_AELTX_SPACE) return x;
    scope(p, "conv_out", -1);
    return resnet(p, x, b->out, LG_NONE);
}

/* x is written where the convolution reads it. */
static lg_tensor up(const struct part *p, const struct lg_frames *f, const struct lg_aeltx_block *b)
{
    enum { TIME = 2, SPACE = 2, ALL = TIME * SPACE * SPACE };
    lg_net *n = p->n;
    scope(p, "upsamplers", 0);
    const struct lg_video_conv conv = {.out = b->out * ALL};
    lg_tensor h = lg_video_conv(n, p->clip, f, conv, "conv.conv");
    const int64_t frames = h.dim[0] * TIME - (p->clip->is_first ? TIME - 1 : 0);
    lg_tensor y = lg_net_value(
        n, "space", lg_t4(NULL, n->type, frames, h.dim[1] * SPACE, h.dim[2] * SPACE, b->out));
    LG_NET_RECORD(n, depth_to_space_forward, .x = h, .repeated = b->has_residual ? f->own : LG_NONE,
                  .y = y, .time = TIME, .space = SPACE);
    return y;
}

/* What a block's embedder makes of the timestep: count vectors (channels). */
static lg_tensor embed(const struct part *p, lg_tensor timestep, int64_t count)
{
    if (!timestep.rank) return LG_NONE;
    lg_net_scope(p->n, "%s", p->name);
    return lg_net_timestep(p->n, timestep, count, 0, "time_embedder.timestep_embedder");
}

/* The channels' means and deviations, of which latents are freed. */
struct statistics {
    lg_tensor center, spread;
};
/* Both halves have them, and declare them once. */
static struct statistics statistics_of(lg_net *n, const struct lg_aeltx_config *c)
{
    const lg_tensor channels = lg_t1(NULL, n->type, c->latent_channels);
    if (!n->g) return (struct statistics){channels, channels};
    lg_net_scope(n, NULL);
    return (struct statistics){.center = lg_net_param(n, LG_NET_ZERO, channels, "latents_mean"),
                               .spread = lg_net_param(n, LG_NET_ONE, channels, "latents_std")};
}

void lg_aeltx_declare_statistics(lg_net *n, const struct lg_aeltx_config *c)
{
    const lg_tensor channels = lg_t1(NULL, n->type, c->latent_channels);
    lg_net_unit(n, unit);
    lg_net_scope(n, NULL);
    lg_net_param(n, LG_NET_ZERO, channels, "latents_mean");
    lg_net_param(n, LG_NET_ONE, channels, "latents_std");
}

void lg_aeltx_describe_encoder(lg_net *n, const struct lg_aeltx_config *c, struct lg_video *clip,
                               const struct lg_video_ends *ends)
{
    const struct lg_aeltx_half *e = &c->encoder;
    struct part p = {.n = n, .clip = clip, .c = c, .name = "encoder."};
    lg_net_unit(n, unit);
    const struct statistics s = statistics_of(n, c);
    const lg_tensor pixels = ends->from;
    const int64_t patch = c->patch;
    const struct lg_frames f =
        lg_video_room(n, clip,
                      lg_t4(NULL, n->type, pixels.dim[1], pixels.dim[2] / patch,
                            pixels.dim[3] / patch, pixels.dim[0] * patch * patch),
                      1, 0);
    LG_NET_RECORD(n, clip_to_patches_forward, .x = pixels, .y = f.own, .patch = c->patch);
    lg_net_scope(n, "encoder.");
    lg_tensor x =
        lg_video_conv(n, clip, &f, (struct lg_video_conv){.out = e->first}, "conv_in.conv");
    for (int i = 0; i < e->blocks; i++) {
        snprintf(p.name, sizeof p.name, "encoder.down_blocks.%d.", i);
        x = down_block(&p, x, &e->block[i]);
    }
    snprintf(p.name, sizeof p.name, "encoder.mid_block.");
    x = resnets(&p, x, e->middle_layers, LG_NONE);
    lg_net_scope(n, "encoder.");
    x = normed_conv(&p, x, norm_of(LG_NONE, 0),
                    (struct lg_video_conv){.out = c->latent_channels + 1}, "conv_out.conv");
    LG_NET_RECORD(n, clip_posterior_forward, .x = x, .center = s.center, .spread = s.spread,
                  .mean = ends->to[0], .logvar = ends->to[1]);
}

static lg_tensor up_block(struct part *p, lg_tensor x, const struct lg_aeltx_block *b,
                          lg_tensor timestep)
{
    const bool widens = b->in != b->out, grows = b->way != LG_AELTX_KEEPS;
    struct lg_frames f;
    if (grows && widens) {
        const lg_tensor wide = lg_t4(NULL, p->n->type, x.dim[0], x.dim[1], x.dim[2], b->out);
        f = lg_video_room(p->n, p->clip, wide, 1, 0);
    }
    if (widens) {
        scope(p, "conv_in", -1);
        x = resnet(p, x, b->out, grows ? f.own : LG_NONE);
    } else if (grows) {
        f = lg_video_room(p->n, p->clip, x, 1, 0);
        LG_NET_RECORD(p->n, copy_rows, .x = lg_net_rows(x), .y = lg_net_rows(f.own));
    }
    p->embedded = embed(p, timestep, 4 * b->in);
    if (grows) x = up(p, &f, b);
    return resnets(p, x, b->layers, LG_NONE);
}

void lg_aeltx_describe_decoder(lg_net *n, const struct lg_aeltx_config *c, struct lg_video *clip,
                               const struct lg_video_ends *ends)
{
    const struct lg_aeltx_half *d = &c->decoder;
    struct part p = {.n = n, .clip = clip, .c = c, .name = "decoder.mid_block."};
    lg_tensor timestep = LG_NONE;
    lg_net_unit(n, unit);
    if (c->has_timestep) timestep = lg_net_value(n, "timestep", lg_t1(NULL, n->stats, 1));
    if (c->has_timestep && n->g) lg_graph_zero(n->g, timestep);
    const struct statistics s = statistics_of(n, c);
    const lg_tensor latent = ends->from;
    const struct lg_frames f = lg_video_room(
        n, clip, lg_t4(NULL, n->type, latent.dim[1], latent.dim[2], latent.dim[3], latent.dim[0]),
        1, 0);
    LG_NET_RECORD(n, clip_to_patches_forward, .x = latent, .scale = s.spread, .shift = s.center,
                  .y = f.own, .patch = 1);
    lg_net_scope(n, "decoder.");
    lg_tensor x =
        lg_video_conv(n, clip, &f, (struct lg_video_conv){.out = d->first}, "conv_in.conv");
    p.embedded = embed(&p, timestep, 4 * d->middle);
    x = resnets(&p, x, d->middle_layers, LG_NONE);
    for (int i = 0; i < d->blocks; i++) {
        snprintf(p.name, sizeof p.name, "decoder.up_blocks.%d.", i);
        p.embedded = LG_NONE;
        x = up_block(&p, x, &d->block[i], timestep);
    }
    snprintf(p.name, sizeof p.name, "decoder.");
    const lg_tensor embedded = embed(&p, timestep, 2 * x.dim[3]);
    lg_net_scope(n, "decoder.");
    const lg_tensor m = modulation(n, embedded, 2, x.dim[3]);
    normed_conv(&p, x, norm_of(m, 0),
                (struct lg_video_conv){.out = 3 * c->patch * c->patch, .y = ends->to[0]},
                "conv_out.conv");
}
