/* Devices and streams: finding a backend's shared object, and the thin layer over its functions.
 *
 * Design: a backend exports what opens it and what it was built from (backend.h); everything else goes
 * through the function pointers of struct lg_device. The object is never unloaded (RTLD_NODELETE): OpenMP and oneDNN
 * keep threads and caches that would outlive their code.
 *
 * Invariants: device->allocations holds exactly the blocks handed out by lg_device_alloc and not
 * yet freed. A dry stream is a bare struct lg_stream that the backend never sees. */
#include "kernels/device.h"
#include "base/check.h"
#include "base/fs.h"
#include "base/pieces.h"
#include "base/room.h"
#include "kernels/backend.h"
#include "kernels/op_trace.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INDEX_MAX = 1023, POPULATE_BYTES = 2 << 20 };
static const char *const BACKENDS[] = {"host", "ref64", "cuda"};

/* "cuda:3" -> "cuda" and 3; "host" -> "host" and 0. */
static int parse_name(const char *name, const char **ret_backend, int *ret_index)
{
    size_t len = strcspn(name, ":");
    const char *backend = NULL;
    for (size_t i = 0; i < LG_ARRAY_LEN(BACKENDS); i++) {
        if (strlen(BACKENDS[i]) == len && !strncmp(name, BACKENDS[i], len)) backend = BACKENDS[i];
    }
    if (!backend)
        return LG_FAIL(LG_ERR_CONFIG, "unknown device \"%s\": use host, ref64 or cuda:<number>",
                       name);
    long index = 0;
    if (name[len] == ':') {
        char *end;
        errno = 0;
        index = strtol(name + len + 1, &end, 10);
        if (errno || *end || end == name + len + 1 || index < 0 || index > INDEX_MAX)
            return LG_FAIL(LG_ERR_CONFIG,
                           "device \"%s\": after the colon goes a number from 0 to %d", name,
                           INDEX_MAX);
    }
    *ret_backend = backend;
    *ret_index = (int)index;
    return 0;
}

/* Where a backend may lie, in order: $LG_BACKEND_DIR alone when it is set (a backend that is being
 * tried out); else ../lib beside the program, then ../../lib (programs of the test folders). */
static int find_backend(const char *backend, char ret_path[LG_PATH_BYTES])
{
    const char *override = getenv("LG_BACKEND_DIR");
    if (override && *override) {
        LG_TRY(lg_path(ret_path, "%s/liblg-%s.so", override, backend));
        if (access(ret_path, R_OK) == 0) return 0;
        return LG_FAIL(LG_ERR_NOTFOUND, "no liblg-%s.so in $LG_BACKEND_DIR (%s)", backend,
                       override);
    }
    char dir[LG_PATH_BYTES];
    LG_TRY(lg_program_dir(dir));
    static const char *const UP[] = {"../lib", "../../lib"};
    for (size_t i = 0; i < LG_ARRAY_LEN(UP); i++) {
        LG_TRY(lg_path(ret_path, "%s/%s/liblg-%s.so", dir, UP[i], backend));
        if (access(ret_path, R_OK) == 0) return 0;
    }
    return LG_FAIL(
        LG_ERR_NOTFOUND,
        "the backend \"%s\" is not installed: no liblg-%s.so in %s/../lib (build it with "
        "`make%s`, or name its folder in $LG_BACKEND_DIR)",
        backend, backend, dir, strcmp(backend, "cuda") ? "" : " cuda");
}

/* Waking NVIDIA's driver takes 250 ms, loading cuBLASLt another 340: done at the same time, since a
 * rank that comes back is waited for. Whatever goes wrong here, the backend finds out again and says. */
static void *wake_driver(void *arg)
{
    (void)arg;
    void *dl = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NODELETE);
    int (*init)(unsigned) = NULL;
    if (dl) *(void **)&init = dlsym(dl, "cuInit");
    if (init) init(0);
    return NULL;
}

static void *load(const char *backend, const char *path)
{
    pthread_t waking;
    bool wakes = !strcmp(backend, "cuda") && pthread_create(&waking, NULL, wake_driver, NULL) == 0;
    void *dl = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (wakes) pthread_join(waking, NULL);
    return dl;
}

/* False: of another build. */
static bool is_of_this_build(void *dl)
{
    const char *(*interface)(void);
    *(void **)&interface = dlsym(dl, LG_BACKEND_INTERFACE);
    return interface && !strcmp(interface(), lg_backend_interface());
}

