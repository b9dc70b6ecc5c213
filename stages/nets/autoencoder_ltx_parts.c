/* See autoencoder_ltx_parts.h. */
#include "stages/nets/autoencoder_ltx_parts.h"

static const double NORM_EPS = 1e-8;

void lg_aeltx_scope(const struct lg_aeltx_part *p, const char *name, int i)
{
    if (i < 0)
        lg_net_scope(p->n, "%s%s.", p->name, name);
    else
        lg_net_scope(p->n, "%s%s.%d.", p->name, name, i);
}

lg_tensor lg_aeltx_modulation(lg_net *n, lg_tensor embedded, int count, int64_t channels)
{
    if (!embedded.rank) return LG_NONE;
    const lg_tensor shape = lg_t2(NULL, n->type, count, channels);
    lg_tensor table = lg_net_param(n, LG_NET_ZERO, shape, "scale_shift_table");
    return lg_net_add(n, lg_at(embedded, 0, shape), table);
}

struct lg_video_norm lg_aeltx_norm(lg_tensor modulation, int i)
{
    struct lg_video_norm norm = {.eps = NORM_EPS};
    if (!modulation.rank) return norm;
    const lg_tensor row = lg_t1(NULL, modulation.dtype, modulation.dim[1]);
    norm.shift = lg_at(modulation, 2 * i * row.dim[0], row);
    norm.scale = lg_at(modulation, (2 * i + 1) * row.dim[0], row);
    return norm;
}

lg_tensor lg_aeltx_normed_conv(const struct lg_aeltx_part *p, lg_tensor x,
                               struct lg_video_norm norm, struct lg_video_conv conv,
                               const char *name)
{
    const struct lg_frames f = lg_video_room(p->n, p->clip, x, 1, 0);
    lg_video_norm_silu(p->n, x, norm, f.own);
    return lg_video_conv(p->n, p->clip, &f, conv, name);
}

lg_tensor lg_aeltx_resnet(const struct lg_aeltx_part *p, lg_tensor x, int out, lg_tensor y)
{
    const lg_tensor m = lg_aeltx_modulation(p->n, p->embedded, 4, x.dim[3]);
    lg_tensor h = lg_aeltx_normed_conv(p, x, lg_aeltx_norm(m, 0),
                                       (struct lg_video_conv){.out = out}, "conv1.conv");
    if (p->has_noise) h = lg_video_add_noise(p->n, p->clip, h, LG_NONE, "per_channel_scale1");
    if (x.dim[3] != out)
        x = lg_video_shortcut(p->n, x, out, p->c->eps, "norm3", "conv_shortcut.conv");
    const struct lg_video_conv second = {
        .out = out, .residual = x, .y = p->has_noise ? LG_NONE : y};
    h = lg_aeltx_normed_conv(p, h, lg_aeltx_norm(m, 1), second, "conv2.conv");
    return p->has_noise ? lg_video_add_noise(p->n, p->clip, h, y, "per_channel_scale2") : h;
}

lg_tensor lg_aeltx_resnets(const struct lg_aeltx_part *p, lg_tensor x, int count, lg_tensor y)
{
    for (int i = 0; i < count; i++) {
        lg_aeltx_scope(p, "resnets", i);
        x = lg_aeltx_resnet(p, x, (int)x.dim[3], i == count - 1 ? y : LG_NONE);
    }
    return x;
}
