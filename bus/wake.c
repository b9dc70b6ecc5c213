/* Wake-ups over ZeroMQ; see wake.h.
 *
 * One context with one I/O thread per process: a second thread only adds context switches on a
 * busy machine. A wake-up carries one byte; what happened stands in shared memory, so the reader
 * throws away everything that is pending and looks once.
 *
 * The DEALER's routing id is ROLE.INDEX.INCARNATION: lgsup can address a stage by what stands on
 * the board, also right after its own restart, when nobody has said hello to it. */
#include "bus/wake.h"
#include "base/clock.h"
#include "bus/message.h"
#include "bus/socket.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

struct lg_bus {
    void *context, *pub, *sub, *dealer;
    int also; /* a descriptor that wakes, too; -1: none */
    lg_role role;
    int index;
    lg_incarnation incarnation;
    char runtime_dir[LG_IPC_PATH_MAX + 1];
    bool follows[LG_ROLE_COUNT][LG_INSTANCES_MAX];
};

static const struct {
    lg_role from, to;
} g_edges[] = {
#define LG_EDGE(from, to) {LG_ROLE_##from, LG_ROLE_##to},
#include "bus/edges.def"
#undef LG_EDGE
};

static int wake_address(const char *runtime_dir, lg_role role, int index,
                        char ret[LG_IPC_PATH_MAX + 8])
{
    char name[32];
    snprintf(name, sizeof name, "wake.%s.%d", lg_role_name(role), index);
    return lg_socket_address(runtime_dir, name, ret);
}

int lg_bus_socket(const char *runtime_dir, lg_role role, int index, char ret[LG_PATH_BYTES])
{
    LG_TRY(lg_path(ret, "%s/wake.%s.%d", runtime_dir, lg_role_name(role), index));
    return 0;
}

static bool has_edge(lg_role from, lg_role to)
{
    for (size_t e = 0; e < LG_ARRAY_LEN(g_edges); e++)
        if (g_edges[e].from == from && g_edges[e].to == to) return true;
    return false;
}

int lg_bus_follow(lg_bus *b, lg_role role, int index, bool there)
{
    char address[LG_IPC_PATH_MAX + 8];
    LG_ASSERT(role < LG_ROLE_COUNT && index >= 0 && index < LG_INSTANCES_MAX);
    if (!has_edge(role, b->role) || (role == b->role && index == b->index)) return 0;
    if (b->follows[role][index] == there) return 0;
    LG_TRY(wake_address(b->runtime_dir, role, index, address));
    if (there)
        LG_TRY(lg_socket_connect(b->sub, address));
    else
        zmq_disconnect(b->sub, address); /* fails only when it was not connected */
    b->follows[role][index] = there;
    return 0;
}

static int open_wakes(lg_bus *b, const lg_plan *plan)
{
    char address[LG_IPC_PATH_MAX + 8];
    LG_TRY(lg_socket_new(b->context, ZMQ_PUB, &b->pub));
    LG_TRY(wake_address(b->runtime_dir, b->role, b->index, address));
    LG_TRY(lg_socket_bind(b->pub, address));
    LG_TRY(lg_socket_new(b->context, ZMQ_SUB, &b->sub));
    LG_ASSERT(zmq_setsockopt(b->sub, ZMQ_SUBSCRIBE, "", 0) == 0);
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        for (int i = 0; i < plan->instances[r]; i++) LG_TRY(lg_bus_follow(b, (lg_role)r, i, true));
    return 0;
}

static int open_line(lg_bus *b)
{
    char address[LG_IPC_PATH_MAX + 8], id[48];
    LG_TRY(lg_socket_new(b->context, ZMQ_DEALER, &b->dealer));
    int n = snprintf(id, sizeof id, "%s.%d.%u", lg_role_name(b->role), b->index, b->incarnation);
    LG_ASSERT(zmq_setsockopt(b->dealer, ZMQ_ROUTING_ID, id, (size_t)n) == 0);
    LG_TRY(lg_socket_address(b->runtime_dir, "lgsup", address));
    LG_TRY(lg_socket_connect(b->dealer, address));
    return 0;
}

static int open_bus(lg_bus *b, const struct lg_bus_spec *spec)
{
    if (strlen(spec->runtime_dir) >= sizeof b->runtime_dir)
        return LG_FAIL(LG_ERR_CONFIG, "the runtime directory's path is too long for a socket: %s",
                       spec->runtime_dir);
    strcpy(b->runtime_dir, spec->runtime_dir);
    b->role = spec->role;
    b->also = -1;
    b->index = spec->index;
    b->incarnation = spec->incarnation;
    b->context = zmq_ctx_new();
    if (!b->context) return LG_FAIL(LG_ERR_IO, "no ZeroMQ context: %s", zmq_strerror(errno));
    LG_ASSERT(zmq_ctx_set(b->context, ZMQ_IO_THREADS, 1) == 0);
    LG_TRY(open_wakes(b, spec->plan));
    LG_TRY(open_line(b));
    return 0;
}

int lg_bus_open(const struct lg_bus_spec *spec, lg_bus **ret)
{
    lg_bus *b = calloc(1, sizeof *b);
    if (!b) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the bus");
    int rc = open_bus(b, spec);
    if (rc < 0) {
        lg_bus_close(&b);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = b;
    return 0;
}

void lg_bus_close(lg_bus **bp)
{
    lg_bus *b = *bp;
    if (!b) return;
    void *sockets[] = {b->pub, b->sub, b->dealer};
    for (size_t i = 0; i < LG_ARRAY_LEN(sockets); i++)
        if (sockets[i]) zmq_close(sockets[i]);
    if (b->context) zmq_ctx_term(b->context);
    free(b);
    *bp = NULL;
}

void lg_bus_notify(lg_bus *b)
{
    static const char body[1] = {LG_MESSAGE_VERSION};
    zmq_send(b->pub, body, sizeof body, ZMQ_DONTWAIT);
}

void lg_bus_also(lg_bus *b, int fd)
{
    b->also = fd;
}

int lg_bus_wait(lg_bus *b, int timeout_ms)
{
    zmq_pollitem_t items[] = {{.socket = b->sub, .events = ZMQ_POLLIN},
                              {.socket = b->dealer, .events = ZMQ_POLLIN},
                              {.fd = b->also, .events = ZMQ_POLLIN}};
    const int n = (int)LG_ARRAY_LEN(items) - (b->also < 0);
    if (zmq_poll(items, n, timeout_ms) <= 0) return 0;
    return lg_socket_drain(b->sub) + lg_socket_drain(b->dealer) + (b->also >= 0) > 0;
}

static void tell(lg_bus *b, lg_message_kind kind, int level, const char *text)
{
    struct lg_message m = {.kind = kind,
                           .role = b->role,
                           .index = b->index,
                           .incarnation = b->incarnation,
                           .level = level};
    snprintf(m.text, sizeof m.text, "%s", text);
    unsigned char bytes[LG_MESSAGE_BYTES];
    zmq_send(b->dealer, bytes, lg_message_pack(&m, bytes), ZMQ_DONTWAIT);
}

void lg_bus_hello(lg_bus *b)
{
    tell(b, LG_MESSAGE_hello, 0, "");
}

void lg_bus_ready(lg_bus *b)
{
    tell(b, LG_MESSAGE_ready, 0, "");
}

void lg_bus_event(lg_bus *b, int level, const char *text)
{
    tell(b, LG_MESSAGE_event, level, text);
}
