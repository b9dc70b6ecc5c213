/* The operations: argument structs, checks and dispatch.
 *
 *     lg_linear_forward(stream, &(struct lg_linear_forward_args){.x = x, .w = w, .y = y});
 *
 * ops.c checks shapes, types and aliasing once (a wrong one is a bug: LG_ASSERT) and calls the
 * backend. Operations never allocate: a backend that needs scratch memory says how much for given
 * arguments, and finds it in the stream (see device.h, dry streams). All floating tensors of one call
 * have the device's compute type (lg_device_dtype) unless a comment says otherwise; fp16 and bf16 are
 * accumulated in fp32. "or fp32": with a 16-bit compute type the tensor may be fp32 instead.
 *
 * Gradients of parameters are added to what is there when .accumulate is set, else overwritten;
 * gradients of activations likewise. Outputs may not overlap inputs except where "may alias" is said.
 * Every operation gives the same bits for the same arguments, and a row (sample) of a batch the same
 * bits whatever the other rows hold. Every tensor begins on a multiple of its elements' bytes.
 */
#pragma once
#include "base/philox.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

typedef enum lg_act {
    LG_ACT_NONE,
    LG_ACT_SILU,
    LG_ACT_GELU_TANH, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), T5's gelu_new */
    LG_ACT_RELU,
} lg_act;

/* y = act(x w^T + bias). */
struct lg_linear_forward_args {
    lg_tensor x;    // (M, K)
    lg_tensor w;    // (N, K)
    lg_tensor bias; // (N) or absent
    lg_tensor y;    // (M, N)
    lg_tensor pre;  // (M, N) or absent: x w^T + bias, kept for the backward; needs act
    lg_act act;
};
/* dx (+)= dy w. With act, x = act(pre) being a layer's output: dx = (dy w) act'(pre), and dbias (+)= its
 * column sums, the gradient of that layer's bias. */
struct lg_linear_backward_data_args {
    lg_tensor dy;    // (M, N)
    lg_tensor w;     // (N, K)
    lg_tensor dx;    // (M, K)
    bool accumulate; /* of dx; not with act */
    lg_act act;
    lg_tensor pre;   // (M, K); with act, else absent
    lg_tensor dbias; // (K) or absent, or fp32; needs act
    bool accumulate_dbias;
};
/* dw (+)= dy^T x, dbias (+)= column sums of dy. */
struct lg_linear_backward_weight_args {
    lg_tensor dy;    // (M, N)
    lg_tensor x;     // (M, K)
    lg_tensor dw;    // (N, K), or fp32
    lg_tensor dbias; // (N) or absent, or fp32
    bool accumulate;
};
/* y = act(x); y may alias x. Any shape. */
struct lg_act_forward_args {
    lg_tensor x, y;
    lg_act act;
};
/* dx (+)= dy act'(x), x being the pre-activation; dx may alias dy when not accumulating. */
struct lg_act_backward_args {
    lg_tensor x, dy, dx;
    lg_act act;
    bool accumulate;
};
/* y = a b, elementwise; y may alias either. */
struct lg_mul_forward_args {
    lg_tensor a, b, y;
};
/* y = a + b, b repeated along the slow dimensions: numel(b) divides numel(a). y may alias a. */
struct lg_add_forward_args {
    lg_tensor a, b, y;
};
/* y (+)= sum over rows, in row order. */
struct lg_sum_rows_args {
    lg_tensor x; // (M, N)
    lg_tensor y; // (N), or fp32
    bool accumulate;
};
/* y = sum of c[i] x[i] for i < count, in that order; y may alias any x[i]. */
enum { LG_COMBINE_MAX = 4 };
struct lg_combine_args {
    lg_tensor x[LG_COMBINE_MAX];
    double c[LG_COMBINE_MAX];
    int count;
    lg_tensor y;
};
/* y = x in y's type (any of f32, f64, f16, bf16 to any), round to nearest even. */
struct lg_cast_args {
    lg_tensor x, y;
};

