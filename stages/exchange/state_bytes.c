/* A shard's state as a row of bytes; see state_bytes.h. */
#include "stages/exchange/state_bytes.h"
#include "config/ledger.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SCALARS, DEVICE, WEIGHTS, MOMENTS, AVERAGE, LEDGER, AREAS };

struct lg_state_bytes {
    lg_device *device;
    lg_stream *stream;
    const lg_trainer_state *state;
    int rank;
    lg_region *average[2]; /* NULL: another rank of the host has it */
    bool average_is_host;  /* whatever d is */
    int ledger;            /* fd; -1: not of this rank */
    size_t bytes[LEDGER];  /* of the others */
};

static int open_ledger(lg_stage *st, int *ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/ledger", st->run_dir));
    *ret = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*ret < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    return 0;
}

int lg_state_bytes_open(lg_stage *st, lg_device *d, lg_trainer_state *s, lg_state_bytes **ret)
{
    lg_state_bytes *b = calloc(1, sizeof *b);
    LG_ASSERT(b);
    *ret = b; /* half-built objects may be closed */
    *b = (lg_state_bytes){.device = d, .state = s, .rank = st->index, .ledger = -1};
    const size_t floats = lg_trainer_shard(s, b->rank) * sizeof(float);
    const bool has_average = b->rank < s->shards && st->board->s->has_ema;
    b->average_is_host = lg_ema_is_apart(st->config);
    LG_TRY(lg_stream_open(d, &b->stream));
    LG_TRY(lg_trainer_moments_open(st, d, s, b->rank));
    for (int side = 0; side < 2 && has_average; side++)
        LG_TRY(lg_ema_region(st, s, d, b->rank, side, &b->average[side]));
    b->bytes[SCALARS] = sizeof(struct lg_state_scalars);
    b->bytes[DEVICE] = LG_STATE_DEVICE_BYTES;
    b->bytes[WEIGHTS] = floats;
    b->bytes[MOMENTS] = lg_moments_bytes(&s->layout[b->rank]);
    b->bytes[AVERAGE] = has_average ? floats : 0;
    if (b->rank == 0) LG_TRY(open_ledger(st, &b->ledger));
    return 0;
}

void lg_state_bytes_close(lg_state_bytes **b)
{
    if (!*b) return;
    lg_stream_close(&(*b)->stream);
    if ((*b)->ledger >= 0) close((*b)->ledger);
    free(*b);
    *b = NULL;
}

static size_t bytes_of(const lg_state_bytes *b, int area, uint64_t state)
{
    if (area != LEDGER) return b->bytes[area];
    return b->ledger < 0 ? 0 : (size_t)state * sizeof(struct lg_ledger_record);
}

size_t lg_state_bytes_count(const lg_state_bytes *b, uint64_t state)
{
    size_t sum = 0;
    for (int i = 0; i < AREAS; i++) sum += bytes_of(b, i, state);
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

/* Records that are not there (the run began with another's checkpoint) are zeros, as in a hole. */
static int move_ledger(const lg_state_bytes *b, size_t at, size_t bytes, char *to, const char *from)
{
    const ssize_t done =
        to ? pread(b->ledger, to, bytes, (off_t)at) : pwrite(b->ledger, from, bytes, (off_t)at);
    if (done < 0 || (from && (size_t)done < bytes))
        return LG_FAIL(LG_ERR_IO, "records of the ledger: %s",
                       done < 0 ? strerror(errno) : "the disk is full");
    if (to) memset(to + done, 0, bytes - (size_t)done);
    return 0;
}

/* Bytes of an area, `at` its first. */
static int move_some(lg_state_bytes *b, int i, uint64_t state, struct lg_exchanger_state some,
                     char *to, const char *from)
{
    if (i == LEDGER) return move_ledger(b, some.at, some.bytes, to, from);
    char *here = area(b, i, state) + some.at;
    const bool on_host = i == SCALARS || i == DEVICE || (i == AVERAGE && b->average_is_host);
    if (on_host)
        memcpy(to ? to : here, to ? here : from, some.bytes);
    else if (to)
        lg_stream_download(b->stream, to, here, some.bytes);
    else
        lg_stream_upload(b->stream, here, from, some.bytes);
    return 0;
}

/* What of it lies in each area. `to` or `from` is NULL. */
static int move(lg_state_bytes *b, const struct lg_exchanger_state *of, char *to, const char *from)
{
    size_t begin = 0;
    int rc = 0;
    for (int i = 0; i < AREAS && rc == 0; i++) {
        const size_t bytes = bytes_of(b, i, of->state);
        const size_t first = LG_MAX(of->at, begin), end = LG_MIN(of->at + of->bytes, begin + bytes);
        const size_t in_message = first - of->at;
        const struct lg_exchanger_state some = {.at = first - begin, .bytes = end - first};
        if (first < end)
            rc = move_some(b, i, of->state, some, to ? to + in_message : NULL,
                           from ? from + in_message : NULL);
        begin += bytes;
    }
    lg_stream_sync(b->stream);
    return rc;
}

int lg_state_bytes_read(lg_state_bytes *b, const struct lg_exchanger_state *of, void *to)
{
    return move(b, of, to, NULL);
}

int lg_state_bytes_write(lg_state_bytes *b, const struct lg_exchanger_state *of, const void *from)
{
    struct lg_stamp *stamp[3];
    const int n = for_stamps(b, of->state, stamp);
    for (int i = 0; i < n && !of->at; i++) lg_stamp_clear(stamp[i]);
    return move(b, of, NULL, from);
}

void lg_state_bytes_end(lg_state_bytes *b, uint64_t state)
{
    struct lg_stamp *stamp[3];
    const int n = for_stamps(b, state, stamp);
    for (int i = 0; i < n; i++) lg_stamp_set(stamp[i], state);
}
