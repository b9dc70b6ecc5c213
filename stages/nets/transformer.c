/* What is shared by the diffusion transformers.
 *
 * Design: a sublayer is a struct of where its parameters lie and where its activations lie, both filled
 * once; forward and backward stand next to each other and mirror each other line by line. Residual
 * streams: in training every sublayer has an input and an output tensor of its own, since the backward
 * reads the inputs; in inference they may be one tensor.
 *
 * Biases of all linears start at zero. Weights start as in the papers' code: Xavier uniform, with
 * q, k, v (and k, v of the cross-attention) counted as one matrix, because there they are one. */
#include "stages/nets/transformer.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct lg_tf_dims lg_tf_dims_of(const struct lg_denoiser_config *c, int batch)
{
    return (struct lg_tf_dims){
        .B = batch,
        .T = (int64_t)(c->height / c->patch) * (c->width / c->patch),
        .D = c->hidden,
        .H = c->heads,
        .d = c->hidden / c->heads,
        .F = (int64_t)c->mlp_ratio * c->hidden,
        .P = (int64_t)c->channels * c->patch * c->patch,
        .L = c->text_length,
        .E = c->text_dim,
        .patch = c->patch,
    };
}

/* ---- parameter rows ---- */

struct lg_tf_init lg_tf_xavier(int64_t n, int64_t k)
{
    return (struct lg_tf_init){LG_INIT_UNIFORM, sqrt(6.0 / (double)(n + k))};
}

static struct lg_param row(struct lg_tf_init init, int64_t n, int64_t k, const char *name,
                           const char *tail)
{
    struct lg_param p = {.rank = k ? 2 : 1, .dim = {n, k}, .init = init.kind};
    p.init_scale = init.scale;
    int len = snprintf(p.name, sizeof p.name, "%s%s", name, tail);
    LG_ASSERT(len > 0 && (size_t)len < sizeof p.name);
    return p;
}

struct lg_tf_linear lg_tf_add_linear(lg_params *t, struct lg_tf_init init, int64_t n, int64_t k,
                                     const char *name_fmt, ...)
{
    char name[LG_PARAM_NAME_BYTES];
    va_list ap;
    va_start(ap, name_fmt);
    vsnprintf(name, sizeof name, name_fmt, ap);
    va_end(ap);
    const char *const none[] = {""};
    return lg_tf_add_packed(t, init, n, k, name, none, 1);
}

struct lg_tf_linear lg_tf_add_packed(lg_params *t, struct lg_tf_init init, int64_t n, int64_t k,
                                     const char *prefix, const char *const *names, int count)
{
    struct lg_tf_linear l = {.n = n * count, .k = k};
    for (int bias = 0; bias < 2; bias++) {
        for (int i = 0; i < count; i++) {
            char name[LG_PARAM_NAME_BYTES];
            snprintf(name, sizeof name, "%s%s", prefix, names[i]);
            struct lg_param p =
                bias ? row(LG_TF_ZERO, n, 0, name, ".bias") : row(init, n, k, name, ".weight");
            int at = i ? lg_params_add_packed(t, &p) : lg_params_add(t, &p);
            if (i == 0) *(bias ? &l.b : &l.w) = t->p[at].offset;
        }
    }
    return l;
}

size_t lg_tf_add_array(lg_params *t, struct lg_tf_init init, int64_t rows, int64_t columns,
                       const char *name_fmt, ...)
{
    char name[LG_PARAM_NAME_BYTES];
    va_list ap;
    va_start(ap, name_fmt);
    vsnprintf(name, sizeof name, name_fmt, ap);
    va_end(ap);
    struct lg_param p = row(init, rows, columns, name, "");
    int at = lg_params_add(t, &p);
    return t->p[at].offset;
}

/* ---- arena and pass ---- */

static lg_tensor take(struct lg_tf_arena *a, lg_tensor t)
{
    t.data = a->base + a->used;
    a->used += (lg_tensor_bytes(&t) + 63) / 64 * 64;
    return t;
}

lg_tensor lg_tf_take2(struct lg_tf_arena *a, int64_t m, int64_t n)
{
    return take(a, lg_t2(NULL, a->type, m, n));
}

