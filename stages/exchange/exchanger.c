/* An exchanger: epochs, connections and notes; exchanger.h has the protocol.
 *
 * What is known of a peer belongs to one life of its process and one session of its connection. When either changes, what
 * was under way between the two is given up and asked for again.
 *
 * A transport may never tell that a connection is lost, above all one that was cut off while it was being made; a note may be
 * lost, too. So all is said again every REPEAT_MS, and every note says which session of its reader's connection the writer
 * hears. A peer that is silent for SILENCE_MS is not heard any more, and what it has heard is not known. Whoever is
 * not heard for a while connects again; the while is doubled each time, for a peer that is only slow. */
#include "base/clock.h"
#include "base/philox.h"
#include "shm/commit.h"
#include "stages/exchange/exchanger_private.h"
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 250, PATIENCE_MOST_MS = 8000 };
enum { REPEAT_MS = 250, SILENCE_MS = 3000 };
enum { RETRY_MS = 20, CUT_OFF_MS = 30, STUCK_S = 3, MESSAGES_MAX = 1 << 16, SLICE_ALIGN = 16 };
enum { SLICES_OF_HOST = 8, SLICE_LEAST = 1 << 18 };
#define ID_BITS 47

uint64_t lg_exchanger_random(lg_exchanger *x)
{
    const lg_philox_out o = lg_philox(x->spec.life, LG_PURPOSE_NOISE, x->random++, 0);
    const uint64_t id = ((uint64_t)o.v[0] << 32 | o.v[1]) & ((UINT64_C(1) << ID_BITS) - 1);
    return id ? id : 1;
}

/* Elements of all slices but the last: several for each host, so that the last one to leave a rank is a small part of all, but
 * none so short that messages cost more than they carry, unless a host had none then. */
static size_t slice_of(size_t count, int hosts, size_t message_bytes)
{
    const size_t per = (count + (size_t)hosts - 1) / (size_t)hosts;
    size_t slice = LG_MIN(per, LG_MAX(per / SLICES_OF_HOST, (size_t)SLICE_LEAST));
    slice = (slice + SLICE_ALIGN - 1) / SLICE_ALIGN * SLICE_ALIGN;
    return LG_MAX(LG_MIN(slice, message_bytes / sizeof(float)), (size_t)1);
}

/* Of so many hosts, `host` adds slice host, host + hosts, .. */
static int slices_of(size_t slices, int host, int hosts)
{
    if (slices <= (size_t)host) return 0;
    const size_t n = (slices - (size_t)host - 1) / (size_t)hosts + 1;
    LG_ASSERT(n < MESSAGES_MAX);
    return (int)n;
}

static size_t slices(const lg_exchanger *x)
{
    return (x->spec.count + x->slice - 1) / x->slice;
}

int lg_exchanger_messages(const lg_exchanger *x, int host)
{
    return slices_of(slices(x), host, x->hosts);
}

struct lg_stretch lg_exchanger_message(const lg_exchanger *x, int host, int i)
{
    const size_t from_end = (size_t)host + (size_t)i * (size_t)x->hosts;
    const size_t first = (slices(x) - 1 - from_end) * x->slice;
    return (struct lg_stretch){.first = first,
                               .count = LG_MIN(x->slice, x->spec.count - first),
                               .at = (size_t)i * x->slice};
}

uint64_t lg_exchanger_state_pieces(const lg_exchanger *x, uint64_t state)
{
    const size_t bytes = x->spec.state_bytes(x->spec.arg, state);
    return (bytes + x->spec.message_bytes - 1) / x->spec.message_bytes;
}

struct lg_exchanger_state lg_exchanger_state_piece(const lg_exchanger *x, uint64_t state,
                                                   uint64_t i)
{
    const size_t at = (size_t)i * x->spec.message_bytes;
    const size_t bytes = x->spec.state_bytes(x->spec.arg, state);
    return (struct lg_exchanger_state){
        .state = state, .at = at, .bytes = LG_MIN(x->spec.message_bytes, bytes - at)};
}

/* ---- memory ---- */

static struct lg_transfer *new_transfers(int n)
{
    struct lg_transfer *m = calloc((size_t)LG_MAX(n, 1), sizeof *m);
    LG_ASSERT(m);
    return m;
}

static void open_peer(lg_exchanger *x, int h)
{
    struct lg_peer *p = &x->peer[h];
    const int n_own = lg_exchanger_messages(x, x->me), n_its = lg_exchanger_messages(x, h);
    if (h == x->me) return;
    const int questions[] = {n_own + 1, n_its, 1}, answers[] = {n_its + 1, n_own, 1};
    for (int k = 0; k < LG_ASK_KINDS; k++) {
        p->question[k].n = questions[k];
        p->question[k].message = new_transfers(questions[k]);
        p->answer[k].n = answers[k];
        p->answer[k].message = new_transfers(answers[k]);
    }
    p->parts = x->spec.parts + (size_t)(h > x->me ? h - 1 : h) * (size_t)n_own * x->slice;
    p->state = malloc(x->spec.message_bytes);
    LG_ASSERT(p->state);
}

