/* Who takes part; see group.h. */
#include "base/clock.h"
#include "supervisor/hosts/group_private.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LONELY_SILENCES = 50 };
/* The operator's epochs have numbers of their own, different for each host: nothing that has been decided without our
 * knowing has that one. */
enum { TAKEN_STEP = 100000, TAKEN_OF_HOST = 1000 };

const char *lg_group_phase_name(lg_group_phase p)
{
    static const char *const name[] = {
#define X(name) #name,
        LG_GROUP_PHASES(X)
#undef X
    };
    return p < LG_GROUP_PHASE_COUNT ? name[p] : "unknown";
}

void lg_group_init(struct lg_group *g, const struct lg_group_setup *s)
{
    LG_ASSERT(s->count >= 2 && s->count <= LG_HOSTS_MAX && s->places >= s->count);
    LG_ASSERT(s->places <= LG_PLACES_MAX && s->place >= 0 && s->place < s->places && s->life > 0);
    memset(g, 0, sizeof *g);
    g->setup = *s;
    g->own.place = s->place;
    g->own.life = s->life;
    g->own.identity = s->identity;
    g->own.origin = s->origin;
    memcpy(g->own.address, s->address, sizeof s->address);
    g->own.number = -1;
}

void lg_group_restore(struct lg_group *g, const struct lg_group_before *b, int64_t now_ns)
{
    g->restored_ns = now_ns;
    g->is_restored = true;
    g->own.phase = LG_GROUP_member;
    g->own.number = b->number;
    g->own.epoch = b->epoch;
    g->own.comes = b->comes;
    g->own.origin.step = b->start_step;
    g->own.promised = b->promised;
    g->own.accepted = b->accepted;
    g->own.accepted_epoch = b->accepted_epoch;
}

/* ---- what is heard ---- */

static bool is_epoch(const struct lg_group *g, const struct lg_epoch *e)
{
    const int count = g->setup.count;
    if (!e->number) return true;
    if (!e->members || e->members & ~lg_hosts_all(count)) return false;
    if (e->leader < 0 || e->leader >= count || !(e->members >> e->leader & 1)) return false;
    for (int h = 0; h < count; h++)
        if ((e->members >> h & 1) && e->place[h] >= g->setup.places) return false;
    return true;
}

static bool is_beat(const struct lg_group *g, const struct lg_beat *b)
{
    const int count = g->setup.count;
    return b->place >= 0 && b->place < g->setup.places && b->place != g->setup.place &&
           b->phase < LG_GROUP_PHASE_COUNT && b->life && b->number >= -1 && b->number < count &&
           b->offer.number >= -1 && b->offer.number < count && b->offer.origin.n_data >= 0 &&
           b->offer.origin.n_data <= LG_DATA_PARTS_MAX && b->origin.n_data >= 0 &&
           b->origin.n_data <= LG_DATA_PARTS_MAX &&
           memchr(b->address, 0, sizeof b->address) != NULL && is_epoch(g, &b->epoch) &&
           is_epoch(g, &b->proposal) && is_epoch(g, &b->accepted_epoch);
}

bool lg_group_hear(struct lg_group *g, const struct lg_beat *b, int64_t now_ns)
{
    if (b->place == g->setup.place && b->life != g->own.life) g->has_twin = true;
    if (!is_beat(g, b)) return false;
    struct lg_beat *last = &g->last[b->place];
    if (b->life < last->life || (b->life == last->life && b->sent_ns <= last->sent_ns)) return true;
    *last = *b;
    g->heard_ns[b->place] = now_ns;
    return true;
}

/* Others' echoes are as old as their beats are rare, and those go as often as ours: twice the silence is generous
 * to both directions together. */
bool lg_group_is_up(const struct lg_group *g, int place, int64_t now_ns)
{
    if (place == g->setup.place) return true;
    const struct lg_beat *b = &g->last[place];
    return b->life && now_ns - g->heard_ns[place] < g->setup.silence_ns &&
           b->heard[g->setup.place].life == g->own.life &&
           now_ns - b->heard[g->setup.place].sent_ns < 2 * g->setup.silence_ns;
}

static const struct lg_beat *beat_of(const struct lg_group *g, int place)
{
    return place == g->setup.place ? &g->own : &g->last[place];
}

