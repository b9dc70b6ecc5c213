/* Checks calls against ops.def.
 *
 * Design: one walk over the operands of a call finds those that are there, with type, place and dimensions.
 * Letters get their values from sizes first, then from the first dimension that leaves only one letter open,
 * until no dimension teaches anything new; every later one must agree. Then the memory: rows that belong together
 * lie equally far apart, and an output shares no byte with any other operand but where the table says so. Rules that
 * concern one operation alone stand below the walk, in `rule`.
 *
 * A tensor is absent when its rank is 0 (LG_NONE) or, on a stream that is not dry, its pointer NULL; on a dry
 * stream every pointer may be NULL. Contents (ids in range, lengths of at least 1) lie on the device and are the
 * kernel's to check. */
#include "kernels/op_check.h"
#include "base/check.h"
#include "kernels/adamw8.h"
#include "kernels/op_table.h"
#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* An operand of this call, of an array each element. */
struct part {
    const struct lg_operand *o;
    const lg_tensor *t;
    int operand, element;
};
enum { PARTS_MAX = LG_OPERANDS_MAX + LG_RANKS_MAX, LETTERS = 128 };

struct call {
    const lg_stream *s;
    const struct lg_op_info *op;
    const char *args;
    int64_t letter[LETTERS]; /* 0: not known yet */
    struct part part[PARTS_MAX];
    int n;
};

static _Noreturn void refuse(const struct call *c, const struct lg_operand *o, const char *why)
{
    char text[160];
    snprintf(text, sizeof text, "%s.%s %s", c->op->name, o ? o->name : "", why);
    lg_assert_failed(text, __FILE__, __LINE__, __func__);
}

static bool is_absent(const struct call *c, const lg_tensor *t)
{
    return t->rank == 0 || (!t->data && !c->s->dry);
}

/* ---- types and places ---- */

static bool is_type(const struct call *c, lg_operand_types types, lg_dtype t)
{
    lg_dtype compute = c->s->device->dtype, stats = compute == LG_F64 ? LG_F64 : LG_F32;
    return (types & 1 << t) || ((types & LG_TYPES_F) && t == compute) ||
           ((types & LG_TYPES_S) && t == stats);
}

static int64_t rows_of(const struct lg_operand *o, const lg_tensor *t)
{
    int64_t rows = 1;
    for (int i = 0; lg_operand_has_rows(o) && i < o->row; i++) rows *= t->dim[i];
    return rows;
}

static void check_strides(const struct call *c, const struct lg_operand *o, const lg_tensor *t)
{
    const int row = lg_operand_has_rows(o) ? o->row : 0;
    if (!lg_dims_merge(t, row, t->rank, 1)) refuse(c, o, "is not contiguous");
    if (row == 0) return;
    const int64_t stride = lg_row_stride(t, row);
    if (!lg_dims_merge(t, 0, row, stride)) refuse(c, o, "has rows that lie at several distances");
    if (stride < lg_numel(t) / rows_of(o, t)) refuse(c, o, "has rows that lie on each other");
}

static void check_tensor(const struct call *c, const struct lg_operand *o, const lg_tensor *t)
{
    if (!is_type(c, o->types, t->dtype)) refuse(c, o, "has a type that it may not have");
    if (!o->any_shape && t->rank != o->rank) refuse(c, o, "has another rank");
    if (t->rank < 0 || t->rank > LG_RANK_MAX) refuse(c, o, "has too many dimensions");
    for (int i = 0; i < t->rank; i++)
        if (t->dim[i] <= 0) refuse(c, o, "has a dimension of 0 or less");
    check_strides(c, o, t);
    if ((uintptr_t)t->data % (o->aligned ? 16 : lg_dtype_bytes(t->dtype)) != 0)
        refuse(c, o, "begins on an address that is not aligned");
}

