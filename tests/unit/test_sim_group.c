/* Who takes part, simulated: machines with clocks of their own, which may be set back, a network that delays, repeats, loses and is cut
 * (one way, too), supervisors that die and are followed by others on the same board, machines that die with all,
 * spares, an operator. The functions of supervisor/hosts/group.h are the real ones; what is pretended of shm/hosts.h is
 * only as much as tells when a step can be made and when an epoch rests.
 *
 *     test_sim_group                      everything
 *     test_sim_group SEED [PLANT]         one run, told
 *     test_sim_group FROM-TO [PLANT]      many
 *
 * What must hold: an epoch of one number is the same wherever it is entered; a state of a host is made by one life of it;
 * when the trouble has an end, all hosts of the run come together and make steps again; and when the run has nothing left
 * to do, all of its hosts end, and whoever waited to be one of them. */
#include "base/clock.h"
#include "base/philox.h"
#include "supervisor/hosts/group.h"
#include "tests/unit/seeds.h"
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    PLACES = 6,
    TICK_MS = 10,
    SILENCE_MS = 600,
    LOOK_MS = 50,
    TROUBLE_MS = 40000,
    PEACE_MS = 90000, /* a member alone waits for LONELY_SILENCES, twice in a row at worst */
    ENDING_MS = 10000,
    APART_MS = 2000, /* hosts are done, and waiting machines stopped, within that time */
    WIRE_MAX = 4096,
    EPOCHS_MAX = 512,
    STATES_MAX = 8192,
    STARTS_MAX = 4096,
    CLOCK_BACK_MS = 200000, /* by which a clock is set back */
    HONEST_SEEDS = 300,
    HONEST_MS = 4000,
    PLANT_SEEDS_MAX = 2000
};

#define PLANTS(X)                                                                                  \
    X(NONE, "nothing")                                                                             \
    X(FORGETS_VOTES, "a supervisor's successor does not know what was promised")                   \
    X(VOTES_LATE, "a promise is told before it is kept")                                           \
    X(LINKS_OVER, "the file of an epoch can be made twice")                                        \
    X(KEEPS_LIFE, "a machine that starts anew says that it is the former one")                     \
    X(RESTS_EARLY, "an epoch is said to rest while a member goes on")                              \
    X(TAKES_BLINDLY, "the operator takes while the others live")                                   \
    X(STOPS_NEVER, "who has lost goes on")                                                         \
    X(LEAVES_AT_ONCE, "a host that is done does not wait until those who wait for it know")
enum plant {
#define X(name, what) PLANT_##name,
    PLANTS(X)
#undef X
        PLANT_COUNT
};

struct board {
    bool made;
    struct lg_epoch epoch; /* number 0: none yet */
    int number;
    bool comes, has_state;
    uint64_t start, state, exchanged; /* exchanged: steps [.., exchanged) */
    uint64_t promised, accepted;
    struct lg_epoch accepted_epoch;
};

struct machine {
    bool runs, supervised; /* it is on; its lgsup lives */
    bool waits,
        ended; /* it was there, without a part in the run, when that ended; it has ended in order */
    uint64_t life;
    int64_t skew_ms, next_look_ms, next_beat_ms, back_ms, pause_ms, blocked_ms, done_ms;
    int64_t dies_ms; /* its lgsup, while the run ends; 0: not */
    struct lg_group group;
    struct board board;
};

struct letter {
    int64_t at_ms;
    int to;
    struct lg_beat beat;
};

static struct world {
    uint64_t seed;
    uint32_t draws;
    enum plant plant;
    int count, places;
    bool shared, trouble, told;
    int64_t now_ms;
    struct machine machine[PLACES];
    bool cut[PLACES][PLACES];
    struct letter wire[WIRE_MAX];
    int letters;
    struct lg_epoch file[EPOCHS_MAX], seen[EPOCHS_MAX];
    int files, seens;
    struct {
        uint64_t formation, life[LG_HOSTS_MAX];
    } maker[STATES_MAX];
    uint64_t starts, steps, epochs, deaths, losses, takes, comers, waiters;
    char why[300];
} w;

static uint32_t draw(uint32_t below)
{
    const lg_philox_out out =
        lg_philox4x32((uint32_t[4]){w.draws++, 0, 0, 0},
                      (uint32_t[2]){(uint32_t)w.seed, (uint32_t)(w.seed >> 32)});
    return out.v[0] % below;
}

static void failed(const char *what, int place, uint64_t of)
{
    if (w.why[0]) return;
    snprintf(w.why, sizeof w.why, "at %" PRId64 " ms, place %d: %s (%" PRIu64 ")", w.now_ms, place,
             what, of);
}

static void tell(int place, const char *what, uint64_t of)
{
    if (w.told)
        fprintf(stderr, "%7" PRId64 " place %d: %s %" PRIu64 "\n", w.now_ms, place, what, of);
}

