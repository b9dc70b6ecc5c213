/* What the tests of the encoders share: models and goldens as files, tensors to a device and back.
 * Failures end the test program. */
#pragma once
#include "kernels/device.h"
#include "stages/io/safetensors.h"

/* A device with one thread and its stream. */
struct fixture {
    lg_device *device;
    lg_stream *stream;
};
struct fixture fixture_open(const char *device);
void fixture_close(struct fixture *f);

/* ||got - want|| / ||want||. */
double relative_error(const float *got, const float *want, size_t n);
/* fp32 values in the device's compute type; freed with the device. */
void *to_device(struct fixture *f, const float *values, size_t n);
/* Device memory for n values of the compute type. */
void *device_room(struct fixture *f, size_t n);
/* The caller frees. */
float *from_device(struct fixture *f, const void *data, size_t n);

/* The tensor `name` of a golden file as fp32 (caller frees), or as it lies in the file. */
float *golden_f32(const lg_st_file *g, const char *name, size_t *ret_n);
const struct lg_st_entry *golden(const lg_st_file *g, const char *name);
