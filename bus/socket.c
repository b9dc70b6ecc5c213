/* ZeroMQ sockets; see socket.h. */
#include "bus/socket.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

int lg_socket_address(const char *runtime_dir, const char *name, char ret[LG_IPC_PATH_MAX + 8])
{
    int n = snprintf(ret, LG_IPC_PATH_MAX + 8, "ipc://%s/%s", runtime_dir, name);
    if (n < 0 || n > LG_IPC_PATH_MAX + 6)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the socket path %s/%s is longer than %d bytes; set XDG_RUNTIME_DIR to a "
                       "shorter directory",
                       runtime_dir, name, LG_IPC_PATH_MAX);
    return 0;
}

int lg_socket_new(void *context, int type, void **ret)
{
    void *s = zmq_socket(context, type);
    if (!s) return LG_FAIL(LG_ERR_IO, "cannot make a ZeroMQ socket: %s", zmq_strerror(errno));
    const struct {
        int option, value;
    } settings[] = {
        {ZMQ_LINGER, 0},
        {ZMQ_SNDHWM, LG_SOCKET_QUEUE_MAX},
        {ZMQ_RCVHWM, LG_SOCKET_QUEUE_MAX},
        {ZMQ_RECONNECT_IVL, LG_SOCKET_RECONNECT_MS},
        {ZMQ_RECONNECT_IVL_MAX, 0},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(settings); i++)
        LG_ASSERT(zmq_setsockopt(s, settings[i].option, &settings[i].value, sizeof(int)) == 0);
    int64_t message_max = 1024;
    LG_ASSERT(zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &message_max, sizeof message_max) == 0);
    *ret = s;
    return 0;
}

/* libzmq asks the kernel (SO_PEERCRED) and hangs up on everybody else's processes, whatever the
 * directory's mode has become. */
int lg_socket_bind(void *socket, const char *address)
{
    uid_t me = geteuid();
    LG_ASSERT(zmq_setsockopt(socket, ZMQ_IPC_FILTER_UID, &me, sizeof me) == 0);
    if (zmq_bind(socket, address) != 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot bind %s: %s", address,
                       zmq_strerror(errno));
    return 0;
}

int lg_socket_connect(void *socket, const char *address)
{
    if (zmq_connect(socket, address) != 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot connect to %s: %s", address,
                       zmq_strerror(errno));
    return 0;
}

int lg_socket_drain(void *socket)
{
    char scrap[16];
    int n = 0;
    while (zmq_recv(socket, scrap, sizeof scrap, ZMQ_DONTWAIT) >= 0) n++;
    return n;
}
