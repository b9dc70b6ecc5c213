/* See adaln.h. */
#include "stages/nets/adaln.h"
#include <math.h>
#include <stdio.h>

lg_tensor lg_adaln_table(lg_net *n, const struct lg_denoiser_config *c, int rows, const char *name)
{
    const struct lg_init init = {.kind = LG_INIT_NORMAL, .scale = 1.0 / sqrt((double)c->hidden)};
    return lg_net_param(n, init, lg_t2(NULL, n->type, rows, c->hidden), "%s", name);
}

lg_tensor lg_adaln_linear(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e,
                          const char *name)
{
    return lg_net_linear(n, lg_net_act(n, e, LG_ACT_SILU),
                         (struct lg_layer){.out = 6 * c->hidden, .init = LG_NET_NORMAL}, "%s",
                         name);
}

lg_tensor lg_adaln_of_block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor t6,
                            const char *block)
{
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.scale_shift_table", block);
    return lg_net_add(n, t6, lg_adaln_table(n, c, 6, name));
}

/* table + e: (2, B, D), the shifts of all samples, then their scales. */
struct lg_modulation lg_adaln_of_output(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e)
{
    const int64_t B = e.dim[0], D = c->hidden;
    lg_tensor rows = lg_adaln_table(n, c, 2, "scale_shift_table");
    lg_tensor both = lg_net_value(n, "output modulation", lg_t3(NULL, n->type, 2, B, D)), half[2];
    for (int i = 1; i >= 0; i--) {
        half[i] = lg_at(both, i * B * D, lg_t2(NULL, n->type, B, D));
        lg_net_add_into(n, e, lg_at(rows, i * D, lg_t1(NULL, n->type, D)), half[i]);
    }
    return (struct lg_modulation){.shift = half[0], .scale = half[1]};
}

lg_tensor lg_adaln_text(lg_net *n, const struct lg_denoiser_config *c, lg_tensor states)
{
    const struct lg_layer first = {.out = c->hidden,
                                   .init = LG_NET_NORMAL,
                                   .act = LG_ACT_GELU_TANH},
                          second = {.out = c->hidden, .init = LG_NET_NORMAL};
    lg_tensor h = lg_net_linear(n, states, first, "caption_projection.linear_1");
    return lg_net_linear(n, h, second, "caption_projection.linear_2");
}

/* Of packed parts of D each the first one. */
static lg_tensor normed(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                        const struct lg_cross *to, const char *norm, const char *name)
{
    const struct lg_head_norms l = {
        .norms = &norm, .n_norms = 1, .heads = 1, .d = c->hidden, .eps = to->norm_eps};
    return to->norms ? lg_net_head_norms(n, x, &l, LG_NONE, name) : x;
}

lg_tensor lg_adaln_cross_attention(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                   const struct lg_cross *to)
{
    static const char *const names[] = {".to_k", ".to_v"};
    const int d = c->hidden / c->heads;
    const struct lg_layer packed = {.out = 2 * c->hidden,
                                    .init = LG_NET_XAVIER,
                                    .parts = names,
                                    .n_parts = 2,
                                    .no_bias = c->no_attention_bias};
    const struct lg_layer query = {
        .out = c->hidden, .init = LG_NET_XAVIER, .no_bias = c->no_attention_bias};
    const struct lg_layer out = {.out = c->hidden, .init = LG_NET_ZERO};
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.attn2", to->block);
    lg_tensor q = lg_net_linear(n, x, query, "%s.to_q", name);
    lg_tensor kv = lg_net_linear(n, to->text, packed, "%s", name);
    q = normed(n, c, q, to, ".norm_q", name);
    const lg_tensor k = normed(n, c, kv, to, ".norm_k", name);
    lg_tensor o = lg_net_attention(n, (struct lg_attention){.q = lg_net_heads(q, c->heads, d, 0),
                                                            .k = lg_net_heads(k, c->heads, d, 0),
                                                            .v = lg_net_heads(kv, c->heads, d, 1),
                                                            .keys = to->length});
    return lg_net_linear(n, o, out, "%s.to_out.0", name);
}
