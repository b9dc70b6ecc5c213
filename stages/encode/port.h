/* A tensor of the device with a face of fp32 numbers on the host: how tools, whose files and callers
 * speak fp32, use a device of any kind and compute type. */
#pragma once
#include "kernels/device.h"
#include "kernels/ops.h"

struct lg_port {
    lg_tensor device; /* in the device's compute type */
    lg_tensor f32;    /* the same memory when the device computes in fp32 */
    float *host;      /* as many numbers; what put sends and get fetches */
};
/* shape: rank and dimensions, the rest is ignored. *p is zeroed before; close it after an error too. */
int lg_port_open(lg_device *d, lg_tensor shape, struct lg_port *p);
void lg_port_close(lg_device *d, struct lg_port *p);
/* Enqueues host -> device, device -> host. host must stay untouched until a sync. */
void lg_port_put(const struct lg_port *p, lg_stream *s);
void lg_port_get(const struct lg_port *p, lg_stream *s);

/* New device memory with these numbers in the compute type; blocks until it is filled. */
int lg_put_weights(lg_device *d, lg_stream *s, const float *values, size_t count, void **ret);
