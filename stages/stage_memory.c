/* A stage's devices, regions, window and weights; see stage.h.
 *
 * A device is opened once a process and closed after the regions it maps. Regions of a GPU are made and
 * mapped through the device: shm/region.h gets its functions as a place. */
#include "base/heartbeat.h"
#include "base/log.h"
#include "kernels/ops.h"
#include "stages/stage.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILL_WAIT_MS = 2, UPLOAD_COUNT = 1 << 24 };
enum { BESIDE = -2 }; /* in place of a GPU's number */

/* ---- devices ---- */

void lg_stage_device_name(const lg_config *c, lg_role role, int index,
                          char ret[LG_DEVICE_NAME_BYTES])
{
    int gpu = lg_plan_gpu(c, role, index);
    if (gpu < 0)
        snprintf(ret, LG_DEVICE_NAME_BYTES, "host");
    else
        snprintf(ret, LG_DEVICE_NAME_BYTES, "cuda:%d", gpu);
}

static int open_device(const char *name, const lg_plan *p, lg_role role, lg_device **ret)
{
    LG_TRY(lg_device_open(name,
                          &(struct lg_device_options){.threads = p->threads[role],
                                                      .isa = p->isa,
                                                      .precision = p->precision},
                          ret));
    return 0;
}

int lg_stage_error_of_key(const char *key, int rc)
{
    char text[2 * LG_PATH_BYTES];
    if (rc >= 0) return rc;
    snprintf(text, sizeof text, "%s", lg_err_message());
    lg_err_clear();
    return lg_err_fail(rc, __FILE__, __LINE__, __func__, "%s: %s", key, text);
}

int lg_stage_plan_device(const lg_config *c, const lg_plan *p, lg_role role, int index,
                         lg_device **ret)
{
    char name[LG_DEVICE_NAME_BYTES];
    if (p->is_described && lg_plan_gpu(c, role, index) >= 0)
        return lg_device_describe(p->precision, ret);
    lg_stage_device_name(c, role, index, name);
    return open_device(name, p, role, ret);
}

int lg_stage_plan_host_device(const lg_config *c, const lg_plan *p, lg_role role, const char *key)
{
    lg_device *d;
    if (p->is_described || lg_plan_gpu(c, role, 0) < 0) return 0;
    LG_TRY(lg_stage_error_of_key(key, open_device("host", p, role, &d)));
    lg_device_close(&d);
    return 0;
}

/* Opened before? */
static bool find_device(const lg_stage *st, int gpu, lg_device **ret)
{
    for (int i = 0; i < st->n_devices; i++) {
        if (st->device_gpu[i] != gpu) continue;
        *ret = st->device[i];
        return true;
    }
    LG_ASSERT(st->n_devices < LG_STAGE_DEVICES_MAX);
    return false;
}

static void keep_device(lg_stage *st, int gpu, lg_device *d)
{
    lg_log(LG_INFO, "device %s", lg_device_fingerprint(d));
    st->device_gpu[st->n_devices] = gpu;
    st->device[st->n_devices++] = d;
}

int lg_stage_device(lg_stage *st, lg_role role, int index, lg_device **ret)
{
    const int gpu = lg_plan_gpu(st->config, role, index);
    if (find_device(st, gpu, ret)) return 0;
    LG_TRY(lg_stage_plan_device(st->config, &st->plan, role, index, ret));
    keep_device(st, gpu, *ret);
    return 0;
}

int lg_stage_host_device(lg_stage *st, lg_role role, lg_device **ret)
{
    if (find_device(st, BESIDE, ret)) return 0;
    LG_TRY(open_device("host", &st->plan, role, ret));
    keep_device(st, BESIDE, *ret);
    return 0;
}

/* ---- regions ---- */

static int place_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    return lg_device_share(p->device, p->gpu, bytes, ret_fd);
}

static int place_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    return lg_device_map(p->device, fd, bytes, ret);
}

