/* See layers.h. */
#include "stages/nets/layers_private.h"
#include "stages/nets/storage.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FREQUENCIES = 256 };

/* ---- the two runs ---- */

struct lg_net_row {
    struct lg_param spec;
    int unit;
    bool packed; /* without a gap behind the one before */
};

lg_net lg_net_declare(int64_t batch)
{
    return (lg_net){.batch = batch, .type = LG_F32, .stats = LG_F32, .unit = -1};
}

lg_params lg_net_finish(lg_net *n)
{
    lg_params t = {.in_blocks = n->in_blocks};
    for (int u = 0; u < n->n_units; u++) {
        lg_params_begin_unit(&t, "%s", n->unit_name[u]);
        for (const struct lg_net_row *r = n->row; r < n->row + n->n_rows; r++) {
            if (r->unit != u) continue;
            if (r->packed)
                lg_params_add_packed(&t, &r->spec);
            else
                lg_params_add(&t, &r->spec);
        }
    }
    free(n->row);
    free(n->unit_name);
    *n = (lg_net){0};
    return t;
}

lg_net lg_net_record(lg_device *d, const lg_params *p, int64_t batch)
{
    lg_graph *g = lg_graph_new(d);
    const lg_dtype type = lg_device_dtype(d);
    return (lg_net){.params = p,
                    .g = g,
                    .s = lg_graph_stream(g),
                    .type = type,
                    .stats = type == LG_F64 ? LG_F64 : LG_F32,
                    .batch = batch,
                    .unit = -1};
}

void lg_net_bind(lg_net *n)
{
    n->weights = calloc((size_t)n->params->n_units, sizeof *n->weights);
    LG_ASSERT(n->weights);
    for (int u = 0; u < n->params->n_units; u++) {
        const struct lg_param_unit *unit = &n->params->unit[u];
        lg_tensor all = lg_t1(NULL, n->type, (int64_t)unit->count);
        if (lg_stored_has_codes(n->params, u))
            all = lg_t1(NULL, LG_U8, (int64_t)lg_stored_unit_bytes(n->params, u, n->type));
        n->weights[u] = lg_graph_bind(n->g, unit->name, all);
    }
}

int lg_net_compile(lg_net *n, lg_program **ret)
{
    int rc = lg_graph_compile(n->g, ret);
    lg_graph_free(&n->g);
    free(n->weights);
    free(n->unread);
    *n = (lg_net){0};
    return rc;
}

/* ---- parameters ---- */

static void enter_unit(lg_net *n, const char *name)
{
    for (n->unit = 0; n->unit < n->n_units && strcmp(n->unit_name[n->unit], name);) n->unit++;
    if (n->unit < n->n_units) return;
    n->unit_name = realloc(n->unit_name, (size_t)(n->n_units + 1) * sizeof *n->unit_name);
    LG_ASSERT(n->unit_name);
    strcpy(n->unit_name[n->n_units++], name);
}

void lg_net_unit(lg_net *n, const char *name_fmt, ...)
{
    char name[32];
    LG_NET_FORMAT(name, name_fmt);
    if (n->g)
        lg_graph_end_block(n->g);
    else
        enter_unit(n, name);
}

void lg_net_block(lg_net *n, int i)
{
    lg_net_unit(n, "block.%d", i);
    if (n->g) lg_graph_begin_block(n->g);
}

void lg_net_scope(lg_net *n, const char *prefix_fmt, ...)
{
    *n->scope = 0;
    if (prefix_fmt) LG_NET_FORMAT(n->scope, prefix_fmt);
}

static lg_tensor at_byte(lg_tensor t, size_t bytes, lg_tensor shape)
{
    shape.data = (char *)t.data + bytes;
    return shape;
}

