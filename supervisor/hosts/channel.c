/* Sockets between supervisors; see channel.h. */
#include "supervisor/hosts/channel.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum {
    QUEUE_MAX = 8,      /* messages to one that does not take them: older ones say nothing new */
    LAST_WORD_MS = 100, /* how long the end waits for what has been said just now */
    HANDSHAKE_MS = 1000,
    CONNECT_MS = 1000,
    RECONNECT_MS = 50,
    RECONNECT_MS_MAX = 1000,
    BACKLOG = 512,
    SEALED_BYTES_MAX = 128, /* what CURVE adds to a message */
    ZAP_PART_BYTES = 256,
    ZAP_BATCH_MAX = 64,
    URL_BYTES = 3 * LG_HOST_ADDRESS_BYTES,
    RAW_KEY_BYTES = 32
};

struct lg_channel {
    void *context, *in, *zap;
    void *out[LG_PLACES_MAX];
    struct lg_channel_peer sender;
    int places;
    unsigned char key[RAW_KEY_BYTES]; /* the public one, which clients must have */
    int refused;
    char refused_who[LG_HOST_ADDRESS_BYTES];
};

static int set(void *socket, int option, int value)
{
    if (zmq_setsockopt(socket, option, &value, sizeof value) != 0)
        return LG_FAIL(LG_ERR_IO, "ZeroMQ option %d: %s", option, zmq_strerror(errno));
    return 0;
}

static int set_text(void *socket, int option, const char *text)
{
    if (zmq_setsockopt(socket, option, text, strlen(text)) != 0)
        return LG_FAIL(LG_ERR_IO, "ZeroMQ option %d: %s", option, zmq_strerror(errno));
    return 0;
}

static bool is_v6(const char *address)
{
    return strchr(address, ':') != NULL;
}

static const char *left(const char *address)
{
    return is_v6(address) ? "[" : "";
}

static const char *right(const char *address)
{
    return is_v6(address) ? "]" : "";
}

/* A peer that vanishes without a word is noticed by the kernel, from data that it does not confirm or by keep-alive, so that
 * a connection that is cut is made anew and not waited for. Not by ZeroMQ's own heartbeats: libzmq 4.3.4 aborts the process
 * where one is due on a connection that was closed while more had come than fits the queue (src/stream_engine_base.cpp,
 * "Assertion failed: !_io_error"), as after a machine that was stopped goes on. */
static int make(const struct lg_channel_spec *s, void *context, int type, void **ret)
{
    void *socket = zmq_socket(context, type);
    const int longest = type == ZMQ_ROUTER ? LG_CHANNEL_BYTES : LG_ANSWER_BYTES_MAX;
    int64_t message_max = longest + SEALED_BYTES_MAX;
    const struct {
        int option, value;
    } settings[] = {
        {ZMQ_LINGER, LAST_WORD_MS},
        {ZMQ_IPV6, is_v6(s->address[s->place])},
        {ZMQ_SNDHWM, QUEUE_MAX},
        {ZMQ_RCVHWM, QUEUE_MAX},
        {ZMQ_IMMEDIATE, 1},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS},
        {ZMQ_CONNECT_TIMEOUT, CONNECT_MS},
        {ZMQ_RECONNECT_IVL, RECONNECT_MS},
        {ZMQ_RECONNECT_IVL_MAX, RECONNECT_MS_MAX},
        {ZMQ_TCP_MAXRT, 2 * s->silence_ms},
        {ZMQ_TCP_KEEPALIVE, 1},
        {ZMQ_TCP_KEEPALIVE_IDLE, LG_MAX(s->silence_ms / 1000, 1)},
        {ZMQ_TCP_KEEPALIVE_INTVL, LG_MAX(s->silence_ms / 1000, 1)},
        {ZMQ_TCP_KEEPALIVE_CNT, 3},
        {ZMQ_BACKLOG, BACKLOG},
    };
    *ret = socket;
    if (!socket) return LG_FAIL(LG_ERR_IO, "cannot make a ZeroMQ socket: %s", zmq_strerror(errno));
    for (size_t i = 0; i < LG_ARRAY_LEN(settings); i++)
        LG_TRY(set(socket, settings[i].option, settings[i].value));
    if (zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &message_max, sizeof message_max) != 0)
        return LG_FAIL(LG_ERR_IO, "ZMQ_MAXMSGSIZE: %s", zmq_strerror(errno));
    LG_TRY(set_text(socket, ZMQ_CURVE_SECRETKEY, s->key.secret));
    return 0;
}

