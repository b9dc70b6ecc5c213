/* What NVIDIA's management library says about the GPUs. It is opened by name when somebody asks, so
 * nothing links it and a machine without a GPU just has none. */
#pragma once
#include <stdint.h>

enum { LG_NVML_MAX = 16, LG_GPU_NAME_BYTES = 96 };

struct lg_gpu {
    char name[LG_GPU_NAME_BYTES];
    uint64_t used_bytes, total_bytes;
    int busy_percent; /* -1: not told */
};

/* Fills at most LG_NVML_MAX; returns how many, 0 without a driver or a GPU. library: file name, or
 * NULL for the driver's own (libnvidia-ml.so.1), "" for this program itself (tests). Opened once. */
int lg_gpus_read(const char *library, struct lg_gpu ret[LG_NVML_MAX]);