/* Declares a row, or finds its place: a tensor of its unit's weights with this shape. */
static struct lg_matrix stored_param(lg_net *n, const struct lg_param *spec, bool packed,
                                     lg_tensor shape)
{
    if (!n->g) {
        LG_ASSERT(n->unit >= 0);
        n->row = realloc(n->row, (size_t)(n->n_rows + 1) * sizeof *n->row);
        LG_ASSERT(n->row);
        n->row[n->n_rows++] = (struct lg_net_row){*spec, n->unit, packed};
        return (struct lg_matrix){.w = shape};
    }
    int i = lg_params_find(n->params, spec->name);
    LG_ASSERT(i >= 0);
    const struct lg_param *p = &n->params->p[i];
    const struct lg_stored place = lg_stored_place(n->params, i, n->type);
    const lg_tensor unit = n->weights[p->unit];
    if (!p->in_8_bits) return (struct lg_matrix){.w = at_byte(unit, place.at, shape)};
    const lg_tensor codes = lg_t2(NULL, LG_U8, shape.dim[0], shape.dim[1]);
    const lg_tensor scale = lg_t1(NULL, n->stats, shape.dim[0]);
    return (struct lg_matrix){at_byte(unit, place.at, codes), at_byte(unit, place.scale_at, scale),
                              p->format};
}

static lg_tensor param(lg_net *n, const struct lg_param *spec, bool packed, lg_tensor shape)
{
    return stored_param(n, spec, packed, shape).w;
}

/* In a block: a numbered part of the net ("blocks.3.attn.to_q"), but for what units in front of and behind all blocks have
 * under such a name. */
static bool is_in_block(const lg_net *n, const char *name)
{
    const char *unit = n->unit_name[n->unit];
    if (!strcmp(unit, "embed") || !strcmp(unit, "out")) return false;
    for (const char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.')) {
        const size_t digits = strspn(dot + 1, "0123456789");
        if (digits && dot[1 + digits] == '.') return true;
    }
    return false;
}

static struct lg_param spec_of(const lg_net *n, struct lg_init init, lg_tensor shape,
                               const char *name, const char *part, const char *leaf)
{
    struct lg_param p = {
        .rank = shape.rank, .init = init.kind, .init_scale = init.scale, .is_fixed = init.is_fixed};
    LG_ASSERT(shape.rank <= (int)LG_ARRAY_LEN(p.dim));
    for (int i = 0; i < shape.rank; i++) p.dim[i] = shape.dim[i];
    int length = snprintf(p.name, sizeof p.name, "%s%s%s%s", n->scope, name, part, leaf);
    LG_ASSERT(length > 0 && (size_t)length < sizeof p.name);
    return p;
}

lg_tensor lg_net_param(lg_net *n, struct lg_init init, lg_tensor shape, const char *name_fmt, ...)
{
    char name[LG_PARAM_NAME_BYTES];
    LG_NET_FORMAT(name, name_fmt);
    shape = lg_tensor_of(NULL, n->type, shape.rank, shape.dim);
    struct lg_param p = spec_of(n, init, shape, name, "", "");
    return param(n, &p, false, shape);
}

lg_tensor lg_net_filter(lg_net *n, struct lg_init init, int64_t out, int64_t in, int k,
                        const char *name)
{
    struct lg_param p = spec_of(n, init, lg_t4(NULL, n->type, out, in, k, k), name, "", ".weight");
    p.layout = LG_LAYOUT_CONV_OHWI;
    return param(n, &p, false, lg_t4(NULL, n->type, out, k, k, in));
}

lg_tensor lg_net_clip_filter(lg_net *n, struct lg_init init, int64_t out, int64_t in, int k,
                             const char *name)
{
    const int64_t file[] = {out, in, k, k, k}, dim[] = {out, k, k, k, in};
    struct lg_param p = spec_of(n, init, lg_tensor_of(NULL, n->type, 5, file), name, "", ".weight");
    p.layout = LG_LAYOUT_CONV_OHWI;
    return param(n, &p, false, lg_tensor_of(NULL, n->type, 5, dim));
}

