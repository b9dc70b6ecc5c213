/* Pretended ranks whose gradients leave unit by unit and, perhaps, whose weights are gathered (shm/scatter.h). Unit u
 * has one word of every shard; it lies at place u % PLACES of its rank's ring, so that units 0 and 2 share one. Sums
 * are written apart from what they are made of, by the parity of the micro-batch. */
#include "shm/scatter.h"
#include "tests/unit/sim_world.h"
#include <string.h>

uint64_t sim_scatter_units(const struct world *w)
{
    return (uint64_t)(UNITS * w->micros);
}

static int side_after(const struct world *w, uint64_t micros)
{
    return w->micros > 1 ? (int)(micros & 1) : 0;
}

/* ---- ADD ---- */

static void begin_addition(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    const uint64_t n =
        lg_scatter_count(lg_scatter_added(&w->board, a->index), step, sim_scatter_units(w));
    const uint64_t micro = n / UNITS, unit = n % UNITS;
    const int in = side_after(w, micro), out = side_after(w, micro + 1);
    if (n) expect(a, &w->sum_stamp[a->index], step, SIM_SUM_UNSEEN);
    lg_stamp_set(&w->sum_stamp[a->index], step);
    a->p.adding.active = true;
    a->p.adding.n = n;
    a->p.adding.r = 0;
    a->p.adding.sum = micro ? w->sum[a->index][in][unit] : 0;
    a->p.adding.to = &w->sum[a->index][planted(w, SIM_SUM_IN_PLACE) && micro ? in : out][unit];
    *a->p.adding.to = planted(w, SIM_SUM_IN_PLACE) && micro ? a->p.adding.sum : GARBAGE;
    w->stores++;
}

static void mark_added(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    lg_scatter_mark_added(&w->board, a->index,
                          lg_scatter_number(step, a->p.adding.n + 1, sim_scatter_units(w)));
    w->stores++;
}

/* One rank's word. */
static void add_word(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    const int r = a->p.adding.r++, word = a->index * SHARD_WORDS + (int)(a->p.adding.n % UNITS);
    const uint64_t micro = a->p.adding.n / UNITS;
    const uint64_t got = w->ring[r][a->p.adding.n % UNITS % PLACES][a->index];
    expect(a, &w->grads_stamp[r], step, SIM_RING_UNSEEN);
    if (got != w->want[step].micro[micro][r][word])
        sim_fail(w, "%s adds a wrong word of rank %d, step %llu, unit %llu", sim_actor_name(a), r,
                 (unsigned long long)step, (unsigned long long)a->p.adding.n);
    a->p.adding.sum += got;
    if (planted(w, SIM_SUM_IN_PLACE) && micro) *a->p.adding.to = a->p.adding.sum;
    w->stores++;
}

static bool may_add(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    const uint64_t added = lg_scatter_added(&w->board, a->index);
    if (added >= lg_scatter_begin(step + 1)) return false;
    if (planted(w, SIM_ADD_EARLY) && added < lg_scatter_given(&w->board, a->index)) return true;
    return added < lg_scatter_given_by_all(&w->board);
}

/* One store of what is to be added; false: there is nothing. */
bool sim_scatter_add_some(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    if (!a->p.adding.active) {
        if (!may_add(a, step)) return false;
        begin_addition(a, step);
        return true;
    }
    if (a->p.adding.r < w->ranks) {
        add_word(a, step);
        return true;
    }
    if (planted(w, SIM_ADDED_EARLY) && a->p.adding.r == w->ranks) {
        mark_added(a, step);
        a->p.adding.r++;
        return true;
    }
    if (*a->p.adding.to != a->p.adding.sum) {
        *a->p.adding.to = a->p.adding.sum;
        w->stores++;
        return true;
    }
    if (!planted(w, SIM_ADDED_EARLY)) mark_added(a, step);
    a->p.adding.active = false;
    return true;
}

bool sim_scatter_add(struct actor *a)
{
    uint64_t s = a->p.act.step;
    BEGIN(a);
    while (sim_scatter_add_some(a, s)) STEP(a);
    mark(a, "added of step");
    END(a);
}

void sim_scatter_sum(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    expect(a, &w->sum_stamp[a->index], step, SIM_SUM_UNSEEN);
    for (int i = 0; i < SHARD_WORDS; i++) {
        uint64_t want = 0;
        for (int r = 0; r < w->ranks; r++)
            want += w->want[step].grads[r][a->index * SHARD_WORDS + i];
        a->p.sum[i] = w->sum[a->index][side_after(w, (uint64_t)w->micros)][i];
        if (a->p.sum[i] != want)
            sim_fail(w, "%s has a wrong sum of step %llu", sim_actor_name(a),
                     (unsigned long long)step);
    }
    a->p.sum_step = step + 1;
}

/* ---- FORWARD ---- */

