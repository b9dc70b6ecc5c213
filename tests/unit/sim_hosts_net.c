/* The pretended network: connections that deliver late, in halves, or never; a transport for exchangers. */
#include "stages/exchange/exchanger_private.h"
#include "tests/unit/sim_hosts_world.h"
#include <stdlib.h>
#include <string.h>

enum { NOTES_OF_A_LOSS = 50, KEPT_OF_NOTES = 8, TURNS_OF_AN_ECHO = 50 };

struct lg_transport {
    struct node *node;
    struct connection *to[HOSTS];
};

/* An exchange process dies between any two of its calls. */
static void may_die(struct world *w)
{
    if (!w->may_die || !w->dies_in || --w->dies_in) return;
    w->may_die = false;
    longjmp(w->died, 1);
}

static void finish(struct lg_transfer *m, bool failed)
{
    m->failed = failed;
    m->done = true;
}

static void unpost(struct node *n, int i)
{
    memmove(n->posted + i, n->posted + i + 1, (size_t)(--n->n_posted - i) * sizeof *n->posted);
}

/* The first message goes; its sender is done with it. */
static void pop(struct connection *c, bool failed)
{
    if (c->queue[0].sent) finish(c->queue[0].sent, failed);
    memmove(c->queue, c->queue + 1, (size_t)--c->n * sizeof *c->queue);
    if (c->from) c->from->happened = true;
}

static void drop_all(struct connection *c)
{
    if (c->n && c->queue[0].place) finish(c->queue[0].place, true);
    if (c->n && c->queue[0].place && c->to) c->to->happened = true;
    while (c->n) pop(c, true);
}

static struct lg_transfer *place_for(struct node *n, const struct message *m)
{
    const bool any = sim_hosts_is(n->w, SIM_HOSTS_ANY_TAG) && !(m->tag & LG_TAG_NOTE);
    for (int i = 0; i < n->n_posted; i++) {
        struct lg_transfer *t = n->posted[i];
        const bool fits = any ? !(t->tag & LG_TAG_NOTE) && t->bytes == m->bytes : t->tag == m->tag;
        if (!fits) continue;
        unpost(n, i);
        return t;
    }
    return NULL;
}

static void put(struct node *to, struct lg_transfer *place, const struct message *m)
{
    struct lg_note *note = place->data;
    memcpy(note, m->note, m->bytes);
    if (sim_hosts_is(to->w, SIM_HOSTS_OLD_EPOCHS))
        note->epoch = lg_hosts_epoch(&to->of->board, NULL);
    finish(place, false);
    to->happened = true;
}

/* A note is lost, though its connection stands; or it comes and is kept, to come again one day (echo). False: it waits for a
 * place. */
static bool deliver_note(struct connection *c)
{
    struct world *w = c->to->w;
    const struct message *m = &c->queue[0];
    struct lg_transfer *place;
    if (sim_hosts_random(w, NOTES_OF_A_LOSS)) {
        place = place_for(c->to, m);
        if (!place) return false;
        put(c->to, place, m);
        const uint64_t at = sim_hosts_random(w, KEPT_OF_NOTES * ECHOES);
        if (at < ECHOES)
            w->echo[at] = (struct echo){.to = c->to->of->host, .rank = c->to->rank, .note = *m};
    }
    pop(c, false);
    return true;
}

/* A note comes again, or late, whoever has the place of its reader now: one of a connection that was given up may, or of a
 * process that is dead. */
static void echo(struct world *w)
{
    const struct echo *e = &w->echo[sim_hosts_random(w, ECHOES)];
    struct life *of = w->host[e->to];
    struct node *to = of->up ? of->node[e->rank] : NULL;
    struct lg_transfer *place = e->note.bytes && to && to->alive ? place_for(to, &e->note) : NULL;
    if (place) put(to, place, &e->note);
}