static void collect(struct call *c, int operand)
{
    const struct lg_operand *o = &c->op->operand[operand];
    int count = lg_operand_count(o, c->args);
    if (o->max && (count < (o->optional ? 0 : 1) || count > o->max))
        refuse(c, o, "has more or fewer tensors than it may have");
    for (int e = 0; e < count; e++) {
        const lg_tensor *t = lg_operand_at(o, c->args, e);
        if (is_absent(c, t)) {
            if (!o->optional || o->max) refuse(c, o, "is absent");
            continue;
        }
        check_tensor(c, o, t);
        if (e > 0 && t->dtype != lg_operand_at(o, c->args, 0)->dtype)
            refuse(c, o, "has several types");
        LG_ASSERT(c->n < PARTS_MAX);
        c->part[c->n++] = (struct part){.o = o, .t = t, .operand = operand, .element = e};
    }
    if (o->with >= 0 && is_absent(c, lg_operand_at(o, c->args, 0)) !=
                            is_absent(c, lg_operand_at(&c->op->operand[o->with], c->args, 0)))
        refuse(c, o, "is there without the one that it belongs to, or the other way round");
}

/* ---- dimensions ---- */

static void take_sizes(struct call *c)
{
    for (int i = 0; i < c->op->n_scalars; i++) {
        const struct lg_scalar *x = &c->op->scalar[i];
        if (!x->letter) continue;
        int value = *(const int *)(c->args + x->at);
        if (value < 1) refuse(c, NULL, x->name);
        c->letter[(int)x->letter] = value;
    }
}

/* True when it has been looked at for the last time; *ret_learned: a letter has got its value. */
static bool fit(struct call *c, const struct lg_operand *o, const struct lg_dim *d, int64_t is,
                bool *ret_learned)
{
    int64_t known = d->number;
    char open = 0;
    for (int i = 0; i < d->n; i++) {
        int64_t value = c->letter[(int)d->letter[i]];
        if (!value && open) return false;
        if (value)
            known *= value;
        else
            open = d->letter[i];
    }
    if (open ? is % known != 0 : is != known) refuse(c, o, "has dimensions that do not fit");
    if (!open) return true;
    c->letter[(int)open] = is / known;
    return *ret_learned = true;
}

static bool fit_all(struct call *c, bool *ret_learned)
{
    bool all = true;
    for (const struct part *p = c->part; p < c->part + c->n; p++) {
        if (p->o->any_shape)
            all &= fit(c, p->o, &p->o->dim[0], lg_numel(p->t), ret_learned);
        else
            for (int i = 0; i < p->o->rank; i++)
                all &= fit(c, p->o, &p->o->dim[i], p->t->dim[i], ret_learned);
    }
    return all;
}

static void check_dims(struct call *c)
{
    bool learned = true, all = false;
    take_sizes(c);
    while (learned && !all) {
        learned = false;
        all = fit_all(c, &learned);
    }
    if (!all) refuse(c, NULL, "leaves dimensions open");
}

/* ---- memory ---- */

/* A kernel takes one row stride for both. With a single row there is nothing to agree on. */
static void check_rows(const struct call *c, const struct part *p)
{
    if (p->o->rows_as < 0) return;
    const struct lg_operand *as = &c->op->operand[p->o->rows_as];
    const lg_tensor *t = lg_operand_at(as, c->args, 0);
    if (is_absent(c, t) || rows_of(p->o, p->t) == 1) return;
    if (lg_row_stride(p->t, p->o->row) != lg_row_stride(t, as->row))
        refuse(c, p->o, "has rows at another distance than those that it goes with");
}

/* `rows` pieces of `row` bytes, `stride` bytes apart. Slices of one packed buffer interleave without sharing a
 * byte. */
struct span {
    uintptr_t at;
    size_t row, stride;
    int64_t rows; /* 0: none */
};

static struct span span_of(const struct part *p)
{
    const lg_tensor *t = p->t;
    size_t bytes = lg_tensor_bytes(t);
    int64_t rows = rows_of(p->o, t);
    struct span s = {.at = (uintptr_t)t->data,
                     .row = bytes / (size_t)rows,
                     .stride = bytes,
                     .rows = t->data ? rows : 0};
    if (lg_operand_has_rows(p->o))
        s.stride = (size_t)lg_row_stride(t, p->o->row) * lg_dtype_bytes(t->dtype);
    return s;
}

