/* What op_check.c refuses and what it lets pass.
 *
 * Design: op_tensors.def says what an operation takes. From that each check makes a call that is
 * right, spoils one thing about one tensor, or nothing, and wants the call refused, or let through,
 * as the words of the tensor say. Nothing runs: the device is one whose operations only say that
 * they were reached, so tensors need no memory; each lies a MiB behind the one before. A refusal is
 * a failed assertion, which --wrap (tests/sim/sim.mk) turns into a jump back.
 *
 * Invariant: every trial has one outcome that passes. */
#include "base/check.h"
#include "kernels/backend.h"
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- a device that computes nothing ---- */

static bool reached; /* the operation was let through */
#define LG_OP(name, ...)                                                                           \
    static void reach_##name(lg_stream *s, const struct lg_##name##_args *a)                       \
    {                                                                                              \
        reached = true;                                                                            \
    }
#include "kernels/ops.def"
#undef LG_OP
static const struct lg_ops REACH = {
#define LG_OP(name, ...) .name = reach_##name,
#include "kernels/ops.def"
#undef LG_OP
};

static size_t scratch_wanted;
static size_t scratch_bytes(lg_device *d, lg_op_id op, const void *args)
{
    return scratch_wanted;
}
static lg_device nothing = {.ops = &REACH, .scratch_bytes = scratch_bytes};
static lg_stream real = {.device = &nothing}, dry = {.device = &nothing, .dry = true};

/* ---- the table ---- */

enum types {
    U8 = 1 << LG_U8,
    I32 = 1 << LG_I32,
    I64 = 1 << LG_I64,
    F64 = 1 << LG_F64,
    FLOATS = 1 << LG_F32 | 1 << LG_F64 | 1 << LG_F16 | 1 << LG_BF16,
    F = 1 << 8, /* these two depend on the device */
    S = 1 << 9,
    W = F | S,
    F_OR_U8 = F | U8,
};
static const lg_dtype DTYPES[] = {LG_F32, LG_F64, LG_F16, LG_BF16, LG_I32, LG_U8, LG_I64};

