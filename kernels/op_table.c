/* Makes the table of op_table.h from ops.def: the rows of each operation as they stand there, then, flat, with
 * those of its parts. A row that is wrong (a word that is no operand, too many) fails at the first question,
 * so in every test. */
#include "kernels/op_table.h"
#include "base/check.h"
#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* One row of ops.def. */
struct row {
    enum { TENSOR, NUMBER, PART_OF, SAME_AS, MAY_LIE } kind;
    const char *field;
    size_t at;
    lg_operand_types types;
    bool out, optional, any_shape, aligned;
    const char *dims, *with, *rows_as, *may_be, *other;
    size_t count; /* an offset */
    int max;
    size_t adds; /* offset; 0: it never does */
    lg_scalar_kind scalar;
    char letter;
    lg_op_id part;
};

#define ROW(field_, ...) {.field = #field_, .at = offsetof(args, field_), __VA_ARGS__},
#define ADDS(field_)     .adds = offsetof(args, field_)
#define OPERAND(field_, o, t, d, ...)                                                              \
    ROW(field_, .kind = TENSOR, .out = o, .types = LG_TYPES_##t, .dims = d, ##__VA_ARGS__)
#define IN(field_, t, ...)  OPERAND(field_, false, t, __VA_ARGS__)
#define OUT(field_, t, ...) OPERAND(field_, true, t, __VA_ARGS__)
#define INS(field_, max_, count_, t, ...)                                                          \
    OPERAND(field_, false, t, __VA_ARGS__, .max = max_, .count = offsetof(args, count_))
#define OUTS(field_, max_, count_, t, ...)                                                         \
    OPERAND(field_, true, t, __VA_ARGS__, .max = max_, .count = offsetof(args, count_))
#define SCALAR(type, field_) ROW(field_, .kind = NUMBER, .scalar = LG_SCALAR_##type)
#define SCALARS(type, field_, max_)                                                                \
    ROW(field_, .kind = NUMBER, .scalar = LG_SCALAR_##type, .max = max_)
#define SIZE(field_, letter_)                                                                      \
    ROW(field_, .kind = NUMBER, .scalar = LG_SCALAR_int, .letter = letter_[0])
#define PART(operation, field_) ROW(field_, .kind = PART_OF, .part = LG_OP_##operation)
#define SAME(field_, other_)    ROW(field_, .kind = SAME_AS, .other = #other_)
#define MAY_BE(field_, other_)  ROW(field_, .kind = MAY_LIE, .other = #other_)
#define LG_OP(name, ...)                                                                           \
    static const struct row *rows_of_##name(int *ret_n)                                            \
    {                                                                                              \
        typedef struct lg_##name##_args args;                                                      \
        static const struct row row[] = {__VA_ARGS__};                                             \
        *ret_n = (int)LG_ARRAY_LEN(row);                                                           \
        return row;                                                                                \
    }
#include "kernels/ops.def"
#undef LG_OP

static const struct {
    const char *name;
    size_t args_bytes;
    const struct row *(*rows)(int *ret_n);
} source[LG_OP_COUNT] = {
#define LG_OP(name, ...) {#name, sizeof(struct lg_##name##_args), rows_of_##name},
#include "kernels/ops.def"
#undef LG_OP
};

static struct lg_op_info table[LG_OP_COUNT];

/* ---- dimensions ---- */

static const char *parse_dim(const char *text, struct lg_dim *ret)
{
    *ret = (struct lg_dim){.number = 1};
    if (isdigit((unsigned char)*text))
        for (ret->number = 0; isdigit((unsigned char)*text); text++)
            ret->number = 10 * ret->number + (*text - '0');
    for (; isalpha((unsigned char)*text); text++) {
        LG_ASSERT(ret->n < LG_FACTORS_MAX);
        ret->letter[ret->n++] = *text;
    }
    return text;
}

static void parse_dims(const char *text, struct lg_operand *ret)
{
    ret->row = -1;
    for (ret->rank = 0; *text;) {
        LG_ASSERT(ret->rank < LG_RANK_MAX);
        text = parse_dim(text, &ret->dim[ret->rank++]);
        if (*text == '|') ret->row = ret->rank;
        LG_ASSERT(!*text || *text == ' ' || *text == '|');
        text += *text != 0;
    }
    if (ret->row < 0) ret->row = ret->rank;
}

/* ---- names ---- */

static void join(char ret[LG_OPERAND_NAME_BYTES], const char *prefix, const char *field)
{
    int n = snprintf(ret, LG_OPERAND_NAME_BYTES, "%s%s", prefix, field);
    LG_ASSERT(n > 0 && n < LG_OPERAND_NAME_BYTES);
}

/* The operand of this name; field: up to a blank, a bracket or the end. */
static int find(const struct lg_op_info *op, const char *prefix, const char *field)
{
    char name[LG_OPERAND_NAME_BYTES], word[LG_OPERAND_NAME_BYTES];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(field, " ["), field);
    join(name, prefix, word);
    for (int i = 0; i < op->n_operands; i++)
        if (!strcmp(op->operand[i].name, name)) return i;
    LG_ASSERT(!"an operand of ops.def");
    return -1;
}

/* "a b" or "x[0]" */
static void allow(struct lg_op_info *op, int out, const char *prefix, const char *words)
{
    struct lg_operand *o = &op->operand[out];
    for (const char *w = words; w; w = strchr(w, ' '), w += w != NULL) {
        uint32_t bit = (uint32_t)1 << find(op, prefix, w);
        bool first = !strncmp(w + strcspn(w, " ["), "[0]", 3);
        *(first ? &o->may_be_first : &o->may_be) |= bit;
    }
}

/* ---- rows ---- */

static void add_operand(struct lg_op_info *op, const struct row *r, const char *prefix, size_t at)
{
    LG_ASSERT(op->n_operands < LG_OPERANDS_MAX);
    struct lg_operand *o = &op->operand[op->n_operands++];
    *o = (struct lg_operand){.at = at + r->at,
                             .types = r->types,
                             .out = r->out,
                             .optional = r->optional,
                             .any_shape = r->any_shape,
                             .aligned = r->aligned,
                             .max = r->max,
                             .count_at = at + r->count,
                             .adds_at = r->adds ? at + r->adds : 0,
                             .with = -1,
                             .rows_as = -1,
                             .same = -1};
    join(o->name, prefix, r->field);
    parse_dims(r->dims, o);
    LG_ASSERT(!o->any_shape || (o->rank == 1 && o->dim[0].n == 1 && o->dim[0].number == 1));
}

static void add_scalar(struct lg_op_info *op, const struct row *r, const char *prefix, size_t at)
{
    LG_ASSERT(op->n_scalars < LG_SCALARS_MAX);
    struct lg_scalar *x = &op->scalar[op->n_scalars++];
    *x =
        (struct lg_scalar){.at = at + r->at, .kind = r->scalar, .max = r->max, .letter = r->letter};
    join(x->name, prefix, r->field);
}

static void tie(struct lg_op_info *op, const char *prefix, const struct row *r)
{
    struct lg_operand *o = &op->operand[find(op, prefix, r->field)];
    o->rows_as = find(op, prefix, r->rows_as);
    LG_ASSERT(lg_operand_has_rows(o) && lg_operand_has_rows(&op->operand[o->rows_as]));
}

/* The operands first, since the other words speak of them. */
static void add(struct lg_op_info *op, lg_op_id id, const char *prefix, size_t at)
{
    int n;
    const struct row *row = source[id].rows(&n);
    for (const struct row *r = row; r < row + n; r++) {
        char inner[LG_OPERAND_NAME_BYTES];
        if (r->kind == TENSOR) add_operand(op, r, prefix, at);
        if (r->kind == NUMBER) add_scalar(op, r, prefix, at);
        if (r->kind != PART_OF) continue;
        join(inner, r->field, ".");
        LG_ASSERT(!*prefix); /* a part has no parts */
        add(op, r->part, inner, at + r->at);
    }
    for (const struct row *r = row; r < row + n; r++) {
        if (r->kind == TENSOR && r->with)
            op->operand[find(op, prefix, r->field)].with = find(op, prefix, r->with);
        if (r->kind == TENSOR && r->rows_as) tie(op, prefix, r);
        if (r->kind == TENSOR && r->may_be)
            allow(op, find(op, prefix, r->field), prefix, r->may_be);
        if (r->kind == MAY_LIE) allow(op, find(op, prefix, r->field), prefix, r->other);
        if (r->kind == SAME_AS)
            op->operand[find(op, prefix, r->field)].same = find(op, prefix, r->other);
    }
}

static void make(void)
{
    for (int i = 0; i < LG_OP_COUNT; i++) {
        table[i].name = source[i].name;
        table[i].args_bytes = source[i].args_bytes;
        add(&table[i], (lg_op_id)i, "", 0);
    }
}

const struct lg_op_info *lg_op_info(lg_op_id op)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make);
    LG_ASSERT((int)op >= 0 && op < LG_OP_COUNT);
    return &table[op];
}

