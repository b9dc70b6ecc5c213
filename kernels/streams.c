/* See streams.h. */
#include "kernels/streams.h"
#include "base/check.h"

enum { ALIGNED = 256 };

/* What a call has in scratch memory. */
struct joined {
    char *base; /* NULL: nothing is placed */
    size_t bytes;
};

/* Where the tokens of t, of two streams, lie together. */
static lg_tensor join(struct joined *j, const lg_tensor *t, int first)
{
    if (!first || !t->rank) return *t;
    lg_tensor one = lg_tensor_of(j->base ? j->base + j->bytes : NULL, t->dtype, t->rank, t->dim);
    j->bytes += (lg_tensor_bytes(&one) + ALIGNED - 1) / ALIGNED * ALIGNED;
    return one;
}

/* `count` tokens of a sample, from row `at` on. */
static lg_tensor run_of(const lg_tensor *t, int64_t at, int64_t count)
{
    const int64_t step = lg_row_stride(t, 2), width = t->dim[2] * t->dim[3];
    lg_tensor run = lg_t2((char *)t->data + (size_t)(at * step) * lg_dtype_bytes(t->dtype),
                          t->dtype, count, width);
    run.stride[0] = step;
    return run;
}

/* Between tokens of two streams and where they lie together: there, or back. */
static void copy_tokens(lg_stream *s, lg_streams_copy *copy, const lg_tensor *streams,
                        const lg_tensor *one, int first, bool back)
{
    if (streams->data == one->data) return;
    const int64_t B = one->dim[0], T = one->dim[1];
    for (int i = 0; i < 2; i++) {
        const int64_t count = i ? T - first : first;
        const lg_tensor apart = run_of(streams, i ? B * first : 0, count);
        const lg_tensor together = run_of(one, i ? first : 0, count);
        const int64_t apart_step = count * lg_row_stride(streams, 2);
        const int64_t together_step = T * lg_row_stride(one, 2);
        copy(s, &(struct lg_copy_rows_args){.x = back ? together : apart,
                                            .y = back ? apart : together,
                                            .groups = (int)B,
                                            .x_apart = back ? together_step : apart_step,
                                            .y_apart = back ? apart_step : together_step});
    }
}

size_t lg_streams_join_forward(const struct lg_attention_forward_args *a, void *scratch,
                               struct lg_attention_forward_args *ret_one)
{
    struct joined j = {.base = scratch};
    *ret_one = *a;
    ret_one->first_queries = ret_one->first_keys = 0;
    if (a->q.dim[0] == 1) return 0;
    ret_one->q = join(&j, &a->q, a->first_queries);
    ret_one->k = join(&j, &a->k, a->first_keys);
    ret_one->v = join(&j, &a->v, a->first_keys);
    ret_one->o = join(&j, &a->o, a->first_queries);
    ret_one->o_low = join(&j, &a->o_low, a->first_queries);
    return j.bytes;
}

size_t lg_streams_join_backward(const struct lg_attention_backward_args *a, void *scratch,
                                struct lg_attention_backward_args *ret_one)
{
    struct joined j = {.base = scratch};
    *ret_one = *a;
    ret_one->first_queries = ret_one->first_keys = 0;
    if (a->q.dim[0] == 1) return 0;
    ret_one->dout = join(&j, &a->dout, a->first_queries);
    ret_one->o = join(&j, &a->o, a->first_queries);
    ret_one->q = join(&j, &a->q, a->first_queries);
    ret_one->k = join(&j, &a->k, a->first_keys);
    ret_one->v = join(&j, &a->v, a->first_keys);
    ret_one->o_low = join(&j, &a->o_low, a->first_queries);
    ret_one->dq = join(&j, &a->dq, a->first_queries);
    ret_one->dk = join(&j, &a->dk, a->first_keys);
    ret_one->dv = join(&j, &a->dv, a->first_keys);
    return j.bytes;
}

void lg_streams_forward(lg_stream *s, const struct lg_attention_forward_args *a,
                        lg_streams_copy *copy, lg_streams_attend *attend)
{
    struct lg_attention_forward_args there = *a, one;
    char *const scratch = s->scratch;
    if (!a->o_low.data) there.o_low = LG_NONE;
    const size_t bytes = lg_streams_join_forward(&there, scratch, &one);
    copy_tokens(s, copy, &a->q, &one.q, a->first_queries, false);
    copy_tokens(s, copy, &a->k, &one.k, a->first_keys, false);
    copy_tokens(s, copy, &a->v, &one.v, a->first_keys, false);
    s->scratch = scratch + bytes;
    attend(s, &one);
    s->scratch = scratch;
    copy_tokens(s, copy, &a->o, &one.o, a->first_queries, true);
    copy_tokens(s, copy, &there.o_low, &one.o_low, a->first_queries, true);
}

void lg_streams_backward(lg_stream *s, const struct lg_attention_backward_args *a,
                         lg_streams_copy *copy, lg_streams_attend_back *attend)
{
    struct lg_attention_backward_args there = *a, one;
    char *const scratch = s->scratch;
    if (!a->o_low.data) there.o_low = LG_NONE;
    const size_t bytes = lg_streams_join_backward(&there, scratch, &one);
    copy_tokens(s, copy, &a->dout, &one.dout, a->first_queries, false);
    copy_tokens(s, copy, &a->o, &one.o, a->first_queries, false);
    copy_tokens(s, copy, &a->q, &one.q, a->first_queries, false);
    copy_tokens(s, copy, &a->k, &one.k, a->first_keys, false);
    copy_tokens(s, copy, &a->v, &one.v, a->first_keys, false);
    copy_tokens(s, copy, &there.o_low, &one.o_low, a->first_queries, false);
    s->scratch = scratch + bytes;
    attend(s, &one);
    s->scratch = scratch;
    copy_tokens(s, copy, &a->dq, &one.dq, a->first_queries, true);
    copy_tokens(s, copy, &a->dk, &one.dk, a->first_keys, true);
    copy_tokens(s, copy, &a->dv, &one.dv, a->first_keys, true);
}
