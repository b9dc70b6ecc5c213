/* Pieces between host and device; see transfer.h. */
#include "stages/trainer/transfer.h"
#include "base/check.h"
#include "stages/trainer/moments.h"
#include <stdlib.h>
#include <sys/mman.h>

enum { PLACES = 2 };

struct lg_transfer {
    lg_device *device;
    lg_stream *compute, *lane; /* up, down */
    size_t piece;              /* elements */
    float *host;               // (2 PLACES, piece), pinned: down, then up
    bool is_pinned;
    float *staged;                        // (piece), on the device
    lg_event *down[PLACES], *up[PLACES];  /* behind the copy from or to this place */
    uint64_t called, taken, loaded, sent; /* pieces */
};

static size_t piece_of(size_t shard)
{
    const size_t per =
        (lg_moments_chunk_count(shard) + LG_TRANSFER_PIECES - 1) / (size_t)LG_TRANSFER_PIECES;
    const size_t rows = (per + LG_TRANSFER_ALIGN - 1) / LG_TRANSFER_ALIGN * LG_TRANSFER_ALIGN;
    return LG_MIN(rows, (size_t)LG_TRANSFER_PIECE_MAX);
}

struct lg_transfer_bytes lg_transfer_bytes_of(size_t shard)
{
    const size_t piece = piece_of(shard) * sizeof(float);
    return (struct lg_transfer_bytes){.host = 2 * PLACES * piece, .device = piece};
}

static int open_memory(lg_transfer *f, struct lg_transfer_bytes bytes)
{
    void *staged;
    void *host = mmap(NULL, bytes.host, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        return LG_FAIL(LG_ERR_NOSPACE, "no %zu bytes of host memory for gradients and weights",
                       bytes.host);
    f->host = host;
    LG_TRY(lg_device_pin(f->device, host, bytes.host));
    f->is_pinned = true;
    LG_TRY(lg_device_alloc(f->device, bytes.device, &staged));
    f->staged = staged;
    return 0;
}

int lg_transfer_open(lg_device *d, lg_stream *compute, size_t shard, lg_transfer **ret)
{
    lg_transfer *f = calloc(1, sizeof *f);
    LG_ASSERT(f);
    *ret = f; /* half-built objects may be closed */
    *f = (lg_transfer){.device = d, .compute = compute, .piece = piece_of(shard)};
    LG_TRY(open_memory(f, lg_transfer_bytes_of(shard)));
    LG_TRY(lg_stream_open(d, &f->lane));
    for (int i = 0; i < PLACES; i++) {
        LG_TRY(lg_event_open(d, &f->down[i]));
        LG_TRY(lg_event_open(d, &f->up[i]));
    }
    return 0;
}

void lg_transfer_close(lg_transfer **ret)
{
    lg_transfer *f = *ret;
    if (!f) return;
    if (f->lane) lg_stream_sync(f->lane);
    lg_stream_sync(f->compute);
    for (int i = 0; i < PLACES; i++) {
        lg_event_close(&f->down[i]);
        lg_event_close(&f->up[i]);
    }
    lg_stream_close(&f->lane);
    if (f->is_pinned) lg_device_unpin(f->device, f->host);
    if (f->host) munmap(f->host, 2 * PLACES * f->piece * sizeof *f->host);
    free(f);
    *ret = NULL;
}

size_t lg_transfer_piece(const lg_transfer *f)
{
    return f->piece;
}

static float *place_down(const lg_transfer *f, uint64_t n)
{
    return f->host + n % PLACES * f->piece;
}

static float *place_up(const lg_transfer *f, uint64_t n)
{
    return f->host + (PLACES + n % PLACES) * f->piece;
}

void lg_transfer_call(lg_transfer *f, const float *from, size_t count)
{
    LG_ASSERT(f->called == f->taken && count <= f->piece);
    lg_stream_download(f->lane, place_down(f, f->called), from, count * sizeof *from);
    lg_stream_record(f->lane, f->down[f->called++ % PLACES]);
}

const float *lg_transfer_take(lg_transfer *f)
{
    LG_ASSERT(f->taken < f->called);
    lg_event_sync(f->down[f->taken % PLACES]);
    return place_down(f, f->taken++);
}

float *lg_transfer_load(lg_transfer *f)
{
    LG_ASSERT(f->loaded == f->sent);
    if (f->sent >= PLACES) lg_event_sync(f->up[f->sent % PLACES]);
    return place_up(f, f->loaded++);
}

const float *lg_transfer_send(lg_transfer *f, size_t count)
{
    LG_ASSERT(f->sent < f->loaded && count <= f->piece);
    lg_stream_upload(f->compute, f->staged, place_up(f, f->sent), count * sizeof *f->staged);
    lg_stream_record(f->compute, f->up[f->sent++ % PLACES]);
    return f->staged;
}
