/* Pretended ranks that compute a micro-batch together (shm/sequence.h): what stages/trainer/exchanges.c and forward.c do,
 * question by question and store by store.
 *
 * Members read the same samples. In each micro-batch there are two or three exchanges. In each of them a member writes
 * some words to every member, over garbage, at places that are used in turn; they are checked by whoever reads them. Who
 * has sent exchange i has done with what arrived in exchange i - 1, as kernels/graph/exchange.h has it; with two of them
 * nothing else is written where the first has arrived, and it is read once more at the end. The gradient of unit 0 is made
 * before the last exchange, those of the others behind it, and depend on all that has arrived. */
#include "shm/scatter.h"
#include "tests/unit/sim_world.h"
#include <string.h>

/* A micro-batch is a task within the task: what it says when it stops. */
enum ran { STEPPED, WAITS, DONE };
#define PAUSE(a, ran)                                                                              \
    do {                                                                                           \
        (a)->p.seq.pc = __LINE__;                                                                  \
        return ran;                                                                                \
    case __LINE__:;                                                                                \
    } while (0)

static int first_of(const struct actor *a)
{
    return a->index / a->w->sequence * a->w->sequence;
}

/* Exchanges of a micro-batch, and its end. */
static uint64_t numbers(const struct world *w)
{
    return (uint64_t)w->exchanges + 1;
}

static uint64_t micro_of(const struct actor *a)
{
    return a->p.act.step * (uint64_t)a->w->micros + a->p.seq.micro_done;
}

static uint64_t given_of_step(const struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    return lg_scatter_count(lg_scatter_given(&w->board, a->index), step, sim_scatter_units(w));
}

static uint64_t next_micro(const struct actor *a, uint64_t step)
{
    return a->w->scatters ? given_of_step(a, step) / UNITS : 0;
}

/* ---- what is exchanged ---- */

/* Word i of what rank `from` gives rank `to`. */
static uint64_t sent_word(const struct world *w, uint64_t micro, int x, int from, int to, int i)
{
    const uint64_t pair = (uint64_t)((x * RANKS_MAX + from) * RANKS_MAX + to) * SENT_WORDS;
    return sim_mix(sim_mix(w->options->seed, micro), pair + (uint64_t)i + 1000);
}

static uint64_t want_arrived(const struct world *w, uint64_t micro, int x, int rank, uint64_t acc)
{
    const int first = rank / w->sequence * w->sequence;
    for (int from = first; from < first + w->sequence; from++)
        for (int i = 0; i < SENT_WORDS; i++)
            acc = sim_mix(acc, sent_word(w, micro, x, from, rank, i));
    return acc;
}

uint64_t sim_sequence_want(const struct world *w, uint64_t step, uint64_t micro, int rank, int unit,
                           uint64_t samples)
{
    const uint64_t m = step * (uint64_t)w->micros + micro;
    const int before = unit ? w->exchanges : w->exchanges - 1;
    uint64_t acc = samples;
    if (w->sequence == 1) return acc;
    acc = sim_mix(acc, (uint64_t)(rank % w->sequence));
    for (int x = 0; x < before; x++) acc = want_arrived(w, m, x, rank, acc);
    if (unit && w->exchanges == PLACES) acc = want_arrived(w, m, 0, rank, acc);
    return acc;
}

/* Where rank `to` gets what `from` sends in exchange x: not where it gets it in another that has the same place. */
static uint64_t *arrival(struct world *w, int x, int from, int to)
{
    return w->exchanged[to][x % PLACES][(from + x / PLACES) % w->sequence];
}

static void begin_send(struct actor *a, int x, int to)
{
    struct world *w = a->w;
    uint64_t value[SENT_WORDS];
    for (int i = 0; i < SENT_WORDS; i++) value[i] = sent_word(w, micro_of(a), x, a->index, to, i);
    begin_write(a, arrival(w, x, a->index, to), value, SENT_WORDS);
}

/* What rank `from` has sent in exchange x. */
static void read_arrived(struct actor *a, int x, int from)
{
    const uint64_t *at = arrival(a->w, x, from, a->index);
    for (int i = 0; i < SENT_WORDS; i++)
        read_word(a, "what was exchanged in micro-batch", micro_of(a), at[i],
                  sent_word(a->w, micro_of(a), x, from, a->index, i));
}