static int64_t clock_ns(const struct machine *m)
{
    return (w.now_ms + m->skew_ms) * LG_MS_NS;
}

static bool is_linked(int a, int b)
{
    return a == b || (!w.cut[a][b] && !w.cut[b][a]);
}

/* ---- what shm/hosts.c would say ---- */

static struct machine *holder(const struct lg_epoch *e, int h)
{
    struct machine *m = &w.machine[e->place[h]];
    return m->runs && m->life == e->life[h] ? m : NULL;
}

/* Member h's card, as it comes to `me` in this epoch. */
static const struct board *card(const struct machine *me, int h)
{
    const struct lg_epoch *e = &me->board.epoch;
    const struct machine *m = holder(e, h);
    if (!m || !m->board.made || !is_linked((int)(me - w.machine), e->place[h])) return NULL;
    const bool same =
        m->board.epoch.formation == e->formation && m->board.epoch.number == e->number;
    return same ? &m->board : NULL;
}

static bool is_complete(const struct lg_epoch *e)
{
    return e->members == lg_hosts_all(w.count);
}

static bool of_all(const struct machine *me, bool (*is)(const struct board *, const struct board *))
{
    for (int h = 0; h < w.count; h++) {
        if (!(me->board.epoch.members >> h & 1)) continue;
        const struct board *c = card(me, h);
        if (!c || !is(c, &me->board)) return false;
    }
    return true;
}

static bool has_state_too(const struct board *c, const struct board *me)
{
    return c->has_state && (c->state == me->state || c->state == me->state + 1);
}

static bool has_exchanged(const struct board *c, const struct board *me)
{
    return c->has_state && (c->exchanged > me->state || c->state > me->state);
}

static bool rests_too(const struct board *c, const struct board *me)
{
    return !c->has_state || c->state == me->state;
}

static bool is_settled(const struct machine *m)
{
    if (!m->board.epoch.number || is_complete(&m->board.epoch) || !m->board.has_state) return false;
    if (w.plant == PLANT_RESTS_EARLY) return true;
    return of_all(m, rests_too) && !of_all(m, has_exchanged);
}

static void made(const struct machine *m)
{
    const uint64_t s = m->board.state % STATES_MAX, life = m->life;
    const int h = m->board.number;
    if (w.maker[s].formation != m->board.epoch.formation) {
        memset(&w.maker[s], 0, sizeof w.maker[s]);
        w.maker[s].formation = m->board.epoch.formation;
    }
    if (w.maker[s].life[h] && w.maker[s].life[h] != life)
        failed("a state of one host was made by two lives", m->board.epoch.place[h],
               m->board.state);
    w.maker[s].life[h] = life;
    w.steps++;
}

static void begin_state(struct machine *m)
{
    struct board *b = &m->board;
    const struct board *leader = card(m, b->epoch.leader);
    if (!leader || (leader != b && !leader->has_state) || (leader == b && b->comes)) return;
    b->state = leader == b ? b->start : leader->state;
    b->exchanged = b->state;
    b->has_state = true;
}

static void train(struct machine *m)
{
    struct board *b = &m->board;
    if (!b->epoch.number || (m->group.own.phase == LG_GROUP_lost && w.plant != PLANT_STOPS_NEVER))
        return;
    if (!b->has_state) {
        begin_state(m);
        return;
    }
    if (draw(4)) return;
    if (is_complete(&b->epoch) && b->exchanged == b->state && of_all(m, has_state_too)) {
        b->exchanged++;
    } else if (b->exchanged > b->state && of_all(m, has_exchanged)) {
        b->state++;
        made(m);
    }
}

/* ---- a supervisor ---- */

static void check_epoch(const struct lg_epoch *e, int place)
{
    for (int i = 0; i < w.seens; i++)
        if (w.seen[i].formation == e->formation && w.seen[i].number == e->number) {
            if (memcmp(&w.seen[i], e, sizeof *e) != 0)
                failed("two epochs of one number", place, e->number);
            return;
        }
    LG_ASSERT(w.seens < EPOCHS_MAX);
    w.seen[w.seens++] = *e;
    w.epochs++;
}

static void setup(struct machine *m, uint64_t step)
{
    struct lg_group_setup s = {.place = (int)(m - w.machine),
                               .places = w.places,
                               .count = w.count,
                               .life = m->life,
                               .silence_ns = SILENCE_MS * LG_MS_NS,
                               .shared = w.shared,
                               .origin.step = step};
    lg_group_init(&m->group, &s);
    m->next_look_ms = m->next_beat_ms = w.now_ms;
    m->supervised = true;
}

static void start(struct machine *m)
{
    const bool keeps = w.plant == PLANT_KEEPS_LIFE && m->life;
    memset(&m->board, 0, sizeof m->board);
    const int64_t back_ms = w.trouble && draw(6) == 0 ? draw(CLOCK_BACK_MS) : 0;
    if (!keeps)
        m->life = (uint64_t)(w.now_ms + CLOCK_BACK_MS + m->skew_ms - back_ms) * STARTS_MAX +
                  ++w.starts % STARTS_MAX;
    m->runs = true;
    setup(m, draw(3) ? 0 : 10 * draw(3));
    tell((int)(m - w.machine), "starts, life", m->life);
}

