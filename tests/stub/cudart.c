/* A stand-in for CUDA's runtime and cuBLASLt under the real kernels, on machines without a GPU: nothing is computed, but
 * each launch is held to what a GPU of $LG_STUB_CAPABILITY ("8.6") gives a block. It does what the driver would: takes the
 * machine code for that GPU out of the binary, and refuses what has none. Registers, shared memory and the most threads
 * of a kernel are those that the compiler wrote into its code. So a launch that a predicate allows where it does not fit
 * ends the process, with the kernel's name. Where the binary has machine code for no such GPU at all there is nothing to
 * see: exit status 77. LG_STUB_LAUNCHED: a file that gets the names of the kernels that were launched and that were not.
 *
 * Sources: fat binaries and .nv.info as `cuobjdump` and `readelf` show them; limits: CUDA C++ Programming Guide, "Compute
 * Capabilities". cuBLASLt finds no algorithm: the products of anygemm.cu stand in. */
#include "base/check.h"
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
enum { KERNELS_MAX = 4096, MODULES_MAX = 64, NAME_MAX_BYTES = 512 };
enum { FAT_MAGIC = 0xba55ed50, FAT_PTX = 1, FAT_ELF = 2, FAT_ZSTD = 0x8000 };
enum { ATTR_MAX_THREADS = 0x05, ATTR_REGISTERS = 0x2f };
enum {
    NO_CODE = 77,
    BLOCK_THREADS = 1024,
    REGISTERS_OF_QUARTER = 16384,
    SHARED_UNASKED = 48 << 10,
    DRIVERS_OWN = 1 << 10
};

/* ---- the GPU ---- */

static const struct gpu {
    const char *name;
    int number, shared; /* KiB that a block may have */
} gpus[] = {{"8.0", 80, 163}, {"8.6", 86, 99},    {"8.9", 89, 99},
            {"9.0", 90, 227}, {"10.0", 100, 227}, {"12.0", 120, 99}};

static const struct gpu *gpu(void)
{
    const char *wanted = getenv("LG_STUB_CAPABILITY");
    for (size_t i = 0; i < LG_ARRAY_LEN(gpus); i++)
        if (wanted && !strcmp(wanted, gpus[i].name)) return &gpus[i];
    fprintf(stderr, "LG_STUB_CAPABILITY is none of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0\n");
    exit(2);
}

/* ---- code ---- */

/* Of one source file. */
struct module {
    char *elf; /* NULL: there is none for this GPU */
    size_t bytes;
    int code, ptx; /* 86: made for 8.6; 0: there is none */
};
struct kernel {
    const void *host; /* what a launch names */
    char name[NAME_MAX_BYTES];
    const struct module *module;
    int registers, threads_max;
    size_t shared, dynamic_max;
    unsigned launches;
};
static struct module g_module[MODULES_MAX];
static struct kernel g_kernel[KERNELS_MAX];
static int g_modules, g_kernels;

struct fat_head {
    uint32_t magic;
    uint16_t version, head_bytes;
    uint64_t bytes;
};
struct fat_entry {
    uint16_t kind, unknown;
    uint32_t head_bytes;
    uint64_t bytes;
    uint32_t packed_bytes, unknown2;
    uint16_t minor, major;
    uint32_t capability, name_at, name_bytes;
    uint64_t flags, zero, unpacked_bytes;
};

/* Code runs on GPUs of its major version from its own on; that of Hopper's own instructions, which is all that there is
 * of 9.0, on 9.0. */
static bool runs(int code)
{
    return code / 10 == gpu()->number / 10 && code <= gpu()->number;
}

static void unpack(struct module *m, const struct fat_entry *e)
{
    static size_t (*decompress)(void *, size_t, const void *, size_t);
    const char *from = (const char *)e + e->head_bytes;
    if (!(e->flags & FAT_ZSTD)) {
        m->elf = (char *)(uintptr_t)from;
        m->bytes = e->bytes;
        return;
    }
    void *zstd = decompress ? NULL : dlopen("libzstd.so.1", RTLD_NOW);
    if (zstd) *(void **)&decompress = dlsym(zstd, "ZSTD_decompress");
    LG_ASSERT(decompress); /* libzstd1 */
    free(m->elf);
    m->elf = malloc(e->unpacked_bytes);
    m->bytes = e->unpacked_bytes;
    LG_ASSERT(m->elf && decompress(m->elf, m->bytes, from, e->packed_bytes) == m->bytes);
}

