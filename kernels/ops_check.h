/* The words in which ops.c says what an operation takes: SHAPE, MAYBE, COUNT, APART and their kin, each
 * an assertion about tensors of the call `a` on the stream `s`. Only ops.c includes this.
 *
 * A tensor is absent when its rank is 0 (LG_NONE) or, on a stream that is not dry, its pointer NULL; on
 * a dry stream every pointer may be NULL. A failed check names the operation (the function) and the
 * tensor (the expression). */
#pragma once
#include "base/check.h"
#include "kernels/backend.h"

/* The compute type, and the type of statistics and optimizer state: fp32 for 16-bit types. */
#define FLOAT(s) ((s)->device->dtype)
#define STATS(s) (FLOAT(s) == LG_F64 ? LG_F64 : LG_F32)

static inline bool absent(const lg_stream *s, const lg_tensor *t)
{
    return t->rank == 0 || (!t->data && !s->dry);
}

static inline bool has_shape(const lg_stream *s, const lg_tensor *t, lg_dtype dtype, int rank,
                             const int64_t *dim)
{
    if (absent(s, t) || t->dtype != dtype || t->rank != rank) return false;
    for (int i = 0; i < rank; i++) {
        if (t->dim[i] != dim[i] || dim[i] <= 0) return false;
    }
    return (uintptr_t)t->data % lg_dtype_bytes(dtype) == 0;
}

static inline bool has_count(const lg_stream *s, const lg_tensor *t, lg_dtype dtype, int64_t count)
{
    return !absent(s, t) && t->dtype == dtype && count > 0 && lg_numel(t) == count &&
           (uintptr_t)t->data % lg_dtype_bytes(dtype) == 0;
}

#define DIMS(...)                                                                                  \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                         \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
/* t is there and has this type and shape. */
#define SHAPE(t, dtype, ...) LG_ASSERT(has_shape(s, &(t), dtype, DIMS(__VA_ARGS__)))
/* t is absent or has this type and shape. */
#define MAYBE(t, dtype, ...)                                                                       \
    LG_ASSERT(absent(s, &(t)) || has_shape(s, &(t), dtype, DIMS(__VA_ARGS__)))
#define COUNT(t, dtype, count) LG_ASSERT(has_count(s, &(t), dtype, count))
/* The same in the compute type or that of statistics: what 16 bits would spoil (see ops.h). */
#define EITHER(t)             ((t).dtype == STATS(s) ? STATS(s) : FLOAT(s))
#define WIDE_SHAPE(t, ...)    SHAPE(t, EITHER(t), __VA_ARGS__)
#define WIDE_MAYBE(t, ...)    MAYBE(t, EITHER(t), __VA_ARGS__)
#define BOTH_OR_NEITHER(t, u) LG_ASSERT(absent(s, &(t)) == absent(s, &(u)))

/* t and u are two names of one tensor. */
#define SAME(t, u)                                                                                 \
    LG_ASSERT((t).data == (u).data && has_shape(s, &(t), (u).dtype, (u).rank, (u).dim))

#define ALIGNED_16(t) LG_ASSERT((uintptr_t)(t).data % 16 == 0)

/* The memory of a tensor: `rows` pieces of `row` bytes, `stride` bytes apart. Slices of one packed
 * buffer interleave without sharing a byte. */
struct span {
    uintptr_t at;
    size_t row, stride;
    int64_t rows; /* 0: none */
};

static inline struct span whole(lg_tensor t)
{
    size_t bytes = t.data ? lg_tensor_bytes(&t) : 0;
    return (struct span){(uintptr_t)t.data, bytes, bytes, t.data && bytes ? 1 : 0};
}

static inline struct span rows_of(lg_tensor t, int64_t rows, int64_t row, int64_t stride)
{
    if (!t.data || t.rank == 0) return (struct span){0};
    size_t e = lg_dtype_bytes(t.dtype);
    return (struct span){(uintptr_t)t.data, (size_t)row * e, (size_t)stride * e, rows};
}

static inline uintptr_t span_end(struct span a)
{
    return a.at + (size_t)(a.rows - 1) * a.stride + a.row;
}

static inline bool apart(struct span a, struct span b)
{
    if (a.rows == 0 || b.rows == 0 || span_end(a) <= b.at || span_end(b) <= a.at) return true;
    if (a.stride != b.stride) return false;
    size_t ahead =
        b.at >= a.at ? (b.at - a.at) % a.stride : (a.stride - (a.at - b.at) % a.stride) % a.stride;
    return ahead >= a.row && ahead + b.row <= a.stride;
}

static inline bool all_apart(struct span out, const struct span *other, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!apart(out, other[i])) return false;
    }
    return true;
}

/* `out` shares no byte with any of the others. */
#define APART(out, ...)                                                                            \
    LG_ASSERT(all_apart(out, (struct span[]){__VA_ARGS__},                                         \
                        sizeof((struct span[]){__VA_ARGS__}) / sizeof(struct span)))
/* `out` is exactly `in`, or apart from it. */
#define SAME_OR_APART(out, in) LG_ASSERT((out).data == (in).data || apart(whole(out), whole(in)))
