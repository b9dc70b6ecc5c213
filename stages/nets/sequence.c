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

bool lg_net_is_split(const lg_net *n)
{
    return lg_sequence_is_split(&n->sequence);
}

struct lg_heads lg_net_own_heads(const lg_net *n, int64_t heads)
{
    if (!lg_net_is_split(n)) return (struct lg_heads){.count = heads};
    const struct lg_cut cut = cut_heads(n, 2, heads);
    const int64_t first = cut.at[n->sequence.rank];
    return (struct lg_heads){first, cut.at[n->sequence.rank + 1] - first};
}

lg_tensor lg_net_all_tokens(lg_net *n, lg_tensor packed, const struct lg_cut *cut, int parts,
                            int64_t heads)
{
    const int64_t B = packed.dim[0], d = packed.dim[2] / (parts * heads);
    const int64_t dim[] = {B, packed.dim[1], parts, heads, d};
    packed = lg_at(packed, 0, lg_tensor_of(NULL, n->type, 5, dim));
    packed = exchange(n, "all tokens", *cut, cut_heads(n, 3, heads), packed);
    return lg_at(packed, 0, lg_t3(NULL, n->type, B, packed.dim[1], parts * packed.dim[3] * d));
}

lg_tensor lg_net_gather_tokens(lg_net *n, lg_tensor x, const struct lg_cut *cut)
{
    return exchange(n, "all tokens", *cut, (struct lg_cut){.dim = -1}, x);
}

lg_tensor lg_net_all_heads(lg_net *n, lg_tensor o, const struct lg_cut *cut, int64_t heads)
{
    const int64_t B = o.dim[0], T = o.dim[1], own = lg_net_own_heads(n, heads).count;
    const int64_t d = o.dim[2] / own;
    o = lg_at(o, 0, lg_t4(NULL, n->type, B, T, own, d));
    o = exchange(n, "all heads", cut_heads(n, 2, heads), *cut, o);
    return lg_at(o, 0, lg_t3(NULL, n->type, B, o.dim[1], heads * d));
}

lg_tensor lg_net_attend_packed(lg_net *n, lg_tensor packed, int64_t heads)
{
    if (!lg_net_is_split(n)) return attend(n, packed, heads);
    packed = lg_net_all_tokens(n, packed, &n->tokens, 3, heads);
    lg_tensor o = attend(n, packed, lg_net_own_heads(n, heads).count);
    return lg_net_all_heads(n, o, &n->tokens, heads);
}

lg_tensor lg_net_packed_norms(lg_net *n, lg_tensor packed, const struct lg_head_norms *l,
                              lg_tensor all, const char *name)
{
    const int64_t normed = l->n_norms * l->heads * l->d, rest = packed.dim[2] - normed;
    if (!all.rank) all = lg_net_value(n, "q, k, v", packed);
    lg_net_head_norms(n, packed, l, lg_slice(all, 2, 0, normed), name);
    lg_net_copy_features(n, lg_slice(packed, 2, normed, rest), lg_slice(all, 2, normed, rest));
    return all;
}

lg_tensor lg_net_attend_normed(lg_net *n, lg_tensor packed, const struct lg_head_norms *l,
                               int64_t heads, const char *name)
{
    const int64_t d = packed.dim[2] / (3 * heads);
    if (lg_net_is_split(n))
        return lg_net_attend_packed(n, lg_net_packed_norms(n, packed, l, LG_NONE, name), heads);
    const lg_tensor qk = lg_net_head_norms(n, packed, l, LG_NONE, name);
    return lg_net_attention(n, (struct lg_attention){.q = lg_net_heads(qk, heads, d, 0),
                                                     .k = lg_net_heads(qk, heads, d, 1),
                                                     .v = lg_net_heads(packed, heads, d, 2)});
}

static lg_tensor fastseq(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                         const char *name)
{
    const int64_t d = packed.out / (3 * heads);
    const struct lg_heads own = lg_net_own_heads(n, heads);
    x = lg_net_gather_tokens(n, x, &n->tokens);
    lg_tensor o = attend_parts(n, x, packed, own.first * d, own.count * d, d, name);
    return lg_net_all_heads(n, o, &n->tokens, heads);
}

lg_tensor lg_net_self_attention(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                                const char *name)
{
    const int64_t each = packed.out / 3;
    LG_ASSERT(packed.n_parts == 3);
    if (lg_net_is_split(n) && n->sequence.kind == LG_SEQUENCE_FASTSEQ)
        return fastseq(n, x, packed, heads, name);
    if (n->g && !lg_net_is_split(n) && lg_net_is_adapted(n, &packed, name))
        return attend_parts(n, x, packed, 0, each, each / heads, name);
    return lg_net_attend_packed(n, lg_net_linear(n, x, packed, "%s", name), heads);
}

