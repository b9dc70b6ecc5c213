/* The layers of AutoencoderKL; see aekl_walk.h.
 *
 * Every layer function takes its parameters from the table's next rows, or adds these rows when it
 * declares; so the order of the table is the order of the walk. Three buffers are enough for any
 * net: a residual block reads its input (`at`), and works in the two others; which buffer holds
 * the map afterwards is a matter of book-keeping. Everything is NHWC. A convolution whose map is
 * normalised next writes means and variances of the map, too, and the norm need not work them out; a norm that a
 * convolution reads is one operation with it.
 *
 * Invariants: a layer leaves the map in buffer `at` with its shape in n, h, w, channels; the two
 * other buffers hold nothing that is still needed. Padding, strides and the order of norm,
 * activation and convolution are those of diffusers (DownEncoderBlock2D, UNetMidBlock2D,
 * UpDecoderBlock2D). */
#include "stages/nets/aekl_walk.h"
#include <math.h>
#include <stdio.h>

#define NORM_EPS 1e-6

/* ---- parameters ---- */

static lg_tensor param(struct lg_aekl_walk *k, const struct lg_param *spec, bool packed)
{
    if (!k->s) {
        if (packed)
            lg_params_add_packed(k->table, spec);
        else
            lg_params_add(k->table, spec);
        return LG_NONE;
    }
    LG_ASSERT(k->next < k->table->n);
    const struct lg_param *p = &k->table->p[k->next++];
    LG_ASSERT(p->rank == spec->rank && p->dim[0] == spec->dim[0] && p->dim[1] == spec->dim[1]);
    size_t at = p->offset * lg_dtype_bytes(k->dtype);
    lg_tensor t = {k->weights ? (void *)(uintptr_t)(k->weights + at) : NULL,
                   k->dtype,
                   p->rank,
                   {p->dim[0], 1, 1, 1}};
    if (p->layout == LG_LAYOUT_CONV_OHWI)
        t.dim[1] = p->dim[2], t.dim[2] = p->dim[3], t.dim[3] = p->dim[1];
    else
        for (int i = 1; i < p->rank; i++) t.dim[i] = p->dim[i];
    return t;
}

static void set_name(struct lg_param *p, const char *layer, const char *leaf)
{
    int n = snprintf(p->name, sizeof p->name, "%s.%s", layer, leaf);
    LG_ASSERT(n > 0 && (size_t)n < sizeof p->name);
}

static lg_tensor vector(struct lg_aekl_walk *k, const char *layer, const char *leaf, int64_t n,
                        bool packed)
{
    struct lg_param p = {.rank = 1, .dim = {n}};
    set_name(&p, layer, leaf);
    return param(k, &p, packed);
}

static lg_tensor matrix(struct lg_aekl_walk *k, const char *layer, const char *leaf, int64_t n,
                        bool packed)
{
    struct lg_param p = {.rank = 2, .dim = {n, n}};
    set_name(&p, layer, leaf);
    return param(k, &p, packed);
}

/* ---- layers ---- */

static int other(int buffer, int i)
{
    return (buffer + i) % LG_AEKL_BUFFERS;
}

/* The map of this many channels in a buffer. */
static lg_tensor map_in(struct lg_aekl_walk *k, int buffer, int64_t channels)
{
    size_t elements = (size_t)(k->n * k->h * k->w * channels);
    k->need[buffer] = LG_MAX(k->need[buffer], elements);
    return lg_t4(k->buffer[buffer], k->dtype, k->n, k->h, k->w, channels);
}

struct norm {
    const char *layer, *leaf; /* "conv_norm_out", NULL for a layer that is a norm itself */
    int from, to;
    int64_t channels;
    lg_act act;
};
struct conv {
    const char *name;
    const struct norm *norm; /* before it, into `from`; or NULL */
    int from, to, residual;  /* buffers; residual -1: none; may be `to` */
    int64_t in, out;         /* channels */
    int kernel, stride;
    bool then_norm;
};

