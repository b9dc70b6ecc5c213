/* Weights of the computation; working.h has the rules. AdamW's kernel writes them, behind the traffic of the state, or
 * they are cast from what comes up of it. */
#include "stages/trainer/working.h"
#include "base/heartbeat.h"
#include "base/lifetimes.h"
#include "kernels/ops.h"
#include <stdlib.h>
#include <string.h>

/* ---- where gathered units lie ---- */

/* A unit, from when it is gathered until it is done with. */
struct stay {
    int unit;
    bool is_backward;
    size_t at; /* bytes, where the net has no place for it */
};
struct places {
    struct stay *stay; /* in the order of the net's events */
    int n;
    size_t bytes;
};

/* A unit is gathered when the one before it begins to be used. */
static void plan_places(const lg_params *t, const lg_denoiser *net, bool reshard, size_t element,
                        struct places *ret)
{
    int n, n_forward;
    const struct lg_denoiser_event *e = lg_denoiser_events(net, &n, &n_forward);
    struct lg_lifetime *l = calloc((size_t)n, sizeof *l);
    int *now = calloc((size_t)t->n_units, sizeof *now), before = 0;
    *ret = (struct places){.stay = calloc((size_t)n, sizeof *ret->stay)};
    LG_ASSERT(l && now && ret->stay);
    for (int i = 0; i < n; i++) {
        const int u = e[i].unit;
        if (e[i].kind != LG_EVENT_RUN && u >= t->n_units) continue; /* it is frozen: it stays */
        if (e[i].kind == LG_EVENT_WEIGHTS) {
            now[u] = ret->n;
            ret->stay[ret->n].unit = u;
            ret->stay[ret->n].is_backward = i >= n_forward;
            l[ret->n++] = (struct lg_lifetime){
                .bytes = t->unit[u].count * element, .first = before, .last = n};
            before = i;
        } else if (e[i].kind == LG_EVENT_WEIGHTS_DONE && reshard) {
            l[now[u]].last = i;
        }
    }
    if (reshard) ret->bytes = lg_lifetimes_place(l, ret->n);
    for (int i = 0; i < ret->n; i++)
        ret->stay[i].at = reshard ? l[i].at : t->unit[ret->stay[i].unit].first * element;
    if (!reshard) ret->bytes = t->count * element;
    free(now);
    free(l);
}

/* ---- memory ---- */

struct lg_working {
    lg_stage *st;
    lg_device *device;
    lg_stream *compute, *lane;
    const lg_trainer_state *state;
    int me, group, shards; /* group: its first rank */
    bool gathers, reshards, casts;
    lg_transfer *transfer;               /* the state lies in host memory; else NULL */
    lg_region *region[LG_INSTANCES_MAX]; /* of the ranks of the group, by rank */
    lg_mark
        made_of[LG_INSTANCES_MAX]; /* whole: the state of which this process made shard k itself */
    uint64_t of;                   /* the state of this micro-batch */
    /* gathered */
    struct places places;
    char *memory;
    const lg_denoiser *net; /* that has places for them; else NULL */
    int next, gathered;     /* of `places`: the next to be used, to be gathered */
    lg_mark *gathered_of;   /* [units]: without reshard, the state that lies there */
    lg_event *free, **done; /* done: [places.n] */
};

/* Do others of the group read the region, and cannot reach this device? */
static bool is_apart(const lg_plan *p)
{
    return p->apart && p->shards > 1;
}

static bool gathers(const lg_plan *p)
{
    return p->gathers || is_apart(p);
}

/* What is cast for each use would otherwise be a copy again. */
static bool reshards(const lg_config *c, const lg_plan *p)
{
    return p->gathers && (c->parallel_reshard || c->memory_cast_weights);
}

bool lg_working_lies_in_net(const lg_config *c, const lg_plan *p)
{
    return c->memory_cast_weights && lg_plan_shapes(p) == 1;
}

static bool has_region(const lg_config *c, const lg_plan *p, lg_dtype type)
{
    return (type != LG_F32 && !c->memory_cast_weights) || c->memory_offload_optimizer ||
           is_apart(p) || (p->shards > 1 && !p->gathers);
}