static uintptr_t span_end(const struct span *a)
{
    return a->at + (size_t)(a->rows - 1) * a->stride + a->row;
}

static bool are_apart(const struct span *a, const struct span *b)
{
    if (a->rows == 0 || b->rows == 0 || span_end(a) <= b->at || span_end(b) <= a->at) return true;
    if (a->stride != b->stride) return false;
    size_t ahead = b->at >= a->at ? (b->at - a->at) % a->stride
                                  : (a->stride - (a->at - b->at) % a->stride) % a->stride;
    return ahead >= a->row && ahead + b->row <= a->stride;
}

static bool may_lie_on(const struct part *out, const struct part *other)
{
    const uint32_t bit = (uint32_t)1 << other->operand;
    return (out->o->may_be & bit) || ((out->o->may_be_first & bit) && other->element == 0);
}

static bool have_one_shape(const lg_tensor *a, const lg_tensor *b)
{
    return a->dtype == b->dtype && a->rank == b->rank &&
           !memcmp(a->dim, b->dim, (size_t)a->rank * sizeof a->dim[0]);
}

static bool are_one(const lg_tensor *a, const lg_tensor *b)
{
    return a->data == b->data && a->dtype == b->dtype && lg_numel(a) == lg_numel(b);
}

static void check_pair(const struct call *c, const struct part *a, const struct span *sa,
                       const struct part *b, const struct span *sb)
{
    bool named_twice = a->o->same == b->operand || b->o->same == a->operand;
    if (named_twice) {
        if (a->t->data != b->t->data || !have_one_shape(a->t, b->t))
            refuse(c, a->o, "is not the tensor that it must be");
        return;
    }
    if (!a->o->out && !b->o->out) return;
    if (((a->o->out && may_lie_on(a, b)) || (b->o->out && may_lie_on(b, a))) && are_one(a->t, b->t))
        return;
    if (!are_apart(sa, sb)) refuse(c, a->o->out ? a->o : b->o, "lies on another tensor");
}

static void check_memory(const struct call *c)
{
    struct span span[PARTS_MAX];
    for (int i = 0; i < c->n; i++) {
        span[i] = span_of(&c->part[i]);
        check_rows(c, &c->part[i]);
        for (int k = 0; k < i; k++) check_pair(c, &c->part[i], &span[i], &c->part[k], &span[k]);
    }
}

/* ---- what a table cannot say ---- */

#define ARGS(name) const struct lg_##name##_args *a = (const void *)c->args
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) refuse(c, NULL, #condition);                                             \
    } while (0)

static bool is_there(const struct call *c, const lg_tensor *t)
{
    return !is_absent(c, t);
}

static void rule_linear_forward(const struct call *c)
{
    ARGS(linear_forward);
    const bool bare = !is_there(c, &a->bias) && !is_there(c, &a->residual) && a->act == LG_ACT_NONE;
    REQUIRE(!is_there(c, &a->pre) || a->act != LG_ACT_NONE);
    REQUIRE(a->x.dim[1] == a->w.dim[1] || bare);
}

static void rule_linear_backward_data(const struct call *c)
{
    ARGS(linear_backward_data);
    REQUIRE(is_there(c, &a->pre) == (a->act != LG_ACT_NONE));
    REQUIRE(a->act != LG_ACT_NONE ? !a->accumulate : !is_there(c, &a->dbias));
    REQUIRE(a->dx.dim[1] == a->w.dim[1] || a->act == LG_ACT_NONE);
}

static void rule_linear_backward_weight(const struct call *c)
{
    ARGS(linear_backward_weight);
    REQUIRE(a->x.dim[1] == a->dw.dim[1] || !is_there(c, &a->dbias));
}

static void rule_act_backward(const struct call *c)
{
    ARGS(act_backward);
    REQUIRE(!a->accumulate || a->dx.data != a->dy.data || !a->dx.data);
}

static void rule_add_forward(const struct call *c)
{
    ARGS(add_forward);
    REQUIRE(lg_numel(&a->a) % lg_numel(&a->b) == 0);
}

