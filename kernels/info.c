/* Telling of devices; see info.h. The backend stays loaded, as with lg_device_open. */
#include "kernels/info.h"
#include "base/check.h"
#include "kernels/backend.h"
#include <dlfcn.h>
#include <stddef.h>

static int ask(const char *name, int *ret_count, struct lg_device_info *ret)
{
    struct lg_backend backend;
    LG_TRY(lg_backend_load(name, LG_BACKEND_INFO, &backend));
    lg_backend_info_fn *info_fn;
    *(void **)&info_fn = backend.symbol;
    int rc = info_fn(backend.index, ret_count, ret);
    dlclose(backend.dl);
    LG_TRY(rc);
    return 0;
}

int lg_device_info(const char *name, struct lg_device_info *ret)
{
    struct lg_device_info info = {0};
    LG_TRY(ask(name, NULL, &info));
    *ret = info;
    return 0;
}

int lg_device_count(const char *backend, int *ret)
{
    int count = 0;
    LG_TRY(ask(backend, &count, NULL));
    LG_ASSERT(count > 0);
    *ret = count;
    return 0;
}
