/* PixArt: text-conditional diffusion transformer with adaLN-single, forward and backward.
 * Chen et al., "PixArt-alpha", 2023; names and semantics of diffusers' PixArtTransformer2DModel
 * with use_additional_conditions = false.
 *
 *     e = timestep embedding, t6 = linear(silu(e))                    (B, D), (B, 6 D)
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
 * cross-attention's output linear and for the last projection.
 *
 * Invariant: with train, the inputs of every sublayer stay untouched until its backward. */
#include "stages/nets/pixart.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* out = x + W attention(q of x; k, v of the text). */
struct cross {
    struct lg_tf_linear q, kv, out;
    lg_tensor q_act;  // (B, T, D)
    lg_tensor kv_act; // (B, L, 2 D)
    lg_tensor o;      // (B, T, D)
    lg_tensor lse;    // (B, H, T)
    lg_tensor proj;   // (B, T, D): only inside the forward
};

struct block {
    size_t table; // (6, D)
    struct lg_tf_attention attn;
    struct cross cross;
    struct lg_tf_mlp mlp;
    lg_tensor mod;         // (B, 6 D)
    lg_tensor x, mid, mix; // (B, T, D): input; after self-, after cross-attention
};

struct lg_pixart {
    struct lg_tf_dims n;
    int depth;
    bool train;
    struct lg_tf_patches patches;
    struct lg_tf_timestep time;
    struct lg_tf_linear ada; // (6 D, D)
    struct lg_tf_linear caption1, caption2;
    struct block *block;
    size_t table_out; // (2, D)
    struct lg_tf_final final;
    lg_tensor silu, t6;                 // (B, D), (B, 6 D)
    lg_tensor caption_pre, caption_act; // (B, L, D)
    lg_tensor text;                     // (B, L, D)
    lg_tensor mod_out;                  // (2, B, D): shift rows, then scale rows
    lg_tensor x_out;                    // (B, T, D)
    struct lg_tf_tmp tmp;               /* from here on: backward */
    lg_tensor dmod[2], dt6;             // (B, 6 D): of even and odd blocks; their sum
    lg_tensor dmod_out;                 // (2, B, D)
    lg_tensor de, dsilu;                // (B, D)
    lg_tensor dkv;                      // (B, L, 2 D)
    lg_tensor dtext, dcaption;          // (B, L, D)
};

/* ---- parameters ---- */

static void add_block(struct block *b, lg_params *t, const struct lg_denoiser_config *c, int i)
{
    static const char *const kv[] = {".to_k", ".to_v"};
    char name[64];
    int64_t D = c->hidden;
    struct lg_tf_init table = {LG_INIT_NORMAL, 1.0 / sqrt((double)D)};
    b->table = lg_tf_add_array(t, table, 6, D, "transformer_blocks.%d.scale_shift_table", i);
    snprintf(name, sizeof name, "transformer_blocks.%d.attn1", i);
    lg_tf_attention_params(&b->attn, t, D, name);
    snprintf(name, sizeof name, "transformer_blocks.%d.attn2", i);
    b->cross.q = lg_tf_add_linear(t, lg_tf_xavier(D, D), D, D, "%s.to_q", name);
    b->cross.kv = lg_tf_add_packed(t, lg_tf_xavier(2 * D, D), D, D, name, kv, 2);
    b->cross.out = lg_tf_add_linear(t, LG_TF_ZERO, D, D, "%s.to_out.0", name);
    snprintf(name, sizeof name, "transformer_blocks.%d.ff", i);
    lg_tf_mlp_params(&b->mlp, t, D, c->mlp_ratio * D, name);
    b->attn.eps = b->mlp.eps = c->norm_eps;
}

static void add_params(struct lg_pixart *net, const struct lg_denoiser_config *c, lg_params *t)
{
    int64_t D = c->hidden;
    lg_tf_patches_params(&net->patches, t, c);
    lg_tf_timestep_params(&net->time, t, D, "adaln_single.emb.timestep_embedder");
    net->ada = lg_tf_add_linear(t, LG_TF_NORMAL, 6 * D, D, "adaln_single.linear");
    net->caption1 =
        lg_tf_add_linear(t, LG_TF_NORMAL, D, c->text_dim, "caption_projection.linear_1");
    net->caption2 = lg_tf_add_linear(t, LG_TF_NORMAL, D, D, "caption_projection.linear_2");
    for (int i = 0; i < c->depth; i++) add_block(&net->block[i], t, c, i);
    struct lg_tf_init table = {LG_INIT_NORMAL, 1.0 / sqrt((double)D)};
    net->table_out = lg_tf_add_array(t, table, 2, D, "scale_shift_table");
    lg_tf_final_params(&net->final, t, c, "proj_out");
}

