/* Several hosts: what follows from the board; the rules stand in hosts.h.
 *
 * Why a look at cards of one epoch may be acted on when the next has begun meanwhile: within an epoch their words only
 * grow, so what was seen stays true of those hosts; and whoever is a member of the next one was one of these, or comes
 * anew and takes the state in which the others have come to rest. */
#include "shm/hosts.h"
#include "shm/board.h"
#include "shm/commit.h"
#include <string.h>
#include <xxhash.h>

static struct lg_board_hosts *hosts(lg_board *b)
{
    return &b->s->hosts;
}

static lg_mark look(const _Atomic(lg_mark) *m)
{
    return atomic_load_explicit(m, memory_order_acquire);
}

static void store(_Atomic(uint64_t) *word, uint64_t value)
{
    LG_ASSERT(atomic_load_explicit(word, memory_order_relaxed) <= value);
    __sync_synchronize(); /* drains non-temporal stores, too */
    atomic_store_explicit(word, value, memory_order_release);
}

static struct lg_board_row *exchange(lg_board *b, int rank)
{
    LG_ASSERT(rank >= 0 && rank < b->s->ranks);
    return lg_board_row(b, LG_ROLE_exchange, rank);
}

bool lg_hosts_are_several(lg_board *b)
{
    return hosts(b)->count > 1;
}

struct lg_host_place lg_hosts_place(lg_board *b)
{
    return (struct lg_host_place){
        .batch = b->s->batch, .hosts = hosts(b)->count, .host = hosts(b)->host};
}

/* ---- epochs ---- */

void lg_hosts_enter(lg_board *b, const struct lg_hosts_record *r)
{
    struct lg_board_hosts *h = hosts(b);
    LG_ASSERT(r->number > atomic_load_explicit(&h->epoch, memory_order_relaxed));
    LG_ASSERT(r->leader >= 0 && r->leader < h->count && !(r->members & ~lg_hosts_all(h->count)));
    LG_ASSERT((r->members >> r->leader & 1) && (r->members >> h->host & 1));
    h->of[r->number % LG_HOST_EPOCHS] = *r;
    store(&h->epoch, r->number);
}

void lg_hosts_lose(lg_board *b)
{
    atomic_store_explicit(&hosts(b)->lost, 1, memory_order_release);
}

uint64_t lg_hosts_epoch(lg_board *b, struct lg_hosts_record *ret)
{
    struct lg_board_hosts *h = hosts(b);
    if (atomic_load_explicit(&h->lost, memory_order_acquire)) return 0;
    for (;;) {
        const uint64_t e = atomic_load_explicit(&h->epoch, memory_order_acquire);
        if (!e || !ret) return e;
        *ret = h->of[e % LG_HOST_EPOCHS];
        atomic_thread_fence(memory_order_acquire);
        if (ret->number == e &&
            atomic_load_explicit(&h->epoch, memory_order_relaxed) < e + LG_HOST_EPOCHS - 1)
            return e;
    }
}

bool lg_hosts_is_complete(lg_board *b, const struct lg_hosts_record *e)
{
    return e->members == lg_hosts_all(hosts(b)->count);
}

bool lg_hosts_is_leader(lg_board *b)
{
    struct lg_hosts_record e;
    if (!lg_hosts_are_several(b)) return true;
    return lg_hosts_epoch(b, &e) && e.leader == hosts(b)->host;
}

/* ---- cards ---- */

/* Calls is() for the card of every member; false when one was not said in this epoch, or is() says so. */
static bool of_all(lg_board *b, bool (*is)(const struct lg_host_card *, void *), void *arg)
{
    struct lg_hosts_record e;
    if (!lg_hosts_epoch(b, &e)) return false;
    for (int h = 0; h < hosts(b)->count; h++) {
        const struct lg_host_card *c = &hosts(b)->card[h];
        if (!(e.members >> h & 1)) continue;
        if (look(&c->said_in) != e.number || !is(c, arg)) return false;
    }
    return true;
}

static bool is_said(const struct lg_host_card *c, void *arg)
{
    (void)c;
    (void)arg;
    return true;
}

bool lg_hosts_has_card(lg_board *b, int h)
{
    const uint64_t epoch = lg_hosts_epoch(b, NULL);
    return epoch && look(&hosts(b)->card[h].said_in) == epoch;
}

bool lg_hosts_may_decide(lg_board *b)
{
    return of_all(b, is_said, NULL);
}

/* An update needs the exchange, whatever the card says of it: of who came with a later state. */
static bool has_exchanged(const struct lg_host_card *c, void *arg)
{
    const uint64_t step = *(const uint64_t *)arg;
    return look(&c->exchanged) >= lg_mark_of(step) || look(&c->commit) > lg_mark_of(step);
}

bool lg_hosts_have_exchanged(lg_board *b, uint64_t step)
{
    return of_all(b, has_exchanged, &step);
}

static bool or_asks(const struct lg_host_card *c, void *arg)
{
    *(unsigned *)arg |= atomic_load_explicit(&c->asks, memory_order_acquire);
    return true;
}

