/* Layers of which nets are described, and the description itself: a function that calls them in the order of the
 * forward. It runs twice: once to declare the parameters, without a graph, and once to record the operations.
 * Parameters are named where they are used; which come behind each other in the flat buffer follows from the units
 * and, within one, from the order of the calls.
 *
 * Shapes: B samples, T tokens, D = H d features. A tensor of the description is a view of a value of the graph
 * (kernels/graph/graph.h); while parameters are declared it has a shape and no data.
 *
 * Biases of all linears start at zero. */
#pragma once
#include "kernels/graph/exchange.h"
#include "kernels/graph/program.h"
#include "stages/nets/adapter.h"
#include "stages/nets/params.h"
#include "stages/nets/sequence.h"
#include "stages/nets/sincos.h"

struct lg_net_row; /* a parameter that was declared */

typedef struct lg_net {
    const lg_params *params; /* while recording */
    lg_graph *g;             /* while recording, else NULL */
    lg_stream *s;            /* g's */
    lg_dtype type;           /* of activations and weights */
    lg_dtype stats;          /* of means and log-sum-exps: at least fp32 */
    int64_t batch;
    lg_tensor *weights;          /* while recording: each unit's, bound */
    int unit;                    /* while declaring: of the parameters to come; -1: none yet */
    struct lg_adapter adapter;   /* rank 0: none */
    bool in_blocks;              /* while declaring: of the table (params.h) */
    char scope[64];              /* in front of their names */
    struct lg_sequence sequence; /* while recording; and, where it is split: */
    struct lg_cut tokens;        /* along dimension 1 */
    struct lg_cut texts;         /* the same of a joint attention's text tokens (joint.h) */
    int mlp_chunks;              /* while recording: lg_net_mlp; 0: 1 */
    lg_tensor *unread;           /* parts of weights that are other ranks' (grad.h) */
    int n_unread;
    double flops;           /* of the products so far; a multiply-add counts two */
    struct lg_net_row *row; /* while declaring */
    int n_rows;
    char (*unit_name)[32];
    int n_units;
} lg_net;

/* For declaring `batch` samples. lg_net_finish makes the table and frees what was collected. */
lg_net lg_net_declare(int64_t batch);
lg_params lg_net_finish(lg_net *n);

/* For recording `batch` samples on a new graph of this device; p stays the caller's. lg_net_bind binds the weights of
 * each unit, in their order, before the description runs; lg_net_compile ends the recording. */
lg_net lg_net_record(lg_device *d, const lg_params *p, int64_t batch);
void lg_net_bind(lg_net *n);
int lg_net_compile(lg_net *n, lg_program **ret);
/* Enqueues an operation that is no layer's; nothing while parameters are declared. */
#define LG_NET_RECORD(n, op, ...)                                                                  \
    do {                                                                                           \
        if ((n)->s) lg_##op((n)->s, &(struct lg_##op##_args){__VA_ARGS__});                        \
    } while (0)

/* The parameters that follow belong to this unit. Units lie in the order in which they are first named. */
void lg_net_unit(lg_net *n, const char *name_fmt, ...) __attribute__((format(printf, 2, 3)));
/* Unit "block.I", and what is recorded until the next unit is block I: what is recomputed, or gathered, together. */
void lg_net_block(lg_net *n, int i);
/* In front of the names of the parameters that follow, "encoder.block.0."; NULL: nothing. */
void lg_net_scope(lg_net *n, const char *prefix_fmt, ...) __attribute__((format(printf, 2, 3)));
/* A value, of which the shape counts. */
lg_tensor lg_net_value(lg_net *n, const char *name, lg_tensor shape);

struct lg_init {
    lg_param_init kind;
    double
        scale; /* 0 of a uniform one: Xavier's bound, sqrt(6 / (rows + columns)) of the whole matrix */
    bool is_fixed; /* never trained */
};
#define LG_NET_XAVIER ((struct lg_init){.kind = LG_INIT_UNIFORM})
#define LG_NET_NORMAL ((struct lg_init){.kind = LG_INIT_NORMAL, .scale = 0.02})
#define LG_NET_ZERO   ((struct lg_init){.kind = LG_INIT_ZERO})
#define LG_NET_ONE    ((struct lg_init){.kind = LG_INIT_ONE})