/* Another lgsup on the same board. One that died before its board was made begins anew. */
static void follow(struct machine *m)
{
    const struct board *b = &m->board;
    if (!b->made || !b->epoch.number) {
        start(m);
        return;
    }
    setup(m, 0);
    struct lg_group_before before = {.epoch = b->epoch,
                                     .number = b->number,
                                     .comes = b->comes,
                                     .start_step = b->start,
                                     .promised = b->promised,
                                     .accepted = b->accepted,
                                     .accepted_epoch = b->accepted_epoch};
    if (w.plant == PLANT_FORGETS_VOTES) before.promised = before.accepted = 0;
    lg_group_restore(&m->group, &before, clock_ns(m));
}

static void keep_votes(struct machine *m)
{
    m->board.promised = m->group.own.promised;
    m->board.accepted = m->group.own.accepted;
    m->board.accepted_epoch = m->group.own.accepted_epoch;
}

static const struct lg_epoch *link_file(const struct lg_epoch *e)
{
    for (int i = 0; i < w.files; i++) {
        if (w.file[i].formation != e->formation || w.file[i].number != e->number) continue;
        if (w.plant == PLANT_LINKS_OVER) w.file[i] = *e;
        return &w.file[i];
    }
    LG_ASSERT(w.files < EPOCHS_MAX);
    w.file[w.files] = *e;
    return &w.file[w.files++];
}

static void send(int from)
{
    struct machine *m = &w.machine[from];
    const struct lg_beat *b = lg_group_beat(&m->group, clock_ns(m));
    for (int to = 0; to < w.places; to++) {
        if (to == from || w.cut[from][to] || (w.trouble && draw(20) == 0)) continue;
        for (int copies = 1 + (draw(20) == 0); copies > 0 && w.letters < WIRE_MAX; copies--)
            w.wire[w.letters++] = (struct letter){
                .at_ms = w.now_ms + 1 + draw(w.trouble && draw(30) == 0 ? 1500 : 30),
                .to = to,
                .beat = *b};
    }
    m->next_beat_ms = w.now_ms + SILENCE_MS / 3;
}

/* True: it is to be said. */
static bool place_board(struct machine *m)
{
    struct lg_origin o;
    int number;
    bool comes;
    if (m->board.made || !lg_group_place(&m->group, &number, &o, &comes)) return false;
    m->board.number = number;
    m->board.comes = comes;
    m->board.start = o.step;
    m->board.made = true;
    if (m->group.own.phase == LG_GROUP_joining) {
        lg_group_come(&m->group, number, o.step);
        w.comers++;
    }
    return true;
}

static void obey(struct machine *m, unsigned news)
{
    const int place = (int)(m - w.machine);
    if (news & LG_GROUP_ENTERED) {
        check_epoch(&m->group.own.epoch, place);
        tell(place, "enters epoch", m->group.own.epoch.number);
    }
    const bool placed = place_board(m);
    if (m->board.made && m->group.own.phase == LG_GROUP_member) m->board.epoch = m->group.own.epoch;
    if (w.plant == PLANT_VOTES_LATE && w.trouble && (news & LG_GROUP_VOTED) && draw(3) == 0) {
        send(place);
        m->supervised = false; /* and dies */
        m->back_ms = w.now_ms + 50;
        return;
    }
    if (news & (LG_GROUP_VOTED | LG_GROUP_ENTERED)) keep_votes(m);
    if (w.trouble && (news & LG_GROUP_VOTED) &&
        draw(w.plant == PLANT_FORGETS_VOTES ? 3 : 20) == 0) {
        send(place);
        m->supervised = false; /* dies when it has voted and said so */
        m->back_ms = w.now_ms + 50;
        return;
    }
    if (news & LG_GROUP_LOST) {
        tell(place, m->group.text, 0);
        w.losses++;
        m->back_ms = w.now_ms + 500 + draw(3000);
    }
    if (news & LG_GROUP_ENDED) m->ended = true;
    if (news || placed) send(place);
    if (news & LG_GROUP_LINK)
        obey(m, lg_group_linked(&m->group,
                                w.trouble && draw(5) == 0 ? NULL : link_file(&m->group.linking)));
}

static void look(struct machine *m)
{
    struct lg_group_facts f = {.has_state = m->board.has_state, .settled = is_settled(m)};
    f.rest.step = m->board.state;
    m->next_look_ms = w.now_ms + LOOK_MS;
    const unsigned news = lg_group_look(&m->group, &f, clock_ns(m));
    m->life = m->group.own.life; /* of one that joins it may be another by now */
    obey(m, news);
    if (m->supervised && w.now_ms >= m->next_beat_ms) send((int)(m - w.machine));
}

