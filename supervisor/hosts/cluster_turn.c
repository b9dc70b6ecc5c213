/* What is heard, and what follows from it; see cluster_private.h. What may take long, the file of an epoch, is a worker's. */
#include "base/clock.h"
#include "supervisor/hosts/cluster_private.h"
#include "supervisor/hosts/on_board.h"
#include "supervisor/hosts/shared.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAY_AGAIN_MS = 10000, BATCH_MAX = 1024 };

static void say(lg_cluster *c, bool bad, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void say(lg_cluster *c, bool bad, const char *fmt, ...)
{
    if (c->n_news == LG_CLUSTER_NEWS_MAX) return; /* nobody collects them: still joining */
    struct lg_cluster_news *n = &c->news[(c->first_news + c->n_news++) % LG_CLUSTER_NEWS_MAX];
    va_list ap;
    *n = (struct lg_cluster_news){.bad = bad};
    va_start(ap, fmt);
    vsnprintf(n->text, sizeof n->text, fmt, ap);
    va_end(ap);
}

void lg_cluster_list(uint64_t bits, char *ret, size_t bytes)
{
    size_t at = 0;
    ret[0] = 0;
    for (int h = 0; h < 64 && at < bytes; h++)
        if (bits >> h & 1) at += (size_t)snprintf(ret + at, bytes - at, "%s%d", at ? ", " : "", h);
}

/* ---- files of epochs ---- */

struct link_job {
    struct lg_job job;
    char folder[LG_PATH_BYTES];
    uint64_t lineage, number;
    struct lg_epoch want, is;
    int rc;
    char why[256];
};

static void make_link(struct lg_job *job)
{
    struct link_job *j = (struct link_job *)job;
    const struct lg_shared_place at = {j->folder, j->lineage, j->number};
    j->rc = lg_shared_link(&at, &j->want, &j->is);
    if (j->rc < 0) snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    lg_err_clear();
}

static void link_made(struct lg_job *job, void *context)
{
    struct link_job *j = (struct link_job *)job;
    lg_cluster *c = context;
    if (j->rc < 0 && lg_now_ns() >= c->next_link_said_ns) {
        say(c, true, "hosts.shared: %.250s; tried again", j->why);
        c->next_link_said_ns = lg_now_ns() + SAY_AGAIN_MS * LG_MS_NS;
    }
    lg_cluster_obey(c, lg_group_linked(&c->group, j->rc < 0 ? NULL : &j->is));
}

static void give_link(lg_cluster *c)
{
    struct link_job *j = calloc(1, sizeof *j);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = make_link, .done = link_made};
    memcpy(j->folder, c->shared, sizeof j->folder);
    j->lineage = c->lineage;
    j->number = c->shared_number;
    j->want = c->group.linking;
    if (!lg_worker_give(c->worker, &j->job)) lg_group_linked(&c->group, NULL);
}

/* ---- what follows ---- */

static void learn_addresses(lg_cluster *c)
{
    for (int p = 0; p < c->places.n; p++)
        if (p != c->places.own && c->group.last[p].life)
            memcpy(c->exchange[p], c->group.last[p].address, LG_HOST_ADDRESS_BYTES);
}

void lg_cluster_write_epoch(lg_cluster *c)
{
    const struct lg_group_addresses a = {c->exchange, c->port};
    if (!c->board || c->group.own.phase < LG_GROUP_member || c->lost) return;
    learn_addresses(c);
    lg_group_write_epoch(c->board, &c->group.own.epoch, &a);
}

static void say_epoch(lg_cluster *c)
{
    const struct lg_epoch *e = &c->group.own.epoch;
    char members[200];
    lg_cluster_list(e->members, members, sizeof members);
    say(c, false, "epoch %" PRIu64 ": host%s %s of %d; host %d leads", e->number,
        e->members & (e->members - 1) ? "s" : "", members, c->group.setup.count, e->leader);
}

void lg_cluster_send_all(lg_cluster *c)
{
    const struct lg_beat *b = lg_group_beat(&c->group, lg_now_ns());
    for (int p = 0; p < c->places.n; p++)
        if (p != c->places.own) lg_channel_send(c->channel, p, b, sizeof *b);
    c->next_beat_ns = lg_now_ns() + c->beat_ns;
}