static void send(struct actor *a, uint64_t number)
{
    lg_sequence_send(&a->w->board, a->index, a->p.seq.epoch, number);
    a->w->stores++;
}

static bool all_sent(struct actor *a, uint64_t number)
{
    struct world *w = a->w;
    if (!planted(w, SIM_SENT_OF_OTHER))
        return lg_sequence_sent(&w->board, a->index, a->p.seq.epoch, number);
    for (int i = 0; i < w->sequence; i++) {
        const uint64_t sent =
            atomic_load(&lg_board_row(&w->board, LG_ROLE_trainer, first_of(a) + i)->sent);
        if ((sent & ((UINT64_C(1) << LG_SEQUENCE_EPOCH_SHIFT) - 1)) < number) return false;
    }
    return true;
}

static bool may_send(struct actor *a)
{
    struct world *w = a->w;
    if (planted(w, SIM_SEND_FIRST_EARLY) && a->p.seq.x == 0) return true;
    return all_sent(a, micro_of(a) * numbers(w) + (uint64_t)a->p.seq.x);
}

/* Members that it writes to in an exchange; planted: and once more, of the next one. */
static int sends(const struct actor *a)
{
    const bool ahead =
        planted(a->w, SIM_SEND_AHEAD) && a->p.seq.x > 0 && a->p.seq.x < a->w->exchanges - 1;
    return a->w->sequence * (ahead ? 2 : 1);
}

/* Planted: what is on its way arrives when an epoch has begun. */
static void keep_for_later(struct actor *a)
{
    a->p.seq.later_to = a->p.io.to;
    a->p.seq.later = a->p.io.i;
    memcpy(a->p.seq.late, a->p.io.value, sizeof a->p.seq.late);
}

static void arrive_late(struct actor *a)
{
    if (!a->p.seq.later_to || !a->p.seq.begun || sim_random(a->w, 4)) return;
    a->p.seq.later_to[a->p.seq.later] = a->p.seq.late[a->p.seq.later];
    a->w->stores++;
    if (++a->p.seq.later == SENT_WORDS) a->p.seq.later_to = NULL;
}

static bool may_go_on(struct actor *a)
{
    struct world *w = a->w;
    if (planted(w, SIM_GO_ON_EARLY)) return true;
    return all_sent(a, micro_of(a) * numbers(w) + (uint64_t)a->p.seq.x + 1);
}

/* ---- epochs ---- */

bool sim_sequence_enter(struct actor *a)
{
    struct world *w = a->w;
    if (w->sequence == 1 || a->p.seq.entered) return false;
    a->p.seq.entered = true;
    if (planted(w, SIM_ENTER_NOT) && atomic_load(&actor_row(a)->lives)) return false;
    lg_sequence_enter(&w->board, a->index);
    mark(a, "comes, at step");
    return true;
}

static bool is_late(struct actor *a)
{
    return lg_sequence_epoch(&a->w->board, a->index) != a->p.seq.epoch;
}

static void join(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t micro = a->p.act.step * (uint64_t)w->micros + next_micro(a, a->p.act.step);
    a->p.seq.begun = false;
    lg_sequence_join(&w->board, a->index, a->p.seq.epoch, micro);
    w->stores++;
    sim_trace(w, a, "joins epoch %llu with micro-batch %llu", (unsigned long long)a->p.seq.epoch,
              (unsigned long long)micro);
}

static bool begins(struct actor *a, uint64_t *ret_micro)
{
    struct world *w = a->w;
    const uint64_t first = a->p.act.step * (uint64_t)w->micros;
    if (a->p.seq.begun) return false;
    if (planted(w, SIM_BEGIN_ALONE)) {
        *ret_micro = first + next_micro(a, a->p.act.step);
        return true;
    }
    if (!lg_sequence_begins(&w->board, a->index, a->p.seq.epoch,
                            planted(w, SIM_BEGIN_STALE) ? 0 : first, ret_micro))
        return false;
    if (planted(w, SIM_BEGIN_OWN)) *ret_micro = first + next_micro(a, a->p.act.step);
    return true;
}