struct lg_pixart *lg_pixart_new(const struct lg_denoiser_config *c, int batch, bool train)
{
    struct lg_pixart *net = calloc(1, sizeof *net);
    LG_ASSERT(net);
    net->block = calloc((size_t)c->depth, sizeof *net->block);
    LG_ASSERT(net->block);
    net->n = lg_tf_dims_of(c, batch);
    net->depth = c->depth;
    net->train = train;
    net->time.freq_shift = 0.0;
    lg_params t = {0};
    add_params(net, c, &t);
    lg_params_free(&t);
    return net;
}

void lg_pixart_free(struct lg_pixart **net)
{
    if (!*net) return;
    free((*net)->block);
    free(*net);
    *net = NULL;
}

void lg_pixart_params(const struct lg_denoiser_config *c, lg_params *t)
{
    struct block *blocks = calloc((size_t)c->depth, sizeof *blocks);
    LG_ASSERT(blocks);
    struct lg_pixart net = {.block = blocks};
    add_params(&net, c, t);
    free(blocks);
}

/* ---- activations ---- */

static void block_layout(struct block *b, struct lg_tf_arena *a, const struct lg_tf_dims *n)
{
    b->x = lg_tf_take3(a, n->B, n->T, n->D);
    lg_tf_attention_layout(&b->attn, a, n);
    b->mid = a->train ? lg_tf_take3(a, n->B, n->T, n->D) : b->x;
    b->cross.q_act = lg_tf_take3(a, n->B, n->T, n->D);
    b->cross.kv_act = lg_tf_take3(a, n->B, n->L, 2 * n->D);
    b->cross.o = lg_tf_take3(a, n->B, n->T, n->D);
    if (a->train) {
        b->cross.lse = lg_tf_take_stat(a, n->B, n->H * n->T);
        b->cross.lse = lg_t3(b->cross.lse.data, b->cross.lse.dtype, n->B, n->H, n->T);
    }
    b->mix = a->train ? lg_tf_take3(a, n->B, n->T, n->D) : b->x;
    lg_tf_mlp_layout(&b->mlp, a, n);
    /* The feed-forward's projection is written after the cross-attention's has been used. */
    b->cross.proj = b->mlp.proj;
}

/* In inference all blocks use the first one's memory (their parameters and modulation stay their own). */
static void share_block(struct block *b, const struct block *first)
{
    struct block own = *b;
    *b = *first;
    b->table = own.table, b->mod = own.mod;
    b->attn.qkv = own.attn.qkv, b->attn.out = own.attn.out;
    b->cross.q = own.cross.q, b->cross.kv = own.cross.kv, b->cross.out = own.cross.out;
    b->mlp.up = own.mlp.up, b->mlp.down = own.mlp.down;
}

void lg_pixart_layout(struct lg_pixart *net, struct lg_tf_arena *a)
{
    const struct lg_tf_dims *n = &net->n;
    lg_tf_patches_layout(&net->patches, a, n);
    lg_tf_timestep_layout(&net->time, a, n);
    net->silu = lg_tf_take2(a, n->B, n->D);
    net->t6 = lg_tf_take2(a, n->B, 6 * n->D);
    if (net->train) net->caption_pre = lg_tf_take3(a, n->B, n->L, n->D);
    net->caption_act = lg_tf_take3(a, n->B, n->L, n->D);
    net->text = lg_tf_take3(a, n->B, n->L, n->D);
    net->mod_out = lg_tf_take3(a, 2, n->B, n->D);
    for (int i = 0; i < net->depth; i++) {
        net->block[i].mod = lg_tf_take2(a, n->B, 6 * n->D);
        if (i == 0 || net->train)
            block_layout(&net->block[i], a, n);
        else
            share_block(&net->block[i], &net->block[0]);
    }
    net->x_out = net->train ? lg_tf_take3(a, n->B, n->T, n->D) : net->block[0].x;
    lg_tf_final_layout(&net->final, a, n);
    if (!net->train) return;
    lg_tf_tmp_layout(&net->tmp, a, n);
    for (int i = 0; i < 2; i++) net->dmod[i] = lg_tf_take2(a, n->B, 6 * n->D);
    net->dt6 = lg_tf_take2(a, n->B, 6 * n->D);
    net->dmod_out = lg_tf_take3(a, 2, n->B, n->D);
    net->de = lg_tf_take2(a, n->B, n->D);
    net->dsilu = lg_tf_take2(a, n->B, n->D);
    net->dkv = lg_tf_take3(a, n->B, n->L, 2 * n->D);
    net->dtext = lg_tf_take3(a, n->B, n->L, n->D);
    net->dcaption = lg_tf_take3(a, n->B, n->L, n->D);
}

