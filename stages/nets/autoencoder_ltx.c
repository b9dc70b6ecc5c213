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
 * Where a decoder adds noise (0.9.1), every resnet of a block does so behind both convolutions: noise of each place, the same
 * in all channels and frames, times a scale of each channel.
 * With a timestep norms are modulated: by a table's rows plus what the block's embedder makes of it. */
#include "stages/nets/autoencoder_ltx_parts.h"
#include "stages/nets/encoders.h"
#include <stdio.h>

static const char unit[] = "weights";

static lg_tensor of_shape(lg_net *n, lg_tensor t, int64_t frames, int factor, int64_t channels)
{
    return lg_t4(NULL, n->type, frames, t.dim[1] / factor, t.dim[2] / factor, channels);
}

static lg_tensor down(const struct lg_aeltx_part *p, lg_tensor x, const struct lg_aeltx_block *b)
{
    lg_net *n = p->n;
    const bool has_boxes = b->way >= LG_AELTX_SPACE;
    if (b->way == LG_AELTX_KEEPS) return lg_aeltx_resnets(p, x, b->layers, LG_NONE);
    const int time = b->way == LG_AELTX_SPACE ? 1 : 2, space = b->way == LG_AELTX_TIME ? 1 : 2;
    const int extra = has_boxes && p->clip->is_first ? time - 1 : 0;
    const struct lg_frames f = lg_video_room(n, p->clip, x, has_boxes ? 1 : 2, extra);
    lg_aeltx_resnets(p, x, b->layers, f.own);
    lg_aeltx_scope(p, "downsamplers", 0);
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

static lg_tensor down_block(const struct lg_aeltx_part *p, lg_tensor x,
                            const struct lg_aeltx_block *b)
{
    x = down(p, x, b);
    if (b->out == b->in || b->way >= LG_AELTX_SPACE) return x;
    lg_aeltx_scope(p, "conv_out", -1);
    return lg_aeltx_resnet(p, x, b->out, LG_NONE);
}

/* x is written where the convolution reads it. */
static lg_tensor up(const struct lg_aeltx_part *p, const struct lg_frames *f,
                    const struct lg_aeltx_block *b)
{
    enum { TIME = 2, SPACE = 2, ALL = TIME * SPACE * SPACE };
    lg_net *n = p->n;
    lg_aeltx_scope(p, "upsamplers", 0);
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
static lg_tensor embed(const struct lg_aeltx_part *p, lg_tensor timestep, int64_t count)
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
    struct lg_aeltx_part p = {.n = n, .clip = clip, .c = c, .name = "encoder."};
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
    x = lg_aeltx_resnets(&p, x, e->middle_layers, LG_NONE);
    lg_net_scope(n, "encoder.");
    x = lg_aeltx_normed_conv(&p, x, lg_aeltx_norm(LG_NONE, 0),
                             (struct lg_video_conv){.out = c->latent_channels + 1},
                             "conv_out.conv");
    LG_NET_RECORD(n, clip_posterior_forward, .x = x, .center = s.center, .spread = s.spread,
                  .mean = ends->to[0], .logvar = ends->to[1]);
}

/* Room for what block b grows, of the shape of x, where that is what comes to it; without frames where it is not. */
static struct lg_frames room_before(const struct lg_aeltx_part *p, lg_tensor x,
                                    const struct lg_aeltx_block *b)
{
    if (b->way == LG_AELTX_KEEPS || b->in != b->out) return (struct lg_frames){0};
    return lg_video_room(p->n, p->clip, x, 1, 0);
}

/* f: of x, as room_before has it; then that of the block behind this one, if there is one. */
static lg_tensor up_block(struct lg_aeltx_part *p, lg_tensor x, const struct lg_aeltx_block *b,
                          lg_tensor timestep, struct lg_frames *f, bool is_last)
{
    const bool grows = b->way != LG_AELTX_KEEPS;
    p->embedded = LG_NONE;
    p->has_noise = b->has_noise;
    if (b->in != b->out) {
        const lg_tensor wide = lg_t4(NULL, p->n->type, x.dim[0], x.dim[1], x.dim[2], b->out);
        if (grows) *f = lg_video_room(p->n, p->clip, wide, 1, 0);
        lg_aeltx_scope(p, "conv_in", -1);
        x = lg_aeltx_resnet(p, x, b->out, f->own);
    }
    p->embedded = embed(p, timestep, 4 * b->in);
    if (grows) x = up(p, f, b);
    *f = is_last ? (struct lg_frames){0} : room_before(p, x, b + 1);
    return lg_aeltx_resnets(p, x, b->layers, f->own);
}

void lg_aeltx_describe_decoder(lg_net *n, const struct lg_aeltx_config *c, struct lg_video *clip,
                               const struct lg_video_ends *ends)
{
    const struct lg_aeltx_half *d = &c->decoder;
    struct lg_aeltx_part p = {.n = n, .clip = clip, .c = c, .name = "decoder.mid_block."};
    lg_tensor timestep = LG_NONE;
    lg_net_unit(n, unit);
    if (c->has_timestep) timestep = n->g ? clip->timestep : lg_t1(NULL, n->stats, 1);
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
    p.has_noise = d->middle_has_noise;
    struct lg_frames room = room_before(&p, x, &d->block[0]);
    x = lg_aeltx_resnets(&p, x, d->middle_layers, room.own);
    for (int i = 0; i < d->blocks; i++) {
        snprintf(p.name, sizeof p.name, "decoder.up_blocks.%d.", i);
        x = up_block(&p, x, &d->block[i], timestep, &room, i + 1 == d->blocks);
    }
    snprintf(p.name, sizeof p.name, "decoder.");
    p.has_noise = false;
    const lg_tensor embedded = embed(&p, timestep, 2 * x.dim[3]);
    lg_net_scope(n, "decoder.");
    const lg_tensor m = lg_aeltx_modulation(n, embedded, 2, x.dim[3]);
    lg_aeltx_normed_conv(&p, x, lg_aeltx_norm(m, 0),
                         (struct lg_video_conv){.out = 3 * c->patch * c->patch, .y = ends->to[0]},
                         "conv_out.conv");
}