static void begin_epoch(struct actor *a, uint64_t micro)
{
    struct world *w = a->w;
    const uint64_t first = a->p.act.step * (uint64_t)w->micros;
    w->result->repeats += a->p.seq.epoch > (uint64_t)w->sequence;
    a->p.seq.begun = true;
    a->p.seq.begin_with = micro - first;
    a->p.seq.forward_of = 0;
    send(a, micro * numbers(w));
    sim_trace(w, a, "begins epoch %llu with micro-batch %llu", (unsigned long long)a->p.seq.epoch,
              (unsigned long long)micro);
}

static bool is_made(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t s = a->p.act.step;
    if (planted(w, SIM_MADE_OWN) && (atomic_load(&actor_row(a)->made) & UINT32_MAX) == s + 1)
        return true;
    if (!planted(w, SIM_MADE_OF_OTHERS)) return lg_sequence_is_made(&w->board, a->index, s);
    for (int i = 0; i < w->sequence; i++)
        if ((atomic_load(&lg_board_row(&w->board, LG_ROLE_trainer, first_of(a) + i)->made) &
             UINT32_MAX) != s + 1)
            return false;
    return true;
}

static void mark_made(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t before = atomic_load(&actor_row(a)->made);
    lg_sequence_mark_made(&w->board, a->index, a->p.seq.epoch, a->p.act.step);
    w->stores += before != atomic_load(&actor_row(a)->made);
}

/* ---- gradients ---- */

static void give(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    if (!a->p.seq.pending) return;
    const uint64_t n = a->p.micro * UNITS + (uint64_t)a->p.seq.pending;
    a->p.seq.pending = 0;
    lg_scatter_mark_given(&w->board, a->index, lg_scatter_number(step, n, sim_scatter_units(w)));
    w->stores++;
}

static bool is_given(const struct actor *a)
{
    return a->w->scatters && a->p.unit < a->p.given_before && !planted(a->w, SIM_GIVE_AGAIN);
}

/* The word of shard a->p.q. */
static uint64_t *gradient(struct actor *a)
{
    struct world *w = a->w;
    const int unit = (int)a->p.unit;
    return w->scatters ? &w->ring[a->index][unit % PLACES][a->p.q]
                       : &w->grads[a->index][a->p.q * UNITS + unit];
}

static void spoil_gradient(struct actor *a)
{
    if (!a->w->scatters && a->p.micro) return; /* it is added to */
    for (a->p.q = 0; a->p.q < a->w->ranks; a->p.q++) *gradient(a) = GARBAGE;
    a->w->stores++;
}

static void write_gradient(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t g = sim_grad(a->p.acc, a->p.seq.weights, a->p.q * UNITS + (int)a->p.unit);
    if (w->scatters || !a->p.micro)
        *gradient(a) = g;
    else
        *gradient(a) += g;
    w->stores++;
}

static bool has_room(struct actor *a, uint64_t step)
{
    return !a->w->scatters || is_given(a) || sim_scatter_is_free(a, step);
}

static void unit_done(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    if (!w->scatters) return;
    give(a, step);
    if (a->p.unit >= a->p.given_before) a->p.seq.pending = (int)a->p.unit + 1;
}

/* As lg_gradients_begin. */
static void begin_step(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    expect_states(a, step, SIM_STATE_UNSEEN);
    a->p.seq.micro_done = LG_MIN(a->p.seq.begin_with, next_micro(a, step));
    a->p.loss = sim_loss_of(
        lg_scatter_loss(&w->board, a->index,
                        planted(w, SIM_LOSS_LAST) ? next_micro(a, step) : a->p.seq.micro_done));
    a->p.seq.begin_with = UINT64_MAX;
    a->p.seq.forward_of = step + 1;
    w->stores++;
    if (!w->scatters)
        lg_stamp_clear(&w->grads_stamp[a->index]);
    else if (given_of_step(a, step))
        expect(a, &w->grads_stamp[a->index], step, SIM_RING_UNSEEN);
    else
        stamp(a, &w->grads_stamp[a->index], step);
}

/* ---- a micro-batch ---- */