lg_tensor lg_tf_take3(struct lg_tf_arena *a, int64_t b, int64_t t, int64_t n)
{
    return take(a, lg_t3(NULL, a->type, b, t, n));
}

lg_tensor lg_tf_take_stat(struct lg_tf_arena *a, int64_t m, int64_t n)
{
    return take(a, lg_t2(NULL, a->stat_type, m, n));
}

static lg_tensor param_view(char *flat, lg_dtype type, size_t offset, int64_t rows, int64_t columns)
{
    char *data = flat + offset * lg_dtype_bytes(type);
    return rows ? lg_t2(data, type, rows, columns) : lg_t1(data, type, columns);
}

lg_tensor lg_tf_weight(const struct lg_tf_pass *p, size_t offset, int64_t rows, int64_t columns)
{
    return param_view((char *)p->w, p->type, offset, rows, columns);
}

lg_tensor lg_tf_grad(const struct lg_tf_pass *p, size_t offset, int64_t rows, int64_t columns)
{
    LG_ASSERT(p->g);
    return param_view(p->g, lg_denoiser_grad_type(lg_stream_device(p->s)), offset, rows, columns);
}

lg_tensor lg_tf_rows(lg_tensor t)
{
    int64_t n = t.dim[t.rank - 1];
    return lg_t2(t.data, t.dtype, lg_numel(&t) / n, n);
}

void lg_tf_linear_forward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor x,
                          lg_tensor y, lg_tensor pre, lg_act act)
{
    lg_linear_forward(p->s,
                      &(struct lg_linear_forward_args){.x = lg_tf_rows(x),
                                                       .w = lg_tf_weight(p, l.w, l.n, l.k),
                                                       .bias = lg_tf_weight(p, l.b, 0, l.n),
                                                       .y = lg_tf_rows(y),
                                                       .pre = pre.data ? lg_tf_rows(pre) : LG_NONE,
                                                       .act = act});
}

static void weight_backward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor x,
                            lg_tensor dy, lg_tensor dbias)
{
    lg_linear_backward_weight(
        p->s, &(struct lg_linear_backward_weight_args){.dy = lg_tf_rows(dy),
                                                       .x = lg_tf_rows(x),
                                                       .dw = lg_tf_grad(p, l.w, l.n, l.k),
                                                       .dbias = dbias,
                                                       .accumulate = p->accumulate});
}

static lg_tensor bias_gradient(const struct lg_tf_pass *p, struct lg_tf_linear l)
{
    return lg_tf_grad(p, l.b, 0, l.n);
}

static void data_backward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor dy,
                          lg_tensor dx, bool accumulate)
{
    lg_linear_backward_data(
        p->s, &(struct lg_linear_backward_data_args){.dy = lg_tf_rows(dy),
                                                     .w = lg_tf_weight(p, l.w, l.n, l.k),
                                                     .dx = lg_tf_rows(dx),
                                                     .accumulate = accumulate});
}

void lg_tf_linear_backward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor x,
                           lg_tensor dy, lg_tensor dx, bool accumulate_dx)
{
    weight_backward(p, l, x, dy, bias_gradient(p, l));
    if (dx.data) data_backward(p, l, dy, dx, accumulate_dx);
}

static lg_tensor chunk(lg_tensor buffer, int64_t D, int i)
{
    char *data = (char *)buffer.data + (size_t)(i * D) * lg_dtype_bytes(buffer.dtype);
    return lg_t2(data, buffer.dtype, buffer.dim[0], D);
}

struct lg_tf_mod lg_tf_mod_of(lg_tensor buffer, int64_t D, int first_chunk)
{
    return (struct lg_tf_mod){.shift = chunk(buffer, D, first_chunk),
                              .scale = chunk(buffer, D, first_chunk + 1),
                              .gate = chunk(buffer, D, first_chunk + 2),
                              .stride = buffer.dim[1]};
}

