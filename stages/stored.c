/* See stored.h. */
#include "stages/stored.h"
#include "base/heartbeat.h"
#include <stdlib.h>

enum {
    PIECE = 1 << 26 /* elements that are read at once */,
    ENCODED = 1 << 22 /* that are encoded */
};

static size_t row_of(const struct lg_param *p)
{
    return (size_t)p->dim[1];
}

size_t lg_stored_end(const lg_params *t, size_t first, size_t most)
{
    const size_t end = LG_MIN(t->count, first + most);
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++) {
        if (!p->in_8_bits || end <= p->offset || end >= p->offset + p->count) continue;
        const size_t whole = p->offset + (end - p->offset) / row_of(p) * row_of(p);
        return whole > first ? whole : first + row_of(p);
    }
    return end;
}

/* ---- one piece ---- */

/* A part of a parameter: elements [from, from + count) of it. */
struct part {
    const struct lg_param *p;
    const float *values;
    size_t from, count;
    char *code, *scale; /* in 8 bits: where its first row's lie on the device */
    lg_rows8 format;
};

static void upload_scales(lg_stream *s, void *to, const float *scale, size_t n, bool f64)
{
    if (!f64) {
        lg_stream_upload(s, to, scale, n * sizeof *scale);
        return;
    }
    double *wide = malloc(n * sizeof *wide);
    LG_ASSERT(wide);
    for (size_t i = 0; i < n; i++) wide[i] = (double)scale[i];
    lg_stream_upload(s, to, wide, n * sizeof *wide);
    lg_stream_sync(s);
    free(wide);
}

/* Its rows, some at a time. */
static int put_rows(lg_device *d, lg_stream *s, const struct part *x)
{
    const size_t K = row_of(x->p), rows = x->count / K,
                 most = LG_MAX((size_t)ENCODED / K, (size_t)1);
    const bool f64 = lg_device_dtype(d) == LG_F64;
    LG_ASSERT(x->from % K == 0 && x->count % K == 0);
    uint8_t *codes = malloc(most * K);
    float *scale = malloc(most * sizeof *scale);
    int64_t bad = -1;
    LG_ASSERT(codes && scale);
    for (size_t r = 0, n; r < rows && bad < 0; r += n) {
        n = LG_MIN(most, rows - r);
        bad = lg_rows8_encode(x->format, x->values + r * K, (int64_t)n, (int64_t)K, codes, scale);
        if (bad >= 0) bad += (int64_t)(x->from / K + r);
        lg_stream_upload(s, x->code + r * K, codes, n * K);
        upload_scales(s, x->scale + r * (f64 ? sizeof(double) : sizeof(float)), scale, n, f64);
        lg_stream_sync(s);
        lg_heartbeat();
    }
    free(codes);
    free(scale);
    if (bad < 0) return 0;
    return LG_FAIL(
        LG_ERR_CORRUPT,
        "tensor %s has values in row %lld that are not finite, and cannot be stored in 8 "
        "bits: check the model's files",
        x->p->name, (long long)bad);
}

int lg_stored_put(lg_device *d, const struct lg_stored_piece *x)
{
    const lg_params *t = x->table;
    const lg_dtype type = lg_device_dtype(d);
    const size_t scale_bytes = type == LG_F64 ? sizeof(double) : sizeof(float);
    lg_stream *s = NULL;
    int rc = 0;
    LG_TRY(lg_stream_open(d, &s));
    for (int i = 0; rc == 0 && i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        const size_t lo = LG_MAX(p->offset, x->first);
        const size_t hi = LG_MIN(p->offset + p->count, x->first + x->count);
        if (lo >= hi) continue;
        const struct lg_stored at = lg_stored_place(t, i, type);
        char *unit =
            (char *)x->memory + ((t->n_units ? lg_stored_unit_at(t, p->unit, type) : 0) - x->front);
        struct part part = {.p = p,
                            .values = x->values + (lo - x->first),
                            .from = lo - p->offset,
                            .count = hi - lo};
        if (p->in_8_bits) {
            part.format = p->format;
            part.code = unit + at.at + part.from;
            part.scale = unit + at.scale_at + part.from / row_of(p) * scale_bytes;
            rc = put_rows(d, s, &part);
        } else {
            rc = lg_stage_upload(d, unit + at.at + part.from * lg_dtype_bytes(type), part.values,
                                 part.count);
        }
    }
    lg_stream_close(&s);
    return rc;
}

/* ---- a region ---- */

static int fill_coded(lg_stage *st, lg_region *r, void *arg)
{
    const struct lg_stored_fill *f = arg;
    const lg_params *t = f->table;
    struct lg_stored_piece x = {.table = t,
                                .first = f->first,
                                .memory = r->payload,
                                .front = f->first * lg_dtype_bytes(lg_device_dtype(f->device))};
    float *values = malloc(LG_MIN((size_t)PIECE, t->count - f->first) * sizeof *values);
    if (!values) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s through", r->name);
    int rc = 0;
    x.values = values;
    for (size_t end; rc == 0 && x.first < t->count; x.first = end) {
        end = lg_stored_end(t, x.first, PIECE);
        x.count = end - x.first;
        LG_ASSERT(x.count <= PIECE);
        rc = f->load(st, x.first - f->first, x.count, values, f->arg);
        if (rc == 0)
            rc = lg_stage_park_if_lasting(st, lg_stored_put(f->device, &x),
                                          "weights cannot be stored");
    }
    free(values);
    return rc;
}

int lg_stored_fill(lg_stage *st, lg_region *r, const struct lg_stored_fill *f)
{
    struct lg_stage_weights w = {.device = f->device,
                                 .count = f->table->count - f->first,
                                 .piece = PIECE,
                                 .load = f->load,
                                 .arg = f->arg};
    if (lg_storage_any(f->table)) {
        w.fill = fill_coded;
        w.arg = (void *)f;
    }
    return lg_stage_fill(st, r, &w);
}