struct lg_working_bytes lg_working_bytes_of(const lg_config *c, const lg_plan *p, lg_dtype type,
                                            const lg_params *t, const lg_denoiser *net, int shard)
{
    const size_t element = lg_dtype_bytes(type);
    const bool reshard = reshards(c, p);
    struct lg_working_bytes b = {0};
    if (has_region(c, p, type))
        b.region =
            (gathers(p) ? LG_MAX(lg_shard_count(t, shard, p->shards), (size_t)1) : t->count) *
            element;
    if (!gathers(p)) {
        b.traffic = (size_t)(p->shards - 1) * lg_shard_count(t, shard, p->shards) * element;
        return b;
    }
    struct places places;
    plan_places(t, net, reshard, element, &places);
    b.gathered = lg_working_lies_in_net(c, p) ? 0 : places.bytes;
    const size_t micros = reshard ? (size_t)(p->rank_batch / p->micro_batch) : 1;
    for (int i = 0; i < places.n; i++) {
        const int u = places.stay[i].unit;
        bool again = false; /* it stays */
        for (int j = 0; j < i && !reshard; j++) again = again || places.stay[j].unit == u;
        if (!again)
            b.traffic += (t->unit[u].count -
                          (is_apart(p) ? 0 : lg_shard_piece(t, u, shard, p->shards).count)) *
                         element * micros;
    }
    free(places.stay);
    return b;
}

/* Has a rank of the group begun? Then all of the group's regions have been there; of other groups' ranks (lg_trainer_began)
 * nothing follows, since they do not open them. */
static bool group_began(const lg_working *w)
{
    bool began = false;
    for (int r = w->group; r < w->group + w->shards; r++) {
        const struct lg_board_row *row = lg_board_row(w->st->board, LG_ROLE_trainer, r);
        began |= atomic_load_explicit(&row->commit, memory_order_acquire) != LG_MARK_NONE;
    }
    return began;
}

static int open_regions(lg_working *w, const lg_denoiser *net)
{
    const bool is_made = group_began(w);
    for (int k = 0; k < w->shards; k++) {
        const int r = w->group + k;
        const struct lg_working_bytes b = lg_working_bytes_of(
            w->st->config, &w->st->plan, lg_device_dtype(w->device), &w->state->params, net, k);
        struct lg_stage_memory m = {.bytes = b.region,
                                    .front_bytes = sizeof(struct lg_working_front),
                                    .device = w->device,
                                    .role = LG_ROLE_trainer,
                                    .index = r,
                                    .is_made = is_made,
                                    .is_handed = is_apart(&w->st->plan)};
        if (m.bytes) LG_TRY(lg_stage_region(w->st, &m, &w->region[r], "trainer/%d/working", r));
    }
    return 0;
}

static int open_gathering(lg_working *w, const lg_denoiser *net)
{
    const lg_params *t = &w->state->params;
    void *memory = NULL;
    plan_places(t, net, w->reshards, lg_dtype_bytes(lg_device_dtype(w->device)), &w->places);
    if (!w->net) LG_TRY(lg_device_alloc(w->device, w->places.bytes, &memory));
    w->memory = memory;
    w->done = calloc((size_t)w->places.n, sizeof(lg_event *));
    w->gathered_of = calloc((size_t)t->n_units, sizeof *w->gathered_of);
    LG_ASSERT(w->done && w->gathered_of);
    LG_TRY(lg_stream_open(w->device, &w->lane));
    LG_TRY(lg_event_open(w->device, &w->free));
    for (int i = 0; i < w->places.n; i++) LG_TRY(lg_event_open(w->device, &w->done[i]));
    return 0;
}

int lg_working_open(lg_stage *st, lg_device *d, lg_stream *compute, const lg_trainer_state *s,
                    const lg_denoiser *net, lg_working **ret)
{
    lg_working *w = calloc(1, sizeof *w);
    LG_ASSERT(w);
    *ret = w; /* half-built objects may be closed */
    *w = (lg_working){.st = st,
                      .device = d,
                      .compute = compute,
                      .state = s,
                      .me = st->index,
                      .group = st->index / s->shards * s->shards,
                      .shards = s->shards,
                      .gathers = gathers(&st->plan),
                      .reshards = reshards(st->config, &st->plan),
                      .casts = st->config->memory_cast_weights,
                      .net = lg_working_lies_in_net(st->config, &st->plan) ? net : NULL};
    LG_TRY(open_regions(w, net));
    if (st->config->memory_offload_optimizer)
        LG_TRY(lg_transfer_open(d, compute, lg_trainer_shard(s, w->me), &w->transfer));
    return w->gathers ? open_gathering(w, net) : 0;
}

