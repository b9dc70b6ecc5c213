/* Fuzz target: what a peer may send to lgsup's socket: a message of several parts, each of any length.
 * A sentinel follows, so that a run knows when all was received. It is sent again from time to time:
 * a part above ZMQ_MAXMSGSIZE makes ZeroMQ hang up, and what stood behind it is lost.
 *
 * Input: parts: length, 2 bytes, content. */
#include "bus/control.h"
#include "base/clock.h"
#include "bus/socket.h"
#include "tests/fuzz/fuzz.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum { PARTS_MAX = 8, PART_BYTES_MAX = 1100, WAIT_MS = 20, LIMIT_S = 10 };
static struct lg_message sentinel = {
    .kind = LG_MESSAGE_ping, .role = LG_ROLE_lgsup, .text = "sentinel"}; /* incarnation: the run */

static lg_control *control;
static void *context, *dealer;

static void close_all(void)
{
    zmq_close(dealer);
    zmq_ctx_term(context);
    lg_control_close(&control);
}

static void open_all(void)
{
    char address[LG_IPC_PATH_MAX + 8];
    context = zmq_ctx_new();
    LG_ASSERT(context && lg_control_open(lg_fuzz_dir(), &control) == 0);
    LG_ASSERT(lg_socket_address(lg_fuzz_dir(), "lgsup", address) == 0);
    LG_ASSERT(lg_socket_new(context, ZMQ_DEALER, &dealer) == 0);
    LG_ASSERT(lg_socket_connect(dealer, address) == 0);
    atexit(close_all);
}

static void send_parts(struct lg_fuzz_input *in)
{
    for (int i = 0; i < PARTS_MAX; i++) {
        size_t bytes;
        char *part = lg_fuzz_take(in, lg_fuzz_u16(in) % PART_BYTES_MAX, &bytes);
        bool last = !in->bytes || i == PARTS_MAX - 1;
        LG_ASSERT(zmq_send(dealer, part, bytes, last ? 0 : ZMQ_SNDMORE) == (int)bytes);
        free(part);
        if (last) return;
    }
}

static void send_sentinel(void)
{
    unsigned char packed[LG_MESSAGE_BYTES];
    zmq_send(dealer, packed, lg_message_pack(&sentinel, packed), ZMQ_DONTWAIT);
}

static bool is_sentinel(const struct lg_message *m)
{
    return m->kind == sentinel.kind && m->incarnation == sentinel.incarnation &&
           strcmp(m->text, sentinel.text) == 0;
}

/* Everything up to the sentinel; an accepted message is answered, as lgsup would. */
static void receive_all(void)
{
    struct lg_message m;
    struct lg_peer peer;
    for (int64_t end_ns = lg_now_ns() + LIMIT_S * LG_S_NS; lg_now_ns() < end_ns;) {
        int rc = lg_control_receive(control, &peer, &m);
        LG_ASSERT(rc == 0 || rc == 1);
        if (rc == 1) {
            LG_ASSERT(peer.bytes > 0 && peer.bytes <= LG_PEER_BYTES);
            lg_control_answer(control, &peer, &m);
            if (is_sentinel(&m)) return;
            continue;
        }
        struct pollfd p = {.fd = lg_control_fd(control), .events = POLLIN};
        int n = poll(&p, 1, WAIT_MS);
        LG_ASSERT(n >= 0 || errno == EINTR); /* libFuzzer's timer */
        if (n == 0) send_sentinel();
    }
    LG_ASSERT(!"the sentinel arrives");
}

LG_FUZZ_TARGET(control)
{
    struct lg_fuzz_input in = {data, bytes};
    if (!control) open_all();
    sentinel.incarnation++;
    send_parts(&in);
    send_sentinel();
    receive_all();
    lg_socket_drain(dealer);
}
