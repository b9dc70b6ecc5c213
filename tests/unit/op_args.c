/* See op_args.h.
 *
 * Invariant: an output's buffer is 0xFF wherever no value was put, with GUARD_BYTES of it at the end. */
#include "tests/unit/op_args.h"
#include "kernels/streams.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 64 };

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

/* A value that F, and every wider type, can hold. */
static double rounded(const struct op_run *r, int flags, double x)
{
    char bytes[sizeof(double)];
    lg_dtype t = flags & OP_STATS ? LG_F32 : r->round;
    if (t == LG_F32) return (float)x;
    store_value(bytes, t, 0, x);
    return load_value(bytes, t, 0);
}

/* ---- buffers ---- */

void op_must(int rc)
{
    if (rc < 0) {
        fprintf(stderr, "%s\n", lg_err_text());
        abort();
    }
}

static int new_buffer(struct op_run *r, lg_dtype dtype, int64_t elements, bool output)
{
    LG_ASSERT(r->n_buffers < OP_BUFFERS_MAX && elements > 0);
    struct op_buffer *b = &r->buffer[r->n_buffers];
    b->dtype = dtype;
    b->lead = r->lead;
    b->bytes = b->lead + (size_t)elements * lg_dtype_bytes(dtype) + GUARD_BYTES;
    b->output = output;
    b->streams = r->streams;
    b->values = calloc((size_t)elements, sizeof(double));
    LG_ASSERT(b->values);
    op_must(lg_device_alloc(r->device, b->bytes, &b->device));
    return r->n_buffers++;
}

enum { NORMALS_BITS = 16 };

/* Standard normals of Philox, from which arguments are drawn with replacement: their distribution and their
 * independence are those of fresh ones up to NORMALS numbers being all there are (the largest is some 4.3), and half of a
 * test's time would otherwise go into logarithms and sines. */
static const double *normals(void)
{
    static double v[1 << NORMALS_BITS];
    if (v[0] == 0) lg_philox_normal_f64(v, LG_ARRAY_LEN(v), 0, LG_PURPOSE_TEST, 0, 0);
    return v;
}

/* Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014: number i of the sequence that begins
 * at start. */