/* ---- the world ---- */

static void deliver(void)
{
    for (int i = 0; i < w.letters;) {
        struct letter *l = &w.wire[i];
        if (l->at_ms > w.now_ms) {
            i++;
            continue;
        }
        struct machine *m = &w.machine[l->to];
        if (m->done_ms && w.now_ms < m->pause_ms) { /* its kernel keeps it */
            i++;
            continue;
        }
        if (m->runs && m->supervised && !lg_group_hear(&m->group, &l->beat, clock_ns(m)))
            failed("a beat makes no sense", l->beat.place, 0);
        *l = w.wire[--w.letters];
    }
}

/* What was made after that state by those who are gone is gone with them, and may be made again. */
static void forget(uint64_t state)
{
    for (uint64_t s = state + 1; s < STATES_MAX; s++)
        for (int h = 0; h < w.count; h++) {
            bool lives = false;
            for (int p = 0; p < w.places; p++)
                lives |= w.machine[p].runs && w.machine[p].life == w.maker[s].life[h];
            if (!lives) w.maker[s].life[h] = 0;
        }
}

/* Some go on in a later epoch, of which these know nothing. */
static bool is_left_behind(const struct lg_epoch *e)
{
    for (int p = 0; p < w.places; p++) {
        const struct machine *m = &w.machine[p];
        const struct lg_epoch *its = &m->board.epoch;
        if (m->runs && m->board.made && m->group.own.phase != LG_GROUP_lost &&
            its->formation == e->formation && its->number > e->number)
            return true;
    }
    return false;
}

/* Goes by what is true: nobody else of the epoch goes on. */
static void operate(struct machine *m)
{
    const struct lg_epoch *e = &m->group.own.epoch;
    unsigned news;
    if (!m->group.quorum_missing) {
        m->blocked_ms = 0;
        return;
    }
    m->blocked_ms += TICK_MS;
    if (m->blocked_ms < 3000 || w.plant == PLANT_STOPS_NEVER) return;
    m->blocked_ms = 0;
    if (w.plant != PLANT_TAKES_BLINDLY && is_left_behind(e)) return;
    for (int h = 0; h < w.count && w.plant != PLANT_TAKES_BLINDLY; h++) {
        if (!(e->members >> h & 1) || holder(e, h) == m || !holder(e, h)) continue;
        if (!is_linked((int)(m - w.machine), e->place[h])) return;
        if (holder(e, h)->group.own.phase != LG_GROUP_lost &&
            !lg_group_is_up(&m->group, e->place[h], clock_ns(m)))
            return;
        if (holder(e, h)->group.own.epoch.number != e->number) return;
    }
    if (lg_group_take(&m->group, clock_ns(m), &news) < 0) return;
    w.takes++;
    forget(m->board.state);
    tell((int)(m - w.machine), "is taken, epoch", m->group.own.epoch.number);
    obey(m, news);
}

static void disturb(void)
{
    const int a = (int)draw((uint32_t)w.places), b = (int)draw((uint32_t)w.places);
    struct machine *m = &w.machine[a];
    switch (draw(12)) {
    case 0: /* the machine */
        if (!m->runs) break;
        tell(a, "dies, life", m->life);
        m->runs = m->supervised = false;
        m->board.made = false;
        m->back_ms = w.now_ms + 200 + draw(8000);
        w.deaths++;
        break;
    case 1:
    case 2:
    case 3: /* its lgsup alone */
        if (!m->runs || !m->supervised) break;
        tell(a, "its supervisor dies", 0);
        m->supervised = false;
        m->back_ms = w.now_ms + 20 + draw(draw(3) ? 300 : 3000);
        w.deaths++;
        break;
    case 4:
        w.cut[a][b] = true;
        break;
    case 5:
        w.cut[a][b] = w.cut[b][a] = true;
        break;
    case 6: /* a partition */
        for (int i = 0; i < w.places; i++)
            for (int k = 0; k < w.places; k++)
                w.cut[i][k] = w.cut[k][i] = (i < 1 + (int)draw(2)) != (k < 1 + b % 2);
        break;
    case 7:
        m->pause_ms = w.now_ms + draw(2000);
        break;
    default:
        memset(w.cut, 0, sizeof w.cut);
    }
}

/* A beat on which nobody who waits may depend: most of them are lost, but what the kernel of a stopped machine has taken. */
static void send_in_vain(const struct machine *m)
{
    const int before = w.letters;
    send((int)(m - w.machine));
    for (int i = w.letters - 1; i >= before; i--) {
        const struct machine *to = &w.machine[w.wire[i].to];
        if (to->waits && w.now_ms >= to->pause_ms && draw(4)) w.wire[i] = w.wire[--w.letters];
    }
}

