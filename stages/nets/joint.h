/* Two streams, of text and of image tokens, in one attention (MMDiT; Esser et al. 2024): what SD3's and FLUX's blocks have
 * alike, under diffusers' names.
 *
 *     q k v = linear(stream), of each stream by weights of its own; q, k through RMSNorm per head
 *     one attention over both streams' tokens behind each other, q and k turned (RoPE) where there are angles
 *
 * Each stream's queries, keys and values stay a tensor of their own, apart from the other's (ops.def: two streams), and so does
 * what it gets. Where the sequence is split (sequence.h) they are brought together: each rank has a run of the texts' rows
 * beside its run of the image's, and all is one sequence of S + T tokens, of which each rank has its two runs behind each
 * other: rank 0's, rank 1's, and so on.
 * An attention does not see in which order its keys come but in rounding. */
#pragma once
#include "stages/nets/models.h"

#define LG_JOINT_EPS 1e-6 /* of all norms */

struct lg_streams {
    lg_tensor x, text; // (B, T, D), (B, S, D)
};

/* How a model attends: for all its blocks. */
struct lg_joint {
    const struct lg_denoiser_config *config; /* hidden D, heads H */
    bool norms;                              /* of queries and keys */
    bool text_first;  /* tokens are [text; x], and so are parameters; else [x; text] */
    lg_tensor angles; // (2, S + T, d / 2) of all tokens in that order; LG_NONE: nothing is turned
};

/* What each stream gets of both. x_alone: the text gives keys and values, but asks nothing: x alone is returned, and
 * the text's query is a parameter that nobody reads (lg_joint_unused_query). */
struct lg_streams lg_joint_attention(lg_net *n, const struct lg_joint *j, struct lg_streams s,
                                     bool x_alone, const char *name);
void lg_joint_unused_query(lg_net *n, const struct lg_joint *j, const char *name);
/* Tokens (B, N, D) among each other, with the parameters' names of x: those of x, or of_both, lg_joint_tokens. */
lg_tensor lg_joint_self_attention(lg_net *n, const struct lg_joint *j, lg_tensor x, bool of_both,
                                  const char *name);
/* This rank's rows of the whole text (B, S, E); all, where nothing is split. */
lg_tensor lg_joint_own_text(lg_net *n, lg_tensor text);
/* Both streams' tokens behind each other: (B, S + T, D). */
lg_tensor lg_joint_tokens(lg_net *n, const struct lg_joint *j, struct lg_streams s);

/* What adaLN makes of the condition e (B, D): NAME.linear, (B, chunks D). */
lg_tensor lg_joint_modulation(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e,
                              int chunks, const char *name);
/* Of (B, 2 D): (scale, shift), the other way round than elsewhere. */
struct lg_modulation lg_joint_scale_first(lg_tensor mod, int64_t D);
/* A linear to D features. */
lg_tensor lg_joint_linear(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                          const char *name);
/* x += gate mlp(modulate(norm(x))): NAME.net.0.proj and NAME.net.2. */
lg_tensor lg_joint_feed_forward(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                struct lg_modulation m, const char *name);
