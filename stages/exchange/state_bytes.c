/* A shard's state as a row of bytes; see state_bytes.h. */
#include "stages/exchange/state_bytes.h"
#include <stdlib.h>
#include <string.h>

enum { SCALARS, DEVICE, WEIGHTS, MOMENTS, AVERAGE, AREAS };

struct lg_state_bytes {
    lg_device *device;
    lg_stream *stream;
    const lg_trainer_state *state;
    int rank;
    lg_region *average[2]; /* NULL: another rank of the host has it */
    size_t bytes[AREAS];
};

int lg_state_bytes_open(lg_stage *st, lg_device *d, lg_trainer_state *s, lg_state_bytes **ret)
{
    lg_state_bytes *b = calloc(1, sizeof *b);
    LG_ASSERT(b);
    *ret = b; /* half-built objects may be closed */
    *b = (lg_state_bytes){.device = d, .state = s, .rank = st->index};
    const size_t floats = lg_trainer_shard(s, b->rank) * sizeof(float);
    const bool has_average = b->rank < s->shards && st->board->s->has_ema;
    LG_TRY(lg_stream_open(d, &b->stream));
    LG_TRY(lg_trainer_moments_open(st, d, s, b->rank));
    for (int side = 0; side < 2 && has_average; side++)
        LG_TRY(lg_ema_region(st, s, d, b->rank, side, &b->average[side]));
    b->bytes[SCALARS] = sizeof(struct lg_state_scalars);
    b->bytes[DEVICE] = LG_STATE_DEVICE_BYTES;
    b->bytes[WEIGHTS] = floats;
    b->bytes[MOMENTS] = lg_moments_bytes(&s->layout[b->rank]);
    b->bytes[AVERAGE] = has_average ? floats : 0;
    return 0;
}

void lg_state_bytes_close(lg_state_bytes **b)
{
    if (!*b) return;
    lg_stream_close(&(*b)->stream);
    free(*b);
    *b = NULL;
}

size_t lg_state_bytes_count(const lg_state_bytes *b)
{
    size_t sum = 0;
    for (int i = 0; i < AREAS; i++) sum += b->bytes[i];
    return sum;
}

static char *area(const lg_state_bytes *b, int i, uint64_t state)
{
    const struct lg_state_view v = lg_trainer_state_view(b->state, b->rank, state);
    switch (i) {
    case SCALARS:
        return (char *)v.scalars;
    case DEVICE:
        return v.device;
    case WEIGHTS:
        return (char *)v.w;
    case MOMENTS:
        return b->state->moments[b->rank]->payload;
    default:
        return b->average[state & 1]->payload;
    }
}

static int for_stamps(const lg_state_bytes *b, uint64_t state, struct lg_stamp *ret[3])
{
    int n = 0;
    ret[n++] = lg_trainer_state_view(b->state, b->rank, state).stamp;
    ret[n++] = b->state->moments[b->rank]->front;
    if (b->average[0]) ret[n++] = b->average[state & 1]->front;
    return n;
}

bool lg_state_bytes_are(const lg_state_bytes *b, uint64_t state)
{
    struct lg_stamp *stamp[3];
    const int n = for_stamps(b, state, stamp);
    for (int i = 0; i < n; i++)
        if (!lg_stamp_is(stamp[i], state)) return false;
    return true;
}

/* What of it lies in each area. `to` or `from` is NULL. */
static void move(lg_state_bytes *b, const struct lg_exchanger_state *of, char *to, const char *from)
{
    size_t begin = 0;
    for (int i = 0; i < AREAS; i++) {
        const size_t first = LG_MAX(of->at, begin),
                     end = LG_MIN(of->at + of->bytes, begin + b->bytes[i]);
        if (first < end) {
            char *here = area(b, i, of->state) + (first - begin);
            const bool on_host = i == SCALARS || i == DEVICE;
            if (on_host && to)
                memcpy(to + (first - of->at), here, end - first);
            else if (on_host)
                memcpy(here, from + (first - of->at), end - first);
            else if (to)
                lg_stream_download(b->stream, to + (first - of->at), here, end - first);
            else
                lg_stream_upload(b->stream, here, from + (first - of->at), end - first);
        }
        begin += b->bytes[i];
    }
    lg_stream_sync(b->stream);
}

int lg_state_bytes_read(lg_state_bytes *b, const struct lg_exchanger_state *of, void *to)
{
    move(b, of, to, NULL);
    return 0;
}

int lg_state_bytes_write(lg_state_bytes *b, const struct lg_exchanger_state *of, const void *from)
{
    struct lg_stamp *stamp[3];
    const int n = for_stamps(b, of->state, stamp);
    for (int i = 0; i < n && !of->at; i++) lg_stamp_clear(stamp[i]);
    move(b, of, NULL, from);
    return 0;
}

void lg_state_bytes_end(lg_state_bytes *b, uint64_t state)
{
    struct lg_stamp *stamp[3];
    const int n = for_stamps(b, state, stamp);
    for (int i = 0; i < n; i++) lg_stamp_set(stamp[i], state);
}