/* ---- tokens of clips ---- */

lg_tensor lg_net_frame_attention(lg_net *n, lg_tensor x, const struct lg_clip_attention *a)
{
    const int64_t B = x.dim[0], T = x.dim[1], D = x.dim[2], each = a->packed.out / 3;
    LG_ASSERT(a->packed.n_parts == 3 && T % a->frames == 0);
    x = lg_at(x, 0, lg_t3(NULL, n->type, B * a->frames, T / a->frames, D));
    lg_tensor o = n->g && lg_net_is_adapted(n, &a->packed, a->name)
                      ? attend_parts(n, x, a->packed, 0, each, each / a->heads, a->name)
                      : attend(n, lg_net_linear(n, x, a->packed, "%s", a->name), a->heads);
    return lg_at(o, 0, lg_t3(NULL, n->type, B, T, each));
}

/* q, k, v by products of their own, each (B, T, H d) of all tokens and own heads. */
static void project_parts(lg_net *n, lg_tensor x, const struct lg_clip_attention *a, lg_tensor *ret)
{
    const int64_t each = a->packed.out / 3, d = each / a->heads;
    if (!n->g) { /* what is declared is one product, and shapes count */
        lg_tensor all = lg_net_linear(n, x, a->packed, "%s", a->name);
        for (int i = 0; i < 3; i++) ret[i] = lg_slice(all, 2, i * each, each);
    } else if (lg_net_is_split(n) && n->sequence.kind == LG_SEQUENCE_FASTSEQ) {
        const struct lg_heads own = lg_net_own_heads(n, a->heads);
        x = lg_net_gather_tokens(n, x, &n->tokens);
        lg_net_linear_parts(n, x, a->packed, own.first * d, own.count * d, ret, a->name);
    } else {
        lg_net_linear_parts(n, x, a->packed, 0, each, ret, a->name);
        for (int i = 0; i < 3 && lg_net_is_split(n); i++)
            ret[i] = lg_net_all_tokens(n, ret[i], &n->tokens, 1, a->heads);
    }
}

int64_t lg_net_place_heads_max = 65535; /* blocks in a dimension of CUDA's grid */

/* Heads know nothing of each other: where they are too many they go one part after the other, to the same bits. */
static lg_tensor attend_in_parts(lg_net *n, const lg_tensor part[3])
{
    const int64_t B = part[0].dim[0], F = part[0].dim[1], H = part[0].dim[2], d = part[0].dim[3];
    const int64_t most = lg_net_place_heads_max;
    if (H <= most)
        return lg_net_attention(n, (struct lg_attention){.q = part[0], .k = part[1], .v = part[2]});
    lg_tensor o = lg_net_value(n, "attention", lg_t3(NULL, n->type, B, F, H * d));
    for (int64_t at = 0; at < H; at += most) {
        const int64_t count = LG_MIN(most, H - at);
        lg_tensor of =
            lg_net_attention(n, (struct lg_attention){.q = lg_slice(part[0], 2, at, count),
                                                      .k = lg_slice(part[1], 2, at, count),
                                                      .v = lg_slice(part[2], 2, at, count)});
        lg_net_copy_features(n, of, lg_slice(o, 2, at * d, count * d));
    }
    return o;
}

/* A frame's places and their heads lie behind each other, (F, S H d): to an attention along the frames they are S H heads,
 * and nothing is transposed. */
lg_tensor lg_net_place_attention(lg_net *n, lg_tensor x, const struct lg_clip_attention *a)
{
    const int64_t B = x.dim[0], S = x.dim[1] / a->frames, d = a->packed.out / 3 / a->heads;
    lg_tensor part[3];
    LG_ASSERT(a->packed.n_parts == 3 && x.dim[1] % a->frames == 0);
    project_parts(n, x, a, part);
    const int64_t T = part[0].dim[1], own = part[0].dim[2];
    for (int i = 0; i < 3; i++)
        part[i] = lg_at(part[i], 0, lg_t4(NULL, n->type, B, T / S, S * own / d, d));
    lg_tensor o = attend_in_parts(n, part);
    o = lg_at(o, 0, lg_t3(NULL, n->type, B, T, own));
    return lg_net_is_split(n) ? lg_net_all_heads(n, o, &n->tokens, a->heads) : o;
}
