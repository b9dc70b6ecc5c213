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

/* Of packed parts with so many heads; to: tokens of a value, or LG_NONE. */
static lg_tensor normed(lg_net *n, const struct lg_joint *j, lg_tensor packed, struct parts p,
                        int64_t heads, lg_tensor to)
{
    const struct lg_head_norms norms = {.norms = p.names->norm + p.first,
                                        .n_norms = LG_MIN(p.count, 2 - p.first),
                                        .heads = heads,
                                        .d = head_dim(j),
                                        .eps = LG_JOINT_EPS,
                                        .angles = p.angles};
    if (j->norms) return lg_net_head_norms(n, packed, &norms, to, p.name);
    if (to.rank) lg_net_copy_tokens(n, packed, to);
    return packed;
}

/* Packed parts of x, q and k normed, to tokens `to` or, LG_NONE, as a value: (.., count D). */
static lg_tensor project(lg_net *n, const struct lg_joint *j, lg_tensor x, struct parts p,
                         lg_tensor to)
{
    lg_tensor packed = lg_net_linear(n, x, layer_of(j, p), "%s", p.name);
    return normed(n, j, packed, p, j->config->heads, to);
}

/* The same of own heads alone, as a value: (.., count H_p d). */
static lg_tensor project_own(lg_net *n, const struct lg_joint *j, lg_tensor x, struct parts p)
{
    const struct lg_heads own = lg_net_own_heads(n, j->config->heads);
    const int64_t d = head_dim(j), width = own.count * d;
    lg_tensor part[3],
        packed =
            lg_net_value(n, "own heads", lg_t3(NULL, n->type, n->batch, x.dim[1], p.count * width));
    lg_net_linear_parts(n, x, layer_of(j, p), own.first * d, width, part, p.name);
    for (int i = 0; i < p.count; i++)
        lg_net_copy_features(n, part[i], lg_slice(packed, 2, i * width, width));
    return normed(n, j, packed, p, own.count, LG_NONE);
}

/* Where queries and keys are normed they are turned on the way; but own tokens' angles are others in a split sequence,
 * which turns when it has all tokens. */
static bool turns_with_norms(const lg_net *n, const struct lg_joint *j)
{
    return j->norms && j->angles.rank && !lg_net_is_split(n);
}

/* What is projected; q: x's query by itself, or LG_NONE. first: the streams' tokens lie apart in `both`, so many of the first
 * one in front; 0: together. */
struct asked {
    lg_tensor both, q;
    int64_t first;
};

