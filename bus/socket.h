/* ZeroMQ sockets with this project's settings: linger 0, short queues, reconnects every 10 ms.
 * Internal to bus/. Addresses are files in the runtime directory. */
#pragma once
#include "base/check.h"

enum {
    LG_SOCKET_QUEUE_MAX = 64, /* messages: a reader that is behind needs only one wake-up */
    LG_SOCKET_RECONNECT_MS = 10,
    LG_IPC_PATH_MAX = 107, /* sun_path without its NUL */
};

/* ret gets "ipc://RUNTIME/name". LG_ERR_CONFIG when the path is longer than a socket's may be. */
int lg_socket_address(const char *runtime_dir, const char *name, char ret[LG_IPC_PATH_MAX + 8]);
/* Creates a socket of a ZMQ_ type. Caller closes it with zmq_close. */
int lg_socket_new(void *context, int type, void **ret);
/* Accepts processes of our own user alone. */
int lg_socket_bind(void *socket, const char *address);
int lg_socket_connect(void *socket, const char *address);
/* Receives and drops everything that is pending; returns how many messages. */
int lg_socket_drain(void *socket);
