/* The layers of AutoencoderKL; see aekl_layers.h.
 *
 * Every layer takes its parameters from the table's next rows, or adds these rows when it declares; so the
 * order of the table is the order of the description. Everything is NHWC. A convolution whose map is
 * normalised next writes means and variances of the map, too, and the norm need not work them out; a norm that a
 * convolution reads is one operation with it.
 *
 * Padding, strides and the order of norm, activation and convolution are those of diffusers
 * (DownEncoderBlock2D, UNetMidBlock2D, UpDecoderBlock2D). */
#include "stages/nets/aekl_layers.h"
#include <math.h>
#include <stdio.h>

#define NORM_EPS 1e-6

/* A feature map. While declaring its channels alone count. */
struct map {
    lg_tensor x;        // (n, h, w, channels)
    lg_tensor mean_var; // (n, norm_groups, 2) f64: x's, or absent
};

/* ---- parameters ---- */

static lg_tensor param(struct lg_aekl_build *b, const struct lg_param *spec, bool packed)
{
    if (!b->g) {
        if (packed)
            lg_params_add_packed(b->table, spec);
        else
            lg_params_add(b->table, spec);
        return LG_NONE;
    }
    LG_ASSERT(b->next < b->table->n);
    const struct lg_param *p = &b->table->p[b->next++];
    LG_ASSERT(p->rank == spec->rank && p->dim[0] == spec->dim[0] && p->dim[1] == spec->dim[1]);
    lg_tensor shape = {NULL, b->t, p->rank, {p->dim[0], 1, 1, 1}};
    if (p->layout == LG_LAYOUT_CONV_OHWI)
        shape.dim[1] = p->dim[2], shape.dim[2] = p->dim[3], shape.dim[3] = p->dim[1];
    else
        for (int i = 1; i < p->rank; i++) shape.dim[i] = p->dim[i];
    return lg_at(b->weights, (int64_t)p->offset, shape);
}

static void set_name(struct lg_param *p, const char *layer, const char *leaf)
{
    int n = snprintf(p->name, sizeof p->name, "%s.%s", layer, leaf);
    LG_ASSERT(n > 0 && (size_t)n < sizeof p->name);
}

static lg_tensor vector(struct lg_aekl_build *b, const char *layer, const char *leaf, int64_t n,
                        bool packed)
{
    struct lg_param p = {.rank = 1, .dim = {n}};
    set_name(&p, layer, leaf);
    return param(b, &p, packed);
}

static lg_tensor matrix(struct lg_aekl_build *b, const char *layer, const char *leaf, int64_t n,
                        bool packed)
{
    struct lg_param p = {.rank = 2, .dim = {n, n}};
    set_name(&p, layer, leaf);
    return param(b, &p, packed);
}

/* ---- layers ---- */

static lg_tensor value(const struct lg_aekl_build *b, const char *name, lg_tensor shape)
{
    shape.data = NULL;
    return b->g ? lg_graph_value(b->g, name, shape) : shape;
}

static lg_tensor map_shape(lg_tensor like, int64_t h, int64_t w, int64_t channels)
{
    return lg_t4(NULL, like.dtype, like.dim[0], h, w, channels);
}

struct norm {
    const char *layer, *leaf; /* "conv_norm_out", NULL for a layer that is a norm itself */
    lg_act act;
};

/* Takes the norm's parameters. */
static struct lg_group_norm_forward_args norm_args(struct lg_aekl_build *b, const struct norm *a,
                                                   const struct map *m)
{
    char name[LG_PARAM_NAME_BYTES];
    int64_t channels = m->x.dim[3];
    snprintf(name, sizeof name, "%s%s%s", a->layer, a->leaf ? "." : "", a->leaf ? a->leaf : "");
    lg_tensor w = vector(b, name, "weight", channels, false);
    lg_tensor bias = vector(b, name, "bias", channels, false);
    return (struct lg_group_norm_forward_args){.x = m->x,
                                               .mean_var = m->mean_var,
                                               .w = w,
                                               .b = bias,
                                               .y = value(b, "norm", m->x),
                                               .groups = b->c->norm_groups,
                                               .eps = NORM_EPS,
                                               .act = a->act};
}