static void place_unmap(const struct lg_region_place *p, void *at, size_t bytes)
{
    lg_device_unmap(p->device, at, bytes);
}

static int place_map_host(const struct lg_region_place *p, void *host, size_t bytes, void **ret)
{
    return lg_device_map_host(p->device, host, bytes, ret);
}

static bool on_host(const lg_device *d)
{
    return !d || lg_device_is_host(d);
}

static struct lg_region_place place_of(const lg_stage *st, lg_device *d, lg_role role, int index)
{
    struct lg_region_place p = {.device = d,
                                .gpu = lg_plan_gpu(st->config, role, index),
                                .create = place_create,
                                .map = d ? place_map : NULL,
                                .unmap = place_unmap};
    lg_stage_device_name(st->config, role, index, p.name);
    return p;
}

/* With the host, where d reaches it; NULL: this process does not use it on a device. */
static struct lg_region_place place_between(lg_device *d)
{
    return (struct lg_region_place){.device = d, .map_host = d ? place_map_host : NULL};
}

static void remember(lg_stage *st, lg_region *r)
{
    LG_ASSERT(!st->copied && st->n_regions < (int)LG_ARRAY_LEN(st->region));
    st->region[st->n_regions++] = r;
}

int lg_stage_region(lg_stage *st, const struct lg_stage_memory *m, lg_region **ret, const char *fmt,
                    ...)
{
    char name[LG_REGION_NAME_BYTES];
    const bool is_remote = m->front_only || !on_host(m->device);
    struct lg_region_place place = {0};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    if (is_remote)
        place = m->is_with_host || (m->is_handed && st->plan.apart)
                    ? place_between(m->device)
                    : place_of(st, m->front_only ? NULL : m->device, m->role, m->index);
    int rc = lg_region_open(&(struct lg_region_spec){.keeper = st->keeper,
                                                     .name = name,
                                                     .bytes = m->bytes,
                                                     .front_bytes = m->front_bytes,
                                                     .plan_hash = st->plan.hash,
                                                     .run_id = st->board->s->preamble.run_id,
                                                     .place = is_remote ? &place : NULL,
                                                     .is_made = m->is_made},
                            ret);
    if (rc == LG_ERR_NOTFOUND) return lg_stage_lost(st, "%s", lg_err_message());
    LG_TRY(rc);
    remember(st, *ret);
    return 0;
}

bool lg_stage_latents_on_host(const lg_plan *p)
{
    return p->instances[LG_ROLE_vae] == 0;
}

/* Where what a rank trains on lies, for a process that does or does not use it itself. */
static struct lg_region_place window_place(const lg_stage *st, lg_device *d, int rank, bool uses)
{
    if (st->plan.apart) return place_between(uses ? d : NULL);
    return place_of(st, d, LG_ROLE_trainer, rank * st->plan.sequence);
}

int lg_stage_window(lg_stage *st, lg_device *device, lg_window **ret)
{
    struct lg_window_geometry g;
    struct lg_region_place latent[LG_INSTANCES_MAX], text[LG_INSTANCES_MAX];
    struct lg_window_places places = {0};
    lg_window_geometry_of(&st->plan, &g);
    if (lg_plan_gpu(st->config, LG_ROLE_trainer, 0) >= 0) {
        bool host_latents = lg_stage_latents_on_host(&st->plan);
        for (int i = 0; device && i < g.ranks; i++) {
            const bool trains = st->role == LG_ROLE_trainer && st->index / st->plan.sequence == i;
            latent[i] = window_place(st, device, i, trains || st->role == LG_ROLE_vae);
            text[i] = window_place(st, device, i, trains || lg_role_is_text(st->role));
        }
        places.text = text;
        places.latent = host_latents ? NULL : latent;
        places.skip_text = !device;
        places.skip_latent = !device && !host_latents;
    }
    int rc = lg_window_open(&(struct lg_region_spec){.keeper = st->keeper,
                                                     .plan_hash = st->plan.hash,
                                                     .run_id = st->board->s->preamble.run_id,
                                                     .is_made = lg_trainer_began(st->board)},
                            &g, &places, ret);
    if (rc == LG_ERR_NOTFOUND) return lg_stage_lost(st, "%s", lg_err_message());
    LG_TRY(rc);
    for (size_t i = 0; i < LG_ARRAY_LEN((*ret)->region); i++) {
        if (!(*ret)->region[i]) continue;
        remember(st, (*ret)->region[i]);
        (*ret)->region[i] = NULL; /* the stage closes them */
    }
    return 0;
}

