/* The step protocol: answers that follow from the board alone; the rules stand in commit.h.
 *
 * Every question is asked by the process that owns the row in question, so its own marks stand
 * still while it asks; those of others only grow. A condition of the form "mark >= x" that was seen
 * true stays true, hence an answer never becomes wrong between the look and the work.
 *
 * How far apart the marks can be (G: state of the global commit), which bounds every search here:
 *  - a rank's commit is G or G + 1: UPDATE(s) needs every partial of s, which needs every grads of
 *    s, which needs every commit >= mark(s);
 *  - EMA's state is G - 2 .. G: UPDATE(s) needs ema >= s - 1 and makes s + 1;
 *  - verdicts are set for steps <= G only, as DECIDE(s) comes after every commit >= mark(s);
 *  - a checkpointed state that is not staged is G - 1 or G or, not yet made by all ranks, G + 1:
 *    UPDATE(s) needs state s - 1 staged; one whose moments are not staged is G or G + 1: UPDATE(s) needs
 *    those of state s.
 *
 * Nobody waits in a circle: the moments of a checkpointed state wait for its commits and for staging to be free,
 * which it is, but for the last state, because no state is to be checkpointed before the one before it is
 * published (lg_commit_decide); the rest of it waits for EMA, EMA for commits alone, and no update overwrites the
 * last state.
 */
#include "shm/commit.h"
#include "shm/scatter.h"

static struct lg_board_row *trainer(lg_board *b, int rank)
{
    LG_ASSERT(rank >= 0 && rank < b->s->ranks);
    return lg_board_row(b, LG_ROLE_trainer, rank);
}

static struct lg_board_row *ema(lg_board *b)
{
    return lg_board_row(b, LG_ROLE_ema, 0);
}

static struct lg_board_row *ckpt(lg_board *b)
{
    return lg_board_row(b, LG_ROLE_ckpt, 0);
}

static lg_mark look(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_acquire);
}

static lg_mark own(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_relaxed);
}

static struct lg_action act(lg_action_kind kind, uint64_t step)
{
    return (struct lg_action){.kind = kind, .step = step};
}

static struct lg_action wait_for(uint64_t step, const char *why)
{
    return (struct lg_action){.kind = LG_DO_WAIT, .step = step, .why = why};
}

bool lg_trainer_began(lg_board *b)
{
    for (int r = 0; r < b->s->ranks; r++)
        if (look(&trainer(b, r)->commit) != LG_MARK_NONE) return true;
    return false;
}

/* Verdicts. */

unsigned lg_commit_verdict(lg_board *b, uint64_t step)
{
    uint64_t v = look(&b->s->verdict[step % LG_VERDICTS]);
    return v && v >> LG_VERDICT_BITS == step ? (unsigned)(v & ((1u << LG_VERDICT_BITS) - 1)) : 0;
}

/* The first state that a step of this run has made. A host that comes to a run that goes on begins with such a one: it may
 * be the last, or one that is to be written. */
static uint64_t first_made(lg_board *b)
{
    return b->s->start_step + !(b->s->hosts.comes && b->s->start_step > 0);
}

/* Is `state` to be checkpointed? The first state came from a checkpoint or from nothing. */
static bool is_checkpoint(lg_board *b, uint64_t state)
{
    return state >= first_made(b) && (lg_commit_verdict(b, state - 1) & LG_VERDICT_CHECKPOINT);
}

/* May the owner of a state that is to be overwritten do so, as far as the writer is concerned? */
static bool is_staged_if_wanted(lg_board *b, uint64_t state)
{
    return !is_checkpoint(b, state) || look(&ckpt(b)->staged) >= lg_mark_of(state);
}

/* The same for moments that are to be moved on. */
static bool has_staged_moments_if_wanted(lg_board *b, uint64_t state)
{
    return !is_checkpoint(b, state) || look(&ckpt(b)->staged_moments) >= lg_mark_of(state);
}

/* Asked at DECIDE(s), when states s and s - 1 are there and everything older is staged. */
static bool checkpoint_pending(lg_board *b, uint64_t s)
{
    lg_mark published = look(&ckpt(b)->published), staged = look(&ckpt(b)->staged);
    if (staged != published) return true;
    if (is_checkpoint(b, s) && staged < lg_mark_of(s)) return true;
    return s > first_made(b) && is_checkpoint(b, s - 1) && staged < lg_mark_of(s - 1);
}