static lg_tensor mean_var_of(const struct lg_aekl_walk *k)
{
    return lg_t3(k->mean_var, LG_F64, k->n, k->c->norm_groups, 2);
}

/* Takes the norm's parameters; nothing where it only declares. */
static struct lg_group_norm_forward_args norm_args(struct lg_aekl_walk *k, const struct norm *a)
{
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s%s%s", a->layer, a->leaf ? "." : "", a->leaf ? a->leaf : "");
    lg_tensor w = vector(k, name, "weight", a->channels, false);
    lg_tensor b = vector(k, name, "bias", a->channels, false);
    if (!k->s) return (struct lg_group_norm_forward_args){0};
    return (struct lg_group_norm_forward_args){.x = map_in(k, a->from, a->channels),
                                               .mean_var = k->measured == a->from ? mean_var_of(k)
                                                                                  : LG_NONE,
                                               .w = w,
                                               .b = b,
                                               .y = map_in(k, a->to, a->channels),
                                               .groups = k->c->norm_groups,
                                               .eps = NORM_EPS,
                                               .act = a->act};
}

/* A buffer gets another map, whose means and variances are known or not. */
static void note_mean_var(struct lg_aekl_walk *k, int buffer, bool measured)
{
    if (measured)
        k->measured = buffer;
    else if (k->measured == buffer)
        k->measured = -1;
}

static void norm(struct lg_aekl_walk *k, const struct norm *a)
{
    struct lg_group_norm_forward_args args = norm_args(k, a);
    if (!k->s) return;
    lg_group_norm_forward(k->s, &args);
    note_mean_var(k, a->to, false);
}

/* A 3x3 convolution keeps the size; with stride 2 it halves it, padding only right and below. Sets
 * h and w, not at and channels. */
static void conv(struct lg_aekl_walk *k, const struct conv *c)
{
    struct lg_norm_conv2d_forward_args both = {0};
    if (c->norm) both.norm = norm_args(k, c->norm);
    struct lg_param p = {
        .rank = 4, .dim = {c->out, c->in, c->kernel, c->kernel}, .layout = LG_LAYOUT_CONV_OHWI};
    set_name(&p, c->name, "weight");
    lg_tensor w = param(k, &p, false), bias = vector(k, c->name, "bias", c->out, false);
    if (!k->s) return;
    int after = c->kernel / 2, before = c->stride == 2 ? 0 : after;
    lg_tensor x = map_in(k, c->from, c->in);
    k->h /= c->stride;
    k->w /= c->stride;
    both.conv = (struct lg_conv2d_forward_args){
        .x = x,
        .w = w,
        .bias = bias,
        .residual = c->residual < 0 ? LG_NONE : map_in(k, c->residual, c->out),
        .y = map_in(k, c->to, c->out),
        .mean_var = c->then_norm ? mean_var_of(k) : LG_NONE,
        .stride = c->stride,
        .top = before,
        .left = before,
        .bottom = after,
        .right = after};
    if (c->norm)
        lg_norm_conv2d_forward(k->s, &both);
    else
        lg_conv2d_forward(k->s, &both.conv);
    if (c->norm) note_mean_var(k, c->from, false);
    note_mean_var(k, c->to, c->then_norm);
}

struct conv_map {
    const char *name;
    int64_t out;
    int kernel, stride;
    bool then_norm;
};

/* A convolution from the map to the map. */
static void conv_map(struct lg_aekl_walk *k, const struct conv_map *c)
{
    int to = other(k->at, 1);
    conv(k, &(struct conv){.name = c->name,
                           .from = k->at,
                           .to = to,
                           .residual = -1,
                           .in = k->channels,
                           .out = c->out,
                           .kernel = c->kernel,
                           .stride = c->stride,
                           .then_norm = c->then_norm});
    k->at = to;
    k->channels = c->out;
}

/* x + conv2(silu(norm2(conv1(silu(norm1(x)))))), x through a 1x1 convolution where widths differ;
 * then_norm: a norm comes next. */