int lg_backend_load(const char *device_name, const char *symbol, struct lg_backend *ret)
{
    const char *backend = NULL;
    int index = 0;
    char path[LG_PATH_BYTES];
    LG_TRY(parse_name(device_name, &backend, &index));
    LG_TRY(find_backend(backend, path));
    /* Read by OpenMP when it is loaded. Stages share the cores: a thread that spins at a barrier takes
     * the core from whoever would end the wait. (The operations' tests on two loaded cores: 7.0 s of
     * CPU time spinning, 2.1 s sleeping.) */
    setenv("OMP_WAIT_POLICY", "passive", 0);
    void *dl = load(backend, path);
    if (!dl)
        return LG_FAIL(LG_ERR_FAILED,
                       "cannot load the backend %s: %s: a library that is missing may be installed "
                       "or put beside it",
                       path, dlerror());
    if (!is_of_this_build(dl)) {
        dlclose(dl);
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s is not of the same build as this program: install both from one", path);
    }
    void *found = dlsym(dl, symbol);
    if (!found) {
        dlclose(dl);
        return LG_FAIL(LG_ERR_MISMATCH, "%s exports no %s", path, symbol);
    }
    *ret = (struct lg_backend){.dl = dl, .symbol = found, .index = index};
    return 0;
}

int lg_device_open(const char *name, const struct lg_device_options *options, lg_device **ret)
{
    struct lg_backend backend;
    LG_TRY(lg_backend_load(name, LG_BACKEND_OPEN, &backend));
    lg_backend_open_fn *open_fn;
    *(void **)&open_fn = backend.symbol;
    struct lg_device_options defaults = {0};
    if (options) defaults = *options;
    if (defaults.threads <= 0) defaults.threads = 1;
    lg_device *d = NULL;
    int rc = open_fn(backend.index, &defaults, &d);
    if (rc < 0) {
        dlclose(backend.dl);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    LG_ASSERT(d && d->ops && d->scratch_bytes && d->alloc && d->free && d->stream_open &&
              d->stream_close && d->sync && d->upload && d->download && d->zero && d->copy &&
              d->close);
    d->dl = backend.dl;
    d->allocations = NULL;
    d->n_allocations = 0;
    *ret = d;
    return 0;
}

void lg_device_close(lg_device **d)
{
    if (!d || !*d) return;
    for (size_t i = 0; i < (*d)->n_allocations; i++) {
        lg_trace_forget((*d)->allocations[i]);
        (*d)->free(*d, (*d)->allocations[i]);
    }
    free((*d)->allocations);
    void *dl = (*d)->dl;
    (*d)->close(*d);
    if (dl) dlclose(dl);
    *d = NULL;
}

lg_dtype lg_device_dtype(const lg_device *d)
{
    return d->dtype;
}

const char *lg_device_isa(const lg_device *d)
{
    return d->isa;
}

const char *lg_device_fingerprint(const lg_device *d)
{
    return d->fingerprint;
}

bool lg_device_is_host(const lg_device *d)
{
    return d->is_host;
}

int lg_device_alloc(lg_device *d, size_t bytes, void **ret)
{
    void **grown = reallocarray(d->allocations, d->n_allocations + 1, sizeof *grown);
    if (!grown) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of device allocations");
    d->allocations = grown;
    void *p = NULL;
    int no_room = 0, rc;
    while ((rc = d->alloc(d, bytes, &p)) < 0 && lg_room_may_come(rc, &no_room)) continue;
    LG_TRY(rc);
    LG_ASSERT(p && (uintptr_t)p % 64 == 0);
    d->allocations[d->n_allocations++] = p;
    lg_trace_memory(p, bytes);
    *ret = p;
    return 0;
}

void lg_device_free(lg_device *d, void **p)
{
    if (!p || !*p) return;
    for (size_t i = 0; i < d->n_allocations; i++) {
        if (d->allocations[i] != *p) continue;
        d->allocations[i] = d->allocations[--d->n_allocations];
        lg_trace_forget(*p);
        d->free(d, *p);
        *p = NULL;
        return;
    }
    LG_ASSERT(!"memory of this device");
}

int lg_device_share(lg_device *d, int gpu, size_t bytes, int *ret_fd)
{
    LG_ASSERT(d->share && bytes);
    LG_TRY(d->share(d, gpu, bytes, ret_fd));
    return 0;
}

int lg_device_map(lg_device *d, int fd, size_t bytes, void **ret)
{
    LG_ASSERT(d->map && bytes);
    LG_TRY(d->map(d, fd, bytes, ret));
    LG_ASSERT((uintptr_t)*ret % 64 == 0);
    lg_trace_memory(*ret, bytes);
    return 0;
}

void lg_device_unmap(lg_device *d, void *at, size_t bytes)
{
    LG_ASSERT(d->unmap);
    lg_trace_forget(at);
    d->unmap(d, at, bytes);
}

/* What is in no memory yet gets there; contents stay. Where the kernel is too old the driver does it. */
static void populate(void *arg, size_t at, size_t n)
{
    madvise((char *)arg + at, n, MADV_POPULATE_WRITE);
}

/* The driver takes new memory a page after the other: 0.6 s a GiB. Several threads ask for it before. */
int lg_device_pin(lg_device *d, void *host, size_t bytes)
{
    if (!d->pin || !bytes) return 0;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)host % page;
    lg_pieces_make(&(struct lg_pieces){.count = before + bytes,
                                       .piece = POPULATE_BYTES,
                                       .make = populate,
                                       .arg = (char *)host - before});
    LG_TRY(d->pin(d, host, bytes));
    return 0;
}