static void require_modulation(const struct call *c, const struct lg_norm_modulate_backward_args *a)
{
    REQUIRE(is_there(c, &a->scale) || !is_there(c, &a->dscale));
}

static void rule_norm_modulate_backward(const struct call *c)
{
    ARGS(norm_modulate_backward);
    require_modulation(c, a);
}

static void rule_norm_residual_backward(const struct call *c)
{
    ARGS(norm_residual_backward);
    require_modulation(c, &a->norm);
    REQUIRE(!is_there(c, &a->norm.dbias));
}

/* In place means vector by vector. */
static void require_same_rows(const struct call *c, const lg_tensor *from, const lg_tensor *to)
{
    REQUIRE(from->data != to->data || !from->data ||
            lg_row_stride(from, 2) == lg_row_stride(to, 2));
}

static void rule_rope(const struct call *c)
{
    ARGS(rope);
    REQUIRE(a->turned >= 1 && a->turned <= a->x.dim[2]);
    require_same_rows(c, &a->x, &a->y);
}

static void require_angles(const struct call *c, const lg_tensor *cos, lg_tensor x)
{
    REQUIRE(!is_there(c, cos) || 2 * cos->dim[1] == x.dim[3]);
}

static void rule_rms_norm_forward(const struct call *c)
{
    ARGS(rms_norm_forward);
    require_same_rows(c, &a->x, &a->y);
    require_angles(c, &a->cos, a->x);
}

static void rule_rms_norm_backward(const struct call *c)
{
    ARGS(rms_norm_backward);
    require_same_rows(c, &a->dy, &a->dx);
    require_angles(c, &a->cos, a->dy);
    REQUIRE(!a->accumulate || (!is_there(c, &a->cos) && (a->dx.data != a->dy.data || !a->dx.data)));
}

static void rule_dequantize_rows(const struct call *c)
{
    ARGS(dequantize_rows);
    REQUIRE(a->format < LG_ROWS8_COUNT);
}

static int64_t extent_of_rows(const lg_tensor *t)
{
    return (t->dim[0] - 1) * lg_row_stride(t, 1) + t->dim[1];
}

static void rule_copy_rows(const struct call *c)
{
    ARGS(copy_rows);
    REQUIRE(a->groups >= 0);
    REQUIRE(a->groups <= 1 || a->x_apart >= extent_of_rows(&a->x));
    REQUIRE(a->groups <= 1 || a->y_apart >= extent_of_rows(&a->y));
}

static void require_streams(const struct call *c, const lg_tensor *q, const lg_tensor *k,
                            int first_queries, int first_keys)
{
    REQUIRE(first_queries >= 0 && first_queries < q->dim[1]);
    REQUIRE(first_keys >= 0 && first_keys < k->dim[1]);
}

static void rule_attention_forward(const struct call *c)
{
    ARGS(attention_forward);
    const bool streams = a->first_queries || a->first_keys;
    require_streams(c, &a->q, &a->k, a->first_queries, a->first_keys);
    REQUIRE(!streams || !(is_there(c, &a->bias) || is_there(c, &a->k_length) || a->causal));
    REQUIRE(!a->causal || a->q.dim[1] == a->k.dim[1]);
    REQUIRE(!a->o_low.rank || lg_dtype_bytes(a->o.dtype) == 2);
}

static void rule_attention_backward(const struct call *c)
{
    ARGS(attention_backward);
    require_streams(c, &a->q, &a->k, a->first_queries, a->first_keys);
    REQUIRE(!(a->first_queries || a->first_keys) || !is_there(c, &a->k_length));
    REQUIRE(!a->o_low.rank || lg_dtype_bytes(a->o.dtype) == 2);
}

static void require_groups(const struct call *c, int groups, int64_t channels)
{
    REQUIRE(channels % groups == 0);
}

static void rule_group_norm_forward(const struct call *c)
{
    ARGS(group_norm_forward);
    require_groups(c, a->groups, a->x.dim[3]);
}

static void rule_group_norm_backward(const struct call *c)
{
    ARGS(group_norm_backward);
    require_groups(c, a->groups, a->x.dim[3]);
    REQUIRE(!a->accumulate || a->dx.data != a->dy.data || !a->dx.data);
}

