/* Matrix products and convolutions: every call of oneDNN (2.x, C API) in the project stands here.
 *
 * Design: a primitive is made when its shape is first seen and kept in a hash table of the device;
 * from then on a call sets the pointers of the primitive's memory objects and executes. Scratchpads
 * and reordered weights lie in the stream's scratch memory, whose size the same table knows.
 *
 * A row of a product must not depend on its slot or its neighbours. With AVX-512 (brgemm) and
 * SSE4.1 the matmul primitive keeps that for every shape tried; the AVX2 one does not (its tail
 * rows are summed in another order), so there x w^T and dy w run as 1x1 convolutions over M pixels,
 * which do keep it and are as fast. Weight gradients have no rows to keep apart and are always
 * matmul.
 *
 * Invariants: one instruction set per process (oneDNN's own limit). Every call that creates or runs
 * a primitive stands between enter() and leave(), which hold the lock and fix the calling thread's
 * number of OpenMP threads: it is a property of the thread, and the environment may say otherwise.
 */
#include "kernels/host/host.h"
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLE_SLOTS = 4096, KEY_WORDS = 17 };

enum kind { MATMUL = 1, CONV, CONV3D };
enum pass { FORWARD, DATA, WEIGHT }; /* of a convolution */

struct key {
    int64_t word[KEY_WORDS];
};

/* One shape of one operation: a product or convolution, its weights perhaps reordered first. In a backward src
 * and dst stand for the gradients of what they are in the forward, where these are read or made, and so do the
 * weights, which then are reordered last. */
struct entry {
    struct key key;
    enum pass pass;
    dnnl_primitive_t primitive,
        reorder; /* reorder is NULL when the weights are taken as they are */
    dnnl_memory_t src, weights, bias, dst, pad, plain_weights;
    size_t weights_bytes, pad_bytes; /* in scratch, in this order */
};

struct lg_onednn {
    pthread_mutex_t lock;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int threads;
    bool product_by_conv; /* AVX2 */
    int entries;
    struct entry *table[TABLE_SLOTS];
};

/* The pointers of one call. */
struct operands {
    const void *src, *weights, *bias, *dst;
};

/* A wrong descriptor is a bug here, a failed allocation ends the process: it will be restarted. */
static void check(dnnl_status_t status, const char *what)
{
    if (status == dnnl_success) return;
    fprintf(stderr, "oneDNN: %s: status %d\n", what, (int)status);
    LG_ASSERT(status == dnnl_success);
}
#define CHECK(call) check((call), #call)

static void enter(struct lg_onednn *o)
{
    LG_ASSERT(pthread_mutex_lock(&o->lock) == 0);
    omp_set_dynamic(0);
    omp_set_num_threads(o->threads);
}

static void leave(struct lg_onednn *o)
{
    LG_ASSERT(pthread_mutex_unlock(&o->lock) == 0);
}

static uint64_t hash(const struct key *k)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (int i = 0; i < KEY_WORDS; i++) h = (h ^ (uint64_t)k->word[i]) * 0x100000001b3u;
    return h ^ (h >> 29);
}

/* The slot that holds the key, or the empty one where it belongs. */
static struct entry **slot_of(struct lg_onednn *o, const struct key *k)
{
    for (uint64_t i = hash(k);; i++) {
        struct entry **slot = &o->table[i % TABLE_SLOTS];
        if (!*slot || memcmp(&(*slot)->key, k, sizeof *k) == 0) return slot;
    }
}

static struct entry *add_entry(struct lg_onednn *o, struct entry **slot, const struct key *k)
{
    LG_ASSERT(o->entries < TABLE_SLOTS / 2); /* shapes are few; thousands mean a leak of shapes */
    struct entry *e = calloc(1, sizeof *e);
    LG_ASSERT(e);
    e->key = *k;
    o->entries++;
    *slot = e;
    return e;
}

static dnnl_memory_t new_memory(struct lg_onednn *o, const dnnl_memory_desc_t *desc)
{
    dnnl_memory_t m = NULL;
    CHECK(dnnl_memory_create(&m, desc, o->engine, DNNL_MEMORY_NONE));
    return m;
}