size_t lg_exchanger_parts(size_t count, int hosts, size_t message_bytes)
{
    const size_t slice = slice_of(count, hosts, message_bytes);
    const int most = slices_of((count + slice - 1) / slice, 0, hosts);
    return (size_t)(hosts - 1) * (size_t)most * slice;
}

size_t lg_exchanger_bytes(int hosts, size_t message_bytes)
{
    return (size_t)(hosts - 1) * message_bytes;
}

int lg_exchanger_open(const struct lg_exchanger_spec *spec, lg_exchanger **ret)
{
    lg_exchanger *x = calloc(1, sizeof *x);
    LG_ASSERT(x && spec->life && spec->message_bytes % sizeof(float) == 0);
    const struct lg_board_hosts *b = &spec->board->s->hosts;
    *ret = x; /* half-built objects may be closed */
    x->spec = *spec;
    x->hosts = b->count;
    x->me = b->host;
    x->slice = slice_of(spec->count, x->hosts, spec->message_bytes);
    x->peer = calloc((size_t)x->hosts, sizeof *x->peer);
    LG_ASSERT(x->peer);
    for (int h = 0; h < x->hosts; h++) open_peer(x, h);
    return 0;
}

void lg_exchanger_close(lg_exchanger **ret)
{
    lg_exchanger *x = *ret;
    if (!x) return;
    if (x->transport) x->spec.transport->close(&x->transport);
    for (int h = 0; h < x->hosts; h++) {
        struct lg_peer *p = &x->peer[h];
        for (int k = 0; k < LG_ASK_KINDS; k++) {
            free(p->question[k].message);
            free(p->answer[k].message);
        }
        free(p->state);
    }
    free(x->peer);
    free(x);
    *ret = NULL;
}

/* ---- notes ---- */

static void receive_note(lg_exchanger *x, int i)
{
    x->in[i].transfer = (struct lg_transfer){
        .tag = LG_TAG_NOTE, .data = &x->in[i].note, .bytes = sizeof x->in[i].note, .posted = true};
    x->spec.transport->receive(x->transport, &x->in[i].transfer);
}

bool lg_exchanger_send_note(lg_exchanger *x, int peer, const struct lg_note *note)
{
    struct lg_peer *p = &x->peer[peer];
    if (!p->connected) return false;
    for (int i = 0; i < LG_NOTES; i++) {
        struct lg_transfer *m = &x->out[i].transfer;
        if (!lg_transfer_is_free(m)) continue;
        struct lg_note *n = &x->out[i].note;
        *n = *note;
        n->magic = LG_NOTE_MAGIC;
        n->epoch = x->epoch;
        n->host = (uint32_t)x->me;
        n->rank = (uint32_t)x->spec.rank;
        n->life = x->spec.life;
        n->session = p->my_session;
        n->hears = p->session;
        *m =
            (struct lg_transfer){.tag = LG_TAG_NOTE, .data = n, .bytes = sizeof *n, .posted = true};
        x->out[i].peer = peer;
        x->spec.transport->send(x->transport, peer, m);
        return true;
    }
    return false;
}

/* ---- connections ---- */

static void say_again(lg_exchanger *x, int h)
{
    struct lg_peer *p = &x->peer[h];
    for (int k = 0; k < LG_ASK_KINDS; k++) p->question[k].sent = false;
    p->card_sent = 0;
    p->repeat_ns = x->spec.now() + REPEAT_MS * LG_MS_NS;
}

static void disconnect(lg_exchanger *x, int h)
{
    struct lg_peer *p = &x->peer[h];
    x->spec.transport->disconnect(x->transport, h);
    p->connected = p->greeted = p->is_heard = false;
    lg_exchanger_drop_answers(x, h); /* it asks again when it sees another session */
    say_again(x, h);
}

/* Is a note to it under way? Those to a host that takes none must not fill the places of all others'. */
static bool is_telling(const lg_exchanger *x, int h)
{
    for (int i = 0; i < LG_NOTES; i++)
        if (x->out[i].peer == h && !lg_transfer_is_free(&x->out[i].transfer)) return true;
    return false;
}