struct lg_of_parts lg_net_parts_of(const struct lg_layer *l, const char *name, const char *leaf)
{
    static const char *const whole[] = {""};
    return (struct lg_of_parts){.name = name,
                                .leaf = leaf,
                                .part = l->parts ? l->parts : whole,
                                .n = l->parts ? l->n_parts : 1};
}

struct lg_matrix lg_net_packed_param(lg_net *n, struct lg_of_parts of, struct lg_init init,
                                     lg_tensor all)
{
    const bool weight = all.rank == 2 && !strcmp(of.leaf, ".weight");
    struct lg_matrix first = {0};
    lg_tensor one = lg_slice(all, 0, 0, all.dim[0] / of.n);
    for (int i = 0; i < of.n; i++) {
        struct lg_param p = spec_of(n, init, one, of.name, of.part[i], of.leaf);
        p.is_block_matrix = weight && !n->g && is_in_block(n, p.name);
        struct lg_matrix m = stored_param(n, &p, i > 0, all);
        if (i == 0) first = m;
    }
    return first;
}

void lg_net_note_unread(lg_net *n, lg_tensor w, lg_tensor bias, int64_t from, int64_t to)
{
    if (from == to) return;
    n->unread = realloc(n->unread, (size_t)(n->n_unread + 2) * sizeof *n->unread);
    LG_ASSERT(n->unread);
    n->unread[n->n_unread++] = lg_slice(w, 0, from, to - from);
    if (bias.rank) n->unread[n->n_unread++] = lg_slice(bias, 0, from, to - from);
}

void lg_net_unused(lg_net *n, lg_tensor param)
{
    if (n->g) lg_net_note_unread(n, param, LG_NONE, 0, param.dim[0]);
}

/* ---- values ---- */

lg_tensor lg_net_value(lg_net *n, const char *name, lg_tensor shape)
{
    if (n->g) return lg_graph_value(n->g, name, shape);
    return lg_tensor_of(NULL, shape.dtype, shape.rank, shape.dim);
}

lg_tensor lg_net_rows(lg_tensor t)
{
    int64_t k = t.dim[t.rank - 1];
    return lg_t2(t.data, t.dtype, lg_numel(&t) / k, k);
}

lg_tensor lg_net_with_last(lg_tensor t, int64_t last)
{
    t.data = NULL;
    t.dim[t.rank - 1] = last;
    return t;
}

/* ---- layers ---- */

lg_tensor lg_net_act(lg_net *n, lg_tensor x, lg_act act)
{
    lg_tensor y = lg_net_value(n, "activation", x);
    LG_NET_RECORD(n, act_forward, .x = x, .y = y, .act = act);
    return y;
}

lg_tensor lg_net_glu(lg_net *n, lg_tensor x, lg_act act)
{
    lg_tensor y = lg_net_value(n, "gated", lg_t2(NULL, n->type, x.dim[0], x.dim[1] / 2));
    LG_NET_RECORD(n, glu_forward, .x = x, .y = y, .act = act);
    return y;
}

lg_tensor lg_net_add(lg_net *n, lg_tensor a, lg_tensor b)
{
    lg_tensor y = lg_net_value(n, "sum", a);
    lg_net_add_into(n, a, b, y);
    return y;
}

void lg_net_add_into(lg_net *n, lg_tensor a, lg_tensor b, lg_tensor y)
{
    LG_NET_RECORD(n, add_forward, .a = a, .b = b, .y = y);
}

lg_tensor lg_net_multiply(lg_net *n, lg_tensor a, lg_tensor b)
{
    lg_tensor y = lg_net_value(n, "product", a);
    LG_NET_RECORD(n, mul_forward, .a = a, .b = b, .y = y);
    return y;
}

struct lg_modulation lg_net_chunks(lg_tensor buffer, int64_t D, int first)
{
    return (struct lg_modulation){.shift = lg_slice(buffer, 1, first * D, D),
                                  .scale = lg_slice(buffer, 1, (first + 1) * D, D),
                                  .gate = lg_slice(buffer, 1, (first + 2) * D, D)};
}

