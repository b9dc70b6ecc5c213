/* Fuzz target: what a peer may send to lgsup's socket: a message of several parts, each of any length.
 * A sentinel follows, so that a run knows when all was received.
 *
 * Input: parts: length, 2 bytes, content. */
#include "bus/control.h"
#include "bus/socket.h"
#include "tests/fuzz/fuzz.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum { PARTS_MAX = 8, WAIT_MS = 2000, RECEIVE_MAX = 16 };
static const struct lg_message SENTINEL = {
    .kind = LG_MESSAGE_ping, .role = LG_ROLE_lgsup, .incarnation = 4242424, .text = "sentinel"};

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
        char *part = lg_fuzz_take(in, lg_fuzz_u16(in), &bytes);
        bool last = !in->bytes || i == PARTS_MAX - 1;
        LG_ASSERT(zmq_send(dealer, part, bytes, last ? 0 : ZMQ_SNDMORE) == (int)bytes);
        free(part);
        if (last) return;
    }
}

static bool is_sentinel(const struct lg_message *m)
{
    return m->kind == SENTINEL.kind && m->incarnation == SENTINEL.incarnation &&
           strcmp(m->text, SENTINEL.text) == 0;
}

/* Everything up to the sentinel; an accepted message is answered, as lgsup would. */
static void receive_all(void)
{
    struct lg_message m;
    struct lg_peer peer;
    for (int i = 0; i < RECEIVE_MAX; i++) {
        int rc = lg_control_receive(control, &peer, &m);
        LG_ASSERT(rc == 0 || rc == 1);
        if (rc == 1) {
            LG_ASSERT(peer.bytes > 0 && peer.bytes <= LG_PEER_BYTES);
            lg_control_answer(control, &peer, &m);
            if (is_sentinel(&m)) return;
            continue;
        }
        struct pollfd p = {.fd = lg_control_fd(control), .events = POLLIN};
        LG_ASSERT(poll(&p, 1, WAIT_MS) >= 0 || errno == EINTR); /* libFuzzer's timer */
    }
    LG_ASSERT(!"the sentinel arrives");
}

LG_FUZZ_TARGET(control)
{
    struct lg_fuzz_input in = {data, bytes};
    unsigned char packed[LG_MESSAGE_BYTES];
    if (!control) open_all();
    send_parts(&in);
    size_t n = lg_message_pack(&SENTINEL, packed);
    LG_ASSERT(zmq_send(dealer, packed, n, 0) == (int)n);
    receive_all();
    lg_socket_drain(dealer);
}
