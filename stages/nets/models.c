/* See models.h. */
#include "stages/nets/models.h"
#include <stdio.h>
#include <string.h>

static const struct lg_model *const MODELS[LG_DENOISER_KINDS] = {
    [LG_DIT] = &lg_dit, [LG_PIXART] = &lg_pixart, [LG_SD3] = &lg_sd3,     [LG_FLUX] = &lg_flux,
    [LG_SD2] = &lg_sd2, [LG_SDXL] = &lg_sdxl,     [LG_LATTE] = &lg_latte, [LG_LTX] = &lg_ltx,
};

const struct lg_model *lg_model_of(lg_denoiser_kind kind)
{
    LG_ASSERT((size_t)kind < LG_ARRAY_LEN(MODELS));
    return MODELS[kind];
}

lg_denoiser_kind lg_model_find(const char *class)
{
    int kind = 0;
    while (kind < LG_DENOISER_KINDS && strcmp(MODELS[kind]->class, class)) kind++;
    return (lg_denoiser_kind)kind;
}

/* ---- the halves of a block ---- */

struct lg_layer lg_model_qkv(const struct lg_denoiser_config *c)
{
    static const char *const names[] = {".to_q", ".to_k", ".to_v"};
    return (struct lg_layer){.out = 3 * c->hidden,
                             .init = LG_NET_XAVIER,
                             .parts = names,
                             .n_parts = 3,
                             .no_bias = c->no_attention_bias};
}

lg_tensor lg_model_self_attention(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                  const char *block)
{
    const struct lg_layer out = {.out = c->hidden, .init = LG_NET_XAVIER};
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.attn1", block);
    lg_tensor o = lg_net_self_attention(n, x, lg_model_qkv(c), c->heads, name);
    return lg_net_linear(n, o, out, "%s.to_out.0", name);
}

lg_tensor lg_model_feed_forward(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                const char *block)
{
    const struct lg_layer up = {
        .out = c->mlp_ratio * c->hidden, .init = LG_NET_XAVIER, .act = LG_ACT_GELU_TANH};
    const struct lg_layer down = {.out = c->hidden, .init = LG_NET_XAVIER};
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.ff", block);
    return lg_net_mlp(n, &(struct lg_mlp){.x = x, .up = up, .down = down, .scope = name});
}