unsigned lg_commit_decide(lg_board *b, uint64_t step)
{
    struct lg_board_shared *s = b->s;
    const unsigned asks = lg_hosts_are_several(b) ? lg_hosts_asks(b) : 0;
    bool stop = step + 1 >= s->max_steps || (asks & LG_HOST_ASKS_DRAIN) ||
                atomic_load_explicit(&s->drain, memory_order_acquire);
    bool due = s->checkpoint_every > 0 && (step + 1) % (uint64_t)s->checkpoint_every == 0;
    unsigned flags = LG_VERDICT_GO;
    if (stop) flags |= LG_VERDICT_STOP;
    if ((asks & LG_HOST_ASKS_YIELD) || atomic_load_explicit(&s->yield, memory_order_acquire))
        flags |= LG_VERDICT_YIELD;
    if (stop || (due && !checkpoint_pending(b, step))) flags |= LG_VERDICT_CHECKPOINT;

    _Atomic(uint64_t) *word = &s->verdict[step % LG_VERDICTS];
    uint64_t old = look(word), mine = step << LG_VERDICT_BITS | flags;
    if (old == 0 || old >> LG_VERDICT_BITS < step)
        atomic_compare_exchange_strong_explicit(word, &old, mine, memory_order_acq_rel,
                                                memory_order_acquire);
    flags = lg_commit_verdict(b, step); /* another rank may have been first */
    LG_ASSERT(flags != 0);
    return flags;
}

/* Once true it stays true: no step follows the one with STOP, so its word is never overwritten, and
 * the global commit stays at its step or the one after. */
bool lg_commit_final(lg_board *b, uint64_t *ret_state)
{
    uint64_t start = b->s->start_step;
    if (start >= b->s->max_steps) {
        *ret_state = start;
        return true;
    }
    lg_mark m = lg_board_global_commit(b);
    uint64_t g = m == LG_MARK_NONE ? start : lg_mark_state(m);
    for (uint64_t s = g >= first_made(b) ? g - 1 : g; s <= g; s++)
        if (lg_commit_verdict(b, s) & LG_VERDICT_STOP) {
            *ret_state = s + 1;
            return true;
        }
    return false;
}

bool lg_commit_complete(lg_board *b)
{
    uint64_t final;
    if (!lg_commit_final(b, &final)) return false;
    if (lg_board_global_commit(b) < lg_mark_of(final)) return false;
    if (b->s->has_ema && look(&ema(b)->commit) < lg_mark_of(final)) return false;
    if (final < first_made(b)) return true;
    if (look(&ckpt(b)->published) < lg_mark_of(final)) return false;
    /* Whoever is not the leader waits for its files; so it goes last. */
    return !lg_hosts_are_several(b) || !lg_hosts_is_leader(b) || lg_hosts_published(b, final);
}

/* Trainer. */

static bool all_at_least(lg_board *b, size_t offset, lg_mark m)
{
    for (int r = 0; r < b->s->ranks; r++) {
        const char *row = (const char *)trainer(b, r);
        if (look((const _Atomic(lg_mark) *)(row + offset)) < m) return false;
    }
    return true;
}

/* What UPDATE(s) waits for; NULL when it may go on. It overwrites state s - 1, and the moments of s. */
static const char *update_floor(lg_board *b, uint64_t s)
{
    if (s < first_made(b)) return NULL; /* the other side is empty */
    if (!has_staged_moments_if_wanted(b, s)) return LG_WHY_STAGING;
    if (b->s->has_ema && look(&ema(b)->commit) < lg_mark_of(s - 1)) return "ema";
    if (!is_staged_if_wanted(b, s - 1)) return LG_WHY_STAGING;
    return NULL;
}

/* Of a rank of several hosts that has no state yet. */
static struct lg_action begin(lg_board *b, int rank)
{
    const uint64_t start = b->s->start_step;
    if (lg_hosts_fetched(b, rank)) return act(LG_DO_INIT, start);
    switch (lg_hosts_begin(b)) {
    case LG_HOST_BEGIN_ORIGIN:
        return act(LG_DO_INIT, start);
    case LG_HOST_BEGIN_FETCH:
        return wait_for(start, "the state of another host");
    case LG_HOST_BEGIN_WAIT:
        break;
    }
    return wait_for(start, "the other hosts");
}

/* A rank of several hosts whose gradients are marked; its sums are not. */
static struct lg_action exchange(lg_board *b, int rank, uint64_t s)
{
    const struct lg_board_row *row = lg_board_row(b, LG_ROLE_exchange, rank);
    if (own(&trainer(b, rank)->local) < lg_mark_of(s)) return act(LG_DO_REDUCE, s);
    if (look(&row->exchanged) < lg_mark_of(s)) return wait_for(s, "gradients of the other hosts");
    return act(LG_DO_TOTAL, s);
}

