/* The transport over NCCL: what lies on a device goes by links (kernels/link.h), from GPU to GPU; all else, and what two
 * processes must say of their links, by the transport over UCX, on which this one is built.
 *
 * A link goes one way and has no tags. So who sends says by a note, for each message, which comes next; both notes and
 * links keep their order, and the other side gives its link the place that was posted for that tag.
 *
 *   sender   --OPEN session, id-->            receiver opens the other end, and closes the one that it had
 *            --NEXT session, tag, bytes-->    gives its end the place of that tag
 *            ==message by the link==>
 *            <--BROKEN session--              it has closed its end: the connection has failed
 *
 * A connection's link begins with its first message. It lives as long as the connection at most, and no longer than all goes
 * well: when a message comes for which no place was posted, when a place is cancelled that the link has, or when
 * either end fails, the link is closed, what was under way counts as failed, and the connection is made anew. NCCL cannot
 * go on after a death, but with a link for each pair and direction it need not be agreed on by anybody.
 *
 * NCCL never says by itself that the other side is gone; nor is it asked (exchanger.h). */
#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/link.h"
#include "stages/exchange/transport.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NOTES = 64, EXPECTED = 4 * LG_LINK_DEPTH, NAP_NS = 50000 };
#define NOTE_TAG (LG_TAG_NOTE | LG_TAG_INNER)

enum note_kind { NOTE_OPEN = 1, NOTE_NEXT, NOTE_BROKEN };

struct note {
    uint32_t kind, from; /* host */
    uint64_t session;    /* of the sender's connection */
    union {
        struct lg_link_id id;
        struct {
            uint64_t tag, bytes;
        } next;
    } of;
};

/* Messages in order. */
struct queue {
    struct lg_transfer **m;
    size_t first, n, room;
};

/* What goes to a host, by the connection that was made to it. */
struct outlet {
    bool connected, failed;
    uint64_t session; /* 0: no link yet */
    lg_link *link;
    uint64_t taken;     /* messages of the link's that were found done */
    struct queue queue; /* the first `given` of them are with the link */
    size_t given;
};

/* And what comes from it. */
struct inlet {
    uint64_t session; /* 0: none, or closed */
    lg_link *link;
    uint64_t taken;  /* as above */
    uint64_t broken; /* session that is to be told broken; 0: none */
    struct {
        uint64_t tag, bytes;
    } expected[EXPECTED]; /* said, but not given to the link; a ring */
    size_t first, n;
    struct queue queue; /* with the link */
};

struct lg_transport {
    lg_transport *inner;
    lg_device *device;
    int hosts, host;
    uint64_t sessions;
    struct outlet *out;  /* (hosts) */
    struct inlet *in;    /* (hosts) */
    struct queue posted; /* places that no message was said for */
    struct {
        struct note note;
        struct lg_transfer transfer;
    } sent[NOTES], heard[NOTES];
    int next_heard;
    bool happened;
};

static const struct lg_transport_kind *const g_inner = &lg_transport_ucx;

/* ---- messages ---- */

static void push(struct queue *q, struct lg_transfer *m)
{
    if (q->first && q->first + q->n == q->room) {
        memmove(q->m, q->m + q->first, q->n * sizeof(struct lg_transfer *));
        q->first = 0;
    }
    if (q->n == q->room) {
        q->room = LG_MAX(2 * q->room, (size_t)64);
        q->m = realloc(q->m, q->room * sizeof *q->m);
        LG_ASSERT(q->m);
    }
    q->m[q->first + q->n++] = m;
}

static struct lg_transfer *at(const struct queue *q, size_t i)
{
    return q->m[q->first + i];
}

static void pop(struct queue *q)
{
    q->first++;
    q->n--;
}

/* The order of the others stays. */
static void remove_at(struct queue *q, size_t i)
{
    struct lg_transfer **m = q->m + q->first;
    memmove(m + i, m + i + 1, (q->n - i - 1) * sizeof *m);
    q->n--;
}

static void finish(lg_transport *t, struct lg_transfer *m, bool failed)
{
    m->failed = failed;
    m->done = true;
    t->happened = true;
}

