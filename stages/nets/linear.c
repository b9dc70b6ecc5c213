/* Linears, those that adapters take among them; see layers.h and adapter.h. */
#include "stages/nets/layers_private.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void weights_of(lg_net *n, struct lg_layer *l, int64_t k, const char *name,
                       struct lg_matrix *ret_w, lg_tensor *ret_bias)
{
    if (l->init.kind == LG_INIT_UNIFORM && l->init.scale == 0)
        l->init.scale = sqrt(6.0 / (double)(l->out + k));
    *ret_w = lg_net_packed_param(n, lg_net_parts_of(l, name, ".weight"), l->init,
                                 lg_t2(NULL, n->type, l->out, k));
    *ret_bias = LG_NONE;
    if (!l->no_bias)
        *ret_bias = lg_net_packed_param(n, lg_net_parts_of(l, name, ".bias"), LG_NET_ZERO,
                                        lg_t1(NULL, n->type, l->out))
                        .w;
}

/* Rows [from, from + count), as numbers: what is in 8 bits becomes a value for this one use, so that it takes memory
 * around that alone (recompute.h). */
static lg_tensor rows_of(lg_net *n, const struct lg_matrix *m, int64_t from, int64_t count)
{
    const lg_tensor w = lg_slice(m->w, 0, from, count);
    if (!m->scale.rank) return w;
    lg_tensor numbers = lg_net_value(n, "w", lg_t2(NULL, n->type, count, w.dim[1]));
    LG_NET_RECORD(n, dequantize_rows, .codes = w, .scale = lg_slice(m->scale, 0, from, count),
                  .w = numbers, .format = m->format);
    return numbers;
}

void lg_net_unused_linear(lg_net *n, int64_t in, struct lg_layer l, const char *name_fmt, ...)
{
    char name[LG_PARAM_NAME_BYTES];
    struct lg_matrix m;
    lg_tensor bias;
    LG_NET_FORMAT(name, name_fmt);
    weights_of(n, &l, in, name, &m, &bias);
    if (n->g && !m.scale.rank) lg_net_note_unread(n, m.w, bias, 0, l.out);
}

/* What stands beside x and w in a product; more (.., N): what is added; y: lg_layer's. */
struct beside {
    lg_tensor bias, more, y;
    lg_act act;
};
static lg_tensor product(lg_net *n, lg_tensor x, lg_tensor w, struct beside b, const char *name)
{
    lg_tensor y = b.y.rank ? b.y : lg_net_value(n, name, lg_net_with_last(x, w.dim[0]));
    LG_NET_RECORD(n, linear_forward, .x = lg_net_rows(x), .w = w, .bias = b.bias,
                  .residual = b.more.rank ? lg_net_rows(b.more) : LG_NONE, .y = lg_net_rows(y),
                  .act = b.act);
    n->flops += 2.0 * (double)lg_numel(&y) * (double)w.dim[1];
    return y;
}

static bool takes(const lg_net *n, const char *name, const char *part)
{
    char module[2 * LG_PARAM_NAME_BYTES];
    snprintf(module, sizeof module, "%s%s%s", n->scope, name, part);
    return lg_adapter_takes(&n->adapter, module);
}

static int adapted_parts(const lg_net *n, const struct lg_layer *l, const char *name)
{
    const struct lg_of_parts of = lg_net_parts_of(l, name, "");
    int count = 0;
    for (int i = 0; i < of.n; i++) count += takes(n, name, of.part[i]);
    return count;
}

bool lg_net_is_adapted(const lg_net *n, const struct lg_layer *l, const char *name)
{
    return adapted_parts(n, l, name) > 0;
}

/* What adapters add to linears of one x, (x A^T) B^T, for the product to be added to: all A are one matrix, and so are all
 * B, whose products lie side by side. Of one part alone features [first, first + count) may be meant. */
