/* Attention over two streams of tokens (first_queries, first_keys of ops.def) by a kernel that knows of one: the tokens of
 * a sample are copied together, and what is made of them apart again. For backends. */
#pragma once
#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Row of token t of sample b in a tensor of B samples of T tokens; first: tokens of the first stream, 0: there is one. */
static inline int64_t lg_stream_row(int64_t B, int64_t T, int64_t first, int64_t b, int64_t t)
{
    if (!first) return b * T + t;
    return t < first ? b * first + t : B * first + b * (T - first) + t - first;
}

/* Bytes at `scratch` that the call of one stream `ret_one` has its tensors in; 0: a has one stream, or one sample, whose tokens
 * lie together as they are. With scratch NULL places are only counted. */
size_t lg_streams_join_forward(const struct lg_attention_forward_args *a, void *scratch,
                               struct lg_attention_forward_args *ret_one);
size_t lg_streams_join_backward(const struct lg_attention_backward_args *a, void *scratch,
                                struct lg_attention_backward_args *ret_one);

/* A backend's own functions. */
typedef void lg_streams_copy(lg_stream *, const struct lg_copy_rows_args *);
typedef void lg_streams_attend(lg_stream *, const struct lg_attention_forward_args *);
typedef void lg_streams_attend_back(lg_stream *, const struct lg_attention_backward_args *);

/* a by calls of one stream. The stream's scratch memory begins with the bytes above, behind which is what the call wants. */
void lg_streams_forward(lg_stream *s, const struct lg_attention_forward_args *a,
                        lg_streams_copy *copy, lg_streams_attend *attend);
void lg_streams_backward(lg_stream *s, const struct lg_attention_backward_args *a,
                         lg_streams_copy *copy, lg_streams_attend_back *attend);
#ifdef __cplusplus
}
#endif