void lg_working_close(lg_working **ret)
{
    lg_working *w = *ret;
    if (!w) return;
    for (int i = 0; i < w->places.n && w->done; i++) lg_event_close(&w->done[i]);
    lg_event_close(&w->free);
    lg_stream_close(&w->lane);
    lg_transfer_close(&w->transfer);
    free(w->done);
    free(w->gathered_of);
    free(w->places.stay);
    free(w);
    *ret = NULL;
}

/* ---- pieces ---- */

static struct lg_working_front *front_of(const lg_working *w, int rank)
{
    return w->region[rank]->front;
}

static struct lg_piece piece_of(const lg_working *w, int unit, int k)
{
    return lg_shard_piece(&w->state->params, unit, k, w->shards);
}

/* `count` elements from element `at` of rank r's region. */
static lg_tensor part_of(const lg_working *w, int r, size_t at, size_t count)
{
    const lg_dtype type = lg_device_dtype(w->device);
    return lg_t1((char *)w->region[r]->payload + at * lg_dtype_bytes(type), type, (int64_t)count);
}

/* Elements of a shard, on the device. */
struct stretch {
    const float *at;
    size_t first, count; /* of the shard */
};

/* A stretch of shard k, cast to where it lies in rank r's region. */
static void cast_stretch(lg_working *w, int r, int k, const struct stretch *s)
{
    for (int u = 0; u < w->state->params.n_units; u++) {
        struct lg_piece p = lg_piece_within(piece_of(w, u, k), s->first, s->count);
        lg_tensor x = lg_t1((void *)(s->at + (p.at - s->first)), LG_F32, (int64_t)p.count);
        lg_tensor y = part_of(w, r, w->gathers ? p.at : p.first, p.count);
        if (p.count) lg_cast(w->compute, &(struct lg_cast_args){.x = x, .y = y});
    }
}

/* Shard k of the state, cast to where its pieces lie in rank r's region. */
static void make_shard(lg_working *w, int r, int k, uint64_t state)
{
    const float *from = lg_trainer_state_view(w->state, w->group + k, state).w;
    const size_t all = lg_trainer_shard(w->state, w->group + k);
    const size_t most = w->transfer ? lg_transfer_piece(w->transfer) : LG_MAX(all, (size_t)1);
    for (size_t at = 0, n; at < all; at += n) {
        n = LG_MIN(most, all - at);
        struct stretch s = {.at = from, .first = at, .count = n};
        if (w->transfer) {
            memcpy(lg_transfer_load(w->transfer), from + at, n * sizeof *from);
            s.at = lg_transfer_send(w->transfer, n);
        }
        cast_stretch(w, r, k, &s);
        lg_heartbeat();
    }
}

/* ---- FORWARD ---- */

static int expect_shards(lg_working *w, uint64_t state)
{
    for (int r = w->group; r < w->group + w->shards && w->region[r]; r++)
        LG_TRY(lg_stage_expect(w->st, w->region[r], state));
    return 0;
}

int lg_working_begin(lg_working *w, uint64_t state)
{
    w->of = state;
    w->next = w->gathered = 0;
    if (w->gathers) return expect_shards(w, state);
    if (!w->region[w->me]) return 0;
    for (int k = 0; k < w->shards; k++) {
        if (lg_stamp_is(&front_of(w, w->me)->of[k], state) || w->made_of[k] == lg_mark_of(state))
            continue;
        w->made_of[k] = lg_mark_of(state);
        make_shard(w, w->me, k, state);
    }
    return 0;
}

static char *place_of(const lg_working *w, const struct stay *s)
{
    if (w->net) return lg_denoiser_weights_place(w->net, s->unit, s->is_backward);
    return w->memory + s->at;
}

/* Copies stay number i from its owners, behind all that has been enqueued for the computation so far: what lay in
 * its place is done with. */
