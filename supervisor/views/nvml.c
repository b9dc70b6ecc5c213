/* The GPUs by NVML; see nvml.h. The few declarations needed stand here: names and layouts are part of
 * the library's stable interface (functions with a suffix keep their layout for ever). */
#include "supervisor/views/nvml.h"
#include "base/check.h"
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct nvml_device *nvml_device;
struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_utilization {
    unsigned int gpu, memory; /* percent of the last sampling period */
};

static struct {
    bool tried;
    int (*init)(void);
    int (*count)(unsigned int *);
    int (*handle)(unsigned int, nvml_device *);
    int (*name)(nvml_device, char *, unsigned int);
    int (*memory)(nvml_device, struct nvml_memory *);
    int (*utilization)(nvml_device, struct nvml_utilization *);
    bool ready;
} g_nvml;

static void open_library(const char *library)
{
    if (g_nvml.tried) return;
    g_nvml.tried = true;
    void *so = dlopen(library ? library : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!so) return;
    *(void **)&g_nvml.init = dlsym(so, "nvmlInit_v2");
    *(void **)&g_nvml.count = dlsym(so, "nvmlDeviceGetCount_v2");
    *(void **)&g_nvml.handle = dlsym(so, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&g_nvml.name = dlsym(so, "nvmlDeviceGetName");
    *(void **)&g_nvml.memory = dlsym(so, "nvmlDeviceGetMemoryInfo");
    *(void **)&g_nvml.utilization = dlsym(so, "nvmlDeviceGetUtilizationRates");
    g_nvml.ready = g_nvml.init && g_nvml.count && g_nvml.handle && g_nvml.name && g_nvml.memory &&
                   g_nvml.utilization && g_nvml.init() == 0;
}

static bool read_one(unsigned int index, struct lg_gpu *ret)
{
    nvml_device d;
    struct nvml_memory memory;
    struct nvml_utilization busy;
    struct lg_gpu gpu = {.busy_percent = -1};
    if (g_nvml.handle(index, &d) != 0 || g_nvml.memory(d, &memory) != 0) return false;
    if (g_nvml.name(d, gpu.name, sizeof gpu.name) != 0) snprintf(gpu.name, sizeof gpu.name, "GPU");
    if (g_nvml.utilization(d, &busy) == 0) gpu.busy_percent = (int)LG_MIN(busy.gpu, 100u);
    gpu.used_bytes = memory.used;
    gpu.total_bytes = memory.total;
    *ret = gpu;
    return true;
}

int lg_gpus_read(const char *library, struct lg_gpu ret[LG_NVML_MAX])
{
    unsigned int count = 0;
    int n = 0;
    open_library(library);
    if (!g_nvml.ready || g_nvml.count(&count) != 0) return 0;
    for (unsigned int i = 0; i < count && n < LG_NVML_MAX; i++) n += read_one(i, &ret[n]);
    return n;
}
