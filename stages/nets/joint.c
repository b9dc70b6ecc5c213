/* See joint.h. */
#include "stages/nets/joint.h"

/* A stream's names in an attention. */
struct names {
    const char *part[3], *norm[2]; /* q, k, v */
};
static const struct names OF_X = {{".to_q", ".to_k", ".to_v"}, {".norm_q", ".norm_k"}};
static const struct names OF_TEXT = {{".add_q_proj", ".add_k_proj", ".add_v_proj"},
                                     {".norm_added_q", ".norm_added_k"}};

/* Parts [first, first + count) of a stream's q, k, v. */
struct parts {
    const struct names *names;
    int first, count;
    const char *name; /* of the attention */
    lg_tensor angles; // by which what is normed is turned; LG_NONE: not here
    bool together;    /* what is normed and what is not are one value, for an exchange */
};

static int head_dim(const struct lg_joint *j)
{
    return j->config->hidden / j->config->heads;
}

static struct lg_layer layer_of(const struct lg_joint *j, struct parts p)
{
    return (struct lg_layer){.out = (int64_t)p.count * j->config->hidden,
                             .init = LG_NET_XAVIER,
                             .parts = p.names->part + p.first,
                             .n_parts = p.count};
}

/* Queries, keys and values (B, T, parts W) as a linear makes them, and those of them that are normed, (B, T, (parts - 1) W), or one
 * alone; LG_NONE: none is. */
struct projected {
    lg_tensor packed, normed;
};
static const struct projected NOWHERE = {{0}, {0}};

/* Part i of as many. */
static lg_tensor part_of(const struct projected *p, int i, int parts)
{
    const int64_t W = p->packed.dim[2] / parts;
    const bool normed = p->normed.rank && (i < parts - 1 || parts == 1);
    return lg_slice(normed ? p->normed : p->packed, 2, i * W, W);
}

/* Of packed parts with so many heads; to: where, or LG_NONE: a value. */
static struct projected norm_parts(lg_net *n, const struct lg_joint *j, lg_tensor packed,
                                   struct parts p, int64_t heads, lg_tensor to)
{
    const struct lg_head_norms norms = {.norms = p.names->norm + p.first,
                                        .n_norms = LG_MIN(p.count, 2 - p.first),
                                        .heads = heads,
                                        .d = head_dim(j),
                                        .eps = LG_JOINT_EPS,
                                        .angles = p.angles};
    if (!j->norms) return (struct projected){packed, LG_NONE};
    if (p.together)
        return (struct projected){lg_net_packed_norms(n, packed, &norms, to, p.name), LG_NONE};
    return (struct projected){packed, lg_net_head_norms(n, packed, &norms, to, p.name)};
}

/* Parts of x, to tokens of `to`, or, NOWHERE, as values. */
static struct projected project(lg_net *n, const struct lg_joint *j, lg_tensor x, struct parts p,
                                struct projected to)
{
    struct lg_layer l = layer_of(j, p);
    l.y = to.packed;
    return norm_parts(n, j, lg_net_linear(n, x, l, "%s", p.name), p, j->config->heads, to.normed);
}

/* The same of own heads alone, as values: W = H_p d. */
static struct projected project_own(lg_net *n, const struct lg_joint *j, lg_tensor x,
                                    struct parts p)
{
    const struct lg_heads own = lg_net_own_heads(n, j->config->heads);
    const int64_t d = head_dim(j), width = own.count * d;
    lg_tensor part[3],
        packed =
            lg_net_value(n, "own heads", lg_t3(NULL, n->type, n->batch, x.dim[1], p.count * width));
    lg_net_linear_parts(n, x, layer_of(j, p), own.first * d, width, part, p.name);
    for (int i = 0; i < p.count; i++)
        lg_net_copy_features(n, part[i], lg_slice(packed, 2, i * width, width));
    return norm_parts(n, j, packed, p, own.count, LG_NONE);
}

