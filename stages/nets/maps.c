/* See maps.h. */
#include "stages/nets/maps.h"

static lg_tensor map_value(lg_net *n, const char *name, lg_tensor like, int64_t h, int64_t w,
                           int64_t channels)
{
    return lg_net_value(n, name, lg_t4(NULL, n->type, like.dim[0], h, w, channels));
}

/* Takes the norm's parameters. */
static struct lg_group_norm_forward_args norm_args(lg_net *n, const struct lg_group_norm *norm,
                                                   const struct lg_map *m)
{
    const lg_tensor channels = lg_t1(NULL, n->type, m->x.dim[3]);
    lg_tensor w = lg_net_param(n, LG_NET_ONE, channels, "%s.weight", norm->name);
    lg_tensor b = lg_net_param(n, LG_NET_ZERO, channels, "%s.bias", norm->name);
    return (struct lg_group_norm_forward_args){.x = m->x,
                                               .mean_var = m->mean_var,
                                               .w = w,
                                               .b = b,
                                               .y = lg_net_value(n, "norm", m->x),
                                               .groups = norm->groups,
                                               .eps = norm->eps,
                                               .act = norm->act};
}

struct lg_map lg_net_group_norm(lg_net *n, struct lg_map m, struct lg_group_norm norm)
{
    struct lg_group_norm_forward_args a = norm_args(n, &norm, &m);
    if (n->s) lg_group_norm_forward(n->s, &a);
    return (struct lg_map){.x = a.y};
}

struct lg_map lg_net_statistics(lg_net *n, lg_tensor x, int groups)
{
    struct lg_map m = {.x = x};
    m.mean_var = lg_net_value(n, "mean_var", lg_t3(NULL, LG_F64, x.dim[0], groups, 2));
    LG_NET_RECORD(n, group_mean_var_forward, .x = x, .mean_var = m.mean_var);
    return m;
}

struct lg_map lg_net_conv(lg_net *n, struct lg_map m, struct lg_conv c, const char *name)
{
    const int stride = LG_MAX(c.stride, 1), after = c.kernel / 2;
    const int before = stride == 2 && !c.is_centred ? 0 : after;
    const int64_t in = m.x.dim[3], padding = before + after - c.kernel;
    struct lg_norm_conv2d_forward_args both = {0};
    if (c.norm.name) both.norm = norm_args(n, &c.norm, &m);
    lg_tensor w = lg_net_filter(n, c.init, c.out, in, c.kernel, name);
    lg_tensor bias = lg_net_param(n, LG_NET_ZERO, lg_t1(NULL, n->type, c.out), "%s.bias", name);
    struct lg_map made = {.x = c.y};
    if (!c.y.rank)
        made.x = map_value(n, name, m.x, (m.x.dim[1] + padding) / stride + 1,
                           (m.x.dim[2] + padding) / stride + 1, c.out);
    if (c.groups_next)
        made.mean_var =
            lg_net_value(n, "mean_var", lg_t3(NULL, LG_F64, m.x.dim[0], c.groups_next, 2));
    both.conv = (struct lg_conv2d_forward_args){.x = c.norm.name ? both.norm.y : m.x,
                                                .w = w,
                                                .bias = bias,
                                                .residual = c.residual,
                                                .y = made.x,
                                                .mean_var = made.mean_var,
                                                .stride = stride,
                                                .top = before,
                                                .left = before,
                                                .bottom = after,
                                                .right = after};
    n->flops += 2.0 * (double)lg_numel(&made.x) * (double)(in * c.kernel * c.kernel);
    if (n->s && c.norm.name)
        lg_norm_conv2d_forward(n->s, &both);
    else if (n->s)
        lg_conv2d_forward(n->s, &both.conv);
    return made;
}

struct lg_map lg_net_upsample(lg_net *n, struct lg_map m, int64_t h, int64_t w)
{
    lg_tensor y = map_value(n, "upsampled", m.x, h, w, m.x.dim[3]);
    LG_NET_RECORD(n, upsample2x_forward, .x = m.x, .y = y);
    return (struct lg_map){.x = y};
}

lg_tensor lg_net_shift(lg_net *n, lg_tensor x, lg_tensor shift)
{
    const int64_t B = x.dim[0], T = x.dim[1] * x.dim[2], C = x.dim[3];
    const lg_tensor rows = lg_t3(NULL, x.dtype, B, T, C);
    lg_tensor y = lg_net_value(n, "shifted", x);
    LG_NET_RECORD(n, shift_forward, .x = lg_at(x, 0, rows), .shift = shift, .y = lg_at(y, 0, rows));
    return y;
}
