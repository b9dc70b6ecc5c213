/* What the diffusion transformers share: patches in and out, the timestep embedder, the
 * two halves of a block that adaLN modulates (self-attention and feed-forward), each forward and
 * backward; and the little machinery they stand on (parameter rows, activation arena, pass).
 * Internal to stages/nets: dit.c and pixart.c are made of these, denoiser.c drives them.
 *
 * Shapes: B samples, T tokens, D = H d features, F = 4 D, P = C p p values of a patch.
 *
 * What stands between two layers, the residual that ends one sublayer and the norm that begins the next, is
 * one operation: a sublayer's forward ends with the next sublayer's norm and does not do its own, a sublayer's backward
 * ends with the residual of the sublayer before it.
 *
 * Gradients: a sublayer's backward gets dx, the gradient of its output (B, T, D), and leaves the
 * gradient of its input there (the residual path is the identity, the rest is added). Gradients of
 * parameters are overwritten or added to as the pass says; every parameter is touched exactly once
 * per pass.
 */
#pragma once
#include "kernels/ops.h"
#include "stages/nets/denoiser.h"
#include "stages/nets/params.h"

struct lg_tf_dims {
    int64_t B, T, D, H, d, F, P; /* see above */
    int64_t L, E;                /* PixArt: text tokens and their width */
    int patch;
};
struct lg_tf_dims lg_tf_dims_of(const struct lg_denoiser_config *c, int batch);

/* Parameter rows. A linear layer's place in the flat buffer, in elements; y (M, n) = x (M, k) w^T +
 * b. A packed one (q, k, v) is several layers of the file that lie behind each other. */
struct lg_tf_linear {
    size_t w, b;
    int64_t n, k;
};
struct lg_tf_init {
    lg_param_init kind;
    double scale;
};
/* Xavier's uniform bound for a (n, k) matrix: sqrt(6 / (n + k)). */
struct lg_tf_init lg_tf_xavier(int64_t n, int64_t k);
#define LG_TF_ZERO   ((struct lg_tf_init){LG_INIT_ZERO, 0})
#define LG_TF_NORMAL ((struct lg_tf_init){LG_INIT_NORMAL, 0.02})
/* Adds NAME.weight (n, k) and NAME.bias (n); biases start at zero. */
struct lg_tf_linear lg_tf_add_linear(lg_params *t, struct lg_tf_init init, int64_t n, int64_t k,
                                     const char *name_fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* Adds the weights of PREFIX.NAMES[i], each (n, k), without gaps, then their biases likewise;
 * returns the layer with count * n outputs. */
struct lg_tf_linear lg_tf_add_packed(lg_params *t, struct lg_tf_init init, int64_t n, int64_t k,
                                     const char *prefix, const char *const *names, int count);
/* Adds one array; returns its offset. */
size_t lg_tf_add_array(lg_params *t, struct lg_tf_init init, int64_t rows, int64_t columns,
                       const char *name_fmt, ...) __attribute__((format(printf, 5, 6)));

/* Activations: laid out once, by running the layout function first with a base that is only an
 * address (to learn the size) and then with the memory itself. */
struct lg_tf_arena {
    char *base;
    size_t used;              /* bytes; every tensor starts at a multiple of 64 */
    lg_dtype type, stat_type; /* of activations; of means and log-sum-exps: at least fp32 */
    bool train;               /* false: what only a backward reads is absent */
};
lg_tensor lg_tf_take2(struct lg_tf_arena *a, int64_t m, int64_t n);
lg_tensor lg_tf_take3(struct lg_tf_arena *a, int64_t b, int64_t t, int64_t n);
/* (m, n) of stat_type. */
lg_tensor lg_tf_take_stat(struct lg_tf_arena *a, int64_t m, int64_t n);

/* One forward or backward over one batch. */
struct lg_tf_pass {
    lg_stream *s;
    lg_dtype type;
    const char *w;   /* flat weights */
    char *g;         /* flat gradients; NULL in a forward */
    bool accumulate; /* gradients are added to what is there */
};
/* A parameter as a (rows, columns) matrix; rows 0: as a vector. */
lg_tensor lg_tf_weight(const struct lg_tf_pass *p, size_t offset, int64_t rows, int64_t columns);
lg_tensor lg_tf_grad(const struct lg_tf_pass *p, size_t offset, int64_t rows, int64_t columns);
/* (.., N) as (M, N). */
lg_tensor lg_tf_rows(lg_tensor t);
/* y = act(x w^T + b); pre may be LG_NONE. */
void lg_tf_linear_forward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor x,
                          lg_tensor y, lg_tensor pre, lg_act act);