void lg_tf_tmp_layout(struct lg_tf_tmp *t, struct lg_tf_arena *a, const struct lg_tf_dims *n)
{
    t->dx = lg_tf_take3(a, n->B, n->T, n->D);
    t->dy = lg_tf_take3(a, n->B, n->T, n->D);
    t->dn = lg_tf_take3(a, n->B, n->T, n->D);
    t->wide = lg_tf_take3(a, n->B, n->T, LG_MAX(n->F, 3 * n->D));
}

/* ---- between the layers ---- */

static struct lg_norm_modulate_forward_args norm_args(const struct lg_tf_norm *n, lg_tensor x)
{
    return (struct lg_norm_modulate_forward_args){.x = x,
                                                  .shift = n->m.shift,
                                                  .scale = n->m.scale,
                                                  .mod_stride = n->m.stride,
                                                  .y = n->y,
                                                  .mean = n->mean,
                                                  .rstd = n->rstd,
                                                  .eps = n->eps};
}

void lg_tf_norm_forward(const struct lg_tf_pass *p, const struct lg_tf_norm *n, lg_tensor x)
{
    struct lg_norm_modulate_forward_args a = norm_args(n, x);
    lg_norm_modulate_forward(p->s, &a);
}

void lg_tf_residual_forward(const struct lg_tf_pass *p, const struct lg_tf_path *path,
                            struct lg_tf_mod m, lg_tensor y)
{
    struct lg_residual_norm_forward_args a = {
        .residual = {
            .x = path->x, .y = y, .gate = m.gate, .mod_stride = m.stride, .out = path->out}};
    if (!path->next) {
        lg_gate_residual_forward(p->s, &a.residual);
        return;
    }
    a.norm = norm_args(path->next, path->out);
    lg_residual_norm_forward(p->s, &a);
}

static struct lg_gate_residual_backward_args residual_args(const struct lg_tf_pass *p,
                                                           const struct lg_tf_residual *r,
                                                           const struct lg_tf_tmp *tmp)
{
    return (struct lg_gate_residual_backward_args){.dout = tmp->dx,
                                                   .y = r->y,
                                                   .gate = r->m.gate,
                                                   .dy = tmp->dn,
                                                   .dgate = r->dm.gate,
                                                   .mod_stride = r->m.stride,
                                                   .dbias = bias_gradient(p, r->l),
                                                   .accumulate_dbias = p->accumulate};
}

void lg_tf_residual_backward(const struct lg_tf_pass *p, const struct lg_tf_residual *r,
                             const struct lg_tf_tmp *tmp)
{
    LG_ASSERT(r->m.stride == r->dm.stride);
    struct lg_gate_residual_backward_args a = residual_args(p, r, tmp);
    lg_gate_residual_backward(p->s, &a);
}

/* From tmp->dy, the gradient of n->y: tmp->dx (+)= that of x; then the residual before it, if any. */
struct norm_back {
    const struct lg_tf_norm *n;
    struct lg_tf_mod dm;
    lg_tensor x;
    bool accumulate;
    const struct lg_tf_residual *before;
};
static void norm_backward(const struct lg_tf_pass *p, const struct norm_back *b,
                          const struct lg_tf_tmp *tmp)
{
    LG_ASSERT(b->n->m.stride == b->dm.stride);
    struct lg_norm_residual_backward_args a = {.norm = {.dy = tmp->dy,
                                                        .x = b->x,
                                                        .mean = b->n->mean,
                                                        .rstd = b->n->rstd,
                                                        .scale = b->n->m.scale,
                                                        .dx = tmp->dx,
                                                        .dshift = b->dm.shift,
                                                        .dscale = b->dm.scale,
                                                        .mod_stride = b->n->m.stride,
                                                        .accumulate = b->accumulate}};
    if (!b->before) {
        lg_norm_modulate_backward(p->s, &a.norm);
        return;
    }
    LG_ASSERT(b->before->m.stride == b->before->dm.stride);
    a.residual = residual_args(p, b->before, tmp);
    lg_norm_residual_backward(p->s, &a);
}

/* ---- self-attention half ---- */