/* All tokens of own heads; queries stand in front of keys and values, unless they are given. */
static lg_tensor attend(lg_net *n, const struct lg_joint *j, const struct asked *asked)
{
    lg_tensor packed = asked->both;
    const lg_tensor q = asked->q;
    const int64_t heads = lg_net_own_heads(n, j->config->heads).count, d = head_dim(j);
    const int first = q.rank ? 0 : 1;
    const bool turns = j->angles.rank && !turns_with_norms(n, j);
    LG_ASSERT(!j->angles.rank || !q.rank);
    LG_ASSERT(!turns || !asked->first); /* angles are those of tokens that lie together */
    if (turns) packed = lg_net_rope(n, packed, 2 * heads, j->angles);
    return lg_net_attention(
        n, (struct lg_attention){.q = lg_net_heads(q.rank ? q : packed, heads, d, 0),
                                 .k = lg_net_heads(packed, heads, d, first),
                                 .v = lg_net_heads(packed, heads, d, first + 1),
                                 .first_queries = q.rank ? 0 : asked->first,
                                 .first_keys = asked->first});
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

/* Own tokens, all heads; of a split sequence, which goes to others, together. */
static struct asked project_both(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                 bool x_alone, const char *name)
{
    struct parts of_x = {&OF_X, x_alone, 3 - x_alone, name, LG_NONE};
    struct parts of_text = {&OF_TEXT, x_alone, 3 - x_alone, name, LG_NONE};
    const int64_t T = s.x.dim[1], N = T + s.text.dim[1];
    lg_tensor both = lg_net_value(
        n, "joint", lg_t3(NULL, n->type, n->batch, N, (int64_t)of_x.count * j->config->hidden));
    const bool is_split = lg_net_is_split(n);
    const struct lg_streams to = is_split ? in_both(j, both, T) : apart(j, both, T);
    struct asked a = {both, LG_NONE, is_split ? 0 : j->text_first ? N - T : T};
    if (turns_with_norms(n, j)) {
        const struct lg_streams angles = in_both(j, j->angles, T);
        of_x.angles = angles.x, of_text.angles = angles.text;
    }
    if (x_alone) a.q = project(n, j, s.x, (struct parts){&OF_X, 0, 1, name, LG_NONE}, LG_NONE);
    if (j->text_first) project(n, j, s.text, of_text, to.text);
    project(n, j, s.x, of_x, to.x);
    if (!j->text_first) project(n, j, s.text, of_text, to.text);
    return a;
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
static struct asked project_gathered(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                     bool x_alone, const char *name)
{
    const struct lg_cut cut = cut_both(n);
    const struct parts of_x = {&OF_X, x_alone, 3 - x_alone, name, LG_NONE};
    const struct parts of_text = {&OF_TEXT, x_alone, 3 - x_alone, name, LG_NONE};
    s = sort_out(n, j, lg_net_gather_tokens(n, lg_joint_tokens(n, j, s), &cut));
    struct asked a = {.q = LG_NONE};
    if (x_alone) a.q = project_own(n, j, s.x, (struct parts){&OF_X, 0, 1, name, LG_NONE});
    const lg_tensor x = project_own(n, j, s.x, of_x), text = project_own(n, j, s.text, of_text);
    a.both =
        lg_net_value(n, "joint", lg_t3(NULL, n->type, n->batch, x.dim[1] + text.dim[1], x.dim[2]));
    for (int p = 0; p < n->sequence.degree; p++) {
        const struct lg_streams to = runs_of(n, j, a.both, p);
        lg_net_copy_tokens(n, lg_slice(x, 1, n->tokens.at[p], to.x.dim[1]), to.x);
        lg_net_copy_tokens(n, lg_slice(text, 1, n->texts.at[p], to.text.dim[1]), to.text);
    }
    return a;
}

static lg_tensor attend_both(lg_net *n, const struct lg_joint *j, struct lg_streams s, bool x_alone,
                             const char *name)
{
    const int64_t heads = j->config->heads;
    if (!lg_net_is_split(n)) {
        const struct asked a = project_both(n, j, s, x_alone, name);
        return attend(n, j, &a);
    }
    const struct lg_cut both = cut_both(n);
    struct asked a;
    if (n->sequence.kind == LG_SEQUENCE_FASTSEQ) {
        a = project_gathered(n, j, s, x_alone, name);
    } else {
        a = project_both(n, j, s, x_alone, name);
        a.both = lg_net_all_tokens(n, a.both, &both, 3 - x_alone, heads);
        if (x_alone) a.q = lg_net_all_tokens(n, a.q, &n->tokens, 1, heads);
    }
    return lg_net_all_heads(n, attend(n, j, &a), x_alone ? &n->tokens : &both, heads);
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
    const struct parts all = {&OF_X, 0, 3, name, turns_with_norms(n, j) ? j->angles : LG_NONE};
    const int64_t heads = j->config->heads;
    struct asked a = {.q = LG_NONE};
    if (!lg_net_is_split(n)) {
        a.both = project(n, j, x, all, LG_NONE);
        return attend(n, j, &a);
    }
    const struct lg_cut cut = of_both ? cut_both(n) : n->tokens;
    if (n->sequence.kind == LG_SEQUENCE_FASTSEQ)
        a.both = project_own(n, j, lg_net_gather_tokens(n, x, &cut), all);
    else
        a.both = lg_net_all_tokens(n, project(n, j, x, all, LG_NONE), &cut, 3, heads);
    return lg_net_all_heads(n, attend(n, j, &a), &cut, heads);
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
