/* What PixArt, Latte and LTX have alike: adaLN-single (Chen et al., "PixArt-alpha", 2023), one modulation for all blocks, to
 * which each adds a table of its own; the text through two linears; an attention of tokens to the text. */
#pragma once
#include "stages/nets/models.h"

/* x (B, T, D) as (B k, T / k, D), of which each of `rows` = B k has a modulation of its own (the timesteps of a clip's frames:
 * lg_denoiser_time_rows), and the other way round. */
static inline lg_tensor lg_adaln_rows(lg_tensor x, int64_t rows)
{
    return lg_at(x, 0, lg_t3(NULL, x.dtype, rows, x.dim[0] * x.dim[1] / rows, x.dim[2]));
}

/* A table of `rows` vectors, normal / sqrt(D). */
lg_tensor lg_adaln_table(lg_net *n, const struct lg_denoiser_config *c, int rows, const char *name);
/* linear(silu(e)): (B, 6 D) of e (B, D). B here and below: of timesteps. */
lg_tensor lg_adaln_linear(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e,
                          const char *name);
/* Of a block: t6 and its table of 6, BLOCK.scale_shift_table, added up. t6's gradient is summed over the blocks, block by
 * block, since this sum stands in each. */
lg_tensor lg_adaln_of_block(lg_net *n, const struct lg_denoiser_config *c, lg_tensor t6,
                            const char *block);
/* Of the output: the table of 2, scale_shift_table, each with e added: shift, then scale. */
struct lg_modulation lg_adaln_of_output(lg_net *n, const struct lg_denoiser_config *c, lg_tensor e);

/* caption_projection: linear_2(gelu(linear_1(states))), (B, L, D). */
lg_tensor lg_adaln_text(lg_net *n, const struct lg_denoiser_config *c, lg_tensor states);

struct lg_cross {
    lg_tensor text, length; // (B, L, D), (B) i32: keys beyond it are masked
    const char *block;
    bool norms; /* queries and keys go through an RMSNorm over all their features: norm_q, norm_k */
    double norm_eps;
};
/* BLOCK.attn2: x (B, T, D) to the text. */
lg_tensor lg_adaln_cross_attention(lg_net *n, const struct lg_denoiser_config *c, lg_tensor x,
                                   const struct lg_cross *to);