/* User scratchpad; sum: dst += result. Freed by the caller. */
static dnnl_primitive_attr_t new_attr(bool sum)
{
    dnnl_primitive_attr_t attr = NULL;
    CHECK(dnnl_primitive_attr_create(&attr));
    CHECK(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user));
    if (sum) {
        dnnl_post_ops_t ops = NULL;
        CHECK(dnnl_post_ops_create(&ops));
        CHECK(dnnl_post_ops_append_sum(ops, 1.0f));
        CHECK(dnnl_primitive_attr_set_post_ops(attr, ops));
        CHECK(dnnl_post_ops_destroy(ops));
    }
    return attr;
}

/* Takes over pd. */
static void finish_entry(struct lg_onednn *o, struct entry *e, dnnl_primitive_desc_t pd)
{
    const dnnl_memory_desc_t *pad = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    CHECK(dnnl_primitive_create(&e->primitive, pd));
    e->pad_bytes = lg_host_align(dnnl_memory_desc_get_size(pad));
    e->pad = new_memory(o, pad);
    CHECK(dnnl_primitive_desc_destroy(pd));
}

/* c (m, n) = a (m, k) b (k, n) (+ bias) (+ c); c is contiguous, a and b are rows or columns. */
struct matmul_shape {
    int64_t m, n, k;
    bool a_transposed, b_transposed, bias, sum;
};

static struct entry *matmul_entry(struct lg_onednn *o, const struct matmul_shape *p)
{
    struct key key = {
        {MATMUL, p->m, p->n, p->k, p->a_transposed, p->b_transposed, p->bias, p->sum}};
    struct entry **slot = slot_of(o, &key);
    if (*slot) return *slot;
    struct entry *e = add_entry(o, slot, &key);
    dnnl_dims_t a_dim = {p->m, p->k}, b_dim = {p->k, p->n}, c_dim = {p->m, p->n}, v_dim = {1, p->n};
    dnnl_memory_desc_t a, b, c, v;
    CHECK(
        dnnl_memory_desc_init_by_tag(&a, 2, a_dim, dnnl_f32, p->a_transposed ? dnnl_ba : dnnl_ab));
    CHECK(
        dnnl_memory_desc_init_by_tag(&b, 2, b_dim, dnnl_f32, p->b_transposed ? dnnl_ba : dnnl_ab));
    CHECK(dnnl_memory_desc_init_by_tag(&c, 2, c_dim, dnnl_f32, dnnl_ab));
    CHECK(dnnl_memory_desc_init_by_tag(&v, 2, v_dim, dnnl_f32, dnnl_ab));
    dnnl_matmul_desc_t desc;
    CHECK(dnnl_matmul_desc_init(&desc, &a, &b, p->bias ? &v : NULL, &c));
    dnnl_primitive_attr_t attr = new_attr(p->sum);
    dnnl_primitive_desc_t pd = NULL;
    CHECK(dnnl_primitive_desc_create(&pd, &desc, attr, o->engine, NULL));
    CHECK(dnnl_primitive_attr_destroy(attr));
    e->src = new_memory(o, &a);
    e->weights = new_memory(o, &b);
    e->bias = p->bias ? new_memory(o, &v) : NULL;
    e->dst = new_memory(o, &c);
    finish_entry(o, e, pd);
    return e;
}

/* NHWC in and out; the weights lie at the strides given, in the order (Co, Ci, kh, kw). */
struct conv_shape {
    enum pass pass;
    int64_t n, ci, h, w, co, kh, kw, ho, wo;
    int64_t stride, top, left;  /* bottom and right follow from ho and wo */
    bool bias, sum, transposed; /* weights (Ci, Co) instead of (Co, kh, kw, Ci); 1x1 only */
};

/* Weights that lie as `plain` says, and are reordered where the primitive wants others. e->pass is set. */
static void take_weights(struct lg_onednn *o, struct entry *e, const dnnl_memory_desc_t *plain,
                         const dnnl_memory_desc_t *wanted)
{
    e->weights = new_memory(o, wanted);
    if (dnnl_memory_desc_equal(plain, wanted)) return;
    e->plain_weights = new_memory(o, plain);
    e->weights_bytes = lg_host_align(dnnl_memory_desc_get_size(wanted));
    dnnl_primitive_desc_t pd = NULL;
    const bool last = e->pass == WEIGHT;
    CHECK(dnnl_reorder_primitive_desc_create(&pd, last ? wanted : plain, o->engine,
                                             last ? plain : wanted, o->engine, NULL));
    CHECK(dnnl_primitive_create(&e->reorder, pd));
    CHECK(dnnl_primitive_desc_destroy(pd));
}