/* A supervisor that follows on another has heard nobody yet. It gives the members of the epoch that it found the time that a
 * member may be silent: else it would go on without all of them at once, who saw nothing of its predecessor's death. */
static bool is_awaited(const struct lg_group *g, int h, int64_t now_ns)
{
    const struct lg_epoch *e = &g->own.epoch;
    const struct lg_beat *b = beat_of(g, e->place[h]);
    return g->is_restored && now_ns - g->restored_ns < g->setup.silence_ns &&
           (!b->life || b->life == e->life[h]);
}

/* A member with nothing left to do is no loss when it goes: the others are about to end, too. It may have lost its power before
 * its last word came to them by the other way, which is that of the exchange processes; then they would wait for it for ever. */
static bool has_left(const struct lg_group *g, int place, int64_t now_ns)
{
    return g->last[place].phase == LG_GROUP_done &&
           now_ns - g->heard_ns[place] < LONELY_SILENCES * g->setup.silence_ns;
}

uint64_t lg_group_present(const struct lg_group *g, int64_t now_ns)
{
    const struct lg_epoch *e = &g->own.epoch;
    uint64_t present = 0;
    for (int h = 0; h < g->setup.count; h++) {
        if (!(e->members >> h & 1)) continue;
        const struct lg_beat *b = beat_of(g, e->place[h]);
        if (b->phase == LG_GROUP_lost) continue;
        if (is_awaited(g, h, now_ns)) present |= UINT64_C(1) << h;
        if (b->life != e->life[h]) continue;
        if (has_left(g, e->place[h], now_ns) || lg_group_is_up(g, e->place[h], now_ns))
            present |= UINT64_C(1) << h;
    }
    return present;
}

/* ---- epochs ---- */

/* Which member this host is in it; -1: none. */
static int number_in(const struct lg_group *g, const struct lg_epoch *e)
{
    for (int h = 0; h < g->setup.count; h++)
        if ((e->members >> h & 1) && e->place[h] == g->setup.place && e->life[h] == g->own.life)
            return h;
    return -1;
}

unsigned lg_group_enter(struct lg_group *g, const struct lg_epoch *e)
{
    g->own.epoch = *e;
    if (g->own.phase != LG_GROUP_done) g->own.phase = LG_GROUP_member;
    g->own.promised = g->own.accepted = 0;
    g->own.accepted_epoch.number = 0;
    memset(&g->own.offer, 0, sizeof g->own.offer);
    lg_group_rest(g);
    g->own.number = number_in(g, e);
    LG_ASSERT(g->own.number >= 0);
    if (e->number == 1) g->own.comes = g->own.origin.step != e->first_step;
    return LG_GROUP_ENTERED | LG_GROUP_VOTED;
}

static unsigned lose(struct lg_group *g, const char *why)
{
    g->own.phase = LG_GROUP_lost;
    lg_group_rest(g);
    snprintf(g->text, sizeof g->text, "%s", why);
    return LG_GROUP_LOST;
}

static bool has_part(const struct lg_group *g)
{
    return g->own.phase == LG_GROUP_member || g->own.phase == LG_GROUP_done;
}

/* An epoch that others are in. Where hosts have been formed twice, the later formation is the run. */
static unsigned obey(struct lg_group *g, const struct lg_epoch *e)
{
    char why[LG_GROUP_TEXT];
    const bool is_known = e->formation == g->own.epoch.formation;
    if (!e->number || (has_part(g) && e->formation < g->own.epoch.formation)) return 0;
    if (has_part(g) && !is_known)
        return lose(g, "the hosts have formed this run anew without this one");
    if (has_part(g) && e->number <= g->own.epoch.number) return 0;
    const int number = number_in(g, e);
    if (g->own.phase == LG_GROUP_coming && number >= 0 &&
        (number != g->own.number || e->formation != g->comes_to)) /* its board is another's */
        return lose(g, "the hosts have formed this run anew while this one was about to join it");
    if (number >= 0) return lg_group_enter(g, e);
    if (!has_part(g)) return 0;
    snprintf(why, sizeof why, "epoch %" PRIu64 " goes on without this host", e->number);
    return lose(g, why);
}

