/* A stand-in for liblg-cuda.so on machines without a GPU: tells of GPUs as $LG_STUB says, computes on
 * the host backend ($LG_STUB_HOST, a file). With it tests see what lgsup makes of GPUs: their places,
 * sums and refusals. Computing goes as far as `--plan` needs.
 *
 * LG_STUB: two (H200s), none, old (driver), arch (the second is another kind), held (the second's memory
 * is taken), small (both too small for any run), apart (no peer access), bare (no cuDNN). */
#include "base/check.h"
#include "kernels/backend.h"
#include "kernels/info.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 2 };
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

int lg_backend_open(int index, const struct lg_device_options *options, lg_device **ret)
{
    const char *path = getenv("LG_STUB_HOST");
    void *host = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) : NULL;
    lg_backend_open_fn *open_fn = NULL;
    if (host) *(void **)&open_fn = dlsym(host, LG_BACKEND_OPEN);
    if (!open_fn) return LG_FAIL(LG_ERR_NOTFOUND, "no host backend in $LG_STUB_HOST");
    LG_TRY(open_fn(0, options, ret));
    return 0;
}