static void conv_weights(struct lg_onednn *o, struct entry *e, const struct conv_shape *p,
                         const dnnl_memory_desc_t *wanted)
{
    dnnl_dims_t dim = {p->co, p->ci, p->kh, p->kw};
    dnnl_dims_t stride = {p->kh * p->kw * p->ci, 1, p->kw * p->ci, p->ci};
    if (p->transposed) stride[0] = 1, stride[1] = p->co, stride[2] = stride[3] = 1;
    dnnl_memory_desc_t plain;
    CHECK(dnnl_memory_desc_init_by_strides(&plain, 4, dim, dnnl_f32, stride));
    take_weights(o, e, &plain, wanted);
}

struct conv_descs {
    dnnl_memory_desc_t src, weights, bias, dst;
    dnnl_dims_t step, before, after;
};

static dnnl_primitive_desc_t conv_forward(struct lg_onednn *o, const struct conv_shape *p,
                                          const struct conv_descs *d)
{
    dnnl_convolution_desc_t desc;
    dnnl_primitive_desc_t pd = NULL;
    CHECK(dnnl_convolution_forward_desc_init(&desc, dnnl_forward_inference, dnnl_convolution_direct,
                                             &d->src, &d->weights, p->bias ? &d->bias : NULL,
                                             &d->dst, d->step, d->before, d->after));
    dnnl_primitive_attr_t attr = new_attr(p->sum);
    CHECK(dnnl_primitive_desc_create(&pd, &desc, attr, o->engine, NULL));
    CHECK(dnnl_primitive_attr_destroy(attr));
    return pd;
}

/* Its library asks for a forward as a hint, which on a processor decides nothing. */
static dnnl_primitive_desc_t conv_backward(struct lg_onednn *o, const struct conv_shape *p,
                                           const struct conv_descs *d)
{
    dnnl_convolution_desc_t desc;
    dnnl_primitive_desc_t pd = NULL, hint = conv_forward(o, p, d);
    if (p->pass == DATA)
        CHECK(dnnl_convolution_backward_data_desc_init(&desc, dnnl_convolution_direct, &d->src,
                                                       &d->weights, &d->dst, d->step, d->before,
                                                       d->after));
    else
        CHECK(dnnl_convolution_backward_weights_desc_init(&desc, dnnl_convolution_direct, &d->src,
                                                          &d->weights, NULL, &d->dst, d->step,
                                                          d->before, d->after));
    dnnl_primitive_attr_t attr = new_attr(false);
    CHECK(dnnl_primitive_desc_create(&pd, &desc, attr, o->engine, hint));
    CHECK(dnnl_primitive_attr_destroy(attr));
    CHECK(dnnl_primitive_desc_destroy(hint));
    return pd;
}