void lg_tf_attention_params(struct lg_tf_attention *h, lg_params *t, int64_t D, const char *prefix)
{
    static const char *const qkv[] = {".to_q", ".to_k", ".to_v"};
    h->qkv = lg_tf_add_packed(t, lg_tf_xavier(3 * D, D), D, D, prefix, qkv, 3);
    h->out = lg_tf_add_linear(t, lg_tf_xavier(D, D), D, D, "%s.to_out.0", prefix);
}

void lg_tf_attention_layout(struct lg_tf_attention *h, struct lg_tf_arena *a,
                            const struct lg_tf_dims *n)
{
    h->y = lg_tf_take3(a, n->B, n->T, n->D);
    h->mean = lg_tf_take_stat(a, n->B, n->T);
    h->rstd = lg_tf_take_stat(a, n->B, n->T);
    h->qkv_act = lg_tf_take3(a, n->B, n->T, 3 * n->D);
    h->o = lg_tf_take3(a, n->B, n->T, n->D);
    if (a->train) {
        h->lse = lg_tf_take_stat(a, n->B, n->H * n->T);
        h->lse = lg_t3(h->lse.data, h->lse.dtype, n->B, n->H, n->T);
    }
    h->proj = lg_tf_take3(a, n->B, n->T, n->D);
}

/* Slice i (of q, k, v) of a packed (B, T, 3 D) buffer. */
static lg_tensor head_view(lg_tensor packed, const struct lg_tf_dims *n, int i)
{
    char *data = (char *)packed.data + (size_t)(i * n->D) * lg_dtype_bytes(packed.dtype);
    return lg_t4(data, packed.dtype, n->B, n->T, n->H, n->d);
}

struct lg_tf_norm lg_tf_attention_norm(const struct lg_tf_attention *h, struct lg_tf_mod m)
{
    return (struct lg_tf_norm){.m = m, .y = h->y, .mean = h->mean, .rstd = h->rstd, .eps = h->eps};
}

struct lg_tf_residual lg_tf_attention_residual(const struct lg_tf_attention *h, struct lg_tf_mod m,
                                               struct lg_tf_mod dm)
{
    return (struct lg_tf_residual){.m = m, .dm = dm, .l = h->out, .y = h->proj};
}

void lg_tf_attention_forward(const struct lg_tf_attention *h, const struct lg_tf_pass *p,
                             const struct lg_tf_dims *n, struct lg_tf_mod m,
                             const struct lg_tf_path *path)
{
    lg_tf_linear_forward(p, h->qkv, h->y, h->qkv_act, LG_NONE, LG_ACT_NONE);
    lg_attention_forward(p->s,
                         &(struct lg_attention_forward_args){.q = head_view(h->qkv_act, n, 0),
                                                             .k = head_view(h->qkv_act, n, 1),
                                                             .v = head_view(h->qkv_act, n, 2),
                                                             .q_stride = 3 * n->D,
                                                             .kv_stride = 3 * n->D,
                                                             .o = head_view(h->o, n, 0),
                                                             .lse = h->lse,
                                                             .scale = 1.0 / sqrt((double)n->d)});
    lg_tf_linear_forward(p, h->out, h->o, h->proj, LG_NONE, LG_ACT_NONE);
    lg_tf_residual_forward(p, path, m, h->proj);
}

void lg_tf_attention_backward(const struct lg_tf_attention *h, const struct lg_tf_pass *p,
                              const struct lg_tf_dims *n, const struct lg_tf_back *b,
                              const struct lg_tf_tmp *tmp)
{
    lg_tensor dqkv = lg_t3(tmp->wide.data, tmp->wide.dtype, n->B, n->T, 3 * n->D);
    struct lg_tf_norm norm = lg_tf_attention_norm(h, b->m);
    weight_backward(p, h->out, h->o, tmp->dn, LG_NONE);
    data_backward(p, h->out, tmp->dn, tmp->dy, false); /* dy: gradient of o */
    lg_attention_backward(p->s,
                          &(struct lg_attention_backward_args){.dout = head_view(tmp->dy, n, 0),
                                                               .o = head_view(h->o, n, 0),
                                                               .q = head_view(h->qkv_act, n, 0),
                                                               .k = head_view(h->qkv_act, n, 1),
                                                               .v = head_view(h->qkv_act, n, 2),
                                                               .q_stride = 3 * n->D,
                                                               .kv_stride = 3 * n->D,
                                                               .lse = h->lse,
                                                               .dq = head_view(dqkv, n, 0),
                                                               .dk = head_view(dqkv, n, 1),
                                                               .dv = head_view(dqkv, n, 2),
                                                               .dq_stride = 3 * n->D,
                                                               .dkv_stride = 3 * n->D,
                                                               .dbias = bias_gradient(p, h->qkv),
                                                               .accumulate_dbias = p->accumulate,
                                                               .scale = 1.0 / sqrt((double)n->d)});
    weight_backward(p, h->qkv, h->y, dqkv, LG_NONE);
    data_backward(p, h->qkv, dqkv, tmp->dy, false); /* dy: gradient of y */
    norm_backward(p, &(struct norm_back){&norm, b->dm, b->x, true, b->before}, tmp);
}