/* LayerNorm without affine over D, then x (1 + scale) + shift per sample. Peebles & Xie, "Scalable
 * Diffusion Models with Transformers". shift/scale are rows of a wider modulation buffer: sample b's
 * values start at data + b * mod_stride elements; their tensors are (B, D) in name, strided in fact.
 * Absent shift/scale mean 0. */
struct lg_norm_modulate_forward_args {
    lg_tensor x;            // (B, T, D)
    lg_tensor shift, scale; // (B, D), stride mod_stride; or absent, both
    int64_t mod_stride;
    lg_tensor y;          // (B, T, D)
    lg_tensor mean, rstd; // (B, T), kept for the backward; in fp32 for 16-bit types
    double eps;
};
struct lg_norm_modulate_backward_args {
    lg_tensor dy, x;          // (B, T, D)
    lg_tensor mean, rstd;     // (B, T)
    lg_tensor scale;          // (B, D), stride mod_stride; or absent
    lg_tensor dx;             // (B, T, D)
    lg_tensor dshift, dscale; // (B, D), stride mod_stride, overwritten; absent with scale
    int64_t mod_stride;       // of scale, dshift and dscale
    bool accumulate;          /* of dx */
};
/* out = x + gate y; gate per sample, strided as above, absent means 1. out may alias x. */
struct lg_gate_residual_forward_args {
    lg_tensor x, y; // (B, T, D)
    lg_tensor gate; // (B, D), stride mod_stride; or absent
    int64_t mod_stride;
    lg_tensor out; // (B, T, D)
};
/* dy = gate dout, dgate = sum over T of dout y. (dx is dout itself.) dbias (+)= sum over B and T of dy: the
 * gradient of the bias of the layer that made y. */
struct lg_gate_residual_backward_args {
    lg_tensor dout, y; // (B, T, D)
    lg_tensor gate;    // (B, D), stride mod_stride
    lg_tensor dy;      // (B, T, D); may alias dout only if the caller no longer needs it
    lg_tensor dgate;   // (B, D), stride mod_stride, overwritten
    int64_t mod_stride;
    lg_tensor dbias; // (D) or absent, or fp32
    bool accumulate_dbias;
};
/* gate_residual_forward, then norm_modulate_forward of its result: what stands between two layers of a net,
 * at once, since a GPU takes as long to read a row as to compute with it. */
struct lg_residual_norm_forward_args {
    struct lg_gate_residual_forward_args residual;
    struct lg_norm_modulate_forward_args norm; /* x: residual.out */
};
/* Backward of the same: norm_modulate_backward, then gate_residual_backward of its dx. */
struct lg_norm_residual_backward_args {
    struct lg_norm_modulate_backward_args norm;
    struct lg_gate_residual_backward_args residual; /* dout: norm.dx, which dy is apart from */
};
/* y = x / sqrt(mean(x^2) + eps) w. T5's norm. */
struct lg_rms_norm_forward_args {
    lg_tensor x; // (M, D)
    lg_tensor w; // (D)
    lg_tensor y; // (M, D)
    double eps;
};
/* GroupNorm with affine over (H, W, C / groups), then act. */
struct lg_group_norm_forward_args {
    lg_tensor x; // (N, H, W, C)
    lg_tensor
        mean_var;   // (N, groups, 2) f64: x's, as conv2d_forward writes them; absent: worked out
    lg_tensor w, b; // (C)
    lg_tensor y;    // (N, H, W, C); may alias x
    int groups;
    double eps;
    lg_act act;
};

/* o = softmax(scale q k^T + bias, keys < k_length) v per head. Token t of sample b of q starts at
 * data + (b * Tq + t) * q_stride elements, head h at + h * d: so q, k, v may be slices of one packed
 * buffer. Tensors are named (B, T, H, d). A sample with k_length 0 is a bug. */
struct lg_attention_forward_args {
    lg_tensor q;    // (B, Tq, H, d), token stride q_stride
    lg_tensor k, v; // (B, Tk, H, d), token stride kv_stride
    int64_t q_stride, kv_stride;
    lg_tensor k_length; // (B) i32 or absent
    lg_tensor bias;     // (H, Tq, Tk) or absent
    lg_tensor o;        // (B, Tq, H, d), contiguous
    lg_tensor lse;      // (B, H, Tq) or absent: log-sum-exp of the scaled scores, for the backward
    double scale;
};
/* dq, dk, dv are overwritten and have their own strides; rows of keys >= k_length get zeros. dbias (+)=
 * sums over B and T of dq, dk, dv, one behind the other: the gradient of the bias of the layer that made
 * q, k, v. That of k is 0 and nothing is summed for it: a bias of k adds the same to all scores of a
 * query, and softmax does not see that. */