static void fail_all(lg_transport *t, struct queue *q)
{
    for (; q->n; pop(q)) finish(t, at(q, 0), true);
}

/* ---- notes ---- */

static bool say(lg_transport *t, int peer, const struct note *note)
{
    for (int i = 0; i < NOTES; i++) {
        struct lg_transfer *m = &t->sent[i].transfer;
        if (m->posted && !m->done) continue;
        t->sent[i].note = *note;
        t->sent[i].note.from = (uint32_t)t->host;
        *m = (struct lg_transfer){
            .tag = NOTE_TAG, .data = &t->sent[i].note, .bytes = sizeof *note, .posted = true};
        g_inner->send(t->inner, peer, m);
        return true;
    }
    return false;
}

static void hear(lg_transport *t, int i)
{
    t->heard[i].transfer = (struct lg_transfer){.tag = NOTE_TAG,
                                                .data = &t->heard[i].note,
                                                .bytes = sizeof t->heard[i].note,
                                                .posted = true};
    g_inner->receive(t->inner, &t->heard[i].transfer);
}

/* ---- what comes ---- */

static void close_inlet(lg_transport *t, int host, bool tell)
{
    struct inlet *in = &t->in[host];
    if (tell && in->session) in->broken = in->session;
    lg_link_close(&in->link);
    in->session = 0;
    in->n = 0;
    fail_all(t, &in->queue);
}

static void open_inlet(lg_transport *t, const struct note *n)
{
    const int host = (int)n->from;
    struct inlet *in = &t->in[host];
    close_inlet(t, host, false);
    in->session = n->session;
    in->broken = in->taken = 0;
    if (lg_link_open(t->device, &n->of.id, false, &in->link) == 0) return;
    lg_log(LG_WARN, "a link from host %d: %s", host, lg_err_message());
    lg_err_clear();
    close_inlet(t, host, true);
}

static void expect(lg_transport *t, const struct note *n)
{
    struct inlet *in = &t->in[n->from];
    if (!in->session || in->session != n->session) return;
    if (in->n == EXPECTED) { /* no sender is so far ahead */
        close_inlet(t, (int)n->from, true);
        return;
    }
    const size_t i = (in->first + in->n++) % EXPECTED;
    in->expected[i].tag = n->of.next.tag;
    in->expected[i].bytes = n->of.next.bytes;
}

static void break_outlet(lg_transport *t, const struct note *n)
{
    struct outlet *out = &t->out[n->from];
    if (out->session && out->session == n->session) out->failed = true;
}

static void read_notes(lg_transport *t)
{
    for (int n = 0; n < NOTES && t->heard[t->next_heard].transfer.done; n++) {
        const int i = t->next_heard;
        const bool failed = t->heard[i].transfer.failed;
        const struct note note = t->heard[i].note;
        t->next_heard = (i + 1) % NOTES;
        hear(t, i);
        if (failed || note.from >= (uint32_t)t->hosts || (int)note.from == t->host) continue;
        if (note.kind == NOTE_OPEN) open_inlet(t, &note);
        if (note.kind == NOTE_NEXT) expect(t, &note);
        if (note.kind == NOTE_BROKEN) break_outlet(t, &note);
    }
}

/* The place for the next message that was said, out of those that were posted; NULL: there is none. */
static struct lg_transfer *take_place(lg_transport *t, uint64_t tag, uint64_t bytes)
{
    for (size_t i = 0; i < t->posted.n; i++) {
        struct lg_transfer *m = at(&t->posted, i);
        if (m->tag != tag || m->bytes != bytes) continue;
        remove_at(&t->posted, i);
        return m;
    }
    return NULL;
}

static void give_places(lg_transport *t, int host)
{
    struct inlet *in = &t->in[host];
    while (in->link && in->n && in->queue.n < LG_LINK_DEPTH) {
        struct lg_transfer *m =
            take_place(t, in->expected[in->first].tag, in->expected[in->first].bytes);
        if (!m) {
            close_inlet(t, host, true);
            return;
        }
        in->first = (in->first + 1) % EXPECTED;
        in->n--;
        push(&in->queue, m);
        lg_link_give(in->link, m->data, m->bytes);
    }
}