static struct entry *conv_entry(struct lg_onednn *o, const struct conv_shape *p)
{
    struct key key = {{CONV, p->n, p->ci, p->h, p->w, p->co, p->kh, p->kw, p->ho, p->wo, p->stride,
                       p->top, p->left, p->bias, p->sum, p->transposed, p->pass}};
    struct entry **slot = slot_of(o, &key);
    if (*slot) return *slot;
    struct entry *e = add_entry(o, slot, &key);
    dnnl_dims_t s_dim = {p->n, p->ci, p->h, p->w}, w_dim = {p->co, p->ci, p->kh, p->kw},
                d_dim = {p->n, p->co, p->ho, p->wo}, b_dim = {p->co};
    struct conv_descs d = {.step = {p->stride, p->stride},
                           .before = {p->top, p->left},
                           .after = {(p->ho - 1) * p->stride + p->kh - p->h - p->top,
                                     (p->wo - 1) * p->stride + p->kw - p->w - p->left}};
    CHECK(dnnl_memory_desc_init_by_tag(&d.src, 4, s_dim, dnnl_f32, dnnl_nhwc));
    CHECK(dnnl_memory_desc_init_by_tag(&d.weights, 4, w_dim, dnnl_f32, dnnl_format_tag_any));
    CHECK(dnnl_memory_desc_init_by_tag(&d.dst, 4, d_dim, dnnl_f32, dnnl_nhwc));
    CHECK(dnnl_memory_desc_init_by_tag(&d.bias, 1, b_dim, dnnl_f32, dnnl_a));
    dnnl_primitive_desc_t pd =
        p->pass == FORWARD ? conv_forward(o, p, &d) : conv_backward(o, p, &d);
    e->pass = p->pass;
    e->src = new_memory(o, &d.src);
    e->bias = p->bias ? new_memory(o, &d.bias) : NULL;
    e->dst = new_memory(o, &d.dst);
    conv_weights(
        o, e, p,
        dnnl_primitive_desc_query_md(
            pd, p->pass == WEIGHT ? dnnl_query_diff_weights_md : dnnl_query_weights_md, 0));
    finish_entry(o, e, pd);
    return e;
}

/* A convolution over time of the frames of one result, so that its bits do not depend on how many there are. */
static struct entry *conv3d_entry(struct lg_onednn *o, const struct lg_conv3d_forward_args *a)
{
    const int64_t *x = a->x.dim, *w = a->w.dim, t = w[1];
    const int64_t *y = a->y.rank ? a->y.dim : a->normed.dim;
    const bool sum = a->residual.rank > 0;
    struct key key = {{CONV3D, x[1], x[2], x[3], w[0], t, w[2], w[3], a->stride, a->pad, sum}};
    struct entry **slot = slot_of(o, &key);
    if (*slot) return *slot;
    struct entry *e = add_entry(o, slot, &key);
    dnnl_dims_t s_dim = {1, x[3], t, x[1], x[2]}, w_dim = {w[0], x[3], t, w[2], w[3]},
                d_dim = {1, w[0], 1, y[1], y[2]}, b_dim = {w[0]};
    dnnl_dims_t step = {1, a->stride, a->stride}, before = {0, a->pad, a->pad},
                after = {0, (y[1] - 1) * a->stride + w[2] - x[1] - a->pad,
                         (y[2] - 1) * a->stride + w[3] - x[2] - a->pad};
    dnnl_memory_desc_t src, weights, bias, dst;
    CHECK(dnnl_memory_desc_init_by_tag(&src, 5, s_dim, dnnl_f32, dnnl_ndhwc));
    CHECK(dnnl_memory_desc_init_by_tag(&weights, 5, w_dim, dnnl_f32, dnnl_format_tag_any));
    CHECK(dnnl_memory_desc_init_by_tag(&dst, 5, d_dim, dnnl_f32, dnnl_ndhwc));
    CHECK(dnnl_memory_desc_init_by_tag(&bias, 1, b_dim, dnnl_f32, dnnl_a));
    dnnl_convolution_desc_t desc;
    dnnl_primitive_desc_t pd = NULL;
    CHECK(dnnl_convolution_forward_desc_init(&desc, dnnl_forward_inference, dnnl_convolution_direct,
                                             &src, &weights, &bias, &dst, step, before, after));
    dnnl_primitive_attr_t attr = new_attr(sum);
    CHECK(dnnl_primitive_desc_create(&pd, &desc, attr, o->engine, NULL));
    CHECK(dnnl_primitive_attr_destroy(attr));
    e->src = new_memory(o, &src);
    e->bias = new_memory(o, &bias);
    e->dst = new_memory(o, &dst);
    dnnl_dims_t stride = {t * w[2] * w[3] * w[4], 1, w[2] * w[3] * w[4], w[3] * w[4], w[4]};
    dnnl_memory_desc_t plain;
    CHECK(dnnl_memory_desc_init_by_strides(&plain, 5, w_dim, dnnl_f32, stride));
    take_weights(o, e, &plain, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0));
    finish_entry(o, e, pd);
    return e;
}

static void point(dnnl_memory_t m, const void *p)
{
    CHECK(dnnl_memory_set_data_handle(m, (void *)(uintptr_t)p));
}

