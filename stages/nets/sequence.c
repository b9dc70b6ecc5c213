/* Self-attention of a sequence that may be split; see sequence.h. */
#include "stages/nets/layers.h"

/* packed: (B, T, 3 H d) */
static lg_tensor attend(lg_net *n, lg_tensor packed, int64_t heads)
{
    const int64_t d = packed.dim[2] / (3 * heads);
    return lg_net_attention(n, (struct lg_attention){.q = lg_net_heads(packed, heads, d, 0),
                                                     .k = lg_net_heads(packed, heads, d, 1),
                                                     .v = lg_net_heads(packed, heads, d, 2)});
}

/* q, k and v by products of their own, for features [first, first + count) of each. */
static lg_tensor attend_parts(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t first,
                              int64_t count, int64_t d, const char *name)
{
    lg_tensor part[3];
    lg_net_linear_parts(n, x, packed, first, count, part, name);
    for (int i = 0; i < 3; i++) part[i] = lg_split(part[i], 2, d);
    return lg_net_attention(n, (struct lg_attention){.q = part[0], .k = part[1], .v = part[2]});
}

static struct lg_cut cut_heads(const lg_net *n, int dim, int64_t heads)
{
    return lg_cut_evenly(dim, heads, 1, n->sequence.degree);
}

static lg_tensor exchange(lg_net *n, const char *name, struct lg_cut before, struct lg_cut after,
                          lg_tensor from)
{
    const struct lg_cuts c = {
        .rank = n->sequence.rank, .degree = n->sequence.degree, .before = before, .after = after};
    return lg_graph_exchange(n->g, name, &c, from);
}

/* o: own heads of all tokens (B, T, H_p d); returns all heads of own tokens (B, T_p, H d). */
static lg_tensor back(lg_net *n, lg_tensor o, int64_t own_heads, int64_t heads)
{
    const int64_t B = o.dim[0], T = o.dim[1], d = o.dim[2] / own_heads;
    o = lg_at(o, 0, lg_t4(NULL, n->type, B, T, own_heads, d));
    o = exchange(n, "all heads", cut_heads(n, 2, heads), n->tokens, o);
    return lg_at(o, 0, lg_t3(NULL, n->type, B, o.dim[1], heads * d));
}

static lg_tensor ulysses(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                         const char *name)
{
    const int64_t B = x.dim[0], d = packed.out / (3 * heads);
    const int64_t dim[] = {B, x.dim[1], 3, heads, d};
    lg_tensor qkv = lg_net_linear(n, x, packed, "%s", name);
    qkv = lg_at(qkv, 0, lg_tensor_of(NULL, n->type, 5, dim));
    qkv = exchange(n, "all tokens", n->tokens, cut_heads(n, 3, heads), qkv);
    const int64_t own = qkv.dim[3];
    qkv = lg_at(qkv, 0, lg_t3(NULL, n->type, B, qkv.dim[1], 3 * own * d));
    return back(n, attend(n, qkv, own), own, heads);
}

static lg_tensor fastseq(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                         const char *name)
{
    const int64_t d = packed.out / (3 * heads);
    const struct lg_cut cut = cut_heads(n, 2, heads);
    const int64_t first = cut.at[n->sequence.rank], own = cut.at[n->sequence.rank + 1] - first;
    x = exchange(n, "all tokens", n->tokens, (struct lg_cut){.dim = -1}, x);
    return back(n, attend_parts(n, x, packed, first * d, own * d, d, name), own, heads);
}

lg_tensor lg_net_self_attention(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                                const char *name)
{
    const int64_t each = packed.out / 3;
    LG_ASSERT(packed.n_parts == 3);
    if (n->g && !lg_sequence_is_split(&n->sequence) && lg_net_is_adapted(n, &packed, name))
        return attend_parts(n, x, packed, 0, each, each / heads, name);
    if (!n->g || !lg_sequence_is_split(&n->sequence))
        return attend(n, lg_net_linear(n, x, packed, "%s", name), heads);
    return n->sequence.kind == LG_SEQUENCE_ULYSSES ? ulysses(n, x, packed, heads, name)
                                                   : fastseq(n, x, packed, heads, name);
}