struct lg_action lg_trainer_next(lg_board *b, int rank)
{
    struct lg_board_row *row = trainer(b, rank);
    const bool several = lg_hosts_are_several(b);
    lg_mark commit = own(&row->commit);
    if (commit == LG_MARK_NONE) return several ? begin(b, rank) : act(LG_DO_INIT, b->s->start_step);
    uint64_t s = lg_mark_state(commit), final;
    if (lg_commit_final(b, &final) && s >= final) return act(LG_DO_DONE, s);
    if (!all_at_least(b, offsetof(struct lg_board_row, commit), commit))
        return wait_for(s, "commits of the other ranks");
    if (!lg_commit_verdict(b, s)) {
        if (several && !(lg_hosts_is_leader(b) && lg_hosts_may_decide(b)))
            return wait_for(s, "the leading host's word");
        return act(LG_DO_DECIDE, s);
    }
    if (own(&row->grads) < lg_mark_of(s)) return act(LG_DO_FORWARD, s);
    if (own(&row->partial) < lg_mark_of(s)) {
        if (b->s->scatters && lg_scatter_added(b, rank) < lg_scatter_begin(s + 1))
            return lg_scatter_added(b, rank) < lg_scatter_given_by_all(b)
                       ? act(LG_DO_ADD, s)
                       : wait_for(s, "gradients of the other ranks");
        if (!b->s->scatters &&
            !all_at_least(b, offsetof(struct lg_board_row, grads), lg_mark_of(s)))
            return wait_for(s, "gradients of the other ranks");
        return several ? exchange(b, rank, s) : act(LG_DO_REDUCE, s);
    }
    if (!all_at_least(b, offsetof(struct lg_board_row, partial), lg_mark_of(s)))
        return wait_for(s, "sums of the other ranks");
    if (several && !lg_hosts_have_exchanged(b, s)) return wait_for(s, "the other hosts");
    const char *floor = update_floor(b, s);
    return floor ? wait_for(s, floor) : act(LG_DO_UPDATE, s);
}

/* lgsup stores row.leave of every rank before `yield`, so whoever sees a YIELD verdict sees its own
 * row.leave too: nobody begins that step and then leaves in the middle of it. */
bool lg_trainer_may_leave(lg_board *b, int rank)
{
    struct lg_action a = lg_trainer_next(b, rank);
    if (a.kind == LG_DO_DONE) return true;
    return a.kind == LG_DO_FORWARD && (lg_commit_verdict(b, a.step) & LG_VERDICT_YIELD);
}

/* EMA. */

struct lg_action lg_ema_next(lg_board *b)
{
    lg_mark commit = own(&ema(b)->commit), global = lg_board_global_commit(b);
    uint64_t start = b->s->start_step, final;
    if (commit == LG_MARK_NONE)
        return global == LG_MARK_NONE ? wait_for(start, "first state of the trainer")
                                      : act(LG_DO_INIT, start);
    uint64_t e = lg_mark_state(commit);
    if (lg_commit_final(b, &final) && e >= final) return act(LG_DO_DONE, e);
    if (global < lg_mark_of(e + 1)) return wait_for(e + 1, "trainer");
    /* ADVANCE(e + 1) overwrites EMA state e - 1. No need to wait for its staging: UPDATE(e), which
     * made the weights of state e + 1, has waited for it. */
    LG_ASSERT(e == start || is_staged_if_wanted(b, e - 1));
    return act(LG_DO_ADVANCE, e + 1);
}

/* Checkpoint writer. */

struct lg_action lg_ckpt_next(lg_board *b)
{
    struct lg_board_row *row = ckpt(b);
    lg_mark staged = own(&row->staged), published = own(&row->published);
    lg_mark moments = own(&row->staged_moments);
    uint64_t start = b->s->start_step, final;
    if (staged != published) {
        const uint64_t s = lg_mark_state(staged);
        if (lg_hosts_write(b, s) == LG_HOST_WRITE_WAIT)
            return wait_for(s, "the leading host's files");
        return act(LG_DO_WRITE, s);
    }
    if (moments != staged) { /* the first half of a snapshot is there */
        uint64_t s = lg_mark_state(moments);
        if (b->s->has_ema && look(&ema(b)->commit) < lg_mark_of(s)) return wait_for(s, "ema");
        return act(LG_DO_STAGE, s);
    }
    if (lg_commit_final(b, &final) && (final < first_made(b) || published >= lg_mark_of(final)))
        return act(LG_DO_DONE, final);
    lg_mark global = lg_board_global_commit(b);
    if (global == LG_MARK_NONE) return wait_for(start, "first state of the trainer");
    uint64_t g = lg_mark_state(global);
    if (is_checkpoint(b, g) && staged < lg_mark_of(g)) return act(LG_DO_STAGE_MOMENTS, g);
    return wait_for(g, "a checkpoint to come");
}