void lg_device_unpin(lg_device *d, void *host)
{
    if (d->unpin) d->unpin(d, host);
}

int lg_device_map_host(lg_device *d, void *host, size_t bytes, void **ret)
{
    *ret = host;
    if (!d->map_host || !bytes) return 0;
    LG_TRY(d->map_host(d, host, bytes, ret));
    LG_ASSERT((uintptr_t)*ret % 64 == 0);
    lg_trace_memory(*ret, bytes);
    return 0;
}

int lg_stream_open(lg_device *d, lg_stream **ret)
{
    lg_stream *s = NULL;
    LG_TRY(d->stream_open(d, &s));
    LG_ASSERT(s);
    s->device = d;
    s->dry = false;
    s->scratch = NULL;
    s->scratch_bytes = s->scratch_need = 0;
    *ret = s;
    return 0;
}

int lg_stream_open_dry(lg_device *d, lg_stream **ret)
{
    lg_stream *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a dry stream");
    s->device = d;
    s->dry = true;
    *ret = s;
    return 0;
}

void lg_stream_close(lg_stream **s)
{
    if (!s || !*s) return;
    if ((*s)->dry)
        free(*s);
    else
        (*s)->device->stream_close(*s);
    *s = NULL;
}

void lg_stream_set_scratch(lg_stream *s, void *scratch, size_t bytes)
{
    LG_ASSERT(scratch || !bytes);
    LG_ASSERT((uintptr_t)scratch % 64 == 0);
    s->scratch = scratch;
    s->scratch_bytes = bytes;
}

size_t lg_stream_scratch_need(const lg_stream *s)
{
    return s->scratch_need;
}

bool lg_stream_is_dry(const lg_stream *s)
{
    return s->dry;
}

lg_device *lg_stream_device(const lg_stream *s)
{
    return s->device;
}

/* A graph's stream takes operations alone. */
static bool runs(const lg_stream *s)
{
    LG_ASSERT(!s->record);
    return !s->dry;
}

void lg_stream_sync(lg_stream *s)
{
    if (runs(s)) s->device->sync(s);
}

int lg_event_open(lg_device *d, lg_event **ret)
{
    lg_event *e = NULL;
    if (d->event_open)
        LG_TRY(d->event_open(d, &e));
    else
        e = calloc(1, sizeof *e);
    if (!e) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an event");
    e->device = d;
    *ret = e;
    return 0;
}

void lg_event_close(lg_event **e)
{
    if (!e || !*e) return;
    if ((*e)->device->event_close)
        (*e)->device->event_close(*e);
    else
        free(*e);
    *e = NULL;
}

void lg_stream_record(lg_stream *s, lg_event *e)
{
    LG_ASSERT(s->device == e->device);
    if (runs(s) && s->device->record) s->device->record(s, e);
}

void lg_stream_wait(lg_stream *s, lg_event *e)
{
    LG_ASSERT(s->device == e->device);
    if (runs(s) && s->device->wait) s->device->wait(s, e);
}

void lg_event_sync(lg_event *e)
{
    if (e->device->event_sync) e->device->event_sync(e);
}

void lg_stream_upload(lg_stream *s, void *device_dst, const void *host_src, size_t bytes)
{
    if (runs(s) && bytes) s->device->upload(s, device_dst, host_src, bytes);
}

void lg_stream_download(lg_stream *s, void *host_dst, const void *device_src, size_t bytes)
{
    if (runs(s) && bytes) s->device->download(s, host_dst, device_src, bytes);
}

void lg_stream_zero(lg_stream *s, void *device_dst, size_t bytes)
{
    if (runs(s) && bytes) s->device->zero(s, device_dst, bytes);
}

void lg_stream_copy(lg_stream *s, void *device_dst, const void *device_src, size_t bytes)
{
    if (runs(s) && bytes) s->device->copy(s, device_dst, device_src, bytes);
}
