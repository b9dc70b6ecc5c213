/* Asking other hosts; see elsewhere.h. */
#include "supervisor/commands/elsewhere.h"
#include "base/clock.h"
#include "base/fs.h"
#include "config/config.h"
#include "shm/board.h"
#include "supervisor/run/run.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUIET_MS = 300,          /* for one that this host's lgsup does not hear */
    UNDER_WAY_MS_MAX = 5000, /* between two words about an order */
    POLL_MS = 10
};

struct lg_asking {
    struct lg_question q;
    bool waits, sent;
    int64_t since_ns; /* of the question, or the last word about an order */
};

/* ---- what is known here ---- */

void lg_elsewhere_look(lg_elsewhere *e)
{
    static struct lg_hosts_record r;
    char path[LG_PATH_BYTES];
    lg_board *b = NULL;
    for (int i = 0; i < e->count; i++) e->machine[i].host = i; /* as they begin */
    if (lg_path(path, "%s/board", e->dir) < 0 || lg_board_open(path, 0, &b) < 0) {
        lg_err_clear();
        return;
    }
    const int64_t now_ns = lg_now_ns();
    const bool current = lg_hosts_epoch(b, &r) != 0;
    for (int i = 0; i < e->n; i++) {
        struct lg_machine *m = &e->machine[i];
        const int64_t heard_ns = atomic_load(&b->s->hosts.heard_ns[i]);
        if (heard_ns > 0 && heard_ns <= now_ns) m->silent_ms = (now_ns - heard_ns) / LG_MS_NS;
        if (current) m->host = -1;
    }
    for (int h = 0; h < e->count && current; h++) {
        const uint32_t place = r.member[h].place;
        if (!(r.members >> h & 1) || place >= (uint32_t)e->n) continue;
        e->machine[place].host = h;
        e->machine[place].leads = h == r.leader;
    }
    lg_board_close(&b);
}

static int choose(lg_elsewhere *e, const char *host)
{
    char *end;
    if (!host) {
        for (int i = 0; i < e->n; i++) e->machine[i].wanted = true;
        return 0;
    }
    const long h = strtol(host, &end, 10);
    if (end == host || *end || h < 0 || h >= e->count)
        return LG_FAIL(LG_ERR_USAGE, "--host %s: the run has hosts 0 to %d", host, e->count - 1);
    for (int i = 0; i < e->n; i++) {
        e->machine[i].wanted = e->machine[i].host == h;
        if (e->machine[i].wanted) return 0;
    }
    return LG_FAIL(LG_ERR_NOTFOUND, "host %ld is missing: no machine has taken its number", h);
}

static int read_lineage(const char *dir, uint64_t *ret)
{
    char path[LG_PATH_BYTES], line[32], *end;
    LG_TRY(lg_path(path, "%s/lineage", dir));
    LG_TRY(lg_read_line(path, line, sizeof line));
    *ret = strtoull(line, &end, 16);
    if (end == line || *end) return LG_FAIL(LG_ERR_CORRUPT, "%s is no lineage", path);
    return 0;
}

static int open_channel(lg_elsewhere *e, const lg_config *c, struct lg_host_places *places)
{
    struct lg_channel_spec spec = {.place = places->own,
                                   .places = places->n,
                                   .port = (int)c->hosts_port,
                                   .address = places->address,
                                   .silence_ms = (int)c->hosts_silence_ms};
    LG_TRY(lg_cluster_key_load(c->hosts_key, &spec.key));
    const int rc = lg_channel_open_asker(&spec, &e->channel);
    explicit_bzero(&spec.key, sizeof spec.key);
    LG_TRY(rc);
    return 0;
}

static int open_all(lg_elsewhere *e, const char *dir, const char *host, const lg_config *c)
{
    struct lg_host_places places;
    LG_TRY(lg_host_places_find(c, &places));
    e->n = places.n;
    e->own = places.own;
    e->count = LG_MIN((int)c->hosts_count, places.n);
    e->asking = calloc((size_t)e->n, sizeof *e->asking);
    e->buffer = malloc(LG_ANSWER_BYTES_MAX);
    if (!e->asking || !e->buffer) return LG_FAIL(LG_ERR_NOSPACE, "no memory for questions");
    for (int i = 0; i < e->n; i++) {
        struct lg_machine *m = &e->machine[i];
        *m = (struct lg_machine){.place = i, .host = -1, .own = i == e->own, .silent_ms = -1};
        memcpy(m->address, places.address[i], sizeof m->address);
    }
    LG_TRY(lg_path(e->dir, "%s", dir));
    lg_elsewhere_look(e);
    LG_TRY(choose(e, host));
    LG_TRY(read_lineage(dir, &e->lineage));
    LG_TRY(open_channel(e, c, &places));
    return 0;
}

