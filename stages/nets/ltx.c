/* LTX-Video: a transformer of clips with attention among all tokens, of latents that are small enough for it.
 * HaCohen et al., "LTX-Video: Realtime Video Latent Diffusion", 2024; names and semantics of diffusers'
 * LTXVideoTransformer3DModel.
 *
 *     e = timestep embedding, t6 = linear(silu(e)); text = linear_2(gelu(linear_1(T5 states)))
 *     x = linear(latent cells)                                        (B, T, D), T = F H W
 *     per block: mod = table + t6
 *                q k v = linear(modulate(rms(x), shift1, scale1)); q, k through RMSNorm over all D, then turned (RoPE)
 *                x += gate1 linear(attention(q, k, v))
 *                x += linear(attention(x, text)), q, k through RMSNorm over all D, keys < text_length
 *                x += gate2 mlp(modulate(rms(x), shift2, scale2))
 *     out = linear(modulate(norm(x), table_out + e))
 *
 * Positions are those of what a cell shows: p = (frame cell_seconds / 20, row cell_pixels / 2048, column cell_pixels / 2048).
 * Of D / 6 frequencies w_j = pi / 2 10000^(j / (D / 6 - 1)) pair 3 j + axis is turned by w_j (2 p_axis - 1), behind D % 6 / 2
 * pairs that are not. The angles are worked out in fp64 here; diffusers' are fp32, up to 1e-3 off at the highest frequency.
 * T5 sees its padding, the net does not. Where frames have timesteps of their own (image-to-video: a clean first one has 0)
 * e and t6 are vectors of stretches of tokens; as diffusers', which has one for each token.
 *
 * Initial values, which no code of the authors has: as PixArt's. */
#include "stages/nets/adaln.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double QK_EPS = 1e-5, OUTPUT_EPS = 1e-6, THETA = 1e4, SECONDS = 20, PIXELS = 2048;
enum { AXES = 3 };

struct condition {
    lg_tensor t6;                // (B k, 6 D)
    lg_tensor text, text_length; // (B, L, D), (B)
    lg_tensor angles;            // (2, T, D / 2)
};

static lg_tensor self_attention(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                lg_tensor angles, const char *block)
{
    static const char *const norms[] = {".norm_q", ".norm_k"};
    const struct lg_head_norms l = {
        .norms = norms, .n_norms = 2, .heads = 1, .d = c->hidden, .eps = QK_EPS, .angles = angles};
    const struct lg_layer out = {.out = c->hidden, .init = LG_NET_XAVIER};
    char name[LG_PARAM_NAME_BYTES];
    snprintf(name, sizeof name, "%s.attn1", block);
    lg_tensor packed = lg_net_linear(n, x, lg_model_qkv(c), "%s", name);
    lg_tensor o = lg_net_attend_normed(n, packed, &l, c->heads, name);
    return lg_net_linear(n, o, out, "%s.to_out.0", name);
}

/* x: (B k, T / k, D). */
static lg_tensor block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                       const struct condition *with, int i)
{
    const int64_t rows = x.dim[0];
    char name[48];
    snprintf(name, sizeof name, "transformer_blocks.%d", i);
    lg_net_block(n, i);
    lg_tensor mod = lg_adaln_of_block(n, c, with->t6, name);
    const struct lg_modulation first = lg_net_chunks(mod, c->hidden, 0);
    const struct lg_modulation second = lg_net_chunks(mod, c->hidden, 3);
    const struct lg_cross cross = {.text = with->text,
                                   .length = with->text_length,
                                   .block = name,
                                   .norms = true,
                                   .norm_eps = QK_EPS};
    lg_tensor h = lg_net_rms_modulate(n, x, first, c->norm_eps);
    h = self_attention(n, c, lg_adaln_rows(h, n->batch), with->angles, name);
    x = lg_net_residual(n, x, lg_adaln_rows(h, rows), first.gate);
    h = lg_adaln_cross_attention(n, c, lg_adaln_rows(x, n->batch), &cross);
    x = lg_net_residual(n, x, lg_adaln_rows(h, rows), LG_NONE);
    h = lg_model_feed_forward(n, c, lg_net_rms_modulate(n, x, second, c->norm_eps), name);
    return lg_net_residual(n, x, h, second.gate);
}

