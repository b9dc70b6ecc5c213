/* Averages in host memory; see host_average.h. A place is used again in the order of its stream, so nothing else waits. */
#include "stages/ema/host_average.h"
#include "base/check.h"
#include "base/heartbeat.h"
#include "kernels/ops.h"
#include <assert.h>
#include <stdlib.h>

enum { PLACES = 3, PIECE = 4 << 20 /* elements */, PINNED = 4 * PIECE };

struct lg_host_average {
    lg_device *device;
    float *side[2];       // (count), host
    size_t count;         /* elements of a side */
    size_t pinned[2];     /* elements, from its beginning */
    float *place[PLACES]; // (PIECE), on the device
    lg_stream *stream[PLACES];
};

size_t lg_host_average_bytes(void)
{
    return (size_t)PLACES * PIECE * sizeof(float);
}

int lg_host_average_open(lg_device *d, float *const side[2], size_t count, lg_host_average **ret)
{
    lg_host_average *a = calloc(1, sizeof *a);
    LG_ASSERT(a);
    *ret = a; /* half-built objects may be closed */
    *a = (lg_host_average){.device = d, .side = {side[0], side[1]}, .count = count};
    for (int i = 0; i < PLACES; i++) {
        void *place;
        LG_TRY(lg_stream_open(d, &a->stream[i]));
        LG_TRY(lg_device_alloc(d, PIECE * sizeof(float), &place));
        a->place[i] = place;
    }
    return 0;
}

void lg_host_average_close(lg_host_average **ret)
{
    lg_host_average *a = *ret;
    if (!a) return;
    for (int i = 0; i < PLACES; i++) lg_stream_close(&a->stream[i]);
    free(a);
    *ret = NULL;
}

void lg_host_average_sync(lg_host_average *a)
{
    for (int i = 0; i < PLACES; i++) lg_stream_sync(a->stream[i]);
}

/* Of a side, up to element `end`. A piece of a copy lies in one that was pinned. */
static int pin_until(lg_host_average *a, int side, size_t end)
{
    static_assert(PINNED % PIECE == 0, "a copy's piece lies in one pinned piece");
    while (a->pinned[side] < end) {
        const size_t n = LG_MIN((size_t)PINNED, a->count - a->pinned[side]);
        LG_TRY(
            lg_device_pin(a->device, a->side[side] + a->pinned[side], n * sizeof *a->side[side]));
        a->pinned[side] += n;
        lg_heartbeat();
    }
    return 0;
}

/* The side of which less is pinned. */
int lg_host_average_prepare(lg_host_average *a)
{
    const int side = a->pinned[1] < a->pinned[0];
    if (a->pinned[side] == a->count) return 0;
    LG_TRY(pin_until(a, side, a->pinned[side] + 1));
    return 1;
}

int lg_host_average_make(lg_host_average *a, const float *w, int to, double decay)
{
    size_t n;
    for (size_t at = 0, k = 0; at < a->count; at += n, k++) {
        n = LG_MIN(a->count - at, (size_t)PIECE);
        const lg_tensor place = lg_t1(a->place[k % PLACES], LG_F32, (int64_t)n);
        lg_stream *s = a->stream[k % PLACES];
        LG_TRY(pin_until(a, 1 - to, at + n));
        LG_TRY(pin_until(a, to, at + n));
        lg_stream_upload(s, place.data, a->side[1 - to] + at, n * sizeof *w);
        lg_ema(s, &(struct lg_ema_args){.ema = place,
                                        .w = lg_t1((void *)(w + at), LG_F32, (int64_t)n),
                                        .out = place,
                                        .decay = decay});
        lg_stream_download(s, a->side[to] + at, place.data, n * sizeof *w);
        lg_heartbeat();
    }
    return 0;
}

int lg_host_average_take(lg_host_average *a, const float *w, int to)
{
    size_t n;
    for (size_t at = 0; at < a->count; at += n) {
        n = LG_MIN(a->count - at, (size_t)PIECE);
        LG_TRY(pin_until(a, to, at + n));
        lg_stream_download(a->stream[0], a->side[to] + at, w + at, n * sizeof *w);
        lg_heartbeat();
    }
    return 0;
}