static void choose(struct module *m, const struct fat_head *h)
{
    const char *at = (const char *)h + h->head_bytes, *end = at + h->bytes;
    LG_ASSERT(h->magic == FAT_MAGIC);
    while (at < end) {
        const struct fat_entry *e = (const struct fat_entry *)(const void *)at;
        const int of = (int)e->capability;
        if (e->kind == FAT_ELF && runs(of) && of > m->code) {
            m->code = of;
            unpack(m, e);
        }
        if (e->kind == FAT_PTX && of <= gpu()->number && of > m->ptx) m->ptx = of;
        at += e->head_bytes + e->bytes;
    }
}

static const Elf64_Shdr *section(const struct module *m, int i)
{
    const Elf64_Ehdr *h = (const Elf64_Ehdr *)(const void *)m->elf;
    return (const Elf64_Shdr *)(const void *)(m->elf + h->e_shoff) + i;
}

static const Elf64_Shdr *find_section(const struct module *m, const char *prefix, const char *name)
{
    const Elf64_Ehdr *h = (const Elf64_Ehdr *)(const void *)m->elf;
    const char *names = m->elf + section(m, h->e_shstrndx)->sh_offset;
    const size_t n = strlen(prefix);
    for (int i = 0; i < h->e_shnum; i++) {
        const char *of = names + section(m, i)->sh_name;
        if (!strncmp(of, prefix, n) && !strcmp(of + n, name)) return section(m, i);
    }
    return NULL;
}

static const char *symbol(const struct module *m, uint32_t i)
{
    const Elf64_Shdr *s = find_section(m, ".symtab", "");
    const Elf64_Sym *of = (const Elf64_Sym *)(const void *)(m->elf + s->sh_offset) + i;
    return m->elf + section(m, (int)s->sh_link)->sh_offset + of->st_name;
}

/* The values of an attribute in a section of attributes: format, attribute, 16 bits that are the value or how many bytes
 * of it follow. name: of the symbol that they are of, or NULL. */
static const uint32_t *attribute(const struct module *m, const Elf64_Shdr *s, int wanted,
                                 const char *name)
{
    const char *at = m->elf + s->sh_offset, *end = at + s->sh_size;
    while (at < end) {
        const uint32_t *values = (const uint32_t *)(const void *)(at + 4);
        const int format = at[0], attr = (unsigned char)at[1];
        uint16_t bytes;
        memcpy(&bytes, at + 2, sizeof bytes);
        if (format == 4 && attr == wanted && (!name || !strcmp(symbol(m, values[0]), name)))
            return values;
        at += 4 + (format == 4 ? bytes : 0);
    }
    return NULL;
}

static void look_up(struct kernel *k)
{
    const struct module *m = k->module;
    if (!m->elf) return;
    const uint32_t *registers =
        attribute(m, find_section(m, ".nv.info", ""), ATTR_REGISTERS, k->name);
    const Elf64_Shdr *own = find_section(m, ".nv.info.", k->name);
    const Elf64_Shdr *shared = find_section(m, ".nv.shared.", k->name);
    LG_ASSERT(registers && own);
    const uint32_t *threads = attribute(m, own, ATTR_MAX_THREADS, NULL);
    k->registers = (int)registers[1];
    k->threads_max = threads ? (int)(threads[0] * threads[1] * threads[2]) : BLOCK_THREADS;
    k->shared = shared ? shared->sh_size : 0;
    /* From 9.0 on the compiler counts what the driver keeps of each block, which is not of the block's share: a kernel of 231632
     * bytes, for which the section says 1024 more, runs on an H100. */
    if (gpu()->number >= 90) k->shared -= LG_MIN(k->shared, (size_t)DRIVERS_OWN);
}

EXPORT void **__cudaRegisterFatBinary(void *wrapper);
EXPORT void __cudaRegisterFatBinaryEnd(void **handle);
EXPORT void __cudaUnregisterFatBinary(void **handle);
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                                   int threads, uint3 *a, uint3 *b, dim3 *c, dim3 *d, int *e);

void **__cudaRegisterFatBinary(void *wrapper)
{
    const struct {
        int magic, version;
        const struct fat_head *data;
    } *w = wrapper;
    LG_ASSERT(g_modules < MODULES_MAX);
    choose(&g_module[g_modules], w->data);
    return (void **)&g_module[g_modules++];
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, uint3 *a, uint3 *b, dim3 *c, dim3 *d, int *e)
{
    (void)device, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
    LG_ASSERT(g_kernels < KERNELS_MAX && strlen(name) < NAME_MAX_BYTES);
    struct kernel *k = &g_kernel[g_kernels++];
    *k = (struct kernel){.host = host, .module = (const struct module *)(void *)handle};
    strcpy(k->name, name);
    look_up(k);
}

