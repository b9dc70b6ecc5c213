/* DiT: class-conditional diffusion transformer with adaLN-Zero, forward and backward.
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
 * Initial values, as in the paper's code: Xavier uniform for linears (q, k, v as one matrix) and
 * patches, normal with 0.02 for the label table and the timestep MLP, zero for all biases, for the
 * adaLN linears (each block starts as the identity) and for both output linears.
 *
 * All blocks read the same c, so their adaLN linears are one product, made before the first block: their
 * weights lie behind each other, mod (B, depth 6 D) is block i's from column i 6 D on. The backward
 * collects dmod likewise and multiplies once, behind the last block.
 *
 * Invariant: with train, block i's input is x[i] and stays untouched until the backward of block i.
 */
#include "stages/nets/dit.h"
#include <stdio.h>
#include <stdlib.h>

struct block {
    struct lg_tf_attention attn;
    struct lg_tf_mlp mlp;
    lg_tensor x, mid; // (B, T, D): input; between the halves. In inference both are one tensor
};

struct lg_dit {
    struct lg_tf_dims n;
    int depth, num_classes;
    bool train;
    struct lg_tf_patches patches;
    struct lg_tf_timestep time;
    size_t labels; // (num_classes + 1, D)
    struct block *block;
    struct lg_tf_linear ada, ada_out; /* of all blocks; of the output layer */
    struct lg_tf_final final;
    lg_tensor label, c, silu;    // (B, D)
    lg_tensor mod;               // (B, depth 6 D)
    lg_tensor mod_out;           // (B, 2 D)
    lg_tensor x_out;             // (B, T, D): output of the last block
    struct lg_tf_tmp tmp;        /* from here on: backward */
    lg_tensor dmod;              // (B, depth 6 D)
    lg_tensor dmod_out;          // (B, 2 D)
    lg_tensor dsilu, dc_scratch; // (B, D)
};

