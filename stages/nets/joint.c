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
};

static int head_dim(const struct lg_joint *j)
{
    return j->config->hidden / j->config->heads;
}

/* Packed parts of x, q and k normed, to tokens `to` or, LG_NONE, as a value: (.., count D). */
static lg_tensor project(lg_net *n, const struct lg_joint *j, lg_tensor x, struct parts p,
                         lg_tensor to)
{
    const struct lg_layer parts = {.out = (int64_t)p.count * j->config->hidden,
                                   .init = LG_NET_XAVIER,
                                   .parts = p.names->part + p.first,
                                   .n_parts = p.count};
    const struct lg_head_norms norms = {.norms = p.names->norm + p.first,
                                        .n_norms = LG_MIN(p.count, 2 - p.first),
                                        .heads = j->config->heads,
                                        .d = head_dim(j),
                                        .eps = LG_JOINT_EPS};
    lg_tensor packed = lg_net_linear(n, x, parts, "%s", p.name);
    if (j->norms) return lg_net_head_norms(n, packed, &norms, to, p.name);
    if (to.rank) lg_net_copy_tokens(n, packed, to);
    return packed;
}

/* q: packed in front of k and v, unless it is given. */
static lg_tensor attend(lg_net *n, const struct lg_joint *j, lg_tensor packed, const lg_tensor *q)
{
    const int64_t heads = j->config->heads, d = head_dim(j);
    const int first = q ? 0 : 1;
    if (j->angles.rank) {
        LG_ASSERT(!q);
        packed = lg_net_rope(n, packed, 2 * heads, j->angles);
    }
    return lg_net_attention(n,
                            (struct lg_attention){.q = lg_net_heads(q ? *q : packed, heads, d, 0),
                                                  .k = lg_net_heads(packed, heads, d, first),
                                                  .v = lg_net_heads(packed, heads, d, first + 1)});
}

/* Where tokens of both streams lie in (B, S + T, F). */
static struct lg_streams in_both(const struct lg_joint *j, lg_tensor both, int64_t T)
{
    const int64_t S = both.dim[1] - T;
    return (struct lg_streams){.x = lg_slice(both, 1, j->text_first ? S : 0, T),
                               .text = lg_slice(both, 1, j->text_first ? 0 : T, S)};
}

/* Each stream's tokens as a value of its own. */
static struct lg_streams take(lg_net *n, const struct lg_joint *j, lg_tensor both, int64_t T)
{
    const int64_t S = both.dim[1] - T;
    struct lg_streams s;
    if (j->text_first) s.text = lg_net_take_tokens(n, both, 0, S);
    s.x = lg_net_take_tokens(n, both, j->text_first ? S : 0, T);
    if (!j->text_first) s.text = lg_net_take_tokens(n, both, T, S);
    return s;
}

struct lg_streams lg_joint_attention(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                     bool x_alone, const char *name)
{
    const int64_t T = s.x.dim[1], S = s.text.dim[1];
    const struct parts of_x = {&OF_X, x_alone, 3 - x_alone, name};
    const struct parts of_text = {&OF_TEXT, x_alone, 3 - x_alone, name};
    const lg_tensor shape =
        lg_t3(NULL, n->type, n->batch, T + S, (int64_t)of_x.count * j->config->hidden);
    lg_tensor both = lg_net_value(n, "joint", shape), q;
    const struct lg_streams to = in_both(j, both, T);
    if (x_alone) q = project(n, j, s.x, (struct parts){&OF_X, 0, 1, name}, LG_NONE);
    if (j->text_first) project(n, j, s.text, of_text, to.text);
    project(n, j, s.x, of_x, to.x);
    if (!j->text_first) project(n, j, s.text, of_text, to.text);
    lg_tensor o = attend(n, j, both, x_alone ? &q : NULL);
    if (x_alone) return (struct lg_streams){.x = o};
    return take(n, j, o, T);
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

lg_tensor lg_joint_self_attention(lg_net *n, const struct lg_joint *j, lg_tensor x,
                                  const char *name)
{
    return attend(n, j, project(n, j, x, (struct parts){&OF_X, 0, 3, name}, LG_NONE), NULL);
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
    lg_tensor h = lg_net_linear(n, lg_net_norm(n, x, m, LG_JOINT_EPS), up, "%s.net.0.proj", name);
    return lg_net_residual(n, x, lg_net_linear(n, h, down, "%s.net.2", name), m.gate);
}
