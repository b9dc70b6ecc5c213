/* GPU memory behind a POSIX fd, and pinned host memory.
 *
 * Design: cuMemCreate makes physical memory, which lives as long as some process holds the fd or a
 * mapping; each process maps it into its own address space. Sizes are rounded to the granularity of
 * the GPU, the same in every process. The driver's functions are looked up through the runtime, so
 * that this object does not need libcuda to be loaded (a machine without a driver gets a message).
 *
 * Order: mapped, zeroed, synchronised, then given out as an fd: whoever gets it finds zeros. */
#include "kernels/cuda/info.h"
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define DRIVER_CALLS(X)                                                                            \
    X(cuMemGetAllocationGranularity)                                                               \
    X(cuMemCreate)                                                                                 \
    X(cuMemRelease)                                                                                \
    X(cuMemAddressReserve)                                                                         \
    X(cuMemAddressFree)                                                                            \
    X(cuMemMap)                                                                                    \
    X(cuMemUnmap)                                                                                  \
    X(cuMemSetAccess)                                                                              \
    X(cuMemExportToShareableHandle)                                                                \
    X(cuMemImportFromShareableHandle)                                                              \
    X(cuMemGetAllocationPropertiesFromHandle)                                                      \
    X(cuGetErrorName)

enum { DRIVER_API = 12000 }; /* the oldest driver interface with all of them */

static struct {
#define X(name) __typeof__(name) *name;
    DRIVER_CALLS(X)
#undef X
} driver;
static bool driver_complete;

static void look_up(void)
{
    driver_complete = true;
#define X(name)                                                                                    \
    {                                                                                              \
        enum cudaDriverEntryPointQueryResult found;                                                \
        void *at = NULL;                                                                           \
        cudaError_t e =                                                                            \
            cudaGetDriverEntryPointByVersion(#name, &at, DRIVER_API, cudaEnableDefault, &found);   \
        if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) driver_complete = false;     \
        *(void **)&driver.name = at;                                                               \
    }
    DRIVER_CALLS(X)
#undef X
}

static int need_driver(const lg_cuda_device *d)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    LG_CUDA(cudaSetDevice(d->index));
    pthread_once(&once, look_up);
    if (!driver_complete)
        return LG_FAIL(LG_ERR_CONFIG, "the NVIDIA driver lacks memory behind fds: update it");
    return 0;
}

static const char *reason(CUresult e)
{
    const char *name = NULL;
    driver.cuGetErrorName(e, &name);
    return name ? name : "unknown error";
}

static CUmemAllocationProp properties(int gpu)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu},
    };
}

static int round_up(int gpu, size_t bytes, size_t *ret)
{
    CUmemAllocationProp p = properties(gpu);
    size_t unit = 0;
    CUresult e =
        driver.cuMemGetAllocationGranularity(&unit, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (e != CUDA_SUCCESS)
        return LG_FAIL(LG_ERR_FAILED, "cuda:%d gives no granularity of memory: %s", gpu, reason(e));
    *ret = (bytes + unit - 1) / unit * unit;
    return 0;
}

static int no_way(int gpu, const char *why)
{
    return LG_FAIL(LG_ERR_CONFIG,
                   "cuda:%d cannot reach memory of another GPU (%s): leave parallel.exchange out, "
                   "or set it to \"host\"",
                   gpu, why);
}

/* By $LG_CUDA_NO_PEER. */
static bool is_forbidden(int gpu, CUmemGenericAllocationHandle handle)
{
    CUmemAllocationProp p = {0};
    return lg_cuda_no_peer() &&
           driver.cuMemGetAllocationPropertiesFromHandle(&p, handle) == CUDA_SUCCESS &&
           p.location.id != gpu;
}

static int map_handle(int gpu, CUmemGenericAllocationHandle handle, size_t bytes, void **ret)
{
    CUdeviceptr at = 0;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (is_forbidden(gpu, handle)) return no_way(gpu, "$LG_CUDA_NO_PEER");
    CUresult e = driver.cuMemAddressReserve(&at, bytes, 0, 0, 0);
    if (e != CUDA_SUCCESS)
        return LG_FAIL(LG_ERR_NOSPACE, "no addresses for %zu bytes on cuda:%d: %s", bytes, gpu,
                       reason(e));
    e = driver.cuMemMap(at, bytes, 0, handle, 0);
    if (e != CUDA_SUCCESS) {
        driver.cuMemAddressFree(at, bytes);
        return LG_FAIL(LG_ERR_MISMATCH, "cannot map %zu bytes of shared memory on cuda:%d: %s",
                       bytes, gpu, reason(e));
    }
    e = driver.cuMemSetAccess(at, bytes, &access, 1);
    if (e != CUDA_SUCCESS) {
        driver.cuMemUnmap(at, bytes);
        driver.cuMemAddressFree(at, bytes);
        return no_way(gpu, reason(e));
    }
    *ret = (void *)at;
    return 0;
}

static int no_memory(int gpu, size_t bytes, CUresult e)
{
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) cudaGetLastError();
    return LG_FAIL(LG_ERR_NOSPACE,
                   "no %zu bytes of shared memory on cuda:%d (%s; of this process's GPU %zu of %zu "
                   "are free): lower the batch, or see with nvidia-smi who holds the rest",
                   bytes, gpu, reason(e), available, total);
}