static uint64_t splitmix64(uint64_t start, uint64_t i)
{
    uint64_t x = start + (i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Standard normals times scale, rounded. */
static void fill_normals(struct op_run *r, int b, int64_t count, int flags, double scale)
{
    int64_t samples = flags & OP_SAMPLE ? r->batch : 1, each = count / samples;
    LG_ASSERT(each * samples == count);
    if (r->dry) return;
    const double *normal = normals();
    for (int64_t i = 0; i < samples; i++) {
        uint64_t id = flags & OP_SAMPLE ? r->ids[i] + 1 : 0;
        double *v = r->buffer[b].values + i * each;
        const uint64_t start = splitmix64(r->seed, id << 8 | (uint64_t)b);
        uint64_t four = 0; /* indices, the next one in the lowest bits */
        for (int64_t e = 0; e < each; e++, four >>= NORMALS_BITS) {
            if (e % 4 == 0) four = splitmix64(start, (uint64_t)e / 4);
            v[e] = rounded(r, flags, normal[four % (1 << NORMALS_BITS)] * scale);
        }
    }
}

/* Integers from low to high, both included. */
static void fill_integers(struct op_run *r, int b, int64_t count, int flags, int64_t low,
                          int64_t high)
{
    int64_t samples = flags & OP_SAMPLE ? r->batch : 1, each = count / samples;
    for (int64_t i = 0; i < count; i++) {
        uint64_t id = flags & OP_SAMPLE ? r->ids[i / each] + 1 : 0;
        lg_philox_out p =
            lg_philox(r->seed, LG_PURPOSE_TEST, id << 8 | (uint64_t)b, (uint64_t)(i % each));
        r->buffer[b].values[i] = (double)(low + (int64_t)(p.v[0] % (uint64_t)(high - low + 1)));
    }
}

/* Where row i of samples' tokens lies. */
static int64_t row_at(const struct op_run *r, const struct op_streams *s, int64_t i)
{
    if (!s->first) return i;
    return lg_stream_row(r->batch, s->tokens, s->first, i / s->tokens, i % s->tokens);
}

/* Element i of so many in a buffer. */
static int64_t element_at(const struct op_run *r, const struct op_buffer *b, int64_t i,
                          int64_t count)
{
    if (!b->streams.first) return i;
    const int64_t row = count / (r->batch * b->streams.tokens);
    return row_at(r, &b->streams, i / row) * row + i % row;
}

/* The first `count` values; the rest becomes 0xFF. Returns where the elements start. */
static void *upload(struct op_run *r, int b, int64_t count)
{
    struct op_buffer *u = &r->buffer[b];
    if (r->dry) return (char *)u->device + u->lead;
    char *host = malloc(u->bytes);
    LG_ASSERT(host);
    memset(host, 0xFF, u->bytes);
    if (u->streams.first)
        for (int64_t i = 0; i < count; i++)
            store_value(host + u->lead, u->dtype, element_at(r, u, i, count), u->values[i]);
    else if (u->dtype == LG_F32)
        for (int64_t i = 0; i < count; i++) ((float *)(host + u->lead))[i] = (float)u->values[i];
    else
        for (int64_t i = 0; i < count; i++) store_value(host + u->lead, u->dtype, i, u->values[i]);
    lg_stream_upload(r->stream, u->device, host, u->bytes);
    lg_stream_sync(r->stream);
    free(host);
    return (char *)u->device + u->lead;
}

/* A random input. */
lg_tensor op_in(struct op_run *r, int flags, double scale, int rank, const int64_t *dim)
{
    lg_tensor t = lg_tensor_of(NULL, flags & OP_STATS ? r->stats : r->F, rank, dim);
    int b = new_buffer(r, t.dtype, lg_numel(&t), false);
    fill_normals(r, b, lg_numel(&t), flags, scale);
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

lg_tensor op_in_integers(struct op_run *r, lg_dtype dtype, int flags, int64_t low, int64_t high,
                         int rank, const int64_t *dim)
{
    lg_tensor t = lg_tensor_of(NULL, dtype, rank, dim);
    int b = new_buffer(r, dtype, lg_numel(&t), false);
    fill_integers(r, b, lg_numel(&t), flags, low, high);
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

/* An input whose values the caller has computed. */
lg_tensor op_in_values(struct op_run *r, lg_dtype dtype, int flags, const double *v, int rank,
                       const int64_t *dim)
{
    lg_tensor t = lg_tensor_of(NULL, dtype, rank, dim);
    int b = new_buffer(r, dtype, lg_numel(&t), false);
    for (int64_t i = 0; i < lg_numel(&t); i++) r->buffer[b].values[i] = rounded(r, flags, v[i]);
    t.data = upload(r, b, lg_numel(&t));
    return t;
}

/* The values behind an input, also of a slice. */
const double *op_values_of(const struct op_run *r, lg_tensor t)
{
    for (int i = 0; i < r->n_buffers; i++) {
        const struct op_buffer *b = &r->buffer[i];
        char *first = (char *)b->device + b->lead;
        size_t at = (size_t)((char *)t.data - first);
        if ((char *)t.data >= first && at < b->bytes - b->lead)
            return b->values + at / lg_dtype_bytes(b->dtype);
    }
    abort();
}

static void declare_out(struct op_run *r, struct op_declared o)
{
    LG_ASSERT(r->n_outs < OP_OUTPUTS_MAX);
    r->out[r->n_outs++] = o;
}

/* An output of a type of its own. */
lg_tensor op_out_typed(struct op_run *r, const char *name, lg_dtype dtype, int flags, int rank,
                       const int64_t *dim)
{
    lg_tensor t = lg_tensor_of(NULL, dtype, rank, dim);
    int64_t n = lg_numel(&t);
    int b = new_buffer(r, dtype, n, true);
    if (flags & OP_FILLED) fill_normals(r, b, n, flags, 1);
    const int64_t rows = r->streams.first ? r->batch * r->streams.tokens : 1;
    t.data = upload(r, b, flags & OP_FILLED ? n : 0);
    declare_out(r, (struct op_declared){name, b, flags, 0, rows, n / rows, n / rows});
    return t;
}

lg_tensor op_out(struct op_run *r, const char *name, int flags, int rank, const int64_t *dim)
{
    return op_out_typed(r, name, flags & OP_STATS ? r->stats : r->F, flags, rank, dim);
}

/* An input and an output, or one tensor that is both. */
void op_in_out(struct op_run *r, bool alias, const char *name, int flags, lg_tensor *ret_in,
               lg_tensor *ret_out, int rank, const int64_t *dim)
{
    *ret_out = op_out(r, name, flags | (alias ? OP_FILLED : 0), rank, dim);
    *ret_in = alias ? *ret_out : op_in(r, flags, 1, rank, dim);
}

struct op_pack op_pack(struct op_run *r, int flags, int64_t rows, int64_t stride)
{
    struct op_pack p = {new_buffer(r, r->F, rows * stride, flags & OP_OUTPUT), flags, rows, stride};
    if (!(flags & OP_OUTPUT)) fill_normals(r, p.buffer, rows * stride, flags, 1);
    upload(r, p.buffer, flags & OP_OUTPUT ? 0 : rows * stride);
    return p;
}

/* Columns [offset, offset + width) of the pack; name: of an output. */
lg_tensor op_slice(struct op_run *r, struct op_pack p, const char *name, int64_t offset,
                   int64_t width, int rank, const int64_t *dim)
{
    char *base = (char *)r->buffer[p.buffer].device + r->buffer[p.buffer].lead;
    if (p.flags & OP_OUTPUT)
        declare_out(r,
                    (struct op_declared){name, p.buffer, p.flags, offset, p.rows, width, p.stride});
    lg_tensor t = lg_tensor_of(base + (size_t)offset * lg_dtype_bytes(r->F), r->F, rank, dim);
    int64_t row = 1, stride = p.stride;
    int i = rank;
    while (row < width) row *= dim[--i];
    for (; i > 0; stride *= dim[i]) t.stride[--i] = stride;
    LG_ASSERT(row == width && stride == p.rows * p.stride);
    return t;
}

/* Takes an output's values out of its downloaded buffer and leaves 0xFF there. */
static double *extract(const struct op_run *r, const struct op_declared *o, char *bytes)
{
    const struct op_buffer *b = &r->buffer[o->buffer];
    const lg_dtype dtype = b->dtype;
    double *v = calloc((size_t)(o->rows * o->row), sizeof *v);
    LG_ASSERT(v);
    for (int64_t row = 0; row < o->rows; row++) {
        int64_t first = o->offset + row_at(r, &b->streams, row) * o->stride;
        for (int64_t i = 0; i < o->row; i++)
            v[row * o->row + i] = dtype == LG_F32 ? ((const float *)bytes)[first + i]
                                                  : load_value(bytes, dtype, first + i);
        size_t e = lg_dtype_bytes(dtype);
        memset(bytes + (size_t)first * e, 0xFF, (size_t)o->row * e);
    }
    return v;
}

void op_collect(struct op_run *r, struct op_result *ret)
{
    *ret = (struct op_result){.batch = r->batch};
    for (int b = 0; b < r->n_buffers; b++) {
        if (!r->buffer[b].output) continue;
        char *bytes = malloc(r->buffer[b].bytes);
        LG_ASSERT(bytes);
        lg_stream_download(r->stream, bytes, r->buffer[b].device, r->buffer[b].bytes);
        lg_stream_sync(r->stream);
        for (int o = 0; o < r->n_outs; o++) {
            const struct op_declared *from = &r->out[o];
            if (from->buffer != b) continue;
            ret->out[ret->n_out++] = (struct op_output){
                .name = from->name,
                .count = from->rows * from->row,
                .per_sample = from->flags & OP_SAMPLE,
                .exact = from->flags & OP_EXACT,
                .twin = from->flags & OP_TWIN,
                .v = extract(r, from, bytes + r->buffer[b].lead),
            };
        }
        if ((unsigned char)bytes[0] != 0xFF || memcmp(bytes, bytes + 1, r->buffer[b].bytes - 1))
            ret->wrote_outside = true; /* not all of it is 0xFF */
        free(bytes);
    }
}

void op_release(struct op_run *r)
{
    for (int b = 0; b < r->n_buffers; b++) {
        free(r->buffer[b].values);
        lg_device_free(r->device, &r->buffer[b].device);
    }
    r->n_buffers = r->n_outs = 0;
}

double *op_row_stats(const double *x, int64_t rows, int64_t D, bool rms)
{
    double *mean = calloc(2 * (size_t)rows, sizeof *mean), *rstd = mean + rows;
    LG_ASSERT(mean);
    for (int64_t m = 0; m < rows; m++, x += D) {
        double squares = 0;
        for (int64_t i = 0; i < D && !rms; i++) mean[m] += x[i] / (double)D;
        for (int64_t i = 0; i < D; i++) squares += pow(x[i] - mean[m], 2);
        rstd[m] = 1 / sqrt(squares / (double)D + 1e-6);
    }
    return mean;
}

/* One query row's. */
static void softmax_row(const struct op_run *r, const struct lg_attention_backward_args *a,
                        int64_t b, int64_t h, int64_t t, double *ret_o, double *ret_lse)
{
    int64_t d = a->q.dim[3], Tk = a->k.dim[1];
    int64_t n = a->k_length.data ? (int64_t)op_values_of(r, a->k_length)[b] : Tk;
    const int64_t k_step = a->k.stride[1], v_step = a->v.stride[1];
    const double *q = op_values_of(r, a->q) + b * a->q.stride[0] + t * a->q.stride[1] + h * d;
    const double *k = op_values_of(r, a->k) + b * a->k.stride[0] + h * d;
    const double *v = op_values_of(r, a->v) + b * a->v.stride[0] + h * d;
    double sum = 0;
    for (int64_t i = 0; i < d; i++) ret_o[i] = 0;
    for (int64_t j = 0; j < n; j++) {
        double score = 0;
        for (int64_t i = 0; i < d; i++) score += q[i] * k[j * k_step + i];
        double e = exp(a->scale * score);
        sum += e;
        for (int64_t i = 0; i < d; i++) ret_o[i] += e * v[j * v_step + i];
    }
    for (int64_t i = 0; i < d; i++) ret_o[i] /= sum;
    *ret_lse = log(sum);
}

void op_softmax_rows(const struct op_run *r, const struct lg_attention_backward_args *a,
                     double *ret_o, double *ret_lse)
{
    int64_t B = a->q.dim[0], T = a->q.dim[1], H = a->q.dim[2], d = a->q.dim[3];
    if (r->dry) return;
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++)
                softmax_row(r, a, b, h, t, ret_o + ((b * T + t) * H + h) * d,
                            ret_lse + (b * H + h) * T + t);
}