static void resnet(struct lg_aekl_walk *k, const char *layer, int64_t out, bool then_norm)
{
    char conv1[LG_PARAM_NAME_BYTES], conv2[LG_PARAM_NAME_BYTES], shortcut[LG_PARAM_NAME_BYTES];
    snprintf(conv1, sizeof conv1, "%s.conv1", layer);
    snprintf(conv2, sizeof conv2, "%s.conv2", layer);
    snprintf(shortcut, sizeof shortcut, "%s.conv_shortcut", layer);
    int64_t in = k->channels;
    int x = k->at, a = other(x, 1), b = other(x, 2);
    struct norm norm1 = {layer, "norm1", x, a, in, LG_ACT_SILU};
    struct norm norm2 = {layer, "norm2", b, b, out, LG_ACT_SILU};
    conv(k, &(struct conv){conv1, &norm1, a, b, -1, in, out, 3, 1, true});
    if (in != out) {
        conv(k, &(struct conv){shortcut, NULL, x, a, -1, in, out, 1, 1, false});
        x = a;
    }
    conv(k, &(struct conv){conv2, &norm2, b, x, x, out, out, 3, 1, then_norm});
    k->at = x;
    k->channels = out;
}

/* x + out(attention(q, k, v of norm(x))), one head as wide as the map. */
static void attention(struct lg_aekl_walk *k, const char *layer)
{
    char out[LG_PARAM_NAME_BYTES];
    snprintf(out, sizeof out, "%s.to_out.0", layer);
    int64_t C = k->channels, T = k->h * k->w;
    int x = k->at, a = other(x, 1), b = other(x, 2);
    norm(k, &(struct norm){layer, "group_norm", x, a, C, LG_ACT_NONE});
    lg_tensor w = matrix(k, layer, "to_q.weight", C, false);
    matrix(k, layer, "to_k.weight", C, true);
    matrix(k, layer, "to_v.weight", C, true);
    lg_tensor bias = vector(k, layer, "to_q.bias", C, false);
    vector(k, layer, "to_k.bias", C, true);
    vector(k, layer, "to_v.bias", C, true);
    lg_tensor out_w = matrix(k, out, "weight", C, false);
    lg_tensor out_bias = vector(k, out, "bias", C, false);
    if (!k->s) return;
    lg_dtype t = k->dtype;
    char *qkv = map_in(k, b, 3 * C).data;
    void *o = map_in(k, a, C).data;
    size_t offset = (size_t)C * lg_dtype_bytes(t);
    w.dim[0] = bias.dim[0] = 3 * C; /* q, k and v are packed: one product */
    lg_linear_forward(k->s, &(struct lg_linear_forward_args){.x = lg_t2(o, t, k->n * T, C),
                                                             .w = w,
                                                             .bias = bias,
                                                             .y = lg_t2(qkv, t, k->n * T, 3 * C)});
    lg_attention_forward(k->s, &(struct lg_attention_forward_args){
                                   .q = lg_t4(qkv, t, k->n, T, 1, C),
                                   .k = lg_t4(qkv ? qkv + offset : NULL, t, k->n, T, 1, C),
                                   .v = lg_t4(qkv ? qkv + 2 * offset : NULL, t, k->n, T, 1, C),
                                   .q_stride = 3 * C,
                                   .kv_stride = 3 * C,
                                   .o = lg_t4(o, t, k->n, T, 1, C),
                                   .scale = 1 / sqrt((double)C)});
    lg_linear_forward(k->s, &(struct lg_linear_forward_args){.x = lg_t2(o, t, k->n * T, C),
                                                             .w = out_w,
                                                             .bias = out_bias,
                                                             .y = lg_t2(qkv, t, k->n * T, C)});
    lg_tensor map = map_in(k, x, C);
    lg_add_forward(k->s, &(struct lg_add_forward_args){.a = map, .b = map_in(k, b, C), .y = map});
    k->measured = -1;
}