static void reorder_weights(struct lg_onednn *o, struct entry *e)
{
    const bool last = e->pass == WEIGHT;
    dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, last ? e->weights : e->plain_weights},
                              {DNNL_ARG_TO, last ? e->plain_weights : e->weights}};
    CHECK(dnnl_primitive_execute(e->reorder, o->stream, LG_ARRAY_LEN(args), args));
}

/* Sets the pointers of the weights and of scratch memory, and brings the weights into order. */
static void prepare(struct lg_onednn *o, struct entry *e, lg_stream *s, const void *weights)
{
    LG_ASSERT(e->weights_bytes + e->pad_bytes <= s->scratch_bytes);
    char *scratch = s->scratch;
    if (e->reorder) point(e->plain_weights, weights);
    point(e->weights, e->reorder ? scratch : weights);
    point(e->pad, e->pad_bytes ? scratch + e->weights_bytes : NULL);
    if (e->reorder && e->pass != WEIGHT) reorder_weights(o, e);
}

static void compute(struct lg_onednn *o, struct entry *e, const struct operands *p)
{
    static const int ARG[][3] = {
        [FORWARD] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
        [DATA] = {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
        [WEIGHT] = {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST}};
    point(e->src, p->src);
    point(e->dst, p->dst);
    if (e->bias) point(e->bias, p->bias);
    dnnl_exec_arg_t args[] = {{ARG[e->pass][0], e->src},
                              {ARG[e->pass][1], e->weights},
                              {ARG[e->pass][2], e->dst},
                              {DNNL_ARG_SCRATCHPAD, e->pad},
                              {DNNL_ARG_BIAS, e->bias}};
    int count = (int)LG_ARRAY_LEN(args) - !e->bias;
    CHECK(dnnl_primitive_execute(e->primitive, o->stream, count, args));
}

static void execute(struct lg_onednn *o, struct entry *e, lg_stream *s, const struct operands *p)
{
    prepare(o, e, s, p->weights);
    compute(o, e, p);
    if (e->reorder && e->pass == WEIGHT) reorder_weights(o, e);
}

static bool present(const lg_tensor *t)
{
    return t->rank > 0 && t->data;
}

/* A product that keeps rows apart: dst (m, n) = src (m, k) weights (+ bias) (+ dst). weights are
 * (n, k), or (k, n) with k_first. */
static struct entry *product_entry(struct lg_onednn *o, int64_t m, int64_t n, int64_t k,
                                   bool k_first, bool bias, bool sum)
{
    if (!o->product_by_conv)
        return matmul_entry(
            o, &(struct matmul_shape){
                   .m = m, .n = n, .k = k, .b_transposed = !k_first, .bias = bias, .sum = sum});
    return conv_entry(o, &(struct conv_shape){.n = 1,
                                              .ci = k,
                                              .h = m,
                                              .w = 1,
                                              .co = n,
                                              .kh = 1,
                                              .kw = 1,
                                              .ho = m,
                                              .wo = 1,
                                              .stride = 1,
                                              .bias = bias,
                                              .sum = sum,
                                              .transposed = k_first});
}

static struct entry *forward_entry(struct lg_onednn *o, const struct lg_linear_forward_args *a,
                                   bool bias, bool sum)
{
    return product_entry(o, a->x.dim[0], a->w.dim[0], a->x.dim[1], false, bias, sum);
}

static struct entry *data_entry(struct lg_onednn *o, const struct lg_linear_backward_data_args *a)
{
    return product_entry(o, a->dy.dim[0], a->w.dim[1], a->dy.dim[1], true, false, a->accumulate);
}

static struct entry *weight_entry(struct lg_onednn *o,
                                  const struct lg_linear_backward_weight_args *a)
{
    return matmul_entry(o, &(struct matmul_shape){.m = a->dy.dim[1],
                                                  .n = a->x.dim[1],
                                                  .k = a->dy.dim[0],
                                                  .a_transposed = true,
                                                  .sum = a->accumulate});
}

static struct entry *conv2d_entry(struct lg_onednn *o, const struct lg_conv2d_forward_args *a,
                                  bool bias, bool sum)
{
    return conv_entry(o, &(struct conv_shape){.n = a->x.dim[0],
                                              .ci = a->x.dim[3],
                                              .h = a->x.dim[1],
                                              .w = a->x.dim[2],
                                              .co = a->w.dim[0],
                                              .kh = a->w.dim[1],
                                              .kw = a->w.dim[2],
                                              .ho = a->y.dim[1],
                                              .wo = a->y.dim[2],
                                              .stride = a->stride,
                                              .top = a->top,
                                              .left = a->left,
                                              .bias = bias,
                                              .sum = sum});
}

void lg_onednn_linear_forward(lg_stream *s, const struct lg_linear_forward_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    const lg_tensor *sum = present(&a->pre) ? &a->pre : &a->y;
    const bool adds = present(&a->residual);
    if (adds && a->residual.data != sum->data)
        memcpy(sum->data, a->residual.data, (size_t)lg_host_numel(sum) * sizeof(float));
    enter(o);
    execute(o, forward_entry(o, a, present(&a->bias), adds), s,
            &(struct operands){a->x.data, a->w.data, a->bias.data, sum->data});
    leave(o);
    if (a->act == LG_ACT_NONE) return;
    lg_host(s)->kernels->ops.act_forward(
        s, &(struct lg_act_forward_args){.x = *sum, .y = a->y, .act = a->act});
}

void lg_onednn_linear_backward_data(lg_stream *s, const struct lg_linear_backward_data_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    enter(o);
    execute(o, data_entry(o, a), s,
            &(struct operands){.src = a->dy.data, .weights = a->w.data, .dst = a->dx.data});
    leave(o);
    if (a->act == LG_ACT_NONE) return;
    const struct lg_ops *ops = &lg_host(s)->kernels->ops;
    ops->act_backward(
        s, &(struct lg_act_backward_args){.x = a->pre, .dy = a->dx, .dx = a->dx, .act = a->act});
    if (present(&a->dbias))
        ops->sum_rows(s, &(struct lg_sum_rows_args){
                             .x = a->dx, .y = a->dbias, .accumulate = a->accumulate_dbias});
}

void lg_onednn_linear_backward_weight(lg_stream *s, const struct lg_linear_backward_weight_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    enter(o);
    execute(o, weight_entry(o, a), s,
            &(struct operands){.src = a->dy.data, .weights = a->x.data, .dst = a->dw.data});
    leave(o);
    if (!present(&a->dbias)) return;
    lg_host(s)->kernels->ops.sum_rows(
        s, &(struct lg_sum_rows_args){.x = a->dy, .y = a->dbias, .accumulate = a->accumulate});
}

void lg_onednn_conv2d_forward(lg_stream *s, const struct lg_conv2d_forward_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    bool sum = present(&a->residual);
    if (sum && a->residual.data != a->y.data)
        memcpy(a->y.data, a->residual.data, (size_t)lg_host_numel(&a->y) * sizeof(float));
    enter(o);
    execute(o, conv2d_entry(o, a, present(&a->bias), sum), s,
            &(struct operands){a->x.data, a->w.data, a->bias.data, a->y.data});
    leave(o);
}

void lg_onednn_conv3d_forward(lg_stream *s, const struct lg_conv3d_forward_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    const int64_t frame_in = lg_host_numel(&a->x) / a->x.dim[0] * a->stride_time;
    const int64_t frame_out = lg_host_numel(&a->y) / a->y.dim[0];
    if (present(&a->residual) && a->residual.data != a->y.data)
        memcpy(a->y.data, a->residual.data, (size_t)lg_host_numel(&a->y) * sizeof(float));
    enter(o);
    struct entry *e = conv3d_entry(o, a);
    prepare(o, e, s, a->w.data);
    for (int64_t i = 0; i < a->y.dim[0]; i++)
        compute(o, e,
                &(struct operands){.src = (const float *)a->x.data + i * frame_in,
                                   .bias = a->bias.data,
                                   .dst = (float *)a->y.data + i * frame_out});
    leave(o);
}

static struct entry *conv2d_data_entry(struct lg_onednn *o,
                                       const struct lg_conv2d_backward_data_args *a)
{
    return conv_entry(o, &(struct conv_shape){.pass = DATA,
                                              .n = a->dx.dim[0],
                                              .ci = a->dx.dim[3],
                                              .h = a->dx.dim[1],
                                              .w = a->dx.dim[2],
                                              .co = a->w.dim[0],
                                              .kh = a->w.dim[1],
                                              .kw = a->w.dim[2],
                                              .ho = a->dy.dim[1],
                                              .wo = a->dy.dim[2],
                                              .stride = a->stride,
                                              .top = a->top,
                                              .left = a->left});
}

static struct entry *conv2d_weight_entry(struct lg_onednn *o,
                                         const struct lg_conv2d_backward_weight_args *a)
{
    return conv_entry(o, &(struct conv_shape){.pass = WEIGHT,
                                              .n = a->x.dim[0],
                                              .ci = a->x.dim[3],
                                              .h = a->x.dim[1],
                                              .w = a->x.dim[2],
                                              .co = a->dw.dim[0],
                                              .kh = a->dw.dim[1],
                                              .kw = a->dw.dim[2],
                                              .ho = a->dy.dim[1],
                                              .wo = a->dy.dim[2],
                                              .stride = a->stride,
                                              .top = a->top,
                                              .left = a->left});
}

/* A backward convolution cannot add: where it puts what is added, behind the rest of its scratch memory. */
static lg_tensor place_of(lg_stream *s, const struct entry *e, const lg_tensor *out, bool adds)
{
    lg_tensor to = *out;
    if (adds) to.data = (char *)s->scratch + e->weights_bytes + e->pad_bytes;
    return to;
}

static void add(lg_stream *s, lg_tensor out, lg_tensor made)
{
    if (made.data == out.data) return;
    lg_host(s)->kernels->ops.add_forward(
        s, &(struct lg_add_forward_args){.a = out, .b = made, .y = out});
}

static size_t added_bytes(const lg_tensor *out, bool adds)
{
    return adds ? lg_host_align((size_t)lg_host_numel(out) * sizeof(float)) : 0;
}

void lg_onednn_conv2d_backward_data(lg_stream *s, const struct lg_conv2d_backward_data_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    enter(o);
    struct entry *e = conv2d_data_entry(o, a);
    const lg_tensor to = place_of(s, e, &a->dx, a->accumulate);
    execute(o, e, s, &(struct operands){.src = to.data, .weights = a->w.data, .dst = a->dy.data});
    leave(o);
    add(s, a->dx, to);
}

void lg_onednn_conv2d_backward_weight(lg_stream *s, const struct lg_conv2d_backward_weight_args *a)
{
    struct lg_onednn *o = lg_host(s)->onednn;
    enter(o);
    struct entry *e = conv2d_weight_entry(o, a);
    const lg_tensor to = place_of(s, e, &a->dw, a->accumulate);
    execute(o, e, s, &(struct operands){.src = a->x.data, .weights = to.data, .dst = a->dy.data});
    leave(o);
    add(s, a->dw, to);
    if (!present(&a->dbias)) return;
    const int64_t O = a->dy.dim[3], pixels = lg_host_numel(&a->dy) / O;
    lg_host(s)->kernels->ops.sum_rows(
        s, &(struct lg_sum_rows_args){.x = lg_t2(a->dy.data, LG_F32, pixels, O),
                                      .y = a->dbias,
                                      .accumulate = a->accumulate});
}

size_t lg_onednn_scratch(struct lg_onednn *o, lg_op_id op, const void *args)
{
    struct entry *e = NULL;
    size_t added = 0;
    /* On a dry stream pointers may be NULL: what is present is told by the rank. */
    enter(o);
    switch (op) {
    case LG_OP_linear_forward: {
        const struct lg_linear_forward_args *a = args;
        e = forward_entry(o, a, a->bias.rank > 0, a->residual.rank > 0);
        break;
    }
    case LG_OP_linear_backward_data:
        e = data_entry(o, args);
        break;
    case LG_OP_linear_backward_weight:
        e = weight_entry(o, args);
        break;
    case LG_OP_conv2d_forward: {
        const struct lg_conv2d_forward_args *a = args;
        e = conv2d_entry(o, a, a->bias.rank > 0, a->residual.rank > 0);
        break;
    }
    case LG_OP_conv3d_forward:
        e = conv3d_entry(o, args);
        break;
    case LG_OP_conv2d_backward_data: {
        const struct lg_conv2d_backward_data_args *a = args;
        e = conv2d_data_entry(o, a);
        added = added_bytes(&a->dx, a->accumulate);
        break;
    }
    case LG_OP_conv2d_backward_weight: {
        const struct lg_conv2d_backward_weight_args *a = args;
        e = conv2d_weight_entry(o, a);
        added = added_bytes(&a->dw, a->accumulate);
        break;
    }
    default:
        break;
    }
    leave(o);
    return e ? e->weights_bytes + e->pad_bytes + added : 0;
}

/* oneDNN knows one limit per process, and only until it is first used. */
static int limit_isa(const char *isa)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char chosen[16];
    static const struct {
        const char *name;
        dnnl_cpu_isa_t isa;
    } SETS[] = {{"sse2", dnnl_cpu_isa_sse41},
                {"avx2", dnnl_cpu_isa_avx2},
                {"avx512", dnnl_cpu_isa_avx512_core}};
    int rc = 0;
    LG_ASSERT(pthread_mutex_lock(&lock) == 0);
    if (!chosen[0]) {
        for (size_t i = 0; i < LG_ARRAY_LEN(SETS); i++) {
            if (strcmp(SETS[i].name, isa)) continue;
            CHECK(dnnl_set_max_cpu_isa(SETS[i].isa));
            CHECK(dnnl_set_default_fpmath_mode(dnnl_fpmath_mode_strict));
            snprintf(chosen, sizeof chosen, "%s", isa);
        }
    }
    if (strcmp(chosen, isa))
        rc = LG_FAIL(LG_ERR_CONFIG,
                     "this process already computes with %s: a host device with %s needs a process "
                     "of its own",
                     chosen, isa);
    LG_ASSERT(pthread_mutex_unlock(&lock) == 0);
    return rc;
}