static struct kernel *find_kernel(const void *host)
{
    for (int i = 0; i < g_kernels; i++)
        if (g_kernel[i].host == host) return &g_kernel[i];
    LG_ASSERT(!"a kernel");
    return NULL;
}

/* ---- launches ---- */

#define REFUSE(k, ...)                                                                             \
    do {                                                                                           \
        fprintf(stderr, "FAIL on %s: %s: ", gpu()->name, (k)->name);                               \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        abort();                                                                                   \
    } while (0)

/* Registers go to a warp in pieces of 256, and warps to four quarters. */
static void check_registers(const struct kernel *k, unsigned threads)
{
    const int of_warp = (k->registers * 32 + 255) / 256 * 256;
    const int warps = ((int)threads + 127) / 128;
    if (of_warp * warps > REGISTERS_OF_QUARTER)
        REFUSE(k, "%d registers of %u threads", k->registers, threads);
}

static bool has_code(void)
{
    for (int i = 0; i < g_modules; i++)
        if (g_module[i].elf) return true;
    return false;
}

static void check_launch(struct kernel *k, dim3 grid, dim3 block, size_t dynamic)
{
    const unsigned threads = block.x * block.y * block.z;
    const size_t most = (size_t)gpu()->shared << 10;
    if (!has_code()) {
        fprintf(stderr, "no machine code for %s in this build\n", gpu()->name);
        exit(NO_CODE);
    }
    k->launches++;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || grid.x > INT32_MAX)
        REFUSE(k, "a grid of %u x %u x %u", grid.x, grid.y, grid.z);
    if (!threads || threads > BLOCK_THREADS) REFUSE(k, "%u threads", threads);
    if (!k->module->elf && !k->module->ptx) REFUSE(k, "there is no code for it");
    if (!k->module->elf) return; /* the driver compiles it */
    if ((int)threads > k->threads_max)
        REFUSE(k, "%u threads, made for %d", threads, k->threads_max);
    check_registers(k, threads);
    if (k->shared + dynamic > most)
        REFUSE(k, "%zu bytes of shared memory, of %zu", k->shared + dynamic, most);
    if (dynamic > k->dynamic_max && k->shared + dynamic > SHARED_UNASKED)
        REFUSE(k, "%zu bytes of shared memory that were not asked for", dynamic);
}

static struct {
    dim3 grid, block;
    size_t shared;
} g_pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            struct CUstream_st *stream);
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                              void *stream);
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *host);
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                                      size_t shared, cudaStream_t stream);

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st *stream)
{
    (void)stream;
    g_pushed.grid = grid;
    g_pushed.block = block;
    g_pushed.shared = shared;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = g_pushed.grid;
    *block = g_pushed.block;
    *shared = g_pushed.shared;
    *(cudaStream_t *)stream = NULL;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *ret, const void *host)
{
    *ret = (cudaKernel_t)(void *)find_kernel(host);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t stream)
{
    (void)args, (void)stream;
    check_launch((struct kernel *)(void *)kernel, grid, block, shared);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute what, int value)
{
    struct kernel *k = find_kernel(host);
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (k->module->elf && k->shared + (size_t)value > (size_t)gpu()->shared << 10)
        REFUSE(k, "asks for %d bytes of shared memory", value);
    k->dynamic_max = (size_t)value;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *host)
{
    const struct module *m = find_kernel(host)->module;
    *ret = (struct cudaFuncAttributes){.binaryVersion = m->elf ? m->code : gpu()->number,
                                       .ptxVersion = m->elf ? m->code : m->ptx};
    return cudaSuccess;
}

/* What was launched. */
__attribute__((destructor)) static void tell(void)
{
    const char *path = getenv("LG_STUB_LAUNCHED");
    FILE *f = path && has_code() ? fopen(path, "ae") : NULL;
    for (int i = 0; i < g_kernels && f; i++)
        fprintf(f, "%s %s\n", g_kernel[i].launches ? "launched" : "never", g_kernel[i].name);
    if (f) fclose(f);
}

/* ---- the rest of the runtime: memory is the host's, work takes no time ---- */

EXPORT cudaError_t cudaGetDeviceCount(int *ret)
{
    *ret = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int index)
{
    (void)index;
    memset(ret, 0, sizeof *ret);
    strcpy(ret->name, "stand-in");
    ret->major = gpu()->number / 10;
    ret->minor = gpu()->number % 10;
    ret->sharedMemPerBlockOptin = (size_t)gpu()->shared << 10;
    ret->multiProcessorCount = 108;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return cudaErrorMemoryAllocation;
    *ret = at;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *available = *total = (size_t)80 << 30;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                   enum cudaMemcpyKind kind, cudaStream_t s)
{
    (void)s;
    if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToDevice) memcpy(to, from, bytes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *ret, cudaEvent_t a, cudaEvent_t b)
{
    (void)a, (void)b;
    *ret = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *ret)
{
    *ret = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *ret, int a, int b)
{
    (void)a, (void)b;
    *ret = 0;
    return cudaSuccess;
}