static void begin_micro(struct actor *a, uint64_t step)
{
    a->p.micro = a->p.seq.micro_done;
    const uint64_t given = given_of_step(a, step), first = a->p.micro * UNITS;
    a->p.given_before = a->w->scatters ? LG_MIN(given - first, (uint64_t)UNITS) : 0;
    a->p.acc = 0;
}

static bool make_working(struct actor *a, uint64_t step)
{
    return a->w->scatters ? sim_scatter_make_working(a, step) : begin_make(a, a->p.q, step);
}

static uint64_t samples_of_micro(const struct world *w)
{
    return share_count(w) / (uint64_t)w->micros;
}

static enum ran run_micro(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t s = a->p.act.step, micro = samples_of_micro(w);
    switch (a->p.seq.pc) {
    case 0:
        begin_micro(a, s);
        for (a->p.n = a->p.micro * micro; a->p.n < (a->p.micro + 1) * micro; a->p.n++)
            for (a->p.q = 0; a->p.q <= FIELD_WORDS; a->p.q++) {
                read_share(a, s, a->p.n, a->p.q);
                PAUSE(a, STEPPED);
            }
        a->p.sum[0] = a->p.acc;
        a->p.acc = 0;
        for (a->p.q = 0; a->p.q < w->ranks; a->p.q++)
            if (make_working(a, s))
                while (write_more(a)) PAUSE(a, STEPPED);
        for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
            read_word(a, "working weights of state", s, sim_scatter_working(a, a->p.q),
                      w->want[s].weights[a->p.q]);
            PAUSE(a, STEPPED);
        }
        a->p.seq.weights = a->p.acc;
        a->p.acc = sim_mix(a->p.sum[0], (uint64_t)(a->index % w->sequence));
        a->p.unit = 0;
        for (a->p.seq.x = 0; a->p.seq.x <= w->exchanges; a->p.seq.x++) {
            /* unit 0 before the last exchange, the others behind it */
            for (; a->p.seq.x >= w->exchanges - 1 &&
                   a->p.unit < (a->p.seq.x < w->exchanges ? 1 : UNITS);
                 a->p.unit++) {
                while (!has_room(a, s)) {
                    give(a, s);
                    PAUSE(a, WAITS);
                }
                if (planted(w, SIM_MADE_EARLY) && a->p.unit == UNITS - 1 &&
                    a->p.micro == (uint64_t)w->micros - 1)
                    mark_made(a);
                if (!is_given(a)) spoil_gradient(a);
                for (a->p.q = 0; a->p.q < w->ranks && !is_given(a); a->p.q++) {
                    PAUSE(a, STEPPED);
                    write_gradient(a);
                }
                PAUSE(a, STEPPED);
                unit_done(a, s);
            }
            if (a->p.seq.x == w->exchanges) break;
            while (!may_send(a)) {
                give(a, s);
                PAUSE(a, WAITS);
            }
            PAUSE(a, STEPPED);
            if (planted(w, SIM_SENT_EARLY))
                send(a, micro_of(a) * numbers(w) + (uint64_t)a->p.seq.x + 1);
            for (a->p.seq.to = 0; a->p.seq.to < sends(a); a->p.seq.to++) {
                begin_send(a, a->p.seq.x + a->p.seq.to / w->sequence,
                           first_of(a) + a->p.seq.to % w->sequence);
                while (write_more(a)) {
                    PAUSE(a, STEPPED);
                    if (planted(w, SIM_JOIN_WRITING) && is_late(a)) {
                        keep_for_later(a);
                        PAUSE(a, WAITS);
                    }
                }
                PAUSE(a, STEPPED);
            }
            send(a, micro_of(a) * numbers(w) + (uint64_t)a->p.seq.x + 1);
            PAUSE(a, STEPPED);
            while (!may_go_on(a)) {
                give(a, s);
                PAUSE(a, WAITS);
            }
            PAUSE(a, STEPPED);
            if (planted(w, SIM_END_EARLY) && a->p.seq.x == w->exchanges - 1)
                send(a, (micro_of(a) + 1) * numbers(w));
            for (a->p.seq.from = 0; a->p.seq.from < w->sequence; a->p.seq.from++) {
                read_arrived(a, a->p.seq.x, first_of(a) + a->p.seq.from);
                PAUSE(a, STEPPED);
            }
            if (a->p.seq.x < w->exchanges - 1 || w->exchanges > PLACES) continue;
            for (a->p.seq.from = 0; a->p.seq.from < w->sequence; a->p.seq.from++) {
                read_arrived(a, 0, first_of(a) + a->p.seq.from);
                PAUSE(a, STEPPED);
            }
        }
        a->p.loss += (double)(a->p.acc & 0xffff);
        lg_scatter_keep_loss(&w->board, a->index, a->p.micro + 1, sim_loss(a->p.loss));
        w->stores++;
        PAUSE(a, STEPPED);
        give(a, s);
        PAUSE(a, STEPPED);
        send(a, (micro_of(a) + 1) * numbers(w));
        a->p.seq.micro_done++;
    }
    a->p.seq.pc = 0;
    return DONE;
}