/* Those with the link that are done leave the queue; -1: it has failed. */
static int take_done(lg_transport *t, lg_link *link, struct queue *q, uint64_t *taken)
{
    uint64_t done;
    const int rc = lg_link_progress(link, &done);
    const int n = (int)(done - *taken);
    for (; *taken < done; (*taken)++, pop(q)) finish(t, at(q, 0), false);
    if (rc == 0) return n;
    lg_log(LG_WARN, "a link to another host: %s", lg_err_message());
    lg_err_clear();
    return -1;
}

static void progress_inlet(lg_transport *t, int host)
{
    struct inlet *in = &t->in[host];
    struct outlet *back = &t->out[host];
    give_places(t, host);
    if (in->link && take_done(t, in->link, &in->queue, &in->taken) < 0) close_inlet(t, host, true);
    if (in->broken && back->connected &&
        say(t, host, &(struct note){.kind = NOTE_BROKEN, .session = in->broken}))
        in->broken = 0;
}

/* ---- what goes ---- */

static void close_outlet(lg_transport *t, int host)
{
    struct outlet *out = &t->out[host];
    lg_link_close(&out->link);
    out->session = 0;
    out->given = 0;
    fail_all(t, &out->queue);
}

static int begin_link(lg_transport *t, int host)
{
    struct outlet *out = &t->out[host];
    struct note note = {.kind = NOTE_OPEN, .session = ++t->sessions};
    LG_TRY(lg_link_new_id(t->device, &note.of.id));
    LG_TRY(lg_link_open(t->device, &note.of.id, true, &out->link));
    out->session = note.session;
    out->taken = 0;
    if (!say(t, host, &note)) out->failed = true;
    return 0;
}

static bool say_next(lg_transport *t, int host, const struct lg_transfer *m)
{
    struct note note = {.kind = NOTE_NEXT, .session = t->out[host].session};
    note.of.next.tag = m->tag;
    note.of.next.bytes = m->bytes;
    return say(t, host, &note);
}

static void progress_outlet(lg_transport *t, int host)
{
    struct outlet *out = &t->out[host];
    if (out->failed || !out->queue.n) return;
    if (!out->link && begin_link(t, host) < 0) {
        lg_log(LG_WARN, "no link to host %d: %s", host, lg_err_message());
        lg_err_clear();
        out->failed = true;
    }
    while (!out->failed && out->given < out->queue.n && out->given < LG_LINK_DEPTH &&
           say_next(t, host, at(&out->queue, out->given))) {
        const struct lg_transfer *m = at(&out->queue, out->given++);
        lg_link_give(out->link, m->data, m->bytes);
    }
    if (out->failed) return;
    const int n = take_done(t, out->link, &out->queue, &out->taken);
    if (n < 0)
        out->failed = true;
    else
        out->given -= (size_t)n;
}

/* ---- the row ---- */

static void nccl_close(lg_transport **ret)
{
    lg_transport *t = *ret;
    if (!t) return;
    for (int h = 0; h < t->hosts; h++) {
        close_outlet(t, h);
        close_inlet(t, h, false);
        free(t->out[h].queue.m);
        free(t->in[h].queue.m);
    }
    if (t->inner) g_inner->close(&t->inner);
    fail_all(t, &t->posted);
    free(t->posted.m);
    free(t->out);
    free(t->in);
    free(t);
    *ret = NULL;
}

