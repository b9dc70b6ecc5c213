/* DiT: class-conditional diffusion transformer with adaLN-Zero.
 * Peebles & Xie, "Scalable Diffusion Models with Transformers", 2023; names and semantics of
 * diffusers' DiTTransformer2DModel.
 *
 *     c = timestep embedding + label embedding                        (B, D)
 *     x = patches(x_t) + positions                                    (B, T, D)
 *     per block: mod = linear(silu(c))                                (B, 6 D)
 *                x += gate1 attention(modulate(norm(x), shift1, scale1))
 *                x += gate2 mlp(modulate(norm(x), shift2, scale2))
 *     out = unpatchify(proj_out_2(modulate(norm(x), proj_out_1(silu(c)))))
 *
 * diffusers gives every block an embedder of its own, but the published models have equal ones (the
 * paper's net has one), and the output layer uses block 0's. Here there is one, under block 0's
 * name; denoiser_file.c writes it under every block's name and refuses unequal ones.
 *
 * All blocks read the same c, so their adaLN linears are one product, made before the first block: mod (B, depth 6 D) is block
 * i's from column i 6 D on. Of a net with more than LG_DIT_MODULATION_WEIGHTS of them each block has a product of its own, just
 * before it: else ranks that share the state would hold a third of all weights, and their gradient, at once.
 *
 * Initial values, as in the paper's code: Xavier uniform for linears (q, k, v as one matrix) and
 * patches, normal with 0.02 for the label table and the timestep MLP, zero for all biases, for the
 * adaLN linears (each block starts as the identity) and for both output linears. */
#include "stages/nets/models.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EMBEDDER "transformer_blocks.0.norm1.emb"

static const double FIXED_EPS =
    1e-6; /* AdaLayerNormZero's and the output norm's, whatever norm_eps is */

/* Blocks whose modulations are one product. */
static int blocks_together(const struct lg_denoiser_config *c)
{
    const int64_t most = c->modulation_weights ? c->modulation_weights : LG_DIT_MODULATION_WEIGHTS;
    return 6 * (int64_t)c->depth * c->hidden * c->hidden <= most ? c->depth : 1;
}

/* Of blocks [from, from + count): (B, count 6 D) */
static lg_tensor modulations(lg_net *n, const struct lg_denoiser_config *c, lg_tensor condition,
                             int from, int count)
{
    char(*name)[32] = calloc((size_t)count, sizeof *name);
    const char **names = calloc((size_t)count, sizeof *names);
    LG_ASSERT(name && names);
    for (int i = 0; i < count; i++) {
        snprintf(name[i], sizeof *name, "%d.norm1.linear", from + i);
        names[i] = name[i];
    }
    const struct lg_layer layer = {.out = (int64_t)count * 6 * c->hidden,
                                   .init = LG_NET_ZERO,
                                   .parts = names,
                                   .n_parts = count};
    lg_tensor mod = lg_net_linear(n, condition, layer, "transformer_blocks.");
    free(names);
    free(name);
    return mod;
}

static lg_tensor block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x, lg_tensor mod,
                       int part, int i)
{
    struct lg_modulation first = lg_net_chunks(mod, c->hidden, 6 * part);
    struct lg_modulation second = lg_net_chunks(mod, c->hidden, 6 * part + 3);
    char name[48];
    snprintf(name, sizeof name, "transformer_blocks.%d", i);
    lg_net_block(n, i);
    lg_tensor h = lg_model_self_attention(n, c, lg_net_norm(n, x, first, FIXED_EPS), name);
    x = lg_net_residual(n, x, h, first.gate);
    h = lg_model_feed_forward(n, c, lg_net_norm(n, x, second, c->norm_eps), name);
    return lg_net_residual(n, x, h, second.gate);
}

static void describe(lg_net *n, const struct lg_denoiser_config *c, const struct lg_model_input *in,
                     lg_tensor out)
{
    const int64_t D = c->hidden, P = (int64_t)lg_denoiser_out_channels(c) * c->patch * c->patch;
    lg_net_unit(n, "embed");
    lg_tensor x = lg_net_patches(n, in->x, c->patch, in->positions, "pos_embed.proj");
    lg_tensor t = lg_net_timestep(n, in->t, D, 1.0, EMBEDDER ".timestep_embedder");
    lg_tensor label = lg_net_embedding(n, in->label, c->num_classes + 1, D,
                                       EMBEDDER ".class_embedder.embedding_table.weight");
    lg_tensor condition = lg_net_act(n, lg_net_add(n, t, label), LG_ACT_SILU);
    const int together = blocks_together(c);
    for (int i = 0; i < c->depth; i++) lg_net_unit(n, "block.%d", i); /* they come before these: */
    for (int i = 0; i < c->depth; i += together) lg_net_unit(n, "adaln.%d", i);
    lg_net_unit(n, "adaln.0");
    lg_tensor mod = modulations(n, c, condition, 0, together);
    lg_net_unit(n, "out");
    lg_tensor mod_out = lg_net_linear(
        n, condition, (struct lg_layer){.out = 2 * D, .init = LG_NET_ZERO}, "proj_out_1");
    for (int i = 0; i < c->depth; i++) {
        if (i && i % together == 0) {
            lg_net_unit(n, "adaln.%d", i);
            mod = modulations(n, c, condition, i, together);
        }
        x = block(n, c, x, mod, i % together, i);
    }
    lg_net_unit(n, "out");
    struct lg_modulation m = {.shift = lg_slice(mod_out, 1, 0, D),
                              .scale = lg_slice(mod_out, 1, D, D)};
    lg_tensor y = lg_net_linear(n, lg_net_norm(n, x, m, FIXED_EPS),
                                (struct lg_layer){.out = P, .init = LG_NET_ZERO}, "proj_out_2");
    lg_net_unpatchify(n, y, c->patch, out);
}

/* ---- its file ---- */

static double scale(int sample_size)
{
    (void)sample_size;
    return 1;
}

static int check(const struct lg_denoiser_config *c)
{
    if (c->height != c->width)
        return LG_FAIL(
            LG_ERR_CONFIG,
            "model: a latent of %d x %d, but DiT is defined for squares only; use pixart",
            c->height, c->width);
    if (c->size_conditions)
        return LG_FAIL(LG_ERR_CONFIG, "model: DiT has no conditions of a picture's size");
    if (c->num_classes < 1)
        return LG_FAIL(LG_ERR_CONFIG, "model: num_classes = %d; DiT wants at least one",
                       c->num_classes);
    return 0;
}

static int load(const lg_model_config *f, struct lg_denoiser_config *c)
{
    return lg_model_config_int(f, "num_embeds_ada_norm", 1, LG_MODEL_KEY_MAX, 1000,
                               &c->num_classes);
}

/* "transformer_blocks.0.norm1.emb.X" -> "transformer_blocks.I.norm1.emb.X" */
static bool other_name(const char *name, int i, char ret[LG_PARAM_NAME_BYTES])
{
    if (strncmp(name, EMBEDDER ".", sizeof EMBEDDER)) return false;
    snprintf(ret, LG_PARAM_NAME_BYTES, "transformer_blocks.%d.%s", i,
             name + sizeof "transformer_blocks.0." - 1);
    return true;
}

const struct lg_model lg_dit = {
    .class = "DiTTransformer2DModel",
    .norm_type = "ada_norm_zero",
    .sample_size = 32,
    .channels = 4,
    .depth = 28,
    .heads = 16,
    .head_dim = 72,
    .norm_eps = 1e-5,
    .describe = describe,
    .scale = scale,
    .check = check,
    .load = load,
    .other_name = other_name,
};