/* ---- FORWARD ---- */

static bool is_ready(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t micro = samples_of_micro(w);
    if (a->p.seq.pc || planted(w, SIM_READ_UNREADY)) return true;
    return lg_window_range_ready(&a->p.window, w->fields,
                                 share(w, a, a->p.act.step, a->p.seq.micro_done * micro), micro);
}

static void end_step(struct actor *a)
{
    lg_trainer_mark_grads(&a->w->board, a->index, a->p.act.step, sim_loss(a->p.loss));
    mark(a, "gradients of step");
}

/* A former life, or this one, has made the gradient. */
static void find_made(struct actor *a)
{
    struct world *w = a->w;
    a->p.loss = sim_loss_of(lg_scatter_loss(&w->board, a->index, (uint64_t)w->micros));
    if (planted(w, SIM_MADE_STAMPED)) stamp(a, &w->grads_stamp[a->index], a->p.act.step);
    expect(a, &w->grads_stamp[a->index], a->p.act.step, SIM_HONEST);
}

int sim_sequence_made(struct world *w)
{
    for (int r = 0; r < w->ranks && w->sequence > 1; r++) {
        const struct lg_board_row *row = lg_board_row(&w->board, LG_ROLE_trainer, r);
        const lg_mark commit = atomic_load(&row->commit);
        if (commit != LG_MARK_NONE && atomic_load(&row->grads) < commit &&
            lg_sequence_is_made(&w->board, r, lg_mark_state(commit)))
            return r;
    }
    return -1;
}

/* One look at the board, and what follows from it: as lg_rank_forward. */
bool sim_sequence_forward(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t s = a->p.act.step;
    uint64_t micro;
    enum ran ran;
    arrive_late(a);
    BEGIN(a);
    while (w->scatters && sim_scatter_add_some(a, s)) STEP(a);
    if (!planted(w, SIM_MADE_UNASKED) && is_made(a)) {
        STEP(a);
        find_made(a);
        STEP(a);
        end_step(a);
        a->p.pc = 0;
        return true;
    }
    STEP(a);
    if (is_late(a)) {
        give(a, s);
        a->p.seq.pc = 0;
        a->p.seq.forward_of = 0;
        STEP(a);
        a->p.seq.epoch = lg_sequence_epoch(&w->board, a->index);
        STEP(a);
        join(a);
        STEP(a);
    }
    if (begins(a, &micro)) {
        begin_epoch(a, micro);
        STEP(a);
    }
    if (!a->p.seq.begun) {
        a->p.pc = 0;
        return true;
    }
    if (a->p.seq.forward_of != s + 1) begin_step(a, s);
    if (a->p.seq.micro_done < (uint64_t)w->micros) {
        if (!is_ready(a)) {
            a->p.pc = 0;
            return true;
        }
        while ((ran = run_micro(a)) == STEPPED) STEP(a);
        if (ran == WAITS || a->p.seq.micro_done < (uint64_t)w->micros) {
            a->p.pc = 0;
            return true;
        }
        STEP(a);
    }
    if (!w->scatters) stamp(a, &w->grads_stamp[a->index], s);
    STEP(a);
    mark_made(a);
    STEP(a);
    if (is_made(a)) {
        STEP(a);
        end_step(a);
    }
    END(a);
}