/* Gradients of w and b from dy and x; dx (+)= dy w unless dx is LG_NONE. */
void lg_tf_linear_backward(const struct lg_tf_pass *p, struct lg_tf_linear l, lg_tensor x,
                           lg_tensor dy, lg_tensor dx, bool accumulate_dx);

/* shift, scale and gate of one half of a block: three chunks of a (B, chunks D) buffer, where a block has
 * six and begins with those of its attention. */
struct lg_tf_mod {
    lg_tensor shift, scale, gate; // (B, D), stride
    int64_t stride;
};
struct lg_tf_mod lg_tf_mod_of(lg_tensor buffer, int64_t D, int first_chunk);

/* Memory of the backward, shared by all blocks. */
struct lg_tf_tmp {
    lg_tensor dx; // (B, T, D): gradient of the residual stream
    lg_tensor dy; // (B, T, D)
    lg_tensor
        dn; // (B, T, D): between the sublayers that of what the residual adds, without its gate
    lg_tensor wide; // (B, T, F): holds (B, T, 3 D) too
};
void lg_tf_tmp_layout(struct lg_tf_tmp *t, struct lg_tf_arena *a, const struct lg_tf_dims *n);

/* The norm at the head of a sublayer: y = modulate(norm(x)). */
struct lg_tf_norm {
    struct lg_tf_mod m;
    lg_tensor y, mean, rstd;
    double eps;
};
void lg_tf_norm_forward(const struct lg_tf_pass *p, const struct lg_tf_norm *n, lg_tensor x);
/* The residual stream's way through a sublayer: in, out, and the norm of out; NULL when there is none. */
struct lg_tf_path {
    lg_tensor x, out;
    const struct lg_tf_norm *next;
};
/* out = x + gate y (m without a gate: x + y), and its norm. */
void lg_tf_residual_forward(const struct lg_tf_pass *p, const struct lg_tf_path *path,
                            struct lg_tf_mod m, lg_tensor y);
/* The residual that ends a sublayer, as its backward wants it: y = l(...). */
struct lg_tf_residual {
    struct lg_tf_mod m, dm;
    struct lg_tf_linear l;
    lg_tensor y;
};
/* From tmp->dx, the gradient of the residual's result: tmp->dn that of y, that of the gate and l's bias. */
void lg_tf_residual_backward(const struct lg_tf_pass *p, const struct lg_tf_residual *r,
                             const struct lg_tf_tmp *tmp);
/* What a sublayer's backward gets: its modulation and where its gradient goes, the stream at its input, and
 * the residual before it, whose backward follows its norm's; NULL when there is none. */
struct lg_tf_back {
    struct lg_tf_mod m, dm;
    lg_tensor x;
    const struct lg_tf_residual *before;
};

/* out = x + gate attention(modulate(norm(x))). */
struct lg_tf_attention {
    struct lg_tf_linear qkv, out;
    double eps;
    lg_tensor y;          // (B, T, D): modulated norm
    lg_tensor mean, rstd; // (B, T)
    lg_tensor qkv_act;    // (B, T, 3 D)
    lg_tensor o;          // (B, T, D)
    lg_tensor lse;        // (B, H, T)
    lg_tensor proj;       // (B, T, D)
};
/* prefix: "transformer_blocks.0.attn1". */
void lg_tf_attention_params(struct lg_tf_attention *h, lg_params *t, int64_t D, const char *prefix);
void lg_tf_attention_layout(struct lg_tf_attention *h, struct lg_tf_arena *a,
                            const struct lg_tf_dims *n);
struct lg_tf_norm lg_tf_attention_norm(const struct lg_tf_attention *h, struct lg_tf_mod m);
struct lg_tf_residual lg_tf_attention_residual(const struct lg_tf_attention *h, struct lg_tf_mod m,
                                               struct lg_tf_mod dm);
/* h->y is there: its norm was done. */
void lg_tf_attention_forward(const struct lg_tf_attention *h, const struct lg_tf_pass *p,
                             const struct lg_tf_dims *n, struct lg_tf_mod m,
                             const struct lg_tf_path *path);
/* tmp->dn is there: its residual's backward was done. */
void lg_tf_attention_backward(const struct lg_tf_attention *h, const struct lg_tf_pass *p,
                              const struct lg_tf_dims *n, const struct lg_tf_back *b,
                              const struct lg_tf_tmp *tmp);

