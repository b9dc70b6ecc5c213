/* Latte: a latent diffusion transformer of clips whose attention is factorised.
 * Ma et al., "Latte: Latent Diffusion Transformer for Video Generation", 2024; names and semantics of diffusers'
 * LatteTransformer3DModel.
 *
 *     e, t6, text as PixArt's (pixart.c, without size_conditions)
 *     x = patches of each frame + positions in it                     (B, F S, D)
 *     per block: a block as PixArt's, whose self-attention goes over the S tokens of a frame
 *                before the first one of these, in clips: x += positions of the frames
 *                the same without cross-attention, its self-attention over the F tokens at a place
 *     out = unpatchify(proj_out(modulate(norm(x), table_out + e)))
 *
 * A block of both is block i: what is recomputed, or gathered, together. Padding of the text is masked, as diffusers'
 * pipeline masks it for one prompt (which it cuts to its tokens). diffusers has the frames' positions of video_length
 * frames and can add them to no other number; here a clip has those of its frames, and video_length is written as their number.
 *
 * Where frames have timesteps of their own each has its own e and t6, as LTX's (ltx.c).
 *
 * Initial values are PixArt's; the authors' start the modulations at zero. */
#include "stages/nets/adaln.h"
#include <stdio.h>

static const double FIXED_EPS = 1e-6; /* the output norm's, whatever norm_eps is */

struct condition {
    lg_tensor t6;                // (B k, 6 D)
    lg_tensor text, text_length; // (B, L, D), (B)
    int64_t frames;              /* of x */
    bool along_time;             /* the block, or in a frame */
};

/* x: (B k, T / k, D). */
static lg_tensor block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                       const struct condition *with, int i)
{
    const int64_t rows = x.dim[0];
    char name[48], attention[56];
    snprintf(name, sizeof name, "%stransformer_blocks.%d", with->along_time ? "temporal_" : "", i);
    snprintf(attention, sizeof attention, "%s.attn1", name);
    lg_tensor mod = lg_adaln_of_block(n, c, with->t6, name);
    const struct lg_modulation first = lg_net_chunks(mod, c->hidden, 0);
    const struct lg_modulation second = lg_net_chunks(mod, c->hidden, 3);
    const struct lg_layer out = {.out = c->hidden, .init = LG_NET_XAVIER};
    const struct lg_clip_attention own = {
        .packed = lg_model_qkv(c), .heads = c->heads, .frames = with->frames, .name = attention};
    const struct lg_cross cross = {.text = with->text, .length = with->text_length, .block = name};
    lg_tensor h = lg_adaln_rows(lg_net_norm(n, x, first, c->norm_eps), n->batch);
    h = with->along_time ? lg_net_place_attention(n, h, &own) : lg_net_frame_attention(n, h, &own);
    h = lg_net_linear(n, h, out, "%s.to_out.0", attention);
    x = lg_net_residual(n, x, lg_adaln_rows(h, rows), first.gate);
    if (!with->along_time) {
        h = lg_adaln_cross_attention(n, c, lg_adaln_rows(x, n->batch), &cross);
        x = lg_net_residual(n, x, lg_adaln_rows(h, rows), LG_NONE);
    }
    h = lg_model_feed_forward(n, c, lg_net_norm(n, x, second, c->norm_eps), name);
    return lg_net_residual(n, x, h, second.gate);
}

/* positions: (B F, D). */
static lg_tensor add_frames(lg_net *n, lg_tensor x, lg_tensor positions)
{
    const lg_tensor frames =
        lg_t3(NULL, n->type, positions.dim[0], lg_numel(&x) / lg_numel(&positions), x.dim[2]);
    lg_tensor y = lg_net_value(n, "x", x);
    LG_NET_RECORD(n, shift_forward, .x = lg_at(x, 0, frames), .shift = positions,
                  .y = lg_at(y, 0, frames));
    return y;
}

static void describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out)
{
    const int64_t P = (int64_t)lg_denoiser_out_channels(c) * c->patch * c->patch;
    const int64_t S = (int64_t)(c->height / c->patch) * (c->width / c->patch);
    struct condition with = {.text_length = in->text[0].length, .frames = in->x.dim[2] / c->height};
    const int64_t of_frames = in->positions.dim[0] - S; /* 0: a picture */
    lg_net_unit(n, "embed");
    lg_tensor x =
        lg_net_patches(n, in->x, c->patch, lg_slice(in->positions, 0, 0, S), "pos_embed.proj");
    lg_tensor e = lg_net_timestep(n, in->t, c->hidden, 0.0, "adaln_single.emb.timestep_embedder");
    with.t6 = lg_adaln_linear(n, c, e, "adaln_single.linear");
    with.text = lg_adaln_text(n, c, in->text[0].states);
    x = lg_adaln_rows(x, in->t.dim[0]);
    for (int i = 0; i < c->depth; i++) {
        lg_net_block(n, i);
        with.along_time = false;
        x = block(n, c, x, &with, i);
        if (i == 0 && of_frames) x = add_frames(n, x, lg_slice(in->positions, 0, S, of_frames));
        with.along_time = true;
        x = block(n, c, x, &with, i);
    }
    lg_net_unit(n, "out");
    lg_tensor y = lg_net_norm(n, x, lg_adaln_of_output(n, c, e), FIXED_EPS);
    y = lg_net_linear(n, y, (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out");
    lg_net_unpatchify(n, lg_adaln_rows(y, n->batch), c->patch, out);
}

/* ---- its file ---- */

static double scale(int sample_size)
{
    return LG_MAX(sample_size / 64, 1);
}

static int check(const struct lg_denoiser_config *c)
{
    if (c->size_conditions)
        return LG_FAIL(LG_ERR_CONFIG, "model: Latte has no conditions of a picture's size");
    if (c->interpolation > 0)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "model: interpolation_scale = %g; Latte's follows from sample_size: remove it",
            c->interpolation);
    return 0;
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    int cross;
    const struct lg_denoiser_text_info *has;
    struct lg_denoiser_text *text = &c->text[0];
    c->n_texts = lg_denoiser_texts(LG_LATTE, &has);
    LG_TRY(lg_model_config_int(f, "caption_channels", 1, LG_MODEL_KEY_MAX, -1, &text->width));
    LG_TRY(lg_model_config_int(f, "_text_length", 1, LG_MODEL_KEY_MAX, has->length, &text->length));
    LG_TRY(lg_model_config_int(f, "video_length", 1, LG_MODEL_SIDE_MAX, 16, &c->frames));
    LG_TRY(lg_model_config_int(f, "cross_attention_dim", 1, LG_MODEL_KEY_MAX, -1, &cross));
    if (cross != c->hidden)
        return lg_model_config_refuse(f, "cross_attention_dim",
                                      "must be heads times head dimension");
    return 0;
}

static void save(const struct lg_denoiser_config *c, cJSON *o)
{
    cJSON_AddNumberToObject(o, "caption_channels", c->text[0].width);
    cJSON_AddNumberToObject(o, "cross_attention_dim", c->hidden);
    cJSON_AddNumberToObject(o, "video_length", lg_denoiser_frames(c));
    cJSON_AddNumberToObject(o, "_text_length", c->text[0].length);
}

const struct lg_model lg_latte = {
    .class = "LatteTransformer3DModel",
    .norm_type = "ada_norm_single",
    .sample_size = 64,
    .channels = 4,
    .depth = 1,
    .heads = 16,
    .head_dim = 88,
    .norm_eps = 1e-5,
    .describe = describe,
    .scale = scale,
    .has_frame_table = true,
    .check = check,
    .load = load,
    .save = save,
};
