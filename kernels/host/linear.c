/* The linear operations. oneDNN takes contiguous matrices (onednn.c); a call with several products side by side, or with
 * rows of w that lie apart, is cut into such calls, whose operands are copied into scratch memory. */
#include "kernels/host/host.h"
#include <string.h>

/* Copies, at the beginning of scratch memory; base NULL: they are only counted. */
struct room {
    char *base;
    size_t used;
};

static lg_tensor take(struct room *r, int64_t rows, int64_t row)
{
    lg_tensor t = lg_t2(r->base ? r->base + r->used : NULL, LG_F32, rows, row);
    r->used += lg_host_align(lg_tensor_bytes(&t));
    return t;
}

static void copy(lg_tensor from, lg_tensor to)
{
    const int64_t apart = lg_row_stride(&from, 1), next = lg_row_stride(&to, 1);
    for (int64_t i = 0; i < from.dim[0]; i++)
        memcpy((float *)to.data + i * next, (const float *)from.data + i * apart,
               (size_t)from.dim[1] * sizeof(float));
}

/* Piece i of n along dimension 1: of features; along dimension 0: of a weight's rows. */
static lg_tensor piece(lg_tensor t, int dim, int64_t i, int64_t n)
{
    return lg_slice(t, dim, i * (t.dim[dim] / n), t.dim[dim] / n);
}

static lg_tensor like_piece(struct room *r, lg_tensor t, int64_t n)
{
    return take(r, t.dim[0], t.dim[1] / n);
}

/* What is left of the scratch memory behind the copies. */
static lg_stream behind(const lg_stream *s, const struct room *r)
{
    lg_stream rest = *s;
    LG_ASSERT(r->used <= s->scratch_bytes);
    rest.scratch = (char *)s->scratch + r->used;
    rest.scratch_bytes -= r->used;
    return rest;
}

/* ---- forward ---- */

static int64_t products_of_forward(const struct lg_linear_forward_args *a)
{
    return a->x.dim[1] / a->w.dim[1];
}

/* Product i of n as a call of contiguous matrices, those that have to be copied in `r`. */
static struct lg_linear_forward_args forward_part(const struct lg_linear_forward_args *a, int64_t i,
                                                  int64_t n, struct room *r)
{
    struct lg_linear_forward_args b = *a;
    b.w = piece(a->w, 0, i, n);
    if (n > 1) b.x = like_piece(r, a->x, n), b.y = like_piece(r, a->y, n);
    if (!lg_is_contiguous(&b.w)) b.w = take(r, b.w.dim[0], b.w.dim[1]);
    return b;
}

void lg_host_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    const int64_t n = products_of_forward(a);
    for (int64_t i = 0; i < n; i++) {
        struct room r = {.base = s->scratch};
        const struct lg_linear_forward_args b = forward_part(a, i, n, &r);
        lg_stream rest = behind(s, &r);
        if (n > 1) copy(piece(a->x, 1, i, n), b.x);
        if (!lg_is_contiguous(&a->w)) copy(piece(a->w, 0, i, n), b.w);
        lg_onednn_linear_forward(&rest, &b);
        if (n > 1) copy(b.y, piece(a->y, 1, i, n));
    }
}

/* ---- backward ---- */

static int64_t products_of_data(const struct lg_linear_backward_data_args *a)
{
    return a->dx.dim[1] / a->w.dim[1];
}

static struct lg_linear_backward_data_args data_part(const struct lg_linear_backward_data_args *a,
                                                     int64_t i, int64_t n, struct room *r)
{
    struct lg_linear_backward_data_args b = *a;
    b.w = piece(a->w, 0, i, n);
    if (n > 1) b.dy = like_piece(r, a->dy, n), b.dx = like_piece(r, a->dx, n);
    if (!lg_is_contiguous(&b.w)) b.w = take(r, b.w.dim[0], b.w.dim[1]);
    return b;
}

void lg_host_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    const int64_t n = products_of_data(a);
    for (int64_t i = 0; i < n; i++) {
        struct room r = {.base = s->scratch};
        const struct lg_linear_backward_data_args b = data_part(a, i, n, &r);
        lg_stream rest = behind(s, &r);
        if (n > 1) copy(piece(a->dy, 1, i, n), b.dy);
        if (n > 1 && a->accumulate) copy(piece(a->dx, 1, i, n), b.dx);
        if (!lg_is_contiguous(&a->w)) copy(piece(a->w, 0, i, n), b.w);
        lg_onednn_linear_backward_data(&rest, &b);
        if (n > 1) copy(b.dx, piece(a->dx, 1, i, n));
    }
}

static int64_t products_of_weight(const struct lg_linear_backward_weight_args *a)
{
    return a->x.dim[1] / a->dw.dim[1];
}

static struct lg_linear_backward_weight_args weight_part(
    const struct lg_linear_backward_weight_args *a, int64_t i, int64_t n, struct room *r)
{
    struct lg_linear_backward_weight_args b = *a;
    b.dw = piece(a->dw, 0, i, n);
    if (n > 1) b.dy = like_piece(r, a->dy, n), b.x = like_piece(r, a->x, n);
    return b;
}

void lg_host_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    const int64_t n = products_of_weight(a);
    for (int64_t i = 0; i < n; i++) {
        struct room r = {.base = s->scratch};
        const struct lg_linear_backward_weight_args b = weight_part(a, i, n, &r);
        lg_stream rest = behind(s, &r);
        if (n > 1) copy(piece(a->dy, 1, i, n), b.dy), copy(piece(a->x, 1, i, n), b.x);
        lg_onednn_linear_backward_weight(&rest, &b);
    }
}

/* ---- scratch memory ---- */

/* All parts have one shape. */
size_t lg_host_linear_scratch(struct lg_onednn *o, lg_op_id op, const void *args)
{
    struct room r = {0};
    union {
        struct lg_linear_forward_args forward;
        struct lg_linear_backward_data_args data;
        struct lg_linear_backward_weight_args weight;
    } part;
    if (op == LG_OP_linear_forward)
        part.forward = forward_part(args, 0, products_of_forward(args), &r);
    else if (op == LG_OP_linear_backward_data)
        part.data = data_part(args, 0, products_of_data(args), &r);
    else
        part.weight = weight_part(args, 0, products_of_weight(args), &r);
    return r.used + lg_onednn_scratch(o, op, &part);
}
