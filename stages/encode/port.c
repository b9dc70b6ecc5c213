/* Ports; see port.h. Where the device computes in another type than fp32, a cast on the device stands
 * between its tensor and the fp32 copy. */
#include "stages/encode/port.h"
#include "base/check.h"
#include <stdlib.h>

int lg_port_open(lg_device *d, lg_tensor shape, struct lg_port *p)
{
    shape.data = NULL;
    p->device = p->f32 = shape;
    p->device.dtype = lg_device_dtype(d);
    p->f32.dtype = LG_F32;
    LG_TRY(lg_device_alloc(d, lg_tensor_bytes(&p->device), &p->device.data));
    p->f32.data = p->device.data;
    if (p->device.dtype != LG_F32)
        LG_TRY(lg_device_alloc(d, lg_tensor_bytes(&p->f32), &p->f32.data));
    p->host = calloc(1, lg_tensor_bytes(&p->f32));
    if (!p->host)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a batch of %zu bytes",
                       lg_tensor_bytes(&p->f32));
    return 0;
}

void lg_port_close(lg_device *d, struct lg_port *p)
{
    if (p->f32.data != p->device.data) lg_device_free(d, &p->f32.data);
    lg_device_free(d, &p->device.data);
    free(p->host);
    *p = (struct lg_port){0};
}

static bool has_cast(const struct lg_port *p)
{
    return p->f32.data != p->device.data;
}

void lg_port_put(const struct lg_port *p, lg_stream *s)
{
    lg_stream_upload(s, p->f32.data, p->host, lg_tensor_bytes(&p->f32));
    if (has_cast(p)) lg_cast(s, &(struct lg_cast_args){.x = p->f32, .y = p->device});
}

void lg_port_get(const struct lg_port *p, lg_stream *s)
{
    if (has_cast(p)) lg_cast(s, &(struct lg_cast_args){.x = p->device, .y = p->f32});
    lg_stream_download(s, p->host, p->f32.data, lg_tensor_bytes(&p->f32));
}

int lg_put_weights(lg_device *d, lg_stream *s, const float *values, size_t count, void **ret)
{
    lg_dtype t = lg_device_dtype(d);
    lg_tensor wide = lg_t1(NULL, LG_F32, (int64_t)count), own = lg_t1(NULL, t, (int64_t)count);
    LG_TRY(lg_device_alloc(d, lg_tensor_bytes(&own), &own.data));
    *ret = own.data;
    wide.data = own.data;
    if (t != LG_F32) LG_TRY(lg_device_alloc(d, lg_tensor_bytes(&wide), &wide.data));
    lg_stream_upload(s, wide.data, values, lg_tensor_bytes(&wide));
    if (t != LG_F32) lg_cast(s, &(struct lg_cast_args){.x = wide, .y = own});
    lg_stream_sync(s);
    if (t != LG_F32) lg_device_free(d, &wide.data);
    return 0;
}