struct lg_attention_backward_args {
    lg_tensor dout, o; // (B, Tq, H, d), contiguous
    lg_tensor q;       // (B, Tq, H, d), q_stride
    lg_tensor k, v;    // (B, Tk, H, d), kv_stride
    int64_t q_stride, kv_stride;
    lg_tensor k_length; // (B) i32 or absent
    lg_tensor lse;      // (B, H, Tq)
    lg_tensor dq;       // (B, Tq, H, d), dq_stride
    lg_tensor dk, dv;   // (B, Tk, H, d), dkv_stride
    int64_t dq_stride, dkv_stride;
    lg_tensor dbias; // (3 H d) or absent, or fp32
    bool accumulate_dbias;
    double scale;
};

/* y = conv(x, w) + bias (+ residual), zero padding. Ho = (H + top + bottom - kh) / stride + 1. Every
 * tensor but mean_var begins on a multiple of 16 bytes: the libraries' kernels load whole vectors. */
struct lg_conv2d_forward_args {
    lg_tensor x;        // (N, H, W, Ci)
    lg_tensor w;        // (Co, kh, kw, Ci)
    lg_tensor bias;     // (Co)
    lg_tensor residual; // (N, Ho, Wo, Co) or absent
    lg_tensor y;        // (N, Ho, Wo, Co); may alias residual
    /* (N, groups, 2) f64 or absent: for each sample mean and variance of Co / groups channels of y,
     * for the GroupNorm of y: to sum where y is made saves that from reading it once more. */
    lg_tensor mean_var;
    int stride, top, left, bottom, right;
};
/* group_norm_forward, then conv2d_forward of its result. A backend may normalise on the way: what norm.y
 * holds afterwards is not defined. conv.mean_var may be norm.mean_var. */
struct lg_norm_conv2d_forward_args {
    struct lg_group_norm_forward_args norm; /* x begins on a multiple of 16 bytes */
    struct lg_conv2d_forward_args conv;     /* x: norm.y */
};
struct lg_upsample2x_forward_args { /* nearest */
    lg_tensor x;                    // (N, H, W, C)
    lg_tensor y;                    // (N, 2H, 2W, C)
};

struct lg_embedding_forward_args {
    lg_tensor ids;   // (M) i32, 0 <= id < V
    lg_tensor table; // (V, D)
    lg_tensor y;     // (M, D)
};
struct lg_embedding_backward_args { /* rows added in the order of m */
    lg_tensor ids;                  // (M) i32
    lg_tensor dy;                   // (M, D)
    lg_tensor dtable;               // (V, D), or fp32
    bool accumulate;
};
/* T5's bidirectional relative position bias: out[h][i][j] = table[bucket(j - i)][h]. */
struct lg_t5_bias_forward_args {
    lg_tensor table; // (buckets, H)
    lg_tensor out;   // (H, T, T)
    int max_distance;
};
/* Sinusoidal: out = [cos(t f), sin(t f)], f_i = exp(-ln(10000) i / (D/2 - freq_shift)). */
struct lg_timestep_embedding_forward_args {
    lg_tensor t;       // (B), or fp32
    lg_tensor out;     // (B, D), D even
    double freq_shift; /* diffusers' downscale_freq_shift */
};
/* y[b][hp * W/p + wp][(c * p + i) * p + j] = x[b][c][hp p + i][wp p + j]. */
struct lg_patchify_forward_args {
    lg_tensor x; // (B, C, H, W)
    lg_tensor y; // (B, T, C p p)
    int patch;
};
/* y[b][c][hp p + i][wp p + j] = x[b][hp * W/p + wp][(i * p + j) * C + c] (diffusers' order). */
struct lg_unpatchify_forward_args {
    lg_tensor x; // (B, T, p p C)
    lg_tensor y; // (B, C, H, W)
    int patch;
};
struct lg_unpatchify_backward_args {
    lg_tensor dy; // (B, C, H, W)
    lg_tensor dx; // (B, T, p p C)
    int patch;
};
struct lg_pixels_to_nhwc_args { /* p / 127.5 - 1 */
    lg_tensor x;                // (N, C, H, W) u8
    lg_tensor y;                // (N, H, W, C)
};
struct lg_nhwc_to_pixels_args { /* round(clamp((v + 1) 127.5, 0, 255)) */
    lg_tensor x;                // (N, H, W, C)
    lg_tensor y;                // (N, C, H, W) u8
};
struct lg_nchw_to_nhwc_args {
    lg_tensor x; // (N, C, H, W)
    lg_tensor y; // (N, H, W, C)
};
struct lg_nhwc_to_nchw_args {
    lg_tensor x; // (N, H, W, C)
    lg_tensor y; // (N, C, H, W)
};

