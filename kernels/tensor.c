/* Sizes and names of element types; see tensor.h. */
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