static const struct tensor {
    lg_op_id op;
    size_t at; /* in the operation's arguments */
    const char *field;
    unsigned types;
    bool out, optional, any_shape, aligned, cropped;
    const char *dims, *rows_as, *may_be, *is;
} TENSORS[] = {
#define TENSOR(name, member, t, o, d, ...)                                                         \
    {.op = LG_OP_##name,                                                                           \
     .at = offsetof(struct lg_##name##_args, member),                                              \
     .field = #member,                                                                             \
     .types = t,                                                                                   \
     .out = o,                                                                                     \
     .dims = d,                                                                                    \
     __VA_ARGS__},
#define IN(name, member, t, ...)  TENSOR(name, member, t, false, __VA_ARGS__)
#define OUT(name, member, t, ...) TENSOR(name, member, t, true, __VA_ARGS__)
#include "tests/unit/op_tensors.def"
};

/* The tensor of the operation behind t; NULL: the first one, and behind the last one. */
static const struct tensor *next_of(lg_op_id op, const struct tensor *t)
{
    for (t = t ? t + 1 : TENSORS; t < TENSORS + LG_ARRAY_LEN(TENSORS); t++)
        if (t->op == op) return t;
    return NULL;
}

static int64_t size_of[128] = {
    ['B'] = 2,    ['C'] = 8,  ['D'] = 11, ['H'] = 5,  ['I'] = 3, ['K'] = 10, ['M'] = 6,
    ['N'] = 7,    ['O'] = 8,  ['Q'] = 3,  ['T'] = 5,  ['V'] = 9, ['W'] = 9,  ['b'] = 5,
    ['e'] = 1037, ['d'] = 13, ['h'] = 3,  ['n'] = 33, ['p'] = 2, ['y'] = 3,  ['z'] = 4,
};

/* Dimension i of "B 2C|yp", as text that a separator or the end follows. */
static const char *word(const char *dims, int i)
{
    while (i--) dims = strpbrk(dims, " |") + 1;
    return dims;
}

static int rank_of(const char *dims)
{
    int rank = 1;
    while ((dims = strpbrk(dims, " |"))) dims++, rank++;
    return rank;
}

static int64_t dim_of(const char *dims, int i)
{
    const char *w = word(dims, i);
    char *end;
    int64_t number = strtol(w, &end, 10), product = end > w ? number : 1;
    for (; isalpha(*end); end++) product *= size_of[(int)*end];
    return product;
}

/* The dimensions before the |, 0: none. */
static int rows_of(const char *dims)
{
    const char *bar = strchr(dims, '|');
    int rows = 0;
    while (bar && word(dims, rows) < bar) rows++;
    return rows;
}

/* Elements from the first to the last one, gaps between rows counted. */
static int64_t extent(const struct tensor *t)
{
    int64_t rows = 1, row = 1;
    for (int i = 0; i < rank_of(t->dims); i++)
        *(i < rows_of(t->dims) ? &rows : &row) *= dim_of(t->dims, i);
    return (rows - 1) * (row + 1) + row;
}

/* A letter alone, which no tensor of the call has but here. */
static bool is_free(const struct tensor *t, int i)
{
    const char *w = word(t->dims, i);
    int uses = 0;
    if (!isalpha(*w) || strcspn(w, " |") != 1) return false;
    for (const struct tensor *u = NULL; (u = next_of(t->op, u));)
        for (const char *c = u->dims; *c; c++) uses += *c == *w;
    return uses == 1;
}

static bool names(const char *list, const char *field)
{
    const char *at = list ? strstr(list, field) : NULL;
    return at && (at == list || at[-1] == ' ') && strchr(" ", at[strlen(field)]);
}

/* The tensor whose memory this one has: itself but for .is. */
static const struct tensor *root(const struct tensor *t)
{
    if (!t->is) return t;
    for (const struct tensor *u = NULL; (u = next_of(t->op, u));)
        if (!strcmp(u->field, t->is)) return u;
    fail_msg("no tensor %s", t->is);
    return NULL;
}

static lg_dtype stats(void)
{
    return nothing.dtype == LG_F64 ? LG_F64 : LG_F32;
}

static bool takes(unsigned types, lg_dtype d)
{
    return types & 1U << d || (types & F && d == nothing.dtype) || (types & S && d == stats());
}

static lg_dtype first_type(unsigned types)
{
    return types & F ? nothing.dtype : types & S ? stats() : (lg_dtype)__builtin_ctz(types);
}

/* ---- calls ---- */

union call {
#define LG_OP(name, ...) struct lg_##name##_args name;
#include "kernels/ops.def"
#undef LG_OP
};

static const struct operation {
    const char *name;
    void (*run)(lg_stream *, const union call *);
    void (*begin)(union call *);
} OPERATIONS[LG_OP_COUNT];

static lg_tensor *tensor_of(union call *c, const struct tensor *t)
{
    return (lg_tensor *)(void *)((char *)c + t->at);
}

static uintptr_t home(const struct tensor *t)
{
    return (uintptr_t)(root(t) - TENSORS + 1) << 20;
}

static size_t bytes_of(const struct tensor *t)
{
    return (size_t)extent(t) * lg_dtype_bytes(first_type(t->types));
}

/* Puts a tensor, by whatever name, to a place of memory. */
static void put(union call *c, const struct tensor *t, uintptr_t at)
{
    for (const struct tensor *u = NULL; (u = next_of(t->op, u));)
        if (root(u) == root(t)) tensor_of(c, u)->data = (void *)at;
}

/* Its strides, from its dimensions; those of rows are `gap` more than a row's length. */
static void lay(lg_tensor *x, int rows, int64_t gap)
{
    int64_t stride = 1;
    for (int i = x->rank - 1; i >= 0; i--) {
        if (i == rows - 1) stride += gap;
        x->stride[i] = stride;
        stride *= x->dim[i];
    }
}

static union call right_call(lg_op_id op)
{
    union call c = {0};
    OPERATIONS[op].begin(&c);
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        lg_tensor *x = tensor_of(&c, t);
        *x = (lg_tensor){(void *)home(t), first_type(t->types), rank_of(t->dims), {0}, {0}};
        for (int i = 0; i < LG_RANK_MAX; i++) x->dim[i] = i < x->rank ? dim_of(t->dims, i) : 1;
        lay(x, rows_of(t->dims), 1);
    }
    return c;
}

static jmp_buf back;
static bool armed;
static int trials, wrong;

void __real_lg_assert_failed(const char *, const char *, int, const char *)
    __attribute__((noreturn));
void __wrap_lg_assert_failed(const char *, const char *, int, const char *)
    __attribute__((noreturn));
