/* The table of cases and the functions that build their arguments; see op_cases.h.
 *
 * Design: `struct run` collects buffers and outputs while an operation's build function makes its
 * arguments; the function then calls the operation; op_case_run downloads what was declared as
 * output. One build function per operation, at the end the table. */
#include "tests/unit/op_cases.h"
#include "base/check.h"
#include "kernels/ops.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUFFERS_MAX = 24, GUARD_BYTES = 64, RANKS = 5 };

struct shape {
    int64_t B, T, K, N, D, C, H, W, heads, d, Tk, V, groups, kernel, stride, Co, pad[4], count;
    lg_act act;
    lg_dtype from, to;
    bool bias, pre, mod, mask, lse, packed, residual, alias, accumulate, dpred;
    double scale;
};

enum flags {
    SAMPLE = 1, /* first dimension is the batch */
    FILLED = 2, /* an output that starts with values: accumulated to, or aliased */
    EXACT = 4,
    OUTPUT = 8,
};

struct buffer {
    void *device;
    size_t bytes;
    lg_dtype dtype;
    double *values; /* of an input */
    bool output;
};

struct out {
    const char *name;
    int buffer, flags;
    int64_t offset, rows, row, stride; /* elements */
};

struct run {
    lg_device *device;
    lg_stream *stream;
    lg_dtype F, stats;
    const uint64_t *ids;
    uint64_t seed;
    int64_t batch;
    int n_buffers, n_outs;
    struct buffer buffer[BUFFERS_MAX];
    struct out out[OP_OUTPUTS_MAX];
};

/* ---- element types ---- */

static void store_value(void *p, lg_dtype t, int64_t i, double x)
{
    switch (t) {
    case LG_F32:
        ((float *)p)[i] = (float)x;
        break;
    case LG_F64:
        ((double *)p)[i] = x;
        break;
    case LG_F16:
        ((_Float16 *)p)[i] = (_Float16)(float)x;
        break;
    case LG_BF16: {
        float f = (float)x;
        memcpy((uint16_t *)p + i, (char *)&f + 2, 2); /* cut: any value will do */
        break;
    }
    case LG_I32:
        ((int32_t *)p)[i] = (int32_t)x;
        break;
    case LG_U8:
        ((uint8_t *)p)[i] = (uint8_t)x;
        break;
    case LG_I64:
        ((int64_t *)p)[i] = (int64_t)x;
        break;
    }
}

static double load_value(const void *p, lg_dtype t, int64_t i)
{
    switch (t) {
    case LG_F32:
        return ((const float *)p)[i];
    case LG_F64:
        return ((const double *)p)[i];
    case LG_F16:
        return (double)((const _Float16 *)p)[i];
    case LG_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    }
    case LG_I32:
        return ((const int32_t *)p)[i];
    case LG_U8:
        return ((const uint8_t *)p)[i];
    case LG_I64:
        return (double)((const int64_t *)p)[i];
    }
    abort();
}

/* ---- buffers ---- */

static void must(int rc)
{
    if (rc < 0) {
        fprintf(stderr, "%s\n", lg_err_text());
        abort();
    }
}

static int new_buffer(struct run *r, lg_dtype dtype, int64_t elements, bool output)
{
    LG_ASSERT(r->n_buffers < BUFFERS_MAX && elements > 0);
    struct buffer *b = &r->buffer[r->n_buffers];
    b->dtype = dtype;
    b->bytes = (size_t)elements * lg_dtype_bytes(dtype) + (output ? GUARD_BYTES : 0);
    b->output = output;
    b->values = calloc((size_t)elements, sizeof(double));
    LG_ASSERT(b->values);
    must(lg_device_alloc(r->device, b->bytes, &b->device));
    return r->n_buffers++;
}

/* Standard normals times scale, rounded to f32. */
static void fill_normals(struct run *r, int b, int64_t count, int flags, double scale)
{
    int64_t samples = flags & SAMPLE ? r->batch : 1, each = count / samples;
    LG_ASSERT(each * samples == count);
    for (int64_t i = 0; i < samples; i++) {
        uint64_t id = flags & SAMPLE ? r->ids[i] + 1 : 0;
        double *v = r->buffer[b].values + i * each;
        lg_philox_normal_f64(v, (size_t)each, r->seed, LG_PURPOSE_TEST, id << 8 | (uint64_t)b, 0);
        for (int64_t e = 0; e < each; e++) v[e] = (double)(float)(v[e] * scale);
    }
}

/* Integers from low to high, both included. */
static void fill_integers(struct run *r, int b, int64_t count, int flags, int64_t low, int64_t high)
{
    int64_t samples = flags & SAMPLE ? r->batch : 1, each = count / samples;
    for (int64_t i = 0; i < count; i++) {
        uint64_t id = flags & SAMPLE ? r->ids[i / each] + 1 : 0;
        lg_philox_out p =
            lg_philox(r->seed, LG_PURPOSE_TEST, id << 8 | (uint64_t)b, (uint64_t)(i % each));
        r->buffer[b].values[i] = (double)(low + (int64_t)(p.v[0] % (uint64_t)(high - low + 1)));
    }
}