static void rule_group_mean_var_forward(const struct call *c)
{
    ARGS(group_mean_var_forward);
    require_groups(c, (int)a->mean_var.dim[1], a->x.dim[3]);
}

static void require_windows(const struct call *c, const struct lg_conv2d_forward_args *a)
{
    int64_t h = a->x.dim[1], w = a->x.dim[2], kh = a->w.dim[1], kw = a->w.dim[2];
    REQUIRE(a->stride >= 1);
    REQUIRE(a->top >= 0 && a->left >= 0 && a->bottom >= 0 && a->right >= 0);
    REQUIRE(h + a->top + a->bottom >= kh && w + a->left + a->right >= kw);
    REQUIRE(a->y.dim[1] == (h + a->top + a->bottom - kh) / a->stride + 1);
    REQUIRE(a->y.dim[2] == (w + a->left + a->right - kw) / a->stride + 1);
}

static void require_conv(const struct call *c, const struct lg_conv2d_forward_args *a)
{
    require_windows(c, a);
    if (is_there(c, &a->mean_var)) require_groups(c, (int)a->mean_var.dim[1], a->w.dim[0]);
}

static void rule_conv2d_backward_data(const struct call *c)
{
    ARGS(conv2d_backward_data);
    require_windows(c, &(struct lg_conv2d_forward_args){.x = a->dx,
                                                        .w = a->w,
                                                        .y = a->dy,
                                                        .stride = a->stride,
                                                        .top = a->top,
                                                        .left = a->left,
                                                        .bottom = a->bottom,
                                                        .right = a->right});
}

static void rule_conv2d_backward_weight(const struct call *c)
{
    ARGS(conv2d_backward_weight);
    require_windows(c, &(struct lg_conv2d_forward_args){.x = a->x,
                                                        .w = a->dw,
                                                        .y = a->dy,
                                                        .stride = a->stride,
                                                        .top = a->top,
                                                        .left = a->left,
                                                        .bottom = a->bottom,
                                                        .right = a->right});
}

static void require_doubled(const struct call *c, const lg_tensor *small, const lg_tensor *large)
{
    for (int i = 1; i <= 2; i++)
        REQUIRE(large->dim[i] == 2 * small->dim[i] || large->dim[i] == 2 * small->dim[i] - 1);
}

static void rule_upsample2x_forward(const struct call *c)
{
    ARGS(upsample2x_forward);
    require_doubled(c, &a->x, &a->y);
}

static void rule_upsample2x_backward(const struct call *c)
{
    ARGS(upsample2x_backward);
    require_doubled(c, &a->dx, &a->dy);
}

static void rule_conv2d_forward(const struct call *c)
{
    ARGS(conv2d_forward);
    require_conv(c, a);
}

static void rule_norm_conv2d_forward(const struct call *c)
{
    ARGS(norm_conv2d_forward);
    require_groups(c, a->norm.groups, a->norm.x.dim[3]);
    require_conv(c, &a->conv);
    REQUIRE((uintptr_t)a->norm.x.data % 16 ==
            0); /* the convolution's, where the norm rides on it */
}

static void rule_conv3d_forward(const struct call *c)
{
    ARGS(conv3d_forward);
    const int64_t *x = a->x.dim, *w = a->w.dim;
    const int64_t *y = is_there(c, &a->y) ? a->y.dim : a->normed.dim;
    REQUIRE(is_there(c, &a->y) || is_there(c, &a->normed));
    REQUIRE(a->stride_time >= 1 && a->stride >= 1 && a->pad >= 0);
    REQUIRE(x[0] >= w[1] && x[1] + 2 * a->pad >= w[2] && x[2] + 2 * a->pad >= w[3]);
    REQUIRE(y[0] == (x[0] - w[1]) / a->stride_time + 1);
    REQUIRE(y[1] == (x[1] + 2 * a->pad - w[2]) / a->stride + 1);
    REQUIRE(y[2] == (x[2] + 2 * a->pad - w[3]) / a->stride + 1);
}