static void add_block(struct block *b, lg_params *t, const struct lg_denoiser_config *c, int i)
{
    char name[64];
    int64_t D = c->hidden;
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1", i);
    lg_tf_attention_params(&b->attn, t, D, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.ff", i);
    lg_tf_mlp_params(&b->mlp, t, D, c->mlp_ratio * D, name);
    b->attn.eps = LG_TF_FIXED_EPS; /* AdaLayerNormZero ignores norm_eps */
    b->mlp.eps = c->norm_eps;
}

/* The adaLN linears of all blocks as one. */
static struct lg_tf_linear add_ada(lg_params *t, const struct lg_denoiser_config *c)
{
    char(*name)[32] = calloc((size_t)c->depth, sizeof *name);
    const char **names = calloc((size_t)c->depth, sizeof *names);
    LG_ASSERT(name && names);
    for (int i = 0; i < c->depth; i++) {
        snprintf(name[i], sizeof *name, "%d.norm1.linear", i);
        names[i] = name[i];
    }
    struct lg_tf_linear l = lg_tf_add_packed(t, LG_TF_ZERO, 6 * c->hidden, c->hidden,
                                             "transformer_blocks.", names, c->depth);
    free(names);
    free(name);
    return l;
}

static void add_params(struct lg_dit *net, const struct lg_denoiser_config *c, lg_params *t)
{
    static const char emb[] = "transformer_blocks.0.norm1.emb";
    char name[64];
    int64_t D = c->hidden;
    lg_tf_patches_params(&net->patches, t, c);
    snprintf(name, sizeof name, "%s.timestep_embedder", emb);
    lg_tf_timestep_params(&net->time, t, D, name);
    net->labels = lg_tf_add_array(t, LG_TF_NORMAL, c->num_classes + 1, D,
                                  "%s.class_embedder.embedding_table.weight", emb);
    for (int i = 0; i < c->depth; i++) add_block(&net->block[i], t, c, i);
    net->ada = add_ada(t, c);
    net->ada_out = lg_tf_add_linear(t, LG_TF_ZERO, 2 * D, D, "proj_out_1");
    lg_tf_final_params(&net->final, t, c, "proj_out_2");
}

struct lg_dit *lg_dit_new(const struct lg_denoiser_config *c, int batch, bool train)
{
    struct lg_dit *net = calloc(1, sizeof *net);
    LG_ASSERT(net);
    net->block = calloc((size_t)c->depth, sizeof *net->block);
    LG_ASSERT(net->block);
    net->n = lg_tf_dims_of(c, batch);
    net->depth = c->depth;
    net->num_classes = c->num_classes;
    net->train = train;
    net->time.freq_shift = 1.0;
    lg_params t = {0};
    add_params(net, c, &t);
    lg_params_free(&t);
    return net;
}

void lg_dit_free(struct lg_dit **net)
{
    if (!*net) return;
    free((*net)->block);
    free(*net);
    *net = NULL;
}

void lg_dit_params(const struct lg_denoiser_config *c, lg_params *t)
{
    struct block *blocks = calloc((size_t)c->depth, sizeof *blocks);
    LG_ASSERT(blocks);
    struct lg_dit net = {.block = blocks};
    add_params(&net, c, t);
    free(blocks);
}

static void block_layout(struct block *b, struct lg_tf_arena *a, const struct lg_tf_dims *n)
{
    b->x = lg_tf_take3(a, n->B, n->T, n->D);
    lg_tf_attention_layout(&b->attn, a, n);
    b->mid = a->train ? lg_tf_take3(a, n->B, n->T, n->D) : b->x;
    lg_tf_mlp_layout(&b->mlp, a, n);
}

/* In inference all blocks use the first one's memory; their parameters stay their own. */
static void share_block(struct block *b, const struct block *first)
{
    struct block own = *b;
    *b = *first;
    b->attn.qkv = own.attn.qkv, b->attn.out = own.attn.out;
    b->mlp.up = own.mlp.up, b->mlp.down = own.mlp.down;
}

void lg_dit_layout(struct lg_dit *net, struct lg_tf_arena *a)
{
    const struct lg_tf_dims *n = &net->n;
    lg_tf_patches_layout(&net->patches, a, n);
    lg_tf_timestep_layout(&net->time, a, n);
    net->label = lg_tf_take2(a, n->B, n->D);
    net->c = lg_tf_take2(a, n->B, n->D);
    net->silu = lg_tf_take2(a, n->B, n->D);
    net->mod_out = lg_tf_take2(a, n->B, 2 * n->D);
    net->mod = lg_tf_take2(a, n->B, net->depth * 6 * n->D);
    for (int i = 0; i < net->depth; i++) {
        if (i == 0 || net->train)
            block_layout(&net->block[i], a, n);
        else
            share_block(&net->block[i], &net->block[0]);
    }
    net->x_out = net->train ? lg_tf_take3(a, n->B, n->T, n->D) : net->block[0].x;
    lg_tf_final_layout(&net->final, a, n);
    if (!net->train) return;
    lg_tf_tmp_layout(&net->tmp, a, n);
    net->dmod = lg_tf_take2(a, n->B, net->depth * 6 * n->D);
    net->dmod_out = lg_tf_take2(a, n->B, 2 * n->D);
    net->dsilu = lg_tf_take2(a, n->B, n->D);
    net->dc_scratch = lg_tf_take2(a, n->B, n->D);
}

lg_tensor lg_dit_positions(const struct lg_dit *net)
{
    return net->patches.pos;
}

/* Output of block i: the next block's input. */
static lg_tensor block_out(const struct lg_dit *net, int i)
{
    return i + 1 < net->depth ? net->block[i + 1].x : net->x_out;
}

/* The output layer's shift and scale; it has no gate. */
static struct lg_tf_mod out_mod(lg_tensor buffer, int64_t D)
{
    return (struct lg_tf_mod){
        .shift = lg_t2(buffer.data, buffer.dtype, buffer.dim[0], D),
        .scale = lg_t2((char *)buffer.data + (size_t)D * lg_dtype_bytes(buffer.dtype), buffer.dtype,
                       buffer.dim[0], D),
        .stride = 2 * D};
}

/* The modulation of a half of block i, 0 or 1, in mod or dmod. */
static struct lg_tf_mod half_mod(const struct lg_dit *net, lg_tensor buffer, int i, int half)
{
    return lg_tf_mod_of(buffer, net->n.D, 6 * i + 3 * half);
}

/* The norm that block i begins with; behind the last block the output layer's. */
static struct lg_tf_norm head_norm(const struct lg_dit *net, int i)
{
    const struct block *b = &net->block[i];
    if (i == net->depth) return lg_tf_final_norm(&net->final, out_mod(net->mod_out, net->n.D));
    return lg_tf_attention_norm(&b->attn, half_mod(net, net->mod, i, 0));
}

void lg_dit_forward(struct lg_dit *net, const struct lg_tf_pass *p,
                    const struct lg_denoiser_input *in, lg_tensor out)
{
    const struct lg_tf_dims *n = &net->n;
    lg_tensor table = lg_tf_weight(p, net->labels, net->num_classes + 1, n->D);
    lg_tf_timestep_forward(&net->time, p, in->t);
    lg_embedding_forward(p->s, &(struct lg_embedding_forward_args){
                                   .ids = in->label, .table = table, .y = net->label});
    lg_add_forward(p->s,
                   &(struct lg_add_forward_args){.a = net->time.out, .b = net->label, .y = net->c});
    lg_act_forward(p->s,
                   &(struct lg_act_forward_args){.x = net->c, .y = net->silu, .act = LG_ACT_SILU});
    lg_tf_linear_forward(p, net->ada, net->silu, net->mod, LG_NONE, LG_ACT_NONE);
    lg_tf_linear_forward(p, net->ada_out, net->silu, net->mod_out, LG_NONE, LG_ACT_NONE);
    lg_tf_patches_forward(&net->patches, p, n, in->x, net->block[0].x);
    struct lg_tf_norm norm = head_norm(net, 0);
    lg_tf_norm_forward(p, &norm, net->block[0].x);
    for (int i = 0; i < net->depth; i++) {
        struct block *b = &net->block[i];
        struct lg_tf_mod m[2] = {half_mod(net, net->mod, i, 0), half_mod(net, net->mod, i, 1)};
        norm = lg_tf_mlp_norm(&b->mlp, m[1]);
        lg_tf_attention_forward(&b->attn, p, n, m[0], &(struct lg_tf_path){b->x, b->mid, &norm});
        norm = head_norm(net, i + 1);
        lg_tf_mlp_forward(&b->mlp, p, m[1], &(struct lg_tf_path){b->mid, block_out(net, i), &norm});
    }
    lg_tf_final_forward(&net->final, p, n, out);
}

/* The residual that ends block i, if there is one. */
static const struct lg_tf_residual *end_residual(const struct lg_dit *net, int i,
                                                 struct lg_tf_residual *r)
{
    if (i < 0) return NULL;
    const struct block *b = &net->block[i];
    *r = lg_tf_mlp_residual(&b->mlp, half_mod(net, net->mod, i, 1), half_mod(net, net->dmod, i, 1));
    return r;
}

void lg_dit_backward(struct lg_dit *net, const struct lg_tf_pass *p,
                     const struct lg_denoiser_input *in, lg_tensor dout)
{
    const struct lg_tf_dims *n = &net->n;
    LG_ASSERT(net->train);
    struct lg_tf_residual before;
    lg_tf_final_backward(&net->final, p, n,
                         &(struct lg_tf_back){out_mod(net->mod_out, n->D),
                                              out_mod(net->dmod_out, n->D), net->x_out,
                                              end_residual(net, net->depth - 1, &before)},
                         dout, &net->tmp);
    lg_tf_linear_backward(p, net->ada_out, net->silu, net->dmod_out, net->dsilu, false);
    for (int i = net->depth - 1; i >= 0; i--) {
        struct block *b = &net->block[i];
        struct lg_tf_mod m[2] = {half_mod(net, net->mod, i, 0), half_mod(net, net->mod, i, 1)};
        struct lg_tf_mod dm[2] = {half_mod(net, net->dmod, i, 0), half_mod(net, net->dmod, i, 1)};
        before = lg_tf_attention_residual(&b->attn, m[0], dm[0]);
        lg_tf_mlp_backward(&b->mlp, p, &(struct lg_tf_back){m[1], dm[1], b->mid, &before},
                           &net->tmp);
        lg_tf_attention_backward(
            &b->attn, p, n,
            &(struct lg_tf_back){m[0], dm[0], b->x, end_residual(net, i - 1, &before)}, &net->tmp);
    }
    lg_tf_linear_backward(p, net->ada, net->silu, net->dmod, net->dsilu, true);
    lg_tf_patches_backward(&net->patches, p, net->tmp.dx);
    lg_tensor dc = net->dsilu;
    lg_act_backward(p->s, &(struct lg_act_backward_args){
                              .x = net->c, .dy = net->dsilu, .dx = dc, .act = LG_ACT_SILU});
    lg_embedding_backward(p->s,
                          &(struct lg_embedding_backward_args){
                              .ids = in->label,
                              .dy = dc,
                              .dtable = lg_tf_grad(p, net->labels, net->num_classes + 1, n->D),
                              .accumulate = p->accumulate});
    lg_tf_timestep_backward(&net->time, p, dc, net->dc_scratch);
}