/* False: it waits for a place. */
static bool deliver(struct connection *c)
{
    struct message *m = &c->queue[0];
    if (m->tag & LG_TAG_NOTE) return deliver_note(c);
    const char *from = m->sent->data;
    const size_t half = m->bytes / 2;
    if (!m->place) {
        m->place = place_for(c->to, m);
        if (!m->place) {
            pop(c, false);
            return true;
        }
        if (m->place->bytes != m->bytes) {
            finish(m->place, true);
            m->place = NULL;
            pop(c, false);
            return true;
        }
        memcpy(m->place->data, from, half);
        if (sim_hosts_is(c->from->w, SIM_HOSTS_DONE_EARLY)) m->place->done = true;
        return true;
    }
    memcpy((char *)m->place->data + half, from + half, m->bytes - half);
    finish(m->place, false);
    m->place = NULL;
    c->to->happened = true;
    pop(c, false);
    return true;
}

void sim_hosts_net_turn(struct world *w)
{
    if (!w->calm && sim_hosts_random(w, TURNS_OF_AN_ECHO) == 0) echo(w);
    const int most = 4 * HOSTS * HOSTS * RANKS; /* few are in use, and those are the first */
    const int first = (int)sim_hosts_random(w, (uint64_t)most);
    for (int i = 0; i < CONNECTIONS; i++) {
        const int at = i < most ? (first + i) % most : i;
        struct connection *c = &w->connection[at];
        if (at >= w->n_connections) { /* nor are those after it, up to where it begins anew */
            i = i < most && first + i < most ? most - 1 - first : CONNECTIONS;
            continue;
        }
        if (!c->used || c->failed || !c->n || w->cut[c->from_host][c->to_host]) continue;
        if (!c->to || !c->to->alive) { /* of a dead host nothing is heard */
            if (!c->to || c->to->of->up) c->failed = true;
            if (c->failed && c->from) c->from->happened = true;
            continue;
        }
        if (deliver(c)) return;
    }
}

/* A connection breaks, with what is on it; or a process was so slow that it cuts off all that comes to it, although nobody has
 * died. */
void sim_hosts_net_fail_one(struct world *w)
{
    struct connection *c = &w->connection[sim_hosts_random(w, 2 * HOSTS * RANKS)];
    if (!c->used || c->failed) return;
    w->result->failures++;
    if (c->to && c->to->alive && c->to->x && c->to->x->transport && sim_hosts_random(w, 2)) {
        c->to->x->spec.transport->cut_off(c->to->x->transport);
        return;
    }
    drop_all(c);
    c->failed = true;
    if (c->from) c->from->happened = true;
}

/* Places of the dead are no places any more; of what it was sending, half may have come. */
void sim_hosts_net_died(struct world *w, struct node *n, bool with_host)
{
    for (int i = 0; i < w->n_connections; i++) {
        struct connection *c = &w->connection[i];
        if (!c->used) continue;
        if (c->to == n) {
            for (int k = 0; k < c->n; k++) c->queue[k].place = NULL;
            c->to = with_host || sim_hosts_random(w, 2) ? n : NULL; /* n->alive says it, too */
        }
        if (c->from != n) continue;
        for (int k = 0; k < c->n; k++) c->queue[k].sent = NULL;
        /* Of a host that is gone nobody hears that a message will not come to its end. */
        if (c->n && c->queue[0].place && with_host && c->to && c->to->alive) {
            LG_ASSERT(c->to->n_half < (int)LG_ARRAY_LEN(c->to->half));
            c->to->half[c->to->n_half++] = c->queue[0].place;
        } else if (c->n && c->queue[0].place) {
            finish(c->queue[0].place, true);
            if (c->to) c->to->happened = true;
        }
        c->n = 0;
        c->used = false;
        c->from = NULL;
    }
    n->n_posted = 0;
    n->alive = false;
}

void sim_hosts_net_free(struct world *w)
{
    for (int i = 0; i < CONNECTIONS; i++) free(w->connection[i].queue);
    for (int i = 0; i < w->n_nodes; i++) free(w->all[i]);
}

/* ---- the transport ---- */

static int net_open(const struct lg_transport_spec *spec, lg_transport **ret)
{
    lg_transport *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    t->node = spec->arg;
    *ret = t;
    return 0;
}

static void net_disconnect(lg_transport *t, int peer)
{
    struct connection *c = t->to[peer];
    may_die(t->node->w);
    t->to[peer] = NULL;
    if (!c) return;
    drop_all(c);
    c->used = false;
    c->from = NULL;
}

static void net_close(lg_transport **t)
{
    free(*t);
    *t = NULL;
}