/* All parts of x to such tokens of one value: of one sample where they lie, of several by a copy. */
static void project_into(lg_net *n, const struct lg_joint *j, lg_tensor x, struct parts p,
                         lg_tensor to)
{
    struct projected where = NOWHERE;
    p.together = true;
    if (n->batch == 1) *(j->norms ? &where.normed : &where.packed) = to;
    const lg_tensor packed = project(n, j, x, p, where).packed;
    if (n->batch > 1) lg_net_copy_tokens(n, packed, to);
}

/* Where queries and keys are normed they are turned on the way; but own tokens' angles are others in a split sequence,
 * which turns when it has all tokens. */
static bool turns_with_norms(const lg_net *n, const struct lg_joint *j)
{
    return j->norms && j->angles.rank && !lg_net_is_split(n);
}

/* What attends to what, (B, tokens, own H d) each. first: tokens of the first of two streams that lie apart, or 0. */
struct asked {
    lg_tensor q, k, v;
    int64_t first_queries, first_keys;
};

static lg_tensor attend(lg_net *n, const struct lg_joint *j, const struct asked *a)
{
    const int64_t d = head_dim(j);
    return lg_net_attention(n, (struct lg_attention){.q = lg_split(a->q, 2, d),
                                                     .k = lg_split(a->k, 2, d),
                                                     .v = lg_split(a->v, 2, d),
                                                     .first_queries = a->first_queries,
                                                     .first_keys = a->first_keys});
}

/* All tokens of own heads of a split sequence; queries stand in front of keys and values, unless they are given. */
static lg_tensor attend_gathered(lg_net *n, const struct lg_joint *j, lg_tensor packed, lg_tensor q)
{
    const int64_t heads = lg_net_own_heads(n, j->config->heads).count, W = heads * head_dim(j);
    const int first = q.rank ? 0 : 1;
    LG_ASSERT(!j->angles.rank || !q.rank);
    if (j->angles.rank) packed = lg_net_rope(n, packed, 2 * heads, j->angles);
    return attend(n, j,
                  &(struct asked){.q = q.rank ? q : lg_slice(packed, 2, 0, W),
                                  .k = lg_slice(packed, 2, first * W, W),
                                  .v = lg_slice(packed, 2, (first + 1) * W, W)});
}

/* ---- both streams ---- */

/* Of a split sequence: each rank's two runs. */
static struct lg_cut cut_both(const lg_net *n)
{
    struct lg_cut c = n->tokens;
    for (int p = 0; p <= n->sequence.degree; p++) c.at[p] += n->texts.at[p];
    return c;
}

/* Where tokens of both streams lie in (B, S + T, F). */
static struct lg_streams in_both(const struct lg_joint *j, lg_tensor both, int64_t T)
{
    const int64_t S = both.dim[1] - T;
    return (struct lg_streams){.x = lg_slice(both, 1, j->text_first ? S : 0, T),
                               .text = lg_slice(both, 1, j->text_first ? 0 : T, S)};
}

/* Where they lie when each stream has all samples to itself: tensors of their own. */
static struct lg_streams apart(const struct lg_joint *j, lg_tensor both, int64_t T)
{
    const int64_t B = both.dim[0], S = both.dim[1] - T, D = both.dim[2];
    return (struct lg_streams){
        .x = lg_at(both, j->text_first ? B * S * D : 0, lg_t3(NULL, both.dtype, B, T, D)),
        .text = lg_at(both, j->text_first ? 0 : B * T * D, lg_t3(NULL, both.dtype, B, S, D))};
}

/* Of one sample tokens lie together where they are; of several they become a value of their own. */
static lg_tensor tokens_of(lg_net *n, lg_tensor both, int64_t from, int64_t count)
{
    const int64_t D = both.dim[2];
    if (both.dim[0] > 1) return lg_net_take_tokens(n, both, from, count);
    return lg_at(both, from * D, lg_t3(NULL, both.dtype, 1, count, D));
}