void __wrap_lg_assert_failed(const char *expr, const char *file, int line, const char *func)
{
    if (!armed) __real_lg_assert_failed(expr, file, line, func);
    armed = false;
    longjmp(back, 1);
}

static bool is_refused(lg_stream *s, lg_op_id op, const union call *c)
{
    reached = false;
    armed = true;
    if (setjmp(back)) return true;
    OPERATIONS[op].run(s, c);
    armed = false;
    assert_int_equal(reached, !s->dry);
    return false;
}

static void expect(bool allowed, lg_op_id op, const union call *c, const char *what, ...)
{
    trials++;
    if (is_refused(&real, op, c) == !allowed) return;
    char text[256];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    print_error("%s in %s: %s: %s\n", OPERATIONS[op].name, lg_dtype_name(nothing.dtype), text,
                allowed ? "refused" : "let through");
    wrong++;
}

/* check: of one operation; must not be for nothing. */
static void for_all_operations(void (*check)(lg_op_id))
{
    static const lg_dtype COMPUTE[] = {LG_F64, LG_F32, LG_BF16};
    trials = wrong = 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(COMPUTE); i++) {
        nothing.dtype = COMPUTE[i];
        for (int op = 0; op < LG_OP_COUNT; op++) check((lg_op_id)op);
    }
    assert_true(trials >= LG_OP_COUNT * (int)LG_ARRAY_LEN(COMPUTE));
    assert_int_equal(wrong, 0);
}

#define LG_OP(name, ...)                                                                           \
    static void run_##name(lg_stream *s, const union call *c)                                      \
    {                                                                                              \
        lg_##name(s, &c->name);                                                                    \
    }
#include "kernels/ops.def"
#undef LG_OP
#define CALL(op, ...)                                                                              \
    static void begin_##op(union call *c)                                                          \
    {                                                                                              \
        c->op = (struct lg_##op##_args){__VA_ARGS__};                                              \
    }
#include "tests/unit/op_tensors.def"
static const struct operation OPERATIONS[LG_OP_COUNT] = {
#define LG_OP(name, ...) {#name, run_##name, begin_##name},
#include "kernels/ops.def"
#undef LG_OP
};

/* ---- each thing that is said of a tensor ---- */

static void check_types(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        for (size_t i = 0; i < LG_ARRAY_LEN(DTYPES); i++) {
            union call c = right_call(op);
            tensor_of(&c, t)->dtype = DTYPES[i];
            expect(takes(t->types, DTYPES[i]), op, &c, "%s is %s", t->field,
                   lg_dtype_name(DTYPES[i]));
        }
    }
}

static void types(void **state)
{
    for_all_operations(check_types);
}

static void check_dimensions(const struct tensor *t)
{
    for (int i = 0; i < rank_of(t->dims); i++) {
        for (int by = -1; by <= 1; by += 2) {
            union call c = right_call(t->op);
            tensor_of(&c, t)->dim[i] += by;
            lay(tensor_of(&c, t), rows_of(t->dims), 1);
            const bool cropped = t->cropped && by < 0 && (i == 1 || i == 2);
            expect(is_free(t, i) || cropped, t->op, &c, "%s, dimension %d changed by %d", t->field,
                   i, by);
        }
    }
}

static void check_ranks(const struct tensor *t)
{
    union call c = right_call(t->op);
    lg_tensor *x = tensor_of(&c, t);
    for (int rank = x->rank; x->rank <= LG_RANK_MAX;) {
        x->rank++;
        expect(t->any_shape && x->rank <= LG_RANK_MAX, t->op, &c, "%s, rank %d for %d", t->field,
               x->rank, rank);
    }
    c = right_call(t->op);
    if (x->rank > 1) {
        x->rank--;
        x->dim[x->rank - 1] *= x->dim[x->rank];
        lay(x, 0, 0);
        expect(t->any_shape, t->op, &c, "%s, two dimensions in one", t->field);
    }
}

static void check_shapes(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        check_dimensions(t);
        check_ranks(t);
        for (const char *s = t->dims; *s; s++) { /* all agree, on no element */
            int64_t size = size_of[(int)*s];
            if (!isalpha(*s)) continue;
            size_of[(int)*s] = 0;
            union call c = right_call(op);
            expect(false, op, &c, "%c is 0", *s);
            size_of[(int)*s] = size;
        }
    }
}

static void shapes(void **state)
{
    for_all_operations(check_shapes);
}