lg_tensor lg_pixart_positions(const struct lg_pixart *net)
{
    return net->patches.pos;
}

/* Output of block i: the next block's input. */
static lg_tensor block_out(const struct lg_pixart *net, int i)
{
    return i + 1 < net->depth ? net->block[i + 1].x : net->x_out;
}

/* Half i of a (2, B, D) buffer. */
static lg_tensor half_of(lg_tensor t, int i)
{
    int64_t B = t.dim[1], D = t.dim[2];
    return lg_t2((char *)t.data + (size_t)(i * B * D) * lg_dtype_bytes(t.dtype), t.dtype, B, D);
}

static struct lg_tf_mod out_mod(lg_tensor buffer)
{
    return (struct lg_tf_mod){
        .shift = half_of(buffer, 0), .scale = half_of(buffer, 1), .stride = buffer.dim[2]};
}

/* ---- cross-attention ---- */

/* Head slice: token stride `width`, starting at column `from`. */
static lg_tensor head_view(lg_tensor t, const struct lg_tf_dims *n, int64_t from)
{
    char *data = (char *)t.data + (size_t)from * lg_dtype_bytes(t.dtype);
    return lg_t4(data, t.dtype, t.dim[0], t.dim[1], n->H, n->d);
}

static void cross_forward(const struct cross *h, const struct lg_tf_pass *p,
                          const struct lg_tf_dims *n, lg_tensor text, lg_tensor text_length,
                          const struct lg_tf_path *path)
{
    lg_tf_linear_forward(p, h->q, path->x, h->q_act, LG_NONE, LG_ACT_NONE);
    lg_tf_linear_forward(p, h->kv, text, h->kv_act, LG_NONE, LG_ACT_NONE);
    lg_attention_forward(p->s,
                         &(struct lg_attention_forward_args){.q = head_view(h->q_act, n, 0),
                                                             .k = head_view(h->kv_act, n, 0),
                                                             .v = head_view(h->kv_act, n, n->D),
                                                             .q_stride = n->D,
                                                             .kv_stride = 2 * n->D,
                                                             .k_length = text_length,
                                                             .o = head_view(h->o, n, 0),
                                                             .lse = h->lse,
                                                             .scale = 1.0 / sqrt((double)n->d)});
    lg_tf_linear_forward(p, h->out, h->o, h->proj, LG_NONE, LG_ACT_NONE);
    lg_tf_residual_forward(p, path, (struct lg_tf_mod){0}, h->proj);
}

/* net->dtext (+)= the text's part, overwritten at the first (last block's) call. */
static void cross_backward(const struct lg_pixart *net, const struct cross *h,
                           const struct lg_tf_pass *p, lg_tensor x, lg_tensor text_length,
                           bool accumulate_text)
{
    const struct lg_tf_dims *n = &net->n;
    const struct lg_tf_tmp *tmp = &net->tmp;
    lg_tf_linear_backward(p, h->out, h->o, tmp->dx, tmp->dn, false); /* dn: gradient of o */
    lg_attention_backward(p->s,
                          &(struct lg_attention_backward_args){.dout = head_view(tmp->dn, n, 0),
                                                               .o = head_view(h->o, n, 0),
                                                               .q = head_view(h->q_act, n, 0),
                                                               .k = head_view(h->kv_act, n, 0),
                                                               .v = head_view(h->kv_act, n, n->D),
                                                               .q_stride = n->D,
                                                               .kv_stride = 2 * n->D,
                                                               .k_length = text_length,
                                                               .lse = h->lse,
                                                               .dq = head_view(tmp->dy, n, 0),
                                                               .dk = head_view(net->dkv, n, 0),
                                                               .dv = head_view(net->dkv, n, n->D),
                                                               .dq_stride = n->D,
                                                               .dkv_stride = 2 * n->D,
                                                               .scale = 1.0 / sqrt((double)n->d)});
    lg_tf_linear_backward(p, h->q, x, tmp->dy, tmp->dx, true);
    lg_tf_linear_backward(p, h->kv, net->text, net->dkv, net->dtext, accumulate_text);
}