static struct map norm(struct lg_aekl_build *b, const struct norm *a, struct map m)
{
    struct lg_group_norm_forward_args args = norm_args(b, a, &m);
    if (b->g) lg_group_norm_forward(lg_graph_stream(b->g), &args);
    return (struct map){.x = args.y};
}

struct conv {
    const char *name;
    const struct norm *norm; /* before it, or NULL */
    lg_tensor residual;      /* or LG_NONE */
    lg_tensor y;             /* where it writes; LG_NONE: a new value */
    int64_t out;             /* channels */
    int kernel, stride;
    bool then_norm;
};

/* A 3x3 convolution keeps the size; with stride 2 it halves it, padding only right and below. */
static struct map conv(struct lg_aekl_build *b, const struct conv *c, struct map m)
{
    struct lg_norm_conv2d_forward_args both = {0};
    int after = c->kernel / 2, before = c->stride == 2 ? 0 : after;
    if (c->norm) both.norm = norm_args(b, c->norm, &m);
    struct lg_param p = {.rank = 4,
                         .dim = {c->out, m.x.dim[3], c->kernel, c->kernel},
                         .layout = LG_LAYOUT_CONV_OHWI};
    set_name(&p, c->name, "weight");
    lg_tensor w = param(b, &p, false), bias = vector(b, c->name, "bias", c->out, false);
    lg_tensor shape = map_shape(m.x, m.x.dim[1] / c->stride, m.x.dim[2] / c->stride, c->out);
    struct map made = {.x = c->y.rank ? c->y : value(b, c->name, shape)};
    if (!b->g) return made;
    if (c->then_norm)
        made.mean_var = value(b, "mean_var", lg_t3(NULL, LG_F64, m.x.dim[0], b->c->norm_groups, 2));
    both.conv = (struct lg_conv2d_forward_args){.x = c->norm ? both.norm.y : m.x,
                                                .w = w,
                                                .bias = bias,
                                                .residual = c->residual,
                                                .y = made.x,
                                                .mean_var = made.mean_var,
                                                .stride = c->stride,
                                                .top = before,
                                                .left = before,
                                                .bottom = after,
                                                .right = after};
    if (c->norm)
        lg_norm_conv2d_forward(lg_graph_stream(b->g), &both);
    else
        lg_conv2d_forward(lg_graph_stream(b->g), &both.conv);
    return made;
}

/* x + conv2(silu(norm2(conv1(silu(norm1(x)))))), x through a 1x1 convolution where widths differ;
 * then_norm: a norm comes next. */
static struct map resnet(struct lg_aekl_build *b, const char *layer, int64_t out, bool then_norm,
                         struct map x)
{
    char conv1[LG_PARAM_NAME_BYTES], conv2[LG_PARAM_NAME_BYTES], shortcut[LG_PARAM_NAME_BYTES];
    const struct norm norm1 = {layer, "norm1", LG_ACT_SILU}, norm2 = {layer, "norm2", LG_ACT_SILU};
    snprintf(conv1, sizeof conv1, "%s.conv1", layer);
    snprintf(conv2, sizeof conv2, "%s.conv2", layer);
    snprintf(shortcut, sizeof shortcut, "%s.conv_shortcut", layer);
    struct map h = conv(
        b,
        &(struct conv){
            .name = conv1, .norm = &norm1, .out = out, .kernel = 3, .stride = 1, .then_norm = true},
        x);
    if (x.x.dim[3] != out)
        x = conv(b, &(struct conv){.name = shortcut, .out = out, .kernel = 1, .stride = 1}, x);
    return conv(b,
                &(struct conv){.name = conv2,
                               .norm = &norm2,
                               .residual = x.x,
                               .out = out,
                               .kernel = 3,
                               .stride = 1,
                               .then_norm = then_norm},
                h);
}

