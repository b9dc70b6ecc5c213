/* Gradients and working weights between ranks; exchange.h has the rules.
 *
 * Pieces of the gradient go out on a stream of their own, by the GPU's copy engines, while the backward
 * keeps its multiprocessors busy. Working weights go out from AdamW's kernel, behind the traffic of
 * the state. On the host both are plain stores into memory that all ranks map. */
#include "stages/trainer/exchange.h"
#include <stdlib.h>

struct lg_exchange {
    lg_device *device;
    const lg_trainer_state *state;
    int me, ranks;
    lg_stream *sending;       /* NULL: one rank */
    lg_stream *computing;     /* between send_begin and send_end */
    lg_region *grad;          /* own */
    lg_region *received[LG_INSTANCES_MAX];
    lg_region *working[LG_INSTANCES_MAX];
    lg_mark made_of[LG_INSTANCES_MAX]; /* the state of which this process made shard r itself */
};

static struct lg_shard shard_of(const lg_exchange *x, int r)
{
    return lg_shard_of(x->state->params.count, r, x->ranks);
}

struct lg_exchange_bytes lg_exchange_bytes_of(lg_dtype type, size_t params, int rank, int ranks)
{
    const size_t element = lg_dtype_bytes(type);
    const size_t shard = LG_MAX(lg_shard_of(params, rank, ranks).count, (size_t)1);
    struct lg_exchange_bytes b = {.grad = params * sizeof(float)};
    if (ranks > 1) b.received = (size_t)(ranks - 1) * shard * sizeof(float);
    if (ranks > 1 || element != sizeof(float)) b.working = params * element;
    return b;
}

/* ---- memory ---- */

static int open_regions(lg_stage *st, lg_exchange *x)
{
    const lg_dtype type = lg_device_dtype(x->device);
    for (int r = 0; r < x->ranks; r++) {
        struct lg_exchange_bytes b =
            lg_exchange_bytes_of(type, x->state->params.count, r, x->ranks);
        struct lg_stage_memory m = {
            .bytes = b.grad, .device = x->device, .role = LG_ROLE_trainer, .index = r};
        if (r == x->me) LG_TRY(lg_stage_region(st, &m, &x->grad, "trainer/%d/grad", r));
        m.bytes = b.received;
        if (m.bytes) LG_TRY(lg_stage_region(st, &m, &x->received[r], "trainer/%d/received", r));
        m.bytes = b.working;
        m.front_bytes = sizeof(struct lg_working_front);
        if (m.bytes) LG_TRY(lg_stage_region(st, &m, &x->working[r], "trainer/%d/working", r));
    }
    return 0;
}

int lg_exchange_open(lg_stage *st, lg_device *d, const lg_trainer_state *s, lg_exchange **ret)
{
    lg_exchange *x = calloc(1, sizeof *x);
    LG_ASSERT(x);
    *ret = x; /* half-built objects may be closed */
    x->device = d;
    x->state = s;
    x->me = st->index;
    x->ranks = s->ranks;
    if (x->ranks > 1) LG_TRY(lg_stream_open(d, &x->sending));
    return open_regions(st, x);
}

void lg_exchange_close(lg_exchange **x)
{
    if (!*x) return;
    lg_stream_close(&(*x)->sending);
    free(*x);
    *x = NULL;
}

/* ---- gradients ---- */

float *lg_exchange_grad(lg_exchange *x)
{
    return x->grad->payload;
}

/* Where rank r's gradient of shard q lies with rank q. */
static float *received(const lg_exchange *x, int q, int r)
{
    LG_ASSERT(q != r);
    const size_t row = (size_t)(r < q ? r : r - 1);
    return (float *)x->received[q]->payload + row * shard_of(x, q).count;
}

static void send_piece(void *arg, size_t first, size_t end)
{
    lg_exchange *x = arg;
    if (x->ranks == 1) return;
    lg_stream_follow(x->sending, x->computing);
    for (int q = 0; q < x->ranks; q++) {
        const struct lg_shard s = shard_of(x, q);
        const size_t from = LG_MAX(first, s.first), to = LG_MIN(end, s.first + s.count);
        if (q == x->me || from >= to) continue;
        lg_stream_copy(x->sending, received(x, q, x->me) + (from - s.first),
                       lg_exchange_grad(x) + from, (to - from) * sizeof(float));
    }
}

struct lg_grads_watch lg_exchange_send_begin(lg_exchange *x, lg_stream *s)
{
    x->computing = s;
    return (struct lg_grads_watch){send_piece, x};
}

void lg_exchange_send_end(lg_exchange *x)
{
    if (x->ranks > 1) lg_stream_follow(x->computing, x->sending);
    x->computing = NULL;
}

const float *lg_exchange_received(const lg_exchange *x, int r)
{
    if (r != x->me) return received(x, x->me, r);
    return (const float *)x->grad->payload + shard_of(x, r).first;
}

/* ---- working weights ---- */

/* Shard `shard` of rank `rank`'s. */
static lg_tensor working_shard(const lg_exchange *x, int rank, int shard)
{
    const lg_dtype type = lg_device_dtype(x->device);
    struct lg_shard s = shard_of(x, shard);
    return lg_t1((char *)x->working[rank]->payload + s.first * lg_dtype_bytes(type), type,
                 (int64_t)s.count);
}

const void *lg_exchange_weights(lg_exchange *x, lg_stream *s, uint64_t state)
{
    if (!x->working[x->me]) return lg_trainer_state_view(x->state, 0, state).w;
    const struct lg_working_front *front = x->working[x->me]->front;
    for (int r = 0; r < x->ranks; r++) {
        lg_tensor to = working_shard(x, x->me, r);
        lg_mark of = atomic_load_explicit(&front->of[r], memory_order_acquire);
        if (of == lg_mark_of(state) || x->made_of[r] == lg_mark_of(state)) continue;
        x->made_of[r] = lg_mark_of(state);
        if (to.dim[0])
            lg_cast(s, &(struct lg_cast_args){
                           .x = lg_t1(lg_trainer_state_view(x->state, r, state).w, LG_F32, to.dim[0]),
                           .y = to});
    }
    return x->working[x->me]->payload;
}

int lg_exchange_copies(const lg_exchange *x, lg_tensor ret[LG_RANKS_MAX])
{
    if (!x->working[x->me]) return 0;
    for (int r = 0; r < x->ranks; r++) ret[r] = working_shard(x, r, x->me);
    return x->ranks;
}

void lg_exchange_mark_copies(lg_exchange *x, uint64_t state)
{
    for (int r = 0; r < x->ranks && x->working[r]; r++) {
        struct lg_working_front *front = x->working[r]->front;
        atomic_store_explicit(&front->of[x->me], lg_mark_of(state), memory_order_release);
    }
}