/* Is everybody done with what lies where the unit goes? */
bool sim_scatter_is_free(struct actor *a, uint64_t step)
{
    static const uint64_t back[UNITS] = {1, 3, 2};
    struct world *w = a->w;
    const uint64_t n = a->p.micro * UNITS + a->p.unit;
    if (n < back[a->p.unit] || planted(w, SIM_RING_EARLY)) return true;
    return lg_scatter_added_by_all(&w->board) >=
           lg_scatter_number(step, n - back[a->p.unit] + 1, sim_scatter_units(w));
}

static bool is_given(const struct actor *a)
{
    return a->p.unit < a->p.given_before && !planted(a->w, SIM_GIVE_AGAIN);
}

static void begin_unit(struct actor *a)
{
    struct world *w = a->w;
    uint64_t value[RANKS_MAX];
    for (int q = 0; q < w->ranks; q++)
        value[q] = sim_grad(a->p.sum[0], a->p.acc, q * SHARD_WORDS + (int)a->p.unit);
    begin_write(a, w->ring[a->index][a->p.unit % PLACES], value, w->ranks);
}

static void mark_given(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    const uint64_t n = a->p.micro * UNITS + a->p.unit;
    lg_scatter_mark_given(&w->board, a->index,
                          lg_scatter_number(step, n + 1, sim_scatter_units(w)));
    w->stores++;
}

static void keep_loss(struct actor *a)
{
    a->p.loss += (double)(a->p.sum[0] & 0xffff);
    lg_scatter_keep_loss(&a->w->board, a->index, a->p.micro + 1, sim_loss(a->p.loss));
    a->w->stores++;
}

bool sim_scatter_make_working(struct actor *a, uint64_t step)
{
    struct world *w = a->w;
    const int q = a->p.q;
    if (w->gathers) {
        expect(a, &w->working_stamp[q][q], step, SIM_GATHER_UNSEEN);
        return false;
    }
    if (lg_stamp_is(&w->working_stamp[a->index][q], step)) return false;
    begin_write(a, &w->working[a->index][q * SHARD_WORDS], &w->weights[step & 1][q * SHARD_WORDS],
                SHARD_WORDS);
    return true;
}

uint64_t sim_scatter_working(const struct actor *a, int i)
{
    return a->w->working[a->w->gathers ? i / SHARD_WORDS : a->index][i];
}

bool sim_scatter_forward(struct actor *a)
{
    struct world *w = a->w;
    const uint64_t s = a->p.act.step, micro = share_count(w) / (uint64_t)w->micros;
    uint64_t given;
    BEGIN(a);
    expect_states(a, s, SIM_STATE_UNSEEN);
    given = lg_scatter_count(lg_scatter_given(&w->board, a->index), s, sim_scatter_units(w));
    a->p.micro = given / UNITS;
    a->p.given_before = given % UNITS;
    a->p.loss = sim_loss_of(lg_scatter_loss(&w->board, a->index, a->p.micro));
    if (given)
        expect(a, &w->grads_stamp[a->index], s, SIM_RING_UNSEEN);
    else
        stamp(a, &w->grads_stamp[a->index], s);
    for (; a->p.micro < (uint64_t)w->micros; a->p.micro++) {
        a->p.acc = 0;
        for (a->p.n = a->p.micro * micro; a->p.n < (a->p.micro + 1) * micro; a->p.n++)
            for (a->p.q = 0; a->p.q <= FIELD_WORDS; a->p.q++) {
                read_share(a, s, a->p.n, a->p.q);
                STEP(a);
            }
        a->p.sum[0] = a->p.acc;
        a->p.acc = 0;
        for (a->p.q = 0; a->p.q < w->ranks; a->p.q++)
            if (sim_scatter_make_working(a, s))
                while (write_more(a)) STEP(a);
        for (a->p.q = 0; a->p.q < w->words; a->p.q++) {
            read_word(a, "working weights of state", s, sim_scatter_working(a, a->p.q),
                      w->want[s].weights[a->p.q]);
            sim_scatter_add_some(a, s);
            STEP(a);
        }
        for (a->p.unit = 0; a->p.unit < UNITS; a->p.unit++) {
            if (is_given(a)) continue;
            while (!sim_scatter_is_free(a, s)) {
                sim_scatter_add_some(a, s);
                STEP(a);
            }
            begin_unit(a);
            if (planted(w, SIM_GIVEN_EARLY)) mark_given(a, s);
            while (write_more(a)) STEP(a);
            STEP(a);
            if (a->p.unit == UNITS - 1 && !planted(w, SIM_LOSS_AFTER)) keep_loss(a);
            STEP(a);
            if (!planted(w, SIM_GIVEN_EARLY) && a->p.unit >= a->p.given_before) mark_given(a, s);
            STEP(a);
            if (a->p.unit == UNITS - 1 && planted(w, SIM_LOSS_AFTER)) keep_loss(a);
            STEP(a);
        }
        a->p.given_before = 0;
    }
    lg_trainer_mark_grads(&w->board, a->index, s, sim_loss(a->p.loss));
    mark(a, "gradients of step");
    END(a);
}