/* The stores. Release: what they announce was written before. The fence also drains non-temporal
 * stores. */
static void store(_Atomic(lg_mark) *m, lg_mark value)
{
    __sync_synchronize();
    atomic_store_explicit(m, value, memory_order_release);
}

/* The mark of the step before: none at the run's first. */
static lg_mark before(lg_board *b, uint64_t step)
{
    return step == b->s->start_step ? LG_MARK_NONE : lg_mark_of(step - 1);
}

void lg_trainer_mark_init(lg_board *b, int rank)
{
    struct lg_board_row *row = trainer(b, rank);
    LG_ASSERT(own(&row->commit) == LG_MARK_NONE);
    atomic_store_explicit(&row->given, lg_scatter_begin(b->s->start_step), memory_order_relaxed);
    atomic_store_explicit(&row->added, lg_scatter_begin(b->s->start_step), memory_order_relaxed);
    store(&row->commit, lg_mark_of(b->s->start_step));
}

void lg_trainer_mark_grads(lg_board *b, int rank, uint64_t step, struct lg_loss_sum loss_sum)
{
    struct lg_board_row *row = trainer(b, rank);
    LG_ASSERT(own(&row->commit) == lg_mark_of(step) && own(&row->grads) == before(b, step));
    row->loss_sum[step & 1] = loss_sum;
    store(&row->grads, lg_mark_of(step));
}

void lg_trainer_mark_local(lg_board *b, int rank, uint64_t step)
{
    struct lg_board_row *row = trainer(b, rank);
    LG_ASSERT(own(&row->grads) == lg_mark_of(step) && own(&row->local) == before(b, step));
    store(&row->local, lg_mark_of(step));
}

void lg_trainer_mark_partial(lg_board *b, int rank, uint64_t step,
                             const struct lg_exact_sum *sum_squares)
{
    struct lg_board_row *row = trainer(b, rank);
    LG_ASSERT(own(&row->grads) == lg_mark_of(step) && own(&row->partial) == before(b, step));
    row->sum_squares[step & 1] = *sum_squares;
    store(&row->partial, lg_mark_of(step));
}

void lg_trainer_mark_commit(lg_board *b, int rank, uint64_t step)
{
    struct lg_board_row *row = trainer(b, rank);
    LG_ASSERT(own(&row->partial) == lg_mark_of(step) && own(&row->commit) == lg_mark_of(step));
    store(&row->commit, lg_mark_of(step + 1));
}

void lg_ema_mark(lg_board *b, uint64_t state)
{
    lg_mark old = own(&ema(b)->commit);
    LG_ASSERT(old == before(b, state) && lg_board_global_commit(b) >= lg_mark_of(state));
    store(&ema(b)->commit, lg_mark_of(state));
}

void lg_ckpt_mark_staged_moments(lg_board *b, uint64_t state)
{
    struct lg_board_row *row = ckpt(b);
    LG_ASSERT(own(&row->staged) == own(&row->published));
    LG_ASSERT(own(&row->staged_moments) == own(&row->staged));
    LG_ASSERT(own(&row->staged) < lg_mark_of(state) && is_checkpoint(b, state));
    store(&row->staged_moments, lg_mark_of(state));
}

void lg_ckpt_mark_staged(lg_board *b, uint64_t state)
{
    struct lg_board_row *row = ckpt(b);
    LG_ASSERT(own(&row->staged) == own(&row->published));
    LG_ASSERT(own(&row->staged) < lg_mark_of(state));
    LG_ASSERT(own(&row->staged_moments) == lg_mark_of(state));
    store(&row->staged, lg_mark_of(state));
}

void lg_ckpt_mark_published(lg_board *b, uint64_t state)
{
    struct lg_board_row *row = ckpt(b);
    LG_ASSERT(own(&row->staged) == lg_mark_of(state) && own(&row->published) < own(&row->staged));
    store(&row->published, lg_mark_of(state));
}