/* out = x + gate W2 gelu(W1 modulate(norm(x))). */
struct lg_tf_mlp {
    struct lg_tf_linear up, down;
    double eps;
    lg_tensor y;          // (B, T, D): modulated norm
    lg_tensor mean, rstd; // (B, T)
    lg_tensor pre, act;   // (B, T, F): before and after GELU
    lg_tensor proj;       // (B, T, D)
};
/* prefix: "transformer_blocks.0.ff". */
void lg_tf_mlp_params(struct lg_tf_mlp *h, lg_params *t, int64_t D, int64_t F, const char *prefix);
void lg_tf_mlp_layout(struct lg_tf_mlp *h, struct lg_tf_arena *a, const struct lg_tf_dims *n);
struct lg_tf_norm lg_tf_mlp_norm(const struct lg_tf_mlp *h, struct lg_tf_mod m);
struct lg_tf_residual lg_tf_mlp_residual(const struct lg_tf_mlp *h, struct lg_tf_mod m,
                                         struct lg_tf_mod dm);
/* As for the attention. */
void lg_tf_mlp_forward(const struct lg_tf_mlp *h, const struct lg_tf_pass *p, struct lg_tf_mod m,
                       const struct lg_tf_path *path);
void lg_tf_mlp_backward(const struct lg_tf_mlp *h, const struct lg_tf_pass *p,
                        const struct lg_tf_back *b, const struct lg_tf_tmp *tmp);

/* Patches in: x_t (B, C, H, W) -> tokens (B, T, D) with sinusoidal positions added. */
struct lg_tf_patches {
    struct lg_tf_linear proj;
    lg_tensor pos;  // (T, D): fixed
    lg_tensor flat; // (B, T, P)
};
void lg_tf_patches_params(struct lg_tf_patches *h, lg_params *t,
                          const struct lg_denoiser_config *c);
void lg_tf_patches_layout(struct lg_tf_patches *h, struct lg_tf_arena *a,
                          const struct lg_tf_dims *n);
void lg_tf_patches_forward(const struct lg_tf_patches *h, const struct lg_tf_pass *p,
                           const struct lg_tf_dims *n, lg_tensor x, lg_tensor out);
void lg_tf_patches_backward(const struct lg_tf_patches *h, const struct lg_tf_pass *p,
                            lg_tensor dx);
/* diffusers' get_2d_sincos_pos_embed for this latent, rounded to fp32: ret (T, D). */
void lg_tf_positions(const struct lg_denoiser_config *c, float *ret);
/* PatchEmbed's interpolation_scale: PixArt max(sample_size / 64, 1), DiT 1. */
int lg_tf_interpolation_scale(const struct lg_denoiser_config *c);

/* The timestep's embedding: linear_2(silu(linear_1(sinusoids of t))). */
enum { LG_TF_FREQUENCIES = 256 };
struct lg_tf_timestep {
    struct lg_tf_linear l1, l2;
    double freq_shift;  /* diffusers: DiT 1, PixArt 0 */
    lg_tensor waves;    // (B, 256)
    lg_tensor pre, act; // (B, D): before and after SiLU
    lg_tensor out;      // (B, D)
};
/* prefix: "adaln_single.emb.timestep_embedder". */
void lg_tf_timestep_params(struct lg_tf_timestep *h, lg_params *t, int64_t D, const char *prefix);
void lg_tf_timestep_layout(struct lg_tf_timestep *h, struct lg_tf_arena *a,
                           const struct lg_tf_dims *n);
void lg_tf_timestep_forward(const struct lg_tf_timestep *h, const struct lg_tf_pass *p,
                            lg_tensor t);
/* dout (B, D); tmp (B, D). */
void lg_tf_timestep_backward(const struct lg_tf_timestep *h, const struct lg_tf_pass *p,
                             lg_tensor dout, lg_tensor tmp);

/* Out: unpatchify(W modulate(norm(x)) + b). */
struct lg_tf_final {
    struct lg_tf_linear proj;
    lg_tensor y;          // (B, T, D)
    lg_tensor mean, rstd; // (B, T)
    lg_tensor tokens;     // (B, T, P); in the backward: their gradient
};
/* Both diffusers models write this epsilon into their last norm, and DiT into each block's first.
 */
#define LG_TF_FIXED_EPS 1e-6
void lg_tf_final_params(struct lg_tf_final *h, lg_params *t, const struct lg_denoiser_config *c,
                        const char *name);
void lg_tf_final_layout(struct lg_tf_final *h, struct lg_tf_arena *a, const struct lg_tf_dims *n);
struct lg_tf_norm lg_tf_final_norm(const struct lg_tf_final *h, struct lg_tf_mod m);
/* h->y is there: its norm was done. */
void lg_tf_final_forward(const struct lg_tf_final *h, const struct lg_tf_pass *p,
                         const struct lg_tf_dims *n, lg_tensor out);
/* Writes tmp->dx. */
void lg_tf_final_backward(const struct lg_tf_final *h, const struct lg_tf_pass *p,
                          const struct lg_tf_dims *n, const struct lg_tf_back *b, lg_tensor dout,
                          const struct lg_tf_tmp *tmp);