EXPORT const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess ? "no error" : "an error";
}

#define NOTHING(name, ...)                                                                         \
    EXPORT cudaError_t name(__VA_ARGS__)                                                           \
    {                                                                                              \
        return cudaSuccess;                                                                        \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
NOTHING(cudaGetLastError, void)
NOTHING(cudaSetDevice, int index)
NOTHING(cudaFree, void *p)
NOTHING(cudaDeviceSynchronize, void)
NOTHING(cudaStreamCreateWithFlags, cudaStream_t *ret, unsigned flags)
NOTHING(cudaStreamDestroy, cudaStream_t s)
NOTHING(cudaStreamSynchronize, cudaStream_t s)
NOTHING(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned flags)
NOTHING(cudaEventCreate, cudaEvent_t *ret)
NOTHING(cudaEventCreateWithFlags, cudaEvent_t *ret, unsigned flags)
NOTHING(cudaEventDestroy, cudaEvent_t e)
NOTHING(cudaEventRecord, cudaEvent_t e, cudaStream_t s)
NOTHING(cudaEventSynchronize, cudaEvent_t e)
NOTHING(cudaEventQuery, cudaEvent_t e)
NOTHING(cudaMemset, void *p, int value, size_t bytes)
NOTHING(cudaMemsetAsync, void *p, int value, size_t bytes, cudaStream_t s)
NOTHING(cudaMemset2DAsync, void *p, size_t pitch, int value, size_t w, size_t h, cudaStream_t s)
NOTHING(cudaHostRegister, void *p, size_t bytes, unsigned flags)
NOTHING(cudaHostUnregister, void *p)

EXPORT cudaError_t cudaHostGetDevicePointer(void **ret, void *host, unsigned flags)
{
    *ret = host;
    return cudaSuccess;
}

/* Whatever is asked of the driver. */
static int done(void)
{
    return 0;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **ret, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found)
{
    *(int (**)(void)) & *ret = done;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- cuBLASLt ---- */

#define LT(name, ...)                                                                              \
    EXPORT cublasStatus_t name(__VA_ARGS__)                                                        \
    {                                                                                              \
        return CUBLAS_STATUS_SUCCESS;                                                              \
    }
LT(cublasLtCreate, cublasLtHandle_t *ret)
LT(cublasLtDestroy, cublasLtHandle_t h)
LT(cublasLtMatmulDescInit_internal, cublasLtMatmulDesc_t d, size_t bytes,
   cublasComputeType_t compute, cudaDataType_t scale)
LT(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
   const void *value, size_t bytes)
LT(cublasLtMatrixLayoutInit_internal, cublasLtMatrixLayout_t l, size_t bytes, cudaDataType type,
   uint64_t rows, uint64_t cols, int64_t ld)
LT(cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t what,
   const void *value, size_t bytes)
LT(cublasLtMatmulPreferenceInit_internal, cublasLtMatmulPreference_t p, size_t bytes)
LT(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulPreference_t p,
   cublasLtMatmulPreferenceAttributes_t what, const void *value, size_t bytes)
LT(cublasLtMatmulAlgoConfigSetAttribute, cublasLtMatmulAlgo_t *a,
   cublasLtMatmulAlgoConfigAttributes_t what, const void *value, size_t bytes)
LT(cublasLtMatmulAlgoConfigGetAttribute, const cublasLtMatmulAlgo_t *a,
   cublasLtMatmulAlgoConfigAttributes_t what, void *value, size_t bytes, size_t *written)

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e, cublasLtMatmulPreference_t p, int wanted,
    cublasLtMatmulHeuristicResult_t found[], int *ret)
{
    *ret = 0;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                              const cublasLtMatmulAlgo_t *algo,
                                              cublasLtMatmulHeuristicResult_t *ret)
{
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                                     const void *a, cublasLtMatrixLayout_t la, const void *b,
                                     cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                                     cublasLtMatrixLayout_t lc, void *e, cublasLtMatrixLayout_t le,
                                     const cublasLtMatmulAlgo_t *algo, void *workspace,
                                     size_t bytes, cudaStream_t s)
{
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
#pragma GCC diagnostic pop

EXPORT size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

EXPORT const char *cublasLtGetStatusString(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_SUCCESS ? "no error" : "not supported";
}