/* ---- feed-forward half ---- */

void lg_tf_mlp_params(struct lg_tf_mlp *h, lg_params *t, int64_t D, int64_t F, const char *prefix)
{
    h->up = lg_tf_add_linear(t, lg_tf_xavier(F, D), F, D, "%s.net.0.proj", prefix);
    h->down = lg_tf_add_linear(t, lg_tf_xavier(D, F), D, F, "%s.net.2", prefix);
}

void lg_tf_mlp_layout(struct lg_tf_mlp *h, struct lg_tf_arena *a, const struct lg_tf_dims *n)
{
    h->y = lg_tf_take3(a, n->B, n->T, n->D);
    h->mean = lg_tf_take_stat(a, n->B, n->T);
    h->rstd = lg_tf_take_stat(a, n->B, n->T);
    if (a->train) h->pre = lg_tf_take3(a, n->B, n->T, n->F);
    h->act = lg_tf_take3(a, n->B, n->T, n->F);
    h->proj = lg_tf_take3(a, n->B, n->T, n->D);
}

struct lg_tf_norm lg_tf_mlp_norm(const struct lg_tf_mlp *h, struct lg_tf_mod m)
{
    return (struct lg_tf_norm){.m = m, .y = h->y, .mean = h->mean, .rstd = h->rstd, .eps = h->eps};
}

struct lg_tf_residual lg_tf_mlp_residual(const struct lg_tf_mlp *h, struct lg_tf_mod m,
                                         struct lg_tf_mod dm)
{
    return (struct lg_tf_residual){.m = m, .dm = dm, .l = h->down, .y = h->proj};
}

void lg_tf_mlp_forward(const struct lg_tf_mlp *h, const struct lg_tf_pass *p, struct lg_tf_mod m,
                       const struct lg_tf_path *path)
{
    lg_tf_linear_forward(p, h->up, h->y, h->act, h->pre, LG_ACT_GELU_TANH);
    lg_tf_linear_forward(p, h->down, h->act, h->proj, LG_NONE, LG_ACT_NONE);
    lg_tf_residual_forward(p, path, m, h->proj);
}

/* Through a layer and the activation below it: dpre = (dy w) act'(pre), and the gradient of the bias of
 * the layer that made pre. */
static void activation_backward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor dy,
                                struct lg_tf_linear below, lg_tensor pre, lg_act act,
                                lg_tensor dpre)
{
    lg_linear_backward_data(
        p->s, &(struct lg_linear_backward_data_args){.dy = lg_tf_rows(dy),
                                                     .w = lg_tf_weight(p, l.w, l.n, l.k),
                                                     .dx = lg_tf_rows(dpre),
                                                     .act = act,
                                                     .pre = lg_tf_rows(pre),
                                                     .dbias = bias_gradient(p, below),
                                                     .accumulate_dbias = p->accumulate});
}