static int nccl_open(const struct lg_transport_spec *spec, lg_transport **ret)
{
    struct lg_link_id id;
    lg_device *device = spec->arg;
    if (spec->interface && spec->interface[0]) setenv("NCCL_SOCKET_IFNAME", spec->interface, 0);
    LG_TRY(lg_link_new_id(device, &id)); /* is there what carries links? */
    lg_transport *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    *t = (lg_transport){.device = device, .hosts = spec->hosts, .host = spec->host};
    t->out = calloc((size_t)t->hosts, sizeof *t->out);
    t->in = calloc((size_t)t->hosts, sizeof *t->in);
    LG_ASSERT(t->out && t->in);
    const int rc = g_inner->open(spec, &t->inner);
    if (rc < 0) {
        nccl_close(&t);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    t->sessions = (uint64_t)lg_now_ns(); /* another one than in a former life */
    for (int i = 0; i < NOTES; i++) hear(t, i);
    *ret = t;
    return 0;
}

static int nccl_connect(lg_transport *t, int peer, const char *address, uint32_t port)
{
    LG_TRY(g_inner->connect(t->inner, peer, address, port));
    t->out[peer].connected = true;
    return 0;
}

static void nccl_disconnect(lg_transport *t, int peer)
{
    g_inner->disconnect(t->inner, peer);
    close_outlet(t, peer);
    t->out[peer].connected = t->out[peer].failed = false;
}

static void nccl_cut_off(lg_transport *t)
{
    g_inner->cut_off(t->inner);
    for (int h = 0; h < t->hosts; h++) close_inlet(t, h, true);
}

static bool nccl_has_failed(lg_transport *t, int peer)
{
    return t->out[peer].failed || g_inner->has_failed(t->inner, peer);
}

static void nccl_send(lg_transport *t, int peer, struct lg_transfer *m)
{
    if (!m->on_device) {
        g_inner->send(t->inner, peer, m);
        return;
    }
    if (!t->out[peer].connected || t->out[peer].failed) {
        finish(t, m, true);
        return;
    }
    push(&t->out[peer].queue, m);
    progress_outlet(t, peer);
}

static void nccl_receive(lg_transport *t, struct lg_transfer *m)
{
    if (m->on_device)
        push(&t->posted, m);
    else
        g_inner->receive(t->inner, m);
}

static bool holds(const struct queue *q, const struct lg_transfer *m)
{
    for (size_t i = 0; i < q->n; i++)
        if (at(q, i) == m) return true;
    return false;
}

static void nccl_cancel(lg_transport *t, struct lg_transfer *m)
{
    if (m->done) return;
    if (!m->on_device) {
        g_inner->cancel(t->inner, m);
        return;
    }
    for (size_t i = 0; i < t->posted.n; i++) {
        if (at(&t->posted, i) != m) continue;
        remove_at(&t->posted, i);
        finish(t, m, true);
        return;
    }
    for (int h = 0; h < t->hosts; h++)
        if (holds(&t->in[h].queue, m)) close_inlet(t, h, true);
}

/* A link wakes nobody. */
static bool is_busy(const lg_transport *t)
{
    for (int h = 0; h < t->hosts; h++)
        if (t->out[h].queue.n || t->in[h].queue.n || t->in[h].n || t->in[h].broken) return true;
    return false;
}

/* Whoever computes on this core is let through, while a message of milliseconds is on its way. */
static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}

static bool nccl_progress(lg_transport *t)
{
    bool happened = g_inner->progress(t->inner);
    read_notes(t);
    for (int h = 0; h < t->hosts; h++) {
        progress_inlet(t, h);
        progress_outlet(t, h);
    }
    happened |= t->happened;
    t->happened = false;
    if (!happened && is_busy(t)) nap();
    return happened;
}

static int nccl_fd(lg_transport *t)
{
    return g_inner->fd(t->inner);
}

static bool nccl_sleeps(lg_transport *t)
{
    return !is_busy(t) && g_inner->sleeps(t->inner);
}

const struct lg_transport_kind lg_transport_nccl = {.name = "nccl",
                                                    .open = nccl_open,
                                                    .close = nccl_close,
                                                    .connect = nccl_connect,
                                                    .disconnect = nccl_disconnect,
                                                    .has_failed = nccl_has_failed,
                                                    .cut_off = nccl_cut_off,
                                                    .send = nccl_send,
                                                    .receive = nccl_receive,
                                                    .cancel = nccl_cancel,
                                                    .progress = nccl_progress,
                                                    .fd = nccl_fd,
                                                    .sleeps = nccl_sleeps};