struct adapted {
    const char *name;
    const char *const *part;
    int n;
    int64_t out, first, count; /* out: features of all parts */
};
static lg_tensor adapter(lg_net *n, lg_tensor x, struct adapted l)
{
    const int64_t K = x.dim[x.rank - 1], rank = n->adapter.rank;
    const struct lg_init uniform = {.kind = LG_INIT_UNIFORM, .scale = 1.0 / sqrt((double)K)};
    const struct lg_of_parts a = {l.name, LG_ADAPTER_DOWN, l.part, l.n},
                             b = {l.name, LG_ADAPTER_UP, l.part, l.n};
    lg_tensor down = lg_net_packed_param(n, a, uniform, lg_t2(NULL, n->type, l.n * rank, K)).w;
    lg_tensor up = lg_net_packed_param(n, b, LG_NET_ZERO, lg_t2(NULL, n->type, l.out, rank)).w;
    LG_ASSERT(l.n == 1 || l.count == l.out);
    lg_net_note_unread(n, up, LG_NONE, 0, l.first);
    lg_net_note_unread(n, up, LG_NONE, l.first + l.count, l.out);
    up = lg_slice(up, 0, l.first, l.count);
    lg_tensor h = product(n, x, down, (struct beside){0}, "down");
    const double scale = lg_adapter_scale(&n->adapter);
    if (scale != 1) {
        lg_tensor scaled = lg_net_value(n, "scaled", h);
        LG_NET_RECORD(n, combine, .x = {h}, .c = {scale}, .count = 1, .y = scaled);
        h = scaled;
    }
    return product(n, h, up, (struct beside){0}, "up");
}

/* Part i of a layer, features [first, first + count) of it, by a product of its own. */
static lg_tensor part_of(lg_net *n, lg_tensor x, const struct lg_layer *l,
                         const struct lg_matrix *w, struct adapted part, int64_t from,
                         lg_tensor bias)
{
    struct beside b = {.bias = bias.rank ? lg_slice(bias, 0, from, part.count) : LG_NONE};
    if (takes(n, part.name, *part.part)) b.more = adapter(n, x, part);
    return product(n, x, rows_of(n, w, from, part.count), b, part.name);
}

/* Where adapters take some parts and others not: each by itself, then side by side. */
static lg_tensor mixed_parts(lg_net *n, lg_tensor x, const struct lg_layer *l,
                             const struct lg_matrix *w, lg_tensor bias, const char *name)
{
    const int64_t each = l->out / l->n_parts;
    lg_tensor y = l->y.rank ? l->y : lg_net_value(n, name, lg_net_with_last(x, l->out));
    for (int i = 0; i < l->n_parts; i++) {
        const struct adapted a = {name, l->parts + i, 1, each, 0, each};
        lg_tensor part = part_of(n, x, l, w, a, i * each, bias);
        LG_NET_RECORD(n, copy_rows, .x = lg_net_rows(part),
                      .y = lg_slice(lg_net_rows(y), 1, i * each, each));
    }
    return y;
}

lg_tensor lg_net_linear(lg_net *n, lg_tensor x, struct lg_layer l, const char *name_fmt, ...)
{
    char name[LG_PARAM_NAME_BYTES];
    struct lg_matrix w;
    struct beside b = {.act = l.act, .y = l.y};
    LG_ASSERT(!l.y.rank || l.act == LG_ACT_NONE);
    LG_NET_FORMAT(name, name_fmt);
    weights_of(n, &l, x.dim[x.rank - 1], name, &w, &b.bias);
    const struct lg_of_parts of = lg_net_parts_of(&l, name, "");
    const int taken = adapted_parts(n, &l, name);
    lg_tensor y;
    if (!taken) return product(n, x, rows_of(n, &w, 0, l.out), b, name);
    if (taken == of.n) {
        b.more = adapter(n, x, (struct adapted){name, of.part, of.n, l.out, 0, l.out});
        b.act = LG_ACT_NONE;
        y = product(n, x, rows_of(n, &w, 0, l.out), b, name);
    } else {
        y = mixed_parts(n, x, &l, &w, b.bias, name);
    }
    return l.act == LG_ACT_NONE ? y : lg_net_act(n, y, l.act);
}