void lg_tf_mlp_backward(const struct lg_tf_mlp *h, const struct lg_tf_pass *p,
                        const struct lg_tf_back *b, const struct lg_tf_tmp *tmp)
{
    lg_tensor dpre = h->pre; /* shape only */
    dpre.data = tmp->wide.data;
    struct lg_tf_norm norm = lg_tf_mlp_norm(h, b->m);
    weight_backward(p, h->down, h->act, tmp->dn, LG_NONE);
    activation_backward(p, h->down, tmp->dn, h->up, h->pre, LG_ACT_GELU_TANH, dpre);
    weight_backward(p, h->up, h->y, dpre, LG_NONE);
    data_backward(p, h->up, dpre, tmp->dy, false); /* dy: gradient of y */
    norm_backward(p, &(struct norm_back){&norm, b->dm, b->x, true, b->before}, tmp);
}

/* ---- patches in ---- */

void lg_tf_patches_params(struct lg_tf_patches *h, lg_params *t, const struct lg_denoiser_config *c)
{
    int64_t D = c->hidden, P = (int64_t)c->channels * c->patch * c->patch;
    /* A convolution with stride = kernel is a matrix product over flattened patches; its weight (D,
     * C, p, p) is that matrix as it lies. */
    struct lg_tf_init init = lg_tf_xavier(D, P);
    struct lg_param w = {.name = "pos_embed.proj.weight",
                         .rank = 4,
                         .dim = {D, c->channels, c->patch, c->patch},
                         .init = init.kind,
                         .init_scale = init.scale};
    struct lg_param b = row(LG_TF_ZERO, D, 0, "pos_embed.proj", ".bias");
    h->proj = (struct lg_tf_linear){.n = D, .k = P};
    int at = lg_params_add(t, &w);
    h->proj.w = t->p[at].offset;
    at = lg_params_add(t, &b);
    h->proj.b = t->p[at].offset;
}

void lg_tf_patches_layout(struct lg_tf_patches *h, struct lg_tf_arena *a,
                          const struct lg_tf_dims *n)
{
    h->pos = lg_tf_take2(a, n->T, n->D);
    h->flat = lg_tf_take3(a, n->B, n->T, n->P);
}

void lg_tf_patches_forward(const struct lg_tf_patches *h, const struct lg_tf_pass *p,
                           const struct lg_tf_dims *n, lg_tensor x, lg_tensor out)
{
    lg_patchify_forward(
        p->s, &(struct lg_patchify_forward_args){.x = x, .y = h->flat, .patch = n->patch});
    lg_tf_linear_forward(p, h->proj, h->flat, out, LG_NONE, LG_ACT_NONE);
    lg_add_forward(p->s, &(struct lg_add_forward_args){.a = out, .b = h->pos, .y = out});
}

void lg_tf_patches_backward(const struct lg_tf_patches *h, const struct lg_tf_pass *p, lg_tensor dx)
{
    lg_tf_linear_backward(p, h->proj, h->flat, dx, LG_NONE, false);
}

int lg_tf_interpolation_scale(const struct lg_denoiser_config *c)
{
    return c->kind == LG_PIXART ? LG_MAX(c->height / 64, 1) : 1;
}

/* Token (i, j) gets D/2 features of its column j (yes, the column first, as diffusers' comment
 * "here w goes first" says), then D/2 of its row i: each D/4 sines, then D/4 cosines. */
void lg_tf_positions(const struct lg_denoiser_config *c, float *ret)
{
    int rows = c->height / c->patch, columns = c->width / c->patch, quarter = c->hidden / 4;
    /* diffusers: coordinate / (grid / base_size) / interpolation_scale, base_size of the height.
     * The coordinates are fp32 there, the products and sines fp64. */
    float base = (float)rows, inter = (float)lg_tf_interpolation_scale(c);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) {
            float at[2] = {(float)j / ((float)columns / base) / inter, (float)i / inter};
            for (int axis = 0; axis < 2; axis++) {
                float *out = ret + ((size_t)i * (size_t)columns + (size_t)j) * (size_t)c->hidden +
                             (size_t)(axis * 2 * quarter);
                for (int k = 0; k < quarter; k++) {
                    double a = (double)at[axis] / pow(10000.0, (double)k / quarter);
                    out[k] = (float)sin(a);
                    out[quarter + k] = (float)cos(a);
                }
            }
        }
    }
}

/* ---- timestep embedder ---- */