static int open_run(const char *dir, const char *host, const lg_config *c, lg_elsewhere **ret)
{
    if (c->hosts_count == 1) {
        if (host && strcmp(host, "0") != 0)
            return LG_FAIL(LG_ERR_USAGE, "--host %s: the run in %s has one host", host, dir);
        return 0;
    }
    lg_elsewhere *e = calloc(1, sizeof *e);
    if (!e) return LG_FAIL(LG_ERR_NOSPACE, "no memory for questions");
    const int rc = open_all(e, dir, host, c);
    if (rc < 0) {
        lg_elsewhere_close(&e);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = e;
    return 0;
}

int lg_elsewhere_open(const char *dir, const char *host, lg_elsewhere **ret)
{
    char path[LG_PATH_BYTES];
    lg_config *c = NULL;
    *ret = NULL;
    LG_TRY(lg_path(path, "%s/config.toml", dir));
    if (!lg_path_exists(path)) return 0; /* whoever reads the run says it */
    LG_TRY(lg_config_load(path, NULL, 0, &c));
    const int rc = open_run(dir, host, c, ret);
    lg_config_free(&c);
    LG_TRY(rc);
    return 0;
}

void lg_elsewhere_close(lg_elsewhere **pe)
{
    lg_elsewhere *e = *pe;
    *pe = NULL;
    if (!e) return;
    for (int i = 0; i < e->n; i++) free(e->machine[i].text);
    lg_channel_close(&e->channel);
    free(e->asking);
    free(e->buffer);
    free(e);
}

/* ---- questions ---- */

void lg_elsewhere_put(lg_elsewhere *e, int i, const struct lg_question *q)
{
    struct lg_machine *m = &e->machine[i];
    struct lg_asking *a = &e->asking[i];
    LG_ASSERT(i != e->own);
    a->q = *q;
    a->q.magic = LG_QUESTION_MAGIC;
    a->q.layout = lg_layout_hash();
    a->q.lineage = e->lineage;
    a->q.id = ++e->last_id;
    a->waits = true;
    a->sent = false;
    free(m->text);
    m->text = NULL;
    m->answered = m->under_way = m->more = false;
    m->code = 0;
    m->bytes = 0;
}

void lg_elsewhere_put_all(lg_elsewhere *e, const struct lg_question *q)
{
    lg_elsewhere_look(e);
    for (int i = 0; i < e->n; i++)
        if (i != e->own && e->machine[i].wanted) lg_elsewhere_put(e, i, q);
}

/* False: it is no answer to what was asked last. */
static bool take(lg_elsewhere *e, int i, size_t bytes)
{
    struct lg_machine *m = &e->machine[i];
    struct lg_asking *a = &e->asking[i];
    struct lg_answer h;
    if (bytes < sizeof h) return false;
    memcpy(&h, e->buffer, sizeof h);
    if (h.magic != LG_ANSWER_MAGIC || h.id != a->q.id || h.place != i ||
        h.bytes != bytes - sizeof h || h.code > 0 || h.host >= e->count)
        return false;
    m->answered = true;
    m->under_way = h.under_way != 0;
    m->more = h.more != 0;
    m->phase = h.phase;
    m->host = LG_MAX(h.host, -1);
    m->leads = h.leads != 0;
    m->code = h.code;
    a->since_ns = lg_now_ns();
    a->waits = m->under_way;
    free(m->text);
    m->text = malloc(h.bytes + 1);
    LG_ASSERT(m->text);
    memcpy(m->text, e->buffer + sizeof h, h.bytes);
    m->text[h.bytes] = 0;
    m->bytes = h.bytes;
    return true;
}

static int64_t limit_ns(const lg_elsewhere *e, int i, int limit_ms)
{
    const struct lg_machine *m = &e->machine[i];
    if (m->under_way) return UNDER_WAY_MS_MAX * LG_MS_NS;
    return (m->silent_ms > QUIET_MS ? LG_MIN(QUIET_MS, limit_ms) : limit_ms) * LG_MS_NS;
}

static bool turn(lg_elsewhere *e, int limit_ms)
{
    bool waits = false;
    for (int i = 0; i < e->n; i++) {
        struct lg_asking *a = &e->asking[i];
        if (!a->waits) continue;
        if (!a->sent) a->sent = lg_channel_send(e->channel, i, &a->q, sizeof a->q);
        for (size_t n; (n = lg_channel_take(e->channel, i, e->buffer, LG_ANSWER_BYTES_MAX)) > 0;)
            take(e, i, n);
        if (lg_now_ns() - a->since_ns > limit_ns(e, i, limit_ms)) a->waits = false;
        waits |= a->waits;
    }
    return waits;
}

void lg_elsewhere_wait(lg_elsewhere *e, int limit_ms)
{
    const int64_t now_ns = lg_now_ns();
    for (int i = 0; i < e->n; i++) e->asking[i].since_ns = now_ns;
    while (turn(e, limit_ms)) lg_channel_wait_for_answers(e->channel, POLL_MS);
}

/* ---- for people ---- */

const char *lg_machine_name(const struct lg_machine *m, char ret[LG_MACHINE_NAME_BYTES])
{
    snprintf(ret, LG_MACHINE_NAME_BYTES, "%s %d (%s)%s%s", m->host >= 0 ? "host" : "machine",
             m->host >= 0 ? m->host : m->place, m->address, m->own ? ", this one" : "",
             m->leads ? ", leads" : "");
    return ret;
}

const char *lg_machine_why_not(const struct lg_machine *m, char ret[LG_MACHINE_WHY_BYTES])
{
    if (m->under_way)
        snprintf(ret, LG_MACHINE_WHY_BYTES,
                 "has not said how it ended: it may still be carried out there");
    else if (!m->answered && m->silent_ms >= 0)
        snprintf(ret, LG_MACHINE_WHY_BYTES, "does not answer; silent for %.1f s",
                 (double)m->silent_ms / 1e3);
    else if (!m->answered)
        snprintf(ret, LG_MACHINE_WHY_BYTES, "does not answer");
    else if (m->code < 0)
        snprintf(ret, LG_MACHINE_WHY_BYTES, "%.*s", LG_MACHINE_WHY_BYTES - 1, m->text);
    else if (m->phase < LG_GROUP_member)
        snprintf(ret, LG_MACHINE_WHY_BYTES, "waits to take the number of a host that is lost");
    else
        return NULL;
    return ret;
}

int lg_elsewhere_missing(const lg_elsewhere *e, int from)
{
    for (int h = from; h < e->count; h++) {
        bool held = false;
        for (int i = 0; i < e->n; i++) held |= e->machine[i].host == h;
        if (!held) return h;
    }
    return -1;
}