static void upsample(struct lg_aekl_walk *k, const char *name)
{
    int to = other(k->at, 1);
    if (k->s) {
        lg_tensor x = map_in(k, k->at, k->channels);
        k->h *= 2;
        k->w *= 2;
        lg_upsample2x_forward(
            k->s, &(struct lg_upsample2x_forward_args){.x = x, .y = map_in(k, to, k->channels)});
    }
    note_mean_var(k, to, false);
    k->at = to;
    conv_map(k, &(struct conv_map){name, k->channels, 3, 1, true});
}

static void middle(struct lg_aekl_walk *k, const char *half)
{
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.mid_block.resnets.0", half);
    resnet(k, name, k->channels, true);
    if (k->c->mid_attention) {
        snprintf(name, sizeof name, "%s.mid_block.attentions.0", half);
        attention(k, name);
    }
    snprintf(name, sizeof name, "%s.mid_block.resnets.1", half);
    resnet(k, name, k->channels, true);
}

/* ---- halves ---- */

lg_tensor lg_aekl_walk_encoder(struct lg_aekl_walk *k, lg_tensor pixels)
{
    const struct lg_aekl_config *c = k->c;
    char name[LG_PARAM_NAME_BYTES];
    k->at = 0;
    k->channels = c->in_channels;
    if (k->s)
        lg_pixels_to_nhwc(k->s, &(struct lg_pixels_to_nhwc_args){
                                    .x = pixels, .y = map_in(k, k->at, k->channels)});
    conv_map(k, &(struct conv_map){"encoder.conv_in", c->block_out_channels[0], 3, 1, true});
    for (int i = 0; i < c->blocks; i++) {
        for (int j = 0; j < c->layers_per_block; j++) {
            snprintf(name, sizeof name, "encoder.down_blocks.%d.resnets.%d", i, j);
            bool halved_next = j == c->layers_per_block - 1 && i < c->blocks - 1;
            resnet(k, name, c->block_out_channels[i], !halved_next);
        }
        if (i == c->blocks - 1) break;
        snprintf(name, sizeof name, "encoder.down_blocks.%d.downsamplers.0.conv", i);
        conv_map(k, &(struct conv_map){name, k->channels, 3, 2, true});
    }
    middle(k, "encoder");
    norm(k, &(struct norm){"encoder.conv_norm_out", NULL, k->at, k->at, k->channels, LG_ACT_SILU});
    int64_t out = 2 * c->latent_channels;
    conv_map(k, &(struct conv_map){"encoder.conv_out", out, 3, 1, false});
    if (c->quant_conv) conv_map(k, &(struct conv_map){"quant_conv", out, 1, 1, false});
    return map_in(k, k->at, k->channels);
}

lg_tensor lg_aekl_walk_decoder(struct lg_aekl_walk *k, lg_tensor latent)
{
    const struct lg_aekl_config *c = k->c;
    char name[LG_PARAM_NAME_BYTES];
    k->at = 0;
    k->channels = c->latent_channels;
    if (k->s)
        lg_nchw_to_nhwc(
            k->s, &(struct lg_nchw_to_nhwc_args){.x = latent, .y = map_in(k, k->at, k->channels)});
    if (c->post_quant_conv)
        conv_map(k, &(struct conv_map){"post_quant_conv", c->latent_channels, 1, 1, false});
    int64_t widest = c->block_out_channels[c->blocks - 1];
    conv_map(k, &(struct conv_map){"decoder.conv_in", widest, 3, 1, true});
    middle(k, "decoder");
    for (int i = 0; i < c->blocks; i++) {
        for (int j = 0; j <= c->layers_per_block; j++) { /* one more than the encoder */
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", i, j);
            bool doubled_next = j == c->layers_per_block && i < c->blocks - 1;
            resnet(k, name, c->block_out_channels[c->blocks - 1 - i], !doubled_next);
        }
        if (i == c->blocks - 1) break;
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.conv", i);
        upsample(k, name);
    }
    norm(k, &(struct norm){"decoder.conv_norm_out", NULL, k->at, k->at, k->channels, LG_ACT_SILU});
    conv_map(k, &(struct conv_map){"decoder.conv_out", c->out_channels, 3, 1, false});
    return map_in(k, k->at, k->channels);
}