static lg_tensor norm_modulate(lg_net *n, lg_tensor x, struct lg_modulation m, double eps, bool rms)
{
    const lg_tensor stat = lg_t2(NULL, n->stats, x.dim[0], x.dim[1]);
    lg_tensor y = lg_net_value(n, "norm", x);
    LG_NET_RECORD(n, norm_modulate_forward, .x = x, .shift = m.shift, .scale = m.scale, .y = y,
                  .mean = lg_net_value(n, "mean", stat), .rstd = lg_net_value(n, "rstd", stat),
                  .eps = eps, .rms = rms);
    return y;
}

lg_tensor lg_net_norm(lg_net *n, lg_tensor x, struct lg_modulation m, double eps)
{
    return norm_modulate(n, x, m, eps, false);
}

lg_tensor lg_net_rms_modulate(lg_net *n, lg_tensor x, struct lg_modulation m, double eps)
{
    return norm_modulate(n, x, m, eps, true);
}

lg_tensor lg_net_residual(lg_net *n, lg_tensor x, lg_tensor y, lg_tensor gate)
{
    lg_tensor out = lg_net_value(n, "x", x);
    LG_NET_RECORD(n, gate_residual_forward, .x = x, .y = y, .gate = gate, .out = out);
    return out;
}

lg_tensor lg_net_rms_norm(lg_net *n, lg_tensor x, lg_tensor w, double eps, lg_tensor y)
{
    const int64_t rows = x.dim[0], D = x.dim[1];
    if (!y.rank) y = lg_net_value(n, "norm", x);
    LG_NET_RECORD(n, rms_norm_forward, .x = lg_at(x, 0, lg_t4(NULL, n->type, 1, rows, 1, D)),
                  .w = lg_at(w, 0, lg_t2(NULL, n->type, 1, D)),
                  .y = lg_at(y, 0, lg_t4(NULL, n->type, 1, rows, 1, D)), .each = 1, .eps = eps);
    return y;
}

lg_tensor lg_net_layer_norm(lg_net *n, lg_tensor x, double eps, lg_tensor y, const char *name)
{
    const lg_tensor shape = lg_t1(NULL, n->type, x.dim[1]);
    lg_tensor w = lg_net_param(n, LG_NET_ONE, shape, "%s.weight", name);
    lg_tensor b = lg_net_param(n, LG_NET_ZERO, shape, "%s.bias", name);
    if (!y.rank) y = lg_net_value(n, "norm", x);
    LG_NET_RECORD(n, layer_norm_forward, .x = x, .w = w, .b = b, .y = y, .eps = eps);
    return y;
}

/* A sample's tokens as one row. */
static lg_tensor samples_of(lg_tensor t)
{
    lg_tensor rows = lg_at(t, 0, lg_t2(NULL, t.dtype, t.dim[0], t.dim[1] * t.dim[2]));
    rows.stride[0] = t.stride[0];
    return rows;
}

void lg_net_copy_tokens(lg_net *n, lg_tensor x, lg_tensor y)
{
    LG_NET_RECORD(n, copy_rows, .x = samples_of(x), .y = samples_of(y));
}

lg_tensor lg_net_take_tokens(lg_net *n, lg_tensor x, int64_t from, int64_t count)
{
    lg_tensor part = lg_slice(x, 1, from, count);
    lg_tensor y = lg_net_value(n, "tokens", lg_t3(NULL, x.dtype, x.dim[0], count, x.dim[2]));
    lg_net_copy_tokens(n, part, y);
    return y;
}

/* All tokens, a row each, as far apart as they are. */
static lg_tensor rows_apart(lg_tensor t)
{
    lg_tensor rows = lg_at(t, 0, lg_t2(NULL, t.dtype, t.dim[0] * t.dim[1], t.dim[2]));
    rows.stride[0] = lg_row_stride(&t, 2);
    return rows;
}