/* ---- the whole ---- */

static void condition_forward(struct lg_pixart *net, const struct lg_tf_pass *p,
                              const struct lg_denoiser_input *in)
{
    const struct lg_tf_dims *n = &net->n;
    lg_tf_timestep_forward(&net->time, p, in->t);
    lg_tensor e = net->time.out;
    lg_act_forward(p->s, &(struct lg_act_forward_args){.x = e, .y = net->silu, .act = LG_ACT_SILU});
    lg_tf_linear_forward(p, net->ada, net->silu, net->t6, LG_NONE, LG_ACT_NONE);
    lg_tf_linear_forward(p, net->caption1, in->text, net->caption_act, net->caption_pre,
                         LG_ACT_GELU_TANH);
    lg_tf_linear_forward(p, net->caption2, net->caption_act, net->text, LG_NONE, LG_ACT_NONE);
    for (int i = 0; i < 2; i++) {
        lg_tensor row = lg_tf_weight(p, net->table_out + (size_t)(i * n->D), 0, n->D);
        lg_add_forward(
            p->s, &(struct lg_add_forward_args){.a = e, .b = row, .y = half_of(net->mod_out, i)});
    }
}

/* The norm that block i begins with; behind the last block the output layer's. */
static struct lg_tf_norm head_norm(const struct lg_pixart *net, int i)
{
    const struct block *b = &net->block[i];
    if (i == net->depth) return lg_tf_final_norm(&net->final, out_mod(net->mod_out));
    return lg_tf_attention_norm(&b->attn, lg_tf_mod_of(b->mod, net->n.D, 0));
}

void lg_pixart_forward(struct lg_pixart *net, const struct lg_tf_pass *p,
                       const struct lg_denoiser_input *in, lg_tensor out)
{
    const struct lg_tf_dims *n = &net->n;
    condition_forward(net, p, in);
    lg_tf_patches_forward(&net->patches, p, n, in->x, net->block[0].x);
    for (int i = 0; i < net->depth; i++) {
        struct block *b = &net->block[i];
        lg_tensor table = lg_tf_weight(p, b->table, 0, 6 * n->D);
        lg_add_forward(p->s, &(struct lg_add_forward_args){.a = net->t6, .b = table, .y = b->mod});
    }
    struct lg_tf_norm norm = head_norm(net, 0);
    lg_tf_norm_forward(p, &norm, net->block[0].x);
    for (int i = 0; i < net->depth; i++) {
        struct block *b = &net->block[i];
        struct lg_tf_mod m[2] = {lg_tf_mod_of(b->mod, n->D, 0), lg_tf_mod_of(b->mod, n->D, 3)};
        lg_tf_attention_forward(&b->attn, p, n, m[0], &(struct lg_tf_path){b->x, b->mid, NULL});
        norm = lg_tf_mlp_norm(&b->mlp, m[1]);
        cross_forward(&b->cross, p, n, net->text, in->text_length,
                      &(struct lg_tf_path){b->mid, b->mix, &norm});
        norm = head_norm(net, i + 1);
        lg_tf_mlp_forward(&b->mlp, p, m[1], &(struct lg_tf_path){b->mix, block_out(net, i), &norm});
    }
    lg_tf_final_forward(&net->final, p, n, out);
}

/* Where the gradient of block i's modulation goes; the last block's starts the sum. */
static lg_tensor dmod_of(const struct lg_pixart *net, int i)
{
    return i == net->depth - 1 ? net->dt6 : net->dmod[i % 2];
}