/* Returns the bytes that it takes in an array. */
static size_t print_scalar(lg_scalar_kind kind, const void *at, int digits, FILE *to)
{
    switch (kind) {
    case LG_SCALAR_bool:
        fprintf(to, "%d", *(const bool *)at);
        return sizeof(bool);
    case LG_SCALAR_int:
        fprintf(to, "%d", *(const int *)at);
        return sizeof(int);
    case LG_SCALAR_lg_act:
        fprintf(to, "%d", (int)*(const lg_act *)at);
        return sizeof(lg_act);
    case LG_SCALAR_lg_rows8:
        fprintf(to, "%d", (int)*(const lg_rows8 *)at);
        return sizeof(lg_rows8);
    case LG_SCALAR_int64_t:
        fprintf(to, "%" PRId64, *(const int64_t *)at);
        return sizeof(int64_t);
    case LG_SCALAR_uint64_t:
        fprintf(to, "%" PRIu64, *(const uint64_t *)at);
        return sizeof(uint64_t);
    case LG_SCALAR_double:
        fprintf(to, "%.*g", digits, *(const double *)at);
        return sizeof(double);
    }
    LG_ASSERT(!"a kind of scalar");
    return 0;
}

void lg_scalars_print(const struct lg_op_info *op, const void *args, int digits, FILE *to)
{
    for (const struct lg_scalar *x = op->scalar; x < op->scalar + op->n_scalars; x++) {
        const char *at = (const char *)args + x->at;
        fprintf(to, " %s=", x->name);
        for (int i = 0; i < LG_MAX(x->max, 1); i++) {
            if (i) fputc(',', to);
            at += print_scalar(x->kind, at, digits, to);
        }
    }
}