void lg_tf_timestep_params(struct lg_tf_timestep *h, lg_params *t, int64_t D, const char *prefix)
{
    h->l1 = lg_tf_add_linear(t, LG_TF_NORMAL, D, LG_TF_FREQUENCIES, "%s.linear_1", prefix);
    h->l2 = lg_tf_add_linear(t, LG_TF_NORMAL, D, D, "%s.linear_2", prefix);
}

void lg_tf_timestep_layout(struct lg_tf_timestep *h, struct lg_tf_arena *a,
                           const struct lg_tf_dims *n)
{
    h->waves = lg_tf_take2(a, n->B, LG_TF_FREQUENCIES);
    if (a->train) h->pre = lg_tf_take2(a, n->B, n->D);
    h->act = lg_tf_take2(a, n->B, n->D);
    h->out = lg_tf_take2(a, n->B, n->D);
}

void lg_tf_timestep_forward(const struct lg_tf_timestep *h, const struct lg_tf_pass *p, lg_tensor t)
{
    lg_timestep_embedding_forward(p->s, &(struct lg_timestep_embedding_forward_args){
                                            .t = t, .out = h->waves, .freq_shift = h->freq_shift});
    lg_tf_linear_forward(p, h->l1, h->waves, h->act, h->pre, LG_ACT_SILU);
    lg_tf_linear_forward(p, h->l2, h->act, h->out, LG_NONE, LG_ACT_NONE);
}

void lg_tf_timestep_backward(const struct lg_tf_timestep *h, const struct lg_tf_pass *p,
                             lg_tensor dout, lg_tensor tmp)
{
    lg_tf_linear_backward(p, h->l2, h->act, dout, tmp, false);
    lg_act_backward(p->s, &(struct lg_act_backward_args){
                              .x = h->pre, .dy = tmp, .dx = tmp, .act = LG_ACT_SILU});
    lg_tf_linear_backward(p, h->l1, h->waves, tmp, LG_NONE, false);
}

/* ---- out ---- */

void lg_tf_final_params(struct lg_tf_final *h, lg_params *t, const struct lg_denoiser_config *c,
                        const char *name)
{
    int64_t P = (int64_t)c->channels * c->patch * c->patch;
    h->proj = lg_tf_add_linear(t, LG_TF_ZERO, P, c->hidden, "%s", name);
}

void lg_tf_final_layout(struct lg_tf_final *h, struct lg_tf_arena *a, const struct lg_tf_dims *n)
{
    h->y = lg_tf_take3(a, n->B, n->T, n->D);
    h->mean = lg_tf_take_stat(a, n->B, n->T);
    h->rstd = lg_tf_take_stat(a, n->B, n->T);
    h->tokens = lg_tf_take3(a, n->B, n->T, n->P);
}

struct lg_tf_norm lg_tf_final_norm(const struct lg_tf_final *h, struct lg_tf_mod m)
{
    return (struct lg_tf_norm){
        .m = m, .y = h->y, .mean = h->mean, .rstd = h->rstd, .eps = LG_TF_FIXED_EPS};
}

void lg_tf_final_forward(const struct lg_tf_final *h, const struct lg_tf_pass *p,
                         const struct lg_tf_dims *n, lg_tensor out)
{
    lg_tf_linear_forward(p, h->proj, h->y, h->tokens, LG_NONE, LG_ACT_NONE);
    lg_unpatchify_forward(
        p->s, &(struct lg_unpatchify_forward_args){.x = h->tokens, .y = out, .patch = n->patch});
}

void lg_tf_final_backward(const struct lg_tf_final *h, const struct lg_tf_pass *p,
                          const struct lg_tf_dims *n, const struct lg_tf_back *b, lg_tensor dout,
                          const struct lg_tf_tmp *tmp)
{
    struct lg_tf_norm norm = lg_tf_final_norm(h, b->m);
    lg_unpatchify_backward(p->s, &(struct lg_unpatchify_backward_args){
                                     .dy = dout, .dx = h->tokens, .patch = n->patch});
    lg_tf_linear_backward(p, h->proj, h->y, h->tokens, tmp->dy, false);
    norm_backward(p, &(struct norm_back){&norm, b->dm, b->x, false, b->before}, tmp);
}
