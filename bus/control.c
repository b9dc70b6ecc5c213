/* lgsup's end of the line; see control.h. */
#include "bus/control.h"
#include "base/clock.h"
#include "bus/socket.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

struct lg_control {
    void *context, *router;
};

static int open_control(lg_control *c, const char *runtime_dir)
{
    char address[LG_IPC_PATH_MAX + 8];
    LG_TRY(lg_socket_address(runtime_dir, "lgsup", address));
    c->context = zmq_ctx_new();
    if (!c->context) return LG_FAIL(LG_ERR_IO, "no ZeroMQ context: %s", zmq_strerror(errno));
    LG_TRY(lg_socket_new(c->context, ZMQ_ROUTER, &c->router));
    /* A stage that comes back under the same name replaces its former connection. */
    int on = 1;
    LG_ASSERT(zmq_setsockopt(c->router, ZMQ_ROUTER_HANDOVER, &on, sizeof on) == 0);
    LG_TRY(lg_socket_bind(c->router, address));
    return 0;
}

int lg_control_listen_again(lg_control *c, const char *runtime_dir)
{
    char address[LG_IPC_PATH_MAX + 8];
    LG_TRY(lg_socket_address(runtime_dir, "lgsup", address));
    LG_TRY(lg_socket_bind(c->router, address));
    return 0;
}

int lg_control_open(const char *runtime_dir, lg_control **ret)
{
    lg_control *c = calloc(1, sizeof *c);
    if (!c) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the control socket");
    int rc = open_control(c, runtime_dir);
    if (rc < 0) {
        lg_control_close(&c);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = c;
    return 0;
}

void lg_control_close(lg_control **cp)
{
    lg_control *c = *cp;
    if (!c) return;
    if (c->router) zmq_close(c->router);
    if (c->context) zmq_ctx_term(c->context);
    free(c);
    *cp = NULL;
}

int lg_control_fd(lg_control *c)
{
    int fd = -1;
    size_t bytes = sizeof fd;
    LG_ASSERT(zmq_getsockopt(c->router, ZMQ_FD, &fd, &bytes) == 0);
    return fd;
}

static bool more_parts(void *socket)
{
    int more = 0;
    size_t bytes = sizeof more;
    return zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &bytes) == 0 && more;
}

/* One multi-part message: 1 well-formed, 0 none pending, LG_ERR_CORRUPT something else. */
static int receive_one(lg_control *c, struct lg_peer *ret_peer, struct lg_message *ret)
{
    unsigned char body[LG_MESSAGE_BYTES];
    ret_peer->order = 0;
    int id = zmq_recv(c->router, ret_peer->id, sizeof ret_peer->id, ZMQ_DONTWAIT);
    if (id < 0) return 0;
    ret_peer->bytes = LG_MIN((size_t)id, sizeof ret_peer->id);
    int n = -1, parts = 1;
    for (; more_parts(c->router); parts++) n = zmq_recv(c->router, body, sizeof body, ZMQ_DONTWAIT);
    if (parts != 2 || n < 0 || n > (int)sizeof body || (size_t)id > sizeof ret_peer->id)
        return LG_ERR_CORRUPT;
    int rc = lg_message_unpack(body, (size_t)n, ret);
    return rc < 0 ? rc : 1;
}

int lg_control_receive(lg_control *c, struct lg_peer *ret_peer, struct lg_message *ret)
{
    enum { MALFORMED_MAX = 1000 };
    for (int i = 0; i < MALFORMED_MAX; i++) {
        int rc = receive_one(c, ret_peer, ret);
        if (rc >= 0) return rc;
    }
    return 0;
}

static void send_to(lg_control *c, const void *id, size_t id_bytes, const struct lg_message *m)
{
    unsigned char bytes[LG_MESSAGE_BYTES];
    if (zmq_send(c->router, id, id_bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0)
        zmq_send(c->router, bytes, lg_message_pack(m, bytes), ZMQ_DONTWAIT);
}

void lg_control_answer(lg_control *c, const struct lg_peer *peer, const struct lg_message *m)
{
    LG_ASSERT(!peer->order);
    send_to(c, peer->id, peer->bytes, m);
}

void lg_control_nudge(lg_control *c, lg_role role, int index, lg_incarnation incarnation)
{
    char id[48];
    int n = snprintf(id, sizeof id, "%s.%d.%u", lg_role_name(role), index, incarnation);
    struct lg_message m = {.kind = LG_MESSAGE_nudge, .role = LG_ROLE_lgsup};
    send_to(c, id, (size_t)n, &m);
}

/* LG_ERR_TIMEOUT, without a trace: none came. LG_ERR_FAILED: the pidfd fired first. */
static int wait_answer(void *dealer, int pidfd, int timeout_ms, struct lg_message *ret)
{
    unsigned char bytes[LG_MESSAGE_BYTES];
    int64_t deadline_ns = lg_now_ns() + timeout_ms * LG_MS_NS;
    while (lg_now_ns() < deadline_ns) {
        zmq_pollitem_t item[] = {{.socket = dealer, .events = ZMQ_POLLIN},
                                 {.fd = pidfd, .events = ZMQ_POLLIN}};
        long left_ms = (long)((deadline_ns - lg_now_ns()) / LG_MS_NS) + 1;
        if (zmq_poll(item, pidfd >= 0 ? 2 : 1, left_ms) <= 0) continue;
        int n = zmq_recv(dealer, bytes, sizeof bytes, ZMQ_DONTWAIT);
        if (n >= 0 && n <= (int)sizeof bytes && lg_message_unpack(bytes, (size_t)n, ret) == 0)
            return 0;
        if (pidfd >= 0 && item[1].revents) return LG_ERR_FAILED;
    }
    return LG_ERR_TIMEOUT;
}

static int ask(void *context, const char *address, const struct lg_message *m,
               const struct lg_control_wait *w, struct lg_message *ret_answer)
{
    unsigned char bytes[LG_MESSAGE_BYTES];
    void *dealer;
    LG_TRY(lg_socket_new(context, ZMQ_DEALER, &dealer));
    int rc = lg_socket_connect(dealer, address);
    if (rc < 0) goto out;
    zmq_send(dealer, bytes, lg_message_pack(m, bytes), ZMQ_DONTWAIT);
    while ((rc = wait_answer(dealer, w->pidfd, w->say_ms, ret_answer)) == LG_ERR_TIMEOUT && w->say)
        w->say();
    if (rc == LG_ERR_TIMEOUT)
        rc = LG_FAIL(rc, "lgsup does not answer at %s within %d ms", address, w->say_ms);
    else if (rc < 0)
        rc = LG_FAIL(rc, "lgsup ended before it had answered: see `lgsup status`");
out:
    zmq_close(dealer);
    return rc;
}

int lg_control_order(const char *runtime_dir, const struct lg_message *m,
                     const struct lg_control_wait *w, struct lg_message *ret_answer)
{
    char address[LG_IPC_PATH_MAX + 8];
    LG_TRY(lg_socket_address(runtime_dir, "lgsup", address));
    void *context = zmq_ctx_new();
    if (!context) return LG_FAIL(LG_ERR_IO, "no ZeroMQ context: %s", zmq_strerror(errno));
    int rc = ask(context, address, m, w, ret_answer);
    zmq_ctx_term(context);
    return rc;
}

int lg_control_ask(const char *runtime_dir, const struct lg_message *m, int timeout_ms,
                   struct lg_message *ret_answer)
{
    LG_TRY(lg_control_order(
        runtime_dir, m, &(struct lg_control_wait){.pidfd = -1, .say_ms = timeout_ms}, ret_answer));
    return 0;
}