static void finish(struct machine *m)
{
    const bool first = !m->group.done;
    lg_group_finish(&m->group);
    m->ended = lg_group_is_finished(&m->group, clock_ns(m)) ||
               (w.plant == PLANT_LEAVES_AT_ONCE && m->group.done_sent_ns);
    if (first || m->ended) send_in_vain(m);
}

static void turn(struct machine *m)
{
    if (m->ended) m->runs = m->supervised = false;
    if (m->ended) return;
    if (m->dies_ms && w.now_ms >= m->dies_ms && m->supervised) {
        tell((int)(m - w.machine), "its supervisor dies while the run ends", 0);
        m->dies_ms = 0;
        m->supervised = false;
        m->back_ms = w.now_ms + 20 + draw(300);
    }
    if (m->runs && m->supervised && m->group.own.phase == LG_GROUP_lost &&
        w.plant != PLANT_STOPS_NEVER && w.now_ms >= m->back_ms)
        start(m);
    if (!m->supervised && m->back_ms && w.now_ms >= m->back_ms) {
        if (m->runs)
            follow(m);
        else
            start(m);
    }
    if (m->runs) train(m);
    if (!m->runs || !m->supervised || w.now_ms < m->pause_ms) return;
    if (w.now_ms >= m->next_look_ms) look(m);
    if (m->done_ms) {
        if (w.now_ms >= m->done_ms && !m->waits) finish(m);
    } else if (m->supervised) {
        operate(m);
    }
}

static bool together(uint64_t *ret_state)
{
    uint64_t formation = 0, seen = 0, state = UINT64_MAX;
    for (int p = 0; p < w.places; p++) {
        const struct machine *m = &w.machine[p];
        const struct lg_epoch *e = &m->group.own.epoch;
        if (m->group.own.phase != LG_GROUP_member || !is_complete(e)) continue;
        if (formation && e->formation != formation) return false;
        formation = e->formation;
        seen |= UINT64_C(1) << m->group.own.number;
        state = LG_MIN(state, m->board.state);
    }
    *ret_state = state;
    return seen == lg_hosts_all(w.count);
}

/* Hosts are done one after the other; the lgsup of some, or of all, dies meanwhile, and another one follows. A machine that waits, and has heard of them, may be stopped while they say so. */
static void end_world(void)
{
    const uint32_t apart_ms = draw(2) ? APART_MS : TICK_MS;
    const bool all_die = draw(4) == 0;
    for (int p = 0; p < w.places; p++) {
        struct machine *m = &w.machine[p];
        m->done_ms = w.now_ms + 1 + draw(apart_ms);
        m->waits = m->group.own.phase != LG_GROUP_member;
        if (!m->waits && (all_die || draw(3) == 0)) m->dies_ms = w.now_ms + 1 + draw(2 * apart_ms);
        if (m->waits && draw(2)) m->pause_ms = w.now_ms + draw(2 * APART_MS);
        if (m->waits && (!m->supervised || !m->group.company_ns))
            m->ended = true; /* never heard of it */
    }
    for (const int64_t end_ms = w.now_ms + ENDING_MS; w.now_ms < end_ms; w.now_ms += TICK_MS) {
        deliver();
        for (int p = 0; p < w.places; p++) turn(&w.machine[p]);
    }
    for (int p = 0; p < w.places; p++) {
        if (!w.machine[p].ended)
            failed(w.machine[p].waits ? "it waits for a run that has ended" : "it does not end", p,
                   w.machine[p].group.own.phase);
        w.waiters += w.machine[p].waits;
    }
}

static void run_world(void)
{
    uint64_t before = 0, after = 0;
    for (int p = 0; p < w.places; p++) {
        w.machine[p].skew_ms = draw(1000000);
        w.machine[p].back_ms = 1 + draw(2000);
    }
    w.trouble = true;
    const uint32_t often = 100 + draw(2000);
    for (w.now_ms = TICK_MS; w.now_ms < TROUBLE_MS + PEACE_MS && !w.why[0]; w.now_ms += TICK_MS) {
        if (w.now_ms == TROUBLE_MS) {
            w.trouble = false;
            memset(w.cut, 0, sizeof w.cut);
        }
        if (w.trouble && draw(often) < TICK_MS) disturb();
        deliver();
        for (int p = 0; p < w.places; p++) turn(&w.machine[p]);
        if (w.now_ms == TROUBLE_MS + PEACE_MS - 5000 && !together(&before))
            failed("the hosts do not come together", -1, w.seed);
    }
    if (!w.why[0] && (!together(&after) || after < before + 5))
        failed("no steps are made any more", -1, after);
    if (!w.why[0]) end_world();
}

static struct world g_sum;

