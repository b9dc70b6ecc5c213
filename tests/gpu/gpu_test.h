/* What the GPU tests share: counting results, opening devices. No test library: these programs run on
 * machines where nothing of ours is installed. */
#pragma once
#include "base/check.h"
#include "kernels/device.h"
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int gpu_passed, gpu_failed;

/* A program that a time limit ends has said what it found until then. */
__attribute__((constructor)) static inline void gpu_print_lines(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
}

/* One result. What failed is printed by whoever found it. */
static inline void gpu_count(bool ok)
{
    *(ok ? &gpu_passed : &gpu_failed) += 1;
}
/* For each of a program's checks, in order: whether this process does it. With PART=I/N in the environment
 * it does every Nth, from the Ith (0 ...) on, and N processes share the work (sanitize.sh). */
static inline bool gpu_my_turn(void)
{
    static int turn, part, parts;
    const char *wanted = getenv("PART");
    if (parts == 0 && (!wanted || sscanf(wanted, "%d/%d", &part, &parts) != 2 || parts < 1))
        part = 0, parts = 1;
    return turn++ % parts == part;
}
/* The last line of a program; its value is the exit status. */
static inline int gpu_summary(void)
{
    printf("%d passed, %d failed\n", gpu_passed, gpu_failed);
    return gpu_failed != 0 || gpu_passed == 0;
}
static inline void gpu_need(int rc)
{
    if (rc == 0) return;
    fprintf(stderr, "%s\n", lg_err_text());
    exit(2);
}
static inline lg_device *gpu_open(const char *name, const char *precision)
{
    lg_device *d = NULL;
    gpu_need(lg_device_open(name, &(struct lg_device_options){.precision = precision}, &d));
    return d;
}

/* SANITIZE=1 in the environment: sanitize.sh looks at what kernels do to memory. Then nothing is compared
 * with another precision or ref64, and scratch memory is what nobody has written. */
static inline bool gpu_sanitized(void)
{
    return getenv("SANITIZE") != NULL;
}
/* Such memory: lg_device_alloc gives out zeros, the driver does not. It lives until the next call. */
static inline int gpu_fresh(size_t bytes, void **ret)
{
    static uint64_t before;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    LG_ASSERT(driver);
    int (*alloc)(uint64_t *, size_t), (*release)(uint64_t);
    *(void **)&alloc = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&release = dlsym(driver, "cuMemFree_v2");
    LG_ASSERT(alloc && release && (!before || release(before) == 0));
    LG_ASSERT(alloc(&before, bytes ? bytes : 1) == 0);
    *ret = (void *)(uintptr_t)before;
    return 0;
}
static inline void *gpu_scratch(lg_device *d, size_t bytes)
{
    void *p = NULL;
    gpu_need(gpu_sanitized() ? gpu_fresh(bytes, &p) : lg_device_alloc(d, bytes, &p));
    return p;
}

/* Rounded to nearest even. */
static inline float gpu_to_bf16(double x)
{
    union {
        float f;
        uint32_t u;
    } v = {.f = (float)x};
    v.u = (v.u + 0x7FFF + (v.u >> 16 & 1)) & 0xFFFF0000u;
    return v.f;
}

/* Uploads doubles as elements of type t. */
static inline void gpu_put(lg_stream *s, void *device, lg_dtype t, const double *v, size_t n)
{
    char *bytes = malloc(n * lg_dtype_bytes(t));
    LG_ASSERT(bytes);
    for (size_t i = 0; i < n; i++) {
        float f = (float)v[i];
        if (t == LG_F64) memcpy(bytes + i * 8, &v[i], 8);
        if (t == LG_F32) memcpy(bytes + i * 4, &f, 4);
        if (t == LG_BF16) memcpy(bytes + i * 2, (char *)&f + 2, 2);
        if (t == LG_F16) ((_Float16 *)(void *)bytes)[i] = (_Float16)f;
        if (t == LG_I32) ((int32_t *)(void *)bytes)[i] = (int32_t)v[i];
    }
    lg_stream_upload(s, device, bytes, n * lg_dtype_bytes(t));
    lg_stream_sync(s);
    free(bytes);
}

/* Downloads them; the caller frees. */
static inline double *gpu_get(lg_stream *s, const void *device, lg_dtype t, size_t n)
{
    double *v = malloc(n * sizeof *v);
    char *bytes = malloc(n * lg_dtype_bytes(t));
    LG_ASSERT(v && bytes);
    lg_stream_download(s, bytes, device, n * lg_dtype_bytes(t));
    lg_stream_sync(s);
    for (size_t i = 0; i < n; i++) {
        float f = 0;
        if (t == LG_F64) memcpy(&v[i], bytes + i * 8, 8);
        if (t == LG_F32) memcpy(&f, bytes + i * 4, 4);
        if (t == LG_BF16) memcpy((char *)&f + 2, bytes + i * 2, 2);
        if (t == LG_F16) f = (float)((_Float16 *)(void *)bytes)[i];
        if (t != LG_F64) v[i] = f;
    }
    free(bytes);
    return v;
}

/* ||got - want|| / max(||want||, floor). */
static inline double gpu_error(const double *got, const double *want, size_t n, double floor)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference) / fmax(sqrt(norm), floor);
}

/* A precision under test: relative error in the 2-norm that one operation may have against ref64 on the
 * same (rounded) inputs. fp32: sums of a thousand terms stay below 2e-6. tf32: rounding an operand to 11
 * bits costs at most 2^-11 / sqrt(3), two of them 4e-4; 0.7 times that where values are spread over a
 * binade, but a few large ones that lie at its beginning may make a result. What has too few values for
 * either is in fp32 (kernels/cuda/gemm.c). fp16: results rounded to 11 bits. bf16: to 8 bits. */
struct gpu_precision {
    const char *name;
    lg_dtype round;
    double tolerance;
};
static const struct gpu_precision GPU_PRECISIONS[] = {{"fp32", LG_F32, 1e-5},
                                                      {"tf32", LG_F32, 4e-4},
                                                      {"fp16", LG_F16, 2e-3},
                                                      {"bf16", LG_BF16, 1e-2}};
enum { GPU_PRECISION_COUNT = 4 };
