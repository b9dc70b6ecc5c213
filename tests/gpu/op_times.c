/* See op_times.h. Design: the device's table of operations is replaced by one that notes the operation,
 * records an event and calls the operation. Every struct of arguments begins with two tensors, which are
 * what a row is known by (of those that take a list of tensors, the first two of the list). */
#include "tests/gpu/op_times.h"
#include "kernels/cuda/cuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLS_MAX = 1 << 16, ROWS_MAX = 512 };

struct row {
    lg_op_id op;
    lg_tensor x, y; /* shapes */
    bool other;     /* with an activation, of stride 2 */
    int calls;
    double ms;
};
static struct row rows[ROWS_MAX];
static int n_rows;
static struct {
    int row;
    cudaEvent_t event;
} calls[CALLS_MAX + 1];
static int n_calls;
static lg_device *timed;
static const struct lg_ops *real;

static const char *const NAMES[] = {
#define LG_OP(name, ...) #name,
#include "kernels/ops.def"
#undef LG_OP
};

static bool same_shape(const lg_tensor *a, const lg_tensor *b)
{
    return a->rank == b->rank && a->dtype == b->dtype && !memcmp(a->dim, b->dim, sizeof a->dim);
}

static int row_of(lg_op_id op, const lg_tensor *t, bool other)
{
    for (int i = 0; i < n_rows; i++)
        if (rows[i].op == op && rows[i].other == other && same_shape(&rows[i].x, &t[0]) &&
            same_shape(&rows[i].y, &t[1]))
            return i;
    LG_ASSERT(n_rows < ROWS_MAX);
    rows[n_rows] = (struct row){.op = op, .x = t[0], .y = t[1], .other = other};
    return n_rows++;
}

static void mark(const lg_stream *s, int row)
{
    LG_ASSERT(n_calls < CALLS_MAX || row < 0);
    cudaEvent_t *e = &calls[n_calls].event;
    if (!*e) LG_CUDA(cudaEventCreate(e));
    LG_CUDA(cudaEventRecord(*e, ((const lg_cuda_stream *)s)->cuda));
    calls[n_calls].row = row;
    if (row >= 0) n_calls++;
}

static bool is_other(lg_op_id op, const void *a)
{
    return op == LG_OP_conv2d_forward   ? ((const struct lg_conv2d_forward_args *)a)->stride > 1
           : op == LG_OP_linear_forward ? ((const struct lg_linear_forward_args *)a)->act
           : op == LG_OP_linear_backward_data
               ? ((const struct lg_linear_backward_data_args *)a)->act
               : false;
}
/* The two tensors that a call is known by. */
struct two_tensors {
    lg_tensor t[2];
};
static struct two_tensors tensors_of(lg_op_id op, const void *a)
{
    const lg_tensor *first = a;
    struct two_tensors r = {{first[0], first[1]}};
    if (op == LG_OP_norm_conv2d_forward)
        r.t[1] = ((const struct lg_norm_conv2d_forward_args *)a)->conv.y;
    if (op == LG_OP_attention_backward) r.t[1] = ((const struct lg_attention_backward_args *)a)->k;
    return r;
}
#define LG_OP(name, ...)                                                                           \
    static void timed_##name(lg_stream *s, const struct lg_##name##_args *a)                       \
    {                                                                                              \
        _Static_assert(sizeof *a >= 2 * sizeof(lg_tensor), "two tensors come first");              \
        mark(s, row_of(LG_OP_##name, tensors_of(LG_OP_##name, a).t, is_other(LG_OP_##name, a)));   \
        real->name(s, a);                                                                          \
    }
#include "kernels/ops.def"
#undef LG_OP
static const struct lg_ops TIMED = {
#define LG_OP(name, ...) .name = timed_##name,
#include "kernels/ops.def"
#undef LG_OP
};

/* cuda.h's ends the backend; here it is this program's. */
void lg_cuda_fatal(const char *what, const char *why, const char *file, int line)
{
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, why);
    abort();
}

void op_times_start(lg_device *device)
{
    LG_ASSERT(!timed);
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)device)->index));
    timed = device;
    real = device->ops;
    device->ops = &TIMED;
    n_rows = n_calls = 0;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct row *)a)->ms, y = ((const struct row *)b)->ms;
    return (x < y) - (x > y);
}

static void describe(const lg_tensor *t)
{
    printf(" ");
    for (int i = 0; i < t->rank && i < LG_RANK_MAX; i++)
        printf("%s%lld", i ? "x" : "", (long long)t->dim[i]);
}

void op_times_print(lg_stream *stream, int turns)
{
    double sum = 0;
    mark(stream, -1);
    lg_stream_sync(stream);
    timed->ops = real;
    timed = NULL;
    for (int i = 0; i < n_calls; i++) {
        float ms;
        LG_CUDA(cudaEventElapsedTime(&ms, calls[i].event, calls[i + 1].event));
        rows[calls[i].row].ms += ms;
        rows[calls[i].row].calls++;
        sum += ms;
    }
    qsort(rows, (size_t)n_rows, sizeof *rows, by_time);
    for (int i = 0; i < n_rows; i++) {
        const struct row *r = &rows[i];
        printf("  %7.3f ms = %3d x %7.4f  %4.1f %%  %s", r->ms / turns, r->calls / turns,
               r->ms / r->calls, 100 * r->ms / sum, NAMES[r->op]);
        describe(&r->x);
        describe(&r->y);
        printf("%s\n", !r->other ? "" : r->op == LG_OP_conv2d_forward ? " halved" : " act");
    }
    printf("  %7.3f ms: all %d operations of a turn\n", sum / turns, n_calls / turns);
}