static bool is_tied(const struct tensor *t)
{
    bool tied = t->rows_as != NULL;
    for (const struct tensor *u = NULL; (u = next_of(t->op, u));)
        tied |= u->rows_as && !strcmp(u->rows_as, t->field);
    return tied;
}

/* The tensor itself, and those that must have its row stride. */
static bool goes_with(const struct tensor *t, const struct tensor *u)
{
    const char *name = t->rows_as ? t->rows_as : t->field;
    return !strcmp(u->rows_as ? u->rows_as : u->field, name);
}

static void check_strides(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        const int rows = rows_of(t->dims);
        for (int i = 0; i < rank_of(t->dims); i++) {
            union call c = right_call(op);
            if (dim_of(t->dims, i) == 1) continue;
            tensor_of(&c, t)->stride[i] += 2;
            expect(rows == 1 && i == 0 && !is_tied(t), op, &c, "%s, stride %d", t->field, i);
        }
        if (rows == 0) continue;
        union call alone = right_call(op), all = alone;
        lay(tensor_of(&alone, t), rows, 3);
        expect(!is_tied(t), op, &alone, "%s, rows farther apart", t->field);
        for (const struct tensor *u = NULL; (u = next_of(op, u));)
            if (goes_with(t, u)) lay(tensor_of(&all, u), rows, 3);
        expect(true, op, &all, "%s and those with it, rows farther apart", t->field);
    }
}

/* Of a dimension of 1, where the operation takes one, and of a single row. */
static void check_free_strides(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        for (int i = 0; i < rank_of(t->dims); i++) {
            const int letter = *word(t->dims, i);
            int64_t size = size_of[letter];
            size_of[letter] = 1;
            union call c = right_call(op);
            if (isalpha(letter) && dim_of(t->dims, i) == 1 && !is_refused(&real, op, &c)) {
                tensor_of(&c, t)->stride[i] = 1000;
                expect(true, op, &c, "%s, stride %d of %c = 1", t->field, i, letter);
                tensor_of(&c, t)->stride[i] = -1;
                expect(true, op, &c, "%s, stride %d of %c = 1", t->field, i, letter);
            }
            size_of[letter] = size;
        }
    }
}

static void strides(void **state)
{
    for_all_operations(check_strides);
    for_all_operations(check_free_strides);
}

static void check_absence(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        union call c = right_call(op);
        tensor_of(&c, t)->data = NULL;
        expect(t->optional, op, &c, "%s, no memory", t->field);
        *tensor_of(&c, t) = LG_NONE;
        expect(t->optional, op, &c, "%s absent", t->field);
    }
}

static void absence(void **state)
{
    for_all_operations(check_absence);
}

static void check_alignment(lg_op_id op)
{
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        union call c = right_call(op);
        put(&c, t, home(t) + 1);
        expect(first_type(t->types) == LG_U8, op, &c, "%s begins on an odd byte", t->field);
        put(&c, t, home(t) + 8);
        expect(!t->aligned, op, &c, "%s begins on byte 8", t->field);
    }
}

static void alignment(void **state)
{
    for_all_operations(check_alignment);
}

/* An output is moved over each other tensor, and so that it just does not touch it. */
static void check_pair(const struct tensor *out, const struct tensor *other)
{
    const uintptr_t to = home(other), piece = 16; /* what every tensor may begin on */
    const size_t size = bytes_of(out), other_size = bytes_of(other);
    const bool same = names(out->may_be, other->field);
    const struct {
        const char *how;
        uintptr_t at;
        bool allowed;
    } PLACES[] = {
        {"exactly over", to, same},
        {"over the end of", (to + other_size - 1) / piece * piece, false},
        {"over the start of", (to - size + piece) / piece * piece, false},
        {"right behind", (to + other_size + piece - 1) / piece * piece, true},
        {"right before", (to - size) / piece * piece, true},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(PLACES); i++) {
        assert_true(i == 0 || !same || PLACES[i].at != to);
        union call c = right_call(out->op);
        put(&c, out, PLACES[i].at);
        expect(PLACES[i].allowed, out->op, &c, "%s %s %s", out->field, PLACES[i].how, other->field);
    }
}

static void check_memory(lg_op_id op)
{
    union call right = right_call(op);
    expect(true, op, &right, "nothing is wrong");
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        if (t->is) { /* but lies elsewhere */
            union call c = right;
            tensor_of(&c, t)->data = (char *)tensor_of(&c, t)->data + (1 << 18);
            expect(false, op, &c, "%s is not %s", t->field, t->is);
        }
        for (const struct tensor *other = NULL; (other = next_of(op, other));)
            if (t->out && other != t && !other->is) check_pair(t, other);
    }
}