int lg_onednn_open(const char *isa, int threads, struct lg_onednn **ret)
{
    LG_TRY(limit_isa(isa));
    if (omp_get_thread_limit() < threads)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the plan wants %d threads, OMP_THREAD_LIMIT allows %d: unset it", threads,
                       omp_get_thread_limit());
    omp_set_max_active_levels(1);
    struct lg_onednn *o = calloc(1, sizeof *o);
    if (!o) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the table of products");
    LG_ASSERT(pthread_mutex_init(&o->lock, NULL) == 0);
    o->threads = threads;
    o->product_by_conv = strcmp(isa, "avx2") == 0;
    enter(o);
    dnnl_status_t status = dnnl_engine_create(&o->engine, dnnl_cpu, 0);
    if (!status) status = dnnl_stream_create(&o->stream, o->engine, dnnl_stream_default_flags);
    leave(o);
    if (status) {
        lg_onednn_close(&o);
        return LG_FAIL(LG_ERR_FAILED, "oneDNN does not start on this machine: status %d",
                       (int)status);
    }
    *ret = o;
    return 0;
}

static void close_entry(struct entry *e)
{
    dnnl_memory_t memory[] = {e->src, e->weights, e->bias, e->dst, e->pad, e->plain_weights};
    for (size_t i = 0; i < LG_ARRAY_LEN(memory); i++)
        if (memory[i]) dnnl_memory_destroy(memory[i]);
    if (e->reorder) dnnl_primitive_destroy(e->reorder);
    if (e->primitive) dnnl_primitive_destroy(e->primitive);
    free(e);
}

void lg_onednn_close(struct lg_onednn **o)
{
    if (!o || !*o) return;
    for (int i = 0; i < TABLE_SLOTS; i++)
        if ((*o)->table[i]) close_entry((*o)->table[i]);
    if ((*o)->stream) dnnl_stream_destroy((*o)->stream);
    if ((*o)->engine) dnnl_engine_destroy((*o)->engine);
    pthread_mutex_destroy(&(*o)->lock);
    free(*o);
    *o = NULL;
}

void lg_onednn_version(char *ret, size_t bytes)
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(ret, bytes, "%d.%d.%d %.12s", v->major, v->minor, v->patch, v->hash);
}
