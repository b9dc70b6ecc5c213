/* See video.h. */
#include "stages/nets/video.h"

static lg_tensor like(lg_net *n, lg_tensor t, int64_t frames, int64_t channels)
{
    return lg_t4(NULL, n->type, frames, t.dim[1], t.dim[2], channels);
}

struct lg_frames lg_video_room(lg_net *n, const struct lg_video *clip, lg_tensor own, int stride,
                               int extra)
{
    const int seen = LG_VIDEO_KERNEL - 1;
    struct lg_frames f = {.keep = LG_VIDEO_KERNEL - stride};
    LG_ASSERT(clip->is_causal || (clip->is_first && clip->is_last));
    f.before = clip->is_first ? (clip->is_causal ? seen : seen / 2) + extra : f.keep;
    f.after = clip->is_causal ? 0 : seen / 2;
    f.all = lg_net_value(n, "frames", like(n, own, f.before + own.dim[0] + f.after, own.dim[3]));
    f.own = lg_slice(f.all, 0, f.before, own.dim[0]);
    return f;
}

static void copy(lg_net *n, lg_tensor x, lg_tensor y)
{
    const lg_tensor row = lg_t2(NULL, n->type, 1, lg_numel(&x));
    LG_NET_RECORD(n, copy_rows, .x = lg_at(x, 0, row), .y = lg_at(y, 0, row));
}

/* What lies beside the frames of f, and what the next slice will see of them. */
static void fill(lg_net *n, struct lg_video *clip, const struct lg_frames *f)
{
    const int64_t frames = f->all.dim[0], own = f->own.dim[0], each = f->all.stride[0];
    for (int i = 0; clip->is_first && i < f->before; i++)
        copy(n, lg_slice(f->own, 0, 0, 1), lg_slice(f->all, 0, i, 1));
    for (int i = 0; i < f->after; i++)
        copy(n, lg_slice(f->own, 0, own - 1, 1), lg_slice(f->all, 0, frames - 1 - i, 1));
    const lg_tensor kept = like(n, f->all, f->keep, f->all.dim[3]);
    if (!clip->is_first)
        copy(n, lg_at(clip->carried, clip->at, kept), lg_slice(f->all, 0, 0, f->keep));
    if (!clip->is_last)
        copy(n, lg_slice(f->all, 0, frames - f->keep, f->keep),
             lg_at(clip->carries, clip->at, kept));
    clip->at += f->keep * each;
}

lg_tensor lg_video_conv(lg_net *n, struct lg_video *clip, const struct lg_frames *f,
                        struct lg_video_conv c, const char *name)
{
    const int stride = LG_MAX(c.stride, 1), k = LG_VIDEO_KERNEL;
    const int64_t in = f->all.dim[3], *dim = f->all.dim;
    fill(n, clip, f);
    lg_tensor w = lg_net_clip_filter(n, (struct lg_init){0}, c.out, in, k, name);
    lg_tensor bias = lg_net_param(n, LG_NET_ZERO, lg_t1(NULL, n->type, c.out), "%s.bias", name);
    lg_tensor y = c.y;
    if (!y.rank)
        y = lg_net_value(n, name,
                         lg_t4(NULL, n->type, (dim[0] - k) / stride + 1, (dim[1] - 1) / stride + 1,
                               (dim[2] - 1) / stride + 1, c.out));
    LG_NET_RECORD(n, conv3d_forward, .x = f->all, .w = w, .bias = bias, .residual = c.residual,
                  .y = y, .stride_time = stride, .stride = stride, .pad = k / 2);
    n->flops += 2.0 * (double)lg_numel(&y) * (double)(in * k * k * k);
    return y;
}

lg_tensor lg_video_norm_silu(lg_net *n, lg_tensor x, struct lg_video_norm norm, lg_tensor y)
{
    if (!y.rank) y = lg_net_value(n, "norm", x);
    LG_NET_RECORD(n, rms_act_forward, .x = lg_net_rows(x), .shift = norm.shift, .scale = norm.scale,
                  .y = lg_net_rows(y), .eps = norm.eps, .act = LG_ACT_SILU);
    return y;
}

/* v (M) as the first column of (M, 8), beside zeros: libraries' products want rows of 16 bytes. */
static lg_tensor widened(lg_net *n, lg_tensor v)
{
    enum { WIDE = 8 };
    const int64_t rows = lg_numel(&v);
    lg_tensor y = lg_net_value(n, "column", lg_t2(NULL, n->type, rows, WIDE));
    lg_tensor zeros = lg_net_value(n, "zeros", lg_t2(NULL, n->type, rows, WIDE - 1));
    if (n->g) lg_graph_zero(n->g, zeros);
    LG_NET_RECORD(n, copy_rows, .x = lg_at(v, 0, lg_t2(NULL, n->type, rows, 1)),
                  .y = lg_slice(y, 1, 0, 1));
    LG_NET_RECORD(n, copy_rows, .x = zeros, .y = lg_slice(y, 1, 1, WIDE - 1));
    return y;
}

lg_tensor lg_video_add_noise(lg_net *n, struct lg_video *clip, lg_tensor x, lg_tensor y,
                             const char *name)
{
    const int64_t places = x.dim[1] * x.dim[2], channels = x.dim[3];
    lg_tensor scale =
        lg_net_param(n, LG_NET_ZERO, lg_t3(NULL, n->type, channels, 1, 1), "%s", name);
    lg_tensor noise = lg_at(clip->noise, clip->noise_at, lg_t1(NULL, n->type, places));
    lg_tensor each = lg_net_value(n, "noise", lg_t2(NULL, n->type, places, channels));
    clip->noise_at += places;
    LG_NET_RECORD(n, linear_forward, .x = widened(n, noise), .w = widened(n, scale), .y = each);
    if (!y.rank) y = lg_net_value(n, "noisy", x);
    lg_net_add_into(n, x, each, y);
    return y;
}

lg_tensor lg_video_shortcut(lg_net *n, lg_tensor x, int64_t out, double eps, const char *norm,
                            const char *name)
{
    const int64_t in = x.dim[3], dim[] = {out, in, 1, 1, 1};
    lg_tensor h = lg_net_layer_norm(n, lg_net_rows(x), eps, LG_NONE, norm);
    lg_tensor w = lg_net_param(n, (struct lg_init){0}, lg_tensor_of(NULL, n->type, 5, dim),
                               "%s.weight", name);
    lg_tensor bias = lg_net_param(n, LG_NET_ZERO, lg_t1(NULL, n->type, out), "%s.bias", name);
    lg_tensor y = lg_net_value(n, name, like(n, x, x.dim[0], out));
    /* Frame by frame: a library may take another algorithm, and with it other bits, for another number of rows. */
    const int64_t rows = x.dim[1] * x.dim[2];
    for (int64_t i = 0; i < x.dim[0]; i++)
        LG_NET_RECORD(n, linear_forward, .x = lg_slice(h, 0, i * rows, rows),
                      .w = lg_at(w, 0, lg_t2(NULL, n->type, out, in)), .bias = bias,
                      .y = lg_net_rows(lg_slice(y, 0, i, 1)));
    n->flops += 2.0 * (double)lg_numel(&y) * (double)in;
    return y;
}