/* The board before anybody hears of it. */
void lg_cluster_obey(lg_cluster *c, unsigned news)
{
    if (!news) return;
    lg_cluster_write_epoch(c);
    if ((news & (LG_GROUP_VOTED | LG_GROUP_ENTERED)) && c->board)
        lg_group_write_votes(c->board, &c->group.own);
    if (news & LG_GROUP_ENTERED) say_epoch(c);
    if (news & LG_GROUP_REFUSED) c->refused = true;
    if (news & LG_GROUP_ENDED) c->ended = true;
    if (news & LG_GROUP_LINK) give_link(c);
    if ((news & LG_GROUP_LOST) && !c->lost) {
        c->lost = true;
        if (c->board) lg_hosts_lose(c->board);
    }
    lg_cluster_send_all(c);
    pthread_cond_broadcast(&c->changed);
}

static void say_changes(lg_cluster *c, int64_t now_ns)
{
    char who[LG_HOST_ADDRESS_BYTES];
    for (int p = 0; p < c->places.n; p++) {
        const uint64_t bit = UINT64_C(1) << p;
        const bool up = lg_group_is_up(&c->group, p, now_ns);
        if (p == c->places.own || up == !!(c->up & bit)) continue;
        c->up ^= bit;
        const bool done = c->group.last[p].phase >= LG_GROUP_done;
        say(c, !up && !done, "machine %d (%s) %s", p, c->places.address[p],
            up     ? "is there"
            : done ? "has left"
                   : "is silent");
    }
    if (c->group.quorum_missing && !c->quorum_missing)
        say(c, true,
            "too few hosts are left to decide: waiting for the others, or for `lgsup hosts "
            "--take` where they are gone for good");
    c->quorum_missing = c->group.quorum_missing;
    if (now_ns < c->next_said_ns) return;
    const int n = lg_channel_refused(c->channel, who);
    if (!n) return;
    say(c, true, "refused %d times somebody without this cluster's key, the last time from %s", n,
        who);
    c->next_said_ns = now_ns + SAY_AGAIN_MS * LG_MS_NS;
}

static bool is_placed(const lg_cluster *c)
{
    struct lg_cluster_place p;
    return c->group.own.phase == LG_GROUP_joining &&
           lg_group_place(&c->group, &p.host, &p.origin, &p.comes);
}

static struct lg_answer own_name(const lg_cluster *c)
{
    const struct lg_beat *own = &c->group.own;
    return (struct lg_answer){.place = c->places.own,
                              .host = own->number,
                              .phase = own->phase,
                              .leads = own->epoch.number && own->epoch.leader == own->number};
}

static void receive(lg_cluster *c)
{
    union {
        struct lg_beat beat;
        unsigned char any[LG_CHANNEL_BYTES];
    } m;
    for (int i = 0; i < BATCH_MAX; i++) {
        const size_t bytes = lg_channel_receive(c->channel, &m, sizeof m);
        const struct lg_answer own = own_name(c);
        if (!bytes) break;
        if (bytes == sizeof m.beat)
            lg_group_hear(&c->group, &m.beat, lg_now_ns());
        else
            lg_answers_hear(c->answers, c->channel, &own, &m, bytes);
    }
}

/* For people. */
static void write_heard(lg_cluster *c)
{
    for (int p = 0; p < c->places.n; p++)
        atomic_store_explicit(&c->board->s->hosts.heard_ns[p], c->group.heard_ns[p],
                              memory_order_relaxed);
}

void lg_cluster_turn(lg_cluster *c)
{
    struct lg_group_facts facts = {0};
    receive(c);
    lg_worker_collect(c->worker, c);
    const struct lg_answer own = own_name(c);
    lg_answers_turn(c->answers, c->channel, &own, lg_now_ns());
    if (c->board) write_heard(c);
    if (c->board) lg_group_read_facts(c->board, &facts);
    const int64_t now_ns = lg_now_ns();
    lg_cluster_obey(c, lg_group_look(&c->group, &facts, now_ns));
    say_changes(c, now_ns);
    if (is_placed(c)) pthread_cond_broadcast(&c->changed); /* lg_cluster_join */
    if (now_ns >= c->next_beat_ns) lg_cluster_send_all(c);
}