unsigned lg_hosts_asks(lg_board *b)
{
    unsigned asks = 0;
    of_all(b, or_asks, &asks);
    return asks;
}

bool lg_hosts_sums(lg_board *b, uint64_t step, struct lg_host_sums *ret)
{
    struct lg_host_sums sums = {0};
    uint64_t keys[LG_HOSTS_MAX];
    const int n = hosts(b)->count;
    for (int h = 0; h < n; h++) {
        const struct lg_host_info *i = &hosts(b)->card[h].info[step % LG_HOST_INFOS];
        if (look(&i->of) != lg_mark_of(step)) return false;
        sums.valid += i->valid;
        sums.voids += i->voids;
        keys[h] = i->keys_hash;
    }
    sums.keys_hash = n == 1 ? keys[0] : XXH3_64bits(keys, (size_t)n * sizeof *keys);
    *ret = sums;
    return true;
}

lg_host_write lg_hosts_write(lg_board *b, uint64_t state)
{
    struct lg_hosts_record e;
    if (!lg_hosts_are_several(b)) return LG_HOST_WRITE;
    if (!lg_hosts_epoch(b, &e)) return LG_HOST_WRITE_WAIT;
    if (e.leader == hosts(b)->host) return LG_HOST_WRITE;
    const struct lg_host_card *c = &hosts(b)->card[e.leader];
    const bool is = look(&c->said_in) == e.number && look(&c->published) >= lg_mark_of(state);
    return is ? LG_HOST_WRITTEN : LG_HOST_WRITE_WAIT;
}

static bool has_published(const struct lg_host_card *c, void *arg)
{
    return look(&c->published) >= lg_mark_of(*(const uint64_t *)arg);
}

bool lg_hosts_published(lg_board *b, uint64_t state)
{
    return of_all(b, has_published, &state);
}

struct rest {
    lg_mark state; /* of those that have one */
    bool same;
};

static bool at_rest(const struct lg_host_card *c, void *arg)
{
    struct rest *r = arg;
    const lg_mark commit = look(&c->commit);
    if (commit == LG_MARK_NONE) return true; /* it is coming */
    if (r->state == LG_MARK_NONE) r->state = commit;
    r->same &= r->state == commit;
    return r->same;
}

static bool is_without_or_has(const struct lg_host_card *c, void *arg)
{
    return look(&c->commit) == LG_MARK_NONE || has_exchanged(c, arg);
}

bool lg_hosts_settled(lg_board *b, uint64_t *ret_state)
{
    struct lg_hosts_record e;
    struct rest r = {.same = true};
    if (!lg_hosts_epoch(b, &e) || lg_hosts_is_complete(b, &e)) return false;
    if (!of_all(b, at_rest, &r) || r.state == LG_MARK_NONE) return false;
    uint64_t state = lg_mark_state(r.state);
    if (of_all(b, is_without_or_has, &state)) return false; /* they are about to update */
    *ret_state = state;
    return true;
}

/* ---- the first state ---- */

static bool has_no_state(const struct lg_host_card *c, void *arg)
{
    (void)arg;
    return look(&c->commit) == LG_MARK_NONE;
}

lg_host_begin lg_hosts_begin(lg_board *b)
{
    struct lg_hosts_record e;
    if (!lg_hosts_are_several(b)) return LG_HOST_BEGIN_ORIGIN;
    if (!lg_hosts_epoch(b, &e)) return LG_HOST_BEGIN_WAIT;
    if (e.leader != hosts(b)->host || hosts(b)->comes) return LG_HOST_BEGIN_FETCH;
    return of_all(b, has_no_state, NULL) ? LG_HOST_BEGIN_ORIGIN : LG_HOST_BEGIN_WAIT;
}

bool lg_hosts_fetched(lg_board *b, int rank)
{
    return lg_hosts_are_several(b) && look(&exchange(b, rank)->fetched) != LG_MARK_NONE;
}

/* ---- exchange r ---- */

uint64_t lg_exchange_next(lg_board *b, int rank)
{
    const lg_mark m = look(&exchange(b, rank)->exchanged);
    return m == LG_MARK_NONE ? b->s->start_step : lg_mark_state(m) + 1;
}

void lg_exchange_mark_entered(lg_board *b, int rank, uint64_t epoch)
{
    store(&exchange(b, rank)->entered, epoch);
}

void lg_exchange_mark_exchanged(lg_board *b, int rank, uint64_t step,
                                const struct lg_loss_sum *loss)
{
    struct lg_board_row *row = exchange(b, rank);
    LG_ASSERT(lg_exchange_next(b, rank) == step);
    LG_ASSERT(look(&lg_board_row(b, LG_ROLE_trainer, rank)->local) == lg_mark_of(step));
    row->loss_sum[step & 1] = *loss;
    store(&row->exchanged, lg_mark_of(step));
}

void lg_exchange_mark_fetched(lg_board *b, int rank)
{
    store(&exchange(b, rank)->fetched, lg_mark_of(b->s->start_step));
}

/* ---- exchange 0 ---- */

