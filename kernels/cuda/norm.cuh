/* What the files of the norms share. */
#pragma once
#include "kernels/cuda/common.cuh"

/* Rows of 16 bits that a warp holds in registers: lane l has packs l, l + 32 ... of 8 elements, of which
 * the last may be missing in some lanes. */
enum { ROW_PACK = 8, ROW_STEP = WARP * ROW_PACK, ROW_PACKS_MAX = 5 };
enum { ROW_MAX = ROW_PACKS_MAX * ROW_STEP, WIDE_ROW_MAX = 4 * ROW_MAX };

/* Packs may be used: rows and modulation rows start on 16 bytes. */
static inline bool rows_fit(lg_dtype t, int64_t D, int64_t stride, const void *const *p, int count)
{
    int64_t e = (int64_t)lg_dtype_bytes(t);
    bool fits = D * e % 16 == 0 && stride * e % 16 == 0;
    for (int i = 0; i < count; i++) fits = fits && lg_cuda_aligned_16(p[i]);
    return fits;
}
/* Runs the body with P the packs a lane needs for D elements, at most ROW_MAX. */
#define WITH_PACKS(D, P, ...)                                                                      \
    switch (ceil_div(D, ROW_STEP)) {                                                               \
        PACKS_CASE(1, P, __VA_ARGS__)                                                              \
        PACKS_CASE(2, P, __VA_ARGS__)                                                              \
        PACKS_CASE(3, P, __VA_ARGS__)                                                              \
        PACKS_CASE(4, P, __VA_ARGS__)                                                              \
        PACKS_CASE(5, P, __VA_ARGS__)                                                              \
    }
#define PACKS_CASE(n, P, ...)                                                                      \
    case n: {                                                                                      \
        constexpr int P = n;                                                                       \
        __VA_ARGS__;                                                                               \
    } break;

/* Sums over the tokens of a sample are those of pieces, added in order: few samples of many tokens keep a GPU busy too, and a
 * sample's sums depend on its tokens alone. Texts (333 tokens with SD3) come with few samples: their pieces are short. From 2048 tokens
 * on a sample has 33, 66, 132 ... pieces of at most 128 tokens: four of 2496 (LTX-Video), eight of 4096 or one of 16000 are blocks for
 * all 132 multiprocessors of an H200, once or twice, where pieces of 128 made 80, 256 and 125. */
static inline __host__ __device__ int sum_pieces(int64_t tokens)
{
    if (tokens <= 256) return 1;
    if (tokens < 2048) return (int)ceil_div(tokens, tokens < 1024 ? 64 : 128);
    int pieces = 33;
    while (tokens > 128 * (int64_t)pieces) pieces *= 2;
    return pieces;
}
/* Tokens [begin, end) of a piece. */
struct piece_tokens {
    int64_t begin, end;
};
static __device__ __forceinline__ piece_tokens tokens_of(int64_t tokens, int64_t piece,
                                                         int64_t pieces)
{
    return {tokens * piece / pieces, tokens * (piece + 1) / pieces};
}
/* Which sums: of dy, and of dy n, in the norm; of dx y, and of dx, in the residual. */
enum sum_kind { SUM_SHIFT, SUM_SCALE, SUM_GATE, SUM_BIAS, SUM_KINDS };
/* Floats for the sums of all pieces: (B, pieces, SUM_KINDS, D); 0 where a sample is one piece, whose sums are the result. */
static inline int64_t sum_floats(int64_t B, int64_t tokens, int64_t D)
{
    const int64_t pieces = sum_pieces(tokens);
    return pieces > 1 ? B * pieces * SUM_KINDS * D : 0;
}
/* What becomes of the sums over a sample's tokens: pieces (B, sum_pieces(tokens), SUM_KINDS, D), or NULL where the kernel has written
 * all but dbias. Those of kind SUM_BIAS times the gate, where there is one, are bias_sums, and of all samples, in order, dbias. */
struct token_sums {
    const float *pieces;
    int64_t B, tokens, D, mod_stride, gate_stride;
    const void *gate;
    void *dshift, *dscale, *dgate; /* of the type; NULL: none */
    float *bias_sums;              /* (B, D), or NULL: no dbias */
    lg_tensor dbias;               /* (D) */
    bool accumulate_dbias;
};
void cuda_add_token_sums(cudaStream_t stream, lg_dtype type, const struct token_sums *p);

/* The norm, after the residual before it where there is one (else NULL), each row read once; false when
 * not for it. */
bool cuda_norm_forward_of_rows(cudaStream_t stream,
                               const struct lg_gate_residual_forward_args *before,
                               const struct lg_norm_modulate_forward_args *a);
/* The norm's backward, and then that of the residual before it where there is one (else NULL), each row
 * read once; false when not for it, or for the GPU. pieces: sum_floats(), or NULL where a sample is one; bias_sums (B, D): where the
 * residual, or without one the norm, has dbias. */
bool cuda_norm_backward_of_rows(lg_stream *s, const struct lg_norm_modulate_backward_args *a,
                                const struct lg_gate_residual_backward_args *then, float *pieces,
                                float *bias_sums);