static void describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out)
{
    struct condition with = {.text_length = in->text[0].length, .angles = in->positions};
    lg_net_unit(n, "embed");
    lg_tensor x =
        lg_net_linear(n, lg_net_flat_patches(n, in->x, 1),
                      (struct lg_layer){.out = c->hidden, .init = LG_NET_XAVIER}, "proj_in");
    lg_tensor e = lg_net_timestep(n, in->t, c->hidden, 0.0, "time_embed.emb.timestep_embedder");
    with.t6 = lg_adaln_linear(n, c, e, "time_embed.linear");
    with.text = lg_adaln_text(n, c, in->text[0].states);
    x = lg_adaln_rows(x, in->t.dim[0]);
    for (int i = 0; i < c->depth; i++) x = block(n, c, x, &with, i);
    lg_net_unit(n, "out");
    lg_tensor y = lg_net_norm(n, x, lg_adaln_of_output(n, c, e), OUTPUT_EPS);
    y = lg_net_linear(n, y, (struct lg_layer){.out = c->channels, .init = LG_NET_ZERO}, "proj_out");
    lg_net_unpatchify(n, lg_adaln_rows(y, n->batch), 1, out);
}

static void angles(const struct lg_denoiser_config *c, float *ret)
{
    const int of_axis = c->hidden / 6, still = c->hidden % 6 / 2;
    const size_t pairs = (size_t)c->hidden / 2;
    const size_t tokens = (size_t)lg_denoiser_rows(c) * (size_t)c->width;
    const double seconds = c->cell_seconds > 0 ? c->cell_seconds : 8.0 / 25;
    const double pixels = c->cell_pixels > 0 ? c->cell_pixels : 32;
    for (size_t t = 0; t < tokens; t++) {
        const int column = (int)(t % (size_t)c->width), row = (int)(t / (size_t)c->width);
        const double at[AXES] = {row / c->height * seconds / SECONDS,
                                 row % c->height * pixels / PIXELS, column * pixels / PIXELS};
        float *cosine = ret + t * pairs, *sine = cosine + tokens * pairs;
        for (int k = 0; k < still; k++) *cosine++ = 1, *sine++ = 0;
        for (int k = 0; k < AXES * of_axis; k++) {
            const double w = acos(0.0) * pow(THETA, (double)(k / AXES) / LG_MAX(of_axis - 1, 1));
            *cosine++ = (float)cos(w * (2 * at[k % AXES] - 1));
            *sine++ = (float)sin(w * (2 * at[k % AXES] - 1));
        }
    }
}

/* ---- its file ---- */

