/* Finding a GPU and telling of it: driver, architecture, memory, cuDNN, peers. Every way in which a
 * machine can be unfit ends here in a sentence that says what to do. */
#include "kernels/cuda/info.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/info.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CAPABILITY "LG_CUDA_CAPABILITY"

static void version_text(int version, char ret[16]) /* 13020: "13.2" */
{
    snprintf(ret, 16, "%d.%d", version / 1000, version % 1000 / 10);
}

/* What a person can do about the errors that are no bug of ours. */
static const char *advice(cudaError_t e)
{
    switch (e) {
    case cudaErrorSystemNotReady:
        return "start nvidia-fabricmanager, or wait until the GPUs are set up";
    case cudaErrorSystemDriverMismatch:
        return "the driver in the kernel and its libraries differ: restart the machine after an "
               "update, or give the container the host's libraries";
    case cudaErrorDevicesUnavailable:
        return "another process holds it for itself: see nvidia-smi, and nvidia-smi -q -d COMPUTE "
               "for the mode";
    case cudaErrorECCUncorrectable:
        return "its memory is damaged: see nvidia-smi -q -d ECC, take another GPU";
    default:
        return "see nvidia-smi and the kernel's log (dmesg | grep -i nvrm)";
    }
}

/* For messages: the environment may hide GPUs. */
static const char *visible_gpus(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible ? visible : "";
}

static const char *hidden_by(void)
{
    return getenv("CUDA_VISIBLE_DEVICES") ? " with CUDA_VISIBLE_DEVICES=" : "";
}

static int count_gpus(int *ret)
{
    int count = 0, driver = 0;
    char known[16], needed[16];
    cudaError_t e = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    cudaGetLastError();
    version_text(driver, known);
    version_text(CUDART_VERSION, needed);
    if (e != cudaSuccess && driver == 0)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "no NVIDIA driver here: install one that knows CUDA %s or newer, or set "
                       "device = \"host\"",
                       needed);
    if (e == cudaErrorInsufficientDriver || (e != cudaSuccess && driver < CUDART_VERSION))
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "the NVIDIA driver is too old: it knows CUDA %s at most, this build needs %s: "
            "update the driver",
            known, needed);
    if (e == cudaErrorNoDevice || (e == cudaSuccess && count == 0))
        return LG_FAIL(LG_ERR_NOTFOUND, "no GPU here%s%.60s: set device = \"host\"", hidden_by(),
                       visible_gpus());
    if (e != cudaSuccess)
        return LG_FAIL(LG_ERR_FAILED, "the GPUs do not answer: %s: %s", cudaGetErrorString(e),
                       advice(e));
    *ret = count;
    return 0;
}

static int number_of(const struct cudaDeviceProp *gpu)
{
    return gpu->major * 10 + gpu->minor;
}

int lg_cuda_capability(const struct cudaDeviceProp *gpu, int *ret, size_t *ret_shared)
{
    static const struct {
        const char *name;
        int number, shared; /* KiB of a block */
    } KNOWN[] = {{"8.0", 80, 163}, {"8.6", 86, 99},    {"8.9", 89, 99},
                 {"9.0", 90, 227}, {"10.0", 100, 227}, {"12.0", 120, 99}};
    const char *forced = getenv(CAPABILITY);
    int own = number_of(gpu);
    *ret = own;
    *ret_shared = gpu->sharedMemPerBlockOptin;
    if (!forced || !*forced) return 0;
    for (size_t i = 0; i < LG_ARRAY_LEN(KNOWN); i++) {
        if (strcmp(forced, KNOWN[i].name)) continue;
        if (KNOWN[i].number > own)
            return LG_FAIL(LG_ERR_CONFIG,
                           "$" CAPABILITY " asks for the kernels of %s; %s has compute capability "
                           "%d.%d and runs older ones alone: unset it",
                           forced, gpu->name, gpu->major, gpu->minor);
        *ret = KNOWN[i].number;
        *ret_shared = LG_MIN(*ret_shared, (size_t)KNOWN[i].shared << 10);
        return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG,
                   "$" CAPABILITY " is \"%.40s\": 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0, or unset it",
                   forced);
}

/* "9.0", "8.0", "8.0, compiled by the driver from PTX of 8.0". The current device is the GPU. */
static int tell_kernels(const struct cudaDeviceProp *gpu, char *ret, size_t bytes)
{
    int capability, code, ptx;
    size_t shared;
    LG_TRY(lg_cuda_capability(gpu, &capability, &shared));
    cuda_code_of(&code, &ptx);
    int n = snprintf(ret, bytes, "%s", capability == 90 ? "9.0" : "8.0");
    if (code != ptx)
        snprintf(ret + n, bytes - (size_t)n, ", compiled by the driver from PTX of %d.%d", ptx / 10,
                 ptx % 10);
    return 0;
}