static lg_mark least(lg_board *b, lg_role role, size_t offset)
{
    lg_mark m = UINT64_MAX;
    for (int r = 0; r < b->s->ranks; r++) {
        const char *row = (const char *)lg_board_row(b, role, r);
        m = LG_MIN(m, look((const _Atomic(uint64_t) *)(row + offset)));
    }
    return m;
}

static void say_info(lg_board *b, struct lg_host_said *ret)
{
    for (int i = 0; i < LG_HOST_INFOS; i++) {
        const struct lg_host_info *of = &hosts(b)->card[hosts(b)->host].info[i];
        ret->info[i].of = look(&of->of);
        ret->info[i].valid = of->valid;
        ret->info[i].voids = of->voids;
        ret->info[i].keys_hash = of->keys_hash;
    }
}

/* Exchanged before commit: whoever sees a commit knows that its exchange was before it. */
bool lg_hosts_say(lg_board *b, uint64_t epoch, struct lg_host_said *ret)
{
    struct lg_board_shared *s = b->s;
    if (least(b, LG_ROLE_exchange, offsetof(struct lg_board_row, entered)) < epoch) return false;
    *ret = (struct lg_host_said){
        .exchanged = least(b, LG_ROLE_exchange, offsetof(struct lg_board_row, exchanged)),
        .commit = lg_board_global_commit(b),
        .published = look(&lg_board_row(b, LG_ROLE_ckpt, 0)->published)};
    if (atomic_load_explicit(&s->drain, memory_order_acquire)) ret->asks |= LG_HOST_ASKS_DRAIN;
    if (atomic_load_explicit(&s->yield, memory_order_acquire)) ret->asks |= LG_HOST_ASKS_YIELD;
    const uint64_t at = ret->commit == LG_MARK_NONE ? s->start_step : lg_mark_state(ret->commit);
    for (uint64_t i = 0; i < LG_HOST_VERDICTS; i++) { /* of at - 2 .. at + 1 */
        const uint64_t step = at + 1 - LG_MIN(i, at + 1);
        const unsigned flags = lg_commit_verdict(b, step);
        if (flags) ret->verdict[i] = step << LG_VERDICT_BITS | flags;
    }
    say_info(b, ret);
    return true;
}

/* What the leader says for all; of a step for which a verdict stands here nothing is changed (board.h, rule 5). */
static void adopt(lg_board *b, uint64_t verdict)
{
    if (!verdict) return;
    _Atomic(uint64_t) *word = &b->s->verdict[(verdict >> LG_VERDICT_BITS) % LG_VERDICTS];
    uint64_t old = look(word);
    if (old >> LG_VERDICT_BITS < verdict >> LG_VERDICT_BITS || old == 0)
        atomic_compare_exchange_strong_explicit(word, &old, verdict, memory_order_acq_rel,
                                                memory_order_acquire);
}

static void hear_info(struct lg_host_card *c, const struct lg_host_said *said)
{
    for (int i = 0; i < LG_HOST_INFOS; i++) {
        struct lg_host_info *to = &c->info[i];
        if (look(&to->of) >= said->info[i].of) continue;
        to->valid = said->info[i].valid;
        to->voids = said->info[i].voids;
        to->keys_hash = said->info[i].keys_hash;
        store(&to->of, said->info[i].of);
    }
}

/* A card may come after a later one of the same epoch: what that one said stays. */
static void grow(_Atomic(lg_mark) *word, lg_mark said, bool is_first)
{
    if (is_first || look(word) < said) atomic_store_explicit(word, said, memory_order_release);
}

/* Writer dying between two stores: the card is not valid, or its words are those of different moments, each of them
 * true. */
void lg_hosts_hear(lg_board *b, int h, uint64_t epoch, const struct lg_host_said *said)
{
    LG_ASSERT(h >= 0 && h < hosts(b)->count);
    struct lg_host_card *c = &hosts(b)->card[h];
    if (lg_hosts_epoch(b, NULL) != epoch) return;
    for (int i = 0; i < LG_HOST_VERDICTS; i++) adopt(b, said->verdict[i]);
    if (h != hosts(b)->host) hear_info(c, said);
    const bool is_first = look(&c->said_in) != epoch;
    if (is_first) {
        atomic_store_explicit(&c->said_in, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst); /* before the words of another life */
    }
    atomic_store_explicit(&c->asks, said->asks, memory_order_release);
    grow(&c->published, said->published, is_first);
    grow(&c->exchanged, said->exchanged, is_first);
    grow(&c->commit, said->commit, is_first);
    atomic_store_explicit(&c->said_in, epoch, memory_order_release);
}

bool lg_hosts_has_info(lg_board *b, uint64_t step)
{
    const struct lg_host_card *c = &hosts(b)->card[hosts(b)->host];
    return look(&c->info[step % LG_HOST_INFOS].of) >= lg_mark_of(step);
}

void lg_hosts_set_info(lg_board *b, uint64_t step, const struct lg_host_sums *own)
{
    struct lg_host_info *i = &hosts(b)->card[hosts(b)->host].info[step % LG_HOST_INFOS];
    i->valid = own->valid;
    i->voids = own->voids;
    i->keys_hash = own->keys_hash;
    store(&i->of, lg_mark_of(step));
}
