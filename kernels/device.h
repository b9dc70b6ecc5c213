/* A device runs operations in streams. Backends are shared objects, liblg-<backend>.so, found in
 * ../lib beside the program and opened by name: programs link neither CUDA nor oneDNN.
 *
 * A *dry* stream runs nothing: each operation only records how much scratch memory it would need. A
 * net is sized by running it once on a dry stream with NULL data pointers; the plan then allocates
 * once.
 */
#pragma once
#include "kernels/tensor.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct lg_device lg_device;
typedef struct lg_stream lg_stream;

struct lg_device_options {
    int threads;     /* of this process, fixed by the plan; never from the environment. 0: 1 */
    const char *isa; /* host: "sse2", "avx2", "avx512" or NULL for the machine's best */
    /* cuda: "fp32" (NULL), "tf32" (fp32 storage, products in tf32), "bf16" or "fp16" (16-bit storage,
     * fp32 accumulation); the others have one precision and ignore it. */
    const char *precision;
};

/* name: "host", "ref64" (double, slow, the reference), "cuda:0". LG_ERR_CONFIG for an unknown
 * name or an instruction set the machine lacks, LG_ERR_NOTFOUND when the backend is not installed.
 * options may be NULL. */
int lg_device_open(const char *name, const struct lg_device_options *options, lg_device **ret);
/* Frees what was allocated from it. *d becomes NULL. */
void lg_device_close(lg_device **d);

/* Compute type: f32 on host, f64 on ref64, as its precision says on cuda. */
lg_dtype lg_device_dtype(const lg_device *d);
const char *lg_device_isa(const lg_device *d);
/* Everything of this device that decides bits: backend, isa, threads, library versions. */
const char *lg_device_fingerprint(const lg_device *d);
/* True when host pointers (and memfd mappings) are device pointers. */
bool lg_device_is_host(const lg_device *d);

/* 64-byte aligned device memory, zeroed. */
int lg_device_alloc(lg_device *d, size_t bytes, void **ret);
void lg_device_free(lg_device *d, void **p);

/* Memory that outlives its process: behind an fd, which any process may hold and any GPU of the
 * machine map. Not on the host (a memfd does that). A kernel may still write for a moment after the
 * SIGKILL of its process, never after its pidfd has fired. */
/* New zeroed memory of GPU `gpu`, which need not be this device; *ret_fd is close-on-exec and the
 * caller's. LG_ERR_NOSPACE when that GPU has not enough. */
int lg_device_share(lg_device *d, int gpu, size_t bytes, int *ret_fd);
/* Maps what lg_device_share(bytes) made, for this device to read and write; LG_ERR_CONFIG when it is
 * on another GPU that this one cannot reach. fd stays the caller's and may be closed. */
int lg_device_map(lg_device *d, int fd, size_t bytes, void **ret);
void lg_device_unmap(lg_device *d, void *at, size_t bytes);
/* Makes host memory (a mapping of the caller's) fit for copies at full speed beside computation. A
 * no-op on the host. It must be unpinned before it is unmapped; a process that ends needs not. */
int lg_device_pin(lg_device *d, void *host, size_t bytes);
void lg_device_unpin(lg_device *d, void *host);
/* Pins host memory and makes it memory that this device's operations read and write, too, across the bus; *ret: its
 * address there. On the host itself the same address. */
int lg_device_map_host(lg_device *d, void *host, size_t bytes, void **ret);

/* A point in the work of one stream for which another of the same device waits. */
typedef struct lg_event lg_event;
int lg_event_open(lg_device *d, lg_event **ret);
void lg_event_close(lg_event **e);

int lg_stream_open(lg_device *d, lg_stream **ret);
int lg_stream_open_dry(lg_device *d, lg_stream **ret);
void lg_stream_close(lg_stream **s);
/* Gives the stream its scratch memory (owned by the caller, on the device). */
void lg_stream_set_scratch(lg_stream *s, void *scratch, size_t bytes);
/* The most any operation wanted on this (dry) stream so far. */
size_t lg_stream_scratch_need(const lg_stream *s);
bool lg_stream_is_dry(const lg_stream *s);
lg_device *lg_stream_device(const lg_stream *s);
/* Waits until everything enqueued is done. A device fault aborts the process. */
void lg_stream_sync(lg_stream *s);
/* In stream order. The host side must stay untouched until a sync. No-ops on a dry stream. */
/* The event is behind what was enqueued so far; recording again moves it. */
void lg_stream_record(lg_stream *s, lg_event *e);
/* What is enqueued from now on starts after the event's last recording. The host does not wait. */
void lg_stream_wait(lg_stream *s, lg_event *e);
/* The host waits for its last recording. */
void lg_event_sync(lg_event *e);
void lg_stream_upload(lg_stream *s, void *device_dst, const void *host_src, size_t bytes);
void lg_stream_download(lg_stream *s, void *host_dst, const void *device_src, size_t bytes);
void lg_stream_zero(lg_stream *s, void *device_dst, size_t bytes);
void lg_stream_copy(lg_stream *s, void *device_dst, const void *device_src, size_t bytes);
