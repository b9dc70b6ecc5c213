/* Sequence parallelism: P ranks compute a net together on the same samples, each on its part of the tokens. All of a net
 * works token by token, or with what all ranks hold alike (conditions, text, weights), but self-attention, where
 * every token needs all others. Two ways to give it them (kernels/graph/exchange.h):
 *
 *   Ulysses   q, k, v of own tokens (B, T_p, 3, H, d) are exchanged for those of all tokens of own heads
 *             (B, T, 3, H_p, d), and what the attention made of them is exchanged back. Jacobs et al., "DeepSpeed
 *             Ulysses", 2023
 *   FastSeq   the attention's input (B, T_p, D) is gathered (B, T, D), q, k, v are made of own heads alone, and the
 *             result is exchanged back. Moves less where P is 2, as much where it is 3. As in OpenDiT, 2024
 *
 * Tokens are split by rows of patches, [p R / P, (p + 1) R / P) of R, heads likewise. A rank's gradients are its terms:
 * their sum over the ranks, in rank order, are the net's. */
#pragma once
#include <stdbool.h>

enum lg_sequence_kind { LG_SEQUENCE_ULYSSES, LG_SEQUENCE_FASTSEQ };

struct lg_sequence {
    int rank, degree; /* which one of how many; degree 0 or 1: nothing is split */
    enum lg_sequence_kind kind;
};

static inline bool lg_sequence_is_split(const struct lg_sequence *s)
{
    return s->degree > 1;
}