/* An array of parameters; shape: its dimensions. */
lg_tensor lg_net_param(lg_net *n, struct lg_init init, lg_tensor shape, const char *name_fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* NAME.weight of a convolution: (out, k, k, in), in the file (out, in, k, k). */
lg_tensor lg_net_filter(lg_net *n, struct lg_init init, int64_t out, int64_t in, int k,
                        const char *name);

/* The same over k frames: (out, k, k, k, in), in the file (out, in, k, k, k). */
lg_tensor lg_net_clip_filter(lg_net *n, struct lg_init init, int64_t out, int64_t in, int k,
                             const char *name);

struct lg_layer {
    int64_t out; /* features of all parts together */
    struct lg_init init;
    lg_act act; /* of the result */
    const char *const
        *parts; /* NAME<part>: several linears of the file as one product; NULL: one */
    int n_parts;
    bool no_bias;
    lg_tensor
        y; /* where the result goes, a part of a value; LG_NONE: it is a value of its own. Without activation */
};
/* act(x w^T + b) over the last dimension of x; NAME.weight and NAME.bias. Linears that the net's adapter takes have its two
 * narrow ones beside them (adapter.h), here and below: no description knows of it. */
lg_tensor lg_net_linear(lg_net *n, lg_tensor x, struct lg_layer l, const char *name_fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* The same of the features of `count` tensors (B, T, ..) side by side, without activation. Where its weights are an adapted
 * net's that no adapter takes, they are not copied there, but each has a product by its columns of the weight, so that
 * what made them goes through its activation's backward on the way (fuse.h). */
lg_tensor lg_net_linear_beside(lg_net *n, const lg_tensor *x, int count, struct lg_layer l,
                               const char *name);

/* A feed-forward of x: `up` with its activation, then `down`, in front of whose input stand features of `beside`, unless that
 * is LG_NONE. With n->mlp_chunks tokens go through both in so many chunks, one after the other: where a backward makes
 * the hidden layer again, one chunk's is there at a time. Gradients of the weights are then sums over chunks, so that their bits
 * are others. */
struct lg_mlp {
    lg_tensor x, beside;
    struct lg_layer up, down;
    const char *scope, *up_name,
        *down_name; /* the two behind the first; NULL: as diffusers mostly has them, ".net.0.proj", ".net.2" */
};
lg_tensor lg_net_mlp(lg_net *n, const struct lg_mlp *m);

bool lg_net_is_adapted(const lg_net *n, const struct lg_layer *l, const char *name);

/* While recording, of each part of such a layer without activation the features [first, first + count) alone, by a product of its own:
 * ret[i] (.., count). The others' weights are read by nobody. */
void lg_net_linear_parts(lg_net *n, lg_tensor x, struct lg_layer l, int64_t first, int64_t count,
                         lg_tensor *ret, const char *name);

/* All dimensions but the last as one. */
lg_tensor lg_net_rows(lg_tensor t);
lg_tensor lg_net_act(lg_net *n, lg_tensor x, lg_act act);
/* Of rows [a; g] of x (M, 2 D): a act(g), (M, D). */
lg_tensor lg_net_glu(lg_net *n, lg_tensor x, lg_act act);
/* a + b, b repeated along the slow dimensions. */
lg_tensor lg_net_add(lg_net *n, lg_tensor a, lg_tensor b);
/* The same, into a part y of a value. */
void lg_net_add_into(lg_net *n, lg_tensor a, lg_tensor b, lg_tensor y);
lg_tensor lg_net_multiply(lg_net *n, lg_tensor a, lg_tensor b);

/* What adaLN makes of the condition for half a block; each (B, D), a slice. */
struct lg_modulation {
    lg_tensor shift, scale, gate;
};
/* Three chunks of D from chunk `first` on of buffer (B, chunks D). */
struct lg_modulation lg_net_chunks(lg_tensor buffer, int64_t D, int first);
/* LayerNorm without affine, then x (1 + scale) + shift; and the same with an RMSNorm. */
lg_tensor lg_net_norm(lg_net *n, lg_tensor x, struct lg_modulation m, double eps);
lg_tensor lg_net_rms_modulate(lg_net *n, lg_tensor x, struct lg_modulation m, double eps);
/* x + gate y; LG_NONE: x + y. */
lg_tensor lg_net_residual(lg_net *n, lg_tensor x, lg_tensor y, lg_tensor gate);

/* x / sqrt(mean of x^2 + eps) w over rows x (M, D); y: where it is written, or LG_NONE: a new value. */
lg_tensor lg_net_rms_norm(lg_net *n, lg_tensor x, lg_tensor w, double eps, lg_tensor y);

/* LayerNorm over rows x (M, D) with NAME.weight and NAME.bias; y as above. */
lg_tensor lg_net_layer_norm(lg_net *n, lg_tensor x, double eps, lg_tensor y, const char *name);

/* Part i of a packed (B, T, parts H d) as heads (B, T, H, d). */
lg_tensor lg_net_heads(lg_tensor packed, int64_t heads, int64_t d, int i);
struct lg_attention {
    lg_tensor q, k, v; // (B, T, H, d)
    lg_tensor keys;    // (B) i32: how many each sample has; LG_NONE: all
    lg_tensor bias;    // (H, T, T), or LG_NONE
    double scale;      /* 0: 1 / sqrt(d) */
    bool causal;       /* a token sees itself and those before it */
    int64_t first_queries,
        first_keys; /* tokens of the first of two streams that lie apart (ops.def); 0: all lie together */
};
/* softmax(scale q k^T + bias) v as (B, T, H d). */
lg_tensor lg_net_attention(lg_net *n, struct lg_attention a);

/* Tokens of several streams in one value (B, T + S, F), for one attention: each stream's are a part of every sample.
 * x (B, T, F) to y, such a part of it; and tokens [from, from + count) of x (B, T, F) as a value of its own. */
void lg_net_copy_tokens(lg_net *n, lg_tensor x, lg_tensor y);
lg_tensor lg_net_take_tokens(lg_net *n, lg_tensor x, int64_t from, int64_t count);
/* x (B, T, F), which may be features of a wider value, to y, which may be such, too. */
void lg_net_copy_features(lg_net *n, lg_tensor x, lg_tensor y);
/* Two values side by side along their last dimension, all others alike: a new one. */
lg_tensor lg_net_side_by_side(lg_net *n, lg_tensor a, lg_tensor b);
/* Rotary positions: of packed x (B, T, h d) the first `turned` vectors of d turned by their token's angles (2, T, d / 2),
 * cosines, then sines; the others as they are. */
lg_tensor lg_net_rope(lg_net *n, lg_tensor x, int64_t turned, lg_tensor angles);
/* RMSNorm over d of the heads of the first n_norms parts of packed x (B, T, parts H d): of part i by NAME<norm i>.weight (d); they
 * are then turned where there are angles. y: where to, (B, T, n_norms H d), or LG_NONE: a new value. */
struct lg_head_norms {
    const char *const *norms;
    int n_norms;
    int64_t heads, d;
    double eps;
    lg_tensor angles; // (2, T, d / 2), of x's tokens, as for lg_net_rope; or LG_NONE
};
lg_tensor lg_net_head_norms(lg_net *n, lg_tensor x, const struct lg_head_norms *l, lg_tensor y,
                            const char *name);

/* Parameters of a linear that the file has and nobody reads: their gradients are zeros. */
void lg_net_unused_linear(lg_net *n, int64_t in, struct lg_layer l, const char *name_fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The same of one parameter, or of tokens of a value. */
void lg_net_unused(lg_net *n, lg_tensor param);

/* All tokens of x (B, T, D) among each other: q, k, v are the parts of one linear, NAME<part>; (B, T, H d). The tokens
 * may be a rank's part (sequence.h). */
lg_tensor lg_net_self_attention(lg_net *n, lg_tensor x, struct lg_layer packed, int64_t heads,
                                const char *name);

/* The same of clips, tokens frame by frame, x (B, F S, D), whose tokens do not all see each other: those of a frame do; or
 * those at one place of all frames do. A rank of a split sequence has whole frames: the first need no other rank. */
struct lg_clip_attention {
    struct lg_layer packed; /* of q, k, v */
    int64_t heads, frames;
    const char *name;
};
lg_tensor lg_net_frame_attention(lg_net *n, lg_tensor x, const struct lg_clip_attention *a);
lg_tensor lg_net_place_attention(lg_net *n, lg_tensor x, const struct lg_clip_attention *a);
/* So many heads of all places together go into one operation at most; tests ask for less. */
extern int64_t lg_net_place_heads_max;
/* All tokens among each other, of packed q, k, v of own tokens (B, T, 3 H d); a split sequence by Ulysses: (B, T, H d). */
lg_tensor lg_net_attend_packed(lg_net *n, lg_tensor packed, int64_t heads);
/* The same with queries and keys normed. */
lg_tensor lg_net_attend_normed(lg_net *n, lg_tensor packed, const struct lg_head_norms *l,
                               int64_t heads, const char *name);
/* Packed parts of which the first ones are normed, as one tensor again, which an exchange wants; all: where, tokens that lie
 * together, or LG_NONE: a value. */
lg_tensor lg_net_packed_norms(lg_net *n, lg_tensor packed, const struct lg_head_norms *l,
                              lg_tensor all, const char *name);

/* Of a sequence that is split, for other attentions; `cut` is that of their tokens, along dimension 1. */
bool lg_net_is_split(const lg_net *n);
struct lg_heads {
    int64_t first, count; /* this rank's, or all */
};
struct lg_heads lg_net_own_heads(const lg_net *n, int64_t heads);
/* Own tokens of all heads (B, T_p, parts H d) to all tokens of own heads (B, T, parts H_p d). */
lg_tensor lg_net_all_tokens(lg_net *n, lg_tensor packed, const struct lg_cut *cut, int parts,
                            int64_t heads);
/* Own tokens x (B, T_p, D) to all tokens (B, T, D). */
lg_tensor lg_net_gather_tokens(lg_net *n, lg_tensor x, const struct lg_cut *cut);
/* What own heads made of all tokens (B, T, H_p d) to all heads of own tokens (B, T_p, H d). */
lg_tensor lg_net_all_heads(lg_net *n, lg_tensor o, const struct lg_cut *cut, int64_t heads);

/* Sinusoids of numbers t (N): (N, count), cosines first. freq_shift: diffusers' downscale_freq_shift. */
lg_tensor lg_net_waves(lg_net *n, lg_tensor t, int64_t count, double freq_shift);
/* linear_2(silu(linear_1(sinusoids of t))) of numbers t (N): (N, D). freq_shift: diffusers' downscale_freq_shift. */
lg_tensor lg_net_timestep(lg_net *n, lg_tensor t, int64_t D, double freq_shift, const char *name);
/* Row ids[m] of a table (rows, D): (M, D). */
lg_tensor lg_net_embedding(lg_net *n, lg_tensor ids, int64_t rows, int64_t D, const char *name);

/* Patches of p x p as they are, channels first: x (B, C, H, W) -> (B, T, C p p). */
lg_tensor lg_net_flat_patches(lg_net *n, lg_tensor x, int patch);
/* Patches in: x (B, C, H, W) -> (B, T, D), a convolution of stride p as one product, plus fixed positions (T, D), or those of
 * each of several frames. */
lg_tensor lg_net_patches(lg_net *n, lg_tensor x, int patch, lg_tensor positions, const char *name);
/* Patches out: x (B, T, p p C) -> out (B, C, H, W). */
void lg_net_unpatchify(lg_net *n, lg_tensor x, int patch, lg_tensor out);

/* The same of several numbers a sample, v (B k): their vectors of D behind each other, into a part y (B, k D) of a value. */
void lg_net_numbers_into(lg_net *n, lg_tensor v, int64_t D, lg_tensor y, const char *name);
