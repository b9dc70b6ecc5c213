/* A stand-in for liblg-cuda.so on machines without a GPU: tells of GPUs as $LG_STUB says, computes on
 * the host backend ($LG_STUB_HOST, a file). With it tests see what lgsup makes of GPUs: their places,
 * sums and refusals. Computing goes as far as `--plan` needs.
 *
 * LG_STUB: two (H200s), none, old (driver), arch (the second is another kind), held (the second's memory
 * is taken), small (both too small for any run), apart (no peer access), bare (no cuDNN),
 * unpinnable (with $LG_STUB_MEMORY).
 * LG_STUB_MEMORY: it computes, in memory of which nobody knows that it is the host's; copies go from one kind to the
 * other, and what casts, copies, adds up gradients and updates weights takes none of the host's but what is mapped. With
 * LG_STUB=apart a GPU neither makes nor maps memory of the other.
 * Its links (kernels/link.h) are TCP connections (link.c). LG_STUB_LATE: with it, and as late as it may (late.h). */
#include "base/check.h"
#include "kernels/backend.h"
#include "kernels/info.h"
#include "tests/stub/late.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { COUNT = 2, PINNED_MAX = 64, OWN_MAX = 4096, OPEN_MAX = 16 };
#define GIB ((uint64_t)1 << 30)

static bool is(const char *what)
{
    const char *stub = getenv("LG_STUB");
    return stub && !strcmp(stub, what);
}

__attribute__((visibility("default"))) lg_backend_open_fn lg_backend_open;
__attribute__((visibility("default"))) lg_backend_info_fn lg_backend_info;

int lg_backend_info(int index, int *ret_count, struct lg_device_info *ret)
{
    if (is("none")) return LG_FAIL(LG_ERR_NOTFOUND, "no GPU here (stub)");
    if (is("old")) return LG_FAIL(LG_ERR_MISMATCH, "the driver is too old (stub)");
    if (ret_count) *ret_count = COUNT;
    if (!ret) return 0;
    if (index >= COUNT) return LG_FAIL(LG_ERR_NOTFOUND, "no cuda:%d (stub)", index);
    if (index == 1 && is("arch")) return LG_FAIL(LG_ERR_MISMATCH, "cuda:1 is another kind (stub)");
    *ret = (struct lg_device_info){.name = "Stub H200",
                                   .capability = "9.0",
                                   .kernels = "9.0",
                                   .driver = "13.0",
                                   .runtime = "13.0",
                                   .cudnn = "9.14.0",
                                   .total_bytes = 140 * GIB,
                                   .free_bytes = 139 * GIB,
                                   .peers = (uint64_t)1 << (1 - index)};
    if (is("small")) ret->total_bytes = ret->free_bytes = GIB;
    if (is("held") && index == 1) ret->free_bytes = GIB;
    if (is("apart")) ret->peers = 0;
    if (is("bare")) ret->cudnn[0] = 0;
    return 0;
}

/* ---- memory that is not the host's ---- */

static struct {
    char *at;
    size_t bytes;
} g_pinned[PINNED_MAX];
static int g_n_pinned;
static lg_device g_host; /* its functions, before */
static struct lg_ops g_ops;

/* What has been given out and mapped. */
static struct {
    const char *at;
    size_t bytes;
} g_own[OWN_MAX];
static int g_n_own;

static void add_own(const void *at, size_t bytes)
{
    LG_ASSERT(g_n_own < OWN_MAX);
    g_own[g_n_own].at = at;
    g_own[g_n_own++].bytes = bytes;
}

static void remove_own(const void *at)
{
    for (int i = 0; i < g_n_own; i++) {
        if (g_own[i].at != at) continue;
        g_own[i] = g_own[--g_n_own];
        return;
    }
    LG_ASSERT(!"memory of this device");
}

static bool is_own(const void *at)
{
    for (int i = 0; i < g_n_own; i++)
        if ((const char *)at >= g_own[i].at && (const char *)at < g_own[i].at + g_own[i].bytes)
            return true;
    return false;
}

/* Numbers of the devices that are open. */
static struct {
    const lg_device *device;
    int index;
} g_open[OPEN_MAX];
static int g_n_open;

static int check_reach(const lg_device *d, int gpu)
{
    for (int i = 0; i < g_n_open && is("apart"); i++)
        if (g_open[i].device == d && g_open[i].index != gpu)
            return LG_FAIL(LG_ERR_CONFIG, "cuda:%d cannot reach cuda:%d (stub)", g_open[i].index,
                           gpu);
    return 0;
}

static int stub_alloc(lg_device *d, size_t bytes, void **ret)
{
    LG_TRY(g_host.alloc(d, bytes, ret));
    add_own(*ret, bytes);
    return 0;
}

static void stub_free(lg_device *d, void *p)
{
    remove_own(p);
    g_host.free(d, p);
}

static void stub_cast(lg_stream *s, const struct lg_cast_args *a)
{
    LG_ASSERT(is_own(a->x.data) && is_own(a->y.data));
    g_host.ops->cast(s, a);
}

static void stub_adamw(lg_stream *s, const struct lg_adamw_args *a)
{
    const lg_tensor *of[] = {&a->w, &a->m, &a->v, &a->grad, &a->w_out, &a->m_out, &a->v_out};
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++) LG_ASSERT(is_own(of[i]->data));
    for (int i = 0; i < a->copies; i++) LG_ASSERT(is_own(a->working[i].data));
    g_host.ops->adamw(s, a);
}