static lg_tensor linear(const struct lg_aekl_build *b, lg_tensor x, lg_tensor w, lg_tensor bias)
{
    lg_tensor y = value(b, "linear", lg_t2(NULL, b->t, x.dim[0], w.dim[0]));
    lg_linear_forward(lg_graph_stream(b->g),
                      &(struct lg_linear_forward_args){.x = x, .w = w, .bias = bias, .y = y});
    return y;
}

/* x + out(attention(q, k, v of norm(x))), one head as wide as the map. */
static struct map attention(struct lg_aekl_build *b, const char *layer, struct map x)
{
    char out[LG_PARAM_NAME_BYTES];
    snprintf(out, sizeof out, "%s.to_out.0", layer);
    int64_t n = x.x.dim[0], T = x.x.dim[1] * x.x.dim[2], C = x.x.dim[3];
    lg_tensor h = norm(b, &(struct norm){layer, "group_norm", LG_ACT_NONE}, x).x;
    lg_tensor w = matrix(b, layer, "to_q.weight", C, false);
    matrix(b, layer, "to_k.weight", C, true);
    matrix(b, layer, "to_v.weight", C, true);
    lg_tensor bias = vector(b, layer, "to_q.bias", C, false);
    vector(b, layer, "to_k.bias", C, true);
    vector(b, layer, "to_v.bias", C, true);
    lg_tensor out_w = matrix(b, out, "weight", C, false);
    lg_tensor out_bias = vector(b, out, "bias", C, false);
    if (!b->g) return (struct map){.x = x.x};
    const lg_tensor rows = lg_t2(NULL, b->t, n * T, C), head = lg_t4(NULL, b->t, n, T, 1, C);
    w.dim[0] = bias.dim[0] = 3 * C; /* q, k and v are packed: one product */
    lg_tensor qkv = linear(b, lg_at(h, 0, rows), w, bias), o = value(b, "attention", head);
    lg_attention_forward(lg_graph_stream(b->g),
                         &(struct lg_attention_forward_args){.q = lg_at(qkv, 0, head),
                                                             .k = lg_at(qkv, C, head),
                                                             .v = lg_at(qkv, 2 * C, head),
                                                             .q_stride = 3 * C,
                                                             .kv_stride = 3 * C,
                                                             .o = o,
                                                             .scale = 1 / sqrt((double)C)});
    lg_tensor branch = linear(b, lg_at(o, 0, rows), out_w, out_bias), y = value(b, "map", x.x);
    lg_add_forward(lg_graph_stream(b->g),
                   &(struct lg_add_forward_args){.a = x.x, .b = lg_at(branch, 0, x.x), .y = y});
    return (struct map){.x = y};
}

static struct map upsample(struct lg_aekl_build *b, const char *name, struct map m)
{
    int64_t channels = m.x.dim[3];
    lg_tensor y = value(b, "upsampled", map_shape(m.x, 2 * m.x.dim[1], 2 * m.x.dim[2], channels));
    if (b->g)
        lg_upsample2x_forward(lg_graph_stream(b->g),
                              &(struct lg_upsample2x_forward_args){.x = m.x, .y = y});
    return conv(
        b,
        &(struct conv){.name = name, .out = channels, .kernel = 3, .stride = 1, .then_norm = true},
        (struct map){.x = y});
}

static struct map middle(struct lg_aekl_build *b, const char *half, struct map m)
{
    char name[LG_PARAM_NAME_BYTES];
    int64_t channels = m.x.dim[3];
    snprintf(name, sizeof name, "%s.mid_block.resnets.0", half);
    m = resnet(b, name, channels, true, m);
    if (b->c->mid_attention) {
        snprintf(name, sizeof name, "%s.mid_block.attentions.0", half);
        m = attention(b, name, m);
    }
    snprintf(name, sizeof name, "%s.mid_block.resnets.1", half);
    return resnet(b, name, channels, true, m);
}