/* Each stream's tokens of those that lie together. */
static struct lg_streams take(lg_net *n, const struct lg_joint *j, lg_tensor both, int64_t T)
{
    const int64_t S = both.dim[1] - T;
    struct lg_streams s;
    if (j->text_first) s.text = tokens_of(n, both, 0, S);
    s.x = tokens_of(n, both, j->text_first ? S : 0, T);
    if (!j->text_first) s.text = tokens_of(n, both, T, S);
    return s;
}

/* Rank p's two runs in all tokens (B, S + T, F). */
static struct lg_streams runs_of(const lg_net *n, const struct lg_joint *j, lg_tensor all, int p)
{
    const struct lg_cut c = cut_both(n);
    return in_both(j, lg_slice(all, 1, c.at[p], c.at[p + 1] - c.at[p]),
                   n->tokens.at[p + 1] - n->tokens.at[p]);
}

/* What each stream has of q, k and v, or of k and v. */
struct stream_parts {
    struct parts x, text;
};
static struct stream_parts parts_of_both(const lg_net *n, const struct lg_joint *j, int64_t T,
                                         bool x_alone, const char *name)
{
    struct stream_parts p = {
        .x = {.names = &OF_X, .first = x_alone, .count = 3 - x_alone, .name = name},
        .text = {.names = &OF_TEXT, .first = x_alone, .count = 3 - x_alone, .name = name}};
    if (turns_with_norms(n, j)) {
        const struct lg_streams angles = in_both(j, j->angles, T);
        p.x.angles = angles.x, p.text.angles = angles.text;
    }
    return p;
}
static lg_tensor query_of_x(lg_net *n, const struct lg_joint *j, lg_tensor x, const char *name)
{
    const struct projected q =
        project(n, j, x, (struct parts){.names = &OF_X, .count = 1, .name = name}, NOWHERE);
    return part_of(&q, 0, 1);
}
static lg_tensor joint_value(lg_net *n, const char *name, int64_t tokens, int64_t width)
{
    return lg_net_value(n, name, lg_t3(NULL, n->type, n->batch, tokens, width));
}

/* All tokens, all heads, each stream's apart: nothing is brought together. */
static lg_tensor attend_apart(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                              bool x_alone, const char *name)
{
    const struct stream_parts p = parts_of_both(n, j, s.x.dim[1], x_alone, name);
    const int64_t T = s.x.dim[1], S = s.text.dim[1], D = j->config->hidden;
    const int64_t first = j->text_first ? S : T;
    const int count = p.x.count;
    struct projected both = {joint_value(n, "joint", T + S, count * D), LG_NONE}, x, text;
    struct asked a = {.first_queries = x_alone ? 0 : first, .first_keys = first};
    if (j->norms) both.normed = joint_value(n, "joint, normed", T + S, (count - 1) * D);
    const struct lg_streams packed = apart(j, both.packed, T);
    struct lg_streams normed = {LG_NONE, LG_NONE};
    if (j->norms) normed = apart(j, both.normed, T);
    x = (struct projected){packed.x, normed.x}, text = (struct projected){packed.text, normed.text};
    if (x_alone) a.q = query_of_x(n, j, s.x, name);
    if (j->text_first) project(n, j, s.text, p.text, text);
    project(n, j, s.x, p.x, x);
    if (!j->text_first) project(n, j, s.text, p.text, text);
    if (!x_alone) a.q = part_of(&both, 0, count);
    a.k = part_of(&both, count - 2, count);
    a.v = part_of(&both, count - 1, count);
    return attend(n, j, &a);
}

/* What goes to other ranks: own tokens, all heads, both streams' together; x_alone: with x's query by itself. */
struct sent {
    lg_tensor both, q;
};
static struct sent project_both(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                bool x_alone, const char *name)
{
    const struct stream_parts p = parts_of_both(n, j, s.x.dim[1], x_alone, name);
    const int64_t T = s.x.dim[1], N = T + s.text.dim[1];
    struct sent r = {joint_value(n, "joint", N, (int64_t)p.x.count * j->config->hidden), LG_NONE};
    const struct lg_streams to = in_both(j, r.both, T);
    if (x_alone) r.q = query_of_x(n, j, s.x, name);
    if (j->text_first) project_into(n, j, s.text, p.text, to.text);
    project_into(n, j, s.x, p.x, to.x);
    if (!j->text_first) project_into(n, j, s.text, p.text, to.text);
    return r;
}