static void gather(lg_working *w, int i)
{
    const struct stay *s = &w->places.stay[i];
    const lg_dtype type = lg_device_dtype(w->device);
    const size_t element = lg_dtype_bytes(type);
    if (!w->reshards && w->gathered_of[s->unit] == lg_mark_of(w->of)) return;
    w->gathered_of[s->unit] = lg_mark_of(w->of);
    lg_stream_record(w->compute, w->free);
    lg_stream_wait(w->lane, w->free);
    for (int k = 0; k < w->shards; k++) {
        const int r = w->group + k;
        const struct lg_piece p = piece_of(w, s->unit, k);
        const size_t in_unit = p.first - w->state->params.unit[s->unit].first;
        char *to = place_of(w, s) + in_unit * element;
        if (w->region[r]) {
            lg_stream_copy(w->lane, to, (const char *)w->region[r]->payload + p.at * element,
                           p.count * element);
            continue;
        }
        const float *from = lg_trainer_state_view(w->state, r, w->of).w + p.at;
        if (w->casts && p.count)
            lg_cast(w->lane,
                    &(struct lg_cast_args){.x = lg_t1((void *)from, LG_F32, (int64_t)p.count),
                                           .y = lg_t1(to, type, (int64_t)p.count)});
        else
            lg_stream_copy(w->lane, to, from, p.count * sizeof *from);
    }
    lg_stream_record(w->lane, w->done[i]);
}

const void *lg_working_unit(lg_working *w, int unit)
{
    const size_t first = w->state->params.unit[unit].first;
    if (!w->gathers && !w->region[w->me])
        return lg_trainer_state_view(w->state, w->me, w->of).w + first;
    if (!w->gathers) return part_of(w, w->me, first, 0).data;
    const int i = w->next++;
    LG_ASSERT(i < w->places.n && w->places.stay[i].unit == unit);
    for (; w->gathered <= i + 1 && w->gathered < w->places.n; w->gathered++) gather(w, w->gathered);
    lg_stream_wait(w->compute, w->done[i]);
    return place_of(w, &w->places.stay[i]);
}

/* ---- UPDATE ---- */

/* Of the own shard, in the region of the k-th of those that have it. */
static struct lg_stamp *stamp_of_copy(const lg_working *w, int k)
{
    if (w->gathers) return &front_of(w, w->me)->of[0];
    return &front_of(w, w->group + k)->of[w->me - w->group];
}

static int copies(const lg_working *w)
{
    if (!w->region[w->me]) return 0;
    return w->gathers ? 1 : w->shards;
}

void lg_working_make(lg_working *w, uint64_t state)
{
    if (!w->gathers || !w->region[w->me]) return;
    lg_stamp_clear(stamp_of_copy(w, 0));
    make_shard(w, w->me, w->me - w->group, state);
    lg_stream_sync(w->compute);
    lg_stamp_set(stamp_of_copy(w, 0), state);
}

int lg_working_copies(const lg_working *w, int unit, lg_tensor ret[LG_RANKS_MAX])
{
    const struct lg_piece p = piece_of(w, unit, w->me - w->group);
    const int n = copies(w);
    for (int k = 0; k < n; k++)
        ret[k] = w->gathers ? part_of(w, w->me, p.at, p.count)
                            : part_of(w, w->group + k, p.first, p.count);
    return n;
}

lg_transfer *lg_working_transfer(const lg_working *w)
{
    return w->transfer;
}

void lg_working_send(lg_working *w, size_t first, size_t count)
{
    const struct stretch s = {
        .at = lg_transfer_send(w->transfer, count), .first = first, .count = count};
    for (int k = 0; k < copies(w); k++)
        cast_stretch(w, w->gathers ? w->me : w->group + k, w->me - w->group, &s);
}

void lg_working_begin_copies(lg_working *w, uint64_t state)
{
    for (int k = 0; k < copies(w); k++) lg_stamp_begin(stamp_of_copy(w, k), state);
}

void lg_working_mark_copies(lg_working *w, uint64_t state)
{
    for (int k = 0; k < copies(w); k++)
        if (lg_stamp_is_begun(stamp_of_copy(w, k), state)) lg_stamp_set(stamp_of_copy(w, k), state);
}
