/* A tensor is a view: pointer, type, shape, strides. Element (i, j, ...) lies i stride[0] + j stride[1] + ...
 * elements behind data. It owns nothing, and copying one copies no data. A part of another tensor is a view with
 * the strides of the whole; what the constructors below make is contiguous: row-major, last dimension fastest,
 * no gaps. Which views an operation takes stands in ops.def. Shape comments read (B, T, C) from slowest to
 * fastest. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum lg_dtype { LG_F32, LG_F64, LG_F16, LG_BF16, LG_I32, LG_U8, LG_I64 } lg_dtype;
enum { LG_RANK_MAX = 6 };

typedef struct lg_tensor {
    void *data; /* device memory; NULL means "absent" where an operation allows it */
    lg_dtype dtype;
    int rank;
    int64_t dim[LG_RANK_MAX];    /* 1 from rank on */
    int64_t stride[LG_RANK_MAX]; /* in elements; 1 from rank on */
} lg_tensor;

size_t lg_dtype_bytes(lg_dtype t);
const char *lg_dtype_name(lg_dtype t); /* "f32" */
/* Elements, and what they take: of a view with gaps less than the memory from its first to its last one. */
int64_t lg_numel(const lg_tensor *t);
size_t lg_tensor_bytes(const lg_tensor *t);

/* A contiguous tensor. */
lg_tensor lg_tensor_of(void *data, lg_dtype t, int rank, const int64_t *dim);

/* Indices [from, from + count) of one dimension. */
lg_tensor lg_slice(lg_tensor t, int dim, int64_t from, int64_t count);
/* One dimension as two: (n / inner, inner). */
lg_tensor lg_split(lg_tensor t, int dim, int64_t inner);

/* Whether the dimensions from .. to - 1 go through memory like a single one of this stride. A dimension of 1 may
 * have any stride: nobody takes a step along it. */
bool lg_dims_merge(const lg_tensor *t, int from, int to, int64_t stride);
bool lg_is_contiguous(const lg_tensor *t);
/* From one row to the next, a row being what lies behind the dimensions before `row`, which merge. At least a
 * row's length where there is only one. */
int64_t lg_row_stride(const lg_tensor *t, int row);

static inline lg_tensor lg_t1(void *data, lg_dtype t, int64_t a)
{
    return lg_tensor_of(data, t, 1, &a);
}
static inline lg_tensor lg_t2(void *data, lg_dtype t, int64_t a, int64_t b)
{
    const int64_t dim[] = {a, b};
    return lg_tensor_of(data, t, 2, dim);
}
static inline lg_tensor lg_t3(void *data, lg_dtype t, int64_t a, int64_t b, int64_t c)
{
    const int64_t dim[] = {a, b, c};
    return lg_tensor_of(data, t, 3, dim);
}
static inline lg_tensor lg_t4(void *data, lg_dtype t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t dim[] = {a, b, c, d};
    return lg_tensor_of(data, t, 4, dim);
}
#define LG_NONE ((lg_tensor){0})
