/* Gradients and working weights between ranks; exchange.h has the rules.
 *
 * A rank reads its shard of the others' gradients across GPUs as it adds them. Working weights go out
 * from AdamW's kernel, behind the traffic of the state. */
#include "stages/trainer/exchange.h"
#include <stdlib.h>

struct lg_exchange {
    lg_device *device;
    const lg_trainer_state *state;
    int me, ranks, shards;
    int group; /* its first rank */
    lg_region *grad[LG_INSTANCES_MAX], *working[LG_INSTANCES_MAX];
    lg_mark made_of[LG_INSTANCES_MAX]; /* the state of which this process made shard k itself */
};

struct lg_exchange_bytes lg_exchange_bytes_of(lg_dtype type, size_t params, int shards)
{
    const size_t element = lg_dtype_bytes(type);
    struct lg_exchange_bytes b = {.grad = params * sizeof(float)};
    if (shards > 1 || element != sizeof(float)) b.working = params * element;
    return b;
}

/* ---- memory ---- */

static int open_regions(lg_stage *st, lg_exchange *x)
{
    const struct lg_exchange_bytes b =
        lg_exchange_bytes_of(lg_device_dtype(x->device), x->state->params.count, x->shards);
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
    x->shards = s->shards;
    x->group = x->me / x->shards * x->shards;
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
    return x->grad[r]->payload;
}

/* ---- working weights ---- */

/* The piece of shard k of a unit, in rank r's. */
static lg_tensor working_piece(const lg_exchange *x, int r, int unit, int k)
{
    const lg_dtype type = lg_device_dtype(x->device);
    struct lg_piece p = lg_shard_piece(&x->state->params, unit, k, x->shards);
    return lg_t1((char *)x->working[r]->payload + p.first * lg_dtype_bytes(type), type,
                 (int64_t)p.count);
}

/* From the state, what nobody has written here. */
static void make_shard(lg_exchange *x, lg_stream *s, int k, uint64_t state)
{
    const float *w = lg_trainer_state_view(x->state, x->group + k, state).w;
    for (int u = 0; u < x->state->params.n_units; u++) {
        struct lg_piece p = lg_shard_piece(&x->state->params, u, k, x->shards);
        lg_tensor to = working_piece(x, x->me, u, k);
        lg_tensor from = lg_t1((void *)(w + p.at), LG_F32, to.dim[0]);
        if (p.count) lg_cast(s, &(struct lg_cast_args){.x = from, .y = to});
    }
}

const void *lg_exchange_weights(lg_exchange *x, lg_stream *s, uint64_t state)
{
    if (!x->working[x->me]) return lg_trainer_state_view(x->state, x->me, state).w;
    const struct lg_working_front *front = x->working[x->me]->front;
    for (int k = 0; k < x->shards; k++) {
        if (lg_stamp_is(&front->of[k], state) || x->made_of[k] == lg_mark_of(state)) continue;
        x->made_of[k] = lg_mark_of(state);
        make_shard(x, s, k, state);
    }
    return x->working[x->me]->payload;
}

int lg_exchange_copies(const lg_exchange *x, int unit, lg_tensor ret[LG_RANKS_MAX])
{
    if (!x->working[x->me]) return 0;
    for (int k = 0; k < x->shards; k++)
        ret[k] = working_piece(x, x->group + k, unit, x->me - x->group);
    return x->shards;
}

/* The stamp of the own shard in the working weights of the group's rank k. */
static struct lg_stamp *copy_stamp(const lg_exchange *x, int k)
{
    struct lg_working_front *front = x->working[x->group + k]->front;
    return &front->of[x->me - x->group];
}

void lg_exchange_begin_copies(lg_exchange *x, uint64_t state)
{
    for (int k = 0; k < x->shards && x->working[x->me]; k++)
        lg_stamp_begin(copy_stamp(x, k), state);
}

void lg_exchange_mark_copies(lg_exchange *x, uint64_t state)
{
    for (int k = 0; k < x->shards && x->working[x->me]; k++)
        if (lg_stamp_is_begun(copy_stamp(x, k), state)) lg_stamp_set(copy_stamp(x, k), state);
}
