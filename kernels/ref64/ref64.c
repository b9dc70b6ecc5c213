/* The reference backend's device: host memory, one thread, no scratch. */
#include "kernels/ref64/ref64.h"
#include "base/check.h"
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

static const struct lg_ops OPS = {
#define LG_OP(name, ...) .name = ref64_##name,
#include "kernels/ops.def"
#undef LG_OP
};

static size_t no_scratch(lg_device *d, lg_op_id op, const void *args)
{
    return 0;
}

static int host_alloc(lg_device *d, size_t bytes, void **ret)
{
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (rounded < bytes) return LG_FAIL(LG_ERR_NOSPACE, "cannot allocate %zu bytes", bytes);
    void *p = aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT);
    if (!p) return LG_FAIL(LG_ERR_NOSPACE, "cannot allocate %zu bytes", bytes);
    memset(p, 0, rounded);
    *ret = p;
    return 0;
}

static void host_free(lg_device *d, void *p)
{
    free(p);
}

static int stream_open(lg_device *d, lg_stream **ret)
{
    lg_stream *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a stream");
    *ret = s;
    return 0;
}

static void stream_close(lg_stream *s)
{
    free(s);
}

static void nothing_pending(lg_stream *s) {}

static void copy_bytes(lg_stream *s, void *dst, const void *src, size_t bytes)
{
    memmove(dst, src, bytes);
}

static void zero_bytes(lg_stream *s, void *dst, size_t bytes)
{
    memset(dst, 0, bytes);
}

static void device_close(lg_device *d)
{
    free(d);
}

__attribute__((visibility("default"))) lg_backend_open_fn lg_backend_open;

int lg_backend_open(int index, const struct lg_device_options *options, lg_device **ret)
{
    if (index != 0) return LG_FAIL(LG_ERR_CONFIG, "there is one ref64 device, not ref64:%d", index);
    lg_device *d = calloc(1, sizeof *d);
    if (!d) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a device");
    *d = (lg_device){
        .ops = &OPS,
        .dtype = LG_F64,
        .is_host = true,
        .isa = "generic",
        .fingerprint = "ref64",
        .threads = 1,
        .scratch_bytes = no_scratch,
        .alloc = host_alloc,
        .free = host_free,
        .stream_open = stream_open,
        .stream_close = stream_close,
        .sync = nothing_pending,
        .upload = copy_bytes,
        .download = copy_bytes,
        .zero = zero_bytes,
        .copy = copy_bytes,
        .close = device_close,
    };
    *ret = d;
    return 0;
}