/* Joining or coming: a member whose life is earlier than one that is known here of its place had its clock set back, and nobody
 * whom it heard in time knew of that life (outlive). The members have agreed on the life that it has. */
static void believe_members(struct lg_group *g, int64_t now_ns)
{
    const struct lg_epoch *e = &g->own.epoch;
    for (int h = 0; h < g->setup.count && e->number; h++) {
        const int p = e->place[h];
        struct lg_beat *b = &g->last[p];
        if (!(e->members >> h & 1) || p == g->setup.place || b->life <= e->life[h]) continue;
        if (b->phase == LG_GROUP_done || now_ns - g->heard_ns[p] < g->setup.silence_ns) continue;
        memset(b, 0, sizeof *b); /* of the life that is no more: so that the present one is heard */
    }
}

/* Joining or coming: the newest epoch whose members are there. */
static void look_for_run(struct lg_group *g, int64_t now_ns)
{
    g->own.epoch.number = g->own.epoch.formation = 0;
    for (int p = 0; p < g->setup.places; p++) {
        const struct lg_beat *b = &g->last[p];
        if (p == g->setup.place || !lg_group_is_up(g, p, now_ns) || b->phase != LG_GROUP_member)
            continue;
        g->company_ns = now_ns;
        if (b->epoch.formation > g->own.epoch.formation ||
            (b->epoch.formation == g->own.epoch.formation && b->epoch.number > g->own.epoch.number))
            g->own.epoch = b->epoch;
    }
    if (g->own.epoch.number) g->company = g->own.epoch.formation;
    believe_members(g, now_ns);
}

/* Somebody knows of a later life of this place: the clock has been set back since, or is not set yet. What this one says would
 * be older than what is known, and nobody would hear it. So it gets a life after that one, which no other start has: its
 * nanoseconds are its own. Joining: nobody counts on the present one yet. */
static void outlive(struct lg_group *g)
{
    uint64_t latest = 0;
    for (int p = 0; p < g->setup.places; p++) {
        const struct lg_beat *b = &g->last[p];
        if (p == g->setup.place || !b->life) continue;
        latest = LG_MAX(latest, b->heard[g->setup.place].life);
        if (g->setup.place == 0) latest = LG_MAX(latest, b->epoch.formation);
    }
    if (latest > g->own.life) g->own.life = latest + 1 + g->setup.life % LG_S_NS;
}

/* ---- the first epoch ---- */

static bool differs(struct lg_group *g, const struct lg_beat *b)
{
    const struct lg_identity *a = &g->own.identity, *c = &b->identity;
    const char *what = a->build != c->build ? "build"
                       : a->plan != c->plan ? "plan (what decides bits, hosts.count, models' files)"
                       : a->lineage != c->lineage     ? "lineage (another run)"
                       : a->max_steps != c->max_steps ? "trainer.max_steps"
                       : a->shared && c->shared && a->shared != c->shared
                           ? "folder as hosts.shared (is it mounted there, and here?)"
                           : NULL;
    if (what)
        snprintf(g->text, sizeof g->text, "the machine at place %d of hosts.list has another %s",
                 b->place, what);
    return what != NULL;
}

/* The leader begins the run, or goes on from its checkpoint; the others take their state from it. Where all have one of
 * the same step, the lowest. */
static int first_leader(const struct lg_group *g)
{
    int leader = 0;
    for (int h = 1; h < g->setup.count; h++)
        if (beat_of(g, h)->origin.step > beat_of(g, leader)->origin.step) leader = h;
    return leader;
}

static unsigned form(struct lg_group *g, int64_t now_ns)
{
    struct lg_epoch e = {.formation = g->own.life, .number = 1};
    if (g->setup.place != 0) return 0;
    for (int p = 0; p < g->setup.count; p++) {
        const struct lg_beat *b = beat_of(g, p);
        if (!lg_group_is_up(g, p, now_ns) || b->phase != LG_GROUP_joining) return 0;
        e.place[p] = (uint8_t)p;
        e.life[p] = b->life;
    }
    e.members = lg_hosts_all(g->setup.count);
    e.leader = first_leader(g);
    e.first_step = beat_of(g, e.leader)->origin.step;
    return lg_group_enter(g, &e);
}