static void rule_depth_to_space_forward(const struct call *c)
{
    ARGS(depth_to_space_forward);
    const int64_t dropped = a->x.dim[0] * a->time - a->y.dim[0];
    REQUIRE(dropped >= 0 && dropped < a->time);
    REQUIRE(!is_there(c, &a->repeated) || a->x.dim[3] % a->repeated.dim[3] == 0);
}

static void rule_clip_posterior_forward(const struct call *c)
{
    ARGS(clip_posterior_forward);
    const int64_t C = a->mean.dim[0];
    REQUIRE(a->x.dim[3] == 2 * C || a->x.dim[3] == C + 1);
}

static void require_tile(const struct call *c, lg_tensor tile, lg_tensor of, int top, int left)
{
    REQUIRE(top >= 0 && top + tile.dim[1] <= of.dim[1]);
    REQUIRE(left >= 0 && left + tile.dim[2] <= of.dim[2]);
}

static void rule_tile_take(const struct call *c)
{
    ARGS(tile_take);
    require_tile(c, a->y, a->x, a->top, a->left);
}

static void rule_tile_add(const struct call *c)
{
    ARGS(tile_add);
    require_tile(c, a->x, a->y, a->top, a->left);
}

static void rule_t5_bias_forward(const struct call *c)
{
    ARGS(t5_bias_forward);
    int64_t buckets = a->table.dim[0];
    REQUIRE(buckets >= 4 && buckets % 2 == 0);
    REQUIRE(a->max_distance > buckets / 4);
}

static void rule_timestep_embedding_forward(const struct call *c)
{
    ARGS(timestep_embedding_forward);
    int64_t D = a->out.dim[1];
    REQUIRE(D % 2 == 0 && (double)D / 2 > a->freq_shift);
}

static void rule_reduce_ranks(const struct call *c)
{
    ARGS(reduce_ranks);
    REQUIRE(a->squares.dim[0] == (a->y.dim[0] + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE);
}

static void rule_adamw(const struct call *c)
{
    ARGS(adamw);
    REQUIRE(a->t >= 1);
}

static void rule_adamw8(const struct call *c)
{
    ARGS(adamw8);
    REQUIRE(a->t >= 1);
    REQUIRE(a->m_max.dim[0] == (a->w.dim[0] + LG_ADAMW8_BLOCK - 1) / LG_ADAMW8_BLOCK);
}

#define RULE(name) [LG_OP_##name] = rule_##name
static void (*const rule[LG_OP_COUNT])(const struct call *) = {
    RULE(linear_forward),
    RULE(linear_backward_data),
    RULE(linear_backward_weight),
    RULE(act_backward),
    RULE(add_forward),
    RULE(norm_modulate_backward),
    RULE(norm_residual_backward),
    RULE(dequantize_rows),
    RULE(copy_rows),
    RULE(group_norm_forward),
    RULE(group_norm_backward),
    RULE(group_mean_var_forward),
    RULE(rope),
    RULE(rms_norm_forward),
    RULE(rms_norm_backward),
    RULE(attention_forward),
    RULE(attention_backward),
    RULE(conv2d_forward),
    RULE(norm_conv2d_forward),
    RULE(conv2d_backward_data),
    RULE(conv2d_backward_weight),
    RULE(upsample2x_forward),
    RULE(upsample2x_backward),
    RULE(conv3d_forward),
    RULE(depth_to_space_forward),
    RULE(clip_posterior_forward),
    RULE(tile_take),
    RULE(tile_add),
    RULE(t5_bias_forward),
    RULE(timestep_embedding_forward),
    RULE(reduce_ranks),
    RULE(adamw),
    RULE(adamw8),
};

void lg_op_check(const lg_stream *s, lg_op_id op, const void *args)
{
    struct call c;
    c.s = s;
    c.op = lg_op_info(op);
    c.args = args;
    c.n = 0;
    memset(c.letter, 0, sizeof c.letter);
    for (int i = 0; i < c.op->n_operands; i++) collect(&c, i);
    check_dims(&c);
    if (rule[op]) rule[op](&c);
    check_memory(&c);
}
