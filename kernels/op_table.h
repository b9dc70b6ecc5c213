/* kernels/ops.def as data: what each operation takes, for whoever looks at calls without knowing them (the
 * checks, the trace). Made once per process, at the first question; it lives for ever. */
#pragma once
#include "kernels/backend.h"
#include <stdio.h>

typedef enum lg_operand_types { /* what a tensor may be; see ops.def */
#define LG_TYPES_OF(t) 1 << t
                                LG_TYPES_F = 1 << 16, /* these two depend on the device */
                                LG_TYPES_S = 1 << 17,
                                LG_TYPES_W = LG_TYPES_F | LG_TYPES_S,
                                LG_TYPES_FLOATS = LG_TYPES_OF(LG_F32) | LG_TYPES_OF(LG_F64) |
                                                  LG_TYPES_OF(LG_F16) | LG_TYPES_OF(LG_BF16),
                                LG_TYPES_F64 = LG_TYPES_OF(LG_F64),
                                LG_TYPES_I32 = LG_TYPES_OF(LG_I32),
                                LG_TYPES_I64 = LG_TYPES_OF(LG_I64),
                                LG_TYPES_U8 = LG_TYPES_OF(LG_U8),
                                LG_TYPES_F_OR_U8 = LG_TYPES_F | LG_TYPES_U8
#undef LG_TYPES_OF
} lg_operand_types;

enum { LG_FACTORS_MAX = 4, LG_OPERANDS_MAX = 16, LG_SCALARS_MAX = 16, LG_OPERAND_NAME_BYTES = 32 };

/* One dimension: number times the letters. */
struct lg_dim {
    int64_t number;
    int n;
    char letter[LG_FACTORS_MAX];
};

struct lg_operand {
    char name[LG_OPERAND_NAME_BYTES]; /* "x", "norm.x" */
    size_t at;                        /* of the (first) tensor in the arguments */
    lg_operand_types types;
    bool out, optional, any_shape, aligned;
    int max;         /* > 0: an array of so many tensors */
    size_t count_at; /* of the int that says how many of them are used */
    size_t adds_at;  /* of an output: of the bool that says that it is added to; 0: it never is */
    int rank, row;   /* row: the dimension with which a row begins; rank: it is contiguous */
    int rows_as;     /* its rows lie as far apart as this operand's; -1: as they like */
    struct lg_dim dim[LG_RANK_MAX];
    int with; /* it is absent with this operand; -1: with none */
    int same; /* it names the same tensor as this operand; -1: none */
    uint32_t may_be,
        may_be_first; /* bits of operands on which it may lie exactly; of arrays: of whose first */
};

typedef enum lg_scalar_kind {
    LG_SCALAR_bool,
    LG_SCALAR_int,
    LG_SCALAR_int64_t,
    LG_SCALAR_uint64_t,
    LG_SCALAR_double,
    LG_SCALAR_lg_act,
    LG_SCALAR_lg_rows8
} lg_scalar_kind;

struct lg_scalar {
    char name[LG_OPERAND_NAME_BYTES];
    size_t at;
    lg_scalar_kind kind;
    int max;     /* > 0: an array */
    char letter; /* a size that dims call so, else 0 */
};

struct lg_op_info {
    const char *name;
    size_t args_bytes; /* of its argument struct */
    int n_operands, n_scalars;
    struct lg_operand operand[LG_OPERANDS_MAX];
    struct lg_scalar scalar[LG_SCALARS_MAX];
};

const struct lg_op_info *lg_op_info(lg_op_id op);
/* The scalars of a call as " name=value ...", doubles with so many digits (17: all of them). */
void lg_scalars_print(const struct lg_op_info *op, const void *args, int digits, FILE *to);
/* ops.c: calls the operation of this name. */
void lg_op_call(lg_stream *s, lg_op_id op, const void *args);

/* Does this call add to what lies in this output? */
static inline bool lg_operand_adds(const struct lg_operand *o, const void *args)
{
    return o->adds_at && *(const bool *)((const char *)args + o->adds_at);
}
/* How many tensors of an operand a call uses, and these. */
static inline int lg_operand_count(const struct lg_operand *o, const void *args)
{
    return o->max ? *(const int *)((const char *)args + o->count_at) : 1;
}
static inline const lg_tensor *lg_operand_at(const struct lg_operand *o, const void *args, int i)
{
    return (const lg_tensor *)((const char *)args + o->at) + i;
}
/* Whether its rows may lie apart: it has a | in ops.def. */
static inline bool lg_operand_has_rows(const struct lg_operand *o)
{
    return o->row < o->rank;
}