/* Those whom this one has waited for have said that they have nothing left to do. They may be gone by now, and this one
 * may have been stopped while they said it. */
static bool has_ended(const struct lg_group *g, int64_t now_ns)
{
    bool done = false;
    for (int p = 0; p < g->setup.places; p++) {
        if (p == g->setup.place) continue;
        if (g->last[p].phase == LG_GROUP_member && lg_group_is_up(g, p, now_ns)) return false;
        done |= g->last[p].phase == LG_GROUP_done && g->last[p].epoch.formation == g->company;
    }
    return done && g->company_ns;
}

static unsigned join(struct lg_group *g, int64_t now_ns)
{
    if (has_ended(g, now_ns)) return LG_GROUP_ENDED;
    if (g->has_twin) {
        snprintf(
            g->text, sizeof g->text,
            "another machine is number %d of hosts.list, too (the list has another order there, "
            "or hosts.number is wrong)",
            g->setup.place);
        return LG_GROUP_REFUSED;
    }
    for (int p = 0; p < g->setup.places; p++) {
        if (p == g->setup.place || !lg_group_is_up(g, p, now_ns)) continue;
        /* Where there is a run its hosts are right, and whoever else waits may be wrong. */
        if (g->own.epoch.number && g->last[p].phase < LG_GROUP_member) continue;
        if (differs(g, &g->last[p])) return LG_GROUP_REFUSED;
    }
    return g->own.epoch.number ? 0 : form(g, now_ns);
}

/* The others may have taken in another machine under that number, or ended meanwhile. */
static unsigned wait_to_be_taken_in(struct lg_group *g, int64_t now_ns)
{
    if (has_ended(g, now_ns)) return lose(g, "the run has ended before this host was one of it");
    if (g->own.epoch.members >> g->own.number & 1 && g->own.epoch.number)
        return lose(g, "another machine has taken the place that was offered to this one");
    if (now_ns - g->company_ns > LONELY_SILENCES * g->setup.silence_ns)
        return lose(g, "the hosts that this one was to join are gone");
    return 0;
}

bool lg_group_place(const struct lg_group *g, int *ret_number, struct lg_origin *ret,
                    bool *ret_comes)
{
    if (g->own.phase == LG_GROUP_member) { /* of the first epoch: its leader's beginning is all's */
        *ret_number = g->own.number;
        *ret = beat_of(g, g->own.epoch.place[g->own.epoch.leader])->origin;
        *ret_comes = g->own.comes;
        return true;
    }
    for (int p = 0; p < g->setup.places && g->own.phase == LG_GROUP_joining; p++) {
        const struct lg_beat *b = &g->last[p];
        if (p == g->setup.place || b->offer.life != g->own.life || b->offer.number < 0 ||
            b->phase != LG_GROUP_member || b->epoch.formation != g->own.epoch.formation ||
            b->epoch.number != g->own.epoch.number)
            continue;
        *ret_number = b->offer.number;
        *ret = b->offer.origin;
        *ret_comes = true;
        return true;
    }
    return false;
}

void lg_group_come(struct lg_group *g, int number, uint64_t state)
{
    LG_ASSERT(g->own.phase == LG_GROUP_joining);
    g->own.phase = LG_GROUP_coming;
    g->own.comes = 1;
    g->own.number = number;
    g->own.state = state;
    g->comes_to = g->own.epoch.formation;
}

/* ---- the next epoch ---- */

/* Who has the state leads, so that others can take it from there; the present leader goes first, and where nobody has
 * one yet, whoever would begin one. -1: none of them. */
static int leader_of(const struct lg_group *g, const struct lg_epoch *e, uint64_t members)
{
    const int now = g->own.epoch.leader;
    for (int needs = 1; needs >= 0; needs--)
        for (int i = -1; i < g->setup.count; i++) {
            const int h = i < 0 ? now : i;
            const struct lg_beat *b = beat_of(g, e->place[h]);
            if (!(members >> h & 1) || b->life != e->life[h]) continue;
            if (needs ? b->has_state : !b->comes && b->origin.step == e->first_step) return h;
        }
    return -1;
}