/* The streams of all ranks, each whole, out of all tokens. */
static struct lg_streams sort_out(lg_net *n, const struct lg_joint *j, lg_tensor all)
{
    const int64_t T = n->tokens.at[n->sequence.degree], D = all.dim[2];
    struct lg_streams s = {
        .x = lg_net_value(n, "all x", lg_t3(NULL, n->type, n->batch, T, D)),
        .text = lg_net_value(n, "all text", lg_t3(NULL, n->type, n->batch, all.dim[1] - T, D))};
    for (int p = 0; p < n->sequence.degree; p++) {
        const struct lg_streams from = runs_of(n, j, all, p);
        lg_net_copy_tokens(n, from.x, lg_slice(s.x, 1, n->tokens.at[p], from.x.dim[1]));
        lg_net_copy_tokens(n, from.text, lg_slice(s.text, 1, n->texts.at[p], from.text.dim[1]));
    }
    return s;
}

/* All tokens, own heads, of what is gathered before. */
static struct sent project_gathered(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                    bool x_alone, const char *name)
{
    const struct lg_cut cut = cut_both(n);
    struct stream_parts parts = parts_of_both(n, j, s.x.dim[1], x_alone, name);
    struct sent r = {.q = LG_NONE};
    parts.x.together = parts.text.together = true;
    s = sort_out(n, j, lg_net_gather_tokens(n, lg_joint_tokens(n, j, s), &cut));
    if (x_alone) {
        const struct projected q =
            project_own(n, j, s.x, (struct parts){.names = &OF_X, .count = 1, .name = name});
        r.q = part_of(&q, 0, 1);
    }
    const lg_tensor x = project_own(n, j, s.x, parts.x).packed;
    const lg_tensor text = project_own(n, j, s.text, parts.text).packed;
    r.both = joint_value(n, "joint", x.dim[1] + text.dim[1], x.dim[2]);
    for (int p = 0; p < n->sequence.degree; p++) {
        const struct lg_streams to = runs_of(n, j, r.both, p);
        lg_net_copy_tokens(n, lg_slice(x, 1, n->tokens.at[p], to.x.dim[1]), to.x);
        lg_net_copy_tokens(n, lg_slice(text, 1, n->texts.at[p], to.text.dim[1]), to.text);
    }
    return r;
}

static lg_tensor attend_both(lg_net *n, const struct lg_joint *j, struct lg_streams s, bool x_alone,
                             const char *name)
{
    const int64_t heads = j->config->heads;
    if (!lg_net_is_split(n)) return attend_apart(n, j, s, x_alone, name);
    const struct lg_cut both = cut_both(n);
    struct sent a;
    if (n->sequence.kind == LG_SEQUENCE_FASTSEQ) {
        a = project_gathered(n, j, s, x_alone, name);
    } else {
        a = project_both(n, j, s, x_alone, name);
        a.both = lg_net_all_tokens(n, a.both, &both, 3 - x_alone, heads);
        if (x_alone) a.q = lg_net_all_tokens(n, a.q, &n->tokens, 1, heads);
    }
    return lg_net_all_heads(n, attend_gathered(n, j, a.both, a.q), x_alone ? &n->tokens : &both,
                            heads);
}

struct lg_streams lg_joint_attention(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                     bool x_alone, const char *name)
{
    lg_tensor o = attend_both(n, j, s, x_alone, name);
    if (x_alone) return (struct lg_streams){.x = o};
    return lg_net_is_split(n) ? take(n, j, o, s.x.dim[1]) : apart(j, o, s.x.dim[1]);
}