/* The residual that ends block i, if there is one. */
static const struct lg_tf_residual *end_residual(const struct lg_pixart *net, int i,
                                                 struct lg_tf_residual *r)
{
    if (i < 0) return NULL;
    const struct block *b = &net->block[i];
    *r = lg_tf_mlp_residual(&b->mlp, lg_tf_mod_of(b->mod, net->n.D, 3),
                            lg_tf_mod_of(dmod_of(net, i), net->n.D, 3));
    return r;
}

static void sum_rows(const struct lg_tf_pass *p, lg_tensor x, size_t grad_offset)
{
    lg_sum_rows(p->s, &(struct lg_sum_rows_args){.x = x,
                                                 .y = lg_tf_grad(p, grad_offset, 0, x.dim[1]),
                                                 .accumulate = p->accumulate});
}

/* From dmod_out, dt6 and dtext to the parameters behind them. */
static void condition_backward(struct lg_pixart *net, const struct lg_tf_pass *p,
                               const struct lg_denoiser_input *in)
{
    const struct lg_tf_dims *n = &net->n;
    for (int i = 0; i < 2; i++)
        sum_rows(p, half_of(net->dmod_out, i), net->table_out + (size_t)(i * n->D));
    lg_tf_linear_backward(p, net->ada, net->silu, net->dt6, net->dsilu, false);
    lg_add_forward(p->s, &(struct lg_add_forward_args){.a = half_of(net->dmod_out, 0),
                                                       .b = half_of(net->dmod_out, 1),
                                                       .y = net->de});
    lg_act_backward(p->s, &(struct lg_act_backward_args){.x = net->time.out,
                                                         .dy = net->dsilu,
                                                         .dx = net->de,
                                                         .act = LG_ACT_SILU,
                                                         .accumulate = true});
    lg_tf_timestep_backward(&net->time, p, net->de, net->dsilu);
    lg_tf_linear_backward(p, net->caption2, net->caption_act, net->dtext, net->dcaption, false);
    lg_act_backward(p->s, &(struct lg_act_backward_args){.x = net->caption_pre,
                                                         .dy = net->dcaption,
                                                         .dx = net->dcaption,
                                                         .act = LG_ACT_GELU_TANH});
    lg_tf_linear_backward(p, net->caption1, in->text, net->dcaption, LG_NONE, false);
}

void lg_pixart_backward(struct lg_pixart *net, const struct lg_tf_pass *p,
                        const struct lg_denoiser_input *in, lg_tensor dout)
{
    const struct lg_tf_dims *n = &net->n;
    LG_ASSERT(net->train);
    struct lg_tf_residual before;
    lg_tf_final_backward(&net->final, p, n,
                         &(struct lg_tf_back){out_mod(net->mod_out), out_mod(net->dmod_out),
                                              net->x_out,
                                              end_residual(net, net->depth - 1, &before)},
                         dout, &net->tmp);
    for (int i = net->depth - 1; i >= 0; i--) {
        struct block *b = &net->block[i];
        bool first = i == net->depth - 1;
        lg_tensor dmod = dmod_of(net, i);
        struct lg_tf_mod m[2] = {lg_tf_mod_of(b->mod, n->D, 0), lg_tf_mod_of(b->mod, n->D, 3)};
        struct lg_tf_mod dm[2] = {lg_tf_mod_of(dmod, n->D, 0), lg_tf_mod_of(dmod, n->D, 3)};
        lg_tf_mlp_backward(&b->mlp, p, &(struct lg_tf_back){m[1], dm[1], b->mix, NULL}, &net->tmp);
        cross_backward(net, &b->cross, p, b->mid, in->text_length, !first);
        before = lg_tf_attention_residual(&b->attn, m[0], dm[0]);
        lg_tf_residual_backward(p, &before, &net->tmp);
        lg_tf_attention_backward(
            &b->attn, p, n,
            &(struct lg_tf_back){m[0], dm[0], b->x, end_residual(net, i - 1, &before)}, &net->tmp);
        sum_rows(p, dmod, b->table);
        if (!first)
            lg_add_forward(p->s,
                           &(struct lg_add_forward_args){.a = net->dt6, .b = dmod, .y = net->dt6});
    }
    lg_tf_patches_backward(&net->patches, p, net->tmp.dx);
    condition_backward(net, p, in);
}