lg_tensor lg_net_linear_beside(lg_net *n, const lg_tensor *x, int count, struct lg_layer l,
                               const char *name)
{
    int64_t width = 0, at = 0;
    struct lg_matrix w;
    struct beside b = {0};
    lg_tensor y = LG_NONE;
    LG_ASSERT(count > 0 && l.act == LG_ACT_NONE && !l.parts);
    for (int i = 0; i < count; i++) width += x[i].dim[2];
    if (!n->adapter.rank || lg_net_is_adapted(n, &l, name)) {
        lg_tensor all = x[0];
        for (int i = 1; i < count; i++) all = lg_net_side_by_side(n, all, x[i]);
        return lg_net_linear(n, all, l, "%s", name);
    }
    weights_of(n, &l, width, name, &w, &b.bias);
    const lg_tensor all = rows_of(n, &w, 0, l.out);
    for (int i = 0; i < count; at += x[i++].dim[2]) {
        if (i == count - 1) b.y = l.y;
        y = product(n, x[i], lg_slice(all, 1, at, x[i].dim[2]), b, name);
        b = (struct beside){.more = y};
    }
    return y;
}

/* Rows [from, from + count) as tokens of one sample. */
static lg_tensor tokens_of(lg_tensor t, int64_t from, int64_t count)
{
    const lg_tensor rows = lg_slice(lg_net_rows(t), 0, from, count);
    return lg_t3(rows.data, rows.dtype, 1, count, rows.dim[1]);
}

static lg_tensor mlp_chunk(lg_net *n, const struct lg_mlp *m, lg_tensor x, lg_tensor beside,
                           lg_tensor y)
{
    struct lg_layer down = m->down;
    char name[LG_PARAM_NAME_BYTES];
    lg_tensor h =
        lg_net_linear(n, x, m->up, "%s%s", m->scope, m->up_name ? m->up_name : ".net.0.proj");
    snprintf(name, sizeof name, "%s%s", m->scope, m->down_name ? m->down_name : ".net.2");
    down.y = y;
    if (!beside.rank) return lg_net_linear(n, h, down, "%s", name);
    return lg_net_linear_beside(n, (lg_tensor[]){beside, h}, 2, down, name);
}

/* As even as can be; of fewer rows than chunks one each. */
lg_tensor lg_net_mlp(lg_net *n, const struct lg_mlp *m)
{
    const int64_t rows = lg_net_rows(m->x).dim[0];
    const int64_t chunks = LG_MIN(LG_MAX(n->mlp_chunks, 1), rows);
    if (!n->g || chunks == 1) return mlp_chunk(n, m, m->x, m->beside, LG_NONE);
    lg_tensor y = lg_net_value(n, m->scope, lg_net_with_last(m->x, m->down.out));
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t from = rows * i / chunks, count = rows * (i + 1) / chunks - from;
        mlp_chunk(n, m, tokens_of(m->x, from, count),
                  m->beside.rank ? tokens_of(m->beside, from, count) : LG_NONE,
                  tokens_of(y, from, count));
    }
    return y;
}

void lg_net_linear_parts(lg_net *n, lg_tensor x, struct lg_layer l, int64_t first, int64_t count,
                         lg_tensor *ret, const char *name)
{
    const int64_t each = l.out / l.n_parts;
    int64_t read = 0; /* up to here, or known to be unread */
    struct lg_matrix w;
    lg_tensor bias;
    LG_ASSERT(n->g && first >= 0 && first + count <= each && l.act == LG_ACT_NONE);
    weights_of(n, &l, x.dim[x.rank - 1], name, &w, &bias);
    for (int i = 0; i < l.n_parts; i++) {
        const int64_t from = i * each + first;
        lg_net_note_unread(n, w.w, bias, read, from);
        read = from + count;
        ret[i] = part_of(n, x, &l, &w, (struct adapted){name, l.parts + i, 1, each, first, count},
                         from, bias);
    }
    lg_net_note_unread(n, w.w, bias, read, l.out);
}