static bool run(const struct seeds_run *r, char *ret_why, size_t bytes)
{
    memset(&w, 0, sizeof w);
    w.seed = r->seed;
    w.plant = (enum plant)r->bug;
    w.told = r->told;
    w.count = 2 + (int)draw(4);
    w.places = LG_MIN(w.count + (int)draw(2), PLACES);
    w.shared = draw(2) && w.plant != PLANT_FORGETS_VOTES; /* a file needs no votes */
    run_world();
    g_sum.steps += w.steps;
    g_sum.epochs += w.epochs;
    g_sum.deaths += w.deaths;
    g_sum.losses += w.losses;
    g_sum.takes += w.takes;
    g_sum.comers += w.comers;
    g_sum.waiters += w.waiters;
    snprintf(ret_why, bytes, "%s", w.why);
    return !w.why[0];
}

static const char *plant_name(int p)
{
    static const char *const name[] = {
#define X(n, what) #n,
        PLANTS(X)
#undef X
    };
    return name[p];
}

static const char *plant_what(int p)
{
    static const char *const of[] = {
#define X(n, what) what,
        PLANTS(X)
#undef X
    };
    return of[p];
}

static const struct seeds_spec g_spec = {.program = "test_sim_group",
                                         .bugs = PLANT_COUNT,
                                         .bug_name = plant_name,
                                         .bug_what = plant_what,
                                         .run = run};

static void test_honest(void **state)
{
    (void)state;
    double cpu_s;
    memset(&g_sum, 0, sizeof g_sum);
    const uint64_t runs = seeds_honest(&g_spec, HONEST_SEEDS, HONEST_MS, &cpu_s);
    assert_true(runs > 0);
    print_message("%" PRIu64 " runs, %" PRIu64 " steps, %" PRIu64 " deaths, %" PRIu64
                  " epochs, %" PRIu64 " times a host lost, %" PRIu64 " came, %" PRIu64
                  " words of the operator, in %.1f s\n",
                  runs, g_sum.steps, g_sum.deaths, g_sum.epochs, g_sum.losses, g_sum.comers,
                  g_sum.takes, cpu_s);
    assert_true(g_sum.deaths > runs && g_sum.epochs > 3 * runs && g_sum.comers > runs);
    assert_true(g_sum.losses > runs / 2 && g_sum.takes > runs / 10 && g_sum.waiters > runs / 4);
}

/* Machine 2 does not hear machine 0, which hears it, and machine 1 hears both: only the echoes tell. */
static void test_one_way(void **state)
{
    (void)state;
    uint64_t at;
    memset(&w, 0, sizeof w);
    w.seed = 1;
    w.count = w.places = 3;
    for (int p = 0; p < w.places; p++) w.machine[p].back_ms = 1;
    int64_t cut_ms = 0;
    for (w.now_ms = TICK_MS; w.now_ms < 20000; w.now_ms += TICK_MS) {
        deliver();
        for (int p = 0; p < w.places; p++) turn(&w.machine[p]);
        if (!cut_ms && together(&at)) {
            cut_ms = w.now_ms;
            w.cut[0][2] = true;
        }
        if (cut_ms && w.epochs > 1) break;
    }
    assert_string_equal(w.why, "");
    assert_true(cut_ms > 0 && w.epochs > 1);
    assert_true(w.now_ms - cut_ms < 5 * SILENCE_MS);
    assert_int_equal(w.seen[1].members, 3);
}

/* A supervisor dies and another one follows on the same board, sooner than others call it silent: nobody is lost, and no
 * epoch is made, whoever decides. Again and again, each place in its turn. */
static void follow_each(uint64_t seed)
{
    uint64_t at = 0, begun = 0;
    int followed = 0;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    w.shared = seed % 2;
    w.count = w.places = 3;
    for (int p = 0; p < w.places; p++) w.machine[p].back_ms = 1 + draw(200);
    int64_t next_ms = 0;
    for (w.now_ms = TICK_MS; w.now_ms < 60000 && followed < 9; w.now_ms += TICK_MS) {
        deliver();
        for (int p = 0; p < w.places; p++) turn(&w.machine[p]);
        if (!begun && together(&at)) begun = w.epochs, next_ms = w.now_ms;
        if (!begun || w.now_ms < next_ms) continue;
        struct machine *m = &w.machine[followed++ % w.places];
        m->supervised = false;
        m->back_ms = w.now_ms + 1 + draw(SILENCE_MS / 2);
        next_ms = w.now_ms + 3 * SILENCE_MS;
    }
    assert_string_equal(w.why, "");
    assert_int_equal(followed, 9);
    assert_int_equal(w.epochs, begun);
    assert_int_equal(w.losses, 0);
    assert_true(w.steps > at);
}
static void test_followed(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) follow_each(seed);
}

/* Peace until all are together, then a machine dies; how long until a spare has its number, and a step is made. The moment
 * of the death is drawn against those of beats and looks. */
