/* A stand-in for NVIDIA's libcuda.so.1: as much as CUDA's runtime asks before it finds no GPU. With it
 * the messages of the real liblg-cuda.so are seen on machines without a driver.
 *
 * LG_STUB_VERSION: what the driver knows, 12040 for CUDA 12.4; LG_STUB_INIT: what cuInit returns. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { OUT_OF_MEMORY = 2, NOT_FOUND = 500, FOUND = 0, SYMBOL_NOT_FOUND = 1 };

EXPORT int cuInit(unsigned flags);
EXPORT int cuDriverGetVersion(int *ret);
EXPORT int cuDeviceGetCount(int *ret);
EXPORT int cuMemAlloc_v2(uint64_t *ret, size_t bytes);
EXPORT int cuMemFree_v2(uint64_t at);
EXPORT int cuGetProcAddress_v2(const char *name, void **ret, int version, uint64_t flags,
                               int *ret_status);

static int from_environment(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

int cuInit(unsigned flags)
{
    (void)flags;
    return from_environment("LG_STUB_INIT", 0);
}

int cuDriverGetVersion(int *ret)
{
    *ret = from_environment("LG_STUB_VERSION", 13000);
    return 0;
}

int cuDeviceGetCount(int *ret)
{
    *ret = 0;
    return 0;
}

/* What the tests' scratch memory is (gpu_test.h). */
int cuMemAlloc_v2(uint64_t *ret, size_t bytes)
{
    void *at = malloc(bytes);
    *ret = (uint64_t)(uintptr_t)at;
    return at ? 0 : OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t at)
{
    free((void *)(uintptr_t)at);
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **ret, int version, uint64_t flags, int *ret_status)
{
    (void)version, (void)flags;
    void *found = NULL;
    if (!strcmp(name, "cuInit")) *(int (**)(unsigned)) & found = cuInit;
    if (!strcmp(name, "cuDriverGetVersion")) *(int (**)(int *)) & found = cuDriverGetVersion;
    if (!strcmp(name, "cuDeviceGetCount")) *(int (**)(int *)) & found = cuDeviceGetCount;
    if (!strcmp(name, "cuGetProcAddress"))
        *(int (**)(const char *, void **, int, uint64_t, int *)) & found = cuGetProcAddress_v2;
    *ret = found;
    if (ret_status) *ret_status = found ? FOUND : SYMBOL_NOT_FOUND;
    return found ? 0 : NOT_FOUND;
}