int lg_cuda_find_gpu(int index, struct cudaDeviceProp *ret)
{
    int count;
    LG_TRY(count_gpus(&count));
    if (index >= count)
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "no cuda:%d: %d GPU%s here, cuda:0 to cuda:%d%s%.60s: change trainer.gpus, "
                       "vae.gpus or text.gpus",
                       index, count, count == 1 ? " is" : "s are", count - 1, hidden_by(),
                       visible_gpus());
    cudaError_t e = cudaGetDeviceProperties(ret, index);
    if (e != cudaSuccess)
        return LG_FAIL(LG_ERR_FAILED, "cuda:%d does not answer: %s: %s", index,
                       cudaGetErrorString(e), advice(e));
    if (number_of(ret) < LG_CUDA_LEAST)
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "cuda:%d is a %s of compute capability %d.%d; the kernels need %d.%d (Ampere: A100, "
            "RTX 3090) or newer: take another GPU",
            index, ret->name, ret->major, ret->minor, LG_CUDA_LEAST / 10, LG_CUDA_LEAST % 10);
    return 0;
}

int lg_cuda_context(int index)
{
    cudaError_t e = cudaSetDevice(index);
    if (e == cudaSuccess) e = cudaFree(NULL);
    if (e == cudaErrorMemoryAllocation)
        return LG_FAIL(
            LG_ERR_NOSPACE,
            "no room for a context on cuda:%d: see with nvidia-smi who holds its memory, "
            "end them or take another GPU",
            index);
    if (e != cudaSuccess)
        return LG_FAIL(e == cudaErrorDevicesUnavailable ? LG_ERR_BUSY : LG_ERR_FAILED,
                       "no context on cuda:%d: %s: %s", index, cudaGetErrorString(e), advice(e));
    return 0;
}

/* The version alone: a handle would take hundreds of MiB of the GPU. */
static int ask_cudnn(char ret[16])
{
    const char *path = lg_cudnn_file();
    ret[0] = 0;
    void *dl = path ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    if (!dl) {
        const char *named = getenv("LG_CUDNN");
        if (path && named && *named)
            return LG_FAIL(LG_ERR_NOTFOUND, "cannot open $LG_CUDNN: %s", dlerror());
        return 0;
    }
    size_t (*get_version)(void);
    *(void **)&get_version = dlsym(dl, "cudnnGetVersion");
    size_t v = get_version ? get_version() : 0; /* 91400: 9.14.0 */
    if (v) snprintf(ret, 16, "%zu.%zu.%zu", v / 10000 % 1000, v / 100 % 100, v % 100);
    dlclose(dl);
    return 0;
}

bool lg_cuda_no_peer(void)
{
    const char *said = getenv("LG_CUDA_NO_PEER");
    return said && *said && strcmp(said, "0") != 0;
}

static uint64_t find_peers(int index, int count)
{
    uint64_t peers = 0;
    for (int k = 0; k < count && k < LG_DEVICE_PEERS_MAX && !lg_cuda_no_peer(); k++) {
        int can = 0;
        if (k != index && cudaDeviceCanAccessPeer(&can, index, k) == cudaSuccess && can)
            peers |= (uint64_t)1 << k;
    }
    return peers;
}

static int tell(int index, int count, struct lg_device_info *ret)
{
    struct cudaDeviceProp gpu;
    size_t available = 0, total = 0;
    int driver = 0;
    LG_TRY(lg_cuda_find_gpu(index, &gpu));
    LG_TRY(ask_cudnn(ret->cudnn));
    LG_TRY(lg_cuda_context(index));
    cudaError_t e = cudaMemGetInfo(&available, &total);
    if (e != cudaSuccess)
        return LG_FAIL(LG_ERR_FAILED, "cuda:%d does not tell its memory: %s: %s", index,
                       cudaGetErrorString(e), advice(e));
    cudaDriverGetVersion(&driver);
    snprintf(ret->name, sizeof ret->name, "%.63s", gpu.name);
    snprintf(ret->capability, sizeof ret->capability, "%d.%d", gpu.major, gpu.minor);
    LG_TRY(tell_kernels(&gpu, ret->kernels, sizeof ret->kernels));
    version_text(driver, ret->driver);
    version_text(CUDART_VERSION, ret->runtime);
    ret->total_bytes = total;
    ret->free_bytes = available;
    ret->peers = find_peers(index, count);
    return 0;
}

__attribute__((visibility("default"))) lg_backend_info_fn lg_backend_info;

int lg_backend_info(int index, int *ret_count, struct lg_device_info *ret)
{
    int count;
    LG_TRY(count_gpus(&count));
    if (ret) LG_TRY(tell(index, count, ret));
    if (ret_count) *ret_count = count;
    return 0;
}