static void stub_adamw8(lg_stream *s, const struct lg_adamw8_args *a)
{
    const lg_tensor *of[] = {&a->w,     &a->m,     &a->v,     &a->m_max,     &a->v_max,    &a->grad,
                             &a->w_out, &a->m_out, &a->v_out, &a->m_max_out, &a->v_max_out};
    for (size_t i = 0; i < LG_ARRAY_LEN(of); i++) LG_ASSERT(is_own(of[i]->data));
    for (int i = 0; i < a->copies; i++) LG_ASSERT(is_own(a->working[i].data));
    g_host.ops->adamw8(s, a);
}

static void stub_ema(lg_stream *s, const struct lg_ema_args *a)
{
    LG_ASSERT(is_own(a->ema.data) && is_own(a->w.data) && is_own(a->out.data));
    g_host.ops->ema(s, a);
}

static void stub_reduce_ranks(lg_stream *s, const struct lg_reduce_ranks_args *a)
{
    LG_ASSERT(is_own(a->y.data) && is_own(a->squares.data));
    for (int i = 0; i < a->count; i++) LG_ASSERT(is_own(a->x[i].data));
    g_host.ops->reduce_ranks(s, a);
}

static void stub_copy_rows(lg_stream *s, const struct lg_copy_rows_args *a)
{
    LG_ASSERT(is_own(a->x.data) && is_own(a->y.data));
    g_host.ops->copy_rows(s, a);
}

static void stub_copy(lg_stream *s, void *to, const void *from, size_t bytes)
{
    LG_ASSERT(!bytes || (is_own(to) && is_own(from)));
    g_host.copy(s, to, from, bytes);
}

static void stub_upload(lg_stream *s, void *to, const void *from, size_t bytes)
{
    LG_ASSERT(is_own(to) && !is_own(from));
    g_host.upload(s, to, from, bytes);
}

static int stub_share(lg_device *d, int gpu, size_t bytes, int *ret_fd)
{
    char name[16];
    LG_TRY(check_reach(d, gpu));
    snprintf(name, sizeof name, "stub-%d", gpu);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory (stub): %s", strerror(errno));
    *ret_fd = fd;
    return 0;
}

static int stub_map(lg_device *d, int fd, size_t bytes, void **ret)
{
    char link[64], name[64] = "";
    int gpu = -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    LG_ASSERT(readlink(link, name, sizeof name - 1) > 0);
    LG_ASSERT(sscanf(name, "/memfd:stub-%d", &gpu) == 1);
    LG_TRY(check_reach(d, gpu));
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return LG_FAIL(LG_ERR_IO, "cannot map (stub): %s", strerror(errno));
    add_own(at, bytes);
    *ret = at;
    return 0;
}

static void stub_unmap(lg_device *d, void *at, size_t bytes)
{
    (void)d;
    remove_own(at);
    munmap(at, bytes);
}

static bool overlaps(int i, const char *at, size_t bytes)
{
    return at < g_pinned[i].at + g_pinned[i].bytes && g_pinned[i].at < at + bytes;
}

static int stub_pin(lg_device *d, void *host, size_t bytes)
{
    (void)d;
    for (int i = 0; i < g_n_pinned; i++)
        if (overlaps(i, host, bytes)) return LG_FAIL(LG_ERR_FAILED, "pinned already (stub)");
    if (is("unpinnable")) return LG_FAIL(LG_ERR_NOSPACE, "no memory can be pinned (stub)");
    LG_ASSERT(g_n_pinned < PINNED_MAX);
    g_pinned[g_n_pinned].at = host;
    g_pinned[g_n_pinned++].bytes = bytes;
    return 0;
}

/* Host memory that is the device's as well. */
static int stub_map_host(lg_device *d, void *host, size_t bytes, void **ret)
{
    LG_TRY(stub_pin(d, host, bytes));
    add_own(host, bytes);
    *ret = host;
    return 0;
}

/* As CUDA wants it: a copy lies within one pinned piece or touches none. */
static void stub_download(lg_stream *s, void *host, const void *from, size_t bytes)
{
    LG_ASSERT(is_own(from) && !is_own(host));
    for (int i = 0; i < g_n_pinned; i++) {
        const char *at = host, *piece = g_pinned[i].at;
        LG_ASSERT(!overlaps(i, at, bytes) ||
                  (at >= piece && at + bytes <= piece + g_pinned[i].bytes));
    }
    g_host.download(s, host, from, bytes);
}

int lg_backend_open(int index, const struct lg_device_options *options, lg_device **ret)
{
    const char *path = getenv("LG_STUB_HOST");
    void *host = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) : NULL;
    lg_backend_open_fn *open_fn = NULL;
    if (host) *(void **)&open_fn = dlsym(host, LG_BACKEND_OPEN);
    if (!open_fn) return LG_FAIL(LG_ERR_NOTFOUND, "no host backend in $LG_STUB_HOST");
    LG_TRY(open_fn(0, options, ret));
    if (!getenv("LG_STUB_MEMORY")) return 0;
    lg_device *d = *ret;
    LG_ASSERT(g_n_open < OPEN_MAX);
    g_open[g_n_open].device = d;
    g_open[g_n_open++].index = index;
    g_host = *d;
    g_ops = *d->ops;
    g_ops.cast = stub_cast;
    g_ops.adamw = stub_adamw;
    g_ops.adamw8 = stub_adamw8;
    g_ops.ema = stub_ema;
    g_ops.reduce_ranks = stub_reduce_ranks;
    g_ops.copy_rows = stub_copy_rows;
    d->ops = &g_ops;
    d->is_host = false;
    d->alloc = stub_alloc;
    d->free = stub_free;
    d->share = stub_share;
    d->map = stub_map;
    d->unmap = stub_unmap;
    d->pin = stub_pin;
    d->map_host = stub_map_host;
    d->copy = stub_copy;
    d->upload = stub_upload;
    d->download = stub_download;
    if (getenv("LG_STUB_LATE")) late_device(d);
    return 0;
}