static int64_t recovery_ms(uint64_t seed)
{
    uint64_t at = 0, rest;
    int64_t dead_ms = 0;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    w.count = 2;
    w.places = 3;
    w.shared = draw(2);
    if (!w.shared) w.count = 3, w.places = 4;
    for (int p = 0; p < w.places; p++) w.machine[p].back_ms = 1 + draw(200);
    const int64_t dies_ms = 8000 + draw(600);
    for (w.now_ms = TICK_MS; w.now_ms < 30000; w.now_ms += TICK_MS) {
        deliver();
        for (int p = 0; p < w.places; p++) turn(&w.machine[p]);
        if (!dead_ms && w.now_ms >= dies_ms && together(&at)) {
            struct machine *m = &w.machine[draw((uint32_t)w.count)];
            m->runs = m->supervised = m->board.made = false;
            m->group.own.epoch.number = 0;
            m->group.own.phase = LG_GROUP_lost;
            m->back_ms = INT64_MAX;
            dead_ms = w.now_ms;
        } else if (dead_ms && w.now_ms > dead_ms + SILENCE_MS / 2 && together(&rest) &&
                   rest > at + 1) {
            return w.now_ms - dead_ms;
        }
    }
    return INT64_MAX;
}

/* An offer is said at once, not with the next beat, which comes in the third part of the silence: with beats alone it is 1169 ms on average,
 * else 1012. */
static void test_recovery(void **state)
{
    (void)state;
    enum { DEATHS = 60, MOST_MS = 1090 };
    int64_t sum = 0, longest = 0;
    for (uint64_t seed = 1; seed <= DEATHS; seed++) {
        const int64_t ms = recovery_ms(seed);
        assert_string_equal(w.why, "");
        sum += ms;
        longest = LG_MAX(longest, ms);
    }
    print_message("a death to the next step: %" PRId64 " ms on average, longest %" PRId64 " ms\n",
                  sum / DEATHS, longest);
    assert_true(sum / DEATHS < MOST_MS);
}

static void test_plants(void **state)
{
    (void)state;
    assert_int_equal(seeds_missed_bugs(&g_spec, PLANT_SEEDS_MAX), 0);
}

/* Machine 2 has taken number 1, which machine 0 has offered in epoch 2 of formation 7. */
static struct machine *offered(struct lg_beat *b)
{
    const struct lg_group_facts none = {0};
    struct lg_origin o;
    int number;
    bool comes;
    memset(&w, 0, sizeof w);
    w.count = 2;
    w.places = 3;
    w.now_ms = TICK_MS;
    struct machine *m = &w.machine[2];
    start(m);
    const int64_t now_ns = clock_ns(m);
    lg_group_beat(&m->group, now_ns);
    *b = (struct lg_beat){
        .place = 0, .phase = LG_GROUP_member, .life = 7, .sent_ns = 1, .offer.life = m->life};
    b->epoch = (struct lg_epoch){.formation = 7, .number = 2, .members = 1, .life[0] = 7};
    b->offer.number = 1;
    b->heard[2].life = m->life;
    b->heard[2].sent_ns = now_ns;
    assert_true(lg_group_hear(&m->group, b, now_ns));
    assert_int_equal(lg_group_look(&m->group, &none, now_ns), 0);
    assert_true(lg_group_place(&m->group, &number, &o, &comes));
    lg_group_come(&m->group, number, 0);
    assert_int_equal(lg_group_look(&m->group, &none, now_ns), 0);
    b->sent_ns++;
    return m;
}

/* And the run ends before it is one of its hosts. */
static void test_comes_too_late(void **state)
{
    (void)state;
    const struct lg_group_facts none = {0};
    struct lg_beat b;
    struct machine *m = offered(&b);
    b.phase = LG_GROUP_done;
    assert_true(lg_group_hear(&m->group, &b, clock_ns(m)));
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_LOST);
    assert_string_equal(m->group.text, "the run has ended before this host was one of it");
}

/* And another machine, which still takes it for one that waits, forms the run anew with it, under the same number. Its
 * board is made for the state of the former run: in the new one it would wait for itself. */
static void test_formed_anew_meanwhile(void **state)
{
    (void)state;
    const struct lg_group_facts none = {0};
    struct lg_beat b;
    struct machine *m = offered(&b);
    b.epoch = (struct lg_epoch){.formation = 8, .number = 1, .members = 3, .leader = 1};
    b.epoch.life[0] = 7;
    b.epoch.place[1] = 2;
    b.epoch.life[1] = m->life;
    assert_true(lg_group_hear(&m->group, &b, clock_ns(m)));
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_LOST);
    m = offered(&b);
    b.epoch = (struct lg_epoch){.formation = 7, .number = 3, .members = 3};
    b.epoch.life[0] = 7;
    b.epoch.place[1] = 2;
    b.epoch.life[1] = m->life;
    assert_true(lg_group_hear(&m->group, &b, clock_ns(m)));
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)) & ~(unsigned)LG_GROUP_VOTED,
                     LG_GROUP_ENTERED); /* which is what it was to be one of */
}