void lg_net_copy_features(lg_net *n, lg_tensor x, lg_tensor y)
{
    LG_NET_RECORD(n, copy_rows, .x = rows_apart(x), .y = rows_apart(y));
}

/* Of angles (2, T, p) the first table, cosines, or the second one. */
static lg_tensor angle_table(lg_tensor angles, int i)
{
    if (!angles.rank) return LG_NONE;
    return lg_at(angles, i * angles.stride[0],
                 lg_t2(NULL, angles.dtype, angles.dim[1], angles.dim[2]));
}

lg_tensor lg_net_side_by_side(lg_net *n, lg_tensor a, lg_tensor b)
{
    const int64_t first = a.dim[a.rank - 1], second = b.dim[b.rank - 1];
    lg_tensor y = lg_net_value(n, "side by side", lg_net_with_last(a, first + second));
    LG_NET_RECORD(n, copy_rows, .x = lg_net_rows(a), .y = lg_slice(lg_net_rows(y), 1, 0, first));
    LG_NET_RECORD(n, copy_rows, .x = lg_net_rows(b),
                  .y = lg_slice(lg_net_rows(y), 1, first, second));
    return y;
}

lg_tensor lg_net_rope(lg_net *n, lg_tensor x, int64_t turned, lg_tensor angles)
{
    const int64_t d = 2 * angles.dim[2];
    lg_tensor y = lg_net_value(n, "turned", x);
    LG_NET_RECORD(n, rope, .x = lg_split(x, 2, d), .cos = angle_table(angles, 0),
                  .sin = angle_table(angles, 1), .y = lg_split(y, 2, d), .turned = (int)turned);
    return y;
}

lg_tensor lg_net_head_norms(lg_net *n, lg_tensor x, const struct lg_head_norms *l, lg_tensor y,
                            const char *name)
{
    const struct lg_layer layer = {.parts = l->norms, .n_parts = l->n_norms};
    lg_tensor w = lg_net_packed_param(n, lg_net_parts_of(&layer, name, ".weight"), LG_NET_ONE,
                                      lg_t1(NULL, n->type, l->n_norms * l->d))
                      .w;
    const int64_t width = l->n_norms * l->heads * l->d;
    if (!y.rank) y = lg_net_value(n, "head norms", lg_net_with_last(x, width));
    LG_NET_RECORD(n, rms_norm_forward, .x = lg_split(lg_slice(x, 2, 0, width), 2, l->d),
                  .w = lg_at(w, 0, lg_t2(NULL, n->type, l->n_norms, l->d)),
                  .cos = angle_table(l->angles, 0), .sin = angle_table(l->angles, 1),
                  .y = lg_split(y, 2, l->d), .each = (int)l->heads, .eps = l->eps);
    return y;
}

lg_tensor lg_net_heads(lg_tensor packed, int64_t heads, int64_t d, int i)
{
    return lg_split(lg_slice(packed, 2, i * heads * d, heads * d), 2, d);
}

lg_tensor lg_net_attention(lg_net *n, struct lg_attention a)
{
    const int64_t B = a.q.dim[0], T = a.q.dim[1], H = a.q.dim[2], d = a.q.dim[3];
    lg_tensor o = lg_net_value(n, "attention", lg_t3(NULL, n->type, B, T, H * d));
    LG_NET_RECORD(n, attention_forward, .q = a.q, .k = a.k, .v = a.v, .k_length = a.keys,
                  .bias = a.bias, .o = lg_at(o, 0, lg_t4(NULL, n->type, B, T, H, d)),
                  .scale = a.scale == 0 ? 1.0 / sqrt((double)d) : a.scale, .causal = a.causal,
                  .first_queries = (int)a.first_queries, .first_keys = (int)a.first_keys);
    n->flops += 4.0 * (double)lg_numel(&a.q) * (double)a.k.dim[1];
    return o;
}