static int listen_at(lg_channel *c, const struct lg_channel_spec *s)
{
    char url[URL_BYTES];
    const char *own = s->address[s->place];
    LG_TRY(make(s, c->context, ZMQ_ROUTER, &c->in));
    LG_TRY(set(c->in, ZMQ_CURVE_SERVER, 1));
    LG_TRY(set_text(c->in, ZMQ_ZAP_DOMAIN, "lg"));
    for (int p = 0; p < s->places; p++) {
        char filter[LG_HOST_ADDRESS_BYTES + 8];
        snprintf(filter, sizeof filter, "%s/%d", s->address[p], is_v6(s->address[p]) ? 128 : 32);
        if (p != s->place) LG_TRY(set_text(c->in, ZMQ_TCP_ACCEPT_FILTER, filter));
    }
    snprintf(url, sizeof url, "tcp://%s%s%s:%d", left(own), own, right(own), s->port);
    if (zmq_bind(c->in, url) != 0)
        return LG_FAIL(LG_ERR_IO,
                       "cannot listen at %s: %s; is it an address of this machine (hosts.list, "
                       "hosts.number), and the port free (hosts.port)?",
                       url, zmq_strerror(errno));
    return 0;
}

/* From the address that the other one knows. */
static int connect_to(lg_channel *c, const struct lg_channel_spec *s, int place)
{
    char url[URL_BYTES];
    const char *own = s->address[s->place], *to = s->address[place];
    LG_TRY(make(s, c->context, ZMQ_DEALER, &c->out[place]));
    LG_TRY(set_text(c->out[place], ZMQ_CURVE_SERVERKEY, s->key.public_));
    LG_TRY(set_text(c->out[place], ZMQ_CURVE_PUBLICKEY, s->key.public_));
    snprintf(url, sizeof url, "tcp://%s%s%s:0;%s%s%s:%d", left(own), own, right(own), left(to), to,
             right(to), s->port);
    if (zmq_connect(c->out[place], url) != 0)
        return LG_FAIL(LG_ERR_CONFIG, "cannot connect to %s: %s", url, zmq_strerror(errno));
    return 0;
}

/* The handler stands before anything listens. */
static int open_all(lg_channel *c, const struct lg_channel_spec *s)
{
    c->context = zmq_ctx_new();
    c->zap = c->context ? zmq_socket(c->context, ZMQ_REP) : NULL;
    if (!c->zap || zmq_bind(c->zap, "inproc://zeromq.zap.01") != 0)
        return LG_FAIL(LG_ERR_IO, "ZeroMQ: %s", zmq_strerror(errno));
    LG_TRY(set(c->zap, ZMQ_LINGER, 0));
    LG_TRY(listen_at(c, s));
    for (int p = 0; p < s->places; p++)
        if (p != s->place) LG_TRY(connect_to(c, s, p));
    return 0;
}

static int open_asker(lg_channel *c, const struct lg_channel_spec *s)
{
    c->context = zmq_ctx_new();
    if (!c->context) return LG_FAIL(LG_ERR_IO, "ZeroMQ: %s", zmq_strerror(errno));
    for (int p = 0; p < s->places; p++) {
        if (p == s->place) continue;
        LG_TRY(connect_to(c, s, p));
        LG_TRY(set(c->out[p], ZMQ_LINGER, 0));
    }
    return 0;
}