/* Machine 2 of three waits; what it hears from `place`, which waits too or is a member, is up. */
static void hear_of(struct machine *m, int place, lg_group_phase phase, uint64_t max_steps)
{
    const int64_t now_ns = clock_ns(m);
    struct lg_beat b = {.place = place,
                        .phase = phase,
                        .life = 7,
                        .sent_ns = now_ns,
                        .number = -1,
                        .identity.max_steps = max_steps};
    if (phase == LG_GROUP_member)
        b.epoch = (struct lg_epoch){.formation = 7, .number = 1, .members = 1, .life[0] = 7};
    lg_group_beat(&m->group, now_ns);
    b.heard[2].life = m->life;
    b.heard[2].sent_ns = now_ns;
    lg_group_hear(&m->group, &b, now_ns);
}
static struct machine *waiting_machine(void)
{
    memset(&w, 0, sizeof w);
    w.count = 2;
    w.places = 4;
    w.now_ms = TICK_MS;
    start(&w.machine[2]);
    return &w.machine[2];
}
/* Where hosts would end at different steps, decide in different folders or believe to be the same one, they say so and do
 * not wait for each other. */
static void test_unlike(void **state)
{
    (void)state;
    const struct lg_group_facts none = {0};
    struct machine *m = waiting_machine();
    hear_of(m, 0, LG_GROUP_joining, 0);
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), 0);
    hear_of(m, 1, LG_GROUP_joining, 5);
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_REFUSED);
    assert_non_null(strstr(m->group.text, "trainer.max_steps"));

    m = waiting_machine(); /* for a run that goes on: the other one that waits is wrong */
    hear_of(m, 0, LG_GROUP_member, 0);
    hear_of(m, 1, LG_GROUP_joining, 5);
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), 0);
    m = waiting_machine();
    hear_of(m, 0, LG_GROUP_member, 5);
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_REFUSED);

    m = waiting_machine();
    hear_of(m, 0, LG_GROUP_joining, 0);
    m->group.own.identity.shared = 3; /* the other one could not read its folder's number */
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), 0);
    m->group.last[0].identity.shared = 5;
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_REFUSED);
    assert_non_null(strstr(m->group.text, "hosts.shared"));

    m = waiting_machine();
    hear_of(m, 2, LG_GROUP_joining, 0);
    assert_int_equal(lg_group_look(&m->group, &none, clock_ns(m)), LG_GROUP_REFUSED);
    assert_non_null(strstr(m->group.text, "number 2 of hosts.list"));
}

/* A host says that it has nothing left to do, and loses its power before the others know by their exchange processes what
 * they need for their end: they do not wait for it for ever, nor call it lost when it has just left. */
static void test_done_and_gone(void **state)
{
    (void)state;
    const struct lg_group_facts facts = {.has_state = true};
    struct lg_epoch e = {.formation = 7, .number = 1, .members = 3, .life = {7, 8}};
    memset(&w, 0, sizeof w);
    w.count = w.places = 2;
    w.shared = true;
    w.now_ms = TICK_MS;
    struct machine *m = &w.machine[0];
    m->life = 7;
    setup(m, 0);
    e.place[1] = 1;
    lg_group_restore(&m->group, &(struct lg_group_before){.epoch = e}, clock_ns(m));
    lg_group_beat(&m->group, clock_ns(m));
    struct lg_beat b = {
        .place = 1, .phase = LG_GROUP_done, .number = 1, .life = 8, .sent_ns = 1, .epoch = e};
    b.heard[0].life = 7;
    b.heard[0].sent_ns = clock_ns(m);
    assert_true(lg_group_hear(&m->group, &b, clock_ns(m)));
    w.now_ms += 20 * SILENCE_MS;
    assert_int_equal(lg_group_look(&m->group, &facts, clock_ns(m)), 0);
    w.now_ms += 40 * SILENCE_MS;
    assert_int_equal(lg_group_look(&m->group, &facts, clock_ns(m)), LG_GROUP_LINK);
    assert_int_equal(m->group.linking.members, 1);
    assert_int_equal(m->group.linking.number, 2);
}

/* A machine's clock is set back, and it becomes a member before it hears from those who knew its later life. One of them waits
 * to join, and would drop for ever what the machine says. */
static void test_set_back_member(void **state)
{
    (void)state;
    char why[sizeof w.why] = "";
    if (!run(&(struct seeds_run){.seed = 17102461}, why, sizeof why)) fail_msg("%s", why);
}

int main(int argc, char **argv)
{
    const int code = seeds_replay(argc, argv, &g_spec);
    if (code >= 0) return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_honest),          cmocka_unit_test(test_one_way),
        cmocka_unit_test(test_followed),        cmocka_unit_test(test_recovery),
        cmocka_unit_test(test_comes_too_late),  cmocka_unit_test(test_formed_anew_meanwhile),
        cmocka_unit_test(test_unlike),          cmocka_unit_test(test_done_and_gone),
        cmocka_unit_test(test_set_back_member), cmocka_unit_test(test_plants)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