static bool keep_connected(lg_exchanger *x, int h)
{
    struct lg_peer *p = &x->peer[h];
    const struct lg_host_member *at = &x->record.member[h];
    const int64_t now = x->spec.now();
    if (p->connected && x->spec.transport->has_failed(x->transport, h)) {
        disconnect(x, h);
        p->retry_ns = now + RETRY_MS * LG_MS_NS;
    }
    if (p->connected && !p->is_heard && now - p->connected_ns > p->patience_ms * LG_MS_NS) {
        p->patience_ms = LG_MIN(2 * p->patience_ms, PATIENCE_MOST_MS);
        disconnect(x, h);
    }
    if (!p->connected && now >= p->retry_ns) {
        p->retry_ns = now + RETRY_MS * LG_MS_NS;
        if (x->spec.transport->connect(x->transport, h, at->address,
                                       at->port + (uint32_t)x->spec.rank) < 0) {
            lg_err_clear();
            return false;
        }
        p->connected = true;
        p->connected_ns = now;
        if (!p->patience_ms) p->patience_ms = PATIENCE_MS;
        p->my_session = lg_exchanger_random(x);
    }
    if (p->session && now - p->heard_ns > SILENCE_MS * LG_MS_NS) {
        p->session = 0;
        p->is_heard = false;
        p->connected_ns = now;
    }
    if (p->connected && now >= p->repeat_ns && !is_telling(x, h)) {
        p->greeted = false;
        say_again(x, h);
    }
    if (!p->connected || p->greeted) return false;
    p->greeted = lg_exchanger_send_note(x, h, &(struct lg_note){.kind = LG_NOTE_HELLO});
    return p->greeted;
}

static void heard(lg_exchanger *x, int h, const struct lg_note *n)
{
    struct lg_peer *p = &x->peer[h];
    p->heard_ns = x->spec.now();
    if (p->life == n->life && p->session == n->session) return;
    const bool is_first = !p->life, is_same = p->life == n->life;
    p->life = n->life;
    p->session = n->session;
    p->greeted = false; /* it is told that it is heard */
    if (is_first) { /* what was said before may have come to a former process, or to one in another epoch */
        say_again(x, h);
        return;
    }
    if (!is_same) disconnect(x, h);
    lg_exchanger_ask_again(x, h);
}

/* Does it hear what we say? */
static void hears(lg_exchanger *x, int h, uint64_t session)
{
    struct lg_peer *p = &x->peer[h];
    const bool was_heard = p->is_heard;
    if (!p->connected) return;
    p->is_heard = session == p->my_session;
    if (p->is_heard)
        p->patience_ms = PATIENCE_MS;
    else if (was_heard)
        disconnect(x, h);
}

static void read_note(lg_exchanger *x, const struct lg_note *n)
{
    if (n->magic != LG_NOTE_MAGIC || n->epoch != x->epoch || !x->epoch) return;
    if (n->host >= (uint32_t)x->hosts || (int)n->host == x->me) return;
    if (n->rank != (uint32_t)x->spec.rank || !x->peer[n->host].is_member || !n->life) return;
    heard(x, (int)n->host, n);
    hears(x, (int)n->host, n->hears);
    if (n->kind == LG_NOTE_CARD) lg_hosts_hear(x->spec.board, (int)n->host, n->epoch, &n->of.said);
    if (n->kind == LG_NOTE_ASK) lg_exchanger_asked(x, (int)n->host, &n->of.ask);
}

/* In the order in which they have come, for the later of two counts. */
static int take_notes(lg_exchanger *x)
{
    int done = 0;
    for (int n = 0; n < LG_NOTES && x->in[x->next_note].transfer.done; n++) {
        const int i = x->next_note;
        x->next_note = (i + 1) % LG_NOTES;
        const bool failed = x->in[i].transfer.failed;
        const struct lg_note note = x->in[i].note;
        receive_note(x, i);
        if (failed) continue;
        read_note(x, &note);
        done = 1;
    }
    return done;
}

/* Exchange 0 speaks for the host. */
static int tell(lg_exchanger *x)
{
    struct lg_host_said now;
    int done = 0;
    if (x->spec.rank != 0 || !lg_hosts_say(x->spec.board, x->epoch, &now)) return 0;
    if (!x->card || memcmp(&now, &x->said, sizeof now) != 0) {
        x->said = now;
        x->card++;
        lg_hosts_hear(x->spec.board, x->me, x->epoch, &now);
        done = 1;
    }
    for (int h = 0; h < x->hosts; h++) {
        struct lg_peer *p = &x->peer[h];
        if (!p->is_member || h == x->me || p->card_sent == x->card || !p->greeted) continue;
        if (!lg_exchanger_send_note(x, h,
                                    &(struct lg_note){.kind = LG_NOTE_CARD, .of.said = x->said}))
            continue;
        p->card_sent = x->card;
        done = 1;
    }
    return done;
}

/* ---- epochs ---- */

static bool all_are_free(const lg_exchanger *x)
{
    for (int h = 0; h < x->hosts; h++) {
        const struct lg_peer *p = &x->peer[h];
        if (!lg_exchanger_is_free(x, h)) return false;
        for (int k = 0; k < LG_ASK_KINDS; k++)
            for (int i = 0; i < p->answer[k].n; i++)
                if (!lg_transfer_is_free(&p->answer[k].message[i])) return false;
    }
    return true;
}