/* ---- weights ---- */

/* In pieces, so that the staging memory stays small. */
int lg_stage_upload(lg_device *d, void *dst, const float *host, size_t count)
{
    const lg_dtype type = lg_device_dtype(d);
    void *staged = NULL;
    lg_stream *s = NULL;
    int rc;
    LG_TRY_GOTO(rc, lg_stream_open(d, &s), out);
    if (type != LG_F32)
        LG_TRY_GOTO(rc,
                    lg_device_alloc(d, LG_MIN(count, (size_t)UPLOAD_COUNT) * sizeof *host, &staged),
                    out);
    for (size_t at = 0; at < count; at += UPLOAD_COUNT) {
        int64_t n = (int64_t)LG_MIN(count - at, (size_t)UPLOAD_COUNT);
        void *to = (char *)dst + at * lg_dtype_bytes(type);
        lg_stream_upload(s, staged ? staged : to, host + at, (size_t)n * sizeof *host);
        if (staged)
            lg_cast(s,
                    &(struct lg_cast_args){.x = lg_t1(staged, LG_F32, n), .y = lg_t1(to, type, n)});
        lg_heartbeat();
    }
    lg_stream_sync(s);
out:
    lg_device_free(d, &staged);
    lg_stream_close(&s);
    return rc;
}

static int fill_piece(lg_stage *st, lg_region *r, const struct lg_stage_weights *w, size_t first,
                      size_t count, float *host)
{
    char *to = (char *)r->payload + first * lg_dtype_bytes(lg_device_dtype(w->device));
    LG_TRY(w->load(st, first, count, host ? host : (float *)to, w->arg));
    return host ? lg_stage_upload(w->device, to, host, count) : 0;
}

static int fill(lg_stage *st, lg_region *r, const struct lg_stage_weights *w)
{
    const size_t piece = w->piece ? LG_MIN(w->piece, w->count) : w->count;
    float *host = NULL;
    int rc = 0;
    if (!on_host(w->device) && !(host = calloc(piece, sizeof *host)))
        return LG_FAIL(LG_ERR_NOSPACE, "no %zu bytes of host memory to read %s into",
                       piece * sizeof *host, r->name);
    for (size_t at = 0; rc == 0 && at < w->count; at += piece)
        rc = fill_piece(st, r, w, at, LG_MIN(piece, w->count - at), host);
    free(host);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* Who waits beats: for as long as the other lives, which is watched itself. One that hangs is killed, and
 * the next look finds it dead and fills. So the wait needs no limit of its own: reading tens of GB from a
 * slow disk takes as long as it takes. */
int lg_stage_fill(lg_stage *st, lg_region *r, const struct lg_stage_weights *w)
{
    int rc;
    while ((rc = lg_region_fill_begin(r, st->board, st->me)) == LG_ERR_BUSY) {
        if (lg_stage_should_quit(st)) return LG_ERR_STOP;
        lg_board_beat(st->row, LG_PHASE_WAITING);
        lg_bus_wait(st->bus, FILL_WAIT_MS);
    }
    LG_TRY(rc);
    lg_board_beat(st->row, LG_PHASE_SETUP);
    if (rc == 0) return 0;
    LG_TRY(w->fill ? w->fill(st, r, w->arg) : fill(st, r, w));
    lg_region_fill_end(r);
    return 0;
}