/* mean = the first C channels of x, logvar = the others, clamped to [-30, 20]. */
struct lg_posterior_split_args {
    lg_tensor x;            // (N, H, W, 2C)
    lg_tensor mean, logvar; // (N, C, H, W)
};

/* The diffusion process on a batch. x0 = (mean + exp(logvar / 2) z - shift_factor) scaling_factor
 * with z = Philox LATENT, e = Philox NOISE, both of (seed, n[b], element's index in the sample);
 * x_t = coef[b][0] x0 + coef[b][1] e, target = coef[b][2] x0 + coef[b][3] e. Normals in double,
 * rounded once. */
struct lg_diffuse_forward_args {
    lg_tensor mean, logvar; // (B, C, H, W); logvar is clamped to [-30, 20]
    lg_tensor n;            // (B) i64: global sample numbers
    lg_tensor coef;         // (B, 4), or fp32
    lg_tensor x_t, target;  // (B, C, H, W)
    uint64_t seed;
    double scaling_factor, shift_factor;
};
/* loss[b] = mean((pred - target)^2); dpred = weight[b] 2 (pred - target) / numel of a sample. A
 * sample with weight 0 gets loss 0 and gradient 0, whatever it holds (void samples hold anything). */
struct lg_mse_loss_args {
    lg_tensor pred, target; // (B, C, H, W)
    lg_tensor weight;       // (B), or fp32
    lg_tensor loss;         // (B), or fp32
    lg_tensor dpred;        // (B, C, H, W) or absent; may alias pred
};
/* y = x[0] + x[1] + ... in that order; sum_squares = sum of y^2, in double, in fixed blocks of 4096
 * elements whose sums are added in order. */
enum { LG_RANKS_MAX = 64 };
struct lg_reduce_ranks_args {
    lg_tensor x[LG_RANKS_MAX]; // (n), or fp32, all of one type
    int count;
    lg_tensor y;           // (n), or fp32; may alias x[0] of its type
    lg_tensor sum_squares; // (1) f64
};
/* Loshchilov & Hutter, "Decoupled Weight Decay Regularization", as in torch.optim.AdamW:
 * g = grad_scale grad; w1 = w (1 - lr decay); m' = b1 m + (1 - b1) g; v' = b2 v + (1 - b2) g^2;
 * w' = w1 - lr (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps). All tensors (n), fp32 (f64 on
 * ref64) but for `working`; each output but those may alias its input. */
struct lg_adamw_args {
    lg_tensor w, m, v, grad;
    lg_tensor w_out, m_out, v_out;
    lg_tensor
        working[LG_RANKS_MAX]; /* each: w_out in the compute type, the same bits as lg_cast's */
    int copies;                /* of them; may be 0 */
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t t; /* 1 at the first update */
};
/* out = decay ema + (1 - decay) w; out may alias ema. All (n). */
struct lg_ema_args {
    lg_tensor ema, w, out;
    double decay;
};

#define LG_OP(name) void lg_##name(lg_stream *stream, const struct lg_##name##_args *args);
#include "kernels/ops.def"
#undef LG_OP