/* A machine that may have number h: the one whose number it is first, then the first that waits. */
static const struct lg_beat *who_comes(const struct lg_group *g, int h, int64_t now_ns)
{
    for (int i = -1; i < g->setup.places; i++) {
        const int p = i < 0 ? h : i;
        const struct lg_beat *b = &g->last[p];
        if (p == g->setup.place || !lg_group_is_up(g, p, now_ns)) continue;
        if (b->phase == LG_GROUP_joining || (b->phase == LG_GROUP_coming && b->number == h))
            return b;
    }
    return NULL;
}

/* Offers the lowest free number, and says with whom the next epoch can be made. */
static bool take_in(struct lg_group *g, struct lg_epoch *want, int64_t now_ns)
{
    const struct lg_epoch *e = &g->own.epoch;
    memset(&g->own.offer, 0, sizeof g->own.offer);
    if (!g->facts.settled) return false;
    for (int h = 0; h < g->setup.count; h++) {
        const struct lg_beat *b = e->members >> h & 1 ? NULL : who_comes(g, h, now_ns);
        if (!b) continue;
        if (b->phase == LG_GROUP_coming) {
            want->members |= UINT64_C(1) << h;
            want->place[h] = (uint8_t)b->place;
            want->life[h] = b->life;
            return true;
        }
        g->own.offer.life = b->life;
        g->own.offer.number = h;
        g->own.offer.origin = g->facts.rest;
        return false;
    }
    return false;
}

/* Who proposes: the lowest that is up. One that has left with nothing left to do proposes nothing. */
static int proposer(const struct lg_group *g, uint64_t present, int64_t now_ns)
{
    for (int h = 0; h < g->setup.count; h++)
        if ((present >> h & 1) && lg_group_is_up(g, g->own.epoch.place[h], now_ns)) return h;
    return -1;
}

/* What should follow on the present epoch, if this place is the one to say so. */
static bool wants(struct lg_group *g, struct lg_epoch *ret, uint64_t present, int64_t now_ns)
{
    struct lg_epoch e = g->own.epoch;
    e.number++;
    memset(&g->own.offer, 0, sizeof g->own.offer);
    if (proposer(g, present, now_ns) != g->own.number) return false;
    if (present != e.members) {
        for (int h = 0; h < g->setup.count; h++)
            if (!(present >> h & 1)) e.life[h] = e.place[h] = 0;
        e.members = present;
    } else if (e.members == lg_hosts_all(g->setup.count) || !take_in(g, &e, now_ns)) {
        return false;
    }
    e.leader = leader_of(g, &e, e.members);
    if (e.leader < 0) return false;
    *ret = e;
    return true;
}

/* Do all of these members live another life by now? */
static bool have_begun_anew(const struct lg_group *g, uint64_t members)
{
    const struct lg_epoch *e = &g->own.epoch;
    for (int h = 0; h < g->setup.count; h++)
        if ((members >> h & 1) && beat_of(g, e->place[h])->life <= e->life[h]) return false;
    return true;
}

/* Nobody that is left could begin the run: who had its state, or its checkpoint, is gone. Where others decide, they may
 * still be there. */
static bool is_stranded(const struct lg_group *g, uint64_t present)
{
    const uint64_t absent = g->own.epoch.members & ~present;
    return absent && !g->done && leader_of(g, &g->own.epoch, present) < 0 &&
           (!g->quorum_missing || have_begun_anew(g, absent));
}

static unsigned go_on(struct lg_group *g, int64_t now_ns)
{
    struct lg_epoch want;
    const uint64_t present = lg_group_present(g, now_ns);
    const int members = __builtin_popcountll(g->own.epoch.members);
    const uint64_t offered = g->own.offer.life;
    g->quorum_missing = present != g->own.epoch.members && !g->setup.shared &&
                        2 * __builtin_popcountll(present) <= members;
    unsigned news = lg_group_answer(g);
    if (is_stranded(g, present))
        return news | lose(g, "no host is left that has the run's state: start all of them again");
    if (wants(g, &want, present, now_ns))
        news |= lg_group_decide(g, &want, now_ns);
    else
        lg_group_rest(g);
    const uint64_t offers = g->own.offer.life;
    return news | (offers && offers != offered ? LG_GROUP_OFFERED : 0);
}

