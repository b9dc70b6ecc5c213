/* A tensor is a view: pointer, type, shape. Contiguous, row-major, last dimension fastest. It owns
 * nothing. Shape comments read (B, T, C) from slowest to fastest. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef enum lg_dtype { LG_F32, LG_F64, LG_F16, LG_BF16, LG_I32, LG_U8, LG_I64 } lg_dtype;
enum { LG_RANK_MAX = 4 };

typedef struct lg_tensor {
    void *data; /* device memory; NULL means "absent" where an operation allows it */
    lg_dtype dtype;
    int rank;
    int64_t dim[LG_RANK_MAX];
} lg_tensor;

size_t lg_dtype_bytes(lg_dtype t);
const char *lg_dtype_name(lg_dtype t); /* "f32" */
int64_t lg_numel(const lg_tensor *t);
size_t lg_tensor_bytes(const lg_tensor *t);

static inline lg_tensor lg_t1(void *data, lg_dtype t, int64_t a)
{
    return (lg_tensor){data, t, 1, {a, 1, 1, 1}};
}
static inline lg_tensor lg_t2(void *data, lg_dtype t, int64_t a, int64_t b)
{
    return (lg_tensor){data, t, 2, {a, b, 1, 1}};
}
static inline lg_tensor lg_t3(void *data, lg_dtype t, int64_t a, int64_t b, int64_t c)
{
    return (lg_tensor){data, t, 3, {a, b, c, 1}};
}
static inline lg_tensor lg_t4(void *data, lg_dtype t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (lg_tensor){data, t, 4, {a, b, c, d}};
}
#define LG_NONE ((lg_tensor){0})
