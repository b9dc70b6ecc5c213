/* Element types, sizes, views; see tensor.h. */
#include "kernels/tensor.h"
#include "base/check.h"

static const struct {
    const char *name;
    size_t bytes;
} DTYPES[] = {
    [LG_F32] = {"f32", 4}, [LG_F64] = {"f64", 8}, [LG_F16] = {"f16", 2}, [LG_BF16] = {"bf16", 2},
    [LG_I32] = {"i32", 4}, [LG_U8] = {"u8", 1},   [LG_I64] = {"i64", 8},
};

size_t lg_dtype_bytes(lg_dtype t)
{
    LG_ASSERT((size_t)t < LG_ARRAY_LEN(DTYPES));
    return DTYPES[t].bytes;
}

const char *lg_dtype_name(lg_dtype t)
{
    return (size_t)t < LG_ARRAY_LEN(DTYPES) ? DTYPES[t].name : "?";
}

/* Product of the dimensions; 0 for LG_NONE, whose rank is 0. */
int64_t lg_numel(const lg_tensor *t)
{
    if (t->rank == 0) return 0;
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) {
        LG_ASSERT(!__builtin_mul_overflow(n, t->dim[i], &n) && t->dim[i] >= 0);
    }
    return n;
}

size_t lg_tensor_bytes(const lg_tensor *t)
{
    size_t bytes;
    LG_ASSERT(!__builtin_mul_overflow((size_t)lg_numel(t), lg_dtype_bytes(t->dtype), &bytes));
    return bytes;
}

/* ---- views ---- */

lg_tensor lg_tensor_of(void *data, lg_dtype dtype, int rank, const int64_t *dim)
{
    LG_ASSERT(rank >= 0 && rank <= LG_RANK_MAX);
    lg_tensor t = {.data = data, .dtype = dtype, .rank = rank};
    int64_t stride = 1;
    for (int i = LG_RANK_MAX - 1; i >= 0; i--) {
        t.dim[i] = i < rank ? dim[i] : 1;
        t.stride[i] = stride;
        LG_ASSERT(!__builtin_mul_overflow(stride, t.dim[i], &stride));
    }
    return t;
}

lg_tensor lg_slice(lg_tensor t, int dim, int64_t from, int64_t count)
{
    LG_ASSERT(dim >= 0 && dim < t.rank);
    LG_ASSERT(from >= 0 && count >= 0 && from <= t.dim[dim] - count);
    if (t.data) /* on a dry stream there may be none */
        t.data = (char *)t.data + from * t.stride[dim] * (int64_t)lg_dtype_bytes(t.dtype);
    t.dim[dim] = count;
    return t;
}

lg_tensor lg_split(lg_tensor t, int dim, int64_t inner)
{
    LG_ASSERT(dim >= 0 && dim < t.rank && t.rank < LG_RANK_MAX);
    LG_ASSERT(inner > 0 && t.dim[dim] % inner == 0);
    for (int i = t.rank++; i > dim; i--) t.dim[i] = t.dim[i - 1], t.stride[i] = t.stride[i - 1];
    t.dim[dim] /= inner;
    t.stride[dim] *= inner;
    t.dim[dim + 1] = inner;
    return t;
}

bool lg_dims_merge(const lg_tensor *t, int from, int to, int64_t stride)
{
    for (int i = to - 1; i >= from; i--)
        if (t->dim[i] != 1 &&
            (t->stride[i] != stride || __builtin_mul_overflow(stride, t->dim[i], &stride)))
            return false;
    return true;
}

bool lg_is_contiguous(const lg_tensor *t)
{
    return lg_dims_merge(t, 0, t->rank, 1);
}

int64_t lg_row_stride(const lg_tensor *t, int row)
{
    int64_t length = 1;
    for (int i = row; i < t->rank; i++) length *= t->dim[i];
    for (int i = row - 1; i >= 0; i--)
        if (t->dim[i] != 1) return t->stride[i];
    return LG_MAX(t->stride[row - 1], length);
}