/* ---- halves ---- */

lg_tensor lg_aekl_encoder(struct lg_aekl_build *b, lg_tensor pixels)
{
    const struct lg_aekl_config *c = b->c;
    const int64_t out = 2 * c->latent_channels;
    char name[LG_PARAM_NAME_BYTES];
    struct map m = {
        .x = value(b, "pixels",
                   lg_t4(NULL, b->t, pixels.dim[0], pixels.dim[2], pixels.dim[3], c->in_channels))};
    if (b->g)
        lg_pixels_to_nhwc(lg_graph_stream(b->g),
                          &(struct lg_pixels_to_nhwc_args){.x = pixels, .y = m.x});
    m = conv(b,
             &(struct conv){.name = "encoder.conv_in",
                            .out = c->block_out_channels[0],
                            .kernel = 3,
                            .stride = 1,
                            .then_norm = true},
             m);
    for (int i = 0; i < c->blocks; i++) {
        for (int j = 0; j < c->layers_per_block; j++) {
            snprintf(name, sizeof name, "encoder.down_blocks.%d.resnets.%d", i, j);
            bool halved_next = j == c->layers_per_block - 1 && i < c->blocks - 1;
            m = resnet(b, name, c->block_out_channels[i], !halved_next, m);
        }
        if (i == c->blocks - 1) break;
        snprintf(name, sizeof name, "encoder.down_blocks.%d.downsamplers.0.conv", i);
        m = conv(b,
                 &(struct conv){
                     .name = name, .out = m.x.dim[3], .kernel = 3, .stride = 2, .then_norm = true},
                 m);
    }
    m = middle(b, "encoder", m);
    m = norm(b, &(struct norm){"encoder.conv_norm_out", NULL, LG_ACT_SILU}, m);
    m = conv(b, &(struct conv){.name = "encoder.conv_out", .out = out, .kernel = 3, .stride = 1},
             m);
    if (c->quant_conv)
        m = conv(b, &(struct conv){.name = "quant_conv", .out = out, .kernel = 1, .stride = 1}, m);
    return m.x;
}

void lg_aekl_decoder(struct lg_aekl_build *b, lg_tensor latent, lg_tensor picture)
{
    const struct lg_aekl_config *c = b->c;
    char name[LG_PARAM_NAME_BYTES];
    struct map m = {.x = value(b, "latent",
                               lg_t4(NULL, b->t, latent.dim[0], latent.dim[2], latent.dim[3],
                                     c->latent_channels))};
    if (b->g)
        lg_nchw_to_nhwc(lg_graph_stream(b->g),
                        &(struct lg_nchw_to_nhwc_args){.x = latent, .y = m.x});
    if (c->post_quant_conv)
        m = conv(
            b,
            &(struct conv){
                .name = "post_quant_conv", .out = c->latent_channels, .kernel = 1, .stride = 1},
            m);
    m = conv(b,
             &(struct conv){.name = "decoder.conv_in",
                            .out = c->block_out_channels[c->blocks - 1],
                            .kernel = 3,
                            .stride = 1,
                            .then_norm = true},
             m);
    m = middle(b, "decoder", m);
    for (int i = 0; i < c->blocks; i++) {
        for (int j = 0; j <= c->layers_per_block; j++) { /* one more than the encoder */
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", i, j);
            bool doubled_next = j == c->layers_per_block && i < c->blocks - 1;
            m = resnet(b, name, c->block_out_channels[c->blocks - 1 - i], !doubled_next, m);
        }
        if (i == c->blocks - 1) break;
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.conv", i);
        m = upsample(b, name, m);
    }
    m = norm(b, &(struct norm){"decoder.conv_norm_out", NULL, LG_ACT_SILU}, m);
    conv(b,
         &(struct conv){.name = "decoder.conv_out",
                        .y = picture,
                        .out = c->out_channels,
                        .kernel = 3,
                        .stride = 1},
         m);
}
