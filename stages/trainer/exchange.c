/* Gradients and working weights between ranks; exchange.h has the rules.
 *
 * A rank reads its shard of the others' gradients across GPUs as it adds them. Working weights go out
 * from AdamW's kernel, behind the traffic of the state. */
#include "stages/trainer/exchange.h"
#include <stdlib.h>

struct lg_exchange {
    lg_device *device;
    const lg_trainer_state *state;
    int me, ranks;
    lg_region *grad[LG_INSTANCES_MAX], *working[LG_INSTANCES_MAX];
    lg_mark made_of[LG_INSTANCES_MAX]; /* the state of which this process made shard r itself */
};

static struct lg_shard shard_of(const lg_exchange *x, int r)
{
    return lg_shard_of(x->state->params.count, r, x->ranks);
}

struct lg_exchange_bytes lg_exchange_bytes_of(lg_dtype type, size_t params, int ranks)
{
    const size_t element = lg_dtype_bytes(type);
    struct lg_exchange_bytes b = {.grad = params * sizeof(float)};
    if (ranks > 1 || element != sizeof(float)) b.working = params * element;
    return b;
}

/* ---- memory ---- */

static int open_regions(lg_stage *st, lg_exchange *x)
{
    const struct lg_exchange_bytes b =
        lg_exchange_bytes_of(lg_device_dtype(x->device), x->state->params.count, x->ranks);
    for (int r = 0; r < x->ranks; r++) {
        struct lg_stage_memory m = {.bytes = b.grad,
                                    .front_bytes = sizeof(struct lg_stamp),
                                    .device = x->device,
                                    .role = LG_ROLE_trainer,
                                    .index = r,
                                    .is_made = lg_trainer_began(st->board)};
        LG_TRY(lg_stage_region(st, &m, &x->grad[r], "trainer/%d/grad", r));
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
    return open_regions(st, x);
}

void lg_exchange_close(lg_exchange **x)
{
    free(*x);
    *x = NULL;
}

/* ---- gradients ---- */

float *lg_exchange_grad(lg_exchange *x)
{
    return x->grad[x->me]->payload;
}

void lg_exchange_begin_grad(lg_exchange *x)
{
    lg_stamp_clear(x->grad[x->me]->front);
}

void lg_exchange_end_grad(lg_exchange *x, uint64_t step)
{
    lg_stamp_set(x->grad[x->me]->front, step);
}

int lg_exchange_expect_grads(lg_stage *st, const lg_exchange *x, uint64_t step)
{
    for (int r = 0; r < x->ranks; r++) LG_TRY(lg_stage_expect(st, x->grad[r], step));
    return 0;
}

const float *lg_exchange_grad_of(const lg_exchange *x, int r)
{
    return (const float *)x->grad[r]->payload + shard_of(x, x->me).first;
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
            lg_cast(s,
                    &(struct lg_cast_args){
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
