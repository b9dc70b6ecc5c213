/* See encoder_fixture.h. */
#include "tests/unit/encoder_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void must(int rc)
{
    if (rc >= 0) return;
    fprintf(stderr, "%s\n", lg_err_text());
    abort();
}

struct fixture fixture_open(const char *device)
{
    struct fixture f = {0};
    must(lg_device_open(device, &(struct lg_device_options){.threads = 1}, &f.device));
    must(lg_stream_open(f.device, &f.stream));
    return f;
}

void fixture_close(struct fixture *f)
{
    lg_stream_close(&f->stream);
    lg_device_close(&f->device);
}

double relative_error(const float *got, const float *want, size_t n)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return sqrt(difference / norm);
}

void *device_room(struct fixture *f, size_t n)
{
    void *p = NULL;
    must(lg_device_alloc(f->device, n * lg_dtype_bytes(lg_device_dtype(f->device)), &p));
    return p;
}

void *to_device(struct fixture *f, const float *values, size_t n)
{
    void *p = device_room(f, n);
    if (lg_device_dtype(f->device) == LG_F32) {
        lg_stream_upload(f->stream, p, values, n * sizeof *values);
        lg_stream_sync(f->stream);
        return p;
    }
    LG_ASSERT(lg_device_dtype(f->device) == LG_F64);
    double *wide = malloc(n * sizeof *wide);
    LG_ASSERT(wide);
    for (size_t i = 0; i < n; i++) wide[i] = values[i];
    lg_stream_upload(f->stream, p, wide, n * sizeof *wide);
    lg_stream_sync(f->stream);
    free(wide);
    return p;
}

float *from_device(struct fixture *f, const void *data, size_t n)
{
    size_t bytes = lg_dtype_bytes(lg_device_dtype(f->device));
    char *raw = malloc(n * bytes);
    float *v = malloc(n * sizeof *v);
    LG_ASSERT(raw && v);
    lg_stream_download(f->stream, raw, data, n * bytes);
    lg_stream_sync(f->stream);
    for (size_t i = 0; i < n; i++)
        v[i] = bytes == sizeof(float) ? ((float *)raw)[i] : (float)((double *)raw)[i];
    free(raw);
    return v;
}

const struct lg_st_entry *golden(const lg_st_file *g, const char *name)
{
    const struct lg_st_entry *e = lg_st_find(g, name);
    LG_ASSERT(e);
    return e;
}

float *golden_f32(const lg_st_file *g, const char *name, size_t *ret_n)
{
    const struct lg_st_entry *e = golden(g, name);
    *ret_n = e->bytes / lg_dtype_bytes(e->dtype);
    float *v = malloc(*ret_n * sizeof *v);
    LG_ASSERT(v);
    must(lg_st_read_f32(e, v, 0, *ret_n));
    return v;
}