static void memory(void **state)
{
    for_all_operations(check_memory);
}

/* ---- what is said of single operations ---- */

static void *element(lg_tensor t, size_t i)
{
    return (char *)t.data + i * lg_dtype_bytes(t.dtype);
}

static void swap(int64_t *dim)
{
    int64_t first = dim[0];
    dim[0] = dim[1], dim[1] = first;
}

/* Rows of (rows, D) or (samples, rows, heads, d). */
static void apart(lg_tensor *t, int64_t stride)
{
    int64_t row = 1;
    for (int i = t->rank / 2; i < t->rank; i++) row *= t->dim[i];
    lay(t, t->rank / 2, stride - row);
}

/* A matrix with twice as many columns. */
static void twice(lg_tensor *t)
{
    t->dim[1] *= 2;
    t->stride[0] *= 2;
}

#define AT_LINE_(name, line) name##line
#define AT_LINE(name, line)  AT_LINE_(name, line)
#define CHANGE(op, ...)                                                                            \
    static void AT_LINE(change_, __LINE__)(union call * c)                                         \
    {                                                                                              \
        struct lg_##op##_args *a = &c->op;                                                         \
        __VA_ARGS__;                                                                               \
    }
#define REFUSED(...) CHANGE(__VA_ARGS__)
#define ALLOWED(...) CHANGE(__VA_ARGS__)
#include "tests/unit/op_tensors.def"
static const struct {
    bool allowed;
    lg_op_id op;
    const char *text;
    void (*change)(union call *);
} CHANGES[] = {
#define REFUSED(name, ...) {false, LG_OP_##name, #__VA_ARGS__, AT_LINE(change_, __LINE__)},
#define ALLOWED(name, ...) {true, LG_OP_##name, #__VA_ARGS__, AT_LINE(change_, __LINE__)},
#include "tests/unit/op_tensors.def"
};

/* A change of dimensions is to be let through or refused for them, not for strides that are not theirs. */
static void lay_changed(union call *c, lg_op_id op)
{
    union call right = right_call(op);
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        lg_tensor *x = tensor_of(c, t);
        if (memcmp(x->dim, tensor_of(&right, t)->dim, sizeof x->dim) != 0)
            lay(x, rows_of(t->dims), 1);
    }
}

static void check_changes(lg_op_id op)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(CHANGES); i++) {
        if (CHANGES[i].op != op) continue;
        union call c = right_call(op);
        CHANGES[i].change(&c);
        lay_changed(&c, op);
        expect(CHANGES[i].allowed, op, &c, "%s", CHANGES[i].text);
    }
}

static void changes(void **state)
{
    for_all_operations(check_changes);
}

/* The scratch memory that it asks for must be there. On a dry stream shapes are checked, pointers are
 * not looked at, and nothing runs. */
static void check_scratch(lg_op_id op)
{
    union call c = right_call(op);
    dry.scratch_need = 0;
    for (scratch_wanted = 4; scratch_wanted > 0; scratch_wanted--) {
        real.scratch_bytes = scratch_wanted - 1;
        expect(false, op, &c, "too little scratch memory");
        real.scratch_bytes = scratch_wanted;
        expect(true, op, &c, "scratch memory");
        for (const struct tensor *t = NULL; (t = next_of(op, t));) tensor_of(&c, t)->data = NULL;
        assert_false(is_refused(&dry, op, &c));
        assert_int_equal(dry.scratch_need, 4);
        c = right_call(op);
    }
    for (const struct tensor *t = NULL; (t = next_of(op, t));) {
        c = right_call(op);
        tensor_of(&c, t)->dim[0]--;
        assert_int_equal(is_refused(&dry, op, &c), !is_free(t, 0));
        *tensor_of(&c, t) = LG_NONE;
        assert_int_equal(is_refused(&dry, op, &c), !t->optional);
    }
}

static void scratch(void **state)
{
    for_all_operations(check_scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(types),   cmocka_unit_test(shapes),    cmocka_unit_test(strides),
        cmocka_unit_test(absence), cmocka_unit_test(alignment), cmocka_unit_test(memory),
        cmocka_unit_test(changes), cmocka_unit_test(scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
