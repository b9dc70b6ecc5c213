/* How the next epoch is decided; see group.h. Paxos with one value for each epoch: what follows on it. All that is said
 * stands in the beats; what belongs to another epoch than the own is not looked at. */
#include "supervisor/hosts/group_private.h"
#include <string.h>

/* Numbers of ballots differ between members, and grow. */
enum { BALLOT_STEP = 64 };

void lg_group_rest(struct lg_group *g)
{
    g->own.ballot = 0;
    g->own.proposal.number = 0;
    g->link_waits = false;
    g->linking.number = 0;
}

/* What member h of the own epoch says about its successor; NULL: it has not been heard since it is in this one. */
static const struct lg_beat *voter(const struct lg_group *g, int h)
{
    const struct lg_epoch *e = &g->own.epoch;
    if (!(e->members >> h & 1)) return NULL;
    if (h == g->own.number) return &g->own;
    const struct lg_beat *b = &g->last[e->place[h]];
    const bool same = b->life == e->life[h] && b->number == h &&
                      b->epoch.formation == e->formation && b->epoch.number == e->number;
    return same ? b : NULL;
}

static bool promise(struct lg_group *g, const struct lg_beat *asks)
{
    bool voted = false;
    if (!asks->ballot) return false;
    if (asks->ballot > g->own.promised) {
        g->own.promised = asks->ballot;
        voted = true;
    }
    if (asks->proposal.number && asks->ballot >= g->own.promised &&
        asks->ballot > g->own.accepted) {
        g->own.accepted = asks->ballot;
        g->own.accepted_epoch = asks->proposal;
        voted = true;
    }
    return voted;
}

unsigned lg_group_answer(struct lg_group *g)
{
    bool voted = false;
    for (int h = 0; h < g->setup.count; h++) {
        const struct lg_beat *b = voter(g, h);
        if (b && b != &g->own) voted |= promise(g, b);
    }
    return voted ? LG_GROUP_VOTED : 0;
}

static void ask(struct lg_group *g, int64_t now_ns)
{
    uint64_t most = g->own.promised;
    for (int h = 0; h < g->setup.count; h++) {
        const struct lg_beat *b = voter(g, h);
        if (b) most = LG_MAX(most, b->promised);
    }
    g->own.ballot = (most / BALLOT_STEP + 1) * BALLOT_STEP + (uint64_t)g->own.number;
    g->own.proposal.number = 0;
    g->ballot_ns = now_ns;
}

static int more_than_half(const struct lg_group *g)
{
    return __builtin_popcountll(g->own.epoch.members) / 2 + 1;
}

/* With promises of more than half nothing can have been decided but what one of them has accepted. */
static void propose(struct lg_group *g, const struct lg_epoch *want)
{
    const struct lg_epoch *value = want;
    uint64_t accepted = 0;
    int promises = 0;
    for (int h = 0; h < g->setup.count; h++) {
        const struct lg_beat *b = voter(g, h);
        if (!b || b->promised != g->own.ballot) continue;
        promises++;
        if (b->accepted <= accepted) continue;
        accepted = b->accepted;
        value = &b->accepted_epoch;
    }
    if (promises >= more_than_half(g)) g->own.proposal = *value;
}

static bool is_accepted(const struct lg_group *g)
{
    int accepts = 0;
    for (int h = 0; h < g->setup.count; h++) {
        const struct lg_beat *b = voter(g, h);
        accepts += b && b->accepted == g->own.ballot;
    }
    return accepts >= more_than_half(g);
}

/* Two that ask at the same time outbid each other; the lower number tries again sooner. */
static bool is_overtaken(const struct lg_group *g, int64_t now_ns)
{
    return now_ns - g->ballot_ns > g->setup.silence_ns * (1 + g->own.number % 4) / 2;
}

static bool is_member(const struct lg_group *g, const struct lg_epoch *e)
{
    const int h = g->own.number;
    return (e->members >> h & 1) && e->life[h] == g->own.life;
}

static unsigned decided(struct lg_group *g, const struct lg_epoch *e)
{
    if (is_member(g, e)) return lg_group_enter(g, e);
    /* Decided without us while we did not know: the others say so in their beats, too. */
    g->own.phase = LG_GROUP_lost;
    lg_group_rest(g);
    strcpy(g->text, "the other hosts have decided to go on without this one");
    return LG_GROUP_LOST;
}

unsigned lg_group_decide(struct lg_group *g, const struct lg_epoch *want, int64_t now_ns)
{
    if (g->setup.shared) {
        if (g->link_waits) return 0;
        g->link_waits = true;
        g->linking = *want;
        return LG_GROUP_LINK;
    }
    if (!g->own.ballot || is_overtaken(g, now_ns)) ask(g, now_ns);
    unsigned news = promise(g, &g->own) ? LG_GROUP_VOTED : 0;
    if (!g->own.proposal.number) propose(g, want);
    if (promise(g, &g->own)) news |= LG_GROUP_VOTED;
    if (!g->own.proposal.number || !is_accepted(g)) return news;
    struct lg_epoch e = g->own.proposal;
    return news | decided(g, &e);
}

unsigned lg_group_linked(struct lg_group *g, const struct lg_epoch *e)
{
    g->link_waits = false;
    if (!e || g->own.phase == LG_GROUP_lost || e->formation != g->own.epoch.formation ||
        e->number <= g->own.epoch.number)
        return 0;
    return decided(g, e);
}
