/* Layers of feature maps, for descriptions (layers.h): convolutions and group norms over NHWC.
 *
 * A convolution whose map is normalised next writes means and variances of the map, too, and the norm need not
 * work them out; a norm that a convolution reads is one operation with it. */
#pragma once
#include "stages/nets/layers.h"

struct lg_map {
    lg_tensor x;        // (n, h, w, channels)
    lg_tensor mean_var; // (n, groups, 2) f64: x's, or absent
};

/* GroupNorm over (h, w, channels / groups), then act; NAME.weight and NAME.bias. */
struct lg_group_norm {
    const char *name;
    int groups;
    double eps;
    lg_act act;
};
struct lg_map lg_net_group_norm(lg_net *n, struct lg_map m, struct lg_group_norm norm);
/* A map with statistics of its own, which a norm with a backward needs. */
struct lg_map lg_net_statistics(lg_net *n, lg_tensor x, int groups);

/* Keeps the size, padding with zeros; with stride 2 halves it, padding only right and below, or all round, which of an odd
 * side leaves the larger half. */
struct lg_conv {
    int64_t out;               /* channels */
    int kernel, stride;        /* stride 0: 1 */
    bool is_centred;           /* with stride 2: padding all round */
    struct lg_init init;       /* of its weight; zeros, unless it says something else */
    struct lg_group_norm norm; /* before it; no name: none */
    int groups_next;           /* of the norm that comes next; 0: none does */
    lg_tensor residual;        /* added to the result, or LG_NONE */
    lg_tensor y;               /* where it writes; LG_NONE: a new value */
};
/* NAME.weight and NAME.bias. */
struct lg_map lg_net_conv(lg_net *n, struct lg_map m, struct lg_conv c, const char *name);

/* Twice the size, each pixel four times; or one less of either side, as h and w say. */
struct lg_map lg_net_upsample(lg_net *n, struct lg_map m, int64_t h, int64_t w);
/* x (n, h, w, channels) + shift (n, channels). */
lg_tensor lg_net_shift(lg_net *n, lg_tensor x, lg_tensor shift);