/* Zeroes the memory behind handle, through a mapping of this device. */
static int clear(lg_cuda_device *d, CUmemGenericAllocationHandle handle, size_t bytes)
{
    void *at = NULL;
    LG_TRY(map_handle(d->index, handle, bytes, &at));
    LG_CUDA(cudaMemset(at, 0, bytes));
    LG_CUDA(cudaDeviceSynchronize());
    lg_cuda_unmap(&d->base, at, bytes);
    return 0;
}

int lg_cuda_share(lg_device *base, int gpu, size_t bytes, int *ret_fd)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    CUmemAllocationProp p = properties(gpu);
    CUmemGenericAllocationHandle handle;
    size_t rounded;
    int fd = -1, rc;
    LG_TRY(need_driver(d));
    LG_TRY(round_up(gpu, bytes, &rounded));
    CUresult e = driver.cuMemCreate(&handle, rounded, &p, 0);
    if (e != CUDA_SUCCESS) return no_memory(gpu, bytes, e);
    LG_TRY_GOTO(rc, clear(d, handle, rounded), out);
    e = driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            0);
    if (e != CUDA_SUCCESS || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        rc = LG_FAIL(LG_ERR_FAILED, "cuda:%d gives no fd for its memory: %s", gpu, reason(e));
out:
    driver.cuMemRelease(handle); /* the fd holds the memory from now on */
    if (rc == 0) *ret_fd = fd;
    return rc;
}

int lg_cuda_map(lg_device *base, int fd, size_t bytes, void **ret)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    CUmemGenericAllocationHandle handle;
    size_t rounded;
    LG_TRY(need_driver(d));
    LG_TRY(round_up(d->index, bytes, &rounded));
    CUresult e = driver.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (e != CUDA_SUCCESS)
        return LG_FAIL(LG_ERR_MISMATCH, "cuda:%d does not take shared memory of %zu bytes: %s",
                       d->index, bytes, reason(e));
    int rc = map_handle(d->index, handle, rounded, ret);
    driver.cuMemRelease(handle); /* the mapping holds the memory */
    return rc;
}

void lg_cuda_unmap(lg_device *base, void *at, size_t bytes)
{
    lg_cuda_device *d = (lg_cuda_device *)base;
    size_t rounded;
    LG_CUDA(cudaSetDevice(d->index));
    LG_CUDA(cudaDeviceSynchronize());
    if (round_up(d->index, bytes, &rounded) < 0 ||
        driver.cuMemUnmap((CUdeviceptr)at, rounded) != CUDA_SUCCESS ||
        driver.cuMemAddressFree((CUdeviceptr)at, rounded) != CUDA_SUCCESS)
        lg_cuda_fatal("unmap", "not a mapping of shared memory", __FILE__, __LINE__);
}

int lg_cuda_pin(lg_device *base, void *host, size_t bytes)
{
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base)->index));
    cudaError_t e =
        cudaHostRegister(host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e == cudaErrorHostMemoryAlreadyRegistered) {
        cudaGetLastError();
        return 0;
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        return LG_FAIL(LG_ERR_NOSPACE, "cannot pin %zu bytes of host memory: %s (see ulimit -l)",
                       bytes, cudaGetErrorString(e));
    }
    return 0;
}

int lg_cuda_map_host(lg_device *base, void *host, size_t bytes, void **ret)
{
    LG_TRY(lg_cuda_pin(base, host, bytes));
    LG_CUDA(cudaHostGetDevicePointer(ret, host, 0));
    return 0;
}

void lg_cuda_unpin(lg_device *base, void *host)
{
    LG_CUDA(cudaSetDevice(((lg_cuda_device *)base)->index));
    if (cudaHostUnregister(host) != cudaSuccess) cudaGetLastError();
}