lg_tensor lg_net_waves(lg_net *n, lg_tensor t, int64_t count, double freq_shift)
{
    lg_tensor waves = lg_net_value(n, "waves", lg_t2(NULL, n->type, t.dim[0], count));
    LG_NET_RECORD(n, timestep_embedding_forward, .t = t, .out = waves, .freq_shift = freq_shift);
    return waves;
}

lg_tensor lg_net_timestep(lg_net *n, lg_tensor t, int64_t D, double freq_shift, const char *name)
{
    lg_tensor waves = lg_net_waves(n, t, FREQUENCIES, freq_shift);
    struct lg_layer up = {.out = D, .init = LG_NET_NORMAL, .act = LG_ACT_SILU};
    lg_tensor h = lg_net_linear(n, waves, up, "%s.linear_1", name);
    return lg_net_linear(n, h, (struct lg_layer){.out = D, .init = LG_NET_NORMAL}, "%s.linear_2",
                         name);
}

void lg_net_numbers_into(lg_net *n, lg_tensor v, int64_t D, lg_tensor y, const char *name)
{
    lg_tensor h = lg_net_timestep(n, v, D, 0, name);
    LG_ASSERT(y.dim[0] * y.dim[1] == v.dim[0] * D);
    LG_NET_RECORD(n, copy_rows, .x = lg_at(h, 0, lg_t2(NULL, n->type, y.dim[0], y.dim[1])), .y = y);
}

lg_tensor lg_net_embedding(lg_net *n, lg_tensor ids, int64_t rows, int64_t D, const char *name)
{
    lg_tensor table = lg_net_param(n, LG_NET_NORMAL, lg_t2(NULL, n->type, rows, D), "%s", name);
    lg_tensor y = lg_net_value(n, "embedding", lg_t2(NULL, n->type, ids.dim[0], D));
    LG_NET_RECORD(n, embedding_forward, .ids = ids, .table = table, .y = y);
    return y;
}

lg_tensor lg_net_flat_patches(lg_net *n, lg_tensor x, int patch)
{
    const int64_t T = (x.dim[2] / patch) * (x.dim[3] / patch);
    lg_tensor flat =
        lg_net_value(n, "patches", lg_t3(NULL, n->type, n->batch, T, x.dim[1] * patch * patch));
    LG_NET_RECORD(n, patchify_forward, .x = x, .y = flat, .patch = patch);
    return flat;
}

/* The convolution's weight (D, C, p, p) is the matrix of the product as it lies. */
lg_tensor lg_net_patches(lg_net *n, lg_tensor x, int patch, lg_tensor positions, const char *name)
{
    const int64_t C = x.dim[1], P = C * patch * patch, D = positions.dim[1];
    struct lg_init init = {.kind = LG_INIT_UNIFORM, .scale = sqrt(6.0 / (double)(D + P))};
    lg_tensor w =
        lg_net_param(n, init, lg_t4(NULL, n->type, D, C, patch, patch), "%s.weight", name);
    lg_tensor bias = lg_net_param(n, LG_NET_ZERO, lg_t1(NULL, n->type, D), "%s.bias", name);
    lg_tensor flat = lg_net_flat_patches(n, x, patch);
    lg_tensor y = lg_net_value(n, name, lg_t3(NULL, n->type, n->batch, flat.dim[1], D));
    LG_NET_RECORD(n, linear_forward, .x = lg_net_rows(flat),
                  .w = lg_at(w, 0, lg_t2(NULL, n->type, D, P)), .bias = bias, .y = lg_net_rows(y));
    n->flops += 2.0 * (double)lg_numel(&y) * (double)P;
    return lg_net_add(n, y, positions);
}

void lg_net_unpatchify(lg_net *n, lg_tensor x, int patch, lg_tensor out)
{
    LG_NET_RECORD(n, unpatchify_forward, .x = x, .y = out, .patch = patch);
}