static int check(const struct lg_denoiser_config *c)
{
#define WANT(cond, ...)                                                                            \
    if (!(cond)) return LG_FAIL(LG_ERR_CONFIG, "model: " __VA_ARGS__)
    WANT(c->patch == 1, "patches of %d; LTX's tokens are the latent's cells: set patch = 1",
         c->patch);
    WANT(!c->learned_variance, "LTX predicts no variance: set learned_variance = false");
    WANT(!c->size_conditions, "LTX has no conditions of a picture's size");
    WANT(c->cell_seconds >= 0 && c->cell_seconds < 1e6 && c->cell_pixels >= 0 &&
             c->cell_pixels < 1e6,
         "cells of %g seconds and %g pixels; both lie between 0 and 1e6", c->cell_seconds,
         c->cell_pixels);
#undef WANT
    return 0;
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int cross, patch_t;
    bool bias, out_bias, affine;
    const struct lg_denoiser_text_info *has;
    struct lg_denoiser_text *text = &c->text[0];
    c->n_texts = lg_denoiser_texts(LG_LTX, &has);
    LG_TRY(lg_model_config_int(f, "caption_channels", 1, LG_MODEL_KEY_MAX, 4096, &text->width));
    LG_TRY(lg_model_config_int(f, "_text_length", 1, LG_MODEL_KEY_MAX, has->length, &text->length));
    LG_TRY(lg_model_config_int(f, LG_KEY_FRAMES, 1, LG_MODEL_SIDE_MAX, 1, &c->frames));
    LG_TRY(lg_model_config_double(f, LG_KEY_CELL_SECONDS, 0, &c->cell_seconds));
    LG_TRY(lg_model_config_double(f, LG_KEY_CELL_PIXELS, 0, &c->cell_pixels));
    LG_TRY(lg_model_config_double(f, "norm_eps", 1e-6, &c->norm_eps));
    LG_TRY(lg_model_config_int(f, "patch_size", 1, LG_MODEL_KEY_MAX, 1, &c->patch));
    LG_TRY(lg_model_config_int(f, "patch_size_t", 1, LG_MODEL_KEY_MAX, 1, &patch_t));
    if (patch_t != 1) return lg_model_config_refuse(f, "patch_size_t", "must be 1");
    LG_TRY(lg_model_config_int(f, "cross_attention_dim", 1, LG_MODEL_KEY_MAX, 2048, &cross));
    if (cross != c->hidden)
        return lg_model_config_refuse(f, "cross_attention_dim",
                                      "must be heads times head dimension");
    LG_TRY(lg_model_config_bool(f, "attention_bias", true, &bias));
    c->no_attention_bias = !bias;
    LG_TRY(lg_model_config_bool(f, "attention_out_bias", true, &out_bias));
    if (!out_bias) return lg_model_config_refuse(f, "attention_out_bias", "must be true");
    LG_TRY(lg_model_config_bool(f, "norm_elementwise_affine", false, &affine));
    if (affine) return lg_model_config_refuse(f, "norm_elementwise_affine", "must be false");
    LG_TRY(lg_model_config_expect(f, "activation_fn", "gelu-approximate", LG_DENOISERS_READ));
    return lg_model_config_expect(f, "qk_norm", "rms_norm_across_heads", LG_DENOISERS_READ);
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    cJSON_AddStringToObject(o, "activation_fn", "gelu-approximate");
    cJSON_AddBoolToObject(o, "attention_bias", !c->no_attention_bias);
    cJSON_AddBoolToObject(o, "attention_out_bias", true);
    cJSON_AddNumberToObject(o, "caption_channels", c->text[0].width);
    cJSON_AddNumberToObject(o, "cross_attention_dim", c->hidden);
    cJSON_AddBoolToObject(o, "norm_elementwise_affine", false);
    cJSON_AddNumberToObject(o, "norm_eps", c->norm_eps);
    cJSON_AddNumberToObject(o, "patch_size_t", 1);
    cJSON_AddStringToObject(o, "qk_norm", "rms_norm_across_heads");
    cJSON_AddNumberToObject(o, LG_KEY_FRAMES, lg_denoiser_frames(c));
    if (c->cell_seconds > 0) cJSON_AddNumberToObject(o, LG_KEY_CELL_SECONDS, c->cell_seconds);
    if (c->cell_pixels > 0) cJSON_AddNumberToObject(o, LG_KEY_CELL_PIXELS, c->cell_pixels);
    cJSON_AddNumberToObject(o, "_text_length", c->text[0].length);
}

const struct lg_model lg_ltx = {
    .class = "LTXVideoTransformer3DModel",
    .sample_size = 16,
    .channels = 128,
    .depth = 28,
    .heads = 32,
    .head_dim = 64,
    .norm_eps = 1e-6,
    .describe = describe,
    .angles = angles,
    .turns_channels = true,
    .check = check,
    .load = load,
    .save = save,
};