static void *upload(struct run *r, int b, int64_t count)
{
    struct buffer *u = &r->buffer[b];
    char *host = malloc(u->bytes);
    LG_ASSERT(host);
    memset(host, 0xFF, u->bytes);
    for (int64_t i = 0; i < count; i++) store_value(host, u->dtype, i, u->values[i]);
    lg_stream_upload(r->stream, u->device, host, u->bytes);
    lg_stream_sync(r->stream);
    free(host);
    return u->device;
}

static lg_tensor shaped(void *data, lg_dtype dtype, int rank, const int64_t *dim)
{
    lg_tensor t = {data, dtype, rank, {1, 1, 1, 1}};
    for (int i = 0; i < rank; i++) t.dim[i] = dim[i];
    return t;
}

#define DIMS(...)                                                                                  \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                         \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* A random input. */
static lg_tensor in(struct run *r, int flags, double scale, int rank, const int64_t *dim)
{
    lg_tensor t = shaped(NULL, r->F, rank, dim);
    int b = new_buffer(r, r->F, lg_numel(&t), false);
    fill_normals(r, b, lg_numel(&t), flags, scale);
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

static lg_tensor in_integers(struct run *r, lg_dtype dtype, int flags, int64_t low, int64_t high,
                             int rank, const int64_t *dim)
{
    lg_tensor t = shaped(NULL, dtype, rank, dim);
    int b = new_buffer(r, dtype, lg_numel(&t), false);
    fill_integers(r, b, lg_numel(&t), flags, low, high);
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

/* An input whose values the caller has computed (rounded to f32 here). */
static lg_tensor in_values(struct run *r, lg_dtype dtype, const double *v, int rank,
                           const int64_t *dim)
{
    lg_tensor t = shaped(NULL, dtype, rank, dim);
    int b = new_buffer(r, dtype, lg_numel(&t), false);
    for (int64_t i = 0; i < lg_numel(&t); i++) r->buffer[b].values[i] = (double)(float)v[i];
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

/* The values behind an input, also of a slice. */
static const double *values_of(const struct run *r, lg_tensor t)
{
    for (int i = 0; i < r->n_buffers; i++) {
        const struct buffer *b = &r->buffer[i];
        size_t at = (size_t)((char *)t.data - (char *)b->device);
        if ((char *)t.data >= (char *)b->device && at < b->bytes)
            return b->values + at / lg_dtype_bytes(b->dtype);
    }
    abort();
}

static void declare_out(struct run *r, struct out o)
{
    LG_ASSERT(r->n_outs < OP_OUTPUTS_MAX);
    r->out[r->n_outs++] = o;
}

/* An output of a type of its own. */
static lg_tensor out_typed(struct run *r, const char *name, lg_dtype dtype, int flags, int rank,
                           const int64_t *dim)
{
    lg_tensor t = shaped(NULL, dtype, rank, dim);
    int64_t n = lg_numel(&t);
    int b = new_buffer(r, dtype, n, true);
    if (flags & FILLED) fill_normals(r, b, n, flags, 1);
    t.data = upload(r, b, flags & FILLED ? n : 0);
    declare_out(r, (struct out){name, b, flags, 0, 1, n, n});
    return t;
}

static lg_tensor out(struct run *r, const char *name, int flags, int rank, const int64_t *dim)
{
    return out_typed(r, name, r->F, flags, rank, dim);
}

/* An input and an output, or one tensor that is both. */
static void in_out(struct run *r, bool alias, const char *name, int flags, lg_tensor *ret_in,
                   lg_tensor *ret_out, int rank, const int64_t *dim)
{
    *ret_out = out(r, name, flags | (alias ? FILLED : 0), rank, dim);
    *ret_in = alias ? *ret_out : in(r, flags, 1, rank, dim);
}

/* A wide buffer of rows of which tensors are slices. */
struct pack {
    int buffer, flags;
    int64_t rows, stride;
};

static struct pack pack(struct run *r, int flags, int64_t rows, int64_t stride)
{
    struct pack p = {new_buffer(r, r->F, rows * stride, flags & OUTPUT), flags, rows, stride};
    if (!(flags & OUTPUT)) fill_normals(r, p.buffer, rows * stride, flags, 1);
    upload(r, p.buffer, flags & OUTPUT ? 0 : rows * stride);
    return p;
}

/* Columns [offset, offset + width) of the pack; name: of an output. */
static lg_tensor slice(struct run *r, struct pack p, const char *name, int64_t offset,
                       int64_t width, int rank, const int64_t *dim)
{
    char *base = r->buffer[p.buffer].device;
    if (p.flags & OUTPUT)
        declare_out(r, (struct out){name, p.buffer, p.flags, offset, p.rows, width, p.stride});
    return shaped(base + (size_t)offset * lg_dtype_bytes(r->F), r->F, rank, dim);
}

/* ---- one function per operation ---- */

#define BUILD(op) static void build_##op(struct run *r, const struct shape *z)

BUILD(linear_forward)
{
    int64_t M = z->B * z->T;
    struct lg_linear_forward_args a = {.act = z->act};
    a.x = in(r, SAMPLE, 1, DIMS(M, z->K));
    a.w = in(r, 0, 1, DIMS(z->N, z->K));
    if (z->bias) a.bias = in(r, 0, 1, DIMS(z->N));
    a.y = out(r, "y", SAMPLE, DIMS(M, z->N));
    if (z->pre) a.pre = out(r, "pre", SAMPLE, DIMS(M, z->N));
    lg_linear_forward(r->stream, &a);
}

BUILD(linear_backward_data)
{
    int64_t M = z->B * z->T;
    struct lg_linear_backward_data_args a = {.accumulate = z->accumulate};
    a.dy = in(r, SAMPLE, 1, DIMS(M, z->N));
    a.w = in(r, 0, 1, DIMS(z->N, z->K));
    a.dx = out(r, "dx", SAMPLE | (z->accumulate ? FILLED : 0), DIMS(M, z->K));
    lg_linear_backward_data(r->stream, &a);
}

BUILD(linear_backward_weight)
{
    int64_t M = z->B * z->T;
    int filled = z->accumulate ? FILLED : 0;
    struct lg_linear_backward_weight_args a = {.accumulate = z->accumulate};
    a.dy = in(r, SAMPLE, 1, DIMS(M, z->N));
    a.x = in(r, SAMPLE, 1, DIMS(M, z->K));
    a.dw = out(r, "dw", filled, DIMS(z->N, z->K));
    if (z->bias) a.dbias = out(r, "dbias", filled, DIMS(z->N));
    lg_linear_backward_weight(r->stream, &a);
}

BUILD(act_forward)
{
    struct lg_act_forward_args a = {.act = z->act};
    in_out(r, z->alias, "y", SAMPLE, &a.x, &a.y, DIMS(z->B, z->D));
    lg_act_forward(r->stream, &a);
}

BUILD(act_backward)
{
    struct lg_act_backward_args a = {.act = z->act, .accumulate = z->accumulate};
    a.x = in(r, SAMPLE, 2, DIMS(z->B, z->D));
    a.dx = out(r, "dx", SAMPLE | (z->accumulate || z->alias ? FILLED : 0), DIMS(z->B, z->D));
    a.dy = z->alias ? a.dx : in(r, SAMPLE, 1, DIMS(z->B, z->D));
    lg_act_backward(r->stream, &a);
}

BUILD(mul_forward)
{
    struct lg_mul_forward_args a = {.b = in(r, SAMPLE, 1, DIMS(z->B, z->D))};
    in_out(r, z->alias, "y", SAMPLE, &a.a, &a.y, DIMS(z->B, z->D));
    lg_mul_forward(r->stream, &a);
}

BUILD(add_forward)
{
    struct lg_add_forward_args a = {0};
    in_out(r, z->alias, "y", SAMPLE, &a.a, &a.y, DIMS(z->B, z->T, z->D));
    a.b = z->Tk ? in(r, 0, 1, DIMS(z->D)) : in(r, 0, 1, DIMS(z->T, z->D));
    lg_add_forward(r->stream, &a);
}

BUILD(sum_rows)
{
    struct lg_sum_rows_args a = {.accumulate = z->accumulate};
    a.x = in(r, SAMPLE, 1, DIMS(z->B, z->D));
    a.y = out(r, "y", z->accumulate ? FILLED : 0, DIMS(z->D));
    lg_sum_rows(r->stream, &a);
}

BUILD(combine)
{
    struct lg_combine_args a = {.count = (int)z->count, .c = {0.75, -1.25, 3, 0.1}};
    for (int i = 0; i < a.count - 1; i++) a.x[i] = in(r, SAMPLE, 1, DIMS(z->B, z->D));
    in_out(r, z->alias, "y", SAMPLE, &a.x[a.count - 1], &a.y, DIMS(z->B, z->D));
    lg_combine(r->stream, &a);
}

BUILD(cast)
{
    static const double EDGES[] = {
        0,          -0.0,       1,      -1,       65504,    65519.96, 65520,         -1e6,
        3.4e38,     6e-8,       2.9e-8, 3.1e-8,   1e-7,     6.1e-5,   1.00048828125, 1.00146484375,
        1.00390625, 1.01171875, 1e-40,  INFINITY, -INFINITY};
    int64_t n = z->D;
    int b = new_buffer(r, z->from, n, false);
    fill_normals(r, b, n, 0, 100);
    for (size_t i = 0; i < LG_ARRAY_LEN(EDGES) && (int64_t)i < n; i++)
        r->buffer[b].values[i] = (double)(float)EDGES[i];
    struct lg_cast_args a = {.x = shaped(upload(r, b, n), z->from, DIMS(n))};
    a.y = out_typed(r, "y", z->to, EXACT, DIMS(n));
    lg_cast(r->stream, &a);
}

BUILD(norm_modulate_forward)
{
    struct lg_norm_modulate_forward_args a = {.eps = 1e-6, .mod_stride = 6 * z->D};
    a.x = in(r, SAMPLE, 1, DIMS(z->B, z->T, z->D));
    if (z->mod) {
        struct pack p = pack(r, SAMPLE, z->B, 6 * z->D);
        a.shift = slice(r, p, NULL, 0, z->D, DIMS(z->B, z->D));
        a.scale = slice(r, p, NULL, z->D, z->D, DIMS(z->B, z->D));
    }
    a.y = out(r, "y", SAMPLE, DIMS(z->B, z->T, z->D));
    a.mean = out_typed(r, "mean", r->stats, SAMPLE, DIMS(z->B, z->T));
    a.rstd = out_typed(r, "rstd", r->stats, SAMPLE, DIMS(z->B, z->T));
    lg_norm_modulate_forward(r->stream, &a);
}

BUILD(norm_modulate_backward)
{
    struct lg_norm_modulate_backward_args a = {.mod_stride = 6 * z->D, .accumulate = z->accumulate};
    int64_t rows = z->B * z->T;
    a.x = in(r, SAMPLE, 1, DIMS(z->B, z->T, z->D));
    a.dy = in(r, SAMPLE, 1, DIMS(z->B, z->T, z->D));
    const double *x = values_of(r, a.x);
    double *mean = calloc((size_t)rows, sizeof *mean), *rstd = calloc((size_t)rows, sizeof *rstd);
    LG_ASSERT(mean && rstd);
    for (int64_t m = 0; m < rows; m++) {
        double squares = 0;
        for (int64_t i = 0; i < z->D; i++) mean[m] += x[m * z->D + i] / (double)z->D;
        for (int64_t i = 0; i < z->D; i++) squares += pow(x[m * z->D + i] - mean[m], 2);
        rstd[m] = 1 / sqrt(squares / (double)z->D + 1e-6);
    }
    a.mean = in_values(r, r->stats, mean, DIMS(z->B, z->T));
    a.rstd = in_values(r, r->stats, rstd, DIMS(z->B, z->T));
    free(mean);
    free(rstd);
    a.dx = out(r, "dx", SAMPLE | (z->accumulate ? FILLED : 0), DIMS(z->B, z->T, z->D));
    if (z->mod) {
        struct pack p = pack(r, SAMPLE, z->B, 6 * z->D);
        struct pack dp = pack(r, SAMPLE | OUTPUT, z->B, 6 * z->D);
        a.scale = slice(r, p, NULL, 4 * z->D, z->D, DIMS(z->B, z->D));
        a.dshift = slice(r, dp, "dshift", 3 * z->D, z->D, DIMS(z->B, z->D));
        a.dscale = slice(r, dp, "dscale", 4 * z->D, z->D, DIMS(z->B, z->D));
    }
    lg_norm_modulate_backward(r->stream, &a);
}

BUILD(gate_residual_forward)
{
    struct lg_gate_residual_forward_args a = {.mod_stride = 6 * z->D};
    in_out(r, z->alias, "out", SAMPLE, &a.x, &a.out, DIMS(z->B, z->T, z->D));
    a.y = in(r, SAMPLE, 1, DIMS(z->B, z->T, z->D));
    if (z->mod)
        a.gate = slice(r, pack(r, SAMPLE, z->B, 6 * z->D), NULL, 2 * z->D, z->D, DIMS(z->B, z->D));
    lg_gate_residual_forward(r->stream, &a);
}

BUILD(gate_residual_backward)
{
    struct lg_gate_residual_backward_args a = {.mod_stride = 6 * z->D};
    in_out(r, z->alias, "dy", SAMPLE, &a.dout, &a.dy, DIMS(z->B, z->T, z->D));
    a.y = in(r, SAMPLE, 1, DIMS(z->B, z->T, z->D));
    struct pack p = pack(r, SAMPLE, z->B, 6 * z->D);
    struct pack dp = pack(r, SAMPLE | OUTPUT, z->B, 6 * z->D);
    a.gate = slice(r, p, NULL, 5 * z->D, z->D, DIMS(z->B, z->D));
    a.dgate = slice(r, dp, "dgate", 5 * z->D, z->D, DIMS(z->B, z->D));
    lg_gate_residual_backward(r->stream, &a);
}

BUILD(rms_norm_forward)
{
    int64_t M = z->B * z->T;
    struct lg_rms_norm_forward_args a = {.eps = 1e-6};
    a.x = in(r, SAMPLE, 1, DIMS(M, z->D));
    a.w = in(r, 0, 1, DIMS(z->D));
    a.y = out(r, "y", SAMPLE, DIMS(M, z->D));
    lg_rms_norm_forward(r->stream, &a);
}

BUILD(group_norm_forward)
{
    struct lg_group_norm_forward_args a = {.groups = (int)z->groups, .eps = 1e-6, .act = z->act};
    in_out(r, z->alias, "y", SAMPLE, &a.x, &a.y, DIMS(z->B, z->H, z->W, z->C));
    a.w = in(r, 0, 1, DIMS(z->C));
    a.b = in(r, 0, 1, DIMS(z->C));
    lg_group_norm_forward(r->stream, &a);
}

/* q, k, v as slices: of one buffer (packed, Tq = Tk), or q alone and k, v of another one. */
struct qkv {
    lg_tensor q, k, v;
    int64_t q_stride, kv_stride;
};

static struct qkv make_qkv(struct run *r, const struct shape *z, int flags,
                           const char *const name[3])
{
    int64_t w = z->heads * z->d, Tk = z->Tk ? z->Tk : z->T;
    struct qkv x;
    int64_t q_dim[] = {z->B, z->T, z->heads, z->d}, k_dim[] = {z->B, Tk, z->heads, z->d};
    x.q_stride = z->packed ? 3 * w : w;
    x.kv_stride = z->packed ? 3 * w : 2 * w;
    struct pack q = pack(r, flags, z->B * z->T, x.q_stride);
    struct pack kv = z->packed ? q : pack(r, flags, z->B * Tk, x.kv_stride);
    x.q = slice(r, q, name[0], 0, w, 4, q_dim);
    x.k = slice(r, kv, name[1], z->packed ? w : 0, w, 4, k_dim);
    x.v = slice(r, kv, name[2], z->packed ? 2 * w : w, w, 4, k_dim);
    return x;
}

BUILD(attention_forward)
{
    static const char *const NO_NAMES[3] = {0};
    int64_t Tk = z->Tk ? z->Tk : z->T;
    struct qkv x = make_qkv(r, z, SAMPLE, NO_NAMES);
    struct lg_attention_forward_args a = {.q = x.q,
                                          .k = x.k,
                                          .v = x.v,
                                          .q_stride = x.q_stride,
                                          .kv_stride = x.kv_stride,
                                          .scale = 1 / sqrt((double)z->d)};
    if (z->mask) a.k_length = in_integers(r, LG_I32, SAMPLE, 1, Tk, DIMS(z->B));
    if (z->bias) a.bias = in(r, 0, 1, DIMS(z->heads, z->T, Tk));
    a.o = out(r, "o", SAMPLE, DIMS(z->B, z->T, z->heads, z->d));
    if (z->lse) a.lse = out_typed(r, "lse", r->stats, SAMPLE, DIMS(z->B, z->heads, z->T));
    lg_attention_forward(r->stream, &a);
}

/* o and lse of one query row, from the inputs' values. */
static void softmax_row(const struct run *r, const struct lg_attention_backward_args *a, int64_t b,
                        int64_t h, int64_t t, double *ret_o, double *ret_lse)
{
    int64_t Tq = a->q.dim[1], d = a->q.dim[3], Tk = a->k.dim[1];
    int64_t n = a->k_length.data ? (int64_t)values_of(r, a->k_length)[b] : Tk;
    const double *q = values_of(r, a->q) + (b * Tq + t) * a->q_stride + h * d;
    const double *k = values_of(r, a->k) + b * Tk * a->kv_stride + h * d;
    const double *v = values_of(r, a->v) + b * Tk * a->kv_stride + h * d;
    double sum = 0;
    for (int64_t i = 0; i < d; i++) ret_o[i] = 0;
    for (int64_t j = 0; j < n; j++) {
        double score = 0;
        for (int64_t i = 0; i < d; i++) score += q[i] * k[j * a->kv_stride + i];
        double e = exp(a->scale * score);
        sum += e;
        for (int64_t i = 0; i < d; i++) ret_o[i] += e * v[j * a->kv_stride + i];
    }
    for (int64_t i = 0; i < d; i++) ret_o[i] /= sum;
    *ret_lse = log(sum);
}

BUILD(attention_backward)
{
    static const char *const NO_NAMES[3] = {0}, *const NAMES[3] = {"dq", "dk", "dv"};
    int64_t H = z->heads, d = z->d, T = z->T, Tk = z->Tk ? z->Tk : T;
    struct qkv x = make_qkv(r, z, SAMPLE, NO_NAMES);
    struct lg_attention_backward_args a = {.q = x.q,
                                           .k = x.k,
                                           .v = x.v,
                                           .q_stride = x.q_stride,
                                           .kv_stride = x.kv_stride,
                                           .scale = 1 / sqrt((double)d)};
    if (z->mask) a.k_length = in_integers(r, LG_I32, SAMPLE, 1, Tk, DIMS(z->B));
    double *o = calloc((size_t)(z->B * T * H * d), sizeof *o);
    double *lse = calloc((size_t)(z->B * H * T), sizeof *lse);
    LG_ASSERT(o && lse);
    for (int64_t b = 0; b < z->B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++)
                softmax_row(r, &a, b, h, t, o + ((b * T + t) * H + h) * d,
                            lse + (b * H + h) * T + t);
    a.o = in_values(r, r->F, o, DIMS(z->B, T, H, d));
    a.lse = in_values(r, r->stats, lse, DIMS(z->B, H, T));
    free(o);
    free(lse);
    a.dout = in(r, SAMPLE, 1, DIMS(z->B, T, H, d));
    struct qkv g = make_qkv(r, z, SAMPLE | OUTPUT, NAMES);
    a.dq = g.q, a.dk = g.k, a.dv = g.v;
    a.dq_stride = g.q_stride, a.dkv_stride = g.kv_stride;
    lg_attention_backward(r->stream, &a);
}

BUILD(conv2d_forward)
{
    const int64_t *p = z->pad; /* top, left, bottom, right */
    int64_t Ho = (z->H + p[0] + p[2] - z->kernel) / z->stride + 1;
    int64_t Wo = (z->W + p[1] + p[3] - z->kernel) / z->stride + 1;
    struct lg_conv2d_forward_args a = {.stride = (int)z->stride,
                                       .top = (int)p[0],
                                       .left = (int)p[1],
                                       .bottom = (int)p[2],
                                       .right = (int)p[3]};
    a.x = in(r, SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C));
    a.w = in(r, 0, 1, DIMS(z->Co, z->kernel, z->kernel, z->C));
    a.bias = in(r, 0, 1, DIMS(z->Co));
    if (z->alias)
        in_out(r, true, "y", SAMPLE, &a.residual, &a.y, DIMS(z->B, Ho, Wo, z->Co));
    else
        a.y = out(r, "y", SAMPLE, DIMS(z->B, Ho, Wo, z->Co));
    if (z->residual) a.residual = in(r, SAMPLE, 1, DIMS(z->B, Ho, Wo, z->Co));
    lg_conv2d_forward(r->stream, &a);
}

BUILD(upsample2x_forward)
{
    struct lg_upsample2x_forward_args a = {.x = in(r, SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(z->B, 2 * z->H, 2 * z->W, z->C));
    lg_upsample2x_forward(r->stream, &a);
}

BUILD(embedding_forward)
{
    int64_t M = z->B * z->T;
    struct lg_embedding_forward_args a = {0};
    a.ids = in_integers(r, LG_I32, SAMPLE, 0, z->V - 1, DIMS(M));
    a.table = in(r, 0, 1, DIMS(z->V, z->D));
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(M, z->D));
    lg_embedding_forward(r->stream, &a);
}

BUILD(embedding_backward)
{
    int64_t M = z->B * z->T;
    struct lg_embedding_backward_args a = {.accumulate = z->accumulate};
    a.ids = in_integers(r, LG_I32, SAMPLE, 0, z->V - 1, DIMS(M));
    a.dy = in(r, SAMPLE, 1, DIMS(M, z->D));
    a.dtable = out(r, "dtable", z->accumulate ? FILLED : 0, DIMS(z->V, z->D));
    lg_embedding_backward(r->stream, &a);
}

BUILD(t5_bias_forward)
{
    struct lg_t5_bias_forward_args a = {.max_distance = (int)z->K};
    a.table = in(r, 0, 1, DIMS(z->V, z->heads));
    a.out = out(r, "out", EXACT, DIMS(z->heads, z->T, z->T));
    lg_t5_bias_forward(r->stream, &a);
}

BUILD(timestep_embedding_forward)
{
    struct lg_timestep_embedding_forward_args a = {.freq_shift = z->scale};
    a.t = in_integers(r, r->F, SAMPLE, 0, 1000, DIMS(z->B));
    a.out = out(r, "out", SAMPLE, DIMS(z->B, z->D));
    lg_timestep_embedding_forward(r->stream, &a);
}

BUILD(patchify_forward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_patchify_forward_args a = {.patch = (int)p};
    a.x = in(r, SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(z->B, T, z->C * p * p));
    lg_patchify_forward(r->stream, &a);
}

BUILD(unpatchify_forward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_unpatchify_forward_args a = {.patch = (int)p};
    a.x = in(r, SAMPLE, 1, DIMS(z->B, T, p * p * z->C));
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_unpatchify_forward(r->stream, &a);
}

BUILD(unpatchify_backward)
{
    int64_t p = z->kernel, T = (z->H / p) * (z->W / p);
    struct lg_unpatchify_backward_args a = {.patch = (int)p};
    a.dy = in(r, SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.dx = out(r, "dx", SAMPLE | EXACT, DIMS(z->B, T, p * p * z->C));
    lg_unpatchify_backward(r->stream, &a);
}

BUILD(pixels_to_nhwc)
{
    struct lg_pixels_to_nhwc_args a = {0};
    a.x = in_integers(r, LG_U8, SAMPLE, 0, 255, DIMS(z->B, z->C, z->H, z->W));
    a.y = out(r, "y", SAMPLE, DIMS(z->B, z->H, z->W, z->C));
    lg_pixels_to_nhwc(r->stream, &a);
}

BUILD(nhwc_to_pixels)
{
    struct lg_nhwc_to_pixels_args a = {.x = in(r, SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = out_typed(r, "y", LG_U8, SAMPLE | EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_nhwc_to_pixels(r->stream, &a);
}

BUILD(nchw_to_nhwc)
{
    struct lg_nchw_to_nhwc_args a = {.x = in(r, SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W))};
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(z->B, z->H, z->W, z->C));
    lg_nchw_to_nhwc(r->stream, &a);
}

BUILD(nhwc_to_nchw)
{
    struct lg_nhwc_to_nchw_args a = {.x = in(r, SAMPLE, 1, DIMS(z->B, z->H, z->W, z->C))};
    a.y = out(r, "y", SAMPLE | EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_nhwc_to_nchw(r->stream, &a);
}

BUILD(latent_moments)
{
    struct lg_latent_moments_args a = {0};
    a.x = in(r, SAMPLE, 20, DIMS(z->B, z->H, z->W, 2 * z->C)); /* also beyond the clamp */
    a.mean = out(r, "mean", SAMPLE | EXACT, DIMS(z->B, z->C, z->H, z->W));
    a.logvar = out(r, "logvar", SAMPLE | EXACT, DIMS(z->B, z->C, z->H, z->W));
    lg_latent_moments(r->stream, &a);
}

BUILD(diffuse_forward)
{
    struct lg_diffuse_forward_args a = {
        .seed = 0x123456789abcdefULL, .scaling_factor = 0.75124, .shift_factor = z->scale};
    a.mean = in(r, SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.logvar = in(r, SAMPLE, 12, DIMS(z->B, z->C, z->H, z->W)); /* also beyond the clamp */
    a.n = in_integers(r, LG_I64, SAMPLE, 0, 1000000, DIMS(z->B));
    a.coef = in(r, SAMPLE, 1, DIMS(z->B, 4));
    a.x_t = out(r, "x_t", SAMPLE, DIMS(z->B, z->C, z->H, z->W));
    a.target = out(r, "target", SAMPLE, DIMS(z->B, z->C, z->H, z->W));
    lg_diffuse_forward(r->stream, &a);
}

BUILD(mse_loss)
{
    struct lg_mse_loss_args a = {0};
    lg_tensor dpred;
    in_out(r, z->alias, "dpred", SAMPLE, &a.pred, &dpred, DIMS(z->B, z->C, z->H, z->W));
    if (z->dpred)
        a.dpred = dpred;
    else
        r->n_outs--, r->buffer[0].output = false;
    a.target = in(r, SAMPLE, 1, DIMS(z->B, z->C, z->H, z->W));
    a.weight = in_integers(r, r->F, SAMPLE, 0, 2, DIMS(z->B)); /* 0: a void sample */
    a.loss = out(r, "loss", SAMPLE, DIMS(z->B));
    lg_mse_loss(r->stream, &a);
}

BUILD(reduce_ranks)
{
    struct lg_reduce_ranks_args a = {.count = (int)z->count};
    in_out(r, z->alias, "y", 0, &a.x[0], &a.y, DIMS(z->D));
    for (int i = 1; i < a.count; i++) a.x[i] = in(r, 0, 1, DIMS(z->D));
    a.sum_squares = out_typed(r, "sum_squares", LG_F64, 0, DIMS(1));
    lg_reduce_ranks(r->stream, &a);
}

BUILD(adamw)
{
    struct lg_adamw_args a = {.lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .weight_decay = 0.1,
                              .grad_scale = 0.37,
                              .t = z->count};
    double *squares = calloc((size_t)z->D, sizeof *squares);
    LG_ASSERT(squares);
    in_out(r, z->alias, "w_out", 0, &a.w, &a.w_out, DIMS(z->D));
    in_out(r, z->alias, "m_out", 0, &a.m, &a.m_out, DIMS(z->D));
    a.grad = in(r, 0, 1, DIMS(z->D));
    for (int64_t i = 0; i < z->D; i++) squares[i] = pow(values_of(r, a.grad)[z->D - 1 - i], 2);
    a.v = in_values(r, r->F, squares, DIMS(z->D));
    free(squares);
    a.v_out = out(r, "v_out", 0, DIMS(z->D));
    lg_adamw(r->stream, &a);
}

BUILD(ema)
{
    struct lg_ema_args a = {.decay = 0.999};
    in_out(r, z->alias, "out", 0, &a.ema, &a.out, DIMS(z->D));
    a.w = in(r, 0, 1, DIMS(z->D));
    lg_ema(r->stream, &a);
}

/* ---- the table ---- */

static const struct op_case {
    const char *op, *text;
    void (*build)(struct run *, const struct shape *);
    struct shape shape;
} CASES[] = {
#define CASE(op, ...) {#op, #__VA_ARGS__, build_##op, {__VA_ARGS__}},
#include "tests/unit/op_cases.def"
#undef CASE
};

int op_case_count(void)
{
    return (int)LG_ARRAY_LEN(CASES);
}

const char *op_case_op(int i)
{
    return CASES[i].op;
}

const char *op_case_shape(int i)
{
    return CASES[i].text;
}

/* Takes an output's values out of its downloaded buffer and leaves 0xFF there. */
static double *extract(const struct out *o, lg_dtype dtype, char *bytes)
{
    double *v = calloc((size_t)(o->rows * o->row), sizeof *v);
    LG_ASSERT(v);
    for (int64_t row = 0; row < o->rows; row++) {
        int64_t first = o->offset + row * o->stride;
        for (int64_t i = 0; i < o->row; i++)
            v[row * o->row + i] = load_value(bytes, dtype, first + i);
        size_t e = lg_dtype_bytes(dtype);
        memset(bytes + (size_t)first * e, 0xFF, (size_t)o->row * e);
    }
    return v;
}

static void collect(struct run *r, struct op_result *ret)
{
    *ret = (struct op_result){.batch = r->batch};
    for (int b = 0; b < r->n_buffers; b++) {
        if (!r->buffer[b].output) continue;
        char *bytes = malloc(r->buffer[b].bytes);
        LG_ASSERT(bytes);
        lg_stream_download(r->stream, bytes, r->buffer[b].device, r->buffer[b].bytes);
        lg_stream_sync(r->stream);
        for (int o = 0; o < r->n_outs; o++) {
            const struct out *from = &r->out[o];
            if (from->buffer != b) continue;
            ret->out[ret->n_out++] = (struct op_output){
                .name = from->name,
                .count = from->rows * from->row,
                .per_sample = from->flags & SAMPLE,
                .exact = from->flags & EXACT,
                .v = extract(from, r->buffer[b].dtype, bytes),
            };
        }
        for (size_t i = 0; i < r->buffer[b].bytes; i++)
            if ((unsigned char)bytes[i] != 0xFF) ret->wrote_outside = true;
        free(bytes);
    }
}

void op_case_run(int i, lg_device *d, const uint64_t *ids, struct op_result *ret)
{
    static const uint64_t IN_ORDER[OP_BATCH_MAX] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
    const struct op_case *z = &CASES[i];
    struct run r = {.device = d, .F = lg_device_dtype(d), .ids = ids ? ids : IN_ORDER};
    r.stats = r.F == LG_F64 ? LG_F64 : LG_F32;
    r.batch = z->shape.B ? z->shape.B : 1;
    r.seed = (uint64_t)i;
    LG_ASSERT(r.batch <= OP_BATCH_MAX);

    /* The first pass is dry and sizes the scratch memory; its buffers are not used. */
    must(lg_stream_open_dry(d, &r.stream));
    z->build(&r, &z->shape);
    size_t scratch_bytes = lg_stream_scratch_need(r.stream);
    lg_stream_close(&r.stream);
    for (int pass = 0;; pass++) {
        for (int b = 0; b < r.n_buffers; b++) {
            free(r.buffer[b].values);
            lg_device_free(d, &r.buffer[b].device);
        }
        r.n_buffers = r.n_outs = 0;
        if (pass == 1) break;
        void *scratch = NULL;
        must(lg_stream_open(d, &r.stream));
        if (scratch_bytes) must(lg_device_alloc(d, scratch_bytes, &scratch));
        lg_stream_set_scratch(r.stream, scratch, scratch_bytes);
        z->build(&r, &z->shape);
        lg_stream_sync(r.stream);
        collect(&r, ret);
        lg_stream_close(&r.stream);
        lg_device_free(d, &scratch);
    }
}

void op_result_free(struct op_result *r)
{
    for (int i = 0; i < r->n_out; i++) free(r->out[i].v);
    *r = (struct op_result){0};
}