static int open_by(int (*how)(lg_channel *, const struct lg_channel_spec *),
                   const struct lg_channel_spec *s, lg_channel **ret)
{
    lg_channel *c = calloc(1, sizeof *c);
    if (!c) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the line to other hosts");
    c->places = s->places;
    LG_ASSERT(zmq_z85_decode(c->key, s->key.public_) != NULL);
    const int rc = how(c, s);
    if (rc < 0) {
        lg_channel_close(&c);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = c;
    return 0;
}

int lg_channel_open(const struct lg_channel_spec *s, lg_channel **ret)
{
    LG_TRY(open_by(open_all, s, ret));
    return 0;
}

int lg_channel_open_asker(const struct lg_channel_spec *s, lg_channel **ret)
{
    LG_TRY(open_by(open_asker, s, ret));
    return 0;
}

void lg_channel_close(lg_channel **pc)
{
    lg_channel *c = *pc;
    *pc = NULL;
    if (!c) return;
    for (int p = 0; p < c->places; p++)
        if (c->out[p]) zmq_close(c->out[p]);
    if (c->in) zmq_close(c->in);
    if (c->zap) zmq_close(c->zap);
    if (c->context) zmq_ctx_term(c->context);
    free(c);
}

bool lg_channel_send(lg_channel *c, int place, const void *data, size_t bytes)
{
    LG_ASSERT(place >= 0 && place < c->places && c->out[place] && bytes <= LG_CHANNEL_BYTES);
    return zmq_send(c->out[place], data, bytes, ZMQ_DONTWAIT) >= 0;
}

/* ---- who may come in ---- */

struct zap_request {
    char id[ZAP_PART_BYTES], address[ZAP_PART_BYTES], mechanism[ZAP_PART_BYTES];
    int id_bytes;
    unsigned char key[RAW_KEY_BYTES];
    int key_bytes;
};

/* Parts: version, id, domain, address, identity, mechanism, credentials. False: none is there. */
static bool take_request(void *zap, struct zap_request *r)
{
    char scrap[ZAP_PART_BYTES];
    int more = 1;
    size_t bytes = sizeof more;
    memset(r, 0, sizeof *r);
    for (int part = 0; more; part++) {
        int n = part == 1   ? zmq_recv(zap, r->id, sizeof r->id - 1, ZMQ_DONTWAIT)
                : part == 3 ? zmq_recv(zap, r->address, sizeof r->address - 1, ZMQ_DONTWAIT)
                : part == 5 ? zmq_recv(zap, r->mechanism, sizeof r->mechanism - 1, ZMQ_DONTWAIT)
                : part == 6 ? zmq_recv(zap, r->key, sizeof r->key, ZMQ_DONTWAIT)
                            : zmq_recv(zap, scrap, sizeof scrap, ZMQ_DONTWAIT);
        if (n < 0) return false;
        if (part == 1) r->id_bytes = LG_MIN(n, (int)sizeof r->id - 1);
        if (part == 6) r->key_bytes = n;
        zmq_getsockopt(zap, ZMQ_RCVMORE, &more, &bytes);
    }
    return true;
}

static bool answer_one(lg_channel *c)
{
    struct zap_request r;
    if (!take_request(c->zap, &r)) return false;
    const bool welcome = !strcmp(r.mechanism, "CURVE") && r.key_bytes == RAW_KEY_BYTES &&
                         memcmp(r.key, c->key, RAW_KEY_BYTES) == 0;
    if (!welcome) {
        c->refused++;
        snprintf(c->refused_who, sizeof c->refused_who, "%.60s", r.address);
    }
    const struct {
        const void *data;
        size_t bytes;
    } part[] = {{"1.0", 3},
                {r.id, (size_t)r.id_bytes},
                {welcome ? "200" : "400", 3},
                {"", 0},
                {welcome ? "host" : "", welcome ? 4 : 0},
                {"", 0}};
    for (size_t i = 0; i < LG_ARRAY_LEN(part); i++)
        zmq_send(c->zap, part[i].data, part[i].bytes,
                 i + 1 < LG_ARRAY_LEN(part) ? ZMQ_SNDMORE | ZMQ_DONTWAIT : ZMQ_DONTWAIT);
    return true;
}

int lg_channel_refused(lg_channel *c, char ret_who[LG_HOST_ADDRESS_BYTES])
{
    const int n = c->refused;
    memcpy(ret_who, c->refused_who, sizeof c->refused_who);
    c->refused = 0;
    return n;
}

/* ---- receiving ---- */

/* A ROUTER puts in front by which connection it came: an answer goes by the same. */
size_t lg_channel_receive(lg_channel *c, void *ret, size_t room)
{
    char scrap[ZAP_PART_BYTES];
    for (int i = 0; i < ZAP_BATCH_MAX && answer_one(c); i++) {
    }
    const int id = zmq_recv(c->in, c->sender.id, sizeof c->sender.id, ZMQ_DONTWAIT);
    if (id < 0) return 0;
    c->sender.bytes = LG_MIN((size_t)id, sizeof c->sender.id);
    int n = 0, more = 0;
    size_t bytes = sizeof more, got = 0;
    zmq_getsockopt(c->in, ZMQ_RCVMORE, &more, &bytes);
    for (int part = 0; more; part++) {
        n = part ? zmq_recv(c->in, scrap, sizeof scrap, ZMQ_DONTWAIT)
                 : zmq_recv(c->in, ret, room, ZMQ_DONTWAIT);
        if (n < 0) return 0;
        if (!part) got = LG_MIN((size_t)n, room);
        zmq_getsockopt(c->in, ZMQ_RCVMORE, &more, &bytes);
    }
    return LG_MAX(got, (size_t)1); /* an empty one is one, too, that makes no sense */
}

void lg_channel_sender(const lg_channel *c, struct lg_channel_peer *ret)
{
    *ret = c->sender;
}

/* Who has gone meanwhile gets nothing; who does not read loses it. */
void lg_channel_answer(lg_channel *c, const struct lg_channel_peer *to, const void *data,
                       size_t bytes)
{
    LG_ASSERT(bytes <= LG_ANSWER_BYTES_MAX);
    if (zmq_send(c->in, to->id, to->bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(c->in, data, bytes, ZMQ_DONTWAIT);
}

size_t lg_channel_take(lg_channel *c, int place, void *ret, size_t room)
{
    const int n = zmq_recv(c->out[place], ret, room, ZMQ_DONTWAIT);
    return n < 0 ? 0 : LG_MIN((size_t)n, room);
}

void lg_channel_wait_for_answers(lg_channel *c, int timeout_ms)
{
    zmq_pollitem_t item[LG_PLACES_MAX];
    int n = 0;
    for (int p = 0; p < c->places; p++)
        if (c->out[p]) item[n++] = (zmq_pollitem_t){.socket = c->out[p], .events = ZMQ_POLLIN};
    zmq_poll(item, n, timeout_ms);
}

void lg_channel_wait(lg_channel *c, int wake_fd, int timeout_ms)
{
    zmq_pollitem_t item[] = {{.socket = c->in, .events = ZMQ_POLLIN},
                             {.socket = c->zap, .events = ZMQ_POLLIN},
                             {.fd = wake_fd, .events = ZMQ_POLLIN}};
    zmq_poll(item, LG_ARRAY_LEN(item), timeout_ms);
}