static void leave(lg_exchanger *x)
{
    for (int h = 0; h < x->hosts; h++) {
        struct lg_peer *p = &x->peer[h];
        if (p->connected) disconnect(x, h);
        lg_exchanger_drop_questions(x, h);
        p->is_member = false;
        p->life = p->session = 0;
        p->retry_ns = 0;
        p->patience_ms = 0;
    }
    x->epoch = 0;
    x->card = 0;
    x->taking = LG_MARK_NONE;
    x->fetched_to = 0;
}

/* The address to listen at is told by the first epoch. */
static int listen_at(lg_exchanger *x, const struct lg_hosts_record *r)
{
    if (x->transport) return 0;
    LG_TRY(x->spec.transport->open(
        &(struct lg_transport_spec){.hosts = x->hosts,
                                    .host = x->me,
                                    .address = r->member[x->me].address,
                                    .port = r->member[x->me].port + (uint32_t)x->spec.rank,
                                    .interface = x->spec.interface,
                                    .arg = x->spec.transport_arg},
        &x->transport));
    for (int i = 0; i < LG_NOTES; i++) receive_note(x, i);
    return 0;
}

static int enter(lg_exchanger *x, const struct lg_hosts_record *r)
{
    LG_TRY(listen_at(x, r));
    x->record = *r;
    x->epoch = r->number;
    for (int h = 0; h < x->hosts; h++) x->peer[h].is_member = r->members >> h & 1;
    lg_exchange_mark_entered(x->spec.board, x->spec.rank, x->epoch);
    return 1;
}

/* 1: in the present epoch. */
static int follow_epoch(lg_exchanger *x)
{
    struct lg_hosts_record now;
    const uint64_t epoch = lg_hosts_epoch(x->spec.board, &now);
    if (epoch == x->epoch) return epoch != 0;
    if (x->epoch) leave(x);
    if (!all_are_free(x)) return 0;
    return epoch ? enter(x, &now) : 0;
}

/* What has begun to come from a host that is gone never ends by itself. */
static int watch_places(lg_exchanger *x, bool free)
{
    const int64_t now = x->spec.now();
    if (free) {
        x->stuck_ns = 0;
        x->has_cut_off = false;
        return 0;
    }
    if (!x->stuck_ns) x->stuck_ns = now;
    if (!x->has_cut_off && now - x->stuck_ns > CUT_OFF_MS * LG_MS_NS) {
        x->has_cut_off = true;
        x->spec.transport->cut_off(x->transport);
    }
    if (now - x->stuck_ns > STUCK_S * LG_S_NS)
        return LG_FAIL(LG_ERR_TIMEOUT,
                       "the transport %s does not give back what was to be received from a host "
                       "that is gone: this process begins anew",
                       x->spec.transport->name);
    return 0;
}

int lg_exchanger_step(lg_exchanger *x, const char **ret_why)
{
    *ret_why = "an epoch of the hosts";
    int done = x->transport && x->spec.transport->progress(x->transport);
    const int in = follow_epoch(x);
    LG_TRY(in);
    bool free = in || all_are_free(x);
    if (!in) {
        LG_TRY(watch_places(x, free));
        return done;
    }
    done |= take_notes(x);
    for (int h = 0; h < x->hosts; h++) {
        if (!x->peer[h].is_member || h == x->me) continue;
        done |= keep_connected(x, h);
        free &= lg_exchanger_is_free(x, h);
    }
    LG_TRY(watch_places(x, free));
    done |= tell(x);
    const int took = lg_exchanger_take(x, ret_why);
    LG_TRY(took);
    const int answered = lg_exchanger_answer(x);
    LG_TRY(answered);
    if (took) done |= tell(x);
    return done | took | answered;
}

void lg_exchanger_end(lg_exchanger *x, int ms)
{
    const int64_t end = x->spec.now() + ms * LG_MS_NS;
    bool sent = !x->epoch;
    while (!sent && x->spec.now() < end) {
        tell(x);
        x->spec.transport->progress(x->transport);
        sent = true;
        for (int i = 0; i < LG_NOTES; i++) sent &= lg_transfer_is_free(&x->out[i].transfer);
        for (int h = 0; h < x->hosts; h++) {
            const struct lg_peer *p = &x->peer[h];
            sent &= x->spec.rank != 0 || !p->greeted || p->card_sent == x->card;
        }
    }
}

bool lg_exchanger_sleeps(lg_exchanger *x)
{
    return !x->transport || x->spec.transport->sleeps(x->transport);
}

int lg_exchanger_fd(lg_exchanger *x)
{
    return x->transport ? x->spec.transport->fd(x->transport) : -1;
}
