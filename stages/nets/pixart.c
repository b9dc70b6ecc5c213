/* PixArt: text-conditional diffusion transformer with adaLN-single.
 * Chen et al., "PixArt-alpha", 2023; names and semantics of diffusers' PixArtTransformer2DModel.
 *
 *     e = timestep embedding, t6 = linear(silu(e))                    (B, D), (B, 6 D)
 *         with size_conditions + [R(height), R(width), A(height / width)], three parts of D / 3
 *     text = linear_2(gelu(linear_1(T5 states)))                      (B, L, D)
 *     x = patches(x_t) + positions                                    (B, T, D)
 *     per block: mod = table + t6                                     (B, 6 D)
 *                x += gate1 attention(modulate(norm(x), shift1, scale1))
 *                x += cross_attention(x, text)        without a norm, keys < text_length
 *                x += gate2 mlp(modulate(norm(x), shift2, scale2))
 *     out = unpatchify(proj_out(modulate(norm(x), table_out + e)))
 *
 * Initial values, as in the paper's code: Xavier uniform for linears (q, k, v as one matrix; k, v
 * of the cross-attention as one) and patches, normal with 0.02 for the timestep MLP, the adaLN
 * linear and the caption projection, normal / sqrt(D) for the tables, zero for all biases, for the
 * cross-attention's output linear and for the last projection. */
#include "stages/nets/adaln.h"
#include <stdio.h>

static const double FIXED_EPS = 1e-6; /* the output norm's, whatever norm_eps is */

struct condition {
    lg_tensor t6;                // (B, 6 D)
    lg_tensor text, text_length; // (B, L, D), (B)
};

static lg_tensor block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                       const struct condition *with, int i)
{
    char name[48];
    snprintf(name, sizeof name, "transformer_blocks.%d", i);
    lg_net_block(n, i);
    lg_tensor mod = lg_adaln_of_block(n, c, with->t6, name);
    struct lg_modulation first = lg_net_chunks(mod, c->hidden, 0);
    struct lg_modulation second = lg_net_chunks(mod, c->hidden, 3);
    const struct lg_cross cross = {.text = with->text, .length = with->text_length, .block = name};
    lg_tensor h = lg_model_self_attention(n, c, lg_net_norm(n, x, first, c->norm_eps), name);
    x = lg_net_residual(n, x, h, first.gate);
    h = lg_adaln_cross_attention(n, c, x, &cross);
    x = lg_net_residual(n, x, h, LG_NONE);
    h = lg_model_feed_forward(n, c, lg_net_norm(n, x, second, c->norm_eps), name);
    return lg_net_residual(n, x, h, second.gate);
}

#define EMBEDDERS "adaln_single.emb."

static lg_tensor embedding(lg_net *n, const struct lg_denoiser_config *c,
                           const struct lg_model_input *in)
{
    const int64_t D = c->hidden, third = D / 3;
    lg_tensor t = lg_net_timestep(n, in->t, D, 0.0, EMBEDDERS "timestep_embedder");
    if (!c->size_conditions) return t;
    lg_tensor size = lg_net_value(n, "size", lg_t2(NULL, n->type, n->batch, D));
    lg_net_numbers_into(n, in->size, third, lg_slice(size, 1, 0, 2 * third),
                        EMBEDDERS "resolution_embedder");
    lg_net_numbers_into(n, in->ratio, third, lg_slice(size, 1, 2 * third, third),
                        EMBEDDERS "aspect_ratio_embedder");
    return lg_net_add(n, t, size);
}

static void describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out)
{
    const int64_t P = (int64_t)lg_denoiser_out_channels(c) * c->patch * c->patch;
    struct condition with = {.text_length = in->text[0].length};
    lg_net_unit(n, "embed");
    lg_tensor x = lg_net_patches(n, in->x, c->patch, in->positions, "pos_embed.proj");
    lg_tensor e = embedding(n, c, in);
    with.t6 = lg_adaln_linear(n, c, e, "adaln_single.linear");
    with.text = lg_adaln_text(n, c, in->text[0].states);
    for (int i = 0; i < c->depth; i++) x = block(n, c, x, &with, i);
    lg_net_unit(n, "out");
    struct lg_modulation m = lg_adaln_of_output(n, c, e);
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, x, m, FIXED_EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    lg_net_unpatchify(n, y, c->patch, out);
}

/* ---- its file ---- */

static double scale(int sample_size)
{
    return LG_MAX(sample_size / 64, 1);
}

static int check(const struct lg_denoiser_config *c)
{
    if (c->size_conditions && c->hidden % 3)
        return LG_FAIL(LG_ERR_CONFIG,
                       "model: hidden = %d; conditions of a picture's size want a multiple of 3",
                       c->hidden);
    return 0;
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int cross;
    const struct lg_denoiser_text_info *has;
    struct lg_denoiser_text *text = &c->text[0];
    c->n_texts = lg_denoiser_texts(LG_PIXART, &has);
    LG_TRY(lg_model_config_int(f, "caption_channels", 1, LG_MODEL_KEY_MAX, -1, &text->width));
    LG_TRY(lg_model_config_int(f, "_text_length", 1, LG_MODEL_KEY_MAX, has->length, &text->length));
    LG_TRY(lg_model_config_int(f, "cross_attention_dim", 1, LG_MODEL_KEY_MAX, 1152, &cross));
    if (cross != c->hidden)
        return lg_model_config_refuse(f, "cross_attention_dim",
                                      "must be heads times head dimension");
    return lg_model_config_expect(f, "attention_type", "default", LG_DENOISERS_READ);
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    cJSON_AddStringToObject(o, "attention_type", "default");
    cJSON_AddNumberToObject(o, "caption_channels", c->text[0].width);
    cJSON_AddNumberToObject(o, "cross_attention_dim", c->hidden);
    if (c->interpolation > 0)
        cJSON_AddNumberToObject(o, "interpolation_scale", c->interpolation);
    else
        cJSON_AddNullToObject(o, "interpolation_scale");
    cJSON_AddBoolToObject(o, "use_additional_conditions", c->size_conditions);
    cJSON_AddNumberToObject(o, "_text_length", c->text[0].length);
}

const struct lg_model lg_pixart = {
    .class = "PixArtTransformer2DModel",
    .norm_type = "ada_norm_single",
    .sample_size = 128,
    .channels = 4,
    .depth = 28,
    .heads = 16,
    .head_dim = 72,
    .norm_eps = 1e-6,
    .out_channels = 8,
    .describe = describe,
    .scale = scale,
    .check = check,
    .load = load,
    .save = save,
    .size_tensor = EMBEDDERS "resolution_embedder.linear_1.weight",
};