/* The address is the number of a host's life. */
static int net_connect(lg_transport *t, int peer, const char *address, uint32_t port)
{
    struct world *w = t->node->w;
    struct life *of = w->life[atoi(address)];
    may_die(w);
    (void)port;
    for (int i = 0; i < CONNECTIONS; i++) {
        struct connection *c = &w->connection[i];
        if (c->used) continue;
        w->n_connections = LG_MAX(w->n_connections, i + 1);
        struct message *queue = c->queue ? c->queue : calloc(QUEUE, sizeof *queue);
        *c = (struct connection){.used = true,
                                 .from = t->node,
                                 .to = of->up ? of->node[t->node->rank] : NULL,
                                 .from_host = t->node->of->host,
                                 .to_host = of->host,
                                 .peer = peer,
                                 .silent = w->is_silent &&
                                           sim_hosts_random(w, 32) == 0, /* lost as it is made */
                                 .queue = queue};
        if (!c->to && of->up) c->failed = true; /* nobody listens */
        t->to[peer] = c;
        return 0;
    }
    return LG_FAIL(LG_ERR_NOSPACE, "no connection left");
}

static bool net_has_failed(lg_transport *t, int peer)
{
    return t->to[peer] && t->to[peer]->failed;
}

static void net_send(lg_transport *t, int peer, struct lg_transfer *m)
{
    struct connection *c = t->to[peer];
    may_die(t->node->w);
    if (c && c->silent) {
        finish(m, false);
        return;
    }
    if (!c || c->failed || c->n == QUEUE) {
        if (c && c->n == QUEUE) c->failed = true;
        finish(m, true);
        return;
    }
    struct message *q = &c->queue[c->n++];
    *q = (struct message){.tag = m->tag, .bytes = m->bytes, .sent = m};
    if (!(m->tag & LG_TAG_NOTE)) return;
    LG_ASSERT(m->bytes <= sizeof q->note);
    memcpy(q->note, m->data, m->bytes);
    q->sent = NULL;
    finish(m, false);
}

static void net_receive(lg_transport *t, struct lg_transfer *m)
{
    struct node *n = t->node;
    may_die(n->w);
    LG_ASSERT(n->n_posted < (int)LG_ARRAY_LEN(n->posted));
    n->posted[n->n_posted++] = m;
}

/* Of a message half of which has come the other half comes, or the place stays until all is cut off. */
static void net_cancel(lg_transport *t, struct lg_transfer *m)
{
    may_die(t->node->w);
    for (int i = 0; i < t->node->n_posted; i++) {
        if (t->node->posted[i] != m) continue;
        unpost(t->node, i);
        finish(m, true);
        return;
    }
}

static void net_cut_off(lg_transport *t)
{
    struct world *w = t->node->w;
    may_die(w);
    if (sim_hosts_is(w, SIM_HOSTS_NEVER_CUT_OFF)) return;
    for (int i = 0; i < w->n_connections; i++) {
        struct connection *c = &w->connection[i];
        if (!c->used || c->to != t->node) continue;
        drop_all(c);
        if (c->failed) continue;
        c->silent = w->is_silent && sim_hosts_random(w, 2);
        c->failed = !c->silent;
        if (c->from) c->from->happened = true;
    }
    while (t->node->n_half) finish(t->node->half[--t->node->n_half], true);
    t->node->happened = true;
}

static bool net_progress(lg_transport *t)
{
    const bool happened = t->node->happened;
    may_die(t->node->w);
    t->node->happened = false;
    return happened;
}

static int net_fd(lg_transport *t)
{
    (void)t;
    return -1;
}

static bool net_sleeps(lg_transport *t)
{
    (void)t;
    return true;
}

const struct lg_transport_kind sim_hosts_transport = {.name = "pretended",
                                                      .open = net_open,
                                                      .close = net_close,
                                                      .connect = net_connect,
                                                      .disconnect = net_disconnect,
                                                      .has_failed = net_has_failed,
                                                      .cut_off = net_cut_off,
                                                      .send = net_send,
                                                      .receive = net_receive,
                                                      .cancel = net_cancel,
                                                      .progress = net_progress,
                                                      .fd = net_fd,
                                                      .sleeps = net_sleeps};