void lg_joint_unused_query(lg_net *n, const struct lg_joint *j, const char *name)
{
    const int64_t D = j->config->hidden;
    const struct lg_layer query = {.out = D, .init = LG_NET_XAVIER};
    lg_net_unused_linear(n, D, query, "%s%s", name, OF_TEXT.part[0]);
    if (!j->norms) return;
    lg_net_unused(n, lg_net_param(n, LG_NET_ONE, lg_t1(NULL, n->type, head_dim(j)), "%s%s.weight",
                                  name, OF_TEXT.norm[0]));
}

lg_tensor lg_joint_self_attention(lg_net *n, const struct lg_joint *j, lg_tensor x, bool of_both,
                                  const char *name)
{
    const bool is_split = lg_net_is_split(n);
    const struct parts all = {.names = &OF_X,
                              .count = 3,
                              .name = name,
                              .angles = turns_with_norms(n, j) ? j->angles : LG_NONE,
                              .together = is_split};
    const int64_t heads = j->config->heads;
    if (!is_split) {
        const struct projected p = project(n, j, x, all, NOWHERE);
        return attend(n, j,
                      &(struct asked){
                          .q = part_of(&p, 0, 3), .k = part_of(&p, 1, 3), .v = part_of(&p, 2, 3)});
    }
    const struct lg_cut cut = of_both ? cut_both(n) : n->tokens;
    const bool gathers = n->sequence.kind == LG_SEQUENCE_FASTSEQ;
    const struct projected p = gathers ? project_own(n, j, lg_net_gather_tokens(n, x, &cut), all)
                                       : project(n, j, x, all, NOWHERE);
    lg_tensor packed = p.packed;
    if (!gathers) packed = lg_net_all_tokens(n, packed, &cut, 3, heads);
    return lg_net_all_heads(n, attend_gathered(n, j, packed, LG_NONE), &cut, heads);
}

lg_tensor lg_joint_own_text(lg_net *n, lg_tensor text)
{
    if (!lg_net_is_split(n)) return text;
    const int64_t *at = n->texts.at + n->sequence.rank;
    return lg_net_take_tokens(n, text, at[0], at[1] - at[0]);
}

lg_tensor lg_joint_tokens(lg_net *n, const struct lg_joint *j, struct lg_streams s)
{
    const int64_t T = s.x.dim[1], S = s.text.dim[1];
    lg_tensor both = lg_net_value(n, "text, x", lg_t3(NULL, n->type, n->batch, S + T, s.x.dim[2]));
    const struct lg_streams to = in_both(j, both, T);
    lg_net_copy_tokens(n, s.text, to.text);
    lg_net_copy_tokens(n, s.x, to.x);
    return both;
}

/* ---- what else their blocks have ---- */

lg_tensor lg_joint_modulation(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e,
                              int chunks, const char *name)
{
    const struct lg_layer l = {.out = (int64_t)chunks * c->hidden, .init = LG_NET_ZERO};
    return lg_net_linear(n, e, l, "%s.linear", name);
}

struct lg_modulation lg_joint_scale_first(lg_tensor mod, int64_t D)
{
    return (struct lg_modulation){.scale = lg_slice(mod, 1, 0, D), .shift = lg_slice(mod, 1, D, D)};
}

lg_tensor lg_joint_linear(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                          const char *name)
{
    return lg_net_linear(n, x, (struct lg_layer){.out = c->hidden, .init = LG_NET_XAVIER}, "%s",
                         name);
}

lg_tensor lg_joint_feed_forward(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                struct lg_modulation m, const char *name)
{
    const struct lg_layer up = {
        .out = c->mlp_ratio * c->hidden, .init = LG_NET_XAVIER, .act = LG_ACT_GELU_TANH};
    const struct lg_layer down = {.out = c->hidden, .init = LG_NET_XAVIER};
    const struct lg_mlp mlp = {
        .x = lg_net_norm(n, x, m, LG_JOINT_EPS), .up = up, .down = down, .scope = name};
    return lg_net_residual(n, x, lg_net_mlp(n, &mlp), m.gate);
}
