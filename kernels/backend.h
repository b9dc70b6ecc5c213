/* What a backend must provide. Only the sources of kernels/ and kernels/graph, the backends and tests
 * include this. */
#pragma once
#include "kernels/device.h"
#include "kernels/ops.h"

typedef enum lg_op_id {
#define LG_OP(name, ...) LG_OP_##name,
#include "kernels/ops.def"
#undef LG_OP
    LG_OP_COUNT
} lg_op_id;

struct lg_ops {
#define LG_OP(name, ...) void (*name)(lg_stream *, const struct lg_##name##_args *);
#include "kernels/ops.def"
#undef LG_OP
};

/* Base of every backend's stream; a backend embeds it first. */
struct lg_stream {
    lg_device *device;
    bool dry;
    void *scratch;
    size_t scratch_bytes, scratch_need;
    /* Not NULL: operations are checked and handed to this instead of run (kernels/graph). */
    void (*record)(lg_stream *, lg_op_id op, const void *args);
};

/* Likewise of its events. */
struct lg_event {
    lg_device *device;
};

struct lg_device {
    const struct lg_ops *ops;
    lg_dtype dtype;
    bool is_host;
    char isa[16];
    char fingerprint[256];
    int threads;
    void *dl;           /* dlopen handle, closed by device.c */
    void **allocations; /* kept by device.c: what lg_device_alloc gave out */
    size_t n_allocations;
    /* Scratch bytes operation `op` needs for args (the struct of that op); data pointers may be NULL. */
    size_t (*scratch_bytes)(lg_device *, lg_op_id op, const void *args);
    int (*alloc)(lg_device *, size_t, void **);
    void (*free)(lg_device *, void *);
    int (*stream_open)(lg_device *, lg_stream **); /* fills only what it embeds beyond the base */
    void (*stream_close)(lg_stream *);
    void (*sync)(lg_stream *);
    /* All NULL where a stream's work is done when its call returns. */
    int (*event_open)(lg_device *, lg_event **);
    void (*event_close)(lg_event *);
    void (*record)(lg_stream *, lg_event *);
    void (*wait)(lg_stream *, lg_event *);
    void (*event_sync)(lg_event *);
    void (*upload)(lg_stream *, void *, const void *, size_t);
    void (*download)(lg_stream *, void *, const void *, size_t);
    void (*zero)(lg_stream *, void *, size_t);
    void (*copy)(lg_stream *, void *, const void *, size_t);
    /* NULL on backends whose memory is the host's. */
    int (*share)(lg_device *, int gpu, size_t, int *ret_fd);
    int (*map)(lg_device *, int fd, size_t, void **);
    void (*unmap)(lg_device *, void *, size_t);
    int (*pin)(lg_device *, void *, size_t);
    void (*unpin)(lg_device *, void *);
    int (*map_host)(lg_device *, void *, size_t, void **);
    void (*close)(lg_device *); /* frees the device itself */
};

/* Of the headers that programs and backends share (interface.c); a backend whose text differs is another
 * build's and is not opened. */
#define LG_BACKEND_INTERFACE "lg_backend_interface"
const char *lg_backend_interface(void);
/* The symbol a backend exports. index: the number behind the colon in "cuda:3", else 0. */
#define LG_BACKEND_OPEN "lg_backend_open"
typedef int lg_backend_open_fn(int index, const struct lg_device_options *options, lg_device **ret);
/* And one more where there are devices to tell of (info.h): any of the results may be NULL. */
#define LG_BACKEND_INFO "lg_backend_info"
struct lg_device_info;
typedef int lg_backend_info_fn(int index, int *ret_count, struct lg_device_info *ret);

/* Finds and loads the backend of a device's name and looks a symbol up (*ret_dl: for dlclose; NULL
 * symbol: LG_ERR_MISMATCH). */
struct lg_backend {
    void *dl, *symbol;
    int index; /* the number behind the colon */
};
int lg_backend_load(const char *device_name, const char *symbol, struct lg_backend *ret);