unsigned lg_group_look(struct lg_group *g, const struct lg_group_facts *facts, int64_t now_ns)
{
    unsigned news = 0;
    g->facts = *facts;
    g->own.has_state = facts->has_state;
    if (g->own.phase == LG_GROUP_joining) outlive(g);
    if (g->own.phase == LG_GROUP_joining || g->own.phase == LG_GROUP_coming)
        look_for_run(g, now_ns);
    for (int p = 0; p < g->setup.places && g->own.phase != LG_GROUP_lost; p++)
        if (g->last[p].life && g->last[p].phase >= LG_GROUP_member)
            news |= obey(g, &g->last[p].epoch);
    if (g->own.phase == LG_GROUP_joining) return news | join(g, now_ns);
    if (g->own.phase == LG_GROUP_coming) return news | wait_to_be_taken_in(g, now_ns);
    if (has_part(g)) news |= go_on(g, now_ns);
    return news;
}

const struct lg_beat *lg_group_beat(struct lg_group *g, int64_t now_ns)
{
    g->own.sent_ns = LG_MAX(now_ns, g->own.sent_ns + 1);
    if (g->own.phase == LG_GROUP_done && !g->done_sent_ns) g->done_sent_ns = g->own.sent_ns;
    for (int p = 0; p < g->setup.places; p++) {
        g->own.heard[p].life = g->last[p].life;
        g->own.heard[p].sent_ns = g->last[p].sent_ns;
    }
    for (int h = 0; h < g->setup.count; h++) {
        const int p = g->own.epoch.place[h];
        if (!(g->own.epoch.members >> h & 1) || g->last[p].life || !is_awaited(g, h, now_ns))
            continue;
        g->own.heard[p].life = g->own.epoch.life[h];
        g->own.heard[p].sent_ns = LG_GROUP_AWAITED;
    }
    return &g->own;
}

int lg_group_take(struct lg_group *g, int64_t now_ns, unsigned *ret_news)
{
    struct lg_epoch e = g->own.epoch;
    const uint64_t present = lg_group_present(g, now_ns);
    *ret_news = 0;
    if (g->own.phase != LG_GROUP_member || present == e.members) return LG_ERR_FAILED;
    e.leader = leader_of(g, &e, present);
    if (e.leader < 0) return LG_ERR_FAILED;
    e.number = (e.number / TAKEN_STEP + 1) * TAKEN_STEP + TAKEN_OF_HOST * (uint64_t)g->own.number;
    e.members = present;
    *ret_news = lg_group_enter(g, &e);
    return 0;
}

/* ---- the end ---- */

void lg_group_finish(struct lg_group *g)
{
    g->done = true;
    if (g->own.phase == LG_GROUP_member) g->own.phase = LG_GROUP_done;
}

/* Machines that wait to be one of the run, and do not know yet that this host has nothing left to do. */
static bool are_unaware(const struct lg_group *g, int64_t now_ns)
{
    for (int p = 0; p < g->setup.places; p++) {
        const struct lg_beat *b = &g->last[p];
        if (p == g->setup.place || !lg_group_is_up(g, p, now_ns)) continue;
        if (b->phase != LG_GROUP_joining && b->phase != LG_GROUP_coming) continue;
        if (!g->done_sent_ns || b->heard[g->setup.place].sent_ns < g->done_sent_ns) return true;
    }
    return false;
}

/* A host that has more to do may need ours for it (a checkpoint to be published, say); one that is gone does not. A supervisor
 * that follows on another has a silence's time to hear who is there. */
bool lg_group_is_finished(const struct lg_group *g, int64_t now_ns)
{
    const struct lg_epoch *e = &g->own.epoch;
    if (g->own.phase != LG_GROUP_done) return true;
    if (g->is_restored && now_ns - g->restored_ns < g->setup.silence_ns) return false;
    if (are_unaware(g, now_ns)) return false;
    for (int h = 0; h < g->setup.count; h++) {
        const int p = e->place[h];
        if (!(e->members >> h & 1) || p == g->setup.place) continue;
        if (lg_group_is_up(g, p, now_ns) && g->last[p].phase != LG_GROUP_done) return false;
    }
    return true;
}
